"""Decode attention where most of a key is its value times a weight, so that a cache has values and few dims of keys.

    k[p] = the R dims that rotate, stored; the others (v[p] * weight) there
    o[b] = sum over starts[b] <= p < ends[b] of softmax(scale * q[b] k[p]) v[p]

So are the full blocks of Gemma 4 with `attention_k_eq_v`: keys and values are one projection, normed with and without a
weight, and 128 of the 512 dims of a key rotate: i and i + D / 2 for i < R / 2.

- A score is (q * weight) v over the dims that do not rotate, and q k over those that do: the kernel reads each value
  once, for the score and for the sum, and never makes a key. The new token is rotated and written as by
  `rope_decode_attention`, whose shares of keys and their sums (decode_attention.py) are used too.
- q * weight is the sum of two numbers of half precision, so that what it loses by rounding is small beside what values
  lose. A value's rounding then stands in the score in place of a key's, and the two errors of a token are no longer
  independent. Of bf16's error against fp64 (head of 512 dims, 2,048 tokens, scores of a standard deviation of 0.5, 1.5
  and 3.2) that makes 0.26, 0.36 and 0.59 %; with whole keys it is 0.26, 0.32 and 0.48 %, where scores are rounded to
  bf16, as eager attention does in transformers, 0.28, 0.67 and 1.34 %.

Bytes: D + R numbers of a token and key head, where keys and values are 2 D: at 512 and 128 they are 5 / 8.

Source: https://github.com/huggingface/transformers, models/gemma4/modeling_gemma4.py, `Gemma4TextAttention`.
"""

import operator

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._check import describe
from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import (
    cdiv,
    next_power_of_2,
    num_sms,
    overlapping,
    overlaps_launches,
    tl,
    triton,
    use_triton,
    wait_for_previous,
)
from ligermodels.kernels.attention._flash_kernels import LOG2E
from ligermodels.kernels.attention.decode_attention import (
    MAX_BY_LAST,
    MAX_SPLITS,
    STAGES,
    decode_attention,
    is_large,
    memory_of_shares,
    shares,
    shares_at_a_time,
    store_share,
    sum_by_last,
    sum_many_shares,
)
from ligermodels.kernels.attention.rope import check_tables, rope_qk

_HALF = torch.bfloat16, torch.float16


def rotating_dims(x: Tensor, count: int) -> Tensor:
    """The `count` dims of heads x [..., D] that rotate: i and i + D / 2 for i < count / 2."""
    first, second = x.unflatten(-1, (2, -1))[..., : count // 2].unbind(-2)
    return torch.cat([first, second], -1)


def whole_keys(keys: Tensor, values: Tensor, weight: Tensor) -> Tensor:
    """The keys [..., D] of values [..., D], whose dims that rotate are `keys` [..., R]. weight: [D]. No gradient."""
    keys, values, whole = keys.detach(), values.detach(), torch.empty_like(values)
    torch.mul(values, weight.detach(), out=whole)  # in fp32 or more, rounded once, without a copy in fp32
    whole.unflatten(-1, (2, -1))[..., : keys.shape[-1] // 2] = keys.unflatten(-1, (2, -1))
    return whole


@triton.jit
def _kernel(
    o_ptr, part_ptr, stats_ptr, count_ptr, q_ptr, k_ptr, v_ptr, weight_ptr, new_k_ptr, new_v_ptr, cos_ptr, sin_ptr,
    starts_ptr, ends_ptr, q_b, q_h, k_b, k_s, v_b, v_s, new_k_b, new_v_b, table_b,
    SCALE: tl.constexpr, SPLITS: tl.constexpr, BY_LAST: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, GROUP_2: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """All query heads of one key head of one row over one share of its keys; the last to finish sums few shares.

    new_k_ptr: None where the new token is in the cache and q is rotated; new_v_ptr, cos_ptr and sin_ptr are None then.
    """
    wait_for_previous(OVERLAP)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    GROUP: tl.constexpr = HQ // HK
    BLOCK_G: tl.constexpr = 16 if GROUP_2 < 16 else GROUP_2  # tl.dot takes no fewer rows
    FACTOR: tl.constexpr = SCALE * LOG2E
    HALF: tl.constexpr = R // 2
    b, kv_head, split = tl.program_id(0) // HK, tl.program_id(0) % HK, tl.program_id(1)
    first, end, share, used = shares(starts_ptr, ends_ptr, b, None, SPLITS, BLOCK_N)
    if split >= used:
        return
    begin = first + split * share
    if SPLITS > 1:
        end = tl.minimum(end, begin + share)
    members, dims, turning = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
    b = b.to(tl.int64)
    head = b * HQ + kv_head * GROUP  # the first of the group
    q_ptr += b * q_b + (kv_head * GROUP + members)[:, None] * q_h
    k_ptr += b * k_b + kv_head * R
    v_ptr += b * v_b + kv_head * D
    of_group, is_turning, is_still = (members < GROUP)[:, None], turning < R, (dims < D) & (dims % (D // 2) >= HALF)
    weight = tl.load(weight_ptr + dims, mask=is_still, other=0.0).to(tl.float32)
    still_q = tl.load(q_ptr + dims[None, :], mask=of_group & is_still[None, :], other=0.0)
    product = still_q.to(tl.float32) * weight[None, :]
    still_q = product.to(dtype)
    rest_q = (product - still_q.to(tl.float32)).to(dtype)
    angles = tl.where(turning < HALF, turning, turning - HALF)
    places = tl.where(turning < HALF, turning, turning - HALF + D // 2)  # of the dims that rotate, in a head
    turned_q = tl.load(q_ptr + places[None, :], mask=of_group & is_turning[None, :], other=0.0)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    if new_k_ptr is not None:
        cos = tl.load(cos_ptr + b * table_b + angles, mask=is_turning, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + b * table_b + angles, mask=is_turning, other=0.0).to(tl.float32)
        sin = tl.where(turning < HALF, -sin, sin)
        others = tl.where(turning < HALF, turning + D // 2, turning - HALF)  # the other dims of the pairs
        other_q = tl.load(q_ptr + others[None, :], mask=of_group & is_turning[None, :], other=0.0)
        turned_q = (turned_q.to(tl.float32) * cos[None, :] + other_q.to(tl.float32) * sin[None, :]).to(dtype)
        last = tl.load(ends_ptr + b) - 1  # where the new token goes
        if split == used - 1:
            new_k_ptr += b * new_k_b + kv_head * D
            new_k = tl.load(new_k_ptr + places, mask=is_turning, other=0.0).to(tl.float32)
            other_k = tl.load(new_k_ptr + others, mask=is_turning, other=0.0).to(tl.float32)
            new_k = (new_k * cos + other_k * sin).to(dtype)
            new_v = tl.load(new_v_ptr + b * new_v_b + kv_head * D + dims, mask=dims < D, other=0.0)
            tl.store(k_ptr + last.to(tl.int64) * k_s + turning, new_k, mask=is_turning)
            tl.store(v_ptr + last.to(tl.int64) * v_s + dims, new_v, mask=dims < D)
            if last >= first:
                highest = tl.sum(turned_q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1)
                highest += tl.sum(product * new_v.to(tl.float32)[None, :], 1)
                total += 1.0
                acc += new_v.to(tl.float32)[None, :]
            end = tl.minimum(end, last)
    for n in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        positions = n + tl.arange(0, BLOCK_N)
        rows, inside = positions.to(tl.int64)[:, None], (positions < end)[:, None]
        v = tl.load(v_ptr + rows * v_s + dims[None, :], mask=inside & (dims < D)[None, :], other=0.0)
        k = tl.load(k_ptr + rows * k_s + turning[None, :], mask=inside & is_turning[None, :], other=0.0)
        s = tl.dot(turned_q, tl.trans(k), tl.dot(rest_q, tl.trans(v), tl.dot(still_q, tl.trans(v))))
        s = tl.where((positions < end)[None, :], s, float("-inf"))
        # Less the maximum, then times the factor: see _flash_attention.
        higher = tl.maximum(highest, tl.max(s, 1))
        p = tl.exp2((s - higher[:, None]) * FACTOR)
        shrink = tl.exp2((highest - higher) * FACTOR)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(dtype), v)
        highest = higher
    if SPLITS == 1:
        total = tl.where(total == 0.0, 1.0, total)  # a row without keys
        o_ptr += (head + members)[:, None] * D + dims[None, :]
        tl.store(o_ptr, (acc / total[:, None]).to(dtype), mask=of_group & (dims < D)[None, :])
    else:
        store_share(part_ptr, stats_ptr, head, split, acc, total, highest, GROUP, D)
        if used <= BY_LAST:
            sum_by_last(o_ptr, part_ptr, stats_ptr, count_ptr, head, used, FACTOR, GROUP, D, GROUP_2, BLOCK_D, CHUNK)


def rope_decode_keys_as_values(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, weight: Tensor,
    starts: Tensor, ends: Tensor, *, scale: float | None = None, counters: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Rotates and writes one new token per row, and returns its attention [B, 1, HQ, D] to the row. No gradient.

    q [B, 1, HQ, D], k, v [B, 1, HK, D]. keys [B, C, HK, R], values [B, C, HK, D], with contiguous heads; position p is
    in column p. R dims of a head rotate, see `rotating_dims`. weight [D]: the other dims of a key are its value times
    the weight; those of k are not read. cos, sin: fp32 [1 or B, 1, R/2 or more], of which the first R/2 are read.
    starts, ends, scale, counters: as in `decode_attention`; rows may share memory, as in `rope_to_cache`.

    In half precision, and if rows have memory of their own, this is one launch. Raises InputError if shapes, dtypes or
    devices do not fit together.
    """
    _check(q, k, v, keys, values, weight, starts, ends)
    cos, sin = check_tables("rope_decode_keys_as_values", q, q.shape[-1], cos, sin)
    rotating = keys.shape[-1]
    if 2 * cos.shape[-1] < rotating:
        raise InputError(
            f"rope_decode_keys_as_values: cos has {describe(cos)}, and {rotating} dims of a head rotate; expected at "
            f"least {rotating // 2} angles"
        )
    fused = use_triton(q) and q.dtype in _HALF and not is_large(q)
    if fused and (len(q) == 1 or values.stride(0) != 0):
        return _attention(q, keys, values, weight, starts, ends, (k, v, cos, sin), scale, counters)
    # Rows that share memory see each other's new tokens, which are written first.
    q, new_keys = _rotated(q, k, cos[..., : rotating // 2], sin[..., : rotating // 2])
    _write(keys, new_keys, ends)
    _write(values, v, ends)
    if fused:
        return _attention(q, keys, values, weight, starts, ends, None, scale, counters)
    whole = whole_keys(keys, values, weight)
    return decode_attention(q, whole, values, starts, ends, scale=scale, counters=counters)


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated q [B, 1, HQ, D], and those dims of k [B, 1, HK, D] that rotate, rotated. cos, sin: [1 or B, 1, R/2]."""
    half = cos.shape[-1]
    turned, new_keys = rope_qk(rotating_dims(q, 2 * half), rotating_dims(k, 2 * half), cos, sin)
    q = q.clone()
    q.unflatten(-1, (2, -1))[..., :half] = turned.unflatten(-1, (2, -1))
    return q, new_keys


def _write(buffer: Tensor, x: Tensor, ends: Tensor) -> None:
    """Writes x [B, 1, HK, .] into column ends[b] - 1 of each row b of the buffer [B, C, HK, .]."""
    rows, columns = torch.arange(len(x), device=x.device), (ends - 1).long()
    if buffer.stride(0) == 0:  # torch does not write to expanded memory
        buffer, rows = buffer[:1], torch.zeros_like(rows)
    buffer[rows, columns] = x[:, 0]


def _attention(
    q: Tensor, keys: Tensor, values: Tensor, weight: Tensor, starts: Tensor, ends: Tensor,
    new: tuple[Tensor, Tensor, Tensor, Tensor] | None, scale: float | None, counters: Tensor | None,
) -> Tensor:  # fmt: skip
    """new: key and value [B, 1, HK, D] that the cache does not have yet, cos and sin; None: q is rotated."""
    rows, _, num_heads, size = (operator.index(n) for n in q.shape)
    capacity, num_kv_heads, rotating = keys.shape[1], operator.index(keys.shape[2]), operator.index(keys.shape[3])
    q = q if q.stride(3) == 1 else q.contiguous()
    starts, ends, weight = starts.contiguous(), ends.contiguous(), weight.contiguous()
    block_d, block_r = (max(16, next_power_of_2(n)) for n in (size, rotating))
    block_n = max(16, min(128, 16384 // (block_d * q.element_size())))  # 16 KiB a tile of values
    splits = operator.index(min(MAX_SPLITS, cdiv(2 * num_sms(q.device.index), rows * num_kv_heads)))
    parts = min(splits, cdiv(capacity, block_n))  # more than that would have no key
    group_2, scale = next_power_of_2(num_heads // num_kv_heads), size**-0.5 if scale is None else scale
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    part, stats, counters = memory_of_shares(out, splits, parts, num_kv_heads, counters)
    overlap, of_new = overlaps_launches(q), (0, 0, 0)
    if new is not None:
        k, v, cos, sin = new
        new = k.contiguous(), v.contiguous(), cos, sin
        of_new = new[0].stride(0), new[1].stride(0), 0 if len(cos) == 1 else cos.stride(0)
    launch(
        _kernel, (rows * num_kv_heads, parts if splits > 1 else 1),
        out, part, stats, ends if counters is None else counters, q, keys, values, weight, *(new or (None,) * 4),
        starts, ends, q.stride(0), q.stride(2), *keys.stride()[:2], *values.stride()[:2], *of_new,
        scale, splits, MAX_BY_LAST, num_heads, num_kv_heads, size, rotating, group_2, block_d, block_r, block_n,
        shares_at_a_time(group_2 * block_d, splits), overlap, num_warps=4 if size > 256 else 2, **overlapping(overlap),
    )  # fmt: skip
    if splits > 1:
        sum_many_shares(out, part, stats, starts, ends, None, scale, None, splits, block_n)
    return out


def _check(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, weight: Tensor, starts: Tensor, ends: Tensor
) -> None:
    (rows, _, num_heads, size), (_, capacity, heads, rotating) = q.shape, keys.shape
    if (
        k.shape != v.shape or v.shape != (rows, 1, heads, size) or q.shape[1] != 1 or not heads or num_heads % heads
        or size % 2 or rotating % 2 or not 0 < rotating <= size
        or keys.shape[0] != rows or values.shape != (rows, capacity, heads, size)
        or keys.stride()[2:] != (rotating, 1) or values.stride()[2:] != (size, 1) or weight.shape != (size,)
        or not q.dtype == k.dtype == v.dtype == keys.dtype == values.dtype
        or not q.device == keys.device == values.device == weight.device == starts.device == ends.device
        or not starts.shape == ends.shape == (rows,) or not starts.dtype == ends.dtype == torch.int32
    ):  # fmt: skip
        raise InputError(
            f"rope_decode_keys_as_values: q has {describe(q)}, k {describe(k)}, v {describe(v)}, keys "
            f"{describe(keys)}, values {describe(values)}, weight {describe(weight)}, starts {describe(starts)}, ends "
            f"{describe(ends)}; expected q [B, 1, HQ, D], k, v [B, 1, HK, D], keys [B, C, HK, R] and values [B, C, HK, "
            "D] of one dtype with contiguous heads, weight [D], int32 [B] twice, all on one device"
        )
