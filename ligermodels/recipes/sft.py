"""Supervised fine-tuning: the loss is over what the assistant says."""

from ligermodels.recipes.options import SFTOptions
from ligermodels.recipes.run import Recipe, run

__all__ = ["RECIPE", "SFTOptions", "train"]

RECIPE = Recipe()


def train(options: SFTOptions) -> int:
    """Tunes a model on chats, prompts with completions, or instructions. Returns the exit status."""
    return run(options, RECIPE)
