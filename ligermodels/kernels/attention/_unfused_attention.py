"""Attention of wide heads, of 512 dims above all, as plain matrix products with the weights in memory.

    P = softmax(mask(scale * q k^T))      o = P v      dS = P * (do v^T - rowsum(do * o))
    dq = scale * dS k      dk = scale * dS^T q      dv = P^T do

Flash attention keeps P on chip, and for that an accumulator of rows by D, which at 512 dims leaves room for 64 rows:
too few to feed the tensor cores. A score of such a head costs 2,048 FLOP forward and 5,120 backward, and to write and
read P and dS in half precision 4 and 10 bytes: at 500 TFLOP/s 1 TB/s, a quarter of what an H200 moves. So P and dS go
through memory, a chunk at a time, and the rest are products with large tiles, none computed twice in a pass.

- The table of tiles: tiles of queries by keys exist only where a query may see a key. They lie one after the other in
  the workspace, and a program computes one of them, whatever causality, windows and packed sequences leave. The host
  knows at most how many there are, and not where sequences end.
- Chunks: key heads with all queries that read them, as many as the workspace holds; of long texts one key head and some
  tiles of rows. Then dk and dv of keys that rows of two chunks see are added up in fp32, in the order of the chunks.
- Forward: P is relative to the highest score of a row in its tile; what multiplies it by v knows the row's maximum.
- One launch makes dv and dk, the keys that most rows see first. No atomics: the order of all sums is fixed.
- Tiles are read, and P and dS also written, by TMA, the bulk copy engine of Hopper and later.

Saved for the backward: q, k, v, o and one number per row and head. Memory beside that: `WORKSPACE` bytes (in chunks of
rows never less than one tile of rows by all keys, for the query heads of a key head), of the caching allocator, so that
all layers share them.
"""

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import (
    HAS_TRITON,
    accumulator,
    cdiv,
    next_power_of_2,
    once_differentiable,
    tl,
    triton,
)
from ligermodels.kernels.attention._flash_kernels import (
    LOG2E,
    hidden_counts,
    keys_of,
    num_hidden,
    queries_of,
    sequence_ends,
    visible_keys,
)

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor

WORKSPACE = 2**30
"""Bytes of P, and of dS, at a time. More is faster in the backward of long texts, whose dk and dv then have fewer
parts."""
_TILE = {2: 128, 4: 64, 8: 64}
"""Queries, and keys, of a tile of P, by the bytes of an element. 128 is the fastest on an H200."""
# (columns, step of the inner dimension, warps, stages). The fastest on an H200; those of fp32 were not timed.
_HALF = {
    "scores": (0, 64, 4, 3), "weights": (0, 64, 4, 3), "values": (128, 64, 4, 3), "dq": (256, 64, 8, 4),
    "dkdv": (128, 64, 4, 3),
}  # fmt: skip
_EXACT = dict.fromkeys(_HALF, (64, 32, 4, 2))
_ROWS_AT_A_TIME = 8
"""Tiles of rows whose programs run at the same time, and so read a tile of keys from the L2 cache."""

# ---- The table of tiles ----


@triton.jit
def _key_tiles(i, ends_ptr, S, K, window, CAUSAL: tl.constexpr, TILE: tl.constexpr):
    """[first, end), the tiles of keys that the i-th tile of rows attends to."""
    lo, _ = keys_of(i * TILE, S, K, window, ends_ptr, CAUSAL)
    _, hi = keys_of(tl.minimum(i * TILE + TILE, S) - 1, S, K, window, ends_ptr, CAUSAL)
    return lo // TILE, tl.cdiv(hi, TILE)


@triton.jit(do_not_specialize=["S", "K", "window", "size"])
def _table_kernel(
    rows_ptr, tiles_ptr, ends_ptr, S, K, window, size, CAUSAL: tl.constexpr, TILE: tl.constexpr,
    TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """rows [tiles of rows + 1, 2]: how many tiles the tiles of rows before have, and what added to a tile of keys gives
    the place of that tile. tiles [size, 2]: tile of rows and tile of keys, in the order in which programs take them:
    TOGETHER tiles of rows after the other, and of these by keys."""
    i = tl.program_id(0)
    last = tl.cdiv(S, TILE) - 1
    group = i // TOGETHER * TOGETHER
    before, of_group = i * 0, i * 0
    for start in range(0, i, BLOCK):
        others = start + tl.arange(0, BLOCK)
        first, end = _key_tiles(tl.minimum(others, last), ends_ptr, S, K, window, CAUSAL, TILE)
        before += tl.sum(tl.where(others < group, end - first, 0), 0)
        of_group += tl.sum(tl.where((others >= group) & (others < i), end - first, 0), 0)
    tl.store(rows_ptr + 2 * i, before + of_group)
    if i <= last:
        first, end = _key_tiles(i, ends_ptr, S, K, window, CAUSAL, TILE)
        tl.store(rows_ptr + 2 * i + 1, before + of_group - first)
        mates = group + tl.arange(0, TOGETHER)[None, :]
        mates_first, mates_end = _key_tiles(tl.minimum(mates, last), ends_ptr, S, K, window, CAUSAL, TILE)
        mates_end = tl.where(mates <= last, mates_end, mates_first)
        for start in range(first, end, BLOCK):
            j = start + tl.arange(0, BLOCK)
            at = j[:, None]
            earlier = tl.minimum(tl.maximum(at - mates_first, 0), mates_end - mates_first)
            earlier += tl.where((mates < i) & (mates_first <= at) & (at < mates_end), 1, 0)
            place = before + tl.sum(earlier, 1)
            inside = (j < end) & (place < size)
            tl.store(tiles_ptr + 2 * place, j * 0 + i, mask=inside)
            tl.store(tiles_ptr + 2 * place + 1, j, mask=inside)


@triton.jit
def _row(rows_ptr, i, first_row, end_row, tiles):
    """Of a tile of rows: (place of its first tile in the chunk, first tile of keys, how many). None where the chunk has
    more than `tiles` tiles, which happens where a packed sequence is longer than max_seqlen."""
    start = tl.load(rows_ptr + 2 * first_row)
    place = tl.load(rows_ptr + 2 * i)
    first = place - tl.load(rows_ptr + 2 * i + 1)
    count = tl.load(rows_ptr + 2 * i + 2) - place
    fits = tl.load(rows_ptr + 2 * end_row) - start <= tiles
    return tl.where(fits, place - start, 0), first, tl.where(fits, count, 0)


# ---- Kernels ----


@triton.jit
def _product(
    a_tma, b_tma, m, a_col, n, b_col, D: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of a b^T over the dims of a head."""
    total = tl.zeros([TILE, TILE], ACC)
    for c in tl.range(0, D, BLOCK_K):
        x, y = a_tma.load([m, a_col + c]), b_tma.load([n, b_col + c])
        total = tl.dot(x, y.T, total, input_precision=PRECISION, out_dtype=ACC)
    return total


@triton.jit
def _visible(
    m, n, mask_ptr, counts_ptr, ends_ptr, S, K, window, CAUSAL: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Which of a tile's keys its queries attend to; a query without a visible key attends to itself."""
    queries = tl.minimum(m + tl.arange(0, TILE), S - 1)
    lo, hi = keys_of(queries, S, K, window, ends_ptr, CAUSAL)
    visible = visible_keys(n, n * 0, lo, hi, mask_ptr, K, TILE)
    if mask_ptr is not None:
        empty = tl.load(counts_ptr + 2 + hi) - tl.load(counts_ptr + 2 + lo) == hi - lo
        self_key = tl.where(empty, tl.maximum(queries + K - S, 0), -1)
        visible = visible | ((n + tl.arange(0, TILE))[None, :] == self_key[:, None])
    return visible


@triton.jit(do_not_specialize=["S", "K", "window", "first_head", "first_row", "end_row", "tiles"])
def _weights_kernel(
    p_tma, ds_tma, high_ptr, sum_ptr, q_tma, k_tma, do_tma, v_tma, lse_ptr, delta_ptr,
    mask_ptr, counts_ptr, ends_ptr, rows_ptr, tiles_ptr, S, K, window, first_head, first_row, end_row, tiles,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, BACKWARD: tl.constexpr,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of P of one query head. Forward: relative to each row's maximum in the tile, which is stored, as is the
    sum. BACKWARD: P, and dS without the scale."""
    dtype: tl.constexpr = p_tma.dtype
    ACC: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    FACTOR: tl.constexpr = SCALE * LOG2E
    GROUP: tl.constexpr = HQ // HK
    pid = tl.program_id(0)
    start, end = tl.load(rows_ptr + 2 * first_row), tl.load(rows_ptr + 2 * end_row)
    at = start + pid // GROUP % tiles
    if (at < end) & (end - start <= tiles):
        local = pid // (GROUP * tiles) * GROUP + pid % GROUP
        head = first_head * GROUP + local
        i, j = tl.load(tiles_ptr + 2 * at), tl.load(tiles_ptr + 2 * at + 1)
        place = (local * tiles + tl.load(rows_ptr + 2 * i + 1) + j - start) * TILE
        m, n = i * TILE, j * TILE
        rows = m + tl.arange(0, TILE)
        s = _product(q_tma, k_tma, m, head * D, n, head // GROUP * D, D, TILE, BLOCK_K, ACC, PRECISION)
        _, full_end = keys_of(m, S, K, window, ends_ptr, CAUSAL)
        full_begin, _ = keys_of(tl.minimum(m + TILE, S) - 1, S, K, window, ends_ptr, CAUSAL)
        if (n < full_begin) | (n + TILE > full_end) | (num_hidden(counts_ptr, n, n + TILE, K) > 0):
            visible = _visible(m, n, mask_ptr, counts_ptr, ends_ptr, S, K, window, CAUSAL, TILE)
            s = tl.where(visible, s, float("-inf"))
        if BACKWARD:
            statistics = head.to(tl.int64) * S + rows
            lse = tl.load(lse_ptr + statistics, mask=rows < S, other=float("inf"))
            p = tl.exp2((s * FACTOR - lse[:, None]).to(ACC)).to(dtype)
            p_tma.store([place, 0], p)
            dp = _product(do_tma, v_tma, m, head * D, n, head // GROUP * D, D, TILE, BLOCK_K, ACC, PRECISION)
            delta = tl.load(delta_ptr + statistics, mask=rows < S, other=0.0)
            ds = p.to(ACC) * (dp - delta[:, None]).to(ACC)
            ds_tma.store([place, 0], ds.to(dtype))
        else:
            high = tl.maximum(tl.max(s, 1), -1e30)  # finite where a row sees none of these keys
            p = tl.exp2((s - high[:, None]) * FACTOR)  # in this order, see _flash_attention
            tl.store(high_ptr + place + tl.arange(0, TILE), high)
            tl.store(sum_ptr + place + tl.arange(0, TILE), tl.sum(p, 1))
            p_tma.store([place, 0], p.to(dtype))


@triton.jit
def _total(high_ptr, sum_ptr, at, count, FACTOR: tl.constexpr, ACC: tl.constexpr, TILE: tl.constexpr):
    """(highest score of each row, sum of the weights relative to it), from those of its tiles."""
    high, total = tl.full([TILE], -1e30, ACC), tl.zeros([TILE], ACC)
    for t in tl.range(0, count):
        of_tile = tl.load(high_ptr + at + t * TILE)
        higher = tl.maximum(high, of_tile)
        total = total * tl.exp2((high - higher) * FACTOR)
        total += tl.load(sum_ptr + at + t * TILE) * tl.exp2((of_tile - higher) * FACTOR)
        high = higher
    return high, total


@triton.jit(do_not_specialize=["S", "first_head", "first_row", "end_row", "tiles"])
def _values_kernel(
    o_ptr, lse_ptr, p_tma, high_ptr, sum_ptr, v_tma, rows_ptr, S, first_head, first_row, end_row, tiles,
    SCALE: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o = P v, COLUMNS dims of a tile of rows of one query head, and the lse of the rows; the longest rows first.

    acc is relative to the score `unit`: the maximum of the tile of keys added last, but so close to the highest one so
    far that acc is below 2^60 a key. Weights below 2^-60 of the largest may count for up to that.
    """
    ACC: tl.constexpr = tl.float64 if p_tma.dtype == tl.float64 else tl.float32
    FACTOR: tl.constexpr = SCALE * LOG2E
    PARTS: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    pid = tl.program_id(0)
    i = end_row - 1 - pid // PARTS % (end_row - first_row)
    local, col = pid // PARTS // (end_row - first_row), pid % PARTS * COLUMNS
    head = first_head * (HQ // HK) + local
    offset, first, count = _row(rows_ptr, i, first_row, end_row, tiles)
    place = local * tiles + offset
    rows = i * TILE + tl.arange(0, TILE)
    at = place * TILE + tl.arange(0, TILE)
    highest, total = _total(high_ptr, sum_ptr, at, count, FACTOR, ACC, TILE)
    total = tl.where(count > 0, total, float("nan"))
    lse = highest.to(lse_ptr.dtype.element_ty) * FACTOR + tl.log2(total.to(lse_ptr.dtype.element_ty))
    tl.store(lse_ptr + head.to(tl.int64) * S + rows, lse, mask=rows < S)
    acc = tl.zeros([TILE, COLUMNS], ACC)
    high, unit, of_tile = tl.full([TILE], -1e30, ACC), tl.full([TILE], -1e30, ACC), tl.load(high_ptr + at)
    for n in tl.range(first * TILE, (first + count) * TILE, BLOCK_K):
        if n % TILE == 0:
            high = tl.maximum(high, of_tile)
            lifted = tl.maximum(of_tile, high - 60.0 / FACTOR)
            acc = acc * tl.exp2((unit - lifted) * FACTOR)[:, None]
            following = tl.minimum(n // TILE + 1 - first, count - 1)
            unit, of_tile = lifted, tl.load(high_ptr + at + following * TILE)
        p = p_tma.load([(place + n // TILE - first) * TILE, n % TILE])
        v = v_tma.load([n, head // (HQ // HK) * D + col])
        acc = tl.dot(p, v, acc, input_precision=PRECISION, out_dtype=ACC)
    acc = acc * (tl.exp2((unit - highest) * FACTOR) / total)[:, None]
    _store(o_ptr, acc, i * TILE, head, col, S, HQ, D)


@triton.jit
def _addresses(start, head, col, limit, H: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr):
    """Where a contiguous [limit, H, D] has a tile, and which of it is inside."""
    rows, cols = start + tl.arange(0, TILE), col + tl.arange(0, COLUMNS)
    at = (rows.to(tl.int64) * H + head)[:, None] * D + cols[None, :]
    return at, (rows < limit)[:, None] & (cols < D)[None, :]


@triton.jit
def _store(target, tile, start, head, col, limit, H: tl.constexpr, D: tl.constexpr):
    at, inside = _addresses(start, head, col, limit, H, D, tile.shape[0], tile.shape[1])
    tl.store(target + at, tile.to(target.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["S"])
def _delta_kernel(
    delta_ptr, o_ptr, do_ptr, S, do_b, do_s, do_h, HQ: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """delta [B, HQ, S] = rowsum(do * o), one row and head a program."""
    pid, dims = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_D)
    b, row, head = pid // HQ // S, pid // HQ % S, pid % HQ
    o = tl.load(o_ptr + pid * D + dims, mask=dims < D, other=0.0).to(delta_ptr.dtype.element_ty)
    do = tl.load(do_ptr + b * do_b + row * do_s + head * do_h + dims, mask=dims < D, other=0.0).to(o.dtype)
    tl.store(delta_ptr + (b * HQ + head) * S + row, tl.sum(o * do, 0))


@triton.jit(do_not_specialize=["S", "first_head", "first_row", "end_row", "tiles"])
def _dq_kernel(
    dq_ptr, ds_tma, k_tma, rows_ptr, S, first_head, first_row, end_row, tiles, SCALE: tl.constexpr,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq = scale * dS k, COLUMNS dims of a tile of rows of one query head, the longest rows first."""
    ACC: tl.constexpr = tl.float64 if ds_tma.dtype == tl.float64 else tl.float32
    PARTS: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    pid = tl.program_id(0)
    i = end_row - 1 - pid // PARTS % (end_row - first_row)
    local, col = pid // PARTS // (end_row - first_row), pid % PARTS * COLUMNS
    head = first_head * (HQ // HK) + local
    offset, first, count = _row(rows_ptr, i, first_row, end_row, tiles)
    place = local * tiles + offset - first
    acc = tl.zeros([TILE, COLUMNS], ACC)
    for n in tl.range(first * TILE, (first + count) * TILE, BLOCK_K):
        ds = ds_tma.load([(place + n // TILE) * TILE, n % TILE])
        k = k_tma.load([n, head // (HQ // HK) * D + col])
        acc = tl.dot(ds, k, acc, input_precision=PRECISION, out_dtype=ACC)
    _store(dq_ptr, acc * SCALE, i * TILE, head, col, S, HQ, D)


@triton.jit(do_not_specialize=["S", "K", "window", "first_head", "heads", "first_row", "end_row", "tiles"])
def _dkdv_kernel(
    dv_ptr, dk_ptr, sums_ptr, p_tma, ds_tma, do_tma, q_tma, rows_ptr, ends_ptr,
    S, K, window, first_head, heads, first_row, end_row, tiles, SCALE: tl.constexpr, CAUSAL: tl.constexpr,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dv = P^T do, or dk = scale * dS^T q: COLUMNS dims of a tile of keys, over all query heads of the key head; the
    first keys, which most rows see, first.

    sums_ptr: [2, K, D], what the chunks before have added up for keys that later chunks see too; None for one chunk.
    """
    ACC: tl.constexpr = tl.float64 if p_tma.dtype == tl.float64 else tl.float32
    GROUP: tl.constexpr = HQ // HK
    PARTS: tl.constexpr = 2 * ((D + COLUMNS - 1) // COLUMNS)
    pid = tl.program_id(0)
    local, j, col = pid // PARTS % heads, pid // PARTS // heads, pid % PARTS // 2 * COLUMNS
    if pid % 2 == 0:
        out_ptr, weights_tma, x_tma = dv_ptr, p_tma, do_tma
    else:
        out_ptr, weights_tma, x_tma = dk_ptr, ds_tma, q_tma
    kv_head = first_head + local
    start = tl.load(rows_ptr + 2 * first_row)
    begin, _ = queries_of(j * TILE, S, K, window, ends_ptr, CAUSAL)
    _, end = queries_of(tl.minimum(j * TILE + TILE, K) - 1, S, K, window, ends_ptr, CAUSAL)
    begin, end = begin // TILE, tl.cdiv(end, TILE)
    here, stop = tl.maximum(begin, first_row), tl.minimum(end, end_row)
    acc = tl.zeros([TILE, COLUMNS], ACC)
    base = tl.load(rows_ptr + 2 * here + 1)  # a step ahead: a load that others wait for would not be pipelined
    for step in tl.range(0, tl.maximum(stop - here, 0) * (TILE // BLOCK_K) * GROUP):
        g, m = step % GROUP, here * TILE + step // GROUP * BLOCK_K
        place = (local * GROUP + g) * tiles + base + j - start
        weights = weights_tma.load([place * TILE + m % TILE, 0])
        x = x_tma.load([m, (kv_head * GROUP + g) * D + col])
        base = tl.load(rows_ptr + (here * TILE + (step + 1) // GROUP * BLOCK_K) // TILE * 2 + 1)
        acc = tl.dot(weights.T, x, acc, input_precision=PRECISION, out_dtype=ACC)
    if pid % 2 == 1:
        acc = acc * SCALE
    if sums_ptr is not None:
        sums_ptr += (pid % 2).to(tl.int64) * K * D
        sums_at, inside = _addresses(j * TILE, 0, col, K, 1, D, TILE, COLUMNS)
        if (begin < first_row) & (here < stop):
            acc += tl.load(sums_ptr + sums_at, mask=inside, other=0.0)
        if (end > end_row) & (here < stop):
            tl.store(sums_ptr + sums_at, acc, mask=inside)
        elif (here < stop) | (begin >= end):  # the last of these rows are here, or no row sees the keys
            _store(out_ptr, acc, j * TILE, kv_head, col, K, HK, D)
    else:
        _store(out_ptr, acc, j * TILE, kv_head, col, K, HK, D)


# ---- Chunks ----


class _Chunk(NamedTuple):
    """`heads` key heads with their query heads, of the tiles of rows first_row .. end_row, which have at most `tiles`
    tiles a query head."""

    first_head: int
    heads: int
    first_row: int
    end_row: int
    tiles: int


def _most_tiles(
    length: int, num_keys: int, longest: int | None, window: int | None, causal: bool, tile: int
) -> list[int]:
    """At most how many tiles of keys each tile of rows attends to. longest: of packed sequences."""
    counts, shift = [], num_keys - length
    for first in range(0, length, tile):
        last = min(first + tile, length) - 1
        lo, hi = 0, num_keys
        if longest is not None:
            lo, hi = max(lo, first - longest + 1), min(hi, last + longest)
        if window is not None:
            lo = max(lo, first + shift - window + 1)
        if causal:
            hi = min(hi, last + shift + 1)
        counts.append(cdiv(hi, tile) - lo // tile)
    return counts


@functools.lru_cache(64)
def _plan(
    heads: int, length: int, num_keys: int, longest: int | None, window: int | None, causal: bool, tile: int, most: int
) -> tuple[int, int, list[_Chunk]]:
    """(at most how many tiles the table has, tiles of rows that programs take together, chunks). heads: key heads.
    most: the tiles of a query head that the workspace holds of one key head."""
    counts = _most_tiles(length, num_keys, longest, window, causal, tile)
    total = sum(counts)
    if longest is not None and causal:
        # The first token of a tile of rows lies on average in the first half of its sequence, or a tile later.
        total = min(total, cdiv(len(counts) * (longest + 5 * tile), 2 * tile))
    if total <= most:
        size = cdiv(heads, cdiv(heads, most // total))
        whole = [_Chunk(head, min(size, heads - head), 0, len(counts), total) for head in range(0, heads, size)]
        return total, _ROWS_AT_A_TIME, whole
    step = _ROWS_AT_A_TIME
    if any(sum(counts[row : row + step]) > most for row in range(0, len(counts), step)):
        step = 1
    parts: list[tuple[int, int, int]] = []  # first row, end row, tiles
    for row in range(0, len(counts), step):
        tiles, end = sum(counts[row : row + step]), min(row + step, len(counts))
        if parts and parts[-1][2] + tiles <= most:
            parts[-1] = parts[-1][0], end, parts[-1][2] + tiles
        else:
            parts.append((row, end, tiles))
    return sum(counts), step, [_Chunk(head, 1, *part) for head in range(heads) for part in parts]


class _Work(NamedTuple):
    """What the launches of a pass have in common."""

    chunks: list[_Chunk]
    slots: int
    """Tiles that P has room for."""
    rows: Tensor
    tiles: Tensor
    mask: Tensor | None
    counts: Tensor | None
    ends: Tensor | None
    heads: tuple[int, int, int]
    """HQ, HK, D."""
    tile: int
    precision: str

    def masks(self, b: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Arguments of kernels, for a row of the batch."""
        return (
            (None, None, self.ends)
            if self.mask is None or self.counts is None
            else (self.mask[b], self.counts[b], self.ends)
        )

    def queries(self, chunk: _Chunk) -> int:
        """Query heads of a chunk."""
        return chunk.heads * self.heads[0] // self.heads[1]


def _prepare(
    q: Tensor, k: Tensor, mask: Tensor | None, cu: Tensor | None, longest: int | None, causal: bool,
    window: int | None, matrices: int,
) -> _Work:  # fmt: skip
    """The chunks and the table of tiles. matrices: in the workspace, P alone or P and dS."""
    length, num_keys, tile = q.shape[1], k.shape[1], _TILE[q.element_size()]
    num_heads, size, num_kv_heads = (operator.index(n) for n in (*q.shape[2:], k.shape[2]))
    group, row_tiles = num_heads // num_kv_heads, cdiv(length, tile)
    most = WORKSPACE // (group * matrices * tile * tile * q.element_size())
    if cu is not None:
        longest = length if longest is None else min(longest, length)
    total, together, chunks = _plan(
        num_kv_heads, length, num_keys, None if cu is None else longest, window, causal, tile, most
    )
    ends, counts = None if cu is None else sequence_ends(cu, length), None
    if mask is not None:
        mask = mask.to(torch.uint8).contiguous()
        counts = hidden_counts(mask)
    rows = torch.empty(row_tiles + 1, 2, dtype=torch.int32, device=q.device)
    tiles = torch.empty(total, 2, dtype=torch.int32, device=q.device)
    launch(
        _table_kernel, (row_tiles + 1,),
        rows, tiles, ends, length, num_keys, window, total, causal, tile, together, 128, num_warps=4,
    )  # fmt: skip
    slots = max(chunk.heads * chunk.tiles for chunk in chunks) * group
    exact = q.is_cuda and torch.version.cuda is not None and q.dtype == torch.float32
    heads = num_heads, num_kv_heads, size
    return _Work(chunks, slots, rows, tiles, mask, counts, ends, heads, tile, "tf32x3" if exact else "ieee")


def _settings(kernel: str, work: _Work, q: Tensor) -> tuple[int, int, dict[str, int]]:
    """(columns, step of the inner dimension, options of the launch)."""
    columns, step, warps, stages = (_HALF if q.element_size() == 2 else _EXACT)[kernel]
    return columns, min(step, work.tile), dict(num_warps=warps, num_stages=stages)


def _readable(x: Tensor) -> Tensor:
    """x [B, S, H, D], copied unless a row of the batch is a matrix [S, H * D] that TMA can read."""
    strides, sizes = x.stride(), x.shape
    dense = strides[3] == 1 and (sizes[2] == 1 or strides[2] == sizes[3])
    aligned = all(
        n == 1 or (s > 0 and s * x.element_size() % 16 == 0) for n, s in zip(sizes[:2], strides, strict=False)
    )
    if dense and aligned and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _matrices(x: Tensor, rows: int, columns: int) -> list[Any]:
    """A descriptor of each row of the batch of a readable x [B, S, H, D], for tiles of rows by columns."""
    width = x.shape[2] * x.shape[3]
    strides = [x.stride(1) if x.shape[1] > 1 else width, 1]
    return [TensorDescriptor(part, [x.shape[1], width], strides, [rows, columns]) for part in x]


def _workspace(work: _Work, q: Tensor) -> Tensor:
    return torch.empty(work.slots * work.tile, work.tile, dtype=q.dtype, device=q.device)


def _statistics(q: Tensor) -> Tensor:
    """One number per row and head, [B, HQ, S]. fp64 for fp32 inputs: exp(score - lse) has fp32's precision only if lse
    has more."""
    dtype = torch.float64 if q.element_size() > 2 else torch.float32
    return torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=dtype, device=q.device)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cu: Tensor | None, longest: int | None, causal: bool,
    window: int | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(output, lse in base 2)."""
    q, k, v = (_readable(x) for x in (q, k, v))
    work, length, num_keys = _prepare(q, k, mask, cu, longest, causal, window, 1), q.shape[1], k.shape[1]
    out, lse, tile = torch.empty(q.shape, dtype=q.dtype, device=q.device), _statistics(q), work.tile
    p = _workspace(work, q)
    high, total = torch.empty(2, work.slots * tile, dtype=accumulator(q.dtype), device=q.device)
    _, depth, of_scores = _settings("scores", work, q)
    columns, step, of_values = _settings("values", work, q)
    p_out, p_in = (TensorDescriptor.from_tensor(p, [tile, width]) for width in (tile, step))
    q_in, k_in, v_in = _matrices(q, tile, depth), _matrices(k, tile, depth), _matrices(v, step, columns)
    for b, chunk in itertools.product(range(len(q)), work.chunks):
        first_head, _, *rows, tiles = chunk
        launch(
            _weights_kernel, (work.queries(chunk) * tiles,),
            p_out, None, high, total, q_in[b], k_in[b], None, None, None, None, *work.masks(b), work.rows, work.tiles,
            length, num_keys, window, first_head, *rows, tiles, scale, causal, False, *work.heads, tile, depth,
            work.precision, **of_scores,
        )  # fmt: skip
        launch(
            _values_kernel, (cdiv(work.heads[2], columns) * (chunk.end_row - chunk.first_row) * work.queries(chunk),),
            out[b], lse[b], p_in, high, total, v_in[b], work.rows, length, first_head, *rows, tiles,
            scale, *work.heads, tile, columns, step, work.precision, **of_values,
        )  # fmt: skip
    return out, lse


def _backward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cu: Tensor | None, longest: int | None, causal: bool,
    window: int | None, scale: float, out: Tensor, lse: Tensor, do: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv."""
    q, k, v, do = (_readable(x) for x in (q, k, v, do))
    work, length, num_keys = _prepare(q, k, mask, cu, longest, causal, window, 2), q.shape[1], k.shape[1]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta, tile, size = _statistics(q), work.tile, work.heads[2]
    launch(
        _delta_kernel, (delta.numel(),),
        delta, out, do, length, *do.stride()[:3], work.heads[0], size, next_power_of_2(size), num_warps=4,
    )  # fmt: skip
    sums, (p, ds) = None, (_workspace(work, q) for _ in range(2))
    if work.chunks[0].end_row < cdiv(length, tile):
        sums = torch.empty(2, num_keys, size, dtype=accumulator(q.dtype), device=q.device)
    _, depth, of_weights = _settings("weights", work, q)
    columns, step, of_dq = _settings("dq", work, q)
    key_columns, key_step, of_dkdv = _settings("dkdv", work, q)
    weights = [TensorDescriptor.from_tensor(x, [tile, tile]) for x in (p, ds)]
    by_keys = [TensorDescriptor.from_tensor(x, [key_step, tile]) for x in (p, ds)]
    ds_in, k_of_dq = TensorDescriptor.from_tensor(ds, [tile, step]), _matrices(k, step, columns)
    q_in, k_in, do_in, v_in = (_matrices(x, tile, depth) for x in (q, k, do, v))
    do_of_dv, q_of_dk = (_matrices(x, key_step, key_columns) for x in (do, q))
    for b, chunk in itertools.product(range(len(q)), work.chunks):
        first_head, heads, *rows, tiles = chunk
        launch(
            _weights_kernel, (work.queries(chunk) * tiles,),
            *weights, None, None, q_in[b], k_in[b], do_in[b], v_in[b], lse[b], delta[b], *work.masks(b),
            work.rows, work.tiles, length, num_keys, window, first_head, *rows, tiles, scale, causal, True,
            *work.heads, tile, depth, work.precision, **of_weights,
        )  # fmt: skip
        launch(
            _dq_kernel, (cdiv(size, columns) * (chunk.end_row - chunk.first_row) * work.queries(chunk),),
            dq[b], ds_in, k_of_dq[b], work.rows, length, first_head, *rows, tiles, scale,
            *work.heads, tile, columns, step, work.precision, **of_dq,
        )  # fmt: skip
        launch(
            _dkdv_kernel, (2 * cdiv(size, key_columns) * cdiv(num_keys, tile) * heads,),
            dv[b], dk[b], sums, *by_keys, do_of_dv[b], q_of_dk[b], work.rows, work.ends,
            length, num_keys, window, first_head, heads, *rows, tiles, scale, causal,
            *work.heads, tile, key_columns, key_step, work.precision, **of_dkdv,
        )  # fmt: skip
    return dq, dk, dv


class _Unfused(torch.autograd.Function):
    """q [B, S, HQ, D], k and v [B, K, HK, D] -> [B, S, HQ, D]."""

    @staticmethod
    def forward(ctx, q, k, v, mask, cu, longest, causal, window, scale):
        inputs = q, k, v, mask, cu, longest, causal, window, scale
        outputs = _forward(*inputs)
        _save(ctx, inputs, outputs)
        return outputs[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        return _gradients(ctx, do, _backward)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.options = inputs[5:]


def _gradients(ctx: Any, do: Tensor, backward: Callable) -> tuple:
    *inputs, out, lse = ctx.saved_tensors
    return *backward(*inputs, *ctx.options, out, lse, do), *(None,) * 6


# For torch.compile, ops that it does not look into: the plan of chunks and the descriptors are made of numbers.
_compiled_forward = torch.library.custom_op("ligermodels::unfused_attention", _forward, mutates_args=())
_compiled_backward = torch.library.custom_op("ligermodels::unfused_attention_backward", _backward, mutates_args=())


@_compiled_forward.register_fake
def _(q, k, v, mask, cu, longest, causal, window, scale):
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), _statistics(q)


@_compiled_backward.register_fake
def _(q, k, v, mask, cu, longest, causal, window, scale, out, lse, do):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))


_compiled_forward.register_autograd(
    lambda ctx, do, d_lse: _gradients(ctx, do, _compiled_backward),
    setup_context=lambda ctx, inputs, output: _save(ctx, inputs, output),
)


def unfused_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None, scale: float, key_mask: Tensor | None,
    cu_seqlens: Tensor | None, max_seqlen: int | None,
) -> Tensor:  # fmt: skip
    """`attention` of attention.py, which documents and checks the arguments; no tensor is empty, and D is a
    multiple of 64: a head is read as columns of a matrix of all heads.

    max_seqlen: with cu_seqlens, at least the longest packed sequence; None: not known, which costs memory and time. If
    a sequence is longer, and the workspace too small for that, the output is NaN.
    """
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    if not torch.compiler.is_compiling():
        return _Unfused.apply(q, k, v, key_mask, cu_seqlens, max_seqlen, causal, window, scale)
    return _compiled_forward(q, k, v, key_mask, cu_seqlens, max_seqlen, causal, window, scale)[0]
