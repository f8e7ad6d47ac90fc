"""The gates of a gated delta rule: decay and write strength of each token and value head.

    g = -exp(A_log) softplus(a + dt_bias);   beta = sigmoid(b)

The decay is computed and returned in fp32, since it is summed over tokens and exponentiated.

The backward sums the gradients of A_log and dt_bias in a fixed order, without atomics.

Source: Yang et al. 2024, "Gated Delta Networks", https://arxiv.org/abs/2412.06464; softplus as torch.nn.functional's.
"""

import operator

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._check import check_operand, describe
from ligermodels.kernels._gradients import sum_parts_kernel
from ligermodels.kernels._launch import launch
from ligermodels.kernels._math import exp
from ligermodels.kernels._triton import (
    accumulator,
    as_rows,
    cdiv,
    next_power_of_2,
    num_sms,
    once_differentiable,
    tl,
    triton,
    use_triton,
)

_ELEMENTS = 1024
"""Elements of a tile."""


def delta_gates_reference(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    a, A_log, dt_bias = (x.to(accumulator(a.dtype)) for x in (a, A_log, dt_bias))
    return -A_log.exp() * F.softplus(a + dt_bias), b.sigmoid()


@triton.jit
def decays(a, A_log, dt_bias):
    """(exp(A_log), softplus(a + dt_bias), its derivative) in fp32."""
    x = a + dt_bias
    e = exp(-tl.abs(x))
    # log(1 + e): for small e its series, whose next term is below an ulp; else corrected for the rounding of 1 + e.
    w = 1.0 + e
    small = e < 1e-3
    log = tl.log(w) * tl.div_rn(e, tl.where(small, 1.0, w - 1.0))
    softplus = tl.maximum(x, 0.0) + tl.where(small, e - e * (e * (0.5 - e * (1.0 / 3.0))), log)
    return exp(A_log), softplus, tl.where(x > 0, 1.0, e) / w


@triton.jit(do_not_specialize=["n_rows"])
def _forward_kernel(
    g_ptr, beta_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, n_rows, a_stride, b_stride,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows, heads = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    mask = (rows < n_rows) & (heads < HEADS)
    A_log = tl.load(A_log_ptr + heads, mask=heads < HEADS, other=0.0).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + heads, mask=heads < HEADS, other=0.0).to(tl.float32)
    a = tl.load(a_ptr + rows * a_stride + heads, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + rows * b_stride + heads, mask=mask, other=0.0).to(tl.float32)
    rate, softplus, _ = decays(a, A_log, dt_bias)
    tl.store(g_ptr + rows * HEADS + heads, -rate * softplus, mask=mask)
    beta = tl.div_rn(1.0, 1.0 + exp(-b))
    tl.store(beta_ptr + rows * HEADS + heads, beta.to(beta_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _backward_kernel(
    da_ptr, db_ptr, parts_ptr, dg_ptr, d_beta_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr,
    n_rows, dg_stride, d_beta_stride, a_stride, b_stride,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """da, db, and this program's rows of parts: of the gradient of A_log, then of dt_bias."""
    heads = tl.arange(0, BLOCK)[None, :]
    A_log = tl.load(A_log_ptr + heads, mask=heads < HEADS, other=0.0).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + heads, mask=heads < HEADS, other=0.0).to(tl.float32)
    d_A_log = tl.zeros([ROWS, BLOCK], tl.float32)
    d_dt_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        mask = (rows < n_rows) & (heads < HEADS)
        a = tl.load(a_ptr + rows * a_stride + heads, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + rows * b_stride + heads, mask=mask, other=0.0).to(tl.float32)
        dg = tl.load(dg_ptr + rows * dg_stride + heads, mask=mask, other=0.0).to(tl.float32)
        d_beta = tl.load(d_beta_ptr + rows * d_beta_stride + heads, mask=mask, other=0.0).to(tl.float32)
        rate, softplus, slope = decays(a, A_log, dt_bias)
        d_A_log -= dg * rate * softplus
        da = -dg * rate * slope
        d_dt_bias += da
        tl.store(da_ptr + rows * HEADS + heads, da.to(da_ptr.dtype.element_ty), mask=mask)
        e = exp(-tl.abs(b))  # sigmoid(b) (1 - sigmoid(b)), without cancellation
        db = d_beta * e / ((1.0 + e) * (1.0 + e))
        tl.store(db_ptr + rows * HEADS + heads, db.to(db_ptr.dtype.element_ty), mask=mask)
    at = parts_ptr + tl.program_id(0) * HEADS + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < HEADS
    tl.store(at, tl.sum(d_A_log, 0), mask=inside)
    tl.store(at + tl.num_programs(0) * HEADS, tl.sum(d_dt_bias, 0), mask=inside)


def _block(heads: int) -> tuple[int, int]:
    """(columns, rows) of a tile."""
    block = next_power_of_2(heads)
    return block, max(1, _ELEMENTS // block)


class _DeltaGates(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, A_log, dt_bias):
        heads = operator.index(a.shape[-1])
        block, rows = _block(heads)
        (a, n_rows, a_stride), (b, _, b_stride), shape = as_rows(a), as_rows(b), a.shape
        g = torch.empty(shape, dtype=torch.float32, device=a.device)
        beta = torch.empty(shape, dtype=b.dtype, device=a.device)
        launch(
            _forward_kernel, (cdiv(n_rows, rows),),
            g, beta, a, b, A_log, dt_bias, n_rows, a_stride, b_stride, heads, block, rows, num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(a, b, A_log, dt_bias)
        return g, beta

    @staticmethod
    @once_differentiable
    def backward(ctx, dg, d_beta):
        a, b, A_log, dt_bias = ctx.saved_tensors
        heads, shape = operator.index(a.shape[-1]), dg.shape
        block, rows = _block(heads)
        (a, n_rows, a_stride), (b, _, b_stride) = as_rows(a), as_rows(b)
        (dg, _, dg_stride), (d_beta, _, d_beta_stride) = as_rows(dg), as_rows(d_beta)
        da, db = (torch.empty(shape, dtype=t.dtype, device=t.device) for t in (a, b))
        d_A_log, d_dt_bias = torch.empty_like(A_log), torch.empty_like(dt_bias)
        programs = min(cdiv(n_rows, rows), 2 * num_sms(a.device.index))
        parts = torch.empty(2, programs, heads, dtype=torch.float32, device=a.device)
        launch(
            _backward_kernel, (programs,), da, db, parts, dg, d_beta, a, b, A_log, dt_bias,
            n_rows, dg_stride, d_beta_stride, a_stride, b_stride, heads, block, rows, num_warps=4,
        )  # fmt: skip
        launch(sum_parts_kernel, (cdiv(heads, 16), 2), d_A_log, d_dt_bias, parts, programs, heads, 16, 128)
        return da, db, d_A_log, d_dt_bias


def delta_gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """(g fp32, beta of b's dtype): the log of the decay and the write strength.

    a, b: [..., HV]; A_log, dt_bias: [HV].
    Raises InputError for shapes, dtypes or devices that do not fit.
    """
    if a.dim() == 0 or not a.is_floating_point():
        raise InputError(f"delta_gates: a has {describe(a)}; expected floating point [..., HV].")
    check_operand("delta_gates", "b", b, a.shape, "a", a)
    check_operand("delta_gates", "A_log", A_log, a.shape[-1:], "a", a)
    check_operand("delta_gates", "dt_bias", dt_bias, a.shape[-1:], "a", a)
    if not use_triton(a) or a.dtype == torch.float64 or a.numel() == 0:
        return delta_gates_reference(a, b, A_log, dt_bias)
    return _DeltaGates.apply(a, b, A_log.contiguous(), dt_bias.contiguous())
