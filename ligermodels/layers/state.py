"""What the mixers of a model remember of past tokens, so that generating a token costs one token's work.

Each mixer makes a `State` of its own (`new_state`); a `Cache` is the list of them. Only the cache counts tokens: a
mixer gets the number of past tokens with the batch (`Batch.past_length`), in a captured step from the device
(`NextToken.ends`).
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels.attention.decode_attention import HeadNorms, decode_attention, rope_decode_attention
from ligermodels.kernels.attention.decode_keys_as_values import rope_decode_keys_as_values
from ligermodels.kernels.linear import fp8
from ligermodels.layers.batch import NextToken

MAX_STATES = 129
"""A pass of more tokens stores the last of its recurrent states alone: a drafter proposes at most 128 tokens."""
KV_CACHE_DTYPES = ("auto", "fp8")
"""The dtype of cached keys and values: the one that the model computes in, or e4m3."""


class State:
    """One mixer's memory of the tokens so far: `buffers`, tensors [B, ...]. Only the mixer calls what a subclass adds.

    Buffers are made under `torch.inference_mode(False)`, as `new_cache` does: others are not writable out of the mode.
    num_compute_buffers: the first buffers, which have the dtype in which the mixer computes. In methods, past: number
    of tokens in the cache before the call; rows: int64 [N], indices of rows. Any object with these methods can be a
    state. Without buffers it is the state of a layer that stores nothing. is_recurrent: a token that is read twice, or
    that is a pad, changes it.
    """

    is_recurrent: ClassVar[bool] = False

    def __init__(self, *buffers: Tensor, num_compute_buffers: int = 0):
        self.buffers, self.num_compute_buffers = list(buffers), num_compute_buffers

    @property
    def rows(self) -> int:
        return len(self.buffers[0])

    def copy_rows_from(self, other: Any, rows: Tensor, into: Tensor, length: int) -> None:
        """Row into[i] becomes row rows[i] of `other`, which has `length` tokens."""
        assert not self.buffers, "a state with buffers copies them"

    def reserve(self, length: int, past: int, tokens: int = 1) -> None:
        """Allocates for `length` tokens, written `tokens` at a time. Up to that length no tensor moves."""

    def reset(self) -> None:
        """Forgets all tokens; the memory stays."""

    def crop(self, length: int, cache: "Cache") -> bool:
        """Goes back to the state after the first `length` tokens. Returns False if that state is no longer stored."""
        return True

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes the old row rows[i]."""
        with torch.inference_mode(False):
            self.buffers = [x.index_select(0, rows.to(x.device)) for x in self.buffers]

    def snapshot(self) -> list[Tensor]:
        """What `restore` puts back after a pass over the next token has been run for nothing."""
        return [x.clone() for x in self.buffers] if self.is_recurrent else []

    def restore(self, saved: Sequence[Tensor]) -> None:
        for x, was in zip(self.buffers, saved, strict=False):
            x.copy_(was)

    def move(self, like: Tensor) -> None:
        """Gives an empty state the device of `like`, and its compute buffers the dtype of `like`.

        The first tokens decide, since accelerate offloads or spreads models, and autocast and fp32 embeddings compute
        in another dtype than the model's.
        """
        with torch.inference_mode(False):
            for i, x in enumerate(self.buffers):
                dtype = like.dtype if i < self.num_compute_buffers else x.dtype
                if (x.device, x.dtype) != (like.device, dtype):
                    self.buffers[i] = torch.zeros_like(x, device=like.device, dtype=dtype)

    def tensors(self) -> list[Tensor]:
        """All tensors that a captured step reads or writes."""
        return list(self.buffers)


class KeyValues(State):
    """Keys and values of attention: two buffers [B, capacity, HK, D]. Position p is in column p modulo capacity.

    Without a window the buffers have a column for every token, and double when they are full. With a window they are a
    ring: `window` columns are enough for steps of one token, and `reserve` adds some for steps of several.

    kv_cache_dtype "fp8": e4m3, with two more buffers [B, capacity, HK] of scales, see kernels/linear/fp8.py. The tokens
    of the first call attend to each other's keys and values as they are, later tokens to what the buffers store.

    key_dim: the dims of a key that are stored, where the others are those of its value times a weight
    (kernels/attention/decode_keys_as_values.py). The first keys of an empty state may be whole all the same.
    """

    def __init__(
        self, rows: int, max_length: int, num_kv_heads: int, head_dim: int, *, key_dim: int | None = None,
        window: int | None = None, kv_cache_dtype: str = "auto", dtype: torch.dtype, device: torch.device | str,
    ):  # fmt: skip
        self.window, self._max_columns = window, cast(int, math.inf if window is None else window)
        self.is_fp8 = kv_cache_dtype == "fp8"
        shape = (rows, min(max_length, self._max_columns), num_kv_heads)
        # In fp8 the bits are stored as integers, whose rows torch moves on every device.
        stored, scales = torch.uint8 if self.is_fp8 else dtype, [()] * 2 * self.is_fp8
        self._key_dims = key_dim or head_dim, head_dim
        sizes = [((self._key_dims[0],), stored), ((head_dim,), stored), *((size, fp8.SCALE_DTYPE) for size in scales)]
        buffers = [torch.empty((*shape, *size), dtype=kind, device=device) for size, kind in sizes]
        super().__init__(*buffers, num_compute_buffers=0 if self.is_fp8 else 2)
        self.counters = torch.empty(0)  # of decode_attention, once `reserve` was called
        self._first_stored = 0  # tokens before this position were not copied from smaller buffers

    @property
    def capacity(self) -> int:
        return self.buffers[0].shape[1]

    @property
    def key_dim(self) -> int:
        return self.buffers[0].shape[3]

    def move(self, like: Tensor) -> None:
        """Also gives it the number of heads of `like`, keys [B, S, HK, D]: other tools' tensor parallelism splits them.
        Of the two sizes that a key may have it gets theirs."""
        keys, *others = self.buffers
        of_keys = like.shape[2], like.shape[3] if like.shape[3] in self._key_dims else self.key_dim
        if keys.shape[2:] != of_keys:
            with torch.inference_mode(False):
                others = [x.new_empty(*x.shape[:2], like.shape[2], *x.shape[3:]) for x in others]
                self.buffers = [keys.new_empty(*keys.shape[:2], *of_keys), *others]
        super().move(like)

    def append(self, k: Tensor, v: Tensor, past: int) -> tuple[Tensor, Tensor]:
        """Stores k, v [B, S, HK, D] and returns, in order, all keys and values that these S tokens may see.

        Each is [B, seen + S, HK, D]; seen is past, or with a window at most window - 1. Without gradients these are k
        and v themselves if past is 0; else views of the buffers, valid until the next call, or copies around the ring.
        With gradients the new tokens keep theirs and the past is constant. Raises InputError if batch size, heads or
        dtype (unless the state is fp8) differ from the state's, and for gradients with fp8.
        """
        if past == 0:
            self.move(k)
        _check_fits(self.buffers[0], k)
        new, seen, end = self._quantize(k, v), min(past, self._max_columns - 1), past + k.shape[1]
        if min(end, self._max_columns) > self.capacity:
            self._resize(min(max(end, 2 * self.capacity), self._max_columns), past)
        joined = None
        if end - past + seen > self.capacity or k.requires_grad or v.requires_grad:
            joined = [torch.cat(both, 1) for both in zip(self._read(past - seen, past), new, strict=True)]
        self._write(new, past)
        return self._dequantize(joined or self._read(past - seen, end), k.dtype) if past else (k, v)

    def attend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, token: NextToken, tables: tuple[Tensor, Tensor] | None, *,
        window: int | None, softcap: float | None, scale: float | None, weight: Tensor | None = None,
        sinks: Tensor | None = None, norms: HeadNorms | None = None,
    ) -> Tensor:  # fmt: skip
        """Rotates and stores one new token a row, and returns its attention [B, 1, HQ, D] to the tokens of its row.

        q [B, 1, HQ, D], which is overwritten, k, v [B, 1, HK, D]. tables: cos and sin; None rotates nothing. Positions
        are on the device. In a cache of one row the B tokens may follow each other: each sees those before. Without k
        and v the token is stored already, and q is rotated: a later layer reads this state. weight [D]: makes keys of
        values, where the state has `key_dim` dims of keys; there is no window, softcap, sink or norm then. sinks: [HQ].
        norms: of each head of q and k, before they rotate; None: they are normalised, or have no norms.
        """
        buffers = self.buffers
        if self.rows == 1:
            buffers = [x.expand(len(q), *x.shape[1:]) for x in buffers]
        keys, values, *rest = buffers
        scales = None
        if self.is_fp8:
            keys, values, scales = keys.view(fp8.DTYPE), values.view(fp8.DTYPE), (rest[0], rest[1])
        masks: Any = dict(ring=self.window is not None, window=window)
        options: Any = dict(masks, softcap=softcap, scale=scale, scales=scales, sinks=sinks)
        if k is None or v is None:
            return decode_attention(q, keys, values, token.starts, token.ends, counters=self.counters, **options)
        if weight is not None:
            return rope_decode_keys_as_values(
                q, k, v, *cast(tuple[Tensor, Tensor], tables), keys, values, weight, token.starts, token.ends,
                scale=scale, counters=self.counters,
            )  # fmt: skip
        cos, sin = tables or (q.new_ones(1, 1, 1, dtype=torch.float32), q.new_zeros(1, 1, 1, dtype=torch.float32))
        return rope_decode_attention(
            q, k, v, cos, sin, keys, values, token.starts, token.ends, counters=self.counters, norms=norms, **options
        )

    def reserve(self, length: int, past: int, tokens: int = 1) -> None:
        capacity = min(length, self._max_columns - 1 + tokens)
        if capacity > self.capacity:
            self._resize(capacity, past)
        heads = max(self.rows, tokens) * self.buffers[0].shape[2]
        if len(self.counters) < heads or self.counters.device != self.buffers[0].device:
            with torch.inference_mode(False):
                self.counters = torch.zeros(heads, dtype=torch.int32, device=self.buffers[0].device)

    def reset(self) -> None:
        self._first_stored = 0

    def crop(self, length: int, cache: "Cache") -> bool:
        """Columns from `length` on are written again before they are read."""
        return max(self._first_stored, cache.farthest - self.capacity) <= max(0, length - self._max_columns + 1)

    def copy_rows_from(self, other: "KeyValues", rows: Tensor, into: Tensor, length: int) -> None:
        """`other` has a column for every token; if this state has fewer, it takes the last tokens."""
        self.move(other.buffers[0])
        begin = max(0, length - self.capacity)
        columns = torch.arange(begin, length, device=rows.device) % self.capacity
        for target, source in zip(self.buffers, other.buffers, strict=True):
            target[into[:, None], columns] = source[rows, begin:length]

    def tensors(self) -> list[Tensor]:
        return [*self.buffers, self.counters]

    def _columns(self, begin: int, end: int) -> Any:
        """Of the positions from begin to end: a slice, or where they go around the ring their indices."""
        first = begin % self.capacity
        if first + end - begin <= self.capacity:
            return slice(first, first + end - begin)
        return torch.arange(begin, end, device=self.buffers[0].device) % self.capacity

    def _read(self, begin: int, end: int) -> list[Tensor]:
        """What the buffers store of these positions, in order: views, or copies around the ring."""
        columns = self._columns(begin, end)
        return [x[:, columns] for x in self.buffers]

    def _write(self, new: Sequence[Tensor], past: int) -> None:
        """Stores what `_quantize` made, from position `past` on; of more tokens than columns the last."""
        end = past + new[0].shape[1]
        begin = max(past, end - self.capacity)
        columns = self._columns(begin, end)
        for buffer, x in zip(self.buffers, new, strict=True):
            buffer[:, columns] = x[:, begin - past :].detach()

    def _resize(self, capacity: int, past: int) -> None:
        self._first_stored = max(0, past - self._max_columns + 1)
        stored = self._read(self._first_stored, past)
        with torch.inference_mode(False):
            self.buffers = [x.new_empty(x.shape[0], capacity, *x.shape[2:]) for x in self.buffers]
        self._write(stored, self._first_stored)

    def _quantize(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """What the buffers store of k and v."""
        if not self.is_fp8:
            return [k, v]
        check_cache_dtype("fp8", k.device)  # `move` may have changed the device
        if k.requires_grad or v.requires_grad:
            raise InputError("a KV cache in fp8 has no gradients: use torch.no_grad(), or another kv_cache_dtype")
        (k, k_scales), (v, v_scales) = fp8.quantize_heads(k), fp8.quantize_heads(v)
        return [k.view(torch.uint8), v.view(torch.uint8), k_scales, v_scales]

    def _dequantize(self, stored: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The inverse of `_quantize`: keys and values, in `dtype` if the buffers are fp8."""
        if not self.is_fp8:
            return stored[0], stored[1]
        k, v = (fp8.dequantize_heads(stored[i].view(fp8.DTYPE), stored[i + 2], dtype) for i in (0, 1))
        return k, v


def check_cache_dtype(kind: str, device: torch.device) -> None:
    """Raises InputError for a KV cache in fp8 on a GPU for which Triton does not compile e4m3."""
    if kind == "fp8":
        fp8.check_e4m3(device, "kv_cache_dtype='fp8'", "leave it out: the cache is in the dtype of the model then")


def _check_fits(stored: Tensor, k: Tensor) -> None:
    """Raises InputError unless `k` [B, S, HK, D] fits a buffer of keys; fp8 buffers (uint8) take any dtype."""
    same_shape = (stored.shape[0], *stored.shape[2:]) == (k.shape[0], *k.shape[2:])
    if not same_shape or stored.dtype not in (k.dtype, torch.uint8):
        raise InputError(
            f"keys {list(k.shape)} in {k.dtype} do not fit a cache of {list(stored.shape)} in {stored.dtype}; "
            "was it made for another batch size or model, or with autocast on and used with autocast off?"
        )


class ImageKeyValues(State):
    """Keys and values [B, N, HK, D] of all images so far, of one cross-attention; no buffers before the first image.

    Images stay as they are when tokens are cropped, so that the length must reach past the last one.
    """

    def append(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """Appends k, v [B, N, HK, D] of new images and returns those of all; only the new ones have gradients.

        Raises InputError if batch size, heads or dtype are not those of the images before.
        """
        joined = [k, v]
        if self.buffers:
            _check_fits(self.buffers[0], k)
            joined = [torch.cat([old, new], 1) for old, new in zip(self.buffers, joined, strict=True)]
        self.buffers = [x.detach() for x in joined]
        return joined

    def reset(self) -> None:
        self.buffers = []

    def copy_rows_from(self, other: "ImageKeyValues", rows: Tensor, into: Tensor, length: int) -> None:
        """All rows at once, in order."""
        if self.buffers:
            raise InputError("rows with images cannot come and go in a batch; use `generate`")
        self.buffers = [x.index_select(0, rows) for x in other.buffers]


class RecurrentState(State):
    """The memory of a recurrent mixer with a short convolution, whose size does not grow.

    Two rings, where position p is in column p modulo the number of columns: the inputs of the convolution
    [B, W - 1 + N, C], of which a token reads those of the W - 1 tokens before it; and the state after each token
    [B, N, ...]. `reserve` makes N the number of tokens of a pass, in a cache of one row. `crop` can then go back by up
    to N - 1 tokens, if the mixer wrote the state after each.
    """

    is_recurrent = True

    def __init__(self, conv: Tensor, state: Tensor):
        super().__init__(conv, state, num_compute_buffers=1)
        self.reset()

    @property
    def tokens(self) -> int:
        """N, the maximum number of tokens of a pass that writes the state after each."""
        return self.buffers[1].shape[1]

    def read(self, past: int) -> tuple[Tensor, Tensor]:
        """Copies of what the token at position `past` reads: the inputs [B, W - 1, C], and the state [B, ...]."""
        (conv, state), columns = self.buffers, self._columns(past)
        return conv[:, columns], state[:, (past - 1) % self.tokens].clone()

    def write(self, inputs: Tensor, state: Tensor, past: int, rows: Tensor | None = None) -> None:
        """Stores what the token at position `past` will read, of all rows or of these. Earlier states are lost."""
        if rows is None:
            rows = torch.arange(self.rows, device=inputs.device)
        self.buffers[0][rows[:, None], self._columns(past)] = inputs
        self.buffers[1][rows, (past - 1) % self.tokens] = state.to(self.buffers[1].dtype)
        self._first = past

    def reserve(self, length: int, past: int, tokens: int = 1) -> None:
        if self.rows == 1 and self.tokens < tokens <= MAX_STATES:
            kept, more = self.read(past), tokens - self.tokens
            with torch.inference_mode(False):
                self.buffers = [x.new_zeros(1, x.shape[1] + more, *x.shape[2:]) for x in self.buffers]
            self.write(*kept, past)

    def reset(self) -> None:
        self._first = 0  # the states after fewer tokens are lost
        for x in self.buffers:
            x.zero_()

    def crop(self, length: int, cache: "Cache") -> bool:
        return length >= max(self._first, cache.farthest - self.tokens + 1)

    def copy_rows_from(self, other: "RecurrentState", rows: Tensor, into: Tensor, length: int) -> None:
        self.move(other.buffers[0])
        inputs, state = other.read(length)
        self.write(inputs[rows], state[rows], length, into)

    def _columns(self, past: int) -> Tensor:
        """Of the inputs that the token at position `past` reads."""
        columns = self.buffers[0].shape[1]
        return torch.arange(past - (columns - self.tokens), past, device=self.buffers[0].device) % columns


class Cache:
    """The states of a model's mixers, one for each layer: `cache[i]`, iterable, `len(cache)` layers.

    length: number of tokens of the longest row. rows: number of sequences. values: other values, by name, that a model
    stores about these tokens; tensors have a row for each sequence. farthest: largest length since the last reset.
    is_partial: a forward pass has begun and not ended, so that some layers may have stored its tokens, and others not.
    rope_switch: texts beyond this length have other rotary frequencies (longrope), and so other keys.
    foreign: the transformers cache that stores the keys and values, or None. Lengths are on the host, so nothing here
    synchronises.
    """

    def __init__(self, states: Sequence[State], rows: int, kv_cache_dtype: str = "auto", rope_switch: float = math.inf):
        self.states = list(states)
        self.rows = rows
        self.kv_cache_dtype, self.rope_switch = kv_cache_dtype, rope_switch
        self.length = self.farthest = 0
        self.is_partial = False
        self.foreign: Any = None
        self.values: dict[str, Any] = {}
        self.steps: dict[Any, Any] = {}  # captured steps over this memory, see generation/graphs.py

    def __getitem__(self, layer: int) -> Any:
        return self.states[layer]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.states)

    def __len__(self) -> int:
        return len(self.states)

    @property
    def device(self) -> torch.device:
        return self.tensors()[0].device

    @property
    def nbytes(self) -> int:
        """Bytes of the states, and of the caches that captured steps own, such as a drafter's."""
        step_caches = (step.own_cache for step in self.steps.values() if step.own_cache is not None)
        return sum(x.nbytes for x in self.tensors()) + sum(cache.nbytes for cache in step_caches)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """`length`, by the name that transformers has for it."""
        return self.length

    @property
    def batch_size(self) -> int:
        """`rows`, by the name that transformers has for it."""
        return self.rows

    @property
    def layers(self) -> Any:
        raise AttributeError(
            "a Cache has no `layers` as transformers' caches do: cache[i] is the state of layer i. For code that reads "
            "keys and values there, models of attention alone take a DynamicCache of transformers instead"
        )

    def begin(self) -> None:
        """Comes before the mixers read and store tokens, `advance` after that. Raises InputError if a pass failed."""
        if self.is_partial:
            raise InputError(
                "a pass with this cache failed midway, and some layers lack its tokens: call cache.reset() and pass "
                "the whole text"
            )
        self.is_partial = True

    def record_experts(self, columns: int, layers: int, top_k: int) -> None:
        """From here on, forwards store the experts that routers choose for the tokens in values["experts"], int16
        [rows, columns, layers, top_k], -1 where there are none."""
        with torch.inference_mode(False):
            shape = self.rows, columns, layers, top_k
            self.values["experts"] = torch.full(shape, -1, dtype=torch.int16, device=self.device)

    def record(self, experts: Tensor, step: tuple[Tensor, Tensor] | None) -> None:
        """Stores the experts [layers, B, S, top_k] of the new tokens. step: as in `TextInputs`."""
        stored, new = self.values["experts"], experts.permute(1, 2, 0, 3).to(torch.int16)
        if step is None:
            stored[:, self.length : self.length + new.shape[1]] = new
        else:
            stored[torch.arange(len(new), device=new.device), step[1].long() - 1] = new[:, 0]

    def advance(self, tokens: int) -> None:
        """Advances the length by `tokens`, which every mixer has stored or stores in this step."""
        self.length += tokens
        self.farthest, self.is_partial = max(self.farthest, self.length), False

    def reserve(self, length: int, tokens: int = 1) -> None:
        """Allocates for `length` tokens, written `tokens` at a time: until then no tensor moves."""
        for state in self.states:
            state.reserve(length, self.length, tokens)

    def reset(self) -> None:
        """Forgets the tokens; the memory stays."""
        for state in self.states:
            state.reset()
        self.length, self.farthest, self.is_partial = 0, 0, False
        self.values.clear()

    def crop(self, length: int) -> None:
        """Keeps the first `length` tokens; with a negative `length` drops the last -length, as in transformers.

        Forgets all tokens if a layer's state after those to keep is lost, after a pass that failed, and on the other
        side of `rope_switch`. Images and `values` stay as they are, so the tokens to keep must reach past the last
        image. Raises InputError for more tokens than there are, and for 0, which drops nothing in transformers.
        """
        kept = length if length > 0 else self.length + length
        if length == 0 and self.length:
            raise InputError(
                "crop(0) would keep no token here and drop none in transformers: use cache.reset() to forget all "
                "tokens, and no call to keep them"
            )
        if not 0 <= kept <= self.length:
            raise InputError(f"crop({length}): the cache has {self.length} tokens")
        fits = kept > 0 and (kept > self.rope_switch or self.farthest <= self.rope_switch)
        if fits and not self.is_partial and all([state.crop(kept, self) for state in self.states]):
            self.length = kept
        else:
            self.reset()

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes the old row rows[i]; rows: int64 [N], repeats allowed."""
        for state in self.states:
            state.reorder(rows)
        self.values = _select(self.values, rows)
        self.rows = len(rows)

    reorder_cache = reorder  # transformers' name

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows, as in transformers: int64 [N], or bool, True at each row to keep."""
        self.reorder(torch.arange(self.rows, device=indices.device)[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes `repeats` rows, which follow each other, as in transformers."""
        self.reorder(torch.arange(self.rows, device=self.device).repeat_interleave(repeats))

    def copy_rows_from(self, other: "Cache", rows: Tensor, into: Tensor | None = None) -> None:
        """Row into[i] becomes row rows[i] of `other`, a cache made with `whole=True`; rows, into: int64 [N]. The caller
        tracks the length of each row. Without `into`, this cache is empty, and becomes all of `other[rows]`."""
        places = torch.arange(self.rows, device=rows.device) if into is None else into
        if into is None:
            self.reserve(other.length)
        for state, source in zip(self, other, strict=True):
            state.copy_rows_from(source, rows, places, other.length)
        if into is None:
            self.values = _select(other.values, rows)
            self.advance(other.length)
        elif "experts" in self.values:
            self.values["experts"][into, : other.length] = other.values["experts"][rows, : other.length]

    def tensors(self) -> list[Tensor]:
        """All tensors that a step reads or writes."""
        values = [x for x in self.values.values() if isinstance(x, Tensor)]
        return [x for state in self.states for x in state.tensors()] + values


def _select(values: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    return {name: x.index_select(0, rows.to(x.device)) if isinstance(x, Tensor) else x for name, x in values.items()}


class TransformersState(State):
    """One layer of a transformers cache (a `DynamicCache`, by duck typing), with what attention calls in `KeyValues`.

    Keys and values stay in `cache`, which grows in place as under transformers' own model; each step copies the past.
    Gradients reach the tensors from which it was built, such as the prompts of prefix tuning.
    """

    def __init__(self, cache: Any, layer: int):
        super().__init__()
        self._cache, self._layer = cache, layer

    @property
    def window(self) -> int | None:
        layers = self._cache.layers
        return getattr(layers[self._layer], "sliding_window", None) if self._layer < len(layers) else None

    def append(self, k: Tensor, v: Tensor, past: int) -> tuple[Tensor, Tensor]:
        """Appends k, v [B, S, HK, D] and returns all that these S tokens may see, in the dtype of k and v."""
        keys, values = self._cache.update(k.transpose(1, 2), v.transpose(1, 2), self._layer)
        return keys.transpose(1, 2).to(k.dtype), values.transpose(1, 2).to(v.dtype)

    def reset(self) -> None:
        raise InputError(
            f"a {type(self._cache).__name__} cannot be emptied, which rotary positions with a switch (longrope) need "
            "at their original length; leave past_key_values out"
        )

    def reorder(self, rows: Tensor) -> None:
        if self._layer < len(self._cache.layers):  # a layer that reads an earlier one's keys stores nothing
            self._cache.layers[self._layer].batch_select_indices(rows)


def one_cache(past_key_values: Any, cache: Any) -> Any:
    """The cache that a caller gave under either of its two names. Raises InputError for two caches."""
    if past_key_values is not None and cache is not None and past_key_values is not cache:
        raise InputError("past_key_values and cache are two names for one cache, and they differ; pass one of them")
    return cache if past_key_values is None else past_key_values


def as_cache(cache: Any, num_layers: int) -> Cache:
    """`cache` itself, or a `Cache` over one of transformers. Raises InputError for other objects, for another number of
    layers, and for caches of a fixed size, whose unused positions look like tokens."""
    if isinstance(cache, Cache):
        return cache
    is_cache = all(hasattr(cache, name) for name in ("layers", "update", "get_seq_length"))
    if not is_cache or (getattr(cache, "is_compileable", False) and len(cache.layers)):
        raise InputError(
            f"past_key_values is a {type(cache).__name__}; it must be a Cache or a DynamicCache of transformers, not a "
            "cache of a fixed size: model.new_cache(rows, max_length) makes one that is allocated ahead"
        )
    if len(cache.layers) > num_layers:
        raise InputError(f"past_key_values has {len(cache.layers)} layers, the model {num_layers}: is it another's?")
    length = cache.get_seq_length()
    ours = Cache([TransformersState(cache, i) for i in range(num_layers)], len(cache.layers[0].keys) if length else 0)
    ours.foreign = cache
    ours.advance(length)
    return ours
