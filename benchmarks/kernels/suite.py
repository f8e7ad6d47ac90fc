"""Which op is run on which shapes, and how: parity of all first, then the times of what passed."""

import contextlib
import functools
import gc
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.common import Error, Job, Timer
from benchmarks.kernels.attention import attention_case
from benchmarks.kernels.case import UNITS, Bound, Case, Place, Provider, Tensors, exact_results
from benchmarks.kernels.divergences import jsd_case, kl_div_case, linear_jsd_case
from benchmarks.kernels.lookup import embedding_case, int2_matmul_case
from benchmarks.kernels.losses import cross_entropy_case, linear_cross_entropy_case, linear_logprobs_case
from benchmarks.kernels.moe import moe_case
from benchmarks.kernels.pointwise import (
    activation_case,
    add_rms_norm_case,
    glu_case,
    layer_norm_case,
    rms_norm_case,
    rope_case,
)
from benchmarks.kernels.preference import preference_case
from benchmarks.kernels.turn import Turn

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

PREFERENCES = ("linear_dpo", "linear_orpo", "linear_cpo", "linear_simpo", "linear_kto")
CASES: dict[str, Callable[..., Case]] = {
    "rms_norm": rms_norm_case,
    "add_rms_norm": add_rms_norm_case,
    "layer_norm": layer_norm_case,
    "rope": rope_case,
    "glu": glu_case,
    "activate": activation_case,
    "cross_entropy": cross_entropy_case,
    "linear_cross_entropy": linear_cross_entropy_case,
    "linear_logprobs": linear_logprobs_case,
    "kl_div": kl_div_case,
    "jsd": jsd_case,
    "linear_jsd": linear_jsd_case,
    **{op: functools.partial(preference_case, op=op) for op in PREFERENCES},
    "embedding": embedding_case,
    "int2_matmul": int2_matmul_case,
    "attention": attention_case,
    "moe": moe_case,
}
"""Op -> the function that makes a case of it from (place, peers, *the numbers below)."""
GROUPS: dict[str, tuple[str, ...]] = {
    "norms": ("rms_norm", "add_rms_norm", "layer_norm"),
    "units": ("rope", "glu", "activate"),
    "losses": ("cross_entropy", "linear_cross_entropy", "linear_logprobs"),
    "divergences": ("kl_div", "jsd", "linear_jsd"),
    "preference": PREFERENCES,
    "lookup": ("embedding", "int2_matmul"),
    "blocks": ("attention", "moe"),
}

V = 128256
# batch, query heads, key heads, length, head dim, window, softcap, layout
SOFTCAP = (4, 8, 4, 4096, 256, None, 50.0)
WINDOW = (2, 32, 8, 8192, 128, 1024)
PACKED = (1, 32, 8, 16384, 128, None, None, "packed")
PADDED = (4, 32, 8, 4096, 128, None, None, "padded")
SHAPES: dict[str, dict[str, list[tuple]]] = {
    "full": {
        "rms_norm": [(16384, 2048), (16384, 4096), (16384, 8192), (2048, 32768)],
        "add_rms_norm": [(16384, 2048), (16384, 4096), (16384, 8192)],
        "layer_norm": [(21904, 1280), (16384, 4096)],
        "rope": [(4, 4096, 32, 8, 128)],
        "glu": [(16384, 8192), (16384, 14336), (16384, 14336, "gelu_tanh")],
        "activate": [(21904, 5120)],
        "cross_entropy": [(16384, 32000), (8192, 50257), (8192, V), (8192, V, False), (4096, 262144)],
        "linear_cross_entropy": [(8192, 2048, V), (8192, 4096, V), (16384, 4096, V), (16384, 4096, V, 0.7)],
        "linear_logprobs": [(4096, 4096, V)],
        "kl_div": [(16384, 32000), (4096, V)],
        "jsd": [(16384, 32000), (4096, V)],
        "linear_jsd": [(1024, 2048, 4096, V), (4096, 2048, 4096, V)],
        **{op: [(4, 1024, 4096, V)] for op in PREFERENCES},
        "embedding": [(16384, 4096, V), (16384, 4096, V, True), (16384, 768, 32768)],
        "int2_matmul": [(1, 14336, 4096), (16, 14336, 4096), (512, 14336, 4096), (4096, 14336, 4096)],
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
        "layer_norm": [(16384, 4096)],
        "rope": [(4, 4096, 32, 8, 128)],
        "glu": [(16384, 14336)],
        "activate": [(21904, 5120)],
        "cross_entropy": [(8192, V)],
        "linear_cross_entropy": [(8192, 4096, V), (8192, 4096, V, 0.7)],
        "linear_logprobs": [(4096, 4096, V)],
        "kl_div": [(4096, V)],
        "jsd": [(4096, V)],
        "linear_jsd": [(4096, 2048, 4096, V)],
        **{op: [(4, 1024, 4096, V)] for op in PREFERENCES},
        "embedding": [(16384, 4096, V, True)],
        "int2_matmul": [(1, 14336, 4096), (4096, 14336, 4096)],
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
        "linear_logprobs": [(16, 64, 512)],
        "kl_div": [(16, 512)],
        "jsd": [(16, 512)],
        "linear_jsd": [(16, 64, 64, 512)],
        **{op: [(4, 4, 64, 512)] for op in PREFERENCES},
        "embedding": [(16, 64, 512)],
        "int2_matmul": [(1, 256, 512)],
        "attention": [(1, 4, 2, 128, 64)],
        "moe": [(16, 64, 128, 4, 2)],
    },
    "dry": {
        "rms_norm": [(5, 48)],
        "add_rms_norm": [(5, 48)],
        "layer_norm": [(5, 48)],
        "rope": [(2, 7, 4, 2, 16)],
        "glu": [(5, 24), (5, 24, "gelu_tanh")],
        "activate": [(5, 24)],
        "cross_entropy": [(9, 131), (9, 131, False)],
        "linear_cross_entropy": [(9, 32, 131), (33, 32, 131, 0.7)],
        "linear_logprobs": [(9, 32, 131)],
        "kl_div": [(9, 131)],
        "jsd": [(9, 131)],
        "linear_jsd": [(9, 32, 48, 131)],
        **{op: [(4, 5, 32, 131)] for op in PREFERENCES},
        "embedding": [(9, 24, 50), (9, 24, 50, True)],
        "int2_matmul": [(1, 16, 64), (20, 16, 64)],
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
those of the mixture half a Mixtral's, and a fine-grained one. 21904 tokens are four images of 1036 x 1036 in
Qwen2-VL's tower. 32000, 50257, 128256 and 262144 are the vocabularies of Llama 2, GPT-2, Llama 3 and Gemma 3."""


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
    """One row per provider of the case, and first one of the matrix products that are its ceiling, if it has such."""
    torch.manual_seed(0)
    inputs, cotangents = case.make()
    copies = [(inputs, cotangents)]
    touched = sum(x.nbytes for x in (*inputs.values(), *cotangents))
    if "bytes" in case.unit:
        touched = int(case.forward_work or case.full_work)  # not all of the inputs, which have those of all providers
    for _ in range(1, timer.copies(touched)):
        copies.append(({name: x.clone() for name, x in inputs.items()}, tuple(x.clone() for x in cotangents)))
    rate = limits[UNITS[case.unit]] * 1e9
    least = {"forward": case.forward_work and case.forward_work / rate, "full": case.full_work / rate}
    if case.products is not None:
        name, call = case.products
        products = timer.device([Job(lambda: call(inputs))])
        least["full"] = products.median
        yield {"op": case.op, "shape": case.shape, "provider": name, "ours": False, "full_ms": asdict(products)}
    for provider in case.providers:
        row: dict[str, Any] = {"op": case.op, "shape": case.shape, "provider": provider.name, "ours": provider.ours}
        if provider.name in skip:
            yield {**row, "note": "not timed: see parity"}
            continue
        try:
            row.update(_measured(case, [Bound(case, provider, *copy) for copy in copies], timer, least))
        except Exception as error:
            traceback.print_exc()
            row["note"] = _summary(error)
        yield row


def _measured(case: Case, bound: Sequence[Bound], timer: Timer, least: Mapping[str, float | None]) -> dict[str, Any]:
    """Times of the device and of the wall, memory, and the shares of what the device could do in `least` ms."""
    row: dict[str, Any] = {"unit": case.unit, "forward_work": case.forward_work}
    passes = {"forward": [Job(b.forward, b.restore) for b in bound]}
    if case.leaves:
        row["full_work"] = case.full_work
        passes["full"] = [Job(b.full, b.restore) for b in bound]
    for name, jobs in passes.items():
        time = timer.device(jobs)
        row[f"{name}_ms"], row[f"{name}_wall_ms"] = asdict(time), asdict(timer.wall(jobs))
        if least[name] is not None:
            row[f"{name}_share"] = least[name] / time.median
    row["peak_mib"] = timer.peak_mib(jobs[0])
    if not case.leaves:
        return row
    forward, full = (row[f"{name}_ms"]["median"] for name in passes)
    if least["forward"] is not None and full > forward:
        row["backward_share"] = (least["full"] - least["forward"]) / (full - forward)
    if case.unit == "operations":
        row["tflop_per_s"] = _tflop_per_s(case, forward, full)
    return row


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
            row["forward_us"] = timer.host_us(bound.forward)
            if case.leaves:
                row["full_us"] = timer.host_us(bound.full)
        except Exception as error:
            traceback.print_exc()
            row["note"] = _summary(error)
        yield row


@dataclass
class Checked:
    """An op whose parity is known. refused: of each shape, the providers that may not be timed; red: ours are among
    them. tiny: what the host's cost is taken on."""

    op: str
    cases: list[Case]
    refused: dict[str, set[str]]
    parity: list[dict[str, Any]]
    red: bool
    tiny: list[Case]
    seconds: float


def checked(op: str, shapes: str, peers: set[str], place: Place) -> Checked:
    started = time.perf_counter()
    cases = [CASES[op](place, peers, *numbers) for numbers in SHAPES[shapes][op]]
    refused, parity = {}, []
    for case in cases:
        rows, refused[case.shape] = check(case)
        parity += rows
        _collect()
    ours = {provider.name for case in cases for provider in case.providers if provider.ours}
    # Without torch.compile, to which another shape is seconds of compiling.
    few = SHAPES["dry" if shapes == "dry" else "tiny"][op][:1]
    tiny = [CASES[op](place, peers - {"compile"}, *numbers) for numbers in few]
    red = bool(set().union(*refused.values()) & ours)
    for case in tiny if not red else []:
        _compile(case)
    return Checked(op, cases, refused, parity, red, tiny, time.perf_counter() - started)


def _compile(case: Case) -> None:
    """Calls each provider once. Why one cannot be called is said where it is timed."""
    inputs, cotangents = case.make()
    for provider in case.providers:
        with contextlib.suppress(Exception):
            Bound(case, provider, inputs, cotangents).full()


def run(
    ops: Sequence[str],
    shapes: str,
    peers: set[str],
    place: Place,
    timer: Timer,
    limits: Callable[[], Mapping[str, float]],
    *,
    turn: Turn | None = None,
    deadline: float = math.inf,
    save: Callable[[Mapping[str, Any]], None] = lambda record: None,
) -> dict[str, Any]:
    """Parity of every op, then the times of those that passed. `red` lists the ops that did not.

    limits: measures the ceilings. turn: all parity first, beside other runs, then all times, alone. deadline: of
    time.monotonic(), after which no op is checked and no shape timed: they are `left_out`. save: called with the record
    after each op.
    """
    record: dict[str, Any] = {"parity": [], "rows": [], "host": [], "red": [], "seconds": {}, "left_out": []}
    torch._dynamo.config.recompile_limit = 64  # all shapes of an op share it, and with a turn all ops

    def all_checked() -> Iterator[Checked]:
        torch._dynamo.reset()
        for op in ops:
            if time.monotonic() > deadline:
                record["left_out"].append(op)
                continue
            if turn is None:
                torch._dynamo.reset()
            yield checked(op, shapes, peers, place)

    found: Iterable[Checked] = all_checked()
    if turn is not None:
        with turn.together():
            found = list(found)
    with (turn or Turn()).alone():
        record["ceilings"] = dict(limits())
        for op in found:
            _timed(op, timer, record, deadline)
            save(record)
    return record


def _timed(checked: Checked, timer: Timer, record: dict[str, Any], deadline: float) -> None:
    """Adds to the record what was found out about the op."""
    started, op = time.perf_counter(), checked.op
    record["parity"] += checked.parity
    if checked.red:
        record["red"].append(op)
        return
    rows: list[dict[str, Any]] = []
    host: list[dict[str, Any]] = []
    for case in checked.cases:
        if time.monotonic() > deadline:
            record["left_out"].append(f"{op} {case.shape}")
            continue
        rows += measure(case, timer, record["ceilings"], checked.refused[case.shape])
        _collect()
    for case in checked.tiny if rows else []:
        host += host_cost(case, timer, set().union(*checked.refused.values()))
    if any(row["ours"] and "note" in row for row in (*rows, *host)):
        record["red"].append(op)
    record["rows"] += rows
    record["host"] += host
    record["seconds"][op] = checked.seconds + time.perf_counter() - started
    times = f"parity and compiling {checked.seconds:.0f} s, times {time.perf_counter() - started:.0f} s"
    print(f"{op}: {times}", file=sys.stderr, flush=True)


def _collect() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
