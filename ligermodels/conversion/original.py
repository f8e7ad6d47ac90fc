"""Meta's and Mistral's own files under Hugging Face's names: consolidated*, params.json and the tokenizer.

Both:
- name the tensors alike, and rotate neighbouring rows of a head, (0, 1), (2, 3), ...; Hugging Face rotates the halves,
  (0, D/2), (1, D/2 + 1), .... So rows of wq and wk are permuted within each head.
- say less in params.json than a config.json does. A config.json beside it is used as it is where the two agree; where
  they differ, params.json counts.

Meta: consolidated.00.pth ... NN.pth.
- Each .pth is one tensor-parallel rank. wq, wk, wv, w1, w3 and output are cut by rows, wo and w2 by columns; norms are
  in every file. tok_embeddings is cut by columns in Llama 2 and by rows in Llama 3: its shape says which.
- rope.freqs is dropped: the model computes it from rope_theta.
- An output.weight that is absent, or equals tok_embeddings.weight bit for bit, is a tied head (3.2-1B and 3B).
- Without a config.json, the factor of `use_scaled_rope` is the published one for `dim` (ROPE_FACTORS). These are the
  factors of config.json on the Hub; Meta's model.py has 8 for all. A field `rope_scaling_factor`, which a user may add,
  or the argument `rope_factor` overrides it.
- Without a config.json, max_position_embeddings is 131072 with scaled rope, 8192 for a rope_theta of 500000 (Llama 3),
  16384 for another above 10000 (Code Llama), else 4096 (Llama 2), and BOS and EOS are those of _TOKEN_IDS.
- Llama 3's tokenizer.model is tiktoken's text: tokenizer.json is made from it, and it is kept as
  original/tokenizer.model. Llama 2's is sentencepiece and keeps its name.

Mistral: consolidated.safetensors, or files cut between tensors, consolidated-00001-of-00003.safetensors.
- A mixture of experts has feed_forward.gate and feed_forward.experts.{e}.w1, w2, w3.
- params.json with `moe` is a mixtral, without it a mistral. Without `rope_theta`, it is 10000 if there is a
  `sliding_window` (7B v0.1); otherwise Mistral's code and Hugging Face's script differ (1e6 and 1e4), an error.
- max_position_embeddings is that of params.json, or its `max_seq_len`, else 32768. It changes no output.
- tokenizer.json is made from tekken.json, else from tokenizer.model of the newest tokenizer.model.vN. Both stay.
- A tied head (`tied_embeddings`) is not in the files.

Source: args.py and model.py of meta-llama/llama-models (llama3), example_params of Llama 2; args.py and transformer.py
of mistralai/mistral-inference; the conversion scripts for llama, mistral and mixtral in transformers' sources.
"""

import contextlib
import math
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.arch.llama import LlamaConfig
from ligermodels.arch.mistral import MistralConfig
from ligermodels.arch.mixtral import MixtralConfig
from ligermodels.checkpoint import reading
from ligermodels.checkpoint.files import companion_files, pickles_refused, read_json
from ligermodels.checkpoint.weights import TensorInfo, same_bits, to_halves
from ligermodels.conversion.source import Source
from ligermodels.conversion.tokenizer_files import hugging_face_files
from ligermodels.errors import CheckpointError, ConfigError, InputError
from ligermodels.text.ranks import is_tiktoken

PARAMS = "params.json"
ROPE_FACTORS = {2048: 32.0, 3072: 32.0, 4096: 8.0, 8192: 8.0, 16384: 8.0}
"""{dim of a Llama with scaled rope: its factor}: 32 for 3.2-1B and 3B, 8 for 3.1 and 3.3."""
_SCALED_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LLAMA3_THETA = 500000.0
_TOKEN_IDS = {128256: (128000, 128001), 32000: (1, 2), 32016: (1, 2)}
"""{vocab_size: (BOS, EOS)} of Llama 3, Llama 2 and Code Llama."""
_NOT_IN_PARAMS = {"max_position_embeddings", "bos_token_id", "eos_token_id", "hidden_act", "dtype", "torch_dtype"}
"""Fields that are guessed if there is no config.json."""
_META_REQUIRED = ("dim", "n_layers", "n_heads", "norm_eps")
_META_KNOWN = {
    *_META_REQUIRED, "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "rope_theta", "use_scaled_rope",
    "rope_scaling_factor", "max_batch_size", "max_seq_len",
}  # fmt: skip
_MISTRAL_REQUIRED = ("dim", "n_layers", "head_dim", "hidden_dim", "n_heads", "norm_eps", "vocab_size")
_MISTRAL_KNOWN = {
    *_MISTRAL_REQUIRED, "n_kv_heads", "rope_theta", "sliding_window", "tied_embeddings", "moe", "model_type",
    "max_seq_len", "max_batch_size", "max_position_embeddings",
}  # fmt: skip


class Place(NamedTuple):
    """Hugging Face's name of a tensor, the dim that Meta's ranks cut, and the field that counts permuted heads."""

    name: str
    axis: int | None = None
    heads: str = ""


_EMBEDDING, _QUERIES, _GATE = (
    "tok_embeddings.weight",
    "layers.{}.attention.wq.weight",
    "layers.{}.feed_forward.w1.weight",
)
_EXPERT = "model.layers.{}.block_sparse_moe.experts.{}."
PLACES = {
    _EMBEDDING: Place("model.embed_tokens.weight", 0),
    "layers.{}.attention_norm.weight": Place("model.layers.{}.input_layernorm.weight"),
    _QUERIES: Place("model.layers.{}.self_attn.q_proj.weight", 0, "n_heads"),
    "layers.{}.attention.wk.weight": Place("model.layers.{}.self_attn.k_proj.weight", 0, "n_kv_heads"),
    "layers.{}.attention.wv.weight": Place("model.layers.{}.self_attn.v_proj.weight", 0),
    "layers.{}.attention.wo.weight": Place("model.layers.{}.self_attn.o_proj.weight", 1),
    "layers.{}.ffn_norm.weight": Place("model.layers.{}.post_attention_layernorm.weight"),
    _GATE: Place("model.layers.{}.mlp.gate_proj.weight", 0),
    "layers.{}.feed_forward.w2.weight": Place("model.layers.{}.mlp.down_proj.weight", 1),
    "layers.{}.feed_forward.w3.weight": Place("model.layers.{}.mlp.up_proj.weight", 0),
    "layers.{}.feed_forward.gate.weight": Place("model.layers.{}.block_sparse_moe.gate.weight"),
    **{f"layers.{{}}.feed_forward.experts.{{}}.{w}.weight": Place(f"{_EXPERT}{w}.weight") for w in ("w1", "w2", "w3")},
    "norm.weight": Place("model.norm.weight"),
    "output.weight": Place("lm_head.weight", 0),
}
"""{Meta's or Mistral's name: its place}; {} is the number of a layer or expert."""


def place_of(name: str) -> Place:
    """The place of one of Meta's or Mistral's tensors; one that is unknown keeps its name."""
    place = PLACES.get(re.sub(r"\.\d+\.", ".{}.", name), Place(name))
    return place._replace(name=place.name.format(*re.findall(r"\.(\d+)\.", name)))


class _OriginalSource(Source):
    """Base of the two sources. params: params.json.

    Raises CheckpointError for a field of it that is missing, or that is set and unknown here.
    """

    def __init__(self, folder: Path, known: Iterable[str], required: Iterable[str]):
        self.folder, self.source, path = folder, str(folder), folder / PARAMS
        found = read_json(path)
        self.params: dict[str, Any] = found["model"] if isinstance(found.get("model"), dict) else found
        if missing := [name for name in required if self.params.get(name) is None]:
            raise CheckpointError(f"{path} lacks {', '.join(missing)}. Is it the params.json of this model, and whole?")
        unknown = [key for key, value in self.params.items() if key not in known and value not in (None, False, -1)]
        if unknown:
            raise CheckpointError(
                f"{path} holds {', '.join(map(ascii, unknown[:5]))}, and what it changes is not known here.\n"
                "  Likely: a vision, quantised or newer model, or Mistral's params.json beside Meta's weights, or the "
                "other way round. Use the checkpoint in Hugging Face's layout."
            )

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def files(self) -> dict[str, bytes | Path]:
        found: dict[str, bytes | Path] = {**companion_files(self.folder)}
        found |= hugging_face_files(self.folder, self._config["vocab_size"])
        if (path := self.folder / "generation_config.json").is_file():
            found[path.name] = path
        path = self.folder / "tokenizer.model"
        if path.is_file() and is_tiktoken(path.read_bytes()):
            found["original/tokenizer.model"] = found.pop("tokenizer.model")
        return found

    def _in_halves(self, theirs: str, tensor: Tensor) -> Tensor:
        heads = place_of(theirs).heads
        return to_halves(tensor, self.params.get(heads) or self.params["n_heads"]) if heads else tensor

    def _set_config(self, arch: Any, head_dim: int, **own: Any) -> None:
        """Makes config.json of params.json and `own`, or takes the one in the folder where the two agree."""
        params, embedding = self.params, self.headers.get("model.embed_tokens.weight")
        if embedding is None:
            raise CheckpointError(f"{self.source} lacks {_EMBEDDING}. Is it a whole language model of this layout?")
        dtype = str(embedding.dtype).removeprefix("torch.")
        self._config = made = {
            "architectures": [arch.architecture],
            "model_type": arch.model_type,
            "vocab_size": embedding.shape[0],
            "hidden_size": params["dim"],
            "num_hidden_layers": params["n_layers"],
            "num_attention_heads": params["n_heads"],
            "num_key_value_heads": params.get("n_kv_heads") or params["n_heads"],
            "head_dim": head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": float(params["norm_eps"]),
            "tie_word_embeddings": "lm_head.weight" not in self.headers,
            "dtype": dtype,
            "torch_dtype": dtype,
            **own,
        }
        if not (self.folder / "config.json").is_file():
            return
        beside = read_json(self.folder / "config.json")
        self._config = {**beside, **{name: value for name, value in made.items() if name not in _NOT_IN_PARAMS}}
        with contextlib.suppress(ConfigError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # unknown keys are named when the model is made
            if arch.from_hf(beside).values() == arch.from_hf(self._config).values():
                self._config = beside


class MetaSource(_OriginalSource):
    """Meta's files under Hugging Face's names.

    allow_pickle: .pth files are pickles; they are read as plain tensors, and only if this is True.
    rope_factor: of `use_scaled_rope`, for a `dim` that is not in ROPE_FACTORS.
    Files are mapped: `read` allocates only where ranks are joined or rows permuted.
    Raises CheckpointError for files that are missing, damaged, or of two checkpoints.
    """

    def __init__(self, folder: Path, *, allow_pickle: bool = False, rope_factor: float | None = None):
        files = _shard_files(folder)
        if not allow_pickle:
            raise pickles_refused(folder, files[0].name)
        super().__init__(folder, _META_KNOWN, _META_REQUIRED)
        self._ranks = [reading.read_pickle(path) for path in files]
        self._check_ranks(files)
        self._names = {place_of(name).name: name for name in self._ranks[0] if name != "rope.freqs"}
        self.headers = headers = {name: self._info(theirs) for name, theirs in self._names.items()}
        if self._is_tied():
            del headers["lm_head.weight"]
        params, theta = self.params, float(self.params.get("rope_theta") or 10000.0)
        scaling = self._rope_scaling(rope_factor)
        longest = 8192 if theta == _LLAMA3_THETA else 16384 if theta > 10000.0 else 4096
        ids = _TOKEN_IDS.get(headers["model.embed_tokens.weight"].shape[0])
        self._set_config(
            LlamaConfig,
            params["dim"] // params["n_heads"],
            intermediate_size=headers["model.layers.0.mlp.gate_proj.weight"].shape[0],
            max_position_embeddings=131072 if scaling else longest,
            rope_theta=theta,
            rope_scaling=scaling,
            attention_bias=False,
            mlp_bias=False,
            **(dict(zip(("bos_token_id", "eos_token_id"), ids, strict=True)) if ids else {}),
        )

    def read(self, name: str) -> Tensor:
        theirs = self._names[name]
        parts, axis = [rank[theirs] for rank in self._ranks], self._axis(theirs)
        if axis is None and not all(same_bits(parts[0], part) for part in parts[1:]):
            warnings.warn(
                f"{self.source}: the ranks hold different {theirs}; the first one's is used. Shards of two "
                "checkpoints in one folder?",
                stacklevel=2,
            )
        return self._in_halves(theirs, parts[0] if axis is None or len(parts) == 1 else torch.cat(parts, axis))

    def _check_ranks(self, files: list[Path]) -> None:
        """Raises CheckpointError if a rank is missing or of another checkpoint."""
        first, count = self._ranks[0], len(files)
        needed = [name.format(0) for name in (_EMBEDDING, _QUERIES, _GATE)]
        if not all(name in first for name in needed):
            raise CheckpointError(
                f"{files[0]} holds no Llama in Meta's layout: {', '.join(needed)} are expected, and there are "
                f"{', '.join(list(first)[:3]) or 'no tensors'}."
            )
        for file, rank in zip(files[1:], self._ranks[1:], strict=True):
            if {n: (x.shape, x.dtype) for n, x in rank.items()} != {n: (x.shape, x.dtype) for n, x in first.items()}:
                raise CheckpointError(
                    f"{file} and {files[0].name} hold tensors of other names, shapes or dtypes.\n"
                    "  Likely: shards of two checkpoints in one folder; fetch them again into an empty one."
                )
        rows, dim = len(first[_QUERIES.format(0)]), self.params["dim"]
        if rows * count != dim:
            raise CheckpointError(
                f"{self.folder} holds {count} consolidated.NN.pth, and {dim} rows of wq are cut into parts of {rows}.\n"
                "  Likely: a download that did not finish, or the params.json of another model; fetch it again."
            )

    def _axis(self, theirs: str) -> int | None:
        if theirs == _EMBEDDING:
            return 0 if self._ranks[0][theirs].shape[1] == self.params["dim"] else 1
        return place_of(theirs).axis

    def _info(self, theirs: str) -> TensorInfo:
        part, axis = self._ranks[0][theirs], self._axis(theirs)
        shape = [size * len(self._ranks) if i == axis else size for i, size in enumerate(part.shape)]
        return TensorInfo(part.dtype, tuple(shape))

    def _is_tied(self) -> bool:
        """Whether the head equals the embedding. They are compared whole only if their first rows agree."""
        head, table = "lm_head.weight", "model.embed_tokens.weight"
        if head not in self.headers or self.headers[head] != self.headers[table]:
            return False
        starts = [self._ranks[0][self._names[name]][0] for name in (head, table)]
        common = min(map(len, starts))
        return same_bits(starts[0][:common], starts[1][:common]) and same_bits(self.read(head), self.read(table))

    def _rope_scaling(self, factor: float | None) -> dict[str, Any] | None:
        """rope_scaling of config.json."""
        path, dim = self.folder / PARAMS, self.params["dim"]
        if not self.params.get("use_scaled_rope"):
            if factor is not None:
                raise InputError(f"rope_factor={factor} was given, and {path} does not use scaled rope; leave it out")
            return None
        if factor is not None and not 1 <= factor < math.inf:
            raise InputError(f"rope_factor={factor}: expected a number of at least 1, such as 8 (3.1) or 32 (3.2)")
        factor = factor or self.params.get("rope_scaling_factor") or ROPE_FACTORS.get(dim)
        if factor is None:
            raise CheckpointError(
                f"{path} has use_scaled_rope without its factor, and no Llama of dim {dim} is known.\n"
                "  Next: add rope_scaling_factor to it (3.1: 8, 3.2: 32), or pass rope_factor (--rope-factor)."
            )
        return {"rope_type": "llama3", "factor": float(factor), **_SCALED_ROPE}


def _shard_files(folder: Path) -> list[Path]:
    """consolidated.00.pth and the following ones, without a gap. Raises CheckpointError."""
    files = sorted(path for path in folder.iterdir() if re.fullmatch(r"consolidated\.\d\d\.pth", path.name))
    expected = [folder / f"consolidated.{n:02}.pth" for n in range(len(files))]
    if not files or files != expected:
        lost = next((path for path in expected if path not in files), folder / "consolidated.00.pth")
        raise CheckpointError(
            f"{folder} lacks {lost.name}, and holds {len(files)} other consolidated.NN.pth.\n"
            "  Likely: a download that did not finish; fetch it again."
        )
    return files


class MistralSource(_OriginalSource):
    """Mistral's files under Hugging Face's names. They are mapped: `read` allocates only where rows are permuted.

    Raises CheckpointError for files that are missing, damaged, or of two checkpoints.
    """

    def __init__(self, folder: Path):
        super().__init__(folder, _MISTRAL_KNOWN, _MISTRAL_REQUIRED)
        params, path = self.params, folder / PARAMS
        if params.get("model_type") not in (None, "transformer"):
            raise CheckpointError(f"{path}: model_type {params['model_type']!r} is not computed here")
        self._stored: dict[str, tuple[reading.SafetensorsFile, str]] = {}
        headers: dict[str, TensorInfo] = {}
        places: dict[str, str] = {}
        for file in sorted(found.name for found in folder.glob("consolidated*.safetensors")):
            opened = reading.SafetensorsFile(folder / file, folder)
            for theirs in opened.names:
                name = place_of(theirs).name
                if name in places:
                    raise CheckpointError(
                        f"{folder / file} and {places[name]} both hold {theirs}.\n"
                        "  Likely: shards of two checkpoints in one folder; fetch them again into an empty one."
                    )
                self._stored[name], headers[name], places[name] = (opened, theirs), opened.info(theirs), file
        self.headers, self.places = headers, places
        theta, window, moe = (params.get(key) for key in ("rope_theta", "sliding_window", "moe"))
        if theta is None and window is None:
            raise CheckpointError(
                f"{path} has neither rope_theta nor sliding_window, and programs differ in what they then "
                "take.\n  Next: add the rope_theta of the model's config.json on the Hub (7B v0.2 and later: 1000000)."
            )
        own: dict[str, Any] = {}
        if moe:
            if unknown := moe.keys() - {"num_experts", "num_experts_per_tok"}:
                raise CheckpointError(f"{path}: moe holds {', '.join(sorted(unknown))}, which is not known here")
            own = {"num_local_experts": moe["num_experts"], "num_experts_per_tok": moe["num_experts_per_tok"]}
        self._set_config(
            MixtralConfig if moe else MistralConfig,
            params["head_dim"],
            vocab_size=params["vocab_size"],
            intermediate_size=params["hidden_dim"],
            max_position_embeddings=params.get("max_position_embeddings") or params.get("max_seq_len") or 32768,
            rope_theta=float(theta or 10000.0),
            sliding_window=None if window is None else int(window),  # a string in early files
            tie_word_embeddings=bool(params.get("tied_embeddings")),
            bos_token_id=1,
            eos_token_id=2,
            **own,
        )

    def read(self, name: str) -> Tensor:
        opened, theirs = self._stored[name]
        return self._in_halves(theirs, opened.read(theirs))
