"""Attention: the reference against a loop over queries, the engines against the reference."""

import importlib
import itertools

import pytest
import torch

from ligermodels.errors import InputError
from ligermodels.kernels._triton import accumulator
from ligermodels.kernels.attention import attention, attention_reference
from tests.kernels.oracle import dtypes

# Every one of these reaches a different combination of engine, mask and alignment.
OPTIONS = [
    {"causal": causal, "window": window, "softcap": softcap, "key_mask": padded}
    for causal, window, softcap, padded in itertools.product([True, False], [None, 1, 3, 6], [None, 2.0], [False, True])
] + [{"window": 64, "key_mask": False}, {"scale": 0.3, "key_mask": False}, {"scale": 0.3, "key_mask": True}]
SHAPES = [(7, 7), (5, 9), (1, 6), (1, 1)]  # S, K


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


def by_hand(q, k, v, *, causal=True, window=None, softcap=None, scale=None, key_mask=None, segments=None):
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
        ] or [max(at, 0)]
        scores = (k[b, keys, h // groups] @ q[b, i, h]) * (size**-0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        rows.append(torch.softmax(scores, 0) @ v[b, keys, h // groups])
    return torch.stack(rows).view(q.shape)


def run(op, length, num_keys, options, dtype=torch.float64, device="cpu", **kwargs):
    """Output and gradient of the packed projection."""
    torch.manual_seed(0)
    packed, q, k, v = inputs(length, num_keys, dtype=dtype, device=device, **kwargs)
    out = op(q, k, v, **options)
    assert out.dtype == dtype and out.shape == q.shape
    weights = torch.randn(out.shape, dtype=torch.float64).to(device, dtype)
    return out.detach(), torch.autograd.grad(out, packed, weights)[0]


def with_mask(options, num_keys, device="cpu"):
    return {**options, "key_mask": padding(num_keys, device=device) if options["key_mask"] else None}


@pytest.mark.parametrize("length, num_keys", [*SHAPES, (6, 4)])
def test_reference_is_the_definition(length, num_keys):
    for options in OPTIONS:
        if options.get("causal", True) and length > num_keys:
            continue
        options = with_mask(options, num_keys)
        _, q, k, v = inputs(max(length, num_keys), max(length, num_keys))
        q, k, v = q[:, :length], k[:, :num_keys], v[:, :num_keys]
        torch.testing.assert_close(attention_reference(q, k, v, **options), by_hand(q, k, v, **options))


@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
@pytest.mark.parametrize("length, num_keys", SHAPES)
def test_matches_reference(length, num_keys, heads, device, poison):
    for options in OPTIONS:
        options = with_mask(options, num_keys, device)
        actual = run(attention, length, num_keys, options, heads=heads, device=device)
        exact = run(attention_reference, length, num_keys, options, heads=heads, device=device)
        # fp64 on both sides: what differs is the order of the sums.
        torch.testing.assert_close(actual, exact, rtol=1e-9, atol=1e-11, msg=lambda text, o=options: f"{o}: {text}")


def eager(q, k, v, *, causal=True, window=None, softcap=None, scale=None, key_mask=None):
    """The plain composition, every step rounded to the dtype but the softmax."""
    length, num_keys, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    scores = torch.einsum("bshd,bkhd->bhsk", q, k.repeat_interleave(groups, 2))
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(num_keys - length, num_keys, device=q.device)[:, None]
    keys = torch.arange(num_keys, device=q.device)
    visible = (keys <= at) | (not causal)
    visible = visible if window is None else visible & (keys > at - window)
    if key_mask is not None:
        visible = visible & key_mask[:, None, None]
        visible = visible | (~visible.any(-1, keepdim=True) & (keys == at))
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1, dtype=accumulator(q.dtype)).to(q.dtype)
    return torch.einsum("bhsk,bkhd->bshd", weights, v.repeat_interleave(groups, 2))


def assert_error(actual, plain, exact, name):
    """At most twice eager's error against fp64, and an ulp (in fp32 four); twice that in the worst element.

    Not once, as for kernels of our own: torch's engines have their own exponential (the hardware's, good to 2 ulp)
    and order of sums, and make the softmax's gradient as a difference of two of them.
    """
    assert actual.dtype == plain.dtype and actual.shape == exact.shape
    error, allowed = (actual - exact).abs(), (plain - exact).abs()
    ulp = torch.finfo(actual.dtype).eps * exact.abs()
    rms, rms_allowed, rms_ulp = (x.square().mean().sqrt() for x in (error, allowed, ulp))
    ulps = 4 if actual.dtype == torch.float32 else 1
    assert rms <= 2 * rms_allowed + ulps * rms_ulp, f"{name}: rms error {rms:.2e}, eager's {rms_allowed:.2e}"
    worst, worst_allowed = error.max(), allowed.max()
    assert worst <= 4 * worst_allowed + 2 * ulps * ulp.max(), (
        f"{name}: max error {worst:.2e}, eager's {worst_allowed:.2e}"
    )


@pytest.mark.parametrize("dtype", [dtype for dtype in dtypes() if dtype != torch.float64])
@pytest.mark.parametrize("length, num_keys", [(130, 130), (70, 130), (1, 130)])
@pytest.mark.parametrize("options", [
    {}, {"causal": False}, {"window": 33}, {"key_mask": True}, {"softcap": 1.0}, {"scale": 0.3},
], ids=str)  # fmt: skip
def test_as_exact_as_eager(length, num_keys, options, dtype, device):
    """Past the tile sizes of every engine."""
    options = with_mask({"key_mask": False, **options}, num_keys, device)
    values = torch.randn(2, num_keys, (4 + 2 * 2) * 16).to(device, dtype)
    weights = torch.randn(2, length, 4, 16).to(device, dtype)

    def at(op, compute):
        packed = values.to(compute).requires_grad_()
        q, k, v = (x.unflatten(-1, (-1, 16)) for x in packed.split([64, 32, 32], -1))
        out = op(q[:, num_keys - length :], k, v, **options)
        return out.detach(), *torch.autograd.grad(out, packed, weights.to(compute))

    results = at(attention, dtype), at(eager, dtype), at(attention_reference, torch.float64)
    for name, actual, plain, exact in zip(("output", "gradient"), *results, strict=True):
        assert_error(actual, plain, exact, name)


def test_inputs_are_never_copied(device):
    """Views of one buffer go in, and what comes out is the next projection's input."""
    _, q, k, v = inputs(5, 5, device=device)
    if device == "cuda":  # only the half-precision engines of a GPU read strided heads
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    out = attention(q, k, v)
    assert out.flatten(2).data_ptr() == out.data_ptr() and out.flatten(2).is_contiguous()


def test_expanded_and_transposed_inputs(device):
    q = torch.randn(2, 4, 6, 8, dtype=torch.float64, device=device).transpose(1, 2)
    k = torch.randn(2, 6, 8, 1, dtype=torch.float64, device=device).expand(-1, -1, -1, 2).transpose(2, 3)
    v = torch.randn(1, 6, 2, 8, dtype=torch.float64, device=device).expand(2, -1, -1, -1)
    for options in ({}, {"window": 2}, {"softcap": 3.0}):
        copies = attention_reference(q.contiguous(), k.contiguous(), v.contiguous(), **options)
        torch.testing.assert_close(attention(q, k, v, **options), copies)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("dtype", dtypes())
def test_packed_equals_separate(window, dtype, device):
    lengths, ends = [4, 1, 0, 7], torch.tensor([0, 4, 5, 5, 12], dtype=torch.int32, device=device)
    values = torch.randn(1, 12, (4 + 2 * 2) * 8).to(device, dtype)
    weights = torch.randn(1, 12, 4, 8).to(device, dtype)

    def at(op, compute):
        packed = values.to(compute).requires_grad_()
        out = op(*(x.unflatten(-1, (-1, 8)) for x in packed.split([32, 16, 16], -1)))
        return out.detach(), *torch.autograd.grad(out, packed, weights.to(compute))

    def whole(q, k, v):
        return attention(q, k, v, window=window, cu_seqlens=ends, max_seqlen=7)

    def separate(op):
        def call(*qkv):
            parts = zip(*(x.split(lengths, dim=1) for x in qkv), strict=True)
            return torch.cat([op(*part, window=window) for part in parts], 1)

        return call

    results = at(whole, dtype), at(separate(eager), dtype), at(separate(attention_reference), torch.float64)
    for name, actual, plain, exact in zip(("output", "gradient"), *results, strict=True):
        if dtype == torch.float64:
            torch.testing.assert_close(actual, exact)
        else:
            assert_error(actual, plain, exact, name)


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


@pytest.mark.parametrize("length, num_keys", SHAPES)
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 2}, {"softcap": 3.0}], ids=str)
def test_rows_that_see_nothing_are_finite(length, num_keys, options, device):
    """A row of padding alone, as an empty prompt in a batch makes one: no NaN, forward or backward."""
    mask = torch.ones(2, num_keys, dtype=torch.bool, device=device)
    mask[0] = False
    out, grad = run(attention, length, num_keys, {**options, "key_mask": mask}, dtype=torch.float32, device=device)
    assert out.isfinite().all() and grad.isfinite().all()


def test_decode_is_the_last_row_of_prefill(device):
    for options in ({}, {"window": 4}, {"key_mask": padding(9, device=device)}):
        _, q, k, v = inputs(9, 9, device=device)
        torch.testing.assert_close(attention(q[:, -1:], k, v, **options), attention(q, k, v, **options)[:, -1:])


@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 0), (2, 0, 3)])
def test_empty(shape, device):
    batch_size, length, num_keys = shape
    q = torch.randn(batch_size, length, 4, 8, device=device, requires_grad=True)
    k = torch.randn(batch_size, num_keys, 2, 8, device=device)
    out = attention(q, k, k)
    out.sum().backward()
    assert out.shape == q.shape and q.grad.shape == q.shape


@pytest.mark.parametrize("q, k, options, message", [
    ((2, 4, 8), (2, 4, 2, 8), {}, "do not fit together"),
    ((2, 4, 4, 8), (1, 4, 2, 8), {}, "do not fit together"),
    ((2, 4, 4, 8), (2, 4, 2, 16), {}, "do not fit together"),
    ((2, 4, 4, 8), (2, 4, 3, 8), {}, "4 query heads cannot share 3 key heads"),
    ((2, 4, 4, 8), (2, 4, 0, 8), {}, "4 query heads cannot share 0 key heads"),
    ((2, 4, 4, 8), (2, 3, 2, 8), {}, "4 causal queries but only 3 keys"),
    ((2, 4, 4, 8), (2, 0, 2, 8), {"causal": False}, "4 queries but no key"),
    ((2, 4, 4, 8), (2, 4, 2, 8), {"window": 0}, "window=0"),
    ((2, 4, 4, 8), (2, 4, 2, 8), {"softcap": 0.0}, "softcap=0.0"),
    ((2, 4, 4, 8), (2, 4, 2, 8), {"key_mask": torch.ones(2, 5) > 0}, r"\[2, 5\]; expected"),
    ((2, 4, 4, 8), (2, 4, 2, 8), {"key_mask": torch.ones(2, 4)}, "key_mask is torch.float32"),
    ((2, 4, 4, 8), (2, 4, 2, 8), {"cu_seqlens": torch.tensor([0, 4]).int()}, "end to end in one row"),
    ((1, 4, 4, 8), (1, 4, 2, 8), {"cu_seqlens": torch.tensor([0, 4])}, "expected torch.int32"),
    ((1, 4, 4, 8), (1, 4, 2, 8), {"cu_seqlens": torch.tensor([0, 3]).int()}, "runs from 0 to 3"),
    ((1, 4, 4, 8), (1, 4, 2, 8), {"cu_seqlens": torch.tensor([0, 3, 2, 4]).int()}, "must ascend"),
])  # fmt: skip
def test_bad_arguments_are_named(q, k, options, message):
    k = torch.zeros(k)
    with pytest.raises(InputError, match=message):
        attention(torch.zeros(q), k, k, **options)


def test_mixed_dtypes_are_named():
    q, k = torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, 2, 8, dtype=torch.float64)
    with pytest.raises(InputError, match=r"q is torch\.float32 on cpu, k torch\.float64"):
        attention(q, k, k)


def test_what_flash_attention_is_handed(monkeypatch):
    """The GPU's route for windows, cached prompts and packing, with a stand-in that reads cu_seqlens on the CPU."""
    module = importlib.import_module("ligermodels.kernels.attention")
    calls = []

    def stand_in(q, k, v, cu_queries, cu_keys, max_queries, max_keys, *, scale, window_size, **_):
        left, right = window_size
        calls.append((max_queries, max_keys))
        assert right in (0, -1) and cu_queries.dtype == cu_keys.dtype == torch.int32
        parts = [x.tensor_split(ends[1:-1].long()) for x, ends in ((q, cu_queries), (k, cu_keys), (v, cu_keys))]
        options = {"causal": right == 0, "window": None if left < 0 else left + 1, "scale": scale}
        return torch.cat(
            [attention_reference(*(x[None] for x in part), **options)[0] for part in zip(*parts, strict=True)]
        )

    monkeypatch.setattr(module, "varlen_attn", stand_in)
    monkeypatch.setattr(module, "_flash_takes", lambda q: q.shape[1] > 1)
    for length, num_keys, options in [(7, 7, {"window": 3}), (5, 9, {}), (5, 9, {"window": 3}), (5, 9, {"scale": 0.2})]:
        _, q, k, v = inputs(length, num_keys)
        torch.testing.assert_close(attention(q, k, v, **options), attention_reference(q, k, v, **options))
    assert calls == [(7, 7), (5, 9), (5, 7), (5, 9)]
    ends = torch.tensor([0, 3, 3, 9], dtype=torch.int32)
    _, q, k, v = inputs(9, 9, batch_size=1)
    for options in ({}, {"window": 2}, {"causal": False}):
        expected = attention_reference(q, k, v, cu_seqlens=ends, **options)
        for max_seqlen, handed in ((6, 6), (None, 9)):
            actual = attention(q, k, v, cu_seqlens=ends, max_seqlen=max_seqlen, **options)
            torch.testing.assert_close(actual, expected)
            assert calls.pop() == (handed, handed)


@pytest.mark.parametrize("length", [6, 1])
@pytest.mark.parametrize("options", [{}, {"window": 2}, {"key_mask": True}, {"softcap": 2.0}], ids=str)
def test_compiles_to_one_graph(length, options, device):
    options = with_mask({"key_mask": False, **options}, 6, device)
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    actual = run(compiled, length, 6, options, dtype=torch.float32, device=device)
    torch.testing.assert_close(actual, run(attention, length, 6, options, dtype=torch.float32, device=device))


def test_packed_compiles_to_one_graph(device):
    _, q, k, v = inputs(6, 6, batch_size=1, dtype=torch.float32, device=device)
    cu_seqlens = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    expected = attention(q, k, v, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(compiled(q, k, v, cu_seqlens=cu_seqlens), expected)


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


GPU_OPTIONS = [
    {}, {"causal": False}, {"window": 100}, {"window": 100, "key_mask": True}, {"key_mask": True},
    {"softcap": 5.0}, {"packed": True}, {"packed": True, "window": 50},
]  # fmt: skip


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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", GPU_OPTIONS, ids=str)
def test_never_synchronises(options, dtype):
    for length, num_keys in [(300, 300), (100, 300), (1, 300)]:
        if options.get("packed") and length != num_keys:
            continue
        step, *_ = on_gpu(options, length, num_keys, dtype)
        step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("options", GPU_OPTIONS, ids=str)
def test_captures_in_a_graph(options):
    for length, num_keys in [(300, 300), (100, 300), (1, 300)]:
        if options.get("packed") and length != num_keys:
            continue
        step, packed, *_ = on_gpu(options, length, num_keys, torch.bfloat16)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        with torch.no_grad():
            packed.normal_()
        graph.replay()
        for replayed, eagerly in zip(captured, step(), strict=True):
            # The engines' gradients sum in no fixed order.
            torch.testing.assert_close(replayed, eagerly, rtol=2e-2, atol=2e-2)


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


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 96, 128, 256])
@pytest.mark.parametrize("options", GPU_OPTIONS[:6], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_engines_of_a_gpu_agree(options, size, dtype):
    """Head sizes of the zoo through whichever engine they get, against fp64 beside eager."""
    for length, num_keys in [(300, 300), (100, 300), (1, 300)]:
        step, packed, weights, settled = on_gpu(options, length, num_keys, dtype, size)

        def at(op, compute, packed=packed, weights=weights, settled=settled, start=num_keys - length):
            leaf = packed.detach().to(compute).requires_grad_()
            q, k, v = (x.unflatten(-1, (-1, size)) for x in leaf.split([8 * size, 2 * size, 2 * size], -1))
            out = op(q[:, start:], k, v, **settled)
            return out.detach(), *torch.autograd.grad(out, leaf, weights.to(compute))

        results = step(), at(eager, dtype), at(attention_reference, torch.float64)
        for name, actual, plain, exact in zip(("output", "gradient"), *results, strict=True):
            assert_error(actual.detach(), plain, exact, f"{name}, S={length}, K={num_keys}")
