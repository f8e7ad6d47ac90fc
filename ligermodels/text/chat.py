"""Chat templates: which one, its variables, and errors that say what went wrong and in which line.

A template sees plain data only (what JSON can hold); other objects, such as images, appear as "<TypeName>".
Limits on what it may do: `ligermodels.text.sandbox`. Checked against transformers 5.23,
`render_jinja_template`.

Which characters are the assistant's: a template says it with {% generation %}. To find their places in the whole
text, the template is rendered a second time with marks around them, and the text without the marks must be that of
the first rendering. A place that is counted while the text is made, as transformers counts it, is wrong inside a
macro or a {% set %} block.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from reprlib import repr as short
from types import CodeType
from typing import Any

import jinja2

from ligermodels.errors import TokenizerError
from ligermodels.text import limits, sandbox

# In messages, tools, documents and variables together: dicts, lists and what they hold.
MAX_GIVEN = 2**19
# Of an error's own words: a template may say what it likes.
_MAX_WORDS = 500

# Marks the end of a message in the output.
_MARK = "\ue000continue here\ue000"
# The same for a message to go on with: the space at its end shows whether the template trims.
_CONTINUE = f"{_MARK} "


class ChatTemplates:
    """The templates of one folder, by name, and the variables that all of them see (bos_token and so on)."""

    def __init__(self, templates: Mapping[str, str], variables: Mapping[str, Any], folder: Path) -> None:
        self.templates = dict(templates)
        self._variables = dict(variables)
        self._folder = folder
        # (text of the template, with marks or not) -> (its program, whether it has {% generation %})
        self._compiled: dict[tuple[str, bool], tuple[CodeType, bool]] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template: str | None,
        variables: Mapping[str, Any],
        with_spans: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and with `with_spans` the (start, end) of each stretch of it that is the assistant's."""
        if continue_final_message and with_spans:
            raise TokenizerError("continue_final_message goes with no assistant mask: the message has no end yet.")
        if continue_final_message and add_generation_prompt:
            raise TokenizerError(
                "continue_final_message and add_generation_prompt exclude each other: the one goes on with "
                "the last message, the other begins a new one."
            )
        for label, items in (("messages", messages), ("tools", tools or ()), ("documents", documents or ())):
            wrong = items if not isinstance(items, list | tuple) else [i for i in items if not isinstance(i, Mapping)]
            if wrong or not isinstance(items, list | tuple):
                raise TokenizerError(f"{label} must be a list of dicts; got {short(wrong)}.")
        source, where = self._choose(template, tools is not None)
        copy = _Copy()
        seen = {**self._variables, **copy(variables), "messages": copy(messages)}
        seen |= {"tools": copy(tools), "documents": copy(documents), "add_generation_prompt": add_generation_prompt}
        if continue_final_message:
            _mark_end(seen["messages"])
        text, has_marks = self._run(source, where, seen, copy.given)
        if not with_spans:
            return (_cut_at_end(text) if continue_final_message else text), []
        if not has_marks:
            raise TokenizerError(
                f"{where} does not say which text is the assistant's: it has no {{% generation %}} ... "
                "{% endgeneration %}. Next step: put them around the assistant's text, in a template passed as "
                "chat_template=...; TRL has such variants of the usual templates."
            )
        marked, spans = _spans(self._run(source, where, seen, copy.given, with_marks=True)[0], where)
        if marked != text:
            raise TokenizerError(
                f"{where} changes the text that {{% generation %}} stands around, so that its place cannot be told. "
                "Likely cause: a filter over the tag, such as trim, or a message that holds the marks. Next step: put "
                "the tag around the filter."
            )
        return text, spans

    def turn_end(self) -> str:
        """What the default template writes after the text of an assistant's turn; "" if it shows none.

        A template that is missing or broken, or refuses a user's and an assistant's message, shows none.
        """
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
        try:
            text, _ = self.render(
                turns,
                tools=None,
                documents=None,
                add_generation_prompt=False,
                continue_final_message=False,
                template=None,
                variables={},
            )
        except TokenizerError:
            return ""
        return text.rpartition(_MARK)[2] if _MARK in text else ""

    def _choose(self, template: str | None, has_tools: bool) -> tuple[str, str]:
        """(text, what an error calls it) of the template asked for by name or as text, or of the usual names."""
        if template is not None and not isinstance(template, str):
            raise TokenizerError(f"chat_template must be a name or a template's text, not {type(template).__name__}.")
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

    def _run(
        self, source: str, where: str, variables: Mapping[str, Any], given: int, with_marks: bool = False
    ) -> tuple[str, bool]:
        """(text, whether the template has {% generation %})."""
        account = limits.Account(given)
        environment = sandbox.TemplateSandbox(account, with_marks)
        try:
            key = source, with_marks
            if key not in self._compiled:
                self._compiled[key] = environment.compile_checked(source), environment.has_marks
            code, has_marks = self._compiled[key]
            program = jinja2.Template.from_code(environment, code, environment.make_globals(None))
            return limits.join(program.generate(variables), account.largest), has_marks
        except sandbox.RaisedByTemplate as error:
            raise TokenizerError(f"{where} refuses these messages: {_words(error)}") from error
        except Exception as error:
            raise TokenizerError(f"{where}{_line(error)}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """What went wrong in a template, the likely cause and the next step."""
    other = "Next step: take the template from the checkpoint's repository again, or pass another as chat_template=..."
    match error:
        case jinja2.TemplateSyntaxError():
            return f"syntax error: {_words(error.message)}. Likely cause: a hand edit, or a damaged file. {other}"
        case sandbox.SecurityError():
            return f"blocked by the sandbox: {_words(error)} Likely cause: a template that is out to harm. {other}"
        case limits.TooMuch():
            return f"stopped at {error}. Likely cause: a template that is broken or out to harm. {other}"
        case RecursionError():
            return f"RecursionError: it calls itself without end, or nests too deep. {other}"
    return (
        f"{type(error).__name__}: {_words(error)}. Likely cause: messages or variables of another shape than it "
        "reads. Next step: compare them with the template at this line."
    )


def _words(message: object) -> str:
    text = str(message)
    return text if len(text) <= _MAX_WORDS else f"{text[:_MAX_WORDS]}..."


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


class _Copy:
    """Copies made of dict, list, str, int, float, bool and None; counts their items, and characters and items."""

    def __init__(self) -> None:
        self.given = self._items = 0

    def __call__(self, value: Any, depth: int = 0) -> Any:
        self.given += 1 + (len(value) if isinstance(value, str) else 0)
        self._items += 1
        if self._items > MAX_GIVEN or depth >= limits.MAX_DEPTH:
            raise TokenizerError(
                f"messages, tools, documents and variables may hold {MAX_GIVEN:,} items, "
                f"{limits.MAX_DEPTH} deep, and one of them holds more. Likely cause: a list or dict that holds itself."
            )
        if value is None or isinstance(value, bool):
            return value
        for kind in (str, int, float):
            if isinstance(value, kind):
                return kind(value)
        if isinstance(value, Mapping):
            return {
                key if key is None or isinstance(key, int | float) else str(key): self(item, depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self(item, depth + 1) for item in value]
        return f"<{type(value).__name__}>"


def _spans(marked: str, where: str) -> tuple[str, list[tuple[int, int]]]:
    """(the text without the marks, the (start, end) in it of each stretch between them, the outermost in order)."""
    text, spans, starts = "", [], []
    for part in re.split(f"({sandbox.SPAN_START}|{sandbox.SPAN_END})", marked):
        if part == sandbox.SPAN_START:
            starts.append(len(text))
        elif part == sandbox.SPAN_END and starts:
            if (start := starts.pop()) < len(text) and not starts:
                spans.append((start, len(text)))
        elif part == sandbox.SPAN_END:
            starts.append(0)
            break
        else:
            text += part
    if starts:
        raise TokenizerError(f"{where} leaves a {{% generation %}} without its end. Likely cause: break or continue.")
    return text, spans


def _mark_end(chat: list[dict[str, Any]]) -> None:
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
