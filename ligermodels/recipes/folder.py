"""The folder of a run: checks, and the lock against a second run."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ligermodels.checkpoint.files import write_errors
from ligermodels.errors import InputError
from ligermodels.processes import Processes


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
def locked(out: Path, processes: Processes, *, resume: bool) -> Iterator[None]:
    """Makes the folder and locks it. Raises InputError, on all ranks, if another run has locked it."""
    with contextlib.ExitStack() as stack:
        processes.from_main(lambda: _lock(out, resume, stack))
        yield


def _lock(out: Path, resume: bool, stack: contextlib.ExitStack) -> None:
    with write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows
        return
    lock = os.open(out, os.O_RDONLY)  # the system closes it when the process ends, however it ends
    stack.callback(os.close, lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"another process is training in --output-dir {out}; wait until it ends, or end it") from None
    except OSError:  # a file system without locks
        return
    check(out, resume=resume)
    for left in out.glob(".*.saving-*"):  # models that a killed run had not finished writing
        shutil.rmtree(left, ignore_errors=True)
