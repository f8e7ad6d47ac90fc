"""Quantising to FP8, by rows, by columns into transposed rows, and by one scale.

    x = q * scale        scale = max |x| / 448 (e4m3) or / 57,344 (e5m2), in fp32, of a row, a column or the tensor

Tensor cores of Hopper multiply rows of FP8 with rows of FP8: what a product sums over has to be contiguous in both of
its operands, and a scale belongs to a whole row. So the gradient of a weight, which sums over tokens, needs x and dy
transposed, with a scale for each column.

Bytes per element of x in 16 bits: by rows 3 (of more than 32,768 columns 5), transposed 5, since the maximum of a
column is known at its end; both at once 6; with a scale that is known, 3 and 4. Transposing what is in FP8 already
moves 2. Nothing synchronises, and nothing depends on the order of programs.

A row of zeros is a row of zeros. Where a scale is the maximum of a NaN or an infinity, all that it scales becomes NaN.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import as_rows, cdiv, next_power_of_2, tl, triton, use_triton

DTYPES = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}
"""{name: (dtype, its largest number)}."""
_TINY = 2.0**-100
"""What a maximum is at least: the scales of two rows of zeros have a product that fp32 represents."""
MULTIPLE = 16
"""cuBLAS takes FP8 matrices whose rows have a multiple of this number of elements."""


def scales_of(maxima: Tensor, largest: float, powers_of_two: bool) -> Tensor:
    """The scale for each maximum of |x|; powers_of_two: rounded up to one."""
    maxima = maxima.float().clamp_min(_TINY)
    scale = maxima / torch.full_like(maxima, largest)  # CUDA would multiply by the inverse of a number
    if not powers_of_two:
        return scale
    bits = (scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000
    return torch.where(scale.isfinite(), bits.view(torch.float32), scale)


def quantize_reference(x: Tensor, dtype: str, powers_of_two: bool, *, per_row: bool = True) -> tuple[Tensor, Tensor]:
    """(q, scale) of x [M, K]: scale [M, 1], or a scalar of all."""
    low, largest = DTYPES[dtype]
    x = x.float()
    scale = scales_of(x.abs().amax(1, keepdim=True) if per_row else x.abs().amax(), largest, powers_of_two)
    return (x * scale.reciprocal()).to(low).contiguous(), scale


@triton.jit
def _magnitude(x):
    """|x|, infinite for NaN, which a maximum could pass over."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def _scale_of(maximum, LARGEST: tl.constexpr, POWERS: tl.constexpr):
    scale = tl.div_rn(tl.maximum(maximum, 7.888609052210118e-31), LARGEST)  # 2 ** -100
    if POWERS:  # infinity stays itself
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _load_columns(x_ptr, factor_ptr, columns, K):
    x = tl.load(x_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)
    if factor_ptr is not None:
        x *= tl.load(factor_ptr + columns, mask=columns < K, other=0.0)
    return x


@triton.jit
def _rows_kernel(
    q_ptr, scale_ptr, x_ptr, factor_ptr, K, x_stride,
    LARGEST: tl.constexpr, POWERS: tl.constexpr, KNOWN: tl.constexpr, ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row. KNOWN: its scale is read, that of all rows. ONCE: BLOCK has all of its columns."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    q_ptr += row * K
    columns = tl.arange(0, BLOCK)
    if KNOWN:
        scale = tl.load(scale_ptr)
    else:
        if ONCE:
            maxima = _magnitude(_load_columns(x_ptr, factor_ptr, columns, K))
        else:
            maxima = tl.zeros([BLOCK], tl.float32)
            for start in range(0, K, BLOCK):
                maxima = tl.maximum(maxima, _magnitude(_load_columns(x_ptr, factor_ptr, start + columns, K)))
        scale = _scale_of(tl.max(maxima, 0), LARGEST, POWERS)
        tl.store(scale_ptr + row, scale)
    inverse = tl.div_rn(1.0, scale)
    if ONCE:
        x = _load_columns(x_ptr, factor_ptr, columns, K)
        tl.store(q_ptr + columns, (x * inverse).to(q_ptr.dtype.element_ty), mask=columns < K)
    else:
        for start in range(0, K, BLOCK):
            at = start + columns
            x = _load_columns(x_ptr, factor_ptr, at, K)
            tl.store(q_ptr + at, (x * inverse).to(q_ptr.dtype.element_ty), mask=at < K)


@triton.jit
def _maxima_kernel(part_ptr, x_ptr, T, K, x_stride, ROWS, BT: tl.constexpr, BK: tl.constexpr):
    """Maxima of BK columns over ROWS rows, a multiple of BT: a row of the parts [P, K]."""
    first, columns = tl.program_id(0) * ROWS, tl.program_id(1) * BK + tl.arange(0, BK)
    maxima = tl.zeros([BT, BK], tl.float32)
    for start in range(0, ROWS, BT):
        rows = first + start + tl.arange(0, BT)
        mask = (rows < T)[:, None] & (columns < K)[None, :]
        x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * x_stride + columns[None, :], mask=mask, other=0.0)
        maxima = tl.maximum(maxima, _magnitude(x.to(tl.float32)))
    tl.store(part_ptr + tl.program_id(0) * K + columns, tl.max(maxima, 0), mask=columns < K)


@triton.jit
def _both_maxima_kernel(
    scale_ptr, part_ptr, x_ptr, factor_ptr, T, K, x_stride,
    LARGEST: tl.constexpr, POWERS: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The scales of BT rows, whose columns are multiplied by the factors; and the maxima of the columns without these,
    a row of the parts [P, K]."""
    rows = tl.program_id(0) * BT + tl.arange(0, BT)
    of_rows = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    part_ptr += tl.program_id(0).to(tl.int64) * K
    maxima = tl.zeros([BT, BK], tl.float32)
    for start in range(0, K, BK):
        columns = start + tl.arange(0, BK)
        mask = (rows < T)[:, None] & (columns < K)[None, :]
        x = _magnitude(tl.load(of_rows + columns[None, :], mask=mask, other=0.0).to(tl.float32))
        tl.store(part_ptr + columns, tl.max(x, 0), mask=columns < K)
        if factor_ptr is not None:
            x *= tl.load(factor_ptr + columns, mask=columns < K, other=0.0)[None, :]
        maxima = tl.maximum(maxima, x)
    tl.store(scale_ptr + rows, _scale_of(tl.max(maxima, 1), LARGEST, POWERS), mask=rows < T)


@triton.jit
def _transpose_kernel(
    q_ptr, scale_ptr, x_ptr, part_ptr, rows_ptr, of_rows_ptr, factor_ptr, T, K, width, x_stride, P,
    LARGEST: tl.constexpr, POWERS: tl.constexpr, KNOWN: tl.constexpr, PARTS: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A tile of q [K, width], width >= T, from x [T, K]; zeros past T. PARTS: at least P, the rows of the parts.
    KNOWN: one scale is read. scale_ptr None: x is in FP8, and is only transposed.

    rows_ptr: x quantised by rows is written too, by the scales of the rows or the one that is known.
    """
    rows, columns = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1) * BK + tl.arange(0, BK)
    inside = columns < K
    at = x_ptr + rows.to(tl.int64)[:, None] * x_stride + columns[None, :]
    x = tl.load(at, mask=(rows < T)[:, None] & inside[None, :], other=0.0)
    if rows_ptr is not None:
        y = x.to(tl.float32)
        if factor_ptr is not None:
            y *= tl.load(factor_ptr + columns, mask=inside, other=0.0)[None, :]
        if KNOWN:
            y *= tl.div_rn(1.0, tl.load(scale_ptr))
        else:
            y *= tl.div_rn(1.0, tl.load(of_rows_ptr + rows, mask=rows < T, other=1.0))[:, None]
        out = rows_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :]
        tl.store(out, y.to(q_ptr.dtype.element_ty), mask=(rows < T)[:, None] & inside[None, :])
    if scale_ptr is not None:
        if KNOWN:
            x = x.to(tl.float32) * tl.div_rn(1.0, tl.load(scale_ptr))
        else:
            parts = tl.arange(0, PARTS)
            of_parts = part_ptr + parts[:, None] * K + columns[None, :]
            maxima = tl.load(of_parts, mask=(parts < P)[:, None] & inside[None, :], other=0.0)
            scale = _scale_of(tl.max(maxima, 0), LARGEST, POWERS)
            if tl.program_id(0) == 0:
                tl.store(scale_ptr + columns, scale, mask=inside)
            x = x.to(tl.float32) * tl.div_rn(1.0, scale)[None, :]
    out = q_ptr + columns.to(tl.int64)[None, :] * width + rows[:, None]
    tl.store(out, x.to(q_ptr.dtype.element_ty), mask=(rows < width)[:, None] & inside[None, :])


def _takes_triton(x: Tensor) -> bool:
    return use_triton(x) and not torch.compiler.is_compiling()  # there Inductor fuses the cast with what is before it


def quantize_rows(
    x: Tensor, dtype: str = "e4m3", *, powers_of_two: bool = False, factor: Tensor | None = None,
    scale: Tensor | None = None, out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(q [M, K], scale fp32 [M, 1]) of x [M, K], in which each row has a scale.

    dtype: of DTYPES. powers_of_two: scales are rounded up to one. factor: fp32 [K], by which columns are multiplied
    first. scale: a known one of all rows, 0-dim, which is then returned. out: where q and the scales are written,
    contiguous.
    """
    low, largest = DTYPES[dtype]
    if not _takes_triton(x):
        values = x.float() if factor is None else x.float() * factor
        if scale is None:
            q, of_rows = quantize_reference(values, dtype, powers_of_two)
        else:
            q, of_rows = (values * scale.reciprocal()).to(low).contiguous(), scale
        if out is None:
            return q, of_rows
        out[0].copy_(q)
        return out[0], scale if scale is not None else out[1].copy_(of_rows)
    x, rows, stride = as_rows(x)
    width, known = x.shape[-1], scale is not None
    q = torch.empty(rows, width, dtype=low, device=x.device) if out is None else out[0]
    if scale is None:
        scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device) if out is None else out[1]
    if rows:
        once = width <= 32768
        block = next_power_of_2(width) if once else 4096
        launch(
            _rows_kernel, (rows,), q, scale, x, factor, width, stride, largest, powers_of_two, known, once, block,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return q, scale


def quantize_transposed(
    x: Tensor, dtype: str = "e4m3", *, powers_of_two: bool = False, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(q [K, T'], scale fp32 [K, 1]) of the transposed x [T, K]; T' is T rounded up to a multiple of 16, with zeros.

    Arguments as in `quantize_rows`.
    """
    low, largest = DTYPES[dtype]
    (rows, width), known = x.shape, scale is not None
    padded = cdiv(rows, MULTIPLE) * MULTIPLE
    if not rows:
        ones = torch.ones(width, 1, device=x.device) if scale is None else scale
        return torch.empty(width, 0, dtype=low, device=x.device), ones
    if not _takes_triton(x):
        q, of_rows = quantize_rows(x.t(), dtype, powers_of_two=powers_of_two, scale=scale)
        return F.pad(q.view(torch.uint8), (0, padded - rows)).view(low).contiguous(), of_rows
    x, _, stride = as_rows(x)
    q, parts = torch.empty(width, padded, dtype=low, device=x.device), None
    if scale is None:
        scale = torch.empty(width, 1, dtype=torch.float32, device=x.device)
        parts = _maxima(x, rows, stride)
    if width:
        count = 0 if parts is None else parts.shape[0]
        launch(
            _transpose_kernel, (cdiv(padded, 64), cdiv(width, 64)), q, scale, x, parts, None, None, None, rows, width,
            padded, stride, count, largest, powers_of_two, known, next_power_of_2(max(count, 1)), 64, 64, num_warps=4,
        )  # fmt: skip
    return q, scale


def quantize_both(
    x: Tensor, dtype: str = "e4m3", *, powers_of_two: bool = False, factor: Tensor | None = None,
    scale: Tensor | None = None,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:  # fmt: skip
    """(`quantize_rows` of x [T, K] and the factor, `quantize_transposed` of x), to the bit."""
    options: Any = dict(powers_of_two=powers_of_two, scale=scale)
    if not _takes_triton(x) or not x.numel():
        return quantize_rows(x, dtype, factor=factor, **options), quantize_transposed(x, dtype, **options)
    low, largest = DTYPES[dtype]
    x, height, stride = as_rows(x)
    width, padded, known = x.shape[1], cdiv(height, MULTIPLE) * MULTIPLE, scale is not None
    rows, q = (torch.empty(shape, dtype=low, device=x.device) for shape in ((height, width), (width, padded)))
    parts, of_rows, of_columns = None, scale, scale
    if not known:
        of_rows, of_columns = (torch.empty(n, 1, dtype=torch.float32, device=x.device) for n in (height, width))
        of_programs = x.new_empty(cdiv(height, 32), width, dtype=torch.float32)
        launch(
            _both_maxima_kernel, (len(of_programs),), of_rows, of_programs, x, factor, height, width, stride, largest,
            powers_of_two, 32, 128, num_warps=4,
        )  # fmt: skip
        parts = of_programs.amax(0)
    launch(
        _transpose_kernel, (cdiv(padded, 64), cdiv(width, 64)), q, of_columns, x, parts, rows, of_rows, factor, height,
        width, padded, stride, 1, largest, powers_of_two, known, 1, 64, 64, num_warps=4,
    )  # fmt: skip
    return (rows, of_rows), (q, of_columns)  # type: ignore[return-value]


def _maxima(x: Tensor, rows: int, stride: int) -> Tensor:
    """The maxima of |x| [P, K] of parts of the rows, at most 64 parts."""
    width = x.shape[-1]
    step = max(128, cdiv(cdiv(rows, 64), 32) * 32)
    parts = torch.empty(cdiv(rows, step), width, dtype=torch.float32, device=x.device)
    grid = (parts.shape[0], cdiv(width, 128))
    launch(_maxima_kernel, grid, parts, x, rows, width, stride, step, 32, 128, num_warps=4)
    return parts


def tensor_scale(tensors: list[Tensor], dtype: str, powers_of_two: bool) -> Tensor:
    """One scale, 0-dim, of all elements of the tensors [M_i, K]."""
    maxima = []
    for x in tensors:
        if not x.numel():
            maxima.append(x.new_zeros(()))
        elif _takes_triton(x):
            x, rows, stride = as_rows(x)
            maxima.append(_maxima(x, rows, stride).amax())
        else:
            maxima.append(x.abs().amax())
    maximum = maxima[0] if len(maxima) == 1 else torch.stack(maxima).amax()
    return scales_of(maximum, DTYPES[dtype][1], powers_of_two)


def transposed(q: Tensor) -> Tensor:
    """The contiguous transpose [K, N] of q [N, K] in FP8, bit for bit."""
    if not _takes_triton(q):
        return q.t().contiguous()
    rows, width = q.shape
    bits, out = q.view(torch.uint8), torch.empty(width, rows, dtype=q.dtype, device=q.device)
    launch(
        _transpose_kernel, (cdiv(rows, 64), cdiv(width, 64)), out.view(torch.uint8), None, bits, None, None, None, None,
        rows, width, rows, width, 0, 1.0, False, False, 1, 64, 64, num_warps=4,
    )  # fmt: skip
    return out
