"""FP8: the quantisers give the bits of the reference, and each product has the error of its operands, and no other."""

import pytest
import torch
import torch.nn.functional as F

from ligermodels import InputError
from ligermodels.kernels.linear import fp8_matmul
from ligermodels.kernels.linear._fp8_quantize import (
    DTYPES,
    quantize_both,
    quantize_reference,
    quantize_rows,
    quantize_transposed,
    scales_of,
    tensor_scale,
    transposed,
)
from ligermodels.kernels.linear.fp8_weight import RECIPES, FP8Recipe, FP8Weight, WeightCache
from ligermodels.kernels.linear.gated_mlp import mlp_of
from ligermodels.kernels.linear.joint import make_joint
from ligermodels.kernels.linear.linear import linears
from ligermodels.kernels.linear.operand import LinearOperand
from ligermodels.kernels.linear.quantized import quantize

ROUNDING = {"e4m3": 0.0275, "e5m2": 0.055}
"""The relative error of numbers with 3 and 2 bits of mantissa is 2^-4 or 2^-3 at most, and 0.42 of that in the mean
square: 2.6 and 5.2 %; up to 5 % more with few numbers."""
ALL = {**RECIPES, "powers of two": FP8Recipe(powers_of_two=True), "dx in bf16": FP8Recipe(dx="bf16")}


def same(q, expected):
    """Bit for bit, but for the sign of a zero, and NaN in the same places."""
    return q.dtype == expected.dtype and torch.equal(q.float().nan_to_num(1e9), expected.float().nan_to_num(1e9))


def error(x, exact):
    return ((x.double() - exact).norm() / exact.norm()).item()


def make(rows, columns, device="cpu", scale=1.0):
    return (torch.randn(rows, columns) * torch.logspace(-2, 1, columns) * scale).to(device, torch.bfloat16)


@pytest.mark.parametrize("powers_of_two", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_give_the_bits_of_the_reference(device, poison, dtype, powers_of_two):
    x, options = make(37, 80, device), dict(powers_of_two=powers_of_two)
    x[3], x[5, 4], x[9, 9] = 0, float("nan"), float("-inf")
    q, scale = quantize_rows(x, dtype, **options)
    expected, of_rows = quantize_reference(x, dtype, powers_of_two)
    kept = [i for i in range(37) if i not in (5, 9)]
    assert same(q[kept], expected[kept]) and torch.equal(scale[kept], of_rows[kept])
    assert not q[3].float().any() and (q.float() * scale)[[5, 9]].isnan().all()
    if powers_of_two:
        assert (scale[kept].log2() % 1 == 0).all() and (q[kept].float().abs() <= DTYPES[dtype][1]).all()

    x, factor = make(37, 80, device), torch.rand(80, device=device)
    assert all(map(same, quantize_rows(x, dtype, factor=factor, **options),
                   quantize_reference(x.float() * factor, dtype, powers_of_two)))  # fmt: skip
    q, scale = quantize_transposed(x, dtype, **options)
    expected, of_columns = quantize_reference(x.t(), dtype, powers_of_two)
    assert q.shape == (80, 48) and same(q[:, :37], expected) and torch.equal(scale, of_columns)
    assert not q[:, 37:].float().any()
    one = tensor_scale([x, 2 * x], dtype, powers_of_two)
    assert torch.equal(one, scales_of((2 * x).abs().amax(), DTYPES[dtype][1], powers_of_two))
    by_one = (x.float() * one.reciprocal()).to(q.dtype)
    assert same(quantize_rows(x, dtype, scale=one)[0], by_one)
    assert same(quantize_transposed(x, dtype, scale=one)[0][:, :37], by_one.t())
    assert same(transposed(by_one), by_one.t())

    for given in (dict(factor=factor), {}, dict(scale=one)):
        both = quantize_both(x, dtype, **given, **options)
        by_rows = quantize_rows(x, dtype, **given, **options)
        by_columns = quantize_transposed(x, dtype, scale=given.get("scale"), **options)
        assert all(map(same, (*both[0], *both[1]), (*by_rows, *by_columns)))


def test_long_rows_many_rows_and_strided_ones(device, poison):
    long = make(2, 32784, device)
    assert all(map(same, quantize_rows(long), quantize_reference(long, "e4m3", False)))
    tall = make(300, 16, device)  # three parts of rows
    q, scale = quantize_transposed(tall)
    expected, of_columns = quantize_reference(tall.t(), "e4m3", False)
    assert same(q[:, :300], expected) and torch.equal(scale, of_columns)
    part = make(20, 96, device)[:, 32:80]
    assert all(map(same, quantize_rows(part), quantize_reference(part, "e4m3", False)))
    assert same(quantize_transposed(part)[0][:, :20], quantize_reference(part.t(), "e4m3", False)[0])
    for x in (long[:, :400], tall, part):  # several tiles of columns, several programs of rows
        (q, scale), (turned, of_columns) = quantize_both(x)
        assert all(map(same, (q, scale), quantize_reference(x, "e4m3", False)))
        expected = quantize_reference(x.t(), "e4m3", False)
        assert same(turned[:, : len(x)], expected[0]) and torch.equal(of_columns, expected[1])


def _gradients(recipe, device, joint=True, biases=True, rows=48):
    """The result, gradients and exact ones of q, k, v; each as {name: (found, exact)}."""
    torch.manual_seed(0)
    x = make(rows, 64, device).view(2, -1, 64).requires_grad_()
    weights = [torch.nn.Parameter((torch.randn(n, 64) * 0.1).to(device, torch.bfloat16)) for n in (48, 16, 32)]
    bias = [torch.nn.Parameter(torch.randn(n).to(device, torch.bfloat16)) for n in (48, 16)]
    if joint:
        make_joint(weights)
    cache = WeightCache()
    of_layers = [*bias, None] if biases else [None] * 3
    wrapped = [w if recipe is None else FP8Weight(w, recipe, cache) for w in weights]
    y = linears(x, list(map(LinearOperand, wrapped, of_layers)))
    dy = make(rows, 96, device).view(2, -1, 96)
    y.backward(dy)
    exact = [p.detach().double().requires_grad_() for p in (x, *weights, *bias)]
    parts = [F.linear(exact[0], w) + (b if biases and b is not None else 0)
             for w, b in zip(exact[1:4], [*exact[4:], None], strict=True)]  # fmt: skip
    whole = torch.cat(parts, -1)
    whole.backward(dy.double())
    found = {"y": (y.detach(), whole.detach()), "dx": (x.grad, exact[0].grad)}
    found |= {f"dw{i}": (w.grad, e.grad) for i, (w, e) in enumerate(zip(weights, exact[1:4], strict=True))}
    return found | (
        {f"db{i}": (b.grad, e.grad) for i, (b, e) in enumerate(zip(bias, exact[4:], strict=True))} if biases else {}
    )


@pytest.mark.parametrize("name", ALL)
def test_each_product_has_the_error_of_its_operands(device, name):
    recipe, plain = ALL[name], _gradients(None, device)
    for what, (found, exact) in _gradients(recipe, device).items():
        product = {"y": "forward", "dx": "dx"}.get(what, "dw")
        bound = error(*plain[what]) + 2e-4
        if not what.startswith("db") and getattr(recipe, product) == "fp8":
            other = ROUNDING["e4m3" if what == "y" else recipe.grad_dtype]
            bound = 1.25 * (ROUNDING["e4m3"] ** 2 + other**2) ** 0.5  # the largest columns, few numbers, decide
            assert error(found, exact) > 4 * error(*plain[what])  # it is in FP8
        assert error(found, exact) <= bound, (what, error(found, exact), bound)


def test_products_are_those_of_the_dequantised_numbers(device):
    """In fp64, and so up to the rounding of the result to bf16, and of the sums; dx is exact in the weight that y has
    read. A Hopper GPU aligns the terms of a sum to the largest and keeps some 14 bits: DeepSeek-V3 report, 3.3.2."""
    x, w, dy = make(40, 64, device), make(48, 64, device, 0.1), make(40, 48, device)
    x.requires_grad_()
    weight = torch.nn.Parameter(w)
    y = linears(x, [LinearOperand(FP8Weight(weight, RECIPES["rowwise"]))])
    y.backward(dy)

    def numbers(t):
        q, scale = quantize_reference(t, "e4m3", False)
        return q.double() * scale.double()

    of_w = numbers(w)
    scale = quantize_reference(w, "e4m3", False)[1].view(-1)
    of_dy = numbers(dy.float() * scale) / scale.double()
    for found, a, b in (
        (y, numbers(x), of_w.t()), (x.grad, of_dy, of_w), (weight.grad, numbers(dy.t()), numbers(x.t()).t()),
    ):  # fmt: skip
        exact, terms = a @ b, a.abs() @ b.abs()
        assert ((found.double() - exact).abs() / (2**-8 * exact.abs() + 2**-13 * terms)).amax() <= 1


def test_separate_weights_have_the_bits_of_joint_ones(device):
    for recipe in (RECIPES["rowwise"], RECIPES["tensorwise"]):
        joint, separate = _gradients(recipe, device), _gradients(recipe, device, joint=False)
        assert all(torch.equal(joint[what][0], separate[what][0]) for what in joint)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("recompute", [False, True])
def test_an_mlp(device, gated, recompute):
    torch.manual_seed(0)
    x = make(64, 32, device).requires_grad_()
    first = [torch.nn.Parameter((torch.randn(64, 32) * 0.1).to(device, torch.bfloat16)) for _ in range(1 + gated)]
    last = torch.nn.Parameter((torch.randn(32, 64) * 0.1).to(device, torch.bfloat16))
    recipe = RECIPES["rowwise"]

    def run(wrap):
        for p in (x, *first, last):
            p.grad = None
        operands = [LinearOperand(wrap(w)) for w in (*first, last)]
        options = dict(gated=gated, activation="silu" if gated else "gelu", recompute=recompute)
        y = mlp_of(x, operands[:-1], operands[-1], workspace_bytes=1, **options)
        y.backward(torch.ones_like(y))
        return [y.detach(), *(p.grad for p in (x, *first, last))]

    plain, low = run(lambda w: w), run(lambda w: FP8Weight(w, recipe))
    for a, b in zip(low, plain, strict=True):
        assert 0.01 < error(a, b.double()) < 0.11  # four roundings of 2.7 % one after the other, and their sum


def test_weights_that_are_frozen_in_fp8_are_multiplied_as_they_are(device):
    x, weight = make(72, 64, device).requires_grad_(), quantize(make(48, 64, device, 0.1).float(), "fp8")
    y = linears(x, [LinearOperand(FP8Weight(weight, RECIPES["rowwise"]))])
    dy = make(72, 48, device)
    y.backward(dy)
    exact = weight.dequantize(torch.float64)
    assert error(y, x.detach().double() @ exact.t()) <= ROUNDING["e4m3"]
    assert error(x.grad, dy.double() @ exact) <= ROUNDING["e4m3"]
    few = x.detach()[:64]  # without a gradient: not quantised
    plain = linears(few, [LinearOperand(weight)])
    assert torch.equal(linears(few, [LinearOperand(FP8Weight(weight, RECIPES["rowwise"]))]), plain)


def test_zeros_and_no_rows(device):
    weight = torch.nn.Parameter(make(48, 64, device))
    x = torch.zeros(16, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    y = linears(x, [LinearOperand(FP8Weight(weight, RECIPES["rowwise"]))])
    y.backward(torch.zeros_like(y))
    assert not y.any() and not x.grad.any() and not weight.grad.any()
    weight.grad = None
    none = x.detach()[:0].requires_grad_()
    y = linears(none, [LinearOperand(FP8Weight(weight, RECIPES["tensorwise"]), None)])
    y.sum().backward()
    assert y.shape == (0, 48) and none.grad.shape == (0, 64) and not weight.grad.any()


def test_nan_and_infinity_are_not_lost(device):
    for value in (float("nan"), float("inf")):
        for recipe, rows in ((RECIPES["rowwise"], [2]), (RECIPES["tensorwise"], range(20))):
            x = make(20, 64, device)
            x[2, 5] = value
            weight = torch.nn.Parameter(make(48, 64, device))
            y = linears(x.requires_grad_(), [LinearOperand(FP8Weight(weight, recipe))])
            assert y[list(rows)].isnan().all() and y.isfinite().all(1).sum() == 20 - len(rows)


def test_what_cannot_be_computed_is_refused(device):
    weight = torch.nn.Parameter(make(48, 64, device))
    with pytest.raises(InputError, match="bfloat16"):
        linears(make(80, 64, device).float(), [LinearOperand(FP8Weight(weight, RECIPES["rowwise"]))])
    narrow = torch.nn.Parameter(make(40, 64, device))
    with pytest.raises(InputError, match="multiples of 16"):
        linears(make(80, 64, device), [LinearOperand(FP8Weight(narrow, RECIPES["rowwise"]))])
    with pytest.raises(InputError, match="scaling='blockwise'"):
        FP8Recipe("blockwise")
    with pytest.raises(InputError, match="leave the recipe out"):
        FP8Recipe(forward="bf16", dx="bf16", dw="bf16")
    for wrong in ("forward", ("forward", "dy")):
        with pytest.raises(InputError, match="expected a tuple of forward, dx, dw"):
            FP8Recipe(fast_accumulation=wrong)


@pytest.mark.parametrize("fast", [(), ("forward", "dx"), ("dw",)], ids=str)
def test_the_named_products_are_added_fast(device, monkeypatch, fast):
    """All three have other sizes, by which the calls are known."""
    weight, x = torch.nn.Parameter(make(48, 64, device)), make(80, 64, device).requires_grad_()
    calls, multiply = {}, torch._scaled_mm

    def spy(a, b, *args, use_fast_accum, **options):
        calls[a.shape[0], b.shape[1]] = use_fast_accum
        return multiply(a, b, *args, use_fast_accum=use_fast_accum, **options)

    monkeypatch.setattr(torch, "_scaled_mm", spy)
    y = linears(x, [LinearOperand(FP8Weight(weight, FP8Recipe(fast_accumulation=fast)))])
    y.backward(make(80, 48, device))
    sizes = {"forward": (80, 48), "dx": (80, 64), "dw": (48, 64)}
    assert calls == {size: product in fast for product, size in sizes.items()}


@pytest.mark.parametrize("as_mlp", [False, True])
def test_dy_is_quantised_by_rows_where_dx_is_needed(device, monkeypatch, as_mlp):
    """x needs no gradient where a first layer reads frozen embeddings. The gradients of weights are the same bits."""
    torch.manual_seed(0)
    sizes = ((64, 32), (64, 32), (32, 64)) if as_mlp else ((48, 32), (16, 32))
    weights = [torch.nn.Parameter((torch.randn(size) * 0.1).to(device, torch.bfloat16)) for size in sizes]
    operands = [LinearOperand(FP8Weight(weight, RECIPES["rowwise"])) for weight in weights]
    frozen, calls, quantize_both = make(80, 32, device), [], fp8_matmul.quantize_both
    monkeypatch.setattr(fp8_matmul, "quantize_both", lambda *a, **named: calls.append(1) or quantize_both(*a, **named))

    def check(x, times, first=0):
        for n, weight in enumerate(weights):
            weight.grad = None
            weight.requires_grad_(n >= first)
        calls.clear()
        y = mlp_of(x, operands[:-1], operands[-1], gated=True, activation="silu") if as_mlp else linears(x, operands)
        y.backward(torch.ones_like(y))
        assert len(calls) == times
        return [weight.grad for weight in weights[first:]]

    expected = check(frozen.clone().requires_grad_(), 1 + as_mlp)
    assert all(map(torch.equal, check(frozen, int(as_mlp)), expected)), "gate and up of an MLP need dh"
    assert torch.equal(check(frozen, 0, first=len(weights) - 1)[0], expected[-1])


def test_strided_inputs_and_gradients(device):
    weight = torch.nn.Parameter(make(48, 64, device))

    def run(x, dy):
        x, weight.grad = x.detach().requires_grad_(), None
        y = linears(x, [LinearOperand(FP8Weight(weight, RECIPES["rowwise"]))])
        y.backward(dy)
        return y.detach(), x.grad, weight.grad

    plain, dy = make(80, 64, device), make(1, 48, device).expand(80, 48)
    expected = run(plain, dy.contiguous())
    for x in (torch.cat([plain, plain], 1)[:, :64], plain.t().contiguous().t()):
        assert all(map(torch.equal, run(x, dy), expected))
