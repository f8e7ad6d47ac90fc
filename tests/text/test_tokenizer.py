"""How the files of a folder are read together."""

import json

import pytest
from transformers import AutoTokenizer

from ligermodels.errors import TokenizerError
from ligermodels.text import Tokenizer
from tests.text import folders


@pytest.fixture
def mistral(folder_of):
    return folder_of("mistral 0.3")


def copy(source, target, **config):
    Tokenizer.from_folder(source).save(target)
    merged = json.loads((target / "tokenizer_config.json").read_text()) | config
    folders.write(target, "tokenizer_config.json", {k: v for k, v in merged.items() if v is not None})
    return target


def test_eos_ids_are_a_union(mistral, tmp_path):
    folder = copy(mistral, tmp_path)
    state = {"vocab_size": 2000, "eos_token_id": 7, "text_config": {"eos_token_id": [8, 2]}}
    folders.write(folder, "config.json", state)
    folders.write(folder, "generation_config.json", {"eos_token_id": [9, 7]})
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.eos_token_ids, tokenizer.eos_token_id) == ((9, 7, 8, 2), 2)
    # Without a name of its own the tokenizer takes the first id; a token that is set is one more.
    copy(mistral, tmp_path, eos_token=None)
    folders.write(folder, "config.json", {"eos_token_id": None})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_id == 9
    tokenizer.eos_token = "<s>"
    assert (tokenizer.eos_token_id, tokenizer.eos_token_ids) == (1, (9, 7, 1))


def test_generation_config_as_llama_3_2_published_it(mistral, tmp_path):
    folder = copy(mistral, tmp_path)
    folders.write(folder, "generation_config.json", '{\n  "eos_token_id": [5, 6]\n  "do_sample": true,\n}')
    assert Tokenizer.from_folder(folder).eos_token_ids == (5, 6, 2)
    folders.write(folder, "generation_config.json", '{"eos_token_id": ')
    with pytest.raises(TokenizerError, match=r"generation_config.json is not JSON"):
        Tokenizer.from_folder(folder)


def test_what_tokenizer_json_says_of_a_call(mistral, tmp_path):
    """Its post-processor decides whether there is a BOS; its truncation is switched off."""
    folder = copy(mistral, tmp_path)
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    state = json.loads((folder / "tokenizer.json").read_text())
    folders.write(folder, "tokenizer.json", state | {"post_processor": None, "truncation": truncation})
    ids = Tokenizer.from_folder(folder).encode("<s><s>the cat sat")
    assert ids == Tokenizer.from_folder(mistral).encode("<s><s>the cat sat", add_special_tokens=False)
    assert ids[:2] == [1, 1]


def test_config_adds_tokens_and_flags(mistral, tmp_path):
    size = Tokenizer.from_folder(mistral).vocab_size
    config = json.loads((mistral / "tokenizer_config.json").read_text())
    decoder = config["added_tokens_decoder"] | {
        str(size): folders.added("<|user|>", rstrip=True),
        str(size + 1): folders.added("<note>", special=False),
    }
    folder = copy(mistral, tmp_path, added_tokens_decoder=decoder, eos_token="<note>")
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
