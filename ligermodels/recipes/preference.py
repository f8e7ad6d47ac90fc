"""Preference optimisation over pairs of a better and a worse answer: DPO, ORPO, CPO, SimPO.

A batch has the chosen sequences, then the rejected ones, packed or padded; the losses are functions of their log
probabilities (layers/preference.py). Defaults are TRL's. `reference.py` has the model as it was, for DPO.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ligermodels.arch.inputs import Targets
from ligermodels.errors import InputError
from ligermodels.layers import preference as losses
from ligermodels.layers.preference import PER_TOKEN, check_cpo, check_dpo, sum_per_sequence
from ligermodels.recipes import formats, masking
from ligermodels.recipes.base import Metrics, Recipe, mean_of, sum_over_ranks
from ligermodels.recipes.masking import IGNORED, Comparison, Example
from ligermodels.recipes.options import TrainOptions, option, override, whole_rows
from ligermodels.recipes.packing import Batch
from ligermodels.recipes.reference import Reference, ReferenceOptions, digest
from ligermodels.recipes.rows import Rows

_WANTED = {
    "pairs": 'pairs: {"prompt": ..., "chosen": ..., "rejected": ...}, texts or lists of messages',
    "unpaired": 'single answers: {"prompt": ..., "completion": ..., "label": true or false}',
}
_RECIPES = {"pairs": "dpo, orpo, cpo or simpo", "unpaired": "kto", "text": "pretrain or sft"}


@dataclass(kw_only=True)
class PreferenceOptions(TrainOptions):
    """The options of the recipes of preferences."""

    group: ClassVar[str] = "loss"
    default_rates = (1e-6, 1e-5)
    learning_rate: float | None = override(
        TrainOptions, "learning_rate", help="peak learning rate (default 1e-6, with --lora-r 1e-5)"
    )
    beta: float = option(0.1, "the scale of the log probabilities, or of their ratios to the reference", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_rows(self, "preferences are trained with whole rows on each GPU")


class Logps(NamedTuple):
    """Log probabilities of N sequences, [N] each: summed over the tokens of the answer, and the number of these.

    nll, nll_lengths: the same over the tokens of the cross entropy. aux_loss: what the routers of a mixture of experts
    add to the loss, or 0.
    """

    sums: Tensor
    lengths: Tensor
    nll: Tensor
    nll_lengths: Tensor
    aux_loss: Tensor | float


class Preference(Recipe):
    """The base of the recipes of preferences."""

    accepted = "pairs"

    def check_rows(self, rows: Rows, *, is_evaluation: bool = False) -> tuple[str, str]:
        found, where = formats.detect(rows)
        if found != self.accepted:
            raise InputError(
                f"{where}: the row is in the format {found!r}, and {self.options.recipe} takes "
                f"{_WANTED[self.accepted]}. Next step: train with {_RECIPES.get(found, 'sft')}, or make such rows"
            )
        return found, where

    def process(self, row: Mapping[str, Any]) -> Comparison:
        item = self.read(row)
        assert isinstance(item, formats.Answers), "the format was checked"
        return masking.encode_answers(item, self.tokenizer)

    def collate(self, examples: Sequence[Comparison]) -> Batch:
        nothing = Example([self.pad_id], [IGNORED])
        examples = examples or [Comparison((nothing,) * self.options.sequences, 0, True)]
        sequences = [one for same in zip(*(one.sequences for one in examples), strict=True) for one in same]
        return {**super().collate(sequences), "digests": [digest(one.ids, one.labels) for one in sequences]}

    def show(self, example: Comparison, colour: bool) -> str:
        names = ("chosen", "rejected") if example.label is None else ("good" if example.label else "not good",)
        shown = [masking.show(sequence, self.tokenizer, colour) for sequence in example.sequences]
        return "\n".join(f"{name}: {text}" for name, text in zip(names, shown, strict=True))


class Pairs(Preference):
    """The mean over the pairs of a step, and nll_weight times the mean cross entropy of their chosen answers.

    nll_prompts: the cross entropy counts the prompts too. per_token: losses are of means over tokens.
    """

    nll_prompts = False
    per_token = False
    reference: Reference | None = None

    @property
    def nll_weight(self) -> float:
        return self.options.sft_weight

    def pair_losses(self, chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Tensor:
        """Losses [B] of the log probabilities of answers, and of those under the reference, 0 without one."""
        raise NotImplementedError

    def count(self, batch: Batch) -> Tensor:
        """The divisors of a step: labels, pairs, and labels of the cross entropy of chosen answers."""
        lengths, pairs = answer_lengths(batch, batch["labels"]), len(answer_lengths(batch, batch["labels"])) // 2
        nll = answer_lengths(batch, with_prompts(batch)) if self.nll_prompts else lengths
        return torch.stack([lengths.sum(), (lengths[:pairs] > 0).sum(), nll[:pairs].sum()])

    def loss(self, model: Any, batch: Batch, count: Tensor) -> tuple[Tensor, Metrics]:
        before = None if self.reference is None else self.reference.logps(batch)
        own = logps(model, batch, prompts=self.nll_prompts)
        before = torch.zeros_like(own.sums) if before is None else before
        sums, ref, lengths = own.sums, before, own.lengths.clamp(min=1)
        if self.per_token:
            sums, ref = sums / lengths, ref / lengths
        pairs = len(sums) // 2
        counted = own.lengths[:pairs] > 0
        loss = torch.where(counted, self.pair_losses(*sums.chunk(2), *ref.chunk(2)), 0).sum() / count[1]
        # As TRL reports them: with a reference from sums, whatever the loss compares.
        compared = sums if self.reference is None else own.sums - before
        chosen, rejected = (self.options.beta * compared.detach()).chunk(2)
        metrics: Metrics = {
            "reward_chosen": mean_of(chosen, counted),
            "reward_rejected": mean_of(rejected, counted),
            "reward_accuracy": mean_of((chosen > rejected).to(chosen.dtype), counted),
        }
        if self.nll_weight:
            nll, number = -own.nll[:pairs].sum(), own.nll_lengths[:pairs].sum()
            loss = loss + self.nll_weight * nll / count[2]
            metrics["nll_loss"] = nll.detach(), number
        return sum_over_ranks(model, loss) + own.aux_loss, metrics


def logps(model: Any, batch: Batch, *, prefix: str = "", prompts: bool = False) -> Logps:
    """The log probabilities of the batch's answers.

    prefix: of the names in the batch. prompts: the cross entropy counts those of chosen answers too.
    """
    names = ("input_ids", "attention_mask", "cu_seqlens", "max_seqlen")
    inputs: Any = {name: batch[prefix + name] for name in names if prefix + name in batch}
    labels, bounds = batch[prefix + "labels"], inputs.get("cu_seqlens")
    scored = with_prompts(batch) if prompts else labels
    answers, every = (Targets(one, bounds).labels != IGNORED for one in (labels, scored))
    output = model(**inputs, labels=scored, return_logprobs=True)
    tokens = output.logprobs
    sums = (torch.where(answers, tokens, 0), answers, tokens, every)
    aux = 0.0 if output.aux_loss is None else model.config.router_aux_loss_coef * output.aux_loss
    one, lengths, nll, nll_lengths = (sum_per_sequence(values, bounds) for values in sums)
    return Logps(one, lengths, nll, nll_lengths, aux)


def with_prompts(batch: Batch) -> Tensor:
    """The labels, and those of the prompts of chosen answers; none in a batch that counts nothing."""
    labels, bounds = batch["labels"], batch.get("cu_seqlens")
    if bounds is None:
        chosen = batch["attention_mask"].bool()
        chosen = chosen & (torch.arange(len(labels), device=labels.device) < len(labels) // 2)[:, None]
    else:
        chosen = torch.arange(labels.shape[1], device=labels.device)[None] < bounds[len(bounds) // 2]
    return torch.where(chosen & (labels != IGNORED).any(), batch["input_ids"], labels)


def answer_lengths(batch: Batch, labels: Tensor) -> Tensor:
    """The number of labels of each sequence that count."""
    bounds = batch.get("cu_seqlens")
    return sum_per_sequence(Targets(labels, bounds).labels != IGNORED, bounds)


_SMOOTHING = "the share of pairs whose order is taken to be wrong"
_SFT = "weight of the cross entropy of the chosen answers, which is added to the loss"
_DPO_TYPES = tuple(name for name in losses.DPO_LOSS_TYPES if not name.startswith("aot"))
"""Loss types that are a mean over pairs; the others sort a batch, and would depend on how it is packed."""


@dataclass(kw_only=True)
class DPOOptions(ReferenceOptions, PreferenceOptions):
    recipe = "dpo"
    sequences = 2
    loss_type: str = option("sigmoid", "of a pair; sigmoid_norm and ipo are per token", choices=_DPO_TYPES)
    label_smoothing: float = option(0.0, _SMOOTHING, least=0, below=0.5)
    sft_weight: float = option(0.0, f"{_SFT} (RPO)", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_dpo(self.loss_type, self.beta, self.label_smoothing)


class DPO(Pairs):
    Options = DPOOptions

    def setup(self, trainer: Any) -> None:
        self.reference = Reference(trainer)

    @property
    def frozen_copies(self) -> int:  # type: ignore[override]
        return int(self.options.reference_kind == "model")

    @property
    def per_token(self) -> bool:  # type: ignore[override]
        return self.options.loss_type in PER_TOKEN

    def pair_losses(self, *logps: Tensor) -> Tensor:
        o = self.options
        return losses.dpo_loss(*logps, beta=o.beta, loss_type=o.loss_type, label_smoothing=o.label_smoothing)


@dataclass(kw_only=True)
class ORPOOptions(PreferenceOptions):
    recipe = "orpo"
    sequences = 2


class ORPO(Pairs):
    Options = ORPOOptions
    per_token = nll_prompts = True
    nll_weight = 1.0

    def pair_losses(self, chosen: Tensor, rejected: Tensor, *zeros: Tensor) -> Tensor:
        return losses.orpo_loss(chosen, rejected, beta=self.options.beta)


@dataclass(kw_only=True)
class CPOOptions(PreferenceOptions):
    recipe = "cpo"
    sequences = 2
    loss_type: str = option("sigmoid", "of a pair", choices=("sigmoid", "hinge", "ipo"))
    label_smoothing: float = option(0.0, _SMOOTHING, least=0, below=0.5)
    sft_weight: float = option(1.0, _SFT, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_cpo(self.loss_type, self.beta, self.label_smoothing)


class CPO(Pairs):
    Options = CPOOptions

    @property
    def per_token(self) -> bool:  # type: ignore[override]
        return self.options.loss_type in PER_TOKEN

    def pair_losses(self, chosen: Tensor, rejected: Tensor, *zeros: Tensor) -> Tensor:
        o = self.options
        how: Any = dict(beta=o.beta, loss_type=o.loss_type, label_smoothing=o.label_smoothing)
        return losses.cpo_loss(chosen, rejected, **how)


@dataclass(kw_only=True)
class SimPOOptions(PreferenceOptions):
    recipe = "simpo"
    sequences = 2
    simpo_gamma: float = option(0.5, "how much better the chosen answer is to be", least=0)
    label_smoothing: float = option(0.0, _SMOOTHING, least=0, below=0.5)
    sft_weight: float = option(0.0, _SFT, least=0)


class SimPO(Pairs):
    Options = SimPOOptions
    per_token = True

    def pair_losses(self, chosen: Tensor, rejected: Tensor, *zeros: Tensor) -> Tensor:
        o = self.options
        how: Any = dict(beta=o.beta, gamma=o.simpo_gamma, label_smoothing=o.label_smoothing, loss_type="simpo")
        return losses.cpo_loss(chosen, rejected, **how)
