"""Meta's Llama files to Hugging Face's names and back: consolidated.00.pth ... NN.pth, params.json, tokenizer.model.

- Each .pth is one tensor-parallel rank. wq, wk, wv, w1, w3 and output are cut by rows, wo and w2 by columns; norms are
  in every file. tok_embeddings is cut by columns in Llama 2 and by rows in Llama 3: its shape says which.
- Meta rotates neighbouring rows of a head (0, 1), (2, 3), ..., Hugging Face the halves (0, D/2), (1, D/2 + 1), ...: the
  rows of wq and wk change places within each head.
- rope.freqs is a table that is computed anew, and left out.
- An output.weight that is absent or equals tok_embeddings.weight bit for bit is a tied head (3.2-1B and 3B).

What params.json does not say:
- the factor of `use_scaled_rope`: by `dim`, as published: 32 for 2048 and 3072 (Llama 3.2-1B, 3B), 8 for 4096, 8192 and
  16384 (3.1, 3.3). These are the factors of config.json on the Hub; Meta's model.py has 8 for all. A field
  `rope_scaling_factor`, which is written where the table does not hold, or the argument `rope_factor` overrides it;
- the longest text: 131072 with scaled rope, 8192 for a rope_theta of 500000 (Llama 3), 16384 for another above
  10000 (Code Llama), else 4096 (Llama 2);
- the ids of the first and last token: Llama 3's for its vocabulary of 128256, Llama 2's for 32000 and 32016, else none.

Llama 3's tokenizer.model is tiktoken's text, which no reader of Hugging Face folders takes for what it is: it is kept
as original/tokenizer.model, and no tokenizer.json is made of it. Llama 2's is sentencepiece and keeps its name.

Source: args.py and model.py of meta-llama/llama-models (llama3), example_params of Llama 2;
convert_llama_weights_to_hf.py of transformers' sources.
"""

import errno
import itertools
import math
import mmap
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ligermodels.arch.llama import LlamaConfig
from ligermodels.checkpoint import reading
from ligermodels.checkpoint.reading import json_bytes, read_json
from ligermodels.checkpoint.weights import FLOATS, Reader, TensorInfo, same_bits
from ligermodels.errors import CheckpointError, HubError, InputError

PARAMS = "params.json"
ROPE_FACTORS = {2048: 32.0, 3072: 32.0, 4096: 8.0, 8192: 8.0, 16384: 8.0}
"""dim of a Llama with scaled rope -> its factor."""

_SCALED_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LLAMA3_THETA = 500000.0
_TOKEN_IDS = {128256: (128000, 128001), 32000: (1, 2), 32016: (1, 2)}
_KNOWN = {"dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "norm_eps"}
_KNOWN |= {"rope_theta", "use_scaled_rope", "rope_scaling_factor", "max_batch_size", "max_seq_len"}


@dataclass(frozen=True)
class Sizes:
    """What the shapes of a model follow from."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    experts: int = 0


@dataclass(frozen=True)
class Place:
    """Where a tensor of Hugging Face's is among Meta's: its name, its shape [rows, ...] when whole, and

    axes: the dims along which ranks may cut it; none for a copy in each. heads: whose rows change places; 0 for none.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[int, ...] = ()
    heads: int = 0


def places(sizes: Sizes) -> dict[str, Place]:
    """{Hugging Face name: its place} of a Llama, a Mistral or, where there are experts, a Mixtral."""
    dim, rows, kv_rows = sizes.dim, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    gate, down = (sizes.intermediate, dim), (dim, sizes.intermediate)
    found = {"model.embed_tokens.weight": Place("tok_embeddings.weight", (sizes.vocab, dim), (0, 1))}
    for i in range(sizes.layers):
        hf, meta = f"model.layers.{i}.", f"layers.{i}."
        found |= {
            f"{hf}input_layernorm.weight": Place(f"{meta}attention_norm.weight", (dim,)),
            f"{hf}self_attn.q_proj.weight": Place(f"{meta}attention.wq.weight", (rows, dim), (0,), sizes.heads),
            f"{hf}self_attn.k_proj.weight": Place(f"{meta}attention.wk.weight", (kv_rows, dim), (0,), sizes.kv_heads),
            f"{hf}self_attn.v_proj.weight": Place(f"{meta}attention.wv.weight", (kv_rows, dim), (0,)),
            f"{hf}self_attn.o_proj.weight": Place(f"{meta}attention.wo.weight", (dim, rows), (1,)),
            f"{hf}post_attention_layernorm.weight": Place(f"{meta}ffn_norm.weight", (dim,)),
        }
        if not sizes.experts:
            found |= {
                f"{hf}mlp.gate_proj.weight": Place(f"{meta}feed_forward.w1.weight", gate, (0,)),
                f"{hf}mlp.up_proj.weight": Place(f"{meta}feed_forward.w3.weight", gate, (0,)),
                f"{hf}mlp.down_proj.weight": Place(f"{meta}feed_forward.w2.weight", down, (1,)),
            }
            continue
        found[f"{hf}block_sparse_moe.gate.weight"] = Place(f"{meta}feed_forward.gate.weight", (sizes.experts, dim))
        for e, (w, shape) in itertools.product(range(sizes.experts), {"w1": gate, "w2": down, "w3": gate}.items()):
            name = f"experts.{e}.{w}.weight"
            found[f"{hf}block_sparse_moe.{name}"] = Place(f"{meta}feed_forward.{name}", shape)
    found["model.norm.weight"] = Place("norm.weight", (dim,))
    found["lm_head.weight"] = Place("output.weight", (sizes.vocab, dim), (0,))
    return found


def to_halves(weight: Tensor, heads: int) -> Tensor:
    """Meta's rows [heads * D, ...] as Hugging Face orders them: a view [heads, 2, D / 2, ...], to be reshaped."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2)


def to_pairs(weight: Tensor, heads: int) -> Tensor:
    """Hugging Face's rows [heads * D, ...] as Meta orders them: a view [heads, D / 2, 2, ...], to be reshaped."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2)


def number(params: Mapping[str, Any], name: str, where: Path, kind: type, default: Any = None) -> Any:
    """A positive number of params.json. Raises CheckpointError."""
    value = params.get(name)
    if value is None and default is not None:
        return default
    if value is None:
        raise CheckpointError(f"{where} lacks {name}. Is it the params.json of this model, and whole?")
    right = isinstance(value, int) if kind is int else isinstance(value, int | float)
    if isinstance(value, bool) or not right or not 0 < value < 2**53:
        raise CheckpointError(
            f"{where}: {name} is {str(value)[:50]!r}, expected a positive {'integer' if kind is int else 'number'}.\n"
            "  Likely: a damaged or edited file; fetch it again."
        )
    return kind(value)


def check_heads(heads: int, kv_heads: int, head_dim: int, where: Path) -> None:
    """Raises CheckpointError where the heads cannot share keys or cannot be rotated."""
    if heads % kv_heads or head_dim % 2:
        raise CheckpointError(
            f"{where}: n_heads {heads} must be a multiple of n_kv_heads {kv_heads}, and the head size {head_dim} even."
            "\n  Likely: an edited file; fetch it again."
        )


def check_keys(params: Mapping[str, Any], known: Iterable[str], where: Path) -> None:
    """Raises CheckpointError for a field of params.json that nobody here knows and that is not switched off."""
    unknown = [key for key, value in params.items() if key not in known and value not in (None, False, -1)]
    if unknown:
        raise CheckpointError(
            f"{where} holds {', '.join(map(ascii, unknown[:5]))}, and what it changes is not known here.\n"
            "  Likely: a vision, quantised or newer model, or Mistral's params.json beside Meta's weights, or the "
            "other way round. Use the checkpoint in Hugging Face's layout."
        )


def check_names(expected: Iterable[str], found: Iterable[str], where: str) -> None:
    """Raises CheckpointError that lists what is missing and what has no place."""
    wanted, there = list(expected), list(found)
    missing, unknown = sorted(set(wanted) - set(there)), sorted(set(there) - set(wanted))
    if missing or unknown:
        lists = {f"missing ({len(missing)} of {len(wanted)})": missing, f"unknown ({len(unknown)})": unknown}
        lines = [
            f"{what}: {', '.join(name[:80] for name in names[:3])}{', ...' * (len(names) > 3)}"
            for what, names in lists.items() if names
        ]  # fmt: skip
        likely = "a vision, quantised or LoRA checkpoint" if unknown else "a file that is damaged"
        lines.append(f"Likely: {likely}, or params.json is another model's; fetch both again.")
        raise CheckpointError(
            "\n  ".join([f"{where} does not hold the tensors that its params.json asks for.", *lines])
        )


def check_layers(sizes: Sizes, names: int, where: str) -> None:
    """Raises CheckpointError where params.json asks for more blocks than there are tensors, before these are listed."""
    if sizes.layers * max(1, sizes.experts) > names:
        raise CheckpointError(
            f"{where} holds {names} tensors, too few for n_layers {sizes.layers}"
            f"{f' of {sizes.experts} experts' if sizes.experts else ''}.\n"
            "  Likely: params.json is another model's; fetch both again."
        )


def listing(folder: Path) -> list[str]:
    """The sorted names in a folder. Raises HubError."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise HubError(f"{folder} cannot be read: {error.strerror}. Give the folder that holds {PARAMS}.") from error


def refuse_both(folder: Path, names: Iterable[str]) -> None:
    """Raises CheckpointError where a folder holds weights of both kinds: nothing says which ones are meant."""
    kinds = {
        suffix: file for file in names for suffix in (".pth", ".safetensors")
        if file.startswith("consolidated") and file.endswith(suffix)
    }  # fmt: skip
    if len(kinds) > 1:
        raise CheckpointError(
            f"{folder} holds both {kinds['.pth']} and {kinds['.safetensors']}, and nothing says which to read.\n"
            "  Next: move the .pth files elsewhere; the others carry no code."
        )


class MetaSource:
    """Meta's files as a checkpoint with Hugging Face names; a weights.Reader and a context manager.

    allow_pickle: .pth files are pickles; they are read as plain tensors, and only when this says so.
    rope_factor: of `use_scaled_rope`, where the module's table does not know the size.
    Files are mapped: `read` allocates one tensor where ranks are joined or rows moved, and nothing otherwise.
    Raises CheckpointError (files that are missing, damaged, at odds with params.json), HubError (cannot be read).
    """

    def __init__(self, folder: str | Path, *, allow_pickle: bool = False, rope_factor: float | None = None):
        self.folder = Path(folder)
        self.source = str(folder)
        self._params_file = self.folder / PARAMS
        files = _shard_files(self.folder)
        if not allow_pickle:
            raise CheckpointError(
                f"{folder} holds its weights as pickles ({files[0]}), which can carry code.\n"
                "  Next: pass allow_pickle=True (--allow-pickle): tensors are read from them, and nothing else."
            )
        params = read_json(self._params_file)
        self.params: dict[str, Any] = params["model"] if isinstance(params.get("model"), dict) else params
        check_keys(self.params, _KNOWN, self._params_file)
        self._seen = reading.versions([self.folder / file for file in files], self.folder)
        self._ranks = [_load(path) for path in self._seen]
        self._files = files
        sizes = self._sizes()
        self._rope_scaling = self._scaling(rope_factor)
        self._places = places(sizes)
        if "output.weight" not in self._ranks[0]:
            del self._places["lm_head.weight"]
        by_meta = {place.name: name for name, place in self._places.items()}
        for rank, file in zip(self._ranks, files, strict=True):
            check_names(by_meta, rank, str(self.folder / file))
        self._axes = {name: self._axis(place) for name, place in self._places.items()}
        self.headers = {
            by_meta[name]: TensorInfo(tensor.dtype, self._places[by_meta[name]].shape)
            for name, tensor in self._ranks[0].items()
        }
        self._sizes_found, self._warned = sizes, False
        if self._tied():
            self.headers.pop("lm_head.weight", None)

    def config(self) -> dict[str, Any]:
        """The contents of a config.json; see the module for what params.json does not say."""
        sizes, theta = self._sizes_found, self._theta()
        longest = 8192 if theta == _LLAMA3_THETA else 16384 if theta > 10000.0 else 4096
        dtype = str(self.headers["model.embed_tokens.weight"].dtype).removeprefix("torch.")
        config: dict[str, Any] = {
            "architectures": [LlamaConfig.architecture],
            "model_type": LlamaConfig.model_type,
            "vocab_size": sizes.vocab,
            "hidden_size": sizes.dim,
            "intermediate_size": sizes.intermediate,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "head_dim": sizes.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": 131072 if self._rope_scaling else longest,
            "rms_norm_eps": number(self.params, "norm_eps", self._params_file, float),
            "rope_theta": theta,
            "rope_scaling": self._rope_scaling,
            "tie_word_embeddings": "lm_head.weight" not in self.headers,
            "attention_bias": False,
            "mlp_bias": False,
            "dtype": dtype,
            "torch_dtype": dtype,
        }
        if sizes.vocab in _TOKEN_IDS:
            config["bos_token_id"], config["eos_token_id"] = _TOKEN_IDS[sizes.vocab]
        return config

    def files(self) -> dict[str, bytes | Path]:
        """{name in the folder to write: file} of what belongs to the model beside its config and weights."""
        found: dict[str, bytes | Path] = {**reading.companion_files(self.folder)}
        path = found.pop("tokenizer.model", None)
        if isinstance(path, Path):
            found["original/tokenizer.model" if _is_tiktoken(path) else "tokenizer.model"] = path
        return found

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU, whole and in Hugging Face's order of rows: not to be written to."""
        reading.check_unchanged(self._seen)
        place, axis = self._places[name], self._axes[name]
        parts = [rank[place.name] for rank in self._ranks]
        if axis is None:
            if not self._warned and not all(same_bits(parts[0], part) for part in parts[1:]):
                self._warned = True
                warnings.warn(
                    f"{self.source}: the ranks hold different {place.name}; the first one's is used. Shards of two "
                    "checkpoints in one folder?",
                    stacklevel=2,
                )
            return parts[0]
        if len(parts) == 1 and not place.heads:
            return parts[0]
        whole = torch.empty(place.shape, dtype=parts[0].dtype)
        heads = place.heads // len(parts)
        for target, part in zip(whole.chunk(len(parts), axis), parts, strict=True):
            if heads:
                target.unflatten(0, (heads, 2, -1)).copy_(to_halves(part, heads))
            else:
                target.copy_(part)
        return whole

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ranks.clear()

    def _theta(self) -> float:
        return number(self.params, "rope_theta", self._params_file, float, 10000.0)

    def _sizes(self) -> Sizes:
        """From params.json and, for what it leaves open, the tensors that must be there."""
        params, where, count = self.params, self._params_file, len(self._ranks)
        dim, layers, heads = (number(params, name, where, int) for name in ("dim", "n_layers", "n_heads"))
        number(params, "norm_eps", where, float)
        self._theta()
        kv_heads = number(params, "n_kv_heads", where, int, heads)
        if dim % heads:
            raise CheckpointError(f"{where}: dim {dim} must be a multiple of n_heads {heads}. An edited file?")
        check_heads(heads, kv_heads, dim // heads, where)
        if heads % count or kv_heads % count:
            raise CheckpointError(
                f"{self.source} has {count} shards, which cannot share {heads} heads and {kv_heads} key/value heads.\n"
                "  Likely: files of another model in the folder, or ranks that repeat key/value heads (405B for 16 "
                "ranks); use the layout with fewer shards."
            )
        vocab = params.get("vocab_size")
        if vocab in (None, -1):
            table = self._ranks[0].get("tok_embeddings.weight", torch.empty(0))
            rows, columns = table.shape if table.ndim == 2 and table.numel() else (1, dim)
            vocab = rows * count if columns == dim else rows
        else:
            vocab = number(params, "vocab_size", where, int)
        multiple = number(params, "multiple_of", where, int, 256)
        scale = number(params, "ffn_dim_multiplier", where, float, 1.0)
        sizes = Sizes(dim, layers, heads, kv_heads, dim // heads, _intermediate(dim, multiple, scale), vocab)
        check_layers(sizes, len(self._ranks[0]), self.source)
        return sizes

    def _scaling(self, factor: float | None) -> dict[str, Any] | None:
        """config.json's rope_scaling."""
        where, scaled = self._params_file, self.params.get("use_scaled_rope") or False
        if not isinstance(scaled, bool):
            raise CheckpointError(f"{where}: use_scaled_rope is {str(scaled)[:50]!r}, expected true or false")
        if not scaled and factor is not None:
            raise InputError(f"rope_factor={factor} was given, and {where} does not use scaled rope; leave it out")
        if not scaled:
            return None
        if factor is not None and not 1 <= factor < math.inf:
            raise InputError(f"rope_factor={factor}: expected a number of at least 1, such as 8 (3.1) or 32 (3.2)")
        if factor is None:
            known = ROPE_FACTORS.get(self.params["dim"], 0.0)
            factor = number(self.params, "rope_scaling_factor", where, float, known)
        if not factor:
            raise CheckpointError(
                f"{where} has use_scaled_rope without its factor, and no Llama of dim {self.params['dim']} is known.\n"
                "  Next: add rope_scaling_factor to it (3.1: 8, 3.2: 32), or pass rope_factor (--rope-factor)."
            )
        return {"rope_type": "llama3", "factor": float(factor), **_SCALED_ROPE}

    def _axis(self, place: Place) -> int | None:
        """The dim along which the ranks cut a tensor; None if each has it whole. Raises CheckpointError."""
        parts, count = [rank[place.name] for rank in self._ranks], len(self._ranks)
        shapes, dtypes = [tuple(part.shape) for part in parts], {part.dtype for part in parts}
        if len(dtypes) > 1:
            raise CheckpointError(
                f"{self.source}: {place.name} is {' and '.join(sorted(map(str, dtypes)))} in different shards.\n"
                "  Likely: shards of two checkpoints in one folder; fetch them again into an empty one."
            )
        if not place.axes and all(shape == place.shape for shape in shapes):
            return None
        for axis in place.axes:
            cut = [size // count if i == axis else size for i, size in enumerate(place.shape)]
            if place.shape[axis] % count == 0 and all(shape == tuple(cut) for shape in shapes):
                return axis
        odd = next((n for n, shape in enumerate(shapes) if shape != shapes[0]), None)
        if odd is not None:
            raise CheckpointError(
                f"{self.source}: {place.name} is {list(shapes[0])} in {self._files[0]} and {list(shapes[odd])} in "
                f"{self._files[odd]}: the shards are unequal.\n"
                "  Likely: shards of two checkpoints in one folder; fetch them again into an empty one."
            )
        likely = "params.json is another model's; fetch both again."
        for axis in place.axes:
            if len(shapes[0]) == 2 and shapes[0][1 - axis] == place.shape[1 - axis] and shapes[0][axis]:
                ranks = place.shape[axis] / shapes[0][axis]
                if ranks == int(ranks):
                    likely = f"the tensors are cut for {int(ranks)} shards, and {count} are here; fetch the others."
        raise CheckpointError(
            f"{self.source}: {place.name} is {list(shapes[0])} in each of {count} shards, and params.json makes it "
            f"{list(place.shape)} in all.\n  Likely: {likely}"
        )

    def _tied(self) -> bool:
        """Whether the head is the embedding; the two are compared whole only where their first numbers agree."""
        head, table = "lm_head.weight", "model.embed_tokens.weight"
        if head not in self.headers or self.headers[head] != self.headers[table]:
            return head not in self.headers
        rows = [self._ranks[0][self._places[name].name][0] for name in (head, table)]
        common = min(len(row) for row in rows)
        return same_bits(rows[0][:common], rows[1][:common]) and same_bits(self.read(head), self.read(table))


def write_meta(
    reader: Reader,
    config: Mapping[str, Any],
    folder: str | Path,
    *,
    shards: int = 1,
    embedding_axis: int | None = None,
) -> None:
    """Writes consolidated.00.pth ... and params.json of a Llama with Hugging Face names into `folder`.

    reader: without a copy of what is tied, as a `View` is.
    config: the contents of its config.json. shards: tensor-parallel ranks; must divide heads and key/value heads.
    embedding_axis: the dim along which tok_embeddings is cut; None: 0 for a rope_theta of 500000 (Llama 3), else 1.
    A tied head is written as a copy, as Meta does. The longest text has no field in params.json and is lost.

    The files are made at their full size first and filled through a mapping: memory holds the tensor that `reader`
    gives, whatever the number of shards. Nothing is written before all but the reading is known to be possible.
    Raises CheckpointError (another architecture, or one that Meta's code does not compute), ConfigError, InputError
    (arguments), OSError (cannot be written).
    """
    checked = LlamaConfig.from_hf(config)
    params = _params(checked)
    sizes = Sizes(
        checked.hidden_size, checked.num_hidden_layers, checked.num_attention_heads, checked.num_key_value_heads,
        checked.head_dim, checked.intermediate_size, checked.vocab_size,
    )  # fmt: skip
    check_layers(sizes, len(reader.headers), reader.source)
    layout = places(sizes)
    tied = {"lm_head.weight"} if checked.tie_word_embeddings else set()
    check_names(set(layout) - tied, reader.headers, reader.source)
    if embedding_axis is None:
        embedding_axis = 0 if params["rope_theta"] == _LLAMA3_THETA else 1
    axes = {name: place.axes[0] if place.axes else None for name, place in layout.items()}
    axes["model.embed_tokens.weight"] = embedding_axis
    _check_cuts(layout, axes, shards, sizes)
    stored = {name: "model.embed_tokens.weight" if name in tied else name for name in layout}
    infos = {name: reader.headers[source] for name, source in stored.items()}
    for name, info in infos.items():
        if info.shape != layout[name].shape or info.dtype not in FLOATS:
            raise CheckpointError(
                f"{reader.source}: {name} is {info.dtype} {list(info.shape)}, config.json makes it floating "
                f"{list(layout[name].shape)}.\n  Likely: config.json is another model's; fetch both again."
            )
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    (target / PARAMS).write_bytes(json_bytes(params))
    ranks = [_blank(target / f"consolidated.{n:02}.pth", layout, axes, infos, shards) for n in range(shards)]
    for name, place in layout.items():
        _fill(ranks, place, axes[name], reader.read(stored[name]))


def _intermediate(dim: int, multiple_of: int, multiplier: float) -> int:
    """The width of the gated unit, as Meta's code rounds it."""
    return math.ceil(int(multiplier * int(8 * dim / 3)) / multiple_of) * multiple_of


def _shard_files(folder: Path) -> list[str]:
    """consolidated.00.pth and its followers, without a gap. Raises CheckpointError."""
    names = listing(folder)
    refuse_both(folder, names)
    files = [name for name in names if re.fullmatch(r"consolidated\.\d\d\.pth", name)]
    expected = [f"consolidated.{n:02}.pth" for n in range(len(files))]
    if not files or files != expected:
        lost = next((name for name in expected if name not in files), "consolidated.00.pth")
        raise CheckpointError(
            f"{folder} lacks {lost}, and holds {len(files)} other consolidated.NN.pth.\n"
            "  Likely: a download that did not finish; fetch it again."
        )
    return files


def _load(path: Path) -> dict[str, Tensor]:
    """The tensors of one .pth, mapped, without rope.freqs. Raises CheckpointError."""
    state = reading.read_pickle(path)
    for name, tensor in state.items():
        if tensor.dtype not in FLOATS:
            raise CheckpointError(
                f"{path}: {name} is not floating but {tensor.dtype}.\n"
                "  Likely: quantised, or not a checkpoint of Meta's."
            )
    return {name: tensor for name, tensor in state.items() if name != "rope.freqs"}


def _is_tiktoken(path: Path) -> bool:
    """Whether a tokenizer.model is tiktoken's: lines of base64 and a rank."""
    with path.open("rb") as file:
        return re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", file.read(4096)) is not None


def _params(config: LlamaConfig) -> dict[str, Any]:
    """params.json. Raises CheckpointError for what Meta's code does not compute."""
    rope = dict(config.rope_parameters)
    rope_type, theta = rope.pop("rope_type"), rope.pop("rope_theta")
    factor = rope.pop("factor", None)
    odd = [name for name in ("attention_bias", "mlp_bias") if getattr(config, name)]
    odd += ["hidden_act"] * (config.hidden_act not in ("silu", "swish"))
    odd += ["head_dim"] * (config.head_dim * config.num_attention_heads != config.hidden_size)
    odd += ["rope_scaling"] * (
        rope_type not in ("default", "llama3") or (rope_type == "llama3" and rope != _SCALED_ROPE)
    )
    if odd:
        raise CheckpointError(
            f"Meta's code does not compute {', '.join(odd)} of this config.json.\n  Next: keep Hugging Face's layout."
        )
    multiple, scale = _rounding(config.hidden_size, config.intermediate_size)
    params: dict[str, Any] = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
        "multiple_of": multiple,
        "ffn_dim_multiplier": scale,
        "norm_eps": config.rms_norm_eps,
        "rope_theta": theta,
    }
    if rope_type == "llama3":
        params["use_scaled_rope"] = True
        if ROPE_FACTORS.get(config.hidden_size) != factor:
            params["rope_scaling_factor"] = factor
    return params


def _rounding(dim: int, intermediate: int) -> tuple[int, float]:
    """multiple_of and ffn_dim_multiplier from which Meta's code finds `intermediate`."""
    multiple = math.gcd(intermediate, 4096)
    base = int(8 * dim / 3)
    scales = [round(intermediate / base, digits) for digits in range(1, 8)] + [(intermediate - 0.5) / base]
    for scale in (1.0, 1.3, *scales):
        if scale > 0 and _intermediate(dim, multiple, scale) == intermediate:
            return multiple, scale
    # In the middle of the last step: int() cuts the half off, whatever the multiple.
    return 1, (intermediate + 0.5) / base


def _check_cuts(layout: Mapping[str, Place], axes: Mapping[str, int | None], shards: int, sizes: Sizes) -> None:
    """Raises InputError where the ranks would not be equal, or would cut a head."""
    if not 1 <= shards <= 99:
        raise InputError(f"{shards} shards (--ranks): expected 1 to 99")
    uneven = [name for name, axis in axes.items() if axis is not None and layout[name].shape[axis] % shards]
    if uneven or sizes.heads % shards or sizes.kv_heads % shards:
        raise InputError(
            f"{shards} shards (--ranks) must divide {sizes.heads} heads, {sizes.kv_heads} key/value heads, an "
            f"intermediate size of {sizes.intermediate}, and the embedding's {sizes.vocab} rows and {sizes.dim} "
            "columns. Choose fewer."
        )


def _blank(
    path: Path,
    layout: Mapping[str, Place],
    axes: Mapping[str, int | None],
    infos: Mapping[str, TensorInfo],
    shards: int,
) -> dict[str, Tensor]:
    """One rank's file at its full size, and its tensors, mapped so that writing to them writes to the file."""
    state = {}
    for name, place in layout.items():
        shape = [size // shards if i == axes[name] else size for i, size in enumerate(place.shape)]
        state[place.name] = torch.empty(shape, dtype=infos[name].dtype)  # never touched: takes no memory
    try:
        with torch.serialization.skip_data():
            torch.save(state, path)
    except RuntimeError as error:
        raise OSError(errno.EIO, f"torch.save: {error}") from error
    del state
    if hasattr(os, "posix_fallocate"):  # a full disk is found here, not by a signal when a page is written
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _fill(ranks: list[dict[str, Tensor]], place: Place, axis: int | None, tensor: Tensor) -> None:
    """Writes one of Hugging Face's tensors into the ranks' files."""
    parts = [tensor] * len(ranks) if axis is None else tensor.chunk(len(ranks), axis)
    heads = place.heads // len(ranks)
    for rank, part in zip(ranks, parts, strict=True):
        target = rank[place.name]
        if heads:
            target.unflatten(0, (heads, -1, 2)).copy_(to_pairs(part, heads))
        else:
            target.copy_(part)
