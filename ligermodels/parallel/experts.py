"""How expert parallelism spreads the experts of mixtures over ranks, and what is refused."""

from torch import nn

from ligermodels.errors import InputError
from ligermodels.layers.moe import Experts
from ligermodels.layers.parallel import MeshGroup, to_dtensor


def all_experts(model: nn.Module) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]


def shard_experts(model: nn.Module, ep: MeshGroup) -> None:
    """Replaces the parameters of all experts by DTensors over the ranks, which each have as many experts.

    Raises InputError, before anything is changed, for a model without experts, for experts with adapters or in few
    bits, and for numbers of experts that the ranks cannot share.
    """
    found = all_experts(model)
    if not found:
        raise InputError(f"ep={ep.size} is for mixtures, and {type(model).__name__} has no experts: use dp_shard")
    for experts in found:
        if experts.num_experts % ep.size:
            sizes = [str(size) for size in range(2, 65) if experts.num_experts % size == 0]
            raise InputError(
                f"ep={ep.size} does not divide {experts.num_experts} experts; ep may be {', '.join(sizes)}"
            )
        experts.check_dense("expert parallelism", "ep")
    for experts in found:
        for name, parameter in experts.named_parameters(recurse=False):
            experts._parameters[name] = to_dtensor(parameter, ep, 0)
        experts.ep = ep
