"""In-place gradient accumulation over several micro-batches per step."""

from torch import nn

from ligermodels.errors import InputError
from ligermodels.kernels._gradients import MARK


def accumulate_in_place(model: nn.Module, on: bool = True) -> None:
    """Lets the backward of our layers add weight gradients to .grad inside the GEMM; on=False switches it off.

    Otherwise autograd adds each micro-batch's gradient in a pass of its own, with one more buffer of the weight's size,
    4 bytes of traffic per bf16 parameter, and a second rounding (docs/ablations.md has figures). Small micro-batches,
    whose speed the host limits, get slower.

    Call it when the model is on its device: it marks parameters, and `copy.deepcopy` and `to_empty` make new ones.
    Autograd still adds where adding in place could be wrong: under torch.autograd.grad, under torch.compile, on the
    CPU, and for parameters with gradient hooks, such as those of step_in_backward. DistributedDataParallel works. Two
    cases are wrong and are not detected: a backward on several CUDA streams, and reading a gradient before the backward
    has ended.

    Raises InputError for a model sharded by FSDP or tensor parallelism, whose weights are DTensors.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and type(parameter) is not nn.Parameter:
            raise InputError(
                f"accumulate_in_place: {name} is a {type(parameter).__name__}. A sharded model reduces and adds up its "
                "gradients itself; leave the call out."
            )
    for parameter in model.parameters():
        if on:
            setattr(parameter, MARK, True)
        elif hasattr(parameter, MARK):
            delattr(parameter, MARK)
