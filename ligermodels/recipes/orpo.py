"""Odds ratio preference optimisation: the cross entropy of prompts and chosen answers, and pairs; no reference."""

import functools
from typing import Any

from torch import Tensor

from ligermodels.layers.preference import orpo_loss
from ligermodels.recipes.options import ORPOOptions
from ligermodels.recipes.preference import PairLoss, PreferenceData, pair_counts
from ligermodels.recipes.run import Recipe, run

__all__ = ["RECIPE", "ORPOOptions", "train"]


def make_loss(options: ORPOOptions, *unused: Any) -> PairLoss:
    def losses(chosen: Tensor, rejected: Tensor, *zeros: Tensor) -> Tensor:
        return orpo_loss(chosen, rejected, beta=options.beta)

    return PairLoss(losses, options.beta, per_token=True, nll_weight=1.0, nll_prompts=True)


RECIPE = Recipe(open_data=PreferenceData, count=functools.partial(pair_counts, prompts=True), make_loss=make_loss)


def train(options: ORPOOptions) -> int:
    """Tunes a model on the chosen answers, and to prefer them to the rejected ones. Returns the exit status."""
    return run(options, RECIPE)
