"""A training run that a test can kill: a Llama of two blocks, FSDP2, gloo, checkpoints every second step.

    torchrun --nproc-per-node 2 tests/parallel/train.py FOLDER STEPS [FAULT...]

FAULT: "step:3:1" has rank 1 kill itself before step 3, "write:4:0" has rank 0 do so in the middle of the file that it
writes for step 4. Each strikes once; a file in FOLDER marks that it did.
Each rank's labels depend on its own random state, its ids on the position of its data.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ligermodels
from ligermodels.parallel import Checkpoints
from ligermodels.training import AdamW

CONFIG = dict(
    model_type="llama", vocab_size=97, hidden_size=32, intermediate_size=44, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2,
)  # fmt: skip


class Data:
    """Batches as a function of the rank and the position."""

    def __init__(self, rank=0):
        self.rank, self.position = rank, 0

    def next(self):
        generator = torch.Generator().manual_seed(1000 * self.rank + self.position)
        self.position += 1
        return torch.randint(97, (2, 12), generator=generator)

    def state_dict(self):
        return {"rank": self.rank, "position": self.position}

    def load_state_dict(self, state):
        self.rank, self.position = state["rank"], state["position"]


def sharded(model, mesh):
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def make_model(mesh):
    return sharded(ligermodels.Llama.from_config(CONFIG, dtype=torch.float32, device="cpu"), mesh)


def strikes(folder, fault):
    """Whether a fault is asked for and has not struck yet."""
    mark = folder / f"struck-{fault}"
    return fault in sys.argv and not mark.exists() and not mark.touch()


def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)


def die_while_writing(folder, rank, step):
    """The next file that is synced in the checkpoint of `step` is cut in half, and the process ends."""
    real = os.fsync

    def fsync(descriptor):
        is_this_step = f"step-{step:08d}.partial" in os.readlink(f"/proc/self/fd/{descriptor}")
        if is_this_step and strikes(folder, f"write:{step}:{rank}"):
            os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            die()
        real(descriptor)

    os.fsync = fsync


def main(folder, steps):
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    model = make_model(mesh)
    optimizer = AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    data = Data(rank)
    torch.manual_seed(rank)
    with Checkpoints(folder / "run", model, optimizer, scheduler=scheduler, data=data) as checkpoints:
        for step in range(checkpoints.load(), steps):
            if strikes(folder, f"step:{step}:{rank}"):
                die()
            ids = data.next()
            loss = model(ids, labels=ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)).loss
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            with (folder / f"losses-{rank}").open("a") as file:
                file.write(f"{step} {loss.item().hex()}\n")
            if (step + 1) % 2 == 0:
                die_while_writing(folder, rank, step + 1)
                checkpoints.save(step + 1, wait=False)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(state, folder / "weights.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]), int(sys.argv[2]))
    dist.destroy_process_group()
