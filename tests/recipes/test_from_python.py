"""`ligermodels.train`: what Python may give in place of names, what it returns and raises, and a run in a notebook."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ligermodels
from ligermodels import InputError, train
from ligermodels.cli import main
from ligermodels.recipes import RECIPES, notebook, options_of
from ligermodels.recipes.options import fields_of
from ligermodels.training import add_lora
from tests.recipes import runs
from tests.recipes.runs import CHATS, PAIRS, PROMPTS, all_metrics, metrics, weights

FEW = dict(max_length=64, accumulation=2, max_steps=4, learning_rate=3e-3, warmup_steps=0, show=0)
FLAGS = "--max-length 64 --accumulation 2 --max-steps 4 --learning-rate 3e-3 --warmup-steps 0".split()
ROWS = [{"messages": messages} for messages in CHATS * 2]


def of_files(home, out, *flags, **how):
    assert runs.train(home, out, *FLAGS, *flags, **how) == 0
    return out


def check_equal(ours, theirs):
    assert all_metrics(ours) == all_metrics(theirs) and weights(ours) == weights(theirs)


def test_rows_data_sets_and_files_train_the_same(home, tmp_path, capsys):
    datasets = pytest.importorskip("datasets")
    expected = of_files(home, tmp_path / "files", "--eval-data", home / "chats.jsonl")
    both = datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list(ROWS))
    capsys.readouterr()
    for name, data, eval_data in (
        ("rows", ROWS, (row for row in ROWS)),
        ("set", both, both["test"]),
        ("path", home / "chats.jsonl", [str(home / "chats.jsonl")][0]),
    ):
        folder, lines = train(
            "sft", model=home / "model", data=data, eval_data=eval_data, output_dir=tmp_path / name, **FEW
        )
        assert folder == tmp_path / name / "model"
        assert lines == [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        check_equal(tmp_path / name, expected)
    out, said = capsys.readouterr()
    assert out == "" and "data           in memory: 16 rows: 16 rows of messages" in said


def test_a_model_in_memory_is_trained_in_place(home, tmp_path):
    for name, more in (("all", {}), ("adapters", {"lora_r": 4, "merge": True})):
        flags = [text for key, value in more.items() for text in (f"--{key.replace('_', '-')}", str(value))]
        expected = of_files(home, tmp_path / f"{name} by name", *[flag for flag in flags if flag != "True"])
        model = ligermodels.load(home / "model", dtype=torch.float32, device="cpu")
        folder, _ = train("sft", model=model, data=ROWS, output_dir=tmp_path / name, **FEW, **more)
        check_equal(tmp_path / name, expected)
        saved = ligermodels.load(folder, dtype=torch.float32, device="cpu").state_dict()
        state = model.state_dict()
        assert all(weight.equal(state[key]) for key, weight in saved.items())


def test_a_class_of_ones_own_is_loaded_by_itself(home, tmp_path, capsys):
    class Config(ligermodels.LlamaConfig):
        model_type = "mine"

    class Mine(ligermodels.Llama):
        config_class = Config

    config = {**json.loads((home / "model" / "config.json").read_text()), "model_type": "mine"}
    model = Mine.from_config(config, dtype=torch.float32, seed=0)
    few = FEW | dict(max_steps=1, tokenizer=home / "model")
    for name, more in (("model", {}), ("adapter", {"lora_r": 2})):
        folder, _ = train("sft", model=model, data=ROWS, output_dir=tmp_path / name, **few, **more)
        said = capsys.readouterr().err.splitlines()
        title, advice = said[next(n for n, line in enumerate(said) if line.startswith("next")) :][:2]
        assert title == "next, in Python:"
        if name == "model":
            assert advice == f"  Mine.from_hub({str(folder)!r})" and type(Mine.from_hub(folder)) is Mine
            with pytest.raises(ligermodels.ConfigError, match=r"model_type 'mine'.*A class of your own loads"):
                ligermodels.load(folder)
        else:
            assert advice == f"  ligermodels.training.load_adapter(model, {str(folder)!r})"


def test_errors_name_options_as_arguments_too(home, tmp_path):
    wanted = dict(model=home / "model", data=ROWS, output_dir=tmp_path / "out")
    for given, name in ((dict(max_step=3), "--max-steps is the argument max_steps"), (dict(model=None), None)):
        with pytest.raises(InputError) as raised:
            train("sft", **wanted | given)
        notes = getattr(raised.value, "__notes__", [])
        assert len(notes) == (name is not None) and all(name in note for note in notes)


def test_rows_without_the_assistants_role_say_so(home, tmp_path):
    rows = [{"messages": [message | {"role": "bot"} if message["role"] == "assistant" else message
                          for message in row["messages"]]} for row in ROWS]  # fmt: skip
    with pytest.raises(InputError, match=r"no message has the role assistant; .* bot, "):
        train("sft", model=home / "model", data=rows, output_dir=tmp_path / "out", **FEW)


def test_the_reference_is_the_model_in_memory_as_it_was(home, tmp_path):
    expected = of_files(home, tmp_path / "files", recipe="dpo", data="pairs.jsonl")
    model = ligermodels.load(home / "model", dtype=torch.float32, device="cpu")
    train("dpo", model=model, data=PAIRS, output_dir=tmp_path / "rows", **FEW)
    check_equal(tmp_path / "rows", expected)


def test_frozen_weights_stay_frozen(home, tmp_path, capsys):
    model = ligermodels.load(home / "model", dtype=torch.float32, device="cpu")
    model.decoder.layers.requires_grad_(False)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    train("sft", model=model, data=ROWS, output_dir=tmp_path / "out", **FEW)
    moved = {name for name, weight in model.state_dict().items() if not weight.equal(before[name])}
    assert moved == {name for name in before if ".layers." not in name}
    trained = sum(before[name].numel() for name in moved)
    assert f"trained        {trained:,} parameters" in capsys.readouterr().err


def test_a_model_of_no_folder_gets_a_tokenizer(home, tmp_path):
    config = json.loads((home / "model" / "config.json").read_text())
    model = ligermodels.Llama.from_config(config, device="cpu", dtype=torch.float32, seed=0)
    with pytest.raises(InputError, match="its tokenizer is not known; give tokenizer="):
        train("sft", model=model, data=ROWS, output_dir=tmp_path / "none", **FEW)
    tokenizer = ligermodels.Tokenizer.from_hub(home / "model")
    folder, _ = train("sft", model=model, tokenizer=tokenizer, data=ROWS, output_dir=tmp_path / "given", **FEW)
    train("sft", model=home / "model", data=ROWS, output_dir=tmp_path / "named", **FEW)
    check_equal(tmp_path / "given", tmp_path / "named")  # the home's model has the weights of seed 0
    assert ligermodels.Tokenizer.from_hub(folder).encode("Say é.") == tokenizer.encode("Say é.")


def test_reward_functions(home, tmp_path):
    sampled = dict(prompts=4, accumulation=4, max_completion_length=5, num_generations=4)
    flags = [text for key, value in sampled.items() for text in (f"--{key.replace('_', '-')}", value)]
    how = dict(recipe="grpo", data="prompts.jsonl")
    expected = of_files(home, tmp_path / "files", *flags, "--reward-funcs", f"{home}/reward.py", **how)

    def reward(completion_ids, letter, **others):
        return [sum(i % 5 == ord(c) % 5 for i in ids) for ids, c in zip(completion_ids, letter, strict=True)]

    few = dict(model=home / "model", data=PROMPTS, **{**FEW, **sampled})
    train("grpo", output_dir=tmp_path / "one", rewards=reward, **few)
    check_equal(tmp_path / "one", expected)
    both = [lambda completions, **others: [1.0] * len(completions), f"{home}/reward.py"]
    train("grpo", output_dir=tmp_path / "two", rewards=both, reward_weights=[0.0, 1.0], **few)
    assert metrics(tmp_path / "two", "reward") == metrics(expected, "reward")
    assert set(metrics(tmp_path / "two", "reward_<lambda>").values()) == {1.0}


def test_processes_that_encode_rows_get_no_objects(home, tmp_path, monkeypatch):
    """Neither the model nor a reward, which cannot be sent: a lambda."""
    monkeypatch.setattr("ligermodels.recipes.data.batches.encoding_workers", lambda *_, **__: 1)
    model = ligermodels.load(home / "model", dtype=torch.float32, device="cpu")
    few = FEW | dict(max_steps=1, prompts=4, accumulation=4, max_completion_length=5, num_generations=4)
    rewards = [lambda completions, letter, **others: [float(letter[0] in text) for text in completions]]
    _, lines = train("grpo", model=model, data=PROMPTS, output_dir=tmp_path / "out", rewards=rewards, **few)
    assert len(lines) == 1 and "reward" in lines[0]


def test_a_run_of_rows_is_resumed_in_python_alone(home, tmp_path, capsys):
    expected = of_files(home, tmp_path / "files")
    how = dict(model=home / "model", output_dir=tmp_path / "rows", **FEW)
    train("sft", data=ROWS, **(how | {"max_steps": 2, "lr_scheduler_type": "constant_with_warmup"}))
    assert main(["train", "sft", "--config", f"{tmp_path}/rows/options.yaml", "--resume"]) == 3
    said = capsys.readouterr().err
    assert "data='in memory: 16 rows': this was a Python object" in said and "and resume=True" in said
    with pytest.raises(InputError, match="the data cannot continue after the checkpoint"):
        train("sft", data=[*ROWS[:-1], ROWS[0]], resume=True, **how)
    train("sft", data=ROWS, resume=True, **(how | {"max_steps": 3, "lr_scheduler_type": "constant_with_warmup"}))
    assert len(metrics(tmp_path / "rows")) == 3 and metrics(tmp_path / "rows")[1] == metrics(expected)[1]


WRONG = {
    "rows_of_nothing": (dict(data=[]), "data has no rows"),
    "a number": (dict(data=3), "data is a int: expected a list of rows"),
    "a text among rows": (dict(data=[*ROWS, 3]), "data: row 17: a row is a JSON object with keys, not int"),
    "a frame": (dict(data=SimpleNamespace(columns=[])), r"frame.to_dict\('records'\)"),
    "streamed": (dict(data=SimpleNamespace(column_names=["messages"])), "data is a data set that streams"),
    "rewards": (dict(data=ROWS, rewards=[len]), "rewards: sft has no rewards; they are for grpo"),
    "model": (dict(data=ROWS, model=torch.nn.Linear(2, 2)), "model is a Linear: expected the name of a repository"),
    "tokenizer": (dict(data=ROWS, tokenizer="somewhere"), "tokenizer: it goes with a model in memory"),
    "of a run": (dict(data=ROWS, model="{run}"), "is the folder of a run of `train`; give what it has written: "),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(home, tmp_path, name):
    given, says = WRONG[name]
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "options.yaml").write_text("")
    given = {key: str(tmp_path / "run") if value == "{run}" else value for key, value in given.items()}
    with pytest.raises(InputError, match=says):
        train("sft", **{"model": home / "model", "output_dir": tmp_path / "out", **FEW, **given})
    assert not (tmp_path / "out").exists()


def test_a_model_in_memory_that_cannot_be_trained_so(home, tmp_path):
    def refused(model, says, **options):
        with pytest.raises(InputError, match=says):
            train("sft", model=model, data=ROWS, output_dir=tmp_path / "out", **FEW, **options)

    def load(**options):
        return ligermodels.load(home / "model", device="cpu", **{"dtype": torch.float32, **options})

    refused(load(), "quantize: it is for a model that is loaded", lora_r=4, quantize="nf4")
    refused(load(dtype=torch.bfloat16), r"the CPU trains in float32: give model.float\(\)")
    refused(load(quantization_config="nf4"), "model has quantised weights, which are frozen: give lora_r=")
    refused(load().requires_grad_(False), "model has no weight that requires a gradient")
    refused(add_lora(load(), 4), "model has adapters already")


def test_the_page_runs(home, tmp_path, monkeypatch):
    """The first block of docs/training/start.md, on a tiny model; it learns."""
    page = (Path(__file__).parents[2] / "docs" / "training" / "start.md").read_text()
    code = re.search(r"## From Python.*?```python\n(.*?)```", page, re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    variables = {}
    exec(code.replace('"HuggingFaceTB/SmolLM2-135M-Instruct"', repr(str(home / "model"))), variables)
    losses = [line["loss"] for line in variables["metrics"] if "loss" in line]
    assert str(variables["folder"]) == "tuned-in-python/model" and len(losses) == 8 and losses[-1] < losses[0]
    assert (tmp_path / "tuned-in-python" / "adapter").is_dir()


def test_the_docstring_has_every_option():
    for recipe in RECIPES:
        for name in fields_of(options_of(recipe)):
            assert re.search(rf"^    {name}: \S", train.__doc__, re.MULTILINE), name
    assert "by the recipe" in train.__doc__ and "{:g}" not in train.__doc__


class Shell:
    """What IPython gives in the kernel of a notebook."""

    kernel = object()

    def __init__(self):
        self.outputs = []

    def display(self, output, display_id):
        self.outputs.append(output)
        return SimpleNamespace(update=self.outputs.append)


def test_a_run_in_a_notebook(home, tmp_path, capsys, monkeypatch):
    """One output that is drawn again; no line of progress, and nothing on stderr, which notebooks paint red."""
    shell = Shell()
    display = SimpleNamespace(HTML=str, display=shell.display)
    ipython = SimpleNamespace(get_ipython=lambda: shell, display=display, version_info=(9, 0))  # matplotlib reads it
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    how = dict(model=home / "model", data=ROWS, output_dir=tmp_path / "out", eval_share=0.3, eval_steps=1, **FEW)
    _, lines = train("sft", **how)
    out, said = capsys.readouterr()
    assert "steps          4, each of" in out and "evaluation after step 2: loss" in out
    assert said == "" and "step 4/4" not in out
    last = shell.outputs[-1]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert '<progress value="4" max="4"' in last and f"step 4/4: loss {losses[-1]:.4f}" in last
    curve, evaluations = re.findall(r'polyline points="([^"]*)"', last)
    heights = [float(point.split(",")[1]) for point in curve.split()]
    assert len(evaluations.split()) == 5
    # A lower loss is lower in the picture, by as much as the axis says.
    shown = {float(x) for x in re.findall(r">(\d+\.\d+)<", last)}
    low, high = min(shown), max(shown)
    expected = [10 + (high - loss) / (high - low) * (notebook._HEIGHT - 34) for loss in losses]
    assert heights == pytest.approx(expected, abs=0.3)


def test_curves_of_many_steps_are_thinned():
    curve = [(n, float(n % 7)) for n in range(1000)]
    points = notebook._thinned(curve)
    assert len(points) <= 300 and points[0] == (1.5, 1.5)
    assert sum(y for _, y in points) / len(points) == pytest.approx(sum(y for _, y in curve) / 1000, abs=0.01)
    assert notebook.curves_svg({"loss": curve[:1]}) == ""
