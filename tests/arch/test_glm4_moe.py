"""GLM-4.5: a sigmoid router with a correction bias, groups, a shared expert, and dense blocks before the others."""

import ligermodels
from tests.arch.suite import LOGITS, RoutedSuite, relative, rope, tiny_config


def tiny(**changes):
    experts = dict(n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=20, routed_scaling_factor=1.5)
    base = dict(head_dim=12, rope_parameters=rope("default", partial_rotary_factor=0.5), **experts)
    return tiny_config("glm4_moe", **{**base, **changes})


class TestGlm4Moe(RoutedSuite):
    arch = ligermodels.Glm4Moe
    TINY = {
        "plain": tiny(attention_bias=True),
        "norms_of_heads_tied": tiny(use_qk_norm=True, tie_word_embeddings=True, n_shared_experts=2),
        "in_groups": tiny(
            first_k_dense_replace=0, n_routed_experts=8, n_group=4, topk_group=2, norm_topk_prob=False, head_dim=16
        ),
    }
    SWITCHED_ON = dict(
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, head_dim=16, attention_bias=True,
        use_qk_norm=True, routed_scaling_factor=1.5,
    )  # fmt: skip
    SWITCHED_OFF = dict(norm_topk_prob=False, num_experts_per_tok=1, routed_scaling_factor=1.0)
    ALSO = ("in_groups",)
    REAL = {"GLM-4.5-Air": 106_852_245_504, "GLM-4.5": 352_797_814_784}

    test_the_balancing_loss_is_that_of_transformers = None  # there is none

    def test_router_logits_come_without_a_balancing_loss(self, hf, model, ids):
        inputs = dict(labels=ids, output_router_logits=True)
        expected, output = hf(ids, **inputs), model(ids, **inputs)
        assert output.aux_loss is None and abs(output.loss - expected.loss) < LOGITS * expected.loss
        for found, wanted in zip(output.router_logits, expected.router_logits, strict=True):
            assert relative(found, wanted.flatten(0, -2)) < LOGITS
