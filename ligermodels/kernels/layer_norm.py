"""LayerNorm, and LayerNorm of a sum: the residual add of a transformer block fused into the norm that follows it.

    y = (x - mean(x)) * rsqrt(mean((x - mean(x))^2) + eps) * weight + bias            over the last dim, of width N

What differs from a plain fused LayerNorm is what differs in `rms_norm`, whose parts it shares: the sum is returned
and its gradient added in the kernel; the backward is persistent, sums dweight and dbias in a fixed order without
atomics, and leaves out what nobody asked for.
- The variance is that of the centred row, never mean(x^2) - mean(x)^2, which cancels. A row too wide for registers
  is read in blocks, whose means and centred squares are merged as Chan, Golub and LeVeque do it.

Saved for the backward: x (the sum, when there is one) and two fp32 numbers per row.
Bytes per element at 2-byte dtypes, which are the minimum: forward 4, backward 6; with the add 8 and 8.

Sources: Ba, Kiros and Hinton 2016, https://arxiv.org/abs/1607.06450; Chan, Golub and LeVeque 1983, "Algorithms for
computing the sample variance", https://doi.org/10.1080/00031305.1983.10483115.
"""

import operator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ligermodels.errors import InputError
from ligermodels.kernels._triton import accumulator, device_guard, last_dim_contiguous, num_sms, tl, triton, use_triton
from ligermodels.kernels.rms_norm import _check as _check_rows
from ligermodels.kernels.rms_norm import _load_sum, _load_weight, _rows, _rstd, _sum_partials_kernel, _tile


def layer_norm_reference(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    dtype = accumulator(x.dtype)
    weight, bias = (None if p is None else p.to(dtype) for p in (weight, bias))
    return F.layer_norm(x.to(dtype), x.shape[-1:], weight, bias, eps).to(x.dtype)


def add_layer_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return layer_norm_reference(total, weight, bias, eps=eps), total


@triton.jit
def _mean(total, count):
    """total / count, right to the last bit: rsqrt(eps) times its error is the error of a row of equal numbers."""
    if total.dtype == tl.float64:
        return total / count
    else:
        return tl.div_rn(total, count)


@triton.jit
def _load_bias(b_ptr, cols, mask, HAS_BIAS: tl.constexpr, ACC: tl.constexpr):
    if HAS_BIAS:
        return tl.load(b_ptr + cols, mask=mask, other=0.0).to(ACC)
    else:
        return tl.zeros(cols.shape, ACC)


@triton.jit(do_not_specialize=["n_rows"])
def _forward_kernel(
    y_ptr, total_ptr, mean_ptr, rstd_ptr, x_ptr, residual_ptr, w_ptr, b_ptr, n_rows, x_stride, residual_stride,
    eps: tl.constexpr, ADD: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows per program, or one row in two passes of BLOCK columns where N > BLOCK."""
    ACC: tl.constexpr = rstd_ptr.dtype.element_ty
    OUT: tl.constexpr = y_ptr.dtype.element_ty
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < n_rows
    offset_y = rows.to(tl.int64)[:, None] * N
    offset_x = rows.to(tl.int64)[:, None] * x_stride
    offset_residual = rows.to(tl.int64)[:, None] * residual_stride
    cols = tl.arange(0, BLOCK)
    if N <= BLOCK:
        mask = row_mask[:, None] & (cols < N)[None, :]
        w = _load_weight(w_ptr, cols, cols < N, 0.0, HAS_WEIGHT, ACC)
        b = _load_bias(b_ptr, cols, cols < N, HAS_BIAS, ACC)
        x = _load_sum(
            x_ptr + offset_x + cols, residual_ptr + offset_residual + cols, total_ptr + offset_y + cols,
            mask, ADD, ACC,
        )  # fmt: skip
        mean = _mean(tl.sum(x, 1), 1.0 * N)
        centred = tl.where(mask, x - mean[:, None], 0.0)
        rstd = _rstd(tl.sum(centred * centred, 1), N, eps, OUT)
        y = centred * rstd[:, None] * w[None, :] + b[None, :]
        tl.store(y_ptr + offset_y + cols, y.to(OUT), mask=mask)
    else:
        mean = tl.zeros([ROWS], ACC)
        squares = tl.zeros([ROWS], ACC)
        for start in range(0, N, BLOCK):
            at = start + cols
            mask = row_mask[:, None] & (at < N)[None, :]
            x = _load_sum(
                x_ptr + offset_x + at, residual_ptr + offset_residual + at, total_ptr + offset_y + at,
                mask, ADD, ACC,
            )  # fmt: skip
            share = tl.minimum(N - start, BLOCK).to(ACC)
            begun = tl.cast(start, ACC)
            mean_here = _mean(tl.sum(x, 1), share)
            centred = tl.where(mask, x - mean_here[:, None], 0.0)
            ahead = mean_here - mean
            mean += ahead * (share / (begun + share))
            squares += tl.sum(centred * centred, 1) + ahead * ahead * (begun * share / (begun + share))
        rstd = _rstd(squares, N, eps, OUT)
        tl.debug_barrier()  # the sum is read back below, maybe by other threads
        for start in range(0, N, BLOCK):
            at = start + cols
            mask = row_mask[:, None] & (at < N)[None, :]
            source = total_ptr + offset_y if ADD else x_ptr + offset_x
            x = tl.load(source + at, mask=mask, other=0.0, eviction_policy="evict_first").to(ACC)
            w = _load_weight(w_ptr, at, at < N, 0.0, HAS_WEIGHT, ACC)
            b = _load_bias(b_ptr, at, at < N, HAS_BIAS, ACC)
            y = (x - mean[:, None]) * rstd[:, None] * w[None, :] + b[None, :]
            tl.store(y_ptr + offset_y + at, y.to(OUT), mask=mask)
    tl.store(mean_ptr + rows, mean, mask=row_mask)
    tl.store(rstd_ptr + rows, rstd, mask=row_mask)


@triton.jit(do_not_specialize=["n_rows"])
def _backward_kernel(
    dx_ptr, dw_ptr, db_ptr, dy_ptr, dtotal_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr,
    n_rows, dy_stride, dtotal_stride, x_stride,
    ADD: tl.constexpr, HAS_WEIGHT: tl.constexpr, DX: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx = (g - mean(g) - x_hat * mean(g * x_hat)) * rstd + dtotal, g = dy * w; this program's part of dw and db."""
    ACC: tl.constexpr = rstd_ptr.dtype.element_ty
    cols = tl.arange(0, BLOCK)
    w = _load_weight(w_ptr, cols, cols < N, 0.0, HAS_WEIGHT, ACC)
    dw = tl.zeros([ROWS, BLOCK], ACC)
    db = tl.zeros([ROWS, BLOCK], ACC)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)
        mask = (rows < n_rows)[:, None] & (cols < N)[None, :]
        mean = tl.load(mean_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        rows = rows.to(tl.int64)[:, None]
        dy = tl.load(dy_ptr + rows * dy_stride + cols, mask=mask, other=0.0).to(ACC)
        if DX or DW:
            x_hat = (tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=0.0).to(ACC) - mean) * rstd
        if DW:
            dw += dy * x_hat
        if DB:
            db += dy
        if DX:
            g = dy * w[None, :]
            along = (tl.sum(g * x_hat, 1) * (1.0 / N))[:, None]
            dx = (g - (tl.sum(g, 1) * (1.0 / N))[:, None] - x_hat * along) * rstd
            if ADD:
                dx += tl.load(dtotal_ptr + rows * dtotal_stride + cols, mask=mask, other=0.0).to(ACC)
            tl.store(dx_ptr + rows * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    own = tl.program_id(0).to(tl.int64) * N + cols
    if DW:
        tl.store(dw_ptr + own, tl.sum(dw, 0), mask=cols < N)
    if DB:
        tl.store(db_ptr + own, tl.sum(db, 0), mask=cols < N)


@triton.jit(do_not_specialize=["n_rows"])
def _backward_wide_kernel(
    dx_ptr, dw_ptr, db_ptr, dy_ptr, dtotal_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr,
    n_rows, dy_stride, dtotal_stride, x_stride,
    ADD: tl.constexpr, HAS_WEIGHT: tl.constexpr, DX: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same for N > BLOCK: two passes over the columns, and dw and db kept in the memory of their parts."""
    ACC: tl.constexpr = rstd_ptr.dtype.element_ty
    first = tl.program_id(0)
    dw_ptr += first.to(tl.int64) * N
    db_ptr += first.to(tl.int64) * N
    for tile in tl.range(first, tl.cdiv(n_rows, ROWS), tl.num_programs(0), num_stages=1):
        rows = tile * ROWS + tl.arange(0, ROWS)
        row_mask = (rows < n_rows)[:, None]
        mean = tl.load(mean_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        rows = rows.to(tl.int64)[:, None]
        begun = tl.where(tile == first, 0, N)  # the first tile writes dw and db, so that no memory need be zeroed
        level = tl.zeros([ROWS, 1], ACC)
        along = tl.zeros([ROWS, 1], ACC)
        if DX:
            sums = tl.zeros([ROWS, BLOCK], ACC)
            products = tl.zeros([ROWS, BLOCK], ACC)
            for start in tl.range(0, N, BLOCK, num_stages=STAGES):
                cols = start + tl.arange(0, BLOCK)
                mask = row_mask & (cols < N)[None, :]
                w = _load_weight(w_ptr, cols, cols < N, 0.0, HAS_WEIGHT, ACC)
                x_hat = (tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=0.0).to(ACC) - mean) * rstd
                g = tl.load(dy_ptr + rows * dy_stride + cols, mask=mask, other=0.0).to(ACC) * w[None, :]
                sums += g
                products += g * x_hat
            level = (tl.sum(sums, 1) * (1.0 / N))[:, None]
            along = (tl.sum(products, 1) * (1.0 / N))[:, None]
        for start in tl.range(0, N, BLOCK, num_stages=STAGES):
            cols = start + tl.arange(0, BLOCK)
            mask = row_mask & (cols < N)[None, :]
            dy = tl.load(dy_ptr + rows * dy_stride + cols, mask=mask, other=0.0).to(ACC)
            if DX or DW:
                x_hat = (tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=0.0).to(ACC) - mean) * rstd
            if DX:
                w = _load_weight(w_ptr, cols, cols < N, 0.0, HAS_WEIGHT, ACC)
                dx = (dy * w[None, :] - level - x_hat * along) * rstd
                if ADD:
                    dx += tl.load(dtotal_ptr + rows * dtotal_stride + cols, mask=mask, other=0.0).to(ACC)
                tl.store(dx_ptr + rows * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            if DW:
                dw = tl.load(dw_ptr + cols, mask=cols < begun, other=0.0)
                tl.store(dw_ptr + cols, dw + tl.sum(dy * x_hat, 0), mask=cols < N)
            if DB:
                db = tl.load(db_ptr + cols, mask=cols < begun, other=0.0)
                tl.store(db_ptr + cols, db + tl.sum(dy, 0), mask=cols < N)
        tl.debug_barrier()  # the next tile reads dw and db back, maybe in other threads


_WIDEST = 16384, 8192  # columns of a row that one program holds in registers: forward, and backward with dw and db
_WIDE = 8192, 4096  # columns that a program takes at a time where rows are wider
_PIPELINE_BYTES = 48 * 1024 if torch.version.hip else 96 * 1024  # shared memory for loads in flight


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n_rows, width = x.shape[0], operator.index(x.shape[1])
    x = last_dim_contiguous(x)
    add = residual is not None
    dtype, other = x.dtype, x
    if residual is not None:
        dtype, other = torch.promote_types(x.dtype, residual.dtype), last_dim_contiguous(residual)
    y = torch.empty((n_rows, width), dtype=dtype, device=x.device)
    total = torch.empty_like(y) if add else x
    mean = torch.empty(n_rows, dtype=accumulator(dtype), device=x.device)
    rstd = torch.empty_like(mean)
    if n_rows:
        block, rows, warps = _tile(width) if width <= _WIDEST[0] else (_WIDE[0], 1, 16)
        with device_guard(x):
            _forward_kernel[(triton.cdiv(n_rows, rows),)](
                y, total, mean, rstd, x, other,
                x if weight is None else weight.contiguous(), x if bias is None else bias.contiguous(),
                n_rows, x.stride(0), other.stride(0),
                eps, add, weight is not None, bias is not None, width, block, rows, num_warps=warps,
            )  # fmt: skip
    return y, total, mean, rstd


def _backward(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
    need_dx: bool, dw_dtype: torch.dtype | None, db_dtype: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """dx, dw and db; a dtype that is None is a gradient that nobody needs."""
    n_rows, width = x.shape[0], operator.index(x.shape[1])
    dy = last_dim_contiguous(dy)
    add = dtotal is not None
    dtotal = dy if dtotal is None else last_dim_contiguous(dtotal)
    dx = torch.empty((n_rows, width), dtype=x.dtype, device=x.device) if need_dx else None
    dw, db = (None if d is None else torch.empty(width, dtype=d, device=x.device) for d in (dw_dtype, db_dtype))
    if not n_rows:
        return dx, None if dw is None else dw.zero_(), None if db is None else db.zero_()

    loads = x.element_size() + dy.element_size() + (dtotal.element_size() if add else 0)
    block, rows, warps = _tile(width)
    kernel, stage = _backward_kernel, rows * block * loads
    if width > _WIDEST[1] or stage > _PIPELINE_BYTES:
        # Two rows share each update of dw and db. Their second reading should find the rows of all programs in L2.
        block, rows, warps = _WIDE[1], 2 if width <= 32768 else 1, 16
        kernel, stage = _backward_wide_kernel, block * (rows * loads + 8 + 2 * rstd.element_size())
    programs = min(num_sms(x.device.index) * (16 // warps), triton.cdiv(n_rows, 4 * rows))
    parts = [rstd if g is None else torch.empty((programs, width), dtype=rstd.dtype, device=x.device) for g in (dw, db)]
    with device_guard(x):
        kernel[(programs,)](
            x if dx is None else dx, *parts, dy, dtotal, x, x if weight is None else weight.contiguous(), mean, rstd,
            n_rows, dy.stride(0), dtotal.stride(0), x.stride(0),
            add, weight is not None, need_dx, dw is not None, db is not None,
            width, block, rows, min(3, 1 + _PIPELINE_BYTES // stage), num_warps=warps,
        )  # fmt: skip
        for grad, part in zip((dw, db), parts, strict=True):
            if grad is not None:
                _sum_partials_kernel[(triton.cdiv(width, 64),)](grad, part, programs, width, 64, 32)
    return dx, dw, db


class _LayerNorm(torch.autograd.Function):
    """x, residual: [..., N]; weight, bias: [N] -> y [..., N], and with a residual also the sum [..., N].

    Rows are flattened in here: outside, each reshape would be a node of the graph for the host to walk over.
    """

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps):
        if not torch.compiler.is_compiling():  # Dynamo cannot trace it, and there no gradient is ever None
            ctx.set_materialize_grads(False)
        rows = None if residual is None else _rows(residual)
        y, total, mean, rstd = _forward(_rows(x), rows, weight, bias, eps)
        ctx.save_for_backward(total, weight, mean, rstd)
        ctx.dtypes = [None if t is None else t.dtype for t in (x, residual, weight, bias)]
        return y.view(x.shape) if residual is None else (y.view(x.shape), total.view(x.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dtotal=None):
        total, weight, mean, rstd = ctx.saved_tensors
        wanted = [dtype if need else None for dtype, need in zip(ctx.dtypes, ctx.needs_input_grad[:4], strict=True)]
        need_dx = wanted[0] is not None or wanted[1] is not None
        dx, dw, db = dtotal, None, None
        if dy is not None:
            dtotal = None if dtotal is None else _rows(dtotal)
            dx, dw, db = _backward(_rows(dy), dtotal, total, weight, mean, rstd, need_dx, *wanted[2:])
            dx = None if dx is None else dx.view(dy.shape)
        grads = [None if dx is None or dtype is None else dx.to(dtype) for dtype in wanted[:2]]
        return *grads, dw, db, None


def _check(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, where: str) -> None:
    _check_rows(x, residual, weight, "llama", where)
    if bias is not None and (bias.shape != x.shape[-1:] or bias.device != x.device):
        raise InputError(
            f"{where}: bias has shape {tuple(bias.shape)} on {bias.device}; the rows of x need ({x.shape[-1]},) on "
            f"{x.device}. Was the norm built for another width?"
        )


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """(x - mean) / std * weight + bias over the last dim; the statistics are fp32 (fp64 for fp64).

    x: [..., N]; weight, bias: [N] or None; eps: added to the variance, which is that of all N.
    Returns [..., N] of x's dtype, whatever the weight's.
    Raises InputError for shapes or devices that do not fit.
    """
    _check(x, None, weight, bias, "layer_norm")
    if not use_triton(x):
        return layer_norm_reference(x, weight, bias, eps=eps)
    return _LayerNorm.apply(x, None, weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """layer_norm(x + residual) and x + residual, in one pass.

    x, residual: [..., N]; weight, bias, eps: as in `layer_norm`. The sum is rounded to its dtype first and the norm
    reads the rounded sum, so that the result is that of the two ops one after the other.
    Returns both [..., N], in the dtype that x + residual has.
    Raises InputError for shapes or devices that do not fit.
    """
    _check(x, residual, weight, bias, "add_layer_norm")
    if not use_triton(x):
        return add_layer_norm_reference(x, residual, weight, bias, eps=eps)
    return _LayerNorm.apply(x, residual, weight, bias, eps)
