"""FSDP2 that the user applies: its mixed precision is exact, and a tied table in a group of its own is refused."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ligermodels import InputError
from tests.checkpoint.fixtures import make_model
from tests.checkpoint.test_sharded import sharded
from tests.parallel.ranks import one_rank

IDS = torch.arange(32).reshape(2, 16)


@pytest.fixture
def mesh(tmp_path):
    with one_rank(tmp_path):
        yield init_device_mesh("cpu", (1,))


def step(model):
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    return loss


@pytest.mark.parametrize("recompute", ["none", "mlp", "block"])
def test_rotary_tables_stay_fp32_under_mixed_precision(mesh, recompute):
    """One process: then FSDP2 in bf16 is a model that was cast to bf16, to the bit, with gradients in fp32."""
    model = make_model(num_hidden_layers=2, tie_word_embeddings=recompute != "mlp", initializer_range=0.2)
    reference = copy.deepcopy(model).to(torch.bfloat16)
    for parameter in reference.parameters():  # each in a storage of its own, as FSDP2 has them: one matmul each
        parameter.data = parameter.data.clone()
    sharded(model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    seen = set()
    for block in model.model.layers:
        block.self_attn.register_forward_pre_hook(
            lambda module, inputs: seen.add((inputs[0].dtype, *(x.dtype for x in inputs[1].rotary["full"])))
        )
    for each in (model, reference):
        each.gradient_checkpointing_enable({"recompute": recompute})
    assert torch.equal(step(model), step(reference))
    assert seen == {(torch.bfloat16, torch.float32, torch.float32)}
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(found.grad.full_tensor(), expected.grad.float())


def test_a_tied_table_in_a_group_of_its_own_names_the_fix(mesh):
    model = make_model(tie_word_embeddings=True)
    fully_shard(model.model.embed_tokens, mesh=mesh)
    sharded(model, mesh)
    with pytest.raises(InputError, match=r"fully_shard\(\[model\.model\.embed_tokens, model\.model\.norm, model\.lm_h"):
        model(IDS, labels=IDS)
