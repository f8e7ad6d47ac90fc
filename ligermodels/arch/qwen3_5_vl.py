"""Qwen3.5, 3.6 and 3.8 as they are released: the text of qwen3_5.py and a vision tower.

- The tower is Qwen3-VL's without DeepStack (qwen3_vl_tower.py); tokens of images, and videos as frames after their
  times, as there (qwen_vl.py).
- The quarter of a head's dims that rotates has 32 frequencies, which take time, row and column in turn (11, 11, 10).
- A mixer with a state (`linear_attn`) has no positions: it reads the tokens of an image in their order.

`ligermodels.load` gives this model for a released checkpoint; `Qwen3_5.from_hub` reads the text of the same files.

Source: https://github.com/QwenLM/Qwen3 (Qwen3.5).
Checked against: models/qwen3_5/modeling_qwen3_5.py of transformers 5.23.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ligermodels.arch.config import ModelConfig, NestedFields
from ligermodels.arch.decoder import Decoder
from ligermodels.arch.gemma import NORM
from ligermodels.arch.qwen3_5 import PredictsTokens, Qwen3_5Config
from ligermodels.arch.qwen3_vl_tower import Qwen3VLTower, Qwen3VLVisionConfig
from ligermodels.arch.qwen_vl import ImageTokens, QwenVL, QwenVLModel


@dataclass(kw_only=True)
class Qwen3_5VisionConfig(Qwen3VLVisionConfig):
    """vision_config of a config.json of model_type qwen3_5."""

    deepstack_visual_indexes: list[int] = field(default_factory=list)

    @classmethod
    def label(cls) -> str:
        return "qwen3_5: vision_config"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.deepstack_visual_indexes:
            raise self._error("deepstack_visual_indexes", "is not supported; supported: []")


@dataclass(kw_only=True)
class Qwen3_5Images(NestedFields, ImageTokens):
    """What a config.json has beside the fields of its text: vision_config and the ids of tokens."""

    vision_class: ClassVar = Qwen3_5VisionConfig
    root_fields: ClassVar = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    mrope_section: ClassVar = (11, 11, 10)
    mrope_interleaved: ClassVar[bool] = True
    frames_apart: ClassVar[bool] = True

    vision_config: Qwen3_5VisionConfig = field(default_factory=Qwen3_5VisionConfig)
    image_token_id: int = 248056
    video_token_id: int = 248057
    vision_start_token_id: int = 248053
    vision_end_token_id: int = 248054


@dataclass(kw_only=True)
class Qwen3_5VLConfig(Qwen3_5Images, Qwen3_5Config):
    """config.json of model_type qwen3_5."""

    model_type: ClassVar[str] = "qwen3_5"
    architecture: ClassVar[str] = "Qwen3_5ForConditionalGeneration"
    text_type: ClassVar[str] = "qwen3_5_text"


class Qwen3_5VL(PredictsTokens, QwenVL):
    """Qwen3.5 with its vision tower and a language-model head. `ligermodels.load("Qwen/Qwen3.5-0.8B")` loads one."""

    config_class: ClassVar[type[ModelConfig]] = Qwen3_5VLConfig
    _no_split_modules: ClassVar = ["Qwen3_5Block", "VisionBlock"]

    @classmethod
    def make_model(cls, config: Any) -> QwenVLModel:
        text = Decoder(config, cls.block_class, norm=NORM, position_axes=3)
        return QwenVLModel(config, Qwen3VLTower(config.vision_config), text)
