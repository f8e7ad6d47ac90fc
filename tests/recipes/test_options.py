"""Options: flags and YAML made of the fields, which wins, and what is refused."""

import argparse
import re
from pathlib import Path

import pytest

from ligermodels import cli, train
from ligermodels.errors import InputError
from ligermodels.kernels.loss.linear_jsd import DIVERGENCES
from ligermodels.layers import policy, preference
from ligermodels.recipes import RECIPES, find, options_of, other_tools, recipe_options
from ligermodels.recipes.options import add_flags, fields_of
from ligermodels.recipes.recipe_options import PretrainOptions, SFTOptions
from tests.recipes.runs import NEEDS

DOCS = Path(__file__).parents[2] / "docs"

NEEDED = dict(model="m", data="d.jsonl", output_dir="o")
ADAPTERS = dict(lora_r=4, lora_target_modules=("q_proj", "v_proj"))
GIVEN = {
    "grpo": {"reward_funcs": ["a.py:b", "c.py"], "reward_weights": [1.0, 0.5]},
    "distill": ADAPTERS | {"teacher": "t"},
    "medusa": {"heads": 2},
}


def of_flags(*argv, recipe="sft"):
    found = vars(cli._parser().parse_args(["train", recipe, "m", "--data", "d.jsonl", "--output-dir", "o", *argv]))
    return {name: value for name, value in found.items() if name not in ("run", "recipe", "config")}


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "learning_rate: 1e-5\nweight-decay: 0.2\nadam_beta1: 0.8\nlora_r: 8\nlora_target_modules: [q_proj]\nseed: 4"
    )
    flags = of_flags(
        *"--learning-rate 3e-4 --lora-target-modules k_proj,v_proj --merge --no-text-only --skip-bad".split()
    )
    options = SFTOptions.merged(flags, file)
    assert (options.learning_rate, options.weight_decay) == (3e-4, 0.2)
    assert (options.adam_beta1, options.adam_beta2) == (0.8, 0.999)
    assert (options.lora_r, options.lora_target_modules, options.seed) == (8, ("k_proj", "v_proj"), 4)
    assert (options.merge, options.skip_bad, options.resume, options.max_grad_norm) == (True, True, False, 1.0)
    assert SFTOptions.merged(of_flags(), file).learning_rate == 1e-5  # YAML itself takes 1e-5 for text


def test_underscores_are_dashes():
    flags = of_flags("--weight_decay", "0.01", "--lora_target_modules=q_proj,v_proj", "--no_merge", "--lora-r", "2")
    assert flags == of_flags(
        "--weight-decay", "0.01", "--lora-target-modules=q_proj,v_proj", "--no-merge", "--lora-r", "2"
    )
    assert flags["weight_decay"] == "0.01" and flags["lora_target_modules"] == ["q_proj", "v_proj"]
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
    assert found.keys() == fields_of(recipe).keys()
    assert all(found.values()) and vars(parser.parse_args([])) == {}


def test_the_rate_of_a_recipe():
    assert [SFTOptions(**NEEDED).learning_rate, SFTOptions(**NEEDED, lora_r=8).learning_rate] == [2e-5, 2e-4]
    assert PretrainOptions(**NEEDED, scratch=True).learning_rate == 3e-4
    assert PretrainOptions(**NEEDED, scratch=True, learning_rate=1e-3).learning_rate == 1e-3


REFUSED = [  # recipe, a file of options, what is said: each kind of value and rule, and what recipes check themselves
    ("sft", "num_train_epoch: 2\nxyz: 1", "num_train_epoch; did you mean --num-train-epochs.\nsft has no option xyz;"),
    ("sft", "recipe: dpo", "is of `train dpo`, and this is `train sft`"),
    ("sft", "learning_rate: fast", "learning_rate='fast': expected a number"),
    ("sft", "learning_rate: 0", "learning_rate=0: expected more than 0"),
    ("sft", "learning_rate: .nan", "learning_rate=nan: expected a number"),
    ("sft", "learning_rate: true", "learning_rate=True: expected a number"),
    ("sft", "warmup_steps: -1", "warmup_steps=-1: expected 0 or more"),
    ("sft", "max_steps: 1.5", "max_steps=1.5: expected a whole number"),
    ("sft", "max_steps: 3\nnum_train_epochs: 1", "max_steps=3 and num_train_epochs=1: give one of the two"),
    ("sft", "quantize: nf4\nlora_r: 4\nmerge: true", "give one of the two, or merge later: `ligermodels convert MODEL"),
    ("sft", "eval_share: 1", "eval_share=1: expected less than 1"),
    ("sft", "lr_scheduler_type: constant", "expected one of cosine, .*; did you mean constant_with_warmup?"),
    ("sft", "lora_r: 8\nlora_target_modules: 7", "lora_target_modules=7: expected a list"),
    ("sft", "merge: 'yes'", "merge='yes': expected true or false"),
    ("sft", "lora_target_modules: [q_proj]", "lora_target_modules=q_proj needs lora_r: add --lora-r"),
    ("sft", "batch_tokens: 64\nmax_length: 128", "batch_tokens=64 is less than an example, 1 x max_length=128"),
    ("sft", "model: 7", "model=7: expected text"),
    ("sft", r'output_dir: "a\0b"', "expected text"),
    ("sft", "data: null", "data=None: expected a list"),
    ("sft", "eval_steps: 1\neval-steps: 2", "eval_steps is there twice"),
    ("sft", "- learning_rate", "has no options"),
    ("sft", "learning_rate: [", "cannot be read as YAML"),
    ("sft", "run_name: 2024-13-45", "recipe.yaml cannot be read as YAML: month must be in 1..12; put text that looks"),
    ("sft", "model: ''", "model is missing: give MODEL on the command line"),
    ("sft", "early_stopping_patience: 2", "needs evaluations: add --eval-share 0.1 or --eval-data FILE, or leave"),
    ("sft", "early_stopping_patience: 2\neval_share: 0.1\neval_steps: 0", "at the end alone; give --eval-steps N"),
    ("sft", "hub_model_id: a/b", "hub_model_id=a/b needs push_to_hub: add --push-to-hub"),
    ("sft", "optim: muon\nlora_r: 4\nquantize: nf4", "optim=muon and (lora_r=4|quantize=nf4): give one of the two"),
    ("sft", "lora_r: 4\nuse_dora: true\nquantize: nf4", "use_dora=True and quantize=nf4: DoRA needs the norms"),
    ("sft", "lora_r: 4\nuse_dora: true\nquantize: fp8", "use_dora=True and quantize=fp8: DoRA needs the norms"),
    ("sft", "lora_r: 4\nuse_dora: true\nfp8: rowwise", "use_dora=True and fp8=rowwise: give one of the two"),
    ("sft", "lora_r: 4\nuse_dora: true\nlora_target_parameters: x", "=x and use_dora=True: give one of the two"),
    ("sft", "lora_r: 4\nlora_dropout: 0.1\nlora_target_parameters: x", "=x and lora_dropout=0.1: give one of the"),
    ("sft", "ep: 2\ncp: 2", "ep=2 and cp=2: give one of the two"),
    ("sft", "ep: 2\ncapture: true", "ep=2 and capture=True: give one of the two"),
    ("distill", "ep: 2", "ep=2: a teacher is sharded by FSDP alone; leave --ep out"),
    ("sft", "optim: muon\ntp: 2", "optim=muon and tp=2: give one of the two"),
    ("sft", "optim: muon\nprecision: bf16", "Muon steps fp32 values; give --precision bf16-masters"),
    ("sft", "optim: adamw_torch", "expected one of adamw, adamw8bit, muon; did you mean adamw?"),
    ("sft", "neftune_noise_alpha: 5\ncapture: true", "neftune_noise_alpha=5 and capture=True: give one of the two"),
    ("medusa", "optim: muon", "optim=muon: heads are no matrices of blocks; leave --optim out"),
    ("dpo", "loss_type: hinge\nlabel_smoothing: 0.1", "not defined for loss_type='hinge'"),
    ("dpo", "max_length: 64\nbatch_tokens: 100", "less than an example, 2 x max_length=64"),
    ("distill", "beta: 1.5", "beta=1.5: expected 1 or less"),
    ("distill", "loss_type: tv\nbeta: 0.5", "beta=0.5: the loss tv does not read it; leave --beta out"),
    ("distill", "hard_weight: 1", "hard_weight=1 leaves .* nothing, for the teacher; give less, or --soft-weight"),
    ("distill", "soft_weight: 0", "soft_weight=0 leaves nothing of the teacher"),
    ("distill", "loss_type: kl", "expected one of jsd, tv, cosine"),
    ("distill", "tp: 2", "tp=2: a teacher is sharded by FSDP alone; leave --tp out"),
    ("distill", "prompts: 4", "prompts=4 needs on_policy: add --on-policy"),
    ("distill", "on_policy: true\naccumulation: 3", "a step that samples has prompts; give --prompts"),
    ("grpo", "reward_funcs: []", "reward_funcs is missing: give --reward-funcs"),
    ("grpo", "reward_weights: [1.0, 2.0]", "there are 2 for 1 rewards"),
    ("grpo", "delta: 1.2", r"delta=1.2 must be more than 1 \+ epsilon_high=1.28"),
    ("grpo", "loss_type: cispo\ndelta: 4", "delta=4: the loss cispo does not read it; leave --delta out, or .* luspo$"),
    ("grpo", "loss_type: sapo\nepsilon: 0.1", "epsilon=0.1: the loss sapo does not read it"),
    ("grpo", "sapo_temperature_neg: 2", "does not read it; leave --sapo-temperature-neg out, or give --loss-type sapo"),
    ("grpo", "loss_type: vespo\nvespo_k_pos: -1", "vespo_k_pos=-1: expected 0 or more"),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "text", "says"), REFUSED)
def test_what_is_refused(tmp_path, monkeypatch, recipe, text, says):
    monkeypatch.setenv("WORLD_SIZE", "2")
    (tmp_path / "recipe.yaml").write_text(text)
    given = {name: value for name, value in (NEEDED | NEEDS.get(recipe, {})).items() if not text.startswith(name)}
    with pytest.raises(InputError, match=says):
        find(recipe).Options.merged(given, tmp_path / "recipe.yaml")


def test_a_home_is_expanded_once_for_all_who_read_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "recipe.yaml").write_text("output_dir: ~/runs/a")
    for options in (
        SFTOptions.merged({"model": "m", "data": "d"}, "~/recipe.yaml"),
        SFTOptions.merged(NEEDED | {"output_dir": "~/runs/a"}),
    ):
        assert options.output_dir == f"{tmp_path}/runs/a" and f'output_dir: "{tmp_path}/runs/a"\n' in options.dump()


def test_dora_over_experts_in_4_bits():
    """Their adapters are beside those of linear layers, whose weights are in 16 bits."""
    assert SFTOptions(**NEEDED, lora_r=4, use_dora=True, quantize="mxfp4").use_dora


def test_a_list_that_is_given_twice_has_the_items_of_both():
    flags = of_flags("--lora-r", "8", "--lora-target-modules", "q_proj,v_proj", "--lora-target-modules", "o_proj")
    assert SFTOptions.merged(flags).lora_target_modules == ("q_proj", "v_proj", "o_proj")


SAID = {
    ("--save_step=3",): "sft has no option --save-step; did you mean --save-steps?",
    ("--stamps", "3"): "sft has no option --stamps; `ligermodels train sft --help` lists all",
    ("--gradient_accumulation_steps", "4"): "; here --accumulation: forward passes of a step, of all GPUs together",
    ("--max_seq_length", "4"): "sft has no option --max-seq-length; here --max-length; beyond",
    ("--hub_token", "--wandb_name=x"): "sft has no option --hub-token; there is none, so that no file has it: `hf auth",
    ("--lr", "3"): "sft has no option --lr; did you mean --learning-rate or ",
    ("--epochs", "3"): "sft has no option --epochs; did you mean --num-train-epochs?",
    ("--merge", "false"): "unexpected argument 'false'; flags take no value: --merge, or --no-merge",
    ("--base_model", "x"): "sft has no option --base-model; here MODEL, the argument without a name; model: in a",
    ("--data", "a.jsonl", "b.jsonl"): "unexpected argument 'b.jsonl'; did you mean --data b.jsonl?",
    ("other",): "unexpected argument 'other'; MODEL is the only positional argument",
    ("--eval-data=a", "--eval_data", "b"): "argument --eval-data: given twice, as a and as b, and takes one value",
}


def test_python_is_told_which_recipe_or_option_is_meant():
    with pytest.raises(InputError, match="there is no recipe 'stf'; there are sft, pretrain, dpo"):
        train("stf")
    with pytest.raises(InputError, match="sft has no option max_step; did you mean --max-steps"):
        train("sft", **NEEDED, max_step=1)


def test_an_unknown_flag_says_which_is_meant(capsys):
    for argv, words in SAID.items():
        with pytest.raises(SystemExit) as stop:
            of_flags(*argv)
        assert stop.value.code == 2 and words in capsys.readouterr().err, words
    with pytest.raises(SystemExit):
        cli.main(["train", "sft", "m", "rows.jsonl"])
    assert "unexpected argument 'rows.jsonl'; did you mean --data rows.jsonl?" in capsys.readouterr().err
    assert cli.main(["train", "sft", "recipe.yaml"]) == 2
    assert "MODEL is recipe.yaml, a file of options; did you mean --config recipe.yaml?" in capsys.readouterr().err


def test_names_of_other_tools():
    """The page has the table, which names no option of ours as an option of others, and no option that is not there."""
    assert (DOCS / "options.md").read_text().endswith(f"\n\n{other_tools.table()}")
    options = {name for recipe in RECIPES for name in fields_of(options_of(recipe))}
    names = [name for names in other_tools.ROWS for name in names.split(", ")]
    assert len(set(names)) == len(names) and not set(names) & options - {"model"}
    for text in other_tools.ROWS.values():
        flags = {flag.replace("-", "_") for flag in re.findall(r"`--(?:no-)?([a-z0-9-]+)", text)}
        assert flags <= options, text


def test_choices_are_those_of_the_losses():
    """Options stand where torch is not imported, and losses where it is."""
    pairs = {name for name in preference.DPO_LOSS_TYPES if not name.startswith("aot")}
    assert set(recipe_options.DPO_TYPES) == pairs and recipe_options.KTO_TYPES == preference.KTO_LOSS_TYPES
    assert recipe_options.POLICY_LOSSES == policy.LOSSES and recipe_options.REWARD_SCALES == policy.SCALES
    assert recipe_options.DIVERGENCES == DIVERGENCES
    assert all(options_of(name) is find(name).Options for name in RECIPES)


def test_the_documentation_says_which_options_a_resumed_run_may_change():
    text = re.search(r"may change (.*?)\.", (DOCS / "training" / "runs.md").read_text().replace("\n", " "))[1]
    found = {name.replace("-", "_") for name in re.findall(r"`--([a-z-]+)`", text)}
    fields = {name: field for recipe in RECIPES for name, field in fields_of(find(recipe).Options).items()}
    free = {name for name, field in fields.items() if not field.metadata["fixed_on_resume"]}
    assert found == free - {"output_dir", "resume", "dry_run"}


def test_all_options(tmp_path):
    """An option that is added or removed changes this list."""
    found = {name: sorted(fields_of(find(name).Options)) for name in RECIPES}
    common = set.intersection(*map(set, found.values()))
    assert " ".join(sorted(common)) == COMMON
    assert {name: " ".join(x for x in names if x not in common) for name, names in found.items()} == OWN


COMMON = (
    "accumulation activations adam_beta1 adam_beta2 batch_tokens chat_template cp data decay deterministic "
    "dp_replicate dry_run early_stopping_patience ep eval_data eval_share eval_steps final_lr fp8 hub_model_id "
    "hub_private_repo learning_rate lora_alpha "
    "lora_dropout lora_modules_to_save lora_r lora_target_modules lora_target_parameters lr_scheduler_type "
    "max_grad_norm max_length max_samples max_steps merge model num_train_epochs optim output_dir precision "
    "push_to_hub quantize report_to resume router_bias_rate run_name save_steps save_total_limit seed show skip_bad "
    "system_prompt text_only tp use_dora use_rslora warmup_steps weight_decay"
)
OWN = {
    "sft": ("assistant_only_loss capture mtp_loss_weight neftune_noise_alpha"),
    "pretrain": ("capture mtp_loss_weight scratch"),
    "dpo": ("beta label_smoothing loss_type sft_weight"),
    "kto": ("beta desirable_weight loss_type undesirable_weight"),
    "orpo": ("beta"),
    "cpo": ("beta label_smoothing loss_type sft_weight"),
    "simpo": ("beta label_smoothing sft_weight simpo_gamma"),
    "distill": (
        "beta hard_weight loss_type max_completion_length on_policy prompts rollout_rows soft_weight teacher "
        "temperature"
    ),
    "medusa": ("head_decay head_layers heads"),
    "grpo": (
        "beta delta epsilon epsilon_high loss_type mask_truncated_completions max_completion_length num_generations "
        "num_iterations prompts reward_funcs reward_weights rollout_rows router_replay sapo_temperature_neg "
        "sapo_temperature_pos scale_rewards temperature vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos"
    ),
}
