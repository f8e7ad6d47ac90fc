"""KV cache: keys and values of past tokens, so that generating a token costs the work of one token."""

import contextlib
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels import fp8
from ligermodels.kernels.decode_attention import decode_attention
from ligermodels.kernels.rope import rope_to_cache
from ligermodels.layers.batch import NextToken

SLACK = 256
"""Extra capacity, in tokens, of the buffers of a layer with a window. The window is moved to the front once in SLACK
steps, which adds 4 / SLACK, 1.6 %, to the bytes that attention reads in these steps."""

KV_CACHE_DTYPES = ("auto", "fp8")
"""Storage of keys and values: the model's compute dtype ("auto"), or e4m3."""


class LayerCache:
    """One layer's keys and values: two buffers [B, capacity, HK, D]. `length` is the number of tokens seen so far.

    With kv_cache_dtype "fp8" the buffers store e4m3, and two more buffers [B, capacity, HK] the scales, see
    kernels/fp8.py. The tokens of the first call attend to their own keys and values unrounded, all later tokens to the
    stored ones.

    Without a window the buffers store every token and double when they are full. With a window their capacity is
    min(max_length, window - 1 + SLACK) tokens: new tokens are appended, and when the buffers are full, the last
    window - 1 tokens, all that a later query can see, move to the front.
    """

    def __init__(
        self,
        batch_size: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        window: int | None = None,
        kv_cache_dtype: str = "auto",
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        self.window = window
        self.dtype = dtype  # of the keys and values in arguments and results
        self.length = 0
        self._end = 0  # the column after the last token in the buffers
        shape = (batch_size, self._capacity(max_length), num_kv_heads, head_dim)
        self.is_fp8 = kv_cache_dtype == "fp8"
        # fp8 is stored as integers, whose rows torch can index on every device.
        stored = torch.uint8 if self.is_fp8 else dtype
        self.keys = torch.empty(shape, dtype=stored, device=device)
        self.values = torch.empty(shape, dtype=stored, device=device)
        if self.is_fp8:
            self.key_scales = torch.empty(shape[:3], dtype=fp8.SCALE_DTYPE, device=device)
            self.value_scales = torch.empty(shape[:3], dtype=fp8.SCALE_DTYPE, device=device)
            _check_fp8(self.keys.device)
        # Made by `place` for `attend`.
        self.offset: Tensor | None = None  # with a window: int32, the position of the first token in the buffers
        self.counters: Tensor | None = None

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends k, v [B, S, HK, D] and returns, in order, all keys and values that these S tokens may see.

        Each is [B, past + S, HK, D], where past is the number of tokens before: all, or the last window - 1.
        Without gradients the results are views of the buffers, valid until the next update, or k and v themselves if
        there is no past. They are copies if the call has more tokens than fit the buffers of a window, and with fp8,
        where new tokens are rounded like the past. With gradients the new tokens keep theirs; the past is constant.
        An empty cache moves to the device of the first tokens (accelerate may have offloaded or spread the model), and
        takes their dtype (under autocast or with fp32 embeddings it is not the model's).
        Raises InputError if batch size, heads or dtype are not those of the cache, and for gradients with fp8.
        """
        first = self.length == 0
        if first:
            self._follow(k.device, k.dtype)
        _check_fits(self.keys, k, self.dtype)
        past, total = self._past, self._past + k.shape[1]
        fits = self._capacity(total) == total
        new, seen = self._to_buffers(k, v), None
        if past == 0:
            seen = new
        elif k.requires_grad or v.requires_grad or not fits:
            before = slice(self._end - past, self._end)
            seen = [torch.cat([buffer[:, before], x], 1) for buffer, x in zip(self._buffers(), new, strict=True)]
        self.length += k.shape[1]
        if seen is not None and not fits:  # only the tokens that a later query can see are stored
            last = slice(total - self._past, None)
            self._end = 0  # all stored tokens are replaced
            self._append([x[:, last].detach() for x in seen], past=0)
        else:
            self._append([x.detach() for x in new], past)
        if first:
            return k, v
        if seen is None:
            seen = [buffer[:, self._end - total : self._end] for buffer in self._buffers()]
        return self._from_buffers(seen)

    def reserve(self, length: int) -> None:
        """Makes the buffers large enough for `length` tokens: up to there their memory stays the same."""
        if self._capacity(length) > self.keys.shape[1]:
            self._grow(self._past, length - self._past)

    def advance(self, tokens: int = 1) -> None:
        """Adds `tokens`, at most SLACK, which `attend` is about to write, and grows the buffers for them."""
        if self._end + tokens > self.keys.shape[1]:
            self._grow(self._past, tokens)
            self._write_offset()
        self.length += tokens
        self._end += tokens

    def place(self, rows: int) -> None:
        """Writes the offset to the device, and allocates the counters that `attend` needs for this number of rows."""
        heads = rows * self.keys.shape[2]
        if self.counters is None or self.counters.device != self.keys.device or len(self.counters) < heads:
            with torch.inference_mode(False):  # kept beyond this call
                self.counters = torch.zeros(heads, dtype=torch.int32, device=self.keys.device)
        self._write_offset()

    def _write_offset(self) -> None:
        if self.window is not None:
            if self.offset is None or self.offset.device != self.keys.device:
                with torch.inference_mode(False):
                    self.offset = torch.empty((), dtype=torch.int32, device=self.keys.device)
            self.offset.fill_(self.length - self._end)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, token: NextToken, *,
        window: int | None, softcap: float | None, scale: float | None,
    ) -> Tensor:  # fmt: skip
        """Rotates and stores one new token per row, and returns its attention [B, 1, HQ, D] to the tokens of its row.

        q [B, 1, HQ, D], which is overwritten, k, v [B, 1, HK, D]. The columns to write and to read come from the
        device, so that a CUDA graph of this can be replayed; `advance` counts the token. In a cache of one row the B
        tokens may follow each other: each sees those before it.
        """
        buffers = self._buffers()
        if len(self.keys) == 1:
            buffers = [x.expand(len(k), *x.shape[1:]) for x in buffers]
        _check_fits(buffers[0], k, self.dtype)
        keys, values, *rest = buffers
        scales = None
        if self.is_fp8:
            keys, values, scales = keys.view(fp8.DTYPE), values.view(fp8.DTYPE), (rest[0], rest[1])
        q = rope_to_cache(q, k, v, token.cos, token.sin, keys, values, token.ends, self.offset, scales)
        return decode_attention(
            q, keys, values, token.starts, token.ends, self.offset, window=window, softcap=softcap, scale=scale,
            counters=self.counters, scales=scales,
        )  # fmt: skip

    def take(self, other: "LayerCache", rows: Tensor) -> None:
        """Copies rows from `other`: row i becomes its row rows[i]."""
        past = other._past
        source = slice(other._end - past, other._end)
        self._follow(other.keys.device, other.dtype)
        for mine, its in zip(self._buffers(), other._buffers(), strict=True):
            mine[:, :past] = its[:, source].index_select(0, rows)
        self.length, self._end = other.length, past

    def put(self, other: "LayerCache", rows: Tensor, into: Tensor) -> None:
        """Copies row rows[i] of `other`, which is not longer, to the end of row into[i]."""
        past = other._past
        self._follow(other.keys.device, other.dtype)
        source, target = slice(other._end - past, other._end), slice(self._end - past, self._end)
        for mine, its in zip(self._buffers(), other._buffers(), strict=True):
            mine[into, target] = its[rows, source]

    def shift(self, length: int) -> None:
        """Changes the number of columns to `length` at the front; the last column stays the last."""
        past, end, self.length = self._past, self._end, length
        kept, self._end = min(past, self._past), self._past
        for x in self._buffers():
            x[:, self._end - kept : self._end] = x[:, end - kept : end].clone()  # the two ranges may overlap

    def reset(self) -> None:
        """Drops the tokens and keeps the memory."""
        self.length = self._end = 0

    def can_crop(self, length: int) -> bool:
        """Whether the buffers store all tokens that the token after the first `length` sees."""
        first_stored = self.length - self._end
        first_seen = 0 if self.window is None else length - self.window + 1
        return first_stored <= max(first_seen, 0) and length <= self.length

    def crop(self, length: int) -> None:
        """Drops all but the first `length` tokens; only if `can_crop(length)`."""
        self._end -= self.length - length
        self.length = length

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes the old row rows[i]; rows: int64 [N], repeats allowed."""
        columns = slice(self._end - self._past, self._end)
        for name in self._names:
            old = getattr(self, name)
            moved = old[:, columns].index_select(0, rows)
            if len(rows) != len(old):
                old = old.new_empty(len(rows), *old.shape[1:])
                setattr(self, name, old)
            old[:, columns] = moved

    def _follow(self, device: torch.device, dtype: torch.dtype) -> None:
        if (device, dtype) == (self.keys.device, self.dtype):
            return
        self.dtype = dtype
        if not self.is_fp8:
            self.keys = torch.empty_like(self.keys, device=device, dtype=dtype)
            self.values = torch.empty_like(self.keys)
        elif device != self.keys.device:
            _check_fp8(device)
            for name in self._names:
                setattr(self, name, torch.empty_like(getattr(self, name), device=device))

    @property
    def token_bytes(self) -> int:
        """Bytes per token of a row."""
        return sum(x[:1, :1].nbytes for x in self._buffers())

    @property
    def _names(self) -> tuple[str, ...]:
        return ("keys", "values", "key_scales", "value_scales") if self.is_fp8 else ("keys", "values")

    def _buffers(self) -> list[Tensor]:
        return [getattr(self, name) for name in self._names]

    def _to_buffers(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """k and v as they are stored; with fp8 their bits and scales."""
        if not self.is_fp8:
            return [k, v]
        if k.requires_grad or v.requires_grad:
            raise InputError(
                "a KV cache in fp8 has no gradients: run under torch.no_grad(), or leave kv_cache_dtype out"
            )
        (k, of_k), (v, of_v) = fp8.quantize_heads(k), fp8.quantize_heads(v)
        return [k.view(torch.uint8), v.view(torch.uint8), of_k, of_v]

    def _from_buffers(self, stored: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The inverse of `_to_buffers`."""
        if not self.is_fp8:
            return stored[0], stored[1]
        k, v = (fp8.dequantize_heads(stored[i].view(fp8.DTYPE), stored[i + 2], self.dtype) for i in (0, 1))
        return k, v

    @property
    def _past(self) -> int:
        """The number of tokens that the next one sees."""
        return self.length if self.window is None else min(self.length, self.window - 1)

    def _capacity(self, length: int) -> int:
        return length if self.window is None else min(length, self.window - 1 + SLACK)

    def _append(self, new: list[Tensor], past: int) -> None:
        """Appends the result of `_to_buffers`; `past` tokens before it must stay."""
        count = new[0].shape[1]
        if self._end + count > self.keys.shape[1]:
            self._grow(past, count)
        end = self._end + count
        for buffer, x in zip(self._buffers(), new, strict=True):
            buffer[:, self._end : end] = x
        self._end = end

    def _grow(self, past: int, new: int) -> None:
        """Makes space for `new` tokens: moves the last `past` tokens to the front, of larger buffers if allowed."""
        columns, capacity = slice(self._end - past, self._end), self.keys.shape[1]
        larger = self._capacity(max(past + new, 2 * capacity))
        for name in self._names:
            old = getattr(self, name)
            if larger > capacity:
                buffer = old.new_empty(old.shape[0], larger, *old.shape[2:])
                buffer[:, :past] = old[:, columns]
                setattr(self, name, buffer)
            else:
                old[:, :past] = old[:, columns].clone()  # the two ranges may overlap
        self._end = past


def _check_fp8(device: torch.device) -> None:
    """Raises InputError where Triton cannot convert to and from e4m3."""
    if device.type == "cuda" and torch.version.cuda and torch.cuda.get_device_capability(device) < (8, 9):
        raise InputError(
            f"kv_cache_dtype='fp8': {torch.cuda.get_device_name(device)} cannot convert e4m3, which Ada, Hopper and "
            "later GPUs do; leave kv_cache_dtype out"
        )


def _check_fits(stored: Tensor, k: Tensor, dtype: torch.dtype) -> None:
    """Raises InputError if `k` [B, S, HK, D] cannot be appended to `stored`, the buffer of a cache of `dtype`."""
    if (stored.shape[0], *stored.shape[2:]) != (k.shape[0], *k.shape[2:]) or dtype != k.dtype:
        raise InputError(
            f"KV cache: keys {list(k.shape)} in {k.dtype} do not fit a cache of {list(stored.shape)} in {dtype}; "
            "was it made for another batch size or model, or with autocast on and used with autocast off?"
        )


class CrossCache:
    """One cross-attention layer's keys and values [B, N, HK, D] of all images so far; None before the first."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends k, v [B, N, HK, D] of new images and returns those of all; only the new ones have gradients.

        Raises InputError if batch size, heads or dtype are not those of the images before.
        """
        if self.keys is not None and self.values is not None:
            _check_fits(self.keys, k, self.keys.dtype)
            k, v = torch.cat([self.keys, k], 1), torch.cat([self.values, v], 1)
        self.keys, self.values = k.detach(), v.detach()
        return k, v

    def take(self, other: "CrossCache", rows: Tensor) -> None:
        """Takes the images of `other`: row i becomes its row rows[i]."""
        self.keys, self.values = other.keys, other.values
        self.reorder(rows)

    def reset(self) -> None:
        """Drops the images."""
        self.keys = self.values = None

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes the old row rows[i]."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)


class KVCache:
    """A list of layers, each a `LayerCache` or a `CrossCache`: `cache[i]`, iterable, `len(cache)` layers.

    max_length: tokens to allocate memory for; longer sequences make a layer's buffers double.
    windows: for each layer the number of tokens that a query sees, counting itself, or None for all; default all.
    cross_layers: the layers that attend to images instead of text, not all. kv_cache_dtype: "fp8" stores keys and
    values of text, not of images, in e4m3; None and "auto" store them in `dtype`.
    Memory: 2 * batch_size * num_kv_heads * head_dim elements per stored token (in fp8, 2 * batch_size * num_kv_heads *
    (head_dim + 2) bytes). A layer stores max_length tokens, with a window at most window - 1 + SLACK, in cross_layers
    one per state of an image. Lengths are known to the host: nothing synchronises. `state`: a model's other state of
    these tokens, a dict whose tensors have a row for each sequence.
    """

    stepping = False
    """True inside of `step`."""
    starts: Any = None
    ends: Any = None

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        windows: Sequence[int | None] | None = None,
        cross_layers: Container[int] = (),
        kv_cache_dtype: str | None = None,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        self.kv_cache_dtype = "auto" if kv_cache_dtype is None else kv_cache_dtype
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise InputError(f"kv_cache_dtype={kv_cache_dtype!r:.80} must be one of {', '.join(KV_CACHE_DTYPES)}")
        windows = [None] * num_layers if windows is None else windows
        self._layers = [
            CrossCache() if layer in cross_layers else LayerCache(
                batch_size, max_length, num_kv_heads, head_dim, window=window, kv_cache_dtype=self.kv_cache_dtype,
                dtype=dtype, device=device,
            )
            for layer, window in zip(range(num_layers), windows, strict=True)
        ]  # fmt: skip
        self._texts = [layer for layer in self._layers if isinstance(layer, LayerCache)]
        self._text = self._texts[0]
        self.state: dict[str, Any] = {}
        self._places: dict[tuple[torch.device, int], tuple[Tensor, ...]] = {}

    def __getitem__(self, layer: int) -> LayerCache | CrossCache:
        return self._layers[layer]

    def __iter__(self) -> Iterator[LayerCache | CrossCache]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def length(self) -> int:
        """The number of tokens seen; a layer with a window stores only the last ones."""
        return self._text.length

    @property
    def batch_size(self) -> int:
        return self._text.keys.shape[0]

    @property
    def device(self) -> torch.device:
        return self._text.keys.device

    def get_seq_length(self) -> int:
        """`length`, by transformers' name."""
        return self.length

    def reset(self) -> None:
        """Drops the tokens and keeps the memory."""
        for layer in self._layers:
            layer.reset()
        self.state.clear()

    def crop(self, length: int) -> None:
        """Drops all but the first `length` tokens, or all tokens if a layer with a window no longer stores these.

        Images and `state` stay, so `length` must reach past the last image.
        """
        if length and all(layer.can_crop(length) for layer in self._texts):
            for layer in self._texts:
                layer.crop(length)
        else:
            self.reset()

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes the old row rows[i], in every layer and in the tensors of `state`."""
        for layer in self._layers:
            layer.reorder(rows)
        for name, value in self.state.items():
            self.state[name] = value.index_select(0, rows) if isinstance(value, Tensor) else value

    def take(self, other: "KVCache", rows: Tensor) -> None:
        """Copies rows from `other`: row i becomes its row rows[i]."""
        for mine, layer in zip(self._layers, other._layers, strict=True):
            mine.take(layer, rows)  # type: ignore[arg-type]
        self.state = {
            name: value.index_select(0, rows) if isinstance(value, Tensor) else value
            for name, value in other.state.items()
        }

    def put(self, other: "KVCache", rows: Tensor, into: Tensor) -> None:
        """Copies row rows[i] of `other` to row into[i], aligned at the last token; text only.

        rows, into: int64 [N]. `other` has the windows of this cache and is not longer.
        """
        for mine, layer in zip(self._texts, other._texts, strict=True):
            mine.put(layer, rows, into)

    def shift(self, length: int) -> None:
        """Changes the number of columns to `length`: drops first ones, or adds empty ones. Call `reserve` before."""
        for layer in self._texts:
            layer.shift(length)

    # Decoding with lengths on the device, so that a CUDA graph can be replayed: `reserve` and `place`, then `advance`
    # and `step` for each new token of all rows.

    def reserve(self, length: int) -> None:
        """Allocates memory for `length` tokens: up to there the tensors of `memory` stay the same."""
        for layer in self._texts:
            layer.reserve(length)

    def place(self, starts: Tensor | None, rows: int | None = None) -> None:
        """Writes to the device the lengths, and `starts` [B], the columns of the rows' first tokens (None: all 0).

        rows: the rows of a forward pass, default the batch size; in a cache of one row, tokens that follow each other.
        """
        where = self.device, self.batch_size if rows is None else rows
        if where not in self._places:  # memory for each number of rows, which a CUDA graph may read
            with torch.inference_mode(False):  # kept beyond this call
                self._places[where] = torch.empty(2, where[1], dtype=torch.int32, device=where[0]).unbind()
        self.starts, self.ends = self._places[where]
        if starts is None:
            self.starts.zero_()
        else:
            self.starts.copy_(starts)
        self.ends.fill_(self.length)
        for layer in self._texts:
            layer.place(where[1])

    def advance(self, tokens: int = 1) -> None:
        """Adds, on the host, the tokens per row that the next `step` writes."""
        for layer in self._texts:
            layer.advance(tokens)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Within it, a forward pass reads one new token per row. Adds 1 to `ends` on the device."""
        self.ends.add_(1)
        self.stepping = True
        try:
            yield
        finally:
            self.stepping = False

    def memory(self) -> list[Tensor]:
        """All tensors that a step reads or writes."""
        found: list[Any] = [x for layer in self._texts for x in (*layer._buffers(), layer.offset, layer.counters)]
        found += [x for layer in self._layers if isinstance(layer, CrossCache) for x in (layer.keys, layer.values)]
        return [x for x in (*found, self.starts, self.ends, *self.state.values()) if isinstance(x, Tensor)]


class TransformersCache(KVCache):
    """A cache of transformers (a `DynamicCache`, by duck typing) with the interface of `KVCache`.

    Keys and values stay in `cache`, which grows in place as under transformers' own model, and gradients reach the
    tensors that it was made from, such as the prompts of prefix tuning. Each step copies the past, unlike `KVCache`.

    Raises InputError for other objects, for more layers than the model's, and for caches of a fixed size, whose unused
    positions look like tokens.
    """

    def __init__(self, cache: Any, num_layers: int):
        is_cache = all(hasattr(cache, name) for name in ("layers", "update", "get_seq_length"))
        if not is_cache or (getattr(cache, "is_compileable", False) and len(cache.layers)):
            raise InputError(
                f"past_key_values is a {type(cache).__name__}; it must be a KVCache, as model.new_cache makes, or a "
                "DynamicCache of transformers, and not a cache of a fixed size"
            )
        if len(cache.layers) > num_layers:
            raise InputError(
                f"past_key_values has {len(cache.layers)} layers, the model {num_layers}; "
                "was it made for another model?"
            )
        self.cache = cache
        self.kv_cache_dtype = "auto"
        self._layers = [_TransformersLayer(cache, layer) for layer in range(num_layers)]  # type: ignore[misc]
        self._text = self._layers[0]  # type: ignore[assignment]
        self.state = {}

    @property
    def batch_size(self) -> int:
        """0 before the first token."""
        return self.cache.layers[0].keys.shape[0] if self.length else 0

    def reset(self) -> None:
        raise InputError(
            f"past_key_values is a {type(self.cache).__name__}, which cannot be emptied; longrope needs that at "
            "its original length. Leave past_key_values out"
        )

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes the old row rows[i], in every layer."""
        self.cache.batch_select_indices(rows)


class _TransformersLayer:
    """One layer of a `TransformersCache`: the members of a `LayerCache` that attention uses."""

    def __init__(self, cache: Any, layer: int):
        self._cache, self._layer = cache, layer

    @property
    def length(self) -> int:
        return self._cache.get_seq_length(self._layer)

    @property
    def window(self) -> int | None:
        layers = self._cache.layers
        return getattr(layers[self._layer], "sliding_window", None) if self._layer < len(layers) else None

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends k, v [B, S, HK, D] and returns all that these S tokens may see, in the dtype of k and v."""
        keys, values = self._cache.update(k.transpose(1, 2), v.transpose(1, 2), self._layer)
        return keys.transpose(1, 2).to(k.dtype), values.transpose(1, 2).to(v.dtype)


def as_kv_cache(cache: Any, num_layers: int) -> KVCache:
    """`cache` itself if it is a KVCache, else a `TransformersCache` around it. Raises InputError for other objects."""
    return cache if isinstance(cache, KVCache) else TransformersCache(cache, num_layers)
