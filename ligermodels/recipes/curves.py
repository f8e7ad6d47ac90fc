"""The picture of a run: curves of its metrics over the steps, drawn by matplotlib."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ligermodels.checkpoint.files import write_errors

PANELS = {
    "loss": r"(eval_)?loss",
    "learning rate": r"lr",
    "reward": r"(eval_)?reward(?!_std|_chosen|_rejected|_margin|_accuracy)\w*",
    "rewards of answers": r"(eval_)?reward_(chosen|rejected)",
    "reward margin": r"(eval_)?reward_margin",
    "accuracy": r"(eval_)?(reward_accuracy|accuracy_\d+)",
    "KL": r"(eval_)?kl",
    "divergence": r"eval_divergence",
    "tokens of completions": r"(eval_)?completion_length",
}
"""The title of each panel, and which metrics it has; those without a metric are left out."""
_SMOOTHED = 60
"""Steps from which a curve is pale, under its mean over neighbours."""


def curves_of(lines: Sequence[Mapping[str, float]]) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """{title: {metric: (steps, values)}} of the lines of metrics.jsonl, in the order of `PANELS`."""
    names = dict.fromkeys(name for line in lines for name in line)
    ordered = sorted(names, key=lambda name: name.startswith("eval_"))
    panels = {title: [name for name in ordered if re.fullmatch(pattern, name)] for title, pattern in PANELS.items()}
    return {title: {name: _points(lines, name) for name in metrics} for title, metrics in panels.items() if metrics}


def draw(lines: Sequence[Mapping[str, float]], title: str, files: Sequence[Path]) -> bool:
    """Writes the picture of the lines of metrics.jsonl. Returns False, and writes nothing, without matplotlib.

    Raises HubError where a file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return False
    panels = curves_of(lines)
    columns = min(2, len(panels))
    rows = -(-len(panels) // max(1, columns))
    figure = Figure(figsize=(5.4 * columns, 3.1 * rows), layout="constrained", dpi=110)
    figure.suptitle(title, fontsize=11)
    for number, (name, curves) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, columns, number)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5))
        if name == "learning rate":
            axes.set_ylim(0, 1.08 * max(curves["lr"][1]))
        bases = list(dict.fromkeys(metric.removeprefix("eval_") for metric in curves))
        for metric, (steps, values) in curves.items():
            is_evaluation, label = metric.startswith("eval_"), metric.replace("_", " ")
            # An evaluation has the colour of its metric, or where there is one metric alone a colour of its own.
            color = f"C{bases.index(metric.removeprefix('eval_')) if len(bases) > 1 else int(is_evaluation)}"
            style: dict[str, Any] = {"linewidth": 1.3}
            if is_evaluation:
                style = {"marker": "o", "markersize": 4, "linestyle": "--"}
            if len(steps) == 1:
                style["marker"] = "o"
            if len(steps) > _SMOOTHED and metric != "lr":
                axes.plot(steps, values, color=color, alpha=0.3)
                values = smoothed(values)
            axes.plot(steps, values, color=color, label=label, **style)
        if len(curves) > 1:
            axes.legend(fontsize=8)
    for file in files:
        with write_errors(file):
            figure.savefig(file, format="png")
    return True


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and its neighbours, a twentieth of all: fewer at both ends, as many on each side."""
    reach, means = max(1, len(values) // 40), []
    for n in range(len(values)):
        side = min(reach, n, len(values) - 1 - n)
        near = values[n - side : n + side + 1]
        means.append(sum(near) / len(near))
    return means


def _points(lines: Sequence[Mapping[str, float]], name: str) -> tuple[list[float], list[float]]:
    points = [(line["step"], line[name]) for line in lines if name in line]
    return [step for step, _ in points], [value for _, value in points]
