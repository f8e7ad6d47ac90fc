"""Gated and plain MLPs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ligermodels.kernels._math import Activation, activation_name
from ligermodels.kernels.linear.activation import activate
from ligermodels.kernels.linear.gated_mlp import mlp_of
from ligermodels.kernels.linear.glu import glu
from ligermodels.layers.base import FusionContext, FusionPart, Shard
from ligermodels.layers.fusion import linears_part
from ligermodels.layers.linear import JointProjections, apply_linear, apply_linears, operands_of, warn_unfused


class _FeedForward(JointProjections):
    """What both MLPs share: the linear modules of the input, `joint_names`, and `output_name`; see `forward`.

    Saves its input (unless a norm has just made it) and the outputs of the first modules; the backward recomputes the
    activation. With the attribute `recompute` it saves only the input, and the backward also recomputes those outputs,
    in chunks of tokens.
    tp: the ranks over which intermediate_size is sharded (tensor parallel); x and the output are then a rank's shard
        [B, S/n, hidden_size].
    """

    gated: ClassVar[bool]
    recompute = False

    def __init__(
        self, in_features: int, inner: int, out_features: int, activation: Activation, bias: bool,
        projections: Sequence[str],
    ):  # fmt: skip
        super().__init__()
        activation_name(type(self).__name__, activation, gated=self.gated)
        self.activation = activation
        *self.joint_names, self.output_name = projections
        for name in self.joint_names:
            self.add_module(name, nn.Linear(in_features, (1 + self.gated) * inner // len(self.joint_names), bias=bias))
        self.add_module(self.output_name, nn.Linear(inner, out_features, bias=bias))
        self.join_weights()

    def forward(self, x: Tensor) -> Tensor:
        if self.tp is None:
            return self.unreduced(x)
        return self.tp.reduce_scatter(self.unreduced(self.tp.all_gather(x, 1)), 1)

    def unreduced(self, x: Tensor) -> Tensor:
        """What a rank adds to the output, from x of all tokens; without `tp`, the output."""
        operands = operands_of([*self.joint_modules, self.output_module])
        if operands is not None:
            *first, last = operands
            return mlp_of(x, first, last, gated=self.gated, activation=self.activation, recompute=self.recompute)
        warn_unfused(self, (*self.joint_names, self.output_name), x)
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._layer_by_layer, x, use_reentrant=False)
        return self._layer_by_layer(x)

    def _layer_by_layer(self, x: Tensor) -> Tensor:
        h = (glu if self.gated else activate)(*apply_linears(self.joint_modules, x), activation=self.activation)
        return apply_linear(self.output_module, h)

    @property
    def intermediate_size(self) -> int:
        return self.output_module.in_features

    def fusion_parts(self, at: FusionContext) -> Iterable[FusionPart]:
        yield linears_part(self, self.joint_names, at, self.output_name)

    def saved_per_token(self, policy: str) -> int:
        """The outputs of the first modules. What they read is the norm's, or recomputed from it."""
        return (1 + self.gated) * self.intermediate_size if policy == "none" else 0

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class GatedMLP(_FeedForward):
    """down_proj(activation(gate_proj(x)) * up_proj(x)): [..., hidden_size] -> [..., hidden_size].

    activation: "silu" (SwiGLU), "gelu_tanh" or "gelu" (GeGLU), or a ClampedSwiGLU. projections: names of the linear
    modules, the output's last; with two names gate and up are the rows of one weight, in this order.
    """

    gated = True

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation = "silu",
        bias: bool = False,
        projections: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    ):
        super().__init__(hidden_size, intermediate_size, hidden_size, activation, bias, projections)

    def shards(self) -> Mapping[str, Shard]:
        inner = self.intermediate_size
        split = inner, f"an intermediate size of {inner}"
        first = Shard("columns", *split, parts=None if len(self.joint_names) == 2 else (inner, inner))
        return dict.fromkeys(self.joint_names, first) | {self.output_name: Shard("rows", *split)}


class MLP(_FeedForward):
    """fc2(activation(fc1(x))): [..., size] -> [..., out_features], which is `size` unless given.

    activation: "quick_gelu" (x * sigmoid(1.702 x)), "gelu" (exact, by erf) or "gelu_tanh". projections: names of the
    two linear modules.
    """

    gated = False

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
        out_features = size if out_features is None else out_features
        super().__init__(size, intermediate_size, out_features, activation, bias, projections)
