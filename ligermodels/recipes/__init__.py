"""Training recipes: from a file of examples to a tuned model.

trainer     the loop of all recipes; run_folder has its folder and processes, report all that it prints
base        what a recipe gives the trainer; the others are sft, preference, kto, distill, medusa and grpo
objects     what Python gives in place of names; notebook shows a run there
rollout     completions that the model samples; rewards judges them
data/       rows, examples and batches; steps has the batches of a step, learning rates and means
options     the options of all recipes, recipe_options those of each, other_tools their names elsewhere
model       loads the model, tokenizer and optimizer; memory chooses what fits
"""

import importlib
import textwrap
from typing import Any

from ligermodels.errors import InputError
from ligermodels.recipes import objects
from ligermodels.recipes.options import TrainOptions, fields_of

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


def train(
    recipe: str | TrainOptions, *, model: Any = None, data: Any = None, output_dir: Any = None, eval_data: Any = None,
    tokenizer: Any = None, rewards: Any = None, config: Any = None, **options: Any,
) -> Any:  # fmt: skip
    """Trains a model on examples, as `ligermodels train RECIPE` does.

        folder, metrics = train("sft", model="HuggingFaceTB/SmolLM2-135M-Instruct", data=rows, output_dir="tuned")

    recipe: sft, pretrain, dpo, kto, orpo, cpo, simpo, distill, medusa or grpo; or options that are complete.
    model: repository on the Hub, folder of a checkpoint, or a model of ligermodels in memory. The latter is trained in
        place, in its dtype, and weights that require no gradient stay frozen.
    data, eval_data: names of files, folders and data sets of the Hub, a list of rows (dicts), or a `datasets.Dataset`.
        Of a DatasetDict, data is the split "train".
    output_dir: a new folder for all that the run writes.
    tokenizer: for a model in memory that came from no folder: a folder, a repository, or a `ligermodels.Tokenizer`.
    rewards: for grpo, functions as `reward(prompts, completions, **columns) -> list of numbers`, or "FILE.py:FUNCTION".
    config: a YAML file of options, which the arguments override.
    options: those of the command, with underscores: `learning_rate=1e-5`, `lora_r=16`, `resume=True`. They are below.

    Returns (folder, metrics): the folder of the model, adapter or heads, and the lines of metrics.jsonl as dicts. In a
    notebook a bar and a curve of the loss show the run; elsewhere lines on stderr do. Ctrl-C, or the stop button of a
    notebook, ends the run after its step and a checkpoint, and raises KeyboardInterrupt; the same call with resume=True
    continues it.
    Raises InputError for wrong options, rows or objects, HubError, CheckpointError, TrainingError and the other errors
    of ligermodels. In a script, call it under `if __name__ == "__main__":`, since many rows are encoded in processes
    of their own.
    """
    from ligermodels.recipes import trainer

    if isinstance(recipe, TrainOptions):
        return trainer.train(find(recipe.recipe), recipe)
    options |= dict(model=model, data=data, output_dir=output_dir, eval_data=eval_data, tokenizer=tokenizer)
    options |= dict(rewards=rewards)
    kind, values = options_of(recipe), {name: value for name, value in options.items() if value is not None}
    values, in_memory = objects.split(kind, values)
    return trainer.train(find(recipe), kind.merged(values, config, in_memory))


def _described() -> str:
    """All options by their groups, as text: those of every recipe, and what each recipe adds or changes."""
    common, text = fields_of(TrainOptions), "\nOptions of every recipe\n"
    for name, field in common.items():
        if (group := field.metadata.get("group")) is not None:
            text += f"\n{group}\n"
        text += _line(name, field)
    for recipe in RECIPES:
        fields = fields_of(options_of(recipe))
        differ = [name for name in fields if name not in common or fields[name].default != common[name].default]
        if differ:
            text += f"\nOptions of {recipe}\n\n{''.join(_line(name, fields[name]) for name in differ)}"
    return text


def _line(name: str, field: Any) -> str:
    default = "" if field.default in (None, "", ()) else f" ({field.default})"
    help = f"{field.metadata['help']}{default}".replace("{:g}, with --lora-r {:g}", "by the recipe")
    return textwrap.fill(f"{name}: {help}", 116, initial_indent="    ", subsequent_indent="        ") + "\n"


train.__doc__ = f"{train.__doc__}{_described()}"
