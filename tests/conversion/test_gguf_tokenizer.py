"""The tokenizer in a GGUF file: tokens, types, scores or merges, special ids and templates, and what is refused."""

import json
import shutil
import unicodedata
from pathlib import Path

import pytest
import sentencepiece
import tokenizers

from ligermodels.checkpoint.files import read_json
from ligermodels.conversion import Options, convert
from ligermodels.errors import CheckpointError, TokenizerError
from ligermodels.text import Tokenizer
from tests.conversion.gguf_files import (
    CHAT,
    KINDS,
    SPECIALS,
    TEXTS,
    fields_of,
    rewritten,
    rows_of,
    small_model,
    to_gguf,
    tokenizer_folder,
)
from tests.text import families, folders

TYPES = {"normal": 1, "unknown": 2, "control": 3, "user defined": 4, "unused": 5, "byte": 6}


def converted(tmp_path: Path, kind: str, change=lambda folder: None) -> tuple[Tokenizer, dict]:
    """The tokenizer of a small model, after `change` was applied to its folder, and the keys of the GGUF file."""
    family = ("gemma4_text", {"hidden_size_per_layer_input": 0}) if kind == "gemma 4" else ("llama", {})
    folder = small_model(tmp_path / "source", kind, family[0], **family[1])
    change(folder)
    to_gguf(folder, tmp_path / "out.gguf")
    fields = fields_of(tmp_path / "out.gguf")
    return Tokenizer.from_folder(folder), {name.removeprefix("tokenizer.ggml."): x for name, x in fields.items()}


def remove(*patterns: str):
    return lambda folder: [path.unlink() for pattern in patterns for path in folder.glob(pattern)]


@pytest.mark.parametrize(
    "kind, removed",
    [("llama 2", ""), ("mistral 0.3", ""), ("gemma 2", ""), ("llama 2", "tokenizer.json"),
     ("llama 2", "tokenizer.model"), ("gemma 2", "tokenizer.model")],
)  # fmt: skip
def test_sentencepiece(tmp_path, kind, removed):
    tokenizer, fields = converted(tmp_path, kind, remove(*[removed] * bool(removed)))
    native = sentencepiece.SentencePieceProcessor(str(tokenizer_folder(kind) / "tokenizer.model"))
    tokens, types, scores = (fields[key] for key in ("tokens", "token_type", "scores"))
    assert len(tokens) == len(types) == len(scores) == tokenizer.vocab_size + 8 == len(set(tokens))
    assert tokens[-8:] == [f"[PAD{len(tokens) - 8 + i}]" for i in range(8)] and types[-8:] == [TYPES["unused"]] * 8
    for index in range(native.get_piece_size()):
        text, expected = tokenizer.backend.id_to_token(index), {"normal", "user defined"}
        if native.is_unknown(index) or native.is_byte(index):
            expected = {"unknown" if native.is_unknown(index) else "byte"}
        elif native.is_control(index) or index in tokenizer.backend.special_ids:
            expected = {"control"}
        assert types[index] in {TYPES[name] for name in expected}, text
        assert tokens[index] == (text.replace("▁", " ") if types[index] == TYPES["user defined"] else text)
    normal = [index for index in range(native.get_piece_size()) if types[index] == TYPES["normal"]]
    if removed != "tokenizer.model":
        assert [scores[index] for index in normal] == [native.get_score(index) for index in normal]
    else:  # scores made from the merges order the pieces as the model's own do
        merged = [index for index in normal if len(tokens[index]) > 1]
        assert sorted(merged, key=lambda i: -scores[i]) == sorted(merged, key=lambda i: -native.get_score(i))
    gemma = kind.startswith("gemma")
    wanted = {
        "model": "llama", "pre": "default", "add_space_prefix": not gemma, "add_bos_token": True,
        "add_eos_token": False, "bos_token_id": native.bos_id(), "eos_token_id": native.eos_id(),
        "unknown_token_id": native.unk_id(), "padding_token_id": 0 if gemma else None,
        "eot_token_id": 107 if gemma else None, "tokenizer.chat_template": tokenizer.files.templates["default"],
    }  # fmt: skip
    assert {key: fields.get(key) for key in wanted} == wanted


@pytest.mark.parametrize(
    "kind, split",
    [
        ("llama 3", "llama-bpe"),
        ("nemo", "tekken"),
        ("qwen 2", "qwen2"),
        ("qwen 3.5", "qwen35"),
        ("phi 4", "dbrx"),
        ("phi 4 mini", "gpt-4o"),
        ("harmony", "gpt-4o"),
    ],
)
def test_byte_level(tmp_path, kind, split):
    _, fields = converted(tmp_path, kind)
    native = tokenizers.Tokenizer.from_file(str(tokenizer_folder(kind) / "tokenizer.json"))
    added = native.get_added_tokens_decoder()
    assert fields["tokens"][:-8] == [native.id_to_token(index) for index in range(native.get_vocab_size())]
    assert (
        fields["token_type"]
        == [
            TYPES[("control" if added[index].special else "user defined") if index in added else "normal"]
            for index in range(native.get_vocab_size())
        ]
        + [TYPES["unused"]] * 8
    )
    merges = read_json(tokenizer_folder(kind) / "tokenizer.json")["model"]["merges"]
    bos, eos, eot = {"nemo": [1, 2, None], "harmony": [420, 422, None]}.get(kind, [420, 421, 422])
    wanted = {
        "model": "gpt2", "pre": split, "merges": [" ".join(pair) for pair in merges], "scores": None,
        "add_space_prefix": None, "bos_token_id": bos, "eos_token_id": eos, "eot_token_id": eot,
        "add_bos_token": kind != "harmony", "add_eos_token": False,
    }  # fmt: skip
    assert {key: fields.get(key) for key in wanted} == wanted


def test_the_ends_of_harmony(tmp_path):
    """<|return|>, <|call|> and <|endoftext|> end an answer, and <|end|> does not."""
    source = small_model(tmp_path / "source", "harmony")
    shutil.copy(tokenizer_folder("harmony") / "generation_config.json", source)
    to_gguf(source, tmp_path / "out.gguf")
    fields = fields_of(tmp_path / "out.gguf")
    found = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom", "padding")}
    assert found == {"bos": 420, "eos": 422, "eot": 428, "eom": 421, "padding": 421}
    there, back = Tokenizer.from_folder(source), Tokenizer.from_hub(tmp_path / "out.gguf")
    assert set(back.chat_stop_ids) == set(there.chat_stop_ids) == {421, 422, 428}
    chat = [{"role": "user", "content": "the the"}]
    assert back.apply_chat_template(chat) == there.apply_chat_template(chat)


def test_gemma_4(tmp_path):
    """Tokens with merges: runs of spaces are made by them, and some special tokens are shown."""
    visible = edited(lambda state: state["added_tokens"].append({"id": 680, **folders.added("<|channel>")}))
    _, fields = converted(tmp_path, "gemma 4", visible)
    state = read_json(tmp_path / "source" / "tokenizer.json")
    added = {token["id"]: token["special"] for token in state["added_tokens"]}
    for index, (token, kind) in enumerate(zip(fields["tokens"][:681], fields["token_type"], strict=False)):
        expected = "control" if added.get(index) else "user defined" if index in added else "normal"
        if index in (3, 680):
            expected = "unknown" if index == 3 else "user defined"
        elif token.startswith("<0x"):
            expected = "byte"
        elif token.startswith("▁▁"):
            expected = "normal"
        assert kind == TYPES[expected], token
    assert fields["tokens"][680] == "<|channel>" and "▁▁" in fields["tokens"] and "\n\n" in fields["tokens"]
    wanted = {
        "model": "gemma4", "pre": None, "merges": [" ".join(pair) for pair in state["model"]["merges"]],
        "add_space_prefix": False, "add_bos_token": True, "add_eos_token": False, "unknown_token_id": 3,
    }  # fmt: skip
    assert {key: fields.get(key) for key in wanted} == wanted


def test_a_gemma_4_without_bos(tmp_path):
    with pytest.warns(UserWarning, match="llama.cpp adds BOS to every text of a Gemma 4; this tokenizer does not"):
        ours, fields = converted(tmp_path, "gemma 4", edited(lambda state: state.update(post_processor=None)))
    assert not fields["add_bos_token"] and ours.encode("a")[0] != 2
    assert Tokenizer.from_hub(tmp_path / "out.gguf").encode("a") == [2, *ours.encode("a")]


def test_an_unknown_token_that_is_typed_as_a_control_token(tmp_path):
    """As llama.cpp's converter types that of Gemma 3."""
    ours, fields = converted(tmp_path, "gemma 2")
    assert fields["token_type"][3] == TYPES["unknown"] and fields["unknown_token_id"] == 3

    def change(fields):
        fields["tokenizer.ggml.token_type"][0][3] = TYPES["control"]

    rewritten(tmp_path / "out.gguf", tmp_path / "control.gguf", change)
    read = Tokenizer.from_hub(tmp_path / "control.gguf")
    assert [read.encode(text) for text in (*TEXTS, "a<unk>")] == [ours.encode(text) for text in (*TEXTS, "a<unk>")]
    assert read.backend.special_ids == ours.backend.special_ids and read.files.named["unk_token"] == "<unk>"


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokenizer_that_is_read_gives_the_same_ids(tmp_path, kind):
    ours, _ = converted(tmp_path, kind)
    read = Tokenizer.from_hub(tmp_path / "out.gguf")
    # llama.cpp puts the dummy prefix before a text that begins with a space and after a special token, too.
    odd = ("▁already▁there", "</s>the") if kind == "mistral 0.3" else ()
    for text in (*TEXTS, "x<|eot|> y", "½ 7 77 777 7777"):
        # The source has no NFC, which Qwen's own tokenizers have.
        ids = ours.encode(unicodedata.normalize("NFC", text) if kind.startswith("qwen") else text)
        if text not in odd:
            assert read.encode(text) == ids, text
            assert read.decode(ids) == ours.decode(ids)
    assert read.backend.special_ids == ours.backend.special_ids
    if kind in ("llama 3", "phi 4"):
        merges = [json.loads(one.backend.to_json())["model"]["ignore_merges"] for one in (read, ours)]
        assert merges == [kind == "llama 3"] * 2
    for name in ("bos_token_id", "eos_token_id", "chat_stop_ids", "chat_template"):
        assert getattr(read, name) == getattr(ours, name), name


def test_what_an_older_file_leaves_out(tmp_path):
    """Without the keys, BOS is added for Llama 3 and texts are split as llama.cpp's "default" does."""
    ours, _ = converted(tmp_path, "llama 3")
    old, model = tmp_path / "old.gguf", tmp_path / "out.gguf"
    rewritten(model, old, lambda fields: fields.pop("tokenizer.ggml.add_bos_token"))
    assert Tokenizer.from_hub(old).encode("the") == ours.encode("the")
    rewritten(model, old, lambda fields: fields.pop("tokenizer.ggml.pre"))
    split = Tokenizer.from_hub(old).backend._native.pre_tokenizer
    pieces = [piece for piece, _ in split.pre_tokenize_str("it's 12345, a+b\u00b2")]
    assert pieces == ["it", "'", "s", "\u0120", "123", "45", ",", "\u0120a", "+", "b", "\u00c2\u00b2"]


def test_several_stop_ids(tmp_path):
    source = small_model(tmp_path / "hf", "llama 3")
    (source / "generation_config.json").write_text('{"eos_token_id": [421, 7, 422]}')
    to_gguf(source, tmp_path / "model.gguf")
    assert sorted(Tokenizer.from_hub(tmp_path / "model.gguf").eos_token_ids) == [7, 421, 422]
    (source / "generation_config.json").write_text('{"eos_token_id": [421, 7, 8, 422]}')
    with pytest.warns(UserWarning, match=r"three stop ids; \[7\] are dropped"):
        to_gguf(source, tmp_path / "model.gguf", overwrite=True)


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
    rows = rows_of("llama 3") - 9
    source = small_model(tmp_path / "source", "llama 3", rows=rows)
    (source / "additional_chat_templates").mkdir()
    (source / "chat_template.jinja").write_text(CHAT)
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ 1 }}")
    with pytest.warns(UserWarning, match="tokens 423 to 423 are dropped.*no rows"):
        convert(source, tmp_path / "out.gguf", Options(progress=False))
    fields = fields_of(tmp_path / "out.gguf")
    assert len(fields["tokenizer.ggml.tokens"]) == rows and fields["tokenizer.chat_templates"] == ["tool_use"]
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


def one_merge_less(folder: Path) -> None:
    """Removes one of several merges that make the same token, which sentencepiece's own merges never lack."""
    remove("tokenizer.model")(folder)
    state, ways = read_json(folder / "tokenizer.json"), {}
    for pair in state["model"]["merges"]:
        ways.setdefault("".join(pair), []).append(pair)
    state["model"]["merges"].remove(next(pairs for pairs in ways.values() if len(pairs) > 1)[1])
    (folder / "tokenizer.json").write_text(json.dumps(state))


def word_level(state: dict) -> None:
    vocab = {token: index for index, token in enumerate(("a", "b", *SPECIALS, "<tool call>"))}
    state["model"] = {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
    for token in state["added_tokens"]:
        token["id"] = vocab[token["content"]]
    state["post_processor"] = None


LOWERCASE = {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}
SPLIT = {"Regex": r"\w+|\W+"}
REFUSED = [
    (remove("tokenizer.json"), CheckpointError, "no tokenizer.json and no tokenizer.model"),
    (unigram, TokenizerError, "not of sentencepiece's BPE"),
    (one_merge_less, TokenizerError, "merges"),
    (edited(lambda state: state["pre_tokenizer"]["pretokenizers"][0].update(pattern=SPLIT)), TokenizerError,
     r"the pre-tokenizer of tokenizer.json: .*\\W"),
    (edited(word_level), TokenizerError, "of type 'WordLevel'"),
    (edited(lambda state: state.update(normalizer=LOWERCASE)), TokenizerError, "the normalizer Lowercase"),
    (edited(lambda state: state["model"].update(merges=[])), TokenizerError, r"tokenizer\.json has no merges"),
    (edited(lambda state: state["added_tokens"].append({"id": 424, **folders.added("[PAD425]")})), TokenizerError,
     "424 and 425 are both"),
]  # fmt: skip


def test_a_gemma_4_without_merges(tmp_path):
    def scores_alone(folder: Path) -> None:
        shutil.copy(tokenizer_folder("gemma 2") / "tokenizer.model", folder)
        (folder / "tokenizer.json").unlink()

    with pytest.raises(TokenizerError, match="a Gemma 4 with merges and bytes alone"):
        converted(tmp_path, "gemma 4", scores_alone)


@pytest.mark.parametrize("change, error, message", REFUSED)
def test_tokenizers_that_llama_cpp_does_not_support(tmp_path, change, error, message):
    with pytest.raises(error, match=message) as caught:
        converted(tmp_path, "llama 2" if change is one_merge_less else "llama 3", change)
    assert str(tmp_path / "source") in str(caught.value) or "tokenizer." in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
