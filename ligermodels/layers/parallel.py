"""What a layer needs where several ranks share its work: collectives with gradients, and the rank's part of a weight.

Tensor parallel (`tp`, an attribute of the layers that `ligermodels.parallel` sets) splits heads, the inside of MLPs and
the vocabulary over ranks; between these the residual stream is split over the sequence (sequence parallel). A layer
gathers its input over the ranks, computes its part, and sums the parts while they are scattered over the sequence:

    x [B, S/n, H] -> gather -> [B, S, H] -> heads or columns of this rank -> sum and scatter -> [B, S/n, H]

Context parallel (`Batch.context`) splits the sequence everywhere but in attention, for which an all-to-all turns
[B, S/n, heads, D] into [B, S, heads/n, D]: so masks, windows and packed sequences are those of one process.

Sources: Megatron-LM, https://arxiv.org/abs/1909.08053, and its sequence parallelism, https://arxiv.org/abs/2205.05198;
DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509.
"""

from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.errors import InputError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# torch 2.13 renames them
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Ranks:
    """The ranks of one mesh dimension, and collectives over them through which gradients flow.

    Every rank of the group calls the same collectives in the same order, with tensors of the same shape.
    """

    def __init__(self, mesh: "DeviceMesh"):
        self.mesh = mesh
        self.group = mesh.get_group()
        self.rank, self.size = mesh.get_local_rank(), mesh.size()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """The parts of all ranks, joined on `dim`. Backward: the ranks' gradients are summed and scattered."""
        return _Linear.apply(x, lambda x: _gathered(x, self, dim), lambda dy: _summed_and_scattered(dy, self, dim))

    def sum_and_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part, on `dim`, of the sum over the ranks. Backward: the parts' gradients are gathered."""
        return _Linear.apply(x, lambda x: _summed_and_scattered(x, self, dim), lambda dy: _gathered(dy, self, dim))

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks. Backward: the gradient as it is, which has to be the same on all ranks."""
        return _Linear.apply(x, lambda x: _summed(x, self), lambda dy: dy)

    def share(self, x: Tensor) -> Tensor:
        """x, which all ranks hold and go on with alike. Backward: a rank's share of the gradient, 1/n of it."""
        return _Linear.apply(x, lambda x: x.view_as(x), lambda dy: dy / self.size)

    def join(self, x: Tensor, dim: int) -> Tensor:
        """The parts of all ranks, joined on `dim`, for what all ranks go on with alike. Backward: a rank's part."""
        return _Linear.apply(x, lambda x: _gathered(x, self, dim), lambda dy: self.part(dy, dim))

    def part(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of x, which all ranks hold. Backward: zeros in the parts of other ranks.

        Raises InputError where the length of `dim` is no multiple of the number of ranks.
        """
        if x.shape[dim] % self.size:
            raise InputError(
                f"a length of {x.shape[dim]} cannot be split over {self.size} ranks; pad to a multiple of {self.size}"
            )
        length = x.shape[dim] // self.size
        return x.narrow(dim, self.rank * length, length)

    def scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of x, which all ranks hold. Backward: the parts' gradients are gathered."""
        return _Linear.apply(x, lambda x: self.part(x, dim).contiguous(), lambda dy: _gathered(dy, self, dim))

    def to_heads(self, x: Tensor) -> Tensor:
        """[B, S/n, heads, D] -> [B, S, heads/n, D]; fewer heads than ranks are repeated, so that each rank has one."""
        if (repeats := self.size // x.shape[2]) > 1:
            x = x.repeat_interleave(repeats, dim=2)
        return _Linear.apply(x, lambda x: _exchanged(x, self, 2, 1), lambda dy: _exchanged(dy, self, 1, 2))

    def to_tokens(self, x: Tensor) -> Tensor:
        """[B, S, heads/n, D] -> [B, S/n, heads, D]."""
        return _Linear.apply(x, lambda x: _exchanged(x, self, 1, 2), lambda dy: _exchanged(dy, self, 2, 1))


def _gathered(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    dim %= x.dim()
    out = x.new_empty(ranks.size, *x.shape)
    _all_gather(out.flatten(0, 1), x.contiguous(), group=ranks.group)
    return out.movedim(0, dim).flatten(dim, dim + 1)  # a copy, unless the dims before `dim` have size 1


def _summed_and_scattered(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    parts = x.unflatten(dim, (ranks.size, -1)).movedim(dim, 0).contiguous()
    out = torch.empty_like(parts[0])
    _reduce_scatter(out, parts.flatten(0, 1), group=ranks.group)
    return out


def _summed(x: Tensor, ranks: Ranks) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=ranks.group)
    return total


def _exchanged(x: Tensor, ranks: Ranks, split: int, join: int) -> Tensor:
    """Part i of x on dim `split` goes to rank i; what arrives is joined on dim `join`."""
    parts = x.unflatten(split, (ranks.size, -1)).movedim(split, 0).contiguous()
    out = torch.empty_like(parts)
    dist.all_to_all_single(out, parts, group=ranks.group)
    return out.movedim(0, join).flatten(join, join + 1)


class _Linear(torch.autograd.Function):
    """forward(x), whose gradient is backward(dy)."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.function = backward
        return forward(x)

    @staticmethod
    def backward(ctx, dy):
        return ctx.function(dy), None, None


def whole(parameter: Any, tp: Ranks | None) -> Any:
    """A parameter of which all ranks hold the whole, and each computes a part of the gradient."""
    if tp is None or parameter is None:
        return parameter
    from torch.distributed.tensor import Partial  # which takes half a second to import

    return parameter.to_local(grad_placements=[Partial()])


def local_part(parameter: Any, tp: Ranks | None) -> Any:
    """The rank's part of a parameter that is sharded over the ranks."""
    return parameter if tp is None or parameter is None else parameter.to_local()


def distributed(parameter: Tensor, tp: Ranks, dim: int | None) -> nn.Parameter:
    """`parameter`, which all ranks hold, as a DTensor: sharded on `dim`, or whole on each rank."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    data = parameter.detach()
    if dim is not None:
        data = tp.part(data, dim).clone(memory_format=torch.contiguous_format)
    placement = Replicate() if dim is None else Shard(dim)
    made = DTensor.from_local(data, tp.mesh, [placement], run_check=False)
    return nn.Parameter(made, requires_grad=parameter.requires_grad)


class ShardedLinear(nn.Linear):
    """A rank's part of a linear module, of which the weight is a DTensor over the ranks.

    "columns": this rank computes its part of the outputs. "rows": it reads its part of the inputs, and the outputs
    are to be summed over the ranks; the bias is the first rank's. "heads": all ranks hold the whole weight and each
    computes `heads` of its heads, which are fewer than ranks: `first` and `rows` say which rows.
    """

    def __init__(self, linear: nn.Linear, tp: Ranks, split: str, head_dim: int = 1):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.split, self.tp = split, tp
        self.first, self.rows = 0, 0
        if split == "heads":
            self.first, self.rows = tp.rank * linear.out_features // head_dim // tp.size * head_dim, head_dim
        weight_dim, bias_dim = {"columns": (0, 0), "rows": (1, None), "heads": (None, None)}[split]
        self.weight = distributed(linear.weight, tp, weight_dim)
        self.bias = None if linear.bias is None else distributed(linear.bias, tp, bias_dim)

    def parts(self) -> tuple[Tensor, Tensor | None]:
        """The weight and the bias that this rank computes with."""
        if self.split == "columns":
            return local_part(self.weight, self.tp), local_part(self.bias, self.tp)
        if self.split == "rows":
            bias = whole(self.bias, self.tp)
            return local_part(self.weight, self.tp), None if bias is None else bias * float(self.tp.rank == 0)
        weight, bias = whole(self.weight, self.tp), whole(self.bias, self.tp)
        rows = slice(self.first, self.first + self.rows)
        return weight[rows], None if bias is None else bias[rows]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, *self.parts())

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, split={self.split}, rank {self.tp.rank} of {self.tp.size}"
