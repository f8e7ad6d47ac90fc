"""Runs whose ranks are killed, and disks that fail: the last complete checkpoint is there, and nothing hangs."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ligermodels import CheckpointError
from ligermodels.parallel import Checkpoints
from tests.parallel import train
from tests.parallel.ranks import fork, on_ranks

STEPS = 7


def losses(folder):
    """{(rank, step): loss}; a step that was taken twice had the same loss both times."""
    found = {}
    for rank in range(2):
        for line in (folder / f"losses-{rank}").read_text().splitlines():
            step, loss = line.split()
            assert found.setdefault((rank, int(step)), loss) == loss, f"step {step} went otherwise after the restart"
    return found


def check_same_run(folder, undisturbed):
    assert losses(folder) == losses(undisturbed)
    weights, expected = torch.load(folder / "weights.pt"), torch.load(undisturbed / "weights.pt")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    on_ranks(folder, lambda: train.main(folder, STEPS))
    assert len(set(losses(folder).values())) == 2 * STEPS
    return folder


def test_a_killed_run_goes_on_with_the_same_bits(tmp_path, monkeypatch, undisturbed):
    faults = ["step:2:1", "write:4:0"]
    monkeypatch.setattr(sys, "argv", [*sys.argv, *faults])
    assert on_ranks(tmp_path, lambda: train.main(tmp_path, STEPS), attempts=3) == 3
    assert all((tmp_path / f"struck-{fault}").exists() for fault in faults)
    check_same_run(tmp_path, undisturbed)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-00000004", "step-00000006"]


@pytest.mark.slow
def test_torchrun_restarts_a_killed_run(tmp_path, undisturbed):
    faults = ["write:2:0", "step:3:1", "write:6:1"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "3", train.__file__, str(tmp_path), str(STEPS), *faults]
    root = str(Path(__file__).parents[2])
    # torchrun's own store survives a restart, and with it the addresses of dead processes, which torch then connects
    # to (pytorch#135712; seen on 2.13 with init_process_group("gloo") alone). This has it make a new one.
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    run = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        _, errors = run.communicate(timeout=300)
    finally:
        run.terminate()  # it then ends its ranks, as a kill would not
    assert run.returncode == 0, errors[-3000:]
    assert all((tmp_path / f"struck-{fault}").exists() for fault in faults)
    check_same_run(tmp_path, undisturbed)


def disk_full(*args):
    raise OSError(28, "No space left on device")


def test_a_rank_that_cannot_write_stops_no_other(tmp_path):
    folder = tmp_path / "run"

    def work():
        model = train.make_model(None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
