"""The fused operations: functions of tensors, each with its PyTorch reference beside its Triton kernels."""

from ligermodels.kernels.activation import activate, activate_reference, activation_linear, activation_linear_reference
from ligermodels.kernels.attention import attention, attention_reference
from ligermodels.kernels.causal_conv import causal_conv, causal_conv_reference
from ligermodels.kernels.cross_entropy import CrossEntropyOutput, cross_entropy, cross_entropy_reference
from ligermodels.kernels.delta_gates import delta_gates, delta_gates_reference
from ligermodels.kernels.embedding import embedding, embedding_reference
from ligermodels.kernels.gated_delta_rule import gated_delta_rule, gated_delta_rule_reference
from ligermodels.kernels.gated_mlp import gated_mlp, gated_mlp_reference, mlp, mlp_reference
from ligermodels.kernels.gated_norm import gated_norm, gated_norm_reference
from ligermodels.kernels.glu import glu, glu_linear, glu_linear_reference, glu_reference
from ligermodels.kernels.jsd import jsd, jsd_reference
from ligermodels.kernels.kl_div import kl_div, kl_div_reference
from ligermodels.kernels.layer_norm import add_layer_norm, add_layer_norm_reference, layer_norm, layer_norm_reference
from ligermodels.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from ligermodels.kernels.linear_jsd import LinearJSDOutput, linear_jsd, linear_jsd_reference
from ligermodels.kernels.linear_logprobs import LogprobsOutput, linear_logprobs, linear_logprobs_reference
from ligermodels.kernels.moe import moe_experts, moe_experts_reference, route, route_reference
from ligermodels.kernels.nf4 import (
    NF4Weight,
    dequantize_nf4_reference,
    quantize_nf4,
)
from ligermodels.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from ligermodels.kernels.rope import rope, rope_qk, rope_qk_reference, rope_reference
from ligermodels.kernels.vocab_parallel_cross_entropy import (
    vocab_parallel_cross_entropy,
    vocab_parallel_cross_entropy_reference,
)

__all__ = [
    "CrossEntropyOutput",
    "LinearJSDOutput",
    "LogprobsOutput",
    "NF4Weight",
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
    "causal_conv",
    "causal_conv_reference",
    "cross_entropy",
    "cross_entropy_reference",
    "delta_gates",
    "delta_gates_reference",
    "dequantize_nf4_reference",
    "embedding",
    "embedding_reference",
    "gated_delta_rule",
    "gated_delta_rule_reference",
    "gated_mlp",
    "gated_mlp_reference",
    "gated_norm",
    "gated_norm_reference",
    "glu",
    "glu_linear",
    "glu_linear_reference",
    "glu_reference",
    "jsd",
    "jsd_reference",
    "kl_div",
    "kl_div_reference",
    "layer_norm",
    "layer_norm_reference",
    "linear_cross_entropy",
    "linear_cross_entropy_reference",
    "linear_jsd",
    "linear_jsd_reference",
    "linear_logprobs",
    "linear_logprobs_reference",
    "mlp",
    "mlp_reference",
    "moe_experts",
    "moe_experts_reference",
    "quantize_nf4",
    "rms_norm",
    "rms_norm_reference",
    "rope",
    "rope_qk",
    "rope_qk_reference",
    "rope_reference",
    "route",
    "route_reference",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_cross_entropy_reference",
]
