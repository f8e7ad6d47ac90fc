"""The fused operations: functions of tensors, each with its PyTorch reference beside its Triton kernels."""

from ligermodels.kernels.activation import (
    activate,
    activate_reference,
    activation_linear,
    activation_linear_reference,
)
from ligermodels.kernels.attention import attention, attention_reference
from ligermodels.kernels.cross_entropy import CrossEntropyOutput, cross_entropy, cross_entropy_reference
from ligermodels.kernels.glu import glu, glu_linear, glu_linear_reference, glu_reference
from ligermodels.kernels.layer_norm import (
    add_layer_norm,
    add_layer_norm_reference,
    layer_norm,
    layer_norm_reference,
)
from ligermodels.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from ligermodels.kernels.moe import moe_experts, moe_experts_reference, route, route_reference
from ligermodels.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from ligermodels.kernels.rope import rope, rope_qk, rope_qk_reference, rope_reference

__all__ = [
    "CrossEntropyOutput",
    "activate",
    "activate_reference",
    "activation_linear",
    "activation_linear_reference",
    "add_layer_norm",
    "add_layer_norm_reference",
    "add_rms_norm",
    "add_rms_norm_reference",
    "attention",
    "attention_reference",
    "cross_entropy",
    "cross_entropy_reference",
    "glu",
    "glu_linear",
    "glu_linear_reference",
    "glu_reference",
    "layer_norm",
    "layer_norm_reference",
    "linear_cross_entropy",
    "linear_cross_entropy_reference",
    "moe_experts",
    "moe_experts_reference",
    "rms_norm",
    "rms_norm_reference",
    "rope",
    "rope_qk",
    "rope_qk_reference",
    "rope_reference",
    "route",
    "route_reference",
]
