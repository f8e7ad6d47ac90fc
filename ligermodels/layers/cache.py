"""Keys and values of past tokens, so that generating a token costs one token's work."""

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
"""Tokens that the buffers of a layer with a window hold beyond it. Moving the window reads and writes it once in SLACK
steps, and attention reads it in every step: the moves add 4 / SLACK, 1.6 %, to what decoding reads here."""

KV_CACHE_DTYPES = ("auto", "fp8")
"""What a cache holds keys and values in: the dtype that the model computes in, or e4m3."""


class LayerCache:
    """One layer's keys and values: two buffers [B, capacity, HK, D]. `length` is the tokens seen so far.

    With kv_cache_dtype "fp8" they hold e4m3, and two more buffers [B, capacity, HK] the scales, see kernels/fp8.py. The
    tokens of the first call attend to each other's keys and values as they are, all later ones to what the cache holds.

    Without a window the buffers hold every token and double when they are full. With one they have room for
    min(max_length, window - 1 + SLACK) tokens: new ones follow the old, and when the buffers are full the last
    window - 1, all that a later query can see, move to the front.
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
        self.dtype = dtype  # of the keys and values that it takes and gives
        self.length = 0
        self._end = 0  # of the tokens in the buffers; the last one seen is the one before it
        shape = (batch_size, self._limited(max_length), num_kv_heads, head_dim)
        self.is_fp8 = kv_cache_dtype == "fp8"
        # In fp8 the bits lie as integers, whose rows torch moves on every device.
        held = torch.uint8 if self.is_fp8 else dtype
        self.keys = torch.empty(shape, dtype=held, device=device)
        self.values = torch.empty(shape, dtype=held, device=device)
        if self.is_fp8:
            self.key_scales = torch.empty(shape[:3], dtype=fp8.SCALE_DTYPE, device=device)
            self.value_scales = torch.empty(shape[:3], dtype=fp8.SCALE_DTYPE, device=device)
            _check_fp8(self.keys.device)
        # Once `place` was called, for `attend`.
        self.offset: Tensor | None = None  # with a window
        self.counters: Tensor | None = None

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends k, v [B, S, HK, D] and returns, in order, all keys and values that these S tokens may see.

        Each is [B, past + S, HK, D], where past counts the tokens before: all of them, or the last window - 1.
        Without gradients these are views of the buffers, valid until the next update, and k and v themselves
        where there is no past; a call of more tokens than the buffers of a window hold gets a copy, and one of a cache
        in fp8 too, new tokens rounded as the past is. With gradients the new tokens keep theirs and the past is
        constant: the buffers hold values only.
        An empty cache follows the first tokens to their device, where accelerate has offloaded or spread the model, and
        to their dtype, where autocast or fp32 embeddings make it another than the model's.
        Raises InputError if batch size, heads or dtype are not those of the cache, and for gradients with fp8.
        """
        first = self.length == 0
        if first:
            self._follow(k.device, k.dtype)
        _check_fits(self.keys, k, self.dtype)
        past, total = self._past, self._past + k.shape[1]
        fits = self._limited(total) == total
        new, seen = self._to_held(k, v), None
        if past == 0:
            seen = new
        elif k.requires_grad or v.requires_grad or not fits:
            before = slice(self._end - past, self._end)
            seen = [torch.cat([buffer[:, before], x], 1) for buffer, x in zip(self._buffers(), new, strict=True)]
        self.length += k.shape[1]
        if seen is not None and not fits:  # only what a later query can see goes into the buffers
            last = slice(total - self._past, None)
            self._end = 0  # nothing in them stays
            self._append([x[:, last].detach() for x in seen], past=0)
        else:
            self._append([x.detach() for x in new], past)
        if first:
            return k, v
        if seen is None:
            held = slice(self._end - total, self._end)
            seen = [buffer[:, held] for buffer in self._buffers()]
        return self._from_held(seen)

    def reserve(self, length: int) -> None:
        """Makes the buffers large enough for `length` tokens: until then they stay where they are."""
        if self._limited(length) > self.keys.shape[1]:
            self._make_room(self._past, length - self._past)

    def advance(self, tokens: int = 1) -> None:
        """Counts tokens that `attend` writes, at most SLACK of them, and makes room for them."""
        if self._end + tokens > self.keys.shape[1]:
            self._make_room(self._past, tokens)
            self._place_buffers()
        self.length += tokens
        self._end += tokens

    def place(self, rows: int) -> None:
        """Tells the device where the buffers begin, and makes what a forward pass of so many rows needs there."""
        heads = rows * self.keys.shape[2]
        if self.counters is None or self.counters.device != self.keys.device or len(self.counters) < heads:
            with torch.inference_mode(False):  # they outlive the call
                self.counters = torch.zeros(heads, dtype=torch.int32, device=self.keys.device)
        self._place_buffers()

    def _place_buffers(self) -> None:
        """`offset`, int32, is the position of their first token."""
        if self.window is not None:
            if self.offset is None or self.offset.device != self.keys.device:
                with torch.inference_mode(False):
                    self.offset = torch.empty((), dtype=torch.int32, device=self.keys.device)
            self.offset.fill_(self.length - self._end)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, token: NextToken, *,
        window: int | None, softcap: float | None, scale: float | None,
    ) -> Tensor:  # fmt: skip
        """Rotates and writes one new token a row, and returns its attention [B, 1, HQ, D] to what its row holds.

        q [B, 1, HQ, D], which is overwritten, k, v [B, 1, HK, D]. Where, and up to where, is read from the device, so
        that a CUDA graph of this can be replayed; `advance` counts the token. In a cache of one row the B tokens may
        follow each other: each sees those before it.
        """
        place = self._buffers()
        if len(self.keys) == 1:
            place = [x.expand(len(k), *x.shape[1:]) for x in place]
        _check_fits(place[0], k, self.dtype)
        keys, values, *rest = place
        scales = None
        if self.is_fp8:
            keys, values, scales = keys.view(fp8.DTYPE), values.view(fp8.DTYPE), (rest[0], rest[1])
        q = rope_to_cache(q, k, v, token.cos, token.sin, keys, values, token.ends, self.offset, scales)
        return decode_attention(
            q, keys, values, token.starts, token.ends, self.offset, window=window, softcap=softcap, scale=scale,
            counters=self.counters, scales=scales,
        )  # fmt: skip

    def take(self, other: "LayerCache", rows: Tensor) -> None:
        """Holds what `other` does, row i its row rows[i], in memory of its own."""
        past = other._past
        held = slice(other._end - past, other._end)
        self._follow(other.keys.device, other.dtype)
        for mine, its in zip(self._buffers(), other._buffers(), strict=True):
            mine[:, :past] = its[:, held].index_select(0, rows)
        self.length, self._end = other.length, past

    def put(self, other: "LayerCache", rows: Tensor, into: Tensor) -> None:
        """Row into[i] holds the tokens of row rows[i] of `other`, which is not longer, as its last ones."""
        past = other._past
        self._follow(other.keys.device, other.dtype)
        held, place = slice(other._end - past, other._end), slice(self._end - past, self._end)
        for mine, its in zip(self._buffers(), other._buffers(), strict=True):
            mine[into, place] = its[rows, held]

    def shift(self, length: int) -> None:
        """Moves the tokens so that there are `length` columns, the last where the last was."""
        past, end, self.length = self._past, self._end, length
        kept, self._end = min(past, self._past), self._past
        for x in self._buffers():
            x[:, self._end - kept : self._end] = x[:, end - kept : end].clone()  # the two ranges may overlap

    def reset(self) -> None:
        """Forgets the tokens and keeps the memory."""
        self.length = self._end = 0

    def can_crop(self, length: int) -> bool:
        """Whether the buffers hold all that the token after the first `length` sees."""
        first = self.length - self._end  # of the tokens in the buffers
        seen = 0 if self.window is None else length - self.window + 1  # the first that it sees
        return first <= max(seen, 0) and length <= self.length

    def crop(self, length: int) -> None:
        """Forgets all but the first `length` tokens, where `can_crop` says so."""
        self._end -= self.length - length
        self.length = length

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes the old row rows[i]; rows: int64 [N], repeats allowed."""
        held = slice(self._end - self._past, self._end)
        for name in self._names:
            old = getattr(self, name)
            moved = old[:, held].index_select(0, rows)
            if len(rows) != len(old):
                old = old.new_empty(len(rows), *old.shape[1:])
                setattr(self, name, old)
            old[:, held] = moved

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
        """Bytes that a row holds for a token."""
        return sum(x[:1, :1].nbytes for x in self._buffers())

    @property
    def _names(self) -> tuple[str, ...]:
        return ("keys", "values", "key_scales", "value_scales") if self.is_fp8 else ("keys", "values")

    def _buffers(self) -> list[Tensor]:
        return [getattr(self, name) for name in self._names]

    def _to_held(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """What the buffers hold of k and v."""
        if not self.is_fp8:
            return [k, v]
        if k.requires_grad or v.requires_grad:
            raise InputError(
                "a KV cache in fp8 has no gradients: run under torch.no_grad(), or make it without kv_cache_dtype"
            )
        (k, of_k), (v, of_v) = fp8.quantize_heads(k), fp8.quantize_heads(v)
        return [k.view(torch.uint8), v.view(torch.uint8), of_k, of_v]

    def _from_held(self, held: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of what `_to_held` makes."""
        if not self.is_fp8:
            return held[0], held[1]
        k, v = (fp8.dequantize_heads(held[i].view(fp8.DTYPE), held[i + 2], self.dtype) for i in (0, 1))
        return k, v

    @property
    def _past(self) -> int:
        """Tokens so far that the next one sees."""
        return self.length if self.window is None else min(self.length, self.window - 1)

    def _limited(self, capacity: int) -> int:
        return capacity if self.window is None else min(capacity, self.window - 1 + SLACK)

    def _append(self, new: list[Tensor], past: int) -> None:
        """Puts what `_to_held` made after the last `past` tokens of the buffers."""
        count = new[0].shape[1]
        if self._end + count > self.keys.shape[1]:
            self._make_room(past, count)
        end = self._end + count
        for buffer, x in zip(self._buffers(), new, strict=True):
            buffer[:, self._end : end] = x
        self._end = end

    def _make_room(self, past: int, new: int) -> None:
        """Moves the last `past` tokens to the front of the buffers, or of larger ones while these may grow."""
        held, capacity = slice(self._end - past, self._end), self.keys.shape[1]
        larger = self._limited(max(past + new, 2 * capacity))
        for name in self._names:
            old = getattr(self, name)
            if larger > capacity:
                buffer = old.new_empty(old.shape[0], larger, *old.shape[2:])
                buffer[:, :past] = old[:, held]
                setattr(self, name, buffer)
            else:
                old[:, :past] = old[:, held].clone()  # the two ranges may overlap
        self._end = past


def _check_fp8(device: torch.device) -> None:
    """Raises InputError where Triton cannot convert to and from e4m3."""
    if device.type == "cuda" and torch.version.cuda and torch.cuda.get_device_capability(device) < (8, 9):
        raise InputError(
            f"kv_cache_dtype='fp8': {torch.cuda.get_device_name(device)} cannot convert e4m3, which Ada, Hopper and "
            "later GPUs do; leave kv_cache_dtype out"
        )


def _check_fits(held: Tensor, k: Tensor, dtype: torch.dtype) -> None:
    """Raises InputError where `k` [B, S, HK, D] cannot be appended to what a cache holds of `dtype`."""
    if (held.shape[0], *held.shape[2:]) != (k.shape[0], *k.shape[2:]) or dtype != k.dtype:
        raise InputError(
            f"KV cache: keys {list(k.shape)} in {k.dtype} do not fit a cache of {list(held.shape)} in {dtype}; "
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
        """Holds what `other` does, row i its row rows[i]."""
        self.keys, self.values = other.keys, other.values
        self.reorder(rows)

    def reset(self) -> None:
        """Forgets the images."""
        self.keys = self.values = None

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes the old row rows[i]."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)


class KVCache:
    """A `LayerCache` per layer, or a `CrossCache`: `cache[i]`, iterable, `len(cache)` layers.

    max_length: tokens that memory is allocated for; a longer sequence makes a layer's buffers double.
    windows: for each layer the tokens that a query of it sees, counting itself, or None for all; left out: all
    layers see all. cross_layers: the layers that attend to images instead; at least one does not. kv_cache_dtype: "fp8"
    holds keys and values of text, not of images, in e4m3; None and "auto" in `dtype`. Memory:
    2 * batch_size * num_kv_heads * head_dim elements per token held (in fp8, 2 * batch_size * num_kv_heads *
    (head_dim + 2) bytes). A layer holds max_length tokens, one with a window at most window - 1 + SLACK of them, one of
    cross_layers as many as the images have states. Lengths are known to the host: nothing synchronises. `state` is a
    dict for a model's other state of these tokens; its tensors have a row for each sequence.
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
        """Tokens seen, of which a layer with a window holds only the last."""
        return self._text.length

    @property
    def batch_size(self) -> int:
        return self._text.keys.shape[0]

    @property
    def device(self) -> torch.device:
        return self._text.keys.device

    def get_seq_length(self) -> int:
        """`length`, by the name that transformers has for it."""
        return self.length

    def reset(self) -> None:
        """Forgets the tokens and keeps the memory."""
        for layer in self._layers:
            layer.reset()
        self.state.clear()

    def crop(self, length: int) -> None:
        """Forgets all but the first `length` tokens; all of them where a layer with a window no longer has these.

        Images and `state` stay as they are, so `length` must reach past the last image.
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
        """Holds what `other` does, row i its row rows[i]; the text in memory of its own."""
        for mine, layer in zip(self._layers, other._layers, strict=True):
            mine.take(layer, rows)  # type: ignore[arg-type]
        self.state = {
            name: value.index_select(0, rows) if isinstance(value, Tensor) else value
            for name, value in other.state.items()
        }

    def put(self, other: "KVCache", rows: Tensor, into: Tensor) -> None:
        """Row into[i] becomes row rows[i] of `other`, whose last token is then this cache's last; text alone.

        rows, into: int64 [N]. `other` has the windows of this cache and is not longer.
        """
        for mine, layer in zip(self._texts, other._texts, strict=True):
            mine.put(layer, rows, into)

    def shift(self, length: int) -> None:
        """Makes `length` the number of columns: first ones go, or come and hold nothing yet. See `reserve`."""
        for layer in self._texts:
            layer.shift(length)

    # Decoding with lengths on the device, so that a CUDA graph can be replayed: reserve, place, and for each token of
    # every row advance and step.

    def reserve(self, length: int) -> None:
        """Makes room for `length` tokens: until then the tensors of `memory` stay where they are."""
        for layer in self._texts:
            layer.reserve(length)

    def place(self, starts: Tensor | None, rows: int | None = None) -> None:
        """Tells the device the lengths, and the columns `starts` [B] of the rows' first tokens (None: all 0).

        rows: of a forward pass, where that is not the batch size: in a cache of one row, tokens that follow each other.
        """
        where = self.device, self.batch_size if rows is None else rows
        if where not in self._places:  # each in memory of its own, which a CUDA graph may read
            with torch.inference_mode(False):  # they outlive the call
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
        """Counts the tokens of a row that the next `step` writes. For the host."""
        for layer in self._texts:
            layer.advance(tokens)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Within it, a forward pass is of one token a row, the one after the first `ends`, which it counts."""
        self.ends.add_(1)
        self.stepping = True
        try:
            yield
        finally:
            self.stepping = False

    def memory(self) -> list[Tensor]:
        """All tensors that a step reads or writes."""
        held: list[Any] = [x for layer in self._texts for x in (*layer._buffers(), layer.offset, layer.counters)]
        held += [x for layer in self._layers if isinstance(layer, CrossCache) for x in (layer.keys, layer.values)]
        return [x for x in (*held, self.starts, self.ends, *self.state.values()) if isinstance(x, Tensor)]


class TransformersCache(KVCache):
    """A cache of transformers (a `DynamicCache`, by duck typing) with the interface of `KVCache`.

    Keys and values stay in `cache`, which grows in place as it does under transformers' own model, and gradients reach
    the tensors that it was made of, such as the prompts of prefix tuning. transformers stores [B, HK, S, D]; a step
    copies the past, which `KVCache` avoids.

    Raises InputError for other objects, for another number of layers, and for caches of a fixed size, whose unused
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
            f"a {type(self.cache).__name__} cannot be emptied, which rotary positions with a switch (longrope) need at "
            "their original length; leave past_key_values out"
        )

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes the old row rows[i], in every layer."""
        self.cache.batch_select_indices(rows)


class _TransformersLayer:
    """One layer of a `TransformersCache`, with the members of a `LayerCache` that attention uses."""

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
    """`cache` itself, or a `TransformersCache` around one of transformers. Raises InputError for anything else."""
    return cache if isinstance(cache, KVCache) else TransformersCache(cache, num_layers)
