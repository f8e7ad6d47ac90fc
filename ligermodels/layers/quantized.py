"""Frozen linear layers with quantised weights: the base class, and int8, fp8 and int4.

    y = x @ w.T + bias, dx = dy @ w          w as in kernels/quantized.py, or for NF4Linear (nf4.py) in kernels/nf4.py

x is not saved. Attention and MLPs run several such layers as one op (linear.py).
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.kernels._check import describe
from ligermodels.kernels.low_bit import frozen_linear
from ligermodels.kernels.quantized import FORMATS, QuantizedWeight, empty, quantize

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}
"""Integers of the size of a dtype."""


class LowBitLinear(nn.Module):
    """y = x @ weight.T + bias with a frozen weight [out_features, in_features] of few bits, the `operand`.

    It computes in the dtype of x, or autocast's, and its backward computes only dx.
    """

    in_features: int
    out_features: int
    bias: nn.Parameter | None

    @property
    def operand(self) -> Any:
        """The weight for a fused op, a `LowBitWeight`."""
        raise NotImplementedError

    @classmethod
    def from_operand(cls, operand: Any, bias: Tensor | None = None) -> Self:
        """The layer of a quantised weight [N, K] and a bias [N], over the same memory."""
        raise NotImplementedError

    @classmethod
    def stack(cls, modules: "Sequence[LowBitLinear]") -> Self:
        """The rows of all modules, which have no biases, as one module."""
        operands = [module.operand for module in modules]
        return cls.from_operand(type(operands[0]).stack(operands))

    def dequantized_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight [N, K], by default in the dtype that it was quantised from."""
        return self.operand.dequantize(dtype)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return frozen_linear(x, self.operand, self.bias)

    @classmethod
    def _check(cls, weight: Tensor, bias: Tensor | None) -> None:
        name = cls.__name__
        if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
            raise InputError(f"{name}: weight has {describe(weight)}, bias {bias if bias is None else describe(bias)}")
        if bias is not None and bias.requires_grad:
            raise InputError(f"{name}: the bias requires a gradient; the layer is frozen: pass bias.detach()")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class QuantizedLinear(LowBitLinear):
    """A linear layer for inference, of kind "int8", "fp8" or "int4". Few rows of x read the quantised bits.

    weight, scale: frozen parameters, the bits of a `QuantizedWeight` as integers, so that casts do not change them.
    bias: frozen parameter or None. The values are random until `from_weight` or a state dict sets them.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        kind: str,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if kind not in FORMATS or in_features < 1 or out_features < 1:
            raise InputError(
                f"QuantizedLinear: in_features={in_features}, out_features={out_features}, kind={kind!r}; expected "
                f"positive numbers and one of {', '.join(FORMATS)}"
            )
        self.in_features, self.out_features, self.kind = in_features, out_features, kind
        self.original_dtype = torch.get_default_dtype() if dtype is None else dtype
        packed, scale = empty(kind, out_features, in_features, device)
        self.weight, self.scale = _frozen(packed), _frozen(scale)
        values = torch.empty(out_features, dtype=self.original_dtype, device=device) if bias else None
        self.bias = None if values is None else nn.Parameter(values, requires_grad=False)

    @classmethod
    def from_weight(cls, weight: Tensor, bias: Tensor | None = None, *, kind: str) -> Self:
        """The layer of a frozen weight [N, K] and bias [N] in bf16, fp16 or fp32, on their device.

        Raises InputError for a weight that requires a gradient, has NaN or infinity, or another shape or dtype.
        """
        cls._check(weight, bias)
        return cls.from_operand(quantize(weight, kind), bias)

    @classmethod
    def from_operand(cls, operand: QuantizedWeight, bias: Tensor | None = None) -> Self:
        rows, columns = operand.shape
        with torch.device("meta"):
            made = cls(columns, rows, kind=operand.kind, dtype=operand.dtype)
        made.weight, made.scale = _frozen(operand.packed), _frozen(operand.scale)
        made.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        return made

    @property
    def operand(self) -> QuantizedWeight:
        form = FORMATS[self.kind]
        packed, scale = self.weight.detach().view(form.packed), self.scale.detach().view(form.scale)
        return QuantizedWeight(self.kind, packed, scale, self.in_features, self.original_dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, kind={self.kind!r}"


def _frozen(x: Tensor) -> nn.Parameter:
    return nn.Parameter(x.view(_BITS.get(x.dtype, x.dtype)), requires_grad=False)
