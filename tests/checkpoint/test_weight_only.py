"""quantization_config="int8" | "fp8" | "int4": linear modules are quantised as they are read, for inference."""

import copy

import pytest
import torch
from torch import nn

import ligermodels
from ligermodels import CheckpointError, InputError
from ligermodels.checkpoint.quantizers import WeightOnly
from ligermodels.kernels.quantized import dequantize_reference, quantize
from ligermodels.layers import GatedMLP, QuantizedLinear
from ligermodels.layers.linear import is_fusable
from ligermodels.training import add_lora
from tests.checkpoint.fixtures import make_biased_model

IDS = torch.tensor([[1, 5, 9, 2, 30, 7]])
KINDS = ["int8", "fp8", "int4"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_biased_model().save_pretrained(tmp_path_factory.mktemp("plain") / "model")


def load(folder, config, **options):
    return ligermodels.load(folder, quantization_config=config, device="cpu", progress=False, **options).eval()


def quantised(model):
    return {name for name, module in model.named_modules() if type(module) is QuantizedLinear}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_that_of_its_dequantised_weights(plain, kind):
    reference, model = ligermodels.load(plain, device="cpu", progress=False).eval(), load(plain, kind)
    linears = {name for name, module in reference.named_modules() if type(module) is nn.Linear}
    assert quantised(model) == linears and len(linears) == 14 and "lm_head" not in linears
    with torch.no_grad():
        before = reference(IDS).logits
        for name in linears:
            weight, found = reference.get_submodule(name).weight, model.get_submodule(name)
            wanted = quantize(weight.detach(), kind)
            assert torch.equal(found.operand.packed.view(torch.uint8), wanted.packed.view(torch.uint8))
            assert torch.equal(found.operand.scale, wanted.scale)
            weight.copy_(dequantize_reference(wanted))
        logits = reference(IDS).logits
    torch.testing.assert_close(model(IDS).logits, logits, rtol=1e-5, atol=1e-5)
    assert (logits - before).abs().max() > 1e-3
    options = dict(attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1]]), max_new_tokens=12, do_sample=False)
    assert torch.equal(model.generate(IDS, **options), reference.generate(IDS, **options))
    assert model.is_quantized and not model.hf_quantizer.is_trainable and model.hf_quantizer.quant_method == kind


@pytest.mark.parametrize("kind", KINDS)
def test_casting_and_copying_leave_the_bits(plain, kind):
    model = load(plain, WeightOnly(quant_method=kind, skip_modules=["down_proj"]))
    assert len(quantised(model)) == 12
    layer, name = model.model.layers[0].self_attn, "model.layers.0.self_attn.q_proj"
    before = {key: value.clone() for key, value in model.state_dict().items()}
    half = copy.deepcopy(model).to(torch.float16)
    for key in ("weight", "scale"):
        found, wanted = half.state_dict()[f"{name}.{key}"], before[f"{name}.{key}"]
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)
    assert half(IDS).logits.isfinite().all() and half.lm_head.weight.dtype == torch.float16
    assert is_fusable(layer.q_proj, layer.k_proj) and f"kind='{kind}'" in repr(layer.q_proj)
    ends = [m.weight.data_ptr() + m.weight.nbytes for m in layer.joint_modules]
    assert [m.weight.data_ptr() for m in layer.joint_modules][1:] == ends[:-1]  # one product for q, k and v
    with torch.no_grad():
        for parameter in half.parameters():
            parameter.zero_()
    other = load(plain, WeightOnly(quant_method=kind, skip_modules=["down_proj"]))
    for module in other.modules():
        if isinstance(module, QuantizedLinear):
            module.weight.zero_()
    other.load_state_dict(before)
    assert torch.equal(other(IDS).logits, model(IDS).logits)


def test_gradients_reach_what_is_below(plain):
    model, reference = load(plain, "int4"), ligermodels.load(plain, device="cpu", progress=False)
    with torch.no_grad():
        for name in quantised(model):
            reference.get_submodule(name).weight.copy_(model.get_submodule(name).dequantized_weight())
    for one in (model, reference):
        one(IDS, labels=IDS).loss.backward()
    found, wanted = (one.model.embed_tokens.weight.grad for one in (model, reference))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert all(p.grad is None for name in quantised(model) for p in model.get_submodule(name).parameters())


def test_what_is_refused(plain, tmp_path):
    model = load(plain, "int8")
    with pytest.raises(InputError, match="int8, which is for inference: load the base in bf16, or with"):
        add_lora(model, r=4)
    assert all("lora" not in name for name, _ in model.named_parameters())
    with pytest.raises(CheckpointError, match=r"no format on disk.*nf4"):
        model.save_pretrained(tmp_path / "x")
    assert not (tmp_path / "x").exists()
    with pytest.raises(InputError, match="supported: 'nf4', 'int8', 'fp8', 'int4'"):
        load(plain, "int3")
    with pytest.raises(InputError, match="has no 'double'"):
        load(plain, {"quant_method": "int4", "double": True})
    with pytest.raises(InputError, match="int8"):
        QuantizedLinear(8, 4, kind="int3")
    with pytest.raises(InputError, match="bias requires"):
        QuantizedLinear.from_weight(torch.randn(4, 8), torch.randn(4, requires_grad=True), kind="int8")


def test_a_quantised_checkpoint_is_not_quantised_again(plain, tmp_path):
    pytest.importorskip("bitsandbytes")
    nf4 = load(plain, "nf4").save_pretrained(tmp_path / "nf4")
    with pytest.raises(InputError, match="quantised by"):
        load(nf4, "int4")


def test_an_mlp_of_mixed_modules():
    """Each as its dequantised weight, where some are quantised and some are not."""
    mlp = GatedMLP(16, 24).requires_grad_(False)
    x, wanted = torch.randn(1, 1, 16), copy.deepcopy(mlp)
    for name, kind in (("gate_proj", "int4"), ("down_proj", "fp8")):
        made = QuantizedLinear.from_weight(getattr(mlp, name).weight, kind=kind)
        setattr(mlp, name, made)
        getattr(wanted, name).weight.copy_(made.dequantized_weight())
    torch.testing.assert_close(mlp(x), wanted(x), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_it_compiles_whole():
    layer = QuantizedLinear.from_weight(torch.randn(6, 130), kind="int4")
    x = torch.randn(3, 130, requires_grad=True)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    (found,), (wanted,) = (torch.autograd.grad(y.square().sum(), x) for y in (compiled(x), layer(x)))
    torch.testing.assert_close(found, wanted)
