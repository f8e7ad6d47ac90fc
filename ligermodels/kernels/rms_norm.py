"""RMSNorm, and RMSNorm of a sum: the residual add of a transformer block fused into the norm that follows it.

    y = x * rsqrt(mean(x^2) + eps) * (offset + weight)                 over the last dim, of width N

What differs from a plain fused norm:
- `add_rms_norm` returns the sum as well, and its backward adds the gradient that arrives through the sum in
  the kernel that computes the norm's own; the two inputs share that one tensor.
- The backward is persistent: each program strides over the rows with its loads pipelined, keeps its share of
  dweight in registers, and a second kernel sums the shares in a fixed order (no atomics). Rows too wide for
  registers are read twice, the second time from the L2 cache.
- A frozen weight or a frozen input costs nothing in the backward.

Saved for the backward: x (the sum, when there is one) and one fp32 number per row.
Bytes per element at 2-byte dtypes, which are the minimum: forward 4, backward 6; with the add 8 and 8.

Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467. The two castings are those of LlamaRMSNorm
and GemmaRMSNorm in https://github.com/huggingface/transformers.
"""

import operator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ligermodels.errors import InputError
from ligermodels.kernels._triton import accumulator, device_guard, last_dim_contiguous, num_sms, tl, triton, use_triton


def rms_norm_reference(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, offset: float = 0.0, casting: str = "llama"
) -> Tensor:
    h = x.to(accumulator(x.dtype))
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    if casting == "llama":
        h = h.to(x.dtype)
    if weight is not None:
        h = h.to(accumulator(x.dtype)) * (offset + weight.to(accumulator(x.dtype)))
    return h.to(x.dtype)


def add_rms_norm_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "llama",
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm_reference(total, weight, eps=eps, offset=offset, casting=casting), total


@triton.jit
def _rstd(total, N: tl.constexpr, eps: tl.constexpr, dtype: tl.constexpr):
    """rsqrt(total / N + eps), one number per row, whose error the whole row inherits."""
    mean_square = total * (1.0 / N)
    if dtype == tl.float32:  # no later rounding hides the 2 ulp of the hardware's rsqrt
        return tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))
    elif dtype == tl.float64:
        return 1.0 / tl.sqrt(mean_square + eps)
    else:
        return tl.rsqrt(mean_square + eps)


@triton.jit
def _load_sum(x_ptr, residual_ptr, total_ptr, mask, ADD: tl.constexpr, ACC: tl.constexpr):
    """A tile of x in ACC; with ADD that of x + residual, rounded to the dtype it is stored in."""
    x = tl.load(x_ptr, mask=mask, other=0.0)
    if ADD:
        x = (x.to(ACC) + tl.load(residual_ptr, mask=mask, other=0.0).to(ACC)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr, x, mask=mask)
    return x.to(ACC)


@triton.jit
def _scaled(x_hat, w, HAS_WEIGHT: tl.constexpr, GEMMA: tl.constexpr, OUT: tl.constexpr):
    if HAS_WEIGHT:
        if not GEMMA:
            x_hat = x_hat.to(OUT).to(w.dtype)
        x_hat = x_hat * w
    return x_hat.to(OUT)


@triton.jit
def _load_weight(w_ptr, cols, mask, offset: tl.constexpr, HAS_WEIGHT: tl.constexpr, ACC: tl.constexpr):
    if HAS_WEIGHT:
        return tl.load(w_ptr + cols, mask=mask, other=0.0).to(ACC) + offset
    else:
        return tl.full(cols.shape, 1.0, ACC)


@triton.jit(do_not_specialize=["n_rows"])
def _forward_kernel(
    y_ptr, total_ptr, rstd_ptr, x_ptr, residual_ptr, w_ptr, n_rows, x_stride, residual_stride,
    eps: tl.constexpr, offset: tl.constexpr, GEMMA: tl.constexpr, ADD: tl.constexpr, HAS_WEIGHT: tl.constexpr,
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
        w = _load_weight(w_ptr, cols, cols < N, offset, HAS_WEIGHT, ACC)
        x = _load_sum(
            x_ptr + offset_x + cols, residual_ptr + offset_residual + cols, total_ptr + offset_y + cols,
            mask, ADD, ACC,
        )  # fmt: skip
        rstd = _rstd(tl.sum(x * x, 1), N, eps, OUT)
        y = _scaled(x * rstd[:, None], w[None, :], HAS_WEIGHT, GEMMA, OUT)
        tl.store(y_ptr + offset_y + cols, y, mask=mask)
    else:
        square = tl.zeros([ROWS, BLOCK], ACC)
        for start in range(0, N, BLOCK):
            at = start + cols
            x = _load_sum(
                x_ptr + offset_x + at, residual_ptr + offset_residual + at, total_ptr + offset_y + at,
                row_mask[:, None] & (at < N)[None, :], ADD, ACC,
            )  # fmt: skip
            square += x * x
        rstd = _rstd(tl.sum(square, 1), N, eps, OUT)
        tl.debug_barrier()  # the sum is read back below, maybe by other threads
        for start in range(0, N, BLOCK):
            at = start + cols
            mask = row_mask[:, None] & (at < N)[None, :]
            source = total_ptr + offset_y if ADD else x_ptr + offset_x
            x = tl.load(source + at, mask=mask, other=0.0, eviction_policy="evict_first").to(ACC)
            w = _load_weight(w_ptr, at, at < N, offset, HAS_WEIGHT, ACC)
            y = _scaled(x * rstd[:, None], w[None, :], HAS_WEIGHT, GEMMA, OUT)
            tl.store(y_ptr + offset_y + at, y, mask=mask)
    tl.store(rstd_ptr + rows, rstd, mask=row_mask)


@triton.jit(do_not_specialize=["n_rows"])
def _backward_kernel(
    dx_ptr, partial_ptr, dy_ptr, dtotal_ptr, x_ptr, w_ptr, rstd_ptr, n_rows, dy_stride, dtotal_stride, x_stride,
    offset: tl.constexpr, ADD: tl.constexpr, HAS_WEIGHT: tl.constexpr, DX: tl.constexpr, DW: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx = (g - x_hat * mean(g * x_hat)) * rstd + dtotal, with g = dy * w; this program's part of dw in row pid."""
    ACC: tl.constexpr = rstd_ptr.dtype.element_ty
    cols = tl.arange(0, BLOCK)
    w = _load_weight(w_ptr, cols, cols < N, offset, HAS_WEIGHT, ACC)
    dw = tl.zeros([ROWS, BLOCK], ACC)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)
        mask = (rows < n_rows)[:, None] & (cols < N)[None, :]
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        rows = rows.to(tl.int64)[:, None]
        x_hat = tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=0.0).to(ACC) * rstd
        dy = tl.load(dy_ptr + rows * dy_stride + cols, mask=mask, other=0.0).to(ACC)
        if DW:
            dw += dy * x_hat
        if DX:
            g = dy * w[None, :]
            dx = (g - x_hat * (tl.sum(g * x_hat, 1) * (1.0 / N))[:, None]) * rstd
            if ADD:
                dx += tl.load(dtotal_ptr + rows * dtotal_stride + cols, mask=mask, other=0.0).to(ACC)
            tl.store(dx_ptr + rows * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if DW:
        tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * N + cols, tl.sum(dw, 0), mask=cols < N)


@triton.jit(do_not_specialize=["n_rows"])
def _backward_wide_kernel(
    dx_ptr, partial_ptr, dy_ptr, dtotal_ptr, x_ptr, w_ptr, rstd_ptr, n_rows, dy_stride, dtotal_stride, x_stride,
    offset: tl.constexpr, ADD: tl.constexpr, HAS_WEIGHT: tl.constexpr, DX: tl.constexpr, DW: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same for N > BLOCK: two passes over the columns, and dw kept in the partial's own memory."""
    ACC: tl.constexpr = rstd_ptr.dtype.element_ty
    first = tl.program_id(0)
    dw_ptr = partial_ptr + first.to(tl.int64) * N
    for tile in tl.range(first, tl.cdiv(n_rows, ROWS), tl.num_programs(0), num_stages=1):
        rows = tile * ROWS + tl.arange(0, ROWS)
        row_mask = (rows < n_rows)[:, None]
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        rows = rows.to(tl.int64)[:, None]
        begun = tl.where(tile == first, 0, N)  # the first tile writes dw, so that no memory need be zeroed
        mean = tl.zeros([ROWS, 1], ACC)
        if DX:
            products = tl.zeros([ROWS, BLOCK], ACC)
            for start in tl.range(0, N, BLOCK, num_stages=STAGES):
                cols = start + tl.arange(0, BLOCK)
                mask = row_mask & (cols < N)[None, :]
                w = _load_weight(w_ptr, cols, cols < N, offset, HAS_WEIGHT, ACC)
                x_hat = tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=0.0).to(ACC) * rstd
                dy = tl.load(dy_ptr + rows * dy_stride + cols, mask=mask, other=0.0).to(ACC)
                products += dy * w[None, :] * x_hat
            mean = (tl.sum(products, 1) * (1.0 / N))[:, None]
        for start in tl.range(0, N, BLOCK, num_stages=STAGES):
            cols = start + tl.arange(0, BLOCK)
            mask = row_mask & (cols < N)[None, :]
            x_hat = tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=0.0).to(ACC) * rstd
            dy = tl.load(dy_ptr + rows * dy_stride + cols, mask=mask, other=0.0).to(ACC)
            if DX:
                w = _load_weight(w_ptr, cols, cols < N, offset, HAS_WEIGHT, ACC)
                dx = (dy * w[None, :] - x_hat * mean) * rstd
                if ADD:
                    dx += tl.load(dtotal_ptr + rows * dtotal_stride + cols, mask=mask, other=0.0).to(ACC)
                tl.store(dx_ptr + rows * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            if DW:
                dw = tl.load(dw_ptr + cols, mask=cols < begun, other=0.0)
                tl.store(dw_ptr + cols, dw + tl.sum(dy * x_hat, 0), mask=cols < N)
        tl.debug_barrier()  # the next tile reads dw back, maybe in other threads


@triton.jit(do_not_specialize=["n_partials"])
def _sum_partials_kernel(dw_ptr, partial_ptr, n_partials, N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], partial_ptr.dtype.element_ty)
    for start in range(0, n_partials, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < n_partials)[:, None] & (cols < N)[None, :]
        total += tl.load(partial_ptr + rows.to(tl.int64)[:, None] * N + cols, mask=mask, other=0.0)
    tl.store(dw_ptr + cols, tl.sum(total, 0).to(dw_ptr.dtype.element_ty), mask=cols < N)


_WIDEST = 16384  # columns of a row that one program holds in registers: 32 fp32 values per thread of 16 warps
_WIDE = 8192, 4096  # columns that a program takes at a time where rows are wider: forward, backward
_PIPELINE_BYTES = 48 * 1024 if torch.version.hip else 96 * 1024  # shared memory for loads in flight


def _tile(width: int) -> tuple[int, int, int]:
    """Columns, rows and warps of a program: 16 elements per thread, from 4 warps up; 32 in the widest rows."""
    block = triton.next_power_of_2(width)
    rows = max(1, 2048 // block)
    return block, rows, min(16, rows * block // 512)


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor, Tensor]:
    n_rows, width = x.shape[0], operator.index(x.shape[1])
    x = last_dim_contiguous(x)
    add = residual is not None
    dtype, other = x.dtype, x
    if residual is not None:
        dtype, other = torch.promote_types(x.dtype, residual.dtype), last_dim_contiguous(residual)
    y = torch.empty((n_rows, width), dtype=dtype, device=x.device)
    total = torch.empty_like(y) if add else x
    rstd = torch.empty(n_rows, dtype=accumulator(dtype), device=x.device)
    if n_rows:
        block, rows, warps = _tile(width) if width <= _WIDEST else (_WIDE[0], 1, 16)
        with device_guard(x):
            _forward_kernel[(triton.cdiv(n_rows, rows),)](
                y, total, rstd, x, other, x if weight is None else weight.contiguous(),
                n_rows, x.stride(0), other.stride(0),
                eps, offset, casting == "gemma", add, weight is not None,
                width, block, rows, num_warps=warps,
            )  # fmt: skip
    return y, total, rstd


def _backward(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float,
    need_dx: bool, need_dw: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    n_rows, width = x.shape[0], operator.index(x.shape[1])
    dy = last_dim_contiguous(dy)
    add = dtotal is not None
    dtotal = dy if dtotal is None else last_dim_contiguous(dtotal)
    dx = torch.empty((n_rows, width), dtype=x.dtype, device=x.device) if need_dx else None
    dw = torch.empty(width, dtype=weight.dtype, device=x.device) if weight is not None and need_dw else None
    if not n_rows:
        return dx, None if dw is None else dw.zero_()

    loads = x.element_size() + dy.element_size() + (dtotal.element_size() if add else 0)
    block, rows, warps = _tile(width)
    kernel, stage = _backward_kernel, rows * block * loads
    if width > _WIDEST or stage > _PIPELINE_BYTES:
        # Two rows share each update of dw. Their second reading should find the rows of all programs in L2.
        block, rows, warps = _WIDE[1], 2 if width <= 32768 else 1, 16
        kernel, stage = _backward_wide_kernel, block * (rows * loads + 8 + rstd.element_size())
    programs = min(num_sms(x.device.index) * (16 // warps), triton.cdiv(n_rows, 4 * rows))
    partial = rstd if dw is None else torch.empty((programs, width), dtype=rstd.dtype, device=x.device)
    with device_guard(x):
        kernel[(programs,)](
            x if dx is None else dx, partial, dy, dtotal, x, x if weight is None else weight.contiguous(), rstd,
            n_rows, dy.stride(0), dtotal.stride(0), x.stride(0),
            offset, add, weight is not None, need_dx, need_dw,
            width, block, rows, min(3, 1 + _PIPELINE_BYTES // stage), num_warps=warps,
        )  # fmt: skip
        if dw is not None:
            _sum_partials_kernel[(triton.cdiv(width, 64),)](dw, partial, programs, width, 64, 32)
    return dx, dw


class _RMSNorm(torch.autograd.Function):
    """x, residual: [..., N]; weight: [N] -> y [..., N], and with a residual also the sum [..., N].

    Rows are flattened in here: outside, each reshape would be a node of the graph for the host to walk over.
    """

    @staticmethod
    def forward(ctx, x, residual, weight, eps, offset, casting):
        if not torch.compiler.is_compiling():  # Dynamo cannot trace it, and there no gradient is ever None
            ctx.set_materialize_grads(False)
        y, total, rstd = _forward(_rows(x), None if residual is None else _rows(residual), weight, eps, offset, casting)
        ctx.save_for_backward(total, weight, rstd)
        ctx.offset = offset
        ctx.dtypes = x.dtype, x.dtype if residual is None else residual.dtype
        return y.view(x.shape) if residual is None else (y.view(x.shape), total.view(x.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dtotal=None):
        total, weight, rstd = ctx.saved_tensors
        need_x, need_residual, need_dw = ctx.needs_input_grad[:3]
        dx, dw = dtotal, None
        if dy is not None:
            dtotal = None if dtotal is None else _rows(dtotal)
            dx, dw = _backward(_rows(dy), dtotal, total, weight, rstd, ctx.offset, need_x or need_residual, need_dw)
            dx = None if dx is None else dx.view(dy.shape)
        grad_x = dx.to(ctx.dtypes[0]) if need_x and dx is not None else None
        grad_residual = dx.to(ctx.dtypes[1]) if need_residual and dx is not None else None
        return grad_x, grad_residual, dw, None, None, None


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _check(x: Tensor, residual: Tensor | None, weight: Tensor | None, casting: str, where: str) -> None:
    if casting not in ("llama", "gemma"):
        raise InputError(f"{where}: casting={casting!r}; supported are 'llama' and 'gemma'.")
    if x.dim() == 0 or x.shape[-1] == 0 or not x.is_floating_point():
        raise InputError(
            f"{where}: x has shape {tuple(x.shape)} and dtype {x.dtype}; expected floating point [..., N], N >= 1."
        )
    if residual is not None and (residual.shape != x.shape or not residual.is_floating_point()):
        raise InputError(
            f"{where}: residual has shape {tuple(residual.shape)} and dtype {residual.dtype}, x has shape "
            f"{tuple(x.shape)}; both must be floating point of one shape. Expand the smaller one first."
        )
    if weight is not None and weight.shape != x.shape[-1:]:
        raise InputError(
            f"{where}: weight has shape {tuple(weight.shape)}; the rows of x need ({x.shape[-1]},). "
            "Was the norm built for another hidden_size?"
        )
    operator.index(x.shape[-1])  # a constexpr of the kernels, which Dynamo must take for a constant from here on
    for name, other in (("residual", residual), ("weight", weight)):
        if other is not None and other.device != x.device:
            raise InputError(f"{where}: {name} is on {other.device}, x is on {x.device}. Move one of them.")


def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, offset: float = 0.0, casting: str = "llama"
) -> Tensor:
    """x / rms(x) * (offset + weight) over the last dim; the statistics are fp32 (fp64 for fp64).

    x: [..., N]; weight: [N] or None, then offset plays no part; eps: added to the mean square.
    casting: "llama" rounds x / rms(x) to x's dtype before the product with the weight, "gemma" does not.
    Returns [..., N] of x's dtype, whatever the weight's: with an fp32 weight and bf16 x that is what the next
    bf16 linear would read anyway.
    Raises InputError for shapes, devices or a casting that do not fit.
    """
    _check(x, None, weight, casting, "rms_norm")
    if not use_triton(x):
        return rms_norm_reference(x, weight, eps=eps, offset=offset, casting=casting)
    return _RMSNorm.apply(x, None, weight, eps, offset, casting)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "llama",
) -> tuple[Tensor, Tensor]:
    """rms_norm(x + residual) and x + residual, in one pass.

    x, residual: [..., N]; weight, eps, offset, casting: as in `rms_norm`. The sum is rounded to its dtype first
    and the norm reads the rounded sum, so that the result is that of the two ops one after the other.
    Returns both [..., N], in the dtype that x + residual has.
    Raises InputError for shapes, devices or a casting that do not fit.
    """
    _check(x, residual, weight, casting, "add_rms_norm")
    if not use_triton(x):
        return add_rms_norm_reference(x, residual, weight, eps=eps, offset=offset, casting=casting)
    return _RMSNorm.apply(x, residual, weight, eps, offset, casting)
