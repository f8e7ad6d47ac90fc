"""Mixtral: every switch of its configuration on tiny checkpoints, and jitter."""

import pytest
import torch

import ligermodels
from tests.arch.suite import LOGITS, RoutedSuite, Tiny, relative, tiny_config


def tiny(**changes):
    own = dict(intermediate_size=20, num_local_experts=4, num_experts_per_tok=2)
    return tiny_config("mixtral", **{**own, **changes})


class TestMixtral(RoutedSuite):
    arch = ligermodels.Mixtral
    ROUTER, EXPERTS = "block_sparse_moe.gate.weight", "block_sparse_moe.experts"
    PROJECTIONS = ("w1", "w3", "w2")
    TINY = {
        "eight_experts": tiny(num_local_experts=8),
        "two_experts_and_both": tiny(num_local_experts=2, num_hidden_layers=1),
        # A single expert weighs 1 whatever its score: without the balancing loss the router had no gradient.
        "one_of_four": tiny(num_experts_per_tok=1, output_router_logits=True, router_aux_loss_coef=0.5),
        "balancing_loss": tiny(output_router_logits=True, router_aux_loss_coef=0.1),
        "window": tiny(sliding_window=6),
        "jitter_is_for_training": tiny(router_jitter_noise=0.3, hidden_act="gelu"),
        "tied_other_theta_and_eps": tiny(
            tie_word_embeddings=True, rms_norm_eps=0.05, rope_parameters={"rope_type": "default", "rope_theta": 20.0}
        ),
    }  # fmt: skip
    ALSO = ("balancing_loss",)
    REAL = {
        "Mixtral-8x7B": 46_702_792_704,
        "Mixtral-8x22B": 140_620_634_112,
        "Mixtral-8x22B-Instruct": 140_630_071_296,
    }


class TestJitter(Tiny):
    arch = ligermodels.Mixtral
    TINY = {"six_experts": tiny(num_local_experts=6, router_jitter_noise=0.2)}

    @pytest.fixture
    def ids(self):
        return torch.randint(3, 97, (2, 24))

    def test_jitter_is_drawn_as_transformers_draws_it(self, hf, model, ids):
        found = []
        for one in (hf, model):
            torch.manual_seed(7)
            found.append(one.train()(ids).logits)
        assert relative(found[1], found[0]) < LOGITS
        assert relative(model.eval()(ids).logits, found[0]) > 100 * LOGITS
        torch.manual_seed(8)
        assert relative(model.train()(ids).logits, found[0]) > 100 * LOGITS
