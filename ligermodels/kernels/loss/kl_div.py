"""Kullback-Leibler divergence, element by element: torch.nn.functional.kl_div in one kernel per direction.

    loss = t (log t - x)              d/dx = -t            d/dt = log t - x + 1
    loss = exp(t) (t - x)             d/dx = -exp(t)       d/dt = exp(t) (t - x + 1)         with log_target

for x = input, log-probabilities, and t = target, probabilities or, with log_target, log-probabilities.
Where the target's probability is 0, loss and gradients are 0, whatever x is there (torch has NaN where x is -inf).

Fused: the sum, its divisor and, in backward, the upstream gradient. Bytes per element at 2-byte dtypes, which are
the minimum: forward 4 (6 for reduction="none", whose output is a tensor), backward 4, because the gradient of x needs
t alone, and 8 with the gradient of t. Math in fp32 (fp64 for fp64).

Source: https://pytorch.org/docs/stable/generated/torch.nn.KLDivLoss.html.
"""

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._check import describe
from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import (
    accumulator,
    cdiv,
    last_dim_contiguous,
    num_sms,
    once_differentiable,
    tl,
    triton,
    use_triton,
)


def kl_div_reference(input: Tensor, target: Tensor, *, reduction: str = "mean", log_target: bool = False) -> Tensor:
    dtype = torch.promote_types(input.dtype, target.dtype)
    x, t = input.to(accumulator(dtype)), target.to(accumulator(dtype))
    p = t.exp() if log_target else t
    log_p = t if log_target else t.masked_fill(p == 0, 1).log()
    loss = p * (log_p.masked_fill(p == 0, 0) - x.masked_fill(p == 0, 0))
    return loss.to(dtype) if reduction == "none" else loss.sum() / _divisor(input, loss.numel(), reduction)


def _divisor(input: Tensor, size: int, reduction: str) -> int:
    return {"mean": size, "batchmean": input.shape[0] if input.dim() else 1}.get(reduction, 1)


@triton.jit
def probability(x, EXACT: tl.constexpr):
    """exp(x). EXACT, for results summed or stored in fp32: to a few ulp for any x.

    The hardware computes 2^u, and the rounding of u = x log2(e) alone costs |u| / 2 ulp. EXACT splits u: the first part
    is a product of 12 by 12 bits, without rounding; 2 to the power of the second, small part is a polynomial.
    """
    if x.dtype == tl.float64:
        p = tl.exp(x)
    elif EXACT:
        x = tl.maximum(x, -150.0, propagate_nan=tl.PropagateNan.ALL)  # -inf would be NaN in the second part
        high = (x.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)
        low = high * -1.7605286103664e-4 + (x - high) * 1.4426950408889634
        p = tl.exp2(high * 1.44287109375) * (1.0 + low * (0.69314718 + low * (0.24022651 + low * 0.05550411)))
    else:
        p = tl.exp2(x * 1.4426950408889634)  # tl.exp also computes subnormal results, which costs as much again
    return p


@triton.jit(do_not_specialize=["R", "count"])
def _kernel(x, t, dy, dx, dt, loss, x_stride, t_stride, R, N, count, SUM: tl.constexpr, LOG_TARGET: tl.constexpr,
            ITEMSIZE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Forward: from x and t [R, N] writes `loss`, [R, N] or, with SUM, one part of sum / count per program.
    Backward, where loss is None: from dy, [R, N] or with SUM one number, writes dx and dt; one of them may be None, and
    without dt also x. ITEMSIZE: of the dtype to which x and t are promoted.
    """
    DTYPE: tl.constexpr = tl.float64 if ITEMSIZE == 8 else tl.float32
    EXACT: tl.constexpr = ITEMSIZE == 4 or (loss is not None and SUM)
    per_row = tl.cast(tl.cdiv(N, BLOCK), tl.int32)
    columns = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], DTYPE)
    for tile in range(tl.program_id(0), per_row * R, tl.num_programs(0)):
        row, start = tl.cast(tile // per_row, tl.int64), tl.cast(tile % per_row, tl.int64) * BLOCK
        mask, at = columns < N - start, row * N + start
        z = tl.load(t + (row * t_stride + start) + columns, mask=mask, other=-float("inf") if LOG_TARGET else 0.0)
        z = z.to(DTYPE)
        p = probability(z, EXACT) if LOG_TARGET else z
        nothing = p == 0.0
        if x is not None:
            gap = z if LOG_TARGET else tl.log(tl.where(nothing, 1.0, z))
            gap -= tl.load(x + (row * x_stride + start) + columns, mask=mask, other=0.0).to(DTYPE)
        if loss is not None:
            value = tl.where(nothing, 0.0, p * gap)
            if SUM:
                total += value
            else:
                tl.store(loss + at + columns, value.to(loss.dtype.element_ty), mask=mask)
        else:
            if SUM:
                g = tl.load(dy).to(DTYPE) / tl.cast(count, DTYPE)
            else:
                g = tl.load(dy + at + columns, mask=mask, other=0.0).to(DTYPE)
            if dx is not None:
                tl.store(dx + at + columns, (-p * g).to(dx.dtype.element_ty), mask=mask)
            if dt is not None:
                slope = tl.where(nothing, 0.0, (p if LOG_TARGET else 1.0) * (gap + 1.0))
                tl.store(dt + at + columns, (slope * g).to(dt.dtype.element_ty), mask=mask)
    if loss is not None and SUM:
        tl.store(loss + tl.program_id(0), tl.sum(total, 0) / tl.cast(count, DTYPE))


def _block(width: int) -> int:
    """The smallest power of two >= width, within 16 .. 2048; a loop, so that torch.compile does not specialise
    width."""
    block = 16
    while block < min(width, 2048):
        block *= 2
    return block


class _KLDiv(torch.autograd.Function):
    """x and t have one shape. They are made rows here, inside of the node, so that the graph has no others."""

    @staticmethod
    def forward(ctx, x, t, divisor, reduction, log_target):
        dtype, shape, layout = torch.promote_types(x.dtype, t.dtype), x.shape, (0, 0, 1, x.numel())
        if not (x.is_contiguous() and t.is_contiguous()):
            x, t = (last_dim_contiguous(z.reshape(-1, shape[-1])) for z in (x, t))
            layout = x.stride(0), t.stride(0), *x.shape
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, t)
        ctx.shape, ctx.layout, ctx.dtypes = shape, layout, (x.dtype, t.dtype)
        size = 8 if dtype == torch.float64 else 4 if dtype == torch.float32 else 2
        ctx.options = reduction != "none", log_target, size
        ctx.divisor, block = divisor, _block(layout[3])
        programs = layout[2] * cdiv(layout[3], block)
        if reduction == "none":
            loss = torch.empty(shape, dtype=dtype, device=x.device)
        else:
            # 16 programs of 4 warps are what a multiprocessor runs at a time.
            programs = max(1, min(programs, 16 * num_sms(x.device.index)))
            loss = torch.empty(programs, dtype=accumulator(dtype), device=x.device)
        if programs:
            launch(_kernel, (programs,), x, t, None, None, None, loss, *layout, divisor, *ctx.options, block)
        return loss if reduction == "none" else loss.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, t = ctx.saved_tensors
        dx, dt = (
            torch.empty(ctx.shape, dtype=dtype, device=t.device) if needed else None
            for dtype, needed in zip(ctx.dtypes, ctx.needs_input_grad[:2], strict=True)
        )
        rows, width = ctx.layout[2:]
        block = _block(width)
        if rows * width:
            launch(
                _kernel, (rows * cdiv(width, block),),
                x, t, dy.contiguous(), dx, dt, None, *ctx.layout, ctx.divisor, *ctx.options, block,
            )  # fmt: skip
        return dx, dt, None, None, None


def kl_div(input: Tensor, target: Tensor, *, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """torch.nn.functional.kl_div(input, target), by the formula at the top of this file, for any shape and width.

    input: log-probabilities; target: probabilities or, with log_target, log-probabilities; both are broadcast to one
    shape and may differ in dtype. Gradients go to both where they are required. reduction: "mean" divides by the
    number of elements, "batchmean" by input.shape[0], which makes it the divergence of [tokens, V]; "sum" divides
    by nothing. Those three return an fp32 scalar (fp64 if either is fp64; torch rounds it to the inputs' dtype),
    NaN for the mean of nothing; "none" returns the elements, in the dtype torch promotes the inputs' dtypes to.

    Raises InputError for another reduction, a dtype that is no floating point, and shapes or devices that do not
    fit. Inputs that are not contiguous are read by rows, or copied where a row has gaps. On a GPU create_graph=True
    raises InputError.
    """
    if reduction not in ("mean", "sum", "batchmean", "none"):
        raise InputError(f"kl_div: reduction={reduction!r}; use 'mean', 'batchmean', 'sum' or 'none'.")
    if not (input.is_floating_point() and target.is_floating_point()) or input.device != target.device:
        raise InputError(
            f"kl_div: input has {describe(input)} and target {describe(target)}; expected floating point on one device."
        )
    x, t = input, target
    if input.shape != target.shape:
        try:
            x, t = torch.broadcast_tensors(input, target)
        except RuntimeError as error:
            raise InputError(
                f"kl_div: input {tuple(input.shape)} and target {tuple(target.shape)} do not broadcast to one shape. "
                "Are both shifted, and of one vocabulary?"
            ) from error
    if not use_triton(input):
        return kl_div_reference(input, target, reduction=reduction, log_target=log_target)
    return _KLDiv.apply(x, t, _divisor(input, x.numel(), reduction), reduction, log_target)
