"""`generate_many`: the ids of `generate` for each prompt alone, in a batch that stays full."""

import math

import pytest
import torch

import ligermodels
from benchmarks.convergence import FAMILIES
from ligermodels.errors import InputError
from ligermodels.generation import batching, generate, generate_many, generate_many_iter, graph
from ligermodels.training.lora import add_lora
from tests.arch import llama_vision, qwen2_vl
from tests.generation import models
from tests.generation.test_graph import family, own_forward, with_large_weights

LENGTHS = [9, 4, 13, 1, 6, 22, 3, 8, 2, 17, 5]


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """Columns are few, so that rows move often. The list has the rows of each decode step."""
    seen, call = [], graph.Decode.__call__
    monkeypatch.setattr(batching, "SLACK", 2)
    monkeypatch.setattr(batching, "ROOM", 4)
    monkeypatch.setattr(graph, "BUCKET", 1)
    monkeypatch.setattr("ligermodels.layers.cache.SLACK", 3)  # windows move every few tokens
    monkeypatch.setattr(
        graph.Decode, "__call__", lambda self, model, ids, **o: (seen.append(len(ids)), call(self, model, ids, **o))[1]
    )
    return seen


def prompts(lengths=LENGTHS):
    return [models.prompt(1, length)[0] for length in lengths]


def alone(model, texts, **options):
    """Each prompt by `generate`, without lengths on the device."""
    found = []
    for text in texts:
        ids = text[None].to(model.device)
        ids = generate(model, ids, attention_mask=torch.ones_like(ids), disable_compile=True, **options)
        found.append(ids[0, len(text) :].cpu())
    return found


def stop_ids(model, texts, new=30, share=0.15):
    """The stop ids that end about half of the texts early, each at another length."""
    every = torch.cat(alone(model, texts, max_new_tokens=new, eos_token_id=()))
    counts = every.bincount()
    order, total, chosen = counts.argsort(descending=True).tolist(), 0, []
    for token in reversed([i for i in order if counts[i]]):
        if total < share * len(every) / 2:
            chosen.append(token)
            total += int(counts[token])
    return chosen


def assert_equal(found, expected):
    assert [x.tolist() for x in found] == [x.tolist() for x in expected]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_writes_what_it_writes_alone(name, device, counted):
    model, texts = family(name).to(device), prompts()
    new = 20 if name != "phi3" else 10
    options = dict(max_new_tokens=new, eos_token_id=stop_ids(model, texts, new))
    expected = alone(model, texts, **options)
    assert len({len(x) for x in expected}) > 3, "rows must end at different times"
    for size in (3, 64):
        assert_equal(generate_many(model, texts, batch_size=size, **options), expected)
        assert {min(size, len(texts))} == set(counted)
        counted.clear()
