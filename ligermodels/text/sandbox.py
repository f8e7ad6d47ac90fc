"""Chat templates are programs from the internet. Here they run with bounds on time and memory.

Jinja's ImmutableSandboxedEnvironment keeps a template away from Python's internals and from changing what it
is given, but lets it loop for ever and fill the memory. This one keeps an account (`ligermodels.text.limits`)
of each rendering and ends it at:
- MAX_STEPS loop turns; a call of a function, method, filter or macro counts for four;
- MAX_SECONDS of this thread's processor time;
- MAX_BYTES, half of them in values that are still in use;
- MAX_SIZE characters and items in any one value, as printed, and in the whole output; MAX_DEPTH for its depth;
- MAX_BITS for an integer, and Jinja's own 100,000 for `range`;
- MAX_TOKENS in the template itself, which compiling takes memory for.
A blocked attribute raises at once, where Jinja itself prints nothing.
"""

import datetime
import functools
import json
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import _PassArg

from ligermodels.text.limits import MAX_ARGUMENTS, MAX_NUMBER, SLOW, Account, TooMuch, join

MAX_CHARS = 2**19
MAX_TOKENS = 12_000
MAX_COMPARISONS = 8
MAX_FORM = 1000

# Filters of text whose result may be much larger than what they get.
_TEXT_FILTERS = ("center", "format", "indent", "replace", "wordwrap", *SLOW)

# Filters whose result grows with a number that they are given.
_NUMBER_FILTERS = ("batch", "center", "indent", "round", "slice", "tojson")

# What Jinja hands to a filter before the value, from the context that all filters get here.
_PASSED: dict[Any, Callable[[Any], Any]] = {
    _PassArg.context: lambda context: context,
    _PassArg.eval_context: lambda context: context.eval_ctx,
    _PassArg.environment: lambda context: context.environment,
}

# Tests that take as long as their arguments are large.
_COMPARISONS = ["in", "eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">"]
_COMPARISONS += ["ge", ">="]

# Their results are bytes, or as large as a number says.
_NO_METHODS = ("encode", "fromkeys", "maketrans")


class RaisedByTemplate(Exception):
    """The template called raise_exception."""


# Around the assistant's text, where marks are asked for.
SPAN_START, SPAN_END = "\ue000assistant\ue000", "\ue000end\ue000"


class GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's text; it prints its body, with marks around it
    if the environment's `with_marks` says so. `has_marks` of the environment says that a template has the tag."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        self.environment.has_marks = True  # type: ignore[attr-defined]
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        if self.environment.with_marks:  # type: ignore[attr-defined]
            start, end = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (SPAN_START, SPAN_END))
            body = [start, *body, end]
        return nodes.Scope(body, lineno=line)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment of one rendering."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, account: Account, with_marks: bool = False) -> None:
        self.with_marks, self.has_marks = with_marks, False
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, loopcontrols],
            cache_size=0,
        )
        self.account = account
        self.concat = self._concat  # type: ignore[method-assign]
        self.filters = {**self.filters, "tojson": self._tojson}
        self.filters = {name: self._limited(name, function) for name, function in self.filters.items()}
        # Names that no template can write, for what `_parse` puts in.
        self.filters |= {"~": self._concat, "for": self._counted, "[]": account.made, "==": self._stepped}
        tests: dict[str, Any] = {name: self._limited_test(self.tests[name]) for name in _COMPARISONS}  # type: ignore[arg-type]
        self.tests = {**self.tests, **tests}
        del self.globals["lipsum"]
        # Functions, for the classes themselves would offer their methods.
        self.globals["dict"] = lambda *args, **items: dict(*args, **items)
        self.globals["namespace"] = lambda *args, **items: _Namespace(*args, **items)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def compile_checked(self, source: str) -> CodeType:
        """The program of a template. Raises TooMuch before compiling takes much memory."""
        if len(source) > MAX_CHARS:
            raise TooMuch(f"a template of more than {MAX_CHARS:,} characters")
        if any(number >= MAX_TOKENS for number, _ in enumerate(self.lex(source))):
            raise TooMuch(f"a template of more than {MAX_TOKENS:,} words and signs")
        return self.compile(source)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        return _AskTheSandbox().visit(tree)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # Numbers and bytes have methods that no limit knows: to_bytes, center, hex.
        numeric = isinstance(obj, int | float)
        return not numeric and attr not in _NO_METHODS and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe.")

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.account.step(4)
        if len(args) + len(kwargs) > MAX_ARGUMENTS:
            raise TooMuch(f"a call with more than {MAX_ARGUMENTS} arguments")
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            named = tuple(kwargs.values())
            args = __self.account.check_string_call(__obj.__name__, owner, args + named)[: len(args)]
        return __self.account.made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text, name = value.__self__, value.__name__

        @functools.wraps(wrapped)
        def checked(*args: Any, **kwargs: Any) -> str:
            self.account.check_string_call(name, text, (*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return checked

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.account.step()
        self.account.check_operation(operator, left, right)
        return self.account.made(self.binop_table[operator](left, right))

    def _stepped(self, value: Any) -> Any:
        self.account.step()
        return value

    def _counted(self, items: Any) -> "_Counted":
        return _Counted(items, self.account.step)

    def _concat(self, parts: Iterable[Any]) -> str:
        self.account.step()
        return self.account.made(join(map(str, parts), self.account.largest))

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The filter `name`, refusing what would grow too large."""
        passed = _PASSED.get(getattr(function, "jinja_pass_arg", None))

        # A filter that takes the context is not tried out while the template is compiled.
        @jinja2.pass_context
        def limited(context: jinja2.runtime.Context, value: Any, *args: Any, **kwargs: Any) -> Any:
            self.account.step(4)
            rest = (*args, *kwargs.values())
            if name in _NUMBER_FILTERS and any(isinstance(arg, int) and arg > MAX_NUMBER for arg in rest):
                raise TooMuch(f"a number above {MAX_NUMBER:,} handed to the filter {name}")
            if name == "sum" and any(isinstance(arg, list | tuple) for arg in rest):
                raise TooMuch("a sum of lists")
            if name == "join":
                separator = rest[0] if rest and isinstance(rest[0], str) else ""
                (value,) = self.account.check_string_call("join", separator, (value,))
            elif name in _TEXT_FILTERS:
                self.account.check_string_call(name, str(value), rest)
            own = (passed(context),) if passed else ()
            return self.account.made(function(*own, value, *args, **kwargs))

        return limited

    def _limited_test(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def limited(*args: Any, **kwargs: Any) -> Any:
            self.account.step()
            return function(*args, **kwargs)

        return limited

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """As transformers has it: Jinja's own escapes HTML."""
        options: dict[str, Any] = {"ensure_ascii": ensure_ascii, "sort_keys": sort_keys}
        if indent is None and separators is None:
            return json.dumps(value, **options)
        encoder = json.JSONEncoder(indent=indent, separators=separators, **options)
        return join(encoder.iterencode(value), self.account.largest)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's own prints what it holds, and so one that holds another twice, and so on, for ever."""

    def __repr__(self) -> str:
        return "<Namespace>"


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
    """Loops, `a ~ b`, `a[1:2]`, `[a]` and `a == b` compile to plain Python: say them as filters, which the sandbox
    sees. What is compared with a constant is cheap."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node.iter = _filter(node.iter, "for")
        return self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        return _filter(nodes.List([self.visit(part) for part in node.nodes], lineno=node.lineno), "~")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "[]") if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: Any) -> nodes.Node:
        """Of all constants it is no larger than the template."""
        self.generic_visit(node)
        stored = getattr(node, "ctx", "load") != "load"
        constant = all(isinstance(item, nodes.Const) for item in getattr(node, "items", [None]))
        return node if stored or constant else _filter(node, "[]")

    visit_Tuple = visit_Dict = visit_List

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if len(node.ops) > MAX_COMPARISONS:
            raise TooMuch(f"more than {MAX_COMPARISONS} comparisons in a chain")
        cheap = any(
            isinstance(side, nodes.Const | nodes.List | nodes.Tuple)
            for side in (node.ops[0].expr, *([] if node.ops[0].op in ("in", "notin") else [node.expr]))
        )
        return node if cheap and len(node.ops) == 1 else _filter(node, "==")


def _filter(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _raise_exception(message: object) -> None:
    raise RaisedByTemplate(str(message))


def _strftime_now(form: str) -> str:
    if len(form) > MAX_FORM:
        raise TooMuch(f"a date of more than {MAX_FORM} characters")
    return datetime.datetime.now().strftime(form)
