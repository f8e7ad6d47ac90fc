"""Attention: the reference against a loop over queries, the engines against the reference."""

import importlib
import itertools

import pytest
import torch

from ligermodels.kernels._triton import use_triton
from ligermodels.kernels.attention import attention, attention_reference
from ligermodels.kernels.flash_attention import flash_attention

# Every one of these reaches a different combination of engine, mask and alignment.


needs_triton = pytest.mark.skipif(
    not use_triton(torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu")), reason="needs Triton"
)


@pytest.fixture
def torch_on_cpu(monkeypatch):
    """On the CPU torch's engines, though Triton be interpreted: its kernels have their tests below."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(importlib.import_module("ligermodels.kernels.attention"), "use_triton", lambda x: False)


def inputs(length, num_keys, heads=(4, 2), size=8, batch_size=2, dtype=torch.float64, device="cpu"):
    """q, k, v as strided views of packed rows, as a projection leaves them."""
    num_heads, num_kv_heads = heads
    packed = torch.randn(batch_size, num_keys, (num_heads + 2 * num_kv_heads) * size, dtype=torch.float64)
    packed = packed.to(device, dtype).requires_grad_()
    q, k, v = packed.split([num_heads * size, num_kv_heads * size, num_kv_heads * size], dim=-1)
    q, k, v = (x.unflatten(-1, (-1, size)) for x in (q, k, v))
    return packed, q[:, num_keys - length :], k, v


def padding(num_keys, batch_size=2, device="cpu"):
    """Left padding in row 0 (its first queries see nothing), a hole and right padding in row 1."""
    mask = torch.ones(2, num_keys, dtype=torch.bool)
    mask[0, : (num_keys + 1) // 2] = False
    mask[1, -1] = False
    mask[1, num_keys // 3] = False
    return mask[:batch_size].to(device)


def by_hand(q, k, v, *, causal=True, window=None, softcap=None, scale=None, key_mask=None, segments=None, padding=None):
    """One query, one head at a time, visible keys collected in a list."""
    batch_size, length, num_heads, size = q.shape
    num_keys, groups = k.shape[1], num_heads // k.shape[2]
    rows = []
    for b, i, h in itertools.product(range(batch_size), range(length), range(num_heads)):
        at = i + num_keys - length
        keys = [
            j
            for j in range(num_keys)
            if (not causal or j <= at)
            and (window is None or j > at - window)
            and (key_mask is None or key_mask[b, j])
            and (segments is None or segments[j] == segments[at])
            and (padding is None or not (padding[b, i] and padding[b, j]))
        ] or [max(at, 0)]
        scores = (k[b, keys, h // groups] @ q[b, i, h]) * (size**-0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        rows.append(torch.softmax(scores, 0) @ v[b, keys, h // groups])
    return torch.stack(rows).view(q.shape)


@pytest.mark.parametrize("length, num_keys", [*SHAPES, (6, 4)])
def test_reference_is_the_definition(length, num_keys):
    for options in OPTIONS:
        if options.get("causal", True) and length > num_keys:
            continue
        options = with_mask(options, num_keys)
        _, q, k, v = inputs(max(length, num_keys), max(length, num_keys))
        q, k, v = q[:, :length], k[:, :num_keys], v[:, :num_keys]
        torch.testing.assert_close(attention_reference(q, k, v, **options), by_hand(q, k, v, **options))


def test_inputs_are_never_copied(device):
    """Views of one buffer go in, and what comes out is the next projection's input."""
    _, q, k, v = inputs(5, 5, device=device)
    if device == "cuda":  # only the half-precision engines of a GPU read strided heads
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    out = attention(q, k, v)
    assert out.flatten(2).data_ptr() == out.data_ptr() and out.flatten(2).is_contiguous()


@pytest.mark.parametrize("options", [{}, {"window": 2}, {"causal": False}, {"softcap": 2.0}], ids=str)
def test_packed_is_the_definition(options, device):
    ends, segments = torch.tensor([0, 4, 5, 5, 12], dtype=torch.int32), [0] * 4 + [1] + [3] * 7
    _, q, k, v = inputs(12, 12, batch_size=1)
    for key_mask in (None, padding(12, batch_size=1)):
        exact = by_hand(q, k, v, segments=segments, key_mask=key_mask, **options)
        reference = attention_reference(q, k, v, cu_seqlens=ends, key_mask=key_mask, **options)
        torch.testing.assert_close(reference, exact)
        there = [x if x is None else x.detach().to(device) for x in (q, k, v, ends, key_mask)]
        actual = attention(*there[:3], cu_seqlens=there[3], key_mask=there[4], **options)
        torch.testing.assert_close(actual.cpu(), exact)


@pytest.mark.parametrize("options", [{"causal": False}, {}, {"causal": False, "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("masked, segments", [(False, None), (True, None), (True, [0] * 4 + [1] * 5)])
def test_padding_is_the_definition(options, masked, segments, device, torch_on_cpu):
    """Padding does not see padding, in no engine; a row that is nothing but padding sees, each token, itself."""
    batch_size = 2 if segments is None else 1
    packed, q, k, v = inputs(9, 9, batch_size=batch_size)
    pads = torch.rand(batch_size, 9) < 0.4
    pads[0] = torch.arange(9) > 4 if batch_size == 1 else True
    options = {**options, "key_mask": padding(9, batch_size) if masked else None, "padding": pads}
    exact = by_hand(q, k, v, segments=segments, **options)
    weights = torch.randn_like(exact)
    (grad,) = torch.autograd.grad(exact, packed, weights)
    leaf = packed.detach().to(device).requires_grad_()
    q, k, v = (x.unflatten(-1, (-1, 8)) for x in leaf.split([32, 16, 16], -1))
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    for op, bounds in ((attention, ends), (attention, ends.to(device)), (attention_reference, ends.to(device))):
        actual = op(q, k, v, cu_seqlens=None if segments is None else bounds, **options)
        torch.testing.assert_close(actual.cpu(), exact)
        torch.testing.assert_close(torch.autograd.grad(actual, leaf, weights.to(device))[0].cpu(), grad)


RUNS = [
    ([12], [(1, 12)]),
    ([4, 4, 4], [(3, 4)]),
    ([5, 0, 5, 2], [(2, 5), (1, 2)]),
    ([1, 1, 6, 1, 3, 0], [(2, 1), (1, 6), (1, 1), (1, 3)]),
]


@pytest.mark.parametrize("lengths, runs", RUNS, ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 2}, {"causal": False}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_packed_by_lengths_that_the_host_knows(lengths, runs, options, padded, device, torch_on_cpu, calls):
    """Sequences of one length side by side are one batch, and nothing is hidden in it but by options."""
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)  # on the CPU, wherever q is
    segments = [i for i, length in enumerate(lengths) for _ in range(length)]
    key_mask = padding(12, batch_size=1) if padded else None
    packed, q, k, v = inputs(12, 12, batch_size=1)
    exact = by_hand(q, k, v, segments=segments, key_mask=key_mask, **options)
    weights = torch.randn(exact.shape, dtype=torch.float64)
    grad = torch.autograd.grad(exact, packed, weights)[0]
    leaf = packed.detach().to(device).requires_grad_()
    q, k, v = (x.unflatten(-1, (-1, 8)) for x in leaf.split([32, 16, 16], -1))
    mask = None if key_mask is None else key_mask.to(device)
    actual = attention(q, k, v, cu_seqlens=ends, key_mask=mask, **options)
    torch.testing.assert_close(actual.cpu(), exact)
    torch.testing.assert_close(torch.autograd.grad(actual, leaf, weights.to(device))[0].cpu(), grad)
    if not padded and options != {"window": 2}:
        assert calls == [(*run, False) for run in runs]


@pytest.mark.parametrize("length, num_keys", SHAPES)
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 2}, {"softcap": 3.0}], ids=str)
def test_rows_that_see_nothing_are_finite(length, num_keys, options, device):
    """A row of padding alone, as an empty prompt in a batch makes one: no NaN, forward or backward."""
    mask = torch.ones(2, num_keys, dtype=torch.bool, device=device)
    mask[0] = False
    out, grad = run(attention, length, num_keys, {**options, "key_mask": mask}, dtype=torch.float32, device=device)
    assert out.isfinite().all() and grad.isfinite().all()


def test_decode_is_the_last_row_of_prefill(device):
    for options in ({}, {"window": 4}, {"key_mask": padding(9, device=device)}, {"softcap": 2.0}):
        _, q, k, v = inputs(9, 9, device=device)
        torch.testing.assert_close(attention(q[:, -1:], k, v, **options), attention(q, k, v, **options)[:, -1:])


def test_one_compiled_decode_serves_growing_caches(device):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_keys in (5, 6, 7, 300):
        q = torch.randn(2, 1, 8, 64, device=device, dtype=dtype)
        k, v = torch.randn(2, 2, num_keys, 2, 64, device=device, dtype=dtype)
        with torch.no_grad():
            torch.testing.assert_close(compiled(q, k, v), attention(q, k, v))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def on_gpu(options, length, num_keys, dtype, size=128):
    """A step on bf16 views of packed rows, as a closure, and its inputs."""
    options = dict(options)
    batch_size = 1 if options.get("packed") else 2
    if options.pop("packed", False):
        options["cu_seqlens"] = torch.tensor([0, length // 3, length], dtype=torch.int32, device="cuda")
        options["max_seqlen"] = length
    if options.pop("key_mask", False):
        options["key_mask"] = padding(num_keys, batch_size, "cuda")
    packed = torch.randn(batch_size, num_keys, (8 + 2 * 2) * size, device="cuda", dtype=dtype, requires_grad=True)
    weights = torch.randn(batch_size, length, 8, size, device="cuda", dtype=dtype)

    def step():
        q, k, v = (x.unflatten(-1, (-1, size)) for x in packed.split([8 * size, 2 * size, 2 * size], -1))
        out = attention(q[:, num_keys - length :], k, v, **options)
        return out, torch.autograd.grad(out, packed, weights)[0]

    return step, packed, weights, options


@pytest.mark.gpu
@pytest.mark.parametrize("options", [
    {}, {"causal": False}, {"window": 100}, {"packed": True}, {"packed": True, "window": 50},
], ids=str)  # fmt: skip
def test_scores_are_never_in_memory(options):
    """A mask of the scores' shape would be many times what bf16 attention takes at 16384 tokens."""
    length = 16384
    step, packed, *_ = on_gpu(options, length, length, torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    spent = torch.cuda.max_memory_allocated() - before
    # The output; dq, dk, dv, each with all query heads at most; dq again in fp32; and their packed sum.
    assert spent < 12 * packed.shape[0] * length * 8 * 128 * 2


# The Triton kernels themselves, plain causal attention included, which `attention` leaves to torch.

flash = whole(flash_attention)


def flash_case(options, length, num_keys, *, heads=(4, 2), size=16, dtype=torch.float64, device="cpu"):
    """Leaves q, k, v, a gradient of the output, and the options as `flash` takes them."""
    options = dict(options)
    batch_size = 1 if options.get("packed") else 2
    if options.pop("packed", False):
        ends = [0, num_keys // 3, num_keys // 3, num_keys // 2 + 1, num_keys]
        options["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32, device=device)
    if options.pop("key_mask", False):
        options["key_mask"] = padding(num_keys, batch_size, device)
        options["key_mask"][0, : num_keys // 2] = False
    if options.pop("padding", False):  # the end of each row, as the tiles of an image have it, and some before
        options["padding"] = torch.rand(batch_size, length, device=device) < 0.1
        options["padding"][0, -length // 3 :] = True
    packed = torch.randn(batch_size, max(length, num_keys), heads[0] + 2 * heads[1], size, device=device).to(dtype)
    q, k, v = packed.split([heads[0], heads[1], heads[1]], 2)
    weights = torch.randn(batch_size, length, heads[0], size, device=device).to(dtype)
    return [x.detach().requires_grad_() for x in (q[:, -length:], k[:, :num_keys], v[:, :num_keys])], weights, options


def gradients(op, leaves, weights, options, dtype=None):
    dtype = leaves[0].dtype if dtype is None else dtype
    leaves = [x.detach().to(dtype).requires_grad_() for x in leaves]
    out = op(*leaves, **options)
    return out.detach(), *torch.autograd.grad(out, leaves, weights.to(dtype))


@needs_triton
@pytest.mark.parametrize("seen", [(0, 65), (64, 65), (63, 64), (3, 131), (131, 133), (0, 133), (5, 5)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_flash_leaves_out_hidden_ends(seen, causal, device, poison):
    """Loops begin at the first key that is seen and end behind the last one, whatever the borders of tiles."""
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    leaves, weights, options = flash_case({"causal": causal}, 133, 133, heads=(1, 1), dtype=dtype, device=device)
    mask = torch.zeros(2, 133, dtype=torch.bool, device=device)
    mask[0, slice(*seen)] = mask[1, ::7] = True
    exact = gradients(attention_reference, leaves, weights, options | {"key_mask": mask}, torch.float64)
    actual = gradients(flash, leaves, weights, options | {"key_mask": mask})
    for a, b in zip(actual, exact, strict=True):
        assert (a.double() - b).norm() <= (
            1e-10 if dtype == torch.float64 else 5e-3
        ) * b.norm()  # bf16: 2^-8 a rounding


@needs_triton
@pytest.mark.parametrize("num_keys", [1, 7, 700])
def test_one_query_is_the_last_of_many(num_keys, device):
    """Without gradients its keys are split among programs, more than there are keys for."""
    dtype = torch.float32
    (q, k, v), _, options = flash_case({"softcap": 2.0}, num_keys, num_keys, heads=(6, 2), dtype=dtype, device=device)
    expected = attention_reference(q.double(), k.double(), v.double(), **options)[:, -1:]
    with torch.no_grad():
        split = flash(q[:, -1:], k, v, **options)
    for actual in (split, flash(q[:, -1:], k, v, **options)):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)


@needs_triton
def test_rows_do_not_leak(device):
    """The last tile of a row of the batch ends in the next row, which holds NaN."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    leaves, weights, options = flash_case({}, 130, 130, dtype=dtype, device=device)
    for x in (*leaves, weights):
        x.detach()[1] = float("nan")
    for x in gradients(flash, leaves, weights, options):
        assert x[0].isfinite().all() and x[1].isnan().all()


@needs_triton
@pytest.mark.parametrize("options, length, own", [
    ({}, 9, False), ({"causal": False}, 9, False), ({"causal": False}, 5, False), ({}, 1, False), ({}, 5, True),
    ({"window": 3}, 9, True), ({"window": 9}, 9, False), ({"key_mask": True}, 9, True), ({"packed": True}, 9, True),
    ({"softcap": 2.0}, 9, True), ({"softcap": 2.0}, 1, True), ({"window": 3}, 1, False),
], ids=str)  # fmt: skip
def test_which_engine(options, length, own, device, monkeypatch):
    calls = []
    module = importlib.import_module("ligermodels.kernels.attention")
    monkeypatch.setattr(module, "flash_attention", lambda *args, **o: calls.append(o) or flash_attention(*args, **o))
    leaves, weights, options = flash_case(options, length, 9, dtype=torch.float16, device=device)
    actual = gradients(attention, leaves, weights, options)
    assert len(calls) == own
    torch.testing.assert_close(actual, gradients(attention_reference, leaves, weights, options), rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
def test_flash_past_int32_offsets(copy_engine):
    far = torch.empty(2**31 + 2**20, dtype=torch.bfloat16, device="cuda")
    q, k, v = (torch.as_strided(far, (2, 70, 2, 64), (2**31, 384, 64, 1), at).normal_() for at in (0, 128, 256))
    weights = torch.randn(2, 70, 2, 64, dtype=torch.bfloat16, device="cuda")
    near = gradients(flash, [x.contiguous() for x in (q, k, v)], weights, {"softcap": 3.0})
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash(*leaves, softcap=3.0)
    for actual, expected in zip((out, *torch.autograd.grad(out, leaves, weights)), near, strict=True):
        assert torch.equal(actual, expected)
