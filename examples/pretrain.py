"""Pretraining on one GPU, one node or many nodes: the whole script.

    torchrun --nproc-per-node 2 examples/pretrain.py                       # a tiny Llama; without GPUs, on the CPU
    torchrun --nproc-per-node 8 examples/pretrain.py --model meta-llama/Llama-3.1-8B --data tokens.npy \\
        --batch 64 --length 8192 --lr 1e-5 --out runs/a

tokens.npy is one long array of token ids. A step reads `--batch` rows of it on any number of GPUs and with any --tp and
--cp, so the losses are the same except for rounding. The same command, run again, continues from the last checkpoint.
examples/slurm.sh runs this on several nodes. docs/distributed.md says what to choose.
"""

import argparse
import json
import time
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

import ligermodels
from ligermodels.parallel import Checkpoints, make_mesh
from ligermodels.training import AdamW

TINY = dict(
    model_type="llama", vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1,
)  # fmt: skip


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a repository of the Hub or a folder, whose weights are trained further")
    parser.add_argument("--config", type=Path, help="a config.json, for random weights; default a tiny Llama")
    parser.add_argument("--data", type=Path, help="token ids, .npy; default ids that count up")
    parser.add_argument("--out", type=Path, help="a folder, which all nodes see, for checkpoints and the model")
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share each layer")
    parser.add_argument("--cp", type=int, default=1, help="GPUs that share each row")
    parser.add_argument("--dp-replicate", type=int, default=1, help="copies of the sharded model")
    parser.add_argument("--batch", type=int, default=8, help="rows of a step, over all GPUs")
    parser.add_argument("--micro", type=int, default=4, help="rows of a forward at most; more are accumulated")
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--recompute", default="none", help="none, mlp or block: see docs/training/memory.md")
    parser.add_argument(
        "--bf16", action="store_true", help="weights in bf16, stepped in the backward; no micro-batches"
    )
    options = parser.parse_args(arguments)
    mesh = make_mesh(dp_replicate=options.dp_replicate, cp=options.cp, tp=options.tp)
    # The GPUs of one cp x tp group get the same rows, the groups different ones.
    together = options.cp * options.tp
    rank, ranks = dist.get_rank() // together, dist.get_world_size() // together
    if options.batch % ranks or (options.bf16 and options.batch > ranks * options.micro):
        parser.error(f"--batch {options.batch} does not fit {ranks} groups of GPUs with --micro {options.micro}")
    # fp32 weights, with which the GPU computes in bf16; or bf16 alone.
    gpu = mesh.device_type == "cuda"
    how = dict(mesh=mesh, parallel=dict(param_dtype=torch.bfloat16 if gpu else None))
    how |= dict(dtype=torch.bfloat16 if options.bf16 else torch.float32, activation_checkpointing=options.recompute)
    if options.model:
        model = ligermodels.load(options.model, **how)
    else:
        config = json.loads(options.config.read_text()) if options.config else TINY
        model = ligermodels.ARCHS[config["model_type"]].from_config(config, **how, seed=0)
    update = dict(step_in_backward=True) if options.bf16 else dict(max_grad_norm=1.0)
    optimizer = AdamW(model.train().parameters(), lr=options.lr, **update)
    checkpoints = Checkpoints(options.out / "checkpoints", model, optimizer) if options.out else None
    tokens = numpy.load(options.data, mmap_mode="r") if options.data else numpy.arange(10_000) % TINY["vocab_size"]
    losses = []
    for step in range(checkpoints.load() if checkpoints else 0, options.steps):
        start = time.perf_counter()
        # The rows are a function of the step, so that a resumed run needs no state of the data.
        random = torch.Generator().manual_seed(step)
        begins = torch.randint(len(tokens) - options.length + 1, (options.batch,), generator=random).chunk(ranks)[rank]
        rows = numpy.stack([tokens[begin : begin + options.length] for begin in begins.tolist()])
        ids = torch.from_numpy(rows.astype(numpy.int64)).to(mesh.device_type)
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min(1.0, (step + 1) / 10)
        count = model.parallel.count(ids)  # the labels of all micro-batches of all GPUs
        loss = torch.zeros((), device=mesh.device_type)
        for part in ids.split(options.micro):
            output = model(part, labels=part, num_items_in_batch=count)
            output.loss.backward()
            loss += output.loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # the same number on every rank
        if dist.get_rank() == 0:
            speed = options.batch * options.length / (time.perf_counter() - start)
            print(f"step {step}: loss {losses[-1]:.4f}, {speed:,.0f} tokens/s", flush=True)
        if checkpoints and (step + 1) % options.save_every == 0:
            checkpoints.save(step + 1, wait=False)  # written while the next steps run
    if checkpoints:
        checkpoints.save(options.steps)
        checkpoints.close()
        model.save_pretrained(options.out / "model")  # called by every rank
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
