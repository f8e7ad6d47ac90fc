"""Our own quantisers: linear modules are quantised as they are read; nf4 is saved in the layout of bitsandbytes."""

import copy
import json
import shutil
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import ligermodels
from ligermodels import CheckpointError, ConfigError, InputError
from ligermodels.checkpoint import quantization
from ligermodels.checkpoint.quantizers import NF4, WeightOnly
from ligermodels.checkpoint.weights import same_bits
from ligermodels.kernels.linear.nf4 import quantize_nf4
from ligermodels.kernels.linear.quantized import dequantize_reference, quantize
from ligermodels.layers import GatedMLP, QuantizedLinear
from ligermodels.layers.linear import operands_of
from ligermodels.parallel import make_mesh, parallelize
from ligermodels.training import add_lora
from tests.checkpoint.fixtures import make_biased_model
from tests.conversion.layouts import same, stored
from tests.parallel.ranks import on_ranks

IDS = torch.tensor([[1, 5, 9, 2, 30, 7]])
KINDS = ["int8", "fp8", "int4"]
Q = "model.layers.0.self_attn.q_proj"
STATE = f"{Q}.weight.quant_state.bitsandbytes__nf4"


@pytest.fixture(autouse=True)
def _without_bitsandbytes(monkeypatch):
    """None of this needs it."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_biased_model().save_pretrained(tmp_path_factory.mktemp("plain") / "model")


def load(folder, config="nf4", **options):
    return ligermodels.load(folder, quantization_config=config, device="cpu", progress=False, **options)


@pytest.fixture(scope="module")
def saved(plain, tmp_path_factory):
    return load(plain).save_pretrained(tmp_path_factory.mktemp("saved") / "model")


def quantised(model):
    return {name for name, module in model.named_modules() if type(module) is QuantizedLinear}


def expected(weight, method, double):
    """(the bytes of a quantised weight, what it is dequantised to)."""
    if method == "nf4":
        made = quantize_nf4(weight, double=double)
        return made.packed, made.dequantize()
    made = quantize(weight, method)
    return made.packed.view(torch.uint8), dequantize_reference(made)


@pytest.mark.parametrize("config, method, double", [
    ("nf4", "nf4", True), (NF4(double=False), "nf4", False), ({"quant_method": "nf4", "double": False}, "nf4", False),
    *((kind, kind, False) for kind in KINDS),
], ids=str)  # fmt: skip
def test_a_model_is_that_of_its_dequantised_weights(plain, config, method, double):
    reference, model = ligermodels.load(plain, device="cpu", progress=False), load(plain, config)
    linears = {name for name, module in reference.named_modules() if type(module) is nn.Linear}
    assert quantised(model) == linears and len(linears) == 14 and "lm_head" not in linears
    with torch.no_grad():
        before = reference(IDS).logits
        for name in linears:
            weight, found = reference.get_submodule(name).weight, model.get_submodule(name)
            packed, values = expected(weight.detach(), method, double)
            stored = found.weight if method == "nf4" else found.operand.packed.view(torch.uint8)
            assert torch.equal(stored, packed), name
            weight.copy_(values)
        logits = reference(IDS).logits
    torch.testing.assert_close(model(IDS).logits, logits, rtol=1e-5, atol=1e-5)
    assert (logits - before).abs().max() > 1e-3
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, p in reference.named_parameters() if name.rpartition(".")[0] not in linears}
    assert model.is_quantized and model.hf_quantizer.is_trainable is (method == "nf4")
    assert model.hf_quantizer.quant_method == method
    for one in (model, reference):
        one(IDS, labels=IDS).loss.backward()
    for name in ("model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"):
        found, wanted = (one.get_parameter(name).grad for one in (model, reference))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert all(p.grad is None for name in linears for p in model.get_submodule(name).parameters())
    options = dict(attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1]]), max_new_tokens=12, do_sample=False)
    assert torch.equal(model.eval().generate(IDS, **options), reference.eval().generate(IDS, **options))


def test_modules_are_skipped_by_name(plain, tmp_path):
    model = load(plain, NF4(skip_modules=["down_proj", "model.layers.1"]))
    assert len(quantised(model)) == 6 and not any(
        "down_proj" in name or "layers.1" in name for name in quantised(model)
    )
    again = load(model.save_pretrained(tmp_path / "x"))
    assert quantised(again) == quantised(model) and torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("double", [True, False])
def test_what_is_saved_is_loaded_bit_for_bit(plain, tmp_path, double):
    """tests/tools compares the folder with the one that transformers writes."""
    model = load(plain, NF4(double=double, compute_dtype="float32"))
    folder = model.save_pretrained(tmp_path / "one")
    again = load(folder)
    assert again.hf_quantizer == model.hf_quantizer and torch.equal(again(IDS).logits, model(IDS).logits)
    again = load(again.save_pretrained(tmp_path / "two", max_shard_size="8KB"))
    assert same(stored(again.save_pretrained(tmp_path / "three")), stored(folder))
    assert (f"{Q}.weight.nested_absmax" in stored(folder)) is double


def test_weights_are_quantised_one_by_one(plain, monkeypatch):
    """When a weight is quantised, those before it are in 4 bits already, and those after it not yet read."""
    convert, counts = NF4.convert, []

    def counting(self, linear, weight, bias, device):
        counts.append((len(quantised(models[0])), weight.untyped_storage().resizable()))
        return convert(self, linear, weight, bias, device)

    models, load_all = [], quantization.load
    monkeypatch.setattr(
        quantization, "load", lambda model, *args, **kw: (models.append(model), load_all(model, *args, **kw))
    )
    monkeypatch.setattr(NF4, "convert", counting)
    load(plain)
    assert counts == [(i, False) for i in range(14)]  # each mapped from the file, no copy of it in memory


@pytest.mark.parametrize("kind", KINDS)
def test_casting_and_copying_leave_the_bits(plain, kind):
    model, other = (load(plain, WeightOnly(quant_method=kind, skip_modules=["down_proj"])) for _ in range(2))
    assert len(quantised(model)) == 12
    layer, before = model.model.layers[0].self_attn, {name: x.clone() for name, x in model.state_dict().items()}
    half = copy.deepcopy(model).to(torch.float16)
    for key in (f"{Q}.weight", f"{Q}.scale"):
        assert same_bits(half.state_dict()[key], before[key])
    assert half(IDS).logits.isfinite().all() and half.lm_head.weight.dtype == torch.float16
    assert operands_of([layer.q_proj, layer.k_proj]) and f"kind='{kind}'" in repr(layer.q_proj)
    ends = [m.weight.data_ptr() + m.weight.nbytes for m in layer.joint_modules]
    assert [m.weight.data_ptr() for m in layer.joint_modules][1:] == ends[:-1]  # one matmul for q, k and v
    with torch.no_grad():
        for parameter in (*half.parameters(), *other.parameters()):
            parameter.zero_()
    other.load_state_dict(before)
    assert torch.equal(other(IDS).logits, model(IDS).logits)


def test_an_mlp_of_mixed_modules():
    """Each as its dequantised weight, where some are quantised and some are not."""
    mlp = GatedMLP(16, 24).requires_grad_(False)
    x, wanted = torch.randn(1, 1, 16), copy.deepcopy(mlp)
    for name, kind in (("gate_proj", "int4"), ("down_proj", "fp8")):
        made = QuantizedLinear.from_weight(getattr(mlp, name).weight, kind=kind)
        setattr(mlp, name, made)
        getattr(wanted, name).weight.copy_(made.operand.dequantize())
    torch.testing.assert_close(mlp(x), wanted(x), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_it_compiles_whole():
    layer = QuantizedLinear.from_weight(torch.randn(6, 130), kind="int4")
    x = torch.randn(3, 130, requires_grad=True)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    (found,), (wanted,) = (torch.autograd.grad(y.square().sum(), x) for y in (compiled(x), layer(x)))
    torch.testing.assert_close(found, wanted)


# Sharded


def work_on_two_ranks(folder, saved):
    mesh = make_mesh(dp_shard=2, device_type="cpu")
    for dtype in (None, torch.bfloat16):
        model, whole = load(saved), load(saved)
        parallelize(model, mesh, param_dtype=dtype)
        weight = model.get_submodule(Q).weight
        assert weight.to_local().shape == (64, 1) and weight.dtype == torch.uint8
        loss = model(IDS, labels=IDS).loss
        wanted = (whole if dtype is None else whole.to(dtype))(IDS, labels=IDS).loss
        loss.backward()
        wanted.backward()
        torch.testing.assert_close(loss, wanted.float(), rtol=1e-5 if dtype is None else 0.02, atol=0)
        found, expected = (m.model.layers[0].input_layernorm.weight.grad for m in (model, whole))
        error = (found.full_tensor() - expected).norm() / expected.norm()
        assert error < (1e-5 if dtype is None else 0.1)
        model.save_pretrained(folder / f"{dtype}", max_shard_size="8KB")


def test_fsdp_shards_the_bytes_and_gathers_them(saved, tmp_path):
    """Also where it casts to bf16 what it gathers, which would be another weight."""
    on_ranks(tmp_path, lambda: work_on_two_ranks(tmp_path, saved))
    for dtype in (None, torch.bfloat16):
        folder = tmp_path / f"{dtype}"
        assert len(list(folder.glob("*.safetensors"))) > 2 and same(stored(folder), stored(saved))


# What raises


def change_state(**values):
    def change(tensors):
        found = json.loads(bytes(tensors[STATE].tolist())) | values
        tensors[STATE] = torch.tensor(list(json.dumps(found).encode()), dtype=torch.uint8)

    return change


@pytest.mark.parametrize("damage, message", [
    (lambda tensors: tensors.pop(f"{Q}.weight.absmax"), "absmax"),
    (lambda tensors: tensors.pop(STATE), "quant_state"),
    (lambda tensors: tensors.update({f"{Q}.weight": tensors[f"{Q}.weight"][:5].clone()}), r"its weight is .* \[5, 1\]"),
    (lambda tensors: tensors[f"{Q}.weight.quant_map"].mul_(2), "quant_map is another"),
    (lambda tensors: tensors.update({f"{Q}.weight.absmax": torch.zeros(4)}), "absmax is torch.float32"),
    (change_state(shape=[8, 32]), r"holds a weight \[8, 32\]"),
    (change_state(quant_type="fp4"), "quant_type is fp4"),
    (change_state(blocksize=48), "block=48"),
    (change_state(nested_blocksize=128), "blocks of 128"),
    (lambda tensors: tensors.pop(f"{Q}.bias"), "has a bias on disk or in the model"),
])  # fmt: skip
def test_damaged_modules_are_named(saved, tmp_path, damage, message):
    file = saved / "model.safetensors"
    tensors, header = load_file(file), dict(safe_open(file, "pt").metadata())
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors", header)
    (tmp_path / "config.json").write_text((saved / "config.json").read_text())
    with pytest.raises(CheckpointError, match=f"(?s){Q}.*{message}"):
        load(tmp_path)


@pytest.mark.parametrize("config, error, message", [
    ("nf5", InputError, "'nf5'; supported: 'nf4'"),
    ({"quant_method": "nf4", "blok": 64}, InputError, "no 'blok'; it has double, skip_modules"),
    ({"quant_method": "int4", "double": True}, InputError, "has no 'double'"),
    (None, ConfigError, r"(?s)pip install.*quantization_config=\"nf4\""),
    ({"bnb_4bit_quant_type": "fp4"}, ConfigError, "weights are in fp4"),
    ({"load_in_4bit": False}, ConfigError, "weights are in 8 bits"),
])  # fmt: skip
def test_settings_that_cannot_be_honoured_raise(plain, saved, tmp_path, config, error, message):
    folder = plain if error is InputError else saved
    if error is ConfigError and config is not None:  # in config.json
        values = json.loads((saved / "config.json").read_text())
        values["quantization_config"] |= config
        (tmp_path / "config.json").write_text(json.dumps(values))
        folder, config = tmp_path, "nf4"
    with pytest.raises(error, match=message):
        load(folder, config)


def test_the_settings_of_a_quantised_checkpoint_are_used(saved):
    with pytest.warns(UserWarning, match="its own settings are used"):
        assert load(saved, NF4(double=False)).hf_quantizer.double


def test_weights_with_nan_are_not_quantised(plain, tmp_path):
    tensors = load_file(plain / "model.safetensors")
    tensors[f"{Q}.weight"][0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    shutil.copy(plain / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="q_proj holds NaN"):
        load(tmp_path)


def test_what_a_quantised_model_refuses(plain, tmp_path):
    nf4, int8 = load(plain), load(plain, "int8")
    with pytest.raises(CheckpointError, match="leave state_dict out"):
        nf4.save_pretrained(tmp_path / "x", state_dict=nf4.state_dict())
    with pytest.raises(CheckpointError, match=r"no format on disk.*nf4"):
        int8.save_pretrained(tmp_path / "x")
    assert not (tmp_path / "x").exists()
    with pytest.raises(InputError, match="int8, which is for inference: load the base in bf16, or with"):
        add_lora(int8, r=4)
    assert all("lora" not in name for name, _ in int8.named_parameters())
    with pytest.raises(InputError, match="int8"):
        QuantizedLinear.from_weight(torch.randn(4, 8), kind="int3")
