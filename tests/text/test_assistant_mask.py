"""Which tokens are the assistant's, by {% generation %}, against transformers and against text."""

import pytest
import torch

from ligermodels.errors import InputError, TokenizerError
from ligermodels.text import Tokenizer
from ligermodels.text.batch import mask_of
from ligermodels.text.sandbox import SPAN_END, SPAN_START
from tests.text import families
from tests.text.families import TOLD

MARKED = """{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|assistant|>\\n' }}
        {%- generation %}
            {%- if m.thought %}{{- m.thought }}{% endif %}
            {{- m.content + '<|end|>' }}
        {%- endgeneration %}{{ '\\n' }}
    {%- else %}{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endif %}
{%- endfor %}"""
CHATS = [
    TOLD,
    [*TOLD, *TOLD],
    [TOLD[0], {"role": "assistant", "content": "the 🦊 cat.", "thought": " hm\n\n"}],
    [TOLD[0], {"role": "assistant", "content": "  "}, TOLD[0], {"role": "assistant", "content": ""}],
    [TOLD[0]],
]
MASK = {"return_dict": True, "return_assistant_tokens_mask": True}


@pytest.fixture(scope="module", params=["llama 2", "llama 3.1", "mistral 0.3", "gemma 2", "qwen 2", "phi 3", "phi 4"])
def pair(request, folder_of):
    folder = folder_of(request.param)
    ours, theirs = Tokenizer.from_folder(folder), families.theirs(request.param, folder)
    ours.pad_token, theirs.pad_token = ours.eos_token, theirs.eos_token
    return ours, theirs


@pytest.mark.parametrize("chat", CHATS)
def test_agrees_with_transformers(pair, chat):
    ours, theirs = pair
    for options in (
        {},
        {"return_tensors": "pt"},
        {"return_tensors": "pt", "padding": "max_length", "max_length": 60},
        {"truncation": True, "max_length": 9},
        {"padding": "max_length", "max_length": 60},
    ):
        found = ours.apply_chat_template(chat, chat_template=MARKED, **MASK, **options)
        side = {"tokenizer_kwargs": {"padding_side": ours.padding_side}}
        expected = theirs.apply_chat_template(chat, chat_template=MARKED, **MASK, **options, **side)
        assert set(found) == set(expected) == {"input_ids", "attention_mask", "assistant_masks"}
        for name in found:
            same = torch.equal if options.get("return_tensors") else list.__eq__
            assert same(found[name], expected[name]), (name, options)
    # With and without the mask the same ids.
    assert ours.apply_chat_template(chat, chat_template=MARKED) == theirs.apply_chat_template(
        chat, chat_template=MARKED, return_dict=False
    )


def test_says_what_the_assistant_said(pair):
    ours, _ = pair
    texts = ["Yes.", "the 🦊 cat 日本語"]
    chat = [message for text in texts for message in (TOLD[0], {"role": "assistant", "content": text})]
    found = ours.apply_chat_template(chat, chat_template=MARKED, **MASK)
    said = [i for i, mine in zip(found["input_ids"], found["assistant_masks"], strict=True) if mine]
    said = ours.decode(said).replace("<|end|>", "")
    assert said.split() == " ".join(texts).replace(".t", ". t").split() or said.replace(" ", "") == "".join(
        texts
    ).replace(" ", "")


def test_every_token_of_the_last_character(byte_level_folder):
    """transformers leaves out all but the first of them."""
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.from_folder(byte_level_folder), AutoTokenizer.from_pretrained(byte_level_folder)
    template = (
        "{% for m in messages %}<|im_start|>{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>{% endfor %}"
    )
    chat = [{"role": "assistant", "content": "a 🦊"}]
    found = ours.apply_chat_template(chat, chat_template=template, **MASK)
    expected = theirs.apply_chat_template(chat, chat_template=template, **MASK)
    assert found["input_ids"] == expected["input_ids"] and len(found["input_ids"]) > 5
    assert found["assistant_masks"] == [0, *[1] * (len(found["input_ids"]) - 2), 0]
    assert sum(expected["assistant_masks"]) < sum(found["assistant_masks"])


IN_A_MACRO = (
    "{% macro show(m) %}[{{ m.role }}]{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
    "{% for m in messages %}{% set text %}<{{ show(m) }}>{% endset %}{{ text }}{% endfor %}"
)


def test_inside_macros_and_blocks(byte_level_folder):
    """Where the place cannot be counted while the text is made."""
    tokenizer = Tokenizer.from_folder(byte_level_folder)
    chat = [{"role": "assistant", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    found = tokenizer.apply_chat_template(chat, chat_template=IN_A_MACRO, **MASK)
    said = [i for i, mine in zip(found["input_ids"], found["assistant_masks"], strict=True) if mine]
    assert tokenizer.decode(said) == "the catsat"


def test_marks_in_marks_and_around_nothing(byte_level_folder):
    tokenizer = Tokenizer.from_folder(byte_level_folder)
    template = (
        "{% for m in messages %}a{% generation %}{% endgeneration %}b"
        "{% generation %}<|im_start|>{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>{% endgeneration %}c"
        "{% endfor %}"
    )
    chat = [{"role": "assistant", "content": "the"}, {"role": "assistant", "content": ""}]
    found = tokenizer.apply_chat_template(chat, chat_template=template, **MASK)
    said = [i for i, mine in zip(found["input_ids"], found["assistant_masks"], strict=True) if mine]
    assert tokenizer.decode(said) == "<|im_start|>the<|im_end|><|im_start|><|im_end|>"
    whole = tokenizer.decode(found["input_ids"])
    assert whole == "ab<|im_start|>the<|im_end|>cab<|im_start|><|im_end|>c"


def test_from_a_tokenizer_model(folder_of, tmp_path):
    """The places of SentencePiece's pieces, which it does not say itself in every version."""
    for name in ("mistral 0.3", "gemma 2"):
        folder = folder_of(name)
        whole = Tokenizer.from_folder(folder)
        alone = tmp_path / name
        whole.save(alone)
        (alone / "tokenizer.json").unlink()
        ours = Tokenizer.from_folder(alone)
        texts = ["the cat", "a 🦊 b", "the▁cat  x\n", "", "the</s> cat[INST] the", "日本語 <start_of_turn>"]
        for text in texts:
            assert ours.encode(text) == whole.encode(text)
            found = ours(text, return_offsets_mapping=True)
            assert found == whole(text, return_offsets_mapping=True), text
        for chat in CHATS[:4]:
            options = {"chat_template": MARKED, **MASK}
            assert ours.apply_chat_template(chat, **options) == whole.apply_chat_template(chat, **options)


def test_a_tokenizer_model_that_changes_the_text(sentencepiece_folder):
    from tests.text.folders import sentencepiece_model

    model = sentencepiece_model(normalization_rule_name="nmt_nfkc")
    tokenizer = Tokenizer.from_folder(sentencepiece_folder(model))
    assert tokenizer("the cat", return_offsets_mapping=True).offset_mapping[-1][1] == 7
    with pytest.raises(TokenizerError, match=r"changes the text 'ﬁne' before .*take tokenizer.json"):
        tokenizer("ﬁne", return_offsets_mapping=True)


@pytest.mark.parametrize(
    ("template", "content", "words"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "a", r"has no {% generation %}.*TRL"),
        ("{# {% generation %} #}{{ messages[0].content }}", "a", r"has no {% generation %}"),
        ("{% set x %}{% generation %} a {% endgeneration %}{% endset %}{{ x | trim }}", "a", "changes the text"),
        ("{% set x %}{% generation %}ab{% endgeneration %}{% endset %}{{ x | length }}", "a", "changes the text"),
        (
            "{% generation %}{{ messages[0].content }}{% endgeneration %}",
            f"a{SPAN_START}b{SPAN_END}",
            "changes the text",
        ),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", f"a{SPAN_END}b", "without its end"),
        ("{% for m in [1] %}{% generation %}a{% break %}{% endgeneration %}{% endfor %}", "a", "without its end"),
    ],
)
def test_where_it_cannot_be_told(byte_level_folder, template, content, words):
    tokenizer = Tokenizer.from_folder(byte_level_folder)
    chat = [{"role": "assistant", "content": content}]
    with pytest.raises(TokenizerError, match=words):
        tokenizer.apply_chat_template(chat, chat_template=template, **MASK)
    assert isinstance(tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False), str)


def test_arguments_that_exclude_each_other(byte_level_folder):
    tokenizer = Tokenizer.from_folder(byte_level_folder)
    for options in ({}, {"tokenize": False, "return_dict": True}):
        with pytest.raises(InputError, match="return_dict=True"):
            tokenizer.apply_chat_template(TOLD, return_assistant_tokens_mask=True, **options)
    with pytest.raises(TokenizerError, match="no assistant mask"):
        tokenizer.apply_chat_template(TOLD, chat_template=MARKED, continue_final_message=True, **MASK)
    with pytest.raises(InputError, match="give one"):
        tokenizer.apply_chat_template(TOLD, chat_template=MARKED, template=MARKED)


def test_return_types(pair):
    """Ids, a dict of lists, and tensors with a row, as transformers returns them."""
    ours, theirs = pair
    ids = ours.apply_chat_template(TOLD, chat_template=MARKED)
    for options in ({"return_dict": True}, {"return_dict": True, "return_tensors": "pt"}, {"return_tensors": "pt"}):
        found = ours.apply_chat_template(TOLD, chat_template=MARKED, **options)
        expected = theirs.apply_chat_template(TOLD, chat_template=MARKED, **{"return_dict": False, **options})
        found, expected = (x if "return_dict" in options else {"input_ids": x} for x in (found, expected))
        assert set(found) == set(expected)
        for name in found:
            assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(expected[name]))
            assert type(found[name]) is type(expected[name])
    assert found["input_ids"].tolist() == [ids]


def test_tokens_without_characters_and_at_the_borders():
    """A token of the space that a decoder takes off has none of the text; one across a border has both."""
    offsets = [(0, 0), (0, 2), (2, 2), (2, 5), (4, 6), (6, 6), (6, 7), (0, 0)]
    assert mask_of(offsets[:-1], [(2, 5), (6, 7)]) == [0, 0, 1, 1, 1, 1, 1]
    assert mask_of(offsets[:-1], [(0, 1)]) == [1, 1, 0, 0, 0, 0, 0]
    assert mask_of(offsets[:-1], [(5, 6)]) == [0, 0, 0, 0, 1, 0, 0]
    assert mask_of(offsets, []) == [0] * 8 and mask_of([], [(0, 1)]) == []
