"""Meta's Llama files under Hugging Face's names: consolidated.00.pth ... NN.pth, params.json, tokenizer.model.

- Each .pth is one tensor-parallel rank. wq, wk, wv, w1, w3 and output are cut by rows, wo and w2 by columns; norms are
  in every file. tok_embeddings is cut by columns in Llama 2 and by rows in Llama 3: its shape says which.
- rope.freqs is left out: the model computes it from rope_theta.
- An output.weight that is absent or equals tok_embeddings.weight bit for bit is a tied head (3.2-1B and 3B).

What params.json does not say, and no config.json beside it:
- the factor of `use_scaled_rope`: by `dim`, as published: 32 for 2048 and 3072 (Llama 3.2-1B, 3B), 8 for 4096, 8192 and
  16384 (3.1, 3.3). These are the factors of config.json on the Hub; Meta's model.py has 8 for all. A field
  `rope_scaling_factor`, which a user may add, or the argument `rope_factor` overrides it;
- the longest text: 131072 with scaled rope, 8192 for a rope_theta of 500000 (Llama 3), 16384 for another above
  10000 (Code Llama), else 4096 (Llama 2);
- the ids of the first and last token: Llama 3's for its vocabulary of 128256, Llama 2's for 32000 and 32016, else none.

Llama 3's tokenizer.model is tiktoken's text: tokenizer.json is made of it, and it is kept as original/tokenizer.model.
Llama 2's is sentencepiece and keeps its name.

Source: args.py and model.py of meta-llama/llama-models (llama3), example_params of Llama 2;
convert_llama_weights_to_hf.py of transformers' sources.
"""

import math
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
    config_of,
    place_of,
    read_params,
    with_config_beside,
)
from ligermodels.errors import CheckpointError, InputError

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
