"""The processes that providers run in: each of its own, so that neither patches nor memory leak."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

ROOT = Path(__file__).parent.parent.parent
READY = "ready to go"


class Child:
    """`python -m benchmarks.train_step ARGUMENTS` for one provider. It starts at once, imports what it needs, and
    waits to be told to go: so imports cost no time of the card, and do not disturb what another one measures."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]):
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "benchmarks.train_step", *arguments]
        self.waits = False
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=dict(environment), stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )

    def ready(self) -> Self:
        """Returns when it waits, or has ended."""
        assert self.process.stdout is not None
        while not self.waits and (line := self.process.stdout.readline()):
            self.waits = line.strip() == READY
        return self

    def go(self, timeout: float) -> str:
        """Why it failed, or "" when it has done its work."""
        try:
            _, errors = self.process.communicate("go\n", timeout=timeout)
        except subprocess.TimeoutExpired:
            self.stop()
            return f"did not finish in {timeout:g} s"
        if self.process.returncode == 0:
            return ""
        print(errors, file=sys.stderr)
        lines = errors.strip().splitlines()
        return (lines[-1] if lines else f"exit code {self.process.returncode}")[:160]

    def stop(self) -> None:
        """Ends it, if it has not ended."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def wait() -> None:
    """In the child: everything is imported; returns when it may go."""
    print(READY, flush=True)
    if not sys.stdin.readline():
        raise SystemExit("the process that started this one is gone")
