"""The engine of `generate_many`: continuous batching. Many prompts of unequal length share the rows of one batch.

The device knows each row's first and last column in the cache, so a row is free as soon as it finishes. The next
prompts run on a cache of their own, padded on the left to one length; each is copied into a free row. The host reads a
token while the model computes the next logits, so a finished row computes one more token, which is dropped.
"""

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ligermodels.generation.engine import Engine, Row
from ligermodels.generation.graphs import DecodeStep
from ligermodels.generation.request import Request
from ligermodels.kernels._triton import cdiv
from ligermodels.layers.async_copy import to_device
from ligermodels.layers.state import Cache

REFILL_FRACTION = 8
"""Prompts run when one in REFILL_FRACTION rows is free: a prefill takes as long as several steps, for one prompt or for
several, and a free row wastes its share of each step."""
PREFILL_TOKENS = 16384
"""The maximum number of tokens of the prompts that run together, with padding."""

_EMPTY_ID = 2**40
"""The id in columns without a token, which processors do not count."""


class ContinuousEngine(Engine):
    """limits: max_new_tokens of each prompt. request: of the longest one.

    waiting: the prompts that have not run. ready: the continuations, without a row, of those that ran last: (row of
    prompt_logits [N, V] and of prompt_cache, index of the continuation in the result).
    """

    def __init__(self, request: Request, prompts: Sequence[Tensor], limits: Sequence[int], batch_size: int):
        self.prompts, self.limits, self.copies = prompts, limits, request.options.num_return_sequences
        self.capacity = max(map(len, prompts)) + max(limits)
        self.remaining = len(prompts) * self.copies  # continuations that have no row yet
        rows = min(batch_size, self.remaining)
        super().__init__(request, rows)
        self.ids = torch.zeros(rows, 2 * self.capacity, dtype=torch.int64, device=self.device)
        self.length = self.capacity
        # Similar lengths run together.
        self.waiting = deque(sorted(range(len(prompts)), key=lambda i: -len(prompts[i])))
        self.ready: deque[tuple[int, int]] = deque()
        self.prompt_cache: Cache | None = None

    def continuations(self) -> Iterator[tuple[int, Any]]:
        """(index in the result, new ids) of each continuation as it ends. With output_experts it is (index, (new ids,
        experts)): int16 [tokens of the text but the last, layers, top_k], on the CPU."""
        with contextlib.closing(self.decode()) as steps:  # `close` of this iterator keeps the cache at once
            for _ in steps:
                for b, row in enumerate(self.rows):
                    if row is not None and row.done:
                        ids = torch.tensor(row.ids)
                        yield row.index, (ids, self._experts(b, row)) if self.options.output_experts else ids

    def _experts(self, b: int, row: Row) -> Tensor:
        end = row.start + row.prompt + len(row.ids) - 1
        return self.cache.values["experts"][b, row.start : end].to("cpu", copy=True)

    def prefill(self) -> None:
        self.by_host = not self.can_capture()
        rows, kind = len(self.rows), self.options.kv_cache_dtype
        self.kept = self.model.kept_caches.take(self.model, rows, self.capacity, kind)
        self.cache = self.kept[1]
        self.record_experts(self.cache)
        self.logits = torch.zeros(rows, self.request.vocab_size, device=self.device)

    def admit(self) -> bool:
        ended = [b for b, row in enumerate(self.rows) if row is not None and row.done]
        for b in ended:
            self.rows[b] = None
        free = [b for b, row in enumerate(self.rows) if row is None]
        if fills := self.remaining and len(free) >= min(max(1, len(self.rows) // REFILL_FRACTION), self.remaining):
            self._assign_prompts(free)
        if self.length == self.ids.shape[1]:
            self.ids[:, : self.capacity] = self.ids[:, -self.capacity :].clone()
            self.length = self.capacity
        texts = [row.prompt + len(row.ids) for row in self.rows if row is not None]
        self.first = self.length - max(texts, default=0)
        if texts and (fills or ended):
            if self.captured is None:  # not before: the first prompts decide the dtype of the cache
                self.captured = DecodeStep.of(self.model, self.cache, self.capacity, by_host=self.by_host)
            # A free row begins again, so that it stays shorter than the others.
            starts = [0 if row is None else row.start for row in self.rows]
            ends = [0 if row is None else row.start + row.prompt + len(row.ids) for row in self.rows]
            self.cache.length = max(ends)
            self.captured.set_columns(*to_device([starts, ends], self.device, torch.int32))
        return bool(texts)

    def step(self) -> None:
        self.run_captured()
        self.logits = self.logits.float()

    def _assign_prompts(self, free: list[int]) -> None:
        """Puts prompts into the `free` rows, and runs more of them when none is ready."""
        while free and self.remaining:
            if not self.ready:
                self._run_prompts(cdiv(len(free), self.copies))
            ran: Any = self.prompt_cache
            into, free = free[: len(self.ready)], free[len(self.ready) :]
            sources, indices = zip(*(self.ready.popleft() for _ in into), strict=True)
            prompts = [self.prompts[index // self.copies] for index in indices]
            for b, index, prompt in zip(into, indices, prompts, strict=True):
                max_new_tokens, start = self.limits[index // self.copies], ran.length - len(prompt)
                self.rows[b] = self.new_row(len(prompt), prompt[-8:].tolist(), max_new_tokens, index, start)
            self.remaining -= len(into)
            taken, rows = to_device(sources, self.device), to_device(into, self.device)
            self.cache.copy_rows_from(ran, taken, rows)
            ids = to_device(pad_sequence(prompts, True, _EMPTY_ID, "left"), self.device)
            self.ids[rows] = _EMPTY_ID
            self.ids[rows, self.length - ids.shape[1] : self.length] = ids
            self.logits = self.logits.index_put((rows,), self.prompt_logits[taken])
            if not self.ready:
                self.prompt_cache = None  # frees its memory

    def _run_prompts(self, count: int) -> None:
        """Runs the next `count` prompts, or fewer if PREFILL_TOKENS does not allow as many, padded to the longest."""
        width = len(self.prompts[self.waiting[0]])
        chosen = [self.waiting.popleft() for _ in range(min(count, len(self.waiting), max(1, PREFILL_TOKENS // width)))]
        prompts = [self.prompts[i] for i in chosen]
        ids = to_device(pad_sequence(prompts, True, _EMPTY_ID, "left"), self.device)
        mask = None if len(prompts[-1]) == width else ids != _EMPTY_ID
        cache = self.model.new_cache(len(chosen), width, kv_cache_dtype=self.options.kv_cache_dtype, whole=True)
        self.record_experts(cache)
        output = self.run(ids if mask is None else ids * mask, cache, width, mask=mask)
        self.prompt_logits, self.prompt_cache = output["logits"][:, -1].float(), cache
        self.ready.extend((n, i * self.copies + copy) for n, i in enumerate(chosen) for copy in range(self.copies))
