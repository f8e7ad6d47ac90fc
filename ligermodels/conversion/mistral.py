"""Mistral's own files under Hugging Face's names: consolidated.safetensors, params.json, its tokenizer.

- The names are Meta's; the file is whole, or cut between tensors (consolidated-00001-of-00003.safetensors, with an
  index, which is not needed, or without), never within one.
- A mixture of experts has feed_forward.gate and feed_forward.experts.{e}.w1, w2, w3.
- params.json with `moe` is a mixtral, without it a mistral. Without `rope_theta`, it is 10000 if there is a
  `sliding_window` (7B v0.1); otherwise Mistral's code and Hugging Face's script differ (1e6 and 1e4), an error.
- The longest text is `max_position_embeddings` or `max_seq_len`, else 32768: it does not change what is computed.
- tokenizer.json is made of tekken.json; else tokenizer.model of the newest tokenizer.model.vN. Both stay.
- A tied head (`tied_embeddings`) is not in the files.

Source: args.py and transformer.py of mistralai/mistral-inference;
convert_mistral_weights_to_hf.py and convert_mixtral_weights_to_hf.py of transformers' sources.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from ligermodels.arch.mistral import MistralConfig
from ligermodels.arch.mixtral import MixtralConfig
from ligermodels.checkpoint import reading
from ligermodels.conversion.consolidated import (
    PARAMS,
    ConsolidatedSource,
    config_of,
    place_of,
    read_params,
    with_config_beside,
)
from ligermodels.errors import CheckpointError

_REQUIRED = ("dim", "n_layers", "head_dim", "hidden_dim", "n_heads", "norm_eps", "vocab_size")
_KNOWN = {*_REQUIRED, "n_kv_heads", "rope_theta", "sliding_window", "tied_embeddings", "moe"}
_KNOWN |= {"model_type", "max_seq_len", "max_batch_size", "max_position_embeddings"}


class MistralSource(ConsolidatedSource):
    """Mistral's files under Hugging Face's names.

    Files are mapped: `read` allocates a tensor only where rows are permuted, one copy of wq or wk.
    Raises CheckpointError for files that are missing, damaged, or of two checkpoints.
    """

    def __init__(self, folder: Path):
        self.folder, self.source = folder, str(folder)
        self._params = read_params(folder / PARAMS, _KNOWN, _REQUIRED)
        if self._params.get("model_type") not in (None, "transformer"):
            raise CheckpointError(f"{folder / PARAMS}: model_type {self._params['model_type']!r} is not computed here")
        names = sorted(path.name for path in folder.glob("consolidated*.safetensors"))
        self._stored: dict[str, tuple[reading.SafetensorsFile, str]] = {}
        self.headers, self.places = {}, {}
        for file in names:
            opened = reading.SafetensorsFile(folder / file, folder)
            for theirs in opened.names:
                name = place_of(theirs).name
                if name in self._stored:
                    raise CheckpointError(
                        f"{folder / file} and {self.places[name]} both hold {theirs}.\n"
                        "  Likely: shards of two checkpoints in one folder; fetch them again into an empty one."
                    )
                self._stored[name] = opened, theirs
                self.headers[name], self.places[name] = opened.info(theirs), file
        self._config = with_config_beside(folder, self._make_config())

    def read(self, name: str) -> Tensor:
        """The tensor in Hugging Face's order of rows: not to be written to."""
        opened, theirs = self._stored[name]
        return self._in_halves(theirs, opened.read(theirs))

    def _make_config(self) -> dict[str, Any]:
        params, path, window = self._params, self.folder / PARAMS, self._params.get("sliding_window")
        theta, moe = params.get("rope_theta"), params.get("moe")
        if theta is None and window is None:
            raise CheckpointError(
                f"{path} has neither rope_theta nor sliding_window, and programs differ in what they then "
                "take.\n  Next: add the rope_theta of the model's config.json on the Hub (7B v0.2 and later: 1000000)."
            )
        arch = MixtralConfig if moe else MistralConfig
        config = {
            "architectures": [arch.architecture],
            "model_type": arch.model_type,
            **config_of(self, params, params["head_dim"]),
            "vocab_size": params["vocab_size"],
            "intermediate_size": params["hidden_dim"],
            "max_position_embeddings": params.get("max_position_embeddings") or params.get("max_seq_len") or 32768,
            "rope_theta": float(theta or 10000.0),
            "sliding_window": None if window is None else int(window),  # early files spell it as a string
            "tie_word_embeddings": bool(params.get("tied_embeddings")),
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        if moe:
            if unknown := moe.keys() - {"num_experts", "num_experts_per_tok"}:
                raise CheckpointError(f"{path}: moe holds {', '.join(sorted(unknown))}, which is not known here")
            config["num_local_experts"] = moe["num_experts"]
            config["num_experts_per_tok"] = moe["num_experts_per_tok"]
        return config
