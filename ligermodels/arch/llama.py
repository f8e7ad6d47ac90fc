"""Llama 2, 3, 3.1 and 3.2, and their fine-tunes: the plain case that the other architectures depart from.

- Pre-norm blocks of causal attention (grouped-query where num_key_value_heads is smaller) and a gated unit.
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
from ligermodels.cache import LayerCache
from ligermodels.layers import (
    Attention,
    Batch,
    Embedding,
    GatedMLP,
    LMHead,
    RMSNorm,
    RotaryEmbedding,
    TiedLMHead,
)


@dataclass(kw_only=True)
class LlamaConfig(ModelConfig):
    """config.json of model_type llama."""

    model_type: ClassVar[str] = "llama"
    architecture: ClassVar[str] = "LlamaForCausalLM"

    attention_bias: bool = False
    mlp_bias: bool = False


class LlamaBlock(nn.Module):
    """Attention and gated unit, each on the normed residual stream."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attn_norm = RMSNorm(size, eps=eps)
        self.attn = Attention(
            size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
        )
        self.mlp_norm = RMSNorm(size, eps=eps)
        activation = ACTIVATIONS[config.hidden_act]
        self.mlp = GatedMLP(size, config.intermediate_size, activation=activation, bias=config.mlp_bias)

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch, cache: LayerCache | None = None
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.attn_norm(x, residual)
        x = self.attn(x, batch, cache)
        x, residual = self.mlp_norm(x, residual)
        return self.mlp(x), residual


class Llama(CausalLM):
    """Llama with a language-model head. `Llama.from_hub("meta-llama/Llama-3.2-1B")` loads one."""

    config_class = LlamaConfig
    config: LlamaConfig
    _no_split_modules = ("LlamaBlock",)

    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        size = config.hidden_size
        self.embed_tokens = Embedding(config.vocab_size, size, padding_idx=config.padding_idx)
        self.rotary = RotaryEmbedding(
            config.head_dim,
            theta=config.rope_parameters["rope_theta"],
            scaling=config.rope_parameters,
            max_position_embeddings=config.max_position_embeddings,
        )
        self.layers = nn.ModuleList(LlamaBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(size, eps=config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self.lm_head = TiedLMHead(self.embed_tokens) if tied else LMHead(size, config.vocab_size)

    WEIGHTS: ClassVar = {
        "embed_tokens.weight": "model.embed_tokens.weight",
        "layers.{i}.attn_norm.weight": "model.layers.{i}.input_layernorm.weight",
        "layers.{i}.attn.qkv_proj.{w}": (
            "model.layers.{i}.self_attn.q_proj.{w}",
            "model.layers.{i}.self_attn.k_proj.{w}",
            "model.layers.{i}.self_attn.v_proj.{w}",
        ),
        "layers.{i}.attn.o_proj.{w}": "model.layers.{i}.self_attn.o_proj.{w}",
        "layers.{i}.mlp_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
        "layers.{i}.mlp.gate_up_proj.{w}": (
            "model.layers.{i}.mlp.gate_proj.{w}",
            "model.layers.{i}.mlp.up_proj.{w}",
        ),
        "layers.{i}.mlp.down_proj.{w}": "model.layers.{i}.mlp.down_proj.{w}",
        "norm.weight": "model.norm.weight",
        "lm_head.weight": "lm_head.weight",
    }
