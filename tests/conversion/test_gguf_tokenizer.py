"""The tokenizer in a GGUF file: tokens, types, scores or merges, special ids and templates, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
import tokenizers

from ligermodels.checkpoint.files import read_json
from ligermodels.conversion import Options, convert
from ligermodels.errors import CheckpointError, TokenizerError
from ligermodels.text import Tokenizer
from tests.conversion.gguf_files import CHAT, SPECIALS, fields_of, small_model, to_gguf, tokenizer_folder
from tests.text import families, folders

TYPES = {"normal": 1, "unknown": 2, "control": 3, "user defined": 4, "unused": 5, "byte": 6}


def converted(tmp_path: Path, kind: str, change=lambda folder: None) -> tuple[Tokenizer, dict]:
    """The tokenizer of a small model, after `change` was applied to its folder, and the keys of the GGUF file."""
    folder = small_model(tmp_path / "source", kind)
    change(folder)
    to_gguf(folder, tmp_path / "out.gguf")
    return Tokenizer.from_folder(folder), fields_of(tmp_path / "out.gguf")


def remove(*patterns: str):
    def change(folder: Path) -> None:
        for pattern in patterns:
            for path in folder.glob(pattern):
                path.unlink()

    return change


@pytest.mark.parametrize(
    "kind, removed",
    [
        ("llama 2", ()), ("mistral 0.3", ()), ("gemma 2", ()), ("llama 2", ("tokenizer.json",)),
        ("llama 2", ("tokenizer.model",)), ("gemma 2", ("tokenizer.model",)),
    ],
    ids=str,
)  # fmt: skip
def test_sentencepiece(tmp_path, kind, removed):
    tokenizer, fields = converted(tmp_path, kind, remove(*removed))
    native = sentencepiece.SentencePieceProcessor(str(tokenizer_folder(kind) / "tokenizer.model"))
    tokens, types, scores = (fields[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "scores"))
    assert len(tokens) == len(types) == len(scores) == tokenizer.vocab_size + 8 == len(set(tokens))
    assert tokens[-8:] == [f"[PAD{len(tokens) - 8 + i}]" for i in range(8)] and types[-8:] == [TYPES["unused"]] * 8
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("llama", "default")
    for index in range(native.get_piece_size()):
        text = tokenizer.backend.id_to_token(index)
        if native.is_unknown(index):
            expected = {"unknown"}
        elif native.is_byte(index):
            expected = {"byte"}
        elif native.is_control(index) or index in tokenizer.backend.special_ids:
            expected = {"control"}
        else:
            expected = {"normal", "user defined"}
        assert types[index] in {TYPES[name] for name in expected}, text
        assert tokens[index] == (text.replace("▁", " ") if types[index] == TYPES["user defined"] else text)
    normal = [index for index in range(native.get_piece_size()) if types[index] == TYPES["normal"]]
    if "tokenizer.model" not in removed:
        assert [scores[index] for index in normal] == [native.get_score(index) for index in normal]
    else:  # scores made from the merges order the pieces as the model's own do
        merged = [index for index in normal if len(tokens[index]) > 1]
        assert sorted(merged, key=lambda i: -scores[i]) == sorted(merged, key=lambda i: -native.get_score(i))
    gemma = kind.startswith("gemma")
    assert fields["tokenizer.ggml.add_space_prefix"] is not gemma
    assert fields["tokenizer.ggml.add_bos_token"] is True and fields["tokenizer.ggml.add_eos_token"] is False
    ids = {key: fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "unknown", "padding", "eot")}
    assert ids == {
        "bos": native.bos_id(), "eos": native.eos_id(), "unknown": native.unk_id(), "padding": 0 if gemma else None,
        "eot": 107 if gemma else None,
    }  # fmt: skip
    assert fields["tokenizer.chat_template"] == tokenizer.files.templates["default"]


@pytest.mark.parametrize(
    "kind, split",
    [("llama 3", "llama-bpe"), ("nemo", "tekken"), ("qwen 2", "qwen2"), ("phi 4", "dbrx"), ("phi 4 mini", "gpt-4o")],
)
def test_byte_level(tmp_path, kind, split):
    _, fields = converted(tmp_path, kind)
    native = tokenizers.Tokenizer.from_file(str(tokenizer_folder(kind) / "tokenizer.json"))
    model = read_json(tokenizer_folder(kind) / "tokenizer.json")["model"]
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("gpt2", split)
    assert tokens[:-8] == [native.id_to_token(index) for index in range(native.get_vocab_size())]
    added = native.get_added_tokens_decoder()
    for index, found in enumerate(types[:-8]):
        expected = ("control" if added[index].special else "user defined") if index in added else "normal"
        assert found == TYPES[expected], tokens[index]
    assert types[-8:] == [TYPES["unused"]] * 8
    assert fields["tokenizer.ggml.merges"] == [" ".join(pair) for pair in model["merges"]]
    assert "tokenizer.ggml.scores" not in fields and "tokenizer.ggml.add_space_prefix" not in fields
    ids = [fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot")]
    assert ids == ([1, 2, None] if kind == "nemo" else [420, 421, 422])
    assert fields["tokenizer.ggml.add_bos_token"] is True and fields["tokenizer.ggml.add_eos_token"] is False


@pytest.mark.slow  # a vocabulary of 32064
def test_phi_3_is_named(tmp_path):
    """llama.cpp strips the white space after special tokens only for models with Phi-3 in their name."""
    tokenizer = families.FAMILIES["phi 3"].build(tmp_path / "tokenizer")
    folder = small_model(tmp_path / "tuned", "llama 2", "phi3", rows=32064)
    remove("tokenizer*", "special*")(folder)
    shutil.copytree(tokenizer, folder, ignore=shutil.ignore_patterns("config.json", "gen*"), dirs_exist_ok=True)
    to_gguf(folder, tmp_path / "out.gguf")
    fields = fields_of(tmp_path / "out.gguf")
    assert fields["general.name"] == "tuned (Phi-3)" and fields["tokenizer.ggml.add_bos_token"] is False
    ids = [fields[f"tokenizer.ggml.{key}_token_id"] for key in ("bos", "eos", "unknown", "padding")]
    assert ids == [1, 32000, 0, 32000]
    types = fields["tokenizer.ggml.token_type"]
    assert [types[index] for index in (0, 1, 2, 3, 32000, 32010, 32063)] == [2, 3, 3, 6, 3, 3, 5]


def test_templates_and_tokens_without_a_row(tmp_path):
    rows = Tokenizer.from_folder(tokenizer_folder("llama 3")).vocab_size - 1
    source = small_model(tmp_path / "source", "llama 3", rows=rows)
    (source / "additional_chat_templates").mkdir()
    (source / "chat_template.jinja").write_text(CHAT)
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ 1 }}")
    with pytest.warns(UserWarning, match="tokens 423 to 423 are dropped.*no rows"):
        convert(source, tmp_path / "out.gguf", Options(to="gguf", progress=False))
    fields = fields_of(tmp_path / "out.gguf")
    assert len(fields["tokenizer.ggml.tokens"]) == rows and fields["tokenizer.chat_template"] == CHAT
    assert fields["tokenizer.chat_templates"] == ["tool_use"]
    assert fields["tokenizer.chat_template.tool_use"] == "{{ 1 }}"
    assert Tokenizer.from_hub(tmp_path / "out.gguf").chat_template == {"default": CHAT, "tool_use": "{{ 1 }}"}


# Tokenizers that llama.cpp does not support


def edited(change):
    def apply(folder: Path) -> None:
        state = read_json(folder / "tokenizer.json")
        change(state)
        (folder / "tokenizer.json").write_text(json.dumps(state))

    return apply


def unigram(folder: Path) -> None:
    remove("tokenizer*", "special*")(folder)
    folders.sentencepiece_folder(folder, folders.sentencepiece_model(model_type="unigram", vocab_size=400))


def drop_a_merge(state: dict) -> None:
    """Removes one of several merges that make the same token, which sentencepiece's own merges never lack."""
    ways = {}
    for pair in state["model"]["merges"]:
        ways.setdefault("".join(pair), []).append(pair)
    state["model"]["merges"].remove(next(pairs for pairs in ways.values() if len(pairs) > 1)[1])


def without_model_file(folder: Path) -> None:
    remove("tokenizer.model")(folder)
    edited(drop_a_merge)(folder)


def word_level(state: dict) -> None:
    vocab = {token: index for index, token in enumerate(("a", "b", *SPECIALS, "<tool call>"))}
    state["model"] = {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
    for token in state["added_tokens"]:
        token["id"] = vocab[token["content"]]
    state["post_processor"] = None


def other_pattern(state: dict) -> None:
    state["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": r"\w+|\W+"}


def lowercase(state: dict) -> None:
    state["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}


def same_text_twice(state: dict) -> None:
    state["added_tokens"].append({"id": 424, **folders.added("[PAD425]")})


def no_merges(state: dict) -> None:
    """llama.cpp reads no such file, and the gguf package drops an empty list."""
    state["model"]["merges"] = []


REFUSED = {
    "none": ("llama 3", remove("tokenizer.json"), CheckpointError, "no tokenizer.json and no tokenizer.model"),
    "unigram": ("llama 3", unigram, TokenizerError, "not of sentencepiece's BPE"),
    "split": (
        "llama 3",
        edited(other_pattern),
        TokenizerError,
        r"the pre-tokenizer of tokenizer.json: .*\\W",
    ),
    "type": ("llama 3", edited(word_level), TokenizerError, "of type 'WordLevel'"),
    "merges": ("llama 2", without_model_file, TokenizerError, "merges"),
    "normalizer": ("llama 3", edited(lowercase), TokenizerError, "the normalizer Lowercase"),
    "no merges": ("llama 3", edited(no_merges), TokenizerError, r"tokenizer\.json has no merges"),
    "same text": ("llama 3", edited(same_text_twice), TokenizerError, "424 and 425 are both"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tokenizers_that_llama_cpp_does_not_support(tmp_path, case):
    kind, change, error, message = REFUSED[case]
    with pytest.raises(error, match=message) as caught:
        converted(tmp_path, kind, change)
    assert str(tmp_path / "source") in str(caught.value) or "tokenizer." in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
