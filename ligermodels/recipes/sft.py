"""Supervised fine-tuning: the loss is over what the assistant says."""

from typing import Any

from torch import Tensor

from ligermodels.layers.losses import LinearCrossEntropyLoss
from ligermodels.recipes.loop import Batch
from ligermodels.recipes.options import SFTOptions
from ligermodels.recipes.run import Recipe, run

__all__ = ["RECIPE", "SFTOptions", "train"]

RECIPE = Recipe()


def train(options: SFTOptions) -> int:
    """Tunes a model on chats, prompts with completions, or instructions. Returns the exit status."""
    return run(options, Recipe(loss=dft_loss) if options.loss_type == "dft" else RECIPE)


def dft_loss(model: Any, batch: Batch, count: Tensor) -> Tensor:
    """-sg(p) log p of each label, over the count of the step; in evaluation -log p, to compare runs by.

    Source: Wu et al., https://arxiv.org/abs/2508.05629.
    """
    return model(**batch, num_items_in_batch=count, loss_function=_dft if model.training else None).loss


def _dft(
    x: Tensor, weight: Tensor, labels: Tensor, *, softcap: float | None, workspace_bytes: int | None, **rest: Any
) -> Tensor:
    loss = LinearCrossEntropyLoss(token_scaling=True, softcap=softcap, workspace_bytes=workspace_bytes)
    return loss(x, weight, labels, **rest)
