"""Reports of a run: progress on stderr, metrics.jsonl, TensorBoard or Weights & Biases, and what comes next.

metrics.jsonl has a line for each step and for each evaluation. A run that is resumed drops the lines after the step
that it is resumed from.
"""

import json
import math
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ligermodels.arch import ARCHS
from ligermodels.checkpoint.files import write_errors
from ligermodels.checkpoint.saving import replacing
from ligermodels.processes import Processes
from ligermodels.recipes.data.batches import Data
from ligermodels.recipes.memory import Sizes, available, estimate, fits, gib
from ligermodels.recipes.notebook import Notebook, is_notebook
from ligermodels.recipes.options import IN_MEMORY, TrainOptions, fields_of

_SECONDS = 5.0
"""Minimum time between lines of progress."""
_SHOWN = ("reward", "reward_margin", "reward_accuracy")
"""Metrics that a line of progress has beside the loss."""


def say(text: str) -> None:
    """Prints a message, in one write: on stderr, which a notebook would paint as an error; there on stdout."""
    print(f"{text}\n", end="", file=sys.stdout if is_notebook() else sys.stderr, flush=True)


class Reporter:
    """Writes the metrics of steps and evaluations, on rank 0.

    resumed: the step after which the run continues. evaluated: the step of the last evaluation. device: of the run.
    """

    def __init__(self, options: TrainOptions, steps: int, resumed: int, evaluated: int, device: torch.device):
        self.steps, self._first = steps, resumed
        self._peak = "peak" if device.type == "cuda" else "peak of the process"
        self.file = Path(options.output_dir) / "metrics.jsonl"
        self._start, self._shown = time.perf_counter(), 0.0
        lines = [line for line in self.lines() if line["step"] <= (evaluated if "eval_loss" in line else resumed)]
        with write_errors(self.file), replacing(self.file, 0, is_file=True) as new:  # a kill loses no earlier step
            (new / self.file.name).write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        self._log = _logger(options, resumed)
        self._notebook = Notebook(steps, lines) if is_notebook() else None

    def close(self) -> None:
        self._log(None, {})
        if self._notebook is not None:
            self._notebook.close()

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._write(step, values)
        seconds = time.perf_counter() - self._start
        if self._notebook is not None:
            self._notebook.show(step, values, self._line(step, values, seconds))
        elif step in (self._first + 1, self.steps) or seconds - self._shown >= _SECONDS:
            self._shown = seconds
            say(self._line(step, values, seconds))

    def _line(self, step: int, values: Mapping[str, float], seconds: float) -> str:
        """A line of progress. seconds: since the run began, or was resumed."""
        remaining = round(seconds / (step - self._first) * (self.steps - step))
        return (
            f"step {step}/{self.steps}: loss {values['loss']:.4f}, lr {values['lr']:.2e}, "
            f"{values['tokens_per_second']:,.0f} tokens/s, {self._peak} {values['gib']:.1f} GiB{_shown(values)}, "
            f"{remaining // 60}:{remaining % 60:02} left"
        )

    def evaluation(
        self, step: int, loss: float, values: Mapping[str, float], *, better: bool, is_cross_entropy: bool
    ) -> None:
        """values: metrics beside the loss. A loss that is a cross entropy has a perplexity, too."""
        metrics, more = {f"eval_{name}": value for name, value in values.items()}, _shown(values)
        if is_cross_entropy:
            metrics["perplexity"] = math.exp(min(loss, 700.0))
            more += f", perplexity {metrics['perplexity']:,.2f}"
        self._write(step, {"eval_loss": loss, **metrics})
        if self._notebook is not None:
            self._notebook.show(step, {"eval_loss": loss})
        say(f"evaluation after step {step}: loss {loss:.4f}{more}{', the best so far' * (better and step > 0)}")

    def lines(self) -> list[dict[str, float]]:
        """The lines of metrics.jsonl, without those that are none of ours; a kill may have cut the last."""
        if not self.file.is_file():
            return []
        parsed = map(_parsed, self.file.read_text("utf-8", "replace").splitlines())
        return [values for values in parsed if values is not None]

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        with write_errors(self.file), self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        self._log(step, values)


def _parsed(line: str) -> dict[str, float] | None:
    """The values of a line of metrics.jsonl; None where it is not an object of numbers with a step."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or "step" not in values:
        return None
    return values if all(isinstance(value, int | float) for value in values.values()) else None


def _shown(values: Mapping[str, float]) -> str:
    return "".join(f", {name.replace('_', ' ')} {values[name]:.3f}" for name in _SHOWN if name in values)


# ---- before the run ----


def _logger(options: TrainOptions, resumed: int) -> Any:
    """A function log(step, values) that writes to TensorBoard, Weights & Biases or nothing; step None closes it."""
    folder = Path(options.output_dir).resolve()
    if options.report_to == "wandb":
        return _wandb_logger(options, folder)
    if options.report_to == "none":
        return lambda step, values: None
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed + 1 if resumed else None)  # type: ignore[no-untyped-call]
    return lambda step, values: (
        writer.close() if step is None else [writer.add_scalar(*x, step) for x in values.items()]
    )


def _wandb_logger(options: TrainOptions, folder: Path) -> Any:
    """A run that is resumed goes on in the same run of W&B, whose id is in DIR/wandb-run-id.

    Values are drawn over our own step: W&B's own only grows, and a run that was killed takes some of its steps again.
    """
    import wandb

    file = folder / "wandb-run-id"
    before = file.read_text("utf-8").strip() if options.resume and file.is_file() else None
    config = {name: getattr(options, name) for name in fields_of(options)}
    run = wandb.init(
        dir=str(folder), name=options.run_name or folder.name, id=before, resume="allow", config=config,
        allow_val_change=True,
    )  # fmt: skip
    with write_errors(file):
        file.write_text(run.id, "utf-8")
    run.define_metric("*", step_metric="step")
    return lambda step, values: run.finish() if step is None else run.log({"step": step, **values})


def make_plan(
    options: Any, processes: Processes, name: str, sizes: Sizes, data: Data, counts: Mapping[str, int] | None,
    steps: int,
) -> dict[str, str]:  # fmt: skip
    """The plan of a run, as lines by name. name: the class of the model. counts: of a pass over the data, or None."""
    need, free = estimate(sizes, options, processes), available(processes.device)
    on_gpu = processes.device.type == "cuda"
    format, share = f" of {data.format[0]}" if data.format else "", sizes.trained / sizes.parameters
    trained = f"{sizes.trained:,} parameters ({share:.2%} of the model)" if share < 1 else "all of them"
    if options.lora_r:
        targets = ",".join((*(options.lora_target_modules or ["all projections"]), *options.lora_target_parameters))
        trained = f"LoRA of rank {options.lora_r} on {targets}: {trained}"
    tokens = "not counted, since --max-steps is given"
    if counts is not None:
        tokens = f"{counts['tokens']:,} a pass, {counts['trained']:,} of them trained{left_out(counts)}"
    forwards = f"{options.accumulation} forward pass{'es' * (options.accumulation > 1)}"
    several = f", on {processes.size} processes" * (processes.size > 1)
    memory = ", ".join(f"{name} {gib(size)}" for name, size in need.items() if size)
    memory += f"; {'the GPU has free' if on_gpu else 'the machine has'} {gib(free)}"
    memory += f"; not counted: {', '.join(sizes.not_counted)}" if sizes.not_counted else ""
    plan = {
        "model": f"{options.model}: {name}, {sizes.parameters:,} parameters",
        "trained": trained,
        "data": f"{', '.join(options.data)}: {len(data.rows):,} rows{format}",
        "tokens": tokens,
        "steps": f"{steps:,}, each of {forwards} of up to {options.batch_tokens:,} tokens{several}",
        "precision": f"{options.precision}, activation checkpointing: {options.activations}",
        "memory": f"{gib(sum(need.values()))} (tensors, estimated): {memory}",
    }
    if options.fp8 != "none":
        plan["fp8"] = fp8_line(options, sizes)
    if data.eval_rows is not None:
        plan["evaluation"] = f"{len(data.eval_rows):,} rows"
    if not fits(need, free):
        plan["warning"] = (
            "this does not fit by the estimate. Less memory: --activations block, --precision bf16, a smaller "
            "--max-length or --batch-tokens, --lora-r 16, more GPUs"
        )
    if options.capture:
        graphs = "each step is a CUDA graph" if on_gpu else "no CUDA graphs, which need a GPU"
        plan["capture"] = f"{graphs}; forwards are padded to {options.batch_tokens:,} tokens"
        if counts is not None:
            padding = 1 - counts["tokens"] / (counts["batches"] * options.batch_tokens)
            plan["capture"] += f", of which {padding:.1%} are padding"
    return plan


def fp8_line(options: Any, sizes: Sizes) -> str:
    """What --fp8 computes in FP8."""
    kept = "embedding, head, norms and small gates" + ", routers and experts" * bool(sizes.stacked)
    what = "linear layers of blocks" if not sizes.stacked else "what of the blocks is in no expert, such as attention"
    return f"{options.fp8}: {what}; {kept} stay in 16 bits"


def doubts(options: TrainOptions, steps: int, width: int) -> Iterator[str]:
    """What is allowed, and hardly meant. width: the hidden size of the model."""
    warmup, rank = options.warmup_steps, options.lora_r
    if warmup > steps:
        yield f"--warmup-steps {warmup:g} is more than the run's {steps} steps: it ends below --learning-rate"
    if rank > width:
        yield f"--lora-r {rank} is more than the model's width {width}: the adapters are larger than their weights"


def left_out(counts: Mapping[str, int]) -> str:
    """The rows that were cut or dropped, from the numbers of `Counts`, as text."""
    names = {
        "truncated": "rows cut at --max-length",
        "untrained": "rows dropped without trained tokens",
        "cut_away": "rows dropped that --max-length truncates before the answer",
        "bad": "rows skipped that cannot be read",
    }
    return "".join(f"; {text}: {counts[name]:,}" for name, text in names.items() if counts[name])


# ---- after it ----


def next_steps(options: TrainOptions, saved: Path, trained: Any, *, was_tied: bool) -> str:
    """The commands that a user may type next, for the folder of a result.

    trained: the model with its adapters. was_tied: the base has one table as its head and its embedding.
    """
    model = options.objects.get("model")
    if model is not None and ARCHS.get(model.config.model_type) is not type(model):  # commands do not know its class
        call = (
            "ligermodels.training.load_adapter(model, "
            if saved.name == "adapter"
            else f"{type(model).__name__}.from_hub("
        )
        return f"next, in Python:\n  {call}{str(saved)!r})"
    base, folder = (shlex.quote(text) for text in (options.model.removeprefix(IN_MEMORY), str(saved)))
    if saved.name == "medusa":
        return f"next:\n  ligermodels chat {base} --medusa {folder}"
    merged = saved.parent / "merged"
    lines = [f"ligermodels chat {folder}"]
    if saved.name == "adapter" and _converts(options, trained, was_tied=was_tied):
        lines.append(f"ligermodels convert {base} {shlex.quote(str(merged))} --adapter {folder}")
    elif saved.name == "adapter":
        names = (options.model.removeprefix(IN_MEMORY), str(saved), str(merged))
        load, adapter, target = (json.dumps(name, ensure_ascii=False) for name in names)
        sum_of = f"t.merge_lora(t.load_adapter(load({load}), {adapter})).save_pretrained({target})"
        lines.append(f"python -c {shlex.quote(f'from ligermodels import load, training as t; {sum_of}')}")
    else:
        lines.append(f"ligermodels convert {folder} {shlex.quote(f'{saved.parent}.gguf')}")
    lines.append(f"ligermodels eval {folder} --tasks hellaswag --limit 200")
    return "next:" + "".join(f"\n  {line}" for line in lines)


def _converts(options: TrainOptions, model: Any, *, was_tied: bool) -> bool:
    """Whether `convert` merges the adapter: not DoRA, and not one of a tied head and its embedding alone."""
    changed = [any(x.requires_grad for x in part.parameters()) for part in (model.decoder.embed_tokens, model.lm_head)]
    return not options.use_dora and not (was_tied and sum(changed) == 1)


def resume_command(options: TrainOptions, processes: int, *, skip_bad: bool) -> str:
    """The command that continues a run, or in Python the call. processes: their number."""
    if options.objects or is_notebook():
        return f"the same call of ligermodels.train with resume=True{', skip_bad=True' * skip_bad}"
    torchrun = f"torchrun --nproc-per-node {processes} -m " * (processes > 1)
    file = shlex.quote(str(Path(options.output_dir) / "options.yaml"))
    return f"{torchrun}ligermodels train {options.recipe} --config {file} --resume{' --skip-bad' * skip_bad}"


def results(progress: Any, counts: Mapping[str, int]) -> dict[str, str]:
    """What a run has done, as lines of the card by name. progress: a `trainer.Progress`."""
    facts = {
        "tokens seen": f"{progress.tokens:,}, of which {progress.trained:,} were trained",
        "rows read": f"{counts['rows']:,}, over all epochs{left_out(counts)}",
        "speed": f"{progress.tokens / max(progress.seconds, 1e-9):,.0f} tokens/s in {progress.seconds:,.0f} s",
    }
    if progress.best_step >= 0:
        facts["best evaluation"] = f"{progress.best:.4f}, after step {progress.best_step}"
    return facts
