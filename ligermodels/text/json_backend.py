"""tokenizer.json through the `tokenizers` library. The file decides everything, its post-processor included.

As in transformers 5.23, `add_bos_token` and `add_eos_token` of tokenizer_config.json are not read beside a
tokenizer.json, padding and truncation stored in the file are switched off, and the added and special tokens
of tokenizer_config.json are merged into those of the file.

Two classes of transformers 5 take only the vocabulary out of the file and build the rest anew, LlamaTokenizer
(Llama 2) and GemmaTokenizer. Their ids differ from ours, which are those of transformers 4 and of the models'
own code, for what the file alone says: in Llama 2 the dummy prefix behind a special token, as in <s>[INST], and
beside a leading space; in Gemma added tokens that tokenizer_config.json leaves out.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ligermodels.errors import TokenizerError
from ligermodels.text import pieces
from ligermodels.text.files import TokenizerFiles, read_text


class JsonBackend:
    """`tokenizers.Tokenizer` behind the four calls that `Tokenizer` and `StreamDecoder` need."""

    def __init__(self, path: Path, files: TokenizerFiles) -> None:
        import tokenizers

        text = read_text(path)
        try:
            with _native_errors(str(path)):
                self._native = tokenizers.Tokenizer.from_str(text)
        except TokenizerError as error:
            raise TokenizerError(f"{path} cannot be loaded: {_diagnose(text)}. ({error})") from error
        self._native.no_truncation()
        self._native.no_padding()
        self._merge_added(path, files)
        self._falls_back = _has_byte_fallback(self.decoder)

    def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        # The fast one leaves out the offsets: half the time of encode(), for one long text as well.
        with _native_errors("encode"):
            found = self._native.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in found]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        with _native_errors("decode"):
            text = self._native.decode(ids, skip_special_tokens=skip_special_tokens)
        if "\ufffd" in text and self._falls_back:
            # A run of byte tokens with a bad byte: see `pieces`.
            skipped = self.special_ids if skip_special_tokens else frozenset()
            tokens = (t for i in ids if i not in skipped and (t := self.id_to_token(i)) is not None)
            return pieces.decode(self.decoder, tokens)
        return text

    def token_to_id(self, token: str) -> int | None:
        return self._native.token_to_id(token)

    def id_to_token(self, index: int) -> str | None:
        return self._native.id_to_token(index)

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self._native.get_added_tokens_decoder().items() if token.special)

    @property
    def base_vocab_size(self) -> int:
        """Ids of the vocabulary itself: without added tokens."""
        return self._native.get_vocab_size(with_added_tokens=False)

    @property
    def vocab_size(self) -> int:
        return max(self.base_vocab_size, 1 + max(self._native.get_added_tokens_decoder(), default=-1))

    @property
    def decoder(self) -> Mapping[str, Any] | None:
        """The `decoder` object of tokenizer.json."""
        return json.loads(self._native.decoder.__getstate__()) if self._native.decoder else None

    def _merge_added(self, path: Path, files: TokenizerFiles) -> None:
        import tokenizers

        present = self._native.get_added_tokens_decoder()
        for token in files.added:
            native = tokenizers.AddedToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=token.special,
            )
            if repr(present.get(token.id)) == repr(native):
                continue
            if self._native.token_to_id(token.content) is None and self.vocab_size != token.id:
                raise TokenizerError(
                    f"{path} lacks the added token {token.content!r}, which the folder's other files give id "
                    f"{token.id}; the next free id is {self.vocab_size}. Likely cause: files of two "
                    "checkpoints mixed, or a tokenizer.json saved before tokens were added."
                )
            self._native.add_tokens([native])
            if (found := self._native.token_to_id(token.content)) != token.id:
                raise TokenizerError(
                    f"{path} gives {token.content!r} the id {found}, the folder's other files say "
                    f"{token.id}. Likely cause: files of two checkpoints mixed."
                )
        by_content = {token.content: token for token in self._native.get_added_tokens_decoder().values()}
        for content in dict.fromkeys((*files.named.values(), *files.extra_special)):
            native = by_content.get(content, tokenizers.AddedToken(content, normalized=False))
            if not native.special and self._native.token_to_id(content) is not None:
                self._native.add_special_tokens([native])


def _has_byte_fallback(decoder: Mapping[str, Any] | None) -> bool:
    """Whether ByteFallback is one of the decoders, in a combination that `pieces` knows."""
    if decoder is None or all(part.get("type") != "ByteFallback" for part in pieces.flatten(decoder)):
        return False
    try:
        pieces.PieceStream(decoder)
    except TokenizerError:
        return False
    return True


@contextlib.contextmanager
def _native_errors(where: str) -> Iterator[None]:
    """Errors and panics of the Rust library as TokenizerError."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime":
            raise TokenizerError(f"{where}: the tokenizers library says: {error}") from error
        raise


def _diagnose(text: str) -> str:
    try:
        content = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        return f"it is not valid JSON: {error}. Likely cause: an interrupted download"
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict):
        return "it has no `model` object. Likely cause: another JSON file under this name"
    kind = model.get("type")
    if kind not in ("BPE", "Unigram", "WordPiece", "WordLevel", None):
        return f"its model type {kind!r} is unknown; known are BPE, Unigram, WordPiece and WordLevel"
    return "a part of it is malformed, or it was written by a newer tokenizers; next step: update tokenizers"
