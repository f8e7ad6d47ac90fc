"""Modules and losses over the kernels. They take numbers, not configs: each can be built in one line.

A block chains them on a residual stream: a norm takes `(x, residual)` and returns `(normed, new residual)`, so that the
addition is part of the norm's kernel; `norm(x)` returns a tensor. Attention and MLPs map x to x. Linear modules are
`torch.nn.Linear`.
"""

from ligermodels.layers.attention import Attention
from ligermodels.layers.batch import Batch
from ligermodels.layers.cross_attention import CrossAttention
from ligermodels.layers.embedding import Embedding
from ligermodels.layers.gated_delta_net import GatedDeltaNet, GatedRMSNorm
from ligermodels.layers.head import LMHead
from ligermodels.layers.losses import CrossEntropyLoss, JSDLoss, KLDivLoss, LinearCrossEntropyLoss, LinearJSDLoss
from ligermodels.layers.mlp import MLP, GatedMLP
from ligermodels.layers.moe import Experts, MoE, Router, load_balancing_loss
from ligermodels.layers.mtp import MultiTokenPrediction
from ligermodels.layers.norm import LayerNorm, RMSNorm
from ligermodels.layers.preference import cpo_loss, dpo_loss, kto_kl, kto_loss, orpo_loss, sum_per_sequence
from ligermodels.layers.quantized import QuantizedLinear
from ligermodels.layers.rotary import RotaryEmbedding, VisionRotary

__all__ = [
    "MLP",
    "Attention",
    "Batch",
    "CrossAttention",
    "CrossEntropyLoss",
    "Embedding",
    "Experts",
    "GatedDeltaNet",
    "GatedMLP",
    "GatedRMSNorm",
    "JSDLoss",
    "KLDivLoss",
    "LMHead",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "LinearJSDLoss",
    "MoE",
    "MultiTokenPrediction",
    "QuantizedLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "Router",
    "VisionRotary",
    "cpo_loss",
    "dpo_loss",
    "kto_kl",
    "kto_loss",
    "load_balancing_loss",
    "orpo_loss",
    "sum_per_sequence",
]
