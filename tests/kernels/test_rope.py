import functools
import importlib

import pytest
import torch

from ligermodels.errors import InputError
from ligermodels.kernels.rope import rope, rope_qk, rope_qk_reference, rope_reference
from tests.kernels.on_gpu import assert_captures, assert_compiles, assert_never_waits
from tests.kernels.oracle import assert_as_exact, dtypes

module = importlib.import_module("ligermodels.kernels.rope")

SHAPES = [  # batch, length, query heads, kv heads, head dim, rotary dims, batch of the angles
    (2, 5, 4, 2, 64, 64, 1),
    (2, 3, 40, 8, 128, 128, 2),
    (1, 7, 3, 1, 80, 80, 1),
    (2, 3, 12, 2, 96, 96, 2),
    (3, 2, 6, 6, 80, 32, 3),
    (2, 4, 5, 5, 22, 10, 1),
    (1, 2, 128, 1, 16, 16, 1),
    (2, 1, 1, 1, 2, 2, 1),
]
ALMOST_FP64 = dict(rtol=1e-14, atol=1e-14)
"""Two fp64 products and a sum, which a GPU may round twice or thrice."""


def make(shape, dtype, device):
    """qkv and its half tables. Angles as in use, up to 8192, so that half precision angles would show."""
    batch, length, heads, kv_heads, head_dim, rotary, angle_batch = shape
    qkv = torch.randn(batch, length, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device)
    positions = torch.randint(8192, (angle_batch, length), device=device)
    angles = positions[..., None] * 10000.0 ** (-torch.arange(rotary // 2, device=device) * 2 / rotary)
    return qkv, angles.cos(), angles.sin(), dict(num_heads=heads, num_kv_heads=kv_heads)


def eager(qkv, cos, sin, *, num_heads, num_kv_heads):
    """As transformers writes it: the doubled table in the dtype of q, rotate_half, and cat for the rest."""
    rows = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, -1))
    q, k, v = rows.split([num_heads, num_kv_heads, num_kv_heads], dim=2)
    cos, sin = (torch.cat([t, t], -1).to(qkv.dtype).unsqueeze(2) for t in (cos, sin))
    rotary = cos.shape[-1]

    def rotate(x):
        x, rest = x[..., :rotary], x[..., rotary:]
        half = torch.cat([-x[..., rotary // 2 :], x[..., : rotary // 2]], -1)
        return torch.cat([x * cos + half * sin, rest], -1)

    return rotate(q), rotate(k), v


def run(op, qkv, cos, sin, grads, **options):
    leaf = qkv.detach().clone().requires_grad_()
    outputs = op(leaf * 1, cos, sin, **options)
    return [*outputs, *torch.autograd.grad(outputs, leaf, grads)]


def grads_like(op, qkv, cos, sin, options):
    return [torch.randn_like(t) for t in op(qkv, cos, sin, **options)]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_outputs_and_gradient(device, poison, dtype, shape, inplace):
    qkv, cos, sin, heads = make(shape, dtype, device)
    grads = grads_like(rope_reference, qkv, cos, sin, heads)
    actual = run(rope, qkv, cos, sin, grads, inplace=inplace, **heads)
    exact = run(rope_reference, qkv.double(), cos, sin, [g.double() for g in grads], **heads)
    allowed = run(eager, qkv, cos, sin, grads, **heads)
    for name, a, b, c in zip(("q", "k", "v", "dqkv"), actual, allowed, exact, strict=True):
        if dtype == torch.float64:
            torch.testing.assert_close(a, c, **ALMOST_FP64)
        else:
            assert_as_exact(a, b, c, name)
    assert torch.equal(actual[2], exact[2].to(dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_is_that_of_transformers(shape):
    qkv, cos, sin, heads = make(shape, torch.float64, "cpu")
    for a, b in zip(rope_reference(qkv, cos, sin, **heads), eager(qkv, cos, sin, **heads), strict=True):
        torch.testing.assert_close(a, b, **ALMOST_FP64)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_rotation_by_hand(device, shape):
    """Negative control of the pairing: as complex numbers, dim i and i + R/2 turn by the angle, and no others."""
    qkv, cos, sin, heads = make(shape, torch.float64, device)
    half = cos.shape[-1]
    q = qkv[..., : heads["num_heads"] * 2 * half].unflatten(-1, (-1, 2 * half))
    turned = torch.complex(q[..., :half], q[..., half:]) * torch.complex(cos, sin).unsqueeze(2)
    actual = rope(qkv, cos.double(), sin.double(), **heads)[0]
    torch.testing.assert_close(actual, torch.cat([turned.real, turned.imag], -1))


LAYOUTS = {
    "heads first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "batch last": lambda t: t.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "one expanded number": lambda t: t[:1, :1, :1, :1].expand_as(t),
    "expanded heads": lambda t: t[:, :, :1].expand_as(t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_any_strides(device, poison, layout):
    qkv, cos, sin, heads = make((2, 3, 6, 2, 16, 12, 2), torch.float32, device)
    grads = [LAYOUTS[layout](g) for g in grads_like(rope_reference, qkv, cos, sin, heads)]
    actual = run(rope, qkv, cos, sin, grads, **heads)[3]
    expected = run(rope, qkv, cos, sin, [g.contiguous() for g in grads], **heads)[3]
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rope_qk(device, poison, layout):
    _, cos, sin, _ = make((2, 3, 6, 2, 16, 12, 2), torch.float32, device)
    results = []
    q, k, dq, dk = (LAYOUTS[layout](torch.randn(2, 3, heads, 16, device=device)) for heads in (6, 2, 6, 2))
    for op in (rope_qk, rope_qk_reference):
        leaves = [t.detach().requires_grad_() for t in (q, k)]
        outputs = op(*leaves, cos, sin)
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, (dq, dk))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("make_qkv", [
    lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    lambda t: torch.stack([t, t], -1)[..., 0],
    lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    lambda t: t[:1, :1].expand_as(t),
])  # fmt: skip
def test_qkv_of_any_strides(device, poison, make_qkv):
    qkv, cos, sin, heads = make((2, 3, 6, 2, 16, 12, 2), torch.float32, device)
    qkv = make_qkv(qkv)
    for a, b in zip(rope(qkv, cos, sin, **heads), rope_reference(qkv, cos, sin, **heads), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2)])
def test_some_outputs_used(device, poison, used):
    qkv, cos, sin, heads = make((2, 3, 6, 2, 16, 12, 1), torch.float32, device)
    results = []
    for op in (rope, rope_reference):
        leaf = qkv.clone().requires_grad_()
        outputs = op(leaf, cos, sin, **heads)
        results.append(torch.autograd.grad(sum(outputs[i].square().sum() for i in used), leaf)[0])
    torch.testing.assert_close(*results)


def test_outputs_are_views_of_one_buffer(device):
    qkv, cos, sin, heads = make((2, 3, 6, 2, 16, 12, 1), torch.float32, device)
    for inplace in (False, True):
        source = qkv.clone()
        q, k, v = rope(source, cos, sin, inplace=inplace, **heads)
        assert len({t.untyped_storage().data_ptr() for t in (q, k, v)}) == 1
        assert (q.data_ptr() == source.data_ptr()) == inplace
        assert torch.equal(source, qkv) != inplace


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


def test_inplace_is_loud_to_whoever_saved_qkv(device):
    qkv, cos, sin, heads = make((1, 2, 2, 1, 8, 8, 1), torch.float32, device)
    source = qkv.requires_grad_() * 1
    saved = source.sin()  # keeps source for its backward
    q, _, _ = rope(source, cos, sin, inplace=True, **heads)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (q.sum() + saved.sum()).backward()


def test_inplace_in_inference_mode(device):
    qkv, cos, sin, heads = make((1, 2, 2, 1, 8, 8, 1), torch.float32, device)
    expected = rope(qkv, cos, sin, **heads)
    with torch.inference_mode():
        actual = rope(qkv.clone(), cos, sin, inplace=True, **heads)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("shape", [(0, 3, 2, 1, 8, 8, 1), (2, 0, 2, 1, 8, 8, 1)], ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_zero_tokens(device, shape, inplace):
    qkv, cos, sin, heads = make(shape, torch.float32, device)
    grads = grads_like(rope_reference, qkv, cos, sin, heads)
    actual = run(rope, qkv, cos, sin, grads, inplace=inplace, **heads)
    expected = run(rope_reference, qkv, cos, sin, grads, **heads)
    assert [t.shape for t in actual] == [t.shape for t in expected]


def test_deterministic_and_runs_twice(device):
    qkv, cos, sin, heads = make((2, 3, 6, 2, 16, 12, 1), torch.float32, device)
    grads = grads_like(rope_reference, qkv, cos, sin, heads)
    leaf = qkv.requires_grad_()
    outputs = rope(leaf * 1, cos, sin, inplace=True, **heads)
    first, second = (torch.autograd.grad(outputs, leaf, grads, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(first, run(rope, qkv, cos, sin, grads, **heads)[3])


def test_double_backward_raises(device):
    qkv, cos, sin, heads = make((1, 2, 2, 1, 8, 8, 1), torch.float32, device)
    leaf = qkv.requires_grad_()
    (grad,) = torch.autograd.grad(rope(leaf, cos, sin, **heads)[0].square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        grad.sum().backward()


@pytest.mark.parametrize("op", [rope, functools.partial(rope, inplace=True), rope_reference])
def test_gradcheck(device, op):
    qkv, cos, sin, heads = make((1, 2, 2, 1, 4, 2, 1), torch.float64, device)
    assert torch.autograd.gradcheck(lambda x: op(x * 1, cos, sin, **heads), qkv.requires_grad_())


def test_gradcheck_qk(device):
    _, cos, sin, _ = make((1, 2, 2, 1, 4, 2, 1), torch.float64, device)
    q, k = (torch.randn(1, 2, n, 4, dtype=torch.float64, device=device, requires_grad=True) for n in (2, 1))
    assert torch.autograd.gradcheck(lambda q, k: rope_qk(q, k, cos, sin), (q, k))


def test_reference_path(monkeypatch):
    """Where there is no Triton: inplace is accepted and nothing is overwritten; and it compiles whole."""
    monkeypatch.setattr(module, "use_triton", lambda x: False)
    qkv, cos, sin, heads = make((2, 3, 6, 2, 16, 12, 1), torch.float32, "cpu")
    before = qkv.clone()
    op = functools.partial(rope, inplace=True, **heads)
    expected = rope_reference(qkv, cos, sin, **heads)
    assert all(torch.equal(a, b) for a, b in zip(op(qkv, cos, sin), expected, strict=True))
    assert torch.equal(qkv, before)
    grads = grads_like(rope_reference, qkv, cos, sin, heads)
    leaf = qkv.requires_grad_()
    assert_compiles(lambda x, cos, sin: op(x * 1, cos, sin), [leaf, cos, sin], grads, backend="aot_eager")


def test_errors(device):
    qkv, cos, sin, heads = make((2, 3, 2, 1, 8, 8, 1), torch.float32, device)
    q, k = torch.randn(2, 3, 2, 8, device=device), torch.randn(2, 3, 1, 8, device=device)
    for message, call in {
        r"\[B, S, heads \* D\] with 3 \+ 2 \* 1 = 5": lambda: rope(qkv, cos, sin, num_heads=3, num_kv_heads=1),
        r"must both be \[1 or 2, 3, R/2\]": lambda: rope(qkv, cos[:, :2], sin[:, :2], **heads),
        "half width": lambda: rope(qkv, torch.cat([cos, cos], -1), torch.cat([sin, sin], -1), **heads),
        "no gradient": lambda: rope(qkv, cos.clone().requires_grad_(), sin, **heads),
        "overwrite a leaf": lambda: rope(qkv.clone().requires_grad_(), cos, sin, inplace=True, **heads),
        "expanded": lambda: rope(qkv[:1].expand(2, -1, -1), cos, sin, inplace=True, **heads),
        "on meta": lambda: rope(qkv, cos.to("meta"), sin, **heads),
        r"\[B, S, heads, D\]": lambda: rope_qk(q.transpose(1, 2), k, cos, sin),
        "one floating dtype": lambda: rope_qk(q, k.double(), cos, sin),
    }.items():
        with pytest.raises(InputError, match=message):
            call()


def on_gpu(shape, dtype):
    qkv, cos, sin, heads = make(shape, dtype, "cuda")
    grads = grads_like(rope_reference, qkv, cos, sin, heads)
    return [qkv.requires_grad_(), cos, sin], grads, functools.partial(in_model, **heads)


def in_model(x, cos, sin, **heads):
    return rope(x * 2, cos, sin, inplace=True, **heads)


def separate(q, k, cos, sin):
    return rope_qk(q * 2, k, cos, sin)


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[4]], ids=str)
def test_triton_path_compiles_whole(shape, dynamic):
    inputs, grads, op = on_gpu(shape, torch.float32)
    assert_compiles(op, inputs, grads, dynamic=dynamic)
    q, k = (g.detach().requires_grad_() for g in grads[:2])
    assert_compiles(separate, [q, k, *inputs[1:]], grads[:2], dynamic=dynamic)


@pytest.mark.gpu
@pytest.mark.parametrize("check", [assert_captures, assert_never_waits])
def test_captured_and_never_waits(check):
    inputs, grads, op = on_gpu((2, 300, 32, 8, 128, 128, 1), torch.bfloat16)
    check(op, inputs, grads)


@pytest.mark.gpu
@pytest.mark.parametrize("inplace", [False, True])
def test_more_than_2_31_elements(inplace):
    heads, kv_heads, head_dim = 32, 8, 128
    length = 2**31 // (heads * head_dim) + 9  # q alone has 2^31 elements
    shape = (1, length, heads, kv_heads, head_dim, head_dim, 1)
    qkv, cos, sin, options = make(shape, torch.bfloat16, "cuda")
    tail = qkv[:, -8:].clone(), cos[:, -8:], sin[:, -8:]
    expected = rope_reference(*tail, **options)
    leaf = qkv if inplace else qkv.requires_grad_()
    outputs = rope(leaf, cos, sin, inplace=inplace, **options)
    for a, b in zip(outputs, expected, strict=True):
        assert_as_exact(a[:, -8:], b, b.double())
    if not inplace:
        # As cuDNN and FlashAttention leave them: heads before the sequence.
        grads = [torch.randn_like(t.transpose(1, 2).contiguous()).transpose(1, 2) for t in outputs]
        (dqkv,) = torch.autograd.grad(outputs, leaf, grads)
        expected = run(rope, *tail, [g[:, -8:] for g in grads], **options)[3]
        assert torch.equal(dqkv[:, -8:], expected)
