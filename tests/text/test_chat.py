"""Chat templates against transformers: which one is used, its text, the assistant's tokens, and the sandbox."""

import pytest
import torch
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from ligermodels.errors import InputError, TokenizerError
from ligermodels.text import Tokenizer, sandbox
from tests.text import families, folders
from tests.text.families import TOLD

USER = {"role": "user", "content": "  Where is the cat?\n"}
TOOL = {"type": "function", "function": {"name": "find", "description": "é <b>", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def pair(byte_level_folder):
    return Tokenizer.from_folder(byte_level_folder), AutoTokenizer.from_pretrained(byte_level_folder)


@pytest.fixture(scope="module")
def tokenizer(byte_level_folder):
    return Tokenizer.from_folder(byte_level_folder)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for i in range(4) if i %}{{ i }}{{ loop.length }}{% endfor %}", "132333"),
        ("{{ {'é<': [1, '>']}|tojson }}", '{"é<": [1, ">"]}'),
        ("{{ {'é': 1}|tojson(ensure_ascii=True) }}{{ [1]|tojson(indent=1) }}", '{"\\u00e9": 1}[\n 1\n]'),
        ("{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "01345678"),
        ("{{ strftime_now('%Y')|length }}{{ nothing|default(1700000000) }}", "41700000000"),
        ("{% set x = 1 %}{% generation %}{{ x }}{% set x = 2 %}{% endgeneration %}{{ x }}", "11"),
        ("{{ namespace(self=1, x=2).x }}{{ cycler('a', 'b').next() }}{{ dict(a=1).a }}", "2a1"),
        ("{{ dict.fromkeys('ab', 1) | tojson }}", '{"a": 1, "b": 1}'),
        ("  {% if true %}\n  yes\n  {% endif %}\nend", "  yes\nend"),
    ],
)
def test_the_environment_is_that_of_transformers(tokenizer, template, text):
    assert tokenizer.apply_chat_template([USER], template=template, tokenize=False) == text
    assert render_jinja_template([[USER]], chat_template=template)[0][0] == text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ ''.__class__.__mro__ }}", "line 1: SecurityError: access to attribute '__class__'"),
        ("{{ '{0.__class__.x}'.format(1) }}", "'__class__'"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% set ns = namespace() %}{% set ns.__html__ = 1 %}", "cannot hold '__html__'"),
        ("{{ x }}" * 200_000, "TemplateTooLarge: a template has at most 524,288 characters"),
        ("{% for i in range(9999) %}{{ 'ab' * 5000 }}{% endfor %}", "output of a template has at most 67,108,864"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("a\nb\n{{ x }", "line 3: syntax error: "),
        ("{% for m in messages %}\n{{ m.foo.bar }}\n{% endfor %}", "line 2: UndefinedError: .*foo"),
        ("{{ raise_exception('only users here') }}", "refuses these messages: only users here"),
    ],
)
def test_templates_that_fail(tokenizer, template, message):
    with pytest.raises(TokenizerError, match=message) as caught:
        tokenizer.apply_chat_template([USER], template=template, tokenize=False)
    assert len(str(caught.value)) < 2000


def test_messages_are_not_changed_and_objects_not_reached(tokenizer):
    class Image:
        secret = "pixels"

    messages = [{"role": "user", "content": [{"type": "image", "image": Image()}]}]
    for template, text in (("{{ i }}", "<Image>"), ("{{ i.secret }}|", "|")):
        template = f"{{% set i = messages[0].content[0].image %}}{template}"
        assert tokenizer.apply_chat_template(messages, template=template, tokenize=False) == text
    assert isinstance(messages[0]["content"][0]["image"], Image)


PARTS = "{% for m in messages %}{{ m.role }}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "content"),
    [
        (families.QWEN, "On the "),
        (folders.LLAMA2, "  On the "),
        (folders.LLAMA3, "On the "),
        (PARTS, [{"type": "text", "text": "On the "}, {"type": "image"}]),
    ],
)
def test_continue_final_message(pair, template, content):
    ours, theirs = pair
    chat = [*([USER] if isinstance(content, str) else []), {"role": "assistant", "content": content}]
    theirs.chat_template = template
    arguments = {"continue_final_message": True, "tokenize": False}
    text = theirs.apply_chat_template(chat, **arguments)
    assert ours.apply_chat_template(chat, template=template, **arguments) == text
    assert text.rstrip().endswith("On the")


def test_variables_reach_the_template(pair):
    ours, theirs = pair
    template = "{{ date }}{{ documents[0].text }}{{ bos_token }}{{ eos_token }}{{ pad_token }}"
    arguments = {"documents": [{"title": "a", "text": "b"}], "tokenize": False, "date": "today"}
    text = theirs.apply_chat_template([USER], chat_template=template, **arguments)
    assert ours.apply_chat_template([USER], template=template, **arguments) == text == "todayb<|begin|><|eot_id|>"


def folder_with(tmp_path, byte_level_folder, *, config=None, files=()):
    Tokenizer.from_folder(byte_level_folder).save(tmp_path)
    template = {} if config is None else {"chat_template": config}
    named = {"bos_token": "<|begin|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    folders.write(tmp_path, "tokenizer_config.json", named | template)
    for name, value in files:
        path = tmp_path / name
        folders.write(path.parent, path.name, value)
    return tmp_path


NAMED = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
JINJA = ("chat_template.jinja", "jinja")
RAG = ("additional_chat_templates/rag.jinja", "rag")
OLD = ("chat_template.json", {"chat_template": "old"})


@pytest.mark.parametrize(
    ("config", "files", "call", "said"),
    [
        ("text", [JINJA], {}, "jinja"),
        ("text", [JINJA, RAG], {"template": "rag"}, "rag"),
        (NAMED, [], {}, "plain"),
        (NAMED, [], {"tools": [TOOL]}, "tools"),
        (NAMED, [], {"tools": [TOOL], "template": "default"}, "plain"),
        (NAMED, [], {"template": "{{ 'own' }}"}, "own"),
    ],
)
def test_which_template(tmp_path, byte_level_folder, config, files, call, said):
    folder = folder_with(tmp_path, byte_level_folder, config=config, files=files)
    assert Tokenizer.from_folder(folder).apply_chat_template([USER], tokenize=False, **call) == said
    theirs = AutoTokenizer.from_pretrained(folder)
    call = {"chat_template" if key == "template" else key: value for key, value in call.items()}
    assert theirs.apply_chat_template([USER], tokenize=False, **call) == said


def test_the_old_processor_file_comes_last(tmp_path, byte_level_folder):
    folder = folder_with(tmp_path, byte_level_folder, files=[OLD])
    assert Tokenizer.from_folder(folder).apply_chat_template([USER], tokenize=False) == "old"


@pytest.mark.parametrize(
    ("config", "call", "message"),
    [
        (None, {}, "has no chat template. Likely cause: a base model"),
        (NAMED[1:], {}, r"no default chat template.*tool_use"),
        (NAMED, {"template": "rag"}, r"no chat template 'rag'.*'default', 'tool_use'"),
        (5, None, "chat_template must be a string or a list"),
    ],
)
def test_missing_templates(tmp_path, byte_level_folder, config, call, message):
    folder = folder_with(tmp_path, byte_level_folder, config=config)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_folder(folder).apply_chat_template([USER], **call)


MASK = {"return_dict": True, "return_assistant_tokens_mask": True}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"messages": USER}, "messages must be a list of dicts"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "excludes add_generation_prompt"),
        ({"continue_final_message": True, "template": "{{ 'nothing' }}"}, "leaves out"),
        ({"continue_final_message": True, "messages": [{"role": "user", "content": None}]}, "last message"),
        ({"template": "a", "chat_template": "b"}, "give one"),
        ({"return_assistant_tokens_mask": True}, "return_dict=True"),
    ],
)
def test_wrong_arguments(tokenizer, call, message):
    with pytest.raises((InputError, TokenizerError), match=message):
        tokenizer.apply_chat_template(**{"messages": [USER], **call})


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


@pytest.mark.parametrize("name", ["llama 2", "mistral 0.3", "gemma 2", "qwen 2.5"])
def test_masks_are_those_of_transformers(folder_of, name):
    ours, theirs = Tokenizer.from_folder(folder_of(name)), families.theirs(name, folder_of(name))
    ours.pad_token, theirs.pad_token = ours.eos_token, theirs.eos_token
    for chat in CHATS:
        for options in ({}, {"return_tensors": "pt", "padding": "max_length", "max_length": 60}):
            found = ours.apply_chat_template(chat, chat_template=MARKED, **MASK, **options)
            side = {"tokenizer_kwargs": {"padding_side": ours.padding_side}}
            expected = theirs.apply_chat_template(chat, chat_template=MARKED, **MASK, **options, **side)
            assert set(found) == set(expected) == {"input_ids", "attention_mask", "assistant_masks"}
            plain = [{name: torch.as_tensor(row).tolist() for name, row in rows.items()} for rows in (found, expected)]
            assert plain[0] == plain[1] and type(found["input_ids"]) is type(expected["input_ids"]), options


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
    ("template", "texts", "said"),
    [
        (IN_A_MACRO, ["the cat", "sat"], "the catsat"),  # where the place cannot be counted while the text is written
        (NESTED, ["the", ""], "<|im_start|>the<|im_end|><|im_start|><|im_end|>"),
        (MARKED, ["a 🦊"], "a 🦊<|end|>"),  # every token of the last character
    ],
)
def test_masks_of_odd_templates(tokenizer, template, texts, said):
    chat = [{"role": "assistant", "content": text} for text in texts]
    found = tokenizer.apply_chat_template(chat, chat_template=template, **MASK)
    mine = [i for i, is_mine in zip(found["input_ids"], found["assistant_masks"], strict=True) if is_mine]
    assert tokenizer.decode(mine) == said


@pytest.mark.parametrize(
    ("template", "content", "message"),
    [
        ("{# {% generation %} #}{{ messages[0].content }}", "a", r"has no {% generation %}.*TRL"),
        ("{% set x %}{% generation %} a {% endgeneration %}{% endset %}{{ x | trim }}", "a", "changes the text"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", f"a{sandbox.SPAN_END}b", "changes the text"),
        ("{% for m in [1] %}{% generation %}a{% break %}{% endgeneration %}{% endfor %}", "a", "without its end"),
    ],
)
def test_masks_that_cannot_be_found(tokenizer, template, content, message):
    chat = [{"role": "assistant", "content": content}]
    with pytest.raises(TokenizerError, match=message):
        tokenizer.apply_chat_template(chat, chat_template=template, **MASK)
    assert isinstance(tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False), str)
