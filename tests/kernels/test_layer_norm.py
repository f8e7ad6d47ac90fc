import functools
import importlib

import pytest
import torch
import torch.nn.functional as F

from ligermodels.errors import InputError
from ligermodels.kernels.layer_norm import (
    add_layer_norm,
    add_layer_norm_reference,
    layer_norm,
    layer_norm_reference,
)
from tests.kernels.on_gpu import assert_captures, assert_compiles, assert_never_waits
from tests.kernels.oracle import assert_as_exact, dtypes

module = importlib.import_module("ligermodels.kernels.layer_norm")
shared = importlib.import_module("ligermodels.kernels._norm")

ALMOST_FP64 = dict(rtol=1e-12, atol=1e-12)
"""Two fp64 results that differ in the order of their sums: 4500 ulp, and a thousandth of what fp32 can reach."""

SHAPES = [(65, 7), (3, 5, 129), (17, 1030)]
"""Many rows to a program, several, and one (of which columns are idle); programs get several tiles."""

FP32_SLACK = {"y": 1.5, "sum": 1.0, "dx": 1.5, "dweight": 4.0, "dbias": 4.0}
"""Of eager's error in fp32, where no last rounding hides that of the statistics. Their errors are two per row, so
that chance averages over a few rows only; the rows of dweight and dbias are summed in a tree on a GPU, but one by one
when interpreted."""

AFFINE = [("weight",), ("bias",), ()]
each_affine = pytest.mark.parametrize("affine", AFFINE, ids=lambda names: "+".join(names) or "plain")


@pytest.fixture
def narrow_is_wide(monkeypatch):
    """Rows above 64 columns take the path of rows that do not fit in registers."""
    monkeypatch.setattr(shared, "_WIDEST", (64, 64))
    monkeypatch.setattr(shared, "_WIDE", (64, 32))


def eager(x, weight, bias, *, eps=1e-5):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def eager_add(x, residual, weight, bias, **options):
    return eager(x + residual, weight, bias, **options), x + residual


def run(op, inputs, grads, **options):
    """Outputs of op and the gradients of its inputs; None inputs are passed on."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    outputs = op(*leaves, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    trained = [x for x in leaves if x is not None]
    return [*outputs, *torch.autograd.grad(outputs, trained, grads)]


def judge(op, reference, same_dtype, inputs, grads, **options):
    actual = run(op, inputs, grads, **options)
    double = [None if x is None else x.double() for x in inputs]
    exact = run(reference, double, [g.double() for g in grads], **options)
    names = ["y", "sum"][: len(grads)] + ["dx"] * len(grads)
    names += [name for name, x in zip(("dweight", "dbias"), inputs[-2:], strict=True) if x is not None]
    if actual[0].dtype == torch.float64:
        for name, a, b in zip(names, actual, exact, strict=True):
            torch.testing.assert_close(a, b, **ALMOST_FP64, msg=lambda m, name=name: f"{name}: {m}")
        return
    allowed = run(same_dtype, inputs, grads, **options)
    for name, a, b, c in zip(names, actual, allowed, exact, strict=True):
        slack = FP32_SLACK[name] if a.dtype == torch.float32 else 1.0
        assert_as_exact(a, c + slack * (b.double() - c), c, name)


def tensors(shape, dtype, device, affine=("weight", "bias")):
    """x, residual, the gradients of y and of the sum; and weight and bias, or None for either."""
    x, residual, dy, dtotal = torch.randn(4, *shape, dtype=dtype, device=device)
    given = [torch.randn(shape[-1], dtype=dtype, device=device) if n in affine else None for n in ("weight", "bias")]
    return x + 1, residual, dy, dtotal, given


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_outputs_and_every_gradient(device, poison, dtype, shape):
    x, residual, dy, dtotal, affine = tensors(shape, dtype, device)
    judge(layer_norm, layer_norm_reference, eager, [x, *affine], [dy])
    judge(add_layer_norm, add_layer_norm_reference, eager_add, [x, residual, *affine], [dy, dtotal], eps=0.5)


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_wide_rows(device, poison, narrow_is_wide, dtype):
    x, residual, dy, dtotal, affine = tensors((9, 150), dtype, device)
    judge(layer_norm, layer_norm_reference, eager, [x, *affine], [dy], eps=0.5)
    judge(add_layer_norm, add_layer_norm_reference, eager_add, [x, residual, *affine], [dy, dtotal])


@pytest.mark.parametrize("width", [2, 48, 1280, 17001, 131072])
def test_any_width(device, poison, width):
    """One tile, two in the backward, and two passes; `test_width_one` has the narrowest row of all."""
    x, residual, dy, dtotal, affine = tensors((5 if width < 2**16 else 2, width), torch.float32, device)
    judge(add_layer_norm, add_layer_norm_reference, eager_add, [x, residual, *affine], [dy, dtotal])


WIDTHS = pytest.mark.parametrize("width", [60, 150])
"""A row of one tile, and with `narrow_is_wide` one of several."""


@WIDTHS
@each_affine
def test_without_weight_or_bias(device, poison, narrow_is_wide, width, affine):
    x, residual, dy, dtotal, affine = tensors((9, width), torch.float32, device, affine)
    judge(layer_norm, layer_norm_reference, eager, [x, *affine], [dy], eps=0.5)
    judge(add_layer_norm, add_layer_norm_reference, eager_add, [x, residual, *affine], [dy, dtotal])


@WIDTHS
def test_far_from_zero(device, poison, narrow_is_wide, width):
    """Around 1000 with a deviation of 1, where mean(x^2) - mean(x)^2 has three digits left in fp32."""
    x, _, dy, _, affine = tensors((9, width), torch.float32, device)
    inputs = [x + 1000, *affine]
    actual = run(layer_norm, inputs, [dy])
    exact = run(layer_norm_reference, [t.double() for t in inputs], [dy.double()])
    # The row's mean is known to half an ulp of 1000, 3e-5, which is what x itself is rounded to.
    for a, b in zip(actual, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-3)
    square = (x + 1000).square().mean(-1) - (x + 1000).mean(-1).square()  # negative control
    assert ((square / (x + 1000).double().var(-1, correction=0) - 1).abs() > 0.01).any()


@WIDTHS
def test_rows_of_one_number(device, poison, narrow_is_wide, width):
    """No variance at all: the bias comes out, and eps alone keeps the gradient finite."""
    x = torch.full((5, width), 3.0, device=device)
    weight, bias, dy = torch.randn(3, width, device=device)
    y, dx, dw, db = run(layer_norm, [x, weight, bias], [dy.expand(5, -1)])
    torch.testing.assert_close(y, bias.expand(5, -1))
    exact = run(layer_norm_reference, [x.double(), weight.double(), bias.double()], [dy.double().expand(5, -1)])
    torch.testing.assert_close(dx.double(), exact[1], rtol=1e-5, atol=1e-3)  # terms are 1 / sqrt(eps) = 316 large
    torch.testing.assert_close(dw, torch.zeros_like(dw), rtol=0, atol=1e-3)
    torch.testing.assert_close(db, 5 * dy)


def test_width_one(device, poison):
    """y is the bias, and x has no gradient but the one through the sum."""
    x, residual, dy, dtotal, (weight, bias) = tensors((67, 1), torch.float32, device)
    y, total, dx, dresidual, dw, db = run(add_layer_norm, [x, residual, weight, bias], [dy, dtotal])
    assert torch.equal(y, bias.expand_as(y)) and torch.equal(total, x + residual)
    assert torch.equal(dx, dtotal) and torch.equal(dresidual, dtotal)
    assert torch.equal(dw, torch.zeros_like(dw))
    torch.testing.assert_close(db, dy.sum(0))


def test_norm_reads_the_rounded_sum(device):
    x, residual = torch.randn(2, 64, 512, device=device).half()
    y, total = add_layer_norm(x, residual)
    assert torch.equal(total, x + residual)
    assert (y != layer_norm(total)).float().mean() < 0.01  # of the unrounded sum, a fifth differs


@WIDTHS
def test_mixed_dtypes(device, poison, narrow_is_wide, width):
    """Autocast's mixtures: fp32 weights, and an fp32 residual stream, with half precision x."""
    x, dy = torch.randn(2, 9, width, device=device).half()
    weight, bias = torch.randn(2, width, device=device)
    residual = torch.randn(9, width, device=device)
    pair = list(torch.randn(2, 9, width, device=device))
    half, single = torch.float16, torch.float32
    norm, add = (layer_norm, layer_norm_reference), (add_layer_norm, add_layer_norm_reference)
    for (op, reference), inputs, given, expected in (
        (norm, [x, weight, bias], [dy], [half, half, single, single]),
        (norm, [x, weight.half(), bias], [dy], [half, half, half, single]),
        (add, [x, residual, weight, bias], pair, [single, single, half, single, single, single]),
    ):
        actual = run(op, inputs, given)
        exact = run(reference, [t.double() for t in inputs], [g.double() for g in given])
        assert [t.dtype for t in actual] == expected
        for a, b in zip(actual, exact, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=2e-3 if a.dtype == half else 1e-5, atol=1e-5)


def test_frozen_weights_cost_nothing(device, poison, monkeypatch):
    x, residual, dy, dtotal, (weight, bias) = tensors((65, 96), torch.float32, device)
    whole = run(add_layer_norm, [x, residual, weight, bias], [dy, dtotal])
    monkeypatch.setattr(shared, "sum_parts_kernel", None)  # calling it would raise
    leaves = [t.clone().requires_grad_() for t in (x, residual)]
    for expected, actual in zip(
        whole[2:4], torch.autograd.grad(add_layer_norm(*leaves, weight, bias), leaves, (dy, dtotal)), strict=True
    ):
        torch.testing.assert_close(actual, expected)


@WIDTHS
@pytest.mark.parametrize("trained", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_frozen(device, poison, narrow_is_wide, width, trained):
    x, _, dy, _, affine = tensors((9, width), torch.float32, device)
    whole = run(layer_norm, [x, *affine], [dy])
    leaves = [t.clone().requires_grad_(i in trained) for i, t in enumerate([x, *affine])]
    grads = torch.autograd.grad(layer_norm(*leaves), [leaves[i] for i in trained], dy)
    for i, grad in zip(trained, grads, strict=True):
        # Another specialisation of the kernel: the compiler may contract its multiply-adds otherwise.
        torch.testing.assert_close(grad, whole[1 + i], rtol=1e-6, atol=1e-5)
    stats = torch.cat([torch.rsqrt(x.var(-1, correction=0) + 1e-5), x.mean(-1)])
    wanted = [torch.float32 if i in trained else None for i in (1, 2)]
    made = shared._backward(dy, None, x, affine[0], stats, 0.0, True, 0 in trained, *wanted)
    assert [grad is not None for grad in made] == [i in trained for i in range(3)]


def test_only_the_residual_is_trained(device):
    x, residual, dy, dtotal, affine = tensors((9, 96), torch.float32, device)
    expected = run(add_layer_norm, [x, residual, *affine], [dy, dtotal])[3]
    leaf = residual.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(add_layer_norm(x, leaf, *affine), leaf, (dy, dtotal))[0], expected)


@pytest.mark.parametrize("used", [0, 1])
def test_one_output_used(device, poison, used):
    x, residual, dy, _, affine = tensors((9, 96), torch.float32, device)
    results = []
    for op in (add_layer_norm, add_layer_norm_reference):
        leaves = [t.clone().requires_grad_() for t in (x, residual, *affine)]
        results.append(torch.autograd.grad(op(*leaves)[used], leaves, dy, allow_unused=True))
    for actual, expected in zip(*results, strict=True):
        assert (actual is None) == (expected is None)
        if actual is not None:
            torch.testing.assert_close(actual, expected)


def test_many_partial_sums(device, poison, monkeypatch):
    """As many programs as on a GPU, or more: the kernel that sums their parts takes several turns."""
    monkeypatch.setattr(shared, "num_sms", lambda index: 30)
    x, _, dy, _, affine = tensors((130, 1030), torch.float32, device)
    judge(layer_norm, layer_norm_reference, eager, [x, *affine], [dy])


LAYOUTS = {
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "columns": lambda t: torch.stack([t, t], -1)[..., 0],
    "part of wider rows": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "expanded rows": lambda t: t[:1, :1].expand_as(t),
    "one expanded number": lambda t: t[0, 0, 0].expand_as(t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, poison, layout):
    make = LAYOUTS[layout]
    x, residual, dy, dtotal = (make(t) for t in torch.randn(4, 3, 5, 96, device=device))
    affine = [make(t)[0, 0] for t in torch.randn(2, 3, 5, 96, device=device)]
    for op, inputs, grads in (
        (layer_norm, [x, *affine], [dy]),
        (add_layer_norm, [x, residual, *affine], [dy, dtotal]),
    ):
        leaves = [t.detach().requires_grad_() for t in inputs]
        outputs = op(*leaves)
        actual = torch.autograd.grad(outputs, leaves, grads)
        expected = run(op, [t.contiguous() for t in inputs], [g.contiguous() for g in grads])
        for a, b in zip([*(outputs if isinstance(outputs, tuple) else [outputs]), *actual], expected, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(0, 96), (2, 0, 1)], ids=str)
def test_zero_rows(device, shape):
    x, weight, bias = torch.randn(shape, device=device), *torch.randn(2, shape[-1], device=device)
    y, dx, dw, db = run(layer_norm, [x, weight, bias], [x])
    assert y.shape == dx.shape == shape
    assert not dw.any() and not db.any()
    y, total, *_, dw, db = run(add_layer_norm, [x, x, weight, bias], [x, x])
    assert y.shape == total.shape == shape
    assert not dw.any() and not db.any()


@WIDTHS
def test_deterministic_and_runs_twice(device, narrow_is_wide, width):
    x, residual, dy, dtotal, affine = tensors((9, width), torch.float32, device)
    leaves = [t.requires_grad_() for t in (x, residual, *affine)]
    outputs = add_layer_norm(*leaves)
    first, second = (torch.autograd.grad(outputs, leaves, (dy, dtotal), retain_graph=True) for _ in range(2))
    again = torch.autograd.grad(add_layer_norm(*leaves), leaves, (dy, dtotal))
    for a, b, c in zip(first, second, again, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_double_backward_raises(device):
    x = torch.randn(3, 8, device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(layer_norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        dx.sum().backward()


@pytest.mark.parametrize("width", [5, 70])
def test_gradcheck(device, narrow_is_wide, width):
    x, residual, _, _, affine = tensors((2, width), torch.float64, device)
    leaves = [t.requires_grad_() for t in (x, residual, *affine)]
    for op in (add_layer_norm, add_layer_norm_reference):
        assert torch.autograd.gradcheck(functools.partial(op, eps=0.1), leaves, fast_mode=width > 5)
    assert torch.autograd.gradcheck(layer_norm, (leaves[0], *leaves[2:]), fast_mode=True)


def test_reference_is_the_definition():
    """And that of torch to the bit, whose weights are of the input's dtype."""
    x, weight, bias = torch.randn(7, 64).double(), *torch.randn(2, 64).double()
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight + bias
    torch.testing.assert_close(layer_norm_reference(x, weight, bias, eps=0.1), expected)
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, bias = (t.to(dtype) for t in (x, weight, bias))
        assert torch.equal(layer_norm_reference(x, weight, bias), F.layer_norm(x, (64,), weight, bias))


def test_reference_path_compiles_whole(monkeypatch):
    monkeypatch.setattr(module, "use_triton", lambda x: False)
    x, residual, dy, dtotal, affine = tensors((3, 96), torch.float32, "cpu")
    inputs = [t.requires_grad_() for t in (x, residual, *affine)]
    assert_compiles(add_layer_norm, inputs, [dy, dtotal], backend="aot_eager")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: layer_norm(x, torch.ones(7, device=x.device)), r"layer_norm: weight has shape \(7,\)"),
        (lambda x: layer_norm(x, None, torch.ones(7, device=x.device)), r"layer_norm: bias has shape \(7,\)"),
        (lambda x: layer_norm(x, None, torch.ones(8, device=x.device).long()), "bias .* torch.int64"),
        (lambda x: layer_norm(x[..., :0]), "N >= 1"),
        (lambda x: layer_norm(x.long()), "int64"),
        (lambda x: add_layer_norm(x, x[:1]), r"add_layer_norm: residual has shape \(1, 8\)"),
        (lambda x: layer_norm(x, torch.ones(8, device="meta")), "meta"),
        (lambda x: add_layer_norm(x, x, None, torch.ones(8, device="meta")), "bias .* on meta"),
    ],
)
def test_errors(device, call, message):
    with pytest.raises(InputError, match=message):
        call(torch.randn(3, 8, device=device))


def on_gpu(dtype, rows, width):
    made = [torch.randn(rows, width, dtype=dtype, device="cuda") for _ in range(4)]
    inputs = [*made[:2], *torch.randn(2, width, dtype=dtype, device="cuda")]
    return [t.detach().requires_grad_() for t in inputs], made[2:]


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("width", [96, 2048, 17001])
def test_triton_path_compiles_whole(width, dynamic):
    inputs, grads = on_gpu(torch.float32, 70, width)
    assert_compiles(add_layer_norm, inputs, grads, dynamic=dynamic)
    assert_compiles(layer_norm, [inputs[0], *inputs[2:]], grads[:1], dynamic=dynamic)


@pytest.mark.gpu
@pytest.mark.parametrize("check", [assert_captures, assert_never_waits])
@pytest.mark.parametrize("width", [1280, 17001])
def test_captured_and_never_waits(check, width):
    inputs, grads = on_gpu(torch.bfloat16, 300, width)
    check(add_layer_norm, inputs, grads)
    check(layer_norm, [inputs[0], *inputs[2:]], grads[:1])


@pytest.mark.gpu
@pytest.mark.parametrize("width", [7, 128, 768, 1280, 2048, 3584, 4096, 5120, 8192, 16384, 16385, 32768, 131072])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_tile(dtype, width):
    inputs, grads = on_gpu(dtype, 1000 if width < 32768 else 300, width)
    judge(add_layer_norm, add_layer_norm_reference, eager_add, [t.detach() for t in inputs], grads)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [8192, 65536])
def test_more_than_2_31_elements(width):
    rows = 2**31 // width + 3
    x = torch.randn(rows, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight, bias = (t.requires_grad_() for t in torch.randn(2, width, dtype=torch.bfloat16, device="cuda").unbind())
    dy = torch.zeros_like(x)
    dy[-8:] = torch.randn(8, width, device="cuda")
    y = layer_norm(x, weight, bias)
    dx, dw, db = torch.autograd.grad(y, (x, weight, bias), dy)
    expected = run(layer_norm, [x[-8:], weight, bias], [dy[-8:]])
    assert torch.equal(y[-8:], expected[0])
    assert torch.equal(dx[-8:], expected[1])
    assert not dx[:-8].any()
    torch.testing.assert_close(dw, expected[2])
    torch.testing.assert_close(db, expected[3])
