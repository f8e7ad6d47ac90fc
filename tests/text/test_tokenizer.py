"""tokenizer.json folders against transformers, and what every tokenizer promises."""

import json
import random
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from ligermodels.errors import InputError, TokenizerError
from ligermodels.text import Tokenizer
from tests.text import folders

KINDS = {
    "llama 3": folders.byte_level,
    "llama 2": folders.byte_fallback,
    "llama 2 saved again": lambda folder: folders.byte_fallback(folder, legacy=False),
    "gemma": lambda folder: folders.byte_fallback(folder, prefix=False),
}


@pytest.fixture(scope="module", params=list(KINDS))
def pair(request, tmp_path_factory):
    """(ours, transformers') of one folder."""
    folder = KINDS[request.param](tmp_path_factory.mktemp("pair"))
    return Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)


def test_any_ids_decode_as_in_transformers(pair):
    ours, theirs = pair
    generator = random.Random(0)
    for _ in range(300):
        ids = [generator.randrange(ours.vocab_size + 3) for _ in range(generator.randrange(10))]
        for skip in (False, True):
            text = theirs.decode(ids, skip_special_tokens=skip)
            # Broken runs of byte tokens follow SentencePiece: test_sentencepiece.py.
            if ours.token_to_id("<0x00>") is None or "\ufffd" not in text:
                assert ours.decode(ids, skip) == text, ids


def test_ids_and_sizes_agree_with_transformers(pair):
    ours, theirs = pair
    assert ours.vocab_size == len(theirs)
    assert ours.bos_token_id == theirs.bos_token_id is not None
    assert ours.eos_token_id == theirs.eos_token_id is not None
    assert ours.backend.special_ids == set(theirs.all_special_ids) | {
        index for index, token in theirs.added_tokens_decoder.items() if token.special
    }
    for token, index in theirs.get_vocab().items():
        assert ours.token_to_id(token) == index
        assert ours.backend.id_to_token(index) == token
    assert ours.token_to_id("no such token") is None
    assert ours.backend.id_to_token(ours.vocab_size) is None


def test_encode_batch(pair):
    ours, theirs = pair
    texts = ["the cat", "", "the cat sat on the mat", "🦊"]
    theirs.pad_token = theirs.eos_token
    for side in ("left", "right"):
        expected = theirs(texts, padding=True, padding_side=side, return_tensors="pt")
        input_ids, attention_mask = ours.encode_batch(texts, padding_side=side)
        real = attention_mask.bool()
        assert input_ids.dtype == attention_mask.dtype == torch.int64
        assert torch.equal(attention_mask, expected["attention_mask"])
        assert torch.equal(input_ids[real], expected["input_ids"][real])
        assert (input_ids[~real] == ours.padding_id).all()
    assert [t.shape for t in ours.encode_batch([])] == [(0, 0), (0, 0)]
    for text in ("the cat " * 10_000, "the " + "🦊" * 1000):
        assert ours.decode(ours.encode(text), True) == text
    with pytest.raises(InputError, match="padding_side"):
        ours.encode_batch(texts, padding_side="middle")
    with pytest.raises(InputError, match="list of texts"):
        ours.encode_batch("the cat")


def test_decode_takes_lists_and_tensors(byte_level_folder):
    tokenizer = Tokenizer.from_folder(byte_level_folder)
    ids = tokenizer.encode("the cat")
    for kind in (list, iter, torch.tensor, np.array):
        assert tokenizer.decode(kind(ids), skip_special_tokens=True) == "the cat"
        assert tokenizer.decode(kind(ids)) == "<|begin|>the cat"
    for alone in (ids[0], torch.tensor(ids[0]), np.int64(ids[0])):
        assert tokenizer.decode(alone) == "<|begin|>"
    assert tokenizer.decode([]) == ""
    for rows in ([ids, ids[:2]], torch.tensor([ids, ids]), np.array([ids])):
        assert tokenizer.batch_decode(rows, True) == [tokenizer.decode(row, True) for row in rows]
    with pytest.raises(InputError, match=r"1-D tensor.*batch_decode"):
        tokenizer.decode(torch.tensor([ids]))
    with pytest.raises(InputError, match=r"-100 .*labels"):
        tokenizer.decode([-100])


def copy(source, target, **config):
    Tokenizer.from_folder(source).save(target)
    merged = json.loads((target / "tokenizer_config.json").read_text()) | config
    folders.write(target, "tokenizer_config.json", {k: v for k, v in merged.items() if v is not None})
    return target


def test_eos_ids_are_a_union(byte_fallback_folder, tmp_path):
    folder = copy(byte_fallback_folder, tmp_path)
    assert Tokenizer.from_folder(folder).eos_token_ids == (2,)
    folders.write(
        folder,
        "config.json",
        {"vocab_size": 1000, "eos_token_id": 7, "text_config": {"eos_token_id": [8, 2]}},
    )
    assert Tokenizer.from_folder(folder).eos_token_ids == (7, 8, 2)
    folders.write(folder, "generation_config.json", {"eos_token_id": [9, 7]})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_ids == (9, 7, 8, 2)
    assert tokenizer.eos_token_id == 2
    copy(byte_fallback_folder, tmp_path, eos_token=None)
    folders.write(folder, "config.json", {"eos_token_id": None})
    assert Tokenizer.from_folder(folder).eos_token_id == 9


def test_generation_config_as_llama_3_2_published_it(byte_fallback_folder, tmp_path):
    folder = copy(byte_fallback_folder, tmp_path)
    folders.write(folder, "generation_config.json", '{\n  "eos_token_id": [5, 6]\n  "do_sample": true,\n}')
    assert Tokenizer.from_folder(folder).eos_token_ids == (5, 6, 2)
    folders.write(folder, "generation_config.json", '{"eos_token_id": ')
    with pytest.raises(TokenizerError, match=r"generation_config.json is not JSON"):
        Tokenizer.from_folder(folder)


def test_pad_falls_back(byte_fallback_folder, tmp_path):
    folder = copy(byte_fallback_folder, tmp_path, eos_token=None)
    assert Tokenizer.from_folder(folder).padding_id == 0
    folders.write(folder, "generation_config.json", {"eos_token_id": [9, 7]})
    assert Tokenizer.from_folder(folder).padding_id == 9
    folders.write(folder, "config.json", {"pad_token_id": 4})
    assert Tokenizer.from_folder(folder).padding_id == 4
    folders.write(folder, "config.json", {"pad_token_id": -1})
    assert Tokenizer.from_folder(folder).padding_id == 9
    copy(byte_fallback_folder, tmp_path, pad_token={"content": "<unk>", "lstrip": False})
    assert Tokenizer.from_folder(folder).padding_id == 0


def test_no_bos_where_none_is_added(byte_fallback_folder, tmp_path):
    """Qwen: no bos_token, a post-processor that adds nothing; a text may begin with anything twice."""
    folder = copy(byte_fallback_folder, tmp_path)
    state = json.loads((folder / "tokenizer.json").read_text())
    folders.write(folder, "tokenizer.json", state | {"post_processor": None})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("<s><s>the") == tokenizer.encode("<s><s>the", add_special_tokens=False)
    assert tokenizer.encode("<s><s>the")[:2] == [1, 1]


def test_stored_padding_and_truncation_are_off(byte_fallback_folder, tmp_path):
    folder = copy(byte_fallback_folder, tmp_path)
    state = json.loads((folder / "tokenizer.json").read_text())
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    folders.write(folder, "tokenizer.json", state | {"truncation": truncation})
    text = "the cat sat on the mat"
    assert Tokenizer.from_folder(folder).encode(text) == Tokenizer.from_folder(byte_fallback_folder).encode(text)


def test_config_adds_tokens_and_flags(byte_fallback_folder, tmp_path):
    size = Tokenizer.from_folder(byte_fallback_folder).vocab_size
    config = json.loads((byte_fallback_folder / "tokenizer_config.json").read_text())
    decoder = config["added_tokens_decoder"] | {
        str(size): folders.added("<|user|>", rstrip=True),
        str(size + 1): folders.added("<note>", special=False),
    }
    folder = copy(byte_fallback_folder, tmp_path, added_tokens_decoder=decoder, eos_token="<note>")
    folders.write(folder, "special_tokens_map.json", {"eos_token": "<s>"})  # older: beside such a config it is not read
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("<|user|> \n the cat<note>", "<note> <|user|>"):
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids, True) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.eos_token_id == theirs.eos_token_id == size + 1
    assert size + 1 in ours.backend.special_ids


def test_special_tokens_without_an_id_are_named_once(byte_fallback_folder, tmp_path):
    folder = copy(byte_fallback_folder, tmp_path, additional_special_tokens=["<|nowhere|>", "</s>"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tokenizer = Tokenizer.from_folder(folder)
    assert [str(w.message).rpartition(": ")[2] for w in caught] == ["['<|nowhere|>']"]
    assert tokenizer.vocab_size == Tokenizer.from_folder(byte_fallback_folder).vocab_size


def test_from_hub_resolves_without_weights(byte_level_folder, monkeypatch):
    from ligermodels.checkpoint import hub

    calls = []
    monkeypatch.setattr(hub, "resolve", lambda *args, **kwargs: calls.append((args, kwargs)) or byte_level_folder)
    tokenizer = Tokenizer.from_hub("some/model", revision="main", subfolder="text", token="t", local_files_only=True)
    options = {
        "revision": "main",
        "subfolder": "text",
        "token": "t",
        "cache_dir": None,
        "local_files_only": True,
    }
    assert calls == [(("some/model",), options | {"weights": False})]
    assert tokenizer.name_or_path == "some/model"
    assert Tokenizer.from_pretrained(byte_level_folder).get_vocab() == tokenizer.get_vocab()
    assert Tokenizer.from_folder(byte_level_folder).name_or_path == str(byte_level_folder)
    assert tokenizer.decode(tokenizer.encode("the cat"), True) == "the cat"


def test_imports_stay_out():
    code = (
        "import sys, ligermodels.text as t; "
        "assert not {'transformers', 'sentencepiece', 'tokenizers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
