"""A stream says what the whole says, at once, and never half a character."""

import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ligermodels.errors import InputError
from ligermodels.text import StopStrings, StreamDecoder, Tokenizer
from tests.text import folders


@pytest.fixture(scope="module", params=["byte level", "byte fallback", "sentencepiece"])
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream")
    match request.param:
        case "byte level":
            folders.byte_level(folder)
        case "byte fallback":
            folders.byte_fallback(folder)
        case "sentencepiece":
            decoder = {"500": folders.added("<|user|>"), "501": folders.added("a b é", special=False)}
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
    for _ in range(400):
        ids = [
            generator.choice(byte_tokens) if generator.random() < 0.5 else generator.randrange(tokenizer.vocab_size + 3)
            for _ in range(generator.randrange(20))
        ]
        for skip in (False, True):
            text, parts = tokenizer.decode(ids, skip), parts_of(tokenizer, ids, skip)
            broken += "\ufffd" in text
            assert "".join(parts) == text, ids
    assert broken > 50


def test_text_comes_at_once(tokenizer):
    text = "the cat 🦊 日本語 sat\nüß"
    ids = tokenizer.encode(text)
    parts = parts_of(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids, True) == text
    so_far, waits = "", 0
    for count, part in enumerate(parts[:-1], 1):
        so_far += part
        whole = tokenizer.decode(ids[:count], True)
        if whole.endswith("\ufffd"):
            waits += 1
        else:
            assert so_far == whole
    assert 0 < waits < len(ids) - 3
    assert parts_of(tokenizer, tokenizer.encode("the cat sat"))[-1] == ""


def test_broken_bytes_wait_and_come_out(tokenizer):
    """Text that has been given stays as it was."""
    fox = tokenizer.encode("🦊", add_special_tokens=False)[-4:]
    the = tokenizer.encode("the", add_special_tokens=False)
    parts = parts_of(tokenizer, the + fox[:2])
    assert "".join(parts) == tokenizer.decode(the + fox[:2]) and set(parts[-1]) == {"\ufffd"}
    parts = parts_of(tokenizer, [*fox, fox[0], *the])
    assert parts[3].endswith("🦊") and parts[4] == "" and parts[-1] == ""
    assert "".join(parts).replace("\ufffd", "").replace(" ", "") == "🦊the" and "\ufffd" in "".join(parts)
    # Prompts that end in nothing else.
    for after in ([], fox[:1], [fox[0]] * 9):
        assert "".join(StreamDecoder(tokenizer, after=after).put(index) for index in the).endswith("the")


def test_the_cost_does_not_grow(tokenizer):
    class Counting:
        count = 0

        def decode(self, ids, skip_special_tokens):
            self.count += len(ids)
            return tokenizer.decode(ids, skip_special_tokens)

    ids = tokenizer.encode("the cat sat on the mat 🦊 ", add_special_tokens=False) * 50
    counting = Counting()
    start = time.process_time()
    stream = StreamDecoder(counting, after=ids)
    for index in ids:
        stream.put(index)
    # A few tokens each time; all of them each time would be half a million and more.
    assert counting.count < 20 * len(ids) and time.process_time() - start < 10


def test_a_decoder_that_strips_every_space_of_a_beginning():
    class Words:
        def decode(self, ids, skip_special_tokens):
            return "".join(["a", " ", "", "<s>"][i] for i in ids if not (skip_special_tokens and i == 3)).lstrip()

    for ids in itertools.product(range(4), repeat=5):
        for skip in (False, True):
            assert "".join(parts_of(Words(), ids, skip)) == Words().decode(ids, skip)


def test_what_is_refused(tokenizer):
    for wrong in (None, 5, "text"):
        with pytest.raises(InputError, match="has no decode"):
            StreamDecoder(wrong)
    with pytest.raises(InputError, match="-100 is not a token id"):
        StreamDecoder(tokenizer).put(-100)
    with pytest.raises(InputError, match="put takes one id"):
        StreamDecoder(tokenizer).put([1, 2])
    for strings in (["a", ""], [5]):
        with pytest.raises(InputError, match="non-empty strings"):
            StopStrings(strings)


def run(strings, parts):
    stop = StopStrings(strings)
    out, text, stopped = "", "", False
    for part in parts:
        emitted, stopped = stop.put(part)
        out, text = out + emitted, text + part
        assert stopped is stop.stopped
        if not stopped:
            # Held back is the longest end of the text that may begin a stop string, and no more.
            open_ends = [n for s in strings for n in range(1, len(s)) if text.endswith(s[:n])]
            assert text == out + text[len(text) - max(open_ends, default=0) :]
    return out + stop.flush(), stopped


@settings(max_examples=300, deadline=None)
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


def test_stop_strings_by_hand(tokenizer):
    stop = StopStrings(["</s>", "\nUser:"])
    said = [stop.put(part) for part in ("Hi <", "b>\nUs", "er: more", "after")]
    assert said == [("Hi ", False), ("<b>", False), ("", True), ("", True)] and stop.flush() == ""
    assert StopStrings("end").put("the end") == ("the ", True)
    assert StopStrings([]).put("the end") == ("the end", False)
    # One of byte tokens is seen at once.
    stream, stop = StreamDecoder(tokenizer), StopStrings("\n")
    ids = tokenizer.encode("the cat\n")
    assert [stop.put(stream.put(index))[1] for index in ids] == [False] * (len(ids) - 1) + [True]
