"""A GGUF file as a folder in Hugging Face's layout (`folder_of`), and the reader of such a folder (`open_folder`)."""

import functools
import tempfile
from pathlib import Path

from ligermodels.checkpoint.files import GGUF, MMPROJ, read_errors
from ligermodels.checkpoint.gguf.pair import PairReader
from ligermodels.checkpoint.gguf.reader import GgufReader


def folder_of(path: Path, mmproj: Path | None = None) -> Path:
    """A folder in Hugging Face's layout for a GGUF file: config.json, the tokenizer's files and links to the weights.

    mmproj: the file of its vision tower; the folder is then that of the model that reads images.
    It is temporary and made once in a process. Raises CheckpointError, ConfigError, HubError, TokenizerError.
    """
    paths, states = [path] if mmproj is None else [path, mmproj], []
    for i, file in enumerate(paths):
        with read_errors(file):
            paths[i] = file.resolve()
            stat = paths[i].stat()
        states.append((stat.st_mtime_ns, stat.st_size))
    return _folder_of(tuple(paths), tuple(states))


@functools.cache
def _folder_of(paths: tuple[Path, ...], states: tuple[tuple[int, int], ...]) -> Path:
    reader = _open(*paths)
    root = tempfile.TemporaryDirectory(prefix="ligermodels-gguf-")
    _roots.append(root)
    folder = Path(root.name) / paths[0].stem
    for name, content in reader.files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    for name, path in zip((GGUF, MMPROJ), paths, strict=False):
        (folder / name).symlink_to(path)
    return folder


_roots: list[tempfile.TemporaryDirectory[str]] = []
"""The folders of `folder_of`, which are deleted when the process ends."""


def files_in(folder: Path) -> list[Path]:
    """The GGUF file of a folder of `folder_of`, and its mmproj if there is one."""
    return [(folder / name).resolve() for name in (GGUF, MMPROJ) if (folder / name).exists()]


def open_folder(folder: Path) -> GgufReader | PairReader:
    """A reader of the weights of a folder of `folder_of`. Raises the errors of the readers."""
    return _open(*files_in(folder))


def _open(path: Path, mmproj: Path | None = None) -> GgufReader | PairReader:
    return GgufReader(path) if mmproj is None else PairReader(path, mmproj)
