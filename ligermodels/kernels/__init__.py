"""The fused operations: functions of tensors, each with its PyTorch reference beside its Triton kernels."""

from ligermodels.kernels._math import ClampedSwiGLU as ClampedSwiGLU
from ligermodels.kernels.attention.attention import attention as attention, attention_reference as attention_reference
from ligermodels.kernels.attention.rope import (
    rope as rope,
    rope_qk as rope_qk,
    rope_qk_reference as rope_qk_reference,
    rope_reference as rope_reference,
)
from ligermodels.kernels.experts.experts import (
    moe_experts as moe_experts,
    moe_experts_reference as moe_experts_reference,
)
from ligermodels.kernels.experts.route import (
    route as route,
    route_reference as route_reference,
)
from ligermodels.kernels.linear.activation import (
    activate as activate,
    activate_reference as activate_reference,
)
from ligermodels.kernels.linear.gated_mlp import (
    gated_mlp as gated_mlp,
    gated_mlp_reference as gated_mlp_reference,
    mlp as mlp,
    mlp_reference as mlp_reference,
)
from ligermodels.kernels.linear.glu import (
    glu as glu,
    glu_reference as glu_reference,
)
from ligermodels.kernels.linear.mxfp4 import (
    dequantize_mxfp4_reference as dequantize_mxfp4_reference,
    quantize_mxfp4 as quantize_mxfp4,
)
from ligermodels.kernels.linear.nf4 import (
    NF4Weight as NF4Weight,
    dequantize_nf4_reference as dequantize_nf4_reference,
    quantize_nf4 as quantize_nf4,
)
from ligermodels.kernels.loss.cross_entropy import (
    CrossEntropyOutput as CrossEntropyOutput,
    cross_entropy as cross_entropy,
    cross_entropy_reference as cross_entropy_reference,
)
from ligermodels.kernels.loss.embedding import embedding as embedding, embedding_reference as embedding_reference
from ligermodels.kernels.loss.jsd import jsd as jsd, jsd_reference as jsd_reference
from ligermodels.kernels.loss.kl_div import kl_div as kl_div, kl_div_reference as kl_div_reference
from ligermodels.kernels.loss.linear_cross_entropy import (
    linear_cross_entropy as linear_cross_entropy,
    linear_cross_entropy_reference as linear_cross_entropy_reference,
)
from ligermodels.kernels.loss.linear_jsd import (
    LinearJSDOutput as LinearJSDOutput,
    linear_jsd as linear_jsd,
    linear_jsd_reference as linear_jsd_reference,
)
from ligermodels.kernels.loss.linear_logprobs import (
    LogprobsOutput as LogprobsOutput,
    linear_logprobs as linear_logprobs,
    linear_logprobs_reference as linear_logprobs_reference,
)
from ligermodels.kernels.loss.vocab_parallel_cross_entropy import (
    vocab_parallel_cross_entropy as vocab_parallel_cross_entropy,
    vocab_parallel_cross_entropy_reference as vocab_parallel_cross_entropy_reference,
)
from ligermodels.kernels.norm.gated_norm import gated_norm as gated_norm, gated_norm_reference as gated_norm_reference
from ligermodels.kernels.norm.layer_norm import (
    add_layer_norm as add_layer_norm,
    add_layer_norm_reference as add_layer_norm_reference,
    layer_norm as layer_norm,
    layer_norm_reference as layer_norm_reference,
)
from ligermodels.kernels.norm.rms_norm import (
    add_rms_norm as add_rms_norm,
    add_rms_norm_reference as add_rms_norm_reference,
    rms_norm as rms_norm,
    rms_norm_reference as rms_norm_reference,
)
from ligermodels.kernels.recurrent.causal_conv import (
    causal_conv as causal_conv,
    causal_conv_reference as causal_conv_reference,
)
from ligermodels.kernels.recurrent.delta_gates import (
    delta_gates as delta_gates,
    delta_gates_reference as delta_gates_reference,
)
from ligermodels.kernels.recurrent.gated_delta_rule import (
    gated_delta_rule as gated_delta_rule,
    gated_delta_rule_reference as gated_delta_rule_reference,
)
