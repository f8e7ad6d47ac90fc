"""The longest sequence that a provider trains on, alone in its batch, in so many GiB of the card.

A trial is two training steps with the optimizer at one length, or one where a step is long, since the optimizer's
states are there from the first trial. Lengths are multiples of 1024. What a sequence needs grows nearly evenly with its
length once workspaces have their full size, so that two that fit say where the limit must be; bisection goes on from
there, until what fits and what does not lie 1024 apart, or a 64th of the length. After a failure the provider goes on
in the same process, when all of the trial's memory has come back. After each trial the row is told, so that a search
that is ended keeps what it has found: its length is then one that fits, and a longer one may.
"""

import argparse
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.train_cases import Case
from benchmarks.train_step import children
from benchmarks.train_step.memory import GIB, clean
from benchmarks.train_step.parity import batches, device_of
from benchmarks.train_step.providers import Provider, build, optimizer_of, step_of

GRAIN = 1024
FIRST = 16
"""Grains of the first trial."""
FINEST = 64
"""Of a length: the share up to which it is found, where that is more than a grain."""
USABLE = 0.985
"""Of the limit, what tensors are expected to fill: the rest is lost between them."""
LONG_STEP_S = 5.0
"""A trial's second step is left out where the first took longer: both need the same memory, and take the same time."""


@dataclass(frozen=True)
class Trial:
    """peak_gib: allocated; None where it did not fit. seconds: of its last step."""

    length: int
    peak_gib: float | None
    seconds: float | None = None


def longest(name: str, case: Case, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The provider's row, computed in this process."""
    device, grain = device_of(options), GRAIN
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.longest * GIB / total))
    else:
        grain = 32
        options.most = options.most or 4 * grain  # nothing ends it
    provider = Provider.of(name, case, options.checkpointing)
    model = build(provider, case, folder / "model", device)
    optimizer = optimizer_of(provider, model)
    step = step_of(provider, model, optimizer, {})
    trials: list[Trial] = []

    def trial(length: int) -> Trial:
        trials.append(_trial(step, model, optimizer, case, options, length))
        children.tell(folder, row_of(name, provider.checkpointing, trials))
        return trials[-1]

    search(trial, options.longest, grain=grain, most=options.most)
    return row_of(name, provider.checkpointing, trials)


def row_of(name: str, checkpointing: str, trials: Sequence[Trial]) -> dict[str, Any]:
    """The row of the provider of that name after these trials."""
    best = max((t for t in trials if t.peak_gib is not None), key=lambda t: t.length, default=None)
    row: dict[str, Any] = {"provider": name, "checkpointing": checkpointing}
    row["trials"] = [asdict(trial) for trial in trials]
    if best is None:
        return {**row, "note": f"not even {min(trial.length for trial in trials)} tokens fit"}
    return {
        **row,
        "length": best.length,
        "peak_gib": best.peak_gib,
        "tokens_per_s": best.length / (best.seconds or 1),
    }


def search(
    trial: Callable[[int], Trial], limit_gib: float, *, grain: int = GRAIN, most: int | None = None
) -> list[Trial]:
    """The trials made, of which the longest that fits is at most a `finest` below one that does not, or `most`."""
    trials = [trial(FIRST * grain if most is None else min(FIRST * grain, most))]
    while True:
        fits = sorted((t for t in trials if t.peak_gib is not None), key=lambda t: t.length)
        low = fits[-1].length if fits else 0
        high = min((t.length for t in trials if t.peak_gib is None), default=None)
        if high is None and most is not None:
            high = most + grain
        finest = max(grain, low // FINEST // grain * grain)
        if high is not None and (high - low <= finest or high <= grain):
            return trials
        length = _guess(fits, limit_gib)
        if high is not None and not low < length < high:
            length = (low + high) // 2
        length = max(length // grain * grain, low + finest)
        trials.append(trial(min(length, high - grain) if high is not None else length))


def _guess(fits: list[Trial], limit_gib: float) -> int:
    """Where a line through the two longest trials that fit meets what is usable; at most 16 times the longest. Twice
    the longest where there is no second, 0 where there is none."""
    if len(fits) < 2:
        return 2 * fits[0].length if fits else 0
    (x, a), (y, b) = ((t.length, t.peak_gib or 0.0) for t in fits[-2:])
    if b <= a:
        return 2 * y
    return min(int(y + (USABLE * limit_gib - b) * (y - x) / (b - a)), 16 * y)


def _trial(
    step: Callable[..., Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    case: Case,
    options: argparse.Namespace,
    length: int,
) -> Trial:
    device = device_of(options)
    settings = argparse.Namespace(**{**vars(options), "seq": length})
    found = Trial(length, None)
    try:
        (inputs,) = batches(case, settings, 1, 1, seed=options.seed)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = _seconds(step, inputs, device)
        if seconds < LONG_STEP_S:
            seconds = _seconds(step, inputs, device)
        found = Trial(length, torch.cuda.max_memory_allocated() / GIB if device == "cuda" else 0.0, seconds)
    except RuntimeError as error:  # torch.OutOfMemoryError is one, and so are those of cuBLAS and cuDNN
        if not re.search("out of memory|alloc_failed", str(error), re.IGNORECASE):
            raise
    inputs = {}
    optimizer.zero_grad(set_to_none=True)  # which also ends a backward that broke off, where it takes the steps
    clean(device)
    if device == "cuda":
        states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        expected = sum(x.nbytes for x in (*model.parameters(), *model.buffers(), *states))
        left = torch.cuda.memory_allocated()
        if left > 1.05 * expected + 2**28:
            raise RuntimeError(f"{left} bytes are still allocated after a trial, of which {expected} should be")
    return found


def _seconds(step: Callable[..., Tensor], inputs: Mapping[str, Tensor], device: str) -> float:
    start = time.perf_counter()
    step(**inputs)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
