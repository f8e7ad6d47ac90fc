"""The folder of a run: checks, the lock against a second run, and options.yaml."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ligermodels.checkpoint.files import write_errors
from ligermodels.errors import InputError
from ligermodels.recipes.options import TrainOptions


def check(out: Path, *, resume: bool) -> None:
    """Raises InputError if --output-dir cannot be used, or has another run."""
    if out.exists() and not out.is_dir():
        raise InputError(f"--output-dir {out} is a file; give a folder")
    if out.is_dir() and any(out.iterdir()):
        if not (out / "options.yaml").is_file():
            what = "has no run to resume" if resume else "is not empty"
            raise InputError(f"--output-dir {out} {what}; give a folder that is new")
        if not resume:
            raise InputError(
                f"--output-dir {out} has a run already; pass --resume to continue it, or give another folder"
            )
    above = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise InputError(f"--output-dir {out} cannot be written, since {above} cannot; give another folder")


@contextlib.contextmanager
def lock(out: Path, options: TrainOptions, processes: Any) -> Iterator[None]:
    """Makes the folder and locks it. Raises InputError, on all ranks, if another run has locked it."""
    lock: int | None = None

    def take() -> None:
        nonlocal lock
        with write_errors(out):
            out.mkdir(parents=True, exist_ok=True)
        try:
            import fcntl
        except ImportError:  # Windows
            return
        lock = os.open(out, os.O_RDONLY)  # the system closes it when the process ends, however it ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"another process is training in --output-dir {out}; wait until it ends, or end it"
            ) from None
        except OSError:  # a file system without locks
            return
        check(out, resume=options.resume)
        for left in out.glob(".*.saving-*"):  # models that a killed run had not finished writing
            shutil.rmtree(left, ignore_errors=True)

    try:
        processes.from_main(take)
        yield
    finally:
        if lock is not None:
            os.close(lock)


def read_options(out: Path, options: TrainOptions) -> dict[str, Any] | None:
    """The options of the run in the folder, or None. Raises InputError if it is a run of another recipe."""
    file = out / "options.yaml"
    return type(options).load(file) if file.is_file() else None


def write_options(out: Path, options: TrainOptions, *, replace: bool) -> None:
    """replace: write over options that are there."""
    file = out / "options.yaml"
    if replace or not file.is_file():
        with write_errors(out):
            file.write_text(options.dump(), "utf-8")
