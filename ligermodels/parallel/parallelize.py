"""One call that spreads a model over a mesh."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ligermodels.errors import InputError
from ligermodels.layers import LMHead
from ligermodels.layers.base import fp32_layers, fp32_names
from ligermodels.layers.linear import JointProjections
from ligermodels.layers.moe import all_experts
from ligermodels.parallel.experts import check_experts, shard_experts
from ligermodels.parallel.mesh import Parallel
from ligermodels.parallel.tensor import check_context, check_tensor, shard_tensors


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = torch.float32,
    reshard_after_forward: bool | int = True,
    fp8: Any = None,
) -> nn.Module:
    """Spreads a model, which may be on the meta device, over the ranks of `mesh`, in place; returns it.

    mesh: dimensions out of dp_replicate, dp_shard, ep, cp and tp, as `make_mesh` makes them.

    - dp_shard: FSDP2 shards parameters, gradients and optimizer states; cp ranks join in. dp_replicate: copies of that.
    - ep: the experts of mixtures are split by number over ranks that have batches of their own: each gets the tokens of
      all, and computes its experts. FSDP over dp_shard alone shards these, and over ep too all other parameters.
    - tp: heads, the inside of MLPs and experts, and the vocabulary are split; norms run on parts of the sequence. Under
      tp alone, FSDP takes no part unless it has to cast to param_dtype, or a tower has weights that tp does not split.
    - cp: the sequence is split; attention exchanges heads for tokens (all-to-all), so that masks and packing hold.

    The ranks of one cp x tp group are given the same batch, whole; the model splits it. The loss that the model returns
    for labels is the mean over those of all ranks, the same number on each, and its backward leaves in `.grad` the
    gradients that one process would compute over all batches. FSDP sums gradients and does not divide them.

    param_dtype: in which layers compute, such as torch.bfloat16 beside fp32 parameters; None: the parameters' own.
    reduce_dtype: in which gradients are summed over ranks. Neither is for layers with `keep_fp32`, which are in fp32.
    reshard_after_forward: as in torch's `fully_shard`, for the blocks; final norm and head, a tied embedding with them,
    and layers with `keep_fp32` stay whole between forward and backward.

    fp8: as in `from_hub`, for a model of the zoo: FSDP2 gathers weights in param_dtype, and each rank quantises what it
    has gathered, once a forward and once a backward. Not under tp.

    model: one of the zoo, also inside of an adapter's wrapper such as PEFT's. Other modules can be sharded by FSDP
    alone; their loss has to be a sum over the rank's batch divided by the number of labels of all ranks.

    Raises InputError for a mesh that does not fit the model, before anything is changed, saying what fits, for a model
    that is sharded already, and for a layer with `keep_fp32` that cannot be a unit of FSDP2.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise InputError(f"{type(model).__name__} is sharded already; parallelize a model once, when it is made")
    _check_fp32(model)
    parallel = Parallel(mesh)
    zoo: Any = next((module for module in model.modules() if hasattr(type(module), "parallel")), None)
    if zoo is None and parallel.shards > 1:
        raise InputError(f"{type(model).__name__} is no model of the zoo: of its mesh, cp and tp have to be 1")
    tp = 1 if parallel.tp is None else parallel.tp.size
    if parallel.ep is not None:
        check_experts(model, parallel.ep.size)
    if fp8 is not None:
        if zoo is None or tp > 1:
            raise InputError(f"fp8={fp8!r} is for models of the zoo, with tp=1: leave it out, or use dp_shard and cp")
        zoo.use_fp8(fp8, device=torch.device(mesh.device_type))
    if tp > 1:
        check_tensor(zoo, tp)
    if parallel.cp is not None:
        check_context(zoo, parallel.cp.size, tp)
    if parallel.ep is not None:
        shard_experts(model, parallel.ep)
    if parallel.tp is not None:
        shard_tensors(zoo, parallel.tp)
    if parallel.tp is not None and parallel.fsdp.size() == 1 and _is_split_by_tp(model, param_dtype):
        # FSDP has nothing to gather, to reduce or to cast. It holds no parameters here, and is there for its methods.
        fully_shard(model, mesh=parallel.fsdp, ignored_params=set(model.parameters()))
        parallel.tp.leaves = {}
        for module in model.modules():
            if isinstance(module, JointProjections):
                module.join_weights()
    else:
        _shard_data(model, zoo, parallel, param_dtype, reduce_dtype, reshard_after_forward)
    if zoo is not None:
        zoo.decoder.cp, zoo.decoder.tp, zoo.decoder.param_dtype = parallel.cp, parallel.tp, param_dtype
        zoo.model.always_runs_tower = parallel.processes.batch_ranks > 1
        zoo.parallel = parallel
    return model


def _check_fp32(model: nn.Module) -> None:
    """Raises InputError for a layer that FSDP2 could not gather in fp32."""
    for name, layer in fp32_layers(model).items():
        kind = type(layer).__name__
        if layer._parameters and type(layer).forward is nn.Module.forward:
            raise InputError(
                f"{name} keeps its parameters in fp32, but a {kind} has no forward, and FSDP2 gathers them when it is "
                "called: give it one that returns them, and call it"
            )
        others = {parameter.dtype for parameter in layer.parameters() if parameter.requires_grad} - {torch.float32}
        if any(dtype.itemsize < 4 for dtype in others):
            raise InputError(
                f"{name} keeps its parameters in fp32, and modules inside of it have others in {others}: FSDP2 shards "
                f"the layer as one, so take these modules out of {kind}"
            )


def _is_split_by_tp(model: nn.Module, param_dtype: torch.dtype | None) -> bool:
    """Whether tensor parallel has split all parameters, which have the dtype that is computed with."""
    kept = fp32_names(model)
    return all(
        isinstance(p, DTensor) and (param_dtype in (None, p.dtype) or name in kept)
        for name, p in model.named_parameters()
    )


def _shard_data(
    model: nn.Module,
    zoo: Any,
    parallel: Parallel,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    reshard_after_forward: bool | int,
) -> None:
    """FSDP2 over a group for each layer with `keep_fp32`, under ep one for each layer of experts, one for each block,
    one for final norm and head, and one for the rest."""
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    for layer in reversed(fp32_layers(model).values()):  # those inside of others first
        if layer._parameters:  # whole until the backward: they are small, and its forward may return them
            fully_shard(layer, mesh=parallel.fsdp, mp_policy=exact, reshard_after_forward=False)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    options: dict[str, Any] = dict(mesh=parallel.fsdp, mp_policy=policy)
    if parallel.ep is not None:
        spread = set[nn.Parameter]()
        for experts in all_experts(model):
            parameters = set(experts.parameters())
            casts = any(param_dtype not in (None, parameter.dtype) for parameter in parameters)
            if casts or parallel.experts_fsdp.size() > 1:
                fully_shard(
                    experts,
                    mesh=parallel.experts_fsdp,
                    mp_policy=policy,
                    reshard_after_forward=reshard_after_forward,
                )
            else:  # FSDP has nothing to gather, to reduce or to cast, and would copy gradients
                spread |= parameters
        options["ignored_params"] = spread
    for block in _blocks(model):
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    if zoo is not None and isinstance(zoo.lm_head, LMHead):
        decoder, last = zoo.decoder, [zoo.decoder.norm, zoo.lm_head]
        if zoo.lm_head.is_tied:
            last = [decoder.embed_tokens, *last]
        else:
            fully_shard(decoder.embed_tokens, reshard_after_forward=reshard_after_forward, **options)
        fully_shard(last, reshard_after_forward=False, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # a factor would be a multiplication of its own in NCCL


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The elements of the outermost ModuleLists: what FSDP gathers and frees together."""
    if isinstance(model, nn.ModuleList):
        return list(model)
    return [block for child in model.children() for block in _blocks(child)]
