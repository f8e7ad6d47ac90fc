"""gpt-oss: sinks in and without windows, biases, the clamped unit, YaRN that is not truncated, and the released sizes."""

import json

import pytest
import torch
import transformers

import ligermodels
from tests.arch.suite import FIXTURES, LOGITS, RoutedSuite, edit_config, relative, rope, theirs, theirs_logits, tiny_config

FULL, SLIDING = "full_attention", "sliding_attention"
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8.0, beta_slow=1.0, truncate=False)


def tiny(**changes):
    own = dict(
        head_dim=12, num_local_experts=4, num_experts_per_tok=2, intermediate_size=20, sliding_window=6,
        swiglu_limit=0.9, rope_parameters=YARN,
    )  # fmt: skip
    return tiny_config("gpt_oss", **{**own, **changes})


class TestGptOss(RoutedSuite):
    arch = ligermodels.GptOss
    TINY = {
        "plain": tiny(),
        "full_block_first_and_balancing_loss": tiny(
            layer_types=[FULL, SLIDING, FULL], num_hidden_layers=3, output_router_logits=True,
            router_aux_loss_coef=0.5, swiglu_alpha=0.8,
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
        swiglu_limit=0.9, output_router_logits=True, router_aux_loss_coef=0.05,
        rope_parameters=YARN | {"rope_theta": 1e4, "original_max_position_embeddings": 32},
    )  # fmt: skip
    SWITCHED_OFF = dict(
        sliding_window=128, swiglu_limit=0.1, swiglu_alpha=0.5, num_experts_per_tok=1, output_router_logits=False,
        attention_bias=False, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    REAL = {"gpt-oss-20b-BF16": 20_914_757_184, "gpt-oss-120b-BF16": 116_829_156_672}

    test_other_layouts_load_and_are_written_as_the_released_one = None  # there is no other

    def shallow(self, tiny):
        return {**super().shallow(tiny), "layer_types": [SLIDING]}

    def earlier_generation(self, config):
        """transformers 5 reads null as YaRN; a rope without it says so."""
        earlier = super().earlier_generation(config)
        return {**earlier, "rope_scaling": earlier["rope_scaling"] or {"rope_type": "default"}}
