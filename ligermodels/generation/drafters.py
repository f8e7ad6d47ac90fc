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

from ligermodels.generation.request import Request
from ligermodels.layers.batch import Batch
from ligermodels.layers.state import Cache

BUCKET = 512
"""The tokens after the prompt for which `MultiToken` has memory at first."""


class Drafter(Protocol):
    """count: the maximum number of tokens proposed. needs_hidden: whether `propose` reads hidden states. reads_prompt:
    whether also those of the prompt."""

    count: int
    needs_hidden: bool
    reads_prompt: bool

    def observe(self, token: int) -> None:
        """Takes a new token of the text."""

    def propose(self, hidden: Tensor) -> list[int]:
        """The tokens after the last one.

        hidden: [N, H] after the N tokens before the last one that were not in an earlier call; empty if not needed.
        """


def drafter_of(request: Request) -> Drafter | None:
    """The drafter that a call asks for."""
    options, prompt = request.options, request.input_ids[0]
    if options.medusa is not None:
        return Medusa(options.medusa)
    if options.prompt_lookup_num_tokens is not None:
        size, count = int(options.max_matching_ngram_size or 2), int(options.prompt_lookup_num_tokens)
        return PromptLookup(prompt.tolist(), count, size)
    if options.use_mtp:
        known = 0 if request.cache is None else request.cache.length
        return MultiToken(request.model, prompt.tolist(), int(options.num_assistant_tokens or 2), known)
    return None


class PromptLookup:
    """Proposes what followed the first earlier occurrence of the last few tokens.

    tokens: the text so far. size: the maximum n-gram that is looked up; the longest match wins. The time of a call does
    not depend on the length of the text.
    """

    needs_hidden = reads_prompt = False

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

    needs_hidden, reads_prompt = True, False

    def __init__(self, heads: Any):
        self.heads, self.count = heads, len(heads)

    def observe(self, token: int) -> None:
        pass

    def propose(self, hidden: Tensor) -> list[int]:
        return torch.stack([logits.argmax(-1) for logits in self.heads(hidden[-1:])])[:, 0].tolist()


class MultiToken:
    """Proposes by the model's own layer for multi-token prediction, `model.mtp`, each token from the one before.

    tokens: the prompt. start: the number of its tokens whose states nobody gives, since they are in a cache already.
    """

    needs_hidden = reads_prompt = True

    def __init__(self, model: Any, tokens: Sequence[int], count: int, start: int = 0):
        self.model, self.count = model, count
        self.tokens: list[int] = list(tokens)
        self.read = start  # tokens whose states have been read
        embedding = model.decoder.embed_tokens.weight
        mixer: Any = model.mtp.layers[0].self_attn
        options = dict(kv_cache_dtype="auto", dtype=model.decoder.compute_dtype, device=embedding.device, whole=True)
        self.cache = Cache([mixer.new_state(1, len(tokens) + BUCKET, **options)], 1)

    def observe(self, token: int) -> None:
        self.tokens.append(token)

    def propose(self, hidden: Tensor) -> list[int]:
        begin = self.read
        self.read += len(hidden)
        assert self.read == len(self.tokens) - 1, "the state of each token but the last is read once"
        known, proposed, states = self.cache.length + len(hidden), [], hidden
        ids = torch.tensor([self.tokens[begin + 1 :]], device=hidden.device)
        for _ in range(self.count):
            states = self._states(ids, states, begin)[-1:]
            begin += ids.shape[1]
            ids = self.model.logits_of(states).argmax(-1, keepdim=True)
            proposed.append(ids)
        self.cache.crop(known)
        return torch.cat(proposed, 1)[0].tolist()  # the host waits once

    def _states(self, ids: Tensor, hidden: Tensor, position: int) -> Tensor:
        """The layer's states [N, H] of N tokens from `position` on; ids [1, N]: the token after each."""
        decoder, cache = self.model.decoder, self.cache
        positions = torch.arange(position, position + ids.shape[1], device=hidden.device)[None]
        batch = Batch(rotary={"full": decoder.rotary_emb(positions)}, past=cache.length)
        states = self.model.mtp(decoder.embed_tokens(ids), hidden[None], batch, cache[0])[0]
        cache.advance(ids.shape[1])
        return states
