"""Mistral 7B, Nemo, Small and their fine-tunes: Llama without biases and with a window.

- Every query sees the last `sliding_window` tokens, itself included (7B v0.1: 4096). config.json's null turns the
  window off (v0.2 and later, Nemo); a missing key is 4096.
- `head_dim` is of its own choosing: Nemo has 32 heads of 128 on a width of 5120.

Paper: Jiang et al. 2023, https://arxiv.org/abs/2310.06825.
Checked against: models/mistral/modeling_mistral.py of transformers 5.23.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from ligermodels.arch.base import CausalLM
from ligermodels.arch.config import ACTIVATIONS, ModelConfig
from ligermodels.layers import (
    Attention,
    Batch,
    GatedMLP,
    RMSNorm,
)
from ligermodels.layers.cache import LayerCache


@dataclass(kw_only=True)
class MistralConfig(ModelConfig):
    """config.json of model_type mistral."""

    model_type: ClassVar[str] = "mistral"
    architecture: ClassVar[str] = "MistralForCausalLM"

    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096

    def window(self, layer: int) -> int | None:
        return self.sliding_window


class MistralBlock(nn.Module):
    """Attention over a window and gated MLP, each on the normed residual stream."""

    last_mlp = "mlp"  # see recompute.py

    def __init__(self, config: MistralConfig, layer: int):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(
            size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            window=config.window(layer),
        )
        self.mlp = GatedMLP(size, config.intermediate_size, activation=ACTIVATIONS[config.hidden_act])
        self.input_layernorm = RMSNorm(size, eps=eps)
        self.post_attention_layernorm = RMSNorm(size, eps=eps)

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch, cache: LayerCache | None = None
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, batch, cache)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class Mistral(CausalLM):
    """Mistral with a language-model head. `Mistral.from_hub("mistralai/Mistral-7B-v0.3")` loads one."""

    config_class = MistralConfig
    config: MistralConfig
    block_class = MistralBlock
    _no_split_modules: ClassVar = ["MistralBlock"]
