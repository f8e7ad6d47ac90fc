"""Rows sorted by expert: the order, and what copies tokens into it and sums them out of it.

Shapes, as in the suffixes of names: T tokens, K experts of each token, R = T K rows, E experts, H hidden size. Of a
part of all experts: E of them, and R <= T K rows. Only the device knows that R, and the host reads it.

What differs from argsort and index_add: a stable counting sort in two kernels, without atomics, and gathering instead
of scattering, so that nothing synchronises, but for that number, and the results have the same bits each time.
"""

import operator
from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.kernels._launch import launch
from ligermodels.kernels._math import tile_at
from ligermodels.kernels._triton import cdiv, last_dim_contiguous, next_power_of_2, tl, triton

TILE_ROWS = {8: 16, 4: 64, 2: 128}
"""Bytes per element -> rows of a tile of the grouped matmuls."""


class Order(NamedTuple):
    """Slot t * K + j is token t's choice j. Row r, sorted by expert and then by slot, is slot slots[r]."""

    slots: Tensor
    """[R]."""
    rows: Tensor
    """[T K]: slot s is row rows[s], or -1 - row where its expert is outside of all experts: then it stands with the
    nearest one, and `combine` gives NaN. Where that expert is not in the part, row is ELSEWHERE."""
    offsets: Tensor
    """[E + 1]: expert e has the rows offsets[e] .. offsets[e + 1]."""
    tiles: Tensor
    """[N, 3]: (expert, first row, end of the expert's rows) of each tile of rows, after a line (number of tiles, -, -);
    each expert begins a tile."""


ELSEWHERE = tl.constexpr(0x7FFFFFFF)
"""In place of the row of a slot whose expert is not in the part."""


@triton.jit
def _expert_at(experts_ptr, slots, n_slots, E: tl.constexpr, FIRST: tl.constexpr, TOTAL: tl.constexpr):
    """(expert of each slot, clamped to [0, TOTAL) and counted from FIRST, or -1 outside [0, E); whether it was in
    [0, TOTAL))."""
    named = tl.load(experts_ptr + slots, mask=slots < n_slots, other=-1)
    experts = tl.minimum(tl.maximum(named, 0), TOTAL - 1)
    known = named == experts
    here = slots < n_slots
    if TOTAL > E:
        experts -= FIRST
        here &= (experts >= 0) & (experts < E)
    return tl.where(here, experts, -1), known


@triton.jit(do_not_specialize=["n_slots", "share"])
def _count_kernel(
    counts_ptr, experts_ptr, n_slots, share,
    E: tl.constexpr, FIRST: tl.constexpr, TOTAL: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The number of slots of each expert in each program's share of the slots."""
    e = tl.arange(0, BLOCK_E)
    counts = tl.zeros([BLOCK_E], tl.int32)
    first = tl.program_id(0) * share
    for start in range(first, tl.minimum(first + share, n_slots), BLOCK):
        slots = start + tl.arange(0, BLOCK)
        experts, _ = _expert_at(experts_ptr, slots, n_slots, E, FIRST, TOTAL)
        counts += tl.sum((experts[:, None] == e[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + tl.program_id(0) * BLOCK_E + e, counts)


@triton.jit(do_not_specialize=["n_slots", "share", "programs"])
def _place_kernel(
    slots_ptr, rows_ptr, offsets_ptr, tiles_ptr, counts_ptr, experts_ptr, n_slots, share, programs,
    E: tl.constexpr, FIRST: tl.constexpr, TOTAL: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """A slot's row: the number of slots of lower experts, of its expert in earlier shares, and of its expert before
    it; ELSEWHERE for an expert outside of the part. Each program writes some of the tiles."""
    pid = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    everywhere, before = tl.zeros([BLOCK_E], tl.int32), tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, programs, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)[:, None]
        counts = tl.load(counts_ptr + p * BLOCK_E + e[None, :], mask=p < programs, other=0)
        everywhere += tl.sum(counts, 0)
        before += tl.sum(tl.where(p < pid, counts, 0), 0)
    ends = tl.cumsum(everywhere, 0)
    if pid == 0:
        tl.store(offsets_ptr, 0)
        tl.store(offsets_ptr + 1 + e, ends, mask=e < E)
    tiles = (everywhere + TILE - 1) // TILE
    last_tile = tl.cumsum(tiles, 0)
    n_tiles = tl.sum(tiles, 0)
    if pid == 0:
        tl.store(tiles_ptr, n_tiles)
    for start in range(pid * BLOCK_P, n_tiles, programs * BLOCK_P):
        t = start + tl.arange(0, BLOCK_P)[:, None]
        here = e[None, :] == tl.sum((last_tile[None, :] <= t).to(tl.int32), 1)[:, None]
        first = ends - everywhere + (t - last_tile + tiles) * TILE
        line = tiles_ptr + 3 + 3 * t
        tl.store(line, tl.sum(tl.where(here, e[None, :], 0), 1)[:, None], mask=t < n_tiles)
        tl.store(line + 1, tl.sum(tl.where(here, first, 0), 1)[:, None], mask=t < n_tiles)
        tl.store(line + 2, tl.sum(tl.where(here, ends[None, :], 0), 1)[:, None], mask=t < n_tiles)
    next_row = ends - everywhere + before
    first = pid * share
    for start in range(first, tl.minimum(first + share, n_slots), BLOCK):
        slots = start + tl.arange(0, BLOCK)
        experts, known = _expert_at(experts_ptr, slots, n_slots, E, FIRST, TOTAL)
        here = (experts[:, None] == e[None, :]).to(tl.int32)
        rows = tl.sum(here * (next_row[None, :] + tl.cumsum(here, 0) - 1), 1)
        next_row += tl.sum(here, 0)
        tl.store(slots_ptr + rows, slots, mask=experts >= 0)
        if TOTAL > E:
            rows = tl.where(experts >= 0, rows, ELSEWHERE)
        tl.store(rows_ptr + slots, tl.where(known, rows, -1 - rows), mask=slots < n_slots)


@triton.jit(do_not_specialize=["n_tokens"])
def _dispatch_kernel(
    out_ptr, x_ptr, rows_ptr, n_tokens, stride, PART: tl.constexpr,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copies row t of x to the TOP_K rows of token t in out; unlike a gather, it reads x once. PART: some slots have no
    row."""
    tokens, cols, inside, mask = tile_at(n_tokens, WIDTH, BLOCK, ROWS)
    x = tl.load(x_ptr + tokens * stride + cols, mask=mask)
    for j in tl.static_range(TOP_K):
        rows = tl.load(rows_ptr + tokens * TOP_K + j, mask=inside, other=0).to(tl.int64)
        rows = tl.where(rows < 0, -1 - rows, rows)
        here = mask & (rows < ELSEWHERE) if PART else mask
        tl.store(out_ptr + rows * WIDTH + cols, x, mask=here)


@triton.jit(do_not_specialize=["n_tokens"])
def _combine_kernel(
    y_ptr, out_ptr, rows_ptr, weights_ptr, n_tokens, PART: tl.constexpr, WEIGHTED: tl.constexpr, ACC: tl.constexpr,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """y[t] = sum of the TOP_K rows of token t in out, WEIGHTED or not; NaN for an expert outside of all experts. PART:
    some slots have no row, and add 0."""
    tokens, cols, inside, mask = tile_at(n_tokens, WIDTH, BLOCK, ROWS)
    y = tl.zeros([ROWS, BLOCK], ACC)
    for j in tl.static_range(TOP_K):
        rows = tl.load(rows_ptr + tokens * TOP_K + j, mask=inside, other=0).to(tl.int64)
        here = mask & (rows >= 0) & (rows < ELSEWHERE) if PART else mask
        out = tl.load(out_ptr + tl.maximum(rows, 0) * WIDTH + cols, mask=here, other=0.0).to(ACC)
        out = tl.where(rows < 0, float("nan"), out)
        if WEIGHTED:
            out *= tl.load(weights_ptr + tokens * TOP_K + j, mask=inside, other=0.0).to(ACC)
        y += out
    tl.store(y_ptr + tokens * WIDTH + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sum_kernel(
    sums_ptr, d_ptr, slots_ptr, offsets_ptr, weights_ptr, N, stride,
    TOP_K: tl.constexpr, ACC: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """sums[e]: of the rows of expert e. TOP_K: d has a row a token; 0: a row a row."""
    blocks = tl.cdiv(N, BLOCK_N)
    expert = tl.program_id(0) // blocks
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    end = tl.load(offsets_ptr + expert + 1)
    total = tl.zeros([BLOCK_R, BLOCK_N], ACC)
    for start in range(tl.load(offsets_ptr + expert), end, BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        inside = rows < end
        slots = tl.load(slots_ptr + rows, mask=inside, other=0)
        source = slots // TOP_K if TOP_K else rows
        d = d_ptr + source.to(tl.int64)[:, None] * stride + cols[None, :]
        d = tl.load(d, mask=inside[:, None] & (cols < N)[None, :], other=0.0).to(ACC)
        if weights_ptr is not None:
            d *= tl.load(weights_ptr + slots, mask=inside, other=0.0).to(ACC)[:, None]
        total += d
    sums = tl.sum(total, 0).to(sums_ptr.dtype.element_ty)
    tl.store(sums_ptr + expert.to(tl.int64) * N + cols, sums, mask=cols < N)


def _columns(width: int) -> tuple[int, int]:
    """(columns, rows) of a tile of 4096."""
    block = min(2048, next_power_of_2(width))
    return block, 4096 // block


def sort_by_expert(
    experts: Tensor, num_experts: int, tile_rows: int, first_expert: int = 0, total_experts: int | None = None
) -> Order:
    """experts: [T, K], contiguous -> their order, all int32; tile_rows: rows of a tile. total_experts: the order is of
    the slots of experts first_expert .. first_expert + num_experts alone, and the host waits for their number."""
    n_slots, device = experts.numel(), experts.device
    part = num_experts, first_expert, num_experts if total_experts is None else total_experts
    slots, rows = (torch.empty(n_slots, dtype=torch.int32, device=device) for _ in range(2))
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    tiles = torch.empty((1 + min(n_slots, cdiv(n_slots, tile_rows) + num_experts), 3), dtype=torch.int32, device=device)
    if not n_slots:
        return Order(slots, rows, offsets.zero_(), tiles.zero_())
    block_e = max(2, next_power_of_2(num_experts))  # the kernels sort by two experts or more
    block = max(16, min(256, 8192 // block_e))
    share = cdiv(cdiv(n_slots, 256), block) * block  # 256 programs at most, who read all their counts
    programs = cdiv(n_slots, share)
    counts = torch.empty((programs, block_e), dtype=torch.int32, device=device)
    launch(_count_kernel, (programs,), counts, experts, n_slots, share, *part, block, block_e, num_warps=4)
    launch(
        _place_kernel, (programs,),
        slots, rows, offsets, tiles, counts, experts, n_slots, share, programs,
        *part, tile_rows, block, block_e, max(1, 4096 // block_e), num_warps=4,
    )  # fmt: skip
    if total_experts is None:
        return Order(slots, rows, offsets, tiles)
    n_rows = int(offsets[-1].item())
    return Order(slots[:n_rows], rows, offsets, tiles[: 1 + min(n_rows, cdiv(n_rows, tile_rows) + num_experts)])


def dispatch(x_TH: Tensor, order: Order, top_k: int) -> Tensor:
    """x: [T, H] -> [R, H], each token's row copied to its rows of the sorted order."""
    (n_tokens, width), n_rows = x_TH.shape, order.slots.shape[0]
    x_TH, width = last_dim_contiguous(x_TH), operator.index(width)
    x_RH = torch.empty((n_rows, width), dtype=x_TH.dtype, device=x_TH.device)
    if n_rows:
        block, tokens = _columns(width)
        launch(
            _dispatch_kernel, (cdiv(n_tokens, tokens) * cdiv(width, block),),
            x_RH, x_TH, order.rows, n_tokens, x_TH.stride(0), n_rows < order.rows.shape[0],
            top_k, width, block, tokens, num_warps=4,
        )  # fmt: skip
    return x_RH


def combine(y_RH: Tensor, rows: Tensor, top_k: int, weights_TK: Tensor | None = None) -> Tensor:
    """y: [R, H] in the sorted order, rows: [T K] -> [T, H], the sum of each token's rows, weighted by weights [T, K] if
    there are any."""
    n_tokens, width = rows.shape[0] // top_k, operator.index(y_RH.shape[1])
    y_TH = torch.empty((n_tokens, width), dtype=y_RH.dtype, device=y_RH.device)
    if n_tokens:
        block, tokens = _columns(width)
        launch(
            _combine_kernel, (cdiv(n_tokens, tokens) * cdiv(width, block),),
            y_TH, y_RH, rows, y_RH if weights_TK is None else weights_TK, n_tokens,
            bool(y_RH.shape[0] < rows.shape[0]), weights_TK is not None,
            tl.float64 if y_RH.dtype == torch.float64 else tl.float32, top_k, width, block, tokens, num_warps=8,
        )  # fmt: skip
    return y_TH


def sum_by_expert(
    d: Tensor, order: Order, *, top_k: int = 0, weights_TK: Tensor | None = None, dtype: torch.dtype
) -> Tensor:
    """The sums [E, N] over the rows of each expert, weighted by weights [T, K] if there are any; in fp32 (fp64 for
    fp64), rounded once. d: rows [R, N], or with top_k the tokens [T, N]."""
    n_experts, width = order.offsets.shape[0] - 1, d.shape[1]
    d, block = last_dim_contiguous(d), min(64, next_power_of_2(operator.index(width)))
    sums = torch.empty((n_experts, width), dtype=dtype, device=d.device)
    launch(
        _sum_kernel, (n_experts * cdiv(width, block),), sums, d, order.slots, order.offsets, weights_TK, width,
        d.stride(0), top_k, tl.float64 if d.dtype == torch.float64 else tl.float32, 32, block, num_warps=4,
    )  # fmt: skip
    return sums
