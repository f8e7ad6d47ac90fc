"""The engine: one loop that decodes, `Engine.decode`.

A turn of the loop samples a token of each row on the model's device, and computes the logits after it. The host reads
one small tensor a turn where it has to decide or show something (stop ids, stop strings, criteria, streaming), and
nothing otherwise. graphs.py has the step that it runs, padded.py the engine of `generate`, continuous.py that of
`generate_many`.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import InputError, warn_once
from ligermodels.generation import graphs
from ligermodels.generation.processors import draw, make_processors
from ligermodels.generation.request import Request
from ligermodels.generation.stopping import StopText, ask_criteria
from ligermodels.kernels.argmax import argmax
from ligermodels.layers.async_copy import AsyncToHost


@dataclass
class Row:
    """A row in flight: one continuation of a prompt, as the host knows it.

    prompt: the length of the prompt. least, most: the number of new tokens before a stop id is allowed, and in all.
    text: searches for stop strings. index: of the continuation in the result of `generate_many`. new: the number of
    tokens sampled. ids: those of them that the host has read.
    """

    prompt: int
    least: int
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
    to_host: the host reads each token. mask [B, columns]: True at tokens; None: no padding.
    """

    prefill: Callable[[], None]
    """Allocates the cache; where all rows start together, runs the prompts."""
    admit: Callable[[], bool]
    """Acts on the rows that ended in the last turn; returns whether any row decodes."""
    step: Callable[[], None]
    """Sets `logits` to those after the last token of each row."""

    def __init__(self, request: Request, rows: int, columns: int, *, to_host: bool, mask: Tensor | None = None):
        options = request.options
        self.request, self.options, self.model, self.device = request, options, request.model, request.model.device
        self.to_host, self.runs_ahead = to_host, True
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
        self.broken = self.ids.new_zeros(rows)  # 1 where no token could be chosen

    @torch.no_grad()
    def decode(self) -> Generator[Tensor | None, None, None]:
        """Yields after each token: the new ids [B] on the CPU, or None where the host does not read them."""
        try:
            self.prefill()
            while self.admit():
                chosen = self.sample()
                reading = AsyncToHost(chosen) if self.to_host else None
                if ahead := self.runs_ahead and self.goes_on:
                    self.step()
                yield self.read(reading)
                if not ahead and self.goes_on:
                    self.step()
        finally:
            self.close()
        if not self.to_host and self.broken.any():
            raise _nan_logits()

    def new_row(self, prompt: int, recent: Sequence[int], most: int, index: int = 0) -> Row:
        """A row after a prompt of `prompt` tokens, whose last ones are `recent`."""
        text = None
        if self.request.stop_strings:
            text = StopText(self.request.tokenizer, self.request.stop_strings, recent)
        return Row(prompt, self.options.min_columns(prompt) - prompt, most, text, index)

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
        if not self.to_host:
            torch.maximum(self.broken, chosen[1], out=self.broken)
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

    def read(self, reading: AsyncToHost | None) -> Tensor | None:
        """Reads the last tokens and marks the rows that end with them. Raises InputError for NaN logits."""
        going = [(b, row) for b, row in enumerate(self.rows) if row is not None and not row.done]
        if reading is None:
            for _, row in going:
                row.done = row.new == row.most
            return None
        new, broken = reading.result()
        values, is_broken, asked = new.tolist(), broken.tolist(), [False] * len(new)
        if any(is_broken[b] for b, _ in going):
            raise _nan_logits()
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


def _nan_logits() -> InputError:
    return InputError(
        "the model's logits are NaN (or all -inf), so no token can be chosen; likely float16 overflow or damaged "
        "weights: load with dtype=torch.bfloat16 or torch.float32, and check the weight files and the logits_processor"
    )
