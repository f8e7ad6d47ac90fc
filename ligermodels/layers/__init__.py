"""Modules and losses over the kernels. They take numbers, not configs: each can be built in one line.

A block chains them on a residual stream: a norm takes `(x, residual)` and returns `(normed, new residual)`, so that the
addition is part of the norm's kernel; `norm(x)` returns a tensor. Attention and MLPs map x to x. Linear modules are
`torch.nn.Linear`.
"""

from ligermodels.kernels._math import ClampedSwiGLU as ClampedSwiGLU
from ligermodels.layers.attention import Attention as Attention
from ligermodels.layers.batch import Batch as Batch
from ligermodels.layers.cross_attention import CrossAttention as CrossAttention
from ligermodels.layers.embedding import Embedding as Embedding
from ligermodels.layers.fp8 import FP8Linear as FP8Linear, FP8Recipe as FP8Recipe
from ligermodels.layers.gated_delta_net import GatedDeltaNet as GatedDeltaNet, GatedRMSNorm as GatedRMSNorm
from ligermodels.layers.head import LMHead as LMHead
from ligermodels.layers.losses import (
    CrossEntropyLoss as CrossEntropyLoss,
    JSDLoss as JSDLoss,
    KLDivLoss as KLDivLoss,
    LinearCrossEntropyLoss as LinearCrossEntropyLoss,
    LinearJSDLoss as LinearJSDLoss,
)
from ligermodels.layers.mlp import MLP as MLP, GatedMLP as GatedMLP
from ligermodels.layers.moe import (
    Experts as Experts,
    MoE as MoE,
    Router as Router,
    ScaledRouter as ScaledRouter,
    load_balancing_loss as load_balancing_loss,
)
from ligermodels.layers.mtp import MultiTokenPrediction as MultiTokenPrediction
from ligermodels.layers.norm import LayerNorm as LayerNorm, RMSNorm as RMSNorm
from ligermodels.layers.preference import (
    cpo_loss as cpo_loss,
    dpo_loss as dpo_loss,
    kto_kl as kto_kl,
    kto_loss as kto_loss,
    orpo_loss as orpo_loss,
    sum_per_sequence as sum_per_sequence,
)
from ligermodels.layers.quantized import QuantizedLinear as QuantizedLinear
from ligermodels.layers.rotary import RotaryEmbedding as RotaryEmbedding, VisionRotary as VisionRotary
