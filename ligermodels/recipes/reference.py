"""Log probabilities of the data under the model that a run begins with, computed once before its first step.

They take the place of a frozen copy of the model. DIR/reference.json keeps them for a run that is resumed.
"""

import hashlib
import itertools
import json
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ligermodels.checkpoint.files import write_errors
from ligermodels.errors import InputError
from ligermodels.recipes.answers import logprobs
from ligermodels.recipes.masking import Example
from ligermodels.recipes.packing import Batch
from ligermodels.recipes.report import say
from ligermodels.recipes.steps import check_ids, on_device

if TYPE_CHECKING:
    from ligermodels.recipes.trainer import Trainer


def digest(sequence: Example) -> str:
    """The key of a sequence in the table."""
    both = np.array([sequence.ids, sequence.labels], dtype=np.int32)
    return hashlib.blake2b(both.tobytes(), digest_size=12).hexdigest()


def look_up(table: dict[str, float], batch: Batch) -> Tensor:
    """The log probabilities [N] of a batch with "digests"."""
    try:
        found = [table[key] for key in batch["digests"]]
    except KeyError:
        raise InputError(
            "reference.json lacks a sequence of the data, which has changed since the run began. Next step: the data "
            "as before, or a new --output-dir"
        ) from None
    return torch.tensor(found).to(batch["labels"].device, non_blocking=True)


def precompute(trainer: "Trainer") -> dict[str, float]:
    """The log probabilities of the answers of all sequences, by `digest`; read from the file where it exists.

    All ranks call this, before the first step: the model is still untrained.
    """
    file, model, p, data = trainer.out / "reference.json", trainer.model, trainer.processes, trainer.data
    if (kept := p.from_main(lambda: json.loads(file.read_text("utf-8")) if file.is_file() else None)) is not None:
        return dict(kept)
    if p.is_main:
        say("computing the reference's log probabilities of all answers")
    own: dict[str, float] = {}
    training = map(trainer.recipe.collate, data.batches(epochs=1, shuffle=False))
    batches = itertools.chain(training, data.evaluation())
    while group := list(itertools.islice(batches, p.batch_ranks)):
        batch = group[min(p.batch_rank, len(group) - 1)]  # each rank gets equally many; some get the last one twice
        batch = on_device(check_ids(batch, model.decoder.config.vocab_size), p.device)
        with torch.no_grad():
            own.update(zip(batch["digests"], logprobs(model, batch).sums.tolist(), strict=True))
    if p.mesh is not None:
        for module in model.modules():
            if hasattr(module, "reshard"):  # FSDP2 has gathered parameters, and optimizers are made of sharded ones
                module.reshard()
    table = {key: value for part in p.gather(own) for key, value in part.items()}

    def write() -> None:
        with write_errors(file):
            whole = file.with_name(file.name + ".new")
            whole.write_text(json.dumps(table), "utf-8")
            whole.replace(file)

    p.from_main(write)
    return table
