"""Preference losses against their formulas in fp64, and advantages; policy losses are in tests/recipes/test_grpo.py."""

import math

import pytest
import torch

from ligermodels.errors import InputError
from ligermodels.layers import policy, preference
from ligermodels.layers.preference import cpo_loss, dpo_loss, kto_kl, kto_loss, log_odds, orpo_loss, sum_per_sequence
from tests.kernels.on_gpu import assert_captures, assert_compiles, assert_never_waits

BETA, TAU = 0.3, 0.05
s = torch.sigmoid


def log_sigmoid(x):
    return s(x).log()  # in fp64 good for x from -700 on


# loss type -> its formula of log ratios a, b, their scaled difference d and smoothing e
DPO = {
    "sigmoid": lambda a, b, d, e: -(1 - e) * log_sigmoid(d) - e * log_sigmoid(-d),
    "sigmoid_norm": lambda a, b, d, e: -log_sigmoid(BETA * (a - b)),
    "hinge": lambda a, b, d, e: (1 - d) * (d < 1),
    "ipo": lambda a, b, d, e: (a - b - 1 / (2 * BETA)) ** 2,
    "exo_pair": lambda a, b, d, e: s(d) * (log_sigmoid(d) - math.log(1 - e)) + s(-d) * (log_sigmoid(-d) - math.log(e)),
    "nca_pair": lambda a, b, d, e: -log_sigmoid(BETA * a) - 0.5 * log_sigmoid(-BETA * a) - 0.5 * log_sigmoid(-BETA * b),
    "robust": lambda a, b, d, e: -((1 - e) * log_sigmoid(d) - e * log_sigmoid(-d)) / (1 - 2 * e),
    "bco_pair": lambda a, b, d, e: -log_sigmoid(BETA * a) - log_sigmoid(-BETA * b),
    "sppo_hard": lambda a, b, d, e: (a - 1 / (2 * BETA)) ** 2 + (b + 1 / (2 * BETA)) ** 2,
    "apo_zero": lambda a, b, d, e: 1 - s(BETA * a) + s(BETA * b),
    "apo_down": lambda a, b, d, e: s(BETA * a) + 1 - s(d),
    "discopop": lambda a, b, d, e: -log_sigmoid(d) * (1 - s(d / TAU)) + (-d).exp() * s(d / TAU),
}
SMOOTHED = ("sigmoid", "exo_pair", "robust", "aot", "aot_unpaired")
CASES = [
    (t, e) for t in preference.DPO_LOSS_TYPES for e in (0.0, 0.1) if (t in SMOOTHED or not e) and (t != "exo_pair" or e)
]


def dpo_formula(loss_type, c, r, ref_c, ref_r, e):
    if loss_type in ("aot", "aot_unpaired"):
        one, other = (c - r, ref_c - ref_r) if loss_type == "aot" else (c - ref_c, r - ref_r)
        d = BETA * (one[one.argsort()] - other[other.argsort()])
        return -(1 - e) * log_sigmoid(d) - e * log_sigmoid(-d)
    a, b = c - ref_c, r - ref_r
    return DPO[loss_type](a, b, BETA * (a - b), e)


CPO = {
    "sigmoid": lambda u, e: -(1 - e) * log_sigmoid(BETA * u) - e * log_sigmoid(-BETA * u),
    "hinge": lambda u, e: (1 - BETA * u) * (BETA * u < 1),
    "ipo": lambda u, e: (u - 1 / (2 * BETA)) ** 2,
    "simpo": lambda u, e: -(1 - e) * log_sigmoid(BETA * u - 0.4) - e * log_sigmoid(0.4 - BETA * u),
}
DESIRABLE = torch.tensor([True, False, True, True, False, False])


def kto_formula(logps, ref, kl, weights=(1.0, 1.0)):
    """One sequence after the other, as the paper's equation has it: weight minus value."""
    losses = []
    for a, desirable in zip(logps - ref, DESIRABLE, strict=True):
        weight = weights[0] if desirable else weights[1]
        losses.append(weight - weight * s(BETA * ((a - kl) if desirable else (kl - a))))
    return torch.stack(losses)


def odds(logps):
    return logps.exp() / (1 - logps.exp())


def loss_cases():
    """(id, loss, formula), each of chosen, rejected and their reference log probabilities [6]."""
    for t, e in CASES:
        yield (
            f"dpo {t} {e}",
            lambda *logps, t=t, e=e: dpo_loss(*logps, beta=BETA, loss_type=t, label_smoothing=e),
            lambda *logps, t=t, e=e: dpo_formula(t, *logps, e),
        )
    for t, e in [(t, e) for t in CPO for e in (0.0, 0.2) if t in ("sigmoid", "simpo") or not e]:
        yield (
            f"cpo {t} {e}",
            lambda c, r, *_, t=t, e=e: cpo_loss(c, r, beta=BETA, loss_type=t, label_smoothing=e, gamma=0.4),
            lambda c, r, *_, t=t, e=e: CPO[t](c - r, e),
        )
    yield (
        "orpo",
        lambda c, r, *_: orpo_loss(c, r, beta=BETA),
        lambda c, r, *_: -BETA * log_sigmoid((odds(c) / odds(r)).log()),
    )
    yield (
        "kto",
        lambda c, r, ref, kl: kto_loss(
            c, DESIRABLE.to(c.device), ref, kl=kto_kl(r, kl), beta=BETA, desirable_weight=1.3, undesirable_weight=0.6
        ),
        lambda c, r, ref, kl: kto_formula(c, ref, (r - kl).mean().clamp(min=0).detach(), (1.3, 0.6)),
    )
    yield (
        "apo_zero_unpaired",
        lambda c, r, ref, kl: kto_loss(c, DESIRABLE, ref, kl=kl, beta=BETA, loss_type="apo_zero_unpaired"),
        lambda c, r, ref, kl: kto_formula(c, ref, 0),
    )


LOSSES = {name: pair for name, *pair in loss_cases()}


def logps_of(dtype=torch.float64, device="cpu"):
    """chosen, rejected, and the same under the reference: of six sequences each."""
    logps = -4 * torch.rand(4, 6, dtype=torch.float64) - 0.1
    return [one.to(device, dtype) for one in logps]


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_formula(name):
    """Values and gradients. The rounding of fp64, some 1e-16, grows to 1e-13 in the sums and exponentials."""
    loss, formula = LOSSES[name]
    chosen, rejected, *ref = logps_of()
    leaves = [chosen.requires_grad_(), rejected.requires_grad_()]
    upstream = torch.rand(6, dtype=torch.float64)
    found, expected = (
        [value, *torch.autograd.grad(value, leaves, upstream, allow_unused=True)]
        for value in (op(*leaves, *ref) for op in (loss, formula))
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_without_a_reference_its_log_probabilities_are_zero():
    chosen, rejected, *_ = logps_of()
    zero = torch.zeros_like(chosen)
    assert torch.equal(dpo_loss(chosen, rejected), dpo_loss(chosen, rejected, zero, zero))
    assert torch.equal(kto_loss(chosen, DESIRABLE), kto_loss(chosen, DESIRABLE, zero, kl=zero[0]))
    assert kto_kl(chosen, chosen + 1) == 0  # never negative
    assert dpo_loss(chosen.bfloat16(), rejected.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("loss_type, e", CASES)
def test_extreme_values_in_fp32(loss_type, e):
    """Log ratios of up to 1000 either way: the naive formula in fp64 still holds there, naive fp32 would not.

    beta 0.3 makes of 1000 - (-1000) a d of 600, whose exponential fp32 cannot hold and fp64 can.
    """
    grid = torch.tensor([-1000.0, -500.0, 0.0, 500.0, 1000.0])
    c, r = (t.flatten().clone().requires_grad_() for t in torch.meshgrid(grid, grid, indexing="ij"))
    loss = dpo_loss(c, r, beta=BETA, loss_type=loss_type, label_smoothing=e)
    doubles = [t.detach().double().requires_grad_() for t in (c, r)]
    zero = torch.zeros_like(doubles[0])
    exact = dpo_formula(loss_type, *doubles, zero, zero, e)
    actual = [loss, *torch.autograd.grad(loss.sum(), (c, r))]
    expected = [exact, *torch.autograd.grad(exact.sum(), doubles)]
    if loss_type.startswith("aot"):  # which of two equal values is sorted first is open, so is whose the gradient is
        actual, expected = actual[:1], expected[:1]
    for found, wanted in zip(actual, expected, strict=True):
        assert found.isfinite().all()
        # d of up to 600, rounded to fp32, is off by 600 * 2^-24 = 4e-5, and so, relatively, is its exponential. Where
        # two terms of up to 1 cancel, their roundings remain.
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-7)


def test_log_odds_near_and_at_one():
    """Against expm1 of fp64, from p = 1 - 2^-23 to p = e^-80, and finite at p = 1."""
    x = (-torch.logspace(-6.9, 1.9, 400)).requires_grad_()
    found, exact_x = log_odds(x), x.detach().double()
    exact = exact_x - torch.log(-torch.expm1(exact_x))
    # log(1 - p) may cancel x to nothing around p = 1/2: relative to the larger of the two terms.
    error = (found.double() - exact).abs() / torch.maximum(exact.abs(), exact_x.abs()).clamp(min=0.5)
    assert error.max() < 3e-7  # a few roundings of 2^-24
    (slope,) = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(slope.double(), -1 / torch.expm1(exact_x), rtol=2e-6, atol=0)
    for pair in ([0.0, -1.0], [0.0, 0.0], [-1e4, 0.0]):
        c, r = (torch.tensor([value], requires_grad=True) for value in pair)
        loss = orpo_loss(c, r)
        assert loss.isfinite() and all(g.isfinite() for g in torch.autograd.grad(loss.sum(), (c, r)))


def test_sums_per_sequence():
    """Packed sequences of any length, one of them empty, and values after the last that belong to none."""
    values, lengths = torch.randn(4, 7, dtype=torch.float64), [7, 0, 4, 1]
    rows = [row[:length] for row, length in zip(values, lengths, strict=True)]
    packed = torch.cat([*rows, torch.full((3,), torch.nan)])[None].requires_grad_()
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    sums = sum_per_sequence(packed, bounds)
    torch.testing.assert_close(sums, torch.stack([row.sum() for row in rows]))
    (slope,) = torch.autograd.grad(sums @ torch.tensor([1.0, 2, 3, 4]).double(), packed)
    assert slope[0].tolist() == [1.0] * 7 + [3.0] * 4 + [4.0] + [0.0] * 3
    assert sum_per_sequence(packed[0] == packed[0], bounds).tolist() == lengths  # of bool: numbers
    assert torch.equal(sum_per_sequence(values), values.sum(1))


@pytest.mark.parametrize("kind", policy.LOSSES)
def test_a_completion_without_tokens_has_no_policy_gradient(kind):
    logp = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    mask, ones = torch.tensor([[True, True, False], [False] * 3]), torch.ones((), dtype=torch.float64)
    ratio = policy.ratios(kind, logp, logp.detach(), mask)
    losses = policy.token_losses(kind, logp, ratio, torch.tensor([1.0, -1.0]).double(), low=0.2, high=5.0)
    loss = policy.reduce_losses(kind, losses.expand(2, 3), mask, policy.Counts(2 * ones, 2 * ones, ones), 3)
    (slope,) = torch.autograd.grad(loss, logp)
    assert ratio.isfinite().all() and loss.isfinite() and slope[0, :2].all() and not slope[0, 2] and not slope[1].any()


def test_advantages():
    rewards = torch.tensor([[1.0, 3.0], [2.0, 2.0], [0.0, 4.0]])
    half = torch.tensor([[-1.0, 1.0], [0.0, 0.0], [-2.0, 2.0]])
    torch.testing.assert_close(policy.group_advantages(rewards, "none"), half)
    torch.testing.assert_close(policy.group_advantages(rewards, "batch"), half / (rewards.std() + 1e-4))
    own = torch.tensor([[2**0.5], [0.0], [8**0.5]])
    torch.testing.assert_close(policy.group_advantages(rewards), half / (own + 1e-4))
    with pytest.raises(InputError, match="supported: group, batch, none"):
        policy.group_advantages(rewards, "all")
    with pytest.raises(InputError, match="supported: grpo, bnpo"):
        policy.ratios("ppo", rewards, rewards, rewards > 0)


ONES = torch.ones(6)
REFUSED = {
    "dpo type": (lambda: dpo_loss(ONES, ONES, loss_type="dpo"), "loss_type='dpo'.*sigmoid, "),
    "beta": (lambda: orpo_loss(ONES, ONES, beta=0.0), "beta=0.0 must be greater"),
    "exo": (lambda: dpo_loss(ONES, ONES, loss_type="exo_pair"), "label_smoothing=0.0 must be greater"),
    "dpo smoothing": (lambda: dpo_loss(ONES, ONES, loss_type="ipo", label_smoothing=0.1), "not defined for .*robust"),
    "cpo smoothing": (lambda: cpo_loss(ONES, ONES, loss_type="hinge", label_smoothing=0.1), "one of sigmoid, simpo$"),
    "kto type": (lambda: kto_loss(ONES, DESIRABLE, loss_type="bco"), "supported: kto, apo_zero_unpaired"),
    "numbers": (lambda: kto_loss(ONES, DESIRABLE.float()), "desirable is torch.float32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    attempt, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        attempt()


@pytest.mark.gpu
def test_on_a_gpu():
    """Nothing synchronises, a CUDA graph replays on other values, and a loss compiles whole."""
    chosen, rejected, *ref = logps_of(torch.float32, "cuda")
    leaves, upstream = [chosen.requires_grad_(), rejected.requires_grad_()], torch.ones(6, device="cuda")
    for t, e in CASES:
        op = lambda c, r, t=t, e=e: dpo_loss(c, r, *ref, loss_type=t, label_smoothing=e)  # noqa: E731
        assert_never_waits(op, leaves, [upstream])
        assert_captures(op, leaves, [upstream.clone()])
    assert_compiles(lambda c, r: dpo_loss(c, r, *ref), leaves, [upstream])
    assert_never_waits(lambda c, r: orpo_loss(c, r) + cpo_loss(c, r), leaves, [upstream])
    kto = lambda c, r: kto_loss(c, (r > -2).detach(), ref[0], kl=kto_kl(c, ref[1])) + 0 * r  # noqa: E731
    assert_never_waits(kto, leaves, [upstream])
    bounds = torch.tensor([0, 2, 6], device="cuda")
    assert_never_waits(lambda c, r: sum_per_sequence(c * r, bounds), leaves, [upstream[:2]])
