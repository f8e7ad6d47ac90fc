"""Chat templates: which one, its variables, and errors that say what went wrong and in which line.

A template sees plain data only (what JSON can hold); other objects, such as images, appear as "<TypeName>".
Limits on what it may do: `ligermodels.text.sandbox`. Checked against transformers 5.23,
`render_jinja_template`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import jinja2

from ligermodels.errors import TokenizerError
from ligermodels.text import limits, sandbox

MAX_TEMPLATE_CHARS = 2**20

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
        self._compiled: dict[str, CodeType] = {}

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
    ) -> str:
        if continue_final_message and add_generation_prompt:
            raise TokenizerError(
                "continue_final_message and add_generation_prompt exclude each other: the one goes on with "
                "the last message, the other begins a new one."
            )
        for label, items in (("messages", messages), ("tools", tools or ()), ("documents", documents or ())):
            wrong = items if not isinstance(items, list | tuple) else [i for i in items if not isinstance(i, Mapping)]
            if wrong:
                raise TokenizerError(f"{label} must be a list of dicts; got {str(wrong)[:80]!r}.")
        chat = _plain(list(messages))
        if continue_final_message:
            _mark_end(chat)
        text = self._run(
            self._choose(template, tools is not None),
            {
                **self._variables,
                **_plain(dict(variables)),
                "messages": chat,
                "tools": _plain(tools),
                "documents": _plain(documents),
                "add_generation_prompt": add_generation_prompt,
            },
        )
        return _cut_at_end(text) if continue_final_message else text

    def turn_end(self) -> str:
        """What the default template writes after the text of an assistant's turn; "" if it shows none.

        A template that is missing or broken, or refuses a user's and an assistant's message, shows none.
        """
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
        try:
            text = self.render(
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

    def _choose(self, template: str | None, has_tools: bool) -> str:
        """The text of the template asked for by name, given as text, or found under the usual names."""
        if template is not None and template not in self.templates:
            if "{" in template:
                return template
            raise TokenizerError(f"there is no chat template {template!r}; {self._folder} has {list(self.templates)}.")
        if not self.templates:
            raise TokenizerError(
                f"{self._folder} has no chat template. Likely cause: a base model, not an instruct model. "
                "Next step: pass template=..., or encode a prompt of your own."
            )
        name = template or ("tool_use" if has_tools and "tool_use" in self.templates else "default")
        if name not in self.templates:
            raise TokenizerError(
                f"{self._folder} has no default chat template. Next step: pass template= one of {list(self.templates)}."
            )
        return self.templates[name]

    def _run(self, source: str, variables: Mapping[str, Any]) -> str:
        environment = sandbox.TemplateSandbox()
        try:
            if source not in self._compiled:
                if len(source) > MAX_TEMPLATE_CHARS:
                    raise limits.TooMuch(f"a template of more than {MAX_TEMPLATE_CHARS:,} characters")
                self._compiled[source] = environment.compile(source)
            program = jinja2.Template.from_code(environment, self._compiled[source], environment.make_globals(None))
            size, parts = 0, []
            for part in program.generate(variables):
                size += len(part)
                if size > limits.MAX_CHARS:
                    raise limits.TooMuch(f"an output of more than {limits.MAX_CHARS:,} characters")
                parts.append(part)
            return "".join(parts)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(f"chat template, line {error.lineno}: syntax error: {error.message}") from error
        except sandbox.SecurityError as error:
            raise TokenizerError(f"chat template{_line(error)}: blocked by the sandbox: {error}") from error
        except limits.TooMuch as error:
            raise TokenizerError(f"chat template{_line(error)}: stopped at {error}.") from error
        except sandbox.RaisedByTemplate as error:
            raise TokenizerError(f"the chat template refuses these messages: {error}") from error
        except Exception as error:
            reason = "it calls itself without end" if isinstance(error, RecursionError) else error
            raise TokenizerError(f"chat template{_line(error)}: {type(error).__name__}: {reason}") from error


def _line(error: BaseException) -> str:
    """ ", line 7": jinja maps the frames of a template to its lines."""
    lines, trace = [], error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return f", line {lines[-1]}" if lines else ""


def _plain(value: Any) -> Any:
    """A copy made of dict, list, str, int, float, bool and None."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"


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
