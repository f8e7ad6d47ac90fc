"""Text that appears while ids do: StreamDecoder turns ids into text, StopStrings finds where to stop."""

import operator
from collections.abc import Iterable, Sequence
from reprlib import repr as short
from typing import TYPE_CHECKING

from ligermodels.errors import InputError
from ligermodels.text.files import MAX_ID
from ligermodels.text.pieces import PieceStream

if TYPE_CHECKING:
    from ligermodels.text.tokenizer import Tokenizer


class StreamDecoder:
    """Decodes ids one by one; the parts joined are `tokenizer.decode` of all the ids, whatever the ids.

        stream = StreamDecoder(tokenizer)
        for index in ids:
            print(stream.put(index), end="", flush=True)
        print(stream.flush())

    A part never ends inside a character. The cost of a token does not grow with the text before it. Ids
    without a token add nothing, as in `decode`.

    after: the ids that the ones to come continue, whose own text is not given again: " world" after "Hello".
    Without them a decoder that takes the space off the beginning of a text (Llama 2, Mistral, Phi-3) says
    "world".
    Raises TokenizerError for a kind of decoder that cannot be streamed.
    """

    def __init__(self, tokenizer: "Tokenizer", *, after: Iterable[int] = (), skip_special_tokens: bool = True) -> None:
        self._backend = tokenizer.backend
        self._skipped = self._backend.special_ids if skip_special_tokens else frozenset()
        self._pieces = PieceStream(self._backend.decoder)
        for index in after:
            self.put(index)

    def put(self, index: int) -> str:
        """The text that the token `index` completes; "" while a character is still open."""
        try:
            index = operator.index(index)
        except (TypeError, RuntimeError) as error:
            raise InputError(f"put takes one id, an int or a tensor of one, not {short(index)}.") from error
        if not 0 <= index <= MAX_ID:
            raise InputError(f"{short(index)} is not a token id: ids are 0 or more, up to {MAX_ID:,}.")
        token = None if index in self._skipped else self._backend.id_to_token(index)
        return "" if token is None else self._pieces.put(token)

    def flush(self) -> str:
        """The rest, once no more ids come: an unfinished character turns into U+FFFD."""
        return self._pieces.flush()


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
