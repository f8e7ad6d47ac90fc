"""tokenizer.json through the `tokenizers` library, with the file's own post-processor.

As in transformers 5.23, `add_bos_token` and `add_eos_token` of tokenizer_config.json are not read beside a
tokenizer.json, padding and truncation stored in the file are switched off, and the added and special tokens
of tokenizer_config.json are merged into those of the file.

Two classes of transformers 5 take only the vocabulary from the file and rebuild the rest, LlamaTokenizer (Llama 2)
and GemmaTokenizer. Ours follows the file, as transformers 4 and the models' own code do. The ids differ for
Llama 2 in the dummy prefix after a special token, as in <s>[INST], and before a leading space; for Gemma in added
tokens that tokenizer_config.json leaves out.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from reprlib import repr as short
from typing import Any

from ligermodels.errors import TokenizerError
from ligermodels.text.backend import Backend, Encoded, decode_utf8
from ligermodels.text.files import AddedToken, TokenizerFiles, read_text


class JsonBackend(Backend):
    """A `tokenizers.Tokenizer`."""

    def __init__(self, path: Path, files: TokenizerFiles, native: Any = None) -> None:
        """native: the `tokenizers.Tokenizer` of `path`, where that is not a tokenizer.json."""
        self._native = _read(path) if native is None else native
        self._native.no_truncation()
        self._native.no_padding()
        self._path = path
        self._has_byte_fallback = b'"ByteFallback"' in (
            self._native.decoder.__getstate__() if self._native.decoder else b""
        )
        self.base_vocab_size = self._native.get_vocab_size(with_added_tokens=False)
        self.update(files)

    def encode(self, texts: Sequence[str], add_special_tokens: bool, with_offsets: bool = False) -> list[Encoded]:
        # Without offsets it takes half the time.
        run = self._native.encode_batch if with_offsets else self._native.encode_batch_fast
        with _native_errors("encode"):
            found = run(texts, add_special_tokens=add_special_tokens)
        return [Encoded(encoding.ids, encoding.offsets if with_offsets else None) for encoding in found]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        with _native_errors("decode"):
            text = self._native.decode(ids, skip_special_tokens=skip_special_tokens)
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
        return self._native.get_vocab(with_added_tokens=True)

    def to_json(self) -> str:
        """The content of tokenizer.json, with all added tokens."""
        return self._native.to_str(pretty=True)

    def update(self, files: TokenizerFiles) -> None:
        """Adds the new tokens of `files` and makes its named tokens special."""
        import tokenizers

        present = self._native.get_added_tokens_decoder()
        natives = {token.id: tokenizers.AddedToken(**token.to_dict()) for token in files.added}
        # In one call, because each call rebuilds the search for all tokens.
        changed = [native for index, native in natives.items() if repr(present.get(index)) != repr(native)]
        self._native.add_tokens(changed)
        if any(t.id in present and present[t.id].normalized and not t.normalized for t in files.added):
            # Without a reload the library still matches the normalised spelling of the token.
            self._native = tokenizers.Tokenizer.from_str(self._native.to_str())
        for token in files.added:
            if (found := self._native.token_to_id(token.content)) != token.id:
                raise TokenizerError(
                    f"{self._path} gives the added token {short(token.content)} the id {found}, the folder's other "
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


def _read(path: Path) -> Any:
    """The `tokenizers.Tokenizer` of a tokenizer.json."""
    import tokenizers

    text = read_text(path)
    try:
        with _native_errors(str(path)):
            return tokenizers.Tokenizer.from_str(text)
    except TokenizerError as error:
        try:
            json.loads(text)
            cause = "damaged, another JSON file under this name, or written by a newer tokenizers"
        except (ValueError, RecursionError):
            cause = "an interrupted download: it is not valid JSON"
        raise TokenizerError(f"{error}. Likely cause: {cause}.") from error


def _join_byte_tokens(tokens: Iterable[str]) -> Iterator[str]:
    """The tokens, with each run of byte tokens such as <0x0A> replaced by its text."""
    run = b""
    for token in tokens:
        if found := re.fullmatch("<0x([0-9A-F]{2})>", token):
            run += bytes([int(found[1], 16)])
            continue
        if run:
            yield decode_utf8(run)
        run = b""
        yield token
    if run:
        yield decode_utf8(run)


@contextlib.contextmanager
def _native_errors(where: str) -> Iterator[None]:
    """Turns errors and panics of the Rust library into TokenizerErrors."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime":
            raise TokenizerError(f"{where}: the tokenizers library says: {error}") from error
        raise
