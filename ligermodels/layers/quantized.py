"""Frozen linear layers with weights of 4 or 8 bits: "nf4", "mxfp4" and "fp8", over which adapters train; "int8" and
"int4" for inference."""

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.kernels._check import describe
from ligermodels.kernels.linear.fp8_weight import FP8Recipe, FP8Weight
from ligermodels.kernels.linear.linear import linears
from ligermodels.kernels.linear.low_bit import LowBitWeight
from ligermodels.kernels.linear.mxfp4 import quantize_mxfp4
from ligermodels.kernels.linear.nf4 import quantize_nf4
from ligermodels.kernels.linear.operand import LinearOperand
from ligermodels.kernels.linear.quantized import quantize


class QuantizedLinear(nn.Module):
    """y = x @ weight.T + bias with a frozen weight [out_features, in_features] of 4 or 8 bits.

    It computes in the dtype of x, or of autocast. x is not saved, and x alone gets a gradient. Layers run several
    such modules as one fused op, with their adapters (linear.py).

    weight: a `LowBitWeight` [N, K]. Its tensors are registered under their own names, and `packed` as `weight`; for
    "nf4" these are the names of bitsandbytes. `packed` and integer tensors are frozen parameters, which FSDP2 shards,
    gathers in their own dtype and does not cast in mixed precision. Scales are buffers. Casts of the model change none
    of them. bias: [N] or None, frozen.
    """

    bias: nn.Parameter | None
    fp8: FP8Recipe | None = None
    """Of kind "fp8": its products are in FP8, as this recipe says; None: the weight is dequantised for each."""

    def __init__(self, weight: LowBitWeight, bias: Tensor | None = None):
        super().__init__()
        if len(weight.shape) != 2 or (bias is not None and bias.shape != weight.shape[:1]):
            raise InputError(
                f"QuantizedLinear: weight is {weight.shape}, bias {bias if bias is None else describe(bias)}; expected "
                "[N, K] and [N] or None"
            )
        self.out_features, self.in_features = weight.shape
        self.kind, self.form, self.options = weight.kind, type(weight), weight.options
        for name, tensor in zip(weight.tensor_names, weight.tensors, strict=True):
            if name == "packed":
                self.weight = nn.Parameter(tensor, requires_grad=False)  # type: ignore[arg-type]
            elif tensor is None or tensor.is_floating_point():
                self.register_buffer(name, tensor)
            else:
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @classmethod
    def from_weight(cls, weight: Tensor, bias: Tensor | None = None, *, kind: str, **options: Any) -> Self:
        """Quantises a frozen weight [N, K], with a bias [N], in bf16, fp16 or fp32, on their device.

        kind: "nf4" (options: as of `quantize_nf4`), "mxfp4", "int8", "fp8" or "int4". Raises InputError for a weight
        that requires a gradient, has NaN or infinity, or another shape or dtype.
        """
        quantizers: dict[str, Callable[..., LowBitWeight]] = {"nf4": quantize_nf4, "mxfp4": quantize_mxfp4}
        return cls(quantizers[kind](weight, **options) if kind in quantizers else quantize(weight, kind), bias)

    @property
    def operand(self) -> Any:
        """The weight for a fused op: a LowBitWeight, or with a recipe an FP8Weight of it."""
        form: Any = self.form
        parameters, buffers = self._parameters, self._buffers
        scales = [parameters[n] if n in parameters else buffers[n] for n in form.tensor_names[1:]]
        weight = form(*self.options, parameters["weight"], *scales)
        return weight if self.fp8 is None else FP8Weight(weight, self.fp8)

    def forward(self, x: Tensor) -> Tensor:
        return linears(x, [LinearOperand(self.operand, self.bias)])

    def extra_repr(self) -> str:
        _, _, dtype, block = self.options
        size = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        computes = "" if self.fp8 is None else f", fp8={self.fp8.name!r}"
        return f"{size}, kind={self.kind!r}, dtype={dtype}" + f", block={block}" * bool(block) + computes

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As in nn.Module, but a cast changes only the bias and the adapter."""

        def without_cast(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype or tensor is self.bias else tensor.to(result.device)

        if recurse:
            for child in self.children():
                child._apply(fn)
        return super()._apply(without_cast, recurse=False)
