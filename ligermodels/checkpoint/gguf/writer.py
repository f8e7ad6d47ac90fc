"""Writes GGUF files. What llama.cpp does not support is refused: no file is written that runs with another output.

Three things differ in llama.cpp, whatever is written, and a warning names each: it ignores the sliding windows of all
models but Gemma 2 and the NFC of Qwen2's tokenizer, and chooses LongRoPE's table by the size of its context,
not by the length of the text.
"""

import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ligermodels.checkpoint.files import GGUF
from ligermodels.checkpoint.gguf.config import FAMILIES, ROPE_TABLES, check, llama3_divisors, metadata_of
from ligermodels.checkpoint.gguf.gemma4 import tables_of
from ligermodels.checkpoint.gguf.layout import DELTA_NETS, ONE_MORE, Change, Layout
from ligermodels.checkpoint.gguf.reader import FLOATS, GgufFile, package
from ligermodels.checkpoint.gguf.vocabulary import add_tokenizer
from ligermodels.checkpoint.weights import TensorInfo, same_bits
from ligermodels.errors import ConfigError, InputError

_TYPES = {dtype: name for name, dtype in FLOATS.items()}
_FILE_TYPES = {torch.float32: "ALL_F32", torch.float16: "MOSTLY_F16", torch.bfloat16: "MOSTLY_BF16"}
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_TOWER = "model.visual."
_PHI3 = re.compile("phi-?3", re.IGNORECASE)
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


@dataclass(frozen=True)
class _Plan:
    """How a tensor of the file is made: of tensors of the source, which are stacked if they are experts', or a `table`.

    change: None if the values are stored as they are.
    """

    info: TensorInfo
    sources: tuple[str, ...] = ()
    stacked: bool = False
    change: Change | None = None
    table: Tensor | None = None


class GgufTarget:
    """A GGUF file to write, planned from headers and the tokenizer's files.

    view: the source, a `conversion.source.View`, in the dtypes that are stored. open_tokenizer: makes the Tokenizer of
    a folder. dtype: of the matrices; None keeps theirs. name: of the model, for people; the attribute is the one that
    is written. headers: {name: TensorInfo} in file order.
    Raises ConfigError (a model that llama.cpp does not compute, or no gguf package), InputError (float64 kept),
    CheckpointError (no tokenizer), TokenizerError (a tokenizer that llama.cpp has no counterpart for).
    """

    def __init__(
        self, view: Any, open_tokenizer: Callable[[Path], Any], *, dtype: torch.dtype | None = None, name: str = ""
    ):
        gguf, config, rotary = package(), view.model.config, view.model.decoder.rotary_emb
        self._view = view
        check(view.model, view.source)
        arch, _ = FAMILIES[config.model_type]
        _warn_of_losses(view, arch)
        self._plans = _plan(view, arch, dtype)
        self.headers: Mapping[str, TensorInfo] = {name: plan.info for name, plan in self._plans.items()}
        sizes = Counter[torch.dtype]()
        for info in self.headers.values():
            sizes[info.dtype] += info.nbytes * (len(info.shape) > 1)
        self._writer = writer = gguf.GGUFWriter(None, arch)
        writer.add_type("model")
        writer.add_file_type(getattr(gguf.LlamaFileType, _FILE_TYPES[sizes.most_common(1)[0][0]]))
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add[bool] = writer.add_bool
        blocks = {name.split(".")[1] for name in self.headers if name.startswith("blk.")}
        mtp_layers = len(blocks) - config.num_hidden_layers
        for key, value in metadata_of(config, rotary, mtp_layers).items():
            add[type(value)](f"{arch}.{key}", value)
        strips = add_tokenizer(writer, view.files(), open_tokenizer, config.vocab_size, view.source)
        self.name = _named(name, strips)
        writer.add_name(self.name)
        for tensor, info in self.headers.items():
            kind = getattr(gguf.GGMLQuantizationType, _TYPES[info.dtype])
            writer.add_tensor_info(tensor, info.shape, np.dtype("float32"), info.nbytes, raw_dtype=kind)

    def write(self, folder: Path) -> None:
        """Writes model.gguf into `folder`, one tensor at a time. It may be called once."""
        writer = self._writer
        try:
            writer.write_header_to_file(folder / GGUF)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name in self.headers:
                writer.write_tensor_data(self._read(name).contiguous().reshape(-1).view(torch.uint8).numpy())
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
        for name, info in self.headers.items():
            stored = file.tensors.get(name)
            if stored is None or (stored.type, stored.shape) != (_TYPES[info.dtype], info.shape):
                mismatches.append(f"{name}: is {stored} in the file, expected {info}")
            elif level == "bytes" and not same_bits(file.read(stored), self._read(name)):
                mismatches.append(f"{name}: values differ")
        return mismatches

    def _read(self, name: str) -> Tensor:
        """The tensor to write; mapped from the source where nothing changes, so it must not be written to."""
        plan = self._plans[name]
        if plan.table is not None:
            return plan.table
        if plan.stacked:
            whole = torch.empty(plan.info.shape, dtype=plan.info.dtype)
            for box, source in zip(whole, plan.sources, strict=True):
                box.copy_(self._view.read(source))
            return whole
        tensor = self._view.read(plan.sources[0])
        return (plan.change.write(tensor) if plan.change else tensor).to(plan.info.dtype)


def _plan(view: Any, arch: str, dtype: torch.dtype | None) -> dict[str, _Plan]:
    """{name in the file: how it is made}, tables first."""
    config, rope = view.model.config, view.model.config.ropes["full"]
    layout = Layout(arch, config.model_type, vars(config))
    tables = tables_of(config)
    if rope["rope_type"] == "llama3":
        tables[ROPE_TABLES[0]] = llama3_divisors(rope, view.model.decoder.rotary_emb.dim)
    if rope["rope_type"] == "longrope":
        tables = dict(zip(ROPE_TABLES[1:], (rope["long_factor"], rope["short_factor"]), strict=True))
    plans: dict[str, _Plan] = {}
    for name, values in tables.items():
        table = torch.tensor(values, dtype=torch.float32)
        plans[name] = _Plan(TensorInfo(table.dtype, tuple(table.shape)), table=table)
    groups: dict[str, list[str]] = {}
    for source in view.headers:
        if source.startswith((_TOWER, *layout.left_out)):
            continue
        if not (places := layout.theirs(source)):
            raise ConfigError(f"{view.source}: llama.cpp has no place for {source} in a {config.model_type}")
        for place in places:
            groups.setdefault(place, []).append(source)
    for name, group in groups.items():
        sources = sorted(group, key=_expert)  # a file of safetensors has expert 10 before 2
        source, infos = sources[0], [view.headers[source] for source in sources]
        stacked = _EXPERT.search(source) is not None
        change, shape = layout.change(source, name), infos[0].shape
        file_dtype = dtype or reduce(torch.promote_types, [info.dtype for info in infos])
        if layout.is_float32(source, shape):
            file_dtype = torch.float32
        if file_dtype not in _TYPES:
            raise InputError(
                f"{source} is {file_dtype}, which llama.cpp does not compute with; give dtype (--dtype fp32)"
            )
        if change is not None:
            shape = tuple(change.write(torch.empty(shape, device="meta")).shape)
        if stacked:
            shape = (len(sources), *shape)
        plans[name] = _Plan(TensorInfo(file_dtype, shape), tuple(sources), stacked, change)
    return plans


def _expert(source: str) -> int:
    """The number of the expert of a tensor; 0 for other tensors."""
    match = _EXPERT.search(source)
    return int(match[1]) if match else 0


def _warn_of_losses(view: Any, arch: str) -> None:
    """Warns of what the file cannot hold, except windows (`check`) and NFC (vocabulary.py)."""
    lost = []
    rounded = ["norm weights as 1 + weight"] * (arch in ONE_MORE)
    rounded += ["A_log as -exp(A_log)"] * (arch in DELTA_NETS)
    if rounded:
        lost.append(f"GGUF stores {' and '.join(rounded)}, in fp32: read back, they are rounded to 1e-7.")
    if arch == "qwen3next" and any(name.startswith("mtp.") for name in view.headers):
        lost.append(
            "the layer for multi-token prediction (mtp.*) is left out: most builds of llama.cpp read none of it."
        )
    if any(name.startswith(_TOWER) for name in view.headers):
        lost.append(f"only the text is written: llama.cpp has the vision tower ({_TOWER}*) in another file, mmproj.")
    if view.model.config.ropes["full"]["rope_type"] == "longrope":
        lost.append("llama.cpp takes the long or the short frequencies by its context size (-c), not by the text's.")
    settings = [name for name, value in view.generation_config().items() if name in _SAMPLING and value is not None]
    if settings:
        lost.append(f"GGUF has no place for {', '.join(settings)} of generation_config.json: set them in llama.cpp.")
    for line in lost:
        warnings.warn(f"{view.source}: {line}", stacklevel=4)


def model_name(src: str | Path, adapter: str | Path | None = None) -> str:
    """The name of a model, for people: of its repository, folder or file, and of the adapter that is merged into it.

    A folder called "model" or "adapter", as `ligermodels train` writes, has the name of its parent.
    """
    path = Path(os.path.expanduser(src))
    if path.exists():
        path = path.resolve()
        if path.parent.name == "snapshots":  # of the Hub's cache: models--owner--name/snapshots/commit
            path = Path(path.parents[1].name.rpartition("--")[2])
    name = path.stem if path.suffix == ".gguf" else path.name
    if name in ("model", "adapter"):
        name = path.parent.name
    return name if adapter is None else f"{name}-{model_name(adapter)}"


def _named(name: str, strips: bool) -> str:
    """llama.cpp knows by "phi-3" in the name that special tokens strip the white space after them."""
    name = name.encode(errors="replace").decode()  # a folder's name may not be UTF-8
    if strips:
        return name if _PHI3.search(name) else f"{name} (Phi-3)"
    return _PHI3.sub("phi", name)  # llama.cpp would look for tokens that are not there, and end


def _equal(value: Any, expected: Any) -> bool:
    """Whether a value is the one written: text may have been given as bytes, numbers are rounded to float32."""
    if isinstance(expected, float):
        return value is not None and bool(np.float32(value) == np.float32(expected))
    if isinstance(expected, list | tuple) and isinstance(value, list) and len(value) == len(expected):
        return all(map(_equal, value, expected))
    return bool(value == (expected.decode() if isinstance(expected, bytes) else expected))
