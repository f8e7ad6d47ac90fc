"""`generate_many`: continuous batching. Many prompts of unequal length go through one batch of rows.

Each row of the cache begins with its prompt, and the device knows where it ends. A finished row is free at any step:
the next prompt runs on a cache of its own, from which its state is copied into the row.

The host reads one step late, as in `generate`: it reads a token while the model computes the next logits. A finished
row computes one token more, which is dropped.
"""

import math
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError, warn_once
from ligermodels.generation import engine
from ligermodels.generation.loop import AsyncToHost, generate, nan_logits
from ligermodels.generation.options import Options
from ligermodels.generation.processors import Applies, Change, LogitsProcessor, draw, make_processors
from ligermodels.generation.request import Request, checked_prompt, is_adapted
from ligermodels.generation.stopping import StopText
from ligermodels.kernels._triton import cdiv
from ligermodels.layers.state import Cache

REFILL_FRACTION = 8
"""Prompts are prefilled when one in REFILL_FRACTION rows is free: a prefill takes as long as several steps, for one
prompt or for several, and a free row wastes its share of each step."""
PREFILL_TOKENS = 16384
"""Maximum number of tokens of the prompts that are prefilled together, with padding."""

_EMPTY_ID = 2**40
"""The id in columns without a token, which penalties do not count."""
_REFUSED = {
    "attention_mask": "every id of a prompt is a token",
    "generation_config": "pass its options as keywords",
    "input_ids": "the prompts are the first argument",
    "inputs_embeds": "the prompts are ids; use `generate`",
    "inputs": "the prompts are the first argument",
    "medusa": "speculation is for one row; use `generate`",
    "prompt_lookup_num_tokens": "speculation is for one row; use `generate`",
    "logits_processor": "rows have lengths of their own; use `generate`",
    "past_key_values": "the batch has a cache of its own",
    "stopping_criteria": "rows have lengths of their own; use `generate`",
    "streamer": "use `generate_many_iter`",
    "max_time": "leave the loop over `generate_many_iter` in time",
    "return_dict_in_generate": "it returns ids alone; use `generate`",
    "output_scores": "it returns ids alone; use `generate`",
    "output_logits": "it returns ids alone; use `generate`",
}
"""{argument of `generate`: why `generate_many` does not take it}."""


def generate_many(
    model: nn.Module,
    prompts: Sequence[Tensor | Sequence[int]],
    *,
    batch_size: int = 32,
    **options: Any,
) -> list[Tensor]:
    """Continues each prompt: the new ids, int64 on the CPU, stop id included, in the order of the prompts.

    In greedy decoding they are those of `generate` for each prompt alone, to within rounding. Draws differ from
    `generate`'s and have its distribution; the same call with the same `seed` gives the same ids.

    Args:
        prompts: ids of each, a list or a tensor [S] on any device. All of them are tokens: nothing is padding.
        batch_size: number of rows that decode together. Each size has a CUDA graph, which is kept for the next call.
        options: those of `generate`, such as max_new_tokens, temperature, seed, eos_token_id, num_return_sequences,
            prefill_chunk_size, stop_strings with tokenizer. max_length and min_length count a prompt's own tokens. A
            prompt runs once for all of its continuations, which follow each other in the result. Not supported:
            scores, logits and the cache (return_dict_in_generate), processors and criteria of the caller, max_time,
            embeddings and images.

    Rotary positions that depend on the longest row of a batch ("longrope", "dynamic") are exact within their original
    length; where prompts and new tokens go beyond it, prompts run one by one, with a warning.

    Raises:
        InputError: arguments out of range or not supported, ids outside the vocabulary, NaN logits.
    """
    found = dict(generate_many_iter(model, prompts, batch_size=batch_size, **options))
    return [found[i] for i in range(len(found))]


def generate_many_iter(
    model: nn.Module,
    prompts: Sequence[Tensor | Sequence[int]],
    *,
    batch_size: int = 32,
    **options: Any,
) -> Iterator[tuple[int, Tensor]]:
    """`generate_many` as an iterator: (index in its result, new ids) of each continuation as it ends.

    The longest prompts run first. The call checks its arguments, before the first step. To stop early, leave the loop.
    """
    texts = [_as_ids(i, prompt) for i, prompt in enumerate(prompts)]
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise InputError(f"batch_size={batch_size!r:.80} must be an integer of at least 1")
    if not hasattr(type(model), "new_cache"):
        raise InputError(
            f"generate_many needs a model of ligermodels, not a {type(model).__name__} around one: pass the model "
            "inside (`.module`, or PEFT's `get_base_model()`, whose layers keep their LoRA)"
        )
    if is_adapted(model):
        raise InputError("generate_many cannot run under an adapter that prepares the inputs of each step")
    options = {name: value for name, value in options.items() if value is not None or name not in _REFUSED}
    _refuse(options)
    if not texts:
        return iter(())
    call = _checked(model, texts, options)
    rotary, shortest = call.model.decoder.rotary_emb, min(map(len, texts))
    most = max(len(text) + limit for text, limit in zip(texts, call.limits, strict=True))
    always_long = rotary.rope_type == "longrope" and shortest > rotary.original_length
    if rotary.rope_type in ("dynamic", "longrope") and most > rotary.original_length and not always_long:
        warn_once(
            f"generate_many: one by one, {rotary.rope_type}",
            f"generate_many runs the prompts one by one: rope_type={rotary.rope_type!r} chooses its frequencies by the "
            f"longest row of a batch, and {most} tokens exceed its original length, {rotary.original_length}; shorten "
            "prompts or max_new_tokens to run batches",
        )
        return _one_by_one(call, options)
    rows = min(batch_size, len(texts) * call.request.copies)
    return _Batch(call, rows, most).run()


@dataclass(frozen=True, kw_only=True)
class _Call:
    model: Any
    prompts: list[Tensor]  # on the CPU
    limits: list[int]  # max_new_tokens of each
    request: Request  # of the longest prompt


def _refuse(options: Mapping[str, Any]) -> None:
    for name, reason in _REFUSED.items():
        if (value := options.get(name)) is not None and value is not False:
            raise InputError(f"generate_many does not take {name}: {reason}")


def _as_ids(index: int, prompt: Any) -> Tensor:
    try:
        ids = torch.as_tensor(prompt).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"prompt {index} is a {type(prompt).__name__}; it must be a list of token ids") from error
    if ids.dim() != 1 or not len(ids) or ids.dtype not in (torch.int64, torch.int32):
        raise InputError(
            f"prompt {index} is {list(ids.shape)} of {ids.dtype}; it must be a list of token ids or a tensor [S] of "
            "torch.int64, and have at least one token (the bos token, say)"
        )
    return ids.long()


def _checked(model: Any, prompts: list[Tensor], options: dict[str, Any]) -> _Call:
    every = torch.cat(prompts)[None].to(model.device)
    checked_prompt(model, every, None, None)
    longest = max(prompts, key=len)[None].to(model.device)
    # A row that has finished is not filled up: no pad id is needed.
    options = {"pad_token_id": 0, **options}
    request = Request.checked(model, longest, attention_mask=torch.ones_like(longest), **options)
    chosen = request.options
    _refuse(vars(chosen))  # the checkpoint's generation_config.json may set them
    if chosen.use_cache is False:
        raise InputError("generate_many needs its cache: leave use_cache out, or use `generate`")
    if request.inputs:
        raise InputError(f"generate_many reads text alone: leave {', '.join(sorted(request.inputs))} out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the longest prompt has caused them already
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        limits = [chosen.new_tokens(len(prompt), positions, set()) for prompt in prompts]
    return _Call(model=model, prompts=prompts, limits=limits, request=request)


def _one_by_one(call: _Call, options: dict[str, Any]) -> Iterator[tuple[int, Tensor]]:
    seed, copies = call.request.options.seed, call.request.copies
    for index in range(len(call.prompts) * copies):
        prompt = call.prompts[index // copies][None].to(call.model.device)
        own = {**options, "num_return_sequences": 1, "seed": None if seed is None else (seed + index) % 2**63}
        ids = generate(call.model, prompt, attention_mask=torch.ones_like(prompt), **own)
        yield index, ids[0, prompt.shape[1] :].cpu()  # type: ignore[index]


@dataclass
class _Row:
    """A row of the batch while it decodes one continuation."""

    index: int  # in the result
    prompt: int  # its length
    max_new: int
    min_new: int  # new tokens before a stop id is allowed
    text: StopText | None
    ids: list[int] = field(default_factory=list)  # the new ids that the host has read


@dataclass
class _Ready:
    """Prefilled prompts, and their continuations that have no row yet."""

    prompts: Tensor  # [N, S], _EMPTY_ID after the shorter ones
    lengths: Tensor  # [N]
    logits: Tensor  # [N, V] fp32, after the last token
    cache: Cache
    waiting: deque[tuple[int, int]]  # row of the above, index in the result


class _Batch:
    def __init__(self, call: _Call, rows: int, capacity: int):
        self.call, self.model, self.request, self.capacity = call, call.model, call.request, capacity
        self.options: Options = self.request.options
        self.device = self.model.device
        copies = self.request.copies
        order = sorted(range(len(call.prompts)), key=lambda i: -len(call.prompts[i]))  # similar lengths run together
        self.waiting = deque(order)
        self.left = len(order) * copies  # continuations that have no row yet
        self.ready: _Ready | None = None
        self.rows: list[_Row | None] = [None] * rows
        self.by_host = self.options.disable_compile or self.device.type not in engine.DEVICES
        if not self.by_host and (reason := engine.obstacle_to_capture(self.model)) is not None:
            engine.warn_uncaptured(reason)
            self.by_host = True

    @torch.no_grad()
    def run(self) -> Iterator[tuple[int, Tensor]]:
        options, request, rows = self.options, self.request, self.rows
        vocab_size = self.model.config.get_text_config().vocab_size
        processors = make_processors(
            options, (), counted=self._counted, mask=None, stop_ids=[i for i in request.eos_ids if i < vocab_size],
            device=self.device,
        )  # fmt: skip
        generator = None
        if options.seed is not None:
            generator = torch.Generator(self.device).manual_seed(int(options.seed))
        self.cache, key = self.model.engine.take(self.model, len(rows), self.capacity, options.kv_cache_dtype)
        self.step = cast(engine.Step, None)  # `_place` makes it
        try:
            self.ids = torch.full((len(rows), self.capacity), _EMPTY_ID, device=self.device)
            self.raw = torch.zeros(len(rows), vocab_size, device=self.device)  # logits of the next token
            while self.left or any(rows):
                free = [b for b, row in enumerate(rows) if row is None]
                if self.left and len(free) >= min(max(1, len(rows) // REFILL_FRACTION), self.left):
                    self._fill(free)
                processed, ids = self.raw, self._aligned_ids() if processors else self.ids
                for process in processors:
                    processed = process(ids, processed)
                best, token = processed.max(-1)
                if options.do_sample:
                    token = draw(processed, generator)
                self.ids.scatter_(1, self.step.ends[:, None].long(), token[:, None])
                reading = AsyncToHost(torch.where(best > -math.inf, token, -1))
                if any(row is not None and len(row.ids) + 1 < row.max_new for row in rows):
                    self._run(token)
                yield from self._read(reading.result().tolist())
        finally:
            self.cache.reset()
            self.model.engine.keep(self.cache, key)

    def _read(self, values: list[int]) -> Iterator[tuple[int, Tensor]]:
        """Appends the last token of each row, and yields the rows that are finished."""
        ended = []
        for b, (row, value) in enumerate(zip(self.rows, values, strict=True)):
            if row is None:
                continue
            if value < 0:
                raise nan_logits()
            row.ids.append(value)
            stopped = row.text is not None and row.text.ends_with(value)
            if stopped or value in self.request.eos_ids or len(row.ids) == row.max_new:
                ended.append(row)
                self.rows[b] = None
        if ended:
            self._place()
        for row in ended:
            yield row.index, torch.tensor(row.ids)

    def _run(self, token: Tensor) -> None:
        """The logits after `token` [B]."""
        self.step.ids.copy_(token[:, None])
        try:
            self.step.run(self.model, self.cache)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or self.by_host:
                raise
            engine.warn_uncaptured(f"its step cannot be captured, {engine.first_cause(error)}")
            self.by_host = self.step.by_host = True
            self._place()
            self.step.run(self.model, self.cache)
        self.raw = self.step.logits.float()

    def _place(self) -> None:
        """Writes to the device where rows end. A free row begins again, so that it stays shorter than the others."""
        ends = [0 if row is None else row.prompt + len(row.ids) for row in self.rows]
        self.cache.length = max(ends)
        if self.step is None:  # not before: the first prompts decide the dtype of the cache
            self.step = engine.step_of(self.cache)
            self.step.begin(self.model, self.cache, self.capacity, by_host=self.by_host)
        self.step.place(0, self._to_device(ends, torch.int32))

    def _aligned_ids(self) -> Tensor:
        """The ids [B, S] of all rows, ending in the last column, as processors read them; _EMPTY_ID before them."""
        width = max(row.prompt + len(row.ids) for row in self.rows if row is not None)
        columns = self.step.ends[:, None].long() - width + torch.arange(width, device=self.device)
        return self.ids.gather(1, columns.clamp(min=0)).masked_fill(columns < 0, _EMPTY_ID)

    def _fill(self, free: list[int]) -> None:
        """Puts prompts into the `free` rows, and prefills more of them when none is ready."""
        copies = self.request.copies
        while free and self.left:
            if self.ready is None:
                self.ready = self._prefill(cdiv(len(free), copies))
            ready, sources, into = self.ready, [], []
            while free and ready.waiting:
                source, index = ready.waiting.popleft()
                prompt, b = self.call.prompts[index // copies], free.pop(0)
                strings, text = self.request.stop_strings, None
                if strings:
                    text = StopText(self.request.tokenizer, strings, prompt[-8:].tolist())
                min_new = self.options.min_columns(len(prompt)) - len(prompt)
                self.rows[b] = _Row(index, len(prompt), self.call.limits[index // copies], min_new, text)
                sources.append(source)
                into.append(b)
            self.left -= len(into)
            taken, rows = self._to_device(sources), self._to_device(into)
            self.cache.put(ready.cache, taken, rows, ready.lengths[taken])
            self.ids[rows, : ready.prompts.shape[1]] = ready.prompts[taken]
            self.raw = self.raw.index_put((rows,), ready.logits[taken])
            if not ready.waiting:
                self.ready = None
        self._place()

    def _prefill(self, count: int) -> _Ready:
        """Runs the next `count` prompts, or as many as PREFILL_TOKENS allows, padded on the right to one length."""
        width, copies = len(self.call.prompts[self.waiting[0]]), self.request.copies
        count = min(count, len(self.waiting), max(1, PREFILL_TOKENS // width))
        chosen = [self.waiting.popleft() for _ in range(count)]
        prompts = torch.full((count, width), _EMPTY_ID)
        for row, i in zip(prompts, chosen, strict=True):
            row[: len(self.call.prompts[i])] = self.call.prompts[i]
        prompts, lengths = prompts.to(self.device), self._to_device([len(self.call.prompts[i]) for i in chosen])
        cache = self.model.new_cache(count, width, kv_cache_dtype=self.options.kv_cache_dtype, whole=True)
        ids, chunk, hidden = prompts.where(prompts != _EMPTY_ID, 0), self.options.prefill_chunk_size or width, None
        with self.model.decoder.rotary_emb.of_length(width):
            for begin in range(0, width, chunk):
                output = self.model(
                    input_ids=ids[:, begin : begin + chunk], past_key_values=cache, use_cache=True, return_logits=False
                )
                x, last = output.last_hidden_state, lengths - 1 - begin
                found = x[torch.arange(count, device=self.device), last.clamp(0, x.shape[1] - 1)]
                hidden = found if hidden is None else torch.where((last >= 0)[:, None], found, hidden)
        logits = engine.head_logits(self.model, cast(Tensor, hidden)).float()
        waiting = deque((row, i * copies + copy) for row, i in enumerate(chosen) for copy in range(copies))
        return _Ready(prompts, lengths, logits, cache, waiting)

    def _counted(self, applies: Applies, change: Change) -> LogitsProcessor:
        """`change` for the rows to which it applies by their own count of new tokens."""

        def process(ids: Tensor, logits: Tensor) -> Tensor:
            counts = [
                (b, len(row.ids)) for b, row in enumerate(self.rows)
                if row is not None and applies(len(row.ids), row.min_new, row.max_new)
            ]  # fmt: skip
            if not counts:
                return logits
            rows = self._to_device([b for b, _ in counts])
            new = self._to_device([new for _, new in counts], torch.float64)[:, None]
            return logits.index_put((rows,), change(logits[rows], new))

        return process

    def _to_device(self, values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        on_host = torch.tensor(values, dtype=dtype, pin_memory=self.device.type == "cuda")
        return on_host.to(self.device, non_blocking=True)
