"""What all benchmarks share: options, a process for each baseline, clocks, the record of a run and its tables.

A benchmark has a function `measure(options, record)`, which adds to the record. Where each baseline runs in its own
process, it also has `work(job)`, which returns the row of one baseline. A record is a dict of numbers, texts, dicts and
lists of rows; the keys of a row are the titles of its table. record["red"] lists the parity checks that ours failed: it
gets no figures, and the exit status is 1.
"""

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
GIB = 2**30
PACKAGES = (
    "torch", "triton", "transformers", "liger-kernel", "peft", "bitsandbytes", "trl", "fla-core", "tilelang",
    "flash-qla", "torchao",
)  # fmt: skip
RESULT = "RESULT "
"""Begins a line in which a worker reports a row."""
Record = dict[str, Any]
Row = dict[str, Any]


def main(
    description: str | None, arguments: Sequence[str] | None, add_options: Callable[[argparse.ArgumentParser], None],
    measure: Callable[[argparse.Namespace, Record], None], work: Callable[[dict[str, Any]], Row] | None = None,
    needs_gpu: bool = True,
) -> int:  # fmt: skip
    """Runs a benchmark from its command line and returns the exit status.

    measure: raises ValueError for options that cannot be measured. If it fails, or the process is terminated, what it
    has recorded is still written.
    """
    parser = parser_of(description, add_options)
    options = parser.parse_args(arguments)
    if options.render:
        print(render(json.loads(Path(options.render).read_text())))
        return 0
    if options.worker and work is not None:
        return _work(work, json.loads(options.worker))
    if needs_gpu and not options.dry and not torch.cuda.is_available():
        parser.error("needs a CUDA device; --dry runs tiny models on the CPU")
    options.device = "cuda" if torch.cuda.is_available() and not options.dry else "cpu"
    if not options.dry:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    record: Record = {"environment": environment(options.device)}
    try:
        measure(options, record)
    except ValueError as error:
        parser.error(str(error))
    finally:
        if options.out and len(record) > 1:
            Path(options.out).parent.mkdir(parents=True, exist_ok=True)
            Path(options.out).write_text(json.dumps(record, indent=1) + "\n")
    print(render(record), flush=True)
    return int(bool(record.get("red")))


def parser_of(
    description: str | None, add_options: Callable[[argparse.ArgumentParser], None]
) -> argparse.ArgumentParser:
    """The command line of a benchmark."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--dry", action="store_true", help="tiny models on the CPU, to see that everything runs")
    parser.add_argument("--out", metavar="FILE.json", help="write the record to a file")
    parser.add_argument("--render", metavar="FILE.json", help="print the tables of a record, and measure nothing")
    parser.add_argument("--worker", metavar="JOB", help=argparse.SUPPRESS)
    return parser


def names(*known: str) -> Callable[[str], list[str]]:
    """The type of an option: names with commas between them, each of which is known, or "all"."""

    def parse(text: str) -> list[str]:
        found = list(known) if text == "all" else [name for name in text.split(",") if name]
        if unknown := sorted(set(found) - set(known)):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
        return found

    return parse


def numbers(text: str) -> list[int]:
    """The type of an option: whole numbers with commas between them."""
    return [int(number) for number in text.split(",") if number]


# Processes


def _work(work: Callable[[dict[str, Any]], Row], job: dict[str, Any]) -> int:
    try:
        row = work(job)
    except Exception as error:
        traceback.print_exc()
        print(RESULT + json.dumps({"note": summary(error)}), flush=True)
        return 1
    report(row)
    return 0


def report(row: Mapping[str, Any]) -> None:
    """In a worker: sends a row, or a part of one, to the parent process."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(RESULT + json.dumps(row), flush=True)


def spawn(module: str, job: Mapping[str, Any], timeout: float, ranks: int = 1, **variables: str) -> Row:
    """What `work(job)` of benchmarks.MODULE returns in a new process with the variables, or under torchrun in `ranks`.

    If it fails or takes longer than `timeout` seconds, the row has what it reported before, and a note with the reason.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", f"benchmarks.{module}", "--worker", json.dumps(job)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, env=os.environ | variables)
    try:
        output, errors = process.communicate(timeout=timeout)
        note = (errors.strip() or f"exit code {process.returncode}").splitlines()[-1] if process.returncode else ""
        if note and (raised := re.search(r"^(?:\[rank\d+\]: )?((?!torch\.distributed)[\w.]+Error: .*)", errors, re.M)):
            note = raised[1]  # torchrun's own lines come after it
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its processes
        output, errors = process.communicate()
        note = f"did not finish in {timeout:g} s"
    row: Row = {}
    for line in output.splitlines():
        if line.startswith(RESULT):
            row |= json.loads(line.removeprefix(RESULT))
    if note:
        print(errors, file=sys.stderr)
        row.setdefault("note", note[:160])
    return row


def announce(row: Mapping[str, Any]) -> None:
    """Prints a row to stderr as soon as it is measured."""
    cells = (f"{name} {_cell(value)}" for name, value in row.items() if _is_scalar(value))
    print(f"{time.strftime('%H:%M:%S')} {', '.join(cells)}", file=sys.stderr, flush=True)


def summary(error: Exception) -> str:
    """An exception on one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


# Clocks and memory


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(call: Callable[[], Any], device: str) -> tuple[float, Any]:
    """(seconds of a call until the device has finished, its result)."""
    synchronize(device)
    start = time.perf_counter()
    found = call()
    synchronize(device)
    return time.perf_counter() - start, found


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total


def free(device: str) -> None:
    """Frees unreferenced memory, on the device too."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device: str) -> float | None:
    """The peak GiB in tensors since reset_peak, and the whole memory pools of CUDA graphs; None on a CPU.

    The kernels of a graph use memory of its pool that the allocator counts as free.
    """
    if device != "cuda":
        return None
    pools = [segment for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) != (0, 0)]
    unseen = sum(segment["total_size"] - segment["allocated_size"] for segment in pools)
    return (torch.cuda.max_memory_allocated() + unseen) / GIB


# The record and its tables


def environment(device: str) -> dict[str, Any]:
    """What figures depend on besides the code: GPU, power limit, versions, commit, command, date."""
    driver = _output("nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader")
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})",
        "driver and power limit": driver,
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "commit": _output("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
        "command": _command(sys.argv),
        "settings": {
            name: value for name, value in os.environ.items() if name.startswith(("TRITON_", "PYTORCH_", "LIGER_"))
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _command(argv: Sequence[str]) -> str:
    """As it is typed, without the file that it writes."""
    options = list(argv[1:])
    if "--out" in options:
        at = options.index("--out")
        del options[at : at + 2]
    return f"python -m benchmarks.{Path(argv[0]).stem} {shlex.join(options)}".strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """The first line that a command prints; None where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def render(record: Mapping[str, Any]) -> str:
    """A record as Markdown."""
    env = record["environment"]
    versions = ", ".join(f"{package} {env[package]}" for package in PACKAGES if env.get(package))
    parts = [
        f"{env.get('device')}, {versions}; commit {env.get('commit')}, {env.get('date')}",
        f"`{env.get('command')}`",
    ]
    for name, value in record.items():
        if name == "red":
            parts += [f"RED: {reason}" for reason in value]
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            parts.append(f"### {name}\n\n{table(value)}")
        elif isinstance(value, Mapping) and value and name != "environment":
            cells = (f"{key} {_cell(number)}" for key, number in value.items() if _is_scalar(number))
            parts.append(f"{name}: {', '.join(cells)}")
        elif _is_scalar(value):
            parts.append(f"{name}: {_cell(value)}")
    return "\n\n".join(parts)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of all numbers and texts of the rows. A float has three digits, None is an empty cell."""
    columns = list(dict.fromkeys(name for row in rows for name, value in row.items() if _is_scalar(value)))
    lines = [columns, *([_cell(row.get(name)) for name in columns] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    sides = ["<" if any(isinstance(row.get(name), str) for row in rows) else ">" for name in columns]
    shapes = list(zip(sides, widths, strict=True))
    rule = ["-" * width if side == "<" else "-" * (width - 1) + ":" for side, width in shapes]
    aligned = [[f"{cell:{side}{width}}" for cell, (side, width) in zip(line, shapes, strict=True)] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in [aligned[0], rule, *aligned[1:]])


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _cell(value: Any) -> str:
    if value is None or isinstance(value, Mapping | list):
        return ""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.3g}".removesuffix(".")
