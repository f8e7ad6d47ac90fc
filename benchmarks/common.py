"""What the benchmarks share: the record of the machine, Markdown tables, JSON."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "triton", "transformers", "liger-kernel", "cut-cross-entropy", "peft", "bitsandbytes", "trl")


def environment(device: str) -> dict[str, Any]:
    """What a figure depends on and the code does not say: GPU, power limit, versions, commit, command, date."""
    cuda = device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else f"CPU ({platform.machine()})",
        "driver and power limit": _output(
            "nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"
        ),
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "commit": _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"),
        "command": " ".join(["python -m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "settings": {
            name: value for name, value in os.environ.items() if name.startswith(("TRITON_", "PYTORCH_", "LIGER_"))
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """The first line that a command prints, None where it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def heading(env: Mapping[str, Any]) -> str:
    """The line above a table: where, with what and when it was measured."""
    versions = ", ".join(f"{package} {env[package]}" for package in PACKAGES if env.get(package))
    return f"{env['device']}, {versions}; commit {env['commit']}, {env['date']}"


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table, its columns aligned; None is an empty cell and a float has three digits."""
    cells = [list(columns), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    numeric = [bool(rows) and all(not isinstance(row[i], str) for row in rows) for i in range(len(columns))]
    lines = []
    for row in cells:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        lines.append(f"| {' | '.join(padded)} |")
    rule = [("-" * (width - 1) + ":") if right else "-" * width for width, right in zip(widths, numeric, strict=True)]
    lines.insert(1, f"| {' | '.join(rule)} |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.3g}".removesuffix(".")


def write_json(path: str | Path, record: Mapping[str, Any]) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
