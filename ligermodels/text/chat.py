"""Chat templates: their choice, their variables, and errors with the line of the template.

Checked against transformers 5.23, `render_jinja_template`, except for
- the assistant's spans: the template is rendered a second time with marks around {% generation %}; the text without
  the marks must equal the first rendering. transformers counts characters while the text is written, which is wrong
  inside a macro or a {% set %} block, and returns a mask of zeros for a template without {% generation %};
- a content that is a list of text parts, for a template that does not print parts: the template gets the texts, joined.
  transformers passes the list, which is printed as Python writes it, or not at all, or is an error.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from reprlib import repr as short
from typing import Any

import jinja2

from ligermodels.errors import TokenizerError
from ligermodels.text import sandbox

# Marks the end of a message in the output.
_MARK = "\ue000continue here\ue000"
# The mark of a message to continue; if the template trims messages, the space at its end is gone.
_CONTINUE = f"{_MARK} "
_PASS = "pass chat_template=... (`ligermodels train`: --chat-template)"
# The keys of a message's reasoning, the standard one first.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class TemplateError(TokenizerError):
    """An error in a template itself, with its line."""


class ChatTemplates:
    """The templates of one folder by name, and the variables that all of them have (bos_token and so on)."""

    def __init__(
        self, templates: Mapping[str, str], variables: Mapping[str, Any], folder: Path, source: str | None = None
    ) -> None:
        """source: where the default template is from, if it is not from the folder."""
        self.templates = dict(templates)
        self._variables = dict(variables)
        self._folder, self._source = folder, source

    def choose(self, template: str | None = None, has_tools: bool = False) -> "ChatTemplate":
        """The template with the given name or text; by default "tool_use" for tools, else "default"."""
        names = short(list(self.templates))
        if template is not None and template not in self.templates:
            if "{" in template:
                return ChatTemplate(template, "the chat template that was passed", self._variables)
            raise TokenizerError(f"there is no chat template {short(template)}; {self._folder} has {names}.")
        if not self.templates:
            raise TokenizerError(
                f"{self._folder} has no chat template. Likely cause: a base model, not an instruct model. "
                f"Next step: {_PASS}, or encode a prompt of your own."
            )
        name = template or ("tool_use" if has_tools and "tool_use" in self.templates else "default")
        if name not in self.templates:
            raise TokenizerError(f"{self._folder} has no default chat template. Next step: {_PASS}, one of {names}.")
        where = f"the chat template {short(name)} of {self._folder}"
        if name == "default" and self._source is not None:
            where = f"the chat template {self._source}"
        return ChatTemplate(self.templates[name], where, self._variables)

    def turn_end(self) -> str:
        """The text that the default template writes after an assistant's message.

        "" without such a template, or where it refuses a user's and an assistant's message.
        """
        try:
            chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
            text, _ = self.choose().render(chat)
        except TokenizerError:
            return ""
        return text.rpartition(_MARK)[2] if _MARK in text else ""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """One template. where: its name in errors. defaults: the variables that it has without being passed them."""

    source: str
    where: str
    defaults: Mapping[str, Any]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        with_spans: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        """(the text, with `with_spans` the (start, end) of each part of it that is the assistant's, else [])."""
        if continue_final_message and (with_spans or add_generation_prompt):
            raise TokenizerError(
                "continue_final_message excludes add_generation_prompt, which begins a new message, and "
                "return_assistant_tokens_mask, which needs the end of the message."
            )
        for label, items in (("messages", messages), ("tools", tools or ())):
            if not isinstance(items, list | tuple) or not all(isinstance(item, Mapping) for item in items):
                raise TokenizerError(f"{label} must be a list of dicts, not {short(items)}.")
        if not messages:
            raise TokenizerError("a conversation needs at least one message.")
        context = {"documents": None, **self.defaults, **_plain(variables or {}), "tools": _plain(tools)}
        context["add_generation_prompt"] = add_generation_prompt
        context["messages"] = self._join_parts([_message(message) for message in messages], context)
        if continue_final_message:
            _mark_end(context["messages"][-1])
            return _cut_at_mark(self._run(context)), []
        text = self._run(context)
        if not with_spans:
            return text, []
        if not self.compile().has_generation:
            raise TokenizerError(
                f"{self.where} does not mark the assistant's text: it has no {{% generation %}} ... "
                "{% endgeneration %}. Next step: put them around the assistant's text, and "
                f"{_PASS}; TRL has such variants of the usual templates."
            )
        marked, spans = _spans(self._run(context, with_marks=True))
        if marked != text:
            raise TokenizerError(
                f"{self.where} changes the text inside {{% generation %}}, or leaves the tag without its end: the "
                "assistant's tokens are unknown. Likely cause: a filter around the tag, such as trim, or a break. "
                "Next step: put the tag around the filter."
            )
        return text, spans

    def _join_parts(self, chat: list[dict[str, Any]], variables: dict[str, Any]) -> list[dict[str, Any]]:
        """The chat with the text parts of a message joined, unless the template prints them part by part.

        A first rendering shows which: there each part is a mark.
        """
        texts = [_texts(message.get("content")) for message in chat]
        if not any(texts):
            return chat
        marks = [[f"\ue000part {row} {at}\ue000" for at in range(len(parts))] for row, parts in enumerate(texts)]
        probe = [
            message | ({"content": [{"type": "text", "text": mark} for mark in row]} if row else {})
            for message, row in zip(chat, marks, strict=True)
        ]
        try:
            printed = self._run({**variables, "messages": probe})
        except TokenizerError:
            printed = ""
        return [
            message if all(mark in printed for mark in row) else message | {"content": "".join(parts)}
            for message, row, parts in zip(chat, marks, texts, strict=True)
        ]

    def compile(self, with_marks: bool = False) -> sandbox.Compiled:
        """Raises TemplateError for a syntax error."""
        with _template_errors(self.where):
            return sandbox.compile_template(self.source, with_marks)

    def _run(self, variables: dict[str, Any], with_marks: bool = False) -> str:
        template = self.compile(with_marks).template
        with _template_errors(self.where):
            return sandbox.render(template, variables)


@contextlib.contextmanager
def _template_errors(where: str) -> Iterator[None]:
    """Turns what a template raises into a TokenizerError."""
    try:
        yield
    except sandbox.RaisedByTemplate as error:
        raise TokenizerError(f"{where} refuses these messages: {error}") from error
    except Exception as error:
        kind = "syntax error" if isinstance(error, jinja2.TemplateSyntaxError) else type(error).__name__
        raise TemplateError(
            f"{where}{_line(error)}: {kind}: {getattr(error, 'message', error)}. Next step: compare the messages and "
            f"variables with the template at this line, or {_PASS}."
        ) from error


def _line(error: BaseException) -> str:
    """ ", line 7": jinja maps the frames of a template to its lines."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f", line {error.lineno}"
    lines, trace = [], error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return f", line {lines[-1]}" if lines else ""


def _plain(value: Any) -> Any:
    """A copy of JSON's types only. Other objects, such as images, become "<TypeName>": a template could call their
    methods, and some write files."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # the text of an enum
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    if hasattr(value, "dtype") and getattr(value, "shape", None) == ():  # a number of numpy or torch
        return _plain(value.item())
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):  # pydantic, such as the tool calls of OpenAI's client
        return _plain(dump())
    return f"<{type(value).__name__}>"


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without the keys that are None, and with the reasoning under every key that a template may read."""
    copy = {key: value for key, value in _plain(message).items() if value is not None}
    reasoning = next((copy[key] for key in _REASONING if key in copy), None)
    return copy if reasoning is None else {"thinking": reasoning, **copy, "reasoning_content": reasoning}


def _texts(content: Any) -> list[str]:
    """The texts of a content that is a list of text parts and nothing else; [] for another content."""
    parts = content if isinstance(content, list) else []
    texts = [part["text"] for part in parts if isinstance(part, dict) and part.get("type") == "text" and "text" in part]
    return texts if len(texts) == len(parts) else []


def _spans(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """(the text without the marks, the (start, end) in it of each outermost marked part, in order).

    A mark without its partner stays in the text.
    """
    text, spans, starts = "", [], []
    for part in re.split(f"({sandbox.SPAN_START}|{sandbox.SPAN_END})", marked):
        if part == sandbox.SPAN_START:
            starts.append(len(text))
        elif part == sandbox.SPAN_END and starts:
            if (start := starts.pop()) < len(text) and not starts:
                spans.append((start, len(text)))
        else:
            text += part
    return text + sandbox.SPAN_START * len(starts), spans


def _mark_end(message: dict[str, Any]) -> None:
    """Puts the mark after the text of a message's content."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _CONTINUE
        return
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] += _CONTINUE
            return
    raise TokenizerError("continue_final_message needs a last message whose content has text to continue.")


def _cut_at_mark(text: str) -> str:
    """The text before the mark."""
    at = text.rfind(_MARK)
    if at < 0:
        raise TokenizerError(
            "continue_final_message: the chat template drops or rewrites the last message, so its end cannot be "
            "found. Next step: append the ids of the text to those of the prompt."
        )
    return text[:at] if text.startswith(_CONTINUE, at) else text[:at].rstrip()
