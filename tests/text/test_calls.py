"""Calls of a tokenizer against transformers' on the same files, option by option."""

import itertools
import warnings

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from transformers import AutoTokenizer

from ligermodels.errors import InputError
from ligermodels.text import Tokenizer
from ligermodels.text.batch import mask_of
from tests.text import families

TEXTS = ["the cat sat on the mat", "the", "numbers like 3, 14 🦊\n", ""]
CALLS = [
    {},
    {"padding": "longest", "padding_side": "left"},
    {"padding": "max_length", "max_length": 9, "truncation": True},
    {"padding": "max_length"},
    {"truncation": True, "max_length": 2},
    {"truncation": True},
    {"max_length": 3},
    {"padding": True, "max_length": 3},
    {"padding": True, "return_tensors": "pt"},
    {"return_offsets_mapping": True, "padding": True, "truncation": True, "max_length": 7},
]


@pytest.fixture(scope="module", params=["llama 2", "phi 3", "qwen 2.5"])
def pair(request, folder_of):
    """(ours, transformers') of one family, with a pad token and the same sides."""
    folder = folder_of(request.param)
    ours, theirs = Tokenizer.from_folder(folder), families.theirs(request.param, folder)
    if theirs.pad_token is None:
        ours.pad_token, theirs.pad_token = ours.eos_token, theirs.eos_token
    # The usual class of a REBUILT family decides the side.
    theirs.padding_side = AutoTokenizer.from_pretrained(folder).padding_side
    assert ours.padding_side == theirs.padding_side
    if theirs.model_max_length < 10**20:
        ours.model_max_length = theirs.model_max_length = 12
    return ours, theirs


def plain(found):
    return {name: (type(x).__name__, x.tolist()) if hasattr(x, "tolist") else x for name, x in found.items()}


def test_calls(pair):
    ours, theirs = pair
    for text, add, options in itertools.product((TEXTS, tuple(TEXTS), TEXTS[0], ""), (True, False), CALLS):
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            expected = theirs(text, add_special_tokens=add, **options)
            found = ours(text, add_special_tokens=add, **options)
            assert plain(found) == plain(expected), (text, add, options)
            assert list(found) == list(expected)
            if isinstance(text, str):
                ids = ours.encode(text, add_special_tokens=add, **options)
                assert plain({"input_ids": ids}) == plain({"input_ids": expected["input_ids"]})
    with pytest.warns(UserWarning, match="max_length is ignored"):
        ours(TEXTS, padding=True, max_length=3)
    ours.truncation_side = theirs.truncation_side = "left"
    for text, length in itertools.product(TEXTS, (1, 2, 4)):
        assert dict(ours(text, truncation=True, max_length=length)) == dict(
            theirs(text, truncation=True, max_length=length)
        )


def test_empty_batches(pair):
    assert pair[0]([]) == {"input_ids": [], "attention_mask": []}


def test_one_bos_only(byte_level_folder):
    """A text that begins with BOS gets no second one, where transformers adds it."""
    ours, theirs = Tokenizer.from_folder(byte_level_folder), AutoTokenizer.from_pretrained(byte_level_folder)
    text = f"{ours.bos_token}the"
    found = ours(text, return_offsets_mapping=True)
    assert found.input_ids == theirs(text)["input_ids"][1:] and len(found.offset_mapping) == len(found.input_ids)


def test_decode_takes_lists_and_tensors(byte_level_folder):
    tokenizer = Tokenizer.from_folder(byte_level_folder)
    ids = tokenizer.encode("the cat")
    for kind in (list, iter, torch.tensor, np.array):
        assert tokenizer.decode(kind(ids), skip_special_tokens=True) == "the cat"
    for alone in (ids[0], torch.tensor(ids[0]), np.int64(ids[0])):
        assert tokenizer.decode(alone) == "<|begin|>"
    for rows in ([ids, ids[:2]], torch.tensor([ids, ids])):
        assert tokenizer.batch_decode(rows, True) == [tokenizer.decode(row, True) for row in rows]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.encode(["the", "cat"]), r"encode takes one text.*tokenizer\(texts\)"),
        (lambda t: t(b"bytes"), "with a text or a list of texts, not with b'bytes'"),
        (lambda t: t([b"bytes"]), "text must be a str, not bytes"),
        (lambda t: t("the \ud83e"), r"lone surrogate '\\ud83e' at position 4"),
        (lambda t: t(TEXTS, padding=True), r"no pad token.*tokenizer.pad_token = tokenizer.eos_token"),
        (lambda t: t("a", return_tensors="tf"), r"return_tensors must be one of \(None, 'pt'\), not 'tf'"),
        (lambda t: t("a", padding="max"), "padding must be one of"),
        (lambda t: t("a", padding=True, padding_side="top"), "padding_side must be one of"),
        (lambda t: t("a", truncation=True, max_length=0), "max_length=0 is less than the 1 special"),
        (lambda t: t(TEXTS, return_tensors="pt"), "rows of different lengths.*padding=True"),
        (lambda t: t.decode([5], clean_up_tokenization_spaces=True), "WordPiece"),
        (lambda t: t.decode(torch.tensor([[5]])), r"1-D tensor.*batch_decode"),
        (lambda t: t.decode([-100]), r"-100 .*labels"),
    ],
)
def test_wrong_arguments(byte_level_folder, call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call(Tokenizer.from_folder(byte_level_folder))
    assert type(caught.value).__module__ == InputError.__module__


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=20), st.booleans(), st.lists(st.integers(0, 40), unique=True))
def test_tokens_with_a_character_of_a_span_are_trained(sizes, twice, edges):
    """A token without characters counts as the next one. twice: bytes of a character, which share its offsets."""
    ends = list(itertools.accumulate(sizes))
    offsets = [pair for pair in zip([0, *ends], ends, strict=False) for _ in range(1 + twice)]
    assume(not offsets or offsets[-1] != (0, 0))
    spans = list(zip(sorted(edges)[::2], sorted(edges)[1::2], strict=False))
    characters = [set(range(start, max(end, start + 1))) for start, end in offsets]
    expected = [int(any(each & set(range(*span)) for span in spans)) for each in characters]
    assert mask_of([*offsets, (0, 0)], spans) == [*expected, 0]  # the last is a special token after the text
