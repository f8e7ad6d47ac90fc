"""RMSNorm, and RMSNorm of a sum: the residual add of a transformer block fused into the norm that follows it.

    y = x * rsqrt(mean(x^2) + eps) * (offset + weight)                 over the last dim, of width N

What differs from a plain fused norm:
- `add_rms_norm` also returns the sum. Its backward adds the sum's gradient in the kernel that computes the norm's own;
  x and the residual get that one tensor.
- The backward is persistent and sums dweight in a fixed order, without atomics (kernels: `_norm_kernels`, shared with
  LayerNorm). Rows wider than 16384 run the reference.
- A frozen weight or input costs nothing in the backward.

Saved for the backward: x (the sum, when there is one) and one fp32 number per row.
Bytes per element at 2-byte dtypes, which are the minimum: forward 4, backward 6; with the add 8 and 8.

Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467. cast_before_weight is LlamaRMSNorm's order, without
it GemmaRMSNorm's, in https://github.com/huggingface/transformers.
"""

import torch
from torch import Tensor

from ligermodels.kernels._triton import accumulator, use_triton
from ligermodels.kernels.norm._norm import MAX_WIDTH, check, norm


def rms_norm_reference(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, offset: float = 0.0, cast_before_weight: bool = True
) -> Tensor:
    h = x.to(accumulator(x.dtype))
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    if cast_before_weight:
        h = h.to(x.dtype)
    if weight is not None and (offset or torch.is_grad_enabled()):
        h = h.to(accumulator(x.dtype)) * (offset + weight.to(accumulator(x.dtype)))
    elif weight is not None:  # the same bits; only the gradient of the weight would be summed in its dtype
        h = h * weight
    return h.to(x.dtype)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, offset: float = 0.0,
    cast_before_weight: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    total = x + residual
    return rms_norm_reference(total, weight, eps=eps, offset=offset, cast_before_weight=cast_before_weight), total


def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, offset: float = 0.0, cast_before_weight: bool = True
) -> Tensor:
    """x / rms(x) * (offset + weight) over the last dim; the statistics are fp32 (fp64 for fp64).

    x: [..., N]; weight: [N] or None, then offset plays no part; eps: added to the mean square.
    cast_before_weight: rounds x / rms(x) to x's dtype before the weight is applied, as Llama does and Gemma does not.
    Returns [..., N] of x's dtype, whatever the weight's: with an fp32 weight and bf16 x that is what the next
    bf16 linear would read anyway.
    Raises InputError for shapes, dtypes or devices that do not fit.
    """
    check(x, None, weight, None, "rms_norm")
    if not use_triton(x) or x.shape[-1] > MAX_WIDTH[0]:
        return rms_norm_reference(x, weight, eps=eps, offset=offset, cast_before_weight=cast_before_weight)
    return norm(x, None, weight, None, eps, offset, False, cast_before_weight)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, offset: float = 0.0,
    cast_before_weight: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """rms_norm(x + residual) and x + residual, in one pass.

    x, residual: [..., N]; weight and options as in `rms_norm`. The sum is rounded to its dtype first and the norm reads
    the rounded sum, so that the result is that of the two ops one after the other.
    Returns both [..., N], in the dtype that x + residual has.
    Raises InputError for shapes, dtypes or devices that do not fit.
    """
    check(x, residual, weight, None, "add_rms_norm")
    if not use_triton(x) or x.shape[-1] > MAX_WIDTH[0]:
        return add_rms_norm_reference(
            x, residual, weight, eps=eps, offset=offset, cast_before_weight=cast_before_weight
        )
    return norm(x, residual, weight, None, eps, offset, False, cast_before_weight)
