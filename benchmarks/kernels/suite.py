"""Which op is run on which shapes, and how: parity of all first, then the times of what passed."""

import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.common import Error, Timer
from benchmarks.kernels.attention import attention_case
from benchmarks.kernels.case import Bound, Case, Place, Provider, Tensors, exact_results
from benchmarks.kernels.losses import cross_entropy_case, linear_cross_entropy_case
from benchmarks.kernels.moe import moe_case
from benchmarks.kernels.pointwise import (
    activation_case,
    add_rms_norm_case,
    glu_case,
    layer_norm_case,
    rms_norm_case,
    rope_case,
)

PEERS = {
    "eager": None,
    "compile": None,
    "torch": None,
    "transformers": "transformers",
    "liger": "liger_kernel.ops",
    "cce": "cut_cross_entropy",
}
"""Peer -> the module that it needs beyond torch."""
OUTRIGHT_WRONG = 0.05
"""Relative rms error above which a peer was called wrongly: a handful of bf16 roundings stay below 0.02."""

CASES: dict[str, Callable[..., Case]] = {
    "rms_norm": rms_norm_case,
    "add_rms_norm": add_rms_norm_case,
    "layer_norm": layer_norm_case,
    "rope": rope_case,
    "glu": glu_case,
    "activate": activation_case,
    "cross_entropy": cross_entropy_case,
    "linear_cross_entropy": linear_cross_entropy_case,
    "attention": attention_case,
    "moe": moe_case,
}
"""Op -> the function that makes a case of it from (place, peers, *the numbers below)."""

V = 128256
# batch, query heads, key heads, length, head dim, window, softcap, layout
SOFTCAP = (4, 8, 4, 4096, 256, None, 50.0)
WINDOW = (2, 32, 8, 8192, 128, 1024)
PACKED = (1, 32, 8, 16384, 128, None, None, "packed")
PADDED = (4, 32, 8, 4096, 128, None, None, "padded")
SHAPES: dict[str, dict[str, list[tuple]]] = {
    "full": {
        "rms_norm": [(16384, 2048), (16384, 4096), (16384, 8192)],
        "add_rms_norm": [(16384, 2048), (16384, 4096), (16384, 8192)],
        "layer_norm": [(21904, 1280), (16384, 4096)],
        "rope": [(4, 4096, 32, 8, 128)],
        "glu": [(16384, 8192), (16384, 14336)],
        "activate": [(21904, 5120)],
        "cross_entropy": [(8192, V)],
        "linear_cross_entropy": [(8192, 2048, V), (8192, 4096, V), (16384, 4096, V), (16384, 4096, V, 0.7)],
        "attention": [
            (8, 32, 8, 2048, 64),
            (4, 32, 8, 4096, 128),
            (4, 32, 32, 4096, 96),
            SOFTCAP,
            WINDOW,
            PACKED,
            PADDED,
        ],
        "moe": [(16384, 2048, 7168, 8, 2), (16384, 2048, 768, 64, 4)],
    },
    "quick": {
        "rms_norm": [(16384, 2048), (16384, 4096)],
        "add_rms_norm": [(16384, 4096)],
        "layer_norm": [(21904, 1280)],
        "rope": [(4, 4096, 32, 8, 128)],
        "glu": [(16384, 14336)],
        "activate": [(21904, 5120)],
        "cross_entropy": [(8192, V)],
        "linear_cross_entropy": [(8192, 2048, V), (8192, 4096, V), (8192, 4096, V, 0.7)],
        "attention": [(4, 32, 8, 4096, 128), SOFTCAP, WINDOW, PACKED, PADDED],
        "moe": [(16384, 2048, 7168, 8, 2), (16384, 2048, 768, 64, 4)],
    },
    "tiny": {
        "rms_norm": [(16, 256)],
        "add_rms_norm": [(16, 256)],
        "layer_norm": [(16, 256)],
        "rope": [(1, 16, 4, 2, 64)],
        "glu": [(16, 256)],
        "activate": [(16, 256)],
        "cross_entropy": [(16, 512)],
        "linear_cross_entropy": [(16, 64, 512)],
        "attention": [(1, 4, 2, 128, 64)],
        "moe": [(16, 64, 128, 4, 2)],
    },
    "dry": {
        "rms_norm": [(5, 48)],
        "add_rms_norm": [(5, 48)],
        "layer_norm": [(5, 48)],
        "rope": [(2, 7, 4, 2, 16)],
        "glu": [(5, 24)],
        "activate": [(5, 24)],
        "cross_entropy": [(9, 131)],
        "linear_cross_entropy": [(9, 32, 131), (33, 32, 131, 0.7)],
        "attention": [
            (2, 4, 2, 24, 16),
            (1, 4, 2, 24, 16, None, 5.0),
            (1, 4, 2, 24, 16, 8),
            (1, 4, 2, 64, 16, None, None, "packed"),
            (4, 4, 2, 24, 16, None, None, "padded"),
        ],
        "moe": [(40, 32, 48, 4, 2), (40, 32, 16, 8, 3)],
    },
}
"""`tiny` is what the host cost is taken on. `full` and `quick` are Llama's sizes; the softcap's are Gemma 2's,
those of the mixture half a Mixtral's, and a fine-grained one. 21904 tokens are four pictures of 1036 x 1036 in
Qwen2-VL's tower."""


def check(case: Case) -> tuple[list[dict[str, Any]], set[str]]:
    """(what each provider's results err by, the providers that may not be timed)."""
    torch.manual_seed(0)
    inputs, cotangents = (case.make_small or case.make)()
    exact = exact_results(case, inputs, cotangents)
    eager_errors: dict[str, Error] = {}
    rows, refused = [], set()
    eager = Provider("eager", case.eager)
    for provider in [eager, *(provider for provider in case.providers if provider.name != "eager")]:
        try:
            errors = _errors(Bound(case, provider, inputs, cotangents), exact)
        except Exception as error:
            if provider is eager:
                raise
            traceback.print_exc()
            rows.append({"provider": provider.name, "why": _summary(error)})
            refused.add(provider.name)
            continue
        if provider is eager:
            eager_errors = errors
        for name, error in errors.items():
            why = ""
            if provider.ours:
                floor = case.loss_floor if name == "loss" else 0.0
                why = error.worse_than(eager_errors[name], slack=provider.slack, floor=floor)
            elif not error.relative <= OUTRIGHT_WRONG:
                why = f"relative rms error {error.relative:.3g}: computes something else"
            if why:
                refused.add(provider.name)
            rows.append({"provider": provider.name, "tensor": name, "why": why, **asdict(error)})
            rows[-1]["rms_over_eager"] = error.rms / eager_errors[name].rms if eager_errors[name].rms else None
    for row in rows:
        row.update(op=case.op, shape=case.shape)
    return rows, refused


def _errors(bound: Bound, exact: Tensors) -> dict[str, Error]:
    return {name: Error.of(result.detach(), exact[name]) for name, result in bound.results().items()}


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


def measure(case: Case, timer: Timer, limits: Mapping[str, float], skip: set[str]) -> Iterator[dict[str, Any]]:
    """One row per provider of the case."""
    torch.manual_seed(0)
    inputs, cotangents = case.make()
    rate = limits["copy_tb_per_s" if case.unit == "bytes" else "matmul_bf16_tflop_per_s"] * 1e9
    for provider in case.providers:
        row: dict[str, Any] = {
            "op": case.op,
            "shape": case.shape,
            "provider": provider.name,
            "ours": provider.ours,
        }
        if provider.name in skip:
            yield {**row, "note": "not timed: see parity"}
            continue
        try:
            bound = Bound(case, provider, inputs, cotangents)
            forward = timer.time(bound.forward, bound.restore)
            full = timer.time(bound.full, bound.restore)
            row.update(forward_ms=asdict(forward), full_ms=asdict(full))
            row["peak_mib"] = timer.peak_mib(bound.full, bound.restore)
            if case.forward_work is not None:
                row["forward_share"] = case.forward_work / forward.median / rate
            row["full_share"] = case.full_work / full.median / rate
            row["unit"] = case.unit
            if case.unit == "operations":
                row["tflop_per_s"] = _tflop_per_s(case, forward.median, full.median)
        except Exception as error:
            traceback.print_exc()
            row = {**row, "note": _summary(error)}
        yield row


def _tflop_per_s(case: Case, forward_ms: float, full_ms: float) -> dict[str, float]:
    """Of forward + backward, and of each where the forward's work is known; backward is what forward leaves."""
    rates = {"both": case.full_work / full_ms * 1e-9}
    if case.forward_work is not None:
        rates["forward"] = case.forward_work / forward_ms * 1e-9
        rates["backward"] = (case.full_work - case.forward_work) / max(full_ms - forward_ms, 1e-6) * 1e-9
    return rates


def host_cost(case: Case, timer: Timer, skip: set[str]) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    inputs, cotangents = case.make()
    for provider in case.providers:
        if provider.name in skip:
            continue
        row: dict[str, Any] = {"op": case.op, "provider": provider.name, "ours": provider.ours}
        try:
            bound = Bound(case, provider, inputs, cotangents)
            row.update(forward_us=timer.host_us(bound.forward), full_us=timer.host_us(bound.full))
        except Exception as error:
            traceback.print_exc()
            row["note"] = _summary(error)
        yield row


def run(
    ops: Sequence[str], shapes: str, peers: set[str], place: Place, timer: Timer, limits: Mapping[str, float]
) -> dict[str, Any]:
    """Parity of every op, then the times of those that passed. `red` lists the ops that did not."""
    record: dict[str, Any] = {"parity": [], "rows": [], "host": [], "red": []}
    for op in ops:
        started = time.perf_counter()
        torch._dynamo.reset()  # or the shapes of all ops share one limit on recompilations
        cases = [CASES[op](place, peers, *numbers) for numbers in SHAPES[shapes][op]]
        refused = {}
        for case in cases:
            rows, refused[case.shape] = check(case)
            record["parity"] += rows
            _collect()
        ours = {provider.name for case in cases for provider in case.providers if provider.ours}
        everywhere = set().union(*refused.values())
        if everywhere & ours:
            record["red"].append(op)
            continue
        rows, host = [], []
        for case in cases:
            rows += measure(case, timer, limits, refused[case.shape])
            _collect()
        for numbers in SHAPES["tiny"][op]:
            host += host_cost(CASES[op](place, peers, *numbers), timer, everywhere)
        if any(row["ours"] and "note" in row for row in (*rows, *host)):
            record["red"].append(op)
        record["rows"] += rows
        record["host"] += host
        print(f"{op}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    return record


def _collect() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
