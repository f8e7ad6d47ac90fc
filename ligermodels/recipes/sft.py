"""Supervised fine-tuning, whose loss is over what the assistant says, and pretraining, over all of a text."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ligermodels.recipes.base import Recipe
from ligermodels.recipes.examples import encode
from ligermodels.recipes.options import TextOptions, option


@dataclass(kw_only=True)
class SFTOptions(TextOptions):
    recipe = "sft"
    assistant_only_loss: bool = option(
        True, "train what the assistant says; off: every token, the prompts too", group="loss"
    )


class SFT(Recipe):
    Options = SFTOptions

    def process(self, row: Mapping[str, Any]) -> Any:
        return encode(self.read(row), self.tokenizer, every_token=not self.options.assistant_only_loss)


@dataclass(kw_only=True)
class PretrainOptions(TextOptions):
    recipe = "pretrain"
    scratch: bool = option(  # type: ignore[misc]
        False,
        "draw the weights at random, by the config.json of MODEL; the learning rate is then 3e-4 by default",
        excludes=("lora_r",),
        group="pretraining",
    )
    weight_decay: float = option(0.1, "weight decay of matrices; norms and biases have none", least=0)
    adam_beta2: float = option(0.95, "beta2 of AdamW", least=0, below=1)

    @property
    def default_rate(self) -> float:
        return 3e-4 if self.scratch else super().default_rate


class Pretrain(Recipe):
    Options = PretrainOptions
    splits = True
