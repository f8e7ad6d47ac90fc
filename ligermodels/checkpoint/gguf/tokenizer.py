"""The tokenizer in a GGUF file's metadata as the files of a Hugging Face folder; vocabulary.py writes that metadata.

- "gpt2", byte-level tokens with merges: tokenizer.json, whose pre-tokenizer is the one that `tokenizer.ggml.pre` names.
- "gemma4", sentencepiece's tokens with merges: tokenizer.json. Spaces are U+2581 before merging, and characters without
  a token are bytes. llama.cpp adds BOS whatever the file says, and so do these files.
- "llama", pieces with scores: tokenizer.model, sentencepiece's BPE. As in llama.cpp, control and user-defined tokens
  are split off first, and the dummy prefix stands before every text and after every such token. llama.cpp's converter
  types Gemma's unknown token as a control token: without one of its type, it is `unknown_token_id`.

Where the tokenizers of a family normalise (NFC of Qwen) or strip (Phi-3's special tokens), so do these files, although
llama.cpp derives it from the model's name or ignores it. Unused tokens at the end of the list are dropped.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from reprlib import repr as short
from typing import Any

from ligermodels.checkpoint.files import MORE_TEMPLATES
from ligermodels.errors import TokenizerError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens, in sentencepiece as well."""
SPACE = "\u2581"
PHI3_TOKENS = {"<unk>", "<s>", "</s>", "<|endoftext|>"}
"""Of these, only </s> strips the white space after it; all other special tokens of Phi-3 do."""

_SPACES = r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = r" ?[^\s\p{L}\p{N}]+" + _SPACES
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+@|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*@|"
_CASED_REST = _REST.replace(r"[\r\n]*|", r"[\r\n/]*|")
_WORDS = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|"
LLAMA_3_PATTERN = rf"{_WORDS}\p{{N}}{{1,3}}|{_REST}"
_QWEN35 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+{_SPACES}"
PRE_TOKENIZERS = {
    (LLAMA_3_PATTERN, True): "llama-bpe",
    (LLAMA_3_PATTERN, False): "dbrx",
    (rf"{_WORDS}\p{{N}}|{_REST}", False): "qwen2",
    (_QWEN35, False): "qwen35",
    (_CASED.replace("@", "") + rf"\p{{N}}|{_CASED_REST}", True): "tekken",
    # Made from tiktoken's ranks, where merges make every token: ignore_merges changes nothing.
    (_CASED.replace("@", "") + rf"\p{{N}}|{_CASED_REST}", False): "tekken",
    (_CASED.replace("@", f"{_ENDINGS}?") + rf"\p{{N}}{{1,3}}|{_CASED_REST}", False): "gpt-4o",
    (_CASED.replace("@", f"{_ENDINGS}?") + rf"\p{{N}}{{1,3}}|{_CASED_REST}", True): "gpt-4o",
    ("ByteLevel", False): "gpt-2",
    ("Digits ByteLevel", False): "smollm",
}
"""{(the pattern that splits a text, ignore_merges of tokenizer.json): llama.cpp's name}."""

_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
"""The patterns that llama.cpp applies in turn where a file says "default" or nothing."""
_WITH_BOS = ("llama-bpe", "tekken")
_NO_ID = (1 << 64) - 1  # -1 in a protobuf
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def token_ids(metadata: Mapping[str, Any], where: str, only_eos: bool = False) -> dict[str, Any]:
    """BOS, EOS and pad ids for generation_config.json: the ends of a text, a turn and a message are EOS ids.

    only_eos: for config.json, where the end of a text is the only EOS id. Raises TokenizerError for an id of another
    type.
    """

    def id_of(name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}")
        if value is not None and type(value) is not int:
            raise TokenizerError(
                f"{where}: its tokenizer is damaged: tokenizer.ggml.{name} is {short(value)}, not an id"
            )
        return value

    ends = [id_of(name) for name in (_ENDS[:1] if only_eos else _ENDS)]
    eos_ids = list(dict.fromkeys(end for end in ends if end is not None))
    ids = {
        "bos_token_id": id_of("bos_token_id"),
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids or None,
        "pad_token_id": id_of("padding_token_id"),
    }
    return {name: value for name, value in ids.items() if value is not None}


def tokenizer_files(metadata: Mapping[str, Any], model_type: str, where: str) -> dict[str, bytes]:
    """{name: content} of tokenizer.json or tokenizer.model, tokenizer_config.json and the chat templates.

    Empty if the file has no tokenizer. Raises TokenizerError.
    """
    kind = metadata.get("tokenizer.ggml.model", "none")
    if kind in ("none", "no_vocab"):
        return {}
    if kind not in ("gpt2", "llama", "gemma4"):
        raise TokenizerError(f"{where}: tokenizer.ggml.model {kind!r} is not supported; supported: gpt2, llama, gemma4")
    try:
        tokens, types = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type")
        types = types or [NORMAL] * len(tokens)
        while types and types[-1] == UNUSED:
            types = types[:-1]
        tokens = tokens[: len(types)]
        unknown = metadata.get("tokenizer.ggml.unknown_token_id")
        if kind == "llama" and unknown is not None and UNKNOWN not in types:
            types = [UNKNOWN if index == unknown else of for index, of in enumerate(types)]
        config = _settings(metadata, tokens)
        files = {
            f"{MORE_TEMPLATES}/{key.removeprefix('tokenizer.chat_template.')}.jinja": text.encode()
            for key, text in metadata.items()
            if key.startswith("tokenizer.chat_template.")
        }
        if "tokenizer.chat_template" in metadata:
            files["chat_template.jinja"] = metadata["tokenizer.chat_template"].encode()
        added = _added(tokens, types, model_type)
        if kind == "gpt2":
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
            files["tokenizer.json"] = _byte_level(metadata, tokens, added, config, where)
        elif kind == "gemma4":
            config |= {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True}
            files["tokenizer.json"] = _with_byte_fallback(metadata, tokens, added, config)
        else:
            config |= {"tokenizer_class": "GemmaTokenizer" if model_type.startswith("gemma") else "LlamaTokenizer"}
            special = {str(index): token for index, token in added.items() if token["special"]}
            config |= {"legacy": True, "added_tokens_decoder": special}  # tokenizer.model has the user-defined ones
            files["tokenizer.model"] = _sentencepiece(metadata, tokens, types)
    except TokenizerError:
        raise
    except Exception as error:  # tokenizers raises no narrower one
        raise TokenizerError(f"{where}: its tokenizer is damaged: {type(error).__name__}: {error}") from error
    return files | {"tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False).encode()}


def _settings(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    """tokenizer_config.json: the named tokens, and whether BOS and EOS are added."""
    is_llama, pre = metadata["tokenizer.ggml.model"] == "llama", _pre(metadata)
    config: dict[str, Any] = {
        "add_bos_token": metadata.get("tokenizer.ggml.add_bos_token", is_llama or pre in _WITH_BOS),
        "add_eos_token": metadata.get("tokenizer.ggml.add_eos_token", False),
        "clean_up_tokenization_spaces": False,
    }
    for name, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if index is not None and index < len(tokens):
            config[f"{name}_token"] = tokens[index]
    return config


def _pre(metadata: Mapping[str, Any]) -> str:
    name = metadata.get("tokenizer.ggml.pre", "default")
    return _ALIASES.get(name, name)


def _added(tokens: list[str], types: list[int], model_type: str) -> dict[int, dict[str, Any]]:
    """{id: token with its flags} of the tokens that are split off a text before all others."""
    strips = model_type == "phi3" and set(tokens) >= PHI3_TOKENS
    plain = PHI3_TOKENS - {"</s>"}
    return {
        index: {
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": strips and kind == CONTROL and token not in plain,
            "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED) or (kind == UNKNOWN and token)
    }


def _byte_level(
    metadata: Mapping[str, Any], tokens: list[str], added: Mapping[int, Any], config: Mapping[str, Any], where: str
) -> bytes:
    """tokenizer.json. Raises TokenizerError for a pre-tokenizer that is not supported."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = _pre(metadata)
    known = {name: key for key, name in reversed(PRE_TOKENIZERS.items())}
    if pre not in (*known, "default"):
        raise TokenizerError(
            f"{where}: the pre-tokenizer {pre!r} (tokenizer.ggml.pre) is not supported; supported: "
            f"{', '.join((*known, 'default'))}.\n  Next: use the checkpoint in Hugging Face's layout."
        )
    pattern, ignore_merges = known.get(pre, ("", False))
    by_regex = pattern.endswith("ByteLevel")
    patterns = _DEFAULT if pre == "default" else () if by_regex else (pattern,)
    steps: list[Any] = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in patterns]
    if pattern.startswith("Digits"):
        steps = [pre_tokenizers.Digits(individual_digits=True)]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer: Any = Tokenizer(models.BPE(vocab, _merges(metadata), ignore_merges=ignore_merges))
    if pre in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=by_regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return _finished(tokenizer, vocab, added, config)


def _with_byte_fallback(
    metadata: Mapping[str, Any], tokens: list[str], added: Mapping[int, Any], config: Mapping[str, Any]
) -> bytes:
    """tokenizer.json of sentencepiece's tokens with merges."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {token: index for index, token in enumerate(tokens)}
    options = {"unk_token": config.get("unk_token"), "fuse_unk": True, "byte_fallback": True}
    tokenizer: Any = Tokenizer(models.BPE(vocab, _merges(metadata), **options))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return _finished(tokenizer, vocab, added, config)


def _merges(metadata: Mapping[str, Any]) -> list[Any]:
    return [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]


def _finished(tokenizer: Any, vocab: Mapping[str, int], added: Mapping[int, Any], config: Mapping[str, Any]) -> bytes:
    """tokenizer.json, with the tokens around a text and those that are split off it."""
    from tokenizers import AddedToken

    named = {end: config[f"{end}_token"] for end in ("bos", "eos") if config[f"add_{end}_token"]}
    tokenizer.post_processor = special_tokens_around({end: (token, vocab[token]) for end, token in named.items()})
    tokenizer.add_special_tokens([AddedToken(**token) for token in added.values() if token["special"]])
    tokenizer.add_tokens([AddedToken(**token) for token in added.values() if not token["special"]])
    return tokenizer.to_str().encode()


def special_tokens_around(ends: Mapping[str, tuple[str, int]]) -> Any:
    """The post-processor that adds BOS before a text and EOS after it.

    ends: {"bos": (token, id), "eos": (token, id)} of those that are added.
    """
    from tokenizers import processors

    before, after = ([end] if end in ends else [] for end in ("bos", "eos"))
    single, second = ([*before, text, *after] for text in ("$A", "$B:1"))
    tokens = [{"id": end, "ids": [index], "tokens": [token]} for end, (token, index) in ends.items()]
    return processors.TemplateProcessing(single=single, pair=single + second, special_tokens=tokens)


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> bytes:
    """tokenizer.model: a ModelProto with the pieces, its trainer's and its normalizer's settings."""
    scores = metadata["tokenizer.ggml.scores"][: len(tokens)]
    pieces = []
    for index, (token, score, kind) in enumerate(zip(tokens, scores, types, strict=True)):
        if not token:  # sentencepiece has no empty pieces
            token, kind = f"[PAD{index}]", UNUSED
        text = token.replace(" ", SPACE).encode()
        piece = _field(1, text) + b"\x15" + struct.pack("<f", score) + _field(3, kind)
        pieces.append(_field(1, piece))
    has_bytes = sum(kind == BYTE for kind in types) == 256
    ids: list[int | None] = [types.index(UNKNOWN) if UNKNOWN in types else None]
    ids += [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding")]
    trainer = _field(3, 2) + _field(4, len(tokens)) + _field(35, int(has_bytes))  # 2: BPE
    for number, special in enumerate(ids, start=40):
        trainer += _field(number, _NO_ID if special is None else special)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    squeezes = metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)
    normalizer = _field(1, b"identity") + _field(3, int(prefix)) + _field(4, int(squeezes)) + _field(5, 1)
    return b"".join(pieces) + _field(2, trainer) + _field(3, normalizer)


def _field(number: int, value: int | bytes) -> bytes:
    """A field of a protobuf message."""
    if isinstance(value, bytes):
        return _varint(number << 3 | 2) + _varint(len(value)) + value
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def protobuf_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, int or bytes) of each field of a protobuf message."""
    at = 0

    def varint() -> int:
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = varint() if key & 7 == 2 else {1: 8, 5: 4}[key & 7]
        if at + size > len(data):
            raise ValueError("a field ends after the end of its message")
        yield key >> 3, data[at : at + size]
        at += size
