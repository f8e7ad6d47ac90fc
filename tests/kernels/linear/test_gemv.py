"""Linear layers of a few rows, without gradients."""

import pytest
import torch
import torch.nn.functional as F

import ligermodels.kernels.linear._gemv as gemv_file
from ligermodels.kernels import gated_mlp
from ligermodels.kernels._math import ACTIVATIONS
from ligermodels.kernels.linear import operand
from ligermodels.kernels.linear._gemv import MAX_ROWS, gemv
from ligermodels.kernels.linear.linear import matmul
from ligermodels.kernels.linear.operand import kernel_of
from tests.kernels.ops.mlp import joint_linear, linear
from tests.kernels.seen import Seen


def use_gemv(x, weights, biases=(None,), **more):
    return kernel_of(x, weights, biases, **more) == "gemv"


ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Of the result, once."""
SUMS = 4e-6
"""Of the sums in fp32, whose terms are 30 together, relative to the largest result, or to 1."""


SIZES = (12352, 2560), (4096, 4096), (2560, 9216)
"""For a GPU."""


def operands(device, dtype, n=9, k=96, rows=1):
    """x [rows, k], two weights [n, k] and two biases [n]."""
    shapes = (rows, k), (n, k), (n, k), (n,), (n,)
    scales = 1, k**-0.5, k**-0.5, 1, 1
    return [(torch.randn(shape) * scale).to(device, dtype) for shape, scale in zip(shapes, scales, strict=True)]


def assert_close(found, exact, dtype, device):
    on_cpu = device == "cpu" and dtype != torch.float32  # the interpreter truncates where a GPU rounds
    allowed = ROUNDING[dtype] * (2 if on_cpu else 1) * exact.abs() + SUMS * exact.abs().max().clamp(min=1)
    assert found.dtype == dtype and found.shape == exact.shape
    assert ((found.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(("n", "k"), [(9, 96), (2, 1100), (1, 2048), (1, 8200)])
@pytest.mark.parametrize("many", [1, 8192])
@pytest.mark.parametrize("rows", range(1, MAX_ROWS + 1))
def test_products_are_those_of_fp64(device, monkeypatch, dtype, n, k, many, rows):
    """Of weights with gaps between their rows, which hold NaN."""
    monkeypatch.setattr(gemv_file, "_MANY", many)
    x, gate, up, b1, b2 = operands(device, dtype, n, k, rows)
    exact = [t.double() for t in (x, gate, up, b1, b2)]
    gaps = torch.full((n, 4), float("nan"), device=device, dtype=dtype)
    gate, up = (torch.cat([w, gaps], 1)[:, :k] for w in (gate, up))
    assert_close(gemv(x, gate), F.linear(*exact[:2]), dtype, device)
    assert_close(gemv(x, gate, b1), F.linear(*exact[:2], exact[3]), dtype, device)
    none = None, None
    for biases, exact_biases, activation in ((none, none, "silu"), ((b1, b2), exact[3:], "gelu_tanh")):
        h = gemv(x, gate, biases[0], up=up, up_bias=biases[1], activation=activation)
        z, u = (F.linear(exact[0], w, b) for w, b in zip(exact[1:3], exact_biases, strict=True))
        assert_close(h, ACTIVATIONS[activation](z) * u, dtype, device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n, k", [(9, 1100), *(pytest.param(*s, marks=pytest.mark.gpu) for s in SIZES)])
def test_rows_with_any_strides(device, dtype, n, k):
    """Strided x, an x of three dims, and a result that is columns of a buffer."""
    x, gate, up, b1, b2 = operands(device, dtype, n, k, MAX_ROWS)
    z, u = (F.linear(x.double(), w.double(), b.double()) for w, b in ((gate, b1), (up, b2)))
    buffer = torch.randn(MAX_ROWS, 2 * n, device=device).to(dtype)
    for rows in range(2, MAX_ROWS + 1):
        found = buffer.clone()
        gemv(x.t().contiguous().t()[:rows], gate, b1, found[:rows, 3 : n + 3])
        assert_close(found[:rows, 3 : n + 3], z[:rows], dtype, device)
        found[:rows, 3 : n + 3] = buffer[:rows, 3 : n + 3]
        assert torch.equal(found, buffer)
        h = gemv(x[None, :rows], gate, b1, up=up, up_bias=b2, activation="silu")
        assert_close(h[0], F.silu(z[:rows]) * u[:rows], dtype, device)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_gated_mlp_of_few_rows_is_two_launches_and_a_layer_one(device, monkeypatch, rows, separate):
    """Where the intermediate size is not that of x too: the GLU with both weights, and the product that reads it."""
    launched = []
    monkeypatch.setattr(gemv_file, "launch", lambda kernel, *rest, **more: launched.append(kernel.fn.__name__))
    x, gate, up, b1, b2 = operands(device, torch.bfloat16, 40, rows=rows)
    down = up.t().contiguous()
    with torch.no_grad():
        if separate:
            gated_mlp(x, (gate, up), down, (b1, b2), x[0])
        else:
            gated_mlp(x, torch.cat([gate, up]), down, torch.cat([b1, b2]), x[0])
        matmul(x, gate)
    assert launched == ["_gemv_kernel"] * 3


@pytest.mark.parametrize("layout", ["separate", "with gaps", "joint"])
def test_on_a_cpu_with_amx_products_are_of_matrix_and_vector(monkeypatch, without_triton, poison, layout):
    monkeypatch.setattr(operand, "_has_amx", lambda: True)
    x, gate, up, b1, b2 = operands("cpu", torch.bfloat16, n=40, k=640)
    exact = [F.linear(x.double(), w.double(), b.double()) for w, b in ((gate, b1), (up, b2))]
    down, weights, biases = torch.randn(7, 40).bfloat16(), [gate, up], [b1, b2]
    if layout == "with gaps":
        weights[0] = torch.cat([gate, gate[:, :8]], 1)[:, :640]
    elif layout == "joint":
        weights, biases = [torch.cat(weights)], [torch.cat(biases)]
    with torch.no_grad(), Seen() as seen:
        z = joint_linear(x[None], weights, biases)
        y = gated_mlp(x[None], *((weights, down, biases) if len(weights) > 1 else (weights[0], down, biases[0])))
    products = [name for name in seen.names if name in ("mv", "addmv", "mm", "addmm", "linear", "matmul")]
    assert products == ["addmv"] * len(weights) * 2 + ["mv"]
    assert_close(z[0], torch.cat(exact, 1), x.dtype, "cpu")
    h = (F.silu(z[0, :, :40].float()) * z[0, :, 40:].float()).bfloat16()
    assert_close(y[0], F.linear(h.double(), down.double()), x.dtype, "cpu")
    assert use_gemv(x, [gate]) and not use_gemv(x.repeat(2, 1), [gate])
    monkeypatch.setattr(operand, "_has_amx", lambda: False)
    assert not use_gemv(x, [gate])


def test_a_bias_that_alone_is_trained_gets_its_gradient(device):
    x, weight, _, bias, _ = operands(device, torch.float32)
    bias.requires_grad_()
    linear(x, weight, bias).sum().backward()
    assert torch.equal(bias.grad, torch.ones_like(bias))
    bias.grad = None
    gated_mlp(x, (weight, weight), weight.t().contiguous(), (bias, None)).sum().backward()
    assert bias.grad is not None and bias.grad.abs().max() > 0


def test_what_it_takes(device):
    x, weight, _, bias, _ = operands(device, torch.bfloat16)
    assert use_gemv(x, [weight]) and use_gemv(x, [weight], [bias]) and use_gemv(x, [weight], [None])
    assert use_gemv(x[:, :50], [weight], columns=96) and not use_gemv(x[:, :50], [weight])
    for wrong in (bias.repeat_interleave(2)[::2], bias[:1], bias[:1].expand(9), bias.float(), bias[:, None]):
        assert not use_gemv(x, [weight], [wrong])
    subclass = weight.as_subclass(type("Other", (torch.Tensor,), {}))
    for wrong in (weight.float(), weight.t().contiguous().t(), weight[:, 1:], weight[0], subclass):
        assert not use_gemv(x, [wrong])
    several, half = x.repeat(2, 1), weight.new_empty(4096, 1032)
    assert use_gemv(several, [weight]) and use_gemv(x.float(), [weight.float()])
    assert not use_gemv(several.float(), [weight.float()])
    for k, rows, fits in ((1024, 1, True), (1024, 2, True), (1024, 3, False), (1032, 3, True)):
        assert use_gemv(x.new_empty(rows, k), [half[:, :k]] * 2, [None] * 2) == fits
    assert use_gemv(x.new_empty(3, 1024), [half[:, :1024]])
    for wrong in (x.repeat(MAX_ROWS + 1, 1), x[:0]):
        assert not use_gemv(wrong, [weight])
    assert not use_gemv(x.double(), [weight.double()])
    assert torch.func.vmap(lambda row: torch.tensor(use_gemv(row, [weight])))(x).tolist() == [False]
    weight.requires_grad_()
    assert not use_gemv(x, [weight])
    with torch.no_grad():
        assert use_gemv(x, [weight])
        with torch.autocast(device, torch.bfloat16):
            assert not use_gemv(x, [weight])
