"""Rope: pairs of dims, and rotation in place."""

import functools

import pytest
import torch

from ligermodels.kernels.rope import rope, rope_reference
from tests.kernels.on_gpu import assert_captures, assert_compiles, assert_never_waits


def make(shape, dtype, device):
    """qkv and its half tables. Angles as in use, up to 8192, so that half precision angles would show."""
    batch, length, heads, kv_heads, head_dim, rotary, angle_batch = shape
    qkv = torch.randn(batch, length, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device)
    positions = torch.randint(8192, (angle_batch, length), device=device)
    angles = positions[..., None] * 10000.0 ** (-torch.arange(rotary // 2, device=device) * 2 / rotary)
    return qkv, angles.cos(), angles.sin(), dict(num_heads=heads, num_kv_heads=kv_heads)


def grads_like(op, qkv, cos, sin, options):
    return [torch.randn_like(t) for t in op(qkv, cos, sin, **options)]


@pytest.mark.parametrize(
    "shape", [(2, 5, 4, 2, 64, 64, 1), (2, 3, 40, 8, 128, 128, 2), (1, 7, 3, 1, 80, 80, 1)], ids=str
)
def test_rotation_by_hand(device, shape):
    """Negative control of the pairing: as complex numbers, dim i and i + R/2 turn by the angle, and no others."""
    qkv, cos, sin, heads = make(shape, torch.float64, device)
    half = cos.shape[-1]
    q = qkv[..., : heads["num_heads"] * 2 * half].unflatten(-1, (-1, 2 * half))
    turned = torch.complex(q[..., :half], q[..., half:]) * torch.complex(cos, sin).unsqueeze(2)
    actual = rope(qkv, cos.double(), sin.double(), **heads)[0]
    torch.testing.assert_close(actual, torch.cat([turned.real, turned.imag], -1))


def test_outputs_are_views(device):
    """Of qkv, when in place; else v alone, and q and k are views of one new buffer."""
    qkv, cos, sin, heads = make((2, 3, 6, 2, 16, 12, 1), torch.float32, device)
    for inplace in (False, True):
        source = qkv.clone()
        q, k, v = rope(source, cos, sin, inplace=inplace, **heads)
        where = [t.untyped_storage().data_ptr() for t in (source, q, k, v)]
        assert where[0] == where[3] and where[1] == where[2] and (where[1] == where[0]) == inplace
        assert torch.equal(source, qkv) != inplace
        assert torch.equal(v, source[..., -2 * 16 :].unflatten(-1, (2, 16)))


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


def in_model(x, cos, sin, **heads):
    return rope(x * 2, cos, sin, inplace=True, **heads)


@pytest.mark.gpu
@pytest.mark.parametrize("check", [assert_captures, assert_never_waits, assert_compiles])
def test_inplace_on_a_gpu(check):
    shape = (2, 300, 32, 8, 128, 128, 1)
    qkv, cos, sin, heads = make(shape, torch.float32 if check is assert_compiles else torch.bfloat16, "cuda")
    grads = grads_like(rope_reference, qkv, cos, sin, heads)
    check(functools.partial(in_model, **heads), [qkv.requires_grad_(), cos, sin], grads)
