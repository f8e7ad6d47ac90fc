"""Pretraining, from random weights or further: the loss is over every token of plain text."""

import functools

from ligermodels.recipes.data import Data
from ligermodels.recipes.options import PretrainOptions
from ligermodels.recipes.run import Recipe, run

__all__ = ["RECIPE", "PretrainOptions", "train"]

RECIPE = Recipe(open_data=functools.partial(Data, split=True))


def train(options: PretrainOptions) -> int:
    """Trains a model on text. Returns the exit status."""
    return run(options, RECIPE)
