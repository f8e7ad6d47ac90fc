"""`ligermodels.train`, which the command line calls too. Nothing here imports torch before it is called."""

import re
import textwrap
from typing import Any

from ligermodels.errors import InputError
from ligermodels.recipes import RECIPES, find, objects, options_of
from ligermodels.recipes.options import TrainOptions, fields_of


def train(
    recipe: str | TrainOptions, *, model: Any = None, data: Any = None, output_dir: Any = None, eval_data: Any = None,
    tokenizer: Any = None, rewards: Any = None, config: Any = None, **options: Any,
) -> Any:  # fmt: skip
    """Trains a model on examples, as `ligermodels train RECIPE` does.

        folder, metrics = train("sft", model="HuggingFaceTB/SmolLM2-135M-Instruct", data=rows, output_dir="tuned")

    recipe: sft, pretrain, dpo, kto, orpo, cpo, simpo, distill, medusa or grpo; or options that are complete.
    model: repository on the Hub, folder of a checkpoint, GGUF file, or a model of ligermodels in memory. The latter is
        trained in place, in its dtype, and weights that require no gradient stay frozen.
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
    try:
        values, in_memory = objects.split(kind, values)
        return trainer.train(find(recipe), kind.merged(values, config, in_memory))
    except InputError as error:
        if flag := re.search(r"--[a-z][a-z-]+", str(error)):
            error.add_note(
                f"  In Python {flag[0]} is the argument {flag[0][2:].replace('-', '_')}, and MODEL is model."
            )
        raise


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
