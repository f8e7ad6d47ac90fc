"""Supervised fine-tuning, whose loss is over what the assistant says, and pretraining, over all of a text."""

from collections.abc import Mapping
from typing import Any

from ligermodels.recipes.base import Recipe
from ligermodels.recipes.data.examples import encode
from ligermodels.recipes.recipe_options import PretrainOptions, SFTOptions


class SFT(Recipe):
    Options = SFTOptions

    def process(self, row: Mapping[str, Any]) -> Any:
        return encode(self.read(row), self.tokenizer, every_token=not self.options.assistant_only_loss)


class Pretrain(Recipe):
    Options = PretrainOptions
    splits = True
