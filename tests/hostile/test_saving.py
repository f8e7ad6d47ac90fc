"""Saves that are killed, that meet each other, a full or read-only disk, or a bad path: old or new, never neither.

The longer run: python -m tests.hostile.test_saving --count 200
"""

import argparse
import errno
import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

import ligermodels
from ligermodels.checkpoint import saving
from ligermodels.errors import CheckpointError, HubError, InputError
from tests.children import INTERRUPTED, Child
from tests.hostile.folders import SECONDS, make_model

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs fork, and renameat2 or tmpfs")
SHARD = 2000  # bytes: five files


def models() -> list[ligermodels.Llama]:
    """Two that differ in weights, config and generation_config, by which a mixture of both is told."""
    made = [make_model(seed, rms_norm_eps=10.0**-seed) for seed in (5, 6)]
    for number, model in enumerate(made, 5):
        model.generation_config["eos_token_id"] = number
    return made


def which(folder: Path, made: list[ligermodels.Llama]) -> int:
    """The number of the model that a folder holds whole; fails if it is a mixture or does not load."""
    loaded = ligermodels.load(folder, progress=False)
    [number] = [
        number for number, model in enumerate(made)
        if all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    ]  # fmt: skip
    assert loaded.config.rms_norm_eps == made[number].config.rms_norm_eps
    assert loaded.generation_config["eos_token_id"] == made[number].generation_config["eos_token_id"]
    return number


def kill_saves(root: Path, count: int, seed: int = 0) -> dict[str, int]:
    """Kills `count` saves over an older checkpoint at random instants, and more until each outcome was seen twice.

    How often the old or the new was there.
    """
    made, folder, instant = models(), root / "out", random.Random(seed)
    made[0].save_pretrained(folder, max_shard_size=SHARD)
    duration = 0.0  # of a save with its fork: as measured first, then so that about half of the saves are killed early
    kept = ["README.md", "checkpoint-5/model.safetensors"]
    for name in kept:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    outcomes, old = {"old": 0, "new": 0, "killed within the save": 0}, 0
    for trial in range(-4, 8 * count):
        if trial >= count and min(outcomes.values()) > 1:
            break
        new, start = 1 - old, time.monotonic()
        child = Child(lambda: made[new].save_pretrained(folder, max_shard_size=SHARD))  # noqa: B023
        if trial < 0:
            assert child.wait() == 0
            duration, old = time.monotonic() - start, new
            continue
        time.sleep(instant.uniform(0, 1.3 * duration))
        child.signal(signal.SIGKILL)
        outcomes["killed within the save"] += child.wait() == -signal.SIGKILL
        found = which(folder, made)
        outcomes["old" if found == old else "new"] += 1
        duration *= 1.25 if found == old else 0.8
        assert all((folder / name).read_text() == "mine" for name in kept), "a file of the user is gone"
        for left in root.glob(".out.saving-*"):
            shutil.rmtree(left)
        old = found
    return outcomes


@pytest.fixture(scope="module")
def made():
    return models()


@pytest.fixture
def folder(made, tmp_path):
    return made[0].save_pretrained(tmp_path / "out", max_shard_size=SHARD)


def untouched(folder: Path, made) -> None:
    assert which(folder, made) == 0
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "something is left behind"


@linux
def test_killed_at_random_instants(tmp_path):
    outcomes = kill_saves(tmp_path, 25)
    assert outcomes["old"] + outcomes["new"] >= 25
    assert min(outcomes.values()) > 1, f"the instants were not spread: {outcomes}"


@linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(made, folder, number):
    """Ctrl-C cleans up behind itself; what may not, leaves the old or the new whole."""

    def save():
        for _ in range(10_000):
            made[1].save_pretrained(folder, max_shard_size=SHARD)

    for wait in (0, 0.001, 0.004, 0.008, 0.016, 0.05):
        child = Child(save)
        time.sleep(wait)
        child.signal(number)
        assert child.wait() == (INTERRUPTED if number == signal.SIGINT else -number)
        assert which(folder, made) in (0, 1)


@linux
def test_two_processes_at_once(made, folder):
    def save(model):
        for _ in range(20):
            model.save_pretrained(folder, max_shard_size=SHARD)

    children = [Child(functools.partial(save, model)) for model in made]
    assert [child.wait() for child in children] == [0, 0]
    assert which(folder, made) in (0, 1)
    assert [path.name for path in folder.parent.iterdir()] == ["out"]


def test_two_threads_at_once(made, folder):
    errors = []

    def work(model):
        try:
            for _ in range(10):
                model.save_pretrained(folder, max_shard_size=SHARD)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(model,)) for model in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and which(folder, made) in (0, 1)


@linux
@pytest.mark.parametrize("what", ["bytes", "inodes", "read-only"])
def test_a_real_disk_that_is_full_or_read_only(made, tmp_path, what, monkeypatch):
    """A tmpfs of 64 KiB (the check for room is told that there is more), of 8 files, or mounted without writing."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = {"bytes": "size=64k", "inodes": "nr_inodes=11", "read-only": "size=1m"}[what]
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("may not mount a tmpfs")
    try:
        folder = made[0].save_pretrained(disk / "out")
        if what == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        if what == "bytes":
            (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - 8192))
        monkeypatch.setattr(saving, "check_room", lambda *args: None)
        code = errno.EROFS if what == "read-only" else errno.ENOSPC
        with pytest.raises(HubError, match=r"(?s)cannot be written.*(free some space|read-only)") as caught:
            made[1].save_pretrained(folder, max_shard_size=300)
        assert caught.value.errno == code
        assert which(folder, made) == 0 and not list(disk.glob(".out*"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "your quota"),
        (errno.EROFS, "is read-only"),
        (errno.EACCES, "you may not"),
        (errno.EIO, "check the disk"),
        (errno.EMFILE, "check the disk"),
    ],
)
@pytest.mark.parametrize("step", ["save_file", "_write_files", "_sync", "_swap"])
def test_a_disk_that_fails_at_any_step(made, folder, monkeypatch, code, words, step):
    real, calls = getattr(saving, step), iter(range(100))

    def fail(*args):
        if next(calls) or step in ("_write_files", "_swap"):
            if step == "_swap":
                shutil.rmtree(args[0])  # as the real one does
            raise OSError(code, os.strerror(code))
        return real(*args)

    monkeypatch.setattr(saving, step, fail)
    with pytest.raises(HubError, match=rf"(?s)out cannot be written.*{words}") as caught:
        made[1].save_pretrained(folder, max_shard_size=SHARD)
    assert caught.value.errno == code
    untouched(folder, made)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("file", HubError, "is a file"),
        ("file/out", HubError, "cannot be written"),
        ("x" * 300, HubError, "shorter name"),
        ("y/" * 3000, HubError, "shorter name"),
        ("a\0b", HubError, "not the path"),
        ("loop/out", HubError, "cannot be written"),
        ("pipe", HubError, "is a file"),
        ("/dev/null", HubError, "is a file"),
        ("/proc/none/out", HubError, "cannot be written"),
        ("\ud800/out", HubError, "not the path"),
    ],
    ids=lambda value: repr(value)[:20] if isinstance(value, str) else "",
)
def test_paths_that_cannot_be_saved_to(made, tmp_path, given, error, words):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    start = time.process_time()
    with pytest.raises(error, match=f"(?s){words}"):
        made[0].save_pretrained(f"{tmp_path}/{given}" if given[0] != "/" else given)
    assert time.process_time() - start < SECONDS and (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("size", ["9" * 400 + "GB", "1" * 30, "nan", "inf", "0.0001", "0x10", "5 GiB\n", None])
def test_shard_sizes_that_make_no_sense(made, tmp_path, size):
    with pytest.raises(InputError, match="max_shard_size"):
        made[0].save_pretrained(tmp_path / "out", max_shard_size=size)
    assert not list(tmp_path.iterdir())


def test_a_home_that_does_not_exist_is_a_plain_name(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert made[0].save_pretrained("~no_such_user/out") == tmp_path / "~no_such_user" / "out"


def test_a_folder_without_rights(made, tmp_path):
    """Refused before anything is written, as a user who is not root."""
    with tempfile.TemporaryDirectory() as root:
        Path(root).chmod(0o777)
        folder = made[0].save_pretrained(Path(root) / "out")
        folder.chmod(0o555)
        was_root = os.geteuid() == 0
        try:
            if was_root:
                os.seteuid(65534)
            with pytest.raises(HubError, match="you may not write there"):
                made[1].save_pretrained(folder)
        finally:
            if was_root:
                os.seteuid(0)
            folder.chmod(0o755)
        untouched(folder, made)


def test_a_mount_point_that_holds_a_checkpoint_is_refused(made, folder, monkeypatch):
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) == str(folder))
    with pytest.raises(CheckpointError, match=r"(?s)cannot be swapped.*mount point"):
        made[1].save_pretrained(folder)
    untouched(folder, made)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Kills saves at random instants; fails if a checkpoint was lost.")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        print(kill_saves(Path(root), options.count, options.seed))
