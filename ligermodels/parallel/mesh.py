"""The mesh of ranks: its dimensions, their groups, and what a forward needs to know of them."""

import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ligermodels.errors import InputError
from ligermodels.layers.losses import num_labels
from ligermodels.layers.parallel import MeshGroup
from ligermodels.processes import Processes

DIMS = ("dp_replicate", "dp_shard", "ep", "cp", "tp")
"""Names of a mesh's dimensions, outermost first: copies of the model, FSDP, and expert, context and tensor parallel."""


def make_mesh(
    *, dp_replicate: int = 1, dp_shard: int = -1, ep: int = 1, cp: int = 1, tp: int = 1, device_type: str | None = None
) -> DeviceMesh:
    """A mesh over all processes that torchrun has started; dp_shard=-1 takes those that the others leave.

    device_type: "cuda" where there is a GPU, else "cpu". Joins the processes (NCCL, or gloo on the CPU) if nobody has,
    and makes the GPU of LOCAL_RANK the current one.
    Raises InputError for sizes that do not multiply to the number of processes.
    """
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    if device_type == "cuda" and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        if "WORLD_SIZE" not in os.environ:
            raise InputError(
                "make_mesh: no processes were started; run the script by `torchrun --nproc-per-node N SCRIPT`, or call "
                "torch.distributed.init_process_group before"
            )
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    sizes, world = [dp_replicate, dp_shard, ep, cp, tp], dist.get_world_size()
    others = dp_replicate * ep * cp * tp
    if dp_shard == -1 and world % others == 0:
        sizes[1] = world // others
    if min(sizes) < 1 or sizes[1] * others != world:
        asked = ", ".join(f"{name}={size}" for name, size in zip(DIMS, sizes, strict=True))
        raise InputError(f"make_mesh: {asked} do not multiply to the {world} processes that there are")
    return init_device_mesh(device_type, tuple(sizes), mesh_dim_names=DIMS)


class Parallel:
    """How a model is spread over the ranks of a mesh; `model.parallel` after `parallelize`.

    mesh: as given. fsdp: the mesh of FSDP, 1-D (dp_shard with ep or cp) or 2-D with dp_replicate; experts_fsdp: that of
    experts under ep, which splits them by number: without it. data: the ranks among which all tokens of a batch are
    spread. ep, cp, tp: those of expert, context and tensor parallel; None without.
    """

    def __init__(self, mesh: DeviceMesh):
        names = mesh.mesh_dim_names
        if names is None and mesh.ndim == 1:
            mesh = DeviceMesh(mesh.device_type, mesh.mesh, mesh_dim_names=("dp_shard",))
            names = ("dp_shard",)
        if not names or list(names) != [name for name in DIMS if name in names] or "dp_shard" not in names:
            raise InputError(
                f"the mesh has dimensions {names}; expected dp_shard, which may be 1, and any of {', '.join(DIMS)}, in "
                "this order, as make_mesh makes them"
            )
        ranks = mesh.mesh.flatten().tolist()
        if ranks != sorted(ranks):
            raise InputError(f"the mesh lists its ranks as {ranks[:8]}; they have to ascend, since torch's groups do")
        self.mesh, self.processes = mesh, Processes.of_mesh(mesh)
        sizes = dict(zip(names, mesh.shape, strict=True))
        self.ep, self.cp, self.tp = (
            MeshGroup(mesh[name]) if sizes.get(name, 1) > 1 else None for name in ("ep", "cp", "tp")
        )
        if self.ep is not None and max(sizes.get("cp", 1), sizes.get("tp", 1)) > 1:
            raise InputError("a mesh with ep > 1 has cp=1 and tp=1: experts are spread over ranks with other batches")
        other = "ep" if self.ep is not None else "cp" if self.cp is not None else None
        # torch has no public name for joining dims; torchtitan calls this one too.
        self.fsdp = data = mesh["dp_shard"] if other is None else mesh["dp_shard", other]._flatten("fsdp")
        self.experts_fsdp = mesh["dp_shard"]
        if sizes.get("dp_replicate", 1) > 1:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a later way to combine dims, which torch 2.11 does not have
                self.fsdp = mesh["dp_replicate", "dp_shard" if other is None else "fsdp"]
                self.experts_fsdp = mesh["dp_replicate", "dp_shard"]
            data = self.fsdp._flatten("data")
        self.data = MeshGroup(data)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Parallel":
        return self

    @property
    def shards(self) -> int:
        """The length of a sequence must be a multiple of this."""
        return (1 if self.cp is None else self.cp.size) * (1 if self.tp is None else self.tp.size)

    def count(
        self, labels: Iterable[Tensor] | Tensor, cu_seqlens: Sequence[Tensor | None] | Tensor | None = None
    ) -> Tensor:
        """The number of labels that count in these micro-batches of all ranks, fp32: `num_items_in_batch` of a step.

        labels: [B, S] each, as they go into the model. cu_seqlens: those of each that is packed.
        """
        labels = [labels] if isinstance(labels, Tensor) else list(labels)
        ends = cu_seqlens if isinstance(cu_seqlens, Sequence) else [cu_seqlens] * len(labels)
        count = torch.stack([num_labels(batch, end) for batch, end in zip(labels, ends, strict=True)]).sum().float()
        dist.all_reduce(count, group=self.data.group)
        return count / (1 if self.cp is None else self.cp.size)

    def total(self, targets: Tensor) -> Tensor:
        """The number of targets other than -100, summed over all ranks, fp32."""
        count = (targets != -100).sum().float()
        dist.all_reduce(count, group=self.data.group)
        return count

    def check_length(self, length: int) -> None:
        """Raises InputError if a row of this length cannot be split over the ranks."""
        if length % self.shards:
            raise InputError(
                f"{length} tokens a row cannot be split over {self.shards} ranks (context times tensor parallel): pad "
                f"to a multiple of {self.shards}, with labels of -100"
            )
