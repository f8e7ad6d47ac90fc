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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PACKAGES = ("torch", "triton", "transformers", "liger-kernel", "cut-cross-entropy")
MIB = 2**20
FLUSH_BYTES = 256 * MIB
"""Several times the largest L2 there is (50 to 60 MB on an H200, 126 MB on a B200)."""
LEAD_CYCLES = 4_000_000  # 2 ms at 2 GHz: a forward and backward of any op here is queued in less


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


class Timer:
    """Times and weighs calls on `device`.

    On a GPU a time lies between two CUDA events around the call. Before each call the L2 is flushed and the device
    waits for LEAD_CYCLES, so that the host has queued the call before the first event passes: what is timed is the
    device's work, whatever the host's launches cost (`host_us` says that). A call that makes the host wait for the
    device gives its lead away, and its gaps show. `prepare` runs before each call and outside of its time; a provider
    that writes over its inputs gets them restored there, since leftovers do not take the time of real data.
    """

    def __init__(self, device: str, *, budget_ms: float = 100.0, max_calls: int = 100):
        self.device, self.budget_ms, self.max_calls = device, budget_ms, max_calls
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device) if device == "cuda" else None

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def time(self, call: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> Timing:
        for _ in range(2):  # compiles kernels, creates handles, fills the caching allocator
            prepare()
            call()
        prepare()
        estimate = self._host_ms(call)
        fewest = 5 if self.device == "cuda" else 1
        calls = max(fewest, min(self.max_calls, int(self.budget_ms / max(estimate, 1e-3))))
        if self._flush is None:
            times = []
            for _ in range(calls):
                prepare()
                times.append(self._host_ms(call))
        else:
            pairs = [[torch.cuda.Event(enable_timing=True) for _ in "01"] for _ in range(calls)]
            for start, end in pairs:
                prepare()
                self._flush.zero_()
                torch.cuda._sleep(LEAD_CYCLES)
                start.record()
                call()
                end.record()
            torch.cuda.synchronize()
            times = [start.elapsed_time(end) for start, end in pairs]
        times.sort()
        return Timing(statistics.median(times), times[len(times) // 5], times[len(times) * 4 // 5], calls)

    def _host_ms(self, call: Callable[[], object]) -> float:
        self.synchronize()
        start = time.perf_counter()
        call()
        self.synchronize()
        return (time.perf_counter() - start) * 1e3

    def host_us(self, call: Callable[[], object]) -> float:
        """Microseconds of host time per call: the queue takes as many as are made here without a wait."""
        calls, rounds = (20, 11) if self.device == "cuda" else (2, 3)
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

    def peak_mib(self, call: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> float | None:
        """MiB allocated in the call beyond what was there before, its results included. None on a CPU."""
        if self.device != "cuda":
            return None
        prepare()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / MIB


def ceilings(timer: Timer) -> dict[str, float]:
    """What this card does at best, measured now: a large copy (bytes read + written), a bf16 product."""
    elements, n = (2**30, 8192) if timer.device == "cuda" else (2**20, 256)
    source = torch.randn(elements, dtype=torch.bfloat16, device=timer.device)
    target = torch.empty_like(source)
    copy = timer.time(lambda: target.copy_(source)).median
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=timer.device) for _ in "ab")
    product = timer.time(lambda: a @ b).median
    return {
        "copy_tb_per_s": 2 * source.nbytes / copy * 1e-9,
        "matmul_bf16_tflop_per_s": 2 * n**3 / product * 1e-9,
    }


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
        chance, by about 1 / sqrt(count), of which four times is allowed for. The same rule judges the kernels in
        tests/kernels.
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
