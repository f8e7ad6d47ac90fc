"""Meta's Llama files to Hugging Face's names and back: consolidated.00.pth ... NN.pth, params.json, tokenizer.model.

- Each .pth is one tensor-parallel rank. wq, wk, wv, w1, w3 and output are cut by rows, wo and w2 by columns; norms are
  in every file. tok_embeddings is cut by columns in Llama 2 and by rows in Llama 3: its shape says which.
- rope.freqs is left out: the model computes it from rope_theta.
- An output.weight that is absent or equals tok_embeddings.weight bit for bit is a tied head (3.2-1B and 3B).

What params.json does not say, and no config.json beside it:
- the factor of `use_scaled_rope`: by `dim`, as published: 32 for 2048 and 3072 (Llama 3.2-1B, 3B), 8 for 4096, 8192 and
  16384 (3.1, 3.3). These are the factors of config.json on the Hub; Meta's model.py has 8 for all. A field
  `rope_scaling_factor`, which is written where the table does not hold, or the argument `rope_factor` overrides it;
- the longest text: 131072 with scaled rope, 8192 for a rope_theta of 500000 (Llama 3), 16384 for another above
  10000 (Code Llama), else 4096 (Llama 2);
- the ids of the first and last token: Llama 3's for its vocabulary of 128256, Llama 2's for 32000 and 32016, else none.

Llama 3's tokenizer.model is tiktoken's text: tokenizer.json is made of it, and it is kept as original/tokenizer.model.
Llama 2's is sentencepiece and keeps its name.

Source: args.py and model.py of meta-llama/llama-models (llama3), example_params of Llama 2;
convert_llama_weights_to_hf.py of transformers' sources.
"""

import errno
import math
import mmap
import os
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligermodels.arch.llama import LlamaConfig
from ligermodels.checkpoint import reading
from ligermodels.checkpoint.weights import TensorInfo, same_bits
from ligermodels.conversion.consolidated import (
    EMBEDDING,
    PARAMS,
    ConsolidatedSource,
    ConsolidatedTarget,
    config_of,
    params_of,
    place_of,
    read_params,
    with_config_beside,
)
from ligermodels.conversion.view import View
from ligermodels.errors import CheckpointError, ConfigError, InputError

ROPE_FACTORS = {2048: 32.0, 3072: 32.0, 4096: 8.0, 8192: 8.0, 16384: 8.0}
"""dim of a Llama with scaled rope -> its factor."""

_QUERIES = "layers.0.attention.wq.weight"
_GATE = "layers.0.feed_forward.w1.weight"
_SCALED_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LLAMA3_THETA = 500000.0
_TOKEN_IDS = {128256: (128000, 128001), 32000: (1, 2), 32016: (1, 2)}
_KNOWN = {"dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "norm_eps"}
_KNOWN |= {"rope_theta", "use_scaled_rope", "rope_scaling_factor", "max_batch_size", "max_seq_len"}


class MetaSource(ConsolidatedSource):
    """Meta's files under Hugging Face's names.

    allow_pickle: .pth files are pickles; they are read as plain tensors, and only when this says so.
    rope_factor: of `use_scaled_rope`, where the module's table does not know the size.
    Files are mapped: `read` allocates where ranks are joined or rows permuted, and nothing otherwise.
    Raises CheckpointError for files that are missing, damaged, or of two checkpoints.
    """

    def __init__(self, folder: Path, *, allow_pickle: bool = False, rope_factor: float | None = None):
        self.folder, self.source = folder, str(folder)
        files = _shard_files(folder)
        if not allow_pickle:
            raise CheckpointError(
                f"{folder} holds its weights as pickles ({files[0].name}), which can carry code.\n"
                "  Next: pass allow_pickle=True (--allow-pickle): tensors are read from them, and nothing else."
            )
        self._params = read_params(folder / PARAMS, _KNOWN, ("dim", "n_layers", "n_heads", "norm_eps"))
        self._ranks = [reading.read_pickle(path) for path in files]
        self._check_ranks(files)
        self._names = {place_of(name).name: name for name in self._ranks[0] if name != "rope.freqs"}
        self.headers = {name: self._info(theirs) for name, theirs in self._names.items()}
        if self._is_tied():
            del self.headers["lm_head.weight"]
        self._config = with_config_beside(folder, self._make_config(rope_factor))

    def read(self, name: str) -> Tensor:
        """The whole tensor in Hugging Face's order of rows: not to be written to."""
        theirs = self._names[name]
        parts = [rank[theirs] for rank in self._ranks]
        axis = self._axis(theirs)
        if axis is None and not all(same_bits(parts[0], part) for part in parts[1:]):
            warnings.warn(
                f"{self.source}: the ranks hold different {theirs}; the first one's is used. Shards of two "
                "checkpoints in one folder?",
                stacklevel=2,
            )
        return self._in_halves(theirs, parts[0] if axis is None or len(parts) == 1 else torch.cat(parts, axis))

    def _check_ranks(self, files: list[Path]) -> None:
        """Raises CheckpointError where the ranks are not of one checkpoint, or not all of them are here."""
        first, count, needed = self._ranks[0], len(files), (EMBEDDING, _QUERIES, _GATE)
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
        rows, dim = len(first[_QUERIES]), self._params["dim"]
        if rows * count != dim:
            raise CheckpointError(
                f"{self.folder} holds {count} consolidated.NN.pth, and {dim} rows of wq are cut into parts of {rows}.\n"
                "  Likely: a download that did not finish, or the params.json of another model; fetch it again."
            )

    def _axis(self, theirs: str) -> int | None:
        if theirs == EMBEDDING:
            return 0 if self._ranks[0][theirs].shape[1] == self._params["dim"] else 1
        return place_of(theirs).axis

    def _info(self, theirs: str) -> TensorInfo:
        part, axis = self._ranks[0][theirs], self._axis(theirs)
        shape = [size * len(self._ranks) if i == axis else size for i, size in enumerate(part.shape)]
        return TensorInfo(part.dtype, tuple(shape))

    def _is_tied(self) -> bool:
        """Whether there is a head that is the embedding; they are compared whole only where their starts agree."""
        head, table = "lm_head.weight", "model.embed_tokens.weight"
        if head not in self.headers or self.headers[head] != self.headers[table]:
            return False
        starts = [self._ranks[0][self._names[name]][0] for name in (head, table)]
        common = min(map(len, starts))
        return same_bits(starts[0][:common], starts[1][:common]) and same_bits(self.read(head), self.read(table))

    def _make_config(self, rope_factor: float | None) -> dict[str, Any]:
        params, theta = self._params, float(self._params.get("rope_theta") or 10000.0)
        scaling = self._rope_scaling(rope_factor)
        longest = 8192 if theta == _LLAMA3_THETA else 16384 if theta > 10000.0 else 4096
        config = {
            "architectures": [LlamaConfig.architecture],
            "model_type": LlamaConfig.model_type,
            **config_of(self, params, params["dim"] // params["n_heads"]),
            "intermediate_size": self.headers["model.layers.0.mlp.gate_proj.weight"].shape[0],
            "max_position_embeddings": 131072 if scaling else longest,
            "rope_theta": theta,
            "rope_scaling": scaling,
            "attention_bias": False,
            "mlp_bias": False,
        }
        if config["vocab_size"] in _TOKEN_IDS:
            config["bos_token_id"], config["eos_token_id"] = _TOKEN_IDS[config["vocab_size"]]
        return config

    def _rope_scaling(self, factor: float | None) -> dict[str, Any] | None:
        """config.json's rope_scaling."""
        path, dim = self.folder / PARAMS, self._params["dim"]
        if not self._params.get("use_scaled_rope"):
            if factor is not None:
                raise InputError(f"rope_factor={factor} was given, and {path} does not use scaled rope; leave it out")
            return None
        if factor is not None and not 1 <= factor < math.inf:
            raise InputError(f"rope_factor={factor}: expected a number of at least 1, such as 8 (3.1) or 32 (3.2)")
        factor = factor or self._params.get("rope_scaling_factor") or ROPE_FACTORS.get(dim)
        if factor is None:
            raise CheckpointError(
                f"{path} has use_scaled_rope without its factor, and no Llama of dim {dim} is known.\n"
                "  Next: add rope_scaling_factor to it (3.1: 8, 3.2: 32), or pass rope_factor (--rope-factor)."
            )
        return {"rope_type": "llama3", "factor": float(factor), **_SCALED_ROPE}


class MetaTarget(ConsolidatedTarget):
    """A Llama as consolidated.00.pth ... and params.json.

    ranks: how many files; must divide heads and key/value heads. embedding_axis: the dim along which tok_embeddings is
    cut; None: 0 for a rope_theta of 500000 (Llama 3), else 1. A tied head is written as a copy, as Meta does.
    config.json and generation_config.json lie beside params.json, which has no field for the longest text and the ids.
    Raises ConfigError (another architecture), CheckpointError (what Meta's code does not compute), InputError (ranks).
    """

    def __init__(self, view: View, *, ranks: int = 1, embedding_axis: int | None = None):
        config: Any = view.model.config
        if config.model_type != LlamaConfig.model_type:
            raise ConfigError(f"{view.source} is a {config.model_type}; Meta's layout is that of Llamas alone")
        super().__init__(view, _params(config))
        self._ranks = ranks
        if embedding_axis is None:
            embedding_axis = 0 if self._params["rope_theta"] == _LLAMA3_THETA else 1
        if config.tie_word_embeddings:
            self._sources["output.weight"] = self._sources[EMBEDDING]
            self.headers = {**self.headers, "output.weight": self.headers[EMBEDDING]}
        self._axes = {theirs: place_of(theirs).axis for theirs in self._sources} | {EMBEDDING: embedding_axis}
        self._check_ranks(config)

    def write(self, folder: Path) -> None:
        """The files are made at their full size and filled through a mapping: memory holds one tensor."""
        ranks = [self._blank(folder / f"consolidated.{rank:02}.pth") for rank in range(self._ranks)]
        for theirs in self._sources:
            self._fill(ranks, theirs)

    def _fill(self, ranks: list[dict[str, Tensor]], theirs: str) -> None:
        """Writes one tensor into the ranks' files."""
        tensor, axis = self._read(theirs), self._axes[theirs]
        boxes = [tensor] * len(ranks) if axis is None else tensor.chunk(len(ranks), axis)
        for rank, box in zip(ranks, boxes, strict=True):
            rank[theirs].copy_(box)

    def _check_ranks(self, config: Any) -> None:
        """Raises InputError where the ranks would not be equal, or would cut a head."""
        ranks = self._ranks
        if not 1 <= ranks <= 99:
            raise InputError(f"{ranks} shards (--ranks): expected 1 to 99")
        cut = [self.headers[theirs].shape[axis] for theirs, axis in self._axes.items() if axis is not None]
        if any(size % ranks for size in (*cut, config.num_attention_heads, config.num_key_value_heads)):
            raise InputError(
                f"{ranks} shards (--ranks) must divide {config.num_attention_heads} heads, "
                f"{config.num_key_value_heads} key/value heads, an intermediate size of {config.intermediate_size}, "
                f"and the embedding's {config.vocab_size} rows and {config.hidden_size} columns. Choose fewer."
            )

    def _blank(self, path: Path) -> dict[str, Tensor]:
        """One rank's file at its full size, and its tensors, mapped so that writing to them writes to the file."""
        state = {}
        for theirs, info in self.headers.items():
            axis = self._axes[theirs]
            shape = [size // self._ranks if i == axis else size for i, size in enumerate(info.shape)]
            state[theirs] = torch.empty(shape, dtype=info.dtype)  # never touched: takes no memory
        try:
            with torch.serialization.skip_data():
                torch.save(state, path)
        except RuntimeError as error:  # a failed write has no type of its own
            raise OSError(errno.EIO, f"torch.save: {error}") from error
        if hasattr(os, "posix_fallocate"):  # a full disk is found here, not by a signal when a page is written
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _shard_files(folder: Path) -> list[Path]:
    """consolidated.00.pth and its followers, without a gap. Raises CheckpointError."""
    files = sorted(path for path in folder.iterdir() if re.fullmatch(r"consolidated\.\d\d\.pth", path.name))
    expected = [folder / f"consolidated.{n:02}.pth" for n in range(len(files))]
    if not files or files != expected:
        lost = next((path for path in expected if path not in files), folder / "consolidated.00.pth")
        raise CheckpointError(
            f"{folder} lacks {lost.name}, and holds {len(files)} other consolidated.NN.pth.\n"
            "  Likely: a download that did not finish; fetch it again."
        )
    return files


def _params(config: Any) -> dict[str, Any]:
    """params.json. Raises CheckpointError for what Meta's code does not compute."""
    rope = dict(config.rope_parameters)
    rope_type, _, factor = rope.pop("rope_type"), rope.pop("rope_theta"), rope.pop("factor", None)
    odd = [name for name in ("attention_bias", "mlp_bias") if getattr(config, name)]
    odd += ["head_dim"] * (config.head_dim * config.num_attention_heads != config.hidden_size)
    odd += ["rope_scaling"] * (rope_type != "default" and (rope_type, rope) != ("llama3", _SCALED_ROPE))
    params = {
        **params_of(config, "Meta", odd),
        # Meta's code takes int(ffn_dim_multiplier * int(8 / 3 * dim)), rounded up to a multiple of multiple_of.
        "multiple_of": 1,
        "ffn_dim_multiplier": (config.intermediate_size + 0.5) / int(8 * config.hidden_size / 3),
    }
    if rope_type == "llama3":
        params["use_scaled_rope"] = True
        if ROPE_FACTORS.get(config.hidden_size) != factor:
            params["rope_scaling_factor"] = factor
    return params
