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
from reprlib import repr as short
from typing import Any

from ligermodels.errors import InputError
from ligermodels.recipes import images
from ligermodels.recipes.rows import Rows, parse_json

Message = dict[str, Any]
_ROLES = dict.fromkeys(("human", "user"), "user") | {"system": "system", "function_call": "function_call"}
_ROLES |= dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bing", "bard"), "assistant")
_ROLES |= dict.fromkeys(("tool", "observation", "function_response"), "tool")
"""Roles by their names in sharegpt."""
_REASONING = ("reasoning_content", "reasoning", "thinking")


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
    """A prompt with the chosen and the rejected answer, or with one and its label: whether it is a good one.

    Prompt and answers are texts, or lists of messages, all alike.
    """

    prompt: Any
    answers: tuple[Any, ...]
    label: bool | None = None
    tools: list[dict[str, Any]] | None = None


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
    for name, (keys, _) in FORMATS.items():
        if present.issuperset(keys) or (name == "sharegpt" and "conversation" in present):
            return name
    for name, (keys, _) in FORMATS.items():
        if row.keys() >= set(keys):
            null = ", ".join(key for key in keys if row[key] is None)
            raise InputError(f"{null} is null; rows in the format {name!r} have {', '.join(keys)}")
    known = "; ".join(f"{name}: {', '.join(keys)}" for name, (keys, _) in FORMATS.items())
    raise InputError(f"no format has the keys {short(sorted(present))}. Keys of the formats: {known}")


def read(row: Mapping[str, Any]) -> Item:
    """The row as its format is read. Raises InputError that names the field, but not the row."""
    name, folder = format_of(row), getattr(row, "folder", None)
    row = {key: value for key, value in row.items() if value is not None}
    for key in ("videos", "audio", "audios"):
        if row.get(key):
            raise InputError(f"{key}: recipes train on texts and images only, for now")
    if row.get("images") and row.get("image"):
        raise InputError("images, image: give one of the two")
    given = row.get("images") or row.get("image") or None
    if isinstance(given, str) and given.lstrip().startswith("["):  # a list in a CSV file; a path stays as it is
        given = _list(given, "images")
    if "chat_template_kwargs" in row:
        raise InputError("chat_template_kwargs: variables of the chat template cannot be set for a row; leave them out")
    item = FORMATS[name][1](row)
    if isinstance(item, Conversation):
        messages, found = images.place(item.messages, given, folder)
        return replace(item, messages=messages, images=found)
    parts = (item.prompt, *item.answers) if isinstance(item, Answers) else ()
    if given is not None or any(map(images.has_parts, parts)):
        raise InputError(f"images: rows of {name} train on text only, for now; rows with messages take images")
    return item


def with_system(item: Any, text: str | None) -> Any:
    """The item with a system message, if there is a text and its messages begin without one. Raises InputError."""
    if text is None:
        return item
    name = "messages" if isinstance(item, Conversation) else "prompt"
    messages = getattr(item, name, None)
    if not isinstance(messages, list):
        raise InputError("system_prompt: it is for chats, and the row has none; leave it out")
    return item if messages[0]["role"] == "system" else replace(item, **{name: _system(text) + messages})


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
            prompt = chosen[: shared_length(chosen, rejected)]
            if not all(text[len(prompt) :][:1].isspace() for text in (chosen, rejected)):
                prompt = re.sub(r"\S*$", "", prompt)  # back to the end of a word
            prompt = prompt.rstrip(" ")  # the space before an answer is the answer's
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    else:
        number = shared_length(chosen[:-1], rejected[:-1])
        shared = chosen[:number]
        prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        # Many data sets give the prompt, and repeat it at the beginning of both conversations.
        if prompt is None or (shared and _role_and_content(shared[-len(prompt) :]) == _role_and_content(prompt)):
            prompt, chosen, rejected = shared, chosen[number:], rejected[number:]
        elif shared and shared[0]["role"] != "assistant":
            raise InputError("prompt: it is not what chosen and rejected begin with")
    if not prompt:
        raise InputError("prompt: it is missing, and chosen and rejected begin with nothing that they share")
    for key, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer:
            raise InputError(f"{key}: nothing is left of it after the prompt")
    return Answers(prompt, (chosen, rejected), tools=_tools(row))


def shared_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """The number of items that both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(first), len(second)))


def _role_and_content(messages: list[Message]) -> list[tuple[Any, Any]]:
    return [(message["role"], message.get("content")) for message in messages]


def _read_unpaired(row: dict[str, Any]) -> Answers:
    prompt, completion = _prompt_and_completion(row)
    label = row["label"]
    texts = {"true": True, "false": False, "1": True, "0": False}  # in CSV files
    value = texts.get(label.strip().lower()) if isinstance(label, str) else label
    if value not in (True, False):
        raise _wrong("label", "true or false", label)
    return Answers(prompt, (completion,), bool(value), _tools(row))


def _read_tokens(row: dict[str, Any]) -> Tokens:
    row = {"labels": row["input_ids"], **row}
    ids, labels = _integers(row, "input_ids"), _integers(row, "labels")
    mask = _integers(row, "attention_mask") if "attention_mask" in row else [1] * len(ids)
    if not len(ids) == len(labels) == len(mask):
        raise InputError(f"input_ids, labels, attention_mask: their lengths differ: {len(ids), len(labels), len(mask)}")
    if not set(mask) <= {0, 1}:
        raise InputError("attention_mask: expected 0 and 1 only")
    for n, (index, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (index, -100):
            raise InputError(
                f"labels: at {n} it is {label}, neither the id there ({index}) nor -100. Labels are not shifted; the "
                "model does that"
            )
    kept = [n for n, real in enumerate(mask) if real]
    if not kept:
        raise InputError("input_ids: the row has no tokens")
    return Tokens([ids[n] for n in kept], [labels[n] for n in kept])


def _read_messages(row: dict[str, Any]) -> Conversation:
    return Conversation(_messages(row["messages"], "messages"), _tools(row))


def _read_sharegpt(row: dict[str, Any]) -> Conversation:
    key = "conversations" if "conversations" in row else "conversation"
    turns = _list(row[key], key)
    if not turns or (isinstance(turns[0], Mapping) and "role" in turns[0]):  # some sets have OpenAI's keys here
        messages = _messages(turns, key)
    else:
        messages = [_turn(turn, f"{key}[{n}]") for n, turn in enumerate(turns)]
    return Conversation(_system(_text(row, "system", "")) + messages, _tools(row))


def _turn(turn: Any, field: str) -> Message:
    if not isinstance(turn, Mapping) or not {"from", "value"} <= turn.keys():
        raise _wrong(field, "the keys from and value", turn)
    name, value = turn["from"], _text(turn, "value", field=f"{field}.value")
    if not isinstance(name, str) or name not in _ROLES:
        raise InputError(f"{field}.from: {short(name)} is none of {', '.join(_ROLES)}")
    message: Message = {"role": _ROLES[name], "content": value}
    if name == "function_call":
        calls = _json(value, f"{field}.value")
        calls = calls if isinstance(calls, list) else [calls]
        message = {"role": "assistant", "content": "", "tool_calls": _calls(calls, f"{field}.value")}
    return message | _train(turn, message["role"], field)


def _read_prompt_completion(row: dict[str, Any]) -> Text | Conversation:
    prompt, completion = _prompt_and_completion(row)
    if isinstance(prompt, str):
        return Text(completion, prompt)
    untrained = [m | {"train": False} if m["role"] == "assistant" else m for m in prompt]
    return Conversation(untrained + completion, _tools(row))


def _prompt_and_completion(row: dict[str, Any]) -> tuple[Any, Any]:
    """Both texts or both messages; the completion is not empty."""
    prompt, completion = _text_or_messages(row, "prompt"), _text_or_messages(row, "completion")
    if isinstance(prompt, str) is not isinstance(completion, str):
        raise InputError("prompt, completion: one is a text, the other a list of messages")
    if not completion:
        raise InputError("completion: it is empty")
    return prompt, completion


def _read_alpaca(row: dict[str, Any]) -> Conversation:
    messages = _system(_text(row, "system", ""))
    for n, pair in enumerate(_list(row.get("history", []), "history")):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise _wrong(f"history[{n}]", "[instruction, answer]", pair)
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    question = "\n\n".join(text for text in (_text(row, "instruction"), _text(row, "input", "")) if text)
    if not question:
        raise InputError("instruction: it is empty")
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": _text(row, "output")}]
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


def _json(value: Any, field: str) -> Any:
    """The value, parsed if it is a text: CSV and Parquet files often store lists as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except InputError as error:
        raise InputError(f"{field}: {error}: {short(value)}") from error


def _list(value: Any, field: str) -> list[Any]:
    value = _json(value, field)
    if not isinstance(value, list):
        raise _wrong(field, "a list", value)
    return value


def _text(row: Mapping[str, Any], key: str, default: str | None = None, field: str = "") -> str:
    value = row.get(key, default)
    if not isinstance(value, str):
        raise _wrong(field or key, "a text", value)
    return value


def _text_or_messages(row: Mapping[str, Any], key: str) -> Any:
    value = row.get(key)
    return value if value is None or isinstance(value, str) else _messages(value, key)


def _integers(row: Mapping[str, Any], key: str) -> list[int]:
    values = _list(row[key], key)
    for n, value in enumerate(values):
        if type(value) is not int:
            raise _wrong(f"{key}[{n}]", "an integer", value)
    return values


def _system(text: str) -> list[Message]:
    return [{"role": "system", "content": text}] if text else []


def _tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools = _list(row.get("tools") or [], "tools")
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise _wrong("tools", "a list of JSON schemas", tools)
    return tools or None


def _messages(value: Any, field: str) -> list[Message]:
    messages = [_message(message, f"{field}[{n}]") for n, message in enumerate(_list(value, field))]
    if not messages:
        raise InputError(f"{field}: it is empty")
    return messages


def _message(message: Any, field: str) -> Message:
    if not isinstance(message, Mapping):
        raise _wrong(field, "a dict with role and content", message)
    found = {key: value for key, value in message.items() if value is not None and key not in ("train", "weight")}
    role = found.get("role")
    if not isinstance(role, str) or not role:
        hint = "; from and value are the keys of sharegpt, under `conversations`" if "from" in found else ""
        raise InputError(f"{field}.role: expected a text, not {short(role)}{hint}")
    if role != "assistant" and _ROLES.get(role.lower()) == "assistant":  # it would be rendered, and not trained
        raise InputError(f"{field}.role: expected 'assistant', not {short(role)}: no other role is trained")
    content = found.get("content")
    if isinstance(content, list):
        for n, part in enumerate(content):
            _check_part(part, f"{field}.content[{n}]")
    elif content is not None and not isinstance(content, str):
        raise _wrong(f"{field}.content", "a text", content)
    if found.get("tool_calls"):
        found["tool_calls"] = _calls(_list(found["tool_calls"], f"{field}.tool_calls"), f"{field}.tool_calls")
    if content is None and not found.get("tool_calls") and not any(found.get(key) for key in _REASONING):
        raise InputError(f"{field}.content is null" if "content" in message else f"{field}.content is missing")
    found.setdefault("content", "")  # many templates fail on, or print, a content that is null
    return found | _train(message, role, field)


def _check_part(part: Any, field: str) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("video", "audio", "input_audio"):
        raise InputError(f"{field}: it is of the type {kind}; recipes train on texts and images only")
    if kind not in ("image", "image_url") and (kind != "text" or not isinstance(part.get("text"), str)):
        raise _wrong(field, '{"type": "text", "text": ...}', part)


def _calls(calls: list[Any], field: str) -> list[Message]:
    """Tool calls with their arguments as dicts: OpenAI writes them as a text of JSON, which templates quote again."""
    found = []
    for n, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _wrong(f"{field}[{n}]", '{"function": {"name", "arguments"}}', call)
        arguments = _json(function.get("arguments", {}), f"{field}[{n}].arguments")
        if not isinstance(arguments, Mapping):
            raise _wrong(f"{field}[{n}].arguments", "a JSON object", arguments)
        outer = {key: value for key, value in call.items() if value is not None} if "function" in call else {}
        found.append({"type": "function", **outer, "function": {**function, "arguments": arguments}})
    return found


def _train(message: Mapping[str, Any], role: str, field: str) -> Message:
    """{"train": False} for an assistant's message that says so; `weight` is OpenAI's name, with 0 and 1."""
    flags = {key: message[key] for key in ("train", "weight") if message.get(key) is not None}
    for key, flag in flags.items():
        if flag not in (0, 1):
            raise _wrong(f"{field}.{key}", "true or false", flag)
        if flag and role != "assistant":
            raise InputError(f"{field}.{key}: only messages of the assistant can be trained, not those of {role!r}")
    return {"train": False} if role == "assistant" and not all(flags.values()) else {}
