"""GLM-4.5 (355B-A32B, Air 106B-A12B), 4.6, 4.7 and fine-tunes: Llama's attention, and experts by sigmoid scores.

- The first `first_k_dense_replace` blocks have a gated MLP of `intermediate_size`, the others experts of
  `moe_intermediate_size`, beside an MLP of `n_shared_experts` times that size, `shared_experts`, for every token.
- The router is DeepSeek-V3's, in fp32: sigmoid of each logit, plus e_score_correction_bias to choose the experts by;
  the weights are the scores without it, made to sum to 1 unless `norm_topk_prob` is false, times
  `routed_scaling_factor`. With `n_group` groups they come from the `topk_group` groups whose two best sum highest.
- The bias is a buffer: no gradient trains it. In memory and in what is saved it and the router's weight are in fp32.
- Half of a head's dims rotate (`partial_rotary_factor`, 0.5 if absent), as halves of that half, unlike in GLM-4.
- q, k and v have biases with `attention_bias`, and each head of q and of k a norm with `use_qk_norm`. `head_dim` is 128
  in released files, and hidden_size / num_attention_heads where the file does not say.
- On disk an expert is three tensors, as in all released files; stacked ones load too.
- The layer after the last, number 46 of Air and 92 of the others, is one for multi-token prediction. Saving copies it
  from the checkpoint that the model came from; `training.load_mtp` reads it, to train it and to draft with it. It has
  copies of the embedding and of the head, which are not read: the model's own stand for them.
- There is no load-balancing loss: `output_router_logits` adds the logits alone.

Paper: GLM-4.5 Team 2025, https://arxiv.org/abs/2508.06471.
Checked against: models/glm4_moe/modeling_glm4_moe.py and modeling_layers.py (MtpLayer) of transformers 5.24.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from ligermodels.arch.base import CausalLM
from ligermodels.arch.block import RoutedBlock, attention, by_expert, gated_mlp, mixture
from ligermodels.arch.config import RoutedConfig
from ligermodels.errors import ConfigError
from ligermodels.layers import MultiTokenPrediction

AHEAD = "model.layers.{layers}."
MTP_NAMES = {
    "mtp.fc.weight": AHEAD + "eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": AHEAD + "enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": AHEAD + "hnorm.weight",
    "mtp.norm.weight": AHEAD + "shared_head.norm.weight",
    "mtp.layers.{i}.{rest}": AHEAD + "{rest}",
}


@dataclass(kw_only=True)
class Glm4MoeConfig(RoutedConfig):
    """config.json of model_type glm4_moe."""

    model_type: ClassVar[str] = "glm4_moe"
    architecture: ClassVar[str] = "Glm4MoeForCausalLM"
    aliases: ClassVar = {"num_local_experts": "n_routed_experts"}
    unused: ClassVar = frozenset({"num_nextn_predict_layers"})
    partial_rotary: ClassVar[bool] = True
    router_aux_loss_coef: ClassVar = None  # type: ignore[assignment, misc]  # no field: there is no such loss

    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    use_qk_norm: bool = False
    first_k_dense_replace: int = 1
    moe_intermediate_size: int = 1408
    n_shared_experts: int = 1
    n_routed_experts: int = 128
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1

    def __post_init__(self) -> None:
        self.rope_parameters = {"partial_rotary_factor": 0.5, **self.rope_parameters}
        super().__post_init__()

    @property
    def num_experts(self) -> int:
        return self.n_routed_experts


class Glm4MoeBlock(RoutedBlock):
    """Attention, and experts with a shared one or a gated MLP, each on the normed residual stream."""

    def __init__(self, config: Glm4MoeConfig, layer: int):
        norm = dict(eps=config.rms_norm_eps) if config.use_qk_norm else None
        self_attn = attention(config, layer, qk_norm=norm, qkv_bias=config.attention_bias)
        has_experts = layer >= config.first_k_dense_replace
        super().__init__(config, self_attn, experts_and_shared(config) if has_experts else gated_mlp(config))


def experts_and_shared(config: Glm4MoeConfig) -> Any:
    """The experts of a block, with the shared one and the router."""
    size = config.moe_intermediate_size
    shared = dict(shared_size=size * config.n_shared_experts, shared_name="shared_experts")
    scores: dict[str, Any] = dict(score="sigmoid", correction_bias=True, fp32_router=True)
    weights = dict(normalize=config.norm_topk_prob, eps=1e-20, scale=config.routed_scaling_factor)
    groups = dict(groups=config.n_group, groups_kept=config.topk_group)
    return mixture(config, intermediate_size=size, experts_first=True, **shared, **scores, **weights, **groups)


class Glm4Moe(CausalLM):
    """GLM-4.5 with a language-model head. `Glm4Moe.from_hub("zai-org/GLM-4.5-Air")` loads one."""

    config_class = Glm4MoeConfig
    block_class = Glm4MoeBlock

    DISK_NAMES: ClassVar = {**by_expert(), **by_expert("mtp.layers.{i}.", AHEAD), **MTP_NAMES}
    OTHER_LAYOUTS = (MTP_NAMES,)
    IGNORE = (*CausalLM.IGNORE, r"^model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight$")
    COPIED_ON_SAVE = (r"^model\.layers\.{layers}\.",)

    @staticmethod
    def make_mtp(config: Glm4MoeConfig) -> MultiTokenPrediction:
        """The layer after the last, uninitialised. Raises ConfigError for several, which were never released."""
        if (count := config.extra.get("num_nextn_predict_layers", 1)) != 1:
            raise ConfigError(f"{config.model_type}: num_nextn_predict_layers={count!r} is not supported; supported: 1")
        block = Glm4MoeBlock(dataclasses.replace(config, first_k_dense_replace=0), 0)
        return MultiTokenPrediction(config.hidden_size, [block], dict(eps=config.rms_norm_eps))
