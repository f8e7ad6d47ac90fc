"""GGUF written: the one file that llama.cpp runs, of weights, configuration, tokenizer and chat template.

reader.py reads such files.

- Llama, Mistral and Mixtral are its architecture "llama", which rotates neighbouring rows of a head: rows of q and
  k (and of their biases) are permuted, as for Meta's files. gemma, gemma2, qwen2, qwen3 and phi3 rotate halves, as
  config.json's models do, and keep their rows. Phi-3 stays packed: attn_qkv; gate before up in ffn_up.
- Gemma's norm weights act as 1 + weight, and are written as that sum.
- Norms, biases and routers are float32 whatever the rest is; sums and casts are made from the stored numbers at once.
- Experts are stacked: ffn_gate_exps, ffn_up_exps and ffn_down_exps [experts, rows, columns].
- A tied head is left out: without one, llama.cpp takes the embedding.
- Llama 3's frequencies are a table of divisors, rope_freqs; LongRoPE's two are rope_factors_long and _short, of which
  llama.cpp takes one by the size of the context it is given, not by the length of the text.
- There is a token for each row of the embedding; rows without one are named [PAD<row>].
- Texts are split as the tokenizer's files say, but for three things: NFC (Qwen2) is left out; where there is a dummy
  prefix, it stands before every text and after every special token; and runs of spaces stay as they are.
- A window is computed for Gemma 2 only. For other models it is noted in the file, and a warning says from where on
  their outputs differ.

What llama.cpp does not support is refused: no file is written that runs and gives another output.
Checked against: gguf 0.19 (constants.py, gguf_writer.py), src/models and src/llama-vocab.cpp of llama.cpp.
"""

import math
import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ligermodels.checkpoint.gguf.config import FAMILIES, llama3_divisors
from ligermodels.checkpoint.gguf.reader import FLOATS, package
from ligermodels.checkpoint.gguf.vocabulary import add_tokenizer
from ligermodels.checkpoint.weights import TensorInfo, same_bits, to_pairs
from ligermodels.errors import ConfigError, InputError

_TYPES = {dtype: name for name, dtype in FLOATS.items()}
_FILE_TYPES = {torch.float32: "ALL_F32", torch.float16: "MOSTLY_F16", torch.bfloat16: "MOSTLY_BF16"}
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(\w+\.weight)")
_PHI3 = re.compile("phi-?3", re.IGNORECASE)
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
GGUF = "model.gguf"


@dataclass(frozen=True)
class _Part:
    """Where a tensor of the file comes from: tensors of the source, stacked if it is experts', or a `table`.

    heads: whose rows are permuted; 0 for none. offset: added to all.
    """

    info: TensorInfo
    sources: tuple[str, ...] = ()
    stacked: bool = False
    heads: int = 0
    offset: float = 0.0
    table: Tensor | None = None


class GgufTarget:
    """A checkpoint as llama.cpp sees it, under its names; made from headers and the tokenizer's files alone.

    view: the source, a `conversion.source.View`, as stored. open_tokenizer: makes the Tokenizer of a folder.
    dtype: of the matrices, None to keep theirs. name: of the model, for people; the attribute is the one written.
    headers: {name: TensorInfo}, in the order of the file.
    Raises ConfigError (a family or feature that llama.cpp does not compute, or no gguf package), InputError (float64
    kept), CheckpointError (no tokenizer), TokenizerError (one that llama.cpp has no counterpart for).
    """

    def __init__(
        self,
        view: Any,
        open_tokenizer: Callable[[Path], Any],
        *,
        dtype: torch.dtype | None = None,
        name: str = "",
    ):
        self._gguf = gguf = package()
        self._view = view
        config: Any = view.model.config
        check(view.model, view.source)
        _warn_of_losses(view)
        arch, _ = FAMILIES[config.model_type]
        self._parts = _parts(gguf, view, arch, dtype)
        self.headers: Mapping[str, TensorInfo] = {name: part.info for name, part in self._parts.items()}
        self._writer = gguf.GGUFWriter(None, arch)
        self._writer.add_type("model")
        sizes: dict[torch.dtype, int] = {}
        for info in self.headers.values():
            if len(info.shape) > 1:
                sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
        most = max(sizes, key=lambda dtype: sizes[dtype])
        self._writer.add_file_type(getattr(gguf.LlamaFileType, _FILE_TYPES[most]))
        self._writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _describe(self._writer, gguf, config, view.model.decoder.rotary_emb)
        strips = add_tokenizer(self._writer, view.files(), open_tokenizer, config.vocab_size, view.source)
        self.name = _named(name, strips)
        self._writer.add_name(self.name)
        for tensor, info in self.headers.items():
            kind = getattr(gguf.GGMLQuantizationType, _TYPES[info.dtype])
            self._writer.add_tensor_info(tensor, info.shape, np.dtype("float32"), info.nbytes, raw_dtype=kind)

    def files(self) -> dict[str, bytes | Path]:
        """None: the tokenizer is in the file."""
        return {}

    def write(self, folder: Path) -> None:
        """Writes model.gguf, once."""
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
        """What the file, read back by the gguf package, has otherwise.

        level: "keys" compares metadata, names, shapes and types; "bytes" every bit too.
        """
        mismatches: list[str] = []
        reader = self._gguf.GGUFReader(folder / GGUF)
        for key, value in self._writer.kv_data[0].items():
            field = reader.fields.get(key)
            if field is None or not _equal(field.contents(), value.value):
                mismatches.append(f"metadata {key}: differs from what was to be written")
        found = {tensor.name: tensor for tensor in reader.tensors}
        for name, info in self.headers.items():
            if name not in found:
                mismatches.append(f"{name}: is not in the file")
                continue
            tensor = found[name]
            header = tensor.tensor_type.name, tuple(reversed(tensor.shape.tolist()))
            if header != (_TYPES[info.dtype], info.shape):
                mismatches.append(f"{name}: {header}, expected {info}")
            elif level == "bytes":
                stored = torch.from_numpy(tensor.data.reshape(-1).view(np.uint8).copy()).view(info.dtype)
                if not same_bits(stored.reshape(info.shape), self._read(name)):
                    mismatches.append(f"{name}: values differ")
        return mismatches

    def _read(self, name: str) -> Tensor:
        """The tensor as the file holds it; mapped from the source where nothing changes: not to be written to."""
        part = self._parts[name]
        if part.table is not None:
            return part.table
        if not part.stacked and not part.heads and not part.offset:
            return self._view.read(part.sources[0]).to(part.info.dtype)
        whole = torch.empty(part.info.shape, dtype=part.info.dtype)
        for box, source in zip(whole if part.stacked else [whole], part.sources, strict=True):
            tensor = self._view.read(source)
            if part.heads:
                tensor = to_pairs(tensor, part.heads)
            if part.offset:
                tensor = tensor.float() + part.offset
            box.copy_(tensor)
        return whole


def model_name(src: str | Path, adapter: str | Path | None = None) -> str:
    """The name of a model, for people: of its repository, folder or file; and of the adapter that is merged into it.

    A folder that is called "model" or "adapter", as `ligermodels train` calls them, goes by the name of the one above.
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
    """A name with "phi-3" in it, by which llama.cpp knows special tokens that strip the white space after them."""
    name = name.encode(errors="replace").decode()  # a folder's may be no UTF-8
    if strips:
        return name if _PHI3.search(name) else f"{name} (Phi-3)"
    return _PHI3.sub("phi", name)  # it would look for tokens that are not there, and end


def _equal(found: Any, expected: Any) -> bool:
    """Whether a value is what was written: text may have been given as bytes, numbers are rounded to float32."""
    if isinstance(expected, float):
        return bool(np.float32(found) == np.float32(expected))
    if isinstance(expected, list | tuple) and isinstance(found, list) and len(found) == len(expected):
        return all(map(_equal, found, expected))
    return bool(found == (expected.decode() if isinstance(expected, bytes) else expected))


# Configuration


def check(model: Any, where: str) -> None:
    """Raises ConfigError for what llama.cpp does not compute of a model; warns of a window that it leaves out."""
    config = c = model.config
    kind = config.model_type
    if kind not in FAMILIES:
        raise ConfigError(
            f"{where} is a {kind}, and GGUF files are written for {', '.join(FAMILIES)} alone.\n"
            "  Next: keep another layout."
        )
    arch, activations = FAMILIES[kind]
    layers = range(config.num_hidden_layers)
    odd = []
    if config.hidden_act not in activations:
        odd.append(f"hidden_act {config.hidden_act}")
    if arch in ("gemma", "gemma2"):
        odd += ["a head of its own (tie_word_embeddings false)"] * (not config.tie_word_embeddings)
        odd += ["attention_bias"] * c.attention_bias
    if kind == "gemma2":
        # Its size tells the 27B apart, which alone is scaled by its width.
        scalar = c.hidden_size // c.num_attention_heads if len(layers) == 46 else c.head_dim
        if c.query_pre_attn_scalar != scalar:
            odd.append(f"query_pre_attn_scalar {c.query_pre_attn_scalar} (it takes {scalar} for these sizes)")
        odd += [f"{n} null" for n in ("attn_logit_softcapping", "final_logit_softcapping") if getattr(c, n) is None]
        if c.layer_types != ["full_attention" if i % 2 else "sliding_attention" for i in layers]:
            odd.append("layer_types other than sliding, full, sliding, full, ...")
    odd += ["attention_bias"] * (kind == "qwen3" and c.attention_bias)
    if kind == "phi3" and config.head_dim * config.num_attention_heads != config.hidden_size:
        odd.append(f"head_dim {config.head_dim} (it takes hidden_size / num_attention_heads)")
    odd += _odd_rope(config, model.decoder.rotary_emb, arch)
    if odd:
        raise ConfigError(
            f"{where}: llama.cpp does not compute {'; '.join(odd)} of a {kind}.\n  Next: keep another layout."
        )
    windows = [window for i in layers if (window := config.window(i)) is not None]
    if windows and kind != "gemma2" and min(windows) < config.max_position_embeddings:
        warnings.warn(
            f"{where}: llama.cpp leaves out the window of {min(windows)} tokens of a {kind}: its output differs for "
            "longer texts. Run it with a context of that size (-c) where this matters.",
            stacklevel=4,
        )


def _warn_of_losses(view: Any) -> None:
    """Warns of what the file does not hold; see `check` and vocabulary.py for the window and NFC."""
    lost = []
    if view.model.config.model_type.startswith("gemma"):
        lost.append("GGUF holds Gemma's norm weights as 1 + weight in fp32: read back, they are rounded to 1e-7.")
    if view.model.config.rope_parameters["rope_type"] == "longrope":
        lost.append("llama.cpp takes the long or the short frequencies by its context size (-c), not by the text's.")
    if settings := [
        name for name, value in view.generation_config().items() if name in _SAMPLING and value is not None
    ]:
        lost.append(f"GGUF has no place for {', '.join(settings)} of generation_config.json: set them in llama.cpp.")
    for line in lost:
        warnings.warn(f"{view.source}: {line}", stacklevel=4)


def _odd_rope(config: Any, rotary: Any, arch: str) -> list[str]:
    rope = config.rope_parameters
    kind = rope["rope_type"]
    if kind == "dynamic" or (kind == "llama3" and arch != "llama") or (kind == "longrope" and arch != "phi3"):
        return [f"rope_type {kind}"]
    if kind == "yarn":
        usual = 1.0 + 0.1 * math.log(max(1.0, _factor(config)))
        truncated = "truncate" not in rope or rope["truncate"]
        odd = ["truncate false"] * (not truncated)
        odd += [f"attention_factor {rotary.attention_scaling:.6g}"] * (abs(rotary.attention_scaling - usual) > 1e-6)
        return [f"rope_type yarn with {what}" for what in odd]
    return []


def _factor(config: Any) -> float:
    rope = config.rope_parameters
    return rope.get("factor") or config.max_position_embeddings / rope["original_max_position_embeddings"]


def _describe(writer: Any, gguf: Any, config: Any, rotary: Any) -> None:
    """The configuration in llama.cpp's keys."""
    c: Any = config
    rope = config.rope_parameters
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(rotary.dim)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if config.model_type == "mixtral":
        writer.add_expert_count(c.num_local_experts)
        writer.add_expert_used_count(c.num_experts_per_tok)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(float(c.attn_logit_softcapping))
        writer.add_final_logit_softcapping(float(c.final_logit_softcapping))
    if config.model_type == "phi3":
        writer.add_rope_scaling_orig_ctx_len(c.original_max_position_embeddings)
        writer.add_sliding_window(c.sliding_window or 0)  # its absence counts as a window there
    elif getattr(config, "sliding_window", None) is not None:
        writer.add_sliding_window(c.sliding_window)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(float(_factor(config)))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(float(rope.get("beta_fast") or 32))
        writer.add_rope_scaling_yarn_beta_slow(float(rope.get("beta_slow") or 1))
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_attn_factors(float(rotary.attention_scaling))


# Tensors


def _parts(gguf: Any, view: Any, arch: str, dtype: torch.dtype | None) -> dict[str, _Part]:
    """{name in the file: where it comes from}, tables first."""
    rotary: Any = view.model.decoder.rotary_emb
    config, kind = view.model.config, gguf.MODEL_TENSOR
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads} if arch == "llama" else {}
    rope = config.rope_parameters
    tables: dict[Any, Any] = {}
    if rope["rope_type"] == "llama3":
        tables[kind.ROPE_FREQS] = llama3_divisors(rope, rotary.dim)
    if rope["rope_type"] == "longrope":
        tables = {kind.ROPE_FACTORS_LONG: rope["long_factor"], kind.ROPE_FACTORS_SHORT: rope["short_factor"]}
    parts: dict[str, _Part] = {}
    for tensor, values in tables.items():
        table = torch.tensor(values, dtype=torch.float32)
        parts[f"{gguf.TENSOR_NAMES[tensor]}.weight"] = _Part(TensorInfo(table.dtype, tuple(table.shape)), table=table)
    groups: dict[str, list[str]] = {}
    for source in view.headers:
        groups.setdefault(_EXPERT.sub(r"\1.\2", source), []).append(source)
    for source, sources in groups.items():
        found = names.get_type_and_name(source, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ConfigError(f"{view.source}: llama.cpp has no place for {source} in a {config.model_type}")
        infos = [view.headers[name] for name in sources]
        stored = infos[0].dtype
        for info in infos:
            stored = torch.promote_types(stored, info.dtype)
        stacked = sources[0] != source
        shape = (len(sources), *infos[0].shape) if stacked else infos[0].shape
        small = len(shape) == 1 or found[0] == kind.FFN_GATE_INP
        made = torch.float32 if small else dtype or stored
        if made not in _TYPES:
            raise InputError(f"{source} is {made}, which llama.cpp does not compute with; give dtype (--dtype fp32)")
        parts[found[1]] = _Part(
            TensorInfo(made, shape),
            tuple(sources),
            stacked,
            heads=heads.get(source.split(".")[-2], 0),
            offset=1.0 if arch.startswith("gemma") and source.endswith("norm.weight") else 0.0,
        )
    return parts
