"""Gated and plain MLPs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ligermodels.kernels.activation import activate, activation_linear
from ligermodels.kernels.gated_mlp import mlp_of
from ligermodels.kernels.glu import glu, glu_linear
from ligermodels.layers.linear import JointProjections, apply_linear, apply_linears, operands_of, warn_unfused
from ligermodels.layers.parallel import MeshGroup


class GatedMLP(JointProjections):
    """down_proj(activation(gate_proj(x)) * up_proj(x)): [..., hidden_size] -> [..., hidden_size].

    Saves its input (unless a norm has just made it) and the outputs of gate_proj and up_proj; the backward recomputes
    the activation. With the attribute `recompute` it saves only the input, and the backward also recomputes gate and
    up, in chunks of tokens.

    activation: "silu" (SwiGLU), "gelu_tanh" or "gelu" (GeGLU). projections: names of the linear modules, the output's
    last; with two names gate and up are the rows of one weight, in this order.
    tp: the ranks over which intermediate_size is sharded (tensor parallel); x and the output are then a rank's shard
        [B, S/n, hidden_size].
    """

    recompute = False
    tp: MeshGroup | None = None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "silu",
        bias: bool = False,
        projections: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    ):
        super().__init__()
        self.activation = activation
        *self.joint_names, self.output_name = projections
        for name in self.joint_names:
            self.add_module(name, nn.Linear(hidden_size, 2 * intermediate_size // len(self.joint_names), bias=bias))
        self.add_module(self.output_name, nn.Linear(intermediate_size, hidden_size, bias=bias))
        self.join_weights()

    def forward(self, x: Tensor) -> Tensor:
        return self._mlp(x) if self.tp is None else self.tp.reduce_scatter(self._mlp(self.tp.all_gather(x, 1)), 1)

    def _mlp(self, x: Tensor) -> Tensor:
        operands = operands_of([*self.joint_modules, self.output_module])
        if operands is not None:
            layers = ("gate_up_", "down_") if len(operands) == 2 else ("gate_", "up_", "down_")
            options: Any = dict(gated=True, activation=self.activation, recompute=self.recompute)
            return mlp_of("gated_mlp", x, operands[:-1], operands[-1], layers, **options)
        warn_unfused(self, (*self.joint_names, self.output_name), x)
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._layer_by_layer, x, use_reentrant=False)
        return self._layer_by_layer(x)

    def _layer_by_layer(self, x: Tensor) -> Tensor:
        inputs, down = self.joint_modules, self.output_module
        gate, *up = apply_linears(inputs, x)
        operands = operands_of([down])
        if operands is None or not operands[0].is_dense:
            return apply_linear(down, glu(gate, *up, activation=self.activation))
        weight, bias, _ = operands[0]
        return glu_linear(gate, weight, bias, activation=self.activation, up=up[0] if up else None)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class MLP(nn.Module):
    """fc2(activation(fc1(x))): [..., size] -> [..., out_features], which is `size` unless given.

    Saves its input (unless a norm has just made it) and, without `recompute`, fc1's output; the backward recomputes the
    activation. activation: "quick_gelu" (x * sigmoid(1.702 x)), "gelu" (exact, by erf) or "gelu_tanh". projections:
    names of the two linear modules.
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
        projections: Sequence[str] = ("fc1", "fc2"),
    ):
        super().__init__()
        self.activation = activation
        self.projections = fc1, fc2 = tuple(projections)
        self.add_module(fc1, nn.Linear(size, intermediate_size, bias=bias))
        self.add_module(fc2, nn.Linear(intermediate_size, size if out_features is None else out_features, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        fc1, fc2 = (getattr(self, name) for name in self.projections)
        operands = operands_of([fc1, fc2])
        if operands is not None:
            options: Any = dict(gated=False, activation=self.activation, recompute=self.recompute)
            return mlp_of("mlp", x, operands[:1], operands[1], ("fc1_", "fc2_"), **options)
        warn_unfused(self, self.projections, x)
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._layer_by_layer, x, use_reentrant=False)
        return self._layer_by_layer(x)

    def _layer_by_layer(self, x: Tensor) -> Tensor:
        fc1, fc2 = (getattr(self, name) for name in self.projections)
        h = apply_linear(fc1, x)
        operands = operands_of([fc2])
        if operands is None or not operands[0].is_dense:
            return apply_linear(fc2, activate(h, activation=self.activation))
        weight, bias, _ = operands[0]
        return activation_linear(h, weight, bias, activation=self.activation)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"
