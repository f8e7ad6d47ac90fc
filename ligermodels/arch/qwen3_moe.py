"""Qwen3-MoE (30B-A3B, 235B-A22B) and its fine-tunes: Qwen3 with small experts in place of the MLPs.

- A router picks `num_experts_per_tok` of `num_experts` experts a token, each a gated MLP of `moe_intermediate_size`.
  Their weights are the softmax over all experts in fp32, made to sum to 1 where `norm_topk_prob` is set, as in all
  released files; it is false where the file does not say.
- Blocks in `mlp_only_layers`, and with `decoder_sparse_step` n all but each n-th, have a gated MLP of
  `intermediate_size` instead. Released files have experts in every block.
- With `use_sliding_window` every block has the window: unlike Qwen3, nothing reads `max_window_layers`.
- `head_dim` is 128 in released files, and hidden_size / num_attention_heads where the file does not say.
- On disk an expert is three tensors, as in all released files; in memory, and in what some trainers write, all experts
  share two stacked ones. Both layouts load, the first is saved.
- transformers 5 writes the number of experts as `num_local_experts`, 4 as `num_experts`. Both are read, the second is
  written, which either reads.
- `output_router_logits` adds the load-balancing loss, over the routers of all blocks that have one together.

Paper: Qwen Team 2025, https://arxiv.org/abs/2505.09388.
Checked against: models/qwen3_moe/modeling_qwen3_moe.py of transformers 5.24.
"""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.arch.base import CausalLM
from ligermodels.arch.block import RoutedBlock, attention, by_expert, gated_mlp, mixture
from ligermodels.arch.config import RoutedConfig, WindowConfig


@dataclass(kw_only=True)
class Qwen3MoeConfig(RoutedConfig, WindowConfig):
    """config.json of model_type qwen3_moe."""

    model_type: ClassVar[str] = "qwen3_moe"
    architecture: ClassVar[str] = "Qwen3MoeForCausalLM"
    aliases: ClassVar = {"num_local_experts": "num_experts"}
    unused: ClassVar = frozenset({"max_window_layers"})

    num_key_value_heads: int = 4
    intermediate_size: int = None  # type: ignore[assignment]  # only blocks without experts need it
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    num_experts: int = 128  # type: ignore[assignment]  # a property in other families
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False
    mlp_only_layers: list[int] = None  # type: ignore[assignment]  # absent or null: none
    decoder_sparse_step: int = 1

    def __post_init__(self) -> None:
        if not self.use_sliding_window:
            self.sliding_window = None
        super().__post_init__()
        self.mlp_only_layers = self.mlp_only_layers or []

    def has_experts(self, layer: int) -> bool:
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


class Qwen3MoeBlock(RoutedBlock):
    """Attention with normed queries and keys, and experts or a gated MLP, each on the normed residual stream."""

    def __init__(self, config: Qwen3MoeConfig, layer: int):
        biases = dict(qkv_bias=config.attention_bias, o_bias=config.attention_bias)
        self_attn = attention(config, layer, qk_norm=dict(eps=config.rms_norm_eps), **biases)
        routing = dict(normalize=config.norm_topk_prob, experts_first=True)
        experts = dict(intermediate_size=config.moe_intermediate_size, **routing)
        mlp = mixture(config, **experts) if config.has_experts(layer) else gated_mlp(config)
        super().__init__(config, self_attn, mlp)


class Qwen3Moe(CausalLM):
    """Qwen3-MoE with a language-model head. `Qwen3Moe.from_hub("Qwen/Qwen3-30B-A3B")` loads one."""

    config_class = Qwen3MoeConfig
    block_class = Qwen3MoeBlock

    DISK_NAMES: ClassVar = by_expert()
    OTHER_LAYOUTS = ({},)
