"""The engine: one loop that decodes, `Engine.decode`.

A step of the loop samples a token of each row on the model's device, and computes the logits after it. The host reads
one small tensor a step; where steps are graphs, while the model computes the next logits. graphs.py has the step that
it runs, continuous.py the engine of `generate_many`, drafters.py the one that verifies proposed tokens.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError, warn_once
from ligermodels.generation import graphs
from ligermodels.generation.graphs import DecodeStep
from ligermodels.generation.processors import draw, make_processors
from ligermodels.generation.request import ADAPTED, Request, is_adapted
from ligermodels.generation.stopping import StopText, apply_stopping_criteria
from ligermodels.kernels.loss.argmax import argmax
from ligermodels.layers.async_copy import AsyncToHost, to_device
from ligermodels.layers.state import as_cache


@dataclass
class Row:
    """One continuation of a prompt that is being decoded, as far as the host knows it.

    prompt: number of tokens of the prompt. text: searches for stop strings.
    index: of the continuation in the result of `generate_many`. start: the row's first column in the cache.
    ids: the sampled tokens, all but the one that the host has not read.
    """

    prompt: int
    max_new_tokens: int
    text: StopText | None = None
    index: int = 0
    start: int = 0
    done: bool = False
    ids: list[int] = field(default_factory=list)


class Engine:
    """Decodes the rows of one call, and owns their cache, ids and step.

    rows: a Row for each sequence of the batch, or None where none decodes. ids [B, columns]: the text of every row ends
    before column `length`; processors read it from column `first` on. logits [B, V]: of the next tokens.
    mask [B, columns]: True at tokens; None: no padding. overlap_read: the next step begins before the host reads a
    token.
    """

    prefill: Callable[[], None]  # allocates the cache; where all rows start together, runs the prompts
    admit: Callable[[], bool]  # acts on the rows that ended in the last step; returns whether any row decodes
    step: Callable[[], None]  # sets `logits` to those after the last token of each row
    ids: Tensor
    capacity: int  # of the cache, in columns

    def __init__(self, request: Request, rows: int, mask: Tensor | None = None):
        options = request.options
        self.request, self.options, self.model, self.device = request, options, request.model, request.model.device
        self.overlap_read = True
        self.rows: list[Row | None] = [None] * rows
        self.call: Callable[..., Any] = self.model
        # PEFT's prompt learning replaces this method, and makes a cache with virtual tokens before the prompt.
        self.prepare = self.model.prepare_inputs_for_generation
        self.length = self.first = 0
        self.logits = torch.empty(0)
        self.cache: Any = None
        self.kept: Any = None  # an entry of `KeptCaches.take`, for the next call
        self.captured: DecodeStep | None = None  # None before `begin`, and after the model ran in another way
        keeps = options.return_dict_in_generate
        self.scores: list[Tensor] | None = [] if keeps and options.output_scores else None
        self.raw_logits: list[Tensor] | None = [] if keeps and options.output_logits else None
        self.processors = make_processors(request, self.rows, None if request.num_embed_columns else mask)
        # Whether anyone may store the logits; the caller's processor may.
        self.keeps_logits = self.raw_logits is not None or self.scores is not None or bool(request.processors)
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
                if begun := self.overlap_read and self.needs_step(unread=1):
                    self.step()
                yield self.read(reading)
                if not begun and self.needs_step():
                    self.step()
        except BaseException as error:
            # Unless the caller left the loop, some layers may have stored tokens that others have not.
            if not isinstance(error, GeneratorExit) and self.cache is not None and self.cache.foreign is None:
                self.cache.reset()
            raise
        finally:
            self.close()

    def run_captured(self) -> None:
        """`step` as a replay of the captured one."""
        step: Any = self.captured
        step.ids.copy_(self.ids[:, self.length - 1 : self.length])
        step.run(self.model, self.cache)
        self.cache.advance(1)
        self.logits = step.logits

    def record_experts(self, *caches: Any) -> None:
        """Where they are asked for, the caches store the experts that routers choose. Raises InputError."""
        config = self.model.config.get_text_config()
        if not self.options.output_experts:
            return
        if not getattr(config, "num_experts_per_tok", 0) or any(
            cache is None or cache.foreign is not None for cache in caches
        ):
            raise InputError("output_experts needs a mixture of experts, and a cache of ours (use_cache=True)")
        for cache in caches:
            cache.record_experts(self.capacity, config.num_hidden_layers, config.num_experts_per_tok)

    def new_row(self, prompt: int, recent: Sequence[int], max_new_tokens: int, index: int = 0, start: int = 0) -> Row:
        """A row after a prompt of `prompt` tokens, whose last ones are `recent`."""
        strings = self.options.stop_strings
        text = StopText(self.request.tokenizer, strings, recent) if strings else None
        return Row(prompt, max_new_tokens, text, index, start)

    def run(
        self, ids: Tensor, cache: Any, longest: int, *, past: int = 0, mask: Tensor | None = None,
        embeds: Tensor | None = None, inputs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """The output for the columns of `ids` [B, S] from `past` on; runs in chunks and extends `cache`.

        mask [B, S] and embeds [B, S, H], read in place of ids, may be None. longest: tokens of the longest row.
        """
        # Positions 0, 1, ... at the tokens of each row; padding has the position of the token before it, or 0.
        positions = None if mask is None else (mask.cumsum(1) - 1).clamp_(min=0)
        length = ids.shape[1]
        chunk = self.options.prefill_chunk_size or length
        with self.model.decoder.rotary_emb.of_length(longest):
            for begin in range(past, length, chunk):
                end = min(begin + chunk, length)
                part = {} if embeds is None else {"inputs_embeds": embeds[:, begin:end]}
                rest: dict[str, Any] = {"logits_to_keep": 1}  # the engine reads no other state
                rest |= (inputs or {}) if end == length else {"return_logits": False}
                prepared = self.prepare(
                    ids[:, begin:end], attention_mask=None if mask is None else mask[:, :end],
                    position_ids=None if positions is None else positions[:, begin:end], past_key_values=cache,
                    use_cache=self.options.use_cache, **part, **rest,
                )  # fmt: skip
                if part and prepared.get("inputs_embeds") is not part["inputs_embeds"]:
                    raise InputError("inputs_embeds contradicts an adapter that adds virtual tokens: pass input_ids")
                output = self.call(**prepared | {"input_ids": None} if part else prepared)
        return output

    def needs_step(self, unread: int = 0) -> bool:
        """Whether a row needs another token, as far as the host knows. unread: tokens that it has not read."""
        return any(row is not None and not row.done and len(row.ids) + unread < row.max_new_tokens for row in self.rows)

    def sample(self) -> Tensor:
        """Appends a token to each row. Returns [2, B]: the tokens, and 1 where no token is possible."""
        logits, sampled = self.logits, self.options.do_sample
        if self.keeps_logits or self.processors or sampled:
            logits = logits.to(torch.float32, copy=self.keeps_logits)
        if self.raw_logits is not None:
            self.raw_logits.append(logits)
        for process in self.processors:
            logits = process(self.ids[:, self.first : self.length], logits)
            if getattr(logits, "shape", None) != self.logits.shape:
                raise InputError(f"logits_processor must return logits of shape {list(self.logits.shape)}")
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
        return chosen

    def read(self, reading: AsyncToHost) -> Tensor:
        """Reads the last tokens and marks the rows that end with them. Raises InputError for NaN logits."""
        going = [(b, row) for b, row in enumerate(self.rows) if row is not None and not row.done]
        new, broken = reading.result()
        values, is_broken, asked = new.tolist(), broken.tolist(), [False] * len(new)
        if any(is_broken[b] for b, _ in going):
            causes = "float16 overflow (load with dtype=torch.bfloat16), damaged weights or a logits_processor"
            raise InputError(f"the logits are NaN (or all -inf), so no token can be chosen; likely {causes}")
        if self.request.criteria:
            seen = None if self.scores is None else tuple(self.scores)
            asked = apply_stopping_criteria(self.request.criteria, self.ids[:, self.first : self.length], seen).tolist()
        for b, row in going:
            row.ids.append(values[b])
            is_stop = row.text is not None and row.text.ends_with(values[b])
            row.done = is_stop or asked[b] or values[b] in self.request.eos_ids or len(row.ids) == row.max_new_tokens
        return new

    def can_capture(self, *reasons: Any) -> bool:
        """Whether steps can be graphs. Where not, warns with the first of the reasons, or what the model has."""
        if self.options.disable_compile or self.device.type not in graphs.DEVICES:
            return False
        reason = next(filter(None, reasons), None) or graphs.obstacle_to_capture(self.model)
        if reason is not None:
            slow = f"generate launches every kernel from the host, which limits its speed: {reason}"
            warn_once(f"uncaptured: {reason}", f"{slow}. disable_compile=True asks for this and does not warn")
        return reason is None

    def close(self) -> None:
        """Keeps the cache for the next call, unless it is returned to the caller."""
        if self.kept is not None and not self.options.return_dict_in_generate:
            self.model.kept_caches.keep(self.kept)


class PaddedEngine(Engine):
    """The engine of `generate`: rows of one length, padded on the left, that start together.

    The columns of the cache are those of the ids. The prompt runs once for all its copies.
    """

    def __init__(self, request: Request):
        prompt, copies = request.input_ids, request.options.num_return_sequences
        new, mask = request.max_new_tokens, request.mask
        self.mask = None if mask is None else F.pad(mask, (0, new), value=True)  # [B, end]
        all_rows = None if self.mask is None else self.mask.repeat_interleave(copies, 0)
        super().__init__(request, len(prompt) * copies, all_rows)
        self.ids, self.embeds = F.pad(prompt.long(), (0, new)), request.embeds
        self.first, self.start = request.num_embed_columns, prompt.shape[1]
        self.length, self.end = self.start, self.start + new
        recent = prompt[:, max(self.first, self.start - 8) :].tolist()
        self.rows[:] = [self.new_row(self.start, ids, new) for ids in recent for _ in range(copies)]
        self.done, self.capacity = [False] * len(self.rows), self.end
        self.cache, self.is_adapted = request.cache, is_adapted(self.model)
        self.virtual = 0  # the number of virtual tokens
        self.synced = bool(self.options.synced_gpus) and dist.is_available() and dist.is_initialized()

    @property
    def past(self) -> int:
        """The number of cached columns."""
        return 0 if self.cache is None else self.cache.length - self.virtual

    def prefill(self) -> None:
        model, rows, kind = self.model, len(self.ids), self.options.kv_cache_dtype
        is_foreign = self.cache is not None and self.cache.foreign is not None
        steps = self.options.use_cache and self.request.max_new_tokens > 1
        self.captures = self.overlap_read = (
            steps
            and not self.synced
            and self.can_capture(
                self.is_adapted and ADAPTED,
                is_foreign and "past_key_values is a cache of transformers; model.new_cache makes one of ours",
                not self.request.pads_left and "attention_mask has gaps between tokens",
            )
        )
        if self.options.use_cache and self.cache is None and not self.is_adapted:
            if self.captures:
                self.kept = model.kept_caches.take(model, len(self.rows), self.capacity, kind)
            if self.captures and rows == len(self.rows):
                self.cache = self.kept[1]
            else:
                length = self.start if self.captures else self.capacity
                self.cache = model.new_cache(rows, length, kv_cache_dtype=kind, whole=self.captures)
        self.record_experts(self.cache)
        self.step()
        if rows == len(self.rows):
            return
        source = torch.arange(rows, device=self.device).repeat_interleave(len(self.rows) // rows)
        self.ids, self.logits = self.ids[source], self.logits[source]
        self.mask, self.embeds = (None if x is None else x[source] for x in (self.mask, self.embeds))
        if self.kept is not None:
            prompts, self.cache = self.cache, self.kept[1]
            self.cache.copy_rows_from(prompts, source)
        elif self.cache is not None:
            self.cache.reorder(source)

    def admit(self) -> bool:
        done = [row.done for row in self.rows if row is not None]
        if done != self.done and not all(done):
            self.finished = to_device(done, self.device, torch.bool)
        self.done = done
        if self.synced and all(done):
            while self.any_rank_steps(False):
                self.call(input_ids=self.ids[:, :1], use_cache=False)
        return not all(done)

    def any_rank_steps(self, this_one: bool) -> bool:
        """Whether a process runs another step. Where weights are sharded, all must run the model as often."""
        steps = torch.tensor(float(this_one), device=self.device)
        dist.all_reduce(steps)
        return steps.item() > 0

    def step(self) -> None:
        if self.synced and self.length > self.start:
            self.any_rank_steps(True)
        self.drop_stale()
        if not self.captures or self.length == self.start or self.past < self.length - 1:
            self.forward()
            return
        if self.captured is None:
            self.captured = DecodeStep.of(self.model, self.cache, self.capacity)
            self.captured.set_columns(0 if self.mask is None else self.mask[:, : self.past].int().argmax(1), self.past)
        self.run_captured()

    @property
    def longest(self) -> int:
        """The tokens of the longest row."""
        return self.request.longest + self.length - self.start + self.virtual

    def drop_stale(self) -> None:
        """Empties the cache where its keys do not fit the rotary tables of the next token (longrope), or where the last
        pass before this call failed midway."""
        new, rotary = self.length - self.past, self.model.decoder.rotary_emb
        switches = self.past and rotary.needs_recompute(self.longest - new, self.longest)
        if switches and self.is_adapted:
            self.cache = None
        elif switches or (self.cache is not None and self.cache.is_partial):
            self.cache.reset()

    def forward(self) -> None:
        """Runs the columns that are not cached."""
        length, past, self.captured = self.length, self.past, None
        ids, mask = self.ids[:, :length], None if self.mask is None else self.mask[:, :length]
        embeds = self.embeds if past < self.start else None
        if embeds is not None:
            new = self.model.get_input_embeddings()(ids[:, self.start :]).to(embeds.dtype)
            embeds = torch.cat([embeds, new], 1)
        inputs = self.request.inputs if length == self.start or past == 0 else None
        output = self.run(ids, self.cache, self.longest, past=past, mask=mask, embeds=embeds, inputs=inputs)
        if self.options.use_cache and self.cache is None:
            self.cache = as_cache(output.past_key_values, self.model.config.get_text_config().num_hidden_layers)
            self.virtual = self.cache.length - length
        self.logits = output["logits"][:, -1]

    def close(self) -> None:
        if self.past > self.length - 1:  # the loop was left while a step ran ahead
            self.cache.crop(self.length - 1)
        ends = [self.start + len(row.ids) for row in self.rows if row is not None]
        if self.past > min(ends) and any(state.is_recurrent for state in self.cache):
            self.cache.reset()  # the state of a row that ended early has read pad ids, which no mask takes out of it
        super().close()
