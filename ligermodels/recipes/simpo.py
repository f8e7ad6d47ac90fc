"""SimPO: pairs of answers by their log probabilities per token; no reference."""

from typing import Any

from torch import Tensor

from ligermodels.layers.preference import cpo_loss
from ligermodels.recipes.options import SimPOOptions
from ligermodels.recipes.preference import PairLoss, PreferenceData, pair_counts
from ligermodels.recipes.run import Recipe, run

__all__ = ["RECIPE", "SimPOOptions", "train"]


def make_loss(options: SimPOOptions, *unused: Any) -> PairLoss:
    how: dict[str, Any] = dict(beta=options.beta, gamma=options.simpo_gamma, label_smoothing=options.label_smoothing)

    def losses(chosen: Tensor, rejected: Tensor, *zeros: Tensor) -> Tensor:
        return cpo_loss(chosen, rejected, loss_type="simpo", **how)

    return PairLoss(losses, options.beta, per_token=True, nll_weight=options.sft_weight)


RECIPE = Recipe(open_data=PreferenceData, count=pair_counts, make_loss=make_loss)


def train(options: SimPOOptions) -> int:
    """Tunes a model to prefer the chosen answers to the rejected ones. Returns the exit status."""
    return run(options, RECIPE)
