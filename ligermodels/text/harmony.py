"""Answers in OpenAI's harmony format, as gpt-oss gives them: one or several messages, each on a channel.

After a prompt that ends with `<|start|>assistant` an answer is, for example,

    <|channel|>analysis<|message|>REASONING<|end|><|start|>assistant<|channel|>final<|message|>ANSWER<|return|>

What precedes <|message|> is a message's header. The channel "final" is for the user, and later turns have that alone:
the chat template writes it, with <|end|> in place of <|return|>.

Source: https://cookbook.openai.com/articles/openai-harmony.
"""

import re
from typing import Any

from ligermodels.text.stream import StreamDecoder

PROMPT_END = "<|start|>assistant"
"""The end of a prompt that is answered in this format."""


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
        self._is_final, self._line, self.content = False, "", ""

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
        self._is_final = not self._line and header[:1] != [self._channel]  # else a header that was cut
        return self._said(self._tokenizer.decode(header, skip_special_tokens=True) if self._is_final else "")

    def _begin(self) -> str:
        header = self._tokenizer.decode(self._header, skip_special_tokens=False).removeprefix(PROMPT_END)
        words = re.sub(r"<\|\w+\|>", " ", header).split()
        self._header, self._body = [], StreamDecoder(self._tokenizer)
        self._is_final = re.search(r"<\|channel\|>\s*final\b", header) is not None
        start, self._line = f"{self._line}[{' '.join(words)}] ", "\n"
        return start

    def _said(self, text: str) -> str:
        self.content += text if self._is_final else ""
        return text
