"""Options: flags and YAML made of the fields, which wins, and what is refused."""

import argparse
import dataclasses

import pytest
from torch.distributed.run import get_args_parser

from ligermodels.errors import InputError
from ligermodels.recipes.options import RECIPES, Parser, PretrainOptions, SFTOptions, add_flags

NEEDED = dict(model="m", data="d.jsonl", out="o")
ADAPTERS = dict(lora=4, lora_targets=("q_proj", "v_proj"))
GIVEN = {
    "grpo": {"reward": ["a.py:b", "c.py"], "reward_weights": [1.0, 0.5]},
    "distill": ADAPTERS | {"teacher": "t"},
    "medusa": {"heads": 2},
}


def of_flags(*argv):
    parser = Parser(prog="ligermodels train sft", allow_abbrev=False)
    add_flags(parser, SFTOptions)
    return vars(parser.parse_args(["m", "--data", "d.jsonl", "--out", "o", *argv]))


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "lr: 1e-5\nweight-decay: 0.2\nbetas: [0.8, 0.9]\nlora: 8\nlora_targets: [q_proj]\nepochs: 3\nseed: 4"
    )
    flags = of_flags("--lr", "3e-4", "--lora-targets", "k_proj,v_proj", "--no-packing", "--steps", "7", "--skip-bad")
    options = SFTOptions.merged(flags, file)
    assert (options.lr, options.weight_decay, options.betas) == (3e-4, 0.2, (0.8, 0.9))
    assert (options.lora, options.lora_targets, options.seed) == (8, ("k_proj", "v_proj"), 4)
    assert (options.packing, options.skip_bad, options.resume, options.clip) == (False, True, False, 1.0)
    assert (options.steps, options.epochs) == (7, None)  # --steps replaces the file's epochs
    assert SFTOptions.merged(of_flags(), file).lr == 1e-5  # YAML itself takes 1e-5 for text


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_what_is_saved_reads_back(tmp_path, recipe):
    given = GIVEN.get(recipe.recipe, ADAPTERS)
    options = recipe(**NEEDED, lr=1e-05, eval_data='a "b": #c', steps=3, **given)
    (tmp_path / "options.yaml").write_text(options.dump(), "utf-8")
    assert recipe.merged({}, tmp_path / "options.yaml") == options


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_each_field_is_a_flag_with_help(recipe):
    parser = argparse.ArgumentParser()
    add_flags(parser, recipe)
    found = {action.dest: action.help for action in parser._actions if action.dest != "help"}
    assert found.keys() == {field.name for field in dataclasses.fields(recipe)}
    assert all(found.values()) and vars(parser.parse_args([])) == {}


@pytest.mark.parametrize("recipe", RECIPES)
def test_torchrun_leaves_each_flag_to_the_command(recipe):
    """It takes the beginning of two of its own flags, such as --log of --log-dir and --logs-specs, for an error, also
    behind the name of the module; newer versions of Python may not."""
    parser = argparse.ArgumentParser()
    add_flags(parser, RECIPES[recipe])
    torchrun, own = get_args_parser(), (name for action in parser._actions for name in action.option_strings)
    theirs = [name for action in torchrun._actions for name in action.option_strings]
    for name in ("--config", *own):
        argv = ["train", recipe, "m", name, "x"]
        assert torchrun.parse_args(["--nproc-per-node", "2", "-m", "ligermodels", *argv]).training_script_args == argv
        assert name in theirs or sum(other.startswith(name) for other in theirs) < 2


def test_the_rate_of_a_recipe():
    assert [SFTOptions(**NEEDED).peak_lr, SFTOptions(**NEEDED, lora=8).peak_lr] == [2e-5, 2e-4]
    assert PretrainOptions(**NEEDED, scratch=True).peak_lr == 3e-4
    assert PretrainOptions(**NEEDED, scratch=True, lr=1e-3).peak_lr == 1e-3


WRONG = {
    "wieght_decay: 1": "sft has no option wieght_decay; did you mean weight_decay?",
    "learning_rate: 1e-5": "sft has no option learning_rate; did you mean lr?",
    "schedul: cosine": "did you mean schedule?",
    "xyzzy: 1": "ligermodels train sft --help` lists all",
    "lr: fast": "lr='fast': expected a number",
    "lr: -1": "lr=-1: expected 0 or more",
    "lr: .nan": "lr=nan: expected a number",
    "lr: true": "lr=True: expected a number",
    "steps: 1.5": "steps=1.5: expected a whole number",
    "steps: 0": "steps=0: expected 1 or more",
    "epochs: 0": "would train nothing",
    "steps: 3\nepochs: 1": "steps=3 and epochs=1 both say how long",
    "eval_data: e\neval_share: 0.1": "both say what to evaluate on",
    "eval_share: 1": "eval_share=1: expected less than 1",
    "patience: 3": "patience needs evaluations",
    "schedule: cosin": "expected one of cosine, linear, wsd, constant; did you mean cosine?",
    "betas: 0.9": r"betas=0.9: expected a list",
    "betas: [0.9]": r"expected 2 values, such as 0.9,0.999",
    "packing: 'yes'": "packing='yes': expected true or false",
    "lora_targets: [q_proj]": "no rank of adapters: add --lora 16",
    "lora: 8\nlora_alpha: 0": "scale the adapters to nothing",
    "batch_tokens: 64\nlength: 128": "batch_tokens=64 is less than a row of length=128",
    "tp: 2": "start it by `torchrun",
    "model: 7": "model=7: expected text",
    "data: null": "data has no value",
    "lr: 1\nlr: 2": "lr is there twice",
    "- lr": "holds no options",
    "lr: [": "is no YAML",
    "model: ''": "model is missing: give MODEL on the command line",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_refused(tmp_path, monkeypatch, text):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    given = {key: value for key, value in NEEDED.items() if not text.startswith(key)}
    with pytest.raises(InputError, match=WRONG[text]):
        SFTOptions.merged(given, file)


def test_an_unknown_flag_names_the_nearest(capsys):
    for flag, near in {"--learning-rate": "--lr", "--epoch": "--epochs", "--lenght": "--length"}.items():
        with pytest.raises(SystemExit):
            of_flags(flag, "3")
        assert f"sft has no option {flag}; did you mean {near}?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        of_flags("other.jsonl")
    assert "what is 'other.jsonl'?" in capsys.readouterr().err
