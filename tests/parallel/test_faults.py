"""Runs whose ranks are killed, and disks that fail: the last complete checkpoint is there, and nothing hangs."""

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ligermodels import CheckpointError
from ligermodels.parallel import Checkpoints
from tests.parallel.ranks import on_ranks
from tests.parallel.train import Run, sharded

STEPS = 7


def first_time(folder, fault):
    mark = folder / f"died-{fault}"
    return not mark.exists() and not mark.touch()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_while_writing(folder, step):
    """The next file that is synced in the checkpoint of `step` is cut in half, and the process ends."""
    real = os.fsync

    def fsync(descriptor):
        is_this_step = f"step-{step:08d}.partial" in os.readlink(f"/proc/self/fd/{descriptor}")
        if is_this_step and first_time(folder, "in a write"):
            os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            die()
        real(descriptor)

    os.fsync = fsync


def train(folder, faults=False):
    """Checkpoints every second step. With faults, rank 1 dies before step 2 and rank 0 in the write of step 4."""
    rank = dist.get_rank()
    run = Run(spread=sharded, rank=rank)
    with run.checkpoints(folder / "run") as checkpoints:
        for step in range(checkpoints.load(), STEPS):
            if faults and (rank, step) == (1, 2) and first_time(folder, "in a step"):
                die()
            with (folder / f"losses-{rank}").open("a") as file:
                file.write(f"{step} {run.step().hex()}\n")
            if step % 2 == 1:
                if faults and (rank, step) == (0, 3):
                    die_while_writing(folder, step + 1)
                checkpoints.save(step + 1, wait=False)
    weights = run.weights()
    if rank == 0:
        torch.save(weights, folder / "weights.pt")


def losses(folder):
    """{(rank, step): loss}; a step that was taken twice had the same loss both times."""
    found = {}
    for rank in range(2):
        for line in (folder / f"losses-{rank}").read_text().splitlines():
            step, loss = line.split()
            assert found.setdefault((rank, int(step)), loss) == loss, f"step {step} went otherwise after the restart"
    return found


def test_a_killed_run_goes_on_with_the_same_bits(tmp_path):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    undisturbed.mkdir()
    killed.mkdir()
    on_ranks(undisturbed, lambda: train(undisturbed))
    assert on_ranks(killed, lambda: train(killed, faults=True), attempts=3) == 3
    assert losses(killed) == losses(undisturbed) and len(set(losses(killed).values())) == 2 * STEPS
    weights, expected = (torch.load(folder / "weights.pt") for folder in (killed, undisturbed))
    assert weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in expected)
    assert sorted(path.name for path in (killed / "run").iterdir()) == ["step-00000004", "step-00000006"]


def disk_full(*args):
    raise OSError(28, "No space left on device")


def test_a_rank_that_cannot_write_stops_no_other(tmp_path):
    folder = tmp_path / "run"

    def work():
        run = Run("sgd", spread=sharded)
        model, optimizer = run.model, run.optimizer
        checkpoints = Checkpoints(folder, model, optimizer, keep=1)
        checkpoints.save(1)
        fsync = os.fsync
        if dist.get_rank() == 1:
            os.fsync = disk_full
        for wait, following in ((True, None), (False, lambda: checkpoints.save(3)), (False, checkpoints.load)):
            with pytest.raises(CheckpointError, match=r"(?s)step 2 could not.*rank 1: OSError.*No space.*unchanged"):
                checkpoints.save(2, wait=wait)
                following()  # waits for the save, and raises what it raised
        os.fsync = fsync
        rename = Path.rename
        if dist.get_rank() == 0:
            Path.rename = disk_full
        with pytest.raises(CheckpointError, match=r"(?s)step 2 could not.*No space"):
            checkpoints.save(2, wait=False)
            checkpoints.close()
        Path.rename = rename
        with Checkpoints(folder, model, optimizer, keep=1) as checkpoints:
            assert checkpoints.load() == 1
            assert [path.name for path in folder.iterdir()] == ["step-00000001"]
            dist.barrier()
            checkpoints.save(2)

    on_ranks(tmp_path, work)
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]
