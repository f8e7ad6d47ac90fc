"""Chat templates against transformers: which one is used, its text and ids, the assistant's tokens, and the sandbox."""

import dataclasses
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from ligermodels import errors
from ligermodels.errors import InputError, TokenizerError
from ligermodels.text import Tokenizer, sandbox
from tests.text import families, folders
from tests.text.families import TALK, TOLD, TOOL, outcome
from tests.text.templates import CALL, CONVERSATIONS, LLAMA_3, OPTIONS, QWEN_3, SAID, SYSTEM, TEMPLATES, USER

MASK = {"return_dict": True, "return_assistant_tokens_mask": True}


@pytest.fixture(scope="module")
def pair(byte_level_folder):
    """(ours, transformers')"""
    ours, theirs = Tokenizer.from_folder(byte_level_folder), AutoTokenizer.from_pretrained(byte_level_folder)
    ours.pad_token, theirs.pad_token = ours.eos_token, theirs.eos_token
    return ours, theirs


NAMED = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
JINJA = ("chat_template.jinja", "jinja")
RAG = ("additional_chat_templates/rag.jinja", "rag")
OLD = ("chat_template.json", {"chat_template": "old"})


@pytest.mark.parametrize(
    ("config", "files", "call", "expected"),
    [
        ("text", [JINJA, RAG], {}, "jinja"),
        ("text", [JINJA, RAG], {"chat_template": "rag"}, "rag"),
        (NAMED, [], {}, "plain"),
        (NAMED, [], {"tools": [TOOL]}, "tools"),
        (NAMED, [], {"tools": [TOOL], "chat_template": "default"}, "plain"),
        (NAMED, [], {"chat_template": "{{ 'own' }}"}, "own"),
        (None, [OLD], {}, "old"),
        (None, [], {}, "error: has no chat template. Likely cause: a base model"),
        (NAMED[1:], {}, {}, r"error: no default chat template.*tool_use"),
        (NAMED, [], {"chat_template": "rag"}, r"error: no chat template 'rag'.*'default', 'tool_use'"),
        (5, [], {}, "error: chat_template must be a string or a list"),
    ],
)
def test_which_template(tmp_path, byte_level_folder, config, files, call, expected):
    Tokenizer.from_folder(byte_level_folder).save(tmp_path)
    template = {} if config is None else {"chat_template": config}
    named = {"bos_token": "<|begin|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    folders.write(tmp_path, "tokenizer_config.json", named | template)
    for name, value in files:
        path = tmp_path / name
        folders.write(path.parent, path.name, value)
    if expected.startswith("error: "):
        with pytest.raises(TokenizerError, match=expected.removeprefix("error: ")):
            Tokenizer.from_folder(tmp_path).apply_chat_template([USER], **call)
        return
    assert Tokenizer.from_folder(tmp_path).apply_chat_template([USER], tokenize=False, **call) == expected
    if files != [OLD]:
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        assert theirs.apply_chat_template([USER], tokenize=False, **call) == expected


# ---- texts and ids ----


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_texts_are_those_of_transformers(pair, template, conversation):
    refused = 0
    for options in OPTIONS:
        given = {"chat_template": TEMPLATES[template], "tokenize": False, **options}
        expected = outcome(lambda: pair[1].apply_chat_template(CONVERSATIONS[conversation], **given))  # noqa: B023
        found = outcome(lambda: pair[0].apply_chat_template(CONVERSATIONS[conversation], **given))  # noqa: B023
        # transformers refuses to continue a message that the template prints otherwise.
        if not (expected == "refused" and "continue_final_message" in options):
            assert found == expected, options
        assert "None" not in found
        refused += expected == "refused"
    assert refused < len(OPTIONS) - 1 or template == "gemma 3" or conversation in ("content None", "two tool calls")


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="could not import 'trl'")
@pytest.mark.filterwarnings("ignore:.*does not read it")
@pytest.mark.parametrize("name", ["qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8"])
def test_released_templates_of_qwen3_5_and_later(pair, name):
    """Thoughts of earlier turns dropped or kept, a system turn of the template's own, tools in XML; and masks."""
    folder = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
    ours, theirs = pair
    variables = ({"enable_thinking": False}, {"preserve_thinking": True}, {"reasoning_effort": "low"})
    for conversation in CONVERSATIONS.values():
        for options in (*OPTIONS[:3], *({"add_generation_prompt": True, **more} for more in variables)):
            given = {"chat_template": (folder / f"{name}.jinja").read_text(), "tokenize": False, **options}
            assert ours.apply_chat_template(conversation, **given) == theirs.apply_chat_template(conversation, **given)
        given = {"chat_template": (folder / f"{name}_training.jinja").read_text(), **MASK}
        assert ours.apply_chat_template(conversation, **given) == dict(
            theirs.apply_chat_template(conversation, **given)
        )


@pytest.mark.parametrize(
    "options",
    [
        {"return_tensors": "pt", "padding": "max_length", "max_length": 400},
        {"return_tensors": "pt", "truncation": True, "max_length": 12},
        {"padding": True, "add_generation_prompt": True, "padding_side": "left"},
    ],
    ids=str,
)
def test_tokens_are_those_of_transformers(pair, options):
    """Of one conversation and of several; by default a list of ids, where transformers 5 returns a dict."""
    chats = [CONVERSATIONS[name] for name in ("system", "reasoning", "a tool call")]

    def columns(tokenizer, given, options):
        found = tokenizer.apply_chat_template(given, chat_template=QWEN_3, **options)
        found = found if options["return_dict"] else {"input_ids": found}
        return {name: (type(rows).__name__, torch.as_tensor(rows).tolist()) for name, rows in found.items()}

    for kind in ({"return_dict": True}, {"return_dict": False}, MASK):
        for given in (chats, *chats):
            theirs = {key: value for key, value in (options | kind).items() if key != "padding_side"}
            side = {"tokenizer_kwargs": {"padding_side": "left"}} if "padding_side" in options else {}
            found = columns(pair[0], given, options | kind)
            assert found == columns(pair[1], given, theirs | side)
            if kind is MASK and not options.get("truncation"):
                assert 1 in np.ravel(found["assistant_masks"][1])
    assert pair[0].apply_chat_template([USER]) == pair[1].apply_chat_template([USER])["input_ids"]
    texts = [tokenizer.apply_chat_template(tuple(chats), chat_template=QWEN_3, tokenize=False) for tokenizer in pair]
    assert texts[0] == texts[1]


def text_parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("template", TEMPLATES)
def test_parts(pair, template):
    """A template that prints parts gets them; another gets their texts, joined."""
    ours, theirs = pair
    given = {"chat_template": TEMPLATES[template], "tokenize": False}
    plain = [SYSTEM, {"role": "user", "content": "On the mat"}, SAID]
    in_parts = [message | {"content": text_parts(message["content"])} for message in plain]
    in_parts[1]["content"] = text_parts("On", " the mat")
    for options in ({}, {"continue_final_message": True}):
        expected = theirs.apply_chat_template(plain, **options, **given)
        if template == "gemma 3":  # it trims each part
            expected = expected.replace("On the mat", "Onthe mat")
            assert theirs.apply_chat_template(in_parts, **options, **given) == expected
        assert ours.apply_chat_template(in_parts, **options, **given) == expected


IMAGE = {"type": "image"}


@pytest.mark.parametrize(
    ("template", "system", "content", "expected"),
    [
        # Gemma 3's template prints the first part of a system message alone: ours joins them.
        ("gemma 3", text_parts("a", "b"), "what?", "<|begin|><start_of_turn>user\nab\n\nwhat?<end_of_turn>\n"),
        (
            *("gemma 3", text_parts("a"), [IMAGE, *text_parts("what?")]),
            "<|begin|><start_of_turn>user\na\n\n<image>what?<end_of_turn>\n",
        ),
        # A template without images does not get the texts around them alone.
        ("qwen 3", None, [IMAGE, *text_parts("what?")], "<|im_start|>user\n<|im_end|>\n"),
        ("qwen 3", None, [IMAGE | {"text": "a mat"}, *text_parts("what?")], "<|im_start|>user\n<|im_end|>\n"),
    ],
)
def test_parts_that_a_template_prints_in_part(pair, template, system, content, expected):
    chat = [*([SYSTEM | {"content": system}] if system else []), {"role": "user", "content": content}]
    assert pair[0].apply_chat_template(chat, chat_template=TEMPLATES[template], tokenize=False) == expected
    assert not system or chat[0]["content"] == system


# ---- variables and objects ----


def test_variables_reach_the_template(pair):
    template = "{{ date }}{{ documents[0].text }}{{ bos_token }}{{ eos_token }}{{ unk_token }}"
    arguments = {"documents": [{"title": "a", "text": "b"}], "tokenize": False, "date": "today"}
    texts = [tokenizer.apply_chat_template([USER], chat_template=template, **arguments) for tokenizer in pair]
    assert texts == ["todayb<|begin|><|eot_id|>"] * 2


def test_objects_in_messages(pair):
    """Numbers of numpy and torch, dataclasses and pydantic models are plain values for a template; others a name."""

    @dataclasses.dataclass
    class Function:
        name: str
        arguments: dict

    class Model:
        def model_dump(self):
            return {"function": Function("find", {"a": np.int64(3), "b": np.bool_(False), "c": torch.tensor(0.5)})}

    class Image:
        secret = "pixels"

    chat = [USER, {"role": "assistant", "content": "", "tool_calls": [Model()]}]
    text = pair[0].apply_chat_template(chat, chat_template=QWEN_3, tokenize=False)
    assert '"arguments": {"a": 3, "b": false, "c": 0.5}' in text
    messages = [{"role": "user", "content": [{"type": "image", "image": Image()}]}]
    template = "{% set i = messages[0].content[0].image %}{{ i }}{{ i.secret }}|"
    assert pair[0].apply_chat_template(messages, chat_template=template, tokenize=False) == "<Image>|"
    assert isinstance(messages[0]["content"][0]["image"], Image)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"add_generation_promt": True}, r"is no argument .* nearest .* 'add_generation_prompt'"),
        ({"sanitise": True}, r"'sanitise' .* Variables of the template: \['enable_th"),
        ({"enable_thinking": False, "chat_template": LLAMA_3}, "'enable_thinking' is no argument"),
    ],
)
def test_a_variable_that_is_not_read_is_named_once_and_changes_nothing(pair, monkeypatch, call, message):
    monkeypatch.setattr(errors, "_warned", set())
    given = {"conversation": [USER], "chat_template": QWEN_3, "tokenize": False, **call}
    with pytest.warns(UserWarning, match=message) as warned:
        found = [pair[0].apply_chat_template(**given) for _ in range(2)]
    assert len(warned) == 1 and found == [pair[1].apply_chat_template(**given)] * 2


# ---- the sandbox ----


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for i in range(4) if i %}{{ i }}{{ loop.length }}{% endfor %}", "132333"),
        ("{{ {'é<': [1, '>']}|tojson }}", '{"é<": [1, ">"]}'),
        ("{{ {'é': 1}|tojson(ensure_ascii=True) }}{{ [1]|tojson(indent=1) }}", '{"\\u00e9": 1}[\n 1\n]'),
        ("{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "01345678"),
        ("{{ strftime_now('%Y')|length }}{{ nothing|default(1700000000) }}", "41700000000"),
        ("{% set x = 1 %}{% generation %}{{ x }}{% set x = 2 %}{% endgeneration %}{{ x }}", "11"),
        ("{{ namespace(self=1, x=2).x }}{{ cycler('a', 'b').next() }}{{ dict.fromkeys('a', 1)|tojson }}", '2a{"a": 1}'),
        ("  {% if true %}\n  yes\n  {% endif %}\nend\n", "  yes\nend"),
    ],
)
def test_the_environment_is_that_of_transformers(pair, template, text):
    assert pair[0].apply_chat_template([USER], chat_template=template, tokenize=False) == text
    assert render_jinja_template([[USER]], chat_template=template)[0][0] == text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ ''.__class__.__mro__ }}", "line 1: SecurityError: access to attribute '__class__'"),
        ("{{ '{0.__class__.x}'.format(1) }}", "'__class__'"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% set ns = namespace() %}{% set ns.__html__ = 1 %}", "cannot have '__html__'"),
        ("{{ x }}" * 200_000, "TemplateTooLarge: a template has at most 524,288 characters"),
        ("{% for i in range(9999) %}{{ 'ab' * 5000 }}{% endfor %}", "output of a template has at most 67,108,864"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("a\nb\n{{ x }", "line 3: syntax error: "),
        ("{% for m in messages %}\n{{ m.foo.bar }}\n{% endfor %}", "line 2: UndefinedError: .*foo"),
        ("{{ raise_exception('only users here') }}", "refuses these messages: only users here"),
    ],
)
def test_templates_that_fail(pair, template, message):
    with pytest.raises(TokenizerError, match=message) as caught:
        pair[0].apply_chat_template([USER], chat_template=template, tokenize=False)
    assert len(str(caught.value)) < 2000


# ---- the assistant's tokens ----

MARKED = """{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|assistant|>\\n' }}
        {%- generation %}
            {%- if m.thought %}{{- m.thought }}{% endif %}
            {{- m.content + '<|end|>' }}
        {%- endgeneration %}{{ '\\n' }}
    {%- else %}{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endif %}
{%- endfor %}"""
CHATS = [
    [*TOLD, *TOLD],
    [TOLD[0], {"role": "assistant", "content": "the 🦊 cat.", "thought": " hm\n\n"}],
    [TOLD[0], {"role": "assistant", "content": "  "}, TOLD[0], {"role": "assistant", "content": ""}],
    [TOLD[0]],
]


@pytest.mark.parametrize("name", ["llama 2", "mistral 0.3", "gemma 2"])
def test_masks_are_those_of_transformers(folder_of, name):
    ours, theirs = Tokenizer.from_folder(folder_of(name)), families.theirs(name, folder_of(name))
    for chat in CHATS:
        found, expected = (t.apply_chat_template(chat, chat_template=MARKED, **MASK) for t in (ours, theirs))
        assert found == dict(expected)


def test_masks_of_trls_templates(pair):
    """Its templates with {% generation %} give the same ids and mask, or are refused by both."""
    trl, found = importlib.util.find_spec("trl") or pytest.skip("could not import 'trl'"), []
    for path in sorted((Path(trl.origin).parent / "chat_templates").glob("*_training.jinja"))[::3]:
        options = {"chat_template": path.read_text(), **MASK}
        ours, theirs = (outcome(lambda: t.apply_chat_template(TALK[1:], **options)) for t in pair)  # noqa: B023
        assert ours == theirs, path.name
        found += [ours] if ours != "refused" else []
    assert len(found) > 3


IN_A_MACRO = (
    "{% macro show(m) %}[{{ m.role }}]{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
    "{% for m in messages %}{% set text %}<{{ show(m) }}>{% endset %}{{ text }}{% endfor %}"
)
NESTED = (
    "{% for m in messages %}a{% generation %}{% endgeneration %}b"
    "{% generation %}<|im_start|>{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>{% endgeneration %}c"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "texts", "expected"),
    [
        (IN_A_MACRO, ["the cat", "sat"], "the catsat"),  # where the place cannot be counted while the text is written
        (NESTED, ["the", ""], "<|im_start|>the<|im_end|><|im_start|><|im_end|>"),
        (MARKED, ["a 🦊"], "a 🦊<|end|>"),  # every token of the last character
    ],
)
def test_masks_of_odd_templates(pair, template, texts, expected):
    chat = [{"role": "assistant", "content": text} for text in texts]
    found = pair[0].apply_chat_template(chat, chat_template=template, **MASK)
    marked = [i for i, is_marked in zip(found["input_ids"], found["assistant_masks"], strict=True) if is_marked]
    assert pair[0].decode(marked) == expected


# ---- refusals ----

FILTERED = "{% set x %}{% generation %} a {% endgeneration %}{% endset %}{{ x | trim }}"
BROKEN = "{% for m in [1] %}{% generation %}a{% break %}{% endgeneration %}{% endfor %}"
COPIED = "{% generation %}{{ messages[0].content }}{% endgeneration %}"
SPANNED = [{"role": "assistant", "content": f"a{sandbox.SPAN_END}b"}]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"conversation": []}, "at least one message"),
        ({"conversation": [[USER], []]}, "at least one message"),
        ({"conversation": None}, "messages must be a list of dicts"),
        ({"conversation": [[USER], USER]}, "messages must be a list of dicts"),
        ({"conversation": [CONVERSATIONS["system"], [USER]], "return_tensors": "pt"}, "rows of different lengths"),
        ({"tools": CALL}, "tools must be a list"),
        ({"tools": [len]}, "a tool is a JSON schema .* not <built-in function len>"),
        ({"tools": [lambda a: a]}, "get_json_schema makes one"),
        ({"return_assistant_tokens_mask": True}, "return_dict=True"),
        ({"chat_template": "{# {% generation %} #}", **MASK}, r"has no {% generation %}.*TRL"),
        ({"chat_template": FILTERED, **MASK}, "changes the text"),
        ({"chat_template": COPIED, "conversation": SPANNED, **MASK}, "changes the text"),
        ({"chat_template": BROKEN, **MASK}, "without its end"),
        ({"continue_final_message": True, **MASK}, "return_assistant_tokens_mask"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "excludes add_generation_prompt"),
        ({"continue_final_message": True, "chat_template": "{{ 'nothing' }}"}, "drops or rewrites"),
        ({"continue_final_message": True, "conversation": [{"role": "user", "content": None}]}, "last message"),
    ],
)
def test_wrong_arguments(pair, call, message):
    with pytest.raises((InputError, TokenizerError), match=message):
        pair[0].apply_chat_template(**{"conversation": [USER], "chat_template": QWEN_3, **call})
