"""tokenizer.json folders against transformers, and how the files of a folder are read together."""

import json
import random
import subprocess
import sys

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
    with pytest.raises(InputError, match="list of texts"):
        ours.encode_batch("the cat")


def test_decode_takes_lists_and_tensors(byte_level_folder):
    tokenizer = Tokenizer.from_folder(byte_level_folder)
    ids = tokenizer.encode("the cat")
    for kind in (list, iter, torch.tensor, np.array):
        assert tokenizer.decode(kind(ids), skip_special_tokens=True) == "the cat"
    for alone in (ids[0], torch.tensor(ids[0]), np.int64(ids[0])):
        assert tokenizer.decode(alone) == "<|begin|>"
    for rows in ([ids, ids[:2]], torch.tensor([ids, ids])):
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
    state = {"vocab_size": 1000, "eos_token_id": 7, "text_config": {"eos_token_id": [8, 2]}}
    folders.write(folder, "config.json", state)
    folders.write(folder, "generation_config.json", {"eos_token_id": [9, 7]})
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.eos_token_ids, tokenizer.eos_token_id) == ((9, 7, 8, 2), 2)
    # Without a name of its own the tokenizer takes the first id; a token that is set is one more.
    copy(byte_fallback_folder, tmp_path, eos_token=None)
    folders.write(folder, "config.json", {"eos_token_id": None})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_id == 9
    tokenizer.eos_token = "<s>"
    assert (tokenizer.eos_token_id, tokenizer.eos_token_ids) == (1, (9, 7, 1))


def test_generation_config_as_llama_3_2_published_it(byte_fallback_folder, tmp_path):
    folder = copy(byte_fallback_folder, tmp_path)
    folders.write(folder, "generation_config.json", '{\n  "eos_token_id": [5, 6]\n  "do_sample": true,\n}')
    assert Tokenizer.from_folder(folder).eos_token_ids == (5, 6, 2)
    folders.write(folder, "generation_config.json", '{"eos_token_id": ')
    with pytest.raises(TokenizerError, match=r"generation_config.json is not JSON"):
        Tokenizer.from_folder(folder)


def test_what_tokenizer_json_says_of_a_call(byte_fallback_folder, tmp_path):
    """Its post-processor decides whether there is a BOS; its truncation is switched off."""
    folder = copy(byte_fallback_folder, tmp_path)
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    state = json.loads((folder / "tokenizer.json").read_text())
    folders.write(folder, "tokenizer.json", state | {"post_processor": None, "truncation": truncation})
    ids = Tokenizer.from_folder(folder).encode("<s><s>the cat sat")
    assert ids == Tokenizer.from_folder(byte_fallback_folder).encode("<s><s>the cat sat", add_special_tokens=False)
    assert ids[:2] == [1, 1]


def test_config_adds_tokens_and_flags(byte_fallback_folder, tmp_path):
    size = Tokenizer.from_folder(byte_fallback_folder).vocab_size
    config = json.loads((byte_fallback_folder / "tokenizer_config.json").read_text())
    decoder = config["added_tokens_decoder"] | {
        str(size): folders.added("<|user|>", rstrip=True),
        str(size + 1): folders.added("<note>", special=False),
    }
    folder = copy(byte_fallback_folder, tmp_path, added_tokens_decoder=decoder, eos_token="<note>")
    folders.write(folder, "special_tokens_map.json", {"eos_token": "<s>"})  # not read beside such a config
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("<|user|> \n the cat<note>", "<note> <|user|>"):
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids, True) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.eos_token_id == theirs.eos_token_id == size + 1


def test_from_hub_resolves_without_weights(byte_level_folder, monkeypatch):
    from ligermodels.checkpoint import hub

    calls = []
    monkeypatch.setattr(hub, "resolve", lambda *args, **kwargs: calls.append((args, kwargs)) or byte_level_folder)
    options = {"revision": "main", "subfolder": "text", "token": "t", "cache_dir": None, "local_files_only": True}
    tokenizer = Tokenizer.from_pretrained("some/model", **options)
    assert calls == [(("some/model",), options | {"weights": False})]
    assert tokenizer.name_or_path == "some/model"


def test_imports_stay_out():
    code = (
        "import sys, ligermodels.text; "
        "assert not {'torch', 'transformers', 'sentencepiece', 'tokenizers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
