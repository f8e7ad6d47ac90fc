"""Reads checkpoint folders in Hugging Face's layout; saving.py writes them.

model.safetensors.index.json names the weight files, else there is one, model.safetensors. What else lies in the folder
is not read: repositories hold the same weights a second time (consolidated*, original/, *.bin). Pickles are read only
where they are allowed, and then as plain tensors. No file is read through a link that leaves the folder, but for the
blobs of the Hub's cache.
"""

import contextlib
import json
import os
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PureWindowsPath
from typing import Any, ClassVar, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ligermodels.checkpoint.weights import TensorInfo, plain_name
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


def check_file(path: Path, home: Path | None = None) -> os.stat_result:
    """The stat of a file of the folder `home`, by default the one it is in.

    Raises CheckpointError for a file that is not there, not a regular one, or a link that leads out of `home` and is
    not one of the Hub's cache.
    """
    if not os.path.exists(path):
        raise CheckpointError(f"{path} is not there. Did a download or copy not finish? Fetch the checkpoint again.")
    if not os.path.isfile(path):
        raise CheckpointError(f"{path} is not a regular file. Remove what is there and fetch the checkpoint again.")
    real, root = path.resolve(), (home or path.parent).resolve()
    blobs = [parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots"]
    if not any(real.is_relative_to(place) for place in (root, *blobs)):
        raise CheckpointError(
            f"{path} is a link that leaves its folder, to {real}.\n"
            "  Next: if you trust it, put the file itself in the place of the link."
        )
    return path.stat()


def companion_files(folder: Path, target: Path | None = None) -> dict[str, Path]:
    """{name: path} of the tokenizer, template and processor files in `folder`. Raises as `check_file`.

    target: the folder that they are to be saved to. Files that it holds already are left out and, if a tokenizer is
    among them, all files of the tokenizer: the user has saved one there, perhaps with added tokens.
    """
    present = _found(target, COMPANIONS) if target is not None else {}
    skipped = (*TOKENIZER, *TEMPLATES) if any(name in present for name in TOKENIZER) else ()
    found = _found(folder, [pattern for pattern in COMPANIONS if pattern not in skipped])
    for path in found.values():
        check_file(path, folder)
    return {name: path for name, path in found.items() if name not in present}


def _found(folder: Path, patterns: Iterable[str]) -> dict[str, Path]:
    paths = [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path for path in paths}


def read_json(path: Path, *, lenient: bool = False) -> dict[str, Any]:
    """The object that a JSON file holds; `lenient` as `lenient_json`. Raises CheckpointError if it holds none."""
    if not os.path.lexists(path):
        raise CheckpointError(
            f"{path} is not there. `ligermodels inspect {path.parent}` says which layout the folder has.\n"
            "  Weights alone, as trainers leave them, need the model's configuration: config= (--config DIR)."
        )
    check_file(path)
    with read_errors(path):
        content = path.read_bytes()
    try:
        value = lenient_json(content.decode()) if lenient else json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {_file_kind(content) or error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


def lenient_json(text: str) -> Any:
    """JSON with commas too many or too few, as Llama 3.2 published it (Lightning-AI/litgpt#1752)."""
    text = re.sub(r",(\s*[}\]])", r"\1", text)
    while True:
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            if error.msg != "Expecting ',' delimiter" or text[error.pos : error.pos + 1] != '"':
                raise
            text = f"{text[: error.pos]},{text[error.pos :]}"


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """A JSON file as the Hub has them: indented, UTF-8, a newline at the end."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _file_kind(start: bytes) -> str | None:
    """What a file that cannot be parsed is, from its first bytes."""
    if start.startswith(b"version https://git-lfs"):
        return "it is a git-lfs pointer; run `git lfs pull` in that folder."
    if re.match(rb"\s*<(!doctype|html|head|\?xml)", start, re.IGNORECASE):
        return "it is an HTML page, saved in place of a download; fetch the file again."
    if start.startswith((b"PK\x03\x04", b"\x80\x02\x8a")):
        return "it is a pickle under another name; torch.save wrote it."
    return "it is a GGUF file." if start.startswith(b"GGUF") else None


def weight_files(folder: Path, single: str) -> tuple[list[str], dict[str, str] | None]:
    """The weight files that a folder should hold and, where there is an index, {tensor: file}.

    single: the name of the file where there is one only. Raises CheckpointError for an index that is damaged or names
    files elsewhere.
    """
    index = folder / f"{single}.index.json"
    if not os.path.lexists(index):
        return [single], None
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map from tensors to files; fetch it again")
    suffix = Path(single).suffix
    for file in weight_map.values():
        if not isinstance(file, str) or not file.endswith(suffix) or not _is_inside(file):
            raise CheckpointError(f"{index} names {file!r}; expected a {suffix} file in its folder")
    return sorted(set(weight_map.values())), weight_map


def _is_inside(file: str) -> bool:
    path = PureWindowsPath(file)  # sees drives, UNC paths and backslashes too
    return not (path.drive or path.root or ".." in path.parts or "\\" in file or "\0" in file)


class SafetensorsFile:
    """One safetensors file, mapped. safetensors checks its header against the file's size.

    names: of its tensors, in file order. metadata: what stands beside them.
    Raises CheckpointError for a file that is damaged or not what its name says, HubError for one that cannot be read.
    """

    def __init__(self, path: Path, home: Path | None = None):
        check_file(path, home)
        self.path = path
        with read_errors(path), path.open("rb") as file:
            start = file.read(64)
        try:
            self._opened = safe_open(path, framework="pt")
        except SafetensorError as error:
            kind = _file_kind(start) or f"it is damaged or cut short; fetch it again. ({error})"
            raise CheckpointError(f"{path} is not a safetensors file: {kind}") from error
        self.names: list[str] = self._opened.offset_keys()
        self.metadata: dict[str, str] = self._opened.metadata() or {}

    def info(self, name: str) -> TensorInfo:
        """The dtype and shape of a tensor. Raises CheckpointError for a dtype that torch does not have."""
        stored = self._opened.get_slice(name)
        if stored.get_dtype() not in DTYPES:
            raise CheckpointError(f"{self.path}: {name} is quantised ({stored.get_dtype()})")
        return TensorInfo(DTYPES[stored.get_dtype()], tuple(stored.get_shape()))

    def read(self, name: str) -> Tensor:
        """The tensor as a view of the mapped file: on the CPU, not to be written to."""
        return self._opened.get_tensor(name)


class PickleFile:
    """One file that torch.save wrote, mapped where that is possible; as `SafetensorsFile`."""

    def __init__(self, path: Path, home: Path | None = None):
        self.path = path
        self._tensors = read_pickle(path, home)
        self.names = list(self._tensors)
        self.metadata: dict[str, str] = {}

    def info(self, name: str) -> TensorInfo:
        """The dtype and shape of a tensor."""
        return TensorInfo(self._tensors[name].dtype, tuple(self._tensors[name].shape))

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU, not to be written to."""
        return self._tensors[name]


def read_pickle(path: Path, home: Path | None = None) -> dict[str, Tensor]:
    """The tensors of a file that torch.save wrote, unpickled without running code; `home` as for `check_file`.

    Raises CheckpointError for a file that is not there, damaged, or holds anything but plain tensors under names;
    HubError for one that cannot be read.
    """
    check_file(path, home)
    with read_errors(path), path.open("rb") as file:
        start = file.read(64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's remarks on a file that is then refused
            # Only a zip file can be mapped; torch before 1.6 wrote none.
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # of any kind: the file chooses what the unpickler runs into
        foreign = _file_kind(start) if start[:2] not in (b"PK", b"\x80\x02") else None
        kind = foreign or "it asks for more than tensors, or is damaged or cut short; do not trust it."
        raise CheckpointError(f"{path} cannot be read as a file of plain tensors: {kind}") from error
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise CheckpointError(f"{path} is not a flat dictionary of tensors; a training checkpoint, perhaps")
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{path} is not a flat dictionary of tensors; a training checkpoint, perhaps")
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise CheckpointError(f"{path}: {name} is sparse, quantised or empty; expected a plain tensor")
    return {name: tensor.detach() for name, tensor in state.items()}


class _FolderReader:
    """The tensors of a checkpoint folder: a context manager and a `weights.Reader`.

    headers: {name: TensorInfo} in file order, without the prefixes of wrappers. places: {name: file}.
    metadata: the first file's. With an index, what it does not name is not part of the checkpoint.
    Raises CheckpointError for an index or file that is missing, damaged or not what its name says, and for a folder
    that was replaced meanwhile; HubError for one that cannot be read.
    """

    single: ClassVar[str]
    is_mapped: ClassVar[bool]
    """Whether every tensor has memory of its own, mapped from the file, in which writing does not change the file."""
    open_file: ClassVar[type[SafetensorsFile] | type[PickleFile]]

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.source = str(folder)
        self.headers: dict[str, TensorInfo] = {}
        self.places: dict[str, str] = {}
        self._stored: dict[str, str] = {}
        with unreplaced(self.folder):
            files, weight_map = weight_files(self.folder, self.single)
            self._files = {file: self.open_file(self.folder / file, self.folder) for file in files}
        for file, opened in self._files.items():
            for name in opened.names:
                if weight_map is None or weight_map.get(name) == file:
                    self._add(name, file)
        for name, file in (weight_map or {}).items():
            if self._stored.get(plain_name(name)) != name:
                raise CheckpointError(f"{self.folder / file} lacks {name}, against its index; fetch both again")
        self.metadata = self._files[files[0]].metadata

    def _add(self, name: str, file: str) -> None:
        plain = plain_name(name)
        if plain in self._stored:
            raise CheckpointError(
                f"{self.folder / file} holds {name} and {self._stored[plain]}, which are one name; "
                "keep the one that is right"
            )
        self._stored[plain] = name
        self.headers[plain], self.places[plain] = self._files[file].info(name), file

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU, mapped from the file where that is possible: not to be written to."""
        return self._files[self.places[name]].read(self._stored[name])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._files.clear()


class SafetensorsReader(_FolderReader):
    """The tensors of model.safetensors, or of the shards that its index names."""

    single = SAFETENSORS
    is_mapped = os.name != "nt"  # Windows neither renames nor removes a file that is mapped
    open_file = SafetensorsFile


class PickleReader(_FolderReader):
    """The tensors of pytorch_model.bin, or of the shards that its index names."""

    single = PICKLES
    is_mapped = False  # tensors may share memory
    open_file = PickleFile


def open_checkpoint(folder: str | Path, *, allow_pickle: bool = False) -> SafetensorsReader | PickleReader:
    """A reader for the weights in `folder`: its safetensors or, if it has none and they are allowed, pickles.

    No config.json is needed. Raises CheckpointError, and HubError for a folder or file that cannot be read.
    """
    with read_errors(folder):
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


@contextlib.contextmanager
def unreplaced(folder: Path) -> Iterator[None]:
    """For a block that opens several files of `folder`: raises CheckpointError if a save replaces it meanwhile."""
    with read_errors(folder):
        before = os.stat(folder)
    yield
    with read_errors(folder):
        after = os.stat(folder)
    if not os.path.samestat(before, after):
        raise CheckpointError(f"{folder} was replaced while it was opened, by another save; load it again")


@contextlib.contextmanager
def read_errors(where: str | Path) -> Iterator[None]:
    """For a block that reads `where` alone: an error of the system or of the files becomes a HubError that names it."""
    try:
        yield
    except LigermodelsError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        raise HubError(f"{where} cannot be read: {getattr(error, 'strerror', None) or error}") from error
