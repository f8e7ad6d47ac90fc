"""What the processes of a run sum, gather and raise together: alone, over a mesh of all, over a mesh of some."""

import errno

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from ligermodels.errors import HubError, InputError, LigermodelsError
from ligermodels.parallel import make_mesh
from ligermodels.parallel.mesh import Parallel
from ligermodels.processes import Processes
from ligermodels.recipes.data.batches import BadRowError
from tests.parallel.ranks import on_ranks


def test_one_process_needs_no_group():
    one = Processes()
    assert (one.is_main, one.batch_rank, one.batch_ranks) == (True, 0, 1)
    assert (one.sum(1, 2.5), one.gather("a"), one.from_main(lambda: 3)) == ([1, 2.5], ["a"], 3)
    assert Processes.of_tensors([torch.ones(2)]) == one
    with pytest.raises(ValueError, match=r"^bad$"), one.raise_on_all():
        raise ValueError("bad")


def raises(processes, failing, error):
    """What each process raises where those of the ranks `failing` raise `error`."""
    try:
        with processes.raise_on_all():
            if dist.get_rank() in failing:
                raise error
    except Exception as raised:
        return raised
    return None


def check_world():
    rank, mesh = dist.get_rank(), make_mesh(cp=2)
    all4 = Parallel(mesh).processes
    assert (all4.rank, all4.size, all4.is_main, all4.device) == (rank, 4, rank == 0, torch.device("cpu"))
    assert (all4.batch_rank, all4.batch_ranks) == (rank // 2, 2)
    assert all4.sum(rank // 2 + 1, 0.5) == [3, 1]  # of the two batches, not of the four ranks
    assert all4.gather({"rank": rank}) == [{"rank": n} for n in range(4)]
    assert all4.from_main(lambda: f"made by {rank}") == "made by 0"
    own, full = BadRowError("rows.jsonl:6: odd"), HubError("full")
    full.errno = errno.ENOSPC
    found = raises(all4, [1], own)
    assert found is own if rank == 1 else (type(found), str(found)) == (BadRowError, "rank 1: rows.jsonl:6: odd")
    assert raises(all4, [0, 2], full).errno == errno.ENOSPC
    found = raises(all4, [3], KeyError("x"))
    others = (LigermodelsError, "rank 3: KeyError: 'x'")
    assert type(found) is KeyError if rank == 3 else (type(found), str(found)) == others
    assert raises(all4, [], own) is None
    with pytest.raises(InputError, match="no"):
        all4.from_main(lambda: (_ for _ in ()).throw(InputError("no")))


def check_part():
    """Two of the four ranks, and a mesh whose ranks do not ascend."""
    rank = dist.get_rank()
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "tp"))
    half = Processes.of_mesh(halves["tp"])
    assert (half.rank, half.size, half.batch_ranks) == (rank % 2, 2, 1)
    assert half.gather(rank) == [rank // 2 * 2, rank // 2 * 2 + 1]
    if rank >= 2:  # the other two take no part
        found = raises(half, [3], InputError("odd"))
        assert str(found) == ("odd" if rank == 3 else "rank 3: odd")
        assert half.from_main(lambda: rank) == 2
    dist.barrier()
    row = DeviceMesh("cpu", [[1, 3]])  # of two groups, the first of one rank
    if rank in (1, 3):
        assert Processes.of_mesh(row).from_main(lambda: rank) == 1
    dist.barrier()
    mesh = DeviceMesh("cpu", [[3, 0], [1, 2]])
    part = distribute_tensor(torch.ones(2), halves["tp"], [Replicate()])
    whole = distribute_tensor(torch.ones(2), mesh, [Replicate()] * 2)
    across = distribute_tensor(torch.ones(2), halves["half"], [Replicate()])
    for tensors in ([part, whole], [whole, torch.ones(1)], [part, across]):
        every = Processes.of_tensors(tensors)
        assert (every.size, every.gather(rank), every.from_main(lambda: rank)) == (4, [0, 1, 2, 3], 0)
    assert Processes.of_tensors([part]).size == 2


def test_ranks(tmp_path):
    def work():
        check_world()
        check_part()

    on_ranks(tmp_path, work, 4)
