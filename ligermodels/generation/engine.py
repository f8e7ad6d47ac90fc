"""The engine: one loop that decodes, `Engine.decode`, and the step of one token a row that it runs, `Step`.

A turn of the loop samples a token of each row on the model's device, and computes the logits after it. The host reads
one small tensor a turn where it has to decide or show something (stop ids, stop strings, criteria, streaming), and
nothing otherwise. padded.py has the engine of `generate`, continuous.py that of `generate_many`.

On CUDA a step is a graph: the host launches the hundreds of kernels of a model in one call, and reads a token while the
model computes the next logits. A `Step` reads and writes the memory of one cache, at positions that are on the device.
`KeptCaches` keeps the caches of a model with their steps for the next call: `model.kept_caches`, freed by
`model.release()`.

A graph repeats the kernels of its capture, with the addresses and numbers of that time. Every call therefore checks
what a graph cannot run, hooks and modules and weights of unknown kinds (`obstacle_to_capture`), and captures again
where anything has changed that the capture read (`Step.begin`).
"""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from ligermodels.errors import InputError, warn_once
from ligermodels.generation.processors import draw, make_processors
from ligermodels.generation.request import Request
from ligermodels.generation.stopping import StopText, ask_criteria
from ligermodels.kernels._triton import as_if_capturing, cdiv
from ligermodels.kernels.argmax import argmax
from ligermodels.layers.async_copy import AsyncToHost
from ligermodels.layers.linear import is_untouched
from ligermodels.layers.state import Cache, RecurrentState

DEVICES = {"cuda"}
"""Types of devices that decode by `Step`. Others can, without a graph, which tests make use of."""
BUCKET = 512
"""The capacity of kept caches is a multiple of this number of tokens."""
MAX_KEPT = 4
"""The maximum number of caches that a model keeps for its next call."""
KEPT_SHARE = 8
"""The kept caches of a model take at most 1 / KEPT_SHARE of the GPU's memory."""

_PLAIN = {bool, int, float, str, type(None)}


class Step:
    """One forward pass of N tokens over `cache`: one of each row, or the next N = `tokens` of one row.

    ids [N, 1]: the tokens. starts, ends: int32 [N] on the device, the column of a row's first token and the column
    after its last, to which its new token is written; `run` counts it. After `run`, logits [N, V] and, with_hidden,
    hidden [N, H] are those after the tokens, in memory that the next run overwrites.
    """

    def __init__(self, cache: Cache, tokens: int = 1, *, with_hidden: bool = False):
        rows = cache.rows * tokens
        self.tokens, self.with_hidden, self.by_host = tokens, with_hidden, False
        with torch.inference_mode(False):  # they outlive the call
            self.ids, self._positions = torch.zeros(2, rows, 1, dtype=torch.int64, device=cache.device).unbind()
            self.starts, self.ends = torch.zeros(2, rows, dtype=torch.int32, device=cache.device).unbind()
        self.logits = self.hidden = torch.empty(0)
        self._captured: Any = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def begin(self, model: Any, cache: Cache, length: int, *, by_host: bool = False) -> None:
        """Comes before the first run, and after anything else has changed model or cache.

        length: the capacity that the cache needs. by_host: the host launches every kernel, without a graph.
        """
        self.by_host = by_host or cache.device.type != "cuda"
        cache.reserve(length, self.tokens)
        state = self._state(model, cache)
        if state != self._captured:
            self._graph, self._captured = None, state

    def place(self, starts: Tensor | int, ends: Tensor | int) -> None:
        """Sets `starts` and `ends`: numbers, or tensors [N] of any device."""
        for mine, value in ((self.starts, starts), (self.ends, ends)):
            mine.copy_(value, non_blocking=True) if isinstance(value, Tensor) else mine.fill_(value)
        self._positions.copy_((self.ends - self.starts - 1)[:, None])

    def run(self, model: Any, cache: Cache) -> None:
        """Computes the step and counts its tokens."""
        cache.advance(self.tokens)
        try:
            if self.by_host:
                self._forward(model, cache)
                return
            with torch.cuda.device(cache.device):
                if self._graph is None:
                    self._graph = self._capture(model, cache)
                self._graph.replay()
        except BaseException:
            cache.crop(cache.length - self.tokens)
            raise

    def _forward(self, model: Any, cache: Cache) -> None:
        torch.clear_autocast_cache()  # weights that were cast outside of the graph are not in it, nor the reverse
        self._positions.add_(1)
        self.ends.add_(1)
        output = model(
            input_ids=self.ids, position_ids=self._positions, past_key_values=cache, step=(self.starts, self.ends),
            return_logits=not self.with_hidden,
        )  # fmt: skip
        if self.with_hidden:
            self.hidden = output.last_hidden_state[:, -1]
            self.logits = model.logits_of(self.hidden)
        else:
            self.logits = output.logits[:, -1]
        torch.clear_autocast_cache()

    def _capture(self, model: Any, cache: Cache) -> torch.cuda.CUDAGraph:
        values, stream, graph = dict(cache.values), torch.cuda.Stream(), torch.cuda.CUDAGraph()
        recurrent = [x for state in cache if isinstance(state, RecurrentState) for x in state.buffers]
        before = [x.clone() for x in recurrent]
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                # Compiles kernels and initialises libraries. The graph's first run writes keys and values again; a
                # recurrent state would take the token twice.
                with as_if_capturing():
                    self._forward(model, cache)
                self._positions.sub_(1)
                self.ends.sub_(1)
                for x, was in zip(recurrent, before, strict=True):
                    x.copy_(was)
                cache.values = dict(values)
                # "relaxed": another thread may allocate or pin memory meanwhile.
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
                    self._forward(model, cache)
        finally:
            torch.cuda.current_stream().wait_stream(stream)
            cache.values = values
        return graph

    def _state(self, model: Any, cache: Cache) -> list[Any]:
        """Everything that a graph captures and would keep using."""
        kind, config = model.device.type, model.config.get_text_config()
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        found: list[Any] = [
            autocast,
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
        ]
        found += [(x.data_ptr(), x.shape, x.stride(), x.dtype) for x in cache.tensors()]
        found += [value for value in cache.values.values() if not isinstance(value, Tensor)]
        found.append(_numbers(config))
        for module in model.modules():
            found.append((type(module), _numbers(module)))
            tensors = [*module._parameters.values(), *module._buffers.values()]
            found += [(x.data_ptr(), x.shape, x.dtype) for x in tensors if x is not None]
        return found


def _numbers(owner: Any) -> list[tuple[str, Any]]:
    return [(name, x) for name, x in vars(owner).items() if type(x) in _PLAIN]


class KeptCaches:
    """The caches that a model keeps for its next call of `generate`, each with its steps."""

    def __init__(self) -> None:
        self.entries: list[tuple[tuple, Cache]] = []

    def take(self, model: Any, rows: int, length: int, kv_cache_dtype: str | None) -> tuple[tuple, Cache]:
        """An empty cache for `rows` sequences of up to `length` tokens, with its key: an entry for `keep`."""
        kind, length = model.device.type, cdiv(length, BUCKET) * BUCKET
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        key = rows, length, model.decoder.compute_dtype, model.device, autocast, kv_cache_dtype
        for i, (its_key, cache) in enumerate(self.entries):
            if its_key == key:
                cache.reset()
                return self.entries.pop(i)
        with torch.inference_mode(False):  # it outlives the call
            try:
                return key, model.new_cache(rows, length, kv_cache_dtype=kv_cache_dtype)
            except torch.OutOfMemoryError:
                self.entries.clear()
                return key, model.new_cache(rows, length, kv_cache_dtype=kv_cache_dtype)

    def keep(self, entry: tuple[tuple, Cache]) -> None:
        """Takes back an entry of `take` whose cache nobody else has."""
        self.entries.append(entry)
        limit, device = math.inf, entry[1].device
        if device.type == "cuda":
            limit = torch.cuda.get_device_properties(device).total_memory / KEPT_SHARE
        while len(self.entries) > MAX_KEPT or sum(cache.nbytes for _, cache in self.entries) > limit:
            del self.entries[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return KeptCaches, ()  # a model that is copied or pickled has none


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
    place: Callable[[Step], None]
    """Sets the columns of a step to those of the rows in the cache."""

    def __init__(self, request: Request, rows: int, columns: int, *, to_host: bool, mask: Tensor | None = None):
        options = request.options
        self.request, self.options, self.model, self.device = request, options, request.model, request.model.device
        self.to_host, self.runs_ahead, self.by_host = to_host, True, False
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
        if self.options.disable_compile or self.device.type not in DEVICES:
            return False
        reason = next(filter(None, reasons), None) or obstacle_to_capture(self.model)
        if reason is not None:
            _warn_uncaptured(reason)
        return reason is None

    def run(self, step: Step) -> None:
        """Runs `step`; by the host from now on, with a warning, where it cannot be captured."""
        length = self.cache.length
        try:
            step.run(self.model, self.cache)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or self.by_host or self.cache.length != length:
                raise
            first: BaseException = error
            while first.__context__ is not None:
                first = first.__context__
            _warn_uncaptured(f"its step cannot be captured, {str(first).partition(chr(10))[0] or type(first).__name__}")
            self.by_host = step.by_host = True
            self.place(step)
            step.run(self.model, self.cache)

    def close(self) -> None:
        """Keeps the cache for the next call, unless the caller gets it."""
        if self.kept is not None and not self.options.return_dict_in_generate:
            self.model.kept_caches.keep(self.kept)


def step_of(cache: Cache, tokens: int = 1, *, with_hidden: bool = False) -> Step:
    """The step of `tokens` tokens a row over the memory of `cache`, which keeps it."""
    found = cache.steps.get((tokens, with_hidden))
    if found is None or (len(found.ids), found.ids.device) != (cache.rows * tokens, cache.device):
        found = cache.steps[tokens, with_hidden] = Step(cache, tokens, with_hidden=with_hidden)
    return found


def obstacle_to_capture(model: Any) -> str | None:
    """Why the steps of `model` cannot be one CUDA graph; None where they can."""
    device = model.device
    for name, module in model.named_modules():
        found, name = type(module), name or "the model"
        if not found.__module__.startswith(("ligermodels.", "torch.nn.modules.")):
            return f"{name} is a {found.__module__}.{found.__qualname__}, whose code it does not know"
        if not is_untouched(module):
            return f"{name} has a hook, or a forward that was replaced, and the host has to call it"
        if module._compiled_call_impl is not None:
            return f"{name} is compiled by torch.compile"
        if module.training and (
            (isinstance(module, _DropoutNd) and module.p > 0) or getattr(module, "jitter_noise", 0) > 0
        ):
            return f"{name} draws random numbers in train(); use model.eval()"
        for kind, parameter in module._parameters.items():
            if type(parameter) not in (nn.Parameter, type(None)):
                return f"{name}.{kind} is a {type(parameter).__name__}"
            if parameter is not None and parameter.device != device:
                return f"{name}.{kind} is on {parameter.device}, and the model on {device}"
    return None


def _warn_uncaptured(reason: str) -> None:
    warn_once(
        f"uncaptured: {reason}",
        f"generate launches every kernel from the host, which limits its speed: {reason}. The tokens are the same, to "
        "within rounding; disable_compile=True asks for this and does not warn",
    )


def _nan_logits() -> InputError:
    return InputError(
        "the model's logits are NaN (or all -inf), so no token can be chosen; likely float16 overflow or damaged "
        "weights: load with dtype=torch.bfloat16 or torch.float32, and check the weight files and the logits_processor"
    )
