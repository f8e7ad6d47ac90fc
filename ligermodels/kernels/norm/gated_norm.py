"""RMSNorm of each head, times silu of a gate: the output norm of a gated delta rule.

    y = x * rsqrt(mean(x^2) + eps) * weight * silu(z)                 over the last dim, of width N

The norm comes before the gate; the normed x is rounded to its dtype before the weight, as Llama's. The backward reads
x, z and dy alone, and sums dweight in a fixed order, without atomics.

Bytes per element at 2-byte dtypes, the minimum: forward 6, backward 10.

Source: Qwen3-Next's gated norm in https://github.com/huggingface/transformers.
"""

import operator

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._check import check_operand, describe
from ligermodels.kernels._gradients import sum_parts_kernel
from ligermodels.kernels._launch import launch
from ligermodels.kernels._math import activation, head_rows
from ligermodels.kernels._triton import (
    FEW_ROWS,
    accumulator,
    as_heads,
    cdiv,
    heads_of,
    next_power_of_2,
    num_sms,
    once_differentiable,
    overlapping,
    overlaps_launches,
    tl,
    triton,
    use_triton,
    wait_for_previous,
)

MAX_WIDTH = 8192
"""Maximum N that fits a program's registers; wider rows run the reference."""


def gated_norm_reference(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    dtype = accumulator(x.dtype)
    h = x.to(dtype)
    h = (h * (h.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)
    return (h.to(dtype) * weight.to(dtype) * F.silu(z.to(dtype))).to(x.dtype)


@triton.jit
def _row(ptr, rows, cols, mask, of_t, of_h, HEADS: tl.constexpr):
    """Rows of [tokens, HEADS, N], in fp32."""
    return tl.load(ptr + head_rows(rows, of_t, of_h, HEADS) + cols, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["n_rows"])
def _forward_kernel(
    y_ptr, rstd_ptr, x_ptr, z_ptr, weight_ptr, n_rows, x_t, x_h, z_t, z_h,
    EPS: tl.constexpr, HEADS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    rows, cols = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    mask = (rows < n_rows) & (cols < N)
    x = _row(x_ptr, rows, cols, mask, x_t, x_h, HEADS)
    z = _row(z_ptr, rows, cols, mask, z_t, z_h, HEADS)
    weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    mean_square = tl.sum(x * x, 1)[:, None] * (1.0 / N) + EPS
    rstd = tl.div_rn(1.0, tl.sqrt_rn(mean_square)) if dtype == tl.float32 else tl.rsqrt(mean_square)
    tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)
    gate, _ = activation(z, "silu", dtype == tl.float32)
    tl.store(y_ptr + rows * N + cols, ((x * rstd).to(dtype).to(tl.float32) * weight * gate).to(dtype), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _backward_kernel(
    dx_ptr, dz_ptr, parts_ptr, dy_ptr, x_ptr, z_ptr, weight_ptr, rstd_ptr, n_rows, dy_t, dy_h, x_t, x_h, z_t, z_h,
    HEADS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dx, dz, and this program's row of parts: of the weight's gradient."""
    dtype: tl.constexpr = dx_ptr.dtype.element_ty
    cols = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    d_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        mask = (rows < n_rows) & (cols < N)
        dy = _row(dy_ptr, rows, cols, mask, dy_t, dy_h, HEADS)
        x = _row(x_ptr, rows, cols, mask, x_t, x_h, HEADS)
        z = _row(z_ptr, rows, cols, mask, z_t, z_h, HEADS)
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)
        h = x * rstd
        gate, slope = activation(z, "silu", dtype == tl.float32)
        d_weight += dy * h * gate
        tl.store(dz_ptr + rows * N + cols, (dy * h * weight * slope).to(dz_ptr.dtype.element_ty), mask=mask)
        g = dy * weight * gate
        mean_gh = tl.sum(g * h, 1) * (1.0 / N)
        tl.store(dx_ptr + rows * N + cols, ((g - h * mean_gh[:, None]) * rstd).to(dtype), mask=mask)
    inside = tl.arange(0, BLOCK) < N
    tl.store(parts_ptr + tl.program_id(0) * N + tl.arange(0, BLOCK), tl.sum(d_weight, 0), mask=inside)


def _tile(width: int) -> tuple[int, int]:
    """(columns, rows) of a tile of 2048 elements, or of one row."""
    block = next_power_of_2(width)
    return block, max(1, 2048 // block)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, z, weight, eps):
        y, width = torch.empty(x.shape, dtype=x.dtype, device=x.device), operator.index(x.shape[-1])
        (block, rows), heads = _tile(width), heads_of(x, z)
        (x_, n_rows, *of_x), (z_, _, *of_z) = as_heads(x, heads), as_heads(z, heads)
        tokens = n_rows if x.dim() < 3 else n_rows // x.shape[-2]
        overlap = overlaps_launches(x) and tokens <= FEW_ROWS
        rstd = torch.empty(n_rows, dtype=torch.float32, device=x.device)
        launch(
            _forward_kernel, (cdiv(n_rows, rows),),
            y, rstd, x_, z_, weight, n_rows, *of_x, *of_z, eps, heads, width, block, rows, overlap,
            num_warps=4, **overlapping(overlap),
        )  # fmt: skip
        ctx.save_for_backward(x, z, weight, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, z, weight, rstd = ctx.saved_tensors
        dx, dz = (torch.empty(dy.shape, dtype=t.dtype, device=t.device) for t in (x, z))
        width, heads = operator.index(x.shape[-1]), heads_of(dy, x, z)
        (dy, n_rows, *of_dy), (x, _, *of_x), (z, _, *of_z) = (as_heads(t, heads) for t in (dy, x, z))
        block, rows = _tile(width)
        programs = min(cdiv(n_rows, rows), 4 * num_sms(x.device.index))
        parts = torch.empty(programs, width, dtype=torch.float32, device=x.device)
        launch(
            _backward_kernel, (programs,), dx, dz, parts, dy, x, z, weight, rstd,
            n_rows, *of_dy, *of_x, *of_z, heads, width, block, rows, num_warps=4,
        )  # fmt: skip
        d_weight = torch.empty_like(weight)
        launch(sum_parts_kernel, (cdiv(width, 16), 1), d_weight, None, parts, programs, width, 16, 128)
        return dx, dz, d_weight, None


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight * silu(z), of x's dtype.

    x, z: [..., N]; weight: [N]; eps: added to the mean square.
    Raises InputError for shapes, dtypes or devices that do not fit.
    """
    if x.dim() == 0 or x.shape[-1] == 0 or not x.is_floating_point():
        raise InputError(f"gated_norm: x has {describe(x)}; expected floating point [..., N], N >= 1.")
    check_operand("gated_norm", "z", z, x.shape, "x", x)
    check_operand("gated_norm", "weight", weight, x.shape[-1:], "x", x)
    if not use_triton(x) or x.dtype == torch.float64 or x.numel() == 0 or x.shape[-1] > MAX_WIDTH:
        return gated_norm_reference(x, z, weight, eps)
    for size in x.shape[-2:]:
        operator.index(size)  # constexprs of the kernels, which Dynamo must take for constants from here on
    return _GatedNorm.apply(x, z, weight.contiguous(), eps)
