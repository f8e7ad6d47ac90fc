"""Qwen3-VL with experts (30B-A3B, 235B-A22B): Qwen3-VL on the blocks of Qwen3-MoE.

- The tower, DeepStack and positions are Qwen3-VL's; the text is Qwen3-MoE's, whose experts' weights always sum to 1.
- On disk the experts of a block share two tensors, which are transposed in released files: gate_up_proj [E, H, 2 I] and
  down_proj [E, I, H]. What transformers 5 writes has them as they are in memory, [E, 2 I, H] and [E, H, I]. Both load,
  and so do three tensors for each expert; the first is saved.
- With H = 2 I, or with H = I, transformers 5 takes one of the two transposed tensors for one that is not; here both
  tensors say which layout it is.

Paper: Qwen Team 2025, https://arxiv.org/abs/2511.21631.
Checked against: models/qwen3_vl_moe/modeling_qwen3_vl_moe.py of transformers 4.57 and 5.24.
"""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.arch.block import by_expert
from ligermodels.arch.qwen3_moe import Qwen3MoeBlock, Qwen3MoeConfig
from ligermodels.arch.qwen3_vl import Qwen3VL, Qwen3VLImages
from ligermodels.checkpoint.weights import Rearranged

BLOCK = "model.language_model.layers.{i}."


@dataclass(kw_only=True)
class Qwen3VLMoeConfig(Qwen3VLImages, Qwen3MoeConfig):
    """config.json of model_type qwen3_vl_moe."""

    model_type: ClassVar[str] = "qwen3_vl_moe"
    architecture: ClassVar[str] = "Qwen3VLMoeForConditionalGeneration"
    text_type: ClassVar[str] = "qwen3_vl_moe_text"

    num_key_value_heads: int = 16
    num_experts: int = 60  # type: ignore[assignment]  # a property in other families
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 1408
    norm_topk_prob: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.norm_topk_prob:
            raise self._error("norm_topk_prob", "is not supported; supported: true")


class Qwen3VLMoe(Qwen3VL):
    """Qwen3-VL-MoE with a language-model head. `Qwen3VLMoe.from_hub("Qwen/Qwen3-VL-30B-A3B-Instruct")` loads one."""

    config_class = Qwen3VLMoeConfig
    block_class = Qwen3MoeBlock
    _no_split_modules: ClassVar = ["Qwen3MoeBlock", "VisionBlock"]

    DISK_NAMES: ClassVar = {
        f"{BLOCK}mlp.experts.{weight}": Rearranged(f"{BLOCK}mlp.experts.{weight}", transposed=True)
        for weight in ("gate_up_proj", "down_proj")
    }
    OTHER_LAYOUTS = ({}, by_expert(BLOCK))
