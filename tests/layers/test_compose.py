"""The architecture of the README, as a user would write it: only layers, no config, no registry."""

import importlib.util
from pathlib import Path

import pytest
import torch


@pytest.fixture
def example():
    path = Path(__file__).parents[2] / "examples" / "custom_architecture.py"
    spec = importlib.util.spec_from_file_location("custom_architecture", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_learns(example):
    losses = example.train(steps=30)
    assert losses[0] > 3.3  # ln 32 = 3.47: at the start it guesses
    assert losses[-1] < 0.5


def test_gradients_reach_every_parameter(example):
    model = example.Parallel(vocab=32)
    ids = torch.randint(32, (2, 17))
    model(ids[:, :-1], labels=ids[:, 1:]).backward()
    names = [name for name, parameter in model.named_parameters() if not parameter.grad.abs().sum() > 0]
    assert names == []


def test_logits_and_loss_agree_and_look_back_only(example):
    model = example.Parallel(vocab=32).double()
    torch.nn.init.normal_(model.embed_tokens.weight)
    ids = torch.randint(32, (2, 40))
    logits = model(ids)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(model(ids[:, :-1], labels=ids[:, 1:]), loss)
    changed = ids.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 32
    moved = (model(changed) != logits).any(-1).any(0)
    assert not moved[:20].any() and moved[20]


def test_the_readme_shows_the_example_as_it_is():
    root = Path(__file__).parents[2]
    source = (root / "examples" / "custom_architecture.py").read_text()
    model = source[source.index("import torch") : source.index("def train(")].strip()
    assert model in (root / "README.md").read_text()
