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
class Qwen2Config(ModelConfig):
    """config.json of model_type qwen2."""

    model_type: ClassVar[str] = "qwen2"
    architecture: ClassVar[str] = "Qwen2ForCausalLM"

    num_key_value_heads: int = 32
    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] = None  # type: ignore[assignment]  # absent: from the three fields above

    def __post_init__(self) -> None:
        if not self.use_sliding_window:
            self.sliding_window = None
        super().__post_init__()
        if self.layer_types is None:
            first = self.num_hidden_layers if self.sliding_window is None else self.max_window_layers
            self.layer_types = [
                "sliding_attention" if layer >= first else "full_attention" for layer in range(self.num_hidden_layers)
            ]
        self._check_layer_types(self.layer_types)
        if self.sliding_window is None and "sliding_attention" in self.layer_types:
            raise self._error(
                "layer_types",
                "names sliding_attention, and there is no window: use_sliding_window is false or sliding_window is "
                "null. Set both, or name full_attention everywhere.",
            )

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None


class Qwen2Block(nn.Module):
    """Attention and gated MLP, each on the normed residual stream."""

    last_mlp = "mlp"  # see recompute.py

    def __init__(self, config: Qwen2Config, layer: int):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(
            size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            qkv_bias=True,
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


class Qwen2(CausalLM):
    """Qwen2 with a language-model head. `Qwen2.from_hub("Qwen/Qwen2.5-7B")` loads one."""

    config_class = Qwen2Config
    config: Qwen2Config
    block_class = Qwen2Block
    _no_split_modules: ClassVar = ["Qwen2Block"]
