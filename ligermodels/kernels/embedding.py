"""Rows of a table by id, and a gradient of the table that is the same in every run.

    y[t] = weight[ids[t]] * scale          dweight[v] = scale * sum of dy[t] over the t with ids[t] = v

What differs from a gather whose backward adds:
- No float is added atomically. The ids are sorted (stable counting sort, digit by digit), so that the tokens of a row
  lie in one run of the sorted order; each row of dweight is summed in fp32 in that order, and rounded and written
  once, zeros included: no memory is cleared first.
- A run is cut at fixed places, every 32 (or 64, or 256) of the sorted ids. What lies between two cuts is summed by a
  program of its own, so that an id that is every token costs no more than ids that are all distinct.
- Nothing but the ids is kept for the backward, and nothing at all for a frozen table. No host waits.
- Where the table's gradient is added in place (`ligermodels.training.gradients`) and another is there, such as that of
  a tied head, the sums are added to its rows: 6 bytes per element of the rows that were read, and no second [V, H].

Bytes at 2-byte dtypes, which are the minimum: forward 4 per element of y, backward 2 per element of dy and of dweight.
An id without a row reads as NaN on a GPU, so that the loss becomes NaN, as a label without a class makes it; torch's
own gather ends the process's CUDA context there instead. It adds to no row of the gradient.

On an H200, 16384 ids, bf16, the backward's device time in ms (torch, Liger forward and backward) where ids are drawn
evenly, as words are, and all alike: V 128256, H 4096: 0.36, 0.38, 0.40 (1.31, 1.02, 0.84; 0.55, 0.55, 1.23), where
clearing dweight alone takes 0.31; V 32000, H 2048: 0.10, 0.12, 0.19 (0.56, 0.43, 0.42; 0.16, 0.17, 0.53). Forward and
backward together cost the host 155 us at 512 ids, torch 75; from 4096 ids on they take less wall time than torch's.

Source: torch.nn.functional.embedding; the scale, rounded to the table's dtype before it multiplies, is that of Gemma in
https://github.com/huggingface/transformers.
"""

import operator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.kernels._gradients import is_marked, target
from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import (
    accumulator,
    cdiv,
    device_guard,
    last_dim_contiguous,
    next_power_of_2,
    once_differentiable,
    tl,
    triton,
    use_triton,
)


def embedding_reference(
    ids: Tensor, weight: Tensor, *, padding_idx: int | None = None, scale: float | None = None
) -> Tensor:
    rows = F.embedding(ids, weight, padding_idx)
    return rows if scale is None else rows * torch.tensor(scale, dtype=rows.dtype)


@triton.jit(do_not_specialize=["n_ids", "vocab"])
def _forward_kernel(
    y_ptr, ids_ptr, w_ptr, n_ids, vocab, w_stride,
    scale: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    at = (tl.program_id(0) // BLOCKS).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)[None, :]
    ids = tl.load(ids_ptr + at, mask=at < n_ids, other=-1).to(tl.int64)[:, None]
    y = tl.load(w_ptr + ids * w_stride + cols, mask=(ids >= 0) & (ids < vocab) & (cols < WIDTH), other=float("nan"))
    if scale is not None:
        ACC: tl.constexpr = tl.float64 if y.dtype == tl.float64 else tl.float32
        y = (y.to(ACC) * tl.full((), scale, ACC).to(y.dtype).to(ACC)).to(y.dtype)
    tl.store(y_ptr + at[:, None] * WIDTH + cols, y, mask=(at < n_ids)[:, None] & (cols < WIDTH))


@triton.jit
def _keys_at(ids_ptr, at, n_ids, vocab):
    """Ids as int32, with `vocab` for one that has no row: such sort last."""
    ids = tl.load(ids_ptr + at, mask=at < n_ids, other=-1)
    return tl.where((ids >= 0) & (ids < vocab), ids, vocab).to(tl.int32)


@triton.jit(do_not_specialize=["n_ids", "vocab"])
def _rank_kernel(
    keys_ptr, places_ptr, ids_ptr, n_ids, vocab, BLOCK: tl.constexpr, OTHERS: tl.constexpr
):  # fmt: skip
    """Sorts few ids: the place of one is the number of those below it, and of those like it that come earlier."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keys = _keys_at(ids_ptr, at, n_ids, vocab)
    rank = tl.zeros([BLOCK], tl.int32)
    for start in range(0, n_ids, OTHERS):
        others = start + tl.arange(0, OTHERS)
        before = _keys_at(ids_ptr, others, n_ids, vocab)[None, :]
        before = (before < keys[:, None]) | ((before == keys[:, None]) & (others[None, :] < at[:, None]))
        rank += tl.sum((before & (others < n_ids)[None, :]).to(tl.int32), 1)
    tl.store(keys_ptr + rank, keys, mask=at < n_ids)
    tl.store(places_ptr + rank, at, mask=at < n_ids)


@triton.jit(do_not_specialize=["n_ids", "share", "vocab"])
def _count_kernel(
    counts_ptr, ids_ptr, n_ids, share, vocab, SHIFT: tl.constexpr, DIGITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """How often each digit occurs in each program's share of the ids."""
    counts = tl.zeros([DIGITS], tl.int32)
    first = tl.program_id(0) * share
    for start in range(first, tl.minimum(first + share, n_ids), BLOCK):
        at = start + tl.arange(0, BLOCK)
        digits = (_keys_at(ids_ptr, at, n_ids, vocab) >> SHIFT) & (DIGITS - 1)
        counts += tl.histogram(digits, DIGITS, mask=at < n_ids)
    tl.store(counts_ptr + tl.program_id(0) * DIGITS + tl.arange(0, DIGITS), counts)


@triton.jit(do_not_specialize=["n_ids", "share", "vocab", "programs"])
def _place_kernel(
    keys_ptr, places_ptr, next_ptr, counts_ptr, ids_ptr, from_ptr, n_ids, share, vocab, programs,
    SHIFT: tl.constexpr, DIGITS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """One pass of the sort: an id goes behind those of lower digits, those of its own in earlier shares, and those
    before it in its own share. next_ptr holds, per program and digit, where the next one goes."""
    pid = tl.program_id(0)
    digit = tl.arange(0, DIGITS)
    everywhere, earlier = tl.zeros([DIGITS], tl.int32), tl.zeros([DIGITS], tl.int32)
    for start in range(0, programs, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)[:, None]
        counts = tl.load(counts_ptr + p * DIGITS + digit[None, :], mask=p < programs, other=0)
        everywhere += tl.sum(counts, 0)
        earlier += tl.sum(tl.where(p < pid, counts, 0), 0)
    after = tl.cumsum(everywhere, 0) - everywhere + earlier
    next_ptr += pid * DIGITS
    first = pid * share
    within = tl.arange(0, BLOCK)
    for start in range(first, tl.minimum(first + share, n_ids), BLOCK):
        tl.store(next_ptr + digit, after)
        tl.debug_barrier()  # read back below, by other threads
        at = start + within
        keys = _keys_at(ids_ptr, at, n_ids, vocab)
        digits = (keys >> SHIFT) & (DIGITS - 1)
        alike = (digits[:, None] == digits[None, :]) & (within[None, :] < within[:, None])
        to = tl.load(next_ptr + digits) + tl.sum(alike.to(tl.int32), 1)
        places = at
        if not FIRST:
            places = tl.load(from_ptr + at, mask=at < n_ids, other=0)
        tl.store(keys_ptr + to, keys, mask=at < n_ids)
        tl.store(places_ptr + to, places, mask=at < n_ids)
        after += tl.histogram(digits, DIGITS, mask=at < n_ids)
        tl.debug_barrier()


@triton.jit
def _sum_run(
    acc, dy_ptr, places_ptr, begin, end, stride, cols,
    WIDTH: tl.constexpr, UNROLL: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """acc plus the rows begin .. end of the sorted order (or of dy as it lies), UNROLL at a time."""
    for start in range(begin, end, UNROLL):
        rows = start + tl.arange(0, UNROLL).to(tl.int64)
        inside = rows < end
        if GATHERED:
            rows = tl.load(places_ptr + rows, mask=inside, other=0).to(tl.int64)
        mask = inside[:, None] & (cols < WIDTH)[None, :]
        acc += tl.sum(tl.load(dy_ptr + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0).to(acc.dtype), 0)
    return acc


@triton.jit(do_not_specialize=["n_ids", "vocab", "steps"])
def _runs_kernel(
    offsets_ptr, partial_ptr, dy_ptr, keys_ptr, places_ptr, n_ids, vocab, steps, stride, padding_idx: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Two kernels in one launch. offsets[v] is how many keys are below v, found by bisection: the run of row v is
    offsets[v] .. offsets[v + 1]. partial[i] is the sum from cut i to the next, where one run covers all of it."""
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    spans = n_ids // SPAN * BLOCKS
    pid = tl.program_id(0)
    if pid < spans:
        cols = pid % BLOCKS * BLOCK + tl.arange(0, BLOCK)
        first = pid // BLOCKS * SPAN
        key = tl.load(keys_ptr + first)
        if (key == tl.load(keys_ptr + first + SPAN - 1)) & (key != padding_idx) & (key < vocab):
            acc = tl.zeros([BLOCK], partial_ptr.dtype.element_ty)
            acc = _sum_run(acc, dy_ptr, places_ptr, first, first + SPAN, stride, cols, WIDTH, UNROLL, True)
            tl.store(partial_ptr + (pid // BLOCKS).to(tl.int64) * WIDTH + cols, acc, mask=cols < WIDTH)
    else:
        rows = (pid - spans) * ROWS + tl.arange(0, ROWS)
        low = tl.zeros([ROWS], tl.int32)
        high = low + n_ids
        for _ in range(steps):
            middle = (low + high) // 2
            below = tl.load(keys_ptr + middle, mask=low < high, other=vocab) < rows
            below = below & (low < high)
            low = tl.where(below, middle + 1, low)
            high = tl.where(below, high, middle)
        tl.store(offsets_ptr + rows, low, mask=rows <= vocab)


@triton.jit(do_not_specialize=["vocab"])
def _backward_kernel(
    dw_ptr, partial_ptr, dy_ptr, places_ptr, offsets_ptr, vocab, stride,
    scale: tl.constexpr, padding_idx: tl.constexpr, ADD: tl.constexpr, ACC: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Rows of dw: the run up to the first cut, the sums between cuts, and what is left behind the last.

    ADD: they are added to those that are there, and rows without an id are not touched."""
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    OUT: tl.constexpr = dw_ptr.dtype.element_ty
    first = tl.program_id(0) // BLOCKS * ROWS
    cols = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    dw_ptr += first.to(tl.int64) * WIDTH
    for row in range(first, tl.minimum(first + ROWS, vocab)):
        begin, end = tl.load(offsets_ptr + row), tl.load(offsets_ptr + row + 1)
        if row == padding_idx:
            end = begin
        cut, last_cut = (begin + SPAN - 1) // SPAN, end // SPAN
        head = tl.where(cut < last_cut, cut * SPAN, end)
        tail = tl.where(cut < last_cut, last_cut * SPAN, end)
        acc = tl.zeros([BLOCK], ACC)
        acc = _sum_run(acc, dy_ptr, places_ptr, begin, head, stride, cols, WIDTH, UNROLL, True)
        acc = _sum_run(acc, partial_ptr, places_ptr, cut, last_cut, WIDTH, cols, WIDTH, UNROLL, False)
        acc = _sum_run(acc, dy_ptr, places_ptr, tail, end, stride, cols, WIDTH, UNROLL, True)
        if scale is not None:
            acc *= tl.full((), scale, ACC).to(OUT).to(ACC)
        mask = cols < WIDTH
        if ADD:
            mask = cols < tl.where(begin < end, WIDTH, 0)
            acc += tl.load(dw_ptr + (row - first) * WIDTH + cols, mask=mask, other=0.0).to(ACC)
        tl.store(dw_ptr + (row - first) * WIDTH + cols, acc.to(OUT), mask=mask)


_FEW = 4096  # ids that are ranked among each other in one launch; more are sorted digit by digit
_DIGIT_BITS = 10  # at most, of a digit: what a program counts at once
_SHARE = 256  # ids that a program places at a time
_PROGRAMS = 128  # at most, of a pass; each reads the counts of all
_SPANS = ((16, 32), (19, 64), (31, 256))
"""Bits of the number of ids, and rows between cuts: few enough rows at a run's ends, and few enough sums between."""
_UNROLL = 8  # rows of a run that are loaded at once; 16 took a tenth to a third longer where ids are drawn evenly
_ROWS = 4  # rows of the table per program of the backward; at V 128256, 1 took a fifth to a half longer


def _sort(ids: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """ids: [T] -> keys, places: [T] int32. keys are the ids in order, places where they stood; equal ones in order."""
    n_ids = ids.shape[0]
    keys, places = (torch.empty(n_ids, dtype=torch.int32, device=ids.device) for _ in range(2))
    if n_ids <= _FEW:
        launch(_rank_kernel, (cdiv(n_ids, 32),), keys, places, ids, n_ids, vocab, 32, 256, num_warps=4)
        return keys, places
    passes = cdiv(vocab.bit_length(), _DIGIT_BITS)
    shift = cdiv(vocab.bit_length(), passes)
    digits = 1 << shift
    share = cdiv(cdiv(n_ids, _PROGRAMS), _SHARE) * _SHARE
    programs = cdiv(n_ids, share)
    counts, after = (torch.empty((programs, digits), dtype=torch.int32, device=ids.device) for _ in range(2))
    other = (torch.empty_like(keys), torch.empty_like(places)) if passes > 1 else (keys, places)
    source, target = (ids, places), (keys, places)  # the first pass has no places to read
    for i in range(passes):
        launch(
            _count_kernel, (programs,), counts, source[0], n_ids, share, vocab, i * shift, digits, _SHARE, num_warps=4
        )
        launch(
            _place_kernel, (programs,), *target, after, counts, *source, n_ids, share, vocab, programs,
            i * shift, digits, _SHARE, max(1, 8192 // digits), i == 0, num_warps=8,
        )  # fmt: skip
        source, target = target, other if i % 2 == 0 else (keys, places)
    return source


def _gather(ids: Tensor, weight: Tensor, scale: float | None) -> Tensor:
    n_ids, width = ids.numel(), operator.index(weight.shape[1])
    ids, weight = ids.contiguous(), last_dim_contiguous(weight)
    y = torch.empty((*ids.shape, width), dtype=weight.dtype, device=weight.device)
    if y.numel():
        block = min(1024, next_power_of_2(width))
        rows = 2048 // block
        with device_guard(weight):
            launch(
                _forward_kernel, (cdiv(n_ids, rows) * cdiv(width, block),), y, ids, weight,
                n_ids, weight.shape[0], weight.stride(0), scale, width, block, rows, num_warps=4,
            )  # fmt: skip
    return y


def _backward(
    dy: Tensor, ids: Tensor, total: Tensor | None, vocab: int, dtype: torch.dtype, padding_idx: int | None,
    scale: float | None,
) -> Tensor:  # fmt: skip
    """The gradient [V, H] of the table, added to total, contiguous, where there is one."""
    n_ids, width = dy.shape[0], operator.index(dy.shape[1])
    dw = torch.empty((vocab, width), dtype=dtype, device=dy.device) if total is None else total
    if not n_ids or not dw.numel():
        return dw.zero_() if total is None else dw
    dy = last_dim_contiguous(dy)
    block = min(1024, next_power_of_2(width))
    blocks, warps = cdiv(width, block), max(1, block // 256)
    skipped = -1 if padding_idx is None else padding_idx
    span, steps = next((span, bits) for bits, span in _SPANS if n_ids < 2**bits)
    offsets = torch.empty(vocab + 1, dtype=torch.int32, device=dy.device)
    partial = torch.empty((n_ids // span, width), dtype=accumulator(dtype), device=dy.device)
    with device_guard(dy):
        keys, places = _sort(ids, vocab)
        launch(
            _runs_kernel, (cdiv(vocab + 1, 128) + n_ids // span * blocks,), offsets, partial, dy, keys, places,
            n_ids, vocab, steps, dy.stride(0), skipped, 128, width, block, span, _UNROLL, num_warps=warps,
        )  # fmt: skip
        launch(
            _backward_kernel, (cdiv(vocab, _ROWS) * blocks,), dw, partial, dy, places, offsets, vocab, dy.stride(0),
            scale, skipped, total is not None, tl.float64 if dtype == torch.float64 else tl.float32,
            width, block, _ROWS, span, _UNROLL, num_warps=warps,
        )  # fmt: skip
    return dw


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight, padding_idx, scale):
        ctx.save_for_backward(ids)
        ctx.options = weight.shape[0], weight.dtype, padding_idx, scale
        ctx.weight = weight if is_marked(weight) else None
        return _gather(ids, weight, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (ids,) = ctx.saved_tensors
        leaf = None if ctx.weight is None else target(ctx.weight)
        total = None if leaf is None or leaf.grad is None or not leaf.grad.is_contiguous() else leaf.grad
        dw = _backward(dy.reshape(ids.numel(), dy.shape[-1]), ids.reshape(-1).contiguous(), total, *ctx.options)
        return None, dw if total is None else None, None, None


def embedding(ids: Tensor, weight: Tensor, *, padding_idx: int | None = None, scale: float | None = None) -> Tensor:
    """weight[ids] * scale.

    ids: [...] int64 or int32, fewer than 2^31, each in [0, V); weight: [V, H] floating point.
    padding_idx: a row that takes no gradient, counted from the end where negative. scale: rounded to the weight's dtype
    before it multiplies, and the product once more.
    Returns [..., H] of the weight's dtype. Its backward gives the dense gradient of the weight, summed in fp32 (or
    fp64) and rounded once; there is no second derivative.
    Raises InputError for dtypes, shapes or devices that do not fit and, on the CPU, for an id without a row. On a GPU,
    which is not waited for, the row of such an id is NaN, and it adds to no row of the gradient.
    """
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        kind = ids.dtype if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise InputError(f"embedding: ids are {kind}; they must be a tensor of torch.int64 or torch.int32")
    if weight.dim() != 2 or not weight.is_floating_point():
        found = f"{weight.dtype} {tuple(weight.shape)}"
        raise InputError(f"embedding: the weight is {found}; expected floating point [V, H], a row per id")
    if ids.device != weight.device:
        raise InputError(f"embedding: ids are on {ids.device}, the weight on {weight.device}; move one of them")
    vocab = operator.index(weight.shape[0])
    if padding_idx is not None:
        if not -vocab <= padding_idx < vocab:
            raise InputError(f"embedding: padding_idx={padding_idx}, but the table has {vocab} rows")
        padding_idx %= vocab
    if use_triton(weight) and type(weight) in (Tensor, nn.Parameter):  # a DTensor knows torch's own ops alone
        scale = None if scale is None else float(scale)
        if not (weight.requires_grad and torch.is_grad_enabled()):
            return _gather(ids, weight, scale)
        return _Embedding.apply(ids, weight, padding_idx, scale)
    try:
        return embedding_reference(ids, weight, padding_idx=padding_idx, scale=scale)
    except IndexError as error:  # the lookup itself looks at the ids, and names none
        low, high = ids.aminmax()
        raise InputError(
            f"ids reach from {int(low)} to {int(high)}, the table from 0 to {vocab - 1}; "
            "likely the tokenizer of another model, or a label value such as -100"
        ) from error
