"""Writes a tokenizer as GGUF metadata: tokens, their types, scores or merges, special ids and chat templates.

There are three kinds: pieces with scores (sentencepiece's BPE, from tokenizer.model or the merges of tokenizer.json),
for Gemma 4 such pieces with the merges of tokenizer.json, and byte-level tokens with merges, if llama.cpp has a name
for their pre-tokenizer. Other tokenizers are refused.
There is a token for each row of the embedding; a row without one is named [PAD<row>].
"""

import dataclasses
import json
import re
import struct
import tempfile
import warnings
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ligermodels.checkpoint import saving
from ligermodels.checkpoint.gguf.tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    PHI3_TOKENS,
    PRE_TOKENIZERS,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    protobuf_fields,
)
from ligermodels.errors import CheckpointError, TokenizerError

_ADDED_SCORE = -1000.0
_VISIBLE = {"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'}
"""Special tokens of Gemma 4 that llama.cpp types as user-defined, so that its parser of chats sees them."""


@dataclass(frozen=True)
class _Piece:
    text: str
    score: float = 0.0
    type: int = NORMAL


def add_tokenizer(
    writer: Any, files: Mapping[str, bytes | Path], open_folder: Callable[[Path], Any], rows: int, where: str
) -> bool:
    """Adds tokens, special ids and chat templates to a GGUFWriter.

    files: of a Hugging Face folder. open_folder: makes the Tokenizer of a folder. rows: of the embedding.
    Returns whether special tokens strip the white space after them, as in Phi-3.
    Raises CheckpointError, TokenizerError.
    """
    if not files.keys() & {"tokenizer.json", "tokenizer.model"}:
        tiktoken = "original/tokenizer.model" in files
        raise CheckpointError(
            f"{where} has {'only a tiktoken file' if tiktoken else 'no tokenizer.json and no tokenizer.model'}: "
            "llama.cpp finds its tokens in the GGUF file.\n"
            "  Next: put the tokenizer's files of the checkpoint's Hugging Face repository beside the weights."
        )
    with tempfile.TemporaryDirectory() as folder:
        saving.finish(Path(folder), files)
        try:
            tokenizer = open_folder(Path(folder))
            strips = _add_tokens(writer, tokenizer, rows, where)
        except TokenizerError as error:
            raise TokenizerError(str(error).replace(folder, where)) from error
        except (AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
            raise TokenizerError(
                f"{where}: its tokenizer's files have an unknown structure: {type(error).__name__}: {error}.\n"
                "  Likely: damaged or edited; fetch it again."
            ) from error
    ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    for kind in ("unk", "pad"):
        token = tokenizer.files.named.get(f"{kind}_token")
        ids[kind] = tokenizer.token_to_id(token) if token else None
    ids["pad"] = tokenizer.files.pad_token_id if ids["pad"] is None else ids["pad"]
    stops = [index for index in tokenizer.chat_stop_ids if index != ids["eos"]]
    ids |= dict(zip(("eot", "eom"), reversed(stops), strict=False))
    if len(stops) > 2:
        warnings.warn(f"{where}: GGUF has places for three stop ids; {stops[:-2]} are dropped.", stacklevel=5)
    for kind, index in ids.items():
        if index is not None and index < rows:
            getattr(writer, f"add_{kind}_token_id")(index)
    around = tokenizer.encode("a")
    if writer.arch == "gemma4" and around[:1] != [tokenizer.bos_token_id]:
        warnings.warn(f"{where}: llama.cpp adds BOS to every text of a Gemma 4; this tokenizer does not.", stacklevel=5)
    writer.add_add_bos_token(around[:1] == [tokenizer.bos_token_id])
    writer.add_add_eos_token(around[-1:] == [tokenizer.eos_token_id])
    if templates := tokenizer.files.templates:
        writer.add_chat_template([{"name": name, "template": text} for name, text in templates.items()])
    return strips


def _add_tokens(writer: Any, tokenizer: Any, rows: int, where: str) -> bool:
    """Adds pieces and scores, or byte-level tokens and merges. Returns the same as `add_tokenizer`."""
    json_path, model_path = tokenizer.files.path("tokenizer.json"), tokenizer.files.path("tokenizer.model")
    state = json.loads(json_path.read_bytes()) if json_path else {}
    flags = [*(state.get("added_tokens") or ()), *map(dataclasses.asdict, tokenizer.files.added)]
    added = {token["id"] for token in flags}
    model = state.get("model") or {}
    data = model_path.read_bytes() if model_path else b""
    pieces: dict[int, _Piece] | None = None
    with_merges = writer.arch == "gemma4"
    if with_merges and model.get("type") == "BPE" and model.get("byte_fallback"):
        pieces = {index: _Piece(text, _ADDED_SCORE, _type(text, model)) for text, index in model["vocab"].items()}
    elif with_merges:
        raise TokenizerError(
            f"{where}: llama.cpp reads a Gemma 4 with merges and bytes alone, as its tokenizer.json has"
        )
    elif data.startswith(b"\n"):  # a protobuf; tiktoken's file of the same name is text
        pieces = sentencepiece_pieces(data)
    elif model.get("type") == "BPE" and model.get("byte_fallback"):
        pieces = _from_merges(model, added)
    elif model.get("type") != "BPE":
        raise TokenizerError(f"{where}: llama.cpp does not support a tokenizer of type {model.get('type')!r}")
    normalizers = _normalizers(state.get("normalizer"))
    if odd := normalizers - {"NFC", "Prepend", "Replace"}:
        raise TokenizerError(f"{where}: llama.cpp does not compute the normalizer {', '.join(odd)} of tokenizer.json")
    if "NFC" in normalizers:
        warnings.warn(
            f"{where}: llama.cpp ignores the NFC of tokenizer.json: decomposed characters get other ids.",
            stacklevel=6,
        )
    if tokenizer.vocab_size > rows:
        warnings.warn(
            f"{where}: tokens {rows} to {tokenizer.vocab_size - 1} are dropped: the embedding has no rows for them.",
            stacklevel=6,
        )
    special, text_of = tokenizer.backend.special_ids, tokenizer.backend.id_to_token
    if with_merges:
        special = {index for index in special if text_of(index) not in _VISIBLE}
        added = {index for index in added if SPACE not in (text_of(index) or "")}  # runs of spaces, which merges make
    tokens = [_token(index, text_of(index), pieces, special, added) for index in range(rows)]
    ids: dict[str, int] = {}
    for index, piece in enumerate(tokens):
        if ids.setdefault(piece.text, index) != index:
            both = f"{ids[piece.text]} and {index}"
            raise TokenizerError(f"{where}: {both} are both {piece.text[:80]!r}, which llama.cpp cannot distinguish")
    if (pieces is None or with_merges) and not model["merges"]:  # the gguf package drops an empty list
        raise TokenizerError(f"{where}: tokenizer.json has no merges, and llama.cpp reads no file without merges")
    writer.add_tokenizer_model("gpt2" if pieces is None else "gemma4" if with_merges else "llama")
    if not with_merges:
        writer.add_tokenizer_pre(_pre_tokenizer(state, where) if pieces is None else "default")
    writer.add_token_list([piece.text.encode() for piece in tokens])
    writer.add_token_types([piece.type for piece in tokens])
    if pieces is None or with_merges:
        writer.add_token_merges([" ".join(_pair(merge)) for merge in model["merges"]])
    if pieces is None:
        return False
    writer.add_token_scores([float(piece.score) for piece in tokens])
    starts = [tokenizer.backend.id_to_token(index) or "" for index in tokenizer.encode("a", add_special_tokens=False)]
    writer.add_add_space_prefix("".join(starts).startswith(SPACE))
    return any(token["special"] and token["rstrip"] for token in flags) and ids.keys() >= PHI3_TOKENS


def _token(
    index: int, text: str | None, pieces: Mapping[int, _Piece] | None, special: Container[int], added: Container[int]
) -> _Piece:
    """The token of a row. pieces: sentencepiece's, None for byte-level tokens. special, added: ids of such tokens."""
    if text is None:
        return _Piece(f"[PAD{index}]", _ADDED_SCORE, UNUSED)
    piece = pieces.get(index) if pieces is not None else None
    if piece is None or piece.text != text:
        kind = USER_DEFINED if pieces is not None or index in added else NORMAL
        piece = _Piece(text, _ADDED_SCORE, CONTROL if index in special else kind)
    elif piece.type in (NORMAL, USER_DEFINED) and (index in special or index in added):
        piece = _Piece(text, _ADDED_SCORE, CONTROL if index in special else USER_DEFINED)
    if pieces is not None and piece.type == USER_DEFINED:  # llama.cpp finds it in the text before it replaces spaces
        piece = _Piece(piece.text.replace(SPACE, " "), piece.score, piece.type)
    return piece


def sentencepiece_pieces(data: bytes) -> dict[int, _Piece]:
    """The pieces of a tokenizer.model, a protobuf; sentencepiece's own API lacks the type USER_DEFINED."""
    pieces: dict[int, _Piece] = {}
    for number, value in protobuf_fields(data):
        if number == 1:
            fields = dict(protobuf_fields(value))
            score = struct.unpack("<f", fields.get(2, bytes(4)))[0]
            pieces[len(pieces)] = _Piece(fields[1].decode(), score, fields.get(3, NORMAL))
        elif number == 2 and dict(protobuf_fields(value)).get(3, 1) != 2:
            raise TokenizerError("tokenizer.model is not of sentencepiece's BPE, which alone llama.cpp computes")
        elif number == 3 and dict(protobuf_fields(value)).get(4, 1):
            warnings.warn("tokenizer.model merges runs of spaces, which llama.cpp does not", stacklevel=7)
    return pieces


def _from_merges(model: Mapping[str, Any], added: set[int]) -> dict[int, _Piece]:
    """The pieces of a sentencepiece model of which only tokenizer.json is there.

    Its merges are all pairs that make each piece, in the order of the pieces' scores. So the rank of a piece's first
    pair gives a score with the same order. Raises TokenizerError for merges of another kind.
    """
    vocab, merges = model["vocab"], [_pair(merge) for merge in model["merges"]]
    ranks: dict[str, int] = {}
    for rank, (first, second) in enumerate(merges):
        ranks.setdefault(first + second, rank)
    pairs = set(merges)
    for text in ranks:
        cuts = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        lost = next((cut for cut in cuts if cut not in pairs and cut[0] in vocab and cut[1] in vocab), None)
        if lost and not {vocab[part] for part in lost} & added:
            raise TokenizerError(
                f"tokenizer.json merges {text[:80]!r}, but not from {lost[0][:80]!r} and {lost[1][:80]!r}: its merges "
                "are not those of a sentencepiece model, and llama.cpp would split texts differently.\n"
                "  Next: put the tokenizer.model that it was made from beside it."
            )
    return {i: _Piece(text, -float(ranks.get(text, len(merges))), _type(text, model)) for text, i in vocab.items()}


def _type(text: str, model: Mapping[str, Any]) -> int:
    """The type of a token of tokenizer.json with bytes."""
    if re.fullmatch("<0x[0-9A-F]{2}>", text):
        return BYTE
    return UNKNOWN if text == model.get("unk_token") else NORMAL


def _normalizers(state: Mapping[str, Any] | None) -> set[str]:
    """The types of the steps of a normalizer."""
    if state is None:
        return set()
    steps = state.get("normalizers")
    return {state["type"]} if steps is None else set().union(*map(_normalizers, steps))


def _pair(merge: Any) -> tuple[str, str]:
    """A merge, which older files write as one string."""
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first, second


def _pre_tokenizer(state: Mapping[str, Any], where: str) -> str:
    """llama.cpp's name for the pre-tokenizer of a tokenizer.json. Raises TokenizerError."""
    steps = state.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers") or [steps]
    cuts = []
    for step in steps:
        pattern = step.get("pattern") or {}
        cuts += [pattern.get("Regex") or str(pattern)] * (step.get("type") == "Split")
        cuts += ["Digits"] * (step.get("type") == "Digits" and bool(step.get("individual_digits")))
        cuts += ["ByteLevel"] * (step.get("type") == "ByteLevel" and bool(step.get("use_regex", True)))
    known = all(step.get("type") in ("Split", "Digits", "ByteLevel") for step in steps)
    byte_level = any(step.get("type") == "ByteLevel" and not step.get("add_prefix_space") for step in steps)
    name = PRE_TOKENIZERS.get((" ".join(cuts), bool(state["model"].get("ignore_merges"))))
    if name is None or not known or not byte_level:
        raise TokenizerError(
            f"{where}: llama.cpp has no name for the pre-tokenizer of tokenizer.json: "
            f"{' '.join(cuts)[:200] or steps!r}.\n  Likely: a tokenizer of another family than those of the zoo."
        )
    return name
