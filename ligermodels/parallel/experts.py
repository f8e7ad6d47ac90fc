"""How expert parallelism spreads the experts of mixtures over ranks, and what is refused."""

from torch import nn

from ligermodels.errors import InputError
from ligermodels.layers.moe import all_experts
from ligermodels.layers.parallel import MeshGroup, to_dtensor


def check_experts(model: nn.Module, size: int) -> None:
    """Raises InputError for a model without experts, for numbers of experts that `size` ranks cannot share, and for
    experts with adapters or in few bits."""
    layers = all_experts(model)
    if not layers:
        raise InputError(f"ep={size} is for mixtures, and {type(model).__name__} has no experts: use dp_shard")
    for experts in layers:
        if experts.num_experts % size:
            fits = ", ".join(str(other) for other in range(2, 65) if experts.num_experts % other == 0)
            raise InputError(f"ep={size} does not divide {experts.num_experts} experts; ep may be {fits}")
        experts.check_dense("expert parallelism", "ep")


def shard_experts(model: nn.Module, ep: MeshGroup) -> None:
    """Replaces the parameters of all experts by DTensors over the ranks, which each have as many experts."""
    for experts in all_experts(model):
        for name, parameter in experts.named_parameters(recurse=False):
            experts._parameters[name] = to_dtensor(parameter, ep, 0)
        experts.ep = ep
