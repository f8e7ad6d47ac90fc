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


class Home:
    def open_door(self, name: str):
        """Opens a door.

        Args:
            name: Which door.
        """

    @classmethod
    def close(cls, name: str = "front") -> str:
        """Closes.

        Args:
            name: Which door
        """
        return name


def all_types(
    a: str,
    b: int,
    c: float,
    d: bool,
    e: list,
    f: list[str],
    g: dict,
    h: dict[str, list[int]],
    i: str | None,
    j: Union[str, float, bool, int],  # noqa: UP007
    k: int | list[str] | None,
    l: Literal["x", "y"],  # noqa: E741
    m: Literal["x", 1, None],
    n: tuple,
    o: tuple[int, str],
    p: Any,
    q: Size,
    r: Optional[float] = None,  # noqa: UP045
    s: int | int | None = 3,
    t: "list[dict[str, Size]] | None" = None,
    u: list | tuple = (),
) -> dict[str, float] | None:
    """Does much.

    On two lines,
      one indented.

    Args:
        a: first
        b: second: with a colon
        c: third
            over: two lines

            and a blank one
        d: fourth
        e: e (choices: [1, 2])
        f: f  (choices: [" x ", "y"])
        g: g (Choices: ["a"])
        h: h
        i: i
        j: j
        k: k
        l: l
        m: m
        n: n
        o: o
        p: p
        q: q
        r: r
        s: s
        t: t
        u: u

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


def unknown_return(a: int) -> Home:
    """Has a return type without a schema.

    Args:
        a: A number.

    Raises:
        KeyError: sometimes
    """
    raise KeyError(a)


FUNCTIONS = [all_types, no_arguments, unknown_return, Home.open_door, Home().open_door, Home.close]


@pytest.mark.parametrize("function", [*FUNCTIONS, templates.find, templates.is_at_home])
def test_schemas_are_those_of_transformers(function):
    assert json.dumps(function_schema(function)) == json.dumps(get_json_schema(function))


def test_types_in_the_docstring():
    def add(x, y):
        """Adds.

        Args:
            x (int): The first.
            y (`list[int]`, *optional*): The second.
        """

    add.__annotations__ = {"x": int, "y": int}
    properties = function_schema(add)["function"]["parameters"]["properties"]
    assert [schema["description"] for schema in properties.values()] == ["The first.", "The second."]


def described(hint, docstring="Does.\n\nArgs:\n    a: An argument"):
    def tool(a):
        return a

    tool.__doc__ = docstring
    tool.__annotations__ = {"a": hint} if hint else {}
    return tool


class Empty(enum.Enum):
    pass


@pytest.mark.parametrize(
    ("hint", "docstring", "message"),
    [
        (int, None, "the tool tool has no docstring"),
        (int, "Does.", "does not describe the argument a"),
        (int, "Does.\n\nArgs:\n    b: Another", "does not describe the argument a"),
        (None, "Does.\n\nArgs:\n    a: An argument", "the argument a of the tool tool has no type hint"),
        (int, "Does.\n\nArgs:\n    a: An argument (choices: [1, )", r"choices of the argument a .* not a JSON list"),
    ],
)
def test_functions_that_say_too_little(hint, docstring, message):
    with pytest.raises(InputError, match=message):
        function_schema(described(hint, docstring))


@pytest.mark.parametrize(
    "hint", [Home, tuple[int], tuple[int, ...], list[Home], Literal[b"a"], Empty, set[int], int | Home, "Nowhere"]
)
def test_hints_without_a_schema(hint):
    with pytest.raises(InputError, match=r"type hint|must be str"):
        function_schema(described(hint))
    with pytest.raises(Exception):  # noqa: B017
        get_json_schema(described(hint))
