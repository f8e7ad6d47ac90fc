"""`ligermodels train` with rows encoded in processes: how these end, and what a run says when they do."""

import collections
import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from ligermodels.errors import TrainingError
from ligermodels.recipes import data
from ligermodels.recipes.workers import map_ahead
from tests.processes import Child
from tests.recipes.runs import metrics, reached, train

fcntl = pytest.importorskip("fcntl")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
FLAGS = ("--max-length", "320", "--accumulation", "1", "--save-steps", "0", "--resume")
SECONDS = 30


@pytest.fixture(scope="module")
def folder(home):
    """`home` with more rows than fit into a pipe when they are encoded ahead."""
    rows = [[{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": "red or blue " * (20 + n % 3)}]
        for n in range(1500)]  # fmt: skip
    (home / "many.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return home


@pytest.fixture(autouse=True)
def two_processes(monkeypatch):
    monkeypatch.setattr(data, "encoding_workers", lambda *_, **__: 2)


def started(folder, out, status=0, group=False):
    """A run that has taken two steps, the processes that encode for it, and all that it has started."""

    def work():
        if group:
            os.setsid()
        assert train(folder, out, *FLAGS, "--max-steps", "1000", data="many.jsonl") == status

    child, before = Child(work), len(metrics(out)) if (out / "metrics.jsonl").is_file() else 0
    reached(out, before + 2, child)
    above = {int(path.name): parent_of(path.name) for path in Path("/proc").glob("[0-9]*")}
    servers = [pid for pid, parent in above.items() if parent == child.pid]
    encoding = [pid for pid, parent in above.items() if parent in servers]
    assert len(encoding) == 2
    return child, encoding, servers + encoding


def parent_of(pid):
    """None of one that has ended, also where nobody has asked for its status yet."""
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state == "Z" else int(parent)
    except (FileNotFoundError, ProcessLookupError):
        return None


def all_end(pids):
    end = time.monotonic() + SECONDS
    while any(parent_of(pid) is not None for pid in pids):
        assert time.monotonic() < end, f"{pids} live on"
        time.sleep(0.01)


@pytest.mark.slow
def test_a_killed_run_leaves_no_lock_and_soon_no_process(folder):
    """A resumed run starts them when it already holds its folder."""
    out = folder / "killed"
    assert train(folder, out, *FLAGS, "--max-steps", "2", data="many.jsonl") == 0
    child, encoding, all_of_it = started(folder, out)
    for pid in encoding:
        os.kill(pid, signal.SIGSTOP)
    child.signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    held = os.open(out, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as the next run does
    os.close(held)
    assert all(parent_of(pid) is not None for pid in encoding)
    for pid in encoding:
        os.kill(pid, signal.SIGCONT)
    all_end(all_of_it)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_to_all_processes_ends_the_run_as_one_to_itself_does(folder, number, capfd):
    out = folder / f"all {number}"
    child, _, all_of_it = started(folder, out, 130, group=True)
    start = time.monotonic()
    os.killpg(child.pid, number)
    assert child.wait() == 0 and time.monotonic() - start < SECONDS
    said = capfd.readouterr().err
    assert "which is saved" in said and "Traceback" not in said and list((out / "checkpoints").glob("step-*"))
    all_end(all_of_it)


def test_a_process_that_is_killed_ends_the_run_with_a_message(folder, monkeypatch, capfd):
    monkeypatch.setitem(data.Batches.__init__.__kwdefaults__, "window", 20)
    child, encoding, all_of_it = started(folder, folder / "one killed", 3)
    os.kill(encoding[0], signal.SIGKILL)
    assert child.wait() == 0
    said = capfd.readouterr().err
    assert f"process {encoding[0]}, which encodes rows, has ended with exit code -9" in said and "Traceback" not in said
    all_end(all_of_it)


def megabytes(item):
    return [list(range(20_000)) for _ in range(10)]


@pytest.mark.slow
def test_a_kill_while_a_process_writes_is_an_error():
    """At random moments, most of which fall into the write of a large result."""
    for _ in range(8):
        others, found = multiprocessing.active_children(), map_ahead(megabytes, itertools.count(), 20, 2)
        next(found)
        process = random.choice([one for one in multiprocessing.active_children() if one not in others])
        threading.Timer(random.random() * 0.3, process.kill).start()
        with pytest.raises(TrainingError, match="exit code -9"):
            collections.deque(found, 0)
