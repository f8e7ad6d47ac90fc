"""Contrastive preference optimisation: pairs of answers, and the cross entropy of the chosen ones; no reference."""

from typing import Any

from torch import Tensor

from ligermodels.layers.preference import PER_TOKEN, check_cpo, cpo_loss
from ligermodels.recipes.options import CPOOptions
from ligermodels.recipes.preference import PairLoss, PreferenceData, pair_counts
from ligermodels.recipes.run import Recipe, run

__all__ = ["RECIPE", "CPOOptions", "train"]


def make_loss(options: CPOOptions, *unused: Any) -> PairLoss:
    how: dict[str, Any] = dict(beta=options.beta, loss_type=options.loss_type, label_smoothing=options.label_smoothing)

    def losses(chosen: Tensor, rejected: Tensor, *zeros: Tensor) -> Tensor:
        return cpo_loss(chosen, rejected, **how)

    return PairLoss(losses, options.beta, per_token=options.loss_type in PER_TOKEN, nll_weight=options.sft_weight)


RECIPE = Recipe(open_data=PreferenceData, count=pair_counts, make_loss=make_loss)


def train(options: CPOOptions) -> int:
    """Tunes a model to prefer the chosen answers to the rejected ones. Returns the exit status."""
    check_cpo(options.loss_type, options.beta, options.label_smoothing)
    return run(options, RECIPE)
