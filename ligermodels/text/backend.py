"""The vocabulary of a tokenizer's folder as a `tokenizers.Tokenizer`.

A tokenizer.json is read as it is, with its own post-processor; sentencepiece.py and tiktoken.py convert the other
files. As in transformers 5.23, `add_bos_token` and `add_eos_token` of tokenizer_config.json are not read beside it;
padding and truncation stored in the file are switched off, and the added and special tokens of tokenizer_config.json
are merged into those of the file.

Two classes of transformers 5 read only the vocabulary of tokenizer.json and rebuild the rest, LlamaTokenizer (Llama 2)
and GemmaTokenizer. Ours follows the file, as transformers 4 and the models' own code do. The ids differ for
Llama 2 in the dummy prefix after a special token, as in <s>[INST], and before a leading space; for Gemma in added
tokens that tokenizer_config.json lacks.
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from reprlib import repr as short
from typing import NamedTuple

from ligermodels.errors import TokenizerError
from ligermodels.text import sentencepiece, tiktoken
from ligermodels.text.files import AddedToken, Converted, TokenizerFiles, read_bytes, read_text


class Encoded(NamedTuple):
    """The ids of a text. offsets: the (start, end) of each in the text, (0, 0) for special tokens added around it."""

    ids: list[int]
    offsets: list[tuple[int, int]] | None = None


class Backend:
    """A `tokenizers.Tokenizer`, with errors that name the file.

    added: {id: token} of the added tokens, special ones included.
    base_vocab_size: the number of ids without added tokens.
    converted: whether `path` is not a tokenizer.json.
    named, stop_ids: the special tokens that a converted file names, {"bos_token": "<s>", ...}, and the ids that end a
    text or a turn.
    """

    added: Mapping[int, AddedToken]

    def __init__(self, files: TokenizerFiles) -> None:
        """Raises TokenizerError."""
        if files.vocabulary is None:
            names = sorted(path.name for path in files.folder.iterdir())[:20]
            raise TokenizerError(
                f"{files.folder} has neither tokenizer.json nor tokenizer.model nor tekken.json; it has {names}. Next "
                "step: take the tokenizer's files from the checkpoint's repository (vocab.json and merges.txt are not "
                "read by themselves)."
            )
        self.path = files.vocabulary
        self.converted = self.path.name != "tokenizer.json"
        self._native, self.named, stops = _open(files)
        self._native.no_truncation()
        self._native.no_padding()
        self.stop_ids = tuple(self._native.token_to_id(token) for token in stops)
        decoder = self._native.decoder
        self._has_byte_fallback = b'"ByteFallback"' in (decoder.__getstate__() if decoder else b"")
        self.base_vocab_size = self._native.get_vocab_size(with_added_tokens=False)
        self.update(files)

    def encode(self, texts: Sequence[str], add_special_tokens: bool, with_offsets: bool = False) -> list[Encoded]:
        # Without offsets it takes half the time.
        run = self._native.encode_batch if with_offsets else self._native.encode_batch_fast
        with _native_errors("encode"):
            encodings = run(texts, add_special_tokens=add_special_tokens)
        return [Encoded(encoding.ids, encoding.offsets if with_offsets else None) for encoding in encodings]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        with _native_errors("decode"):
            text: str = self._native.decode(ids, skip_special_tokens=skip_special_tokens)
            if "\ufffd" not in text or not self._has_byte_fallback:
                return text
            # For one bad byte the library drops a whole run of byte tokens, with characters that a stream has returned.
            skipped = self.special_ids if skip_special_tokens else frozenset()
            tokens = (token for index in ids if index not in skipped and (token := self.id_to_token(index)) is not None)
            return self._native.decoder.decode(list(_join_byte_tokens(tokens)))

    def token_to_id(self, token: str) -> int | None:
        return self._native.token_to_id(token)

    def id_to_token(self, index: int) -> str | None:
        return self._native.id_to_token(index)

    def vocab(self) -> dict[str, int]:
        """{token: id}, added tokens included."""
        return self._native.get_vocab(with_added_tokens=True)

    def to_json(self) -> str:
        """The content of tokenizer.json, with all added tokens."""
        return self._native.to_str(pretty=True)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` can skip."""
        return frozenset(index for index, token in self.added.items() if token.special)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return max(self.base_vocab_size, 1 + max(self.added, default=-1))

    def update(self, files: TokenizerFiles) -> None:
        """Adds the new tokens of `files` and makes its named tokens special."""
        import tokenizers

        present = self._native.get_added_tokens_decoder()
        natives = {token.id: tokenizers.AddedToken(**token.to_dict()) for token in files.added}
        # In one call, because each call rebuilds the search for all tokens.
        self._native.add_tokens(
            [native for index, native in natives.items() if repr(present.get(index)) != repr(native)]
        )
        if any(t.id in present and present[t.id].normalized and not t.normalized for t in files.added):
            # Without a reload the library still matches the normalised spelling of the token.
            self._native = tokenizers.Tokenizer.from_str(self._native.to_str())
        for token in files.added:
            if (index := self._native.token_to_id(token.content)) != token.id:
                raise TokenizerError(
                    f"{self.path} gives the added token {short(token.content)} the id {index}, the folder's other "
                    f"files say {token.id}. Likely cause: files of two checkpoints mixed, or a tokenizer.json saved "
                    "before tokens were added."
                )
        by_content = {token.content: token for token in self._native.get_added_tokens_decoder().values()}
        named = dict.fromkeys((*files.named.values(), *files.extra_special))
        special = [by_content.get(content, tokenizers.AddedToken(content, normalized=False)) for content in named]
        self._native.add_special_tokens(
            [token for token in special if not token.special and self._native.token_to_id(token.content) is not None]
        )
        self.added = {
            index: AddedToken(id=index, **token.__getstate__())
            for index, token in self._native.get_added_tokens_decoder().items()
        }

    def complete(self, files: TokenizerFiles) -> TokenizerFiles:
        """`files` with the special tokens of the vocabulary file; what a config says wins, also a null."""
        undeclared = {name: token for name, token in self.named.items() if name not in files.config}
        return dataclasses.replace(
            files, named={**undeclared, **files.named}, eos_token_ids=files.eos_token_ids or self.stop_ids
        )


def _open(files: TokenizerFiles) -> Converted:
    import tokenizers

    path = files.vocabulary
    assert path is not None
    if path.name == "tekken.json" or (path.name != "tokenizer.json" and tiktoken.is_tiktoken(read_bytes(path))):
        return tiktoken.convert(path, files)
    if path.name != "tokenizer.json":
        return sentencepiece.convert(path, files)
    text = read_text(path)
    try:
        with _native_errors(str(path)):
            return Converted(tokenizers.Tokenizer.from_str(text))
    except TokenizerError as error:
        try:
            json.loads(text)
            cause = "damaged, another JSON file under this name, or written by a newer tokenizers"
        except (ValueError, RecursionError):
            cause = "an interrupted download: it is not valid JSON"
        raise TokenizerError(f"{error}. Likely cause: {cause}.") from error


def _join_byte_tokens(tokens: Iterable[str]) -> Iterator[str]:
    """The tokens, with each run of byte tokens such as <0x0A> replaced by its text.

    A byte of no character becomes U+FFFD, as in SentencePiece.
    """
    run = b""
    for token in (*tokens, ""):
        if match := re.fullmatch("<0x([0-9A-F]{2})>", token):
            run += bytes([int(match[1], 16)])
            continue
        yield re.sub("[\udc80-\udcff]", "\ufffd", run.decode("utf-8", "surrogateescape"))
        run = b""
        yield token


@contextlib.contextmanager
def _native_errors(where: str) -> Iterator[None]:
    """Turns errors and panics of the Rust library into TokenizerErrors."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime":
            raise TokenizerError(f"{where}: the tokenizers library says: {error}") from error
        raise
