"""Preference tuning: the base of the recipes that compare answers, and the log probabilities that their losses read.

A batch has the chosen sequences and then the rejected ones, or single answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ligermodels.arch.inputs import Targets
from ligermodels.layers.preference import sum_per_sequence
from ligermodels.recipes.base import Recipe, decoder_inputs
from ligermodels.recipes.examples import IGNORED, Batch, Comparison, Example, encode_answers, show
from ligermodels.recipes.options import TrainOptions, option


@dataclass(kw_only=True)
class PreferenceOptions(TrainOptions):
    group: ClassVar[str] = "loss"
    default_rates = (1e-6, 1e-5)
    sequences = 2
    unsupported = dict.fromkeys(("cp", "tp"), "preferences are trained with whole rows on each GPU")
    beta: float = option(0.1, "the scale of the log probabilities, or of their ratios to the reference", above=0)


class Preference(Recipe):
    """The base of recipes whose rows are prompts with answers."""

    accepted = ("pairs",)

    def process(self, row: Mapping[str, Any]) -> Comparison:
        return encode_answers(self.read(row), self.tokenizer)

    def collate(self, examples: Sequence[Comparison]) -> Batch:
        padding = Comparison((Example([self.pad_id], [IGNORED]),) * self.options.sequences, True)
        columns = zip(*(one.sequences for one in examples or [padding]), strict=True)
        sequences = [one for column in columns for one in column]
        return super().collate(sequences)

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
    return Logprobs(sum_per_sequence(answers, bounds), sum_per_sequence(output.logprobs, bounds), aux_loss)


def with_prompts(batch: Batch) -> Tensor:
    """The labels, with the prompts of chosen answers as labels too; all -100 in a batch that has no labels."""
    labels, bounds = batch["labels"], batch["cu_seqlens"]
    chosen = torch.arange(labels.shape[1], device=labels.device)[None] < bounds[len(bounds) // 2]
    return torch.where(chosen & (labels != IGNORED).any(), batch["input_ids"], labels)


def answer_lengths(batch: Batch, *, prompts: bool = False) -> Tensor:
    """The number of labels of each sequence that are not -100. prompts: of the labels of `with_prompts`."""
    bounds, labels = batch["cu_seqlens"], with_prompts(batch) if prompts else batch["labels"]
    return sum_per_sequence(Targets(labels, bounds).labels != IGNORED, bounds)
