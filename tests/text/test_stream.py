"""The parts of a stream: joined they are the whole text, each comes at once, none ends inside a character."""

import random

import pytest
from hypothesis import given, settings, strategies as st

from ligermodels.text import StopStrings, StreamDecoder, Tokenizer
from tests.text import families, folders


@pytest.fixture(scope="module", params=["byte level", "byte fallback", "sentencepiece"])
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream")
    match request.param:
        case "byte level":
            folders.byte_level(folder)
        case "byte fallback":
            families.FAMILIES["llama 2"].build(folder)
        case "sentencepiece":
            decoder = {"420": folders.added("<|user|>"), "421": folders.added("a b é", special=False)}
            folders.sentencepiece_folder(folder, added_tokens_decoder=decoder)
    return Tokenizer.from_folder(folder)


def parts_of(tokenizer, ids, skip=True):
    stream = StreamDecoder(tokenizer, skip_special_tokens=skip)
    return [stream.put(index) for index in ids] + [stream.flush()]


def test_any_ids(tokenizer):
    """Also broken and overlong characters."""
    generator, broken = random.Random(0), 0
    vocab = tokenizer.get_vocab()
    byte_tokens = [index for token, index in vocab.items() if token.startswith("<0x") or len(token) == 1]
    for _ in range(200):
        ids = [
            generator.choice(byte_tokens) if generator.random() < 0.5 else generator.randrange(tokenizer.vocab_size + 3)
            for _ in range(generator.randrange(20))
        ]
        for skip in (False, True):
            text, parts = tokenizer.decode(ids, skip), parts_of(tokenizer, ids, skip)
            broken += "\ufffd" in text
            assert "".join(parts) == text, ids
    assert broken > 25


def test_text_comes_at_once(tokenizer):
    text = "the cat 🦊 日本語 sat\nüß"
    ids = tokenizer.encode(text)
    parts = parts_of(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids, True) == text
    so_far, open_count = "", 0
    for count, part in enumerate(parts[:-1], 1):
        so_far += part
        whole = tokenizer.decode(ids[:count], True)
        if whole.endswith("\ufffd"):
            open_count += 1
        else:
            assert so_far == whole
    assert 0 < open_count < len(ids) - 3
    assert parts_of(tokenizer, tokenizer.encode("the cat sat"))[-1] == ""


def test_the_cost_does_not_grow(tokenizer):
    class Counting:
        count = 0

        def decode(self, ids, skip_special_tokens):
            self.count += len(ids)
            return tokenizer.decode(ids, skip_special_tokens)

    ids = tokenizer.encode("the cat sat on the mat 🦊 ", add_special_tokens=False) * 50
    counting = Counting()
    stream = StreamDecoder(counting, after=ids)
    for index in ids:
        stream.put(index)
    # A few tokens each time; all of them each time would be half a million and more.
    assert counting.count < 20 * len(ids)


def run(strings, parts):
    stop = StopStrings(strings)
    out, text, stopped = "", "", False
    for part in parts:
        emitted, stopped = stop.put(part)
        out, text = out + emitted, text + part
        if not stopped:
            # Held back is the longest end of the text that may begin a stop string, and no more.
            open_ends = [n for s in strings for n in range(1, len(s)) if text.endswith(s[:n])]
            assert text == out + text[len(text) - max(open_ends, default=0) :]
    return out + stop.flush(), stopped


@settings(max_examples=150, deadline=None)
@given(
    strings=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    parts=st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_stop_strings(strings, parts):
    text = "".join(parts)
    ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(s) for s in strings)]
    if ends:
        longest = max(len(s) for s in strings if text[: ends[0]].endswith(s))
        assert run(strings, parts) == (text[: ends[0] - longest], True)
    else:
        assert run(strings, parts) == (text, False)
