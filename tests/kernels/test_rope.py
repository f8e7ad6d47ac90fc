"""Rope: pairs of dims, sections of positions, and rotation in place."""

import functools

import pytest
import torch

from ligermodels.errors import InputError
from ligermodels.kernels.rope import rope, rope_qk, rope_reference
from tests.kernels.on_gpu import assert_captures, assert_compiles, assert_never_waits


def make(shape, dtype, device):
    """qkv and its half tables. Angles as in use, up to 8192, so that half precision angles would show."""
    batch, length, heads, kv_heads, head_dim, rotary, angle_batch = shape
    qkv = torch.randn(batch, length, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device)
    positions = torch.randint(8192, (angle_batch, length), device=device)
    angles = positions[..., None] * 10000.0 ** (-torch.arange(rotary // 2, device=device) * 2 / rotary)
    return qkv, angles.cos(), angles.sin(), dict(num_heads=heads, num_kv_heads=kv_heads)


def run(op, qkv, cos, sin, grads, **options):
    leaf = qkv.detach().clone().requires_grad_()
    outputs = op(leaf * 1, cos, sin, **options)
    return [*outputs, *torch.autograd.grad(outputs, leaf, grads)]


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


def tables(length, rotary, device):
    """cos and sin of positions 0 to length - 1."""
    angles = torch.arange(length, device=device)[:, None] * 10000.0 ** (
        -torch.arange(rotary // 2, device=device) * 2 / rotary
    )
    return angles.cos(), angles.sin()


def gathered(table, position_ids, sections):
    """[1 or B, S, R/2] by hand, entry by entry."""
    axes = position_ids[None] if sections is None else position_ids
    ends = torch.tensor([table.shape[1]] if sections is None else sections).cumsum(0)
    columns = [table[axes[int((i >= ends).sum())], i] for i in range(table.shape[1])]
    return torch.stack(columns, -1)


SECTIONS = [None, (2, 1, 3), (3, 3), (0, 6, 0)]
"""Of the 6 angles of 12 rotated dims: Qwen2-VL has three, a vision tower two; some may be empty."""


@pytest.mark.parametrize("sections", SECTIONS, ids=str)
@pytest.mark.parametrize("batch, inplace", [(1, False), (2, True)])
def test_positions(device, poison, sections, batch, inplace):
    """Gathered in the kernel is gathered before it, to the bit, in both directions."""
    qkv, _, _, heads = make((2, 5, 6, 2, 16, 12, 1), torch.float32, device)
    cos, sin = tables(50, 12, device)
    axes = () if sections is None else (len(sections),)
    ids = torch.randint(50, (*axes, batch, 5), device=device, dtype=torch.int32 if inplace else torch.int64)
    grads = grads_like(rope_reference, qkv, cos[None, :5], sin[None, :5], heads)
    own = {"position_ids": ids, "sections": sections}
    actual = run(rope, qkv, cos, sin, grads, inplace=inplace, **own, **heads)
    ready = [gathered(t, ids.long(), sections) for t in (cos, sin)]
    for a, b in zip(actual, run(rope, qkv, *ready, grads, **heads), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(rope_reference(qkv, cos, sin, **own, **heads), rope_reference(qkv, *ready, **heads), strict=True):
        assert torch.equal(a, b)
    q, k = (torch.randn(2, 5, n, 16, device=device) for n in (6, 2))
    for a, b in zip(rope_qk(q, k, cos, sin, **own), rope_qk(q, k, *ready), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("wrong", [-1, 50, 2**31 - 1])
@pytest.mark.parametrize("axis", [0, 2])
def test_positions_outside_of_the_tables(device, wrong, axis):
    """An error on the CPU. On a GPU, NaN in the angles of that section of that token, and nowhere else."""
    qkv, _, _, heads = make((1, 5, 6, 2, 16, 12, 1), torch.float32, device)
    cos, sin = tables(50, 12, device)
    ids = torch.randint(50, (3, 1, 5), device=device)
    ids[axis, 0, 3] = wrong
    call = functools.partial(rope, position_ids=ids, sections=(2, 1, 3), **heads)
    if device == "cpu":
        with pytest.raises(InputError, match=r"go from .* hold the positions 0 to 49"):
            call(qkv, cos, sin)
        return
    turned = torch.zeros(1, 5, 16, dtype=torch.bool, device=device)
    start, end = (0, 2) if axis == 0 else (3, 6)
    turned[0, 3, [*range(start, end), *range(6 + start, 6 + end)]] = True
    q, k, v = call(qkv, cos, sin)
    for rotated in (q, k):
        assert torch.equal(rotated.isnan(), turned.unsqueeze(2).expand_as(rotated))
    assert v.isfinite().all()


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
