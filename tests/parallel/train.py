"""Training runs whose steps draw on every random state and on the position of their data, sharded or not."""

import random

import numpy
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from ligermodels.arch import ARCHS
from ligermodels.parallel import Checkpoints
from ligermodels.training import AdamW
from tests.sizes import SIZES

CONFIG = dict(SIZES, model_type="llama", initializer_range=0.2)


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


def sharded(model, mesh=None):
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


OPTIMIZERS = {
    "ours": lambda p: AdamW(p, lr=1e-2, max_grad_norm=1.0),
    "master": lambda p: AdamW(p, lr=torch.tensor(1e-2), master_weights=True, state_dtype=torch.float32),
    "8 bits": lambda p: AdamW(p, lr=1e-2, state_dtype=torch.uint8),
    "torch": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


class Run:
    """A model in training; each step draws on every random state and on the position of the data."""

    def __init__(self, optimizer="ours", *, dtype=torch.float32, spread=lambda model: model, rank=0, seed=0, **changes):
        config = {**CONFIG, **changes}
        self.model = spread(ARCHS["llama"].from_config(config, dtype=dtype, device="cpu", seed=seed))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1e-2, total_steps=50)
        self.data = Data(rank)
        torch.manual_seed(seed + rank)
        random.seed(seed + rank)
        numpy.random.seed(seed + rank)

    def step(self):
        ids = self.data.next()
        ids[0, 0], ids[0, 1] = random.randrange(97), numpy.random.randint(97)
        loss = self.model(ids, labels=ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)).loss
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss.item()

    def checkpoints(self, folder, **options):
        kept = dict(scheduler=self.scheduler, data=self.data)
        return Checkpoints(folder, self.model, self.optimizer, **{**kept, **options})

    def save(self, folder, step=1, **options):
        with self.checkpoints(folder, **options) as checkpoints:
            checkpoints.save(step)

    def load(self, folder, **options):
        with self.checkpoints(folder, **options) as checkpoints:
            return checkpoints.load()

    def weights(self):
        return get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))
