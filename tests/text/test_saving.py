"""A tokenizer that is saved: both libraries read back what it was."""

import json
import os
import shutil

import pytest
from transformers import AutoTokenizer

from ligermodels.errors import HubError, TokenizerError
from ligermodels.text import Tokenizer
from tests.text import folders

TEXTS = ("the cat", "<|turn|>the  [note] cat", "x<|extra|> y[PAD]", "the\n🦊")
VALUES = ("padding_side", "truncation_side", "chat_template", "bos_token", "eos_token", "pad_token", "unk_token")


def assert_equal(ours, other):
    """`other`, ours or transformers', is the same tokenizer as ours."""
    for text in TEXTS:
        ids = ours.encode(text)
        assert other.encode(text) == ids, text
        assert other.decode(ids, skip_special_tokens=True) == ours.decode(ids, skip_special_tokens=True), text
    for value in VALUES:
        assert getattr(other, value) == getattr(ours, value), value
    assert other.model_max_length == ours.model_max_length and len(other) == len(ours)
    assert set(other.all_special_tokens) == set(ours.all_special_tokens)


def no_pad(tokenizer):
    tokenizer.pad_token = None


def templates(tokenizer):
    tokenizer.chat_template = {"default": "a", "rag": "b {{ messages }}é"}


def no_template(tokenizer):
    tokenizer.chat_template = None


def everything(tokenizer):
    tokenizer.padding_side = "left" if tokenizer.padding_side == "right" else "right"
    tokenizer.truncation_side, tokenizer.model_max_length = "left", 77
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}é{% endfor %}"
    tokenizer.add_tokens(["<|turn|>", "[note]"])
    tokenizer.add_special_tokens({"pad_token": "[PAD]", "extra_special_tokens": ["<|extra|>", tokenizer.eos_token]})


@pytest.mark.parametrize(
    ("name", "change"),
    [("phi 3", change) for change in (no_pad, templates, no_template)]
    + [(name, everything) for name in ("llama 2", "gemma 2", "phi 3")],
)
def test_both_libraries_read_it_back(folder_of, tmp_path, name, change):
    ours = Tokenizer.from_folder(folder_of(name))
    change(ours)
    configs = {"config.json", "generation_config.json"}
    for file in configs:
        shutil.copy(folder_of(name) / file, tmp_path)
    paths = ours.save_pretrained(str(tmp_path))
    assert {os.path.relpath(path, tmp_path) for path in paths} == files_of(tmp_path) - configs
    again = Tokenizer.from_folder(tmp_path)
    assert_equal(ours, again)
    assert (again.eos_token_ids, again.padding_id) == (ours.eos_token_ids, ours.padding_id)
    assert_equal(ours, AutoTokenizer.from_pretrained(tmp_path))


TEMPLATE_FILES = ("chat_template.jinja", "additional_chat_templates/rag.jinja", "tokenizer_config.json")


def files_of(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["phi 3"])
def test_what_did_not_change_is_copied(folder_of, tmp_path, name):
    source = folder_of(name)
    ours = Tokenizer.from_folder(source)
    ours.save_pretrained(tmp_path / "same")
    for file in files_of(tmp_path / "same"):
        assert (tmp_path / "same" / file).read_bytes() == (source / file).read_bytes()
    templates(ours)
    ours.save_pretrained(tmp_path / "other")
    for file in files_of(tmp_path / "other") - set(TEMPLATE_FILES):
        assert (tmp_path / "other" / file).read_bytes() == (source / file).read_bytes()
    config = json.loads((source / "tokenizer_config.json").read_text("utf-8"))
    del config["chat_template"]
    assert json.loads((tmp_path / "other" / "tokenizer_config.json").read_text("utf-8")) == config


@pytest.mark.parametrize("change", [lambda tokenizer: None, everything])
def test_a_tokenizer_model(sentencepiece_folder, tmp_path, change):
    ours = Tokenizer.from_folder(sentencepiece_folder())
    change(ours)
    ours.save_pretrained(tmp_path / "out")
    assert files_of(tmp_path / "out") >= {"tokenizer.model", "tokenizer.json", "tokenizer_config.json"}
    for other in (Tokenizer, AutoTokenizer):
        assert_equal(ours, other.from_pretrained(tmp_path / "out"))


def test_over_another_tokenizer(folder_of, byte_level_folder, tmp_path):
    """Its files are removed; files that belong to no tokenizer stay."""
    other = Tokenizer.from_folder(folder_of("llama 2"))
    templates(other)
    other.save_pretrained(tmp_path)
    folders.write(tmp_path, "added_tokens.json", {"x": 1})
    folders.write(tmp_path, "vocab.txt", "[PAD]")
    folders.write(tmp_path, "notes.txt", "mine")
    ours = Tokenizer.from_folder(byte_level_folder)
    ours.save_pretrained(tmp_path)
    assert files_of(tmp_path) == {"tokenizer.json", "tokenizer_config.json", "notes.txt"}
    assert_equal(ours, Tokenizer.from_folder(tmp_path))


def test_what_cannot_be_saved(byte_level_folder, tmp_path):
    ours = Tokenizer.from_folder(byte_level_folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(HubError, match="cannot be written"):
        ours.save_pretrained(tmp_path / "file")
    with pytest.raises(TokenizerError, match="chat_template must be"):
        ours.chat_template = 5
    ours.chat_template = {"default": "a", "../x": "b"}
    with pytest.raises(TokenizerError, match="name of a file"):
        ours.save_pretrained(tmp_path / "out")
    Tokenizer.from_folder(byte_level_folder).save_pretrained(tmp_path / "gone")
    ours = Tokenizer.from_folder(tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone")
    with pytest.raises(TokenizerError, match="cannot be read any more"):
        ours.save_pretrained(tmp_path / "out")
