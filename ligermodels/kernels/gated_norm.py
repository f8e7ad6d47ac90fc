"""RMSNorm of each head, times silu of a gate: the output norm of a gated delta rule.

    y = x * rsqrt(mean(x^2) + eps) * weight * silu(z)                 over the last dim, of width N

The norm comes before the gate; the normed x is rounded to its dtype before the weight, as Llama's.

Source: Qwen3-Next's gated norm in https://github.com/huggingface/transformers.
"""

import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._check import check_operand, describe
from ligermodels.kernels._triton import accumulator


def gated_norm_reference(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    dtype = accumulator(x.dtype)
    h = x.to(dtype)
    h = (h * (h.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)
    return (h.to(dtype) * weight.to(dtype) * F.silu(z.to(dtype))).to(x.dtype)


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight * silu(z), of x's dtype.

    x, z: [..., N]; weight: [N]; eps: added to the mean square.
    Raises InputError for shapes, dtypes or devices that do not fit.
    """
    if x.dim() == 0 or x.shape[-1] == 0 or not x.is_floating_point():
        raise InputError(f"gated_norm: x has {describe(x)}; expected floating point [..., N], N >= 1.")
    check_operand("gated_norm", "z", z, x.shape, "x", x)
    check_operand("gated_norm", "weight", weight, x.shape[-1:], "x", x)
    return gated_norm_reference(x, z, weight, eps)
