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

from ligermodels.generation.graphs import BUCKET, Step
from ligermodels.generation.processors import to_device
from ligermodels.generation.request import Request
from ligermodels.kernels.argmax import argmax
from ligermodels.layers.batch import Batch, NextToken
from ligermodels.layers.state import Cache


class Drafter(Protocol):
    """count: the maximum number of tokens proposed. needs_hidden: whether `propose` reads hidden states. reads_prompt:
    whether also those of the prompt."""

    count: int
    needs_hidden: bool
    reads_prompt: bool

    def begin(self, cache: Cache, *, captures: bool) -> None:
        """Comes before the prompt. cache: the model's. captures: whether proposals may be a CUDA graph."""

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

    def begin(self, cache: Cache, *, captures: bool) -> None:
        pass

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

    def begin(self, cache: Cache, *, captures: bool) -> None:
        pass

    def observe(self, token: int) -> None:
        pass

    def propose(self, hidden: Tensor) -> list[int]:
        return torch.stack([logits.argmax(-1) for logits in self.heads(hidden[-1:])])[:, 0].tolist()


class MultiToken:
    """Proposes by the model's own layer for multi-token prediction, `model.mtp`, each token from the one before.

    tokens: the prompt. start: the number of its tokens whose states nobody gives, since they are in a cache already.
    The layer counts positions from there: only their distances matter.
    """

    needs_hidden = reads_prompt = True

    def __init__(self, model: Any, tokens: Sequence[int], count: int, start: int = 0):
        self.model, self.count = model, count
        self.tokens: list[int] = list(tokens)
        self.read = start  # tokens whose states have been read
        self.room = 0  # tokens for which a captured step has memory

    def begin(self, cache: Cache, *, captures: bool) -> None:
        self.captures, key = captures, ("mtp", self.count)
        if key not in cache.steps:
            cache.steps[key] = DraftStep(self.model, self.count)
        self.step: DraftStep = cache.steps[key]
        self.cache = self.step.cache
        self.cache.reset()

    def observe(self, token: int) -> None:
        self.tokens.append(token)

    def propose(self, hidden: Tensor) -> list[int]:
        ids = self.tokens[self.read + 1 :]
        assert len(ids) == len(hidden), "the state of each token but the last is read once"
        self.read += len(ids)
        known, step = self.cache.length + len(ids), self.step
        if self.captures and self.cache.length and len(ids) <= step.tokens:
            if known + step.tokens + self.count > self.room:
                self.room = max(2 * self.room, known + BUCKET)
                step.begin(self.model, self.cache, self.room)
            step.read(ids, hidden)
            step.run(self.model, self.cache)
            proposed = step.proposed
        else:
            proposed = self._by_host(ids, hidden)
        self.cache.crop(known)
        return proposed.tolist()  # the host waits once

    def _by_host(self, ids: list[int], states: Tensor) -> Tensor:
        following, proposed = torch.tensor([ids], device=states.device), []
        for _ in range(self.count):
            past, length = self.cache.length, following.shape[1]
            positions = torch.arange(past, past + length, device=states.device)[None]
            states = _states_ahead(self.model, following, states[None], positions, self.cache, past=past)[0, -1:]
            self.cache.advance(length)
            following = argmax(self.model.logits_of(states))[:1]
            proposed.append(following[0])
        return torch.cat(proposed)


class DraftStep(Step):
    """One draft of `MultiToken` after up to count + 1 new tokens: the step reads count + 1, and drops the others.

    cache: of the layer. states [count + 1, 1, H]: of the tokens; ids: the token after each. last [1]: the index of the
    last new one. proposed [count]: after `run`, in memory that the next run overwrites.
    """

    def __init__(self, model: Any, count: int):
        decoder, mixer = model.decoder, model.mtp.layers[0].self_attn
        options = dict(kv_cache_dtype="auto", dtype=decoder.compute_dtype, device=decoder.embed_tokens.weight.device)
        with torch.inference_mode(False):  # they outlive the call
            self.cache = Cache([mixer.new_state(1, BUCKET, whole=True, **options)], 1)
            super().__init__(self.cache, count + 1)
            self.states = self.cache[0].buffers[0].new_zeros(count + 1, 1, model.mtp.norm.weight.shape[0])
            self.last = torch.zeros(1, dtype=torch.int64, device=self.cache.device)
        self.count, self.proposed = count, torch.empty(0)

    def read(self, ids: list[int], states: Tensor) -> None:
        """Takes the states [N, H] of the next N tokens, and the id after each."""
        past = self.cache.length
        padded = ids + ids[-1:] * (self.tokens - len(ids))
        numbers = [*padded, *range(past, past + self.tokens), len(ids) - 1]
        sent = to_device(numbers, self.ids.device, torch.int64)
        self.ids.copy_(sent[: self.tokens, None])
        self.place(0, sent[self.tokens : -1])
        self.last.copy_(sent[-1:])
        self.states[: len(ids), 0].copy_(states)

    def _compute(self, model: Any, cache: Cache) -> None:
        ids, states, ends = self.ids, self.states, self.ends
        proposed: list[Tensor] = []
        for _ in range(self.count):
            token = NextToken(starts=torch.zeros_like(ends), ends=ends)
            states = _states_ahead(model, ids, states, ends[:, None] - 1, cache, next_token=token)
            if not proposed:
                states, ends = states[self.last], ends[self.last]
            ids, ends = argmax(model.logits_of(states[:, 0]))[:1], ends + 1
            proposed.append(ids[0])
        self.proposed = torch.cat(proposed)


def _states_ahead(model: Any, ids: Tensor, states: Tensor, positions: Tensor, cache: Cache, **options: Any) -> Tensor:
    """The layer's states [B, N, H] of tokens with `states` [B, N, H]; ids [B, N]: the token after each."""
    batch = Batch(rotary={"full": model.decoder.rotary_emb(positions)}, **options)
    return model.mtp(model.decoder.embed_tokens(ids), states, batch, cache[0])
