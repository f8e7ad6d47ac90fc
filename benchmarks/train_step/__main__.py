"""A training step of a whole model: tokens per second and peak memory, beside transformers and its patches.

Every provider runs in a fresh process, so that neither patches nor memory leak, and loads checkpoints that
transformers wrote, so that all have the same weights. Before it is timed it has to agree with transformers in fp32
on a shallow model of the same widths and the same sequence length: logits, loss and gradient norm. One that does not
is not timed, unless the case says what it leaves out (`inexact`); if it is ours, the exit code is 1. The processes do
this beside each other; when one is timed, all others wait. After each the result is written; a run that is ended, or
has used up its budget, says which it has left out. The steps are AdamW (states in the weights' dtype) on random
tokens, the same for all, and the first of them must agree at full depth as well. What a provider's name means is in
providers.py.

    python -m benchmarks.train_step --case llama-3.2-1b --out benchmarks/results/train_step.json
    python -m benchmarks.train_step --case gemma-2-2b --providers ligermodels,ligermodels+adamw:none,hf+eager,hf+liger
    python -m benchmarks.train_step --providers ligermodels,hf+liger --profile --plot images   # where they go
    python -m benchmarks.train_step --longest 24 --checkpointing block     # the longest sequence in so many GiB
    python -m benchmarks.train_step --rows all --budget 1000 --out FOLDER   # what the README quotes, in so many seconds
    python -m benchmarks.train_step --render benchmarks/results/train_step.json --markdown
    python -m benchmarks.train_step --case gemma-2-2b --dry   # a tiny model on the CPU: does everything run?
"""

import argparse
import contextlib
import copy
import functools
import importlib.util
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import environment
from benchmarks.train_cases import CASES
from benchmarks.train_step import children
from benchmarks.train_step.longest import longest
from benchmarks.train_step.measure import check, measure
from benchmarks.train_step.parity import compare_first_steps, device_of, parity_bytes, prepare
from benchmarks.train_step.providers import CHECKPOINTING, Provider, preload
from benchmarks.train_step.report import plot, render
from benchmarks.train_step.rows import ROWS, render_verdicts, verdicts, within

SETTINGS = ("case", "batch", "seq", "checkpointing", "steps", "warmup", "seed")
PREPARE = "prepare"
EXPANDABLE = "expandable_segments:True"


class Stopped(BaseException):
    """A signal ends the run. code: what it exits with."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


def main(arguments: Sequence[str] | None = None) -> int:
    parser, begun = _parser(), time.monotonic()
    options = parser.parse_args(arguments)
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    if options.render:
        return _show(json.loads(Path(options.render).read_text()), options)
    if options.child:
        return _work(options)
    if not options.dry and not torch.cuda.is_available():
        parser.error("needs a CUDA device; --dry runs a tiny model on the CPU")
    try:
        with _stoppable(), tempfile.TemporaryDirectory(dir=options.scratch, prefix="train_step-") as folder:
            work = _rows if options.rows else _case
            return work(options, parser, Path(folder), begun)
    except Stopped as stopped:  # before or after all that is worth a table
        return stopped.code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--case", choices=sorted(CASES), default="llama-3.2-1b")
    parser.add_argument("--batch", type=int, help="sequences a step; default the case's, as of the next three")
    parser.add_argument("--seq", type=int, help="tokens a sequence")
    parser.add_argument("--checkpointing", choices=CHECKPOINTING, help="of providers that do not name their own")
    parser.add_argument("--steps", type=int, help="timed steps; the median counts")
    parser.add_argument("--providers", help="comma-separated; default the case's")
    parser.add_argument("--profile", action="store_true", help="also where each provider's time and memory go")
    parser.add_argument("--longest", type=float, metavar="GIB", help="the longest sequence in so many GiB, B 1")
    parser.add_argument("--most", type=int, help="with --longest: try none that is longer")
    parser.add_argument("--rows", help=f"of what the README quotes, comma-separated, or all: {','.join(ROWS)}")
    parser.add_argument(
        "--budget", type=float, default=float("inf"), help="seconds; nothing is begun that does not fit"
    )
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a provider may take, and its parity")
    parser.add_argument("--scratch", help="where checkpoints are written for the run, e.g. /dev/shm; default the temp")
    parser.add_argument("--out", help="JSON file, written after each provider; with --rows, the folder for several")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("--plot", metavar="FOLDER", help="write a PNG per profile there; needs matplotlib")
    parser.add_argument("--render", metavar="FILE.json", help="print an earlier result instead of measuring")
    parser.add_argument("--dry", action="store_true", help="the case at a tiny size on the CPU; the times mean nothing")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


def _complete(options: argparse.Namespace, parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options with the case's own where none were given."""
    case = CASES[options.case]
    if options.dry:
        options.batch, options.seq, options.steps = 2, 64, 2
    for name in ("batch", "seq", "checkpointing", "steps"):
        if getattr(options, name) is None:
            setattr(options, name, getattr(case, name))
    if not options.providers:
        options.providers = ",".join(_running(case.providers, options))
    try:
        providers = [Provider.of(name, case, options.checkpointing) for name in options.providers.split(",")]
    except ValueError as error:
        parser.error(str(error))
    if options.longest and (case.image or any("captured" in provider.words for provider in providers)):
        parser.error("--longest is for text models and steps that are not captured: a graph is of one length")
    return options


def _running(providers: Sequence[str], options: argparse.Namespace) -> list[str]:
    """Those that run where --dry does: Liger's kernels need a GPU."""
    return [name for name in providers if not options.dry or "liger" not in name.split(":")[0].split("+")]


class Run:
    """Every provider in a process of its own. One that fails gets a note in place of figures."""

    def __init__(self, options: argparse.Namespace, scratch: Path):
        """Starts the processes. Runs of one case share its checkpoints in `scratch`."""
        self.options, self.deadline = options, float("inf")
        self.rows: list[dict[str, Any]] = []
        self.left_out: dict[str, str] = {}
        """Provider -> why."""
        self.folder = scratch / f"{options.case}{'-longest' if options.longest else ''}"
        self.folder.mkdir(exist_ok=True)
        variables = {**os.environ}
        if options.longest:  # for everyone: what is lost between tensors would decide otherwise
            variables = {"PYTORCH_ALLOC_CONF": EXPANDABLE, "PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE, **variables}
        self.names = list(dict.fromkeys(options.providers.split(",")))
        self.children = {name: children.Child(self._arguments(name), variables) for name in [PREPARE, *self.names]}

    def _arguments(self, what: str) -> list[str]:
        """What `main` is called with in the process of one provider, or of "prepare"."""
        arguments = ["--child", what, "--folder", str(self.folder)]
        for name in (*SETTINGS, "longest", "most"):
            if (value := getattr(self.options, name)) is not None:
                arguments += [f"--{name}", str(value)]
        return [*arguments, *(f"--{flag}" for flag in ("dry", "profile") if getattr(self.options, flag))]

    def prepare(self) -> None:
        """Writes the checkpoints. Raises SystemExit where that fails."""
        started, child = time.perf_counter(), self.children[PREPARE].ready()
        seconds = {"imports": time.perf_counter() - started}
        error, found = self._finish(child, max(1.0, self._left()))
        del self.children[PREPARE]
        if error:
            self.stop()
            raise SystemExit(f"transformers could not write the checkpoint: {error}")
        _say(PREPARE, time.perf_counter() - started, {**seconds, **found})

    def ready(self) -> None:
        """Returns when all processes have imported what they need."""
        for child in self.children.values():
            child.ready()

    def check(self) -> None:
        """Lets all check their parity, which for the longest sequence none does: at the same time where they fit."""
        self.ready()
        started, waiting = time.perf_counter(), [] if self.options.longest else list(self.children.values())
        room = torch.cuda.get_device_properties(0).total_memory if waiting and not self.options.dry else math.inf
        together = len(waiting) * parity_bytes(CASES[self.options.case], self.options) <= room
        for group in [waiting] if together else [[child] for child in waiting]:
            for child in group:
                child.proceed()
            for child in group:
                child.ready(max(1.0, self._left()))
        _say("parity", time.perf_counter() - started)

    def measure(self, out: str | Path | None) -> None:
        """All providers, one after the other, none of them while another one does anything; `out` has those so far.

        One that is as slow as the slowest before it has to fit into the time that is left.
        """
        slowest = 0.0
        for name, child in self.children.items():
            left, started = self.deadline - time.monotonic(), time.monotonic()
            if left <= slowest:
                self.left_out[name] = f"{max(0.0, left):.0f} s were left, the slowest before it took {slowest:.0f}"
                child.stop()
                continue
            try:
                self.rows.append(self._row(name, child))
            except Stopped:
                child.stop()
                if found := self._found():
                    self.rows.append({**found, "note": "was stopped before its end"})
                raise
            if "note" not in self.rows[-1]:
                slowest = max(slowest, time.monotonic() - started)
            self.save(out)

    @functools.cached_property
    def environment(self) -> dict[str, Any]:
        return environment(device_of(self.options))

    def record(self) -> dict[str, Any]:
        """Of what has been measured so far."""
        rows = copy.deepcopy(self.rows)  # the comparison adds to them, and may find another reference the next time
        compare_first_steps(rows)
        missing = [name for name in self.names if name not in {row["provider"] for row in rows}]
        return {
            "benchmark": "train_step",
            "environment": self.environment,
            "settings": {name: getattr(self.options, name) for name in (*SETTINGS, "longest")},
            "rows": rows,
            "left_out": {name: self.left_out.get(name, "the run had not come to it") for name in missing},
        }

    def save(self, out: str | Path | None) -> None:
        """Writes the record, if there is a row, which an earlier result in its place may then go for."""
        if out and self.rows:
            children.write_whole(Path(out), self.record())

    def _row(self, name: str, child: children.Child) -> dict[str, Any]:
        started = time.perf_counter()
        error, row = self._finish(child, max(1.0, self._left()))
        seconds = {"parity before" if phase == "parity" else phase: s for phase, s in row.get("seconds", {}).items()}
        _say(name, time.perf_counter() - started, seconds)
        return {"provider": name, **row, "note": error} if error else row

    def _left(self) -> float:
        return min(self.options.timeout, self.deadline - time.monotonic())

    def _finish(self, child: children.Child, timeout: float) -> tuple[str, dict[str, Any]]:
        """Why the process failed, or "", and what it has found out until then."""
        error = child.go(timeout)
        return error, self._found()

    def _found(self) -> dict[str, Any]:
        """What a process has told, which is then forgotten."""
        result = self.folder / children.RESULT
        found = json.loads(result.read_text()) if result.exists() else {}
        result.unlink(missing_ok=True)
        return found

    def stop(self) -> None:
        for child in self.children.values():
            child.stop()


def _work(options: argparse.Namespace) -> int:
    """In the process of one provider, or of "prepare"."""
    case, found = CASES[options.case], {}
    preload("hf" if options.child == PREPARE else options.child, case)
    if not options.dry:
        torch.empty(1, device="cuda")  # a second for each process
    children.wait()
    if options.child == PREPARE:
        found = prepare(case, options, options.folder)
    elif options.longest:
        found = longest(options.child, case, options, options.folder)
    else:
        row = check(options.child, case, options, options.folder)
        children.wait()
        found = measure(row, case, options, options.folder)
    children.tell(options.folder, found)
    return 0


def _say(what: str, seconds: float, parts: Mapping[str, float] | None = None) -> None:
    """Where the time goes, on stderr."""
    said = ", ".join(f"{name} {part:.1f}" for name, part in (parts or {}).items())
    print(f"{what}: {seconds:.0f} s{f' ({said})' if said else ''}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Within, the signals that end a process raise `Stopped`; after the first one, others no longer interrupt."""
    if threading.current_thread() is not threading.main_thread():  # no other one may
        yield
        return
    signals = (signal.SIGINT, signal.SIGTERM)

    def stop(number: int, frame: object) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(128 + number)

    before = {each: signal.signal(each, stop) for each in signals}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _case(options: argparse.Namespace, parser: argparse.ArgumentParser, folder: Path, begun: float) -> int:
    """Runs what fits into the budget."""
    run, code = Run(_complete(options, parser), folder), 0
    run.deadline = begun + options.budget
    try:
        run.prepare()
        run.check()
        run.measure(options.out)
    except Stopped as stopped:
        code = stopped.code
    finally:
        run.stop()
    run.save(options.out)
    record = run.record()
    _show(record, options)
    return code or _wrong(record)


def _rows(options: argparse.Namespace, parser: argparse.ArgumentParser, folder: Path, begun: float) -> int:
    """Runs the rows that fit into the budget, and says which of their claims hold."""
    names = list(ROWS) if options.rows == "all" else options.rows.split(",")
    if unknown := sorted(set(names) - set(ROWS)):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(ROWS)}")
    left, deadline = within(names, options.budget), begun + options.budget
    started: dict[str, Run] = {}

    def start(name: str) -> None:
        providers = _running(ROWS[name].providers, options)
        own = parser.parse_args([*ROWS[name].arguments, "--providers", ",".join(providers)])
        own.dry, own.seed, own.timeout = options.dry, options.seed, options.timeout
        started[name] = Run(_complete(own, parser), folder)

    def end(name: str) -> int:
        run = started.pop(name)
        run.stop()
        record = run.record()
        run.save(out(name))
        _show(record, options)
        print(flush=True)
        lines.extend(verdicts(record, ROWS[name].claims))
        return _wrong(record)

    def out(name: str) -> Path | None:
        return Path(options.out) / f"step-{name}.json" if options.out else None

    lines: list[list[Any]] = []
    tried: list[str] = []
    name, wrong, code = "", 0, 0
    try:
        while left:
            name = left[0]
            if name not in started:
                start(name)
            left = within(left[1:], deadline - time.monotonic() - ROWS[name].seconds)
            if left:
                start(left[0])  # imports while this one's checkpoints are written
            run = started[name]
            run.deadline = deadline
            tried.append(name)
            print(f"{name}: from {time.monotonic() - begun:.0f} s on", file=sys.stderr, flush=True)
            try:
                run.prepare()
            except SystemExit as error:
                print(f"{name}: {error}", file=sys.stderr)
                wrong = 1
                continue
            run.check()
            if left:
                started[left[0]].ready()
            run.measure(out(name))
            wrong |= end(name)
            if not any(ROWS[other].arguments[:2] == ROWS[name].arguments[:2] for other in left):
                shutil.rmtree(run.folder)  # checkpoints, which no row needs any more
    except Stopped as stopped:
        code = stopped.code
        if name in started:
            end(name)
    finally:
        for run in started.values():
            run.stop()
    if missing := [name for name in ROWS if name in names and name not in tried]:
        print(f"left out: {', '.join(missing)}\n")
    print(render_verdicts(lines, markdown=options.markdown), flush=True)
    return code or wrong


def _show(record: dict[str, Any], options: argparse.Namespace) -> int:
    print(render(record, markdown=options.markdown), flush=True)
    if options.plot:
        for path in plot(record, options.plot):
            print(path)
    return 0


def _wrong(record: dict[str, Any]) -> int:
    """1 if one of ours failed or computes something else."""
    ours = [row for row in record["rows"] if row["provider"].startswith("ligermodels")]
    return int(any("note" in row or row.get("parity", {}).get("red") for row in ours))


if __name__ == "__main__":
    sys.exit(main())
