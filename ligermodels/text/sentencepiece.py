"""SentencePiece's tokenizer.model as a `tokenizers.Tokenizer`: Llama 2, Mistral, Gemma, Phi-3.

The ids are those of SentencePiece, and of transformers where it adds to SentencePiece:
- control and unknown pieces are special tokens: `[INST]` in a text is Mistral's token, where SentencePiece and
  mistral-common read plain text;
- user-defined pieces are added tokens, and a text that begins with one gets no dummy prefix;
- the dummy prefix, a space before the text, is the file's. `legacy: false` (the default, as in transformers 5): before
  the text, unless an added token comes first. `legacy: true`: before every part of the text between added tokens.
  `add_prefix_space: false`: nowhere. Decoding removes it once;
- `add_bos_token` (default true) and `add_eos_token` (default false).

transformers 5.23 reads a tokenizer.model only if protobuf is installed, and orders merges by id where SentencePiece
orders them by score (runs of spaces). Checked against SentencePiece 0.2 and LlamaTokenizer of transformers 5.23.
"""

import struct
from pathlib import Path
from typing import Any

from ligermodels.checkpoint.gguf.tokenizer import (
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
    protobuf_fields,
    special_tokens_around,
)
from ligermodels.errors import TokenizerError
from ligermodels.text.files import Converted, TokenizerFiles, read_bytes

_UNIGRAM, _BPE = 1, 2


def convert(path: Path, files: TokenizerFiles) -> Converted:
    """Raises TokenizerError for a damaged file, or one of another kind."""
    data = read_bytes(path)
    try:
        return _convert(data, files)
    except Exception as error:  # tokenizers raises no narrower one
        raise TokenizerError(
            f"{path} is not a SentencePiece model that is supported ({type(error).__name__}: {str(error)[:200]}). "
            "Likely cause: a truncated download."
        ) from error


def _convert(data: bytes, files: TokenizerFiles) -> Converted:
    import tokenizers
    from tokenizers import decoders, normalizers, pre_tokenizers

    fields = list(protobuf_fields(data))
    entries = [dict(protobuf_fields(value)) for number, value in fields if number == 1]
    trainer, normalizer = ({k: v for n, value in fields if n == at for k, v in protobuf_fields(value)} for at in (2, 3))
    texts = [entry[1].decode() for entry in entries]
    types = [entry.get(3, NORMAL) for entry in entries]
    if not trainer or len(set(texts)) != len(texts) or UNKNOWN not in types:
        raise ValueError("it has no trainer's settings, a piece twice, or no unknown token")
    if trainer.get(24):
        raise ValueError("treat_whitespace_as_suffix is not supported")
    ids = {"bos_token": trainer.get(41, 1), "eos_token": trainer.get(42, 2), "pad_token": trainer.get(43, -1)}
    named = {name: texts[at] for name, at in ids.items() if 0 <= at < len(texts) and types[at] == CONTROL}
    named["unk_token"] = texts[types.index(UNKNOWN)]

    native = tokenizers.Tokenizer(_model(trainer, entries, texts, types))
    squeezes = bool(normalizer.get(4, 1))
    prefixes = bool(normalizer.get(3, 1)) and files.config.get("add_prefix_space") is not False
    steps: list[Any] = [normalizers.Precompiled(normalizer[2])] if normalizer.get(2) else []
    if squeezes:
        steps += [normalizers.Strip(left=not prefixes), normalizers.Replace(tokenizers.Regex(" +"), " ")]
    native.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    decoding: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixes:
        # Metaspace prepends nothing to a text that begins with its character: a space, which no normalised text has.
        where = "always" if files.config.get("legacy") else "first"
        prefix = pre_tokenizers.Metaspace(SPACE if squeezes else " ", prepend_scheme=where, split=False)
        escape = pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=False)
        native.pre_tokenizer = pre_tokenizers.Sequence([prefix, escape])
        decoding.append(decoders.Strip(" ", 1, 0))
    native.decoder = decoders.Sequence(decoding)
    for kinds, add in (((CONTROL, UNKNOWN), native.add_special_tokens), ((USER_DEFINED,), native.add_tokens)):
        contents = [text for text, kind in zip(texts, types, strict=True) if kind in kinds]
        # SentencePiece finds user-defined pieces in the normalised text, as runs of U+2581.
        add([tokenizers.AddedToken(text, normalized=USER_DEFINED in kinds) for text in contents])

    names = {name: text for name, text in named.items() if name not in files.config} | dict(files.named)
    added = {token.content: token.id for token in files.added}
    flags = {"bos": files.config.get("add_bos_token", True), "eos": files.config.get("add_eos_token", False)}
    tokens = {end: names.get(f"{end}_token") for end, is_added in flags.items() if is_added}
    ids = {
        end: (token, added.get(token, native.token_to_id(token))) for end, token in tokens.items() if token is not None
    }
    # A token without an id is refused where all named tokens are checked.
    native.post_processor = special_tokens_around({end: pair for end, pair in ids.items() if pair[1] is not None})
    return Converted(native, named)


def _model(trainer: dict[int, Any], entries: list[dict[int, Any]], texts: list[str], types: list[int]) -> Any:
    """The model of `tokenizers` with the pieces and, for BPE, a merge for each way to split a piece into two."""
    from tokenizers import models

    scores = [struct.unpack("<f", entry.get(2, bytes(4)))[0] for entry in entries]
    fallback, unknown = bool(trainer.get(35)), types.index(UNKNOWN)
    if trainer.get(3, _UNIGRAM) == _UNIGRAM:
        return models.Unigram(list(zip(texts, scores, strict=True)), unk_id=unknown, byte_fallback=fallback)
    if trainer[3] != _BPE:
        raise ValueError(f"models of type {trainer[3]} are not supported")
    merged = (NORMAL, USER_DEFINED)  # Gemma's runs of spaces are user-defined
    normal = {text: score for text, score, kind in zip(texts, scores, types, strict=True) if kind in merged}
    splits = [
        (text[:at], text[at:])
        for text in normal
        for at in range(1, len(text))
        if text[:at] in normal and text[at:] in normal
    ]
    # Among equal scores (runs of spaces) SentencePiece merges the leftmost pair, so the left run grows.
    splits.sort(key=lambda pair: (-normal[pair[0] + pair[1]], -len(pair[0])))
    vocab = {text: index for index, text in enumerate(texts)}
    return models.BPE(vocab, splits, unk_token=texts[unknown], fuse_unk=True, byte_fallback=fallback)
