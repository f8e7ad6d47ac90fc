"""Training on several GPUs of one host: speed, memory and exposed communication, beside transformers with Liger.

    python -m benchmarks.distributed --gpus 4 --trace --out distributed.json --cases "8B 4 x 4096" "8B 1 x 8192, tp"
    python -m benchmarks.distributed --gpus 2 --dry

Each side runs under torchrun, apart from the other, and goes through its cases; after a case that failed or left
memory allocated, fresh processes take the rest. Both sides have the same weights, drawn parameter by parameter, the
same batches, FSDP2 with a group per block, and the same optimizer. The first loss and the first gradient norm of
the two must agree, and so must those of cases that compute the same step in another way, or the case gets no figures
and the exit status is 1. Tokens/s are those of one GPU; time and memory are those of the rank with the most. "exposed
ms" is the time of a step in which communication runs and nothing else does, from a trace of one step. benchmarks.load
measures saving and loading on several GPUs.
"""

import argparse
import faulthandler
import fnmatch
import hashlib
import os
import sys
import traceback
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ligermodels
from benchmarks import harness
from benchmarks.harness import Record, Row, covered
from benchmarks.train_cases import MODELS, Model, changed, theirs, whole_and_layers
from ligermodels.checkpoint import weights
from ligermodels.parallel import make_mesh
from ligermodels.training import AdamW

NAMES = {
    "1B": "llama-3.2-1b",
    "8B": "llama-3.1-8b",
    "70B": "llama-3.1-70b",
    "half 70B": "llama-3.1-70b-40-layers",
    "30B-A3B": "qwen3-30b-a3b",
    "6 layers of 30B-A3B": "qwen3-30b-a3b-6-layers",
    "gpt-oss-20b": "gpt-oss-20b",
    "Gemma-4-31B": "gemma-4-31b",
    "Qwen3-8B": "qwen3-8b",
    "9 layers of Qwen3-8B": "qwen3-8b-9-layers",
    "Qwen3.5-9B": "qwen3.5-9b",
    "8 layers of Qwen3.5-9B": "qwen3.5-9b-8-layers",
}
"""What the names of cases begin with -> the model, or its first layers."""
EXACT = dict(weights="bf16 with masters")
BF16 = dict(weights="bf16", steps=3)
WHOLE = dict(reshard=False)
OFFLOADED = {"recompute": "mlp", "offload": True}
FP8 = "rowwise", "tensorwise"
LONG = dict(batch=1, mesh="cp", weights="bf16", recompute="block")
CASES: dict[str, dict[str, Any]] = {
    "8B 4 x 4096": dict(batch=4, seq=4096),
    "8B 4 x 4096, mlp, whole": dict(batch=4, seq=4096, recompute="mlp", **WHOLE),
    "8B 4 x 4096, whole": dict(batch=4, seq=4096, **WHOLE),
    "8B 4 x 4096, bf16 with masters": dict(batch=4, seq=4096, **EXACT),
    "8B 4 x 4096, bf16 with masters, whole": dict(batch=4, seq=4096, **EXACT, **WHOLE),
    "8B 4 x 4096, bf16, whole": dict(batch=4, seq=4096, **BF16, **WHOLE),
    "8B 4 x 4096, bf16, one GPU": dict(batch=4, seq=4096, alone=True, **BF16),
    **{f"8B 4 x 4096, bf16, {kind}, whole": dict(batch=4, seq=4096, fp8=kind, **BF16, **WHOLE) for kind in FP8},
    "8B 4 x 4096, bf16, mlp, whole": dict(batch=4, seq=4096, recompute="mlp", **BF16, **WHOLE),
    "8B 4 x 4096, bf16, mlp, one GPU": dict(batch=4, seq=4096, recompute="mlp", alone=True, **BF16),
    "8B 2 x 4096": dict(batch=2, seq=4096, peer=True),
    "8B 8 x 4096, block": dict(batch=8, seq=4096, recompute="block", peer=True, steps=3),
    "8B 1 x 32768, block": dict(batch=1, seq=32768, recompute="block", peer=True, steps=2),
    "8B 1 x 32768, mlp": dict(batch=1, seq=32768, recompute="mlp", steps=2),
    "8B 1 x 32768, mlp offloaded": dict(batch=1, seq=32768, recompute=OFFLOADED, steps=2),
    "8B 8 x 4096, mlp": dict(batch=8, seq=4096, recompute="mlp", steps=3),
    "8B 8 x 4096, mlp offloaded": dict(batch=8, seq=4096, recompute=OFFLOADED, steps=3),
    "8B 1 x 8192, tp": dict(batch=1, seq=8192, mesh="tp", **BF16),
    **{f"1B 1 x {n}, cp": dict(seq=n, steps=1 + (n < 2**18), **LONG) for n in (131072, 262144, 524288, 1048576)},
    "70B 1 x 4096, block": dict(batch=1, seq=4096, recompute="block", peer=True, **BF16),
    "half 70B 1 x 4096, block": dict(batch=1, seq=4096, recompute="block", peer=True, **BF16),
    "30B-A3B 4 x 4096, block": dict(batch=4, seq=4096, recompute="block", **BF16),
    "30B-A3B 4 x 4096, block, ep": dict(batch=4, seq=4096, recompute="block", mesh="ep", **BF16),
    "6 layers of 30B-A3B 4 x 4096": dict(batch=4, seq=4096, **BF16),
    "6 layers of 30B-A3B 4 x 4096, whole": dict(batch=4, seq=4096, **BF16, **WHOLE),
    "6 layers of 30B-A3B 4 x 4096, ep": dict(batch=4, seq=4096, mesh="ep", **BF16),
    "6 layers of 30B-A3B 4 x 4096, ep, whole": dict(batch=4, seq=4096, mesh="ep", **BF16, **WHOLE),
    "6 layers of 30B-A3B 4 x 4096, one GPU": dict(batch=4, seq=4096, alone=True, **BF16),
    "gpt-oss-20b 4 x 4096, block": dict(batch=4, seq=4096, recompute="block", **BF16),
    "Gemma-4-31B 4 x 4096, block": dict(batch=4, seq=4096, recompute="block", **BF16),
    **{
        f"{model} 1 x {n}, cp": dict(seq=n, steps=1 + (n < 2**17), **LONG)
        for name, layers in (("Qwen3-8B", 9), ("Qwen3.5-9B", 8))
        for model, lengths in (
            (name, (65536, 131072, 262144, 524288)),
            (f"{layers} layers of {name}", (262144, 524288, 1048576)),
        )
        for n in lengths
    },
}
"""Name, which begins with the model's -> how it runs.

weights: "fp32", the default, with torch's fused AdamW; "bf16 with masters", exact fp32 weights and fp32 moments in our
AdamW; "bf16", with our AdamW, which steps in the backward (the peer's are torch's AdamW, and after the backward).
fp8: the recipe. reshard=False: blocks stay whole between forward and backward. alone: each rank for itself. mesh: the
dimension that all GPUs form. steps=1: one, after a warm-up on its first 8,192 tokens, no trace. peer: transformers with
Liger runs too.
"""
TOLERANCE = 2e-3  # of loss and gradient norm: bf16 forwards of the same weights, which round in other places


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--cases", nargs="*", default=["*"], metavar="CASE", help="or patterns, as in '8B *'")
    parser.add_argument("--trace", action="store_true", help="measure exposed communication")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that a side of a case may take")


def measure(options: argparse.Namespace, record: Record) -> None:
    record |= {"gpus": options.gpus, "rows": [], "red": []}
    if unknown := [pattern for pattern in options.cases if not fnmatch.filter(CASES, pattern)]:
        raise ValueError(f"no case is called {', '.join(unknown)}; known: {', '.join(CASES)}")
    chosen = list(dict.fromkeys(case for pattern in options.cases for case in fnmatch.filter(CASES, pattern)))
    peers = [case for case in chosen if CASES[case].get("peer")]
    found = {"ligermodels": chosen, "hf+liger": peers}
    sides = {side: side_of(side, cases, options) for side, cases in found.items()}
    firsts: dict[tuple[Any, ...], Row] = {}
    for case in chosen:
        rows = [{"case": case, "side": side, **found[case]} for side, found in sides.items() if case in found]
        like = firsts.setdefault(same_step(case), rows[0])
        if why := disagreement(*rows) or disagreement(rows[0], like):
            record["red"].append(f"{case}: {why}")
            rows = [{"case": case, "side": row["side"], "note": "no figures: the sides differ"} for row in rows]
        record["rows"] += rows


def side_of(side: str, cases: Sequence[str], options: argparse.Namespace) -> dict[str, Row]:
    """The row of each case, measured in as few processes as their failures allow."""
    rows: dict[str, Row] = {}
    while left := [case for case in cases if case not in rows]:
        job = {"cases": left, "side": side, "dry": options.dry, "trace": options.trace, "timeout": options.timeout}
        found = harness.spawn("distributed", job, options.timeout * len(left) + 60, ranks=options.gpus)
        rows |= {case: found[case] for case in left if case in found}
        if (failed := next((case for case in left if case not in rows), None)) and "note" in found:
            rows[failed] = {"note": found["note"]}
        for case in left:
            if case in rows:
                harness.announce({"case": case, "side": side, **rows[case]})
        if not found:
            raise RuntimeError(f"{side}: a process ended without a row")
    return rows


def disagreement(ours: Row, peer: Row | None = None) -> str:
    """The reason why a case gets no figures, or ""."""
    if "note" in ours and "OutOfMemoryError" not in ours["note"]:
        return ours["note"]
    for what in ("first loss", "first norm") if peer is not None and "note" not in {**ours, **peer} else ():
        if not abs(ours[what] - peer[what]) <= TOLERANCE * abs(peer[what]):
            return f"the {what} is {ours[what]}, that of {peer['case']}, {peer['side']}, {peer[what]}"
    return ""


def same_step(name: str) -> tuple[Any, ...]:
    """What cases have in common whose first losses and norms agree: the model, the batches of ranks, the weights."""
    case = CASES[name]
    spread = case.get("mesh", "dp_shard")
    model = next(prefix for prefix in NAMES if name.startswith(f"{prefix} "))
    batches = "each rank's" if spread in ("dp_shard", "ep") else "one"
    return model, batches, *(case.get(key) for key in ("batch", "seq", "weights", "alone", "fp8"))


def work(job: dict[str, Any]) -> Row:
    """In the process of one rank: reports the row of each case, and ends early where one left memory allocated."""
    device = "cpu" if job["dry"] else "cuda"
    make_mesh(device_type=device)  # starts the process group
    for name in job["cases"]:
        faulthandler.dump_traceback_later(job["timeout"], exit=True)
        case = dict(CASES[name])
        model, config = model_of(next(known for prefix, known in NAMES.items() if name.startswith(f"{prefix} ")))
        if job["dry"]:
            config = changed(config, {**model.tiny, "num_key_value_heads": 4})
            case.pop("fp8", None)  # needs a GPU
            case |= dict(batch=2, seq=32, steps=min(case.get("steps", 2), 2))
        try:
            row = _train(config, job, device, **case)
        except Exception as error:  # ends at once: the exit of a process waits for collectives that nobody joins
            traceback.print_exc()
            harness.report({"note": harness.summary(error)})
            sys.stdout.flush()
            os._exit(1)
        harness.report({name: row})
        harness.free(device)
        left = torch.tensor(torch.cuda.memory_allocated() if device == "cuda" else 0, device=device)
        dist.all_reduce(left, op=dist.ReduceOp.MAX)
        if left.item() > harness.GIB:
            break
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()
    return {}


def model_of(name: str) -> tuple[Model, dict[str, Any]]:
    """(a model of NAMES, its config.json)."""
    whole, layers = whole_and_layers(name)
    model = MODELS[whole]
    if layers is None:
        return model, model.config
    changes: dict[str, Any] = {"num_hidden_layers": layers}
    if "layer_types" in model.config:
        changes["layer_types"] = model.config["layer_types"][:layers]
    return model, changed(model.config, changes)


def _train(
    config: dict[str, Any], job: dict[str, Any], device: str, *, batch: int, seq: int, mesh: str = "dp_shard",
    weights: str = "fp32", recompute: Any = "none", reshard: bool = True, alone: bool = False, steps: int = 5,
    peer: bool = False, fp8: str | None = None,
) -> Row:  # fmt: skip
    gpus = dist.get_world_size()
    dtype, is_ours = torch.float32 if weights == "fp32" else torch.bfloat16, job["side"] == "ligermodels"
    if is_ours:
        model, group = _ours(config, dtype, device, mesh, recompute, reshard, alone, fp8)
    else:
        model, group = _liger(config, dtype, device, recompute), dist.get_rank()
    _fill(model.train())
    generator = torch.Generator().manual_seed(group)
    ids = torch.randint(config["vocab_size"], (batch, seq), generator=generator).to(device)
    first_ids = ids if steps > 1 else ids[:, :8192]

    def step(ids: torch.Tensor = ids) -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    loss = model(input_ids=first_ids, labels=first_ids).loss
    loss.backward()
    # In fp32, since an ulp of a norm in bf16 is more than TOLERANCE. Experts that are spread are on another mesh.
    norms: list[Any] = [p.grad.float().norm() for p in model.parameters()]
    norm = torch.stack([norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]).norm()
    first = loss.detach().clone()
    if not is_ours:  # FSDP's loss is that of the rank, ours that of all
        dist.all_reduce(first)
        first /= gpus
    found = {
        "first loss": float(first),
        "first norm": float(norm),
    }
    model.zero_grad(set_to_none=True)
    if weights == "fp32" or not is_ours:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    elif weights == "bf16":
        optimizer = AdamW(model.parameters(), lr=1e-5, step_in_backward=True)
    else:
        optimizer = AdamW(model.parameters(), lr=1e-5, master_weights=True, state_dtype=torch.float32)
    for _ in range(2):
        step(first_ids)
    harness.reset_peak(device)
    dist.barrier()
    seconds = median(harness.timed(step, device)[0] for _ in range(steps))
    largest = torch.tensor([seconds, harness.peak_gib(device) or 0.0], device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    seconds, peak = largest.tolist()
    tokens = batch * seq / (gpus if mesh in ("cp", "tp") else 1)
    found |= {"tokens/s a GPU": tokens / seconds, "peak GiB": peak, "s a step": seconds}
    return found | (_exposed(step) if job["trace"] and device == "cuda" and steps > 1 else {})


def _ours(
    config: dict[str, Any], dtype: torch.dtype, device: str, mesh: str, recompute: Any, reshard: bool, alone: bool,
    fp8: str | None,
) -> tuple[Any, int]:  # fmt: skip
    """(the model, the number of its batch)."""
    arch = ligermodels.ARCHS[config["model_type"]]
    if alone:
        model = arch.from_config(config, dtype=dtype, device=device, activation_checkpointing=recompute, seed=0)
        return model, dist.get_rank()
    whole = make_mesh(device_type=device, **{} if mesh == "dp_shard" else {mesh: dist.get_world_size()})
    model = arch.from_config(
        config,
        dtype=dtype,
        mesh=whole,
        parallel=dict(param_dtype=torch.bfloat16, reshard_after_forward=reshard, fp8=fp8),
        activation_checkpointing=recompute,
        seed=0,
    )
    return model, dist.get_rank() if mesh == "ep" else whole["dp_shard"].get_local_rank()


def _liger(config: dict[str, Any], dtype: torch.dtype, device: str, recompute: Any) -> Any:
    """transformers' Llama with Liger's kernels; a group per block and one for the rest, as FSDP2 is usually applied."""
    if device == "cuda":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    model = theirs("llama-3.1-8b", "meta", dtype, config)
    if recompute == "block":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    return model


@torch.no_grad()
def _fill(model: Any) -> None:
    """Draws every parameter by its name: the same values for every sharding and for both sides."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator(parameter.device)
        generator.manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]))

        def draw(whole: torch.Tensor, name: str = name, generator: torch.Generator = generator) -> None:
            drawn = torch.empty_like(whole, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)
            whole.copy_(torch.ones_like(drawn) if "norm" in name else drawn)

        weights.fill(parameter, draw)


def _exposed(step: Any) -> Row:
    """Milliseconds of one step in which NCCL runs, and those in which nothing else does, on this rank."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans["nccl" in event.name.lower()].append((event.time_range.start, event.time_range.end))
    both = covered(spans[True] + spans[False])
    return {
        "communication ms": covered(spans[True]) / 1e3, "exposed ms": (both - covered(spans[False])) / 1e3,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.main(__doc__, arguments, add_options, measure, work)


if __name__ == "__main__":
    sys.exit(main())
