"""Keys and values of past tokens, so that generating a token costs one token's work."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ligermodels.errors import InputError


class LayerCache:
    """One layer's keys and values: two buffers [B, capacity, HK, D], filled up to `length`."""

    def __init__(
        self,
        batch_size: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        shape = (batch_size, max_length, num_kv_heads, head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends k, v [B, S, HK, D] and returns all keys and values so far, each [B, length, HK, D].

        Without gradients these are views of the buffers, good until the next update, and k and v themselves
        where there is no past. With gradients the new tokens keep theirs and the past is constant: the
        buffers hold values only.
        Raises InputError if batch size, heads or dtype are not those of the cache.
        """
        self._check(k, v)
        past, self.length = self.length, self.length + k.shape[1]
        if self.length > self.keys.shape[1]:
            self._grow(max(self.length, 2 * self.keys.shape[1]), past)
        self.keys[:, past : self.length] = k.detach()
        self.values[:, past : self.length] = v.detach()
        if past == 0:
            return k, v
        if k.requires_grad or v.requires_grad:
            return torch.cat([self.keys[:, :past], k], 1), torch.cat([self.values[:, :past], v], 1)
        return self.keys[:, : self.length], self.values[:, : self.length]

    def reset(self) -> None:
        """Forgets the tokens and keeps the memory."""
        self.length = 0

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes the old row rows[i]; rows: int64 [N], repeats allowed (beam search)."""
        keys = self.keys[:, : self.length].index_select(0, rows)
        values = self.values[:, : self.length].index_select(0, rows)
        if len(rows) != self.keys.shape[0]:
            shape = (len(rows), *self.keys.shape[1:])
            self.keys, self.values = self.keys.new_empty(shape), self.values.new_empty(shape)
        self.keys[:, : self.length] = keys
        self.values[:, : self.length] = values

    def _grow(self, capacity: int, filled: int) -> None:
        shape = (self.keys.shape[0], capacity, *self.keys.shape[2:])
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(shape)
            new[:, :filled] = old[:, :filled]
            setattr(self, name, new)

    def _check(self, k: Tensor, v: Tensor) -> None:
        batch_size, _, num_kv_heads, head_dim = self.keys.shape
        if k.shape != v.shape or (k.shape[0], *k.shape[2:]) != (batch_size, num_kv_heads, head_dim):
            raise InputError(
                f"KV cache: k {list(k.shape)} and v {list(v.shape)} do not fit a cache of "
                f"[{batch_size}, length, {num_kv_heads}, {head_dim}]; "
                "was it made for another batch size or model?"
            )
        if k.dtype != self.keys.dtype or k.device != self.keys.device:
            raise InputError(
                f"KV cache: k is {k.dtype} on {k.device}, the cache {self.keys.dtype} on {self.keys.device}; "
                "make the cache with the dtype (under autocast: its dtype) and device of the keys"
            )


class KVCache:
    """A `LayerCache` per layer: `cache[i]`, iterable, `len(cache)` layers.

    max_length: tokens that memory is set aside for, 2 * num_layers * batch_size * max_length * num_kv_heads *
    head_dim elements; a longer sequence makes a layer's buffers double. Lengths are known to the host:
    nothing synchronises.
    """

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        if min(num_layers, batch_size, num_kv_heads, head_dim) < 1 or max_length < 0:
            raise InputError(
                f"KV cache: num_layers={num_layers}, batch_size={batch_size}, max_length={max_length}, "
                f"num_kv_heads={num_kv_heads}, head_dim={head_dim}: all must be positive, max_length may be 0"
            )
        self._layers = [
            LayerCache(batch_size, max_length, num_kv_heads, head_dim, dtype=dtype, device=device)
            for _ in range(num_layers)
        ]

    def __getitem__(self, layer: int) -> LayerCache:
        return self._layers[layer]

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._layers[0].length

    @property
    def batch_size(self) -> int:
        return self._layers[0].keys.shape[0]

    def get_seq_length(self) -> int:
        """Tokens held, by the name that transformers has for it."""
        return self.length

    def reset(self) -> None:
        """Forgets the tokens and keeps the memory."""
        for layer in self._layers:
            layer.reset()

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes the old row rows[i], in every layer."""
        for layer in self._layers:
            layer.reorder(rows)
