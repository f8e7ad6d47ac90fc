"""The recipe of docs/adding.md, as it is printed, and one without labels, formats and metrics."""

import importlib
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ligermodels import recipes
from ligermodels.recipes import trainer
from ligermodels.recipes.base import Recipe, sum_over_ranks
from ligermodels.recipes.data.examples import Example, packed_batch
from ligermodels.recipes.options import TrainOptions
from tests.recipes.runs import FEW, TEXTS, WORDS, all_metrics, check_same, metrics, on_two, train

PAGE = Path(__file__).parents[2] / "docs" / "adding.md"


def test_the_recipe_of_the_documentation_trains_and_resumes(home, tmp_path, monkeypatch):
    code = re.findall(r"```python\n(\"\"\"Focal.*?)```", PAGE.read_text(), re.DOTALL)[0]
    assert len(code.splitlines()) <= 60
    (tmp_path / "focal.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "ligermodels.recipes.focal", importlib.import_module("focal"))
    monkeypatch.setitem(recipes.RECIPES, "focal", ("focal:Focal", "focal:FocalOptions", "Focal loss."))
    flags = (*FEW, "--save-steps", "3", "--eval-steps", "3")
    assert train(home, tmp_path / "sft", *flags) == 0
    assert train(home, tmp_path / "plain", *flags, "--gamma", "0", recipe="focal") == 0
    assert metrics(tmp_path / "plain") == pytest.approx(metrics(tmp_path / "sft"), rel=1e-5)  # (1 - p)^0 is 1
    assert train(home, tmp_path / "focal", *flags, recipe="focal") == 0
    losses = metrics(tmp_path / "focal")
    assert losses[6] < losses[1] <= metrics(tmp_path / "plain")[1] and metrics(tmp_path / "focal", "eval_probability")


@dataclass(kw_only=True)
class ContrastiveOptions(TrainOptions):
    recipe = "contrastive"


@dataclass(frozen=True)
class Sides:
    """A question and the text that belongs to it."""

    ids: tuple[list[int], ...]
    ends = None

    @property
    def size(self):
        return sum(map(len, self.ids))

    space = trained = size

    def cut(self, length):
        return Sides(tuple(side[: length // 2] for side in self.ids))


class Contrastive(Recipe):
    """Of the texts of a batch, a question finds its own. No token is a label."""

    Options = ContrastiveOptions

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.keys = ("question", "text")  # which `process` reads, in worker processes too

    def check_rows(self, rows):
        return None

    def process(self, row):
        return Sides(tuple(self.tokenizer.encode(row[key]) for key in self.keys))

    def collate(self, examples):
        columns = zip(*(one.ids for one in examples or [Sides(([0], [0]))]), strict=True)
        batch = packed_batch([Example(ids, ids) for column in columns for ids in column])
        del batch["labels"]
        return batch | {"pairs": torch.tensor(len(examples))}

    def count(self, batch):
        return batch["pairs"]

    def loss(self, model, batch, count):
        inputs = dict(batch)
        pairs, last = inputs.pop("pairs"), inputs["cu_seqlens"][1:].long() - 1
        states = F.normalize(model(**inputs, return_logits=False).last_hidden_state[0, last], dim=-1)
        questions, texts = states.chunk(2)
        loss = F.cross_entropy(questions @ texts.T / 0.1, torch.arange(len(questions)), reduction="sum")
        return sum_over_ranks(model, loss * pairs.sign() / count), {}


def test_a_recipe_without_labels(home, tmp_path, monkeypatch, capsys):
    """With worker processes and without, on one process and on two, of which one has no third batch to evaluate on."""
    rows = [{"question": f"Say {word}.", "text": f"{word} {text}"} for word in WORDS for text in TEXTS[:2]]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def run(out):
        return trainer.train(Contrastive, ContrastiveOptions(
            model=str(home / "model"), data=str(tmp_path / "rows.jsonl"), output_dir=str(tmp_path / out), show=0,
            max_length=96, batch_tokens=192, eval_share=0.5, eval_steps=2, accumulation=2, max_steps=4,
            learning_rate=3e-3, warmup_steps=0,
        ))  # fmt: skip

    run("here")
    said = capsys.readouterr().err
    assert "rows.jsonl: 8 rows\n" in said and "perplexity" not in said and "head gradient" in said
    found = metrics(tmp_path / "here", "eval_loss")
    assert found[4] < found[0] and not metrics(tmp_path / "here", "perplexity")
    on_two(tmp_path, lambda: run("two") and 0)
    check_same(tmp_path / "two", tmp_path / "here")
    monkeypatch.setattr("ligermodels.recipes.data.batches.encoding_workers", lambda *_, **__: 2)
    run("workers")
    assert all_metrics(tmp_path / "workers") == all_metrics(tmp_path / "here")


def test_the_page_quotes_the_protocol_of_an_example():
    source = (Path(recipes.__file__).parent / "data" / "examples.py").read_text()
    protocol = re.search(r"class Trainable\(Protocol\):.*?(?=\n\n\n)", source, re.DOTALL)[0]
    assert protocol in PAGE.read_text()
