"""Modules and losses over the kernels. They take numbers, never configs: each can be built in one line.

A block chains them on a residual stream: a norm takes `(x, residual)` and returns `(normed, new residual)`,
so that the add is part of the norm's kernel; attention and the gated unit map x to x.
"""

from ligermodels.layers.attention import Attention
from ligermodels.layers.batch import Batch
from ligermodels.layers.embedding import Embedding
from ligermodels.layers.head import LMHead, TiedLMHead
from ligermodels.layers.linear import Linear, PackedLinear
from ligermodels.layers.losses import CrossEntropyLoss, LinearCrossEntropyLoss
from ligermodels.layers.mlp import GatedMLP
from ligermodels.layers.moe import Experts, MoE, load_balancing_loss
from ligermodels.layers.norm import RMSNorm
from ligermodels.layers.rotary import RotaryEmbedding

__all__ = [
    "Attention",
    "Batch",
    "CrossEntropyLoss",
    "Embedding",
    "Experts",
    "GatedMLP",
    "LMHead",
    "Linear",
    "LinearCrossEntropyLoss",
    "MoE",
    "PackedLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "TiedLMHead",
    "load_balancing_loss",
]
