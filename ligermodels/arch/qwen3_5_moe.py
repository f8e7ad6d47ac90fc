"""Qwen3.5 and 3.6 with experts (35B-A3B, 122B-A10B, 397B-A17B), without images: Qwen3.5 with a mixture in every block.

- A router picks `num_experts_per_tok` of `num_experts` experts a token, each a gated MLP of `moe_intermediate_size`.
  Their weights, of the softmax over all experts in fp32, always sum to 1.
- Every token also passes `shared_expert`, a gated MLP of `shared_expert_intermediate_size`, whose output is multiplied
  by sigmoid(shared_expert_gate(x)), one number a token, and added.
- On disk the experts of a block share two tensors, as in memory, also in `mtp.*`; transformers 5 writes three for each
  expert. Both load, under either of the prefixes that qwen3_5.py reads; the first is saved.
- `output_router_logits` adds the load-balancing loss, over the routers of all blocks together, not that of `mtp.*`.

Not seen in a released file, and refused: `norm_topk_prob` false, `decoder_sparse_step` other than 1.

Source: https://github.com/QwenLM/Qwen3 (Qwen3.5).
Checked against: models/qwen3_5_moe/modeling_qwen3_5_moe.py of transformers 5.24.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ligermodels.arch.block import Routed, by_expert, mixture
from ligermodels.arch.config import RoutedConfig
from ligermodels.arch.qwen3_5 import WITH_IMAGES, Qwen3_5, Qwen3_5Block, Qwen3_5Config

BLOCK_WITH_IMAGES = "model.language_model.layers.{i}."
"""A block in files of models that also read images."""
MTP_BY_EXPERT = by_expert("mtp.layers.{i}.")


@dataclass(kw_only=True)
class Qwen3_5MoeConfig(Qwen3_5Config, RoutedConfig):
    """config.json of model_type qwen3_5_moe_text, or the text_config of one of model_type qwen3_5_moe."""

    model_type: ClassVar[str] = "qwen3_5_moe_text"
    architecture: ClassVar[str] = "Qwen3_5MoeForCausalLM"
    fixed: ClassVar[Mapping[str, Any]] = {**Qwen3_5Config.fixed, "norm_topk_prob": True, "decoder_sparse_step": 1}
    unused: ClassVar[frozenset[str]] = Qwen3_5Config.unused | fixed.keys()

    intermediate_size: int = None  # type: ignore[assignment]  # no block has a dense MLP
    num_key_value_heads: int = 2
    num_experts: int = 256  # type: ignore[assignment]  # a property in other families
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512


class Qwen3_5MoeBlock(Routed, Qwen3_5Block):
    """A mixer, and experts beside a shared one, each on the normed residual stream."""

    def make_mlp(self, config: Qwen3_5MoeConfig, layer: int) -> nn.Module:
        shared = dict(shared_size=config.shared_expert_intermediate_size, shared_gate=True)
        return mixture(config, intermediate_size=config.moe_intermediate_size, **shared)


class Qwen3_5Moe(Qwen3_5):
    """Qwen3.5 with experts and a language-model head. `Qwen3_5Moe.from_hub("Qwen/Qwen3.5-35B-A3B")` loads one."""

    config_class = Qwen3_5MoeConfig
    block_class = Qwen3_5MoeBlock
    OTHER_LAYOUTS = (
        WITH_IMAGES,
        {**by_expert(), **MTP_BY_EXPERT},
        {**by_expert(on_disk=BLOCK_WITH_IMAGES), **MTP_BY_EXPERT, **WITH_IMAGES},
    )
