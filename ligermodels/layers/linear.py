"""Fused execution of linear modules: `torch.nn.Linear`, those in FP8 (fp8.py), frozen quantised ones (quantized.py).

Layers have `torch.nn.Linear` modules under the checkpoint's names, so that adapters, quantisers, sharding and
tensor-parallel plans find them. At each call a fused op takes the operands of untouched modules (`operands_of`),
with their LoRA adapters (lora.py); a module that something else has wrapped or hooked is called instead. Which kernel
then runs is decided in kernels/linear/operand.py.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.dlpack import from_dlpack, to_dlpack

from ligermodels.errors import is_new, warn_once
from ligermodels.kernels._triton import use_triton
from ligermodels.kernels.linear.joint import make_joint
from ligermodels.kernels.linear.linear import linears
from ligermodels.kernels.linear.operand import LinearOperand
from ligermodels.layers.base import Layer
from ligermodels.layers.fp8 import FP8Linear
from ligermodels.layers.lora import Adapted, LoRAFP8Linear, LoRALinear, LoRAQuantizedLinear
from ligermodels.layers.parallel import ShardedLinear
from ligermodels.layers.quantized import QuantizedLinear
from ligermodels.libraries import integration

_OURS = (nn.Linear, FP8Linear, LoRALinear, LoRAFP8Linear, QuantizedLinear, LoRAQuantizedLinear)


def operands_of(modules: Iterable[nn.Module]) -> list[LinearOperand] | None:
    """The operands of linear modules, or None where an operand cannot describe all that a module computes.

    An operand describes x @ weight.T + bias, with a dense or quantised weight, and a plain LoRA adapter (no dropout, no
    DoRA) of ours or of PEFT. Operands of sharded modules are this rank's shards. The module is called instead where
    something has changed it: other adapters wrap it or replace its class; parametrizations and FSDP replace its class;
    tensor parallelism, ZeRO-3 and probes add hooks; offloading replaces its forward; quantisers its class or weight.
    """
    if _has_any_global_hook():
        return None
    operands = []
    for module in modules:
        operand = None
        if (
            module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
            or "forward" in module.__dict__
        ):  # fmt: skip  # `has_hooks`, whose call would take a quarter of the host time
            return None
        if type(module) is nn.Linear:  # here, and not in `_operand_of`, for the host's time
            parameters = module._parameters  # whose items take a fifth of the host time of module.weight
            if type(parameters.get("weight")) is nn.Parameter:
                operand = LinearOperand(parameters["weight"], parameters["bias"])
        else:
            operand = _operand_of(module)
        if operand is None:
            return None
        operands.append(operand)
    return operands


def _operand_of(module: Any) -> LinearOperand | None:
    """The operand of a module whose class is not nn.Linear, or None."""
    kind, parameters, adapter = type(module), module._parameters, None
    if kind is ShardedLinear:
        return LinearOperand(*module.parts())
    if kind not in _OURS:
        peft = None if torch.compiler.is_compiling() else integration("peft")
        return None if peft is None else peft.operand_of(module)
    if not _are_plain(parameters.values()):
        return None
    if isinstance(module, Adapted):
        factors = module.lora_A, module.lora_B
        if module.unfusable is not None or any(map(has_hooks, factors)) or not _are_plain(f.weight for f in factors):
            return None
        adapter = module.adapter
    weight = module.operand if isinstance(module, QuantizedLinear | FP8Linear) else parameters["weight"]
    return LinearOperand(weight, parameters.get("bias"), adapter)


def _are_plain(parameters: Iterable[Any]) -> bool:
    return all([parameter is None or type(parameter) is nn.Parameter for parameter in parameters])


def is_plain_call(module: nn.Module) -> bool:
    """True if a call of `module` runs the forward of its class and nothing else."""
    return not (has_hooks(module) or _has_any_global_hook())


def has_hooks(module: nn.Module) -> bool:
    """True if `module` itself has a hook or a replaced forward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def why_not_fused(module: nn.Module, *classes: type[nn.Module]) -> str | None:
    """The reason why no fused op replaces the call of the module, worded to follow "because of"; None if one does.

    classes: the classes that a fused op replaces, by default nn.Linear and ours.
    """
    if not classes and operands_of([module]) is not None:
        return None
    kind = type(module)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind not in (classes or _OURS):
        wraps = not module._modules.keys().isdisjoint(("base_layer", "original_module", "token_adapter"))
        return f"{'an adapter' if wraps else 'its class'}, {name}"
    if not _are_plain([module.weight]):
        return f"its weight, a {type(module.weight).__name__}"
    if "forward" in module.__dict__:
        hook = module.__dict__.get("_hf_hook")  # accelerate's
        return "a replaced forward" + (f", by {type(hook).__name__}" if hook is not None else "")
    if not is_plain_call(module):
        return "a hook"
    return (module.unfusable or "a hook in its adapter") if isinstance(module, Adapted) else None


def warn_unfused(owner: nn.Module, names: Sequence[str], x: Tensor) -> None:
    """Warns once for each reason why one of these children of `owner` is not fused.

    There is no warning where another library has quantised or sharded the module: nobody expects it to be fused.
    """
    for name in names if warns(x) else ():
        module: Any = owner._modules[name]
        reason = why_not_fused(module)
        expected = reason is not None and reason.startswith(("its class", "its weight"))
        if reason is None or (expected and "parametrizations" not in module._modules) or not is_new(reason):
            continue
        warn_once(
            reason,
            f"{type(owner).__name__} calls {name} as a module, because of {reason}. It is not fused with "
            f"{', '.join(other for other in names if other != name)}: the step takes more memory and a little more "
            "time, with the same results. model.fusion_report() shows where.",
        )


def warns(x: Tensor) -> bool:
    """True in training on a GPU, outside of torch.compile: there a missing fusion costs time and memory."""
    return not torch.compiler.is_compiling() and torch.is_grad_enabled() and use_triton(x)


def run_linear(module: nn.Module, x: Tensor, operands: Sequence[LinearOperand] | None) -> Tensor:
    """module(x), as a fused op where its operands are given.

    If a norm has just computed x, the fused op does not save x: its backward recomputes it.
    """
    return module(x) if operands is None else linears(x, operands)


def apply_linear(module: nn.Module, x: Tensor) -> Tensor:
    """module(x), as one op where it is fusable."""
    return run_linear(module, x, operands_of([module]))


def apply_linears(modules: Sequence[nn.Module], x: Tensor) -> Sequence[Tensor]:
    """[module(x) for module in modules], as one op where all are fusable."""
    operands = None if torch.compiler.is_compiling() else operands_of(modules)
    if operands is None:
        return [apply_linear(module, x) for module in modules]
    if len({operand.is_fp8 for operand in operands}) > 1:  # two ops, and no copy of both outputs into one
        outputs: list[Tensor] = []
        for _, part in itertools.groupby(operands, lambda operand: operand.is_fp8):
            run = [*part]
            outputs += linears(x, run).split([operand.weight.shape[0] for operand in run], dim=-1)
        return outputs
    return linears(x, operands).split([operand.weight.shape[0] for operand in operands], dim=-1)


class JointProjections(Layer):
    """A layer with several linear modules of one input, `joint_names`, whose weights are joint: side by side in memory.

    One matmul then computes all of them. The same holds for biases, and for the bits of QuantizedLinear. `.to()`,
    `.cuda()`, copying and unpickling restore this. Parameters stay the same objects, with the same values. If something
    separates the weights (FSDP, `load_state_dict(assign=True)`), each has its own matmul. docs/ablations.md has the
    measurements.
    In `state_dict()` each tensor has a storage of its own, over the same memory: of tensors that share a storage,
    accelerate saves only the first, and safetensors' save_model and load_model refuse them.
    """

    joint_names: Sequence[str]
    output_name: str = "o_proj"

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(_give_own_storages)

    def join_weights(self) -> None:
        """Moves the weights of the modules of one input into one storage, and likewise biases and scales."""
        by_name: dict[str, list[Tensor]] = {}
        for module in self.joint_modules:
            for name, tensor in _tensors_to_join(module).items():
                by_name.setdefault(name, []).append(tensor)
        for tensors in by_name.values():
            if len(tensors) > 1:
                make_joint(tensors)

    @property
    def output_module(self) -> Any:
        """The linear module at the layer's output."""
        return self._modules[self.output_name]

    @property
    def joint_modules(self) -> list[nn.Module]:
        modules = self._modules
        return [modules[name] for name in self.joint_names]  # type: ignore[misc]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.join_weights()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.join_weights()


def _tensors_to_join(module: Any) -> dict[str, Any]:
    """The module's tensors that may be joint with others'. Weights that are always dequantised become so then."""
    tensors = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    if type(module) is ShardedLinear and module.may_be_joint:
        return {name: parameter._local_tensor for name, parameter in tensors.items()}  # to_local returns a view of it
    if isinstance(module, QuantizedLinear) and module.form.max_rows:
        tensors["scale"] = module.scale
    elif type(module) not in (nn.Linear, LoRALinear, FP8Linear, LoRAFP8Linear):
        return {}
    return tensors if is_plain_call(module) else {}


def _give_own_storages(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    """Replaces entries of `state` that share one storage by tensors over the same memory with their own storages."""
    groups: dict[int, list[str]] = {}
    for name, tensor in state.items():
        if name.startswith(prefix) and type(tensor) is Tensor and not tensor.is_meta and tensor.is_contiguous():
            groups.setdefault(tensor.untyped_storage()._cdata, []).append(name)
    for names in groups.values():
        whole = state[names[0]].untyped_storage().nbytes()
        if len(names) > 1 and sum(state[name].nbytes for name in names) == whole:
            for name in names:
                state[name] = from_dlpack(to_dlpack(state[name]))
