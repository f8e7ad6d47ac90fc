"""LoRA adapters of layers of one input: adds their outputs, and computes their gradients; without autograd.

    y_i += s_i (x A_i^T) B_i^T        for layers i side by side in y [T, sum N_i]

- One matmul for all A_i. The matmul with B_i adds to its columns of y, scaled, in its epilogue, so that no other tensor
  of y's size is written.
- A and B may be fp32 beside 16-bit layers. By default they are cast once per use, and their gradients are summed in
  fp32. Adapters of PEFT compute in fp32 by default: beside bf16 on a CUDA device on tensor cores (_split.py), else by
  casting x, dy and the result.

linear.py and gated_mlp.py run the layers themselves. Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ligermodels.kernels._gradients import accumulate
from ligermodels.kernels._triton import accumulator, use_triton
from ligermodels.kernels.linear._split import PARTS, gradient_of_columns, gradient_of_rows, split
from ligermodels.kernels.linear.low_bit import Weight
from ligermodels.kernels.linear.operand import Adapter

Parts = tuple[Sequence[tuple[slice, slice, float]], torch.dtype | None]
"""((columns of y, columns of H = x A^T, scale) of each adapter; the dtype in which they compute, None: that of x)."""


def flatten_adapters(
    weights: Sequence[Weight], adapters: Sequence[Adapter | None]
) -> tuple[tuple[Tensor, ...], Parts]:  # fmt: skip
    """(factors: every A, then every B; parts). adapters: of each weight's layer, or None."""
    factors_a, factors_b, parts, row, rank, dtype = [], [], [], 0, 0, None
    for weight, adapter in zip(weights, adapters, strict=True):
        end = row + weight.shape[0]
        if adapter is not None:
            factors_a.append(adapter.a)
            factors_b.append(adapter.b)
            r = adapter.a.shape[0]
            parts.append((slice(row, end), slice(rank, rank + r), adapter.scale))
            rank += r
            if adapter.dtype is not None:
                dtype = adapter.dtype if dtype is None else torch.promote_types(dtype, adapter.dtype)
        row = end
    return (*factors_a, *factors_b), (parts, dtype)


class LoRABranch:
    """The adapters of layers whose outputs are side by side; built without autograd.

    factors, parts: from `flatten_adapters`. dtype: of x; the adapters compute in it unless `parts` has another.
    """

    def __init__(self, factors: Sequence[Tensor], parts: Parts, dtype: torch.dtype):
        self.factors, (self.parts, wider) = factors, parts
        self.dtype = dtype if wider is None else torch.promote_types(dtype, wider)  # x and dy are cast to it
        self.splits = dtype == torch.bfloat16 and self.dtype == torch.float32 and _can_split(factors[0])
        count = len(self.parts)
        # Under autocast torch.cat takes fp32 and autocast's dtype alone.
        rows = [a if a.dtype == torch.float32 else a.to(self.dtype) for a in factors[:count]]
        self.a = torch.cat(rows).to(self.dtype)  # [sum r_i, K]
        self.b = [b.to(self.dtype) for b in factors[count:]]
        if self.splits:
            self.dtype, self.a = dtype, split(self.a, is_left=False, rows=True)
            self.b = [split(b, is_left=False) for b in self.b]
            self.parts = [
                (columns, slice(PARTS * at.start, PARTS * at.stop), scale) for columns, at, scale in self.parts
            ]
        self.da: Any = None

    def _inner(self, x: Tensor) -> Tensor:
        """H = x A^T [T, sum r_i] of x [T, K]; split if A is split."""
        if not self.splits:
            return x.to(self.dtype) @ self.a.t()
        h = x.new_empty(x.shape[0], self.a.shape[0], dtype=torch.float32)
        _set_product(h, x, self.a.t())
        return split(h, is_left=True, summed=True)

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
        return split(dh, is_left=True, summed=True) if self.splits else dh

    def add_input_gradient(self, dx: Tensor, dh: Tensor) -> Tensor:
        """Adds dH A, the adapters' part, to dx [T, K]."""
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
        """The gradients of the factors, in their dtypes; None for all without a call of `add_gradients`."""
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
    else:  # only cuBLAS writes fp32 from 16-bit factors
        torch.addmm(total, x.to(total.dtype), y.to(total.dtype), beta=0, alpha=scale, out=total)


def _add_product(total: Tensor, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    """total += scale * x @ y, rounded once."""
    if total.dtype == x.dtype:
        return torch.addmm(total, x, y, alpha=scale, out=total)
    return total.add_(x @ y, alpha=scale)
