"""Layers that differ from each other in one stack: rotary tables, windows, heads and their sizes, MLPs and experts; see
also test_toy_family.py."""

import copy
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import ligermodels
from ligermodels.arch import CausalLM
from ligermodels.arch.block import Block, RoutedBlock, attention, gated_mlp, mixture
from ligermodels.arch.config import RoutedConfig
from ligermodels.arch.decoder import Decoder
from ligermodels.errors import ConfigError, InputError
from ligermodels.generation import generate_many
from ligermodels.layers import Attention, Batch, MultiTokenPrediction, RotaryEmbedding
from tests.arch.suite import rope
from tests.arch.toy_family import SIZES as TOY, AttentionBlock, Toy, ToyConfig
from tests.generation.models import VOCAB, llama, prompt


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


def test_ropes_by_layer_type_are_those_of_the_blocks():
    by_type = {"full_attention": rope("default"), "sliding_attention": rope("default")}
    config = {**llama().config.to_hf(), "rope_scaling": None, "rope_parameters": by_type}
    with pytest.raises(ConfigError, match="has no full_attention, sliding_attention"):
        ligermodels.Llama.from_config(config, device="meta")
    config = ToyConfig.from_hf(TOY)
    del config.rope_parameters["sliding_attention"]
    with pytest.raises(ConfigError, match="has ropes of full, and not of sliding"):
        Toy.from_config(config, device="meta")


def test_heads_of_two_sizes_read_two_ropes(monkeypatch):
    monkeypatch.setattr(ToyConfig, "rope", lambda config, layer: "full")
    config = {**TOY, "rope_parameters": {"full_attention": rope("default")}}
    with pytest.raises(ConfigError, match="toy: blocks with a head_dim of 8 and of 16 read one rope, 'full'"):
        Toy.from_config(config, device="meta")


class Adder(Block):
    """Adds to what blocks pass on, and reads nothing."""

    carries = True

    def __init__(self, config):
        super().__init__(config, attention(config, 0), gated_mlp(config))

    def forward(self, x, residual, batch, cache=None, carry=None):
        x, residual = super().forward(x, residual, batch, cache)
        return x, residual, {"router_logits": (x,), "own": x}


def test_blocks_of_the_layer_for_multi_token_prediction_read_nothing():
    """What one adds is dropped, before the next one as well; one that reads is refused."""
    config, x = llama().config, torch.randn(2, 5, llama().config.hidden_size)
    batch = Batch(rotary={"full": llama().decoder.rotary_emb(torch.arange(5)[None])})
    adders = MultiTokenPrediction(config.hidden_size, [Adder(config), Adder(config)], dict(eps=1e-6))
    plain = copy.deepcopy(adders)
    for block in plain.layers:
        block.__class__ = Block
    assert torch.equal(adders(x, x, batch), plain(x, x, batch))
    reader = MultiTokenPrediction(config.hidden_size, [Adder(config), AttentionBlock(config, 0)], dict(eps=1e-6))
    with pytest.raises(
        InputError, match="reads 'inputs' of what blocks pass on to each other, and none runs before it"
    ):
        reader(x, x, batch)


@dataclass(kw_only=True)
class MixtureConfig(RoutedConfig):
    """Of a family that needs no dense MLPs, and that counts its experts under two names."""

    model_type: ClassVar[str] = "mixture"
    architecture: ClassVar[str] = "MixtureForCausalLM"
    aliases: ClassVar = {"num_local_experts": "num_experts"}

    intermediate_size: int = None
    num_experts: int = 4
    dense: list[int] | None = None


class MixtureBlock(RoutedBlock):
    def __init__(self, config, layer):
        mlp = gated_mlp(config) if layer in (config.dense or []) else mixture(config, intermediate_size=12)
        super().__init__(config, attention(config, layer), mlp)


class Mixture(CausalLM):
    config_class, block_class = MixtureConfig, MixtureBlock


MIXTURE = dict(vocab_size=97, hidden_size=32, num_hidden_layers=3, num_attention_heads=4)


def test_a_family_of_experts_alone_has_no_intermediate_size():
    config = MixtureConfig.from_hf(MIXTURE)
    assert "intermediate_size" not in config.to_hf() and MixtureConfig.from_hf(config.to_hf()) == config
    ids = prompt(2, 9)
    output = Mixture.from_config(config, seed=0)(ids, labels=ids, output_router_logits=True)
    assert len(output.router_logits) == 3
    with pytest.raises(ConfigError, match="lacks intermediate_size"):
        Mixture.from_config({**MIXTURE, "dense": [1]}, device="meta")
    model = Mixture.from_config({**MIXTURE, "dense": [1], "intermediate_size": 44}, seed=0)
    assert len(model(ids, labels=ids, output_router_logits=True).router_logits) == 2


def test_a_field_is_read_under_its_other_name():
    both = {**MIXTURE, "num_local_experts": 6, "num_experts": 6}
    for values in (both, {**both, "num_experts": None}, {**both, "num_local_experts": None}):
        saved = MixtureConfig.from_hf(values).to_hf()
        assert saved["num_experts"] == 6 and "num_local_experts" not in saved
    with pytest.raises(ConfigError, match="num_experts=5 and num_local_experts=6; remove one"):
        MixtureConfig.from_hf({**both, "num_experts": 5})
    with pytest.raises(ConfigError, match="num_experts_per_tok=2 must be at most the number of experts, 1"):
        MixtureConfig.from_hf({**MIXTURE, "num_local_experts": 1})
