"""Chat templates against transformers: which one is taken, what it says, and its ids."""

import pytest
from transformers import AutoTokenizer

from ligermodels.errors import TokenizerError
from ligermodels.text import Tokenizer
from tests.text import families, folders

FORMATS = {
    "llama 2": folders.LLAMA2,
    "llama 3": folders.LLAMA3,
    "chatml": folders.CHATML,
    "gemma": families.GEMMA,
}
USER = {"role": "user", "content": "  Where is the cat?\n"}
ASSISTANT = {"role": "assistant", "content": "On the mat 🦊. "}
SYSTEM = {"role": "system", "content": "Be brief."}
CHATS = {
    "one turn": [USER],
    "three turns": [USER, ASSISTANT, {"role": "user", "content": "<|eot_id|></s> “why”?"}],
    "system": [SYSTEM, USER],
    "wrong turns": [USER, USER],
    "empty text": [{"role": "user", "content": ""}],
}
TOOL = {
    "type": "function",
    "function": {"name": "find", "description": "é <b>", "parameters": {"type": "object"}},
}


@pytest.fixture(scope="module")
def pair(byte_level_folder):
    return Tokenizer.from_folder(byte_level_folder), AutoTokenizer.from_pretrained(byte_level_folder)


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("form", FORMATS)
def test_agrees_with_transformers(pair, form, chat, tools, prompt):
    ours, theirs = pair
    arguments = {"tools": tools, "add_generation_prompt": prompt}
    refused = {
        ("gemma", "system"): "System role not supported",
        ("gemma", "wrong turns"): "must alternate",
        ("llama 2", "wrong turns"): "must take turns",
    }
    if (form, chat) in refused:
        with pytest.raises(TokenizerError, match=refused[form, chat]):
            ours.apply_chat_template(CHATS[chat], template=FORMATS[form], **arguments)
        return
    theirs.chat_template = FORMATS[form]
    text = theirs.apply_chat_template(CHATS[chat], tokenize=False, **arguments)
    ids = theirs.apply_chat_template(CHATS[chat], return_dict=False, **arguments)
    assert ours.apply_chat_template(CHATS[chat], template=FORMATS[form], tokenize=False, **arguments) == text
    assert ours.apply_chat_template(CHATS[chat], template=FORMATS[form], **arguments) == ids


# What released templates are written with, beyond the plain loop.
CONSTRUCTS = """{%- set ns = namespace(count=0, last=messages|length - 1) %}
{%- macro show(m, depth=0) -%}{{ m.role }}:{% if depth < 2 %}{{ show(m, depth + 1) }}{% endif %}{%- endmacro %}
{%- for m in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if m.role == "user" and m.content is string and not m.content.startswith('<tool_response>') %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{{- messages | selectattr("role", "equalto", "user") | list | length ~ ns.last }}
{%- for m in messages | rejectattr("tool_calls", "defined") %}
    {%- if loop.previtem is defined and loop.previtem.role == m.role %}{{ "same" }}{% endif %}
    {{- (loop.nextitem.role if loop.nextitem else 'end') ~ show(m) ~ loop.length ~ loop.revindex }}
    {%- if m.role == 'stop' %}{% break %}{% elif m.role == 'skip' %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- generation %}{{ m['content'] | trim | upper | replace('A', 'b') }}{% endgeneration %}
    {%- for key, value in m.items() if key != 'role' %}{{ key ~ '=' }}{{ value | tojson }}{% endfor %}
    {%- for key, value in m | items %}{{ key }}{% endfor %}
{%- endfor %}
{{- ns.count }}{{ [1, 2] + [3] }}{{ tools | map(attribute='function.name') | join(', ') }}
{%- if tools is iterable and tools is not mapping %}{{ tools[0].function.parameters | dictsort }}{% endif %}
{{- "%s-%d" | format("x", 3) }}{{ "a,b".split(",")[-1] }}{{ messages[-1].content.rstrip('\\n') }}{{ 7 // 2 }}
{{- missing is defined }}{{ dict(a=1).get('b', 'c') }}{{ messages[0].get('x') is none }}"""


def test_constructs_of_released_templates(pair):
    ours, theirs = pair
    call = {"role": "assistant", "content": "A", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    stop = {"role": "stop", "content": "ba\n"}
    messages = [SYSTEM, USER, {"role": "user", "content": "é"}, {"role": "skip", "content": "x"}, call, stop, ASSISTANT]
    theirs.chat_template = CONSTRUCTS
    text = theirs.apply_chat_template(messages, tools=[TOOL], tokenize=False)
    assert ours.apply_chat_template(messages, tools=[TOOL], template=CONSTRUCTS, tokenize=False) == text
    assert text.startswith("21user") and "same" in text and "find" in text and text.endswith("3FalsecTrue")


PARTS = "{% for m in messages %}{{ m.role }}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "content"),
    [(form, content) for form in FORMATS.values() for content in ("On the", "On the ", "  On the")]
    + [(PARTS, [{"type": "text", "text": "On the "}, {"type": "image"}])],
)
def test_continue_final_message(pair, template, content):
    ours, theirs = pair
    chat = [*([USER] if isinstance(content, str) else []), {"role": "assistant", "content": content}]
    theirs.chat_template = template
    arguments = {"continue_final_message": True, "tokenize": False}
    text = theirs.apply_chat_template(chat, **arguments)
    assert ours.apply_chat_template(chat, template=template, **arguments) == text
    assert text.rstrip().endswith("On the")


def test_continue_final_message_refuses(pair):
    ours, _ = pair
    for messages, words in (
        ([], "last message"),
        ([{"role": "assistant", "content": None}], "last message"),
        ([{"role": "assistant", "content": [{"type": "image"}]}], "last message"),
    ):
        with pytest.raises(TokenizerError, match=words):
            ours.apply_chat_template(messages, continue_final_message=True)
    with pytest.raises(TokenizerError, match="exclude each other"):
        ours.apply_chat_template([USER], continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(TokenizerError, match="leaves out"):
        ours.apply_chat_template([USER], continue_final_message=True, template="{{ 'nothing' }}")


def test_one_bos_only(pair):
    """A template's BOS is the only one, as ids and as text that is encoded later with the defaults."""
    ours, theirs = pair
    ids = ours.apply_chat_template([USER])
    text = ours.apply_chat_template([USER], tokenize=False)
    assert ids.count(ours.bos_token_id) == 1
    assert ours.encode(text) == ids == ours.encode(text, add_special_tokens=False)
    assert theirs.encode(text).count(ours.bos_token_id) == 2
    assert ours.encode_batch([text, "the"])[0][0].tolist() == ids
    # ChatML writes no BOS, and none is added to its ids.
    assert ours.bos_token_id not in ours.apply_chat_template([USER], template=folders.CHATML)


def test_variables_reach_the_template(pair):
    ours, theirs = pair
    template = "{{ date }}{{ n + 1 }}{{ documents[0].text }}{{ bos_token }}{{ eos_token }}{{ pad_token }}"
    documents = [{"title": "a", "text": "b"}]
    theirs.chat_template = template
    arguments = {"documents": documents, "tokenize": False, "date": "today", "n": 1}
    text = theirs.apply_chat_template([USER], **arguments)
    assert ours.apply_chat_template([USER], template=template, **arguments) == text
    assert text == "today2b<|begin|><|eot_id|>"


def folder_with(tmp_path, byte_level_folder, *, config=None, files=()):
    Tokenizer.from_folder(byte_level_folder).save(tmp_path)
    folders.write(
        tmp_path,
        "tokenizer_config.json",
        {"bos_token": "<|begin|>", "tokenizer_class": "PreTrainedTokenizerFast"}
        | ({} if config is None else {"chat_template": config}),
    )
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
        ("text", [], {}, "text"),
        ("text", [JINJA], {}, "jinja"),
        ("text", [OLD], {}, "text"),
        ("text", [JINJA, RAG], {"template": "rag"}, "rag"),
        ("text", [JINJA, RAG], {"tools": [TOOL]}, "jinja"),
        (NAMED, [], {}, "plain"),
        (NAMED, [], {"tools": [TOOL]}, "tools"),
        (NAMED, [], {"tools": [TOOL], "template": "default"}, "plain"),
        (NAMED, [], {"template": "tool_use"}, "tools"),
        (NAMED, [], {"template": "{{ 'own' }}"}, "own"),
        (NAMED[:1], [], {"tools": [TOOL]}, "plain"),
        ({"default": "mapped"}, [], {}, "mapped"),
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
    ("config", "call", "words"),
    [
        (None, {}, "has no chat template. Likely cause: a base model"),
        (NAMED[1:], {}, r"no default chat template.*tool_use"),
        (NAMED, {"template": "rag"}, r"no chat template 'rag'.*'default', 'tool_use'"),
        ("{% for %}", {}, "line 1: syntax error"),
        ("{{ x", {}, "syntax error"),
        ("\n{{ messages[0].a.b }}", {}, "line 2: UndefinedError"),
    ],
)
def test_templates_that_cannot_be_used(tmp_path, byte_level_folder, config, call, words):
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, byte_level_folder, config=config))
    with pytest.raises(TokenizerError, match=words):
        tokenizer.apply_chat_template([USER], **call)


@pytest.mark.parametrize("declared", [5, [{"name": "default"}], ["text"], {"default": 5}, [NAMED]])
def test_malformed_template_entries(tmp_path, byte_level_folder, declared):
    with pytest.raises(TokenizerError, match="chat_template must be a string or a list"):
        Tokenizer.from_folder(folder_with(tmp_path, byte_level_folder, config=declared))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"messages": "hello"}, "messages must be a list of dicts"),
        ({"messages": [[USER]]}, "messages must be a list of dicts"),
        ({"messages": USER}, "messages must be a list of dicts"),
        ({"messages": [USER], "tools": [print]}, "tools must be a list of dicts"),
        ({"messages": [USER], "documents": ["text"]}, "documents must be a list of dicts"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "lone surrogate"),
    ],
)
def test_wrong_arguments(pair, call, words):
    with pytest.raises(TokenizerError, match=words):
        pair[0].apply_chat_template(**call)
