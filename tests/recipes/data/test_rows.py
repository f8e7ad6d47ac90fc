"""Rows of files: random access equals reading from the beginning, and messages name the line."""

import errno
import gzip
import json
import os
import re
import sys
from pathlib import Path

import pytest

from ligermodels.errors import HubError, InputError
from ligermodels.recipes.data.rows import open_rows

ROWS = [{"text": "one"}, {"text": "zwei \u2028 größer"}, {"other": {"deep": [1, None]}}, {"text": "\n\r\x85"}]
GOOD = b'{"a": 1}\n'


def read(rows):
    return [rows[n] for n in range(len(rows))]


def test_lines_in_any_order(write):
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    text = f"\ufeff\r\n{lines[0]}\r\n \t\n\n{lines[1]}\n  {lines[2]}  \n\n{lines[3]}"
    path = write("a.jsonl", text)
    rows = open_rows(path)
    assert [rows[n] for n in (3, 0, 2, 1, 3)] == [ROWS[n] for n in (3, 0, 2, 1, 3)] and len(rows) == 4
    assert [rows.where(n) for n in range(4)] == [f"{path}:{line}" for line in (2, 5, 6, 8)]
    with pytest.raises(IndexError):
        rows[4]


FILES = {  # name: content, rows, the numbers of the rows
    "a.jsonl": ('{"a": {"x": 1}}\n{"a": {"y": 2}}\n{"b": []}', [{"a": {"x": 1}}, {"a": {"y": 2}}, {"b": []}], "123"),
    "b.jsonl": ("\ufeff " + json.dumps(ROWS, indent=2), ROWS, ["item 1", "item 2", "item 3", "item 4"]),
    "c.json": (json.dumps(ROWS[0]), ROWS[:1], "1"),
    "a.csv": ('\ufeffa,b\r\n"a\nb","c, d"\r\n\r\n007,\r\n', [{"a": "a\nb", "b": "c, d"}, {"a": "007", "b": ""}], "35"),
    "a.tsv": ("a\tb\nc,\t" + "x" * 200_000, [{"a": "c,", "b": "x" * 200_000}], "2"),
    "d.json": (json.dumps({"train": ROWS, "test": [1]}), ROWS, ["item 1", "item 2", "item 3", "item 4"]),
    "e.jsonl.gz": (gzip.compress(b'\xef\xbb\xbf{"a": 1}\n\n{"a": 2}\n'), [{"a": 1}, {"a": 2}], "13"),
    "e.csv.gz": (gzip.compress(b"a\n1\n"), [{"a": "1"}], "2"),
    "a.txt": ("\ufeffone\r\n\ntwo", [{"text": "one\r\n\ntwo"}], "1"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_kinds_of_files(write, name):
    content, expected, numbers = FILES[name]
    path = write(name, content)
    rows = open_rows(path)
    assert read(rows) == expected
    assert [re.sub(r".*?: ?", "", rows.where(n)) for n in range(len(rows))] == [*numbers]
    assert rows.where(0).startswith(f"{path}:") and rows[0].folder == path.parent and rows.files == (path,)


WRONG_FILES = [
    ("a.jsonl", b"", "is empty"),
    ("a.jsonl", b"\n \n\r\n", "has no rows"),
    ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid 0", "has no rows: it is a git-lfs pointer; run"),
    ("a.json", b'[{"a": 1},\n {"b" 2}]', "a.json: not valid JSON .* line 2 column 7"),
    ("a.json", b"[" + b"1" * 4301 + b"]", "a.json: not valid JSON .*4300 digits"),
    ("a.csv", b'a\n"x\n', "a.csv: not valid CSV at line 1: unexpected end"),
    ("a.csv", b"a\n\xe9\n", "a.csv: .*codec can't decode"),
    ("a.csv", b"text,text\na,b\n", "a.csv: the headers must be different names"),
    ("a.csv", b"a;b\n1;2\n", "a.csv: its separator is a semicolon: save it with commas"),
    ("a.csv", b"a\tb\n1\t2\n", r"its separator is a tab: name it \.tsv"),
    ("a.jsonl", '{"a": 1}'.encode("utf-16"), "is not UTF-8; save the file as UTF-8, such as by `iconv -f utf-16"),
    ("a.jsonl.zst", b"x", r"unsupported extension: expected a name that ends in \.jsonl"),
    ("a.jsonl.gz", b"x", "is not a whole gzip file"),
    ("a.jsonl.gz", gzip.compress(GOOD, mtime=0)[:-9], "is not a whole gzip file"),
]


@pytest.mark.parametrize(("name", "content", "message"), WRONG_FILES)
def test_files_that_cannot_be_opened(write, name, content, message):
    with pytest.raises(InputError, match=message):
        open_rows(write(name, content))


def test_what_is_no_file_that_can_be_read(tmp_path, monkeypatch):
    """Also for users who may read all: a mock refuses in place of the system."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    for source in ("-", tmp_path / "pipe.jsonl", "/dev/null"):
        with pytest.raises(InputError, match="is a pipe or a device, and rows are read more than once: give a file"):
            open_rows(source)
    with pytest.raises(HubError, match=r"aaa\.jsonl cannot be read: File name too long"):
        open_rows("a" * 300 + ".jsonl")

    def refuse(path, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    (tmp_path / "a.jsonl").write_bytes(GOOD)
    rows = open_rows(tmp_path / "a.jsonl")
    monkeypatch.setattr(Path, "open", refuse)
    for read in (lambda: open_rows(tmp_path / "a.jsonl"), lambda: rows[0]):
        with pytest.raises(HubError, match=r"a\.jsonl cannot be read: Permission denied"):
            read()


WRONG_ROWS = [
    (
        b'{"a": "\xe9"}',
        "codec can't decode byte 0xe9 in position 7.*save the file as UTF-8, such as by `iconv -f cp1252",
    ),
    (b'{"a": "x', "Unterminated string"),
    (b'{"a": 1} {"a": 2}', "Extra data: line 1 column 10"),
    (b'"text"', "a row is a JSON object with keys, not str"),
    (b'{"a":' * 100_000, "not valid JSON"),
    (b'{"a": ' + b"1" * 4301 + b"}", r"not valid JSON .*4300 digits"),
]


@pytest.mark.parametrize(("line", "message"), WRONG_ROWS)
def test_rows_that_cannot_be_read(write, line, message):
    rows = open_rows(write("a.jsonl", GOOD + line + b"\n" + GOOD))
    assert rows[0] == rows[2] == {"a": 1}
    with pytest.raises(InputError, match=message):
        rows[1]


def test_a_row_of_csv_with_more_or_fewer_fields(write):
    rows = open_rows(write("a.csv", "a,b\n1,2\n3\n1,2,3\n"))
    assert rows[0] == {"a": "1", "b": "2"}
    for n in (1, 2):
        with pytest.raises(InputError, match="more or fewer fields than the line of headers"):
            rows[n]


# ---- the package `datasets` ----


@pytest.fixture
def splits(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    made = {name: datasets.Dataset.from_list([{"text": f"{name} {n}"} for n in range(3)]) for name in ("test", "train")}
    return datasets.DatasetDict(made)


def texts(source):
    rows = open_rows(source)
    assert len(rows) == 3
    return [rows[n]["text"] for n in (2, 0)]


def test_parquet_without_the_nulls_that_its_schema_adds(splits, tmp_path):
    rows = [{"call": {"name": "f", "a": 1}, "text": "x"}, {"call": {"name": "g", "b": [{"c": 2}, {"d": 3}]}}]
    type(splits["test"]).from_list(rows).to_parquet(tmp_path / "a.parquet")
    found = open_rows(tmp_path / "a.parquet")
    assert read(found) == rows and found.where(1).endswith("a.parquet: row 2")
    type(splits["test"]).from_dict({"text": []}).to_parquet(tmp_path / "none.parquet")
    with pytest.raises(InputError, match=r"none\.parquet has no rows"):
        open_rows(tmp_path / "none.parquet")


def test_folders(splits, write, tmp_path):
    first, second = write("f/b.jsonl", [{"n": 0}, {"n": 1}]), write("f/c.json", '[{"n": 2}]')
    write("f/README.md", "not data")
    rows = open_rows(tmp_path / "f")
    assert [row["n"] for row in read(rows)] == [0, 1, 2]
    assert [rows.where(n) for n in range(3)] == [f"{first}:1", f"{first}:2", f"{second}: item 1"]
    for name, part in splits.items():  # as the Hub has them
        for n in range(2):
            (tmp_path / "set" / "data").mkdir(parents=True, exist_ok=True)
            part.shard(2, n).to_parquet(tmp_path / "set" / "data" / f"{name}-0000{n}-of-00002.parquet")
    splits.save_to_disk(tmp_path / "all")
    splits["test"].save_to_disk(tmp_path / "one")
    found = {"set": "train", "set:test": "test", "all": "train", "all:test": "test", "one": "test", "one:train": "test"}
    for source, split in found.items():
        assert texts(f"{tmp_path}/{source}") == [f"{split} 2", f"{split} 0"]
    assert open_rows(tmp_path / "all").where(1) == f"{tmp_path}/all: row 2"
    assert [path.suffix for path in open_rows(tmp_path / "one").files] == [".arrow"]


def test_sources_that_are_not_there(splits, write, tmp_path):
    write("a.jsonl", GOOD)
    for name in ("g/train.jsonl", "g/test.jsonl"):
        write(name, GOOD)
    (tmp_path / "empty").mkdir()
    splits["test"].save_to_disk(tmp_path / "one")
    for source, message in {
        f"{tmp_path}/b.jsonl": "there is no file or folder .*b.jsonl",
        "data/a.jsonl": "there is no file or folder",
        f"{tmp_path}/empty": "empty cannot be read: EmptyDatasetError",
        f"{tmp_path}/a.jsonl:test": "one file and has no split 'test'",
        f"{tmp_path}/g:valid": "g:valid: there is no split 'valid'; there are train, test",
        f"{tmp_path}/one:test": "one:test: there is no split 'test'; there are train",
    }.items():
        with pytest.raises(InputError, match=message):
            open_rows(source)


def test_a_name_that_is_neither_a_file_nor_on_the_hub(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")

    def refuse(*arguments):
        raise ConnectionError("Couldn't reach 'chats' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    monkeypatch.chdir(tmp_path)
    for name in ("chats", "chats:test"):
        with pytest.raises(InputError, match=r"(?s)cannot be read: ConnectionError.*HF_HUB_OFFLINE=1") as raised:
            open_rows(name)
        assert raised.value.__notes__ == [f"  If a file or folder was meant: there is none at {tmp_path}/chats."]


CONFIGS = """---
configs:
- config_name: plain
  data_files: [{split: train, path: train.jsonl}, {split: test, path: test.jsonl}]
- config_name: long
  data_files: [{split: train, path: test.jsonl}]
---
"""


def test_data_sets_of_the_hub(write, splits, tmp_path, monkeypatch):
    """`datasets` itself reads a folder for the repository, configs included; there is no network here."""
    monkeypatch.chdir(tmp_path)
    for name in splits:
        for folder in ("me/some", "me/v1.5"):
            write(f"{folder}/{name}.jsonl", splits[name].to_list())
    write("me/some/README.md", CONFIGS)
    real = Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda path: not str(path).startswith("me/") and real(path))
    monkeypatch.setattr(Path, "exists", lambda path, **_: not str(path).startswith("me/") and os.path.exists(path))
    for source, split in (("me/v1.5", "train"), ("me/v1.5:test", "test"), ("me/some:plain:test", "test")):
        assert texts(source) == [f"{split} 2", f"{split} 0"], source
    for source, message in (
        ("me/v1.5:dev", "me/v1.5:dev: there is no split 'dev'; there are train, test"),
        ("me/some", r"cannot be read: ValueError: Config name is missing.*\['plain', 'long'\]"),
        ("me/nothing", "me/nothing cannot be read: .*(Error|NotFound)"),
    ):
        with pytest.raises(InputError, match=rf"(?s){message}"):
            open_rows(source)


def test_without_datasets(write, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    for source in (write("a.parquet", "x"), "someone/chats", tmp_path):
        with pytest.raises(InputError, match=re.escape("pip install 'ligermodels[train]'")):
            open_rows(source)
