"""Grouped matmuls over rows sorted by expert (`_order.py`).

    grouped_mm:        c[r] = scale * a[r] @ b[e] (+ low[r] @ low_b[e]) (+ bias[e])     for the rows r of expert e
    grouped_mm_outer:  c[e] = sum over the rows r of e of a[r].T @ b[r]                 zeros where e has no rows

Shapes, as in the suffixes of names: T tokens, K experts of each token, R = T K rows, E experts; M and N are any sizes.

What differs from a loop over experts:
- Only the device knows the offsets, so nothing synchronises, and a CUDA graph can capture it.
- `a` may be the tokens [T, M] instead of the rows: its rows are then gathered as they are loaded, so that no copy of
  them is written.
- On Hopper, in 16 bits, each multiprocessor runs one program of grouped_mm, which loads the next tile while it stores
  the last; b, and an `a` of rows, are loaded by bulk copies (TMA).

Where torch's grouped matmul (CUTLASS) is faster, or as fast, it runs instead, after a copy of the rows: for bf16, on
datacenter Blackwell for all products, on Hopper for grouped_mm_outer, and for the first product of experts with many
rows. docs/operations.md has what was measured.
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
        # After the loop: Triton 3.6 computes wrong products where these loads stand before a flattened loop.
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
    c_ptr, a_ptr, b_ptr, slots_ptr, offsets_ptr, M, N, a_stride, b_stride,
    TOP_K: tl.constexpr, TRANSPOSED: tl.constexpr, TF32: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """TOP_K: `a` has a row a token; 0: a row a row. TRANSPOSED: c is [E, N, M]."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    expert = tl.program_id(0) // (tiles_m * tiles_n)
    tile_m, tile_n = _tile_of(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n)
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
        b = b_ptr + rows.to(tl.int64)[:, None] * b_stride + n[None, :]
        acc = _dot(
            tl.trans(tl.load(a, mask=(rows < end)[:, None] & (m < M)[None, :], other=0.0)),
            tl.load(b, mask=(rows < end)[:, None] & (n < N)[None, :], other=0.0),
            acc, TF32,
        )  # fmt: skip
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


_MANY_ROWS = 2048
"""Rows of an expert from which CUTLASS computes the first product faster than TMA, its copy of the rows included."""


def _aligned(*matrices: Tensor) -> bool:
    """True if bulk copies can read matrices: contiguous rows of whole 16 bytes."""
    return all(t.stride(-1) == 1 and t.stride(-2) % 8 == 0 and t.data_ptr() % 16 == 0 for t in matrices)


def _is_hopper(a: Tensor) -> bool:
    return cuda_capability(a.device.index) // 10 == 9


def _has_cutlass(a: Tensor) -> bool:
    """True if torch's grouped matmul runs CUTLASS for bf16; on other GPUs it loops over the experts, and synchronises.

    CUTLASS has no fp16.
    """
    return a.dtype == torch.bfloat16 and a.device.type == "cuda" and is_datacenter(a.device.index)


def _options(a: Tensor, width: int) -> dict[str, Any]:
    """Options of a launch for rows `a` and results of `width` columns."""
    columns, depth, warps, stages = _TILES[a.element_size()]
    cuda = a.device.type == "cuda"
    if cuda and a.element_size() == 2 and is_datacenter(a.device.index):
        columns = _DATACENTER_COLUMNS
    return dict(
        TF32=cuda and torch.backends.cuda.matmul.allow_tf32,
        ACC=tl.float64 if a.dtype == torch.float64 else tl.float32,
        BLOCK_M=tile_rows(a), BLOCK_N=min(columns, max(16, next_power_of_2(width))), BLOCK_K=depth,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _rows(
    a: Tensor, b: Tensor, order: Order, top_k: int, bias: Tensor | None, low: Low | None, scale: float | None
) -> Tensor:
    n_rows, (n_experts, k, n) = order.slots.shape[0], b.shape
    c = torch.empty((n_rows, n), dtype=a.dtype, device=a.device)
    if not n_rows:
        return c
    a, by_rows = last_dim_contiguous(a), b.stride(2) == 1
    matrix, plain = b if by_rows else b.transpose(1, 2), bias is None and low is None and scale is None
    large = k % 64 == 0 and n >= 64 and a.element_size() == 2 and a.device.type == "cuda" and matrix.is_contiguous()
    large = large and is_datacenter(a.device.index) and _aligned(a, matrix)
    tma, many = large and _is_hopper(a), top_k and not by_rows and n_rows >= _MANY_ROWS * n_experts
    if large and plain and n % 8 == 0 and _has_cutlass(a) and (many or not tma):
        return F.grouped_mm(dispatch(a, order, top_k) if top_k else a, b, offs=order.offsets[1:])
    options, a_tma, b_tma = _options(a, n), None, None
    tiles = (order.tiles.shape[0] - 1) * cdiv(n, options["BLOCK_N"])
    if tma:
        depth, columns = options["BLOCK_K"], options["BLOCK_N"]
        b_tma = TensorDescriptor.from_tensor(matrix.flatten(0, 1), [depth, columns] if by_rows else [columns, depth])
        a_tma = None if top_k else TensorDescriptor.from_tensor(a, [options["BLOCK_M"], depth])
        tiles = min(tiles, num_sms(a.device.index))
        options["num_stages"] = 4 if k < 1024 and low is None else 3
    rank = 0 if low is None else operator.index(low.x.shape[1])
    launch(
        _rows_kernel, (tiles,),
        c, a, b, a_tma, b_tma, order.slots, order.tiles, bias, *((None, None) if low is None else low),
        1.0 if scale is None else scale,
        n, k, a.stride(0), *b.stride(), *((0, 0, 0) if low is None else low.b.stride()),
        top_k, rank, scale is not None, by_rows,
        FLATTEN=tma, BLOCK_R=min(64, max(16, next_power_of_2(rank))), **options,
    )  # fmt: skip
    return c


def _outer(a: Tensor, b: Tensor, order: Order, top_k: int, transposed: bool, dtype: torch.dtype) -> Tensor:
    n_experts, m, n = order.offsets.shape[0] - 1, a.shape[1], b.shape[1]
    a = last_dim_contiguous(a)
    if min(m, n) >= 64 and m % 8 == n % 8 == 0 and dtype == a.dtype and _has_cutlass(a) and _aligned(a, b) and len(b):
        a = dispatch(a, order, top_k) if top_k else a
        a, b = (b, a) if transposed else (a, b)
        return F.grouped_mm(a.t(), b, offs=order.offsets[1:])
    c = torch.empty((n_experts, n, m) if transposed else (n_experts, m, n), dtype=dtype, device=a.device)
    options = _options(a, n)
    launch(
        _outer_kernel, (n_experts * cdiv(m, options["BLOCK_M"]) * cdiv(n, options["BLOCK_N"]),),
        c, a, b, order.slots, order.offsets, m, n, a.stride(0), b.stride(0), top_k, transposed, **options,
    )  # fmt: skip
    return c


# torch.compile sees each matmul as one opaque op, because the choice of the engine cannot be traced.


@torch.library.custom_op("ligermodels::grouped_mm", mutates_args=())
def _rows_op(
    a: Tensor, b: Tensor, order: list[Tensor], top_k: int, bias: Tensor | None, low: list[Tensor], scale: float | None
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
    scale: float | None = None,
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
