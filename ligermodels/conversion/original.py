"""Meta's and Mistral's own files under Hugging Face's names: consolidated*, params.json and the tokenizer.

Both:
- name the tensors alike, and rotate neighbouring rows of a head, (0, 1), (2, 3), ...; Hugging Face rotates the halves,
  (0, D/2), (1, D/2 + 1), .... So rows of wq and wk are permuted within each head.
- say less in params.json than a config.json does. A config.json beside it is used as it is where the two agree; where
  they differ, params.json counts.

Meta: consolidated.00.pth ... NN.pth.
- Each .pth is one tensor-parallel rank. wq, wk, wv, w1, w3 and output are cut by rows, wo and w2 by columns; norms are
  in every file. tok_embeddings is cut by columns in Llama 2 and by rows in Llama 3: its shape says which.
- An output.weight that is absent, or equals tok_embeddings.weight bit for bit, is a tied head (3.2-1B and 3B).
- The factor of `use_scaled_rope` is a field `rope_scaling_factor` that a user has added, or the one that config.json
  has on the Hub for this `dim` (Meta's model.py has 8 for all).
- Without a config.json, max_position_embeddings is 131072 with scaled rope, 8192 for a rope_theta of 500000 (Llama 3),
  16384 for another above 10000 (Code Llama), else 4096 (Llama 2).
- Llama 3's tokenizer.model is tiktoken's text: tokenizer.json is made from it, and it is kept as
  original/tokenizer.model. Llama 2's is sentencepiece and keeps its name.

Mistral: consolidated.safetensors, or files cut between tensors, consolidated-00001-of-00003.safetensors.
- With `moe` in params.json it is a mixtral, with experts feed_forward.experts.{e}.w1, w2, w3; else a mistral.
- Without `rope_theta`, it is 10000 if there is a `sliding_window` (7B v0.1); otherwise Mistral's code and Hugging
  Face's script differ (1e6 and 1e4), an error.
- max_position_embeddings is that of params.json, or its `max_seq_len`, else 32768. It changes no output.
- tokenizer.json is made from tekken.json, else from tokenizer.model of the newest tokenizer.model.vN. Both stay.

Source: args.py and model.py of meta-llama/llama-models (llama3), example_params of Llama 2; args.py and transformer.py
of mistralai/mistral-inference; the conversion scripts for llama, mistral and mixtral in transformers' sources.
"""

import contextlib
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
from ligermodels.checkpoint.files import companion_files, json_bytes, pickles_refused, read_json
from ligermodels.checkpoint.weights import TensorInfo, same_bits, to_halves
from ligermodels.conversion.source import Source
from ligermodels.errors import CheckpointError, ConfigError, TokenizerError
from ligermodels.text import saving
from ligermodels.text.backend import Backend
from ligermodels.text.files import call_settings, read_files
from ligermodels.text.tiktoken import is_tiktoken

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
_MIXED = "  Likely: shards of two checkpoints in one folder; fetch them again into an empty one."


class Place(NamedTuple):
    """Hugging Face's name of a tensor, the dim that Meta's ranks cut, and the field that counts permuted heads."""

    name: str
    axis: int | None = None
    heads: str = ""


_EMBEDDING = "tok_embeddings.weight"
_ATTENTION = {
    "wq": ("q_proj", 0, "n_heads"),
    "wk": ("k_proj", 0, "n_kv_heads"),
    "wv": ("v_proj", 0),
    "wo": ("o_proj", 1),
}
_MLP = {"w1": ("gate_proj", 0), "w2": ("down_proj", 1), "w3": ("up_proj", 0)}
_OF_LAYER = {
    "attention_norm": Place("input_layernorm"),
    "ffn_norm": Place("post_attention_layernorm"),
    "feed_forward.gate": Place("block_sparse_moe.gate"),
    **{f"attention.{theirs}": Place(f"self_attn.{ours}", *rest) for theirs, (ours, *rest) in _ATTENTION.items()},  # type: ignore[arg-type]
    **{f"feed_forward.{theirs}": Place(f"mlp.{ours}", axis) for theirs, (ours, axis) in _MLP.items()},
    **{f"feed_forward.experts.{{}}.{w}": Place(f"block_sparse_moe.experts.{{}}.{w}") for w in _MLP},
}
PLACES = {
    _EMBEDDING: Place("model.embed_tokens.weight", 0),
    "norm.weight": Place("model.norm.weight"),
    "output.weight": Place("lm_head.weight", 0),
    **{
        f"layers.{{}}.{theirs}.weight": place._replace(name=f"model.layers.{{}}.{place.name}.weight")
        for theirs, place in _OF_LAYER.items()
    },
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
        content = read_json(path)
        self.params: dict[str, Any] = content["model"] if isinstance(content.get("model"), dict) else content
        if missing := [name for name in required if self.params.get(name) is None]:
            raise CheckpointError(f"{path} lacks {', '.join(missing)}. Is it the params.json of this model, and whole?")
        unknown = [key for key, value in self.params.items() if key not in known and value not in (None, False, -1)]
        if unknown:
            raise CheckpointError(
                f"{path} holds {', '.join(map(ascii, unknown[:5]))}, and what it changes is not known here.\n"
                "  Likely: a vision, quantised or newer model, or Mistral's params.json beside Meta's weights, or the "
                "other way round. Use the checkpoint in Hugging Face's layout."
            )

    def files(self) -> dict[str, bytes | Path]:
        files: dict[str, bytes | Path] = {**companion_files(self.folder)}
        files |= _tokenizer_files(self.folder, self.config["vocab_size"])
        if (path := self.folder / "generation_config.json").is_file():
            files[path.name] = path
        path = self.folder / "tokenizer.model"
        if path.is_file() and is_tiktoken(path.read_bytes()):
            files["original/tokenizer.model"] = files.pop("tokenizer.model")
        return files

    def _in_halves(self, theirs: str, tensor: Tensor) -> Tensor:
        heads = place_of(theirs).heads
        return to_halves(tensor, self.params.get(heads) or self.params["n_heads"]) if heads else tensor

    def _set_config(self, arch: Any, head_dim: int, **fields: Any) -> None:
        """Makes config.json of params.json and `fields`, or takes the one in the folder where the two agree."""
        params, embedding = self.params, self.headers.get("model.embed_tokens.weight")
        if embedding is None:
            raise CheckpointError(f"{self.source} lacks {_EMBEDDING}. Is it a whole language model of this layout?")
        dtype = str(embedding.dtype).removeprefix("torch.")
        self.config = from_params = {
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
            **fields,
        }
        if not (self.folder / "config.json").is_file():
            return
        beside = read_json(self.folder / "config.json")
        self.config = {**beside, **{name: value for name, value in from_params.items() if name not in _NOT_IN_PARAMS}}
        with contextlib.suppress(ConfigError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # unknown keys are named when the model is made
            if arch.from_hf(beside).values() == arch.from_hf(self.config).values():
                self.config = beside


class MetaSource(_OriginalSource):
    """Meta's files under Hugging Face's names.

    allow_pickle: .pth files are pickles; they are read as plain tensors, and only if this is True.
    Files are mapped: `read` allocates only where ranks are joined or rows permuted.
    Raises CheckpointError for files that are missing, damaged, or of two checkpoints.
    """

    def __init__(self, folder: Path, *, allow_pickle: bool = False):
        files = sorted(path for path in folder.iterdir() if re.fullmatch(r"consolidated\.\d\d\.pth", path.name))
        if lost := [n for n in range(max(1, len(files))) if folder / f"consolidated.{n:02}.pth" not in files]:
            raise CheckpointError(
                f"{folder} lacks consolidated.{lost[0]:02}.pth, and holds {len(files)} other consolidated.NN.pth.\n"
                "  Likely: a download that did not finish; fetch it again."
            )
        if not allow_pickle:
            raise pickles_refused(folder, files[0].name)
        super().__init__(folder, _META_KNOWN, _META_REQUIRED)
        params, dim = self.params, self.params["dim"]
        self._ranks = [reading.read_pickle(path) for path in files]
        self._check_ranks(files)
        self._names = {place_of(name).name: name for name in self._ranks[0] if name != "rope.freqs"}
        self.headers = headers = {name: self._info(theirs) for name, theirs in self._names.items()}
        if self._is_tied():
            del headers["lm_head.weight"]
        theta, scaling = float(params.get("rope_theta") or 10000.0), self._rope_scaling()
        longest = 8192 if theta == _LLAMA3_THETA else 16384 if theta > 10000.0 else 4096
        ids = _TOKEN_IDS.get(headers["model.embed_tokens.weight"].shape[0])
        self._set_config(
            LlamaConfig,
            dim // params["n_heads"],
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
        first, count, dim = self._ranks[0], len(files), self.params["dim"]
        needed = [_EMBEDDING, "layers.0.attention.wq.weight", "layers.0.feed_forward.w1.weight"]
        if not all(name in first for name in needed):
            raise CheckpointError(
                f"{files[0]} holds no Llama in Meta's layout: {', '.join(needed)} are expected, and there are "
                f"{', '.join(list(first)[:3]) or 'no tensors'}."
            )
        headers = [{name: (x.shape, x.dtype) for name, x in rank.items()} for rank in self._ranks]
        for file, header in zip(files, headers, strict=True):
            if header != headers[0]:
                both = f"{file} and {files[0].name}"
                raise CheckpointError(f"{both} hold tensors of other names, shapes or dtypes.\n{_MIXED}")
        if (rows := len(first[needed[1]])) * count != dim:
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
        return TensorInfo(part.dtype, tuple(n * len(self._ranks) if i == axis else n for i, n in enumerate(part.shape)))

    def _is_tied(self) -> bool:
        """Whether the head equals the embedding. They are compared whole only if their first rows agree."""
        head, table = "lm_head.weight", "model.embed_tokens.weight"
        if head not in self.headers or self.headers[head] != self.headers[table]:
            return False
        starts = [self._ranks[0][self._names[name]][0] for name in (head, table)]
        common = min(map(len, starts))
        return same_bits(starts[0][:common], starts[1][:common]) and same_bits(self.read(head), self.read(table))

    def _rope_scaling(self) -> dict[str, Any] | None:
        """rope_scaling of config.json."""
        path, dim = self.folder / PARAMS, self.params["dim"]
        if not self.params.get("use_scaled_rope"):
            return None
        factor = self.params.get("rope_scaling_factor") or ROPE_FACTORS.get(dim)
        if factor is None:
            raise CheckpointError(
                f"{path} has use_scaled_rope without its factor, and no Llama of dim {dim} is known.\n"
                "  Next: add rope_scaling_factor to it (3.1: 8, 3.2: 32)."
            )
        return {"rope_type": "llama3", "factor": float(factor), **_SCALED_ROPE}


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
        for file in sorted(folder.glob("consolidated*.safetensors")):
            opened = reading.SafetensorsFile(file, folder)
            for theirs in opened.names:
                name = place_of(theirs).name
                if name in self._stored:
                    raise CheckpointError(f"{file} and {self._stored[name][0].path.name} both hold {theirs}.\n{_MIXED}")
                self._stored[name] = opened, theirs
        self.headers = {name: opened.info(theirs) for name, (opened, theirs) in self._stored.items()}
        theta, window, moe = (params.get(key) for key in ("rope_theta", "sliding_window", "moe"))
        if theta is None and window is None:
            raise CheckpointError(
                f"{path} has neither rope_theta nor sliding_window, and programs differ in what they then "
                "take.\n  Next: add the rope_theta of the model's config.json on the Hub (7B v0.2 and later: 1000000)."
            )
        experts: dict[str, Any] = {}
        if moe:
            if unknown := moe.keys() - {"num_experts", "num_experts_per_tok"}:
                raise CheckpointError(f"{path}: moe holds {', '.join(sorted(unknown))}, which is not known here")
            experts = {"num_local_experts": moe["num_experts"], "num_experts_per_tok": moe["num_experts_per_tok"]}
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
            **experts,
        )

    def read(self, name: str) -> Tensor:
        opened, theirs = self._stored[name]
        return self._in_halves(theirs, opened.read(theirs))


def _tokenizer_files(folder: Path, rows: int) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json, made of Meta's or Mistral's own tokenizer. rows: of the embedding.

    Empty for a folder without a tokenizer, or with a tokenizer.json. generation_config.json is among them if Meta's
    code stops at other ids than the end of a text.
    Raises TokenizerError.
    """
    files = read_files(folder)
    if files.vocabulary is None or files.vocabulary.name == "tokenizer.json":
        return {}
    backend = Backend(files)
    if backend.base_vocab_size > rows:
        raise TokenizerError(
            f"{files.vocabulary} has {backend.base_vocab_size} ids, the model's embedding {rows} rows. Likely cause: "
            "the tokenizer of another checkpoint."
        )
    complete = backend.complete(files)
    contents = saving.contents(complete, complete, backend, call_settings(files.config, folder))
    if backend.stop_ids and not files.eos_token_ids:
        ids = {"bos_token_id": backend.token_to_id(backend.named["bos_token"]), "eos_token_id": [*backend.stop_ids]}
        contents["generation_config.json"] = json_bytes(ids)
    return contents
