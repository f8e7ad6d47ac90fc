"""Gemma: every switch of its configuration on tiny checkpoints, the released sizes, and its roundings."""

import torch
from transformers.models.gemma.modeling_gemma import GemmaTextScaledWordEmbedding

import ligermodels
from ligermodels.layers import Embedding
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
        "wide_heads_sharing_one": tiny(head_dim=20, num_key_value_heads=1),
        "untied": tiny(tie_word_embeddings=False),
        "other_theta_and_eps": tiny(
            rms_norm_eps=0.05, rope_parameters={"rope_type": "default", "rope_theta": 20.0}, num_hidden_layers=3
        ),
        "linear": tiny(rope_parameters=rope("linear", factor=2.0)),
    }  # fmt: skip
    REAL = {"gemma-2b": 2_506_172_416, "gemma-7b": 8_537_680_896}


def test_the_scale_of_the_embedding_is_rounded_in_its_dtype():
    for size, bf16, fp16 in ((2304, 48.0, 48.0), (3072, 55.5, 55.4375), (4608, 68.0, 67.875)):
        for dtype, scale in ((torch.bfloat16, bf16), (torch.float16, fp16)):
            table = torch.randn(5, size).to(dtype)
            ours, hf = Embedding(5, size, embed_scale=size**0.5), GemmaTextScaledWordEmbedding(5, size, 0, size**0.5)
            ours.weight.data, hf.weight.data = table, table
            rows = ours(torch.arange(5))
            assert torch.equal(rows, table * scale) and torch.equal(rows, hf(torch.arange(5)))
    naive = table.float() * 4608**0.5  # fp32 scale: other values where the result is rounded
    assert not torch.equal(naive.half(), rows)
