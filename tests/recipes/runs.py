"""A tiny model and data for the tests of recipes, and runs of the command on them."""

import json
import sys
from pathlib import Path

import pytest
import torch

from ligermodels.cli import main

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import tiny

WORDS = ("a", "bcd", "efg", "hij", "klm", "nop", "qrs", "tuv")
CHATS = [[{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": word}] for word in WORDS]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a model, chats and texts."""
    folder = tmp_path_factory.mktemp("train")
    torch.set_num_threads(1)  # sums of several threads have other bits
    tiny.write_llama().rename(folder / "model")
    lines = [json.dumps({"messages": messages}) for messages in CHATS * 2]
    (folder / "chats.jsonl").write_text("\n".join(lines))
    texts = ["the quick brown fox jumps over the lazy dog. " * n for n in (1, 2, 9)]
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts * 4))
    return folder


def train(home, out, *flags, recipe="sft", data="chats.jsonl") -> int:
    """The exit status of a run into home/out."""
    argv = ["train", recipe, home / "model", "--data", home / data, "--out", home / out, "--show", "0", "--log", "none"]
    return main([str(argument) for argument in (*argv, *flags)])


def metrics(folder, key="loss"):
    """The values of metrics.jsonl by step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}
