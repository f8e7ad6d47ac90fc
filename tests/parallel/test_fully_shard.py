"""FSDP2 and tensor parallelism that the user applies, also where the model generates."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ligermodels import InputError
from tests.checkpoint.fixtures import make_model
from tests.checkpoint.test_sharded import sharded
from tests.parallel.ranks import on_ranks, one_rank
from tests.parallel.runs import make

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


def heads_on_two_ranks():
    """A plan of q, k, v and o: caches have a rank's key heads, as its keys have them."""
    mesh, columns = init_device_mesh("cpu", (2,)), ("q_proj", "k_proj", "v_proj")
    plan = {f"self_attn.{name}": ColwiseParallel() for name in columns} | {"self_attn.o_proj": RowwiseParallel()}
    for family in ("llama", "qwen3_5"):
        whole = make(family).eval()
        model = copy.deepcopy(whole)
        for block in model.model.layers:
            if hasattr(block, "self_attn"):
                parallelize_module(block, mesh, plan)
        for options in ({}, dict(labels=IDS), dict(use_cache=False)):  # the first with a cache
            found, expected = model(IDS, **options), whole(IDS, **options)
            name = "loss" if "labels" in options else "logits"
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)  # fp32 sums of halves
        options = dict(max_new_tokens=9, eos_token_id=())
        assert torch.equal(model.generate(IDS, **options), whole.generate(IDS, **options))
        options |= dict(do_sample=True, num_return_sequences=2, seed=1)
        assert torch.equal(model.generate(IDS[:1], **options), whole.generate(IDS[:1], **options))


def test_a_plan_of_heads_evaluates_and_generates(tmp_path):
    on_ranks(tmp_path, heads_on_two_ranks)


def texts_of_unequal_length():
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    whole = make("llama").eval()
    model, ran = sharded(copy.deepcopy(whole), mesh), []
    model.register_forward_pre_hook(lambda *_: ran.append(1))
    ids = IDS[rank:][:1, : 5 + rank]
    for lengths in ((2, 7), (6, 1), (3, 3)):
        options = dict(max_new_tokens=lengths[rank], eos_token_id=())
        assert torch.equal(model.generate(ids, synced_gpus=True, **options), whole.generate(ids, **options))
        assert len(ran) == max(lengths)
        ran.clear()


def test_ranks_that_end_early_run_the_model_until_all_have_ended(tmp_path):
    on_ranks(tmp_path, texts_of_unequal_length)
