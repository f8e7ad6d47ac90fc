"""Attention of one token to a cache, and the write of that token, against fp64; beyond the lengths the cache is NaN."""

import itertools

import pytest
import torch

from ligermodels.errors import InputError
from ligermodels.kernels import decode_attention as module
from ligermodels.kernels.attention import attention_reference
from ligermodels.kernels.decode_attention import decode_attention, decode_attention_reference
from ligermodels.kernels.rope import rope_qk_reference, rope_to_cache
from tests.kernels.judge import DTYPES, ON_GPU
from tests.kernels.on_gpu import large
from tests.kernels.oracle import assert_as_exact

SIZES = [64, 80, 96, 128, 256]


def cache(rows, capacity, heads, size, starts, ends, offset, dtype, device):
    """(keys, values, starts, ends, offset), NaN where no position of a row lies."""
    positions = torch.arange(capacity) + (offset or 0)
    held = (positions >= torch.tensor(starts)[:, None]) & (positions < torch.tensor(ends)[:, None])
    keys, values = (
        torch.where(held[..., None, None], torch.randn(rows, capacity, heads, size), torch.nan).to(device, dtype)
        for _ in range(2)
    )
    bounds = (torch.tensor(x, dtype=torch.int32, device=device) for x in (starts, ends))
    return keys, values, *bounds, None if offset is None else torch.tensor(offset, dtype=torch.int32, device=device)


def by_rows(q, keys, values, starts, ends, offset, window=None, **options):
    """Each row by `attention_reference` over the keys that it sees, cut out by hand, in the dtype of q."""
    rows = []
    for b, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        first = start if window is None else max(start, end - window)
        seen = slice(first - int(offset or 0), end - int(offset or 0))
        if first >= end:
            rows.append(torch.zeros_like(q[b : b + 1]))
        else:
            k, v = keys[b : b + 1, seen], values[b : b + 1, seen]
            rows.append(attention_reference(q[b : b + 1], k, v, causal=False, **options))
    return torch.cat(rows)


CASES = [
    # capacity, starts, ends, offset, window
    (300, [0, 0, 0], [1, 64, 65], None, None),  # one key, a whole tile, one more
    (300, [0, 17, 299], [300, 299, 300], None, None),
    (300, [0, 5, 40], [0, 5, 40], None, None),  # rows without a key
    (150, [0, 930, 1000], [1040, 1033, 1021], 900, 33),  # moved buffers
    (150, [0, 0, 0], [150, 20, 1], 0, 100),  # windows longer than the row, and not
    (700, [3, 0, 200], [700, 2, 650], None, None),  # rows of very different length
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (8, 1)], ids=str)
def test_as_exact_as_eager(device, poison, monkeypatch, case, heads):
    capacity, starts, ends, offset, window = case
    for i, (dtype, size) in enumerate(itertools.product(DTYPES, SIZES if ON_GPU else [16, 24])):
        if ON_GPU or i % 2 == (capacity + heads[0]) % 2:
            monkeypatch.setattr(module, "num_sms", lambda index, many=(132, 4, 1)[i % 3]: many)
            monkeypatch.setattr(module, "_AT_ONCE", (8192, 64)[i // 2 % 2])
            options = dict(window=window, softcap=(None, 3.0)[i % 2], scale=(None, 0.3)[i % 2])
            q = torch.randn(3, 1, heads[0], size, device=device).to(dtype)
            held = cache(3, capacity, heads[1], size, starts, ends, offset, dtype, device)
            exact = by_rows(q.double(), *(x.double() for x in held[:2]), *held[2:], **options)
            eager = by_rows(q, *held, **options)
            wanted = decode_attention_reference(q.double(), *(x.double() for x in held[:2]), *held[2:], **options)
            torch.testing.assert_close(wanted, exact)
            found = decode_attention(q, *held, **options)
            assert_as_exact(found, eager, exact, f"{dtype} {size}", shared=size)
            assert torch.equal(found, decode_attention(q, *held, **options))


def test_the_bits_do_not_depend_on_the_capacity(device):
    q = torch.randn(1, 1, 4, 64, device=device)
    held = cache(1, 1000, 2, 64, [3], [420], None, torch.float32, device)
    found = decode_attention(q, *held)
    for capacity in (420, 600):
        assert torch.equal(found, decode_attention(q, *(x[:, :capacity].contiguous() for x in held[:2]), *held[2:]))


def test_counters_serve_calls_of_other_lengths(device, monkeypatch):
    monkeypatch.setattr(module, "num_sms", lambda index: 132)
    q, counters = torch.randn(3, 1, 4, 64, device=device), torch.zeros(6, dtype=torch.int32, device=device)
    for ends in ([300, 1, 0], [20, 300, 299], [0, 0, 0], [299, 300, 300]):
        held = cache(3, 300, 2, 64, [0, 0, 0], ends, None, torch.float32, device)
        assert torch.equal(decode_attention(q, *held, counters=counters), decode_attention(q, *held))
        assert not counters.any()


@pytest.mark.gpu
def test_the_last_program_sees_what_all_others_wrote(device):
    q = torch.randn(4, 1, 16, 128, device=device).bfloat16()
    counters = torch.zeros(16, dtype=torch.int32, device=device)
    held = cache(4, 20_000, 4, 128, [0] * 4, [20_000, 3000, 257, 130], None, torch.bfloat16, device)
    expected = decode_attention(q, *held)
    torch.testing.assert_close(expected, by_rows(q, *held), rtol=2e-2, atol=2e-3)
    found = torch.stack([decode_attention(q, *held, counters=counters) for _ in range(3000)])
    assert (found == expected).all() and not counters.any()


def test_large_scores_and_nan(device):
    held = cache(1, 200, 2, 32, [0], [150], None, torch.float32, device)
    q = 1000 * torch.randn(1, 1, 4, 32, device=device)
    exact = by_rows(q.double(), *(x.double() for x in held[:2]), *held[2:])
    torch.testing.assert_close(decode_attention(q, *held).double(), exact, rtol=1e-4, atol=1e-4)  # scores of 1e4
    held[0][0, 77, 1] = torch.nan
    found = decode_attention(q, *held)
    assert found[0, 0, 2:].isnan().all() and found[0, 0, :2].isfinite().all()


@pytest.mark.gpu
@large
def test_offsets_past_32_bits(device):
    keys = torch.zeros(2, 2**21 + 8, 4, 128, dtype=torch.bfloat16, device=device)  # 2^31 elements
    q = torch.randn(2, 1, 8, 128, device=device).bfloat16()
    keys[1, 2**21 :] = torch.randn(8, 4, 128, device=device).bfloat16()
    starts, ends = torch.tensor([[2**21, 2**21], [2**21 + 8] * 2], dtype=torch.int32, device=device)
    expected = by_rows(q, keys, keys, starts, ends, None)
    torch.testing.assert_close(decode_attention(q, keys, keys, starts, ends), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("packed, rotated, offset", [(True, 16, None), (False, 16, 5), (True, 12, 5)])
def test_a_token_is_rotated_and_written_to_its_place_alone(device, packed, rotated, offset):
    for dtype in DTYPES:
        rows, heads, size = 3, (4, 2, 2), 16
        qkv = torch.randn(rows, 1, sum(heads) * size, device=device).to(dtype)
        q, k, v = (x.unflatten(-1, (-1, size)) for x in qkv.split([n * size for n in heads], -1))
        if not packed:
            q, k, v = (x.clone() for x in (q, k, v))
        angles = torch.randn(rows, 1, rotated // 2, device=device)
        cos, sin = angles.cos(), angles.sin()
        ends = torch.tensor([6, 9, 14], dtype=torch.int32, device=device)
        place = None if offset is None else torch.tensor(offset, dtype=torch.int32, device=device)
        keys, values = (torch.full((rows, 14, 2, size), 7.0, device=device, dtype=dtype) for _ in range(2))
        expected_q, expected_k = rope_qk_reference(q, k, cos, sin)
        expected_v = v.clone()
        found = rope_to_cache(q, k, v, cos, sin, keys, values, ends, place)
        torch.testing.assert_close(found, expected_q)
        slots = ends.long() - 1 - (offset or 0)
        here = torch.arange(rows), slots.cpu()
        torch.testing.assert_close(keys[here], expected_k[:, 0])
        assert torch.equal(values[here], expected_v[:, 0])
        for x in (keys, values):
            x[here] = 7.0
            assert (x == 7.0).all(), "nothing else is written"


def test_bad_calls_say_what_is_wrong(device):
    held = cache(2, 20, 2, 16, [0, 0], [5, 5], None, torch.float32, device)
    q = torch.randn(2, 1, 4, 16, device=device)
    for call in (
        lambda: decode_attention(q[:1], *held),
        lambda: decode_attention(q.half(), *held),
        lambda: decode_attention(torch.cat([q, q], 1), *held),
        lambda: decode_attention(q, held[0], held[1], held[2].long(), held[3]),
        lambda: rope_to_cache(q, q, q, q[:, :, 0, :8], q[:, :, 0, :8], *held[:2], held[3]),
        lambda: rope_to_cache(q, q[:, :, :2], q[:, :, :2], q[:, :, 0, :8], q[:, :, 0, :8], *held[:2], held[3].long()),
    ):
        with pytest.raises(InputError, match="expected"):
            call()
