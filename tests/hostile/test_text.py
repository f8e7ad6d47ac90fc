"""Tokenizer files, chat templates and texts, spoiled in every way by name: each ends in a typed error, soon and in
little memory. What templates that are not hostile must be able to do: tests/text/test_sandbox.py."""

import copy
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ligermodels.errors import InputError, TokenizerError
from ligermodels.text import StopStrings, StreamDecoder, Tokenizer, chat, limits
from tests.hostile.folders import limited, spoiled
from tests.hostile.fuzz_text import CHAT, CONFIG, TEXT, TOKENIZER, TOOLS, Fuzz
from tests.text import folders

Spoil = Callable[[Path], object]
JSON, MODEL, SETTINGS = "tokenizer.json", "tokenizer.model", "tokenizer_config.json"
SPECIAL, TEMPLATE = "special_tokens_map.json", "chat_template.jinja"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
HTML = b"\n<!DOCTYPE html><html><body>Sign in</body></html>" * 9
OUTSIDE = Path("/etc/hostname")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    root = tmp_path_factory.mktemp("good")
    fuzz = Fuzz(root)
    use(fuzz.json)  # what is imported late is imported
    use(fuzz.model)
    return {"json": fuzz.json, "model": fuzz.model}


@pytest.fixture(scope="module")
def tokenizer(good):
    return Tokenizer.from_folder(good["json"])


def use(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode(TEXT)
    tokenizer.decode(ids)
    stream = StreamDecoder(tokenizer)
    for index in ids:
        stream.put(index)
    tokenizer.apply_chat_template(CHAT, tools=TOOLS)


def put(file: str, content: bytes | object) -> Spoil:
    """`file` holds these bytes, or this as JSON."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()

    def spoil(folder: Path) -> None:
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(data)

    return spoil


def place(file: str, make: Callable[[Path], object]) -> Spoil:
    """Something else in the place of a file."""

    def spoil(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        make(folder / file)

    return spoil


def part(**changes: object) -> Spoil:
    """tokenizer.json with other parts."""
    return put(JSON, {**TOKENIZER, **changes})


def vocabulary(**changes: object) -> Spoil:
    return part(model={**TOKENIZER["model"], **changes})


def settings(**changes: object) -> Spoil:
    return put(SETTINGS, {**CONFIG, **changes})


def added(entries: object) -> Spoil:
    return settings(added_tokens_decoder=entries)


def times(count: int, key: str, step: dict) -> dict:
    return {"type": "Sequence", key: [step] * count}


def split(pattern: str) -> Spoil:
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return part(pre_tokenizer=step, normalizer=None)


DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
MANY = {str(index): folders.added(f"<x{index}>") for index in range(1, 150_000)}
HIDDEN = json.dumps({**TOKENIZER, "normalizer": None})[:-1].encode()
DOUBLES = json.dumps(times(60, "normalizers", DOUBLE)).encode()
PIECE_A = {"Sequence": {"id": "A", "type_id": 0}}

FILES: dict[str, tuple[Spoil, str]] = {
    "json: empty": (put(JSON, b""), "not valid JSON"),
    "json: cut": (lambda f: (f / JSON).write_bytes((f / JSON).read_bytes()[:-9]), "not valid JSON"),
    "json: zeros": (put(JSON, bytes(10**6)), "not valid JSON"),
    "json: not UTF-8": (put(JSON, b'{"a": "\xff"}'), "not UTF-8"),
    "json: UTF-16": (put(JSON, json.dumps(TOKENIZER).encode("utf-16")), "not UTF-8"),
    "json: nested deeply": (put(JSON, b"[" * 10**6), "not valid JSON"),
    "json: a million lists": (put(JSON, b"[" + b"[]," * 10**6 + b"1]"), "cannot be loaded"),
    "json: a number of 10^5 digits": (put(JSON, b'{"version": ' + b"9" * 10**5 + b"}"), "not valid JSON"),
    "json: of 70 MB": (place(JSON, lambda p: (p.touch(), os.truncate(p, 70 * 2**20))), "too large to be"),
    "json: git-lfs pointer": (put(JSON, LFS), "git lfs pull"),
    "json: HTML page": (put(JSON, HTML), "HTML page"),
    "json: a list": (put(JSON, []), "no `model`"),
    "json: of another program": (put(JSON, CONFIG), "no `model`"),
    "json: model of another kind": (vocabulary(type="Tekken"), "'Tekken' is unknown"),
    "json: model null": (part(model=None), "no `model`"),
    "json: vocab a list": (vocabulary(vocab=[1]), "malformed"),
    "json: ids that are texts": (vocabulary(vocab={"a": "b"}), "malformed"),
    "json: an id of 2^64": (vocabulary(vocab={"a": 2**64}), "malformed"),
    "json: a negative id": (vocabulary(vocab={"a": -1}), "malformed"),
    "json: a merge of what is not there": (vocabulary(merges=[["q", "z"]]), "out of vocabulary"),
    "json: merges of the wrong shape": (vocabulary(merges=[["a"]]), "malformed"),
    "json: dropout of 2": (vocabulary(dropout=2.0), "between 0 and 1"),
    "json: an unknown normalizer": (part(normalizer={"type": "Shout"}), "malformed"),
    "json: sixty doublings": (part(normalizer=times(60, "normalizers", DOUBLE)), "times longer"),
    "json: doublings without a type": (
        part(normalizer={"normalizers": [{"pattern": {"String": "a"}, "content": "aa"}] * 60}), "times longer"),
    "json: doublings behind the vocabulary": (put(JSON, HIDDEN + b', "normalizer": ' + DOUBLES + b"}"), "times longer"),
    "json: doublings under an escaped name": (
        put(JSON, HIDDEN + b', "norm\\u0061lizer": ' + DOUBLES + b"}"), "times longer"),
    "json: a replacement of 10^5": (
        part(normalizer={"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 10**5}), "times longer"),
    "json: bytes of bytes of bytes": (part(pre_tokenizer=times(20, "pretokenizers", BYTES)), "times longer"),
    "json: doublings in the decoder": (part(decoder=times(60, "decoders", DOUBLE)), "times longer"),
    "json: a charsmap of nothing": (
        part(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "cannot be loaded"),
    "json: the text 10^5 times": (
        part(post_processor={"type": "TemplateProcessing", "single": [PIECE_A] * 10**5, "pair": [PIECE_A],
                             "special_tokens": {}}), "post-processor has"),
    "json: a pattern that backtracks": (split("(a+)+$|(.+)+x"), "retry-limit"),
    "json: a pattern 5000 deep": (split("(?:" * 5000 + "a" + ")" * 5000), "depth limit"),
    "json: a pattern cut": (split("[[["), "premature end"),
    "json: a pattern that calls itself": (split("(?<n>a\\g<n>)"), "never ending"),
    "json: a pipe": (place(JSON, os.mkfifo), "not a regular"),
    "json: a directory": (place(JSON, os.mkdir), "not a regular"),
    "json: a device": (place(JSON, lambda p: p.symlink_to("/dev/zero")), "not a regular"),
    "json: a link to nothing": (place(JSON, lambda p: p.symlink_to("none")), "link to nothing"),
    "json: a link out of the folder": (place(JSON, lambda p: p.symlink_to(OUTSIDE)), "leaves its folder"),
    "json: not there": (lambda f: (f / JSON).unlink(), "neither tokenizer.json nor"),
    "json: larger than the embedding": (put("config.json", {"vocab_size": 3}), "the model's embedding 3 rows"),
    "model: empty": (put(MODEL, b""), "not a SentencePiece"),
    "model: cut": (lambda f: (f / MODEL).write_bytes((f / MODEL).read_bytes()[:-99]), "not a SentencePiece"),
    "model: no unknown token": (
        lambda f: (f / MODEL).write_bytes(b"=" + (f / MODEL).read_bytes()[5:]), "no pieces or no unknown token"),
    "model: zeros": (put(MODEL, bytes(10**6)), "not a SentencePiece"),
    "model: text": (put(MODEL, b"the cat sat\n" * 999), "not a SentencePiece"),
    "model: a length of 2^63": (put(MODEL, b"\x0a" + b"\xff" * 9 + b"\x01"), "not a SentencePiece"),
    "model: nested groups": (put(MODEL, b"\x0b" * 10**5), "not a SentencePiece"),
    "model: of 70 MB": (place(MODEL, lambda p: (p.touch(), os.truncate(p, 70 * 2**20))), "too large to be"),
    "model: tiktoken": (put(MODEL, b"IQ== 0\nIg== 1\n"), "tiktoken file"),
    "model: git-lfs pointer": (put(MODEL, LFS), "git lfs pull"),
    "model: HTML page": (put(MODEL, HTML), "HTML page"),
    "model: a pipe": (place(MODEL, os.mkfifo), "not a regular"),
    "model: an added token of two ids": (
        put(SETTINGS, {"added_tokens_decoder": {"7": {"content": "</s>"}}}), "two? ?checkpoints mixed"),
    "model: 50,000 added tokens": (
        put(SETTINGS, {"added_tokens_decoder": {str(i): {"content": f"<{i}>"} for i in range(500, 50_500)}}),
        "at most 20,000 added tokens"),
    "model: an unknown bos": (put(SETTINGS, {"bos_token": "<bos>"}), "no token '<bos>'"),
    "config: a list": (put(SETTINGS, []), "holds a list"),
    "config: cut": (put(SETTINGS, b'{"bos_token": '), "not valid JSON"),
    "config: nested deeply": (put(SETTINGS, b'{"a":' * 10**5), "not valid JSON"),
    "config: a number of 10^5 digits": (put(SETTINGS, b'{"a": ' + b"9" * 10**5 + b"}"), "not valid JSON"),
    "config: of 17 MB": (put(SETTINGS, b"{" + b" " * 17 * 2**20 + b"}"), "too large"),
    "config: a million lists": (put(SETTINGS, b'{"a": [' + b"[]," * 10**6 + b"1]}"), "too large"),
    "config: 5 MB of one letter beyond ASCII": (
        put(SETTINGS, '{"a": "🦊'.encode() + b"a" * 5 * 2**20 + b'"}'), "not all is ASCII"),
    "config: a lone surrogate": (settings(bos_token="\ud800"), "lone surrogate"),
    "config: not UTF-8": (put(SETTINGS, b'{"a": "\xff"}'), "not UTF-8"),
    "config: a link out of the folder": (place(SETTINGS, lambda p: p.symlink_to(OUTSIDE)), "leaves its folder"),
    "config: a pipe": (place(SETTINGS, os.mkfifo), "not a regular"),
    "config: extra tokens a number": (settings(additional_special_tokens=5), "must be a list, not 5"),
    "config: eos without an id": (settings(eos_token="<end>" * 10**5), "has no id"),
    "added: a list": (added([1]), "added token cannot be read"),
    "added: an id of letters": (added({"x": {"content": "a"}}), "added token cannot be read"),
    "added: an id of 10^5 digits": (added({"9" * 10**5: {"content": "a"}}), "added token cannot be read"),
    "added: an id of 2^31": (added({str(2**31): {"content": "a"}}), r"below 2\*\*31"),
    "added: a negative id": (added({"-1": {"content": "a"}}), "id of 0 or more"),
    "added: no content": (added({"1": {}}), "added token cannot be read"),
    "added: content empty": (added({"1": {"content": ""}}), "added token cannot be read"),
    "added: content a list": (added({"1": {"content": ["a"]}}), "added token cannot be read"),
    "added: an id of another": (added({"0": {"content": "</s>"}}), "checkpoints mixed"),
    "added: behind a gap": (added({"9999": {"content": "<x>"}}), "lacks the added token '<x>'"),
    "added: 150,000": (added(MANY), "too large"),
    "added: a megabyte": (added({"99": {"content": "x" * 10**6}}), "cannot be read .*1 to 1,000 characters"),
    "added_tokens.json: a list": (
        lambda f: (put(SETTINGS, {})(f), put("added_tokens.json", [])(f)), "holds a list"),
    "added_tokens.json: ids that are lists": (
        lambda f: (put(SETTINGS, {})(f), put("added_tokens.json", {"a": []})(f)), "added token cannot be read"),
    "special_tokens_map: a number": (
        lambda f: (put(SETTINGS, {})(f), put(SPECIAL, 5)(f)), "holds a int"),
    "special_tokens_map: unknown bos": (
        lambda f: (put(SETTINGS, {})(f), put(SPECIAL, {"bos_token": "<bos>"})(f)), "'<bos>', which has no id"),
    "generation: eos a text": (put("generation_config.json", {"eos_token_id": "2"}), "must be an integer or a list"),
    "generation: eos of lists": (put("generation_config.json", {"eos_token_id": [[2]]}), "must be an integer or"),
    "generation: eos of 2^31": (put("generation_config.json", {"eos_token_id": 2**31}), "must be an integer .* up to"),
    "generation: pad of 2^63": (put("generation_config.json", {"pad_token_id": 2**63}), "must be an integer .* up to"),
    "generation: pad NaN": (put("generation_config.json", {"pad_token_id": float("nan")}), "must be an integer"),
    "generation: a comma lost 1000 times": (
        put("generation_config.json", ("{" + " ".join(f'"{i}": 1' for i in range(1000)) + "}").encode()),
        "not valid JSON"),
    "config.json: eos true": (put("config.json", {"eos_token_id": True}), "must be an integer"),
    "config.json: a link out": (place("config.json", lambda p: p.symlink_to(OUTSIDE)), "leaves its folder"),
}  # fmt: skip

# A template that grows: sixty times over, from two letters or a list of one.
GROW = "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}%s{%% endfor %%}"
NEST = GROW % ("[1]", "{% set ns.x = [ns.x, ns.x] %}")
TEMPLATES: dict[str, tuple[str, str]] = {
    "loops within loops": ("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", "more than"),
    "a range of 10^9": ("{% for i in range(10**9) %}{% endfor %}", "too big"),
    "a macro that calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "without end"),
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", "stopped at"),
    "a block that calls itself": ("{% block a %}{{ self.a() }}{% endblock %}", "without end"),
    "a loop that calls itself": ("{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}", "without end"),
    "a text times 10^9": ("{{ 'a' * 10**9 }}", "a repetition of"),
    "a list times 10^9": ("{{ [1] * 10**9 }}", "a repetition of"),
    "10**10**10": ("{{ 10**(10**10) }}", "an integer of"),
    "shifted by squares": (GROW % ("7", "{% set ns.x = ns.x * ns.x %}"), "an integer of"),
    "a literal of 10^5 digits": ("{{ " + "9" * 10**5 + " }}", "Exceeds the limit"),
    "a hexadecimal number": ("{{ ('f' * 99999)|int(base=16) }}", "an integer of"),
    "a text that doubles": (GROW % ("'aa'", "{% set ns.x = ns.x ~ ns.x %}"), "a text of more"),
    "a list that holds another twice": (NEST, "a structure of"),
    "a comparison of two such": (
        NEST.replace("60", "16") + NEST.replace("ns", "mm") + "{{ ns.x == mm.x }}", "a structure of"),
    "a tuple 10^5 deep as a key": (
        "{% set ns = namespace(x=1) %}{% for i in range(99999) %}{% set ns.x = (ns.x,) %}{% endfor %}{{ {ns.x: 1} }}",
        "100 deep"),
    "namespaces that hold another twice": (
        GROW % ("1", "{% set ns.x = namespace(a=ns.x, b=ns.x) %}") + "{{ ns }}{{ [ns] }}{{ x.x }}", "Undefined"),
    "an output without end": (
        "{% for i in range(9999) %}{% for j in range(9999) %}" + "a" * 99 + "{% endfor %}{% endfor %}", "a text of"),
    "a hoard of texts": (
        "{% set s = '🦊' * 9999 %}{% set ns = namespace(x=1) %}{% for i in range(99999) %}"
        "{% set ns.x = namespace(a=ns.x, b=s ~ i) %}{% endfor %}", "bytes in values"),
    "a hoard of small things": (
        "{% set ns = namespace(x=1) %}{% for i in range(99999) %}{% for j in range(99) %}"
        "{% set ns.x = namespace(a=ns.x) %}{% endfor %}{% endfor %}", "bytes in values"),
    "a hoard of arguments": (
        "{% macro f() %}{{ f(*varargs) }}{% endmacro %}{{ f(*range(99999)) }}", "200 arguments"),
    "a long format": ("{{ '%999999999d' % 1 }}", "from format"),
    "a format of many": ("{{ ('{0}' * 9999).format('a' * 9999) }}", "from format"),
    "a width from the arguments": ("{{ '{:>{}}'.format(1, 10**9) }}", "width that is taken"),
    "a wide line": ("{{ 'a'|center(10**9) }}", "handed to the filter center"),
    "an indent of 10^9": ("{{ messages|tojson(indent=10**9) }}", "handed to the filter tojson"),
    "tabs": ("{{ ('\\t' * 9999).expandtabs(9999) }}", "from expandtabs"),
    "a replacement": ("{{ ('a' * 9999)|replace('a', 'b' * 9999) }}", "from replace"),
    "a join": ("{{ range(9999)|join('a' * 9999) }}", "from join"),
    "a filter like a pattern": ("{{ ('<!--' * 60000)|striptags }}", "handed to striptags"),
    "links to find": ("{{ ('www.(' * 50000)|urlize }}", "handed to urlize"),
    "words to wrap": ("{{ ('a' * 200000)|wordwrap(1) }}", "handed to wordwrap"),
    "sorted again and again": (
        "{% set x = range(99999)|list %}{% for i in range(9999) %}{% set y = x|reverse|sort %}{% endfor %}",
        "seconds of computing"),
    "searched again and again": (
        "{% set x = range(99999)|list %}{% for i in range(99999) %}{% if nothing in x %}{% endif %}{% endfor %}",
        "seconds of computing"),
    "searched without a loop": ("{% set x = range(99999)|list %}" + "{% if i in x %}{% endif %}" * 500, "seconds of"),
    "bytes of a number": ("{{ (1).to_bytes(10**9, 'big') }}", "'to_bytes'"),
    "bytes of a text": ("{{ 'a'.encode().center(10**9) }}", "'encode'"),
    "a date": ("{{ strftime_now('%Y' * 99999) }}", "a date of more"),
    "a class": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "'__class__'"),
    "a class by attr": ("{{ ''|attr('__class__') }}", "'__class__'"),
    "a class by map": ("{{ messages|map(attribute='__class__')|list }}", "'__class__'"),
    "a class by format": ("{{ '{0.__class__}'.format(1) }}", "'__class__'"),
    "globals of a function": ("{{ raise_exception.__globals__ }}", "'__globals__'"),
    "a change of the messages": ("{{ messages.append(messages) }}", "'append'"),
    "the frame of a macro": ("{% macro f() %}{% endmacro %}{{ f.__call__.__globals__ }}", "'__call__'"),
    "an include": ("{% include '/etc/passwd' %}", "no loader"),
    "an import": ("{% import 'os' as os %}{{ os.system('true') }}", "no loader"),
    "an extends": ("{% extends 'x' %}", "no loader"),
    "an open tag": ("{% for m in messages %}", "syntax error"),
    "an open comment": ("{#" * 9999, "syntax error"),
    "an unknown filter": ("{{ messages|shout }}", "No filter named 'shout'"),
    "an unknown tag": ("{% shout %}", "unknown tag 'shout'"),
    "an undefined name": ("{{ nothing.at.all }}", "'nothing' is undefined"),
    "a call of nothing": ("{{ nothing() }}", "'nothing' is undefined"),
    "a division by zero": ("{{ 1 // 0 }}", "ZeroDivisionError"),
    "5000 brackets": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "without end"),
    "5000 signs": ("{{ " + "- " * 5000 + "1 }}", "without end"),
    "2500 sums": ("{{ 1" + " + 1" * 2500 + " }}", "without end"),
    "200 loops": ("{% for i in [1] %}" * 200 + "{% endfor %}" * 200, "too many|without end"),
    "200 conditions": ("{% if a %}" * 200 + "{% endif %}" * 200, "too many|without end"),
    "a chain of comparisons": ("{{ 1" + " < 2" * 99 + " }}", "8 comparisons"),
    "a million characters": ("{# " + "a" * 10**6 + " #}", "template of more than"),
    "100,000 tags": ("{{x}}" * 100_000, "template of more than 12,000 words"),
    "its own long words": ("{{ raise_exception('no ' * 9999) }}", "refuses these messages: no no"),
    "a lone surrogate": ("{{ '\\ud800' }}", "lone surrogate"),
}  # fmt: skip
DECLARED: dict[str, tuple[Spoil, str]] = {
    "a number": (settings(chat_template=5), "must be a string or a list"),
    "a list of texts": (settings(chat_template=["{{ x }}"]), "must be a string or a list"),
    "a list without names": (settings(chat_template=[{"template": ""}]), "must be a string or a list"),
    "a name that is a list": (settings(chat_template=[{"name": [], "template": ""}]), "must be a string or a list"),
    "a template that is a list": (settings(chat_template=[{"name": "default", "template": []}]), "must be a string"),
    "no default": (settings(chat_template=[{"name": "rag", "template": "x"}]), "no default chat template"),
    "none at all": (settings(chat_template=None), "has no chat template"),
    "a file that is not UTF-8": (put(TEMPLATE, b"\xff"), "not UTF-8"),
    "a file that is an HTML page": (put(TEMPLATE, HTML), "HTML page"),
    "a file of 5 MB": (put(TEMPLATE, b"a" * 5 * 2**20), "too large to be"),
    "a file that is a pipe": (place(TEMPLATE, os.mkfifo), "not a regular"),
    "a file that is a link out": (place(TEMPLATE, lambda p: p.symlink_to(OUTSIDE)), "leaves its folder"),
    "more that are links out": (
        lambda f: ((f / "additional_chat_templates").mkdir(),
                   (f / "additional_chat_templates/x.jinja").symlink_to(OUTSIDE)), "leaves its folder"),
    "more than a hundred": (
        lambda f: [put(f"additional_chat_templates/{i}.jinja", b"")(f) for i in range(101)], "at most 100"),
    "in the config": (settings(chat_template="{{ ''.__class__ }}"), "chat template 'default' of .*'__class__'"),
    "in the old file": (
        lambda f: (settings(chat_template=None)(f), put("chat_template.json", {"chat_template": 5})(f)),
        "must be a string or a list"),
    "among the named": (
        settings(chat_template=[{"name": "default", "template": ""}, {"name": "tool_use", "template": "{% x"}]),
        "chat template 'tool_use' of .*syntax error"),
}  # fmt: skip

CASES = {
    **{f"file, {name}": case for name, case in FILES.items()},
    **{f"template, {name}": (put(TEMPLATE, text.encode()), words) for name, (text, words) in TEMPLATES.items()},
    **{f"declared, {name}": case for name, case in DECLARED.items()},
}


@pytest.mark.parametrize("name", list(CASES))
def test_a_bad_file_ends_in_a_typed_error(good, name, monkeypatch):
    spoil, words = CASES[name]
    if "seconds of" not in words:  # on a slow machine that limit would come before the one that is looked for
        monkeypatch.setattr(limits, "MAX_SECONDS", 60.0)
    with spoiled(good["model" if "file, model" in name else "json"], spoil) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with limited(folder), pytest.raises(TokenizerError, match=f"(?s){words}") as caught:
            use(folder)
        message = str(caught.value)
        assert len(message) < 3000, "a message fits on a screen"
        assert str(folder) in message or "encode: " in message or "lone surrogate" in message, "and says where"


def holds_itself() -> list:
    items: list = [{"role": "user"}]
    items[0]["content"] = items
    return items


def doubled() -> list:
    items: list = ["x"]
    for _ in range(60):
        items = [items, items]
    return [{"role": "user", "content": items}]


class Loud:
    def __index__(self):
        raise TypeError("no")


CALLS: dict[str, tuple[Callable[[Tokenizer], object], type, str]] = {
    **{
        f"encode {value!r}": (lambda t, value=value: t.encode(value), TokenizerError, "must be a str, not")
        for value in (None, b"bytes", 5, 1.5, ["a"], {"a": 1}, Path("x"), bytearray(9))
    },
    **{
        f"encode_batch {value!r}": (lambda t, value=value: t.encode_batch(value), InputError, "takes a list of texts")
        for value in ("text", None, 5)
    },
    "encode_batch of numbers": (lambda t: t.encode_batch([1, 2]), TokenizerError, "must be a str, not int"),
    "encode_batch, a side": (lambda t: t.encode_batch(["a"], "middle"), InputError, "padding_side"),
    "encode_batch, a side of lists": (lambda t: t.encode_batch(["a"], ["left"]), InputError, "padding_side"),
    "encode a lone surrogate": (lambda t: t.encode("the \ud83e"), TokenizerError, "lone surrogate .* position 4"),
    "encode one at the end of 10 MB": (lambda t: t.encode("a" * 10**7 + "\udc00"), TokenizerError, "lone surrogate"),
    **{
        f"decode {value!r}": (lambda t, value=value: t.decode(value), InputError, "decode takes one text")
        for value in (None, "12", "text", [1.0], [1.5], [float("nan")], ["1"], [None], [[1]], [b"1"])
    },
    "decode a float tensor": (lambda t: t.decode(torch.ones(3)), InputError, "decode takes one text"),
    "decode a batch": (lambda t: t.decode(torch.ones(2, 3, dtype=torch.int64)), InputError, "Decode a batch by rows"),
    "decode a meta tensor": (lambda t: t.decode(torch.ones(3, device="meta").long()), InputError, "one text"),
    "decode what refuses": (lambda t: t.decode([Loud()]), InputError, "decode takes one text"),
    **{
        f"decode {value}": (lambda t, value=value: t.decode([value]), InputError, "is not a token id")
        for value in (-1, -100, 2**31, 2**63, 10**100, -(10**100))
    },
    **{
        f"put {value!r}": (lambda t, value=value: StreamDecoder(t).put(value), InputError, "put takes one id")
        for value in (None, 1.5, "1", [1], float("inf"), torch.ones(3), torch.tensor(1.5))
    },
    **{
        f"put {value}": (lambda t, value=value: StreamDecoder(t).put(value), InputError, "is not a token id")
        for value in (-1, 2**31, 10**100)
    },
    "stop strings of numbers": (lambda t: StopStrings([5]), InputError, "non-empty strings"),
    **{
        f"messages {value!r}": (
            lambda t, value=value: t.apply_chat_template(value), TokenizerError, "messages must be a list of dicts")
        for value in (None, "Hi", 5, ["Hi"], [None], [[]], {"role": "user", "content": "Hi"})
    },
    "messages without a role": (lambda t: t.apply_chat_template([{}]), TokenizerError, "no attribute 'role'"),
    "messages with content null": (
        lambda t: t.apply_chat_template([{"role": "user", "content": None}]), TokenizerError, "TypeError"),
    "messages that hold themselves": (
        lambda t: t.apply_chat_template(holds_itself()), TokenizerError, "holds itself"),
    "messages that double": (lambda t: t.apply_chat_template(doubled()), TokenizerError, "524,288 items"),
    "tools a text": (lambda t: t.apply_chat_template(CHAT, tools="find"), TokenizerError, "tools must be a list"),
    "documents a number": (lambda t: t.apply_chat_template(CHAT, documents=5), TokenizerError, "documents must be"),
    "a template that is a number": (lambda t: t.apply_chat_template(CHAT, template=5), TokenizerError, "not int"),
    "a template of no name": (
        lambda t: t.apply_chat_template(CHAT, template="x" * 10**6), TokenizerError, "there is no chat template 'xx"),
    "a folder that is None": (lambda t: Tokenizer.from_folder(None), TokenizerError, "not a folder"),
    "a folder that is a file": (lambda t: Tokenizer.from_folder(OUTSIDE), TokenizerError, "not a folder"),
    "a folder with a zero": (lambda t: Tokenizer.from_folder("a\0b"), TokenizerError, "not a folder"),
    "a folder of 10^5 letters": (lambda t: Tokenizer.from_folder("x" * 10**5), TokenizerError, "not a folder"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CALLS))
def test_a_bad_call_ends_in_a_typed_error(good, tokenizer, name):
    call, error, words = CALLS[name]
    with limited(good["json"]), pytest.raises(error, match=f"(?s){words}") as caught:
        call(tokenizer)
    assert len(str(caught.value)) < 3000


def test_good_ones_pass_within_the_limits(good):
    for folder in good.values():
        with limited(folder):
            use(folder)


def test_odd_but_sound_files_load(good):
    """Parts in alphabetical order, escaped letters, a link that stays inside, ids that no vocabulary reaches."""
    expected = Tokenizer.from_folder(good["json"]).encode(TEXT)

    def spoil(folder: Path) -> None:
        text = json.dumps(copy.deepcopy(TOKENIZER), sort_keys=True).replace('"the', '"\\u0074he')
        (folder / "x.json").write_text(text)
        (folder / JSON).unlink()
        (folder / JSON).symlink_to("x.json")
        put("generation_config.json", {"eos_token_id": [2, 2**31 - 1], "pad_token_id": -1})(folder)

    with spoiled(good["json"], spoil) as folder:
        tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode(TEXT) == expected
    assert tokenizer.eos_token_ids == (2, 2**31 - 1)


def test_ids_of_every_integer_kind(tokenizer):
    ids = tokenizer.encode("the cat")
    for kind in (list, tuple, torch.tensor, lambda ids: torch.tensor(ids, dtype=torch.int32).numpy(), iter):
        assert tokenizer.decode(kind(ids), skip_special_tokens=True) == "the cat"
    assert tokenizer.decode([torch.tensor(index) for index in ids], True) == "the cat"
    assert tokenizer.decode([*ids, 2**31 - 1], True) == "the cat", "a padded vocabulary"
    stream = StreamDecoder(tokenizer)
    assert "".join(stream.put(index) for index in torch.tensor(ids)) == "the cat"


def test_ten_megabytes(good):
    """Of a text like any other; the limits hold for files, not for what a user hands in."""
    tokenizer, text = Tokenizer.from_folder(good["json"]), "<|user|>" * 1_250_000
    ids = tokenizer.encode(text)
    assert ids[-1_250_000:] == [3] * 1_250_000
    assert tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False).count(text) == 1


def test_limits_grow_with_the_messages(tokenizer):
    """A conversation that is copied, joined and cut is no attack, however long."""
    template = (
        "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x ~ m.content|trim|upper %}{% endfor %}"
        "{{ ns.x }}{{ messages[1:]|length }}"
    )
    messages = [{"role": "user", "content": f"{i} " * 300} for i in range(1000)]
    text = tokenizer.apply_chat_template(messages, template=template, tokenize=False)
    assert text == "".join(m["content"].strip() for m in messages) + "999"


def test_mutated_files_and_templates(tmp_path):
    """A short run of fuzz_text: nothing but typed errors, and some of every outcome."""
    fuzz = Fuzz(tmp_path)
    for target in fuzz.targets(1000, derandomize=True):
        target()
    for kind, counts in fuzz.counts.items():
        assert counts["TokenizerError"] > counts.total() / 8 and counts["worked"], (kind, counts)
    assert sum(counts.total() for counts in fuzz.counts.values()) > 800


def test_an_uncaught_error_is_found(tmp_path, monkeypatch):
    """The fuzzer's own control: a reader that trips over a damaged template is told."""
    fuzz = Fuzz(tmp_path)
    monkeypatch.setattr(chat, "_reason", lambda error: {}["missing"])
    with pytest.raises(KeyError):
        fuzz.targets(200, derandomize=True, report_multiple_bugs=False)[-1]()
