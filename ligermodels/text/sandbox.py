"""Chat templates are programs from the internet. Here they run with bounds on time and memory.

Jinja's ImmutableSandboxedEnvironment keeps a template away from Python's internals and from changing what it
is given, but lets it loop for ever and fill the memory. This one counts, per rendering:
- MAX_STEPS loop turns; a call of a function, method or macro counts for four;
- MAX_CHARS characters in any one string, and in the whole output;
- MAX_WIDTH for a number handed to a filter (widths, repeats) and for the items of a structure turned into
  text;
- MAX_BITS for an integer, and Jinja's own 100,000 for `range`.
A blocked attribute raises at once, where Jinja itself prints nothing.
"""

import datetime
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

MAX_STEPS = 2_000_000
MAX_CHARS = 2**25
MAX_WIDTH = 1_000_000
MAX_BITS = 10_000

# Filters that hand on the items they get and never turn them into text.
_ITEM_FILTER = re.compile(
    "abs|attr|batch|count|d|default|dictsort|first|groupby|items|last|length|list|map|max|min|random|reject|"
    "rejectattr|reverse|select|selectattr|slice|sort|sum|unique"
)

# A width in a format string of seven digits or more, or one taken from the arguments.
_WIDE_FORMAT = re.compile(r"\d{7}|%[^a-zA-Z%]*\*|\{[^{}]*:[^{}]*\{")


class TooMuch(Exception):
    """A limit of this module is reached."""


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
            finalize=_printable,
            cache_size=0,
        )
        self.steps = 0
        self.concat = _concat  # type: ignore[method-assign]
        self.filters = {name: _limited(name, function) for name, function in self.filters.items()}
        self.filters |= {"tojson": _tojson, "join to text": _concat_values, "count steps": self._counted}
        del self.globals["lipsum"]
        # A function, for the class itself would offer its methods.
        self.globals["dict"] = lambda *args, **items: dict(*args, **items)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _filter(loop.iter, "count steps")
        return _ConcatToFilter().visit(tree)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe.")

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.step(4)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            args = _check_string_call(__obj.__name__, owner, args)
        return _checked(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text, name = value.__self__, value.__name__

        @functools.wraps(wrapped)
        def checked(*args: Any, **kwargs: Any) -> str:
            _check_string_call(name, text, (*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return checked

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
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
            _check_string_call("format", left, right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    def step(self, count: int = 1) -> None:
        self.steps += count
        if self.steps > MAX_STEPS:
            raise TooMuch(f"more than {MAX_STEPS:,} steps (loop turns and calls)")

    def _counted(self, items: Any) -> "_Counted":
        return _Counted(items, self.step)


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


class _ConcatToFilter(jinja2.visitor.NodeTransformer):
    """`a ~ b` joins without asking the sandbox: say it as a filter."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        parts = nodes.List([self.visit(part) for part in node.nodes], lineno=node.lineno)
        return _filter(parts, "join to text")


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
    indent = min(indent, 64) if isinstance(indent, int) else indent
    return json.dumps(
        _printable(value),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _printable(value: Any) -> Any:
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
            if items > MAX_WIDTH or chars > MAX_CHARS:
                raise TooMuch(f"a printed structure of more than {MAX_WIDTH:,} items or {MAX_CHARS:,} characters")
    return value


def _checked(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_CHARS:
        raise TooMuch(f"a string of more than {MAX_CHARS:,} characters")
    return value


def _concat(parts: Iterable[str]) -> str:
    parts = list(parts)
    if sum(map(len, parts)) > MAX_CHARS:
        raise TooMuch(f"a string of more than {MAX_CHARS:,} characters")
    return "".join(parts)


def _concat_values(values: Iterable[Any]) -> str:
    return _concat(str(_printable(value)) for value in values)


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `name`, refusing what would grow too large."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        # Jinja hands some filters their context or environment first.
        own, value, rest = args[:first], args[first], (*args[first + 1 :], *kwargs.values())
        if any(isinstance(arg, int) and arg > MAX_WIDTH for arg in rest):
            raise TooMuch(f"a number above {MAX_WIDTH:,} handed to the filter {name}")
        if name == "join":
            separator = rest[0] if rest and isinstance(rest[0], str) else ""
            (value,) = _check_string_call("join", separator, (value,))
        elif not _ITEM_FILTER.fullmatch(name):
            _check_string_call(name, str(_printable(value)), rest)
        return _checked(function(*own, value, *args[first + 1 :], **kwargs))

    return limited


def _check_string_call(name: str, text: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Refuses text.name(*args) if it could pass MAX_CHARS. Returns args, iterators read into lists."""
    if name == "join" and args:
        args = (list(args[0]), *args[1:])
    for arg in args:
        _printable(arg)
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
