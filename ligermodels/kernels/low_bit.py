"""Frozen weights of 4 or 8 bits: what ops need of them.

nf4.py and quantized.py have the formats, as subclasses of `LowBitWeight`. A weight is dequantised before each matmul,
which cuBLAS computes; between two matmuls no dequantised weight exists. Weights of one input are dequantised side by
side, so that one matmul reads all of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._check import describe

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False, slots=True)
class LowBitWeight:
    """A frozen weight [N, K], or [E, N, K] of a group of layers; ops take it in place of a tensor.

    kind: the format. shape, dtype: of the weight that was quantised. block: how many weights in row-major order share a
    scale; 0: each row is quantised by itself. The tensors are `tensor_names`, first the bits, `packed`; those of
    `row_names` follow the rows of the weight. max_rows: the largest number of rows of x with which a kernel reads them.
    """

    requires_grad: ClassVar[bool] = False
    max_rows: ClassVar[int] = 0
    tensor_names: ClassVar[tuple[str, ...]]
    row_names: ClassVar[tuple[str, ...]]

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    block: int
    packed: Tensor

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return tuple([getattr(self, name) for name in self.tensor_names])

    @property
    def options(self) -> tuple[Any, ...]:
        """type(weight)(*weight.options, *weight.tensors) is the weight again."""
        return self.kind, self.shape, self.dtype, self.block

    def dequantize(self, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """The weight, rounded once, without autograd.

        dtype: by default out's, or that of the weight that was quantised. out: contiguous, of the weight's shape, where
        the result is written. Raises InputError where it does not fit.
        """
        dtype = dtype or (self.dtype if out is None else out.dtype)
        out = torch.empty(self.shape, dtype=dtype, device=self.device) if out is None else out
        fits = out.shape == self.shape and out.device == self.device and out.dtype == dtype and out.is_contiguous()
        if not fits or not dtype.is_floating_point or out.requires_grad:
            raise InputError(
                f"dequantize: out has {describe(out)}; expected contiguous {self.shape} on {self.device}, of "
                f"{dtype if dtype.is_floating_point else 'a floating point dtype'} and without a gradient"
            )
        self._dequantize_into(out)
        return out

    def _dequantize_into(self, out: Tensor) -> None:
        raise NotImplementedError

    # ---- Rows ----

    def _rows(self) -> dict[str, Tensor]:
        return {name: found for name in self.row_names if (found := getattr(self, name)) is not None}

    def in_groups(self, groups: int) -> Self:
        """The weight [N, K] as one [E, N / E, K] of a group of layers, over the same memory.

        Raises InputError where a layer does not end with a block.
        """
        if self.block and math.prod(self.shape) // groups % self.block:
            raise InputError(f"a weight {self.shape} with blocks of {self.block} is no group of {groups} layers")
        return replace(self, shape=(groups, self.shape[0] // groups, *self.shape[1:]))

    @classmethod
    def stack(cls, weights: Sequence[Self]) -> Self:
        """The weights [N, K] one after the other, each quantised by itself, as one weight of all their rows.

        Raises InputError unless all are of one kind, shape and block, and end with a block.
        """
        first, shape = weights[0], weights[0].shape
        known = {(one.options, tuple(one._rows())) for one in weights}
        if len(known) > 1 or (first.block and math.prod(shape) % first.block):
            raise InputError(
                f"{len(weights)} weights {tuple(shape)} with blocks of {first.block} cannot be one stack: expected "
                "weights of one kind, and a number of elements that the block divides"
            )
        found: Any = {name: torch.cat([getattr(one, name) for one in weights]) for name in first._rows()}
        return replace(first, shape=(len(weights) * shape[0], *shape[1:]), **found)

    def split(self, parts: int) -> list[Self]:
        """The weight as `parts` weights [N / parts, K], over the same memory; of a `stack`, those that were stacked."""
        names, shape = self._rows(), (self.shape[0] // parts, *self.shape[1:])
        each = zip(*(tensor.chunk(parts) for tensor in names.values()), strict=True)
        return [replace(self, shape=shape, **dict(zip(names, one, strict=True))) for one in each]  # type: ignore[arg-type]

    def select(self, index: Tensor) -> Self:
        """The layers index [R], integers on the device, of a group: [R, N, K], with the same values."""

        def rows(tensor: Tensor) -> Tensor:
            bits = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor  # index_select does not know fp8
            return bits.unflatten(0, (self.shape[0], -1)).index_select(0, index).flatten(0, 1).view(tensor.dtype)

        found: Any = {name: rows(tensor) for name, tensor in self._rows().items()}
        return replace(self, shape=(index.numel(), *self.shape[1:]), **found)


Weight = Tensor | LowBitWeight


def has_bits(weights: Sequence[Weight]) -> bool:
    """True if a weight is of few bits."""
    for weight in weights:  # noqa: SIM110  # a generator would take the host four times as long
        if not isinstance(weight, Tensor):
            return True
    return False


def check_quantizable(weight: Tensor, kind: str) -> None:
    """Raises InputError unless the weight is bf16, fp16 or fp32, frozen and finite, for which it synchronises."""
    if weight.dtype not in _DTYPES or not weight.numel():
        raise InputError(f"quantize: weight has {describe(weight)}; expected elements of bf16, fp16 or fp32")
    if weight.requires_grad:
        raise InputError(
            f"quantize: the weight requires a gradient, but {kind} cannot be trained. Freeze it first: "
            "weight.requires_grad_(False), or pass weight.detach()"
        )
    if not weight.is_meta and not bool(torch.stack(weight.aminmax()).isfinite().all()):
        raise InputError(f"quantize: the weight has NaN or infinity, which {kind} cannot represent")


def dequantized(weights: Sequence[Weight], dtype: torch.dtype) -> Sequence[Any]:
    """The weights as tensors, those of few bits dequantised, and `joint`; without autograd."""
    found = [weight for weight in weights if isinstance(weight, LowBitWeight)]
    if not found:
        return weights
    sizes = [math.prod(weight.shape) for weight in found]
    parts = iter(torch.empty(sum(sizes), dtype=dtype, device=found[0].device).split(sizes))
    return [
        weight.dequantize(out=next(parts).view(weight.shape)) if isinstance(weight, LowBitWeight) else weight
        for weight in weights
    ]
