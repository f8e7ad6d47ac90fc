"""Runs of the command on the tiny model and data of conftest.py."""

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ligermodels
from ligermodels.cli import main
from ligermodels.recipes import find
from ligermodels.recipes.data.batches import Data
from ligermodels.text import Tokenizer
from tests.parallel.ranks import on_ranks
from tests.text import folders

sys.path.append(str(Path(__file__).parents[2] / "examples"))


WORDS = ("a", "bcd", "efg", "hij", "klm", "nop", "qrs", "tuv")
CHATS = [[{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": word}] for word in WORDS]
TEXTS = ["the quick brown fox jumps over the lazy dog. " * n for n in (1, 2, 9)]
PAIRS = [
    {
        "prompt": [{"role": "user", "content": f"Say {word}."}],
        "chosen": [{"role": "assistant", "content": word}],
        "rejected": [{"role": "assistant", "content": "no, " + word * (1 + n % 3)}],
    }
    for n, word in enumerate(WORDS)
]
SINGLE = [
    {"prompt": row["prompt"], "completion": row[key], "label": key == "chosen"}
    for row in PAIRS
    for key in ("chosen", "rejected")
]
PROMPTS = [{"prompt": word, "letter": word[0]} for word in ("ab", "cde", "fg", "hij", "kl", "mno", "pq", "rst", "uv")]
REWARD = """
def reward(completion_ids, letter, **others):
    return [sum(i % 5 == ord(c) % 5 for i in ids) for ids, c in zip(completion_ids, letter)]
"""

LEARN = ("--max-length", "128", "--accumulation", "1", "--learning-rate", "4e-3")
FEW = ("--max-length 64 --accumulation 2 --max-steps 6 --learning-rate 3e-3 --warmup-steps 0 --eval-share 0.3").split()
"""Options of a short run with evaluations."""
SAMPLED = ("--accumulation", "4", "--prompts", "4", "--max-steps", "4", "--max-completion-length", "5")
RECIPES = {
    "sft": ("chats", ()),
    "pretrain": ("texts", ("--scratch", "--capture")),
    "dpo": ("pairs", ()),
    "kto": ("single", ("--batch-tokens", "192")),
    "orpo": ("pairs", ()),
    "cpo": ("pairs", ()),
    "simpo": ("pairs", ()),
    "distill": ("chats", ("--teacher", "{home}/teacher/model")),
    "medusa": ("chats", ("--heads", "2")),
    "grpo": ("prompts", (*SAMPLED, "--num-generations", "4", "--reward-funcs={home}/reward.py")),
}
"""For each recipe, its data and the options that it needs beside `FEW`."""


def train(home, out, *flags, recipe="sft", data="chats.jsonl", model="model") -> int:
    """The exit status of a run into home/out."""
    argv = ["train", recipe, home / model, "--data", home / data, "--output-dir", home / out]
    return main([str(argument) for argument in (*argv, "--show", "0", "--report-to", "none", *flags)])


def run(home, out, recipe, *flags, model="model") -> int:
    """The exit status of a short run of a recipe."""
    data, own = RECIPES[recipe]
    rewards = any(str(flag) == "--reward-funcs" for flag in flags)  # in place of the usual one: a list adds up
    own = [flag.format(home=home) for flag in own if not (rewards and flag.startswith("--reward-funcs="))]
    return train(home, out, *FEW, *own, *flags, recipe=recipe, data=f"{data}.jsonl", model=model)


def metrics(folder, key="loss"):
    """The values of metrics.jsonl by step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


def all_metrics(folder):
    """Every value of metrics.jsonl but times and memory, by (name, step)."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    ignored = ("step", "tokens_per_second", "rollout_seconds", "gib")
    return {(name, line["step"]): x for line in lines for name, x in line.items() if name not in ignored}


def completions(folder):
    """All that was sampled, in order."""
    files = sorted((folder / "completions").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def weights(folder):
    """The bytes of all that was trained, by file."""
    files = [path for path in folder.rglob("*.safetensors") if "checkpoints" not in path.parts]
    assert files
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def without_newest(folder, out):
    """A copy of a run in `folder` that was ended before its last checkpoint."""
    shutil.copytree(folder, out)
    newest = max((out / "checkpoints").iterdir())
    for gone in (newest, *(out / name for name in ("model", "adapter", "medusa", "best"))):
        shutil.rmtree(gone, ignore_errors=True)
    return out


def on_two(folder, *runs):
    """Runs that two processes do together."""

    def work():
        torch.set_num_threads(1)
        for run in runs:
            assert run() == 0

    on_ranks(folder, work)


def check_same(ours, theirs):
    """Two runs but for rounding: all metrics, and what was trained. Adapters are compared by the merged model."""
    assert all_metrics(ours) == pytest.approx(all_metrics(theirs), rel=2e-4, abs=1e-5)
    for name in ("model", "medusa"):
        files = sorted(path.relative_to(theirs) for path in (theirs / name).rglob("*.safetensors"))
        assert files == sorted(path.relative_to(ours) for path in (ours / name).rglob("*.safetensors"))
        for file in files:
            found, expected = load_file(ours / file), load_file(theirs / file)
            assert found.keys() == expected.keys()
            for key, weight in expected.items():
                torch.testing.assert_close(found[key], weight, rtol=1e-3, atol=1e-4)


def check_answers(folder, model):
    """The model says what CHATS taught it."""
    tokenizer = ligermodels.Tokenizer.from_hub(folder)
    for user, assistant in CHATS:
        prompt = tokenizer.apply_chat_template([user], add_generation_prompt=True)
        stops = list(tokenizer.chat_stop_ids)
        out = model.eval().generate(torch.tensor([prompt]), max_new_tokens=8, eos_token_id=stops)
        assert tokenizer.decode(out[0, len(prompt) :].tolist(), skip_special_tokens=True) == assistant["content"]


def fake_sample(model, prompts, copies, *, stop_ids, **unused):
    """In place of rollout.sample: completions that depend on the prompt alone, of different lengths."""
    return [[*range(30 + n, 31 + n + (sum(ids) + n) % 4), stop_ids[0]] for ids in prompts for n in range(copies)]


def reached(folder, step, child):
    """Waits until a run has taken so many steps."""
    file, end = folder / "metrics.jsonl", time.monotonic() + 60
    while not file.is_file() or file.read_text().count('"loss"') < step:
        assert time.monotonic() < end and not os.waitpid(child.pid, os.WNOHANG)[0], "the run has ended, or hangs"
        time.sleep(0.002)


NEEDS = {"distill": {"teacher": "t"}, "grpo": {"reward_funcs": ["r.py"]}}
"""What a recipe needs beside a model, data and a folder."""


def options_of(name, **options):
    """The options of a recipe, complete."""
    return find(name).Options(**{"model": "m", "data": "d", "output_dir": "o", **NEEDS.get(name, {}), **options})


def recipe_of(name, **options):
    """A recipe with a tiny tokenizer."""
    options = options_of(name, **{"max_length": 64, "batch_tokens": 128, **options})
    folder = Path(tempfile.mkdtemp())
    return find(name)(options, Tokenizer.from_folder(folders.byte_level(folder)))


def data_of(name, tokenizer, **options):
    """The data of a recipe."""
    options = options_of(name, **{"max_length": 64, "batch_tokens": 64 * find(name).Options.sequences, **options})
    return Data(options, find(name).of(options)(options, tokenizer))


def batches_of(data, **how):
    """The batches of the training data, collated."""
    return map(data.recipe.collate, data.batches(**how))
