"""Pretraining, from random weights or further: the loss is over every token of plain text."""

from ligermodels.recipes.options import PretrainOptions
from ligermodels.recipes.run import Recipe, run

__all__ = ["RECIPE", "PretrainOptions", "train"]

RECIPE = Recipe()


def train(options: PretrainOptions) -> int:
    """Trains a model on text. Returns the exit status."""
    return run(options, RECIPE)
