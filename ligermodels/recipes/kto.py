"""Kahneman-Tversky optimisation: single answers, each good or not, compared with the reference model.

Paper: Ethayarajh et al., https://arxiv.org/abs/2402.01306. As in TRL, the KL reference point is estimated from prompts,
each with the answer of another row: here of the same forward, and the estimate is of all forwards of a step.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ligermodels.layers.preference import kto_loss
from ligermodels.processes import Processes
from ligermodels.recipes.base import Recipe, mean_of, sum_over_ranks
from ligermodels.recipes.data.examples import IGNORED, Batch, Comparison, Example
from ligermodels.recipes.preference import Preference, answer_lengths, logprobs
from ligermodels.recipes.recipe_options import KTOOptions
from ligermodels.recipes.steps import Metrics, on_device


class KTO(Preference):
    Options = KTOOptions
    accepted = ("unpaired",)

    def collate(self, examples: Sequence[Comparison]) -> Batch:
        """Adds "desirable", bool [N], and as "kl_input_ids" and so on each prompt with the answer of the row before it.

        The first has that of the last row, so that a row alone in its batch has its own.
        """
        others = []
        for n, example in enumerate(examples):  # as TRL makes them
            before = examples[n - 1]
            (sequence,), (other,) = example.sequences, before.sequences
            ids = sequence.ids[: example.prompt] + other.ids[before.prompt :]
            labels = [IGNORED] * example.prompt + other.labels[before.prompt :]
            others.append(Example(ids, labels).cut(self.options.max_length))
        others = others or [Example([self.pad_id], [IGNORED])]
        mismatched = {f"kl_{key}": value for key, value in Recipe.collate(self, others).items()}
        desirable = torch.tensor([bool(example.label) for example in examples] or [True])
        return super().collate(examples) | {"desirable": desirable} | mismatched

    def count(self, batch: Batch) -> Tensor:
        """The divisors of a step: labels, and answers."""
        lengths = answer_lengths(batch)
        return torch.stack([lengths.sum(), (lengths > 0).sum()])

    @torch.no_grad()
    def total(self, model: Any, batches: Sequence[Batch], processes: Processes) -> Tensor:
        """The divisors of a step and, for the loss type kto, its KL reference point, of all batches and ranks."""
        total = super().total(model, batches, processes)
        if self.options.loss_type != "kto":
            return total
        sums = []
        for batch in batches:
            batch = on_device(batch, processes.device)
            ratios = logprobs(model, batch, prefix="kl_").sums - self.reference_logprobs(model, batch, prefix="kl_")
            ratios = ratios * (len(ratios) > 1)  # a row that is alone has its own answer
            sums.append(torch.stack([ratios.sum(), ratios.new_tensor(len(ratios) * (len(ratios) > 1))]))
        ratio, number = processes.sum_tensor(torch.stack(sums).sum(0))
        return torch.cat([total, (ratio / number.clamp(min=1)).clamp(min=0)[None]])

    def loss(self, model: Any, batch: Batch, count: Tensor) -> tuple[Tensor, Metrics]:
        """The mean over the answers of a step."""
        o, desirable = self.options, batch["desirable"]
        kl = count[2] if o.loss_type == "kto" else None
        before = self.reference_logprobs(model, batch)
        policy = logprobs(model, batch)
        losses = kto_loss(
            policy.sums, desirable, before, kl=kl, beta=o.beta, loss_type=o.loss_type,
            desirable_weight=o.desirable_weight, undesirable_weight=o.undesirable_weight,
        )  # fmt: skip
        counted, rewards = answer_lengths(batch) > 0, o.beta * (policy.sums - before)
        loss = torch.where(counted, losses, 0).sum() / count[1]
        metrics: Metrics = {
            "reward_chosen": mean_of(rewards, counted & desirable),
            "reward_rejected": mean_of(rewards, counted & ~desirable),
        }
        if kl is not None:
            metrics["kl"] = mean_of(kl, counted.any())
        return sum_over_ranks(model, loss) + policy.aux_loss, metrics
