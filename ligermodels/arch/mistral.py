"""Mistral 7B, Nemo, Small and their fine-tunes: Llama without biases and with a window.

- Every query sees the last `sliding_window` tokens, itself included (7B v0.1: 4096). config.json's null turns the
  window off (v0.2 and later, Nemo); a missing key is 4096.
- `head_dim` does not follow from hidden_size: Nemo has 32 heads of 128 and a hidden_size of 5120.

Paper: Jiang et al. 2023, https://arxiv.org/abs/2310.06825.
Checked against: models/mistral/modeling_mistral.py of transformers 5.23.
"""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.arch.base import CausalLM
from ligermodels.arch.block import Block, attention, gated_mlp
from ligermodels.arch.config import WindowConfig


@dataclass(kw_only=True)
class MistralConfig(WindowConfig):
    """config.json of model_type mistral."""

    model_type: ClassVar[str] = "mistral"
    architecture: ClassVar[str] = "MistralForCausalLM"

    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096


class MistralBlock(Block):
    """Attention over a window and gated MLP, each on the normed residual stream."""

    def __init__(self, config: MistralConfig, layer: int):
        super().__init__(config, attention(config, layer), gated_mlp(config))


class Mistral(CausalLM):
    """Mistral with a language-model head. `Mistral.from_hub("mistralai/Mistral-7B-v0.3")` loads one."""

    config_class = MistralConfig
    block_class = MistralBlock
