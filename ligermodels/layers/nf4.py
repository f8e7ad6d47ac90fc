"""A frozen linear layer of 4 bits per weight, on which adapters are trained (QLoRA).

    y = x @ w.T + bias, dx = dy @ w          w = code[index] * absmax, see kernels/nf4.py

x is not saved. Layers run several as one op, with their adapters (linear.py).
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.kernels._triton import cdiv
from ligermodels.kernels.nf4 import BLOCKS, NESTED_BLOCK, NF4Weight, quantize_nf4
from ligermodels.layers.quantized import LowBitLinear


class NF4Linear(LowBitLinear):
    """y = x @ weight.T + bias with a frozen weight [out_features, in_features] of 4 bits, in bitsandbytes' layout.

    It computes in the dtype of x, or autocast's, and its backward computes only dx.

    weight: frozen parameter, uint8 [ceil(N K / 2), 1]. absmax: with `double`, frozen parameter, uint8 [B] for B blocks
    of `block` weights; else buffer, fp32 [B]. quant_map, and with `double` nested_absmax, nested_quant_map and
    nested_offset: buffers, fp32, which casts of the model leave alone; of a `stack`, one nested_offset for each part.
    bias: frozen parameter or None.
    FSDP2 shards the byte parameters as any frozen ones, gathers them at a quarter of bf16's traffic, and its mixed
    precision leaves them alone. The values are random until `from_weight` or a state dict sets them.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        block: int = 64,
        double: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if block not in BLOCKS or in_features < 1 or out_features < 1:
            raise InputError(f"NF4Linear: in_features={in_features}, out_features={out_features}, block={block}")
        self.in_features, self.out_features, self.block = in_features, out_features, block
        self.original_dtype = torch.get_default_dtype() if dtype is None else dtype
        blocks = cdiv(in_features * out_features, block)

        def frozen(*shape: int, dtype: torch.dtype = torch.uint8) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        def fp32(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        self.bias: nn.Parameter | None
        self.weight = frozen(cdiv(in_features * out_features, 2), 1)
        self.absmax: Tensor
        if double:
            self.absmax = frozen(blocks)
        else:
            self.register_buffer("absmax", fp32(blocks))
        self.register_buffer("quant_map", fp32(16))
        self.register_buffer("nested_absmax", fp32(cdiv(blocks, NESTED_BLOCK)) if double else None)
        self.register_buffer("nested_quant_map", fp32(256) if double else None)
        self.register_buffer("nested_offset", fp32() if double else None)
        self.bias = frozen(out_features, dtype=self.original_dtype) if bias else None

    @classmethod
    def from_weight(cls, weight: Tensor, bias: Tensor | None = None, *, block: int = 64, double: bool = True) -> Self:
        """The layer of a frozen weight [N, K] and bias [N] in bf16, fp16 or fp32, on their device.

        Raises InputError for one that requires a gradient, holds NaN or has another shape or dtype.
        """
        cls._check(weight, bias)
        return cls.from_operand(quantize_nf4(weight, block=block, double=double), bias)

    @classmethod
    def from_operand(cls, operand: NF4Weight, bias: Tensor | None = None) -> Self:
        (rows, columns), double = operand.shape, operand.nested_absmax is not None
        with torch.device("meta"):
            made = cls(columns, rows, block=operand.block, double=double, dtype=operand.dtype)
        made.weight = nn.Parameter(operand.packed, requires_grad=False)
        made.absmax = nn.Parameter(operand.absmax, requires_grad=False) if double else operand.absmax
        made._buffers |= {
            "quant_map": operand.code,
            "nested_absmax": operand.nested_absmax,
            "nested_quant_map": operand.nested_code,
            "nested_offset": operand.offset,
        }
        made.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        return made

    @property
    def operand(self) -> NF4Weight:
        """The weight for a fused op."""
        shape = self.out_features, self.in_features
        code: Any = self.quant_map
        nested: Any = self.nested_absmax, self.nested_quant_map, self.nested_offset
        return NF4Weight(self.weight, self.absmax, code, shape, self.original_dtype, self.block, *nested)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, block={self.block}, double={self.nested_absmax is not None}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As for any module, but casts of the model leave the fp32 buffers in fp32."""
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            found = self._buffers[name]
            if found is not None and found.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(found.device)
        return self
