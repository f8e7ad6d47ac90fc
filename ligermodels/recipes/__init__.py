"""Training recipes: from a file of examples to a tuned model.

trainer     the loop of all recipes; run_folder has its folder and processes, report all that it prints, card and curves
            what is written beside the result
base        what a recipe gives the trainer; the others are sft, preference, kto, distill, medusa and grpo
entry       `ligermodels.train`; objects has what Python gives in place of names, and notebook shows a run there
rollout     completions that the model samples; rewards judges them
data/       rows, examples and batches; steps has the batches of a step, learning rates and means
options     the options of all recipes, recipe_options those of each, other_tools their names elsewhere
model       loads the model, tokenizer and optimizer; memory chooses what fits; neftune, upload
"""

import importlib
from typing import Any

from ligermodels.errors import InputError

RECIPES = {
    "sft": ("sft:SFT", "SFTOptions", "Supervised fine-tuning: chats, prompts with completions, instructions."),
    "pretrain": ("sft:Pretrain", "PretrainOptions", "Next-token prediction on plain text."),
    "dpo": ("preference:DPO", "DPOOptions", "Direct preference optimisation: pairs of answers, with a reference."),
    "kto": ("kto:KTO", "KTOOptions", "Kahneman-Tversky optimisation: single answers, good or not, with a reference."),
    "orpo": ("preference:ORPO", "ORPOOptions",
             "Odds ratio preference optimisation: fine-tuning and pairs at once, no reference."),
    "cpo": ("preference:CPO", "CPOOptions", "Contrastive preference optimisation: pairs, without a reference."),
    "simpo": ("preference:SimPO", "SimPOOptions",
              "SimPO: pairs by their log probabilities per token, without a reference."),
    "distill": ("distill:Distill", "DistillOptions",
                "Distillation from a larger model of the same tokenizer, on chats or samples."),
    "medusa": ("medusa:Medusa", "MedusaOptions",
               "Medusa heads, which predict further tokens ahead, on a frozen model."),
    "grpo": ("grpo:GRPO", "GRPOOptions",
             "Group relative policy optimisation: reward functions judge sampled completions."),
}  # fmt: skip
"""By name: the module and class of a recipe, that of its options, and what it does. Importing the first imports torch;
options without a module are of recipe_options.py."""


def find(name: str) -> Any:
    """The class of a recipe, a subclass of `base.Recipe`. Raises InputError for another name."""
    return _import(name, 0)


def options_of(name: str) -> Any:
    """The class of a recipe's options, without importing torch. Raises InputError for another name."""
    return _import(name, 1)


def _import(name: str, column: int) -> Any:
    if name not in RECIPES:
        raise InputError(f"there is no recipe {name!r}; there are {', '.join(RECIPES)}")
    module, _, cls = RECIPES[name][column].rpartition(":")
    return getattr(importlib.import_module(f"ligermodels.recipes.{module or 'recipe_options'}"), cls)
