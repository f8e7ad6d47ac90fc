"""Qwen3-Next (80B-A3B), Qwen3-Coder-Next and fine-tunes: Qwen3.5's mixers, and small experts in place of the MLPs.

- The block is Qwen3.5's: three of four have a Gated DeltaNet, and the norms act as 1 + weight.
- A router picks `num_experts_per_tok` of `num_experts` experts a token, by the softmax over all of them in fp32; their
  weights are made to sum to 1 unless `norm_topk_prob` is false. Every token also passes `shared_expert`, a gated MLP,
  whose output is multiplied by sigmoid(shared_expert_gate(x)).
- Which blocks have a gated MLP of `intermediate_size` instead is as in Qwen3-MoE; in released files none has.
- The Gated DeltaNet has two projections. On disk their rows are grouped by key head, in_proj_qkvz as q, k, v and z of
  each and in_proj_ba as b and a; in memory all rows of q come first, then all of k, and so on. So they come back to the
  bit, and an adapter's file has them as on disk.
- Experts are on disk as in Qwen3-MoE, three tensors each or stacked, and so are those of `mtp.*`, a layer for
  multi-token prediction as that of Qwen3.5.
- `output_router_logits` adds the load-balancing loss.

Source: https://github.com/QwenLM/Qwen3 (Qwen3-Next); Yang et al. 2024, https://arxiv.org/abs/2412.06464.
Checked against: models/qwen3_next/modeling_qwen3_next.py of transformers 5.24; qwen3_next_mtp.py of vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ligermodels.arch.block import Routed, by_expert, gated_mlp, mixture
from ligermodels.arch.config import ModelConfig, RoutedConfig
from ligermodels.arch.decoder import Decoder
from ligermodels.arch.gemma import NORM
from ligermodels.arch.qwen3_5 import PredictsTokens, Qwen3_5Block, Qwen3_5Config
from ligermodels.checkpoint.weights import Rearranged


@dataclass(kw_only=True)
class Qwen3NextConfig(Qwen3_5Config, RoutedConfig):
    """config.json of model_type qwen3_next."""

    model_type: ClassVar[str] = "qwen3_next"
    architecture: ClassVar[str] = "Qwen3NextForCausalLM"
    fixed: ClassVar[Mapping[str, Any]] = {"use_sliding_window": False}
    unused: ClassVar = frozenset({"use_sliding_window"})

    num_key_value_heads: int = 2
    num_experts: int = 512  # type: ignore[assignment]  # a property in other families
    num_experts_per_tok: int = 10
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    norm_topk_prob: bool = True
    mlp_only_layers: list[int] = None  # type: ignore[assignment]  # absent or null: none
    decoder_sparse_step: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mlp_only_layers = self.mlp_only_layers or []

    def has_experts(self, layer: int) -> bool:
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


class Qwen3NextBlock(Routed, Qwen3_5Block):
    """A mixer and experts, or a gated MLP, each on the normed residual stream."""

    joined = True

    def make_mlp(self, config: Qwen3NextConfig, layer: int) -> nn.Module:
        if not config.has_experts(layer):
            return gated_mlp(config)
        shared = dict(shared_size=config.shared_expert_intermediate_size, shared_gate=True)
        routing = dict(normalize=config.norm_topk_prob)
        return mixture(config, intermediate_size=config.moe_intermediate_size, **routing, **shared)


def by_part(rows: Tensor, config: Qwen3NextConfig, sizes: list[int]) -> Tensor:
    """Rows that are grouped by key head, each with parts of these sizes, as all rows of each part in turn."""
    groups = rows.view(config.linear_num_key_heads, -1)
    return torch.cat([part.flatten() for part in groups.split(sizes, 1)])


def qkvz(rows: Tensor, config: Qwen3NextConfig) -> Tensor:
    """The order of in_proj_qkvz."""
    values = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
    return by_part(rows, config, 2 * [config.linear_key_head_dim] + 2 * [values])


def ba(rows: Tensor, config: Qwen3NextConfig) -> Tensor:
    """The order of in_proj_ba."""
    return by_part(rows, config, 2 * [config.linear_num_value_heads // config.linear_num_key_heads])


QKVZ, BA = (f"model.layers.{{i}}.linear_attn.in_proj_{parts}.weight" for parts in ("qkvz", "ba"))


class Qwen3Next(PredictsTokens):
    """Qwen3-Next with a language-model head. `Qwen3Next.from_hub("Qwen/Qwen3-Next-80B-A3B-Instruct")` loads one."""

    config_class = Qwen3NextConfig
    block_class = Qwen3NextBlock

    ROWS: ClassVar = {QKVZ: Rearranged(QKVZ, qkvz), BA: Rearranged(BA, ba)}
    DISK_NAMES: ClassVar = {**ROWS, **by_expert(), **by_expert("mtp.layers.{i}.")}
    OTHER_LAYOUTS = (ROWS,)

    @classmethod
    def make_model(cls, config: ModelConfig) -> Decoder:
        return Decoder(config, cls.block_class, norm=NORM)
