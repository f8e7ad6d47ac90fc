"""gpt-oss: sinks, windows, biases, the clamped unit, YaRN that is not truncated; training and chatting in harmony."""

import io
import json
import sys

import pytest
import torch
import transformers
from safetensors import safe_open

import ligermodels
from ligermodels.cli import main
from ligermodels.layers import RotaryEmbedding
from ligermodels.text import Tokenizer
from tests.arch.suite import (
    FIXTURES,
    LOGITS,
    RoutedSuite,
    edit_config,
    relative,
    rope,
    theirs,
    theirs_logits,
    tiny_config,
)
from tests.text import folders
from tests.text.templates import HARMONY

FULL, SLIDING = "full_attention", "sliding_attention"
READS_THE_UNIT = "swiglu_limit" in transformers.GptOssConfig().to_dict()
"""transformers 5.17 computes with 7 and 1.702, whatever the config says."""
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8.0, beta_slow=0.25, truncate=False)


def unit(**settings):
    return settings if READS_THE_UNIT else {}


def tiny(**changes):
    sizes = dict(
        head_dim=12, num_local_experts=4, num_experts_per_tok=2, intermediate_size=20, sliding_window=6,
        rope_parameters=YARN, **unit(swiglu_limit=0.9),
    )  # fmt: skip
    return tiny_config("gpt_oss", **{**sizes, **changes})


class TestGptOss(RoutedSuite):
    arch = ligermodels.GptOss
    TINY = {
        "plain": tiny(),
        "full_block_first_and_balancing_loss": tiny(
            layer_types=[FULL, SLIDING, FULL], num_hidden_layers=3, output_router_logits=True,
            router_aux_loss_coef=0.5, **unit(swiglu_alpha=0.8),
        ),
        "one_of_six_tied_rope_unscaled": tiny(
            num_local_experts=6, num_experts_per_tok=1, num_key_value_heads=1, tie_word_embeddings=True,
            rope_parameters=rope("default"),
        ),
        "attention_without_biases": tiny(attention_bias=False, swiglu_limit=7.0, rms_norm_eps=0.05),
    }  # fmt: skip
    ALSO = ("full_block_first_and_balancing_loss",)
    SWITCHED_ON = dict(
        head_dim=24, num_local_experts=4, num_experts_per_tok=2, intermediate_size=64, sliding_window=12,
        output_router_logits=True, router_aux_loss_coef=0.05, **unit(swiglu_limit=0.9),
        rope_parameters=YARN | {"rope_theta": 1e4, "original_max_position_embeddings": 32},
    )  # fmt: skip
    SWITCHED_OFF = dict(
        sliding_window=128, num_experts_per_tok=1, output_router_logits=False,
        **unit(swiglu_limit=0.1, swiglu_alpha=0.5),
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    REAL = {"gpt-oss-20b-BF16": 20_914_757_184, "gpt-oss-120b-BF16": 116_829_156_672}

    test_other_layouts_load_and_are_written_as_the_released_one = None  # there is no other

    def shallow(self, tiny):
        return {**super().shallow(tiny), "layer_types": [SLIDING]}

    def earlier_generation(self, config):
        """transformers 5 reads null as YaRN; a rope without it says so."""
        earlier = super().earlier_generation(config)
        return {**earlier, "rope_scaling": earlier["rope_scaling"] or {"rope_type": "default"}}

    @pytest.mark.parametrize("changes", [
        dict(rope_scaling=None, rope_theta=150000, rope_parameters=...), dict(rope_parameters=None),
        dict(rope_parameters=...),
    ], ids=["null in the older spelling", "null", "absent"])  # fmt: skip
    def test_without_settings_the_rope_is_yarn(self, first, written, ids, changes):
        folder = written({**first, "max_position_embeddings": 131072})
        edit_config(folder, **changes)
        model = self.arch.from_hub(folder, progress=False)
        assert model.config.rope_parameters == transformers.AutoConfig.from_pretrained(folder).rope_parameters
        assert model.config.rope_parameters["rope_type"] == "yarn" and not model.config.rope_parameters["truncate"]
        assert relative(model(ids).logits, theirs_logits(theirs(folder), ids)) < LOGITS


def test_the_released_rope():
    """Frequencies from a double-precision run of the formula; `truncate` would move the eighth by 4 %."""
    values = json.loads((FIXTURES / "gpt-oss-20b-BF16.json").read_text())
    config = ligermodels.GptOssConfig.from_hf(values)
    options = dict(theta=150000, scaling={k: v for k, v in config.rope_parameters.items() if k != "rope_theta"})
    cos, sin = RotaryEmbedding(64, **options)(torch.tensor([[0, 1]]))
    scale = 1.3465735902799727
    assert torch.allclose(cos[0, 0], torch.full((32,), scale))
    golden = {1: 6.890442967e-01, 8: 5.081327260e-02, 12: 6.794959307e-03, 16: 4.564839182e-04, 20: 1.818833698e-05}
    found = {i: (sin[0, 1, i].double() / scale).asin().item() for i in golden}
    assert found == pytest.approx(golden, rel=1e-5)
    rounded = RotaryEmbedding(64, **{**options, "scaling": {**options["scaling"], "truncate": True}})
    assert not torch.allclose(rounded(torch.tensor([[1]]))[1], sin[:, 1:], rtol=0.01)


ADAPTED = "experts.gate_up_proj,experts.down_proj,mlp.router.weight"


def test_train_and_chat(tmp_path, capsys, monkeypatch):
    """It learns to think on one channel and to answer on another, and later turns have the answer alone."""
    folder, data = tmp_path / "model", tmp_path / "data.jsonl"
    tokenizer = Tokenizer.from_folder(folders.harmony(folder, HARMONY))
    sizes = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    experts = dict(intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=16)
    config = dict(vocab_size=tokenizer.vocab_size, initializer_range=0.1, **sizes, **experts)
    ligermodels.GptOss.from_config(config, seed=0, dtype=torch.float32).save_pretrained(folder)
    folders.harmony(folder, HARMONY)
    thoughts = [{"role": "assistant", "content": word, "thinking": f"the word {word}"} for word in ("bcd", "hij")]
    rows = [{"messages": [{"role": "user", "content": f"Say {said['content']}."}, said]} for said in thoughts]
    data.write_text("\n".join(map(json.dumps, rows)))
    command = ["train", "sft", folder, "--data", data, "--max-length", "256", "--accumulation", "1", "--show", "0",
               "--report-to", "none", "--learning-rate", "8e-3"]  # fmt: skip

    def run(*argv):
        assert main([*map(str, argv)]) == 0
        return capsys.readouterr().out

    lora = ("--lora-r", "2", "--lora-target-modules", "q_proj,o_proj", "--lora-target-parameters", ADAPTED)
    run(*command, "--output-dir", tmp_path / "lora", "--max-steps", "2", *lora)
    with safe_open(tmp_path / "lora" / "adapter" / "adapter_model.safetensors", "pt") as file:
        block = "base_model.model.model.layers.1."
        names = {name.removeprefix(block) for name in file.keys() if name.startswith(block)}  # noqa: SIM118
        assert {name.rpartition(".lora_")[0] for name in names} == {
            "self_attn.q_proj", "self_attn.o_proj", "mlp.router", "mlp.experts", "mlp.experts.base_layer",
        }  # fmt: skip
        b = file.get_tensor(f"{block}mlp.experts.base_layer.lora_B.weight")
        assert b.shape == (64, 8) and b.any(1).all()

    run(*command, "--output-dir", tmp_path / "out", "--max-steps", "60")
    histories, apply = [], Tokenizer.apply_chat_template

    def remember(self, messages, **options):
        histories.append([message["content"] for message in messages])
        return apply(self, messages, **options)

    monkeypatch.setattr(Tokenizer, "apply_chat_template", remember)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Say bcd.\n/reset\nSay hij.\nSay bcd.\n"))
    shown = run("chat", tmp_path / "out" / "model", "--max-new-tokens", 40, "--temperature", 0)
    assert shown.startswith("[analysis] the word bcd\n[final] bcd\n[analysis] the word hij\n[final] hij\n")
    assert histories[-1] == ["Say hij.", "hij", "Say bcd."]
