"""What layers answer when `model.fusion_report()` asks how their linear modules run."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ligermodels.kernels.linear.joint import joint
from ligermodels.kernels.linear.low_bit import LowBitWeight
from ligermodels.kernels.linear.operand import LinearOperand, choose
from ligermodels.layers.base import FusionContext, FusionPart
from ligermodels.layers.linear import operands_of, why_not_fused


def linears_part(layer: nn.Module, inputs: Sequence[str], at: FusionContext, output: str | None = None) -> FusionPart:
    """That of linear modules which share an input, and for an MLP of the output module."""
    names = [*inputs, *([] if output is None else [output])]
    part = " | ".join(names)
    modules: dict[str, Any] = {name: layer.get_submodule(name) for name in names}
    all_modules = list(modules.values())
    modules = {name: m for name, m in modules.items() if not (at.gathered and hasattr(m.weight, "full_tensor"))}
    reasons = {name: reason for name, module in modules.items() if (reason := why_not_fused(module)) is not None}
    recipes = [getattr(m.base_layer if hasattr(m, "base_layer") else m, "fp8", None) for m in all_modules]
    if not reasons:
        operands = operands_of(layer.get_submodule(name) for name in names) or []  # none for weights that FSDP gathers
        if "torch" in (chosen(operands[: len(inputs)]), chosen(operands[len(inputs) :])):
            return FusionPart(part, "each by itself, by PyTorch", False, "autocast casts their input or weights")
        kinds = operand_kinds(operands) + _in_fp8(recipes)
        if len({recipe is None for recipe in recipes[: len(inputs)]}) > 1:
            ops = "an op of those in FP8, and one of those that are not"
            return FusionPart(part, ops + kinds, output is None, "some stay in 16 bits")
        why = "" if all(recipes) else _why_not_joint(layer, inputs, at.gathered)  # FP8 numbers are written joint
        fused_op = "one op" if output else "one matmul"
        each = f" of {' and '.join(inputs)}" if output else ""
        return FusionPart(part, (fused_op if not why else f"one op, a matmul for each{each}") + kinds, True, why)
    joint_inputs = output and len(inputs) > 1 and not reasons.keys() & set(inputs)
    runs = f"one op of {' | '.join(inputs)}" if joint_inputs else "each by itself" if len(names) > 1 else "by itself"
    by_text: dict[str, list[str]] = {}
    for name, text in reasons.items():
        by_text.setdefault(text, []).append(name)
    why = "; ".join(f"{', '.join(names)}: {text}" for text, names in by_text.items())
    return FusionPart(part, runs + _in_fp8(recipes), False, why)


def _in_fp8(recipes: Sequence[Any]) -> str:
    """How linear modules with these recipes, or None, multiply."""
    names = dict.fromkeys("bf16" if recipe is None else recipe.name for recipe in recipes)
    return f", in FP8 ({', some '.join(names)})" if any(recipes) else ""


def operand_kinds(operands: Sequence[LinearOperand]) -> str:
    """What the operands have: adapters, quantised weights."""
    lora = ", with LoRA" if any(operand.adapter for operand in operands) else ""
    return lora + ", weights dequantised" * any(isinstance(operand.weight, LowBitWeight) for operand in operands)


def chosen(operands: Sequence[LinearOperand]) -> Any:
    """The result of `choose` in training."""
    if not operands:
        return None
    weight = operands[0].weight
    dtype = next((operand.weight.dtype for operand in operands if isinstance(operand.weight, torch.Tensor)), None)
    with torch.enable_grad():
        return choose(operands, torch.empty(2, weight.shape[-1], dtype=dtype, device=weight.device).requires_grad_())


def _why_not_joint(layer: Any, names: Sequence[str], gathered: bool) -> str:
    """Why plain modules of one input are not one matmul; "" if they are."""
    modules = [getattr(layer, name) for name in names]
    if len(names) == 1 or all(getattr(m, "kind", "") in ("nf4", "mxfp4") for m in modules):  # joint once dequantised
        return ""
    if gathered:
        return "FSDP gathers each weight by itself"
    weights = [m.weight for m in modules]
    if any(weight.is_meta for weight in weights) or joint(weights) is not None:  # loading makes them joint
        return ""
    return "their weights are not joint in memory"
