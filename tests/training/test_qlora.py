"""QLoRA: adapters on 4-bit weights compute what adapters on the dequantised weights compute."""

import pytest
import torch

import ligermodels
from ligermodels.arch import ARCHS
from ligermodels.errors import InputError
from ligermodels.layers import NF4Linear
from ligermodels.training import adapters_off, add_lora, load_adapter, merge_lora, save_adapter

CONFIG = dict(
    model_type="qwen2", vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.2,
)  # fmt: skip
IDS = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def bases(tmp_path):
    """A model of 4-bit weights, and one of the same weights in fp32."""
    ARCHS["qwen2"].from_config(CONFIG, dtype=torch.float32, device="cpu").save_pretrained(tmp_path / "base")
    options = dict(device="cpu", dtype=torch.float32)
    quantised = ligermodels.load(tmp_path / "base", quantization_config="nf4", **options)
    dense = ligermodels.load(tmp_path / "base", **options)
    modules = dict(dense.named_modules())
    with torch.no_grad():
        for name, module in quantised.named_modules():
            if isinstance(module, NF4Linear):
                modules[name].weight.copy_(module.dequantized_weight(torch.float32))
    return quantised, dense


def adapted(model, **options):
    add_lora(model.train(), r=4, alpha=8, **options)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.2, generator=draw)
    return model


@pytest.mark.parametrize("recompute", ["none", "mlp", "block"])
def test_losses_and_gradients_are_those_of_the_dequantised_weights(bases, recompute):
    quantised, dense = (adapted(model) for model in bases)
    losses, grads = [], []
    for model in (quantised, dense):
        model.gradient_checkpointing_enable({"recompute": recompute})
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        losses.append(loss)
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    assert all(".lora_" in name for name in grads[0])
    assert len(grads[0]) == 2 * 2 * 7
    torch.testing.assert_close(*losses)
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-4, atol=1e-6)


def test_an_adapter_travels_between_the_two(bases, tmp_path):
    quantised, dense = bases
    with torch.no_grad():
        base = quantised(IDS).logits
    adapted(quantised)
    with torch.no_grad(), adapters_off(quantised):
        assert torch.equal(quantised(IDS).logits, base)
    save_adapter(quantised, tmp_path / "adapter")
    load_adapter(dense, tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(dense(IDS).logits, quantised(IDS).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(dense(IDS).logits, base, atol=1e-2)
    merge_lora(dense)


def test_what_four_bits_cannot_hold_is_refused(bases):
    with pytest.raises(InputError, match="DoRA"):
        add_lora(bases[0], dora=True)
    with pytest.raises(InputError, match="rounded to 4 bits"):
        merge_lora(add_lora(bases[0]))
