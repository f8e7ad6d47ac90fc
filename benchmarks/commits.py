"""Speed and memory of this checkout beside those of another one, runs alternating in fresh processes on one GPU.

Both train and generate from the same weights, drawn by the name that a tensor has on disk. The losses of the first step
must agree, or nothing is printed. Tokens/s of FSDP2 are those of one GPU.

    git worktree add ../old 388939a
    python -m benchmarks.commits ../old --rounds 3 --out benchmarks/results/commits.json
    python -m benchmarks.commits ../old --gpus 2 --cases "8B FSDP2 2 x 4096"
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parents[1]
LLAMA_1B = dict(
    model_type="llama", vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
    num_attention_heads=32, num_key_value_heads=8, head_dim=64, rms_norm_eps=1e-5, tie_word_embeddings=True,
    max_position_embeddings=131072, rope_theta=500000.0,
)  # fmt: skip
LLAMA_8B = LLAMA_1B | dict(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, head_dim=128, tie_word_embeddings=False
)
CASES: dict[str, dict[str, Any]] = {
    "1B 8 x 2048": dict(config=LLAMA_1B, batch=8, seq=2048, steps=10),
    "1B 1 x 1024, captured": dict(config=LLAMA_1B, batch=1, seq=1024, steps=30, captured=True),
    "1B 1 x 1024, eager": dict(config=LLAMA_1B, batch=1, seq=1024, steps=20),
    "1B 1 x 1024, 8 micro-batches added in place": dict(config=LLAMA_1B, batch=1, seq=1024, steps=4, micro_batches=8),
    "8B 4 x 4096": dict(config=LLAMA_8B, batch=4, seq=4096, steps=5, in_backward=True),
    "8B 4 x 4096, mlp": dict(config=LLAMA_8B, batch=4, seq=4096, steps=4, in_backward=True, recompute="mlp"),
    "8B FSDP2 2 x 4096": dict(config=LLAMA_8B, batch=2, seq=4096, steps=5, sharded=True),
    "8B FSDP2 2 x 4096, block": dict(config=LLAMA_8B, batch=2, seq=4096, steps=4, sharded=True, recompute="block"),
    "1B decode, batch 1": dict(config=LLAMA_1B, batch=1, seq=128, new_tokens=128),
    "1B decode, batch 8": dict(config=LLAMA_1B, batch=8, seq=128, new_tokens=128),
    "8B decode, batch 1": dict(config=LLAMA_8B, batch=1, seq=128, new_tokens=64),
}
TOLERANCE = 2e-3  # of the loss: both are bf16 forwards of the same weights, and differ by the rounding of few matmuls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", nargs="?", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=3)
    alone = [name for name, case in CASES.items() if "sharded" not in case]
    parser.add_argument("--cases", nargs="*", default=alone, choices=list(CASES))
    parser.add_argument("--gpus", type=int, default=1, help="for the cases of FSDP2, which want more than one")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return _work(options.cases)
    runs: dict[str, list[dict[str, Any]]] = {"other": [], "this": []}
    for _ in range(options.rounds):
        for name, tree in (("other", options.other), ("this", HERE)):
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.gpus}"]
            command = [sys.executable, *(launcher if options.gpus > 1 else ()), __file__, "--worker", "--cases"]
            command += options.cases
            done = subprocess.run(
                command, env={**os.environ, "PYTHONPATH": str(tree.resolve())}, stdout=subprocess.PIPE, check=True
            )
            found = [json.loads(line) for line in done.stdout.decode().splitlines() if line.startswith("{")]
            runs[name].append(found[-1])
    rows, red = [], []
    for case in options.cases:
        theirs, ours = ([run[case] for run in runs[name]] for name in ("other", "this"))
        if "loss" in ours[0] and not abs(ours[0]["loss"] - theirs[0]["loss"]) <= TOLERANCE * abs(theirs[0]["loss"]):
            red.append(f"{case}: the first loss is {ours[0]['loss']}, of the other checkout {theirs[0]['loss']}")
        seconds = [median(run["seconds"] for run in side) for side in (theirs, ours)]
        gib = [max(run["gib"] for run in side) for side in (theirs, ours)]
        tokens = ours[0]["tokens"]
        rows.append(
            dict(case=case, other_tokens_per_s=tokens / seconds[0], this_tokens_per_s=tokens / seconds[1],
                 speed=seconds[0] / seconds[1], other_gib=gib[0], this_gib=gib[1], memory=gib[1] / gib[0])
        )  # fmt: skip
    if red:
        print("\n".join(["No figures: the two checkouts compute different things.", *red]))
        return 1
    print(f"{'case':46}{'other tok/s':>13}{'this':>11}{'ratio':>8}{'other GiB':>11}{'this':>8}{'ratio':>8}")
    for row in rows:
        print(
            f"{row['case']:46}{row['other_tokens_per_s']:13,.0f}{row['this_tokens_per_s']:11,.0f}{row['speed']:8.3f}"
            f"{row['other_gib']:11.2f}{row['this_gib']:8.2f}{row['memory']:8.3f}"
        )
    if options.out:
        from benchmarks.common import environment

        options.out.write_text(json.dumps(dict(environment=environment("cuda"), rows=rows, runs=runs), indent=1) + "\n")
    return 0


def _work(cases: list[str]) -> int:
    """Runs the cases with the ligermodels that is first on the path, and prints what they took."""
    import torch

    if "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl")
    found = {}
    for name in cases:
        case = CASES[name]
        torch.cuda.reset_peak_memory_stats()
        model = _model(case["config"], case.get("sharded", False))
        found[name] = (_decode if "new_tokens" in case else _train)(model, **case)
        del model
        torch.cuda.empty_cache()
        print(name, found[name], file=sys.stderr, flush=True)
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(found), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


def _model(config: dict[str, Any], sharded: bool = False) -> Any:
    """Sharded: fp32 weights over all ranks by FSDP2, a group for each block, computing in bf16."""
    import torch

    import ligermodels

    try:
        from ligermodels.checkpoint import weights
    except ImportError:  # where it was before
        weights = importlib.import_module("ligermodels.weights")

    dtype = torch.float32 if sharded else torch.bfloat16
    model = ligermodels.Llama.from_config(config, dtype=dtype, device="meta")
    regions = weights.regions(model, _table(type(model)))
    if sharded:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in getattr(model, "decoder", model).layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    model.to_empty(device="cuda")
    generator = torch.Generator("cuda")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = torch.empty(parameter.shape, dtype=dtype, device="cuda")
            for region in regions:
                if region.param == name:
                    generator.manual_seed(zlib.crc32(region.source.encode()))
                    part = full[region.index]
                    part.fill_(1.0) if part.dim() == 1 else part.normal_(0.0, 0.02, generator=generator)
            if sharded:
                from torch.distributed.tensor import distribute_tensor

                shard: Any = parameter
                full = distribute_tensor(full, shard.device_mesh, shard.placements).to_local()
                parameter = shard.to_local()
            parameter.copy_(full)
    return model


def _table(arch: Any) -> Any:
    return arch.DISK_NAMES if hasattr(arch, "DISK_NAMES") else arch.WEIGHTS  # what it was called before


def _train(
    model: Any, *, config: dict[str, Any], batch: int, seq: int, steps: int, captured: bool = False,
    in_backward: bool = False, recompute: str = "none", micro_batches: int = 1, sharded: bool = False,
) -> dict[str, Any]:  # fmt: skip
    import torch

    from ligermodels.training.adamw import AdamW

    ids = torch.randint(config["vocab_size"], (batch, seq), device="cuda", generator=_seeded())
    model.train()
    if recompute != "none":
        model.gradient_checkpointing_enable({"recompute": recompute})
    if sharded:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    else:
        optimizer = AdamW(model.parameters(), lr=1e-5, step_in_backward=in_backward, capturable=captured)
    if captured:
        from ligermodels.training.capture import CapturedStep

        step: Callable[..., Any] = CapturedStep(model, optimizer, input_ids=ids, labels=ids)
    else:
        if micro_batches > 1:
            from ligermodels.training.gradients import accumulate_in_place

            accumulate_in_place(model)

        def step(**inputs: Any) -> Any:
            for _ in range(micro_batches):
                loss = model(**inputs).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

    first = step(input_ids=ids, labels=ids).item()
    for _ in range(3):
        step(input_ids=ids, labels=ids)
    torch.cuda.reset_peak_memory_stats()
    times = _timed(lambda: step(input_ids=ids, labels=ids), steps)
    gib = torch.cuda.max_memory_allocated() / 2**30
    return dict(seconds=median(times), gib=gib, loss=first, tokens=batch * seq * micro_batches)


def _decode(model: Any, *, config: dict[str, Any], batch: int, seq: int, new_tokens: int) -> dict[str, Any]:
    import torch

    from ligermodels.errors import InputError

    ids = torch.randint(config["vocab_size"], (batch, seq), device="cuda", generator=_seeded())
    model.eval()

    def run() -> Any:
        return model.generate(ids, max_new_tokens=new_tokens, eos_token_id=[], do_sample=False)

    def run_old() -> Any:
        return model.generate(ids, max_new_tokens=new_tokens, eos_token_id=[])

    try:
        run()
    except InputError:  # the first version's generate has no do_sample; it is greedy as it is
        run = run_old
        run()
    times = _timed(run, 3)
    return dict(seconds=median(times), gib=torch.cuda.max_memory_allocated() / 2**30, tokens=batch * new_tokens)


def _seeded() -> Any:
    import torch

    return torch.Generator("cuda").manual_seed(1)


def _timed(run: Callable[[], Any], times: int) -> list[float]:
    import torch

    found = []
    for _ in range(times):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
