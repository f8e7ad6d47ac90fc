"""Sharded models are loaded, drawn and saved as the whole model is, to the bit; each rank reads its own rows alone."""

import errno
import functools
import itertools
import os
import re

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from ligermodels.arch import ARCHS, Phi3, block as blocks, load
from ligermodels.arch.phi3 import Phi3Block
from ligermodels.checkpoint import quantization, reading, saving
from ligermodels.checkpoint.weights import Exported, named_weights, row_parts, same_bits, whole_tensor
from ligermodels.errors import HubError, InputError, LigermodelsError
from ligermodels.layers import moe
from ligermodels.layers.base import fp32_names
from ligermodels.parallel import Checkpoints
from ligermodels.training import AdamW, add_mtp
from tests.arch import toy_family
from tests.parallel.ranks import on_ranks, one_rank
from tests.tiny import ExactRouter

SIZES = dict(
    vocab_size=98, hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.2, pad_token_id=3, dtype="float32",
)  # fmt: skip
FAMILIES = {  # each with rows that neither 2 nor 4 ranks share evenly
    "tied": dict(model_type="llama", tie_word_embeddings=True),
    "biases": dict(model_type="qwen2", tie_word_embeddings=False, num_key_value_heads=1),
    "experts": dict(model_type="mixtral", num_local_experts=3),  # and with biases in `folder`
    "four-experts": dict(model_type="mixtral", num_local_experts=4),
    "one-expert": dict(model_type="mixtral", num_local_experts=1, num_experts_per_tok=1),
    "hybrid": dict(model_type="qwen3_5_text", head_dim=8, full_attention_interval=2, linear_num_key_heads=2,
                   linear_num_value_heads=6, linear_key_head_dim=5, linear_value_head_dim=3),
    "ahead": dict(model_type="glm4_moe", n_routed_experts=3, num_experts_per_tok=2, moe_intermediate_size=20),
    "packed": dict(model_type="phi3"),  # and with biases, see PackedBlock
    "toy": dict(toy_family.SIZES, vocab_size=98, intermediate_size=44, dtype="bfloat16"),  # and a gain in fp32
}  # fmt: skip
VISION = {  # more parameters that are drawn in ways of their own
    "towers": dict(model_type="mllama",
                   text_config=dict(SIZES, model_type="mllama_text_model", cross_attention_layers=[1]),
                   vision_config=dict(hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_global_layers=1,
                                      attention_heads=2, image_size=8, patch_size=4, vision_output_dim=32,
                                      intermediate_layers_indices=[1])),
    "patches": dict(model_type="qwen2_vl", rope_scaling=dict(type="mrope", mrope_section=[1, 1, 2]),
                    vision_config=dict(depth=1, embed_dim=16, num_heads=2, hidden_size=32)),
}  # fmt: skip
IDS = torch.randint(98, (2, 16), generator=torch.Generator().manual_seed(1))


class PackedBlock(Phi3Block):
    """With biases of the packed projections, which no family of the zoo has."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        for owner, name in ((self.self_attn, "qkv_proj"), (self.mlp, "gate_up_proj")):
            packed = getattr(owner, name)
            setattr(owner, name, torch.nn.Linear(packed.in_features, packed.out_features))


def random(family, **options):
    """A model with random weights, norms and biases too."""
    config = {**SIZES, **FAMILIES.get(family, VISION.get(family))}
    return ARCHS[config["model_type"]].from_config(config, **{"seed": 3, **options})


def write(family, folder):
    model = random(family, device="cpu")
    if family == "ahead":
        add_mtp(model)
    generator = torch.Generator().manual_seed(4)
    for name, weight in named_weights(model):
        if weight.ndim == 1 or name.endswith("proj_bias"):
            weight.data.normal_(1.0, 0.1, generator=generator)
    model.save_pretrained(folder)
    return load(folder).save_pretrained(folder, max_shard_size="20KB")  # with all fields of a config that was read


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_same_files(found, expected):
    found, expected = files_of(found), files_of(expected)
    assert found.keys() == expected.keys()
    assert not (different := [name for name in expected if found[name] != expected[name]]), different


def assert_same_tensors(found, expected):
    """In whichever files."""
    found, expected = (
        {name: x for path in folder.glob("*.safetensors") for name, x in load_file(path).items()}
        for folder in (found, expected)
    )
    assert found.keys() == expected.keys() and all(same_bits(found[name], expected[name]) for name in expected)


def assert_same_model(sharded, whole):
    expected, rows = dict(whole.named_parameters()), row_parts(sharded)
    for name, parameter in sharded.named_parameters():
        found = whole_tensor(parameter.detach(), rows.get(name))
        assert same_bits(found, expected[name].detach()), f"{name} {parameter.placements}"
        mesh = parameter.device_mesh
        copied = mesh.mesh_dim_names == ("tp",) and parameter.placements[-1].is_replicate()  # a norm
        assert copied or parameter.shape[0] < mesh.size() or parameter.to_local().numel() < expected[name].numel(), (
            f"{name} is not sharded"
        )


def load_and_save(folder, families, mesh, **parallel):
    for family in families:
        source = folder / family
        loaded = load(source, mesh=mesh, parallel=parallel)
        assert loaded.parallel is not None and not loaded.training
        assert_same_model(loaded, load(source))
        assert_same_model(random(family, mesh=mesh), random(family, device="cpu"))
        saved = folder / f"{family}-{'-'.join(map(str, mesh.shape))}"
        loaded.save_pretrained(saved, max_shard_size="20KB")
        assert_same_files(saved, source)  # on each rank, as soon as it returns: nobody is still writing
        dist.barrier()


def on_two_ranks(folder):
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    load_and_save(folder, ["tied", "experts", "toy"], mesh)
    load_and_save(
        folder,
        ["hybrid", "packed", "toy", "experts"],
        init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp")),
    )

    experts = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "ep"))
    load_and_save(folder, ["four-experts"], experts)
    with pytest.MonkeyPatch.context() as patched:
        asked = count_bytes(patched)
        model = load(folder / "four-experts", mesh=experts)
        assert sum(asked) == sum(parameter.to_local().nbytes for parameter in model.parameters())

    for dim in ("dp_shard", "tp"):  # with the layer for multi-token prediction, which is made of experts too
        sizes = dict(dp_shard=2) if dim == "dp_shard" else dict(dp_shard=1, tp=2)
        spread = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        model = load(folder / "ahead", mesh=spread, mtp_loss_weight=0.1)
        model.save_pretrained(folder / f"ahead-{dim}", max_shard_size="20KB")
        assert_same_tensors(folder / f"ahead-{dim}", folder / "ahead")

    # After a forward pass, which leaves the last group gathered in bf16.
    model = load(folder / "biases", mesh=mesh, parallel=dict(param_dtype=torch.bfloat16))
    with torch.no_grad():
        model(IDS)
    model.save_pretrained(folder / "after-forward", max_shard_size="20KB")
    assert_same_files(folder / "after-forward", folder / "biases")

    with pytest.MonkeyPatch.context() as patched:
        asked = count_bytes(patched)
        model = load(folder / "tied", mesh=mesh)
        assert sum(asked) == sum(parameter.to_local().nbytes for parameter in model.parameters())
    torch.testing.assert_close(model(IDS, labels=IDS).loss, load(folder / "tied")(IDS, labels=IDS).loss)
    assert random("tied", mesh=mesh, device="meta").device.type == "meta"
    torch.manual_seed(rank)
    sharded = random("tied", mesh=mesh, seed=None)
    torch.manual_seed(0)  # of the first rank
    assert_same_model(sharded, random("tied", device="cpu", seed=None))

    with pytest.MonkeyPatch.context() as patched:
        written = names_written(patched)
        model.save_pretrained(folder / "both", max_shard_size="20KB")
        assert all(int(re.search(r"\d+", name)[0]) % 2 == 1 - rank for name in written) and len(written) > 1
        written.clear()
        model.save_pretrained(folder / "main", max_shard_size="20KB", is_main_process=rank == 1)
        assert bool(written) == (rank == 1)
        assert_same_files(folder / "main", folder / "tied")
    fail(rank, model, folder)


def count_bytes(patched):
    """A list that gets the bytes of each tensor on disk that are copied; nothing else may be done with one."""
    asked, read = [], reading.SafetensorsReader.read

    class Counted(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, arguments=(), options=None):
            if function.__name__ == "copy_":
                asked.append(arguments[1].as_subclass(torch.Tensor).nbytes)
            else:
                assert function.__name__ in ("__getitem__", "as_subclass"), function
            return super().__torch_function__(function, types, arguments, options)

    patched.setattr(reading.SafetensorsReader, "read", lambda self, name: read(self, name).as_subclass(Counted))
    return asked


def names_written(patched):
    """A list that gets the names of the weight files that this process writes."""
    written, write_file = [], saving.write_file

    def watched(path, *rest):
        written.append(path.name)
        write_file(path, *rest)

    patched.setattr(saving, "write_file", watched)
    return written


def fail(rank, model, folder):
    """One rank fails: both raise, and the old folder stays."""
    state, target = files_of(folder / "both"), folder / "both"

    def full_disk(path, *rest):
        (path / "new" if path.is_dir() else path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def broken(*arguments):
        raise ValueError("a bug")

    for failing in (0, 1):
        for name, replacement, kind in (
            ("sync", full_disk, HubError),
            ("write_file", broken, LigermodelsError),
            ("finish", full_disk, HubError),  # of rank 0 alone
        ):
            if name == "finish" and failing == 1:
                continue
            own = kind if kind is HubError else ValueError
            with pytest.MonkeyPatch.context() as patched:
                if rank == failing:
                    patched.setattr(saving, name, replacement)
                with pytest.raises(own if rank == failing else kind) as caught:
                    model.save_pretrained(target, max_shard_size="20KB")
            assert (f"rank {failing}: " in str(caught.value)) == (rank != failing)
            if kind is HubError:
                assert caught.value.errno == errno.ENOSPC and "free some space" in str(caught.value)
            dist.barrier()
            assert files_of(target) == state and not list(folder.glob(".both*"))

    model.save_pretrained(target, max_shard_size="20KB")
    assert_same_files(target, folder / "tied")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(Phi3, "block_class", PackedBlock)
    monkeypatch.setattr(blocks, "MoE", functools.partial(moe.MoE, bias=True))
    monkeypatch.setitem(ARCHS, "toy", toy_family.Toy)
    for family in FAMILIES:
        write(family, tmp_path / family)
    return tmp_path


def test_two_ranks(folder):
    on_ranks(folder, lambda: on_two_ranks(folder))


def steps(model, optimizer, count):
    for _ in range(count):
        model(IDS, labels=IDS).loss.backward()
        assert all(p.grad.dtype == p.dtype for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()


def in_fp32_on_two_ranks(folder):
    kept = fp32_names(load(folder / "experts"))
    assert len(kept) == 4
    for family, names, sizes in (
        ("experts", ("dp_shard",), (2,)),
        ("experts", ("dp_shard", "tp"), (1, 2)),
        ("four-experts", ("dp_shard", "ep"), (1, 2)),
    ):
        mesh, source, last = init_device_mesh("cpu", sizes, mesh_dim_names=names), folder / family, names[-1]
        load_and_save(folder, [family], mesh)
        run, again = (load(source, mesh=mesh).train() for _ in range(2))
        of_run, of_again = (AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.1, seed=1) for model in (run, again))
        steps(run, of_run, 2)
        with Checkpoints(folder / f"run-{last}", run, of_run) as checkpoints:
            checkpoints.save(2)
        with Checkpoints(folder / f"run-{last}", again, of_again) as checkpoints:
            assert checkpoints.load() == 2
        steps(run, of_run, 1)
        steps(again, of_again, 1)
        stepped = {name: whole_tensor(p.detach()) for name, p in again.named_parameters()}
        for name, parameter in run.named_parameters():
            assert parameter.dtype == (torch.float32 if name in kept else torch.bfloat16), name
            assert same_bits(whole_tensor(parameter.detach()), stepped[name]), name
        if last != "tp":  # which has other shapes
            whole = load(source)
            whole.load_state_dict(stepped)
            run.save_pretrained(folder / f"stepped-{last}", max_shard_size="20KB")
            saved = whole.save_pretrained(folder / f"whole-{last}-{dist.get_rank()}", max_shard_size="20KB")
            assert_same_files(folder / f"stepped-{last}", saved)


def test_what_stays_in_fp32_is_loaded_trained_resumed_and_saved_in_fp32(tmp_path, monkeypatch):
    monkeypatch.setattr(moe, "Router", ExactRouter)
    monkeypatch.setitem(SIZES, "dtype", "bfloat16")
    for family in ("experts", "four-experts"):
        write(family, tmp_path / family)
    on_ranks(tmp_path, lambda: in_fp32_on_two_ranks(tmp_path))


def on_four_ranks(folder):
    rank = dist.get_rank()
    tensor = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    load_and_save(folder, FAMILIES, tensor)
    load_and_save(folder, ["biases", "one-expert"], init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",)))
    for family in ("tied", "hybrid", "packed"):
        with pytest.MonkeyPatch.context() as patched:
            asked = count_bytes(patched)
            model = load(folder / family, mesh=tensor)
            assert sum(asked) == sum(parameter.to_local().nbytes for parameter in model.parameters())
    for mesh in (tensor, tensor["dp_shard"]):
        assert_same_model(random("patches", mesh=mesh), random("patches", device="cpu"))
    assert_same_model(random("towers", mesh=tensor["dp_shard"]), random("towers", device="cpu"))

    load_and_save(folder, ["four-experts"], init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "ep")))
    for names in (("dp_replicate", "dp_shard"), ("dp_shard", "cp")):
        load_and_save(folder, ["experts"], init_device_mesh("cpu", (2, 2), mesh_dim_names=names))

    # A mesh of some of the processes; and two, of which neither holds the other's ranks.
    half = DeviceMesh("cpu", [1, 3], mesh_dim_names=("dp_shard",))
    if rank in (1, 3):
        model = load(folder / "tied", mesh=half)
        model.save_pretrained(folder / "half", max_shard_size="20KB")
        assert_same_files(folder / "half", folder / "tied")
    dist.barrier()
    model = load(folder / "biases")
    for block, one in zip(model.model.layers, ("dp_shard", "tp"), strict=True):
        fully_shard(block, mesh=tensor[one])
    with pytest.MonkeyPatch.context() as patched:
        written = names_written(patched)
        model.save_pretrained(folder / "mixed", max_shard_size="20KB")
    assert_same_files(folder / "mixed", folder / "biases")
    names = [None] * 4
    dist.all_gather_object(names, written)
    assert sorted(itertools.chain(*names)) == sorted(path.name for path in (folder / "mixed").glob("*.safetensors"))


@pytest.mark.slow
def test_four_ranks_with_tensor_parallelism_and_copies(folder):
    on_ranks(folder, lambda: on_four_ranks(folder), 4)


def test_each_round_of_a_save_gathers_no_more_than_the_largest_parameter():
    sizes = [5, 1, 8, 2, 2, 4, 8, 1]
    boxes = {f"t{i}": (torch.full((size,), float(i)), ()) for i, size in enumerate(sizes)}
    read = []

    class Watched(Exported):
        def read(self, name):
            read.append(name)
            return super().read(name)

    queues = [[["t0", "t1"], ["t4", "t5", "t7"]], [["t2"], ["t3", "t6"]]]
    # Rounds: t0 t1 (6 of at most 8) beside t2; t4 t5 t7 (7) beside t3; nothing beside t6.
    rounds = {"t0": "t0t1t2", "t4": "t0t1t2t4t5t7t3", "t6": "t0t1t2t4t5t7t3t6"}
    round_of = {"t1": "t0", "t2": "t0", "t5": "t4", "t7": "t4", "t3": "t4"}
    for own, queue in enumerate(queues):
        read.clear()
        seen = [(f"t{int(x[0])}", "".join(read)) for x in saving._gathered(Watched(boxes), queues, own)]
        assert seen == [(name, rounds[round_of.get(name, name)]) for shard in queue for name in shard]


REFUSED = [
    (dict(parallel={}), "pass both"),
    (dict(mesh=True, device_map="auto"), "pass mesh= alone"),
    (dict(mesh=True, device="cuda:1"), "leave device out"),
    (dict(mesh=True, quantization_config={"load_in_4bit": True}), "leave mesh out"),
    (dict(mesh=True, parallel=dict(nonsense=1)), "nonsense"),
]


def test_arguments_that_do_not_go_with_a_mesh(tmp_path, monkeypatch):
    write("tied", tmp_path / "tied")
    monkeypatch.setattr(quantization, "choose", lambda given, saved: given)  # its libraries take long to import
    with one_rank(tmp_path):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
        for options, message in REFUSED:
            options = {name: mesh if name == "mesh" else value for name, value in options.items()}
            with pytest.raises((InputError, TypeError), match=message):
                load(tmp_path / "tied", **options)
            if not options.keys() & {"device_map", "quantization_config"}:
                with pytest.raises((InputError, TypeError), match=message):
                    random("tied", **options)


def test_a_damaged_weight_is_named_by_the_rank_that_holds_it(tmp_path):
    folder = write("tied", tmp_path / "tied")
    (path,) = {folder / file for file in folder.glob("*00001-of*.safetensors")}
    tensors = load_file(path)
    name = next(iter(tensors))
    tensors[name].view(-1)[0] = torch.nan
    save_file(tensors, path, {"format": "pt"})
    with one_rank(tmp_path):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
        with pytest.warns(UserWarning, match=re.escape(name)):
            load(folder, mesh=mesh)
