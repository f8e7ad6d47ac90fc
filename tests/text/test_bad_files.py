"""Files that are damaged or mixed up: a TokenizerError with the file, the cause and what to do."""

import json
import os
import random

import pytest

from ligermodels.errors import InputError, TokenizerError
from ligermodels.text import Tokenizer
from tests.text import folders

ADDED = "added_tokens_decoder"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.fixture
def folder(byte_fallback_folder, tmp_path):
    Tokenizer.from_folder(byte_fallback_folder).save(tmp_path / "json")
    return tmp_path / "json"


def refused(folder, words):
    with pytest.raises(TokenizerError, match=words) as caught:
        Tokenizer.from_folder(folder)
    assert str(folder) in str(caught.value) and len(str(caught.value)) < 3000


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", '{"model": ', r"not valid JSON.*interrupted download"),
        ("tokenizer.json", "{}", "no `model` object"),
        ("tokenizer.json", {"model": {"type": "Tekken", "vocab": {}}}, r"model type 'Tekken' is unknown.*BPE"),
        ("tokenizer.json", {"model": {"type": "BPE", "vocab": []}}, "malformed"),
        ("tokenizer.json", LFS, "git-lfs pointer.*git lfs pull"),
        ("tokenizer.json", "\n<!DOCTYPE html><html>", "is an HTML page"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", "[]", "holds a list"),
        ("tokenizer_config.json", LFS, "git-lfs pointer"),
        ("tokenizer_config.json", {ADDED: {"a": {"content": "b"}}}, "added token cannot be read"),
        ("tokenizer_config.json", {ADDED: {"5": {}}}, "added token cannot be read"),
        ("tokenizer_config.json", {ADDED: {"-1": {"content": "a"}}}, "an id of 0 or more"),
        (
            "tokenizer_config.json",
            {ADDED: {"5000": {"content": "<x>"}}},
            "the added token '<x>' the id 400, .* say 5000",
        ),
        ("tokenizer_config.json", {ADDED: {"7": {"content": "</s>"}}}, r"'</s>' the id 2.*say 7"),
        ("tokenizer_config.json", {"extra_special_tokens": "<x>"}, "must be a list, not '<x>'"),
        ("tokenizer_config.json", {"eos_token": "<end>"}, "eos_token is '<end>', which has no id"),
        ("tokenizer_config.json", {"padding_side": "top"}, "sides must be"),
        ("tokenizer_config.json", {"model_max_length": "9"}, "number"),
        ("config.json", {"vocab_size": 300}, r"400 ids, the model's embedding 300 rows"),
        ("config.json", {"text_config": {"vocab_size": 300}}, "embedding 300 rows"),
        ("config.json", {"eos_token_id": "2"}, "must be an integer or a list of integers, not '2'"),
        ("generation_config.json", {"eos_token_id": [2, "x"]}, "eos_token_id must be an integer"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja is not UTF-8"),
        ("tokenizer.json", b"\xff", "tokenizer.json is not UTF-8"),
    ],
)
def test_a_bad_file(folder, name, content, words):
    if isinstance(content, bytes):
        (folder / name).write_bytes(content)
    else:
        folders.write(folder, name, content)
    refused(folder, words)


def test_added_tokens_json_counts_where_the_config_has_none(folder):
    folders.write(folder, "tokenizer_config.json", {"bos_token": "<s>"})
    folders.write(folder, "added_tokens.json", {"<x>": 5000})
    refused(folder, "the added token '<x>' the id 400")
    folders.write(folder, "added_tokens.json", {"<x>": "five"})
    refused(folder, "added token cannot be read")
    folders.write(folder, "added_tokens.json", {"<x>": 400})
    assert Tokenizer.from_folder(folder).encode("<x>")[-1] == 400


def test_what_is_no_file_of_the_folder(folder):
    """A pipe would be waited for; a link could lead to any file of the machine."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        path = folder / name
        data = path.read_bytes() if path.exists() else None
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        refused(folder, "not a regular file")
        path.unlink()
        path.symlink_to("/etc/hostname")
        refused(folder, "leaves its folder")
        path.unlink()
        if data is not None:
            path.write_bytes(data)
    (folder / "x.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("x.json")
    assert Tokenizer.from_folder(folder).encode("the cat")


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


def test_a_tokenizer_model_that_does_not_fit(sentencepiece_folder, sentencepiece_model):
    refused(sentencepiece_folder(model=sentencepiece_model[: len(sentencepiece_model) // 2]), "not a SentencePiece")
    suffix = folders.sentencepiece_model(treat_whitespace_as_suffix=True)
    refused(sentencepiece_folder(model=suffix), "treat_whitespace_as_suffix")
    refused(sentencepiece_folder(bos_token="<bos>"), r"has no token '<bos>'.*added_tokens.json")
    decoder = {"7": folders.added("</s>")}
    refused(sentencepiece_folder(added_tokens_decoder=decoder), r"'</s>' the id 2.*say 7")


def test_texts_that_cannot_be_encoded(byte_fallback_folder, sentencepiece_folder):
    for folder in (byte_fallback_folder, sentencepiece_folder()):
        tokenizer = Tokenizer.from_folder(folder)
        for text in (b"bytes", None, ["list"]):
            with pytest.raises(TokenizerError, match=rf"text must be a str, not {type(text).__name__}"):
                tokenizer.encode(text)
        with pytest.raises(TokenizerError, match=r"lone surrogate '\\ud83e' at position 4"):
            tokenizer.encode("the \ud83e")


def test_a_panic_of_the_library(folder):
    """Its Strip decoder reads before the beginning of an empty token."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content["decoder"] = {"type": "Strip", "content": " ", "start": 0, "stop": 2}
    content["model"]["vocab"][""] = 400
    folders.write(folder, "tokenizer.json", content)
    with pytest.raises(TokenizerError, match="tokenizers library"):
        Tokenizer.from_folder(folder).decode([400])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*special tokens without an id")
def test_any_damage_is_a_typed_error(folder, sentencepiece_folder):
    """Single bytes changed, ranges cut, values inserted: it loads and works, or says why not."""
    generator, refusals = random.Random(0), 0
    other = sentencepiece_folder(added_tokens_decoder={"420": folders.added("<|user|>")})
    insertions = [b"null", b"-1", b'"', b"{", b"[]", b"1e999"]
    json_files = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
    for path in (*json_files, other / "tokenizer_config.json", other / "tokenizer.model"):
        good = path.read_bytes()
        for _ in range(300):
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
            except (InputError, TokenizerError):
                refusals += 1
        path.write_bytes(good)
    assert refusals > 400
