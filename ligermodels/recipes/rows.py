"""Rows of training data: JSON lines, JSON, CSV and Parquet files, folders of them, and data sets of the Hub.

A row is a dict. JSON lines are read one at a time by their offsets in the file: a file may be larger than the memory,
and the keys of one row say nothing about another. `datasets`, through which Parquet and the Hub are read, gives all
rows the same keys, nested ones too, with nulls where a row has none; here these nulls are left out again.
"""

import bisect
import csv
import itertools
import json
import logging
import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from reprlib import repr as short
from typing import Any

from ligermodels.checkpoint.files import file_kind
from ligermodels.errors import InputError

SPLITS = ("train", "training", "valid", "validation", "val", "dev", "eval", "evaluation", "test")
_JSON, _CSV, _PARQUET = (".jsonl", ".ndjson", ".json"), (".csv", ".tsv"), (".parquet",)
_SUFFIXES = (*_JSON, *_CSV, *_PARQUET)
_PACKED = (".gz", ".zst", ".xz", ".bz2", ".zip")
_BOM = b"\xef\xbb\xbf"


class Row(dict[str, Any]):
    """A row. folder: what relative paths in it are relative to; None for rows of the Hub."""

    def __init__(self, values: Mapping[str, Any], folder: Path | None):
        super().__init__(values)
        self.folder = folder


class Rows(ABC):
    """Random access to rows: `len(rows)`, `rows[n]`, and `rows.where(n)`, which names row n for messages.

    files: that they are read from; none of the Hub's.
    """

    files: Sequence[Path] = ()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> dict[str, Any]:
        """The row as a dict. Raises InputError, without `where`, for one that cannot be read."""

    @abstractmethod
    def where(self, index: int) -> str:
        """ "file:line", or the nearest to it that there is."""


def open_rows(source: str | Path | Sequence[str | Path], split: str | None = None) -> Rows:
    """The rows of a file, a folder of files, a data set of the Hub, or several of them one after another.

    source: a path, or a repository of the Hub, "owner/name"; a folder may be what `datasets` has saved (save_to_disk).
    split: which split of a data set, or of a folder whose files are named by splits (train.jsonl, test-00000.parquet);
    default "train" where there are several. It may also follow the source: "owner/name:test", "folder:test". Of a data
    set of the Hub a config may come before it, "owner/name:config:test"; a single word is its config if it has one of
    that name.
    Raises InputError.
    """
    if not isinstance(source, str | Path):
        if not source:
            raise InputError("no data was given: expected a file, a folder or a data set of the Hub")
        parts = [open_rows(part, split) for part in source]
        return parts[0] if len(parts) == 1 else _Joined(parts)
    path = Path(source).expanduser()
    if not path.exists() and split is None and ":" in str(source):
        name, _, end = str(source).rpartition(":")
        if Path(name).expanduser().exists():
            path, split = Path(name).expanduser(), end
    if path.is_dir():
        if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
            datasets = _datasets(f"{path}, which `datasets` has saved,")
            return _Columns(lambda: _split_of(datasets.load_from_disk(str(path)), split), str(path), path)
        return open_rows(_files_of(path, split))
    if path.is_file():
        if split not in (None, "train"):
            raise InputError(f"{path} is one file and has no split {short(split)}; leave the split out")
        return _open_file(path)
    name = r"[\w-][\w.-]*"
    is_version = re.fullmatch(r"(\.\d+)?(:.*)?", path.suffix)
    if isinstance(source, str) and is_version and re.fullmatch(rf"{name}(/{name})?(:{name}){{0,2}}", source):
        return _open_hub(source, split)
    raise InputError(f"there is no file or folder {source}. Next step: compare the path with `ls {path.parent}`")


def _files_of(folder: Path, split: str | None) -> list[Path]:
    """The data files of a folder by name: those of the split if the names tell splits."""
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES and path.is_file())
    if not found and (folder / "data").is_dir():  # as in repositories of the Hub
        return _files_of(folder / "data", split)
    if not found:
        raise InputError(f"{folder} has no data files: expected names that end in {', '.join(_SUFFIXES)}")
    split_of = {path: re.split(r"[-.]", path.name.lower())[0] for path in found}
    named = sorted({name for name in split_of.values() if name in SPLITS})
    if not named and split is None:
        return found
    if rest := sorted(path.name for path, name in split_of.items() if named and name not in SPLITS):
        raise InputError(
            f"{folder} has files of the splits {named} and others beside them ({short(rest)}): it is not clear what to "
            "train on. Next step: give the files"
        )
    chosen = [path for path, name in split_of.items() if name == (split or "train")]
    if not chosen:
        raise InputError(f"{folder} has no files of the split {short(split or 'train')}; its splits are {named}")
    return chosen


def _open_file(path: Path) -> Rows:
    suffix = path.suffix.lower()
    if suffix in _PACKED:
        raise InputError(f"{path} is compressed, which allows no random access. Next step: unpack it")
    if suffix not in _SUFFIXES:
        raise InputError(f"{path} has an unsupported extension: expected a name that ends in {', '.join(_SUFFIXES)}")
    if path.stat().st_size == 0:
        raise InputError(f"{path} is empty")
    with path.open("rb") as file:
        head = file.read(2**10)
    if not head.startswith(b"PK") and (kind := file_kind(head)):
        raise InputError(f"{path} has no rows: {kind.removesuffix('.')}")
    if suffix in _PARQUET:
        datasets = _datasets(f"{path}")
        return _Columns(lambda: _load_parquet(datasets, path), str(path), path.parent, (path,))
    if suffix in _JSON and re.match(rb"(\xef\xbb\xbf)?\s*\{[ \t\r]*\n", head):
        raise InputError(
            f"{path} has its first object over several lines, and each line is to hold a whole one. Likely cause: JSON "
            f"that was written to be read. Next step: `jq -c . {path}` writes an object into a line"
        )
    if suffix in _CSV:
        rows: Rows = _Csv(path)
    else:
        rows = _List(path) if _begins_with(path) == b"[" else _Lines(path)
    if not len(rows):
        raise InputError(f"{path} has no rows")
    return rows


def _begins_with(path: Path) -> bytes:
    """The first byte that is no white space, after a byte order mark. Raises InputError for UTF-16 and UTF-32."""
    with path.open("rb") as file:
        head = file.read(2**16)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(f"{path} is UTF-16 or UTF-32. Next step: save it as UTF-8")
    return head.removeprefix(_BOM).lstrip()[:1]


def _parse(data: bytes) -> dict[str, Any]:
    """A JSON object of UTF-8 bytes. Raises InputError."""
    text = _decode(data)
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        cut = "; the line ends in the middle of a value" if error.pos >= len(text.rstrip()) else ""
        raise InputError(f"not valid JSON at column {error.colno}: {error.msg}{cut}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise InputError(f"a row is a JSON object with keys, not {type(row).__name__} ({short(row)})")
    return row


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"not UTF-8: 0x{data[error.start]:02x} is its byte {error.start + 1}. Likely cause: the file was saved "
            "as Latin-1 or Windows-1252"
        ) from error


class _Lines(Rows):
    """A file of JSON lines. Blank lines are no rows."""

    def __init__(self, path: Path) -> None:
        self._path, self.files = path, (path,)
        self._offsets = array("q")  # where row n begins; the last one is the end of the file
        self._blank = array("q")  # for each blank line, the number of rows before it
        with path.open("rb") as file:
            at = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
            file.seek(at)
            for line in file:
                if line.isspace():
                    self._blank.append(len(self._offsets))
                else:
                    self._offsets.append(at)
                at += len(line)
        self._offsets.append(at)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        start = self._offsets[_within(index, len(self))]
        with self._path.open("rb") as file:  # opened anew: many files and threads share no handle and no position
            file.seek(start)
            # Blank lines may follow the row; readline would read the same, but not notice a file that became shorter.
            data = file.read(self._offsets[index + 1] - start)
        return Row(_parse(data.rstrip()), self._path.parent)

    def where(self, index: int) -> str:
        return f"{self._path}:{index + 1 + bisect.bisect_right(self._blank, index)}"


class _List(Rows):
    """A file with one JSON list."""

    def __init__(self, path: Path) -> None:
        self._path, self.files = path, (path,)
        try:
            text = _decode(path.read_bytes().removeprefix(_BOM))
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
        try:
            self._rows = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(
                f"{path}:{error.lineno}: not a valid JSON list, at column {error.colno}: {error.msg}. It begins with "
                "'['; rows of JSON lines begin with '{'"
            ) from error
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: not valid JSON: {error}") from error

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._rows[_within(index, len(self))]
        if not isinstance(row, dict):
            raise InputError(f"a row is a JSON object with keys, not {type(row).__name__} ({short(row)})")
        return Row(row, self._path.parent)

    def where(self, index: int) -> str:
        return f"{self._path}: item {index + 1}"


class _Csv(Rows):
    """A file of comma- or tab-separated values with a line of headers; it is held in memory."""

    def __init__(self, path: Path) -> None:
        self._path, self.files = path, (path,)
        self._rows: list[list[str]] = []
        self._lines = array("q")
        limit = csv.field_size_limit(2**31 - 1)
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                reader = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
                self._headers = next(reader, [])
                line = reader.line_num
                for fields in reader:
                    if fields:
                        self._rows.append(fields)
                        self._lines.append(line + 1)
                    line = reader.line_num
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: not UTF-8 ({error.reason}). Next step: save it as UTF-8") from error
        except csv.Error as error:
            raise InputError(f"{path}:{reader.line_num}: not valid CSV: {error}") from error
        finally:
            csv.field_size_limit(limit)
        if not all(self._headers) or len(set(self._headers)) < len(self._headers):
            raise InputError(f"{path}:1: the headers must be different names, not {short(self._headers)}")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        fields = self._rows[_within(index, len(self))]
        if len(fields) != len(self._headers):
            raise InputError(f"the row has {len(fields)} fields, the line of headers {len(self._headers)}")
        return Row(dict(zip(self._headers, fields, strict=True)), self._path.parent)

    def where(self, index: int) -> str:
        return f"{self._path}:{self._lines[index]}"


class _Columns(Rows):
    """What `datasets` loads. folder: what relative paths of images are relative to."""

    def __init__(
        self, load: Callable[[], Any], name: str, folder: Path | None = None, files: Sequence[Path] = ()
    ) -> None:
        self._name, self._folder, self.files = name, folder, files
        try:
            self._data = load()
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
        except Exception as error:  # many kinds, of pyarrow, the Hub and `datasets`
            raise InputError(f"{name} cannot be read: {type(error).__name__}: {error}") from error
        if not len(self._data):
            raise InputError(f"{name} has no rows")

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return Row(_without_nulls(self._data[_within(index, len(self))]), self._folder)

    def where(self, index: int) -> str:
        return f"{self._name}: row {index + 1}"


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _datasets(what: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"{what} is read through the package `datasets`, which is not installed. Next step: "
            "pip install 'ligermodels[train]', or give a file of JSON lines"
        ) from error
    return datasets


def _load_parquet(datasets: Any, path: Path) -> Any:
    """Without the log of `datasets`, which would tell its error a second time."""
    before = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        return datasets.load_dataset("parquet", data_files=str(path), split="train")
    finally:
        datasets.logging.set_verbosity(before)


def _open_hub(name: str, split: str | None) -> Rows:
    datasets = _datasets(f"{name}, which is no file here and so a data set of the Hub,")
    repository, *words = name.split(":")

    def load() -> Any:
        config, chosen = (*words, None, None)[:2]
        if len(words) == 1 and split is None:
            try:
                datasets.load_dataset_builder(repository, config)
            except ValueError:  # it has no config of this name
                config, chosen = None, config
        return _split_of(datasets.load_dataset(repository, config), split or chosen)

    return _Columns(load, name)


def _split_of(found: Any, split: str | None) -> Any:
    """A data set, or the split of several. Raises InputError, which names those that there are."""
    if not isinstance(found, Mapping):
        if split not in (None, "train"):
            raise InputError(f"there is no split {short(split)}: it was saved as one; leave the split out")
        return found
    chosen = split or ("train" if len(found) > 1 else next(iter(found)))
    if chosen not in found:
        raise InputError(f"there is no split {short(chosen)}; there are {', '.join(found)}")
    return found[chosen]


class _Joined(Rows):
    """Rows of several sources, one after another."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self.files = [file for part in parts for file in part.files]
        self._ends = list(itertools.accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def _part(self, index: int) -> tuple[Rows, int]:
        at = bisect.bisect_right(self._ends, _within(index, len(self)))
        return self._parts[at], index - (self._ends[at - 1] if at else 0)

    def __getitem__(self, index: int) -> dict[str, Any]:
        part, inner = self._part(index)
        return part[inner]

    def where(self, index: int) -> str:
        part, inner = self._part(index)
        return part.where(inner)


class Part(Rows):
    """Some of the rows."""

    def __init__(self, rows: Rows, indices: Sequence[int]):
        self._rows, self._indices, self.files = rows, indices, rows.files

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[self._indices[index]]

    def where(self, index: int) -> str:
        return self._rows.where(self._indices[index])


def _within(index: int, size: int) -> int:
    if not 0 <= index < size:
        raise IndexError(f"row {index} of {size}")
    return index
