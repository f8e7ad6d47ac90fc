"""The commands, run in this process on the checkpoint that the demo makes."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import ligermodels
from ligermodels import generation
from ligermodels.arch import ARCHS
from ligermodels.checkpoint import hub
from ligermodels.checkpoint.reading import SafetensorsFile, SafetensorsReader
from ligermodels.cli import demo, main
from ligermodels.text import Tokenizer
from tests.text import families
from tests.text.folders import write

PROMPT = "The Owl and the"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The demo's checkpoint before training, its weights enlarged so that its text does not repeat."""
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    demo.write_checkpoint(folder)
    model = ligermodels.load(folder, progress=False)
    for parameter in model.parameters():
        parameter.data.mul_(3 if parameter.dim() > 1 else 1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def run(capsys, *argv) -> tuple[int, str, str]:
    status = main([str(word) for word in argv])
    return (status, *capsys.readouterr())


def python(*argv, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=120, **options)


# ---- usage ----


def test_help_is_quick_because_it_imports_nothing_heavy():
    code = (
        "import sys\nfrom ligermodels.cli import main\n"
        "try: main(['generate', '--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'tokenizers', 'huggingface_hub'} & set(sys.modules)"
    )
    done = python("-c", code)
    assert done.returncode == 0 and "--temperature" in done.stdout, done.stderr


@pytest.mark.parametrize("argv", [[], ["nothing"], ["generate"], ["generate", "x", "--temperature", "warm"]])
def test_wrong_usage_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out == f"ligermodels {ligermodels.__version__}\n"


@pytest.mark.parametrize(
    "options, words",
    [
        (["generate", "/nowhere/at/all", "--prompt", "x"], "/nowhere/at/all"),
        (["generate", "MODEL", "--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens=0"),
        (["generate", "MODEL", "--prompt", "x", "--dtype", "int3"], "int3"),
        (["generate", "MODEL", "--prompt", "x", "--device", "gpu7"], "--device gpu7"),
        (["generate", "MODEL", "--prompt", "x", "--stop", ""], "stop strings"),
        (["demo", "--seconds", "-1"], "--seconds"),
        (["demo", "--keep", "MODEL"], "new or empty"),
    ],
)
def test_errors_are_one_message_and_exit_with_3(options, words, folder, capsys):
    status, out, err = run(capsys, *(str(folder) if word == "MODEL" else word for word in options))
    assert status == 3 and out == ""
    assert err.startswith("error: ") and words in err and "Traceback" not in err


def test_the_reader_of_a_pipe_may_leave(folder):
    code = "import sys\nfrom ligermodels.cli import main\nsys.exit(main(sys.argv[1:]))"
    command = [
        sys.executable,
        "-c",
        code,
        "generate",
        str(folder),
        "--prompt",
        "x",
        "--max-new-tokens",
        "200",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        err = process.stderr.read()
    assert "Traceback" not in err and "Exception" not in err and process.returncode == 0


# ---- generate ----


def expected(folder, steps, **options) -> str:
    tokenizer, model = Tokenizer.from_hub(folder), ligermodels.load(folder, progress=False)
    ids = torch.tensor([tokenizer.encode(PROMPT)])
    return tokenizer.decode(
        model.generate(ids, max_new_tokens=steps, **options)[0, ids.shape[1] :], skip_special_tokens=True
    )


def test_generate_prints_the_continuation_alone(folder, capsys):
    status, out, err = run(capsys, "generate", folder, "--prompt", PROMPT, "--max-new-tokens", 12)
    assert (status, out) == (0, expected(folder, 12) + "\n")
    assert "tokens/s" in err and "12 tokens" in err


def test_generate_reads_stdin_and_passes_every_option_on(folder, capsys, monkeypatch):
    passed = {}

    def spy(*args, original=generation.generate_iter, **kwargs):
        passed.update(kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(generation, "generate_iter", spy)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False, read=lambda: PROMPT))
    options = dict(temperature=1.5, top_k=40, top_p=0.9, min_p=0.001, repetition_penalty=1.2, seed=3)
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    status, out, _ = run(capsys, "generate", folder, "--max-new-tokens", 20, "--dtype", "float32", *words)
    assert (status, out) == (0, expected(folder, 20, **options) + "\n")
    assert {**passed, **options, "max_new_tokens": 20} == passed


@pytest.mark.parametrize("command, prompt, length", [("generate", PROMPT, 256), ("chat", "Hi", 1024)])
def test_the_length_is_the_usual_one_or_what_the_context_leaves(command, prompt, length, folder, capsys, monkeypatch):
    lengths = []

    def spy(model, ids, *, max_new_tokens, **_):
        lengths.append((max_new_tokens, ids.shape[1]))
        return iter([])

    lines = iter([prompt])
    stdin = SimpleNamespace(isatty=lambda: False, read=lambda: prompt, readline=lambda: next(lines, ""))
    monkeypatch.setattr(generation, "generate_iter", spy)
    monkeypatch.setattr(sys, "stdin", stdin)
    assert run(capsys, command, folder)[0] == 0
    run(capsys, "generate", folder, "--max-new-tokens", 1000)
    assert lengths[0][0] == min(length, 512 - lengths[0][1]) and lengths[1][0] == 1000


def test_an_interruption_exits_with_130_and_no_traceback(capsys, monkeypatch):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert run(capsys, "demo") == (130, "", "\n")


def test_generate_without_a_prompt_at_a_terminal_is_wrong_usage(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    status, out, err = run(capsys, "generate", folder)
    assert (status, out) == (2, "") and "--prompt" in err


def test_generate_ends_before_a_stop_string(folder, capsys):
    text = expected(folder, 40, temperature=1.0, seed=0)
    stop = text[20:24]
    argv = ["generate", folder, "--prompt", PROMPT, "--max-new-tokens", 40, "--temperature", 1, "--seed", 0]
    _, out, _ = run(capsys, *argv, "--stop", "not in there", "--stop", stop)
    assert out == text[: text.index(stop)] + "\n"


def test_generate_ends_at_a_stop_id(folder, capsys, tmp_path):
    tokenizer = Tokenizer.from_hub(folder)
    model = ligermodels.load(folder, progress=False)
    ids = model.generate(torch.tensor([tokenizer.encode(PROMPT)]), max_new_tokens=30, temperature=1.0, seed=0)
    new = ids[0, len(tokenizer.encode(PROMPT)) :].tolist()
    model.generation_config["eos_token_id"] = [new[10]]
    model.save_pretrained(tmp_path / "stops")
    argv = ["--prompt", PROMPT, "--max-new-tokens", 30, "--temperature", 1, "--seed", 0]
    _, out, _ = run(capsys, "generate", tmp_path / "stops", *argv)
    assert out == tokenizer.decode(new[: new.index(new[10]) + 1], skip_special_tokens=True) + "\n"


# ---- chat ----


@pytest.fixture
def talk(folder, capsys, monkeypatch):
    """Types lines into `chat`; returns what it was shown and the conversations that it put to the model."""

    def talk(text, *options):
        conversations = []
        original = Tokenizer.apply_chat_template

        def remember(self, messages, **kwargs):
            conversations.append([(message["role"], message["content"]) for message in messages])
            return original(self, messages, **kwargs)

        def load(*args, original=ligermodels.load, **kwargs):
            conversations.clear()  # of what `chat` tried out before it began
            return original(*args, **kwargs)

        lines = iter(text.splitlines(keepends=True))
        stdin = SimpleNamespace(isatty=lambda: False, readline=lambda: next(lines, ""))
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(ligermodels, "load", load)
        monkeypatch.setattr(Tokenizer, "apply_chat_template", remember)
        status, out, err = run(capsys, "chat", folder, "--max-new-tokens", 4, *options)
        assert status == 0
        return out, err, conversations

    return talk


def test_chat_keeps_the_conversation_until_reset(talk):
    out, err, conversations = talk("Hello\n\nAgain\n/reset\nAnew\n/nonsense\n", "--system", "Be brief")
    # The demo's template knows no system message: it begins the user's first, of every conversation.
    assert "note: no system prompt (the chat template leaves it out)" in err
    assert conversations[0] == [("user", "Be brief\n\nHello")]
    assert conversations[1][:1] == conversations[0]
    role, answer = conversations[1][1]
    assert role == "assistant" and out.startswith(answer + "\n") and conversations[1][2:] == [("user", "Again")]
    assert conversations[2] == [("user", "Be brief\n\nAnew")] and len(conversations) == 3
    assert "/nonsense is not a command" in err and "tokens/s" in err


def test_chat_exits_when_told_to(talk):
    _, _, conversations = talk("Hello\n/exit\nNever said\n")
    assert len(conversations) == 1


# ---- every architecture and family ----

# The family of its tokenizer, and what its configuration has beside SMALL. Of vision: tests/vision/test_use.py.
TINY = {
    "llama": ("llama 2", {}),
    "mistral": ("mistral 0.3", {"sliding_window": 16}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma": ("gemma 1", {"head_dim": 16}),
    # small weights: beside its post-norms a large embedding would only say itself again
    "gemma2": (
        "gemma 2",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16, "initializer_range": 0.05},
    ),
    "qwen2": ("qwen 2.5", {"tie_word_embeddings": True}),
    "qwen3": ("qwen 2.5", {"head_dim": 16}),
    "phi3": ("phi 3", {"pad_token_id": 0}),
}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.4,  # large, so that greedy text does not repeat one token
}
SYSTEM, HELLO = "Be brief.", "the cat 🦊"


def test_every_architecture_is_talked_to():
    assert set(ARCHS) == {*TINY, "qwen2_vl", "mllama"}


@pytest.fixture(scope="module", params=TINY)
def checkpoint(request, tmp_path_factory):
    """(family, folder, transformers' model): a checkpoint that transformers wrote, of random weights."""
    name, extra = TINY[request.param]
    folder = families.FAMILIES[name].build(tmp_path_factory.mktemp("arch") / "model")
    ids, generation = (json.loads((folder / f"{n}config.json").read_text()) for n in ("", "generation_"))
    tokenizer = Tokenizer.from_folder(folder)
    torch.manual_seed(0)
    settings = SMALL | ids | extra | {"vocab_size": tokenizer.vocab_size}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    fillers = [i for i in range(model.config.vocab_size) if "filler" in (tokenizer.backend.id_to_token(i) or "")]
    with torch.no_grad():
        model.get_output_embeddings().weight[fillers] = 0  # tokens that stand for a larger vocabulary
    model.save_pretrained(folder)
    write(folder, "generation_config.json", generation)
    return families.FAMILIES[name], folder, model.eval()


def continued(model, ids, length, stops) -> list[int]:
    """The ids with which transformers goes on, greedily."""
    settings = {"do_sample": False, "max_new_tokens": length, "pad_token_id": 0, "repetition_penalty": 1.0}
    out = model.generate(torch.tensor([ids]), eos_token_id=list(stops), **settings)
    return out[0, len(ids) :].tolist()


def test_generate_for_every_architecture(checkpoint, capsys):
    _, folder, model = checkpoint
    status, out, err = run(capsys, "generate", folder, "--prompt", HELLO, "--max-new-tokens", 24)
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode(HELLO)
    new = continued(model, ids, 24, tokenizer.eos_token_ids)
    assert len(set(new)) > 4
    assert (status, HELLO + out) == (0, tokenizer.decode(ids + new, skip_special_tokens=True) + "\n"), err


def test_chat_for_every_architecture(checkpoint, capsys, monkeypatch):
    family, folder, model = checkpoint
    lines = iter([f"{HELLO}\n", "the dog\n"])
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False, readline=lambda: next(lines, "")))
    status, out, err = run(capsys, "chat", folder, "--system", SYSTEM, "--max-new-tokens", 12)
    tokenizer = Tokenizer.from_folder(folder)
    assert ("note: no system prompt" in err) == (family.talk is None)
    has_role = family.talk is not None
    messages = [{"role": "system", "content": SYSTEM}] if has_role else []
    messages.append({"role": "user", "content": HELLO if has_role else f"{SYSTEM}\n\n{HELLO}"})
    said = ""
    for question in ("the dog", None):
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        answer = tokenizer.decode(continued(model, ids, 12, tokenizer.chat_stop_ids), skip_special_tokens=True)
        said += answer + "\n"
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    assert (status, out) == (0, said), err


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return {}, tmp_path_factory.mktemp("families")


@pytest.fixture
def scripted(built, capsys, monkeypatch):
    """Runs a command (family, lines, *options) on a model that says the ids `answer` until a stop id comes."""

    def scripted(name, text, *options, answer=(), template=None, command="chat"):
        made, folder = built
        if name not in made:
            made[name] = families.FAMILIES[name].build(folder / name.replace(" ", "-"))
        if template is not None:
            folder = folder / f"{name} changed".replace(" ", "-")
            Tokenizer.from_folder(made[name]).save(folder)
            config = json.loads((made[name] / "tokenizer_config.json").read_text("utf-8"))
            write(folder, "tokenizer_config.json", config | {"chat_template": template or None})
        prompts = []

        def say(model, ids, *, eos_token_id, **_):
            prompts.append(Tokenizer.from_folder(made[name]).decode(ids[0], skip_special_tokens=False))
            for index in answer:
                yield torch.tensor([index])
                if index in eos_token_id:
                    return

        model = SimpleNamespace(device="cpu", config=SimpleNamespace(max_position_embeddings=4096))
        lines = iter(text.splitlines(keepends=True))
        monkeypatch.setattr(ligermodels, "load", lambda *_, **__: prompts.append("loaded") or model)
        monkeypatch.setattr(generation, "generate_iter", say)
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False, readline=lambda: next(lines, "")))
        status, out, err = run(capsys, command, folder if template is not None else made[name], *options)
        return status, out, err, prompts

    return scripted


@pytest.mark.parametrize("name", families.FAMILIES)
def test_chat_streams_an_answer_and_stops_at_the_turns_end(name, scripted, built):
    scripted(name, "")  # builds the folder
    tokenizer = Tokenizer.from_folder(built[0][name])
    said = "the 👩‍👩‍👧 cat.\n\nüß"
    answer = tokenizer.encode(said, add_special_tokens=False)
    answer += [families.FAMILIES[name].turn_end, *answer]
    status, out, _, prompts = scripted(name, "Hi\n", answer=answer)
    assert (status, out) == (0, f"{said}\n")
    begin = tokenizer.decode(tokenizer.encode(families.FAMILIES[name].alone), skip_special_tokens=False)
    assert prompts == ["loaded", begin]


@pytest.mark.parametrize("name", ["llama 2", "mistral 0.3", "nemo", "gemma 1", "phi 3"])
def test_generate_goes_on_with_the_space_and_in_the_middle_of_a_word(name, scripted, built):
    scripted(name, "")
    tokenizer = Tokenizer.from_folder(built[0][name])
    ids = tokenizer.encode("the mat and the 🦊 cat", add_special_tokens=False)
    for cut in (2, 3, 4):
        prompt, rest = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:cut], ids))
        assert tokenizer.encode(prompt, add_special_tokens=False) == ids[:cut]
        stop = tokenizer.eos_token_ids[0]
        _, out, _, _ = scripted(name, "", "--prompt", prompt, answer=[*ids[cut:], stop, *ids], command="generate")
        assert prompt + out == f"{rest}\n"


@pytest.mark.parametrize("template", [families.PHI_3_FIRST, families.PHI_3, families.GEMMA])
def test_a_system_prompt_finds_its_place(template, scripted):
    answer = [32007]
    status, _, err, prompts = scripted(
        "phi 3", "Hi\nWhy?\n/reset\nAnew\n", "--system", SYSTEM, answer=answer, template=template
    )
    assert status == 0 and all(prompt.count(SYSTEM) == 1 for prompt in prompts[1:])
    has_role = template == families.PHI_3
    assert ("note: no system prompt" in err) != has_role
    for word, prompt in zip(("Hi", "Hi", "Anew"), prompts[1:], strict=True):
        assert (f"{SYSTEM}\n\n{word}" in prompt) != has_role
    assert ("System role not supported" in err) == (template == families.GEMMA)
    assert ("leaves it out" in err) == (template == families.PHI_3_FIRST)


@pytest.mark.parametrize(
    "template, words",
    [
        ("", "has no chat template. Likely cause: a base model"),
        ("{{ broken", "syntax error"),
        ([{"name": "rag", "template": "x"}], "no default chat template"),
    ],
)
def test_chat_says_before_it_loads_that_there_is_nothing_to_talk_to(template, words, scripted):
    status, out, err, prompts = scripted("llama 2", "Hi\n", template=template)
    assert (status, out, prompts) == (3, "", []) and words in err
    assert template or "ligermodels generate " in err


# ---- inspect ----


def test_inspect_reads_headers_only(folder, capsys, monkeypatch):
    monkeypatch.setattr(SafetensorsReader, "read", None)
    monkeypatch.setattr(SafetensorsFile, "read", None)
    status, out, _ = run(capsys, "inspect", folder)
    model = ligermodels.Llama.from_config(json.loads((folder / "config.json").read_text()), device="meta")
    assert status == 0
    for words in (
        f"{model.num_parameters():,}", "ligermodels.Llama", "tied", "float32", "512 tokens", "default",
        "model.safetensors", "tokenizer.json", "4 query and 2 key-value", "as expected",
        f"ligermodels.load('{folder}')",
        f"embedding     {model.get_input_embeddings().weight.numel():,}",
    ):  # fmt: skip
        assert words in out, words


def test_inspect_says_what_does_not_fit(folder, capsys, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    status, out, err = run(capsys, "inspect", tmp_path)
    assert status == 1 and "layers.3" in err and "weights         29 tensors, NOT as expected" in out


def test_inspect_asks_the_hub_for_headers_and_not_for_weights(folder, capsys, monkeypatch):
    asked = []

    def resolve(repo, *, local_files_only=False, weights=True, **_):
        if local_files_only:
            raise ligermodels.HubError("not in the cache")
        assert not weights
        return folder

    def get_safetensors_metadata(self, repo, *, revision):
        asked.append(repo)
        with SafetensorsReader(folder) as reader:
            tensors = {
                name: SimpleNamespace(dtype="F32", shape=list(info.shape), data_offsets=(0, 1000))
                for name, info in reader.headers.items()
            }
        return SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=tensors, metadata={})})

    monkeypatch.setattr(hub, "resolve", resolve)
    monkeypatch.setattr("huggingface_hub.HfApi.get_safetensors_metadata", get_safetensors_metadata)
    status, out, err = run(capsys, "inspect", "someone/something")
    assert (status, asked) == (0, ["someone/something"]), err
    assert "as expected" in out and "1 kB" in out and "ligermodels.load('someone/something')" in out


# ---- convert, verify ----


def test_convert_and_verify(folder, capsys, tmp_path):
    status, out, err = run(capsys, "convert", folder, tmp_path / "dcp", "--to", "dcp", "--verify", "logits")
    assert (status, err) == (0, "") and "tensors, " in out and "verified: logits" in out
    status, out, _ = run(capsys, "verify", folder, tmp_path / "dcp")
    assert status == 0 and out.endswith("the same\n") and "difference of logits: 0.0\n" in out
    status, out, _ = run(capsys, "convert", tmp_path / "dcp", tmp_path / "half", "--dtype", "fp16", "--json")
    report = json.loads(out)
    assert status == 0 and report["ok"] and report["to"] == "hf" and report["destination"] == str(tmp_path / "half")
    assert ligermodels.load(tmp_path / "half", progress=False).dtype == torch.float16
    status, out, _ = run(capsys, "verify", folder, tmp_path / "half", "--level", "keys")
    assert status == 1 and "MISMATCH lm_head" not in out and "float32 and float16" in out
    status, out, _ = run(capsys, "verify", folder, tmp_path / "half", "--level", "keys", "--json")
    assert status == 1 and not json.loads(out)["ok"] and len(json.loads(out)["mismatches"]) > 3


def test_a_dry_run_says_what_there_would_be(folder, capsys):
    status, out, err = run(capsys, "convert", folder, "--dry-run", "--max-shard-size", "1MB")
    assert (status, err) == (0, "") and out == (
        f"{folder}: 29 tensors, 2.89 MB would be written\narchitecture: Llama\nto: hf\nfiles: 3\n"
    )
    status, out, _ = run(capsys, "convert", folder, "--dry-run", "--json")
    assert status == 0 and json.loads(out)["destination"] is None and json.loads(out)["files"] == 1


@pytest.mark.parametrize(
    "argv, words",
    [
        (["inspect", "locked"], "locked cannot be read"),
        (["convert", "locked", "out"], "locked cannot be read"),
        (["convert", "hf", "locked"], "locked cannot be written"),
        (["convert", "hf", "locked/x"], "locked/x cannot be written"),
        (["convert", "hf", "locked/x.gguf", "--to", "gguf"], "locked/x.gguf cannot be written"),
        (["convert", "hf", "out", "--adapter", "locked"], "locked cannot be read"),
        (["verify", "hf", "locked"], "locked cannot be read"),
    ],
)
def test_folders_that_may_not_be_entered(argv, words, folder, capsys):
    """As a user without rights, which root becomes for a moment."""
    run(capsys, "inspect", folder)  # what is imported late is imported
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        shutil.copytree(folder, root / "hf")
        (root / "locked").mkdir(mode=0)
        was_root = os.geteuid() == 0
        try:
            if was_root:
                os.seteuid(65534)
            places = ("hf", "locked", "out")
            status, out, err = run(capsys, *(root / w if w.split("/")[0] in places else w for w in argv))
        finally:
            if was_root:
                os.seteuid(0)
            (root / "locked").chmod(0o700)
        assert (status, out) == (5, "") and words in err and "ermission denied" in err, err
        assert sorted(path.name for path in root.iterdir()) == ["hf", "locked"]


def test_many_mismatches_are_counted_and_those_of_the_whole_come_first(folder, capsys, tmp_path):
    run(capsys, "convert", folder, tmp_path / "half", "--dtype", "bf16")
    status, out, _ = run(capsys, "verify", folder, tmp_path / "half")
    lines = [line for line in out.splitlines() if line.startswith("MISMATCH")]
    assert status == 1 and len(lines) == 20 and lines[0].startswith("MISMATCH logits: they differ by ")
    status, text, _ = run(capsys, "verify", folder, tmp_path / "half", "--json")
    every = json.loads(text)["mismatches"]
    assert f"... and {len(every) - 20} more; --json" in out and out.endswith(f"{len(every)} mismatches\n")


def test_an_unknown_argument_is_answered_with_the_usage_of_its_command(capsys):
    for argv in (["inspect", "x", "--nothing"], ["verify", "a", "b", "c"], ["convert", "a", "b", "--allow"]):
        with pytest.raises(SystemExit) as stopped:
            main(argv)
        assert stopped.value.code == 2
        err = capsys.readouterr().err
        assert err.startswith(f"usage: ligermodels {argv[0]} [-h]") and f"unrecognized arguments: {argv[-1]}" in err


@pytest.mark.parametrize("command", ["inspect", "convert", "verify"])
def test_help_names_layouts_and_every_exit_status(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    out = capsys.readouterr().out
    for words in ("consolidated.NN.pth", "pytorch_model*.bin", ".metadata", "adapter_config.json", "--allow-pickle"):
        assert words in out
    codes = [line.split()[0] for line in out[out.index("exit status:") :].splitlines()[1:]]
    assert codes == ["0", "1", "2", "3", "4", "5", "130"]


@pytest.mark.parametrize(
    "argv, code, words",
    [
        (["convert", "MODEL", "MODEL"], 2, "--overwrite"),
        (["convert", "MODEL"], 2, "--dry-run"),
        (["convert", "MODEL", ""], 2, "DST is missing"),
        (["convert", "", "OUT"], 2, "is empty"),
        (["convert", "MODEL", "FILE"], 2, "is a file; give the name of a folder"),
        (["convert", "MODEL", "OUT", "--adapter", "~no_such_user/x"], 3, "the folder of a LoRA adapter"),
        (["convert", "MODEL", "OUT", "--to", "meta", "--like"], 2, "not for meta"),
        (["convert", "MODEL", "OUT", "--adapter", "MODEL"], 3, "adapter_config.json"),
        (["convert", "MODEL", "OUT", "--to", "meta", "--ranks", "3"], 2, "3 shards (--ranks) must divide 4 heads"),
        (["convert", "MODEL", "OUT", "--config", "MODEL"], 2, "--config is for weights without one"),
        (["convert", "MODEL", "OUT", "--rope-factor", "8"], 2, "--rope-factor is for Meta's"),
        (["convert", "FILE", "OUT"], 3, "config.json is a file. Give the folder"),
        (["convert", "GGUF", "OUT"], 3, "is a GGUF file"),
        (["verify", "FILE", "MODEL"], 3, "config.json is a file. Give the folder"),
        (["inspect", "FILE"], 3, "config.json is a file. Give the folder"),
        (["inspect", "nowhere/here", "--local-files-only"], 5, "there is none at"),
        (["inspect", "/nowhere/at/all"], 5, "/nowhere/at/all"),
        (["convert", "/nowhere/at/all", "OUT"], 5, "/nowhere/at/all"),
        (["verify", "MODEL", "/nowhere/at/all"], 5, "/nowhere/at/all"),
        (["verify", "MODEL", "EMPTY"], 3, "config.json"),
    ],
)
def test_the_exit_status_of_a_conversion(argv, code, words, folder, capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.gguf").write_bytes(b"GGUF\3\0\0\0")
    places = {"MODEL": folder, "OUT": tmp_path / "out", "EMPTY": tmp_path / "empty"}
    places |= {"FILE": folder / "config.json", "GGUF": tmp_path / "a.gguf"}
    status, out, err = run(capsys, *(places.get(word, word) for word in argv))
    assert (status, out) == (code, "") and err.startswith("error: ") and words in err, err
    assert not (tmp_path / "out").exists()


# ---- doctor ----


def test_doctor_has_a_line_for_everything_and_never_shows_the_token(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "not" / "yet"))
    status, out, err = run(capsys, "doctor")
    lines = {line[5:19].strip(): line for line in out.splitlines()}
    assert {"ligermodels", "python", "torch", "triton", "GPU", "kernels", "HF token", "cache"} <= set(lines)
    assert "verysecret" not in out + err and "present" in lines["HF token"]
    assert str(tmp_path) in lines["cache"] and ("GB free" in lines["cache"])
    assert status == any(line.startswith("FIX") for line in out.splitlines())


def test_doctor_says_how_to_fix_what_is_off(capsys, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.4.0")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=5e9))
    status, out, _ = run(capsys, "doctor")
    assert status == 1 and "-> pip install -U 'torch>=2.11'" in out and "HF_HOME" in out and "5.0 GB free" in out


def test_doctor_says_what_of_a_model_is_fused_without_reading_weights(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sizes = dict(vocab_size=99, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4)
    config = {"model_type": "gemma2", "head_dim": 512, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, out, _ = run(capsys, "doctor", tmp_path)
    table = {tuple(line.split("  ")[0].split(".")[-1:]): line for line in out.splitlines() if line.startswith("model.")}
    assert "one op" in table["mlp",] and "gate_proj | up_proj | down_proj" in table["mlp",]
    assert "attention_reference, scores in memory" in table["self_attn",] and "there is no GPU" in table["self_attn",]
    status, _, err = run(capsys, "doctor", tmp_path / "nowhere")
    assert status == 3 and "nowhere" in err


@pytest.mark.gpu
def test_doctor_tries_a_kernel_on_the_gpu():
    done = python("-m", "ligermodels", "doctor")
    assert "tried on this GPU" in done.stdout, done.stdout + done.stderr


# ---- demo ----


def test_demo_proves_what_it_says_and_its_next_commands_work(tmp_path, capsys, monkeypatch):
    # A clock that goes on by being read: 25 steps, however long each takes.
    clock = SimpleNamespace(perf_counter=map(float, count()).__next__, monotonic=time.monotonic)
    monkeypatch.setattr(demo, "time", clock)
    status, out, _ = run(capsys, "demo", "--seconds", 50, "--keep", tmp_path / "kept")
    assert status == 0 and "FAILED" not in out, out
    for words in ("byte for byte the same", "bit for bit the same", "to the last bit", "tokens/s", "kernel"):
        assert words in out, words
    first, last = (float(out.split("loss ")[1].split()[i]) for i in (0, 2))
    assert first > 6.5 and last < first - 1
    for op in ("rms_norm", "rope", "glu", "cross_entropy", "linear_cross_entropy"):
        line = next(line for line in out.splitlines() if line.startswith(f"{op} "))
        kernel, eager, kernel_gradients, eager_gradients = map(float, line.split()[-4:])
        assert 0 < max(kernel, eager, kernel_gradients, eager_gradients) < 1e-5, line
    commands = out[out.index("Next") :].splitlines()[1:]
    assert len(commands) == 3
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False, readline=lambda: ""))
    for command in commands:
        program, *argv = shlex.split(command, comments=True)
        assert program == "ligermodels" and str(tmp_path / "kept") in argv
        assert main(argv) == 0


@pytest.mark.parametrize("place", [0, 2])
def test_demo_fails_where_a_kernel_is_further_from_fp64_than_the_eager_op(place, monkeypatch, capsys):
    errors = [2e-7, 1e-7, 3e-7, 2e-7]
    monkeypatch.setattr(demo, "child", lambda *_, **__: [{"op": "rope", "errors": errors}])
    monkeypatch.setattr(demo, "HAS_TRITON", True)
    assert demo.print_kernel_errors("cpu")
    errors[place] = 3e-3
    assert not demo.print_kernel_errors("cpu")
    assert "FAILED  too far from fp64: rope" in capsys.readouterr().out


def test_fables_are_a_title_and_a_text_and_all_of_the_file():
    fables = demo.fables()
    assert len(fables) > 20 and "\n".join(fables).split() == demo.TEXT.read_text("utf-8").split()
    for fable in fables:
        title, text = fable.split("\n\n")
        assert title.startswith("The ") and not title.endswith(".") and len(text) > 200
