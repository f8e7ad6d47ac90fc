"""Saving folders: shards, what stays of the old folder, and that a reader finds the old checkpoint or the new one."""

import errno
import json
import os
import signal
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ligermodels.checkpoint import saving
from ligermodels.checkpoint.files import companion_files, read_json
from ligermodels.checkpoint.reading import SafetensorsReader
from ligermodels.checkpoint.saving import write_checkpoint
from ligermodels.checkpoint.weights import Exported, same_bits
from ligermodels.errors import CheckpointError, HubError, InputError
from tests.checkpoint.fixtures import make_model
from tests.processes import Child

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs fork and renameat2")


def tensors(value: float, count: int = 6) -> Exported:
    return Exported({f"x{i}": (torch.full((100,), value), ()) for i in range(count)})


def value_of(folder: Path) -> float:
    """The one value that all tensors and the config of a checkpoint hold; fails if they are of two saves."""
    reader = SafetensorsReader(folder)
    values = {float(x) for name in reader.headers for x in reader.read(name).unique()}
    [value] = {*values, float(read_json(folder / "config.json")["value"])}
    return value


def save(folder: Path, value: float, **options) -> Path:
    files = {"config.json": json.dumps({"value": value}).encode()}
    return write_checkpoint(folder, tensors(value), files=files, **options)


@pytest.mark.parametrize("size, count", [("5GB", 1), ("1.2 kb", 2), ("1KiB", 3), ("0.001MiB", 3), ("799", 6), (1, 6)])
def test_shards(tmp_path, size, count):
    folder = save(tmp_path / "new" / "out", 1.0, max_shard_size=size)
    files = [f"model-{k:05}-of-{count:05}.safetensors" for k in range(1, count + 1)]
    expected = [*files, "model.safetensors.index.json"] if count > 1 else ["model.safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", *expected]
    assert value_of(folder) == 1.0
    if count > 1:
        content = read_json(folder / expected[-1])
        assert content["metadata"]["total_size"] == 6 * 400 and list(content["weight_map"]) == [*tensors(0).headers]
        assert all(name in load_file(folder / file) for name, file in content["weight_map"].items())


def test_every_dtype_shape_and_stride_is_read_by_safetensors(tmp_path):
    """The tensors of larger elements come first in the file, so that each of them is aligned."""
    packed = torch.arange(24.0).reshape(4, 6)
    given = {
        "half": torch.ones(3, dtype=torch.float16), "top": packed[:2], "bottom": packed[2:], "t": packed.T,
        "scalar": torch.tensor(1.0), "empty": torch.ones(0, 5), "double": torch.ones(1, dtype=torch.float64),
        "code": torch.arange(5, dtype=torch.uint8), "byte": torch.ones(3).to(torch.float8_e4m3fn),
    }  # fmt: skip
    folder = write_checkpoint(tmp_path / "x", Exported({name: (x, ()) for name, x in given.items()}))
    loaded = load_file(folder / "model.safetensors")
    assert loaded.keys() == given.keys() and all(same_bits(loaded[name], given[name]) for name in given)
    reader = SafetensorsReader(folder)
    assert reader.metadata == {"format": "pt"} and next(iter(reader.headers)) == "double"
    with pytest.raises(CheckpointError, match="x is torch"):
        write_checkpoint(tmp_path / "y", Exported({"x": (torch.ones(1, dtype=torch.complex128), ())}))


def test_one_tensor_in_memory_at_a_time(tmp_path):
    """The last tensor is in the file, and freed, when the next one is read."""
    alive = []

    class Watched(Exported):
        def read(self, name):
            assert not any(reference() is not None for reference in alive), name
            tensor = super().read(name).clone()
            alive.append(weakref.ref(tensor))
            return tensor

    write_checkpoint(tmp_path / "out", Watched(tensors(1.0).boxes), max_shard_size=800)
    assert len(alive) == 6


TEMPLATE, PROCESSOR = "additional_chat_templates/tool.jinja", "preprocessor_config.json"
TOKENIZER = ["tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize(
    "there, written",
    [
        ([], [TEMPLATE, PROCESSOR, *TOKENIZER]),
        (["tokenizer.json"], [PROCESSOR]),  # and no template: the tokenizer that is there may have none
        (["tokenizer.model", PROCESSOR], []),
        ([TEMPLATE], [PROCESSOR, *TOKENIZER]),
    ],
)
def test_a_tokenizer_that_is_there_stays(tmp_path, there, written):
    source, target = tmp_path / "source", tmp_path / "target"
    for folder, names in ((source, [TEMPLATE, PROCESSOR, *TOKENIZER]), (target, there)):
        (folder / TEMPLATE).parent.mkdir(parents=True)
        for name in (*names, "x.bin"):
            (folder / name).write_text(folder.name)
    found = companion_files(source, target)
    assert sorted(found) == written
    write_checkpoint(target, tensors(1.0), files=found)
    expected = dict.fromkeys(written, "source") | dict.fromkeys([*there, "x.bin"], "target")
    assert {name: (target / name).read_text() for name in expected} == expected


@pytest.mark.parametrize("lacking", ["nothing", "renameat2", "hard links"])
def test_saving_over_a_checkpoint(tmp_path, monkeypatch, lacking):
    """The old weights go, whatever else was there stays with its mode, nothing is left behind."""
    folder = save(tmp_path / "out", 1.0, max_shard_size=800)
    (tmp_path / "out" / "x").write_bytes(b"")
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1, "the mode of any new file"
    (tmp_path / "out" / "x").unlink()
    folder.chmod(0o750)
    put_beside(folder)
    exchange = saving._exchange

    def late(a, b):
        (folder / "written during the swap").touch()
        return lacking != "renameat2" and exchange(a, b)

    monkeypatch.setattr(saving, "_exchange", late)
    if lacking == "hard links":
        monkeypatch.setattr(os, "link", fail_with(errno.EPERM))
    with (folder / "checkpoint-5" / "runs" / "open").open("w") as log:
        save(folder, 2.0)
        log.write("more")
    assert value_of(folder) == 2.0 and is_beside(folder)
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "checkpoint-5")] == [0o750] * 2
    assert {path.name for path in folder.iterdir()} == {
        "README.md", "checkpoint-5", "config.json", "latest", "model.safetensors", "written during the swap",
    }  # fmt: skip
    assert lacking == "hard links" or (folder / "checkpoint-5" / "runs" / "open").read_text() == "more"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


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


def fail_with(code: int):
    def fail(*args, **options):
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("step", ["write_file", "sync", "finish", "_exchange", "second rename", "space"])
def test_a_disk_that_fails_at_any_step(tmp_path, monkeypatch, step):
    folder = save(tmp_path / "out", 1.0)
    if step == "second rename":  # of the two that take the place of the exchange
        outcomes = iter([os.rename, os.rename, fail_with(errno.ENOSPC), os.rename])
        monkeypatch.setattr(saving, "_exchange", lambda a, b: False)
        monkeypatch.setattr(saving.os, "rename", lambda a, b: next(outcomes)(a, b))
    elif step == "space":
        monkeypatch.setattr(saving.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    else:
        monkeypatch.setattr(saving, step, fail_with(errno.ENOSPC))
    with pytest.raises(HubError, match=r"(?s)out cannot be written.*free some space") as caught:
        save(folder, 2.0)
    assert caught.value.errno == errno.ENOSPC
    untouched(folder)


@pytest.mark.parametrize("place, error, message", [
    ("file", HubError, "is a file"), ("file/out", HubError, "cannot be written"),
    ("mount", CheckpointError, "(?s)cannot be swapped.*mount point"), ("read-only", HubError, "may not write there"),
    *((f"size {size}", InputError, "max_shard_size") for size in ("", "5XB", "-5GB", 0, "nan", None)),
])  # fmt: skip
def test_what_cannot_be_saved_to(tmp_path, monkeypatch, place, error, message):
    (tmp_path / "file").write_text("x")
    folder = save(tmp_path / "out", 1.0)
    if place == "read-only":
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    if place == "mount":
        monkeypatch.setattr(os.path, "ismount", lambda path: str(path) == str(folder))
    options = {"max_shard_size": place.removeprefix("size ")} if place.startswith("size") else {}
    with pytest.raises(error, match=message):
        save(tmp_path / place if place.startswith("file") else folder, 2.0, **options)
    untouched(folder)
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("error", [KeyboardInterrupt, CheckpointError])
def test_an_exception_midway_leaves_the_old_checkpoint(tmp_path, error):
    class Failing(Exported):
        def read(self, name):
            if name == "x4":
                raise error
            return super().read(name)

    folder = save(tmp_path / "out", 1.0)
    with pytest.raises(error):
        write_checkpoint(folder, Failing(tensors(2.0).boxes), max_shard_size=800)
    untouched(folder)


# Models that cannot be saved


class Quantised(torch.Tensor):
    """Claims to be floats, as torchao's tensors do."""


def adapted(model: nn.Module) -> None:
    model.model.layers[0].self_attn.q_proj.base_layer = nn.Linear(2, 2)


def codes(model: nn.Module) -> None:
    model.lm_head.weight = nn.Parameter(torch.zeros(32, 16, dtype=torch.uint8), requires_grad=False)


def disguised(model: nn.Module) -> None:
    model.lm_head.weight = nn.Parameter(torch.zeros(32, 16).as_subclass(Quantised))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (adapted, r"(?s)not the model's \(2\): \S+q_proj\.base_layer\.weight.*merge them first"),
        (lambda model: model.model.norm.to("meta"), r"model\.norm\.weight has no memory in this process.*state_dict="),
        (codes, r"lm_head\.weight is quantised \(Tensor of torch\.uint8\)"),
        (disguised, r"lm_head\.weight is quantised \(Quantised of torch\.float32\)"),
    ],
)
def test_what_could_not_be_loaded_again_is_not_saved(tmp_path, spoil, message):
    model = make_model()
    spoil(model)
    with pytest.raises(CheckpointError, match=message):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Kills


STEPS = [(saving, "write_file"), (os, "fsync"), (os, "rename"), (os, "mkdir"), (os, "chmod"),
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


@linux
@pytest.mark.slow
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
