"""The decode step as a CUDA graph: the host launches a model's hundreds of kernels in one call.

A `Decode` belongs to a KVCache, whose memory its graph reads and writes. One graph serves any number of tokens, since
the lengths are on the device. `take_cache` and `keep_cache` hand the cache of one call of `generate` to the next, and
with it the graph. Every call checks what would make a graph wrong: hooks, and modules and weights of unknown kinds
(`obstacle_to_capture`); and everything that the capture has read, from addresses of weights to numbers in modules
(`Decode.begin`).
"""

import math
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from ligermodels.errors import warn_once
from ligermodels.kernels._triton import as_if_capturing, cdiv
from ligermodels.layers.cache import KVCache
from ligermodels.layers.linear import is_untouched

DEVICES = {"cuda"}
"""Types of devices that decode by `Decode`. On others it computes the same without a graph, which tests use."""
BUCKET = 512
"""Caches of `take_cache` have memory for a multiple of this number of tokens."""
KEPT = 4
KEPT_SHARE = 8
"""At most KEPT caches of a model are kept for its next call, with at most a KEPT_SHARE-th of the GPU's memory."""

_PLAIN = {bool, int, float, str, type(None)}

_decodes: weakref.WeakKeyDictionary[KVCache, "Decode"] = weakref.WeakKeyDictionary()
_caches: weakref.WeakKeyDictionary[nn.Module, list[tuple[tuple, KVCache]]] = weakref.WeakKeyDictionary()


class Decode:
    """decode(model, ids [B]) -> the logits [B, V] of the next token, over one KVCache with all tokens before `ids`.

    The next call overwrites the logits. Call `begin` before the first call, and after anything else has changed the
    cache.
    """

    def __init__(self, rows: int, device: torch.device):
        with torch.inference_mode(False):  # they outlive the call
            self._ids, self._positions = torch.zeros(2, rows, 1, dtype=torch.int64, device=device).unbind()
        self._captured: Any = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits = torch.empty(0)

    @staticmethod
    def of(cache: KVCache) -> "Decode":
        """The `Decode` of `cache`."""
        found = _decodes.get(cache)
        if found is None or (len(found._ids), found._ids.device) != (cache.batch_size, cache.device):
            found = _decodes[cache] = Decode(cache.batch_size, cache.device)
        return found

    def begin(self, model: Any, cache: KVCache, starts: Tensor | None, length: int, *, by_host: bool = False) -> None:
        """starts: [B], the column of each row's first token; None: 0. length: the maximum length of the cache.

        by_host: the host launches every kernel of a step, without a graph.
        """
        self.cache, self._by_host = weakref.ref(cache), by_host
        cache.reserve(length)
        self.place(cache, starts)
        state = _state_of_capture(model, cache)
        if state != self._captured:
            self._graph, self._captured = None, state

    def place(self, cache: KVCache, starts: Tensor | None) -> None:
        """Writes to the device where the rows begin and end; replaces `begin` if nothing else has changed."""
        cache.place(starts, len(self._ids))
        self._positions.fill_(cache.length - 1)
        if starts is not None:
            self._positions.sub_(starts[:, None])

    def __call__(self, model: Any, ids: Tensor) -> Tensor:
        cache: Any = self.cache()
        self._ids.copy_(ids[:, None])
        cache.advance()
        self.replay(model, cache, 1)
        return self._logits

    def replay(self, model: Any, cache: Any, tokens: int) -> None:
        """Runs the step for `tokens` per row that the cache has counted already; takes them back if it raises."""
        try:
            if self._by_host or self._ids.device.type != "cuda":
                self._run(model, cache)
            else:
                with torch.cuda.device(self._ids.device):
                    if self._graph is None:
                        self._graph = self._capture(model, cache)
                    self._graph.replay()
        except BaseException:
            cache.crop(cache.length - tokens)
            raise

    def _run(self, model: Any, cache: KVCache) -> None:
        torch.clear_autocast_cache()  # weights cast before a graph, or within it, are of no use outside
        self._positions.add_(1)
        with cache.step():
            self._forward(model, cache)
        torch.clear_autocast_cache()

    def _forward(self, model: Any, cache: Any) -> None:
        output = model(
            input_ids=self._ids, position_ids=self._positions, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        self._logits = output.logits[:, -1]

    def _capture(self, model: Any, cache: KVCache) -> torch.cuda.CUDAGraph:
        state, stream, graph = dict(cache.state), torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                # Compiles kernels and initialises libraries. What it writes, the graph's first run writes again.
                with as_if_capturing():
                    self._run(model, cache)
                self._positions.sub_(1)
                cache.ends.sub_(1)
                cache.state = dict(state)
                # "relaxed": another thread may allocate or pin memory meanwhile.
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
                    self._run(model, cache)
        finally:
            torch.cuda.current_stream().wait_stream(stream)
            cache.state = state
        return graph


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


def warn_uncaptured(reason: str) -> None:
    warn_once(
        f"uncaptured: {reason}",
        f"generate launches every kernel from the host, which limits its speed: {reason}. The tokens are the same, to "
        "within rounding; disable_compile=True asks for this and does not warn",
    )


def first_cause(error: BaseException) -> str:
    while error.__context__ is not None:
        error = error.__context__
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _state_of_capture(model: Any, cache: KVCache) -> list[Any]:
    """Everything that a graph has captured and would use again."""
    kind, config = model.device.type, model.config.get_text_config()
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    found: list[Any] = [autocast, torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()]
    found += [(x.data_ptr(), x.shape, x.stride(), x.dtype) for x in cache.memory()]
    found += [value for value in cache.state.values() if not isinstance(value, Tensor)]
    found.append(_numbers(config))
    for module in model.modules():
        found.append((type(module), _numbers(module)))
        tensors = [*module._parameters.values(), *module._buffers.values()]
        found += [(x.data_ptr(), x.shape, x.dtype) for x in tensors if x is not None]
    return found


def _numbers(owner: Any) -> list[tuple[str, Any]]:
    return [(name, x) for name, x in vars(owner).items() if type(x) in _PLAIN]


def take_cache(model: Any, rows: int, length: int, kv_cache_dtype: str | None) -> tuple[KVCache, tuple]:
    """(an empty cache for `rows` sequences of up to `length` tokens, its key for `keep_cache`)."""
    kind, length = model.device.type, cdiv(length, BUCKET) * BUCKET
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    key = rows, length, model.decoder.compute_dtype, model.device, autocast, kv_cache_dtype
    kept = _caches.setdefault(model, [])
    for i, (its_key, cache) in enumerate(kept):
        if its_key == key:
            del kept[i]
            cache.reset()
            return cache, key
    with torch.inference_mode(False):  # the cache outlives the call
        try:
            return model.new_cache(rows, length, kv_cache_dtype=kv_cache_dtype), key
        except torch.OutOfMemoryError:
            kept.clear()
            return model.new_cache(rows, length, kv_cache_dtype=kv_cache_dtype), key


def keep_cache(model: Any, cache: KVCache, key: tuple) -> None:
    """Keeps a cache of `take_cache`, which has no other user, for the next call."""
    kept = _caches.setdefault(model, [])
    kept.append((key, cache))
    limit = math.inf
    if model.device.type == "cuda":
        limit = torch.cuda.get_device_properties(model.device).total_memory / KEPT_SHARE
    while len(kept) > KEPT or sum(x.nbytes for _, one in kept for x in one.memory()) > limit:
        del kept[0]


def release_graphs(model: nn.Module) -> None:
    """Frees the caches, and the CUDA graphs over them, that `generate` keeps for the next call on `model`."""
    _caches.pop(model, None)
