"""What a tokenizer needs of the library below it; `JsonBackend` and `SentencePieceBackend` implement it."""

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ligermodels.text.files import AddedToken, TokenizerFiles


class Encoded(NamedTuple):
    """The ids of a text. offsets: the (start, end) of each in the text, (0, 0) for special tokens added around it."""

    ids: list[int]
    offsets: list[tuple[int, int]] | None = None


class Backend(ABC):
    """Converts text to ids and back.

    added: {id: token} of the added tokens, special ones included.
    base_vocab_size: the number of ids without added tokens.
    named, stop_ids: the special tokens, {"bos_token": "<s>", ...}, and the ids that end a text or a turn, of a
    vocabulary file that names them.
    """

    added: Mapping[int, AddedToken]
    base_vocab_size: int
    named: Mapping[str, str] = {}
    stop_ids: tuple[int, ...] = ()

    @abstractmethod
    def encode(self, texts: Sequence[str], add_special_tokens: bool, with_offsets: bool = False) -> list[Encoded]: ...

    @abstractmethod
    def decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...

    @abstractmethod
    def token_to_id(self, token: str) -> int | None: ...

    @abstractmethod
    def id_to_token(self, index: int) -> str | None: ...

    @abstractmethod
    def vocab(self) -> dict[str, int]:
        """{token: id}, added tokens included."""

    @abstractmethod
    def update(self, files: TokenizerFiles) -> None:
        """Sets the added and special tokens to those of `files`."""

    def complete(self, files: TokenizerFiles) -> TokenizerFiles:
        """`files` with the special tokens of the vocabulary file; what a config says wins, also a null."""
        own = {name: token for name, token in self.named.items() if name not in files.config}
        return dataclasses.replace(
            files, named={**own, **files.named}, eos_token_ids=files.eos_token_ids or self.stop_ids
        )

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` can skip."""
        return frozenset(index for index, token in self.added.items() if token.special)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return max(self.base_vocab_size, 1 + max(self.added, default=-1))


def decode_utf8(data: bytes) -> str:
    """Decodes UTF-8, with U+FFFD for each byte that is not part of a character, as in SentencePiece."""
    return re.sub("[\udc80-\udcff]", "\ufffd", data.decode("utf-8", "surrogateescape"))
