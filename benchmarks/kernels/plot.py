"""A result as images: a PNG per op, a panel per shape, two bars per provider, the device's time and the wall's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.kernels.report import main_pass, wall

HEIGHT = 0.38  # of a bar; a provider has 1


def plot(record: Mapping[str, Any], folder: str | Path) -> list[Path]:
    """Writes the images and returns where they are."""
    from matplotlib.figure import Figure  # a figure by itself needs no display

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for op in dict.fromkeys(row["op"] for row in record["rows"]):
        panels: dict[str, list[Mapping[str, Any]]] = {}
        for row in record["rows"]:
            if row["op"] == op and "note" not in row:
                panels.setdefault(row["shape"], []).append(row)
        if not panels:
            continue
        most = max(len(panel) for panel in panels.values())
        figure = Figure(figsize=(5 * len(panels), 1.4 + 0.45 * most), layout="constrained")
        for axes, (shape, panel) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
            device = [row[f"{main_pass(row)}_ms"]["median"] for row in panel]
            walls = [wall(row) or float("nan") for row in panel]
            for offset, times, name in ((-HEIGHT / 2, device, "device"), (HEIGHT / 2, walls, "wall")):
                bars = axes.barh([i + offset for i in range(len(panel))], times, HEIGHT, label=name)
                axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=7)
            axes.set_yticks(range(len(panel)), [row["provider"] for row in panel], fontsize=8)
            for label, row in zip(axes.get_yticklabels(), panel, strict=True):
                label.set_fontweight("bold" if row["ours"] else "normal")
            axes.invert_yaxis()
            axes.margins(x=0.15)
            axes.set_title(shape, fontsize=9)
            axes.set_xlabel("ms, forward + backward" if main_pass(panel[0]) == "full" else "ms, forward")
        figure.legend(*axes.get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=2)
        figure.suptitle(f"{op}, {record['dtype']}, {record['environment']['device']}", fontsize=10)
        paths.append(folder / f"{op}.png")
        figure.savefig(paths[-1], dpi=130)
    return paths
