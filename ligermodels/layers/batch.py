"""What a forward pass tells every attention layer about its tokens."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class CrossStates:
    """What the tokens of one forward pass may attend to besides each other.

    states: [B, N, states_size] of new pictures; None where all keys and values are in the cache already.
    mask: bool [B, S, N], True where a token sees a state, of the cached pictures first; at least one True for each
        token. None: all see all.
    attn_rows, mlp_rows: [B, S, 1], 0 at tokens to which a block must not add its attention, or its unit, and else 1;
        None: nowhere.
    """

    states: Tensor | None
    mask: Tensor | None = None
    attn_rows: Tensor | None = None
    mlp_rows: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Where the tokens of one forward pass stand, and which of them are real.

    cos, sin: fp32 [1 or B, S, R/2], from `RotaryEmbedding`; None where nothing rotates.
    key_mask: bool [B, K], False at padding, over cached and new tokens alike; None if nothing is padded.
    cu_seqlens: int32 [N + 1], the boundaries of N sequences packed into one row, on the tokens' device or, which
        serves sequences of few lengths better, on the CPU; None if not packed.
    max_seqlen: the longest packed sequence, in tokens; None if not known.
    padding: bool [B, S], True at tokens that do not see each other but see, and are seen by, all others; for
        attention that is not causal.
    cross: what `CrossAttention` attends to; None where there are no pictures, here or in the cache.
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None
    padding: Tensor | None = None
    cross: CrossStates | None = None
