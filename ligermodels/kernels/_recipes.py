"""How a tensor can be made again, so that a product that reads it need not keep it for the backward.

A norm's output is a function of what the norm keeps anyway: its input (the sum, where a residual was added) and its
weight. The norm leaves that with the output; the linear layer behind it keeps those two instead of the output, which
costs nothing, and makes the output again in the backward. That saves 2 H bytes per token in 16 bits, for one more run
of the norm's kernel. Heads that `attention` took one after the other are kept one by one as well, and joined again.

A recipe belongs to one tensor as it is now. What is made of the tensor (a product, a view, what a hook returns) has
none, and a tensor changed in place has none any more. A change through `.data` goes unseen, as it does by the checks of
torch. Without a recipe the tensor itself is kept, as always.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ligermodels.kernels._triton import is_capturing


class Recipe(NamedTuple):
    """The tensor is function(*tensors), computed without autograd."""

    function: Callable[..., Tensor]
    tensors: tuple[Tensor | None, ...]


class _Note:
    """What hangs on a tensor: its recipe, and the version of the tensor that the recipe is of."""

    __slots__ = ("recipe", "version")

    def __init__(self, recipe: Recipe, version: int):
        self.recipe, self.version = recipe, version

    def __reduce__(self) -> tuple:
        return set, ()  # torch.save writes what hangs on a tensor: nothing of this, and what any torch.load may read


def remember(y: Tensor, function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """y, which is function(*tensors) to the bit. Where nobody will keep y for a backward, nothing is remembered."""
    if not torch.compiler.is_compiling() and y.requires_grad:
        y._made_by = _Note(Recipe(function, tensors), y._version)  # type: ignore[attr-defined]
    return y


def recipe_of(x: Tensor) -> Recipe | None:
    """How x can be made again; None where there is no way, or where another mechanism has to see x itself."""
    if torch.compiler.is_compiling():
        return None
    note = getattr(x, "_made_by", None)
    return note.recipe if type(note) is _Note and note.version == x._version and backward_alone() else None


def backward_alone() -> bool:
    """True if a backward is all that is asked for: gradients are on, and no torch.func transform or forward mode is."""
    return torch.is_grad_enabled() and not transformed()


def transformed() -> bool:
    """True inside a torch.func transform or forward mode, which have to see every operation."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0  # type: ignore[attr-defined]


def make(function: Callable[..., Tensor] | None, tensors: Sequence[Tensor | None]) -> Tensor:
    """In a backward: x again, of what was kept in its place; without a function that is x itself."""
    return tensors[0] if function is None else function(*tensors)  # type: ignore[return-value]


def carry(x: Tensor, view: Tensor) -> Tensor:
    """view, a reshape of all of x, with the recipe of x."""
    recipe = recipe_of(x)
    if recipe is None or view is x:
        return view
    return remember(view, functools.partial(_reshaped, recipe.function, view.shape), *recipe.tensors)


def forget(y: Tensor) -> None:
    """From now on y, which has a recipe, has none."""
    del y._made_by  # type: ignore[attr-defined]


def _reshaped(function: Callable[..., Tensor], shape: torch.Size, *tensors: Tensor | None) -> Tensor:
    return function(*tensors).view(shape)


def read_last(kept: Tensor) -> bool:
    """In a backward: True if nobody reads `kept`, which the forward saved of its own, after it: it may be overwritten.

    Under retain_graph someone may, and in a CUDA graph, which may be replayed; under torch.compile nobody can say.
    """
    return (
        not torch.compiler.is_compiling()
        and not torch._C._autograd._get_current_graph_task_keep_graph()
        and not (kept.is_cuda and is_capturing())
    )
