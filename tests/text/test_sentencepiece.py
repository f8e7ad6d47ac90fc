"""tokenizer.model folders against SentencePiece itself and transformers' tokenizer around it."""

import random
import shutil

import pytest
import sentencepiece
from transformers import AddedToken

from ligermodels.text import Tokenizer
from tests.text import folders, transformers_sentencepiece

# Texts with special tokens at the beginning, in a row, and with and without white space beside them.
MIXED = (
    "<s>the cat",
    "<s> the cat",
    "the cat</s>",
    "the cat </s> the dog",
    "the cat</s>the dog</s></s>",
    "<s>[INST] the cat [/INST] the dog </s><s>[INST] more [/INST]",
    "</s>\nthe cat",
    "x<unk>y",
)


@pytest.fixture
def slow(monkeypatch, tmp_path):
    """make(model, legacy, added): transformers' tokenizer around the SentencePiece library itself."""

    def make(model, legacy, added=()):
        (tmp_path / "slow.model").write_bytes(model)
        return transformers_sentencepiece.slow(monkeypatch, tmp_path / "slow.model", legacy, added)

    return make


def test_plain_text_is_sentencepiece_itself(tmp_path, sentencepiece_model):
    """With no other file in the folder."""
    native = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model)
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model)
    tokenizer = Tokenizer.from_folder(tmp_path)
    for text in folders.TEXTS:
        assert tokenizer.encode(text) == [1, *native.encode(text)]
        assert tokenizer.encode(text, add_special_tokens=False) == native.encode(text)
        assert tokenizer.decode(tokenizer.encode(text), True) == text.replace("▁", " ")


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


SQUEEZING = dict(remove_extra_whitespaces=True, normalization_rule_name="nmt_nfkc")


@pytest.mark.parametrize(("legacy", "options"), [(False, {}), (True, {}), (False, SQUEEZING)])
def test_texts_between_special_tokens_agree_with_the_slow_tokenizer(sentencepiece_folder, slow, legacy, options):
    """After a special token only: the generic slow class puts no prefix at the beginning of a text."""
    model = folders.sentencepiece_model(**options)
    tokenizer, oracle = Tokenizer.from_folder(sentencepiece_folder(model, legacy=legacy)), slow(model, legacy)
    for text in (*MIXED[: 6 if options else None], "  the   cat  </s>  the   dog  ", "ﬁ</s> ﬁ"):
        text = f"<s>{text}"
        assert tokenizer.encode(text, add_special_tokens=False) == oracle.encode(text, add_special_tokens=False), text


def test_prefix_space_and_flags(sentencepiece_folder, tmp_path):
    gemma = folders.sentencepiece_model(add_dummy_prefix=False)
    for folder in (
        sentencepiece_folder(add_prefix_space=False),
        folders.sentencepiece_folder(tmp_path / "gemma", gemma),
    ):
        tokenizer = Tokenizer.from_folder(folder)
        assert "".join(tokenizer.convert_ids_to_tokens(tokenizer.encode("the cat", False))) == "the▁cat"
        assert tokenizer.decode(tokenizer.encode(" the"), True) == " the"
    for config, first, last in (({}, True, False), ({"add_bos_token": False, "add_eos_token": True}, False, True)):
        ids = Tokenizer.from_folder(sentencepiece_folder(**config)).encode("the")
        assert (ids[0] == 1, ids[-1] == 2) == (first, last)


@pytest.fixture
def mistral(tmp_path):
    """(a folder that holds only a tokenizer.model as Mistral's, with control and user-defined pieces; its model)."""
    model = folders.sentencepiece_model(control_symbols=["[INST]", "[/INST]"], user_defined_symbols=["<tool>", "∑"])
    (tmp_path / "tokenizer.model.v3").write_bytes(model)
    return tmp_path, sentencepiece.SentencePieceProcessor(model_proto=model)


def test_control_pieces_are_special_tokens(mistral):
    folder, native = mistral
    tokenizer = Tokenizer.from_folder(folder)
    begin, end = native.piece_to_id("[INST]"), native.piece_to_id("[/INST]")
    ids = tokenizer.encode("[INST] the cat[/INST]")
    assert ids == [1, begin, *native.encode("the cat"), end]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the cat"
    assert tokenizer.decode(ids) == "<s>[INST] the cat[/INST]"
    for text in ("<s>[INST]the", "<s>the"):
        assert tokenizer.encode(text) == tokenizer.encode(text, add_special_tokens=False)
    # User-defined pieces are text. sentencepiece writes the dummy prefix before one that begins the text.
    for text in ("<tool> the ∑x", "the<tool>"):
        prefix = [native.piece_to_id("▁")] if text.startswith("<") else []
        assert prefix + tokenizer.encode(text, False) == native.encode(text)
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_the_file_names_its_special_tokens(mistral):
    folder, native = mistral
    tokenizer = Tokenizer.from_folder(folder)
    named = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token, tokenizer.pad_token)
    assert named == ("<s>", "</s>", "<unk>", None)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.unk_token_id) == (1, (2,), 0)
    # What a config says counts, null included.
    folders.write(folder, "tokenizer_config.json", {"eos_token": "[/INST]", "bos_token": None, "unk_token": None})
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == (None, "[/INST]", None)
    assert tokenizer.encode("the") == native.encode("the")


def tokens(base: int, *contents: tuple[str, dict]) -> dict[str, dict]:
    return {str(base + at): folders.added(content, **flags) for at, (content, flags) in enumerate(contents)}


def test_added_tokens_and_their_flags(sentencepiece_folder, sentencepiece_model, slow):
    size = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model).get_piece_size()
    decoder = tokens(
        size,
        ("<|user|>", {"rstrip": True}),
        ("<|end|>", {"lstrip": True}),
        ("<|both|>", {"lstrip": True, "rstrip": True}),
        ("<|user|>x", {}),
        ("the mat", {"special": False}),
    )
    tokenizer = Tokenizer.from_folder(sentencepiece_folder(added_tokens_decoder=decoder, legacy=False))
    added = {int(i): AddedToken(**token) for i, token in decoder.items()}
    oracle = slow(sentencepiece_model, False, added)
    assert tokenizer.vocab_size == size + 5
    for text in (
        "<|user|>\n the cat <|end|>\n<|both|>  x",
        "<|user|>xy <|user|> xy",
        "sat on the mat and the mats",
    ):
        text = f"<s>{text}"
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == oracle.encode(text, add_special_tokens=False), text
    ids = tokenizer.encode("<|user|> the mat<|end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the mat"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s><|user|>the mat<|end|>"


def test_single_word_and_normalized_flags(tmp_path):
    model = folders.sentencepiece_model(normalization_rule_name="nmt_nfkc")
    size = sentencepiece.SentencePieceProcessor(model_proto=model).get_piece_size()
    decoder = tokens(
        size,
        ("fin", {"single_word": True}),
        ("ofﬁce", {"normalized": True}),
        ("raﬀ", {"normalized": False}),
    )
    folder = folders.sentencepiece_folder(tmp_path, model, added_tokens_decoder=decoder)
    tokenizer = Tokenizer.from_folder(folder)

    def found(text):
        return [index - size for index in tokenizer.encode(text) if index >= size]

    assert found("fin. finish, a fin") == [0, 0]
    assert found("office ofﬁce") == [1, 1]
    assert found("raff raﬀ") == [2]
