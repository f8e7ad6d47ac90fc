"""Writes what the project shows of its records: the cards in docs/models, docs/results.md, README.md's blocks, charts.

    python -m benchmarks.cards            # after a record has changed
    python -m benchmarks.cards --check    # is all as it would be written? Exit status 1 if not; writes nothing

It prints each figure that has changed by 1 % or more beside docs/models/figures.json, the figures that were written
last. If one of ours is worse by 5 % or more, or has gone, it writes nothing and the exit status is 1, unless --accept
is given. Needs the group `test`, and matplotlib for the charts.
"""

import argparse
import json
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.cards import charts, pages, tables
from benchmarks.cards.families import families
from benchmarks.cards.records import LOWER_IS_BETTER, Measurement, is_ours, measurements, newest, records
from benchmarks.harness import ROOT

FIGURES = "docs/models/figures.json"
CHART = "docs/images/speed-{}.svg"
SHOWN, FALL = 0.01, 0.05
Figures = dict[str, dict[str, float]]


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("--accept", action="store_true", help="write although figures of ours are worse")
    options = parser.parse_args(arguments)
    files = contents(root)
    stale = [name for name, text in files.items() if is_stale(root / name, text)]
    stale += [str(path.relative_to(root)) for path in gone(root, files)]
    if options.check:
        for name in stale:
            print(f"{name} is not what `python -m benchmarks.cards` writes")
        return int(bool(stale))
    path = root / FIGURES
    before = json.loads(path.read_text("utf-8")) if path.exists() else {}
    lines, worse = changes(before, json.loads(files[FIGURES]))
    print("\n".join(lines) if lines else "no figure has changed by 1 % or more")
    if worse and not options.accept:
        print(f"{worse} figures of ours are worse by {FALL:.0%} or more, or gone: nothing is written without --accept")
        return 1
    for name in stale:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if name in files:
            (root / name).write_text(files[name], "utf-8")
        else:
            (root / name).unlink()
    print(f"written: {', '.join(stale) if stale else 'nothing, since all is as it was'}")
    return 0


def contents(root: Path) -> dict[str, str]:
    """{file: what it is to contain}. Charts need matplotlib; without it they are as they are."""
    read = records(root / "benchmarks" / "results")
    rows = measurements(read)
    found = tables.comparisons(rows)
    drawn = charts.bars([one for one in pages.headlines(found) if one.ours.kind in pages.IN_CHARTS])
    files = {f"docs/models/{family.model_type}.md": pages.card(family, found, rows) for family in families()}
    files["docs/models/README.md"] = pages.index(found)
    files["docs/results.md"] = pages.results(found, read)
    files[FIGURES] = json.dumps(figures(rows), indent=1, ensure_ascii=False) + "\n"
    files["README.md"] = pages.fill((root / "README.md").read_text("utf-8"), pages.blocks(found, url(root)))
    for name, theme in charts.THEMES.items():
        chart = root / CHART.format(name)
        known = chart.read_text("utf-8") if chart.exists() else ""
        same = charts.described(known) == charts.description(drawn)
        if same and charts.version(known) != charts.installed():
            files[CHART.format(name)] = known  # drawn elsewhere, from the same figures
        elif charts.installed() is None:
            raise SystemExit(f"{chart} shows other figures: install matplotlib, and run this again")
        else:
            files[CHART.format(name)] = charts.draw(drawn, theme)
    return files


def url(root: Path) -> str:
    """Where README.md's links begin, so that they work on the package index too."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    return f"{project['urls']['Repository']}/blob/main/"


def is_stale(path: Path, text: str) -> bool:
    return not path.exists() or path.read_text("utf-8") != text


def gone(root: Path, files: Mapping[str, str]) -> list[Path]:
    """Cards of families that the registry has no more."""
    return [path for path in (root / "docs" / "models").glob("*.md") if str(path.relative_to(root)) not in files]


# What has changed


def figures(rows: list[Measurement]) -> Figures:
    """{what was measured: its figures}, of the newest record of each, with five digits."""
    return {
        key: {name: float(f"{value:.5g}") for name, value in row.figures.items() if name in _compared(row)}
        for key, row in sorted(newest(rows).items())
    }


def _compared(row: Measurement) -> tuple[str, ...]:
    return tables.decides(row), "peak GiB"


def changes(before: Figures, after: Figures) -> tuple[list[str], int]:
    """(a line for each figure that changed by 1 % or more, appeared or went; how many of ours fell by 5 % or went)."""
    lines, worse = [], 0
    for key in sorted(before.keys() | after.keys()):
        ours = is_ours(key.rpartition(" | ")[2])
        if key not in after:
            lines.append(f"gone      {key}")
            worse += ours
        elif key not in before:
            lines.append(f"new       {key}: {_words(after[key])}")
        else:
            for name in before[key].keys() | after[key].keys():
                old, new = before[key].get(name), after[key].get(name)
                if old is None or new is None:
                    lines.append(f"changed   {key}: {name} {old} is now {new}")
                    worse += ours and new is None
                    continue
                change = new / old - 1
                fell = -change if name not in LOWER_IS_BETTER else change
                if abs(change) >= SHOWN:
                    falls = ours and fell >= FALL
                    worse += falls
                    lines.append(
                        f"{'WORSE' if falls else 'changed':9} {key}: {name} {old:,g} is now {new:,g} ({change:+.1%})"
                    )
    return lines, worse


def _words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:,g}" for name, value in values.items())


if __name__ == "__main__":
    sys.exit(main())
