"""The fused ops beside their peers: device time, memory and exactness, in one process on one GPU.

For each op and shape, parity comes first: outputs and every gradient of each baseline are compared with fp64. Ours must
err no more than the eager op of the same dtype, else nothing of that op is timed and the exit code is 1. A peer is
shown with its error, and is not timed where the error is so large that it must have been called wrongly.

    python -m benchmarks.kernels --out benchmarks/results/kernels-h200.json
    python -m benchmarks.kernels --ops attention,moe --baselines eager,FlexAttention
    python -m benchmarks.kernels --render benchmarks/results/kernels-h200.json
    python -m benchmarks.kernels --dry                        # tiny shapes on the CPU: does everything run?
"""

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import environment, heading, table, write_json
from benchmarks.kernel_cases import OPS, Call, Case, Place, Tensors

OURS = "ligermodels"
NEEDS_GPU = ("torch.compile", "Liger", "CCE", "FlexAttention", "FlashAttention", "cuDNN")
"""Baselines whose name begins like this are left out of a dry run."""
CALLED_WRONGLY = 0.05
"""Relative rms error above which a peer computes something else: a handful of bf16 roundings stay below 0.02."""
ROTATED_BYTES = 2**30
"""A call is timed on several copies of its inputs, this much in all, so that no input is in the L2 cache."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default=",".join(OPS), help="comma-separated; default all")
    parser.add_argument("--baselines", help="comma-separated beginnings of names, beside ours; default all")
    parser.add_argument("--out", help="JSON file for the result, written after each op")
    parser.add_argument("--render", metavar="FILE.json", help="print an earlier result instead of measuring")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU; the times mean nothing")
    options = parser.parse_args(arguments)
    if options.render:
        print(render(json.loads(Path(options.render).read_text())))
        return 0
    ops = options.ops.split(",")
    if unknown := sorted(set(ops) - set(OPS)):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(OPS)}")
    if not options.dry and not torch.cuda.is_available():
        parser.error("needs a CUDA device; --dry runs tiny shapes on the CPU")

    def wanted(name: str) -> bool:
        if name.startswith(OURS) or not (options.dry or options.baselines):
            return True
        if options.dry and name.startswith(NEEDS_GPU):
            return False
        return not options.baselines or name.startswith(tuple(options.baselines.split(",")))

    place = Place("cpu" if options.dry else "cuda", torch.bfloat16)
    record: dict[str, Any] = {
        "benchmark": "kernels",
        "environment": environment(place.device),
        "ceilings": ceilings(place.device),
        "parity": [],
        "rows": [],
        "red": [],
    }
    for op in ops:
        started = time.perf_counter()
        benchmark(op, place, wanted, record)
        print(f"{op}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        if options.out:
            write_json(options.out, record)
    print(render(record))
    return 1 if record["red"] else 0


def benchmark(op: str, place: Place, wanted: Callable[[str], bool], record: dict[str, Any]) -> None:
    """Adds an op to the record: parity on all of its shapes, and if ours passed on all of them, the times."""
    torch.compiler.reset()  # each op has its own count of recompilations
    build = OPS[op].build
    listed = OPS[op].shapes if place.device == "cuda" else OPS[op].dry
    shapes = {", ".join(f"{name} {value}" for name, value in shape.items()): shape for shape in listed}
    refused: set[str] = set()
    for label, shape in shapes.items():
        torch.manual_seed(0)
        limits = OPS[op].parity_limits
        smaller = {name: min(size, limits[name]) if name in limits else size for name, size in shape.items()}
        for row in check(build(place, **smaller), wanted):
            record["parity"].append({"op": op, "shape": label, **row})
            if row["why"]:
                refused.add(row["baseline"])
    if any(name.startswith(OURS) for name in refused):
        record["red"].append(op)
        return
    for label, shape in shapes.items():
        torch.manual_seed(0)
        case = build(place, **shape)
        for row in measure(case, place.device, lambda name: wanted(name) and name not in refused):
            record["rows"].append({"op": op, "shape": label, **row})
            if "note" in row and row["baseline"].startswith(OURS):
                record["red"].append(op)
        del case
        gc.collect()
        if place.device == "cuda":
            torch.cuda.empty_cache()


class Run:
    """One baseline with its own leaves, and own copies of all tensors where it writes over its inputs."""

    def __init__(
        self, call: Call, leaves: Tensors, constants: Tensors, cotangents: Sequence[Tensor], copy: bool = False
    ):
        self.call, self.originals = call, []

        def own(x: Tensor) -> Tensor:
            if not copy:
                return x.detach()
            self.originals.append((x.clone(), x))
            return self.originals[-1][0]

        self.leaves = {name: own(x).requires_grad_() for name, x in leaves.items()}
        self.constants = {name: own(x) for name, x in constants.items()}
        self.cotangents = [own(x) for x in cotangents]

    def restore(self) -> None:
        with torch.no_grad():
            for copy, original in self.originals:
                copy.copy_(original)

    def forward(self) -> tuple[Tensor, ...]:
        out = self.call({**self.leaves, **self.constants})
        return out if isinstance(out, tuple) else (out,)

    def full(self) -> tuple[Tensor, ...]:
        """Outputs and gradients of the leaves."""
        outputs = self.forward()
        return (*outputs, *torch.autograd.grad(outputs, tuple(self.leaves.values()), self.cotangents or None))

    def results(self) -> Tensors:
        found = [x.detach() for x in self.full()]
        outputs = [f"output {n}" for n in range(len(found) - len(self.leaves))]
        return dict(zip([*outputs, *(f"d {name}" for name in self.leaves)], found, strict=True))


def cotangents_of(call: Call, case: Case) -> list[Tensor]:
    """Random gradients of what a call returns, none for a loss."""
    with torch.no_grad():
        outputs = Run(call, case.leaves, case.constants, ()).forward()
    return [torch.randn_like(x) for x in outputs if x.dim() > 0]


def check(case: Case, wanted: Callable[[str], bool]) -> list[dict[str, Any]]:
    """A row for each baseline and result: its rms error against fp64 over eager's, and why it may not be timed."""
    cotangents = cotangents_of(case.eager, case)
    leaves = {name: x.double() for name, x in case.leaves.items()}
    constants = {name: x.double() if x.is_floating_point() else x for name, x in case.constants.items()}
    exact = Run(case.eager, leaves, constants, [x.double() for x in cotangents]).results()
    eager = Run(case.eager, case.leaves, case.constants, cotangents).results()
    rows = []
    for name in filter(wanted, case.baselines):
        try:
            copy = name in case.overwrites
            found = Run(case.baselines[name], case.leaves, case.constants, cotangents, copy).results()
        except Exception as error:
            traceback.print_exc()
            rows.append({"baseline": name, "result": None, "why": _summary(error)})
            continue
        for result, actual in found.items():
            slack = case.slack.get(name, 1.0)
            over_eager, why = judge(actual, eager[result], exact[result], case.scalar_tolerance, slack)
            error = _rms(actual.double() - exact[result]) / max(_rms(exact[result]), 1e-30)
            if not name.startswith(OURS):
                why = "" if error <= CALLED_WRONGLY else f"relative rms error {error:.3g}: computes something else"
            rows.append({"baseline": name, "result": result, "error": error, "over_eager": over_eager, "why": why})
    return rows


def judge(actual: Tensor, eager: Tensor, exact: Tensor, scalar_tolerance: float, slack: float) -> tuple[float, str]:
    """(rms error over eager's, why that is too much or ""): allowed are 1.0x in rms and 1.25x + 1 ulp at most.

    An exact result that is rounded errs by half an ulp (in fp32, where every operation rounds, by an ulp): below that
    eager is lucky rather than better. The rms errors of two equally exact results differ by about 1 / sqrt(count) by
    chance, of which four times is allowed. One draw of a scalar's error says little, so that a scalar has a tolerance.
    slack: factor on eager's errors, for a mode that promises less.
    """
    ours, theirs = actual.double() - exact, eager.double() - exact
    info, chance = torch.finfo(actual.dtype), 1 + 4 / exact.numel() ** 0.5
    rounding = info.eps * (1.0 if actual.dtype == torch.float32 else 0.5)
    rms, rms_allowed = _rms(ours), max(slack * _rms(theirs) * chance, rounding * _rms(exact) + info.tiny)
    peak = ours.abs().max().item()
    peak_allowed = 1.25 * slack * theirs.abs().max().item() + info.eps * exact.abs().max().item() + info.tiny
    if exact.dim() == 0:
        rms_allowed, peak_allowed = max(rms_allowed, scalar_tolerance), max(peak_allowed, scalar_tolerance)
    over_eager = rms / max(_rms(theirs), info.tiny)
    if not rms <= rms_allowed:  # so that NaN is refused
        return over_eager, f"rms error {rms:.3e}, allowed {rms_allowed:.3e}"
    if not peak <= peak_allowed:
        return over_eager, f"largest error {peak:.3e}, allowed {peak_allowed:.3e}"
    return over_eager, ""


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def measure(case: Case, device: str, wanted: Callable[[str], bool]) -> list[dict[str, Any]]:
    """A row of times and memory for each baseline, after one for the GEMMs that the op cannot do without."""
    cotangents = cotangents_of(case.baselines["ligermodels"], case)
    nbytes = sum(x.nbytes for x in (*case.leaves.values(), *case.constants.values(), *cotangents))
    copies = max(1, min(64, ROTATED_BYTES // nbytes)) if device == "cuda" else 1
    tensors = [(case.leaves, case.constants, cotangents)]
    for _ in range(copies - 1):
        leaves, constants = ({name: x.clone() for name, x in ts.items()} for ts in (case.leaves, case.constants))
        tensors.append((leaves, constants, [x.clone() for x in cotangents]))
    rows: list[dict[str, Any]] = []
    if case.gemms is not None:
        name, call = case.gemms
        inputs = {**case.leaves, **case.constants}
        rows.append({"baseline": name, "full_ms": milliseconds([lambda: call(inputs)], device)[0]})
    for name in filter(wanted, case.baselines):
        runs = [Run(case.baselines[name], *copy, copy=name in case.overwrites) for copy in tensors]
        row: dict[str, Any] = {"baseline": name}

        def restore(runs=runs) -> None:
            for run in runs:
                run.restore()

        try:
            row["forward_ms"], _ = milliseconds([run.forward for run in runs], device, restore)
            row["full_ms"], row["synchronises"] = milliseconds([run.full for run in runs], device, restore)
            row["peak_mib"] = peak_mib(runs[0].full, device, restore)
            row |= rates(case, row)
        except Exception as error:
            traceback.print_exc()
            row["note"] = _summary(error)
        rows.append(row)
    return rows


def rates(case: Case, row: Mapping[str, Any]) -> dict[str, float]:
    """TB/s of the fewest bytes that the op can move, TFLOP/s of the operations that it cannot leave out."""
    found, full = {}, row["full_ms"]
    if case.bytes:
        found["tb_per_s"] = case.bytes / full * 1e-9
    if case.flops:
        found["tflop_per_s"] = case.flops / full * 1e-9
    if case.forward_flops:
        found["forward_tflop_per_s"] = case.forward_flops / row["forward_ms"] * 1e-9
        if full > row["forward_ms"]:
            backward = case.flops - case.forward_flops
            found["backward_tflop_per_s"] = backward / (full - row["forward_ms"]) * 1e-9
    return found


def milliseconds(
    calls: Sequence[Callable[[], object]], device: str, restore: Callable[[], object] = lambda: None
) -> tuple[float, bool]:
    """(median time of a call, whether it synchronises).

    All calls are captured in one CUDA graph, and the time is that of a replay over their number: what the host needs to
    launch is not in it. A call that synchronises cannot be captured, and is timed as it runs, the host's time included.
    """
    restore()
    calls[0]()  # compiles kernels, creates handles
    if device != "cuda":
        started = time.perf_counter()
        calls[0]()
        return (time.perf_counter() - started) * 1e3, False
    restore()
    if synchronises := _synchronises(calls[0]):
        calls = calls[:1]
        replay = calls[0]
    else:
        graph = torch.cuda.CUDAGraph()
        restore()
        with torch.cuda.graph(graph):
            results = [call() for call in calls]
        del results  # held until here, so that each call writes to memory of its own
        replay = graph.replay
    lead = torch.empty(2**30, dtype=torch.int8, device=device)
    times: list[float] = []
    while len(times) < 4 or (sum(times) < 50 and len(times) < 50):
        restore()
        lead.zero_()  # clears the L2 cache, and runs for longer than the host needs to queue the replay
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:]) / len(calls), synchronises


def _synchronises(call: Callable[[], object]) -> bool:
    """Whether the call makes the host wait for the device."""
    with warnings.catch_warnings(action="ignore"):  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def peak_mib(call: Callable[[], object], device: str, restore: Callable[[], object]) -> float | None:
    """MiB allocated in the call beyond its inputs, its results included. None on a CPU."""
    if device != "cuda":
        return None
    restore()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def ceilings(device: str) -> dict[str, float]:
    """What this GPU does at best, measured now: TB/s of a large copy, TFLOP/s of a bf16 GEMM of 8192 x 8192 x 8192."""
    elements, n = (2**31, 8192) if device == "cuda" else (2**20, 256)
    source = torch.zeros(elements, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    # In pieces: one copy of 1 GiB and more runs at 2.7 TB/s in a graph on an H200, pieces of 256 MiB at 4.2.
    pieces = list(zip(source.chunk(8), target.chunk(8), strict=True))
    copy, _ = milliseconds([lambda: [to.copy_(piece) for piece, to in pieces]], device)
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    gemm, _ = milliseconds([lambda: a @ b], device)
    return {"copy_tb_per_s": 2 * source.nbytes / copy * 1e-9, "gemm_tflop_per_s": 2 * n**3 / gemm * 1e-9}


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


COLUMNS = {
    "shape": "shape",
    "baseline": "baseline",
    "forward_ms": "forward ms",
    "full_ms": "fwd + bwd ms",
    "share": "of copy bandwidth",
    "forward_tflop_per_s": "TFLOP/s forward",
    "backward_tflop_per_s": "backward",
    "tflop_per_s": "both",
    "peak_mib": "peak MiB",
    "over_eager": "error / eager's",
    "note": "note",
}


def render(record: Mapping[str, Any]) -> str:
    """The tables of a result: one for each op, and what failed parity."""
    limits = ", ".join(f"{name} {value:.3g}" for name, value in record["ceilings"].items())
    parts = [heading(record["environment"]), f"`{record['environment']['command']}`", f"ceilings: {limits}"]
    worst: dict[tuple[str, str, str], float] = {}
    for row in record["parity"]:
        key = (row["op"], row["shape"], row["baseline"])
        worst[key] = max(worst.get(key, 0.0), row.get("over_eager", 0.0))
    for op in dict.fromkeys(row["op"] for row in record["rows"]):
        rows = []
        for row in record["rows"]:
            if row["op"] != op:
                continue
            share = row.get("tb_per_s", 0) / record["ceilings"]["copy_tb_per_s"]
            note = row.get("note") or ("synchronises: host time included" if row.get("synchronises") else None)
            shown = {"share": f"{share:.0%}" if share else None, "note": note}
            rows.append({**row, **shown, "over_eager": worst.get((op, row["shape"], row["baseline"]))})
        columns = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
        lines = [[row.get(name) for name in columns] for row in rows]
        parts.append(f"### {op}\n\n{table([COLUMNS[name] for name in columns], lines)}")
    if bad := [row for row in record["parity"] if row["why"]]:
        lines = [[row["op"], row["shape"], row["baseline"], row["result"], row["why"]] for row in bad]
        parts.append("### Failed parity\n\n" + table(["op", "shape", "baseline", "result", "why"], lines))
    if record["red"]:
        parts.append(
            f"RED: parity failed, and nothing of these was timed, or ours did not run: {', '.join(record['red'])}"
        )
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
