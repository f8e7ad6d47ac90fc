"""LayerNorm, and LayerNorm of a sum: the residual add of a transformer block fused into the norm that follows it.

    y = (x - mean(x)) * rsqrt(mean((x - mean(x))^2) + eps) * weight + bias            over the last dim, of width N

What differs from a plain fused LayerNorm is what differs in `rms_norm`, with the same kernels: the sum is returned, and
its gradient added in the kernel; the backward is persistent, sums dweight and dbias in a fixed order without atomics,
and skips gradients that nobody needs. Rows wider than 8192 run the reference. The variance is computed from the centred
row, since mean(x^2) - mean(x)^2 cancels.

Saved for the backward: x (the sum, when there is one) and two fp32 numbers per row.
Bytes per element at 2-byte dtypes, which are the minimum: forward 4, backward 6; with the add 8 and 8.

Source: Ba, Kiros and Hinton 2016, https://arxiv.org/abs/1607.06450.
"""

import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels._triton import accumulator, use_triton
from ligermodels.kernels.norm._norm import MAX_WIDTH, check, norm


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


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """(x - mean) / std * weight + bias over the last dim; the statistics are fp32 (fp64 for fp64).

    x: [..., N]; weight, bias: [N] or None; eps: added to the variance, which is that of all N.
    Returns [..., N] of x's dtype, whatever the weight's.
    Raises InputError for shapes or devices that do not fit.
    """
    check(x, None, weight, bias, "layer_norm")
    if not use_triton(x) or x.shape[-1] > MAX_WIDTH[1]:
        return layer_norm_reference(x, weight, bias, eps=eps)
    return norm(x, None, weight, bias, eps, 0.0, True, False)[0]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """layer_norm(x + residual) and x + residual, in one pass.

    x, residual: [..., N]; weight, bias, eps: as in `layer_norm`. The sum is rounded to its dtype first and the norm
    reads the rounded sum, so that the result is that of the two ops one after the other.
    Returns both [..., N], in the dtype that x + residual has.
    Raises InputError for shapes or devices that do not fit.
    """
    check(x, residual, weight, bias, "add_layer_norm")
    if not use_triton(x) or x.shape[-1] > MAX_WIDTH[1]:
        return add_layer_norm_reference(x, residual, weight, bias, eps=eps)
    return norm(x, residual, weight, bias, eps, 0.0, True, False)
