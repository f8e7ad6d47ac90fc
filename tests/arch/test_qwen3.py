"""Qwen3: norms of q and k, heads of their own width, windows of some blocks, biases, and the released sizes."""

import pytest
import torch

import ligermodels
from tests.arch.suite import LOGITS, YARN, Suite, relative, theirs_logits, tiny_config


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

    @pytest.mark.parametrize("norm", ["q_norm", "k_norm"])
    def test_a_norm_left_out_is_seen(self, hf, model, ids, norm):
        setattr(model.decoder.layers[0].self_attn, norm, torch.nn.Module())
        getattr(model.decoder.layers[0].self_attn, norm).forward = lambda x: (x, x)
        assert relative(model(ids).logits, theirs_logits(hf, ids)) > 100 * LOGITS
