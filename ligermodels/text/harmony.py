"""Answers in OpenAI's harmony format, as gpt-oss gives them: one or several messages, each on a channel.

After a prompt that ends with `<|start|>assistant` an answer is, for example,

    <|channel|>analysis<|message|>REASONING<|end|><|start|>assistant<|channel|>final<|message|>ANSWER<|return|>

What precedes <|message|> is a message's header. The channel "final" is for the user, and later turns have that alone:
the chat template writes it, with <|end|> in place of <|return|>.

Source: https://cookbook.openai.com/articles/openai-harmony.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from ligermodels.text.stream import StreamDecoder

PROMPT_END = "<|start|>assistant"
"""The end of a prompt that is answered in this format."""


@dataclass
class _Message:
    """channel: a word, or "" for none. function: that it calls, or ""."""

    channel: str
    function: str = ""
    text: str = ""


class HarmonyDecoder:
    """Decodes the ids of an answer one by one, as `StreamDecoder` does, for a reader and for the conversation.

    put and flush return the text of all messages, each of which begins a line with the words of its header, as
    "[analysis] ". content: the text so far of the messages on the channel "final".
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        names = ("<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
        self._channel, self._message, *self._ends = map(tokenizer.convert_tokens_to_ids, names)
        self._header: list[int] = []
        self._body: StreamDecoder | None = None
        self._messages: list[_Message] = []

    @property
    def content(self) -> str:
        return "".join(message.text for message in self._messages if message.channel == "final")

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of a conversation, with the keys of the chat template and of TRL, which strips texts.

        content: as `content`. thinking: the text on the channel "analysis". tool_calls: of each message to a function
        {"type": "function", "function": {"name", "arguments"}}, whose arguments stay a text if they are no JSON. The
        last two are left out where there are none.
        """
        message: dict[str, Any] = {"role": "assistant", "content": self.content.strip()}
        if thoughts := [one.text for one in self._messages if one.channel == "analysis" and not one.function]:
            message["thinking"] = "".join(thoughts).strip()
        calls = [(one.function, _arguments(one.text)) for one in self._messages if one.function]
        if calls:
            functions = ({"name": name, "arguments": arguments} for name, arguments in calls)
            message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        return message

    def put(self, index: int) -> str:
        """The text that the token `index` completes; "" while that is a part of a header or of a character."""
        if self._body is None and index == self._message:
            return self._begin()
        if self._body is None:
            self._header.append(index)
            return ""
        if index in self._ends:
            return self.flush()
        return self._said(self._body.put(index))

    def flush(self) -> str:
        """The rest of the text. An answer without any <|message|> is text: the model has left the format."""
        body, self._body = self._body, None
        if body is not None:
            return self._said(body.flush())
        header, self._header = self._header, []
        if self._messages or header[:1] == [self._channel]:  # a header that was cut
            return ""
        self._messages.append(_Message("final"))
        return self._said(self._tokenizer.decode(header, skip_special_tokens=True))

    def _begin(self) -> str:
        header = self._tokenizer.decode(self._header, skip_special_tokens=False).removeprefix(PROMPT_END)
        words = re.sub(r"<\|\w+\|>", " ", header).split()
        self._header, self._body = [], StreamDecoder(self._tokenizer)
        channel, function = re.search(r"<\|channel\|>\s*(\w+)", header), re.search(r"to=functions\.([^\s<]+)", header)
        start = "\n" if self._messages else ""
        self._messages.append(_Message(channel[1] if channel else "", function[1] if function else ""))
        return f"{start}[{' '.join(words)}] "

    def _said(self, text: str) -> str:
        self._messages[-1].text += text
        return text


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
