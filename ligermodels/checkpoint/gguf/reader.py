"""Reads a GGUF file under Hugging Face's names, one tensor at a time.

config.json and the tokenizer's files are made from the metadata. Quantised tensors are dequantised to fp32 by the gguf
package. The checkpoint has the dtype of the matrices. Vectors, routers and convolutions, which are fp32 in every file,
get that dtype too where written again they would have the same bits. So bf16 norms and A_log come back as bf16.
Where all experts of a gpt-oss are in MXFP4, the folder has them as its released files do, with their bits: so they stay
in 4 bits in a model that is loaded (checkpoint/mxfp4.py).
rope_freqs must be Llama 3's rule, with its usual numbers or those that our writer puts beside it.
"""

import functools
import itertools
import math
import mmap
import os
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from ligermodels.checkpoint.files import json_bytes, read_errors
from ligermodels.checkpoint.gguf import gpt_oss
from ligermodels.checkpoint.gguf.config import ROPE_TABLES, Metadata, config_of, sizes_of, whole
from ligermodels.checkpoint.gguf.layout import Layout
from ligermodels.checkpoint.gguf.tokenizer import token_ids, tokenizer_files
from ligermodels.checkpoint.weights import TensorInfo, same_bits
from ligermodels.errors import CheckpointError, ConfigError
from ligermodels.kernels.linear.mxfp4 import BLOCK

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 20: "IQ4_NL", 23: "IQ4_XS", 30: "BF16", 39: "MXFP4",
}  # fmt: skip
"""{number of a tensor's type: its name}."""

_ARRAYS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY, _FLOAT32 = 8, 9, 6
_SPLIT = "  Next: join its parts with llama.cpp: llama-gguf-split --merge FIRST_PART WHOLE.gguf"


def package() -> Any:
    """The `gguf` package. Raises ConfigError where it is missing."""
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            "Quantised GGUF files are read, and all are written, by the gguf package, which is missing.\n"
            "  Next: pip install 'ligermodels[gguf]'"
        ) from error
    return gguf


class _Stored(NamedTuple):
    """A tensor of the file: its type, its shape and the offset of its bytes."""

    type: str
    shape: tuple[int, ...]
    start: int


class GgufFile:
    """The header of a GGUF file: metadata {key: value}, and tensors {name: type, shape, offset}. The file is mapped.

    The gguf package's own reader takes seconds for a vocabulary of usual size.
    Raises CheckpointError for a file that is damaged, cut short, or has a tensor of a type that is not read.
    """

    def __init__(self, path: Path):
        self.path, self._at = path, 8
        with read_errors(path), path.open("rb") as file:
            start = file.read(8)
            if start[:4] != b"GGUF":
                raise CheckpointError(f"{path} is not a GGUF file. Likely: a download that failed; fetch it again.")
            if start[4:] not in (b"\2\0\0\0", b"\3\0\0\0"):
                raise CheckpointError(f"{path} is a GGUF file of version {start[4:].hex()}; 2 and 3 are read")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        try:
            count, keys = self._unpack("<QQ")
            self.metadata = {self._string(): self._value(*self._unpack("<I")) for _ in range(keys)}
            tensors = [self._tensor() for _ in range(count)]
        except (struct.error, ValueError, KeyError, OverflowError, MemoryError) as error:
            raise CheckpointError(f"{path}: its header is damaged or cut short; fetch it again. ({error})") from error
        if (parts := whole(self.metadata.get("split.count", 0), "split.count", path, least=0)) > 1:
            raise CheckpointError(f"{path} is one of {parts} parts of a model.\n{_SPLIT}")
        alignment = whole(self.metadata.get("general.alignment", 32), "general.alignment", path)
        data = -(-self._at // alignment) * alignment
        self.tensors = {name: stored._replace(start=data + stored.start) for name, stored in tensors}
        end = max((stored.start + self.nbytes(stored) for stored in self.tensors.values()), default=0)
        if end > len(self._map):
            raise CheckpointError(f"{path} is cut short: {len(self._map):,} of {end:,} bytes; fetch it again.")

    def nbytes(self, stored: _Stored) -> int:
        """The size of a tensor in the file."""
        elements = math.prod(stored.shape)
        if stored.type in FLOATS:
            return elements * FLOATS[stored.type].itemsize
        gguf = package()
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[stored.type]]
        return elements // block * size

    def read(self, stored: _Stored) -> Tensor:
        """A view of the mapped file or, of a quantised tensor, its values as fp32."""
        if stored.type in FLOATS:
            dtype, count = FLOATS[stored.type], math.prod(stored.shape)
            return torch.frombuffer(self._map, dtype=dtype, count=count, offset=stored.start).reshape(stored.shape)
        gguf = package()
        rows = self.bytes_of(stored).reshape(math.prod(stored.shape[:-1]), -1)
        values = gguf.dequantize(rows, gguf.GGMLQuantizationType[stored.type])
        return torch.from_numpy(values).reshape(stored.shape)

    def packed(self, stored: _Stored) -> Tensor:
        """The bytes of a quantised tensor, a row of them per row, [..., bytes] uint8: a view of the mapped file."""
        return torch.from_numpy(self.bytes_of(stored)).view(*stored.shape[:-1], -1)

    def bytes_of(self, stored: _Stored) -> np.ndarray:
        """A view of a tensor's bytes in the mapped file, [n] uint8."""
        return np.frombuffer(self._map, np.uint8, self.nbytes(stored), stored.start)

    def _unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self._map, self._at)
        self._at += struct.calcsize(form)
        return values

    def _string(self) -> str:
        (size,) = self._unpack("<Q")
        self._at += size
        if self._at > len(self._map):
            raise ValueError("a string is longer than the file")
        return self._map[self._at - size : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._unpack("<IQ")
            return self._numbers(item, count).tolist() if item in _ARRAYS else [self._value(item) for _ in range(count)]
        value = self._numbers(kind, 1)[0]
        return float(str(value)) if kind == _FLOAT32 else value.item()  # 1e-05, and not 9.99999974738e-06

    def _numbers(self, kind: int, count: int) -> np.ndarray:
        values = np.frombuffer(self._map, _ARRAYS[kind], count, self._at)
        self._at += values.nbytes
        return values

    def _tensor(self) -> tuple[str, _Stored]:
        name, (dims,) = self._string(), self._unpack("<I")
        shape, (kind, start) = self._unpack(f"<{dims}Q"), self._unpack("<IQ")
        if kind not in TYPES:
            raise CheckpointError(
                f"{self.path}: {name} is quantised as type {kind}, which is not read; supported: "
                f"{', '.join(TYPES.values())}.\n  Next: take another file of this model."
            )
        return name, _Stored(TYPES[kind], shape[::-1], start)


class GgufReader:
    """A GGUF file under Hugging Face's names: a context manager and a `weights.Reader`.

    headers: {name: TensorInfo}, in the one dtype of the checkpoint, uint8 for experts that stay in MXFP4.
    types: {name: type in the file, such as "Q4_0"} of the others. is_mapped: as in `reading`.
    Raises CheckpointError, HubError, and ConfigError for an architecture or a configuration that is not computed here.
    """

    is_mapped = os.name != "nt"

    def __init__(self, path: Path):
        self.source, self._file = str(path), GgufFile(path)
        if self._file.metadata.get("general.type") == "adapter":
            raise CheckpointError(
                f"{path} holds a LoRA adapter, which llama.cpp adds to the file of its base (--lora).\n"
                "  Next: here, use the folder that it was converted from."
            )
        if self._file.metadata.get("general.architecture") == "clip":
            raise CheckpointError(
                f"{path} holds a vision tower (mmproj), which is read beside the GGUF file of its text.\n"
                "  Next: give a folder with these two files."
            )
        self._metadata = Metadata(self._file.metadata, str(path))
        self._layout = Layout(str(self._metadata.arch), self._metadata.model_type, sizes_of(self._metadata))
        self._stored: dict[str, list[_Stored]] = {}  # the parts of the rows: one, but for a few tensors
        for theirs, stored in self._file.tensors.items():
            if theirs in ROPE_TABLES:
                continue
            names = self._layout.ours(theirs)
            if "{}" not in names[0]:
                self._stored[names[0]] = [stored]
                if len(places := self._layout.parts(theirs)) > 1:
                    self._stored[names[0]] = [self._part(place, names[0]) for place in places]
                continue
            experts, rows, *others = stored.shape
            size = self._file.nbytes(stored) // (experts * len(names))
            part = stored._replace(shape=(rows // len(names), *others))
            for i, (expert, name) in enumerate(itertools.product(range(experts), names)):
                self._stored[name.format(expert)] = [part._replace(start=stored.start + i * size)]
        stored_types = ((name, {part.type for part in parts}) for name, parts in self._stored.items())
        self._packed = gpt_oss.packed(stored_types) if self._metadata.arch == "gpt-oss" else []
        self.types = {name: parts[0].type for name, parts in self._stored.items() if name not in self._packed}
        self.headers = self._headers()
        self.metadata: dict[str, str] = {}

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU, in memory of its own: mapped from the file, or new."""
        if name in self._stored:
            return self._values(name).to(self.headers[name].dtype)
        weight, _, kind = name.rpartition("_")
        parts = [self._file.packed(part) for part in self._stored[weight]]
        experts = zip(*parts, strict=True)  # one by one: the codes of all take four times their bytes
        each = ([gpt_oss.from_file(part[None])[kind == "scales"] for part in expert] for expert in experts)
        return torch.cat([self._layout.join(weight, expert) for expert in each])

    @property
    def arch(self) -> str:
        """llama.cpp's name of the architecture."""
        return str(self._metadata.arch)

    @property
    def sections(self) -> list[int]:
        """How many rotary frequencies take the time, the row and the column of an image's token; [] in other texts."""
        return self._metadata.items_of("rope.dimension_sections", [])[:3]

    @property
    def tokens(self) -> list[str]:
        """The vocabulary; [] without one."""
        return list(self._file.metadata.get("tokenizer.ggml.tokens", []))

    def files(self) -> dict[str, bytes]:
        """config.json, generation_config.json and the tokenizer's files."""
        tables = {name: self._file.read(stored) for name, stored in self._file.tensors.items() if name in ROPE_TABLES}
        config = config_of(self._metadata, self.headers, tables)
        if self._packed:
            config["quantization_config"] = {"quant_method": "mxfp4"}
        files = {"config.json": json_bytes(config)}
        if ids := token_ids(self._file.metadata, self.source):
            files["generation_config.json"] = json_bytes(ids)
        return files | tokenizer_files(self._file.metadata, self._metadata.model_type, self.source)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def _part(self, theirs: str, ours: str) -> _Stored:
        """The tensor with this name in the file. Raises CheckpointError."""
        if (stored := self._file.tensors.get(theirs)) is None:
            raise CheckpointError(f"{self.source} lacks {theirs}, a part of {ours}. Is the file whole?")
        return stored

    def _in_file(self, name: str) -> Tensor:
        """The values as they are in the file, without the layout's change."""
        return self._layout.join(name, [self._file.read(part) for part in self._stored[name]])

    def _values(self, name: str) -> Tensor:
        """The values under Hugging Face's name, in the dtype of the file."""
        tensor, change = self._in_file(name), self._layout.change(name)
        if change is None:
            return tensor
        if name.endswith("A_log") and (tensor > 0).any():
            raise CheckpointError(f"{self.source}: the values of {name} in the file are above 0; -exp(A_log) is not")
        return change.read(tensor)

    def _headers(self) -> dict[str, TensorInfo]:
        """The dtype of the matrices for all; of a kind of small tensor, fp32 where that dtype changes a value."""
        kinds: dict[str, list[str]] = {}
        stored = {name: parts for name, parts in self._stored.items() if name not in self._packed}
        for name, parts in stored.items():
            if self._layout.is_float32(name, parts[0].shape):
                kinds.setdefault(re.sub(r"\d+", "N", name), []).append(name)
        small = {name for names in kinds.values() for name in names}
        matrices = [part for name, parts in stored.items() if name not in small for part in parts]
        dtypes = {FLOATS.get(part.type, torch.float32) for part in matrices}
        if not dtypes:
            raise CheckpointError(f"{self.source} holds no matrices. Is it a model, and not a vocabulary alone?")
        dtype = functools.reduce(torch.promote_types, dtypes)
        by_name = dict.fromkeys(stored, dtype)
        for names in kinds.values():
            if dtype == torch.float32 or not all(self._is_exact(name, dtype) for name in names):
                by_name |= dict.fromkeys(names, torch.float32)
        headers = {name: TensorInfo(of, self._shape(name)) for name, of in by_name.items()}
        for name in self._packed:
            experts, columns, rows = self._shape(name)
            shape = experts, rows, columns // BLOCK
            headers[f"{name}_blocks"] = TensorInfo(torch.uint8, (*shape, BLOCK // 2))
            headers[f"{name}_scales"] = TensorInfo(torch.uint8, shape)
        return headers

    def _is_exact(self, name: str, dtype: torch.dtype) -> bool:
        """Whether a tensor of `dtype` would be written to the file with the bits that it has there."""
        values, change = self._values(name).to(dtype), self._layout.change(name)
        again = change.write(values) if change else values
        return same_bits(again.float(), self._in_file(name).float())

    def _shape(self, name: str) -> tuple[int, ...]:
        parts, change = self._stored[name], self._layout.change(name)
        joined = self._layout.join(name, [torch.empty(part.shape, device="meta") for part in parts])
        return tuple((change.read(joined) if change else joined).shape)
