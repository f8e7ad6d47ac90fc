"""Several runs beside each other on one card: what of them goes on together, and what is timed alone."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


class Turn:
    """Of a run among those that share a lock file. Without one there are no others."""

    def __init__(self, path: str | Path | None = None):
        self.path = Path(path) if path else None

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """When nothing is timed, beside others for which that holds."""
        with self._locked("LOCK_SH"):
            yield

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """When no other one is in `together` or `alone`."""
        with self._locked("LOCK_EX"):
            yield

    @contextlib.contextmanager
    def _locked(self, kind: str) -> Iterator[None]:
        if self.path is None:
            yield
            return
        import fcntl  # not on Windows

        with self.path.open("a") as file:  # that it is closed ends it
            fcntl.flock(file, getattr(fcntl, kind))
            yield
