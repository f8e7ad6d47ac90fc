"""Qwen3-VL: Qwen3 that reads images and videos, and adds to its first blocks what early blocks of the tower saw.

- What it shares with Qwen2-VL is in qwen_vl.py. The tower (qwen3_vl_tower.py) is Qwen3.5's too.
- Text: Qwen3's blocks without windows. Rotary frequency i rotates by the row if i % 3 is 1, by the column if it is 2,
  up to the numbers in `mrope_section`; all others by time.
- DeepStack (Meng et al. 2024, https://arxiv.org/abs/2406.04334): after blocks 0, 1 and 2 the states of three blocks
  of the tower are added at the image tokens.
- The frames of a video, two by two, stand apart in the text, each pair after its time, and have positions of images.

Paper: Qwen Team 2025, https://arxiv.org/abs/2511.21631.
Checked against: models/qwen3_vl/modeling_qwen3_vl.py of transformers 5.23.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from ligermodels.arch.config import ModelConfig, NestedFields
from ligermodels.arch.decoder import Decoder
from ligermodels.arch.inputs import TextInputs
from ligermodels.arch.qwen3 import Qwen3Block, Qwen3Config
from ligermodels.arch.qwen3_vl_tower import Qwen3VLTower, Qwen3VLVisionConfig
from ligermodels.arch.qwen_vl import ImageTokens, QwenVL, QwenVLModel


@dataclass(kw_only=True)
class Qwen3VLImages(NestedFields, ImageTokens):
    """What a config.json has beside the fields of its text: vision_config and the ids of tokens."""

    vision_class: ClassVar = Qwen3VLVisionConfig
    root_fields: ClassVar = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    default_rope_theta: ClassVar[float] = 500000.0
    mrope_section: ClassVar = (24, 20, 20)
    mrope_interleaved: ClassVar[bool] = True
    frames_apart: ClassVar[bool] = True

    max_position_embeddings: int = 128000
    vision_config: Qwen3VLVisionConfig = field(default_factory=Qwen3VLVisionConfig)

    def __post_init__(self: Any) -> None:
        super().__post_init__()
        if self.sliding_window is not None:
            raise self._error("sliding_window", "is not supported: every block sees all tokens here")


@dataclass(kw_only=True)
class Qwen3VLConfig(Qwen3VLImages, Qwen3Config):
    """config.json of model_type qwen3_vl."""

    model_type: ClassVar[str] = "qwen3_vl"
    architecture: ClassVar[str] = "Qwen3VLForConditionalGeneration"
    text_type: ClassVar[str] = "qwen3_vl_text"


class DeepStackDecoder(Decoder):
    """Adds images["states"][i] [N, hidden_size] of its inputs after block i, at images["places"] of the flattened rows.

    Between the blocks: a hook on a block, or a loop over blocks, does not see them, as in transformers.
    """

    def runner(self, tokens: Tensor, inputs: TextInputs, x: Tensor) -> Callable[..., Any]:
        run, shape = super().runner(tokens, inputs, x), tokens.shape[:2]
        if not inputs.images:
            return run
        states, places = inputs.images["states"], inputs.images["places"]

        def run_and_add(i: int, block: nn.Module, x: Tensor, residual: Tensor | None, *more: Any) -> Any:
            x, residual, *added = run(i, block, x, residual, *more)
            if i < len(states):
                text = states[i].new_zeros(shape.numel(), states[i].shape[1])
                addend = self.own_tokens(text.index_copy(0, places, states[i]).view(*shape, -1))
                x, residual = (x if residual is None else x + residual) + addend.to(x.device, x.dtype), None
            return x, residual, *added

        return run_and_add


class Qwen3VL(QwenVL):
    """Qwen3-VL with a language-model head. `Qwen3VL.from_hub("Qwen/Qwen3-VL-4B-Instruct")` loads one."""

    config_class: ClassVar[type[ModelConfig]] = Qwen3VLConfig
    block_class: ClassVar[type[nn.Module]] = Qwen3Block
    _no_split_modules: ClassVar = ["Qwen3Block", "VisionBlock"]

    @classmethod
    def make_model(cls, config: Any) -> QwenVLModel:
        text = DeepStackDecoder(config, cls.block_class, position_axes=3)
        return QwenVLModel(config, Qwen3VLTower(config.vision_config), text)
