"""DeepSpeed's ZeRO around a model of the zoo.

    torchrun --nproc-per-node 2 examples/deepspeed_zero.py --stage 3        # a tiny Llama; without GPUs, on the CPU
    torchrun --nproc-per-node 8 examples/deepspeed_zero.py --stage 3 --model meta-llama/Llama-3.1-8B --out tuned

Needs `pip install deepspeed`. `deepspeed --num_gpus 8` starts it as well. Every rank gets rows of its own.
"""

import argparse
from pathlib import Path

import deepspeed
import tiny
import torch
import torch.distributed as dist

import ligermodels


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3), help="what is sharded: see DeepSpeed's docs")
    parser.add_argument("--model", help="a repository of the Hub or a folder; default a tiny Llama")
    parser.add_argument("--out", type=Path, help="a folder for the trained model")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--lr", type=float, default=3e-3, help="a pretrained model wants about 1e-5")
    parser.add_argument("--local_rank", type=int, help="given by DeepSpeed's launcher")
    options = parser.parse_args(arguments)
    deepspeed.init_distributed()
    gpu, rank, ranks = torch.cuda.is_available(), dist.get_rank(), dist.get_world_size()
    dtype = torch.bfloat16 if gpu else torch.float32
    model = ligermodels.load(options.model or tiny.write_llama(), dtype=dtype, device="cpu").train()
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": options.accumulate,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": options.stage},
        "bf16": {"enabled": gpu},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    losses = []
    for step in range(options.steps):
        random = torch.Generator().manual_seed(step * ranks + rank)
        parts = [
            torch.randint(50, (2, 1), generator=random) + torch.arange(24 + 8 * n) for n in range(options.accumulate)
        ]
        # The mean over the labels of all micro-batches of all ranks: DeepSpeed divides gradients by ranks and parts.
        count = torch.tensor(float(sum(part[:, 1:].numel() for part in parts)), device=engine.device)
        dist.all_reduce(count)
        total = torch.zeros((), device=engine.device)
        for part in (part.to(engine.device) for part in parts):
            loss = engine(part, labels=part, num_items_in_batch=count / (ranks * options.accumulate)).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach() / (ranks * options.accumulate)
        dist.all_reduce(total)
        losses.append(total.item())
        if rank == 0:
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    if options.out:
        state = {}
        for name, parameter in model.named_parameters():
            with deepspeed.zero.GatheredParameters(parameter):  # by every rank; rank 0 keeps a copy on the host
                if rank == 0:
                    state[name] = parameter.detach().to("cpu", copy=True)
        if rank == 0:
            model.save_pretrained(options.out, state_dict=state)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
