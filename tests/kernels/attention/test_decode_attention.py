"""Attention of one token to a cache, and the write of that token, against fp64; beyond the lengths the cache is NaN."""

import itertools

import pytest
import torch

from ligermodels.errors import InputError
from ligermodels.kernels.attention import decode_attention as module
from ligermodels.kernels.attention.attention import attention_reference
from ligermodels.kernels.attention.decode_attention import (
    HeadNorms,
    decode_attention,
    decode_attention_reference,
    rope_decode_attention,
)
from ligermodels.kernels.attention.rope import rope_qk_reference, rope_to_cache
from ligermodels.kernels.linear.fp8 import dequantize_heads, quantize_heads
from ligermodels.kernels.norm.rms_norm import rms_norm, rms_norm_reference
from tests.kernels.cases import HALF
from tests.kernels.judge import DTYPES, ON_GPU
from tests.kernels.on_gpu import large
from tests.kernels.oracle import assert_as_exact

SIZES = [64, 80, 96, 128, 256, 512]


def cache(rows, capacity, heads, size, starts, ends, ring, dtype, device):
    """(keys, values, starts, ends), NaN in columns without a position of the row. ring: position p is in p % C."""
    last = torch.tensor(ends)[:, None] - 1
    columns = torch.arange(capacity)
    positions = last - (last - columns) % capacity if ring else columns
    stored = (positions >= torch.tensor(starts)[:, None]) & (positions <= last)
    keys, values = (
        torch.where(stored[..., None, None], torch.randn(rows, capacity, heads, size), torch.nan).to(device, dtype)
        for _ in range(2)
    )
    return keys, values, *(torch.tensor(x, dtype=torch.int32, device=device) for x in (starts, ends))


def by_rows(q, keys, values, starts, ends, *, ring=False, window=None, **options):
    """Each row by `attention_reference` over the keys that it sees, cut out by hand, in the dtype of q."""
    rows = []
    for b, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        first = start if window is None else max(start, end - window)
        seen = [p % keys.shape[1] for p in range(first, end)]
        if first >= end:
            rows.append(torch.zeros_like(q[b : b + 1]))
        else:
            k, v = keys[b : b + 1, seen], values[b : b + 1, seen]
            rows.append(attention_reference(q[b : b + 1], k, v, causal=False, **options))
    return torch.cat(rows)


CASES = [
    # capacity, starts, ends, ring, window
    (300, [0, 0, 0], [1, 64, 65], False, None),  # one key, a whole tile, one more
    (300, [0, 17, 299], [300, 299, 300], False, None),
    (300, [0, 5, 40], [0, 5, 40], False, None),  # rows without a key
    (40, [0, 930, 1000], [1040, 1033, 1021], True, 33),  # a ring that has turned many times, and one that is not full
    (100, [0, 0, 0], [150, 20, 1], True, 100),  # windows longer than the row, and not
    (400, [3, 0, 100], [400, 2, 350], False, None),  # rows of very different length
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (8, 1)], ids=str)
@pytest.mark.parametrize("fp8", [False, True])
def test_as_exact_as_eager(device, poison, monkeypatch, case, heads, fp8):
    """In fp8 against fp64 over what the bits stand for, with values whose scales are subnormal in fp16.

    No token is much larger than the others: an output that one of them decides has one error, and no average. On a GPU
    several draws are judged as one, since a row with few keys has few errors, and outweighs the others.
    """
    capacity, starts, ends, ring, window = case
    for i, (dtype, size) in enumerate(itertools.product(DTYPES, SIZES if ON_GPU else [16, 24])):
        some = (3 if fp8 else 1) if ON_GPU else (4 if fp8 else 2)  # each takes seconds to compile, or to interpret
        if i % some != (CASES.index(case) + heads[0]) % some:
            continue
        monkeypatch.setattr(module, "num_sms", lambda index, many=(132, 4, 1)[i % 3]: many)
        monkeypatch.setattr(module, "_SUM_ELEMENTS", (8192, 64)[i // 2 % 2])
        monkeypatch.setattr(module, "MAX_BY_LAST", (16, 2, 1)[i % 3])
        options, draws = dict(window=window, ring=ring, softcap=(None, 3.0)[i % 2], scale=(None, 0.3)[i % 2]), []
        if (i // 2 + CASES.index(case)) % 2:
            options["sinks"] = torch.randn(heads[0], device=device).to((dtype, torch.float32)[i % 2])
        for _ in range(8 if ON_GPU and fp8 else 1):
            q = torch.randn(3, 1, heads[0], size, device=device).to(dtype)
            stored = torch.float32 if fp8 else dtype
            keys, values, *bounds = cache(3, capacity, heads[1], size, starts, ends, ring, stored, device)
            exact_keys, exact_values, scaled = keys.double(), values.double(), options
            if fp8:
                sizes = 0.25 + torch.rand(3, capacity, heads[1], 1, device=device)
                (keys, of_k), (values, of_v) = quantize_heads(keys * sizes), quantize_heads(values * sizes * 2**-12)
                exact_keys, exact_values = (dequantize_heads(*x, torch.float64) for x in ((keys, of_k), (values, of_v)))
                scaled = options | dict(scales=(of_k, of_v))
            exact = by_rows(q.double(), exact_keys, exact_values, *bounds, **options)
            eager = by_rows(q, exact_keys.to(dtype), exact_values.to(dtype), *bounds, **options)
            reference = (keys, values) if fp8 else (exact_keys, exact_values)
            torch.testing.assert_close(decode_attention_reference(q.double(), *reference, *bounds, **scaled), exact)
            found = decode_attention(q, keys, values, *bounds, **scaled)
            strided = [torch.stack([x, x], 1)[:, 0] for x in bounds]  # not contiguous
            assert torch.equal(found, decode_attention(q, keys, values, *strided, **scaled))
            draws.append((found, eager, exact))
        found, eager, exact = (torch.stack(one) for one in zip(*draws, strict=True))
        # In fp32 the scales of keys and of values round once more each: 2 ulp. Heads too large for the kernel are
        # torch's sums on either side.
        terms = size if module.is_large(q) else 96 if fp8 else 1
        assert_as_exact(found, eager, exact, f"{dtype} {size}", shared=size, terms=terms)


def test_heads_of_odd_size_in_fp8(device):
    """No two of their dims make one number of 16 bits."""
    q = torch.randn(2, 1, 4, 15, device=device).half()
    keys, values, *bounds = cache(2, 8, 2, 15, [0, 1], [8, 6], False, torch.float32, device)
    (k, of_k), (v, of_v) = quantize_heads(keys), quantize_heads(values)
    wanted = decode_attention_reference(q.double(), k, v, *bounds, scales=(of_k, of_v))
    found = decode_attention(q, k, v, *bounds, scales=(of_k, of_v))
    torch.testing.assert_close(found.double(), wanted, rtol=2**-10, atol=2**-24)  # an ulp of fp16, and its smallest


@pytest.mark.parametrize("most", [6, 7, 300])
@pytest.mark.parametrize("end", [420, 5])
def test_the_bits_do_not_depend_on_the_capacity(device, monkeypatch, poison, most, end):
    """417 tokens are 7 shares, which a second kernel adds up where 6 are the most for the last program.

    It is launched where the capacity allows for more shares than that; rows of fewer shares it leaves alone.
    """
    launched, launch = [], module.launch
    monkeypatch.setattr(module, "num_sms", lambda index: 132)
    monkeypatch.setattr(module, "MAX_BY_LAST", most)
    monkeypatch.setattr(module, "launch", lambda kernel, *a, **b: (launched.append(kernel), launch(kernel, *a, **b)))
    q, counters = torch.randn(1, 1, 4, 64, device=device), torch.zeros(2, dtype=torch.int32, device=device)
    kv = cache(1, 1000, 2, 64, [3], [end], False, torch.float32, device)
    found = [
        decode_attention(q, *(x[:, :capacity].contiguous() for x in kv[:2]), *kv[2:], counters=counters)
        for capacity in (1000, 600, 420)
    ]
    assert all(torch.equal(x, found[0]) for x in found) and not counters.any()
    torch.testing.assert_close(found[0], by_rows(q, *kv), rtol=1e-5, atol=1e-6)
    assert launched.count(module._many_kernel) == {6: 3, 7: 2, 300: 0}[most]


def test_counters_serve_calls_of_other_lengths(device, monkeypatch):
    monkeypatch.setattr(module, "num_sms", lambda index: 132)
    q, counters = torch.randn(3, 1, 4, 64, device=device), torch.zeros(6, dtype=torch.int32, device=device)
    for ends in ([130, 1, 0], [20, 130, 129], [0, 0, 0], [129, 130, 130]):
        kv = cache(3, 130, 2, 64, [0, 0, 0], ends, False, torch.float32, device)
        assert torch.equal(decode_attention(q, *kv, counters=counters), decode_attention(q, *kv))
        assert not counters.any()


@pytest.mark.gpu
@pytest.mark.parametrize("heads, ends", [((32, 8), [32_768]), ((16, 4), [20_000, 3000, 257, 130])], ids=str)
def test_shares_are_added_up_once_all_are_written(device, heads, ends):
    """By a second kernel, which is scheduled while the first one runs, or by the last program; as a CUDA graph too."""
    rows = len(ends)
    q = torch.randn(rows, 1, heads[0], 128, device=device).bfloat16()
    counters = torch.zeros(rows * heads[1], dtype=torch.int32, device=device)
    kv = cache(rows, ends[0], heads[1], 128, [0] * rows, ends, False, torch.bfloat16, device)
    expected = decode_attention(q, *kv)
    torch.testing.assert_close(expected, by_rows(q, *kv), rtol=2e-2, atol=2e-3)
    found = torch.stack([decode_attention(q, *kv, counters=counters) for _ in range(3000)])
    assert (found == expected).all() and not counters.any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(q, *kv, counters=counters)
    graph.replay()
    assert torch.equal(out, expected)


def test_large_scores_and_nan(device):
    kv = cache(1, 200, 2, 32, [0], [150], False, torch.float32, device)
    q = 1000 * torch.randn(1, 1, 4, 32, device=device)
    exact = by_rows(q.double(), *(x.double() for x in kv[:2]), *kv[2:])
    torch.testing.assert_close(decode_attention(q, *kv).double(), exact, rtol=1e-4, atol=1e-4)  # scores of 1e4
    kv[0][0, 77, 1] = torch.nan
    found = decode_attention(q, *kv)
    assert found[0, 0, 2:].isnan().all() and found[0, 0, :2].isfinite().all()


@pytest.mark.gpu
@large
def test_offsets_past_32_bits(device):
    keys = torch.zeros(2, 2**21 + 8, 4, 128, dtype=torch.bfloat16, device=device)  # 2^31 elements
    q = torch.randn(2, 1, 8, 128, device=device).bfloat16()
    keys[1, 2**21 :] = torch.randn(8, 4, 128, device=device).bfloat16()
    starts, ends = torch.tensor([[2**21, 2**21], [2**21 + 8] * 2], dtype=torch.int32, device=device)
    expected = by_rows(q, keys, keys, starts, ends)
    torch.testing.assert_close(decode_attention(q, keys, keys, starts, ends), expected, rtol=1e-2, atol=1e-2)


def test_quantized_heads():
    x = torch.randn(2, 50, 3, 64) * torch.exp2(torch.randint(-30, 30, (2, 50, 3, 1)))
    x[0, 0] = 0
    x[1, :, 1, 5] *= 1000  # an outlier costs the small ones their bits, not the outlier
    for dtype in (torch.float32, torch.bfloat16):
        given = x.to(dtype)
        q, scale = quantize_heads(given)
        assert (q.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.bfloat16) and scale.shape == x.shape[:3]
        error = (dequantize_heads(q, scale, torch.float64) - given).abs()
        largest = given.double().abs().amax(-1, keepdim=True)
        bound = torch.maximum(given.double().abs() / 16, largest / 448 / 2**9) * (1 + 1e-6)
        assert (error <= bound).all() and not q[0, 0].float().any()
        of_largest = error.gather(-1, given.double().abs().argmax(-1, keepdim=True))
        assert (of_largest <= largest / 2**8).all(), "the largest becomes 448, to within the bits of the scale"
    assert (error.square().sum() / x.double().square().sum()) ** 0.5 < 0.03


def exact_in_fp8(rows, rotated, device, dtype):
    """k, v, cos and sin of quarters of a turn: e4m3 and a scale hold the rotated heads exactly."""
    bits = torch.randint(0, 120, (2, rows, 1, 2, 16), dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    bits[..., 3] = 448  # makes the scale a power of two
    bits *= torch.randint(0, 2, bits.shape) * 2 - 1
    k, v = (bits * torch.exp2(torch.randint(-9, 4, (2, rows, 1, 2, 1)))).to(device, dtype)
    quarters = torch.randint(0, 4, (rows, 1, rotated // 2), device=device)
    return k, v, *(torch.tensor(x, device=device)[quarters] for x in ([1.0, 0, -1, 0], [0.0, 1, 0, -1]))


@pytest.mark.parametrize("rotated, ring, how", [
    (16, False, "packed"), (16, True, ""), (12, True, "packed"), (16, False, "fp8"), (12, True, "fp8"),
    (16, True, "fp8, expands"), pytest.param(16, True, "fp8, rounds", marks=pytest.mark.gpu),
])  # fmt: skip
def test_a_token_is_rotated_and_written_to_its_place_alone(device, rotated, ring, how):
    """In fp8, what e4m3 holds exactly comes out bit for bit; the rest, on a GPU, as the reference."""
    rows, capacity, fp8, rounds = 3, 10 if ring else 14, "fp8" in how, "rounds" in how
    here = torch.arange(rows), (torch.tensor([6, 9, 14]) - 1) % capacity
    for dtype in DTYPES:
        q = torch.randn(rows, 1, 4, 16, device=device).to(dtype)
        k, v = torch.randn(2, rows, 1, 2, 16, device=device).to(dtype)
        cos, sin = (f(torch.randn(rows, 1, rotated // 2, device=device)) for f in (torch.cos, torch.sin))
        if fp8 and not rounds:
            k, v, cos, sin = exact_in_fp8(rows, rotated, device, dtype)
        if how == "packed":
            q, k, v = torch.cat([q, k, v], 2).split([4, 2, 2], 2)
        stored = torch.float8_e4m3fn if fp8 else dtype
        kv = [torch.full((rows, capacity, 2, 16), 7.0, device=device).to(stored) for _ in range(2)]
        kv += [torch.full((rows, capacity, 2), 7.0, device=device, dtype=torch.bfloat16) for _ in range(2 * fp8)]
        if "expands" in how:
            kv = [x[:1].expand(rows, *x.shape[1:]) for x in kv]
        expected_q, expected_k = rope_qk_reference(q, k, cos, sin)
        options = dict(ring=ring, scales=tuple(kv[2:]) or None)
        ends = torch.tensor([6, 9, 14], dtype=torch.int32, device=device)
        expected_v = v.clone()
        torch.testing.assert_close(rope_to_cache(q, k, v, cos, sin, *kv[:2], ends, **options), expected_q)
        for i, expected in enumerate((expected_k[:, 0], expected_v[:, 0])):
            written = kv[i][here] if not fp8 else dequantize_heads(kv[i][here], kv[i + 2][here], torch.float64)
            if rounds:
                wanted = dequantize_heads(*quantize_heads(expected), torch.float64)
                assert ((written - wanted).abs() <= wanted.abs() / 7 + 1e-2).all()
                assert (written == wanted).double().mean() > 0.95, "a quotient may round to the other side"
            else:
                torch.testing.assert_close(written, expected.to(written.dtype), **dict(rtol=0, atol=0) if fp8 else {})
        for x in (x.float().clone() for x in kv):
            x[here if "expands" not in how else (slice(None), here[1])] = 7.0
            assert (x == 7.0).all(), "nothing else is written"


@pytest.mark.parametrize("case", [
    # capacity, starts, ends, ring, window
    (300, [0, 17, 299], [300, 256, 300], False, None),
    (300, [0, 0, 0], [1, 65, 130], False, None),  # the new token alone, and alone in its share
    (40, [0, 930, 1000], [1040, 1033, 1021], True, 33),
    (100, [0, 0, 0], [150, 20, 1], True, 100),
    (300, [9, 5, 300], [9, 6, 41], False, None),  # rows that have not begun write, and see nothing
], ids=str)  # fmt: skip
@pytest.mark.parametrize("heads", [(4, 2), (8, 1)], ids=str)
def test_rope_and_attention_in_one_launch(device, monkeypatch, poison, case, heads):
    """The new token is written like `rope_to_cache` does, and nothing else is; attention is as exact as eager."""
    capacity, starts, ends, ring, window = case
    launched, launch, rows = [], module.launch, len(ends)
    monkeypatch.setattr(module, "launch", lambda kernel, *a, **b: (launched.append(kernel), launch(kernel, *a, **b)))
    monkeypatch.setattr(module, "rope_to_cache", None)
    for i, (dtype, size) in enumerate(itertools.product(HALF if ON_GPU else [torch.float16], [16, 24, 64, 512])):
        monkeypatch.setattr(module, "num_sms", lambda index, many=(132, 4, 1)[i % 3]: many)
        options = dict(window=window, ring=ring, softcap=(None, 3.0)[i % 2], scale=(None, 0.3)[i % 2])
        if (i // 2 + heads[1]) % 2:
            options["sinks"] = 3 * torch.randn(heads[0], device=device)
        qkv = torch.randn(rows, 1, heads[0] + 2 * heads[1], size, device=device).to(dtype)
        q, k, v = qkv.split([heads[0], heads[1], heads[1]], 2)
        rotated = size if i % 2 else size // 2
        angles = torch.rand(rows, 1, rotated // 2, device=device) * 6
        tables = angles.cos(), angles.sin()
        keys, values, *bounds = cache(rows, capacity, heads[1], size, starts, ends, ring, dtype, device)
        here = torch.arange(rows), (torch.tensor(ends) - 1) % capacity
        keys[here] = values[here] = torch.nan
        written = [x.clone() for x in (keys, values)]
        before = qkv.clone()
        found = rope_decode_attention(q, k, v, *tables, keys, values, *bounds, **options)
        assert launched.pop() in (module._kernel, module._many_kernel) and torch.equal(qkv, before)
        launched.clear()
        rope_to_cache(q.clone(), k, v, *tables, *written, bounds[1], ring=ring)
        torch.testing.assert_close((keys, values), tuple(written), equal_nan=True)
        results = []
        for precise in (torch.float64, dtype):
            turned_q, turned_k = rope_qk_reference(q.to(precise), k.to(precise), *tables)
            full = [x.to(precise) for x in (keys, values)]
            full[0][here] = turned_k[:, 0]
            results.append(by_rows(turned_q, *full, *bounds, **options))
        assert_as_exact(found, results[1], results[0], f"{dtype} {size}", shared=size)


def normed(q, k, norms, how=rms_norm):
    options = dict(eps=norms.eps, offset=norms.offset, cast_before_weight=norms.cast_before_weight)
    return how(q, norms.q.to(q.device), **options), how(k, norms.k.to(k.device), **options)


@pytest.mark.parametrize("case", [
    # capacity, starts, ends, ring, window
    (300, [0, 17, 299], [300, 256, 300], False, None),
    (40, [0, 930, 1000], [1040, 1033, 1021], True, 33),
    (300, [9, 5, 300], [9, 6, 41], False, None),  # rows that have not begun, and the new token alone
], ids=str)  # fmt: skip
@pytest.mark.parametrize("heads", [(4, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("offset, cast_before_weight", [(0.0, True), (1.0, False), (0.5, True)])
def test_norms_in_the_same_launch(device, monkeypatch, poison, case, heads, offset, cast_before_weight):
    """Attention and the new key are those of `rms_norm` before the op, to an ulp of the norms and of the output; and
    as exact as eager. q lies beside a gate, as in Qwen3.5."""
    capacity, starts, ends, ring, window = case
    rows = len(ends)
    monkeypatch.setattr(module, "rms_norm", None)
    of_case = heads[0] + case[0] + int(2 * offset)
    for i, (dtype, size) in enumerate(itertools.product(HALF if ON_GPU else [torch.float16], [16, 24, 64, 256])):
        if ON_GPU and i % 3 != of_case % 3:
            continue
        i += of_case
        monkeypatch.setattr(module, "num_sms", lambda index, many=(132, 4, 1)[i % 3]: many)
        options = dict(window=window, ring=ring, softcap=(None, 3.0)[i % 2])
        if i // 2 % 2:
            options["sinks"] = 3 * torch.randn(heads[0], device=device)
        q = (3 * torch.randn(rows, 1, heads[0], 2 * size, device=device)).to(dtype)[..., :size]
        k, v = (0.5 * torch.randn(rows, 1, 2 * heads[1], size, device=device)).to(dtype).split(heads[1], 2)
        of_q, of_k = (1 - offset + 0.4 * torch.randn(2, size, device=device)).to((dtype, torch.float32)[i % 2])
        norms = HeadNorms(of_q, of_k, (1e-6, 0.3)[i // 2 % 2], offset, cast_before_weight)
        half = (size // 2, size // 4, 1)[i % 3]  # of one dim, as where nothing rotates
        angles = torch.rand(rows, 1, half, device=device) * 6 * (half > 1)
        tables = angles.cos(), angles.sin()
        keys, values, *bounds = cache(rows, capacity, heads[1], size, starts, ends, ring, dtype, device)
        here = torch.arange(rows), (torch.tensor(ends) - 1) % capacity
        keys[here] = values[here] = torch.nan
        wanted = [x.clone() for x in (keys, values)]
        found = rope_decode_attention(q, k, v, *tables, keys, values, *bounds, norms=norms, **options)
        expected = rope_decode_attention(*normed(q, k, norms), v, *tables, *wanted, *bounds, **options)
        ulp = torch.finfo(dtype).eps * ON_GPU  # where a head's squares are summed in another order
        torch.testing.assert_close((keys, values), tuple(wanted), equal_nan=True, rtol=2 * ulp, atol=4 * ulp)
        torch.testing.assert_close(found, expected, rtol=4 * ulp, atol=4 * ulp)
        results = []
        for precise in (torch.float64, dtype):
            turned = normed(q.to(precise), k.to(precise), norms, rms_norm_reference)
            turned_q, turned_k = rope_qk_reference(*turned, *tables)
            full = [x.to(precise) for x in (keys, values)]
            full[0][here] = turned_k[:, 0]
            results.append(by_rows(turned_q, *full, *bounds, **options))
        assert_as_exact(found, results[1], results[0], f"{dtype} {size}", shared=size)


@pytest.mark.parametrize("how", ["fp32", "fp8", "rows see each other"])
def test_norms_come_first_where_the_kernel_does_not_rotate(device, how):
    dtype = torch.float32 if how == "fp32" else torch.float16
    q, k, v = torch.randn(2, 1, 8, 16, device=device).to(dtype).split([4, 2, 2], 2)
    norms = HeadNorms(*torch.rand(2, 16, device=device), 0.1, 1.0, False)
    cos, sin = torch.rand(2, 2, 1, 8, device=device)
    kv = cache(2, 20, 2, 16, [0, 3], [5, 6], False, torch.float32 if how == "fp8" else dtype, device)
    stored, bounds, scales = [x.nan_to_num() for x in kv[:2]], kv[2:], None
    if how == "fp8":
        stored, scales = zip(*(quantize_heads(x) for x in stored), strict=True)
    results = []
    for first in (False, True):
        buffers, of_buffers = ([x.clone() for x in both or ()] for both in (stored, scales))
        if how == "rows see each other":
            buffers = [x[:1].expand_as(x) for x in buffers]
        pair, options = (normed(q, k, norms), {}) if first else ((q.clone(), k), dict(norms=norms))
        options["scales"] = tuple(of_buffers) or None
        out = rope_decode_attention(*pair, v, cos, sin, *buffers, *bounds, **options)
        results.append([x.float() for x in (out, *buffers, *of_buffers)])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_infinities_do_not_become_numbers(device):
    """e4m3 has none, and conversions saturate."""
    k, v, angles = torch.randn(1, 1, 2, 16), torch.randn(1, 1, 2, 16), torch.zeros(1, 1, 8, device=device)
    k[0, 0, 1, 3] = float("inf")
    k, v, q = k.to(device), v.to(device), torch.randn(1, 1, 4, 16, device=device)
    start, end = torch.tensor([[0], [1]], dtype=torch.int32, device=device)
    kv = [torch.zeros(1, 4, 2, 16, device=device).to(torch.float8_e4m3fn) for _ in range(2)]
    scales = tuple(torch.zeros(1, 4, 2, device=device, dtype=torch.bfloat16) for _ in range(2))
    for write in (
        lambda: rope_to_cache(q.clone(), k, v, angles.cos(), angles.sin(), *kv, end, scales=scales),
        lambda: [x[:, :1].copy_(y) for x, y in zip((kv[0], scales[0]), quantize_heads(k), strict=True)],
    ):
        write()
        found = decode_attention(q, *kv, start, end, scales=scales)
        assert found[0, 0, 2:].isnan().all() and found[0, 0, :2].isfinite().all()


def test_bad_calls_say_what_is_wrong(device):
    kv = cache(2, 20, 2, 16, [0, 0], [5, 5], False, torch.float32, device)
    q = torch.randn(2, 1, 4, 16, device=device)
    bits, scales = zip(*(quantize_heads(x) for x in kv[:2]), strict=True)
    token = q, q[:, :, :2], q[:, :, :2], q[:, :, 0, :8], q[:, :, 0, :8]
    for call in (
        lambda: decode_attention(q[:1], *kv),
        lambda: decode_attention(q.half(), *kv),
        lambda: decode_attention(torch.cat([q, q], 1), *kv),
        lambda: decode_attention(q, kv[0], kv[1], kv[2].long(), kv[3]),
        lambda: rope_to_cache(q, q, q, q[:, :, 0, :8], q[:, :, 0, :8], *kv[:2], kv[3]),
        lambda: rope_to_cache(q, q[:, :, :2], q[:, :, :2], q[:, :, 0, :8], q[:, :, 0, :8], *kv[:2], kv[3].long()),
        lambda: decode_attention(q, *kv, sinks=torch.zeros(2, device=device)),
        lambda: decode_attention(q, *kv, sinks=torch.zeros(4, device=device, dtype=torch.int32)),
        lambda: decode_attention(q, *kv, scales=scales),
        lambda: decode_attention(q, *bits, *kv[2:]),
        lambda: decode_attention(q, *bits, *kv[2:], scales=(scales[0], scales[1].float())),
        lambda: decode_attention(q, *bits, *kv[2:], scales=(scales[0][:, :5], scales[1])),
        lambda: decode_attention(q, *bits, *kv[2:], scales=tuple(x.mT.contiguous().mT for x in scales)),
        lambda: decode_attention(q, *bits, *kv[2:], scales=(scales[0][:1].expand(2, 20, 2), scales[1])),
        lambda: rope_to_cache(q, q[:, :, :2], q[:, :, :2], q[:, :, 0, :8], q[:, :, 0, :8], *bits, kv[3]),
        lambda: rope_decode_attention(*token, *kv, norms=HeadNorms(q[0, 0, 0, :8], q[0, 0, 0], 1e-6, 0.0, True)),
        lambda: rope_decode_attention(*token, *kv, norms=HeadNorms(q[0, 0, 0], q[0, 0, 0].long(), 1e-6, 0.0, True)),
    ):
        with pytest.raises(InputError, match="expected"):
            call()
