"""The fused ops beside their peers: device time, memory and exactness, in one process on one GPU.

For each op and shape, parity comes first: outputs and every gradient of each baseline are compared with fp64. Ours must
err no more than the eager op of the same dtype, else nothing of that op is timed and the exit code is 1. A peer is
shown with its error, and is not timed where the error is so large that it must have been called wrongly.

    python -m benchmarks.kernels --out benchmarks/results/kernels-h200.json
    python -m benchmarks.kernels --ops attention,moe --baselines eager,FlexAttention
    python -m benchmarks.kernels --dry

"of copy" is the fewest bytes that the op can move, over what a large copy moves in that time.
"""

import argparse
import gc
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import Record, Row, summary
from benchmarks.kernel_cases import OPS, Call, Case, Place, Tensors

OURS = "ligermodels"
NEEDS_GPU = ("torch.compile", "Liger", "CCE", "FlexAttention", "FlashAttention", "cuDNN")
"""Baselines whose name begins like this are left out of a dry run."""
CALLED_WRONGLY = 0.05
"""Relative rms error above which a peer computes something else: a handful of bf16 roundings stay below 0.02."""
ROTATED_BYTES = 2**30
"""A call is timed on several copies of its inputs, this much in all, so that no input is in the L2 cache."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", type=harness.names(*OPS), default="all", help="names with commas between them")
    parser.add_argument("--baselines", help="beginnings of names, beside ours; default all")


def measure(options: argparse.Namespace, record: Record) -> None:
    def wanted(name: str) -> bool:
        if name.startswith(OURS) or not (options.dry or options.baselines):
            return True
        if options.dry and name.startswith(NEEDS_GPU):
            return False
        return not options.baselines or name.startswith(tuple(options.baselines.split(",")))

    place = Place(options.device, torch.bfloat16)
    record["ceilings"] = ceilings(place.device)
    failed: list[Row] = []
    red: list[str] = []
    for op in options.ops:
        started = time.perf_counter()
        record[op], wrong = benchmark(op, place, wanted, record["ceilings"]["copy TB/s"])
        failed += wrong
        red += [
            f"{op}: {row['note']}" for row in record[op] + wrong if "note" in row and row["baseline"].startswith(OURS)
        ]
        print(f"{op}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    record["failed parity"], record["red"] = failed, red


def benchmark(op: str, place: Place, wanted: Callable[[str], bool], copy: float) -> tuple[list[Row], list[Row]]:
    """(rows of times, rows of what failed parity): parity on all shapes of an op, and if ours passed, the times."""
    torch.compiler.reset()  # each op has its own count of recompilations
    build = OPS[op].build
    listed = OPS[op].shapes if place.device == "cuda" else OPS[op].dry
    shapes = {", ".join(f"{name} {value}" for name, value in shape.items()): shape for shape in listed}
    errors: dict[tuple[str, str], float] = {}
    failed: list[Row] = []
    for label, shape in shapes.items():
        torch.manual_seed(0)
        limits = OPS[op].parity_limits
        smaller = {name: min(size, limits[name]) if name in limits else size for name, size in shape.items()}
        for row in check(build(place, **smaller), wanted):
            key = label, row["baseline"]
            errors[key] = max(errors.get(key, 0.0), row.get("error / eager's", 0.0))
            if row["note"]:
                failed.append({"op": op, "shape": label, **row})
    refused = {row["baseline"] for row in failed}
    rows: list[Row] = []
    for label, shape in {} if any(name.startswith(OURS) for name in refused) else shapes.items():
        torch.manual_seed(0)
        case = build(place, **shape)
        for row in times(case, place.device, lambda name: wanted(name) and name not in refused, copy):
            rows.append({"shape": label, **row, "error / eager's": errors.get((label, row["baseline"]))})
        del case
        harness.free(place.device)
    return rows, failed


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


def check(case: Case, wanted: Callable[[str], bool]) -> list[Row]:
    """A row for each baseline and result: its rms error against fp64 over eager's, and a note if it is not timed."""
    cotangents = cotangents_of(case.eager, case)
    leaves = {name: x.double() for name, x in case.leaves.items()}
    constants = {name: x.double() if x.is_floating_point() else x for name, x in case.constants.items()}
    exact = Run(case.eager, leaves, constants, [x.double() for x in cotangents]).results()
    eager = Run(case.eager, case.leaves, case.constants, cotangents).results()
    rows: list[Row] = []
    for name in filter(wanted, case.baselines):
        try:
            copy = name in case.overwrites
            found = Run(case.baselines[name], case.leaves, case.constants, cotangents, copy).results()
        except Exception as error:
            traceback.print_exc()
            rows.append({"baseline": name, "result": None, "note": summary(error)})
            continue
        for result, actual in found.items():
            slack = case.slack.get(name, 1.0)
            over_eager, why = judge(actual, eager[result], exact[result], case.scalar_tolerance, slack)
            error = _rms(actual.double() - exact[result]) / max(_rms(exact[result]), 1e-30)
            if not name.startswith(OURS):
                why = "" if error <= CALLED_WRONGLY else f"relative rms error {error:.3g}: computes something else"
            rows.append({"baseline": name, "result": result, "error / eager's": over_eager, "note": why})
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


def times(case: Case, device: str, wanted: Callable[[str], bool], copy: float) -> list[Row]:
    """A row of times and memory for each baseline, after one for the GEMMs that the op cannot do without.

    copy: TB/s of a large copy on this device.
    """
    cotangents = cotangents_of(case.baselines["ligermodels"], case)
    nbytes = sum(x.nbytes for x in (*case.leaves.values(), *case.constants.values(), *cotangents))
    copies = max(1, min(64, ROTATED_BYTES // nbytes)) if device == "cuda" else 1
    tensors = [(case.leaves, case.constants, cotangents)]
    for _ in range(copies - 1):
        leaves, constants = ({name: x.clone() for name, x in ts.items()} for ts in (case.leaves, case.constants))
        tensors.append((leaves, constants, [x.clone() for x in cotangents]))
    rows: list[Row] = []
    if case.gemms is not None:
        name, call = case.gemms
        inputs = {**case.leaves, **case.constants}
        rows.append({"baseline": name, "fwd + bwd ms": milliseconds([lambda: call(inputs)], device)[0]})
    for name in filter(wanted, case.baselines):
        runs = [Run(case.baselines[name], *given, copy=name in case.overwrites) for given in tensors]

        def restore(runs=runs) -> None:
            for run in runs:
                run.restore()

        try:
            forward, _ = milliseconds([run.forward for run in runs], device, restore)
            full, synchronises = milliseconds([run.full for run in runs], device, restore)
            row = {"forward ms": forward, "fwd + bwd ms": full, **rates(case, forward, full, copy)}
            row["peak MiB"] = peak_mib(runs[0].full, device, restore)
            if synchronises:
                row["time"] = "synchronises: the host's is included"
        except Exception as error:
            traceback.print_exc()
            row = {"note": summary(error)}
        rows.append({"baseline": name, **row})
    return rows


def rates(case: Case, forward: float, full: float, copy: float) -> Row:
    """Share of the speed of a copy for the fewest bytes, TFLOP/s of the operations that cannot be left out."""
    found: Row = {}
    if case.bytes:
        found["of copy"] = case.bytes / full * 1e-9 / copy
    if case.forward_flops:
        found["TFLOP/s forward"] = case.forward_flops / forward * 1e-9
        if full > forward:
            found["backward"] = (case.flops - case.forward_flops) / (full - forward) * 1e-9
    if case.flops:
        found["TFLOP/s"] = case.flops / full * 1e-9
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
    return {"copy TB/s": 2 * source.nbytes / copy * 1e-9, "GEMM TFLOP/s": 2 * n**3 / gemm * 1e-9}


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.main(__doc__, arguments, add_options, measure)


if __name__ == "__main__":
    sys.exit(main())
