"""Qwen2-VL: Qwen2 that reads images and videos, whose number of tokens depends on their size.

- What it shares with later models is in qwen_vl.py: the tower's blocks, tokens of images, positions on three axes.
- Text: Qwen2's blocks. The sections of the rotary frequencies (`mrope_section`) follow each other.
- Vision tower: patches of 2 frames of 14 x 14 pixels through one matrix; blocks with LayerNorm, biases everywhere and
  quick_gelu; rotary by row and column. The merger norms patches, and maps 2 x 2 to one token with exact gelu.
- After a video of more frames than rows and columns, the generations of transformers differ: see `video_rule`.

Paper: Wang et al. 2024, https://arxiv.org/abs/2409.12191.
Checked against: models/qwen2_vl/modeling_qwen2_vl.py of transformers 5.23; positions against 4.57 as well.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from ligermodels.arch.config import VisionConfig
from ligermodels.arch.decoder import Decoder
from ligermodels.arch.qwen2 import Qwen2Block, Qwen2Config
from ligermodels.arch.qwen_vl import (
    VISION_ACTIVATIONS,
    ImageTokens,
    QwenVL,
    QwenVLModel,
    VisionBlock,
    VisionTower,
    check_axial_rope,
)
from ligermodels.errors import ConfigError
from ligermodels.layers import MLP, LayerNorm, VisionRotary
from ligermodels.layers.multimodal import PatchEmbedding

VIDEO_RULES = ("4.x", "5.x")


@dataclass(kw_only=True)
class Qwen2VLVisionConfig(VisionConfig):
    """vision_config of a config.json of model_type qwen2_vl; hidden_size is the width of the tower's output."""

    dropped: ClassVar = VisionConfig.dropped | {"in_chans", "initializer_range"}
    unused: ClassVar = frozenset({"spatial_patch_size"})

    hidden_size: int = 3584
    depth: int = 32
    embed_dim: int = 1280
    num_heads: int = 16
    mlp_ratio: float = 4
    hidden_act: str = "quick_gelu"
    in_channels: int = 3
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "axial", "rope_theta": 10000.0})

    @classmethod
    def label(cls) -> str:
        return "qwen2_vl: vision_config"

    @classmethod
    def from_hf(cls, config: Any) -> Self:
        if isinstance(config, Mapping) and "in_chans" in config:  # the Hub's name for it
            config = {"in_channels": config["in_chans"], **config}
        return super().from_hf(config)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("hidden_act", VISION_ACTIVATIONS)
        if self.embed_dim % (4 * self.num_heads):
            raise self._error("embed_dim", f"must be a multiple of 4 for each of num_heads={self.num_heads} heads")
        check_axial_rope(self.label(), self.rope_parameters)

    @property
    def token_size(self) -> int:
        return self.hidden_size


@dataclass(kw_only=True)
class Qwen2VLConfig(ImageTokens, Qwen2Config):
    """config.json of model_type qwen2_vl: the text's fields at the top, as on the Hub, and vision_config.

    video_rule, ours: the position of the text after a video that began at p. "4.x", the default, as in the models' own
    code and transformers 4: p + max(frames, rows, columns). "5.x", as in transformers 5: p + max(rows, columns).
    """

    model_type: ClassVar[str] = "qwen2_vl"
    architecture: ClassVar[str] = "Qwen2VLForConditionalGeneration"
    default_rope_theta: ClassVar[float] = 1000000.0
    rope_aliases: ClassVar = {"mrope": "default"}
    mrope_section: ClassVar = (16, 24, 24)
    unused: ClassVar = frozenset({"vision_token_id"})

    num_key_value_heads: int = 8
    rms_norm_eps: float = 1e-5
    max_window_layers: int = 80
    vision_config: Qwen2VLVisionConfig
    video_rule: str = "4.x"

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """A config from the contents of a config.json, flat or with a text_config. Raises as `ModelConfig.from_hf`."""
        if "text_config" in config:
            config = dict(config)
            text = config.pop("text_config") or {}
            if not isinstance(text, Mapping) or text.get("model_type", "qwen2_vl") not in ("qwen2_vl", "qwen2_vl_text"):
                raise ConfigError(f"qwen2_vl: text_config is {text!r}, expected an object of qwen2_vl_text")
            tied = config.get("tie_word_embeddings") or text.get("tie_word_embeddings") or False
            of_the_root = {"model_type", "architectures"}
            if config.keys() & {"dtype", "torch_dtype"}:
                of_the_root |= {"dtype", "torch_dtype"}
            text = {key: value for key, value in text.items() if key not in of_the_root}
            config = {**config, **text, "tie_word_embeddings": tied}
        return super().from_hf(config)

    def __post_init__(self) -> None:
        if not isinstance(self.vision_config, Qwen2VLVisionConfig):
            self.vision_config = Qwen2VLVisionConfig.from_hf(self.vision_config)
        super().__post_init__()
        self._check_choice("video_rule", VIDEO_RULES)

    @property
    def frames_count(self) -> bool:
        return self.video_rule == "4.x"

    def to_hf(self) -> dict[str, Any]:
        values, rope = super().to_hf(), self.rope_parameters
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        scaling["type"] = "mrope" if rope["rope_type"] == "default" else rope["rope_type"]  # for early readers
        values |= {"vision_config": self.vision_config.to_hf(), "rope_scaling": scaling}
        if self.video_rule == "4.x":
            del values["video_rule"]
        return values


class PatchMerger(nn.Module):
    """States of merge x merge neighbours, [..., embed_dim] one after the other, -> one token [N, hidden_size]."""

    def __init__(self, config: Qwen2VLVisionConfig):
        super().__init__()
        size = config.embed_dim * config.spatial_merge_size**2
        self.ln_q = LayerNorm(config.embed_dim, eps=1e-6)
        self.mlp = MLP(size, size, activation="gelu", out_features=config.hidden_size, projections=("0", "2"))
        self.size = size

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        x, _ = self.ln_q(x, residual)
        return self.mlp(x.reshape(-1, self.size))


class Qwen2VLTower(VisionTower):
    """The vision tower, by its config."""

    def __init__(self, config: Qwen2VLVisionConfig):
        super().__init__(config.spatial_merge_size)
        size, heads = config.embed_dim, config.num_heads
        kernel = (config.temporal_patch_size, config.patch_size, config.patch_size)
        self.patch_embed = nn.ModuleDict({"proj": PatchEmbedding(config.in_channels, size, kernel)})
        self.rotary_pos_emb = VisionRotary(size // heads, theta=config.rope_parameters["rope_theta"])
        mlp = int(size * config.mlp_ratio), VISION_ACTIVATIONS[config.hidden_act]
        self.blocks = nn.ModuleList(VisionBlock(size, mlp[0], heads, activation=mlp[1]) for _ in range(config.depth))
        self.merger = PatchMerger(config)


class Qwen2VL(QwenVL):
    """Qwen2-VL with a language-model head. `Qwen2VL.from_hub("Qwen/Qwen2-VL-7B-Instruct")` loads one."""

    config_class = Qwen2VLConfig
    _no_split_modules: ClassVar = ["Qwen2Block", "VisionBlock"]
    DISK_NAMES: ClassVar = {
        "model.visual.{rest}": "visual.{rest}",
        "model.language_model.{rest}": "model.{rest}",
    }
    OTHER_LAYOUTS: ClassVar = ({}, {"model.language_model.{rest}": "model.language_model.model.{rest}"})

    @classmethod
    def make_model(cls, config: Qwen2VLConfig) -> QwenVLModel:
        text = Decoder(config, Qwen2Block, position_axes=3)
        return QwenVLModel(config, Qwen2VLTower(config.vision_config), text)
