"""Reports of a run: progress on stderr, metrics.jsonl, TensorBoard or Weights & Biases, loss.png, report.md and a card.

metrics.jsonl has a line for each step and for each evaluation. A run that is resumed drops the lines after the step
that it is resumed from.
"""

import json
import math
import re
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligermodels.checkpoint.files import write_errors
from ligermodels.errors import InputError
from ligermodels.recipes.options import TrainOptions

if TYPE_CHECKING:
    from ligermodels.recipes.trainer import Trainer

_SECONDS = 5.0
"""Between lines of progress where stderr is no terminal."""
_COLUMNS = {
    "loss": "loss", "reward": "reward", "reward_std": "reward std", "reward_margin": "margin",
    "reward_accuracy": "accuracy", "tied": "tied groups", "completion_length": "tokens", "truncated": "truncated",
    "kl": "kl", "clipped": "clipped", "entropy": "entropy",
}  # fmt: skip
"""Columns of the table of steps in report.md, for metrics that there are."""
_EVALUATED = {"eval_loss": "evaluation", "perplexity": "perplexity"}
_EVALUATED |= {f"eval_{name}": title for name, title in _COLUMNS.items() if name != "loss"}
_PANELS = {
    "reward": {"reward": "training", "eval_reward": "evaluation"},
    "loss": {"loss": "training", "eval_loss": "evaluation"},
    "rewards": {"reward_chosen": "chosen", "reward_rejected": "rejected", "reward_margin": "margin",
                "eval_reward_margin": "margin, evaluation"},
    "accuracy": {"reward_accuracy": "training", "eval_reward_accuracy": "evaluation"},
}  # fmt: skip
"""The panels of loss.png, from the top: metrics and their labels. Panels without values are left out."""


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
            from tqdm import tqdm

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
        left = seconds / (step - self._first) * (self.steps - step)
        text = (
            f"loss {values['loss']:.4f}, lr {values['lr']:.2e}, {values['tokens_per_second']:,.0f} tokens/s, "
            f"peak {self.gib:.1f} GiB ({self.memory}){_rewards(values)}"
        )
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
        elif step == self._first + 1 or step == self.steps or seconds - self._shown >= _SECONDS:
            self._shown = seconds
            say(f"step {step}/{self.steps}: {text}, {clock(left)} left")

    def evaluation(self, step: int, loss: float, *, better: bool, **values: float) -> None:
        """values: metrics beside the loss. Without any, the loss is a cross entropy, and has a perplexity."""
        if not self.active:
            return
        perplexity = math.exp(min(loss, 700.0))
        metrics = {f"eval_{name}": value for name, value in values.items()} or {"perplexity": perplexity}
        self._write(step, {"eval_loss": loss, **metrics})
        best = ", the best so far" if better and step > 0 else ""
        more = _rewards(values) if values else f", perplexity {perplexity:,.2f}"
        self.say(f"evaluation after step {step}: loss {loss:.4f}{more}{best}")

    def finish(self, trainer: "Trainer", saved: Path, exported: Path | None) -> None:
        """Writes plot, report and model card. saved: the folder of what was trained."""
        self.close()
        o, progress = trainer.options, trainer.progress
        facts = dict(trainer.plan)
        facts["steps taken"] = f"{progress.step:,} of {progress.steps:,}"
        counts = trainer.data.train.counts.report()
        facts["tokens seen"] = f"{progress.tokens:,}, of which {progress.trained:,} were trained{left_out(counts)}"
        facts["time"] = f"{clock(progress.seconds)} in steps"
        facts["speed"] = f"{progress.tokens / max(progress.seconds, 1e-9):,.0f} tokens/s"
        facts["peak memory"] = f"{self.gib:.2f} GiB ({self.memory})"
        if progress.best_step >= 0:
            facts["best evaluation"] = f"{progress.best:.4f}, after step {progress.best_step}"
        use = trainer.recipe.usage(saved) or _usage(o, saved)
        if exported is not None:
            use += f"\n\nllama.cpp runs `{exported}`."
        end = f"{use}\n\n## Options\n\n```yaml\n{o.dump()}```\n"
        lines = _lines(self.out / "metrics.jsonl")
        _write_text(self.out / "report.md", _report(o, facts, lines, write_plot(self.out)) + end)
        _write_text(saved / "README.md", card(o, facts, lines, saved) + end)

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


def _usage(options: TrainOptions, saved: Path) -> str:
    """How to use a model or an adapter."""
    verb = "chat" if options.recipe != "pretrain" else "generate"
    command = f"ligermodels {verb} {shlex.quote(str(saved))}" + " --prompt '...'" * (verb == "generate")
    if saved.name == "adapter":
        return (
            f"The folder has adapters of {options.model}, as PEFT writes them. To use them:\n\n    {command}\n\nor"
            f"\n\n    model = ligermodels.load({options.model!r})\n"
            f"    ligermodels.training.load_adapter(model, {str(saved)!r})"
        )
    return f"To use it:\n\n    {command}\n\nor `ligermodels.load({str(saved)!r})`; it opens in transformers too."


def _rewards(values: Mapping[str, float]) -> str:
    """The rewards among the values, for a line of progress."""
    names = {"reward": "reward", "reward_margin": "margin", "reward_accuracy": "accuracy"}
    return "".join(f", {text} {values[name]:.3f}" for name, text in names.items() if name in values)


def clock(seconds: float) -> str:
    """A time as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _lines(file: Path) -> list[dict[str, float]]:
    """The whole lines of a metrics.jsonl; a kill may have cut the last."""
    found = []
    for line in file.read_text("utf-8").splitlines() if file.is_file() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def write_plot(out: Path) -> bool:
    """loss.png of metrics.jsonl. Returns False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("agg")
    from matplotlib import pyplot

    lines = _lines(out / "metrics.jsonl")
    found = {name for line in lines for name in line}
    panels = {title: curves for title, curves in _PANELS.items() if found & curves.keys()}
    if "reward" in found:
        panels.pop("loss")  # the loss of a policy says little
    size = 9, 1.5 + 3 * len(panels)
    figure, axes = pyplot.subplots(len(panels), figsize=size, sharex=True, squeeze=False, layout="constrained")
    for panel, (title, curves) in zip(axes[:, 0], panels.items(), strict=True):
        for name, label in curves.items():
            points = [(line["step"], line[name]) for line in lines if name in line]
            if points:
                panel.plot(*zip(*points, strict=True), "o-" if name.startswith("eval_") else "-", label=label)
        panel.set(ylabel=title)
        panel.grid(alpha=0.3)
        panel.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        panel.xaxis.get_major_locator().set_params(integer=True)
    axes[-1, 0].set(xlabel="step")
    with write_errors(out / "loss.png"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fonts
        figure.savefig(out / "loss.png", dpi=150)
    pyplot.close(figure)
    return True


def _report(options: TrainOptions, facts: Mapping[str, str], lines: list[dict[str, float]], plot: bool) -> str:
    """The beginning of report.md: what was run, and what came out."""
    steps = [line for line in lines if "loss" in line]
    some = sorted({0, len(steps) - 1, *(len(steps) * part // 10 for part in range(10))}) if steps else []
    text = f"# {options.recipe} of {options.model}\n\n{_facts(facts)}\n"
    text += _table([steps[n] for n in some], _COLUMNS)
    text += _table([line for line in lines if "eval_loss" in line], _EVALUATED)
    return text + ("![The loss by step](loss.png)\n\n" if plot else "For a plot: pip install 'ligermodels[train]'\n\n")


def _table(lines: list[dict[str, float]], titles: Mapping[str, str]) -> str:
    """A table of metrics by step, with a column for each metric that there is."""
    names = [name for name in titles if any(name in line for line in lines)]
    if not names:
        return ""
    text = f"| step | {' | '.join(titles[name] for name in names)} |\n|{'---:|' * (len(names) + 1)}\n"
    for line in lines:
        values = " | ".join(f"{line[name]:,.4f}" if name in line else "" for name in names)
        text += f"| {int(line['step'])} | {values} |\n"
    return text + "\n"


def _facts(facts: Mapping[str, str]) -> str:
    return "| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in facts.items())


def is_repository(name: str) -> bool:
    """Whether a model or data set that a run read has its name on the Hub; else it is a file or folder."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not Path(name).exists()


def card(options: TrainOptions, facts: Mapping[str, str], lines: list[dict[str, float]], folder: Path) -> str:
    """The beginning of README.md in the folder of what was trained, as the Hub shows it."""
    adapter = folder.name == "adapter"
    head = ""
    if is_repository(options.model):
        head += f"base_model: {options.model}\nbase_model_relation: {'adapter' if adapter else 'finetune'}\n"
    if sets := [name for source in options.data if is_repository(name := re.split(r"[:*]", source)[0])]:
        head += "datasets:\n" + "".join(f"- {name}\n" for name in sets)
    sees = (folder / "preprocessor_config.json").is_file()
    tags = "".join(f"- {tag}\n" for tag in (options.recipe, *["lora"] * bool(options.lora_r), "ligermodels"))
    if losses := [line["loss"] for line in lines if "loss" in line]:
        facts = {**facts, "loss": f"{losses[0]:.4f} in the first step, {losses[-1]:.4f} in the last"}
    return (
        f"---\n{head}library_name: {'peft' if adapter else 'transformers'}\n"
        f"pipeline_tag: {'image-text-to-text' if sees else 'text-generation'}\n"
        f"tags:\n{tags}---\n\n"
        f"# {folder.resolve().parent.name}\n\nTrained by `ligermodels train {options.recipe}`.\n\n{_facts(facts)}\n"
    )


def _write_text(file: Path, text: str) -> None:
    with write_errors(file):
        file.write_text(text, "utf-8")
