"""Writes checkpoint folders atomically: a reader finds the old checkpoint or the new one, also after a crash."""

import collections
import contextlib
import ctypes
import errno
import itertools
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligermodels.checkpoint.files import SAFETENSORS, absolute, json_bytes, readable_size, write_errors
from ligermodels.checkpoint.reading import DTYPES
from ligermodels.checkpoint.weights import Exported, TensorInfo
from ligermodels.errors import CheckpointError, HubError, InputError
from ligermodels.processes import Processes

_CODES = {dtype: code for code, dtype in DTYPES.items()}


def num_bytes(size: int | str) -> int:
    """A number of bytes, from a number or a text such as "5GB" (10^9) or "5GiB" (2^30). Raises InputError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:([KMGT])(I?)B)?", str(size).upper())
    count = float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " ") if match else 0.0
    if not 1 <= count < 2**63:
        raise InputError(f"max_shard_size={size!r}: expected a number of bytes, or such as '5GB' or '500MiB'")
    return int(count)


def write_checkpoint(
    folder: str | Path,
    tensors: Exported,
    *,
    files: Mapping[str, bytes | Path] | None = None,
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str = "5GB",
    processes: Processes = Processes(),  # noqa: B008 - frozen
    writes: bool = True,
) -> Path:
    """Writes a checkpoint folder in one step, as `replacing` does, and returns its path.

    files: {name in the folder: its bytes, or a file to copy}. metadata: of the safetensors files, by default
    {"format": "pt"}.
    max_shard_size: in bytes, or as "5GB" (10^9) or "5GiB" (2^30); a larger tensor gets a shard of its own.
    processes: those that have the shards of the tensors. Each calls this with the same arguments; they write files at
    the same time into one folder, on a file system that all of them see. An error in one of them raises in all.
    writes: False takes part in gathering and writes nothing.
    Memory on the CPU: one tensor; with several processes, as much as the largest parameter in each.
    Raises CheckpointError if `folder` is refused, HubError (with `errno`) if it cannot be written.
    """
    headers = tensors.headers
    shards = split_into_shards(headers, num_bytes(max_shard_size))
    target = absolute(folder)
    writers = [rank for rank, is_writer in enumerate(processes.gather(writes)) if is_writer]
    position = writers.index(processes.rank) if writes else None
    stream = _gathered(tensors, [shards[start :: len(writers)] for start in range(len(writers))], position)
    with contextlib.ExitStack() as stack:
        staging: Path | None = None
        with processes.raise_on_all(), write_errors(target):
            if position == 0:
                staging = stack.enter_context(replacing(target, sum(info.nbytes for info in headers.values())))
        staging = next(filter(None, processes.gather(staging)), None)
        with processes.raise_on_all(), write_errors(target):
            try:
                if staging is not None and position is not None:
                    for path in write_shards(staging, headers, stream, shards, metadata, position, len(writers)):
                        sync(path)  # here, since all of them do it at the same time
            finally:
                collections.deque(stream, maxlen=0)  # the others wait for this process in gathering each tensor
        with processes.raise_on_all(), write_errors(target):
            if position == 0 and staging is not None:
                finish(staging, files or {})
                stack.close()
    return target


def _gathered(tensors: Exported, queues: Sequence[list[list[str]]], position: int | None) -> Iterator[Tensor]:
    """Yields the tensors of the files `queues[position]`. All processes read the tensors of all queues in one order.

    A round reads tensors of each queue, up to the size of the largest parameter, and keeps those of its own queue in
    host memory. So all processes have something to write at the same time, and few parameters that several tensors
    are parts of are gathered twice.
    """
    largest = max((tensor.numel() * tensor.itemsize for tensor, _ in tensors.boxes.values()), default=0)
    rounds = [
        [n for file in queue for n in split_into_shards({name: tensors.headers[name] for name in file}, largest)]
        for queue in queues
    ]
    for batches in itertools.zip_longest(*rounds, fillvalue=()):
        kept: collections.deque[Tensor] = collections.deque()
        for number, names in enumerate(batches):
            for name in names:
                tensor = tensors.read(name)
                if number == position:
                    kept.append(tensor.cpu())
                del tensor
        while kept:
            yield kept.popleft()


@contextlib.contextmanager
def replacing(target: Path, size: int, *, is_file: bool = False) -> Iterator[Path]:
    """Yields a new folder for the block to fill, which replaces the folder `target` when the block ends.

    is_file: the one file in the new folder replaces the file `target` instead.

    The new folder is beside the old one. It gets the old one's other files as hard links (copies if the file system has
    no links), then the two are swapped: atomically on Linux, by two renames elsewhere. If the block fails, the old
    folder stays. A killed process leaves the old or the new folder complete, and a folder .<name>.saving-*.
    If a folder cannot be renamed (a mount point, the current directory), a first checkpoint is moved in file by file,
    the weights last, and a second one is refused.
    Raises CheckpointError if `target` is refused, OSError if it cannot be written or `size` bytes are not free.
    """
    fixed = not is_file and _is_fixed(target)
    home = target if fixed else target.parent
    home.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(home).free
    if size > free:
        raise OSError(errno.ENOSPC, f"it takes {readable_size(size)} and {readable_size(free)} are free")
    staging = home / f".{target.name[:100]}.saving-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        staging.mkdir()
        yield staging
        if is_file:
            (path,) = staging.iterdir()
            os.replace(path, target)
        else:
            (_move_files if fixed else _swap)(staging, target)
        sync(target if fixed else target.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _is_fixed(target: Path) -> bool:
    """Whether the folder must be filled in place, since it cannot be renamed.

    Raises CheckpointError, HubError or PermissionError if it cannot be filled.
    """
    if not target.exists():
        return False
    if not target.is_dir():
        raise HubError(f"{target} is a file; give the path of a folder")
    if not os.access(target, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
    is_current = os.path.samefile(target, os.curdir)
    fixed = is_current or os.path.ismount(target) or not os.access(target.parent, os.W_OK)
    if fixed and any(map(_is_weights, os.listdir(target))):
        raise CheckpointError(
            f"{target} holds a checkpoint and cannot be swapped for another: it is a mount point or the "
            "current directory, or the folder above is not writable.\n"
            "  Next: save to a folder inside it, or remove the old checkpoint first."
        )
    return fixed


def _is_weights(name: str) -> bool:
    return re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?", name) is not None


def split_into_shards(headers: Mapping[str, TensorInfo], max_bytes: int) -> list[list[str]]:
    """The names of the tensors of each shard, in file order."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, info in headers.items():
        if shards[-1] and size + info.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += info.nbytes
    return [align(headers, names) for names in shards]


def align(headers: Mapping[str, TensorInfo], names: list[str]) -> list[str]:
    """The names sorted by element size, largest first, so that each tensor in a file is aligned to its elements."""
    return sorted(names, key=lambda name: -headers[name].dtype.itemsize)


def write_shards(
    folder: Path,
    headers: Mapping[str, TensorInfo],
    tensors: Iterator[Tensor],
    shards: list[list[str]],
    metadata: Mapping[str, str] | None = None,
    first: int = 0,
    step: int = 1,
) -> list[Path]:
    """Writes the weight files `shards[first::step]` and, with the first of several, their index; returns their paths.

    tensors: in the order of these files. The safetensors library's own writer would keep all of a file in memory.
    Raises OSError.
    """
    count = len(shards)
    files = [f"model-{k:05}-of-{count:05}.safetensors" for k in range(1, count + 1)] if count > 1 else [SAFETENSORS]
    for file, names in list(zip(files, shards, strict=True))[first::step]:
        write_file(folder / file, headers, names, tensors, metadata or {"format": "pt"})
    if first == 0 and count > 1:
        size = sum(info.nbytes for info in headers.values())
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / f"{SAFETENSORS}.index.json").write_bytes(json_bytes(index))
    return [folder / file for file in files[first::step]]


def write_file(
    path: Path,
    headers: Mapping[str, TensorInfo],
    names: list[str],
    tensors: Iterator[Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Writes a safetensors file: the length of its header, the header as JSON, the bytes of the tensors.

    It has the mode of any new file; the safetensors library's own writer makes files that only their owner can read.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        info = headers[name]
        if info.dtype not in _CODES:
            raise CheckpointError(f"{name} is {info.dtype}, which safetensors files do not support")
        start, end = end, end + info.nbytes
        header[name] = {"dtype": _CODES[info.dtype], "shape": list(info.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)  # mapped weights are aligned as torch's own, so matmuls round alike
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            tensor = next(tensors)
            assert TensorInfo(tensor.dtype, tuple(tensor.shape)) == headers[name], f"{name} differs from its header"
            file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del tensor


def finish(staging: Path, files: Mapping[str, bytes | Path]) -> None:
    """Adds `files` to a folder and syncs all its contents to the disk. Raises OSError."""
    for name, content in files.items():
        (staging / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            shutil.copyfile(content, staging / name)
        else:
            (staging / name).write_bytes(content)
    for path in [*staging.rglob("*"), staging]:
        sync(path)


def sync(path: Path) -> None:
    """Waits until a file or folder is on the disk. Raises OSError."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open folders
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _move_files(staging: Path, target: Path) -> None:
    """Moves file by file, the weights last and then their index, without which there is no checkpoint."""
    files = [path for path in staging.rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: (_is_weights(path.name), path.suffix == ".json")):
        place = target / path.relative_to(staging)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, place)


def _swap(staging: Path, target: Path) -> None:
    """Replaces `target` by `staging`, and keeps the files of `target` that are not weights and not in `staging`."""
    old = staging.with_name(f"{staging.name}-old")
    if target.is_dir():
        shutil.copymode(target, staging)
        with contextlib.suppress(FileNotFoundError):  # another save has moved it; its files are linked below
            _link_others(target, staging)
    try:
        os.rename(staging, target)  # works if `target` is empty, or not there
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    if _exchange(staging, target):
        old = staging
    else:
        os.rename(target, old)
        try:
            os.rename(staging, target)
        except BaseException:
            if not target.exists():
                os.rename(old, target)
            raise
    _link_others(old, target)  # files that were written during the swap
    shutil.rmtree(old, ignore_errors=True)


def _link_others(old: Path, new: Path, *, weights: bool = False) -> None:
    """Hard-links the files of `old` that `new` lacks into `new`, except the weights."""
    for path in old.iterdir():
        place = new / path.name
        if path.is_dir() and not path.is_symlink() and (place.is_dir() or not os.path.lexists(place)):
            place.mkdir(exist_ok=True)
            _link_others(path, place, weights=True)
            shutil.copystat(path, place)
        elif os.path.lexists(place) or (_is_weights(path.name) and not weights):
            continue
        elif path.is_symlink():
            os.symlink(os.readlink(path), place)
        else:
            try:
                os.link(path, place)
            except OSError:  # the file system has no links, or forbids them
                shutil.copy2(path, place)
    sync(new)


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two folders atomically. Returns False if the system or the file system cannot."""
    if sys.platform != "linux" or not hasattr(libc := ctypes.CDLL(None, use_errno=True), "renameat2"):
        return False
    current_folder, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE
    if libc.renameat2(current_folder, os.fsencode(a), current_folder, os.fsencode(b), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code not in (errno.ENOSYS, errno.EINVAL):
        raise OSError(code, os.strerror(code), str(b))
    return False
