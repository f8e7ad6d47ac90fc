"""`ligermodels train`: from a file of examples to a tuned model."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ligermodels.cli.arguments import Parser, usage_errors
from ligermodels.cli.models import check_is_model
from ligermodels.errors import InputError
from ligermodels.recipes import RECIPES, options_of
from ligermodels.recipes.entry import train
from ligermodels.recipes.options import TrainOptions, add_flags, unknown

_DATA = {"pretrain": "texts.jsonl", "kto": "answers.jsonl", "grpo": "prompts.jsonl"} | dict.fromkeys(
    ("dpo", "orpo", "cpo", "simpo"), "pairs.jsonl"
)
_MORE = {
    "distill": " --teacher HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "grpo": " --reward-funcs rewards.py:right",
}
_EPILOG = """\
A --config file has a line for each option, such as `learning_rate: 1e-5`. The command line overrides it.
DIR/options.yaml has the options of a run: `ligermodels train RECIPE --config DIR/options.yaml --resume` continues it.
Several GPUs: torchrun --nproc-per-node 8 -m ligermodels train ...
Exit status: 0 done, 2 wrong options, 3 another error, such as one of data or model, 130 stopped by Ctrl-C or SIGTERM,
after the current step and a checkpoint.
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command to the parser."""
    command = commands.add_parser(
        "train",
        help="tune a model on examples, or train one on text; one GPU or torchrun",
        epilog=f"example:\n  {_example('sft')}\nligermodels train RECIPE --help lists its options.",
    )
    recipes = command.add_subparsers(required=True, metavar="RECIPE", parser_class=_RecipeParser)
    for name, (*_, summary) in RECIPES.items():
        parser = recipes.add_parser(
            name,
            help=summary.removesuffix("."),
            description=summary,
            epilog=f"example:\n  {_example(name)}\n{_EPILOG}",
            usage=f"ligermodels train {name} MODEL --data FILE --output-dir DIR [--config FILE] [OPTION ...]",
            argument_default=argparse.SUPPRESS,
        )
        parser.add_argument("--config", metavar="FILE", help="a YAML file of options")
        parser.set_defaults(run=_train, recipe=name)


def _example(recipe: str) -> str:
    adapters = "" if recipe == "medusa" else " --lora-r 16"
    return (
        f"ligermodels train {recipe} HuggingFaceTB/SmolLM2-135M-Instruct --data {_DATA.get(recipe, 'chats.jsonl')} "
        f"--output-dir tuned{adapters}{_MORE.get(recipe, '')}\n"
    )


class _RecipeParser(Parser):
    """Adds the flags of the recipe when it is used, and says what an unknown option means."""

    has_flags = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if not self.has_flags:
            add_flags(self, self._options())
            self.has_flags = True
        return super().parse_known_args(args, namespace)

    def _options(self) -> type[TrainOptions]:
        return options_of(self.prog.split()[-1])  # type: ignore[no-any-return]

    def refuse(self, rest: Sequence[str]) -> NoReturn:
        if flags := [text.partition("=")[0] for text in rest if text.startswith("--")]:
            self.error("\n".join(unknown(self._options(), text) for text in flags))
        is_data = Path(rest[0]).suffix in (".jsonl", ".json", ".csv", ".parquet")
        hint = (
            f"did you mean --data {rest[0]}?" if is_data else "MODEL is the only positional argument; lists have commas"
        )
        hint = "flags take no value: --merge, or --no-merge" if rest[0].lower() in ("true", "false") else hint
        self.error(f"unexpected argument {rest[0]!r}; {hint}")


def _train(args: argparse.Namespace) -> int:
    flags = {key: value for key, value in vars(args).items() if key not in ("run", "recipe", "config")}
    model = str(flags.get("model", ""))
    with usage_errors():
        if model.endswith((".yaml", ".yml")):
            raise InputError(f"MODEL is {model}, a file of options; did you mean --config {model}?")
        options = options_of(args.recipe).merged(flags, vars(args).get("config"))
    check_is_model(options.model)
    from ligermodels.cli import doctor_kernels

    doctor_kernels.check_once()
    folder, _ = train(options)
    if folder is not None and os.environ.get("RANK", "0") == "0":
        print(folder)
    return 0
