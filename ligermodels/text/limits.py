"""What a chat template may use up: see `ligermodels.text.sandbox`, which asks here at each step.

Those of the whole rendering and of a value grow with what the caller hands in, which is not the template's doing.
"""

import re
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

MAX_STEPS = 2_000_000
MAX_SECONDS = 1.0
MAX_SIZE = 2**18
MAX_BYTES = 20 * 2**20
MAX_DEPTH = 100
MAX_BITS = 10_000
MAX_NUMBER = 100_000
MAX_ARGUMENTS = 200
# Characters for what costs a microsecond and more for each of them, or grows with their square.
MAX_SLOW = 2**15

SLOW = ("pprint", "striptags", "title", "urlize", "wordcount", "wordwrap", "xmlattr")
# What a value takes beside itself: in the account, or as the attributes of an object.
_ENTRY = 400
# A width in a format string that is taken from the arguments.
_OPEN_WIDTH = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*:[^{}]*\{")


class TooMuch(Exception):
    """A limit is reached."""


class Account:
    """What one rendering uses. given: the characters and items of its messages, tools and variables.

    The size of a value is that of its text, about: characters and items, of what is in it twice counted twice.
    So nothing can be made whose printing, comparison or hash takes long, or the stack.
    """

    def __init__(self, given: int) -> None:
        self.largest = MAX_SIZE + 4 * given
        self._memory = MAX_BYTES + 16 * given
        self._most_steps = MAX_STEPS + given
        self._bytes = self._steps = self._look = 0
        self._seconds = MAX_SECONDS + given / 10_000_000
        self._until = time.thread_time() + self._seconds
        # id -> (value, size, depth) of what was made, in this order; holds the value, so that the id stays its own.
        self._known: dict[int, tuple[Any, int, int]] = {}

    def step(self, count: int = 1) -> None:
        self._steps += count
        if self._steps > self._most_steps:
            raise TooMuch(f"more than {self._most_steps:,} steps (loop turns and calls)")
        if self._steps >= self._look:
            self._look = self._steps + 8
            if time.thread_time() > self._until:
                raise TooMuch(f"more than {self._seconds:.1f} seconds of computing")

    def made(self, value: Any) -> Any:
        """Takes a new value into the account. Raises TooMuch for one that is too large."""
        if isinstance(value, str):
            if len(value) > self.largest:
                raise TooMuch(f"a string of more than {self.largest:,} characters")
            self._keep(value, len(value), 0)
        elif isinstance(value, list | tuple | dict):
            self.measure(value)
        elif isinstance(value, int):
            check_bits(value.bit_length())
        elif isinstance(value, Iterator):
            return map(self.made, value)
        elif value is not None and not isinstance(value, float):
            self._keep(value, 1, 0)
        return value

    def measure(self, value: Any) -> tuple[int, int]:
        """(size, depth) of any value."""
        if not isinstance(value, list | tuple | dict):
            return (len(value) + 1 if isinstance(value, str) else 1), 0
        if found := self._known.get(id(value)):
            return found[1:]
        size, depth = 1, 0
        for part in chain(value, value.values()) if isinstance(value, dict) else value:
            more, below = self.measure(part)
            size, depth = size + more, max(depth, below)
        if size > self.largest or depth >= MAX_DEPTH:
            raise TooMuch(f"a structure of more than {self.largest:,} characters and items, or {MAX_DEPTH} deep")
        self._keep(value, size, depth + 1)
        return size, depth + 1

    def _keep(self, value: Any, size: int, depth: int) -> None:
        self._known[id(value)] = value, size, depth
        self._bytes += sys.getsizeof(value) + _ENTRY
        if self._bytes > self._memory:
            self._sweep()

    def _sweep(self) -> None:
        """Forgets the values that nothing else holds."""
        kept = []
        while self._known:
            # The last one first: what holds others was made after them.
            entry = self._known.popitem()[1]
            if sys.getrefcount(entry[0]) > 2:  # the entry and the argument
                kept.append(entry)
        self._known = {id(entry[0]): entry for entry in reversed(kept)}
        self._bytes = sum(sys.getsizeof(entry[0]) + _ENTRY for entry in kept)
        if self._bytes > self._memory // 2:
            raise TooMuch(f"more than {self._memory // 2:,} bytes in values")

    def check_operation(self, operator: str, left: Any, right: Any) -> None:
        """Refuses a result that is too large, before it is computed."""
        if isinstance(left, str) and operator != "*":
            if operator == "%":
                self.check_string_call("format", left, (right,))
            elif isinstance(right, str) and len(left) + len(right) > self.largest:
                raise TooMuch(f"a sum of more than {self.largest:,} characters")
        elif isinstance(left, int) and isinstance(right, int):
            times = max(right, 1) if operator == "**" else 1
            check_bits(left.bit_length() * times + (0 if operator == "**" else right.bit_length()))
        elif operator == "*":
            sized, times = (left, right) if isinstance(right, int) else (right, left)
            size = len(sized) if isinstance(sized, str) else self.measure(sized)[0]
            if isinstance(times, int) and times > 1 and size * times > self.largest:
                raise TooMuch(f"a repetition of more than {self.largest:,} characters and items")
        elif operator == "+" and self.measure(left)[0] + self.measure(right)[0] > self.largest:
            raise TooMuch(f"a sum of more than {self.largest:,} characters and items")

    def check_string_call(self, name: str, text: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Refuses text.name(*args) if it could be too large or slow. Returns args, iterators read into lists."""
        if name in SLOW and len(text) > MAX_SLOW:
            raise TooMuch(f"more than {MAX_SLOW:,} characters handed to {name}")
        if name == "join" and args:
            args = (self.made(list(args[0])), *args[1:])
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
            size = len(text) * len(args[0]) + self.measure(args[0])[0]
        elif name in ("format", "format_map"):
            if _OPEN_WIDTH.search(text):
                raise TooMuch("a format with a width that is taken from its arguments")
            fields = text.count("{") + text.count("%")
            widths = [int(digits) for digits in re.findall(r"\d{1,9}", text)]
            size = len(text) + sum(widths) + fields * max((self.measure(arg)[0] for arg in args), default=0)
        if size > self.largest:
            raise TooMuch(f"a string of more than {self.largest:,} characters from {name}()")
        return args


def check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TooMuch(f"an integer of more than {MAX_BITS:,} bits")


def join(parts: Iterable[str], largest: int) -> str:
    """The parts in one string, unless they are too long together."""
    size, seen = 0, []
    for part in parts:
        size += len(part)
        if size > largest:
            raise TooMuch(f"a text of more than {largest:,} characters")
        seen.append(part)
    return "".join(seen)
