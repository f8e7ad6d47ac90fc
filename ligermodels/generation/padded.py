"""The engine of `generate`: rows of one length, padded on the left, that start together.

The columns of the cache are those of the ids. The prompt runs once for all its copies, and only its last position gets
logits. With a drafter (drafters.py), the logits after a token may be known before it is sampled; the loop is the same.
"""

from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.generation import graphs
from ligermodels.generation.drafters import drafter_of
from ligermodels.generation.engine import Engine
from ligermodels.generation.graphs import Step
from ligermodels.generation.processors import to_device
from ligermodels.generation.request import ADAPTED, Request, is_adapted
from ligermodels.layers.state import TransformersCache, as_cache


class PaddedEngine(Engine):
    def __init__(self, request: Request, *, to_host: bool):
        options, prompt, copies = request.options, request.input_ids, request.copies
        rows, self.start = len(prompt) * copies, prompt.shape[1]
        self.end = self.start + request.max_new_tokens
        self.drafter = drafter_of(request)
        self.guesses = 0 if self.drafter is None else self.drafter.count  # at most, in a step
        self.mask: Tensor | None = None  # [B, end]
        if request.mask is not None:
            self.mask = torch.ones(rows, self.end, dtype=torch.bool, device=prompt.device)
            self.mask[:, : self.start] = request.mask.repeat_interleave(copies, 0)
        super().__init__(request, rows, self.end, to_host=to_host or self.drafter is not None, mask=self.mask)
        self.ids[:, : self.start] = prompt.repeat_interleave(copies, 0)
        self.length, self.first = self.start, request.without_ids
        recent: list[list[int]] = [[]] * rows
        if request.stop_strings:
            recent = self.ids[:, max(self.first, self.start - 8) : self.start].tolist()
        self.rows[:] = [self.new_row(self.start, ids, request.max_new_tokens) for ids in recent]

        self.use_cache = options.use_cache is not False
        # PEFT's prompt learning replaces this method, and makes a cache with virtual tokens before the prompt.
        self.prepare, self.is_adapted = self.model.prepare_inputs_for_generation, is_adapted(self.model)
        self.cache = request.cache
        self.virtual = 0  # the number of virtual tokens
        self.finished_rows = 0
        self.captured: Step | None = None  # the step, where it has begun and nothing ran since
        # Of the last pass of the model with a drafter: the tokens that it read, the last one and the proposed ones;
        # [N, V] and [N, H], N >= len(tokens), after each; and the index of the one that the last token follows.
        self.tokens, self.verified = [0], 0
        self.all_logits = self.hidden = torch.empty(0)
        self.unread: list[Tensor] = []  # hidden states of earlier tokens that the drafter has not seen

    @property
    def past(self) -> int:
        """The number of cached columns."""
        return 0 if self.cache is None else self.cache.length - self.virtual

    def prefill(self) -> None:
        prompt, kind = self.request.input_ids, self.options.kv_cache_dtype
        capacity = self.end + self.guesses  # a captured step writes all of its guesses
        crosses = bool(getattr(self.model.decoder.config, "cross_attention_layers", ()))
        self.captures = self.use_cache and self.request.max_new_tokens > 1 and self.can_capture(
            self.is_adapted and ADAPTED,
            isinstance(self.cache, TransformersCache)
            and "past_key_values is a cache of transformers; model.new_cache makes one of ours",
            not self.request.pads_left and "attention_mask has gaps between tokens",
            self.drafter is not None and crosses and "speculation does not capture cross-attention",
        )  # fmt: skip
        self.runs_ahead = self.captures and self.drafter is None
        if self.use_cache and self.cache is None and not self.is_adapted:
            if self.captures:
                self.kept = self.model.kept_caches.take(self.model, len(self.rows), capacity, kind)
                self.cache = self.kept[1]
            else:
                self.cache = self.model.new_cache(len(prompt), self.end, kv_cache_dtype=kind)
        if self.drafter is not None:
            self.cache.reserve(capacity, 1 + self.guesses)  # a step of several tokens is taken back in part
            self.drafter.begin(self.cache, captures=self.captures)
        self.step()

    def admit(self) -> bool:
        done = [row.done for row in self.rows if row is not None]
        if done.count(True) > self.finished_rows and not all(done):
            self.finished, self.finished_rows = to_device(done, self.device, torch.bool), done.count(True)
        return not all(done)

    def step(self) -> None:
        request, drafter, is_prompt = self.request, self.drafter, self.length == self.start
        if drafter is not None and not is_prompt:
            last, after = self.rows[0].ids[-1], self.verified + 1  # type: ignore[union-attr]
            drafter.observe(last)
            if after < len(self.tokens) and self.tokens[after] == last:
                self.logits, self.verified = self.all_logits[after : after + 1], after
                return
            self._drop_after(self.length - 1)
        rotary, past = self.model.decoder.rotary_emb, self.past
        longest = request.longest + self.length - self.start + self.virtual  # tokens of the longest row
        # Where the cached keys no longer fit the rotary tables (longrope), the whole text runs again.
        if past and rotary.needs_recompute(longest - (self.length - past), longest):
            past = 0
            if self.is_adapted:
                self.cache = None
            else:
                self.cache.reset()
        if drafter is not None and not is_prompt:
            most = min(self.end - self.length - 1, rotary.tokens_left(longest), drafter.count) if past else 0
            if drafter.needs_hidden:
                self.unread.append(self.hidden[: self.verified + 1].clone())
            self.tokens = [last]
            if most:
                hidden, self.unread = torch.cat(self.unread) if self.unread else self.hidden, []
                self.tokens += drafter.propose(hidden)[: int(most)]
        if self.captures and past == self.length - 1 and not is_prompt:
            self._captured_step()
        else:
            self._forward(longest)

    def _captured_step(self) -> None:
        drafter, step = self.drafter, self.captured
        if step is None:
            with_hidden = drafter is not None and drafter.needs_hidden
            step = self.captured = graphs.step_of(self.cache, 1 + self.guesses, with_hidden=with_hidden)
            step.begin(self.model, self.cache, self.end + self.guesses)
            self.place(step)
        if drafter is None:
            step.ids.copy_(self.ids[:, self.length - 1 : self.length])
        else:
            self.place(step)
        step.run(self.model, self.cache)
        self.logits = step.logits
        if drafter is not None:
            self._keep(step.logits.float(), step.hidden)

    def place(self, step: Step) -> None:
        """With a drafter, the tokens are rows of one token each: each attends up to itself, by the kernels of decoding.

        Where guesses are missing the last token is repeated, at its own position: rotary tables may depend on the
        largest one.
        """
        past = self.cache.length
        if self.drafter is None:
            step.place(0 if self.mask is None else self.mask[:, :past].int().argmax(1), past)
            return
        repeated = [max(0, i + 1 - len(self.tokens)) for i in range(step.tokens)]
        tokens = [self.tokens[i - n] for i, n in enumerate(repeated)]
        ids, starts, ends = to_device([tokens, repeated, list(range(past, past + step.tokens))], self.device)
        step.ids.copy_(ids[:, None])
        step.place(starts, ends)

    def _forward(self, longest: int) -> None:
        """Runs the columns that are not cached, and the guesses. longest: the tokens of the longest row."""
        request, model, length, past, cache = self.request, self.model, self.length, self.past, self.cache
        is_prompt, self.captured = length == self.start, None
        copies = request.copies if self.use_cache and is_prompt else 1  # a prompt runs once for all its copies
        if copies > 1 and self.kept is not None:
            kind = self.options.kv_cache_dtype
            cache = model.new_cache(len(request.input_ids), length, kv_cache_dtype=kind, whole=True)
        ids = self.ids[::copies, :length]
        if guesses := [] if is_prompt else self.tokens[1:]:
            ids = torch.cat([ids, ids.new_tensor([guesses])], 1)
        mask = None if self.mask is None else self.mask[::copies, :length]
        # 0, 1, ... at the tokens of each row; padding has the position of the token before it, or 0.
        positions = None if mask is None else (mask.cumsum(1) - 1).clamp_(min=0)
        embeds = self._embeds(copies) if past < self.start else None

        def inputs_of(begin: int, end: int, **options: Any) -> dict[str, Any]:
            """The inputs of the model for the columns from `begin` to `end`."""
            own = {} if embeds is None else {"inputs_embeds": embeds[:, begin:end]}
            inputs = self.prepare(
                ids[:, begin:end],
                attention_mask=None if mask is None else mask[:, :end],
                position_ids=None if positions is None else positions[:, begin:end],
                past_key_values=cache,
                use_cache=self.use_cache,
                **own,
                **options,
            )
            if own and inputs.get("inputs_embeds") is not own["inputs_embeds"]:
                raise InputError("inputs_embeds contradicts an adapter that adds virtual tokens: pass input_ids")
            return {**inputs, "input_ids": None} if own else inputs

        reads_prompt = is_prompt and self.drafter is not None and self.drafter.reads_prompt
        begin, chunk, end = past, self.options.prefill_chunk_size, ids.shape[1]
        if chunk is not None:
            with model.decoder.rotary_emb.of_length(longest):
                while length - begin > chunk:
                    output = model(**inputs_of(begin, begin + chunk, return_logits=False))
                    if reads_prompt:
                        self.unread.append(output.last_hidden_state[0])
                    begin += chunk
        count, extra = 1 + end - length, request.inputs if is_prompt or past == 0 else {}
        with_hidden = self.drafter is not None and self.drafter.needs_hidden
        if with_hidden:
            extra = {**extra, "return_logits": False}
        output = model(**inputs_of(begin, end, logits_to_keep=count, **extra))
        if self.use_cache and cache is None:
            self.cache = as_cache(output.past_key_values, model.config.get_text_config().num_hidden_layers)
            self.virtual = self.cache.length - length
        if self.drafter is not None:
            hidden = output.last_hidden_state[0, -count:] if with_hidden else self.hidden
            if reads_prompt:
                self.unread.append(output.last_hidden_state[0, :-count])
            self._keep(model.logits_of(hidden) if with_hidden else output.logits[0, -count:], hidden)
            return
        self.logits = output.logits[:, -1]
        if copies > 1:
            copied = torch.arange(len(request.input_ids), device=ids.device).repeat_interleave(copies)
            if self.kept is not None:
                self.cache.take(cache, copied)
            else:
                self.cache.reorder(copied)
            self.logits = self.logits[copied]

    def _embeds(self, copies: int) -> Tensor | None:
        """The embeddings of all columns, for every copies-th row; None if the prompt came as ids."""
        embeds = self.request.embeds
        if embeds is None:
            return None
        new = self.ids[::copies, self.start : self.length]
        embeds = embeds.repeat_interleave(self.request.copies // copies, 0)
        return torch.cat([embeds, self.model.get_input_embeddings()(new).to(embeds.dtype)], 1)

    def _keep(self, logits: Tensor, hidden: Tensor) -> None:
        """Keeps what a pass gave after each of `tokens`; `logits` are those after the last token."""
        self.all_logits, self.hidden, self.verified, self.logits = logits, hidden, 0, logits[:1]

    def _drop_after(self, length: int) -> None:
        """Drops from the cache what was computed past the first `length` columns."""
        if self.past > length and (self.captured is not None or self.drafter is not None):
            self.cache.crop(length)

    def close(self) -> None:
        self._drop_after(self.length - 1)
        super().close()
