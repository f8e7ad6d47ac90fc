"""Losses beside those of Liger Kernel and of TRL: the same numbers and gradients on the CPU."""

import functools
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from ligermodels.layers import LinearJSDLoss, policy
from ligermodels.recipes.recipe_options import GRPOOptions

liger = pytest.importorskip("liger_kernel.chunked_loss")
trl = pytest.importorskip("trl")

# ---- policy losses ----

ROWS, LENGTH, NEW = 5, 7, 9
COUNTS = policy.Counts(torch.tensor(19.0), torch.tensor(5.0), torch.tensor(1.0))


def rollouts(dtype):
    """logp, old_logp, ref_logp, mask and advantages; ratios from e^-2 to e^2, a sequence without tokens, an advantage
    of 0."""
    generator = torch.Generator().manual_seed(0)
    logp = -3 * torch.rand(ROWS, LENGTH, generator=generator, dtype=dtype)
    old = logp + 4 * torch.rand(ROWS, LENGTH, generator=generator, dtype=dtype) - 2
    ref = logp + torch.randn(ROWS, LENGTH, generator=generator, dtype=dtype)
    mask = torch.arange(LENGTH) < torch.tensor([[7], [4], [5], [0], [3]])
    return logp, old, ref, mask, torch.tensor([1.5, -0.7, -2.0, 1.0, 0.0], dtype=dtype)


def options_of(kind, **given):
    return GRPOOptions(
        model="m", data=("d",), output_dir="o", reward_funcs=("r",), loss_type=kind, max_completion_length=NEW, **given
    )


def our_loss(o, logp, old, ref, mask, advantages):
    ratio = policy.ratios(o.loss_type, logp, old, mask)
    each = policy.token_losses(o.loss_type, logp, ratio, advantages, **o.clip, **o.weights)
    if o.beta:
        each = each + o.beta * policy.kl_losses(logp, ref, ratio)
    return policy.reduce_losses(o.loss_type, each, mask, COUNTS, NEW)


def arguments(o):
    """The options as TRL names them; sequence: what our loss says by its name."""
    names = "sapo_temperature_pos sapo_temperature_neg vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg delta"
    level = "sequence" if o.loss_type in policy.OF_SEQUENCES else "token"
    kind = "grpo" if o.loss_type == "gspo" else o.loss_type
    return dict(loss_type=kind, importance_sampling_level=level, **{name: getattr(o, name) for name in names.split()})


def trls_loss(o, logp, old, ref, mask, advantages):
    """GRPOTrainer._compute_loss with the log probabilities in place of a model; and its metrics."""
    args, same = SimpleNamespace(**arguments(o), use_bias_correction_kl=True, steps_per_generation=1), lambda x, **_: x
    metrics: dict = defaultdict(lambda: defaultdict(list))
    of = SimpleNamespace(
        args=args, loss_type=args.loss_type, importance_sampling_level=args.importance_sampling_level,
        epsilon_low=o.clip["low"], epsilon_high=o.clip["high"], beta=o.beta, max_completion_length=NEW,
        _metrics=metrics, top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False,
        aux_loss_enabled=False, _entropy_bonus_enabled=False, current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, gather=same, reduce=same),
        get_gamma_weights=trl.GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None),
    )  # fmt: skip
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    inputs = dict(
        prompt_ids=ids, prompt_mask=ids, completion_ids=ids, completion_mask=mask.long(), advantages=advantages,
        old_per_token_logps=old, ref_per_token_logps=ref, num_items_in_batch=mask.sum(),
    )  # fmt: skip
    return trl.GRPOTrainer._compute_loss(of, None, inputs), metrics["train"]


CASES = {kind: {} for kind in policy.LOSSES} | {
    "sapo, other temperatures": dict(sapo_temperature_pos=2.0, sapo_temperature_neg=0.5),
    "vespo, other shapes": dict(vespo_k_pos=0.5, vespo_lambda_pos=0.0, vespo_k_neg=1.5, vespo_lambda_neg=4.0),
    **{f"{kind}, two-sided": dict(delta=3.0) for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "gspo", "luspo")},
}
each_loss = pytest.mark.parametrize("name", CASES)


@each_loss
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_policy_losses_are_trls(name, beta):
    o = options_of(name.split(",")[0], beta=beta, **CASES[name])
    logp, *others = rollouts(torch.float64)
    logp.requires_grad_()
    found, (expected, metrics) = our_loss(o, logp, *others), trls_loss(o, logp, *others)
    gradients = [torch.autograd.grad(x, logp)[0] for x in (found, expected)]
    rounded = 2e-7 if o.loss_type == "sapo" else 1e-10  # TRL has its temperatures and least lambda in fp32
    torch.testing.assert_close(found, expected, rtol=rounded, atol=0)
    torch.testing.assert_close(*gradients, rtol=5 * rounded, atol=1e-13)
    old, _, mask, advantages = others
    ratio = policy.ratios(o.loss_type, logp, old, mask)
    if o.loss_type == "vespo":
        weights = policy.gamma_weights(ratio, advantages, o.weights["gammas"])
        assert weights.mean().item() == pytest.approx(metrics["vespo/phi_seq_mean"][0], rel=1e-6)
    elif o.loss_type not in policy.SOFT and o.delta is None:
        clipped = policy.is_clipped(o.loss_type, ratio, advantages, **o.clip)
        share = clipped.double().mean() if ratio.shape[1] == 1 else clipped[mask].double().mean()
        theirs = metrics["cispo_clip_ratio" if o.loss_type == "cispo" else "clip_ratio/region_mean"][0]
        assert 0 < share == pytest.approx(theirs, rel=1e-6)


def test_is_clipped_where_the_clip_stops_the_gradient():
    logp, old, _, mask, advantages = rollouts(torch.float64)
    for kind, delta in (("dapo", None), ("dapo", 3.0), ("dapo", 1.1), ("luspo", 1.01)):
        ratio = policy.ratios(kind, logp, old, mask).requires_grad_()
        bounds = dict(low=0.2, high=0.2, delta=delta)
        losses = policy.token_losses(kind, logp, ratio, advantages, **bounds)
        (slope,) = torch.autograd.grad(losses.sum(), ratio)
        moves = advantages[:, None].expand_as(ratio) != 0
        stopped = policy.is_clipped(kind, ratio, advantages, **bounds)
        assert torch.equal(stopped[moves], slope[moves] == 0) and stopped.any()


OF_HEADS = [(name, beta) for name in CASES for beta in (0.0, 0.3) if not (name.startswith("luspo") and beta)]
"""Without the KL of luspo, whose weight in Liger is another: it is averaged over the padding too."""


@pytest.mark.parametrize(("name", "beta"), OF_HEADS)
def test_policy_losses_of_a_head_are_ligers(name, beta):
    """From hidden states: the gradients of x and of the head's weight."""
    kind, (_, shift, ref, mask, advantages) = name.split(",")[0], rollouts(torch.float32)
    o = options_of(kind, beta=beta, temperature=0.8, **CASES[name])
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(1))
    x, weight = draw(ROWS, LENGTH, 8).requires_grad_(), draw(11, 8).requires_grad_()
    ids = torch.randint(11, (ROWS, LENGTH), generator=torch.Generator().manual_seed(2))
    logp, _ = policy.head_logprobs(
        x, weight, ids, temperature=0.8, bias=None, softcap=None, workspace_bytes=None, num_valid=None
    )
    old, ref = logp.detach() + shift.remainder(4) - 2, logp.detach() + ref.remainder(1)
    found = our_loss(o, logp, old, ref, mask, advantages)
    given = arguments(o) | dict(epsilon_low=o.clip["low"], epsilon_high=o.clip["high"], max_completion_length=NEW)
    theirs = liger.LigerFusedLinearGRPOLoss(
        beta=beta, compiled=False, temperature=0.8, use_bias_correction_kl=True, use_ref_model=True, **given
    )  # fmt: skip
    expected, _ = theirs(
        x, weight, ids, mask.float(), advantages, ref_per_token_logps=ref, old_per_token_logps=old,
    )  # fmt: skip
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-6)
    for one, other in zip(*(torch.autograd.grad(loss, (x, weight)) for loss in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-6)


# ---- distillation ----

WEIGHTS = [dict(weight_soft_loss=1.0, weight_hard_loss=0.0), dict(weight_soft_loss=0.7, weight_hard_loss=0.4)]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize(("divergence", "options"), [
    ("jsd", dict(beta=0.0, temperature=2.0)), ("jsd", dict(beta=0.3)), ("jsd", dict(beta=1.0)),
    ("cosine", dict(beta=1.0)), ("cosine", dict(beta=0.5, temperature=2.0)),
], ids=str)  # fmt: skip
def test_distillation_of_heads_is_ligers(divergence, options, weights):
    """Over several of Liger's chunks, with biases and ignored tokens. Its beta of the cosine is a factor, which here
    belongs to weight_soft."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    x, weight, bias = (draw(*shape).requires_grad_() for shape in ((21, 8), (13, 8), (13,)))
    teacher_x, teacher_weight, teacher_bias = draw(21, 6), draw(13, 6), draw(13)
    labels = torch.randint(13, (21,), generator=torch.Generator().manual_seed(1))
    labels[::4] = -100
    name = {"jsd": "JSD", "cosine": "CosineSimilarity"}[divergence]
    theirs = getattr(liger, f"LigerFusedLinear{name}Loss")(compiled=False, chunk_size=8, **options, **weights)
    expected = theirs(x, weight, teacher_x, teacher_weight, labels, bias, teacher_bias)
    beta, soft = options["beta"], weights["weight_soft_loss"]
    ours = LinearJSDLoss(
        beta, divergence=divergence, temperature=options.get("temperature", 1.0),
        weight_soft=soft * beta if divergence == "cosine" else soft, weight_hard=weights["weight_hard_loss"],
    )  # fmt: skip
    found = ours(x, weight, teacher_x, teacher_weight, labels, student_bias=bias, teacher_bias=teacher_bias)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-6)
    for one, other in zip(*(torch.autograd.grad(loss, (x, weight, bias)) for loss in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-6)
