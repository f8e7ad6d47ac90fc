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
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import (
    HAS_TRITON,
    INTERPRET,
    accumulator,
    cdiv,
    is_datacenter,
    next_power_of_2,
    once_differentiable,
    tl,
    triton,
    use_triton,
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
MIN_QUERIES = 1024
"""Fewer have too few tiles to fill a GPU, and torch's engines are faster. Not tuned."""
_TILE = {2: 128, 4: 64, 8: 64}
"""Queries, and keys, of a tile of P, by the bytes of an element. 128 is the fastest on an H200."""
# (columns, step of the inner dimension, warps, stages). The fastest on an H200; those of fp32 were not timed.
_HALF = {
    "scores": (0, 64, 4, 3), "weights": (0, 64, 4, 3), "values": (128, 64, 4, 3), "dq": (256, 64, 8, 4),
    "dkdv": (128, 64, 4, 3),
}  # fmt: skip
_EXACT = dict.fromkeys(_HALF, (64, 32, 4, 2))
_PRODUCTS = 2
"""Of dv and dk, how many a launch makes."""
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
def _head(first_unit, local, HQ: tl.constexpr, HK: tl.constexpr):
    """(row of the batch, key head, query head) of the local-th query head of a chunk."""
    GROUP: tl.constexpr = HQ // HK
    unit = first_unit + local // GROUP
    return unit // HK, unit % HK, unit % HK * GROUP + local % GROUP


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
    a_tma, b_tma, b, m, a_head, n, b_head, D: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of a b^T over the dims of a head."""
    total = tl.zeros([TILE, TILE], ACC)
    for c in tl.range(0, D, BLOCK_K):
        x = a_tma.load([b, m, a_head, c]).reshape(TILE, BLOCK_K)
        y = b_tma.load([b, n, b_head, c]).reshape(TILE, BLOCK_K)
        total = tl.dot(x, y.T, total, input_precision=PRECISION, out_dtype=ACC)
    return total


@triton.jit
def _visible(
    m, n, b, mask_ptr, counts_ptr, ends_ptr, S, K, window, CAUSAL: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Which of a tile's keys its queries attend to; a query without a visible key attends to itself."""
    queries = tl.minimum(m + tl.arange(0, TILE), S - 1)
    lo, hi = keys_of(queries, S, K, window, ends_ptr, CAUSAL)
    visible = visible_keys(n, b, lo, hi, mask_ptr, K, TILE)
    if mask_ptr is not None:
        empty = tl.load(counts_ptr + 2 + hi) - tl.load(counts_ptr + 2 + lo) == hi - lo
        self_key = tl.where(empty, tl.maximum(queries + K - S, 0), -1)
        visible = visible | ((n + tl.arange(0, TILE))[None, :] == self_key[:, None])
    return visible


@triton.jit(do_not_specialize=["S", "K", "window", "first_unit", "first_row", "end_row", "tiles"])
def _weights_kernel(
    p_tma, ds_tma, high_ptr, sum_ptr, q_tma, k_tma, do_tma, v_tma, lse_ptr, delta_ptr,
    mask_ptr, counts_ptr, ends_ptr, rows_ptr, tiles_ptr, S, K, window, first_unit, first_row, end_row, tiles,
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
        b, kv_head, head = _head(first_unit, local, HQ, HK)
        i, j = tl.load(tiles_ptr + 2 * at), tl.load(tiles_ptr + 2 * at + 1)
        place = (local * tiles + tl.load(rows_ptr + 2 * i + 1) + j - start) * TILE
        m, n = i * TILE, j * TILE
        rows = m + tl.arange(0, TILE)
        s = _product(q_tma, k_tma, b, m, head, n, kv_head, D, TILE, BLOCK_K, ACC, PRECISION)
        if counts_ptr is not None:
            counts_ptr += b.to(tl.int64) * (K + 3)
        _, full_end = keys_of(m, S, K, window, ends_ptr, CAUSAL)
        full_begin, _ = keys_of(tl.minimum(m + TILE, S) - 1, S, K, window, ends_ptr, CAUSAL)
        if (n < full_begin) | (n + TILE > full_end) | (num_hidden(counts_ptr, n, n + TILE, K) > 0):
            visible = _visible(m, n, b, mask_ptr, counts_ptr, ends_ptr, S, K, window, CAUSAL, TILE)
            s = tl.where(visible, s, float("-inf"))
        if BACKWARD:
            statistics = (b.to(tl.int64) * HQ + head) * S + rows
            lse = tl.load(lse_ptr + statistics, mask=rows < S, other=float("inf"))
            p = tl.exp2((s * FACTOR - lse[:, None]).to(ACC)).to(dtype)
            p_tma.store([place, 0], p)
            dp = _product(do_tma, v_tma, b, m, head, n, kv_head, D, TILE, BLOCK_K, ACC, PRECISION)
            delta = tl.load(delta_ptr + statistics, mask=rows < S, other=0.0)
            ds = p.to(ACC) * (dp - delta[:, None]).to(ACC)
            ds_tma.store([place, 0], ds.to(dtype))
        else:
            high = tl.maximum(tl.max(s, 1) * FACTOR, -1e30)  # finite where a row sees none of these keys
            p = tl.exp2(s * FACTOR - high[:, None])
            tl.store(high_ptr + place + tl.arange(0, TILE), high)
            tl.store(sum_ptr + place + tl.arange(0, TILE), tl.sum(p, 1))
            p_tma.store([place, 0], p.to(dtype))


@triton.jit
def _log_sum(high_ptr, sum_ptr, at, count, ACC: tl.constexpr, TILE: tl.constexpr, dtype: tl.constexpr):
    """The log, in base 2, of the sum of exp of the scores of each row, from the sums of its tiles."""
    high, total = tl.full([TILE], -1e30, ACC), tl.zeros([TILE], ACC)
    for t in tl.range(0, count):
        of_tile = tl.load(high_ptr + at + t * TILE)
        higher = tl.maximum(high, of_tile)
        total = total * tl.exp2(high - higher) + tl.load(sum_ptr + at + t * TILE) * tl.exp2(of_tile - higher)
        high = higher
    return high.to(dtype) + tl.log2(total.to(dtype))


@triton.jit(do_not_specialize=["S", "first_unit", "first_row", "end_row", "tiles"])
def _values_kernel(
    o_ptr, lse_ptr, p_tma, high_ptr, sum_ptr, v_tma, rows_ptr, S, first_unit, first_row, end_row, tiles,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o = P v, COLUMNS dims of a tile of rows of one query head, and the lse of the rows; the longest rows first.

    acc is in units of exp2(unit): the maximum of the tile of keys added last, but at least the highest one so far less
    60, so that acc does not overflow. Weights below 2^-60 of the largest may count for up to that.
    """
    ACC: tl.constexpr = tl.float64 if p_tma.dtype == tl.float64 else tl.float32
    PARTS: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    pid = tl.program_id(0)
    i = end_row - 1 - pid // PARTS % (end_row - first_row)
    local, col = pid // PARTS // (end_row - first_row), pid % PARTS * COLUMNS
    b, kv_head, head = _head(first_unit, local, HQ, HK)
    offset, first, count = _row(rows_ptr, i, first_row, end_row, tiles)
    place = local * tiles + offset
    rows = i * TILE + tl.arange(0, TILE)
    at = place * TILE + tl.arange(0, TILE)
    lse = _log_sum(high_ptr, sum_ptr, at, count, ACC, TILE, lse_ptr.dtype.element_ty)
    lse = tl.where(count > 0, lse, float("nan"))
    tl.store(lse_ptr + (b.to(tl.int64) * HQ + head) * S + rows, lse, mask=rows < S)
    acc = tl.zeros([TILE, COLUMNS], ACC)
    high, unit, of_tile = tl.full([TILE], -1e30, ACC), tl.full([TILE], -1e30, ACC), tl.load(high_ptr + at)
    for n in tl.range(first * TILE, (first + count) * TILE, BLOCK_K):
        if n % TILE == 0:
            high = tl.maximum(high, of_tile)
            lifted = tl.maximum(of_tile, high - 60.0)
            acc = acc * tl.exp2(unit - lifted)[:, None]
            following = tl.minimum(n // TILE + 1 - first, count - 1)
            unit, of_tile = lifted, tl.load(high_ptr + at + following * TILE)
        p = p_tma.load([(place + n // TILE - first) * TILE, n % TILE])
        v = v_tma.load([b, n, kv_head, col]).reshape(BLOCK_K, COLUMNS)
        acc = tl.dot(p, v, acc, input_precision=PRECISION, out_dtype=ACC)
    acc = acc * tl.exp2((unit - lse).to(ACC))[:, None]
    _store(o_ptr, acc, b, i * TILE, head, col, S, HQ, D)


@triton.jit
def _addresses(b, start, head, col, limit, H: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr):
    """Where a contiguous [B, limit, H, D] has a tile, and which of it is inside."""
    rows, cols = start + tl.arange(0, TILE), col + tl.arange(0, COLUMNS)
    at = ((b.to(tl.int64) * limit + rows) * H + head)[:, None] * D + cols[None, :]
    return at, (rows < limit)[:, None] & (cols < D)[None, :]


@triton.jit
def _store(target, tile, b, start, head, col, limit, H: tl.constexpr, D: tl.constexpr):
    at, inside = _addresses(b, start, head, col, limit, H, D, tile.shape[0], tile.shape[1])
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


@triton.jit(do_not_specialize=["S", "first_unit", "first_row", "end_row", "tiles"])
def _dq_kernel(
    dq_ptr, ds_tma, k_tma, rows_ptr, S, first_unit, first_row, end_row, tiles, SCALE: tl.constexpr,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq = scale * dS k, COLUMNS dims of a tile of rows of one query head, the longest rows first."""
    ACC: tl.constexpr = tl.float64 if ds_tma.dtype == tl.float64 else tl.float32
    PARTS: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    pid = tl.program_id(0)
    i = end_row - 1 - pid // PARTS % (end_row - first_row)
    local, col = pid // PARTS // (end_row - first_row), pid % PARTS * COLUMNS
    b, kv_head, head = _head(first_unit, local, HQ, HK)
    offset, first, count = _row(rows_ptr, i, first_row, end_row, tiles)
    place = local * tiles + offset - first
    acc = tl.zeros([TILE, COLUMNS], ACC)
    for n in tl.range(first * TILE, (first + count) * TILE, BLOCK_K):
        ds = ds_tma.load([(place + n // TILE) * TILE, n % TILE])
        k = k_tma.load([b, n, kv_head, col]).reshape(BLOCK_K, COLUMNS)
        acc = tl.dot(ds, k, acc, input_precision=PRECISION, out_dtype=ACC)
    _store(dq_ptr, acc * SCALE, b, i * TILE, head, col, S, HQ, D)


@triton.jit(do_not_specialize=["S", "K", "window", "first_unit", "units", "first_row", "end_row", "tiles"])
def _dkdv_kernel(
    dv_ptr, dk_ptr, sums_ptr, p_tma, ds_tma, do_tma, q_tma, rows_ptr, ends_ptr,
    S, K, window, first_unit, units, first_row, end_row, tiles, SCALE: tl.constexpr, CAUSAL: tl.constexpr,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, PRODUCTS: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dv = P^T do, or dk = scale * dS^T q: COLUMNS dims of a tile of keys, over all query heads of the key head.

    PRODUCTS: 2 for both; 1 for the first of each pair of arguments, times SCALE. sums_ptr: ACC
    [PRODUCTS, K, D], what the chunks before have added up for keys that later chunks see too; None for one chunk.
    """
    ACC: tl.constexpr = tl.float64 if p_tma.dtype == tl.float64 else tl.float32
    GROUP: tl.constexpr = HQ // HK
    PARTS: tl.constexpr = PRODUCTS * ((D + COLUMNS - 1) // COLUMNS)
    pid = tl.program_id(0)
    product, col = pid % PRODUCTS, pid % PARTS // PRODUCTS * COLUMNS
    local, j = pid // PARTS % units, pid // PARTS // units
    out_ptr, weights_tma, x_tma = dv_ptr, p_tma, do_tma
    if PRODUCTS == 2:  # a constant, as `and` with a tensor is not  # noqa: SIM102
        if product == 1:
            out_ptr, weights_tma, x_tma = dk_ptr, ds_tma, q_tma
    b, kv_head, _ = _head(first_unit, local * GROUP, HQ, HK)
    start = tl.load(rows_ptr + 2 * first_row)
    begin, _ = queries_of(j * TILE, S, K, window, ends_ptr, CAUSAL)
    _, end = queries_of(tl.minimum(j * TILE + TILE, K) - 1, S, K, window, ends_ptr, CAUSAL)
    begin, end = begin // TILE, tl.cdiv(end, TILE)
    here, stop = tl.maximum(begin, first_row), tl.minimum(end, end_row)
    acc = tl.zeros([TILE, COLUMNS], ACC)
    for step in tl.range(0, tl.maximum(stop - here, 0) * (TILE // BLOCK_K) * GROUP):
        g, m = step % GROUP, here * TILE + step // GROUP * BLOCK_K
        place = (local * GROUP + g) * tiles + tl.load(rows_ptr + m // TILE * 2 + 1) + j - start
        weights = weights_tma.load([place * TILE + m % TILE, 0])
        x = x_tma.load([b, m, kv_head * GROUP + g, col]).reshape(BLOCK_K, COLUMNS)
        acc = tl.dot(weights.T, x, acc, input_precision=PRECISION, out_dtype=ACC)
    if product == PRODUCTS - 1:
        acc = acc * SCALE
    if sums_ptr is not None:
        sums_at, inside = _addresses(product, j * TILE, 0, col, K, 1, D, TILE, COLUMNS)
        if here < stop:
            if begin < first_row:
                acc += tl.load(sums_ptr + sums_at, mask=inside, other=0.0)
            if end > end_row:
                tl.store(sums_ptr + sums_at, acc, mask=inside)
            else:
                _store(out_ptr, acc, b, j * TILE, kv_head, col, K, HK, D)
        elif begin >= end:  # no query sees these keys
            _store(out_ptr, acc, b, j * TILE, kv_head, col, K, HK, D)
    else:
        _store(out_ptr, acc, b, j * TILE, kv_head, col, K, HK, D)


# ---- Chunks ----


class _Chunk(NamedTuple):
    """Key heads (of all rows of the batch) first_unit .. first_unit + units with their query heads, of the tiles of
    rows first_row .. end_row, which have at most `tiles` tiles a query head."""

    first_unit: int
    units: int
    first_row: int
    end_row: int
    tiles: int


def _most_tiles(length: int, num_keys: int, longest: int | None, window: int | None, causal: bool, tile: int) -> list:
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
    units: int, length: int, num_keys: int, longest: int | None, window: int | None, causal: bool, tile: int, most: int
) -> tuple[int, int, list[_Chunk]]:
    """(at most how many tiles the table has, tiles of rows that programs take together, chunks). most: tiles a query
    head that the workspace holds of one key head."""
    counts = _most_tiles(length, num_keys, longest, window, causal, tile)
    total = sum(counts)
    if longest is not None and causal:
        # The first token of a tile of rows lies on average in the middle of its sequence.
        total = min(total, cdiv(len(counts) * (longest + 5 * tile), 2 * tile))
    if total <= most:
        size = cdiv(units, cdiv(units, most // total))
        return total, _ROWS_AT_A_TIME, [
            _Chunk(unit, min(size, units - unit), 0, len(counts), total) for unit in range(0, units, size)
        ]  # fmt: skip
    step = _ROWS_AT_A_TIME
    if any(sum(counts[row : row + step]) > most for row in range(0, len(counts), step)):
        step = 1
    chunks: list[tuple[int, int, int]] = []  # first row, end row, tiles
    for row in range(0, len(counts), step):
        tiles = sum(counts[row : row + step])
        end = min(row + step, len(counts))
        if chunks and chunks[-1][2] + tiles <= most:
            chunks[-1] = (chunks[-1][0], end, chunks[-1][2] + tiles)
        else:
            chunks.append((row, end, tiles))
    return sum(counts), step, [_Chunk(unit, 1, *chunk) for unit in range(units) for chunk in chunks]


class _Call(NamedTuple):
    """What the launches of a pass have in common."""

    chunks: list[_Chunk]
    slots: int
    """Tiles of the workspace."""
    tile: int
    masks: tuple[Any, ...]
    """Arguments of kernels: mask, counts, ends of sequences."""
    rows: Tensor
    tiles: Tensor
    heads: tuple[int, int, int]
    """HQ, HK, D."""
    precision: str

    def options(self, kernel: str, itemsize: int) -> tuple[int, int, dict[str, int]]:
        """(columns, step of the inner dimension, options of the launch)."""
        columns, step, warps, stages = (_HALF if itemsize == 2 else _EXACT)[kernel]
        return columns, min(step, self.tile), dict(num_warps=warps, num_stages=stages)


def _prepare(
    q: Tensor, k: Tensor, mask: Tensor | None, cu: Tensor | None, longest: int | None, causal: bool,
    window: int | None, matrices: int,
) -> _Call:  # fmt: skip
    """The chunks and the table of tiles. matrices: in the workspace, P alone or P and dS."""
    (batch_size, length), num_keys = q.shape[:2], k.shape[1]
    num_heads, size, num_kv_heads = (operator.index(n) for n in (*q.shape[2:], k.shape[2]))
    tile, group = _TILE[q.element_size()], num_heads // num_kv_heads
    most = WORKSPACE // (group * matrices * tile * tile * q.element_size())
    if cu is not None:
        longest = length if longest is None else min(longest, length)
    total, together, chunks = _plan(
        batch_size * num_kv_heads, length, num_keys, None if cu is None else longest, window, causal, tile, most
    )
    ends = None if cu is None else sequence_ends(cu, length)
    counts = None
    if mask is not None:
        mask = mask.to(torch.uint8).contiguous()
        counts = hidden_counts(mask)
    row_tiles = cdiv(length, tile)
    rows = torch.empty(row_tiles + 1, 2, dtype=torch.int32, device=q.device)
    tiles = torch.empty(total, 2, dtype=torch.int32, device=q.device)
    launch(
        _table_kernel, (row_tiles + 1,),
        rows, tiles, ends, length, num_keys, window, total, causal, tile, together, 128, num_warps=4,
    )  # fmt: skip
    slots = max(chunk.units * chunk.tiles for chunk in chunks) * group
    exact = q.is_cuda and torch.version.cuda is not None and q.dtype == torch.float32
    heads = num_heads, num_kv_heads, size
    return _Call(chunks, slots, tile, (mask, counts, ends), rows, tiles, heads, "tf32x3" if exact else "ieee")


def _readable(x: Tensor) -> Tensor:
    """x [B, S, H, D], copied unless TMA can read it: rows at multiples of 16 bytes."""
    aligned = all(
        n == 1 or (s > 0 and s * x.element_size() % 16 == 0) for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)
    )
    if aligned and x.stride(3) == 1 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _heads(x: Tensor, rows: int, columns: int) -> Any:
    """The descriptor of a readable x [B, S, H, D], for tiles of rows by columns of a head."""
    strides = [s if n > 1 else 16 for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, rows, 1, columns])


def _matrix(x: Tensor, rows: int, columns: int) -> Any:
    return TensorDescriptor.from_tensor(x, [rows, columns])


def _workspace(call: _Call, q: Tensor) -> Tensor:
    return torch.empty(call.slots * call.tile, call.tile, dtype=q.dtype, device=q.device)


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
    call, length, num_keys = _prepare(q, k, mask, cu, longest, causal, window, 1), q.shape[1], k.shape[1]
    out, lse, p, tile = (
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
        _statistics(q),
        _workspace(call, q),
        call.tile,
    )
    high, total = torch.empty(2, call.slots * tile, dtype=accumulator(q.dtype), device=q.device)
    _, depth, of_scores = call.options("scores", q.element_size())
    columns, step, of_values = call.options("values", q.element_size())
    p_out, p_in = _matrix(p, tile, tile), _matrix(p, tile, step)
    q_in, k_in, v_in = _heads(q, tile, depth), _heads(k, tile, depth), _heads(v, step, columns)
    for chunk in call.chunks:
        first_unit, units, *rows, tiles = chunk
        heads = units * call.heads[0] // call.heads[1]
        launch(
            _weights_kernel, (heads * tiles,),
            p_out, None, high, total, q_in, k_in, None, None, None, None, *call.masks, call.rows, call.tiles,
            length, num_keys, window, first_unit, *rows, tiles, scale, causal, False, *call.heads, tile, depth,
            call.precision, **of_scores,
        )  # fmt: skip
        launch(
            _values_kernel, (cdiv(call.heads[2], columns) * (chunk.end_row - chunk.first_row) * heads,),
            out, lse, p_in, high, total, v_in, call.rows, length, first_unit, *rows, tiles,
            *call.heads, tile, columns, step, call.precision, **of_values,
        )  # fmt: skip
    return out, lse


def _dkdv(call: _Call, outs: tuple, weights: tuple, operands: tuple, sums: Tensor | None) -> Callable:
    """A function that launches `_dkdv_kernel` for a chunk; pairs of arguments are those for dv and for dk."""
    itemsize, tile = outs[0].element_size(), call.tile
    columns, step, options = call.options("dkdv", itemsize)
    matrices, operands = [_matrix(x, step, tile) for x in weights], [_heads(x, step, columns) for x in operands]

    def run(chunk: _Chunk, length: int, num_keys: int, window: int | None, scale: float, causal: bool) -> None:
        first_unit, units, *rows, tiles = chunk
        programs = cdiv(num_keys, tile) * units * cdiv(call.heads[2], columns)
        every = range(2)
        for some, by, of_sums in [(every, scale, sums)] if _PRODUCTS == 2 else [
            ([i, i], (1.0, scale)[i], None if sums is None else sums[i]) for i in every
        ]:  # fmt: skip
            pairs = ([pair[i] for i in some] for pair in (outs, matrices, operands))
            (dv, dk), (p, ds), (do, q) = pairs
            launch(
                _dkdv_kernel, (programs * _PRODUCTS,),
                dv, dk, of_sums, p, ds, do, q, call.rows, call.masks[2],
                length, num_keys, window, first_unit, units, *rows, tiles, by, causal,
                *call.heads, _PRODUCTS, tile, columns, step, call.precision, **options,
            )  # fmt: skip

    return run


def _backward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cu: Tensor | None, longest: int | None, causal: bool,
    window: int | None, scale: float, out: Tensor, lse: Tensor, do: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv."""
    q, k, v, do = (_readable(x) for x in (q, k, v, do))
    call, length, num_keys = _prepare(q, k, mask, cu, longest, causal, window, 2), q.shape[1], k.shape[1]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta, tile, size = _statistics(q), call.tile, call.heads[2]
    launch(
        _delta_kernel, (delta.numel(),),
        delta, out, do, length, *do.stride()[:3], call.heads[0], size, next_power_of_2(size), num_warps=4,
    )  # fmt: skip
    sums, (p, ds) = None, (_workspace(call, q) for _ in range(2))
    if call.chunks[0].end_row < cdiv(length, tile):
        sums = torch.empty(2, num_keys, size, dtype=accumulator(q.dtype), device=q.device)
    _, depth, of_weights = call.options("weights", q.element_size())
    columns, step, of_dq = call.options("dq", q.element_size())
    weights = _matrix(p, tile, tile), _matrix(ds, tile, tile)
    q_in, k_in, do_in, v_in = (_heads(x, tile, depth) for x in (q, k, do, v))
    ds_in, k_of_dq = _matrix(ds, tile, step), _heads(k, step, columns)
    launch_dkdv = _dkdv(call, (dv, dk), (p, ds), (do, q), sums)
    for chunk in call.chunks:
        first_unit, units, *rows, tiles = chunk
        heads = units * call.heads[0] // call.heads[1]
        launch(
            _weights_kernel, (heads * tiles,),
            *weights, None, None, q_in, k_in, do_in, v_in, lse, delta, *call.masks, call.rows, call.tiles,
            length, num_keys, window, first_unit, *rows, tiles, scale, causal, True, *call.heads, tile, depth,
            call.precision, **of_weights,
        )  # fmt: skip
        launch(
            _dq_kernel, (cdiv(size, columns) * (chunk.end_row - chunk.first_row) * heads,),
            dq, ds_in, k_of_dq, call.rows, length, first_unit, *rows, tiles, scale,
            *call.heads, tile, columns, step, call.precision, **of_dq,
        )  # fmt: skip
        launch_dkdv(chunk, length, num_keys, window, scale, causal)
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


def takes(q: Tensor) -> bool:
    """True if `unfused_attention` runs on tensors like q, and is faster than torch's engines."""
    half, wide = q.dtype in (torch.bfloat16, torch.float16), q.shape[3] > 256 and q.shape[3] % 8 == 0
    return (
        half and wide and q.shape[1] >= MIN_QUERIES and use_triton(q) and (INTERPRET or is_datacenter(q.device.index))
    )


def unfused_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None, scale: float, key_mask: Tensor | None,
    cu_seqlens: Tensor | None, max_seqlen: int | None,
) -> Tensor:  # fmt: skip
    """`attention` of attention.py, which documents and checks the arguments; D a multiple of 8, and no element absent.

    max_seqlen: with cu_seqlens, at least the longest packed sequence; None: not known, which costs memory and time. If
    a sequence is longer, and the workspace too small for that, the output is NaN.
    """
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    if not torch.compiler.is_compiling():
        return _Unfused.apply(q, k, v, key_mask, cu_seqlens, max_seqlen, causal, window, scale)
    return _compiled_forward(q, k, v, key_mask, cu_seqlens, max_seqlen, causal, window, scale)[0]
