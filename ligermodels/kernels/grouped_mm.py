"""Matrix products of groups of rows, each with a matrix of its own; where the groups lie is known to the device alone.

    grouped_mm:        c[r] = a[r] @ b[e]                       for rows r in offsets[e] .. offsets[e + 1]
    grouped_mm_outer:  c[e] = a[those r].T @ b[those r]         so that an empty group gives zeros

What differs from a loop over groups: no host ever waits to learn the sizes, so that both can be captured in a CUDA
graph. The grid covers the most tiles that any split of the rows can need, and programs past the last tile end at
once. bf16 on Hopper and later goes to torch's grouped product (CUTLASS). Sums in fp32 (fp64 for fp64), in a fixed
order; fp32 inputs are multiplied as torch.backends.cuda.matmul.allow_tf32 says.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels._triton import device_guard, tl, triton

_TILES = {8: (16, 16, 16, 4, 1), 4: (64, 64, 32, 4, 3), 2: (128, 128, 64, 8, 3)}
"""Bytes per element -> BLOCK_M, BLOCK_N, BLOCK_K, warps, stages."""


@triton.jit
def _dot(a, b, acc, TF32: tl.constexpr):
    if acc.dtype == tl.float64:
        return acc + tl.sum(a[:, :, None] * b[None, :, :], 1)
    else:
        return tl.dot(a, b, acc, input_precision="tf32" if TF32 else "ieee")


@triton.jit
def _tile_of(pid, tiles_m, tiles_n, GROUP: tl.constexpr):
    """GROUP tiles of rows share the columns of b while these are in the L2 cache."""
    group = pid // (GROUP * tiles_n)
    size = tl.minimum(tiles_m - group * GROUP, GROUP)
    rest = pid % (GROUP * tiles_n)
    return group * GROUP + rest % size, rest // size


@triton.jit
def _rows_of(tile, offsets_ptr, E, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """Group, first row and end of a tile of rows, where every group begins a tile; no rows past the last tile."""
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
        acc = tl.zeros([BLOCK_M, BLOCK_N], ACC)
        for k in range(0, K, BLOCK_K):
            inside = at < K - k
            acc = _dot(
                tl.load(a + k, mask=(rows < end)[:, None] & inside[None, :], other=0.0),
                tl.load(
                    b + (k + at).to(tl.int64)[:, None] * b_stride_k,
                    mask=(cols < N)[None, :] & inside[:, None], other=0.0,
                ),
                acc, TF32,
            )  # fmt: skip
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


@torch.compiler.assume_constant_result
def _has_cutlass(index: int | None) -> bool:
    return torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability(index) >= (9, 0)


def _cutlass(a: Tensor, b: Tensor) -> bool:
    """True if torch's grouped product takes a and b: bf16, rows of 16 bytes, and a card that it is fast on."""
    return (
        a.dtype == torch.bfloat16
        and a.device.type == "cuda"
        and all(max(t.stride()[-2:]) % 8 == 0 and t.storage_offset() % 8 == 0 for t in (a, b))
        and _has_cutlass(a.device.index)
    )


def _options(a: Tensor) -> dict:
    tf32 = a.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    block_m, block_n, block_k, warps, stages = _TILES[a.element_size()]
    return dict(
        TF32=tf32, ACC=tl.float64 if a.dtype == torch.float64 else tl.float32,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """a: [R, K] contiguous; b: [E, K, N]; offsets: [E + 1] int32, from 0 to R. Returns [R, N] of a's dtype."""
    n_rows, (n_groups, k, n) = a.shape[0], b.shape
    if n_rows and _cutlass(a, b):
        return F.grouped_mm(a, b, offs=offsets[1:])
    c = torch.empty((n_rows, n), dtype=a.dtype, device=a.device)
    if n_rows:
        options = _options(a)
        tiles_m = triton.cdiv(n_rows, options["BLOCK_M"]) + n_groups - 1
        with device_guard(a):
            _rows_kernel[(tiles_m * triton.cdiv(n, options["BLOCK_N"]),)](
                c, a, b, offsets, tiles_m, n, k, a.stride(0), *b.stride(),
                E=n_groups, BLOCK_E=triton.next_power_of_2(n_groups), **options,
            )  # fmt: skip
    return c


def grouped_mm_outer(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """a: [R, M], b: [R, N], both contiguous; offsets: [E + 1] int32, from 0 to R. Returns [E, M, N] of a's dtype."""
    n_groups, (n_rows, m), n = offsets.shape[0] - 1, a.shape, b.shape[1]
    if n_rows and _cutlass(a, b):
        return F.grouped_mm(a.t(), b, offs=offsets[1:])
    c = torch.empty((n_groups, m, n), dtype=a.dtype, device=a.device)
    options = _options(a)
    tiles = triton.cdiv(m, options["BLOCK_M"]) * triton.cdiv(n, options["BLOCK_N"])
    with device_guard(a):
        _outer_kernel[(n_groups * tiles,)](c, a, b, offsets, m, n, a.stride(0), b.stride(0), **options)
    return c
