"""Weights of int8, fp8 and int4: what they hold, and products that read them, against fp64."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from ligermodels.kernels import gated_mlp, gated_mlp_reference
from ligermodels.kernels._math import ACTIVATIONS
from ligermodels.kernels.linear import _gemv as gemv, _int4_row as int4_row, quantized
from ligermodels.kernels.linear._int4_row import Tile
from ligermodels.kernels.linear.linear import linears
from ligermodels.kernels.linear.operand import LinearOperand, choose_mlp, kernel_of
from ligermodels.kernels.linear.quantized import (
    FORMATS,
    dequantize_reference,
    quantize,
    quantized_glu,
    quantized_linear,
)
from tests.kernels.linear.test_gemv import assert_close

KINDS = list(FORMATS)


def weights(device, kind, sizes, k, scale=1.0):
    return [quantize((torch.randn(n, k) * scale * k**-0.5).to(device), kind) for n in sizes]


def exact(weight):
    return dequantize_reference(weight, torch.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [128, 200, 1])
def test_a_weight_is_within_half_a_step(device, kind, k):
    weight = torch.randn(7, k, dtype=torch.float64)
    weight[2] = 0
    weight[3] *= 1e-6
    found = quantize(weight.to(device, torch.float32), kind)
    assert found.shape == (7, k) and found.dtype == torch.float32
    error = (exact(found).cpu() - weight).abs()
    parts = F.pad(weight, (0, -k % 128)).view(7, -1, 128) if kind == "int4" else weight[:, None]
    largest = parts.abs().amax(-1, keepdim=True).expand_as(parts).reshape(7, -1)[:, :k]
    # Half a step; int4 has 8 of them to the largest, and 7 to what has the other sign.
    allowed = {
        "int8": largest / 254,
        "fp8": weight.abs() / 16 + largest / 448 / 2**9,
        "int4": largest * (1 / 8 + 2**-8),
    }[kind]
    assert (error <= allowed * 1.001).all() and (exact(found)[2] == 0).all()
    assert error.square().mean() <= {"int8": 1e-4, "fp8": 2e-3, "int4": 0.016}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_dequantised_to_the_bit(device, kind):
    (weight,) = weights(device, kind, [5], 1300)
    for dtype in (torch.float32, torch.float16, torch.float64):
        out = torch.empty(5, 1300, dtype=dtype, device=device)
        assert weight.dequantize(out=out) is out
        assert torch.equal(out, dequantize_reference(weight, dtype)) and torch.equal(weight.dequantize(dtype), out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n, k", [(9, 96), (3, 1100)])
def test_one_row_is_that_of_fp64(device, kind, dtype, n, k):
    gate, up = weights(device, kind, (n, n), k)
    x, b1, b2 = (torch.randn(size, device=device).to(dtype) for size in ((1, k), n, n))
    for biases in ((None, None), (b1, b2)):
        exact_biases = [None if b is None else b.double() for b in biases]
        y = [F.linear(x.double(), exact(w), b) for w, b in zip((gate, up), exact_biases, strict=True)]
        assert_close(quantized_linear(x, gate, biases[0]), y[0], dtype, device)
        h = quantized_glu(x, gate, up, *biases, activation="silu")
        assert_close(h, ACTIVATIONS["silu"](y[0]) * y[1], dtype, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("k, tile", [
    (700, Tile(2, 1, 1)), (512, Tile(4, 2, 2, registers=128)), (512, Tile(8, 4, 1)),
    (700, Tile(1, 1, 9)), (700, Tile(8, 1, 1)),
], ids=str)  # fmt: skip
def test_tiles_of_one_row_of_int4_agree(device, monkeypatch, k, tile, dtype):
    gate, up = weights(device, "int4", (19, 19), k)
    x = torch.randn(1, k, device=device).to(dtype)
    monkeypatch.setattr(int4_row, "_tile", lambda *_: tile)
    wanted = x.double() @ exact(gate).T
    assert_close(quantized_linear(x, gate), wanted, dtype, device)
    found = quantized_glu(x, gate, up, None, None, activation="silu")
    assert_close(found, ACTIVATIONS["silu"](wanted) * (x.double() @ exact(up).T), dtype, device)


def test_words_that_are_not_aligned(device):
    (weight,) = weights(device, "int4", [9], 256)
    x, memory = (
        torch.randn(1, 256, device=device),
        torch.empty(weight.packed.numel() + 1, dtype=torch.int32, device=device),
    )
    packed = memory[1:].view_as(weight.packed).copy_(weight.packed)
    wanted = quantized_linear(x, weight)
    assert torch.equal(quantized_linear(x, dataclasses.replace(weight, packed=packed)), wanted)


@pytest.mark.parametrize("tile", [(16, 1, 4, 2), (32, 4, 4, 3), (16, 2, 2, 4)], ids=str)
@pytest.mark.parametrize("k", [512, 640, 700])
def test_tiles_of_few_rows_of_int4_agree(device, monkeypatch, tile, k):
    (weight,) = weights(device, "int4", [41], k)
    x = torch.randn(3, k, device=device)
    monkeypatch.setattr(quantized, "_int4_tile", lambda *_: tile)
    assert_close(quantized_linear(x, weight), x.double() @ exact(weight).T, torch.float32, device)


@pytest.mark.parametrize(("rows", "k"), [(2, 512), (17, 300), (17, 512)])
@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_are_those_of_the_dequantised_weight(device, kind, rows, k):
    n = 37
    (weight,) = weights(device, kind, [n], k)
    bias = torch.randn(n, device=device)
    x = torch.randn(rows, 2 * k, device=device)[:, ::2]
    assert_close(quantized_linear(x, weight, bias), x.double() @ exact(weight).T + bias, torch.float32, device)
    low = x.to(torch.bfloat16 if device == "cuda" else torch.float16)  # the interpreter has no bf16 dot
    wanted = low.double() @ exact(weight).T
    found = quantized_linear(low, weight)
    assert found.dtype == low.dtype
    assert (found.double() - wanted).abs().max() <= 2**-8 * wanted.abs().max()


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_side_by_side(device, kind, rows, monkeypatch):
    parts = weights(device, kind, (6, 4), 130)
    whole = torch.cat([w.packed for w in parts]), torch.cat([w.scale for w in parts])
    joint = [
        dataclasses.replace(w, packed=packed, scale=scale)
        for w, packed, scale in zip(parts, whole[0].split((6, 4)), whole[1].split((6, 4)), strict=True)
    ]
    x, biases = torch.randn(rows, 130, device=device), [torch.randn(6, device=device), None]
    wanted = torch.cat([x.double() @ exact(w).T for w in parts], 1)
    launches = []
    for where in (gemv, int4_row, quantized):
        real = where.launch
        monkeypatch.setattr(where, "launch", lambda *a, real=real, **k: launches.append(a[0]) or real(*a, **k))
    for given, count in ((parts, 2), (joint, 1)):
        launches.clear()
        assert_close(linears(x, list(map(LinearOperand, given))), wanted, torch.float32, device)
        assert len(launches) == count
    wanted[:, :6] += biases[0]
    gaps = biases[0].repeat_interleave(2)[::2]  # with gaps between its numbers
    for bias in (biases[0], gaps):
        assert_close(linears(x, list(map(LinearOperand, joint, [bias, None]))), wanted, torch.float32, device)


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [True, False])
def test_the_mlp(device, kind, rows, packed):
    gate_up, down = weights(device, kind, (12, 5), 128)[0], weights(device, kind, [5], 6)[0]
    first = gate_up if packed else gate_up.split(2)
    x = torch.randn(1, rows, 128, device=device)
    x64 = x.double().requires_grad_()
    wanted = gated_mlp_reference(x64, exact(gate_up), exact(down))
    assert_close(gated_mlp(x, first, down), wanted, torch.float32, device)
    dy = torch.randn_like(wanted)
    (found,) = torch.autograd.grad(gated_mlp(x.requires_grad_(), first, down), x, dy.float())
    torch.testing.assert_close(found.double(), torch.autograd.grad(wanted, x64, dy)[0], rtol=1e-4, atol=1e-5)


def test_what_it_takes(device):
    (weight,) = weights(device, "int8", [4], 128)
    x = torch.randn(64, 128, device=device)
    assert kernel_of(x, [weight], [None]) == "low_bit"
    for other in (x.repeat(2, 1), x[:0], x.double()):
        assert kernel_of(other, [weight], [None]) == "matmul"
    assert kernel_of(x, [weight, weight.dequantize()], [None, None]) == "matmul"
    (gate_up,) = weights(device, "int8", [256], 128)
    for rows, kernel in ((1, "low_bit"), (2, "op")):
        assert choose_mlp(x[:rows], [LinearOperand(gate_up)], LinearOperand(weight), gated=True) == kernel
    with torch.autocast(device, torch.bfloat16):
        assert kernel_of(x, [weight], [None]) == "matmul"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n, k", [(4096, 4096), (1024, 14336), (2048, 1536)])
def test_sizes_of_models(kind, rows, n, k):
    (weight,) = weights("cuda", kind, [n], k)
    x = torch.randn(rows, k, device="cuda").bfloat16()
    wanted = x.double() @ exact(weight).T
    error = (quantized_linear(x, weight).double() - wanted).abs()
    assert (error <= 2**-8 * (wanted.abs() + 0.1)).all()
