"""tokenizer.json through the `tokenizers` library. The file decides everything, its post-processor included.

As in transformers 5.23, `add_bos_token` and `add_eos_token` of tokenizer_config.json are not read beside a
tokenizer.json, padding and truncation stored in the file are switched off, and the added and special tokens
of tokenizer_config.json are merged into those of the file.

Two classes of transformers 5 take only the vocabulary out of the file and build the rest anew, LlamaTokenizer
(Llama 2) and GemmaTokenizer. Their ids differ from ours, which are those of transformers 4 and of the models'
own code, for what the file alone says: in Llama 2 the dummy prefix behind a special token, as in <s>[INST], and
beside a leading space; in Gemma added tokens that tokenizer_config.json leaves out.
"""

import base64
import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from reprlib import repr as short
from typing import Any

from ligermodels.errors import TokenizerError
from ligermodels.text import detokenizer
from ligermodels.text.files import AddedToken, TokenizerFiles, read_text

# How many times longer the steps before the vocabulary, or the decoder, may make a text. SentencePiece's nmt_nfkc
# alone says 33, a replacement by pattern 2.
_MAX_GROWTH = 256
_MAX_PROCESSOR = 2**16
# Parsed in Python as well, where it must be: items of the JSON, and characters of a file that is refused.
_MAX_ITEMS, _MAX_DIAGNOSED = 2**20, 2**20
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


class JsonBackend:
    """`tokenizers.Tokenizer` behind the calls that `Tokenizer` and `StreamDecoder` need."""

    def __init__(self, path: Path, files: TokenizerFiles) -> None:
        import tokenizers

        text = read_text(path)
        _check_parts(path, text)
        try:
            with _native_errors(str(path)):
                self._native = tokenizers.Tokenizer.from_str(text)
        except TokenizerError as error:
            raise TokenizerError(f"{path} cannot be loaded: {_diagnose(text)}. ({error})") from error
        self._native.no_truncation()
        self._native.no_padding()
        self._path = path
        self.update(files)
        self._falls_back = _has_byte_fallback(self.decoder)

    def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        # The fast one leaves out the offsets: half the time of encode(), for one long text as well.
        with _native_errors("encode"):
            found = self._native.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in found]

    def encode_with_offsets(self, text: str, add_special_tokens: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids, and the (start, end) of each in the text; (0, 0) of those that are added."""
        with _native_errors("encode"):
            found = self._native.encode(text, add_special_tokens=add_special_tokens)
        return found.ids, found.offsets

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        with _native_errors("decode"):
            text = self._native.decode(ids, skip_special_tokens=skip_special_tokens)
        if "\ufffd" in text and self._falls_back:
            # A run of byte tokens with a bad byte: see `pieces`.
            skipped = self.special_ids if skip_special_tokens else frozenset()
            tokens = (t for i in ids if i not in skipped and (t := self.id_to_token(i)) is not None)
            return detokenizer.decode(self.decoder, tokens)
        return text

    def token_to_id(self, token: str) -> int | None:
        return self._native.token_to_id(token)

    def id_to_token(self, index: int) -> str | None:
        return self._native.id_to_token(index)

    def vocab(self) -> dict[str, int]:
        return self._native.get_vocab(with_added_tokens=True)

    def to_json(self) -> str:
        """tokenizer.json with all tokens that were added."""
        return self._native.to_str(pretty=True)

    @property
    def added(self) -> dict[int, AddedToken]:
        found = self._native.get_added_tokens_decoder().items()
        return {index: AddedToken(id=index, **token.__getstate__()) for index, token in found}

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

    def update(self, files: TokenizerFiles) -> None:
        """Adds the tokens that are new in `files`, and makes special those that are named there."""
        import tokenizers

        path = self._path
        present = self._native.get_added_tokens_decoder()
        new, size = [], self.vocab_size
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
            if self._native.token_to_id(token.content) is None:
                if size != token.id:
                    raise TokenizerError(
                        f"{path} lacks the added token {short(token.content)}, which the folder's other files give id "
                        f"{token.id}; the next free id is {size}. Likely cause: files of two "
                        "checkpoints mixed, or a tokenizer.json saved before tokens were added."
                    )
                size += 1
            new.append(native)
        # All at once: each call builds the search for all of them anew.
        with _native_errors(f"{path}, adding tokens"):
            self._native.add_tokens(new)
            if any(t.id in present and present[t.id].normalized and not t.normalized for t in files.added):
                # The library goes on with the normalised spelling of the token otherwise.
                self._native = tokenizers.Tokenizer.from_str(self._native.to_str())
        for token in files.added:
            if (found := self._native.token_to_id(token.content)) != token.id:
                raise TokenizerError(
                    f"{path} gives {short(token.content)} the id {found}, the folder's other files say "
                    f"{token.id}. Likely cause: files of two checkpoints mixed."
                )
        by_content = {token.content: token for token in self._native.get_added_tokens_decoder().values()}
        named = dict.fromkeys((*files.named.values(), *files.extra_special))
        natives = (by_content.get(content, tokenizers.AddedToken(content, normalized=False)) for content in named)
        special = [n for n in natives if not n.special and self._native.token_to_id(n.content) is not None]
        with _native_errors(f"{path}, adding tokens"):
            self._native.add_special_tokens(special)


def _check_parts(path: Path, text: str) -> None:
    """Refuses steps that make a text much longer, each of them or one after the other: sixty replacements of "a" by
    "aa" would fill any memory, some while the file is loaded."""
    try:
        parts = _parts(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} cannot be loaded: {_diagnose(text)}. ({error})") from error
    growth = _growth([parts.get("normalizer"), parts.get("pre_tokenizer")]), _growth([parts.get("decoder")])
    processor = len(json.dumps(parts.get("post_processor")))
    if max(growth) > _MAX_GROWTH or processor > _MAX_PROCESSOR:
        raise TokenizerError(
            f"{path} cannot be loaded: its steps make a text up to {min(max(growth), 10**9):,} times longer (the limit "
            f"is {_MAX_GROWTH}), its post-processor has {processor:,} characters (the limit is {_MAX_PROCESSOR:,}). "
            "Likely cause: a file that is out to harm."
        )


def _parts(text: str) -> Mapping[str, Any]:
    """What tokenizer.json holds beside the vocabulary, which is parsed only where it may hide something of it."""
    head, found, rest = text.partition('"model"')
    hidden = [name for name in _PARTS if f'"{name}"' in rest and re.search(rf'"{name}"\s*:\s*[^\s\d]', rest)]
    # All serializers escape control characters, and some 7F; other ASCII that is escaped could spell one of the names.
    escaped = "\\u00" in text and re.search(r"\\u00(?!7[fF])[2-7]", text)
    if not (hidden or escaped or found):
        return {}
    if not (hidden or escaped):
        with contextlib.suppress(ValueError):
            return json.loads(f'{head}"model": 0}}')
    if sum(map(text.count, ",[{")) > _MAX_ITEMS:
        raise ValueError("its vocabulary does not come last; save it again with the tokenizers library")
    parts = json.loads(text)
    return parts if isinstance(parts, dict) else {}


def _growth(parts: list[Any]) -> int:
    """The product over all steps, by their fields: the library reads steps without a `type` as well."""
    growth = 1
    for part in parts:
        if isinstance(part, list):
            parts += part
        elif isinstance(part, dict):
            parts += part.values()
            content, pattern = part.get("content"), part.get("pattern")
            if isinstance(content, str) and pattern is not None:
                replaced = pattern.get("String") if isinstance(pattern, dict) else pattern
                length = len(replaced) if isinstance(replaced, str) else 0
                growth *= max(1, -(-len(content) // length)) if length else 1 + len(content)
            if isinstance(part.get("prepend"), str):
                growth *= 1 + len(part["prepend"])
            if part.get("type") == "ByteLevel" or "trim_offsets" in part:
                growth *= 2
            if isinstance(part.get("precompiled_charsmap"), str):
                growth *= _longest_replacement(part["precompiled_charsmap"])
            growth = min(growth, 10**9)
    return growth


def _longest_replacement(charsmap: str) -> int:
    """In a charsmap of SentencePiece: the size of a trie, the trie, and strings that end with a zero byte."""
    with contextlib.suppress(ValueError):
        data = base64.b64decode(charsmap)
        return max(1, *map(len, data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")))
    return 1


def _has_byte_fallback(decoder: Mapping[str, Any] | None) -> bool:
    """Whether ByteFallback is one of the decoders, in a combination that `pieces` knows."""
    if decoder is None or all(part.get("type") != "ByteFallback" for part in detokenizer.flatten(decoder)):
        return False
    try:
        detokenizer.PieceStream(decoder)
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
    if len(text) > _MAX_DIAGNOSED:
        return "it is damaged, or of another kind. Likely cause: an interrupted download"
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"it is not valid JSON: {error}. Likely cause: an interrupted download"
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict):
        return "it has no `model` object. Likely cause: another JSON file under this name"
    kind = model.get("type")
    if kind not in ("BPE", "Unigram", "WordPiece", "WordLevel", None):
        return f"its model type {short(kind)} is unknown; known are BPE, Unigram, WordPiece and WordLevel"
    return "a part of it is malformed, or it was written by a newer tokenizers; next step: update tokenizers"
