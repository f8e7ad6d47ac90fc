"""The gates of a gated delta rule: decay and write strength of each token and value head.

    g = -exp(A_log) softplus(a + dt_bias);   beta = sigmoid(b)

The decay is computed and returned in fp32, since it is summed over tokens and exponentiated.

Source: Yang et al. 2024, "Gated Delta Networks", https://arxiv.org/abs/2412.06464; softplus as torch.nn.functional's.
"""

import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._check import check_operand, describe
from ligermodels.kernels._triton import accumulator


def delta_gates_reference(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    a, A_log, dt_bias = (x.to(accumulator(a.dtype)) for x in (a, A_log, dt_bias))
    return -A_log.exp() * F.softplus(a + dt_bias), b.sigmoid()


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
    return delta_gates_reference(a, b, A_log, dt_bias)
