"""The host side of `rms_norm` and `layer_norm`: tile sizes, launches, the autograd.Function, checks.

y gets a recompute handle (`_recompute`), so that the linear layer that reads y need not save it. A gradient that nobody
needs is neither computed nor allocated. A contiguous x is not reshaped, because views cost host time.
"""

import functools
import operator

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._check import check_operand, describe
from ligermodels.kernels._gradients import sum_parts_kernel
from ligermodels.kernels._launch import launch
from ligermodels.kernels._recompute import attach
from ligermodels.kernels._triton import (
    FEW_ROWS,
    accumulator,
    apply,
    as_heads,
    as_rows,
    cdiv,
    heads_of,
    num_sms,
    once_differentiable,
    overlapping,
    overlaps_launches,
)
from ligermodels.kernels.norm._norm_kernels import backward_kernel, forward_kernel

MAX_WIDTH = 16384, 8192
"""Maximum row width that fits a program's registers, of RMSNorm and LayerNorm; wider rows run the reference."""
_PIPELINE_BYTES = 48 * 1024 if torch.version.hip else 96 * 1024  # shared memory for loads in flight


def _forward_tile(width: int, is_layer_norm: bool) -> tuple[int, int, int]:
    """(columns, rows, warps) of a program: 16 elements per thread, or 32 with LayerNorm's two synchronising sums."""
    block = 1 << (width - 1).bit_length()
    rows = max(1, 2048 // block)
    return block, rows, min(16, rows * block // (1024 if is_layer_norm else 512))


def _backward_tile(width: int, loads: int) -> tuple[int, int, int, int, int]:
    """(columns of the first and of the second tile of a row, rows, warps, programs per multiprocessor).

    Shared memory has to hold `loads` bytes per element. Rows of 1025 to 1536 columns are two tiles, since one tile of
    2048 would be mostly masked.
    """
    if 1024 < width <= 1536:
        return 1024, 512 if width > 1280 else 256, 1, 2, 6
    block = 1 << (width - 1).bit_length()
    if block <= 2048:  # above 32 rows a thread would sum more than 8 one after the other
        return block, 0, min(32, 4096 // block), 4, 2
    return block, 0, max(1, min(8192, _PIPELINE_BYTES // loads) // block), 8 if block <= 8192 else 16, 1


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float,
    is_layer_norm: bool, cast_before_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, x + residual or x, statistics of each row)."""
    shape, dtype, width, heads = x.shape, x.dtype, operator.index(x.shape[-1]), heads_of(x)
    x_rows, n_rows, *x_strides = as_heads(x, heads)
    other, other_stride = x_rows, x_strides[0]
    if residual is not None:
        dtype = dtype if residual.dtype == dtype else torch.promote_types(dtype, residual.dtype)
        other, _, other_stride = as_rows(residual)
    y = x.new_empty(shape, dtype=dtype)
    total = x if residual is None else torch.empty_like(y)
    stats = x.new_empty(n_rows * (1 + is_layer_norm), dtype=accumulator(dtype))
    if n_rows:
        block, rows, warps = _forward_tile(width, is_layer_norm)
        overlap = n_rows <= FEW_ROWS and overlaps_launches(x)
        launch(
            forward_kernel, (cdiv(n_rows, rows),), y, total, stats, x_rows, other,
            x_rows if weight is None else weight.contiguous(), x_rows if bias is None else bias.contiguous(),
            n_rows, *x_strides, other_stride, eps, offset, is_layer_norm, cast_before_weight, residual is not None,
            weight is not None, bias is not None, heads, width, block, rows, overlap,
            num_warps=warps, **overlapping(overlap),
        )  # fmt: skip
    return y, total, stats


def _backward(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor | None, stats: Tensor, offset: float,
    is_layer_norm: bool, need_dx: bool, dw_dtype: torch.dtype | None, db_dtype: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(dx, dw, db); dw_dtype, db_dtype None: not needed."""
    shape, width = dy.shape, operator.index(dy.shape[-1])
    heads = heads_of(x, dy)
    (x, n_rows, *x_strides), (dy, _, *dy_strides) = as_heads(x, heads), as_heads(dy, heads)
    add = dtotal is not None
    dtotal, _, dtotal_stride = (dy, n_rows, 0) if dtotal is None else as_rows(dtotal)
    dx = x.new_empty(shape) if need_dx else None
    dw = None if dw_dtype is None else x.new_empty(width, dtype=dw_dtype)
    db = None if db_dtype is None else x.new_empty(width, dtype=db_dtype)
    grads = [g for g in (dw, db) if g is not None]
    if not n_rows:
        for grad in grads:
            grad.zero_()
        return dx, dw, db

    loads = x.element_size() + dy.element_size() + (dtotal.element_size() if add else 0)
    block, rest, rows, warps, per_sm = _backward_tile(width, loads)
    stage = rows * (block + rest) * loads
    programs = min(num_sms(x.device.index) * per_sm, cdiv(n_rows, 4 * rows))
    parts = stats.new_empty(len(grads), programs, width) if grads else stats
    launch(
        backward_kernel, (programs,),
        x if dx is None else dx, parts, dy, dtotal, x, x if weight is None else weight.contiguous(), stats,
        n_rows, *dy_strides, dtotal_stride, *x_strides,
        offset, is_layer_norm, add, weight is not None, need_dx, dw is not None, db is not None,
        heads, width, block, rest, rows, min(3, 1 + _PIPELINE_BYTES // stage), num_warps=warps,
    )  # fmt: skip
    if grads:
        columns, at_once = (16, 128) if width <= 8192 else (64, 32)
        launch(
            sum_parts_kernel, (cdiv(width, columns), len(grads)),
            grads[0], grads[1] if len(grads) == 2 else None, parts, programs, width, columns, at_once,
        )  # fmt: skip
    return dx, dw, db


class Norm(torch.autograd.Function):
    """x, residual: [..., N]; weight, bias: [N] -> y [..., N], and with a residual also the sum [..., N].

    is_layer_norm: LayerNorm, else RMSNorm. cast_before_weight: rounded to the output's dtype before the weight as well.
    Saved for the backward: x (the sum, when there is one), the weight, and one fp32 number per row, of LayerNorm two.
    """

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, offset, is_layer_norm, cast_before_weight):
        if not torch.compiler.is_compiling():  # Dynamo cannot trace it, and there no gradient is ever None
            ctx.set_materialize_grads(False)
        y, total, stats = _forward(x, residual, weight, bias, eps, offset, is_layer_norm, cast_before_weight)
        ctx.save_for_backward(total, weight, stats)
        ctx.options = offset, is_layer_norm
        ctx.dtypes = [None if t is None else t.dtype for t in (x, residual, weight, bias)]
        return y if residual is None else (y, total)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dtotal=None):
        x, r, w, b = (t if need else None for t, need in zip(ctx.dtypes, ctx.needs_input_grad[:4], strict=True))
        need_dx = x is not None or r is not None
        dx, dw, db = dtotal, None, None
        if dy is not None:
            (total, weight, stats), (offset, is_layer_norm) = ctx.saved_tensors, ctx.options
            dx, dw, db = _backward(dy, dtotal, total, weight, stats, offset, is_layer_norm, need_dx, w, b)
        # Autograd casts dx to the dtype of each input.
        return *(None if t is None else dx for t in (x, r)), dw, db, None, None, None, None


def norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, *options: float
) -> tuple[Tensor, Tensor]:
    """(y, x + residual or x); options: eps, offset, is_layer_norm, cast_before_weight, as in `Norm`.

    The handle of y runs the kernel again on the stored sum. It gives the same bits, except where x and the residual
    differ in dtype: there the compiler may sum a row in another order.
    """
    output = apply(Norm, x, residual, weight, bias, *options)
    y, total = (output, x) if residual is None else output
    return attach(y, functools.partial(_recomputed, options), total, weight, bias), total


def _recomputed(options: tuple, total: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return _forward(total, None, weight, bias, *options)[0]


def check(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, where: str) -> None:
    if x.dim() == 0 or x.shape[-1] == 0 or not x.is_floating_point():
        raise InputError(f"{where}: x has {describe(x)}; expected floating point [..., N], N >= 1.")
    width = operator.index(x.shape[-1])  # a constexpr of the kernels: Dynamo must take it for a constant from here on
    if residual is not None:
        check_operand(where, "residual", residual, x.shape, "x", x)
    if weight is not None:
        check_operand(where, "weight", weight, (width,), "x", x)
    if bias is not None:
        check_operand(where, "bias", bias, (width,), "x", x)
