"""Rows of files: random access equals reading from the beginning, and messages name the line."""

import csv
import json
import os
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ligermodels.errors import InputError
from ligermodels.recipes.rows import open_rows

ROWS = [{"text": "one"}, {"text": "zwei \u2028 größer"}, {"other": {"deep": [1, None]}}, {"text": "\n\r\x85"}]


def test_lines_in_any_order(write):
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    text = f"\ufeff\r\n{lines[0]}\r\n \t\n\n{lines[1]}\n  {lines[2]}  \n\n{lines[3]}"
    path = write("a.jsonl", text)
    rows = open_rows(path)
    assert len(rows) == 4
    for n in (3, 0, 2, 1, 3):
        assert rows[n] == ROWS[n]
    numbers = [int(rows.where(n).removeprefix(f"{path}:")) for n in range(4)]
    assert numbers == [2, 5, 6, 8]
    assert [json.loads(text.split("\n")[number - 1]) for number in numbers] == ROWS
    with pytest.raises(IndexError):
        rows[4]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([b'{"a": 1}\n', b'{"b": "x"}\r\n', b"\n", b"  \r\n"]), min_size=1))
def test_lines_are_those_of_a_plain_reader(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(b"".join(lines))
    expected = [(n, json.loads(line)) for n, line in enumerate(lines, 1) if line.strip()]
    if not expected:
        with pytest.raises(InputError, match="no rows"):
            open_rows(path)
        return
    rows = open_rows(path)
    assert [(rows.where(n), rows[n]) for n in range(len(rows))] == [(f"{path}:{n}", row) for n, row in expected]


def test_keys_are_not_unified(write):
    rows = open_rows(write("a.jsonl", [{"a": {"x": 1}}, {"a": {"y": "2"}}, {"b": []}]))
    assert [rows[n] for n in range(3)] == [{"a": {"x": 1}}, {"a": {"y": "2"}}, {"b": []}]


def test_json_list_under_both_names(write):
    for name in ("a.json", "a.jsonl"):
        rows = open_rows(write(name, "\ufeff " + json.dumps(ROWS, indent=2)))
        assert [rows[n] for n in range(len(rows))] == ROWS
        assert rows.where(1).endswith(f"{name}: item 2")
    rows = open_rows(write("lines.json", ROWS))
    assert rows[1] == ROWS[1] and rows.where(1).endswith("lines.json:2")


@pytest.mark.parametrize(("name", "dialect"), [("a.csv", "excel"), ("a.tsv", "excel-tab")])
def test_csv(tmp_path, name, dialect):
    content = [["prompt", "completion"], ["a\nb", "c, d"], ["é\t", '"'], ["x" * 200_000, ""]]
    with (tmp_path / name).open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file, dialect).writerows(content)
    rows = open_rows(tmp_path / name)
    assert [list(rows[n].values()) for n in range(3)] == content[1:]
    assert rows[0].keys() == {"prompt", "completion"}
    assert [rows.where(n).rpartition(":")[2] for n in range(3)] == ["2", "4", "5"]


def test_parquet_without_the_nulls_that_its_schema_adds(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"call": {"name": "f", "a": 1}, "text": "x"}, {"call": {"name": "g", "b": [{"c": 2}, {"d": 3}]}}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    found = open_rows(tmp_path / "a.parquet")
    assert [found[n] for n in range(2)] == rows
    assert found.where(1).endswith("a.parquet: row 2")


def test_without_datasets(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "datasets", None)
    for source in (tmp_path / "a.parquet", "someone/chats"):
        with pytest.raises(InputError, match=re.escape("pip install 'ligermodels[train]'")):
            open_rows(source)


def test_several_files_and_folders(write, tmp_path):
    first, second = write("f/b.jsonl", [{"n": 0}, {"n": 1}]), write("f/c.json", '[{"n": 2}]')
    write("f/README.md", "not data")
    for source in ([first, second], tmp_path / "f"):
        rows = open_rows(source)
        assert [rows[n]["n"] for n in range(len(rows))] == [0, 1, 2]
        assert [rows.where(n) for n in range(3)] == [f"{first}:1", f"{first}:2", f"{second}: item 1"]


def test_folders_of_splits(write, tmp_path):
    write("f/train-00000-of-00002.jsonl", [{"n": 0}])
    write("f/train-00001-of-00002.jsonl", [{"n": 1}])
    write("f/test.jsonl", [{"n": 2}])
    assert [len(open_rows(tmp_path / "f", split)) for split in (None, "train", "test")] == [2, 2, 1]
    with pytest.raises(InputError, match=r"no files of the split 'valid'.*'test', 'train'"):
        open_rows(tmp_path / "f", "valid")
    write("f/more.jsonl", [{"n": 3}])
    with pytest.raises(InputError, match=r"others beside them.*more\.jsonl"):
        open_rows(tmp_path / "f")


GOOD = b'{"a": 1}\n'


@pytest.mark.parametrize(  # further files are in test_bad_inputs.FILES
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "is empty"),
        ("a.json", b"[]", "has no rows"),
        ("a.csv", b"a,b\n", "has no rows"),
        ("a.csv", b'a\n"x\n', "a.csv:.*not valid CSV"),
        ("a.csv", b"a\n\xe9\n", "a.csv: not UTF-8"),
        ("a.txt", b"\xe9", "a.txt: not UTF-8"),
        ("a.json", b'[{"a": 1},\n {"b" 2}]', "a.json:2: not a valid JSON list, at column 7"),
        ("a.pdf", b"x", r"unsupported extension: expected a name that ends in \.jsonl"),
    ],
)
def test_files_that_cannot_be_opened(write, name, content, message):
    with pytest.raises(InputError, match=message):
        open_rows(write(name, content))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": "\xe9"}', "not UTF-8: 0xe9 is its byte 8"),
        (b'{"a": "x', "not valid JSON at column 7: Unterminated string"),
        (b'{"a": 1', "column 8.*ends in the middle"),
        (b'{"a": 1} {"a": 2}', "column 10: Extra data"),
        (b"{'a': 1}", "column 2: Expecting property name"),
        (b'"text"', "a row is a JSON object with keys, not str"),
        (b'{"a":' * 100_000, "not valid JSON"),
    ],
)
def test_rows_that_cannot_be_read(write, line, message):
    rows = open_rows(write("a.jsonl", GOOD + line + b"\n" + GOOD))
    assert rows[0] == rows[2] == {"a": 1}
    with pytest.raises(InputError, match=message):
        rows[1]


def test_sources_that_are_not_there(tmp_path):
    (tmp_path / "empty").mkdir()
    for source, message in [
        (tmp_path / "a.jsonl", "there is no file or folder .*a.jsonl"),
        ("data/a.jsonl", "there is no file or folder"),
        (tmp_path / "empty", "has no data files"),
    ]:
        with pytest.raises(InputError, match=message):
            open_rows(source)
    with pytest.raises(InputError, match="one file and has no split 'test'"):
        (tmp_path / "a.jsonl").write_bytes(GOOD)
        open_rows(tmp_path / "a.jsonl", "test")


def test_csv_rows_of_another_width(write):
    rows = open_rows(write("a.csv", "a,b\n1,2\n3\n"))
    assert rows[0] == {"a": "1", "b": "2"}
    with pytest.raises(InputError, match="1 fields, the line of headers 2"):
        rows[1]


@pytest.fixture
def splits():
    datasets = pytest.importorskip("datasets")
    made = {name: datasets.Dataset.from_list([{"text": f"{name} {n}"} for n in range(3)]) for name in ("test", "train")}
    return datasets.DatasetDict(made)


def texts(rows):
    return [rows[n]["text"] for n in (2, 0)]


def test_data_sets_saved_to_disk(splits, tmp_path):
    splits.save_to_disk(tmp_path / "all")
    splits["test"].save_to_disk(tmp_path / "one")
    for source, split in ((f"{tmp_path}/all", "train"), (f"{tmp_path}/all:test", "test"), (tmp_path / "one", "test")):
        rows = open_rows(source)
        assert texts(rows) == [f"{split} 2", f"{split} 0"] and len(rows) == 3
    assert open_rows(tmp_path / "all").where(1) == f"{tmp_path}/all: row 2"
    with pytest.raises(InputError, match="all: there is no split 'valid'; there are test, train"):
        open_rows(f"{tmp_path}/all:valid")
    with pytest.raises(InputError, match="one: there is no split 'test': it was saved as one"):
        open_rows(tmp_path / "one", "test")


def test_folders_as_the_hub_has_them(splits, tmp_path):
    (tmp_path / "set" / "data").mkdir(parents=True)
    for name, part in splits.items():
        for n in range(2):
            part.shard(2, n).to_parquet(tmp_path / "set" / "data" / f"{name}-0000{n}-of-00002.parquet")
    assert texts(open_rows(tmp_path / "set")) == ["train 2", "train 0"]
    assert texts(open_rows(f"{tmp_path}/set:test")) == ["test 2", "test 0"]
    with pytest.raises(InputError, match=r"no files of the split 'dev'; its splits are \['test', 'train'\]"):
        open_rows(f"{tmp_path}/set:dev")
    with pytest.raises(InputError, match="one file and has no split 'test'"):
        open_rows(f"{tmp_path}/set/data/train-00000-of-00002.parquet:test")


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
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for name in splits:
        for folder in ("me/some", "me/v1.5"):
            write(f"{folder}/{name}.jsonl", splits[name].to_list())
    write("me/some/README.md", CONFIGS)
    real = Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda path: not str(path).startswith("me/") and real(path))
    monkeypatch.setattr(Path, "exists", lambda path, **_: not str(path).startswith("me/") and os.path.exists(path))
    for source, split in (
        ("me/v1.5", "train"), ("me/v1.5:test", "test"), ("me/some:plain", "train"), ("me/some:plain:test", "test"),
        ("me/some:long", "test"),
    ):  # fmt: skip
        assert texts(open_rows(source)) == [f"{split} 2", f"{split} 0"], source
    for source, message in (
        ("me/v1.5:dev", "me/v1.5:dev: there is no split 'dev'; there are train, test"),
        ("me/some:long:test", "there is no split 'test'; there are train"),
        ("me/some", r"cannot be read: ValueError: Config name is missing.*\['plain', 'long'\]"),
        ("me/nothing", "me/nothing cannot be read: .*(Error|NotFound)"),
    ):
        with pytest.raises(InputError, match=rf"(?s){message}"):
            open_rows(source)
