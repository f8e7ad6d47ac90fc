"""Text that appears while ids do: StreamDecoder turns ids into text, StopStrings finds where to stop."""

import functools
import operator
from collections.abc import Iterable, Sequence
from reprlib import repr as short
from typing import Any, Protocol

from ligermodels.errors import InputError
from ligermodels.text.detokenizer import PieceStream
from ligermodels.text.files import MAX_ID
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.text.vocabulary import Backend


class TextDecoder(Protocol):
    """What a tokenizer needs to be streamed: transformers' have it."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> Any: ...


class StreamDecoder:
    """Decodes ids one by one; the parts joined are `tokenizer.decode` of all the ids.

        stream = StreamDecoder(tokenizer)
        for index in ids:
            print(stream.put(index), end="", flush=True)
        print(stream.flush())

    A part never ends inside a character. The cost of a token does not grow with the text before it. Ids
    without a token add nothing, as in `decode`.

    tokenizer: a `Tokenizer`, or any object with `decode(ids, skip_special_tokens=...)`, such as transformers'
    tokenizers. With such an object, text that has been given stays as it is, also where more ids would change it: for
    one bad byte the tokenizers library gives up a whole run of byte tokens, and the good characters in it.
    after: the ids that the ones to come continue, whose own text is not given again: " world" after "Hello".
    Without them a decoder that takes the space off the beginning of a text (Llama 2, Mistral, Phi-3) says
    "world".
    Raises InputError for another object, and TokenizerError for a `Tokenizer` with a kind of decoder that cannot be
    streamed.
    """

    def __init__(
        self, tokenizer: Tokenizer | TextDecoder, *, after: Iterable[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._stream: _TokenStream | _WindowStream
        if isinstance(tokenizer, Tokenizer):
            self._stream = _TokenStream(tokenizer.backend, skip_special_tokens)
        elif callable(getattr(tokenizer, "decode", None)):
            self._stream = _WindowStream(tokenizer, skip_special_tokens)
        else:
            raise InputError(f"a {type(tokenizer).__name__} has no decode(ids, skip_special_tokens=...).")
        self._stream.begin([_checked(index) for index in after])

    def put(self, index: int) -> str:
        """The text that the token `index` completes; "" while a character is still open."""
        return self._stream.put(_checked(index))

    def flush(self) -> str:
        """The rest, once no more ids come: an unfinished character turns into U+FFFD."""
        return self._stream.flush()


def _checked(index: Any) -> int:
    try:
        number = operator.index(index)
    except (TypeError, RuntimeError) as error:
        raise InputError(f"put takes one id, an int or a tensor of one, not {short(index)}.") from error
    if not 0 <= number <= MAX_ID:
        raise InputError(f"{short(number)} is not a token id: ids are 0 or more, up to {MAX_ID:,}.")
    return number


class _TokenStream:
    """Ids through our own decoders, each token once."""

    def __init__(self, backend: Backend, skip_special_tokens: bool) -> None:
        self._backend = backend
        self._skipped = backend.special_ids if skip_special_tokens else frozenset()
        self._pieces = PieceStream(backend.decoder)

    def begin(self, ids: list[int]) -> None:
        for index in ids:
            self.put(index)

    def put(self, index: int) -> str:
        token = None if index in self._skipped else self._backend.id_to_token(index)
        return "" if token is None else self._pieces.put(token)

    def flush(self) -> str:
        return self._pieces.flush()


class _WindowStream:
    """Ids through a foreign `decode`, of the last ones only.

    The window begins with ids whose text has been given, and which have some: what a decoder takes off the beginning
    of a text is taken off them. Text that ends in U+FFFD may be an unfinished character, and waits.
    """

    def __init__(self, tokenizer: TextDecoder, skip_special_tokens: bool) -> None:
        self._decode = functools.partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        # Of the window: how many ids have given their text, and that text.
        self._given, self._text = 0, ""

    def begin(self, ids: list[int]) -> None:
        self._ids = ids
        # An unfinished character has up to three tokens.
        for self._given in range(len(ids), max(0, len(ids) - 4), -1):
            self._text = self._decode(ids[: self._given])
            if not self._text.endswith(_BROKEN):
                break

    def put(self, index: int) -> str:
        self._ids.append(index)
        text = self._decode(self._ids)
        return "" if text.endswith(_BROKEN) else self._new(text)

    def flush(self) -> str:
        return self._new(self._decode(self._ids)) if self._ids else ""

    def _new(self, text: str) -> str:
        new = text[len(self._text) :]
        if new:
            later = self._ids[self._given :]
            if start := self._decode(later):
                self._ids, text = later, start
            self._given, self._text = len(self._ids), text
        return new


_BROKEN = "\ufffd"


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
