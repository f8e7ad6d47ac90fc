"""Plans the GGUF file of a model. What llama.cpp does not support is refused: no file runs with another output.

Four things differ in llama.cpp, whatever is written, and a warning names each: it ignores the sliding windows of all
models but Gemma and gpt-oss and the NFC of Qwen2's tokenizer, chooses LongRoPE's table by the size of its context,
not by the length of the text, and rounds the ends of gpt-oss's YaRN.
"""

import os
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligermodels.checkpoint.files import is_gguf_name
from ligermodels.checkpoint.gguf import gpt_oss
from ligermodels.checkpoint.gguf.config import FAMILIES, ROPE_TABLES, check, llama3_divisors, metadata_of
from ligermodels.checkpoint.gguf.gemma4 import tables_of
from ligermodels.checkpoint.gguf.layout import DELTA_NETS, ONE_MORE, Change, Layout
from ligermodels.checkpoint.gguf.output import (
    BLOCK,
    EXPERT,
    GgufOutput,
    OutTensor,
    expert_of,
    file_type,
    float_type,
    quantised_type,
)
from ligermodels.checkpoint.gguf.reader import package
from ligermodels.checkpoint.gguf.vocabulary import add_tokenizer
from ligermodels.errors import ConfigError

_TOWER = ("model.visual.", "visual.")
_PHI3 = re.compile("phi-?3", re.IGNORECASE)
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


class GgufTarget(GgufOutput):
    """The GGUF file of a model, planned from headers and the tokenizer's files.

    view: the source, a `conversion.source.View`, in the dtypes that are stored. open_tokenizer: makes the Tokenizer of
    a folder. dtype: of the matrices; None keeps theirs, also MXFP4. quantised: a type such as "Q8_0" for those in
    floats. name: of the model, for people; the attribute is the one that is written.
    kept: names of matrices that are F16, since their rows cannot be quantised.
    Raises ConfigError (a model that llama.cpp does not compute, or no gguf package), InputError (float64 kept),
    CheckpointError (no tokenizer), TokenizerError (a tokenizer that llama.cpp has no counterpart for).
    """

    def __init__(
        self,
        view: Any,
        open_tokenizer: Callable[[Path], Any],
        *,
        dtype: torch.dtype | None = None,
        quantised: str | None = None,
        name: str = "",
    ):
        gguf, config, rotary = package(), view.model.config, view.model.decoder.rotary_emb
        check(view.model, view.source)
        arch, _ = FAMILIES[config.model_type]
        _warn_of_losses(view, arch)
        tensors = _plan(view, arch, dtype, quantised)
        writer = gguf.GGUFWriter(None, arch)
        writer.add_type("model")
        writer.add_file_type(file_type(tensors, quantised))
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add[bool] = writer.add_bool
        blocks = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
        mtp_layers = len(blocks) - config.num_hidden_layers
        for key, value in metadata_of(config, rotary, mtp_layers).items():
            add[type(value)](f"{arch}.{key}", value)
        strips = add_tokenizer(writer, view.files(), open_tokenizer, config.vocab_size, view.source)
        super().__init__(writer, tensors, _named(name, strips))
        self.kept = [name for name, x in tensors.items() if quantised and x.type == "F16" and x.shape[-1] % BLOCK]


def _plan(view: Any, arch: str, dtype: torch.dtype | None, quantised: str | None) -> dict[str, OutTensor]:
    """{name in the file: how it is written}, tables first."""
    config, rope = view.model.config, view.model.config.ropes["full"]
    layout = Layout(arch, config.model_type, vars(config))
    tables = tables_of(config)
    if rope["rope_type"] == "llama3":
        tables[ROPE_TABLES[0]] = llama3_divisors(rope, view.model.decoder.rotary_emb.dim)
    if rope["rope_type"] == "longrope":
        tables = dict(zip(ROPE_TABLES[1:], (rope["long_factor"], rope["short_factor"]), strict=True))
    tensors: dict[str, OutTensor] = {}
    for name, values in tables.items():
        tensors[name] = OutTensor("F32", (len(values),), lambda values=values: [torch.tensor(values)])  # type: ignore[misc]
    groups: dict[str, list[str]] = {}
    for source in view.headers:
        if source.startswith((*_TOWER, *layout.left_out)):
            continue
        if not (places := layout.theirs(source)):
            raise ConfigError(f"{view.source}: llama.cpp has no place for {source} in a {config.model_type}")
        for place in places:
            groups.setdefault(place, []).append(source)
    experts = next((n for field in _EXPERT_COUNTS if (n := getattr(config, field, None))), 0)
    for name, group in groups.items():
        sources = sorted(group, key=expert_of)  # a file of safetensors has expert 10 before 2
        source, infos = sources[0], [view.headers[source] for source in sources]
        stacked = EXPERT.search(source) is not None
        change, shape = layout.change(source, name), infos[0].shape
        if layout.is_float32(source, shape):
            kind, is_kept = "F32", True
        else:
            kind, is_kept = float_type(source, dtype or reduce(torch.promote_types, [x.dtype for x in infos])), False
        if change is not None:
            shape = tuple(change.write(torch.empty(shape, device="meta")).shape)
        if stacked:
            shape = (len(sources), *shape)
        if source in view.packed and dtype is None:
            tensors[name] = OutTensor("MXFP4", shape, partial(_packed_parts, view, layout, source, name))
            continue
        if quantised and not is_kept:
            tied = "output.weight" not in groups
            kind = quantised_type(name, shape, quantised, own=kind, tied=tied, experts=experts)
        tensors[name] = OutTensor(kind, shape, partial(_parts, view, sources, change))
    return tensors


def _parts(view: Any, sources: list[str], change: Change | None) -> Iterator[Tensor]:
    """The values of each source, changed; mapped where nothing changes."""
    for source in sources:
        tensor = view.read(source)
        yield change.write(tensor) if change else tensor


def _packed_parts(view: Any, layout: Layout, source: str, name: str) -> Iterator[Tensor]:
    """The bytes of the part in MXFP4 that has this name in the file, an expert at a time."""
    weight = view.read_packed(source)
    experts, rows, columns = weight.shape
    of_rows = (x.view(experts, rows, columns // BLOCK, -1) for x in (weight.packed, weight.scale))
    blocks, scales = (layout.part(source, name, x) for x in of_rows)
    for block, scale in zip(blocks, scales.squeeze(-1), strict=True):
        yield gpt_oss.to_file(block, scale)


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
    if view.model.config.ropes["full"]["rope_type"] == "longrope":
        lost.append("llama.cpp takes the long or the short frequencies by its context size (-c), not by the text's.")
    if arch == "gpt-oss" and not view.model.config.ropes["full"].get("truncate", True):
        lost.append(
            "llama.cpp rounds the ends of YaRN's ramp to whole frequencies (truncate is false here): its numbers "
            "differ a little, as with every GGUF file of a gpt-oss."
        )
    settings = [name for name, value in view.generation_config().items() if name in _SAMPLING and value is not None]
    if settings:
        lost.append(
            f"GGUF has no place for {', '.join(settings)} of generation_config.json: set them in llama.cpp "
            "(--modelfile writes them for Ollama)."
        )
    for line in lost:
        warnings.warn(f"{view.source}: {line}", stacklevel=5)


def model_name(src: str | Path, adapter: str | Path | None = None) -> str:
    """The name of a model, for people: of its repository, folder or file, and of the adapter that is merged into it.

    A folder called "model" or "adapter", as `ligermodels train` writes, has the name of its parent.
    """
    path = Path(os.path.expanduser(src))
    if path.exists():
        path = path.resolve()
        if path.parent.name == "snapshots":  # of the Hub's cache: models--owner--name/snapshots/commit
            path = Path(path.parents[1].name.rpartition("--")[2])
    name = path.stem if is_gguf_name(path.name) else path.name
    if name in ("model", "adapter"):
        name = path.parent.name
    return name if adapter is None else f"{name}-{model_name(adapter)}"


def _named(name: str, strips: bool) -> str:
    """llama.cpp knows by "phi-3" in the name that special tokens strip the white space after them."""
    name = name.encode(errors="replace").decode()  # a folder's name may not be UTF-8
    if strips:
        return name if _PHI3.search(name) else f"{name} (Phi-3)"
    return _PHI3.sub("phi", name)  # llama.cpp would look for tokens that are not there, and end
