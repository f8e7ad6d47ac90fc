"""Chat templates: their choice, their variables, and errors with the line of the template.

Checked against transformers 5.23, `render_jinja_template`, except for the assistant's spans: the template is rendered a
second time with marks around {% generation %}, and the text without the marks must equal the first rendering.
transformers counts characters while the text is written, which is wrong inside a macro or a {% set %} block.
"""

import re
from collections.abc import Mapping, Sequence
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


class ChatTemplates:
    """The templates of one folder by name, and the variables that all of them have (bos_token and so on)."""

    def __init__(self, templates: Mapping[str, str], variables: Mapping[str, Any], folder: Path) -> None:
        self.templates = dict(templates)
        self._variables = dict(variables)
        self._folder = folder

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        with_spans: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and with `with_spans` the (start, end) of each part of it that is the assistant's."""
        if continue_final_message and (with_spans or add_generation_prompt):
            raise TokenizerError(
                "continue_final_message continues the last message; it excludes add_generation_prompt, which begins "
                "a new one, and the assistant mask, which needs the end of the message."
            )
        for label, items in (("messages", messages), ("tools", tools or ()), ("documents", documents or ())):
            if not isinstance(items, list | tuple) or not all(isinstance(item, Mapping) for item in items):
                raise TokenizerError(f"{label} must be a list of dicts, not {short(items)}.")
        source, where = self._choose(template, tools is not None)
        seen = {**self._variables, **_plain(variables or {}), "messages": _plain(messages), "tools": _plain(tools)}
        seen |= {"documents": _plain(documents), "add_generation_prompt": add_generation_prompt}
        if continue_final_message:
            _mark_end(seen["messages"])
        text, has_generation = _run(source, where, seen)
        if continue_final_message:
            return _cut_at_end(text), []
        if not with_spans:
            return text, []
        if not has_generation:
            raise TokenizerError(
                f"{where} does not mark the assistant's text: it has no {{% generation %}} ... "
                "{% endgeneration %}. Next step: put them around the assistant's text, in a template passed as "
                "chat_template=...; TRL has such variants of the usual templates."
            )
        marked, spans = _spans(_run(source, where, seen, with_marks=True)[0])
        if marked != text:
            raise TokenizerError(
                f"{where} changes the text inside {{% generation %}}, or leaves the tag without its end, so that the "
                "assistant's tokens are unknown. Likely cause: a filter over the tag, such as trim, or a break in it. "
                "Next step: put the tag around the filter."
            )
        return text, spans

    def turn_end(self) -> str:
        """The text that the default template writes after an assistant's message.

        "" without such a template, or where it refuses a user's and an assistant's message.
        """
        try:
            text, _ = self.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}])
        except TokenizerError:
            return ""
        return text.rpartition(_MARK)[2] if _MARK in text else ""

    def _choose(self, template: str | None, has_tools: bool) -> tuple[str, str]:
        """(text, name for errors) of the template that is given by name or as text, or of the default one."""
        names = short(list(self.templates))
        if template is not None and template not in self.templates:
            if "{" in template:
                return template, "the chat template that was passed"
            raise TokenizerError(f"there is no chat template {short(template)}; {self._folder} has {names}.")
        if not self.templates:
            raise TokenizerError(
                f"{self._folder} has no chat template. Likely cause: a base model, not an instruct model. "
                "Next step: pass chat_template=..., or encode a prompt of your own."
            )
        name = template or ("tool_use" if has_tools and "tool_use" in self.templates else "default")
        if name not in self.templates:
            raise TokenizerError(
                f"{self._folder} has no default chat template. Next step: pass chat_template= one of {names}."
            )
        return self.templates[name], f"the chat template {short(name)} of {self._folder}"


def _run(source: str, where: str, variables: dict[str, Any], with_marks: bool = False) -> tuple[str, bool]:
    """(the text of a template, whether it has {% generation %})."""
    try:
        template, has_generation = sandbox.compile_template(source, with_marks)
        return sandbox.render(template, variables), has_generation
    except sandbox.RaisedByTemplate as error:
        raise TokenizerError(f"{where} refuses these messages: {error}") from error
    except Exception as error:
        kind = "syntax error" if isinstance(error, jinja2.TemplateSyntaxError) else type(error).__name__
        raise TokenizerError(
            f"{where}{_line(error)}: {kind}: {getattr(error, 'message', error)}. Next step: compare the messages and "
            "variables with the template at this line, or pass another template as chat_template=..."
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
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"


def _spans(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """(the text without the marks, the (start, end) in it of each stretch between them, the outermost in order).

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


def _mark_end(chat: list[dict[str, Any]]) -> None:
    """Puts the mark after the text of the last message."""
    content = chat[-1].get("content") if chat else None
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUE
        return
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] += _CONTINUE
            return
    raise TokenizerError("continue_final_message needs a last message whose content has text to go on with.")


def _cut_at_end(text: str) -> str:
    at = text.rfind(_MARK)
    if at < 0:
        raise TokenizerError(
            "continue_final_message: the chat template leaves out or rewrites the last message, so that its "
            "end cannot be found. Next step: append the text to the ids by hand."
        )
    return text[:at] if text.startswith(_CONTINUE, at) else text[:at].rstrip()
