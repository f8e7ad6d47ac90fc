"""Phi-3, Phi-3.5, phi-4, Phi-4-mini and their fine-tunes: Llama with its projections packed on disk as in memory.

- q, k and v are rows of one tensor on disk, gate and up of another (gate first). Nothing has a bias.
- Long contexts by LongRoPE: one table of frequencies up to `original_max_position_embeddings` tokens, another beyond,
  chosen for the whole call; cos and sin are scaled in either. Generation that crosses the length runs the text again.
  Early files call it "su" or "yarn".
- Phi-4-mini rotates the first 96 of a head's 128 dims (`partial_rotary_factor`).
- Every query sees the last `sliding_window` tokens, itself included (4k models: 2047).

Paper: Abdin et al. 2024, https://arxiv.org/abs/2404.14219; https://arxiv.org/abs/2412.08905.
Checked against: models/phi3/modeling_phi3.py of transformers 5.23.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from ligermodels.arch.base import CausalLM
from ligermodels.arch.config import ACTIVATIONS, ModelConfig
from ligermodels.errors import ConfigError
from ligermodels.layers import (
    Attention,
    Batch,
    GatedMLP,
    RMSNorm,
)
from ligermodels.layers.cache import LayerCache

_LONGROPE = ("short_factor", "long_factor", "factor", "attention_factor")


@dataclass(kw_only=True)
class Phi3Config(ModelConfig):
    """config.json of model_type phi3."""

    model_type: ClassVar[str] = "phi3"
    architecture: ClassVar[str] = "Phi3ForCausalLM"
    partial_rotary: ClassVar[bool] = True
    rope_aliases: ClassVar = {"su": "longrope", "yarn": "longrope"}
    unused: ClassVar[frozenset[str]] = frozenset(
        {"attention_bias", "mlp_bias", "lm_head_bias", "full_attn_mod", "interpolate_factor"}
    )

    max_position_embeddings: int = 4096
    original_max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None
    resid_pdrop: float = 0.0
    embd_pdrop: float = 0.0

    @classmethod
    def _rope_from_hf(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        rope, name = super()._rope_from_hf(config), "original_max_position_embeddings"
        length = config.get(name, cls.original_max_position_embeddings)
        for nested in (config.get("rope_scaling") or {}, config.get("rope_parameters") or {}):
            if nested.get(name, length) != length:
                raise ConfigError(
                    f"phi3: the rope dict of config.json has {name}={nested[name]!r}, but the top level, which counts, "
                    f"has {config.get(name, f'none, which means {length}')}; write the right one there"
                )
        return rope

    def __post_init__(self) -> None:
        super().__post_init__()
        rope = self.rope_parameters = {"partial_rotary_factor": 1.0, **self.rope_parameters}
        if rope["rope_type"] not in ("default", "longrope"):
            raise ConfigError(f"phi3: rope_type {rope['rope_type']!r} is not supported; supported: default, longrope")
        partial = rope["partial_rotary_factor"]
        if isinstance(partial, bool) or not isinstance(partial, int | float) or not 0 < partial <= 1:
            raise ConfigError(f"phi3: partial_rotary_factor is {partial!r}, expected a number above 0 and at most 1")
        if rope["rope_type"] == "longrope":
            rope["original_max_position_embeddings"] = self.original_max_position_embeddings

    def to_hf(self) -> dict[str, Any]:
        config = super().to_hf()
        if scaling := config["rope_scaling"]:
            # transformers 5 reads this dict first; 4 takes `type` and the two lists and refuses more, so what adds
            # nothing to them stays out. The length is read at the top level only.
            kept = {key: scaling[key] for key in _LONGROPE if scaling.get(key) is not None}
            if kept.get("factor") == self.max_position_embeddings / self.original_max_position_embeddings:
                del kept["factor"]
            config["rope_scaling"] = {"type": "longrope", **kept}
        return config

    def window(self, layer: int) -> int | None:
        return self.sliding_window


class Phi3Block(nn.Module):
    """Attention and gated MLP, each on the normed residual stream."""

    last_mlp = "mlp"  # see recompute.py

    def __init__(self, config: Phi3Config, layer: int):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(
            size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            window=config.window(layer),
            projections=("qkv_proj", "o_proj"),
        )
        # After o_proj, as transformers has it: the state of an optimizer goes by the order of the parameters.
        self.self_attn.qkv_proj = self.self_attn._modules.pop("qkv_proj")  # type: ignore[assignment]
        self.mlp = GatedMLP(
            size,
            config.intermediate_size,
            activation=ACTIVATIONS[config.hidden_act],
            projections=("gate_up_proj", "down_proj"),
        )
        self.input_layernorm = RMSNorm(size, eps=eps)
        self.post_attention_layernorm = RMSNorm(size, eps=eps)

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch, cache: LayerCache | None = None
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, batch, cache)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class Phi3(CausalLM):
    """Phi-3 with a language-model head. `Phi3.from_hub("microsoft/Phi-4-mini-instruct")` loads one."""

    config_class = Phi3Config
    config: Phi3Config
    block_class = Phi3Block
    _no_split_modules: ClassVar = ["Phi3Block"]
