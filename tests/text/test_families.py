"""Every text family's folder, as released, against transformers and against text and ids written by hand."""

import json
import shutil

import pytest
from transformers import AutoTokenizer

from ligermodels.errors import TokenizerError
from ligermodels.text import StreamDecoder, Tokenizer
from tests.text import families, folders
from tests.text.families import ALONE, FAMILIES, TALK, TOLD

TOOL = {"type": "function", "function": {"name": "find", "description": "é <b>", "parameters": {"type": "object"}}}
FORMS = ("{s}{t}", "{t}{s}", "{t} {s}\n {t}{s}{s}", "{s}\n\n{t}")
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
    """(family, its folder, our tokenizer, transformers')."""
    folder = folder_of(request.param)
    return FAMILIES[request.param], folder, Tokenizer.from_folder(folder), families.theirs(request.param, folder)


def texts_of(family):
    texts = list(PLAIN)
    for special in (*family.special, *([family.bos] if family.bos else [])):
        texts += [form.format(s=special, t=text) for form in FORMS for text in PLAIN]
    return texts


def copy(source, target, *leave, **files):
    """The folder without some files and with others (a dot is "__"): a dict is merged into the JSON there is."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*leave))
    for name, value in files.items():
        path = target / name.replace("__", ".")
        if isinstance(value, dict):
            value = json.loads(path.read_text("utf-8")) | value
        folders.write(target, path.name, value)
    return target


def test_encode_and_decode(case):
    family, _, ours, theirs = case
    texts = texts_of(family)
    bare = theirs(texts, add_special_tokens=False)["input_ids"]
    whole = theirs(texts)["input_ids"]
    for text, inner, expected in zip(texts, bare, whole, strict=True):
        assert ours.encode(text, add_special_tokens=False) == inner, text
        if family.bos and text.startswith(family.bos):
            assert expected[:2] == [ours.bos_token_id] * 2
            expected = expected[1:]
        assert ours.encode(text) == expected, text
        for skip in (False, True):
            assert ours.decode(expected, skip) == theirs.decode(expected, skip_special_tokens=skip), text


def test_ids_of_the_release(case):
    family, _, ours, theirs = case
    assert ours.eos_token_ids == family.stops
    assert ours.chat_stop_ids == tuple(dict.fromkeys((*family.stops, family.turn_end)))
    assert ours.encode("")[:1] == ([] if family.bos is None else [ours.token_to_id(family.bos)])
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)
    for text, pieces in family.pieces.items():
        ids = ours.encode(text, add_special_tokens=False)
        assert " ".join(str(ours.backend.id_to_token(index)) for index in ids) == pieces, text


def test_streams(case):
    family, _, ours, _ = case
    for text in texts_of(family):
        ids = ours.encode(text)
        for skip in (False, True):
            stream = StreamDecoder(ours, skip_special_tokens=skip)
            parts = [stream.put(index) for index in ids] + [stream.flush()]
            assert "".join(parts) == ours.decode(ids, skip), text
            assert not any("\ufffd" in part for part in parts)
    text = "the 👩‍👩‍👧‍👦 cat 日本語\n"
    ids = ours.encode(text, add_special_tokens=False)
    assert ours.decode(ids) == text and len(ids) > len(text)
    # The space before a word that goes on stays, and one at the beginning of a text is the dummy prefix's.
    for cut in range(1, len(ids)):
        stream = StreamDecoder(ours, after=ids[:cut])
        rest = "".join([stream.put(index) for index in ids[cut:]] + [stream.flush()])
        whole = ours.decode(ids[:cut])
        assert whole.rstrip("\ufffd") + rest == text


def outcome(call):
    """What a call says, or that it refuses."""
    try:
        return call()
    except Exception as error:
        assert type(error).__name__ in ("TokenizerError", "TemplateError")
        return "refused"


def test_templates(case):
    family, _, ours, theirs = case
    assert ours.apply_chat_template(ALONE, add_generation_prompt=True, tokenize=False) == family.alone
    assert ours.apply_chat_template(TOLD, tokenize=False) == family.told
    if family.talk is None:
        with pytest.raises(TokenizerError, match=r"refuses these messages: (System role|Conversation roles)"):
            ours.apply_chat_template(TALK, add_generation_prompt=True)
    else:
        assert ours.apply_chat_template(TALK, add_generation_prompt=True, tokenize=False) == family.talk
    spaced = [{"role": "user", "content": " Hi \n"}, {"role": "assistant", "content": "\n\n<think>a</think>\n\nYes "}]
    for messages in (ALONE, TOLD, TALK, TALK[1:], spaced, [*TOLD, *TOLD], TALK[2:]):
        for options in ({}, {"add_generation_prompt": True}, {"tools": [TOOL]}, {"date_string": "1 May 2025"}):
            for kind, more in (({"tokenize": False}, {}), ({}, {"return_dict": False})):
                expected = outcome(lambda: theirs.apply_chat_template(messages, **options, **kind, **more))  # noqa: B023
                assert outcome(lambda: ours.apply_chat_template(messages, **options, **kind)) == expected  # noqa: B023
    ids = ours.apply_chat_template(ALONE, add_generation_prompt=True)
    assert ids.count(ours.bos_token_id) == (0 if family.bos is None else 1)
    # The template's text encoded by the one call or the other: one BOS for both, none where there is none.
    assert ours.encode(family.alone) == ids


@pytest.mark.parametrize(
    ("name", "begins", "ends"),
    [
        (
            "llama 3.1",
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\nCutting Knowledge",
            '{\n    "type": "function",\n    "function": {\n        "name": "find",\n        "description": "é <b>",\n'
            '        "parameters": {\n            "type": "object"\n        }\n    }\n}\n\n'
            "Hi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "mistral 0.3",
            '<s>[AVAILABLE_TOOLS] [{"type": "function", "function": {"name": "find", "description": "é <b>", ',
            '"parameters": {"type": "object"}}}][/AVAILABLE_TOOLS][INST] Hi[/INST]',
        ),
        (
            "qwen 2.5",
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.\n\n# Tools\n\n",
            '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
)
def test_tools(folder_of, name, begins, ends):
    ours = Tokenizer.from_folder(folder_of(name))
    text = ours.apply_chat_template(ALONE, tools=[TOOL], add_generation_prompt=True, tokenize=False)
    assert text.startswith(begins) and text.endswith(ends)


def test_where_the_template_stands(case, tmp_path):
    """chat_template.jinja, or a list of named templates, in place of tokenizer_config.json's one text."""
    family, source, *_ = case
    said = json.loads((source / "tokenizer_config.json").read_text("utf-8"))["chat_template"]
    named = [{"name": "default", "template": said}, {"name": "tool_use", "template": "tools"}]
    other = {"chat_template": "other"}
    vocabulary = ("vocab.json", "merges.txt", "tokenizer.model*")
    for place, files in {
        "jinja": {"chat_template__jinja": said, "tokenizer_config__json": other},
        "list": {"tokenizer_config__json": {"chat_template": named}},
    }.items():
        ours = Tokenizer.from_folder(copy(source, tmp_path / place, *vocabulary, **files))
        assert ours.apply_chat_template(ALONE, add_generation_prompt=True, tokenize=False) == family.alone
        with_tools = ours.apply_chat_template(ALONE, tools=[TOOL], tokenize=False)
        assert (with_tools == "tools") == (place == "list")
        assert family.turn_end in ours.chat_stop_ids


@pytest.mark.parametrize(
    ("name", "eos"),
    [
        ("llama 3.1", "<|end_of_text|>"),  # Llama-3-8B-Instruct as first released
        ("gemma 1", "<eos>"),
        ("gemma 2", "<eos>"),
        ("qwen 2", "<|endoftext|>"),  # the base models, which have a template too
        ("qwen 2.5", "<|endoftext|>"),
        ("qwq", "<|endoftext|>"),
        ("phi 3", "<|endoftext|>"),
        ("phi 4", "<|endoftext|>"),  # phi-4 as first released
        ("phi 4 mini", "<|endoftext|>"),
    ],
)
def test_the_turn_ends_though_no_list_says_so(folder_of, tmp_path, name, eos):
    none = {"eos_token_id": None}
    files = {"tokenizer_config__json": {"eos_token": eos}, "config__json": none, "generation_config__json": none}
    folder = copy(folder_of(name), tmp_path / "none", **files)
    ours = Tokenizer.from_folder(folder)
    assert ours.eos_token_ids == (ours.token_to_id(eos),)
    assert ours.chat_stop_ids == (ours.token_to_id(eos), FAMILIES[name].turn_end)


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{{ broken",
        families.PHI_3.replace("{% for", "{{ raise_exception('no') }}{% for"),
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ bos_token ~ m.role ~ ': ' ~ m.content ~ ' END ' }}{% endfor %}",
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content ~ '<|end|>' }}{% endif %}{% endfor %}",
        [{"name": "rag", "template": families.PHI_3}],
    ],
)
def test_a_template_that_shows_no_turn_end(folder_of, tmp_path, template):
    folder = copy(folder_of("phi 3"), tmp_path / "none", tokenizer_config__json={"chat_template": template})
    assert Tokenizer.from_folder(folder).chat_stop_ids == FAMILIES["phi 3"].stops


@pytest.mark.parametrize("name", families.REBUILT)
def test_where_transformers_rebuilds_the_file(folder_of, name):
    """The same ids, but for what only the file says: Llama 2's dummy prefix, the HTML tags of Gemma 1.

    Llama 2: before every stretch of text, and beside a space that is there. So the reference code has it:
    <s>[INST] begins with the token of "▁[".
    """
    ours, rebuilt = Tokenizer.from_folder(folder_of(name)), AutoTokenizer.from_pretrained(folder_of(name))
    special = " ▁" if name == "llama 2" else ""
    same = [text for text in PLAIN if "<h1>" not in text and not (special and text.startswith((" ", "▁")))]
    assert len(same) > 20
    for text in same:
        assert ours.encode(text) == rebuilt.encode(text), text
    if name == "llama 2":
        first = ours.encode("<s>[INST]", add_special_tokens=False)[1]
        assert ours.backend.id_to_token(first).startswith("▁")


@pytest.mark.parametrize("name", [name for name in FAMILIES if name.startswith(("llama 2", "m", "gemma", "phi 3"))])
def test_tokenizer_model_alone(folder_of, tmp_path, name):
    """Without tokenizer.json the same ids: all but the dummy prefix behind a special token, where `legacy` rules."""
    family, source = FAMILIES[name], folder_of(name)
    whole = Tokenizer.from_folder(source)
    alone = Tokenizer.from_folder(copy(source, tmp_path / "alone", "tokenizer.json"))
    prefixed_once = name in ("llama 2", "phi 3")
    for text in PLAIN if prefixed_once else texts_of(family):
        if name == "mistral 0.3" and text.startswith((" ", "▁")):
            continue  # Metaspace, in tokenizer.json, merges the dummy prefix with a space that is there
        assert alone.encode(text) == whole.encode(text), text
        ids = whole.encode(text)
        for skip in (False, True):
            assert alone.decode(ids, skip) == whole.decode(ids, skip), text
    for messages in (ALONE, TOLD):
        assert alone.apply_chat_template(messages, tokenize=False) == whole.apply_chat_template(
            messages, tokenize=False
        )
    assert alone.chat_stop_ids == whole.chat_stop_ids
