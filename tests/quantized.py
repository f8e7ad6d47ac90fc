"""Models whose projections or experts are of 4 bits."""

from typing import Any

import torch
from torch import nn

from ligermodels.layers import QuantizedLinear
from ligermodels.layers.moe import Experts


def quantized(model: Any) -> Any:
    """The model, frozen, with a QuantizedLinear of the same weight for each linear module of its blocks, in place."""
    model.requires_grad_(False)
    for block in model.model.layers:
        for parent in block.modules():
            for name, child in parent.named_children():
                if type(child) is nn.Linear:
                    source = child.weight.float() if child.weight.dtype == torch.float64 else child.weight
                    setattr(parent, name, QuantizedLinear.from_weight(source, child.bias, kind="nf4"))
    return model


def with_quantized_experts(model: Any) -> Any:
    """The model with experts of 4 bits, in place."""
    for module in model.modules():
        if isinstance(module, Experts):
            for name in module.stacked:
                rows = getattr(module, name).detach().flatten(0, 1).chunk(module.parts(name))
                module.set_quantized(name, [QuantizedLinear.from_weight(part, kind="nf4") for part in rows])
    return model
