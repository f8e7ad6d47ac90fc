"""The parser of all commands, and checks that need neither torch nor weights, so that a mistake is reported at once."""

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ligermodels.checkpoint import files, hub
from ligermodels.checkpoint.dtypes import dtype_name
from ligermodels.cli.output import say_error
from ligermodels.errors import InputError
from ligermodels.generation.options import Options

_SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


class UsageError(InputError):
    """Options of a command that are wrong: exit status 2."""


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Raises an InputError as a UsageError."""
    try:
        yield
    except InputError as error:
        raise UsageError(str(error)) from None


class Parser(argparse.ArgumentParser):
    """Takes underscores in the names of options as dashes: --max_new_tokens is --max-new-tokens."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        args = list(sys.argv[1:] if args is None else args)
        end = args.index("--") if "--" in args else len(args)
        names = [re.sub(r"^--[\w-]+(?==|$)", lambda found: found[0].replace("_", "-"), text) for text in args[:end]]
        return super().parse_known_args(names + args[end:], namespace)

    def error(self, message: str) -> NoReturn:
        say_error(f"{self.format_usage()}{self.prog}: error: {message}")
        self.exit(2)


def dtype(text: str) -> str:
    """For argparse: torch's name of a dtype, or "auto"; "keep" is "auto"."""
    try:
        return dtype_name("auto" if text == "keep" else text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def check_model(args: argparse.Namespace) -> None:
    """Raises UsageError for options of sampling that cannot be, CheckpointError for a folder without weights."""
    with usage_errors():
        Options(**{name: getattr(args, name, None) for name in _SAMPLING})  # `bench` has none
    folder = Path(os.path.expanduser(args.model))
    if (folder / "config.json").is_file() and not any(folder.glob("*.gguf")):
        files.weights_in(folder, allow_pickle=args.allow_pickle)


def check_source(src: str) -> None:
    """Raises HubError for the path of a folder that is not there."""
    is_path = src.startswith(("/", ".", "~")) or src.count("/") > 1
    if is_path and not os.path.exists(os.path.expanduser(src)):
        hub.resolve(src)
