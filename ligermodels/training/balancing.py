"""Balancing experts without a loss: a bias for each expert, which its router adds to the scores for the choice alone.

    count_expert_loads(model)                      once, before training
    update_router_biases(model, rate=1e-3)         after each step of the optimizer

An expert with fewer tokens than the mean of its layer gets `rate` more, one with more tokens `rate` less. No gradient
is involved, and the weights of the chosen experts do not read the bias.
Sources: Wang et al. 2024, https://arxiv.org/abs/2408.15664; DeepSeek-V3, https://arxiv.org/abs/2412.19437, section
2.1.2.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.layers.moe import mixtures_of


def count_expert_loads(model: nn.Module) -> bool:
    """From now on each mixture in `model` counts the tokens of its experts, `MoE.expert_loads`; False: there is none.

    It counts in training where gradients are on, each token once, whether or not its block is recomputed; tokens of
    padding count too. torch's reentrant checkpointing runs forwards without gradients, which do not count. Call it when
    the model is on its device, and before a `CapturedStep` is made.
    """
    mixtures = mixtures_of(model)
    for mixture in mixtures:
        weight = mixture.plain_router.weight
        mixture.expert_loads = torch.zeros(len(weight), dtype=torch.int64, device=weight.device)
    return bool(mixtures)


@torch.no_grad()
def update_router_biases(model: nn.Module, rate: float = 1e-3, *, group: Any = None) -> Tensor:
    """Adds rate * sign(mean load - load) to the biases of all routers, and counts from 0 again.

    The loads are those of all forwards since the last call, summed over the ranks of `group`: by default those among
    which `parallelize` has spread the tokens, or else all of torch.distributed, if it is initialised. All ranks call
    it. rate: 0 leaves the biases as they are. Returns the largest load over the mean load of its layer, the maximum of
    all layers, on the device; nothing synchronises.
    Raises InputError where nothing is counted, and for a rate in a model whose routers have no bias.
    """
    mixtures = mixtures_of(model)
    counted = [mixture.expert_loads for mixture in mixtures if mixture.expert_loads is not None]
    if not mixtures or len(counted) < len(mixtures):
        raise InputError(
            f"update_router_biases: the experts of this {type(model).__name__} are not counted; call "
            "training.count_expert_loads(model) before the first step"
        )
    biases = [mixture.plain_router.e_score_correction_bias for mixture in mixtures]
    if rate and all(bias is None for bias in biases):
        raise InputError(
            f"update_router_biases: no router of this {type(model).__name__} has a correction bias; leave the rate at "
            "0, and balance by the loss (output_router_logits and router_aux_loss_coef of the config)"
        )
    loads = torch.stack([load.to(counted[0].device) for load in counted])  # [layers, E]
    torch._foreach_zero_(counted)
    group = _group_of(model) if group is None else group
    if group is not None:
        torch.distributed.all_reduce(loads, group=group)
    mean = loads.double().mean(1, keepdim=True)
    if rate:
        for bias, change in zip(biases, rate * torch.sign(mean - loads), strict=True):
            if bias is not None:
                bias.add_(change.to(bias))
    return (loads.amax(1, keepdim=True) / mean.clamp(min=1e-9)).max()


def _group_of(model: nn.Module) -> Any:
    """The ranks that have different tokens; None: there is one process."""
    zoo: Any = next((module for module in model.modules() if hasattr(type(module), "parallel")), None)
    if zoo is not None and zoo.parallel is not None:
        return zoo.parallel.data.group
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.group.WORLD
    return None
