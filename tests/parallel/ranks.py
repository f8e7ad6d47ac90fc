"""Ranks over gloo as forks of the test: they start at once, since they import nothing again."""

import contextlib
import datetime

import torch
import torch._dynamo
import torch.distributed as dist

from tests.processes import SECONDS, Child


def fork(folder, work, size=2):
    """Starts `size` ranks that do `work` and save its result. folder: for each call's meeting file and results."""
    meeting = folder / f"meeting-{len(list(folder.glob('meeting-*')))}"
    meeting.touch()

    def run(rank):
        options = dict(rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
        dist.init_process_group("gloo", init_method=f"file://{meeting}", **options)
        torch.save(work(), folder / f"result-{rank}")
        dist.destroy_process_group()

    return [Child(lambda rank=rank: run(rank)) for rank in range(size)]


@contextlib.contextmanager
def one_rank(folder, backend="gloo"):
    """This process as the only rank."""
    dist.init_process_group(backend, init_method=f"file://{folder / 'meeting'}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_ranks(folder, work, size=2, *, attempts=1, seconds=SECONDS):
    """Does `work` on `size` ranks, again if one ends badly; returns how often they were started."""
    for attempt in range(attempts):
        statuses = [child.wait(seconds) for child in fork(folder, work, size)]
        if not any(statuses):
            return attempt + 1
    raise AssertionError(
        f"the ranks failed in {attempts} attempts, the last with exit statuses {statuses} (negative: of a signal); "
        "what they raised is in the captured stderr"
    )


def results_of_ranks(folder, work, size=2, **options):
    """What `work` returns on each rank."""
    on_ranks(folder, work, size, **options)
    return [torch.load(folder / f"result-{rank}") for rank in range(size)]
