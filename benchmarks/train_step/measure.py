"""One provider's row, computed in a process of its own: parity, then times and peak memory of its steps.

Parity may be checked beside other processes; times are measured when no other one works, and the profiler is touched
by the process that is timed alone: it takes the device's counters when it is first begun, not when it is imported.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.images import for_transformers
from benchmarks.train_cases import Case
from benchmarks.train_step import children
from benchmarks.train_step.memory import GIB, clean, peak_bytes
from benchmarks.train_step.parity import (
    LOGITS_FACTOR,
    PEERS_LOGITS_FACTOR,
    batches,
    device_of,
    disagreement,
    first_gradient_norm,
    parity_file,
    probe,
    typical_error,
)
from benchmarks.train_step.profile import profile
from benchmarks.train_step.providers import Provider, build, optimizer_of, step_of


def check(name: str, case: Case, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The row of the provider, with its parity alone. Leaves nothing on the device."""
    started = time.perf_counter()
    provider = Provider.of(name, case, options.checkpointing)
    row: dict[str, Any] = {"provider": name, "checkpointing": provider.checkpointing}
    row["parity"] = _parity(provider, case, options, folder)
    if name.partition(":")[0] in case.inexact:
        row["inexact"] = case.inexact[name.partition(":")[0]]
    torch.compiler.reset()
    clean(device_of(options))
    row["seconds"] = {"parity": time.perf_counter() - started}
    return row


def measure(row: dict[str, Any], case: Case, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The row that `check` made, where its parity is not red with its figures; with --profile, with its profile."""
    if row["parity"]["red"] and "inexact" not in row:
        return row
    device, started = device_of(options), time.perf_counter()
    provider = Provider.of(row["provider"], case, options.checkpointing)
    model = build(provider, case, folder / "model", device)
    row["seconds"]["load"] = time.perf_counter() - started
    optimizer = optimizer_of(provider, model)
    total = options.warmup + options.steps
    inputs = batches(case, options, total, options.batch, seed=options.seed)
    if not provider.ours:
        inputs = [for_transformers(model, batch) for batch in inputs]
    step = step_of(provider, model, optimizer, inputs[0])
    marks, losses = [], []
    for i, batch in enumerate(inputs):
        if i == options.warmup:
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            row["seconds"]["warmup"] = time.perf_counter() - started - row["seconds"]["load"]
            marks.append(now(device))
        losses.append(step(**batch))
        if i == 0:
            row["first_gradient_norm"] = first_gradient_norm(optimizer)
        if i >= options.warmup:
            marks.append(now(device))
    milliseconds = elapsed(marks)
    row["losses"] = torch.stack(losses).tolist()
    row["seconds"]["steps"] = sum(milliseconds) / 1e3
    row["step_ms"] = milliseconds
    row["tokens_per_s"] = options.batch * options.seq / statistics.median(milliseconds) * 1e3
    if device == "cuda":
        row["peak_gib"] = peak_bytes() / GIB
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
        if pinned := torch.cuda.host_memory_stats().get("allocated_bytes.peak"):
            row["pinned_gib"] = pinned / GIB
    if not provider.ours and "num_local_experts" in case.config:
        row["experts"] = model.config._experts_implementation
    if options.profile:
        children.tell(folder, row)
        started = time.perf_counter()
        row["profile"] = profile(provider, case, options, model, optimizer, step, inputs[0], row)
        row["seconds"]["profile"] = time.perf_counter() - started
    return row


def _parity(provider: Provider, case: Case, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What the provider computes with the shallow model, what it should, and what is wrong with it, in words."""
    device = device_of(options)
    model = build(provider, case, folder / "parity", device, shallow=True)
    expected = torch.load(parity_file(options, folder), map_location=device)
    found = probe(model, expected["inputs"] if provider.ours else for_transformers(model, expected["inputs"]))
    return {
        "logits_error": typical_error(found["logits"], expected["exact"]["logits"]),
        **{key: found[key] for key in ("loss", "gradient_norm")},
        "in_fp32": {key: expected["exact"][key] for key in ("loss", "gradient_norm")},
        "errors_of_transformers_in_bf16": expected["errors_in_bf16"],
        "red": disagreement(found, expected, LOGITS_FACTOR if provider.ours else PEERS_LOGITS_FACTOR),
    }


def now(device: str) -> Any:
    """A mark on the device's own clock: steps stay queued behind one another, as in training."""
    if device != "cuda":
        return time.perf_counter()
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def elapsed(marks: Sequence[Any]) -> list[float]:
    """Milliseconds between neighbouring marks."""
    if isinstance(marks[0], float):
        return [(end - start) * 1e3 for start, end in itertools.pairwise(marks)]
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]
