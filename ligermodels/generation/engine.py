"""The steps of decoding: one forward pass of one token a row, at places in the cache that only the device knows.

On CUDA a step is a graph: the host launches a model's hundreds of kernels in one call. A `Step` reads and writes the
memory of one cache and holds for any number of tokens. An `Engine` keeps the caches of a model, with their steps, for
the next call of `generate`: `model.engine`, freed by `model.release()`.

What a graph would get wrong is looked at in every call: hooks, modules and weights of unknown kinds
(`obstacle_to_capture`), and everything that the capture has read, from addresses of weights to numbers in modules
(`Step.begin`).
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from ligermodels.errors import warn_once
from ligermodels.kernels._triton import as_if_capturing, cdiv
from ligermodels.layers.head import capped, unwrapped
from ligermodels.layers.linear import is_untouched
from ligermodels.layers.state import Cache

DEVICES = {"cuda"}
"""Types of devices that decode by `Step`. Elsewhere it computes the same without a graph, which tests make use of."""
BUCKET = 512
"""The capacity of kept caches is a multiple of this number of tokens."""
MAX_KEPT = 4
KEPT_SHARE = 8
"""At most MAX_KEPT caches of a model are kept for its next call, in at most 1 / KEPT_SHARE of the GPU's memory."""

_PLAIN = {bool, int, float, str, type(None)}


class Step:
    """One forward pass of N tokens over `cache`: the next one of each row, or of one row the next N (`tokens`).

    ids [N, 1]: the tokens. Row b has the columns starts[b] to ends[b] - 1, int32 [N] on the device; its token is
    written to the column ends[b], which `run` then counts. After `run`, logits [N, V] and, with_hidden, hidden [N, H]
    are those after the tokens, in memory that the next run overwrites.
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

        length: the columns that the cache must have. by_host: the host launches every kernel, without a graph.
        """
        self.by_host = by_host or cache.device.type != "cuda"
        cache.reserve(length, self.tokens)
        state = self._state(model, cache)
        if state != self._captured:
            self._graph, self._captured = None, state

    def place(self, starts: Tensor | int, ends: Tensor | int) -> None:
        """Sets the columns of the rows' first tokens, and past their last: numbers, or tensors [N] of any device."""
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
        torch.clear_autocast_cache()  # weights cast before a graph, or within it, are of no use outside
        self._positions.add_(1)
        self.ends.add_(1)
        output = model(
            input_ids=self.ids, position_ids=self._positions, past_key_values=cache, step=(self.starts, self.ends),
            return_logits=not self.with_hidden,
        )  # fmt: skip
        if self.with_hidden:
            self.hidden = output.last_hidden_state[:, -1]
            self.logits = head_logits(model, self.hidden)
        else:
            self.logits = output.logits[:, -1]
        torch.clear_autocast_cache()

    def _capture(self, model: Any, cache: Cache) -> torch.cuda.CUDAGraph:
        values, stream, graph = dict(cache.values), torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                # Compiles kernels and initialises libraries. What it writes, the graph's first run writes again.
                with as_if_capturing():
                    self._forward(model, cache)
                self._positions.sub_(1)
                self.ends.sub_(1)
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


def head_logits(model: Any, hidden: Tensor) -> Tensor:
    """Logits [N, V] of the last hidden states [N, H]."""
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return capped(unwrapped(model.lm_head)(hidden[None]), softcap)[0]


def _numbers(owner: Any) -> list[tuple[str, Any]]:
    return [(name, x) for name, x in vars(owner).items() if type(x) in _PLAIN]


class Engine:
    """The caches that `generate` keeps for the next call on a model, each with its steps."""

    def __init__(self) -> None:
        self.caches: list[tuple[tuple, Cache]] = []

    def take(self, model: Any, rows: int, length: int, kv_cache_dtype: str | None) -> tuple[Cache, tuple]:
        """An empty cache for `rows` sequences of up to `length` tokens, and the key that `keep` gets with it."""
        kind, length = model.device.type, cdiv(length, BUCKET) * BUCKET
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        key = rows, length, model.decoder.compute_dtype, model.device, autocast, kv_cache_dtype
        for i, (its_key, cache) in enumerate(self.caches):
            if its_key == key:
                del self.caches[i]
                cache.reset()
                return cache, key
        with torch.inference_mode(False):  # it outlives the call
            try:
                return model.new_cache(rows, length, kv_cache_dtype=kv_cache_dtype), key
            except torch.OutOfMemoryError:
                self.caches.clear()
                return model.new_cache(rows, length, kv_cache_dtype=kv_cache_dtype), key

    def keep(self, cache: Cache, key: tuple) -> None:
        """Takes back a cache of `take`, which nobody else has."""
        self.caches.append((key, cache))
        limit = math.inf
        if cache.device.type == "cuda":
            limit = torch.cuda.get_device_properties(cache.device).total_memory / KEPT_SHARE
        while len(self.caches) > MAX_KEPT or sum(kept.nbytes for _, kept in self.caches) > limit:
            del self.caches[0]

    def __deepcopy__(self, memo: Any) -> "Engine":
        return Engine()  # a copied model shares no memory

    def __reduce__(self) -> tuple[Any, ...]:
        return Engine, ()  # nor does a pickled one


def step_of(cache: Cache, tokens: int = 1, *, with_hidden: bool = False) -> Step:
    """The step of so many tokens that belongs to the memory of `cache`."""
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
