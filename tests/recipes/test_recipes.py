"""Every recipe: it trains, evaluates, saves, resumes with the same bits, and is the same on two processes."""

import pytest

from ligermodels.recipes import RECIPES, rollout
from tests.recipes.runs import (
    all_metrics,
    check_same,
    completions,
    fake_sample,
    metrics,
    on_two,
    run,
    weights,
    without_newest,
)

OWN = ("--on-policy", "--prompts", "4", "--accumulation", "4", "--max-completion-length", "9", "--beta", "0.5")
ITERATED = ("--num-iterations", "2", "--beta", "0.1", "--scale-rewards", "batch")
RESUMED = {  # recipe, more options, the metric that the evaluations lower and by how much, a change that is refused
    "sft": ("sft", (), ("eval_loss", 0.95), ("seed", "1")),
    "adapters": ("sft", ("--lora-r", "4", "--lora-dropout", "0.1", "--merge"), ("perplexity", 0.99), ("lora_r", "2")),
    "muon": ("sft", ("--optim", "muon"), ("eval_loss", 0.95), ("optim", "adamw")),
    "neftune": ("sft", ("--neftune-noise-alpha", "5"), ("eval_loss", 0.95), ("neftune_noise_alpha", "6")),
    "pretrain": ("pretrain", (), ("perplexity", 0.9), ("batch_tokens", "128")),
    "dpo": ("dpo", (), ("eval_loss", 1.01), ("beta", "0.2")),
    "kto": ("kto", (), ("eval_loss", 1.1), ("desirable_weight", "2")),
    "orpo": ("orpo", (), ("eval_loss", 0.95), ("beta", "0.2")),
    "cpo": ("cpo", (), ("eval_loss", 0.95), ("loss_type", "hinge")),
    "simpo": ("simpo", (), ("eval_loss", 1.0), ("simpo_gamma", "1")),
    "distill": ("distill", (), ("eval_divergence", 0.85), ("hard_weight", "0.5")),
    "distill on-policy": ("distill", OWN, ("eval_divergence", 1.0), ("beta", "0.2")),
    "medusa": ("medusa", (), ("eval_loss", 0.95), ("heads", "3")),
    "grpo": ("grpo", (), ("entropy", 1.5), ("num_generations", "8")),
    "grpo iterated": ("grpo", (*ITERATED, "--loss-type", "gspo", "--lora-r", "4"), ("entropy", 1.5),
                      ("num_iterations", "1")),
}  # fmt: skip


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_resumes_with_the_same_samples_and_bits(home, teacher, tmp_path, capsys, name):
    recipe, flags, (lowered, factor), (fixed, value) = RESUMED[name]
    flags = (*flags, "--save-steps", "3", "--eval-steps", "3")
    whole = tmp_path / "whole"
    assert run(home, whole, recipe, *flags) == 0
    values = metrics(whole, lowered)
    assert values[max(values)] < factor * values[min(values)]
    again = without_newest(whole, tmp_path / "again")
    capsys.readouterr()
    assert run(home, again, recipe, *flags, "--resume") == 0
    said = capsys.readouterr().err
    assert "resumed after step 3" in said
    assert all_metrics(again) == all_metrics(whole)
    assert weights(again) == weights(whole)
    assert completions(whole) == completions(again)
    assert run(home, again, recipe, *flags, f"--{fixed.replace('_', '-')}", value, "--resume") == 3
    assert f", and this has {fixed}={value}" in capsys.readouterr().err


def test_all_recipes_are_here():
    assert {recipe for recipe, *_ in RESUMED.values()} == RECIPES.keys()


ON_TWO = [
    ("sft", ()), ("dpo", ()), ("distill", ()), ("medusa", ()),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ("sft", ("--tp", "2")), ("sft", ("--cp", "2")),
        ("sft", ("--lora-r", "4", "--merge")),
        ("kto", ()), ("orpo", ()), ("medusa", ("--activations", "block")),
        ("distill", ("--lora-r", "4", "--merge", "--hard-weight", "0.3")),
        ("distill", ("--beta", "0.5")),
        ("distill", ("--cp", "2", "--temperature", "2")), ("distill", OWN),
        ("distill", (*OWN, "--lora-r", "4")), ("grpo", ITERATED), ("grpo", (*ITERATED, "--lora-r", "4")),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "flags"), ON_TWO, ids=str)
def test_two_processes_compute_what_one_does(home, teacher, tmp_path, monkeypatch, recipe, flags):
    """On the same completions, with forwards that are not equally many by themselves."""
    monkeypatch.setattr(rollout, "sample", fake_sample)
    flags = (*flags, "--eval-steps", "2")
    alone = flags[2:] if flags[0] in ("--tp", "--cp") else flags
    assert run(home, tmp_path / "one", recipe, *alone) == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    on_two(tmp_path, lambda: run(home, tmp_path / "two", recipe, *flags))
    check_same(tmp_path / "two", tmp_path / "one")
