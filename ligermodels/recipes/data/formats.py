"""Formats of training rows, detected from their keys, and what each is read as.

| format | keys | read as |
|---|---|---|
| pairs | chosen, rejected, prompt? (texts or messages) | Answers: chosen, rejected |
| unpaired | prompt, completion, label (true or false) | Answers: one, with a label |
| tokens | input_ids, labels?, attention_mask? | Tokens |
| messages | messages: [{role, content, tool_calls?, train? or weight?}], tools?, images? | Conversation |
| sharegpt | conversations or conversation: [{from, value}] or messages, system?, tools?, images? | Conversation |
| prompt-completion | prompt, completion, both texts or both messages | Text or Conversation |
| alpaca | instruction, output, input?, system?, history?, images? | Conversation |
| text | text | Text |

The first line of the table that fits is the format; other keys of a row are ignored. Keys whose value is null count as
missing, because `datasets` and CSV files give all rows the same keys.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from reprlib import repr as short
from typing import Any

from ligermodels.errors import InputError
from ligermodels.recipes.data import images
from ligermodels.recipes.data.rows import Rows, parse_json

Message = dict[str, Any]
_ROLES = dict.fromkeys(("human", "user"), "user") | {"system": "system", "function_call": "assistant"}
_ROLES |= dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bing", "bard"), "assistant")
_ROLES |= dict.fromkeys(("tool", "observation", "function_response"), "tool")
"""Roles by their names in sharegpt."""
_KNOWN = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "reasoning", "thinking")
_NOT_READ = {
    **dict.fromkeys(("videos", "audio", "audios"), "recipes train on texts and images only, for now"),
    "chat_template_kwargs": "a row cannot set variables of the chat template; leave them out",
}


@dataclass(frozen=True)
class Conversation:
    """Messages as the chat template takes them. An assistant's message that is not to be trained has "train": False.

    images: as `vision.load_image` takes them, one for each part {"type": "image"}.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    images: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Text:
    """A text, all of it trained but the prompt before it."""

    text: str
    prompt: str = ""


@dataclass(frozen=True)
class Tokens:
    """Token ids, and labels that are the id itself, not shifted, or -100."""

    ids: list[int]
    labels: list[int]


@dataclass(frozen=True)
class Answers:
    """The chosen and the rejected answer to a prompt, or one and its label: whether it is a good one.

    sequences: the prompt with each answer, of which the answer is trained.
    """

    sequences: tuple[Text | Conversation, ...]
    label: bool | None = None

    @property
    def chats(self) -> list[Conversation]:
        return [sequence for sequence in self.sequences if isinstance(sequence, Conversation)]


Item = Conversation | Text | Tokens | Answers


def detect(rows: Rows) -> tuple[str, str]:
    """The format of the first row that can be read, and where that is.

    Raises the InputError of the first row if none of the first 100 can be read.
    """
    first: InputError | None = None
    for index in range(min(100, len(rows))):
        try:
            return format_of(rows[index]), rows.where(index)
        except InputError as error:
            first = first or InputError(f"{rows.where(index)}: {error}")
    raise first or InputError("there are no rows")


def format_of(row: Mapping[str, Any]) -> str:
    """The format of a row. Raises InputError where no format has its keys."""
    present = {key for key, value in row.items() if value is not None}
    is_list = str(row.get("conversation")).lstrip().startswith("[")  # the key of sharegpt, and of plain texts elsewhere
    for name, (keys, _) in FORMATS.items():
        if present.issuperset(keys) or (name == "sharegpt" and is_list):
            return name
    null = ", ".join(sorted(map(str, row.keys() - present)))
    null = f" ({null} is null)" if null else ""
    known = "; ".join(f"{name}: {', '.join(keys)}" for name, (keys, _) in FORMATS.items())
    keys_of_all = sorted({key for keys, _ in FORMATS.values() for key in keys})
    near = {
        key: match
        for key in map(str, sorted(present, key=str))
        for match in get_close_matches(key, keys_of_all, 1, 0.75)
    }
    meant = "".join(f", {key} to {match}" for key, match in near.items() if key != match)
    raise InputError(
        f"no format has the keys {short(sorted(present))}{null}. Keys of the formats: {known}. "
        f"Next step: rename the keys of the rows{meant}"
    )


def read(row: Mapping[str, Any], system_prompt: str | None = None) -> Item:
    """The row as its format is read. system_prompt: of chats that begin without one.

    Raises InputError that names the field, but not the row.
    """
    name, folder = format_of(row), getattr(row, "folder", None)
    row = {key: value for key, value in row.items() if value is not None}
    for key in row.keys() & _NOT_READ.keys():
        if row[key]:
            raise InputError(f"{key}: {_NOT_READ[key]}")
    item, row_images = FORMATS[name][1](row), row.get("images") or row.get("image") or None
    if isinstance(item, Conversation):
        messages, sources = images.place(item.messages, row_images, folder)
        item = replace(item, messages=messages, images=sources)
    elif row_images is not None or any(images.are_in(chat.messages) for chat in getattr(item, "chats", ())):
        raise InputError(f"images: rows of {name} train on text only, for now; rows with messages take images")
    if system_prompt is None:
        return item
    if isinstance(item, Answers):
        return replace(item, sequences=tuple(_with_system(sequence, system_prompt) for sequence in item.sequences))
    return _with_system(item, system_prompt)


def _with_system(item: Any, text: str) -> Any:
    if not isinstance(item, Conversation):
        raise InputError("system_prompt: it is for chats, and the row has none; leave it out")
    begins_with_one = item.messages[0]["role"] == "system"
    return item if begins_with_one else replace(item, messages=_system(text) + item.messages)


# ---- one reader for each format ----


def _read_pairs(row: dict[str, Any]) -> Answers:
    chosen, rejected, prompt = (_text_or_messages(row, key) for key in ("chosen", "rejected", "prompt"))
    if isinstance(chosen, str) is not isinstance(rejected, str):
        raise InputError("chosen, rejected: one is a text, the other a list of messages")
    if chosen == rejected:
        raise InputError("chosen, rejected: both are the same, so that nothing can be preferred")
    if isinstance(chosen, str):
        if isinstance(prompt, list):
            chosen, rejected = ([{"role": "assistant", "content": text}] for text in (chosen, rejected))
        elif prompt is None:
            prompt = chosen[: _shared_length(chosen, rejected)]
            if not all(text[len(prompt) :][:1].isspace() for text in (chosen, rejected)):
                prompt = re.sub(r"\S*$", "", prompt)  # back to the end of a word
            prompt = prompt.rstrip(" ")  # the space before an answer is the answer's
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    else:
        number = _shared_length(chosen[:-1], rejected[:-1])
        shared = chosen[:number]
        prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        # Many data sets give the prompt, and repeat it at the beginning of both conversations.
        if prompt is None or (shared and _role_and_content(shared[-len(prompt) :]) == _role_and_content(prompt)):
            prompt, chosen, rejected = shared, chosen[number:], rejected[number:]
        elif shared and shared[0]["role"] != "assistant":
            raise InputError("prompt: it is not what chosen and rejected begin with")
    for key, part in (("prompt", prompt), ("chosen", chosen), ("rejected", rejected)):
        if not part:
            raise InputError(f"{key}: it is missing, or empty without the messages that chosen and rejected share")
    return Answers(tuple(_after_prompt(prompt, answer, row) for answer in (chosen, rejected)))


def _shared_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """The number of items that both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(first), len(second)))


def _role_and_content(messages: list[Message]) -> list[tuple[Any, Any]]:
    return [(message["role"], message.get("content")) for message in messages]


def _after_prompt(prompt: Any, answer: Any, row: dict[str, Any]) -> Text | Conversation:
    """The prompt with an answer, both texts or both messages, of which the answer is trained."""
    if isinstance(prompt, str):
        return Text(answer, prompt)
    untrained = [m | {"train": False} if m["role"] == "assistant" else m for m in prompt]
    return Conversation(untrained + answer, _tools(row))


def _read_prompt_completion(row: dict[str, Any]) -> Text | Conversation:
    prompt, completion = _text_or_messages(row, "prompt"), _text_or_messages(row, "completion")
    if isinstance(prompt, str) is not isinstance(completion, str):
        raise InputError("prompt, completion: one is a text, the other a list of messages")
    if not completion:
        raise InputError("completion: it is empty")
    return _after_prompt(prompt, completion, row)


def _read_unpaired(row: dict[str, Any]) -> Answers:
    return Answers((_read_prompt_completion(row),), label_of(row))


def label_of(row: Mapping[str, Any]) -> bool:
    """The label of a row of the format unpaired."""
    label = row.get("label")
    texts = {"true": True, "false": False, "1": True, "0": False}  # in CSV files
    value = texts.get(label.strip().lower()) if isinstance(label, str) else label
    if value not in (True, False):
        raise _wrong("label", "true or false", label)
    return bool(value)


def _read_tokens(row: dict[str, Any]) -> Tokens:
    ids, labels = (_parsed(row.get(key, row["input_ids"]), list, key) for key in ("input_ids", "labels"))
    if not ids or not all(type(index) is int for index in ids):
        raise _wrong("input_ids", "integers", ids)
    if len(ids) != len(labels) or any(label not in (index, -100) for index, label in zip(ids, labels, strict=True)):
        raise _wrong("labels", "the id itself or -100 for each id, not shifted", labels)
    if 0 in _parsed(row.get("attention_mask", [1]), list, "attention_mask"):
        raise InputError("attention_mask: it has zeros; give rows without padding")
    return Tokens(ids, labels)


def _read_messages(row: dict[str, Any]) -> Conversation:
    return Conversation(_messages(row["messages"], "messages"), _tools(row))


def _read_sharegpt(row: dict[str, Any]) -> Conversation:
    key = "conversations" if "conversations" in row else "conversation"
    return Conversation(_system(_text(row, "system", "")) + _messages(row[key], key), _tools(row))


def _read_alpaca(row: dict[str, Any]) -> Conversation:
    question = "\n\n".join(text for text in (_text(row, "instruction"), _text(row, "input", "")) if text)
    if not question:
        raise InputError("instruction: it is empty")
    messages = _system(_text(row, "system", ""))
    for n, pair in enumerate([*_parsed(row.get("history", []), list, "history"), [question, _text(row, "output")]]):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise _wrong(f"history[{n}]", "[instruction, answer]", pair)
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return Conversation(messages)


def _read_text(row: dict[str, Any]) -> Text:
    if not (text := _text(row, "text")):
        raise InputError("text: it is empty")
    return Text(text)


FORMATS: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], Item]]] = {
    "pairs": (("chosen", "rejected"), _read_pairs),
    "unpaired": (("prompt", "completion", "label"), _read_unpaired),
    "tokens": (("input_ids",), _read_tokens),
    "messages": (("messages",), _read_messages),
    "sharegpt": (("conversations",), _read_sharegpt),
    "prompt-completion": (("prompt", "completion"), _read_prompt_completion),
    "alpaca": (("instruction", "output"), _read_alpaca),
    "text": (("text",), _read_text),
}
"""The keys that each format needs, and its reader."""


# ---- fields ----


def _wrong(field: str, expected: str, value: Any) -> InputError:
    return InputError(f"{field}: expected {expected}, not {short(value)}")


_KINDS: dict[Any, str] = {str: "a text", list: "a list", dict: "a JSON object", list | dict: "a list"}


def _parsed(value: Any, kind: Any, field: str) -> Any:
    """The value, of a kind; parsed if it is a text: CSV and Parquet files often store lists as JSON."""
    if isinstance(value, str) and kind is not str:
        try:
            value = parse_json(value)
        except InputError as error:
            raise InputError(f"{field}: {error}: {short(value)}") from error
    if not isinstance(value, kind):
        raise _wrong(field, _KINDS[kind], value)
    return value


def _text(row: Mapping[str, Any], key: str, default: str | None = None) -> str:
    return str(_parsed(row.get(key, default), str, key))


def _text_or_messages(row: Mapping[str, Any], key: str) -> Any:
    value = row.get(key)
    return value if value is None or isinstance(value, str) else _messages(value, key)


def _system(text: str) -> list[Message]:
    return [{"role": "system", "content": text}] if text else []


def _tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools: list[Any] = _parsed(row.get("tools") or [], list, "tools")
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise _wrong("tools", "a list of JSON schemas", tools)
    return tools or None


def _messages(value: Any, field: str) -> list[Message]:
    messages = [_message(message, f"{field}[{n}]") for n, message in enumerate(_parsed(value, list, field))]
    if not messages:
        raise InputError(f"{field}: it is empty")
    return messages


def _message(message: Any, field: str) -> Message:
    """A message as chat templates take it, of one with role and content, or with sharegpt's from and value."""
    if not isinstance(message, Mapping):
        raise _wrong(field, "a dict with role and content", message)
    fields = {key: value for key, value in message.items() if value is not None and key not in ("train", "weight")}
    if "from" in fields and "role" not in fields:
        name, fields["content"] = fields.pop("from"), fields.pop("value", None)
        if not isinstance(name, str) or name not in _ROLES:
            raise InputError(f"{field}.from: {short(name)} is none of {', '.join(_ROLES)}")
        fields["role"] = _ROLES[name]
        if name == "function_call":
            fields["tool_calls"], fields["content"] = fields["content"], None
    role, content = fields.get("role"), fields.get("content")
    known_role = _ROLES.get(str(role).lower())  # a template would render a role that is misspelt, and not train it
    if known_role not in ("user", "assistant"):
        known_role = next(iter(get_close_matches(str(role).lower(), _KNOWN, 1, 0.75)), role)
    if not isinstance(role, str) or not role or role != known_role:
        raise _wrong(f"{field}.role", repr(known_role) if known_role else "a text", role)
    if content is not None and not isinstance(content, str | list):
        raise _wrong(f"{field}.content", "a text", content)
    for n, part in enumerate(content if isinstance(content, list) else []):
        part_type = part.get("type") if isinstance(part, Mapping) else None
        if part_type not in ("image", "image_url") and (part_type != "text" or not isinstance(part.get("text"), str)):
            raise _wrong(f"{field}.content[{n}]", 'a part of the type "text" or "image"', part)
    if fields.get("tool_calls"):
        calls = _parsed(fields["tool_calls"], list | dict, f"{field}.tool_calls")
        calls = calls if isinstance(calls, list) else [calls]
        fields["tool_calls"] = [_call(call, f"{field}.tool_calls[{n}]") for n, call in enumerate(calls)]
    if content is None and not any(fields.get(key) for key in ("tool_calls", *REASONING)):
        raise InputError(f"{field}.content is {'null' if 'content' in message else 'missing'}")
    if content is None:  # templates test whether it is there, and print one that is null
        fields.pop("content", None)
    # `weight` is OpenAI's name of `train`, with 0 and 1.
    flag = next((message[key] for key in ("train", "weight") if message.get(key) is not None), role == "assistant")
    if flag not in (0, 1) or (flag and role != "assistant"):
        raise _wrong(f"{field}: train, weight", "true or false, and true for the assistant's messages alone", flag)
    return fields if flag or role != "assistant" else fields | {"train": False}


def _call(call: Any, field: str) -> Message:
    """A tool call with its arguments as a dict: OpenAI writes them as a text of JSON, which templates quote again."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong(field, '{"function": {"name", "arguments"}}', call)
    arguments = _parsed(function.get("arguments", {}), dict, f"{field}.arguments")
    outer = {key: value for key, value in call.items() if value is not None} if "function" in call else {}
    return {"type": "function", **outer, "function": {**function, "arguments": arguments}}
