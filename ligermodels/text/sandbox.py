"""Chat templates are programs from the internet. Here they run with bounds on time and memory.

Jinja's ImmutableSandboxedEnvironment keeps a template away from Python's internals and from changing what it
is given, but lets it loop for ever and fill the memory. This one counts, per rendering:
- MAX_STEPS loop turns; a call of a function, method or macro counts for four;
- MAX_BYTES in all the values that it makes, freed or not;
- MAX_CHARS characters in any one string, and in the whole output;
- MAX_ITEMS in a structure that is turned into text, and for a width or a repeat handed to a filter;
- MAX_BITS for an integer, and Jinja's own 100,000 for `range`.
A blocked attribute raises at once, where Jinja itself prints nothing.
"""

import datetime
import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from ligermodels.text.limits import (
    MAX_CHARS,
    MAX_ITEMS,
    TooMuch,
    check_operation,
    check_string_call,
    printable,
)

MAX_STEPS = 2_000_000
MAX_BYTES = 2**30

# Filters that hand on the items they get and never turn them into text.
_ITEM_FILTER = re.compile(
    "abs|attr|batch|count|d|default|dictsort|first|groupby|items|last|length|list|map|max|min|random|reject|"
    "rejectattr|reverse|select|selectattr|slice|sort|sum|unique"
)

# Filters whose result grows with a number that they are given.
_NUMBER_FILTERS = ("batch", "center", "indent", "round", "slice")


class RaisedByTemplate(Exception):
    """The template called raise_exception."""


class GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's text; it prints its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment of one rendering: it carries the count of steps."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, loopcontrols],
            finalize=printable,
            cache_size=0,
        )
        self.steps = 0
        self.bytes = 0
        self.concat = self._concat  # type: ignore[method-assign]
        self.filters = {**self.filters, "tojson": _tojson}
        self.filters = {name: self._limited(name, function) for name, function in self.filters.items()}
        # Names that no template can write, for what `_parse` puts in.
        self.filters |= {"~": self._concat, "for": self._counted, "[:]": self.spend}
        del self.globals["lipsum"]
        # A function, for the class itself would offer its methods.
        self.globals["dict"] = lambda *args, **items: dict(*args, **items)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        return _AskTheSandbox().visit(tree)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe.")

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.step(4)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            args = check_string_call(__obj.__name__, owner, args)
        return __self.spend(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text, name = value.__self__, value.__name__

        @functools.wraps(wrapped)
        def checked(*args: Any, **kwargs: Any) -> str:
            check_string_call(name, text, (*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return checked

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        check_operation(operator, left, right)
        return self.spend(super().call_binop(context, operator, left, right))

    def spend(self, value: Any) -> Any:
        """Takes the memory of a new value off the account."""
        if isinstance(value, str) and len(value) > MAX_CHARS:
            raise TooMuch(f"a string of more than {MAX_CHARS:,} characters")
        if isinstance(value, str | list | tuple | dict):
            self.bytes += sys.getsizeof(value)
            if self.bytes > MAX_BYTES:
                raise TooMuch(f"more than {MAX_BYTES:,} bytes in values")
        return value

    def step(self, count: int = 1) -> None:
        self.steps += count
        if self.steps > MAX_STEPS:
            raise TooMuch(f"more than {MAX_STEPS:,} steps (loop turns and calls)")

    def _counted(self, items: Any) -> "_Counted":
        return _Counted(items, self.step)

    def _concat(self, parts: Iterable[Any]) -> str:
        return self.spend(_join(str(printable(part)) for part in parts))

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The filter `name`, refusing what would grow too large."""
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            # Jinja hands some filters their context or environment first.
            own, value, rest = args[:first], args[first], (*args[first + 1 :], *kwargs.values())
            if name in _NUMBER_FILTERS and any(isinstance(arg, int) and arg > MAX_ITEMS for arg in rest):
                raise TooMuch(f"a number above {MAX_ITEMS:,} handed to the filter {name}")
            if name == "join":
                separator = rest[0] if rest and isinstance(rest[0], str) else ""
                (value,) = check_string_call("join", separator, (value,))
            elif not _ITEM_FILTER.fullmatch(name):
                check_string_call(name, str(printable(value)), rest)
            return self.spend(function(*own, value, *args[first + 1 :], **kwargs))

        return limited


class _Counted:
    """The items of a for loop; keeps their length, which `loop.length` asks for."""

    def __init__(self, items: Iterable[Any], step: Callable[[], None]) -> None:
        self._items = items
        self._step = step

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._step()
            yield item


class _AskTheSandbox(jinja2.visitor.NodeTransformer):
    """Loops, `a ~ b` and `a[1:2]` compile to plain Python: say them as filters, which the sandbox sees."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node.iter = _filter(node.iter, "for")
        return self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        return _filter(nodes.List([self.visit(part) for part in node.nodes], lineno=node.lineno), "~")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "[:]") if isinstance(node.arg, nodes.Slice) else node


def _filter(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _raise_exception(message: object) -> None:
    raise RaisedByTemplate(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: Jinja's own escapes HTML."""
    options: dict[str, Any] = {"ensure_ascii": ensure_ascii, "sort_keys": sort_keys}
    if indent is None and separators is None:
        return json.dumps(printable(value), **options)
    encoder = json.JSONEncoder(indent=indent, separators=separators, **options)
    return _join(encoder.iterencode(printable(value)))


def _join(parts: Iterable[str]) -> str:
    size, seen = 0, []
    for part in parts:
        size += len(part)
        if size > MAX_CHARS:
            raise TooMuch(f"a string of more than {MAX_CHARS:,} characters")
        seen.append(part)
    return "".join(seen)
