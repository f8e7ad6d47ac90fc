"""`generate` and `chat`: what they print, what they pass on, and how they end."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import ligermodels
from ligermodels import generation
from ligermodels.cli import main
from ligermodels.text import Tokenizer
from tests.cli.commands import run, stdin_of, write_checkpoint
from tests.text import families
from tests.text.folders import write

PROMPT = "The Owl and the"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def python(*argv) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=120)


# Usage


def test_help_is_quick_because_it_imports_nothing_heavy():
    code = (
        "import sys\nfrom ligermodels.cli import main\n"
        "try: main(['generate', '--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'tokenizers', 'huggingface_hub'} & set(sys.modules)"
    )
    done = python("-c", code)
    assert done.returncode == 0 and "--temperature" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "argv", [[], ["nothing"], ["generate"], ["inspect", "x", "--nothing"], ["convert", "a", "--v"]]
)
def test_wrong_usage_exits_with_2(argv):
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out == f"ligermodels {ligermodels.__version__}\n"


@pytest.mark.parametrize("argv, message", [
    (["generate", "/nowhere/at/all", "--prompt", "x"], "/nowhere/at/all"),
    (["generate", "MODEL", "--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens=0"),
    (["generate", "MODEL", "--prompt", "x", "--device", "gpu7"], "--device gpu7"),
    (["generate", "MODEL", "--prompt", "x", "--stop", ""], "stop strings"),
    (["demo", "--seconds", "-1"], "--seconds"),
    (["demo", "--keep", "MODEL"], "new or empty"),
])  # fmt: skip
def test_errors_are_one_message_and_exit_with_3(argv, message, folder, capsys):
    status, out, err = run(capsys, *(folder if argument == "MODEL" else argument for argument in argv))
    assert status == 3 and out == ""
    assert err.startswith("error: ") and message in err and "Traceback" not in err


@pytest.mark.slow
def test_the_reader_of_a_pipe_may_leave(folder):
    command = [sys.executable, "-m", "ligermodels", "generate", str(folder), "--prompt", "x", "--max-new-tokens", "20"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        err = process.stderr.read()
    assert "Traceback" not in err and "Exception" not in err and process.returncode == 0


# generate


def expected(folder, steps, **options) -> str:
    tokenizer, model = Tokenizer.from_hub(folder), ligermodels.load(folder, progress=False)
    ids = torch.tensor([tokenizer.encode(PROMPT)])
    out = model.generate(ids, max_new_tokens=steps, **options)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_generate_prints_the_continuation_and_passes_every_option_on(folder, capsys, monkeypatch):
    passed = {}

    def spy(*args, original=generation.generate_iter, **kwargs):
        passed.update(kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(generation, "generate_iter", spy)
    monkeypatch.setattr(sys, "stdin", stdin_of(PROMPT))
    status, out, err = run(capsys, "generate", folder, "--prompt", PROMPT, "--max-new-tokens", 12)
    assert (status, out) == (0, expected(folder, 12) + "\n")
    assert "tokens/s" in err and "12 tokens" in err
    options = dict(temperature=1.5, top_k=40, top_p=0.9, min_p=0.001, repetition_penalty=1.2, seed=3)
    argv = [argument for name, value in options.items() for argument in (f"--{name.replace('_', '-')}", value)]
    status, out, _ = run(capsys, "generate", folder, "--max-new-tokens", 20, "--dtype", "float32", *argv)
    assert (status, out) == (0, expected(folder, 20, **options) + "\n")
    assert {**passed, **options, "max_new_tokens": 20} == passed


def test_generate_without_a_prompt_at_a_terminal_is_wrong_usage(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    status, out, err = run(capsys, "generate", folder)
    assert (status, out) == (2, "") and "--prompt" in err


def test_generate_ends_before_a_stop_string_and_at_a_stop_id(folder, capsys, tmp_path):
    text = expected(folder, 40, temperature=1.0, seed=0)
    options = ["--prompt", PROMPT, "--max-new-tokens", 40, "--temperature", 1, "--seed", 0]
    stop = text[20:24]
    _, out, _ = run(capsys, "generate", folder, *options, "--stop", "not in there", "--stop", stop)
    assert out == text[: text.index(stop)] + "\n"

    tokenizer, model = Tokenizer.from_hub(folder), ligermodels.load(folder, progress=False)
    prompt = tokenizer.encode(PROMPT)
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=40, temperature=1.0, seed=0)
    new = ids[0, len(prompt) :].tolist()
    model.generation_config["eos_token_id"] = [new[10]]
    model.save_pretrained(tmp_path / "stops")
    _, out, _ = run(capsys, "generate", tmp_path / "stops", *options)
    assert out == tokenizer.decode(new[: new.index(new[10]) + 1], skip_special_tokens=True) + "\n"


# chat


def test_chat_remembers_the_conversation_until_reset(folder, capsys, monkeypatch):
    conversations, apply = [], Tokenizer.apply_chat_template

    def remember(self, messages, **kwargs):
        conversations.append([message["content"] for message in messages])
        return apply(self, messages, **kwargs)

    monkeypatch.setattr(Tokenizer, "apply_chat_template", remember)
    monkeypatch.setattr(sys, "stdin", stdin_of("Hello\n\nAgain\n/reset\nOnce more\n/nonsense\n/exit\nNever said\n"))
    status, out, err = run(capsys, "chat", folder, "--max-new-tokens", 4)
    assert status == 0 and "/nonsense is not a command" in err and "tokens/s" in err
    first, second, third = conversations[-3:]
    assert (first, third) == (["Hello"], ["Once more"])
    assert second == ["Hello", out[: len(second[1])], "Again"]


def test_chat_without_a_template_says_what_to_do_before_it_loads(folder, capsys, monkeypatch, tmp_path):
    Tokenizer.from_folder(folder).save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text("utf-8"))
    for path in tmp_path.glob("*.jinja"):
        path.unlink()
    write(tmp_path, "tokenizer_config.json", config | {"chat_template": None})
    monkeypatch.setattr(ligermodels, "load", None)
    status, out, err = run(capsys, "chat", tmp_path)
    assert (status, out) == (3, "") and "has no chat template" in err and "ligermodels generate " in err


SYSTEM, HELLO = "Be brief.", "the cat 🦊"
SMALL = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=1024, initializer_range=0.4,  # large, so that greedy text does not repeat one token
)  # fmt: skip


def continued(model, ids, length, stops) -> list[int]:
    """The ids with which transformers goes on, greedily."""
    settings = {"do_sample": False, "max_new_tokens": length, "pad_token_id": 0, "repetition_penalty": 1.0}
    out = model.generate(torch.tensor([ids]), eos_token_id=list(stops), **settings)
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("name, has_system_role", [("llama 2", True), ("gemma 1", False)])
def test_both_commands_say_what_transformers_says(name, has_system_role, capsys, monkeypatch, tmp_path):
    """On checkpoints that transformers wrote, with a system role in the chat template and without. With images:
    tests/vision/test_use.py."""
    folder = families.FAMILIES[name].build(tmp_path / "model")
    ids, saved = (json.loads((folder / f"{n}config.json").read_text()) for n in ("", "generation_"))
    tokenizer = Tokenizer.from_folder(folder)
    settings = SMALL | ids | {"vocab_size": tokenizer.vocab_size, "head_dim": 8}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings)).eval()
    model.save_pretrained(folder)
    write(folder, "generation_config.json", saved)

    status, out, err = run(capsys, "generate", folder, "--prompt", HELLO, "--max-new-tokens", 24)
    ids = tokenizer.encode(HELLO)
    new = continued(model, ids, 24, tokenizer.eos_token_ids)
    assert len(set(new)) > 4
    assert (status, HELLO + out) == (0, tokenizer.decode(ids + new, skip_special_tokens=True) + "\n"), err

    monkeypatch.setattr(sys, "stdin", stdin_of(f"{HELLO}\nthe dog\n"))
    status, out, err = run(capsys, "chat", folder, "--system", SYSTEM, "--max-new-tokens", 12)
    assert ("note: no system prompt" in err) != has_system_role
    messages = [{"role": "system", "content": SYSTEM}] if has_system_role else []
    messages.append({"role": "user", "content": HELLO if has_system_role else f"{SYSTEM}\n\n{HELLO}"})
    answers = ""
    for question in ("the dog", None):
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        answer = tokenizer.decode(continued(model, ids, 12, tokenizer.chat_stop_ids), skip_special_tokens=True)
        answers += answer + "\n"
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    assert (status, out) == (0, answers), err


def test_an_answer_ends_with_the_turn(capsys, monkeypatch, tmp_path):
    """Gemma ends its turns with a token that is not a stop id of its text."""
    family = families.FAMILIES["gemma 1"]
    folder = family.build(tmp_path / "model")
    (folder / "model.safetensors").touch()
    answer = Tokenizer.from_folder(folder).encode("the cat", add_special_tokens=False)

    def scripted(model, ids, *, eos_token_id, **_):
        for index in [*answer, family.turn_end, *answer]:
            yield torch.tensor([index])
            if index in eos_token_id:
                return

    model = SimpleNamespace(device="cpu", config=SimpleNamespace(max_position_embeddings=4096))
    monkeypatch.setattr(ligermodels, "load", lambda *_, **__: model)
    monkeypatch.setattr(generation, "generate_iter", scripted)
    monkeypatch.setattr(sys, "stdin", stdin_of("Hi\n"))
    assert run(capsys, "chat", folder)[:2] == (0, "the cat\n")
