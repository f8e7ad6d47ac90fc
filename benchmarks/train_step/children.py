"""The processes that providers run in: each of its own, so that neither patches nor memory leak."""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from benchmarks.common import write_json

ROOT = Path(__file__).parent.parent.parent
READY = "ready to go"
RESULT = "found.json"


class Child:
    """`python -m benchmarks.train_step ARGUMENTS` for one provider. It starts at once, imports what it needs, and
    waits to be told to go on, once or several times: what need not be done alone, all do at the same time, and nothing
    of it disturbs what another one measures."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]):
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "benchmarks.train_step", *arguments]
        self.waits, self.late = False, ""
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # a pipe that nobody reads is full at 64 KiB
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=dict(environment), stdin=pipe, stdout=pipe, stderr=self.errors, text=True
        )

    def ready(self, timeout: float | None = None) -> Self:
        """Returns when it waits, or has ended; after `timeout` seconds it is ended."""
        assert self.process.stdout is not None

        def end() -> None:
            self.late = f"did not finish in {timeout:g} s"
            self.process.kill()

        timer = threading.Timer(timeout or 0.0, end)
        try:
            if timeout is not None and not self.waits:
                timer.start()
            while not self.waits and (line := self.process.stdout.readline()):
                self.waits = line.strip() == READY
        finally:
            timer.cancel()
        return self

    def proceed(self) -> None:
        """Lets it go on to where it waits next, which `ready` says."""
        assert self.process.stdin is not None
        self.waits = False
        with contextlib.suppress(BrokenPipeError):  # `go` says why it has ended
            self.process.stdin.write("go\n")
            self.process.stdin.flush()

    def go(self, timeout: float) -> str:
        """Why it failed, or "" when it has done its work."""
        try:
            self.process.communicate("go\n", timeout=timeout)
        except subprocess.TimeoutExpired:
            self.stop()
            return f"did not finish in {timeout:g} s"
        with self.errors:
            self.errors.seek(0)
            errors = self.errors.read()
        if self.process.returncode == 0:
            return ""
        print(errors, file=sys.stderr)
        if self.late:
            return self.late
        lines = errors.strip().splitlines()
        return (lines[-1] if lines else f"exit code {self.process.returncode}")[:160]

    def stop(self) -> None:
        """Ends it, if it has not ended."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        self.errors.close()


def wait() -> None:
    """In the child: returns when it may go on."""
    print(READY, flush=True)
    if not sys.stdin.readline():
        raise SystemExit("the process that started this one is gone")


def tell(folder: Path, found: Mapping[str, Any]) -> None:
    """In the child: what it has found so far, which stays if it comes to no end."""
    write_whole(folder / RESULT, found)


def write_whole(path: Path, record: Mapping[str, Any]) -> None:
    """`write_json`, of which nobody ever sees a part: who is ended meanwhile leaves what was there before."""
    aside = path.with_name(f".{path.name}.part")
    write_json(aside, record)
    os.replace(aside, path)
