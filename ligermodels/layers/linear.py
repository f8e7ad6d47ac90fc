"""Linear layers: plain, and packed, where several projections of one input are the rows of one weight."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ligermodels.kernels.linear import linear


class Linear(nn.Linear):
    """torch.nn.Linear, without a bias unless asked for. Behind a norm it does not keep its input for the backward."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__(in_features, out_features, bias=bias)

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class PackedLinear(Linear):
    """Several projections of one input as one product: [..., in_features] -> [..., sum of parts].

    parts: name -> rows, in the order in which the weight's rows and the output's last dim hold them. One
    matrix product instead of several, forward and backward. Row order is the checkpoint's within each part,
    so a part is a slice of the weight, and loading or saving one moves rows and computes nothing.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], bias: bool = False):
        super().__init__(in_features, sum(parts.values()), bias=bias)
        self.parts = dict(parts)

    def extra_repr(self) -> str:
        parts = ", ".join(f"{name}={rows}" for name, rows in self.parts.items())
        return f"in_features={self.in_features}, {parts}, bias={self.bias is not None}"


def is_plain(module: nn.Module) -> bool:
    """True if calling `module` is x @ weight.T + bias and nothing else: a fused kernel may stand in for it.

    An adapter wraps the module or replaces its class, a parametrization and FSDP replace its class, tensor
    parallelism, ZeRO-3 and activation probes hang hooks on it, offloading replaces its forward, quantization
    replaces its weight. Passing any of them by would be silently wrong, so each of them makes this False.
    """
    return (
        type(module) in (Linear, PackedLinear, nn.Linear)
        and type(module.weight) is nn.Parameter
        and is_untouched(module)
    )


def is_untouched(module: nn.Module) -> bool:
    """True if calling `module` is its class's forward and nothing else."""
    return (
        "forward" not in module.__dict__
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        and not _has_any_global_hook()
    )
