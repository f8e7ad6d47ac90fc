"""Kahneman-Tversky optimisation: single answers, each good or not, against the model as it was."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ligermodels.layers.preference import kto_kl, kto_loss
from ligermodels.processes import Processes
from ligermodels.recipes.data import Data
from ligermodels.recipes.loop import Batch, Sums
from ligermodels.recipes.options import KTOOptions
from ligermodels.recipes.preference import PreferenceData, Reference, answer_counts, logps, mean_of, over_ranks
from ligermodels.recipes.run import Recipe, run

__all__ = ["RECIPE", "KTOOptions", "train"]


@dataclasses.dataclass(frozen=True)
class UnpairedLoss:
    """The mean over the answers of a step. The point that they are compared with is that of their own forward."""

    options: KTOOptions
    reference: Reference

    def __call__(self, model: Any, batch: Batch, count: Tensor) -> tuple[Tensor, Sums]:
        o, kl = self.options, None
        if o.loss_type == "kto":
            with torch.no_grad():  # in a forward of its own, on all ranks, also where a row is alone
                kl = kto_kl(logps(model, batch, prefix="kl_").sums, self.reference.logps(batch, prefix="kl_"))
            kl = kl if len(batch["desirable"]) > 1 else torch.zeros_like(kl)
        before = self.reference.logps(batch)
        own, desirable = logps(model, batch), batch["desirable"]
        losses = kto_loss(
            own.sums, desirable, before, kl=kl, beta=o.beta, loss_type=o.loss_type, desirable_weight=o.desirable_weight,
            undesirable_weight=o.undesirable_weight,
        )  # fmt: skip
        counted = own.lengths > 0
        loss = torch.where(counted, losses, 0).sum() / count[1]
        rewards = o.beta * (own.sums - before)
        told = {
            "reward_chosen": mean_of(rewards, counted & desirable),
            "reward_rejected": mean_of(rewards, counted & ~desirable),
        }
        if kl is not None:
            told["kl"] = mean_of(kl, counted.any())
        return over_ranks(model, loss) + own.aux_loss, told


def make_loss(
    options: KTOOptions, model: Any, data: Data, processes: Processes, load: Callable[[], Any]
) -> UnpairedLoss:
    return UnpairedLoss(options, Reference(options, model, data, processes, load))


RECIPE = Recipe(open_data=PreferenceData, count=answer_counts, make_loss=make_loss)


def train(options: KTOOptions) -> int:
    """Tunes a model towards the good answers and away from the others. Returns the exit status."""
    return run(options, RECIPE)
