"""Models that the user has sharded or wrapped: what they save is what the whole model saves."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ligermodels import CheckpointError
from tests.checkpoint.fixtures import make_model
from tests.conversion.layouts import same, stored
from tests.parallel.ranks import on_ranks

MODELS = {
    "tied": dict(tie_word_embeddings=True),
    "experts": dict(model_type="mixtral", num_local_experts=4),  # names on disk that are not the model's
}
IDS = torch.arange(16).reshape(2, 8)


def sharded(model, mesh, **options):
    """FSDP2 as it is usually applied: each block a group of its own, all else the root's."""
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def save_on_two_ranks(folder):
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    for name, config in MODELS.items():
        model = sharded(make_model(**config), mesh)
        model.save_pretrained(folder / name / "fsdp", max_shard_size="4KB")
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        assert bool(state) == (rank == 0)
        model.save_pretrained(folder / name / "state", state_dict=state)
        model(IDS[rank : rank + 1], labels=IDS[rank : rank + 1]).loss.backward()
        model.save_pretrained(folder / name / "after-backward")

    model = make_model(**MODELS["tied"])
    for block in model.model.layers:
        plan = {"self_attn.q_proj": ColwiseParallel(), "self_attn.o_proj": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    model.save_pretrained(folder / "tied" / "tensor-parallel")

    model = make_model(**MODELS["tied"])
    apply_activation_checkpointing(model, check_fn=lambda module: type(module).__name__ == "LlamaBlock")
    sharded(model, mesh).save_pretrained(folder / "tied" / "recomputed")

    wrapped = DistributedDataParallel(make_model(**MODELS["tied"]))
    if rank == 0:
        wrapped.module.save_pretrained(folder / "tied" / "ddp", state_dict=wrapped.state_dict())

    model = FullyShardedDataParallel(make_model(**MODELS["tied"]), device_id=torch.device("cpu"))
    with pytest.raises(CheckpointError, match=r"FSDP1|state_dict="):
        model.module.save_pretrained(folder / "fsdp1")


def test_a_sharded_or_wrapped_model_is_saved_as_the_whole_one(tmp_path):
    on_ranks(tmp_path, lambda: save_on_two_ranks(tmp_path))
    ways = 0
    for name, config in MODELS.items():
        whole = make_model(**config).save_pretrained(tmp_path / f"whole-{name}")
        for folder in (tmp_path / name).iterdir():
            assert same(stored(folder), stored(whole)), folder
            assert (folder / "config.json").read_bytes() == (whole / "config.json").read_bytes()
            ways += 1
    assert ways == 9 and len(list((tmp_path / "experts" / "fsdp").glob("*.safetensors"))) > 1
