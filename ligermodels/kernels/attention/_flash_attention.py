"""Flash attention in Triton: softcaps, windows, packed sequences, cached prompts and masks of keys, forward and
backward.

    o = softmax(mask(softcap(scale * q k^T))) v

What differs from a plain flash attention:
- Each token attends to one interval of tokens, lo <= j < hi, less what a mask of keys hides. Causality,
  windows and packed sequences only set lo and hi, both of which rise with the token. So the loop of a block runs from
  the lo of its first token to the hi of its last one, and compares a tile with lo and hi only where they cross it.
- A mask costs nothing in tiles where it hides nothing: counts of hidden tokens, made once, say which tiles have any.
- A head of 80 or 96 dims is a tile of 64 and one of 16 or 32, not one of 128 padded with zeros.
- A softcapped score is bounded. Where exp of the bound does not overflow, there is no running maximum and no rescaling.
- Gradients are summed in a fixed order, without atomics: one kernel computes dq, another dk and dv over all query heads
  of a key head (two kernels for heads above 128, whose dk and dv do not both fit the registers). Each kernel recomputes
  the scores: the backward has 7 matmuls of tiles (8 for such heads) instead of 5.
- A sink is a score that each row of a head has, without a key and a value: the running maximum and sum begin with it.
  Then it is in the lse, so that the backward computes the same weights; its gradient is a sum over rows of the
  numbers dq has made.
- Loops load their tiles by TMA, the bulk copy engine of Hopper and later.

Saved for the backward: q, k, v, o and one fp32 number per row and head. Bytes: those read and written once, up to
re-reading k and v (q and do) from the L2 cache; no scores.

Source: Dao 2023, "FlashAttention-2", https://arxiv.org/abs/2307.08691.
"""

import operator
from typing import Any

import torch
from torch import Tensor

from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import (
    HAS_TRITON,
    cdiv,
    is_datacenter,
    last_dim_contiguous,
    once_differentiable,
    tl,
    triton,
)
from ligermodels.kernels.attention._flash_kernels import (
    LOG2E,
    add_row,
    capped,
    head_parts,
    hidden_counts,
    inner,
    num_hidden,
    numbers,
    outer,
    queries_of,
    query_block,
    row_length,
    sequence_ends,
    store,
    tile,
    tile_sizes,
    times,
    visible_keys,
    zeros,
)
from ligermodels.kernels.attention.decode_attention import decode_attention

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit(do_not_specialize=["S", "K", "window"])
def _forward_kernel(
    o_ptr, lse_ptr, q_ptr, k_src, k_rest, v_src, v_rest, v_ptr, sinks_ptr, mask_ptr, counts_ptr, ends_ptr,
    S, K, window,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h,
    SCALE: tl.constexpr, CAP: tl.constexpr, RUNNING_MAX: tl.constexpr, CAUSAL: tl.constexpr,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr,
    MAIN: tl.constexpr, REST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_M queries of one head. sinks_ptr; mask_ptr, counts_ptr; ends_ptr; window: None without sinks, a mask,
    packing, a window."""
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    GROUP: tl.constexpr = HQ // HK
    blocks = tl.cdiv(S, BLOCK_M)
    pid = tl.program_id(0)
    # Programs of one key head's query heads follow each other, then those of the next block, longest causal rows first.
    m = (blocks - 1 - pid // GROUP % blocks) * BLOCK_M
    b = pid // (GROUP * blocks) // HK
    kv_head = pid // (GROUP * blocks) % HK
    head = kv_head * GROUP + pid % GROUP
    rows = m + tl.arange(0, BLOCK_M)
    if counts_ptr is not None:
        counts_ptr += b.to(tl.int64) * (K + 3)
    lo, hi, begin, end, full_begin, full_end = query_block(m, counts_ptr, ends_ptr, S, K, window, BLOCK_M, CAUSAL)
    q = tile(q_ptr, q_ptr, b, head, m, S, q_b, q_s, q_h, BLOCK_M, D, MAIN, REST, False)
    acc = zeros(BLOCK_M, MAIN, REST, ACC)
    total = tl.zeros([BLOCK_M], ACC)
    rounded = tl.zeros([BLOCK_M], ACC)
    highest = tl.full([BLOCK_M], float("-inf"), ACC)
    FACTOR: tl.constexpr = 1.0 if CAP is not None else SCALE * LOG2E
    if sinks_ptr is not None:  # a score without a value, which every row has seen before its keys
        highest = tl.zeros([BLOCK_M], ACC) + tl.load(sinks_ptr + head).to(ACC) * (LOG2E / FACTOR)
        total += 1.0
    for n in tl.range(begin, end, BLOCK_N):
        k = tile(k_src, k_rest, b, kv_head, n, K, k_b, k_s, k_h, BLOCK_N, D, MAIN, REST, TMA)
        s = inner(q, k, REST, PRECISION, ACC)
        if CAP is not None:
            s, _ = capped(s, SCALE, CAP, dtype)
        if (n < full_begin) | (n + BLOCK_N > full_end) | (num_hidden(counts_ptr, n, n + BLOCK_N, K) > 0):
            visible = visible_keys(n, b, lo, hi, mask_ptr, K, BLOCK_N)
            s = tl.where(visible, s, float("-inf"))
        if RUNNING_MAX:
            # Subtract the maximum, then multiply. The other order is one fused instruction, which rounds differently
            # from the product in the maximum, so that for scores of 1e4 the largest weight would not be 1.
            higher = tl.maximum(highest, tl.max(s, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp2((s - base[:, None]) * FACTOR)
            shrink = tl.exp2((highest - base) * FACTOR)
            total = total * shrink + tl.sum(p, 1)
            acc = times(acc, shrink[:, None], REST)
            highest = higher
        else:
            # Without a maximum even the weight of a single key is rounded, so the divisor has to be rounded too.
            p = tl.exp2(s * FACTOR)
            total += tl.sum(p, 1)
            rounded += tl.sum(p.to(dtype).to(ACC), 1)
        v = tile(v_src, v_rest, b, kv_head, n, K, v_b, v_s, v_h, BLOCK_N, D, MAIN, REST, TMA)
        acc = outer(p.to(dtype), v, acc, REST, PRECISION, ACC)
    empty = total == 0.0
    if mask_ptr is not None:
        total = tl.where(empty, 1.0, total)
    lse = tl.log2(total.to(lse_ptr.dtype.element_ty))
    if RUNNING_MAX:
        lse += highest.to(lse.dtype) * FACTOR
    else:
        total = tl.where(empty, 1.0, rounded)
    if mask_ptr is not None:
        # A row without a visible key attends to itself; an infinite lse marks it for the backward. With a sink no row
        # is empty.
        self_key = tl.minimum(tl.maximum(rows + K - S, 0), K - 1).to(tl.int64)[:, None]
        at = v_ptr + b.to(tl.int64) * v_b + kv_head.to(tl.int64) * v_h + self_key * v_s
        acc = add_row(acc[0], at, empty, 0, D), acc[1]
        if REST:
            acc = acc[0], add_row(acc[1], at, empty, MAIN, D)
        lse = tl.where(empty, float("inf"), lse)
    tl.store(lse_ptr + (b.to(tl.int64) * HQ + head) * row_length(S) + rows, lse, mask=rows < S)
    store(o_ptr, (acc[0] / total[:, None], acc[1] / total[:, None]), b, head, m, S, HQ, D, REST)


@triton.jit(do_not_specialize=["S"])
def _dsinks_kernel(parts_ptr, sinks_ptr, lse_ptr, delta_ptr, S, HQ: tl.constexpr, BLOCK: tl.constexpr):
    """A part of the gradient of a sink: the sum of -p * delta over BLOCK rows of a head, p being the sink's weight."""
    STATISTIC: tl.constexpr = lse_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row * row_length(S) + rows
    lse = tl.load(lse_ptr + at, mask=rows < S, other=float("inf"))
    delta = tl.load(delta_ptr + at, mask=rows < S, other=0.0)
    p = tl.exp2(tl.load(sinks_ptr + row % HQ).to(STATISTIC) * LOG2E - lse)
    tl.store(parts_ptr + row * tl.num_programs(1) + tl.program_id(1), -tl.sum(p * delta, 0))


@triton.jit
def _weights(s, lse, SCALE: tl.constexpr, CAP: tl.constexpr, dtype: tl.constexpr):
    """(softmax weights, recomputed from the scores; derivative of the softcap)."""
    if CAP is not None:
        score, slope = capped(s, SCALE, CAP, dtype)
        return tl.exp2((score - lse).to(s.dtype)), slope
    else:
        return tl.exp2((s * (SCALE * LOG2E) - lse).to(s.dtype)), 1.0


@triton.jit(do_not_specialize=["S", "K", "window"])
def _dq_kernel(
    dq_ptr, delta_ptr, q_ptr, k_src, k_rest, v_src, v_rest, o_ptr, do_ptr, lse_ptr,
    mask_ptr, counts_ptr, ends_ptr, S, K, window,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, do_b, do_s, do_h,
    SCALE: tl.constexpr, CAP: tl.constexpr, CAUSAL: tl.constexpr,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr,
    MAIN: tl.constexpr, REST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(do * o), and unless dq_ptr is None dq, of BLOCK_M queries of one head."""
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    GROUP: tl.constexpr = HQ // HK
    blocks = tl.cdiv(S, BLOCK_M)
    pid = tl.program_id(0)
    m = (blocks - 1 - pid // GROUP % blocks) * BLOCK_M
    b = pid // (GROUP * blocks) // HK
    kv_head = pid // (GROUP * blocks) % HK
    head = kv_head * GROUP + pid % GROUP
    rows = m + tl.arange(0, BLOCK_M)
    at = (b.to(tl.int64) * HQ + head) * row_length(S) + rows
    o = tile(o_ptr, o_ptr, b, head, m, S, tl.cast(S, tl.int64) * (HQ * D), HQ * D, D, BLOCK_M, D, MAIN, REST, False)
    do = tile(do_ptr, do_ptr, b, head, m, S, do_b, do_s, do_h, BLOCK_M, D, MAIN, REST, False)
    STATISTIC: tl.constexpr = delta_ptr.dtype.element_ty
    delta = tl.sum(o[0].to(STATISTIC) * do[0].to(STATISTIC), 1)
    if REST:
        delta += tl.sum(o[1].to(STATISTIC) * do[1].to(STATISTIC), 1)
    tl.store(delta_ptr + at, delta, mask=rows < S)
    if dq_ptr is not None:
        if counts_ptr is not None:
            counts_ptr += b.to(tl.int64) * (K + 3)
        lo, hi, begin, end, full_begin, full_end = query_block(m, counts_ptr, ends_ptr, S, K, window, BLOCK_M, CAUSAL)
        lse = tl.load(lse_ptr + at, mask=rows < S, other=0.0)
        q = tile(q_ptr, q_ptr, b, head, m, S, q_b, q_s, q_h, BLOCK_M, D, MAIN, REST, False)
        dq = zeros(BLOCK_M, MAIN, REST, ACC)
        for n in tl.range(begin, end, BLOCK_N):
            k = tile(k_src, k_rest, b, kv_head, n, K, k_b, k_s, k_h, BLOCK_N, D, MAIN, REST, TMA)
            v = tile(v_src, v_rest, b, kv_head, n, K, v_b, v_s, v_h, BLOCK_N, D, MAIN, REST, TMA)
            s = inner(q, k, REST, PRECISION, ACC)
            dp = inner(do, v, REST, PRECISION, ACC)
            p, slope = _weights(s, lse[:, None], SCALE, CAP, dtype)
            if (n < full_begin) | (n + BLOCK_N > full_end) | (num_hidden(counts_ptr, n, n + BLOCK_N, K) > 0):
                visible = visible_keys(n, b, lo, hi, mask_ptr, K, BLOCK_N)
                p = tl.where(visible, p, 0.0)
            ds = p * (dp - delta[:, None]).to(ACC)
            if CAP is not None:
                ds = ds * slope
            dq = outer(ds.to(dtype), k, dq, REST, PRECISION, ACC)
        store(dq_ptr, times(dq, SCALE, REST), b, head, m, S, HQ, D, REST)


@triton.jit(do_not_specialize=["S", "K", "window"])
def _dkdv_kernel(
    dk_ptr, dv_ptr, q_src, q_rest, k_ptr, v_ptr, do_src, do_rest, lse_src, delta_src,
    mask_ptr, counts_ptr, ends_ptr, S, K, window,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, do_b, do_s, do_h,
    SCALE: tl.constexpr, CAP: tl.constexpr, CAUSAL: tl.constexpr,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr,
    MAIN: tl.constexpr, REST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys of one key head, over all the query heads that share it; tiles are transposed.

    dk_ptr, dv_ptr: None for a gradient that is not asked for.
    """
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    GROUP: tl.constexpr = HQ // HK
    blocks = tl.cdiv(K, BLOCK_N)
    pid = tl.program_id(0)
    n = pid % blocks * BLOCK_N
    kv_head = pid // blocks % HK
    b = pid // blocks // HK
    keys = n + tl.arange(0, BLOCK_N)
    lo, hi = queries_of(tl.minimum(keys, K - 1), S, K, window, ends_ptr, CAUSAL)
    begin, full_end = queries_of(n, S, K, window, ends_ptr, CAUSAL)
    full_begin, end = queries_of(tl.minimum(n + BLOCK_N, K) - 1, S, K, window, ends_ptr, CAUSAL)
    k = tile(k_ptr, k_ptr, b, kv_head, n, K, k_b, k_s, k_h, BLOCK_N, D, MAIN, REST, False)
    v = tile(v_ptr, v_ptr, b, kv_head, n, K, v_b, v_s, v_h, BLOCK_N, D, MAIN, REST, False)
    hidden = 0
    if mask_ptr is not None:
        seen = tl.load(mask_ptr + b.to(tl.int64) * K + keys, mask=keys < K, other=0) != 0
        hidden = num_hidden(counts_ptr + b.to(tl.int64) * (K + 3), n, n + BLOCK_N, K)
        if hidden == tl.minimum(BLOCK_N, K - n):  # visible only to queries that see nothing else
            end = tl.minimum(end, n + BLOCK_N + S - K)
            if n > 0:
                begin = tl.maximum(begin, n + S - K)
    dk = zeros(BLOCK_N, MAIN, REST, ACC)
    dv = zeros(BLOCK_N, MAIN, REST, ACC)
    begin = begin // 4 * 4  # TMA loads start at multiples of 16 bytes
    steps = tl.maximum(tl.cdiv(end - begin, BLOCK_M), 0)
    for step in tl.range(0, GROUP * steps):
        head = kv_head * GROUP + step // steps
        m = begin + step % steps * BLOCK_M
        rows = m + tl.arange(0, BLOCK_M)
        q = tile(q_src, q_rest, b, head, m, S, q_b, q_s, q_h, BLOCK_M, D, MAIN, REST, TMA)
        do = tile(do_src, do_rest, b, head, m, S, do_b, do_s, do_h, BLOCK_M, D, MAIN, REST, TMA)
        lse = numbers(lse_src, b, head, m, S, HQ, BLOCK_M, TMA)
        s = inner(k, q, REST, PRECISION, ACC)
        p, slope = _weights(s, lse[None, :], SCALE, CAP, dtype)
        if (m < full_begin) | (m + BLOCK_M > full_end) | (hidden > 0):
            visible = (rows[None, :] >= lo[:, None]) & (rows[None, :] < hi[:, None])
            if mask_ptr is not None:
                visible = visible & seen[:, None]
            p = tl.where(visible, p, 0.0)
        if dv_ptr is not None:
            weights = p
            if mask_ptr is not None:  # rows without a visible key: weight 1 for their own, whatever the scores  # noqa: SIM102
                if (m + K - S < n + BLOCK_N) & (tl.maximum(m + BLOCK_M + K - S, 1) > n):
                    self_key = tl.maximum(rows + K - S, 0)
                    weights = tl.where((keys[:, None] == self_key[None, :]) & (lse == float("inf"))[None, :], 1.0, p)
            dv = outer(weights.to(dtype), do, dv, REST, PRECISION, ACC)
        if dk_ptr is not None:
            delta = numbers(delta_src, b, head, m, S, HQ, BLOCK_M, TMA)
            dp = inner(v, do, REST, PRECISION, ACC)
            ds = p * (dp - delta[None, :]).to(ACC)
            if CAP is not None:
                ds = ds * slope
            dk = outer(ds.to(dtype), q, dk, REST, PRECISION, ACC)
    if dk_ptr is not None:
        store(dk_ptr, times(dk, SCALE, REST), b, kv_head, n, K, HK, D, REST)
    if dv_ptr is not None:
        store(dv_ptr, dv, b, kv_head, n, K, HK, D, REST)


def _precision(q: Tensor) -> str:
    """tl.dot's input_precision: for fp32 on NVIDIA tf32x3, which is nearly as exact as fp32, and faster."""
    nvidia = q.device.type == "cuda" and torch.version.cuda is not None
    return "tf32x3" if nvidia and q.dtype == torch.float32 else "ieee"


_SMALL = 2**33
"""q.numel() * keys below which TMA saves less than the 40 us and more that the host takes to make descriptors."""


def _tma_takes(q: Tensor, num_keys: int, *tensors: Tensor) -> bool:
    """True if TMA can read these tensors and is faster: 2-byte dtypes, rows at multiples of 16 bytes, and enough
    work."""
    if not torch.compiler.is_compiling() and q.numel() * num_keys < _SMALL:
        return False
    for x in tensors:
        if x.element_size() != 2 or x.device.type != "cuda" or not is_datacenter(x.device.index):
            return False
        if any(stride <= 0 or stride % 8 for stride in x.stride()[:3]):
            return False
        if not torch.compiler.is_compiling() and x.data_ptr() % 16:  # Dynamo knows no addresses
            return False
    return True


def _streamed(rows: int, widths: tuple[int, int], tma: bool, *tensors: Tensor) -> tuple[Any, ...]:
    """The sources of a kernel's pairs of tiles, of `rows` tokens, for each of `tensors` [B, S, H, D]."""
    if not tma:
        return tuple(x for x in tensors for _ in widths)
    parts = widths[0], widths[1] or widths[0]
    return tuple(TensorDescriptor.from_tensor(x, [1, rows, 1, width]) for x in tensors for width in parts)


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _statistics(q: Tensor) -> Tensor:
    """Memory for one number per row and head, [B, HQ, S rounded up to 4]: rows start at multiples of 16 bytes.

    fp64 for fp32 inputs: exp(score - lse) has fp32's precision only if lse has more.
    """
    dtype = torch.float64 if q.element_size() > 2 else torch.float32
    return torch.empty(q.shape[0], q.shape[2], (q.shape[1] + 3) // 4 * 4, dtype=dtype, device=q.device)


def _sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor, length: int) -> Tensor:
    """The gradient [HQ] of the sinks, in their dtype."""
    parts = torch.empty(*lse.shape[:2], cdiv(length, _ROWS_OF_SINKS), dtype=lse.dtype, device=lse.device)
    num_heads = operator.index(lse.shape[1])
    grid = (lse.shape[0] * num_heads, parts.shape[2])
    launch(_dsinks_kernel, grid, parts, sinks, lse, delta, length, num_heads, _ROWS_OF_SINKS)
    return parts.sum((0, 2)).to(sinks.dtype)


_ROWS_OF_SINKS = 1024
"""Rows per program of `_dsinks_kernel`."""


class _Flash(torch.autograd.Function):
    """q [B, S, HQ, D], k and v [B, K, HK, D], sinks [HQ] or None -> [B, S, HQ, D]."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, mask, ends, causal, window, softcap, scale):
        q, k, v = (last_dim_contiguous(x) for x in (q, k, v))
        counts = None if mask is None else hidden_counts(mask)
        batch_size, length = q.shape[:2]
        num_heads, size, num_kv_heads = (operator.index(n) for n in (*q.shape[2:], k.shape[2]))
        out, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), _statistics(q)
        widths, tma = head_parts(size), _tma_takes(q, k.shape[1], k, v)
        short = window is not None or ends is not None
        block_m, block_n, warps, stages = tile_sizes("forward", size, q.element_size(), short, tma)
        # exp2 of the bound, summed over many keys, must not overflow; fp16 has too few exponents.
        running_max = softcap is None or softcap > 60 or q.dtype == torch.float16 or sinks is not None
        launch(
            _forward_kernel, (batch_size * num_heads * cdiv(length, block_m),),
            out, lse, q, *_streamed(block_n, widths, tma, k, v), v,
            sinks, mask, counts, ends, length, k.shape[1], window, *_strides(q, k, v),
            scale, softcap, running_max, causal,
            num_heads, num_kv_heads, size, *widths, block_m, block_n, tma, _precision(q),
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, sinks, out, lse, mask, counts, ends)
        ctx.options = causal, window, softcap, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, sinks, out, lse, mask, counts, ends = ctx.saved_tensors
        causal, window, softcap, scale = ctx.options
        need_dq, need_dk, need_dv, need_dsinks = ctx.needs_input_grad[:4]
        do = last_dim_contiguous(do)
        (batch_size, length), num_keys = q.shape[:2], k.shape[1]
        num_heads, size, num_kv_heads = (operator.index(n) for n in (*q.shape[2:], k.shape[2]))
        dq, dk, dv = (
            torch.empty(x.shape, dtype=x.dtype, device=x.device) if need else None
            for x, need in ((q, need_dq), (k, need_dk), (v, need_dv))
        )
        delta = _statistics(q)
        masks = mask, counts, ends, length, num_keys, window, *_strides(q, k, v, do), scale, softcap, causal
        widths, short = head_parts(size), window is not None or ends is not None
        tma = _tma_takes(q, k.shape[1], k, v)
        block_m, block_n, warps, stages = tile_sizes("dq", size, q.element_size(), short, tma)
        launch(
            _dq_kernel, (batch_size * num_heads * cdiv(length, block_m),),
            dq, delta, q, *_streamed(block_n, widths, tma, k, v), out, do, lse, *masks,
            num_heads, num_kv_heads, size, *widths, block_m, block_n, tma, _precision(q),
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        dsinks = _sinks_gradient(sinks, lse, delta, length) if need_dsinks else None
        tma = _tma_takes(q, num_keys, q, do)
        for kernel in ("dkdv",) if size <= 128 else ("dk", "dv"):
            make_dk, make_dv = need_dk and kernel != "dv", need_dv and kernel != "dk"
            if not make_dk and not make_dv:
                continue
            block_m, block_n, warps, stages = tile_sizes(kernel, size, q.element_size(), short, tma)
            statistics: tuple[Any, ...] = lse, delta
            if tma:
                statistics = tuple(TensorDescriptor.from_tensor(x[..., :length], [1, 1, block_m]) for x in statistics)
            streamed = _streamed(block_m, widths, tma, q, do)
            launch(
                _dkdv_kernel, (batch_size * num_kv_heads * cdiv(num_keys, block_n),),
                dk if make_dk else None, dv if make_dv else None, *streamed[:2], k, v, *streamed[2:], *statistics,
                *masks, num_heads, num_kv_heads, size, *widths, block_m, block_n, tma, _precision(q),
                num_warps=warps, num_stages=stages,
            )  # fmt: skip
        return dq, dk, dv, dsinks, None, None, None, None, None, None


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None, softcap: float | None, scale: float,
    key_mask: Tensor | None, cu_seqlens: Tensor | None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`attention` of attention.py, which documents and checks the arguments; D <= 256."""
    trained = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    plain = key_mask is None and not trained and not torch.compiler.is_compiling()  # its kernel has K as a constant
    if q.shape[1] == 1 and plain:
        starts = torch.zeros(len(q), dtype=torch.int32, device=q.device)
        lengths = torch.full_like(starts, k.shape[1])
        return decode_attention(q, k, v, starts, lengths, window=window, softcap=softcap, scale=scale, sinks=sinks)
    ends = None if cu_seqlens is None else sequence_ends(cu_seqlens, q.shape[1])
    mask = None if key_mask is None else key_mask.to(torch.uint8).contiguous()
    sinks = sinks if sinks is None else sinks.contiguous()
    return _Flash.apply(q, k, v, sinks, mask, ends, causal, window, softcap, scale)
