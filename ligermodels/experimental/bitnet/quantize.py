"""Activations as int8, each row by its own largest value. Experimental.

    scale = max |x| / 127                q = round(x / scale), half to even

One launch reads a row twice, from memory once. The int8 are those of transformers, bit for bit.

Source: Ma et al. 2024, https://arxiv.org/abs/2402.17764; rounding and eps as in integrations/bitnet.py of
https://github.com/huggingface/transformers.
"""

import operator

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import (
    INTERPRET,
    accumulator,
    last_dim_contiguous,
    next_power_of_2,
    tl,
    triton,
    use_triton,
)

ABSMAX_EPS = 1e-5
"""Below it an activation row's largest value counts as this, as in the reference implementation."""


def has_ptx(x: Tensor) -> bool:
    """Whether kernels on x may hold PTX."""
    return x.is_cuda and torch.version.hip is None and not INTERPRET


def quantize_int8_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.to(accumulator(x.dtype))
    absmax = x.abs().amax(-1, keepdim=True).clamp(min=ABSMAX_EPS)
    q = (x * (absmax.reciprocal() * 127)).round().clamp(-128, 127).to(torch.int8)
    scale = torch.where(absmax < torch.inf, absmax, torch.nan)[..., 0]
    return q, scale / torch.full_like(scale, 127)


@triton.jit
def _round(x, DOUBLE: tl.constexpr, ASM: tl.constexpr):
    """To a whole number, half to even; |x| < 2^22."""
    if ASM:  # x * factor is rounded before: the sums below would fuse with it, and see other halves
        if DOUBLE:
            return tl.inline_asm_elementwise("cvt.rni.f64.f64 $0, $1;", "=d,d", [x], tl.float64, is_pure=True, pack=1)
        else:
            return tl.inline_asm_elementwise("cvt.rni.f32.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:  # what is added leaves no bits behind the point, and rounds as every addition does
        HALVES: tl.constexpr = 6755399441055744.0 if DOUBLE else 12582912.0
        return (x + HALVES) - HALVES


@triton.jit
def _quantize_kernel(
    q_ptr, scale_ptr, x_ptr, stride, eps: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """One row: its largest value, then every value over it, times 127, rounded half to even."""
    ACC: tl.constexpr = scale_ptr.dtype.element_ty
    DOUBLE: tl.constexpr = tl.float64 == ACC
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], ACC)
    for start in range(0, WIDTH, BLOCK):
        x = tl.abs(tl.load(x_ptr + row * stride + start + cols, mask=start + cols < WIDTH, other=0.0).to(ACC))
        largest = tl.maximum(largest, tl.where(x < float("inf"), x, float("inf")))  # NaN counts as inf
    absmax = tl.maximum(tl.max(largest, 0), tl.full((), eps, ACC))
    scale = tl.where(absmax < float("inf"), absmax, float("nan"))
    tl.store(scale_ptr + row, scale / 127 if DOUBLE else tl.div_rn(scale, tl.full((), 127.0, ACC)))
    factor = (1 / absmax if DOUBLE else tl.div_rn(tl.full((), 1.0, ACC), absmax)) * 127  # torch's 127 / absmax
    for start in range(0, WIDTH, BLOCK):
        x = tl.load(x_ptr + row * stride + start + cols, mask=start + cols < WIDTH, other=0.0).to(ACC)
        q = tl.minimum(tl.maximum(_round(x * factor, DOUBLE, ASM), -128.0), 127.0)
        tl.store(q_ptr + row * WIDTH + start + cols, q.to(tl.int8), mask=start + cols < WIDTH)


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] as int8 [..., K] and what each row is to be multiplied with, [...] fp32 (fp64 for fp64).

    scale = max |x| of the row / 127, the maximum being at least ABSMAX_EPS; q = x * (1 / max |x| * 127), rounded half
    to even. A row that holds NaN or an infinity has scale NaN. One launch reads x, from memory once, and writes q.
    Raises InputError for anything but floating point.
    """
    if x.dim() == 0 or not x.is_floating_point():
        raise InputError(f"quantize_int8: x has shape {tuple(x.shape)} and dtype {x.dtype}; expected floating [..., K]")
    if not use_triton(x):
        return quantize_int8_reference(x)
    width = operator.index(x.shape[-1])
    rows = last_dim_contiguous(x.reshape(x.shape[:-1].numel(), width))
    q = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=accumulator(x.dtype), device=x.device)
    if rows.shape[0]:
        block = min(8192, next_power_of_2(max(1, width)))
        launch(
            _quantize_kernel, (rows.shape[0],), q, scale, rows, rows.stride(0), ABSMAX_EPS, width, block,
            has_ptx(x), num_warps=max(1, min(16, block // 512)),
        )  # fmt: skip
    return q, scale
