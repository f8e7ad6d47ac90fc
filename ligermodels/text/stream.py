"""Streaming: StreamDecoder decodes ids one by one, StopStrings ends a stream of text at a stop string."""

import functools
import operator
from collections.abc import Iterable, Sequence
from reprlib import repr as short
from typing import Any

from ligermodels.errors import InputError

_BROKEN = "\ufffd"


class StreamDecoder:
    """Decodes ids one by one. The parts joined are `tokenizer.decode` of all the ids.

        stream = StreamDecoder(tokenizer)
        for index in ids:
            print(stream.put(index), end="", flush=True)
        print(stream.flush())

    A part never ends inside a character. A token costs the same after any text: only a window of the last ids is
    decoded. The window begins with ids whose text was returned before, so that a decoder that strips the beginning of
    a text (Llama 2's dummy prefix) strips nothing new.

    Text that was returned stays, even where later ids would change it: for one bad byte transformers' tokenizers turn
    a whole run of byte tokens into U+FFFD. tokenizers' DecodeStream raises there, and has no flush.

    unfinished: text that is withheld until its last character is complete.
    tokenizer: a `Tokenizer`, or any object with `decode(ids, skip_special_tokens=...)`.
    after: the ids before the stream, whose text is not returned: "world" after "Hello" becomes " world" for Llama 2.
    Raises InputError.
    """

    def __init__(self, tokenizer: Any, *, after: Iterable[int] = (), skip_special_tokens: bool = True) -> None:
        if not callable(getattr(tokenizer, "decode", None)):
            raise InputError(f"a {type(tokenizer).__name__} has no decode(ids, skip_special_tokens=...).")
        self._decode = functools.partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        # The window, the number of its ids whose text was returned, and that text.
        self._ids, self._returned, self._text, self.unfinished = [_checked(index) for index in after], 0, "", ""
        # An unfinished character has up to three tokens.
        for count in range(len(self._ids), max(0, len(self._ids) - 4), -1):
            self._returned, self._text = count, self._decode(self._ids[:count])
            if not self._text.endswith(_BROKEN):
                break

    def put(self, index: int) -> str:
        """The text that the token `index` completes; "" while a character is incomplete."""
        self._ids.append(_checked(index))
        text = self._decode(self._ids)
        self.unfinished = text[len(self._text) :] if text.endswith(_BROKEN) else ""
        return "" if self.unfinished else self._new(text)

    def flush(self) -> str:
        """The rest of the text after the last id; an incomplete character becomes U+FFFD."""
        return self._new(self._decode(self._ids)) if self._ids else ""

    def _new(self, text: str) -> str:
        """The part of the window's text that was not returned yet. Moves the window."""
        new = text[len(self._text) :]
        if new:
            later = self._ids[self._returned :]
            if start := self._decode(later):
                self._ids, text = later, start
            self._returned, self._text = len(self._ids), text
        return new


def _checked(index: Any) -> int:
    try:
        number = operator.index(index)
    except (TypeError, RuntimeError) as error:
        raise InputError(f"put takes one id, an int or a tensor of one, not {short(index)}.") from error
    if number < 0:
        raise InputError(f"{number} is not a token id: ids are 0 or more.")
    return number


class StopStrings:
    """Ends a text at a stop string. Text that may be the beginning of one is withheld until more text comes.

    The string that is complete first wins, the longest of those that end together, however the text is split into
    parts. The stop string and the text after it are dropped.
    """

    def __init__(self, strings: str | Sequence[str]) -> None:
        self._strings = (strings,) if isinstance(strings, str) else tuple(strings)
        if not all(isinstance(string, str) and string for string in self._strings):
            raise InputError(f"stop strings must be non-empty strings, not {list(self._strings)!r}.")
        self._longest = max(map(len, self._strings), default=0)
        self._withheld = ""
        self.stopped = False

    def put(self, text: str) -> tuple[str, bool]:
        """(text, whether a stop string is complete)."""
        if self.stopped:
            return "", True
        text = self._withheld + text
        ends = [(at + len(s), at) for s in self._strings if (at := text.find(s)) >= 0]
        if ends:
            self._withheld, self.stopped = "", True
            return text[: min(ends)[1]], True
        starts = range(max(0, len(text) - self._longest + 1), len(text))
        end = next((at for at in starts if any(s.startswith(text[at:]) for s in self._strings)), len(text))
        self._withheld = text[end:]
        return text[:end], False

    def flush(self) -> str:
        """The withheld text, after the last part."""
        text, self._withheld = self._withheld, ""
        return text
