"""The base of all recipes: what a recipe gives the trainer, with the defaults of `sft`."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.layers import losses
from ligermodels.processes import Processes
from ligermodels.recipes.data import formats
from ligermodels.recipes.data.examples import Batch, encode, packed_batch, show
from ligermodels.recipes.data.rows import Rows
from ligermodels.recipes.memory import Sizes
from ligermodels.recipes.model import model_of
from ligermodels.recipes.options import TrainOptions
from ligermodels.recipes.steps import Metrics, StepBatches
from ligermodels.text import Tokenizer
from ligermodels.training.lora import adapters_off, save_adapter


class Recipe:
    """A recipe. Subclasses set Options and override `process`, `collate`, `loss` and whatever else differs.

    options: the run's, complete but for what `complete` adds. processes: those of the run; one by default.
    """

    Options: ClassVar[type[TrainOptions]]
    StepBatches: ClassVar[type[StepBatches]] = StepBatches
    """The source of each step's batches."""
    accepted: ClassVar[tuple[str, ...]] = tuple(name for name in formats.FORMATS if name not in ("pairs", "unpaired"))
    """The formats of its rows."""
    splits: ClassVar[bool] = False
    """A text that is longer than max_length becomes several examples, and is not cut."""
    frozen_model: Any = None
    """The reference, where it is another model than the one that is trained."""

    def __init__(self, options: Any, tokenizer: Tokenizer, processes: Processes | None = None) -> None:
        self.options, self.tokenizer, self.processes = options, tokenizer, processes or Processes()
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        self.evaluation: Recipe = self  # the recipe that evaluates

    @classmethod
    def of(cls, options: Any) -> "type[Recipe]":
        """The class of the recipe for these options: this one, or a subclass."""
        return cls

    def complete(self, options: Any) -> None:
        """Takes the options with what the data and the free memory decide: accumulation, precision and activations.

        The trainer calls it once, after the rows are counted and before the model is loaded.
        """
        self.options = self.evaluation.options = options

    def __getstate__(self) -> dict[str, Any]:
        """Worker processes, in which `process` runs, get all attributes but models, processes and other recipes."""
        stay = (nn.Module, Processes, Recipe)
        return {name: value for name, value in vars(self).items() if not isinstance(value, stay)}

    # ---- data ----

    def check_rows(self, rows: Rows) -> tuple[str, str] | None:
        """The format of all rows, and where it was found; None for any format. Raises InputError for other rows."""
        name, where = formats.detect(rows)
        if name not in self.accepted:
            raise InputError(
                f"{where}: the row is in the format {name!r}, and {self.options.recipe} takes "
                f"{', '.join(self.accepted)}; pairs are for dpo, orpo, cpo and simpo, unpaired rows for kto"
            )
        if name in ("messages", "sharegpt", "alpaca") and not self.tokenizer.files.templates:
            raise InputError(
                f"{self.options.model} has no chat template, and rows of {name} need one. Likely: a base model. "
                "Next: its instruct model, or --chat-template FILE, or rows of prompt and completion"
            )
        return name, where

    def process(self, row: Mapping[str, Any]) -> Any:
        """The example of a row: token ids, and labels that are -100 where nothing is trained. Raises InputError."""
        return encode(self.read(row), self.tokenizer)

    def read(self, row: Mapping[str, Any]) -> Any:
        """The row as its format is read, with the system prompt of the options."""
        return formats.read(row, self.options.system_prompt)

    @property
    def capacity(self) -> int:
        """The maximum sum of `space` over the examples of a batch, here in tokens."""
        return int(self.options.batch_tokens)

    def collate(self, examples: Sequence[Any]) -> Batch:
        """The batch of these examples; without examples, a batch in which nothing is trained."""
        return packed_batch(examples, self.pad_id, self.processes.ranks_per_batch)

    def show(self, example: Any) -> str:
        """An example as text, with trained tokens marked."""
        return show(example, self.tokenizer)

    # ---- the plan ----

    def memory(self, sizes: Sizes, sketch: Any) -> Sizes:
        """The sizes of all that is in memory. sketch: the model on the meta device."""
        return sizes

    def plan(self, steps: int) -> dict[str, str]:
        """Lines of the plan that differ or are added, by name."""
        return {}

    # ---- the model ----

    def load(self, folder: Path, processes: Processes) -> Any:
        """The model, ready to train. folder: of MODEL."""
        return model_of(self.options, folder, processes)

    def setup(self, model: Any, folder: Path, processes: Processes) -> None:
        """Makes what the loss needs beside the model, which is loaded: a reference, a teacher."""
        if self.options.frozen_copies:
            self.frozen_model = model_of(self.options, folder, processes, frozen=True)

    @contextlib.contextmanager
    def reference(self, model: Any) -> Iterator[Any]:
        """The model as it was before the run, without gradients: a frozen copy, or this one without its adapters."""
        adapters = contextlib.nullcontext() if self.frozen_model is not None else adapters_off(model)
        with torch.no_grad(), adapters:
            yield model if self.frozen_model is None else self.frozen_model

    def save(self, model: Any, folder: Path) -> None:
        """Writes what was trained. Called by every rank."""
        if self.options.lora_r:
            save_adapter(model, folder)
        else:
            model.save_pretrained(folder)

    @property
    def result(self) -> str:
        """The name of the folder of what was trained."""
        return "adapter" if self.options.lora_r else "model"

    # ---- the loss ----

    def count(self, batch: Batch) -> Tensor:
        """What a batch adds to the divisors of a step: its number of labels, or a vector that begins with it."""
        return num_labels(batch)

    def total(self, model: Any, batches: Sequence[Batch], processes: Processes) -> Tensor:
        """The divisors of a step or an evaluation, at least 1: the sum of `count` over its batches and all ranks."""
        count = torch.stack([self.count(batch) for batch in batches]).sum(0).float()
        return processes.sum_tensor(count.to(processes.device)).clamp(min=1)

    def loss(self, model: Any, batch: Batch, count: Tensor) -> tuple[Tensor, Metrics]:
        """The batch's part of the loss of a step, over all ranks, and metrics. count: the `total` of the step."""
        return next_token_loss(model, batch, count), {}


def num_labels(batch: Batch) -> Tensor:
    """The number of labels that count: not -100, and not the first of a sequence, which nothing predicts."""
    return losses.num_labels(batch["labels"], batch.get("cu_seqlens"))


def next_token_loss(model: Any, batch: Batch, count: Tensor) -> Tensor:
    """The cross entropy over the labels of the batch, divided by the count of the step.

    The balancing loss of a mixture of experts, which the model adds to each forward, is weighted by the batch's share
    of the labels of the step.
    """
    output = model(**batch, num_items_in_batch=count, return_logits=False)
    if output.aux_loss is None:
        return output.loss
    labels = num_labels(batch)
    if model.parallel is not None:
        labels = model.parallel.count(batch["labels"], batch.get("cu_seqlens"))
    return output.loss - (1 - labels / count) * model.config.router_aux_loss_coef * output.aux_loss


def sum_over_ranks(model: Any, loss: Tensor) -> Tensor:
    """The sum of the ranks' losses. Its gradient is that of this rank's, as in a sharded model's own loss."""
    return loss if model.parallel is None else model.parallel.data.all_reduce(loss)


def mean_of(values: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """A metric: the sum of the values that count, and their number."""
    return torch.where(counted, values.detach(), 0).sum(), counted.sum()


def decoder_inputs(batch: Batch, prefix: str = "") -> Batch:
    """The arguments of a model's forward among a batch's entries. prefix: of their names in the batch."""
    names = ("input_ids", "labels", "attention_mask", "cu_seqlens", "max_seqlen", "experts")
    return {name: batch[prefix + name] for name in names if prefix + name in batch}
