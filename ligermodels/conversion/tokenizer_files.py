"""Meta's and Mistral's own tokenizers as the files that transformers reads.

tokenizer.json is made from tiktoken's and tekken's ranks, and from sentencepiece's BPE beside its tokenizer.model.
transformers 5.23 reads a tokenizer.model only if protobuf is installed, orders merges by id where sentencepiece orders
them by score (runs of spaces), and drops the dummy prefix for `mistral`. The ids are those of sentencepiece, except for
a text that begins with a user-defined piece ([REF] of Mistral's v7), which gets no dummy prefix. A sentencepiece model
that normalises text, or is not BPE, stays a tokenizer.model alone.
"""

import json
from pathlib import Path
from typing import Any

from ligermodels.checkpoint.gguf.tokenizer import NORMAL, USER_DEFINED
from ligermodels.checkpoint.gguf.vocabulary import sentencepiece_pieces
from ligermodels.errors import TokenizerError
from ligermodels.text import saving
from ligermodels.text.files import call_settings, read_bytes, read_files
from ligermodels.text.loading import open_backend
from ligermodels.text.sentencepiece_backend import SPACE, SentencePieceBackend

_NORMALISED = "ﬁ①\u00a0\u3000\u200b Å\t "
"""Characters that each of sentencepiece's normalisations changes."""


def hugging_face_files(folder: Path, rows: int) -> dict[str, bytes]:
    """{name: bytes}; {} for a folder without a tokenizer, or with a tokenizer.json. rows: of the model's embedding.

    generation_config.json is among them if Meta's code stops at other ids than the end of a text.
    Raises TokenizerError.
    """
    files = read_files(folder)
    if files.vocabulary is None or files.vocabulary.name == "tokenizer.json":
        return {}
    backend = open_backend(files)
    if backend.base_vocab_size > rows:
        raise TokenizerError(
            f"{files.vocabulary} has {backend.base_vocab_size} ids, the model's embedding {rows} rows. Likely cause: "
            "the tokenizer of another checkpoint."
        )
    complete = backend.complete(files)
    found = saving.contents(complete, complete, backend, call_settings(files.config, folder))
    if backend.stop_ids and not files.eos_token_ids:
        ids = {"bos_token_id": backend.token_to_id(backend.named["bos_token"]), "eos_token_id": [*backend.stop_ids]}
        found["generation_config.json"] = (json.dumps(ids, indent=2) + "\n").encode()
    if isinstance(backend, SentencePieceBackend) and not files.added and (native := _from_sentencepiece(backend)):
        config = {**json.loads(found["tokenizer_config.json"]), "tokenizer_class": "PreTrainedTokenizerFast"}
        found["tokenizer_config.json"] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
        found["tokenizer.json"] = native.to_str(pretty=True).encode()
    return found


def _from_sentencepiece(backend: SentencePieceBackend) -> Any:
    """The `tokenizers.Tokenizer` with the ids of `backend`; None if there is none."""
    import sentencepiece
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    data = read_bytes(backend.path)
    native = sentencepiece.SentencePieceProcessor(model_proto=data)
    normalised = native.normalize(_NORMALISED)
    if not normalised.endswith(_NORMALISED.replace(" ", SPACE)):
        return None
    try:
        pieces = sentencepiece_pieces(data)
    except TokenizerError:  # not BPE
        return None
    normal = {piece.text: piece.score for piece in pieces.values() if piece.type == NORMAL}
    splits = [
        (token[:at], token[at:])
        for token in normal
        for at in range(1, len(token))
        if token[:at] in normal and token[at:] in normal
    ]
    # Among equal scores (runs of spaces) sentencepiece merges the leftmost pair, so the left run grows.
    splits.sort(key=lambda pair: (-normal[pair[0] + pair[1]], -len(pair[0])))
    unk, bos = backend.named["unk_token"], backend.named.get("bos_token")
    made = tokenizers.Tokenizer(
        models.BPE(
            {piece.text: index for index, piece in pieces.items()},
            splits,
            unk_token=unk,
            fuse_unk=True,
            byte_fallback=native.is_byte(native.piece_to_id("<0x00>")),
        )
    )
    made.normalizer = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if normalised.startswith(SPACE):
        # "first" prepends nothing to a text that begins with the given character: so it is a space, not U+2581.
        first = pre_tokenizers.Metaspace(" ", prepend_scheme="first", split=False)
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [first, pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=False)]
        )
        steps.append(decoders.Strip(" ", 1, 0))
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens([tokenizers.AddedToken(t.content, normalized=False) for t in backend.added.values()])
    own = [piece.text for piece in pieces.values() if piece.type == USER_DEFINED]
    made.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in own])
    if bos is not None:
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return made
