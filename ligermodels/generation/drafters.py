"""Drafters: they propose the next tokens of a row, which one step of the model verifies.

The step reads the last token and K proposed ones, and gives the logits after each. Those after a proposed token are
right as long as the tokens proposed before it are. Each token is sampled from them as usual, by the same processors and
one draw. Where it differs from the proposed one, everything computed after it is dropped. So a token g is accepted with
the probability p(g) that the model gives it, and otherwise the token has the distribution p without g: the distribution
of the text is unchanged (https://arxiv.org/abs/2211.17192, for deterministic drafts), and a seed draws the same tokens.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Drafter(Protocol):
    """count: the maximum number of tokens proposed. needs_hidden: whether `propose` reads hidden states."""

    count: int
    needs_hidden: bool

    def observe(self, token: int) -> None:
        """Takes a new token of the text."""

    def propose(self, hidden: Tensor) -> list[int]:
        """The tokens after the last one. hidden: [1, H] after the token before the last; empty if not needed."""


class PromptLookup:
    """Proposes what followed the first earlier occurrence of the last few tokens.

    tokens: the text so far. size: the maximum n-gram that is looked up; the longest match wins. The time of a call does
    not depend on the length of the text.
    """

    needs_hidden = False

    def __init__(self, tokens: Sequence[int], count: int, size: int):
        self.tokens: list[int] = []
        self.count, self.size = count, size
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> the index after its first occurrence
        for token in tokens:
            self.observe(token)

    def observe(self, token: int) -> None:
        end = len(self.tokens)
        for size in range(1, min(self.size, end) + 1):
            self._after.setdefault(tuple(self.tokens[end - size :]), end)
        self.tokens.append(token)

    def propose(self, hidden: Tensor) -> list[int]:
        for size in range(min(self.size, len(self.tokens)), 0, -1):
            begin = self._after.get(tuple(self.tokens[-size:]))
            if begin is not None:
                return self.tokens[begin : begin + self.count]
        return []


class Medusa:
    """heads: hidden states [1, H] -> the logits [1, V] of each of the next tokens but one."""

    needs_hidden = True

    def __init__(self, heads: Any):
        self.heads, self.count = heads, len(heads)

    def observe(self, token: int) -> None:
        pass

    def propose(self, hidden: Tensor) -> list[int]:
        return torch.stack([logits.argmax(-1) for logits in self.heads(hidden)])[:, 0].tolist()
