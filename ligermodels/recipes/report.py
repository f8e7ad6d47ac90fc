"""Reports of a run: progress on stderr, metrics.jsonl, TensorBoard or Weights & Biases, loss.png, report.md and a card.

metrics.jsonl has a line for each step and for each evaluation; a run that is resumed goes on behind the step that it is
resumed from.
"""

import json
import math
import re
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ligermodels.checkpoint.files import write_errors
from ligermodels.errors import InputError
from ligermodels.recipes.options import TrainOptions

_SECONDS = 5.0
"""Between lines of progress where stderr is no terminal."""


class Reporter:
    """Writes what the steps were. Only rank 0 has one that does; that of the others is `Silent`."""

    def __init__(
        self, options: TrainOptions, steps: int, resumed: int = 0, evaluated: int = -1, *, on_gpu: bool = False
    ):
        """resumed, evaluated: the steps after which the run goes on, and after which it was evaluated last. on_gpu: the
        peak memory is that of tensors on the GPU, and else that of the process."""
        self.out, self.steps, self._first = Path(options.output_dir), steps, resumed
        self._start, self._shown, self.gib = time.perf_counter(), 0.0, 0.0
        self.memory = "tensors" if on_gpu else "process"
        self._bar: Any = None
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
        self._loggers = _loggers(options, resumed)

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            say(text)

    def step(self, step: int, **values: float) -> None:
        self._write({"step": step, **values})
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
        """values: means beside the loss, which is then no cross entropy, of which the perplexity would be told."""
        told = {f"eval_{name}": value for name, value in values.items()} or {"perplexity": math.exp(min(loss, 700.0))}
        self._write({"step": step, "eval_loss": loss, **told})
        best = ", the best so far" if better and step > 0 else ""
        more = _rewards(values) if values else f", perplexity {told['perplexity']:,.2f}"
        self.say(f"evaluation after step {step}: loss {loss:.4f}{more}{best}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._file.close()
        for logger in self._loggers:
            logger.close()

    def _write(self, line: dict[str, float]) -> None:
        with write_errors(self.out / "metrics.jsonl"):
            self._file.write(json.dumps(line) + "\n")
        for logger in self._loggers:
            logger.log(line)


class Silent(Reporter):
    """That of ranks other than 0."""

    def __init__(self) -> None:
        pass

    def say(self, text: str) -> None: ...
    def step(self, step: int, **values: float) -> None: ...
    def evaluation(self, step: int, loss: float, *, better: bool, **values: float) -> None: ...
    def close(self) -> None: ...


class _TensorBoard:
    def __init__(self, folder: Path, resumed: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resumed + 1 if resumed else None)  # type: ignore[no-untyped-call]

    def log(self, line: Mapping[str, float]) -> None:
        for name, value in line.items():
            if name != "step":
                self._writer.add_scalar(name, value, int(line["step"]))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._writer.close()  # type: ignore[no-untyped-call]


class _WandB:
    def __init__(self, options: TrainOptions):
        import wandb

        folder = Path(options.output_dir).resolve()
        self._run = wandb.init(dir=str(folder), name=folder.name, config=vars(options), resume="allow")

    def log(self, line: Mapping[str, float]) -> None:
        self._run.log({name: value for name, value in line.items() if name != "step"}, step=int(line["step"]))

    def close(self) -> None:
        self._run.finish()


def check_logger(logger: str) -> None:
    """Raises InputError where the asked logger is not installed."""
    packages = {"tensorboard": "tensorboard", "wandb": "wandb"}
    if logger in packages:
        try:
            __import__(packages[logger])
        except ImportError:
            how = "ligermodels[train]" if logger == "tensorboard" else logger
            raise InputError(
                f"--report-to {logger} needs a package that is not installed: pip install '{how}'"
            ) from None


def _loggers(options: TrainOptions, resumed: int) -> list[Any]:
    check_logger(options.report_to)
    if options.report_to == "wandb":
        return [_WandB(options)]
    if options.report_to == "none":
        return []
    try:
        return [_TensorBoard(Path(options.output_dir) / "tensorboard", resumed)]
    except ImportError:
        return []


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _rewards(values: Mapping[str, float]) -> str:
    """Where there are any."""
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


# At the end

_STEPS = {
    "loss": "loss", "reward": "reward", "reward_std": "reward std", "reward_margin": "margin",
    "reward_accuracy": "accuracy", "tied": "tied groups",
    "completion_length": "tokens",
    "truncated": "truncated", "kl": "kl", "clipped": "clipped", "entropy": "entropy",
}  # fmt: skip
"""Columns of report.md, where there are such values."""
_EVALUATED = {
    "eval_reward": "reward",
    "eval_completion_length": "tokens",
    "eval_reward_margin": "margin",
    "eval_reward_accuracy": "accuracy",
    "eval_kl": "kl",
}


_PANELS = (
    ({"reward": "training", "eval_reward": "evaluation"}, "reward"),
    ({"loss": "training", "eval_loss": "evaluation"}, "loss"),
    (
        {
            "reward_chosen": "chosen",
            "reward_rejected": "rejected",
            "reward_margin": "margin",
            "eval_reward_margin": "margin, evaluation",
        },
        "rewards",
    ),
    ({"reward_accuracy": "training", "eval_reward_accuracy": "evaluation"}, "accuracy"),
)
"""Of loss.png, from the top: the curves, metric -> label, and the y axis. One without values is left out."""


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
    panels = [(curves, title) for curves, title in _PANELS if found & curves.keys()]
    if "reward" in found:
        panels = [panel for panel in panels if panel[1] != "loss"]  # that of a policy tells little
    figure, all_axes = pyplot.subplots(
        len(panels), figsize=(9, 1.5 + 3 * len(panels)), sharex=True, squeeze=False, layout="constrained"
    )
    for axes, (curves, title) in zip(all_axes[:, 0], panels, strict=True):
        for name, label in curves.items():
            points = [(line["step"], line[name]) for line in lines if name in line]
            if points:
                axes.plot(*zip(*points, strict=True), "o-" if name.startswith("eval_") else "-", label=label)
        axes.set(ylabel=title)
        axes.grid(alpha=0.3)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        axes.xaxis.get_major_locator().set_params(integer=True)
    all_axes[-1, 0].set(xlabel="step")
    with write_errors(out / "loss.png"):
        figure.savefig(out / "loss.png", dpi=150)
    pyplot.close(figure)
    return True


def write_report(out: Path, options: TrainOptions, facts: Mapping[str, str], use: str, *, plot: bool) -> None:
    """report.md: what was run, what came out, and how to use it."""
    lines = _lines(out / "metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "eval_loss" in line]
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    text = f"# {options.recipe} of {options.model}\n\n| | |\n|---|---|\n{rows}\n\n"
    if steps:
        names = {name: title for name, title in _STEPS.items() if any(name in line for line in steps)}
        text += f"| step | {' | '.join(names.values())} |\n|{'---:|' * (len(names) + 1)}\n"
        picked = sorted({0, len(steps) - 1, *(len(steps) * part // 10 for part in range(10))})
        text += "\n".join(_row(steps[i], names) for i in picked) + "\n\n"
    if evaluations:
        names = {"eval_loss": "evaluation", "perplexity": "perplexity", **_EVALUATED}
        names = {name: title for name, title in names.items() if name in evaluations[-1]}
        text += f"| step | {' | '.join(names.values())} |\n|{'---:|' * (len(names) + 1)}\n"
        text += "\n".join(_row(line, names) for line in evaluations) + "\n\n"
    text += "![The loss by step](loss.png)\n\n" if plot else "For a plot: pip install 'ligermodels[train]'\n\n"
    text += f"{use}\n\n## Options\n\n```yaml\n{options.dump()}```\n"
    with write_errors(out / "report.md"):
        (out / "report.md").write_text(text, "utf-8")


def _row(line: Mapping[str, float], names: Iterable[str]) -> str:
    values = " | ".join(f"{line[name]:,.4f}" if name in line else "" for name in names)
    return f"| {int(line['step'])} | {values} |"


def is_repository(name: str) -> bool:
    """Whether a model or data set that a run read has its name on the Hub; else it is a file or folder."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not Path(name).exists()


def write_card(folder: Path, options: TrainOptions, facts: Mapping[str, str], use: str) -> None:
    """README.md of the tuned model, as the Hub shows it."""
    adapter = folder.name == "adapter"
    head = ""
    if is_repository(options.model):
        head += f"base_model: {options.model}\nbase_model_relation: {'adapter' if adapter else 'finetune'}\n"
    if is_repository(data := options.data.partition(":")[0]):
        head += f"datasets:\n- {data}\n"
    sees = (folder / "preprocessor_config.json").is_file()
    tags = "".join(f"- {tag}\n" for tag in (options.recipe, *["lora"] * bool(options.lora_r), "ligermodels"))
    losses = [line for line in _lines(Path(options.output_dir) / "metrics.jsonl") if "loss" in line]
    results = (
        {"loss": f"{losses[0]['loss']:.4f} in the first step, {losses[-1]['loss']:.4f} in the last"} if losses else {}
    )
    rows = "\n".join(f"| {name} | {value} |" for name, value in {**facts, **results}.items())
    text = (
        f"---\n{head}library_name: {'peft' if adapter else 'transformers'}\n"
        f"pipeline_tag: {'image-text-to-text' if sees else 'text-generation'}\n"
        f"tags:\n{tags}---\n\n"
        f"# {folder.resolve().parent.name}\n\nTrained by `ligermodels train {options.recipe}`.\n\n"
        f"| | |\n|---|---|\n{rows}\n\n{use}\n\n## Options\n\n```yaml\n{options.dump()}```\n"
    )
    with write_errors(folder / "README.md"):
        (folder / "README.md").write_text(text, "utf-8")
