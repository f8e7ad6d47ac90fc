"""Fused execution of linear modules: `torch.nn.Linear`, and frozen quantised ones (quantized.py, nf4.py).

Layers have `torch.nn.Linear` modules under the checkpoint's names, so that adapters, quantisers, sharding and
tensor-parallel plans find them. At each call a fused op takes the operands of untouched modules (`operands_of`),
with their LoRA adapters (lora.py); a module that something else has wrapped or hooked is called instead. Which kernel
then runs is decided in kernels/operand.py.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.dlpack import from_dlpack, to_dlpack

from ligermodels.errors import is_new, warn_once
from ligermodels.kernels._triton import use_triton
from ligermodels.kernels.joint import make_joint
from ligermodels.kernels.linear import linears
from ligermodels.kernels.operand import Adapter, LinearOperand
from ligermodels.layers.lora import Adapted, LoRALinear, LoRANF4Linear
from ligermodels.layers.nf4 import NF4Linear
from ligermodels.layers.parallel import ShardedLinear
from ligermodels.layers.quantized import LowBitLinear, QuantizedLinear

_OURS = (LoRALinear, LoRANF4Linear, NF4Linear, QuantizedLinear)
_PLAIN = (nn.Parameter, type(None))


def operands_of(modules: Iterable[nn.Module]) -> list[LinearOperand] | None:
    """The operands of linear modules, or None unless these say all that each module computes.

    That is x @ weight.T + bias, with a dense weight or that of a LowBitLinear, and a plain LoRA adapter, ours or PEFT's
    (no dropout, no DoRA). Of sharded modules these are the shards of this rank. Other adapters wrap the module or
    replace its class, parametrizations and FSDP replace its class, tensor parallelism, ZeRO-3 and probes add hooks,
    offloading replaces its forward, other quantisers its class or its weight: then the module is called.
    """
    if _has_any_global_hook():
        return None
    found = []
    for module in modules:
        if _touched(module):
            return None
        if type(module) is nn.Linear:  # here, and not in `_operand_of`, for the host's time
            parameters = module._parameters  # whose items take a fifth of the host time of module.weight
            weight = parameters.get("weight")
            if type(weight) is not nn.Parameter:
                return None
            found.append(LinearOperand(weight, parameters["bias"]))
            continue
        operand = _operand_of(module)
        if operand is None:
            return None
        found.append(operand)
    return found


def is_fusable(*modules: nn.Module) -> bool:
    """True if a fused op may replace the call of each module: see `operands_of`."""
    return operands_of(modules) is not None


def _operand_of(module: Any) -> LinearOperand | None:
    """Of a module that is no nn.Linear."""
    kind, parameters = type(module), module._parameters
    if kind is ShardedLinear:
        return LinearOperand(*module.parts())
    if kind.__module__ == "peft.tuners.lora.layer" and kind.__name__ == "Linear":
        return _operand_of_peft(module)
    of_bits = isinstance(module, LowBitLinear)
    if kind not in _OURS or (of_bits and torch.compiler.is_compiling()):
        return None
    adapter = None
    if isinstance(module, Adapted):
        adapter, factors = module.adapter, (module.lora_A, module.lora_B)
        if module.unfusable is not None or any(map(_touched, factors)):
            return None
        if any(type(factor._parameters["weight"]) is not nn.Parameter for factor in factors):
            return None
    if any(type(parameter) not in _PLAIN for parameter in parameters.values()):
        return None
    return LinearOperand(module.operand if of_bits else parameters["weight"], parameters.get("bias"), adapter)


def _operand_of_peft(module: Any) -> LinearOperand | None:
    """The operand of PEFT's LoRA around an untouched nn.Linear, or None.

    It has one where a single adapter is on, without dropout, DoRA, bias or other variants. PEFT computes the adapter in
    the dtype of its weights: by default fp32, also where the base is in 16 bits. Read in PEFT 0.21.
    """
    base, names = module.base_layer, module.active_adapters
    if torch.compiler.is_compiling() or module.disable_adapters or module.merged:
        return None
    if len(names) != 1 or names[0] not in module.lora_A:
        return None
    name = names[0]
    a, b, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
    if name in module.lora_variant or module.fan_in_fan_out or (module.training and type(dropout) is not nn.Identity):
        return None
    for linear in (base, a, b):
        if type(linear) is not nn.Linear or type(linear.weight) is not nn.Parameter or _touched(linear):
            return None
    weight, device = base.weight, base.weight.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else a.weight.dtype
    if torch.promote_types(dtype, weight.dtype) != dtype or b.bias is not None:
        return None
    return LinearOperand(weight, base.bias, Adapter(a.weight, b.weight, module.scaling[name], dtype))


def is_untouched(module: nn.Module) -> bool:
    """True if a call of `module` runs the forward of its class and nothing else."""
    return not (_touched(module) or _has_any_global_hook())


def _touched(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


class Obstacle(NamedTuple):
    """Why `module` is not fused.

    kind: "adapter", "LoRA" (ours, with dropout or DoRA), "parametrization", "class", "weight", "forward" (replaced),
    "forward hook", "backward hook", "global hook".
    """

    kind: str
    module: nn.Module

    @property
    def text(self) -> str:
        """The reason, to follow "because of"."""
        found = type(self.module)
        name = f"{found.__module__}.{found.__qualname__}"
        hook = self.module.__dict__.get("_hf_hook")  # accelerate's, which replaces the forward
        return {
            "adapter": f"an adapter, {name}",
            "LoRA": getattr(self.module, "unfusable", None) or "a hook inside of its adapter",
            "class": f"its class, {name}",
            "weight": f"its weight, a {type(self.module.weight).__name__}",
            "forward": "a replaced forward" + (f", by {type(hook).__name__}" if hook is not None else ""),
            "global hook": "a hook on all modules",
        }.get(self.kind, f"a {self.kind}")


def obstacle(module: nn.Module, *classes: type[nn.Module]) -> Obstacle | None:
    """Why `is_fusable(module)` is False, or None. classes: the expected classes, default nn.Linear and ours."""
    if not classes and operands_of([module]) is not None:
        return None
    if type(module) not in (classes or (nn.Linear, *_OURS)):
        inside = module._modules.keys()
        wrapped = not inside.isdisjoint(("base_layer", "original_module", "token_adapter"))
        kind = "adapter" if wrapped else "parametrization" if "parametrizations" in inside else "class"
    elif type(module.weight) not in _PLAIN:
        kind = "weight"
    elif "forward" in module.__dict__:
        kind = "forward"
    elif module._forward_hooks or module._forward_pre_hooks:
        kind = "forward hook"
    elif module._backward_hooks or module._backward_pre_hooks:
        kind = "backward hook"
    elif _has_any_global_hook():
        kind = "global hook"
    elif isinstance(module, Adapted):
        kind = "LoRA"
    else:
        return None
    return Obstacle(kind, module)


def warn_unfused(owner: nn.Module, names: Sequence[str], x: Tensor) -> None:
    """Warns once for each kind of obstacle that keeps these children of `owner` from being fused.

    There is no warning for modules that another library has quantised or sharded: nobody expects them to be fused.
    """
    if not warns(x):
        return
    for name in names:
        found = obstacle(owner._modules[name])  # type: ignore[arg-type]
        if found is not None and found.kind not in ("class", "weight") and is_new(found.kind):
            warn_once(
                found.kind,
                f"{type(owner).__name__} calls {name} as a module, because of {found.text}. It is not fused with "
                f"{', '.join(other for other in names if other != name)}: the step takes more memory and a little more "
                "time, with the same results. model.fusion_report() shows where.",
            )


def warns(x: Tensor) -> bool:
    """True in training on a GPU, outside of torch.compile: there a missing fusion costs time and memory."""
    return not torch.compiler.is_compiling() and torch.is_grad_enabled() and use_triton(x)


def apply_linear(module: nn.Module, x: Tensor) -> Tensor:
    """module(x). For a fusable module the backward recomputes an x that a norm has just made, which is not saved."""
    return run_linear(module, x, operands_of([module]))


def run_linear(module: nn.Module, x: Tensor, operands: Sequence[LinearOperand] | None) -> Tensor:
    """module(x), as one op of `operands` where there are some."""
    return module(x) if operands is None else linears(x, operands)


def apply_joint(modules: Sequence[nn.Module], x: Tensor) -> Tensor | None:
    """The outputs of modules side by side, from one op; None if one of them is not fusable.

    The caller may overwrite them if there are several.
    """
    operands = operands_of(modules)
    return None if operands is None else linears(x, operands)


def apply_linears(modules: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """[module(x) for module in modules]; the fusable ones are one op."""
    found = [operands_of([module]) for module in modules]
    operands = [one[0] for one in found if one is not None]
    if len(operands) < 2 or torch.compiler.is_compiling():
        outputs = zip(modules, found, strict=True)
        return [run_linear(module, x, one) for module, one in outputs]
    parts = iter(linears(x, operands).split([one.weight.shape[0] for one in operands], dim=-1))
    return [module(x) if one is None else next(parts) for module, one in zip(modules, found, strict=True)]


class JointProjections(nn.Module):
    """A layer with several linear modules of one input, `joint_names`, whose weights are joint: side by side in memory.

    One matmul then computes all of them. The same holds for biases, and for the weights of QuantizedLinear; those of
    NF4Linear are joint once they are dequantised. `.to()`, `.cuda()`, copying and unpickling restore this. Parameters
    stay the same objects, with the same values. If something separates the weights (FSDP,
    `load_state_dict(assign=True)`), each has its own matmul. docs/ablations.md has the measurements.
    In `state_dict()` each tensor has a storage of its own, over the same memory: of tensors that share a storage,
    accelerate saves only the first, and safetensors' save_model and load_model refuse them.
    """

    joint_names: Sequence[str]
    output_name: str = "o_proj"

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(_give_own_storages)

    def join_weights(self) -> None:
        """Moves the weights of the untouched modules, and their biases, into one storage."""
        plain: list[Any] = [
            module for module in self.joint_modules
            if type(module) in (nn.Linear, LoRALinear) and is_untouched(module)
            and type(module.weight) is nn.Parameter
        ]  # fmt: skip
        dense = [[module._parameters[name] for module in plain] for name in ("weight", "bias")]
        quantized: list[Any] = [
            module for module in self.joint_modules
            if type(module) is QuantizedLinear and is_untouched(module)
        ]  # fmt: skip
        low_bit = [[getattr(module, name) for module in quantized] for name in ("weight", "scale", "bias")]
        for parameters in (*dense, *low_bit):
            if len(parameters) > 1 and all(type(parameter) is nn.Parameter for parameter in parameters):
                make_joint(parameters)
        shards = [module for module in self.joint_modules if type(module) is ShardedLinear and module.may_be_joint]
        for name in ("weight", "bias"):
            parameters = [getattr(module, name) for module in shards]
            if len(parameters) > 1 and all(parameter is not None for parameter in parameters):
                make_joint([parameter._local_tensor for parameter in parameters])  # of which to_local returns a view

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
