"""A frozen linear layer of 4 bits per weight, for adapters to be trained over (QLoRA).

    y = x @ w.T + bias, dx = dy @ w          w = code[index] * absmax, see kernels/nf4.py

w is made for each product, in the forward and again in the backward, in memory that is reused: between two products no
dequantised weight exists, and of x nothing is saved. Per GPU stream there is one such buffer, as large as the largest
weight has needed (`borrowed_weight`); it stays allocated until `release_buffers()`.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.kernels._check import describe
from ligermodels.kernels._triton import cdiv, is_capturing, once_differentiable
from ligermodels.kernels.nf4 import BLOCKS, NESTED_BLOCK, NF4State, dequantize_nf4, quantize_nf4

_FREE: dict[tuple[torch.device, int], list[Tensor]] = {}
"""Buffers that nobody uses, by device and stream; bytes."""


@contextlib.contextmanager
def borrowed_weight(packed: Tensor, state: NF4State, dtype: torch.dtype) -> Iterator[Tensor]:
    """For a block that uses the dequantised weight: afterwards its memory is another weight's. Without autograd.

    Two weights at a time have two buffers. Streams share none, so that whatever the block has launched on the current
    stream reads the weight before the next one is written there. While a CUDA graph is captured, and on devices other
    than the CPU and CUDA, the weight has memory of its own.
    """
    device, stream = packed.device, 0
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device).cuda_stream
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and is_capturing()):
        yield dequantize_nf4(packed, state, dtype=dtype)
        return
    free = _FREE.setdefault((device, stream), [])
    size = dtype.itemsize * math.prod(state.shape)
    try:
        buffer = free.pop()  # atomic: the backward runs in threads of its own
    except IndexError:
        buffer = None
    if buffer is None or buffer.numel() < size:
        del buffer  # before the larger one is allocated
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
    try:
        yield dequantize_nf4(packed, state, out=buffer[:size].view(dtype).view(state.shape))
    finally:
        free.append(buffer)


def release_buffers() -> None:
    """Frees the memory in which weights are dequantised; the next product allocates it again."""
    _FREE.clear()


def _with_weight(packed: Tensor, state: NF4State, dtype: torch.dtype, product: Callable[[Tensor], Tensor]) -> Tensor:
    """product(the dequantised weight)."""
    if torch.compiler.is_compiling():  # the compiler places it
        return product(dequantize_nf4(packed, state, dtype=dtype))
    with borrowed_weight(packed, state, dtype) as weight:
        return product(weight)


class _FrozenLinear(torch.autograd.Function):
    """x: [..., K]; packed and the fields of a state of a weight [N, K]; bias: [N] or None -> [..., N]. Frozen but x."""

    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor | None, packed: Tensor, absmax, code, shape, dtype, block, *nested):
        ctx.save_for_backward(packed, absmax, code, *nested)
        ctx.options = shape, dtype, block
        state = NF4State(absmax, code, shape, dtype, block, *nested)
        return _with_weight(packed, state, x.dtype, lambda weight: F.linear(x, weight, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        packed, absmax, code, *nested = ctx.saved_tensors
        state = NF4State(absmax, code, *ctx.options, *nested)
        dx = _with_weight(packed, state, dy.dtype, lambda weight: dy @ weight)
        return dx, *[None] * 10


class NF4Linear(nn.Module):
    """y = x @ weight.T + bias with a frozen weight [out_features, in_features] of 4 bits, in bitsandbytes' bytes.

    It computes in the dtype of x, under autocast in autocast's, and its backward gives dx alone.

    weight: frozen parameter, uint8 [ceil(N K / 2), 1]. absmax: with `double`, frozen parameter, uint8 [B] for B blocks
    of `block` weights; else buffer, fp32 [B]. quant_map, and with `double` nested_absmax, nested_quant_map and
    nested_offset: buffers, fp32; they stay fp32 whatever the model is cast to. bias: frozen parameter or None.
    The parameters of bytes are sharded by FSDP2 as any frozen ones, and gathered at a quarter of bf16's traffic; mixed
    precision leaves them alone. With random bytes until `from_weight` or a state dict has filled it.
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
        if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
            raise InputError(
                f"NF4Linear: weight has {describe(weight)}, bias {bias if bias is None else describe(bias)}"
            )
        if bias is not None and bias.requires_grad:
            raise InputError("NF4Linear: the bias requires a gradient; the layer is frozen: pass bias.detach()")
        return cls.from_packed(*quantize_nf4(weight, block=block, double=double), bias)

    @classmethod
    def from_packed(cls, packed: Tensor, state: NF4State, bias: Tensor | None = None) -> Self:
        """The layer of what `quantize_nf4` returns, over the same memory."""
        rows, columns = state.shape
        double = state.nested_absmax is not None
        with torch.device("meta"):
            made = cls(columns, rows, block=state.block, double=double, dtype=state.dtype)
        made.weight = nn.Parameter(packed, requires_grad=False)
        made.absmax = nn.Parameter(state.absmax, requires_grad=False) if double else state.absmax
        made._buffers |= {
            "quant_map": state.code,
            "nested_absmax": state.nested_absmax,
            "nested_quant_map": state.nested_code,
            "nested_offset": state.offset,
        }
        made.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        return made

    @property
    def state(self) -> NF4State:
        """What `dequantize_nf4` needs beside the packed weight."""
        shape = self.out_features, self.in_features
        nested: Any = self.nested_absmax, self.nested_quant_map, self.nested_offset
        return NF4State(self.absmax, self.quant_map, shape, self.original_dtype, self.block, *nested)  # type: ignore[arg-type]

    def dequantized_weight(self, dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:
        """The weight [N, K], in memory of its own or in `out`, by default in the dtype that it was quantised from."""
        return dequantize_nf4(self.weight, self.state, dtype=dtype, out=out)

    def weight_for_use(self, dtype: torch.dtype) -> contextlib.AbstractContextManager[Tensor]:
        """`with layer.weight_for_use(x.dtype) as weight:` the weight [N, K], in memory that is reused afterwards.

        For the forward and backward of an autograd.Function, or under torch.no_grad: autograd would keep the memory
        for a backward that comes when another weight is there. Raises InputError where gradients are on.
        """
        if torch.is_grad_enabled():
            raise InputError(
                "NF4Linear.weight_for_use: gradients are on, and autograd would keep memory that is reused. Call it "
                "under torch.no_grad or in an autograd.Function, or take layer.dequantized_weight(dtype)"
            )
        return borrowed_weight(self.weight, self.state, dtype)

    def forward(self, x: Tensor) -> Tensor:
        bias: Tensor | None = self.bias
        if x.shape[-1] != self.in_features or not x.is_floating_point() or x.device != self.weight.device:
            raise InputError(
                f"NF4Linear: x has {describe(x)}; expected floating point [..., {self.in_features}] on "
                f"{self.weight.device}"
            )
        if bias is not None and bias.requires_grad:
            raise InputError(
                "NF4Linear: its bias requires a gradient, and it computes none: bias.requires_grad_(False)"
            )
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if bias is not None:
            bias = bias.to(x.dtype)
        if x.requires_grad and torch.is_grad_enabled():
            return _FrozenLinear.apply(x, bias, self.weight, *self.state)
        return _with_weight(self.weight, self.state, x.dtype, lambda weight: F.linear(x, weight, bias))

    def extra_repr(self) -> str:
        double = self.nested_absmax is not None
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"block={self.block}, double={double}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As for any module, but the fp32 buffers only change their device: a model is cast as a whole."""
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            found = self._buffers[name]
            if found is not None and found.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(found.device)
        return self
