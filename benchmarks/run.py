"""Measures records of benchmarks/results again, side by side on the GPUs of a machine, each by one command.

    python -m benchmarks.run                                       # all of them, then: python -m benchmarks.cards
    python -m benchmarks.run step-llama-1b decode --minutes 10
    python -m benchmarks.run "step-*" --folder /tmp/records        # in place of benchmarks/results
    python -m benchmarks.run --list

A record is NAME-GPU.json, as in step-llama-1b-h200.json; those of several GPUs come first, each alone. It takes the
place of the one before if its command ends with 0: parity held, and every row was measured. What a command wrote that
did not end so, or that --minutes stopped, is in the folder unfinished/ beside the records, with all that it printed;
the exit status is 1 then.
"""

import argparse
import fnmatch
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import harness

_RAM = "--scratch /dev/shm"
RECORDS = {
    "distributed": "distributed --trace --cases '8B *' '1B *' '*70B *'",
    "distributed-mixtures": "distributed --trace --cases '*30B-A3B *' 'gpt-oss-20b *' 'Gemma-4-31B *'",
    "distributed-long": "distributed --cases '*Qwen3*'",
    "load-llama-70b": f"load --model llama-3.1-70b {_RAM} --loaders ligermodels --runs 1",
    "step-llama-1b": f"train_step --case llama-1b,llama-1b-small {_RAM}",
    "step-llama-1b-longest": f"train_step --case llama-1b --longest 24 --recompute block --timeout 260 {_RAM}",
    "step-llama-8b": f"train_step --case llama-8b {_RAM}",
    "step-llama-8b-lora": f"train_step --case llama-8b-lora,llama-8b-lora-small {_RAM}",
    "step-llama-8b-qlora": f"train_step --case llama-8b-qlora {_RAM}",
    "step-llama-8b-fp8": f"train_step --case llama-8b-fp8,llama-8b-fp8-lora {_RAM}",
    "step-llama-1b-fp8": f"train_step --case llama-1b-fp8 {_RAM}",
    "step-qwen3.5-9b": f"train_step --case qwen3.5-9b,qwen3.5-9b-lora {_RAM}",
    "step-qwen3.5-9b-fp8": f"train_step --case qwen3.5-9b-fp8,qwen3.5-9b-fp8-lora {_RAM}",
    "step-qwen3.5-4b": f"train_step --case qwen3.5-4b,qwen3.5-4b-lora {_RAM}",
    "step-gpt-oss-20b": f"train_step --case gpt-oss-20b-mxfp4 {_RAM}",
    "step-gpt-oss-20b-lora": f"train_step --case gpt-oss-20b-lora {_RAM}",
    "step-gemma-4-e4b": f"train_step --case gemma-4-e4b,gemma-4-e4b-16k,gemma-4-e4b-32k {_RAM}",
    "step-gemma-4-31b": f"train_step --case gemma-4-31b-lora --timeout 580 {_RAM}",
    "step-gemma-4-31b-layers": f"train_step --case gemma-4-31b-6-lora-16k,gemma-4-31b-6-lora-32k {_RAM}",
    "step-qwen3-30b-a3b-layers": f"train_step --case qwen3-30b-a3b-2,qwen3-30b-a3b-6 {_RAM}",
    "step-qwen3-30b-a3b-layers-lora": f"train_step --case qwen3-30b-a3b-2-lora,qwen3-30b-a3b-6-lora {_RAM}",
    "step-qwen3-30b-a3b": f"train_step --case qwen3-30b-a3b-lora {_RAM}",
    "step-qwen3-30b-a3b-qlora": f"train_step --case qwen3-30b-a3b-qlora {_RAM}",
    "step-gemma-2-2b": f"train_step --case gemma-2-2b {_RAM}",
    "step-phi-3-mini": f"train_step --case phi-3-mini {_RAM}",
    "step-qwen2-1.5b": f"train_step --case qwen2-1.5b {_RAM}",
    "step-llama-70b-qlora": f"train_step --case llama-70b-qlora --steps 3 {_RAM}",
    "train-command": f"train_command {_RAM}",
    "decode": "decode --baselines captured,hf",
    "decode-experts": "decode_experts --tiles",
    "decode-gpt-oss-20b": "decode --models gpt-oss-20b --weights bf16,mxfp4 --cases 1x128+256,8x128+256",
    "decode-gemma-4-31b": "decode --models gemma-4-31b --cases 1x32768+64",
    "decode-qwen3-30b-a3b": "decode --models qwen3-30b-a3b --cases 1x128+256,8x128+256",
    "decode-qwen3.5": "decode --models qwen3.5-9b,qwen3.5-4b --cases 1x128+256,1x32768+64",
    "decode-first-token": (
        "decode --models llama-3.1-8b,gemma-4-e2b --first-token 4096,16384 --baselines captured,host,hf"
    ),
    "decode-mtp": "decode --models qwen3.5-4b --mtp 1,2,3",
    "rollout": "decode --models llama-3.2-1b --rollout 64x8x128+256",
    "quantized-rows": "quantized --rows 8,16,64",
    "fp8": "fp8",
    "fp8-block": "fp8 --block",
    "fp8-curves": "fp8_curves --hidden 768 --processes 3",
    "kernels-attention-512": "kernels --ops attention_512",
    "kernels-attention-sinks": "kernels --ops attention_sinks,attention_no_sinks",
    "kernels-gated-delta-rule": "kernels --ops gated_delta_rule",
    "kernels-moe-experts": "kernels --ops moe_experts,moe_experts_biased",
    "load-warm": f"load {_RAM}",
}
"""{name: a benchmark of this package and its options}."""
SEVERAL_GPUS = ("distributed", "distributed-mixtures", "distributed-long", "load-llama-70b")


def chosen(patterns: Sequence[str]) -> list[str]:
    """The names that match any of the patterns, all without one. Raises ValueError for a pattern that matches none."""
    if unknown := [pattern for pattern in patterns if not fnmatch.filter(RECORDS, pattern)]:
        raise ValueError(f"no record is called {', '.join(unknown)}; --list prints all")
    return [name for name in RECORDS if not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def arguments_of(name: str, gpus: int) -> tuple[str, list[str]]:
    """(the benchmark, its options)."""
    module, *options = shlex.split(RECORDS[name])
    return module, options + (["--gpus", str(gpus)] if name in SEVERAL_GPUS else [])


class Runs:
    """The records still to measure, for a thread for each GPU; and those that were not finished."""

    def __init__(self, names: Sequence[str], folder: Path, until: float, *, dry: bool):
        self.waiting, self.folder, self.until, self.dry = deque(names), folder, until, dry
        self.suffix = "cpu" if dry else _gpu()
        self.unfinished: list[str] = []

    def work(self, gpus: Sequence[str]) -> None:
        """Measures records on these GPUs until there are none, or no time."""
        for name in iter(self.next, None):
            start = time.monotonic()
            try:
                status = self.measure(name, gpus) if start < self.until else "no time was left"
            except OSError as error:  # of files and of starting a process
                status = str(error)
            if status:
                self.unfinished.append(name)
            print(f"{name}: {status or 'measured'}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)

    def next(self) -> str | None:
        try:
            return self.waiting.popleft()
        except IndexError:
            return None

    def measure(self, name: str, gpus: Sequence[str]) -> str:
        """Runs a command; returns why its record is not finished, or ""."""
        module, options = arguments_of(name, len(gpus))
        unfinished = self.folder / "unfinished"
        unfinished.mkdir(parents=True, exist_ok=True)
        file = f"{name}-{len(gpus)}x{self.suffix}" if name in SEVERAL_GPUS else f"{name}-{self.suffix}"
        record, log = unfinished / f"{file}.json", unfinished / f"{file}.txt"
        command = [sys.executable, "-m", f"benchmarks.{module}", *options, "--out", str(record)]
        with log.open("w") as printed:
            process = subprocess.Popen(
                [*command, "--dry"] if self.dry else command, cwd=harness.ROOT, stdout=printed, stderr=printed,
                env=os.environ | ({} if self.dry else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}),
            )  # fmt: skip
            try:
                code = process.wait(max(0.0, self.until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)  # it writes what it has measured
                process.wait()
                return "stopped for lack of time"
        if code:
            return f"exit status {code}, see {log}"
        record.replace(self.folder / record.name)
        log.unlink()
        return ""


def _gpu() -> str:
    """The GPU's short name, of "NVIDIA H100 80GB HBM3" "h100"."""
    name = torch.cuda.get_device_name()
    model = re.search(r"(RTX )?\w*\d\w*", name)
    return (model[0] if model else name).lower().replace(" ", "-")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help='records, or patterns such as "step-*"; default all')
    parser.add_argument("--gpus", help="their numbers, as in 0,1; default all that torch sees")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which what runs is stopped")
    parser.add_argument("--folder", type=Path, default=harness.ROOT / "benchmarks" / "results", help="of the records")
    parser.add_argument("--list", action="store_true", help="print names and commands, and measure nothing")
    parser.add_argument("--dry", action="store_true", help="tiny models on the CPU, to see that everything runs")
    options = parser.parse_args(arguments)
    try:
        names = chosen(options.names)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        print("\n".join(f"{name:32} python -m benchmarks.{RECORDS[name]}" for name in names))
        return 0
    gpus = options.gpus.split(",") if options.gpus else [str(i) for i in range(torch.cuda.device_count())]
    if not gpus and not options.dry:
        parser.error("needs a CUDA device; --dry runs tiny models on the CPU")
    if options.dry and options.folder == parser.get_default("folder"):
        parser.error("--dry writes no record of benchmarks/results: give --folder")
    if len(gpus) < 2 and (several := [name for name in names if name in SEVERAL_GPUS]) and not options.dry:
        print(f"left out, for want of a second GPU: {', '.join(several)}", file=sys.stderr)
        names = [name for name in names if name not in several]
    until = time.monotonic() + 60 * options.minutes
    unfinished = []
    for some, groups in (
        ([name for name in names if name in SEVERAL_GPUS], [gpus or ["0", "1"]]),
        ([name for name in names if name not in SEVERAL_GPUS], [[gpu] for gpu in gpus] or [["0"]]),
    ):
        runs = Runs(some, options.folder, until, dry=options.dry)
        threads = [threading.Thread(target=runs.work, args=(group,)) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        unfinished += runs.unfinished
    if unfinished:
        print(f"not finished: {', '.join(unfinished)}; see {options.folder / 'unfinished'}", file=sys.stderr)
    return int(bool(unfinished))


if __name__ == "__main__":
    sys.exit(main())
