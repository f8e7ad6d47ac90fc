"""The trainer of all recipes: setup, train_step, evaluate, save, run.

The losses of a step are divided by the number of labels in the micro-batches of all ranks, so that N ranks compute what
one would. A checkpoint has the whole state of a run: the model, the optimizer, the position in the data and `Progress`.
A resumed run computes the same bits.

DIR/options.yaml       the options, with the values that were chosen for "auto"
DIR/checkpoints/       the newest checkpoints, from which --resume continues
DIR/metrics.jsonl      a line per step and per evaluation
DIR/tensorboard/       the same for TensorBoard, with --report-to tensorboard
DIR/best/              what was trained, as it was at the best evaluation
DIR/loss.png           curves of the metrics, also beside the model
DIR/model/             the tuned model, with plan and results in README.md; `Recipe.result` names it where only adapters
                       or heads were trained
"""

import contextlib
import dataclasses
import importlib.util
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ligermodels.errors import InputError, LigermodelsError, TrainingError
from ligermodels.parallel import Checkpoints
from ligermodels.processes import Processes
from ligermodels.recipes import card, curves, memory, model as models, report, run_folder, upload
from ligermodels.recipes.base import Recipe
from ligermodels.recipes.data.batches import BadRowError, Data
from ligermodels.recipes.data.examples import Batch, filled_batch
from ligermodels.recipes.neftune import Neftune
from ligermodels.recipes.options import TrainOptions
from ligermodels.recipes.report import say
from ligermodels.recipes.steps import (
    Metrics,
    Signals,
    StepBatches,
    forwards_per_step,
    learning_rate,
    means_of,
    on_device,
    peak_memory,
    shard_batches,
)
from ligermodels.training import AdamW, CapturedStep, count_expert_loads, deterministic, update_router_biases


class Result(NamedTuple):
    """What a run has written: the folder of the model, adapter or heads, and the lines of metrics.jsonl.

    After a dry run they are None and an empty list.
    """

    folder: Path | None
    metrics: list[dict[str, float]]


def train(recipe_class: type[Recipe], options: TrainOptions) -> Result:
    """Trains. Raises the errors of ligermodels, and KeyboardInterrupt once all is saved."""
    if (logger := options.report_to) != "none" and importlib.util.find_spec(logger) is None:
        raise InputError(f"--report-to {logger} needs a package that is not installed: pip install {logger}")
    had_group = dist.is_initialized()
    processes = run_folder.start_processes(options)
    try:
        with contextlib.ExitStack() as stack:
            if options.deterministic:
                stack.enter_context(deterministic())
            return Trainer(recipe_class, options, processes, stack).run()
    finally:
        if processes.mesh is not None and not had_group:
            dist.destroy_process_group()


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
    worse: int = 0  # evaluations since the best

    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            if name != "steps":  # a run may be made longer
                setattr(self, name, value)


class Trainer:
    """One run of a recipe. stack: closes the files, processes and locks of the run at its end."""

    def __init__(
        self, recipe_class: type[Recipe], options: TrainOptions, processes: Processes, stack: contextlib.ExitStack
    ):
        self.recipe_class, self.options, self.processes, self.stack = recipe_class, options, processes, stack
        self.out = Path(options.output_dir)
        self.signals = Signals()
        # What `setup` makes, in this order.
        self.source: Path  # of the model, or of the tokenizer of one in memory
        self.was_tied: bool  # the head of the base is its embedding, which adapters may untie
        self.recipe: Recipe
        self.data: Data
        self.progress: Progress
        self.plan: dict[str, str]
        self.batches: StepBatches
        self.evaluation: list[Batch]  # this rank's batches of an evaluation
        self.model: Any
        self.optimizer: AdamW
        self.checkpoints: Checkpoints
        self.reporter: report.Reporter  # on rank 0 alone
        self.repository = ""  # of --push-to-hub
        self._captured: CapturedStep | None = None  # with --capture, from the first step on
        self._counts_loads = False
        self._max_expert_load: Tensor  # of the last step, on the device

    def setup(self) -> bool:
        """Makes the plan and, unless this is a dry run, loads everything. Returns whether to train.

        The options and the first rows are checked before weights are read and before anything is written.
        """
        options, processes = self.options, self.processes
        if not options.dry_run:
            processes.from_main(lambda: run_folder.check_folder(self.out, resume=options.resume))
        before = processes.from_main(lambda: run_folder.read_options(options)) if options.resume else None
        if options.resume and before is None and processes.is_main:
            say(f"warning: no run in {self.out} to resume; starting a new one")
        source, sketch = models.source_of(options, processes)
        self.source, self.was_tied = source, bool(sketch.tied_weights)
        self._make_plan(source, sketch, before)
        processes.from_main(self._show_examples)
        if options.dry_run:
            return False

        if options.push_to_hub:
            self.repository = processes.from_main(lambda: upload.make_repository(options))
        # The first batches, so that an error in the data is raised before anything is written
        self.stack.callback(self.data.train.close)
        vocab_size = len(sketch.get_input_embeddings().weight)
        self.batches = self.recipe.StepBatches(self.data.train, self.recipe, processes, vocab_size)
        self.batches.prefetch()
        self.evaluation = shard_batches(self.data.evaluation(), self.recipe.evaluation, processes)
        self._load(source, before)
        return True

    def _make_plan(self, source: Path, sketch: Any, before: Mapping[str, Any] | None) -> None:
        """Opens the data, completes the options by it and by the free memory, and prints the plan.

        before: the options of the run that is resumed.
        """
        options, processes = self.options, self.processes
        options = models.with_quantization(options, source)
        tokenizer = models.tokenizer_of(options, source, sketch)
        length = options.max_length or min(4096, sketch.config.get_text_config().max_position_embeddings)
        models.check_length(length, sketch, "model", processes)
        tokens = options.batch_tokens or length * options.sequences * options.examples
        options = dataclasses.replace(options, max_length=length, batch_tokens=tokens)
        recipe = self.recipe_class.of(options)(options, tokenizer, processes)
        if options.capture:
            models.check_capture(sketch, processes)
        if options.fp8 != "none" or options.quantize == "fp8":
            models.check_fp8(options, sketch, processes)
        if options.router_bias_rate:
            models.check_router_biases(sketch)
        if options.optim == "muon":
            models.check_muon(processes)
        data = Data(options, recipe)
        counts = None if options.max_steps is not None else data.count()  # each rank counts: waiting could time out
        forwards = None if counts is None else counts["batches"] * (options.num_train_epochs or 1)
        accumulation = forwards_per_step(options.accumulation, processes.batch_ranks, forwards)
        steps = options.max_steps or max(1, round((forwards or 0) / accumulation))

        options = dataclasses.replace(options, accumulation=accumulation)
        sizes = recipe.memory(memory.Sizes.of(sketch, options), sketch)
        free = min(processes.gather(memory.available(processes.device)))
        precision, activations = memory.choose(sizes, options, processes, free)
        options = dataclasses.replace(options, precision=precision, activations=activations)
        if before is not None:
            options.check_resumed(before)
        recipe.complete(options)
        self.options, self.recipe, self.data, self.progress = options, recipe, data, Progress(steps)
        plan = report.make_plan(options, processes, type(sketch).__name__, sizes, data, counts, steps)
        self.plan = plan | recipe.plan(steps)
        if not processes.is_main:
            return
        text = "\n".join(f"{name:14} {line}" for name, line in self.plan.items())
        if options.dry_run:
            print(f"{text}\n{options.dump()}", end="", flush=True)
        else:
            say(text)
        for doubt in report.doubts(options, steps, sketch.decoder.config.hidden_size):
            say(f"warning: {doubt}")

    def _show_examples(self) -> None:
        for example in self.data.examples(self.options.show):
            say(f"\n{example}")

    def _load(self, source: Path, before: Mapping[str, Any] | None) -> None:
        """Loads the model and the newest checkpoint. before: the options of the run that is resumed."""
        options, processes, recipe, steps = self.options, self.processes, self.recipe, self.progress.steps
        changed = [] if before is None else options.check_resumed(before)
        self.model = recipe.load(source, processes)
        # Before anything else is written
        processes.from_main(lambda: run_folder.lock_folder(self.out, self.stack, resume=options.resume))
        if before is None:
            processes.from_main(lambda: run_folder.write_options(options))
        recipe.setup(self.model, source, processes)
        if options.neftune_noise_alpha:
            self.stack.callback(Neftune(self.model, options.neftune_noise_alpha).remove)
        self.optimizer = models.make_optimizer(options, self.model, processes)
        self._counts_loads = not options.capture and count_expert_loads(self.model)  # a graph would count padding
        self.checkpoints = self.stack.enter_context(
            Checkpoints(
                self.out / "checkpoints", self.model, self.optimizer, keep=options.save_total_limit,
                frozen=all(parameter.requires_grad for parameter in self.model.parameters()), data=self.batches,
                progress=self.progress,
            )
        )  # fmt: skip
        resumed = self.checkpoints.load()
        if resumed > steps:
            raise InputError(
                f"{self.out} has a checkpoint after step {resumed}, and this run is to have {steps} steps; give "
                f"--max-steps {resumed} or more"
            )
        processes.from_main(lambda: run_folder.write_options(options))  # now that the run can continue with them
        if not resumed:
            torch.manual_seed(options.seed + processes.batch_rank)
        if not processes.is_main:
            return
        if before is not None:
            say(f"resumed after step {resumed}" if resumed else f"{self.out} has no checkpoint yet: the run begins")
            if changed:
                say(f"changed since the run began: {', '.join(changed)}")
        self.reporter = report.Reporter(options, steps, resumed, self.progress.evaluated, processes.device)
        self.stack.callback(self.reporter.close)

    def train_step(self) -> BaseException | None:
        """One optimizer step over the batches of all ranks. Returns what ends the run, if anything does.

        That is KeyboardInterrupt after a signal to any rank, or the error for which the next step has no batches.
        """
        options, processes, recipe, progress = self.options, self.processes, self.recipe, self.progress
        start = time.perf_counter()
        assert options.learning_rate is not None, "options have a value for it"
        lr = options.learning_rate * learning_rate(progress.step, progress.steps, options)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        try:
            batches = self.batches.take()
        except LigermodelsError as error:  # of reward functions, which all ranks raise
            return error
        tokens = sum(batch["input_ids"].numel() for batch in batches)
        # The first collective of a step: the labels of all ranks, before any loss. Each loss is divided by them, so
        # that the sum of the ranks' gradients is that of one process, whichever rank has more labels.
        count = recipe.total(self.model, batches, processes)
        # No rank has an image: without gradients a tower stays as it is, as it does in one process.
        self.model.model.always_runs_tower = self.batches.has_images and processes.batch_ranks > 1
        loss, metrics = self._backward(batches, count)
        next_error: LigermodelsError | None = None
        try:  # the next batches are made while the GPU computes
            if progress.step + 1 < progress.steps:
                self.batches.prefetch()
        except LigermodelsError as error:
            next_error = error
        value, norm = loss.item(), float(self.optimizer.grad_norm)  # type: ignore[arg-type]
        # The time, too, is a mean over ranks: the progress of all ranks is the same, and loads on any number of them.
        seconds = (time.perf_counter() - start) / processes.batch_ranks
        # The second collective: what the log adds up, and what ends the run. It waits for the slowest rank, whose GPU
        # `item` has waited for. After it all ranks know of a signal or an error on any, and stop after the same step.
        tokens_of_all, seconds, signals, errors = processes.sum(
            tokens, seconds, self.signals.received, next_error is not None
        )
        if not (math.isfinite(value) and math.isfinite(norm)):
            raise TrainingError(
                f"step {progress.step + 1} of {progress.steps}: the loss is {value}, and the gradient norm {norm}. "
                "This step is not saved; earlier checkpoints are unchanged.\n  Next: a lower --learning-rate than "
                f"{options.learning_rate:g}, or a longer --warmup-steps, in another --output-dir."
            )
        progress.step += 1
        progress.tokens += round(tokens_of_all)
        progress.trained += round(count.reshape(-1)[0].item())
        progress.seconds += seconds
        values = dict(
            loss=value, lr=lr, grad_norm=norm, tokens=progress.tokens, trained_tokens=progress.trained,
            tokens_per_second=tokens_of_all / seconds, gib=peak_memory(processes.device),
            **means_of([self.batches.metrics, *metrics], processes),
        )  # fmt: skip
        if self._counts_loads:
            values["max_expert_load"] = self._max_expert_load.item()
        if processes.is_main:
            self.reporter.step(progress.step, values)
        if signals:  # a signal to all processes ends those that encode rows, too: then that is no error
            return KeyboardInterrupt()
        return next(error for error in processes.gather(next_error) if error is not None) if errors else None

    def _backward(self, batches: list[Batch], count: Tensor) -> tuple[Tensor, list[Metrics]]:
        """The forwards and backwards of a step, and the optimizer's. Returns the loss and the metrics of each batch."""
        loss, metrics = torch.zeros((), device=self.processes.device), []
        for batch in batches:
            if self.options.capture:  # the last call also takes the optimizer's step
                loss += self._replay(batch, count, len(batches))
            else:
                batch_loss, batch_metrics = self.recipe.loss(self.model, batch, count)
                batch_loss.backward()
                loss += batch_loss.detach()
                metrics.append(batch_metrics)
        if not self.options.capture:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self._counts_loads:
            self._max_expert_load = update_router_biases(self.model, self.options.router_bias_rate)
        return loss, metrics

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
            batch_loss, batch_metrics = recipe.loss(self.model, on_device(batch, self.processes.device), count)
            loss += batch_loss.item()  # over all ranks
            metrics.append(batch_metrics)
        self.model.train()
        if not math.isfinite(loss):
            raise TrainingError(f"the evaluation after step {progress.step} has loss {loss}; it was not saved")
        progress.evaluated = progress.step
        progress.worse += 1
        if better := loss < progress.best:
            progress.best, progress.best_step, progress.worse = loss, progress.step, 0
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
        if self.options.chat_template is not None or "tokenizer" in self.options.objects:
            self.processes.from_main(lambda: self.recipe.tokenizer.save_pretrained(target))

    def run(self) -> Result:
        """Trains to the end of the run.

        Raises TrainingError if the loss is not finite, CheckpointError if a checkpoint cannot be written, the errors of
        the data, and after a signal KeyboardInterrupt, once the step is finished and saved.
        """
        if not self.setup():
            return Result(None, [])
        options, progress = self.options, self.progress
        with self.signals:
            while True:
                if self._is_due(options.eval_steps) and progress.evaluated < progress.step and self.evaluation:
                    self.evaluate()
                if progress.step >= progress.steps or self._stops_early():
                    break
                stop = self.train_step()
                if stop is not None:
                    self._stop(stop)
                if self._is_due(options.save_steps):
                    self.save(wait=False)
            self.save(wait=True)
        return self._finish()

    def _is_due(self, every: int) -> bool:
        step = self.progress.step
        return step in (0, self.progress.steps) or (every > 0 and step % every == 0)

    def _stops_early(self) -> bool:
        """Whether the last evaluations were not better than the one before them, by --early-stopping-patience."""
        patience, progress = self.options.early_stopping_patience, self.progress
        if patience is None or progress.worse < patience or not progress.step:
            return False
        if self.processes.is_main:
            best = f"; {self.out / 'best'} has it" if progress.best_step > 0 else ", before the first step"
            say(
                f"stopped early after step {progress.step} of {progress.steps}: {progress.worse} evaluations in a row "
                f"were no better than that after step {progress.best_step}{best}"
            )
        return True

    def _stop(self, error: BaseException) -> NoReturn:
        """Saves the steps so far, and raises the error, which says how to continue."""
        progress = self.progress
        if progress.step:
            self.save(wait=True)
            if self.processes.is_main:
                skip_bad = isinstance(error, BadRowError)
                command = report.resume_command(self.options, self.processes.size, skip_bad=skip_bad)
                error.add_note(
                    f"stopped after step {progress.step} of {progress.steps}, which is saved. To continue:\n  {command}"
                )
        raise error

    def _finish(self) -> Result:
        """Writes the result and its card."""
        result = self.out / self.recipe.result
        self._save_model(result)
        if self.options.merge:
            result = self.out / "model"
            self._save_model(result, merged=True)
        if self.processes.is_main:
            facts = self.plan | report.results(self.progress, self.data.train.counts.numbers)
            lines, name = self.reporter.lines(), self.options.run_name or self.out.resolve().name
            has_picture = curves.draw(lines, name, [folder / card.PICTURE for folder in (self.out, result)])
            if not has_picture:
                say(f"no {card.PICTURE}, which needs matplotlib: pip install 'ligermodels[train]'")
            card.write_card(self.options, facts, result, self.source, lines, has_picture)
        lines = self.processes.from_main(lambda: self.reporter.lines())
        if self.processes.is_main:
            say(report.next_steps(self.options, result, self.model, was_tied=self.was_tied))
            if self.repository:  # the last of all: no process waits for it
                upload.upload(result, self.repository, self.options.recipe)
        return Result(result, lines)


class _ModelWithLoss(nn.Module):
    """The model with the loss of the recipe, as `CapturedStep` calls it."""

    def __init__(self, model: nn.Module, recipe: Recipe):
        super().__init__()
        self.model, self.recipe = model, recipe

    def forward(self, num_items_in_batch: Tensor, **batch: Any) -> Any:
        return self.recipe.loss(self.model, batch, num_items_in_batch)[0]
