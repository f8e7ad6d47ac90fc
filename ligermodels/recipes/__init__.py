"""Training recipes: from a file of examples to a tuned model."""

import importlib
from typing import Any

from ligermodels.errors import InputError

RECIPES = {
    "sft": ("sft:SFT", "Supervised fine-tuning: chats, prompts with completions, instructions."),
    "pretrain": ("sft:Pretrain", "Next-token prediction on plain text."),
    "dpo": ("preference:DPO", "Direct preference optimisation: pairs of answers, with a reference."),
    "kto": ("kto:KTO", "Kahneman-Tversky optimisation: single answers, good or not, with a reference."),
    "orpo": ("preference:ORPO", "Odds ratio preference optimisation: fine-tuning and pairs at once, no reference."),
    "cpo": ("preference:CPO", "Contrastive preference optimisation: pairs, without a reference."),
    "simpo": ("preference:SimPO", "SimPO: pairs by their log probabilities per token, without a reference."),
    "distill": ("distill:Distill", "Distillation from a larger model of the same tokenizer, on chats or samples."),
    "medusa": ("medusa:Medusa", "Medusa heads, which predict further tokens ahead, on a frozen model."),
    "grpo": ("grpo:GRPO", "Group relative policy optimisation: reward functions judge sampled completions."),
}  # fmt: skip
"""By name: the module and class of a recipe, and what it does. Importing one imports torch."""


def find(name: str) -> Any:
    """The class of a recipe, a subclass of `base.Recipe`. Raises InputError for another name."""
    if name not in RECIPES:
        raise InputError(f"there is no recipe {name!r}; there are {', '.join(RECIPES)}")
    module, _, cls = RECIPES[name][0].partition(":")
    return getattr(importlib.import_module(f"ligermodels.recipes.{module}"), cls)


def train(name: str, **options: Any) -> int:
    """Trains, as `ligermodels train NAME` does: `train("sft", model=..., data=..., output_dir=...)`. Returns 0.

    Raises the errors of ligermodels, and KeyboardInterrupt after a signal, once all is saved.
    """
    from ligermodels.recipes.trainer import train

    kind = find(name)
    return train(kind, kind.Options.merged(options))
