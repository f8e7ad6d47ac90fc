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


SECTIONS = [None, (2, 1, 3), (6,), (3, 3), (0, 6, 0), (1, 0, 5)]
"""Of the 6 angles of 12 rotated dims: Qwen2-VL has three, a vision tower two; some may be empty."""


@pytest.mark.parametrize("sections", SECTIONS, ids=str)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("inplace", [False, True])
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


@pytest.mark.parametrize("sections", [None, (2, 1, 3)], ids=str)
def test_positions_of_any_strides(device, sections):
    qkv, _, _, heads = make((2, 5, 6, 2, 16, 12, 1), torch.float32, device)
    cos, sin = tables(50, 12, device)
    ids = torch.randint(50, (1,) if sections is None else (3, 1, 1), device=device)
    ids = ids.expand(*(() if sections is None else (3,)), 2, 5)
    turned = torch.randint(50, (5, 2, 3), device=device).permute(2, 1, 0)
    for some in (ids, turned[0] if sections is None else turned):
        own = {"position_ids": some, "sections": sections}
        for a, b in zip(
            rope(qkv, cos, sin, **own, **heads), rope_reference(qkv, cos, sin, **own, **heads), strict=True
        ):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("wrong", [-1, 50, 2**31 - 1])
@pytest.mark.parametrize("axis", [0, 2])
def test_positions_outside_of_the_tables(device, monkeypatch, wrong, axis):
    """An error on the CPU. On a GPU, NaN in the angles of that section of that token, and nowhere else."""
    qkv, _, _, heads = make((1, 5, 6, 2, 16, 12, 1), torch.float32, device)
    cos, sin = tables(50, 12, device)
    ids = torch.randint(50, (3, 1, 5), device=device)
    ids[axis, 0, 3] = wrong
    call = functools.partial(rope, position_ids=ids, sections=(2, 1, 3), **heads)
    if device == "cpu":
        with pytest.raises(InputError, match=r"go from .* hold the positions 0 to 49"):
            call(qkv, cos, sin)
        monkeypatch.setattr(module, "_check_positions", lambda *args: None)
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
    cos, sin = tables(9, 4, device)
    ids = torch.randint(9, (2, 1, 2), device=device)
    options = dict(position_ids=ids, sections=(1, 1), **heads)
    assert torch.autograd.gradcheck(lambda x: op(x * 1, cos, sin, **options), qkv)


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
    ids = torch.randint(50, (3, 2, 3))
    turn = functools.partial(op, sections=[1, 2, 3])
    assert_compiles(
        lambda x, cos, sin, ids: turn(x * 1, cos, sin, position_ids=ids),
        [leaf, *tables(50, 12, "cpu"), ids], grads, backend="aot_eager",
    )  # fmt: skip


def test_errors(device):
    qkv, cos, sin, heads = make((2, 3, 2, 1, 8, 8, 1), torch.float32, device)
    q, k = torch.randn(2, 3, 2, 8, device=device), torch.randn(2, 3, 1, 8, device=device)
    table, ids = (cos[0], sin[0]), torch.zeros(2, 3, dtype=torch.long, device=device)
    at = functools.partial(rope, qkv, *table, **heads)
    for message, call in {
        "tables \\[P, R/2\\]": lambda: rope(qkv, cos, sin, position_ids=ids, **heads),
        r"with position_ids, cos \(0, 4\)": lambda: rope(qkv, cos[0, :0], sin[0, :0], position_ids=ids, **heads),
        "pass position_ids": lambda: rope(qkv, cos, sin, sections=(1, 1, 2), **heads),
        r"sections=\[1, 1\] .* add up to the 4": lambda: at(position_ids=ids.expand(2, 2, 3), sections=(1, 1)),
        r"sections=\[5, -1\]": lambda: at(position_ids=ids.expand(2, 2, 3), sections=(5, -1)),
        r"sections=\[1, 1, 1, 1\] must be up to": lambda: at(position_ids=ids.expand(4, 2, 3), sections=(1, 1, 1, 1)),
        r"sections=\[\] must": lambda: at(position_ids=ids[None], sections=()),
        r"int64 \[3, 1 or 2, 3\]": lambda: at(position_ids=ids, sections=(1, 1, 2)),
        r"int64 \[1 or 2, 3\]": lambda: at(position_ids=ids[:, :2]),
        "float32; expected int32": lambda: at(position_ids=ids.float()),
        "position_ids is on meta": lambda: at(position_ids=ids.to("meta")),
        r"heads \* D\] with num_heads .* = 3 \+ 2 \* 1 = 5": lambda: rope(qkv, cos, sin, num_heads=3, num_kv_heads=1),
        r"must both be \[1 or 2, 3, R/2\]": lambda: rope(qkv, cos[:, :2], sin[:, :2], **heads),
        "half width": lambda: rope(qkv, torch.cat([cos, cos], -1), torch.cat([sin, sin], -1), **heads),
        "no gradient": lambda: rope(qkv, cos.clone().requires_grad_(), sin, **heads),
        "overwrite a leaf": lambda: rope(qkv.clone().requires_grad_(), cos, sin, inplace=True, **heads),
        "expanded": lambda: rope(qkv[:1].expand(2, -1, -1), cos, sin, inplace=True, **heads),
        "sin torch.int64; they must be floating": lambda: rope(qkv, cos, sin.long(), **heads),
        "sin is on meta, qkv on": lambda: rope(qkv, cos, sin.to("meta"), **heads),
        "cos is on meta, q on": lambda: rope_qk(q, k, cos.to("meta"), sin),
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


def by_position(x, cos, sin, ids):
    return rope(x * 2, cos, sin, num_heads=6, num_kv_heads=2, position_ids=ids, sections=(2, 1, 3))


@pytest.mark.gpu
def test_positions_compile_are_captured_and_never_wait():
    qkv, cos, sin, heads = make((2, 3, 6, 2, 16, 12, 1), torch.float32, "cuda")
    grads = grads_like(rope_reference, qkv, cos, sin, heads)
    inputs = [qkv.requires_grad_(), *tables(50, 12, "cuda"), torch.randint(50, (3, 2, 3), device="cuda")]
    for dynamic in (False, True):
        assert_compiles(by_position, inputs, grads, dynamic=dynamic)
    assert_never_waits(by_position, inputs, grads)
    assert_captures(lambda *some: by_position(*some, inputs[3]), inputs[:3], grads)


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
