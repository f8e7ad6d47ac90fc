"""Schemas of Python functions against transformers' own, key order included, and what is refused."""

import enum
import json
from typing import Any, Literal, Optional, Union

import pytest
from transformers.utils import get_json_schema

from ligermodels.errors import InputError
from ligermodels.text.function_schema import function_schema
from tests.text import templates


class Size(enum.Enum):
    SMALL = "small"
    LARGE = 2


class Empty(enum.Enum):
    pass


class Home:
    @classmethod
    def close(cls, name: str = "front") -> "Home":
        """Closes; its return type has no schema.

        Args:
            name: Which door

        Raises:
            KeyError: sometimes
        """


def tool(hint, docstring="Does.\n\nArgs:\n    a: An argument", default=None):
    """A function of an argument `a`."""

    def tool(a):
        return a

    tool.__doc__, tool.__defaults__ = docstring, default and (default,)
    tool.__annotations__ = {} if hint is None else {"a": hint}
    return tool


def documented(a: str, b: int = 1, c: str = "x", d: list[str] | None = None) -> dict[str, float] | None:
    """Does much.

    On two lines,
      one indented.

    Args:
        a: first: with a colon
        b: second
            over: two lines

            and a blank one (choices: [1, 2])
        c: c  (Choices: [" x ", "y"])
        d: d

    Returns:
        A dict
          of numbers.

    Raises:
        ValueError: never
    """


def no_arguments():
    """Nothing to say.

    Returns:
        Nothing.
    """


HINTS = [
    *(str, int, float, bool, list, list[str], dict, dict[str, list[int]], tuple, tuple[int, str], Any, Size),
    *(str | None, Union[str, float, bool, int], int | list[str] | None, Optional[float], int | int | None),  # noqa: UP007, UP045
    *(Literal["x", "y"], Literal["x", 1, None], "list[dict[str, Size]] | None", list | tuple),
]


WITHOUT_A_SCHEMA = (Home, tuple[int, ...], list[Home], Literal[b"a"], Empty, set[int], int | Home, "No")


@pytest.mark.parametrize(
    "function",
    [
        *(documented, no_arguments, Home.close, Home().close, templates.find),
        *map(tool, HINTS),
        tool(int, default=3),
    ],
)
def test_schemas_are_those_of_transformers(function):
    assert json.dumps(function_schema(function)) == json.dumps(get_json_schema(function))


def test_types_in_the_docstring():
    """As in "x (int): ...", which transformers does not take."""
    for entry in ("a (int): An argument", "a (`list[int]`, *optional*): An argument"):
        schema = function_schema(tool(int, f"Adds.\n\nArgs:\n    {entry}"))
        assert schema["function"]["parameters"]["properties"]["a"]["description"] == "An argument"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (tool(int, None), "the tool tool has no docstring"),
        (tool(int, "Does.\n\nArgs:\n    b: Another"), "does not describe the argument a"),
        (tool(None), "the argument a of the tool tool has no type hint"),
        (tool(int, "Does.\n\nArgs:\n    a: An (choices: [1, )"), r"choices of the argument a .* not a JSON list"),
        *((tool(hint), r"type hint|must be str") for hint in WITHOUT_A_SCHEMA),
    ],
)
def test_functions_without_a_schema(function, message):
    with pytest.raises(InputError, match=message):
        function_schema(function)
    with pytest.raises(Exception):  # noqa: B017
        get_json_schema(function)
