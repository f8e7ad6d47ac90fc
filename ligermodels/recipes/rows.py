"""Rows of training data: JSON lines, JSON, CSV, Parquet and text files, folders of them, and data sets of the Hub.

A row is a dict. JSON lines are read one at a time by their offsets in the file: a file may be larger than the memory,
and the keys of one row do not affect another. `datasets`, through which Parquet and the Hub are read, gives all rows
the same keys, nested ones too, with nulls where a row has none; these nulls are removed here. Lists of JSON and CSV are
read without it, since it would guess types: a column of digits is to stay text.
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
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt")
COMPRESSED_SUFFIXES = (".gz", ".zst", ".xz", ".bz2", ".zip")
_BOM = b"\xef\xbb\xbf"


class Row(dict[str, Any]):
    """A row. where: its file and line. folder: the folder that relative paths in it start from; None on the Hub."""

    def __init__(self, values: Mapping[str, Any], where: str = "", folder: Path | None = None):
        super().__init__(values)
        self.where, self.folder = where, folder


class Rows(ABC):
    """Random access to rows: `len(rows)`, `rows[n]`, and `rows.where(n)`, the file and line of row n.

    files: the files that are read; none for data sets of the Hub.
    """

    files: Sequence[Path] = ()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Row:
        """The row. Raises InputError, without its place, for a row that cannot be read."""

    @abstractmethod
    def where(self, index: int) -> str:
        """ "file:line", or the nearest to it that there is."""


def open_rows(source: str | Path | Sequence[Path], split: str | None = None) -> Rows:
    """The rows of a file, a folder of files, a data set of the Hub, or several files one after another.

    source: a path, or a repository of the Hub, "owner/name"; a folder may be one that `datasets` saved (save_to_disk).
    split: the split of a data set, or of a folder whose files are named by splits (train.jsonl, test-00000.parquet);
    default "train" where there are several. It may also follow the source: "owner/name:test", "folder:test". For a data
    set of the Hub a config may come before it, "owner/name:config:test"; a single name is the config if there is one of
    that name.
    Raises InputError.
    """
    if not isinstance(source, str | Path):
        parts = [_open_file(path) for path in source]
        return parts[0] if len(parts) == 1 else Joined(parts)
    path = Path(source).expanduser()
    if not path.exists() and split is None and ":" in str(source):
        name, _, end = str(source).rpartition(":")
        if Path(name).expanduser().exists():
            path, split = Path(name).expanduser(), end
    if path.is_dir():
        if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
            datasets = _datasets(f"{path}, which `datasets` has saved,")
            return _load(lambda: _split_of(datasets.load_from_disk(str(path)), split), str(path), path)
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
    """The data files of a folder by name, or those of the split where files are named by splits."""
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file())
    if not found and (folder / "data").is_dir():  # as in repositories of the Hub
        return _files_of(folder / "data", split)
    if not found:
        raise InputError(f"{folder} has no data files: expected names that end in {', '.join(SUFFIXES)}")
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
    if suffix in COMPRESSED_SUFFIXES:
        raise InputError(f"{path} is compressed, which allows no random access. Next step: unpack it")
    if suffix not in SUFFIXES:
        raise InputError(f"{path} has an unsupported extension: expected a name that ends in {', '.join(SUFFIXES)}")
    if path.stat().st_size == 0:
        raise InputError(f"{path} is empty")
    with path.open("rb") as file:
        head = file.read(2**16)
    if not head.startswith(b"PK") and (kind := file_kind(head[: 2**10])):
        raise InputError(f"{path} has no rows: {kind.removesuffix('.')}")
    if suffix == ".parquet":
        datasets = _datasets(f"{path}")
        return _load(lambda: _load_parquet(datasets, path), str(path), path.parent, [path])
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(f"{path} is UTF-16 or UTF-32. Next step: save it as UTF-8")
    if suffix == ".txt":  # one text, of which `pretrain` makes as many rows as it takes
        rows: Rows = _read_text(path)
    elif suffix in (".csv", ".tsv"):
        rows = _read_csv(path)
    elif head.removeprefix(_BOM).lstrip()[:1] == b"[":
        rows = _read_list(path)
    elif re.match(rb"(\xef\xbb\xbf)?\s*\{[ \t\r]*\n", head):
        raise InputError(
            f"{path} has its first object over several lines, and each line must be a whole one. Likely cause: JSON "
            f"that was formatted to be read. Next step: `jq -c . {path}` writes one object per line"
        )
    else:
        rows = _Lines(path)
    if not len(rows):
        raise InputError(f"{path} has no rows")
    return rows


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

    def __getitem__(self, index: int) -> Row:
        start = self._offsets[_within(index, len(self))]
        with self._path.open("rb") as file:  # opened for each row: files and threads share no handle and no position
            file.seek(start)
            # Blank lines may follow the row; readline would read the same, but not notice a file that became shorter.
            text = _decode(file.read(self._offsets[index + 1] - start).rstrip())
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            cut = "; the line ends in the middle of a value" if error.pos >= len(text) else ""
            raise InputError(f"not valid JSON at column {error.colno}: {error.msg}{cut}") from error
        except (ValueError, RecursionError) as error:
            raise InputError(f"not valid JSON: {error}") from error
        return Row(_checked(row), self.where(index), self._path.parent)

    def where(self, index: int) -> str:
        return f"{self._path}:{index + 1 + bisect.bisect_right(self._blank, index)}"


class _Loaded(Rows):
    """Rows in memory, or a data set of `datasets`. An InputError in the place of a row is raised when it is read.

    place: the beginning of `where`, which a number follows: that of `numbers`, or from 1 on. has_schema: all rows have
    the same keys, with nulls where a row has none.
    """

    def __init__(
        self, items: Any, place: str, folder: Path | None, files: Sequence[Path] = (), *,
        numbers: Sequence[int] | None = None, has_schema: bool = False,
    ) -> None:  # fmt: skip
        self._items, self._place, self._folder, self.files = items, place, folder, files
        self._numbers, self._has_schema = numbers, has_schema

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Row:
        item = self._items[_within(index, len(self))]
        if isinstance(item, InputError):
            raise item
        item = _checked(item)
        return Row(_without_nulls(item) if self._has_schema else item, self.where(index), self._folder)

    def where(self, index: int) -> str:
        return f"{self._place}{index + 1 if self._numbers is None else self._numbers[index]}"


def _read_text(path: Path) -> Rows:
    """A file with one text."""
    try:
        text = _decode(path.read_bytes().removeprefix(_BOM))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    return _Loaded([{"text": text}], f"{path}:", path.parent, (path,))


def _read_list(path: Path) -> Rows:
    """A file with one JSON list."""
    try:
        rows = json.loads(_decode(path.read_bytes().removeprefix(_BOM)))
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path}:{error.lineno}: not a valid JSON list, at column {error.colno}: {error.msg}. It begins with "
            "'['; rows of JSON lines begin with '{'"
        ) from error
    except (ValueError, RecursionError, InputError) as error:
        text = error if isinstance(error, InputError) else f"not valid JSON: {error}"
        raise InputError(f"{path}: {text}") from error
    return _Loaded(rows, f"{path}: item ", path.parent, (path,))


def _read_csv(path: Path) -> Rows:
    """A file of comma- or tab-separated values with a line of headers."""
    rows: list[Any] = []
    lines = array("q")
    limit = csv.field_size_limit(2**31 - 1)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
            headers = next(reader, [])
            line = reader.line_num
            for fields in reader:
                if fields:
                    wrong = InputError(f"the row has {len(fields)} fields, the line of headers {len(headers)}")
                    rows.append(dict(zip(headers, fields)) if len(fields) == len(headers) else wrong)  # noqa: B905
                    lines.append(line + 1)
                line = reader.line_num
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 ({error.reason}). Next step: save it as UTF-8") from error
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num}: not valid CSV: {error}") from error
    finally:
        csv.field_size_limit(limit)
    if not all(headers) or len(set(headers)) < len(headers):
        raise InputError(f"{path}:1: the headers must be different names, not {short(headers)}")
    return _Loaded(rows, f"{path}:", path.parent, (path,), numbers=lines)


class Joined(Rows):
    """Rows of several sources: all of them one after another, or those of `indices` in the order of all."""

    def __init__(self, parts: Sequence[Rows], indices: Sequence[int] | None = None) -> None:
        self._parts, self._indices = parts, indices
        self.files = [file for part in parts for file in part.files]
        self._ends = list(itertools.accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._indices is None else len(self._indices)

    def _part(self, index: int) -> tuple[Rows, int]:
        index = _within(index, len(self)) if self._indices is None else self._indices[index]
        at = bisect.bisect_right(self._ends, index)
        return self._parts[at], index - (self._ends[at - 1] if at else 0)

    def __getitem__(self, index: int) -> Row:
        part, inner = self._part(index)
        return part[inner]  # type: ignore[return-value]

    def where(self, index: int) -> str:
        part, inner = self._part(index)
        return part.where(inner)


def _within(index: int, size: int) -> int:
    if not 0 <= index < size:
        raise IndexError(f"row {index} of {size}")
    return index


def _checked(row: Any) -> dict[str, Any]:
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


# ---- the package `datasets` ----


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _load(load: Callable[[], Any], name: str, folder: Path | None = None, files: Sequence[Path] = ()) -> Rows:
    """The rows of a data set. Raises InputError."""
    try:
        data = load()
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    except Exception as error:  # many kinds, of pyarrow, the Hub and `datasets`
        raise InputError(f"{name} cannot be read: {type(error).__name__}: {error}") from error
    if not len(data):
        raise InputError(f"{name} has no rows")
    return _Loaded(data, f"{name}: row ", folder, files, has_schema=True)


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
    """Without the log of `datasets`, which would repeat its error."""
    before = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        return datasets.load_dataset("parquet", data_files=str(path), split="train")
    finally:
        datasets.logging.set_verbosity(before)


def _open_hub(name: str, split: str | None) -> Rows:
    datasets = _datasets(f"{name}, which is no file here and so a data set of the Hub,")
    repository, *parts = name.split(":")

    def load() -> Any:
        config, chosen = (*parts, None, None)[:2]
        if len(parts) == 1 and split is None:
            try:
                datasets.load_dataset_builder(repository, config)
            except ValueError:  # it has no config of this name
                config, chosen = None, config
        return _split_of(datasets.load_dataset(repository, config), split or chosen)

    return _load(load, name)


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
