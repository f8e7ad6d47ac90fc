"""The feed-forward units: gated, and plain."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ligermodels.kernels.activation import activate, activation_linear
from ligermodels.kernels.gated_mlp import gated_mlp, mlp
from ligermodels.kernels.glu import glu, glu_linear
from ligermodels.layers.linear import Linear, PackedLinear, is_plain


class GatedMLP(nn.Module):
    """down_proj(activation(gate) * up) with gate and up packed: [..., hidden_size] -> [..., hidden_size].

    Saves only its input and gate_up_proj's output for the backward, which makes the product anew while it reads it;
    of an input that a norm has just made, nothing. activation: "silu" (SwiGLU), "gelu_tanh" or "gelu" (GeGLU).
    `recompute`, an attribute, False at first: saves only the input, and makes gate_up_proj's output, for a tile of
    tokens at a time, again in the backward.
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
        gate_up, down = self.gate_up_proj, self.down_proj
        if is_plain(gate_up) and is_plain(down):
            return gated_mlp(
                x, gate_up.weight, down.weight, gate_up.bias, down.bias,
                activation=self.activation, recompute=self.recompute,
            )  # fmt: skip
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._layer_by_layer, x, use_reentrant=False)
        return self._layer_by_layer(x)

    def _layer_by_layer(self, x: Tensor) -> Tensor:
        gate_up, down = self.gate_up_proj(x), self.down_proj
        if not is_plain(down):
            return down(glu(gate_up, activation=self.activation))
        return glu_linear(gate_up, down.weight, down.bias, activation=self.activation)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class MLP(nn.Module):
    """fc2(activation(fc1(x))): [..., size] -> [..., out_features], which is `size` unless given.

    Saves only its input and fc1's output for the backward, which makes the activation anew; of an input that a norm has
    just made, nothing. activation: "quick_gelu" (x * sigmoid(1.702 x)), "gelu" (exact, by erf) or "gelu_tanh".
    `recompute`, an attribute, False at first: saves only the input, and makes fc1's output, for a tile of tokens at a
    time, again in the backward.
    """

    recompute = False

    def __init__(
        self,
        size: int,
        intermediate_size: int,
        *,
        activation: str,
        bias: bool = True,
        out_features: int | None = None,
    ):
        super().__init__()
        self.activation = activation
        self.fc1 = Linear(size, intermediate_size, bias=bias)
        self.fc2 = Linear(intermediate_size, size if out_features is None else out_features, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        fc1, fc2 = self.fc1, self.fc2
        if is_plain(fc1) and is_plain(fc2):
            return mlp(
                x, fc1.weight, fc2.weight, fc1.bias, fc2.bias, activation=self.activation, recompute=self.recompute
            )
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._layer_by_layer, x, use_reentrant=False)
        return self._layer_by_layer(x)

    def _layer_by_layer(self, x: Tensor) -> Tensor:
        h, fc2 = self.fc1(x), self.fc2
        if not is_plain(fc2):
            return fc2(activate(h, activation=self.activation))
        return activation_linear(h, fc2.weight, fc2.bias, activation=self.activation)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"
