"""Templates that attack end soon, in a TokenizerError that says why; ordinary ones are not refused."""

import time

import pytest

from ligermodels.errors import TokenizerError
from ligermodels.text import limits
from ligermodels.text.chat import ChatTemplates

MESSAGES = [{"role": "user", "content": "hi"}]


def render(template: str, messages=MESSAGES) -> str:
    return ChatTemplates({}, {"bos_token": "<s>"}, "folder").render(
        messages,
        tools=None,
        documents=None,
        add_generation_prompt=False,
        continue_final_message=False,
        template=template,
        variables={},
    )[0]


def grow(step: str, start: str = "'aa'") -> str:
    return f"{{% set ns = namespace(x={start}) %}}{{% for i in range(60) %}}{step}{{% endfor %}}"


NEST = grow("{% set ns.x = [ns.x, ns.x] %}", "[1]")

ENDLESS = {
    "huge range": ("{% for i in range(10**9) %}{% endfor %}", "range too big"),
    "nested loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "stopped at more than",
    ),
    "endless output": (
        "{% for i in range(9999) %}{% for j in range(9999) %}" + "a" * 99 + "{% endfor %}{% endfor %}",
        "a text of more than",
    ),
    "macro calls itself": ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "calls itself without end"),
    "macro tree": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "stopped at more than",
    ),
    "recursive loop": (
        "{% for x in messages recursive %}{{ loop(messages) }}{{ loop(messages) }}{% endfor %}",
        "calls itself without end",
    ),
    "deep expression": ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "without end"),
    "deep blocks": ("{% for i in [1] %}" * 200 + "{% endfor %}" * 200, "error"),
    "long template": ("{{ x }}" * 200_000, "a template of more than"),
}
LARGE = {
    "repeat": ("{{ 'a' * 10**9 }}", "repetition"),
    "repeat list": ("{{ [1] * 10**9 }}", "repetition"),
    "power": ("{{ 10 ** (10 ** 9) }}", "integer of more than"),
    "square": (grow("{% set ns.x = ns.x * ns.x %}", "7"), "integer of more than"),
    "center filter": ("{{ 'a'|center(10**9) }}", "filter center"),
    "ljust": ("{{ 'a'.ljust(10**9) }}", "ljust"),
    "percent width": ("{{ '%1000000000d' % 1 }}", "from format"),
    "percent star": ("{{ '%*d' % (1000000000, 1) }}", "from its arguments"),
    "format width": ("{{ '{:>1000000000}'.format(1) }}", "from format"),
    "format nested": ("{{ '{:>{}}'.format(1, 1000000000) }}", "from its arguments"),
    "format_map": ("{{ '{a:>1000000000}'.format_map({'a': 1}) }}", "from format_map"),
    "format filter": ("{{ '%1000000000d'|format(1) }}", "from format"),
    "tilde": (grow("{% set ns.x = ns.x ~ ns.x %}"), "a text of more than"),
    "plus": (grow("{% set ns.x = ns.x + ns.x %}"), "sum of more than"),
    "set block": (grow("{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"), "a text of more than"),
    "printed nest": (NEST + "{{ ns.x }}", "a structure of more than"),
    "json nest": (NEST + "{{ ns.x|tojson }}", "a structure of more than"),
    "filtered nest": (NEST + "{{ ns.x|upper }}", "a structure of more than"),
    "percent nest": (NEST + "{{ '%s' % (ns.x,) }}", "a structure of more than"),
    "formatted nest": (NEST + "{{ '{}'.format(ns.x) }}", "a structure of more than"),
    "joined nest": (NEST + "{{ [ns.x]|join }}", "a structure of more than"),
    "replace": ("{{ ('a' * 100000).replace('a', 'b' * 100000) }}", "from replace"),
    "replace filter": ("{{ ('a' * 100000)|replace('a', 'b' * 100000) }}", "from replace"),
    "join": ("{{ ('x' * 1000).join(range(9999)|map('string')) }}", "from join"),
    "join filter": ("{{ range(9999)|map('string')|join('x' * 1000) }}", "from join"),
    "json indent": (
        "{% set ns = namespace(x=range(9999)|list) %}{% for i in range(90) %}{% set ns.x = [ns.x] %}"
        "{% endfor %}{{ ns.x|tojson(indent=1000) }}",
        "a text of more than",
    ),
    "json indent alone": ("{{ [1]|tojson(indent=10**9) }}", "filter tojson"),
    "json separators": ("{{ range(9999)|list|tojson(separators=('x' * 10000, ':')) }}", "a text of more than"),
    "round": ("{{ 1.5|round(1000000000, 'ceil') }}", "filter round"),
    "batch": ("{{ [1]|batch(1000000000, 0)|list }}", "filter batch"),
    "wordwrap": ("{{ ('a' * 10000)|wordwrap(1, wrapstring='b' * 10000) }}", "from wordwrap"),
    "indent": ("{{ ('\\n' * 100000)|indent(100) }}", "from indent"),
    "translate": ("{{ ('a' * 100000).translate({97: 'b' * 100000}) }}", "from translate"),
    "expandtabs": ("{{ ('\\t' * 100000).expandtabs(100000) }}", "from expandtabs"),
    "expandtabs by name": ("{{ '\\t'.expandtabs(tabsize=10**9) }}", "from expandtabs"),
    "slow": ("{{ ('a' * 100000)|wordwrap(1) }}", "handed to wordwrap"),
    "sum of lists": ("{{ [[1]] * 9|sum(start=[]) }}", "sum of lists"),
    "deep list": (
        "{% set ns = namespace(x=1) %}{% for i in range(999) %}{% set ns.x = (ns.x,) %}{% endfor %}",
        "100 deep",
    ),
    "many arguments": ("{% macro f() %}{{ varargs|length }}{% endmacro %}{{ f(*range(999)) }}", "200 arguments"),
    "long date": ("{{ strftime_now('%Y' * 9999) }}", "a date of more"),
    "many comparisons": ("{{ 1" + " == 1" * 9 + " }}", "8 comparisons"),
}
HOARD = {
    "strings": ("{{ ('a' * 90000) ~ i }}", "bytes in values"),
    "slices": ("{{ s[i:] }}", "bytes in values"),
    "filtered": ("{{ s|upper }}", "bytes in values"),
    "methods": ("{{ s.upper() }}", "bytes in values"),
    "lists": ("{{ s|list }}", "bytes in values"),
    "sums": ("{{ s + 'a' }}", "bytes in values"),
}
HOARD = {
    f"hoarded {name}": (
        "{% set s = 'ab' * 45000 %}{% set ns = namespace(x=1) %}{% for i in range(9999) %}"
        + f"{{% set ns.x = namespace(before=ns.x, made={made[2:-2]}) %}}"
        + "{% endfor %}",
        words,
    )
    for name, (made, words) in HOARD.items()
}
BLOCKED = {
    "bytes": ("{{ 'a'.encode() }}", "attribute 'encode'"),
    "numbers": ("{{ (1).to_bytes(10**9, 'big') }}", "attribute 'to_bytes'"),
    "class": ("{{ ''.__class__ }}", "attribute '__class__'"),
    "class item": ("{{ ''['__class__'] }}", "attribute '__class__'"),
    "attr filter": ("{{ 'a'|attr('__class__') }}", "attribute '__class__'"),
    "map attribute": ("{{ messages|map(attribute='__class__')|list }}", "attribute '__class__'"),
    "format field": ("{{ '{0.__class__}'.format(1) }}", "attribute '__class__'"),
    "append": ("{{ messages.append(1) }}", "attribute 'append'"),
    "clear": ("{{ messages[0].clear() }}", "attribute 'clear'"),
    "function globals": ("{{ raise_exception.__globals__ }}", "attribute '__globals__'"),
    "namespace": ("{{ namespace.__init__ }}", "__init__"),
    "undefined class": ("{{ nothing.__class__ }}", "__class__"),
    "dict methods": ("{{ dict.mro() }}", "mro"),
    "template": ("{{ self.__init__ }}", "__init__"),
    "include": ("{% include 'x' %}", "no loader"),
    "import": ("{% import 'os' as os %}", "no loader"),
}


ATTACKS = ENDLESS | LARGE | HOARD | BLOCKED


@pytest.mark.parametrize(("template", "words"), ATTACKS.values(), ids=ATTACKS)
def test_attack_is_stopped(template, words, monkeypatch):
    if words != "stopped at more than":  # on a slow machine the limit on time would come before the one looked for
        monkeypatch.setattr(limits, "MAX_SECONDS", 60.0)
    start = time.process_time()
    with pytest.raises(TokenizerError) as caught:
        render(template)
    assert words.lower() in str(caught.value).lower()
    assert time.process_time() - start < 30


def test_messages_are_not_changed_and_objects_not_reached():
    class Image:
        secret = "pixels"

    messages = [{"role": "user", "content": [{"type": "image", "image": Image()}]}]
    assert render("{{ messages[0].content[0].image }}", messages) == "<Image>"
    assert render("{{ messages[0].content[0].image.secret }}|", messages) == "|"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}{{ m.role ~ m['content'] ~ loop.last ~ loop.length }}{% endfor %}", "userhiTrue1"),
        ("{% for i in [1, 2]|reverse %}{{ loop.revindex }}{{ loop.nextitem }}{% endfor %}", "211"),
        ("{% for i in range(4) if i %}{{ i }}{{ loop.length }}{% endfor %}", "132333"),
        ("{% for a in [1, 2, 3] %}{% if a == 2 %}{% continue %}{% endif %}{{ a }}{% endfor %}", "13"),
        ("{% for a in [] %}x{% else %}empty{% endfor %}", "empty"),
        ("{% for a in nothing %}x{% endfor %}|{{ nothing }}|", "||"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{{ {'é<': [1, '>']}|tojson }}", '{"é<": [1, ">"]}'),
        ("{{ {'é': 1}|tojson(ensure_ascii=True) }}", '{"\\u00e9": 1}'),
        ("{{ {'b': 1, 'a': 2}|tojson(separators=(',', '='), sort_keys=True) }}", '{"a"=2,"b"=1}'),
        ("{{ [1]|tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ strftime_now('%Y')|length }}{{ nothing|default(1700000000) }}", "41700000000"),
        ("{{ 'abcdef'[1:3] ~ [1, 2, 3][-1] ~ messages[1:]|length }}", "bc30"),
        ("{{ dict(a=1).a }}{{ cycler('a', 'b').next() }}{{ 'a b'.split(' ')|join('-') }}", "1aa-b"),
        ("{% set x = 1 %}{% generation %}{{ x }}{% set x = 2 %}{% endgeneration %}{{ x }}", "11"),
        ("{{ '%s=%d' % ('a', 1700000000) }}{{ '{:.2f}'.format(0.5) }}", "a=17000000000.50"),
        ("{{ 2 ** 10 }}{{ 7 % 4 }}{{ 'ab' * 2 }}{{ [1] + [2] }}", "10243abab[1, 2]"),
        ("  {% if true %}\n  yes\n  {% endif %}\nend", "  yes\nend"),
    ],
)  # fmt: skip
def test_ordinary_templates_pass(template, text):
    from transformers.utils.chat_template_utils import render_jinja_template

    assert render(template) == text
    assert render_jinja_template([MESSAGES], chat_template=template, bos_token="<s>")[0][0] == text


def test_errors_name_the_line():
    with pytest.raises(TokenizerError, match=r"line 3: syntax error: "):
        render("a\nb\n{{ x }")
    with pytest.raises(TokenizerError, match=r"line 2: UndefinedError: .*foo"):
        render("{% for m in messages %}\n{{ m.foo.bar }}\n{% endfor %}")
    with pytest.raises(TokenizerError, match="refuses these messages: only users here"):
        render("{{ raise_exception('only users here') }}")


def test_a_long_conversation_passes():
    messages = [{"role": "user", "content": "x" * 100}] * 20_000
    template = "{% for m in messages %}{{ '<' + m.role + '>' ~ m.content|trim }}{% endfor %}"
    assert render(template, messages) == ("<user>" + "x" * 100) * 20_000
    text = "y" * 10_000_000
    assert render("{{ messages[0]['content']|trim }}", [{"role": "user", "content": text}]) == text
