"""Frozen weights in few bits as operands of products, and the memory in which they are dequantised.

    y = x @ w.T + bias, dx = dy @ w          w = weight.dequantize(dtype)

`LowBitWeight` is what ops take for a tensor: nf4.py and quantized.py hold the formats. A weight is dequantised for each
product and multiplied by cuBLAS, in memory that is reused (`dequantized`): between two products no dequantised weight
exists. Weights of one input are made one behind the other, and are one matrix to the product. Per stream of a GPU there
is one such buffer, as large as any product has needed; it stays until `release_buffers()`.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._check import describe
from ligermodels.kernels._triton import is_capturing, once_differentiable
from ligermodels.kernels.linear import autocast_dtype


class LowBitWeight:
    """A frozen weight [N, K] that holds few bits for each number."""

    __slots__ = ()
    requires_grad: ClassVar[bool] = False

    @property
    def shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        raise NotImplementedError

    def dequantize(self, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """The weight [N, K] without autograd, into `out` where given, which is contiguous; dtype: by default that of
        `out`, or of the weight that was quantised."""
        raise NotImplementedError

    def flatten(self) -> tuple[tuple[Tensor | None, ...], tuple[Any, ...]]:
        """Its tensors, and the options by which `of` makes it of them again."""
        raise NotImplementedError

    @classmethod
    def unflatten(cls, tensors: Sequence[Any], options: tuple[Any, ...]) -> Self:
        raise NotImplementedError


Weight = Tensor | LowBitWeight
"""A weight that a product reads."""

_FREE: dict[tuple[torch.device, int], list[Tensor]] = {}
"""Buffers that nobody uses, by device and stream; bytes."""


def dequantized(weights: Sequence[Weight], dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """`with dequantized(weights, x.dtype) as tensors:` the weights for products with x, packed ones dequantised.

    These lie one behind the other (`joint`), in memory that is other weights' afterwards. Without autograd. Two blocks,
    one inside the other, have two buffers. Streams share none, so that whatever the block has launched on the current
    stream reads its weights before the next are written there. While a CUDA graph is captured, and on devices other
    than the CPU and CUDA, the memory is the block's own.
    """
    if not any(isinstance(weight, LowBitWeight) for weight in weights):
        return contextlib.nullcontext(weights)
    return _dequantized(weights, dtype)


@contextlib.contextmanager
def _dequantized(weights: Sequence[Weight], dtype: torch.dtype) -> Iterator[list[Tensor]]:
    found = [weight for weight in weights if isinstance(weight, LowBitWeight)]
    sizes = [math.prod(weight.shape) for weight in found]
    with _borrowed(dtype.itemsize * sum(sizes), found[0].device) as buffer:
        parts = iter(buffer.view(dtype).split(sizes))
        yield [
            weight.dequantize(out=next(parts).view(weight.shape)) if isinstance(weight, LowBitWeight) else weight
            for weight in weights
        ]


@contextlib.contextmanager
def _borrowed(size: int, device: torch.device) -> Iterator[Tensor]:
    """Memory of `size` bytes, for a block."""
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
    """Frees the memory in which weights are dequantised; the next product allocates it again."""
    _FREE.clear()


def flatten_weights(weights: Sequence[Weight]) -> tuple[list[Tensor | None], list[Any]]:
    """The tensors of the weights, for ctx.save_for_backward, and what `unflatten_weights` needs beside them."""
    tensors: list[Tensor | None] = []
    rest: list[Any] = []
    for weight in weights:
        if isinstance(weight, Tensor):
            tensors.append(weight)
            rest.append(None)
            continue
        own, options = weight.flatten()
        tensors += own
        rest.append((type(weight), len(own), options))
    return tensors, rest


def unflatten_weights(tensors: Iterator[Any], rest: Sequence[Any]) -> list[Weight]:
    """The weights that were `flatten_weights`, of their tensors, which are the next ones."""
    found: list[Weight] = []
    for known in rest:
        if known is None:
            found.append(next(tensors))
            continue
        kind, count, options = known
        found.append(kind.unflatten(list(itertools.islice(tensors, count)), options))
    return found


def _with_weight(weight: LowBitWeight, dtype: torch.dtype, product: Callable[[Tensor], Tensor]) -> Tensor:
    """product(the dequantised weight)."""
    if torch.compiler.is_compiling():  # the compiler places it
        return product(weight.dequantize(dtype))
    with dequantized([weight], dtype) as (found,):
        return product(found)


class _FrozenLinear(torch.autograd.Function):
    """x: [..., K]; kind, options, tensors: of a packed weight [N, K]; bias: [N] or None -> [..., N]. Frozen but x."""

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
    """F.linear(x, the weight [N, K], bias), of which nothing of x is saved.

    x: [..., K]; bias: [N] or None, frozen, of any dtype. Returns [..., N] of x's dtype, under autocast of autocast's.
    Raises InputError for an x that does not fit, and for a bias that requires a gradient.
    """
    if x.shape[-1] != weight.shape[1] or not x.is_floating_point() or x.device != weight.device:
        raise InputError(
            f"frozen_linear: x has {describe(x)}; expected floating point [..., {weight.shape[1]}] on {weight.device}"
        )
    if bias is not None and bias.requires_grad:
        raise InputError(
            "frozen_linear: its bias requires a gradient, and it computes none: bias.requires_grad_(False)"
        )
    x = x.to(autocast_dtype(x) or x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    if x.requires_grad and torch.is_grad_enabled():
        tensors, options = weight.flatten()
        return _FrozenLinear.apply(x, bias, type(weight), options, *tensors)
    return _with_weight(weight, x.dtype, lambda found: F.linear(x, found, bias))
