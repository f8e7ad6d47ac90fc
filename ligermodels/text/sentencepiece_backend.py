"""tokenizer.model through the `sentencepiece` library: Llama 2, Mistral, Mixtral, Gemma, Phi-3.

SentencePiece knows only its own pieces. This module adds what Hugging Face adds:
- control and unknown pieces are special tokens: `[INST]` in a text is Mistral's token, as in transformers, where
  SentencePiece and mistral-common read plain text. User-defined pieces are matched by SentencePiece itself;
- bos, eos, unk and pad are the file's where tokenizer_config.json does not name them. A text that begins with BOS gets
  no second one (in transformers it does);
- added and special tokens are split off first, the longest at each place, and never reach SentencePiece;
- `legacy: false` (the default, as in transformers 5): the dummy prefix space is before the text's first piece, unless
  an added token comes first. `legacy: true`: before every part of the text between added tokens.
  `add_prefix_space: false`: nowhere;
- `add_bos_token` (default true) and `add_eos_token` (default false);
- decoding is that of transformers' converted tokenizer: pieces are joined, U+2581 is a space, runs of byte
  pieces are UTF-8, the dummy prefix is removed once. A byte in no character is U+FFFD, and a text that begins with the
  byte piece <0x20> keeps that space, both as in SentencePiece.

Checked against transformers 5.23: LlamaTokenizer (converted) and SentencePieceBackend (slow). A text that
begins with a space has both the space and the dummy prefix, as in SentencePiece; the converted one merges the two.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ligermodels.errors import TokenizerError
from ligermodels.text.backend import Backend, Encoded, decode_utf8
from ligermodels.text.files import AddedToken, TokenizerFiles, read_bytes

SPACE = "\u2581"

# ModelProto{normalizer_spec{add_dummy_prefix: false}}: appended to a serialised model, protobuf merges it in.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


def read_model(path: Path) -> Any:
    """The SentencePieceProcessor of a tokenizer.model. Raises TokenizerError for any other kind of file."""
    import sentencepiece

    data = read_bytes(path)
    try:
        model = sentencepiece.SentencePieceProcessor()
        model.LoadFromSerializedProto(data)
        if not 0 <= model.unk_id() < model.get_piece_size():
            raise ValueError("it has no pieces or no unknown token")
        model.id_to_piece(list(range(model.get_piece_size())))  # a damaged piece is not UTF-8
    except Exception as error:
        raise TokenizerError(
            f"{path} is not a SentencePiece model ({error}). Likely cause: a truncated download."
        ) from error
    if model.normalize("a").endswith(SPACE):
        raise TokenizerError(f"{path}: treat_whitespace_as_suffix is not supported.")
    return model


def is_tiktoken(data: bytes) -> bool:
    """Whether a line is a base64 token and its rank."""
    return re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n", data) is not None


class SentencePieceBackend(Backend):
    """A SentencePieceProcessor, and added tokens around it."""

    def __init__(self, path: Path, files: TokenizerFiles, model: bytes | None = None) -> None:
        """model: the bytes of the file, where they have been read already."""
        import sentencepiece

        self.path = path
        self._native = read_model(path) if model is None else sentencepiece.SentencePieceProcessor(model_proto=model)
        self.base_vocab_size = self._native.get_piece_size()
        ids = {name: getattr(self._native, f"{name}_id")() for name in ("bos", "eos", "unk", "pad")}
        self.named = {
            f"{name}_token": self._native.id_to_piece(index)
            for name, index in ids.items()
            if 0 <= index < self.base_vocab_size
        }
        every = list(range(self.base_vocab_size))
        flags = zip(every, self._native.is_control(every), self._native.is_unknown(every), strict=True)
        self._control = [index for index, is_control, is_unknown in flags if is_control or is_unknown]
        self.update(self.complete(files) if model is None else files)

    def __reduce__(self) -> Any:
        return type(self), (self.path, self._files, self._native.serialized_model_proto())

    def update(self, files: TokenizerFiles) -> None:
        """Sets the added tokens, the dummy prefix and the tokens around a text to those of `files`."""
        import sentencepiece

        self._files, config = files, files.config
        normalized, model = self._native.normalize("a  b"), self._native.serialized_model_proto()
        self._squeezes = f"a{SPACE}{SPACE}b" not in normalized
        self._prefixes = normalized.startswith(SPACE) and config.get("add_prefix_space") is not False
        self._legacy = bool(config.get("legacy", False))
        self._bare = type(self._native)(model_proto=model + _NO_DUMMY_PREFIX)
        self.added = self._collect_added(files)
        self._added_ids = {token.content: token.id for token in self.added.values()}
        self._before = self._edge(files.named.get("bos_token")) if config.get("add_bos_token", True) else []
        self._after = self._edge(files.named.get("eos_token")) if config.get("add_eos_token", False) else []
        # Two rounds: tokens matched in the raw text, then those matched in the normalised text.
        normalizer = sentencepiece.SentencePieceNormalizer(
            model_proto=model, add_dummy_prefix=False, escape_whitespaces=False, remove_extra_whitespaces=False
        )
        raw = {token.content: token for token in self.added.values() if not token.normalized}
        normalized_tokens = {normalizer.normalize(t.content): t for t in self.added.values() if t.normalized}
        self._rounds = [
            (normalize, _pattern(tokens), tokens)
            for normalize, tokens in ((str, raw), (normalizer.normalize, normalized_tokens))
            if tokens
        ]

    def encode(self, texts: Sequence[str], add_special_tokens: bool, with_offsets: bool = False) -> list[Encoded]:
        """Raises TokenizerError for the offsets of a text that SentencePiece normalises: they are unknown."""
        before, after = (self._before, self._after) if add_special_tokens else ([], [])
        rows = []
        for text in texts:
            ids, offsets, at = list(before), [(0, 0)] * len(before), 0
            for place, part in enumerate(self._split(text)):
                found = [part.id] if isinstance(part, AddedToken) else self._encode_part(part, place == 0)
                ids += found
                if with_offsets:
                    content = part.content if isinstance(part, AddedToken) else part
                    at = text.find(content, at)
                    if at < 0:
                        raise self._changed(text)
                    own = [(0, len(content))] if isinstance(part, AddedToken) else self._offsets(found, part)
                    offsets += [(at + start, at + end) for start, end in own]
                    at += len(content)
            offsets += [(0, 0)] * len(after)
            rows.append(Encoded(ids + after, offsets if with_offsets else None))
        return rows

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        skipped = self.special_ids if skip_special_tokens else frozenset()
        spelled = [(index, self._spelled(index)) for index in ids if index not in skipped]
        text = decode_utf8(b"".join(piece for _, piece in spelled))
        first = next((index for index, piece in spelled if piece), self.base_vocab_size)
        # The byte piece <0x20> is a space of the text.
        return text.removeprefix(" ") if self._prefixes and not self._is_byte(first) else text

    def token_to_id(self, token: str) -> int | None:
        return self._added_ids[token] if token in self._added_ids else self._find(token)

    def id_to_token(self, index: int) -> str | None:
        if index in self.added:
            return self.added[index].content
        return self._native.id_to_piece(index) if index < self.base_vocab_size else None

    def vocab(self) -> dict[str, int]:
        own = {self._native.id_to_piece(index): index for index in range(self.base_vocab_size)}
        return own | {token.content: index for index, token in self.added.items()}

    def _find(self, piece: str) -> int | None:
        """The id of a piece of the SentencePiece model, or None; the model returns the unknown token's id."""
        index = self._native.piece_to_id(piece)
        known = 0 <= index < self.base_vocab_size and self._native.id_to_piece(index) == piece
        return index if known else None

    def _encode_part(self, text: str, first: bool) -> list[int]:
        if self._prefixes and (first or self._legacy):
            return self._native.encode(text)
        # A model that squeezes white space would drop the leading space of the text; the dummy prefix replaces it.
        if self._squeezes and self._prefixes and text.startswith((" ", SPACE)):
            return self._native.encode(text)
        return self._bare.encode(text)

    def _split(self, text: str) -> list[str | AddedToken]:
        """The added tokens of a text, and the parts between them."""
        parts: list[str | AddedToken] = [text]
        for normalize, pattern, tokens in self._rounds:
            split: list[str | AddedToken] = []
            for part in parts:
                split += [part] if isinstance(part, AddedToken) else _split_at(normalize(part), pattern, tokens)
            parts = split
        return parts

    def _offsets(self, ids: list[int], text: str) -> list[tuple[int, int]]:
        """The (start, end) in `text` of each piece: the characters that have one of its bytes."""
        plain = text.replace(SPACE, " ")
        spelled = [self._spelled(index) for index in ids]
        prefix = len(b"".join(spelled)) - len(plain.encode())
        if b"".join(spelled) != b" " * prefix + plain.encode():
            raise self._changed(text)
        character = [at for at, char in enumerate(plain) for _ in char.encode()]
        found, end = [], -prefix
        for piece in spelled:
            start, end = max(end, 0), end + len(piece)
            found.append((character[start], character[end - 1] + 1) if end > 0 else (0, 0))
        return found

    def _spelled(self, index: int) -> bytes:
        """The bytes of an id; b"" for an id without a token."""
        if self._is_byte(index):
            return bytes([int(self._native.id_to_piece(index)[3:5], 16)])
        return (self.id_to_token(index) or "").replace(SPACE, " ").encode()

    def _is_byte(self, index: int) -> bool:
        return index not in self.added and index < self.base_vocab_size and self._native.is_byte(index)

    def _changed(self, text: str) -> TokenizerError:
        return TokenizerError(
            f"{self.path} changes the text {text[:40]!r} before it splits it into tokens, so that the offsets "
            "are unknown. Next step: take tokenizer.json from the checkpoint's repository."
        )

    def _edge(self, content: str | None) -> list[int]:
        """The ids at the beginning or the end of a text for one of the named tokens."""
        if content is None:
            return []
        index = self.token_to_id(content)
        if index is None:
            raise TokenizerError(
                f"{self.path} has no token {content!r}, which the folder's other files add at the edge of every "
                "text. Likely cause: added_tokens.json or tokenizer_config.json is missing."
            )
        return [index]

    def _collect_added(self, files: TokenizerFiles) -> dict[int, AddedToken]:
        """The added tokens of `files`, and the named and control tokens of the model's own vocabulary."""
        added = {token.id: token for token in files.added}
        for token in files.added:
            index = self._find(token.content)
            if index not in (None, token.id):
                raise TokenizerError(
                    f"{self.path} gives {token.content!r} the id {index}, the folder's other files say "
                    f"{token.id}. Likely cause: files of two checkpoints mixed."
                )
        by_content = {token.content: token for token in files.added}
        for index in self._control:
            added.setdefault(index, AddedToken(id=index, content=self._native.id_to_piece(index), special=True))
        for content in dict.fromkeys((*files.named.values(), *files.extra_special, *self.named.values())):
            if content in by_content:
                token = dataclasses.replace(by_content[content], special=True)
                added[token.id] = token
            elif (index := self._find(content)) is not None:
                added.setdefault(index, AddedToken(id=index, content=content, special=True))
        return added


def _pattern(tokens: Mapping[str, AddedToken]) -> re.Pattern[str]:
    """Matches any of `tokens`, the longest first."""
    by_length = sorted(tokens.items(), key=lambda item: len(item[0]), reverse=True)
    return re.compile(
        "|".join(rf"(?<!\w){re.escape(c)}(?!\w)" if t.single_word else re.escape(c) for c, t in by_length)
    )


def _split_at(text: str, pattern: re.Pattern[str], tokens: Mapping[str, AddedToken]) -> Iterator[str | AddedToken]:
    """The tokens that `pattern` finds in a text, and the parts between them."""
    start, strip_left = 0, False
    for match in pattern.finditer(text):
        token = tokens[match[0]]
        before = text[start : match.start()]
        before = before.lstrip() if strip_left else before
        before = before.rstrip() if token.lstrip else before
        if before:
            yield before
        yield token
        start, strip_left = match.end(), token.rstrip
    rest = text[start:].lstrip() if strip_left else text[start:]
    if rest:
        yield rest
