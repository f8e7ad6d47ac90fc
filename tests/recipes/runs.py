"""Runs of the command on the tiny model and data of conftest.py."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from ligermodels.cli import main
from ligermodels.recipes import find
from ligermodels.recipes.data import Data
from ligermodels.text import Tokenizer
from tests.text import folders

sys.path.append(str(Path(__file__).parents[2] / "examples"))


WORDS = ("a", "bcd", "efg", "hij", "klm", "nop", "qrs", "tuv")
CHATS = [[{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": word}] for word in WORDS]


FEW = (
    "--length", "64", "--accumulation", "2", "--steps", "6", "--lr", "3e-3", "--warmup-steps", "0",
    "--eval-share", "0.3",
)  # fmt: skip
"""Options of a short run with evaluations."""


def train(home, out, *flags, recipe="sft", data="chats.jsonl") -> int:
    """The exit status of a run into home/out."""
    argv = [
        "train",
        recipe,
        home / "model",
        "--data",
        home / data,
        "--out",
        home / out,
        "--show",
        "0",
        "--report-to",
        "none",
    ]
    return main([str(argument) for argument in (*argv, *flags)])


def metrics(folder, key="loss"):
    """The values of metrics.jsonl by step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


def reached(folder, step, child):
    """Waits until a run has taken so many steps."""
    file, end = folder / "metrics.jsonl", time.monotonic() + 60
    while not file.is_file() or file.read_text().count('"loss"') < step:
        assert time.monotonic() < end and not os.waitpid(child.pid, os.WNOHANG)[0], "the run has ended, or hangs"
        time.sleep(0.002)


def options_of(name, **options):
    """The options of a recipe, complete."""
    return find(name).Options(**{"model": "m", "data": "d", "output_dir": "o", **options})


def recipe_of(name, **options):
    """A recipe with a tiny tokenizer."""
    options = options_of(name, **{"max_length": 64, "batch_tokens": 128, **options})
    folder = Path(tempfile.mkdtemp())
    return find(name)(options, Tokenizer.from_folder(folders.byte_level(folder)))


def data_of(name, tokenizer, **options):
    """The data of a recipe."""
    options = options_of(name, **{"max_length": 64, "batch_tokens": 64 * find(name).Options.sequences, **options})
    return Data(options, find(name)(options, tokenizer))
