"""The training loop: steps, evaluations and checkpoints of any recipe, on one process or many.

A step takes the micro-batches of all ranks together: their losses are divided by the number of labels of them all, so
that N ranks compute what one would. What a run is, is in the model, the optimizer, the position in the data and
`Progress`; `Checkpoints` holds these, and a run that is resumed computes the same bits.
"""

import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ligermodels.errors import CheckpointError, InputError, LigermodelsError, TrainingError
from ligermodels.layers import losses
from ligermodels.parallel import Checkpoints, make_mesh
from ligermodels.processes import Processes
from ligermodels.recipes.options import TrainOptions
from ligermodels.recipes.packing import filled_batch
from ligermodels.recipes.report import Reporter
from ligermodels.training import CapturedStep

FEW_STEPS = 20
"""Fewer are too few to learn from."""
Batch = dict[str, Any]
"""Arguments of the model's forward."""
Count = Callable[[Batch], Tensor]
"""What a batch adds to the divisors of a step: the number of its labels, or a vector that begins with it."""
Sums = dict[str, tuple[Tensor, Tensor]]
"""For the log: by name, a sum over the batch of this rank, and the number of what is summed."""
Loss = Callable[[Any, Batch, Tensor], Tensor | tuple[Tensor, Sums]]
"""(model, batch, count of the step): the batch's part of the loss of the step, over all ranks; and sums."""


class Batches(Protocol):
    """An endless iterator over batches with a state; on the CPU."""

    def __next__(self) -> Batch: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Any, /) -> None: ...


def rate(step: int, steps: int, *, schedule: str, warmup: float, decay: float = 0.2, final: float = 0.0) -> float:
    """The learning rate of step `step`, from 0, of `steps`, as a share of the highest.

    It rises over `warmup` steps (below 1: over that share of all), and then
    constant_with_warmup: stays; linear, cosine: falls to `final` at the end; wsd: stays, and falls in a line over
    the last `decay` steps (a share below 1) to `final`.
    """
    rise = _steps(warmup, steps)
    if step < rise:
        return (step + 1) / rise
    if schedule == "constant_with_warmup":
        return 1.0
    begin = max(rise, steps - _steps(decay, steps)) if schedule == "wsd" else rise
    part = min(1.0, max(0.0, (step - begin) / max(1, steps - begin)))
    fall = 0.5 * (1 - math.cos(math.pi * part)) if schedule == "cosine" else part
    return 1.0 - (1.0 - final) * fall


def _steps(share: float, steps: int) -> int:
    return math.ceil(share * steps) if share < 1 else round(share)


def start_processes(options: TrainOptions) -> Processes:
    """Joins the processes that torchrun has started; one process alone needs no process group."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not dist.is_initialized():
        cuda = torch.cuda.is_available()
        return Processes(torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"))
    return Processes.of_mesh(make_mesh(dp_replicate=options.dp_replicate, cp=options.cp, tp=options.tp))


@dataclass
class Progress:
    """How far a run is. best: the lowest loss of an evaluation; waited: evaluations since then."""

    steps: int
    step: int = 0
    tokens: int = 0
    trained: int = 0
    seconds: float = 0.0
    evaluated: int = -1
    best: float = math.inf
    best_step: int = -1
    waited: int = 0
    evaluations: list[list[float]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            if name != "steps":  # a run may be made longer
                setattr(self, name, value)


class Source(Protocol):
    """What gives each step its batches, on the device, and has a state, that after the batches that were taken."""

    def take(self) -> list[Batch]: ...
    def make_next(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


class Feed:
    """The batches of each step that are this rank's, of which the next may be made while the GPU computes.

    All ranks go through the same batches and take those of their number, so that a step is the same on any number of
    ranks, and so is the state: the position after the batches that were taken.
    """

    def __init__(self, batches: Batches, per_step: int, processes: Processes, vocab_size: int):
        self.batches, self.per_step, self.processes, self.vocab_size = batches, per_step, processes, vocab_size
        self._next: list[Batch] | None = None
        self._after_next = self._state = batches.state_dict()

    def take(self) -> list[Batch]:
        self.make_next()
        taken, self._next = self._next, None
        assert taken is not None
        self._state = self._after_next
        return [on_device(batch, self.processes.device) for batch in taken]

    def make_next(self) -> None:
        if self._next is None:
            made = [checked(next(self.batches), self.vocab_size) for _ in range(self.per_step)]
            self._next = made[self.processes.batch_rank :: self.processes.batch_ranks]
            self._after_next = self.batches.state_dict()

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches.load_state_dict(state)
        self._next, self._state, self._after_next = None, state, state


def on_device(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cpu":
        return batch
    return {  # sizes of images are read on the host
        key: x.pin_memory().to(device, non_blocking=True) if isinstance(x, Tensor) and "_grid_" not in key else x
        for key, x in batch.items()
    }


def checked(batch: Batch, vocab_size: int) -> Batch:
    """The batch. Raises InputError for ids that the embedding has no row for: a GPU would read what lies behind it."""
    highest = int(batch["input_ids"].max())
    if highest >= vocab_size:
        raise InputError(
            f"the tokenizer gave the id {highest}, and the model has {vocab_size} ids: they do not belong together"
        )
    return batch


def num_labels(batch: Batch) -> Tensor:
    """How many labels count: all but -100, and but the first of each sequence, which nothing predicts."""
    return losses.num_labels(batch["labels"], batch.get("cu_seqlens"))


def next_token_loss(model: Any, batch: Batch, count: Tensor) -> Tensor:
    """The cross entropy over the labels of the batch, divided by the count of the step.

    The balancing loss of a mixture of experts, all of which the model adds to each forward, gets the weight of the
    batch's labels among those of the step.
    """
    output = model(**batch, num_items_in_batch=count)
    if output.aux_loss is None:
        return output.loss
    own = num_labels(batch)
    if model.parallel is not None:
        own = model.parallel.count(batch["labels"], batch.get("cu_seqlens"))
    return output.loss - (1 - own / count) * model.config.router_aux_loss_coef * output.aux_loss


class _WithLoss(nn.Module):
    """(count of the step, batch) -> the batch's part of the loss, as `CapturedStep` calls a model."""

    def __init__(self, model: nn.Module, loss: Loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, num_items_in_batch: Tensor, **batch: Any) -> Any:
        return self.loss(self.model, batch, num_items_in_batch)


class Signals:
    """Ctrl-C and SIGTERM, noted instead of raised, so that a step is finished. A second Ctrl-C raises.

    torchrun passes signals on, so that its processes get them twice: there the second is ignored.
    """

    def __init__(self) -> None:
        self.came = False
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
        if self.came and number == signal.SIGINT and "TORCHELASTIC_RUN_ID" not in os.environ:
            raise KeyboardInterrupt
        self.came = True


class _Sums:
    """Metric sums of a step."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, part: Tensor | tuple[Tensor, Sums]) -> Tensor:
        """The loss of what a `Loss` returned, of which the sums are kept."""
        if isinstance(part, Tensor):
            return part
        for name, pair in part[1].items():
            both = torch.stack(pair).double()
            self._sums[name] = self._sums[name] + both if name in self._sums else both
        return part[0]

    def means(self, processes: Processes) -> dict[str, float]:
        """Over all ranks; what there is none of is left out."""
        numbers = torch.stack([*self._sums.values()]).flatten().tolist() if self._sums else []
        totals = iter(processes.sum(*numbers) if numbers else [])
        pairs = {name: (next(totals), next(totals)) for name in self._sums}
        means = {name: total / number for name, (total, number) in pairs.items() if number}
        if {"reward_chosen", "reward_rejected"} <= means.keys():
            means["reward_margin"] = means["reward_chosen"] - means["reward_rejected"]
        return means


@dataclass
class Loop:
    """A run that is ready to go. `save` writes the model as it is into a folder.

    capture: steps are CUDA graphs (`CapturedStep`) of batches padded to options.batch_tokens, on one process.
    """

    model: Any
    optimizer: Any
    feed: Source
    evaluation: Sequence[Batch]
    options: TrainOptions
    processes: Processes
    progress: Progress
    checkpoints: Checkpoints
    reporter: Reporter
    save: Callable[[Path], None]
    loss: Loss = next_token_loss
    count: Count = num_labels
    capture: bool = False
    stopped: bool = field(default=False, init=False)
    """Whether a signal or an error has ended the run after a step that is saved."""
    _captured: CapturedStep | None = field(default=None, init=False)

    def run(self) -> None:
        """Trains to the end of the run, or until evaluations stop getting better.

        Raises TrainingError where the loss is no number, CheckpointError where a checkpoint cannot be written, and
        KeyboardInterrupt after a signal, once the step is finished and saved; likewise, on all ranks, the errors of the
        data of the next step.
        """
        progress, options = self.progress, self.options
        with Signals() as signals:
            while True:
                if self._is_due(options.eval_steps) and progress.evaluated < progress.step and self.evaluation:
                    self._evaluate()
                    if options.early_stopping_patience and progress.waited >= options.early_stopping_patience:
                        self.reporter.say(f"stopped: {progress.waited} evaluations without a better one")
                        break
                if progress.step >= progress.steps:
                    break
                stop = self._step(signals)
                if stop or self._is_due(options.save_steps):
                    self._save_state(wait=stop)
                if stop:
                    self.stopped = True
                    raise KeyboardInterrupt
            self._save_state(wait=True)

    def _end_with(self, error: LigermodelsError | None) -> NoReturn:
        """Saves the state, then raises the error that a rank has on all ranks. Called by all ranks."""
        if self.progress.step:
            self._save_state(wait=True)
            self.stopped = True
        with self.processes.raise_on_all():
            if error is not None:
                raise error
        raise AssertionError("no rank has an error")

    def _save_state(self, *, wait: bool) -> None:
        """Saves a checkpoint; an error says how much room there is, which torch's does not."""
        try:
            self.checkpoints.save(self.progress.step, wait=wait)
        except CheckpointError as error:
            folder = self.checkpoints.folder
            newest = max(folder.glob("step-*"), default=None)
            size = sum(file.stat().st_size for file in newest.iterdir()) if newest else 0
            takes = f"A checkpoint takes {size / 1e6:,.1f} MB, and " if size else ""
            error.add_note(f"  {takes}{shutil.disk_usage(folder).free / 1e9:,.1f} GB are free on that disk.")
            raise

    def _is_due(self, every: int) -> bool:
        step = self.progress.step
        return step in (0, self.progress.steps) or (every > 0 and step % every == 0)

    def _step(self, signals: Signals) -> bool:
        """One step. Returns whether a signal has come to any rank."""
        progress, start = self.progress, time.perf_counter()
        lr = self.options.peak_lr * self._rate(progress.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        try:
            batches = self.feed.take()
        except LigermodelsError as error:  # of rewards, which all ranks raise
            self._end_with(error)
        tokens = sum(batch["input_ids"].numel() for batch in batches)
        count = self._count_of(batches)
        loss, sums = torch.zeros((), device=self.processes.device), _Sums()
        for batch in batches:
            if self.capture:
                loss += self._replay(batch, count.clamp(min=1), len(batches))
            else:
                part = sums.add(self.loss(self.model, batch, count.clamp(min=1)))
                part.backward()
                loss += part.detach()
        if not self.capture:  # whose last call has taken the step
            self.optimizer.step()
            self.optimizer.zero_grad()
        failed: LigermodelsError | None = None
        try:
            if progress.step + 1 < progress.steps:
                self.feed.make_next()
        except LigermodelsError as error:
            failed = error
        value, norm = loss.item(), float(self.optimizer.grad_norm)
        spent = time.perf_counter() - start
        # Also the time is that of all ranks, so that the progress of all is the same, and resumes on any number.
        tokens_of_all, came, failures, spent_by_all = self.processes.sum(
            tokens, signals.came, failed is not None, spent
        )
        seconds = spent_by_all / self.processes.batch_ranks
        if not (math.isfinite(value) and math.isfinite(norm)):
            self._stop_at(value, norm)
        progress.step += 1
        progress.tokens += round(tokens_of_all)
        progress.trained += round(count.reshape(-1)[0].item())
        progress.seconds += seconds
        self.reporter.step(
            progress.step,
            loss=value,
            lr=lr,
            grad_norm=norm,
            tokens=progress.tokens,
            trained_tokens=progress.trained,
            tokens_per_second=tokens_of_all / seconds,
            gib=peak_memory(self.processes.device),
            **sums.means(self.processes),
        )
        if failures:
            self._end_with(failed)
        return came > 0

    def _replay(self, batch: Batch, count: Tensor, accumulate: int) -> Tensor:
        """The batch's part of the loss; its backward, and the optimizer's step after every `accumulate` calls."""
        assert self.options.batch_tokens is not None
        inputs: dict[str, Any] = filled_batch(batch, self.options.batch_tokens) | {"num_items_in_batch": count}
        if self._captured is None:  # not before: a checkpoint that is loaded would make it stale
            model = _WithLoss(self.model, self.loss)
            self._captured = CapturedStep(model, self.optimizer, accumulate=accumulate, **inputs)
        return self._captured(**inputs)

    def _count_of(self, batches: Sequence[Batch]) -> Tensor:
        """The divisors of these batches of all ranks."""
        count = torch.stack([self.count(batch) for batch in batches]).sum(0).float()
        return self.processes.sum_tensor(count.to(self.processes.device))

    def _rate(self, step: int) -> float:
        o = self.options
        how: dict[str, Any] = dict(schedule=o.lr_scheduler_type, warmup=o.warmup_steps, decay=o.decay, final=o.final_lr)
        return rate(step, self.progress.steps, **how)

    def _stop_at(self, loss: float, norm: float) -> None:
        step = self.progress.step + 1
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the norm of the gradient is {norm}"
        raise TrainingError(
            f"step {step} of {self.progress.steps}: {what}. It was not saved; the checkpoints before it are as they "
            f"were.\n  Likely: a learning rate that is too high (--learning-rate {self.options.peak_lr:g}), or "
            "examples of this step that are broken.\n  Next: a lower --learning-rate or a longer --warmup-steps, in "
            "another --output-dir."
        )

    @torch.no_grad()
    def _evaluate(self) -> None:
        """The loss over the evaluation's labels of all ranks; keeps the best model."""
        progress, loss, sums = self.progress, 0.0, _Sums()
        count = self._count_of(self.evaluation).clamp(min=1)
        self.model.eval()
        for batch in self.evaluation:
            placed = on_device(batch, self.processes.device)
            loss += sums.add(self.loss(self.model, placed | {"return_logits": False}, count)).item()  # over all ranks
        self.model.train()
        if not math.isfinite(loss):
            raise TrainingError(f"the evaluation after step {progress.step} has loss {loss}; nothing of it was saved")
        progress.evaluated = progress.step
        progress.evaluations.append([progress.step, loss])
        better = loss < progress.best
        if better:
            progress.best, progress.best_step, progress.waited = loss, progress.step, 0
        else:
            progress.waited += 1
        self.reporter.evaluation(progress.step, loss, better=better, **sums.means(self.processes))
        if better and progress.step > 0:
            self.save(Path(self.options.output_dir) / "best")


def own_part(batches: Sequence[Batch], processes: Processes) -> list[Batch]:
    """This rank's part of batches that all ranks have; each rank gets as many, some of which may count nothing."""
    mine: list[Batch] = []
    for first in range(0, len(batches), processes.batch_ranks):
        index = first + processes.batch_rank
        batch = batches[min(index, len(batches) - 1)]
        if index >= len(batches):
            batch = {**batch, "labels": torch.full_like(batch["labels"], -100)}
        mine.append(batch)
    return mine


def peak_memory(device: torch.device) -> float:
    """GiB at most so far: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def forwards_per_step(accumulation: int | None, ranks: int, forwards: float | None) -> int:
    """The forwards of a step, of all ranks together.

    accumulation: as asked, or None for 8, or for fewer where the run would else have less than 20 steps; then rounded
    up to what the ranks divide. forwards: of the run, where they are counted.
    Raises InputError where the ranks do not divide what is asked.
    """
    if accumulation is None:
        wanted = 8 if forwards is None else max(1, min(8, int(forwards // FEW_STEPS)))
        return -(-wanted // ranks) * ranks
    if accumulation % ranks:
        fits = sorted({max(ranks, accumulation // ranks * ranks), -(-accumulation // ranks) * ranks})
        raise InputError(
            f"accumulation={accumulation} forwards a step cannot be split over {ranks} processes; "
            f"give {' or '.join(map(str, fits))}"
        )
    return accumulation
