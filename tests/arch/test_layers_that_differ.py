"""Layers that differ from each other in one stack: rotary tables, windows, heads and their sizes."""

import pytest
import torch
import transformers

import ligermodels
from ligermodels.arch.block import Block, gated_mlp
from ligermodels.arch.decoder import Decoder
from ligermodels.arch.gemma2 import NORM, Gemma2Block
from ligermodels.errors import ConfigError
from ligermodels.generation import generate_many
from ligermodels.layers import Attention, RotaryEmbedding
from tests.arch.suite import LOGITS, relative, rope, tiny_config
from tests.generation.models import VOCAB, llama, padded, prompt

SIZES = tiny_config(
    "gemma3_text", num_hidden_layers=4, head_dim=8, query_pre_attn_scalar=8, sliding_window=6, eos_token_id=None,
    layer_types=["sliding_attention", "full_attention"] * 2,
    rope_parameters={"sliding_attention": rope("default"), "full_attention": rope("linear", factor=8.0)},
)  # fmt: skip


class Gemma3Block(Gemma2Block):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        heads = dict(num_heads=config.num_attention_heads, num_kv_heads=config.num_key_value_heads, head_dim=8)
        local = config.layer_types[layer] == "sliding_attention"
        self.self_attn = Attention(
            config.hidden_size, **heads, scale=config.query_pre_attn_scalar**-0.5,
            qk_norm=dict(eps=config.rms_norm_eps), window=config.window(layer), rope="local" if local else "full",
        )  # fmt: skip


class Gemma3(ligermodels.Gemma2):
    @classmethod
    def make_model(cls, config):
        ropes = {"local": RotaryEmbedding(config.head_dim, theta=500.0)}
        return Decoder(config, Gemma3Block, norm=NORM, embedding_scale=config.hidden_size**0.5, ropes=ropes)


def gemma3():
    """Gemma 3's text model by transformers, and the same in our layers."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**SIZES)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for parameter in theirs.requires_grad_(False).eval().parameters():
        parameter.normal_(std=0.3)
    own = {**SIZES, "model_type": "gemma2", "rope_parameters": SIZES["rope_parameters"]["full_attention"]}
    ours = Gemma3.from_config(
        {**own, "attn_logit_softcapping": None, "final_logit_softcapping": None, "rms_norm_eps": 1e-5}, seed=0
    )
    weights = {name: w + name.endswith(("q_norm.weight", "k_norm.weight")) for name, w in theirs.state_dict().items()}
    ours.load_state_dict(weights, strict=False)
    return theirs, ours.requires_grad_(False).eval()


def test_two_rotary_tables_are_gemma_3s():
    theirs, ours = gemma3()
    ids, mask = padded([9, 20, 14])
    expected = theirs(ids, attention_mask=mask).logits[mask]
    assert relative(ours(ids, attention_mask=mask).logits[mask], expected) < LOGITS
    for layer in ours.model.layers:
        layer.self_attn.rope = "full"
    assert relative(ours(ids, attention_mask=mask).logits[mask], expected) > 0.01
    theirs, ours = gemma3()
    wanted = theirs.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False)
    assert torch.equal(ours.generate(ids, attention_mask=mask, max_new_tokens=30), wanted)
    for one, real, row in zip(ids, mask, wanted, strict=True):
        assert generate_many(ours, [one[real]], max_new_tokens=30)[0].tolist() == row[len(ids[0]) :].tolist()


class Uneven(Block):
    """Layer 0 has small heads and rotates, layer 1 has one large key head and does not, layer 2 a window."""

    SHAPES = (
        dict(num_heads=4, num_kv_heads=2, head_dim=8),
        dict(num_heads=2, num_kv_heads=1, head_dim=32, rope=None),
        dict(num_heads=4, num_kv_heads=4, head_dim=16, window=5, rope="wider"),
    )

    def __init__(self, config, layer):
        super().__init__(config, Attention(config.hidden_size, **self.SHAPES[layer]), gated_mlp(config))


class UnevenModel(ligermodels.Llama):
    @classmethod
    def make_model(cls, config):
        return Decoder(config, Uneven, ropes={"wider": RotaryEmbedding(16, partial_rotary_factor=0.5)})


@pytest.mark.parametrize("kv_cache_dtype", [None, "fp8"])
def test_cached_tokens_of_uneven_layers_are_those_of_the_whole_text(kv_cache_dtype):
    config = {**llama().config.to_dict(), "num_hidden_layers": 3, "head_dim": 8}
    model = UnevenModel.from_config(config, seed=0).requires_grad_(False).eval()
    ids = prompt(2, 7)
    found = model.generate(ids, max_new_tokens=25, kv_cache_dtype=kv_cache_dtype)
    if kv_cache_dtype is None:
        expected = ids
        for _ in range(25):
            expected = torch.cat([expected, model(expected, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        assert torch.equal(found, expected)
    assert found.shape == (2, 32) and found.max() < VOCAB
    many = generate_many(model, list(ids), max_new_tokens=25, kv_cache_dtype=kv_cache_dtype)
    assert torch.equal(torch.stack(many), found[:, 7:])


def test_only_the_tables_of_the_config_may_change_with_the_length():
    dynamic = RotaryEmbedding(8, scaling=dict(rope_type="dynamic", factor=2.0), max_position_embeddings=16)
    with pytest.raises(ConfigError, match="rope 'local' has rope_type='dynamic'"):
        Decoder(llama().config, ligermodels.Llama.block_class, ropes={"local": dynamic})
