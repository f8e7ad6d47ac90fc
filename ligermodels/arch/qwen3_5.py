"""Qwen3.5, 3.6 and 3.8 without images, and fine-tunes: three of four blocks have linear attention of one state size.

- `layer_types` says which mixer a block has: `linear_attn`, a Gated DeltaNet, or `self_attn`; if absent, every
  `full_attention_interval`-th block, by default every fourth, has `self_attn`.
- Norm weights are stored around 0 and act as 1 + weight, as in Gemma; not so the norm inside `linear_attn`.
- q_proj gives each head a query and a gate: the head's output is multiplied by sigmoid(gate) before o_proj.
- Each head of q and of k is normed, and a quarter of its dims rotates (`partial_rotary_factor`, 0.25 if absent). The
  interleaved sections of M-RoPE are for images: the three positions of a text token are equal.
- The released files also have a vision tower, `model.visual.*`, which is neither read nor saved here; a warning says
  so. Their text is under `model.language_model.`.
- `mtp.*` is a layer for multi-token prediction, whose block has `self_attn`. Saving copies it from the checkpoint that
  the model came from; `training.load_mtp` reads it, to train it and to draft with it.

Not seen in a released file: `attn_output_gate` false, and `mlp_only_layers`; both are refused. So are, by `load_mtp`,
`mtp_num_hidden_layers` other than 1 and `mtp_use_dedicated_embeddings`.

Source: https://github.com/QwenLM/Qwen3 (Qwen3.5); Yang et al. 2024, https://arxiv.org/abs/2412.06464.
Checked against: models/qwen3_5/modeling_qwen3_5.py of transformers 5.23.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from ligermodels.arch.base import CausalLM
from ligermodels.arch.block import ResidualBlock, attention, gated_mlp
from ligermodels.arch.config import ModelConfig, TextAlone
from ligermodels.arch.decoder import Decoder
from ligermodels.arch.gemma import NORM
from ligermodels.checkpoint.weights import Table
from ligermodels.errors import ConfigError
from ligermodels.layers import Batch, GatedDeltaNet, MultiTokenPrediction, RMSNorm

WITH_IMAGES: Table = {"model.{rest}": "model.language_model.{rest}"}
"""The names in files of models that also read images."""
LAYER_TYPES = ("linear_attention", "full_attention")


@dataclass(kw_only=True)
class Qwen3_5Config(TextAlone, ModelConfig):
    """config.json of model_type qwen3_5_text, or the text_config of one of model_type qwen3_5."""

    model_type: ClassVar[str] = "qwen3_5_text"
    architecture: ClassVar[str] = "Qwen3_5ForCausalLM"
    partial_rotary: ClassVar[bool] = True
    left_out: ClassVar[str] = "the vision tower (model.visual.*)"
    fixed: ClassVar[Mapping[str, Any]] = {"attn_output_gate": True, "mlp_only_layers": []}
    """Keys of which one value alone was released."""
    unused: ClassVar[frozenset[str]] = frozenset({
        "attn_output_gate", "language_model_only", "mamba_ssm_dtype", "mlp_only_layers",
        "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
    })  # fmt: skip

    num_key_value_heads: int = 4
    head_dim: int = 256
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    layer_types: list[str] = None  # type: ignore[assignment]  # absent: by full_attention_interval
    full_attention_interval: int = 4
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32

    def __post_init__(self) -> None:
        blocks = self.num_hidden_layers
        self.rope_parameters = {"partial_rotary_factor": 0.25, **self.rope_parameters}
        super().__post_init__()
        if self.layer_types is None:
            interval = self.full_attention_interval
            self.layer_types = [LAYER_TYPES[(layer + 1) % interval == 0] for layer in range(blocks)]
        if len(self.layer_types) != blocks or any(kind not in LAYER_TYPES for kind in self.layer_types):
            raise self._error("layer_types", f"must name one of {', '.join(LAYER_TYPES)} for each of {blocks} blocks")
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise self._error("linear_num_value_heads", f"must be a multiple of {self.linear_num_key_heads} key heads")
        self._check_choice("hidden_act", ("silu", "swish"))
        for name, expected in self.fixed.items():
            if (value := self.extra.get(name, expected)) != expected:
                raise ConfigError(f"{self.model_type}: {name}={value!r} is not supported; supported: {expected!r}")


class Qwen3_5Block(ResidualBlock):
    """A mixer and a gated MLP, each on the normed residual stream."""

    last_mlp: ClassVar[str | None] = "mlp"  # see recompute.py
    joined: ClassVar[bool] = False  # see GatedDeltaNet

    def __init__(self, config: Qwen3_5Config, layer: int):
        super().__init__()
        norm: dict[str, Any] = dict(eps=config.rms_norm_eps, **NORM)
        if config.layer_types[layer] == "linear_attention":
            self.mixer_name = "linear_attn"
            self.linear_attn = GatedDeltaNet(
                config.hidden_size,
                num_key_heads=config.linear_num_key_heads,
                num_value_heads=config.linear_num_value_heads,
                key_head_dim=config.linear_key_head_dim,
                value_head_dim=config.linear_value_head_dim,
                conv_size=config.linear_conv_kernel_dim,
                eps=config.rms_norm_eps,
                joined=self.joined,
            )
        else:
            self.mixer_name = "self_attn"
            biases = dict(qkv_bias=config.attention_bias, o_bias=config.attention_bias)
            self.self_attn = attention(config, layer, qk_norm=norm, output_gate=True, **biases)
        self.mlp = self.make_mlp(config, layer)
        self.input_layernorm = RMSNorm(config.hidden_size, **norm)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, **norm)

    def make_mlp(self, config: Any, layer: int) -> nn.Module:
        return gated_mlp(config)

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch, cache: Any = None, **of_mlp: Any
    ) -> tuple[Any, ...]:
        x, residual = self.input_layernorm(x, residual)
        x = self._modules[self.mixer_name](x, batch, cache)  # type: ignore[misc]
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x, **of_mlp), residual


class PredictsTokens(CausalLM):
    """A base of models whose checkpoints have the layer `mtp.*`: one block with `self_attn`."""

    block_class: ClassVar[type[nn.Module]] = Qwen3_5Block
    COPIED_ON_SAVE = (r"^mtp\.",)

    @classmethod
    def make_mtp(cls, config: Qwen3_5Config) -> MultiTokenPrediction:
        """The layer `mtp.*`, uninitialised. Raises ConfigError for one that was never released."""
        for name, expected in (("mtp_num_hidden_layers", 1), ("mtp_use_dedicated_embeddings", False)):
            if (value := config.extra.get(name, expected)) != expected:
                raise ConfigError(f"{config.model_type}: {name}={value!r} is not supported; supported: {expected!r}")
        block = cls.block_class(dataclasses.replace(config, num_hidden_layers=1, layer_types=["full_attention"]), 0)
        return MultiTokenPrediction(config.hidden_size, [block], dict(eps=config.rms_norm_eps, **NORM))


class Qwen3_5(PredictsTokens):
    """Qwen3.5 with a language-model head. `Qwen3_5.from_hub("Qwen/Qwen3.5-0.8B")` loads one."""

    config_class: ClassVar[type[ModelConfig]] = Qwen3_5Config
    OTHER_LAYOUTS: ClassVar[tuple[Table, ...]] = (WITH_IMAGES,)
    IGNORE = (*CausalLM.IGNORE, r"^model\.visual\.")

    @classmethod
    def make_model(cls, config: ModelConfig) -> Decoder:
        return Decoder(config, cls.block_class, norm=NORM)
