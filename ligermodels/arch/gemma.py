"""Gemma 1 (2B, 7B, CodeGemma) and fine-tunes: Llama on a wide gated unit of GELU, around the embedding's own scale.

- Norm weights are stored around 0 and act as 1 + weight; the whole norm is fp32, with one rounding at its end.
- Embeddings are multiplied by sqrt(hidden_size), rounded to the weights' dtype (bf16: 55.5 for 3072). The head reads
  the table as it is, and is always it unless config.json says otherwise. `inputs_embeds` are taken as scaled already.
- The activation is GELU by tanh, also where config.json says "gelu", as the released files do.
- `head_dim` is 256 whatever the width: 16 heads make 4096 out of 3072 in the 7B.

Paper: Gemma Team 2024, https://arxiv.org/abs/2403.08295.
Checked against: models/gemma/modeling_gemma.py of transformers 5.23.
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
class GemmaConfig(ModelConfig):
    """config.json of model_type gemma."""

    model_type: ClassVar[str] = "gemma"
    architecture: ClassVar[str] = "GemmaForCausalLM"

    num_key_value_heads: int = 16
    head_dim: int = 256
    hidden_act: str = "gelu_pytorch_tanh"
    hidden_activation: str | None = None  # goes before hidden_act
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    use_bidirectional_attention: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_activation not in (None, *ACTIVATIONS):
            raise self._error("hidden_activation", f"is not supported; supported: {', '.join(ACTIVATIONS)}")
        if self.use_bidirectional_attention:
            raise self._error("use_bidirectional_attention", "is not supported: this is a causal language model")
        # One word for both, which every reader takes alike: some know hidden_act only, some hidden_activation only.
        word = self.hidden_activation or self.hidden_act
        self.hidden_act = self.hidden_activation = "gelu_pytorch_tanh" if word == "gelu" else word


class GemmaBlock(nn.Module):
    """Attention and gated unit, each on the normed residual stream."""

    def __init__(self, config: GemmaConfig):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attn_norm = RMSNorm(size, eps=eps, offset=1.0, casting="gemma")
        self.attn = Attention(
            size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
        )
        self.mlp_norm = RMSNorm(size, eps=eps, offset=1.0, casting="gemma")
        self.mlp = GatedMLP(size, config.intermediate_size, activation=ACTIVATIONS[config.hidden_act])

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch, cache: LayerCache | None = None
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.attn_norm(x, residual)
        x = self.attn(x, batch, cache)
        x, residual = self.mlp_norm(x, residual)
        return self.mlp(x), residual


class Gemma(CausalLM):
    """Gemma with a language-model head. `Gemma.from_hub("google/gemma-2b")` loads one."""

    config_class = GemmaConfig
    config: GemmaConfig
    _no_split_modules = ("GemmaBlock",)

    def __init__(self, config: GemmaConfig):
        super().__init__(config)
        size = config.hidden_size
        self.embed_tokens = Embedding(config.vocab_size, size, scale=size**0.5, padding_idx=config.padding_idx)
        self.rotary = RotaryEmbedding(
            config.head_dim,
            theta=config.rope_parameters["rope_theta"],
            scaling=config.rope_parameters,
            max_position_embeddings=config.max_position_embeddings,
        )
        self.layers = nn.ModuleList(GemmaBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(size, eps=config.rms_norm_eps, offset=1.0, casting="gemma")
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
        "layers.{i}.mlp.gate_up_proj.weight": (
            "model.layers.{i}.mlp.gate_proj.weight",
            "model.layers.{i}.mlp.up_proj.weight",
        ),
        "layers.{i}.mlp.down_proj.weight": "model.layers.{i}.mlp.down_proj.weight",
        "norm.weight": "model.norm.weight",
        "lm_head.weight": "lm_head.weight",
    }
