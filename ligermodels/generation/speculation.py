"""Speculation: a step of the model reads the last token and K guesses of those after it, and makes up to K + 1 tokens.

The logits after each guess are right as long as the guesses are, and each token is chosen from them as ever: by the
same processors, by one draw. Where a token is not the guess, what was computed after it is forgotten. So a guess g is
accepted with the probability p(g) that the model gives it, and else the token has the distribution p without g: that of
the text does not change (https://arxiv.org/abs/2211.17192, for guesses that are certain), and a seed draws the same.

Who guesses: `PromptLookup`, from the text so far, or Medusa heads, from the hidden state of the last token.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ligermodels.generation import graph
from ligermodels.layers.cache import KVCache
from ligermodels.layers.head import capped, unwrapped


class PromptLookup:
    """Guesses that the text goes on as it did after the first earlier occurrence of its last few tokens.

    `tokens` is the text, which `add` extends; size: the most tokens that are compared. What is guessed are at most
    `count` tokens, after as many equal ones as can be found. Time does not depend on the length of the text.
    """

    def __init__(self, tokens: Sequence[int], count: int, size: int):
        self.tokens: list[int] = []
        self.count, self.size = count, size
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> the place after its first occurrence
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
    """The guesses of one call of `generate` for one row: `take` tells it each token, in turn.

    lookup or heads guess. heads: hidden states [1, H] -> the logits [1, V] of the tokens 2, 3, ... after.
    """

    def __init__(self, lookup: PromptLookup | None, heads: Any):
        self.lookup, self.heads = lookup, heads
        self.count = len(heads) if lookup is None else lookup.count  # the most guesses of a step
        self.last = -1  # the last token taken
        self.tokens = [self.last]  # that the last step read and gave logits after: the last one then, and the guesses
        self._logits = self._hidden = torch.empty(0)  # [N, V] and [N, H], N >= 1 + guesses
        self._row = 0  # of the logits that the last token was chosen from

    def take(self, token: int) -> None:
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

    def begin(self, most: float) -> list[int]:
        """The tokens of a new step: the last one, and at most `most` guesses."""
        guesses: list[int] = []
        if self.lookup is not None:
            guesses = self.lookup.guess()
        else:
            guesses = torch.stack([y.argmax(-1) for y in self.heads(self._hidden[self._row : self._row + 1])])[
                :, 0
            ].tolist()
        self.tokens = [self.last, *guesses[: int(min(most, self.count))]]
        return self.tokens

    def run(self, model: Any, **inputs: Any) -> Tensor:
        """The logits [1, V] after the first of the tokens, which an uncaptured step reads. The prompt counts as one."""
        return self.keep(*logits_and_hidden(model, len(self.tokens), self.heads is not None, **inputs))

    def keep(self, logits: Tensor, hidden: Tensor) -> Tensor:
        self._logits, self._hidden, self._row = logits, hidden, 0
        return logits[:1]


def logits_and_hidden(model: Any, count: int, with_hidden: bool, **inputs: Any) -> tuple[Tensor, Tensor]:
    """Of the last `count` tokens: the logits fp32 [count, V], and the hidden states [count, H], which may be empty."""
    if not with_hidden:
        logits = model(**inputs).logits.flatten(0, 1)[-count:]
        return logits.float(), logits[:0]
    hidden = model(**inputs, return_logits=False).last_hidden_state.flatten(0, 1)[-count:]
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return capped(unwrapped(model.lm_head)(hidden[None]), softcap)[0].float(), hidden


_verifications: weakref.WeakKeyDictionary[KVCache, "Verification"] = weakref.WeakKeyDictionary()


class Verification(graph.Decode):
    """A step as a CUDA graph: the tokens of one row as rows of one token each, over the one row of the cache.

    Each attends up to itself, by the kernels that decode. A step has `count` tokens always: those that are missing
    repeat the last one, and only tokens after them could see that.
    """

    def __init__(self, count: int, device: torch.device, with_hidden: bool):
        super().__init__(count, device)
        self.count, self.with_hidden = count, with_hidden
        self._hidden = torch.empty(0)

    @staticmethod
    def of_tokens(cache: KVCache, count: int, with_hidden: bool) -> "Verification":
        """The one that belongs to `cache`."""
        found = _verifications.get(cache)
        wanted = count, cache.device, with_hidden
        if found is None or (found.count, found._ids.device, found.with_hidden) != wanted:
            found = _verifications[cache] = Verification(*wanted)
        return found

    def verify(self, model: Any, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(logits [count, V], hidden [count, H]) after each of the tokens, in memory that the next call overwrites.

        The cache then holds `count` tokens more.
        """
        cache: Any = self.cache()
        past, rows = cache.length, range(self.count)
        offsets = [min(i, len(tokens) - 1) for i in rows]  # rotary tables may depend on the largest position
        values = [[tokens[i] for i in offsets], [past - 1 + i for i in offsets], [past + i for i in rows]]
        sent = torch.tensor(values, pin_memory=self._ids.is_cuda).to(self._ids.device, non_blocking=True)
        self._ids.copy_(sent[0][:, None])
        self._positions.copy_(sent[1][:, None])
        cache.ends.copy_(sent[2])
        cache.advance(self.count)
        self.replay(model, cache, self.count)
        return self._logits, self._hidden

    def _forward(self, model: Any, cache: Any) -> None:
        self._logits, self._hidden = logits_and_hidden(
            model, self.count, self.with_hidden, input_ids=self._ids, position_ids=self._positions,
            past_key_values=cache, use_cache=True,
        )  # fmt: skip
