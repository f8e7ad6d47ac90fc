"""How long the commands take to answer, and how much memory loading takes on a CPU.

    python -m benchmarks.startup

Each command runs in a process of its own, on two Llamas with random weights: a tiny one, and one of SmolLM2-135M's
sizes in fp32 (513 MiB). A first run warms the page cache; the median of the others counts. No command that computes can
be faster than `import torch`. "peak MiB" is the peak resident set of a process, with the pages of mapped files.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import harness
from benchmarks.harness import Record
from benchmarks.train_cases import ours

LOAD = "import ligermodels; ligermodels.Llama; model = ligermodels.load({!r}, progress=False); "
ONE_TOKEN = "import torch; model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=1)"
PEAK = "print(int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) / 1024)"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=5)


def measure(options: argparse.Namespace, record: Record) -> None:
    with tempfile.TemporaryDirectory() as root:
        tiny, large = str(Path(root, "tiny")), str(Path(root, "large"))
        for folder, is_tiny in ((tiny, True), (large, options.dry)):
            ours("smollm2-135m", "cpu", torch.float32, tiny=is_tiny).save_pretrained(folder)
        commands = {
            "import torch": ["-c", "import torch"],
            "--help": ["-m", "ligermodels", "--help"],
            "inspect FOLDER": ["-m", "ligermodels", "inspect", large],
            "inspect /not/there": ["-m", "ligermodels", "inspect", "/not/there"],
            "generate /not/there": ["-m", "ligermodels", "generate", "/not/there", "--prompt", "a"],
            "load, and one token": ["-c", LOAD.format(tiny) + ONE_TOKEN],
        }
        record["commands"], record["memory"] = [], []
        for name, command in commands.items():
            call = [sys.executable, *command]
            times = [
                harness.timed(lambda call=call: subprocess.run(call, capture_output=True, check=False), "cpu")[0]
                for _ in range(2 if options.dry else options.runs + 1)
            ]
            record["commands"].append({"command": name, "seconds": statistics.median(times[1:])})
        for name, code in (("imports only", "import ligermodels; ligermodels.Llama; "), ("loads", LOAD.format(large))):
            done = subprocess.run([sys.executable, "-c", code + PEAK], capture_output=True, check=True, text=True)
            record["memory"].append({"process": name, "peak MiB": float(done.stdout)})


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.main(__doc__, arguments, add_options, measure, needs_gpu=False)


if __name__ == "__main__":
    sys.exit(main())
