"""GEMV: linear layers of one to three rows, as in decoding, at the speed of the memory. Without autograd.

    y = x W^T + b          or in one launch          h = act(x W^T + b) * (x Wu^T + bu)

Each program multiplies a few rows of W with every row of x in fp32: with so few rows tensor cores save nothing, and the
speed depends on the number of 16-byte loads in flight. Bytes: each weight once; every program reads x from the cache.

- Measured on an H200 in bf16 and a CUDA graph: [28672, 4096] takes 55 us (4.26 TB/s; cuBLAS 64 us), [4096, 4096] 9.5 us
  (13.6), [2048, 8192] 9.4 us (13.6).
- With several rows a thread sums the eight products of a load at once, so that few registers hold sums, and many
  programs fit. In us for 2 rows, 3 rows, and 2 by cuBLAS, whose GLU is another launch:

      [18432, 2560] as a GLU   25.1   26.6   28.2      [28672, 4096] as a GLU   59.1   63.1   57.7 to 64.4
      [12352, 2560]            16.7   18.6   19.3      [4096, 4096]             10.6   11.2   12.5
      [2560, 9216]             13.3   13.5   16.0      [4096, 14336]            32.3   32.6   31.8
      [2560, 4096]              6.6    6.8    9.5      [2048, 8192]             11.3   11.0   13.4

  A step of Qwen3.5-4B takes 2.64 ms for 2 rows, by cuBLAS 3.12; of an 8B 4.32 and 4.39, of a 1B 0.95 and 1.03.
- Three rows of large weights, unless columns left over make tiles small, and four rows of most weights are faster by
  cuBLAS: see `gemv_takes`. With 8 rows, a kernel of tensor cores like that of quantized.py took between 2 % more and
  10 % less than cuBLAS, each shape with its best tile.
- Weights of 8 bits (quantized.py) need as many instructions for half the bytes, so the next tiles are copied into
  shared memory while one is multiplied: an 8B layer takes 71 us in int8 and 69 us in fp8, without that 82 and 79 us.
- On Hopper a launch overlaps the end of the kernel before it (`overlaps_launches`): 3 % of the GEMVs of an 8B, 9 % of
  a 1B's. The first tile of a dense weight loads meanwhile: a 1B decodes 1,163 tokens/s, without that 1,116.
- On a CPU with AMX bf16 runs as torch.mv, which gives oneDNN the weight as its left matrix, where F.linear gives it the
  transposed weight as the right one: a token of SmolLM2-135M takes 25 ms of CPU time on one thread, by F.linear 36 ms.
  With AVX512_BF16 alone torch.mv is slower (52 ms), so other CPUs run F.linear.
"""

import torch
from torch import Tensor

from ligermodels.kernels._launch import launch
from ligermodels.kernels._math import unit
from ligermodels.kernels._triton import (
    cdiv,
    has_ptx,
    let_next_start,
    overlapping,
    overlaps_launches,
    tl,
    triton,
    use_triton,
    wait,
)


@triton.jit
def _gemv_kernel(
    y_ptr, x_ptr, w_ptr, s_ptr, b_ptr, w_stride, up_ptr, up_s_ptr, up_b_ptr, up_stride, N, K, y_stride,
    ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    PTX: tl.constexpr, NAME: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BN columns of y [ROWS, N]: x w^T + b, or with `up_ptr` act(x w^T + b) * (x up^T + b').

    s_ptr: one scale per row of w, or None. STAGES: tiles in flight; with one, the first loads while the kernel before
    this one ends. EVEN: BK divides K.
    """
    let_next_start(OVERLAP)
    GLU: tl.constexpr = up_ptr is not None
    at = tl.program_id(0) * BN + tl.arange(0, BN)
    cols = tl.arange(0, BK)
    rows = tl.minimum(at, N - 1).to(tl.int64)[:, None]
    w_ptr += rows * w_stride + cols[None, :]
    x_ptr += cols
    PACK: tl.constexpr = 8 if ROWS > 1 else 1
    totals = _zeros(ROWS, BN, BK // PACK)
    scale, bias = _load_row(s_ptr, at, N, 1.0), _load_row(b_ptr, at, N, 0.0)
    if GLU:
        up_ptr += rows * up_stride + cols[None, :]
        up_totals = _zeros(ROWS, BN, BK // PACK)
        up_scale, up_bias = _load_row(up_s_ptr, at, N, 1.0), _load_row(up_b_ptr, at, N, 0.0)
    first = 0
    if STAGES == 1:
        w = load(w_ptr, (cols < K)[None, :], EVEN)
        if GLU:
            up = load(up_ptr, (cols < K)[None, :], EVEN)
        wait(OVERLAP)
        totals = _added(totals, _to_fp32(w, PTX), x_ptr, K, cols < K, ROWS, PACK, EVEN)
        if GLU:
            up_totals = _added(up_totals, _to_fp32(up, PTX), x_ptr, K, cols < K, ROWS, PACK, EVEN)
        first = BK
    else:
        wait(OVERLAP)
    for k in tl.range(first, K, BK, num_stages=STAGES):
        inside = cols < K - k
        w = load(w_ptr + k, inside[None, :], EVEN)
        if GLU:
            up = load(up_ptr + k, inside[None, :], EVEN)
        totals = _added(totals, _to_fp32(w, PTX), x_ptr + k, K, inside, ROWS, PACK, EVEN)
        if GLU:
            up_totals = _added(up_totals, _to_fp32(up, PTX), x_ptr + k, K, inside, ROWS, PACK, EVEN)
    for r in tl.static_range(ROWS):
        y = tl.sum(totals[r], 1) * scale + bias
        if GLU:
            up = tl.sum(up_totals[r], 1) * up_scale + up_bias
            y, _, _ = unit(y, up, NAME, y_ptr.dtype.element_ty == tl.float32)
        tl.store(y_ptr + r * y_stride + at, y.to(y_ptr.dtype.element_ty), mask=at < N)


@triton.jit
def _zeros(ROWS: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr):
    """A tuple with a zero [BN, WIDTH] for each row."""
    totals = ()
    for _ in tl.static_range(ROWS):
        totals += (tl.zeros((BN, WIDTH), tl.float32),)  # type: ignore[assignment]
    return totals


@triton.jit
def _added(totals, w, x_ptr, K, inside, ROWS: tl.constexpr, PACK: tl.constexpr, EVEN: tl.constexpr):
    """`totals` plus w [BN, BK] times each row of x. PACK columns, which a thread loads at once, are summed."""
    sums = ()
    for r in tl.static_range(ROWS):
        x = load(x_ptr + r * K, inside, EVEN).to(tl.float32)[None, :]
        products = w * x
        if PACK > 1:
            products = tl.sum(tl.reshape(products, (w.shape[0], w.shape[1] // PACK, PACK)), 2)
        sums += (totals[r] + products,)  # type: ignore[assignment]
    return sums


@triton.constexpr_function
def _four_int8() -> str:
    """PTX that makes fp32 of four int8 q: q + 128 becomes the low mantissa bits of 2 ** 23, and 2 ** 23 + 128 is
    subtracted. Conversion instructions are slower: an H200 decodes 283 tokens/s of an 8B with them, 318 without."""
    numbers = " ".join(
        f"prmt.b32 t, w, 0x4B000000, {0x7440 + i}; mov.b32 a, t; sub.f32 a, a, 0f4B000080; mov.b32 ${i}, a;"
        for i in range(4)
    )
    return "{ .reg .b32 w; .reg .b32 t; .reg .f32 a; xor.b32 w, $4, 0x80808080; " + numbers + " }"


@triton.jit
def load(ptr, mask, EVEN: tl.constexpr):
    """tl.load; unless EVEN, with a mask, and 0 where it is False."""
    if EVEN:
        return tl.load(ptr)
    else:
        return tl.load(ptr, mask=mask, other=0.0)


@triton.jit
def _to_fp32(x, PTX: tl.constexpr):
    if PTX and x.dtype == tl.int8:
        return tl.inline_asm_elementwise(_four_int8(), "=r,=r,=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=4)
    else:
        return x.to(tl.float32)


@triton.jit
def _load_row(ptr, at, N, OTHER: tl.constexpr):
    """Scales or biases [BN] in fp32, or OTHER where there are none."""
    if ptr is not None:
        return tl.load(ptr + at, mask=at < N, other=OTHER).to(tl.float32)
    else:
        return OTHER


@triton.jit
def add_bias(y, b_ptr, at, N):
    if b_ptr is not None:
        y += tl.load(b_ptr + at, mask=at < N, other=0.0).to(tl.float32)
    return y


def gemv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, *, scale: Tensor | None = None,
    up: Tensor | None = None, up_bias: Tensor | None = None, up_scale: Tensor | None = None, activation: str = "",
) -> Tensor:  # fmt: skip
    """F.linear(x, weight, bias), with `up` act(F.linear(x, weight, bias)) * F.linear(x, up, up_bias): [..., N].

    x: [..., K], up to MAX_ROWS rows; weight, up: [N, K]; biases: [N] or None. `kernel_of` has returned "gemv". out: the
    memory of the result: [..., N], contiguous, or for x [T, K] columns of a buffer. scale, up_scale: fp32 [N], the
    scales of quantised weights (int8, fp8; see quantized.py), for one row. With `up`, the two products are not rounded
    before the activation. Weights, scales and biases must be older than the last launch that does not overlap, see
    `let_next_start`.
    """
    n, k = weight.shape
    y = x.new_empty(*x.shape[:-1], n) if out is None else out
    if not use_triton(x):  # one row
        row, place = x.reshape(-1), y.view(-1)
        torch.mv(weight, row, out=place) if bias is None else torch.addmv(bias, weight, row, out=place)
        return y
    rows, y_stride = x.numel() // k, n if y.dim() == 1 else y.stride(-2)
    choose_tile = _tile_of_rows if rows > 1 else _tile if up is None else _glu_tile
    bn, bk, warps, stages = choose_tile(n, k, weight.itemsize)
    overlap, up_stride = overlaps_launches(x), 0 if up is None else up.stride(0)
    launch(
        _gemv_kernel, (cdiv(n, bn),), y, x.contiguous(), weight, scale, bias, weight.stride(0), up, up_scale, up_bias,
        up_stride, n, k, y_stride, rows, bn, bk, stages, k % bk == 0, has_ptx(x), activation, overlap, num_warps=warps,
        **overlapping(overlap),
    )  # fmt: skip
    return y


MAX_ROWS = 3
"""Of x, for dense weights."""

_MANY = 8192
"""Elements of y from which on a multiprocessor gets many programs."""


def _tile(n: int, k: int, itemsize: int) -> tuple[int, int, int, int]:
    """(elements of y, columns of the weight per tile, warps, tiles in flight) of a program.

    A tile that reaches past the end of a row takes as long as a whole one: on an H200 in bf16, [12352, 2560] takes
    16.1 us in tiles of 512 columns, 20.6 in tiles of 2048. Few programs are faster with few tiles in a row:
    [2560, 9216] takes 13.6 us in tiles of 1024, 15.5 in tiles of 512.
    """
    if itemsize == 1:
        return 4, 1024, 2, 3
    if n >= _MANY and k % 1024:
        return 4, 512, 2, 1
    if cdiv(k, 1024) % 2 == 0:  # tiles of 2048 columns reach no farther than those of 1024
        return 4, 2048, 4, 1
    return (8, 1024, 8, 1) if k > 8192 else (4, 1024, 4, 1)


def _glu_tile(n: int, k: int, itemsize: int) -> tuple[int, int, int, int]:
    """As `_tile`, for each of the two weights."""
    if itemsize == 1:
        return 2, 512, 1, 4
    return (2, 1024, 4, 1) if k % 1024 == 0 else (2, 512, 2, 1)


def _tile_of_rows(n: int, k: int, itemsize: int) -> tuple[int, int, int, int]:
    """As `_tile`, for several rows of x and 16 bits, of one weight and of two."""
    return (2, 512, 2, 1) if n >= _MANY and k % 1024 else (2, 1024, 4, 1)


def gemv_takes(rows: int, n: int, k: int) -> bool:
    """True if `gemv` is as fast as cuBLAS or faster, for several rows and 16-bit weights with n rows together.

    Three rows on an H200, beside cuBLAS: [16384, 2048] as a GLU 8 % slower, [128256, 2048] 15 %, and a step of an 8B
    6 % if all layers are; but [12352, 2560] 2 % faster, [248320, 2560] 4 %, [4096, 4096] 10 %, [2560, 9216] 16 %.
    """
    return rows < 3 or n < _MANY or k % 1024 != 0
