"""Llama 2, 3, 3.1 and 3.2, and their fine-tunes: the plain case that the other architectures depart from.

- Pre-norm blocks of causal attention (grouped-query where num_key_value_heads is smaller) and a gated MLP.
- RMSNorm that casts to the activation dtype before the weight is applied.
- Rotary embedding over the whole head, halves rotated against each other; any rope type of config.json.
- `attention_bias` puts a bias on q, k, v and o alike, `mlp_bias` on gate, up and down.
- The head is the embedding table where `tie_word_embeddings` says so (3.2-1B and 3B).

Paper: Touvron et al. 2023, https://arxiv.org/abs/2307.09288; Dubey et al. 2024, https://arxiv.org/abs/2407.21783.
Checked against: models/llama/modeling_llama.py of transformers 5.23.
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
class LlamaConfig(ModelConfig):
    """config.json of model_type llama."""

    model_type: ClassVar[str] = "llama"
    architecture: ClassVar[str] = "LlamaForCausalLM"

    attention_bias: bool = False
    mlp_bias: bool = False


class LlamaBlock(nn.Module):
    """Attention and gated MLP, each on the normed residual stream."""

    last_mlp = "mlp"  # see recompute.py

    def __init__(self, config: LlamaConfig, layer: int):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(
            size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
        )
        activation = ACTIVATIONS[config.hidden_act]
        self.mlp = GatedMLP(size, config.intermediate_size, activation=activation, bias=config.mlp_bias)
        self.input_layernorm = RMSNorm(size, eps=eps)
        self.post_attention_layernorm = RMSNorm(size, eps=eps)

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch, cache: LayerCache | None = None
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, batch, cache)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class Llama(CausalLM):
    """Llama with a language-model head. `Llama.from_hub("meta-llama/Llama-3.2-1B")` loads one."""

    config_class = LlamaConfig
    config: LlamaConfig
    block_class = LlamaBlock
    _no_split_modules: ClassVar = ["LlamaBlock"]
