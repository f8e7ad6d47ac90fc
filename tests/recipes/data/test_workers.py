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
from ligermodels.recipes.data import batches
from ligermodels.recipes.data.workers import map_ahead
from tests.processes import Child
from tests.recipes.runs import reached, train

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
FLAGS = ("--max-length", "320", "--accumulation", "1", "--save-steps", "0", "--max-steps", "1000")
SECONDS = 30


def started(home, out, status):
    """A run that has taken two steps, the processes that encode for it, and all that it has started."""
    rows = [[{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": "red or blue " * (20 + n % 3)}]
        for n in range(1500)]  # more than fit into a pipe  # fmt: skip
    (home / "many.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))

    def work():
        os.setsid()
        assert train(home, out, *FLAGS, data="many.jsonl") == status

    child = Child(work)
    reached(out, 2, child)
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


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_to_all_processes_ends_the_run_as_one_to_itself_does(home, number, monkeypatch, capfd):
    monkeypatch.setattr(batches, "encoding_workers", lambda *_, **__: 2)
    out = home / f"all {number}"
    child, _, all_of_it = started(home, out, 130)
    start = time.monotonic()
    os.killpg(child.pid, number)
    assert child.wait() == 0 and time.monotonic() - start < SECONDS
    said = capfd.readouterr().err
    assert "which is saved" in said and "Traceback" not in said and list((out / "checkpoints").glob("step-*"))
    all_end(all_of_it)


def test_a_process_that_is_killed_ends_the_run_with_a_message(home, monkeypatch, capfd):
    monkeypatch.setattr(batches, "encoding_workers", lambda *_, **__: 2)
    monkeypatch.setitem(batches.Batches.__init__.__kwdefaults__, "window", 20)
    child, encoding, all_of_it = started(home, home / "one killed", 3)
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
