"""The reference of DPO and KTO: the model as it was before the run."""

import contextlib
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ligermodels.checkpoint.files import write_errors
from ligermodels.errors import InputError
from ligermodels.recipes.base import without_adapters
from ligermodels.recipes.model import load_model
from ligermodels.recipes.options import TrainOptions, option
from ligermodels.recipes.packing import Batch
from ligermodels.recipes.report import say
from ligermodels.recipes.steps import check_ids, on_device

if TYPE_CHECKING:
    from ligermodels.recipes.trainer import Trainer


@dataclass(kw_only=True)
class ReferenceOptions(TrainOptions):
    """The options of recipes with a reference."""

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
        if self.reference != "auto":
            return self.reference
        return "adapter-off" if self.lora_r else self.auto_reference


class Reference:
    """The log probabilities of the model that a run began with. Made and called by all ranks at once.

    Those that are computed before the run are kept in DIR/reference.json.
    """

    def __init__(self, trainer: "Trainer") -> None:
        t, kind = trainer, trainer.options.reference_kind  # type: ignore[attr-defined]
        copy = kind == "model"
        self._model = load_model(t.options, t.folder, t.processes, t.recipe, frozen=True) if copy else t.model
        self._is_off = kind == "adapter-off"
        self._table = _precompute(t) if kind == "precompute" else None

    def logps(self, batch: Batch, prefix: str = "") -> Tensor:
        """[N], the sums over the tokens of the batch's answers."""
        from ligermodels.recipes.preference import logps

        if self._table is not None:
            try:
                found = [self._table[digest] for digest in batch["digests"]]
            except KeyError:
                raise InputError(
                    "reference.json lacks a sequence of the data, which has changed since the run began. Next step: "
                    "the data as before, or a new --output-dir"
                ) from None
            return torch.tensor(found).to(batch["labels"].device, non_blocking=True)
        with torch.no_grad(), without_adapters(self._model) if self._is_off else contextlib.nullcontext():
            return logps(self._model, batch, prefix=prefix).sums


def digest(ids: Sequence[int], labels: Sequence[int]) -> str:
    """The key of a sequence in reference.json."""
    return hashlib.blake2b(np.array([ids, labels], dtype=np.int32).tobytes(), digest_size=12).hexdigest()


def _precompute(trainer: "Trainer") -> dict[str, float]:
    """The log probabilities of all sequences of the data, by their digests; those of the file if it is there.

    The model is the one that was loaded; a checkpoint of the run comes after. The file is written whole or not at all.
    """
    from ligermodels.recipes.preference import logps

    file, model, processes = trainer.out / "reference.json", trainer.model, trainer.processes
    found = processes.from_main(lambda: json.loads(file.read_text("utf-8")) if file.is_file() else None)
    if found is not None:
        return dict(found)
    if processes.is_main:
        say("computing the reference's log probabilities of all answers")
    own: dict[str, float] = {}
    for batch in _own_batches(trainer.data.once(), processes):
        batch = on_device(check_ids(batch, model.decoder.config.vocab_size), processes.device)
        with torch.no_grad():  # new adapters change nothing yet
            own.update(zip(batch["digests"], logps(model, batch).sums.tolist(), strict=True))
    if processes.mesh is not None:
        for module in model.modules():
            if hasattr(module, "reshard"):  # FSDP2 has gathered parameters, and optimizers are made of sharded ones
                module.reshard()
    table = {digest: value for part in processes.gather(own) for digest, value in part.items()}

    def write() -> None:
        with write_errors(file):
            whole = file.with_name(file.name + ".new")
            whole.write_text(json.dumps(table), "utf-8")
            whole.replace(file)

    processes.from_main(write)
    return table


def _own_batches(batches: Iterator[Batch], processes: Any) -> Iterator[Batch]:
    """This rank's batches; each rank gets as many, the last one more than once."""
    while group := list(itertools.islice(batches, processes.batch_ranks)):
        yield group[min(processes.batch_rank, len(group) - 1)]
