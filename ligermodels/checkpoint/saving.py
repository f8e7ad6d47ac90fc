"""Writes checkpoint folders in one step: a reader finds the old checkpoint or the new one, also after a crash."""

import collections
import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ligermodels.checkpoint.reading import SAFETENSORS, json_bytes
from ligermodels.errors import CheckpointError, HubError, InputError


def num_bytes(size: int | str) -> int:
    """A number of bytes, given as one or as "5GB" (10^9) or "5GiB" (2^30). Raises InputError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:([KMGT])(I?)B)?", str(size).upper())
    count = float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " ") if match else 0.0
    if not 1 <= count < 2**63:
        raise InputError(f"max_shard_size={size!r}: expected a number of bytes, or such as '5GB' or '500MiB'")
    return int(count)


def write_checkpoint(
    folder: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    files: Mapping[str, bytes | Path] | None = None,
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str = "5GB",
    expected_bytes: int = 0,
    overwrite: bool = True,
    is_main: bool = True,
) -> Path:
    """Writes a checkpoint folder in one step and returns its path.

    tensors: (name, tensor), taken one shard at a time. files: {name in the folder: its bytes, or a file to copy}.
    metadata: of the safetensors files, by default {"format": "pt"}.
    max_shard_size: in bytes, or as "5GB" (10^9) or "5GiB" (2^30); a larger tensor gets a shard of its own.
    expected_bytes: the size of all tensors; nothing is written if the disk has no room for it.
    overwrite: False refuses a folder that holds anything; True replaces weights and `files`, the rest stays.
    is_main: False takes the tensors and writes nothing. Where `tensors` gathers sharded weights, every rank calls
    this, one of them with True; the others return before the folder is there: put a barrier after it.

    The new folder grows beside the old one, whose other files it gets as hard links (copies where the file system has
    none), then the two are swapped: atomic on Linux, two renames elsewhere. A killed process leaves the old folder or
    the new one, whole, and another that is named .<name>.saving-*.
    Where a folder cannot be renamed (a mount point, the current one), a first checkpoint goes in file by file, the
    weights last, and a second one is refused.
    Raises CheckpointError if `folder` is refused, HubError (with `errno`) if it cannot be written.
    """
    limit = num_bytes(max_shard_size)
    target, tensors, metadata = absolute(folder), iter(tensors), dict(metadata or {"format": "pt"})
    try:
        if is_main:
            with write_errors(target):
                _write(target, tensors, files or {}, metadata, limit, expected_bytes, overwrite)
    except Exception:
        _take_all(tensors)  # the other ranks wait for this one in gathering each of them
        raise
    _take_all(tensors)
    return target


def _take_all(tensors: Iterator[object]) -> None:
    collections.deque(tensors, maxlen=0)


def _write(
    target: Path,
    tensors: Iterator[tuple[str, Tensor]],
    files: Mapping[str, bytes | Path],
    metadata: dict[str, str],
    limit: int,
    expected_bytes: int,
    overwrite: bool,
) -> None:
    fixed = check_target(target, overwrite)
    home = target if fixed else target.parent
    home.mkdir(parents=True, exist_ok=True)
    check_room(home, expected_bytes)
    staging = home / f".{target.name[:100]}.saving-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        staging.mkdir()
        _write_shards(staging, tensors, limit, metadata)
        finish(staging, files)
        install(staging, target, fixed=fixed)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def absolute(path: str | Path) -> Path:
    """Where `path` leads to, with its links followed and its ~ resolved."""
    return Path(os.path.realpath(os.path.expanduser(path)))


def check_target(target: Path, overwrite: bool) -> bool:
    """Whether the folder has to be filled in place, since it cannot be renamed.

    Raises CheckpointError, HubError or PermissionError if it may not be filled.
    """
    if not target.exists():
        return False
    if not target.is_dir():
        raise HubError(f"{target} is a file; give the path of a folder")
    contents = os.listdir(target)
    if contents and not overwrite:
        raise CheckpointError(f"{target} is not empty. Pass overwrite=True (--overwrite) to save over it.")
    if not os.access(target, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
    is_current = os.path.samefile(target, os.curdir)
    fixed = is_current or os.path.ismount(target) or not os.access(target.parent, os.W_OK)
    if fixed and any(map(_is_weights, contents)):
        raise CheckpointError(
            f"{target} holds a checkpoint and cannot be swapped for another: it is a mount point or the "
            "current directory, or the folder above is not writable.\n"
            "  Next: save to a folder inside it, or remove the old checkpoint first."
        )
    return fixed


def _is_weights(name: str) -> bool:
    return re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?", name) is not None


def check_room(home: Path, expected: int) -> None:
    """Raises OSError where the disk of `home` has fewer bytes free than expected."""
    free = shutil.disk_usage(home).free
    if expected > free:
        raise OSError(errno.ENOSPC, f"it takes {expected / 1e9:.2f} GB and {free / 1e9:.2f} GB are free")


def _write_shards(staging: Path, tensors: Iterable[tuple[str, Tensor]], limit: int, metadata: dict[str, str]) -> None:
    """Writes the weights and, if they take more than one file, the index. Holds one shard in memory."""
    shards: list[tuple[Path, list[str]]] = []
    total = 0
    for shard in _shards(tensors, limit):
        path = staging / f"shard-{len(shards)}"
        save_file(shard, path, metadata)
        path.chmod(staging.stat().st_mode & 0o666)  # safetensors makes it 0600, whatever the umask
        shards.append((path, list(shard)))
        total += sum(tensor.nbytes for tensor in shard.values())
    if len(shards) == 1:
        shards[0][0].rename(staging / SAFETENSORS)
        return
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        path.rename(staging / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (staging / f"{SAFETENSORS}.index.json").write_bytes(json_bytes(index))


def _shards(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.cpu().contiguous()
        size += tensor.nbytes
    yield shard


def finish(staging: Path, files: Mapping[str, bytes | Path]) -> None:
    """Adds `files` to a folder and syncs all that it holds to the disk. Raises OSError."""
    for name, content in files.items():
        (staging / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            shutil.copyfile(content, staging / name)
        else:
            (staging / name).write_bytes(content)
    for path in [*staging.rglob("*"), staging]:
        _sync(path)


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folder
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def install(staging: Path, target: Path, *, fixed: bool) -> None:
    """Puts the finished folder `staging` in the place of `target`; `fixed`, from `check_target`, file by file.

    Raises OSError.
    """
    if fixed:
        _move_files(staging, target)
    else:
        _swap(staging, target)
    _sync(target if fixed else target.parent)


def _move_files(staging: Path, target: Path) -> None:
    """File by file, the weights last and their index after them: without it, there is no checkpoint yet."""
    files = [path for path in staging.rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: (_is_weights(path.name), path.suffix == ".json")):
        place = target / path.relative_to(staging)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, place)
    shutil.rmtree(staging)


def _swap(staging: Path, target: Path) -> None:
    """Puts `staging` in the place of `target`; files of `target` other than its weights stay, unless they are new."""
    old = staging.with_name(f"{staging.name}-old")
    if target.is_dir():
        shutil.copymode(target, staging)
        with contextlib.suppress(FileNotFoundError):  # another save has moved it; what it held is linked below
            _link_others(target, staging)
    if not _rename(staging, target):
        if _exchange(staging, target):
            old = staging
        else:
            try:
                os.rename(target, old)
                os.rename(staging, target)
            except BaseException:
                if not target.exists():
                    os.rename(old, target)
                raise
    if old.exists():
        _link_others(old, target)  # what was written while the two were swapped
        shutil.rmtree(old, ignore_errors=True)


def _link_others(old: Path, new: Path, *, weights: bool = False) -> None:
    """Hard-links into `new` the files of `old` that it lacks, except the weights."""
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
            except OSError:  # the file system has no links, or none to the files of others
                shutil.copy2(path, place)
    _sync(new)


def _rename(a: Path, b: Path) -> bool:
    """Renames a folder to a name that is free or an empty folder's; False where `b` has contents."""
    try:
        os.rename(a, b)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two folders atomically; False where the system or the file system cannot."""
    if sys.platform != "linux" or not hasattr(libc := ctypes.CDLL(None, use_errno=True), "renameat2"):
        return False
    current_folder, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE
    if libc.renameat2(current_folder, os.fsencode(a), current_folder, os.fsencode(b), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code not in (errno.ENOSYS, errno.EINVAL):
        raise OSError(code, os.strerror(code), str(b))
    return False


@contextlib.contextmanager
def write_errors(target: Path) -> Iterator[None]:
    """For a block that writes `target`: what the system refuses in it becomes a HubError, with `errno`."""
    try:
        yield
    except HubError:
        raise
    except (OSError, SafetensorError) as error:
        words = re.search(r"os error (\d+)", str(error))  # safetensors gives the number in words only
        code = error.errno if isinstance(error, OSError) else int(words[1]) if words else None
        step = "check the disk, or save elsewhere"
        if code in (errno.ENOSPC, errno.EDQUOT):
            step = "free some space, or save elsewhere"
        elif code in (errno.EACCES, errno.EROFS):
            step = "you may not write there; save elsewhere"
        failure = HubError(f"{target} cannot be written: {error}.\n  Next: {step}.")
        failure.errno = code
        raise failure from error
