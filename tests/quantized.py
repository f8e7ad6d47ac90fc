"""Models whose projections are of 4 bits."""

from typing import Any

import torch
from torch import nn

from ligermodels.layers import QuantizedLinear


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
