"""The model in a PyTorch distributed checkpoint; checkpoint/dcp.py reads the files."""

import re
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from ligermodels.checkpoint import weights
from ligermodels.checkpoint.dcp import Reader, cause, one_process
from ligermodels.checkpoint.files import companion_files, config_files, read_json
from ligermodels.conversion.source import Source, model_on_meta
from ligermodels.errors import CheckpointError

# Names that trainers use beside the model, at the top level of the same checkpoint.
_BESIDE = re.compile(r"(optim|optimizers?|lr_schedulers?|schedulers?|dataloaders?|train_state|rng_state|ema)\b")


class DcpSource(Source):
    """The model in a distributed checkpoint, under the names of memory or of disk.

    config_folder: has config.json and the tokenizer; by default `folder`.
    Where rows have another order on disk, the names of memory mean the order of memory, as training writes them.
    The names under the prefix that fits the model best ("model.", "module.", "") are read, without the prefix.
    Optimizer and schedule are ignored. `read` joins the shards of a tensor.
    Raises CheckpointError for files that are missing or damaged, and for a `.metadata` that asks for other classes.
    """

    of_memory = True

    def __init__(self, folder: Path, config_folder: Path | None = None):
        self.folder, self.source = folder, str(folder)
        self._config_folder = config_folder or folder
        self.config = read_json(self._config_folder / "config.json")
        self._reader = Reader(folder)
        stored = self._reader.headers
        prefix = self._prefix(stored)
        self._stored_names = {
            name.removeprefix(prefix): name
            for name in stored
            if name.startswith(prefix) and (prefix or not _BESIDE.match(name))
        }
        self.headers = {ours: stored[name] for ours, name in self._stored_names.items()}
        self._reader.check_whole(self._stored_names.values())
        self._reader.check_files()

    def files(self) -> dict[str, bytes | Path]:
        return {**companion_files(self._config_folder), **config_files(self._config_folder)}

    def read(self, name: str) -> Tensor:
        """The whole tensor. Memory: it, and the largest of its shards."""
        stored, info = self._stored_names[name], self.headers[name]
        tensor = torch.empty(info.shape, dtype=info.dtype)
        try:
            with one_process():
                dcp.load({stored: tensor}, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:
            reason = cause(error)
            raise CheckpointError(
                f"{self.folder}: {name} cannot be read: {reason}.\n"
                "  Likely: a file that is cut short or of another checkpoint; copy the files of all ranks again."
            ) from reason
        return tensor

    def _prefix(self, stored: Iterable[str]) -> str:
        """The prefix of the model's names."""
        model, names_here = model_on_meta(self.config, str(self._config_folder)), set(stored)
        best, best_prefix = 0, ""
        for table in (model.DISK_NAMES, *model.OTHER_LAYOUTS):
            names = [region.source for region in weights.regions(model, table)]
            embedding = next(name for name in names if name.endswith("embed_tokens.weight"))
            for prefix in sorted({name.removesuffix(embedding) for name in names_here if name.endswith(embedding)}):
                hits = sum(prefix + name in names_here for name in names) if not _BESIDE.match(prefix) else 0
                if hits > best:
                    best, best_prefix = hits, prefix
        if not best:
            some = ", ".join(sorted(names_here)[:3]) or "no tensor"
            raise CheckpointError(
                f"{self.folder} holds no {type(model).__name__}: it has {some}.\n"
                "  Likely: a checkpoint of another model, or of the optimizer alone; or config.json is another's."
            )
        return best_prefix
