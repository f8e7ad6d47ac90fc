"""Attention of one token to a cache of values and of those dims of keys that rotate, against fp64 over whole keys."""

import itertools

import pytest
import torch

from ligermodels.errors import InputError
from ligermodels.kernels.attention import decode_attention as shares, decode_keys_as_values as module
from ligermodels.kernels.attention.decode_keys_as_values import (
    rope_decode_keys_as_values,
    rotating_dims,
    whole_keys,
)
from ligermodels.kernels.attention.rope import rope_qk_reference
from tests.kernels.attention.test_decode_attention import by_rows
from tests.kernels.cases import HALF
from tests.kernels.judge import ON_GPU
from tests.kernels.oracle import assert_as_exact

# head_dim, of which as many rotate: Gemma 4's, sizes that fill no tile, and all
SIZES = [(512, 128), (24, 8), (40, 36), (16, 16)]


def tables(size, rotating, rows, device):
    """As those of proportional rope: the angles of dims that do not rotate are 0."""
    angles = torch.rand(rows, 1, size // 2, device=device) * 6
    angles[..., rotating // 2 :] = 0
    return angles.cos(), angles.sin()


def text(rows, length, heads, size, rotating, dtype, device):
    """(weight, values, keys before they rotate), in fp64 and in dtype: of one projection, normed twice."""
    x = torch.randn(rows, length, heads, size, device=device, dtype=torch.float64).to(dtype).double()
    weight = (1 + 0.3 * torch.randn(size, device=device)).to(dtype)
    exact = x / x.square().mean(-1, keepdim=True).sqrt()
    return weight, exact, exact * weight.double()


CASES = [
    # capacity, starts, ends
    (300, [0, 17, 299], [300, 256, 300]),
    (300, [0, 0, 0], [1, 65, 130]),  # the new token alone, and alone in its share
    (300, [9, 5, 300], [9, 6, 41]),  # rows that have not begun write, and see nothing
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_as_exact_as_eager_over_whole_keys(device, monkeypatch, poison, case, heads, shared):
    """Eager rounds keys, values and what it rotates to the dtype, and softmax and sums are in fp32 as here.

    shared: the rows are one, in which each token sees those before it. The new token is written, and nothing else is.
    """
    capacity, starts, ends = case if not shared else (300, [0] * 3, [258, 259, 260])
    rows = len(ends)
    bounds = [torch.tensor(x, dtype=torch.int32, device=device) for x in (starts, ends)]
    for i, (dtype, (size, rotating)) in enumerate(itertools.product([*HALF, torch.float32], SIZES)):
        if not ON_GPU and (dtype == torch.bfloat16 or (dtype == torch.float32 and size == 512)):
            continue  # the interpreter rounds bf16 in a way of its own
        monkeypatch.setattr(module, "num_sms", lambda index, many=(132, 4, 1)[i % 3]: many)
        monkeypatch.setattr(module, "MAX_BY_LAST", (16, 2)[i % 2])
        monkeypatch.setattr(shares, "MAX_BY_LAST", (16, 2)[i % 2])
        weight, exact_v, plain_k = text(1 if shared else rows, capacity, heads[1], size, rotating, dtype, device)
        here = torch.arange(rows, device=device), torch.tensor(ends, device=device) - 1
        angles = torch.rand(1 if shared else rows, capacity, size // 2, device=device) * 6
        angles[..., rotating // 2 :] = 0
        everywhere = angles.cos(), angles.sin()
        if shared:
            exact_v, plain_k = (x.expand(rows, -1, -1, -1) for x in (exact_v, plain_k))
            everywhere = tuple(x.expand(rows, -1, -1) for x in everywhere)
        q = torch.randn(rows, 1, heads[0], size, device=device).to(dtype)
        k, v = plain_k[here].to(dtype)[:, None], exact_v[here].to(dtype)[:, None]
        of_new = tuple(x[here][:, None] for x in everywhere)
        results, rotated = [], {}
        for precise in (torch.float64, dtype):
            _, rotated[precise] = rope_qk_reference(plain_k.to(precise), plain_k.to(precise), *everywhere)
            turned_q, _ = rope_qk_reference(q.to(precise), q.to(precise), *of_new)
            stored = exact_v.to(dtype).to(precise) if precise == dtype else exact_v
            results.append(by_rows(turned_q, rotated[precise], stored, *bounds, scale=0.1))
        columns = torch.arange(capacity, device=device)
        known = (columns >= bounds[0][:, None]) & (columns < bounds[1][:, None] - 1)
        if shared:
            known = known.all(0, keepdim=True)
        keys, values = (
            torch.where(known[..., None, None], x[: len(known)], torch.nan).contiguous()
            for x in (rotating_dims(rotated[dtype], rotating), exact_v.to(dtype))
        )
        before = keys.clone(), values.clone()
        if shared:
            keys, values = (x.expand(rows, -1, -1, -1) for x in (keys, values))
        kept = q.clone()
        found = rope_decode_keys_as_values(q, k, v, *of_new, keys, values, weight, *bounds, scale=0.1)
        what = f"{dtype} {size} {rotating}"
        # Shared rows have the errors of the same values. In fp32 a score is a sum of `size` terms, which an engine of
        # torch may add one after the other; a score under the softmax is about the variance of all, and its deviation.
        variance = 0.1**2 * size
        terms = size * (1 + variance + variance**2) if dtype == torch.float32 else 1
        assert_as_exact(found, results[1], results[0], what, shared=size * rows if shared else size, terms=terms)
        assert torch.equal(q, kept), "q is the caller's"
        torch.testing.assert_close(keys[here], rotating_dims(rotated[dtype][here], rotating))
        assert torch.equal(values[here], v[:, 0])
        for x, was in zip((keys, values), before, strict=True):
            x = (x[:1] if shared else x).clone()
            place = (torch.zeros_like(here[0]), here[1]) if shared else here
            x[place] = was[place] = 0
            assert torch.equal(x.isnan(), was.isnan()) and torch.equal(x[~x.isnan()], was[~was.isnan()])


def test_whole_keys_are_put_together_exactly():
    weight, values, keys = text(2, 5, 3, 24, 8, torch.float32, "cpu")
    values, keys = values.float(), (values.float() * weight).float()
    cos, sin = tables(24, 8, 2, "cpu")
    _, keys = rope_qk_reference(keys[:, :1], keys[:, :1], cos, sin)
    assert torch.equal(whole_keys(rotating_dims(keys, 8), values[:, :1], weight), keys)


def test_bad_calls_say_what_is_wrong(device):
    q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16), torch.randn(2, 1, 2, 16)
    keys, values, weight = torch.randn(2, 20, 2, 8), torch.randn(2, 20, 2, 16), torch.randn(16)
    cos = torch.ones(1, 1, 8)
    starts, ends = torch.tensor([[0, 0], [5, 5]], dtype=torch.int32)
    good = [x.to(device) for x in (q, k, v, cos, cos, keys, values, weight, starts, ends)]
    rope_decode_keys_as_values(*good)
    for place, bad in [
        (0, q[:1]), (0, q.half()), (0, q[:, :, :3]), (1, k[..., :8]), (3, cos[..., :3]), (5, keys[..., :7]),
        (5, torch.randn(2, 20, 2, 9)), (6, values[:, :19]), (6, values[..., :8]), (7, weight[:8]), (9, ends.long()),
    ]:  # fmt: skip
        given = list(good)
        given[place] = bad.to(device)
        if place == 3:
            given[4] = given[3]
        with pytest.raises(InputError, match="expected"):
            rope_decode_keys_as_values(*given)
