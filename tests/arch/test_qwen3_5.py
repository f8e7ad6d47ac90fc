"""Qwen3.5: blocks of linear and of full attention, partial rotation, an output gate, and files that also have images."""

import ligermodels
from tests.arch.suite import Suite, rope, tiny_config


def tiny(**changes):
    linear = dict(linear_key_head_dim=8, linear_value_head_dim=12, linear_num_key_heads=2, linear_num_value_heads=4)
    kinds = ["linear_attention", "full_attention"]
    parameters = rope("default", partial_rotary_factor=0.25, mrope_section=[1, 1, 0], mrope_interleaved=True)
    base = dict(head_dim=16, layer_types=kinds, rope_parameters=parameters, **linear)
    return tiny_config("qwen3_5_text", **{**base, **changes})


class TestQwen3_5(Suite):
    arch = ligermodels.Qwen3_5
    TINY = {
        "plain": tiny(),
        "tied": tiny(tie_word_embeddings=True, layer_types=["full_attention", "linear_attention"]),
        "biases_and_one_key_head": tiny(attention_bias=True, linear_num_key_heads=1, linear_num_value_heads=3),
    }
    ALSO = ("tied",)
    REAL = {}
