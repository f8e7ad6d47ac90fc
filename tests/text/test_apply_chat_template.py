"""apply_chat_template against transformers: templates by conversations by options, and where ours differs."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from ligermodels import errors
from ligermodels.errors import InputError, TokenizerError
from ligermodels.text import Tokenizer
from tests.text.templates import CALL, CONVERSATIONS, OPTIONS, QWEN_3, SAID, SYSTEM, TEMPLATES, USER

MASK = {"return_dict": True, "return_assistant_tokens_mask": True}


@pytest.fixture(scope="module")
def pair(byte_level_folder):
    ours, theirs = Tokenizer.from_folder(byte_level_folder), AutoTokenizer.from_pretrained(byte_level_folder)
    ours.pad_token, theirs.pad_token = ours.eos_token, theirs.eos_token
    return ours, theirs


def outcome(call):
    """What a call returns, or that it refuses."""
    try:
        return call()
    except Exception:
        return "refused"


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_texts_are_those_of_transformers(pair, template, conversation):
    refused = 0
    for options in OPTIONS:
        given = {"chat_template": TEMPLATES[template], "tokenize": False, **options}
        expected = outcome(lambda: pair[1].apply_chat_template(CONVERSATIONS[conversation], **given))  # noqa: B023
        found = outcome(lambda: pair[0].apply_chat_template(CONVERSATIONS[conversation], **given))  # noqa: B023
        # transformers refuses to go on with a message that the template prints otherwise.
        if not (expected == "refused" and "continue_final_message" in options):
            assert found == expected, options
        assert "None" not in found
        refused += expected == "refused"
    assert refused < len(OPTIONS) or template == "gemma 3" or conversation in ("content None", "two tool calls")


def tokenized(tokenizer, chats, **options):
    found = tokenizer.apply_chat_template(chats, chat_template=QWEN_3, **options)
    columns = found if options["return_dict"] else {"input_ids": found}
    return {name: (type(rows).__name__, torch.as_tensor(rows).tolist()) for name, rows in columns.items()}


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"return_tensors": "pt", "padding": True},
        {"return_tensors": "np", "padding": "max_length", "max_length": 400},
        {"return_tensors": "pt", "truncation": True, "max_length": 12},
        {"padding": True, "tokenizer_kwargs": {"padding_side": "left", "pad_to_multiple_of": 8}},
        {"padding": True, "tokenizer_kwargs": {"return_offsets_mapping": True}},
        {"padding": True, "add_generation_prompt": True, "tokenizer_kwargs": {"return_attention_mask": False}},
    ],
    ids=str,
)
def test_tokens_are_those_of_transformers(pair, batched, options):
    chats = [CONVERSATIONS[name] for name in ("system", "reasoning", "a tool call")]
    for kind in ({"return_dict": True}, {"return_dict": False}, MASK):
        for given in [chats] if batched else chats:
            found, expected = (tokenized(tokenizer, given, **options, **kind) for tokenizer in pair)
            assert found == expected
            if "return_assistant_tokens_mask" in kind and not options.get("truncation"):
                assert 1 in np.ravel(found["assistant_masks"][1])


def test_batches(pair):
    chats = [CONVERSATIONS["system"], [USER]]
    for tokenizer in pair:
        texts = tokenizer.apply_chat_template(chats, chat_template=QWEN_3, tokenize=False)
        assert texts == [tokenizer.apply_chat_template(chat, chat_template=QWEN_3, tokenize=False) for chat in chats]
        rows = tokenizer.apply_chat_template(conversation=tuple(chats), chat_template=QWEN_3, return_dict=False)
        assert rows == [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    with pytest.raises(InputError, match="rows of different lengths"):
        pair[0].apply_chat_template(chats, return_tensors="pt")


def test_the_default_is_a_list_of_ids(pair):
    """transformers 5 returns a dict; ids are what README and the examples of ours take."""
    ids = pair[0].apply_chat_template([USER])
    assert ids == pair[1].apply_chat_template([USER])["input_ids"] == pair[0].apply_chat_template(messages=[USER])


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("template", TEMPLATES)
def test_parts(pair, template):
    """A template that prints parts gets them; another gets their texts, joined."""
    ours, theirs = pair
    given = {"chat_template": TEMPLATES[template], "tokenize": False}
    plain = [SYSTEM, {"role": "user", "content": "On the mat"}, SAID]
    in_parts = [message | {"content": parts(message["content"])} for message in plain]
    text = theirs.apply_chat_template(plain, **given)
    assert ours.apply_chat_template(in_parts, **given) == text
    in_parts[1]["content"] = parts("On", " the mat")
    for options in ({}, {"continue_final_message": True}):
        expected = theirs.apply_chat_template(plain, **options, **given)
        if template == "gemma 3":  # it trims each part
            expected = expected.replace("On the mat", "Onthe mat")
            assert theirs.apply_chat_template(in_parts, **options, **given) == expected
        assert ours.apply_chat_template(in_parts, **options, **given) == expected


def test_parts_that_a_template_reads_in_part(pair):
    """Of a system message in parts, Gemma 3's template prints the first alone: ours joins them."""
    chat = [{"role": "system", "content": parts("a", "b")}, USER]
    text = pair[0].apply_chat_template(chat, chat_template=TEMPLATES["gemma 3"], tokenize=False)
    assert text == "<|begin|><start_of_turn>user\nab\n\nWhere is the mat?<end_of_turn>\n"
    assert chat[0]["content"] == parts("a", "b")


def test_images_stay_parts(pair):
    content = [{"type": "image"}, *parts("what?")]
    for tokenizer in pair:
        text = tokenizer.apply_chat_template(
            [SYSTEM | {"content": parts("a")}, {"role": "user", "content": content}],
            chat_template=TEMPLATES["gemma 3"],
            tokenize=False,
        )
        assert text == "<|begin|><start_of_turn>user\na\n\n<image>what?<end_of_turn>\n"
        # A template without images does not get the texts around them alone.
        for image in ({"type": "image"}, {"type": "image", "text": "a mat"}):
            chat = [{"role": "user", "content": [image, *parts("what?")]}]
            text = tokenizer.apply_chat_template(chat, chat_template=QWEN_3, tokenize=False)
            assert text == "<|im_start|>user\n<|im_end|>\n"


def test_continue_a_field(pair):
    chat = [USER, {"role": "assistant", "content": "", "reasoning": "First, "}]
    for field in ("reasoning_content", "reasoning", "thinking"):
        for tokenizer in pair:
            text = tokenizer.apply_chat_template(
                chat, chat_template=QWEN_3, continue_final_message=field, tokenize=False
            )
            assert text.endswith("<|im_start|>assistant\n<think>\nFirst, ")
    with pytest.raises(TokenizerError, match="last message whose thought has text"):
        pair[0].apply_chat_template(chat, continue_final_message="thought")


def test_objects_in_messages(pair):
    """Numbers of numpy and torch, dataclasses and pydantic models are plain values for a template."""

    @dataclasses.dataclass
    class Function:
        name: str
        arguments: dict

    class Model:
        def model_dump(self):
            return {"function": Function("find", {"a": np.int64(3), "b": np.bool_(False), "c": np.float32(0.5)})}

    chat = [USER, {"role": "assistant", "content": "", "tool_calls": [Model()]}]
    given = {"chat_template": QWEN_3, "tokenize": False}
    text = pair[0].apply_chat_template(chat, **given)
    assert text == pair[1].apply_chat_template(chat, **given)
    assert '{"name": "find", "arguments": {"a": 3, "b": false, "c": 0.5}}' in text


def test_variables(pair):
    for tokenizer in pair:
        for thinks in (True, False):
            text = tokenizer.apply_chat_template(
                [USER], chat_template=QWEN_3, tokenize=False, add_generation_prompt=True, enable_thinking=thinks
            )
            assert text.endswith("\n\n</think>\n\n") is not thinks
        given = {"chat_template": TEMPLATES["llama 3"], "tokenize": False, "bos_token": "<B>", "date_string": "today"}
        assert tokenizer.apply_chat_template([USER], **given).startswith("<B><|start_header_id|>system")
        assert "Today Date: today\n" in tokenizer.apply_chat_template([USER], **given)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            {"add_generation_promt": True},
            r"'add_generation_promt' is no argument .* nearest .* 'add_generation_prompt'",
        ),
        ({"enable_thinkin": False}, r"the chat template that was passed does not read it.*'enable_thinking'"),
        ({"sanitise": True}, r"'sanitise' .* Variables of the template: \['enable_th"),
        ({"enable_thinking": False, "chat_template": TEMPLATES["mistral"]}, "'enable_thinking' is no argument"),
    ],
)
def test_a_variable_that_is_not_read_is_told_once_and_changes_nothing(pair, monkeypatch, call, message):
    monkeypatch.setattr(errors, "_warned", set())
    given = {"conversation": [USER], "chat_template": QWEN_3, "tokenize": False, **call}
    with pytest.warns(UserWarning, match=message) as told:
        found = [pair[0].apply_chat_template(**given) for _ in range(2)]
    assert len(told) == 1 and found == [pair[1].apply_chat_template(**given)] * 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"conversation": []}, "at least one message"),
        ({"conversation": [[USER], []]}, "at least one message"),
        ({"conversation": None}, "takes a conversation"),
        ({"messages": [USER]}, "given once"),
        ({"tools": CALL}, "tools must be a list"),
        ({"tools": [len]}, "a tool is a JSON schema .* not <built-in function len>"),
        ({"tools": [lambda a: a]}, "has no docstring"),
        ({"tokenizer_kwargs": {"stride": 1}}, r"tokenizer_kwargs can have .* not \['stride'\]"),
        ({"documents": ["a"]}, "documents must be a list of dicts"),
        ({"conversation": [[USER], USER]}, "messages must be a list of dicts"),
        ({"continue_final_message": True, "return_dict": True, "return_assistant_tokens_mask": True}, "the assistant"),
    ],
)
def test_wrong_arguments(pair, call, message):
    with pytest.raises((InputError, TokenizerError), match=message):
        pair[0].apply_chat_template(**{"conversation": [USER], "chat_template": QWEN_3, **call})
