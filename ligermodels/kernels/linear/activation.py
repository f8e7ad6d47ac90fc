"""Activations that stand alone between two linear layers.

    quick_gelu(x) = x * sigmoid(1.702 x)      gelu(x) = x * (1 + erf(x / sqrt(2))) / 2      gelu_tanh: by tanh instead

They run on the kernels of glu.py, without an up; the op of both linear layers and the activation is `mlp`.

Bytes per element at 2-byte dtypes, which are the minimum: forward 4, backward 6.
Math in fp32 (fp64 for fp64), one rounding.

Source: see ACTIVATIONS in _math.py.
"""

from torch import Tensor

from ligermodels.kernels._math import ACTIVATIONS, Activation, activation_name
from ligermodels.kernels._triton import accumulator, use_triton
from ligermodels.kernels.linear.glu import GLU, check_glu


def activate_reference(x: Tensor, *, activation: Activation) -> Tensor:
    name = activation_name("activate", activation, gated=False)
    return ACTIVATIONS[name](x.to(accumulator(x.dtype))).to(x.dtype)


def activate(x: Tensor, *, activation: Activation) -> Tensor:
    """act(x), element by element.

    x: [..., F]; activation: "quick_gelu" (x * sigmoid(1.702 x)), "gelu" (exact, by erf), "gelu_tanh" (the tanh
    approximation) or "silu".
    Returns [..., F] of x's dtype.
    Raises InputError for an activation that is unknown or needs a gate, or an x without columns or of integers.
    """
    name = activation_name("activate", activation, gated=False)
    check_glu("activate", "x", x)
    if not use_triton(x):
        return activate_reference(x, activation=name)
    return GLU.apply(x, None, False, name)
