"""Attention: masks by definition, packed sequences, hidden rows, compilation."""

import importlib
import itertools
import random

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ligermodels.kernels import attention, attention_reference
from ligermodels.kernels._recompute import attach_to_view, handle_of
from ligermodels.kernels.attention import _flash_attention, _unfused_attention
from ligermodels.kernels.attention._torch_sinks import attention_with_sinks
from ligermodels.kernels.linear.linear import linears
from ligermodels.kernels.linear.operand import LinearOperand
from tests.kernels.ops.attention import our_attention, visible, wide_attention

engines = importlib.import_module("ligermodels.kernels.attention.attention")  # the name in the package is the function


def inputs(length, num_keys, heads=(4, 2), size=8, batch_size=2, dtype=torch.float64, device="cpu"):
    """q, k, v as strided views of packed rows, as a projection leaves them."""
    num_heads, num_kv_heads = heads
    packed = torch.randn(batch_size, num_keys, (num_heads + 2 * num_kv_heads) * size, dtype=torch.float64)
    packed = packed.to(device, dtype).requires_grad_()
    q, k, v = packed.split([num_heads * size, num_kv_heads * size, num_kv_heads * size], dim=-1)
    q, k, v = (x.unflatten(-1, (-1, size)) for x in (q, k, v))
    return packed, q[:, num_keys - length :], k, v


def left_and_right_padding(num_keys, batch_size=2, device="cpu"):
    """Left padding in row 0 (its first queries see nothing), a hole and right padding in row 1."""
    mask = torch.ones(2, num_keys, dtype=torch.bool)
    mask[0, : (num_keys + 1) // 2] = False
    mask[1, -1] = False
    mask[1, num_keys // 3] = False
    return mask[:batch_size].to(device)


def by_hand(
    q, k, v, *, causal=True, window=None, softcap=None, scale=None, key_mask=None, segments=None, together=None,
    sinks=None,
):  # fmt: skip
    """One query, one head at a time, visible keys collected in a list."""
    batch_size, length, num_heads, size = q.shape
    num_keys, groups = k.shape[1], num_heads // k.shape[2]
    rows = []
    for b, i, h in itertools.product(range(batch_size), range(length), range(num_heads)):
        at = i + num_keys - length
        keys = [
            j
            for j in range(num_keys)
            if (not causal or j <= at or (together is not None and together[b, j] == together[b, at] >= 0))
            and (window is None or j > at - window)
            and (key_mask is None or key_mask[b, j])
            and (segments is None or segments[j] == segments[at])
        ] or ([max(at, 0)] if sinks is None else [])
        scores = (k[b, keys, h // groups] @ q[b, i, h]) * (size**-0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks[h : h + 1]])
        rows.append(torch.softmax(scores, 0)[: len(keys)] @ v[b, keys, h // groups])
    return torch.stack(rows).view(q.shape)


@pytest.mark.parametrize("length, num_keys", [(7, 7), (5, 9), (1, 6), (6, 4)])
def test_the_reference_is_the_definition(length, num_keys):
    for causal, window, softcap, masked, sinks in itertools.product(
        [True, False], [None, 1, 3], [None, 2.0], [False, True], [None, torch.randn(4, dtype=torch.float64)]
    ):
        if causal and length > num_keys:
            continue
        options = {"causal": causal, "window": window, "softcap": softcap, "scale": 0.3 if softcap else None}
        options |= {"key_mask": left_and_right_padding(num_keys) if masked else None, "sinks": sinks}
        _, q, k, v = inputs(max(length, num_keys), max(length, num_keys))
        q, k, v = q[:, :length], k[:, :num_keys], v[:, :num_keys]
        torch.testing.assert_close(attention_reference(q, k, v, **options), by_hand(q, k, v, **options))


@pytest.mark.parametrize("length, num_keys", [(12, 12), (7, 12)])
def test_tokens_that_see_each_other(length, num_keys, device):
    """Those of an image, also beside padding, within windows shorter than it, in packed sequences, after a cache."""
    together = torch.tensor([[-1, 0, 0, 0, 0, -1, 1, 1, 2, 2, 2, -1], [-1] * 5 + [3] * 6 + [-1]])
    for window, softcap, masked, sinks in itertools.product([None, 3, 9], [None, 2.0], [False, True], [False, True]):
        options = {"window": window, "softcap": softcap, "key_mask": left_and_right_padding(12) if masked else None}
        options["sinks"] = torch.randn(4, dtype=torch.float64) if sinks else None
        _, q, k, v = inputs(length, num_keys)
        exact = by_hand(q, k, v, together=together, **options)
        assert not torch.equal(exact, by_hand(q, k, v, **options))
        options |= {n: options[n].to(device) for n in ("key_mask", "sinks") if options[n] is not None}
        q, k, v, numbers = (x.to(device) for x in (q, k, v, together))
        for op in (attention, attention_reference):
            torch.testing.assert_close(op(q, k, v, together=numbers, **options).cpu(), exact)
    if length == num_keys:
        _, q, k, v = inputs(12, 12, batch_size=1)
        ends, numbers = torch.tensor([0, 3, 12], dtype=torch.int32), together[:1]
        exact = by_hand(q, k, v, segments=[0] * 3 + [1] * 9, together=numbers)
        torch.testing.assert_close(attention(q, k, v, cu_seqlens=ends, together=numbers), exact)


# Packed sequences.


@pytest.mark.parametrize("lengths", [[4, 4, 4], [5, 0, 5, 2], [1, 1, 6, 1, 3, 0]], ids=str)
@pytest.mark.parametrize(
    ("options", "masked"), [({}, False), ({"window": 2}, True), ({"causal": False}, True), ({"softcap": 2.0}, False)]
)
def test_packed_by_lengths_that_the_host_knows(lengths, options, masked, device):
    """On the CPU, wherever q is; and the same where the device alone knows them. Neighbours of one length run as a
    batch."""
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    segments = [i for i, length in enumerate(lengths) for _ in range(length)]
    key_mask = left_and_right_padding(12, batch_size=1) if masked else None
    packed, q, k, v = inputs(12, 12, batch_size=1)
    exact = by_hand(q, k, v, segments=segments, key_mask=key_mask, **options)
    weights = torch.randn(exact.shape, dtype=torch.float64)
    grad = torch.autograd.grad(exact, packed, weights)[0]
    leaf = packed.detach().to(device).requires_grad_()
    q, k, v = (x.unflatten(-1, (-1, 8)) for x in leaf.split([32, 16, 16], -1))
    mask = None if key_mask is None else key_mask.to(device)
    for op, bounds in ((attention, ends), (attention, ends.to(device)), (attention_reference, ends.to(device))):
        actual = op(q, k, v, cu_seqlens=bounds, key_mask=mask, **options)
        torch.testing.assert_close(actual.cpu(), exact)
        torch.testing.assert_close(torch.autograd.grad(actual, leaf, weights.to(device))[0].cpu(), grad)


@pytest.mark.parametrize(
    "lengths, expected",
    [
        ([256, 768, 1536, 512, 2304, 1024, 6912, 3072], False),  # 8 documents in 16,384 tokens, and in 32,768
        ([512, 1536, 3072, 1024, 4608, 2048, 13824, 6144], True),
        ([1024] * 16, True),  # images of one size are one launch
        ([1024] * 4 + [1008] * 4, True),
        ([2048, 2030], False),
        ([81] * 10, False),
    ],
)
def test_which_packed_sequences_run_one_by_one(lengths, expected):
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    assert engines._one_by_one(engines._runs(ends)) is expected


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"softcap": 2.0}, {"key_mask": True}], ids=str)
def test_masked_sequences_run_all_at_once(options, device, monkeypatch):
    """Run by run they would meet the same kernel again."""
    monkeypatch.setattr(engines, "_one_by_one", lambda runs: True)
    called = []
    monkeypatch.setattr(engines, "flash_attention", lambda q, *_, **__: called.append(q.shape) or q)
    q, k, v = torch.randn(3, 1, 9, 2, 8, dtype=torch.float16, device=device)
    if "key_mask" in options:
        options = {"key_mask": torch.ones(1, 9, dtype=torch.bool, device=device)}
    attention(q, k, v, cu_seqlens=torch.tensor([0, 4, 9], dtype=torch.int32), **options)
    assert called == ([(1, 9, 2, 8)] if options else [])


# Rows and keys that are hidden.


@pytest.mark.parametrize("seen", [(64, 65), (3, 131)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_hidden_ends_are_left_out(seen, causal, device, poison):
    """Loops begin at the first key that is seen and end after the last one, whatever the borders of tiles."""
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    _, q, k, v = inputs(133, 133, heads=(1, 1), dtype=dtype, device=device)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    mask = torch.zeros(2, 133, dtype=torch.bool, device=device)
    mask[0, slice(*seen)] = mask[1, ::7] = True
    weights = torch.randn(q.shape, device=device).to(dtype)
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    exact = attention_reference(*doubles, causal=causal, key_mask=mask)
    actual = our_attention(*leaves, causal=causal, key_mask=mask)
    tolerance = 1e-10 if dtype == torch.float64 else 5e-3  # bf16: 2^-8 a rounding
    pairs = zip(torch.autograd.grad(actual, leaves, weights), torch.autograd.grad(exact, doubles, weights.double()),
                strict=True)  # fmt: skip
    for a, b in ((actual, exact), *pairs):
        assert (a.double() - b).norm() <= tolerance * b.norm()


def test_rows_do_not_leak(device):
    """The last tile of a row of the batch ends in the next row, which holds NaN."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    _, *qkv = inputs(70, 70, dtype=dtype, device=device)
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    weights = torch.randn_like(leaves[0])
    for x in (*leaves, weights):
        x.detach()[1] = float("nan")
    out = our_attention(*leaves)
    for x in (out, *torch.autograd.grad(out, leaves, weights)):
        assert x[0].isfinite().all() and x[1].isnan().all()


def test_statistics_of_more_sequences_than_tokens_stay_in_their_memory(device, monkeypatch):
    allocate, beyond = _flash_attention._statistics, []

    def with_more_behind(q):
        memory = allocate(q)
        whole = torch.zeros(memory.numel() + 4096, dtype=memory.dtype, device=device)
        beyond.append(whole[memory.numel() :])
        return whole[: memory.numel()].view(memory.shape)

    monkeypatch.setattr(_flash_attention, "_statistics", with_more_behind)
    packed, *qkv = inputs(2, 2, size=16, batch_size=9, dtype=torch.float32, device=device)
    our_attention(*qkv).sum().backward()
    assert packed.grad.isfinite().all() and len(beyond) == 2 and not any(rest.any() for rest in beyond)


def test_decode_is_the_last_row_of_prefill(device):
    """Without gradients the keys of one query are split among programs, more than there may be keys for."""
    for num_keys in (1, 7, 250):
        _, q, k, v = inputs(num_keys, num_keys, heads=(6, 2), dtype=torch.float32, device=device)
        expected = attention_reference(q.double(), k.double(), v.double(), softcap=2.0)[:, -1:]
        with torch.no_grad():
            split = our_attention(q[:, -1:], k, v, softcap=2.0)
        torch.testing.assert_close(split.double(), expected, rtol=1e-5, atol=1e-6)


# Sinks.


def leaves_with_sinks(length=9, num_keys=9, dtype=torch.float64, sinks_dtype=None, device="cpu", **sizes):
    _, *qkv = inputs(length, num_keys, dtype=dtype, device=device, **sizes)
    sinks = torch.randn(qkv[0].shape[2], device=device, dtype=dtype if sinks_dtype is None else sinks_dtype)
    return [x.detach().clone().requires_grad_() for x in (*qkv, sinks)]


@pytest.mark.parametrize("options", [{}, {"window": 3, "softcap": 3.0}, {"key_mask": True}], ids=str)
@pytest.mark.parametrize("op", [attention, our_attention])
def test_gradients_with_sinks_are_those_of_finite_differences(op, options, device):
    if device != "cpu":
        pytest.skip("no GPU multiplies tiles of fp64")
    if "key_mask" in options:
        options = options | {"key_mask": left_and_right_padding(4)[:1]}  # of which the first query sees nothing
    leaves = leaves_with_sinks(3, 4, heads=(2, 1), size=2, batch_size=1)
    assert torch.autograd.gradcheck(lambda q, k, v, sinks: op(q, k, v, sinks=sinks, **options), leaves)


@pytest.mark.parametrize("dtype, sinks_dtype", [
    (torch.float16, torch.float32), (torch.float32, torch.float16), (torch.float32, torch.float64),
], ids=str)  # fmt: skip
def test_sinks_of_another_dtype_have_gradients_in_theirs(device, dtype, sinks_dtype):
    leaves = leaves_with_sinks(dtype=dtype, sinks_dtype=sinks_dtype, device=device)
    weights = torch.randn(leaves[0].shape, device=device).to(dtype)
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    exact = torch.autograd.grad(
        attention_reference(*doubles[:3], sinks=doubles[3], window=4), doubles, weights.double()
    )
    for op in (attention, our_attention, attention_reference):
        out = op(*leaves[:3], sinks=leaves[3], window=4)
        found = torch.autograd.grad(out, leaves, weights)
        assert [x.dtype for x in (out, *found)] == [dtype] * 4 + [sinks_dtype]
        for x, y in zip(found, exact, strict=True):
            assert (x.double() - y).norm() <= 2e-3 * y.norm()  # fp16: 2^-11 a rounding


@pytest.mark.parametrize("op", [attention, our_attention])
def test_a_sink_that_nobody_sees_and_one_that_all_see(op, device):
    """-inf is no sink, whose gradient is 0; one far above all scores leaves nothing."""
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    for options in ({}, {"window": 2}, {"key_mask": left_and_right_padding(9, device=device)}):
        *qkv, sinks = leaves_with_sinks(dtype=dtype, device=device)
        with torch.no_grad():
            sinks[:2], sinks[2:] = -torch.inf, 1e4
        out, without = op(*qkv, sinks=sinks, **options), op(*qkv, **options)
        some = options["key_mask"].cumsum(1) > 0 if "key_mask" in options else torch.ones(2, 9, dtype=torch.bool)
        torch.testing.assert_close(out[:, :, :2][some], without[:, :, :2][some])
        assert not out[:, :, 2:].any()
        found = torch.autograd.grad(out.sum(), [*qkv, sinks])
        assert all(x.isfinite().all() for x in found) and not found[3].any() and found[2].any()


def test_a_sink_alone_may_be_trained(device):
    q, k, v, sinks = leaves_with_sinks(dtype=torch.float16 if device == "cuda" else torch.float32, device=device)
    for op in (attention, our_attention):
        frozen = [x.detach() for x in (q, k, v)]
        wanted = torch.autograd.grad(attention_reference(q, k, v, sinks=sinks).sum(), sinks)[0]
        torch.testing.assert_close(
            torch.autograd.grad(op(*frozen, sinks=sinks).sum(), sinks)[0], wanted, rtol=1e-2, atol=1e-3
        )
        assert op(q, k, v, sinks=sinks.detach()).requires_grad and not op(*frozen, sinks=sinks.detach()).requires_grad


def test_second_derivatives_with_sinks(device):
    """Where nothing but torch's plain formulas may run, as `docs/operations.md` says."""
    if device != "cpu":
        pytest.skip("on the CPU alone")
    leaves = leaves_with_sinks(3, 3, heads=(2, 1), size=2, batch_size=1)
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(lambda q, k, v, sinks: attention(q, k, v, sinks=sinks), leaves)


@pytest.mark.parametrize("masked", [False, True])
def test_torchs_engine_of_a_gpu_takes_what_it_is_called_with(masked):
    """Its arguments and the shapes that come back, on a device without memory."""
    leaves = leaves_with_sinks(9, 13 if masked else 9, device="meta")
    q, k, v = (x.transpose(1, 2) for x in leaves[:3])
    mask = torch.ones(2, 1, 9, 13, dtype=torch.bool, device="meta") if masked else None
    out = attention_with_sinks(q, k, v, leaves[3][:, None], mask, not masked, 0.3, "efficient")
    found = torch.autograd.grad(out, leaves, torch.empty_like(out))
    assert out.shape == q.shape and [x.shape for x in found] == [x.shape for x in leaves]
    assert {x.dtype for x in (out, *found)} == {leaves[0].dtype}


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"key_mask": True}], ids=str)
def test_compiles_whole_with_sinks(options, device):
    torch._dynamo.reset()
    leaves = leaves_with_sinks(dtype=torch.bfloat16 if device == "cuda" else torch.float32, device=device)
    options = {"key_mask": left_and_right_padding(9, device=device)} if "key_mask" in options else options
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    results = []
    for op in (compiled, attention):
        out = op(*leaves[:3], sinks=leaves[3], **options)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    torch.testing.assert_close(*results)


# Wide heads, as plain products.


def wide_options(form, length, num_keys, tile, device):
    ends = torch.tensor([0, 1, 1, 2 * tile - 2, length], dtype=torch.int32, device=device)
    return {
        "causal": {}, "whole": {"causal": False}, "window": {"window": tile + 3},
        "whole and window": {"causal": False, "window": tile + 3}, "packed": {"cu_seqlens": ends},
        "packed, of known lengths": {"cu_seqlens": ends, "max_seqlen": length - 2 * tile + 2, "window": 2 * tile},
        "padding": {"key_mask": left_and_right_padding(num_keys, device=device)},
    }[form]  # fmt: skip


@pytest.mark.parametrize("room", ["all heads", "a head", "rows", "a row"])
@pytest.mark.parametrize("form, cached", [
    ("causal", 0), ("causal", 9), ("whole", 5), ("window", 20), ("whole and window", 0), ("padding", 0), ("packed", 0),
    ("packed, of known lengths", 0),
])  # fmt: skip
def test_wide_heads_in_chunks(device, poison, monkeypatch, form, cached, room):
    """Many tiles, in a workspace for all of them, for those of one key head, for some rows, and for less than that."""
    dtype, tile, size = (torch.float64, 16, 32) if device == "cpu" else (torch.bfloat16, 128, 512)
    length = 4 * tile - 10
    num_keys, tiles = length + cached, 4 * 4
    room = {"all heads": 4 * tiles, "a head": tiles, "rows": tiles // 2, "a row": 0}[room]
    monkeypatch.setattr(_unfused_attention, "_TILE", {2: tile, 8: tile})
    monkeypatch.setattr(_unfused_attention, "WORKSPACE", room * 2 * 2 * tile * tile * dtype.itemsize)
    options = wide_options(form, length, num_keys, tile, device)
    _, *qkv = inputs(length, num_keys, (4, 2), size, 2 if "key_mask" in options else 1, dtype, device)
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    weights = torch.randn(qkv[0].shape, device=device).to(dtype)
    doubles = [x.detach().double().requires_grad_() for x in qkv]
    exact, actual = attention_reference(*doubles, **options), wide_attention(*leaves, **options)
    pairs = zip(torch.autograd.grad(actual, leaves, weights), torch.autograd.grad(exact, doubles, weights.double()),
                strict=True)  # fmt: skip
    for a, b in ((actual, exact), *pairs):
        assert (a.double() - b).norm() <= (1e-10 if dtype == torch.float64 else 5e-3) * b.norm()  # 2^-8 a rounding


@pytest.mark.parametrize("causal", [True, False])
def test_a_plan_has_room_for_every_tile(causal):
    """Wherever sequences begin; chunks hold each tile of rows of each key head once."""
    for seed in range(100):
        draw = random.Random(seed)
        length, tile, heads = draw.randint(1, 90), draw.choice([4, 8]), draw.randint(1, 5)
        num_keys, window, cu, longest = length + draw.choice([0, 7]), draw.choice([None, 1, 9, 30]), None, None
        if draw.random() < 0.6:
            starts = sorted(draw.choices(range(length), k=draw.randint(0, 5)))
            cu, num_keys = torch.tensor([0, *starts, length]), length
            longest = max(b - a for a, b in itertools.pairwise(cu.tolist()))
        total, _, chunks = _unfused_attention._plan(
            heads, length, num_keys, longest, window, causal, tile, draw.choice([0, 5, 20, 70, 1000])
        )
        q, k = torch.zeros(1, length, 1, 1), torch.zeros(1, num_keys, 1, 1)
        seen = visible(q, k, causal=causal, window=window, cu_seqlens=cu)[0, 0]
        counts = []
        for rows in seen.split(tile):
            keys = rows.any(0).nonzero()
            counts.append(int(keys.max() // tile - keys.min() // tile + 1))
        assert sum(counts) <= total
        assert all(sum(counts[chunk.first_row : chunk.end_row]) <= chunk.tiles for chunk in chunks)
        places = [
            (chunk.first_head + head, row)
            for chunk in chunks for head in range(chunk.heads) for row in range(chunk.first_row, chunk.end_row)
        ]  # fmt: skip
        assert sorted(places) == list(itertools.product(range(heads), range(len(counts))))


def test_a_sequence_longer_than_max_seqlen_shows(device):
    _, *qkv = inputs(3 * 128, 3 * 128, size=64, batch_size=1, dtype=torch.float16, device=device)
    bounds = torch.tensor([0, 1, 3 * 128], dtype=torch.int32, device=device)
    assert wide_attention(*qkv, cu_seqlens=bounds, max_seqlen=3 * 128 - 1).isfinite().all()
    assert wide_attention(*qkv, cu_seqlens=bounds, max_seqlen=1, causal=False).isnan().all()


# Engines.


def test_wide_heads_of_long_texts_are_not_left_to_torch(device, monkeypatch):
    """Packed sequences all at once, with the length of the longest where the host knows it."""
    monkeypatch.setattr(engines, "_UNFUSED_QUERIES", 9)
    monkeypatch.setattr(engines, "is_datacenter", lambda index: True)
    called = []
    monkeypatch.setattr(engines, "unfused_attention", lambda q, *_, **o: called.append(o["max_seqlen"]) or q)
    q, k, v = torch.randn(3, 1, 9, 2, 512, dtype=torch.float16, device=device)
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    attention(q, k, v)
    attention(q, k, v, cu_seqlens=bounds)
    attention(q, k, v, cu_seqlens=bounds.to(device), max_seqlen=7)
    assert called == [None, 5, 5 if device == "cpu" else 7]
    attention(q[:, 1:], k, v)
    attention(q[..., :128], k[..., :128], v[..., :128])
    attention(q, k, v, softcap=2.0)
    attention(q, k, v, sinks=torch.zeros(2, device=device))
    assert len(called) == 3


def test_head_chunks_change_nothing(device, monkeypatch):
    """Heads of a long text in chunks; `linear` saves the chunks instead of the output that they are joined to."""
    packed, q, k, v = inputs(9, 9, heads=(8, 4), device=device)
    weight = torch.randn(6, 64, dtype=q.dtype, device=device, requires_grad=True)
    monkeypatch.setattr(engines, "_CHUNK_ELEMENTS", q.numel() // 3)
    results = []
    for head_chunks in (False, True):
        out = attention(q, k, v, head_chunks=head_chunks)
        joined = attach_to_view(out, out.flatten(2))
        assert (handle_of(out) is not None) is (handle_of(joined) is not None) is head_chunks
        y = linears(joined, [LinearOperand(weight)])
        results.append((out, y, *torch.autograd.grad(y.square().sum(), [packed, weight])))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole)


@pytest.mark.gpu
@pytest.mark.parametrize("with_sinks", [False, True])
def test_gradients_come_in_any_layout(with_sinks):
    """One call after the other, of the same sizes. What cuDNN keeps of the first must not read the second."""
    q, k, v, sinks = leaves_with_sinks(300, 300, torch.bfloat16, device="cuda", heads=(8, 2), size=64)
    leaves = [q, k, v] + [sinks] * with_sinks
    wanted = None
    do = torch.randn_like(q)
    for dims in ((0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)):
        order = sorted(range(4), key=dims.__getitem__)
        out = attention(q, k, v, sinks=sinks if with_sinks else None)
        found = torch.autograd.grad(out, leaves, do.permute(dims).contiguous().permute(order))
        wanted = found if wanted is None else wanted
        for x, y in zip(found, wanted, strict=True):
            assert (x - y).norm() <= 1e-2 * y.norm()


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


@pytest.mark.gpu
@pytest.mark.parametrize("options", [
    {}, {"causal": False}, {"window": 100}, {"packed": True}, {"packed": True, "window": 50},
], ids=str)  # fmt: skip
def test_scores_are_never_in_memory(options):
    """A mask of the scores' shape would be many times what bf16 attention takes at 16384 tokens."""
    length, options = 16384, dict(options)
    if options.pop("packed", False):
        options["cu_seqlens"] = torch.tensor([0, length // 3, length], dtype=torch.int32, device="cuda")
    batch = 1 if "cu_seqlens" in options else 2
    packed, q, k, v = inputs(length, length, (8, 2), 128, batch, torch.bfloat16, "cuda")
    weights = torch.randn(q.shape, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(attention(q, k, v, **options), packed, weights)
    torch.cuda.synchronize()
    spent = torch.cuda.max_memory_allocated() - before
    # The output; dq, dk, dv, each with all query heads at most; dq again in fp32; and their packed sum.
    assert spent < 12 * batch * length * 8 * 128 * 2
