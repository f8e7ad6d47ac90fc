"""Mistral's own files with Hugging Face's names: consolidated.safetensors, params.json, its tokenizer.

- The names are Meta's; the file is whole, or cut between tensors (consolidated-00001-of-00003.safetensors, with an
  index or without), never within one.
- A mixture of experts has feed_forward.gate and feed_forward.experts.{e}.w1, w2, w3.
- Rotation is of neighbouring rows, as in Meta's files: the rows of wq and wk change places within each head.
- params.json with `moe` is a mixtral, without it a mistral. Without `rope_theta`, it is 10000 if there is a
  `sliding_window` (7B v0.1); otherwise Mistral's code and Hugging Face's script differ (1e6 and 1e4), an error.
- The longest text is `max_position_embeddings` or `max_seq_len`, else 32768: it has no say in what is computed.
- tokenizer.model, tokenizer.model.v3 and tekken.json keep their names; no tokenizer.json is made of them.

Source: args.py and transformer.py of mistralai/mistral-inference;
convert_mistral_weights_to_hf.py and convert_mixtral_weights_to_hf.py of transformers' sources.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from ligermodels.arch.mistral import MistralConfig
from ligermodels.arch.mixtral import MixtralConfig
from ligermodels.checkpoint import reading
from ligermodels.checkpoint.reading import read_json
from ligermodels.checkpoint.weights import FLOATS, TensorInfo
from ligermodels.conversion.meta import (
    PARAMS,
    Place,
    Sizes,
    check_heads,
    check_keys,
    check_layers,
    check_names,
    listing,
    number,
    places,
    refuse_both,
    to_halves,
)
from ligermodels.errors import CheckpointError

WHOLE = "consolidated.safetensors"

_KNOWN = {"dim", "n_layers", "head_dim", "hidden_dim", "n_heads", "n_kv_heads", "norm_eps", "vocab_size", "moe"}
_KNOWN |= {"rope_theta", "sliding_window", "tied_embeddings", "max_seq_len", "max_batch_size"}
_KNOWN |= {"max_position_embeddings"}


class MistralSource:
    """Mistral's files as a checkpoint with Hugging Face names; a weights.Reader and a context manager.

    Files are mapped: `read` allocates a tensor only where rows are moved, one copy of wq or wk.
    Raises CheckpointError (files that are missing, damaged, at odds with params.json), HubError (cannot be read).
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.source = str(folder)
        self._params_file = self.folder / PARAMS
        files, weight_map = _weight_files(self.folder)
        self._params = read_json(self._params_file)
        known = _KNOWN | {"model_type"} if self._params.get("model_type") == "transformer" else _KNOWN
        check_keys(self._params, known, self._params_file)
        self._sizes = self._read_sizes()
        self._tied = self._flag("tied_embeddings")
        self._files: dict[str, reading.SafetensorsFile] = {}
        infos: dict[str, TensorInfo] = {}
        for file, opened in reading.open_safetensors(self.folder, files).items():
            for name in opened.names:
                if weight_map is not None and weight_map.get(name) != file:
                    continue
                if name in infos:
                    raise CheckpointError(
                        f"{opened.path} holds {name}, which another file of the folder holds too.\n"
                        "  Likely: shards of two checkpoints in one folder; fetch them again into an empty one."
                    )
                infos[name] = opened.info(name)
                self._files[name] = opened
        for name, file in (weight_map or {}).items():
            if name not in infos:
                raise CheckpointError(f"{self.folder / file} lacks {name}, against its index; fetch both again")
        check_layers(self._sizes, len(infos), self.source)
        self._places = places(self._sizes)
        if self._tied and "output.weight" not in infos:
            del self._places["lm_head.weight"]
        by_name = {place.name: name for name, place in self._places.items()}
        check_names(by_name, infos, self.source)
        for name, info in infos.items():
            _check_tensor(self._places[by_name[name]], info, self.source)
        self.headers = {by_name[name]: info for name, info in infos.items()}

    def config(self) -> dict[str, Any]:
        """The contents of a config.json; see the module for what params.json does not say."""
        params, where, sizes = self._params, self._params_file, self._sizes
        arch = MixtralConfig if sizes.experts else MistralConfig
        dtype = str(self.headers["model.embed_tokens.weight"].dtype).removeprefix("torch.")
        longest = number(params, "max_seq_len", where, int, 32768)
        config: dict[str, Any] = {
            "architectures": [arch.architecture],
            "model_type": arch.model_type,
            "vocab_size": sizes.vocab,
            "hidden_size": sizes.dim,
            "intermediate_size": sizes.intermediate,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "head_dim": sizes.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": number(params, "max_position_embeddings", where, int, longest),
            "rms_norm_eps": number(params, "norm_eps", where, float),
            "rope_theta": self._theta(),
            "sliding_window": self._window(),
            "tie_word_embeddings": self._tied,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "dtype": dtype,
            "torch_dtype": dtype,
        }
        if sizes.experts:
            config["num_local_experts"] = sizes.experts
            config["num_experts_per_tok"] = number(params["moe"], "num_experts_per_tok", where, int)
        return config

    def files(self) -> dict[str, bytes | Path]:
        """{name in the folder to write: file} of what belongs to the model beside its config and weights."""
        found: dict[str, bytes | Path] = {**reading.companion_files(self.folder)}
        for name in listing(self.folder):
            kept = re.fullmatch(r"tokenizer\.model\.v\w+|tekken\.json|generation_config\.json", name)
            if kept and (self.folder / name).is_file():
                found[name] = self.folder / name
        return found

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU, in Hugging Face's order of rows: not to be written to."""
        place = self._places[name]
        tensor = self._files[place.name].read(place.name)
        return to_halves(tensor, place.heads).reshape(place.shape) if place.heads else tensor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._files.clear()

    def _read_sizes(self) -> Sizes:
        params, where = self._params, self._params_file
        dim, layers, heads, head_dim, hidden, vocab = (
            number(params, name, where, int)
            for name in ("dim", "n_layers", "n_heads", "head_dim", "hidden_dim", "vocab_size")
        )
        kv_heads = number(params, "n_kv_heads", where, int, heads)
        check_heads(heads, kv_heads, head_dim, where)
        number(params, "norm_eps", where, float)
        self._theta()
        self._window()
        experts = 0
        if params.get("moe") is not None:
            moe = params["moe"]
            if not isinstance(moe, Mapping):
                raise CheckpointError(f"{where}: moe is a {type(moe).__name__}, expected an object; fetch it again")
            check_keys(moe, {"num_experts", "num_experts_per_tok"}, where)
            experts, chosen = (number(moe, name, where, int) for name in ("num_experts", "num_experts_per_tok"))
            if chosen > experts:
                raise CheckpointError(
                    f"{where}: num_experts_per_tok {chosen} is more than num_experts {experts}; fetch it again"
                )
        return Sizes(dim, layers, heads, kv_heads, head_dim, hidden, vocab, experts)

    def _theta(self) -> float:
        if self._params.get("rope_theta") is None and self._window() is None:
            raise CheckpointError(
                f"{self._params_file} has neither rope_theta nor sliding_window, and programs differ in what they then "
                "take.\n  Next: add the rope_theta of the model's config.json on the Hub (7B v0.2 and later: 1000000)."
            )
        return number(self._params, "rope_theta", self._params_file, float, 10000.0)

    def _window(self) -> int | None:
        """The sliding window, which early files spell as a string."""
        value = self._params.get("sliding_window")
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,15}", value):
            value = int(value)
        return None if value is None else number({"sliding_window": value}, "sliding_window", self._params_file, int)

    def _flag(self, name: str) -> bool:
        value = self._params.get(name) or False
        if not isinstance(value, bool):
            raise CheckpointError(f"{self._params_file}: {name} is {str(value)[:50]!r}, expected true or false")
        return value


def _check_tensor(place: Place, info: TensorInfo, where: str) -> None:
    if info.dtype not in FLOATS:
        raise CheckpointError(
            f"{where}: {place.name} is quantised ({info.dtype}). Use the checkpoint that it was made from."
        )
    if info.shape != place.shape:
        raise CheckpointError(
            f"{where}: {place.name} is {list(info.shape)}, and params.json makes it {list(place.shape)}.\n"
            "  Likely: params.json is another model's; fetch both again."
        )


def _weight_files(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """The files that hold the weights and, where there is an index, {tensor: file}. Raises CheckpointError."""
    names = listing(folder)
    refuse_both(folder, names)
    if f"{WHOLE}.index.json" in names:
        return reading.weight_files(folder, WHOLE)
    parts = {name: re.fullmatch(r"consolidated-(\d{5})-of-(\d{5})\.safetensors", name) for name in names}
    cut = {name: match for name, match in parts.items() if match}
    if cut and WHOLE in names:
        raise CheckpointError(
            f"{folder} holds both {WHOLE} and {next(iter(cut))}, and nothing says which to read; move one elsewhere"
        )
    if not cut and WHOLE not in names:
        raise CheckpointError(
            f"{folder} lacks {WHOLE}, whole or in parts.\n  Likely: another layout, or a download that did not finish."
        )
    totals = {int(match[2]) for match in cut.values()}
    if len(totals) > 1:
        raise CheckpointError(
            f"{folder} holds parts of {' and of '.join(map(str, sorted(totals)))} files.\n"
            "  Likely: two checkpoints in one folder; fetch one again into an empty one."
        )
    for total in totals:
        there = {int(match[1]) for match in cut.values()}
        lost = next((n for n in range(1, total + 1) if n not in there), None)
        if lost is not None or len(there) != total:
            raise CheckpointError(
                f"{folder} lacks consolidated-{lost or 1:05}-of-{total:05}.safetensors.\n"
                "  Likely: a download that did not finish; fetch it again."
            )
    return list(cut) or [WHOLE], None
