"""The gradient of a layer's input, for a caller that wants it before the layer computes the gradients of its weights.

Under tensor parallel the input was gathered from all ranks, and its gradient is summed over them. This runs beside the
matmul of the weight gradient if it starts before that.
"""

from collections.abc import Callable

from torch import Tensor


def on_gradient(x: Tensor, function: Callable[[Tensor], None]) -> Tensor:
    """x; the backward of a linear layer or an MLP that reads it may call `function` with its gradient of x."""
    x._on_gradient = function  # type: ignore[attr-defined]
    return x


def listener_of(x: Tensor) -> Callable[[Tensor], None] | None:
    """The function that wants the gradient of x; another tensor made from x has none."""
    return getattr(x, "_on_gradient", None)
