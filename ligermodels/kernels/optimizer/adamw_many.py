"""A step of AdamW on many parameters, in one launch for all that are stored alike: the bits of `adamw`, in less host
time.

What differs from adamw.py: a program finds its tensor in two tables on the device, one of the tensors' addresses and
sizes, one of the tensor that each program works on, 4 bytes for BLOCK elements. The caller keeps the tables from step
to step; they are made again where a tensor has moved, as gradients may. A launch takes the host 15 us and more, and a
Llama of 16 layers has 146 parameters.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import cdiv, tl, triton, use_triton
from ligermodels.kernels.optimizer.adamw import BLOCK, Exponents, adamw, check, update_block
from ligermodels.kernels.optimizer.rounding import UNSHARDED, ShardLayout

MAX_SIZE = 2**25
"""Elements of the largest tensor that shares a launch. A larger one keeps the device busy for longer than its launch
takes the host, and would fill the second table."""
_TYPES = {
    torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32, torch.uint8: tl.uint8,
}  # fmt: skip


class Parameter(NamedTuple):
    """The arguments of `adamw` that differ between parameters."""

    weight: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    remainder: Tensor | None = None
    exponents: Exponents | None = None
    number: int = 0
    layout: ShardLayout = UNSHARDED

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        first, second = self.exponents or (None, None)
        return self.weight, self.grad, self.exp_avg, self.exp_avg_sq, self.remainder, first, second

    def update(self, **options: Any) -> None:
        """`adamw` of it alone."""
        w, g, m, v, r, exponents, number, layout = self
        adamw(w, g, m, v, r, exponents, number=number, layout=layout, **options)


@dataclass(eq=False)
class _Launch:
    kind: tuple
    """The constants of the kernel."""
    members: list[int]
    """The numbers of its parameters."""
    rows: Tensor
    """Addresses and sizes of each, int64 [members, 13], on the host."""
    row_of: Tensor
    """The row of each program, int32, on the device."""
    table: Tensor
    """`rows` on the device."""


class Tables:
    """The tables of a list of parameters."""

    def __init__(self) -> None:
        self.launches: list[_Launch] = []
        self.alone: list[int] = []
        """The numbers of the parameters that share no launch."""
        self._places: list[Any] = []
        self._grads: list[int] = []

    def update(self, parameters: Sequence[Parameter], rounding: str) -> None:
        """Makes what is not true of `parameters` any more. Raises InputError as `adamw` does."""
        places, grads = [rounding, *map(_place, parameters)], [p.grad.data_ptr() for p in parameters]
        if places != self._places:
            self._make(parameters, rounding)
            self._places = places
        elif grads != self._grads:  # of which each backward may allocate new ones
            for each in self.launches:
                each.rows[:, 1] = torch.tensor([grads[i] for i in each.members])
                each.table = _to(each.rows, each.table.device)
        self._grads = grads

    def _make(self, parameters: Sequence[Parameter], rounding: str) -> None:
        self.launches, self.alone = [], []
        kinds = defaultdict(list)
        for i, p in enumerate(parameters):
            check(p.weight, p.grad, p.exp_avg, p.exp_avg_sq, p.remainder, p.exponents, rounding, p.layout)
            kinds[_kind(p)].append(i)
        for kind, members in kinds.items():
            if kind is None or len(members) == 1:
                self.alone += members
            else:
                self.launches.append(_launch_of(kind, members, parameters))


def _place(p: Parameter) -> tuple:
    """All that tables depend on, but for the address of the gradient."""
    weight, grad, moment = p.weight, p.grad, p.exp_avg
    others = [None if x is None else x.data_ptr() for x in (p.remainder, *(p.exponents or ()))]
    return (
        weight.data_ptr(), moment.data_ptr(), p.exp_avg_sq.data_ptr(), *others, grad.data_ptr() % 16, weight.shape,
        grad.shape, weight.stride(), grad.stride(), moment.stride(), weight.dtype, grad.dtype, moment.dtype,
        p.exp_avg_sq.dtype, p.number, p.layout,
    )  # fmt: skip


def _kind(p: Parameter) -> tuple | None:
    """The constants of the kernel; None for what has a launch of its own."""
    tensors, size = [x for x in p.tensors if x is not None], p.weight.numel()
    if not 0 < size <= MAX_SIZE or any(x.dtype not in (*_TYPES, torch.int16) for x in tensors):
        return None
    if not all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in tensors):
        return None
    types = (_TYPES[x.dtype] for x in p[:4])
    return (*types, p.remainder is not None, p.exponents is not None, size % 16 == 0, *p.layout.kind)


def _launch_of(kind: tuple, members: list[int], parameters: Sequence[Parameter]) -> _Launch:
    chosen = [parameters[i] for i in members]
    counts, device = [cdiv(p.weight.numel(), BLOCK) for p in chosen], chosen[0].weight.device
    rows = []
    for p, first in zip(chosen, itertools.accumulate(counts, initial=0), strict=False):
        addresses = [0 if x is None else x.data_ptr() for x in p.tensors]
        rows.append([*addresses, p.weight.numel(), *p.layout, p.number * 4, first])
    numbers = torch.arange(len(members), dtype=torch.int32)
    row_of = numbers.repeat_interleave(torch.tensor(counts), output_size=sum(counts))
    whole = torch.tensor(rows)
    return _Launch(kind, members, whole, _to(row_of, device), _to(whole, device))


def _to(x: Tensor, device: torch.device) -> Tensor:
    """A copy, for which the host does not wait."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device, copy=True)


@triton.jit
def _pointer(row, column: tl.constexpr, TYPE: tl.constexpr):
    return tl.multiple_of(tl.load(row + column).to(tl.pointer_type(TYPE)), 16)


@triton.jit(do_not_specialize=["step", "seed"])
def _many_kernel(
    table_ptr, row_ptr, factor_ptr, step, lr, weight_decay, beta2, rest1, rest2, bias1, bias2, eps, seed,
    LR_ON_DEVICE: tl.constexpr, STOCHASTIC: tl.constexpr,
    WEIGHT: tl.constexpr, GRAD: tl.constexpr, MOMENT: tl.constexpr, SQUARE: tl.constexpr, MASTERS: tl.constexpr,
    EIGHT_BITS: tl.constexpr, ALIGNED: tl.constexpr, CONTIGUOUS: tl.constexpr, WHOLE_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """ALIGNED: sizes are multiples of 16."""
    program = tl.program_id(0)
    row = table_ptr + tl.load(row_ptr + program) * 13
    size = tl.load(row + 7)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    start = (program - tl.load(row + 12)) * BLOCK
    r_ptr = _pointer(row, 4, tl.int16) if MASTERS else None
    m_exponents_ptr = _pointer(row, 5, tl.uint8) if EIGHT_BITS else None
    v_exponents_ptr = _pointer(row, 6, tl.uint8) if EIGHT_BITS else None
    update_block(
        _pointer(row, 0, WEIGHT), _pointer(row, 1, GRAD), _pointer(row, 2, MOMENT), _pointer(row, 3, SQUARE),
        r_ptr, m_exponents_ptr, v_exponents_ptr, factor_ptr, step, lr, weight_decay,
        beta2, rest1, rest2, bias1, bias2, eps, size, seed,
        tl.load(row + 8), tl.load(row + 9), tl.load(row + 10), tl.load(row + 11).to(tl.int32), start,
        False, LR_ON_DEVICE, STOCHASTIC, CONTIGUOUS, WHOLE_GROUPS, BLOCK,
    )  # fmt: skip


def adamw_many(
    parameters: Sequence[Parameter], tables: Tables, *,
    step: int, lr: float | Tensor, betas: tuple[float, float], eps: float, weight_decay: float,
    factor: Tensor | None = None, rounding: str = "stochastic", seed: int = 0,
) -> None:  # fmt: skip
    """One step of AdamW on each of the parameters, which are on one device. Raises InputError as `adamw` does.

    tables: made by the caller once, as `Tables()`, and given again in the next step. Other arguments: as of `adamw`.
    """
    options: dict[str, Any] = dict(
        lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, factor=factor, rounding=rounding, seed=seed
    )
    alone: Sequence[int] = range(len(parameters))
    if parameters and use_triton(parameters[0].weight):
        tables.update(parameters, rounding)
        alone = tables.alone
        beta1, beta2 = betas
        for each in tables.launches:
            launch(
                _many_kernel, (each.row_of.numel(),), each.table, each.row_of, factor, step, lr, weight_decay, beta2,
                1 - beta1, 1 - beta2, 1 - beta1**step, math.sqrt(1 - beta2**step), eps, seed, isinstance(lr, Tensor),
                rounding == "stochastic", *each.kind, BLOCK, num_warps=4,
            )  # fmt: skip
    for i in alone:
        parameters[i].update(step=step, **options)
