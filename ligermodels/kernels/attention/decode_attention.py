"""Attention of one new token per row to a KV cache whose lengths only the device knows, as in a CUDA graph.

    o[b] = sum over first <= p < ends[b] of softmax(softcap(scale * q[b] k[p])) v[p]

p counts a row's columns, padding included; first is starts[b] or, with a window, at least ends[b] - window.

- Split keys (Flash-Decoding): the keys of a row are split into shares, one per program, as many as fill the GPU at this
  batch size. The grid is fixed; the size of a share is read from the device, and a program without keys ends at once.
- One program serves all query heads of a key head, so that a key is read once.
- The last program of a row to finish sums the shares, in a fixed order. A second kernel does it for more than
  MAX_BY_LAST shares, with many programs. Shares depend on lengths, batch size and GPU, not on the capacity of the
  cache, and so do the bits of the result.
- `rope_decode_attention` takes the new token as it comes from the projection: each program rotates its query heads,
  and the one with the last share of a key head also rotates the new key, adds it to the sums from registers, and writes
  key and value into the cache. Nobody else reads that column. In half precision and without fp8; else `rope_to_cache`
  runs first. RMS norms of each head of q and of the new key, before they rotate, are computed there too, rounded like
  those of `rms_norm`, whose two launches they replace.
- Keys and values may be fp8 with a scale per token and key head (fp8.py). The scales multiply scores and probabilities
  in fp32; e4m3 is converted to q's dtype, which is exact. Two dims are loaded as one int16 and multiplied separately.

Bytes: keys and values once, and 4 D + 8 per query head and share, written and read.

Source: Dao et al. 2023, "Flash-Decoding", https://crfm.stanford.edu/2023/10/12/flashdecoding.html.
"""

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._check import check_operand, describe
from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import (
    accumulator,
    cdiv,
    has_ptx,
    last_dim_contiguous,
    next_power_of_2,
    num_sms,
    overlapping,
    overlaps_launches,
    tl,
    triton,
    use_triton,
    wait_for_previous,
)
from ligermodels.kernels.attention._flash_kernels import LOG2E, capped
from ligermodels.kernels.attention.rope import check_tables, check_token, rope_to_cache
from ligermodels.kernels.linear.fp8 import DTYPE, are_scales, dequantize_heads, to_fp32, unpack_pairs
from ligermodels.kernels.norm._norm_kernels import rstd_of, scaled
from ligermodels.kernels.norm.rms_norm import rms_norm

_HALF = torch.bfloat16, torch.float16
MAX_SPLITS = 256
_SUM_ELEMENTS = 8192
"""Elements of shares that are loaded at a time to be summed."""
MAX_BY_LAST = 16
"""Maximum number of shares that the last program of a row sums; a second kernel sums more."""
STAGES = tl.constexpr(3)
_DIMS = 32
"""Dims of a head per program of the second kernel."""


class HeadNorms(NamedTuple):
    """RMS norms of the heads of q and of k: the weight [D] of each, and the options of both, see `rms_norm`."""

    q: Tensor
    k: Tensor
    eps: float
    offset: float
    cast_before_weight: bool


def decode_attention_reference(
    q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, ends: Tensor, *, ring: bool = False,
    window: int | None = None, softcap: float | None = None, scale: float | None = None,
    scales: tuple[Tensor, Tensor] | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The specification of `decode_attention`, in fp32 (fp64 for fp64) with the scores in memory."""
    dtype, (rows, _, num_heads, size), num_kv_heads = accumulator(q.dtype), q.shape, keys.shape[2]
    columns = torch.arange(keys.shape[1], device=q.device)
    last = ends[:, None] - 1
    positions = last - (last - columns) % keys.shape[1] if ring else columns[None]
    first = starts if window is None else torch.maximum(starts, ends - window)
    visible = (positions >= first[:, None]) & (positions <= last)
    if scales is not None:
        keys, values = (dequantize_heads(x, by, dtype) for x, by in zip((keys, values), scales, strict=True))
    keys, values = (torch.where(visible[..., None, None], x.to(dtype), 0) for x in (keys, values))
    grouped = q.to(dtype).view(rows, num_kv_heads, num_heads // num_kv_heads, size)
    scores = torch.einsum("bhgd,bkhd->bhgk", grouped, keys) * (size**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = visible[:, None, None]
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        of_sinks = sinks.to(dtype).view(1, num_kv_heads, -1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, of_sinks], -1)
    weights = scores.softmax(-1)[..., : keys.shape[1]].masked_fill(~visible, 0)
    return torch.einsum("bhgk,bkhd->bhgd", weights, values).reshape(q.shape).to(q.dtype)


@triton.jit
def _scores_fp32(q_ptr, k_ptr, of_group, inside, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr):
    """q k^T in fp32, 16 dims at a time: the rounding of one long sum of D products would dominate the error."""
    s = tl.zeros([BLOCK_G, BLOCK_N], tl.float32)
    for first in tl.static_range(0, D, 16):
        dims = first + tl.arange(0, 16)[None, :]
        q = tl.load(q_ptr + dims, mask=of_group[:, None] & (dims < D), other=0.0)
        k = tl.load(k_ptr + dims, mask=inside[:, None] & (dims < D), other=0.0)
        # max_num_imprecise_acc keeps the compiler from making one long sum again.
        s += tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee", max_num_imprecise_acc=16)
    return s


@triton.jit
def _queries(
    q_ptr, columns, in_group, cos_ptr, sin_ptr, weight_ptr, D: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """The query heads of a group, twice; with HALF rotated, and of PAIRS the first dim of each, and the second."""
    if PAIRS:
        q = tl.load(q_ptr + 2 * columns, mask=in_group, other=0.0)
        return q, tl.load(q_ptr + 2 * columns + 1, mask=in_group, other=0.0)
    elif HALF is not None:
        q = _rotated(q_ptr, 0, columns, in_group, cos_ptr, sin_ptr, weight_ptr, D, HALF, NORM)
        return q, q
    else:
        q = tl.load(q_ptr + columns, mask=in_group, other=0.0)
        return q, q


@triton.jit
def _scores(q, q_odd, k, PAIRS: tl.constexpr, PTX: tl.constexpr):
    """q k^T. PAIRS: of fp8, two dims in one number of k; q has the first dim of each, q_odd the second."""
    if PAIRS:
        k, k_odd = unpack_pairs(k, q.dtype, PTX)
        return tl.dot(q_odd, tl.trans(k_odd), tl.dot(q, tl.trans(k)))
    else:
        return tl.dot(q, tl.trans(k.to(q.dtype)))


@triton.jit
def _weighted_values(p, v, v_scales, dtype: tl.constexpr, PAIRS: tl.constexpr, PTX: tl.constexpr):
    """p v, of PAIRS for the first and for the second dim of each; v_scales: of fp8, or None."""
    if PAIRS:
        v, v_odd = unpack_pairs(v, dtype, PTX)
        if dtype == tl.float16:  # probabilities times small scales would leave its range
            v = v.to(tl.float32) * v_scales[:, None]
            v_odd = (v_odd.to(tl.float32) * v_scales[:, None]).to(dtype)
    if v_scales is not None and dtype != tl.float16:
        p = p * v_scales[None, :]
    if dtype == tl.float32:  # a sum of its own for each tile, see _scores_fp32
        product = tl.dot(p, v.to(dtype), input_precision="ieee", max_num_imprecise_acc=16)
    else:
        product = tl.dot(p.to(dtype), v.to(dtype))
    odd = product
    if PAIRS:
        odd = tl.dot(p.to(dtype), v_odd)
    return product, odd


@triton.jit
def shares(starts_ptr, ends_ptr, b, window, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Row b: (first position, one past the last, positions per share, number of shares)."""
    first = tl.load(starts_ptr + b)
    end = tl.load(ends_ptr + b)
    if window is not None:
        first = tl.maximum(first, end - window)
    share = tl.maximum(tl.cdiv(tl.cdiv(end - first, SPLITS), BLOCK_N) * BLOCK_N, BLOCK_N)
    return first, end, share, tl.maximum(tl.cdiv(end - first, share), 1)  # of a row without keys one program writes 0


@triton.jit
def _columns(positions, capacity):
    """Where the cache has these positions. capacity: of a ring, or None."""
    if capacity is not None:
        positions = positions % capacity
    return positions.to(tl.int64)


@triton.jit
def _scales(k_ptr, v_ptr, positions, end, stride, capacity):
    """The scales of keys and of values at these positions."""
    at, inside = _columns(positions, capacity) * stride, positions < end
    return tl.load(k_ptr + at, mask=inside, other=0.0), tl.load(v_ptr + at, mask=inside, other=0.0)


@triton.jit
def _normed(x, rstd, weight_ptr, mask, NORM: tl.constexpr):
    w = tl.load(weight_ptr, mask=mask, other=0.0).to(tl.float32) + NORM[1]
    return scaled(x.to(tl.float32) * rstd, w, 0.0, NORM[2], True, False, x.dtype)


@triton.jit
def _rotated(
    x_ptr, offsets, dims, mask, cos_ptr, sin_ptr, weight_ptr, D: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """The heads at x_ptr + offsets, with NORM normalised, and then rotated; the dims past 2 * HALF are not rotated."""
    other = tl.where(dims < HALF, dims + HALF, dims - HALF)  # the other dim of a pair
    rotates = dims < 2 * HALF
    cos = tl.load(cos_ptr + tl.minimum(dims, other), mask=rotates, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + tl.minimum(dims, other), mask=rotates, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offsets + dims, mask=mask & (dims < D), other=0.0)
    y = tl.load(x_ptr + offsets + other, mask=mask & rotates, other=0.0)
    if NORM is not None:
        squares = x.to(tl.float32) * x.to(tl.float32)
        rstd = rstd_of(tl.sum(squares, -1, keep_dims=True), D, NORM[0], x.dtype)
        x = _normed(x, rstd, weight_ptr + dims, dims < D, NORM)
        y = _normed(y, rstd, weight_ptr + other, rotates, NORM)
    return (x.to(tl.float32) * cos + y.to(tl.float32) * tl.where(dims < HALF, -sin, sin)).to(x.dtype)


@triton.jit
def _append(k_ptr, v_ptr, k, new_v_ptr, dims, D: tl.constexpr):
    """Writes a new key and its value into the cache, and returns the value."""
    v = tl.load(new_v_ptr + dims, mask=dims < D, other=0.0)
    tl.store(k_ptr + dims, k, mask=dims < D)
    tl.store(v_ptr + dims, v, mask=dims < D)
    return v


@triton.jit
def _before_keys(sinks_ptr, split, heads, mask, FACTOR: tl.constexpr):
    """(highest score, sum of weights relative to it) of a share before its keys. A sink is a score without a value,
    which the first share has. sinks_ptr: or None."""
    total = tl.zeros(heads.shape, tl.float32)
    highest = total - float("inf")
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + heads, mask=mask, other=0.0).to(tl.float32) * (LOG2E / FACTOR)
        highest = tl.where(split == 0, sinks, highest)
        total = tl.where(split == 0, 1.0, total)
    return highest, total


@triton.jit
def _add_key(s, total, highest, FACTOR: tl.constexpr):
    """(weight of a key with score s, sum of weights with it, highest score); weights are relative to the latter."""
    higher = tl.maximum(highest, s)
    p = tl.exp2((s - higher) * FACTOR)
    return p, total * tl.exp2((highest - higher) * FACTOR) + p, higher


@triton.jit(do_not_specialize=["window", "capacity"])
def _kernel(
    o_ptr, part_ptr, stats_ptr, count_ptr, q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr,
    new_k_ptr, new_v_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, sinks_ptr, starts_ptr, ends_ptr, window, capacity,
    q_b, q_h, cache_b, cache_s, cache_h, new_b, table_b,
    SCALE: tl.constexpr, CAP: tl.constexpr, SPLITS: tl.constexpr, BY_LAST: tl.constexpr, HQ: tl.constexpr,
    HK: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, HALF: tl.constexpr,
    NORM: tl.constexpr, PTX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """All query heads of one key head of one row over one share of its keys; the last to finish sums few shares.

    window: or None. capacity: of a ring, or None. k_scales_ptr, v_scales_ptr: of fp8, or None. sinks_ptr: or None.
    HALF: half of the dims that rotate, of q and of a new key that is not in the cache yet; None: all is in the cache,
    and new_k_ptr to k_norm_ptr are None. NORM: (eps, offset, cast_before_weight) of the norms of both, or None.
    """
    wait_for_previous(OVERLAP)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    PAIRS: tl.constexpr = k_ptr.dtype.element_ty == tl.int16  # two dims each, in fp8
    PARTS: tl.constexpr = 2 if PAIRS else 1
    GROUP: tl.constexpr = HQ // HK
    GROUP_2: tl.constexpr = triton.next_power_of_2(GROUP)
    BLOCK_G: tl.constexpr = 16 if GROUP_2 < 16 else GROUP_2  # tl.dot takes no fewer rows
    BLOCK_D: tl.constexpr = 16 * PARTS if D < 16 * PARTS else triton.next_power_of_2(D)
    FACTOR: tl.constexpr = 1.0 if CAP is not None else SCALE * LOG2E
    b, kv_head, split = tl.program_id(0) // HK, tl.program_id(0) % HK, tl.program_id(1)
    first, end, share, used = shares(starts_ptr, ends_ptr, b, window, SPLITS, BLOCK_N)
    if split >= used:
        return
    begin = first + split * share
    if SPLITS > 1:
        end = tl.minimum(end, begin + share)
    members, dims = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    b = b.to(tl.int64)
    head = b * HQ + kv_head * GROUP  # the first of the group
    q_ptr += b * q_b + (kv_head * GROUP + members)[:, None] * q_h
    columns = tl.arange(0, BLOCK_D // PARTS)
    in_group = (members < GROUP)[:, None] & (columns < D // PARTS)[None, :]
    if HALF is not None:
        cos_ptr, sin_ptr = cos_ptr + b * table_b, sin_ptr + b * table_b
    q, q_odd = _queries(q_ptr, columns[None, :], in_group, cos_ptr, sin_ptr, q_norm_ptr, D, HALF, NORM, PAIRS)
    k_ptr += b * cache_b + kv_head.to(tl.int64) * cache_h
    v_ptr += b * cache_b + kv_head.to(tl.int64) * cache_h
    acc = tl.zeros([BLOCK_G, BLOCK_D // PARTS], tl.float32)
    acc_odd = acc
    highest, total = _before_keys(sinks_ptr, split, kv_head * GROUP + members, members < GROUP, FACTOR)
    if HALF is not None:
        last = tl.load(ends_ptr + b) - 1  # where the new token goes
        if split == used - 1:
            at, new = _columns(last, capacity) * cache_s, b * new_b + kv_head * D
            new_k = _rotated(new_k_ptr, new, dims, dims < D, cos_ptr, sin_ptr, k_norm_ptr, D, HALF, NORM)
            new_v = _append(k_ptr + at, v_ptr + at, new_k, new_v_ptr + new, dims, D)
            if last >= first:
                s = tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1)
                if CAP is not None:
                    s, _ = capped(s, SCALE, CAP, dtype)
                p, total, highest = _add_key(s, total, highest, FACTOR)
                acc += p[:, None] * new_v.to(tl.float32)[None, :]
            end = tl.minimum(end, last)
    if k_scales_ptr is not None:  # scales, laid out as heads, are loaded a tile ahead
        scales_s, of_row = cache_s // (D // PARTS), b * (cache_b // (D // PARTS)) + kv_head
        k_scales_ptr, v_scales_ptr = k_scales_ptr + of_row, v_scales_ptr + of_row
        positions = begin + tl.arange(0, BLOCK_N)
        next_k, next_v = _scales(k_scales_ptr, v_scales_ptr, positions, end, scales_s, capacity)
    for n in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        positions = n + tl.arange(0, BLOCK_N)
        rows = _columns(positions, capacity)[:, None] * cache_s
        inside = (positions < end)[:, None] & (columns < D // PARTS)[None, :]
        v = tl.load(v_ptr + rows + columns[None, :], mask=inside, other=0.0)
        v_scales = None
        if k_scales_ptr is not None:
            k_scales, v_scales = to_fp32(next_k), to_fp32(next_v)
            next_k, next_v = _scales(k_scales_ptr, v_scales_ptr, positions + BLOCK_N, end, scales_s, capacity)
        if dtype == tl.float32:
            s = _scores_fp32(q_ptr, k_ptr + rows, members < GROUP, positions < end, BLOCK_G, BLOCK_N, D)
        else:
            s = _scores(q, q_odd, tl.load(k_ptr + rows + columns[None, :], mask=inside, other=0.0), PAIRS, PTX)
        if k_scales_ptr is not None:
            s = s * k_scales[None, :]
        if CAP is not None:
            s, _ = capped(s, SCALE, CAP, dtype)
        s = tl.where((positions < end)[None, :], s, float("-inf"))
        # Less the maximum, then times the factor: see _flash_attention.
        higher = tl.maximum(highest, tl.max(s, 1))
        p = tl.exp2((s - higher[:, None]) * FACTOR)
        shrink = tl.exp2((highest - higher) * FACTOR)
        total = total * shrink + tl.sum(p, 1)
        product, odd = _weighted_values(p, v, v_scales, dtype, PAIRS, PTX)
        acc = acc * shrink[:, None] + product
        if PAIRS:
            acc_odd = acc_odd * shrink[:, None] + odd
        highest = higher
    if PAIRS:
        acc = tl.interleave(acc, acc_odd)
    if SPLITS == 1:
        total = tl.where(total == 0.0, 1.0, total)  # a row without keys
        o_ptr += (head + members)[:, None] * D + dims[None, :]
        tl.store(o_ptr, (acc / total[:, None]).to(dtype), mask=(members < GROUP)[:, None] & (dims < D)[None, :])
    else:
        store_share(part_ptr, stats_ptr, head, split, acc, total, highest, GROUP, D)
        if used <= BY_LAST:
            sum_by_last(o_ptr, part_ptr, stats_ptr, count_ptr, head, used, FACTOR, GROUP, D, GROUP_2, BLOCK_D, CHUNK)


@triton.jit
def store_share(part_ptr, stats_ptr, head, split, acc, total, highest, GROUP: tl.constexpr, D: tl.constexpr):
    """Writes the sums of one share, relative to its highest score."""
    members, dims = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
    slot = (head + members) * tl.num_programs(1) + split
    tl.store(stats_ptr + 2 * slot, highest, mask=members < GROUP)
    tl.store(stats_ptr + 2 * slot + 1, total, mask=members < GROUP)
    in_group = (members < GROUP)[:, None] & (dims < D)[None, :]
    tl.store(part_ptr + slot[:, None] * D + dims[None, :], acc, mask=in_group)


@triton.jit
def sum_by_last(
    o_ptr, part_ptr, stats_ptr, count_ptr, head, used, FACTOR: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    GROUP_2: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The program of a row that comes last sums the `used` shares.

    The barrier orders all threads' stores before the atomic, which releases them; the program that counts last acquires
    the stores of all others.
    """
    tl.debug_barrier()
    count_ptr += tl.program_id(0)
    if tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu") == used - 1:
        tl.debug_barrier()
        tl.store(count_ptr, 0)  # for the next launch
        parts = tl.num_programs(1)
        _sum_shares(o_ptr, part_ptr, stats_ptr, head, 0, used, parts, FACTOR, GROUP, D, GROUP_2, BLOCK_D, CHUNK)


@triton.jit(do_not_specialize=["window", "parts"])
def _many_kernel(
    o_ptr, part_ptr, stats_ptr, starts_ptr, ends_ptr, window, parts,
    SCALE: tl.constexpr, CAP: tl.constexpr, SPLITS: tl.constexpr, BY_LAST: tl.constexpr,
    HQ: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sums DIMS dims of one query head of a row with more than BY_LAST shares."""
    wait_for_previous(OVERLAP)
    FACTOR: tl.constexpr = 1.0 if CAP is not None else SCALE * LOG2E
    b = tl.program_id(0) // HQ
    _, _, _, used = shares(starts_ptr, ends_ptr, b, window, SPLITS, BLOCK_N)
    if used <= BY_LAST:
        return
    head, first_dim = tl.program_id(0).to(tl.int64), tl.program_id(1) * DIMS
    _sum_shares(o_ptr, part_ptr, stats_ptr, head, first_dim, used, parts, FACTOR, 1, D, 1, DIMS, CHUNK)


@triton.jit
def _sum_shares(
    o_ptr, part_ptr, stats_ptr, head, first_dim, used, parts,
    FACTOR: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    GROUP_2: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sums the `used` shares (of `parts` allocated) of GROUP query heads, BLOCK_D dims of each.

    A share has its highest score, and sums relative to it.
    """
    members, dims = tl.arange(0, GROUP_2), first_dim + tl.arange(0, BLOCK_D)
    acc = tl.zeros([GROUP_2, BLOCK_D], tl.float32)
    total = tl.zeros([GROUP_2], tl.float32)
    highest = tl.full([GROUP_2], float("-inf"), tl.float32)
    for i in range(0, used, CHUNK):
        some = i + tl.arange(0, CHUNK)[:, None]
        slots = (head + members)[None, :] * parts + some
        valid = (some < used) & (members < GROUP)[None, :]
        share_highest = tl.load(stats_ptr + 2 * slots, mask=valid, other=float("-inf"))
        share_total = tl.load(stats_ptr + 2 * slots + 1, mask=valid, other=0.0)
        inside = valid[:, :, None] & (dims < D)[None, None, :]
        part = tl.load(part_ptr + slots[:, :, None] * D + dims[None, None, :], mask=inside, other=0.0)
        higher = tl.maximum(highest, tl.max(share_highest, 0))
        weight = tl.where(share_total == 0.0, 0.0, tl.exp2((share_highest - higher[None, :]) * FACTOR))
        shrink = tl.where(total == 0.0, 0.0, tl.exp2((highest - higher) * FACTOR))
        total = total * shrink + tl.sum(share_total * weight, 0)
        acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], 0)
        highest = higher
    total = tl.where(total == 0.0, 1.0, total)  # a row without keys
    o_ptr += (head + members)[:, None] * D + dims[None, :]
    tl.store(o_ptr, (acc / total[:, None]).to(o_ptr.dtype.element_ty), mask=(members < GROUP)[:, None] & (dims < D))


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, ends: Tensor, *, ring: bool = False,
    window: int | None = None, softcap: float | None = None, scale: float | None = None, counters: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """softmax(scale * q k^T) v over each row's positions starts .. ends: [B, 1, HQ, D], without a gradient.

    q: [B, 1, HQ, D]. keys, values: [B, C, HK, D] of q's dtype; position p of a row is in column p, or with
    `ring` in column p modulo C. Query head h reads key head h // (HQ / HK). starts, ends: int32 [B], a row's first
    position and one past its last, unchecked; a row without positions gives 0. window: only the last `window` tokens.
    softcap: scores become softcap * tanh(scores / softcap). scale: default D ** -0.5. counters: int32, at least B * HK
    zeros, zero again after the call, used by one call at a time; None allocates them, in one more launch. scales: of
    fp8 keys and values, bf16 [B, C, HK] each, laid out as the heads. sinks: [HQ], floating, see `attention`. Raises
    InputError if shapes, dtypes or devices do not fit together.
    """
    return _attention(q, keys, values, starts, ends, None, None, ring, window, softcap, scale, counters, scales, sinks)


def rope_decode_attention(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, starts: Tensor,
    ends: Tensor, *, ring: bool = False, window: int | None = None, softcap: float | None = None,
    scale: float | None = None, counters: Tensor | None = None, scales: tuple[Tensor, Tensor] | None = None,
    sinks: Tensor | None = None, norms: HeadNorms | None = None,
) -> Tensor:  # fmt: skip
    """`rope_to_cache` and `decode_attention` of the rotated q, with the arguments and errors of both.

    norms: of each head of q and k, before they rotate. In half precision, in a cache that is not fp8 and whose rows
    have memory of their own, this is one launch; with norms not under torch.compile, where they run first.
    """
    name, new = "rope_decode_attention", None
    rows_see_each_other = len(q) > 1 and keys.stride(0) == 0
    separate = scales is not None or rows_see_each_other or is_large(q) or q.dtype not in _HALF
    separate = separate or keys.stride() != values.stride()  # which the kernel takes for equal, as all caches have them
    separate = separate or not use_triton(q)
    if norms is not None:
        for part, weight in (("q", norms.q), ("k", norms.k)):
            check_operand(name, f"norms.{part}", weight, q.shape[-1:], "q", q)
        if separate or torch.compiler.is_compiling():  # Inductor was not tried with a tuple as a kernel's constant
            options: Any = dict(eps=norms.eps, offset=norms.offset, cast_before_weight=norms.cast_before_weight)
            q, k, norms = rms_norm(q, norms.q, **options), rms_norm(k, norms.k, **options), None
    if separate:
        q = rope_to_cache(q, k, v, cos, sin, keys, values, ends, ring=ring, scales=scales)
    else:
        check_token(name, q, k, v, keys, values, ends, scales)
        tables = check_tables(name, q, q.shape[-1], cos, sin)
        k, v = _alike(k, v)
        new = *((k, v) if k.stride(2) == k.shape[3] else (k.contiguous(), v.contiguous())), *tables
    return _attention(q, keys, values, starts, ends, new, norms, ring, window, softcap, scale, counters, scales, sinks)


def is_large(q: Tensor) -> bool:
    """True if the kernel does not take heads of this size: three tiles of keys and of values are in shared memory."""
    return q.shape[-1] * q.element_size() > 1024


def _alike(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """x and y of equal strides, with a contiguous last dim."""
    x, y = last_dim_contiguous(x), last_dim_contiguous(y)
    return (x, y) if x.stride() == y.stride() else (x.contiguous(), y.contiguous())


def _attention(
    q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, ends: Tensor, new: tuple[Tensor, ...] | None,
    norms: HeadNorms | None, ring: bool, window: int | None, softcap: float | None, scale: float | None,
    counters: Tensor | None, scales: tuple[Tensor, Tensor] | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """`decode_attention`; new: key and value [B, 1, HK, D] that the cache does not have yet, cos and sin; norms: of q
    and of that key."""
    of_q, of_k = q.shape, keys.shape
    if (
        len(of_q) != 4 or len(of_k) != 4 or of_k != values.shape or of_q[1] != 1 or of_q[0] != of_k[0]
        or of_q[3] != of_k[3] or of_q[2] % of_k[2] or not keys.dtype == values.dtype == (DTYPE if scales else q.dtype)
        or not q.device == keys.device == values.device == starts.device == ends.device
        or not starts.shape == ends.shape == of_q[:1] or not starts.dtype == ends.dtype == torch.int32
        or (scales is not None and not are_scales(scales, keys))
    ):  # fmt: skip
        raise InputError(
            f"decode_attention: q has {describe(q)}, keys {describe(keys)}, values {describe(values)}, starts "
            f"{describe(starts)}, ends {describe(ends)}; expected q [B, 1, HQ, D] and keys, values [B, C, HK, D] of "
            "one dtype, or the latter in float8_e4m3fn and scales bf16 [B, C, HK] laid out as heads, int32 [B] twice, "
            "all on one device"
        )
    if sinks is not None:
        check_operand("decode_attention", "sinks", sinks, of_q[2:3], "q", q)
    rows, _, num_heads, size = of_q
    capacity, num_kv_heads = of_k[1:3]
    if not use_triton(q) or q.dtype == torch.float64 or is_large(q) or (scales is not None and size % 2):
        return decode_attention_reference(
            q, keys, values, starts, ends, ring=ring, window=window, softcap=softcap, scale=scale, scales=scales,
            sinks=sinks,
        )  # fmt: skip
    sinks = sinks if sinks is None else sinks.contiguous()
    q, (keys, values) = last_dim_contiguous(q), _alike(keys, values)
    starts, ends = starts.contiguous(), ends.contiguous()
    block_d = max(16, next_power_of_2(size))
    block_n = max(16, min(128, 16384 // (block_d * q.element_size())))  # 16 KiB a tile
    sms, groups = num_sms(q.device.index), rows * num_kv_heads
    # fp8 tiles are smaller: a multiprocessor runs four programs at a time, and all shares fit in one wave.
    splits = operator.index(min(MAX_SPLITS, cdiv(2 * sms, groups) if scales is None else max(1, 4 * sms // groups)))
    parts = min(splits, cdiv(capacity, block_n))  # more than that would have no key
    group_2, of_scores = next_power_of_2(num_heads // num_kv_heads), size**-0.5 if scale is None else scale
    out = torch.empty(of_q, dtype=q.dtype, device=q.device)
    part, stats, counters = memory_of_shares(out, splits, parts, num_kv_heads, counters)
    if scales is not None and q.dtype != torch.float32:
        keys, values = keys.view(torch.int16), values.view(torch.int16)
    overlap, half, of_new = overlaps_launches(q), None, (0,) * 2
    if new is not None:
        k, _, cos, _ = new
        half = operator.index(cos.shape[-1])
        of_new = k.stride(0), 0 if len(cos) == 1 else cos.stride(0)
    launch(
        _kernel, (rows * num_kv_heads, parts if splits > 1 else 1),
        out, part, stats, ends if counters is None else counters, q, keys, values, *(scales or (None, None)),
        *(new or (None,) * 4), *((None, None) if norms is None else (norms.q.contiguous(), norms.k.contiguous())),
        sinks, starts, ends, window, capacity if ring else None, q.stride(0), q.stride(2), *keys.stride()[:3], *of_new,
        of_scores, softcap, splits, MAX_BY_LAST, num_heads, num_kv_heads, size,
        block_n, shares_at_a_time(group_2 * block_d, splits),
        half, None if norms is None else norms[2:], has_ptx(q), overlap,
        num_warps=4 if q.dtype == torch.float32 or size > 256 else 2, **overlapping(overlap),
    )  # fmt: skip
    if splits > 1:
        sum_many_shares(out, part, stats, starts, ends, window, of_scores, softcap, splits, block_n)
    return out


def memory_of_shares(
    out: Tensor, splits: int, parts: int, num_kv_heads: int, counters: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(part, stats, counters) of the kernels: the sums of the shares of `out` [B, 1, HQ, D], and what counts them."""
    if splits == 1:
        return out, out, counters
    rows, _, num_heads, size = out.shape
    part = torch.empty(rows, num_heads, parts, size, dtype=torch.float32, device=out.device)
    stats = torch.empty(rows, num_heads, parts, 2, dtype=torch.float32, device=out.device)
    if counters is None:
        counters = torch.zeros(rows * num_kv_heads, dtype=torch.int32, device=out.device)
    return part, stats, counters


def shares_at_a_time(elements: int, splits: int) -> int:
    """The number of shares that are loaded together to be summed; elements: of one."""
    return max(1, min(_SUM_ELEMENTS // elements, next_power_of_2(splits)))


def sum_many_shares(
    out: Tensor, part: Tensor, stats: Tensor, starts: Tensor, ends: Tensor, window: int | None, scale: float,
    softcap: float | None, splits: int, block_n: int,
) -> None:  # fmt: skip
    """Sums into `out` the rows with more shares than the last program of a row takes; launches nothing where no row
    can have as many."""
    (rows, _, num_heads, size), parts, overlap = out.shape, part.shape[2], overlaps_launches(out)
    if parts <= MAX_BY_LAST:
        return
    launch(
        _many_kernel, (rows * num_heads, cdiv(size, _DIMS)),
        out, part, stats, starts, ends, window, parts,
        scale, softcap, splits, MAX_BY_LAST,
        num_heads, size, _DIMS, block_n, shares_at_a_time(_DIMS, splits),
        overlap, num_warps=4, **overlapping(overlap),
    )  # fmt: skip
