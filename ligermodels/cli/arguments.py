"""The parser of all commands, and the error of wrong options."""

import argparse
import contextlib
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from ligermodels.checkpoint.dtypes import dtype_name
from ligermodels.cli.output import say_error
from ligermodels.errors import InputError, did_you_mean
from ligermodels.recipes.options import nearest


class UsageError(InputError):
    """Wrong options of a command: exit status 2."""


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turns an InputError into a UsageError."""
    try:
        yield
    except InputError as error:
        raise UsageError(str(error)) from None


class Parser(argparse.ArgumentParser):
    """The parser of a command. Takes underscores in the names of options as dashes, and no abbreviated names."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        args = list(sys.argv[1:] if args is None else args)
        if not args and self._subparsers is not None:
            self.print_help(sys.stderr)
            self.exit(2)
        end = args.index("--") if "--" in args else len(args)
        names = [re.sub(r"^--[\w-]+(?==|$)", lambda name: name[0].replace("_", "-"), text) for text in args[:end]]
        parsed, rest = super().parse_known_args(names + args[end:], namespace)
        if rest and self._subparsers is None:  # not of a command that has commands: theirs say more
            self.refuse(rest)
        return parsed, rest

    def refuse(self, rest: Sequence[str]) -> NoReturn:
        """Ends with the error for arguments that the command does not have."""
        flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        near = nearest(rest[0].partition("=")[0], flags) if rest[0].startswith("--") else ""
        if not rest[0].startswith("-") and "--prompt" in flags:
            near = f"--prompt {shlex.quote(rest[0])}"
        advice = f"did you mean {near}?" if near else f"`{self.prog} --help` lists all"
        self.error(f"unrecognized arguments: {' '.join(rest)}; {advice}")

    def error(self, message: str) -> NoReturn:
        if choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            message += did_you_mean(choice[1], re.findall(r"[\w-]+", choice[2]))
        say_error(f"{self.format_usage()}{self.prog}: error: {message}")
        self.exit(2)


def dtype(text: str) -> str:
    """For argparse: torch's name of a dtype, or "auto"; "keep" is "auto"."""
    try:
        return dtype_name("auto" if text == "keep" else text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
