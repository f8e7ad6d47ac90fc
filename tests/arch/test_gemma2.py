"""Gemma 2: every switch of its configuration on tiny checkpoints, and the released sizes."""

import ligermodels
from ligermodels.arch.gemma2 import Gemma2Config
from tests.arch.suite import Suite, tiny_config


def tiny(**changes):
    own = dict(
        num_hidden_layers=3,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=6,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=2.5,
        rms_norm_eps=1e-6,
    )
    return tiny_config("gemma2", **{**own, **changes})


class TestGemma2(Suite):
    arch = ligermodels.Gemma2
    NORM = 0.0
    TINY = {
        "plain": tiny(),
        "window_of_two": tiny(sliding_window=2, num_hidden_layers=2),
        "no_caps_silu": tiny(
            attn_logit_softcapping=None, final_logit_softcapping=None, hidden_activation="silu", num_hidden_layers=2
        ),
        "another_scalar_than_head_dim": tiny(
            query_pre_attn_scalar=30, head_dim=12, num_key_value_heads=1, num_hidden_layers=2
        ),
        "layers_as_listed": tiny(layer_types=["full_attention", "sliding_attention", "sliding_attention"]),
        "untied_with_biases_and_gelu": tiny(
            tie_word_embeddings=False, attention_bias=True, hidden_activation="gelu", num_hidden_layers=2
        ),
        "other_theta_and_eps": tiny(
            rms_norm_eps=0.05,
            num_key_value_heads=4,
            num_hidden_layers=1,
            rope_parameters={"rope_type": "default", "rope_theta": 20.0},
        ),
    }  # fmt: skip
    REAL = {"gemma-2-2b": 2_614_341_888, "gemma-2-9b": 9_241_705_984, "gemma-2-27b": 27_227_128_320}

    def earlier_generation(self, config):
        config = super().earlier_generation(config)
        config["hidden_act"] = config["hidden_activation"]
        if config["layer_types"] == Gemma2Config.from_hf({**config, "layer_types": None}).layer_types:
            del config["layer_types"]
        return config
