"""Qwen3: norms of q and k, heads of their own width, windows of some blocks, biases, and the released sizes."""

import ligermodels
from tests.arch.suite import YARN, Suite, tiny_config


def tiny(**changes):
    return tiny_config("qwen3", **{"head_dim": 12, **changes})


class TestQwen3(Suite):
    arch = ligermodels.Qwen3
    TINY = {
        "plain": tiny(),
        "tied": tiny(tie_word_embeddings=True),
        "biases_and_eps": tiny(attention_bias=True, rms_norm_eps=0.05, num_key_value_heads=1),
        "window_in_the_last_block": tiny(use_sliding_window=True, sliding_window=5, max_window_layers=1),
        "yarn": tiny(rope_parameters=YARN),
    }
    ALSO = ("window_in_the_last_block",)
    REAL = {"Qwen3-0.6B": 596_049_920, "Qwen3-8B": 8_190_735_360}

    def earlier_generation(self, config):
        """The first files had no layer_types."""
        return {key: value for key, value in super().earlier_generation(config).items() if key != "layer_types"}
