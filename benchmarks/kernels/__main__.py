"""Our fused ops beside their peers, in one process on one card. What computes something else is not timed.

For every op, first for all of its shapes: outputs and every gradient of each provider against fp64. Ours must
err no more than the eager op of the same dtype, else nothing of that op is timed and the exit code is 1. A
peer is reported with its error, and left out where it is so wrong that it must have been called wrongly.
Then, for each shape and provider: the time of the forward and of forward + backward, on the device (a CUDA graph)
and on the wall (an eager call); the peak memory beyond the inputs, gradients included; and the share of what the
card can do, measured in the same run: of its copy bandwidth for the fewest bytes that the op could move, or of a
product for the operations that it cannot leave out, and for ops over a linear head of the products of that head.
Last, what a call costs the host, on a shape so small that the device does not matter.

Most of the time goes into compiling. Runs that are given the same --turn file do that and the parity beside each other,
and then wait for their turn, so that nothing is timed while another one works.

    python -m benchmarks.kernels --ops norms,glu --shapes full --out benchmarks/results/kernels.json
    python -m benchmarks.kernels --render benchmarks/results/kernels.json --markdown --plot images
    python -m benchmarks.kernels --ops units --budget 120 --turn LOCK &   # and one with --ops losses beside it
    python -m benchmarks.kernels --dry                        # tiny, on the CPU: does everything run?
"""

import argparse
import functools
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Timer, ceilings, environment, write_json
from benchmarks.kernels.case import Place
from benchmarks.kernels.report import render
from benchmarks.kernels.suite import CASES, GROUPS, PEERS, run
from benchmarks.kernels.turn import Turn

DRY_PEERS = ("eager", "torch", "transformers")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--ops", default=",".join(CASES), help=f"ops or groups ({', '.join(GROUPS)}), comma-separated; default all"
    )
    parser.add_argument("--shapes", choices=("quick", "full"), default="quick")
    parser.add_argument("--peers", help=f"comma-separated; default all that are installed: {','.join(PEERS)}")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds, after which no other shape is begun")
    parser.add_argument("--turn", metavar="FILE", help="a lock that runs beside this one share: timed one by one")
    parser.add_argument("--out", help="JSON file for the result, written after each op")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("--render", metavar="FILE.json", help="print an earlier result instead of measuring")
    parser.add_argument("--plot", metavar="FOLDER", help="write a PNG per op there; needs matplotlib")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU; the times mean nothing")
    options, started = parser.parse_args(arguments), time.monotonic()
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    if options.render:
        return show(json.loads(Path(options.render).read_text()), options)
    ops = list(dict.fromkeys(op for name in options.ops.split(",") for op in GROUPS.get(name, (name,))))
    asked = options.peers.split(",") if options.peers else DRY_PEERS if options.dry else list(PEERS)
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
    heading = {
        "benchmark": "kernels",
        "environment": environment(device),
        "dtype": str(dtype).removeprefix("torch."),
        "not_installed": sorted(missing),
    }

    def save(found: Mapping[str, Any]) -> None:
        if options.out:
            write_json(options.out, {**heading, **found})

    found = run(
        ops,
        "dry" if options.dry else options.shapes,
        set(asked) - missing,
        Place(device, dtype),
        timer,
        functools.partial(ceilings, timer),
        turn=Turn(options.turn) if options.turn else None,
        deadline=started + options.budget,
        save=save,
    )
    save(found)
    record = {**heading, **found}
    show(record, options)
    if missing:
        print(f"left out, not installed: {', '.join(sorted(missing))}")
    return 1 if record["red"] else 0


def show(record: Mapping[str, Any], options: argparse.Namespace) -> int:
    print(render(record, markdown=options.markdown))
    if options.plot:
        from benchmarks.kernels.plot import plot

        for path in plot(record, options.plot):
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
