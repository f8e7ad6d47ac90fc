"""Frozen weights of 4 or 8 bits: the interface that ops use.

nf4.py and quantized.py have the formats, as subclasses of `LowBitWeight`. A weight is dequantised before each matmul by
cuBLAS, and freed after it. Weights of one input are dequantised side by side, so that one matmul reads all of them.
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

    kind: the format. shape, dtype: of the weight that was quantised. block: number of weights in row-major order that
    share a scale; 0: each row has its own. tensor_names: the tensors, of which `packed` has the bits. row_names: the
    tensors whose rows belong to rows of the weight, in order. max_rows: a kernel reads the bits for at most as many
    rows of x.
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
        """The other arguments: type(weight)(*weight.options, *weight.tensors) builds the weight again."""
        return self.kind, self.shape, self.dtype, self.block

    def dequantize(self, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """The weight in floating point, rounded once, without autograd.

        out: contiguous, of the weight's shape; the result is written to it. dtype: by default that of out, or else of
        the weight that was quantised. Raises InputError if out does not fit.
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
        return {name: rows for name in self.row_names if (rows := getattr(self, name)) is not None}

    def in_groups(self, groups: int) -> Self:
        """The weight [N, K] as the weight [E, N / E, K] of a group of E layers, over the same memory.

        Raises InputError if a block, or a scale of scales, would belong to two layers.
        """
        if self.block and math.prod(self.shape) // groups % self.block:
            raise InputError(f"a weight {self.shape} with blocks of {self.block} cannot be a group of {groups} layers")
        for name, tensor in self._rows().items():
            if tensor.shape[0] % groups:
                raise InputError(
                    f"a weight {self.shape} whose {name} has {describe(tensor)} cannot be a group of {groups} layers: "
                    "they were quantised together; quantise each layer, and `stack` them"
                )
        return replace(self, shape=(groups, self.shape[0] // groups, *self.shape[1:]))

    @classmethod
    def stack(cls, weights: Sequence[Self]) -> Self:
        """One weight with the rows of all weights [N, K], each of which stays quantised by itself.

        Raises InputError unless all have one kind, shape and block, and each ends with a whole block.
        """
        first, shape = weights[0], weights[0].shape
        kinds = {(weight.options, tuple(weight._rows())) for weight in weights}
        if len(kinds) > 1 or (first.block and math.prod(shape) % first.block):
            raise InputError(
                f"{len(weights)} weights {tuple(shape)} with blocks of {first.block} cannot be one stack: expected "
                "weights of one kind, and a number of elements that the block divides"
            )
        rows: Any = {name: torch.cat([getattr(weight, name) for weight in weights]) for name in first._rows()}
        return replace(first, shape=(len(weights) * shape[0], *shape[1:]), **rows)

    def split(self, parts: int) -> list[Self]:
        """The weight as `parts` weights [N / parts, K], over the same memory: the inverse of `stack`."""
        rows, shape = self._rows(), (self.shape[0] // parts, *self.shape[1:])
        each = zip(*(tensor.chunk(parts) for tensor in rows.values()), strict=True)
        return [replace(self, shape=shape, **dict(zip(rows, chunks, strict=True))) for chunks in each]  # type: ignore[arg-type]

    def select(self, index: Tensor) -> Self:
        """A copy [R, N, K] of some layers of a group. index [R]: integers on the device."""

        def select(tensor: Tensor) -> Tensor:
            bits = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor  # index_select does not support fp8
            return bits.unflatten(0, (self.shape[0], -1)).index_select(0, index).flatten(0, 1).view(tensor.dtype)

        rows: Any = {name: select(tensor) for name, tensor in self._rows().items()}
        return replace(self, shape=(index.numel(), *self.shape[1:]), **rows)


Weight = Tensor | LowBitWeight


def has_bits(weights: Sequence[Weight]) -> bool:
    """True if any of the weights is quantised."""
    for weight in weights:  # noqa: SIM110  # a generator would take the host four times as long
        if not isinstance(weight, Tensor):
            return True
    return False


def check_quantizable(weight: Tensor, kind: str) -> None:
    """Raises InputError unless the weight is bf16, fp16 or fp32, frozen and finite. Synchronises."""
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
    """The weights as tensors: quantised ones are dequantised so that they are `joint`. Without autograd."""
    quantized = [weight for weight in weights if isinstance(weight, LowBitWeight)]
    if not quantized:
        return weights
    sizes = [math.prod(weight.shape) for weight in quantized]
    parts = iter(torch.empty(sum(sizes), dtype=dtype, device=quantized[0].device).split(sizes))
    return [
        weight.dequantize(out=next(parts).view(weight.shape)) if isinstance(weight, LowBitWeight) else weight
        for weight in weights
    ]
