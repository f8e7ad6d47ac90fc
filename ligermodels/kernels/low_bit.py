"""Frozen weights of 4 or 8 bits as operands of linear layers, dequantised into a buffer that is reused.

    y = x @ w.T + bias, dx = dy @ w          w = weight.dequantize(dtype)

nf4.py and quantized.py have the formats, as subclasses of `LowBitWeight`. A weight is dequantised before each matmul,
which cuBLAS computes; between two matmuls no dequantised weight exists. Weights of one input are dequantised side by
side, so that one matmul reads all of them. Each stream of a GPU has one buffer, as large as its largest matmul needed,
until `release_buffers()`.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._check import describe
from ligermodels.kernels._triton import is_capturing, once_differentiable
from ligermodels.kernels.operand import LowBitWeight, Weight, autocast_dtype, has_bits


def output_for(
    where: str, out: Tensor | None, dtype: torch.dtype | None, shape: tuple[int, ...], default: torch.dtype,
    device: torch.device,
) -> Tensor:  # fmt: skip
    """Where a weight is dequantised: `out`, checked, or a new tensor of `dtype`, or of the default one."""
    if out is None:
        out = torch.empty(shape, dtype=dtype or default, device=device)
    elif out.shape != shape or out.device != device or not out.is_contiguous() or dtype not in (None, out.dtype):
        raise InputError(
            f"{where}: out has {describe(out)}; expected contiguous {shape} on {device}, "
            f"of {dtype or 'a floating point dtype'}"
        )
    if not out.is_floating_point() or out.requires_grad:
        raise InputError(f"{where}: the result has {describe(out)}; expected floating point without a gradient")
    return out


def select_rows(packed: Tensor, groups: int, index: Tensor) -> Tensor:
    """The rows of packed [E n, ...] of the groups index [R] of E: [R n, ...]."""
    bits = packed.view(torch.uint8) if packed.itemsize == 1 else packed  # index_select does not know fp8
    return bits.unflatten(0, (groups, -1)).index_select(0, index).flatten(0, 1).view(packed.dtype)


_FREE: dict[tuple[torch.device, int], list[Tensor]] = {}
"""(device, stream) -> byte buffers that are not in use."""


def dequantized(weights: Sequence[Weight], dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """`with dequantized(weights, x.dtype) as tensors:` the weights as tensors, those of low bits dequantised.

    The dequantised ones are `joint`, without autograd, and valid inside the block: other weights overwrite them later.
    Nested blocks have buffers of their own. So have streams, hence kernels that the block launched have read the buffer
    before the next kernel of the stream writes it. During CUDA graph capture, and on devices other than the CPU and
    CUDA, the block allocates its memory.
    """
    if not has_bits(weights):
        return contextlib.nullcontext(weights)
    return _dequantized(weights, dtype)


@contextlib.contextmanager
def _dequantized(weights: Sequence[Weight], dtype: torch.dtype) -> Iterator[list[Tensor]]:
    found = [weight for weight in weights if isinstance(weight, LowBitWeight)]
    sizes = [math.prod(weight.shape) for weight in found]
    with _buffer(dtype.itemsize * sum(sizes), found[0].device) as buffer:
        parts = iter(buffer.view(dtype).split(sizes))
        yield [
            weight.dequantize(out=next(parts).view(weight.shape)) if isinstance(weight, LowBitWeight) else weight
            for weight in weights
        ]


@contextlib.contextmanager
def _buffer(size: int, device: torch.device) -> Iterator[Tensor]:
    """`size` bytes for the time of a block."""
    stream = 0
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device).cuda_stream
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and is_capturing()):
        yield torch.empty(size, dtype=torch.uint8, device=device)
        return
    free = _FREE.setdefault((device, stream), [])
    try:
        buffer = free.pop()  # atomic: the backward runs in threads of its own
    except IndexError:
        buffer = None
    if buffer is None or buffer.numel() < size:
        del buffer  # before the larger one is allocated
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
    try:
        yield buffer[:size]
    finally:
        free.append(buffer)


def release_buffers() -> None:
    """Frees the buffers of `dequantized`; the next matmul allocates one again."""
    _FREE.clear()


def _with_weight(weight: LowBitWeight, dtype: torch.dtype, matmul: Callable[[Tensor], Tensor]) -> Tensor:
    """matmul(the dequantised weight)."""
    if torch.compiler.is_compiling():  # the compiler allocates its memory
        return matmul(weight.dequantize(dtype))
    with dequantized([weight], dtype) as (found,):
        return matmul(found)


class _FrozenLinear(torch.autograd.Function):
    """x: [..., K]; kind, options, tensors: of a LowBitWeight [N, K]; bias: [N] or None -> [..., N]. Only x is
    trained."""

    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor | None, kind: type[LowBitWeight], options: tuple[Any, ...], *tensors):
        ctx.save_for_backward(*tensors)
        ctx.known = kind, options
        return _with_weight(kind.unflatten(tensors, options), x.dtype, lambda weight: F.linear(x, weight, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        kind, options = ctx.known
        tensors = ctx.saved_tensors
        dx = _with_weight(kind.unflatten(tensors, options), dy.dtype, lambda weight: dy @ weight)
        return dx, *[None] * (3 + len(tensors))


def frozen_linear(x: Tensor, weight: LowBitWeight, bias: Tensor | None = None) -> Tensor:
    """F.linear(x, weight, bias) for a frozen weight [N, K]; the backward needs the weight, but not x.

    x: [..., K]; bias: [N] or None, frozen, of any dtype. Returns [..., N] of x's dtype, or of autocast's.
    Raises InputError for an x that does not fit, and for a bias that requires a gradient.
    """
    if x.shape[-1] != weight.shape[1] or not x.is_floating_point() or x.device != weight.device:
        raise InputError(
            f"frozen_linear: x has {describe(x)}; expected floating point [..., {weight.shape[1]}] on {weight.device}"
        )
    if bias is not None and bias.requires_grad:
        raise InputError(
            "frozen_linear: the bias requires a gradient, which is not computed; call bias.requires_grad_(False)"
        )
    x = x.to(autocast_dtype(x) or x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    if x.requires_grad and torch.is_grad_enabled():
        tensors, options = weight.flatten()
        return _FrozenLinear.apply(x, bias, type(weight), options, *tensors)
    return _with_weight(weight, x.dtype, lambda found: F.linear(x, found, bias))
