"""Drafters: they propose the next tokens of a row, which one step of the model verifies.

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
from ligermodels.generation.graphs import BUCKET, Step
from ligermodels.generation.request import Request, check_device
from ligermodels.kernels.argmax import argmax
from ligermodels.kernels.operand import autocast_dtype
from ligermodels.layers.async_copy import AsyncToHost
from ligermodels.layers.batch import Batch, NextToken
from ligermodels.layers.state import Cache

MAX_GUESSES = 128
"""The maximum number of tokens that a drafter proposes at once: a verifying step has a row for each."""


class Drafter:
    """count: the maximum number of tokens proposed. follows: whether it has a method `follow`."""

    count: int
    follows = False

    def begin(self, cache: Cache, length: int, *, captures: bool) -> None:
        """Called once, after the prompt. cache: the model's, of up to `length` tokens. captures: whether proposals may
        run as a CUDA graph."""

    def propose(self, tokens: list[int], states: Tensor) -> list[int] | Tensor:
        """Guesses the tokens that follow `tokens`, the ids of the whole text.

        states [N, H]: the model's hidden states since the last call, up to the state of the last token but one.
        Returns up to `count` ids: a list, or an int64 tensor on the model's device, for which the host does not wait.
        """
        raise NotImplementedError

    def follow(self, ids: Tensor, states: Tensor, last: Tensor) -> Tensor:
        """`propose` after tokens that only the device knows: row i of the last pass has states[i] and the next id
        ids[i], and row `last`, int64 [1], has the last of the text. Returns `count` ids."""
        raise NotImplementedError


def drafter_of(request: Request) -> Drafter:
    """The drafter that a call asks for. Raises InputError for heads that are not the model's."""
    options = request.options
    if options.medusa is not None:
        return Medusa(request.model, options.medusa)
    if options.prompt_lookup_num_tokens is not None:
        return PromptLookup(options.prompt_lookup_num_tokens, options.max_matching_ngram_size)
    return MultiToken(request.model, options.num_assistant_tokens)


class PromptLookup(Drafter):
    """Proposes what followed the first earlier occurrence of the last few tokens.

    size: maximum length of the n-grams that are looked up; the longest match wins. The time of a call does not depend
    on the length of the text.
    """

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
            begin = self._after.get(tuple(tokens[-size:]))
            if begin is not None:
                return tokens[begin : begin + self.count]
        return []


class Medusa(Drafter):
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


class MultiToken(Drafter):
    """Proposes tokens by the model's own layer for multi-token prediction, `model.mtp`, each from the one before.

    The layer counts positions from the first token whose state it gets, even where the caller's cache has tokens before
    that: attention depends on distances between positions alone.
    """

    follows = True

    def __init__(self, model: Any, count: int):
        if getattr(model, "mtp", None) is None:
            raise InputError(
                f"use_mtp: this {type(model).__name__} has no layer for multi-token prediction; "
                "training.load_mtp(model) reads it from a checkpoint that has it"
            )
        self.model, self.count = model, count

    def begin(self, cache: Cache, length: int, *, captures: bool) -> None:
        key = ("mtp", self.count)
        if key not in cache.steps:
            cache.steps[key] = DraftStep(self.model, self.count)
        self.step: DraftStep = cache.steps[key]
        self.cache, self.unknown = self.step.own_cache, -1  # the number of tokens before the first whose state it got
        self.cache.reset()
        self.step.begin(self.model, self.cache, length + self.step.tokens + self.count, by_host=not captures)

    def propose(self, tokens: list[int], states: Tensor) -> Tensor:
        model, cache, step, ids = self.model, self.cache, self.step, tokens[-len(states) :]
        known, first = len(tokens) - 1 - len(states), max(0, len(ids) - step.tokens)
        if self.unknown < 0:
            self.unknown = known
        cache.length = known - self.unknown  # the rest is written again: the layer has no window
        if first:  # more tokens than a step reads
            following = torch.tensor([ids[:first]], device=states.device)
            positions = torch.arange(cache.length, cache.length + first, device=states.device)[None]
            _states_ahead(model, following, states[None, :first], positions, cache, past=cache.length)
            cache.advance(first)
        step.read(ids[first:], states[first:])
        return self.draft()

    def follow(self, ids: Tensor, states: Tensor, last: Tensor) -> Tensor:
        self.step.follow(ids, states, last)
        return self.draft()

    def draft(self) -> Tensor:
        """The proposals after what the step has read."""
        self.step.run(self.model, self.cache)
        return self.step.proposed


class DraftStep(Step):
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

    def read(self, ids: list[int], states: Tensor) -> None:
        """Takes the states [N, H] of the next N tokens, and the id after each."""
        past, count = self.own_cache.length, self.tokens
        self.write(ids + ids[-1:] * (count - len(ids)), [0] * count, range(past, past + count))
        self.last.fill_(len(ids) - 1)
        self.states[: len(ids), 0].copy_(states)

    def follow(self, ids: Tensor, states: Tensor, last: Tensor) -> None:
        """Takes the states [N, H] after the tokens that the last run has read; see `Drafter.follow`."""
        self.ends.add_(self.last)
        self.last.copy_(last)
        self.ids[:, 0] = ids
        self.states[:, 0] = states

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

    A turn drafts and verifies. The host waits for it once: for `found`, int64 [1 or 3, N], the N tokens of the pass,
    and where nothing but the logits decides (`greedy`), below them what follows each, of `argmax`. The next turn then
    needs nothing from the host either, and where the drafter can `follow`, it begins before the host waits.

    text: the ids of the row. reading: `found` of this turn; None after a pass of one token. ahead: `found`, and the
    same for the host, of the turn that runs ahead. farthest: that of the cache before it. proposed: the number of
    proposals. verified: index of the last token that sampling confirmed. hidden: [N, H], the states after the tokens.
    unread: states that the drafter has not read.
    """

    def __init__(self, request: Request):
        super().__init__(request)
        self.drafter = drafter_of(request)
        if self.drafter.count > MAX_GUESSES:
            raise InputError(f"a step verifies at most {MAX_GUESSES} proposed tokens, not {self.drafter.count}")
        self.capacity += self.drafter.count  # a step writes all of its guesses
        self.text, self.proposed, self.verified = request.input_ids[0].tolist(), 0, -1
        self.reading: AsyncToHost | None = None
        self.ahead: tuple[Tensor, AsyncToHost] | None = None
        self.greedy = not (self.options.do_sample or self.processors or self.keeps_logits)
        self.farthest, self.hidden = 0, torch.empty(0)
        self.unread: list[Tensor] = []
        self.call = self._run

    def prefill(self) -> None:
        super().prefill()
        self.runs_ahead = False
        self.drafter.begin(self.cache, self.capacity, captures=self.captures)

    def sample(self) -> Tensor:
        if self.reading is None or not self.greedy:
            return super().sample()
        self.length += 1
        self.rows[0].new += 1  # type: ignore[union-attr]
        return self.reading.result()[1:, self.verified : self.verified + 1]

    def step(self) -> None:
        drafter, rotary = self.drafter, self.model.decoder.rotary_emb
        if self.length == self.start:
            super().step()
            return
        last, after = self.rows[0].ids[-1], self.verified + 1  # type: ignore[union-attr]
        self.text.append(last)
        if self.reading is not None and after <= self.proposed and self.reading.result()[0, after] == last:
            self.verified, self.logits = after, self.captured.logits[after : after + 1]  # type: ignore[union-attr]
            return
        if self.ahead is not None:
            self.receive(*self.ahead)
            return
        self.unread.append(self.hidden[:after].clone())  # a copy, since the next pass overwrites `hidden`
        most = min(self.end - self.length - 1, rotary.tokens_left(self.longest), drafter.count)
        guesses: list[int] | Tensor = []
        if most:
            guesses = drafter.propose(self.text, torch.cat(self.unread))[: int(most)]
            self.unread = []
        self.cache.crop(self.length - 1)  # the GPU drafts meanwhile
        self.drop_stale()
        self.verified, self.reading = 0, None
        if not self.past:
            self.forward()
            return
        if self.captured is None:
            by_host, tokens = not self.captures, 1 + drafter.count
            self.captured = Step.of(self.model, self.cache, self.capacity, tokens, by_host=by_host)
        self.place(self.captured, last, guesses)
        self.proposed = len(guesses)
        self.receive(*self.verify(self.captured))

    def place(self, step: Step, last: int, guesses: list[int] | Tensor) -> None:
        """Puts each token into a row of its own, so that the kernels of decoding let it attend up to itself.

        Where guesses are missing, the last token is repeated at the position of the last guess, since rotary tables may
        depend on the largest position.
        """
        past, known = self.cache.length, [last] if isinstance(guesses, Tensor) else [last, *guesses]
        repeated = [max(0, i - len(guesses)) for i in range(step.tokens)]
        step.write(known + [last] * (step.tokens - len(known)), repeated, range(past, past + step.tokens))
        if isinstance(guesses, Tensor):
            step.ids[1 : 1 + len(guesses), 0] = guesses

    def verify(self, step: Step) -> tuple[Tensor, AsyncToHost]:
        """Computes the logits after each token of the step, and sends the host what it reads of them."""
        step.run(self.model, self.cache)
        self.hidden, self.logits, found = step.hidden, step.logits[:1], step.ids.t()
        if self.greedy:
            found = torch.cat([found, argmax(step.logits)])
        return found, AsyncToHost(found)

    def receive(self, found: Tensor, reading: AsyncToHost) -> None:
        """Begins to sample the tokens of a turn, and begins the next turn if nothing but a stop can make it useless."""
        step: Any = self.captured
        if self.ahead is not None:  # where it began is known now
            self.cache.length, self.cache.farthest = self.length - 1, self.farthest
            self.cache.advance(step.tokens)
        self.reading, self.verified, self.ahead, left = reading, 0, None, self.end - self.length
        if not self.greedy:
            return
        self.ids[:, self.length : self.length + step.tokens] = found[1:2, :left]
        if (
            left > step.tokens and self.drafter.follows and self.captures
            and self.model.decoder.rotary_emb.tokens_left(self.longest) == math.inf
        ):  # fmt: skip
            self.ahead = self.run_ahead(step, found)

    def run_ahead(self, step: Step, found: Tensor) -> tuple[Tensor, AsyncToHost]:
        """The turn after one of which the host knows nothing."""
        right = found[0, 1:] == found[1, :-1]
        last = right.long().cumprod(0).sum(0, keepdim=True)  # index of the last token that is right
        guesses = self.drafter.follow(found[1], step.hidden, last)
        step.ids[:, 0] = torch.cat([found[1, last], guesses])
        step.ends.add_(last)
        self.farthest = self.cache.farthest
        return self.verify(step)

    def _run(self, **inputs: Any) -> Any:
        """The output of the model, with logits of the last token alone; stores the hidden states."""
        output = self.model(**inputs | {"return_logits": False})
        hidden = output.last_hidden_state[0]
        if self.length == self.start:  # a chunk of the prompt
            self.unread.append(hidden)
        self.hidden = hidden[-1:]
        output["logits"] = self.model.logits_of(self.hidden[None])
        return output
