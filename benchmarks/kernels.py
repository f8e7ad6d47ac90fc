"""The fused ops beside their peers: device time, memory and error, in one process on one GPU.

    python -m benchmarks.kernels --out kernels.json
    python -m benchmarks.kernels --ops attention,moe_experts --baselines eager,FlexAttention
    python -m benchmarks.kernels --dry

Inputs, the eager form and the reference of an op are those of its tests (tests/kernels/ops); the shapes and the peers
are in the table OPS at the end of this file. All baselines of an op get the same inputs in the same layout.

Parity comes first: outputs and every gradient of ours are compared with fp64 by the rule of the tests. They may err as
much as the eager op of the same dtype. If ours fails, nothing of the op is timed and the exit status is 1. A peer whose
error is above CALLED_WRONGLY computes something else and is not timed.

"of copy": the fewest bytes that forward and backward can move, over what a large copy moves in that time. "TFLOP/s"
counts the necessary operations only. "error / eager's": the largest ratio of rms errors over outputs and
gradients. "peak MiB" is beyond the inputs, gradients included.
"""

import argparse
import functools
import inspect
import itertools
import os
import random
import statistics
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import harness
from benchmarks.harness import Record, Row, summary
from ligermodels import kernels
from tests.kernels import judge
from tests.kernels.cases import Case, Maker
from tests.kernels.ops import OPS as TESTED
from tests.kernels.ops.delta import terms_of
from tests.kernels.ops.mlp import eager_unit

Call = Callable[..., Any]
Peers = Callable[[Case], Mapping[str, Call]]
OURS = "ligermodels"
NEEDS_GPU = ("torch.compile", "Liger", "FlexAttention", "Flash", "cuDNN", "fla")
"""A dry run skips the baselines whose names begin like this."""
CALLED_WRONGLY = 0.05
"""Relative rms error of a peer that computes something else: a handful of bf16 roundings stay below 0.02."""
ROTATED_BYTES = 2**30
"""A call is timed on several copies of its inputs, 1 GiB in all, so that no input is in the L2 cache."""
IGNORED = -100


@dataclass(frozen=True)
class Op:
    """An op and its shapes.

    tested: its name in the table of the tests. shapes: keyword arguments of `make` on a GPU, dry: on a CPU.
    peers: of a case, {name: call with the case's tensors and options}. make: by default that of the tests.
    bytes, flops: of a shape, of forward and backward. largest: {size: the most of it that is checked in fp64}.
    forms: of the eager form, those that are baselines.
    """

    tested: str
    shapes: Sequence[dict[str, Any]]
    dry: Sequence[dict[str, Any]]
    peers: Peers
    make: Callable[..., Case] | None = None
    bytes: Callable[..., float] | None = None
    flops: Callable[..., float] | None = None
    largest: Mapping[str, int] = field(default_factory=dict)
    forms: Sequence[str] = ("eager", "torch.compile")

    def case(self, maker: Maker, shape: Mapping[str, Any]) -> Case:
        maker.strided = False
        maker.lead = lambda rows: (rows,)  # type: ignore[method-assign]
        maker.ids = lambda ids: maker.of(ids, train=False, dtype=torch.int64)  # type: ignore[method-assign]
        plain = maker.labels
        maker.labels = lambda *sizes, ignored=None: plain(*sizes, ignored=ignored or 0.0)  # type: ignore[method-assign]
        return (self.make or TESTED[self.tested].make)(maker, **shape)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", type=harness.names(*OPS), default="all", help="names with commas between them")
    parser.add_argument("--baselines", help="beginnings of the names of peers; default all")


def measure(options: argparse.Namespace, record: Record) -> None:
    def wanted(name: str) -> bool:
        if options.dry and name.startswith(NEEDS_GPU):
            return False
        return not options.baselines or name.startswith(tuple(options.baselines.split(",")))

    record["ceilings"] = ceilings(options.device)
    record["failed parity"], record["red"] = [], []
    for name in options.ops:
        torch.compiler.reset()  # each op has its own count of recompilations
        for shape in OPS[name].dry if options.dry else OPS[name].shapes:
            what = {"shape": ", ".join(f"{key} {value}" for key, value in shape.items())}
            errors, wrong = parity(OPS[name], shape, options.device, wanted)
            record["failed parity"] += [{"op": name, **what, "baseline": key, "note": wrong[key]} for key in wrong]
            if ours := [reason for key, reason in wrong.items() if key.startswith(OURS)]:
                record["red"].append(f"{name}: {ours[0]}")
                record[name] = []
                break
            rows = times(OPS[name], shape, options.device, set(errors) - set(wrong), record["ceilings"]["copy TB/s"])
            for row in rows:
                record.setdefault(name, []).append({**what, **row, "error / eager's": errors[row["baseline"]]})
                harness.announce({"op": name, **record[name][-1]})
            harness.free(options.device)


def calls(op: Op, case: Case) -> dict[str, Call]:
    """Every baseline of a case, ours and the eager form first."""
    tested = TESTED[op.tested]
    compiled = torch.compile(tested.eager, fullgraph=True, dynamic=False)
    forms = {"eager": tested.eager, "torch.compile": compiled}
    return {OURS: tested.call, **{name: forms[name] for name in op.forms}, **op.peers(case)}


def parity(
    op: Op, shape: Mapping[str, Any], device: str, wanted: Callable[[str], bool]
) -> tuple[dict[str, float], dict[str, str]]:
    """({baseline: its error over eager's}, {baseline: why it is not timed})."""
    shape = {name: min(size, op.largest[name]) if name in op.largest else size for name, size in shape.items()}
    errors, wrong = {}, {}
    try:
        judge.judge_again(op.tested, lambda maker: op.case(maker, shape), 0, torch.bfloat16, device)
    except AssertionError as error:
        return {}, {OURS: summary(error)}
    torch.manual_seed(0)
    case, upstream = op.case(Maker(random.Random(0), torch.bfloat16, device), shape), {}
    baselines = {name: call for name, call in calls(op, case).items() if name.startswith(OURS) or wanted(name)}
    exact = judge.run(TESTED[op.tested].reference, case, upstream, torch.float64)
    eager = judge.run(TESTED[op.tested].eager, case, _copies(upstream))
    for name, call in baselines.items():
        try:
            found = judge.run(call, Case(_copies(case.tensors), case.options), _copies(upstream))
        except Exception as error:
            traceback.print_exc()
            wrong[name] = summary(error)
            continue
        off = {what: _rms(x.double() - exact[what]) for what, x in found.items() if what in exact}
        whole = [what for what in off if exact[what].dim()]  # the error of one number says little
        errors[name] = max(off[what] / max(_rms(eager[what].double() - exact[what]), 1e-30) for what in whole)
        relative = max(off[what] / max(_rms(exact[what]), 1e-30) for what in off)
        if not relative <= CALLED_WRONGLY:
            wrong[name] = f"relative rms error {relative:.3g}: computes something else"
    return errors, wrong


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leaves of their own: some peers write over their inputs."""
    return {name: x.detach().clone().requires_grad_(x.requires_grad) for name, x in tensors.items()}


def _rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


# Times


def times(op: Op, shape: Mapping[str, Any], device: str, wanted: set[str], copy: float) -> list[Row]:
    """A row of times and memory for each baseline. copy: TB/s of a large copy on this device."""
    torch.manual_seed(0)
    case = op.case(Maker(random.Random(0), torch.bfloat16, device), shape)
    baselines = calls(op, case)
    outputs = judge.outputs_of(baselines[OURS], case.tensors, case.options).values()
    upstream = [torch.ones_like(y) if y.dim() == 0 else torch.randn_like(y) for y in outputs]
    del outputs
    nbytes = sum(x.nbytes for x in (*case.tensors.values(), *upstream))
    copies = max(1, min(64, ROTATED_BYTES // nbytes)) if device == "cuda" else 1
    inputs = [(case.tensors, upstream)]
    inputs += [(_copies(case.tensors), [x.clone() for x in upstream]) for _ in range(copies - 1)]
    rows: list[Row] = []
    for name in (name for name in baselines if name in wanted):

        def forward(tensors: dict[str, Tensor], call: Call = baselines[name]) -> tuple[Tensor, ...]:
            return tuple(judge.outputs_of(call, tensors, case.options).values())

        def full(tensors: dict[str, Tensor], upstream: list[Tensor], run: Call = forward) -> object:
            """Outputs and gradients."""
            outputs = run(tensors)
            return outputs, torch.autograd.grad(outputs, [x for x in tensors.values() if x.requires_grad], upstream)

        try:
            ms, _ = milliseconds([functools.partial(forward, tensors) for tensors, _ in inputs], device)
            both, captured = milliseconds([functools.partial(full, *each) for each in inputs], device)
            row: Row = {"forward ms": ms, "fwd + bwd ms": both}
            if op.bytes is not None:
                row["of copy"] = op.bytes(**shape) / both * 1e-9 / copy
            if op.flops is not None:
                row["TFLOP/s"] = op.flops(**shape) / both * 1e-9
            row["peak MiB"] = peak_mib(lambda: full(*inputs[0]), device)
            if not captured:
                row["time"] = "not captured: the host's is included"
        except Exception as error:
            traceback.print_exc()
            row = {"note": summary(error)}
        rows.append({"baseline": name, **row})
    return rows


def milliseconds(calls: Sequence[Callable[[], object]], device: str) -> tuple[float, bool]:
    """(median time of a call, whether it was captured).

    All calls are captured in one CUDA graph, and the time is that of a replay over their number: what the host needs to
    launch is not in it. A call that synchronises cannot be captured, and is timed as it runs, the host's time included.
    """
    calls[0]()  # compiles kernels, creates handles
    if device != "cuda":
        return harness.timed(calls[0], device)[0] * 1e3, True
    replay = None if _synchronises(calls[0]) else _captured(calls)
    count, run = (1, calls[0]) if replay is None else (len(calls), replay)
    lead = torch.empty(2**30, dtype=torch.int8, device=device)
    times: list[float] = []
    while len(times) < 4 or (sum(times) < 50 and len(times) < 50):
        lead.zero_()  # clears the L2 cache, and runs for longer than the host needs to queue the replay
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:]) / count, replay is not None


def _captured(calls: Sequence[Callable[[], object]]) -> Callable[[], object] | None:
    """A replay of all calls as one CUDA graph; None where a call cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            results = [call() for call in calls]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # torch.AcceleratorError, such as of a launch on another stream
        traceback.print_exc()
        torch.cuda.synchronize()
        return None
    del results  # kept until here, so that each call writes to memory of its own
    return graph.replay


def _synchronises(call: Callable[[], object]) -> bool:
    """Whether the call makes the host wait for the device."""
    with warnings.catch_warnings(action="ignore"):  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def peak_mib(call: Callable[[], object], device: str) -> float | None:
    """MiB allocated in the call beyond its inputs, its results included. None on a CPU."""
    if device != "cuda":
        return None
    harness.free(device)
    harness.reset_peak(device)
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def ceilings(device: str) -> dict[str, float]:
    """What this GPU does at best, measured now: TB/s of a large copy, TFLOP/s of a bf16 GEMM of 8192 x 8192 x 8192."""
    elements, n = (2**31, 8192) if device == "cuda" else (2**20, 256)
    source = torch.zeros(elements, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    # In pieces: one copy of 1 GiB and more runs at 2.7 TB/s in a graph on an H200, pieces of 256 MiB at 4.2.
    pieces = list(zip(source.chunk(8), target.chunk(8), strict=True))
    copy, _ = milliseconds([lambda: [to.copy_(piece) for piece, to in pieces]], device)
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    gemm, _ = milliseconds([lambda: a @ b], device)
    return {"copy TB/s": 2 * source.nbytes / copy * 1e-9, "GEMM TFLOP/s": 2 * n**3 / gemm * 1e-9}


# Peers


def liger(name: str) -> Any:
    """An autograd.Function of Liger's."""
    return getattr(__import__("liger_kernel.ops", fromlist=[name]), name)


def rms_norms(case: Case) -> dict[str, Call]:
    # eps, offset, casting mode, in place: dx goes where dy was, the default of LigerRMSNorm
    return {
        "F.rms_norm": lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-6),
        "Liger": lambda x, weight: liger("LigerRMSNormFunction").apply(x, weight, 1e-6, 0.0, "llama", True),
    }


def linear_cross_entropies(case: Case) -> dict[str, Call]:
    def of_liger(x: Tensor, weight: Tensor, labels: Tensor, accum_dtype: Any = None) -> Tensor:
        # bias, class weight, ignore_index, z-loss, smoothing, reduction, softcap, return_z_loss, accum_dtype
        options = (None, None, IGNORED, 0.0, 0.0, "mean", None, False, accum_dtype)
        return liger("LigerFusedLinearCrossEntropyFunction").apply(x, weight, labels, *options)[0]

    valid = int((case.tensors["labels"] != IGNORED).sum())
    return {
        f"{OURS}, num_valid": functools.partial(kernels.linear_cross_entropy, num_valid=valid),
        "Liger, accum_dtype=fp32": functools.partial(of_liger, accum_dtype=torch.float32),
        "Liger": of_liger,
    }


def moes(case: Case) -> dict[str, Call]:
    def of_liger(x: Tensor, weights: Tensor, experts: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> Tensor:
        return liger("LigerFusedMoEFunction").apply(x, gate_up_proj, down_proj, experts.int(), weights)

    def of_transformers(
        x: Tensor, weights: Tensor, experts: Tensor, gate_up_proj: Tensor, down_proj: Tensor, activation: Any = "silu",
        **biases: Tensor,
    ) -> Tensor:  # fmt: skip
        from transformers.integrations.moe import grouped_mm_experts_forward

        layer: Any = SimpleNamespace(
            gate_up_proj=gate_up_proj, down_proj=down_proj, num_experts=len(down_proj), has_gate=True,
            has_bias=bool(biases), is_transposed=False, has_post_expert_norm=False, _is_expert_parallel=False, **biases,
        )  # fmt: skip
        layer._apply_gate = lambda gate_up: eager_unit(*gate_up.chunk(2, -1), activation)
        return grouped_mm_experts_forward(layer, x, experts.long(), weights)

    has_biases = "down_proj_bias" in case.tensors  # Liger's has neither biases nor the clamped unit
    return {"transformers, grouped_mm": of_transformers} | ({} if has_biases else {"Liger": of_liger})


DOCUMENTS = (0, 1, 4, 10, 12, 21, 25, 52, 64)
"""Where the documents of a packed row begin and end, in 64ths of it."""
QUARTERS = (0, 16, 32, 48, 64)


def attention_case(
    maker: Maker, *, batch: int, length: int, heads: int, kv_heads: int, dim: int,
    packed: Sequence[int] = (), **options: Any,
) -> Case:  # fmt: skip
    tensors = {"q": maker(batch, length, heads, dim)} | {n: maker(batch, length, kv_heads, dim) for n in "kv"}
    if packed:
        ends = [length * end // 64 for end in packed]
        options |= {"cu_seqlens": torch.tensor(ends, dtype=torch.int32, device=maker.device)}
        options |= {"max_seqlen": max(end - start for start, end in itertools.pairwise(ends))}
    return Case(tensors, options, dim, max(length, dim))


def attention_flops(
    *, batch: int, length: int, heads: int, dim: int, packed: Sequence[int] = (), window: int | None = None,
    **others: Any,
) -> float:  # fmt: skip
    """FLOPs over the visible pairs of query and key."""
    ends = [length * end // 64 for end in packed or (0, 64)]
    pairs = 0.0
    for size in (end - start for start, end in itertools.pairwise(ends)):
        seen = min(window or size, size)
        pairs += seen * (seen + 1) / 2 + (size - seen) * seen
    return 14.0 * batch * heads * dim * pairs


def attentions(case: Case) -> dict[str, Call]:
    """As a model does, masks are made once and not per layer: their cost is not in the times."""
    q, bounds = case.tensors["q"], case.options.get("cu_seqlens")
    (batch, length), device = q.shape[:2], q.device
    window, softcap = (case.options.get(name) for name in ("window", "softcap"))
    document = torch.zeros(length, dtype=torch.int64, device=device)
    if bounds is not None:
        document = torch.bucketize(torch.arange(length, device=device), bounds[1:], right=True)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (query >= key) & (document[query] == document[key])
        return seen if window is None else seen & (query - key < window)

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    @functools.cache
    def block_mask() -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        return create_block_mask(sees, batch, None, length, length, device=device.type)

    def flex(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        score = None if softcap is None else capped
        return _flex_attention()(*heads_first, score, block_mask(), enable_gqa=True).transpose(1, 2)

    def sdpa(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)

    def efficient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """With the heads of k and v repeated: this engine does not group them."""
        groups = q.shape[2] // k.shape[2]
        return sdpa(q, *(x.repeat_interleave(groups, 2) for x in (k, v)), backend=SDPBackend.EFFICIENT_ATTENTION)

    def varlen(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        ends = bounds if bounds is not None else length * torch.arange(batch + 1, dtype=torch.int32, device=device)
        # Versions after torch 2.11 accept grouped heads only with this option.
        grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
        sides = (-1 if window is None else window - 1, 0)
        flat = (x.flatten(0, 1) for x in (q, k, v))
        out: Any = varlen_attn(*flat, ends, ends, length, length, window_size=sides, **grouped)
        return out.view(q.shape)

    found: dict[str, Call] = {"FlexAttention": flex}
    if not case.options and q.shape[-1] > 256:  # which the other engines do not take
        found["memory-efficient by SDPA"] = efficient
    elif not case.options:
        found["cuDNN by SDPA"] = functools.partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION)
        found["FlashAttention-2 by SDPA"] = functools.partial(sdpa, backend=SDPBackend.FLASH_ATTENTION)
    elif softcap is None:
        found["FlashAttention-2, varlen_attn"] = varlen
    return found


def sinks_case(maker: Maker, **sizes: Any) -> Case:
    case = attention_case(maker, **sizes)
    return replace(case, tensors=case.tensors | {"sinks": maker(sizes["heads"])})


def attentions_with_sinks(case: Case) -> dict[str, Call]:
    """What people train gpt-oss with. Masks are made once."""
    q, window, bounds = case.tensors["q"], case.options.get("window"), case.options.get("cu_seqlens")
    batch, length, scale = *q.shape[:2], q.shape[3] ** -0.5

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (query >= key) & (document[query] == document[key])
        return seen if window is None else seen & (query - key < window)

    document = torch.zeros(length, dtype=torch.int64, device=q.device)
    if bounds is not None:
        document = torch.bucketize(torch.arange(length, device=q.device), bounds[1:], right=True)

    @functools.cache
    def block_mask() -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        return create_block_mask(sees, batch, None, length, length, device=q.device.type)

    @functools.cache
    def mask() -> Tensor:
        at = torch.arange(length, device=q.device)
        hidden = ~sees(at, at, at[:, None], at)
        return torch.zeros(1, 1, length, length, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf"))

    def flex(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, **options: Any) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return _flex_attention_with_sinks()(*heads_first, sinks, block_mask()).transpose(1, 2)

    def of_transformers(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, **options: Any) -> Tensor:
        from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

        layer: Any = SimpleNamespace(num_key_value_groups=q.shape[2] // k.shape[2], sinks=sinks, training=False)
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return eager_attention_forward(layer, *heads_first, mask(), scaling=scale)[0]

    return {"FlexAttention": flex, "transformers, eager": of_transformers}


@functools.cache
def _flex_attention_with_sinks() -> Call:
    from torch.nn.attention.flex_attention import flex_attention

    def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Any) -> Tensor:
        out, lse = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_lse=True)
        return (out * torch.sigmoid(lse - sinks[:, None])[..., None]).to(q.dtype)

    return torch.compile(with_sinks, dynamic=False)


@functools.cache
def _flex_attention() -> Call:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def delta_rule_case(maker: Maker, *, batch: int, length: int, key_heads: int, heads: int, dim: int) -> Case:
    """Decays and write strengths as a newly initialised Gated DeltaNet has them."""
    gates = torch.randn(2, batch, length, heads, device=maker.device)
    decay = torch.empty(heads, device=maker.device).uniform_(0.01, 16)
    tensors = {
        **{name: maker(batch, length, key_heads, dim) for name in "qk"}, "v": maker(batch, length, heads, dim),
        "g": maker.of(-decay * F.softplus(gates[0] + 1), dtype=torch.float32), "beta": maker.of(gates[1].sigmoid()),
    }  # fmt: skip
    return Case(tensors, {}, dim * dim, terms_of(dim))


def delta_rules(case: Case) -> dict[str, Call]:
    """fla's function, which looks for its backends at each call, in the backward too."""

    def of_fla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, backends: str = "") -> tuple[Tensor, Tensor]:
        for name in ("TILELANG", "FLASH_QLA"):
            os.environ[f"FLA_{name}"] = str(int(name in backends))
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True)

    names = {"fla, Triton": "", "fla, TileLang": "TILELANG", "FlashQLA": "FLASH_QLA"}
    return {name: functools.partial(of_fla, backends=backends) for name, backends in names.items()}


# The table


def _delta_rule_bytes(batch: int, length: int, key_heads: int, heads: int, dim: int) -> float:
    """The forward reads q, k, v and writes out; the backward reads these and writes three gradients."""
    return 2.0 * batch * length * dim * (6 * key_heads + 5 * heads)


V = 128256
_HEADS, _FEW = dict(heads=32, kv_heads=8, dim=128), dict(heads=4, kv_heads=2, dim=16)
_GPT_OSS: list[dict[str, Any]] = [
    dict(batch=batch, length=length, heads=64, kv_heads=8, dim=64, **packed, **window)
    for batch, length, packed in ((4, 4096, {}), (1, 16384, dict(packed=DOCUMENTS)))
    for window in ({}, dict(window=128))
]  # fmt: skip
_TINY_GPT_OSS: list[dict[str, Any]] = [
    dict(batch=2, length=24, **_FEW), dict(batch=2, length=24, **_FEW, window=8),
    dict(batch=1, length=64, **_FEW, packed=DOCUMENTS), dict(batch=1, length=64, **_FEW, packed=DOCUMENTS, window=8),
]  # fmt: skip
OPS: dict[str, Op] = {
    "rms_norm": Op(
        "rms_norm", [dict(rows=16384, width=n) for n in (2048, 4096, 8192)], [dict(rows=5, width=48)], rms_norms,
        bytes=lambda rows, width: 10.0 * rows * width,
    ),
    "linear_cross_entropy": Op(
        "linear_cross_entropy",
        [dict(rows=8192, hidden=2048, vocab=V), dict(rows=8192, hidden=4096, vocab=V),
         dict(rows=16384, hidden=4096, vocab=V, ignored=0.7)],
        [dict(rows=9, hidden=32, vocab=131), dict(rows=33, hidden=32, vocab=131, ignored=0.7)],
        linear_cross_entropies, flops=lambda rows, hidden, vocab, ignored=0.0: (
            6.0 * (1 - ignored) * rows * hidden * vocab
        ), largest={"rows": 4096},
    ),
    "attention": Op(
        "attention",
        [
            dict(batch=8, length=2048, heads=32, kv_heads=8, dim=64), dict(batch=4, length=4096, **_HEADS),
            dict(batch=4, length=4096, heads=8, kv_heads=4, dim=256, softcap=50.0),  # Gemma 2
            dict(batch=2, length=8192, **_HEADS, window=1024), dict(batch=1, length=16384, **_HEADS, packed=DOCUMENTS),
        ],
        [
            dict(batch=2, length=24, **_FEW), dict(batch=1, length=24, **_FEW, softcap=5.0),
            dict(batch=1, length=24, **_FEW, window=8), dict(batch=1, length=64, **_FEW, packed=DOCUMENTS),
        ],
        attentions, make=attention_case, flops=attention_flops, largest={"batch": 2, "length": 2048},
        forms=(),  # it makes its mask at each call
    ),
    "attention_512": Op(  # Gemma 4's blocks without a window
        "attention",
        [dict(batch=1, length=length, heads=heads, kv_heads=kv_heads, dim=512) for length, heads, kv_heads in (
            (1024, 16, 4), (2048, 16, 4), (4096, 16, 4), (8192, 16, 4), (16384, 16, 4), (32768, 16, 4),
            (16384, 16, 2), (16384, 32, 4),
        )] + [dict(batch=1, length=16384, heads=16, kv_heads=4, dim=512, packed=QUARTERS)],
        [dict(batch=1, length=64, heads=4, kv_heads=2, dim=512)],
        attentions, make=attention_case, flops=attention_flops, largest={"length": 4096}, forms=(),
    ),
    "attention_sinks": Op(  # gpt-oss: every other block has a window
        "attention with sinks", _GPT_OSS, _TINY_GPT_OSS, attentions_with_sinks, make=sinks_case, flops=attention_flops,
        largest={"batch": 1, "length": 2048}, forms=(),
    ),
    "attention_no_sinks": Op(  # what the former adds to
        "attention", _GPT_OSS, _TINY_GPT_OSS, attentions, make=attention_case, flops=attention_flops,
        largest={"batch": 1, "length": 2048}, forms=(),
    ),
    "gated_delta_rule": Op(
        "gated_delta_rule",
        [dict(batch=n, length=t, key_heads=16, heads=32, dim=128) for n, t in ((1, 16384), (1, 32768), (4, 4096))],
        [dict(batch=1, length=70, key_heads=2, heads=4, dim=16)], delta_rules, make=delta_rule_case,
        bytes=_delta_rule_bytes, largest={"batch": 1, "length": 512}, forms=(),  # its loop over chunks is for tests
    ),
    "moe_experts": Op(
        "moe_experts",
        [dict(rows=rows, hidden=hidden, inner=inner, experts=experts, top_k=top_k)
         for hidden, inner, experts, top_k in (
             (2048, 768, 128, 8), (2048, 512, 256, 8), (2880, 2880, 32, 4), (2048, 7168, 8, 2),
         ) for rows in (16384, 4096)],
        [dict(rows=40, hidden=32, inner=48, experts=4, top_k=2)], moes,
        flops=lambda rows, hidden, inner, experts, top_k: 18.0 * rows * top_k * hidden * inner,
        largest={"rows": 4096}, forms=("eager",),
    ),
    "moe_experts_biased": Op(  # gpt-oss-20b
        "moe_experts with biases",
        [dict(rows=rows, hidden=2880, inner=2880, experts=32, top_k=4, activation=kernels.ClampedSwiGLU(1.702, 7.0))
         for rows in (16384, 4096)],
        [dict(rows=40, hidden=32, inner=48, experts=4, top_k=2, activation=kernels.ClampedSwiGLU(1.702, 7.0))], moes,
        flops=lambda rows, hidden, inner, top_k, **rest: 18.0 * rows * top_k * hidden * inner,
        largest={"rows": 4096}, forms=("eager",),
    ),
}  # fmt: skip
"""Sizes are Llama's where nothing else is said; those of the gated delta rule are Qwen3.5's, 4B and 9B; those
of experts are Qwen3-30B-A3B's, Qwen3.5-35B-A3B's, gpt-oss-20b's, and Mixtral's with half its width; moe_experts
has gpt-oss-20b's without biases and with silu."""


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.main(__doc__, arguments, add_options, measure)


if __name__ == "__main__":
    sys.exit(main())
