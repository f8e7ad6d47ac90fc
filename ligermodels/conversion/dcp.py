"""PyTorch's distributed checkpoints: a folder of `.metadata` and `__<rank>_<part>.distcp`, sharded or not.

`.metadata` is a pickle. It is read by an unpickler that knows the few classes of torch.distributed.checkpoint that such
a file holds and puts an inert record in the place of each: no function of anyone is called. The tensors are
read by torch.load(weights_only=True). So no permission to read pickles is asked for.

Checked against: torch 2.13, distributed/checkpoint/{filesystem,metadata,default_planner}.py.
"""

import errno
import io
import math
import os
import pickle
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ligermodels.arch import ARCHS
from ligermodels.checkpoint import weights
from ligermodels.checkpoint.reading import check_file, companion_files, read_json
from ligermodels.checkpoint.weights import TensorInfo
from ligermodels.errors import CheckpointError, ConfigError, HubError, LigermodelsError

METADATA = ".metadata"

_CHECKPOINT = "torch.distributed.checkpoint."
_KNOWN = {
    _CHECKPOINT + "metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    _CHECKPOINT + "filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}  # fmt: skip
# What trainers store beside the model, at the top level of the same folder.
_BESIDE = re.compile(r"(optim|optimizers?|lr_schedulers?|schedulers?|dataloaders?|train_state|rng_state|ema)\b")


@dataclass(frozen=True)
class _Chunk:
    """A box of a tensor and the bytes of a file that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class DcpSource:
    """The model in a distributed checkpoint, under the names of memory or disk: a source. A context manager.

    config_folder: holds config.json and the tokenizer; by default `folder` does.
    Of all names, those under the prefix that fits the model best ("model.", "module.", "") are taken, without
    it; optimizer and schedule are left aside. `read` joins the shards of the tensor asked for.
    Raises CheckpointError for files that are missing, cut short, or do not tile a tensor, or a hostile `.metadata`.
    """

    def __init__(self, folder: str | Path, config_folder: str | Path | None = None):
        self.folder, self.source = Path(folder), str(folder)
        self.config_folder = Path(config_folder or folder)
        if config_folder is None and not os.path.lexists(self.folder / "config.json"):
            raise CheckpointError(
                f"{folder} is a distributed checkpoint without its config.json, which says what model it is.\n"
                "  Next: give the folder of the model's config.json and tokenizer with --config DIR (config=...)."
            )
        self._config = read_json(self.config_folder / "config.json")
        stored, chunks = _read_metadata(self.folder)
        prefix = self._prefix(stored)
        self._stored_names = {
            name.removeprefix(prefix): name
            for name in stored
            if name.startswith(prefix) and (prefix or not _BESIDE.match(name))
        }
        self.headers: dict[str, TensorInfo] = {ours: stored[name] for ours, name in self._stored_names.items()}
        self._chunks = {ours: chunks.get(name, []) for ours, name in self._stored_names.items()}
        for name, info in self.headers.items():
            _check_tiles(f"{self.folder}: {name}", info, self._chunks[name])
        self._check_files()

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def files(self) -> dict[str, bytes | Path]:
        names = ("config.json", "generation_config.json")
        kept = {name: self.config_folder / name for name in names if (self.config_folder / name).is_file()}
        return {**companion_files(self.config_folder), **kept}

    def read(self, name: str) -> Tensor:
        """The whole tensor. Memory: it, and the largest of its shards twice."""
        info, chunks = self.headers[name], self._chunks[name]
        if len(chunks) == 1:
            return self._chunk(name, chunks[0], info.dtype)
        whole = torch.empty(info.shape, dtype=info.dtype)
        for chunk in chunks:
            box = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[box] = self._chunk(name, chunk, info.dtype)
        return whole

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._chunks.clear()

    def _prefix(self, stored: Mapping[str, TensorInfo]) -> str:
        """What stands before the names of the model."""
        kind = self._config.get("model_type")
        if not isinstance(kind, str) or kind not in ARCHS:
            raise ConfigError(f"{self.config_folder}: config.json has model_type {kind!r}; known: {', '.join(ARCHS)}")
        arch = ARCHS[kind]
        with torch.device("meta"):
            model = arch(arch.config_class.from_hf(self._config))
        best, found = 0, ""
        for table in (arch.DISK_NAMES, *arch.ALSO_READ):
            names = [region.source for region in weights.regions(model, table)]
            embedding = next(name for name in names if name.endswith("embed_tokens.weight"))
            for prefix in sorted({name.removesuffix(embedding) for name in stored if name.endswith(embedding)}):
                hits = sum(prefix + name in stored for name in names) if not _BESIDE.match(prefix) else 0
                if hits > best:
                    best, found = hits, prefix
        if not best:
            some = ", ".join(list(stored)[:3]) or "no tensor"
            likely = "a checkpoint of another model, or of the optimizer alone; or config.json is another's"
            if any(re.search(r"\blayers\.\d+\.attn\.", name) for name in stored):
                likely = (
                    "packed by an earlier ligermodels; save it as safetensors with that version, then convert those"
                )
            raise CheckpointError(f"{self.folder} holds no {arch.__name__}: it has {some}.\n  Likely: {likely}.")
        return found

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for chunks in self._chunks.values():
            for chunk in chunks:
                ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + chunk.length)
        for file, end in ends.items():
            path = self.folder / file
            if check_file(path, self.folder).st_size < end:
                raise CheckpointError(f"{path} is cut short. Copy the checkpoint again: the files of all ranks.")

    def _chunk(self, name: str, chunk: _Chunk, dtype: torch.dtype) -> Tensor:
        path = self.folder / chunk.file
        try:
            with path.open("rb") as file:
                file.seek(chunk.start)
                held = torch.load(io.BytesIO(file.read(chunk.length)), map_location="cpu", weights_only=True)
        except OSError as error:
            raise HubError(f"{path} cannot be read: {error.strerror or error}") from error
        except Exception as error:  # what a damaged zip or pickle raises is not limited to a few types
            raise CheckpointError(f"{path}: the part that holds {name} is damaged; copy it again. ({error})") from error
        fits = isinstance(held, Tensor) and held.layout == torch.strided
        fits = fits and held.nbytes <= held.untyped_storage().nbytes()  # a stride of zero claims what is not there
        if not fits or tuple(held.shape) != chunk.sizes or held.dtype != dtype:
            shape = f"{held.dtype} {list(held.shape)}" if isinstance(held, Tensor) else type(held).__name__
            raise CheckpointError(
                f"{path}: {name} is {shape}, {METADATA} says {dtype} {list(chunk.sizes)}.\n"
                "  Likely: files of two checkpoints in one folder."
            )
        return held


def write_dcp(reader: weights.Reader, folder: str | Path) -> None:
    """Writes the tensors of `reader`, under its names, into `folder` as a distributed checkpoint of one file.

    `torch.distributed.checkpoint.load` reads it into any sharding of a model whose state dict has these names. One
    tensor is in memory at a time.
    Raises OSError if it cannot be written, and what `reader` raises.
    """
    import torch.distributed.checkpoint as dcp

    class Planner(dcp.DefaultSavePlanner):
        """Plans on meta tensors; each is read when its turn comes to be written."""

        def lookup_object(self, index: Any) -> Any:
            return reader.read(index.fqn)

    state = {name: torch.empty(info.shape, dtype=info.dtype, device="meta") for name, info in reader.headers.items()}
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, thread_count=1, per_thread_copy_ahead=0)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as is meant
            dcp.save(state, storage_writer=writer, planner=Planner(), no_dist=True)
    except dcp.api.CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, RuntimeError):  # of torch.save: a failed write has no type of its own
            raise OSError(errno.EIO, f"torch.save: {cause}") from error
        raise cause from error


class _Record:
    """Stands for an object of `.metadata`: how it was made and its state, nothing more."""

    def __init__(self, *args: Any):
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, key: str) -> Any:
        state = getattr(self, "state", None)
        return state.get(key) if isinstance(state, dict) else None


class _Unpickler(pickle._Unpickler):  # type: ignore[name-defined]
    """Admits dtypes, and the classes in `_KNOWN` as records of this one load; there is nothing else to call.

    The one written in Python: that in C makes its memo as long as any index in the file says, up to tens of GB.
    """

    def __init__(self, file: io.BufferedIOBase):
        super().__init__(file)
        self.records: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        if name == "OrderedDict":
            return dict
        return self.records.setdefault(name, type(name, (_Record,), {}))


def _read_metadata(folder: Path) -> tuple[dict[str, TensorInfo], dict[str, list[_Chunk]]]:
    """({name: what it is}, {name: the chunks that hold it}) of the tensors in a distributed checkpoint."""
    path = folder / METADATA
    if not os.path.lexists(path):
        raise CheckpointError(
            f"{path} is not there: torch writes it last. A save that did not finish, or a part of one?"
        )
    try:
        check_file(path, folder)
        # From memory: a length beyond the end then reads what there is, and allocates no more.
        return _tables(_Unpickler(io.BytesIO(path.read_bytes())).load())
    except LigermodelsError:
        raise
    except OSError as error:
        raise HubError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # a pickle can go wrong in any way that Python knows
        raise CheckpointError(
            f"{path} is not the metadata of a distributed checkpoint: {error or type(error).__name__}.\n"
            "  Likely: damaged, of a torch that is much newer, or made to run code on who loads it, which was refused."
        ) from error


def _tables(root: Any) -> tuple[dict[str, TensorInfo], dict[str, list[_Chunk]]]:
    """Reads the records. Raises ValueError, or whatever a wrong kind of object leads to."""
    infos: dict[str, TensorInfo] = {}
    sizes: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
    for name, entry in root.get("state_dict_metadata").items():
        if type(entry).__name__ == "BytesStorageMetadata":
            continue
        dtype = entry.get("properties").state[0]
        if not isinstance(name, str) or not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name!r} has dtype {dtype!r}")
        infos[name] = TensorInfo(dtype, _size(entry.get("size")))
        for chunk in entry.get("chunks"):
            sizes[name, _size(chunk.get("offsets"))] = _size(chunk.get("sizes"))
    chunks: dict[str, list[_Chunk]] = {}
    for index, info in root.get("storage_data").items():
        name = index.get("fqn")
        if name not in infos:
            continue
        file, start, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+\.distcp", file):
            raise ValueError(f"{name} lies in {str(file)[:80]!r}, which is no .distcp file of the folder")
        if info.get("transform_descriptors"):
            raise ValueError(f"{name} is compressed by {info.get('transform_descriptors')}, which is not read here")
        if not all(type(x) is int and x >= 0 for x in (start, length)):
            raise ValueError(f"{name} lies at {start!r}, {length!r} bytes")
        offsets = _size(index.get("offset"))
        box = sizes.pop((name, offsets))
        if math.prod(box):
            if length < math.prod(box) * infos[name].dtype.itemsize:
                raise ValueError(f"{name} has {length} bytes for a shard of {list(box)} {infos[name].dtype}")
            chunks.setdefault(name, []).append(_Chunk(offsets, box, file, start, length))
    return infos, chunks


def _size(record: Any) -> tuple[int, ...]:
    """A torch.Size, of numbers from 0."""
    (numbers,) = record.args
    if not isinstance(numbers, tuple | list) or not all(type(x) is int and 0 <= x < 2**63 for x in numbers):
        raise ValueError(f"{str(numbers)[:80]} is no shape")
    return tuple(numbers)


def _check_tiles(where: str, info: TensorInfo, chunks: list[_Chunk]) -> None:
    """The chunks must fill the tensor and not overlap."""
    fit = sum(math.prod(chunk.sizes) for chunk in chunks) == math.prod(info.shape)
    for chunk in chunks:
        same_rank = len(chunk.offsets) == len(chunk.sizes) == len(info.shape)
        fit = (
            fit
            and same_rank
            and all(a + n <= m for a, n, m in zip(chunk.offsets, chunk.sizes, info.shape, strict=True))
        )
    ordered = sorted(chunks, key=lambda chunk: chunk.offsets)
    for i, one in enumerate(ordered if fit and info.shape else []):
        for other in ordered[i + 1 :]:
            if other.offsets[0] >= one.offsets[0] + one.sizes[0]:
                break
            pairs = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
            fit = fit and not all(a < b + m and b < a + n for a, n, b, m in pairs)
    if not fit:
        raise CheckpointError(f"{where}: its {len(chunks)} shards do not make up a tensor of {list(info.shape)}")
