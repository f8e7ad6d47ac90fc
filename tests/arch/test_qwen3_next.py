"""Qwen3-Next: Qwen3.5's mixers with rows in another order on disk, and experts with a shared one."""

import contextlib
import copy

import pytest
import torch

import ligermodels
from ligermodels.conversion import Options, convert
from ligermodels.errors import ConfigError, InputError
from ligermodels.training import add_lora, load_adapter, merge_lora, save_adapter
from tests.arch.suite import (
    LOGITS,
    RoutedSuite,
    read_tensors,
    relative,
    rope,
    theirs,
    tiny_config,
    write_checkpoint,
)


def tiny(**changes):
    linear = dict(linear_key_head_dim=8, linear_value_head_dim=12, linear_num_key_heads=2, linear_num_value_heads=4)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20, shared_expert_intermediate_size=28)
    kinds = ["linear_attention", "full_attention"]
    parameters = rope("default", partial_rotary_factor=0.25)
    base = dict(head_dim=16, layer_types=kinds, rope_parameters=parameters, **linear, **experts)
    return tiny_config("qwen3_next", **{**base, **changes})


class TestQwen3Next(RoutedSuite):
    arch = ligermodels.Qwen3Next
    TINY = {
        "plain": tiny(),
        "dense_in_block_1": tiny(mlp_only_layers=[1], output_router_logits=True, router_aux_loss_coef=0.5),
        "one_key_head_tied": tiny(
            linear_num_key_heads=1, linear_num_value_heads=3, norm_topk_prob=False, tie_word_embeddings=True,
            attention_bias=True, layer_types=["full_attention", "linear_attention"],
        ),
    }  # fmt: skip
    SWITCHED_ON = dict(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=32,
        head_dim=16, layer_types=["linear_attention", "full_attention"], linear_key_head_dim=16,
        linear_value_head_dim=8, linear_num_key_heads=4, linear_num_value_heads=8, mlp_only_layers=[1],
        output_router_logits=True, router_aux_loss_coef=0.05,
    )  # fmt: skip
    SWITCHED_OFF = dict(
        norm_topk_prob=False, num_experts_per_tok=1, output_router_logits=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    )  # fmt: skip
    ALSO = ("dense_in_block_1",)
    NORM = 0.0
    GAPS_DIFFER = True  # there the state decays in a gap of the mask, and here it stays
    REAL = {"Qwen3-Next-80B-A3B-Instruct": 79_674_391_296}

    def shallow(self, tiny):
        return {**tiny, "num_hidden_layers": 1, "layer_types": tiny["layer_types"][:1]}


def test_an_adapter_is_saved_in_the_order_of_the_disk(tmp_path):
    """Of the rows that memory has in another order: PEFT loads it, we load it back, and both merges are its own."""
    peft = pytest.importorskip("peft")
    folder, ids = write_checkpoint(tiny(), tmp_path / "hf", norm=0.0), torch.randint(3, 90, (2, 9))
    model = ligermodels.load(folder, progress=False)
    add_lora(model, targets=["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"], r=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    expected = model(ids).logits
    saved = save_adapter(model, tmp_path / "adapter")
    wrapped = peft.PeftModel.from_pretrained(theirs(folder), saved)
    assert relative(expected, wrapped(ids).logits) < LOGITS
    assert torch.equal(load_adapter(ligermodels.load(folder, progress=False), saved)(ids).logits, expected)
    merge_lora(model).save_pretrained(tmp_path / "merged")
    convert(folder, tmp_path / "converted", Options(adapter=saved))
    wrapped.merge_and_unload().save_pretrained(tmp_path / "theirs")
    wanted = read_tensors(tmp_path / "theirs")
    for found in (read_tensors(tmp_path / "merged"), read_tensors(tmp_path / "converted")):
        assert found.keys() == wanted.keys()
        assert all(relative(found[name], wanted[name]) < LOGITS for name in wanted)


def test_windows_are_refused():
    with pytest.raises(ConfigError, match="use_sliding_window=True is not supported"):
        ligermodels.Qwen3NextConfig.from_hf(tiny(use_sliding_window=True))


def test_an_adapter_of_peft_on_our_rows_is_refused():
    peft = pytest.importorskip("peft")
    model = ligermodels.Qwen3Next.from_config(tiny(), dtype=torch.float32)
    for name, taken in (("out_proj", True), ("in_proj_ba", False)):
        wrapped = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules=[name]))
        with contextlib.nullcontext() if taken else pytest.raises(InputError, match=r"of in_proj_ba .*add_lora"):
            wrapped(torch.randint(3, 90, (1, 5)))
