"""A step of decoding, which on CUDA is a graph, and the caches with their graphs that a model keeps.

A `DecodeStep` reads and writes the memory of one cache, at positions that are on the device. As a graph it repeats the
kernels of its capture, with the addresses and numbers of that time. Every call therefore checks what a graph cannot
run, hooks and modules and weights of unknown kinds (`obstacle_to_capture`), and captures again where anything has
changed that the capture read (`DecodeStep.begin`). `KeptCaches` keeps caches with their steps for the next call:
`model.kept_caches`, freed by `model.release()`.
"""

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from ligermodels.kernels._triton import as_if_capturing, cdiv
from ligermodels.kernels.linear.operand import autocast_dtype
from ligermodels.layers.async_copy import to_device
from ligermodels.layers.linear import is_plain_call
from ligermodels.layers.state import Cache

DEVICES = {"cuda"}
"""Types of devices that decode by `DecodeStep`. Others can, without a graph, which tests make use of."""
BUCKET = 512
"""The capacity of kept caches is a multiple of this number of tokens."""
MAX_KEPT = 4
"""The maximum number of caches that a model keeps for its next call."""
KEPT_SHARE = 8
"""The kept caches of a model take at most 1 / KEPT_SHARE of the GPU's memory."""

_PLAIN = {bool, int, float, str, type(None)}


class DecodeStep:
    """One forward pass of N tokens over `cache`: one of each row, or the next N = `tokens` of one row.

    ids [N, 1]: the tokens. starts, ends: int32 [N] on the device, the column of a row's first token and the column
    after its last, to which its new token is written; `run` counts it. After `run`, logits [N, V] and hidden [N, H] are
    those after the tokens, in memory that the next run overwrites.
    """

    own_cache: Any = None  # a cache that lives as long as the step

    def __init__(self, cache: Cache, tokens: int = 1):
        rows = cache.rows * tokens
        self.tokens, self.by_host = tokens, False
        with torch.inference_mode(False):  # they outlive the call
            self.ids = torch.zeros(rows, 1, dtype=torch.int64, device=cache.device)
            self.starts, self.ends = torch.zeros(2, rows, dtype=torch.int32, device=cache.device).unbind()
        self.logits = self.hidden = torch.empty(0)
        self._captured: Any = None
        self._graph: torch.cuda.CUDAGraph | None = None

    @classmethod
    def of(cls, model: Any, cache: Cache, length: int, tokens: int = 1, *, by_host: bool = False) -> Self:
        """The step of `tokens` tokens a row, which `cache.steps` keeps. length, by_host: as in `begin`."""
        step = cache.steps.get(tokens)
        if step is None or (len(step.ids), step.ids.device) != (cache.rows * tokens, cache.device):
            step = cache.steps[tokens] = cls(cache, tokens)
        step.begin(model, cache, length, by_host=by_host)
        return step

    def begin(self, model: Any, cache: Cache, length: int, *, by_host: bool) -> None:
        """Comes before the first run, and after anything else has changed model or cache. length: the capacity that the
        cache needs. by_host: the host launches every kernel, without a graph."""
        self.by_host = by_host or cache.device.type != "cuda"
        cache.reserve(length, self.tokens)
        fingerprint = _fingerprint(model, cache)
        if fingerprint != self._captured:
            self._graph, self._captured = None, fingerprint

    def write(self, ids: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> None:
        """Sets `ids`, `starts` and `ends`, one number for each row, in one copy to the device."""
        sent = to_device([ids, starts, ends], self.ids.device)
        self.ids.copy_(sent[0, :, None])
        self.set_columns(sent[1], sent[2])

    def set_columns(self, starts: Tensor | int, ends: Tensor | int) -> None:
        """Sets `starts` and `ends`: numbers, or tensors [N] of any device."""
        for column, value in ((self.starts, starts), (self.ends, ends)):
            column.copy_(value, non_blocking=True) if isinstance(value, Tensor) else column.fill_(value)

    def run(self, model: Any, cache: Cache) -> None:
        """Computes the step; the caller counts its tokens in the cache."""
        if self.by_host:
            self._forward(model, cache)
        else:
            with torch.cuda.device(cache.device):
                if self._graph is None:
                    self._graph = self._capture(model, cache)
                self._graph.replay()

    def _forward(self, model: Any, cache: Cache) -> None:
        torch.clear_autocast_cache()  # weights that were cast outside of the graph are not in it, nor the reverse
        positions = (self.ends - self.starts)[:, None]
        self.ends.add_(1)
        self._compute(model, cache, positions)
        torch.clear_autocast_cache()

    def _compute(self, model: Any, cache: Cache, positions: Tensor) -> None:
        """positions [N, 1]: of the tokens."""
        output = model(
            input_ids=self.ids, position_ids=positions, past_key_values=cache, decode_step=(self.starts, self.ends),
            return_logits=False,
        )  # fmt: skip
        self.hidden = output.last_hidden_state[:, -1]
        self.logits = model.logits_of(self.hidden)

    def _capture(self, model: Any, cache: Cache) -> torch.cuda.CUDAGraph:
        values, stream, graph = dict(cache.values), torch.cuda.Stream(), torch.cuda.CUDAGraph()
        before = [state.snapshot() for state in cache]
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                # Compiles kernels and initialises libraries. The graph's first run writes keys and values again; a
                # recurrent state would take the token twice.
                with as_if_capturing():
                    self._forward(model, cache)
                self.ends.sub_(1)
                for state, saved in zip(cache, before, strict=True):
                    state.restore(saved)
                cache.values = dict(values)
                # "relaxed": another thread may allocate or pin memory meanwhile.
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
                    self._forward(model, cache)
        finally:
            torch.cuda.current_stream().wait_stream(stream)
            cache.values = values
        return graph


def _fingerprint(model: Any, cache: Cache) -> list[Any]:
    """Everything that a graph captures and would keep using."""
    fingerprint: list[Any] = [autocast_dtype(model.decoder.embed_tokens.weight), torch.get_float32_matmul_precision()]
    fingerprint.append(torch.are_deterministic_algorithms_enabled())
    fingerprint += [(x.data_ptr(), x.shape, x.stride(), x.dtype) for x in cache.tensors()]
    fingerprint += [value for value in cache.values.values() if not isinstance(value, Tensor)]
    fingerprint.append(_numbers(model.config.get_text_config()))
    for module in model.modules():
        fingerprint.append((type(module), _numbers(module)))
        tensors = [*module._parameters.values(), *module._buffers.values()]
        fingerprint += [(x.data_ptr(), x.shape, x.dtype) for x in tensors if x is not None]
    return fingerprint


def _numbers(owner: Any) -> list[tuple[str, Any]]:
    return [(name, x) for name, x in vars(owner).items() if type(x) in _PLAIN]


class KeptCaches:
    """The caches, with their steps, that a model keeps for its next call of `generate`, as entries (key, cache)."""

    def __init__(self) -> None:
        self.entries: list[tuple[tuple, Cache]] = []

    def take(self, model: Any, rows: int, length: int, kv_cache_dtype: str | None) -> tuple[tuple, Cache]:
        """(key, empty cache for `rows` sequences of up to `length` tokens), which `keep` takes back."""
        length = cdiv(length, BUCKET) * BUCKET
        autocast = autocast_dtype(model.decoder.embed_tokens.weight)
        key = rows, length, model.decoder.compute_dtype, model.device, autocast, kv_cache_dtype
        for i, (entry_key, cache) in enumerate(self.entries):
            if entry_key == key:
                cache.reset()
                return self.entries.pop(i)
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


def obstacle_to_capture(model: Any) -> str | None:
    """Why the steps of `model` cannot be one CUDA graph; None where they can."""
    device = model.device
    for name, module in model.named_modules():
        module_class, name = type(module), name or "the model"
        if not module_class.__module__.startswith(("ligermodels.", "torch.nn.modules.")):
            return f"{name} is a {module_class.__module__}.{module_class.__qualname__}, whose code it does not know"
        if not is_plain_call(module):
            return f"{name} has a hook, or a forward that was replaced, and the host has to call it"
        if module._compiled_call_impl is not None:
            return f"{name} is compiled by torch.compile"
        noise = module.p if isinstance(module, _DropoutNd) else getattr(module, "jitter_noise", 0)
        if module.training and noise > 0:
            return f"{name} draws random numbers in train(); use model.eval()"
        for kind, parameter in module._parameters.items():
            if type(parameter) not in (nn.Parameter, type(None)):
                return f"{name}.{kind} is a {type(parameter).__name__}"
            if parameter is not None and parameter.device != device:
                return f"{name}.{kind} is on {parameter.device}, and the model on {device}"
    return None
