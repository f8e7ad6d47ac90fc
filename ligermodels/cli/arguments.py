"""Checks of arguments that need neither torch nor weights, so that a mistake is reported at once."""

import argparse
import os
from pathlib import Path

from ligermodels.checkpoint import files, hub
from ligermodels.checkpoint.dtypes import dtype_name
from ligermodels.errors import InputError
from ligermodels.generation.options import Options

_SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


def dtype(text: str) -> str:
    """For argparse: torch's name of a dtype, or "auto"; "keep" is "auto"."""
    try:
        return dtype_name("auto" if text == "keep" else text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def check_model(args: argparse.Namespace) -> None:
    """Raises InputError for options of sampling that cannot be, CheckpointError for a folder without weights."""
    Options(**{name: getattr(args, name, None) for name in _SAMPLING})  # `bench` has none
    folder = Path(os.path.expanduser(args.model))
    if (folder / "config.json").is_file() and not any(folder.glob("*.gguf")):
        files.weights_in(folder, allow_pickle=args.allow_pickle)


def check_source(src: str) -> None:
    """Raises HubError for the path of a folder that is not there."""
    is_path = src.startswith(("/", ".", "~")) or src.count("/") > 1
    if is_path and not os.path.exists(os.path.expanduser(src)):
        hub.resolve(src)
