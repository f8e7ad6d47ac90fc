"""Preference optimisation over pairs of a better and a worse answer: DPO, ORPO, CPO, SimPO.

A batch has the chosen sequences, then the rejected ones, packed or padded; the losses are functions of their log
probabilities (layers/preference.py). Defaults are TRL's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.layers import preference as losses
from ligermodels.recipes import formats, masking
from ligermodels.recipes.base import Metrics, Recipe, mean_of, sum_over_ranks
from ligermodels.recipes.masking import IGNORED, Comparison, Example
from ligermodels.recipes.options import TrainOptions, option, override
from ligermodels.recipes.packing import Batch
from ligermodels.recipes.reference import Reference, ReferenceOptions, answer_lengths, digest, logps
from ligermodels.recipes.rows import Rows

_ACCEPTED = {
    "pairs": 'pairs: {"prompt": ..., "chosen": ..., "rejected": ...}, texts or lists of messages',
    "unpaired": 'single answers: {"prompt": ..., "completion": ..., "label": true or false}',
}
_RECIPES = {"pairs": "dpo, orpo, cpo or simpo", "unpaired": "kto", "text": "pretrain or sft"}


@dataclass(kw_only=True)
class PreferenceOptions(TrainOptions):
    group: ClassVar[str] = "loss"
    default_rates = (1e-6, 1e-5)
    sequences = 2
    whole_rows = "preferences are trained with whole rows on each GPU"
    learning_rate: float | None = override(
        TrainOptions, "learning_rate", help="peak learning rate (default 1e-6, with --lora-r 1e-5)"
    )
    beta: float = option(0.1, "the scale of the log probabilities, or of their ratios to the reference", above=0)


class Preference(Recipe):
    """The base of recipes whose rows are prompts with answers."""

    accepted = "pairs"
    reference: Reference | None = None

    @property
    def frozen_copies(self) -> int:  # type: ignore[override]
        return int(getattr(self.options, "reference_kind", "") == "model")

    def setup(self, trainer: Any) -> None:
        if isinstance(self.options, ReferenceOptions):
            self.reference = Reference.of(trainer)

    def check_rows(self, rows: Rows, *, is_evaluation: bool = False) -> tuple[str, str]:
        found, where = formats.detect(rows)
        if found != self.accepted:
            raise InputError(
                f"{where}: the row is in the format {found!r}, and {self.options.recipe} takes "
                f"{_ACCEPTED[self.accepted]}. Next step: train with {_RECIPES.get(found, 'sft')}, or make such rows"
            )
        return found, where

    def process(self, row: Mapping[str, Any]) -> Comparison:
        item = self.read(row)
        assert isinstance(item, formats.Answers), "the format was checked"
        return masking.encode_answers(item, self.tokenizer)

    def collate(self, examples: Sequence[Comparison]) -> Batch:
        padding = Comparison((Example([self.pad_id], [IGNORED]),) * self.options.sequences, 0, True)
        columns = zip(*(one.sequences for one in examples or [padding]), strict=True)
        sequences = [one for column in columns for one in column]
        return {**super().collate(sequences), "digests": [digest(one.ids, one.labels) for one in sequences]}

    def show(self, example: Comparison, colour: bool) -> str:
        names = ("chosen", "rejected") if example.label is None else ("good" if example.label else "not good",)
        shown = [masking.show(sequence, self.tokenizer, colour) for sequence in example.sequences]
        return "\n".join(f"{name}: {text}" for name, text in zip(names, shown, strict=True))


class Pairs(Preference):
    """The mean loss of the pairs of a step, plus sft_weight times the mean cross entropy of their chosen answers.

    nll_prompts: the cross entropy counts the prompts too.
    """

    nll_prompts = False

    def pair_losses(self, chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Tensor:
        """Losses [B] of the log probabilities of answers, and of those under the reference, 0 without one."""
        raise NotImplementedError

    def count(self, batch: Batch) -> Tensor:
        """The divisors of a step: labels, pairs, and labels of the cross entropy."""
        lengths, nll = answer_lengths(batch), answer_lengths(batch, prompts=self.nll_prompts)
        pairs = len(lengths) // 2
        return torch.stack([lengths.sum(), (lengths[:pairs] > 0).sum(), nll[:pairs].sum()])

    def loss(self, model: Any, batch: Batch, count: Tensor) -> tuple[Tensor, Metrics]:
        o, before = self.options, None if self.reference is None else self.reference.logps(batch)
        own = logps(model, batch, prompts=self.nll_prompts)
        sums, ref, lengths = own.sums, torch.zeros_like(own.sums) if before is None else before, own.lengths
        if o.loss_type in ("orpo", *losses.PER_TOKEN):
            sums, ref = sums / lengths.clamp(min=1), ref / lengths.clamp(min=1)
        pairs = len(sums) // 2
        counted = lengths[:pairs] > 0
        loss = torch.where(counted, self.pair_losses(*sums.chunk(2), *ref.chunk(2)), 0).sum() / count[1]
        # Rewards as TRL reports them: with a reference from sums, whatever the loss compares.
        compared = sums if before is None else own.sums - before
        chosen, rejected = (o.beta * compared.detach()).chunk(2)
        metrics: Metrics = {
            "reward_chosen": mean_of(chosen, counted),
            "reward_rejected": mean_of(rejected, counted),
            "reward_accuracy": mean_of((chosen > rejected).to(chosen.dtype), counted),
        }
        if o.sft_weight:
            nll, number = -own.nll[:pairs].sum(), own.nll_lengths[:pairs].sum()
            loss = loss + o.sft_weight * nll / count[2]
            metrics["nll_loss"] = nll.detach(), number
        return sum_over_ranks(model, loss) + own.aux_loss, metrics


_SMOOTHING = "the share of pairs whose order is taken to be wrong"
_SFT = "weight of the cross entropy of the chosen answers, which is added to the loss"
DPO_TYPES = tuple(name for name in losses.DPO_LOSS_TYPES if not name.startswith("aot"))
"""Loss types that are a mean over pairs; the others sort a batch, and would depend on how it is packed."""


@dataclass(kw_only=True)
class DPOOptions(ReferenceOptions, PreferenceOptions):
    recipe = "dpo"
    loss_type: str = option("sigmoid", "of a pair; sigmoid_norm and ipo are per token", choices=DPO_TYPES)
    label_smoothing: float = option(0.0, _SMOOTHING, least=0, below=0.5)
    sft_weight: float = option(0.0, f"{_SFT} (RPO)", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        losses.check_dpo(self.loss_type, self.beta, self.label_smoothing)


class DPO(Pairs):
    Options = DPOOptions

    def pair_losses(self, *logps: Tensor) -> Tensor:
        o = self.options
        return losses.dpo_loss(*logps, beta=o.beta, loss_type=o.loss_type, label_smoothing=o.label_smoothing)


@dataclass(kw_only=True)
class ORPOOptions(PreferenceOptions):
    recipe = "orpo"
    loss_type: ClassVar[str] = "orpo"
    sft_weight: ClassVar[float] = 1.0


class ORPO(Pairs):
    Options = ORPOOptions
    nll_prompts = True

    def pair_losses(self, chosen: Tensor, rejected: Tensor, *zeros: Tensor) -> Tensor:
        return losses.orpo_loss(chosen, rejected, beta=self.options.beta)


@dataclass(kw_only=True)
class CPOOptions(PreferenceOptions):
    recipe = "cpo"
    simpo_gamma: ClassVar[float] = 0.0
    loss_type: str = option("sigmoid", "of a pair", choices=("sigmoid", "hinge", "ipo"))
    label_smoothing: float = option(0.0, _SMOOTHING, least=0, below=0.5)
    sft_weight: float = option(1.0, _SFT, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        losses.check_cpo(self.loss_type, self.beta, self.label_smoothing)


class CPO(Pairs):
    Options: ClassVar[type[PreferenceOptions]] = CPOOptions

    def pair_losses(self, chosen: Tensor, rejected: Tensor, *zeros: Tensor) -> Tensor:
        o = self.options
        how: Any = dict(beta=o.beta, gamma=o.simpo_gamma, loss_type=o.loss_type, label_smoothing=o.label_smoothing)
        return losses.cpo_loss(chosen, rejected, **how)


@dataclass(kw_only=True)
class SimPOOptions(PreferenceOptions):
    recipe = "simpo"
    loss_type: ClassVar[str] = "simpo"
    simpo_gamma: float = option(0.5, "how much better the chosen answer is to be", least=0)
    label_smoothing: float = option(0.0, _SMOOTHING, least=0, below=0.5)
    sft_weight: float = option(0.0, _SFT, least=0)


class SimPO(CPO):
    Options = SimPOOptions
