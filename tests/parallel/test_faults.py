"""Runs whose ranks are killed, and disks that fail: the last complete checkpoint is there, and nothing hangs."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ligermodels import CheckpointError
from ligermodels.parallel import Checkpoints
from tests.parallel.ranks import fork, on_ranks
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
        for wait in (True, False):
            with pytest.raises(CheckpointError, match=r"(?s)step 2 could not.*rank 1: OSError.*No space.*unchanged"):
                checkpoints.save(2, wait=wait)
                checkpoints.save(3)  # which waits for it
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*the random states of the ranks")
def test_kills_at_random_moments_leave_a_whole_checkpoint(tmp_path):
    """Weights and moments of step n are filled with n: a checkpoint that is mixed of two steps would show."""
    folder, seed, seen = tmp_path / "run", random.Random(0), []

    def make():
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(20)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
        return model, optimizer

    def held(model, optimizer):
        return [*model.parameters(), *(state["momentum_buffer"] for state in optimizer.state.values())]

    def work():
        model, optimizer = make()
        checkpoints = Checkpoints(folder, model, optimizer, keep=1)
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        step = checkpoints.load()
        while True:
            step += 1
            with torch.no_grad():
                for tensor in held(model, optimizer):
                    tensor.fill_(step)
            checkpoints.save(step, wait=step % 2 == 0)

    for _ in range(12):
        children, end = fork(tmp_path, work), time.monotonic() + 100
        last = f"step-{seen[-1] if seen else 0:08d}"
        try:
            while not any(path.suffix != ".partial" and path.name > last for path in folder.glob("step-*")):
                assert time.monotonic() < end, "no further checkpoint became complete"
                time.sleep(0.01)
            time.sleep(seed.uniform(0, 0.5))
        finally:
            for child in children:
                child.signal(signal.SIGKILL)
        assert [child.wait() for child in children] == [-signal.SIGKILL] * 2
        model, optimizer = make()
        with Checkpoints(folder, model, optimizer) as checkpoints:
            step = checkpoints.load()
        assert step > (seen[-1] if seen else 0)
        assert all((tensor == step).all() for tensor in held(model, optimizer))
        assert len(held(model, optimizer)) == 80
        seen.append(step)
