"""MXFP4: the bits of transformers' dequantisation, the nearest value, and layers and experts over such weights."""

import dataclasses
import itertools

import pytest
import torch

from ligermodels import InputError
from ligermodels.kernels.experts.experts import experts_of
from ligermodels.kernels.linear import mxfp4
from ligermodels.kernels.linear.linear import linears
from ligermodels.kernels.linear.mxfp4 import VALUES, MXFP4Weight, dequantize_mxfp4_reference, quantize_mxfp4
from ligermodels.kernels.linear.operand import Adapter, LinearOperand
from tests.kernels.on_gpu import large

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def every_weight(device="cpu"):
    """(blocks, scales) with each byte of two values under each scale but NaN."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(1, 16, 1, 16).expand(255, 16, 1, 16)
    return codes, torch.arange(255, dtype=torch.uint8, device=device).view(255, 1, 1).expand(255, 16, 1)


def random_weight(*shape, device="cpu", scales=(118, 124)):
    """Of any codes, so that no quantiser is needed."""
    *rows, columns = shape
    blocks = torch.randint(0, 256, (*rows, columns // 32, 16), dtype=torch.uint8)
    s = torch.randint(*scales, (*rows, columns // 32), dtype=torch.uint8)
    return MXFP4Weight.of_blocks(blocks.to(device), s.to(device), torch.float32)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_value_is_that_of_transformers(device, poison, dtype):
    pytest.importorskip("accelerate")
    convert = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    wanted = convert(*every_weight(), dtype=dtype).mT.to(device)
    weight = MXFP4Weight.of_blocks(*every_weight(device))
    assert same_bits(dequantize_mxfp4_reference(weight, dtype), wanted)
    if dtype != torch.bfloat16 or device == "cuda":  # interpreted, subnormal bf16 is truncated
        assert same_bits(weight.dequantize(dtype), wanted)
    exact = torch.tensor(VALUES, dtype=torch.float64) * 2.0 ** (torch.arange(255, dtype=torch.float64)[:, None] - 127)
    first = torch.arange(16)  # the low bits are the first of two
    found = dequantize_mxfp4_reference(weight, torch.float64).view(255, 256, 2).cpu()
    limit = torch.finfo(torch.float32).max
    expected = torch.where(exact.abs() > limit, exact.sign() * torch.inf, exact)
    assert torch.equal(found[:, first, 0], expected) and torch.equal(found[:, first * 16, 1], expected)


@pytest.mark.parametrize("shape", [(1, 32), (3, 96), (2, 5, 64), (300, 32)], ids=str)
def test_the_kernel_gives_the_bits_of_the_reference(device, poison, shape, monkeypatch):
    """Also of chunks of the CPU path, and of 255, which is NaN."""
    weight = random_weight(*shape, device=device)
    weight.scale[0, 0] = 255
    for dtype in (torch.float32, torch.float16, torch.float64) + (torch.bfloat16,) * (device == "cuda"):
        wanted = dequantize_mxfp4_reference(weight, dtype)
        assert wanted.view(-1, shape[-1])[0, :32].isnan().all() and wanted.isnan().sum() == 32
        found = weight.dequantize(dtype)
        assert found.shape == shape and torch.equal(found.nan_to_num(), wanted.nan_to_num())
        assert torch.equal(found.isnan(), wanted.isnan())
        out = torch.empty(shape, dtype=dtype, device=device)
        assert weight.dequantize(out=out) is out and torch.equal(out.nan_to_num(), wanted.nan_to_num())
    monkeypatch.setattr(mxfp4, "_CHUNK", 64)
    monkeypatch.setattr(mxfp4, "use_triton", lambda x: False)
    assert torch.equal(weight.dequantize(torch.float32).nan_to_num(), dequantize_mxfp4_reference(weight).nan_to_num())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_weight_becomes_the_nearest_value(device, dtype, monkeypatch):
    weight = (torch.randn(7, 96) * torch.logspace(-3, 3, 96)).to(device, dtype)
    weight[2] = 0
    weight[3] *= 1e-4
    found = quantize_mxfp4(weight)
    assert found.options == ("mxfp4", (7, 96), dtype, 32) and found.packed.shape == (7, 48)
    blocks = weight.double().cpu().view(7, 3, 32)  # a GPU's powers of two are not exact
    largest = blocks.abs().amax(-1, keepdim=True)
    exponent = torch.where(largest > 0, largest, 2.0**-125).frexp().exponent.double() - 3
    assert torch.equal(found.scale.double().cpu(), exponent.squeeze(-1) + 127)
    grid = torch.tensor(VALUES, dtype=torch.float64) * 2.0 ** exponent[..., None]
    errors = (grid - blocks[..., None]).abs()
    got = dequantize_mxfp4_reference(found, torch.float64).cpu().view(7, 3, 32)
    assert torch.equal((got - blocks).abs(), errors.amin(-1))
    monkeypatch.setattr(mxfp4, "_CHUNK", 96)
    again = quantize_mxfp4(weight)
    assert torch.equal(again.packed, found.packed) and torch.equal(again.scale, found.scale)


def test_ties_go_to_the_even_code_and_large_numbers_to_six(device):
    scaled = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.9, -0.25, -0.75, -1.25, -5.0, -7.9]
    wanted = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -0.0, -1.0, -1.0, -4.0, -6.0]
    numbers = torch.tensor([*scaled, *[4.0] * 19], device=device)[None]
    for factor in (1.0, 2.0**-100, 2.0**120):
        found = quantize_mxfp4(numbers * factor).dequantize(torch.float32)[0, : len(wanted)] / factor
        assert torch.equal(found.cpu(), torch.tensor(wanted))
        assert torch.equal(found.signbit().cpu(), torch.tensor(wanted).signbit())


def test_what_was_dequantised_is_brought_back(device):
    """All values that are finite; a block of small ones alone gets another scale."""
    codes, scales = (x[:252] for x in every_weight(device))
    for mask in (255, 0x9B):  # all, and those up to 1.5
        weight = MXFP4Weight.of_blocks(codes & mask, scales)
        values = weight.dequantize(torch.float32)
        again = quantize_mxfp4(values)
        assert torch.equal(again.dequantize(torch.float32), values)
        assert torch.equal(again.scale, weight.scale) is (mask == 255)
        assert torch.equal(quantize_mxfp4(values.bfloat16()).packed, again.packed)


def test_stacks_groups_and_selected_experts(device):
    parts = [random_weight(4, 64, device=device, scales=(100 + 8 * i, 108 + 8 * i)) for i in range(3)]
    stack, expected = MXFP4Weight.stack(parts), torch.cat([part.dequantize() for part in parts])
    assert torch.equal(stack.dequantize(), expected)
    grouped = stack.in_groups(3)
    assert torch.equal(grouped.dequantize(), expected.view(3, 4, 64))
    index = torch.tensor([2, 0, 2, 1], device=device)
    assert torch.equal(grouped.select(index).dequantize(), expected.view(3, 4, 64)[index])
    for one, part in zip(stack.split(3), parts, strict=True):
        assert torch.equal(one.dequantize(), part.dequantize())
    assert torch.equal(MXFP4Weight(*stack.options, *stack.tensors).dequantize(), expected)


def test_linear_layers_over_frozen_weights(device):
    weights = [random_weight(n, 64, device=device) for n in (48, 16)]
    bias = torch.randn(48, device=device)
    operands = [LinearOperand(weights[0], bias), LinearOperand(weights[1])]
    dense = [LinearOperand(w.dequantize(torch.float32), b) for w, b, _ in operands]
    x = torch.randn(5, 64, device=device, requires_grad=True)
    dy = torch.randn(5, 64, device=device)
    found, wanted = linears(x, operands), linears(x, dense)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, dy)[0] for y in (found, wanted)))
    with torch.no_grad():
        torch.testing.assert_close(linears(x[:1], operands), linears(x[:1], dense))


@pytest.mark.parametrize("tokens", [1, 9])  # of one, the chosen experts alone are dequantised
def test_experts_with_biases_and_adapters(device, tokens):
    E, H, inner, r = 6, 64, 32, 4
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape, scale=0.2):
        return (torch.randn(shape, generator=generator) * scale).to(device)

    weights = random_weight(E, 2 * inner, H, device=device), random_weight(E, H, inner, device=device)
    biases = draw(E, 2 * inner), draw(E, H)
    factors = [(draw(E, r, w.shape[2]), draw(E, w.shape[1], r)) for w in weights]
    experts = torch.stack([torch.randperm(E, generator=generator)[:2] for _ in range(tokens)]).to(device)
    scores, x, dy = draw(tokens, 2).softmax(-1), draw(tokens, H, scale=1.0), draw(tokens, H)

    def run(dense, gradients):
        leaves = [t.clone().requires_grad_(gradients) for t in (x, scores, *itertools.chain(*factors))]
        operands = [
            LinearOperand(w.dequantize(torch.float32) if dense else w, b, Adapter(a, c, 2.0))
            for w, b, a, c in zip(weights, biases, leaves[2::2], leaves[3::2], strict=True)
        ]
        y = experts_of(leaves[0], leaves[1], experts, *operands)
        return [y, *(torch.autograd.grad(y, leaves, dy) if gradients else ())]

    for gradients in (True, False):
        for found, wanted in zip(run(False, gradients), run(True, gradients), strict=True):
            assert wanted.abs().max() > 0
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_bad_calls_say_what_is_wrong(device):
    for weight, message in (
        (torch.randn(4, 48), "multiple of 32"),
        (torch.randn(32), "multiple of 32"),
        (torch.full((1, 32), torch.nan), "NaN"),
        (torch.randn(2, 32).double(), "bf16, fp16 or fp32"),
        (torch.randn(2, 32, requires_grad=True), "Freeze it first"),
    ):
        with pytest.raises(InputError, match=message):
            quantize_mxfp4(weight.to(device))
    blocks, scales = torch.zeros(2, 3, 16, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.uint8)
    for args, message in (
        ((blocks, scales[:, :2]), r"scales shape \(2, 2\)"),
        ((blocks[..., :8], scales), r"blocks has shape \(2, 3, 8\)"),
        ((blocks, scales.int()), "int32"),
        ((blocks, scales + 255), "255, which is NaN"),
    ):
        with pytest.raises(InputError, match=message):
            MXFP4Weight.of_blocks(*args)
    weight = MXFP4Weight.of_blocks(blocks.to(device), scales.to(device))
    with pytest.raises(InputError, match="gathered"):
        dataclasses.replace(weight, packed=weight.packed[:1]).dequantize()


@large
@pytest.mark.gpu
def test_more_than_2_31_weights():
    rows = torch.randn(64, 2**13, device="cuda", dtype=torch.bfloat16)
    one = quantize_mxfp4(rows)
    weight = MXFP4Weight("mxfp4", (64 * 4097, 2**13), torch.bfloat16, 32, *(x.repeat(4097, 1) for x in one.tensors))
    out = weight.dequantize()
    assert out.numel() > 2**31 and torch.equal(out[-64:], one.dequantize())
