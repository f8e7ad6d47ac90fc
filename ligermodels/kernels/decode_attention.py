"""Attention of one new token a row to a KV cache whose lengths only the device knows, as a CUDA graph needs it.

    o[b] = sum over first <= p < ends[b] of softmax(softcap(scale * q[b] k[p])) v[p]

where p counts a row's columns, padding included, and first is starts[b], or within a window ends[b] - window.

- The keys of a row are split among programs, as many as fill the GPU at this batch, each with a share of what the row
  holds: the grid is fixed, the shares are read from the device, and a program without keys ends at once.
- One program serves all query heads of a key head, so a key is read once.
- A second kernel adds up the shares in a fixed order. Shares depend on lengths, batch and GPU, not on the memory that
  the cache has, so neither do the bits of the result.

Bytes: keys and values once; beside them 4 D + 4 per query head and share, written and read.

Source: Dao et al. 2023, "Flash-Decoding", https://crfm.stanford.edu/2023/10/12/flashdecoding.html.
"""

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._check import describe
from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import (
    accumulator,
    cdiv,
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
from ligermodels.kernels.flash_attention import _capped

_LOG2E = tl.constexpr(1.4426950408889634)
_MOST_SPLITS = 256
_CHUNK = 16
"""Shares that the second kernel adds at once."""


def decode_attention_reference(
    q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, ends: Tensor, offset: Tensor | None = None, *,
    window: int | None = None, softcap: float | None = None, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """The specification of `decode_attention`, in fp32 (fp64 for fp64) with the scores in memory."""
    dtype, (rows, _, num_heads, size), num_kv_heads = accumulator(q.dtype), q.shape, keys.shape[2]
    positions = torch.arange(keys.shape[1], device=q.device) + (0 if offset is None else offset)
    first = starts if window is None else torch.maximum(starts, ends - window)
    visible = (positions >= first[:, None]) & (positions < ends[:, None])
    keys, values = (torch.where(visible[..., None, None], x.to(dtype), 0) for x in (keys, values))
    grouped = q.to(dtype).view(rows, num_kv_heads, num_heads // num_kv_heads, size)
    scores = torch.einsum("bhgd,bkhd->bhgk", grouped, keys) * (size**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = visible[:, None, None]
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1).masked_fill(~visible, 0)
    return torch.einsum("bhgk,bkhd->bhgd", weights, values).reshape(q.shape).to(q.dtype)


@triton.jit
def _shares(starts_ptr, ends_ptr, b, window, WINDOW: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first position that row b sees, the one past the last, and how many each of SPLITS programs takes."""
    first = tl.load(starts_ptr + b)
    end = tl.load(ends_ptr + b)
    if WINDOW:
        first = tl.maximum(first, end - window)
    share = tl.cdiv(tl.cdiv(end - first, SPLITS), BLOCK_N) * BLOCK_N
    return first, end, tl.maximum(share, BLOCK_N)


@triton.jit
def _in_parts(q_ptr, k_ptr, of_group, inside, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr):
    """q k^T in fp32, of 16 dims at a time: the rounding of one sum of D products after the other would dominate."""
    s = tl.zeros([BLOCK_G, BLOCK_N], tl.float32)
    for first in tl.static_range(0, D, 16):
        dims = first + tl.arange(0, 16)[None, :]
        q = tl.load(q_ptr + dims, mask=of_group[:, None] & (dims < D), other=0.0)
        k = tl.load(k_ptr + dims, mask=inside[:, None] & (dims < D), other=0.0)
        s += tl.dot(q, tl.trans(k), input_precision="ieee")
    return s


@triton.jit(do_not_specialize=["window"])
def _split_kernel(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, starts_ptr, ends_ptr, offset_ptr, window,
    q_b, q_h, k_b, k_s, k_h, v_b, v_s, v_h,
    SCALE: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, OFFSET: tl.constexpr, SPLITS: tl.constexpr,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """All query heads of one key head of one row, over one share of its keys."""
    wait_for_previous(OVERLAP)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    GROUP: tl.constexpr = HQ // HK
    FACTOR: tl.constexpr = 1.0 if CAP is not None else SCALE * _LOG2E
    b = tl.program_id(0) // HK
    kv_head = tl.program_id(0) % HK
    split = tl.program_id(1)
    first, end, share = _shares(starts_ptr, ends_ptr, b, window, WINDOW, SPLITS, BLOCK_N)
    begin = first + split * share
    if SPLITS > 1:
        if begin >= end:
            return
        end = tl.minimum(end, begin + share)
    offset = tl.load(offset_ptr) if OFFSET else 0
    members, dims = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + members
    of_group = (members < GROUP)[:, None] & (dims < D)[None, :]
    b = b.to(tl.int64)
    q_ptr += b * q_b + heads[:, None] * q_h
    q = tl.load(q_ptr + dims[None, :], mask=of_group, other=0.0)
    k_ptr += b * k_b + kv_head.to(tl.int64) * k_h
    v_ptr += b * v_b + kv_head.to(tl.int64) * v_h
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    for n in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        positions = n + tl.arange(0, BLOCK_N)
        slots = (positions - offset).to(tl.int64)[:, None]
        inside = (positions < end)[:, None] & (dims < D)[None, :]
        v = tl.load(v_ptr + slots * v_s + dims[None, :], mask=inside, other=0.0)
        if dtype == tl.float32:
            s = _in_parts(q_ptr, k_ptr + slots * k_s, members < GROUP, positions < end, BLOCK_G, BLOCK_N, D)
        else:
            k = tl.load(k_ptr + slots * k_s + dims[None, :], mask=inside, other=0.0)
            s = tl.dot(q, tl.trans(k))
        if CAP is not None:
            s, _ = _capped(s, SCALE, CAP, dtype)
        s = tl.where((positions < end)[None, :], s, float("-inf"))
        # Less the maximum, then times the factor: see flash_attention.
        higher = tl.maximum(highest, tl.max(s, 1))
        p = tl.exp2((s - higher[:, None]) * FACTOR)
        shrink = tl.exp2((highest - higher) * FACTOR)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(dtype), v, input_precision="ieee")
        highest = higher
    if SPLITS > 1:
        slot = (b * HQ + heads) * tl.num_programs(1) + split
        tl.store(lse_ptr + slot, highest * FACTOR + tl.log2(total), mask=members < GROUP)
        tl.store(out_ptr + slot[:, None] * D + dims[None, :], acc / total[:, None], mask=of_group)
    else:
        total = tl.where(total == 0.0, 1.0, total)  # a row without keys
        slot = b * HQ + heads
        tl.store(out_ptr + slot[:, None] * D + dims[None, :], (acc / total[:, None]).to(dtype), mask=of_group)


@triton.jit(do_not_specialize=["window", "parts"])
def _combine_kernel(
    o_ptr, part_ptr, lse_ptr, starts_ptr, ends_ptr, window, parts,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, HQ: tl.constexpr, D: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One query head's output from those of its shares, `parts` of which have room in memory."""
    wait_for_previous(OVERLAP)
    pid = tl.program_id(0).to(tl.int64)
    first, end, share = _shares(starts_ptr, ends_ptr, pid // HQ, window, WINDOW, SPLITS, BLOCK_N)
    used = tl.cdiv(end - first, share)
    every, dims = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    all_lse = tl.load(lse_ptr + pid * parts + every, mask=every < used, other=float("-inf"))
    highest = tl.max(all_lse, 0)
    total = tl.sum(tl.where(every < used, tl.exp2(all_lse - highest), 0.0), 0)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for s in range(0, used, CHUNK):
        some = s + tl.arange(0, CHUNK)
        lse = tl.load(lse_ptr + pid * parts + some, mask=some < used, other=float("-inf"))
        inside = (some < used)[:, None] & (dims < D)[None, :]
        part = tl.load(part_ptr + (pid * parts + some)[:, None] * D + dims[None, :], mask=inside, other=0.0)
        acc += tl.sum(part * tl.exp2(lse - highest)[:, None], 0)
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(o_ptr + pid * D + dims, (acc / total).to(o_ptr.dtype.element_ty), mask=dims < D)


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, ends: Tensor, offset: Tensor | None = None, *,
    window: int | None = None, softcap: float | None = None, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Each row's mean of the values it sees, weighted by softmax(scale * q k^T): [B, 1, HQ, D].

    q: [B, 1, HQ, D]. keys, values: [B, C, HK, D] of q's dtype; position p of a row is at p - offset. Query head h
    reads key head h // (HQ / HK). starts, ends: int32 [B], a row's first position and the one past its last, within the
    buffers; their values are not checked, and a row without a position becomes 0. offset: int32, 0-dim; None is 0.
    window: tokens that are seen, the last ones. softcap: scores become softcap * tanh(scores / softcap). scale: default
    D ** -0.5. There is no gradient.
    Raises InputError if shapes, dtypes or devices do not fit together.
    """
    of_q, of_k = q.shape, keys.shape
    if (
        len(of_q) != 4 or len(of_k) != 4 or of_k != values.shape or of_q[1] != 1 or of_q[0] != of_k[0]
        or of_q[3] != of_k[3] or of_q[2] % of_k[2] or not q.dtype == keys.dtype == values.dtype
        or not q.device == keys.device == values.device == starts.device == ends.device
        or not starts.shape == ends.shape == of_q[:1] or not starts.dtype == ends.dtype == torch.int32
    ):  # fmt: skip
        raise InputError(
            f"decode_attention: q has {describe(q)}, keys {describe(keys)}, values {describe(values)}, starts "
            f"{describe(starts)}, ends {describe(ends)}; expected q [B, 1, HQ, D] and keys, values [B, C, HK, D] of "
            "one dtype, int32 [B] twice, all on one device"
        )
    rows, _, num_heads, size = of_q
    capacity, num_kv_heads = of_k[1:3]
    if not use_triton(q) or q.dtype == torch.float64 or size > 256:
        return decode_attention_reference(
            q, keys, values, starts, ends, offset, window=window, softcap=softcap, scale=scale
        )
    q, keys, values = last_dim_contiguous(q), last_dim_contiguous(keys), last_dim_contiguous(values)
    block_d = max(16, next_power_of_2(size))
    block_n = max(16, min(128, 16384 // (block_d * q.element_size())))  # 16 KiB a tile
    splits = min(_MOST_SPLITS, cdiv(2 * num_sms(q.device.index), rows * num_kv_heads))
    parts = min(splits, cdiv(capacity, block_n))  # no more than that have a key
    out = torch.empty(of_q, dtype=q.dtype, device=q.device)
    overlap = overlaps_launches(q)
    shares, lse = out, out
    if splits > 1:
        shares = torch.empty(rows, num_heads, parts, size, dtype=torch.float32, device=q.device)
        lse = torch.empty(rows, num_heads, parts, dtype=torch.float32, device=q.device)
    launch(
        _split_kernel, (rows * num_kv_heads, parts if splits > 1 else 1),
        shares, lse, q, keys, values, starts, ends, ends if offset is None else offset, window or 0,
        q.stride(0), q.stride(2), *(x.stride(i) for x in (keys, values) for i in range(3)),
        size**-0.5 if scale is None else scale, softcap, window is not None, offset is not None, splits,
        num_heads, num_kv_heads, size, max(16, next_power_of_2(num_heads // num_kv_heads)), block_d, block_n,
        3, overlap, num_warps=4, **overlapping(overlap),
    )  # fmt: skip
    if splits > 1:
        launch(
            _combine_kernel, (rows * num_heads,),
            out, shares, lse, starts, ends, window or 0, parts,
            window is not None, splits, num_heads, size, next_power_of_2(splits), block_d, block_n, _CHUNK,
            overlap, num_warps=4, **overlapping(overlap),
        )  # fmt: skip
    return out
