"""Gemma: every switch of its configuration on tiny checkpoints, and the released sizes."""

import ligermodels
from tests.arch.suite import Suite, rope, tiny_config


def tiny(**changes):
    own = dict(head_dim=8, hidden_act="gelu_pytorch_tanh", rms_norm_eps=1e-6)
    return tiny_config("gemma", **{**own, **changes})


class TestGemma(Suite):
    arch = ligermodels.Gemma
    SLOW = ("test_the_whole_model_compiles_without_a_graph_break",)
    NORM = 0.0
    TINY = {
        "plain": tiny(),
        "gelu_means_tanh": tiny(hidden_act="gelu"),
        "silu": tiny(hidden_act="silu", hidden_activation="silu"),
        "large_heads_sharing_one": tiny(head_dim=20, num_key_value_heads=1),
        "untied": tiny(tie_word_embeddings=False),
        "other_theta_and_eps": tiny(
            rms_norm_eps=0.05, rope_parameters={"rope_type": "default", "rope_theta": 20.0}, num_hidden_layers=3
        ),
        "linear": tiny(rope_parameters=rope("linear", factor=2.0)),
    }  # fmt: skip
    REAL = {"gemma-2b": 2_506_172_416, "gemma-7b": 8_537_680_896}
