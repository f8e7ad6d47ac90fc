"""Gradients that add up in the .grad that is there, for training with several micro-batches per step."""

from torch import nn

from ligermodels.errors import InputError
from ligermodels.kernels._gradients import MARK


def accumulate_in_place(model: nn.Module, on: bool = True) -> None:
    """Lets the backward of our layers add the gradients of weights to .grad themselves; on=False takes that back.

    Without it a backward makes a gradient, and autograd adds it to .grad. From the second micro-batch of a step on,
    and where a weight is used twice, as a table that is the head too, that is a buffer of the weight's size more at a
    time, 4 bytes of traffic per bf16 parameter, and a second rounding. With it the product is added in the GEMM itself,
    and the head and the table of a tied model write into one buffer. The sums are those of autograd, rounded less.

    Call it once the model is on its device: it marks parameters, and `copy.deepcopy` or `to_empty` makes others. Where
    adding in place could be wrong, the layers do as without it: under torch.autograd.grad, with create_graph=True,
    under torch.compile, on the CPU, and for parameters with hooks of their own (`register_hook`,
    `register_post_accumulate_grad_hook`; an optimizer that steps in the backward has such). DistributedDataParallel is
    fine: what it does to a gradient it does once that is complete. Not seen, and wrong: a backward of which parts run
    on different CUDA streams, and a gradient that is read before the backward has ended.

    Raises InputError for a model sharded by FSDP, tensor parallelism or the like, whose weights are DTensors.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and type(parameter) is not nn.Parameter:
            raise InputError(
                f"accumulate_in_place: {name} is a {type(parameter).__name__}, not a plain parameter; likely the model "
                "is sharded, and what shards it reduces and adds up gradients itself. Leave the call out."
            )
    for parameter in model.parameters():
        if on:
            setattr(parameter, MARK, True)
        elif hasattr(parameter, MARK):
            delattr(parameter, MARK)
