"""What a case is: inputs, the eager form, providers; and a provider bound to its own copy of the inputs.

A case is made by a function of (place, peers, *sizes). Its calls take a dict of tensors, return a tuple, and follow
the inputs' dtype, so that the eager form, the op as transformers writes it, is the exact one in fp64.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Call = Callable[[Tensors], tuple[Tensor, ...]]

IGNORED = -100
UNITS = {
    "bytes": "copy_tb_per_s",
    "bytes read": "read_tb_per_s",
    "operations": "matmul_bf16_tflop_per_s",
    "int8 operations": "matmul_int8_top_per_s",
}
"""What a case's work is counted in -> the ceiling that was measured for it."""


@dataclass(frozen=True)
class Provider:
    """One implementation. `packed` ones take the case's packed tensor in place of its parts."""

    name: str
    call: Call
    ours: bool = False
    packed: bool = False
    mutates: bool = False
    slack: float = 1.0


@dataclass(frozen=True)
class Packing:
    """`parts` side by side in one tensor `name`; their dims from `dim` on are one row."""

    name: str
    parts: tuple[str, ...]
    dim: int

    def pack(self, tensors: Tensors) -> Tensor:
        return torch.cat([tensors[part].flatten(self.dim) for part in self.parts], -1)

    def unpack(self, packed: Tensor, like: Tensors) -> list[Tensor]:
        widths = [like[part].flatten(self.dim).shape[-1] for part in self.parts]
        pieces = packed.split(widths, -1)
        return [piece.reshape(like[part].shape) for piece, part in zip(pieces, self.parts, strict=True)]


@dataclass(frozen=True)
class Case:
    """An op on one shape. `make` returns its inputs and one cotangent per output, none for a loss.

    Without `leaves` it has no backward, and only its forward is run.
    """

    op: str
    shape: str
    make: Callable[[], tuple[Tensors, tuple[Tensor, ...]]]
    leaves: tuple[str, ...]
    outputs: tuple[str, ...]
    eager: Call
    """The op as transformers writes it: the measure of ours, whether or not it is timed as a peer."""
    providers: tuple[Provider, ...]
    exact: Callable[[Tensors], Tensors] | None = None
    """Outputs and gradients by name, where the eager form in fp64 is not the exact one."""
    packing: Packing | None = None
    forward_work: float | None = None
    full_work: float = 0.0
    unit: str = "bytes"
    """Of the work, which a ceiling of `UNITS` belongs to."""
    products: tuple[str, Call] | None = None
    """The matrix products that the op cannot leave out, on torch's own and without anything else: timed in the same
    run, they are the ceiling in place of the work over the rate of one large product."""
    loss_floor: float = 0.0
    make_small: Callable[[], tuple[Tensors, tuple[Tensor, ...]]] | None = None
    """Inputs that parity is checked on, where fp64 does not fit the ones that are timed."""


class Bound:
    """A provider with its own inputs, and the originals of those that it writes over."""

    def __init__(self, case: Case, provider: Provider, inputs: Tensors, cotangents: tuple[Tensor, ...]):
        self.case, self.provider, self.inputs = case, provider, inputs
        names, own = case.leaves, dict(inputs)
        if provider.packed:
            assert case.packing is not None, f"{case.op} has no packed form"
            packing = case.packing
            own[packing.name] = packing.pack(inputs)
            names = (packing.name, *(name for name in names if name not in packing.parts))
        self._originals: list[tuple[Tensor, Tensor]] = []
        self.tensors = {
            name: self._own(tensor).requires_grad_(name in names)
            for name, tensor in own.items()
            if not (provider.packed and name in case.packing.parts)
        }
        self.cotangents = tuple(self._own(cotangent) for cotangent in cotangents)
        self.leaves = [self.tensors[name] for name in names]

    def _own(self, tensor: Tensor) -> Tensor:
        if not self.provider.mutates:
            return tensor.detach()
        copy = tensor.detach().clone()
        self._originals.append((copy, tensor))
        return copy

    def restore(self) -> None:
        with torch.no_grad():
            for copy, original in self._originals:
                copy.copy_(original)

    def forward(self) -> tuple[Tensor, ...]:
        return self.provider.call(self.tensors)

    def full(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        outputs = self.forward()
        return outputs, torch.autograd.grad(outputs, self.leaves, self.cotangents or None) if self.leaves else ()

    def results(self) -> Tensors:
        """Outputs by name, and the gradient of each leaf x as "d_x", whatever the provider's layout."""
        outputs, gradients = self.full()
        if self.provider.packed:
            parts = self.case.packing.unpack(gradients[0], self.inputs)
            gradients = (*parts, *gradients[1:])
        names = (*self.case.outputs, *(f"d_{leaf}" for leaf in self.case.leaves))
        return dict(zip(names, (*outputs, *gradients), strict=True))


def exact_results(case: Case, inputs: Tensors, cotangents: tuple[Tensor, ...]) -> Tensors:
    """Outputs and gradients in fp64."""
    if case.exact is not None:
        return case.exact(inputs)
    double = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    bound = Bound(case, Provider("exact", case.eager), double, tuple(x.double() for x in cotangents))
    return {name: x.detach() for name, x in bound.results().items()}


def compute(x: Tensor) -> torch.dtype:
    """What an eager form computes in on inputs like x."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def compiled(call: Call) -> Call:
    return torch.compile(call, fullgraph=True, dynamic=False)


class Place:
    """Where and in what dtype inputs are made; the same random numbers every time."""

    def __init__(self, device: str, dtype: torch.dtype):
        self.device, self.dtype = device, dtype

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.float32).mul_(scale).to(self.dtype)

    def labels(self, tokens: int, vocab: int, *, ignored: float = 0.0) -> Tensor:
        labels = torch.randint(vocab, (tokens,), device=self.device)
        return labels.masked_fill_(torch.rand(tokens, device=self.device) < ignored, IGNORED)


def chosen(peers: set[str], *ours: Provider, **theirs: list[Provider]) -> tuple[Provider, ...]:
    """Ours, and of theirs (peer -> its providers) those of the peers that were asked for."""
    return (*ours, *(provider for peer, listed in theirs.items() if peer in peers for provider in listed))
