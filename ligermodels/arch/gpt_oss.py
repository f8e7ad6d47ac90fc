"""gpt-oss (20B, 120B) and fine-tunes: attention with sinks, every other block on a window, and experts with biases.

- A sink is a learned logit of each query head, `self_attn.sinks`. It takes part in the softmax, neither scaled nor
  masked, and its probability goes to no value: a row may give nearly all of its weight away.
- Blocks 0, 2, 4, ... see a window of `sliding_window` tokens, the others everything, unless `layer_types` says
  otherwise.
- q, k, v and the output have biases, and so do the router, `mlp.router`, and both matrices of each expert.
- The router's `num_experts_per_tok` largest logits are chosen, and their softmax weighs the experts.
- An expert computes (up + 1) * gate * sigmoid(alpha * gate), with gate first limited from above and up on both sides,
  by `swiglu_limit`; alpha is `swiglu_alpha`. `hidden_act` is "silu" in the files and has no meaning.
- Norms multiply by their weight in fp32, before the result is rounded.
- YaRN from 4096 tokens by 32, with `truncate` false: the ends of its ramp are not rounded to whole frequencies. So it
  is too where a file has no rope settings, or null for them, as in transformers 5; 4 read null as no YaRN.
- On disk the experts' matrices are [E, in, out], and in gate_up_proj and its bias gate and up take turns: even columns
  are gate. In memory they are [E, out, in], all rows of gate before those of up.
- Released files have these matrices in MXFP4, as `*_blocks` and `*_scales` (checkpoint/mxfp4.py). transformers 5.23
  wrote dequantised ones under `*_blocks`; both are read.
- Released files carry `experts_per_token` and `initial_context_length`, which nothing reads.
- `output_router_logits` adds the load-balancing loss, over the routers of all blocks together.

Model card: OpenAI 2025, https://arxiv.org/abs/2508.10925.
Checked against: models/gpt_oss/modeling_gpt_oss.py of transformers 5.24, with eager attention and experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ligermodels.arch.base import CausalLM
from ligermodels.arch.block import RoutedBlock, attention, mixture
from ligermodels.arch.config import LayerTypesConfig, RoutedConfig
from ligermodels.arch.decoder import Decoder
from ligermodels.checkpoint.weights import Rearranged, Table, to_halves
from ligermodels.layers import ClampedSwiGLU

NORM: dict[str, Any] = dict(cast_before_weight=False)
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
"""The rope of a config.json that has no settings of one."""
EXPERTS = "model.layers.{i}.mlp.experts."


@dataclass(kw_only=True)
class GptOssConfig(RoutedConfig, LayerTypesConfig):
    """config.json of model_type gpt_oss."""

    model_type: ClassVar[str] = "gpt_oss"
    architecture: ClassVar[str] = "GptOssForCausalLM"
    default_rope_theta: ClassVar[float] = 150000.0
    aliases: ClassVar = {"num_experts": "num_local_experts"}
    unused: ClassVar = frozenset({"experts_per_token", "initial_context_length"})

    num_key_value_heads: int = 8
    head_dim: int = 64
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    attention_bias: bool = True
    sliding_window: int | None = 128
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    @classmethod
    def _rope_from_hf(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        has_settings = config.get("rope_parameters") or config.get("rope_scaling")
        return super()._rope_from_hf(config if has_settings else {**config, "rope_parameters": YARN})

    def default_layer_type(self, layer: int) -> str:
        return "full_attention" if layer % 2 else "sliding_attention"

    @property
    def num_experts(self) -> int:
        return self.num_local_experts


def disk_names(ending: str = "") -> Table:
    """The table. ending: of the names of both matrices; that of 5.23 for what it dequantised from MXFP4."""
    halves: dict[str, Any] = dict(order=lambda rows, config: to_halves(rows, 1), dim=1)
    return {
        EXPERTS + "gate_up_proj": Rearranged(EXPERTS + "gate_up_proj" + ending, transposed=True, **halves),
        EXPERTS + "gate_up_proj_bias": Rearranged(EXPERTS + "gate_up_proj_bias", **halves),
        EXPERTS + "down_proj": Rearranged(EXPERTS + "down_proj" + ending, transposed=True),
    }


class GptOssBlock(RoutedBlock):
    """Attention with sinks, and experts, each on the normed residual stream."""

    def __init__(self, config: GptOssConfig, layer: int):
        biases = dict(qkv_bias=config.attention_bias, o_bias=config.attention_bias)
        unit = ClampedSwiGLU(config.swiglu_alpha, config.swiglu_limit)
        experts = mixture(config, activation=unit, bias=True, router_name="router")
        super().__init__(config, attention(config, layer, sinks=True, **biases), experts, **NORM)


class GptOss(CausalLM):
    """gpt-oss with a language-model head. `GptOss.from_hub("openai/gpt-oss-20b")` loads one."""

    config_class = GptOssConfig
    block_class = GptOssBlock

    DISK_NAMES: ClassVar = disk_names()
    OTHER_LAYOUTS: ClassVar = (disk_names("_blocks"),)

    @classmethod
    def make_model(cls, config: GptOssConfig) -> Decoder:  # type: ignore[override]
        return Decoder(config, cls.block_class, norm=NORM)
