"""linear_logprobs: the reference against torch, the chunked op against the reference, and what it must not hold."""

import importlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels.linear_logprobs import LogprobsOutput, linear_logprobs, linear_logprobs_reference
from tests.kernels.cross_entropy_cases import IGNORE, adversarial, assert_same, bounded, some_labels
from tests.kernels.oracle import assert_as_exact, dtypes

module = importlib.import_module("ligermodels.kernels.linear_logprobs")
EXTRAS = {"return_entropy": True, "return_logits_mean": True}


def problem(tokens, hidden, vocab, device, dtype=torch.float64, ignored=0.3):
    """x [T, H], weight [V, H], bias [V], all with gradients, and labels [T]."""
    x = torch.randn(tokens, hidden, device=device).to(dtype).requires_grad_()
    weight = torch.randn(vocab, hidden, device=device).to(dtype).requires_grad_()
    bias = torch.randn(vocab, device=device).to(dtype).requires_grad_()
    return x, weight, bias, some_labels((tokens,), vocab, device, ignored)


def found(output: Tensor | LogprobsOutput, inputs: list[Tensor], **how) -> dict[str, Tensor]:
    """All outputs by name, and the gradients of a sum of logprobs and entropy whose weights differ by token."""
    values = {"logprobs": output} if isinstance(output, Tensor) else output._asdict()
    values = {name: value for name, value in values.items() if value is not None}
    total = 0.0
    for name, factor in (("logprobs", 1.0), ("entropy", -0.7)):
        if name in values:
            at = torch.arange(values[name].numel(), device=values[name].device).view_as(values[name])
            total = total + factor * (values[name] * torch.cos(at.to(values[name].dtype))).sum()
    gradients = torch.autograd.grad(total, inputs, **how)
    return values | {f"grad{i}": g for i, g in enumerate(gradients)}


def test_reference_by_hand():
    x, weight, bias, labels = problem(9, 4, 11, "cpu")
    inputs, valid = [x, weight, bias], labels != IGNORE
    logits = 3.0 * torch.tanh((x @ weight.T + bias) / 3.0)
    p = torch.distributions.Categorical(logits=logits / 0.7)
    expected = LogprobsOutput(
        p.log_prob(labels.clamp(min=0)).where(valid, 0), p.entropy().where(valid, 0), logits.mean(-1).where(valid, 0)
    )
    actual = linear_logprobs_reference(x, weight, labels, bias=bias, temperature=0.7, softcap=3.0, **EXTRAS)
    assert_same(found(actual, inputs), found(expected, inputs), 1e-11, 1e-13)
    assert not actual.logits_mean.requires_grad


@bounded
@given(
    tokens=st.sampled_from([0, 1, 5, 150]),
    vocab=st.sampled_from([1, 7, 64, 65]),
    needs=st.sampled_from([(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0)]),
    biased=st.booleans(),
    compact=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([1.0, 0.7, 3.0]),
            "softcap": st.sampled_from([None, 3.0]),
            "return_entropy": st.booleans(),
            "return_logits_mean": st.booleans(),
        }
    ),
    accum_dtype=st.sampled_from([None, torch.float32]),
    workspace_bytes=st.sampled_from([1, 2**20]),
)
def test_every_option(device, poison, tokens, vocab, needs, biased, compact, options, accum_dtype, workspace_bytes):
    x, weight, bias, labels = problem(tokens, 12, vocab, device, ignored=0.85)
    bias = bias if biased or needs == (0, 0, 1) else None
    inputs = []
    for tensor, needed in zip((x, weight, bias), needs, strict=True):
        if tensor is not None:
            tensor.requires_grad_(bool(needed))
            inputs += [tensor] if needed else []
    num_valid = int((labels != IGNORE).sum()) if compact else tokens
    actual = linear_logprobs(
        x,
        weight,
        labels,
        bias=bias,
        num_valid=num_valid,
        accum_dtype=accum_dtype,
        workspace_bytes=workspace_bytes,
        **options,
    )
    expected = linear_logprobs_reference(x, weight, labels, bias=bias, **options)
    # fp64 throughout; the sums are ordered differently.
    assert_same(found(actual, inputs), found(expected, inputs), 1e-10, 1e-11)


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("workspace_bytes", [1, 2**29], ids=["again", "kept"])
def test_as_exact_as_eager(device, poison, dtype, workspace_bytes):
    x, weight, _, labels = problem(140, 64, 500, device, dtype)
    x = (x.detach() * 0.3).requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = found(linear_logprobs_reference(*wide, labels, **EXTRAS), wide)
    actual = found(linear_logprobs(x, weight, labels, workspace_bytes=workspace_bytes, **EXTRAS), [x, weight])
    eager = found(linear_logprobs_reference(x, weight, labels, **EXTRAS), [x, weight])
    assert actual["logprobs"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for name in exact:
        if dtype.itemsize == 2:
            # Where the reference is in fp32 from the logits on, only those are rounded, and both alike.
            assert_as_exact(actual[name], eager[name], exact[name], name)
        else:
            # Sums of 64 to 500 products in this dtype, and logits near 5 that err by as much.
            scale = exact[name].abs().max()
            assert (actual[name].double() - exact[name]).abs().max() <= 64 * torch.finfo(dtype).eps * scale, name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_adversarial_values(device, poison, dtype, temperature):
    """Logits set through the weight, by x = identity."""
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter truncates where it rounds to bf16")
    logits, labels = adversarial(device, dtype)
    # The bias of the head carries nothing; -inf times 0 in a product would be NaN, so it is the lowest number here.
    weight = logits.clamp(min=-3e4).t().contiguous().requires_grad_()
    x = torch.eye(7, device=device, dtype=dtype, requires_grad=True)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    actual = found(linear_logprobs(x, weight, labels, temperature=temperature, **EXTRAS), [x, weight])
    exact = found(linear_logprobs_reference(*wide, labels, temperature=temperature, **EXTRAS), wide)
    assert all(value.isfinite().all() for value in actual.values())
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    for name in ("logprobs", "entropy"):
        # Differences to the largest logit are exact; the fp64 reference subtracts a sum near 2e4.
        torch.testing.assert_close(actual[name].double(), exact[name], rtol=8 * eps, atol=8 * eps + 1e-11)
    torch.testing.assert_close(actual["logits_mean"].double(), exact["logits_mean"], rtol=16 * eps, atol=16 * eps)
    gradient, exact_gradient = actual["grad1"].double(), exact["grad1"]
    stored = torch.finfo(dtype)
    # Entropy times log p: up to 20 in fp32, at the 0.7 of `found` and over the temperature.
    allowed = stored.eps * exact_gradient.abs() + 64 * eps + stored.smallest_normal * stored.eps + 1e-10
    assert ((gradient - exact_gradient).abs() <= allowed).all()


def test_minus_infinity(device):
    """Classes masked out through the bias: they have no probability and no gradient, and NaN does not appear."""
    x, weight, bias, labels = problem(5, 4, 9, device, torch.float32, ignored=0.0)
    masked = torch.zeros(9, dtype=torch.bool, device=device)
    masked[[0, 4, 8]] = True
    bias = bias.detach().masked_fill(masked, -torch.inf).requires_grad_()
    labels = torch.tensor([1, 2, 3, 5, 6], device=device)
    out = linear_logprobs(x, weight, labels, bias=bias, return_entropy=True)
    actual = found(out, [x, weight, bias])
    rows = [t.detach()[~masked].requires_grad_() for t in (weight, bias)]
    renamed = labels - 1 - (labels > 4).long()
    expected = linear_logprobs_reference(x, rows[0], renamed, bias=rows[1], return_entropy=True)
    expected = found(expected, [x, *rows])
    assert not actual["grad1"][masked].any() and not actual["grad2"][masked].any()
    for name in ("grad1", "grad2"):
        actual[name] = actual[name][~masked]
    # fp32: 4 products, 6 classes.
    assert_same(actual, expected, 1e-5, 1e-6)


def test_nothing_to_score(device, poison):
    """All labels ignored, with NaN in x: zeros everywhere. No token at all: empty results, zero gradients."""
    x, weight, bias, labels = problem(4, 6, 5, device)
    x = x.detach().fill_(torch.nan).requires_grad_()
    out = linear_logprobs(x, weight, torch.full_like(labels, IGNORE), bias=bias, num_valid=4, **EXTRAS)
    actual = found(out, [x, bias])
    assert all(not value.any() for value in actual.values())
    x, weight, bias, labels = problem(0, 6, 5, device)
    for call in (linear_logprobs, linear_logprobs_reference):
        actual = found(call(x, weight, labels, bias=bias, **EXTRAS), [x, weight, bias])
        assert all(not value.any() for value in actual.values())


def test_one_token_and_equal_logits(device):
    """Equal logits: entropy log V and no gradient of it."""
    x = torch.ones(1, 4, dtype=torch.float64, device=device, requires_grad=True)
    weight = torch.full((50, 4), 0.3, dtype=torch.float64, device=device, requires_grad=True)
    out = linear_logprobs(x, weight, torch.tensor([7], device=device), **EXTRAS)
    assert out.entropy.item() == pytest.approx(math.log(50), rel=1e-14)
    assert out.logprobs.item() == pytest.approx(-math.log(50), rel=1e-14)
    assert out.logits_mean.item() == pytest.approx(1.2, rel=1e-14)
    (gradient,) = torch.autograd.grad(out.entropy.sum(), weight)
    assert gradient.abs().max() < 1e-15


@pytest.mark.parametrize("vocab", [4099, 262144])
def test_wide_vocabulary(device, poison, vocab):
    x, weight, _, labels = problem(3, 5, vocab, device, torch.float32, ignored=0.0)
    labels[0], labels[1] = vocab - 1, 0
    actual = found(linear_logprobs(x, weight, labels, **EXTRAS), [x, weight])
    expected = found(linear_logprobs_reference(x, weight, labels, **EXTRAS), [x, weight])
    # fp32 both; sums over 262144 columns in different order, the mean of which is near 0.
    assert_same(actual, expected, 5e-5, 2e-6)


def test_gradcheck(device):
    x, weight, bias, _ = problem(3, 4, 5, device)
    labels = torch.tensor([2, IGNORE, 0], device=device)
    for kwargs in ({}, {"temperature": 0.6, "softcap": 2.0, "return_entropy": True}):

        def differentiable(x, w, b, kwargs=kwargs):
            out = linear_logprobs(x, w, labels, bias=b, **kwargs)
            return out if isinstance(out, Tensor) else out[:2]

        assert torch.autograd.gradcheck(differentiable, (x, weight, bias))


def test_products(device, products):
    """Kept logits cost three products, logits computed again four; frozen inputs and evaluation cost less."""
    x, weight, _, labels = problem(200, 8, 30, device, ignored=0.9)

    def steps(rows):
        return (rows, 8, 30), (rows, 30, 8), (30, rows, 8)

    def run(**kwargs):
        products.clear()
        out = linear_logprobs(x, weight, labels, num_valid=200, **kwargs)
        if out.requires_grad:
            out.sum().backward()
        return out

    logits, dx, dweight = steps(200)
    run()
    assert products == [logits, dx, dweight]
    run(workspace_bytes=1)
    assert products == [steps(128)[0], steps(72)[0], *steps(128), *steps(72)]
    weight.requires_grad_(False)
    run()
    assert products == [logits, dx]
    weight.requires_grad_(True)
    x.requires_grad_(False)
    loud = run()
    assert products == [logits, dweight]
    with torch.no_grad():
        quiet = run()
    assert products == [logits] and not quiet.requires_grad
    assert torch.equal(quiet, loud.detach())


@pytest.mark.parametrize(
    ("dtype", "accum_dtype", "trained", "count"),
    [
        (torch.float16, torch.float32, True, 3),
        (torch.float16, None, True, 2 * 4),  # no sum is wider than dweight
        (torch.float32, torch.float32, True, 2 * 4),
        (torch.float16, torch.float32, False, 2 * 3),  # no dweight
    ],
)
def test_logits_in_the_room_of_a_sum(device, products, dtype, accum_dtype, trained, count):
    """200 rows of 128 bytes: what an fp32 sum of dweight, 30 x 512, would take beyond dweight, holds all logits."""
    x, weight, _, labels = problem(200, 512, 30, device, dtype, ignored=0.9)
    weight.requires_grad_(trained)
    out = linear_logprobs(x, weight, labels, num_valid=200, accum_dtype=accum_dtype, workspace_bytes=1)
    out.sum().backward()
    assert len(products) == count


def test_ignored_rows_are_not_multiplied(device, poison, products):
    """24 of 200 rows are valid: 128 rows enter the products, and NaN in the others reaches nothing."""
    x, weight, _, labels = problem(200, 8, 30, device, ignored=0.0)
    labels[torch.randperm(200, device=device)[:176]] = IGNORE
    valid = labels != IGNORE
    dirty = x.detach().masked_fill(~valid[:, None], torch.nan).requires_grad_()
    actual = found(linear_logprobs(dirty, weight, labels, num_valid=24, **EXTRAS), [dirty, weight])
    assert products == [(128, 8, 30), (128, 30, 8), (30, 128, 8)]
    assert_same(actual, found(linear_logprobs(x, weight, labels, num_valid=200, **EXTRAS), [x, weight]), 1e-11, 1e-13)
    # A bound that is too low says so.
    assert linear_logprobs(x, weight, torch.zeros_like(labels), num_valid=24)[0].isnan()


def test_backward_twice(device, products):
    """The second backward computes the logits that the first wrote over again, and gives the same bits."""
    x, weight, _, labels = problem(40, 8, 30, device)
    out = linear_logprobs(x, weight, labels, num_valid=40)
    first = torch.autograd.grad(out.sum(), [x, weight], retain_graph=True)
    products.clear()
    second = torch.autograd.grad(out.sum(), [x, weight])
    assert len(products) == 3
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_entropy_alone(device):
    x, weight, _, labels = problem(9, 4, 11, device)
    actual, expected = (
        torch.autograd.grad(call(x, weight, labels, return_entropy=True).entropy.sum(), [x, weight])
        for call in (linear_logprobs, linear_logprobs_reference)
    )
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("layout", ["three_dims", "transposed", "expanded", "shifted"])
def test_layouts(device, layout):
    base = torch.randn(3, 50, 8, dtype=torch.float64, device=device, requires_grad=True)
    weight = torch.randn(8, 30, dtype=torch.float64, device=device, requires_grad=True)
    x = {
        "three_dims": lambda: base,
        "transposed": lambda: base[0, :8].t().reshape(8, 8).t(),
        "expanded": lambda: base[0, 0].expand(200, 8),
        "shifted": lambda: base[:, :-1],
    }[layout]()
    labels = some_labels(tuple(x.shape[:-1]), 30, device, ignored=0.9).to(torch.int32)
    actual = linear_logprobs(x, weight.t(), labels, **EXTRAS)
    assert all(t.shape == labels.shape for t in actual)
    expected = linear_logprobs_reference(x, weight.t(), labels, **EXTRAS)
    assert_same(found(actual, [base, weight]), found(expected, [base, weight]), 1e-10, 1e-12)


@pytest.mark.gpu  # interpreted: test_every_op, smaller
def test_deterministic(device):
    x, weight, bias, labels = problem(300, 16, 70, device, torch.float32, ignored=0.6)
    runs = [
        found(linear_logprobs(x, weight, labels, bias=bias, workspace_bytes=1, **EXTRAS), [x, weight, bias])
        for _ in range(3)
    ]
    for name, value in runs[0].items():
        assert all(torch.equal(value, run[name]) for run in runs[1:]), name


def test_label_that_is_no_class(device):
    x, weight, _, _ = problem(3, 4, 5, device, torch.float32)
    for bad in (5, -1, 2**40):
        labels = torch.tensor([0, bad, 2], device=device)
        assert linear_logprobs(x, weight, labels, num_valid=3).isnan().tolist() == [False, True, False]
        with pytest.raises(InputError, match=f"labels hold {bad}"):
            linear_logprobs_reference(x, weight, labels)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(3, dtype=torch.int64)}, "one entry per token"),
        ({"labels": torch.zeros(2)}, "class indices"),
        ({"weight": torch.randn(5, 3)}, "does not fit x"),
        ({"weight": torch.randn(5, 4).double()}, "cast one"),
        ({"bias": torch.randn(4)}, r"must be \[5\]"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"softcap": -1.0}, "softcap=-1.0"),
        ({"accum_dtype": torch.float16}, "accum_dtype"),
        ({"workspace_bytes": 0}, "workspace_bytes=0"),
        ({"num_valid": -1}, "num_valid=-1"),
    ],
)
def test_input_errors(change, message):
    call = {"x": torch.randn(2, 4), "weight": torch.randn(5, 4), "labels": torch.tensor([0, 1])} | change
    with pytest.raises(InputError, match=message):
        linear_logprobs(call.pop("x"), call.pop("weight"), call.pop("labels"), **call)


def test_cpu_path_is_the_reference(monkeypatch):
    monkeypatch.setattr(module, "use_triton", lambda x: False)
    x, weight, bias, labels = problem(5, 4, 7, "cpu")
    inputs = [x, weight, bias]
    actual = found(linear_logprobs(x, weight, labels, bias=bias, num_valid=5, temperature=2.0, **EXTRAS), inputs)
    expected = linear_logprobs_reference(x, weight, labels, bias=bias, temperature=2.0, **EXTRAS)
    assert_same(actual, found(expected, inputs), 0, 0)


def test_autocast(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    x, weight, bias, labels = problem(40, 16, 50, device, torch.float32)
    inputs = [x, weight, bias]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    with torch.autocast(device, dtype=dtype):
        out = linear_logprobs(x, weight, labels, bias=bias)
    actual, exact = found(out, inputs), found(linear_logprobs_reference(*wide[:2], labels, bias=wide[2]), wide)
    assert [actual[f"grad{i}"].dtype for i in range(3)] == [torch.float32] * 3
    for name in ("grad0", "grad1", "grad2"):
        # Inputs and logits near 8 in the low dtype: about 8 eps on every probability.
        error = (actual[name].double() - exact[name]).norm() / exact[name].norm()
        assert error < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("entropy", [False, True])
def test_compile(device, entropy):
    """Whole graph, gradients included, with the chunked ops opaque in it."""
    x, weight, bias, labels = problem(200, 16, 70, device, torch.float32, ignored=0.9)

    def call(x, weight, bias, labels):
        return linear_logprobs(
            2 * x, weight, labels, bias=bias, temperature=0.8, num_valid=110, return_entropy=entropy,
            return_logits_mean=True,
        )  # fmt: skip

    compiled = torch.compile(call, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    inputs = [x, weight, bias]
    actual = found(compiled(x, weight, bias, labels), inputs)
    expected = found(call(x, weight, bias, labels), inputs)
    assert_same(actual, expected, 1e-4 if device == "cuda" else 1e-5, 1e-5)


def test_custom_ops_say_what_they_return(device):
    x, weight, bias, labels = (t.detach() for t in problem(8, 4, 7, device, torch.float32))
    scalars = (-100, 0.0, 0.0, None, "none", False, True, True, True, True, 8, 2**20, torch.float32, True, 0.5)
    args = (x, weight, bias, labels, None, *scalars, True, True)
    torch.library.opcheck(module._forward_op, args, test_utils=("test_schema", "test_faketensor"))
    stats, one = torch.ones(8, 2, device=device), torch.ones(8, device=device)
    args = (x, weight, bias, labels, None, stats, one, one, one, *scalars, True, True, True)
    torch.library.opcheck(module._backward_op, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
@pytest.mark.parametrize("num_valid", [None, 450])
def test_no_synchronisation(num_valid):
    x, weight, _, labels = problem(1000, 128, 5000, "cuda", torch.bfloat16, ignored=0.6)
    expected = found(linear_logprobs(x, weight, labels, num_valid=num_valid, **EXTRAS), [x, weight])
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = found(linear_logprobs(x, weight, labels, num_valid=num_valid, **EXTRAS), [x, weight])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(actual, expected, 0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("workspace_bytes", [2**22, 2**29])
def test_cuda_graph(workspace_bytes):
    x, weight, _, labels = problem(1000, 128, 5000, "cuda", torch.bfloat16, ignored=0.6)

    def call():
        return found(
            linear_logprobs(x, weight, labels, num_valid=450, workspace_bytes=workspace_bytes, **EXTRAS), [x, weight]
        )

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    with torch.no_grad():
        x.normal_()
        labels.copy_(some_labels((1000,), 5000, "cuda", 0.6))
    graph.replay()
    # cuBLAS may pick other algorithms under capture, whose workspace differs.
    assert_same(captured, call(), 2e-2, 1e-3)


def peak(call) -> float:
    """MiB that the call has beyond what was there before, at most."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


@pytest.mark.gpu
def test_memory():
    """8192 x 1024 x 128256 in bf16, whose logits would be 2004 MiB: never more than a workspace of 501 of them."""
    x, weight, _, labels = problem(8192, 1024, 128256, "cuda", torch.bfloat16)
    linear_logprobs(x[:128], weight, labels[:128]).sum().backward()  # cuBLAS keeps a workspace from here on
    x.grad = weight.grad = None
    with torch.no_grad():
        assert peak(lambda: linear_logprobs(x, weight, labels, **EXTRAS)) <= 503
    weight.requires_grad_(False)
    # dx 16 MiB, and nothing of the weight's 250.
    assert peak(lambda: torch.autograd.grad(linear_logprobs(x, weight, labels, **EXTRAS)[0].sum(), x)) <= 520


@pytest.mark.gpu
def test_beyond_int32():
    """A workspace of 2.2e9 logits in one chunk, kept for backward."""
    x, weight, _, labels = problem(17152, 64, 128256, "cuda", torch.bfloat16, ignored=0.0)
    assert x.shape[0] * weight.shape[0] > 2**31
    out = linear_logprobs(x, weight, labels, workspace_bytes=2**33, return_entropy=True)
    expected = linear_logprobs_reference(x[-8:], weight, labels[-8:], return_entropy=True)
    for a, b in zip(out[:2], expected[:2], strict=True):
        torch.testing.assert_close(a[-8:], b, rtol=1e-4, atol=1e-3)
    (gradient,) = torch.autograd.grad(out.logprobs[-8:].sum() + out.entropy[-8:].sum(), x)
    (expected_gradient,) = torch.autograd.grad(expected.logprobs.sum() + expected.entropy.sum(), x)
    # dlogits and sums of 128256 of them in bf16.
    torch.testing.assert_close(gradient[-8:], expected_gradient[-8:], rtol=5e-2, atol=5e-2)
