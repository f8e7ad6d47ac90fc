"""Positions, masks and packing of the tokens of a forward pass, for attention layers."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from ligermodels.layers.parallel import MeshGroup


class MovableInputs:
    """Named tensors that a block is called with."""

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Self:
        """The same on `device`; accelerate's hooks call this for blocks on several devices."""
        moved = {
            name: value.to(device, non_blocking=non_blocking) if hasattr(value, "to") else value
            for name, value in vars(self).items()
        }
        return type(self)(**moved)


@dataclass(frozen=True, kw_only=True)
class CrossStates(MovableInputs):
    """What the tokens of one forward pass attend to in cross-attention.

    states: [B, N, states_size] of new images; None where all keys and values are in the cache already.
    mask: bool [B, S, N], True where a token sees a state, cached images first; at least one True for each token.
        None: all see all.
    attn_rows, mlp_rows: [B, S, 1], 0 where a block must not add its attention, or its MLP, else 1; None: all 1.
    """

    states: Tensor | None
    mask: Tensor | None = None
    attn_rows: Tensor | None = None
    mlp_rows: Tensor | None = None

    def of_tokens(self, context: MeshGroup) -> "CrossStates":
        """The same for the rank's tokens: context parallel splits those, not the states."""
        rows = {name: getattr(self, name) for name in ("mask", "attn_rows", "mlp_rows")}
        return replace(self, **{name: None if x is None else context.shard(x, 1) for name, x in rows.items()})


@dataclass(frozen=True, kw_only=True)
class NextToken(MovableInputs):
    """One new token a row, whose place in the KV cache is read from the device, as in a CUDA graph.

    cos, sin: fp32 [1 or B, 1, R/2]. starts, ends: int32 [B], the columns of a row's first token and past the new one.
    """

    cos: Tensor
    sin: Tensor
    starts: Tensor
    ends: Tensor


class Batch(MovableInputs):
    """Positions, padding and packing of the tokens of one forward pass.

    cos, sin: fp32 [1 or B, S, R/2], from `RotaryEmbedding`; None without rotary positions.
    key_mask: bool [B, K], False at padding, over cached and new tokens; None without padding.
    cu_seqlens: int32 [N + 1], the boundaries of N sequences packed into one row, on the tokens' device or on the CPU,
        which is faster for sequences of few lengths; None if not packed.
    max_seqlen: the longest packed sequence, in tokens; None if not known.
    padding: bool [B, S], True at tokens that do not see each other but see, and are seen by, all others; for
        attention that is not causal.
    cross: what `CrossAttention` attends to; None without images, here and in the cache.
    next_token: in place of cos and sin, in a step of decoding that a CUDA graph may hold.
    context: the ranks over which the sequence is split (context parallel). cos, sin and cross are then those of the
        rank's tokens, masks and bounds those of all; None where a rank has all tokens.

    Not a dataclass, on purpose: FSDP's mixed precision casts all floating-point tensors that it finds in dataclasses,
    tuples and dicts, and would round cos and sin to bf16.
    """

    def __init__(
        self,
        *,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        padding: Tensor | None = None,
        cross: CrossStates | None = None,
        next_token: NextToken | None = None,
        context: MeshGroup | None = None,
    ):
        self.cos = cos
        self.sin = sin
        self.key_mask = key_mask
        self.cu_seqlens = cu_seqlens
        self.max_seqlen = max_seqlen
        self.padding = padding
        self.cross = cross
        self.next_token = next_token
        self.context = context
