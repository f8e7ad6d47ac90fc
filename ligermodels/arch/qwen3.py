"""Qwen3 and its fine-tunes: Qwen2 without biases and with a norm on every head of q and k.

- Each head of q, and of k, is normed over its `head_dim` before it rotates; all heads share the weight.
- `attention_bias` puts a bias on q, k, v and o alike; released files have none.
- `head_dim` is 128 whatever the width and the number of heads are.
- Windows as in Qwen2: from block `max_window_layers` on, where `use_sliding_window` is set. No released file sets it.
- Long contexts by YaRN: `rope_scaling` in config.json.
- 0.6B, 1.7B and 4B tie the head to the table.

Paper: Qwen Team 2025, https://arxiv.org/abs/2505.09388.
Checked against: models/qwen3/modeling_qwen3.py of transformers 5.23.
"""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.arch.base import CausalLM
from ligermodels.arch.block import Block, attention, gated_mlp
from ligermodels.arch.config import LastLayersWindowConfig


@dataclass(kw_only=True)
class Qwen3Config(LastLayersWindowConfig):
    """config.json of model_type qwen3."""

    model_type: ClassVar[str] = "qwen3"
    architecture: ClassVar[str] = "Qwen3ForCausalLM"

    num_key_value_heads: int = 32
    head_dim: int = 128
    max_position_embeddings: int = 32768
    attention_bias: bool = False


class Qwen3Block(Block):
    """Attention with normed queries and keys, and gated MLP, each on the normed residual stream."""

    def __init__(self, config: Qwen3Config, layer: int):
        biases = dict(qkv_bias=config.attention_bias, o_bias=config.attention_bias)
        self_attn = attention(config, layer, qk_norm=dict(eps=config.rms_norm_eps), **biases)
        super().__init__(config, self_attn, gated_mlp(config))


class Qwen3(CausalLM):
    """Qwen3 with a language-model head. `Qwen3.from_hub("Qwen/Qwen3-0.6B")` loads one."""

    config_class = Qwen3Config
    block_class = Qwen3Block
