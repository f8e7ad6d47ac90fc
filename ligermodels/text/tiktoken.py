"""Vocabularies that are ranks of byte strings: Meta's tokenizer.model (tiktoken's text) and Mistral's tekken.json.

Neither has merges: tiktoken joins the two neighbours whose joined bytes have the lowest rank. `tokenizers` gets the
same ids from a merge for every split of a token into two tokens, in the order of the token's rank, as transformers'
converters make them. A word that is a token as a whole is not merged.

- Meta's file has no names of special tokens: they and the pattern are those of llama-models. The released
  tokenizer.json of Llama 3.0 and 3.1 has the same names, except for reserved ones (128005 is <|step_id|>, 128011
  <|image|>). Names in tokenizer_config.json (added_tokens_decoder) replace them. Only Llama 3's file is known, by its
  size.
- tekken.json: the first `default_num_special_tokens` ids are the special tokens, the ranks follow. Tokens beyond
  `default_vocab_size` are dropped. Files up to version 7 without `special_tokens` have mistral-common's names.
- Special tokens are matched in the text, as transformers does, and BOS is added, as in the released tokenizer.json.

Source: models/llama3/tokenizer.py of llama-models 0.3;
tokens/tokenizers/tekken.py of mistral-common 1.13; TikTokenConverter of transformers 5.23.
"""

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ligermodels.checkpoint.gguf.tokenizer import LLAMA_3_PATTERN, special_tokens_around
from ligermodels.errors import TokenizerError
from ligermodels.text.files import Converted, TokenizerFiles, read_bytes, read_text


def _reserved(numbers: Iterable[int]) -> tuple[str, ...]:
    return tuple(f"<|reserved_special_token_{number}|>" for number in numbers)


_LLAMA_3_SPECIAL = (
    "<|begin_of_text|>", "<|end_of_text|>", *_reserved(range(2)), "<|finetune_right_pad_id|>", "<|step_id|>",
    "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|image|>",
    *_reserved(range(2, 246)),
)  # fmt: skip
_TEKKEN_SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip


class Ranks(NamedTuple):
    """A vocabulary. tokens: by rank. special: the special tokens, with the ids before or after those of `tokens`.

    named: {"bos_token": "<s>", ...}. stops: the special tokens that end a text or a turn.
    """

    tokens: Sequence[bytes]
    pattern: str
    special: Sequence[str]
    special_first: bool
    named: Mapping[str, str]
    stops: tuple[str, ...] = ()


LLAMA_3_SIZE = 128000
"""The number of tokens of Llama 3's tiktoken file."""


def is_tiktoken(data: bytes) -> bool:
    """Whether the first line is a base64 token and its rank."""
    return re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n", data) is not None


def convert(path: Path, files: TokenizerFiles) -> Converted:
    """Raises TokenizerError for a damaged file, or one of another model."""
    ranks = _read_tekken(path) if path.suffix == ".json" else _read_tiktoken(path)
    first = 0 if ranks.special_first else len(ranks.tokens)
    declared = {token.id: token.content for token in files.added}
    names = {token: declared.get(index, token) for index, token in enumerate(ranks.special, first)}
    special = [names[token] for token in ranks.special]
    named = {name: names[token] for name, token in ranks.named.items()}
    native = _build(ranks._replace(special=special, named=named), path)
    return Converted(native, named, tuple(names[token] for token in ranks.stops))


def _read_tiktoken(path: Path) -> Ranks:
    try:
        pairs = [line.split() for line in read_bytes(path).splitlines() if line]
        tokens = tuple(base64.b64decode(token, validate=True) for token, _ in pairs)
        ranks = [int(rank) for _, rank in pairs]
    except ValueError as error:
        raise TokenizerError(
            f"{path} is not a tiktoken file, a base64 token and its rank in each line ({error}). Likely cause: a "
            "truncated download."
        ) from error
    if ranks != list(range(len(ranks))) or len(tokens) != LLAMA_3_SIZE:
        raise TokenizerError(
            f"{path} is a tiktoken file of {len(tokens)} tokens; only Llama 3's (128000) is read, for such a file does "
            "not say its special tokens. Next step: if it is Llama 3's, download it again; else take tokenizer.json "
            "from the Hugging Face version of this checkpoint."
        )
    begin, end = _LLAMA_3_SPECIAL[:2]
    named = {"bos_token": begin, "eos_token": end, "pad_token": "<|finetune_right_pad_id|>"}
    return Ranks(tokens, LLAMA_3_PATTERN, _LLAMA_3_SPECIAL, False, named, (end, "<|eom_id|>", "<|eot_id|>"))


def _read_tekken(path: Path) -> Ranks:
    try:
        content = json.loads(read_text(path))
        config, declared = content["config"], content.get("special_tokens")
        count, size = int(config["default_num_special_tokens"]), int(config["default_vocab_size"])
        if declared is None and int(str(config["version"]).removeprefix("v")) > 7:
            raise ValueError("a file of version 8 or later without special_tokens")
        entries = content["vocab"][: size - count]
        special = _TEKKEN_SPECIAL
        if declared is not None:
            ordered = sorted(declared, key=lambda token: token["rank"])
            special = tuple(token["token_str"] for token in ordered)
            if [token["rank"] for token in ordered] != list(range(len(special))):
                raise ValueError("the ranks of special_tokens are not 0, 1, 2, ...")
        if [entry["rank"] for entry in entries] != list(range(size - count)) or len(special) > count:
            raise ValueError(f"vocab and special_tokens are not those of a default_vocab_size of {size}")
        if "<s>" not in special:
            raise ValueError("special_tokens has no <s>")
        named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
        return Ranks(
            tokens=[base64.b64decode(entry["token_bytes"], validate=True) for entry in entries],
            pattern=config["pattern"],
            special=[*special, *(f"<SPECIAL_{number}>" for number in range(len(special), count))],
            special_first=True,
            named={name: token for name, token in named.items() if token in special},
        )
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"{path} is not a tekken.json that is read here ({type(error).__name__}: {str(error)[:200]}). Likely "
            "cause: a truncated download, or a newer kind of file."
        ) from error


def _build(ranks: Ranks, path: Path) -> Any:
    """The `tokenizers.Tokenizer`."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    tokens, special = list(map(_spelled, ranks.tokens)), list(ranks.special)
    every = [*special, *tokens] if ranks.special_first else [*tokens, *special]
    vocab = {token: index for index, token in enumerate(every)}
    if not set(tokens) >= set(_ALPHABET.values()) or len(vocab) != len(every):
        raise TokenizerError(
            f"{path} lacks one of the 256 bytes, or has a token twice. Likely cause: a damaged or edited file."
        )
    model_vocab = vocab if ranks.special_first else {token: vocab[token] for token in tokens}
    merges = _merges({token: vocab[token] for token in tokens})
    native = tokenizers.Tokenizer(models.BPE(model_vocab, merges, ignore_merges=True))
    try:
        split = pre_tokenizers.Split(tokenizers.Regex(ranks.pattern), "isolated")
    except Exception as error:
        raise TokenizerError(f"{path}: the pattern that splits a text cannot be read: {error}.") from error
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    native.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    native.decoder = decoders.ByteLevel()
    native.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in special])
    bos = ranks.named["bos_token"]
    template = special_tokens_around({"bos": (bos, vocab[bos])})
    native.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return native


def _merges(vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every split of each token into two tokens, in the order of the tokens; see the module."""
    merges: list[tuple[str, str]] = []
    for token in vocab:
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [pair for pair in splits if pair[0] in vocab and pair[1] in vocab]
        merges += sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    return merges


def _spelled(token: bytes) -> str:
    """The token in the byte-level alphabet of GPT-2, which spells each byte as a visible character."""
    return token.decode("latin-1").translate(_ALPHABET)


_VISIBLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]
_ALPHABET = {byte: chr(byte) for byte in _VISIBLE} | {byte: chr(256 + at) for at, byte in enumerate(_HIDDEN)}
