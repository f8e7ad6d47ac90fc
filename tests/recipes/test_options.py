"""Options: flags and YAML made of the fields, which wins, and what is refused."""

import argparse
import dataclasses
import re
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from ligermodels import cli
from ligermodels.errors import InputError
from ligermodels.recipes import RECIPES, find
from ligermodels.recipes.options import add_flags, fields_of
from ligermodels.recipes.sft import PretrainOptions, SFTOptions
from tests.recipes.runs import options_of

DOCS = Path(__file__).parents[2] / "docs"

NEEDED = dict(model="m", data="d.jsonl", output_dir="o")
ADAPTERS = dict(lora_r=4, lora_target_modules=("q_proj", "v_proj"))
GIVEN = {
    "grpo": {"reward_funcs": ["a.py:b", "c.py"], "reward_weights": [1.0, 0.5]},
    "distill": ADAPTERS | {"teacher": "t"},
    "medusa": {"heads": 2},
}


def of_flags(*argv, recipe="sft"):
    found = vars(cli._parser().parse_args(["train", recipe, "m", "--data", "d.jsonl", "--out", "o", *argv]))
    return {name: value for name, value in found.items() if name not in ("run", "recipe", "config")}


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "learning_rate: 1e-5\nweight-decay: 0.2\nadam_beta1: 0.8\nlora: 8\nlora_target_modules: [q_proj]\n"
        "num_train_epochs: 3\nseed: 4"
    )
    flags = of_flags(
        "--lr", "3e-4", "--lora-target-modules", "k_proj,v_proj", "--no-packing", "--steps", "7", "--skip-bad"
    )
    options = SFTOptions.merged(flags, file)
    assert (options.learning_rate, options.weight_decay) == (3e-4, 0.2)
    assert (options.adam_beta1, options.adam_beta2) == (0.8, 0.999)
    assert (options.lora_r, options.lora_target_modules, options.seed) == (8, ("k_proj", "v_proj"), 4)
    assert (options.packing, options.skip_bad, options.resume, options.max_grad_norm) == (False, True, False, 1.0)
    assert (options.max_steps, options.num_train_epochs) == (7, None)  # --steps replaces the file's epochs
    assert SFTOptions.merged(of_flags(), file).learning_rate == 1e-5  # YAML itself takes 1e-5 for text


def test_aliases(tmp_path):
    """Six options have a shorter name, on the command line and in files; what is written has the full one."""
    short = {"lr": 1e-3, "epochs": 2.0, "length": 64, "out": "o", "lora": 4}
    full = dict(learning_rate=1e-3, num_train_epochs=2.0, max_length=64, output_dir="o", lora_r=4)
    expected = SFTOptions(**{**NEEDED, **full})
    argv = ["train", "sft", "m", "--data", "d.jsonl", *(f"--{name}={value}" for name, value in short.items())]
    flags = {
        name: value for name, value in vars(cli._parser().parse_args(argv)).items() if name not in ("run", "recipe")
    }
    assert SFTOptions.merged(flags) == expected
    (tmp_path / "short.yaml").write_text("\n".join(f"{name}: {value}" for name, value in short.items()))
    assert SFTOptions.merged({"model": "m", "data": "d.jsonl"}, tmp_path / "short.yaml") == expected
    written = re.findall(r"^(\w+):", expected.dump(), re.MULTILINE)
    assert written[1:] == [
        field.name for field in dataclasses.fields(SFTOptions) if field.name not in ("resume", "dry_run")
    ]


def test_underscores_are_dashes():
    flags = of_flags("--weight_decay", "0.01", "--lora_target_modules=q_proj,v_proj", "--no_packing", "--lora", "2")
    assert flags == of_flags(
        "--weight-decay", "0.01", "--lora-target-modules=q_proj,v_proj", "--no-packing", "--lora", "2"
    )
    assert flags["weight_decay"] == "0.01" and flags["lora_target_modules"] == "q_proj,v_proj"
    parser = cli._parser()
    found = parser.parse_args(["generate", "a_b", "--max_new_tokens", "3", "--prompt=--c_d", "--kv_cache_dtype", "fp8"])
    assert (found.model, found.max_new_tokens, found.prompt, found.kv_cache_dtype) == ("a_b", 3, "--c_d", "fp8")
    assert parser.parse_args(["convert", "--dry_run", "--", "a", "--b_c"]).dst == "--b_c"


@pytest.mark.parametrize("recipe", [find(name).Options for name in RECIPES], ids=RECIPES)
def test_what_is_saved_reads_back(tmp_path, recipe):
    given = GIVEN.get(recipe.recipe, ADAPTERS)
    options = recipe(**NEEDED, learning_rate=1e-05, eval_data='a "b": #c', max_steps=3, **given)
    (tmp_path / "options.yaml").write_text(options.dump(), "utf-8")
    assert recipe.merged({}, tmp_path / "options.yaml") == options


@pytest.mark.parametrize("recipe", [find(name).Options for name in RECIPES], ids=RECIPES)
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
    add_flags(parser, find(recipe).Options)
    torchrun, own = get_args_parser(), (name for action in parser._actions for name in action.option_strings)
    theirs = [name for action in torchrun._actions for name in action.option_strings]
    for name in ("--config", *own):
        argv = ["train", recipe, "m", name, "x"]
        assert torchrun.parse_args(["--nproc-per-node", "2", "-m", "ligermodels", *argv]).training_script_args == argv
        assert name in theirs or sum(other.startswith(name) for other in theirs) < 2


def test_the_rate_of_a_recipe():
    assert [SFTOptions(**NEEDED).peak_lr, SFTOptions(**NEEDED, lora_r=8).peak_lr] == [2e-5, 2e-4]
    assert PretrainOptions(**NEEDED, scratch=True).peak_lr == 3e-4
    assert PretrainOptions(**NEEDED, scratch=True, learning_rate=1e-3).peak_lr == 1e-3


WRONG = {
    "wieght_decay: 1": "sft has no option wieght_decay; did you mean --weight-decay?",
    "num_train_epoch: 2\nxyz: 1": "no option num_train_epoch; did you mean --num-train-epochs.\nsft has no option xyz;",
    "recipe: dpo": "is of `train dpo`, and this is `train sft`",
    "lr_scheduler_typ: cosine": "did you mean --lr-scheduler-type?",
    "lr: fast": "learning_rate='fast': expected a number",
    "lr: -1": "learning_rate=-1: expected more than 0",
    "lr: 0": "learning_rate=0: expected more than 0",
    "warmup_steps: -1": "warmup_steps=-1: expected 0 or more",
    "lr: .nan": "learning_rate=nan: expected a number",
    "lr: true": "learning_rate=True: expected a number",
    "max_steps: 1.5": "max_steps=1.5: expected a whole number",
    "steps: 0": "max_steps=0: expected 1 or more",
    "num_train_epochs: 0": "num_train_epochs=0: expected more than 0",
    "steps: 3\nepochs: 1": "max_steps=3 and num_train_epochs=1 both say how long",
    "eval_data: e\neval_share: 0.1": "both say what to evaluate on",
    "eval_share: 1": "eval_share=1: expected less than 1",
    "lr_scheduler_type: constant": "did you mean constant_with_warmup?",
    "lr_scheduler_type: cosin": "expected one of cosine, linear, wsd, constant_with_warmup; did you mean cosine?",
    "adam_beta1: 1": "adam_beta1=1: expected less than 1",
    "lora: 8\nlora_target_modules: 7": "lora_target_modules=7: expected a list",
    "packing: 'yes'": "packing='yes': expected true or false",
    "lora_target_modules: [q_proj]": "no rank of adapters: add --lora-r 16",
    "lora: 8\nlora_alpha: 0": "lora_alpha=0: expected more than 0",
    "batch_tokens: 64\nlength: 128": "batch_tokens=64 is less than a row of max_length=128",
    "tp: 2": "start it by `torchrun",
    "model: 7": "model=7: expected text",
    "data: null": "data has no value",
    "length: 1": "max_length=1: expected 2 or more",
    "save_total_limit: 0": "save_total_limit=0: expected 1 or more",
    "eval_steps: 1\neval-steps: 2": "eval_steps is there twice, also as eval-steps",
    "lr: 1\nlearning-rate: 1": "lr is there twice, also as learning-rate",
    "- lr": "has no options",
    "lr: [": "is not valid YAML",
    "model: ''": "model is missing: give MODEL on the command line",
    "lr: 1\nlr: 2": "lr is there twice",
    "seed: 99999999999999999999": "seed=99999999999999999999: expected less than",
    "lora: 8\nquantize: nf": "quantize='nf': expected one of none, nf4; did you mean nf4?",
    "quantize: nf4": "add --lora-r 16",
    "lora: 8\nquantize: nf4\nmerge: true": "round the result to 4 bits",
    "merge: true": "merge is given, but no rank of adapters: add --lora-r 16",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_refused(tmp_path, monkeypatch, text):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    given = {key: value for key, value in NEEDED.items() if not text.startswith(key)}
    with pytest.raises(InputError, match=WRONG[text]):
        SFTOptions.merged(given, file)


TWO_PROCESSES = [
    ("dpo", {"beta": 0}, "expected more than 0"),
    ("dpo", {"loss_type": "hinge", "label_smoothing": 0.1}, "not defined for loss_type='hinge'"),
    ("dpo", {"loss_type": "aot"}, "expected one of sigmoid"),
    ("dpo", {"max_length": 64, "batch_tokens": 100}, "less than 2 sequences of max_length=64"),
    ("simpo", {"cp": 2}, "whole rows on each GPU"),
    ("medusa", {"heads": 0}, "heads=0: expected 1"),
    ("medusa", {"lora_r": 4}, "lora_r: heads are trained"),
    ("medusa", {"cp": 2}, "leave both out"),
    ("distill", {"teacher": ""}, "teacher is missing: give --teacher"),
    ("distill", {"beta": 1.5}, "beta=1.5: expected 1 or less"),
    ("distill", {"temperature": 0}, "temperature=0: expected more"),
    ("distill", {"hard_weight": 1.0}, "hard_weight=1.0: expected less than 1"),
    ("distill", {"tp": 2}, "FSDP shards both"),
    ("distill", {"lmbda": 1.5}, "lmbda=1.5: expected 1 or less"),
    ("distill", {"lmbda": 1, "hard_weight": 0.1}, "would teach the model its own samples"),
    ("distill", {"prompts": 4}, "prompts is given, but nothing is sampled: add --lmbda 1"),
    ("distill", {"sampling_temperature": 0.0}, "sampling_temperature is given, but nothing"),
    ("distill", {"lmbda": 1, "accumulation": 3}, "a step that samples has prompts; give --prompts"),
    ("distill", {"lmbda": 1, "cp": 2}, "does not sample; leave both out"),
    ("grpo", {"reward_funcs": ()}, "reward_funcs is missing: give --reward-funcs"),
    ("grpo", {"reward_weights": (1.0, 2.0)}, "there are 2 for 1 rewards"),
    ("grpo", {"temperature": 0}, "temperature=0: expected more than 0"),
    ("grpo", {"max_length": 9, "max_completion_length": 9}, "leaves no space for a prompt"),
    ("grpo", {"num_generations": 1}, "num_generations=1: expected 2 or more"),
    ("grpo", {"rollout_rows": 4}, "rollout_rows=4 is less than the num_generations=8"),
    ("grpo", {"accumulation": 3}, "give --prompts in its place"),
    ("grpo", {"tp": 2}, "does not sample; leave both out"),
    ("grpo", {"prompts": 3}, "give a multiple of 2"),
]


@pytest.mark.parametrize(("recipe", "given", "says"), TWO_PROCESSES, ids=str)
def test_what_a_recipe_refuses(monkeypatch, recipe, given, says):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=says):
        options_of(recipe, **given)


def test_an_unknown_flag_says_which_is_meant(capsys):
    said = {
        ("--num-epochs", "3"): "sft has no option --num-epochs; did you mean --num-train-epochs?",
        ("--save_step=3",): "sft has no option --save-step; did you mean --save-steps?",
        ("--stamps", "3", "--deepspeed", "x"): "sft has no option --stamps; `ligermodels train sft --help` lists all",
        ("other",): "unexpected argument 'other'; only MODEL has no name",
    }
    for argv, words in said.items():
        with pytest.raises(SystemExit) as stop:
            of_flags(*argv)
        assert stop.value.code == 2 and words in capsys.readouterr().err, words
    with pytest.raises(SystemExit):
        cli.main(["train", "sft", "m", "rows.jsonl"])
    assert "unexpected argument 'rows.jsonl'; did you mean --data rows.jsonl?" in capsys.readouterr().err


def test_the_documentation_says_which_options_a_resumed_run_may_change():
    text = re.search(r"may change (.*?)\.", (DOCS / "training.md").read_text().replace("\n", " "))[1]
    found = {name.replace("-", "_") for name in re.findall(r"`--([a-z-]+)`", text)}
    fields = {name: field for recipe in RECIPES for name, field in fields_of(find(recipe).Options).items()}
    free = {name for name, field in fields.items() if not field.metadata["fixed_on_resume"]}
    assert found == free - {"output_dir", "show", "resume", "dry_run", "report_to"}


def test_all_options(tmp_path):
    """An option that is added or removed changes this list."""
    found = {name: sorted(fields_of(find(name).Options)) for name in RECIPES}
    common = set.intersection(*map(set, found.values()))
    assert " ".join(sorted(common)) == COMMON
    assert {name: " ".join(x for x in names if x not in common) for name, names in found.items()} == OWN


COMMON = (
    "accumulation activations adam_beta1 adam_beta2 batch_tokens chat_template cp data decay dp_replicate "
    "dry_run eval_data eval_share eval_steps final_lr learning_rate lora_alpha "
    "lora_dropout lora_modules_to_save lora_r lora_target_modules lora_target_parameters lr_scheduler_type "
    "max_grad_norm max_length max_samples max_steps merge model num_train_epochs output_dir packing precision quantize "
    "report_to resume save_steps save_total_limit seed show skip_bad system_prompt text_only tp use_dora use_rslora "
    "warmup_steps weight_decay"
)
OWN = {
    "sft": ("assistant_only_loss capture mtp_loss_weight"),
    "pretrain": ("capture mtp_loss_weight scratch"),
    "dpo": ("beta label_smoothing loss_type sft_weight"),
    "kto": ("beta desirable_weight loss_type undesirable_weight"),
    "orpo": ("beta"),
    "cpo": ("beta label_smoothing loss_type sft_weight"),
    "simpo": ("beta label_smoothing sft_weight simpo_gamma"),
    "distill": (
        "beta hard_weight lmbda max_completion_length prompts rollout_rows sampling_temperature teacher temperature"
    ),
    "medusa": ("head_decay head_layers heads heads_weight train_base"),
    "grpo": (
        "beta epsilon epsilon_high loss_type mask_truncated_completions max_completion_length num_generations "
        "num_iterations prompts reward_funcs reward_weights rollout_rows scale_rewards temperature"
    ),
}
