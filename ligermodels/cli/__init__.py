"""The command line. Results go to stdout, messages and speeds to stderr.

Exit status: 0 done, 1 `doctor` found something to fix, `demo` failed, or `convert` or `verify` found a mismatch,
2 wrong usage, 3 an error of ligermodels, printed as one message without a traceback, 130 interrupted. `inspect`,
`convert` and `verify` distinguish more: see `_EPILOG` in checkpoints.py.
Each command imports what it needs, so that --help does not import torch.
"""

import argparse
import os
import sys
import warnings

from ligermodels import __version__
from ligermodels.cli import chat, checkpoints, doctor
from ligermodels.cli.output import say
from ligermodels.errors import LigermodelsError


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    args = _parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows '?', not a traceback
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="strict")  # a file that is no text is named, whatever the locale
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}")
        try:
            status = args.run(args)
            sys.stdout.flush()
            return status
        except LigermodelsError as error:
            say("\n".join([f"error: {error}", *getattr(error, "__notes__", ())]))
            return args.status(error) if "status" in args else 3
        except KeyboardInterrupt as stop:
            say("\n".join(["", *getattr(stop, "__notes__", ())]))
            return 130
        except BrokenPipeError:  # the reader of stdout has exited, as `| head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ligermodels",
        description="Language models built from fused Triton layers.",
        epilog="ligermodels COMMAND --help says more.",
    )
    parser.add_argument("--version", action="version", version=f"ligermodels {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="train, save, reload and run a small model: no GPU, no network")
    demo.add_argument("--seconds", type=float, default=20.0, help="time for training (default 20)")
    demo.add_argument("--keep", metavar="DIR", help="folder for the trained checkpoint (default: a temporary one)")
    demo.set_defaults(run=_demo)

    chat.add(commands)
    checkpoints.add(commands)
    doctor.add(commands)
    return parser


def _demo(args: argparse.Namespace) -> int:
    from ligermodels.cli import demo

    return 0 if demo.run(seconds=args.seconds, keep=args.keep) else 1
