"""Text that appears while ids do: StreamDecoder turns ids into text, StopStrings finds where to stop."""

import functools
import operator
from collections.abc import Iterable, Sequence
from reprlib import repr as short
from typing import Any, Protocol

from ligermodels.errors import InputError

_BROKEN = "\ufffd"


class TextDecoder(Protocol):
    """What a tokenizer needs to be streamed: `Tokenizer` and transformers' tokenizers have it."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> Any: ...


class StreamDecoder:
    """Decodes ids one by one; the parts joined are `tokenizer.decode` of all the ids.

        stream = StreamDecoder(tokenizer)
        for index in ids:
            print(stream.put(index), end="", flush=True)
        print(stream.flush())

    A part never ends inside a character. The cost of a token does not grow with the text before it: decoded is a
    window of the last ids, which begins with ids whose text has been given, and which have some. What a decoder strips
    from the beginning of a text (Llama 2's dummy prefix) is stripped from them.

    Text that has been given stays, also where more ids would change it: for one bad byte transformers' tokenizers turn
    a whole run of byte tokens into U+FFFD. (There tokenizers' own DecodeStream raises, and it has no flush.)

    tokenizer: a `Tokenizer`, or any object with `decode(ids, skip_special_tokens=...)`.
    after: the ids that the ones to come continue, whose own text is not given again: " world" after "Hello". Without
    them Llama 2's decoder says "world".
    Raises InputError for another object.
    """

    def __init__(self, tokenizer: TextDecoder, *, after: Iterable[int] = (), skip_special_tokens: bool = True) -> None:
        if not callable(getattr(tokenizer, "decode", None)):
            raise InputError(f"a {type(tokenizer).__name__} has no decode(ids, skip_special_tokens=...).")
        self._decode = functools.partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        # The window, how many of its ids have given their text, and that text.
        self._ids, self._given, self._text = [_checked(index) for index in after], 0, ""
        # An unfinished character has up to three tokens.
        for given in range(len(self._ids), max(0, len(self._ids) - 4), -1):
            self._given, self._text = given, self._decode(self._ids[:given])
            if not self._text.endswith(_BROKEN):
                break

    def put(self, index: int) -> str:
        """The text that the token `index` completes; "" while a character is still open."""
        self._ids.append(_checked(index))
        text = self._decode(self._ids)
        return "" if text.endswith(_BROKEN) else self._new(text)

    def flush(self) -> str:
        """The rest, once no more ids come: an unfinished character turns into U+FFFD."""
        return self._new(self._decode(self._ids)) if self._ids else ""

    def _new(self, text: str) -> str:
        """What `text`, that of the window, has beyond the text given; moves the window on."""
        new = text[len(self._text) :]
        if new:
            later = self._ids[self._given :]
            if start := self._decode(later):
                self._ids, text = later, start
            self._given, self._text = len(self._ids), text
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
    """Passes text on until one of `strings` is complete, and never passes on what may be its beginning.

    The string that is complete first wins, the longest of those that end together; how the text is cut into
    parts makes no difference. The stop string and all that follows are dropped.
    """

    def __init__(self, strings: str | Sequence[str]) -> None:
        self._strings = (strings,) if isinstance(strings, str) else tuple(strings)
        if not all(isinstance(string, str) and string for string in self._strings):
            raise InputError(f"stop strings must be non-empty strings, not {list(self._strings)!r}.")
        self._longest = max(map(len, self._strings), default=0)
        self._held = ""
        self.stopped = False

    def put(self, text: str) -> tuple[str, bool]:
        """(text to pass on, whether a stop string is complete)."""
        if self.stopped:
            return "", True
        text = self._held + text
        ends = [(at + len(s), at) for s in self._strings if (at := text.find(s)) >= 0]
        if ends:
            self._held, self.stopped = "", True
            return text[: min(ends)[1]], True
        keep = next((n for n in range(min(self._longest - 1, len(text)), 0, -1) if self._may_begin(text[-n:])), 0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, tail: str) -> bool:
        return any(string.startswith(tail) for string in self._strings)
