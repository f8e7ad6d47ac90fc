"""Direct preference optimisation: pairs of answers, against the model as it was."""

import functools
from collections.abc import Callable
from typing import Any

from ligermodels.layers.preference import PER_TOKEN, check_dpo, dpo_loss
from ligermodels.processes import Processes
from ligermodels.recipes.data import Data
from ligermodels.recipes.options import DPOOptions
from ligermodels.recipes.preference import PairLoss, PreferenceData, Reference, pair_counts
from ligermodels.recipes.run import Recipe, run

__all__ = ["RECIPE", "DPOOptions", "train"]


def make_loss(options: DPOOptions, model: Any, data: Data, processes: Processes, load: Callable[[], Any]) -> PairLoss:
    how: dict[str, Any] = dict(beta=options.beta, loss_type=options.loss_type, label_smoothing=options.label_smoothing)
    return PairLoss(
        functools.partial(dpo_loss, **how),
        options.beta,
        Reference(options, model, data, processes, load),
        per_token=options.loss_type in PER_TOKEN,
        nll_weight=options.sft_weight,
    )


RECIPE = Recipe(open_data=PreferenceData, count=pair_counts, make_loss=make_loss)


def train(options: DPOOptions) -> int:
    """Tunes a model to prefer the chosen answers to the rejected ones. Returns the exit status."""
    check_dpo(options.loss_type, options.beta, options.label_smoothing)
    return run(options, RECIPE)
