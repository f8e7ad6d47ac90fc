"""`ligermodels train`: from a file of examples to a tuned model."""

import argparse
import importlib
from typing import Any

from ligermodels.recipes import options

_EPILOG = """\
A file of options, for --config, has a line for each: `lr: 1e-5`. The command line wins over it. DIR/options.yaml holds
what a run had, so that `ligermodels train RECIPE --config DIR/options.yaml --resume` goes on with it.
Several GPUs: torchrun --nproc-per-node 8 -m ligermodels train ...
Exit status: 0 done, 2 wrong usage, 3 an error, 130 stopped by Ctrl-C or SIGTERM, after the step and a checkpoint.
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command to the parser."""
    train = commands.add_parser("train", help="tune a model on examples, or train one on text; one GPU or torchrun")
    recipes = train.add_subparsers(required=True, metavar="RECIPE", parser_class=options.Parser)
    for name, kind in options.RECIPES.items():
        doc = (kind.__doc__ or "").rstrip(".")
        parser = recipes.add_parser(
            name,
            help=doc,
            description=kind.__doc__,
            epilog=_EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            usage=f"ligermodels train {name} MODEL --data FILE --out DIR [--config FILE] [OPTION ...]",
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )
        parser.add_argument("--config", metavar="FILE", help="a YAML file of options")
        options.add_flags(parser, kind)
        parser.set_defaults(run=_train, recipe=name)


def _train(args: argparse.Namespace) -> int:
    given = {key: value for key, value in vars(args).items() if key not in ("run", "recipe", "config")}
    merged = options.RECIPES[args.recipe].merged(given, vars(args).get("config"))
    return importlib.import_module(f"ligermodels.recipes.{args.recipe}").train(merged)
