"""The trainer of all recipes: setup, train_step, evaluate, save, run.

The losses of a step are divided by the number of labels in the micro-batches of all ranks, so that N ranks compute what
one would. A checkpoint has the whole state of a run: the model, the optimizer, the position in the data and `Progress`.
A resumed run computes the same bits.

DIR/options.yaml       the options, with the values that were chosen for "auto"
DIR/checkpoints/       the newest checkpoints, from which --resume continues
DIR/metrics.jsonl      a line per step and per evaluation
DIR/tensorboard/       the same for TensorBoard, with --report-to tensorboard
DIR/best/              the model, or the adapters, of the best evaluation
DIR/model/             the tuned model, with plan and results in README.md; adapter/ or medusa/ where that was trained
"""

import contextlib
import dataclasses
import fcntl
import importlib.util
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ligermodels.checkpoint.files import write_errors
from ligermodels.checkpoint.saving import replacing
from ligermodels.errors import InputError, LigermodelsError, TrainingError
from ligermodels.parallel import Checkpoints, make_mesh
from ligermodels.processes import Processes
from ligermodels.recipes import memory, model as models, report
from ligermodels.recipes.base import Recipe
from ligermodels.recipes.data.batches import BadRowError, Data
from ligermodels.recipes.data.examples import Batch, filled_batch
from ligermodels.recipes.options import TrainOptions, flag
from ligermodels.recipes.report import say
from ligermodels.recipes.steps import (
    Signals,
    forwards_per_step,
    learning_rate,
    means_of,
    on_device,
    peak_memory,
    shard_batches,
)
from ligermodels.training import CapturedStep


def train(kind: type[Recipe], options: TrainOptions) -> int:
    """Trains; returns the exit status. Raises the errors of ligermodels, and KeyboardInterrupt once all is saved."""
    if (logger := options.report_to) != "none" and importlib.util.find_spec(logger) is None:
        raise InputError(f"--report-to {logger} needs a package that is not installed: pip install {logger}")
    joined = dist.is_initialized()
    processes = start_processes(options)
    try:
        with contextlib.ExitStack() as stack:
            return Trainer(kind, options, processes, stack).run()
    finally:
        if processes.mesh is not None and not joined:
            dist.destroy_process_group()


def start_processes(options: TrainOptions) -> Processes:
    """Joins the processes that torchrun has started; a single one needs no process group."""
    degrees: dict[str, Any] = dict(dp_replicate=options.dp_replicate, cp=options.cp, tp=options.tp)
    if os.environ.get("WORLD_SIZE", "1") != "1" or dist.is_initialized():
        return Processes.of_mesh(make_mesh(**degrees))
    if name := next((name for name, degree in degrees.items() if degree > 1), None):
        raise InputError(
            f"{name}={degrees[name]} is for several processes, and this is one; run `torchrun --nproc-per-node N -m "
            f"ligermodels train {options.recipe} ...`, or leave {flag(name)} out"
        )
    on_gpu = torch.cuda.is_available()
    return Processes(torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"))


def check_folder(out: Path, *, resume: bool) -> None:
    """Raises InputError if --output-dir cannot be used, or has another run."""
    with write_errors(out):  # of a name that is too long
        above = next(path for path in (out, *out.absolute().parents) if path.is_symlink() or path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise InputError(f"--output-dir {out} cannot be made, since {above} is no folder to write into; give another")
    has_run = (out / "options.yaml").is_file()
    if out.is_dir() and any(".saving-" not in path.name for path in out.iterdir()) and not has_run:
        what = "has no run to resume" if resume else "is not empty"
        raise InputError(f"--output-dir {out} {what}; give a folder that is new")
    if has_run and not resume:
        raise InputError(f"--output-dir {out} has a run already; pass --resume to continue it, or give another folder")


@dataclass
class Progress:
    """How far a run is: `step` of `steps`. trained: the number of labels. best: the lowest loss of an evaluation."""

    steps: int
    step: int = 0
    tokens: int = 0
    trained: int = 0
    seconds: float = 0.0
    evaluated: int = -1  # the step after which the last evaluation was
    best: float = math.inf
    best_step: int = -1

    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            if name != "steps":  # a run may be made longer
                setattr(self, name, value)


class Trainer:
    """One run of a recipe. stack: closes the files, processes and locks of the run at its end."""

    model: Any
    _captured: CapturedStep | None = None

    def __init__(self, kind: type[Recipe], options: TrainOptions, processes: Processes, stack: contextlib.ExitStack):
        self.kind, self.options, self.processes, self.stack = kind, options, processes, stack
        self.out = Path(options.output_dir)
        self.signals = Signals()

    def setup(self) -> bool:
        """Makes the plan and, unless this is a dry run, loads everything. Returns whether to train.

        The options and the first rows are checked before weights are read and before anything is written.
        """
        o, p, out = self.options, self.processes, self.out
        file = out / "options.yaml"
        if not o.dry_run:
            p.from_main(lambda: check_folder(out, resume=o.resume))
        before = p.from_main(lambda: type(o).load(file) if file.is_file() else None) if o.resume else None
        if o.resume and before is None and p.is_main:
            say(f"warning: --resume, but {out} has no run: a new one begins")

        # The data
        source = models.find(o)
        sketch = models.sketch(source, text_only=o.text_only, mtp_loss_weight=o.mtp_loss_weight)
        tokenizer = models.tokenizer_of(o, source, sketch)
        length = o.max_length or min(4096, sketch.config.get_text_config().max_position_embeddings)
        models.check_length(length, sketch, "model")
        tokens = o.batch_tokens or length * o.sequences * o.examples
        o = self.options = dataclasses.replace(o, max_length=length, batch_tokens=tokens)
        recipe = self.recipe = self.kind.of(o)(o, tokenizer, p.ranks_per_batch)
        if o.capture:
            models.check_capture(sketch, p)
        self.data = Data(o, recipe)
        counts = None if o.max_steps is not None else self.data.count()  # each rank counts: waiting could time out
        forwards = None if counts is None else counts["batches"] * (o.num_train_epochs or 1)
        o.accumulation = forwards_per_step(o.accumulation, p.batch_ranks, forwards)
        steps = o.max_steps or max(1, round((forwards or 0) / o.accumulation))

        # The plan
        self.progress = Progress(steps)
        sizes = recipe.memory(memory.Sizes.of(sketch, o), sketch)
        o.precision, o.activations = memory.choose(sizes, o, p, min(p.gather(memory.available(p.device))))
        self.plan = report.make_plan(o, p, type(sketch).__name__, sizes, self.data, counts, steps) | recipe.plan(steps)
        if p.is_main:
            text = "".join(f"{name:14} {line}\n" for name, line in self.plan.items()) + o.dump() * o.dry_run
            print(text, end="", file=sys.stdout if o.dry_run else sys.stderr, flush=True)
            for doubt in report.doubts(o, steps, sketch.decoder.config.hidden_size):
                say(f"warning: {doubt}")
        p.from_main(self._show_examples)
        if o.dry_run:
            return False

        # The first batches, so that an error in the data is raised before anything is written
        self.stack.callback(self.data.train.close)
        vocab_size = len(sketch.get_input_embeddings().weight)
        self.batches = recipe.StepBatches(self.data.train, recipe, p, vocab_size)
        self.batches.prefetch()
        self.evaluation = shard_batches(self.data.evaluation(), recipe.evaluation, p)
        changed = [] if before is None else o.check_resumed(before)

        # The model
        self.model = recipe.load(source, p)
        p.from_main(self._lock)  # before anything is written
        if before is None:
            p.from_main(self._write_options)
        recipe.setup(self.model, source, p)
        self.optimizer = models.make_optimizer(o, self.model, p)
        self.checkpoints = self.stack.enter_context(
            Checkpoints(
                out / "checkpoints", self.model, self.optimizer, keep=o.save_total_limit,
                frozen=all(parameter.requires_grad for parameter in self.model.parameters()), data=self.batches,
                progress=self.progress,
            )
        )  # fmt: skip
        resumed = self.checkpoints.load()
        if resumed > steps:
            raise InputError(
                f"{out} has a checkpoint after step {resumed}, and this run is to have {steps} steps; give --max-steps "
                f"{resumed} or more"
            )
        p.from_main(self._write_options)  # now that the run can continue with them
        if before is not None and p.is_main:
            say(f"resumed after step {resumed}" if resumed else f"{out} has no checkpoint yet: the run begins")
            if changed:
                say(f"changed since the run began: {', '.join(changed)}")
        if not resumed:
            torch.manual_seed(o.seed + p.batch_rank)
        if p.is_main:
            self.reporter = report.Reporter(o, steps, resumed, self.progress.evaluated)
            self.stack.callback(self.reporter.close)
        return True

    def _show_examples(self) -> None:
        for example in self.data.examples(self.options.show):
            say(f"\n{example}")

    def _lock(self) -> None:
        """Makes the folder and locks it. Raises InputError if another run has locked it."""
        with write_errors(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.out, os.O_RDONLY)  # the system closes it when the process ends, however it ends
        self.stack.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another process is training in --output-dir {self.out}; wait until it ends") from None
        except OSError:  # a file system without locks
            return
        check_folder(self.out, resume=self.options.resume)
        for left in self.out.glob(".*.saving-*"):  # models that a killed run had not finished writing
            shutil.rmtree(left, ignore_errors=True)

    def _write_options(self) -> None:
        file = self.out / "options.yaml"
        with write_errors(file), replacing(file, 0, is_file=True) as new:  # a kill leaves the old options, or the new
            (new / file.name).write_text(self.options.dump(), "utf-8")

    def train_step(self) -> BaseException | None:
        """One optimizer step over the batches of all ranks. Returns what ends the run, if anything does.

        That is KeyboardInterrupt after a signal to any rank, or the error for which the next step has no batches.
        """
        p, progress, start, o, recipe = self.processes, self.progress, time.perf_counter(), self.options, self.recipe
        assert o.learning_rate is not None, "options have a value for it"
        lr = o.learning_rate * learning_rate(progress.step, progress.steps, o)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        try:
            batches = self.batches.take()
        except LigermodelsError as error:  # of reward functions, which all ranks raise
            return error
        tokens = sum(batch["input_ids"].numel() for batch in batches)
        count, metrics = recipe.total(self.model, batches, p), [self.batches.metrics]
        # No rank has an image: without gradients a tower stays as it is, as it does in one process.
        self.model.model.always_runs_tower = self.batches.has_images and p.batch_ranks > 1
        loss = torch.zeros((), device=p.device)
        for batch in batches:
            if o.capture:  # the last call also takes the optimizer's step
                loss += self._replay(batch, count, len(batches))
            else:
                part, found = recipe.loss(self.model, batch, count)
                part.backward()
                loss += part.detach()
                metrics.append(found)
        if not o.capture:
            self.optimizer.step()
            self.optimizer.zero_grad()
        failed: LigermodelsError | None = None
        try:  # the next batches are made while the GPU computes
            if progress.step + 1 < progress.steps:
                self.batches.prefetch()
        except LigermodelsError as error:
            failed = error
        value, norm = loss.item(), float(self.optimizer.grad_norm)  # type: ignore[arg-type]
        # The time, too, is a mean over ranks: the progress of all ranks is the same, and loads on any number of them.
        seconds = (time.perf_counter() - start) / p.batch_ranks
        tokens_of_all, seconds, came, failures = p.sum(tokens, seconds, self.signals.came, failed is not None)
        if not (math.isfinite(value) and math.isfinite(norm)):
            raise TrainingError(
                f"step {progress.step + 1} of {progress.steps}: the loss is {value}, and the gradient norm {norm}. "
                "This step is not saved; earlier checkpoints are unchanged.\n  Next: a lower --learning-rate than "
                f"{o.learning_rate:g}, or a longer --warmup-steps, in another --output-dir."
            )
        progress.step += 1
        progress.tokens += round(tokens_of_all)
        progress.trained += round(count.reshape(-1)[0].item())
        progress.seconds += seconds
        values = dict(
            loss=value, lr=lr, grad_norm=norm, tokens=progress.tokens, trained_tokens=progress.trained,
            tokens_per_second=tokens_of_all / seconds, gib=peak_memory(p.device), **means_of(metrics, p),
        )  # fmt: skip
        if p.is_main:
            self.reporter.step(progress.step, values)
        if came:  # a signal to all processes ends those that encode rows, too: then that is no error
            return KeyboardInterrupt()
        return next(error for error in p.gather(failed) if error is not None) if failures else None

    def _replay(self, batch: Batch, count: Tensor, accumulate: int) -> Tensor:
        """The batch's part of the loss; its backward, and the optimizer's step after every `accumulate` calls."""
        inputs = filled_batch(batch, self.options.batch_tokens) | {"num_items_in_batch": count}  # type: ignore[arg-type]
        if self._captured is None:  # not before: a checkpoint that is loaded would make it stale
            model = _ModelWithLoss(self.model, self.recipe)
            self._captured = CapturedStep(model, self.optimizer, accumulate=accumulate, **inputs)
        return self._captured(**inputs)

    @torch.no_grad()
    def evaluate(self) -> None:
        """The loss over the evaluation data of all ranks; keeps the best model."""
        progress, recipe, loss, metrics = self.progress, self.recipe.evaluation, 0.0, []
        self.model.eval()
        self.model.model.always_runs_tower = self.processes.batch_ranks > 1
        count = recipe.total(self.model, self.evaluation, self.processes)
        for batch in self.evaluation:
            part, found = recipe.loss(self.model, on_device(batch, self.processes.device), count)
            loss += part.item()  # over all ranks
            metrics.append(found)
        self.model.train()
        if not math.isfinite(loss):
            raise TrainingError(f"the evaluation after step {progress.step} has loss {loss}; it was not saved")
        progress.evaluated = progress.step
        if better := loss < progress.best:
            progress.best, progress.best_step = loss, progress.step
        means = means_of(metrics, self.processes)
        if self.processes.is_main:
            is_cross_entropy = type(recipe).loss is Recipe.loss
            self.reporter.evaluation(progress.step, loss, means, better=better, is_cross_entropy=is_cross_entropy)
        if better and progress.step > 0:
            self._save_model(self.out / "best")

    def save(self, *, wait: bool) -> None:
        """Saves a checkpoint. Raises CheckpointError if it cannot be written, or the one before it could not."""
        self.checkpoints.save(self.progress.step, wait=wait)

    def _save_model(self, target: Path, *, merged: bool = False) -> None:
        """Writes the trained model, adapter or heads, with the template of --chat-template.

        merged: the model with the adapters added to its weights.
        """
        if merged:
            from ligermodels.training.lora import merge_lora

            merge_lora(self.model).save_pretrained(target)
        else:
            self.recipe.save(self.model, target)
        if self.options.chat_template is not None:
            self.processes.from_main(lambda: self.recipe.tokenizer.save_pretrained(target))

    def run(self) -> int:
        """Trains to the end of the run. Returns the exit status.

        Raises TrainingError if the loss is not finite, CheckpointError if a checkpoint cannot be written, the errors of
        the data, and after a signal KeyboardInterrupt, once the step is finished and saved.
        """
        if not self.setup():
            return 0
        o, progress = self.options, self.progress
        with self.signals:
            while True:
                if self._is_due(o.eval_steps) and progress.evaluated < progress.step and self.evaluation:
                    self.evaluate()
                if progress.step >= progress.steps:
                    break
                stop = self.train_step()
                if stop is not None:
                    self._stop(stop)
                if self._is_due(o.save_steps):
                    self.save(wait=False)
            self.save(wait=True)
        self._finish()
        return 0

    def _is_due(self, every: int) -> bool:
        step = self.progress.step
        return step in (0, self.progress.steps) or (every > 0 and step % every == 0)

    def _stop(self, error: BaseException) -> NoReturn:
        """Saves the steps so far, and raises the error, which says how to continue."""
        if not self.progress.step:
            raise error
        self.save(wait=True)
        if self.processes.is_main:
            file = shlex.quote(str(self.out / "options.yaml"))
            torchrun = f"torchrun --nproc-per-node {self.processes.size} -m " * (self.processes.size > 1)
            skips = " --skip-bad" * isinstance(error, BadRowError)
            error.add_note(
                f"stopped after step {self.progress.step} of {self.progress.steps}, which is saved. To continue:\n"
                f"  {torchrun}ligermodels train {self.options.recipe} --config {file} --resume{skips}"
            )
        raise error

    def _finish(self) -> None:
        """Writes the result and its card, and prints the path of the result to stdout."""
        progress, saved = self.progress, self.out / self.recipe.result
        self._save_model(saved)
        if self.options.merge:
            saved = self.out / "model"
            self._save_model(saved, merged=True)
        if not self.processes.is_main:
            return
        lines, counts = self.reporter.lines(), self.data.train.counts.numbers
        facts = self.plan | {
            "tokens seen": f"{progress.tokens:,}, of which {progress.trained:,} were trained",
            "rows read": f"{counts['rows']:,}, over all epochs{report.left_out(counts)}",
            "speed": f"{progress.tokens / max(progress.seconds, 1e-9):,.0f} tokens/s in {progress.seconds:,.0f} s",
        }
        if progress.best_step >= 0:
            facts["best evaluation"] = f"{progress.best:.4f}, after step {progress.best_step}"
        last = {name: value for line in lines[-2:] for name, value in line.items()}
        facts["at the end"] = ", ".join(f"{name.replace('_', ' ')} {value:,.4g}" for name, value in last.items())
        report.write_card(self.options, facts, saved)
        print(saved)


class _ModelWithLoss(nn.Module):
    """The model with the loss of the recipe, as `CapturedStep` calls it."""

    def __init__(self, model: nn.Module, recipe: Recipe):
        super().__init__()
        self.model, self.recipe = model, recipe

    def forward(self, num_items_in_batch: Tensor, **batch: Any) -> Any:
        return self.recipe.loss(self.model, batch, num_items_in_batch)[0]
