"""The record of `make gpu`: what came out, which tests are slow, which were not reached; it orders the next run."""

import collections
import itertools
import json
import signal
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.harness import environment

SLOW = 10
"""Seconds from which on a test is listed: about as much is lost at the end, since the others run in any order."""


def seconds_in(path: str) -> dict[str, float]:
    """{slow test of an earlier run: its seconds}, and a little for those that it did not reach."""
    if not Path(path).exists():
        return {}
    record = json.loads(Path(path).read_text("utf-8"))
    return dict.fromkeys(record["not reached"], 0.1) | record["seconds"]


def slowest_first(items: list[pytest.Item], path: str, processes: int) -> None:
    """Orders tests for `--dist worksteal`, which hands each process a block and lets idle ones take from their ends.

    A block begins with its share of the slow tests of an earlier run, longest first, and of those that it did not
    reach; the others stay in their order, since tests of a file share checkpoints and compiled kernels. So a run that
    is cut short loses the cheapest.
    """
    seconds, ordered = seconds_in(path), list[pytest.Item]()
    slow = sorted((item for item in items if item.nodeid in seconds), key=lambda item: -seconds[item.nodeid])
    others = iter([item for item in items if item.nodeid not in seconds])
    for process in range(processes):
        size = (len(items) - len(ordered)) // (processes - process)  # as pytest-xdist divides them
        share = slow[processes - 1 - process :: processes]
        ordered += [*share, *itertools.islice(others, size - len(share))]
    items[:] = ordered


class Record:
    """A plugin that writes the record when the run ends, also after Ctrl-C or SIGTERM."""

    def __init__(self, path: str):
        self._path, self._selected, self._reached = path, [], set()
        self._seconds: dict[str, float] = collections.defaultdict(float)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._environment = environment(device) | {"command": "pytest " + " ".join(sys.argv[1:])}
        signal.signal(signal.SIGTERM, self._terminate)

    def _terminate(self, number, frame):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` and make may send a second one
        raise KeyboardInterrupt("SIGTERM")

    def pytest_collection_finish(self, session):
        self._selected = [item.nodeid for item in session.items]

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        self._selected = ids

    def pytest_runtest_logreport(self, report):
        self._seconds[report.nodeid] += report.duration
        if report.when != "setup" or not report.passed:
            self._reached.add(report.nodeid)

    @pytest.hookimpl(tryfirst=True)  # before the processes are waited for
    def pytest_sessionfinish(self, session):
        if not self._selected:
            return
        outcomes = session.config.pluginmanager.get_plugin("terminalreporter").stats
        not_reached = [name for name in self._selected if name not in self._reached]
        before = {name: time for name, time in seconds_in(self._path).items() if name in not_reached}
        seconds = before | {name: round(time, 1) for name, time in self._seconds.items() if name in self._reached}
        slow = {name: time for name, time in seconds.items() if time > SLOW}
        record = {
            "environment": self._environment,
            **{name: len(outcomes.get(name, ())) for name in ("passed", "failed", "error", "skipped")},
            "failures": sorted({report.nodeid for name in ("failed", "error") for report in outcomes.get(name, ())}),
            "not reached": not_reached,
            "seconds": dict(sorted(slow.items(), key=lambda item: -item[1])),
        }
        Path(self._path).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")
