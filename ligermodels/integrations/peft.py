"""PEFT's modules in a model of ours: what a fused op needs of them.

They are known by their attributes, and PEFT is not imported. Source: PEFT 0.21.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.kernels.linear.operand import Adapter, LinearOperand
from ligermodels.layers.fp8 import FP8Linear
from ligermodels.layers.head import LMHead
from ligermodels.layers.linear import has_hooks, operands_of


def operand_of(module: Any) -> LinearOperand | None:
    """The operand of PEFT's LoRA around an untouched nn.Linear or FP8Linear, or None.

    None unless exactly one adapter is on, without dropout, DoRA, bias or other variants. PEFT computes the adapter in
    the dtype of its weights: by default fp32, also where the base is in 16 bits.
    """
    if (type(module).__module__, type(module).__name__) != ("peft.tuners.lora.layer", "Linear"):
        return None
    base, names = module.base_layer, module.active_adapters
    if module.disable_adapters or module.merged:
        return None
    if len(names) != 1 or names[0] not in module.lora_A:
        return None
    name = names[0]
    a, b, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
    if name in module.lora_variant or module.fan_in_fan_out or (module.training and type(dropout) is not nn.Identity):
        return None
    for linear in (base, a, b):
        plain = type(linear) is nn.Linear or (linear is base and type(linear) is FP8Linear)
        if not plain or type(linear.weight) is not nn.Parameter or has_hooks(linear):
            return None
    weight, device = base.weight, base.weight.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else a.weight.dtype
    if torch.promote_types(dtype, weight.dtype) != dtype or b.bias is not None:
        return None
    if type(base) is FP8Linear:
        weight = base.operand
    return LinearOperand(weight, base.bias, Adapter(a.weight, b.weight, module.scaling[name], dtype))


def table_of(embedding: Any) -> Tensor:
    """The table that a tied head reads. trainable_token_indices wraps the head too, which then has the trained rows."""
    adapter = embedding._modules.get("token_adapter")
    return (embedding if adapter is None else adapter.base_layer).weight


def untie_for_modules_to_save(decoder: nn.Module, embedding: Any) -> None:
    """Unties the head of `decoder` if `embedding`, about to become its embed_tokens, is a wrapper of modules_to_save.

    The wrapper trains a copy of the table. transformers' tied head keeps the original one, also after merge_and_unload,
    and so does ours; with ensure_weight_tying PEFT wraps the head too.
    """
    children = getattr(embedding, "_modules", {})
    if children.get("modules_to_save") is None or children.get("original_module") is None:
        return
    reference: Any = getattr(decoder, "_tied_head", None)
    head = None if reference is None else reference()
    if head is not None and head.is_tied and head._tied_to is decoder:
        head.weight = children["original_module"].weight


def unwrapped(head: nn.Module) -> Callable[..., Any]:
    """`head`, or the LMHead inside of a wrapper that only replaces its weight, with that weight.

    - trainable_token_indices: the LMHead gets the weight with the trained rows, the embedding's where the two are tied.
    - modules_to_save with ensure_weight_tying: the wrapper has an nn.Linear on the embedding's copy; the LMHead gets
      its weight.
    """
    children: Any = head._modules
    adapter: Any = children.get("token_adapter", head)
    if isinstance(inner := getattr(adapter, "base_layer", None), LMHead) and hasattr(adapter, "get_merged_weights"):
        source, active = adapter.tied_adapter or adapter, adapter.active_adapters
        trained = active and not (adapter.disable_adapters or adapter.merged)
        weight = source.get_merged_weights(active) if trained else source.base_layer.weight
        return functools.partial(inner, weight=weight)
    inner, copies = children.get("original_module"), children.get("modules_to_save")
    chooses = isinstance(inner, LMHead) and inner.bias is None and copies and not saves_heads(head)
    if chooses and all(operands_of([copy]) and copy.bias is None for copy in copies.values()):
        return functools.partial(inner, weight=head.weight)
    return head


def saves_heads(head: nn.Module) -> bool:
    """True if `head` is a wrapper of modules_to_save that calls copies of an LMHead."""
    children: Any = getattr(head, "_modules", {})
    if children.get("modules_to_save") is None or "original_module" not in children:
        return False
    return all(isinstance(copy, LMHead) for copy in children["modules_to_save"].values())
