"""Hugging Face's layout: config.json and model.safetensors, whole or in shards, or pytorch_model.bin; also GGUF."""

from pathlib import Path
from typing import Any

from torch import Tensor

from ligermodels.checkpoint import reading, saving
from ligermodels.checkpoint.files import companion_files, read_json
from ligermodels.checkpoint.gguf import GgufReader
from ligermodels.conversion.source import Source
from ligermodels.errors import InputError


class FolderSource(Source):
    """A folder with config.json and safetensors, or with pickles; or that of a GGUF file (`checkpoint.gguf`).

    config_folder: holds config.json and the tokenizer, where `folder` has a trainer's state dict alone.
    is_pickled: whether the weights are pickles. types: {tensor: how a GGUF file stores it}, {} for other files.
    Raises CheckpointError.
    """

    def __init__(self, folder: Path, config_folder: Path | None = None, *, allow_pickle: bool = False):
        self.folder = folder
        self._config_folder = config_folder or folder
        self._config = read_json(self._config_folder / "config.json")
        self._reader = reading.open_checkpoint(folder, allow_pickle=allow_pickle)
        self.source, self.headers, self.places = self._reader.source, self._reader.headers, self._reader.places
        self.is_pickled = isinstance(self._reader, reading.PickleReader)
        self.types = self._reader.types if isinstance(self._reader, GgufReader) else {}

    def read(self, name: str) -> Tensor:
        return self._reader.read(name)

    def config(self) -> dict[str, Any]:
        return self._config

    def files(self) -> dict[str, bytes | Path]:
        return {
            **companion_files(self._config_folder, self.folder),
            **companion_files(self.folder),
            **config_files(self._config_folder, "original/tokenizer.model"),
        }


def config_files(folder: Path, *more: str) -> dict[str, Path]:
    """{name: path} of those of config.json, generation_config.json and `more` that are there."""
    names = ("config.json", "generation_config.json", *more)
    return {name: folder / name for name in names if (folder / name).is_file()}


class SafetensorsTarget:
    """`source` as model.safetensors, or as shards of at most `max_bytes` and their index.

    like: divides into the files that the source is divided into instead. shards: the tensors of each file.
    Raises InputError for a source that is not divided between tensors.
    """

    def __init__(self, source: Source, max_bytes: int, *, like: bool = False):
        self._source, self.headers = source, source.headers
        self.shards = _like(source) if like else saving.split_into_shards(source.headers, max_bytes)

    def files(self) -> dict[str, bytes | Path]:
        return self._source.files()

    def write(self, folder: Path) -> None:
        tensors = (self._source.read(name) for names in self.shards for name in names)
        saving.write_shards(folder, self.headers, tensors, self.shards)


def _like(source: Source) -> list[list[str]]:
    if source.places is None:
        raise InputError(f"--like: {source.source} is not divided by tensors; give --max-shard-size instead")
    files: dict[str, list[str]] = {}
    for name in source.headers:
        files.setdefault(source.places[name], []).append(name)
    return [saving.align(source.headers, files[file]) for file in sorted(files)]
