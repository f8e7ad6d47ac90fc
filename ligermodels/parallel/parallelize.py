"""One call that spreads a model over a mesh."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ligermodels.errors import InputError
from ligermodels.layers import LMHead
from ligermodels.parallel.mesh import Parallel
from ligermodels.parallel.tensor import check_context, check_tensor, shard_tensors


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = torch.float32,
    reshard_after_forward: bool | int = True,
) -> nn.Module:
    """Spreads a model, which may be on the meta device, over the ranks of `mesh`, in place; returns it.

    mesh: dimensions out of dp_replicate, dp_shard, cp and tp, as `make_mesh` makes them.

    - dp_shard: FSDP2 shards parameters, gradients and optimizer states; cp ranks join in. dp_replicate: copies of that.
    - tp: heads, the inside of MLPs and experts, and the vocabulary are split; norms run on parts of the sequence.
    - cp: the sequence is split; attention exchanges heads for tokens (all-to-all), so that masks and packing hold.

    The ranks of one cp x tp group are given the same batch, whole; the model splits it.
    `model(ids, labels=labels).loss` is the mean over the labels of all ranks, the same number on each, and its backward
    leaves in `.grad` the gradients that one process would compute over all batches. FSDP sums gradients and does not
    divide them.

    param_dtype: in which layers compute, such as torch.bfloat16 beside fp32 parameters; None: the parameters' own.
    reduce_dtype: in which gradients are summed over ranks. reshard_after_forward: as in torch's `fully_shard`, for the
    blocks; final norm and head, and a tied embedding with them, stay whole between forward and backward.

    Raises InputError for a mesh that does not fit the model, before anything is changed, saying what fits, and for a
    model that is sharded already.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise InputError(f"{type(model).__name__} is sharded already; parallelize a model once, when it is made")
    parallel = Parallel(mesh)
    check_tensor(model, parallel)
    check_context(model, parallel)
    decoder = getattr(model, "decoder", None)
    if parallel.tp is not None:
        shard_tensors(model, parallel.tp)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    options: dict[str, Any] = dict(mesh=parallel.fsdp, mp_policy=policy)
    for block in _blocks(model):
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    head = getattr(model, "lm_head", None)
    if decoder is not None and isinstance(head, LMHead):
        last = [decoder.norm, head]
        if head.is_tied:
            last = [decoder.embed_tokens, *last]
        else:
            fully_shard(decoder.embed_tokens, reshard_after_forward=reshard_after_forward, **options)
        fully_shard(last, reshard_after_forward=False, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # a factor would be a multiplication of its own in NCCL
    if decoder is not None:
        decoder.context, decoder.tp, decoder.param_dtype = parallel.context, parallel.tp, param_dtype
    for module in model.modules():
        if hasattr(type(module), "parallel"):  # the model of the zoo, also inside of PEFT's wrapper
            module.parallel = parallel  # type: ignore[assignment]
    model.parallel = parallel  # type: ignore[assignment]
    return model


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The elements of the outermost ModuleLists: what FSDP gathers and frees together."""
    if isinstance(model, nn.ModuleList):
        return list(model)
    return [block for child in model.children() for block in _blocks(child)]
