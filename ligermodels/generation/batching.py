"""`generate_many`: continuous batching. Many prompts of unequal length go through one batch of rows.

All rows have the same number of columns, as in `generate`: a prompt ends in the last column, so that its row begins as
many columns earlier as it has tokens. A finished row is free at any step: the next prompt runs on a cache of its own,
and its keys and values are copied into the row, to the columns before the current one. Kernels and CUDA graph read from
the device where each row begins. When no column is left, all rows move to the left.

The host reads one step late, as in `generate`: it reads a token while the model computes the next logits. A finished
row computes one token more, which is dropped.
"""

import math
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError, warn_once
from ligermodels.generation import graph
from ligermodels.generation.loop import AsyncToHost, generate, nan_logits
from ligermodels.generation.options import Options
from ligermodels.generation.processors import Applies, Change, LogitsProcessor, draw, make_processors
from ligermodels.generation.request import Request, checked_prompt, is_adapted
from ligermodels.generation.stopping import StopText
from ligermodels.kernels._triton import cdiv
from ligermodels.layers.cache import KVCache

SPARE_COLUMNS = 256
"""Columns beyond the longest row. All rows move, which reads and writes the cache, at most once in this many steps."""
REFILL_FRACTION = 8
"""Prompts are prefilled when one in REFILL_FRACTION rows is free: a prefill takes as long as several steps, for one
prompt or for several, and a free row wastes its share of each step."""
PREFILL_TOKENS = 16384
"""Maximum number of tokens of the prompts that are prefilled together, with padding."""

_EMPTY_ID = 2**40
"""The id in the columns before a row begins. It is no token: penalties do not count it."""
_REFUSED = {
    "attention_mask": "every id of a prompt is a token",
    "generation_config": "pass its options as keywords",
    "input_ids": "the prompts are the first argument",
    "inputs_embeds": "the prompts are ids; use `generate`",
    "inputs": "the prompts are the first argument",
    "medusa": "speculation is for one row; use `generate`",
    "prompt_lookup_num_tokens": "speculation is for one row; use `generate`",
    "logits_processor": "rows begin in different columns; use `generate`",
    "past_key_values": "the batch has a cache of its own",
    "stopping_criteria": "rows begin in different columns; use `generate`",
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
    rotary, longest, shortest = call.model.decoder.rotary_emb, max(map(len, texts)), min(map(len, texts))
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
    return _Batch(call, rows, longest, cdiv(most + SPARE_COLUMNS, graph.BUCKET) * graph.BUCKET).run()


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
    start: int  # the column of its prompt's first token
    max_new: int
    min_new: int  # new tokens before a stop id is allowed
    text: StopText | None
    ids: list[int] = field(default_factory=list)  # the new ids that the host has read


@dataclass
class _Ready:
    """Prefilled prompts, and their continuations that have no row yet."""

    prompts: Tensor  # [N, S], _EMPTY_ID before the shorter ones
    logits: Tensor  # [N, V] fp32, after the last token
    cache: KVCache
    waiting: deque[tuple[int, int]]  # row of the above, index in the result


class _Batch:
    def __init__(self, call: _Call, rows: int, longest: int, end: int):
        self.call, self.model, self.request, self.end = call, call.model, call.request, end
        self.options: Options = self.request.options
        self.device = self.model.device
        self.longest = longest
        copies = self.request.copies
        order = sorted(range(len(call.prompts)), key=lambda i: -len(call.prompts[i]))  # similar lengths run together
        self.waiting = deque(order)
        self.left = len(order) * copies  # continuations that have no row yet
        self.ready: _Ready | None = None
        self.rows: list[_Row | None] = [None] * rows
        self.captures = not self.options.disable_compile and self.device.type in graph.DEVICES
        if self.captures and (reason := graph.obstacle_to_capture(self.model)) is not None:
            graph.warn_uncaptured(reason)
            self.captures = False

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
        self.cache, kept = graph.take_cache(self.model, len(rows), self.end, options.kv_cache_dtype)
        self.decode: graph.Decode | None = None
        try:
            self.cache.shift(self.longest)
            self.ids = torch.full((len(rows), self.end), _EMPTY_ID, device=self.device)
            self.raw = torch.zeros(len(rows), vocab_size, device=self.device)  # logits of the next token
            while self.left or any(rows):
                if self.cache.length == self.end:
                    self._make_columns()
                free = [b for b, row in enumerate(rows) if row is None]
                if self.left and len(free) >= min(max(1, len(rows) // REFILL_FRACTION), self.left):
                    self._fill(free)
                column = self.cache.length
                processed = self.raw
                for process in processors:
                    processed = process(self.ids[:, :column], processed)
                best, token = processed.max(-1)
                if options.do_sample:
                    token = draw(processed, generator)
                self.ids[:, column] = token
                reading = AsyncToHost(torch.where(best > -math.inf, token, -1))
                if any(row is not None and len(row.ids) + 1 < row.max_new for row in rows):
                    self._step(token)
                yield from self._read(reading.result().tolist())
        finally:
            self.cache.reset()
            graph.keep_cache(self.model, self.cache, kept)

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

    def _step(self, token: Tensor) -> None:
        """The logits after `token` [B]."""
        assert self.decode is not None, "rows were placed"
        try:
            self.raw = self.decode(self.model, token).float()
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or not self.captures:
                raise
            graph.warn_uncaptured(f"its step cannot be captured, {graph.first_cause(error)}")
            self.captures, self.decode = False, None
            self._place()
            self._step(token)

    def _place(self) -> None:
        """Writes to the device where rows begin. A free row sees only its own token, at the first position."""
        column = self.cache.length
        starts = self._to_device([column if row is None else row.start for row in self.rows], torch.int32)
        if self.decode is None:
            self.decode = graph.Decode.of(self.cache)
            self.decode.begin(self.model, self.cache, starts, self.end, by_host=not self.captures)
        else:
            self.decode.place(self.cache, starts)

    def _make_columns(self) -> None:
        """Moves all rows to the left, as far as the longest of them and of the waiting prompts allows."""
        column = self.cache.length
        lengths = [column - row.start for row in self.rows if row is not None]
        lengths += [len(self.call.prompts[i]) for i in list(self.waiting)[:1]]
        lengths += [self.ready.cache.length] if self.ready is not None else []
        length = max(lengths)
        self.cache.shift(length)
        self.ids[:, :length] = self.ids[:, column - length : column].clone()  # the two ranges may overlap
        for row in self.rows:
            if row is not None:
                row.start -= column - length
        self._place()

    def _fill(self, free: list[int]) -> None:
        """Puts prompts into the `free` rows, and prefills more of them when none is ready."""
        column, copies = self.cache.length, self.request.copies
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
                max_new = self.call.limits[index // copies]
                self.rows[b] = _Row(index, column - len(prompt), max_new, min_new, text)
                sources.append(source)
                into.append(b)
            self.left -= len(into)
            taken, rows, width = self._to_device(sources), self._to_device(into), ready.prompts.shape[1]
            self.cache.put(ready.cache, taken, rows)
            self.ids[rows, : column - width] = _EMPTY_ID
            self.ids[rows, column - width : column] = ready.prompts[taken]
            self.raw = self.raw.index_put((rows,), ready.logits[taken])
            if not ready.waiting:
                self.ready = None
        self._place()

    def _prefill(self, count: int) -> _Ready:
        """Runs the next `count` prompts, or as many as PREFILL_TOKENS allow."""
        width, copies = len(self.call.prompts[self.waiting[0]]), self.request.copies
        kind = self.options.kv_cache_dtype
        count = min(count, len(self.waiting), max(1, PREFILL_TOKENS // width))
        chosen = [self.waiting.popleft() for _ in range(count)]
        prompts = torch.full((count, width), _EMPTY_ID)
        for row, i in zip(prompts, chosen, strict=True):
            row[width - len(self.call.prompts[i]) :] = self.call.prompts[i]
        is_padded = bool((prompts == _EMPTY_ID).any())
        prompts = prompts.to(self.device)
        cache, mask, positions = self.model.new_cache(count, width, kv_cache_dtype=kind), None, None
        if is_padded:
            mask = prompts != _EMPTY_ID
            positions = (mask.cumsum(1) - 1).clamp_(min=0)
        chunk = self.options.prefill_chunk_size or width
        with self.model.decoder.rotary_emb.of_length(width):
            for begin in range(0, width, chunk):
                part = slice(begin, begin + chunk)
                output = self.model(
                    input_ids=prompts[:, part].where(prompts[:, part] != _EMPTY_ID, 0),
                    attention_mask=None if mask is None else mask[:, : part.stop],
                    position_ids=None if positions is None else positions[:, part],
                    past_key_values=cache, use_cache=True, logits_to_keep=1,
                )  # fmt: skip
        waiting = deque((row, i * copies + copy) for row, i in enumerate(chosen) for copy in range(copies))
        return _Ready(prompts, output.logits[:, -1].float(), cache, waiting)

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
