"""Experts in few bits: loaded by quantization_config, saved one by one, under adapters; and what is refused."""

import functools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import ligermodels
from ligermodels import CheckpointError, InputError
from ligermodels.arch import block
from ligermodels.checkpoint.quantizers import NF4
from ligermodels.checkpoint.weights import same_bits
from ligermodels.kernels.linear.nf4 import quantize_nf4
from ligermodels.kernels.linear.quantized import dequantize_reference, quantize
from ligermodels.layers import ClampedSwiGLU, Experts, MoE, QuantizedLinear
from ligermodels.training import add_lora, merge_lora
from tests.checkpoint.fixtures import make_model
from tests.conversion.layouts import same, stored

IDS = torch.tensor([[1, 5, 9, 2, 30, 7]])
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_local_experts=3, num_attention_heads=4, num_key_value_heads=2)
EXPERT = "model.layers.1.block_sparse_moe.experts.2"
BOTH = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_model(model_type="mixtral", **SIZES).save_pretrained(tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture(scope="module")
def saved(plain, tmp_path_factory):
    return load(plain).save_pretrained(tmp_path_factory.mktemp("saved") / "model")


def load(folder, config="nf4", **options):
    return ligermodels.load(folder, quantization_config=config, device="cpu", progress=False, **options)


def experts_of(model):
    return [module for module in model.modules() if isinstance(module, Experts)]


def dequantised(weight, kind):
    """A matrix as the quantiser of `kind` stores it."""
    if kind == "nf4":
        return quantize_nf4(weight).dequantize()
    return dequantize_reference(quantize(weight, kind)).contiguous()


def with_files(folder, target, change=lambda tensors, config: None):
    """A copy of a checkpoint, with other tensors or another config.json."""
    target.mkdir()
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("kind", ["nf4", "int8", "fp8", "int4"])
def test_a_model_is_that_of_its_dequantised_matrices(plain, tmp_path, kind):
    """Each w1, w3 and w2 of each expert is quantised by itself."""
    model = load(plain, kind)
    assert all(getattr(one, name).kind == kind for one in experts_of(model) for name in ("gate_up_proj", "down_proj"))

    def change(tensors, config):
        for name in tensors:
            if ".experts." in name or "_proj" in name:
                tensors[name] = dequantised(tensors[name], kind)

    wanted = ligermodels.load(with_files(plain, tmp_path / "x", change), device="cpu", progress=False)
    for one, other in zip(experts_of(model), experts_of(wanted), strict=True):
        for name in ("gate_up_proj", "down_proj"):
            assert torch.equal(one.operand(name).weight.dequantize(), getattr(other, name))
    with torch.no_grad():
        logits = model(IDS).logits
        torch.testing.assert_close(logits, wanted(IDS).logits, rtol=1e-5, atol=1e-5)
        assert (logits - load(plain, None)(IDS).logits).abs().max() > 1e-4
    assert all(not p.requires_grad for one in experts_of(model) for p in one.parameters())
    options = dict(max_new_tokens=8, do_sample=False)
    assert torch.equal(model.generate(IDS, **options), wanted.generate(IDS, **options))


def test_biases_of_experts_are_kept_as_they_are(tmp_path, monkeypatch):
    """Beside weights of 4 bits, through a folder, and frozen under adapters."""
    options = dict(bias=True, activation=ClampedSwiGLU(1.702, 0.9))
    monkeypatch.setattr(block, "MoE", functools.partial(MoE, **options))
    made = make_model(model_type="mixtral", **SIZES)
    for one in experts_of(made):
        for bias in (one.gate_up_proj_bias, one.down_proj_bias):
            torch.nn.init.normal_(bias)
    model = load(made.save_pretrained(tmp_path / "plain"))
    for one, other in zip(experts_of(model), experts_of(made), strict=True):
        for name in BOTH:
            name = name.removeprefix("experts.")
            assert same_bits(one.operand(name).bias.detach(), getattr(other, f"{name}_bias").detach())
            setattr(other, name, torch.nn.Parameter(one.operand(name).weight.dequantize()))
    for block_of_4_bits, dense in zip(model.model.layers, made.model.layers, strict=True):
        for linear in ("q_proj", "k_proj", "v_proj", "o_proj"):
            one = getattr(block_of_4_bits.self_attn, linear)
            getattr(dense.self_attn, linear).weight = torch.nn.Parameter(one.operand.dequantize())
    torch.testing.assert_close(model(IDS).logits, made(IDS).logits, rtol=1e-5, atol=1e-5)
    again = load(model.save_pretrained(tmp_path / "saved"))
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    add_lora(again, r=2, target_parameters=BOTH)
    assert {name for name, p in again.named_parameters() if p.requires_grad and "lora" not in name} == set()


@pytest.mark.parametrize("double", [True, False])
def test_what_is_saved_is_loaded_bit_for_bit(plain, tmp_path, double):
    """On disk each matrix is as bitsandbytes writes that of a linear module."""
    model = load(plain, NF4(double=double))
    folder = model.save_pretrained(tmp_path / "one")
    tensors, source = stored(folder), stored(plain)
    for name in ("w1", "w2", "w3"):
        made = quantize_nf4(source[f"{EXPERT}.{name}.weight"], double=double)
        assert same_bits(tensors[f"{EXPERT}.{name}.weight"], made.packed)
        assert same_bits(tensors[f"{EXPERT}.{name}.weight.absmax"], made.absmax)
        described = json.loads(bytes(tensors[f"{EXPERT}.{name}.weight.quant_state.bitsandbytes__nf4"].tolist()))
        assert described["shape"] == list(source[f"{EXPERT}.{name}.weight"].shape)
        assert described.get("nested_offset") == (made.nested_offset.item() if double else None)
    again = load(folder)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert same(stored(again.save_pretrained(tmp_path / "two", max_shard_size="8KB")), tensors)


def test_experts_that_are_one_tensor_on_disk_are_quantised_alike(plain, tmp_path, saved):
    """The layout that trainers write."""

    def stack(tensors, config):
        for i in range(2):
            old, new = f"model.layers.{i}.block_sparse_moe", f"model.layers.{i}.mlp"
            each = [[tensors.pop(f"{old}.experts.{e}.{w}.weight") for w in ("w1", "w3", "w2")] for e in range(3)]
            tensors[f"{new}.experts.gate_up_proj"] = torch.stack([torch.cat(one[:2]) for one in each])
            tensors[f"{new}.experts.down_proj"] = torch.stack([one[2] for one in each])
            tensors[f"{new}.gate.weight"] = tensors.pop(f"{old}.gate.weight")

    model = load(with_files(plain, tmp_path / "x", stack))
    assert same(stored(model.save_pretrained(tmp_path / "y")), stored(saved))


def test_experts_are_cast_before_they_are_quantised(plain):
    """To the dtype that the call asks for, as linear modules are."""
    model, expected = load(plain, dtype=torch.bfloat16), load(plain, None, dtype=torch.bfloat16)
    for one, other in zip(experts_of(model), experts_of(expected), strict=True):
        found = one.operand("down_proj").weight
        assert found.dequantize().dtype == torch.bfloat16
        packed = [quantize_nf4(matrix).packed for matrix in other.down_proj.detach()]
        assert torch.equal(found.packed, torch.cat(packed))


@pytest.mark.parametrize("skip", ["experts", "down_proj", "model.layers.1"])
def test_experts_are_skipped_by_name(plain, tmp_path, skip):
    """With "experts" the folder is one that transformers 5 writes: it quantises linear modules alone."""
    model = load(plain, NF4(skip_modules=[skip]))
    kinds = [
        (isinstance(one.gate_up_proj, QuantizedLinear), isinstance(one.down_proj, QuantizedLinear))
        for one in experts_of(model)
    ]
    expected = {"experts": [(False, False)] * 2, "down_proj": [(True, False)] * 2,
                "model.layers.1": [(True, True), (False, False)]}  # fmt: skip
    assert kinds == expected[skip]
    folder = model.save_pretrained(tmp_path / "x")
    assert (f"{EXPERT}.w1.weight.absmax" in stored(folder)) is (skip == "down_proj")
    assert torch.equal(load(folder)(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("library", ["bitsandbytes", "torchao"])
def test_experts_stay_plain_only_by_name_or_with_a_warning(plain, tmp_path, library):
    """Where a library quantises, which it does with linear modules alone."""
    imported = pytest.importorskip(library)
    if library == "bitsandbytes":
        config, skip, reads = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4"), "llm_int8_skip_modules", "nf4"
    else:
        quant_type = imported.quantization.Int8WeightOnlyConfig()
        config, skip, reads = dict(quant_method=library, quant_type=quant_type), "modules_to_not_convert", None
    with pytest.raises(
        InputError, match=rf"(?s)experts, such as model\.layers\.0.*float32.*='nf4'.*{skip}=\['experts'\]"
    ):
        load(plain, config)
    model = load(plain, config | {skip: ["experts"]})
    assert all(type(getattr(one, name)) is torch.nn.Parameter for one in experts_of(model) for name in one.stacked)
    folder = model.save_pretrained(tmp_path / "x")
    expected = load(folder, reads)(IDS).logits
    saved = json.loads((folder / "config.json").read_text())
    saved["quantization_config"][skip] = None  # as transformers writes it
    (folder / "config.json").write_text(json.dumps(saved))
    with pytest.warns(UserWarning, match=r"the experts, such as .*, are not quantised in this checkpoint"):
        assert torch.equal(load(folder, reads)(IDS).logits, expected)


def test_adapters_are_trained_over_them(plain, saved):
    model = load(saved)
    before = model(IDS).logits
    add_lora(model, 4, targets="all-linear", target_parameters=BOTH)
    assert torch.equal(model(IDS).logits, before)  # B is zero
    model.train()(IDS, labels=IDS).loss.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if ".lora_" in name}
    assert len(trained) == 2 * 2 * (4 + 2)  # A and B of four projections and two stacked weights of two blocks
    with pytest.raises(InputError, match="4-bit"):
        merge_lora(model)
    with pytest.raises(InputError, match="int8, which is for inference"):
        add_lora(load(plain, "int8"), r=4, targets=[], target_parameters=BOTH)


def test_what_cannot_be_honoured_raises(plain, saved, tmp_path):
    def pop_state(tensors, config):
        for name in [name for name in tensors if name.startswith(f"{EXPERT}.w3.weight.")]:
            del tensors[name]

    with pytest.raises(CheckpointError, match=r"5 of the 6 matrices of model\.layers\.1\.mlp\.experts\.gate_up_proj"):
        load(with_files(saved, tmp_path / "some", pop_state))

    def skip(tensors, config):
        config["quantization_config"]["llm_int8_skip_modules"] = ["experts"]

    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj are quantised, and this quantisation leaves"):
        load(with_files(saved, tmp_path / "skipped", skip))

    def spoil(tensors, config):
        tensors[f"{EXPERT}.w2.weight"][0, 0] = float("nan")

    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.experts\.down_proj holds NaN"):
        load(with_files(plain, tmp_path / "nan", spoil))
    with pytest.raises(CheckpointError, match="no format on disk"):
        load(plain, "int4").save_pretrained(tmp_path / "int4")
    odd = make_model(model_type="mixtral", **{**SIZES, "hidden_size": 16, "intermediate_size": 18})
    with pytest.raises(InputError, match=r"gate_up_proj: .* cannot be one stack.*skip_modules"):
        load(odd.save_pretrained(tmp_path / "odd"))  # 288 weights, blocks of 64
