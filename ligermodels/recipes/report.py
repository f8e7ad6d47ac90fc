"""Reports of a run: progress on stderr, metrics.jsonl, TensorBoard or Weights & Biases, report.md and a card.

metrics.jsonl has a line for each step and for each evaluation. A run that is resumed drops the lines after the step
that it is resumed from.
"""

import json
import math
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ligermodels.checkpoint.files import write_errors
from ligermodels.errors import InputError
from ligermodels.recipes.options import TrainOptions

if TYPE_CHECKING:
    from ligermodels.recipes.trainer import Trainer

Line = dict[str, float]
_SECONDS = 5.0
"""Between lines of progress where stderr is no terminal."""
_SHOWN = ("reward", "reward_margin", "reward_accuracy")
"""Metrics in a line of progress, beside the loss."""
_IN_REPORT = (
    "loss", "eval_loss", "perplexity", "reward", "eval_reward", "reward_std", "reward_margin", "eval_reward_margin",
    "reward_accuracy", "eval_reward_accuracy", "tied", "completion_length", "truncated", "kl", "clipped", "entropy",
)  # fmt: skip
"""Metrics in the table of report.md, where there are such."""


class Reporter:
    """Writes the metrics of steps and evaluations. active: False on ranks other than 0, where it writes nothing.

    resumed, evaluated: the steps after which the run continues, and after which it was evaluated last. on_gpu: the peak
    memory is that of tensors on the GPU, and else that of the process.
    """

    def __init__(
        self, options: TrainOptions, steps: int, resumed: int, evaluated: int, *, on_gpu: bool, active: bool = True
    ):
        self.active, self.out, self.steps, self._first = active, Path(options.output_dir), steps, resumed
        self._start, self._shown, self.gib = time.perf_counter(), 0.0, 0.0
        self.memory = "tensors" if on_gpu else "process"
        self._bar: Any = None
        if not active:
            return
        if sys.stderr.isatty():
            self._bar = tqdm(total=steps, initial=resumed, unit="step", dynamic_ncols=True)
        with write_errors(self.out):
            metrics = self.out / "metrics.jsonl"
            kept = [
                json.dumps(line) + "\n"
                for line in _lines(metrics)
                if line["step"] <= (evaluated if "eval_loss" in line else resumed)
            ]
            whole = metrics.with_name("metrics.jsonl.new")  # a kill loses none of the steps before
            whole.write_text("".join(kept), "utf-8")
            whole.replace(metrics)
            self._file = metrics.open("a", encoding="utf-8", buffering=1)
        self._log, self._close_log = _logger(options, resumed)

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        elif self.active:
            say(text)

    def step(self, step: int, **values: float) -> None:
        if not self.active:
            return
        self._write(step, values)
        self.gib = max(self.gib, values["gib"])
        seconds = time.perf_counter() - self._start
        text = (
            f"loss {values['loss']:.4f}, lr {values['lr']:.2e}, {values['tokens_per_second']:,.0f} tokens/s, "
            f"peak {self.gib:.1f} GiB ({self.memory}){_shown(values)}"
        )
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
        elif step == self._first + 1 or step == self.steps or seconds - self._shown >= _SECONDS:
            self._shown = seconds
            left = seconds / (step - self._first) * (self.steps - step)
            say(f"step {step}/{self.steps}: {text}, {tqdm.format_interval(left)} left")

    def evaluation(self, step: int, loss: float, *, better: bool, **values: float) -> None:
        """values: metrics beside the loss. Without any, the loss is a cross entropy, and has a perplexity."""
        if not self.active:
            return
        perplexity = math.exp(min(loss, 700.0))
        metrics = {f"eval_{name}": value for name, value in values.items()} or {"perplexity": perplexity}
        self._write(step, {"eval_loss": loss, **metrics})
        best = ", the best so far" if better and step > 0 else ""
        more = _shown(values) if values else f", perplexity {perplexity:,.2f}"
        self.say(f"evaluation after step {step}: loss {loss:.4f}{more}{best}")

    def finish(self, trainer: "Trainer", saved: Path) -> None:
        """Writes report.md, and README.md beside what was trained, in the folder `saved`."""
        self.close()
        o, progress = trainer.options, trainer.progress
        counts = trainer.data.train.counts.report()
        facts = {
            **trainer.plan,
            "steps taken": f"{progress.step:,} of {progress.steps:,}",
            "tokens seen": f"{progress.tokens:,}, of which {progress.trained:,} were trained{left_out(counts)}",
            "time": f"{tqdm.format_interval(progress.seconds)} in steps",
            "speed": f"{progress.tokens / max(progress.seconds, 1e-9):,.0f} tokens/s",
            "peak memory": f"{self.gib:.2f} GiB ({self.memory})",
        }
        if progress.best_step >= 0:
            facts["best evaluation"] = f"{progress.best:.4f}, after step {progress.best_step}"
        lines = _lines(self.out / "metrics.jsonl")
        table = "| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in facts.items())
        end = f"{_usage(o, saved)}\n\n## Options\n\n```yaml\n{o.dump()}```\n"
        _write_text(self.out / "report.md", f"# {o.recipe} of {o.model}\n\n{table}\n{_metrics(lines)}{end}")
        _write_text(saved / "README.md", f"{card(o, saved)}\n{table}\n{_metrics(lines)}{end}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        if self.active and not self._file.closed:
            self._file.close()
            self._close_log()

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        with write_errors(self.out / "metrics.jsonl"):
            self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._log(step, values)


def check_logger(logger: str) -> None:
    """Raises InputError where the logger that was asked for is not installed."""
    if logger in ("tensorboard", "wandb"):
        try:
            __import__(logger)
        except ImportError:
            how = "ligermodels[train]" if logger == "tensorboard" else logger
            raise InputError(
                f"--report-to {logger} needs a package that is not installed: pip install '{how}'"
            ) from None


def _logger(
    options: TrainOptions, resumed: int
) -> tuple[Callable[[int, Mapping[str, float]], None], Callable[[], None]]:
    """log(step, values) and close() of TensorBoard or Weights & Biases, or of neither."""
    folder = Path(options.output_dir).resolve()
    if options.report_to == "wandb":
        import wandb

        run = wandb.init(dir=str(folder), name=folder.name, config=vars(options), resume="allow")
        return lambda step, values: run.log(dict(values), step=step), run.finish
    try:
        if options.report_to == "none":
            raise ImportError
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return lambda step, values: None, lambda: None
    writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed + 1 if resumed else None)  # type: ignore[no-untyped-call]

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def left_out(counts: Mapping[str, int]) -> str:
    """The rows that were cut or left out, of the counts of `Counts.report`."""
    names = {
        "truncated": "rows cut at --max-length",
        "untrained": "rows left out without a token to train",
        "cut_away": "rows left out whose trained tokens come after --max-length",
        "bad": "rows skipped that cannot be read",
    }
    return "".join(f"; {counts[name]:,} {text}" for name, text in names.items() if counts[name])


def _shown(values: Mapping[str, float]) -> str:
    return "".join(f", {name.replace('_', ' ')} {values[name]:.3f}" for name in _SHOWN if name in values)


def _lines(file: Path) -> list[Line]:
    """The whole lines of a metrics.jsonl; a kill may have cut the last."""
    found = []
    for line in file.read_text("utf-8").splitlines() if file.is_file() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


# ---- at the end of a run ----


def _metrics(lines: list[Line]) -> str:
    """A table of the metrics of some steps and of all evaluations, with a column for each that there is."""
    steps = [line for line in lines if "loss" in line]
    some = {line["step"] for line in steps[:: max(1, len(steps) // 10)] + steps[-1:]}
    chosen = [line for line in lines if "eval_loss" in line or line["step"] in some]
    names = [name for name in _IN_REPORT if any(name in line for line in chosen)]
    text = f"| step | {' | '.join(name.replace('_', ' ') for name in names)} |\n|{'---:|' * (len(names) + 1)}\n"
    for line in chosen:
        values = " | ".join(f"{line[name]:,.4f}" if name in line else "" for name in names)
        text += f"| {int(line['step'])} | {values} |\n"
    return text + "\n"


def _usage(options: TrainOptions, saved: Path) -> str:
    """How to use what was trained."""
    base, folder = options.model, str(saved)
    if saved.name == "model":
        command = f"ligermodels {'generate' if options.recipe == 'pretrain' else 'chat'} {shlex.quote(folder)}"
        return f"To use it:\n\n    {command}\n\nor `ligermodels.load({folder!r})`; it opens in transformers too."
    kind = "adapter" if saved.name == "adapter" else "medusa"
    return (
        f"The folder has {'an adapter, as PEFT writes it' if kind == 'adapter' else 'Medusa heads'}, of {base}. To use "
        f"it:\n\n    model = ligermodels.load({base!r})\n    ligermodels.training.load_{kind}(model, {folder!r})"
    )


def card(options: TrainOptions, folder: Path) -> str:
    """The beginning of README.md in the folder of what was trained, as the Hub shows it."""
    adapter = folder.name == "adapter"
    head = ""
    if _is_repository(options.model):
        head += f"base_model: {options.model}\nbase_model_relation: {'adapter' if adapter else 'finetune'}\n"
    if sets := [name for source in options.data if _is_repository(name := re.split(r"[:*]", source)[0])]:
        head += "datasets:\n" + "".join(f"- {name}\n" for name in sets)
    sees = (folder / "preprocessor_config.json").is_file()
    tags = "".join(f"- {tag}\n" for tag in (options.recipe, *["lora"] * bool(options.lora_r), "ligermodels"))
    return (
        f"---\n{head}library_name: {'peft' if adapter else 'transformers'}\n"
        f"pipeline_tag: {'image-text-to-text' if sees else 'text-generation'}\n"
        f"tags:\n{tags}---\n\n"
        f"# {folder.resolve().parent.name}\n\nTrained by `ligermodels train {options.recipe}`.\n"
    )


def _is_repository(name: str) -> bool:
    """Whether a model or data set that a run read has its name on the Hub; else it is a file or folder."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not Path(name).exists()


def _write_text(file: Path, text: str) -> None:
    with write_errors(file):
        file.write_text(text, "utf-8")
