"""Mixtral (8x7B, 8x22B) and fine-tunes: Mistral with eight gated MLPs a block, of which each token takes two.

- A router picks `num_experts_per_tok` experts a token: softmax over all in fp32, the largest, made to sum to 1.
- On disk an expert is three tensors, w1 (gate), w3 (up) and w2 (down). In memory all experts share two stacked
  tensors, under transformers 5's names. Both layouts load, since trainers write the second; the first is saved.
- `output_router_logits` adds the load-balancing loss, over the routers of all blocks together.
- `router_jitter_noise` scales a block's input by 1 +- noise in training, for router and experts alike.
- rope_theta is 1e6 where the file says nothing; no released file has a window.

Paper: Jiang et al. 2024, https://arxiv.org/abs/2401.04088.
Checked against: models/mixtral/modeling_mixtral.py of transformers 5.23.
"""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.arch.base import CausalLM
from ligermodels.arch.block import RoutedBlock, attention, mixture
from ligermodels.arch.config import RoutedConfig, WindowConfig


@dataclass(kw_only=True)
class MixtralConfig(RoutedConfig, WindowConfig):
    """config.json of model_type mixtral."""

    model_type: ClassVar[str] = "mixtral"
    architecture: ClassVar[str] = "MixtralForCausalLM"
    default_rope_theta: ClassVar[float] = 1e6

    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    num_local_experts: int = 8
    router_jitter_noise: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.router_jitter_noise < 1:
            raise self._error("router_jitter_noise", "must be below 1: it scales activations by 1 +- noise")

    @property
    def num_experts(self) -> int:
        return self.num_local_experts


class MixtralBlock(RoutedBlock):
    """Attention and a mixture of gated MLPs, each on the normed residual stream."""

    def __init__(self, config: MixtralConfig, layer: int):
        experts = mixture(config, jitter_noise=config.router_jitter_noise)
        super().__init__(config, attention(config, layer), experts)


class Mixtral(CausalLM):
    """Mixtral with a language-model head. `Mixtral.from_hub("mistralai/Mixtral-8x7B-v0.1")` loads one."""

    config_class = MixtralConfig
    block_class = MixtralBlock

    DISK_NAMES: ClassVar = {
        "model.layers.{i}.mlp.gate.weight": "model.layers.{i}.block_sparse_moe.gate.weight",
        "model.layers.{i}.mlp.experts.gate_up_proj": (
            "model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight",
            "model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight",
        ),
        "model.layers.{i}.mlp.experts.down_proj": "model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight",
    }
    OTHER_LAYOUTS = ({},)
