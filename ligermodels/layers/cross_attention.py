"""Cross-attention of text to the states of images, as in Llama-3.2-Vision.

It has no rotary positions and is not causal; queries and keys are normalised per head. Tokens see different images, so
prefill and training pass torch's attention a boolean mask [B, 1, S, N], which it expands to the inputs' dtype. A single
query, as in decoding, needs only a key mask.
"""

from collections.abc import Iterable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.kernels.attention.attention import attention
from ligermodels.layers.base import FusionContext, FusionPart
from ligermodels.layers.fusion import linears_part
from ligermodels.layers.linear import JointProjections, apply_linear, apply_linears, operands_of, warn_unfused
from ligermodels.layers.norm import RMSNorm
from ligermodels.layers.state import ImageKeyValues


class CrossAttention(JointProjections):
    """Attention of x [B, S, hidden_size] to the states of images -> [B, S, hidden_size].

    forward(x, states, mask=None, cache=None): states [B, N, states_size] are those of new images; None if `cache`, a
    cross layer of a `Cache`, has all keys and values. It keeps them, so that each image is projected only once.
    mask: bool [B, S, N], True where a token sees a state, cached images first; at least one True for each token. None:
    all tokens see all states.

    states_size: width of the states, default hidden_size. num_kv_heads: num_heads / num_kv_heads query heads share one
    key head. eps: of the norms over head_dim. Scores are multiplied by head_dim ** -0.5.
    """

    joint_names = ("k_proj", "v_proj")

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float = 1e-6,
        states_size: int | None = None,
    ):
        super().__init__()
        if num_heads % num_kv_heads:
            raise InputError(f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        states_size = hidden_size if states_size is None else states_size
        self.k_proj = nn.Linear(states_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(states_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.q_norm = RMSNorm(head_dim, eps=eps)
        self.k_norm = RMSNorm(head_dim, eps=eps)
        self.join_weights()

    def forward(
        self, x: Tensor, states: Tensor | None, mask: Tensor | None = None, cache: ImageKeyValues | None = None
    ) -> Tensor:
        q = self.q_norm(apply_linear(self.q_proj, x).unflatten(-1, (-1, self.head_dim)))
        k, v = self._keys_and_values(states, cache)
        return apply_linear(self.o_proj, _attend(q, k, v, mask).flatten(2))

    def new_state(self, rows: int, max_length: int, **options: Any) -> ImageKeyValues:
        return ImageKeyValues()

    def fusion_parts(self, at: FusionContext) -> Iterable[FusionPart]:
        yield linears_part(self, self.joint_names, at)

    def saved_per_token(self, policy: str) -> int:
        """q before and after its norm, and the output. Keys and values are of images, not of tokens."""
        return 3 * self.num_heads * self.head_dim

    def _keys_and_values(self, states: Tensor | None, cache: ImageKeyValues | None) -> tuple[Tensor, Tensor]:
        """[B, N, num_kv_heads, head_dim] each, of cached images and new ones."""
        if states is None:
            if cache is None or not cache.buffers:
                raise InputError("cross-attention: no states of images, and none in the cache")
            return cache.buffers[0], cache.buffers[1]
        if operands_of(self.joint_modules) is None:
            warn_unfused(self, self.joint_names, states)
        k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in apply_linears(self.joint_modules, states))
        k = self.k_norm(k)
        k, v = (k, v) if cache is None else cache.append(k, v)
        return k, v

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(D)) v with mask bool [B, S, N]: [B, S, HQ, D]."""
    if q.shape[0] != k.shape[0] or (mask is not None and mask.shape != (*q.shape[:2], k.shape[1])):
        raise InputError(
            f"cross-attention: {list(q.shape[:2])} tokens, {list(k.shape[:2])} states of images and a mask of "
            f"{None if mask is None else list(mask.shape)} do not fit; expected [B, S], [B, N] and [B, S, N]. Packed "
            "sequences with images go into a batch of one row"
        )
    if mask is None or q.shape[1] == 1:
        return attention(q, k, v, causal=False, key_mask=None if mask is None else mask[:, 0])
    groups = q.shape[2] // k.shape[2]
    if groups > 1 and q.is_cuda:  # torch's fused attention takes a mask, but not with grouped heads
        k, v, groups = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2), 1
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = {"enable_gqa": True} if groups > 1 else {}  # enable_gqa=groups > 1 may be symbolic, not a bool
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], **grouped).transpose(1, 2)
