"""Calling a tokenizer and padding with it, against transformers' on the same files, call by call."""

import copy
import itertools
import warnings

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, DataCollatorWithPadding

from ligermodels.errors import InputError
from ligermodels.text import Tokenizer
from tests.text import families

TEXTS = ["the cat sat on the mat", "the", "numbers like 3, 14 🦊\n", ""]
CALLS = [
    {},
    {"padding": True},
    {"padding": "longest", "padding_side": "left"},
    {"padding": "max_length", "max_length": 9, "truncation": True},
    {"padding": "max_length"},
    {"truncation": "longest_first", "max_length": 2},
    {"truncation": True},
    {"padding": True, "pad_to_multiple_of": 4, "truncation": True, "max_length": 8, "padding_side": "right"},
    {"padding": True, "return_attention_mask": False},
    {"padding": True, "return_tensors": "pt"},
    {"padding": True, "return_tensors": "np"},
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
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            expected = theirs(text, add_special_tokens=add, **options)
            count = len(caught)
            found = ours(text, add_special_tokens=add, **options)
        assert plain(found) == plain(expected), (text, add, options)
        assert list(found) == list(expected)
        assert len(caught) == 2 * count, options
        if isinstance(text, str):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ids = ours.encode(text, add_special_tokens=add, **options)
            assert plain({"input_ids": ids}) == plain({"input_ids": expected["input_ids"]})


def test_truncation_side(pair):
    ours, theirs = pair
    for side in ("left", "right"):
        ours.truncation_side = theirs.truncation_side = side
        for text, length in itertools.product(TEXTS, (1, 2, 4)):
            cut = {"truncation": True, "max_length": length}
            assert dict(ours(text, **cut)) == dict(theirs(text, **cut))


def test_one_bos_only(byte_level_folder):
    """A text that begins with BOS gets no second one, where transformers adds it."""
    ours, theirs = Tokenizer.from_folder(byte_level_folder), AutoTokenizer.from_pretrained(byte_level_folder)
    text = f"{ours.bos_token}the"
    found = ours(text, return_offsets_mapping=True)
    assert found.input_ids == theirs(text)["input_ids"][1:] and len(found.offset_mapping) == len(found.input_ids)
    assert ours.encode_batch([text, "the"])[0][0].tolist() == found.input_ids


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": True, "pad_to_multiple_of": 8},
        {"padding": "max_length", "max_length": 7},
        {"padding": "longest", "padding_side": "left", "return_tensors": "pt"},
        {"padding": False},
    ],
)
def test_pad(pair, options):
    ours, theirs = pair
    rows = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
    for make in (
        lambda: {"input_ids": list(rows), "attention_mask": [[1, 1, 0], [1], [1] * 5], "label": [3, 4, 5]},
        lambda: [{"input_ids": row, "label": at} for at, row in enumerate(rows)],
        lambda: {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]},
        *([lambda: {"input_ids": [torch.tensor(row) for row in rows]}] if options.get("padding") else []),
        lambda: {"input_ids": torch.tensor([[1, 2], [3, 4]]), "special_tokens_mask": torch.tensor([[1, 0], [0, 1]])},
        lambda: {"input_ids": np.array([[1, 2], [3, 4]]), "token_type_ids": np.array([[1, 0], [0, 1]])},
    ):
        assert plain(ours.pad(make(), **options)) == plain(theirs.pad(make(), **options)), make()


def test_collators(pair):
    rows = [dict(pair[1](text)) for text in TEXTS]
    labelled = [row | {"labels": row["input_ids"]} for row in rows]
    for collator, given, options in (
        (DataCollatorWithPadding, rows, {"pad_to_multiple_of": 8}),
        (DataCollatorForLanguageModeling, rows, {"mlm": False}),
        (DataCollatorForSeq2Seq, labelled, {}),
    ):
        found, expected = (collator(tokenizer, **options)(copy.deepcopy(given)) for tokenizer in pair)
        assert plain(found) == plain(expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t("a", return_tensors="tf"), "return_tensors can be 'pt'"),
        (lambda t: t(TEXTS, return_tensors="pt"), "rows of different lengths.*padding=True"),
        (
            lambda t: t("a", padding=True, truncation=True, max_length=6, pad_to_multiple_of=4),
            "cannot be padded to a multiple of 4",
        ),
        (lambda t: t.pad([{"input_ids": [1]}, {"input_ids": [1], "x": 1}]), "the same keys"),
        (lambda t: t.decode([5], clean_up_tokenization_spaces=True), "WordPiece"),
    ],
)
def test_wrong_arguments(byte_level_folder, call, message):
    tokenizer = Tokenizer.from_folder(byte_level_folder)
    tokenizer.pad_token = tokenizer.eos_token
    with pytest.raises(InputError, match=message):
        call(tokenizer)


def test_no_texts_and_no_pad_token(byte_level_folder):
    tokenizer = Tokenizer.from_folder(byte_level_folder)
    with pytest.raises(InputError, match=r"no pad token.*tokenizer.pad_token = tokenizer.eos_token"):
        tokenizer(TEXTS, padding=True)
    assert tokenizer([]) == {"input_ids": [], "attention_mask": []}
