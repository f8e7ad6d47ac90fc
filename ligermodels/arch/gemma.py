"""Gemma 1 (2B, 7B, CodeGemma) and fine-tunes: Llama with a large GELU MLP and a scaled embedding.

- Norm weights are stored around 0 and act as 1 + weight; the whole norm is fp32, with one rounding at its end.
- Embeddings are multiplied by sqrt(hidden_size), rounded to the weights' dtype (bf16: 55.5 for 3072). The head is
  tied to the unscaled table unless config.json says otherwise. `inputs_embeds` are taken as scaled already.
- The activation is GELU by tanh, also where config.json says "gelu", as the released files do.
- `head_dim` is 256 whatever hidden_size is: in the 7B, 16 heads have 4096 dims and hidden_size is 3072.

Paper: Gemma Team 2024, https://arxiv.org/abs/2403.08295.
Checked against: models/gemma/modeling_gemma.py of transformers 5.23.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from ligermodels.arch.base import CausalLM
from ligermodels.arch.block import Block, attention, gated_mlp
from ligermodels.arch.config import ACTIVATIONS, ModelConfig
from ligermodels.arch.decoder import Decoder

NORM: dict[str, Any] = dict(offset=1.0, cast_before_weight=False)


@dataclass(kw_only=True)
class GemmaConfig(ModelConfig):
    """config.json of model_type gemma."""

    model_type: ClassVar[str] = "gemma"
    architecture: ClassVar[str] = "GemmaForCausalLM"

    num_key_value_heads: int = 16
    head_dim: int = 256
    hidden_act: str = "gelu_pytorch_tanh"
    hidden_activation: str | None = None  # takes precedence over hidden_act
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    use_bidirectional_attention: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.use_bidirectional_attention:
            raise self._error("use_bidirectional_attention", "is not supported: this is a causal language model")
        if self.hidden_activation is not None:
            self._check_choice("hidden_activation", ACTIVATIONS)
        # Written under both names: some readers know hidden_act only, some hidden_activation only.
        name = self.hidden_activation or self.hidden_act
        self.hidden_act = self.hidden_activation = "gelu_pytorch_tanh" if name == "gelu" else name


class GemmaBlock(Block):
    """Attention and gated MLP, each on the normed residual stream."""

    def __init__(self, config: GemmaConfig, layer: int):
        self_attn = attention(config, layer, qkv_bias=config.attention_bias, o_bias=config.attention_bias)
        super().__init__(config, self_attn, gated_mlp(config), **NORM)


class Gemma(CausalLM):
    """Gemma with a language-model head. `Gemma.from_hub("google/gemma-2b")` loads one."""

    config_class = GemmaConfig
    block_class = GemmaBlock

    @classmethod
    def make_model(cls, config: ModelConfig) -> Decoder:
        return Decoder(config, cls.block_class, norm=NORM, embedding_scale=config.hidden_size**0.5)
