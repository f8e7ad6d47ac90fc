"""tokenizer.model folders against SentencePiece itself."""

import random
import re
import shutil
import struct

import pytest
import sentencepiece

from ligermodels.checkpoint.gguf.tokenizer import _field
from ligermodels.text import Tokenizer
from tests.text import folders

# Texts with special tokens at the beginning, in a row, and with and without white space beside them.
MIXED = (
    "<s>the cat",
    "<s> the cat",
    "the cat </s> the dog",
    "the cat</s>the dog</s></s>",
    "<s>[INST] the cat [/INST] the dog </s><s>[INST] more [/INST]",
    "</s>\nthe cat",
    "x<unk>y",
)
SQUEEZING = {"remove_extra_whitespaces": True, "normalization_rule_name": "nmt_nfkc"}
NO_BYTES = {"byte_fallback": False}
UNIGRAM = {"model_type": "unigram", "vocab_size": 400}


@pytest.mark.parametrize("options", [{}, SQUEEZING, {"add_dummy_prefix": False}, NO_BYTES, UNIGRAM], ids=str)
def test_plain_text_is_sentencepiece_itself(tmp_path, options):
    """With no other file in the folder."""
    (tmp_path / "tokenizer.model").write_bytes(model := folders.sentencepiece_model(**options))
    native, tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model), Tokenizer.from_folder(tmp_path)
    for text in (*folders.TEXTS, "  the   cat  ", "ﬁne"):
        if options is UNIGRAM and "<0x41>" in text:
            continue  # the model of `tokenizers` finds byte pieces in a text
        assert tokenizer.encode(text) == [1, *native.encode(text)], text
        if options not in (SQUEEZING, NO_BYTES):
            assert tokenizer.decode(tokenizer.encode(text), True) == text.replace("▁", " ")


def test_runs_of_spaces_have_equal_scores(tmp_path):
    """As in Llama 2 and Mistral: the left run grows."""
    model = folders.sentencepiece_model()
    for count in (2, 3, 4, 7, 8):
        piece = _field(1, ("▁" * count).encode()) + b"\x15" + struct.pack("<f", -1e9) + _field(3, 1)
        model += _field(1, piece)  # protobuf takes in what is appended
    (tmp_path / "tokenizer.model").write_bytes(model)
    native, tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model), Tokenizer.from_folder(tmp_path)
    for count in range(1, 30):
        text = f"the{' ' * count}cat"
        assert tokenizer.encode(text, add_special_tokens=False) == native.encode(text), count


@pytest.mark.parametrize("legacy", [False, True])
def test_the_dummy_prefix_between_special_tokens(sentencepiece_folder, legacy):
    model = folders.sentencepiece_model()  # protobuf merges in the field that is appended: add_dummy_prefix false
    models = (model, model + b"\x1a\x02\x18\x00")
    with_prefix, without = (sentencepiece.SentencePieceProcessor(model_proto=proto) for proto in models)
    tokenizer = Tokenizer.from_folder(sentencepiece_folder(legacy=legacy))
    for text in MIXED:
        expected = []
        for at, part in enumerate(re.split("(<s>|</s>|<unk>)", text)):
            native = with_prefix if at == 0 or legacy else without
            expected += [native.piece_to_id(part)] if at % 2 else native.encode(part)
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text


@pytest.mark.parametrize("file", ["tokenizer.model", "tokenizer.json"])
def test_broken_bytes_decode_as_in_sentencepiece(folder_of, tmp_path, file):
    shutil.copytree(folder_of("llama 2"), tmp_path / "folder")
    native = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "folder" / "tokenizer.model"))
    (tmp_path / "folder" / ("tokenizer.json" if file == "tokenizer.model" else "tokenizer.model")).unlink()
    tokenizer = Tokenizer.from_folder(tmp_path / "folder")
    first = native.piece_to_id("<0x00>")
    lead = [0x41, 0xC3, 0xE4, 0xF0, 0xED, 0xF4, 0x80, 0xA0, 0xBD, 0x9F, 0xA9, 0xFF]
    generator, broken = random.Random(0), 0
    for _ in range(300):
        ids = [
            first + generator.choice(lead) if generator.random() < 0.7 else generator.randrange(first + 256, 420)
            for _ in range(generator.randrange(10))
        ]
        text = native.decode(ids)
        assert tokenizer.decode(ids, True) == text, ids
        broken += "\ufffd" in text
    assert broken > 150


@pytest.mark.parametrize(
    ("config", "text", "tokens"),
    [
        ({}, "the", ["<s>", "▁the"]),
        ({"add_bos_token": False, "add_eos_token": True}, "the", ["▁the", "</s>"]),
        ({"add_prefix_space": False, "add_bos_token": False}, " the", ["▁the"]),
        ({"bos_token": None}, "the", ["▁the"]),
        ({"bos_token": "</s>"}, "the", ["</s>", "▁the"]),
    ],
)
def test_settings(sentencepiece_folder, config, text, tokens):
    tokenizer = Tokenizer.from_folder(sentencepiece_folder(**config))
    ids = tokenizer.encode(text)
    assert tokenizer.convert_ids_to_tokens(ids) == tokens
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_control_and_user_defined_pieces(tmp_path):
    """In the one file of a folder as Mistral's, which names the special tokens."""
    model = folders.sentencepiece_model(
        control_symbols=["[INST]", "[/INST]"], user_defined_symbols=["<tool>", "∑", "cat▁s"]
    )
    (tmp_path / "tokenizer.model.v3").write_bytes(model)
    native, tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model), Tokenizer.from_folder(tmp_path)
    named = (tokenizer.bos_token, tokenizer.eos_token_ids, tokenizer.unk_token, tokenizer.pad_token)
    assert named == ("<s>", (2,), "<unk>", None)
    ids = tokenizer.encode("[INST] the cat[/INST]")
    assert ids == [1, native.piece_to_id("[INST]"), *native.encode("the cat"), native.piece_to_id("[/INST]")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the cat"
    assert tokenizer.decode(ids) == "<s>[INST] the cat[/INST]"
    # User-defined pieces are text. sentencepiece writes the dummy prefix before one that begins the text.
    for text in ("<tool> the ∑x", "the<tool>", "the cat sat"):
        prefix = [native.piece_to_id("▁")] if text.startswith("<") else []
        assert prefix + tokenizer.encode(text, False) == native.encode(text)
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
