"""`ligermodels train` on inputs that are wrong: an error that says what and where, and nothing half-written.

Values that are wrong by themselves are in test_options.py.
"""

import importlib.util
import json
import shutil

import pytest

from ligermodels.recipes.recipe_options import SFTOptions
from tests.recipes.runs import RECIPES, train

ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
CHAT = json.dumps(ROW)


def said(role, text):
    return {"role": role, "content": text}


FILES = {  # content, what the error says; the first word is a recipe. More: test_rows, test_formats, test_data
    "sft pairs": ('{"prompt": "a", "chosen": "b", "rejected": "c"}', "format 'pairs', and sft takes tokens, messages"),
    "kto chats": (CHAT, "a.jsonl:1: the row is in the format 'messages', and kto takes unpaired; pairs are for dpo, o"),
    "grpo text": ('{"text": "a"}', "a.jsonl:1: the row has no prompt to sample completions of"),
    "grpo mixed": ('{"prompt": "a"}\n{"prompt": [{"role": "user"}]}', "a.jsonl:2: prompt: expected a text,"),
    "grpo answered": (json.dumps({"prompt": [said("assistant", "a")]}), "prompt: it ends with what the"),
    "grpo long": (
        json.dumps({"prompt": "a" * 61, "letter": "a"}),
        "a.jsonl:1: prompt: it has 61 tokens, and with max_completion_length=5 more than max_length=64",
    ),
}
FLAGS = {  # FILE, FOLDER, LINK and TEMPLATE stand for paths
    "rows of two tokens": (("--max-length", "2"), "16 of 16 rows have no trained tokens, of which --max-length 2 trun"),
    "template with an error": (("--chat-template", "TEMPLATE"), "wrong.jinja, line 3: UndefinedError: 'odd' is unde"),
    "out that is a file": (("--output-dir", "FILE"), "is not a writable folder"),
    "out with other files": (("--output-dir", "FOLDER"), "is not empty; give a folder that is new"),
    "out with a long name": (("--output-dir", "o" * 300), "cannot be written: [Errno 36] File name too long"),
    "out that is a link": (("--output-dir", "LINK"), "link is not a writable folder"),
    "evaluation on nothing": (("--eval-share", "0.01"), "leaves none to evaluate on"),
    "no file of options": (("--config", "none.yaml"), "there is no file none.yaml"),
    "no wandb": (("--report-to", "wandb"), "not installed: pip install wandb"),
}  # fmt: skip


@pytest.fixture
def refused(capsys, tmp_path):
    """refused(home, words, flags...): what is said by a run that must fail with `words` and write nothing."""

    def refused(home, words, *flags, status=3, **how):
        assert train(home, tmp_path / "out", *flags, **how) == status
        text = capsys.readouterr().err
        assert words in text, text
        assert sum(line.startswith("error: ") for line in text.splitlines()) == 1 and "Traceback" not in text
        assert not (tmp_path / "out").exists()
        return text

    return refused


@pytest.mark.parametrize("case", FILES)
def test_wrong_data(home, write, refused, case):
    (content, words), recipe = FILES[case], case.split()[0]
    flags = [flag.format(home=home) for flag in RECIPES[recipe][1]] + ["--max-steps", "1", "--max-length", "64"]
    refused(home, words, *flags, recipe=recipe, data=write("a.jsonl", content))


@pytest.mark.parametrize("case", FLAGS)
def test_wrong_flags(home, tmp_path, refused, case):
    """Exit status 2 where options are wrong by themselves, 3 where they do not fit data, model or folder."""
    flags, words = FLAGS[case]
    if case == "no wandb" and importlib.util.find_spec("wandb"):
        pytest.skip("wandb is installed")
    (tmp_path / "wrong.jinja").write_text("{{ messages[0].content }}\n\n{{ odd.content }}")
    (tmp_path / "link").symlink_to("/nowhere/at/all")
    names = {
        "FILE": home / "chats.jsonl", "FOLDER": home, "LINK": tmp_path / "link", "TEMPLATE": tmp_path / "wrong.jinja",
    }  # fmt: skip
    status = 2 if case == "no file of options" else 3
    said = refused(home, words, *(names.get(flag, flag) for flag in flags), status=status)
    assert "--skip-bad row" not in said and ("chats.jsonl:" in said) == case.endswith(("tokens", "an error"))


@pytest.mark.parametrize(
    "flag, name, words",
    [
        ("--lora-target-modules", "q_prj", "'q_prj' is not there; targets are linear modules: down_proj, gate_proj"),
        ("--lora-target-parameters", "experts.up", "target_parameters=['experts.up']; expected a list of names"),
        ("--lora-modules-to-save", "lm_hed", "modules_to_save names 'lm_hed', which"),
    ],
)
def test_names_of_adapters_are_checked_before_the_plan(home, refused, flag, name, words):
    said = refused(home, words, "--max-steps", "1", "--lora-r", "4", flag, name, "--dry-run")
    assert said.startswith("error: add_lora: ")


@pytest.mark.filterwarnings("always:rows are cut")
def test_a_row_without_an_answer_is_named_once(home, write, refused):
    data = write("a.jsonl", [{"messages": [said("user", "a")]}])
    text = refused(home, "1 of 1 rows have no trained tokens.\n", data=data)
    assert text.count("dropped: ") == 1 and "Next: correct the rows" in text


def test_a_bad_row_that_would_be_shown_is_named_once(home, write, refused, tmp_path, capsys):
    data, flags = write("a.jsonl", f"{{\n{CHAT}\n"), ("--show", "2", "--max-steps", "1", "--max-length", "32")
    for more in ((), ("--dry-run",)):
        assert refused(home, "(--skip-bad drops such rows)", *flags, *more, data=data).count("a.jsonl:1: ") == 1
    assert train(home, tmp_path / "out", *flags, "--dry-run", "--skip-bad", data=data) == 0
    said = capsys.readouterr().err
    assert f"{data}:1: left out, it cannot be read\n" in said and f"{data}:2:\n" in said and "--skip-bad" not in said


def test_rows_are_shown_as_they_are_trained(home, write, tmp_path, capsys):
    long = {"messages": [said("user", "a"), said("assistant", "b" * 90)]}
    data, text = write("a.jsonl", [long, *[ROW] * 19]), write("a.txt", "word " * 30)
    flags = ("--show", "1", "--max-steps", "1", "--max-length", "64", "--dry-run")
    assert train(home, tmp_path / "out", *flags, data=data) == 0
    shown = capsys.readouterr().err
    assert f"{data}:1; cut, the row has 112 tokens:\n" in shown and "(44 of 64 tokens are trained)" in shown
    assert train(home, tmp_path / "out", *flags, recipe="pretrain", data=text) == 0
    shown = capsys.readouterr().err
    assert f"{text}:1; the first of 3 examples:\nw[" in shown and "(63 of 64 tokens are trained)" in shown


@pytest.mark.filterwarnings("always:rows that cannot be read")
def test_rows_that_are_left_out_are_named(home, write, tmp_path, capsys):
    data = write("a.jsonl", f"{CHAT}\n{{\n{CHAT}\n[]\n")
    assert train(home, tmp_path / "out", "--max-steps", "1", "--max-length", "64", "--skip-bad", data=data) == 0
    named = capsys.readouterr().err
    assert "warning: rows that cannot be read are left out (--skip-bad):\n" in named
    for line, words in ((2, "not valid JSON"), (4, "a row is a JSON object")):
        assert named.count(f"\n  {data}:{line}: {words}") == 1


def test_rows_longer_than_the_context_are_warned_of(home, tmp_path, capsys):
    for length, warned in (("2048", False), ("2049", True)):
        assert train(home, tmp_path / "out", "--max-length", length, "--max-steps", "1", "--dry-run") == 0
        words = f"warning: --max-length {length} is more than the model's context of 2048 tokens"
        assert (words in capsys.readouterr().err) == warned


def test_a_resume_that_fails_keeps_the_options(home, tmp_path, monkeypatch, capsys):
    out, length = tmp_path / "out", ("--max-length", "64")
    assert train(home, out, *length, "--max-steps", "2", "--resume") == 0
    assert capsys.readouterr().err.startswith(f"warning: no run in {out} to resume; starting a new one")
    before = (out / "options.yaml").read_text()
    for words, flags, how in (
        ("has a checkpoint after step 2, and this run is to have 1", ("--max-steps", "1"), {}),
        ("options.yaml is of `train sft`, and this is `train pretrain`", (), dict(recipe="pretrain")),
    ):
        assert train(home, out, *length, *flags, "--resume", **how) == 3
        assert words in capsys.readouterr().err and (out / "options.yaml").read_text() == before
    assert train(home, out, "--max-steps", "2", "--lora-r", "4", "--resume") == 3
    said = capsys.readouterr().err  # all that differ, and no plan
    assert said.startswith(f"error: the run in {out} had max_length=64, batch_tokens=64, lora_r=0, and this has max_le")
    assert "lora_r=4; resume with --config" in said and (out / "options.yaml").read_text() == before
    longer = (*length, "--max-steps", "3", "--learning-rate", "0.5", "--resume")
    with monkeypatch.context() as patch, pytest.raises(UnicodeEncodeError):
        patch.setattr(SFTOptions, "dump", lambda options: "\ud800")  # which fails once the file is open
        train(home, out, *longer)
    assert (out / "options.yaml").read_text() == before
    assert train(home, out, *longer) == 0
    assert "changed since the run began: max_steps 2 -> 3, learning_rate 2e-05 -> 0.5\n" in capsys.readouterr().err
    assert "max_steps: 3" in (out / "options.yaml").read_text()
    assert train(home, out, *longer) == 0
    said = capsys.readouterr().err
    assert "resumed after step 3\n" in said and "changed since" not in said and "no run in" not in said


def edited(file, **changes):
    values = json.loads(file.read_text())
    file.write_text(json.dumps({key: x for key, x in {**values, **changes}.items() if x is not None}))


def change_template(text):
    return lambda folder: edited(folder / "tokenizer_config.json", chat_template=text)


PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
PLAIN += "{% if add_generation_prompt %}assistant: {% endif %}"
MODELS = {
    "no template": (change_template(None), "has no chat template, and rows of messages need one. Likely: a base model"),
    "turns without an end": (change_template(PLAIN), "none of 16 rows trains a token that stops the model"),
    "no folder": (shutil.rmtree, "is not there"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json; copy into it the config"),
    "adapters": (lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"), "has only adapters"),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_wrong_models(home, tmp_path, refused, case):
    change, words = MODELS[case]
    shutil.copytree(home / "model", tmp_path / "model")
    change(tmp_path / "model")
    refused(tmp_path, words, "--max-steps", "1", data=home / "chats.jsonl")


def test_what_only_looks_wrong_trains(home, write, tmp_path, capsys):
    """Evaluation in another format; no token for padding. Line ends and byte order marks: test_rows.py."""
    evaluation = write("evaluation.csv", "prompt,completion\na,b\n")
    shutil.copytree(home / "model", tmp_path / "model")
    edited(tmp_path / "model" / "tokenizer_config.json", pad_token=None)
    flags = ("--max-steps", "1", "--max-length", "32", "--eval-data", evaluation)
    assert train(tmp_path, tmp_path / "out", *flags, data=home / "chats.jsonl") == 0
    assert "16 rows of messages" in capsys.readouterr().err


def test_what_cannot_be_resumed(home, capsys):
    """A folder that has no run, and data that has grown or changed. tests/parallel has damaged checkpoints."""
    notes, flags = home / "notes", ("--max-steps", "4", "--save-steps", "2", "--max-length", "64")
    notes.mkdir()
    (notes / "notes.txt").write_text("mine")
    assert train(home, "notes", *flags, "--resume") == 3
    assert "has no run to resume" in capsys.readouterr().err
    assert [path.name for path in notes.iterdir()] == ["notes.txt"]
    shutil.copy(home / "chats.jsonl", home / "growing.jsonl")
    assert train(home, "resumed", *flags, data="growing.jsonl") == 0
    with (home / "growing.jsonl").open("a") as file:
        file.write(f"\n{CHAT}")
    longer = (*flags, "--max-steps", "6", "--resume")
    assert train(home, "resumed", *longer, data="growing.jsonl") == 3
    assert "(16 rows were there, now 17). Next step: restore what was before (rows" in capsys.readouterr().err
    other = (home / "chats.jsonl").read_text().replace("Say a.", "Ask a.")
    (home / "growing.jsonl").write_text(other)
    assert train(home, "resumed", *longer, data="growing.jsonl") == 3
    assert "the checkpoint: its files have changed (16 rows" in capsys.readouterr().err
    shutil.copy(home / "chats.jsonl", home / "growing.jsonl")
    assert train(home, "resumed", *longer, data="growing.jsonl") == 0
