"""Training on several GPUs of one host: speed, memory and exposed communication, beside transformers with Liger.

    torchrun --nproc-per-node 4 -m benchmarks.distributed --out benchmarks/results/distributed-4xh200.json
    torchrun --nproc-per-node 2 -m benchmarks.distributed --cases "8B 4 x 4096" "8B 4 x 4096, one GPU"
    torchrun --nproc-per-node 2 -m benchmarks.distributed --dry                # tiny models over gloo: does all run?

Both sides have the same weights, which are drawn parameter by parameter, the same batches, FSDP2 with a group per
block, and the same optimizer. The first loss and the first gradient norm of the two must agree, or nothing is printed.
Tokens/s are those of one GPU. A case that one side cannot hold says "out of memory". "exposed" is the time of a step in
which communication runs and nothing else does, from a trace of one step.
"""

import argparse
import contextlib
import functools
import gc
import hashlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ligermodels
from benchmarks.commits import LLAMA_1B, LLAMA_8B, TINY
from benchmarks.common import environment, heading, table, write_json
from ligermodels.parallel import make_mesh
from ligermodels.training import AdamW

LLAMA_70B = LLAMA_8B | dict(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, head_dim=128
)
MODELS: dict[str, dict[str, Any]] = {
    "1B": LLAMA_1B,
    "8B": LLAMA_8B,
    "70B": LLAMA_70B,
    "half 70B": LLAMA_70B | dict(num_hidden_layers=40),
}
FP32 = dict(weights="fp32")
EXACT = dict(weights="bf16 with masters", reshard=False)
BF16 = dict(weights="bf16", steps=3)
OFFLOADED = {"recompute": "mlp", "offload": True}
LONG = dict(weights="bf16", recompute="block")
CASES: dict[str, dict[str, Any]] = {
    "8B 4 x 4096": dict(batch=4, seq=4096, **FP32),
    "8B 4 x 4096, whole": dict(batch=4, seq=4096, reshard=False, **FP32),
    "8B 4 x 4096, bf16 with masters, whole": dict(batch=4, seq=4096, **EXACT),
    "8B 4 x 4096, bf16, whole": dict(batch=4, seq=4096, reshard=False, **BF16),
    "8B 4 x 4096, bf16, one GPU": dict(batch=4, seq=4096, alone=True, **BF16),
    "8B 2 x 4096": dict(batch=2, seq=4096, peer=True, **FP32),
    "8B 8 x 4096, block": dict(batch=8, seq=4096, recompute="block", peer=True, steps=3, **FP32),
    "8B 1 x 32768, block": dict(batch=1, seq=32768, recompute="block", peer=True, steps=2, **FP32),
    "8B 1 x 32768, mlp offloaded": dict(batch=1, seq=32768, recompute=OFFLOADED, steps=2, **FP32),
    "8B 8 x 4096, mlp": dict(batch=8, seq=4096, recompute="mlp", steps=3, **FP32),
    "8B 8 x 4096, mlp offloaded": dict(batch=8, seq=4096, recompute=OFFLOADED, steps=3, **FP32),
    "8B 1 x 8192, tp 2": dict(batch=1, seq=8192, mesh=dict(tp=2), **BF16),
    "8B 1 x 8192, tp 4": dict(batch=1, seq=8192, mesh=dict(tp=4), **BF16),
    "1B 1 x 131072, cp 2": dict(batch=1, seq=131072, mesh=dict(cp=2), steps=2, **LONG),
    "1B 1 x 131072, cp 4": dict(batch=1, seq=131072, mesh=dict(cp=4), steps=2, **LONG),
    "1B 1 x 524288, cp 2": dict(batch=1, seq=524288, mesh=dict(cp=2), steps=1, **LONG),
    "1B 1 x 1048576, cp 4": dict(batch=1, seq=1048576, mesh=dict(cp=4), steps=1, **LONG),
    "half 70B 1 x 4096, block": dict(batch=1, seq=4096, recompute="block", peer=True, **BF16),
    "70B 1 x 4096, block": dict(batch=1, seq=4096, recompute="block", peer=True, **BF16),
    "8B files": dict(files=True),
    "half 70B files": dict(files=True),
    "70B files": dict(files=True),
}
"""Name, which begins with the model's -> how it runs.

weights: "fp32", with torch's fused AdamW; "bf16 with masters", exact fp32 weights and fp32 moments in our AdamW;
"bf16", with our AdamW, which steps in the backward (the peer's are torch's AdamW, and after the backward).
reshard=False: blocks stay whole between forward and backward. alone: each rank for itself. steps=1: without a warm-up.
files: writes the model in bf16 to --scratch from all ranks, and loads it onto the mesh, from the page cache.
"""
TOLERANCE = 2e-3  # of loss and gradient norm: bf16 forwards of the same weights, which round in other places


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    parser.add_argument("--scratch", help="a folder for the cases with files, e.g. /dev/shm")
    parser.add_argument("--trace", action="store_true", help="measure exposed communication")
    parser.add_argument("--dry", action="store_true", help="tiny models on the CPU; the times mean nothing")
    options = parser.parse_args()
    make_mesh(device_type="cpu" if options.dry else None)
    rows: list[dict[str, Any]] = []
    for name in options.cases:
        sides = ["ours", "liger"] if CASES[name].get("peer") else ["ours"]
        for side in sides:
            row = {"case": name, "side": side, **_run(name, side, options)}
            rows.append(row)
            if dist.get_rank() == 0:
                print(json.dumps(row), file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        _report(rows, options)
    dist.destroy_process_group()
    return 0


def _report(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    measured = {(row["case"], row["side"]): row for row in rows if "loss" in row}
    for (case, side), row in measured.items():
        if side == "liger" and (ours := measured.get((case, "ours"))):
            for what in ("loss", "norm"):
                if not abs(ours[what] - row[what]) <= TOLERANCE * abs(row[what]):
                    raise SystemExit(f"No figures: {case}: the first {what} is {ours[what]}, Liger's {row[what]}")
    env = environment("cpu" if options.dry else "cuda")
    print(heading(env), f"{dist.get_world_size()} ranks", sep="\n")
    columns = {"case": "case", "side": "side", "tokens_per_s": "tokens/s per GPU", "gib": "GiB", "seconds": "s/step",
               "communication_ms": "communication ms", "exposed_ms": "exposed ms"}  # fmt: skip
    steps = [[row.get(key, row.get("error")) for key in columns] for row in rows if "save_s" not in row]
    print(table(list(columns.values()), steps))
    columns = {"case": "case", "gb": "GB", "save_s": "save s", "load_s": "load s", "host_gib": "host GiB a rank"}
    print(table(list(columns.values()), [[row[key] for key in columns] for row in rows if "save_s" in row]))
    if options.out:
        write_json(options.out, dict(environment=env, ranks=dist.get_world_size(), rows=rows))


def _run(name: str, side: str, options: argparse.Namespace) -> dict[str, Any]:
    case = dict(CASES[name])
    config = dict(next(config for model, config in MODELS.items() if name.startswith(f"{model} ")))
    if options.dry:
        config |= TINY | dict(num_attention_heads=4, num_key_value_heads=4)
        case |= dict(batch=2, seq=32, steps=1)
    try:
        return _files(config, options) if case.pop("files", False) else _train(config, side, options, **case)
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _train(
    config: dict[str, Any], side: str, options: argparse.Namespace, *, batch: int, seq: int,
    mesh: dict[str, int] | None = None, weights: str = "fp32", recompute: Any = "none", reshard: bool = True,
    alone: bool = False, steps: int = 5, peer: bool = False,
) -> dict[str, Any]:  # fmt: skip
    device = "cpu" if options.dry else "cuda"
    dtype = torch.float32 if weights == "fp32" else torch.bfloat16
    if side == "ours":
        model, group = _ours(config, dtype, device, mesh, recompute, reshard, alone)
    else:
        model, group = _liger(config, dtype, device, recompute)
    model.train()
    _fill(model)
    generator = torch.Generator().manual_seed(group)
    ids = torch.randint(config["vocab_size"], (batch, seq), generator=generator).to(device)
    divisor = 1 if side == "ours" else dist.get_world_size()  # of a mean over ranks, where FSDP takes one

    def step() -> Any:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    first = loss.detach().clone()
    if side != "ours":
        dist.all_reduce(first)
        first /= divisor
    model.zero_grad(set_to_none=True)
    if weights == "fp32" or side != "ours":
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    elif weights == "bf16":
        optimizer = AdamW(model.parameters(), lr=1e-5, step_in_backward=True)
    else:
        optimizer = AdamW(model.parameters(), lr=1e-5, master_weights=True, state_dtype=torch.float32)
    for _ in range(2 if steps > 1 else 0):
        step()
    found = _measure(step, steps, device)
    if options.trace and device == "cuda":
        found |= _exposed(step)
    ranks = 1 if alone else dist.get_world_size()
    copies = ranks // (1 if mesh is None else next(iter(mesh.values())))
    tokens = batch * seq * copies / ranks
    return {**found, "loss": float(first), "norm": norm, "tokens_per_s": tokens / found["seconds"]}


def _ours(
    config: dict[str, Any], dtype: torch.dtype, device: str, mesh: dict[str, int] | None, recompute: Any,
    reshard: bool, alone: bool,
) -> tuple[Any, int]:  # fmt: skip
    """The model, and the number of its batch."""
    if alone:
        model = ligermodels.Llama.from_config(config, dtype=dtype, device=device, activation_checkpointing=recompute)
        return model, dist.get_rank()
    whole = make_mesh(device_type=device, **(mesh or {}))
    model = ligermodels.Llama.from_config(
        config,
        dtype=dtype,
        mesh=whole,
        parallel=dict(param_dtype=torch.bfloat16, reshard_after_forward=reshard),
        activation_checkpointing=recompute,
    )
    return model, whole["dp_shard"].get_local_rank()


def _liger(config: dict[str, Any], dtype: torch.dtype, device: str, recompute: Any) -> tuple[Any, int]:
    """transformers' Llama with Liger's kernels; per block and for the rest, as FSDP2 is usually applied to it."""
    import transformers

    if device == "cuda":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    transformers.utils.logging.set_verbosity_error()
    fields = {key: value for key, value in config.items() if key not in ("model_type", "rope_theta")}
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    made = transformers.LlamaConfig(**fields, rope_parameters=rope)
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(made).to(dtype)
    if recompute == "block":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(made).to(device)
    return model, dist.get_rank()


@torch.no_grad()
def _fill(model: Any) -> None:
    """Draws every parameter by its name: the same values for every sharding and for both sides."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    device = next(model.parameters()).device
    for name, parameter in model.named_parameters():
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])
        generator = torch.Generator(device).manual_seed(seed)
        if "norm" in name:
            parameter.fill_(1.0)
            continue
        local, box = parameter, [slice(None)]
        if hasattr(parameter, "device_mesh"):
            local = parameter.to_local()
            shape, at = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            box = [slice(start, start + size) for start, size in zip(at, shape, strict=True)]
        drawn = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
        local.copy_(drawn.normal_(0.0, 0.02, generator=generator)[tuple(box)])


def _files(config: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Seconds to save a model from all ranks and to load it onto them, and what that takes of the host's memory."""
    device = "cpu" if options.dry else "cuda"
    mesh, seconds = make_mesh(device_type=device), []
    folder = Path(options.scratch or tempfile.gettempdir()) / "ligermodels-distributed"
    model = ligermodels.Llama.from_config(config, dtype=torch.bfloat16, mesh=mesh)
    size, expected = sum(p.nbytes for p in model.parameters()), _sums(model)
    models = [model]
    del model
    try:
        seconds.append(_timed(lambda: models[0].save_pretrained(folder)))
        models.clear()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        with _HostMemory() as memory:
            load = functools.partial(ligermodels.Llama.from_hub, folder, dtype=torch.bfloat16, mesh=mesh)
            seconds.append(_timed(lambda: models.append(load())))
        if not torch.equal(_sums(models[0]), expected):
            raise SystemExit("No figures: what was loaded is not what was saved")
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
    save_s, load_s = seconds
    return dict(gb=size / 1e9, save_s=save_s, load_s=load_s, host_gib=memory.gib)


def _sums(model: Any) -> torch.Tensor:
    return torch.stack([parameter.to_local().double().sum() for parameter in model.parameters()])


def _timed(run: Any) -> float:
    dist.barrier()
    started = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter() - started


class _HostMemory(threading.Thread):
    """`gib`: by how much this process's own memory, without the pages of mapped files, rises in a block, at most."""

    def __enter__(self) -> "_HostMemory":
        self.before, self.peak, self.over = self.now(), 0, threading.Event()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.join()
        self.gib = (self.peak - self.before) / 2**20

    def run(self) -> None:
        while not self.over.wait(0.02):
            self.peak = max(self.peak, self.now())

    @staticmethod
    def now() -> int:
        status = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in status if line.startswith("RssAnon")).split()[1])


def _measure(step: Any, times: int, device: str) -> dict[str, float]:
    """The median time of a step, and the peak memory, of the rank where it is largest."""
    cuda, seconds = device == "cuda", []
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    for _ in range(times):
        started = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    found = torch.tensor([median(seconds), torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0], device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return dict(zip(("seconds", "gib"), found.tolist(), strict=True))


def _exposed(step: Any) -> dict[str, float]:
    """Milliseconds of one step in which NCCL runs, and those in which nothing else does, on this rank."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans["nccl" in event.name.lower()].append((event.time_range.start, event.time_range.end))
    both = _covered(spans[True] + spans[False])
    return dict(communication_ms=_covered(spans[True]) / 1e3, exposed_ms=(both - _covered(spans[False])) / 1e3)


def _covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total


if __name__ == "__main__":
    with contextlib.suppress(KeyError):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    raise SystemExit(main())
