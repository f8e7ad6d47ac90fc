"""Files that are damaged, mixed up or hostile: a TokenizerError with the file, the cause and what to do."""

import json
import os
import random

import pytest

from ligermodels.errors import TokenizerError
from ligermodels.text import Tokenizer
from tests.text import folders

ADDED = "added_tokens_decoder"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.fixture
def folder(byte_fallback_folder, tmp_path):
    Tokenizer.from_folder(byte_fallback_folder).save(tmp_path / "json")
    return tmp_path / "json"


def state(folder):
    return json.loads((folder / "tokenizer.json").read_text())


def refused(folder, words):
    with pytest.raises(TokenizerError, match=words):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "", "not valid JSON"),
        ("tokenizer.json", '{"model": ', r"not valid JSON.*interrupted download"),
        ("tokenizer.json", "[" * 100_000, "not valid JSON"),
        ("tokenizer.json", "[1]", "no `model` object"),
        ("tokenizer.json", "{}", "no `model` object"),
        (
            "tokenizer.json",
            {"model": {"type": "Tekken", "vocab": {}}},
            r"model type 'Tekken' is unknown.*BPE",
        ),
        ("tokenizer.json", {"model": {"type": "BPE", "vocab": []}}, "malformed"),
        ("tokenizer.json", LFS, "git-lfs pointer.*git lfs pull"),
        ("tokenizer.json", "\n<!DOCTYPE html><html>", "is an HTML page"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", "[]", "must hold a JSON object; it holds a list"),
        ("tokenizer_config.json", LFS, "git-lfs pointer"),
        (
            "tokenizer_config.json",
            {ADDED: {"a": {"content": "b"}}},
            "added token cannot be read",
        ),
        ("tokenizer_config.json", {ADDED: {"5": {}}}, "added token cannot be read"),
        ("tokenizer_config.json", {ADDED: {"-1": {"content": "a"}}}, "an id of 0 or more"),
        ("tokenizer_config.json", {ADDED: [1]}, "added token cannot be read"),
        (
            "tokenizer_config.json",
            {ADDED: {"5000": {"content": "<x>"}}},
            r"lacks the added token '<x>'",
        ),
        (
            "tokenizer_config.json",
            {ADDED: {"7": {"content": "</s>"}}},
            r"'</s>' the id 2.*say 7",
        ),
        ("tokenizer_config.json", '{"eos_token": "\\ud800"}', "lone surrogate"),
        ("tokenizer_config.json", {"extra_special_tokens": "<x>"}, "must be a list, not '<x>'"),
        ("tokenizer_config.json", {"eos_token": "<end>"}, "eos_token is '<end>', which has no id"),
        ("tokenizer_config.json", {"bos_token": "<bos>"}, "bos_token is '<bos>', which has no id"),
        ("config.json", {"vocab_size": 300}, r"400 ids, the model's embedding 300 rows"),
        ("config.json", {"text_config": {"vocab_size": 300}}, "embedding 300 rows"),
        ("config.json", {"eos_token_id": "2"}, "must be an integer or a list of integers .*, not '2'"),
        ("config.json", {"eos_token_id": True}, "must be an integer"),
        ("generation_config.json", {"eos_token_id": [2, "x"]}, r"generation_config.json: eos_token_id"),
        ("generation_config.json", {"pad_token_id": 0.5}, "pad_token_id must be an integer"),
    ],
)
def test_a_bad_file(folder, name, content, words):
    folders.write(folder, name, content)
    refused(folder, words)


def test_added_tokens_json_counts_where_the_config_has_none(folder):
    folders.write(folder, "tokenizer_config.json", {"bos_token": "<s>"})
    folders.write(folder, "added_tokens.json", {"<x>": 5000})
    refused(folder, "lacks the added token '<x>'")
    folders.write(folder, "added_tokens.json", {"<x>": "five"})
    refused(folder, "added token cannot be read")
    folders.write(folder, "added_tokens.json", {"<x>": 400})
    assert Tokenizer.from_folder(folder).encode("<x>")[-1] == 400


def test_bytes_that_are_not_utf8(folder):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes(b'{"a": "\xff"}')
        refused(folder, rf"{name} is not UTF-8")
        (folder / name).unlink()


def test_a_huge_file(folder):
    with (folder / "tokenizer.json").open("r+b") as file:
        file.truncate(2**28 + 1)
    refused(folder, r"too large to be a tokenizer file: 268,435,457 bytes")


def test_not_a_regular_file(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").mkdir()
    refused(folder, "not a regular file")
    (folder / "tokenizer.json").rmdir()
    os.mkfifo(folder / "tokenizer.json")
    refused(folder, "not a regular file")


def test_nothing_to_read(tmp_path):
    refused(tmp_path / "absent", "is not a folder")
    folders.write(tmp_path, "vocab.json", {})
    refused(tmp_path, r"neither tokenizer.json nor tokenizer.model; it has \['vocab.json'\]")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"IQ== 0\nIg== 1\nIw== 2\n", r"tiktoken file \(base64\).*take tokenizer.json"),
        (b"", "not a SentencePiece model"),
        (b"not a model", "not a SentencePiece model"),
        (LFS.encode(), "git-lfs pointer"),
    ],
)
def test_a_bad_tokenizer_model(sentencepiece_folder, data, words):
    refused(sentencepiece_folder(model=data), words)


def test_a_truncated_tokenizer_model(sentencepiece_folder, sentencepiece_model):
    for size in (1, 100, len(sentencepiece_model) // 2):
        refused(sentencepiece_folder(model=sentencepiece_model[:size]), "not a SentencePiece model")


def test_white_space_as_suffix(sentencepiece_folder):
    model = folders.sentencepiece_model(treat_whitespace_as_suffix=True)
    refused(sentencepiece_folder(model=model), "treat_whitespace_as_suffix")


def test_missing_special_tokens_of_a_tokenizer_model(sentencepiece_folder):
    refused(sentencepiece_folder(bos_token="<bos>"), r"has no token '<bos>'.*added_tokens.json")
    refused(sentencepiece_folder(bos_token="<bos>", add_bos_token=False), "bos_token is '<bos>', which has no id")
    decoder = {"7": folders.added("</s>")}
    refused(sentencepiece_folder(added_tokens_decoder=decoder), r"'</s>' the id 2.*say 7")


def test_both_files_disagree(folder, sentencepiece_model):
    (folder / "tokenizer.model").write_bytes(sentencepiece_model)
    refused(folder, r"tokenizer.model and the tokenizer.json beside it disagree: id \d+ is .* remove the one")


def test_both_files_agree(sentencepiece_folder, sentencepiece_model, tmp_path):
    from tests.text.test_sentencepiece import converted

    folder = sentencepiece_folder()
    converted(sentencepiece_model, tmp_path, legacy=False).save_pretrained(folder)
    assert (folder / "tokenizer.json").exists()
    (folder / "tokenizer.model").write_bytes(sentencepiece_model)
    assert Tokenizer.from_folder(folder).encode("the cat")[0] == 1


def test_a_renamed_user_defined_piece_is_no_disagreement(tmp_path):
    from tests.text.test_sentencepiece import converted

    names = [f"<unused{n}>" for n in range(40)]
    model = folders.sentencepiece_model(user_defined_symbols=names)
    folder = folders.sentencepiece_folder(tmp_path / "both", model)
    converted(model, tmp_path, legacy=False).save_pretrained(folder)
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    folders.write(folder, "tokenizer.json", text.replace("<unused", "<mine"))
    assert Tokenizer.from_folder(folder).token_to_id("<mine7>") == 10


@pytest.mark.parametrize("text", [b"bytes", None, 5, ["list"]])
def test_text_that_is_no_text(byte_fallback_folder, text):
    with pytest.raises(TokenizerError, match=rf"text must be a str, not {type(text).__name__}"):
        Tokenizer.from_folder(byte_fallback_folder).encode(text)


def test_a_lone_surrogate(byte_fallback_folder, sentencepiece_folder):
    for folder in (byte_fallback_folder, sentencepiece_folder()):
        with pytest.raises(TokenizerError, match=r"lone surrogate '\\ud83e' at position 4"):
            Tokenizer.from_folder(folder).encode("the \ud83e")


def test_a_panic_of_the_library(folder):
    """Its Strip decoder reads before the beginning of an empty token."""
    content = state(folder)
    content["decoder"] = {"type": "Strip", "content": " ", "start": 0, "stop": 2}
    content["model"]["vocab"][""] = 400
    folders.write(folder, "tokenizer.json", content)
    tokenizer = Tokenizer.from_folder(folder)
    with pytest.raises(TokenizerError, match="tokenizers library"):
        tokenizer.decode([400])


@pytest.mark.filterwarnings("ignore:.*special tokens without an id")
def test_any_damage_is_a_tokenizer_error(folder, sentencepiece_folder):
    """Single bytes changed, ranges cut, values swapped: loads, or says why not."""
    generator = random.Random(0)
    other = sentencepiece_folder(added_tokens_decoder={"420": folders.added("<|user|>")})
    insertions = [b"null", b"-1", b'"', b"{", b"[]", b"1e999", b"\\ud800"]
    refusals = 0
    for path in (
        folder / "tokenizer.json",
        folder / "tokenizer_config.json",
        other / "tokenizer_config.json",
    ):
        good = path.read_bytes()
        for _ in range(150):
            data = bytearray(good)
            for _ in range(generator.randrange(1, 4)):
                at = generator.randrange(len(data))
                match generator.randrange(3):
                    case 0:
                        data[at] = generator.randrange(256)
                    case 1:
                        del data[at : at + generator.randrange(1, 40)]
                    case 2:
                        data[at:at] = generator.choice(insertions)
            path.write_bytes(data)
            try:
                tokenizer = Tokenizer.from_folder(path.parent)
                tokenizer.decode(tokenizer.encode("the cat"))
                tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
            except TokenizerError:
                refusals += 1
        path.write_bytes(good)
    assert refusals > 200
