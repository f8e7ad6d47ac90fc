"""KL divergence and JSD: no probability, broadcasting, mixed dtypes, ignored tokens."""

import pytest
import torch
import torch.nn.functional as F

from ligermodels.kernels import jsd, jsd_reference, kl_div, kl_div_reference
from tests.kernels.cases import IGNORE

BETAS = [0.0, 0.1, 0.5, 1.0]

pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")


def problem(shape, device="cpu", dtype=torch.float64, spread=1.0):
    """Log-probabilities of student and teacher, both with gradients, made in fp64 and then rounded."""
    pair = ((spread * torch.randn(shape, dtype=torch.float64)).log_softmax(-1) for _ in range(2))
    return [z.to(device, dtype).requires_grad_() for z in pair]


def results(op, inputs, **options):
    """The loss and the gradients of the inputs that require one."""
    loss = op(*inputs, **options)
    return [loss.detach(), *torch.autograd.grad(loss.sum(), [z for z in inputs if z.requires_grad])]


def assert_same(actual, expected, rtol, atol):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e.to(a.device), rtol=rtol, atol=atol, equal_nan=True, check_dtype=False)


@pytest.mark.parametrize("log_target", [False, True])
def test_no_probability_counts_for_nothing(device, poison, log_target):
    """Where the target is 0, nothing is NaN or infinite, even if the input is -inf: not so in torch."""
    t = torch.tensor([[0.0, 0.25, 0.0, 0.75]], device=device)
    x = torch.tensor([[-torch.inf, -1.0, -2.0, -0.5]], device=device, requires_grad=True)
    t = (t.log() if log_target else t).requires_grad_()
    for op in (kl_div, kl_div_reference):
        loss, dx, dt = results(op, [x, t], reduction="sum", log_target=log_target)
        expected = 0.25 * (torch.log(torch.tensor(0.25)) + 1) + 0.75 * (torch.log(torch.tensor(0.75)) + 0.5)
        torch.testing.assert_close(loss.cpu(), expected)
        assert torch.equal(dx.cpu(), torch.tensor([[0.0, -0.25, 0.0, -0.75]])) or log_target
        assert dx[0, 0] == dx[0, 2] == dt[0, 0] == dt[0, 2] == 0 and dt.isfinite().all()
    # A target that has probability where the input has none is infinitely far away, and NaN stays NaN.
    t = torch.full((1, 4), 0.25, device=device)
    t = t.log() if log_target else t
    assert kl_div(x.detach(), t, log_target=log_target).item() == torch.inf
    assert kl_div(t, t * torch.nan, log_target=log_target).isnan()


def test_kl_div_of_other_dtypes_and_shapes(device, poison):
    """Mixed dtypes are promoted and shapes are broadcast, as in torch; batchmean divides by the input's size."""
    x, _ = problem((4, 6), device, torch.float16)
    _, t = problem((3, 4, 6), device, torch.float32)
    for reduction in ("mean", "batchmean", "sum", "none"):
        for pair in ([x, t], [t, x], [x, t.detach()[0]], [x, t.detach()[0, 0].requires_grad_()]):
            options = {"reduction": reduction, "log_target": True}
            actual, expected = results(kl_div, pair, **options), results(F.kl_div, pair, **options)
            assert actual[0].dtype == expected[0].dtype == torch.float32
            # The gradient of x is rounded to fp16; three of them are, which may cancel, where x is broadcast.
            assert_same(actual, expected, 1e-3, 2e-3)
    assert kl_div(x, x).dtype == torch.float32 and kl_div(x, x, reduction="none").dtype == torch.float16
    assert kl_div(torch.tensor(-1.0, device=device), torch.tensor(0.5, device=device)).shape == ()


@pytest.mark.parametrize("beta", BETAS)
def test_far_apart(device, poison, beta):
    """Logits of 1e4 and tokens without probability: nothing underflows into NaN, infinite is what has to be."""
    x, y = (1e4 * torch.randn(3, 50, dtype=torch.float64) for _ in range(2))
    x[0, 3], y[1, 4] = -torch.inf, -torch.inf
    x[2, 5] = y[2, 5] = -torch.inf
    x, y = (z.log_softmax(-1).to(device).requires_grad_() for z in (x, y))
    exact = results(jsd_reference, [x, y], beta=beta, reduction="none")
    low = [z.detach().float().requires_grad_() for z in (x, y)]
    assert not any(e.isnan().any() for e in exact)
    # Log-probabilities near 1e4 are rounded to fp32 once.
    assert_same(results(jsd, low, beta=beta, reduction="none"), exact, 1e-5, 1e-6)
    uniform = torch.full((1, 4), 0.25, device=device).log()
    hole = torch.tensor([[0.5, 0.5, 0.0, 0.0]], device=device).log()
    # What the first lacks and the second has is infinitely far away, but not from their mixture.
    infinite = [jsd(hole, uniform, beta=beta).isinf().item(), jsd(uniform, hole, beta=beta).isinf().item()]
    assert infinite == [beta == 0.0, beta == 1.0]
    assert jsd(uniform, uniform * torch.nan, beta=beta).isnan() and jsd(uniform * torch.nan, uniform, beta=beta).isnan()


def test_ignored_tokens(device, poison):
    """NaN at ignored labels reaches nothing; where all are ignored, or there is no token, the loss is 0."""
    x, y = problem((4, 6), device, torch.float32)
    labels = torch.tensor([1, IGNORE, IGNORE, 5], device=device)
    keep = labels != IGNORE
    with torch.no_grad():
        x[1], y[2] = torch.nan, torch.inf
    kept = [z.detach()[keep].requires_grad_() for z in (x, y)]
    for op in (jsd, jsd_reference):
        for reduction in ("mean", "sum", "none"):
            loss, dx, dy = results(op, [x, y], labels=labels, reduction=reduction)
            assert not dx[~keep].any() and not dy[~keep].any()
            loss = loss[keep] if reduction == "none" else loss
            assert_same([loss, dx[keep], dy[keep]], results(jsd_reference, kept, reduction=reduction), 1e-5, 1e-7)
            nothing = results(op, [x, y], labels=torch.full_like(labels, IGNORE), reduction=reduction)
            assert not any(z.any() for z in nothing)
            assert op(x[:0], y[:0], reduction=reduction).sum() == 0
        assert op(x, y, labels=torch.tensor([3, 3, 3, 5], device=device), ignore_index=3).isfinite()
