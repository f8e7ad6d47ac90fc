"""Log probabilities of answers, of the model in training and of the reference: the model as it was before the run."""

import contextlib
import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ligermodels.arch.inputs import Targets
from ligermodels.checkpoint.files import write_errors
from ligermodels.errors import InputError
from ligermodels.layers.preference import sum_per_sequence
from ligermodels.recipes.masking import IGNORED
from ligermodels.recipes.model import load_model
from ligermodels.recipes.options import TrainOptions, option
from ligermodels.recipes.packing import Batch
from ligermodels.recipes.report import say
from ligermodels.recipes.steps import check_ids, on_device
from ligermodels.training.lora import adapters_off

if TYPE_CHECKING:
    from ligermodels.recipes.trainer import Trainer


class Logps(NamedTuple):
    """Log probabilities of N sequences, [N] each: the sum over the tokens of the answer, and the number of tokens.

    nll, nll_lengths: the same over the tokens of the cross entropy. aux_loss: the balancing loss of a mixture of
    experts, weighted, or 0.
    """

    sums: Tensor
    lengths: Tensor
    nll: Tensor
    nll_lengths: Tensor
    aux_loss: Tensor | float


def logps(model: Any, batch: Batch, *, prefix: str = "", prompts: bool = False) -> Logps:
    """The log probabilities of the batch's answers.

    prefix: of the names in the batch. prompts: the cross entropy counts the prompts of chosen answers too.
    """
    names = ("input_ids", "attention_mask", "cu_seqlens", "max_seqlen")
    inputs: Any = {name: batch[prefix + name] for name in names if prefix + name in batch}
    labels, bounds = batch[prefix + "labels"], inputs.get("cu_seqlens")
    scored = with_prompts(batch) if prompts else labels
    answers, every = (Targets(one, bounds).labels != IGNORED for one in (labels, scored))
    output = model(**inputs, labels=scored, return_logprobs=True)
    tokens = output.logprobs
    values = (torch.where(answers, tokens, 0), answers, tokens, every)
    aux_loss = 0.0 if output.aux_loss is None else model.config.router_aux_loss_coef * output.aux_loss
    sums, lengths, nll, nll_lengths = (sum_per_sequence(x, bounds) for x in values)
    return Logps(sums, lengths, nll, nll_lengths, aux_loss)


def with_prompts(batch: Batch) -> Tensor:
    """The labels, with the prompts of chosen answers as labels too; all -100 in a batch that has no labels."""
    labels, bounds = batch["labels"], batch.get("cu_seqlens")
    if bounds is None:
        is_chosen = torch.arange(len(labels), device=labels.device) < len(labels) // 2
        chosen = batch["attention_mask"].bool() & is_chosen[:, None]
    else:
        chosen = torch.arange(labels.shape[1], device=labels.device)[None] < bounds[len(bounds) // 2]
    return torch.where(chosen & (labels != IGNORED).any(), batch["input_ids"], labels)


def answer_lengths(batch: Batch, *, prompts: bool = False) -> Tensor:
    """The number of labels that count, of each sequence. prompts: with those of `with_prompts`."""
    bounds = batch.get("cu_seqlens")
    labels = with_prompts(batch) if prompts else batch["labels"]
    return sum_per_sequence(Targets(labels, bounds).labels != IGNORED, bounds)


@dataclass(kw_only=True)
class ReferenceOptions(TrainOptions):
    group: ClassVar[str] = "loss"
    auto_reference: ClassVar[str] = "precompute"
    reference: str = option(
        "auto",
        "the model as it was: adapter-off (auto with --lora-r), precompute: its log probabilities, before the first "
        "step (auto for dpo), or model: a frozen copy in memory (auto for kto)",
        choices=("auto", "adapter-off", "precompute", "model"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference == "adapter-off" and not self.lora_r:
            raise InputError("reference=adapter-off needs adapters to switch off: add --lora-r 16, or leave it out")
        if self.reference == "model" and self.lora_r:
            raise InputError("reference=model: the model without its adapters is the same; leave it out")

    @property
    def reference_kind(self) -> str:
        """The reference, in place of "auto"."""
        auto = "adapter-off" if self.lora_r else self.auto_reference
        return auto if self.reference == "auto" else self.reference


class Reference:
    """The log probabilities under the model that a run began with. Made and called by all ranks at once.

    Those that are computed before the run are kept in DIR/reference.json.
    """

    def __init__(self, model: Any, *, adapters_off: bool = False, table: dict[str, float] | None = None) -> None:
        """adapters_off: the reference is the model without its adapters. table: log probabilities by `digest`."""
        self.model, self.adapters_off, self.table = model, adapters_off, table

    @classmethod
    def of(cls, trainer: "Trainer") -> "Reference":
        """The reference that the options ask for, of a trainer whose model is loaded and still untrained."""
        t, kind = trainer, trainer.options.reference_kind  # type: ignore[attr-defined]
        if kind == "model":
            return cls(load_model(t.options, t.folder, t.processes, t.recipe, frozen=True))
        return cls(t.model, adapters_off=kind == "adapter-off", table=_precompute(t) if kind == "precompute" else None)

    def logps(self, batch: Batch, prefix: str = "") -> Tensor:
        """[N], the sums over the tokens of the batch's answers."""
        if self.table is not None:
            try:
                found = [self.table[digest] for digest in batch["digests"]]
            except KeyError:
                raise InputError(
                    "reference.json lacks a sequence of the data, which has changed since the run began. Next step: "
                    "the data as before, or a new --output-dir"
                ) from None
            return torch.tensor(found).to(batch["labels"].device, non_blocking=True)
        with torch.no_grad(), adapters_off(self.model) if self.adapters_off else contextlib.nullcontext():
            return logps(self.model, batch, prefix=prefix).sums


def digest(ids: Sequence[int], labels: Sequence[int]) -> str:
    """The key of a sequence in reference.json."""
    return hashlib.blake2b(np.array([ids, labels], dtype=np.int32).tobytes(), digest_size=12).hexdigest()


def _precompute(trainer: "Trainer") -> dict[str, float]:
    """The log probabilities of all sequences of the data, by digest. They are read from the file where it exists."""
    file, model, p = trainer.out / "reference.json", trainer.model, trainer.processes
    found = p.from_main(lambda: json.loads(file.read_text("utf-8")) if file.is_file() else None)
    if found is not None:
        return dict(found)
    if p.is_main:
        say("computing the reference's log probabilities of all answers")
    own: dict[str, float] = {}
    batches = trainer.data.once()
    while group := list(itertools.islice(batches, p.batch_ranks)):
        batch = group[min(p.batch_rank, len(group) - 1)]  # each rank gets equally many; some get the last one twice
        batch = on_device(check_ids(batch, model.decoder.config.vocab_size), p.device)
        with torch.no_grad():  # new adapters change nothing yet
            own.update(zip(batch["digests"], logps(model, batch).sums.tolist(), strict=True))
    if p.mesh is not None:
        for module in model.modules():
            if hasattr(module, "reshard"):  # FSDP2 has gathered parameters, and optimizers are made of sharded ones
                module.reshard()
    table = {digest: value for part in p.gather(own) for digest, value in part.items()}

    def write() -> None:
        with write_errors(file):
            whole = file.with_name(file.name + ".new")
            whole.write_text(json.dumps(table), "utf-8")
            whole.replace(file)

    p.from_main(write)
    return table
