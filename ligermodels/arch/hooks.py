"""Layers with hooks or wrappers of a user: they get and return the hidden state, as transformers' decoder layers do.

A block takes and returns (x, residual), whose sum is the hidden state; the next norm adds them. For a layer with a
hook, a wrapper or a replaced forward the sum is made first: `layer(hidden_states, batch=..., cache=...)` returns a
tensor. Those of torch itself (FSDP, checkpointing, torch.compile), of DeepSpeed and of accelerate pass on what they
get: a block with no others runs as usual.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ligermodels.arch.block import ResidualBlock
from ligermodels.errors import InputError
from ligermodels.layers.linear import has_hooks

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PASS_ON = ("torch.", "deepspeed.", "accelerate.")


def is_plain(*modules: nn.Module) -> bool:
    """Whether these modules have no hook and no replaced forward but those of torch, DeepSpeed and accelerate."""
    if not any(map(has_hooks, modules)):
        return True
    changes = [hook for module in modules for kind in _KINDS for hook in getattr(module, kind).values()]
    changes += [vars(module)["forward"] for module in modules if "forward" in vars(module)]
    return all(map(_passes_on, changes))


def for_user_hooks(layer: nn.Module) -> "tuple[nn.Module | HookedLayer, bool]":
    """(`layer`, or a `HookedLayer` around it if a user's hook, wrapper or forward needs its hidden state; whether a
    block in it carries)."""
    is_block = isinstance(layer, ResidualBlock)
    blocks = [module for module in ([layer] if is_block else layer.modules()) if isinstance(module, ResidualBlock)]
    plain = (is_block or _passes_on(type(layer))) and is_plain(layer, *blocks)
    return layer if plain else HookedLayer(layer, blocks), any(block.carries for block in blocks)


class HookedLayer:
    """A layer of a stack, and the blocks in it; called like a block, but returns (hidden_states, None, ...)."""

    def __init__(self, layer: nn.Module, blocks: Sequence[ResidualBlock]):
        self.layer, self.blocks = layer, blocks
        self.modules = layer.modules

    def __call__(self, x: Tensor, residual: Tensor | None, batch: Any, cache: Any = None, *carry: Any) -> Any:
        others: list[Any] = []
        more = {"carry": carry[0]} if carry else {}

        def collect(block: nn.Module, args: Any, options: dict[str, Any]) -> Any:
            return args, {**options, "others": others}

        x = x if residual is None else x + residual
        handles = [block.register_forward_pre_hook(collect, with_kwargs=True) for block in self.blocks]
        try:
            output = self.layer(x, batch=batch, cache=cache, **more)
        finally:
            for handle in handles:
                handle.remove()
        output = output[0] if isinstance(output, tuple) else output  # as before transformers 5
        if not isinstance(output, Tensor) or output.shape != x.shape:
            returned = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise InputError(
                f"a hook or wrapper of a {type(self.layer).__name__} returned {returned}; expected hidden states "
                f"{list(x.shape)}, like those it got"
            )
        return output, None, *others


def _passes_on(change: Any) -> bool:
    change = getattr(change, "func", change)  # accelerate's forward is a partial
    return str(getattr(change, "__module__", None)).startswith(_PASS_ON)
