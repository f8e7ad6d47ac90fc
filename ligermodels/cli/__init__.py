"""The command line. Results go to stdout, messages and speeds to stderr.

Exit status: 0 done; 1 `doctor` found something to fix, `demo` failed, or `inspect`, `convert` or `verify` found a
mismatch; 2 wrong options; 3 another error of ligermodels, printed as one message without a traceback; 130 interrupted.
Each command imports what it needs, so that --help does not import torch.
"""

import argparse
import errno
import math
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from ligermodels import __version__
from ligermodels.checkpoint.files import write_errors
from ligermodels.cli import bench, chat, checkpoints, doctor, evaluate, plan, train
from ligermodels.cli.arguments import Parser, UsageError
from ligermodels.cli.output import say, say_error
from ligermodels.errors import LigermodelsError, MismatchError, page


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the caller has closed it, as `<&-` does
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # for the whole command
    args = _parser(argv[0] if argv else "").parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows '?' in place of a traceback
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="strict")  # a file that is not text is an error in every locale
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}")
        try:
            status = args.run(args)
            sys.stdout.flush()
            return status
        except LigermodelsError as error:
            say_error("\n".join([f"error: {error}", *getattr(error, "__notes__", ())]))
            return 1 if isinstance(error, MismatchError) else 2 if isinstance(error, UsageError) else 3
        except KeyboardInterrupt as stop:
            say("\n".join(["", *getattr(stop, "__notes__", ())]))
            return 130
        except BrokenPipeError:  # the reader of stdout has exited, as `| head` does
            _discard_output()
            return 0
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            say_error(f"error: {_full_file(error)} cannot be written: no space is left on its disk")
            return 3


def _full_file(error: OSError) -> str:
    """The file for which no space was left, as far as the system says: an error of writing names none."""
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()
        return error.filename or "the output"
    return error.filename or "a file (of the output folder, a cache or the temporary folder; `df` shows which)"


def _discard_output() -> None:
    """What stdout still holds, or gets, goes nowhere: Python would write it at its end, and fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_MODULES: dict[str, Any] = {
    "generate": chat, "chat": chat, "train": train, "bench": bench, "inspect": checkpoints, "convert": checkpoints,
    "verify": checkpoints, "eval": evaluate, "doctor": doctor, "plan": plan,
}  # fmt: skip


def _parser(command: str = "") -> argparse.ArgumentParser:
    """The parser of a command, or of all of them."""
    parser = Parser(
        prog="ligermodels",
        description="Language models built from fused Triton layers.",
        epilog=f"`ligermodels COMMAND --help` shows the options of a command. Documentation: {page('README.md')}",
    )
    parser.add_argument("--version", action="version", version=f"ligermodels {__version__}")
    commands: Any = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="train, save, load and run a small model, without GPU or network")
    demo.add_argument("--seconds", type=float, default=20.0, metavar="X", help="training time (20)")
    demo.add_argument("--keep", metavar="DIR", help="folder for the trained checkpoint (a temporary one)")
    demo.set_defaults(run=_demo)

    for module in [_MODULES[command]] if command in _MODULES else dict.fromkeys(_MODULES.values()):
        module.add(commands)
    return parser


def _demo(args: argparse.Namespace) -> int:
    keep = None if args.keep is None else Path(os.path.expanduser(args.keep))
    if not 0 < args.seconds < math.inf:
        raise UsageError(f"--seconds {args.seconds} must be a positive number")
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise UsageError(f"--keep {keep} exists and is not an empty folder: name a new folder")
    folder = (keep or Path(tempfile.mkdtemp(prefix="ligermodels-demo-"))).resolve()
    with write_errors(folder):  # before the training, not after it
        folder.mkdir(parents=True, exist_ok=True)
    from ligermodels.cli import demo

    return 0 if demo.run(seconds=args.seconds, folder=folder) else 1
