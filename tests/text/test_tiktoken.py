"""Meta's tiktoken tokenizer.model and Mistral's tekken.json, rebuilt small, against merging by rank in plain Python."""

import base64
import itertools
import json
import pickle
import random

import pytest
import regex
from transformers import AutoTokenizer

from ligermodels.errors import TokenizerError
from ligermodels.text import Tokenizer, tiktoken
from tests.text import folders

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)"
    r"|\s+"
)
TEXTS = (
    *folders.TEXTS,
    "the theme's THE'S cat\r\n\r\n  x/y//\n",
    "1234567",
    "   a\t\tb   \n  c ",
    "aaaaaaa haaa",
    "x xqzw",
)


def merged(text, tokens, pattern):
    """tiktoken's ranks of a text: the pair whose joined bytes have the lowest rank, the leftmost of equals, first."""
    rank_of = {token: rank for rank, token in enumerate(tokens)}
    found = []
    for piece in regex.findall(pattern, text):
        parts = [bytes([byte]) for byte in piece.encode()]
        if piece.encode() in rank_of:
            parts = [piece.encode()]
        while len(parts) > 1:
            ranked = [(rank_of.get(a + b, 10**9), at) for at, (a, b) in enumerate(itertools.pairwise(parts))]
            best, at = min(ranked)
            if best == 10**9:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        found += [rank_of[part] for part in parts]
    return found


@pytest.fixture
def meta(tmp_path, monkeypatch):
    """(folder, tokens) of a small file in the place of Llama 3's."""
    tokens = folders.tiktoken_file(tmp_path / "meta" / "tokenizer.model")
    monkeypatch.setattr(tiktoken, "LLAMA_3_SIZE", len(tokens))
    return tmp_path / "meta", tokens


@pytest.fixture
def tekken(tmp_path):
    return tmp_path / "mistral", folders.tekken_file(tmp_path / "mistral" / "tekken.json")


def test_a_tiktoken_file(meta):
    folder, tokens = meta
    tokenizer, size = Tokenizer.from_folder(folder), len(tokens)
    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False) == merged(text, tokens, LLAMA_3), text
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    generator = random.Random(0)
    for _ in range(200):
        ids = generator.choices(range(size), k=8)
        assert tokenizer.decode(ids) == b"".join(tokens[index] for index in ids).decode(errors="replace")
    named = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    assert named == (size, size + 1, size + 4, None)
    assert tokenizer.eos_token_ids == (size + 1, size + 8, size + 9)
    assert len(tokenizer) == size + 256
    ids = tokenizer.encode("<|start_header_id|>the<|eot_id|>")
    assert (ids[:2], ids[-1]) == ([size, size + 6], size + 9)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the"
    assert tokenizer.encode("<|begin_of_text|>the") == tokenizer.encode("the")
    assert pickle.loads(pickle.dumps(tokenizer)).encode("the") == tokenizer.encode("the")


@pytest.mark.parametrize("special", [None, ["<unk>", "<s>", "</s>", "[THINK]"]])
def test_a_tekken_file(tmp_path, special):
    tokens = folders.tekken_file(tmp_path / "tekken.json", special)
    pattern = json.loads((tmp_path / "tekken.json").read_text())["config"]["pattern"]
    tokenizer = Tokenizer.from_folder(tmp_path)
    for text in TEXTS:
        expected = [1, *(30 + rank for rank in merged(text, tokens, pattern))]
        assert tokenizer.encode(text) == expected, text
        assert tokenizer.decode(expected, skip_special_tokens=True) == text
    assert len(tokenizer) == len(tokens) + 30
    own = ["<unk>", "<s>", "</s>", "[INST]" if special is None else "[THINK]"]
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3, 29]) == [*own, "<SPECIAL_29>"]
    named = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id)
    assert named == (1, 2, 0, 11 if special is None else None)
    assert tokenizer.encode(f"<s>{own[3]}the</s>")[:2] == [1, 3]
    assert tokenizer.decode([1, 3, *tokenizer.encode("the cat", False), 2], skip_special_tokens=True) == "the cat"


def test_a_config_beside_the_file_counts(meta):
    folder, tokens = meta
    size = len(tokens)
    decoder = {str(size + 4): folders.added("<|pad|>"), str(size + 9): folders.added("<|end|>")}
    config = {"eos_token": "<|end|>", "pad_token": None, "added_tokens_decoder": decoder}
    folders.write(folder, "tokenizer_config.json", config)
    folders.write(folder, "generation_config.json", {"eos_token_id": size + 8})
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token) == (size, size + 9, None)
    assert tokenizer.eos_token_ids == (size + 8, size + 9)
    assert tokenizer.convert_ids_to_tokens([size + 4, size + 5]) == ["<|pad|>", "<|step_id|>"]


@pytest.mark.parametrize("kind", ["meta", "tekken"])
def test_it_is_saved_for_both_libraries(request, tmp_path, kind):
    folder, _ = request.getfixturevalue(kind)
    ours = Tokenizer.from_folder(folder)
    ours.save_pretrained(tmp_path / "out")
    kept = {"tekken.json"} if kind == "tekken" else set()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"tokenizer.json", "tokenizer_config.json"} | kept
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    for other in (theirs, Tokenizer.from_folder(tmp_path / "out")):
        for text in (*TEXTS, "[INST]the<|eot_id|>\nthe"):
            ids = ours.encode(text)
            assert other.encode(text) == ids, text
            assert other.decode(ids, skip_special_tokens=True) == ours.decode(ids, skip_special_tokens=True)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
            assert getattr(other, name) == getattr(ours, name), name
    ours.add_tokens("<new>")
    ours.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new" / "tekken.json").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "new").encode("<new>") == ours.encode("<new>")
    ours.save_pretrained(folder)
    assert (ours.bos_token_id, Tokenizer.from_folder(folder).encode("<new>")) == (
        theirs.bos_token_id,
        ours.encode("<new>"),
    )


def test_the_order_of_candidates(tmp_path, byte_level_folder, sentencepiece_model):
    names = ["tokenizer.model.v3", "tokenizer.model.v7", "tokenizer.model.v7m1", "tokenizer.model.v11"]
    for name in (*names, "tokenizer.model"):
        (tmp_path / name).write_bytes(sentencepiece_model)
    (tmp_path / "tokenizer.model.v99.bak").write_bytes(b"")
    folders.tekken_file(tmp_path / "tekken.json")
    (tmp_path / "tokenizer.json").write_bytes((byte_level_folder / "tokenizer.json").read_bytes())
    for name in ("tokenizer.json", "tekken.json", "tokenizer.model", *reversed(names)):
        found = Tokenizer.from_folder(tmp_path).files.vocabulary
        assert found is not None and found.name == name
        found.unlink()


def changed(change):
    """tokenizer.model of Meta with its bytes changed."""

    def write(folder):
        path = folder / "tokenizer.model"
        folders.tiktoken_file(path)
        path.write_bytes(change(path.read_bytes()))

    return write


def tekken_of(**arguments):
    return lambda folder: folders.tekken_file(folder / "tekken.json", **arguments)


QQQ = base64.b64encode(b"qqq") + b" "


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (changed(lambda data: data[:-6]), "not a tiktoken file|tiktoken file of"),
        (changed(lambda data: data.replace(b" 300\n", b" 301\n")), r"tiktoken file of \d+ tokens.*take tokenizer.json"),
        (changed(lambda data: data + b"!!!! 500\n"), "not a tiktoken file.*truncated"),
        (changed(lambda data: data.replace(base64.b64encode(b"a") + b" ", QQQ)), "256 bytes"),
        (tekken_of(version="v11"), "version 8 or later without special_tokens"),
        (tekken_of(default_vocab_size=10**6), "default_vocab_size of 1000000"),
        (tekken_of(pattern="("), "pattern that splits a text"),
        (tekken_of(special=["<unk>", "<s>", "<s>"]), "token twice"),
        (tekken_of(special=["<unk>", "</s>"]), "no <s>"),
        (tekken_of(default_num_special_tokens="x"), "not a tekken.json.*ValueError"),
    ],
)
def test_a_bad_file(tmp_path, monkeypatch, write, message):
    monkeypatch.setattr(tiktoken, "LLAMA_3_SIZE", len(folders.ranked_tokens()))
    write(tmp_path)
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.from_folder(tmp_path)
    assert str(next(tmp_path.iterdir())) in str(caught.value)
