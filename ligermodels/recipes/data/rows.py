"""Rows of training data from files, folders and data sets of the Hub, read one at a time.

JSON lines are read by their offsets in the file: a file may be larger than the memory, and the keys of one row do not
affect another. Lists of JSON, CSV and packed files are held in memory. Parquet, the splits of folders and the Hub go
through `datasets`. It gives all rows of a data set the same keys, with nulls where a row has none; these are removed
here. It does not read CSV here, because it makes numbers of columns of digits.
"""

import bisect
import codecs
import contextlib
import csv
import gzip
import hashlib
import io
import itertools
import json
import logging
import random
import re
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from reprlib import repr as short
from typing import Any

from ligermodels.checkpoint.files import file_kind, read_errors
from ligermodels.errors import InputError
from ligermodels.recipes.options import check_named

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt")
_UNDER_A_KEY = re.compile(rb'\s*\{\s*"(data|train)"\s*:\s*\[')
"""The beginning of a .json file that has its list of rows under a key."""
_AS_UTF8 = "save the file as UTF-8, such as by `iconv -f {} -t utf-8 FILE > NEW`"


class Row(dict[str, Any]):
    """A row. where: its file and line. folder: the start of relative paths in it; None on the Hub."""

    def __init__(self, values: Mapping[str, Any], where: str = "", folder: Path | None = None):
        super().__init__(values)
        self.where, self.folder = where, folder


class Rows:
    """Rows by index, of a list.

    place: the beginning of `where`, before the number of a row; lines: these numbers, if not 1, 2, 3.
    files: the files that are read; none for the Hub. An InputError in `items` is raised when its row is read.
    source: of the rows; those of a source that is opened twice have the same.
    """

    def __init__(
        self, items: Any, place: str, folder: Path | None, files: Sequence[Path] = (), lines: Sequence[int] = ()
    ) -> None:
        self._items, self._place, self._lines = items, place, lines
        self.folder, self.files = folder, files
        # A data set of several files, or none, knows its contents by a fingerprint.
        self.source = files[0].resolve() if len(files) == 1 else getattr(items, "_fingerprint", place)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Row:
        """The row. Raises InputError, without its place, for a row that cannot be read."""
        item = self._item(index)
        if isinstance(item, InputError):
            raise item
        if not isinstance(item, dict):
            raise InputError(f"a row is a JSON object with keys, not {type(item).__name__} ({short(item)})")
        return Row(item, self.where(index), self.folder)

    def _item(self, index: int) -> Any:
        return self._items[index]

    def where(self, index: int) -> str:
        """The file and line of a row, or the nearest to it that there is."""
        return f"{self._place}{self._lines[index] if self._lines else index + 1}"

    def origin(self, index: int) -> tuple["Rows", int]:
        """The rows of one source that have the row, and its index in them."""
        return self, index

    def contents(self) -> bytes:
        """A digest of the values of all rows, for those that no file holds."""
        hasher = hashlib.blake2b()
        for index in range(len(self)):
            hasher.update(json.dumps(self._item(index), ensure_ascii=True, default=_contents_of).encode() + b"\n")
        return hasher.digest()


def _contents_of(value: Any) -> Any:
    """What `json` writes of a value that it does not know, the same in each process: of bytes, images and arrays."""
    if isinstance(value, InputError):
        return str(value)
    data = value.tobytes() if hasattr(value, "tobytes") else value
    if isinstance(data, bytes | bytearray):
        return [type(value).__name__, hashlib.blake2b(data).hexdigest()]
    return [type(value).__name__, str(value)]


class JSONLines(Rows):
    """Rows of a file of JSON lines. Blank lines are no rows. data: the contents of a file that is packed."""

    def __init__(self, path: Path, data: bytes | None = None) -> None:
        self._data = data
        lines, offsets = array("q"), array("q")  # of each row; the last offset is the end of the file
        with self._open(path) as file:
            at = len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
            file.seek(at)
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    lines.append(number)
                    offsets.append(at)
                at += len(line)
        offsets.append(at)
        super().__init__(offsets, f"{path}:", path.parent, (path,), lines)

    def __len__(self) -> int:
        return len(self._lines)

    def _open(self, path: Path) -> Any:
        return path.open("rb") if self._data is None else io.BytesIO(self._data)

    def _item(self, index: int) -> Any:
        start, end = self._items[index], self._items[index + 1]
        # Opened for each row: threads and processes share no position.
        with read_errors(self.files[0]), self._open(self.files[0]) as file:
            file.seek(start)
            # Blank lines may follow the row; readline would read the same, but not notice a file that became shorter.
            return parse_json(file.read(end - start).rstrip())


class DataSet(Rows):
    """Rows of a data set of `datasets`, without nulls."""

    def _item(self, index: int) -> Any:
        return _without_nulls(super()._item(index))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


class JoinedRows(Rows):
    """Rows of several sources: all of them one after another, or those of `indices` in the order of all."""

    def __init__(self, parts: Sequence[Rows], indices: Sequence[int] | None = None) -> None:
        self._parts, self._ends = parts, list(itertools.accumulate(map(len, parts)))
        self._indices = range(self._ends[-1]) if indices is None else indices
        self.files = [file for part in parts for file in part.files]

    def __len__(self) -> int:
        return len(self._indices)

    def origin(self, index: int) -> tuple[Rows, int]:
        index = self._indices[index]
        at = bisect.bisect_right(self._ends, index)
        return self._parts[at].origin(index - (self._ends[at - 1] if at else 0))

    def __getitem__(self, index: int) -> Row:
        part, inner = self.origin(index)
        return part[inner]

    def where(self, index: int) -> str:
        part, inner = self.origin(index)
        return part.where(inner)


def open_sources(sources: Sequence[str], seed: int) -> Rows:
    """The rows of several sources. A weight after a source, FILE*1.5, takes all rows once, and half of them again."""
    parts, indices, start = [], list[int](), 0
    for number, source in enumerate(sources):
        match = re.fullmatch(r"(.+)\*(\d+\.?\d*|\.\d+)", source)
        name, weight = (match[1], float(match[2])) if match else (source, 1.0)
        rows = open_rows(name)
        whole, rest = divmod(round(weight * len(rows)), len(rows))
        if not whole and not rest:
            raise InputError(f"data={source}: a weight of {weight:g} leaves none of its {len(rows)} rows")
        repeated = random.Random(f"{seed} {number}").sample(range(len(rows)), rest)
        indices += [start + n for n in [*range(len(rows))] * whole + sorted(repeated)]
        parts.append(rows)
        start += len(rows)
    return JoinedRows(parts, indices)


def held_out(rows: Rows, share: float, seed: int) -> tuple[Rows, Rows]:
    """Rows to train on, and a share of them to evaluate on, drawn by the seed. Raises InputError.

    A row and its copies, of a weight or of a source that is given twice, are on one side, and count as one. Evaluation
    has each row once.
    """
    # Arrays in place of a dict of all rows, of which there may be millions.
    starts, is_seen = dict[Any, int](), bytearray()  # {source: number of its first row}; of each number
    numbers, firsts = array("q"), list[int]()  # of each row, which its copies share; the first row of each number
    for index in range(len(rows)):
        part, inner = rows.origin(index)
        if part.source not in starts:
            starts[part.source] = len(is_seen)
            is_seen.extend(bytes(len(part)))
        number = starts[part.source] + inner
        numbers.append(number)
        if not is_seen[number]:
            is_seen[number] = True
            firsts.append(index)
    size = round(share * len(firsts))
    if not 0 < size < len(firsts):
        raise InputError(f"eval_share={share:g} of {len(firsts)} rows leaves none to evaluate on, or none to train on")
    chosen = [firsts[n] for n in sorted(random.Random(seed).sample(range(len(firsts)), size))]
    evaluated = {numbers[index] for index in chosen}
    rest = [index for index, number in enumerate(numbers) if number not in evaluated]
    return JoinedRows([rows], rest), JoinedRows([rows], chosen)


def open_rows(source: str | Path) -> Rows:
    """The rows of a file, of a folder, or of a data set of the Hub, "owner/name".

    A split may follow: "folder:test", "owner/name:test"; a config of the Hub before it, "owner/name:config:test". The
    default is "train", or the only split. A folder has files, named by their splits if there are several (train.jsonl,
    test-00000.parquet), or is one that `datasets` saved (save_to_disk). Raises InputError, and HubError where the
    system refuses.
    """
    check_named(str(source), "data")
    with read_errors(source):
        return _open_rows(str(source))


def _open_rows(source: str) -> Rows:
    path, split = Path(source).expanduser(), None
    if not path.exists() and ":" in source and (folder := Path(source.rpartition(":")[0]).expanduser()).exists():
        path, split = folder, source.rpartition(":")[2]
    if path.is_file():
        if split is not None:
            raise InputError(f"{path} is one file and has no split {short(split)}; leave the split out")
        return _open_file(path)
    if source == "-" or (path.exists() and not path.is_dir()):
        raise InputError(f"{source} is a pipe or a device, and rows are read more than once: give a file")
    name, is_version = r"[\w-][\w.-]*", re.fullmatch(r"(\.\d+)?(:.*)?", path.suffix)
    if not path.is_dir() and not (is_version and re.fullmatch(rf"{name}(/{name})?(:{name}){{0,2}}", source)):
        raise InputError(f"there is no file or folder {source}. Next step: compare the path with `ls {path.parent}`")
    with _errors(source) as datasets:
        if not path.is_dir():
            repository, *config, split = source.split(":") if ":" in source else (source, None)
            data = datasets.load_dataset(repository, config[0] if config else None)
            return DataSet(split_of(data, split), f"{source}: row ", None)
        if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
            data = split_of(datasets.load_from_disk(str(path)), split)
            return DataSet(data, f"{path}: row ", path, sorted(path.rglob("*.arrow")))
        chosen = split_of(datasets.load_dataset_builder(str(path)).config.data_files, split)
    return JoinedRows([_open_file(Path(file)) for file in chosen])


def split_of(data_sets: Any, split: str | None) -> Any:
    """The split of one data set or of several by name. Raises InputError, which names those that there are."""
    if not isinstance(data_sets, Mapping):
        data_sets = {"train": data_sets}
    splits = {str(name): data for name, data in data_sets.items()}
    chosen = split or ("train" if len(splits) > 1 else next(iter(splits)))
    if chosen not in splits:
        raise InputError(f"there is no split {short(chosen)}; there are {', '.join(splits)}")
    return splits[chosen]


@contextlib.contextmanager
def _errors(name: str) -> Iterator[Any]:
    """Gives `datasets`; its errors become InputError, and are not logged beside it."""
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"{name} is read through the package `datasets`, which is not installed. Next step: "
            "pip install 'ligermodels[train]', or give a file of JSON lines (if this was to be one, compare its path)"
        ) from error
    before = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        yield datasets
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    except Exception as error:  # many kinds, of pyarrow, the Hub and `datasets`
        step = "\n  Next: check the network, or give a file; HF_HUB_OFFLINE=1 reads the cache alone, and at once"
        step = step if isinstance(error, ConnectionError) else ""
        wrong = InputError(f"{name} cannot be read: {type(error).__name__}: {error}{step}")
        if not (path := Path(name.partition(":")[0]).expanduser()).exists():
            wrong.add_note(f"  If a file or folder was meant: there is none at {path.absolute()}.")
        raise wrong from error
    finally:
        datasets.logging.set_verbosity(before)


# ---- one file ----


def _open_file(path: Path) -> Rows:
    is_packed = path.suffix.lower() == ".gz"
    suffix = Path(path.stem if is_packed else path.name).suffix.lower()
    if suffix not in SUFFIXES or (is_packed and suffix == ".parquet"):
        raise InputError(
            f"{path} has an unsupported extension: expected a name that ends in {', '.join(SUFFIXES)}, unpacked or .gz"
        )
    unpacked = _unpacked(path) if is_packed else None
    with path.open("rb") as file:
        head = file.read(2**16) if unpacked is None else unpacked[: 2**16]
    if not head:
        raise InputError(f"{path} is empty")
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InputError(f"{path} is not UTF-8; {_AS_UTF8.format('utf-16')}")
    if not head.startswith(b"PK") and (kind := file_kind(head[: 2**10])):
        raise InputError(f"{path} has no rows: {kind.removesuffix('.')}")
    start = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if suffix == ".parquet":
        with _errors(str(path)) as datasets:
            import pyarrow.parquet  # comes with datasets, whose error for a file without rows is unclear

            has_rows = pyarrow.parquet.read_metadata(path).num_rows > 0
            data = datasets.load_dataset("parquet", data_files=str(path), split="train") if has_rows else ()
        rows: Rows = DataSet(data, f"{path}: row ", path.parent, (path,))
    elif "json" in suffix and start[:1] != b"[" and not (suffix == ".json" and _UNDER_A_KEY.match(start)):
        rows = JSONLines(path, unpacked)
    else:
        try:
            rows = _parse(path, suffix, _text(path.read_bytes() if unpacked is None else unpacked))
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
    if not len(rows):
        raise InputError(f"{path} has no rows")
    return rows


def _parse(path: Path, suffix: str, text: str) -> Rows:
    """The rows of a file that is held in memory."""
    if suffix == ".txt":  # one row; `pretrain` makes as many examples of it as it takes
        return Rows([{"text": text}], f"{path}:", path.parent, (path,))
    if "json" in suffix:
        value = parse_json(text)
        rows_of = value if isinstance(value, list) else next(iter(value.values()))
        return Rows(rows_of, f"{path}: item ", path.parent, (path,))
    rows, lines = list[Any](), array("q")  # of a row, the line where it ends
    csv.field_size_limit(2**31 - 1)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter="\t" if suffix == ".tsv" else ",", strict=True)
    if len(names := reader.fieldnames or ()) == 1 and (other := re.search(r"[;\t]", names[0])):
        what = "a semicolon: save it with commas" if other[0] == ";" else "a tab: name it .tsv"
        raise InputError(f"its separator is {what}")
    try:
        for row in reader:
            wrong = None in row or None in row.values()  # more fields than the headers, or fewer
            rows.append(InputError("the row has more or fewer fields than the line of headers") if wrong else row)
            lines.append(reader.line_num)
    except csv.Error as error:
        raise InputError(f"not valid CSV at line {reader.line_num}: {error}") from error
    if not all(names) or len(set(names)) < len(names):
        raise InputError(f"the headers must be different names, not {short(names)}")
    return Rows(rows, f"{path}:", path.parent, (path,), lines)


def parse_json(data: bytes | str) -> Any:
    """The value of a text of JSON, as bytes in UTF-8. Raises InputError."""
    text = _text(data) if isinstance(data, bytes) else data
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # a ValueError of Python for an integer of over 4300 digits
        raise InputError(f"not valid JSON in UTF-8: {error}") from error


def _text(data: bytes) -> str:
    """The text of bytes in UTF-8, with or without a byte order mark. Raises InputError."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{error}; {_AS_UTF8.format('cp1252')}") from error


def _unpacked(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes())
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path} is not a whole gzip file: {error}") from error
