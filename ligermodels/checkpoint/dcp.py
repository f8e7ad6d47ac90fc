"""Reads and writes the files of PyTorch's distributed checkpoints: `.metadata` and `__<rank>_<part>.distcp`.

torch's FileSystemReader reads them, except `.metadata`, which torch unpickles without a restriction: here only the
classes that such a file needs are allowed. torch reads tensors with weights_only=True. So reading needs no permission
for pickles. (torch's planner unpickles anything for an entry that is not a tensor: ask for tensors only.)

parallel/checkpoints.py writes checksums.json too: {"files": {name: {"bytes": 12, "crc32": "0a1b2c3d"}}}. Then a file is
read only if its checksum agrees. zlib.crc32 does 2.2 GB/s on one core and releases the GIL.

Checked against: torch 2.11 and 2.13, distributed/checkpoint/{filesystem,metadata}.py.
"""

import contextlib
import dataclasses
import enum
import math
import pickle
import warnings
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.futures import Future

from ligermodels.checkpoint.files import METADATA, read_json
from ligermodels.checkpoint.weights import TensorInfo
from ligermodels.errors import CheckpointError

CHECKSUMS = "checksums.json"
_CHECKPOINT = "torch.distributed.checkpoint."
_ALLOWED = {
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


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # by which Python 3.11.0 to 3.11.3 pickle the member of an enum
            return _member_of
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def _member_of(kind: Any, name: str) -> enum.Enum:
    if not (isinstance(kind, enum.EnumType) and name in kind.__members__):
        raise pickle.UnpicklingError(f"it asks for the attribute {name} of {kind}")
    return kind[name]  # type: ignore[no-any-return]


class Reader(dcp.FileSystemReader):
    """torch's reader, which reads `.metadata` once with `_Unpickler`, and whose errors name the file.

    verify: check each file against checksums.json, if there is one, before its first read. With False, the caller calls
    `verify`; `.metadata` is always checked.
    headers: {name: TensorInfo} of all tensors. files: the names of their files.
    checksums: {file: the result of `checksum`}; None without checksums.json.
    Raises CheckpointError for a `.metadata` that is missing, damaged, or asks for other classes.
    """

    def __init__(self, folder: Path, *, verify: bool = True):
        super().__init__(folder)
        self.folder = folder
        self.checksums: dict[str, Any] | None = None
        if (folder / CHECKSUMS).exists():
            self.checksums = read_json(folder / CHECKSUMS).get("files")
            if not isinstance(self.checksums, dict):
                raise CheckpointError(f"{folder / CHECKSUMS} is damaged: it has no checksums of files")
            self.verify([METADATA])
        try:
            with (folder / METADATA).open("rb") as file:
                self.metadata: Metadata = _Unpickler(file).load()
            entries = self.metadata.state_dict_metadata.items()
            self._entries = {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}
            self.headers = {
                name: TensorInfo(entry.properties.dtype, tuple(entry.size)) for name, entry in self._entries.items()
            }
            self._ends: dict[str, int] = defaultdict(int)
            for info in self.metadata.storage_data.values():
                self._ends[info.relative_path] = max(self._ends[info.relative_path], info.offset + info.length)
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{folder / METADATA} cannot be read as the metadata of a distributed checkpoint: {error}.\n"
                "  Likely: damaged, of a torch that is much newer, or made to run code when it is loaded, which "
                "was refused."
            ) from error
        self.files = sorted(self._ends, key=lambda file: (len(file), file))  # __2_0.distcp before __10_0.distcp
        self._unverified = set(self.files if verify and self.checksums is not None else ())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        files = defaultdict(list)
        for item in plan.items:
            files[self.metadata.storage_data[item.storage_index].relative_path].append(item)
        for file, items in files.items():
            if file in self._unverified:
                self.verify([file])
                self._unverified.remove(file)
            try:
                super().read_data(dataclasses.replace(plan, items=items), planner).wait()
            except Exception as error:
                raise CheckpointError(f"{self.folder / file} cannot be read: {error}") from error
        return super().read_data(dataclasses.replace(plan, items=[]), planner)  # a future that is done

    def check_whole(self, names: Iterable[str]) -> None:
        """Raises CheckpointError for tensors with missing shards: torch would leave that part of the memory unread."""
        for name in names:
            entry = self._entries[name]
            if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
                shape, count = list(entry.size), len(entry.chunks)
                raise CheckpointError(f"{self.folder}: {name} {shape} is not whole in its {count} shards")

    def check_files(self) -> None:
        """Raises CheckpointError for files that are missing, cut short or, with checksums, of another checkpoint."""
        for file, end in self._ends.items():
            if Path(file).name != file:
                raise CheckpointError(f"{self.folder / METADATA} names {file!r}; expected a file in its folder")
            path = self.folder / file
            if not path.is_file():
                raise CheckpointError(f"{path} is not there. Copy the files of all ranks.")
            if (size := path.stat().st_size) < end:
                raise CheckpointError(f"{path} cannot be read: it is cut short, {size} of {end} bytes")
        if self.checksums is not None:
            present = {path.name for path in self.folder.glob("*.distcp")}
            for file in sorted(present ^ set(self.files) | set(self.files) ^ (self.checksums.keys() - {METADATA})):
                raise CheckpointError(
                    f"{self.folder / file} does not belong to this checkpoint: {METADATA} and {CHECKSUMS} do not both "
                    "name it.\n  Likely: files of two checkpoints were copied into one folder."
                )

    def verify(self, files: Iterable[str]) -> None:
        """Reads whole files. Raises CheckpointError for one whose size or checksum differs from checksums.json."""
        assert self.checksums is not None, f"there is no {CHECKSUMS}"
        for file in files:
            path = self.folder / file
            try:
                actual = checksum(path)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
            if (expected := self.checksums.get(file)) != actual:
                raise CheckpointError(
                    f"{path} is damaged: it has {actual['bytes']} bytes of CRC-32 {actual['crc32']}, and {CHECKSUMS} "
                    f"says {expected}.\n  Likely: a disk or a copy changed its bytes."
                )


class Writer(dcp.FileSystemWriter):
    """torch's writer, which raises the OSError itself: torch replaces it by a RuntimeError."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[Any]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


def checksum(path: Path) -> dict[str, Any]:
    """{"bytes": size of a file, "crc32": CRC-32 of its contents, as 8 hexadecimal digits}."""
    value = size = 0
    with path.open("rb", buffering=0) as file:
        block = memoryview(bytearray(1 << 22))
        while count := file.readinto(block):
            value, size = zlib.crc32(block[:count], value), size + count
    return {"bytes": size, "crc32": f"{value:08x}"}


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Silences torch's warning that it saves or loads in a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def cause(error: CheckpointException) -> BaseException:
    """The error of the first rank that failed."""
    return next(iter(error.failures.values()))[0]
