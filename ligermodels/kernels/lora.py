"""LoRA adapters of layers of one input: what they add to the outputs, and their gradients; without autograd.

    y_i += s_i (x A_i^T) B_i^T        for layers i side by side in y [T, sum N_i]

- One matmul for all A_i. The matmul with B_i adds to its columns of y, scaled, in its epilogue, so that no other tensor
  of y's size is written.
- A and B may be fp32 beside 16-bit layers. They are cast once per use, and their gradients are summed in fp32; or, as
  PEFT has it by default, they compute in fp32: beside bf16 on a CUDA device by tensor cores, see _split.py; else x, dy
  and what is added to y are cast.

linear.py and gated_mlp.py run the layers themselves. Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ligermodels.kernels._gradients import accumulate
from ligermodels.kernels._split import PARTS, gradient_of_columns, gradient_of_rows, split
from ligermodels.kernels._triton import accumulator, use_triton
from ligermodels.kernels.low_bit import Weight
from ligermodels.kernels.operand import Adapter


class Branch:
    """The adapters of layers side by side, some of which have none; made without autograd.

    dtype: that of x, in which those compute that name no other.
    """

    def __init__(self, weights: Sequence[Weight], adapters: Sequence[Adapter | None], dtype: torch.dtype):
        self.adapters, found = adapters, [adapter for adapter in adapters if adapter is not None]
        wanted = {adapter.dtype for adapter in found if adapter.dtype is not None}
        self.dtype = functools.reduce(torch.promote_types, wanted, dtype)  # to which x and dy are cast
        self.splits = dtype == torch.bfloat16 and self.dtype == torch.float32 and _can_split(found[0].a)
        self.parts: list[tuple[slice, slice, float]] = []  # the columns of y, those of H = x A^T, and the scale of each
        row = rank = 0
        for weight, adapter in zip(weights, adapters, strict=True):
            end = row + weight.shape[0]
            if adapter is not None:
                r = adapter.a.shape[0] * (PARTS if self.splits else 1)
                self.parts.append((slice(row, end), slice(rank, rank + r), adapter.scale))
                rank += r
            row = end
        a, b = torch.cat([adapter.a for adapter in found]).to(self.dtype), [one.b.to(self.dtype) for one in found]
        if self.splits:
            self.dtype, a, b = dtype, split(a, left=False, rows=True), [split(one, left=False) for one in b]
        self.a, self.b = a, b  # a: [sum r_i, K]
        self.da: Any = None
        self.db: list[Tensor] = []

    def _inner(self, x: Tensor) -> Tensor:
        """H [T, sum r_i] of x [T, K], split where A is."""
        if not self.splits:
            return x.to(self.dtype) @ self.a.t()
        h = x.new_empty(x.shape[0], self.a.shape[0], dtype=torch.float32)
        _set_product(h, x, self.a.t())
        return split(h, left=True, summed=True)

    def add_to(self, y: Tensor, x: Tensor) -> Tensor:
        """Adds the adapters' outputs for x [T, K] to y [T, sum N_i]. Returns H [T, sum r_i]."""
        h = self._inner(x)
        for (columns, ranks, scale), b in zip(self.parts, self.b, strict=True):
            _add_product(y[:, columns], h[:, ranks], b.t(), scale)
        return h

    def inner_gradient(self, dy: Tensor) -> Tensor:
        """dH [T, sum r_i] from dy [T, sum N_i]."""
        dh = dy.new_empty(dy.shape[0], self.a.shape[0], dtype=torch.float32 if self.splits else self.dtype)
        for (columns, ranks, scale), b in zip(self.parts, self.b, strict=True):
            _set_product(dh[:, ranks], dy[:, columns].to(self.dtype), b, scale)
        return split(dh, left=True, summed=True) if self.splits else dh

    def add_input_gradient(self, dx: Tensor, dh: Tensor) -> Tensor:
        """Adds the adapters' part to dx [T, K]."""
        return _add_product(dx, dh, self.a)

    def add_gradients(self, dy: Tensor, x: Tensor, h: Tensor | None, dh: Tensor) -> None:
        """Adds the gradients of A and B for some tokens; x [T, K]; h = x A^T, or None to compute it here."""
        x, h = x.to(self.dtype), self._inner(x) if h is None else h
        first, dtype = self.da is None, accumulator(x.dtype)
        if first:
            self.da = x.new_empty(self.a.shape, dtype=dtype)
            self.db = [x.new_empty(b.shape, dtype=dtype) for b in self.b]
        accumulate(self.da, dh, x, first)
        for (columns, ranks, _), db in zip(self.parts, self.db, strict=True):
            accumulate(db, dy[:, columns].to(self.dtype), h[:, ranks], first)

    def gradients(self) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Those of A and of B of each layer, in their dtypes; None where it has none, or they were not added."""
        da: list[Any] = [None] * len(self.adapters)
        db = list(da)
        at = [i for i, adapter in enumerate(self.adapters) if adapter is not None and self.da is not None]
        for i, (_, ranks, scale), total in zip(at, self.parts, self.db, strict=False):
            of_a = self.da[ranks]
            if self.splits:
                of_a, total = gradient_of_rows(of_a), gradient_of_columns(total)
            da[i] = of_a.to(self.adapters[i].a.dtype)  # type: ignore[union-attr]
            db[i] = total.mul_(scale).to(self.adapters[i].b.dtype)  # type: ignore[union-attr]
        return da, db


def _can_split(x: Tensor) -> bool:
    return use_triton(x) and torch.version.hip is None and x.device.type != "xpu"


def _set_product(total: Tensor, x: Tensor, y: Tensor, scale: float = 1.0) -> None:
    """total = scale * x @ y; total may be fp32 where x and y are in 16 bits."""
    if total.dtype == x.dtype:
        torch.addmm(total, x, y, beta=0, alpha=scale, out=total)
    elif x.is_cuda:
        torch.addmm(total, x, y, out_dtype=total.dtype, beta=0, alpha=scale, out=total)
    else:  # only cuBLAS multiplies 16 bits into fp32
        torch.addmm(total, x.to(total.dtype), y.to(total.dtype), beta=0, alpha=scale, out=total)


def _add_product(total: Tensor, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    """total += scale * x @ y, rounded once."""
    if total.dtype == x.dtype:
        return torch.addmm(total, x, y, alpha=scale, out=total)
    return total.add_(x @ y, alpha=scale)
