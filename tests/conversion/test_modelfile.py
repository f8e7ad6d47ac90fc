"""Ollama's Modelfile: its TEMPLATE, rendered by the rules of Go, against the chat template that it came from."""

import json
import re
import shutil

import pytest

from ligermodels import cli
from ligermodels.checkpoint.gguf.modelfile import MARK, modelfile
from ligermodels.text import Tokenizer
from tests import real_files
from tests.conversion.gguf_files import small_model, tokenizer_folder
from tests.text.templates import GEMMA_3, LLAMA_3, QWEN_3

CHATML = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are {{ Tiny }}.\nBe brief.<|im_end|>\n' }}"
    "{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in (messages[1:] if system else messages) %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + ('<<SYS>>\n' + system + '\n<</SYS>>\n\n' if system and loop.first else '') }}"
    "{{ m.content | trim + ' [/INST]' }}{% else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (  # the system message stands in the last message of the user
    "{{ bos_token }}{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in (messages[1:] if system else messages) %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + (system + '\n\n' if system and loop.last else '') + m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
PHI_3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
GEMMA_2 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{ m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
ALWAYS = (  # the first Llama 3: the start of a reply, whether it is asked for or not
    "{% for m in messages %}{{ (bos_token if loop.first else '') + '<|start_header_id|>' + m.role }}"
    "{{ '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
TEMPLATES = {
    "chatml": CHATML, "llama 2": LLAMA_2, "llama 3": LLAMA_3, "llama 3, always": ALWAYS, "mistral": MISTRAL,
    "phi 3": PHI_3, "gemma 2": GEMMA_2, "gemma 3": GEMMA_3, "qwen 3": QWEN_3,
}  # fmt: skip
COUNTED = "{% for m in messages %}{{ loop.index ~ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}"
FIRST_WORD = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content.split()[0] ~ '\n' }}{% endfor %}"
QUOTED = '{% for m in messages %}{{ m.role ~ \': """\' ~ m.content ~ \'"""\' }}{% endfor %}'


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "Answer like a pirate.\nNo oaths!"}
TURNS = [user("Who are you?"), said("A {tiny} model, <s>!"), user("Why?\n\n1. x\n2. y"), said("So."), user("OK")]
CHATS = [TURNS[:1], TURNS[:3], TURNS, [SYSTEM, *TURNS[:1]], [SYSTEM, *TURNS[:3]], [SYSTEM, *TURNS]]


class Go:
    """The part of Go's text/template that these files use, over Ollama's variables System and Messages."""

    def __init__(self, source: str):
        self.parts = re.split(r"(\{\{.*?\}\})", re.sub(r"\{\{ \"\{\{\" \}\}", "\0", source))

    def render(self, messages) -> str:
        system = "\n\n".join(m["content"] for m in messages if m["role"] == "system")
        self.root, self.names, self.out, self.at = {"System": system, "Messages": messages}, {}, [], 0
        self.block(self.root, run=True)
        assert self.at == len(self.parts)
        return "".join(self.out).replace("\0", "{{")

    def block(self, dot, run) -> str:
        """Runs up to the end or else that closes the block, which it returns."""
        while self.at < len(self.parts):
            part = self.parts[self.at]
            self.at += 1
            if not part.startswith("{{"):
                self.out += [part] * run
                continue
            action = part[2:-2].strip()
            if action == "end" or action.startswith("else"):
                return action
            if action.startswith("if "):
                self.branch(action, dot, run)
            elif match := re.fullmatch(r"range (\$i, \$_ := )?\.Messages", action):
                start = self.at
                for index, message in enumerate(self.root["Messages"]):
                    self.at, self.names["$i"] = start, index
                    assert self.block({k.title(): v for k, v in message.items()}, run) == "end" and (match[1] or True)
            elif match := re.fullmatch(r"(\$\w+) :?= (.+)", action):
                self.names |= {match[1]: self.value(match[2], dot)} if run else {}
            else:
                self.out += [self.value(action, dot)] * run
        return ""

    def branch(self, action, dot, run) -> None:
        done = False
        while action != "end":
            holds = run and not done and bool(action == "else" or self.value(action.split("if ", 1)[1], dot))
            done, action = done or holds, self.block(dot, holds)

    def value(self, text, dot):
        if text.startswith('"'):
            return text[1:-1]
        if match := re.fullmatch(r"and (\S+) \((.+)\)", text):
            return self.value(match[1], dot) and self.value(match[2], dot)
        if text == "eq (len (slice $.Messages $i)) 1":
            return len(self.root["Messages"][self.names["$i"] :]) == 1
        if match := re.fullmatch(r"eq (\S+) (\".+\")", text):
            return self.value(match[1], dot) == self.value(match[2], dot)
        if match := re.fullmatch(r"(\$?)\.(\w+)", text):
            return (self.root if match[1] else dot)[match[2]]
        return self.names[text]


def instructions(text: str) -> list[tuple[str, str]]:
    """(name, argument) of each line, with what is between triple quotes as one argument."""
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    found = re.findall(r'^(\w+) (?:"""(.*?)"""|(.*?))$', text, re.MULTILINE | re.DOTALL)
    return [(name, quoted or plain) for name, quoted, plain in found]


def check(tokenizer) -> list[tuple[str, str]]:
    """Compares TEMPLATE with the chat template; returns all instructions."""
    lines = instructions(modelfile(tokenizer, {}, "my model.gguf"))
    (template,) = [argument for name, argument in lines if name == "TEMPLATE"]
    bos = tokenizer.bos_token if tokenizer.encode("a")[:1] == [tokenizer.bos_token_id] else ""
    compared = 0
    for chat in CHATS:
        try:
            expected = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        except Exception:  # a template that takes no system message
            assert chat[0] is SYSTEM
            continue
        assert Go(template).render(chat) == expected.removeprefix(bos), chat
        compared += 1
    assert compared >= 3
    return lines


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_is_the_chat_template(tmp_path, name, adds_bos):
    folder = shutil.copytree(tokenizer_folder("qwen 2"), tmp_path / "tokenizer")
    if not adds_bos:
        state = json.loads((folder / "tokenizer.json").read_text())
        state["post_processor"] = state["post_processor"]["processors"][0]
        (folder / "tokenizer.json").write_text(json.dumps(state))
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]) is adds_bos
    tokenizer.chat_template = TEMPLATES[name]
    lines = check(tokenizer)
    assert lines[0] == ("FROM", "./my model.gguf") and not any(name == "SYSTEM" for name, _ in lines)


def test_a_wrong_marker_is_seen():
    """That the comparison of this file can fail."""
    tokenizer = Tokenizer.from_folder(tokenizer_folder("qwen 2"))
    tokenizer.chat_template = CHATML
    (template,) = [x for name, x in instructions(modelfile(tokenizer, {}, "x.gguf")) if name == "TEMPLATE"]
    for old, new in [("assistant\n{{", "user\n{{"), ("<|im_end|>", ""), ("{{ else }}", "{{ else }} ")]:
        assert old in template
        wrong = Go(template.replace(old, new))
        chats = [
            (chat, tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)) for chat in CHATS
        ]
        assert any(wrong.render(chat) != expected for chat, expected in chats)


@pytest.mark.parametrize("name", ["tokenizer-llama3", "tokenizer-llama3_1", "tokenizer-qwen3", "tokenizer-gemma3"])
def test_released_templates(name):
    check(Tokenizer.from_folder(real_files.path(f"{name}/tokenizer.json").parent))


@pytest.mark.parametrize("template, reason", [
    (COUNTED, "does more than to write markers"), (FIRST_WORD, "drops, repeats or moves"), (QUOTED, 'has """ in it'),
    ("{{ raise_exception('none of this') }}", "none of this"),
    (CHATML.replace("user", "user\u200b").replace("m.role +", "m.role + '\u200b' +"), "characters that Ollama drops"),
])  # fmt: skip
def test_a_template_that_is_not_markers_is_left_out_with_its_reason(template, reason):
    tokenizer = Tokenizer.from_folder(tokenizer_folder("qwen 2"))
    tokenizer.chat_template = template
    text = modelfile(tokenizer, {}, "x.gguf")
    assert reason in text and "TEMPLATE" not in dict(instructions(text)) and "may send the bare prompt" in text


def test_tools_and_dates_are_named():
    tokenizer = Tokenizer.from_folder(tokenizer_folder("qwen 2"))
    tokenizer.chat_template = QWEN_3
    assert "# TEMPLATE has no tools and no thinking" in modelfile(tokenizer, {}, "x.gguf")
    tokenizer.chat_template = "{{ strftime_now('%Y') }}" + PHI_3
    assert "# The date in TEMPLATE is that of the conversion" in modelfile(tokenizer, {}, "x.gguf")
    tokenizer.chat_template = None
    assert "no chat template" in modelfile(tokenizer, {}, "x.gguf")


@pytest.mark.parametrize("config, expected", [
    ({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True},
     {"temperature 0.6", "top_k 20", "top_p 0.95"}),
    ({"temperature": 0.6, "top_p": 0.5, "do_sample": False}, {"temperature 0"}),
    ({"repetition_penalty": 1.1, "min_p": 0.1, "typical_p": 0.9}, {"repeat_penalty 1.1", "min_p 0.1"}),
    ({"repetition_penalty": 1.0}, set()),
])  # fmt: skip
def test_parameters(config, expected):
    tokenizer = Tokenizer.from_folder(tokenizer_folder("llama 3"))
    lines = instructions(modelfile(tokenizer, config, "x.gguf"))
    stops = {f'stop "{tokenizer.backend.id_to_token(index)}"' for index in tokenizer.chat_stop_ids}
    assert {argument for name, argument in lines if name == "PARAMETER"} == stops | expected and stops


def test_the_command_never_replaces_a_file_of_the_user(tmp_path, capsys):
    source = small_model(tmp_path / "hf", "llama 3")
    argv = ["convert", str(source), str(tmp_path / "out" / "tiny.gguf"), "--modelfile"]
    assert cli.main(argv) == 0 and f"modelfile: ollama create NAME -f {tmp_path}" in capsys.readouterr().out
    path = tmp_path / "out" / "Modelfile"
    first = path.read_text()
    assert first.startswith(MARK) and "FROM ./tiny.gguf\n" in first
    (tmp_path / "out" / "tiny.gguf").unlink()
    assert cli.main(argv) == 2 and "Modelfile already exists" in capsys.readouterr().err
    path.write_text("# mine\nFROM x\n")
    assert cli.main([*argv, "--overwrite"]) == 2 and "not of this command" in capsys.readouterr().err
    assert path.read_text() == "# mine\nFROM x\n" and not (tmp_path / "out" / "tiny.gguf").exists()
    path.write_text(f"{MARK} old")
    assert cli.main([*argv, "--overwrite"]) == 0 and path.read_text() == first
    assert cli.main(["convert", str(source), str(tmp_path / "folder"), "--modelfile"]) == 2
