"""Speed and memory of this checkout beside those of another one, runs alternating in fresh processes on one GPU.

Both train and generate from the same checkpoints, which this one writes. The losses of the first step must agree, or
nothing is printed. Tokens/s of FSDP2 are those of one GPU.

    git worktree add ../old 388939a
    python -m benchmarks.commits ../old --rounds 3 --scratch /dev/shm --out benchmarks/results/commits.json
    python -m benchmarks.commits ../old --gpus 2 --cases "8B FSDP2 2 x 4096"
    python -m benchmarks.commits ../old --dry                  # tiny models on the CPU: does everything run?
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
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
TINY = dict(vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {"1B": LLAMA_1B, "8B": LLAMA_8B}
CASES: dict[str, dict[str, Any]] = {
    "1B 8 x 2048": dict(batch=8, seq=2048, steps=10),
    "1B 1 x 1024, captured": dict(batch=1, seq=1024, steps=30, captured=True),
    "1B 1 x 1024, eager": dict(batch=1, seq=1024, steps=20),
    "1B 1 x 1024, 8 micro-batches added in place": dict(batch=1, seq=1024, steps=4, micro_batches=8),
    "8B 4 x 4096": dict(batch=4, seq=4096, steps=5, in_backward=True),
    "8B 4 x 4096, mlp": dict(batch=4, seq=4096, steps=4, in_backward=True, recompute="mlp"),
    "8B FSDP2 2 x 4096": dict(batch=2, seq=4096, steps=5, sharded=True),
    "1B decode, batch 1": dict(batch=1, seq=128, new_tokens=128),
    "1B decode, batch 8": dict(batch=8, seq=128, new_tokens=128),
    "8B decode, batch 1": dict(batch=1, seq=128, new_tokens=64),
}
"""Name, which begins with the model's -> how it runs."""
TOLERANCE = 2e-3  # of the loss: both are bf16 forwards of the same weights, and differ by the rounding of few matmuls


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=3)
    alone = [name for name, case in CASES.items() if "sharded" not in case]
    parser.add_argument("--cases", nargs="*", default=alone, choices=list(CASES))
    parser.add_argument("--gpus", type=int, default=1, help="for the cases of FSDP2, which want more than one")
    parser.add_argument("--scratch", help="where checkpoints are written for the run, e.g. /dev/shm")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    parser.add_argument("--dry", action="store_true", help="tiny models on the CPU; the times mean nothing")
    parser.add_argument("--worker", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        return work(options)
    runs: dict[str, list[dict[str, Any]]] = {"other": [], "this": []}
    with tempfile.TemporaryDirectory(dir=options.scratch, prefix="commits-") as folder:
        write_checkpoints(Path(folder), {name.split()[0] for name in options.cases}, options.dry)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.gpus}"]
        command = [sys.executable, *(launcher if options.gpus > 1 else ()), __file__, str(options.other)]
        command += ["--worker", folder, *(["--dry"] if options.dry else ()), "--cases", *options.cases]
        for _ in range(options.rounds):
            for side, tree in (("other", options.other), ("this", HERE)):
                variables = {**os.environ, "PYTHONPATH": str(tree.resolve())}
                done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, check=True, text=True)
                runs[side].append(json.loads(done.stdout.splitlines()[-1]))
    rows, red = compare(runs)
    if red:
        print("\n".join(["No figures: the two checkouts compute different things.", *red]))
        return 1
    from benchmarks.common import environment, table, write_json

    columns = ["case", "other tokens/s", "this", "ratio", "other GiB", "this", "ratio"]
    print(table(columns, [list(row.values()) for row in rows]))
    if options.out:
        write_json(options.out, dict(environment=environment("cuda"), rows=rows, runs=runs))
    return 0


def compare(runs: dict[str, list[dict[str, Any]]]) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for each case, and in words the cases in which the two do not compute the same."""
    rows, red = [], []
    for case in runs["this"][0]:
        theirs, ours = ([run[case] for run in runs[side]] for side in ("other", "this"))
        expected, found = (side[0].get("loss", 0.0) for side in (theirs, ours))
        if not abs(found - expected) <= TOLERANCE * abs(expected):
            red.append(f"{case}: the first loss is {found}, of the other checkout {expected}")
        seconds = [median(run["seconds"] for run in side) for side in (theirs, ours)]
        gib = [max(run["gib"] for run in side) for side in (theirs, ours)]
        other, this = (ours[0]["tokens"] / each for each in seconds)
        rows.append(
            dict(case=case, other_tokens_per_s=other, this_tokens_per_s=this, speed=this / other,
                 other_gib=gib[0], this_gib=gib[1], memory=gib[1] / (gib[0] or 1))
        )  # fmt: skip
    return rows, red


def write_checkpoints(folder: Path, names: set[str], dry: bool) -> None:
    import torch

    import ligermodels

    device = "cpu" if dry else "cuda"
    for name in names:
        torch.manual_seed(0)
        config = MODELS[name] | (TINY if dry else {})
        ligermodels.Llama.from_config(config, dtype=torch.bfloat16, device=device).save_pretrained(folder / name)


def work(options: argparse.Namespace) -> int:
    """Runs the cases with the ligermodels that is first on the path, and prints what they took."""
    import torch

    import ligermodels

    if "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl")
    found = {}
    for name in options.cases:
        case = dict(CASES[name])
        if options.dry:
            case |= {"batch": 2, "seq": 16, **({"new_tokens": 4} if "new_tokens" in case else {"steps": 1})}
            case.pop("captured", None)
        sharded = case.pop("sharded", False)
        model = ligermodels.Llama.from_hub(
            options.worker / name.split()[0],
            dtype=torch.float32 if sharded else torch.bfloat16,
            device="cpu" if options.dry else "cuda",
        )
        if sharded and not options.dry:
            shard(model)
        found[name] = (decode if "new_tokens" in case else train)(model, **case)
        del model
        torch.cuda.empty_cache()
        print(name, found[name], file=sys.stderr, flush=True)
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(found), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


def shard(model: Any) -> None:
    """fp32 weights over all ranks by FSDP2, a group for each block, computing in bf16."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and name.endswith("layers"):
            for block in module:
                fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    torch.cuda.empty_cache()


def train(
    model: Any, *, batch: int, seq: int, steps: int, captured: bool = False, in_backward: bool = False,
    recompute: str = "none", micro_batches: int = 1,
) -> dict[str, Any]:  # fmt: skip
    import torch

    from ligermodels.training.adamw import AdamW

    ids = random_ids(model, batch, seq)
    model.train()
    if recompute != "none":
        model.gradient_checkpointing_enable({"recompute": recompute})
    if isinstance(next(model.parameters()), torch.distributed.tensor.DTensor):
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    else:
        optimizer = AdamW(model.parameters(), lr=1e-5, step_in_backward=in_backward, capturable=captured)
    if captured:
        from ligermodels.training.capture import CapturedStep

        step: Callable[..., Any] = CapturedStep(model, optimizer, input_ids=ids, labels=ids)
    else:
        if micro_batches > 1:
            with contextlib.suppress(ImportError):  # each checkout adds gradients the best way that it has
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
    found = measure(lambda: step(input_ids=ids, labels=ids), steps)
    return {**found, "loss": first, "tokens": batch * seq * micro_batches}


def decode(model: Any, *, batch: int, seq: int, new_tokens: int) -> dict[str, Any]:
    """Greedy, as generate is by default in every version."""
    ids = random_ids(model, batch, seq)
    model.eval()

    def generate() -> Any:
        return model.generate(ids, max_new_tokens=new_tokens, eos_token_id=[])

    generate()
    return {**measure(generate, 3), "tokens": batch * new_tokens}


def random_ids(model: Any, batch: int, seq: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randint(model.config.vocab_size, (batch, seq), generator=generator).to(model.device)


def measure(run: Callable[[], Any], times: int) -> dict[str, float]:
    """The median time of a run, and the peak memory of all."""
    import torch

    cuda, found = torch.cuda.is_available(), []
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(times):
        started = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return {"seconds": median(found), "gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0}


if __name__ == "__main__":
    raise SystemExit(main())
