"""Our fused ops beside their peers, in one process on one card. What computes something else is not timed.

For every op, first for all of its shapes: outputs and every gradient of each provider against fp64. Ours must
err no more than the eager op of the same dtype, else nothing of that op is timed and the exit code is 1. A
peer is reported with its error, and left out where it is so wrong that it must have been called wrongly.
Then, for each shape and provider: the median time of the forward and of forward + backward, the peak memory
beyond the inputs (gradients included), and the share of what the card can do, measured in the same run: of
the copy bandwidth for the fewest bytes that the op could move, or of the bf16 product for the operations that
it cannot leave out, whose rate is given too (TFLOP/s). Last, what a call costs the host, on a shape so small
that the device does not matter.

    python -m benchmarks.kernels --ops rms_norm,glu --shapes full --out benchmarks/results/kernels.json
    python -m benchmarks.kernels --render benchmarks/results/kernels.json --markdown
    python -m benchmarks.kernels --dry                        # tiny, on the CPU: does everything run?
"""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import PACKAGES, Timer, ceilings, environment, table, write_json
from benchmarks.kernels.case import Place
from benchmarks.kernels.suite import CASES, PEERS, run


def render(record: Mapping[str, Any], *, markdown: bool = False) -> str:
    """The tables of a result as text."""
    env, limits = record["environment"], record["ceilings"]
    versions = ", ".join(f"{package} {env[package]}" for package in PACKAGES if env[package])
    parts = [
        f"{env['device']}, {record['dtype']}, {versions}; commit {env['commit']}, {env['date']}",
        f"`{env['command']}`" if markdown else env["command"],
        f"ceilings in this run: copy {limits['copy_tb_per_s']:.2f} TB/s, "
        f"bf16 product {limits['matmul_bf16_tflop_per_s']:.0f} TFLOP/s",
    ]
    for op in dict.fromkeys(row["op"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["op"] == op]
        worst = _worst_errors(record["parity"], op)
        lines = [_line(row, rows, worst) for row in rows]
        rates = [[row.get("tflop_per_s", {}).get(name) for name in RATES] for row in rows]
        shown = [i for i in range(len(RATES)) if any(rate[i] is not None for rate in rates)]
        columns = [*COLUMNS, *(f"TFLOP/s {RATES[i]}" for i in shown)]
        lines = [[*line, *(rate[i] for i in shown)] for line, rate in zip(lines, rates, strict=True)]
        parts.append(f"### {op}\n\n{table(columns, lines, markdown=markdown)}")
    if record["host"]:
        lines = [[row["op"], row["provider"], row.get("forward_us"), row.get("full_us")] for row in record["host"]]
        columns = ["op", "provider", "forward us", "fwd+bwd us"]
        parts.append(f"### Host time per call, tiny shapes\n\n{table(columns, lines, markdown=markdown)}")
    bad = [row for row in record["parity"] if row["why"]]
    if bad:
        lines = [[row["op"], row["shape"], row["provider"], row.get("tensor"), row["why"]] for row in bad]
        columns = ["op", "shape", "provider", "tensor", "why"]
        parts.append(f"### Parity: what is not as exact as it must be\n\n{table(columns, lines, markdown=markdown)}")
    if record["red"]:
        parts.append(f"RED, parity failed or ours did not run: {', '.join(record['red'])}")
    return "\n\n".join(parts)


DRY_PEERS = ("eager", "torch", "transformers")
RATES = ("forward", "backward", "both")
COLUMNS = [
    "shape",
    "provider",
    "forward ms",
    "fwd+bwd ms",
    "peak MiB",
    "ceiling fwd / both",
    "time / ours",
    "error",
]
"""`time / ours`: of forward + backward, against the first row of ours. `error`: the largest rms error over
eager's, of all outputs and gradients. Ops that are products have their RATES behind these."""


def _line(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], worst: Mapping[tuple, float]) -> list[Any]:
    start = [row["shape"], row["provider"]]
    if "full_ms" not in row:
        return [*start, None, None, None, row["note"], None, None]
    ours = next((r for r in rows if r["shape"] == row["shape"] and r["ours"] and "full_ms" in r), None)
    shares = [f"{row[key]:.0%}" if key in row else "" for key in ("forward_share", "full_share")]
    return [
        *start,
        row["forward_ms"]["median"],
        row["full_ms"]["median"],
        None if row["peak_mib"] is None else round(row["peak_mib"]),
        " / ".join(share for share in shares if share),
        row["full_ms"]["median"] / ours["full_ms"]["median"] if ours else None,
        worst.get((row["shape"], row["provider"])),
    ]


def _worst_errors(parity: Sequence[Mapping[str, Any]], op: str) -> dict[tuple[str, str], float]:
    """(shape, provider) -> largest rms error over eager's. The loss is one draw, whose ratio says nothing."""
    worst: dict[tuple[str, str], float] = {}
    for row in parity:
        ratio = row.get("rms_over_eager")
        if row["op"] == op and ratio is not None and row["tensor"] != "loss":
            key = (row["shape"], row["provider"])
            worst[key] = max(worst.get(key, 0.0), ratio)
    return worst


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ops", default=",".join(CASES), help="comma-separated; default all")
    parser.add_argument("--shapes", choices=("quick", "full"), default="quick")
    parser.add_argument("--peers", help=f"comma-separated; default all that are installed: {','.join(PEERS)}")
    parser.add_argument("--out", help="JSON file for the result")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("--render", metavar="FILE.json", help="print an earlier result instead of measuring")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU; the times mean nothing")
    options = parser.parse_args(arguments)
    if options.render:
        print(render(json.loads(Path(options.render).read_text()), markdown=options.markdown))
        return 0
    ops = options.ops.split(",")
    asked = (
        options.peers.split(",")
        if options.peers
        else ["eager", "torch", "transformers"]
        if options.dry
        else list(PEERS)
    )
    for names, known in ((ops, CASES), (asked, PEERS)):
        if unknown := sorted(set(names) - set(known) - {""}):
            parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    if not options.dry and not torch.cuda.is_available():
        parser.error("needs a CUDA device; --dry runs tiny shapes on the CPU")
    missing = {
        peer for peer in asked if PEERS.get(peer) and importlib.util.find_spec(PEERS[peer].split(".")[0]) is None
    }
    if missing and options.peers:
        parser.error(f"not installed: {', '.join(sorted(missing))}")
    device, dtype = "cpu" if options.dry else "cuda", torch.bfloat16
    if options.dry and os.environ.get("TRITON_INTERPRET") == "1":
        dtype = torch.float16  # interpreted kernels truncate where bf16 rounds
    timer = Timer(device)
    limits = ceilings(timer)
    result = run(
        ops,
        "dry" if options.dry else options.shapes,
        set(asked) - missing,
        Place(device, dtype),
        timer,
        limits,
    )
    record = {
        "benchmark": "kernels",
        "environment": environment(device),
        "dtype": str(dtype).removeprefix("torch."),
        "not_installed": sorted(missing),
        "ceilings": limits,
        **result,
    }
    if options.out:
        write_json(options.out, record)
    print(render(record, markdown=options.markdown))
    if missing:
        print(f"left out, not installed: {', '.join(sorted(missing))}")
    return 1 if record["red"] else 0


if __name__ == "__main__":
    sys.exit(main())
