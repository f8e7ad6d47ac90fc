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
