"""Adapters of stacked experts, and experts of 4 bits: in a model, in PEFT's files, merged and off."""

import itertools
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from ligermodels import CheckpointError, InputError
from ligermodels.training import adapters_off, add_lora, load_adapter, merge_lora, save_adapter
from tests.quantized import with_quantized_experts
from tests.training.test_lora import IDS, adapted, logits, make

BOTH = ["experts.gate_up_proj", "experts.down_proj"]
ROUTER = ["mlp.gate.weight"]
NAMED = pytest.mark.parametrize(
    "names", [BOTH, BOTH[:1], BOTH[1:], ROUTER, BOTH + ROUTER], ids=["both", "gate_up", "down", "router", "all"]
)


@NAMED
def test_peft_computes_the_same_from_our_files(tmp_path, names):
    peft = pytest.importorskip("peft")
    model = adapted("mixtral", target_parameters=names, targets=["q_proj"])
    make("mixtral").save_pretrained(tmp_path / "base")
    save_adapter(model, tmp_path / "adapter")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS).logits, logits(model), rtol=1e-4, atol=1e-5)
    theirs.save_pretrained(tmp_path / "peft")
    again = load_adapter(make("mixtral"), tmp_path / "peft")
    assert torch.equal(logits(again), logits(model))


def test_the_files_have_peft_s_order_of_ranks_and_experts(tmp_path):
    """Rank j of expert e is row e * r + j of A and column j * experts + e of B: PEFT's ParamWrapper, written out."""
    r, experts, model = 3, 4, adapted("mixtral", r=3, alpha=6, targets=[], target_parameters=BOTH)
    save_adapter(model, tmp_path)
    file, merged = load_file(tmp_path / "adapter_model.safetensors"), make("mixtral")
    for name, weight in merged.named_parameters():
        module, _, end = name.rpartition(".")
        if end in ("gate_up_proj", "down_proj"):
            place = f"base_model.model.{module}" + ".base_layer" * (end == "gate_up_proj")
            a, b = file[f"{place}.lora_A.weight"], file[f"{place}.lora_B.weight"]
            for e, j in itertools.product(range(experts), range(r)):
                weight.data[e] += 2 * torch.outer(b[:, j * experts + e], a[e * r + j])
    torch.testing.assert_close(logits(model), logits(merged), rtol=1e-4, atol=1e-5)
    assert torch.equal(logits(load_adapter(make("mixtral"), tmp_path)), logits(model))


@NAMED
def test_off_and_merged(names):
    model = adapted("mixtral", target_parameters=names, targets=["q_proj"])
    with adapters_off(model):
        assert torch.equal(logits(model), logits(make("mixtral")))
    before = logits(model)
    torch.testing.assert_close(logits(merge_lora(model)), before, rtol=1e-4, atol=1e-5)
    assert not any("lora" in name for name in model.state_dict())


def test_only_the_adapters_are_trained_also_over_4_bits():
    for bits in (16, 4):
        model = make("mixtral") if bits == 16 else with_quantized_experts(make("mixtral"))
        plain = logits(model)
        add_lora(model, 4, targets=[], target_parameters=BOTH + ROUTER)
        assert torch.equal(logits(model), plain)  # B is zero
        model(IDS, labels=IDS).loss.backward()
        trained = {name for name, p in model.named_parameters() if p.grad is not None}
        assert trained and all("_adapter.lora_" in name for name in trained)
        assert trained == {name for name, p in model.named_parameters() if p.requires_grad}
        if bits == 4:
            with pytest.raises(InputError, match="4-bit"):
                merge_lora(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(target_parameters=["experts.w1"]), "experts.w1"),
        (dict(target_parameters="experts.down_proj"), "list of names"),
        (dict(target_parameters=BOTH, dropout=0.1), "dropout or DoRA"),
        (dict(target_parameters=BOTH, dora=True), "dropout or DoRA"),
    ],
    ids=["name", "string", "dropout", "dora"],
)
def test_what_add_lora_refuses(options, message):
    with pytest.raises(InputError, match=message):
        add_lora(make("mixtral"), **options)


def test_what_load_adapter_refuses(tmp_path):
    save_adapter(adapted("mixtral", target_parameters=BOTH), tmp_path)
    assert load_file(tmp_path / "adapter_model.safetensors")
    options = json.loads((tmp_path / "adapter_config.json").read_text())
    for changes, message in ((dict(target_parameters=["experts.w1"]), "experts.w1"), (dict(r=3), "expected")):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**options, **changes}))
        with pytest.raises(CheckpointError, match=message):
            load_adapter(make("mixtral"), tmp_path)
