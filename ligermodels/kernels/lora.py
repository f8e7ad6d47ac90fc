"""LoRA adapters of layers of one input: what they add to the outputs, and their gradients; without autograd.

    y_i += s_i (x A_i^T) B_i^T        for layers i side by side in y [T, sum N_i]

- One matmul for all A_i. The matmul with B_i adds to its columns of y, scaled, in its epilogue, so that no other tensor
  of y's size is written.
- A and B may be fp32 beside 16-bit layers. They are cast once per use, and their gradients are summed in fp32; or, as
  PEFT has it by default, they compute in fp32: beside bf16 on a CUDA device by tensor cores, see _split.py; else x, dy
  and what is added to y are cast.

linear.py and gated_mlp.py run the layers themselves. Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ligermodels.kernels._gradients import accumulate
from ligermodels.kernels._split import PARTS, gradient_of_columns, gradient_of_rows, split
from ligermodels.kernels._triton import accumulator, use_triton
from ligermodels.kernels.low_bit import Weight
from ligermodels.kernels.operand import Adapter

Parts = tuple[Sequence[tuple[slice, slice, float]], torch.dtype | None]
"""For each adapter the columns of its layer in y, its columns of H = x A^T, and its scale; the dtype that one names."""


def flatten_adapters(
    weights: Sequence[Weight], adapters: Sequence[Adapter | None]
) -> tuple[tuple[Tensor, ...], Parts]:  # fmt: skip
    """(every A, then every B; the parts) of layers of these weights, some of which have an adapter."""
    found, parts, row, rank, dtype = [], [], 0, 0, None
    for weight, adapter in zip(weights, adapters, strict=True):
        end = row + weight.shape[0]
        if adapter is not None:
            found.append(adapter)
            r = adapter.a.shape[0]
            parts.append((slice(row, end), slice(rank, rank + r), adapter.scale))
            rank += r
            if adapter.dtype is not None:
                dtype = adapter.dtype if dtype is None else torch.promote_types(dtype, adapter.dtype)
        row = end
    return (*[one.a for one in found], *[one.b for one in found]), (parts, dtype)


class Branch:
    """The adapters of layers side by side; made without autograd.

    factors, parts: from `flatten_adapters`. dtype: that of x, in which they compute unless one names another.
    """

    def __init__(self, factors: Sequence[Tensor], parts: Parts, dtype: torch.dtype):
        self.factors, (self.parts, own) = factors, parts
        self.dtype = dtype if own is None else torch.promote_types(dtype, own)  # to which x and dy are cast
        self.splits = dtype == torch.bfloat16 and self.dtype == torch.float32 and _can_split(factors[0])
        count = len(self.parts)
        self.a = torch.cat(factors[:count]).to(self.dtype)  # type: ignore[arg-type]  # [sum r_i, K]
        self.b = [b.to(self.dtype) for b in factors[count:]]
        if self.splits:
            self.dtype, self.a = dtype, split(self.a, left=False, rows=True)
            self.b = [split(b, left=False) for b in self.b]
            self.parts = [
                (columns, slice(PARTS * at.start, PARTS * at.stop), scale) for columns, at, scale in self.parts
            ]
        self.da: Any = None

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

    def gradients(self) -> list[Tensor | None]:
        """Those of the factors, in their dtypes; None where they were not added."""
        if self.da is None:
            return [None] * len(self.factors)
        da, db = [self.da[ranks] for _, ranks, _ in self.parts], self.db
        if self.splits:
            da, db = list(map(gradient_of_rows, da)), list(map(gradient_of_columns, db))
        db = [total.mul_(scale) for (_, _, scale), total in zip(self.parts, db, strict=True)]
        return [gradient.to(factor.dtype) for gradient, factor in zip([*da, *db], self.factors, strict=True)]


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
