"""Gemma 4's text: every switch of its configuration on tiny checkpoints, and the released sizes."""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file

import ligermodels
from ligermodels.arch.gemma4 import Gemma4Config
from ligermodels.errors import ConfigError, InputError
from ligermodels.generation import graphs
from tests.arch.suite import Suite, check_compiled, read_tensors, rope, tiny_config

FULL, SLIDING = "full_attention", "sliding_attention"
ROPES = {FULL: rope("proportional", partial_rotary_factor=0.5), SLIDING: {"rope_type": "default", "rope_theta": 20.0}}


def tiny(**changes):
    base = dict(
        head_dim=8, global_head_dim=12, sliding_window=6, layer_types=[SLIDING, FULL], rope_parameters=ROPES,
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=97,
    )  # fmt: skip
    return tiny_config("gemma4_text", **{**base, **changes})


class TestGemma4(Suite):
    arch = ligermodels.Gemma4
    TINY = {
        "keys_as_values": tiny(attention_k_eq_v=True, num_global_key_value_heads=1, final_logit_softcapping=2.5),
        "shared_keys": tiny(
            num_hidden_layers=6, layer_types=[SLIDING, FULL] * 3, num_kv_shared_layers=3, use_double_wide_mlp=True,
            num_key_value_heads=1, hidden_size_per_layer_input=10,
        ),
        "experts": tiny(
            enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=20, attention_k_eq_v=True,
        ),
        "untied_with_biases_and_gelu": tiny(
            tie_word_embeddings=False, attention_bias=True, hidden_activation="gelu", hidden_size_per_layer_input=6,
        ),
    }  # fmt: skip
    ALSO = ("shared_keys", "experts")
    REAL = {"gemma-4-E2B": 4_628_569_344, "gemma-4-E4B": 7_463_013_376, "gemma-4-31B": 30_697_345_280,
            "gemma-4-26B-A4B": 25_233_141_760}  # fmt: skip
    SWITCHED_ON = dict(
        num_hidden_layers=4, layer_types=[SLIDING, FULL] * 2, num_kv_shared_layers=2, use_double_wide_mlp=True,
        head_dim=16, global_head_dim=24, attention_k_eq_v=True, num_global_key_value_heads=1, sliding_window=12,
        hidden_size_per_layer_input=16, vocab_size_per_layer_input=256, final_logit_softcapping=8.0,
        rope_parameters=ROPES,
    )  # fmt: skip
    SWITCHED_OFF = dict(
        sliding_window=128, final_logit_softcapping=None, hidden_activation="silu",
        rope_parameters={**ROPES, FULL: rope("proportional", partial_rotary_factor=1.0)},
    )  # fmt: skip

    def shallow(self, tiny):
        return {**super().shallow(tiny), "layer_types": [FULL], "num_kv_shared_layers": 0}

    def earlier_generation(self, config):
        """As released files are, with the sizes of full blocks in two fields."""
        config = dict(config)
        sizes = next(iter(config.pop("per_layer_config").values()))
        config["global_head_dim"] = sizes["head_dim"]
        return {**config, "num_global_key_value_heads": sizes.get("num_key_value_heads")}

    def test_blocks_run_one_by_one_as_calibration_runs_them(self, hf, model, ids):
        if model.config.hidden_size_per_layer_input:
            with pytest.raises(InputError, match="runs in its model, not alone"):
                super().test_blocks_run_one_by_one_as_calibration_runs_them(hf, model, ids)
        else:
            super().test_blocks_run_one_by_one_as_calibration_runs_them(hf, model, ids)

    def test_embeddings_stand_for_ids(self, model, ids):
        if model.config.hidden_size_per_layer_input:
            with pytest.raises(InputError, match="looks ids up in a second table; pass input_ids"):
                super().test_embeddings_stand_for_ids(model, ids)
        else:
            super().test_embeddings_stand_for_ids(model, ids)

    @pytest.mark.parametrize("policy", ["mlp", "block"])
    def test_recomputed_gradients_are_the_same(self, model, ids, policy):
        found = []
        for settings in ("none", policy):
            model.gradient_checkpointing_enable({"recompute": settings})
            model.zero_grad()
            model.train()(ids, labels=ids).loss.backward()
            found.append([parameter.grad for parameter in model.parameters()])
        assert all(map(torch.equal, *found))

    @pytest.mark.parametrize("name", ALSO)
    def test_shared_keys_and_experts_compile(self, name, written):
        model = self.arch.from_hub(written(self.TINY[name]), progress=False).train()
        check_compiled(model, torch.randint(3, 90, (2, 24)))

    def test_a_draft_of_several_tokens_reads_the_keys_of_all(self, written, monkeypatch):
        model = self.arch.from_hub(written(self.TINY["shared_keys"]), progress=False)
        ids = torch.randint(3, 90, (1, 12))
        expected = model.generate(ids, max_new_tokens=40, eos_token_id=[])
        monkeypatch.setattr(graphs, "DEVICES", {"cpu", "cuda"})
        found = model.generate(ids, max_new_tokens=40, eos_token_id=[], prompt_lookup_num_tokens=3)
        assert torch.equal(found, expected)

    def test_a_cache_of_transformers_has_no_layer_for_shared_keys(self, written):
        model = self.arch.from_hub(written(self.TINY["shared_keys"]), progress=False)
        ids, options = torch.randint(3, 90, (2, 12)), dict(max_new_tokens=20, eos_token_id=[])
        expected = model.generate(ids, **options).repeat_interleave(2, 0)
        options |= dict(num_return_sequences=2, do_sample=True, top_k=1, past_key_values=transformers.DynamicCache())
        assert torch.equal(model.generate(ids, **options), expected)

    def test_the_text_of_a_released_checkpoint(self, hf, folder, model, ids, tmp_path):
        """Of one with images, whose names have a prefix, with weights for keys that no block reads."""
        config = json.loads((folder / "config.json").read_text())
        whole = {"model_type": "gemma4", "text_config": config, "vision_config": {}, "dtype": "float32"}
        tensors = {name.replace("model.", "model.language_model.", 1): x for name, x in read_tensors(folder).items()}
        last = f"model.language_model.layers.{model.config.num_hidden_layers - 1}.self_attn."
        tensors = {last + name: torch.ones(4, 4) for name in ("k_proj.weight", "k_norm.weight")} | tensors
        tensors["model.vision_tower.patch_embedder.input_proj.weight"] = torch.ones(2, 2)
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "config.json").write_text(json.dumps(whole))
        with pytest.warns(
            UserWarning, match="gemma4: only the text model is read: what reads images and audio is left"
        ):
            text = self.arch.from_hub(tmp_path, progress=False)
        assert text.config == model.config and torch.equal(text(ids).logits, model(ids).logits)


def test_experts_of_its_router_are_neither_taken_nor_recorded():
    config = TestGemma4.TINY["experts"]
    model, ids = ligermodels.Gemma4.from_config(config, device="cpu"), torch.ones(1, 3, dtype=torch.long)
    experts = torch.zeros(config["num_hidden_layers"], 3, config["top_k_experts"], dtype=torch.int32)
    for call in (
        lambda: model(ids, experts=experts),
        lambda: model(ids, output_experts=True),
        lambda: model(ids, output_router_logits=True),
        lambda: model.generate(ids, max_new_tokens=2, output_experts=True),
    ):
        with pytest.raises(InputError, match=r"has no router that|needs a mixture of experts"):
            call()


@pytest.mark.parametrize(("changes", "message"), [
    (dict(num_kv_shared_layers=5), "num_kv_shared_layers=5 leaves blocks no block of their kind before them"),
    (dict(num_kv_shared_layers=9), "num_kv_shared_layers=9 leaves blocks no block of their kind before them"),
    (dict(layer_types=[FULL, SLIDING] * 3), "layer_types=.* must end with full_attention"),
    (dict(use_bidirectional_attention="all"), "use_bidirectional_attention='all' is not supported"),
    (dict(global_head_dim=7), "global_head_dim=7 must be even"),
    (dict(attention_k_eq_v=True, num_global_key_value_heads=3), "num_global_key_value_heads=3 must divide"),
    (dict(per_layer_config={"1": {"head_dim": 12}}), "per_layer_config=.* may give head_dim to the blocks of full"),
    (dict(per_layer_config={str(i): {"head_dim": i} for i in (1, 3, 5)}), "the same to each, and nothing else"),
    (dict(per_layer_config={str(i): {"num_key_value_heads": 1} for i in (1, 3, 5)}), "may give head_dim to the blocks"),
    (dict(per_layer_config={str(i): {"head_dim": 16} for i in (1, 3, 5)}), "may give head_dim to the blocks of"),
    (dict(per_layer_config=[]), "per_layer_config"),
    (dict(enable_moe_block=True), "enable_moe_block=True needs num_experts, top_k_experts and moe_intermediate_size"),
])  # fmt: skip
def test_a_config_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        Gemma4Config.from_hf({**TestGemma4.TINY["shared_keys"], **changes})
