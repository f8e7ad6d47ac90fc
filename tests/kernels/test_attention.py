"""Attention: the reference against a loop over queries, the engines against the reference."""

import importlib
import itertools

import pytest
import torch

from ligermodels.errors import InputError
from ligermodels.kernels._triton import INTERPRET, accumulator, use_triton
from ligermodels.kernels.attention import attention, attention_reference
from ligermodels.kernels.flash_attention import flash_attention
from ligermodels.kernels.flash_masks import sequence_ends
from tests.kernels.on_gpu import assert_captures, assert_compiles, assert_never_waits
from tests.kernels.oracle import assert_as_exact, dtypes

# Every one of these reaches a different combination of engine, mask and alignment.
OPTIONS = [
    {"causal": causal, "window": window, "softcap": softcap, "key_mask": padded}
    for causal, window, softcap, padded in itertools.product([True, False], [None, 1, 3, 6], [None, 2.0], [False, True])
] + [{"window": 64, "key_mask": False}, {"scale": 0.3, "key_mask": False}, {"scale": 0.3, "key_mask": True}]
SHAPES = [(7, 7), (5, 9), (1, 6), (1, 1)]  # S, K


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
def test_matches_reference(length, num_keys, heads, device, torch_on_cpu, poison):
    for options in OPTIONS:
        options = with_mask(options, num_keys, device)
        actual = run(attention, length, num_keys, options, heads=heads, device=device)
        exact = run(attention_reference, length, num_keys, options, heads=heads, device=device)
        # fp64 on both sides: what differs is the order of the sums.
        torch.testing.assert_close(actual, exact, rtol=1e-9, atol=1e-11, msg=lambda text, o=options: f"{o}: {text}")


def eager(q, k, v, *, causal=True, window=None, softcap=None, scale=None, key_mask=None, padding=None):
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
    if padding is not None:
        visible = visible & ~(padding[:, None, :, None] & padding[:, None, None])
    if key_mask is not None or padding is not None:
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


def whole(op):
    """op with attention's defaults, for `flash_attention`, which has none."""

    def call(
        q, k, v, *, causal=True, window=None, softcap=None, scale=None, key_mask=None, cu_seqlens=None, padding=None
    ):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        options = {"causal": causal, "window": window, "softcap": softcap, "key_mask": key_mask, "padding": padding}
        return op(q, k, v, scale=scale, cu_seqlens=cu_seqlens, **options)

    return call


@pytest.mark.parametrize("dtype", [dtype for dtype in dtypes() if dtype != torch.float64])
@pytest.mark.parametrize("length, num_keys", [(130, 130), (70, 130), (1, 130)])
@pytest.mark.parametrize("options", [
    {}, {"causal": False}, {"window": 33}, {"key_mask": True}, {"softcap": 1.0}, {"scale": 0.3},
], ids=str)  # fmt: skip
def test_as_exact_as_eager(length, num_keys, options, dtype, device, torch_on_cpu):
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


@pytest.fixture
def calls(monkeypatch):
    """(rows of the batch, queries, has a mask) of each call of an engine, the reference included."""
    module, made = importlib.import_module("ligermodels.kernels.attention"), []

    def watch(name, has_mask):
        engine = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda q, *a, **o: made.append((*q.shape[:2], has_mask(*a, **o))) or engine(q, *a, **o)
        )

    watch("_sdpa", lambda k, v, mask, *rest: mask is not None)
    watch("_decode", lambda k, v, mask, scale: mask is not None)
    watch("flash_attention", lambda k, v, *, key_mask, cu_seqlens, **o: key_mask is not None or cu_seqlens is not None)
    watch("attention_reference", lambda k, v, *, key_mask, **o: key_mask is not None)
    return made


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


@needs_triton
def test_packed_engine_by_length(device, monkeypatch, calls):
    """Known lengths or not: short sequences go to the kernels of packed ones, long ones to torch, one by one."""
    module = importlib.import_module("ligermodels.kernels.attention")
    q, k, v = torch.randn(3, 1, 12, 2, 8, device=device).half()
    ends = torch.tensor([0, 4, 8, 12], dtype=torch.int32)
    results = [attention(q, k, v, cu_seqlens=ends, causal=False)]
    monkeypatch.setattr(module, "_LONG", 12)
    results.append(attention(q, k, v, cu_seqlens=ends, causal=False))
    attention(q, k, v, cu_seqlens=ends[::3], causal=False)
    assert calls == [(1, 12, True), (3, 4, False), (1, 12, False)]
    torch.testing.assert_close(results[0], results[1], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("turns", "heads"), [(1, [3]), (2, [2, 1]), (3, [1, 1, 1]), (9, [1, 1, 1])])
def test_heads_take_turns_where_the_text_is_long(turns, heads, causal, device, torch_on_cpu, monkeypatch):
    module = importlib.import_module("ligermodels.kernels.attention")
    packed, q, k, v = inputs(9, 9, heads=(6, 3), device=device)
    dy, engine, taken = torch.randn_like(q), module._sdpa, []
    expected = attention(q, k, v, causal=causal)
    (gradient,) = torch.autograd.grad(expected, packed, dy, retain_graph=True)

    def sdpa(q, k, *others):
        taken.append(k.shape[2])
        return engine(q, k, *others)

    monkeypatch.setattr(module, "_sdpa", sdpa)
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", q.numel() // turns)
    found = attention(q, k, v, causal=causal, head_chunks=True)
    assert taken == heads and (found.is_contiguous() or not expected.is_contiguous())
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, packed, dy)[0], gradient)
    taken.clear()
    attention(q, k, v, causal=causal)
    with torch.no_grad():
        torch.testing.assert_close(attention(q, k, v, causal=causal, head_chunks=True), expected)
    assert taken == [3, 3]


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
    ((2, 4, 4, 8), (2, 4, 2, 8), {"padding": torch.ones(2, 4)}, r"padding is torch.float32 \[2, 4\]"),
    ((2, 4, 4, 8), (2, 4, 2, 8), {"padding": torch.ones(1, 4) > 0}, r"expected torch.bool \[2, 4\]"),
    ((2, 4, 4, 8), (2, 5, 2, 8), {"padding": torch.ones(2, 4) > 0}, "4 queries and 5 keys"),
    ((1, 4, 4, 8), (1, 4, 2, 8), {"cu_seqlens": torch.tensor([0, 4])}, "expected torch.int32"),
    ((1, 4, 4, 8), (1, 4, 2, 8), {"cu_seqlens": torch.tensor([0, 3]).int()}, "runs from 0 to 3"),
    ((1, 4, 4, 8), (1, 4, 2, 8), {"cu_seqlens": torch.tensor([0, 3, 2, 4]).int()}, "must ascend"),
    ((1, 4, 4, 8), (1, 4, 2, 8), {"cu_seqlens": torch.tensor([0, 4]).int().to("meta")}, "cu_seqlens is on meta"),
    ((2, 4, 4, 8), (2, 4, 2, 8), {"key_mask": torch.ones(2, 4, device="meta") > 0}, "key_mask is on meta, q on cpu"),
    ((2, 4, 4, 8), (2, 4, 2, 8), {"padding": torch.ones(2, 4, device="meta") > 0}, "padding is on meta, q on cpu"),
])  # fmt: skip
def test_bad_arguments_are_named(q, k, options, message):
    k = torch.zeros(k)
    with pytest.raises(InputError, match=message):
        attention(torch.zeros(q), k, k, **options)


def test_mixed_dtypes_are_named():
    q, k = torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, 2, 8, dtype=torch.float64)
    with pytest.raises(InputError, match=r"q is torch\.float32 on cpu, k torch\.float64"):
        attention(q, k, k)


@pytest.mark.parametrize("length", [6, 1])
@pytest.mark.parametrize("options", [{}, {"window": 2}, {"key_mask": True}, {"softcap": 2.0}], ids=str)
def test_compiles_to_one_graph(length, options, device, torch_on_cpu):
    options = with_mask({"key_mask": False, **options}, 6, device)
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    actual = run(compiled, length, 6, options, dtype=torch.float32, device=device)
    torch.testing.assert_close(actual, run(attention, length, 6, options, dtype=torch.float32, device=device))


def test_packed_compiles_to_one_graph(device, torch_on_cpu):
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
            if options and options != {"causal": False} and length > 1:
                assert torch.equal(replayed, eagerly)
            else:  # the gradients of torch's engines sum in no fixed order
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
def test_turns_need_less_memory(monkeypatch):
    """Of a text of 65536 tokens, whose backward otherwise needs four times q beside its results."""
    module, peaks = importlib.import_module("ligermodels.kernels.attention"), []
    packed, q, k, v = inputs(2**16, 2**16, heads=(16, 4), size=64, batch_size=1, dtype=torch.bfloat16, device="cuda")
    dy = torch.randn_like(q)
    for turn in (2**40, 2**25, 2**40, 2**24):
        monkeypatch.setattr(module, "_CHUNK_ELEMENTS", turn)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradient = torch.autograd.grad(attention(q, k, v, head_chunks=True), packed, dy, retain_graph=True)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del gradient
    # Of four times q two turns need two, and four turns one; the joined output is one more. Half is left for the rest.
    assert peaks[1] < peaks[0] - q.nbytes // 2 and peaks[3] < peaks[2] - q.nbytes


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


# The Triton kernels themselves, plain causal attention included, which `attention` leaves to torch.

FLASH_OPTIONS = [
    {}, {"causal": False}, {"window": 40}, {"window": 1}, {"causal": False, "window": 40}, {"softcap": 3.0},
    {"softcap": 3.0, "window": 40}, {"softcap": 90.0}, {"scale": -0.3}, {"scale": 0.0},
    {"key_mask": True}, {"key_mask": True, "window": 40, "softcap": 3.0}, {"packed": True},
    {"packed": True, "causal": False}, {"packed": True, "window": 40, "softcap": 3.0},
    {"packed": True, "key_mask": True},
    {"causal": False, "padding": True}, {"packed": True, "padding": True, "key_mask": True, "causal": False},
]  # fmt: skip
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


def assert_flash(options, length, num_keys, dtype, device, **kwargs):
    case = flash_case(options, length, num_keys, dtype=dtype, device=device, **kwargs)
    packed = {"cu_seqlens": case[2].pop("cu_seqlens")} if "cu_seqlens" in case[2] else {}
    exact = gradients(lambda *qkv, **o: attention_reference(*qkv, **o, **packed), *case, torch.float64)
    actual = gradients(lambda *qkv, **o: flash(*qkv, **o, **packed), *case)
    if dtype == torch.float64:
        return torch.testing.assert_close(actual, exact, rtol=1e-9, atol=1e-11)

    def separate(*qkv, key_mask=None, **o):
        ends = packed["cu_seqlens"].tolist()
        rows = [slice(*pair) for pair in itertools.pairwise(ends)]
        masks = [None if key_mask is None else key_mask[:, row] for row in rows]
        return torch.cat(
            [eager(*(x[:, row] for x in qkv), key_mask=m, **o) for row, m in zip(rows, masks, strict=True)], 1
        )

    plain = gradients(separate if packed else eager, *case)
    for name, *results in zip(("output", "dq", "dk", "dv"), actual, plain, exact, strict=True):
        # In fp32 no rounding of the result hides the hardware's exponential, good to 2 ulp, and that the softmax's
        # gradient is a difference of two sums.
        judge = assert_error if dtype == torch.float32 else assert_as_exact
        judge(*results, f"{name}, {options}, S={length}, K={num_keys}, {kwargs}")


@needs_triton
@pytest.mark.skipif(not INTERPRET, reason="no GPU multiplies tiles of fp64")
@pytest.mark.parametrize("options", FLASH_OPTIONS, ids=str)
def test_flash_is_the_reference(options, poison):
    """Across the borders of tiles, in fp64, where only the order of the sums differs."""
    same = options.get("packed") or options.get("padding")
    for length, num_keys in [(70, 70)] if same else [(70, 133), (1, 1)]:
        assert_flash(options, length, num_keys, torch.float64, "cpu")
    if not options.get("causal", True) and not same:
        assert_flash(options, 70, 40, torch.float64, "cpu")


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
@pytest.mark.parametrize("dtype", [dtype for dtype in dtypes() if dtype != torch.float64])
@pytest.mark.parametrize("options", [
    {}, {"window": 40}, {"softcap": 1.0}, {"softcap": 50.0}, {"key_mask": True}, {"packed": True},
    {"padding": True, "causal": False},
], ids=str)  # fmt: skip
def test_flash_is_as_exact_as_eager(options, dtype, device):
    assert_flash(options, 150, 150, dtype, device)


@needs_triton
@pytest.mark.parametrize("size", [3, 8, 12, 40, 80, 96, 192, 256])
def test_flash_of_any_head_size(size, device, poison):
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    for options in ({}, {"softcap": 3.0, "window": 9}):
        assert_flash(options, 21, 37, dtype, device, heads=(3, 1), size=size)


@needs_triton
@pytest.mark.skipif(not INTERPRET, reason="no GPU multiplies tiles of fp64")
def test_flash_gradcheck():
    leaves, _, options = flash_case({"softcap": 1.0, "window": 2, "key_mask": True}, 3, 4, heads=(2, 1), size=2)
    assert torch.autograd.gradcheck(lambda *qkv: flash(*qkv, **options), leaves, fast_mode=True)


@needs_triton
@pytest.mark.parametrize("frozen", list(itertools.product([False, True], repeat=3)))
def test_frozen_inputs_get_no_gradient(frozen, device):
    """And the others the same one."""
    dtype = torch.float32
    for size in (8, 136):
        leaves, weights, options = flash_case({"softcap": 2.0}, 5, 7, size=size, dtype=dtype, device=device)
        expected = gradients(flash, leaves, weights, options)[1:]
        some = [x.detach().requires_grad_(not still) for x, still in zip(leaves, frozen, strict=True)]
        out = flash(*some, **options)
        assert out.requires_grad == (not all(frozen))
        if out.requires_grad:
            out.backward(weights)
        for x, still, grad in zip(some, frozen, expected, strict=True):
            assert x.grad is None if still else torch.equal(x.grad, grad)


@needs_triton
def test_expanded_gradient(device):
    """What sum() and mean() send back has no strides."""
    leaves, weights, options = flash_case({"softcap": 2.0}, 5, 7, dtype=torch.float32, device=device)
    for like in (torch.ones_like(weights), torch.ones(1, device=device).expand(weights.shape)):
        out = flash(*leaves, **options)
        torch.testing.assert_close(
            torch.autograd.grad(out, leaves, like), gradients(flash, leaves, torch.ones_like(weights), options)[1:]
        )


@needs_triton
@pytest.mark.parametrize("lengths", [[5], [0, 5], [3, 0, 0, 4], [1] * 17, [300, 0, 1, 2, 300, 7, 0]], ids=str)
def test_ends_of_sequences(lengths, device, poison):
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    expected = [[end - n, end] for n, end in zip(lengths, itertools.accumulate(lengths), strict=True) for _ in range(n)]
    assert sequence_ends(cu_seqlens, sum(lengths)).tolist() == expected


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


@pytest.fixture
def copy_engine(monkeypatch):
    """The kernels of large inputs, on small ones."""
    monkeypatch.setattr(importlib.import_module("ligermodels.kernels.flash_attention"), "_SMALL", 0)


FLASH_GPU = [
    {}, {"window": 100}, {"softcap": 5.0}, {"key_mask": True}, {"packed": True, "window": 50},
    {"packed": True, "causal": False}, {"padding": True, "causal": False},
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", FLASH_GPU, ids=str)
def test_flash_on_a_gpu(options, dtype, size, copy_engine):
    for length, num_keys in [(300, 300), (100, 300)]:
        if length == num_keys or not (options.get("packed") or options.get("padding")):
            assert_flash(options, length, num_keys, dtype, "cuda", heads=(8, 2), size=size)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128, 256])
def test_flash_without_the_copy_engine(size, copy_engine, monkeypatch):
    """As on cards that have none, and for addresses it cannot take."""
    module = importlib.import_module("ligermodels.kernels.flash_attention")
    taken = []
    takes = module._tma_takes
    monkeypatch.setattr(module, "_tma_takes", lambda *tensors: taken.append(takes(*tensors)) or taken[-1])
    (q, k, v), weights, options = flash_case({"softcap": 5.0}, 300, 300, dtype=torch.bfloat16, device="cuda", size=size)
    expected = gradients(flash, (q, k, v), weights, options)
    shifted = [torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x) for x in (q, k, v)]
    before = len(taken)
    out = flash(*(x.detach().requires_grad_() for x in shifted), **options)
    assert not any(taken[before:])
    torch.testing.assert_close(out, expected[0], rtol=2e-2, atol=2e-3)
    monkeypatch.setattr(module, "_tma_takes", lambda *tensors: False)
    for actual, other in zip(gradients(flash, (q, k, v), weights, options), expected, strict=True):
        torch.testing.assert_close(actual, other, rtol=2e-2, atol=2e-2)


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


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("options", FLASH_GPU, ids=str)
def test_flash_compiles_whole(options, dynamic, copy_engine):
    leaves, weights, options = flash_case(options, 300, 300, dtype=torch.bfloat16, device="cuda", size=64)
    assert_compiles(lambda *qkv: flash(*qkv, **options), leaves, [weights], dynamic=dynamic)


@pytest.mark.gpu
@pytest.mark.parametrize("options", FLASH_GPU, ids=str)
def test_flash_is_captured_and_never_waits(options, copy_engine):
    """And gives the same bits each time."""
    leaves, weights, options = flash_case(options, 300, 300, dtype=torch.bfloat16, device="cuda", size=128)

    def op(*qkv):
        return flash(*qkv, **options)

    assert_captures(op, leaves, [weights])
    assert_never_waits(op, leaves, [weights])
    for first, second in zip(*(gradients(op, leaves, weights, {}) for _ in range(2)), strict=True):
        assert torch.equal(first, second)
