"""How layers run their linear modules, which are torch's own: several of one input fused, each wrapped one by itself.

A layer holds plain `torch.nn.Linear` modules under the checkpoint's names, so that adapters, quantisers, sharding and
tensor-parallel plans find what they look for. Where nothing has wrapped a module, a fused op takes its weight; where
something has, the module is called.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ligermodels.kernels.linear import lay_together, linear, packed_linear


def is_plain(module: nn.Module) -> bool:
    """True if calling `module` is x @ weight.T + bias and nothing else: a fused kernel may stand in for it.

    An adapter wraps the module or replaces its class, a parametrization and FSDP replace its class, tensor
    parallelism, ZeRO-3 and activation probes hang hooks on it, offloading replaces its forward, quantization
    replaces its class or its weight. Passing any of them by would be silently wrong, so each makes this False.
    """
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and is_untouched(module)


def is_untouched(module: nn.Module) -> bool:
    """True if calling `module` is its class's forward and nothing else."""
    return (
        "forward" not in module.__dict__
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        and not _has_any_global_hook()
    )


def apply_linear(module: nn.Module, x: Tensor) -> Tensor:
    """module(x); where the module is plain, x is not saved for the backward if a norm has just made it."""
    return linear(x, module.weight, module.bias) if is_plain(module) else module(x)  # type: ignore[arg-type]


def apply_linears(modules: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """[module(x) for module in modules], of which the plain ones are one matmul where their weights allow it."""
    plain = [] if torch.compiler.is_compiling() else [module for module in modules if is_plain(module)]
    if len(plain) < 2:
        return [apply_linear(module, x) for module in modules]
    packed = packed_linear(x, *parameters_of(plain)).split([module.out_features for module in plain], dim=-1)  # type: ignore[misc]
    outputs = dict(zip(plain, packed, strict=True))
    return [outputs[module] if module in outputs else module(x) for module in modules]


def parameters_of(modules: Sequence[nn.Module]) -> tuple[list[Tensor], list[Tensor | None]]:
    """The weights and the biases of linear modules."""
    return [module.weight for module in modules], [module.bias for module in modules]  # type: ignore[misc]


class JointProjections(nn.Module):
    """A layer with several linear modules of one input, named in `joint_names`, whose weights lie in one storage.

    The weights of the plain ones lie one behind the other, and so do their biases, so that one matmul serves all of
    them. They are laid so again after whatever makes each parameter anew: `.to()`, `.cuda()`, copying, unpickling.
    Parameters stay the objects that optimizers hold, and keep their values. Where something has taken the weights
    apart all the same (FSDP, `load_state_dict(assign=True)`), each has a matmul of its own.
    """

    joint_names: Sequence[str]

    def lay_together(self) -> None:
        weights, biases = parameters_of([module for module in self.joint_modules if is_plain(module)])
        for parameters in (weights, biases):
            if len(parameters) > 1 and all(type(parameter) is nn.Parameter for parameter in parameters):
                lay_together(parameters)  # type: ignore[arg-type]

    @property
    def joint_modules(self) -> list[nn.Module]:
        return [getattr(self, name) for name in self.joint_names]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.lay_together()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.lay_together()
