"""The folder of every text family, as released, against transformers: ids, text, templates and streams."""

import random
import shutil

import pytest

from ligermodels.text import StreamDecoder, Tokenizer
from tests.text import families, folders
from tests.text.families import ALONE, FAMILIES, TALK, TOOL, outcome

FORMS = ("{s}{t}", "{t} {s}\n {t}{s}{s}", "{s}\n\n{t}")
# Texts that begin with, hold and end with white space, runs of newlines, digits, and every kind of script.
PLAIN = (
    *folders.TEXTS,
    "  the",
    "the\n\n\n\ncat\n\n",
    "a   \n b",
    "1234567 3.14159",
    "I'LL don't",
    "<h1>the</h1>",
    "a , b . do n't !",
)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, folder_of):
    """(family, our tokenizer, transformers')."""
    folder = folder_of(request.param)
    return FAMILIES[request.param], Tokenizer.from_folder(folder), families.theirs(request.param, folder)


def texts_of(family):
    texts = list(PLAIN)
    for special in (*family.special, *([family.bos] if family.bos else [])):
        texts += [form.format(s=special, t=text) for form in FORMS for text in PLAIN]
    return texts


def test_encode_and_decode(case):
    family, ours, theirs = case
    texts = texts_of(family)
    bare = theirs(texts, add_special_tokens=False)["input_ids"]
    whole = theirs(texts)["input_ids"]
    for text, inner, expected in zip(texts, bare, whole, strict=True):
        assert ours.encode(text, add_special_tokens=False) == inner, text
        if family.bos and text.startswith(family.bos):
            assert expected[:2] == [ours.bos_token_id] * 2  # ours adds no second BOS
            expected = expected[1:]
        assert ours.encode(text) == expected, text
        for skip in (False, True):
            assert ours.decode(expected, skip) == theirs.decode(expected, skip_special_tokens=skip), text


def test_any_ids_decode_as_in_transformers(case):
    _, ours, theirs = case
    generator, special = random.Random(0), [*ours.all_special_ids, len(ours) + 2]
    for _ in range(100):
        ids = [generator.choice([generator.randrange(420), *special]) for _ in range(generator.randrange(10))]
        for skip in (False, True):
            text = theirs.decode(ids, skip_special_tokens=skip)
            # Broken runs of byte tokens follow SentencePiece: test_sentencepiece.py.
            if ours.token_to_id("<0x00>") is None or "\ufffd" not in text:
                assert ours.decode(ids, skip) == text, ids


def test_stop_ids_are_those_of_the_release(case):
    family, ours, _ = case
    assert ours.eos_token_ids == family.stops
    assert ours.chat_stop_ids == tuple(dict.fromkeys((*family.stops, family.turn_end)))


def test_streams(case):
    """The parts joined are the whole text, without half characters, for our tokenizer and for transformers'."""
    family, ours, theirs = case
    for tokenizer in (ours, theirs):
        for text in texts_of(family)[:: 3 if tokenizer is ours else 9]:
            ids = ours.encode(text)
            for skip in (False, True):
                stream = StreamDecoder(tokenizer, skip_special_tokens=skip)
                parts = [stream.put(index) for index in ids] + [stream.flush()]
                assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=skip), text
                assert not any("\ufffd" in part for part in parts)
        text = "the 👩‍👩‍👧‍👦 cat 日本語\n"
        ids = ours.encode(text, add_special_tokens=False)
        # A continuation keeps the space before its first word; a text loses only the dummy prefix.
        said = ""
        for cut in range(1, len(ids)):
            stream = StreamDecoder(tokenizer, after=ids[:cut])
            rest = "".join([stream.put(index) for index in ids[cut:]] + [stream.flush()])
            whole = tokenizer.decode(ids[:cut])
            said = said if whole.endswith("\ufffd") else whole
            assert said + rest == text


def test_templates(case):
    family, ours, theirs = case
    spaced = [{"role": "user", "content": " Hi \n"}, {"role": "assistant", "content": "\n\n<think>a</think>\n\nYes "}]
    dated = [{"date_string": "1 May 2025"}] if "date_string" in theirs.chat_template else []
    for messages in (ALONE, TALK, spaced):
        for options in ({}, {"add_generation_prompt": True}, {"tools": [TOOL]}, *dated):
            for kind, more in (({"tokenize": False}, {}), ({}, {"return_dict": False})):
                expected = outcome(lambda: theirs.apply_chat_template(messages, **options, **kind, **more))  # noqa: B023
                assert outcome(lambda: ours.apply_chat_template(messages, **options, **kind)) == expected  # noqa: B023
    # Encoding the template's text gives the same ids: one BOS, or none.
    ids, text = ours.apply_chat_template(ALONE), ours.apply_chat_template(ALONE, tokenize=False)
    assert ids.count(ours.bos_token_id) == (0 if family.bos is None else 1)
    assert ours.encode(text) == ids


@pytest.mark.parametrize("name", ["mistral 0.3", "gemma 2", "phi 3"])
def test_tokenizer_model_alone(folder_of, tmp_path, name):
    """tokenizer.model gives the ids of tokenizer.json, but for the dummy prefix after a special token (`legacy`)."""
    family, whole = FAMILIES[name], Tokenizer.from_folder(folder_of(name))
    ignored = shutil.ignore_patterns("tokenizer.json")
    alone = Tokenizer.from_folder(shutil.copytree(folder_of(name), tmp_path / "alone", ignore=ignored))
    assert alone.files.vocabulary.name == "tokenizer.model"
    for text in PLAIN if name == "phi 3" else texts_of(family):
        if name == "mistral 0.3" and text.startswith((" ", "▁")):
            continue  # Metaspace, in tokenizer.json, merges the dummy prefix with the text's own space
        assert alone.encode(text) == whole.encode(text), text
        ids = whole.encode(text)
        for skip in (False, True):
            assert alone.decode(ids, skip) == whole.decode(ids, skip), text
    for text in ("the cat", "a 🦊 b", "the▁cat  x\n", "", "the</s> cat[INST] the") if name != "phi 3" else ():
        assert alone(text, return_offsets_mapping=True) == whole(text, return_offsets_mapping=True), text
    assert alone.chat_stop_ids == whole.chat_stop_ids
