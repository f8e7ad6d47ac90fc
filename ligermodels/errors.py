"""The errors that a user can cause. A message says what is wrong, where, the likely cause and the next step."""

import contextlib
import difflib
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

REPOSITORY = "https://github.com/ligermodels/ligermodels"


def page(name: str) -> str:
    """The address of a page of docs/, which the installed package does not have: page("options.md")."""
    return f"{REPOSITORY}/blob/main/docs/{name}"


class LigermodelsError(Exception):
    """Base of every error that ligermodels raises on purpose."""


class ConfigError(LigermodelsError, ValueError):
    """A config.json that is incomplete, contradicts itself, or asks for something that is not computed."""


class CheckpointError(LigermodelsError, ValueError):
    """Weight files that are missing, damaged, or do not match the model."""


class MismatchError(CheckpointError):
    """Weights that do not fit the model of their config, or a conversion whose result differs from its source."""


class HubError(LigermodelsError, OSError):
    """A repository or folder that cannot be found, reached or read."""


class TokenizerError(LigermodelsError, ValueError):
    """Tokenizer files or chat templates that cannot be used."""


class InputError(LigermodelsError, ValueError):
    """Tensors or arguments of a call that do not fit together."""


class TrainingError(LigermodelsError, ArithmeticError):
    """A loss or a gradient that is not a finite number, or a process of a run that has died."""


@contextlib.contextmanager
def config_of(folder: str | Path) -> Iterator[None]:
    """Adds the folder of the config.json to ConfigErrors of the block that do not name it."""
    try:
        yield
    except ConfigError as error:
        if str(folder) not in str(error):
            error.add_note(f"  The config.json is that of {folder}.")
        raise


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message that suggests the nearest known name; "" if none is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


_warned: set[str] = set()


def is_new(reason: str) -> bool:
    """Whether `warn_once` has not warned for this reason yet: saves making a text that will not be shown."""
    return reason not in _warned


def warn_once(reason: str, text: str) -> None:
    """warnings.warn(text), once in a process for each reason."""
    if is_new(reason):
        _warned.add(reason)
        warnings.warn(text, stacklevel=3)
