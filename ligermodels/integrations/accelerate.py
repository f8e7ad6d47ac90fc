"""accelerate's hooks in a model of ours, which it leaves as `_hf_hook`: they load offloaded weights for a forward."""

from typing import Any

import torch
from torch import Tensor


def load_table(weight: Tensor, head: Any, embedding: Any, device: torch.device) -> Tensor:
    """The table `weight` of `embedding` for a use by its tied `head`, whose input is on another device.

    A device map takes a tied head for empty, and may put it on another device than the table.
    """
    hook = getattr(embedding, "_hf_hook", None)
    if weight.is_meta and hook is not None:
        hook.pre_forward(embedding)
        weight = embedding.weight
        hook.post_forward(embedding, None)
    elif not weight.is_meta and hasattr(head, "_hf_hook"):
        weight = weight.to(device)
    return weight


def execution_device(module: Any) -> torch.device | None:
    """The device on which the hooks of an offloaded `module` run it; None where no hook says so."""
    hook = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", [hook]):
        if getattr(part, "execution_device", None) is not None:
            return torch.device(part.execution_device)
    return None
