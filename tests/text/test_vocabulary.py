"""Special and added tokens under transformers' names, set and added as trainers do, against transformers."""

import copy
import json
import pickle
import shutil

import pytest
import torch
from tokenizers import AddedToken

from ligermodels.errors import TokenizerError
from ligermodels.text import Tokenizer
from tests.text import families, folders

# No file names these; transformers' classes do.
CLASS_DEFAULTS = {"gemma 2": ("mask_token",)}


@pytest.fixture(params=["llama 2", "gemma 2", "qwen 2.5"])
def pair(request, folder_of):
    """(ours, transformers') of one family."""
    folder = folder_of(request.param)
    ours, theirs = Tokenizer.from_folder(folder), families.theirs(request.param, folder)
    for name in CLASS_DEFAULTS.get(request.param, ()):
        setattr(theirs, name, None)
    return ours, theirs


def test_names_and_ids(pair):
    ours, theirs = pair
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert getattr(ours, name) == getattr(theirs, name), name
        assert getattr(ours, f"{name}_id") == getattr(theirs, f"{name}_id"), name
    for name in ("special_tokens_map", "all_special_tokens", "all_special_ids"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert list(ours.model_input_names) == theirs.model_input_names
    assert len(ours) == len(theirs) == ours.vocab_size
    assert ours.get_vocab() == theirs.get_vocab()


def test_a_flag_of_the_config_counts_over_that_of_the_tokenizer(byte_level_folder, tmp_path):
    shutil.copytree(byte_level_folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    index, token = next(pair for pair in config["added_tokens_decoder"].items() if pair[1]["content"] == "été")
    token["single_word"] = True
    folders.write(tmp_path, "tokenizer_config.json", config)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert [int(index) in tokenizer.encode(text) for text in ("un été", "un étés")] == [True, False]


def test_tokens_to_ids_and_back(pair):
    ours, theirs = pair
    ids = ours.encode("the cat 🦊")
    tokens = ours.convert_ids_to_tokens(ids)
    assert tokens == theirs.convert_ids_to_tokens(ids) == ours.convert_ids_to_tokens(torch.tensor(ids))
    assert ours.convert_tokens_to_ids(tokens) == ids
    assert ours.convert_ids_to_tokens(ids[-1]) == tokens[-1] and ours.convert_tokens_to_ids(tokens[-1]) == ids[-1]
    for given in (ours.all_special_ids, [*ids, len(ours)]):
        assert ours.convert_ids_to_tokens(given) == theirs.convert_ids_to_tokens(given)
    for unknown in ("no such token", [tokens[0], "no such token"]):
        assert ours.convert_tokens_to_ids(unknown) == theirs.convert_tokens_to_ids(unknown)


def test_special_tokens_are_set(pair):
    ours, theirs = pair
    stops = ours.eos_token_ids
    for tokenizer in pair:
        tokenizer.pad_token = AddedToken(tokenizer.eos_token)
        tokenizer.unk_token_id = tokenizer.eos_token_id
    for name in ("pad_token", "pad_token_id", "unk_token", "unk_token_id"):
        assert getattr(ours, name) == getattr(theirs, name) is not None, name
    assert ours.pad_token_id == ours.padding_id == ours.eos_token_id and ours.eos_token_ids == stops
    the = ours.convert_ids_to_tokens(ours.encode("the cat"))[-1]
    ours.eos_token = theirs.eos_token = the
    assert ours.eos_token_id == theirs.eos_token_id == ours.token_to_id(the)
    assert ours.eos_token_id in ours.eos_token_ids
    # It is special now, as after a reload.
    assert ours.decode([ours.eos_token_id], skip_special_tokens=True) == ""
    ours.pad_token = theirs.pad_token = None
    assert ours.pad_token is ours.pad_token_id is None
    template = "{{ eos_token }}|{{ pad_token is defined }}"
    theirs.chat_template = template
    user = [{"role": "user", "content": "a"}]
    said = ours.apply_chat_template(user, chat_template=template, tokenize=False)
    assert said == theirs.apply_chat_template(user, tokenize=False) == f"{the}|False"


def test_only_tokens_of_the_vocabulary_can_be_named(byte_level_folder):
    tokenizer = Tokenizer.from_folder(byte_level_folder)
    with pytest.raises(TokenizerError, match=r"pad_token cannot be .*add_special_tokens\({'pad_token'"):
        tokenizer.pad_token = "[PAD]"
    for index in (10**6, -1):
        with pytest.raises(TokenizerError, match=r"pad_token cannot be .*add_special_tokens"):
            tokenizer.pad_token_id = index
    assert tokenizer.pad_token is None


NEW = ["<|turn|>", AddedToken("[note]", lstrip=True, rstrip=True), "two words"]
ADDED_TEXTS = ("<|turn|>the [note] cat", "the two words<|turn|> x", "a  [note]\n [PAD]<|extra|> b")


def test_tokens_are_added(pair):
    ours, theirs = pair
    size = len(ours)
    special = {"pad_token": "[PAD]", "additional_special_tokens": ["<|extra|>"]}
    for tokenizer in pair:
        assert tokenizer.add_tokens(NEW) == 3
        assert tokenizer.add_tokens([*NEW, ""] if tokenizer is theirs else NEW) == 0
        assert tokenizer.add_special_tokens(dict(special)) == 2
        assert tokenizer.add_tokens("<|last|>", special_tokens=True) == 1
    assert len(ours) == len(theirs) == size + 6
    assert (ours.pad_token, ours.pad_token_id) == (theirs.pad_token, theirs.pad_token_id) == ("[PAD]", size + 3)
    assert ours.all_special_tokens == theirs.all_special_tokens and "<|extra|>" in ours.all_special_tokens
    assert ours.get_vocab() == theirs.get_vocab()
    for text in ADDED_TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        for skip in (False, True):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), text
    # A token that is there becomes special.
    assert ours.add_special_tokens({"extra_special_tokens": ["<|turn|>", ours.eos_token]}) == 0
    assert "<|turn|>" in ours.all_special_tokens and "<|extra|>" not in ours.all_special_tokens
    assert "<|turn|>" not in ours.decode(ours.encode(ADDED_TEXTS[0]), skip_special_tokens=True)


@pytest.fixture(params=["json", "model"])
def tokenizer(request, byte_level_folder, sentencepiece_folder):
    return Tokenizer.from_folder(byte_level_folder if request.param == "json" else sentencepiece_folder())


def test_copies(tokenizer):
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.padding_side = "left"
    text = "the [PAD] cat 🦊"
    for copied in (pickle.loads(pickle.dumps(tokenizer)), copy.deepcopy(tokenizer)):
        assert copied.encode(text) == tokenizer.encode(text)
        assert (copied.padding_side, copied.pad_token, len(copied)) == ("left", "[PAD]", len(tokenizer))
        copied.add_tokens("<|own|>")
        copied.chat_template = "other"
        assert tokenizer.token_to_id("<|own|>") is None
        assert tokenizer.chat_template != "other"


def test_fingerprints(tokenizer):
    """`datasets` caches by the hash of the tokenizer: the same after use, another after a change."""
    hash_of = pytest.importorskip("datasets.fingerprint").Hasher.hash
    fresh = hash_of(tokenizer)
    tokenizer(["the cat", "a"], truncation=True, max_length=3)
    assert tokenizer.chat_stop_ids and tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
    assert hash_of(tokenizer) == hash_of(copy.deepcopy(tokenizer)) == fresh
    seen = {fresh}
    for change in (
        lambda: setattr(tokenizer, "pad_token", tokenizer.eos_token),
        lambda: setattr(tokenizer, "chat_template", "other"),
        lambda: setattr(tokenizer, "padding_side", "left"),
        lambda: tokenizer.add_tokens("<|own|>"),
    ):
        change()
        assert hash_of(tokenizer) not in seen
        seen.add(hash_of(tokenizer))
