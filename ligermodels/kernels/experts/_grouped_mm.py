"""Rows sorted by expert, and grouped matmuls over them.

    grouped_mm:        c[r] = a[r] @ b[e]                     for the rows r of group e, offsets[e] .. offsets[e + 1]
    grouped_mm_outer:  c[e] = sum over r of a[r].T @ b[r]     zeros for an empty group

Shapes, as in the suffixes of names: T tokens, K experts of each token, R = T K rows, E experts, H hidden size; M and N
are any sizes.

What differs from a loop over groups:
- Only the device knows the offsets, so nothing synchronises, and a CUDA graph can capture it. The grid covers the
  maximum number of tiles of any split of the rows; programs past the last tile end at once.
- A stable counting sort in two kernels, without atomics.

bf16 on Hopper and datacenter Blackwell takes torch's grouped matmul (CUTLASS), as fast as one in Triton with TMA.
Sums are fp32 (fp64 for fp64); fp32 factors are rounded to TF32 where torch.backends.cuda.matmul.allow_tf32 says so.
"""

import operator

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels._launch import launch
from ligermodels.kernels._math import tile_at
from ligermodels.kernels._triton import cdiv, is_datacenter, last_dim_contiguous, next_power_of_2, tl, triton


@triton.jit
def _expert_at(experts_ptr, slots, n_slots, E: tl.constexpr):
    """(expert of each slot, clamped to [0, E); whether it was in [0, E))."""
    inside = slots < n_slots
    named = tl.load(experts_ptr + slots, mask=inside, other=-1)
    experts = tl.where(inside, tl.minimum(tl.maximum(named, 0), E - 1), -1)
    return experts, named == experts


@triton.jit(do_not_specialize=["n_slots", "share"])
def _count_kernel(counts_ptr, experts_ptr, n_slots, share, E: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr):
    """The number of slots of each expert in each program's share of the slots."""
    e = tl.arange(0, BLOCK_E)
    counts = tl.zeros([BLOCK_E], tl.int32)
    first = tl.program_id(0) * share
    for start in range(first, tl.minimum(first + share, n_slots), BLOCK):
        slots = start + tl.arange(0, BLOCK)
        experts, _ = _expert_at(experts_ptr, slots, n_slots, E)
        counts += tl.sum((experts[:, None] == e[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + tl.program_id(0) * BLOCK_E + e, counts)


@triton.jit(do_not_specialize=["n_slots", "share", "programs"])
def _place_kernel(
    slots_ptr, rows_ptr, offsets_ptr, counts_ptr, experts_ptr, n_slots, share, programs,
    E: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """A slot's row: the number of slots of lower experts, of its expert in earlier shares, and of its expert before
    it."""
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
        tl.store(offsets_ptr + e, ends - everywhere, mask=e < E)
        tl.store(offsets_ptr + E, n_slots)
    next_row = ends - everywhere + before
    first = pid * share
    for start in range(first, tl.minimum(first + share, n_slots), BLOCK):
        slots = start + tl.arange(0, BLOCK)
        experts, known = _expert_at(experts_ptr, slots, n_slots, E)
        here = (experts[:, None] == e[None, :]).to(tl.int32)
        rows = tl.sum(here * (next_row[None, :] + tl.cumsum(here, 0) - 1), 1)
        next_row += tl.sum(here, 0)
        tl.store(rows_ptr + slots, tl.where(known, rows, -1 - rows), mask=slots < n_slots)
        tl.store(slots_ptr + rows, slots, mask=slots < n_slots)


@triton.jit(do_not_specialize=["n_tokens"])
def _dispatch_kernel(
    out_ptr, x_ptr, rows_ptr, n_tokens, stride,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copies row t of x to the TOP_K rows of token t in out; unlike a gather, it reads x once."""
    tokens, cols, inside, mask = tile_at(n_tokens, WIDTH, BLOCK, ROWS)
    x = tl.load(x_ptr + tokens * stride + cols, mask=mask)
    for j in tl.static_range(TOP_K):
        rows = tl.load(rows_ptr + tokens * TOP_K + j, mask=inside, other=0).to(tl.int64)
        rows = tl.where(rows < 0, -1 - rows, rows)
        tl.store(out_ptr + rows * WIDTH + cols, x, mask=mask)


@triton.jit(do_not_specialize=["n_tokens"])
def _combine_kernel(
    y_ptr, out_ptr, rows_ptr, weights_ptr, n_tokens, WEIGHTED: tl.constexpr, ACC: tl.constexpr,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """y[t] = sum of the TOP_K rows of token t in out, WEIGHTED or not; NaN for an expert outside [0, E)."""
    tokens, cols, inside, mask = tile_at(n_tokens, WIDTH, BLOCK, ROWS)
    y = tl.zeros([ROWS, BLOCK], ACC)
    for j in tl.static_range(TOP_K):
        rows = tl.load(rows_ptr + tokens * TOP_K + j, mask=inside, other=0).to(tl.int64)
        out = tl.load(out_ptr + tl.maximum(rows, 0) * WIDTH + cols, mask=mask, other=0.0).to(ACC)
        out = tl.where(rows < 0, float("nan"), out)
        if WEIGHTED:
            out *= tl.load(weights_ptr + tokens * TOP_K + j, mask=inside, other=0.0).to(ACC)
        y += out
    tl.store(y_ptr + tokens * WIDTH + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


def _tile(width: int) -> tuple[int, int]:
    """(columns, rows) of a tile of 4096."""
    block = min(2048, next_power_of_2(width))
    return block, 4096 // block


def sort_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """experts: [T, K] -> slots [R], rows [R], offsets [E + 1], all int32.

    Slot t * K + j is token t's choice j. Row r, sorted by expert and then by slot, is slot slots[r]; slot s is row
    rows[s]; expert e has the rows offsets[e] .. offsets[e + 1]. A slot with an expert outside [0, E) is sorted to the
    nearest expert, with rows[s] = -1 - row, for which `combine` gives NaN.
    """
    n_slots = experts.numel()
    slots, rows = (torch.empty(n_slots, dtype=torch.int32, device=experts.device) for _ in range(2))
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=experts.device)
    if not n_slots:
        return slots, rows, offsets.zero_()
    block_e = next_power_of_2(num_experts)
    block = max(16, min(256, 8192 // block_e))
    share = cdiv(cdiv(n_slots, 256), block) * block  # 256 programs at most, who read all their counts
    programs = cdiv(n_slots, share)
    counts = torch.empty((programs, block_e), dtype=torch.int32, device=experts.device)
    launch(_count_kernel, (programs,), counts, experts, n_slots, share, num_experts, block, block_e, num_warps=4)
    launch(
        _place_kernel, (programs,),
        slots, rows, offsets, counts, experts, n_slots, share, programs,
        num_experts, block, block_e, max(1, 4096 // block_e), num_warps=4,
    )  # fmt: skip
    return slots, rows, offsets


def dispatch(x_TH: Tensor, rows: Tensor, top_k: int) -> Tensor:
    """x: [T, H] -> [R, H], each token's row copied to its top_k rows of the sorted order."""
    n_tokens, width = x_TH.shape[0], operator.index(x_TH.shape[1])
    x_TH = last_dim_contiguous(x_TH)
    x_RH = torch.empty((rows.shape[0], width), dtype=x_TH.dtype, device=x_TH.device)
    if n_tokens:
        block, tokens = _tile(width)
        launch(
            _dispatch_kernel, (cdiv(n_tokens, tokens) * cdiv(width, block),),
            x_RH, x_TH, rows, n_tokens, x_TH.stride(0), top_k, width, block, tokens, num_warps=4,
        )  # fmt: skip
    return x_RH


def combine(y_RH: Tensor, rows: Tensor, top_k: int, weights_TK: Tensor | None = None) -> Tensor:
    """y: [R, H] in the sorted order -> [T, H], the sum of each token's rows, weighted by weights [T, K] if there are
    any."""
    n_tokens, width = rows.shape[0] // top_k, operator.index(y_RH.shape[1])
    y_TH = torch.empty((n_tokens, width), dtype=y_RH.dtype, device=y_RH.device)
    if n_tokens:
        block, tokens = _tile(width)
        launch(
            _combine_kernel, (cdiv(n_tokens, tokens) * cdiv(width, block),),
            y_TH, y_RH, rows, y_RH if weights_TK is None else weights_TK, n_tokens, weights_TK is not None,
            tl.float64 if y_RH.dtype == torch.float64 else tl.float32, top_k, width, block, tokens, num_warps=8,
        )  # fmt: skip
    return y_TH


_TILES = {8: (16, 16, 16, 4, 1), 4: (64, 64, 32, 4, 3), 2: (128, 128, 64, 8, 3)}
"""Bytes per element -> BLOCK_M, BLOCK_N, BLOCK_K, warps, stages."""
_DATACENTER_TILE = (128, 256, 64, 8, 3)
"""The same for 2 bytes on data center GPUs with large shared memory: 6 to 37 % faster on an H200."""


@triton.jit
def _dot(a, b, acc, TF32: tl.constexpr):
    if acc.dtype == tl.float64:
        return acc + tl.sum(a[:, :, None] * b[None, :, :], 1)
    else:
        return tl.dot(a, b, acc, input_precision="tf32" if TF32 else "ieee")


@triton.jit
def _tile_of(pid, tiles_m, tiles_n, GROUP: tl.constexpr):
    """(row tile, column tile): GROUP tiles of rows read the same columns of b from the L2 cache."""
    group = pid // (GROUP * tiles_n)
    size = tl.minimum(tiles_m - group * GROUP, GROUP)
    rest = pid % (GROUP * tiles_n)
    return group * GROUP + rest % size, rest // size


@triton.jit
def _rows_of(tile, offsets_ptr, E, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """(group, first row, end) of a tile of rows; each group starts a new tile; past the last tile there are no rows."""
    e = tl.arange(0, BLOCK_E)
    first = tl.load(offsets_ptr + e, mask=e < E, other=0)
    end = tl.load(offsets_ptr + e + 1, mask=e < E, other=0)
    tiles = (end - first + BLOCK_M - 1) // BLOCK_M
    last_tile = tl.cumsum(tiles, 0)
    group = tl.sum((last_tile <= tile).to(tl.int32), 0)
    start = tl.sum(tl.where(e == group, first + (tile - last_tile + tiles) * BLOCK_M, 0), 0)
    return group, start, tl.sum(tl.where(e == group, end, 0), 0)


@triton.jit(do_not_specialize=["tiles_m"])
def _rows_kernel(
    c_ptr, a_ptr, b_ptr, offsets_ptr, tiles_m, N, K, a_stride, b_stride_e, b_stride_k, b_stride_n,
    E: tl.constexpr, TF32: tl.constexpr, ACC: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = _tile_of(tl.program_id(0), tiles_m, tl.cdiv(N, BLOCK_N), 8)
    group, start, end = _rows_of(tile_m, offsets_ptr, E, BLOCK_M, BLOCK_E)
    if start < end:
        rows = start + tl.arange(0, BLOCK_M)
        cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        at = tl.arange(0, BLOCK_K)
        a = a_ptr + rows.to(tl.int64)[:, None] * a_stride + at[None, :]
        b = b_ptr + group.to(tl.int64) * b_stride_e + cols.to(tl.int64)[None, :] * b_stride_n
        b += at.to(tl.int64)[:, None] * b_stride_k
        acc = tl.zeros([BLOCK_M, BLOCK_N], ACC)
        for k in range(0, K, BLOCK_K):
            inside = at < K - k
            acc = _dot(
                tl.load(a, mask=(rows < end)[:, None] & inside[None, :], other=0.0),
                tl.load(b, mask=(cols < N)[None, :] & inside[:, None], other=0.0),
                acc, TF32,
            )  # fmt: skip
            a += BLOCK_K
            b += tl.cast(BLOCK_K, tl.int64) * b_stride_k
        c = c_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
        tl.store(c, acc.to(c_ptr.dtype.element_ty), mask=(rows < end)[:, None] & (cols < N)[None, :])


@triton.jit
def _outer_kernel(
    c_ptr, a_ptr, b_ptr, offsets_ptr, M, N, a_stride, b_stride, TF32: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (tiles_m * tiles_n)
    tile_m, tile_n = _tile_of(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, 8)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    end = tl.load(offsets_ptr + group + 1)
    acc = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for start in range(tl.load(offsets_ptr + group), end, BLOCK_K):
        rows = start + tl.arange(0, BLOCK_K)
        at = rows.to(tl.int64)[:, None]
        a = tl.load(a_ptr + at * a_stride + m[None, :], mask=(rows < end)[:, None] & (m < M)[None, :], other=0.0)
        b = tl.load(b_ptr + at * b_stride + n[None, :], mask=(rows < end)[:, None] & (n < N)[None, :], other=0.0)
        acc = _dot(tl.trans(a), b, acc, TF32)
    c = c_ptr + (group.to(tl.int64) * M + m[:, None]) * N + n[None, :]
    tl.store(c, acc.to(c_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def _cutlass(a: Tensor, b: Tensor) -> bool:
    """True if torch's grouped matmul (CUTLASS) runs: for bf16, with rows of whole 16 bytes.

    On other GPUs it synchronises with the host and loops over the groups.
    """
    return (
        a.dtype == torch.bfloat16
        and a.device.type == "cuda"
        and b.shape[-1] % 8 == 0  # or the rows of the result are padded
        and all(max(t.stride()[-2:]) % 8 == 0 and t.data_ptr() % 16 == 0 for t in (a, b))
        and is_datacenter(a.device.index)
    )


def _options(a: Tensor) -> dict:
    cuda = a.device.type == "cuda"
    datacenter = cuda and a.element_size() == 2 and is_datacenter(a.device.index)
    block_m, block_n, block_k, warps, stages = _DATACENTER_TILE if datacenter else _TILES[a.element_size()]
    return dict(
        TF32=cuda and torch.backends.cuda.matmul.allow_tf32,
        ACC=tl.float64 if a.dtype == torch.float64 else tl.float32,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _rows(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    n_rows, (n_groups, k, n) = a.shape[0], b.shape
    if n_rows and _cutlass(a, b):
        return F.grouped_mm(a, b, offs=offsets[1:])
    c = torch.empty((n_rows, n), dtype=a.dtype, device=a.device)
    if n_rows:
        options = _options(a)
        tiles_m = cdiv(n_rows, options["BLOCK_M"]) + n_groups - 1
        launch(
            _rows_kernel, (tiles_m * cdiv(n, options["BLOCK_N"]),),
            c, a, b, offsets, tiles_m, n, k, a.stride(0), *b.stride(),
            E=n_groups, BLOCK_E=next_power_of_2(n_groups), **options,
        )  # fmt: skip
    return c


def _outer(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    n_groups, (n_rows, m), n = offsets.shape[0] - 1, a.shape, b.shape[1]
    if n_rows and _cutlass(a, b):
        return F.grouped_mm(a.t(), b, offs=offsets[1:])
    c = torch.empty((n_groups, m, n), dtype=a.dtype, device=a.device)
    options = _options(a)
    tiles = cdiv(m, options["BLOCK_M"]) * cdiv(n, options["BLOCK_N"])
    launch(_outer_kernel, (n_groups * tiles,), c, a, b, offsets, m, n, a.stride(0), b.stride(0), **options)
    return c


# torch.compile sees each matmul as one opaque op, because the choice of the engine cannot be traced.


@torch.library.custom_op("ligermodels::grouped_mm", mutates_args=())
def _rows_op(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return _rows(a, b, offsets)


@_rows_op.register_fake
def _(a, b, offsets):
    return a.new_empty((a.shape[0], b.shape[2]))


@torch.library.custom_op("ligermodels::grouped_mm_outer", mutates_args=())
def _outer_op(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return _outer(a, b, offsets)


@_outer_op.register_fake
def _(a, b, offsets):
    return a.new_empty((offsets.shape[0] - 1, a.shape[1], b.shape[1]))


def grouped_mm(a_RM: Tensor, b_EMN: Tensor, offsets: Tensor) -> Tensor:
    """a: [R, M] contiguous; b: [E, M, N]; offsets: [E + 1] int32, from 0 to R. Returns [R, N] of a's dtype."""
    return (_rows_op if torch.compiler.is_compiling() else _rows)(a_RM, b_EMN, offsets)


def grouped_mm_outer(a_RM: Tensor, b_RN: Tensor, offsets: Tensor) -> Tensor:
    """a: [R, M], b: [R, N], both contiguous; offsets: [E + 1] int32, from 0 to R. Returns [E, M, N] of a's dtype."""
    return (_outer_op if torch.compiler.is_compiling() else _outer)(a_RM, b_RN, offsets)
