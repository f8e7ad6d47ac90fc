"""Activations that stand alone between two linear layers, or together with the linear layer that reads them.

    quick_gelu(x) = x * sigmoid(1.702 x)      gelu(x) = x * (1 + erf(x / sqrt(2))) / 2      gelu_tanh: by tanh instead

What differs from an activation of torch: `activation_linear` is fc2(act(x)) that saves x alone. It is `glu_linear`
without a gate, on the kernels of glu.py: it saves half of what the two ops save one by one, for 2 bytes more per
element.

Bytes per element at 2-byte dtypes, which are the minimum: forward 4, backward 6 (8 where act(x) is left).
Math in fp32 (fp64 for fp64), one rounding.

Source: see ACTIVATIONS in _math.py.
"""

import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels._math import ACTIVATIONS
from ligermodels.kernels._triton import accumulator, use_triton
from ligermodels.kernels.linear.glu import GLU, apply_glu_linear, check_glu
from ligermodels.kernels.linear.operand import LinearOperand, check


def activate_reference(x: Tensor, *, activation: str) -> Tensor:
    return ACTIVATIONS[activation](x.to(accumulator(x.dtype))).to(x.dtype)


def activation_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str) -> Tensor:
    return F.linear(activate_reference(x, activation=activation), weight, bias)


def activate(x: Tensor, *, activation: str) -> Tensor:
    """act(x), element by element.

    x: [..., F]; activation: "quick_gelu" (x * sigmoid(1.702 x)), "gelu" (exact, by erf), "gelu_tanh" (the tanh
    approximation) or "silu".
    Returns [..., F] of x's dtype.
    Raises InputError for an unknown activation, or an x without columns or of integers.
    """
    check_glu("activate", "x", x, activation)
    if not use_triton(x):
        return activate_reference(x, activation=activation)
    return GLU.apply(x, None, False, activation)


def activation_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str) -> Tensor:
    """F.linear(activate(x), weight, bias) that saves x, and recomputes act(x) in the backward.

    x: [..., F]; weight: [N, F]; bias: [N] or None; activation: as in `activate`.
    Returns [..., N] of the weight's dtype; under torch.autocast of the autocast dtype, to which weight and bias are
    cast as F.linear would cast them.
    Raises InputError for shapes, dtypes or devices that do not fit.
    """
    width = check_glu("activation_linear", "x", x, activation)
    ((weight, bias, _),) = check("activation_linear", "x", x, width, [LinearOperand(weight, bias)])
    if not use_triton(x):
        return activation_linear_reference(x, weight, bias, activation=activation)
    return apply_glu_linear(x, None, weight, bias, False, activation)
