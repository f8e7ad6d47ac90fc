"""NF4: the nearest codes, and the kernel gives the bits of the reference.

tests/tools/test_nf4.py compares both with bitsandbytes.
"""

import math

import pytest
import torch

from ligermodels import InputError
from ligermodels.kernels.linear import nf4
from ligermodels.kernels.linear.nf4 import (
    NF4Weight,
    dequantize_nf4_reference,
    quantize_nf4,
)
from tests.kernels.on_gpu import large

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1,), (3,), (64,), (65,), (5, 13), (127,), (33, 70), (48, 128), (64 * 256 + 7,), (2, 3, 4, 32)]
"""Also one element, odd counts, and counts that are multiples neither of 64 nor of 64 * 256."""


def make(shape, dtype=torch.float32, device="cpu"):
    """Rows of very different size, some zeros, and, where the weight is large enough, a block of zeros."""
    weight = torch.randn(shape) * torch.logspace(-3, 1, shape[-1])
    weight.view(-1)[64:128] = 0
    return weight.to(device=device, dtype=dtype)


def tensors(weight):
    return [x for x in weight.tensors if x is not None]


def same(a, b):
    """Bit for bit, but for the sign of a zero."""
    return a.dtype == b.dtype and torch.equal(a, b)


def test_the_default_device_does_not_matter():
    weight = make((48, 128))
    with torch.device("meta"):
        found = quantize_nf4(weight)
    assert all(map(same, tensors(found), tensors(quantize_nf4(weight))))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_weight_becomes_the_nearest_code(device, poison, shape, monkeypatch):
    for dtype, block in zip(DTYPES, (64, 32, 256), strict=True):
        weight = make(shape, dtype, device)
        made = quantize_nf4(weight, block=block, double=False)
        rows = nf4._blocks(weight.reshape(-1).double(), block)
        assert same(made.absmax, rows.abs().amax(1).float())
        distances = (
            rows[:, :, None] / rows.abs().amax(1).clamp(min=1e-30)[:, None, None] - made.quant_map.double()
        ).abs()
        index = torch.stack((made.packed >> 4, made.packed & 15), 1).view(-1)[: weight.numel()].long()
        chosen = distances.flatten(0, 1)[: weight.numel()].gather(1, index[:, None])[:, 0]
        # Between two codes the fp32 quotient decides, which is rounded twice.
        assert (chosen <= distances.flatten(0, 1)[: weight.numel()].amin(1) + 2.0**-22).all()
        whole = quantize_nf4(weight, block=block)
        with monkeypatch.context() as patch:
            patch.setattr(nf4, "_CHUNK", 256)
            assert all(map(same, tensors(quantize_nf4(weight, block=block)), tensors(whole)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("double", [True, False])
def test_the_kernel_gives_the_bits_of_the_reference(device, poison, shape, double):
    for dtype, block in zip(DTYPES, (64, 32, 256), strict=True):
        weight = quantize_nf4(make(shape, dtype, device), block=block, double=double)
        assert weight.packed.shape == (math.ceil(math.prod(shape) / 2), 1)
        assert weight.options == ("nf4", shape, dtype, block) and len(tensors(weight)) == (6 if double else 3)
        for out in (torch.float32, torch.float16, torch.float64) + (torch.bfloat16,) * (device == "cuda"):
            found = weight.dequantize(dtype=out)  # interpreted, bf16 is truncated
            assert found.shape == shape and same(found, dequantize_nf4_reference(weight, out))
            into = torch.empty(shape, dtype=out, device=device)
            assert weight.dequantize(out=into) is into and torch.equal(into, found)


@large
@pytest.mark.gpu
def test_more_than_2_31_weights():
    rows = torch.randn(64, 2**13, device="cuda", dtype=torch.bfloat16)
    weight = quantize_nf4(rows.repeat(2**12 + 1, 1))
    one = quantize_nf4(rows, double=False).packed
    assert weight.packed.numel() > 2**30 and torch.equal(weight.packed[-one.numel() :], one)
    out = weight.dequantize()
    assert (out[-64:].float() - rows.float()).norm() < 0.11 * rows.float().norm()


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("shape", [(4, 32), (300, 64)], ids=str)  # a part of 2 blocks, and of 300
def test_a_stack_is_its_parts(device, poison, double, shape):
    """Each part quantised by itself, in one launch, in whole and in groups; and split again."""
    weights = [make(shape, torch.float32, device) * 2**i for i in range(3)]
    parts = [quantize_nf4(weight, double=double) for weight in weights]
    stack, expected = NF4Weight.stack(parts), torch.cat([part.dequantize() for part in parts])
    assert stack.shape == expected.shape and same(stack.dequantize(), expected)
    assert same(dequantize_nf4_reference(stack), expected)
    assert same(stack.in_groups(3).dequantize(), expected.view(3, *shape))
    assert same(NF4Weight(*stack.options, *stack.tensors).dequantize(), expected)
    for one, part in zip(stack.split(3), parts, strict=True):
        assert one.shape == shape and same(one.dequantize(), part.dequantize())
        assert all(map(same, tensors(one), tensors(part)))


def test_what_cannot_be_stacked(device):
    a, b = torch.randn(2, 48, device=device), torch.randn(4, 32, device=device)
    for weights in ([a, a], [b, b[:2]]):  # blocks of 64 do not end where 96 weights end; two shapes
        with pytest.raises(InputError, match="cannot be one stack"):
            NF4Weight.stack([quantize_nf4(weight) for weight in weights])
    with pytest.raises(InputError, match="cannot be a group of 4 layers"):  # of which each has half a block
        quantize_nf4(b).in_groups(4)
    together = quantize_nf4(torch.randn(4, 64, device=device))
    with pytest.raises(InputError, match=r"nested_absmax .* they were quantised together"):
        together.in_groups(4)
