"""The options of this suite: what a run records, the order of the next, packages that are not installed."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from tests.processes import SECONDS
from tests.record import slowest_first

ROOT = Path(__file__).parents[1]


def run(folder, *options):
    """(exit status, output) of pytest over the tests in `folder`, with the options of this suite."""
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", folder, "-p", "tests.conftest", *options]
    done = subprocess.run([*command, folder], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    return done.returncode, done.stdout + done.stderr


def test_a_run_that_is_cut_short_says_what_it_did_not_reach_and_the_next_begins_with_the_slowest(tmp_path):
    lines = ["import os, signal, time"]
    for name in "abcd":
        lines += [f"def test_{name}():", f"    open({str(tmp_path / 'order')!r}, 'a').write('{name}')"]
    lines += ["def test_limit():", "    time.sleep(2)  # until what came out of the others is noted"]
    lines += ["    os.kill(os.getppid(), signal.SIGTERM)", "    time.sleep(60)"]
    lines += ["def test_last(): assert False"]
    (tmp_path / "test_it.py").write_text("\n".join(lines))
    before = {"not reached": ["test_it.py::test_d"], "seconds": {"test_it.py::test_c": 9.0}}
    (tmp_path / "record.json").write_text(json.dumps(before))
    status, output = run(tmp_path, "-n", "1", "--dist", "worksteal", "--record", tmp_path / "record.json")
    assert status == 2, output
    assert (tmp_path / "order").read_text() == "cdab"
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["not reached"] == ["test_it.py::test_limit", "test_it.py::test_last"]
    assert (record["passed"], record["failed"], record["failures"], record["seconds"]) == (4, 0, [], {})


def test_slow_tests_are_dealt_to_the_processes(tmp_path):
    (tmp_path / "record.json").write_text(json.dumps({"not reached": ["g"], "seconds": {"b": 20, "d": 90, "f": 50}}))
    items = [SimpleNamespace(nodeid=name) for name in "abcdefghi"]
    slowest_first(items, str(tmp_path / "record.json"), 2)  # blocks of 4 and 5
    assert "".join(item.nodeid for item in items) == "fgac" + "dbehi"


def test_a_package_that_is_not_installed_fails_a_run_that_needs_all(tmp_path):
    (tmp_path / "test_it.py").write_text("import pytest\npytest.importorskip('no_such_package')")
    (tmp_path / "test_other.py").write_text("def test_it(): pass")
    status, output = run(tmp_path)
    assert status == 0 and "\n1 skipped: could not import 'no_such_package'" in output, output
    status, output = run(tmp_path, "--all-packages")
    assert status == 1 and "\n1 skipped: could not import 'no_such_package'" in output, output
