"""FP8 beside torchao's float8 training, emulated, and under PEFT's adapters."""

import copy
import dataclasses

import pytest
import torch

import ligermodels
from ligermodels.layers.fp8 import FP8Linear
from tests.tiny import TINY

float8 = pytest.importorskip("torchao.float8")
LLAMA = {**TINY, "model_type": "llama", "tie_word_embeddings": False}
TOKENS = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(0))


def make():
    return ligermodels.Llama.from_config(LLAMA, dtype=torch.bfloat16, seed=0).train()


def gradients(model):
    model.zero_grad()
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def errors(found, exact):
    return {name: ((found[name] - grad).norm() / grad.norm()).item() for name, grad in exact.items()}


@pytest.mark.parametrize("name", ["rowwise", "tensorwise"])
def test_torchao_converts_our_models_and_errs_no_less(name):
    exact = gradients(make().double())
    theirs, ours = make(), make()
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(name), emulate=True)
    in_blocks = dict(module_filter_fn=lambda module, path: "lm_head" not in path)
    float8.convert_to_float8_training(theirs, config=config, **in_blocks)
    assert sum(type(module).__name__ == "Float8Linear" for module in theirs.modules()) == 14
    report = theirs.fusion_report()
    assert any("Float8Linear" in row.why for row in report.unfused)  # each by itself
    ours.use_fp8(name)
    of_theirs, of_ours = errors(gradients(theirs), exact), errors(gradients(ours), exact)
    assert all(error < 0.2 for error in of_theirs.values())
    mean = [sum(found.values()) / len(found) for found in (of_ours, of_theirs)]
    assert mean[0] < 1.1 * mean[1]


def test_adapters_of_peft_are_fused_around_fp8():
    peft = pytest.importorskip("peft")
    model = make()
    model.use_fp8("rowwise")

    def adapted(base):
        torch.manual_seed(0)
        options = peft.LoraConfig(
            r=4, target_modules=["q_proj", "k_proj", "v_proj", "down_proj"], init_lora_weights=False
        )
        return peft.get_peft_model(base, options)

    wrapped, plain = adapted(model), adapted(make())
    assert sum(isinstance(module, FP8Linear) for module in wrapped.modules()) == 14
    report = str(wrapped.base_model.model.fusion_report())
    assert "one matmul, with LoRA, in FP8 (rowwise)" in report
    found, exact = gradients(wrapped), gradients(plain)
    assert found.keys() == exact.keys() and all(".lora_" in name for name in found)
    assert all(0.005 < error < 0.25 for error in errors(found, exact).values())
    merged = copy.deepcopy(wrapped).merge_and_unload()
    assert sum(isinstance(module, FP8Linear) for module in merged.modules()) == 14
