"""Grouped matmuls over rows sorted by expert (`_order.py`).

    grouped_mm:        c[r] = scale * a[r] @ b[e] (+ low[r] @ low_b[e]) (+ bias[e])     for the rows r of expert e
    grouped_mm_outer:  c[e] = sum over the rows r of e of a[r].T @ b[r]                 zeros where e has no rows

Shapes, as in the suffixes of names: T tokens, K experts of each token, R = T K rows, E experts; M and N are any sizes.

What differs from a loop over experts:
- Only the device knows the offsets, so nothing synchronises, and a CUDA graph can capture it.
- `a` may be the tokens [T, M] instead of the rows: its rows are then gathered as they are loaded, so that no copy of
  them is written.
- On Hopper, in 16 bits, each multiprocessor runs one program, which loads the next tile while it stores the last; b,
  and an `a` of rows, are loaded by bulk copies (TMA).

The engines, by `_engine`: this kernel with TMA on Hopper; torch's grouped matmul (CUTLASS) for bf16 on datacenter
Blackwell; everywhere else the same kernel with plain loads. docs/operations.md has the table of what was measured.
Sums are fp32 (fp64 for fp64); fp32 factors are rounded to TF32 where torch.backends.cuda.matmul.allow_tf32 says so.
"""

import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import (
    HAS_TRITON,
    cdiv,
    cuda_capability,
    is_datacenter,
    last_dim_contiguous,
    next_power_of_2,
    num_sms,
    tl,
    triton,
)
from ligermodels.kernels.experts._order import TILE_ROWS, Order, dispatch

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor


class Low(NamedTuple):
    """A product of low rank to add: x [R, r], contiguous, times b [E, r, N], of x's dtype and any strides."""

    x: Tensor
    b: Tensor


@triton.jit
def _dot(a, b, acc, TF32: tl.constexpr):
    if acc.dtype == tl.float64:
        return acc + tl.sum(a[:, :, None] * b[None, :, :], 1)
    else:
        return tl.dot(a, b, acc, input_precision="tf32" if TF32 else "ieee")


@triton.jit
def _tile_of(pid, tiles_m, tiles_n):
    """(row tile, column tile): eight tiles of rows read the same columns of b from the L2 cache."""
    group = pid // (8 * tiles_n)
    size = tl.minimum(tiles_m - group * 8, 8)
    rest = pid % (8 * tiles_n)
    return group * 8 + rest % size, rest // size


@triton.jit
def _rows_kernel(
    c_ptr, a_ptr, b_ptr, a_tma, b_tma, slots_ptr, tiles_ptr, bias_ptr, low_ptr, low_b_ptr, scale,
    N, K, a_stride, b_stride_e, b_stride_k, b_stride_n, low_stride_e, low_stride_k, low_stride_n,
    TOP_K: tl.constexpr, RANK: tl.constexpr, SCALED: tl.constexpr, BY_ROWS: tl.constexpr,
    TF32: tl.constexpr, ACC: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Without a_tma or b_tma, plain loads from a_ptr and b_ptr. TOP_K: `a` has a row a token; 0: a row a row.
    BY_ROWS: b_tma is [E K, N], else [E N, K]."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_m = tl.load(tiles_ptr)
    for t in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = _tile_of(t, tiles_m, tiles_n)
        expert = tl.load(tiles_ptr + 3 + tile_m * 3)
        start = tl.load(tiles_ptr + 4 + tile_m * 3)
        end = tl.load(tiles_ptr + 5 + tile_m * 3)
        rows = start + tl.arange(0, BLOCK_M)
        inside = (rows < end)[:, None]
        source = rows
        if TOP_K:
            source = tl.load(slots_ptr + rows, mask=rows < end, other=0) // TOP_K
        first = tile_n * BLOCK_N
        cols = first + tl.arange(0, BLOCK_N)
        at = tl.arange(0, BLOCK_K)
        a = a_ptr + source.to(tl.int64)[:, None] * a_stride + at[None, :]
        b = b_ptr + expert.to(tl.int64) * b_stride_e + cols.to(tl.int64)[None, :] * b_stride_n
        b += at.to(tl.int64)[:, None] * b_stride_k
        acc = tl.zeros([BLOCK_M, BLOCK_N], ACC)
        for k in range(0, K, BLOCK_K):
            if a_tma is None:
                x = tl.load(a + k, mask=inside & (at < K - k)[None, :], other=0.0)
            else:
                x = a_tma.load([start, k])
            if b_tma is None:
                w = tl.load(b + k * b_stride_k, mask=(cols < N)[None, :] & (at < K - k)[:, None], other=0.0)
            elif BY_ROWS:
                w = b_tma.load([expert * K + k, first])
            else:
                w = b_tma.load([expert * N + first, k]).T
            acc = _dot(x, w, acc, TF32)
        if low_ptr is not None:
            for first_r in tl.static_range(0, RANK, BLOCK_R):
                r = first_r + tl.arange(0, BLOCK_R)
                low = low_ptr + rows.to(tl.int64)[:, None] * RANK + r[None, :]
                low = tl.load(low, mask=inside & (r < RANK)[None, :], other=0.0)
                low_b = low_b_ptr + expert.to(tl.int64) * low_stride_e + r[:, None] * low_stride_k
                low_b += cols.to(tl.int64)[None, :] * low_stride_n
                low_b = tl.load(low_b, mask=(cols < N)[None, :] & (r < RANK)[:, None], other=0.0)
                acc = _dot(low, low_b, acc, TF32)
        if SCALED:
            acc *= scale
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + expert.to(tl.int64) * N + cols, mask=cols < N, other=0.0).to(ACC)[None, :]
        c = c_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
        tl.store(c, acc.to(c_ptr.dtype.element_ty), mask=inside & (cols < N)[None, :])


@triton.jit
def _outer_kernel(
    c_ptr, a_ptr, b_ptr, b_tma, slots_ptr, offsets_ptr, M, N, a_stride, b_stride,
    E: tl.constexpr, TOP_K: tl.constexpr, TRANSPOSED: tl.constexpr, TF32: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """TOP_K: `a` has a row a token; 0: a row a row. TRANSPOSED: c is [E, N, M].

    b_tma also loads the first rows of the next expert, times the zeros of `a`: a NaN among them spreads.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for t in tl.range(tl.program_id(0), E * tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        expert = t // (tiles_m * tiles_n)
        tile_m, tile_n = _tile_of(t % (tiles_m * tiles_n), tiles_m, tiles_n)
        m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        end = tl.load(offsets_ptr + expert + 1)
        acc = tl.zeros([BLOCK_M, BLOCK_N], ACC)
        for start in range(tl.load(offsets_ptr + expert), end, BLOCK_K):
            rows = start + tl.arange(0, BLOCK_K)
            source = rows
            if TOP_K:
                source = tl.load(slots_ptr + rows, mask=rows < end, other=0) // TOP_K
            a = a_ptr + source.to(tl.int64)[:, None] * a_stride + m[None, :]
            a = tl.load(a, mask=(rows < end)[:, None] & (m < M)[None, :], other=0.0)
            if b_tma is None:
                b = b_ptr + rows.to(tl.int64)[:, None] * b_stride + n[None, :]
                b = tl.load(b, mask=(rows < end)[:, None] & (n < N)[None, :], other=0.0)
            else:
                b = b_tma.load([start, tile_n * BLOCK_N])
            acc = _dot(tl.trans(a), b, acc, TF32)
        c = c_ptr + expert.to(tl.int64) * M * N
        if TRANSPOSED:
            c += n.to(tl.int64)[None, :] * M + m[:, None]
        else:
            c += m.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(c, acc.to(c_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


_TILES = {8: (16, 16, 4, 1), 4: (64, 32, 4, 3), 2: (128, 64, 8, 3)}
"""Bytes per element -> columns of a tile, depth, warps, stages; TILE_ROWS has the rows."""
_DATACENTER_COLUMNS = 256
"""Columns for 2 bytes on data center GPUs, which have large shared memory: 6 to 37 % faster on an H200."""


def tile_rows(x: Tensor) -> int:
    """Rows of a tile of rows [R, M] of x's dtype."""
    return TILE_ROWS[x.element_size()]


def _engine(a: Tensor, b: Tensor) -> str:
    """The engine for rows a and a matrix of contiguous rows b: "tma", "cutlass" or "loads"."""
    if a.device.type != "cuda" or a.element_size() != 2 or not is_datacenter(a.device.index):
        return "loads"
    if any(t.stride(-1) != 1 or t.stride(-2) % 8 or t.data_ptr() % 16 for t in (a, b)):
        return "loads"
    if cuda_capability(a.device.index) // 10 == 9:
        return "tma"
    return "cutlass" if a.dtype == torch.bfloat16 else "loads"  # elsewhere it synchronises, and loops over the experts


def _options(a: Tensor, width: int, engine: str, stages: int) -> dict[str, Any]:
    """Options of a launch for rows `a` and results of `width` columns."""
    columns, depth, warps, few_stages = _TILES[a.element_size()]
    cuda = a.device.type == "cuda"
    if cuda and a.element_size() == 2 and is_datacenter(a.device.index):
        columns = _DATACENTER_COLUMNS
    return dict(
        TF32=cuda and torch.backends.cuda.matmul.allow_tf32,
        ACC=tl.float64 if a.dtype == torch.float64 else tl.float32,
        BLOCK_M=tile_rows(a), BLOCK_N=min(columns, max(16, next_power_of_2(width))), BLOCK_K=depth,
        FLATTEN=engine == "tma", num_warps=warps, num_stages=stages if engine == "tma" else few_stages,
    )  # fmt: skip


def _grid(a: Tensor, engine: str, tiles: int) -> tuple[int]:
    return (min(tiles, num_sms(a.device.index)) if engine == "tma" else tiles,)


def _rows(a: Tensor, b: Tensor, order: Order, top_k: int, bias: Tensor | None, low: Low | None, scale: float) -> Tensor:
    n_rows, (_, k, n) = order.slots.shape[0], b.shape
    c = torch.empty((n_rows, n), dtype=a.dtype, device=a.device)
    if not n_rows:
        return c
    a = last_dim_contiguous(a)
    by_rows = b.stride(2) == 1
    matrix = b if by_rows else b.transpose(1, 2)
    engine = _engine(a, matrix)
    if engine == "cutlass" and bias is None and low is None and scale == 1.0 and n % 8 == 0:
        return F.grouped_mm(dispatch(a, order.rows, top_k) if top_k else a, b, offs=order.offsets[1:])
    if engine == "cutlass" or k % 64 or n < 64 or not matrix.is_contiguous():
        engine = "loads"
    options = _options(a, n, engine, 4 if k < 1024 and low is None else 3)
    a_tma = b_tma = None
    if engine == "tma":
        depth, columns = options["BLOCK_K"], options["BLOCK_N"]
        b_tma = TensorDescriptor.from_tensor(matrix.flatten(0, 1), [depth, columns] if by_rows else [columns, depth])
        a_tma = None if top_k else TensorDescriptor.from_tensor(a, [options["BLOCK_M"], depth])
    rank = 0 if low is None else operator.index(low.x.shape[1])
    launch(
        _rows_kernel, _grid(a, engine, (order.tiles.shape[0] - 1) * cdiv(n, options["BLOCK_N"])),
        c, a, b, a_tma, b_tma, order.slots, order.tiles, bias, *((None, None) if low is None else low), scale,
        n, k, a.stride(0), *b.stride(), *((0, 0, 0) if low is None else low.b.stride()),
        top_k, rank, scale != 1.0, by_rows, BLOCK_R=min(64, max(16, next_power_of_2(rank))), **options,
    )  # fmt: skip
    return c


def _outer(a: Tensor, b: Tensor, order: Order, top_k: int, transposed: bool, dtype: torch.dtype) -> Tensor:
    n_experts, m, n = order.offsets.shape[0] - 1, a.shape[1], b.shape[1]
    a = last_dim_contiguous(a)
    engine = _engine(a, b)
    if engine == "cutlass" and order.slots.shape[0] and dtype == a.dtype and m % 8 == n % 8 == 0:
        a = dispatch(a, order.rows, top_k) if top_k else a
        a, b = (b, a) if transposed else (a, b)
        return F.grouped_mm(a.t(), b, offs=order.offsets[1:])
    if engine == "cutlass" or n < 64:
        engine = "loads"
    c = torch.empty((n_experts, n, m) if transposed else (n_experts, m, n), dtype=dtype, device=a.device)
    options = _options(a, n, engine, 6 if top_k else 4)
    tma = engine == "tma"
    b_tma = TensorDescriptor.from_tensor(b, [options["BLOCK_K"], options["BLOCK_N"]]) if tma else None
    tiles = n_experts * cdiv(m, options["BLOCK_M"]) * cdiv(n, options["BLOCK_N"])
    launch(
        _outer_kernel, _grid(a, engine, tiles),
        c, a, b, b_tma, order.slots, order.offsets, m, n, a.stride(0), b.stride(0),
        n_experts, top_k, transposed, **options,
    )  # fmt: skip
    return c


# torch.compile sees each matmul as one opaque op, because the choice of the engine cannot be traced.


@torch.library.custom_op("ligermodels::grouped_mm", mutates_args=())
def _rows_op(
    a: Tensor, b: Tensor, order: list[Tensor], top_k: int, bias: Tensor | None, low: list[Tensor], scale: float
) -> Tensor:
    return _rows(a, b, Order(*order), top_k, bias, Low(*low) if low else None, scale)


@_rows_op.register_fake
def _(a, b, order, top_k, bias, low, scale):
    return a.new_empty((order[0].shape[0], b.shape[2]))


@torch.library.custom_op("ligermodels::grouped_mm_outer", mutates_args=())
def _outer_op(a: Tensor, b: Tensor, order: list[Tensor], top_k: int, transposed: bool, dtype: torch.dtype) -> Tensor:
    return _outer(a, b, Order(*order), top_k, transposed, dtype)


@_outer_op.register_fake
def _(a, b, order, top_k, transposed, dtype):
    m, n = (b.shape[1], a.shape[1]) if transposed else (a.shape[1], b.shape[1])
    return a.new_empty((order[2].shape[0] - 1, m, n), dtype=dtype)


def grouped_mm(
    a: Tensor, b_EMN: Tensor, order: Order, *, top_k: int = 0, bias_EN: Tensor | None = None, low: Low | None = None,
    scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """[R, N] of a's dtype. a: rows [R, M], or with top_k the tokens [T, M]; b: [E, M, N]; order: of tiles of
    `tile_rows(a)`. scale: without low or a bias."""
    if torch.compiler.is_compiling():
        return _rows_op(a, b_EMN, list(order), top_k, bias_EN, list(low or ()), scale)
    return _rows(a, b_EMN, order, top_k, bias_EN, low, scale)


def grouped_mm_outer(
    a: Tensor, b_RN: Tensor, order: Order, *, top_k: int = 0, transposed: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """[E, M, N] of `dtype`, by default a's; transposed: [E, N, M]. a: rows [R, M], or with top_k the tokens [T, M];
    b: [R, N], contiguous."""
    options = top_k, transposed, dtype or a.dtype
    if torch.compiler.is_compiling():
        return _outer_op(a, b_RN, list(order), *options)
    return _outer(a, b_RN, order, *options)
