"""Files that are damaged or mixed up raise a TokenizerError with the file, the cause and what to do."""

import json
import os
import random

import pytest

from ligermodels.checkpoint.gguf.tokenizer import _field, protobuf_fields
from ligermodels.errors import InputError, TokenizerError
from ligermodels.text import Tokenizer
from tests.text import folders

ADDED = "added_tokens_decoder"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.fixture
def folder(folder_of, tmp_path):
    Tokenizer.from_folder(folder_of("mistral 0.3")).save(tmp_path / "json")
    return tmp_path / "json"


def refused(folder, message):
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.from_folder(folder)
    assert str(folder) in str(caught.value) and len(str(caught.value)) < 3000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", '{"model": ', "interrupted download: it is not valid JSON"),
        ("tokenizer.json", {"model": {"type": "Tekken", "vocab": {}}}, "another JSON file .* newer tokenizers"),
        ("tokenizer.json", LFS, "git-lfs pointer.*git lfs pull"),
        ("tokenizer.json", "\n<!DOCTYPE html><html>", "is an HTML page"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", {ADDED: {"5": {}}}, "added token cannot be read"),
        ("tokenizer_config.json", {ADDED: {"7": {"content": "</s>"}}}, r"'</s>' the id 2.*say 7"),
        ("tokenizer_config.json", {"extra_special_tokens": "<x>"}, "must be a list, not '<x>'"),
        ("tokenizer_config.json", {"eos_token": "<end>"}, "eos_token is '<end>', which has no id"),
        ("tokenizer_config.json", {"padding_side": "top"}, "sides must be"),
        ("config.json", {"text_config": {"vocab_size": 300}}, "1190 ids, the model's embedding 300 rows"),
        ("generation_config.json", {"eos_token_id": [2, "x"]}, "eos_token_id in .* must be an integer"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja is not UTF-8"),
    ],
)
def test_a_bad_file(folder, name, content, message):
    if isinstance(content, bytes):
        (folder / name).write_bytes(content)
    else:
        folders.write(folder, name, content)
    refused(folder, message)


def test_added_tokens_json_counts_where_the_config_has_none(folder):
    folders.write(folder, "tokenizer_config.json", {"bos_token": "<s>"})
    folders.write(folder, "added_tokens.json", {"<x>": 5000})
    refused(folder, "the added token '<x>' the id 1190")
    folders.write(folder, "added_tokens.json", {"<x>": 1190})
    assert Tokenizer.from_folder(folder).encode("<x>")[-1] == 1190


def test_links_that_leave_the_folder(folder):
    path = folder / "chat_template.jinja"
    path.symlink_to("/etc/hostname")
    refused(folder, "leaves its folder")
    path.unlink()
    os.rename(folder / "tokenizer.json", folder / "x.json")
    (folder / "tokenizer.json").symlink_to("x.json")
    assert Tokenizer.from_folder(folder).encode("the cat")


def test_a_bad_tokenizer_model(sentencepiece_folder, sentencepiece_model, tmp_path):
    refused(tmp_path / "absent", "is not a folder")
    folders.write(tmp_path / "vocab", "vocab.json", {})
    refused(tmp_path / "vocab", r"neither tokenizer.json nor .*tekken.json; it has \['vocab.json'\]")
    for data, message in (
        (b"IQ== 0\nIg== 1\nIw== 2\n", r"tiktoken file of 3 tokens.*take tokenizer.json"),
        (sentencepiece_model[: len(sentencepiece_model) // 2], "not a SentencePiece model"),
        (b"".join(_field(1, value) for n, value in protobuf_fields(sentencepiece_model) if n == 1), "no trainer's"),
        (LFS.encode(), "git-lfs pointer"),
        (folders.sentencepiece_model(treat_whitespace_as_suffix=True), "treat_whitespace_as_suffix"),
    ):
        refused(sentencepiece_folder(model=data), message)
    refused(sentencepiece_folder(bos_token="<bos>"), r"bos_token is '<bos>', which has no id.*added_tokens.json")
    refused(sentencepiece_folder(**{ADDED: {"7": folders.added("</s>")}}), r"'</s>' the id 2.*say 7")


def test_a_panic_of_the_library(folder):
    """Its Strip decoder reads before the beginning of an empty token."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content["decoder"] = {"type": "Strip", "content": " ", "start": 0, "stop": 2}
    content["model"]["vocab"][""] = 1190
    folders.write(folder, "tokenizer.json", content)
    with pytest.raises(TokenizerError, match="tokenizers library"):
        Tokenizer.from_folder(folder).decode([1190])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*special tokens have no id")
def test_any_damage_is_a_typed_error(folder, sentencepiece_folder):
    """With single bytes changed or a range cut, a file loads and works or raises a typed error."""
    generator, refusals = random.Random(0), 0
    other = sentencepiece_folder(added_tokens_decoder={"420": folders.added("<|user|>")})
    json_files = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
    for path in (*json_files, other / "tokenizer_config.json", other / "tokenizer.model"):
        good = path.read_bytes()
        for _ in range(300):
            data = bytearray(good)
            at = generator.randrange(len(data))
            data[at] = generator.randrange(256)
            if generator.random() < 0.5:
                del data[at : at + generator.randrange(1, 40)]
            path.write_bytes(data)
            try:
                tokenizer = Tokenizer.from_folder(path.parent)
                tokenizer.decode(tokenizer.encode("the cat"))
                tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
            except (InputError, TokenizerError):
                refusals += 1
        path.write_bytes(good)
    assert refusals > 200
