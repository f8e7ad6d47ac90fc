"""jsd: the reference against torch's kl_div, the kernel against the reference, and both against the edges."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from ligermodels.errors import InputError
from ligermodels.kernels.jsd import jsd, jsd_reference
from tests.kernels.cross_entropy_cases import IGNORE, bounded, some_labels
from tests.kernels.on_gpu import assert_captures, assert_compiles, assert_never_waits
from tests.kernels.oracle import assert_as_exact, dtypes
from tests.kernels.test_kl_div import assert_same, results

REDUCTIONS = ["mean", "sum", "none"]
BETAS = [0.0, 0.1, 0.5, 1.0]


def eager(x, y, *, beta=0.5, reduction="none"):
    """The divergence as one writes it with torch's own ops, all in the inputs' dtype."""
    if beta in (0, 1):
        rows = F.kl_div(*((x, y) if beta == 0 else (y, x)), reduction="none", log_target=True)
    else:
        mixed = (
            torch.stack([y, x]) + torch.tensor([beta, 1 - beta], dtype=x.dtype, device=x.device).log()[:, None, None]
        )
        mixed = mixed.logsumexp(0)
        rows = beta * F.kl_div(mixed, y, reduction="none", log_target=True)
        rows = rows + (1 - beta) * F.kl_div(mixed, x, reduction="none", log_target=True)
    return {"none": rows.sum(-1), "sum": rows.sum(), "mean": rows.sum(-1).mean()}[reduction]


def problem(shape, device="cpu", dtype=torch.float64, spread=1.0):
    """Log-probabilities of student and teacher, both with gradients, made in fp64 and then rounded."""
    pair = ((spread * torch.randn(shape, dtype=torch.float64)).log_softmax(-1) for _ in range(2))
    return [z.to(device, dtype).requires_grad_() for z in pair]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("beta", BETAS)
def test_reference_is_torch(beta, reduction):
    inputs = problem((6, 11))
    upstream = torch.rand(6 if reduction == "none" else (), dtype=torch.float64)
    actual = results(jsd_reference, inputs, upstream, beta=beta, reduction=reduction)
    assert_same(actual, results(eager, inputs, upstream, beta=beta, reduction=reduction), 1e-12, 1e-14)


def test_reference_by_hand():
    """beta weighs the teacher: beta = 0 is KL(teacher || student), and the mixture holds beta of the teacher."""
    s, t = torch.tensor([0.2, 0.8], dtype=torch.float64), torch.tensor([0.7, 0.3], dtype=torch.float64)
    forward = 0.7 * torch.log(t[0] / s[0]) + 0.3 * torch.log(t[1] / s[1])
    m = 0.9 * t + 0.1 * s
    mixed = 0.9 * (t * torch.log(t / m)).sum() + 0.1 * (s * torch.log(s / m)).sum()
    for beta, expected in ((0.0, forward), (0.9, mixed)):
        torch.testing.assert_close(jsd_reference(s.log(), t.log(), beta=beta), expected)


@bounded
@given(
    beta=st.sampled_from(BETAS),
    reduction=st.sampled_from(REDUCTIONS),
    labelled=st.booleans(),
    shape=st.sampled_from([(1,), (3, 7), (2, 3, 65), (0, 5), (5, 1), (2, 4100)]),
    needs=st.sampled_from([(True, True), (True, False), (False, True)]),
)
def test_every_option(device, poison, beta, reduction, labelled, shape, needs):
    inputs = [z.requires_grad_(n) for z, n in zip(problem(shape, device), needs, strict=True)]
    labels = some_labels(shape[:-1], shape[-1], device) if labelled else None
    options = {"beta": beta, "reduction": reduction, "labels": labels}
    upstream = torch.randn(shape[:-1] if reduction == "none" else (), dtype=torch.float64, device=device)
    expected = results(jsd_reference, inputs, upstream, **options)
    # fp64 throughout; the sums are ordered differently.
    assert_same(results(jsd, inputs, upstream, **options), expected, 1e-11, 1e-12)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("dtype", [d for d in dtypes() if d != torch.float64], ids=str)
def test_as_exact_as_eager(device, poison, dtype, beta):
    inputs = problem((48, 777), device, dtype, spread=3.0)
    exact = results(jsd_reference, [z.detach().double().requires_grad_() for z in inputs], beta=beta, reduction="none")
    plain = results(eager, inputs, beta=beta)
    rows = zip(("loss", "dx", "dy"), results(jsd, inputs, beta=beta, reduction="none"), plain, exact, strict=True)
    for name, *row in rows:
        assert_as_exact(*row, name)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_near_equals_keep_their_digits(device, beta):
    """Student and teacher 1 % apart, and both at a peak of p = 0.9999 or 1 - 1e-6, where eager fp32 has no digit left.

    The loss is of second order in the difference, the sum of first-order terms that cancel: 2^-24 of those is allowed.
    """
    x = torch.randn(4, 301, dtype=torch.float64)
    y = x + 0.01 * torch.randn(4, 301, dtype=torch.float64)
    x[1, 7] = y[1, 7] = 16.0
    x[2, 7] = y[2, 7] = 20.0
    x[3] = y[3] = 0.0
    x, y = (z.log_softmax(-1).float().to(device).requires_grad_() for z in (x, y))
    exact = results(jsd_reference, [z.detach().double().requires_grad_() for z in (x, y)], beta=beta, reduction="none")
    actual = results(jsd, [x, y], beta=beta, reduction="none")
    assert torch.equal(actual[0][3], torch.zeros_like(actual[0][3])) and not actual[1][3].any()
    first_order = (exact[1].abs() + exact[2].abs()).sum(-1)
    assert ((actual[0].double() - exact[0]).abs() <= 2**-22 * first_order).all()
    for a, e in zip(actual[1:], exact[1:], strict=True):
        # Two exp and log1p to 4 ulp each, and four products; fp64 loses the digits of equal rows.
        torch.testing.assert_close(a.double(), e, rtol=2e-6, atol=1e-18)


@pytest.mark.parametrize("beta", BETAS)
def test_far_apart(device, poison, beta):
    """Logits of 1e4 and tokens without probability: nothing underflows into NaN, infinite is what has to be."""
    x, y = (1e4 * torch.randn(3, 50, dtype=torch.float64) for _ in range(2))
    x[0, 3], y[1, 4] = -torch.inf, -torch.inf
    x[2, 5] = y[2, 5] = -torch.inf
    x, y = (z.log_softmax(-1).to(device).requires_grad_() for z in (x, y))
    exact = results(jsd_reference, [x, y], beta=beta, reduction="none")
    narrow = [z.detach().float().requires_grad_() for z in (x, y)]
    assert not any(e.isnan().any() for e in exact)
    # Log-probabilities near 1e4 are rounded to fp32 once.
    assert_same(results(jsd, narrow, beta=beta, reduction="none"), exact, 1e-5, 1e-6)
    uniform = torch.full((1, 4), 0.25, device=device).log()
    hole = torch.tensor([[0.5, 0.5, 0.0, 0.0]], device=device).log()
    # What the first lacks and the second has is infinitely far away, but not from their mixture.
    infinite = [jsd(hole, uniform, beta=beta).isinf().item(), jsd(uniform, hole, beta=beta).isinf().item()]
    assert infinite == [beta == 0.0, beta == 1.0]
    assert jsd(uniform, uniform * torch.nan, beta=beta).isnan() and jsd(uniform * torch.nan, uniform, beta=beta).isnan()


@pytest.mark.parametrize("vocab", [4099, 262144])
def test_wide_rows(device, poison, vocab):
    inputs = problem((2, vocab), device, torch.float32)
    wide = [z.detach().double().requires_grad_() for z in inputs]
    # fp32 sums of many terms of either sign that partly cancel.
    assert_same(results(jsd, inputs), results(jsd_reference, wide), 2e-5, 1e-10)


@pytest.mark.parametrize("beta", BETAS)
def test_gradcheck(device, beta):
    labels = torch.tensor([2, IGNORE], device=device)
    for reduction in REDUCTIONS:
        assert torch.autograd.gradcheck(
            lambda x, y, r=reduction: jsd(x, y, labels=labels, beta=beta, reduction=r), problem((2, 3), device)
        )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_ignored_tokens(device, poison, reduction):
    """NaN at ignored labels reaches nothing; where all are ignored, or there is no token, the loss is 0."""
    x, y = problem((4, 6), device, torch.float32)
    labels = torch.tensor([1, IGNORE, IGNORE, 5], device=device)
    keep = labels != IGNORE
    with torch.no_grad():
        x[1], y[2] = torch.nan, torch.inf
    for op in (jsd, jsd_reference):
        loss, dx, dy = results(op, [x, y], labels=labels, reduction=reduction)
        expected = results(jsd_reference, [z.detach()[keep].requires_grad_() for z in (x, y)], reduction=reduction)
        if reduction == "none":
            assert torch.equal(loss[~keep], torch.zeros(2, device=device))
            loss = loss[keep]
        assert not dx[~keep].any() and not dy[~keep].any()
        assert_same([loss, dx[keep], dy[keep]], expected, 1e-5, 1e-7)
        nothing = results(op, [x, y], labels=torch.full_like(labels, IGNORE), reduction=reduction)
        assert not any(z.any() for z in nothing)
        # Any index can be the ignored one, and labels may be int32.
        assert op(x, y, labels=torch.tensor([3, 3, 3, 5], device=device).int(), ignore_index=3).isfinite()
    for op in (jsd, jsd_reference):
        assert op(x[:0], y[:0], reduction=reduction).sum() == 0


def test_label_that_is_no_class(device):
    x, y = problem((3, 5), device, torch.float32)
    for bad in (5, -1, 2**40):
        labels = torch.tensor([0, bad, 2], device=device)
        loss, dx, _ = results(jsd, [x, y], labels=labels, reduction="none")
        assert loss.isnan().tolist() == dx.isnan().any(1).tolist() == [False, True, False]
        assert jsd(x, y, labels=labels).isnan()
        with pytest.raises(InputError, match=f"labels hold {bad}"):
            jsd_reference(x, y, labels=labels)


def test_dtypes_may_differ(device, poison):
    x, y = problem((4, 60), device, torch.float16)
    y = y.detach().double().requires_grad_()
    actual = results(jsd, [x, y])
    assert [z.dtype for z in actual] == [torch.float64, torch.float16, torch.float64]
    # The gradient of x is rounded to fp16, of which it uses the subnormals.
    assert_same(actual, results(jsd_reference, [x, y]), 1e-3, 1e-7)


@pytest.mark.parametrize("layout", ["transposed", "shifted", "expanded", "sliced"])
def test_layouts(device, layout):
    view = {
        "transposed": lambda z: z.transpose(0, 2),
        "shifted": lambda z: z[:, :-1],
        "expanded": lambda z: z[:, :1].expand(-1, 5, -1),
        "sliced": lambda z: z[0, ::2, 1:],
    }[layout]
    inputs = problem((3, 4, 9), device)
    labels = some_labels(tuple(view(inputs[0]).shape[:-1]), 3, device).t().contiguous().t()
    for reduction in ("mean", "none"):
        options = {"labels": labels, "reduction": reduction}
        actual = results(lambda x, y, o=options: jsd(view(x), view(y).contiguous(), **o), inputs)
        assert actual[0].shape == (labels.shape if reduction == "none" else ())
        expected = results(lambda x, y, o=options: jsd_reference(view(x), view(y), **o), inputs)
        assert_same(actual, expected, 1e-12, 1e-14)


def test_a_graph_runs_twice_and_leaves_its_inputs_alone(device):
    inputs = problem((5, 40), device, torch.float32)
    before = [z.detach().clone() for z in inputs]
    loss = jsd(*inputs)
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    second = torch.autograd.grad(loss, inputs)
    assert all(torch.equal(a, b) for a, b in zip((*first, *before), (*second, *inputs), strict=True))
    upstream = torch.ones((), device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.grad(jsd(*inputs), inputs, upstream, create_graph=True)[0].sum().backward()
    assert not jsd(*(z.detach() for z in inputs)).requires_grad


@pytest.mark.gpu  # interpreted: test_every_op, smaller
def test_deterministic(device):
    inputs = problem((64, 3000), device, torch.float32)
    runs = [results(jsd, inputs) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": "batchmean"}, "reduction='batchmean'"),
        ({"beta": 1.5}, "beta=1.5"),
        ({"beta": float("nan")}, "beta=nan"),
        ({"target": torch.ones(2, 4, dtype=torch.int64)}, "log-probabilities"),
        ({"target": torch.ones(2, 3)}, "of one shape"),
        ({"target": torch.ones(2, 4, device="meta")}, "on one device"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, "one entry per token"),
        ({"labels": torch.zeros(2)}, "class indices"),
    ],
)
def test_input_errors(change, message):
    call = {"input": torch.randn(2, 4), "target": torch.rand(2, 4)} | change
    with pytest.raises(InputError, match=message):
        jsd(call.pop("input"), call.pop("target"), **call)


def test_cpu_path_is_the_reference(monkeypatch):
    monkeypatch.setattr(importlib.import_module("ligermodels.kernels.jsd"), "use_triton", lambda x: False)
    inputs = problem((5, 7), dtype=torch.float32)
    options = {"labels": some_labels((5,), 7, "cpu"), "beta": 0.3}
    assert_same(results(jsd, inputs, **options), results(jsd_reference, inputs, **options), 0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("check", [assert_compiles, assert_captures, assert_never_waits])
def test_compiled_captured_and_never_waits(check, reduction):
    inputs = problem((64, 1000), "cuda", torch.bfloat16)
    labels = some_labels((64,), 1000, "cuda")
    upstream = torch.randn(64 if reduction == "none" else (), device="cuda")
    check(lambda x, y: jsd(x, y, labels=labels, reduction=reduction), inputs, [upstream])


@pytest.mark.gpu
def test_beyond_int32_and_memory():
    """2.15e9 elements: the last rows are right, and no buffer but the gradient is of their size."""
    rows, vocab = 16800, 128256
    assert rows * vocab > 2**31
    x = torch.empty(rows, vocab, dtype=torch.bfloat16, device="cuda").uniform_(-14, -10).requires_grad_()
    y = torch.empty_like(x).uniform_(-14, -10)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = jsd(x, y, reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), x)
    assert torch.cuda.max_memory_allocated() - before <= x.numel() * 2 + 2**24
    tail = [x.detach()[-2:].double().requires_grad_(), y[-2:].double()]
    exact = results(jsd_reference, tail, reduction="none")
    torch.testing.assert_close(loss[-2:].double(), exact[0], rtol=1e-5, atol=0)
    # One rounding to bf16, and 2^-22 of the terms before they cancel.
    torch.testing.assert_close(grad[-2:].double(), exact[1], rtol=2**-8, atol=1e-12)
