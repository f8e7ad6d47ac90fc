"""An Ollama Modelfile for a GGUF file: FROM, TEMPLATE, and PARAMETER for stop tokens and sampling.

Ollama's TEMPLATE is a Go template. It is derived from the checkpoint's own chat template, whatever its family: a
conversation of known texts is rendered, and what stands between them becomes the pieces of the TEMPLATE:

    {{ if .System }}BEFORE{{ .System }}AFTER{{ else }}NO SYSTEM{{ end }}
    {{ range .Messages }}{{ if eq .Role "user" }}BEFORE{{ .Content }}AFTER{{ else if eq .Role "assistant" }}...{{ end }}
    {{ end }}REPLY

Where the system message stands inside the first or the last message of the user (Gemma, Llama 2; Mistral), so it does
in the TEMPLATE. The pieces are then compared with the chat template on other conversations; if one differs, there is no
TEMPLATE, and the file says so. A default system message is the NO SYSTEM piece. BOS is left out where llama.cpp adds
it.

What a TEMPLATE of pieces has no place for: tools, thinking, images, a system message after the first one, an answer
that is continued, and the removal of white space around a text. Ollama joins messages of one role that follow each
other.

Without a TEMPLATE, Ollama renders the chat template in the GGUF file (since it runs llama-server, 2026). Before, it
used one of its list if the chat template was nearly the same, else the bare prompt.

Checked against: ollama/ollama, docs/modelfile.mdx, template/template.go, parser/parser.go, server/model.go and
llm/llama_server.go.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ligermodels.errors import LigermodelsError

NAME = "Modelfile"
MARK = "# Written by ligermodels."
"""The start of each of these files: others are not replaced."""
Messages = Sequence[Mapping[str, str]]
_PARAMETERS = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}  # fmt: skip
"""{field of generation_config.json: Ollama's parameter}."""
_SYSTEM, _USER, _ANSWER, _LAST = "Text of system", "Text of user", "Text of assistant", "Last text of user"


class NotPieces(ValueError):
    """A chat template that is not a sequence of pieces; the message says why."""


@dataclass(frozen=True)
class _Pieces:
    """What a chat template writes around the texts of a conversation.

    system: (before, after) it, None if the template takes none. place: where it stands; "first" and "last" are inside
    that message of the user. no_system: in its place if there is none. reply: at the end, before the model's text.
    """

    user: tuple[str, str]
    assistant: tuple[str, str]
    no_system: str
    reply: str
    system: tuple[str, str] | None = None
    place: Literal["own", "first", "last"] = "own"

    def render(self, messages: Messages) -> str:
        """The prompt for a conversation, as the Go template renders it."""
        system = next((message["content"] for message in messages if message["role"] == "system"), "")
        inside = self.system[0] + system + self.system[1] if self.system and system else ""
        text = inside if inside and self.place == "own" else self.no_system
        users = [at for at, message in enumerate(messages) if message["role"] == "user"]
        holder = {"own": None, "first": users[0], "last": users[-1]}[self.place]
        for at, message in enumerate(messages):
            if message["role"] != "system":
                before, after = self.user if message["role"] == "user" else self.assistant
                text += before + (inside if at == holder else "") + message["content"] + after
        return text + self.reply

    def to_go(self) -> str:
        """The Go template. Raises NotPieces for text that a Modelfile cannot hold."""
        texts = [self.no_system, self.reply, *self.user, *self.assistant, *(self.system or ())]
        if any('"""' in text for text in texts):
            raise NotPieces('it has """ in it')
        if not all(ch.isprintable() or ch in "\n\t" for text in texts for ch in text):
            raise NotPieces("it has characters that Ollama drops from a Modelfile")
        no_system, reply, *texts = (text.replace("{{", '{{ "{{" }}') for text in texts)
        before, content, after = texts[0], "{{ .Content }}", texts[1]
        start, start_range = no_system, "{{ range .Messages }}"
        if self.system:
            system = texts[4] + "{{ $.System }}" + texts[5]
            if self.place == "own":
                system = system.replace("$", "")
                start = f"{{{{ if .System }}}}{system}{{{{ else }}}}{no_system}{{{{ end }}}}"
                start = start.replace("{{ else }}{{ end }}", "{{ end }}")
            elif self.place == "first":
                start = "{{ $system := .System }}" + start
                content = (
                    f"{{{{ if $system }}}}{system.replace('$.System', '$system')}"
                    f'{{{{ $system = "" }}}}{{{{ end }}}}{content}'
                )
            else:
                start_range = "{{ range $i, $_ := .Messages }}"
                last = "(eq (len (slice $.Messages $i)) 1)"
                content = f"{{{{ if and $.System {last} }}}}{system}{{{{ end }}}}{content}"
        return (
            f'{start}{start_range}{{{{ if eq .Role "user" }}}}{before}{content}{after}'
            f'{{{{ else if eq .Role "assistant" }}}}{texts[2]}{{{{ .Content }}}}{texts[3]}'
            f"{{{{ end }}}}{{{{ end }}}}{reply}"
        )


def modelfile(tokenizer: Any, generation_config: Mapping[str, Any], gguf: str) -> str:
    """The contents of a Modelfile.

    tokenizer: a text.Tokenizer. gguf: the name of the GGUF file, in the same folder.
    """
    lines = [f"{MARK} Next: ollama create NAME -f {NAME}, then ollama run NAME", f"FROM ./{gguf}"]
    if tokenizer.chat_template is None:
        lines.append("# The model has no chat template: Ollama sends the prompt as it is.")
    else:
        lines += _template_lines(tokenizer)
    stops = [tokenizer.backend.id_to_token(index) for index in tokenizer.chat_stop_ids]
    lines += [f'PARAMETER stop "{stop}"' for stop in stops if stop]
    settings = {theirs: generation_config.get(ours) for ours, theirs in _PARAMETERS.items()}
    if generation_config.get("do_sample") is False:
        settings |= {"temperature": 0, "top_k": None, "top_p": None, "min_p": None}
    if settings["repeat_penalty"] == 1:
        settings["repeat_penalty"] = None
    lines += [f"PARAMETER {name} {value}" for name, value in settings.items() if value is not None]
    return "\n".join(lines) + "\n"


def go_template(render: Callable[[Messages, bool], str], bos: str = "") -> str:
    """The Go template of a chat template.

    render: (messages, whether the start of a reply follows) -> text. bos: text of the token that llama.cpp adds before
    a prompt, "" if it adds none. Raises NotPieces.
    """

    def prompt(*texts: str, reply: bool = True) -> str:
        roles = {_SYSTEM: "system", _ANSWER: "assistant"}
        messages = [{"role": roles.get(text, "user"), "content": text} for text in texts]
        return render(messages, reply).removeprefix(bos)

    pieces = _turns(prompt)
    candidates = [pieces]
    try:
        before, after, _ = _between(prompt(_SYSTEM, _USER), _SYSTEM, _USER)
    except (LigermodelsError, NotPieces):  # it takes no system message, or drops it
        pass
    else:
        start = pieces.no_system + pieces.user[0]
        candidates = []
        if after.endswith(pieces.user[0]):
            candidates.append(replace(pieces, system=(before, after.removesuffix(pieces.user[0]))))
        if before.startswith(start):
            inside = (before.removeprefix(start), after)
            candidates += [replace(pieces, system=inside, place=place) for place in ("first", "last")]
    for candidate in candidates:
        if all(
            candidate.render(messages) == render(messages, True).removeprefix(bos) for messages in _checks(candidate)
        ):
            return candidate.to_go()
    raise NotPieces("it does more than to write markers around messages")


def _template_lines(tokenizer: Any) -> list[str]:
    """TEMPLATE and what is to be known of it, or why there is none."""

    def render(messages: Messages, reply: bool) -> str:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=reply))

    source = tokenizer.chat_template
    source = source if isinstance(source, str) else "".join(source.values())
    adds_bos = tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]
    try:
        template = go_template(render, tokenizer.bos_token if adds_bos else "")
    except (LigermodelsError, NotPieces) as error:
        return [
            f"# No TEMPLATE, for the model's chat template cannot be written as one: {str(error).splitlines()[0]}.",
            "# Ollama then renders the chat template in the GGUF file; versions before 2026 may send the bare prompt.",
        ]
    lines = []
    if "tools" in source or "think" in source:
        lines += [
            "# TEMPLATE has no tools and no thinking. Without it, Ollama renders the chat template in the GGUF file;",
            "# versions before 2026 may send the bare prompt.",
        ]
    if "strftime_now" in source:
        lines.append("# The date in TEMPLATE is that of the conversion.")
    return [*lines, f'TEMPLATE """{template}"""']


def _turns(prompt: Callable[..., str]) -> _Pieces:
    """The pieces without those of a system message."""
    start, end = _between(prompt(_USER), _USER)
    _, closed = _between(prompt(_USER, reply=False), _USER)
    _, _, after_answer = _between(prompt(_USER, _ANSWER, reply=False), _USER, _ANSWER)
    _, to_answer, to_user, _ = _between(prompt(_USER, _ANSWER, _LAST), _USER, _ANSWER, _LAST)
    if not (to_answer.startswith(closed) and end.startswith(closed)):
        closed = _common_start(to_answer, end)
    before_user = to_user.removeprefix(after_answer)
    if not start.endswith(before_user):  # as where BOS, which llama.cpp adds to the first one, starts each message
        before_user = _common_start(start[::-1], before_user[::-1])[::-1]
        before_user = re.sub(r"^[^<\[]*[>\]]", "", before_user)  # the end of a marker: cut after it
    return _Pieces(
        user=(before_user, closed),
        assistant=(to_answer.removeprefix(closed), to_user.removesuffix(before_user)),
        no_system=start.removesuffix(before_user),
        reply=end.removeprefix(closed),
    )


def _common_start(a: str, b: str) -> str:
    count = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:count]


def _between(text: str, *parts: str) -> list[str]:
    """What stands before, between and after the parts, which must be there once and in this order."""
    pieces = []
    for part in parts:
        if text.count(part) != 1:
            raise NotPieces("it drops, repeats or moves a message")
        before, _, text = text.partition(part)
        pieces.append(before)
    return [*pieces, text]


def _checks(pieces: _Pieces) -> list[Messages]:
    """Conversations of one to three messages of the user, with and without a system message."""
    texts = ["What is 2 + 2?\nShow it.", "It is <b>4</b>: {two} and two.", "And 3 + 3?", "Six.", "Sure? \u00e9\u6f22"]
    chats: list[Messages] = []
    for count in (1, 3, 5):
        turns = [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(texts[:count])]
        chats.append(turns)
        if pieces.system:
            chats.append([{"role": "system", "content": "Be brief.\n\nAnswer in French."}, *turns])
    return chats
