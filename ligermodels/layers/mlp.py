"""The gated feed-forward unit."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ligermodels.kernels.glu import glu, glu_linear
from ligermodels.layers.linear import Linear, PackedLinear, is_plain


class GatedMLP(nn.Module):
    """down_proj(activation(gate) * up) with gate and up packed: [..., hidden_size] -> [..., hidden_size].

    Saves only its input and gate_up_proj's output for the backward, which makes the product anew while it reads it.
    activation: "silu" (SwiGLU), "gelu_tanh" or "gelu" (GeGLU). `recompute`, an attribute, False at first: saves only
    the input, and runs again in the backward.
    """

    recompute = False

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "silu",
        bias: bool = False,
    ):
        super().__init__()
        self.activation = activation
        self.gate_up_proj = PackedLinear(hidden_size, {"gate": intermediate_size, "up": intermediate_size}, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        gate_up, down = self.gate_up_proj(x), self.down_proj
        if not is_plain(down):
            return down(glu(gate_up, activation=self.activation))
        return glu_linear(gate_up, down.weight, down.bias, activation=self.activation)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"
