"""Gemma 3 without images (270M, 1B, and the text of 4B, 12B, 27B) and fine-tunes: Gemma 2 with five windows to one.

- Each head of q and of k is normed before it rotates, in place of Gemma 2's caps.
- Every sixth block (`sliding_window_pattern`) sees everything, the others a window of `sliding_window` tokens.
- Two ropes: that of the full blocks has theta 1e6 and may be scaled (4B and larger: linear, by 8), that of the sliding
  ones has theta 1e4. In older files they are rope_theta, rope_scaling and rope_local_base_freq, or absent.
- A file holds only what differs from the defaults, in the larger models not even the number of heads.
- As in Gemma 2: four norms whose weights are around 0, query_pre_attn_scalar, the embedding's rounded scale, GELU by
  tanh, a tied head.

`attn_logit_softcapping` is null in all released files, and refused otherwise: transformers reads it and caps nothing.

Paper: Gemma Team 2025, https://arxiv.org/abs/2503.19786.
Checked against: models/gemma3/modeling_gemma3.py of transformers 5.24.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ligermodels.arch.base import CausalLM
from ligermodels.arch.config import TextAlone
from ligermodels.arch.gemma2 import NORM, Gemma2, Gemma2Block, Gemma2Config
from ligermodels.checkpoint.weights import Table

WITH_IMAGES: tuple[Table, ...] = tuple(
    {"model.{rest}": prefix + ".{rest}"} for prefix in ("language_model.model", "model.language_model")
)
"""The names in files of models that also read images: released ones, and those of transformers 5."""


@dataclass(kw_only=True)
class Gemma3Config(TextAlone, Gemma2Config):
    """config.json of model_type gemma3_text, or the text_config of one of model_type gemma3."""

    model_type: ClassVar[str] = "gemma3_text"
    architecture: ClassVar[str] = "Gemma3ForCausalLM"
    left_out: ClassVar[str] = "the vision tower, with the projector,"
    dropped: ClassVar[frozenset[str]] = frozenset({"_sliding_window_pattern", "rope_local_base_freq"})
    default_ropes: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }

    vocab_size: int = 262208
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    max_position_embeddings: int = 131072
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    sliding_window_pattern: int = 6
    use_bidirectional_attention: bool | None = False
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 1
    pad_token_id: int | None = 0

    def default_layer_type(self, layer: int) -> str:
        return "sliding_attention" if (layer + 1) % self.sliding_window_pattern else "full_attention"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attn_logit_softcapping is not None:
            raise self._error("attn_logit_softcapping", "is not supported: Gemma 3 caps no scores; set it to null")

    def to_hf(self) -> dict[str, Any]:
        """The contents of a config.json for both generations of transformers."""
        full, sliding = self.ropes["full"], self.ropes["sliding"]
        older = {"rope_theta": full["rope_theta"], "rope_local_base_freq": sliding["rope_theta"]}
        if full["rope_type"] != "default":
            older["rope_scaling"] = {key: value for key, value in full.items() if key != "rope_theta"}
        return super().to_hf() | older


class Gemma3Block(Gemma2Block):
    """Attention with normed q and k, and gated MLP, each between two norms."""

    def __init__(self, config: Gemma3Config, layer: int):
        super().__init__(config, layer, qk_norm=dict(eps=config.rms_norm_eps, **NORM))


class Gemma3(Gemma2):
    """Gemma 3 with a language-model head. `Gemma3.from_hub("google/gemma-3-1b-it")` loads one."""

    config_class = Gemma3Config
    block_class = Gemma3Block
    OTHER_LAYOUTS = WITH_IMAGES
    IGNORE = (*CausalLM.IGNORE, *(rf"^(model\.)?{name}\." for name in ("vision_tower", "multi_modal_projector")))
