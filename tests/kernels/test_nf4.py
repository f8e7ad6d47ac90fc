"""NF4: the kernels give the bits of the reference. tests/tools/test_nf4.py compares them with bitsandbytes."""

import math

import pytest
import torch

from ligermodels import InputError
from ligermodels.kernels.nf4 import (
    NF4Weight,
    dequantize_nf4,
    dequantize_nf4_reference,
    quantize_nf4,
    quantize_nf4_reference,
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


def of(state):
    return [x for x in state if isinstance(x, torch.Tensor)]


def values(state):
    return [x for x in state if x is not None and not isinstance(x, torch.Tensor)]


def same(a, b):
    """Bit for bit, but for the sign of a zero."""
    return a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("double", [True, False])
def test_kernels_give_the_bits_of_the_reference(device, poison, shape, double):
    for dtype, block in zip(DTYPES, (64, 32, 256), strict=True):
        weight = make(shape, dtype, device)
        packed, state = quantize_nf4(weight, block=block, double=double)
        expected, wanted = quantize_nf4_reference(weight, block=block, double=double)
        assert packed.shape == (math.ceil(weight.numel() / 2), 1) and torch.equal(packed, expected)
        assert values(state) == values(wanted) == [shape, dtype, block]
        assert len(of(state)) == len(of(wanted)) == (5 if double else 2)
        assert all(map(same, of(state), of(wanted)))
        for out in (torch.float32, torch.float16, torch.float64) + (torch.bfloat16,) * (device == "cuda"):
            found = dequantize_nf4(packed, state, dtype=out)  # interpreted, bf16 is truncated
            assert found.shape == shape and same(found, dequantize_nf4_reference(packed, state, out))
            into = torch.empty(shape, dtype=out, device=device)
            assert dequantize_nf4(packed, state, out=into) is into and torch.equal(into, found)


@large
@pytest.mark.gpu
def test_more_than_2_31_weights():
    rows = torch.randn(64, 2**13, device="cuda", dtype=torch.bfloat16)
    weight = rows.repeat(2**12 + 1, 1)
    packed, state = quantize_nf4(weight)
    one, _ = quantize_nf4(rows, double=False)
    assert packed.numel() > 2**30 and torch.equal(packed[-one.numel() :], one)
    out = dequantize_nf4(packed, state)
    assert (out[-64:].float() - rows.float()).norm() < 0.11 * rows.float().norm()


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("shape", [(4, 32), (300, 64)], ids=str)  # a part of 2 blocks, and of 300
def test_a_stack_is_its_parts(device, poison, double, shape):
    """Each part quantised by itself, in one launch, in whole and in groups; and split again."""
    weights = [make(shape, torch.float32, device) * 2**i for i in range(3)]
    parts = [NF4Weight(*quantize_nf4(weight, double=double)) for weight in weights]
    stack, expected = NF4Weight.stack(parts), torch.cat([part.dequantize() for part in parts])
    assert stack.shape == expected.shape and same(stack.dequantize(), expected)
    assert same(dequantize_nf4_reference(stack.packed, stack.state), expected)
    assert same(stack.in_groups(3).dequantize(), expected.view(3, *shape))
    kind, (tensors, options) = type(stack), stack.flatten()
    assert same(kind.unflatten(tensors, options).dequantize(), expected)
    for one, part in zip(stack.split(3), parts, strict=True):
        assert one.shape == shape and same(one.dequantize(), part.dequantize())
        assert all(map(same, of((one.packed, *one.state)), of((part.packed, *part.state))))


def test_what_cannot_be_stacked(device):
    a, b = torch.randn(2, 48, device=device), torch.randn(4, 32, device=device)
    for weights in ([a, a], [b, b[:2]]):  # blocks of 64 do not end where 96 weights end; two shapes
        with pytest.raises(InputError, match="cannot be one stack in 4 bits"):
            NF4Weight.stack([NF4Weight(*quantize_nf4(weight)) for weight in weights])
