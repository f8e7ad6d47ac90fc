"""deterministic: what it switches on and takes back, and that runs on a GPU have the same bits."""

import os

import pytest
import torch

from ligermodels.training import deterministic
from tests.recipes.runs import train, weights, without_newest


def test_the_mode_is_that_of_before_again(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch.set_deterministic_debug_mode("warn")
    try:
        with pytest.raises(KeyError), deterministic():
            assert torch.get_deterministic_debug_mode() == 2  # errors
            assert not torch.utils.deterministic.fill_uninitialized_memory
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
            raise KeyError
        assert torch.get_deterministic_debug_mode() == 1 and torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.set_deterministic_debug_mode("default")


@pytest.mark.parametrize("flags", [(), ("--deterministic",)])
def test_train_switches_it_on_where_it_is_asked_for(home, tmp_path, monkeypatch, flags):
    from ligermodels.recipes.trainer import Trainer

    modes, step = set(), Trainer.train_step

    def watched(*args, **options):
        modes.add(torch.are_deterministic_algorithms_enabled())
        return step(*args, **options)

    monkeypatch.setattr(Trainer, "train_step", watched)
    assert train(home, tmp_path / "run", "--max-steps", "1", "--max-length", "64", *flags) == 0
    assert modes == {bool(flags)} and not torch.are_deterministic_algorithms_enabled()


@pytest.mark.gpu
@pytest.mark.parametrize("more", [(), ("--lora-r", "4"), ("--precision", "bf16")])
def test_two_runs_and_a_resumed_one_have_the_same_bits(home, tmp_path, more):
    flags = ("--max-length", "256", "--max-steps", "6", "--save-steps", "3", "--deterministic", *more)
    assert train(home, tmp_path / "run", *flags) == 0
    assert train(home, tmp_path / "again", *flags) == 0
    assert train(home, without_newest(tmp_path / "run", tmp_path / "resumed"), *flags, "--resume") == 0
    results = [weights(tmp_path / name) for name in ("run", "again", "resumed")]
    assert results[0] == results[1] == results[2]
