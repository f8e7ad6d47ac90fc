"""Shared by the flash attention kernels: tile sizes, masks, tiles of heads, the softcap.

Masks: a token attends to an interval of tokens, except those that a mask of keys, uint8 [B, K], hides.

Tiles: a head's dims are a pair of tiles, [ROWS, MAIN] and [ROWS, REST], because tensor cores take powers of two: a head
of 80 dims is 64 and 16. With REST == 0 the second tile is a placeholder that nothing reads.
"""

import torch
from torch import Tensor

from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import cdiv, next_power_of_2, tl, triton

LOG2E = tl.constexpr(1.4426950408889634)

# ---- Tile sizes ----


def tile_sizes(kernel: str, size: int, itemsize: int, short: bool, tma: bool) -> tuple[int, int, int, int]:
    """(BLOCK_M, BLOCK_N, warps, stages) of a kernel. short: windows or packed sequences, of short intervals."""
    table = _EXACT if itemsize > 2 else _HOPPER if tma else _PORTABLE
    row = table[next(largest for largest in table if size <= largest)]
    return row.get(kernel + " short", row[kernel]) if short else row[kernel]


# By the largest head. The fastest measured on an H200; "short" where another is faster for short intervals.
_HOPPER = {
    64: {"forward": (64, 128, 4, 2), "dq": (64, 64, 4, 3), "dkdv": (64, 64, 4, 3)},
    80: {"forward": (128, 64, 4, 3), "dq": (64, 64, 4, 2), "dkdv": (64, 64, 4, 3)},
    96: {"forward": (128, 64, 8, 3), "forward short": (64, 64, 4, 3), "dq": (64, 64, 4, 2), "dkdv": (64, 64, 4, 2)},
    128: {"forward": (64, 64, 4, 3), "dq": (128, 64, 8, 3), "dq short": (64, 64, 4, 2), "dkdv": (64, 64, 4, 2)},
    256: {
        "forward": (128, 64, 8, 2),
        "dq": (64, 32, 4, 3),
        "dq short": (64, 64, 4, 2),
        "dk": (64, 64, 4, 2),
        "dv": (64, 64, 4, 3),
    },
}
# Not timed: fits the registers without spills, and 100 KiB of shared memory.
_PORTABLE = {
    64: {"forward": (128, 64, 4, 2), "dq": (64, 64, 4, 2), "dkdv": (64, 64, 4, 2)},
    128: {"forward": (128, 32, 4, 2), "dq": (64, 32, 4, 2), "dkdv": (32, 64, 4, 2)},
    256: {"forward": (64, 32, 4, 2), "dq": (32, 32, 4, 2), "dk": (32, 32, 4, 2), "dv": (32, 32, 4, 2)},
}
# fp32, which tensor cores multiply in three passes (tf32x3); and fp64, interpreted.
_EXACT = {
    64: {"forward": (64, 32, 4, 1), "dq": (64, 32, 4, 1), "dkdv": (32, 64, 4, 1)},
    128: {"forward": (64, 32, 4, 1), "dq": (64, 32, 4, 1), "dkdv": (32, 64, 4, 1)},
    256: {"forward": (64, 16, 8, 1), "dq": (32, 16, 4, 1), "dk": (16, 32, 4, 1), "dv": (16, 32, 4, 1)},
}


def head_parts(size: int) -> tuple[int, int]:
    """(MAIN, REST) of a head: one tile of a power of two, or two where one would be mostly padding."""
    whole = max(16, next_power_of_2(size))
    rest = max(16, next_power_of_2(max(1, size - whole // 2)))
    return (whole // 2, rest) if whole > 64 and rest < whole // 2 else (whole, 0)


# ---- Masks ----


@triton.jit
def keys_of(query, S, K, window, ends_ptr, CAUSAL: tl.constexpr):
    """[lo, hi), the keys of K that a query of S may attend to. window, ends_ptr: None for none."""
    lo = query * 0
    hi = lo + K
    if ends_ptr is not None:
        lo = tl.load(ends_ptr + 2 * query)
        hi = tl.load(ends_ptr + 2 * query + 1)
    if window is not None:
        lo = tl.maximum(lo, query + K - S - window + 1)
    if CAUSAL:
        hi = tl.minimum(hi, query + K - S + 1)
    return lo, hi


@triton.jit
def queries_of(key, S, K, window, ends_ptr, CAUSAL: tl.constexpr):
    """[lo, hi), the queries that may attend to a key; see `keys_of`."""
    lo = key * 0
    hi = lo + S
    if ends_ptr is not None:
        lo = tl.load(ends_ptr + 2 * key)
        hi = tl.load(ends_ptr + 2 * key + 1)
    if CAUSAL:
        lo = tl.maximum(lo, key + S - K)
    if window is not None:
        hi = tl.minimum(hi, key + S - K + window)
    return lo, hi


@triton.jit(do_not_specialize=["T", "N"])
def _ends_kernel(ends_ptr, cu_ptr, T, N, BLOCK: tl.constexpr):
    """The start and the end of each token's sequence, of N packed sequences, by bisection."""
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tokens * 0
    high = low + N - 1
    width = N
    while width > 1:
        middle = (low + high + 1) // 2
        begun = tl.load(cu_ptr + middle) <= tokens
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle - 1)
        width = (width + 1) // 2
    tl.store(ends_ptr + 2 * tokens, tl.load(cu_ptr + low), mask=tokens < T)
    tl.store(ends_ptr + 2 * tokens + 1, tl.load(cu_ptr + low + 1), mask=tokens < T)


@triton.jit(do_not_specialize=["K"])
def _counts_kernel(counts_ptr, mask_ptr, K, BLOCK: tl.constexpr):
    """Counts [B, K + 3] of a mask [B, K]: the first visible key, one past the last, and for every key, and for the end,
    the number of hidden keys before it."""
    b = tl.program_id(0).to(tl.int64)
    counts_ptr += b * (K + 3)
    first = K + 0
    last = first * 0
    hidden = first * 0
    for start in range(0, K, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        seen = tl.load(mask_ptr + b * K + tokens, mask=tokens < K, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(seen, tokens, K), 0))
        last = tl.maximum(last, tl.max(tl.where(seen, tokens + 1, 0), 0))
        unseen = tl.where(seen, 0, 1)
        tl.store(counts_ptr + 2 + tokens, hidden + tl.cumsum(unseen, 0) - unseen, mask=tokens < K)
        hidden += tl.sum(tl.where(tokens < K, unseen, 0), 0)
    tl.store(counts_ptr, first)
    tl.store(counts_ptr + 1, last)
    tl.store(counts_ptr + 2 + K, hidden)


@triton.jit
def num_hidden(counts_ptr, start, end, K):
    """Number of hidden keys among start .. end of K; counts_ptr: of _counts_kernel, or None without a mask."""
    if counts_ptr is None:
        return 0
    else:
        return tl.load(counts_ptr + 2 + tl.minimum(end, K)) - tl.load(counts_ptr + 2 + tl.minimum(start, K))


def hidden_counts(mask: Tensor) -> Tensor:
    """int32 [B, K + 3], see _counts_kernel."""
    rows, num_keys = mask.shape
    counts = torch.empty(rows, num_keys + 3, dtype=torch.int32, device=mask.device)
    launch(_counts_kernel, (rows,), counts, mask, num_keys, 1024)
    return counts


def sequence_ends(cu_seqlens: Tensor, length: int) -> Tensor:
    """int32 [T, 2]: where the sequence of each token starts and ends."""
    ends = torch.empty(length, 2, dtype=torch.int32, device=cu_seqlens.device)
    cu_seqlens = cu_seqlens.contiguous()
    launch(_ends_kernel, (cdiv(length, 256),), ends, cu_seqlens, length, cu_seqlens.shape[0] - 1, 256)
    return ends


@triton.jit
def query_block(m, counts_ptr, ends_ptr, S, K, window, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr):
    """For queries m .. m + BLOCK_M: lo and hi of each; begin .. end, the keys that any of them may see, and
    full_begin .. full_end, those that are in every interval. counts_ptr: of their row of the batch."""
    rows = m + tl.arange(0, BLOCK_M)
    lo, hi = keys_of(tl.minimum(rows, S - 1), S, K, window, ends_ptr, CAUSAL)
    begin, full_end = keys_of(m, S, K, window, ends_ptr, CAUSAL)
    full_begin, end = keys_of(tl.minimum(m + BLOCK_M, S) - 1, S, K, window, ends_ptr, CAUSAL)
    if counts_ptr is not None:
        begin = tl.maximum(begin, tl.load(counts_ptr))
        end = tl.minimum(end, tl.load(counts_ptr + 1))
    return lo, hi, begin, end, full_begin, full_end


@triton.jit
def visible_keys(n, b, lo, hi, mask_ptr, K, BLOCK_N: tl.constexpr):
    """Which of the keys n .. n + BLOCK_N the queries of a block attend to, [BLOCK_M, BLOCK_N]."""
    cols = n + tl.arange(0, BLOCK_N)
    visible = (cols[None, :] >= lo[:, None]) & (cols[None, :] < hi[:, None])
    if mask_ptr is not None:
        seen = tl.load(mask_ptr + b.to(tl.int64) * K + cols, mask=cols < K, other=0) != 0
        visible = visible & seen[None, :]
    return visible


# ---- Tiles of heads ----


@triton.jit
def _part(
    source, b, head, start, limit, stride_b, stride_s, stride_h,
    ROWS: tl.constexpr, D: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Tokens start .. start + ROWS of a head, dims FIRST .. FIRST + WIDTH; zero past `limit` and past D."""
    if TMA:
        return source.load([b, start, head, FIRST]).reshape(ROWS, WIDTH)
    else:
        rows = tl.arange(0, ROWS)
        cols = FIRST + tl.arange(0, WIDTH)
        base = source + b.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + tl.cast(start, tl.int64) * stride_s
        mask = (rows < limit - start)[:, None]
        if D < FIRST + WIDTH:
            mask = mask & (cols < D)[None, :]
        return tl.load(base + rows.to(tl.int64)[:, None] * stride_s + cols[None, :], mask=mask, other=0.0)


@triton.jit
def tile(
    source, rest_source, b, head, start, limit, stride_b, stride_s, stride_h,
    ROWS: tl.constexpr, D: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The pair of tiles of tokens start .. start + ROWS of a head."""
    main = _part(source, b, head, start, limit, stride_b, stride_s, stride_h, ROWS, D, 0, MAIN, TMA)
    rest = main
    if REST:
        rest = _part(rest_source, b, head, start, limit, stride_b, stride_s, stride_h, ROWS, D, MAIN, REST, TMA)
    return main, rest


@triton.jit
def row_length(limit):
    """How far apart the rows of statistics [B, H, limit] are: multiples of 16 bytes."""
    return (limit + 3) // 4 * 4


@triton.jit
def numbers(source, b, head, start, limit, H: tl.constexpr, ROWS: tl.constexpr, TMA: tl.constexpr):
    """Elements start .. start + ROWS of a row of statistics [B, H, limit]; zero past `limit`."""
    if TMA:
        return source.load([b, head, start]).reshape(ROWS)
    else:
        rows = start + tl.arange(0, ROWS)
        return tl.load(source + (b.to(tl.int64) * H + head) * row_length(limit) + rows, mask=rows < limit, other=0.0)


@triton.jit
def inner(a, b, REST: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr):
    """a b^T over the dims of a head; a, b: pairs of tiles."""
    scores = tl.dot(a[0], b[0].T, input_precision=PRECISION, out_dtype=ACC)
    if REST:
        scores = tl.dot(a[1], b[1].T, scores, input_precision=PRECISION, out_dtype=ACC)
    return scores


@triton.jit
def zeros(ROWS: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, ACC: tl.constexpr):
    main = tl.zeros([ROWS, MAIN], ACC)
    rest = main
    if REST:
        rest = tl.zeros([ROWS, REST], ACC)
    return main, rest


@triton.jit
def times(total, factor, REST: tl.constexpr):
    main = total[0] * factor
    rest = total[1]
    if REST:
        rest = rest * factor
    return main, rest


@triton.jit
def outer(weights, b, total, REST: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr):
    """total + weights b; b, total: pairs of tiles."""
    main = tl.dot(weights, b[0], total[0], input_precision=PRECISION, out_dtype=ACC)
    rest = total[1]
    if REST:
        rest = tl.dot(weights, b[1], total[1], input_precision=PRECISION, out_dtype=ACC)
    return main, rest


@triton.jit
def add_row(total, at, where, FIRST: tl.constexpr, D: tl.constexpr):
    """total, plus the row at `at`, dims from FIRST on, in the rows `where`."""
    cols = FIRST + tl.arange(0, total.shape[1])[None, :]
    return total + tl.load(at + cols, mask=where[:, None] & (cols < D), other=0.0).to(total.dtype)


@triton.jit
def store(target, tile, b, head, start, limit, H: tl.constexpr, D: tl.constexpr, REST: tl.constexpr):
    """Writes a pair of tiles into a contiguous [B, limit, H, D]."""
    _store_part(target, tile[0], b, head, start, limit, H, D, 0)
    if REST:
        _store_part(target, tile[1], b, head, start, limit, H, D, tile[0].shape[1])


@triton.jit
def _store_part(target, tile, b, head, start, limit, H: tl.constexpr, D: tl.constexpr, FIRST: tl.constexpr):
    rows = start + tl.arange(0, tile.shape[0])
    cols = FIRST + tl.arange(0, tile.shape[1])
    at = ((b.to(tl.int64) * limit + rows)[:, None] * H + head) * D + cols[None, :]
    tl.store(target + at, tile.to(target.dtype.element_ty), mask=(rows < limit)[:, None] & (cols < D)[None, :])


# ---- Softcap ----


@triton.jit
def capped(s, SCALE: tl.constexpr, CAP: tl.constexpr, dtype: tl.constexpr):
    """CAP * tanh(SCALE * s / CAP), times log2(e), and tanh's derivative there."""
    if dtype == tl.float32:
        # Right to fp32 near 0 as well: an odd polynomial there.
        x = s * (SCALE / CAP)
        z = x * x
        small = -0.0537395254 + z * (0.0206384379 + z * -0.0057042302)
        small = x + x * z * (-0.3333328068 + z * (0.1333144009 + z * small))
        e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
        large = (1.0 - e) / (1.0 + e)
        t = tl.where(z < 0.390625, small, tl.where(x < 0, -large, large))
        return t * (CAP * LOG2E), 1.0 - t * t
    elif dtype == tl.float64:
        e = tl.exp2(tl.abs(s) * (-2 * SCALE / CAP * LOG2E))
        t = (1.0 - e) / (1.0 + e)
        t = tl.where(s < 0, -t, t)
        return t * (CAP * LOG2E), 1.0 - t * t
    else:
        # tanh(x) = 1 - 2 r with r = 1 / (1 + exp(2 x)), off by 2e-7 at most: far below the rounding of s itself.
        root = tl.rsqrt(1.0 + tl.exp2(s * (2 * SCALE / CAP * LOG2E)))
        r = root * root
        return r * (-2 * CAP * LOG2E) + CAP * LOG2E, 4.0 * (r - r * r)
