"""Drafters: they propose the next tokens of a row, which one step of the model verifies.

A drafter has `count`, the maximum number of tokens that it proposes, and `propose(tokens, states)`, which guesses those
that follow `tokens`, the ids of the whole text. states [N, H]: the model's hidden states since the last call, up to the
state of the last token but one. It returns up to `count` ids: a list, or an int64 tensor on the model's device, for
which the host does not wait.

The step reads the last token and K proposed ones, and gives the logits after each. Those after a proposed token are
right as long as the tokens proposed before it are. Each token is sampled from them as usual, by the same processors and
one draw. Where it differs from the proposed one, everything computed after it is dropped. So a token g is accepted with
the probability p(g) that the model gives it, and otherwise the token has the distribution p without g: the distribution
of the text is unchanged (https://arxiv.org/abs/2211.17192, for deterministic drafts), and a seed draws the same tokens.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.generation.engine import PaddedEngine
from ligermodels.generation.graphs import BUCKET, DecodeStep
from ligermodels.generation.request import Request, check_device
from ligermodels.kernels.linear.operand import autocast_dtype
from ligermodels.kernels.loss.argmax import argmax
from ligermodels.layers.async_copy import AsyncToHost
from ligermodels.layers.batch import Batch, NextToken
from ligermodels.layers.state import Cache


class PromptLookup:
    """Proposes what followed the first earlier occurrence of the last few tokens. size: maximum length of the n-grams
    that are looked up; the longest match wins. The time of a call does not depend on the length of the text."""

    def __init__(self, count: int, size: int):
        self.count, self.size = count, size
        self._read = 0  # number of tokens whose n-grams are in `_after`
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> the index after its first occurrence

    def propose(self, tokens: list[int], states: Tensor) -> list[int]:
        for end in range(self._read, len(tokens)):
            for size in range(1, min(self.size, end) + 1):
                self._after.setdefault(tuple(tokens[end - size : end]), end)
        self._read = len(tokens)
        for size in range(min(self.size, len(tokens)), 0, -1):
            if (begin := self._after.get(tuple(tokens[-size:]))) is not None:
                return tokens[begin : begin + self.count]
        return []


class Medusa:
    """heads: hidden states [1, H] -> the logits [1, V] of each of the next tokens but one."""

    def __init__(self, model: Any, heads: Any):
        hidden, vocabulary = model.config.get_text_config().hidden_size, model.config.get_text_config().vocab_size
        weights = [p for p in heads.parameters() if p.dim() == 2] if isinstance(heads, nn.ModuleList) else []
        if not weights or any(p.shape[1] != hidden or len(p) not in (hidden, vocabulary) for p in weights):
            raise InputError(
                f"medusa is a {type(heads).__name__} and must be the heads of a model with {hidden} hidden states and "
                f"{vocabulary} tokens: pass training.load_medusa(model, folder), or model.medusa"
            )
        check_device(model, medusa=weights[0])
        self.heads, self.count = heads, len(heads)

    def propose(self, tokens: list[int], states: Tensor) -> Tensor:
        return torch.cat([logits.argmax(-1) for logits in self.heads(states[-1:])])


class MultiToken:
    """Proposes tokens by the model's own layer for multi-token prediction, `model.mtp`, each from the one before. It
    counts positions from the first token whose state it gets: attention depends on distances between them alone."""

    def __init__(self, model: Any, count: int):
        if getattr(model, "mtp", None) is None:
            raise InputError(
                f"use_mtp: this {type(model).__name__} has no layer for multi-token prediction; "
                "training.load_mtp(model) reads it from a checkpoint that has it"
            )
        self.model, self.count = model, count

    def begin(self, cache: Cache, length: int, *, captures: bool) -> None:
        """After the prompt. cache: the model's, of up to `length` tokens. captures: whether drafts may be a graph."""
        key = ("mtp", self.count)
        if key not in cache.steps:
            cache.steps[key] = DraftStep(self.model, self.count)
        self.step: DraftStep = cache.steps[key]
        self.unknown: int | None = None  # the number of tokens before the first whose state it got
        self.step.own_cache.reset()
        length += self.step.tokens + self.count
        self.step.begin(self.model, self.step.own_cache, length, by_host=not captures)

    def propose(self, tokens: list[int], states: Tensor) -> Tensor:
        step, ids, past = self.step, tokens[-len(states) :], len(tokens) - 1 - len(states)
        if self.unknown is None:
            self.unknown = past
        past -= self.unknown  # tokens in the layer's cache; the rest is written again, as the layer has no window
        if first := max(0, len(ids) - step.tokens):  # more tokens than a step reads
            following = torch.tensor([ids[:first]], device=states.device)
            positions = torch.arange(past, past + first, device=states.device)[None]
            _states_ahead(self.model, following, states[None, :first], positions, step.own_cache, past_length=past)
            ids, states, past = ids[first:], states[first:], past + first
        step.write(ids + ids[-1:] * (step.tokens - len(ids)), [0] * step.tokens, range(past, past + step.tokens))
        step.last.fill_(len(ids) - 1)
        step.states[: len(ids), 0].copy_(states)
        return self.draft()

    def propose_on_device(self, ids: Tensor, states: Tensor, last: Tensor) -> Tensor:
        """`propose` after tokens that only the device knows: row i of the last pass has states[i] and the next id
        ids[i], and row `last`, int64 [1], has the last of the text. Returns `count` ids."""
        step = self.step
        step.ends.add_(step.last)
        step.last.copy_(last)
        step.ids[:, 0] = ids
        step.states[:, 0] = states
        return self.draft()

    def draft(self) -> Tensor:
        """The proposals after what the step has read."""
        self.step.run(self.model, self.step.own_cache)
        return self.step.proposed


class DraftStep(DecodeStep):
    """One draft of `MultiToken` after up to count + 1 new tokens: the step reads count + 1, and drops the others.

    own_cache: the layer's. states [count + 1, 1, H]: of the tokens; ids: the token after each. last [1]: the index of
    the last new one. proposed [count]: after `run`, in memory that the next run overwrites.
    """

    def __init__(self, model: Any, count: int):
        decoder, mixer = model.decoder, model.mtp.layers[0].self_attn
        table = decoder.embed_tokens.weight
        dtype = autocast_dtype(table) or decoder.compute_dtype  # the step does not move an empty state
        options = dict(kv_cache_dtype="auto", dtype=dtype, device=table.device)
        with torch.inference_mode(False):  # they outlive the call
            self.own_cache = Cache([mixer.new_state(1, BUCKET, whole=True, **options)], 1)
            super().__init__(self.own_cache, count + 1)
            self.states = self.own_cache[0].buffers[0].new_zeros(count + 1, 1, model.mtp.norm.weight.shape[0])
            self.last = torch.zeros(1, dtype=torch.int64, device=self.own_cache.device)
        self.count, self.proposed = count, torch.empty(0)

    def _compute(self, model: Any, cache: Cache, positions: Tensor) -> None:
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


class DraftingEngine(PaddedEngine):
    """`generate` of one row with a drafter. Logits after a proposed token exist before that token is sampled.

    A turn drafts and verifies. The host waits for it once: for `step_tokens`, int64 [1 or 3, N], the N tokens of the
    pass, and where nothing but the logits decides (`greedy`), below them what follows each, of `argmax`. The next turn
    then needs nothing from the host, and where the drafter is `MultiToken`, it begins before the host waits.

    text: the ids of the row. reading: the copy of `step_tokens` to the host; None after a pass of one token.
    next_reading: that of the next turn, where it has begun; the cache does not count its tokens yet. proposed: the
    number of proposals. verified: index of the last token that sampling confirmed. hidden: [N, H], the states after the
    tokens. unread: states that the drafter has not read.
    """

    def __init__(self, request: Request):
        super().__init__(request)
        options = self.options
        self.drafter: PromptLookup | Medusa | MultiToken
        if options.medusa is not None:
            self.drafter = Medusa(self.model, options.medusa)
        elif options.prompt_lookup_num_tokens is not None:
            self.drafter = PromptLookup(options.prompt_lookup_num_tokens, options.max_matching_ngram_size)
        else:
            self.drafter = MultiToken(self.model, options.num_assistant_tokens)
        self.capacity += self.drafter.count  # a step writes all of its guesses
        self.text, self.proposed, self.verified = request.input_ids[0].tolist(), 0, -1
        self.reading: AsyncToHost | None = None
        self.next_reading: AsyncToHost | None = None
        self.greedy = not (options.do_sample or self.processors or self.keeps_logits)
        self.step_tokens = self.hidden = torch.empty(0)
        self.unread: list[Tensor] = []
        self.call = self._run

    def prefill(self) -> None:
        super().prefill()
        self.overlap_read = False
        if isinstance(self.drafter, MultiToken):
            self.drafter.begin(self.cache, self.capacity, captures=self.captures)

    def sample(self) -> Tensor:
        if self.reading is None or not self.greedy:
            return super().sample()
        self.length += 1
        return self.reading.result()[1:, self.verified : self.verified + 1]

    def step(self) -> None:
        if self.length == self.start:
            super().step()
            return
        last, after = self.rows[0].ids[-1], self.verified + 1  # type: ignore[union-attr]
        self.text.append(last)
        if self.reading is not None and after <= self.proposed and self.reading.result()[0, after] == last:
            self.verified, self.logits = after, self.captured.logits[after : after + 1]  # type: ignore[union-attr]
            return
        if self.next_reading is not None:
            self.begin_turn(self.next_reading)
            return
        self.unread.append(self.hidden[:after].clone())  # a copy, since the next pass overwrites `hidden`
        # A pass of several tokens has one set of rotary frequencies.
        fits = self.model.decoder.rotary_emb.tokens_left(self.longest) >= self.drafter.count
        guesses: list[int] | Tensor = []
        if fits and (remaining := self.end - self.length - 1):
            guesses = self.drafter.propose(self.text, torch.cat(self.unread))[:remaining]
            self.unread = []
        self.cache.crop(self.length - 1)  # the GPU drafts meanwhile
        self.drop_stale()
        if not self.past or not fits:
            self.reading, self.verified = None, 0
            self.forward()
            return
        if self.captured is None:
            by_host, tokens = not self.captures, 1 + self.drafter.count
            self.captured = DecodeStep.of(self.model, self.cache, self.capacity, tokens, by_host=by_host)
        self.place(self.captured, last, guesses)
        self.proposed = len(guesses)
        self.begin_turn(self.verify(self.captured))

    def place(self, step: DecodeStep, last: int, guesses: list[int] | Tensor) -> None:
        """Puts each token into a row of its own, so that the kernels of decoding let it attend up to itself. The last
        token stands in for guesses that are missing."""
        past, known = self.cache.length, [last] if isinstance(guesses, Tensor) else [last, *guesses]
        ids = known + [last] * (step.tokens - len(known))
        step.write(ids, [0] * step.tokens, range(past, past + step.tokens))
        if isinstance(guesses, Tensor):
            step.ids[1 : 1 + len(guesses), 0] = guesses

    def verify(self, step: DecodeStep) -> AsyncToHost:
        """Computes the logits after each token of the step, and sends the host what it reads of them."""
        step.run(self.model, self.cache)
        self.hidden, self.logits, self.step_tokens = step.hidden, step.logits[:1], step.ids.t()
        if self.greedy:
            self.step_tokens = torch.cat([self.step_tokens, argmax(step.logits)])
        return AsyncToHost(self.step_tokens)

    def begin_turn(self, reading: AsyncToHost) -> None:
        """Begins to sample the tokens of a turn, and begins the next if nothing but a stop can make it useless."""
        step: Any = self.captured
        self.cache.length = self.length - 1  # where the turn began is known now
        self.cache.advance(step.tokens)
        self.reading, self.verified, self.next_reading, remaining = reading, 0, None, self.end - self.length
        if not self.greedy:
            return
        tokens, following, _ = self.step_tokens
        self.ids[0, self.length : self.length + step.tokens] = following[:remaining]
        if (
            remaining > step.tokens and isinstance(self.drafter, MultiToken) and self.captures
            and self.model.decoder.rotary_emb.tokens_left(self.longest) == math.inf
        ):  # fmt: skip
            right = tokens[1:] == following[:-1]
            last = right.long().cumprod(0).sum(0, keepdim=True)  # index of the last token that is right
            guesses = self.drafter.propose_on_device(following, step.hidden, last)
            step.ids[:, 0] = torch.cat([following[last], guesses])
            step.ends.add_(last)
            self.next_reading = self.verify(step)

    def close(self) -> None:
        if self.next_reading is not None and self.past:  # it has stored tokens, wherever it began
            self.cache.advance(self.captured.tokens)  # type: ignore[union-attr]
        super().close()

    def _run(self, **inputs: Any) -> Any:
        """The output of the model, with logits of the last token alone; stores the hidden states."""
        keep = 0 if isinstance(self.drafter, MultiToken) else 1  # which reads the states of the prompt
        output = self.model(**inputs | {"return_logits": False, "logits_to_keep": keep})
        hidden = output.last_hidden_state[0]
        if self.length == self.start:  # a chunk of the prompt
            self.unread.append(hidden)
        self.hidden = hidden[-1:]
        output["logits"] = self.model.logits_of(self.hidden[None])
        return output
