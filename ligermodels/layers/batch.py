"""What a forward pass tells every attention layer about its tokens."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Where the tokens of one forward pass stand, and which of them are real.

    cos, sin: fp32 [1 or B, S, R/2], from `RotaryEmbedding`.
    key_mask: bool [B, K], False at padding, over cached and new tokens alike; None if nothing is padded.
    cu_seqlens: int32 [N + 1], the boundaries of N sequences packed into one row; None if not packed.
    max_seqlen: the longest packed sequence, in tokens; None if not known.
    """

    cos: Tensor
    sin: Tensor
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None
