"""Checkpoint folders, read through safetensors; saving.py writes them.

Reading goes by model.safetensors.index.json, else by model.safetensors, and never by what else lies in the
folder: repositories hold the same weights a second time (consolidated*, original/, *.bin). Pickles are read
only when asked for, and then as plain tensors.
Nothing is read through a link that leaves the folder (but for the blobs of the Hub's cache), and what a file says
of itself is held against its size before memory is spent on it.
"""

import contextlib
import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PureWindowsPath
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ligermodels.checkpoint.weights import TensorInfo, plain_name, same_bits
from ligermodels.errors import CheckpointError, HubError, LigermodelsError

TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
)  # fmt: skip
COMPANIONS = (
    *TOKENIZER, *TEMPLATES, "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
"""The files that belong to a model beside its configs and weights."""

SAFETENSORS, PICKLES = "model.safetensors", "pytorch_model.bin"

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""{the code of a dtype in a safetensors header: the dtype}."""

_SPARE = 64 * 2**20
"""Memory that reading headers may take beyond the size of the files."""
_HEADER_COST = 12
"""Bytes of memory to a byte of a safetensors header, measured (10.6) and rounded up."""
_JSON_BYTES, _JSON_COMMAS = 24 * 2**20, 200_000
"""Twice the largest index known, 92,000 entries; parsed, this many take less than `_SPARE` beyond their bytes."""
_NAME, _DIMS = 500, 64


def check_file(path: Path, home: Path | None = None) -> os.stat_result:
    """The state of a file of the folder `home` (by default the one it is in), which is safe to open.

    Raises CheckpointError for a file that is not there, not a regular one (a pipe would be waited for), or a link
    that leads out of `home` and is not one of the Hub's cache; HubError if this cannot be found out.
    """
    try:
        state = os.stat(path)
        real, root = Path(os.path.realpath(path)), Path(os.path.realpath(home or path.parent))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            raise HubError(f"{path} cannot be read: {error.strerror}") from error
        words = "is a link to nothing" if os.path.islink(path) else "is not there"
        raise CheckpointError(
            f"{path} {words}. A download or copy that did not finish? Fetch the checkpoint again."
        ) from error
    if not stat.S_ISREG(state.st_mode):
        raise CheckpointError(f"{path} is not a regular file. Remove what is there and fetch the checkpoint again.")
    blobs = [parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots"]
    if not any(real.is_relative_to(place) for place in (root, *blobs)):
        raise CheckpointError(
            f"{path} is a link that leaves its folder, to {real}.\n"
            "  Next: if you trust it, put the file itself in the place of the link."
        )
    return state


def may(path: Path, mode: int) -> bool:
    """Whether this user may do `mode` (of os.access) with a path that is there."""
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def companion_files(folder: Path, target: Path | None = None) -> dict[str, Path]:
    """{name: path} of the tokenizer, template and processor files in `folder`. Raises as `check_file`.

    target: a folder that they are to be saved to. What it holds already stays out: a file of that name, and, where
    there is a tokenizer, all files of one. Its user has saved it there, with added tokens perhaps.
    """
    there = _found(target, COMPANIONS) if target is not None else {}
    kept = (*TOKENIZER, *TEMPLATES) if any(name in there for name in TOKENIZER) else ()
    found = _found(folder, [pattern for pattern in COMPANIONS if pattern not in kept])
    for path in found.values():
        check_file(path, folder)
    return {name: path for name, path in found.items() if name not in there}


def _found(folder: Path, patterns: Iterable[str]) -> dict[str, Path]:
    paths = [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path for path in paths}


def read_json(path: Path, *, lenient: bool = False) -> dict[str, Any]:
    """The object that a JSON file holds; `lenient` mends its commas. Raises CheckpointError if it holds none."""
    if not os.path.lexists(path) and may(path.parent, os.X_OK):
        raise CheckpointError(f"{path} is not there. {_other_layout(path.parent)}")
    size = check_file(path).st_size
    try:
        with path.open("rb") as file:
            start = file.read(_JSON_BYTES + 1)
        if len(start) > _JSON_BYTES or start.count(b",") > _JSON_COMMAS:
            raise CheckpointError(
                f"{path} is too large, with {size:,} bytes and {start.count(b','):,} commas; read are at most "
                f"{_JSON_BYTES:,} and {_JSON_COMMAS:,}. It is not what its name says; fetch it again."
            )
        value = lenient_json(start.decode()) if lenient else json.loads(start)
    except OSError as error:
        raise HubError(f"{path} cannot be read: {error.strerror}") from error
    except LigermodelsError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {_kind(start) or error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


def _other_layout(folder: Path) -> str:
    """What a folder may be that lacks config.json."""
    with contextlib.suppress(OSError):
        names = os.listdir(folder)
        if any(re.match(r"consolidated.*\.(pth|safetensors)|adapter_config\.json|\.metadata$", name) for name in names):
            return f"It is of another layout: `ligermodels inspect {folder}` says of which, and what reads it."
        if any(name.startswith((SAFETENSORS, PICKLES)) for name in names):
            return "Weights alone, as trainers leave them: give the model's configuration with config= (--config DIR)."
    return f"Is {folder} the folder of a checkpoint?"


def lenient_json(text: str) -> Any:
    """JSON with commas too many or too few, as Llama 3.2 published it (Lightning-AI/litgpt#1752)."""
    text = re.sub(r",(\s*[}\]])", r"\1", text)
    for lacking in range(101):  # each one costs a parse of all
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            if error.msg != "Expecting ',' delimiter" or text[error.pos : error.pos + 1] != '"' or lacking == 100:
                raise
            text = f"{text[: error.pos]},{text[error.pos :]}"


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """A JSON file as the Hub has them: indented, UTF-8, a newline at the end."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _kind(start: bytes) -> str | None:
    """What a file that is not what it should be is instead, from its first bytes."""
    if start.startswith(b"version https://git-lfs"):
        return "it is a git-lfs pointer; run `git lfs pull` in that folder."
    if re.match(rb"\s*<(!doctype|html|head|\?xml)", start, re.IGNORECASE):
        return "it is an HTML page, saved in place of a download; fetch the file again."
    if start.startswith((b"PK\x03\x04", b"\x80\x02\x8a")):
        return "it is a pickle under another name; torch.save wrote it."
    return "it is a GGUF file." if start.startswith(b"GGUF") else None


def weight_files(folder: Path, single: str) -> tuple[list[str], dict[str, str] | None]:
    """The weight files that a folder should hold and, where there is an index, {tensor: file}."""
    index = folder / f"{single}.index.json"
    if not os.path.lexists(index):
        return [single], None
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map from tensors to files; fetch it again")
    odd = [file for file in weight_map.values() if not isinstance(file, str)]
    files = sorted({file for file in weight_map.values() if isinstance(file, str)})
    odd += [file for file in files if not file.endswith(Path(single).suffix) or not _stays_inside(file)]
    if odd:
        named = repr(odd[0])
        named = named if len(named) <= _NAME else f"{named[:_NAME]}..."
        raise CheckpointError(f"{index} names {named}; expected a {Path(single).suffix} file in its folder")
    for name in weight_map:
        _check_name(index, name)
    return files, weight_map


def _stays_inside(file: str) -> bool:
    # Windows rules see drives, UNC paths and backslashes too.
    path = PureWindowsPath(file)
    inside = not (path.drive or path.root or ".." in path.parts or "\\" in file)
    return inside and file.isprintable() and len(file) <= _NAME


def _check_name(where: Path, name: Any) -> None:
    """Names are shown in messages: what moves a terminal's cursor, or fills its screen, is none."""
    if not isinstance(name, str) or not 0 < len(name) <= _NAME or not name.isprintable():
        shown = repr(name)[:60]
        raise CheckpointError(f"{where} holds a tensor with the name {shown}, which no model has; do not trust it")


class SafetensorsFile:
    """One safetensors file, mapped and held against its size; `open_safetensors` makes them.

    names: of its tensors, in file order. metadata: what stands beside them.
    """

    def __init__(self, path: Path, version: tuple[int, ...]):
        self.path, self._seen = path, {path: version}
        self._opened = _open(path)
        self.names: list[str] = self._opened.offset_keys()
        for name in self.names:
            _check_name(path, name)
        self.metadata: dict[str, str] = self._opened.metadata() or {}

    def info(self, name: str) -> TensorInfo:
        """What the header says of a tensor. Raises CheckpointError for a dtype or shape that torch cannot hold."""
        stored = self._opened.get_slice(name)
        dtype, shape = DTYPES.get(stored.get_dtype()), tuple(stored.get_shape())
        if dtype is None:
            raise CheckpointError(f"{self.path}: {name} is quantised ({stored.get_dtype()})")
        if len(shape) > _DIMS or math.prod(max(1, size) for size in shape) >= 2**63:
            raise CheckpointError(f"{self.path}: {name} has {len(shape)} dimensions, too many or large")
        return TensorInfo(dtype, shape)

    def read(self, name: str) -> Tensor:
        """The tensor as a view of the mapped file: on the CPU, not to be written to. Raises as `check_unchanged`."""
        check_unchanged(self._seen)
        return self._opened.get_tensor(name)


def open_safetensors(folder: Path, files: Iterable[str]) -> dict[str, SafetensorsFile]:
    """{file: the open file}, for files of `folder`; their headers together fit into memory.

    Raises CheckpointError for one that is not there, damaged, or not what its name says; HubError (cannot be read).
    """
    paths = {file: folder / file for file in files}
    seen = versions(paths.values(), folder)
    _check_headers({path: path.stat().st_size for path in seen})
    return {file: SafetensorsFile(path, seen[path]) for file, path in paths.items()}


class SafetensorsReader:
    """The tensors of a checkpoint folder, mapped from its files. A context manager.

    headers: {name: TensorInfo} in file order, without what wrappers put into the names. places: {name: file}.
    metadata: the first file's. With an index, what it does not name is not part of the checkpoint; its total_size is
    not looked at.
    Raises CheckpointError for an index or file that is missing, damaged, or not what its name says, and for a file
    or folder that was replaced meanwhile; HubError for one that cannot be read.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.source = str(folder)
        self.headers: dict[str, TensorInfo] = {}
        self.places: dict[str, str] = {}
        self._stored: dict[str, str] = {}
        with unreplaced(self.folder):
            files, weight_map = weight_files(self.folder, SAFETENSORS)
            self._files = open_safetensors(self.folder, files)
        twice = []
        for file, opened in self._files.items():
            for name in opened.names:
                if weight_map is not None and weight_map.get(name) != file:
                    twice += [(name, opened)] if name in weight_map else []
                    continue
                plain = _plain_name(opened.path, name, self._stored)
                self.headers[plain], self.places[plain] = opened.info(name), file
        for name, file in (weight_map or {}).items():
            if self._stored.get(plain_name(name)) != name:
                raise CheckpointError(f"{self.folder / file} lacks {name}, against its index; fetch both again")
        for name, opened in twice:
            plain = plain_name(name)
            if not same_bits(self.read(plain), opened.read(name)):
                raise CheckpointError(
                    f"{opened.path} and {self.places[plain]} hold different tensors {name}.\n"
                    "  Likely: shards of two checkpoints in one folder; fetch them again into an empty one."
                )
        self.metadata = self._files[files[0]].metadata

    def read(self, name: str) -> Tensor:
        """As `SafetensorsFile.read`."""
        return self._files[self.places[name]].read(self._stored[name])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._files.clear()


def _plain_name(where: Path, name: str, stored: dict[str, str]) -> str:
    """`plain_name`, noted in `stored`, {plain name: name in the file}."""
    plain = plain_name(name)
    if stored.setdefault(plain, name) != name:
        raise CheckpointError(
            f"{where} holds {name} and {stored[plain]}, which are one name; keep the one that is right"
        )
    return plain


def versions(paths: Iterable[Path], home: Path) -> dict[Path, tuple[int, ...]]:
    """{file: what changes when it is written to}, each one safe to open. Raises as `check_file`."""
    return {path: _version(check_file(path, home)) for path in paths}


def check_unchanged(seen: Mapping[Path, tuple[int, ...]]) -> None:
    """Raises CheckpointError if something wrote to a mapped file: reading past its end would end the process."""
    for path, version in seen.items():
        if (now := _state(path)) is not None and now.st_ino == version[0] and _version(now) != version:
            raise CheckpointError(f"{path} changed while it was read: something still writes to it. Load it again.")


def _version(state: os.stat_result) -> tuple[int, ...]:
    return state.st_ino, state.st_size, state.st_mtime_ns


def _state(path: Path) -> os.stat_result | None:
    """None for a file that is gone: what was mapped of it stays."""
    try:
        return os.stat(path)
    except OSError:
        return None


@contextlib.contextmanager
def unreplaced(folder: Path) -> Iterator[None]:
    """For a block that opens several files of `folder`: raises CheckpointError if another took its place meanwhile.

    The folder is held open: the number of one that is deleted may be given to the next at once.
    """
    with read_errors(folder):
        held = None if os.name == "nt" else os.open(folder, os.O_RDONLY)  # Windows opens no folder
        before = os.stat(folder if held is None else held)
    try:
        yield
        with read_errors(folder):
            if not os.path.samestat(before, os.stat(folder)):
                raise CheckpointError(f"{folder} was replaced while it was opened, by another save; load it again")
    finally:
        if held is not None:
            os.close(held)


@contextlib.contextmanager
def read_errors(where: str | Path) -> Iterator[None]:
    """For a block that reads `where` alone: what the system refuses in it becomes a HubError that names this."""
    try:
        yield
    except LigermodelsError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        raise HubError(f"{where} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _check_headers(sizes: Mapping[Path, int]) -> None:
    """Refuses headers that would take more memory than their files and `_SPARE` together."""
    total = 0
    for path, size in sizes.items():
        with read_errors(path), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
        total += length if length <= size else 0  # else damaged, which `_open` tells
        if total * _HEADER_COST > sum(sizes.values()) + _SPARE:
            raise CheckpointError(
                f"{path} has a header of {length:,} bytes in a file of {size:,}: more names than weights.\n"
                "  Likely: damaged, or made to exhaust memory; fetch it again from a source that you trust."
            )


def _open(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            start = file.read(64)
            opened = safe_open(path, framework="pt")
            file.seek(8)
            header = file.read(int.from_bytes(start[:8], "little"))
    except OSError as error:
        raise HubError(f"{path} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        kind = _kind(start) or f"it is damaged or cut short; fetch it again. ({_short(error)})"
        raise CheckpointError(f"{path} is not a safetensors file: {kind}") from error
    if header.count(b'"data_offsets"') > len(opened.offset_keys()):
        raise CheckpointError(f"{path} names a tensor twice in its header: no program writes that; do not trust it")
    return opened


def _short(error: BaseException) -> str:
    """The first line of an error, of which the file may have chosen the words."""
    line = (str(error).splitlines() or [""])[0][:200]
    return "".join(letter if letter.isprintable() else "?" for letter in line)


_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""How torch.save began before torch 1.6."""


def read_pickle(path: Path, home: Path | None = None) -> dict[str, Tensor]:
    """The tensors of a file that torch.save wrote, mapped; unpickled without running code.

    home: the folder that the file must be in, as for `check_file`.
    Raises CheckpointError for a file that is not there, damaged, or holds anything but plain tensors under names; also
    for a tensor that claims more than is stored of it: a stride of 0 makes terabytes of a few bytes. HubError.
    """
    check_file(path, home)
    with read_errors(path), path.open("rb") as opened:
        start = opened.read(64)
    if start.startswith(_LEGACY):
        raise CheckpointError(
            f"{path} is no file of plain tensors that can be mapped: a torch before 1.6 wrote it.\n"
            "  Next, with torch 2.6 or later: torch.save(torch.load(FILE), FILE) writes it anew."
        )
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # of any kind: the file chooses what the unpickler runs into
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # a place before the file's start
            raise HubError(f"{path} cannot be read: {error.strerror or error}") from error
        foreign = _kind(start) if start[:2] not in (b"PK", b"\x80\x02") else None
        kind = foreign or "it asks for more than tensors, or is damaged or cut short; do not trust it."
        raise CheckpointError(f"{path} cannot be read as a file of plain tensors: {kind}") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"{path} is not a flat dictionary of tensors; a training checkpoint, perhaps")
    for name, tensor in state.items():
        _check_name(path, name)
        plain = tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type == "cpu"
        if not plain:
            raise CheckpointError(f"{path}: {name} is sparse, quantised or empty; expected a plain tensor")
        if tensor.nbytes > (stored := tensor.untyped_storage().nbytes()):
            raise CheckpointError(
                f"{path}: {name} claims {tensor.nbytes:,} bytes and {stored:,} are stored: no plain tensor.\n"
                "  Likely: a tensor that was expanded, not copied, or a file made to exhaust memory; do not trust it."
            )
    return {name: tensor.detach() for name, tensor in state.items()}


class PickleReader:
    """SafetensorsReader's twin for pytorch_model.bin and its index."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.source = str(folder)
        self.metadata: dict[str, str] = {}
        self.places: dict[str, str] = {}
        self._tensors: dict[str, Tensor] = {}
        stored: dict[str, str] = {}
        files, weight_map = weight_files(self.folder, PICKLES)
        self._seen = versions((self.folder / file for file in files), self.folder)
        for file in files:
            for name, tensor in read_pickle(self.folder / file, self.folder).items():
                if weight_map is None or weight_map.get(name) == file:
                    plain = _plain_name(self.folder / file, name, stored)
                    self._tensors[plain], self.places[plain] = tensor, file
        for name, file in (weight_map or {}).items():
            if stored.get(plain_name(name)) != name:
                raise CheckpointError(f"{self.folder / file} lacks {name}, against its index; fetch both again")
        self.headers = {name: TensorInfo(x.dtype, tuple(x.shape)) for name, x in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """The tensor as a view of its mapped file: on the CPU, not to be written to. Raises as `check_unchanged`."""
        check_unchanged(self._seen)
        return self._tensors[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._tensors.clear()


def open_checkpoint(folder: str | Path, *, allow_pickle: bool = False) -> SafetensorsReader | PickleReader:
    """A reader for the weights in `folder`: its safetensors or, if it has none and they are allowed, pickles.

    No config.json is needed. Raises CheckpointError, and HubError for a folder or file that cannot be read.
    """
    with read_errors(Path(folder)):
        present = {name.removesuffix(".index.json") for name in os.listdir(folder)}
    if SAFETENSORS in present:
        return SafetensorsReader(folder)
    if PICKLES in present and allow_pickle:
        return PickleReader(folder)
    if PICKLES in present:
        raise CheckpointError(
            f"{folder} holds its weights only as pickles (pytorch_model.bin), which can carry code.\n"
            "  Next: pass allow_pickle=True (--allow-pickle): tensors are read from them, and nothing else."
        )
    raise CheckpointError(
        f"{folder} holds neither model.safetensors nor its index.\n"
        "  Likely: an adapter, a GGUF file, Meta's or Mistral's own layout, or an unfinished download."
    )
