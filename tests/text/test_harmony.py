"""Answers in the harmony format: what a reader sees, and what later turns have."""

import pytest

from ligermodels.text import Tokenizer
from ligermodels.text.harmony import HarmonyDecoder
from tests.text.folders import harmony
from tests.text.templates import HARMONY

ANALYSIS = "<|channel|>analysis<|message|>déjà 🦊<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>the cat 日本\n"
CALL = '<|start|>assistant<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"a": 1}<|call|>'
ANSWERS = {
    "both": (ANALYSIS + FINAL + "<|return|>", "[analysis] déjà 🦊\n[final] the cat 日本\n", "the cat 日本\n"),
    "no end": (ANALYSIS + FINAL, "[analysis] déjà 🦊\n[final] the cat 日本\n", "the cat 日本\n"),
    "two answers": (
        FINAL.removeprefix("<|start|>assistant") + "<|end|>" + FINAL, "[final] the cat 日本\n\n[final] the cat 日本\n",
        "the cat 日本\nthe cat 日本\n",
    ),
    "a call": (ANALYSIS + CALL, '[analysis] déjà 🦊\n[commentary to=functions.find json] {"a": 1}', ""),
    "a call as templates write it": (
        ' to=functions.find<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        '[to=functions.find commentary json] {"a": 1}', "",
    ),
    "cut in a header": (ANALYSIS + "<|start|>assistant<|channel|>", "[analysis] déjà 🦊", ""),
    "cut in the first header": ("<|channel|>analysis", "", ""),
    "another format": (" the cat sat<|return|>", " the cat sat", " the cat sat"),
    "nothing": ("", "", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(tmp_path, name):
    answer, shown, content = ANSWERS[name]
    tokenizer = Tokenizer.from_folder(harmony(tmp_path, HARMONY))
    decoder = HarmonyDecoder(tokenizer)
    ids = tokenizer.encode(answer, add_special_tokens=False)
    text = "".join(map(decoder.put, ids)) + decoder.flush()
    assert (text, decoder.content) == (shown, content)


THOUGHT = {"thinking": "déjà 🦊"}
ONE_CALL = {"tool_calls": [{"type": "function", "function": {"name": "find", "arguments": {"a": 1}}}]}
MESSAGES = {
    "both": THOUGHT, "no end": THOUGHT, "two answers": {}, "a call": THOUGHT | ONE_CALL,
    "a call as templates write it": ONE_CALL, "cut in a header": THOUGHT, "cut in the first header": {},
    "another format": {}, "nothing": {},
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_folder(harmony(tmp_path_factory.mktemp("harmony"), HARMONY))


def message_of(tokenizer, answer):
    decoder = HarmonyDecoder(tokenizer)
    for index in tokenizer.encode(answer, add_special_tokens=False):
        decoder.put(index)
    decoder.flush()
    return decoder.message


@pytest.mark.parametrize("name", ANSWERS)
def test_messages(tokenizer, name):
    answer, _, content = ANSWERS[name]
    assert message_of(tokenizer, answer) == {"role": "assistant", "content": content.strip(), **MESSAGES[name]}


def test_parts_of_messages(tokenizer):
    thoughts = "<|channel|>analysis<|message|>the cat <|end|><|start|>assistant<|channel|>analysis<|message|>sat<|end|>"
    call = "<|start|>assistant to=functions.f.g<|channel|>commentary json<|message|>{sat<|call|>"
    message = message_of(tokenizer, thoughts + call)
    assert message["thinking"] == "the cat sat" and message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "f.g", "arguments": "{sat"}
    shown = "<|channel|>commentary<|message|>the cat<|end|>"  # before calls, for the user, and no answer
    assert message_of(tokenizer, shown) == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("name", ["both", "no end", "a call as templates write it"])
def test_messages_are_those_of_trl(tokenizer, tmp_path, name):
    """With the response template that its trainer takes for gpt-oss."""
    utils = pytest.importorskip("trl.chat_template_utils")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(harmony(tmp_path, HARMONY))
    theirs.response_template = utils.gptoss_template
    user = [{"role": "user", "content": "the cat"}]
    prompt = tokenizer.apply_chat_template(user, add_generation_prompt=True)
    answer = ANSWERS[name][0]
    ids = tokenizer.encode(answer, add_special_tokens=False)
    expected = utils.parse_response(theirs, ids, prefix=prompt)
    assert message_of(tokenizer, answer) == expected
