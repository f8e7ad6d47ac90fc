"""tokenizer.model through the `sentencepiece` library: Llama 2, Mistral, Mixtral, Gemma, Phi-3.

SentencePiece knows its own pieces only; what Hugging Face adds around it is done here:
- added and special tokens are cut out of the text first, the longest at each place, and never reach
  SentencePiece;
- `legacy: false` (and no `legacy` at all, as in transformers 5): the dummy prefix space stands before the
  text's first piece only if no added token comes first, and nowhere else. `legacy: true`: before every
  stretch of text between added tokens. `add_prefix_space: false`: nowhere;
- `add_bos_token` (default true) and `add_eos_token` (default false);
- decoding is what transformers' converted tokenizer does: pieces joined, U+2581 is a space, runs of byte
  pieces are UTF-8, the dummy prefix is taken off once.

Checked against transformers 5.23: LlamaTokenizer (converted) and SentencePieceBackend (slow). A text that
begins with a space keeps it beside the dummy prefix, as in SentencePiece; the converted one merges the two.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ligermodels.errors import TokenizerError
from ligermodels.text import detokenizer
from ligermodels.text.files import AddedToken, TokenizerFiles, read_bytes

SPACE = "\u2581"

# Added tokens, and their characters together: they become one regular expression. Gemma 3 has 6,242.
_MAX_ADDED, _MAX_ADDED_CHARS = 20_000, 2**18

# ModelProto{normalizer_spec{add_dummy_prefix: false}}: appended to a serialised model, protobuf merges it in.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


def read_model(path: Path) -> Any:
    """The SentencePieceProcessor of a tokenizer.model. Raises TokenizerError for any other kind of file."""
    import sentencepiece

    data = read_bytes(path)
    if is_tiktoken(data):
        raise TokenizerError(
            f"{path} is a tiktoken file (base64), not a SentencePiece model. Next step: take tokenizer.json "
            "from the Hugging Face version of this checkpoint; Meta's `original/` folder lacks it."
        )
    try:
        model = sentencepiece.SentencePieceProcessor()
        model.LoadFromSerializedProto(data)
        if not 0 <= model.unk_id() < model.get_piece_size():
            raise ValueError("it has no pieces or no unknown token")
        return model
    except Exception as error:
        raise TokenizerError(
            f"{path} is not a SentencePiece model ({error}). Likely cause: a truncated download."
        ) from error


def is_tiktoken(data: bytes) -> bool:
    """A line of a tiktoken file is a base64 token and its rank."""
    return re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n", data) is not None


class SentencePieceBackend:
    """A SentencePieceProcessor and added tokens behind the calls of `Tokenizer` and `StreamDecoder`."""

    def __init__(self, path: Path, files: TokenizerFiles) -> None:
        self._path, self._native = path, read_model(path)
        self.update(files)

    def __reduce__(self) -> Any:
        return _rebuilt, (self._path, self._native.serialized_model_proto(), self._files)

    def update(self, files: TokenizerFiles) -> None:
        """Takes the added and special tokens from `files`, and what they say about spaces and the edges of a text."""
        import sentencepiece

        self._files, path = files, self._path
        normalized = self._native.normalize("a  b")
        if normalized.endswith(SPACE):
            raise TokenizerError(f"{path}: treat_whitespace_as_suffix is not supported.")
        self._squeezes = f"a{SPACE}{SPACE}b" not in normalized
        config = files.config
        self._prefixes = normalized.startswith(SPACE) and config.get("add_prefix_space") is not False
        self._legacy = bool(config.get("legacy", False))
        self._bare = type(self._native)(model_proto=self._native.serialized_model_proto() + _NO_DUMMY_PREFIX)
        self.added = self._collect_added(path, files)
        self._added_ids = {token.content: token.id for token in self.added.values()}
        self.special_ids = frozenset(token.id for token in self.added.values() if token.special)
        bos, eos = files.named.get("bos_token", "<s>"), files.named.get("eos_token", "</s>")
        self._before = self._edge(path, bos) if config.get("add_bos_token", True) else []
        self._after = self._edge(path, eos) if config.get("add_eos_token", False) else []
        # Two rounds: tokens looked for in the raw text, then those looked for in the normalised text.
        normalizer = sentencepiece.SentencePieceNormalizer(
            model_proto=self._native.serialized_model_proto(),
            add_dummy_prefix=False,
            escape_whitespaces=False,
            remove_extra_whitespaces=False,
        )
        raw = {token.content: token for token in self.added.values() if not token.normalized}
        cooked = {normalizer.normalize(t.content): t for t in self.added.values() if t.normalized}
        self._rounds = [
            (normalize, _pattern(tokens), tokens)
            for normalize, tokens in ((str, raw), (normalizer.normalize, cooked))
            if tokens
        ]

    def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        before, after = (self._before, self._after) if add_special_tokens else ([], [])
        return [before + self._encode_text(text) + after for text in texts]

    def encode_with_offsets(self, text: str, add_special_tokens: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids, and the (start, end) of each in the text; (0, 0) of those that are added.

        Raises TokenizerError where SentencePiece changes the text, so that the places in it are lost.
        """
        before, after = (self._before, self._after) if add_special_tokens else ([], [])
        ids, offsets, at = list(before), [(0, 0)] * len(before), 0
        for place, stretch in enumerate(self._split(text)):
            content = stretch.content if isinstance(stretch, AddedToken) else stretch
            at = text.find(content, at)
            if at < 0:
                raise self._lost(text)
            if isinstance(stretch, AddedToken):
                ids.append(stretch.id)
                offsets.append((at, at + len(content)))
            else:
                found = self._encode_stretch(stretch, place == 0)
                ids += found
                offsets += [(at + start, at + end) for start, end in self._places(found, stretch)]
            at += len(content)
        return ids + after, offsets + [(0, 0)] * len(after)

    def _places(self, ids: list[int], text: str) -> list[tuple[int, int]]:
        """Where in `text` each piece stands: the characters that have one of its bytes."""
        plain = text.replace(SPACE, " ")
        spelled = [self._spelled(index) for index in ids]
        prefix = len(b"".join(spelled)) - len(plain.encode())
        if b"".join(spelled) != b" " * prefix + plain.encode():
            raise self._lost(text)
        character = [at for at, char in enumerate(plain) for _ in char.encode()]
        places, end = [], -prefix
        for piece in spelled:
            start, end = max(end, 0), end + len(piece)
            places.append((character[start], character[end - 1] + 1) if end > 0 else (0, 0))
        return places

    def _spelled(self, index: int) -> bytes:
        piece = self._native.id_to_piece(index)
        return bytes([int(piece[3:5], 16)]) if self._native.is_byte(index) else piece.replace(SPACE, " ").encode()

    def _lost(self, text: str) -> TokenizerError:
        return TokenizerError(
            f"{self._path} changes the text {text[:40]!r} before it cuts it into tokens, so that the place of a token "
            "in it is not known. Next step: take tokenizer.json from the checkpoint's repository."
        )

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        kept = (index for index in ids if not (skip_special_tokens and index in self.special_ids))
        return detokenizer.decode(self.decoder, (p for i in kept if (p := self.id_to_token(i)) is not None))

    def token_to_id(self, token: str) -> int | None:
        if token in self._added_ids:
            return self._added_ids[token]
        return self._find(token)

    def _find(self, piece: str) -> int | None:
        """The id of a piece of the SentencePiece model itself; that gives the unknown token's for what it lacks."""
        index = self._native.piece_to_id(piece)
        known = 0 <= index < self.base_vocab_size and self._native.id_to_piece(index) == piece
        return index if known else None

    def id_to_token(self, index: int) -> str | None:
        if index in self.added:
            return self.added[index].content
        return self._native.id_to_piece(index) if index < self.base_vocab_size else None

    def vocab(self) -> dict[str, int]:
        own = {self._native.id_to_piece(index): index for index in range(self.base_vocab_size)}
        return own | {token.content: index for index, token in self.added.items()}

    @property
    def base_vocab_size(self) -> int:
        """Ids of the SentencePiece model: without added tokens."""
        return self._native.get_piece_size()

    @property
    def vocab_size(self) -> int:
        return max(self.base_vocab_size, 1 + max(self.added, default=-1))

    @property
    def decoder(self) -> Mapping[str, Any]:
        """What tokenizer.json would say in `decoder`."""
        steps: list[Mapping[str, Any]] = [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if self._prefixes else []
        return {"type": "Sequence", "decoders": steps + strip}

    def _encode_text(self, text: str) -> list[int]:
        ids = []
        for place, stretch in enumerate(self._split(text)):
            ids += [stretch.id] if isinstance(stretch, AddedToken) else self._encode_stretch(stretch, place == 0)
        return ids

    def _encode_stretch(self, text: str, first: bool) -> list[int]:
        if self._prefixes and (first or self._legacy):
            return self._native.encode(text)
        # A model that squeezes white space would lose the stretch's own leading space; the dummy prefix is
        # that space.
        if self._squeezes and self._prefixes and text.startswith((" ", SPACE)):
            return self._native.encode(text)
        return self._bare.encode(text)

    def _split(self, text: str) -> list[str | AddedToken]:
        stretches: list[str | AddedToken] = [text]
        for normalize, pattern, tokens in self._rounds:
            parts: list[str | AddedToken] = []
            for stretch in stretches:
                if isinstance(stretch, AddedToken):
                    parts.append(stretch)
                else:
                    parts += _cut(normalize(stretch), pattern, tokens)
            stretches = parts
        return stretches

    def _edge(self, path: Path, content: str) -> list[int]:
        index = self.token_to_id(content)
        if index is None:
            raise TokenizerError(
                f"{path} has no token {content!r}, which the folder's other files add at the edge of every "
                "text. Likely cause: added_tokens.json or tokenizer_config.json is missing."
            )
        return [index]

    def _collect_added(self, path: Path, files: TokenizerFiles) -> dict[int, AddedToken]:
        chars = sum(len(token.content) for token in files.added)
        if len(files.added) > _MAX_ADDED or chars > _MAX_ADDED_CHARS:
            raise TokenizerError(
                f"{path}: beside a tokenizer.model at most {_MAX_ADDED:,} added tokens of {_MAX_ADDED_CHARS:,} "
                f"characters together are read, the folder has {len(files.added):,} of {chars:,}. Next step: take "
                "tokenizer.json from the checkpoint's repository."
            )
        added = {token.id: token for token in files.added}
        for token in files.added:
            index = self._find(token.content)
            if index not in (None, token.id):
                raise TokenizerError(
                    f"{path} gives {token.content!r} the id {index}, the folder's other files say "
                    f"{token.id}. Likely cause: files of two checkpoints mixed."
                )
        by_content = {token.content: token for token in files.added}
        control = (self._native.unk_id(), self._native.bos_id(), self._native.eos_id(), self._native.pad_id())
        own = [self._native.id_to_piece(index) for index in control if 0 <= index < self.base_vocab_size]
        for content in dict.fromkeys((*files.named.values(), *files.extra_special, *own)):
            if content in by_content:
                token = dataclasses.replace(by_content[content], special=True)
                added[token.id] = token
            elif (index := self._find(content)) is not None:
                added.setdefault(index, AddedToken(id=index, content=content, special=True))
        return added


def _rebuilt(path: Path, model: bytes, files: TokenizerFiles) -> SentencePieceBackend:
    """From a pickle."""
    import sentencepiece

    backend = SentencePieceBackend.__new__(SentencePieceBackend)
    backend._path, backend._native = path, sentencepiece.SentencePieceProcessor(model_proto=model)
    backend.update(files)
    return backend


def _pattern(tokens: Mapping[str, AddedToken]) -> re.Pattern[str]:
    """Any of `tokens`, the longest first."""
    by_length = sorted(tokens.items(), key=lambda item: len(item[0]), reverse=True)
    return re.compile(
        "|".join(rf"(?<!\w){re.escape(c)}(?!\w)" if t.single_word else re.escape(c) for c, t in by_length)
    )


def _cut(text: str, pattern: re.Pattern[str], tokens: Mapping[str, AddedToken]) -> Iterator[str | AddedToken]:
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


def check_agreement(path: Path, id_to_token: Callable[[int], str | None]) -> None:
    """Compares a tokenizer.model with the tokenizer.json beside it, which is the one in use.

    Sixty-four learned pieces must have the same ids; others (control, byte, user-defined: their score is 0) may
    be renamed. A tiktoken file spells the same vocabulary in another way and is passed over. Raises
    TokenizerError.
    """
    if is_tiktoken(read_bytes(path)):
        return
    model = read_model(path)
    size = model.get_piece_size()
    for index in range(0, size, max(1, size // 64)):
        found = id_to_token(index)
        if model.get_score(index) < 0 and found != model.id_to_piece(index):
            raise TokenizerError(
                f"{path} and the tokenizer.json beside it disagree: id {index} is "
                f"{model.id_to_piece(index)!r} in the one and {found!r} in the other. Likely cause: files of "
                "two checkpoints in one folder. Next step: remove the one that does not belong to the "
                "weights."
            )
