"""Models that are sharded or wrapped: what they save is what the whole model saves; FSDP2's mixed precision is exact.

Two processes meet over gloo, on the CPU; what they save is compared in the test's own process.
"""

import contextlib
import copy
import datetime

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ligermodels import CheckpointError, HubError, InputError
from ligermodels.arch import ARCHS
from ligermodels.checkpoint.weights import same_bits
from tests.processes import spawn

CONFIG = dict(
    vocab_size=97, hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.2,
)  # fmt: skip
FAMILIES = {"tied": ("llama", dict(tie_word_embeddings=True)), "untied": ("qwen2", dict(tie_word_embeddings=False))}
MIXTRAL = ("mixtral", dict(num_local_experts=4))  # names on disk that are not the model's
SAVED = {"tied": FAMILIES["tied"], "experts": MIXTRAL}
IDS = torch.randint(97, (4, 16), generator=torch.Generator().manual_seed(1))


def make(family, **changes):
    name, own = family
    return ARCHS[name].from_config({**CONFIG, **own, **changes}, dtype=torch.float32, device="cpu")


def sharded(model, mesh, **options):
    """FSDP2 as it is usually applied: each block a group of its own, all else the root's."""
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@contextlib.contextmanager
def processes(rank, size, meeting):
    options = dict(rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
    dist.init_process_group("gloo", init_method=f"file://{meeting}", **options)
    try:
        yield init_device_mesh("cpu", (size,))
    finally:
        dist.destroy_process_group()


def save_on_two_ranks(rank, folder):
    torch.set_num_threads(1)
    with processes(rank, 2, folder / "meeting") as mesh:
        for name, family in SAVED.items():
            model = sharded(make(family), mesh)
            model.save_pretrained(folder / f"fsdp-{name}", max_shard_size="20KB")
            state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            assert bool(state) == (rank == 0)
            model.save_pretrained(folder / f"state-{name}", state_dict=state)
            ids = IDS.chunk(2)[rank]
            model(ids, labels=ids).loss.backward()
            model.save_pretrained(folder / f"after-backward-{name}")

        plan = dict.fromkeys(("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj"), ColwiseParallel())
        model = make(FAMILIES["untied"])
        for block in model.model.layers:
            parallelize_module(block, mesh, {**plan, "self_attn.o_proj": RowwiseParallel()})
        model.save_pretrained(folder / "tensor-parallel")

        model = make(FAMILIES["tied"])
        apply_activation_checkpointing(model, check_fn=lambda module: type(module).__name__ == "LlamaBlock")
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh).save_pretrained(folder / "recomputed")

        wrapped = DistributedDataParallel(make(FAMILIES["tied"]))
        if rank == 0:
            wrapped.module.save_pretrained(folder / "ddp")
            wrapped.module.save_pretrained(folder / "ddp-state", state_dict=wrapped.state_dict())

        (folder / "a-file").touch()
        model = sharded(make(FAMILIES["tied"]), mesh)
        with pytest.raises(HubError, match=r"^[^:]*a-file is a file" if rank == 0 else "rank 0: .*is a file"):
            model.save_pretrained(folder / "a-file")

        model = FullyShardedDataParallel(make(FAMILIES["tied"]), device_id=torch.device("cpu"))
        with pytest.raises(CheckpointError, match=r"FSDP1|state_dict="):
            model.module.save_pretrained(folder / "fsdp1")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    spawn(save_on_two_ranks, args=(folder,), nprocs=2)
    return folder


def read(folder):
    tensors = {}
    for shard in folder.glob("*.safetensors"):
        tensors |= load_file(shard)
    return tensors


def assert_same_folder(folder, model, tmp_path):
    model.save_pretrained(tmp_path / "whole")
    assert (folder / "config.json").read_text() == (tmp_path / "whole" / "config.json").read_text()
    found, wanted = read(folder), read(tmp_path / "whole")
    assert found.keys() == wanted.keys()
    assert all(same_bits(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("family", SAVED)
@pytest.mark.parametrize("way", ["fsdp", "state", "after-backward"])
def test_a_sharded_model_is_saved_as_the_whole_one(saved, tmp_path, way, family):
    model = make(SAVED[family])
    assert_same_folder(saved / f"{way}-{family}", model, tmp_path)
    if way == "fsdp":
        assert len(list((saved / f"fsdp-{family}").glob("*.safetensors"))) > 1
        import transformers  # the two processes do without

        hf = transformers.AutoModelForCausalLM.from_pretrained(saved / f"fsdp-{family}", dtype=torch.float32)
        # fp32 on both sides, a few hundred roundings deep.
        torch.testing.assert_close(hf(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", ["tensor-parallel", "recomputed", "ddp", "ddp-state"])
def test_a_wrapped_model_is_saved_as_the_bare_one(saved, tmp_path, way):
    assert_same_folder(saved / way, make(FAMILIES["untied" if way == "tensor-parallel" else "tied"]), tmp_path)


@pytest.fixture
def mesh(tmp_path):
    with processes(0, 1, tmp_path / "meeting") as mesh:
        yield mesh


def step(model, ids=IDS):
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss


@pytest.mark.parametrize("family, recompute", [("tied", "none"), ("untied", "mlp"), ("tied", "block")])
def test_rotary_tables_stay_fp32_under_mixed_precision(mesh, family, recompute):
    """One process: then FSDP2 in bf16 is a model that was cast to bf16, to the bit, with gradients in fp32."""
    model = make(FAMILIES[family])
    reference = copy.deepcopy(model).to(torch.bfloat16)
    for parameter in reference.parameters():  # each in a storage of its own, as FSDP2 has them: one matmul each
        parameter.data = parameter.data.clone()
    sharded(model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    seen = []
    for block in model.model.layers:
        block.self_attn.register_forward_pre_hook(
            lambda module, inputs: seen.append((inputs[0].dtype, inputs[1].cos.dtype, inputs[1].sin.dtype))
        )
    for each in (model, reference):
        each.gradient_checkpointing_enable({"recompute": recompute})
    assert torch.equal(step(model), step(reference))
    assert set(seen) == {(torch.bfloat16, torch.float32, torch.float32)}
    assert len(seen) == (4 if recompute == "block" else 2)
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(found.grad.full_tensor(), expected.grad.float())


def test_a_tied_table_in_a_group_of_its_own_names_the_fix(mesh):
    model = make(FAMILIES["tied"])
    fully_shard(model.model.embed_tokens, mesh=mesh)
    sharded(model, mesh)
    with pytest.raises(InputError, match=r"fully_shard\(\[model\.model\.embed_tokens, model\.model\.norm, model\.lm_h"):
        model(IDS, labels=IDS)
