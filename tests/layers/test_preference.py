"""Preference losses against their formulas in fp64, from log_softmax of whole logits."""

import math

import pytest
import torch
import torch.nn.functional as F

from ligermodels.errors import InputError
from ligermodels.layers.preference import (
    LinearCPOLoss,
    LinearDPOLoss,
    LinearKTOLoss,
    LinearORPOLoss,
    LinearSimPOLoss,
    dpo_loss,
    kto_loss,
    log_odds,
    orpo_loss,
    sequence_logps,
)
from tests.kernels.on_gpu import assert_captures, assert_compiles, assert_never_waits

IGNORED, BETA, TAU = -100, 0.3, 0.05
PAIRS, TOKENS, WIDTH, VOCAB = 3, 7, 16, 29


s = torch.sigmoid


def log_sigmoid(x):
    return s(x).log()  # in fp64 good for x from -700 on


# loss type -> its formula of log ratios a, b, their scaled difference d, smoothing e, and inverse lengths m, n
DPO = {
    "sigmoid": lambda a, b, d, e, m, n: -(1 - e) * log_sigmoid(d) - e * log_sigmoid(-d),
    "sigmoid_norm": lambda a, b, d, e, m, n: -log_sigmoid(BETA * (a * m - b * n)),
    "hinge": lambda a, b, d, e, m, n: (1 - d) * (d < 1),
    "ipo": lambda a, b, d, e, m, n: (a * m - b * n - 1 / (2 * BETA)) ** 2,
    "exo_pair": lambda a, b, d, e, m, n: (
        s(d) * (log_sigmoid(d) - math.log(1 - e)) + s(-d) * (log_sigmoid(-d) - math.log(e))
    ),
    "nca_pair": lambda a, b, d, e, m, n: (
        -log_sigmoid(BETA * a) - 0.5 * log_sigmoid(-BETA * a) - 0.5 * log_sigmoid(-BETA * b)
    ),
    "robust": lambda a, b, d, e, m, n: -((1 - e) * log_sigmoid(d) - e * log_sigmoid(-d)) / (1 - 2 * e),
    "bco_pair": lambda a, b, d, e, m, n: -log_sigmoid(BETA * a) - log_sigmoid(-BETA * b),
    "sppo_hard": lambda a, b, d, e, m, n: (a - 1 / (2 * BETA)) ** 2 + (b + 1 / (2 * BETA)) ** 2,
    "apo_zero": lambda a, b, d, e, m, n: 1 - s(BETA * a) + s(BETA * b),
    "apo_down": lambda a, b, d, e, m, n: s(BETA * a) + 1 - s(d),
    "discopop": lambda a, b, d, e, m, n: -log_sigmoid(d) * (1 - s(d / TAU)) + (-d).exp() * s(d / TAU),
}
SMOOTHED = ("sigmoid", "exo_pair", "robust", "aot", "aot_unpaired")
EVERY = [*DPO, "aot", "aot_unpaired"]
CASES = [(t, e) for t in EVERY for e in (0.0, 0.1) if (t in SMOOTHED or not e) and (t != "exo_pair" or e)]


def dpo_formula(loss_type, c, r, ref_c, ref_r, e, m=1.0, n=1.0):
    if loss_type in ("aot", "aot_unpaired"):
        one, other = (c - r, ref_c - ref_r) if loss_type == "aot" else (c - ref_c, r - ref_r)
        d = BETA * (one[one.argsort()] - other[other.argsort()])
        return -(1 - e) * log_sigmoid(d) - e * log_sigmoid(-d)
    a, b = c - ref_c, r - ref_r
    return DPO[loss_type](a, b, BETA * (a - b), e, m, n)


class Batch:
    """Hidden states, heads and labels whose prompts and ends differ in length; fp64 unless asked otherwise."""

    def __init__(self, device="cpu", dtype=torch.float64, width=WIDTH):
        def make(*size, scale=1.0):
            return (scale * torch.randn(*size, dtype=torch.float64)).to(device, dtype)

        self.x = make(2 * PAIRS, TOKENS, width).requires_grad_()
        self.weight = make(VOCAB, width, scale=0.4).requires_grad_()
        self.bias = make(VOCAB).requires_grad_()
        self.ref_x = make(2 * PAIRS, TOKENS, 2 * width)
        self.ref_weight, self.ref_bias = make(VOCAB, 2 * width, scale=0.3), make(VOCAB)
        labels = torch.randint(VOCAB, (2 * PAIRS, TOKENS))
        for row in range(2 * PAIRS):
            labels[row, : row % 4] = IGNORED
            labels[row, TOKENS - row % 3 :] = IGNORED
        self.labels = labels.to(device)
        self.trained = [self.x, self.weight, self.bias]

    def tokens(self, ref=False):
        """Log probabilities [2B, S] of the labels, and which of them count."""
        inputs = (self.ref_x, self.ref_weight, self.ref_bias) if ref else self.trained
        log_p = F.linear(*(t.double() for t in inputs)).log_softmax(-1)
        keep = self.labels != IGNORED
        return log_p.gather(-1, self.labels.where(keep, 0)[..., None])[..., 0] * keep, keep

    def sums(self, ref=False):
        logps, keep = self.tokens(ref)
        return logps.sum(1), keep.sum(1)

    def references(self, kind):
        """(arguments of forward, the sums they must give)."""
        sums = self.sums(ref=True)[0]
        if kind == "states":
            return {"ref_x": self.ref_x, "ref_weight": self.ref_weight, "ref_bias": self.ref_bias}, sums
        return ({"ref_logps": sums}, sums) if kind == "logps" else ({}, torch.zeros_like(sums))


def assert_loss(loss, expected, trained, tolerance=1e-10):
    """Same value and gradients. fp64 loses some 1e-13 of its 1e-16 in the sums and exponentials of these sizes."""
    actual = [loss, *torch.autograd.grad(loss, trained)]
    expected = [expected, *torch.autograd.grad(expected, trained)]
    for found, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(found, wanted.to(found.dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("average", [False, True], ids=["sums", "averages"])
@pytest.mark.parametrize("kind", ["states", "logps", "none"])
@pytest.mark.parametrize("loss_type, e", CASES)
def test_dpo_is_its_formula(device, loss_type, e, kind, average):
    batch = Batch(device)
    arguments, ref = batch.references(kind)
    logps, lengths = batch.sums()
    if average:
        logps, ref = logps / lengths, ref / lengths
    m, n = (torch.ones_like(logps) if average else 1 / lengths.double()).chunk(2)
    expected = dpo_formula(loss_type, *logps.chunk(2), *ref.chunk(2), e, m, n).mean()
    module = LinearDPOLoss(beta=BETA, loss_type=loss_type, label_smoothing=e, average_log_prob=average)
    output = module(batch.x, batch.weight, batch.labels, bias=batch.bias, **arguments)
    assert_loss(output.loss, expected, batch.trained)


def test_metrics_of_dpo(device):
    batch = Batch(device)
    arguments, ref = batch.references("states")
    output = LinearDPOLoss(beta=BETA)(batch.x, batch.weight, batch.labels, bias=batch.bias, **arguments)
    logps, _ = batch.sums()
    keep = batch.labels != IGNORED
    logits = F.linear(*batch.trained).mean(-1)
    chosen, rejected = (BETA * (logps - ref)).chunk(2)
    halves = slice(None, PAIRS), slice(PAIRS, None)
    expected = {
        "chosen_logps": logps[:PAIRS], "rejected_logps": logps[PAIRS:],
        "chosen_logits_mean": logits[halves[0]][keep[halves[0]]].mean(),
        "rejected_logits_mean": logits[halves[1]][keep[halves[1]]].mean(),
        "nll_loss": -batch.tokens()[0][:PAIRS][keep[:PAIRS]].mean(),
        "chosen_rewards": chosen, "rejected_rewards": rejected,
        "reward_accuracy": (chosen > rejected).double().mean(), "reward_margin": (chosen - rejected).mean(),
    }  # fmt: skip
    for name, value in expected.items():
        found = getattr(output, name)
        assert not found.requires_grad, name
        assert found.device == batch.x.device
        torch.testing.assert_close(found, value, msg=lambda text, name=name: f"{name}: {text}")
    assert output.log_odds_ratio is None and output.log_odds_chosen is None


@pytest.mark.parametrize("make", [LinearDPOLoss, LinearCPOLoss, LinearORPOLoss, LinearSimPOLoss])
def test_the_nll_of_the_chosen_tokens(make):
    batch = Batch()
    call = batch.x, batch.weight, batch.labels
    without = make(compute_nll_loss=False)(*call, bias=batch.bias)
    output = make(compute_nll_loss=True, alpha=0.7)(*call, bias=batch.bias)
    logps, keep = batch.tokens()
    nll = -logps[:PAIRS][keep[:PAIRS]].mean()
    torch.testing.assert_close(output.nll_loss, nll.detach())
    torch.testing.assert_close(without.nll_loss, nll.detach())
    assert_loss(output.loss - without.loss, 0.7 * nll, batch.trained)


def test_nll_labels_count_the_prompt_too(device):
    """TRL's ORPO: the NLL over prompt and answer, the odds over the answer, from one pass."""
    batch = Batch(device)
    prompts = torch.randint(VOCAB, batch.labels.shape, device=device)
    nll_labels = batch.labels.where(batch.labels != IGNORED, prompts)
    nll_labels[PAIRS:] = IGNORED
    output = LinearORPOLoss()(batch.x, batch.weight, batch.labels, bias=batch.bias, nll_labels=nll_labels)
    nll = F.cross_entropy(F.linear(*batch.trained)[:PAIRS].flatten(0, 1), nll_labels[:PAIRS].flatten())
    alone = LinearORPOLoss(compute_nll_loss=False)(batch.x, batch.weight, batch.labels, bias=batch.bias)
    assert_loss(output.loss - alone.loss, nll, batch.trained)
    for name in ("chosen_logps", "rejected_logps", "chosen_logits_mean", "rejected_logits_mean", "log_odds_chosen"):
        torch.testing.assert_close(getattr(output, name), getattr(alone, name))


def averages(batch):
    logps, lengths = batch.sums()
    return (logps / lengths).chunk(2)


def test_orpo_is_its_formula(device):
    batch = Batch(device)
    output = LinearORPOLoss(beta=BETA, compute_nll_loss=False)(batch.x, batch.weight, batch.labels, bias=batch.bias)
    odds = [logp.exp() / (1 - logp.exp()) for logp in averages(batch)]
    ratio = (odds[0] / odds[1]).log()
    assert_loss(output.loss, -BETA * log_sigmoid(ratio).mean(), batch.trained)
    torch.testing.assert_close(output.log_odds_ratio, log_sigmoid(ratio).mean().detach())
    torch.testing.assert_close(output.log_odds_chosen, ratio.mean().detach())
    torch.testing.assert_close(output.chosen_rewards, BETA * averages(batch)[0].detach())
    assert not output.log_odds_ratio.requires_grad and not output.log_odds_chosen.requires_grad


CPO = {
    "sigmoid": lambda u, e: -(1 - e) * log_sigmoid(BETA * u) - e * log_sigmoid(-BETA * u),
    "hinge": lambda u, e: (1 - BETA * u) * (BETA * u < 1),
    "ipo": lambda u, e: (u - 1 / (2 * BETA)) ** 2,
    "simpo": lambda u, e: -(1 - e) * log_sigmoid(BETA * u - 0.4) - e * log_sigmoid(0.4 - BETA * u),
}


@pytest.mark.parametrize("average", [False, True], ids=["sums", "averages"])
@pytest.mark.parametrize(
    "loss_type, e", [("sigmoid", 0), ("sigmoid", 0.2), ("hinge", 0), ("ipo", 0), ("simpo", 0), ("simpo", 0.2)]
)
def test_cpo_is_its_formula(device, loss_type, e, average):
    batch = Batch(device)
    module = LinearCPOLoss(beta=BETA, loss_type=loss_type, label_smoothing=e, gamma=0.4, average_log_prob=average)
    output = module(batch.x, batch.weight, batch.labels, bias=batch.bias)
    means = average or loss_type in ("ipo", "simpo")
    chosen, rejected = averages(batch) if means else batch.sums()[0].chunk(2)
    logps, keep = batch.tokens()
    nll = -logps[:PAIRS][keep[:PAIRS]].mean()
    assert_loss(output.loss, CPO[loss_type](chosen - rejected, e).mean() + nll, batch.trained)
    torch.testing.assert_close(output.rejected_logps, rejected.detach())
    torch.testing.assert_close(output.rejected_rewards, BETA * rejected.detach())
    if loss_type == "simpo":  # the module of this name has no NLL by default
        simpo = LinearSimPOLoss(beta=BETA, gamma=0.4, label_smoothing=e)
        loss = simpo(batch.x, batch.weight, batch.labels, bias=batch.bias).loss
        torch.testing.assert_close(loss.detach(), CPO[loss_type](chosen - rejected, e).mean().detach())


DESIRABLE = [True, False, True, True, False, False]


def kto_formula(logps, ref, kl, desirable, weights=(1.0, 1.0)):
    """One sequence after the other, as the paper's equation has it: weight minus value."""
    losses = []
    for a, wanted in zip(logps - ref, desirable, strict=True):
        weight = weights[0] if wanted else weights[1]
        losses.append(weight - weight * s(BETA * ((a - kl) if wanted else (kl - a))))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("average", [False, True], ids=["sums", "averages"])
@pytest.mark.parametrize("kind", ["states", "logps", "none"])
@pytest.mark.parametrize("point", ["none", "number", "completions", "completions, reference precomputed"])
def test_kto_is_its_formula(device, kind, point, average):
    batch, other = Batch(device), Batch(device)
    arguments, ref = batch.references(kind)
    desirable = torch.tensor(DESIRABLE, device=device)
    logps, lengths = batch.sums()
    kl = torch.zeros((), dtype=torch.float64, device=device)
    if point == "number":
        kl = arguments["kl"] = kl + 0.4
    elif point != "none":
        # Completions of other prompts: the policy's states are `other.x`, under the same two heads.
        other.weight, other.bias, other.trained = batch.weight, batch.bias, [other.x, batch.weight, batch.bias]
        other.ref_weight, other.ref_bias = batch.ref_weight, batch.ref_bias
        with torch.no_grad():
            sums, counts = other.sums()
            ref_sums = other.sums(ref=True)[0] if kind == "states" or point != "completions" else 0 * sums
            ref_sums = ref_sums - 9 if point != "completions" else ref_sums  # a KL above 0 in one case for sure
            kl = ((sums - ref_sums) / (counts if average else 1)).mean().clamp(min=0)
        arguments |= {"kl_x": other.x, "kl_labels": other.labels}
        if point == "completions":
            arguments |= {"ref_kl_x": other.ref_x} if kind == "states" else {}
        else:
            arguments["ref_kl_logps"] = ref_sums
    if average:
        logps, ref = logps / lengths, ref / lengths
    module = LinearKTOLoss(beta=BETA, average_log_prob=average, desirable_weight=1.3, undesirable_weight=0.6)
    output = module(batch.x, batch.weight, batch.labels, desirable, bias=batch.bias, **arguments)
    assert_loss(output.loss, kto_formula(logps, ref, kl, DESIRABLE, (1.3, 0.6)), batch.trained)
    torch.testing.assert_close(output.kl, kl)
    rewards, keep = (BETA * (logps - ref)).detach(), batch.labels != IGNORED
    logits = F.linear(*batch.trained).mean(-1).detach()
    expected = {
        "logps": logps.detach(), "rewards": rewards,
        "chosen_logps": logps[desirable].mean().detach(), "rejected_logps": logps[~desirable].mean().detach(),
        "chosen_rewards": rewards[desirable].mean(), "rejected_rewards": rewards[~desirable].mean(),
        "reward_margin": rewards[desirable].mean() - rewards[~desirable].mean(),
        "chosen_logits_mean": logits[desirable][keep[desirable]].mean(),
        "rejected_logits_mean": logits[~desirable][keep[~desirable]].mean(),
    }  # fmt: skip
    for name, value in expected.items():
        assert not getattr(output, name).requires_grad, name
        torch.testing.assert_close(getattr(output, name), value, msg=lambda text, name=name: f"{name}: {text}")


def test_apo_zero_unpaired_has_no_reference_point():
    logps, ref = torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    desirable = torch.tensor(DESIRABLE)
    losses = kto_loss(logps, desirable, ref, kl=torch.tensor(3.0), beta=BETA, loss_type="apo_zero_unpaired")
    torch.testing.assert_close(losses.mean(), kto_formula(logps, ref, 0, DESIRABLE))
    batch = Batch()
    module = LinearKTOLoss(loss_type="apo_zero_unpaired")
    with pytest.raises(InputError, match="no reference point"):
        module(batch.x, batch.weight, batch.labels, desirable, kl=torch.tensor(0.1))


def test_a_batch_with_one_kind_only():
    batch = Batch()
    output = LinearKTOLoss()(batch.x, batch.weight, batch.labels, torch.ones(2 * PAIRS, dtype=torch.bool))
    assert output.rejected_rewards == output.rejected_logps == output.rejected_logits_mean == 0
    assert all(value.isfinite().all() for value in output)


@pytest.mark.parametrize("loss_type, e", CASES)
def test_extreme_values_in_fp32(loss_type, e):
    """Log ratios of up to 1000 either way: the naive formula in fp64 still holds there, naive fp32 would not.

    beta 0.3 makes of 1000 - (-1000) a d of 600, whose exponential fp32 cannot hold and fp64 can.
    """
    grid = torch.tensor([-1000.0, -500.0, 0.0, 500.0, 1000.0])
    c, r = (t.flatten().clone().requires_grad_() for t in torch.meshgrid(grid, grid, indexing="ij"))
    loss = dpo_loss(c, r, beta=BETA, loss_type=loss_type, label_smoothing=e)
    wide = [t.detach().double().requires_grad_() for t in (c, r)]
    zero = torch.zeros_like(wide[0])
    exact = dpo_formula(loss_type, *wide, zero, zero, e)
    actual = [loss, *torch.autograd.grad(loss.sum(), (c, r))]
    expected = [exact, *torch.autograd.grad(exact.sum(), wide)]
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
    found, wide = log_odds(x), x.detach().double()
    exact = wide - torch.log(-torch.expm1(wide))
    # log(1 - p) may cancel x to nothing around p = 1/2: relative to the larger of the two terms.
    error = (found.double() - exact).abs() / torch.maximum(exact.abs(), wide.abs()).clamp(min=0.5)
    assert error.max() < 3e-7  # a few roundings of 2^-24
    (slope,) = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(slope.double(), -1 / torch.expm1(wide), rtol=2e-6, atol=0)
    for pair in ([0.0, -1.0], [0.0, 0.0], [-1e4, 0.0]):
        c, r = (torch.tensor([value], requires_grad=True) for value in pair)
        loss = orpo_loss(c, r)
        assert loss.isfinite() and all(g.isfinite() for g in torch.autograd.grad(loss.sum(), (c, r)))


SMALL = {
    "dpo": lambda **o: LinearDPOLoss(beta=BETA, **o),
    "dpo, averages": lambda **o: LinearDPOLoss(beta=BETA, average_log_prob=True, **o),
    "ipo": lambda **o: LinearDPOLoss(beta=BETA, loss_type="ipo", **o),
    "orpo": lambda **o: LinearORPOLoss(beta=BETA, **o),
    "cpo": lambda **o: LinearCPOLoss(beta=BETA, **o),
    "simpo": lambda **o: LinearSimPOLoss(beta=BETA, **o),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("rows", [[0], [0, 1, 2], list(range(2 * PAIRS))], ids=str)
def test_sequences_without_a_label(device, name, rows):
    """Their log probability is 0, nothing is NaN, and their states get no gradient."""
    batch = Batch(device, torch.float32)
    batch.labels[rows] = IGNORED
    output = SMALL[name]()(batch.x, batch.weight, batch.labels)
    assert all(value is None or value.isfinite().all() for value in output)
    logps = torch.cat([output.chosen_logps, output.rejected_logps])
    assert (logps[rows] == 0).all() and (logps != 0).sum() == 2 * PAIRS - len(rows)
    dx, dweight = torch.autograd.grad(output.loss, (batch.x, batch.weight))
    assert dx.isfinite().all() and dweight.isfinite().all()
    assert (dx[rows] == 0).all()


@pytest.mark.parametrize("name", [*SMALL, "kto"])
def test_packed_equals_padded(device, name):
    """Sequences of any length end to end, one of them empty, and tokens after the last that belong to none."""
    batch = Batch(device)
    lengths = [7, 4, 0, 6, 1, 5]
    batch.labels = batch.labels.where(
        torch.arange(TOKENS, device=device) < torch.tensor(lengths, device=device)[:, None], -100
    )
    trailing = 3

    def packed(values, fill):
        rows = [row[:length] for row, length in zip(values, lengths, strict=True)]
        return torch.cat([*rows, torch.full_like(values[0, :trailing], fill)]).reshape(
            *[1] * (name == "orpo"), -1, *values.shape[2:]
        )

    bounds = F.pad(torch.tensor(lengths, device=device).cumsum(0), (1, 0)).int()
    nll_labels = batch.labels.where(torch.rand(batch.labels.shape, device=device) < 0.5, IGNORED)
    module, extra = (
        (LinearKTOLoss(beta=BETA), (torch.tensor(DESIRABLE, device=device),)) if name == "kto" else (SMALL[name](), ())
    )
    results = []
    for pack in (False, True):
        x, ref_x = batch.x, batch.ref_x
        arguments = {} if name == "kto" else {"nll_labels": packed(nll_labels, 5) if pack else nll_labels}
        if "dpo" in name or name in ("ipo", "kto"):
            arguments |= {"ref_x": packed(ref_x, 1.0) if pack else ref_x, "ref_weight": batch.ref_weight}
        labels = packed(batch.labels, 5) if pack else batch.labels
        if pack:
            arguments["cu_seqlens"] = bounds
        output = module(packed(x, 1.0) if pack else x, batch.weight, labels, *extra, bias=batch.bias, **arguments)
        results.append([*output, *torch.autograd.grad(output.loss, batch.trained)])
    for padded, flat in zip(*results, strict=True):
        assert (padded is None) == (flat is None)
        if padded is not None:
            torch.testing.assert_close(flat, padded)
    logps = sequence_logps(
        packed(batch.x, 1.0), batch.weight, packed(batch.labels, 5), bias=batch.bias, cu_seqlens=bounds
    )
    torch.testing.assert_close(logps, batch.sums()[0])


def test_softcap_and_ignore_index():
    batch = Batch()
    labels = batch.labels.where(batch.labels != IGNORED, -7)
    output = LinearDPOLoss(softcap=2.0, ignore_index=-7)(
        batch.x, batch.weight, labels, ref_x=batch.ref_x, ref_weight=batch.ref_weight
    )
    capped = [
        2.0 * torch.tanh(F.linear(x, w) / 2.0) for x, w in ((batch.x, batch.weight), (batch.ref_x, batch.ref_weight))
    ]
    keep = labels != -7
    sums = [(z.log_softmax(-1).gather(-1, labels.where(keep, 0)[..., None])[..., 0] * keep).sum(1) for z in capped]
    expected = -log_sigmoid(0.1 * torch.sub(*(sums[0] - sums[1]).chunk(2))).mean()
    assert_loss(output.loss, expected, [batch.x, batch.weight])


def call(**changes):
    """A call of LinearDPOLoss, with `changes`."""
    batch = Batch()
    given = {"x": batch.x, "weight": batch.weight, "labels": batch.labels} | changes
    return LinearDPOLoss()(given.pop("x"), given.pop("weight"), given.pop("labels"), **given)


def call_kto(**changes):
    batch = Batch()
    given = {"desirable": torch.tensor(DESIRABLE)} | changes
    return LinearKTOLoss()(batch.x, batch.weight, batch.labels, **given)


two, ids, x = torch.zeros(2 * PAIRS, dtype=torch.float64), torch.ones(6, 7).long(), torch.randn(6, 7, 16).double()
REFUSED = {
    "loss type": (lambda: LinearDPOLoss(loss_type="dpo"), "loss_type='dpo'.*sigmoid, "),
    "beta": (lambda: LinearORPOLoss(beta=0.0), "beta=0.0 must be greater"),
    "exo": (lambda: LinearDPOLoss(loss_type="exo_pair"), "label_smoothing=0.0 must be greater"),
    "dpo smoothing": (lambda: LinearDPOLoss(loss_type="ipo", label_smoothing=0.1), "not defined for .*ipo"),
    "no batch": (lambda: call(x=x[0], labels=ids[0]), "need cu_seqlens"),
    "labels": (lambda: call(labels=ids[:, 1:]), "shifted already"),
    "nll of another text": (lambda: call(nll_labels=3 * ids), "differ at a position"),
    "odd": (lambda: call(x=x[:3], labels=ids[:3]), "are not pairs"),
    "states alone": (lambda: call(ref_x=x), "go together"),
    "twice": (lambda: call(ref_x=x, ref_weight=torch.randn(29, 16), ref_logps=two), "give either"),
    "ref logps": (lambda: call(ref_logps=two[:PAIRS]), r"ref_logps \[3\] must be \[6\]"),
    "kl without labels": (lambda: call_kto(kl_x=x), "kl_x and kl_labels"),
    "kl twice": (lambda: call_kto(kl_x=x, kl_labels=ids, kl=two[0]), "takes the place"),
    "few desirable": (lambda: call_kto(desirable=torch.tensor(DESIRABLE)[:2]), r"must be torch.bool \[6\]"),
}  # fmt: skip


def test_nll_of_another_text_is_nan_where_a_check_would_synchronise():
    """On a GPU and under torch.compile nothing synchronises for a check, and no wrong loss comes out."""
    batch = Batch()
    given = dict(x=batch.x, weight=batch.weight, labels=batch.labels)
    other = batch.labels.clone()
    place = tuple((other[:PAIRS] != -100).nonzero()[0])
    other[place] = (other[place] + 1) % batch.weight.shape[0]
    loss = torch.compile(LinearDPOLoss(compute_nll_loss=True), backend="eager")
    assert loss(**given, nll_labels=batch.labels.clone()).loss.isfinite()
    assert loss(**given, nll_labels=other).loss.isnan()


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    attempt, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        attempt()


def every_loss(batch, number=None):
    """(name, function of x, weight, bias) of every module and loss type."""
    desirable = torch.tensor(DESIRABLE, device=batch.x.device)
    refs = {"ref_x": batch.ref_x, "ref_weight": batch.ref_weight}
    for loss_type, e in CASES:
        module = LinearDPOLoss(beta=BETA, loss_type=loss_type, label_smoothing=e)
        yield f"{loss_type} {e}", lambda x, w, b, m=module: m(x, w, batch.labels, bias=b, num_valid=number, **refs).loss
    for module in (LinearORPOLoss(), LinearSimPOLoss(), *(LinearCPOLoss(loss_type=t) for t in CPO)):
        yield str(module), lambda x, w, b, m=module: m(x, w, batch.labels, bias=b, num_valid=number).loss

    def kto(x, w, b):
        more = {"kl_x": x, "kl_labels": batch.labels, "ref_kl_x": batch.ref_x}
        return LinearKTOLoss()(x, w, batch.labels, desirable, bias=b, num_valid=number, **refs, **more).loss

    yield "kto", kto


@pytest.mark.parametrize("name", ["ipo 0.0", "kto"])
def test_dynamo_traces_modules_whole(name):
    batch = Batch()
    op = next(op for found, op in every_loss(batch) if found.startswith(name))
    assert_compiles(op, batch.trained, [torch.ones((), dtype=torch.float64)], backend="eager")


@pytest.mark.gpu
@pytest.mark.parametrize("number", [None, 2 * PAIRS * TOKENS - 8], ids=["every token", "valid tokens"])
def test_on_a_gpu(number):
    """Nothing synchronises, a CUDA graph replays on other values, and the kernels compile whole."""
    batch = Batch("cuda", torch.float32)
    one = torch.ones((), device="cuda")
    for _, op in every_loss(batch, number):
        assert_never_waits(op, batch.trained, [one])
        assert_captures(op, batch.trained, [one.clone()])
    for op in (LinearDPOLoss(beta=BETA), LinearORPOLoss()):
        assert_compiles(lambda x, w, b, m=op: m(x, w, batch.labels, bias=b).loss, batch.trained, [one])
