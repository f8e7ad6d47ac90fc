"""How the cases of the table in `ops` are made: tensors in many memory layouts, and choices of sizes and options."""

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

WIDTHS = [
    1, 2, 3, 7, 16, 31, 64, 97, 127, 128, 129, 257, 512, 769, 896, 1023, 1025, 1536, 2048, 2304, 3072, 3584, 4096,
    5120, 8191, 8192, 11008, 14336, 16384, 18944, 65537, 131072,
]  # fmt: skip
VOCABS = [
    1, 2, 3, 7, 8, 33, 63, 97, 127, 129, 256, 511, 513, 1000, 1023, 2049, 4099, 8191, 16384, 30522, 32000, 32064,
    50257, 65537, 128256, 151936, 152064, 256000, 262144,
]  # fmt: skip
FEW_WIDTHS = [1, 7, 64, 129]
FEW_VOCABS = [1, 7, 65]
HALF = torch.bfloat16, torch.float16
IGNORE = -100
ROWS = [0, 1, 2, 3, 17, 64, 100, 255, 300, 1000, 1023, 4096]
VARIANTS_INTERPRETED = 8


@dataclasses.dataclass
class Case:
    """Arguments of one call: its tensors, of which those that require grad are trained, and all other arguments.

    shared: how many elements of a result have one error in common, as those of a row have that of its statistic.
    terms: the largest inner dimension of its matmuls.
    """

    tensors: dict[str, Tensor]
    options: dict[str, Any]
    shared: int = 1
    terms: int = 1


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "part of longer rows": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "every other column": lambda t: torch.stack([t, t], -1)[..., 0],
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "expanded rows": lambda t: t[:1].expand_as(t) if t.shape[0] else t,
}


class Maker:
    """Makes the tensors of a case, of one dtype, in memory layouts that are drawn."""

    def __init__(self, draw: random.Random, dtype: torch.dtype, device: str, *, strided: bool = True):
        self.draw, self.dtype, self.device, self.strided = draw, dtype, device, strided

    def __call__(self, *shape: int, scale: float = 1.0, train: bool = True, dtype: torch.dtype | None = None) -> Tensor:
        return self.of(torch.randn(shape, device=self.device) * scale, train=train, dtype=dtype)

    def of(self, values: Tensor, *, train: bool = True, dtype: torch.dtype | None = None) -> Tensor:
        x = values.to(self.device, self.dtype if dtype is None else dtype)
        if self.strided and x.dim():
            x = LAYOUTS[self.draw.choice(["contiguous"] * 3 + list(LAYOUTS))](x)
        return x.detach().requires_grad_(train)

    def big(self, *shape: int, train: bool = True) -> Tensor:
        """Normal numbers without the fp32 copy that `__call__` makes."""
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_().requires_grad_(train)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, device=self.device, dtype=dtype)

    def labels(self, vocab: int, *shape: int, ignored: float | None = None) -> Tensor:
        share = self.draw.choice([0.0, 0.3, 0.9]) if ignored is None else ignored
        labels = self.integers(0, vocab, *shape)
        return self.ids(labels.masked_fill(torch.rand(shape, device=self.device) < share, IGNORE))

    def ids(self, values: Tensor) -> Tensor:
        """Integers of either width."""
        return self.of(values, train=False, dtype=self.draw.choice([torch.int32, torch.int64]))

    def lead(self, rows: int) -> tuple[int, ...]:
        """Leading dims of `rows` rows."""
        return self.draw.choice([(rows,), (1, rows), (rows // 2, 2) if rows % 2 == 0 else (rows, 1)])


class Sizes(NamedTuple):
    """What a size may be: on a GPU, and where Triton is interpreted."""

    large: list[int]
    small: list[int]

    def values(self, interpreted: bool) -> list[int]:
        return self.small if interpreted else self.large


@dataclasses.dataclass(frozen=True)
class Op:
    """An entry of the table.

    make: a case with this many rows, from (make, rows, **chosen).
    choices: what the keyword arguments of `make` may be. A first choice of `Sizes` is taken in turn, others are drawn.
    complete: keyword arguments of a small case that has every tensor argument.
    row: how many elements a row of the largest tensor has, from the chosen; it bounds the rows.
    more: choices that eager lacks, or that are slow: judged against the reference in fp64.
    few_rows: the numbers of rows of the comparison in fp64.
    variants: how many combinations a GPU draws, with every number of rows; each is compiled.
    fits: whether choices fit together.
    edges: adversarial values, by what is hard about them; each from a Maker.
    past_2_31: a case of which a tensor has more than 2^31 elements, rows first, from a Maker.
    ordered: its sums have one order, so that every run gives the same bits.
    noise: errors that any such op has and its eager formula may lack, from a case and the gradients of its outputs.
    tf32: its products of fp32 are in tf32x3 on a GPU, which keeps 22 of the 24 bits of an operand.
    matmuls: it multiplies by weights, so that torch.autocast applies to it.
    runs_once: its backward hands out what the forward computed, unless reduction is "none".
    checks: it raises InputError for arguments that do not fit.
    exact: what gives the exact results on a GPU, in fp64, where the reference takes long; None: the reference.
    """

    call: Callable
    reference: Callable
    eager: Callable
    make: Callable[..., Case]
    choices: dict[str, Any]
    complete: dict[str, Any]
    row: Callable[[dict[str, Any]], int]
    more: dict[str, list] = dataclasses.field(default_factory=dict)
    few_rows: tuple[int, ...] = (0, 1, 5, 18)
    variants: int = 20
    fits: Callable[[dict[str, Any]], bool] = lambda chosen: True
    edges: dict[str, Callable[[Maker], Case]] = dataclasses.field(default_factory=dict)
    past_2_31: Callable[[Maker], Case] | None = None
    ordered: bool = True
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
    noise: Callable[[Case, list[Tensor]], dict[str, Tensor]] = lambda case, upstream: {}
    tf32: bool = False
    matmuls: bool = False
    runs_once: bool = False
    checks: bool = True
    exact: Callable | None = None

    def of_sizes(self, interpreted: bool) -> dict[str, list]:
        return {n: v.values(interpreted) if isinstance(v, Sizes) else v for n, v in self.choices.items()}

    def distinct(self) -> dict[str, list]:
        """The choices on a CPU, each once."""
        return {n: list(dict.fromkeys(v)) for n, v in self.of_sizes(interpreted=True).items()}


def drawn(name: str, op: Op, interpreted: bool) -> Iterator[tuple[int, int, dict[str, Any], int, torch.dtype]]:
    """(variant, seed, chosen, rows, dtype) of the cases of an op: every variant with every number of rows."""
    dtypes = [d for d in op.dtypes if d != torch.bfloat16] if interpreted else [op.dtypes[0], *op.dtypes]
    choices = op.of_sizes(interpreted)
    first = next((n for n, v in op.choices.items() if isinstance(v, Sizes)), None)
    for j in range(VARIANTS_INTERPRETED if interpreted else op.variants):
        draw = random.Random(f"{name} {j}")
        while True:
            chosen = {n: draw.choice(v) for n, v in choices.items()}
            if first is not None:
                chosen[first] = choices[first][(j * 7 + 3) % len(choices[first])]
            if op.fits(chosen):
                break
        row = op.row(chosen)
        if interpreted:
            yield from ((j, 1000 * j + i, chosen, 5, dtype) for i, dtype in enumerate(dtypes))
            continue
        for i, rows in enumerate(ROWS):
            rows = rows if rows * row <= 2**22 else max(1, 2**22 // row - i)
            yield j, 1000 * j + i, chosen, rows, dtypes[j % len(dtypes)]


def pairwise(choices: dict[str, list], fits: Callable[[dict[str, Any]], bool], seed: str) -> list[dict[str, Any]]:
    """Few combinations of the choices that hold each pair of values of two of them, where both fit together."""
    draw, names = random.Random(seed), list(choices)
    indices = {n: range(len(choices[n])) for n in names}
    missing = {
        ((a, i), (b, j)) for a, b in itertools.combinations(names, 2) for i in indices[a] for j in indices[b]
    }  # fmt: skip
    found = []
    while missing:
        best: tuple[int, dict[str, Any], set] = (0, {}, set())
        pairs = sorted(missing)
        for _ in range(30):
            at = {n: draw.choice(indices[n]) for n in names} | dict(draw.choice(pairs))
            chosen = {n: choices[n][i] for n, i in at.items()}
            covered = missing & set(itertools.combinations(at.items(), 2))
            if len(covered) > best[0] and fits(chosen):
                best = (len(covered), chosen, covered)
        if not best[2]:
            break  # what is left does not fit together
        found.append(best[1])
        missing -= best[2]
    return found
