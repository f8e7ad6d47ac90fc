"""PyTorch's distributed checkpoints: a folder of `.metadata` and `__<rank>_<part>.distcp`, sharded or not.

torch's FileSystemReader reads them, but for `.metadata`, which torch unpickles without a restriction: here only the
classes that such a file consists of are admitted. torch reads tensors with weights_only=True. So no permission to
read pickles is asked for.

Checked against: torch 2.11 and 2.13, distributed/checkpoint/{filesystem,metadata}.py.
"""

import contextlib
import errno
import math
import pickle
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ligermodels.arch import ARCHS
from ligermodels.checkpoint import weights
from ligermodels.checkpoint.files import companion_files, read_json
from ligermodels.checkpoint.weights import TensorInfo
from ligermodels.conversion.huggingface import config_files
from ligermodels.conversion.source import METADATA, Source
from ligermodels.errors import CheckpointError, ConfigError

_CHECKPOINT = "torch.distributed.checkpoint."
_ADMITTED = {
    _CHECKPOINT + "metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    _CHECKPOINT + "filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}  # fmt: skip
# What trainers store beside the model, at the top level of the same folder.
_BESIDE = re.compile(r"(optim|optimizers?|lr_schedulers?|schedulers?|dataloaders?|train_state|rng_state|ema)\b")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ADMITTED.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):
    """torch's reader, with `.metadata` read once and by `_Unpickler`."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        with (folder / METADATA).open("rb") as file:
            self.metadata: Metadata = _Unpickler(file).load()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


class DcpSource(Source):
    """The model in a distributed checkpoint, under the names of memory or disk.

    config_folder: holds config.json and the tokenizer; by default `folder` does.
    Of all names, those under the prefix that fits the model best ("model.", "module.", "") are taken, without
    it; optimizer and schedule are left aside. `read` joins the shards of the tensor asked for.
    Raises CheckpointError for files that are missing or damaged, and for a `.metadata` that asks for other classes.
    """

    def __init__(self, folder: Path, config_folder: Path | None = None):
        self.folder, self.source = folder, str(folder)
        self._config_folder = config_folder or folder
        if not (self._config_folder / "config.json").exists():
            raise CheckpointError(
                f"{self._config_folder} lacks config.json, which says what model a distributed checkpoint holds.\n"
                "  Next: give the folder of the model's config.json and tokenizer with --config DIR (config=...)."
            )
        self._config = read_json(self._config_folder / "config.json")
        try:
            self._reader = _Reader(folder)
            tensors = {
                name: entry
                for name, entry in self._reader.metadata.state_dict_metadata.items()
                if isinstance(entry, TensorStorageMetadata)
            }
            stored = {name: TensorInfo(x.properties.dtype, tuple(x.size)) for name, x in tensors.items()}
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{folder / METADATA} cannot be read as the metadata of a distributed checkpoint: {error}.\n"
                "  Likely: damaged, of a torch that is much newer, or made to run code on who loads it, which was "
                "refused."
            ) from error
        prefix = self._prefix(stored)
        self._stored_names = {
            name.removeprefix(prefix): name
            for name in stored
            if name.startswith(prefix) and (prefix or not _BESIDE.match(name))
        }
        self.headers = {ours: stored[name] for ours, name in self._stored_names.items()}
        self._check_chunks(tensors)

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def files(self) -> dict[str, bytes | Path]:
        return {**companion_files(self._config_folder), **config_files(self._config_folder)}

    def read(self, name: str) -> Tensor:
        """The whole tensor. Memory: it, and the largest of its shards."""
        stored, info = self._stored_names[name], self.headers[name]
        tensor = torch.empty(info.shape, dtype=info.dtype)
        try:
            with _one_process():
                dcp.load({stored: tensor}, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:
            cause = _cause(error)
            raise CheckpointError(
                f"{self.folder}: {name} cannot be read: {cause}.\n"
                "  Likely: a file that is cut short or of another checkpoint; copy the files of all ranks again."
            ) from cause
        return tensor

    def _prefix(self, stored: Iterable[str]) -> str:
        """What stands before the names of the model."""
        kind = self._config.get("model_type")
        if kind not in ARCHS:
            raise ConfigError(f"{self._config_folder}: config.json has model_type {kind!r}; known: {', '.join(ARCHS)}")
        arch, held = ARCHS[kind], set(stored)
        model = arch.from_config(self._config, device="meta")
        best, found = 0, ""
        for table in (arch.DISK_NAMES, *arch.ALSO_READ):
            names = [region.source for region in weights.regions(model, table)]
            embedding = next(name for name in names if name.endswith("embed_tokens.weight"))
            for prefix in sorted({name.removesuffix(embedding) for name in held if name.endswith(embedding)}):
                hits = sum(prefix + name in held for name in names) if not _BESIDE.match(prefix) else 0
                if hits > best:
                    best, found = hits, prefix
        if not best:
            some = ", ".join(sorted(held)[:3]) or "no tensor"
            raise CheckpointError(
                f"{self.folder} holds no {arch.__name__}: it has {some}.\n"
                "  Likely: a checkpoint of another model, or of the optimizer alone; or config.json is another's."
            )
        return found

    def _check_chunks(self, tensors: Mapping[str, TensorStorageMetadata]) -> None:
        """torch fills what the chunks cover, and leaves the rest of a tensor as it was."""
        for name, stored in self._stored_names.items():
            chunks = [math.prod(chunk.sizes) for chunk in tensors[stored].chunks]
            if sum(chunks) != math.prod(self.headers[name].shape):
                shape = list(self.headers[name].shape)
                raise CheckpointError(f"{self.folder}: {name} {shape} is not whole in its {len(chunks)} shards")
        for file in {info.relative_path for info in self._reader.metadata.storage_data.values()}:
            if Path(file).name != file:
                raise CheckpointError(f"{self.folder / METADATA} names {file!r}; expected a file in its folder")
            if not (self.folder / file).is_file():
                raise CheckpointError(f"{self.folder / file} is not there. Copy the files of all ranks.")


class DcpTarget:
    """`source` as a distributed checkpoint under its names, each tensor in a file of its own.

    `torch.distributed.checkpoint.load` reads it into any sharding of a model whose state dict has these names.
    """

    def __init__(self, source: Source):
        self._source, self.headers = source, source.headers

    def files(self) -> dict[str, bytes | Path]:
        return self._source.files()

    def write(self, folder: Path) -> None:
        """Writes one tensor at a time. Raises OSError, and what reading raises."""
        source = self._source

        class Planner(dcp.DefaultSavePlanner):
            """Plans on meta tensors; each is read when its turn comes to be written."""

            def lookup_object(self, index: Any) -> Any:
                return source.read(index.fqn)

        state = {name: torch.empty(info.shape, dtype=info.dtype, device="meta") for name, info in self.headers.items()}
        # torch holds all tensors of a file until that is complete.
        writer = dcp.FileSystemWriter(folder, single_file_per_rank=False, sync_files=False, per_thread_copy_ahead=0)
        try:
            with _one_process():
                dcp.save(state, storage_writer=writer, planner=Planner(), no_dist=True)
        except CheckpointException as error:
            cause = _cause(error)
            if isinstance(cause, RuntimeError):  # of torch.save: a failed write has no type of its own
                raise OSError(errno.EIO, f"torch.save: {cause}") from error
            raise cause from error


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Without torch's warning that it saves or loads in a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _cause(error: CheckpointException) -> BaseException:
    """What failed in the one process that there is."""
    return next(iter(error.failures.values()))[0]
