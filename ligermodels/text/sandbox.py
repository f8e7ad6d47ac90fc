"""The environment of chat templates: jinja2's ImmutableSandboxedEnvironment, as in transformers.

Templates are programs from the internet. In the sandbox they cannot reach Python's internals or change their
variables. The size of a template and of its output is limited; its time is not.
"""

import datetime
import functools
import json
from typing import Any, NamedTuple

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

SPAN_START, SPAN_END = "\ue000assistant\ue000", "\ue000end\ue000"
"""Around the assistant's text in the output of a template that was compiled with marks."""
MAX_TEMPLATE_CHARS = 2**19
MAX_OUTPUT_CHARS = 2**26


class TemplateTooLarge(Exception):
    """A template, or its output, is larger than the limit."""


class RaisedByTemplate(Exception):
    """The template called raise_exception."""


class GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} around the assistant's text.

    It prints its body, between marks if the environment has `with_marks`, and sets the environment's `has_generation`.
    """

    tags = {"generation"}  # noqa: RUF012

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        environment.extend(with_marks=False, has_generation=False)

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        self.environment.has_generation = True  # type: ignore[attr-defined]
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        if self.environment.with_marks:  # type: ignore[attr-defined]
            start, end = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (SPAN_START, SPAN_END))
            body = [start, *body, end]
        return nodes.Scope(body, lineno=line)


class Compiled(NamedTuple):
    """A template, whether it has {% generation %}, and the variables that it reads without setting them first."""

    template: jinja2.Template
    has_generation: bool
    variables: frozenset[str]


@functools.lru_cache(maxsize=32)
def compile_template(source: str, with_marks: bool = False) -> Compiled:
    """Raises TemplateTooLarge, jinja2.TemplateSyntaxError."""
    if len(source) > MAX_TEMPLATE_CHARS:
        raise TemplateTooLarge(f"a template has at most {MAX_TEMPLATE_CHARS:,} characters, this one {len(source):,}")
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.with_marks = with_marks  # type: ignore[attr-defined]
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "namespace": _Namespace,
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
    }
    variables = meta.find_undeclared_variables(environment.parse(source))
    has_generation: bool = environment.has_generation  # type: ignore[attr-defined]
    return Compiled(environment.from_string(source), has_generation, frozenset(variables))


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """The output of the template. Raises TemplateTooLarge, and whatever the template raises."""
    pieces, size = [], 0
    for piece in template.generate(variables):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_OUTPUT_CHARS:
            raise TemplateTooLarge(f"the output of a template has at most {MAX_OUTPUT_CHARS:,} characters")
    return "".join(pieces)


class _Namespace(jinja2.utils.Namespace):
    """Refuses names that begin with an underscore, as in transformers: a template must not set special methods."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may use the name `self`
        self, attributes = args[0], dict(*args[1:], **kwargs)
        jinja2.utils.Namespace.__init__(self)
        for name, value in attributes.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace cannot have {name!r}.")
        super().__setitem__(name, value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in transformers; jinja2's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise RaisedByTemplate(str(message))
