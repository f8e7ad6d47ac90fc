"""One step under torch's profiler: where its time goes beside what the ops must cost, and who holds the peak's memory.

Time is that of the kernels, so what the profiler costs the host does not count; the step's own length and what the
host needs for it are measured without it. What the kernels leave of the step is said twice, and neither is exact:
`rest_ms` is the median of the timed steps, which were queued one behind the other, less the kernels of one that began
on an idle card, which was cooler, so that its clock may have been higher; `between_ms` is what lies between the
kernels of the profiled step, and longer than without the profiler where the host is behind. Memory is what the
allocator told the profiler, every block of it: of those that are there at the peak, marks say which are gradients and
which autograd keeps, and of the others the trace says in which module or function they were made.
"""

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, record_function

from benchmarks.common import Timer, ceilings
from benchmarks.train_cases import Case
from benchmarks.train_step import trace
from benchmarks.train_step.floors import Sizes, floors_ms, kept_bytes
from benchmarks.train_step.memory import clean, graph_bytes, peak_bytes
from benchmarks.train_step.parity import config_of, device_of
from benchmarks.train_step.providers import Provider, step_of

HOST_STEPS = 3
OPAQUE = {"captured": "a graph's kernels say no op", "compile": "hooks would have it compiled again"}
"""Words of providers that cannot be looked into -> why."""


def profile(
    provider: Provider,
    case: Case,
    options: argparse.Namespace,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Callable[..., Tensor],
    inputs: Mapping[str, Tensor],
    row: Mapping[str, Any],
) -> dict[str, Any]:
    """The profile of a provider whose steps have been timed."""
    device, tokens = device_of(options), options.batch * options.seq
    host = statistics.median(_host_ms(step, inputs, device) for _ in range(HOST_STEPS))
    opaque = next((why for word, why in OPAQUE.items() if word in provider.words), "")
    before = _before(model, optimizer, inputs, device)
    if not opaque:
        step = step_of(provider, model, optimizer, inputs, lambda: _mark_gradients(model))
    clean(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    events = record(model, lambda: step(**inputs), device, marked=not opaque)
    found = trace.times(events)
    peak, held = trace.memory(events, before, cuda=device == "cuda")
    if device == "cuda":
        whole, live = graph_bytes()
        peak += whole - live  # its kernels use what is not allocated
        held += [trace.Held("CUDA graph", "free for its kernels", whole - live, 1)] if whole > live else []
    step_ms = statistics.median(row["step_ms"])
    profile: dict[str, Any] = {
        "note": opaque,
        "step_ms": step_ms,
        "busy_ms": found.busy_ms,
        "rest_ms": step_ms - found.busy_ms,
        "between_ms": found.between_ms,
        "host_ms": host,
        "launches": found.launches,
        "waits": max(0, found.waits - 1),  # one is ours, at the end
        "ops": [asdict(work) for work in found.work],
        "peak_bytes": peak,
        "held": [asdict(entry) for entry in held],
    }
    if device == "cuda":
        profile["allocators_peak_bytes"] = peak_bytes()
    if case.image is None:
        sizes = Sizes.of(config_of(case, options))
        blocks = sum(h.bytes for h in held if h.what == "kept for backward" and "layers.*" in h.detail)
        profile["kept_bytes_per_token_and_block"] = blocks / tokens / len(sizes.windows)
        profile["least_kept_bytes_per_token_and_block"] = kept_bytes(sizes, provider.checkpointing.partition("-")[0])
        optimizer_bytes = _optimizer_bytes(optimizer)
        profile["ceilings"] = ceilings(Timer(device))
        profile["floors_ms"] = floors_ms(sizes, options.batch, options.seq, optimizer_bytes, profile["ceilings"])
    return profile


def record(model: nn.Module, step: Callable[[], object], device: str, *, marked: bool) -> list[trace.Event]:
    """The events of the trace of one step; marked: with marks for trace.py."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with (
        torch.profiler.profile(
            activities=activities, record_shapes=True, profile_memory=True, acc_events=True
        ) as found,
        _marks(model) if marked else contextlib.nullcontext(),
    ):
        step()
        if device == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


@contextlib.contextmanager
def _marks(model: nn.Module) -> Iterator[None]:
    """Marks the calls of the model's modules, and what autograd keeps in them.

    Not by hooks on the modules: fused layers make way for hooks.
    """
    names = {id(module): name for name, module in model.named_modules()}
    call, inside = nn.Module.__call__, [""]

    def marked(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if id(module) not in names:
            return call(module, *args, **kwargs)
        inside.append(names[id(module)])
        try:
            with record_function(f"module|{inside[-1]}"):
                return call(module, *args, **kwargs)
        finally:
            inside.pop()

    def keep(tensor: Tensor) -> Tensor:
        _mark("kept", inside[-1], tensor)
        return tensor

    nn.Module.__call__ = marked  # type: ignore[method-assign]
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]


def _mark(kind: str, name: str, tensor: Tensor) -> None:
    with record_function(f"{kind}|{name}|{tensor.untyped_storage().data_ptr()}"):
        pass


def _mark_gradients(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            _mark("gradient", name, parameter.grad)


def _before(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Mapping[str, Tensor], device: str
) -> dict[str, int]:
    """What is there before a step: bytes by what they are for, each storage once, and the first that has it."""
    states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    seen: set[int] = set()
    held = {}
    for name, tensors in {
        "parameters": list(model.parameters()),
        "optimizer states": states,
        "buffers": list(model.buffers()),
        "inputs": list(inputs.values()),
    }.items():
        storages = {x.untyped_storage().data_ptr(): x for x in tensors if x.device.type == device}
        held[name] = sum(x.untyped_storage().nbytes() for at, x in storages.items() if at not in seen)
        seen |= storages.keys()
    if device == "cuda":
        held["CUDA graph"] = graph_bytes()[1]
    return held


def _optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Read and written in a step: weights and states twice, gradients once."""
    total = 0
    for group in optimizer.param_groups:
        for p in group["params"]:
            states = [x for x in optimizer.state[p].values() if isinstance(x, Tensor) and x.numel() == p.numel()]
            total += 3 * p.nbytes + 2 * sum(x.nbytes for x in states)
    return total


def _host_ms(step: Callable[..., Tensor], inputs: Mapping[str, Tensor], device: str) -> float:
    """From an idle device until the host has queued the step. The queue holds about 1000 launches: where a step has
    more and its kernels are slow, part of this is waiting."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step(**inputs)
    return (time.perf_counter() - start) * 1e3
