"""Rope: rotation in place."""

import functools

import torch

from ligermodels.kernels.rope import rope, rope_reference


def make(shape, dtype, device):
    """qkv and its half tables. Angles as in use, up to 8192, so that half precision angles would show."""
    batch, length, heads, kv_heads, head_dim, rotary, angle_batch = shape
    qkv = torch.randn(batch, length, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device)
    positions = torch.randint(8192, (angle_batch, length), device=device)
    angles = positions[..., None] * 10000.0 ** (-torch.arange(rotary // 2, device=device) * 2 / rotary)
    return qkv, angles.cos(), angles.sin(), dict(num_heads=heads, num_kv_heads=kv_heads)


def test_inplace_under_a_projection(device):
    """Its normal use: what made qkv needs no part of it again, and trains as if nothing were overwritten."""
    x = torch.randn(2, 3, 8, device=device)
    _, cos, sin, heads = make((2, 3, 6, 2, 16, 12, 1), torch.float32, device)
    results = []
    for op in (functools.partial(rope, inplace=True), rope_reference):
        torch.manual_seed(1)
        projection = torch.nn.Linear(8, 160).to(device)
        q, k, v = op(projection(x), cos, sin, **heads)
        ((q.sum(2) * k.sum(2)).sum() + v.square().sum()).backward()
        results.append([p.grad for p in projection.parameters()])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-4)  # sums of 100 numbers of size 10 in fp32


def test_without_triton_inplace_overwrites_nothing(without_triton):
    qkv, cos, sin, heads = make((2, 3, 6, 2, 16, 12, 1), torch.float32, "cpu")
    before = qkv.clone()
    expected = rope_reference(qkv, cos, sin, **heads)
    for a, b in zip(rope(qkv, cos, sin, inplace=True, **heads), expected, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(qkv, before)
