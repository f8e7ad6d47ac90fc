"""Preference tuning over pairs of a better and a worse answer: DPO, ORPO, CPO, SimPO; and what kto.py shares with it.

The losses are functions of log probabilities (layers/preference.py), and the defaults TRL's. A batch has the chosen
sequences and then the rejected ones, or single answers.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ligermodels.arch.inputs import Targets
from ligermodels.layers import preference as losses
from ligermodels.recipes.base import Recipe, decoder_inputs, mean_of, sum_over_ranks
from ligermodels.recipes.data.examples import IGNORED, Batch, Comparison, Example, encode_answers, show
from ligermodels.recipes.recipe_options import (
    CPOOptions,
    DPOOptions,
    ORPOOptions,
    PreferenceOptions,
    SimPOOptions,
)
from ligermodels.recipes.steps import Metrics

# ---- all that compare answers ----


class Preference(Recipe):
    """The base of recipes whose rows are prompts with answers."""

    accepted = ("pairs",)

    def process(self, row: Mapping[str, Any]) -> Comparison:
        return encode_answers(self.read(row), self.tokenizer)

    def collate(self, examples: Sequence[Comparison]) -> Batch:
        padding = Comparison((Example([self.pad_id], [IGNORED]),) * self.options.sequences, True)
        columns = zip(*(example.sequences for example in examples or [padding]), strict=True)
        return super().collate([sequence for column in columns for sequence in column])

    def show(self, example: Comparison) -> str:
        names = ("chosen", "rejected") if example.label is None else ("good" if example.label else "not good",)
        shown = [show(sequence, self.tokenizer) for sequence in example.sequences]
        return "\n".join(f"{name}: {text}" for name, text in zip(names, shown, strict=True))

    def reference_logprobs(self, model: Any, batch: Batch, prefix: str = "") -> Tensor:
        """The log probabilities [N] of the batch's answers under the reference. prefix: see `logprobs`."""
        with self.reference(model) as reference:
            return logprobs(reference, batch, prefix=prefix).sums


class Logprobs(NamedTuple):
    """Log probabilities of N sequences. sums [N]: over the answer's tokens. scored [N]: over all scored tokens.

    aux_loss: the weighted balancing loss of a mixture of experts, or 0.
    """

    sums: Tensor
    scored: Tensor
    aux_loss: Tensor | float


def logprobs(model: Any, batch: Batch, *, prefix: str = "", prompts: bool = False) -> Logprobs:
    """The log probabilities of the batch's answers.

    prefix: of the keys in the batch that are read. prompts: the prompts of chosen answers are scored too.
    """
    inputs = decoder_inputs(batch, prefix)
    labels, bounds = inputs.pop("labels"), inputs["cu_seqlens"]
    output = model(**inputs, labels=with_prompts(batch) if prompts else labels, return_logprobs=True)
    aux_loss = 0.0 if output.aux_loss is None else model.config.router_aux_loss_coef * output.aux_loss
    answers = torch.where(Targets(labels, bounds).labels != IGNORED, output.logprobs, 0)
    return Logprobs(
        losses.sum_per_sequence(answers, bounds), losses.sum_per_sequence(output.logprobs, bounds), aux_loss
    )


def with_prompts(batch: Batch) -> Tensor:
    """The labels, with the prompts of chosen answers as labels too; all -100 in a batch that has no labels."""
    labels, bounds = batch["labels"], batch["cu_seqlens"]
    chosen = torch.arange(labels.shape[1], device=labels.device)[None] < bounds[len(bounds) // 2]
    return torch.where(chosen & (labels != IGNORED).any(), batch["input_ids"], labels)


def answer_lengths(batch: Batch, *, prompts: bool = False) -> Tensor:
    """The number of labels of each sequence that are not -100. prompts: of the labels of `with_prompts`."""
    bounds, labels = batch["cu_seqlens"], with_prompts(batch) if prompts else batch["labels"]
    return losses.sum_per_sequence(Targets(labels, bounds).labels != IGNORED, bounds)


# ---- pairs ----


class DPO(Preference):
    """The mean loss of the pairs of a step, plus sft_weight times the mean cross entropy of their chosen answers."""

    Options: ClassVar[type[PreferenceOptions]] = DPOOptions
    nll_prompts = False
    """The cross entropy counts the prompts too."""

    def pair_losses(self, chosen: Tensor, rejected: Tensor, *reference: Tensor) -> Tensor:
        """Losses [B] of the log probabilities of answers, and of those under the reference, 0 without one."""
        o = self.options
        how = dict(beta=o.beta, loss_type=o.loss_type, label_smoothing=o.label_smoothing)
        return losses.dpo_loss(chosen, rejected, *reference, **how)

    def count(self, batch: Batch) -> Tensor:
        """The divisors of a step: labels, pairs, and labels of the cross entropy."""
        lengths, nll = answer_lengths(batch), answer_lengths(batch, prompts=self.nll_prompts)
        pairs = len(lengths) // 2
        return torch.stack([lengths.sum(), (lengths[:pairs] > 0).sum(), nll[:pairs].sum()])

    def loss(self, model: Any, batch: Batch, count: Tensor) -> tuple[Tensor, Metrics]:
        o = self.options
        before = self.reference_logprobs(model, batch) if o.compares else torch.zeros(())
        policy = logprobs(model, batch, prompts=self.nll_prompts)
        sums, lengths, before = policy.sums, answer_lengths(batch), before.to(policy.sums).expand_as(policy.sums)
        is_mean = o.loss_type in ("orpo", *losses.PER_TOKEN)
        divisor = lengths.clamp(min=1) if is_mean else torch.ones_like(lengths)
        pairs = len(sums) // 2
        counted = lengths[:pairs] > 0
        each = self.pair_losses(*(sums / divisor).chunk(2), *(before / divisor).chunk(2))
        loss = torch.where(counted, each, 0).sum() / count[1]
        # Rewards as TRL reports them: with a reference from sums, whatever the loss compares.
        compared = sums - before if o.compares else sums / divisor
        chosen, rejected = (o.beta * compared.detach()).chunk(2)
        metrics: Metrics = {
            "reward_chosen": mean_of(chosen, counted),
            "reward_rejected": mean_of(rejected, counted),
            "reward_accuracy": mean_of((chosen > rejected).to(chosen.dtype), counted),
        }
        if o.sft_weight:
            nll, number = -policy.scored[:pairs].sum(), answer_lengths(batch, prompts=self.nll_prompts)[:pairs].sum()
            loss = loss + o.sft_weight * nll / count[2]
            metrics["nll_loss"] = nll.detach(), number
        return sum_over_ranks(model, loss) + policy.aux_loss, metrics


class ORPO(DPO):
    Options = ORPOOptions
    nll_prompts = True

    def pair_losses(self, chosen: Tensor, rejected: Tensor, *reference: Tensor) -> Tensor:
        return losses.orpo_loss(chosen, rejected, beta=self.options.beta)


class CPO(DPO):
    Options: ClassVar[type[PreferenceOptions]] = CPOOptions

    def pair_losses(self, chosen: Tensor, rejected: Tensor, *reference: Tensor) -> Tensor:
        o = self.options
        how: Any = dict(beta=o.beta, gamma=o.simpo_gamma, loss_type=o.loss_type, label_smoothing=o.label_smoothing)
        return losses.cpo_loss(chosen, rejected, **how)


class SimPO(CPO):
    Options = SimPOOptions
