"""Chat templates: which one is used, what it sees, and errors that say what went wrong and in which line.

Checked against transformers 5.23, `render_jinja_template`, but for the assistant's spans: the template is rendered a
second time with marks around {% generation %}, and the text without the marks must be that of the first rendering. A
place that is counted while the text is written, as in transformers, is wrong inside a macro or a {% set %} block.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from reprlib import repr as short
from typing import Any

import jinja2

from ligermodels.errors import TokenizerError
from ligermodels.text import sandbox

# Of a template's own message in an error.
_MAX_MESSAGE = 500
# Marks the end of a message in the output.
_MARK = "\ue000continue here\ue000"
# The same for a message to go on with: whether the space at its end is still there tells if the template trims.
_CONTINUE = f"{_MARK} "


class ChatTemplates:
    """The templates of one folder, by name, and the variables that all of them see (bos_token and so on)."""

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
        """The text, and with `with_spans` the (start, end) of each stretch of it that is the assistant's."""
        if continue_final_message and (with_spans or add_generation_prompt):
            raise TokenizerError(
                "continue_final_message goes on with the last message; it excludes add_generation_prompt, which begins "
                "a new one, and the assistant mask, which needs its end."
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
                f"{where} does not say which text is the assistant's: it has no {{% generation %}} ... "
                "{% endgeneration %}. Next step: put them around the assistant's text, in a template passed as "
                "chat_template=...; TRL has such variants of the usual templates."
            )
        marked, spans = _spans(_run(source, where, seen, with_marks=True)[0])
        if marked != text:
            raise TokenizerError(
                f"{where} changes the text inside {{% generation %}}, or leaves the tag without its end, so that its "
                "place cannot be told. Likely cause: a filter over the tag, such as trim, a break in it, or a message "
                "that holds the marks. Next step: put the tag around the filter."
            )
        return text, spans

    def turn_end(self) -> str:
        """What the default template writes after the text of an assistant's turn; "" if it shows none.

        A template that is missing or broken, or refuses a user's and an assistant's message, shows none.
        """
        try:
            text, _ = self.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}])
        except TokenizerError:
            return ""
        return text.rpartition(_MARK)[2] if _MARK in text else ""

    def _choose(self, template: str | None, has_tools: bool) -> tuple[str, str]:
        """(text, what an error calls it) of the template asked for by name or as text, or of the usual names."""
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
    """(the text that a template writes, whether it has {% generation %})."""
    try:
        template, has_generation = sandbox.compile_template(source, with_marks)
        return sandbox.render(template, variables), has_generation
    except sandbox.RaisedByTemplate as error:
        raise TokenizerError(f"{where} refuses these messages: {_message(error)}") from error
    except Exception as error:
        raise TokenizerError(f"{where}{_line(error)}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """What went wrong in a template, the likely cause and the next step."""
    other = "Next step: take the template from the checkpoint's repository again, or pass another as chat_template=..."
    match error:
        case jinja2.TemplateSyntaxError():
            return f"syntax error: {_message(error)}. Likely cause: a hand edit, or a damaged file. {other}"
        case sandbox.SecurityError():
            return f"blocked by the sandbox: {_message(error)} Likely cause: a template that is out to harm. {other}"
        case sandbox.TemplateTooLarge() | RecursionError():
            return f"{type(error).__name__}: {_message(error)}. Likely cause: a template without an end. {other}"
    return (
        f"{type(error).__name__}: {_message(error)}. Likely cause: messages or variables of another shape than it "
        "reads. Next step: compare them with the template at this line."
    )


def _message(error: Exception) -> str:
    text = str(error.message if isinstance(error, jinja2.TemplateSyntaxError) else error)
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."


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
    """A copy made of what JSON can hold. Other objects, such as images, become "<TypeName>": a template could call
    their methods, and some write files."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # of an enum the text itself
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
