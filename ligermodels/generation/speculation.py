"""Speculation: a step of the model reads the last token and K guesses of the next ones, and yields up to K + 1 tokens.

The logits after a guess are right as long as the guesses before it are. Each token is chosen from them as usual, by the
same processors and one draw. Where a token differs from its guess, everything computed after it is dropped. So a guess
g is accepted with the probability p(g) that the model gives it, and otherwise the token has the distribution p without
g: the distribution of the text is unchanged (https://arxiv.org/abs/2211.17192, for deterministic guesses), and a seed
draws the same tokens.

The guesses come from `PromptLookup`, by the text so far, or from Medusa heads, by the hidden state of the last token.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ligermodels.generation.engine import Step, head_logits
from ligermodels.layers.state import Cache


class PromptLookup:
    """Guesses that the text continues as it did after the first earlier occurrence of its last few tokens.

    tokens: the text, which `add` extends. size: the maximum n-gram that is looked up; the longest match wins. count:
    the maximum number of tokens guessed. Time does not depend on the length of the text.
    """

    def __init__(self, tokens: Sequence[int], count: int, size: int):
        self.tokens: list[int] = []
        self.count, self.size = count, size
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> the index after its first occurrence
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        end = len(self.tokens)
        for size in range(1, min(self.size, end) + 1):
            self._after.setdefault(tuple(self.tokens[end - size :]), end)
        self.tokens.append(token)

    def guess(self) -> list[int]:
        for size in range(min(self.size, len(self.tokens)), 0, -1):
            place = self._after.get(tuple(self.tokens[-size:]))
            if place is not None:
                return self.tokens[place : place + self.count]
        return []


class Speculation:
    """The guesses of one call of `generate` for one row. `append` takes each new token.

    Either lookup or heads guess. heads: hidden states [1, H] -> the logits [1, V] of the tokens 2, 3, ... after.
    """

    def __init__(self, lookup: PromptLookup | None, heads: Any):
        self.lookup, self.heads = lookup, heads
        self.count = len(heads) if lookup is None else lookup.count  # maximum number of guesses per step
        self.last = -1  # the last token
        self.tokens = [self.last]  # read by the last step, which gave logits after each: the last token, the guesses
        self._logits = self._hidden = torch.empty(0)  # [N, V] and [N, H], N >= 1 + guesses
        self._row = 0  # the row of the logits that the last token was chosen from

    def append(self, token: int) -> None:
        self.last = token
        if self.lookup is not None:
            self.lookup.add(token)

    def found(self) -> Tensor | None:
        """The logits [1, V] after the last token, if it was guessed."""
        ahead = self._row + 1
        if ahead >= len(self.tokens) or self.tokens[ahead] != self.last:
            return None
        self._row = ahead
        return self._logits[ahead : ahead + 1]

    def begin(self, limit: float) -> list[int]:
        """The tokens of a new step: the last one, and at most `limit` guesses."""
        if self.lookup is not None:
            guesses = self.lookup.guess()
        else:
            heads = self.heads(self._hidden[self._row : self._row + 1])
            guesses = torch.stack([logits.argmax(-1) for logits in heads])[:, 0].tolist()
        self.tokens = [self.last, *guesses[: int(min(limit, self.count))]]
        return self.tokens

    def run(self, model: Any, **inputs: Any) -> Tensor:
        """Runs a step without a graph, or the prompt. Returns the logits [1, V] after the first of the tokens."""
        return self.keep(*logits_and_hidden(model, len(self.tokens), self.heads is not None, **inputs))

    def verify(self, step: Step, model: Any, cache: Cache) -> Tensor:
        """Runs `step`, of 1 + count tokens, with the tokens as rows of one token each; returns what `run` does.

        Each token attends up to itself, by the kernels for decoding. Where guesses are missing the last token is
        repeated, at its own position: rotary tables may depend on the largest one.
        """
        past, places = cache.length, range(step.tokens)
        repeated = [max(0, i + 1 - len(self.tokens)) for i in places]
        values = [
            [self.tokens[i - n] for i, n in zip(places, repeated, strict=True)],
            repeated,
            [past + i for i in places],
        ]
        ids, starts, ends = torch.tensor(values, pin_memory=step.ids.is_cuda).to(step.ids.device, non_blocking=True)
        step.ids.copy_(ids[:, None])
        step.place(starts, ends)
        step.run(model, cache)
        return self.keep(step.logits.float(), step.hidden)

    def keep(self, logits: Tensor, hidden: Tensor) -> Tensor:
        self._logits, self._hidden, self._row = logits, hidden, 0
        return logits[:1]


def logits_and_hidden(model: Any, count: int, with_hidden: bool, **inputs: Any) -> tuple[Tensor, Tensor]:
    """(logits fp32 [count, V], hidden states [count, H] or empty) of the last `count` tokens."""
    if not with_hidden:
        logits = model(**inputs).logits.flatten(0, 1)[-count:]
        return logits.float(), logits[:0]
    hidden = model(**inputs, return_logits=False).last_hidden_state.flatten(0, 1)[-count:]
    return head_logits(model, hidden).float(), hidden
