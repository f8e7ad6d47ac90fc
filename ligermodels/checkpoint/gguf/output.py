"""A GGUF file that is planned from headers, written tensor by tensor, and compared with its sources.

Matrices are quantised by the gguf package, some rows at a time: a tensor is never in memory as fp32. A block of 32
values of a row shares one scale (Q8_0, Q5_0, Q4_0), or a scale and a minimum (Q5_1, Q4_1), in fp16:

    bits per weight   Q8_0 8.5   Q5_1 6   Q5_0 5.5   Q4_1 5   Q4_0 4.5

Which tensors are quantised is decided as llama-quantize does, but for one type that the gguf package cannot write:

    output.weight, or token_embd.weight where the head is tied    Q6_K there, Q8_0 here, which is more exact
    attn_v, attn_k, attn_qkv of a model of 8 experts              Q8_0
    experts that are in MXFP4 in the checkpoint (gpt-oss)         MXFP4, the same bits
    norms, biases, routers, convolutions, other vectors           F32
    small projections of Gemma 3n and 4 (per_layer_model_proj)    as in the checkpoint
    rows whose length is no multiple of 32                        F16

Checked against: gguf 0.19 (quants.py, gguf_writer.py), src/llama-quant.cpp of llama.cpp.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ligermodels.checkpoint.files import GGUF
from ligermodels.checkpoint.gguf.reader import FLOATS, GgufFile, package
from ligermodels.checkpoint.weights import TensorInfo
from ligermodels.errors import CheckpointError, InputError

_TYPES = {dtype: name for name, dtype in FLOATS.items()}
_FILE_TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16"}
EXPERT = re.compile(r"\.experts\.(\d+)\.")
BLOCK = 32
"""Values of a row that are quantised together."""
_CHUNK = 1 << 22  # elements that are quantised at a time, from fp32
_LARGEST = torch.finfo(torch.float16).max
_AS_THEY_ARE = ("per_layer_model_proj", "altup", "laurel")
_VALUES = ("attn_v.weight", "attn_k.weight", "attn_qkv.weight")


@dataclass(frozen=True)
class OutTensor:
    """A tensor to write.

    type: gguf's name, such as "F16" or "Q8_0". shape: of the values, rows last.
    parts: reads its values, [..., columns], or the bytes of MXFP4, in the order of the file; they may be mapped, so
        must not be written to.
    """

    type: str
    shape: tuple[int, ...]
    parts: Callable[[], Iterable[Tensor]]

    @property
    def nbytes(self) -> int:
        gguf = package()
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.type]]
        return math.prod(self.shape) // block * int(size)


def file_type(tensors: Mapping[str, OutTensor], quantised: str | None = None) -> int:
    """general.file_type: MXFP4 if experts are, or else `quantised`, or the type of most bytes of the matrices."""
    types = package().LlamaFileType
    if any(tensor.type == "MXFP4" for tensor in tensors.values()):
        return int(types.MOSTLY_MXFP4_MOE)
    if quantised:
        return int(types[f"MOSTLY_{quantised}"])
    sizes = Counter[str]()
    for tensor in tensors.values():
        sizes[tensor.type] += tensor.nbytes * (len(tensor.shape) > 1)
    return int(types[_FILE_TYPES[sizes.most_common(1)[0][0]]])


def expert_of(source: str) -> int:
    """The number of the expert of a tensor with Hugging Face's name; 0 for other tensors."""
    match = EXPERT.search(source)
    return int(match[1]) if match else 0


class GgufOutput:
    """A GGUF file to write.

    writer: a GGUFWriter with the metadata. tensors: {name: OutTensor} in file order. name: general.name.
    headers: {name: TensorInfo}, of a quantised tensor that of its values. types: {name: type} of the quantised ones.
    """

    def __init__(self, writer: Any, tensors: Mapping[str, OutTensor], name: str):
        self._writer, self._tensors, self.name = writer, tensors, name
        writer.add_name(name)
        self.headers = {
            name: TensorInfo(FLOATS.get(tensor.type, torch.float32), tensor.shape) for name, tensor in tensors.items()
        }
        self.types = {name: tensor.type for name, tensor in tensors.items() if tensor.type not in FLOATS}
        kinds = package().GGMLQuantizationType
        for name, tensor in tensors.items():
            writer.add_tensor_info(name, tensor.shape, np.dtype("float32"), tensor.nbytes, raw_dtype=kinds[tensor.type])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def write(self, folder: Path) -> None:
        """Writes model.gguf into `folder`, a part of a tensor at a time. It may be called once.

        Raises CheckpointError for values that the type of their tensor cannot hold.
        """
        writer = self._writer
        try:
            writer.write_header_to_file(folder / GGUF)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            (file,) = writer.fout
            for name, tensor in self._tensors.items():
                writer.write_padding(file, file.tell())
                for piece in _encoded(name, tensor):
                    file.write(piece)
                writer.write_padding(file, tensor.nbytes)
        finally:
            writer.close()

    def compare(self, folder: Path, *, level: str) -> list[str]:
        """The mismatches of the file as it is read back. level: "keys" (metadata, names, shapes, types) or "bytes"."""
        file = GgufFile(folder / GGUF)
        mismatches = [
            f"metadata {key}: differs from what was to be written"
            for key, value in self._writer.kv_data[0].items()
            if not _equal(file.metadata.get(key), value.value)
        ]
        for name, tensor in self._tensors.items():
            stored = file.tensors.get(name)
            if stored is None or (stored.type, stored.shape) != (tensor.type, tensor.shape):
                mismatches.append(f"{name}: is {stored} in the file, expected {tensor.type} {tensor.shape}")
            elif level == "bytes":
                data, at, same = file.bytes_of(stored), 0, True
                for piece in _encoded(name, tensor):
                    same = same and np.array_equal(data[at : at + piece.size], piece)
                    at += piece.size
                mismatches += [f"{name}: values differ"] * (not same)
        return mismatches


def quantised_type(name: str, shape: tuple[int, ...], kind: str, *, own: str, tied: bool, experts: int) -> str:
    """The type of a matrix where a file is quantised as `kind`: the table in the docstring of this file.

    own: the type of the tensor in a file that is not quantised. tied: whether the embedding is the head as well.
    """
    if not name.endswith("weight") or any(part in name for part in _AS_THEY_ARE):
        return own
    if shape[-1] % BLOCK:
        return "F16"
    if name == "output.weight" or (tied and name == "token_embd.weight"):
        return "Q8_0"
    return "Q8_0" if experts == 8 and name.endswith(_VALUES) else kind


def _encoded(name: str, tensor: OutTensor) -> Iterator[np.ndarray]:
    """The bytes of a tensor in the file, piece by piece, [n] uint8."""
    for part in tensor.parts():
        if tensor.type == "MXFP4":
            yield part.reshape(-1).numpy()
            continue
        if tensor.type in FLOATS:
            values = part.to(FLOATS[tensor.type])
            if tensor.type == "F16" and part.dtype != torch.float16:
                _check_range(name, part)
            yield values.contiguous().reshape(-1).view(torch.uint8).numpy()
            continue
        gguf = package()
        for matrix in part if part.dim() > 2 else [part]:
            for rows in matrix.split(max(1, _CHUNK // matrix.shape[1])):
                values = rows.float()
                _check_range(name, values)
                yield gguf.quantize(values.numpy(), gguf.GGMLQuantizationType[tensor.type]).reshape(-1)


def _check_range(name: str, values: Tensor) -> None:
    """Raises CheckpointError for values that fp16, also of a scale, cannot hold."""
    low, high = (float(x) for x in torch.aminmax(values))
    if not -_LARGEST <= low <= high <= _LARGEST:  # also for NaN
        raise CheckpointError(
            f"{name} holds values from {low:.6g} to {high:.6g}, and fp16, also as the scale of quantised values, ends "
            f"at {_LARGEST:.6g}.\n  Next: check the checkpoint for NaN, or give --dtype bf16 or f32."
        )


def float_type(name: str, dtype: torch.dtype) -> str:
    """The type of a file with this dtype. Raises InputError for one that llama.cpp does not compute with."""
    if dtype not in _TYPES:
        raise InputError(f"{name} is {dtype}, which llama.cpp does not compute with; give dtype (--dtype fp32)")
    return _TYPES[dtype]


def _equal(value: Any, expected: Any) -> bool:
    """Whether a value is the one written: text may have been given as bytes, numbers are rounded to float32."""
    if isinstance(expected, float):
        return value is not None and bool(np.float32(value) == np.float32(expected))
    if isinstance(expected, list | tuple) and isinstance(value, list) and len(value) == len(expected):
        return all(map(_equal, value, expected))
    return bool(value == (expected.decode() if isinstance(expected, bytes) else expected))
