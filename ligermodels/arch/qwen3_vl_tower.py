"""The vision tower of Qwen3-VL and Qwen3.5: patches of images to the tokens that the text reads.

What differs from Qwen2-VL's:
- Patches of 16 x 16 pixels, whose embedding has a bias, and to which a learned position is added: a table of 48 x 48
  positions is stretched over the image, corner on corner, and read bilinearly, in fp32.
- Blocks with gelu (tanh). Heads have 64 or 72 dims.
- The merger norms patches before it joins 2 x 2.
- DeepStack: from the states after blocks `deepstack_visual_indexes` further mergers, which norm after joining, make
  what the text adds to its hidden state after its first blocks. Qwen3.5 has none.

Papers: Qwen Team 2025, https://arxiv.org/abs/2511.21631; Meng et al. 2024, https://arxiv.org/abs/2406.04334.
Checked against: models/qwen3_vl/modeling_qwen3_vl.py of transformers 5.23.
"""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from ligermodels.arch.config import VisionConfig
from ligermodels.arch.qwen_vl import VISION_ACTIVATIONS, VisionBlock, VisionTower, check_axial_rope
from ligermodels.layers import MLP, Embedding, LayerNorm, VisionRotary
from ligermodels.layers.multimodal import Grids, PatchEmbedding, resampled

PROJECTIONS = ("linear_fc1", "linear_fc2")


@dataclass(kw_only=True)
class Qwen3VLVisionConfig(VisionConfig):
    """vision_config of a config.json of model_type qwen3_vl; out_hidden_size is the width of the tower's output."""

    dropped: ClassVar = VisionConfig.dropped | {"initializer_range"}

    depth: int = 27
    hidden_size: int = 1152
    hidden_act: str = "gelu_pytorch_tanh"
    intermediate_size: int = 4304
    num_heads: int = 16
    in_channels: int = 3
    patch_size: int = 16
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    out_hidden_size: int = 3584
    num_position_embeddings: int = 2304
    deepstack_visual_indexes: list[int] = field(default_factory=lambda: [8, 16, 24])
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "axial", "rope_theta": 10000.0})

    @classmethod
    def label(cls) -> str:
        return "qwen3_vl: vision_config"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("hidden_act", VISION_ACTIVATIONS)
        if self.hidden_size % (4 * self.num_heads):
            raise self._error("hidden_size", f"must be a multiple of 4 for each of num_heads={self.num_heads} heads")
        if math.isqrt(self.num_position_embeddings) ** 2 != self.num_position_embeddings:
            raise self._error("num_position_embeddings", "must be a square: the table covers a square image")
        picked, blocks = self.deepstack_visual_indexes, self.depth
        if len({*picked}) < len(picked) or not all(type(i) is int and 0 <= i < blocks for i in picked):
            raise self._error("deepstack_visual_indexes", f"must be different blocks, 0 to {blocks - 1}")
        check_axial_rope(self.label(), self.rope_parameters)

    @property
    def token_size(self) -> int:
        return self.out_hidden_size


class PatchMerger(MLP):
    """States of merge x merge neighbours, [..., hidden_size] one after the other, -> one token [N, out_hidden_size].

    joined: the norm is over the joined patches, not over each.
    """

    def __init__(self, config: Qwen3VLVisionConfig, *, joined: bool):
        size = config.hidden_size * config.spatial_merge_size**2
        super().__init__(size, size, activation="gelu", out_features=config.out_hidden_size, projections=PROJECTIONS)
        self.size, self.normed_size = size, size if joined else config.hidden_size
        self.norm = LayerNorm(self.normed_size, eps=1e-6)
        self._modules = {"norm": self._modules.pop("norm"), **self._modules}  # the order of parameters in checkpoints

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        residual = None if residual is None else residual.reshape(-1, self.normed_size)
        x, _ = self.norm(x.reshape(-1, self.normed_size), residual)
        return super().forward(x.reshape(-1, self.size))


class Qwen3VLTower(VisionTower):
    """The vision tower, by its config."""

    def __init__(self, config: Qwen3VLVisionConfig):
        super().__init__(config.spatial_merge_size)
        size, heads, self.side = config.hidden_size, config.num_heads, math.isqrt(config.num_position_embeddings)
        kernel = (config.temporal_patch_size, config.patch_size, config.patch_size)
        mlp: Any = dict(activation=VISION_ACTIVATIONS[config.hidden_act], projections=PROJECTIONS)
        self.patch_embed = nn.ModuleDict({"proj": PatchEmbedding(config.in_channels, size, kernel, bias=True)})
        self.pos_embed = Embedding(config.num_position_embeddings, size)
        self.rotary_pos_emb = VisionRotary(size // heads, theta=config.rope_parameters["rope_theta"])
        self.blocks = nn.ModuleList(
            VisionBlock(size, config.intermediate_size, heads, **mlp) for _ in range(config.depth)
        )
        self.merger = PatchMerger(config, joined=False)
        self.deepstack_visual_indexes = config.deepstack_visual_indexes
        if config.deepstack_visual_indexes:
            mergers = [PatchMerger(config, joined=True) for _ in config.deepstack_visual_indexes]
            self.deepstack_merger_list = nn.ModuleList(mergers)

    @property
    def picked(self) -> dict[int, nn.Module]:
        indexes = self.deepstack_visual_indexes
        return dict(zip(indexes, self.deepstack_merger_list, strict=True)) if indexes else {}

    def add_positions(self, x: Tensor, grids: Grids, cells: Tensor) -> Tensor:
        rows, weights = resampled(grids, cells, self.side)
        corners = (self.pos_embed(index) * weight[:, None] for index, weight in zip(rows, weights, strict=True))
        return x + sum(corners).to(x.dtype)
