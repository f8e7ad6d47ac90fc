"""A stream says what the whole says, at once, and never half a character."""

import itertools
import json
import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from ligermodels.errors import InputError, TokenizerError
from ligermodels.text import StopStrings, StreamDecoder, Tokenizer
from tests.text import families, folders


@pytest.fixture(scope="module", params=["byte level", "byte fallback", "first", "no prefix", "sentencepiece"])
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream")
    match request.param:
        case "byte level":
            folders.byte_level(folder)
        case "byte fallback":
            folders.byte_fallback(folder)
        case "first":
            folders.byte_fallback(folder, legacy=False)
        case "no prefix":
            folders.byte_fallback(folder, prefix=False)
        case "sentencepiece":
            decoder = {"500": folders.added("<|user|>"), "501": folders.added("a b é", special=False)}
            folders.sentencepiece_folder(folder, added_tokens_decoder=decoder)
    return Tokenizer.from_folder(folder)


def parts_of(tokenizer, ids, skip=True):
    stream = StreamDecoder(tokenizer, skip_special_tokens=skip)
    return [stream.put(index) for index in ids] + [stream.flush()]


@settings(max_examples=400, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_any_ids(tokenizer, data, skip):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=24))
    assert "".join(parts_of(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@settings(max_examples=400, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_any_bytes(tokenizer, data, skip):
    """Bytes of whole, broken and overlong characters, as the tokenizer spells them, among other tokens."""
    backend = tokenizer.backend
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    if backend.token_to_id(names[0]) is None:
        names = list(PIECES_OF_BYTES)
    chunks = st.one_of(
        st.text(max_size=3).map(lambda text: text.encode("utf-8", "surrogatepass")),
        st.binary(max_size=3),
        st.sampled_from([b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\xaf", b"\xf0\x9f\xa6", "👩‍👩‍👧".encode()]),
        st.integers(0, tokenizer.vocab_size - 1),
    )
    ids = []
    for chunk in data.draw(st.lists(chunks, max_size=8)):
        ids += [chunk] if isinstance(chunk, int) else [backend.token_to_id(names[byte]) for byte in chunk]
    assert None not in ids
    parts = parts_of(tokenizer, ids, skip)
    assert "".join(parts) == tokenizer.decode(ids, skip)


def _byte_pieces():
    native = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    low = [native.pre_tokenize_str(chr(byte))[0][0] for byte in range(128)]
    # Every byte of 0x80 to 0xFF stands for itself or, shifted, for one of the 68 that are left.
    spelled = [native.pre_tokenize_str(chr(point))[0][0] for point in range(0x80, 0x100)]
    lead = {0xC2: spelled[0][0], 0xC3: spelled[0x40][0]}
    tail = {0x80 + at: spelled[at][1] for at in range(64)}
    others = {byte: chr(byte) for byte in range(0xC0, 0x100)}
    return low + [{**others, **tail, **lead}[byte] for byte in range(0x80, 0x100)]


PIECES_OF_BYTES = _byte_pieces()


def test_text_comes_at_once(tokenizer):
    text = "the cat 🦊 日本語 sat\nüß"
    ids = tokenizer.encode(text)
    parts = parts_of(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids, True) == text
    assert not any("\ufffd" in part for part in parts)
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


class Theirs:
    """A tokenizer of another library: decode, and nothing else."""

    def __init__(self, tokenizer):
        self._tokenizer, self.count = tokenizer, 0

    def decode(self, ids, skip_special_tokens):
        assert type(ids) is list
        self.count += len(ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.fixture(scope="module", params=families.FAMILIES)
def theirs(request, folder_of):
    return families.theirs(request.param, folder_of(request.param))


FOREIGN_TEXTS = (
    *folders.TEXTS,
    "the cat\n\n  sat on",
    " the  cat",
    "a , b . do n't",
    "👩‍👩‍👧‍👦 the 🦊",
)


def test_tokenizers_of_transformers(theirs):
    end = theirs.eos_token
    for text in FOREIGN_TEXTS:
        for whole in (text, f"{end}{text}{end} {text}", f"{end}{end} the{end}{text}"):
            ids = theirs.encode(whole)
            for skip in (False, True):
                parts = parts_of(Theirs(theirs), ids, skip)
                assert "".join(parts) == theirs.decode(ids, skip_special_tokens=skip), whole
                assert not any("\ufffd" in part for part in parts)
            assert "".join(parts_of(theirs, ids)) == theirs.decode(ids, skip_special_tokens=True)


def test_they_say_it_at_once(theirs):
    ids = theirs.encode("the cat 🦊 日本語 sat\nüß", add_special_tokens=False)
    parts, so_far = parts_of(theirs, ids), ""
    for count, part in enumerate(parts[:-1], 1):
        so_far += part
        whole = theirs.decode(ids[:count], skip_special_tokens=True)
        assert so_far == whole or whole.endswith("\ufffd")
    assert parts[-1] == ""


def test_they_go_on_after_a_prompt(theirs):
    text = "the 👩‍👩‍👧‍👦 cat 日本語\n"
    ids = theirs.encode(text, add_special_tokens=False)
    whole = ""
    for cut in range(1, len(ids)):
        stream = StreamDecoder(theirs, after=iter(ids[:cut]))
        rest = "".join([stream.put(index) for index in ids[cut:]] + [stream.flush()])
        # What is given already is the text up to the last character that is complete.
        said = theirs.decode(ids[:cut])
        whole = whole if said.endswith("\ufffd") else said
        assert whole + rest == text


def test_their_broken_bytes(theirs):
    """They wait, and text that has been given stays as it was."""
    fox = theirs.encode("🦊", add_special_tokens=False)[-4:]
    the = theirs.encode("the", add_special_tokens=False)
    parts = parts_of(theirs, the + fox[:2])
    assert "".join(parts) == theirs.decode(the + fox[:2]) and set(parts[-1]) == {"\ufffd"}
    parts = parts_of(theirs, [*fox, fox[0], *the])
    assert parts[3].endswith("🦊") and parts[4] == "" and parts[-1] == ""
    assert "".join(parts).replace("\ufffd", "").replace(" ", "") == "🦊the" and "\ufffd" in "".join(parts)
    # Prompts that end in nothing else.
    for after in ([], fox[:1], [fox[0]] * 9):
        assert "".join(StreamDecoder(theirs, after=after).put(index) for index in the).endswith("the")


def test_the_cost_of_theirs_does_not_grow(theirs):
    ids = theirs.encode("the cat sat on the mat 🦊 ", add_special_tokens=False) * 50
    tokenizer = Theirs(theirs)
    stream = StreamDecoder(tokenizer, after=ids)
    for index in ids:
        stream.put(index)
    # A few tokens each time; all of them each time would be half a million and more.
    assert tokenizer.count < 20 * len(ids)


def test_a_decoder_that_strips_every_space_of_a_beginning():
    class Words:
        def decode(self, ids, skip_special_tokens):
            return "".join(["a", " ", "", "<s>"][i] for i in ids if not (skip_special_tokens and i == 3)).lstrip()

    for ids in itertools.product(range(4), repeat=6):
        for skip in (False, True):
            assert "".join(parts_of(Words(), ids, skip)) == Words().decode(ids, skip)


def test_what_cannot_decode():
    for wrong in (None, 5, "text", object()):
        with pytest.raises(InputError, match="has no decode"):
            StreamDecoder(wrong)


def test_cost_does_not_grow(tokenizer):
    ids = tokenizer.encode("the cat sat on the mat 🦊 ") * 2000
    stream = StreamDecoder(tokenizer)
    start = time.process_time()
    for index in ids:
        stream.put(index)
    # 30,000 tokens at 5 us each; decoding everything again for each of them takes minutes.
    assert time.process_time() - start < 10


def test_a_negative_id_is_refused(tokenizer):
    with pytest.raises(InputError, match="-100 is not a token id"):
        StreamDecoder(tokenizer).put(-100)


def test_a_stop_string_of_byte_tokens_is_seen_at_once(tokenizer):
    stream, stop = StreamDecoder(tokenizer), StopStrings("\n")
    ids = tokenizer.encode("the cat\n")
    assert [stop.put(stream.put(index))[1] for index in ids] == [False] * (len(ids) - 1) + [True]


def run(strings, parts):
    stop = StopStrings(strings)
    out, text, stopped = "", "", False
    for part in parts:
        emitted, stopped = stop.put(part)
        out, text = out + emitted, text + part
        assert stopped is stop.stopped
        if not stopped:
            # Held back is the longest end of the text that may begin a stop string, and no more.
            open_ends = [n for s in stop._strings for n in range(1, len(s)) if text.endswith(s[:n])]
            assert text == out + text[len(text) - max(open_ends, default=0) :]
    return out + stop.flush(), stopped


@settings(max_examples=800, deadline=None)
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


def test_stop_strings_by_hand():
    stop = StopStrings(["</s>", "\nUser:"])
    assert stop.put("Hi <") == ("Hi ", False)
    assert stop.put("b>\nUs") == ("<b>", False)
    assert stop.put("er: more") == ("", True)
    assert stop.put("after") == ("", True)
    assert stop.flush() == ""
    assert StopStrings("end").put("the end") == ("the ", True)
    assert StopStrings([]).put("the end") == ("the end", False)
    with pytest.raises(InputError, match="non-empty strings"):
        StopStrings(["a", ""])
    with pytest.raises(InputError, match="non-empty strings"):
        StopStrings([5])
