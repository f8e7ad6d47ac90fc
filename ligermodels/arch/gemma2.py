"""Gemma 2 (2B, 9B, 27B) and fine-tunes: Gemma with four norms, softcaps and every other block on a window.

- Attention and gated MLP are normed before and after: what goes back into the residual stream is normed, too. The
  weight that is called post_attention_layernorm norms the attention's output here, not the gated MLP's input.
- Attention scores are capped, 50 tanh(s / 50), before the mask; logits likewise with 30. null turns a cap off.
- Scores are scaled by query_pre_attn_scalar ** -0.5, which for the 27B is not head_dim ** -0.5.
- Blocks 0, 2, 4, ... see a window of `sliding_window` tokens, the others everything.
- As in Gemma: norm weights around 0, the embedding's rounded scale, GELU by tanh, a tied head.

Paper: Gemma Team 2024, https://arxiv.org/abs/2408.00118.
Checked against: models/gemma2/modeling_gemma2.py of transformers 5.23, with eager attention: its other ones may leave
out the cap.
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
class Gemma2Config(ModelConfig):
    """config.json of model_type gemma2. The activation is `hidden_activation`, whatever `hidden_act` says."""

    model_type: ClassVar[str] = "gemma2"
    architecture: ClassVar[str] = "Gemma2ForCausalLM"
    unused: ClassVar[frozenset[str]] = frozenset({"sliding_window_size"})

    num_key_value_heads: int = 4
    head_dim: int = 256
    hidden_act: str = "gelu_pytorch_tanh"
    hidden_activation: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    query_pre_attn_scalar: float = 256
    sliding_window: int | None = 4096
    layer_types: list[str] = None  # type: ignore[assignment]  # absent: sliding, full, sliding, full, ...
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0
    use_bidirectional_attention: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer_types is None:
            self.layer_types = [
                "full_attention" if layer % 2 else "sliding_attention" for layer in range(self.num_hidden_layers)
            ]
        self._check_layer_types(self.layer_types)
        if self.sliding_window is None and "sliding_attention" in self.layer_types:
            raise self._error("sliding_window", "leaves the layers of layer_types that slide without a window")
        if self.hidden_activation not in ACTIVATIONS:
            raise self._error("hidden_activation", f"is not supported; supported: {', '.join(ACTIVATIONS)}")
        self.hidden_act = self.hidden_activation
        if self.use_bidirectional_attention:
            raise self._error("use_bidirectional_attention", "is not supported: this is a causal language model")
        for name in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise self._error(name, "must be positive")

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None


class Gemma2Block(nn.Module):
    """Attention and gated MLP, each between two norms."""

    def __init__(self, config: Gemma2Config, layer: int):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(
            size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            window=config.window(layer),
            softcap=config.attn_logit_softcapping,
            scale=config.query_pre_attn_scalar**-0.5,
        )
        self.mlp = GatedMLP(size, config.intermediate_size, activation=ACTIVATIONS[config.hidden_activation])
        self.input_layernorm = RMSNorm(size, eps=eps, offset=1.0, cast_before_weight=False)
        self.post_attention_layernorm = RMSNorm(size, eps=eps, offset=1.0, cast_before_weight=False)
        self.pre_feedforward_layernorm = RMSNorm(size, eps=eps, offset=1.0, cast_before_weight=False)
        self.post_feedforward_layernorm = RMSNorm(size, eps=eps, offset=1.0, cast_before_weight=False)

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch, cache: LayerCache | None = None
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x, _ = self.post_attention_layernorm(self.self_attn(x, batch, cache))
        x, residual = self.pre_feedforward_layernorm(x, residual)
        x, _ = self.post_feedforward_layernorm(self.mlp(x))
        return x, residual


class Gemma2(CausalLM):
    """Gemma 2 with a language-model head. `Gemma2.from_hub("google/gemma-2-2b")` loads one."""

    config_class = Gemma2Config
    config: Gemma2Config
    block_class = Gemma2Block
    _no_split_modules: ClassVar = ["Gemma2Block"]

    def _make_model(self, config: ModelConfig) -> nn.Module:
        norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, offset=1.0, cast_before_weight=False)
        return Decoder(config, self.block_class, norm=norm, embedding_scale=config.hidden_size**0.5)
