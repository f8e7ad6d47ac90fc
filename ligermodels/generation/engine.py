"""The engine: one loop that decodes, `Engine.decode`.

A turn of the loop samples a token of each row on the model's device, and computes the logits after it. The host reads
one small tensor a turn; where steps are graphs, while the model computes the next logits. graphs.py has the step that
it runs, continuous.py the engine of `generate_many`, drafters.py the one that verifies proposed tokens.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError, warn_once
from ligermodels.generation import graphs
from ligermodels.generation.graphs import Step
from ligermodels.generation.processors import draw, make_processors, to_device
from ligermodels.generation.request import ADAPTED, Request, is_adapted
from ligermodels.generation.stopping import StopText, ask_criteria
from ligermodels.kernels.argmax import argmax
from ligermodels.layers.async_copy import AsyncToHost
from ligermodels.layers.state import TransformersCache, as_cache


@dataclass
class Row:
    """A row in flight: one continuation of a prompt, as the host knows it.

    prompt: the length of the prompt. most: the maximum number of new tokens. text: searches for stop strings. index: of
    the continuation in the result of `generate_many`. new: the number of tokens sampled. ids: those of them that the
    host has read.
    """

    prompt: int
    most: int
    text: StopText | None = None
    index: int = 0
    new: int = 0
    done: bool = False
    ids: list[int] = field(default_factory=list)


class Engine:
    """Decodes the rows of one call, and owns their cache, ids and step.

    rows: one a sequence of the batch; None where nothing decodes. ids [B, columns]: the text of all rows ends before
    the column `length`; processors read it from the column `first` on. logits [B, V]: of the next tokens.
    mask [B, columns]: True at tokens; None: no padding. runs_ahead: the next step begins before the host reads a token.
    """

    prefill: Callable[[], None]
    """Allocates the cache; where all rows start together, runs the prompts."""
    admit: Callable[[], bool]
    """Acts on the rows that ended in the last turn; returns whether any row decodes."""
    step: Callable[[], None]
    """Sets `logits` to those after the last token of each row."""

    def __init__(self, request: Request, rows: int, columns: int, mask: Tensor | None = None):
        options = request.options
        self.request, self.options, self.model, self.device = request, options, request.model, request.model.device
        self.runs_ahead = True
        self.rows: list[Row | None] = [None] * rows
        self.ids = torch.zeros(rows, columns, dtype=torch.int64, device=self.device)
        self.length = self.first = 0
        self.logits = torch.empty(0)
        self.cache: Any = None
        self.kept: Any = None  # an entry of `KeptCaches.take`, for the next call
        keeps = options.return_dict_in_generate
        self.scores: list[Tensor] | None = [] if keeps and options.output_scores else None
        self.raw_logits: list[Tensor] | None = [] if keeps and options.output_logits else None
        self.processors = make_processors(request, self.rows, None if request.without_ids else mask)
        self.generator = None
        if options.seed is not None:
            self.generator = torch.Generator(self.device).manual_seed(int(options.seed))
        self.finished: Tensor | None = None  # bool [B], the rows that get pad ids

    @torch.no_grad()
    def decode(self) -> Generator[Tensor, None, None]:
        """Yields the new ids [B], on the CPU, after each token."""
        try:
            self.prefill()
            while self.admit():
                chosen = self.sample()
                reading = AsyncToHost(chosen)
                if ahead := self.runs_ahead and self.goes_on:
                    self.step()
                yield self.read(reading)
                if not ahead and self.goes_on:
                    self.step()
        finally:
            self.close()

    def new_row(self, prompt: int, recent: Sequence[int], most: int, index: int = 0) -> Row:
        """A row after a prompt of `prompt` tokens, whose last ones are `recent`."""
        strings = self.options.stop_strings
        text = StopText(self.request.tokenizer, strings, recent) if strings else None
        return Row(prompt, most, text, index)

    @property
    def goes_on(self) -> bool:
        """Whether a row needs another token, as far as the host knows."""
        return any(row is not None and not row.done and row.new < row.most for row in self.rows)

    def sample(self) -> Tensor:
        """Appends a token to each row. Returns [2, B]: the tokens, and 1 where no token is possible."""
        logits, sampled = self.logits, self.options.do_sample
        kept = self.raw_logits is not None or self.scores is not None or bool(self.request.processors)
        if kept or self.processors or sampled:  # a processor of the caller may keep them
            logits = logits.to(torch.float32, copy=kept)
        if self.raw_logits is not None:
            self.raw_logits.append(logits)
        for process in self.processors:
            logits = process(self.ids[:, self.first : self.length], logits)
        if self.scores is not None:
            self.scores.append(logits)
        chosen = argmax(logits)
        token = chosen[0]
        if sampled:
            token.copy_(draw(logits, self.generator))
        if self.finished is not None:
            token.masked_fill_(self.finished, self.request.pad_id)
        self.ids[:, self.length] = token
        self.length += 1
        for row in self.rows:
            if row is not None:
                row.new += 1
        return chosen

    def read(self, reading: AsyncToHost) -> Tensor:
        """Reads the last tokens and marks the rows that end with them. Raises InputError for NaN logits."""
        going = [(b, row) for b, row in enumerate(self.rows) if row is not None and not row.done]
        new, broken = reading.result()
        values, is_broken, asked = new.tolist(), broken.tolist(), [False] * len(new)
        if any(is_broken[b] for b, _ in going):
            raise InputError(
                "the model's logits are NaN (or all -inf), so no token can be chosen; likely float16 overflow or "
                "damaged weights: load with dtype=torch.bfloat16 or torch.float32, and check the weight files and the "
                "logits_processor"
            )
        if self.request.criteria:
            seen = None if self.scores is None else tuple(self.scores)
            asked = ask_criteria(self.request.criteria, self.ids[:, self.first : self.length], seen).tolist()
        for b, row in going:
            row.ids.append(values[b])
            found = row.text is not None and row.text.ends_with(values[b])
            row.done = found or asked[b] or values[b] in self.request.eos_ids or row.new == row.most
        return new

    def can_capture(self, *reasons: Any) -> bool:
        """Whether steps can be graphs. Where not, warns with the first of the reasons, or what the model has."""
        if self.options.disable_compile or self.device.type not in graphs.DEVICES:
            return False
        reason = next(filter(None, reasons), None) or graphs.obstacle_to_capture(self.model)
        if reason is not None:
            warn_once(
                f"uncaptured: {reason}",
                f"generate launches every kernel from the host, which limits its speed: {reason}. The tokens are the "
                "same, to within rounding; disable_compile=True asks for this and does not warn",
            )
        return reason is None

    def close(self) -> None:
        """Keeps the cache for the next call, unless the caller gets it."""
        if self.kept is not None and not self.options.return_dict_in_generate:
            self.model.kept_caches.keep(self.kept)


class PaddedEngine(Engine):
    """The engine of `generate`: rows of one length, padded on the left, that start together.

    The columns of the cache are those of the ids. The prompt runs once for all its copies.
    """

    def __init__(self, request: Request):
        prompt, copies = request.input_ids, request.options.num_return_sequences
        rows, self.start = len(prompt) * copies, prompt.shape[1]
        self.end = self.start + request.max_new_tokens
        self.mask: Tensor | None = None  # [B, end]
        if request.mask is not None:
            self.mask = F.pad(request.mask.repeat_interleave(copies, 0), (0, request.max_new_tokens), value=True)
        super().__init__(request, rows, self.end, self.mask)
        self.ids[:, : self.start] = prompt.repeat_interleave(copies, 0)
        self.length, self.first = self.start, request.without_ids
        recent = (
            self.ids[:, max(self.first, self.start - 8) : self.start].tolist()
            if self.options.stop_strings
            else [[]] * rows
        )
        self.rows[:] = [self.new_row(self.start, ids, request.max_new_tokens) for ids in recent]
        self.done, self.capacity = [False] * rows, self.end
        self.use_cache = self.options.use_cache is not False
        self.call: Callable[..., Any] = self.model
        # PEFT's prompt learning replaces this method, and makes a cache with virtual tokens before the prompt.
        self.prepare, self.is_adapted = self.model.prepare_inputs_for_generation, is_adapted(self.model)
        self.cache = request.cache
        self.virtual = 0  # the number of virtual tokens
        self.captured: Step | None = None  # the step, where it has begun and nothing else ran since

    @property
    def past(self) -> int:
        """The number of cached columns."""
        return 0 if self.cache is None else self.cache.length - self.virtual

    def prefill(self) -> None:
        self.captures = self.runs_ahead = self.use_cache and self.request.max_new_tokens > 1 and self.can_capture(
            self.is_adapted and ADAPTED,
            isinstance(self.cache, TransformersCache)
            and "past_key_values is a cache of transformers; model.new_cache makes one of ours",
            not self.request.pads_left and "attention_mask has gaps between tokens",
        )  # fmt: skip
        kind = self.options.kv_cache_dtype
        if self.use_cache and self.cache is None and not self.is_adapted:
            if self.captures:
                self.kept = self.model.kept_caches.take(self.model, len(self.rows), self.capacity, kind)
                self.cache = self.kept[1]
            else:  # its rows are multiplied with those of the prompt
                self.cache = self.model.new_cache(len(self.request.input_ids), self.capacity, kv_cache_dtype=kind)
        self.step()

    def admit(self) -> bool:
        done = [row.done for row in self.rows if row is not None]
        if done != self.done and not all(done):
            self.finished = to_device(done, self.device, torch.bool)
        self.done = done
        return not all(done)

    def step(self) -> None:
        self.drop_stale()
        if not self.captures or self.length == self.start or self.past < self.length - 1:
            self.forward()
            return
        if self.captured is None:
            self.captured = Step.of(self.model, self.cache, self.capacity)
            self.captured.place(0 if self.mask is None else self.mask[:, : self.past].int().argmax(1), self.past)
        self.captured.ids.copy_(self.ids[:, self.length - 1 : self.length])
        self.captured.run(self.model, self.cache)
        self.logits = self.captured.logits

    @property
    def longest(self) -> int:
        """The tokens of the longest row."""
        return self.request.longest + self.length - self.start + self.virtual

    def drop_stale(self) -> None:
        """Empties the cache where its keys do not fit the rotary tables of the next token (longrope)."""
        new = self.length - self.past
        if not self.past or not self.model.decoder.rotary_emb.needs_recompute(self.longest - new, self.longest):
            return
        if self.is_adapted:
            self.cache = None
        else:
            self.cache.reset()

    def forward(self) -> None:
        """Runs the columns that are not cached."""
        request, model, length, past, cache = self.request, self.model, self.length, self.past, self.cache
        is_prompt, self.captured = length == self.start, None
        copies = (
            self.options.num_return_sequences if self.use_cache and is_prompt else 1
        )  # a prompt runs once for all its copies
        if copies > 1 and self.kept is not None:
            kind = self.options.kv_cache_dtype
            cache = model.new_cache(len(request.input_ids), length, kv_cache_dtype=kind, whole=True)
        ids, mask = self.ids[::copies, :length], None if self.mask is None else self.mask[::copies, :length]
        # 0, 1, ... at the tokens of each row; padding has the position of the token before it, or 0.
        positions = None if mask is None else (mask.cumsum(1) - 1).clamp_(min=0)
        embeds = request.embeds if past < self.start else None
        if embeds is not None:
            new = model.get_input_embeddings()(ids[:, self.start :]).to(embeds.dtype)
            embeds = torch.cat([embeds.repeat_interleave(self.options.num_return_sequences // copies, 0), new], 1)

        def run(begin: int, end: int, **options: Any) -> Any:
            """The output of the model for the columns from `begin` to `end`."""
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
            return self.call(**inputs | {"input_ids": None} if own else inputs)

        begin, chunk = past, self.options.prefill_chunk_size or length
        extra = request.inputs if is_prompt or past == 0 else {}
        with model.decoder.rotary_emb.of_length(self.longest):
            while length - begin > chunk:
                run(begin, begin + chunk, return_logits=False)
                begin += chunk
            output = run(begin, length, logits_to_keep=1, **extra)
        if self.use_cache and cache is None:
            self.cache = as_cache(output.past_key_values, model.config.get_text_config().num_hidden_layers)
            self.virtual = self.cache.length - length
        self.logits = output.logits[:, -1]
        if copies > 1:
            copied = torch.arange(len(request.input_ids), device=ids.device).repeat_interleave(copies)
            if self.kept is not None:
                self.cache.take(cache, copied)
            else:
                self.cache.reorder(copied)
            self.logits = self.logits[copied]

    def close(self) -> None:
        if self.past > self.length - 1:  # the loop was left while a step ran ahead
            self.cache.crop(self.length - 1)
        super().close()
