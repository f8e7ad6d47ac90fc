"""Qwen2, Qwen2.5, QwQ and their fine-tunes: Llama with biases on q, k and v.

- q, k and v always have a bias, o never: config.json has no switch for it. The small models' biases are large.
- Where `use_sliding_window` is set, the blocks from `max_window_layers` on see a window of `sliding_window` tokens and
  the first ones see everything (the other way round than some documentation says). No released file sets it.
- Long contexts (2.5) by YaRN: `rope_scaling` in config.json.
- The table has more rows than the tokenizer has ids; 0.5B, 1.5B and 3B tie the head to it.

Paper: Yang et al. 2024, https://arxiv.org/abs/2407.10671; Qwen Team 2024, https://arxiv.org/abs/2412.15115.
Checked against: models/qwen2/modeling_qwen2.py of transformers 5.23.
"""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.arch.base import CausalLM
from ligermodels.arch.block import Block, attention, gated_mlp
from ligermodels.arch.config import LastLayersWindowConfig


@dataclass(kw_only=True)
class Qwen2Config(LastLayersWindowConfig):
    """config.json of model_type qwen2."""

    model_type: ClassVar[str] = "qwen2"
    architecture: ClassVar[str] = "Qwen2ForCausalLM"

    num_key_value_heads: int = 32
    max_position_embeddings: int = 32768


class Qwen2Block(Block):
    """Attention and gated MLP, each on the normed residual stream."""

    def __init__(self, config: Qwen2Config, layer: int):
        super().__init__(config, attention(config, layer, qkv_bias=True), gated_mlp(config))


class Qwen2(CausalLM):
    """Qwen2 with a language-model head. `Qwen2.from_hub("Qwen/Qwen2.5-7B")` loads one."""

    config_class = Qwen2Config
    block_class = Qwen2Block
