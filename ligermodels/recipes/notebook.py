"""A run as a notebook shows it: a bar, the newest line of progress and the curve of the loss, in one output.

The output is HTML with an SVG in it, which needs IPython alone: it is drawn in Jupyter, VS Code, Colab and Kaggle, and
stays in the file of the notebook.
"""

import html
import sys
import time
from collections.abc import Mapping, Sequence

_SECONDS = 1.0
"""Minimum time between drawings."""
_POINTS = 300
"""The most points of a curve; of more steps, each point is the mean of several."""
_WIDTH, _HEIGHT, _MARGIN = 640, 200, 46
_COLORS = {"loss": "#1f77b4", "eval_loss": "#d62728"}


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class Notebook:
    """The output of a run of `steps` steps. lines: of metrics.jsonl, of the steps before those of this call."""

    def __init__(self, steps: int, lines: Sequence[Mapping[str, float]]) -> None:
        from IPython.display import HTML, display

        self._html, self.steps, self.text = HTML, steps, ""
        self.curves: dict[str, list[tuple[float, float]]] = {"loss": [], "eval_loss": []}
        for line in lines:
            self._add(line["step"], line)
        self._handle, self._drawn = display(HTML(self.drawing()), display_id=True), 0.0

    def show(self, step: int, values: Mapping[str, float], text: str = "") -> None:
        """Adds the values of a step or an evaluation. text: the newest line of progress, or "" for the one before."""
        self._add(step, values)
        self.text = text or self.text
        if time.monotonic() - self._drawn >= _SECONDS or step == self.steps:
            self._draw()

    def close(self) -> None:
        self._draw()

    def _add(self, step: float, values: Mapping[str, float]) -> None:
        for name, curve in self.curves.items():
            if name in values:
                curve.append((step, values[name]))

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        self._handle.update(self._html(self.drawing()))

    def drawing(self) -> str:
        """The output as HTML."""
        step = max((curve[-1][0] for curve in self.curves.values() if curve), default=0)
        bar = f'<progress value="{step:g}" max="{self.steps}" style="width:{_WIDTH}px"></progress>'
        return f"<div>{bar}<pre>{html.escape(self.text) or 'the first step'}</pre>{curves_svg(self.curves)}</div>"


def curves_svg(curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Curves of (step, value) by name as an SVG with one pair of axes; "" without two points."""
    points = [point for curve in curves.values() for point in curve]
    if len(points) < 2:
        return ""
    (start, end), (low, high) = ((min(axis), max(axis)) for axis in zip(*points, strict=True))
    width, height = max(end - start, 1e-9), max(high - low, 1e-9)

    def place(x: float, y: float) -> tuple[float, float]:
        across = _MARGIN + (x - start) / width * (_WIDTH - _MARGIN - 10)
        return round(across, 1), round(10 + (high - y) / height * (_HEIGHT - 34), 1)

    bottom = _HEIGHT - 24
    parts = [f'<path d="M{_MARGIN} 10V{bottom}H{_WIDTH - 10}" fill="none" stroke="#888"/>']
    labels = [(2, 14, f"{high:.4g}"), (2, bottom, f"{low:.4g}"), (_MARGIN, _HEIGHT - 8, f"step {start:g}")]
    labels.append((_WIDTH - 60, _HEIGHT - 8, f"{end:g}"))
    for name, curve in curves.items():
        if not curve:
            continue
        placed, color = [place(*point) for point in _thinned(curve)], _COLORS.get(name, "#555")
        path = " ".join(f"{x},{y}" for x, y in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        if name != "loss":
            parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>' for x, y in placed]
        labels.append((_WIDTH - 150, 20 + 16 * (name != "loss"), f"{name.replace('_', ' ')} {curve[-1][1]:.4f}"))
    parts += [f'<text x="{x}" y="{y}" font-size="12" fill="#555">{html.escape(text)}</text>' for x, y, text in labels]
    return f'<svg width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif">{"".join(parts)}</svg>'


def _thinned(curve: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most _POINTS points, each the mean of the same number of neighbours, but for the last."""
    size = -(-len(curve) // _POINTS)
    parts = [curve[n : n + size] for n in range(0, len(curve), size)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]
