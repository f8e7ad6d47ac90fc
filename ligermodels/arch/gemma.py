"""Gemma 1 (2B, 7B, CodeGemma) and fine-tunes: Llama on a wide gated MLP of GELU, around the embedding's own scale.

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
from ligermodels.arch.decoder import Decoder
from ligermodels.layers import (
    Attention,
    Batch,
    GatedMLP,
    RMSNorm,
)
from ligermodels.layers.cache import LayerCache


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
    """Attention and gated MLP, each on the normed residual stream."""

    last_mlp = "mlp"  # see recompute.py

    def __init__(self, config: GemmaConfig, layer: int):
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
        self.mlp = GatedMLP(size, config.intermediate_size, activation=ACTIVATIONS[config.hidden_act])
        self.input_layernorm = RMSNorm(size, eps=eps, offset=1.0, cast_before_weight=False)
        self.post_attention_layernorm = RMSNorm(size, eps=eps, offset=1.0, cast_before_weight=False)

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch, cache: LayerCache | None = None
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, batch, cache)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class Gemma(CausalLM):
    """Gemma with a language-model head. `Gemma.from_hub("google/gemma-2b")` loads one."""

    config_class = GemmaConfig
    config: GemmaConfig
    block_class = GemmaBlock
    _no_split_modules: ClassVar = ["GemmaBlock"]

    def _make_model(self, config: ModelConfig) -> nn.Module:
        norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, offset=1.0, cast_before_weight=False)
        return Decoder(config, self.block_class, norm=norm, embedding_scale=config.hidden_size**0.5)
