"""LoRA adapters of layers of one input: what they add to the outputs, and their gradients; without autograd.

    y_i += s_i (x A_i^T) B_i^T        for layers i side by side in y [T, sum N_i]

- One matmul for all A_i. The matmul with B_i adds to its columns of y, scaled, in its epilogue, so that no other tensor
  of y's size is written.
- A and B may be fp32 beside 16-bit layers: they are cast once per use, and their gradients are summed in fp32.

linear.py and gated_mlp.py run the layers themselves. Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ligermodels.kernels._gradients import accumulate
from ligermodels.kernels._triton import accumulator
from ligermodels.kernels.operand import Adapter, Weight


class _Part(NamedTuple):
    """The adapter of layer `layer`: its columns of y, its columns of H = x A^T, and its scale."""

    layer: int
    columns: slice
    ranks: slice
    scale: float


class Branch:
    """The adapters of layers side by side.

    factors: every A [r_i, K], then every B [N_i, r_i]. dtype: in which they compute.
    """

    __slots__ = ("_a", "_b", "_da", "_db", "dtype", "factors", "parts")

    def __init__(self, parts: Sequence[_Part], factors: Sequence[Tensor], dtype: torch.dtype):
        self.parts, self.factors, self.dtype = parts, factors, dtype
        self._a: Any = None
        self._da: Any = None

    @classmethod
    def of(cls, weights: Sequence[Weight], adapters: Sequence[Adapter | None], dtype: torch.dtype) -> Self:
        """Of adapters or None for layers of these weights."""
        parts, a, b, row, rank = [], [], [], 0, 0
        for i, (weight, adapter) in enumerate(zip(weights, adapters, strict=True)):
            end = row + weight.shape[0]
            if adapter is not None:
                r = adapter.a.shape[0]
                parts.append(_Part(i, slice(row, end), slice(rank, rank + r), adapter.scale))
                a.append(adapter.a)
                b.append(adapter.b)
                rank += r
            row = end
        return cls(parts, a + b, dtype)

    def leaves(self, count: int) -> list[Tensor | None]:
        """The A of each of `count` layers, then the B of each; None where there is none."""
        found: list[Tensor | None] = [None] * (2 * count)
        for i, part in enumerate(self.parts):
            found[part.layer] = self.factors[i]
            found[count + part.layer] = self.factors[len(self.parts) + i]
        return found

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
        h = x @ self.a.t()
        for (_, columns, ranks, scale), b in zip(self.parts, self._b, strict=True):
            part = y[:, columns]
            torch.addmm(part, h[:, ranks], b.t(), alpha=scale, out=part)
        return h

    def inner_gradient(self, dy: Tensor) -> Tensor:
        """dH [T, sum r_i] from dy [T, sum N_i]."""
        dh = dy.new_empty(dy.shape[0], self.a.shape[0])
        for (_, columns, ranks, scale), b in zip(self.parts, self._b, strict=True):
            part = dh[:, ranks]
            torch.addmm(part, dy[:, columns], b, beta=0, alpha=scale, out=part)
        return dh

    def add_gradients(self, dy: Tensor, x: Tensor, h: Tensor | None, dh: Tensor) -> None:
        """Adds the gradients of A and B for some tokens; x [T, K]; h = x A^T, or None to compute it here."""
        h = x @ self.a.t() if h is None else h
        first, dtype = self._da is None, accumulator(x.dtype)
        if first:
            self._da = x.new_empty(self.a.shape, dtype=dtype)
            self._db = [x.new_empty(b.shape, dtype=dtype) for b in self._b]
        accumulate(self._da, dh, x, first)
        for (_, columns, ranks, _), db in zip(self.parts, self._db, strict=True):
            accumulate(db, dy[:, columns], h[:, ranks], first)

    def take(self, needs: Sequence[bool]) -> list[Tensor | None]:
        """The gradients of each layer's A, then of each B, in their dtypes; None where it has none or needs none."""
        count = len(needs) // 2
        found: list[Tensor | None] = [None] * len(needs)
        if self._da is None:
            return found
        factors = iter(self.factors)
        for layer, _, ranks, _ in self.parts:
            a = next(factors)
            if needs[layer]:
                found[layer] = self._da[ranks].to(a.dtype)
        for (layer, _, _, scale), db in zip(self.parts, self._db, strict=True):
            b = next(factors)
            if needs[count + layer]:
                found[count + layer] = db.mul_(scale).to(b.dtype)
        return found
