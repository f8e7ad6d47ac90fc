"""What an op makes torch do, and what it saves for the backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ligermodels.training.gradients import accumulate_in_place


class Seen(TorchDispatchMode):
    """Operators that run, by name; the shapes (rows, inner, columns) of matmuls; the bytes of the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.matmuls: list[tuple[int, int, int]] = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.names.append(name)
        if name in ("mm", "addmm"):
            *_, a, b = (t for t in args if isinstance(t, torch.Tensor))
            self.matmuls.append((*a.shape, b.shape[1]))
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            self.largest = max(self.largest, t.nbytes if isinstance(t, Tensor) else 0)
        return out


def saved_by(op: Callable[[], Any], *given: Tensor) -> tuple[Any, list[Tensor]]:
    """The result of op, and what autograd saves, each piece of memory once; without the memory of `given`."""
    found: dict[int, Tensor] = {}

    def save(t: Tensor) -> Tensor:
        found.setdefault(t.data_ptr(), t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        result = op()
    known = {t.data_ptr() for t in given}
    return result, [t for pointer, t in found.items() if pointer not in known]


def adding_in_place(*weights: Tensor) -> list[torch.nn.Parameter]:
    """Copies of the weights as parameters whose gradients the backward adds to .grad itself."""
    parameters = [torch.nn.Parameter(w.detach().clone()) for w in weights]
    accumulate_in_place(torch.nn.ParameterList(parameters))
    return parameters
