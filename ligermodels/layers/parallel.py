"""Collectives with gradients for layers whose work is split over ranks, and the ranks' shards of weights.

Tensor parallel (`tp`, an attribute of the layers that `ligermodels.parallel` sets) splits heads, the columns of MLPs
and the vocabulary over ranks. Between these layers the residual stream is split over the sequence (sequence parallel):

    x [B, S/n, H] -> all-gather -> [B, S, H] -> this rank's heads or columns -> reduce-scatter -> [B, S/n, H]

Context parallel (`Batch.cp`) splits the sequence everywhere except in mixers. There an all-to-all turns
[B, S/n, heads, D] into [B, S, heads/n, D], so masks, windows, packed sequences and states work as in one process.

Sources: Megatron-LM, https://arxiv.org/abs/1909.08053, and its sequence parallelism, https://arxiv.org/abs/2205.05198;
DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509.
"""

import copy
import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.kernels._triton import once_differentiable

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# torch 2.13 renames them
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class MeshGroup:
    """The ranks of one mesh dimension, and collectives over them with gradients.

    Every rank of the group calls the same collectives in the same order, with tensors of the same shape.

    leaves: set where this is tensor parallel without FSDP: {id of a parameter: this rank's part of it}.
    """

    leaves: "dict[int, Leaf] | None" = None

    def __init__(self, mesh: "DeviceMesh"):
        self.mesh = mesh
        self.group = mesh.get_group()
        self.rank, self.size = mesh.get_local_rank(), mesh.size()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """All ranks' shards, concatenated on `dim`. Backward: gradients are reduce-scattered."""
        return _Collective.apply(x, lambda x: _all_gather(x, self, dim), lambda dy: _reduce_scatter(dy, self, dim))

    def all_gather_replicated(self, x: Tensor, dim: int) -> Tensor:
        """The same where all ranks then compute the same. Backward: this rank's shard of the gradient."""
        return _Collective.apply(x, lambda x: _all_gather(x, self, dim), lambda dy: self.shard(dy, dim))

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's shard, on `dim`, of the sum over ranks. Backward: gradients are all-gathered."""
        return _Collective.apply(x, lambda x: _reduce_scatter(x, self, dim), lambda dy: _all_gather(dy, self, dim))

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks. Backward: the identity; the gradient must be the same on all ranks."""
        return _Collective.apply(x, lambda x: _all_reduce(x, self), lambda dy: dy)

    def divide_gradient(self, x: Tensor) -> Tensor:
        """x, with which all ranks compute the same. Backward: 1/n of the gradient, so that the ranks' sum is right."""
        return _Collective.apply(x, lambda x: x.view_as(x), lambda dy: dy / self.size)

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's shard of x, a view; x is the same on all ranks. Backward: zeros outside of the shard.

        Raises InputError where the length of `dim` is no multiple of the number of ranks.
        """
        if x.shape[dim] % self.size:
            raise InputError(
                f"a length of {x.shape[dim]} cannot be split over {self.size} ranks; pad to a multiple of {self.size}"
            )
        length = x.shape[dim] // self.size
        return x.narrow(dim, self.rank * length, length)

    def scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's shard of x, which is the same on all ranks. Backward: gradients are all-gathered."""
        return _Collective.apply(x, lambda x: self.shard(x, dim).contiguous(), lambda dy: _all_gather(dy, self, dim))

    def largest(self, number: int) -> int:
        """The largest number of any rank. The host waits for it."""
        result = torch.tensor(number, device=self.mesh.device_type)
        dist.all_reduce(result, op=dist.ReduceOp.MAX, group=self.group)
        return int(result.item())

    def to_heads(self, x: Tensor) -> Tensor:
        """[B, S/n, heads, D] -> [B, S, heads/n, D]. Fewer heads than ranks are repeated: each rank gets one."""
        if (repeats := self.size // x.shape[2]) > 1:
            x = x.repeat_interleave(repeats, dim=2)
        return _Collective.apply(x, lambda x: _all_to_all(x, self, 2, 1), lambda dy: _all_to_all(dy, self, 1, 2))

    def to_tokens(self, x: Tensor) -> Tensor:
        """[B, S, heads/n, D] -> [B, S/n, heads, D]."""
        return _Collective.apply(x, lambda x: _all_to_all(x, self, 1, 2), lambda dy: _all_to_all(dy, self, 2, 1))


def _all_gather(x: Tensor, group: MeshGroup, dim: int) -> Tensor:
    dim %= x.dim()
    if math.prod(x.shape[:dim]) == 1:  # the shards lie one after the other: no copy, and fewer views for the host
        out = x.new_empty(*x.shape[:dim], group.size * x.shape[dim], *x.shape[dim + 1 :])
        _all_gather_single(out.view(-1), x.reshape(-1), group=group.group)
        return out
    out = x.new_empty(group.size, *x.shape)
    _all_gather_single(out.flatten(0, 1), x.contiguous(), group=group.group)
    return out.movedim(0, dim).flatten(dim, dim + 1)


def _shards(x: Tensor, group: MeshGroup, dim: int) -> Tensor:
    """x [..., n S, ...], split on `dim`: [n, ..., S, ...], contiguous."""
    return x.unflatten(dim, (group.size, -1)).movedim(dim, 0).contiguous()


def _reduce_scatter(x: Tensor, group: MeshGroup, dim: int) -> Tensor:
    dim %= x.dim()
    length = x.shape[dim] // group.size
    shards = x if math.prod(x.shape[:dim]) == 1 else _shards(x, group, dim)
    out = x.new_empty(*x.shape[:dim], length, *x.shape[dim + 1 :])
    _reduce_scatter_single(out.view(-1), shards.reshape(-1), group=group.group)
    return out


def _all_reduce(x: Tensor, group: MeshGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group.group)
    return total


def _all_to_all(x: Tensor, group: MeshGroup, split: int, join: int) -> Tensor:
    """Sends the i-th shard of x on dim `split` to rank i; concatenates what arrives on dim `join`."""
    shards = _shards(x, group, split)
    out = torch.empty_like(shards)
    dist.all_to_all_single(out, shards, group=group.group)
    return out.movedim(0, join).flatten(join, join + 1)


class _Collective(torch.autograd.Function):
    """forward(x), whose gradient is backward(dy)."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.function = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return ctx.function(dy), None, None


def replicated(parameter: Any, tp: MeshGroup | None) -> Any:
    """A parameter that is replicated over the ranks, each of which computes a part of its gradient, to be summed."""
    return parameter if tp is None or parameter is None else _local_part(parameter, tp, sums=True)


def local_shard(parameter: Any, tp: MeshGroup | None) -> Any:
    """This rank's shard of a parameter that is sharded over the ranks."""
    return parameter if tp is None or parameter is None else _local_part(parameter, tp, sums=False)


def _local_part(parameter: Any, tp: MeshGroup, *, sums: bool) -> Tensor:
    """What this rank has of a DTensor, with a gradient. sums: the gradient is a sum over the ranks.

    `DTensor.to_local` does the same, and takes the host four times as long; by it steps over four GPUs were bound.
    """
    if tp.leaves is None or not parameter.requires_grad:
        return _LocalPart.apply(parameter, tp if sums else None)
    leaf, local = tp.leaves.get(id(parameter)), parameter._local_tensor
    if leaf is None or leaf.tensor.data_ptr() != local.data_ptr() or leaf.tensor.dtype != local.dtype:
        tp.leaves[id(parameter)] = leaf = Leaf(parameter, tp if sums else None)
    return leaf.tensor


class _LocalPart(torch.autograd.Function):
    """What this rank has of a DTensor. Backward: the gradient, summed over the ranks of sum_over, as a DTensor."""

    @staticmethod
    def forward(ctx, parameter, sum_over):
        ctx.spec, ctx.sum_over = parameter._spec, sum_over
        local = parameter.to_local()
        return local.view_as(local)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        if ctx.sum_over is not None:
            gradient = _all_reduce(gradient, ctx.sum_over)
        return _dtensor(gradient, ctx.spec), None


class Leaf:
    """This rank's part of a DTensor parameter, `tensor`, as a leaf of autograd over the same memory.

    The parameter gets each gradient of the leaf, summed over the ranks of sum_over, as FSDP2's parameters get theirs:
    hooks that wait for an accumulated gradient run, others do not.
    """

    def __init__(self, parameter: Any, sum_over: MeshGroup | None):
        self.parameter, self.sum_over = parameter, sum_over
        self.tensor = parameter._local_tensor.detach().requires_grad_()
        this: Any = weakref.ref(self)  # a cycle through the hooks of a tensor would never be freed
        self.tensor.register_post_accumulate_grad_hook(lambda _: this().accumulate_into_parameter())

    def accumulate_into_parameter(self) -> None:
        parameter, gradient = self.parameter, self.tensor.grad
        self.tensor.grad = None
        if self.sum_over is not None:
            dist.all_reduce(gradient, group=self.sum_over.group)
        if parameter.grad is None:
            parameter.grad = _dtensor(gradient, parameter._spec)
        else:
            parameter.grad._local_tensor.add_(gradient)
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            hook(parameter)


def _dtensor(local: Tensor, spec: Any) -> Any:
    """A DTensor, as FSDP2 makes them: `DTensor.from_local` would compute the spec again."""
    from torch.distributed.tensor import DTensor  # which takes half a second to import

    return DTensor(local, copy.copy(spec), requires_grad=False)


def local_rows(parameter: Any, tp: MeshGroup | None) -> Any:
    """This rank's rows [R/n, ...] of a parameter that `to_dtensor` has sharded by `row_parts`."""
    return parameter if tp is None or parameter is None else local_shard(parameter, tp).select(1, 0)


def to_dtensor(
    parameter: Tensor, tp: MeshGroup, dim: int | None, row_parts: Sequence[int] | None = None
) -> nn.Parameter:
    """`parameter`, which is the same on all ranks, as a DTensor: sharded on `dim`, or replicated (None).

    row_parts: the numbers of rows of parts, such as q, k and v, each of which is split over the ranks. A parameter
    [R, ...] is then the DTensor [R/n, n, ...], of which rank i has [:, i]: its rows of every part. The module keeps
    `row_parts`, by which checkpoint/weights.py finds the rows of the whole parameter.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    data = parameter.detach()
    if row_parts is not None:
        dim, data = 1, torch.cat([tp.shard(part, 0) for part in data.split(list(row_parts))])[:, None]
    elif dim is not None:
        data = tp.shard(data, dim).clone(memory_format=torch.contiguous_format)
    placement = Replicate() if dim is None else Shard(dim)
    dtensor = DTensor.from_local(data, tp.mesh, [placement], run_check=False)
    return nn.Parameter(dtensor, requires_grad=parameter.requires_grad)


class ShardedLinear(nn.Linear):
    """This rank's part of a linear layer, whose weight is a DTensor over the ranks.

    split: "columns": each rank computes some of the outputs; with `row_parts`, some of each part, such as q, k and v.
    "rows": each rank reads some of the inputs, and the outputs are summed over ranks later; only the first rank adds
    the bias. "heads": there are fewer heads than ranks, or one for all: weight and bias are replicated, and this rank
    computes one head: `rows` rows from row `first` on. head_dim: the rows of a head.
    """

    def __init__(
        self,
        linear: nn.Linear,
        tp: MeshGroup,
        split: str,
        head_dim: int = 1,
        row_parts: Sequence[int] | None = None,
    ):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.split, self.tp, self.row_parts = split, tp, row_parts
        self.first, self.rows = 0, 0
        if split == "heads":
            self.first, self.rows = tp.rank * linear.out_features // head_dim // tp.size * head_dim, head_dim
        weight_dim, bias_dim = {"columns": (0, 0), "rows": (1, None), "heads": (None, None)}[split]
        self.weight = to_dtensor(linear.weight, tp, weight_dim, row_parts)
        self.bias = None if linear.bias is None else to_dtensor(linear.bias, tp, bias_dim, row_parts)

    @property
    def may_be_joint(self) -> bool:
        """Whether its shards may lie beside those of other layers: they are rows that FSDP does not gather."""
        weight: Any = self.weight
        return self.split == "columns" and self.row_parts is None and weight.device_mesh.ndim == 1

    def parts(self) -> tuple[Tensor, Tensor | None]:
        """The weight and the bias that this rank computes with."""
        if self.row_parts is not None:
            return local_rows(self.weight, self.tp), local_rows(self.bias, self.tp)
        if self.split == "columns":
            return local_shard(self.weight, self.tp), local_shard(self.bias, self.tp)
        if self.split == "rows":
            bias = replicated(self.bias, self.tp)
            return local_shard(self.weight, self.tp), None if bias is None else bias * float(self.tp.rank == 0)
        weight, bias = replicated(self.weight, self.tp), replicated(self.bias, self.tp)
        rows = slice(self.first, self.first + self.rows)
        return weight[rows], None if bias is None else bias[rows]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, *self.parts())

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, split={self.split}, rank {self.tp.rank} of {self.tp.size}"
