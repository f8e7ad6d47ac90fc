"""Shared by kernels: exp, the activations with their derivatives, and the tiles of element-wise kernels."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._triton import assume_constant_result, cdiv, next_power_of_2, tl, triton

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "sigmoid": torch.sigmoid,
}
"""`activation` in PyTorch. Sources: torch.nn.functional; quick_gelu as in OpenAI's CLIP."""


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gpt-oss' gated activation: (up' + 1) * gate' * sigmoid(alpha * gate'), gate' = min(gate, limit), and up' is up
    clamped to [-limit, limit]. As with torch.clamp, no gradient passes where an element is clamped, and at the limit
    itself it passes. Raises InputError unless limit > 0 and alpha is finite.

    Source: https://github.com/openai/gpt-oss, gpt_oss/torch/model.py.
    """

    alpha: float
    limit: float
    name: str = field(init=False, repr=False, compare=False)
    """NAME in kernels, which has both numbers: made once, since torch.compile may turn numbers into symbols."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and self.limit > 0):
            raise InputError(
                f"ClampedSwiGLU: alpha is {self.alpha} and limit {self.limit}; expected a finite number and "
                "one above 0."
            )
        object.__setattr__(self, "name", f"clamped_swiglu {float(self.alpha)!r} {float(self.limit)!r}")


Activation = str | ClampedSwiGLU
"""A name in ACTIVATIONS; with a gate also a ClampedSwiGLU."""


def activation_name(where: str, activation: Activation, *, gated: bool) -> str:
    """NAME in kernels, which the references take as well; raises InputError for one that is not supported."""
    if isinstance(activation, ClampedSwiGLU):
        if not gated:
            raise InputError(f"{where}: activation={activation} multiplies a gate with up, and there is no gate.")
        return activation.name
    if activation not in ACTIVATIONS:
        supported = ", ".join([*map(repr, ACTIVATIONS), "ClampedSwiGLU(alpha, limit)"][: len(ACTIVATIONS) + gated])
        raise InputError(f"{where}: activation={activation!r}; supported are {supported}.")
    return activation


def unit_reference(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """`unit` in PyTorch: its first result."""
    name = activation if isinstance(activation, str) else activation.name
    if not name.startswith("clamped_swiglu "):
        return ACTIVATIONS[name](gate) * up
    alpha, limit = map(float, name.split()[1:])
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(alpha * gate))


@triton.jit
def exp(x):
    # The hardware computes 2^(x log2 e), whose rounded exponent errs more the larger x is. So the multiple of ln 2 in x
    # is subtracted first, in two parts of which the larger is exact.
    x = tl.minimum(tl.maximum(x, -150.0), 150.0)  # beyond, the result is 0 or infinity
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    return tl.exp((x - n * 0.693359375) + n * 2.1219444005469057e-4) * tl.exp2(n)


@triton.jit
def _sigmoid(z, EXACT: tl.constexpr):
    """(sigmoid(z), 1 - sigmoid(z))."""
    e = exp(-z) if EXACT else tl.exp(-z)
    sigmoid = tl.div_rn(1.0, 1.0 + e) if EXACT else 1.0 / (1.0 + e)
    return sigmoid, tl.where(z > 0, e * sigmoid, 1.0 - sigmoid)  # without the cancellation of 1 - sigmoid for large z


@triton.jit
def activation(x, NAME: tl.constexpr, EXACT: tl.constexpr):
    """(act(x), its derivative). EXACT: for results stored in fp32, exp and the division are exact to the last bit."""
    if NAME == "gelu":
        cdf = 0.5 + 0.5 * tl.math.erf(x * 0.7071067811865476)
        return x * cdf, cdf + x * (0.3989422804014327 * tl.exp(-0.5 * x * x))
    else:
        # All others are x sigmoid(z), or sigmoid(z): gelu_tanh(x) = x (1 + tanh u) / 2 = x sigmoid(2 u).
        z = x
        if NAME == "gelu_tanh":
            z = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        elif NAME == "quick_gelu":
            z = 1.702 * x
        sigmoid, rest = _sigmoid(z, EXACT)
        if NAME == "gelu_tanh":
            dz = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
            return x * sigmoid, sigmoid + (x * sigmoid) * rest * dz
        elif NAME == "sigmoid":
            return sigmoid, sigmoid * rest
        else:
            return x * sigmoid, sigmoid * (1.0 + z * rest)  # z' x = z


@triton.constexpr_function
def _is_clamped(name: str) -> bool:
    return name.startswith("clamped_swiglu ")


@triton.constexpr_function
def _number(name: str, index: int) -> float:
    """Of a ClampedSwiGLU's name: 1 is alpha, 2 is limit."""
    return float(name.split()[index])


@triton.jit
def unit(gate, up, NAME: tl.constexpr, EXACT: tl.constexpr):
    """(act(gate) * up, its derivative by gate, its derivative by up); NAME: see `activation_name`."""
    if _is_clamped(NAME):
        limit = tl.full((), _number(NAME, 2), gate.dtype)  # a constant in tl.where would be rounded to fp32
        above, outside = gate > limit, (up > limit) | (up < -limit)
        gate = tl.where(above, limit, gate)  # NaN stays, as it would not in tl.minimum
        up = tl.where(outside, tl.where(up > limit, limit, -limit), up) + 1.0
        z = gate * _number(NAME, 1)
        sigmoid, rest = _sigmoid(z, EXACT)
        act, slope = gate * sigmoid, tl.where(above, 0.0, sigmoid * (1.0 + z * rest))
        return act * up, slope * up, tl.where(outside, 0.0, act)
    else:
        act, slope = activation(gate, NAME, EXACT)
        return act * up, slope * up, act


@triton.jit
def head_rows(rows, of_t, of_h, HEADS: tl.constexpr):
    """Offsets of rows of [tokens, HEADS, N]."""
    return (rows // HEADS).to(tl.int64) * of_t + (rows % HEADS).to(tl.int64) * of_h


@triton.jit
def tile_at(n_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """(rows, columns, rows that exist, elements that exist) of this program's tile."""
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    rows = (tl.program_id(0) // BLOCKS).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = rows < n_rows
    return rows, cols, inside, inside & (cols < WIDTH)


@assume_constant_result
def tile(width: int) -> tuple[int, int, int]:
    """(columns, rows, tiles per row) of a tile of 1024: the widest of which at most a sixteenth lies past the row."""
    return _tile(width)


@functools.cache
def _tile(width: int) -> tuple[int, int, int]:
    block = 1024
    while block > 128 and cdiv(width, block) * block * 16 > width * 17:
        block //= 2
    block = min(block, next_power_of_2(width))
    return block, 1024 // block, cdiv(width, block)
