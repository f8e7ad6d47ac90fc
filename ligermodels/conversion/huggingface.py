"""Hugging Face's layout: config.json and model.safetensors, whole or in shards, or pytorch_model.bin."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligermodels.checkpoint import reading
from ligermodels.checkpoint.weights import TensorInfo
from ligermodels.conversion import native
from ligermodels.conversion.source import Source
from ligermodels.errors import InputError

_CODES = {dtype: code for code, dtype in reading.DTYPES.items()}


class FolderSource(Source):
    """A folder with config.json and safetensors, or with pickles. What an earlier version packed is seen unpacked.

    config_folder: holds config.json and the tokenizer, where `folder` has a trainer's state dict alone.
    kind: what is unusual about it, "pickled" or "packed".
    Raises CheckpointError.
    """

    def __init__(self, folder: Path, config_folder: Path | None = None, *, allow_pickle: bool = False):
        self.folder, self.source = folder, str(folder)
        self._config_folder = config_folder or folder
        self._config = reading.read_json(self._config_folder / "config.json")
        opened = reading.open_checkpoint(folder, allow_pickle=allow_pickle)
        packed = native.is_native(opened.headers)
        self._reader = native.Unpacked(opened, self._config.get("model_type")) if packed else opened
        self.headers, self.places = self._reader.headers, self._reader.places
        self.kind = "packed" if packed else "pickled" if isinstance(opened, reading.PickleReader) else None

    def read(self, name: str) -> Tensor:
        return self._reader.read(name)

    def config(self) -> dict[str, Any]:
        return self._config

    def files(self) -> dict[str, bytes | Path]:
        return {
            **reading.companion_files(self._config_folder, self.folder),
            **reading.companion_files(self.folder),
            **config_files(self._config_folder, "original/tokenizer.model"),
        }


def config_files(folder: Path, *more: str) -> dict[str, Path]:
    """{name: path} of those of config.json, generation_config.json and `more` that are there."""
    names = ("config.json", "generation_config.json", *more)
    return {name: folder / name for name in names if (folder / name).is_file()}


class SafetensorsTarget:
    """`source` as model.safetensors, or as shards of at most `max_bytes` and their index.

    like: divides into the files that the source is divided into instead. shards: {file: its tensors}.
    Raises InputError for a source that is not divided between tensors.
    """

    def __init__(self, source: Source, max_bytes: int, *, like: bool = False):
        self._source, self.headers = source, source.headers
        shards = _like(source) if like else _by_size(source.headers, max_bytes)
        names = [f"model-{k:05}-of-{len(shards):05}.safetensors" for k in range(1, len(shards) + 1)]
        self.shards = dict(zip(names, shards, strict=True)) if len(shards) > 1 else {reading.SAFETENSORS: shards[0]}

    def files(self) -> dict[str, bytes | Path]:
        files = self._source.files()
        if len(self.shards) > 1:
            weight_map = {name: file for file, names in self.shards.items() for name in names}
            size = sum(info.nbytes for info in self.headers.values())
            index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
            files[f"{reading.SAFETENSORS}.index.json"] = reading.json_bytes(index)
        return files

    def write(self, folder: Path) -> None:
        for file, names in self.shards.items():
            self._write_shard(folder / file, names)

    def _write_shard(self, path: Path, names: Iterable[str]) -> None:
        """A safetensors file, its header first: the library's own writer holds all tensors of a file in memory."""
        names = sorted(names, key=lambda name: -self.headers[name].dtype.itemsize)  # each tensor is then aligned
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            info = self.headers[name]
            start, end = end, end + info.nbytes
            header[name] = {"dtype": _CODES[info.dtype], "shape": list(info.shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                file.write(self._bytes_of(name))

    def _bytes_of(self, name: str) -> memoryview:
        tensor = self._source.read(name)
        assert TensorInfo(tensor.dtype, tuple(tensor.shape)) == self.headers[name], f"{name} is not as planned"
        return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _like(source: Source) -> list[list[str]]:
    if source.places is None:
        raise InputError(f"--like: {source.source} is not divided by tensors; give --max-shard-size instead")
    files: dict[str, list[str]] = {}
    for name in source.headers:
        files.setdefault(source.places[name], []).append(name)
    return [files[file] for file in sorted(files)]


def _by_size(headers: Mapping[str, TensorInfo], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, info in headers.items():
        if shards[-1] and size + info.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += info.nbytes
    return shards
