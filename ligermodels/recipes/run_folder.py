"""The folder of a run, which one run at a time may write into, and the processes of the run."""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ligermodels.checkpoint.files import write_errors
from ligermodels.checkpoint.saving import replacing
from ligermodels.errors import InputError
from ligermodels.parallel import make_mesh
from ligermodels.processes import Processes
from ligermodels.recipes.options import TrainOptions, flag

OPTIONS = "options.yaml"
"""The file of the options of a run. A folder that has it has a run."""


def start_processes(options: TrainOptions) -> Processes:
    """Joins the processes that torchrun has started; a single one needs no process group."""
    degrees: dict[str, Any] = {name: getattr(options, name) for name in ("dp_replicate", "ep", "cp", "tp")}
    if os.environ.get("WORLD_SIZE", "1") != "1" or dist.is_initialized():
        return Processes.of_mesh(make_mesh(**degrees))
    if name := next((name for name, degree in degrees.items() if degree > 1), None):
        raise InputError(
            f"{name}={degrees[name]} is for several processes, and this is one; run `torchrun --nproc-per-node N -m "
            f"ligermodels train {options.recipe} ...`, or leave {flag(name)} out"
        )
    on_gpu = torch.cuda.is_available()
    return Processes(torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"))


def check_folder(out: Path, *, resume: bool) -> None:
    """Raises InputError if --output-dir cannot be used, or has another run."""
    with write_errors(out):  # of a name that is too long
        above = next(path for path in (out, *out.absolute().parents) if path.is_symlink() or path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise InputError(f"--output-dir {out} cannot be created: {above} is not a writable folder; give another")
    has_run = (out / OPTIONS).is_file()
    if out.is_dir() and any(".saving-" not in path.name for path in out.iterdir()) and not has_run:
        what = "has no run to resume" if resume else "is not empty"
        raise InputError(f"--output-dir {out} {what}; give a folder that is new")
    if has_run and not resume:
        raise InputError(f"--output-dir {out} has a run already; pass --resume to continue it, or give another folder")


def lock_folder(out: Path, stack: contextlib.ExitStack, *, resume: bool) -> None:
    """Makes the folder and locks it until the stack closes. Raises InputError if another run has locked it."""
    with write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    lock = os.open(out, os.O_RDONLY)  # the system closes it when the process ends, however it ends
    stack.callback(os.close, lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"another process is training in --output-dir {out}; wait until it ends") from None
    except OSError:  # a file system without locks
        return
    check_folder(out, resume=resume)
    for unfinished in out.glob(".*.saving-*"):  # models that a killed run had not finished writing
        shutil.rmtree(unfinished, ignore_errors=True)


def read_options(options: TrainOptions) -> dict[str, Any] | None:
    """The options of the run in --output-dir, before this one; None where there is no run."""
    file = Path(options.output_dir) / OPTIONS
    return options.load(file) if file.is_file() else None


def write_options(options: TrainOptions) -> None:
    file = Path(options.output_dir) / OPTIONS
    with write_errors(file), replacing(file, 0, is_file=True) as new:  # a kill leaves the old options, or the new
        (new / file.name).write_text(options.dump(), "utf-8")
