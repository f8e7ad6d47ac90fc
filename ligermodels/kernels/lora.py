"""LoRA adapters of layers of one input: what they add to the outputs, and their gradients; without autograd.

    y_i += s_i (x A_i^T) B_i^T        for layers i side by side in y [T, sum N_i]

- One matmul for all A_i. The matmul with B_i adds to its columns of y, scaled, in its epilogue, so that no other tensor
  of y's size is written.
- A and B may be fp32 beside 16-bit layers. They are cast once per use, and their gradients are summed in fp32; or, as
  PEFT has it by default, they compute in fp32, and x, dy and what is added to y are cast.

linear.py and gated_mlp.py run the layers themselves. Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from ligermodels.kernels._gradients import accumulate
from ligermodels.kernels._triton import accumulator
from ligermodels.kernels.low_bit import Weight
from ligermodels.kernels.operand import Adapter


class Branch:
    """The adapters of layers side by side.

    parts: for each adapter the columns of its layer in y, its columns of H = x A^T, and its scale. factors: every A
    [r_i, K], then every B [N_i, r_i]. dtype: in which they compute.
    """

    def __init__(self, parts: Sequence[tuple[slice, slice, float]], factors: Sequence[Tensor], dtype: torch.dtype):
        self.parts, self.factors, self.dtype = parts, factors, dtype
        self._a: Any = None
        self._da: Any = None

    @classmethod
    def of(cls, weights: Sequence[Weight], adapters: Sequence[Adapter | None], dtype: torch.dtype) -> Self:
        """Of adapters or None for layers of these weights; dtype: that of x."""
        parts, found, row, rank = [], [one for one in adapters if one is not None], 0, 0
        for weight, adapter in zip(weights, adapters, strict=True):
            end = row + weight.shape[0]
            if adapter is not None:
                r = adapter.a.shape[0]
                parts.append((slice(row, end), slice(rank, rank + r), adapter.scale))
                dtype = torch.promote_types(dtype, adapter.dtype or dtype)
                rank += r
            row = end
        return cls(parts, [one.a for one in found] + [one.b for one in found], dtype)

    @property
    def a(self) -> Tensor:
        """All A [sum r_i, K], cast; without autograd."""
        if self._a is None:
            count = len(self.parts)
            self._a = torch.cat(self.factors[:count]).to(self.dtype)  # type: ignore[arg-type]
            self._b = [b.to(self.dtype) for b in self.factors[count:]]
        return self._a

    def add_to(self, y: Tensor, x: Tensor) -> Tensor:
        """Adds the adapters' outputs for x [T, K] to y [T, sum N_i]. Returns H [T, sum r_i]."""
        h = x.to(self.dtype) @ self.a.t()
        for (columns, ranks, scale), b in zip(self.parts, self._b, strict=True):
            _add_product(y[:, columns], h[:, ranks], b.t(), scale)
        return h

    def inner_gradient(self, dy: Tensor) -> Tensor:
        """dH [T, sum r_i] from dy [T, sum N_i]."""
        dh = dy.new_empty(dy.shape[0], self.a.shape[0], dtype=self.dtype)
        for (columns, ranks, scale), b in zip(self.parts, self._b, strict=True):
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
        first, dtype = self._da is None, accumulator(x.dtype)
        if first:
            self._da = x.new_empty(self.a.shape, dtype=dtype)
            self._db = [x.new_empty(b.shape, dtype=dtype) for b in self._b]
        accumulate(self._da, dh, x, first)
        for (columns, ranks, _), db in zip(self.parts, self._db, strict=True):
            accumulate(db, dy[:, columns].to(self.dtype), h[:, ranks], first)

    def take(self, needs: Sequence[bool]) -> list[Tensor | None]:
        """The gradients of the factors, in their dtypes; None where one is not needed."""
        if self._da is None:
            return [None] * len(needs)
        found = [self._da[ranks] for _, ranks, _ in self.parts]
        found += [db.mul_(scale) for (_, _, scale), db in zip(self.parts, self._db, strict=True)]
        each = zip(found, self.factors, needs, strict=True)
        return [gradient.to(factor.dtype) if need else None for gradient, factor, need in each]


def _add_product(total: Tensor, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    """total += scale * x @ y, rounded once."""
    if total.dtype == x.dtype:
        return torch.addmm(total, x, y, alpha=scale, out=total)
    return total.add_(x @ y, alpha=scale)
