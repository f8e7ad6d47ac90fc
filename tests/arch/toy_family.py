"""A family that was never released and uses all that a family may ask of the package, written as a newcomer would.

- Blocks of attention and blocks that are an MLP alone, which have no state, in the order of `block_types`.
- Each query head of attention has a sink.
- "sliding" blocks have a window, heads of another size (`sliding_head_dim`) and a rope of their own.
- A second table gives each token a vector for each block, which the block adds to its input.
- An MLP also adds to its input what the block before it has added to the residual stream.
- The columns inside of an MLP are multiplied by `gain`, in fp32; what a block adds by `layer_scalar`, a buffer.
- q, k and v are the rows of one weight. So are gate and up, whose rows take turns on disk.
"""

import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from ligermodels.arch.base import CausalLM
from ligermodels.arch.block import ResidualBlock, attention
from ligermodels.arch.config import ModelConfig
from ligermodels.arch.decoder import Decoder
from ligermodels.checkpoint.weights import Rearranged, to_halves
from ligermodels.kernels.linear.glu import glu
from ligermodels.layers import Embedding, RMSNorm
from ligermodels.layers.base import Layer, Shard, ones
from ligermodels.layers.fusion import linears_part
from ligermodels.layers.parallel import local_shard


@dataclass(kw_only=True)
class ToyConfig(ModelConfig):
    """config.json of model_type toy."""

    model_type: ClassVar[str] = "toy"
    architecture: ClassVar[str] = "ToyForCausalLM"
    default_ropes: ClassVar = {
        name: {"rope_type": "default", "rope_theta": 1e4} for name in ("full_attention", "sliding_attention")
    }

    block_types: list[str]
    sliding_window: int
    sliding_head_dim: int

    def __post_init__(self):
        super().__post_init__()
        types = {*self.block_types}
        if len(self.block_types) != self.num_hidden_layers or not types <= {"full", "sliding", "mlp"}:
            raise self._error("block_types", "must name full, sliding or mlp for each block")

    def slides(self, layer):
        return self.block_types[layer] == "sliding"

    def layer(self, layer):
        config = copy.copy(self)
        config.head_dim = self.sliding_head_dim if self.slides(layer) else self.head_dim
        return config

    def window(self, layer):
        return self.sliding_window if self.slides(layer) else None

    def rope(self, layer):
        return "sliding" if self.slides(layer) else "full"


class Gain(Layer):
    """A factor for each column."""

    keep_fp32 = True

    def __init__(self, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(columns))

    def init_weights(self, draw):
        draw(self.weight, ones)

    def shards(self):
        return {"weight": Shard("columns", len(self.weight), f"a gain of {len(self.weight)}")}

    def forward(self):
        return local_shard(self.weight, self.tp)


class WeightedMLP(Layer):
    """down_proj(silu(gate) * up * gain)."""

    def __init__(self, hidden_size, inner):
        super().__init__()
        self.inner = inner
        self.gate_up_proj = nn.Linear(hidden_size, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden_size, bias=False)
        self.gain = Gain(inner)

    def shards(self):
        what = f"an intermediate size of {self.inner}"
        packed = Shard("columns", self.inner, what, parts=(self.inner, self.inner))
        return {"gate_up_proj": packed, "down_proj": Shard("rows", self.inner, what)}

    def set_tp(self, tp):
        super().set_tp(tp)
        self.inner //= tp.size

    def fusion_parts(self, at):
        yield linears_part(self, ["gate_up_proj"], at)
        yield linears_part(self, ["down_proj"], at)

    def saved_per_token(self, policy):
        """The input; gate, up, their product, and that times gain."""
        return self.gate_up_proj.in_features + 4 * self.inner

    def forward(self, x):
        x = x if self.tp is None else self.tp.all_gather(x, 1)
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        h = (glu(gate, up, activation="silu") * self.gain()).to(x.dtype)
        y = self.down_proj(h)
        return y if self.tp is None else self.tp.reduce_scatter(y, 1)


class ToyBlock(ResidualBlock):
    carries = True

    def __init__(self, config):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def init_weights(self, draw):
        draw(self.layer_scalar, ones)


class AttentionBlock(ToyBlock):
    def __init__(self, config, layer):
        super().__init__(config)
        self.self_attn = attention(config, layer, projections=("qkv_proj", "o_proj"), sinks=True)

    def forward(self, x, residual, batch, cache=None, carry=None):
        x, residual = self.norm(x, residual)
        x = self.self_attn(x + carry["inputs"], batch, cache) * self.layer_scalar
        return x, residual, {"added": x}


class MLPBlock(ToyBlock):
    def __init__(self, config, layer):
        super().__init__(config)
        self.mlp = WeightedMLP(config.hidden_size, config.intermediate_size)

    def forward(self, x, residual, batch, cache=None, carry=None):
        x, residual = self.norm(x, residual)
        x = self.mlp(x + carry["inputs"] + carry["added"]) * self.layer_scalar
        return x, residual, {"added": x}


def block(config, layer):
    return (MLPBlock if config.block_types[layer] == "mlp" else AttentionBlock)(config, layer)


class ToyDecoder(Decoder):
    def __init__(self, config):
        super().__init__(config, block)
        self.embed_blocks = Embedding(config.vocab_size, config.num_hidden_layers * config.hidden_size)

    def first_carry(self, tokens, inputs, x):
        vectors = self.own_tokens(self.embed_blocks(tokens))
        return {"inputs": vectors.chunk(self.config.num_hidden_layers, dim=-1), "added": x}

    def inputs_of(self, layer, carry):
        return {"inputs": carry["inputs"][layer], "added": carry["added"]}


GATE_UP = "model.layers.{i}.mlp.gate_up_proj.weight"


class Toy(CausalLM):
    config_class = ToyConfig
    DISK_NAMES: ClassVar = {GATE_UP: Rearranged(GATE_UP, order=lambda rows, config: to_halves(rows, 1))}
    _no_split_modules: ClassVar = ["AttentionBlock", "MLPBlock"]

    @classmethod
    def make_model(cls, config):
        return ToyDecoder(config)


def rope(theta):
    return {"rope_type": "default", "rope_theta": theta}


SIZES = dict(
    model_type="toy", vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, sliding_head_dim=16, sliding_window=5, initializer_range=0.2,
    block_types=["full", "mlp", "sliding", "mlp"],
    rope_parameters=dict(full_attention=rope(100.0), sliding_attention=rope(10.0)),
)  # fmt: skip
