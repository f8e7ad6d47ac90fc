"""Phi-3, Phi-3.5, phi-4, Phi-4-mini and their fine-tunes: Llama with joint projections, on disk as in memory.

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

from ligermodels.arch.base import CausalLM
from ligermodels.arch.block import Block, attention, gated_mlp
from ligermodels.arch.config import WindowConfig
from ligermodels.errors import ConfigError

_LONGROPE = ("short_factor", "long_factor", "factor", "attention_factor")


@dataclass(kw_only=True)
class Phi3Config(WindowConfig):
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


class Phi3Block(Block):
    """Attention and gated MLP, each on the normed residual stream."""

    def __init__(self, config: Phi3Config, layer: int):
        self_attn = attention(config, layer, projections=("qkv_proj", "o_proj"))
        # After o_proj, as transformers has it: the state of an optimizer goes by the order of the parameters.
        self_attn.qkv_proj = self_attn._modules.pop("qkv_proj")  # type: ignore[assignment]
        super().__init__(config, self_attn, gated_mlp(config, projections=("gate_up_proj", "down_proj")))


class Phi3(CausalLM):
    """Phi-3 with a language-model head. `Phi3.from_hub("microsoft/Phi-4-mini-instruct")` loads one."""

    config_class = Phi3Config
    block_class = Phi3Block
