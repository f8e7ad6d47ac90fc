"""What a step needs: batches, for any number of ranks, a learning rate, means of metrics, signals that end the run."""

import math
import os
import resource
import signal
import threading
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.processes import Processes
from ligermodels.recipes.data.batches import Batches
from ligermodels.recipes.data.examples import Batch
from ligermodels.recipes.options import TrainOptions

Metrics = dict[str, tuple[Any, Any]]
"""For the log: by name, a sum over the batch of this rank, and the number of values in it."""


class StepBatches:
    """This rank's batches of each step, the next of which may be made while the GPU computes.

    All ranks make the same batches of examples, and each collates every n-th. So a step is the same on any number of
    ranks. The state is the position after the batches that were taken. has_images: whether an example of the last
    batches that were taken has images, on any rank.
    """

    has_images = False

    def __init__(self, batches: Batches, recipe: Any, processes: Processes, vocab_size: int) -> None:
        self.batches, self.recipe, self.processes, self.vocab_size = batches, recipe, processes, vocab_size
        self.metrics: Metrics = {}  # of making the batches; only rollouts have some
        self._next: tuple[list[Any], bool, dict[str, Any]] | None = None
        self._state: dict[str, Any] = batches.state_dict()

    def take(self) -> list[Batch]:
        """The batches of the next step, on the device."""
        self.prefetch()
        assert self._next is not None
        (taken, self.has_images, self._state), self._next = self._next, None
        return [on_device(batch, self.processes.device) for batch in taken]

    def prefetch(self) -> None:
        """Makes the batches of the next step, if there are none yet. Raises the errors of their rows."""
        if self._next is not None:
            return
        batches = [next(self.batches) for _ in range(self.recipe.options.accumulation)]
        has_images = any(getattr(example, "images", None) is not None for examples in batches for example in examples)
        share = batches[self.processes.batch_rank :: self.processes.batch_ranks]
        self._next = [self.make(examples) for examples in share], has_images, self.batches.state_dict()

    def make(self, examples: Sequence[Any]) -> Batch:
        return check_ids(self.recipe.collate(examples), self.vocab_size)

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.batches.load_state_dict(state)
        self._next, self._state = None, dict(state)


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on the device, which some may be on already."""
    if device.type == "cpu":
        return batch

    def moves(key: str, x: Any) -> bool:
        # The host reads the sizes of images.
        return isinstance(x, Tensor) and x.device.type == "cpu" and "_grid_" not in key

    return {key: x.pin_memory().to(device, non_blocking=True) if moves(key, x) else x for key, x in batch.items()}


def check_ids(batch: Batch, vocab_size: int) -> Batch:
    """The batch. Raises InputError for ids that the embedding has no row for: a GPU would read other memory."""
    if (highest := int(batch["input_ids"].max())) >= vocab_size:
        raise InputError(
            f"the tokenizer gave the id {highest}, and the model has {vocab_size} ids: they do not belong together"
        )
    return batch


def shard_batches(batches: Sequence[Sequence[Any]], recipe: Any, processes: Processes) -> list[Batch]:
    """This rank's share of the batches of examples, collated. All ranks get the same number, since they run each
    forward together; the last of some has no examples.
    """
    rank, ranks = processes.batch_rank, processes.batch_ranks
    share = [*batches[rank::ranks]]
    return [recipe.collate(examples) for examples in share + [[]] * (-(-len(batches) // ranks) - len(share))]


def forwards_per_step(accumulation: int | None, ranks: int, forwards: float | None) -> int:
    """The forwards of a step, over all ranks. Raises InputError if the ranks do not divide `accumulation`.

    accumulation: None for 8, or fewer if the run would have less than 20 steps; this is rounded up to a multiple of the
    ranks. forwards: of the run, if they were counted.
    """
    if accumulation is None:
        wanted = 8 if forwards is None else max(1, min(8, int(forwards // 20)))
        return -(-wanted // ranks) * ranks
    if accumulation % ranks:
        raise InputError(
            f"accumulation={accumulation}: {accumulation} forwards or prompts a step cannot be split over {ranks} "
            f"processes; give {-(-accumulation // ranks) * ranks}"
        )
    return accumulation


def means_of(metrics: Sequence[Metrics], processes: Processes) -> dict[str, float]:
    """The means over batches and all ranks, of metrics that have a value. All ranks have the same names."""
    sums: dict[str, Tensor] = {}
    for name, pair in (item for batch in metrics for item in batch.items()):
        both = torch.stack([torch.as_tensor(x, dtype=torch.float64) for x in pair]).to(processes.device)
        sums[name] = sums[name] + both if name in sums else both
    if not sums:
        return {}
    totals = processes.sum_tensor(torch.stack(list(sums.values()))).tolist()
    means = {name: total / number for name, (total, number) in zip(sums, totals, strict=True) if number}
    if {"reward_chosen", "reward_rejected"} <= means.keys():
        means["reward_margin"] = means["reward_chosen"] - means["reward_rejected"]
    return means


class Signals:
    """Ctrl-C and SIGTERM are noted, so that the step is finished. A second Ctrl-C raises KeyboardInterrupt.

    torchrun passes signals on, so that its processes get them twice: there the second is ignored.
    """

    def __init__(self) -> None:
        self.received = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT and "TORCHELASTIC_RUN_ID" not in os.environ:
            raise KeyboardInterrupt
        self.received = True


def learning_rate(step: int, steps: int, options: TrainOptions) -> float:
    """The learning rate of step `step`, from 0, of `steps`, as a fraction of the peak.

    It rises over the warmup. Then constant_with_warmup stays; linear and cosine fall to the final rate at the end; wsd
    stays, and falls linearly to the final rate over the last `decay` steps.
    """
    warmup, decay = (
        math.ceil(number * steps) if number < 1 else round(number) for number in (options.warmup_steps, options.decay)
    )
    schedule = options.lr_scheduler_type
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant_with_warmup":
        return 1.0
    begin = max(warmup, steps - decay) if schedule == "wsd" else warmup
    done = min(1.0, max(0.0, (step - begin) / max(1, steps - begin)))
    fall = 0.5 * (1 - math.cos(math.pi * done)) if schedule == "cosine" else done
    return 1.0 - (1.0 - options.final_lr) * fall


def peak_memory(device: torch.device) -> float:
    """The peak so far in GiB, of tensors on the GPU or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
