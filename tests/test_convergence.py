"""Training on the same text from the same weights: our losses are transformers'. 50 steps, and 200 on a GPU."""

import json
import os
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from ligermodels.arch import ARCHS
from ligermodels.training import AdamW
from tests import tiny
from tests.tiny import losses, ours, text_batches, theirs, torch_adamw

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="minutes in the interpreter")
STEPS, SEEDS = 200, 4
LAST = 20
"""The result of training is the mean loss of this many steps at the end."""
IMAGE_MODELS = {arch for arch, cls in ARCHS.items() if cls.extra_inputs}  # tests/vision/test_use.py trains them
FAMILIES = sorted(ARCHS.keys() - IMAGE_MODELS)
_LONGROPE = tiny.FAMILIES["phi3"]["rope_parameters"]
SWITCHES: dict[str, dict[str, Any]] = {
    "llama": dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    "mistral": dict(sliding_window=None),
    "mixtral": dict(output_router_logits=False, sliding_window=None, num_experts_per_tok=1),
    "gemma": dict(hidden_activation="silu"),
    "gemma2": dict(
        attn_logit_softcapping=None, final_logit_softcapping=None, sliding_window=128, query_pre_attn_scalar=24
    ),
    "qwen2": dict(use_sliding_window=False, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    "qwen3": dict(use_sliding_window=False),
    "qwen3_5_text": dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    "phi3": dict(sliding_window=None, rope_parameters={**_LONGROPE, "long_factor": _LONGROPE["short_factor"]}),
}
"""model_type -> values of its config that switch a feature off, each of which the loss has to show."""
SWITCHES |= {family: suite.SWITCHED_OFF for family, suite in tiny.SUITES.items()}
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


class Recipe(NamedTuple):
    """A way to train: whose model, in which dtype, by which optimizer, and what the backward recomputes.

    optimizer: None is torch's AdamW on fp32 copies of the weights.
    """

    build: Any
    dtype: torch.dtype
    optimizer: Any = None
    recompute: str = "none"


def adamw(**options):
    return lambda parameters: AdamW(parameters, lr=tiny.LEARNING_RATE, weight_decay=0.01, **options)


EXACT = "transformers, fp32"
RECIPES = {EXACT: Recipe(theirs, torch.float32), "transformers, bf16": Recipe(theirs, torch.bfloat16)}
for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
    RECIPES |= {
        f"ligermodels, {name}": Recipe(ours, dtype),
        f"ligermodels, {name}, torch's AdamW": Recipe(ours, dtype, torch_adamw),
        f"ligermodels, {name}, AdamW": Recipe(ours, dtype, adamw()),
        f"ligermodels, {name}, AdamW, step in backward": Recipe(ours, dtype, adamw(step_in_backward=True)),
        f"ligermodels, {name}, AdamW, recompute mlp": Recipe(ours, dtype, adamw(), "mlp"),
        f"ligermodels, {name}, AdamW, recompute block": Recipe(ours, dtype, adamw(), "block"),
    }
for name, options in {
    "nearest": dict(rounding="nearest"), "master weights": dict(master_weights=True),
    "master weights, fp32 states": dict(master_weights=True, state_dtype=torch.float32),
    "master weights, 8 bits": dict(master_weights=True, state_dtype=torch.uint8),
}.items():  # fmt: skip
    RECIPES[f"ligermodels, bf16, AdamW, {name}"] = Recipe(ours, torch.bfloat16, adamw(**options))


def difference(curve, other):
    """The relative difference of two curves at each step."""
    return (curve - other).abs() / other.abs()


def rms(distances):
    """The root mean square over all steps and all seeds."""
    return torch.cat(list(distances)).square().mean().sqrt().item()


@pytest.fixture
def write(tmp_path):
    return lambda family, seed=0: tiny.write_checkpoint(family, tmp_path / f"{family}-{seed}", seed)


_CHAOTIC = {"qwen3_5_text": (1e-4, 0.1), "qwen3_5_moe_text": (0.02, 0.1), "qwen3_next": (0.02, 0.1),
            "gemma4_text": (1e-3, 0.01)}  # fmt: skip
"""How far curves of Qwen3.5's mixers may be apart, within 32 steps and at the end. From weights that differ by 1e-7,
those of transformers differ by 2e-5 after 32 steps and by 0.03 after 200. With experts, one of which then gets another
token, it is 0.006 and 0.02 after 32 and 50. Gemma 4's differ by 4 to 8e-4 within 32, and then by
2e-3 to 1e-2."""


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_losses_are_those_of_transformers(family, write, device):
    folder, batches = write(family), text_batches(STEPS if device == "cuda" else 50, device)
    expected = losses(theirs(folder, torch.float32, device), batches)
    found = losses(ours(folder, torch.float32, device), batches)
    assert expected[0] > 5.5 > 3.5 > expected[-LAST:].mean()  # it learns: ln 256 = 5.5 is the loss of a guess
    distance = difference(found, expected)
    early, late = _CHAOTIC.get(family, (1e-5, 1e-3))
    assert distance[:32].max() < early
    assert distance[-1] < late


@pytest.mark.parametrize(("family", "field"), [(family, field) for family in FAMILIES for field in SWITCHES[family]])
def test_a_feature_switched_off_would_be_seen(family, field, write):
    """Negative control: each of the features is one that the losses depend on, far beyond what they may differ by."""
    folder, batches = write(family), text_batches(4, "cpu")
    expected = losses(theirs(folder, torch.float32, "cpu"), batches)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if "layer_types" not in tiny.FAMILIES[family]:
        config.pop("layer_types", None)  # derived from what is switched
    path.write_text(json.dumps({**config, field: SWITCHES[family][field]}))
    assert difference(losses(ours(folder, torch.float32, "cpu"), batches), expected).max() > 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_biases_and_norms_are_trained_from_values_of_their_own(family, write):
    model = ours(write(family), torch.float32, "cpu")
    for name, parameter in model.named_parameters():
        assert parameter.std() > 0.05, f"{name} starts as a constant: what is wrong with it may not show"


def test_optimizers_and_recomputation_train_alike(write):
    folder, batches, curves = write("llama"), text_batches(4, "cpu"), {}
    for recipe, (build, dtype, optimizer, recompute) in RECIPES.items():
        model = build(folder, dtype, "cpu")
        if recompute != "none":
            model.gradient_checkpointing_enable({"recompute": recompute})
        curves[recipe] = losses(model, batches, optimizer)
    found = {recipe: rms([difference(curve, curves[EXACT])]) for recipe, curve in curves.items()}
    for recipe, distance in found.items():
        # 2^-8 is one rounding of a loss to bf16.
        assert distance < (1e-6 if "fp32" in recipe.split(", ")[1] else 4e-3), recipe
        plain = recipe.split(", step in")[0].split(", recompute")[0]
        assert distance == found[plain], f"{recipe}: not the numbers of the same without"
    assert found[EXACT] == 0 < found["ligermodels, bf16, AdamW"]
    assert found["ligermodels, bf16, AdamW"] != found["ligermodels, bf16, AdamW, nearest"]


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_losses_are_as_near_to_fp32_as_those_of_transformers(family, write):
    near, allowed = [], []
    for seed in range(SEEDS):
        folder, batches = write(family, seed), text_batches(STEPS, "cuda", seed)
        exact = losses(theirs(folder, torch.float32, "cuda"), batches)
        near.append(difference(losses(ours(folder, torch.bfloat16, "cuda"), batches), exact))
        allowed.append(difference(losses(theirs(folder, torch.bfloat16, "cuda"), batches), exact))
    # Each is a draw: the ratio of the two scatters by 5 to 20 % from seed to seed, by half of that over four (on a CPU:
    # 0.88 to 0.97 in four families). A quarter is left to chance; more with experts, where the ratio of single seeds is
    # 0.70 to 1.73 (eight of qwen3_moe on a CPU), because a rounding sends tokens elsewhere.
    chance = 1.6 if any("experts" in name for name in tiny.FAMILIES[family]) else 1.25
    assert rms(near) < chance * rms(allowed), f"{rms(near):.1e} against {rms(allowed):.1e} in transformers"
