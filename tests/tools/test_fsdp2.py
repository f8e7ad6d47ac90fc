"""torch's FSDP2 around blocks and model, on two processes: the gradients of one."""

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ligermodels.training.offload
from ligermodels.arch import ARCHS
from ligermodels.errors import InputError
from ligermodels.integrations.transformers import AutoModelForCausalLM
from tests.processes import spawn

SIZES = dict(vocab_size=97, hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4)
KINDS = {
    "llama": dict(tie_word_embeddings=True),
    "qwen2": dict(num_key_value_heads=2),
    "gemma2": dict(head_dim=8, query_pre_attn_scalar=12, num_key_value_heads=2, sliding_window=6,
        tie_word_embeddings=True, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    # Without the balancing loss: each process would balance its own tokens.
    "mixtral": dict(num_key_value_heads=2, num_local_experts=4),
}  # fmt: skip


def make(family):
    config = {**SIZES, "initializer_range": 0.2, **KINDS[family]}
    return ARCHS[family].from_config(config, dtype=torch.float32, device="cpu")


def on_two_ranks(rank, meeting):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    ligermodels.training.offload.SMALLEST = 1  # a process of its own: nobody else sees it
    ids = torch.randint(97, (4, 16), generator=torch.Generator().manual_seed(1))
    for family in KINDS:
        whole, sharded = make(family), make(family)
        mesh = init_device_mesh("cpu", (2,))
        for layer in sharded.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        for recompute, offload in (("none", False), ("block", False), ("none", True)):
            sharded.gradient_checkpointing_enable({"recompute": recompute, "offload": offload})
            whole.zero_grad()
            sharded.zero_grad()
            whole(ids, labels=ids).loss.backward()
            mine = ids.chunk(2)[rank]
            sharded(mine, labels=mine).loss.backward()
            for found, expected in zip(sharded.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(found.grad.full_tensor(), expected.grad)
    model = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES))
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    output = model(ids, labels=ids)
    with pytest.raises(InputError, match="return_logits=True"):
        output.logits  # noqa: B018
    both = model(ids, labels=ids, return_logits=True)
    torch.testing.assert_close(both.loss, output.loss)
    dist.destroy_process_group()


def test_fsdp2_gives_the_gradients_of_one_process(tmp_path):
    spawn(on_two_ranks, args=(tmp_path / "meeting",), nprocs=2)
