"""The matmul of ternary weights in 2 bits: their layout, exact sums."""

import pytest
import torch
from transformers.integrations import bitnet

from ligermodels.kernels.linear.int2_matmul import int2_matmul, int2_matmul_reference, pack_int2, unpack_int2

SHAPES = [(1, 1, 1), (1, 8, 64), (2, 37, 101), (3, 70, 1100), (5, 130, 3), (17, 67, 301), (70, 300, 70)]
"""M, N, K: few rows in words and not, one tile and several, N and K that fill no byte, no vector and no tile."""


def ternary(*shape, **options):
    return torch.randint(-1, 2, shape, dtype=torch.int8, **options)


def int8(*shape, **options):
    return torch.randint(-128, 128, shape, dtype=torch.int8, **options)


def exact(a, w):
    return (a.double() @ w.double().t()).long()  # integers below 2^53


@pytest.mark.parametrize("rows", [1, 4, 130])
def test_pack_is_the_layout_of_transformers_and_unpack_undoes_it(device, rows):
    w = ternary(rows, 7, device=device)
    kept = w.clone()
    packed = pack_int2(w)
    assert torch.equal(w, kept)  # transformers' own adds 1 to it in place
    assert torch.equal(packed, bitnet.pack_weights(w.clone()))
    assert torch.equal(unpack_int2(packed, rows), w)
    assert torch.equal(pack_int2(w.float()), packed)
    assert unpack_int2(packed).shape == (4 * -(-rows // 4), 7)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_exact(device, poison, shape):
    m, n, k = shape
    a, w = int8(m, k, device=device), ternary(n, k, device=device)
    packed, expected = pack_int2(w), exact(a, w)
    for op in (int2_matmul, int2_matmul_reference):
        out = op(a, packed, out_features=n, out_dtype=torch.int32)
        assert out.dtype == torch.int32
        assert torch.equal(out.long(), expected)


def test_leading_dims_and_layouts(device, poison):
    w = ternary(12, 20, device=device)
    a = int8(20, 2, 3, device=device).permute(1, 2, 0)
    part = torch.cat([pack_int2(w), pack_int2(w)], 1)[:, 20:]
    odd = torch.cat([a, a], -1)[..., 1:21]  # starts in the middle of a word
    scale = torch.rand(3, 2, device=device).t()
    for x in (a, odd, odd[0], a[:1].expand(2, 3, 20), a[0, 0]):
        out = int2_matmul(x, part, out_dtype=torch.int32)
        assert torch.equal(out.long(), exact(x.reshape(-1, 20), w).view(*x.shape[:-1], 12))
    narrow = int2_matmul(odd[0, :, 3:9], part[:, :6], out_dtype=torch.int32)  # rows of 6: no whole words
    assert torch.equal(narrow.long(), exact(odd[0, :, 3:9], w[:, :6]))
    scale_w, bias = torch.rand(2, 12, device=device)
    out = int2_matmul(a, part, scale_a=scale, scale_w=scale_w, bias=bias, out_dtype=torch.float32)
    torch.testing.assert_close(out, exact(a.reshape(6, 20), w).view(2, 3, 12) * scale[..., None] * scale_w + bias)
