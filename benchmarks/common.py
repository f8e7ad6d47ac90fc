"""What the benchmarks share: the record of the machine, timing, memory, the parity rule, tables and JSON."""

import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PACKAGES = ("torch", "triton", "transformers", "liger-kernel", "cut-cross-entropy")
MIB = 2**20
ROTATED_BYTES = 2**30
"""Inputs that are timed one after the other, so that none is in the L2 (50 MB on an H200, 126 MB on a B200) when its
turn comes, nor its results: several copies of small ones, the one copy of those that are as large."""
MOST_COPIES = 64
LEAD_CYCLES = 4_000_000  # 2 ms at 2 GHz: a CUDA graph is queued in less


def environment(device: str) -> dict[str, Any]:
    """What a figure depends on and the code does not say: card, versions, commit, command, date."""
    cuda = device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else f"CPU ({platform.machine()})",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "commit": _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"),
        "command": " ".join([Path(sys.executable).name, "-m", _module_name(), *sys.argv[1:]]),
        "settings": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("TRITON_", "PYTORCH_", "LIGER_")) and not name.endswith(("_DIR", "_PATH"))
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def _module_name() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec is not None else Path(sys.argv[0]).name


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a call: the median and the quantiles that say how much of a difference is noise."""

    median: float
    p20: float
    p80: float
    calls: int
    by: str

    @classmethod
    def of(cls, times: Sequence[float], calls: int, by: str) -> "Timing":
        times = sorted(times)
        return cls(statistics.median(times), times[len(times) // 5], times[len(times) * 4 // 5], calls, by)


@dataclass(frozen=True)
class Job:
    """A call to be timed, and what puts its inputs in order before it, outside of its time."""

    call: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


class Timer:
    """Times and weighs the same call on several copies of its inputs (jobs), which `ROTATED_BYTES` explains.

    `device`: what the device does, whatever the host's launches cost. All jobs are captured in one CUDA graph, and a
    time is that of a replay over the number of jobs. A call that cannot be captured, since it makes the host wait, is
    run under the profiler, and its time is the sum of its kernels' times, without the gaps between them: `by` says so.
    `wall`: what the host sees, from an idle device to an idle device, of one call made as a program makes it.
    On a CPU both are the same.
    """

    def __init__(self, device: str, *, budget_ms: float = 50.0, max_calls: int = 50):
        self.on, self.budget_ms, self.max_calls = device, budget_ms, max_calls

    def copies(self, nbytes: int) -> int:
        """Of inputs of `nbytes`, that are to be timed one after the other."""
        return 1 if self.on != "cuda" else max(1, min(MOST_COPIES, ROTATED_BYTES // max(nbytes, 1)))

    def synchronize(self) -> None:
        if self.on == "cuda":
            torch.cuda.synchronize()

    def device(self, jobs: Sequence[Job]) -> Timing:
        if self.on != "cuda":
            return self.wall(jobs)
        jobs[0].prepare()
        jobs[0].call()  # compiles kernels, creates handles
        if _waits(jobs[0]):
            return self._profiled(jobs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [job.call() for job in jobs]
        del results  # kept until here, so that each job writes to memory of its own
        times: list[float] = []
        while len(times) < 3 or (sum(times) < self.budget_ms and len(times) < self.max_calls):
            for job in jobs:
                job.prepare()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in "01")
            torch.cuda._sleep(LEAD_CYCLES)
            start.record()
            graph.replay()
            end.record()
            self.synchronize()
            times.append(start.elapsed_time(end))
        return Timing.of([time / len(jobs) for time in times[1:]], (len(times) - 1) * len(jobs), "graph")

    def _profiled(self, jobs: Sequence[Job]) -> Timing:
        for job in jobs:
            job.prepare()
        self.synchronize()
        # acc_events: without it torch warns
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            for job in jobs:
                job.call()
            self.synchronize()
        kernels = sum(event.self_device_time_total for event in profile.key_averages())
        return Timing.of([kernels / 1e3 / len(jobs)], len(jobs), "profiler")

    def wall(self, jobs: Sequence[Job]) -> Timing:
        jobs[0].prepare()
        jobs[0].call()
        times: list[float] = []
        fewest = 3 if self.on == "cuda" else 1
        while len(times) < fewest or (sum(times) < self.budget_ms and len(times) < self.max_calls):
            job = jobs[len(times) % len(jobs)]
            job.prepare()
            self.synchronize()
            start = time.perf_counter()
            result = job.call()
            self.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
            del result
        return Timing.of(times, len(times), "wall")

    def host_us(self, call: Callable[[], object]) -> float:
        """Microseconds of host time per call: the queue takes as many as are made here without a wait."""
        calls, rounds = (20, 11) if self.on == "cuda" else (2, 3)
        call()
        times = []
        for _ in range(rounds):
            self.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            times.append((time.perf_counter() - start) / calls * 1e6)
        self.synchronize()
        return statistics.median(times)

    def peak_mib(self, job: Job) -> float | None:
        """MiB allocated in the call beyond what was there before, its results included. None on a CPU."""
        if self.on != "cuda":
            return None
        job.prepare()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        job.call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / MIB


def _waits(job: Job) -> bool:
    """Whether the call makes the host wait for the device."""
    job.prepare()
    with warnings.catch_warnings(action="ignore"):  # a prototype, which may miss a wait: capture would then fail
        torch.cuda.set_sync_debug_mode("error")
    try:
        job.call()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def ceilings(timer: Timer) -> dict[str, float]:
    """What this card does at best, measured now: a large copy (bytes read + written), a sum (bytes read), products."""
    elements, n = (2**31, 8192) if timer.on == "cuda" else (2**20, 256)

    def milliseconds(*calls: Callable[[], object]) -> float:
        return min(timer.device([Job(call)]).median for call in calls)

    source = torch.randint(-9, 9, (elements,), dtype=torch.int8, device=timer.on)
    target = torch.empty_like(source)
    pieces = list(zip(source.chunk(8), target.chunk(8), strict=True))
    # The fastest counts. One copy of 1 GiB and more runs at 2.7 TB/s in a graph on an H200, pieces of 256 MiB at 4.2.
    copy = milliseconds(
        lambda: [to.copy_(piece) for piece, to in pieces],
        lambda: torch.neg(source.view(torch.float32), out=target.view(torch.float32)),
    )
    limits = {
        "copy_tb_per_s": 2 * source.nbytes / copy * 1e-9,
        "read_tb_per_s": source.nbytes / milliseconds(lambda: source.view(torch.float32).sum()) * 1e-9,
    }
    a, b = (source[i * n * n : (i + 1) * n * n].view(n, n) for i in range(2))
    limits["matmul_int8_top_per_s"] = 2 * n**3 / milliseconds(lambda: torch._int_mm(a, b.T)) * 1e-9
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=timer.on) for _ in "ab")
    limits["matmul_bf16_tflop_per_s"] = 2 * n**3 / milliseconds(lambda: a @ b) * 1e-9
    return limits


@dataclass(frozen=True)
class Error:
    """How far a tensor lies from the exact one, and the size of both's scale."""

    rms: float
    max: float
    exact_rms: float
    exact_max: float
    eps: float
    tiny: float
    count: int

    @classmethod
    def of(cls, actual: Tensor, exact: Tensor) -> "Error":
        """`exact` is fp64. A NaN or infinity that should not be there makes the error NaN or infinite."""
        assert actual.shape == exact.shape, f"shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
        difference = actual.double().sub_(exact).abs_()
        peak = difference.max().item()
        info = torch.finfo(actual.dtype)
        return cls(
            difference.square_().mean().sqrt().item(),
            peak,
            exact.square().mean().sqrt().item(),
            exact.abs().max().item(),
            info.eps,
            info.tiny,
            actual.numel(),
        )

    @property
    def relative(self) -> float:
        return self.rms / max(self.exact_rms, self.tiny)

    def worse_than(self, eager: "Error", *, slack: float = 1.0, floor: float = 0.0) -> str:
        """Why this error is not acceptable beside eager's, or "" if it is: rms 1.0x and max 1.25x + 1 ulp.

        Rounding an exact result errs by up to half an ulp (in fp32, where every operation rounds, an ulp), so below
        that rms floor eager is lucky rather than better; and the rms errors of two equally exact results differ by
        chance, by about 1 / sqrt(count), of which four times is allowed for. The rule that judges the kernels in
        tests/kernels is no stricter.
        slack: factor on eager's errors for a mode that promises less. floor: an absolute error that is always
        acceptable, for a scalar, where one draw of eager's error says little about its size.
        """
        chance = 1 + 4 / self.count**0.5
        ulps = 1.0 if self.eps == torch.finfo(torch.float32).eps else 0.5
        rms_allowed = max(slack * eager.rms * chance, ulps * self.eps * self.exact_rms + self.tiny, floor)
        max_allowed = max(1.25 * slack * eager.max + self.eps * self.exact_max + self.tiny, floor)
        if not self.rms <= rms_allowed:
            return f"rms error {self.rms:.3e}, allowed {rms_allowed:.3e} (eager's is {eager.rms:.3e})"
        if not self.max <= max_allowed:
            return f"max error {self.max:.3e}, allowed {max_allowed:.3e} (eager's is {eager.max:.3e})"
        return ""


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, markdown: bool = False) -> str:
    """Rows under their column names, aligned; None is an empty cell and a float has three digits."""
    cells = [list(columns), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    numeric = [bool(rows) and all(not isinstance(row[i], str) for row in rows) for i in range(len(columns))]
    lines = []
    for row in cells:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        lines.append(f"| {' | '.join(padded)} |" if markdown else "  ".join(padded).rstrip())
    rule = [("-" * (width - 1) + ":") if right else "-" * width for width, right in zip(widths, numeric, strict=True)]
    lines.insert(1, f"| {' | '.join(rule)} |" if markdown else "  ".join("-" * width for width in widths))
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
