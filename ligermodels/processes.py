"""The processes of a run: what they sum, gather and raise together. One process needs no process group."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ligermodels.errors import LigermodelsError

_T = TypeVar("_T")
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Processes:
    """The processes of a run, of which this is the one of `rank`. All call the same methods in the same order.

    device: where this process computes. mesh: over which the model is sharded; None for one process.
    ranks_per_batch: ranks that compute one batch together, cp x tp; other ranks have other batches.
    groups: torch process groups. A value that is passed on through each of them in turn reaches all processes.
    """

    device: torch.device = _CPU
    rank: int = 0
    size: int = 1
    ranks_per_batch: int = 1
    mesh: Any = None
    groups: tuple[Any, ...] = ()

    @classmethod
    def of_group(cls, group: Any) -> "Processes":
        """The processes of a torch process group."""
        return cls(rank=group.rank(), size=group.size(), groups=(group,))

    @classmethod
    def of_mesh(cls, mesh: Any) -> "Processes":
        """The processes of a DeviceMesh, in ascending order of their ranks."""
        from torch.distributed import get_rank, get_world_size, group

        ranks = sorted(mesh.mesh.flatten().tolist())
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
        is_cuda = mesh.device_type == "cuda"
        return cls(
            torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device(mesh.device_type),
            ranks.index(get_rank()),
            len(ranks),
            sizes.get("cp", 1) * sizes.get("tp", 1),
            mesh,
            (group.WORLD,) if len(ranks) == get_world_size() else tuple(map(mesh.get_group, range(mesh.ndim))),
        )

    @classmethod
    def of_tensors(cls, tensors: Iterable[Any]) -> "Processes":
        """The processes that have the shards of DTensors; one process if there is none among the tensors.

        These are the processes of the largest mesh or, if another mesh has further ones, all of the job. The mesh's own
        groups are used, since processes outside of it do not take part.
        """
        meshes = {tensor.device_mesh: None for tensor in tensors if hasattr(tensor, "device_mesh")}
        if not meshes:
            return cls()
        from torch.distributed import group

        ranks = {mesh: set(mesh.mesh.flatten().tolist()) for mesh in meshes}
        largest = max(meshes, key=lambda mesh: len(ranks[mesh]))
        everyone = set().union(*ranks.values()) <= ranks[largest]
        return cls.of_mesh(largest) if everyone else cls.of_group(group.WORLD)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def batch_ranks(self) -> int:
        """The number of different batches in a forward of all ranks: dp_replicate x dp_shard x ep."""
        return self.size // self.ranks_per_batch

    @property
    def batch_rank(self) -> int:
        """The index of this rank's batch among them."""
        return self.rank // self.ranks_per_batch

    def sum(self, *numbers: float) -> list[float]:
        """Each number summed over the batches of all ranks, in fp64."""
        return self.sum_tensor(torch.tensor(numbers, dtype=torch.float64, device=self.device)).tolist()

    def sum_tensor(self, x: torch.Tensor) -> torch.Tensor:
        """The same of a tensor on `device`, in place and without synchronising with the host."""
        for group in self.groups:
            torch.distributed.all_reduce(x, group=group)
        return x.div_(self.ranks_per_batch)

    def gather(self, value: Any) -> list[Any]:
        """The value of each process, by rank. They are pickled. Returns when all processes have called this."""
        values = {self.rank: value}
        for group in self.groups:
            found: list[Any] = [None] * group.size()
            torch.distributed.all_gather_object(found, values, group)
            values = {rank: value for part in found for rank, value in part.items()}
        return [values[rank] for rank in sorted(values)]

    def from_main(self, work: Callable[[], _T]) -> _T:
        """The result of `work`, which rank 0 does, on all ranks. An error is raised on all."""
        result: Any = None
        with self.raise_on_all():
            if self.is_main:
                result = work()
        if len(self.groups) != 1:
            return self.gather(result)[0]
        found = [result]  # a broadcast takes the memory of one result, and a gather that of `size`
        torch.distributed.broadcast_object_list(found, group=self.groups[0], group_src=0)
        return found[0]

    @contextlib.contextmanager
    def raise_on_all(self) -> Iterator[None]:
        """For a block that all processes run: at its end, an exception of one process is raised in all of them.

        The process that failed raises its own exception. The others raise one of the same class, if it is of
        ligermodels, that names the rank.
        """
        if not self.groups:
            yield
            return
        failure: Exception | None = None
        report: Any = None
        try:
            yield
        except Exception as error:
            failure, ours = error, isinstance(error, LigermodelsError)
            text = f"rank {torch.distributed.get_rank()}: {'' if ours else f'{type(error).__name__}: '}{error}"
            report = type(error) if ours else LigermodelsError, text, getattr(error, "errno", None)
        reports = [found for found in self.gather(report) if found is not None]
        if failure is not None:
            raise failure
        if reports:
            kind, text, errno = reports[0]
            other: Any = kind(text)
            if errno is not None:
                other.errno = errno
            raise other
