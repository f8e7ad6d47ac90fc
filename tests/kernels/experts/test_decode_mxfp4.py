"""Experts in MXFP4 of 1 to 64 tokens, without gradients, against fp64 over the dequantised weights."""

import dataclasses

import pytest
import torch

import ligermodels.kernels.experts._decode_mxfp4 as decode_file
from ligermodels.kernels._math import ClampedSwiGLU
from ligermodels.kernels.experts._decode import Tile
from ligermodels.kernels.experts._decode_mxfp4 import decode_mxfp4, decode_mxfp4_takes
from ligermodels.kernels.experts.experts import experts_reference
from ligermodels.kernels.linear.mxfp4 import MXFP4Weight
from ligermodels.kernels.linear.operand import Adapter, LinearOperand

UNIT = ClampedSwiGLU(1.702, 7.0).name
TILES = {
    "chosen": None,
    "small": (Tile(16, 16, 64, 4, 3), Tile(16, 16, 128, 4, 3)),
    "large": (Tile(32, 32, 256, 4, 3), Tile(32, 64, 256, 4, 3)),
    "by PTX, one warp": (Tile(8, 16, 128, 1), Tile(8, 16, 128, 1)),
    "by PTX, two and eight warps": (Tile(8, 16, 256, 2, 2), Tile(8, 16, 1024, 8, 2)),
}


def draw(*shape, device, scales=(119, 124)):
    *rows, columns = shape
    blocks = torch.randint(0, 256, (*rows, columns // 32, 16), dtype=torch.uint8)
    scales = torch.randint(*scales, (*rows, columns // 32), dtype=torch.uint8)
    return MXFP4Weight.of_blocks(blocks.to(device), scales.to(device))


def inputs_of(tokens, hidden=96, inner=160, count=5, top_k=2, bias=True, device="cpu"):
    """x, whose rows have gaps that hold NaN; weights; experts; and the operands."""
    x = torch.full((tokens, hidden + 8), torch.nan, device=device).bfloat16()[:, :hidden].normal_()
    weights = torch.rand(tokens, top_k, device=device).softmax(-1)
    experts = torch.rand(tokens, count, device=device).argsort(1)[:, :top_k].int().contiguous()
    operands = []
    for weight in (draw(count, 2 * inner, hidden, device=device), draw(count, hidden, inner, device=device)):
        values = (torch.randn(weight.shape[:2], device=device) * 0.3).bfloat16() if bias else None
        operands.append(LinearOperand(weight, values))
    return x, weights, experts, *operands


def exact(x, weights, experts, *operands, activation):
    whole = [
        LinearOperand(w.dequantize(torch.float64), None if b is None else b.double()) for w, b, _ in operands
    ]  # fmt: skip
    return experts_reference(x.double(), weights.double(), experts, *whole, activation=activation)


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("tokens, shape, activation", [
    (1, (96, 160), UNIT), (1, (1184, 544, 3, 3), "silu"), (7, (160, 64, 4, 3, False), "silu"),
    (20, (64, 96, 1, 1), UNIT),
], ids=str)  # fmt: skip
def test_as_exact_as_bf16(device, poison, monkeypatch, tiles, tokens, shape, activation):
    """The last has more tokens of one expert than a program multiplies. h and y are rounded to bf16, interpreted
    truncated, which is twice that."""
    if device == "cpu" and "PTX" in tiles:
        pytest.skip("the interpreter has no PTX")
    if TILES[tiles] is not None:
        monkeypatch.setattr(decode_file, "_tiles", lambda *args: TILES[tiles])
    tensors = inputs_of(tokens, *shape, device=device)
    assert decode_mxfp4_takes(*tensors)
    found, wanted = decode_mxfp4(*tensors, activation), exact(*tensors, activation=activation)
    assert found.dtype == torch.bfloat16
    error = (found.double() - wanted).abs().max() / wanted.abs().max()
    assert error <= (2**-7 if device == "cuda" else 2**-6)
    assert ((found.double() - wanted).norm() / wanted.norm()) <= (2**-8 if device == "cuda" else 2**-6)


@pytest.mark.gpu
@pytest.mark.parametrize("scales", [(11, 16), (140, 145)], ids=str)
def test_smallest_and_largest_scales(poison, scales):
    """Of weights that are unpacked without rounding. The interpreter multiplies scales in fp16."""
    device = "cuda"
    x, weights, experts, first, last = inputs_of(3, bias=False, device=device)
    first, last = (operand._replace(weight=draw(*operand.weight.shape, device=device, scales=s)) for operand, s in (
        (first, scales), (last, (119, 124)),
    ))  # fmt: skip
    x = x * 2.0 ** (123 - scales[1])
    found, wanted = (f(x, weights, experts, first, last, activation=UNIT) for f in (decode_mxfp4, exact))
    assert (found.double() - wanted).norm() <= 2**-8 * wanted.norm()


def test_an_expert_that_there_is_not_makes_its_token_nan(device, poison):
    x, weights, experts, *operands = inputs_of(4, device=device)
    expected = decode_mxfp4(x, weights, experts, *operands, "silu")
    wrong = experts.clone()
    wrong[1, 0], wrong[3, 1] = -1, 5
    found = decode_mxfp4(x, weights, wrong, *operands, "silu")
    assert found[[1, 3]].isnan().all() and torch.equal(found[[0, 2]], expected[[0, 2]])


def test_what_is_taken(device):
    x, weights, experts, first, last = inputs_of(2, device=device)
    adapter = Adapter(torch.zeros(5, 2, 160, device=device), torch.zeros(5, 96, 2, device=device), 1.0)
    dense = LinearOperand(last.weight.dequantize())
    assert decode_mxfp4_takes(x, weights, experts, first, last)
    for other in (
        (x.float(), weights, experts, first, last),
        (x.repeat(40, 1), weights.repeat(40, 1), experts.repeat(40, 1), first, last),
        (x, weights, experts, first, last._replace(adapter=adapter)),
        (x, weights, experts, first, dense),
        (x, weights, experts, first, last._replace(bias=last.bias.float())),
        (x.clone().requires_grad_(), weights, experts, first, last),
        (
            x,
            weights,
            experts,
            first._replace(weight=dataclasses.replace(first.weight, packed=first.weight.packed[::1].t())),
            last,
        ),
    ):
        assert not decode_mxfp4_takes(*other)
