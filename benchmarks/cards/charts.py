"""The chart of README.md: tokens/s and peak memory beside the strongest peer, as SVG for light and for dark pages.

The same records and the same matplotlib give the same bytes. A chart's description has the figures that it shows, so
that they can be compared where another matplotlib, or none, is installed.
"""

import html
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.cards.tables import TRAINED, Comparison, baseline_name, gib, model_name, number, shape

WIDTH, ROW, TOP = 9.0, 0.54, 0.54
"""Inches."""


@dataclass(frozen=True)
class Theme:
    ours: str
    peer: str
    text: str
    muted: str


THEMES = {
    "light": Theme("#0969da", "#c8d1da", "#1f2328", "#59636e"),
    "dark": Theme("#4493f8", "#4a525d", "#e6edf3", "#9198a1"),
}


def bars(found: Sequence[Comparison]) -> list[dict[str, Any]]:
    """What the chart shows, a dict for each case."""
    return [
        {
            "model": model_name(one.ours.model), "case": _case(one), "peer": baseline_name(one.peer),
            "tokens/s": [round(row.figures["tokens/s"]) for row in (one.ours, one.peer)],
            "peak GiB": [round(row.figures["peak GiB"], 1) for row in (one.ours, one.peer)],
        }
        for one in found if one.peer is not None
    ]  # fmt: skip


def _case(one: Comparison) -> str:
    row = one.ours
    if row.kind == "command":
        return "train sft, packed chats"
    trained = TRAINED[row.trained].replace(" of rank 16", "").replace(" (nf4)", "")
    return f"{trained}, {shape(row)}"


def description(drawn: Sequence[dict[str, Any]]) -> str:
    return json.dumps(drawn, ensure_ascii=False)


def described(svg: str) -> str | None:
    """The description of a chart."""
    found = re.search(r"<dc:description>(.*?)</dc:description>", svg, re.DOTALL)
    return html.unescape(found[1]) if found else None


def version(svg: str) -> str | None:
    """The matplotlib that drew it."""
    found = re.search(r"<dc:title>Matplotlib v([^,<]+)", svg)
    return found[1] if found else None


def installed() -> str | None:
    """The version of matplotlib here."""
    try:
        import matplotlib
    except ImportError:
        return None
    return matplotlib.__version__


def draw(drawn: Sequence[dict[str, Any]], theme: Theme) -> str:
    """The chart as SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    settings = {"svg.hashsalt": "ligermodels", "svg.fonttype": "path", "font.family": "DejaVu Sans", "font.size": 9}
    with matplotlib.rc_context(settings):
        height = TOP + ROW * len(drawn) + 0.12
        figure = Figure(figsize=(WIDTH, height))
        bottom, tall = 0.12 / height, ROW * len(drawn) / height
        speed = figure.add_axes((0.225, bottom, 0.44, tall))
        memory = figure.add_axes((0.735, bottom, 0.235, tall))
        ratio = max(row["tokens/s"][0] / row["tokens/s"][1] for row in drawn)
        for axes, right in ((speed, max(ratio, 1.0) * 1.22), (memory, max(max(x["peak GiB"]) for x in drawn) * 1.22)):
            axes.set(xlim=(0, right), ylim=(len(drawn) - 0.5, -0.5))
            axes.set_axis_off()
        for y, row in enumerate(drawn):
            _label(speed, y, row, theme)
            ours, peer = row["tokens/s"]
            _pair(speed, y, (ours / peer, 1.0), theme)
            _value(speed, y - 0.16, ours / peer, number(ours), f"{ours / peer:.2f}x", theme.ours, theme)
            _value(speed, y + 0.16, 1.0, number(peer), row["peer"], theme.muted, theme)
            _pair(memory, y, row["peak GiB"], theme)
            for at, value, color in ((-0.16, row["peak GiB"][0], theme.ours), (0.16, row["peak GiB"][1], theme.muted)):
                _value(memory, y + at, value, gib(value), "", color, theme)
        top = 1 - 0.2 / height
        figure.text(0.225, top, "tokens/s", color=theme.text, weight="bold", va="center", size=10)
        figure.text(0.302, top, "bars are relative to the strongest peer", color=theme.muted, va="center", size=8.5)
        figure.text(0.735, top, "peak GiB", color=theme.text, weight="bold", va="center", size=10)
        figure.text(0.008, top, "ligermodels", color=theme.ours, weight="bold", va="center", size=10)
        figure.text(0.008, top - 0.2 / height, "strongest peer", color=theme.muted, va="center", size=9)
        out = io.StringIO()
        about = {"Date": None, "Description": description(drawn)}
        figure.savefig(out, format="svg", transparent=True, metadata=about)
    return re.sub(r"[ \t]+$", "", out.getvalue(), flags=re.MULTILINE)


def _label(axes: Any, y: int, row: dict[str, Any], theme: Theme) -> None:
    left = axes.get_yaxis_transform()
    axes.text(-0.494, y - 0.15, row["model"].partition(" (")[0], transform=left, color=theme.text, weight="bold",
              va="center", size=9)  # fmt: skip
    depth = row["model"].partition(" (")[2].rstrip(")")
    case = row["case"] + (f", {depth}" if depth else "")
    axes.text(-0.494, y + 0.17, case, transform=left, color=theme.muted, va="center", size=8)


def _pair(axes: Any, y: int, values: Sequence[float], theme: Theme) -> None:
    for at, value, color in ((-0.16, values[0], theme.ours), (0.16, values[1], theme.peer)):
        axes.barh(y + at, value, height=0.28, color=color, linewidth=0)


def _value(axes: Any, y: float, end: float, value: str, then: str, color: str, theme: Theme) -> None:
    """At the end of a bar: its value, and a word after it."""
    place = dict(textcoords="offset points", va="center", size=8.5)
    ours = color == theme.ours
    axes.annotate(value, (end, y), (4, 0), color=color, weight="bold" if ours else "normal", **place)
    if then:
        offset = 4 + 5.9 * len(value) + 6
        axes.annotate(then, (end, y), (offset, 0), color=theme.text if ours else theme.muted, **place)
