"""Checkpoint folders: which files are read, how damage is told, and that a save is all or nothing."""

import datetime
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ligermodels.checkpoint import saving, weights
from ligermodels.checkpoint.reading import (
    SafetensorsReader,
    companion_files,
    open_checkpoint,
    read_json,
)
from ligermodels.checkpoint.saving import write_checkpoint
from ligermodels.checkpoint.weights import TensorInfo
from ligermodels.errors import CheckpointError, HubError, InputError
from tests.children import Child

ROOT = Path(__file__).parents[1]


def index(folder: Path, weight_map: object, name: str = "model.safetensors") -> None:
    (folder / f"{name}.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def shard(k: int, n: int) -> str:
    return f"model-{k:05}-of-{n:05}.safetensors"


# Reading


def test_headers_without_reading(tmp_path):
    tensors = {
        "half": torch.ones(2, 3, dtype=torch.float16),
        "brain": torch.ones(4, dtype=torch.bfloat16),
        "scalar": torch.tensor(1.0),
        "empty": torch.ones(0, 5, dtype=torch.float64),
        "code": torch.ones(2, dtype=torch.uint8),
        "byte": torch.ones(2).to(torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with SafetensorsReader(tmp_path) as reader:
        assert reader.headers == {name: TensorInfo(x.dtype, tuple(x.shape)) for name, x in tensors.items()}
        assert {name: info.nbytes for name, info in reader.headers.items()} == {n: x.nbytes for n, x in tensors.items()}
        assert torch.equal(reader.read("half"), tensors["half"])
        assert reader.metadata == {"format": "pt"}


def test_file_order(tmp_path):
    """By offset within a file; safetensors' own keys() come sorted by name."""
    save_file({"a": torch.ones(3, dtype=torch.float16), "b": torch.ones(3)}, tmp_path / "model.safetensors")
    assert list(SafetensorsReader(tmp_path).headers) == ["b", "a"]


def test_the_index_goes_before_other_files(tmp_path):
    """Of a repository with everything in it, the shards that the index names are read and nothing else."""
    for file, value in [
        (shard(1, 2), 1.0),
        (shard(2, 2), 2.0),
        ("model.safetensors", 3.0),
        ("consolidated.safetensors", 4.0),
    ]:
        save_file({"a": torch.tensor(value), "b": torch.tensor(value)}, tmp_path / file)
    save_file({"a": torch.tensor(1.0), "left_out": torch.tensor(0.0)}, tmp_path / shard(1, 2))
    save_file({"b": torch.tensor(2.0)}, tmp_path / shard(2, 2))
    index(tmp_path, {"a": shard(1, 2), "b": shard(2, 2)})
    reader = open_checkpoint(tmp_path)
    assert list(reader.headers) == ["a", "b"]
    assert (reader.read("a"), reader.read("b")) == (1.0, 2.0)


def test_a_tensor_in_two_shards(tmp_path):
    value = torch.tensor([1.0, float("nan")])
    index(tmp_path, {"a": shard(1, 2), "b": shard(2, 2)})
    save_file({"a": value}, tmp_path / shard(1, 2))
    save_file({"a": value, "b": value.clone()}, tmp_path / shard(2, 2))
    assert list(SafetensorsReader(tmp_path).headers) == ["a", "b"]
    save_file({"a": -value, "b": value.clone()}, tmp_path / shard(2, 2))
    with pytest.raises(CheckpointError, match=r"(?s)hold different tensors a.*two checkpoints in one folder"):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize(
    "file",
    ["../model.safetensors", "a/../../x.safetensors", "/etc/x.safetensors", "C:\\x.safetensors",
     "C:x.safetensors", "\\\\host\\share\\x.safetensors", "//host/share/x.safetensors",
     "..\\x.safetensors", "a\\x.safetensors",
     "model.bin", "model.safetensors.py", "", 3, None, ["model.safetensors"]],
)  # fmt: skip
def test_an_index_cannot_point_elsewhere(tmp_path, file):
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    index(tmp_path, {"a": "model.safetensors", "b": file})
    with pytest.raises(CheckpointError, match=r"index\.json names .*; expected a \.safetensors file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "text, words",
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b"[" * 100000, "not JSON"),
        (b"[1]", "holds a list, expected an object"),
        (b"{}", "has no weight_map"),
        (b'{"weight_map": {}}', "has no weight_map"),
        (b'{"weight_map": ["a"]}', "has no weight_map"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        (b"<!DOCTYPE html><html></html>", "HTML page"),
    ],
)
def test_a_broken_index(tmp_path, text, words):
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path)


def test_an_index_at_odds_with_its_files(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / shard(1, 2))
    index(tmp_path, {"a": shard(1, 2), "b": shard(1, 2)})
    with pytest.raises(CheckpointError, match="lacks b, against its index"):
        open_checkpoint(tmp_path)
    index(tmp_path, {"a": shard(1, 2), "b": shard(2, 2)})
    with pytest.raises(CheckpointError, match=r"(?s)00002-of-00002.safetensors is not there.*Fetch"):
        open_checkpoint(tmp_path)


def test_a_large_index_is_read_quickly(tmp_path):
    index(tmp_path, {f"x{i}": shard(1, 1) for i in range(100_000)})
    save_file({"a": torch.ones(1)}, tmp_path / shard(1, 1))
    with pytest.raises(CheckpointError, match="lacks x0"):
        open_checkpoint(tmp_path)


def a_file(tmp_path: Path) -> bytes:
    save_file({"a": torch.arange(100.0)}, tmp_path / "good")
    return (tmp_path / "good").read_bytes()


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda good: b"", "damaged or cut short"),
        (lambda good: good[:5], "damaged or cut short"),
        (lambda good: good[:40], "damaged or cut short"),
        (lambda good: good[:-1], "damaged or cut short"),
        (lambda good: good + b"\0", "damaged or cut short"),
        (lambda good: b"\xff" * 7 + b"\x7f" + good[8:], "damaged or cut short"),
        (lambda good: good.replace(b"[100]", b"[101]"), "damaged or cut short"),
        (lambda good: good.replace(b'"F32"', b'"F99"'), "damaged or cut short"),
        (lambda good: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        (lambda good: b"\n<html><body>Sign in</body></html>" * 10, "HTML page"),
        (lambda good: b"PK\x03\x04" + good, "pickle under another name"),
        (lambda good: b"GGUF" + good, "GGUF"),
    ],
)
def test_a_file_that_is_not_what_its_name_says(tmp_path, damage, words):
    (tmp_path / "model.safetensors").write_bytes(damage(a_file(tmp_path)))
    with pytest.raises(CheckpointError, match=rf"(?s)model.safetensors is not a safetensors file.*{words}"):
        open_checkpoint(tmp_path)


def test_a_folder_or_a_pipe_in_place_of_a_file(tmp_path):
    for make in (os.mkdir, os.mkfifo):
        folder = tmp_path / make.__name__
        folder.mkdir()
        make(folder / "model.safetensors")
        with pytest.raises(CheckpointError, match="is not a regular file"):
            open_checkpoint(folder)


def test_folders_without_weights(tmp_path):
    with pytest.raises(CheckpointError, match=r"(?s)holds neither model\.safetensors nor its index.*adapter"):
        open_checkpoint(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(a_file(tmp_path))
    with pytest.raises(CheckpointError, match="Mistral's own layout"):
        open_checkpoint(tmp_path)


def test_four_bit_formats_are_named(tmp_path):
    header = json.dumps({"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    with pytest.raises(CheckpointError, match=r"a is quantised \(F4\)"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "module._orig_mod.", "base_model.model."])
@pytest.mark.parametrize("kind", ["safetensors", "shards", "pickle"])
def test_a_state_dict_under_a_wrappers_names(tmp_path, wrapper, kind):
    """A folder with weights alone, as a trainer leaves it; no config.json."""
    held = {f"{wrapper}model.a": torch.ones(2), f"{wrapper}model._checkpoint_wrapped_module.b": torch.zeros(3)}
    if kind == "safetensors":
        save_file(held, tmp_path / "model.safetensors")
    elif kind == "pickle":
        torch.save(held, tmp_path / "pytorch_model.bin")
    else:
        for k, name in enumerate(held, 1):
            save_file({name: held[name]}, tmp_path / shard(k, 2))
        index(tmp_path, {name: shard(k, 2) for k, name in enumerate(held, 1)})
    reader = open_checkpoint(tmp_path, allow_pickle=True)
    assert set(reader.headers) == set(reader.places) == {"model.a", "model.b"}
    assert torch.equal(reader.read("model.a"), torch.ones(2)) and torch.equal(reader.read("model.b"), torch.zeros(3))


def test_one_name_twice_behind_a_wrapper(tmp_path):
    held = {"a": torch.ones(1), "module.a": torch.zeros(1)}
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"holds (module\.)?a and (module\.)?a, which are one name"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(held, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"holds module\.a and a, which are one name"):
        open_checkpoint(tmp_path, allow_pickle=True)


class Payload:
    """Makes a folder when unpickled by anything that runs what it reads."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_pickles_only_when_allowed_and_never_run(tmp_path):
    torch.save({"a": torch.ones(2), "b": torch.zeros(3, dtype=torch.bfloat16)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"(?s)allow_pickle=True.*--allow-pickle"):
        open_checkpoint(tmp_path)
    with open_checkpoint(tmp_path, allow_pickle=True) as reader:
        assert reader.headers == {"a": TensorInfo(torch.float32, (2,)), "b": TensorInfo(torch.bfloat16, (3,))}
        assert torch.equal(reader.read("a"), torch.ones(2))
    torch.save({"a": Payload(str(tmp_path / "run"))}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="cannot be read as a file of plain tensors"):
        open_checkpoint(tmp_path, allow_pickle=True)
    assert not (tmp_path / "run").exists()
    torch.save({"model": {"a": torch.ones(1)}}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="not a flat dictionary"):
        open_checkpoint(tmp_path, allow_pickle=True)
    (tmp_path / "pytorch_model.bin").write_bytes(b"nothing of the kind")
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_checkpoint(tmp_path, allow_pickle=True)
    save_file({"a": torch.ones(5)}, tmp_path / "model.safetensors")
    assert isinstance(open_checkpoint(tmp_path, allow_pickle=True), SafetensorsReader)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pickled_tensor_that_claims_more_than_is_stored(tmp_path, dtype):
    """Of a stride of 0, four bytes make a tensor of any size; one that is shared is no larger than its store."""
    x = torch.arange(6, dtype=dtype)
    fine = {"whole": x, "part": x[2:4], "shared": x.view(2, 3), "turned": x.view(2, 3).T, "none": torch.ones(0, 4)}
    torch.save(fine, tmp_path / "pytorch_model.bin")
    with open_checkpoint(tmp_path, allow_pickle=True) as reader:
        assert all(torch.equal(reader.read(name), fine[name]) for name in fine)
    for bad in (torch.ones(1, dtype=dtype).expand(1 << 40), x.as_strided((4, 3), (1, 1))):
        torch.save({**fine, "bad": bad}, tmp_path / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=r"(?s)bad claims [\d,]+ bytes and \d+ are stored.*do not trust it"):
            open_checkpoint(tmp_path, allow_pickle=True)


def test_a_pickle_that_is_written_to_meanwhile(tmp_path):
    torch.save({"a": torch.ones(5000)}, tmp_path / "pytorch_model.bin")
    with open_checkpoint(tmp_path, allow_pickle=True) as reader:
        os.truncate(tmp_path / "pytorch_model.bin", 100)
        with pytest.raises(CheckpointError, match="changed while it was read"):
            reader.read("a")


def test_a_pickle_of_an_old_torch_says_how_it_becomes_new(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(5)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"before 1\.6") as caught:
        open_checkpoint(tmp_path, allow_pickle=True)
    (command,) = re.findall(r"torch\.save\(.*\), FILE\)", str(caught.value))
    eval(command, {"torch": torch, "FILE": path})
    assert open_checkpoint(tmp_path, allow_pickle=True).headers == {"a": TensorInfo(torch.float32, (5,))}


def test_pickles_in_shards(tmp_path):
    for k in (1, 2):
        torch.save({f"x{k}": torch.full((2,), float(k))}, tmp_path / f"pytorch_model-{k:05}-of-00002.bin")
    index(tmp_path, {f"x{k}": f"pytorch_model-{k:05}-of-00002.bin" for k in (1, 2)}, "pytorch_model.bin")
    reader = open_checkpoint(tmp_path, allow_pickle=True)
    assert {name: float(reader.read(name)[0]) for name in reader.headers} == {"x1": 1.0, "x2": 2.0}


def test_read_json(tmp_path):
    (tmp_path / "config.json").write_text('{"a": "ü"}', encoding="utf-8")
    assert read_json(tmp_path / "config.json") == {"a": "ü"}
    with pytest.raises(CheckpointError, match=r"none\.json is not there"):
        read_json(tmp_path / "none.json")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        read_json(tmp_path)


# Writing


def tensors(value: float, count: int = 6) -> list[tuple[str, torch.Tensor]]:
    return [(f"x{i}", torch.full((100,), value)) for i in range(count)]


def value_of(folder: Path) -> float:
    """The one value that all tensors and the config of a checkpoint hold; fails if they are of two saves."""
    reader = SafetensorsReader(folder)
    values = {float(x) for name in reader.headers for x in reader.read(name).unique()}
    [value] = {*values, float(read_json(folder / "config.json")["value"])}
    return value


def save(folder: Path, value: float, **options) -> Path:
    files = {"config.json": json.dumps({"value": value}).encode()}
    return write_checkpoint(folder, tensors(value), files=files, **options)


@pytest.mark.parametrize(
    "size, expected",
    [
        (10_000, ["model.safetensors"]),
        ("1.2KB", [shard(1, 2), shard(2, 2)]),
        ("1KiB", [shard(1, 3), shard(2, 3), shard(3, 3)]),
        (799, [shard(k, 6) for k in range(1, 7)]),
        (1, [shard(k, 6) for k in range(1, 7)]),
    ],
)
def test_shards(tmp_path, size, expected):
    folder = save(tmp_path / "new" / "out", 1.0, max_shard_size=size)
    files = sorted(path.name for path in folder.iterdir())
    extra = ["model.safetensors.index.json"] if len(expected) > 1 else []
    assert files == sorted(["config.json", *expected, *extra])
    assert value_of(folder) == 1.0
    if extra:
        content = read_json(folder / extra[0])
        assert content["metadata"]["total_size"] == 6 * 400
        assert {name: name in load_file(folder / file) for name, file in content["weight_map"].items()} == {
            f"x{i}": True for i in range(6)
        }


@pytest.mark.parametrize("size", ["", "5", "5GB", "1.5 MiB", "2kb", 7])
def test_sizes(tmp_path, size):
    if size == "":
        with pytest.raises(InputError, match="max_shard_size=''"):
            save(tmp_path / "x", 1.0, max_shard_size=size)
    else:
        expected = {"5": 5, "5GB": 5 * 10**9, "1.5 MiB": 3 * 2**19, "2kb": 2000, 7: 7}
        assert saving.num_bytes(size) == expected[size]


@pytest.mark.parametrize("size", ["5XB", "GB", "-5GB", 0, -1, "0GB", "1e9", "5 GB x"])
def test_sizes_that_make_no_sense(tmp_path, size):
    with pytest.raises(InputError, match="max_shard_size"):
        save(tmp_path / "x", 1.0, max_shard_size=size)
    assert not (tmp_path / "x").exists()


def test_views_strides_and_metadata(tmp_path):
    packed = torch.arange(24.0).reshape(4, 6)
    folder = write_checkpoint(tmp_path / "x", [("top", packed[:2]), ("bottom", packed[2:]), ("t", packed.clone().T)])
    loaded = load_file(folder / "model.safetensors")
    assert torch.equal(loaded["bottom"], packed[2:]) and torch.equal(loaded["t"], packed.T)
    assert SafetensorsReader(folder).metadata == {"format": "pt"}


def test_one_shard_in_memory_at_a_time(tmp_path):
    """The stream is asked for a tensor of the next shard only when the last shard is a file."""
    seen = []

    def stream():
        for name, tensor in tensors(1.0):
            seen.append(len(list(tmp_path.glob(".out.saving-*/shard-*"))))
            yield name, tensor

    write_checkpoint(tmp_path / "out", stream(), max_shard_size=800)
    assert seen == [0, 0, 0, 1, 1, 2]


def test_files_are_copied_along(tmp_path):
    source = tmp_path / "source"
    (source / "additional_chat_templates").mkdir(parents=True)
    for name in (
        "tokenizer.json",
        "chat_template.jinja",
        "additional_chat_templates/tool.jinja",
        "config.json",
        "x.bin",
    ):
        (source / name).write_text(name)
    found = companion_files(source)
    assert sorted(found) == ["additional_chat_templates/tool.jinja", "chat_template.jinja", "tokenizer.json"]
    folder = write_checkpoint(tmp_path / "out", tensors(1.0), files={**found, "config.json": b"{}"})
    assert (folder / "additional_chat_templates/tool.jinja").read_text() == "additional_chat_templates/tool.jinja"
    assert (folder / "config.json").read_bytes() == b"{}" and not (folder / "x.bin").exists()


@pytest.mark.parametrize(
    ("there", "written"),
    [
        ([], ["chat_template.jinja", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"]),
        (["tokenizer.json"], ["preprocessor_config.json"]),  # and no template: its tokenizer may have none
        (["tokenizer.model", "preprocessor_config.json"], []),
        (["vocab.json", "config.json"], ["preprocessor_config.json"]),
        (["chat_template.jinja"], ["preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"]),
        (["model.safetensors"],
         ["chat_template.jinja", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"]),
    ],
)  # fmt: skip
def test_a_tokenizer_that_is_there_stays(tmp_path, there, written):
    source, target = tmp_path / "source", tmp_path / "target"
    for folder, names in (
        (source, ["chat_template.jinja", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"]),
        (target, there),
    ):
        folder.mkdir()
        for name in names:
            (folder / name).write_text(folder.name)
    found = companion_files(source, target)
    assert sorted(found) == written
    write_checkpoint(target, tensors(1.0), files=found)
    expected = dict.fromkeys(written, "source") | dict.fromkeys(set(there) - {"model.safetensors"}, "target")
    assert {path.name: path.read_text() for path in target.iterdir() if path.suffix != ".safetensors"} == expected
    assert companion_files(source, tmp_path / "absent").keys() == companion_files(source).keys()


def test_everyone_may_read_what_the_umask_allows(tmp_path):
    folder = save(tmp_path / "out", 1.0, max_shard_size=800)
    (tmp_path / "plain").write_bytes(b"")
    plain = (tmp_path / "plain").stat().st_mode
    assert {path.stat().st_mode for path in folder.iterdir()} == {plain}
    folder.chmod(0o750)
    assert save(folder, 2.0).stat().st_mode & 0o777 == 0o750


def test_saving_over_a_checkpoint(tmp_path):
    """The old weights go, whatever else was there stays, nothing is left behind."""
    folder = save(tmp_path / "out", 1.0, max_shard_size=800)
    (folder / "README.md").write_text("mine")
    (folder / "runs").mkdir()
    (folder / "runs" / "log").write_text("mine too")
    open_log = (folder / "runs" / "log").open("a")
    save(folder, 2.0)
    open_log.write(" and more")
    open_log.close()
    assert value_of(folder) == 2.0
    assert sorted(p.name for p in folder.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "runs",
    ]
    assert (folder / "runs" / "log").read_text() == "mine too and more"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_saving_where_renameat2_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "_exchange", lambda a, b: False)
    folder = save(tmp_path / "out", 1.0)
    put_beside(folder)
    save(folder, 2.0)
    assert value_of(folder) == 2.0 and is_beside(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_where_files_cannot_be_linked_they_are_copied(tmp_path, monkeypatch):
    def link(*args, **kwargs):
        raise OSError(errno.EPERM, "no links here")

    folder = save(tmp_path / "out", 1.0)
    put_beside(folder)
    monkeypatch.setattr(os, "link", link)
    save(folder, 2.0)
    assert value_of(folder) == 2.0 and is_beside(folder)
    assert (folder / "checkpoint-5").stat().st_mode & 0o777 == 0o750


def test_a_file_that_comes_while_the_folders_are_swapped(tmp_path, monkeypatch):
    folder, exchange = save(tmp_path / "out", 1.0), saving._exchange
    put_beside(folder)

    def late(a, b):
        (folder / "checkpoint-5" / "runs" / "late").write_text("mine")
        return exchange(a, b)

    monkeypatch.setattr(saving, "_exchange", late)
    save(folder, 2.0)
    assert is_beside(folder) and (folder / "checkpoint-5" / "runs" / "late").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_system_that_is_mounted_inside(tmp_path, monkeypatch):
    """Neither copied nor emptied."""
    folder, ismount = save(tmp_path / "out", 1.0), os.path.ismount
    put_beside(folder)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "runs" or ismount(path))
    with pytest.raises(HubError, match=r"(?s)another file system is mounted in it.*checkpoint-5/runs"):
        save(folder, 2.0)
    assert value_of(folder) == 1.0 and is_beside(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("atomic", [True, False])
def test_a_swap_that_fails(tmp_path, monkeypatch, atomic):
    """In one step, or in the second of two: the old checkpoint is back and nothing is left behind."""
    folder = save(tmp_path / "out", 1.0)
    steps = iter([False, OSError(errno.EIO, "broken")])

    def fail(a, b):
        step = OSError(errno.EBUSY, "busy") if atomic else next(steps)
        if isinstance(step, OSError):
            raise step
        return step

    monkeypatch.setattr(saving, "_exchange", fail if atomic else lambda a, b: False)
    if not atomic:
        monkeypatch.setattr(saving, "_rename", fail)
    with pytest.raises(HubError, match="out cannot be written"):
        save(folder, 2.0)
    untouched(folder)


def test_refusing_to_overwrite(tmp_path):
    folder = save(tmp_path / "out", 1.0, overwrite=False)
    with pytest.raises(CheckpointError, match=r"(?s)is not empty.*overwrite=True"):
        save(folder, 2.0, overwrite=False)
    assert value_of(folder) == 1.0
    (tmp_path / "empty").mkdir()
    assert value_of(save(tmp_path / "empty", 3.0, overwrite=False)) == 3.0


def test_a_symlink_is_followed(tmp_path):
    save(tmp_path / "real", 1.0)
    (tmp_path / "link").symlink_to("real")
    save(tmp_path / "link", 2.0)
    assert (tmp_path / "link").is_symlink() and value_of(tmp_path / "real") == 2.0


def test_a_folder_that_cannot_be_renamed(tmp_path, monkeypatch):
    """The current directory: a first checkpoint goes in, a second one is refused and the first stays."""
    (tmp_path / "out" / "additional_chat_templates").mkdir(parents=True)
    (tmp_path / "out" / "README.md").write_text("mine")
    monkeypatch.chdir(tmp_path / "out")
    moved = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: moved.append(Path(b).name) or replace(a, b))
    files = {"additional_chat_templates/x.jinja": b"x", "config.json": b'{"value": 1}'}
    write_checkpoint(".", tensors(1.0), files=files, max_shard_size=800)
    assert moved[2:] == [*moved[2:5], "model.safetensors.index.json"] and set(moved[:2]) == {
        "x.jinja",
        "config.json",
    }
    assert value_of(tmp_path / "out") == 1.0 and (tmp_path / "out" / "README.md").exists()
    assert not list(tmp_path.glob("**/.*saving*"))
    with pytest.raises(CheckpointError, match=r"(?s)cannot be swapped.*save to a folder inside it"):
        save(tmp_path / "out", 2.0)
    assert value_of(tmp_path / "out") == 1.0


# Failing


def untouched(folder: Path) -> None:
    assert value_of(folder) == 1.0
    assert [path.name for path in folder.parent.iterdir() if ".saving-" in path.name] == []


def test_no_room(tmp_path, monkeypatch):
    folder = save(tmp_path / "out", 1.0)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda path: usage(10**10, 10**10, 10**9))
    (tmp_path / ".out.saving-1-ab").mkdir()
    with pytest.raises(HubError, match=r"(?s)takes 2\.50 GB and 1\.00 GB are free; .*\.out\.saving-1-ab") as caught:
        save(folder, 2.0, expected_bytes=2_500_000_000)
    assert caught.value.errno == errno.ENOSPC
    (tmp_path / ".out.saving-1-ab").rmdir()
    untouched(folder)
    assert value_of(save(folder, 2.0, expected_bytes=10**9)) == 2.0


def test_a_disk_that_fills_up_midway(tmp_path):
    """A limit on the size of files makes the write of safetensors itself fail, in a process of its own."""
    folder = save(tmp_path / "out", 1.0)
    code = """if True:
        import resource, signal, sys, torch
        from ligermodels.checkpoint.saving import write_checkpoint
        from ligermodels.errors import HubError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        try:
            write_checkpoint(sys.argv[1], [("a", torch.ones(9)), ("b", torch.ones(999))], max_shard_size=100)
        except HubError as error:
            print(error.errno, error)
    """
    result = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout.startswith(f"{errno.EFBIG} ") and "cannot be written" in result.stdout, result.stderr
    untouched(folder)


@pytest.mark.parametrize("code, words", [(errno.ENOSPC, "free some space"), (errno.EROFS, "read-only")])
def test_errors_of_the_system_say_what_to_do(tmp_path, monkeypatch, code, words):
    folder = save(tmp_path / "out", 1.0)

    def fail(*args):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(saving, "save_file", fail)
    with pytest.raises(HubError, match=rf"(?s)out cannot be written.*{words}") as caught:
        save(folder, 2.0)
    assert caught.value.errno == code
    untouched(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_rights(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(HubError, match="you may not write there"):
        save(tmp_path / "locked" / "out", 1.0)


def test_paths_that_are_not_folders(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(HubError, match="is a file"):
        save(tmp_path / "file", 1.0)
    with pytest.raises(HubError, match="cannot be written"):
        save(tmp_path / "file" / "out", 1.0)
    with pytest.raises(HubError, match="choose a shorter name"):
        save(tmp_path / ("x" * 300), 1.0)
    assert value_of(save(tmp_path / ("x" * 255), 1.0)) == 1.0
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("error", [KeyboardInterrupt, CheckpointError])
def test_an_exception_midway_leaves_the_old_checkpoint(tmp_path, error):
    folder = save(tmp_path / "out", 1.0)

    def stream():
        yield from tensors(2.0)[:4]
        raise error

    with pytest.raises(error):
        write_checkpoint(folder, stream(), max_shard_size=800)
    untouched(folder)


STEPS = [(saving, "save_file"), (os, "fsync"), (os, "rename"), (os, "mkdir"), (os, "chmod"),
         (os, "unlink"), (os, "rmdir"), (os, "open"), (os, "link"), (os, "symlink"), (saving, "_exchange"),
         (saving.shutil, "copymode"), (saving.shutil, "copystat"), (saving.shutil, "copy2")]  # fmt: skip


def put_beside(folder: Path) -> None:
    """What a user keeps in the folder of a checkpoint: notes, logs, a link, a checkpoint of the training."""
    (folder / "README.md").write_text("mine")
    (folder / "checkpoint-5" / "runs").mkdir(parents=True)
    (folder / "checkpoint-5" / "runs" / "log").write_text("mine")
    (folder / "checkpoint-5" / "model.safetensors").write_text("mine")
    (folder / "checkpoint-5").chmod(0o750)
    (folder / "latest").symlink_to("checkpoint-5")


def is_beside(folder: Path) -> bool:
    files = ("README.md", "checkpoint-5/runs/log", "checkpoint-5/model.safetensors", "latest/model.safetensors")
    return (folder / "latest").is_symlink() and all((folder / file).read_text() == "mine" for file in files)


def die_at_step(n: int, folder: Path) -> None:
    """Saves, and is killed before the n-th call of any function that changes the disk."""
    counter = iter(range(1, 10**6))
    for module, name in STEPS:
        function = getattr(module, name)

        def counted(*args, function=function, **kwargs):
            if next(counter) == n:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        setattr(module, name, counted)
    save(folder, 2.0, max_shard_size=800)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs fork and renameat2")
def test_killed_at_every_step_leaves_the_old_or_the_new(tmp_path):
    outcomes = []
    for n in range(1, 200):
        folder = save(tmp_path / f"{n}" / "out", 1.0)
        put_beside(folder)
        status = Child(lambda: die_at_step(n, folder)).wait()  # noqa: B023
        outcomes.append(value_of(folder))
        assert is_beside(folder), "a file of the user is gone"
        save(folder, 3.0)
        assert value_of(folder) == 3.0 and is_beside(folder)
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert outcomes == sorted(outcomes) and outcomes[0] == 1.0 and outcomes[-1] == 2.0
    assert outcomes.count(1.0) > 10 and outcomes.count(2.0) > 2, "the steps on either side of the swap were not tried"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs fork and renameat2")
def test_killed_at_any_instant_leaves_the_old_or_the_new(tmp_path):
    folder = save(tmp_path / "out", 1.0)
    values = set()

    def save_forever():
        for value in range(2, 10**6):
            save(folder, float(value), max_shard_size=800)

    for k in range(100):
        if k >= 25 and len(values) > 3:  # on a busy machine it takes longer until a child has saved at all
            break
        child = Child(save_forever)
        time.sleep(0.01 * (k + 1))
        child.signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        values.add(value_of(folder))
    assert len(values) > 3


def test_two_writers(tmp_path):
    """Whoever is last wins; what is there is always one of the two, whole."""
    folder = save(tmp_path / "out", 0.0)
    (folder / "README.md").write_text("mine")
    errors = []

    def work(value: float) -> None:
        try:
            for _ in range(15):
                save(folder, value, max_shard_size=800)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(value,)) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert value_of(folder) in (1.0, 2.0) and (folder / "README.md").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# Of several ranks


def sharded(rank: int, root: Path) -> None:
    meeting, limit = f"file://{root / 'meeting'}", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=limit)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    expected = {name: x.clone() for name, x in model.state_dict().items()}
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    table = {"1.{w}": ("a.{w}", "b.{w}", "c.{w}")}
    for given in (None, model.state_dict()):
        stream = weights.export(model, table, given)
        write_checkpoint(root / "out", stream, is_main=rank == 0, max_shard_size=100)
        dist.barrier()
        reader = SafetensorsReader(root / "out")
        assert set(reader.headers) == {"0.weight", "0.bias", *(f"{x}.{w}" for x in "abc" for w in ("weight", "bias"))}
        assert torch.equal(reader.read("0.weight"), expected["0.weight"])
        for w in ("weight", "bias"):
            assert torch.equal(torch.cat([reader.read(f"{x}.{w}") for x in "abc"]), expected[f"1.{w}"])
    (root / "file").write_text("mine")
    dist.barrier()
    try:  # the main rank fails, and the other is not left waiting for it
        write_checkpoint(root / "file", weights.export(model, table), is_main=rank == 0)
        failed = False
    except HubError:
        failed = True
    assert failed == (rank == 0)
    dist.barrier()
    dist.destroy_process_group()


def test_sharded_weights_are_gathered_and_one_rank_writes(tmp_path):
    mp.spawn(sharded, args=(tmp_path,), nprocs=2)
    assert {path.name for path in tmp_path.iterdir()} <= {"file", "meeting", "out"}


def test_who_is_not_the_main_process_writes_nothing(tmp_path):
    seen = []
    stream = (seen.append(name) or (name, x) for name, x in tensors(1.0))
    write_checkpoint(tmp_path / "out", stream, files={"config.json": b"{}"}, is_main=False)
    assert len(seen) == 6 and not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="max_shard_size"):  # alike on every rank
        write_checkpoint(tmp_path / "out", tensors(1.0), is_main=False, max_shard_size="x")
