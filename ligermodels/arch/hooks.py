"""Layers with hooks or wrappers of a user: they get and return the hidden state, as transformers' decoder layers do.

A block takes and returns (x, residual), whose sum is the hidden state; the next norm adds them. For a layer with a
hook or wrapper the sum is made first: `layer(hidden_states, residual=None, batch=..., cache=...)` returns a tensor.
Hooks and wrappers of torch itself (FSDP, checkpointing, torch.compile) and of DeepSpeed pass on what they get: a block
with no others runs as usual.
"""

from typing import Any

from torch import Tensor, nn

from ligermodels.errors import InputError

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PASS_ON = ("torch.", "deepspeed.")


def is_hooked(layer: nn.Module) -> bool:
    """Whether `layer` itself has a hook."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)


def watched(layer: nn.Module, blocks: tuple[type[nn.Module], ...]) -> "nn.Module | Joined":
    """`layer`, or a `Joined` around it if a user's hook or wrapper needs its hidden state.

    blocks: the classes of the model's own blocks.
    """
    is_block = isinstance(layer, blocks)
    inside = [layer] if is_block else [module for module in layer.modules() if isinstance(module, blocks)]
    hooks = [hook for module in (layer, *inside) for kind in _KINDS for hook in getattr(module, kind).values()]
    if (is_block or _passes_on(type(layer))) and all(map(_passes_on, hooks)):
        return layer
    return Joined(layer, inside)


class Joined:
    """A layer of a stack, and the blocks in it; called like a block, but returns (hidden_states, None, ...)."""

    def __init__(self, layer: nn.Module, blocks: list[nn.Module]):
        self.layer, self.blocks = layer, blocks
        self.modules = layer.modules

    def __call__(self, x: Tensor, residual: Tensor | None, batch: Any, cache: Any = None) -> tuple[Any, ...]:
        routed: list[Tensor] = []

        def join(block: nn.Module, args: Any, output: Any) -> Tensor:
            x, residual, *routed[:] = output
            return x if residual is None else x + residual

        x = x if residual is None else x + residual
        handles = [block.register_forward_hook(join, prepend=True) for block in self.blocks]
        try:
            output = self.layer(x, residual=None, batch=batch, cache=cache)
        finally:
            for handle in handles:
                handle.remove()
        output = output[0] if isinstance(output, tuple) else output  # as before transformers 5
        if not isinstance(output, Tensor) or output.shape != x.shape:
            found = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise InputError(
                f"a hook or wrapper of a {type(self.layer).__name__} returned {found}; expected hidden states "
                f"{list(x.shape)}, like those it got"
            )
        return output, None, *routed


def _passes_on(found: Any) -> bool:
    return str(getattr(found, "__module__", None)).startswith(_PASS_ON)
