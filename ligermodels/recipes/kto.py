"""Kahneman-Tversky optimisation: single answers, each good or not, and the model as it was.

Paper: Ethayarajh et al., https://arxiv.org/abs/2402.01306. As in TRL, the point that answers are compared with is
estimated from the prompts of a batch, each with the answer of another row.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.layers.preference import KTO_LOSS_TYPES, kto_kl, kto_loss
from ligermodels.recipes.base import Metrics, Recipe, mean_of, sum_over_ranks
from ligermodels.recipes.masking import IGNORED, Comparison, Example
from ligermodels.recipes.options import option
from ligermodels.recipes.packing import Batch
from ligermodels.recipes.preference import Preference, PreferenceOptions
from ligermodels.recipes.reference import ReferenceOptions, answer_lengths, logps


@dataclass(kw_only=True)
class KTOOptions(ReferenceOptions, PreferenceOptions):
    recipe = "kto"
    sequences = 1
    auto_reference = "model"
    loss_type: str = option("kto", "of an answer", choices=KTO_LOSS_TYPES)
    desirable_weight: float = option(1.0, "weight of good answers", least=0)
    undesirable_weight: float = option(1.0, "weight of others", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference == "precompute":
            raise InputError(
                "reference=precompute: KTO also scores answers under the prompts of others, which are drawn in each "
                "epoch; leave it out, or train adapters (--lora-r 16), whose reference needs no copy"
            )


class KTO(Preference):
    Options = KTOOptions
    accepted = "unpaired"
    _answers_per_forward = math.inf  # until rows are counted

    def collate(self, examples: Sequence[Comparison]) -> Batch:
        """Adds "desirable", bool [N], and as "kl_input_ids" and so on each prompt with the answer of the row before it.

        The first has that of the last row, so that a row alone in its batch has its own.
        """
        pairs = [(one, examples[n - 1]) for n, one in enumerate(examples)]
        others = [self._mismatched(*pair) for pair in pairs] or [Example([self.pad_id], [IGNORED])]
        mismatched = {f"kl_{key}": value for key, value in Recipe.collate(self, others).items()}
        desirable = torch.tensor([bool(one.label) for one in examples] or [True])
        return super().collate(examples) | {"desirable": desirable} | mismatched

    def _mismatched(self, one: Comparison, other: Comparison) -> Example:
        """The prompt of one with the answer of another, as TRL makes them."""
        prompt, answer = one.sequences[0].ids[: one.prompt], other.sequences[0].ids[other.prompt :]
        ids, start = prompt + answer, max(1, len(prompt))
        return Example(ids, [IGNORED] * start + ids[start:]).cut(self.options.max_length)

    def inspect(self, batches: Sequence[Sequence[Comparison]]) -> None:
        answers = [answer for batch in batches for answer in batch]
        if self._answers_per_forward == math.inf and (few := self._few(len(answers) / max(1, len(batches)))):
            warnings.warn(few, stacklevel=2)
        if len(labels := {answer.label for answer in answers}) == 1:
            warnings.warn(
                f"all of the first {len(answers):,} answers have label {str(*labels).lower()}, and KTO learns from "
                "good answers beside bad ones. Next step: add rows of the other label, or train good answers with sft",
                stacklevel=2,
            )

    def _few(self, answers: float) -> str:
        """A warning where a forward pass has few answers."""
        o = self.options
        if o.loss_type != "kto" or answers >= 4:
            return ""
        return (
            f"a forward pass has {answers:.1f} answers, and KTO compares the answers of a forward pass with each other "
            f"(loss_type=kto). Next step: --batch-tokens {16 * o.max_length} (16 x --max-length) or more, or a lower "
            "--max-length"
        )

    def plan(self, rows: int, format: str, counts: Mapping[str, int] | None) -> dict[str, str]:
        lines = super().plan(rows, format, counts)
        if counts is not None:
            self._answers_per_forward = counts["rows"] / max(1, counts["batches"])
            if few := self._few(self._answers_per_forward):
                lines["data"] += f"\nwarning: {few}"
        return lines

    def count(self, batch: Batch) -> Tensor:
        """The divisors of a step: labels, and answers."""
        lengths = answer_lengths(batch)
        return torch.stack([lengths.sum(), (lengths > 0).sum()])

    def loss(self, model: Any, batch: Batch, count: Tensor) -> tuple[Tensor, Metrics]:
        """The mean over the answers of a step."""
        o, reference, kl = self.options, self.reference, None
        assert reference is not None, "`setup` makes it"
        if o.loss_type == "kto":
            with torch.no_grad():  # all ranks make this forward, also where a row is alone
                kl = kto_kl(logps(model, batch, prefix="kl_").sums, reference.logps(batch, prefix="kl_"))
            kl = kl if len(batch["desirable"]) > 1 else torch.zeros_like(kl)
        before = reference.logps(batch)
        own, desirable = logps(model, batch), batch["desirable"]
        losses = kto_loss(
            own.sums, desirable, before, kl=kl, beta=o.beta, loss_type=o.loss_type, desirable_weight=o.desirable_weight,
            undesirable_weight=o.undesirable_weight,
        )  # fmt: skip
        counted, rewards = own.lengths > 0, o.beta * (own.sums - before)
        loss = torch.where(counted, losses, 0).sum() / count[1]
        metrics: Metrics = {
            "reward_chosen": mean_of(rewards, counted & desirable),
            "reward_rejected": mean_of(rewards, counted & ~desirable),
        }
        if kl is not None:
            metrics["kl"] = mean_of(kl, counted.any())
        return sum_over_ranks(model, loss) + own.aux_loss, metrics
