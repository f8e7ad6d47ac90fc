"""NF4: every index is that of the nearest code, the bytes are those of bitsandbytes, and what is packed comes back."""

import math

import pytest
import torch

from ligermodels.kernels.nf4 import (
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
    """Rows of very different size, some zeros, and a block of nothing but zeros where there is room."""
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


# Against bitsandbytes


@pytest.fixture(scope="module")
def bnb():
    return pytest.importorskip("bitsandbytes.functional")


def nest_exactly(functional, absmax):
    """absmax in 8 bits, by the code of bitsandbytes that finds the nearest; its library for fp32 looks up a table."""
    offset = absmax.mean()
    code = functional.create_dynamic_map().to(absmax.device)
    found = torch.ops.bitsandbytes.quantize_blockwise.default((absmax - offset).double(), code, 256)
    return *found, code, offset


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_bytes_are_those_of_bitsandbytes(bnb, shape):
    for dtype in DTYPES:
        for block in (64, 256):
            weight = make(shape, dtype)
            packed, state = quantize_nf4_reference(weight, block=block, double=False)
            theirs, wanted = bnb.quantize_4bit(weight, blocksize=block, quant_type="nf4")
            assert same(packed, theirs) and same(state.code, wanted.code)
            # A block of zeros at the end has an absmax of 1e-38 there.
            torch.testing.assert_close(state.absmax, wanted.absmax, rtol=0, atol=2e-38)
            nested = quantize_nf4_reference(weight, block=block)[1]
            index, sizes, code, offset = nest_exactly(bnb, state.absmax)
            assert same(nested.offset, offset) and same(nested.nested_code, code)
            if len(state.absmax) > 1:  # else all of absmax is the offset, and what is left is 0 / 0
                assert same(nested.absmax, index.view(-1)) and same(nested.nested_absmax, sizes.float())


@pytest.mark.parametrize("shape", [(33, 70), (48, 128), (1, 64), (130, 256)], ids=str)
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_what_bitsandbytes_has_packed_is_dequantised_to_its_bits(bnb, device, shape, double):
    for dtype in DTYPES:
        weight = make(shape, dtype)
        theirs, wanted = bnb.quantize_4bit(weight, compress_statistics=double, quant_type="nf4")
        state = quantize_nf4_reference(weight, double=double)[1]._replace(absmax=wanted.absmax)
        if double:
            state = state._replace(nested_absmax=wanted.state2.absmax, offset=wanted.offset)
        expected = bnb.dequantize_4bit(theirs, wanted)
        assert same(dequantize_nf4_reference(theirs, state), expected)
        there = state._replace(**{k: v.to(device) for k, v in state._asdict().items() if isinstance(v, torch.Tensor)})
        if dtype != torch.bfloat16 or device == "cuda":
            assert same(dequantize_nf4(theirs.to(device), there).cpu(), expected)


# On a GPU, and what raises


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
