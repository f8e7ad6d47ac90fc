"""The examples with Lightning and DeepSpeed, each on two processes of the CPU: the losses of one process."""

import importlib
from pathlib import Path

import pytest
import torch

import ligermodels
from ligermodels.training import AdamW
from tests.processes import losses_in, python, torchrun

pytestmark = pytest.mark.slow  # each starts processes that import everything
ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("tiny").write_llama()


def one_process(folder, batches, saved):
    """The losses of a plain loop, after a check that it ends with the weights of folder `saved`."""
    model = ligermodels.load(folder, dtype=torch.float32, device="cpu").train()
    optimizer = AdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0)
    losses = []
    for batch in batches:
        count = sum(ids[:, 1:].numel() for ids in batch)
        parts = [model(ids, labels=ids, num_items_in_batch=count).loss for ids in batch]
        sum(parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(parts).item())
    for found, expected in zip(ligermodels.load(saved, device="cpu").parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=3e-4)  # a tenth of one step's update
    return losses


@pytest.mark.parametrize("tp", [1, 2])
def test_lightning(folder, tmp_path, tp):
    pytest.importorskip("lightning")
    script = ROOT / "examples" / "lightning_fsdp.py"
    found = losses_in(python(script, "--steps", 4, "--tp", tp, "--out", tmp_path / "out"))
    rows = torch.randint(50, (64, 1), generator=torch.Generator().manual_seed(0)) + torch.arange(32)
    ranks = 2 // tp
    samplers = [torch.utils.data.DistributedSampler(rows, ranks, rank) for rank in range(ranks)]
    orders = [torch.tensor(list(sampler)) for sampler in samplers]  # Lightning shuffles so
    batches = [[rows[order[4 * step : 4 * step + 4]] for order in orders] for step in range(4)]
    assert list(found.values()) == pytest.approx(one_process(folder, batches, tmp_path / "out"), abs=2e-4)


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed(folder, tmp_path, stage):
    pytest.importorskip("deepspeed", reason="needs deepspeed, which compiles its operators on the first use")
    script = ROOT / "examples" / "deepspeed_zero.py"
    found = torchrun(script, "--stage", stage, "--steps", 4, "--out", tmp_path / "out")
    batches = []
    for step in range(4):
        randoms = [torch.Generator().manual_seed(2 * step + rank) for rank in range(2)]
        parts = [(random, torch.arange(24 + 8 * n)) for n in range(2) for random in randoms]
        batches.append([torch.randint(50, (2, 1), generator=random) + span for random, span in parts])
    assert list(found.values()) == pytest.approx(one_process(folder, batches, tmp_path / "out"), abs=2e-4)
