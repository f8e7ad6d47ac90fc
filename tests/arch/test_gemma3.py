"""Gemma 3 without images: every switch of its configuration on tiny checkpoints, and the released sizes."""

import ligermodels
from ligermodels.arch.gemma3 import Gemma3Config
from tests.arch.suite import Suite, rope, tiny_config

FULL, SLIDING = "full_attention", "sliding_attention"


def ropes(full):
    return {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": 20.0}}


def tiny(**changes):
    own = dict(
        num_hidden_layers=4, head_dim=8, query_pre_attn_scalar=12, sliding_window=6, layer_types=[SLIDING, FULL] * 2,
        rope_parameters=ropes(rope("linear", factor=8.0)),
    )  # fmt: skip
    return tiny_config("gemma3_text", **{**own, **changes})


class TestGemma3(Suite):
    arch = ligermodels.Gemma3
    NORM = 0.0
    TINY = {
        "plain": tiny(),
        "every_sixth_block_sees_everything": tiny(num_hidden_layers=7, layer_types=None, head_dim=4, hidden_size=24),
        "one_key_head_rope_unscaled": tiny(
            rope_parameters=ropes(rope("default")), num_hidden_layers=2, num_key_value_heads=1, head_dim=12,
            layer_types=[FULL, SLIDING],
        ),
        "capped_logits_silu_no_full_block": tiny(
            final_logit_softcapping=2.5, hidden_activation="silu", num_hidden_layers=2, layer_types=None
        ),
        "untied_with_biases_and_gelu": tiny(
            tie_word_embeddings=False, attention_bias=True, hidden_activation="gelu", num_hidden_layers=2,
            layer_types=[SLIDING, FULL],
        ),
    }  # fmt: skip
    REAL = {"gemma-3-270m": 268_098_176, "gemma-3-1b-it": 999_885_952}

    SWITCHED_ON = dict(
        head_dim=24, query_pre_attn_scalar=10, sliding_window=12, final_logit_softcapping=8.0,
        layer_types=[SLIDING, FULL], rope_parameters=ropes(rope("linear", factor=8.0)),
    )  # fmt: skip
    SWITCHED_OFF = dict(
        sliding_window=128, final_logit_softcapping=None, query_pre_attn_scalar=24,
        rope_parameters=ropes(rope("default")),
    )  # fmt: skip

    def shallow(self, tiny):
        return {**super().shallow(tiny), "layer_types": [FULL]}

    def earlier_generation(self, config):
        by_type = config["rope_parameters"]
        config = super().earlier_generation({**config, "rope_parameters": by_type[FULL]})
        if config["layer_types"] == Gemma3Config.from_hf({**config, "layer_types": None}).layer_types:
            del config["layer_types"]
        return {**config, "rope_local_base_freq": by_type[SLIDING]["rope_theta"]}
