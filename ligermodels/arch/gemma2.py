"""Gemma 2 (2B, 9B, 27B) and fine-tunes: Gemma with four norms, softcaps and every other block on a window.

- Attention and gated MLP are normed before and after: what goes back into the residual stream is normed, too. The
  weight that is called post_attention_layernorm norms the attention's output here, not the gated MLP's input.
- Attention scores are capped, 50 tanh(s / 50), before the mask; logits likewise with 30. null turns a cap off.
- Scores are scaled by query_pre_attn_scalar ** -0.5, which for the 27B is not head_dim ** -0.5.
- Blocks 0, 2, 4, ... see a window of `sliding_window` tokens, the others everything.
- As in Gemma: norm weights around 0, the embedding's rounded scale, GELU by tanh, a tied head.

Paper: Gemma Team 2024, https://arxiv.org/abs/2408.00118.
Checked against: models/gemma2/modeling_gemma2.py of transformers 5.23, with eager attention: its other
implementations may leave out the cap.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from ligermodels.arch.base import CausalLM
from ligermodels.arch.block import Block, attention, gated_mlp
from ligermodels.arch.config import ACTIVATIONS, LayerTypesConfig, ModelConfig
from ligermodels.arch.decoder import Decoder
from ligermodels.layers import Batch, RMSNorm
from ligermodels.layers.state import KeyValues

NORM: dict[str, Any] = dict(offset=1.0, cast_before_weight=False)


@dataclass(kw_only=True)
class Gemma2Config(LayerTypesConfig):
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
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0
    use_bidirectional_attention: bool | None = None

    def default_layer_type(self, layer: int) -> str:
        return "full_attention" if layer % 2 else "sliding_attention"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.use_bidirectional_attention:
            raise self._error("use_bidirectional_attention", "is not supported: this is a causal language model")
        for name in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"):
            if getattr(self, name) == 0:
                raise self._error(name, "must be positive")
        self._check_choice("hidden_activation", ACTIVATIONS)
        self.hidden_act = self.hidden_activation


class Gemma2Block(Block):
    """Attention and gated MLP, each between two norms."""

    last_mlp = None  # a norm ends the block; see recompute.py

    def __init__(self, config: Gemma2Config, layer: int, **of_attention: Any):
        self_attn = attention(
            config,
            layer,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            softcap=config.attn_logit_softcapping,
            scale=config.query_pre_attn_scalar**-0.5,
            **of_attention,
        )
        super().__init__(config, self_attn, gated_mlp(config), **NORM)
        self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, **NORM)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, **NORM)

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch, cache: KeyValues | None = None, **of_mlp: Any
    ) -> tuple[Any, ...]:
        x, residual = self.input_layernorm(x, residual)
        x = self.post_attention_layernorm(self.self_attn(x, batch, cache))
        x, residual = self.pre_feedforward_layernorm(x, residual)
        x = self.post_feedforward_layernorm(self.mlp(x, **of_mlp))
        return x, residual


class Gemma2(CausalLM):
    """Gemma 2 with a language-model head. `Gemma2.from_hub("google/gemma-2-2b")` loads one."""

    config_class: ClassVar[type[ModelConfig]] = Gemma2Config
    block_class: ClassVar[type[nn.Module]] = Gemma2Block

    @classmethod
    def make_model(cls, config: ModelConfig) -> Decoder:
        return Decoder(config, cls.block_class, norm=NORM, embedding_scale=config.hidden_size**0.5)
