"""Positions, masks and packing of the tokens of a forward pass, for attention layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.layers.parallel import MeshGroup


class MovableInputs:
    """Named tensors that are moved to another device together."""

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Self:
        """A copy on `device`. accelerate's hooks call this for blocks on several devices."""

        def move(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: move(inner) for name, inner in value.items()}
            if isinstance(value, tuple):
                return tuple(map(move, value))
            return value.to(device, non_blocking=non_blocking) if hasattr(value, "to") else value

        return type(self)(**{name: move(value) for name, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class NextToken(MovableInputs):
    """One new token per row, whose column in the KV cache is read from the device, so that a CUDA graph can replay it.

    starts, ends: int32 [B], the column of a row's first token, and the column after the new one.
    Between two tokens is a launch that does not overlap (kernels/_triton.py), at least the one that counts `ends`.
    """

    starts: Tensor
    ends: Tensor


class Batch(MovableInputs):
    """Positions, padding and packing of the tokens of one forward pass.

    rotary: {name: (cos, sin)}, fp32 [1 or B, S, R/2] each, from `RotaryEmbedding`; a layer reads the tables whose name
        is its `rope`. None if no layer has one.
    key_mask: bool [B, K], False at padding, over cached and new tokens; None without padding before a token.
    token_mask: bool [B, S], False at padding on either side, of the new tokens; for mixers with a recurrent state. None
        without padding.
    cu_seqlens: int32 [N + 1], the boundaries of N sequences packed into one row, on the tokens' device, or on the CPU,
        which is faster if they have few different lengths; None if not packed.
    max_seqlen: the length of the longest packed sequence; None if not known.
    images: what the blocks of a family read of images, by name; empty without images, here and in the cache.
    together: integers [B, K], over cached and new tokens; tokens with the same number, 0 or more, see each other both
        ways, as those of an image do. None where attention is causal.
    next_token: of a step of decoding that may be captured in a CUDA graph.
    past_length: the number of tokens in the cache.
    cp: the ranks over which the sequence is sharded (context parallel). rotary and images are then those of the
        rank's tokens, masks and bounds those of all tokens; None if a rank has all tokens.

    Not a dataclass, since FSDP's mixed precision casts floating-point tensors in dataclasses, tuples and dicts: it
    would round the tables to bf16.
    """

    def __init__(
        self,
        *,
        rotary: Mapping[str, tuple[Tensor, Tensor]] | None = None,
        key_mask: Tensor | None = None,
        token_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        images: Mapping[str, Any] | None = None,
        together: Tensor | None = None,
        next_token: NextToken | None = None,
        past_length: int = 0,
        cp: MeshGroup | None = None,
    ):
        if not isinstance(rotary, Mapping | None):
            example = "Batch(rotary={'full': RotaryEmbedding(...)(positions)})"
            raise InputError(
                f"Batch: rotary is a {type(rotary).__name__}; expected tables by their names, as in {example}"
            )
        self.rotary = dict(rotary or {})
        self.key_mask = key_mask
        self.token_mask = token_mask
        self.cu_seqlens = cu_seqlens
        self.max_seqlen = max_seqlen
        self.images = dict(images or {})
        self.together = together
        self.next_token = next_token
        self.past_length = past_length
        self.cp = cp
