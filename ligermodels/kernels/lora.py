"""LoRA adapters of layers of one input: what they add to the outputs, and their gradients; without autograd.

    y_i += s_i (x A_i^T) B_i^T        for layers i side by side in y [T, sum N_i]

- One matmul for all A_i. The matmul with B_i adds to its columns of y, scaled, in its epilogue, so that no other tensor
  of y's size is written.
- A and B may be fp32 beside 16-bit layers. They are cast once per use, and their gradients are summed in fp32; or, as
  PEFT has it by default, they compute in fp32, and x, dy and what is added to y are cast.

linear.py and gated_mlp.py run the layers themselves. Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ligermodels.kernels._gradients import accumulate
from ligermodels.kernels._triton import accumulator
from ligermodels.kernels.low_bit import Weight
from ligermodels.kernels.operand import Adapter


class Branch:
    """The adapters of layers side by side, some of which have none; made without autograd.

    dtype: that of x, in which those compute that name no other.
    """

    def __init__(self, weights: Sequence[Weight], adapters: Sequence[Adapter | None], dtype: torch.dtype):
        self.adapters = adapters
        self.parts: list[tuple[slice, slice, float]] = []  # the columns of y, those of H = x A^T, and the scale of each
        found, row, rank = [], 0, 0
        for weight, adapter in zip(weights, adapters, strict=True):
            end = row + weight.shape[0]
            if adapter is not None:
                found.append(adapter)
                r = adapter.a.shape[0]
                self.parts.append((slice(row, end), slice(rank, rank + r), adapter.scale))
                if adapter.dtype is not None:
                    dtype = torch.promote_types(dtype, adapter.dtype)
                rank += r
            row = end
        self.dtype = dtype
        self.a = torch.cat([adapter.a for adapter in found]).to(dtype)  # [sum r_i, K]
        self.b = [adapter.b.to(dtype) for adapter in found]
        self.da: Any = None
        self.db: list[Tensor] = []

    def add_to(self, y: Tensor, x: Tensor) -> Tensor:
        """Adds the adapters' outputs for x [T, K] to y [T, sum N_i]. Returns H [T, sum r_i]."""
        h = x.to(self.dtype) @ self.a.t()
        for (columns, ranks, scale), b in zip(self.parts, self.b, strict=True):
            _add_product(y[:, columns], h[:, ranks], b.t(), scale)
        return h

    def inner_gradient(self, dy: Tensor) -> Tensor:
        """dH [T, sum r_i] from dy [T, sum N_i]."""
        dh = dy.new_empty(dy.shape[0], self.a.shape[0], dtype=self.dtype)
        for (columns, ranks, scale), b in zip(self.parts, self.b, strict=True):
            part = dh[:, ranks]
            torch.addmm(part, dy[:, columns].to(self.dtype), b, beta=0, alpha=scale, out=part)
        return dh

    def add_input_gradient(self, dx: Tensor, dh: Tensor) -> Tensor:
        """Adds the adapters' part to dx [T, K]."""
        return _add_product(dx, dh, self.a)

    def add_gradients(self, dy: Tensor, x: Tensor, h: Tensor | None, dh: Tensor) -> None:
        """Adds the gradients of A and B for some tokens; x [T, K]; h = x A^T, or None to compute it here."""
        x = x.to(self.dtype)
        h = x @ self.a.t() if h is None else h
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
            da[i] = self.da[ranks].to(self.adapters[i].a.dtype)  # type: ignore[union-attr]
            db[i] = total.mul_(scale).to(self.adapters[i].b.dtype)  # type: ignore[union-attr]
        return da, db


def _add_product(total: Tensor, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    """total += scale * x @ y, rounded once."""
    if total.dtype == x.dtype:
        return torch.addmm(total, x, y, alpha=scale, out=total)
    return total.add_(x @ y, alpha=scale)
