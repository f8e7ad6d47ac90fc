"""Reads the weights of checkpoint folders in Hugging Face's layout; saving.py writes them.

model.safetensors.index.json names the weight files; without it, there is one, model.safetensors. Other files are not
read: repositories often have the same weights a second time (consolidated*, original/, *.bin). Pickles are read only if
they are allowed, and then as plain tensors.
"""

import json
import os
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ligermodels.checkpoint.files import (
    GGUF,
    PICKLES,
    SAFETENSORS,
    check_file,
    file_kind,
    read_errors,
    unreplaced,
    weight_files,
    weights_in,
)
from ligermodels.checkpoint.transfer import File, Stored
from ligermodels.checkpoint.weights import TensorInfo, plain_name
from ligermodels.errors import CheckpointError

if TYPE_CHECKING:
    from ligermodels.checkpoint.gguf.pair import PairReader
    from ligermodels.checkpoint.gguf.reader import GgufReader

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""{code in a safetensors header: dtype}."""


class SafetensorsFile:
    """One safetensors file, mapped. The safetensors library checks its header against the file's size.

    names: of its tensors, in file order. metadata: of its header.
    Raises CheckpointError for a file that is damaged or of another kind, HubError for one that cannot be read.
    """

    def __init__(self, path: Path, home: Path | None = None):
        check_file(path, home)
        self.path = path
        with read_errors(path), path.open("rb") as file:
            start = file.read(64)
            self._file = File(path, os.fstat(file.fileno()))
            try:
                self._opened = safe_open(path, framework="pt")
            except SafetensorError as error:
                kind = file_kind(start) or f"it is damaged or cut short; fetch it again. ({error})"
                raise CheckpointError(f"{path} is not a safetensors file: {kind}") from error
            file.seek(8)
            self._begin = 8 + int.from_bytes(start[:8], "little")
            self._header: dict[str, Any] = json.loads(file.read(self._begin - 8))
        self.names: list[str] = self._opened.offset_keys()
        self.metadata: dict[str, str] = self._opened.metadata() or {}

    def info(self, name: str) -> TensorInfo:
        """The dtype and shape of a tensor. Raises CheckpointError for a dtype that torch does not have."""
        stored = self._opened.get_slice(name)
        if stored.get_dtype() not in DTYPES:
            raise CheckpointError(f"{self.path}: {name} is quantised ({stored.get_dtype()})")
        return TensorInfo(DTYPES[stored.get_dtype()], tuple(stored.get_shape()))

    def locate(self, name: str) -> Stored:
        """The file and offset of the tensor."""
        info, (begin, end) = self.info(name), self._header[name]["data_offsets"]
        assert end - begin == info.nbytes, f"{self.path}: {name} at {begin} to {end}"
        return Stored(self._file, self._begin + begin, info.dtype, info.shape)

    def read(self, name: str) -> Tensor:
        """The tensor as a view of the mapped file. It must not be written to."""
        return self._opened.get_tensor(name)


class PickleFile:
    """One file of torch.save, mapped where that is possible, with the methods of `SafetensorsFile`."""

    def __init__(self, path: Path, home: Path | None = None):
        self._tensors = read_pickle(path, home)
        self.names = list(self._tensors)
        self.metadata: dict[str, str] = {}

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(self._tensors[name].dtype, tuple(self._tensors[name].shape))

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


def read_pickle(path: Path, home: Path | None = None) -> dict[str, Tensor]:
    """The tensors of a file of torch.save, unpickled without running code; `home` as in `check_file`.

    Raises CheckpointError for a file that is missing, damaged, or not a flat dictionary of plain tensors, HubError for
    one that cannot be read.
    """
    check_file(path, home)
    with read_errors(path), path.open("rb") as file:
        start = file.read(64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a file that is then refused
            # Only a zip file can be mapped; torch before 1.6 wrote none.
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # the file decides which error the unpickler meets
        foreign = file_kind(start) if start[:2] not in (b"PK", b"\x80\x02") else None
        kind = foreign or "it asks for more than tensors, or is damaged or cut short; do not trust it."
        raise CheckpointError(f"{path} cannot be read as a file of plain tensors: {kind}") from error
    if not isinstance(state, dict) or not all(isinstance(x, Tensor) and isinstance(n, str) for n, x in state.items()):
        raise CheckpointError(f"{path} is not a flat dictionary of tensors; a training checkpoint, perhaps")
    for name, tensor in state.items():
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise CheckpointError(f"{path}: {name} is sparse, quantised or empty; expected a plain tensor")
    return {name: tensor.detach() for name, tensor in state.items()}


class FolderReader:
    """The tensors of model.safetensors or pytorch_model.bin, or of the shards that its index names.

    A context manager and a `weights.Reader`. headers: {name: TensorInfo} in file order, without the prefixes of
    wrappers. metadata: of the first file. is_mapped: every tensor is mapped separately, so that writing to it leaves
    the others and the file unchanged. Tensors that an index does not name are ignored.
    Raises CheckpointError for an index or file that is missing, damaged or of another kind, and for a folder that is
    replaced at the same time; HubError for one that cannot be read.
    """

    single = PICKLES
    is_mapped = False  # the tensors of a pickle may share memory
    open_file: ClassVar[Any] = PickleFile

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.source = str(folder)
        self.headers: dict[str, TensorInfo] = {}
        self._stored: dict[str, tuple[Any, str]] = {}  # the file of a tensor, and its name there
        with unreplaced(self.folder):
            files, weight_map = weight_files(self.folder, self.single)
            opened_files = {file: self.open_file(self.folder / file, self.folder) for file in files}
        for file, opened in opened_files.items():
            for name in opened.names:
                if weight_map is not None and weight_map.get(name) != file:
                    continue
                plain = plain_name(name)
                if plain in self._stored:
                    both = f"{name} and {self._stored[plain][1]}"
                    raise CheckpointError(f"{self.folder / file} holds {both}, which are one name; keep the right one")
                self._stored[plain], self.headers[plain] = (opened, name), opened.info(name)
        for name, file in (weight_map or {}).items():
            if self._stored.get(plain_name(name)) != (opened_files[file], name):
                raise CheckpointError(f"{self.folder / file} lacks {name}, which its index names; fetch both again")
        self.metadata: dict[str, str] = opened_files[files[0]].metadata

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU, mapped from the file where that is possible. It must not be written to."""
        opened, stored = self._stored[name]
        return opened.read(stored)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stored.clear()


class SafetensorsReader(FolderReader):
    """The tensors of safetensors files."""

    single = SAFETENSORS
    is_mapped = os.name != "nt"  # Windows cannot rename or remove a mapped file
    open_file = SafetensorsFile

    def locate(self, name: str) -> Stored:
        """The file and offset of the tensor."""
        opened, stored = self._stored[name]
        return opened.locate(stored)


def open_checkpoint(folder: str | Path, *, allow_pickle: bool = False) -> "FolderReader | GgufReader | PairReader":
    """A reader of the weights in `folder`: safetensors, else a GGUF file or, if they are allowed, pickles.

    No config.json is needed. Raises the errors of `weights_in` and of the readers.
    """
    kind = weights_in(folder, allow_pickle=allow_pickle)
    if kind == GGUF:
        from ligermodels.checkpoint.gguf.folder import open_folder

        return open_folder(Path(folder))
    return SafetensorsReader(folder) if kind == SAFETENSORS else FolderReader(folder)
