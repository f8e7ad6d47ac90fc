"""What one step of a chat template may cost: see `ligermodels.text.sandbox`, which asks before each step."""

import itertools
import re
from typing import Any

MAX_CHARS = 2**25
MAX_ITEMS = 1_000_000
MAX_BITS = 10_000

# A width in a format string of seven digits or more, or one taken from the arguments.
_WIDE_FORMAT = re.compile(r"\d{7}|%[^a-zA-Z%]*\*|\{[^{}]*:[^{}]*\{")


class TooMuch(Exception):
    """A limit is reached."""


def printable(value: Any) -> Any:
    """Refuses a structure that is endless on paper, as a list that holds another one twice, and so on."""
    if isinstance(value, list | tuple | dict):
        stack, items, chars = [value], 0, 0
        while stack:
            item = stack.pop()
            items += 1
            if isinstance(item, str):
                chars += len(item)
            elif isinstance(item, dict):
                stack += itertools.chain(item.keys(), item.values())
            elif isinstance(item, list | tuple):
                stack += item
            if items > MAX_ITEMS or chars > MAX_CHARS:
                raise TooMuch(f"a printed structure of more than {MAX_ITEMS:,} items or {MAX_CHARS:,} characters")
    return value


def check_operation(operator: str, left: Any, right: Any) -> None:
    """Refuses a result that is too large, before it is computed."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length()
        if operator == "**":
            bits = left.bit_length() * max(right, 1)
        if bits > MAX_BITS:
            raise TooMuch(f"an integer of more than {MAX_BITS:,} bits")
    elif operator == "*":
        sized, times = (left, right) if isinstance(right, int) else (right, left)
        if isinstance(times, int) and hasattr(sized, "__len__") and len(sized) * times > MAX_CHARS:
            raise TooMuch(f"a repetition of more than {MAX_CHARS:,} items")
    elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        if len(left) + len(right) > MAX_CHARS:
            raise TooMuch(f"a sum of more than {MAX_CHARS:,} items")
    elif operator == "%" and isinstance(left, str):
        check_string_call("format", left, right if isinstance(right, tuple) else (right,))


def check_string_call(name: str, text: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Refuses text.name(*args) if it could pass MAX_CHARS. Returns args, iterators read into lists."""
    if name == "join" and args:
        args = (list(args[0]), *args[1:])
    for arg in args:
        printable(arg)
    widths = [arg for arg in args if isinstance(arg, int)]
    lengths = [len(arg) for arg in args if isinstance(arg, str)]
    size = 0
    if name in ("center", "ljust", "rjust", "zfill"):
        size = max(widths, default=0)
    elif name == "expandtabs":
        size = text.count("\t") * max(widths, default=8)
    elif name == "replace" and len(lengths) >= 2:
        size = len(text) + text.count(args[0]) * len(args[1])
    elif name == "indent":
        size = len(text) + (text.count("\n") + 1) * max([*widths, *lengths], default=4)
    elif name == "wordwrap":
        size = len(text) * (1 + max(lengths, default=1))
    elif name == "translate" and args and isinstance(args[0], dict):
        size = len(text) * max((len(v) for v in args[0].values() if isinstance(v, str)), default=1)
    elif name == "join" and args:
        size = len(text) * len(args[0]) + sum(len(part) for part in args[0] if isinstance(part, str))
    elif name in ("format", "format_map") and _WIDE_FORMAT.search(text):
        raise TooMuch("a format with a width of seven digits, or with one taken from its arguments")
    if size > MAX_CHARS:
        raise TooMuch(f"a string of more than {MAX_CHARS:,} characters from {name}()")
    return args
