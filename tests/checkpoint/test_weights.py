"""The weight table: buffers are its rows as parameters are; rows in another order on disk, or transposed."""

import copy
import itertools
import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

import ligermodels
from ligermodels import CheckpointError, InputError
from ligermodels.arch.block import Block, attention, gated_mlp
from ligermodels.checkpoint.reading import open_checkpoint
from ligermodels.checkpoint.weights import (
    Names,
    Rearranged,
    Region,
    Renamed,
    export,
    named_weights,
    regions,
    to_halves,
)
from ligermodels.conversion.layouts import FolderSource
from ligermodels.conversion.merging import MergedSource
from ligermodels.conversion.source import View
from ligermodels.kernels.linear.nf4 import quantize_nf4
from ligermodels.layers.base import Layer
from ligermodels.parallel.checkpoints import Checkpoints
from ligermodels.training import add_lora, load_adapter, load_mtp, merge_lora, save_adapter
from tests.checkpoint.fixtures import CONFIG, WEIGHTS
from tests.conversion.layouts import EXTRA, SIZES, same, stored
from tests.parallel.ranks import on_ranks
from tests.parallel.test_loading import assert_same_files

IDS = torch.arange(16).reshape(2, 8)
LAYER = "model.layers.0."


class Scale(Layer):
    """x times a number for each channel, which is not trained."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("channels", torch.empty(size))

    def init_weights(self, draw):
        draw(self.channels)

    def forward(self, x):
        return x * (1 + self.channels)


class ScaledBlock(Block):
    """A block that is scaled by buffers: of a layer in it, and of its own."""

    def __init__(self, config, layer):
        super().__init__(config, attention(config, layer), gated_mlp(config))
        self.scale = Scale(config.hidden_size)
        self.register_buffer("layer_scalar", torch.empty(()))

    def init_weights(self, draw):
        draw(self.layer_scalar, lambda values, generator: values.fill_(0.75))

    def forward(self, x, residual, batch, cache=None):
        x, residual = super().forward(x, residual, batch, cache)
        return self.scale(x) * self.layer_scalar, residual


class Scaled(ligermodels.Llama):
    block_class = ScaledBlock
    DISK_NAMES = {"model.layers.{i}.scale.channels": "model.layers.{i}.channel_scale"}


def rope_of_pairs(rows, config):
    """Of each head the first half of the rows, which rotates, in pairs on disk and in halves here (GLM-4, DeepSeek)."""
    rotated, rest = rows.unflatten(0, (-1, 2, config.head_dim // 2)).unbind(1)
    return torch.cat([to_halves(rotated.flatten(), len(rotated)).view_as(rotated), rest], 1).flatten()


def by_part(rows, config):
    """On disk the queries, the key and the value of a key head lie together; here all queries, all keys, all values."""
    queries = config.num_attention_heads // config.num_key_value_heads
    groups = rows.view(config.num_key_value_heads, queries + 2, config.head_dim)
    return torch.cat([part.flatten() for part in groups.split([queries, 1, 1], 1)])


def in_turn(rows, config):
    """On disk one row of gate and one of up in turn; here all of gate, then all of up (gpt-oss)."""
    return to_halves(rows, 1)


class Turned(ligermodels.Llama):
    """Rows of q and k, and of their biases, and a matrix that is transposed."""

    DISK_NAMES = {
        "model.layers.{i}.self_attn.q_proj.{w}": Rearranged("model.layers.{i}.self_attn.q.{w}", rope_of_pairs),
        "model.layers.{i}.self_attn.k_proj.{w}": Rearranged("model.layers.{i}.self_attn.k.{w}", rope_of_pairs),
        "model.layers.{i}.mlp.down_proj.weight": Rearranged("model.layers.{i}.mlp.down_proj", transposed=True),
    }


class Packed(ligermodels.Phi3):
    """Packed projections, which tensor parallelism splits in each of their parts; one is transposed as well."""

    DISK_NAMES = {
        "model.layers.{i}.self_attn.qkv_proj.weight": Rearranged("model.layers.{i}.self_attn.qkv", by_part),
        "model.layers.{i}.mlp.gate_up_proj.weight": Rearranged(
            "model.layers.{i}.mlp.gate_up", in_turn, transposed=True
        ),
    }


EXPERTS = "model.layers.{i}.mlp.experts."


class Stacked(ligermodels.Mixtral):
    """gpt-oss' experts."""

    DISK_NAMES = {
        EXPERTS + "gate_up_proj": Rearranged(EXPERTS + "gate_up_proj", in_turn, dim=1, transposed=True),
        EXPERTS + "down_proj": Rearranged(EXPERTS + "down_proj", transposed=True),
    }
    OTHER_LAYOUTS = (ligermodels.Mixtral.DISK_NAMES,)


class OneByOne(ligermodels.Mixtral):
    """One tensor for each expert and part, backwards, or transposed."""

    DISK_NAMES = {
        EXPERTS + "gate_up_proj": Rearranged(
            (EXPERTS + "{e}.w1", EXPERTS + "{e}.w3"), lambda rows, config: rows.flip(0), transposed=True
        ),
        EXPERTS + "down_proj": Rearranged(EXPERTS + "{e}.w2", lambda rows, config: rows.roll(1)),
    }


BUFFERS = {LAYER + "channel_scale": (16,), LAYER + "layer_scalar": ()}


def make(arch=Scaled, **options):
    sizes = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, attention_bias=True, num_local_experts=3)
    values = {**CONFIG, **sizes, "initializer_range": 0.2, "pad_token_id": None}
    values = {name: value for name, value in values.items() if name in arch.config_class.field_names()}
    return arch.from_config(values, **{"seed": 0, "device": "cpu", **options})


def load(folder, arch=Scaled, **options):
    return arch.from_hub(folder, progress=False, **options)


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of all the models here; saved from a load, whose config has all fields."""
    root = tmp_path_factory.mktemp("weights")
    for arch in ARCHS:
        made = make(arch).save_pretrained(root / f"made-{arch.__name__}")
        load(made, arch).save_pretrained(root / arch.__name__)
    return root


ARCHS = (Scaled, Turned, Packed, Stacked, OneByOne)


@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_loaded_is_saved_with_the_same_bytes(folder, tmp_path, arch):
    source = folder / arch.__name__
    model = load(source, arch)
    assert same(dict(named_weights(model)), dict(named_weights(make(arch))))
    assert_same_files(model.save_pretrained(tmp_path / "whole"), source)
    shards = model.save_pretrained(tmp_path / "shards", max_shard_size="1KB")
    assert len(list(shards.glob("*.safetensors"))) > 2 and same(stored(shards), stored(source))
    assert_same_files(load(shards, arch).save_pretrained(tmp_path / "again"), source)
    state = {f"module.{name}": x for name, x in copy.deepcopy(model).state_dict().items()}
    empty = arch.from_config(model.config, device="meta")
    assert_same_files(empty.save_pretrained(tmp_path / "state", state_dict=state), source)


def interleaved(rows):
    """Rows [all of gate, all of up] -> one of each in turn."""
    out = torch.empty_like(rows)
    out[0::2], out[1::2] = rows.chunk(2)
    return out


def test_what_is_on_disk(folder):
    """Against orders that are written out by hand."""
    model, disk = make(Turned).model.layers[0], stored(folder / "Turned")
    pairs = [0, 2, 1, 3, 4, 5, 6, 7]  # of our rows: halves (0, 1) and (2, 3), then four that do not rotate
    for ours, theirs in (("q_proj.weight", "q.weight"), ("q_proj.bias", "q.bias"), ("k_proj.weight", "k.weight")):
        heads = model.self_attn.get_parameter(ours).unflatten(0, (-1, 8))
        assert torch.equal(disk[f"{LAYER}self_attn.{theirs}"], heads[:, pairs].flatten(0, 1))
    assert torch.equal(disk[f"{LAYER}mlp.down_proj"], model.mlp.down_proj.weight.T)

    model, disk = make(Packed).model.layers[0], stored(folder / "Packed")
    q, k, v = model.self_attn.qkv_proj.weight.split([32, 16, 16])
    groups = [q[:16], k[:8], v[:8], q[16:], k[8:], v[8:]]
    assert torch.equal(disk[f"{LAYER}self_attn.qkv"], torch.cat(groups))
    assert torch.equal(disk[f"{LAYER}mlp.gate_up"], interleaved(model.mlp.gate_up_proj.weight).T)

    experts, disk = make(Stacked).model.layers[0].mlp.experts, stored(folder / "Stacked")
    wanted = torch.stack([interleaved(one).T for one in experts.gate_up_proj])
    assert torch.equal(disk[f"{LAYER}mlp.experts.gate_up_proj"], wanted)
    assert torch.equal(disk[f"{LAYER}mlp.experts.down_proj"], experts.down_proj.transpose(1, 2))

    experts, disk = make(OneByOne).model.layers[0].mlp.experts, stored(folder / "OneByOne")
    for e in range(3):
        gate, up = experts.gate_up_proj[e].chunk(2)
        rolled = torch.cat([experts.down_proj[e][1:], experts.down_proj[e][:1]])
        for name, wanted in (("w1", gate.flip(0).T), ("w3", up.flip(0).T), ("w2", rolled)):
            assert torch.equal(disk[f"{LAYER}mlp.experts.{e}.{name}"], wanted)


class Biased(torch.nn.Module):
    """gpt-oss' bias of experts."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.tensor([[0.0, 2.0, 1.0, 3.0], [10.0, 12.0, 11.0, 13.0]]))


def test_rows_of_vectors_in_a_stack():
    names = Names({"bias": Rearranged("b", in_turn, dim=1)})
    assert export(Biased(), names).read("b").tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]


@pytest.mark.parametrize("row, message", [
    (Rearranged("b", lambda rows, config: rows * 0, dim=1), "order of b in the table is no permutation of its 4 rows"),
    (Rearranged("b", lambda rows, config: rows[:1]), "order of b in the table is no permutation of its 2 rows"),
    (Rearranged("b", in_turn, dim=2), r"a box \[2, 4\] of it has too few dims"),
    (Rearranged("{e}", transposed=True), r"a box \[4\] of it has too few dims"),
])  # fmt: skip
def test_what_is_no_order_of_the_rows_is_refused_when_the_table_is_read(row, message):
    with pytest.raises(ValueError, match=message):
        regions(Biased(), {"bias": row})


def test_other_layouts_are_read_and_converted(folder, tmp_path):
    """A file with the experts one by one loads as the stacked one; a view of one under the names of the other, and of
    what is rearranged on both sides."""
    plain = ligermodels.Mixtral.from_config(load(folder / "Stacked", Stacked).config, seed=0, device="cpu")
    plain.save_pretrained(tmp_path / "plain")
    assert_same_files(load(tmp_path / "plain", Stacked).save_pretrained(tmp_path / "saved"), folder / "Stacked")
    for stored_by, wanted in itertools.product((Stacked, OneByOne, ligermodels.Mixtral), repeat=2):
        source = tmp_path / "plain" if stored_by is ligermodels.Mixtral else folder / stored_by.__name__
        with open_checkpoint(source) as reader:
            view = Renamed(plain, reader, stored_by.DISK_NAMES, wanted.DISK_NAMES)
            found = {name: view.read(name) for name in view.headers}
            assert {name: (x.dtype, tuple(x.shape)) for name, x in found.items()} == {
                name: (info.dtype, info.shape) for name, info in view.headers.items()
            }
        assert same(found, dict(export(plain, Names(wanted.DISK_NAMES))))


def test_a_shape_that_is_not_transposed_is_refused(folder, tmp_path):
    shutil.copytree(folder / "Turned", tmp_path / "x")
    name = LAYER + "mlp.down_proj"
    save_file({**stored(tmp_path / "x"), name: stored(tmp_path / "x")[name].T.contiguous()}, tmp_path / "x" / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"mlp.down_proj is \[16, 24\], the model has \[24, 16\]"):
        load(tmp_path / "x", Turned)


def test_rearranged_weights_are_quantised_but_not_saved(folder, tmp_path):
    model = load(folder / "Turned", Turned, quantization_config="nf4")
    q = make(Turned).model.layers[0].self_attn.q_proj.weight.detach()
    assert torch.equal(model.model.layers[0].self_attn.q_proj.operand.dequantize(), quantize_nf4(q).dequantize())
    with pytest.raises(CheckpointError, match=r"q_proj.weight is quantised, and .*q.weight has another order on disk"):
        model.save_pretrained(tmp_path / "saved")
    experts = load(folder / "Stacked", Stacked, quantization_config="int8").model.layers[0].mlp.experts
    wanted = make(Stacked).model.layers[0].mlp.experts.gate_up_proj
    assert torch.allclose(experts.gate_up_proj.operand.dequantize().view_as(wanted), wanted, atol=0.01)


@pytest.mark.parametrize("arch, targets, options", [
    (Turned, ("q_proj", "k_proj", "v_proj"), {}), (Turned, ("q_proj",), {"dora": True}), (Packed, ("qkv_proj",), {}),
])  # fmt: skip
def test_adapters_are_saved_in_the_order_of_the_rows_on_disk(folder, tmp_path, monkeypatch, arch, targets, options):
    """So PEFT and a merge of files read them; `load_adapter` takes them back."""
    model = add_lora(load(folder / arch.__name__, arch), r=2, targets=targets, **options)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "magnitude" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5, generator=torch.Generator().manual_seed(0))
    save_adapter(model, tmp_path / "adapter")
    again = load_adapter(load(folder / arch.__name__, arch), tmp_path / "adapter")
    assert torch.equal(logits(again), logits(model))
    file = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for target in targets:
        key = f"base_model.model.{LAYER}self_attn.{target}.lora_"
        adapter = model.model.layers[0].self_attn.get_submodule(target)
        order = {
            "q_proj": lambda b: b.unflatten(0, (-1, 8))[:, [0, 2, 1, 3, 4, 5, 6, 7]].flatten(0, 1),
            "qkv_proj": lambda b: torch.cat([b[:16], b[32:40], b[48:56], b[16:32], b[40:48], b[56:]]),
            "v_proj": lambda b: b,
        }.get(target)
        assert torch.equal(file[f"{key}A.weight"], adapter.lora_A.weight)
        if order is not None:
            assert torch.equal(file[f"{key}B.weight"], order(adapter.lora_B.weight))
            if options:
                assert torch.equal(file[f"{key}magnitude_vector"], order(adapter.lora_magnitude_vector.weight))
    if not options:
        monkeypatch.setitem(ligermodels.arch.ARCHS, arch.config_class.model_type, arch)
        merged = MergedSource(View(FolderSource(folder / arch.__name__)), tmp_path / "adapter")
        saved = stored(merge_lora(model).save_pretrained(tmp_path / "merged"))
        assert same(saved, {name: merged.read(name) for name in merged.headers})
        small = load_adapter(load(folder / arch.__name__, arch, quantization_config="nf4"), tmp_path / "adapter")
        assert same(load_file(save_adapter(small, tmp_path / "small") / "adapter_model.safetensors"), file)


@pytest.mark.parametrize("arch, options, name", [
    (Turned, {"targets": ["down_proj"]}, "mlp.down_proj.weight"),
    (Turned, {"targets": ["q_proj"], "modules_to_save": ["k_proj"]}, "self_attn.k_proj.weight"),
])  # fmt: skip
def test_adapters_of_other_layouts_are_refused_by_name(folder, tmp_path, monkeypatch, arch, options, name):
    base = load(folder / arch.__name__, arch)
    with pytest.raises(InputError, match=rf"add_lora: {LAYER}{name} has another layout on disk"):
        add_lora(base, r=2, **options)
    plain = add_lora(make(arch.__base__), r=2, **options)
    with pytest.raises(InputError, match=rf"load_adapter: {LAYER}{name} has another layout on disk"):
        load_adapter(base, save_adapter(plain, tmp_path / "adapter"))
    if options == {"targets": ["down_proj"]}:
        monkeypatch.setitem(ligermodels.arch.ARCHS, arch.config_class.model_type, arch)
        with pytest.raises(CheckpointError, match=r"mlp\.down_proj is transposed on disk"):
            MergedSource(View(FolderSource(folder / arch.__name__)), tmp_path / "adapter")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "places",
    [{"": "disk"}, {"": "cpu", "model.layers": "disk"}, {"": "cpu", LAYER + "mlp": "disk"}],
    ids=["all", "blocks", "mlp"],
)
def test_weights_on_the_disk_are_read_at_each_use(folder, tmp_path, arch, places):
    pytest.importorskip("accelerate")
    source = folder / arch.__name__
    model, plain = load(source, arch, device_map=places), load(source, arch)
    for name, weight in named_weights(model):
        last = max((place for place in places if name.startswith(place)), key=len)
        assert weight.is_meta == (places[last] == "disk"), name
    assert torch.equal(logits(model), logits(plain)) and torch.equal(logits(copy.deepcopy(model)), logits(plain))
    assert_same_files(model.save_pretrained(tmp_path / "saved"), source)


@pytest.mark.parametrize("places", [{"": "disk", LAYER + "mlp": "cpu"}, {"": "cpu", LAYER + "layer_scalar": "disk"}])
def test_a_split_block_cannot_have_its_own_weights_on_the_disk(folder, places):
    pytest.importorskip("accelerate")
    with pytest.raises(InputError, match=r"splits model.layers.0, which has .* such as model.layers.0.layer_scalar"):
        load(folder / "Scaled", device_map=places)


def test_buffers_are_drawn_cast_copied_and_mapped_as_parameters_are(folder):
    model = make(dtype=torch.bfloat16)
    buffers = dict(model.named_buffers())
    assert {x.dtype for x in buffers.values()} == {torch.bfloat16} and len(buffers) == 2
    block = model.model.layers[0]
    assert block.layer_scalar == 0.75 and 0.05 < block.scale.channels.std() < 0.4
    assert not torch.equal(block.scale.channels, make(dtype=torch.bfloat16, seed=1).model.layers[0].scale.channels)
    again = copy.deepcopy(model).to(torch.float64)
    assert again.model.layers[0].scale.channels.equal(block.scale.channels.double())
    loaded = load(folder / "Scaled", dtype=torch.float64)
    assert {x.dtype for _, x in named_weights(loaded)} == {torch.float64}
    mapped = load(folder / "Scaled")
    assert not [name for name, x in named_weights(mapped) if x.untyped_storage().resizable()], "they were copied"
    assert {name: tuple(load_file(folder / "Scaled" / WEIGHTS)[name].shape) for name in BUFFERS} == BUFFERS


def test_a_buffer_that_nothing_draws_or_fills_is_refused():
    class Undrawn(Scaled):
        class block_class(ScaledBlock):
            init_weights = Layer.init_weights

    with pytest.raises(InputError, match=r"model\.layers\.0\.layer_scalar has no values, nor have 0 others"):
        make(Undrawn)

    class Temporary(Scaled):
        class block_class(ScaledBlock):
            def __init__(self, config, layer):
                super().__init__(config, layer)
                self.register_buffer("angles", torch.arange(3.0), persistent=False)

    with pytest.raises(InputError, match=r"layers\.0\.angles is a buffer that no checkpoint holds.*persistent"):
        make(Temporary)


def test_a_buffer_of_integers_is_refused(folder):
    class Counted(Scaled):
        class block_class(ScaledBlock):
            def __init__(self, config, layer):
                super().__init__(config, layer)
                self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    for build in (lambda: make(Counted), lambda: load(folder / "Scaled", Counted)):
        with pytest.raises(InputError, match=r"layers\.0\.steps is a buffer of torch\.int64, and .*persistent=False"):
            build()


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_buffers_of_a_quantised_model(folder, tmp_path, kind):
    source = folder / "Scaled"
    model = load(source, quantization_config=kind)
    block = model.model.layers[0]
    assert same({LAYER + "channel_scale": block.scale.channels, LAYER + "layer_scalar": block.layer_scalar},
                {name: stored(source)[name] for name in BUFFERS})  # fmt: skip
    if kind == "int8":
        return
    saved = model.save_pretrained(tmp_path / "saved")
    assert {name: tuple(stored(saved)[name].shape) for name in BUFFERS} == BUFFERS
    again = load(saved, quantization_config=kind)
    assert torch.equal(logits(again), logits(model))
    assert_same_files(again.save_pretrained(tmp_path / "again"), saved)


@pytest.mark.parametrize("change, message", [
    (lambda state: state.pop(LAYER + "channel_scale"), r"missing \(1 of 14\): model.layers.0.channel_scale"),
    (lambda state: state.update({LAYER + "layer_scalar": torch.ones(2)}), r"layer_scalar is \[2\], the model has \[\]"),
    (lambda state: state.update({LAYER + "layer_scalar": torch.ones((), dtype=torch.int64)}), "is torch.int64"),
])  # fmt: skip
def test_buffers_are_checked_from_headers(folder, tmp_path, change, message):
    state = stored(folder / "Scaled")
    change(state)
    (tmp_path / "config.json").write_bytes((folder / "Scaled" / "config.json").read_bytes())
    save_file(state, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def recorded(patched):
    """A list that gets what is read of each tensor on disk."""
    read, from_disk = [], Region.from_disk
    patched.setattr(Region, "from_disk", lambda *given: (read.append(from_disk(*given)), read[-1])[1])
    return read


def on_two_ranks(folder, root):
    for arch in ARCHS:
        for shape in ((2, 1), (1, 2)):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_shard", "tp"))
            mesh = mesh if shape[1] > 1 else mesh["dp_shard"]
            source = folder / arch.__name__
            with pytest.MonkeyPatch.context() as patched:
                read = recorded(patched)
                model = load(source, arch, mesh=mesh)
            plain = load(source, arch)
            whole = dict(plain.named_buffers())
            assert all(type(x) is torch.Tensor and same({"": x}, {"": whole[n]}) for n, x in model.named_buffers())
            torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-5)
            saved = root / f"{arch.__name__}-{shape[0]}"
            assert_same_files(model.save_pretrained(saved, max_shard_size="1MB"), source)
            assert sum(x.nbytes for x in read) == sum(x.to_local().nbytes for x in model.parameters())  # its rows
            drawn = make(arch, mesh=mesh, device=None, seed=0)
            assert same(dict(drawn.named_buffers()), dict(make(arch).named_buffers()))
            dist.barrier()


def test_a_sharded_model_saves_the_bytes_of_the_whole_one(folder, tmp_path):
    on_ranks(tmp_path, lambda: on_two_ranks(folder, tmp_path))


def test_checkpoints_of_a_run_have_the_buffers(tmp_path):
    model, other = make(), make(seed=1)
    with Checkpoints(tmp_path, model, torch.optim.SGD(model.parameters())) as checkpoints:
        checkpoints.save(3)
    with Checkpoints(tmp_path, other, torch.optim.SGD(other.parameters())) as checkpoints:
        assert checkpoints.load() == 3
    assert same(other.state_dict(), model.state_dict())


def test_buffers_of_the_layer_for_multi_token_prediction(tmp_path, monkeypatch):
    make_mtp = ligermodels.Qwen3_5.make_mtp

    def scaled(config):
        mtp = make_mtp(config)
        mtp.scale = Scale(3)
        return mtp

    monkeypatch.setattr(ligermodels.Qwen3_5, "make_mtp", staticmethod(scaled))
    config = {**SIZES, **EXTRA["qwen3_5_text"], "model_type": "qwen3_5_text"}
    model = ligermodels.Qwen3_5.from_config(config, seed=0, device="cpu", mtp_loss_weight=0.1)
    saved = model.save_pretrained(tmp_path / "saved")
    loaded = ligermodels.load(saved, progress=False)
    load_mtp(loaded)
    assert loaded.mtp.scale.channels.any() and same(loaded.state_dict(), model.state_dict())
    assert same(stored(loaded.save_pretrained(tmp_path / "again")), stored(saved))
