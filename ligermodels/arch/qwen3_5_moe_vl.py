"""Qwen3.5 and 3.6 with experts as they are released: the text of qwen3_5_moe.py and the tower of qwen3_5_vl.py.

`ligermodels.load` gives this model for a released checkpoint; `Qwen3_5Moe.from_hub` reads the text of the same files.

Source: https://github.com/QwenLM/Qwen3 (Qwen3.5).
Checked against: models/qwen3_5_moe/modeling_qwen3_5_moe.py of transformers 5.24.
"""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.arch.block import by_expert
from ligermodels.arch.qwen3_5_moe import BLOCK_WITH_IMAGES, MTP_BY_EXPERT, Qwen3_5MoeBlock, Qwen3_5MoeConfig
from ligermodels.arch.qwen3_5_vl import Qwen3_5Images, Qwen3_5VL


@dataclass(kw_only=True)
class Qwen3_5MoeVLConfig(Qwen3_5Images, Qwen3_5MoeConfig):
    """config.json of model_type qwen3_5_moe."""

    model_type: ClassVar[str] = "qwen3_5_moe"
    architecture: ClassVar[str] = "Qwen3_5MoeForConditionalGeneration"
    text_type: ClassVar[str] = "qwen3_5_moe_text"


class Qwen3_5MoeVL(Qwen3_5VL):
    """Qwen3.5 with experts, its vision tower and a language-model head. `ligermodels.load("Qwen/Qwen3.5-35B-A3B")`
    loads one."""

    config_class = Qwen3_5MoeVLConfig
    block_class = Qwen3_5MoeBlock
    _no_split_modules: ClassVar = ["Qwen3_5MoeBlock", "VisionBlock"]
    OTHER_LAYOUTS = ({**by_expert(BLOCK_WITH_IMAGES), **MTP_BY_EXPERT},)
