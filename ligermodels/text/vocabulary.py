"""Tokens and their ids: the special tokens by name, the added tokens, and the whole vocabulary.

Names and results are those of transformers 5.23 (`tokenizer.pad_token = tokenizer.eos_token`). `save_pretrained`
writes what is set here.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from reprlib import repr as short
from typing import TYPE_CHECKING, Any

from ligermodels.errors import InputError, TokenizerError
from ligermodels.text.backend import Backend
from ligermodels.text.files import AddedToken, TokenizerFiles

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of special tokens in tokenizer_config.json; the first of them are attributes of `Vocabulary`."""


def _special(name: str) -> tuple[property, property]:
    """The attributes NAME, a special token or None, and NAME_id."""

    def get_token(self: "Vocabulary") -> str | None:
        return self.special_tokens_map.get(name)

    def set_token(self: "Vocabulary", value: Any) -> None:
        token = getattr(value, "content", value)
        if value is not None and (not isinstance(token, str) or self.token_to_id(token) is None):
            raise TokenizerError(
                f"{name} cannot be {short(value)}, which is not in the vocabulary. Next step: "
                f"add_special_tokens({{{name!r}: ...}}), then resize_token_embeddings of the model."
            )
        named = {**self.files.named, name: token}
        self._change(named={key: content for key, content in named.items() if content is not None})

    def get_id(self: "Vocabulary") -> int | None:
        token = get_token(self)
        return None if token is None else self.token_to_id(token)

    def set_id(self: "Vocabulary", value: int | None) -> None:
        token: Any = value
        if value is not None and value >= 0:
            # For an added token that is matched in normalised text, the library gives its normalised spelling.
            added = self.backend.added.get(value)
            token = added.content if added else self.backend.id_to_token(value) or value
        set_token(self, token)

    return property(get_token, set_token), property(get_id, set_id)


class Vocabulary:
    """The part of `Tokenizer` that knows tokens and ids.

    bos_token, eos_token, unk_token, pad_token, each with its _id: None where the folder names none; may be set to a
    token of the vocabulary. eos_token is the first of `eos_token_ids` where the tokenizer names none.
    padding_id: pad_token_id, else pad_token_id of generation_config.json or config.json, else the first of
    eos_token_ids, else 0. The attention mask hides padding.
    eos_token_ids: every id that ends a text: generation_config.json's, config.json's and the tokenizer's.
    vocab_size: one more than the largest id, added tokens included, as `len(tokenizer)`. vocab_size of transformers
    excludes the added tokens.
    """

    files: TokenizerFiles
    backend: Backend

    bos_token, bos_token_id = _special("bos_token")
    eos_token, eos_token_id = _special("eos_token")
    unk_token, unk_token_id = _special("unk_token")
    pad_token, pad_token_id = _special("pad_token")

    @functools.cached_property
    def special_tokens_map(self) -> dict[str, str]:
        """{"bos_token": "<s>", ...}: the named tokens that have an id, the usual names first."""
        named = dict(self.files.named)
        if "eos_token" not in named and self.files.eos_token_ids:
            named["eos_token"] = self.backend.id_to_token(self.files.eos_token_ids[0]) or ""
        order = (*NAMES, *(name for name in named if name not in NAMES))
        return {name: named[name] for name in order if name in named and self.token_to_id(named[name]) is not None}

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        index = self.eos_token_id if "eos_token" in self.files.named else None
        return tuple(dict.fromkeys((*self.files.eos_token_ids, *(() if index is None else (index,)))))

    @property
    def padding_id(self) -> int:
        ids = (self.pad_token_id, self.files.pad_token_id, *self.eos_token_ids, 0)
        return next(index for index in ids if index is not None)

    @property
    def all_special_tokens(self) -> list[str]:
        """The special tokens with a name, then those without."""
        extra = (token for token in self.files.extra_special if self.token_to_id(token) is not None)
        return list(dict.fromkeys((*self.special_tokens_map.values(), *extra)))

    @property
    def all_special_ids(self) -> list[int]:
        return self.convert_tokens_to_ids(self.all_special_tokens)

    @property
    def vocab_size(self) -> int:
        return self.backend.vocab_size

    def __len__(self) -> int:
        return self.vocab_size

    def token_to_id(self, token: str) -> int | None:
        """The id of one token as the vocabulary spells it, None if it has none."""
        return self.backend.token_to_id(token)

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        """The id of a token, or the ids of several. An unknown token has the id of unk_token, or None."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        index = self.token_to_id(tokens)
        return self.unk_token_id if index is None else index

    def convert_ids_to_tokens(self, ids: "int | Iterable[int] | Tensor") -> Any:
        """The token of an id, or the tokens of several, as the vocabulary spells them; None for an unknown id."""
        values: Any = ids.tolist() if hasattr(ids, "tolist") else ids
        if isinstance(values, int):
            return self.backend.id_to_token(values)
        return [self.backend.id_to_token(int(index)) for index in values]

    def get_vocab(self) -> dict[str, int]:
        """{token: id}, added tokens included."""
        return self.backend.vocab()

    def add_tokens(self, new_tokens: Any, special_tokens: bool = False) -> int:
        """Adds a token or several, each a str or an object such as tokenizers.AddedToken. Returns how many were added.

        A token of the vocabulary keeps its id, and from now on is split off before all others. A new token gets the
        next id; the model's `resize_token_embeddings(len(tokenizer))` adds its row.
        """
        is_one = isinstance(new_tokens, str) or hasattr(new_tokens, "content")
        present = {token.content: token for token in self.backend.added.values()}
        added: dict[int, AddedToken] = {}
        size, count = self.vocab_size, 0
        for new in [new_tokens] if is_one else new_tokens:
            content = getattr(new, "content", new)
            if not isinstance(content, str) or not content:
                raise InputError(f"a token is a non-empty str, not {short(content)}.")
            special = special_tokens or bool(getattr(new, "special", False))
            if token := present.get(content):
                if special and not token.special:
                    # A special token is matched as it is spelled.
                    added[token.id] = dataclasses.replace(token, special=True, normalized=False)
                continue
            index = self.token_to_id(content)
            if index is None:
                index, size = size, size + 1
            flags: dict[str, bool] = {"normalized": not special}
            if not isinstance(new, str):
                flags = {name: bool(getattr(new, name)) for name in (*flags, "lstrip", "rstrip", "single_word")}
            present[content] = added[index] = AddedToken(id=index, content=content, special=special, **flags)
            count += 1
        merged = {token.id: token for token in self.files.added} | added
        self._change(added=tuple(merged[index] for index in sorted(merged)))
        return count

    def add_special_tokens(self, special_tokens_dict: Mapping[str, Any]) -> int:
        """Adds and sets {"pad_token": "[PAD]", "additional_special_tokens": [...]}. Returns how many were added."""
        named, extra = dict(self.files.named), list(self.files.extra_special)
        tokens: list[Any] = []
        for name, value in special_tokens_dict.items():
            if name in NAMES:
                tokens.append(value)
                named[name] = getattr(value, "content", value)
            elif name in ("extra_special_tokens", "additional_special_tokens"):
                tokens += value
                extra = list(dict.fromkeys(getattr(token, "content", token) for token in value))
            else:
                raise InputError(
                    f"{short(name)} is not a special token. Next step: one of {', '.join(NAMES)}, or "
                    "additional_special_tokens."
                )
        count = self.add_tokens(tokens, special_tokens=True)
        self._change(named=named, extra_special=tuple(extra))
        return count

    def _change(self, **fields: Any) -> None:
        """Replaces tokens or templates, as if they had been read from the folder."""
        self.files = dataclasses.replace(self.files, **fields)
        self.backend.update(self.files)
