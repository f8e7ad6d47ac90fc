"""Reads the profiler's trace of one training step: time by op, and what holds the memory at its peak.

`events` are the traceEvents of a Chrome trace. profile.py leaves marks in it, whose names are parts between bars:
`module|PATH` spans a module's call, `kept|PATH|ADDRESS` says that autograd keeps the storage at ADDRESS,
`gradient|NAME|ADDRESS` that it is a gradient.
"""

import bisect
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = Mapping[str, Any]
_PRODUCTS = frozenset(
    {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "_grouped_mm", "_scaled_mm", "mkldnn_linear"}
)
_OPS = (
    # Names of our kernels that are said in few files come first: several ops make a norm's output anew. A pattern
    # that begins with ^ is for the kernel's own name, which stands in front.
    ("norms", r"^(forward|backward)(_wide)?_kernel\b|^sum_parts_kernel\b"),
    ("attention backward", r"^_(dq|dkdv)_kernel\b|bprop|_flash_attention.*backward|_attention_backward|fmha.*bwd"
                           r"|(ScaledDotProduct|Flash|flex_attention)\w*Backward|cudnn::fusion::(compute_dot|convert_dq)"),
    ("attention forward", r"sdpa|fmha|scaled_dot_product|flash_attention|\b_Flash\b|flex_attention"),
    ("optimizer", r"Optimizer\.step|FusedOptimizer|[Aa]dam_?[Ww]"),
    ("rope", r"[Rr]ope|[Rr]otary"),
    ("cross entropy rows", r"[Cc]ross_?[Ee]ntropy|log_?softmax|nll_loss|Logprobs"),
    ("embedding", r"[Ee]mbedding"),
    ("norms", r"[Nn]orm"),
    ("routing", r"_Route|_Combine|[Tt]op_?[Kk]|_spread_kernel|_combine_kernel|_count_kernel|_place_kernel"),
    ("products", r"^_(rows|outer)_kernel[\s\S]*[Ee]xpert|[Gg]rouped_?[Mm]|GroupProblemShape"),
    ("gated units", r"[Gg]lu\b|GLU|[Uu]nit|[Ss]i[Ll][Uu]|[Gg][Ee][Ll][Uu]|[Ss]wi|[Gg]ated|MLP|\bmlp\b|[Ee]xpert"
                    r"|[Aa]ctivat"),
    ("products", r"nvjet|gemm|cutlass|cublas|splitK"),
    ("copies, casts, fills", r"[Cc]opy|Memcpy|Memset|[Ff]ill|zero_|aten::to\b|aten::cat\b|CatArray"),
    ("additions", r"aten::add_?\b|AddBackward|CUDAFunctor_add"),
)  # fmt: skip
"""What is found first, in a kernel's name and those of the ops around it, is the op whose time it is."""
NAME_LENGTH = 100
"""Of kernels' names in results: those of templates are longer."""
_OPS_FOUND = tuple((op, re.compile(pattern)) for op, pattern in _OPS)


@dataclass
class Work:
    """Calls of one op on the device (on a CPU: in it). detail: the shape of a product, or of "other" which op.

    count: of calls, of which one may run several kernels: a product's cuBLAS kernel has a fill of its workspace in
    front, or a sum behind. ms: of all of these. flops: of the calls. kernels: their names, and how often each ran.
    """

    op: str
    detail: str = ""
    count: int = 0
    ms: float = 0.0
    flops: float = 0.0
    kernels: dict[str, int] = field(default_factory=dict)


@dataclass
class Times:
    """work: by op and detail, the longest first. busy_ms: in which something ran. between_ms: from the first kernel
    to the last, in which nothing ran. launches, waits: calls of the host that start work, and that wait for it."""

    work: list[Work] = field(default_factory=list)
    busy_ms: float = 0.0
    between_ms: float = 0.0
    launches: int = 0
    waits: int = 0


@dataclass
class Held:
    """Bytes of the peak by who holds them. op: for what; detail: which module or op."""

    what: str
    detail: str
    bytes: int = 0
    count: int = 0


class _Spans:
    """Who was running at a time, on a thread."""

    def __init__(self, events: Sequence[Event]):
        spans = [e for e in events if e.get("ph") == "X" and e.get("cat") in ("cpu_op", "user_annotation")]
        self.by_id = {e["args"]["External id"]: e for e in spans if "External id" in e.get("args", {})}
        self.threads: dict[Any, tuple[list[float], list[Event], list[int]]] = {}
        self.place: dict[int, tuple[Any, int]] = {}
        for event in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
            starts, inside, parents = self.threads.setdefault(event["tid"], ([], [], []))
            parent = len(inside) - 1
            while parent >= 0 and _end(inside[parent]) < _end(event):
                parent = parents[parent]
            self.place[id(event)] = event["tid"], len(inside)
            starts.append(event["ts"])
            inside.append(event)
            parents.append(parent)

    def around(self, thread: Any, time: float) -> list[Event]:
        """The spans on `thread` that hold `time`, the innermost first."""
        starts, inside, _ = self.threads.get(thread, ([], [], []))
        i = bisect.bisect_right(starts, time) - 1
        return [e for e in self._up(thread, i) if _end(e) >= time] if inside else []

    def above(self, event: Event) -> list[Event]:
        """The event and the spans that hold it, the innermost first."""
        return list(self._up(*self.place[id(event)]))

    def _up(self, thread: Any, i: int) -> Iterator[Event]:
        _, inside, parents = self.threads[thread]
        while i >= 0:
            yield inside[i]
            i = parents[i]

    def own_times(self) -> Iterator[tuple[Event, float]]:
        """The ops, with the microseconds that no span inside them has."""
        for _, inside, parents in self.threads.values():
            own = [event["dur"] for event in inside]
            for event, parent in zip(inside, parents, strict=True):
                if parent >= 0:
                    own[parent] -= event["dur"]
            yield from ((e, max(t, 0.0)) for e, t in zip(inside, own, strict=True) if e["cat"] == "cpu_op")


def _end(event: Event) -> float:
    return event["ts"] + event["dur"]


def times(events: Sequence[Event]) -> Times:
    """Time by op: of the kernels, or where there is none, as on a CPU, of the ops themselves."""
    spans, found = _Spans(events), Times()
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    calls = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    by_correlation = {e["args"]["correlation"]: e for e in calls if "correlation" in e.get("args", {})}
    pieces: list[tuple[str, list[Event], float]] = []
    for kernel in kernels:
        call = by_correlation.get(kernel["args"].get("correlation"))
        chain = spans.around(call["tid"], call["ts"]) if call else []
        if not chain and (op := spans.by_id.get(kernel["args"].get("External id"))):
            chain = spans.above(op)
        pieces.append((kernel["name"], chain, kernel["dur"]))
    if not kernels:
        pieces = [(event["name"], spans.above(event), own) for event, own in spans.own_times()]
    work: dict[tuple[str, str], Work] = {}
    counted: set[tuple[str, int]] = set()
    for name, chain, microseconds in pieces:
        what, detail, flops, caller = classify(name, chain)
        entry = work.setdefault((what, detail), Work(what, detail))
        if caller is None or (what, id(caller)) not in counted:
            entry.count += 1
            entry.flops += flops
            counted.add((what, id(caller)))
        entry.ms += microseconds / 1e3
        entry.kernels[name[:NAME_LENGTH]] = entry.kernels.get(name[:NAME_LENGTH], 0) + 1
    found.work = sorted(work.values(), key=lambda w: -w.ms)
    found.busy_ms = _union(kernels) / 1e3 if kernels else sum(w.ms for w in found.work)
    if kernels:
        found.between_ms = (max(map(_end, kernels)) - min(e["ts"] for e in kernels)) / 1e3 - found.busy_ms
    found.launches = sum(bool(re.search(r"Launch|Memcpy\w*Async|Memset\w*Async", e["name"])) for e in calls)
    found.waits = sum(bool(re.search(r"Synchronize|Memcpy$", e["name"])) for e in calls)
    return found


def classify(name: str, chain: Sequence[Event]) -> tuple[str, str, float, Event | None]:
    """(op, detail, FLOP, caller) of what is called `name` and was started within `chain`, the innermost first.

    caller: the event whose kernels together are one call of the op and do its FLOP, where the names say so the
    outermost that is of the op; None: a kernel that nobody around is known of.
    """
    ops = [e for e in chain if e["cat"] == "cpu_op" or e["name"].startswith("Optimizer.")]
    names = [e["name"].removeprefix("autograd::engine::evaluate_function: ") for e in ops]
    for event in ops:
        if event["name"].removeprefix("aten::") in _PRODUCTS and (product := _product(event)):
            return "products", *product, event
    # A copy within a norm is the norm's, a norm within a unit is a norm.
    text = "\n".join([name, *names, *_module(chain)])
    innermost = chain[0] if chain else None
    for op, pattern in _OPS_FOUND:
        if pattern.search(text):
            outermost = next((e for e, n in zip(ops[::-1], names[::-1], strict=True) if pattern.search(n)), innermost)
            return op, "", 0.0, outermost
    aten = next((n for n in names if n.startswith("aten::")), names[0] if names else name)
    return "other", aten[:60], 0.0, innermost


def _module(chain: Sequence[Event]) -> list[str]:
    """The path of the module that started a kernel itself, outside of any op, as fused layers do."""
    return [e["name"].split("|")[1] for e in chain[:1] if e["name"].startswith("module|")]


def _product(event: Event) -> tuple[str, float] | None:
    """The shape of a product, as "rows x inner x columns", and its FLOP; None where they were not recorded."""
    dims = [d for d in event.get("args", {}).get("Input Dims", []) if len(d) in (2, 3)]
    if event["name"].removeprefix("aten::").startswith(("addmm", "baddbmm")) and len(dims) > 2:
        dims = dims[1:]
    if len(dims) < 2:
        return None
    a, b = dims[:2]
    if event["name"].endswith("mkldnn_linear"):
        a, b = [math.prod(a[:-1]), a[-1]], b[::-1]
    if len(a) == 3 and len(b) == 3:
        return f"{a[0]} x {a[1]} x {a[2]} x {b[2]}", 2.0 * math.prod(a) * b[2]
    experts = f" of {b[0]} experts" if len(b) == 3 else ""
    return f"{a[-2]} x {a[-1]} x {b[-1]}{experts}", 2.0 * a[-2] * a[-1] * b[-1]


def _union(kernels: Sequence[Event]) -> float:
    """Microseconds in which at least one of them ran."""
    total, until = 0.0, -math.inf
    for kernel in sorted(kernels, key=lambda e: e["ts"]):
        total += max(0.0, _end(kernel) - max(kernel["ts"], until))
        until = max(until, _end(kernel))
    return total


@dataclass
class _Block:
    address: int
    bytes: int
    thread: Any
    start: float
    end: float = math.inf
    what: str = ""
    detail: str = ""


def memory(events: Sequence[Event], before: Mapping[str, int], *, cuda: bool) -> tuple[int, list[Held]]:
    """The bytes allocated at the peak, and who holds them; those sum to the peak.

    before: what was there before the step, by what it is for: its bytes. On a card the trace says how much was there
    in all, and what `before` does not name is "other, before the step".
    """
    changes = [e for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == int(cuda)]
    changes.sort(key=lambda e: e["ts"])
    old = sum(before.values())
    if cuda and changes:
        old = changes[0]["args"]["Total Allocated"] - changes[0]["args"]["Bytes"]
    blocks, live = [], {}
    total = peak = old
    peak_at, released, released_at_peak = -math.inf, 0, 0
    for event in changes:
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        total += size
        if size > 0:
            live[address] = _Block(address, size, event["tid"], event["ts"])
            blocks.append(live[address])
        elif address in live:
            live.pop(address).end = event["ts"]
        else:
            released -= size
        if total > peak:
            peak, peak_at, released_at_peak = total, event["ts"], released
    at_peak = [block for block in blocks if block.start <= peak_at < block.end]
    _mark(at_peak, events)
    spans = _Spans(events)
    held: dict[tuple[str, str], Held] = {}
    for what, size in {**before, "other, before the step": old - sum(before.values()) - released_at_peak}.items():
        if size:
            held[what, ""] = Held(what, "", size, 1)
    for block in at_peak:
        key = (block.what, block.detail) if block.what else ("workspaces and other", _site(spans, block))
        entry = held.setdefault(key, Held(*key))
        entry.bytes += block.bytes
        entry.count += 1
    return peak, sorted(held.values(), key=lambda h: -h.bytes)


def _mark(blocks: Sequence[_Block], events: Sequence[Event]) -> None:
    """Names the blocks that marks speak of: a gradient, else what is kept by the first that kept it."""
    at: dict[int, list[_Block]] = defaultdict(list)
    for block in blocks:
        at[block.address].append(block)
    marks = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(("kept|", "gradient|"))]
    for event in sorted(marks, key=lambda e: e["ts"]):
        kind, path, address = event["name"].split("|")
        for block in at[int(address)]:
            if block.start <= event["ts"] <= block.end and (kind == "gradient" or not block.what):
                block.what = "gradients" if kind == "gradient" else "kept for backward"
                block.detail = "" if kind == "gradient" else without_numbers(path)


def without_numbers(path: str) -> str:
    """layers.3.mlp -> layers.*.mlp"""
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def _site(spans: _Spans, block: _Block) -> str:
    """Where a block was allocated: in which module's forward, or by which function of backward."""
    for event in spans.around(block.thread, block.start):
        if event["name"].startswith("module|"):
            return without_numbers(event["name"].split("|")[1]) or "model"
        if event["name"].startswith(("autograd::engine", "Optimizer.")):
            return event["name"].removeprefix("autograd::engine::evaluate_function: ").split("#")[0]
    return "the step"
