"""Qwen3-MoE: experts and dense MLPs in one stack, weights that sum to 1 and that do not, and the released sizes."""

import ligermodels
from tests.arch.suite import RoutedSuite, tiny_config


def tiny(**changes):
    own = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20, norm_topk_prob=True)
    return tiny_config("qwen3_moe", **{**own, **changes})


class TestQwen3Moe(RoutedSuite):
    arch = ligermodels.Qwen3Moe
    TINY = {
        "plain": tiny(),
        "dense_in_block_0": tiny(mlp_only_layers=[0], output_router_logits=True, router_aux_loss_coef=0.5),
        "weights_of_all": tiny(norm_topk_prob=False, num_experts=6, num_experts_per_tok=1, head_dim=12),
        "every_other_block_tied": tiny(decoder_sparse_step=2, num_hidden_layers=3, tie_word_embeddings=True),
        "window_and_biases": tiny(use_sliding_window=True, sliding_window=5, attention_bias=True),
    }
    SWITCHED_ON = dict(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, mlp_only_layers=[1], head_dim=24,
        use_sliding_window=True, sliding_window=12, output_router_logits=True, router_aux_loss_coef=0.05,
    )  # fmt: skip
    SWITCHED_OFF = dict(
        norm_topk_prob=True, num_experts_per_tok=1, use_sliding_window=False, output_router_logits=False
    )
    ALSO = ("dense_in_block_0",)
    REAL = {"Qwen3-30B-A3B": 30_532_122_624, "Qwen3-235B-A22B": 235_093_634_560}

    def earlier_generation(self, config):
        config = super().earlier_generation(config)
        return {**config, "num_experts": config.pop("num_local_experts")}
