"""Tokens to text, one token at a time: the decoders of tokenizer.json as a stream.

`tokenizers` decodes a finished list; decoding the list again for every new token costs O(n^2), and decoding a
window of it is wrong wherever a decoder looks further back. Here every step keeps the little state it needs,
so that the pieces of text that come out, joined, are what decoding the whole list gives, for every list:
- ByteLevel: the bytes of a character wait until the character is complete or cannot become valid;
- ByteFallback: as ByteLevel for a run of <0xNN> tokens, with one U+FFFD for every byte that is in no character;
- Replace, Strip, Fuse, Metaspace: at once.

Checked against tokenizers 0.23 and, for ByteFallback, sentencepiece 0.2.3: it keeps the good characters of a run
that has a bad byte, where tokenizers gives up the whole run. A stream could follow tokenizers only by holding
every run back to its end, and in Llama 2 a newline is such a run.
"""

import codecs
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ligermodels.errors import TokenizerError

_BYTE_TOKEN = re.compile(r"<0x(\+[0-9A-Fa-f]|[0-9A-Fa-f]{2})>")


class PieceStream:
    """put(token) and flush() return the text that is new; both together give the whole text.

    decoder: the `decoder` object of a tokenizer.json, None where it has none (tokens joined by spaces).
    Raises TokenizerError for a kind of decoder that no model of the zoo uses.
    """

    def __init__(self, decoder: Mapping[str, Any] | None) -> None:
        self._steps: list[_Step] = []
        self._unit = "token"
        for state in [{"type": "Join"}] if decoder is None else flatten(decoder):
            self._steps.append(self._step(state))

    def put(self, token: str) -> str:
        return self._run([token], self._steps)

    def flush(self) -> str:
        text = ""
        for index, step in enumerate(self._steps):
            text += self._run(step.flush(), self._steps[index + 1 :])
        return text

    def _run(self, pieces: Sequence[str], steps: Sequence["_Step"]) -> str:
        for step in steps:
            pieces = [out for piece in pieces for out in step.put(piece)]
        return "".join(pieces)

    def _step(self, state: Mapping[str, Any]) -> "_Step":
        """One decoder. What reaches it is tokens, parts of tokens (after ByteFallback) or one text (after Fuse)."""
        match state:
            case {"type": "ByteLevel"} if self._unit == "token":
                self._unit = "text"
                return _ByteLevel()
            case {"type": "Fuse"}:
                self._unit = "text"
                return _Step()
            case {"type": "ByteFallback"} if self._unit == "token":
                self._unit = "part"
                return _ByteFallback()
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                if self._unit == "token" or len(old) == 1:
                    return _Map(lambda piece, first: piece.replace(old, new))
            case {"type": "Strip", "content": str(char), "start": int(start), "stop": 0} if self._unit == "text":
                return _StripStart(char, start)
            case {"type": "Metaspace", "replacement": str(mark)} if self._unit == "token":
                keeps = state.get("prepend_scheme", "always") == "never"
                return _Map(lambda piece, first: piece.replace(mark, "" if first and not keeps else " "))
            case {"type": "Join"}:
                return _Map(lambda piece, first: piece if first else f" {piece}")
        raise TokenizerError(
            f"the decoder {dict(state)} cannot be streamed. Next step: collect the ids and call decode() once."
        )


def decode(decoder: Mapping[str, Any] | None, tokens: Iterable[str]) -> str:
    """The text of a whole list of tokens."""
    stream = PieceStream(decoder)
    return "".join([stream.put(token) for token in tokens] + [stream.flush()])


class _Step:
    """A decoder that changes nothing."""

    def put(self, piece: str) -> Sequence[str]:
        return (piece,)

    def flush(self) -> Sequence[str]:
        return ()


class _Map(_Step):
    """A decoder that looks at one token and at whether it is the first."""

    def __init__(self, change: Callable[[str, bool], str]) -> None:
        self._change = change
        self._first = True

    def put(self, piece: str) -> Sequence[str]:
        first, self._first = self._first, False
        return (self._change(piece, first),)


class _StripStart(_Step):
    """Takes up to `count` times `char` off the beginning of the text."""

    def __init__(self, char: str, count: int) -> None:
        self._char = char
        self._left = count

    def put(self, piece: str) -> Sequence[str]:
        while self._left and piece:
            if not piece.startswith(self._char):
                self._left = 0
                break
            piece = piece[len(self._char) :]
            self._left -= 1
        return (piece,)


class _ByteFallback(_Step):
    def __init__(self) -> None:
        self._open = b""

    def put(self, piece: str) -> Sequence[str]:
        if found := _BYTE_TOKEN.fullmatch(piece):
            self._open += bytes([int(found[1], 16)])
            return (self._decode(final=False),)
        return (self._decode(final=True), piece)

    def flush(self) -> Sequence[str]:
        return (self._decode(final=True),)

    def _decode(self, final: bool) -> str:
        text = ""
        while True:
            try:
                part, used = codecs.utf_8_decode(self._open, "strict", final)
                self._open = self._open[used:]
                return text + part
            except UnicodeDecodeError as error:
                # Whole characters have left at once: the bad bytes come first.
                text += "\ufffd" * error.end
                self._open = self._open[error.end :]


class _ByteLevel(_Step):
    """Every character of a token stands for a byte. A token with any other character is its own UTF-8."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def put(self, piece: str) -> Sequence[str]:
        try:
            return (self._decoder.decode(bytes(_BYTES[char] for char in piece)),)
        except KeyError:
            return (self._decoder.decode(piece.encode()),)

    def flush(self) -> Sequence[str]:
        return (self._decoder.decode(b"", final=True),)


def _byte_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other 68 bytes are U+0100 and up."""
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


_BYTES = _byte_characters()


def flatten(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The decoders inside a Sequence, or the one that there is."""
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [state for part in decoder["decoders"] for state in flatten(part)]
