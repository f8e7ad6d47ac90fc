"""kl_div: the reference against torch, the kernel against the reference, and both against the edges."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from ligermodels.errors import InputError
from ligermodels.kernels.kl_div import kl_div, kl_div_reference
from tests.kernels.cross_entropy_cases import bounded
from tests.kernels.on_gpu import assert_captures, assert_compiles, assert_never_waits
from tests.kernels.oracle import assert_as_exact, dtypes

REDUCTIONS = ["mean", "batchmean", "sum", "none"]

pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")


def problem(shape, log_target, device="cpu", dtype=torch.float64, spread=1.0):
    """Log-probabilities and a target, both with gradients, made in fp64 and then rounded."""
    x, t = ((spread * torch.randn(shape, dtype=torch.float64)).log_softmax(-1) for _ in range(2))
    t = t if log_target else t.exp()
    return [z.to(device, dtype).requires_grad_() for z in (x, t)]


def results(op, inputs, upstream=None, **options):
    """The loss and the gradients of the inputs that require one."""
    loss = op(*inputs, **options)
    upstream = torch.ones_like(loss) if upstream is None else upstream.to(loss.dtype)
    return [loss.detach(), *torch.autograd.grad(loss, [z for z in inputs if z.requires_grad], upstream)]


def assert_same(actual, expected, rtol, atol):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e.to(a.device), rtol=rtol, atol=atol, equal_nan=True, check_dtype=False)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("shape", [(3, 4, 5), (7,), (0, 4)])
def test_reference_is_torch(reduction, log_target, shape):
    inputs = problem(shape, log_target)
    options = {"reduction": reduction, "log_target": log_target}
    upstream = torch.rand_like(F.kl_div(*inputs, **options))
    expected = results(F.kl_div, inputs, upstream, **options)
    assert_same(results(kl_div_reference, inputs, upstream, **options), expected, 1e-12, 1e-14)


@bounded
@given(
    reduction=st.sampled_from(REDUCTIONS),
    log_target=st.booleans(),
    shape=st.sampled_from([(), (1,), (3, 7), (2, 3, 65), (0, 5), (4, 0), (2, 2050)]),
    needs=st.sampled_from([(True, True), (True, False), (False, True)]),
)
def test_every_option(device, poison, reduction, log_target, shape, needs):
    options = {"reduction": reduction, "log_target": log_target}
    inputs = problem(shape or (1,), log_target, device)
    inputs = [z.detach().view(shape).requires_grad_(n) for z, n in zip(inputs, needs, strict=True)]
    upstream = torch.randn(shape if reduction == "none" else (), dtype=torch.float64, device=device)
    expected = results(kl_div_reference, inputs, upstream, **options)
    # fp64 throughout; the sums are ordered differently.
    assert_same(results(kl_div, inputs, upstream, **options), expected, 1e-12, 1e-13)


@pytest.mark.parametrize("reduction", ["batchmean", "none"])
@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("dtype", [d for d in dtypes() if d != torch.float64], ids=str)
def test_as_exact_as_eager(device, poison, dtype, log_target, reduction):
    options = {"reduction": reduction, "log_target": log_target}
    inputs = problem((24, 999), log_target, device, dtype, spread=3.0)
    exact = results(kl_div_reference, [z.detach().double().requires_grad_() for z in inputs], **options)
    eager = results(F.kl_div, inputs, **options)
    for name, *row in zip(("loss", "dx", "dt"), results(kl_div, inputs, **options), eager, exact, strict=True):
        assert_as_exact(*row, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_target", [False, True])
def test_no_probability_counts_for_nothing(device, poison, dtype, log_target):
    """Where the target is 0, nothing is NaN or infinite, even if the input is -inf: not so in torch."""
    t = torch.tensor([[0.0, 0.25, 0.0, 0.75]], dtype=dtype, device=device)
    x = torch.tensor([[-torch.inf, -1.0, -2.0, -0.5]], dtype=dtype, device=device, requires_grad=True)
    t = (t.log() if log_target else t).requires_grad_()
    for op in (kl_div, kl_div_reference):
        loss, dx, dt = results(op, [x, t], reduction="sum", log_target=log_target)
        expected = 0.25 * (torch.log(torch.tensor(0.25)) + 1) + 0.75 * (torch.log(torch.tensor(0.75)) + 0.5)
        torch.testing.assert_close(loss.cpu(), expected.to(dtype))
        assert torch.equal(dx.cpu(), torch.tensor([[0.0, -0.25, 0.0, -0.75]], dtype=dtype)) or log_target
        assert dx[0, 0] == dx[0, 2] == dt[0, 0] == dt[0, 2] == 0 and dt.isfinite().all()
    # A target that has probability where the input has none is infinitely far away, and NaN stays NaN.
    t = torch.full((1, 4), 0.25, dtype=dtype, device=device)
    t = t.log() if log_target else t
    assert kl_div(x.detach(), t, log_target=log_target).item() == torch.inf
    assert kl_div(t, t * torch.nan, log_target=log_target).isnan()


@pytest.mark.parametrize("kind", ["equal", "peak", "1e4"])
def test_adversarial_values(device, kind):
    """As near to fp64 as eager fp32."""
    logits = torch.randn(2, 48, 301, dtype=torch.float64)
    if kind == "equal":
        logits[:] = 0.0
    elif kind == "peak":  # p = 0.9999
        logits[:, :, 7] = 15.5
    else:
        logits *= 1e4
    x, t = (z.float().to(device).requires_grad_() for z in logits.log_softmax(-1))
    options = {"log_target": True, "reduction": "none"}
    exact = results(kl_div_reference, [z.detach().double().requires_grad_() for z in (x, t)], **options)
    rows = zip(("loss", "dx", "dt"), results(kl_div, [x, t], **options), results(F.kl_div, [x, t], **options), exact,
               strict=True)  # fmt: skip
    for name, *row in rows:
        assert_as_exact(*row, name)


@pytest.mark.parametrize("vocab", [4099, 262144])
def test_wide_rows(device, poison, vocab):
    inputs = problem((2, vocab), True, device, torch.float32)
    wide = [z.detach().double().requires_grad_() for z in inputs]
    options = {"reduction": "batchmean", "log_target": True}
    # fp32 sums of many terms of either sign: half a million roundings of 2^-24 that partly cancel.
    assert_same(results(kl_div, inputs, **options), results(kl_div_reference, wide, **options), 2e-5, 1e-9)


def test_gradcheck(device):
    for log_target in (False, True):
        for reduction in REDUCTIONS:
            inputs = problem((2, 5), log_target, device)
            assert torch.autograd.gradcheck(
                lambda x, t, r=reduction, lt=log_target: kl_div(x, t, reduction=r, log_target=lt), inputs
            )


def test_dtypes_and_shapes_may_differ(device, poison):
    """Mixed dtypes are promoted and shapes are broadcast, as in torch; batchmean divides by the input's size."""
    x, _ = problem((4, 6), True, device, torch.float16)
    _, t = problem((3, 4, 6), True, device, torch.float32)
    for reduction in REDUCTIONS:
        for pair in ([x, t], [t, x], [x, t.detach()[0]], [x, t.detach()[0, 0].requires_grad_()]):
            options = {"reduction": reduction, "log_target": True}
            actual, expected = results(kl_div, pair, **options), results(F.kl_div, pair, **options)
            assert actual[0].dtype == expected[0].dtype == torch.float32
            # The gradient of x is rounded to fp16; three of them are, which may cancel, where x is broadcast.
            assert_same(actual, expected, 1e-3, 2e-3)
    assert kl_div(x, x).dtype == torch.float32 and kl_div(x, x, reduction="none").dtype == torch.float16


@pytest.mark.parametrize("layout", ["transposed", "shifted", "expanded", "sliced"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_layouts(device, layout, reduction):
    view = {
        "transposed": lambda z: z.transpose(0, 2),
        "shifted": lambda z: z[:, :-1],
        "expanded": lambda z: z[:, :1].expand(-1, 5, -1),
        "sliced": lambda z: z[..., 1::2],
    }[layout]
    inputs = problem((3, 4, 9), True, device)
    options = {"reduction": reduction, "log_target": True}
    for other in (view, lambda z: view(z).contiguous()):
        actual = results(lambda x, t, **o: kl_div(view(x), other(t), **o), inputs, **options)  # noqa: B023
        expected = results(lambda x, t, **o: kl_div_reference(view(x), view(t), **o), inputs, **options)
        assert_same(actual, expected, 1e-12, 1e-14)


def test_a_graph_runs_twice_and_leaves_its_inputs_alone(device):
    inputs = problem((5, 40), True, device, torch.float32)
    before = [z.detach().clone() for z in inputs]
    loss = kl_div(*inputs, log_target=True)
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    second = torch.autograd.grad(loss, inputs, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip((*first, *before), (*second, *inputs), strict=True))
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.grad(kl_div(*inputs, log_target=True), inputs, torch.ones((), device=device, requires_grad=True),
                            create_graph=True)[0].sum().backward()  # fmt: skip
    assert not kl_div(*(z.detach() for z in inputs)).requires_grad


def test_deterministic(device):
    inputs = problem((64, 3000), True, device, torch.float32)
    runs = [results(kl_div, inputs, log_target=True) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": "avg"}, "reduction='avg'"),
        ({"target": torch.ones(2, 4, dtype=torch.int64)}, "floating point"),
        ({"target": torch.ones(2, 3)}, "not of one shape"),
        ({"target": torch.ones(2, 4, device="meta")}, "move one"),
    ],
)
def test_input_errors(change, message):
    call = {"input": torch.randn(2, 4), "target": torch.rand(2, 4)} | change
    with pytest.raises(InputError, match=message):
        kl_div(call.pop("input"), call.pop("target"), **call)


def test_cpu_path_is_the_reference(monkeypatch):
    monkeypatch.setattr(importlib.import_module("ligermodels.kernels.kl_div"), "use_triton", lambda x: False)
    inputs = problem((5, 7), False, dtype=torch.float32)
    for reduction in REDUCTIONS:
        actual = results(kl_div, inputs, reduction=reduction)
        assert_same(actual, results(kl_div_reference, inputs, reduction=reduction), 0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["batchmean", "none"])
@pytest.mark.parametrize("check", [assert_compiles, assert_captures, assert_never_waits])
def test_compiled_captured_and_never_waits(check, reduction):
    inputs = problem((64, 1000), True, "cuda", torch.bfloat16)
    upstream = torch.randn((64, 1000) if reduction == "none" else (), device="cuda")
    upstream = upstream.to(torch.bfloat16) if reduction == "none" else upstream
    check(lambda x, t: kl_div(x, t, reduction=reduction, log_target=True), inputs, [upstream])


@pytest.mark.gpu
def test_beyond_int32_and_memory():
    """2.15e9 elements: the last rows are right, and no buffer but the gradient is of their size."""
    rows, vocab = 16800, 128256
    assert rows * vocab > 2**31
    x = torch.empty(rows, vocab, dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    t = torch.empty_like(x).uniform_()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = kl_div(x, t, reduction="sum")
    assert torch.cuda.max_memory_allocated() - before <= 2**20
    (grad,) = torch.autograd.grad(loss, x)
    assert torch.cuda.max_memory_allocated() - before <= x.numel() * 2 + 2**24
    assert torch.equal(grad[-2:], -t[-2:])
    parts = [kl_div(a, b, reduction="sum").double() for a, b in zip(x.detach().split(4200), t.split(4200), strict=True)]
    # fp32 sums of 5e8 terms, each program's over about 250 000 in 2048 lanes.
    torch.testing.assert_close(loss.double(), sum(parts), rtol=1e-5, atol=0)
