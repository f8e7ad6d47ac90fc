"""A tokenizer that is saved: both libraries read back what it was, whatever the folder held, wherever it stopped."""

import json
import os
import shutil

import pytest
from transformers import AutoTokenizer

from ligermodels.errors import HubError, TokenizerError
from ligermodels.text import Tokenizer
from tests.text import families, folders
from tests.text.families import ALONE

TEXTS = ("the cat", "<|turn|>the  [note] cat", "x<|extra|> y[PAD]", "the\n🦊")
VALUES = ("padding_side", "truncation_side", "chat_template", "bos_token", "eos_token", "pad_token", "unk_token")
# transformers' classes name these by themselves; no file does.
CLASS_DEFAULTS = {"phi 4": "unk_token"}


def assert_equal(name, ours, other):
    """`other`, ours or transformers', says the same as ours."""
    for text in TEXTS:
        ids = ours.encode(text)
        assert other.encode(text) == ids, text
        assert other.decode(ids, skip_special_tokens=True) == ours.decode(ids, skip_special_tokens=True), text
    for value in VALUES:
        if CLASS_DEFAULTS.get(name) != value:
            assert getattr(other, value) == getattr(ours, value), value
    assert other.model_max_length == ours.model_max_length and len(other) == len(ours)
    assert set(other.extra_special_tokens) == set(ours.extra_special_tokens)


def pad(tokenizer):
    tokenizer.pad_token = tokenizer.eos_token


def no_pad(tokenizer):
    tokenizer.pad_token = None


def sides(tokenizer):
    tokenizer.padding_side = "left" if tokenizer.padding_side == "right" else "right"
    tokenizer.truncation_side, tokenizer.model_max_length = "left", 77


def template(tokenizer):
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}é{% endfor %}"


def templates(tokenizer):
    tokenizer.chat_template = {"default": "a", "rag": "b {{ messages }}"}


def no_template(tokenizer):
    tokenizer.chat_template = None


def tokens(tokenizer):
    tokenizer.add_tokens(["<|turn|>", "[note]"])
    tokenizer.add_special_tokens({"pad_token": "[PAD]", "additional_special_tokens": ["<|extra|>"]})


def extra(tokenizer):
    tokenizer.add_special_tokens({"extra_special_tokens": [tokenizer.eos_token]})


def nothing(tokenizer):
    pass


CHANGES = (nothing, no_pad, pad, sides, template, templates, no_template, tokens, extra)


@pytest.mark.parametrize("name", ["llama 2", "gemma 2", "qwen 2.5", "phi 3"])
def test_both_libraries_read_it_back(folder_of, tmp_path, name):
    source = folder_of(name)
    alone = CHANGES if name == "phi 3" else CHANGES[:1]
    for change in (*alone, lambda tokenizer: [each(tokenizer) for each in CHANGES]):
        ours = Tokenizer.from_folder(source)
        change(ours)
        target = tmp_path / f"{change.__name__} it"
        target.mkdir()
        for file in ("config.json", "generation_config.json"):
            shutil.copy(source / file, target)
        paths = ours.save_pretrained(str(target))
        assert {os.path.relpath(path, target) for path in paths} == files_of(target) - {
            "config.json",
            "generation_config.json",
        }
        again = Tokenizer.from_folder(target)
        assert_equal(name, ours, again)
        assert again.apply_chat_template(ALONE) == ours.apply_chat_template(ALONE) if ours.chat_template else True
        assert (again.eos_token_ids, again.padding_id) == (ours.eos_token_ids, ours.padding_id)
        if name in families.REBUILT and change is not tokens and change.__name__ != "<lambda>":
            continue  # test_where_transformers_rebuilds_the_file
        assert_equal(name, ours, AutoTokenizer.from_pretrained(target))


def files_of(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_what_did_not_change_is_copied(folder_of, tmp_path):
    for name in ("llama 2", "phi 3"):
        source = folder_of(name)
        ours = Tokenizer.from_folder(source)
        ours.save_pretrained(tmp_path / name)
        changed = {"chat_template.jinja", "tokenizer_config.json"}
        for file in files_of(tmp_path / name):
            assert (tmp_path / name / file).read_bytes() == (source / file).read_bytes()
        template(ours)
        ours.save_pretrained(tmp_path / f"{name} other")
        for file in files_of(tmp_path / f"{name} other") - changed:
            assert (tmp_path / f"{name} other" / file).read_bytes() == (source / file).read_bytes()
        config = json.loads((source / "tokenizer_config.json").read_text("utf-8"))
        del config["chat_template"]
        assert json.loads((tmp_path / f"{name} other" / "tokenizer_config.json").read_text("utf-8")) == config


def test_a_tokenizer_model(sentencepiece_folder, tmp_path):
    ours = Tokenizer.from_folder(sentencepiece_folder())
    for change in CHANGES:
        change(ours)
        target = tmp_path / "out" / change.__name__
        ours.save_pretrained(target)
        assert_equal("", ours, Tokenizer.from_folder(target))


def test_old_folders_name_tokens_elsewhere(byte_fallback_folder, tmp_path):
    """special_tokens_map.json and added_tokens.json give way to tokenizer_config.json, which then says it all."""
    Tokenizer.from_folder(byte_fallback_folder).save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    size = len(Tokenizer.from_folder(tmp_path))
    del config["added_tokens_decoder"]
    folders.write(tmp_path, "tokenizer_config.json", config)
    folders.write(tmp_path, "special_tokens_map.json", {"pad_token": folders.added("<|p|>"), "eos_token": "<s>"})
    folders.write(tmp_path, "added_tokens.json", {"<|p|>": size, "[note]": size + 1})
    ours = Tokenizer.from_folder(tmp_path)
    assert (ours.pad_token, ours.eos_token) == ("<|p|>", "<s>")
    ours.cls_token = "</s>"
    tokens(ours)
    ours.save_pretrained(tmp_path / "out")
    assert files_of(tmp_path / "out") == {"tokenizer.json", "tokenizer_config.json"}
    again = Tokenizer.from_folder(tmp_path / "out")
    assert_equal("", ours, again)
    assert_equal("", ours, AutoTokenizer.from_pretrained(tmp_path / "out"))
    assert (again.cls_token, again.token_to_id("[note]")) == ("</s>", size + 1)


def test_over_another_tokenizer(folder_of, byte_level_folder, tmp_path):
    """Its files go, and what is no tokenizer's stays."""
    other = Tokenizer.from_folder(folder_of("llama 2"))
    templates(other)
    other.save_pretrained(tmp_path)
    folders.write(tmp_path, "added_tokens.json", {"x": 1})
    folders.write(tmp_path, "config.json", {})
    folders.write(tmp_path, "notes.txt", "mine")
    ours = Tokenizer.from_folder(byte_level_folder)
    ours.save_pretrained(tmp_path)
    assert files_of(tmp_path) == {"tokenizer.json", "tokenizer_config.json", "config.json", "notes.txt"}
    assert_equal("", ours, Tokenizer.from_folder(tmp_path))


def test_over_itself(byte_level_folder, tmp_path):
    Tokenizer.from_folder(byte_level_folder).save_pretrained(tmp_path)
    before = (tmp_path / "tokenizer.json").stat()
    ours = Tokenizer.from_folder(tmp_path)
    template(ours)
    ours.save_pretrained(tmp_path)
    after = (tmp_path / "tokenizer.json").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    tokens(ours)
    ours.save_pretrained(tmp_path)
    assert_equal("", ours, Tokenizer.from_folder(tmp_path))
    assert files_of(tmp_path) == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    # From now on it is the folder as it stands: what is changed back is changed back.
    ours.chat_template = Tokenizer.from_folder(byte_level_folder).chat_template
    ours.save_pretrained(tmp_path)
    ours.save_pretrained(tmp_path / "more")
    for folder in (tmp_path, tmp_path / "more"):
        assert_equal("", ours, Tokenizer.from_folder(folder))


def test_what_cannot_be_saved(byte_level_folder, tmp_path):
    ours = Tokenizer.from_folder(byte_level_folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(HubError, match="cannot be written"):
        ours.save_pretrained(tmp_path / "file")
    for name in ("../x", ".."):
        ours.chat_template = {"default": "a", name: "b"}
        with pytest.raises(TokenizerError, match="name of a file"):
            ours.save_pretrained(tmp_path / "out")
    for value in (5, {"default": 5}):
        with pytest.raises(TokenizerError, match="chat_template must be"):
            ours.chat_template = value
    gone = tmp_path / "gone"
    Tokenizer.from_folder(byte_level_folder).save_pretrained(gone)
    ours = Tokenizer.from_folder(gone)
    shutil.rmtree(gone)
    with pytest.raises(TokenizerError, match="cannot be read any more"):
        ours.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(TypeError, match="unexpected keyword"):
        ours.save_pretrained(tmp_path / "out", push_to_hub=True)
