"""What Meta's and Mistral's layouts share: names of tensors, order of rows, params.json and the files beside it.

- Both rotate neighbouring rows of a head (0, 1), (2, 3), ..., Hugging Face the halves (0, D/2), (1, D/2 + 1), ...: the
  rows of wq and wk are permuted within each head.
- params.json does not say all that a config.json does. A config.json beside it is taken as it is where the two agree;
  where they do not, params.json holds.
"""

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ligermodels.arch import ARCHS
from ligermodels.checkpoint.files import companion_files, read_json
from ligermodels.checkpoint.weights import to_halves
from ligermodels.conversion.source import Source
from ligermodels.conversion.tokenizer_files import hugging_face_files
from ligermodels.errors import CheckpointError, ConfigError
from ligermodels.text.sentencepiece_backend import is_tiktoken

PARAMS = "params.json"
EMBEDDING = "tok_embeddings.weight"
_NOT_IN_PARAMS = {
    "max_position_embeddings", "bos_token_id", "eos_token_id", "hidden_act", "dtype", "torch_dtype"
}  # fmt: skip
"""Fields that are guessed where no config.json says them."""


@dataclass(frozen=True)
class Place:
    """What a tensor of Meta's is called by Hugging Face, the dim along which ranks cut it, whose rows are permuted."""

    name: str
    axis: int | None = None
    heads: str = ""


_EXPERT = "model.layers.{}.block_sparse_moe.experts.{}."
PLACES = {
    "tok_embeddings.weight": Place("model.embed_tokens.weight", 0),
    "layers.{}.attention_norm.weight": Place("model.layers.{}.input_layernorm.weight"),
    "layers.{}.attention.wq.weight": Place("model.layers.{}.self_attn.q_proj.weight", 0, "n_heads"),
    "layers.{}.attention.wk.weight": Place("model.layers.{}.self_attn.k_proj.weight", 0, "n_kv_heads"),
    "layers.{}.attention.wv.weight": Place("model.layers.{}.self_attn.v_proj.weight", 0),
    "layers.{}.attention.wo.weight": Place("model.layers.{}.self_attn.o_proj.weight", 1),
    "layers.{}.ffn_norm.weight": Place("model.layers.{}.post_attention_layernorm.weight"),
    "layers.{}.feed_forward.w1.weight": Place("model.layers.{}.mlp.gate_proj.weight", 0),
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
    pattern, numbers = _split(name)
    place = PLACES.get(pattern)
    return Place(name) if place is None else Place(place.name.format(*numbers), place.axis, place.heads)


def _split(name: str) -> tuple[str, list[str]]:
    """A name with {} for each number in it, and the numbers."""
    return re.sub(r"\.\d+\.", ".{}.", name), re.findall(r"\.(\d+)\.", name)


def read_params(path: Path, known: Iterable[str], required: Iterable[str]) -> dict[str, Any]:
    """params.json. Raises CheckpointError for a field that is missing, or unknown here and not switched off."""
    found = read_json(path)
    params: dict[str, Any] = found["model"] if isinstance(found.get("model"), dict) else found
    if missing := [name for name in required if params.get(name) is None]:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}. Is it the params.json of this model, and whole?")
    unknown = [key for key, value in params.items() if key not in known and value not in (None, False, -1)]
    if unknown:
        raise CheckpointError(
            f"{path} holds {', '.join(map(ascii, unknown[:5]))}, and what it changes is not known here.\n"
            "  Likely: a vision, quantised or newer model, or Mistral's params.json beside Meta's weights, or the "
            "other way round. Use the checkpoint in Hugging Face's layout."
        )
    return params


def config_of(source: Source, params: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """What the params.json of a Llama or a Mistral says, in the fields of a config.json."""
    embedding = source.headers.get("model.embed_tokens.weight")
    if embedding is None:
        raise CheckpointError(f"{source.source} lacks {EMBEDDING}. Is it a whole language model of this layout?")
    dtype = str(embedding.dtype).removeprefix("torch.")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": params["dim"],
        "num_hidden_layers": params["n_layers"],
        "num_attention_heads": params["n_heads"],
        "num_key_value_heads": params.get("n_kv_heads") or params["n_heads"],
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": float(params["norm_eps"]),
        "tie_word_embeddings": "lm_head.weight" not in source.headers,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def with_config_beside(folder: Path, made: dict[str, Any]) -> dict[str, Any]:
    """`made` of params.json; the config.json beside it instead where the two agree, both where they do not."""
    if not (folder / "config.json").is_file():
        return made
    beside = read_json(folder / "config.json")
    config = {**beside, **{name: value for name, value in made.items() if name not in _NOT_IN_PARAMS}}
    parse = ARCHS[made["model_type"]].config_class.from_hf
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # unknown keys are named when the model is made
            return beside if parse(beside).values() == parse(config).values() else config
    except ConfigError:
        return config


class ConsolidatedSource(Source):
    """Base of the two sources."""

    folder: Path
    _params: dict[str, Any]
    _config: dict[str, Any]

    def config(self) -> dict[str, Any]:
        """The contents of a config.json; see the layout's module for what params.json does not say."""
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
        return to_halves(tensor, self._params.get(heads) or self._params["n_heads"]) if heads else tensor
