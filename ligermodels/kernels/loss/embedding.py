"""Embedding: rows of a table by id, with a deterministic gradient of the table.

    y[t] = weight[ids[t]] * scale          dweight[v] = scale * sum of dy[t] over the t with ids[t] = v

What differs from a gather with an atomic backward:
- No atomics: a stable sort makes the tokens of an id one run. Each row of dweight is summed in fp32 in that order,
  rounded and written once, zeros included, so that no memory is cleared first.
- Runs are cut at fixed places, every 32 (or 64, or 256) sorted ids, and one program sums the tokens between two cuts.
  So one id for all tokens costs no more than distinct ids.
- Only the ids are saved, and nothing for a frozen table. Nothing synchronises.
- Where the table's gradient is added in place (`ligermodels.training.accumulate_in_place`), for example to that of a
  tied head, the sums are added to its rows, without a second [V, H].

Bytes at 2-byte dtypes, the minimum: forward 4 per element of y, backward 2 per element of dy and of dweight.
On a GPU an id outside [0, V) gives a row of NaN, and so a loss of NaN, and gets no gradient. torch's gather would
destroy the CUDA context.

Source: torch.nn.functional.embedding; the scale, rounded to the table's dtype before it multiplies, is that of Gemma in
https://github.com/huggingface/transformers.
"""

import operator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.kernels._check import describe
from ligermodels.kernels._gradients import is_marked, target
from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import (
    accumulator,
    cdiv,
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
def _sum_run(
    acc, dy_ptr, places_ptr, begin, end, stride, cols,
    WIDTH: tl.constexpr, UNROLL: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """acc plus the rows begin .. end of dy in sorted order (GATHERED) or as they are, UNROLL at a time."""
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
    offsets_ptr, partial_ptr, dy_ptr, sorted_ptr, places_ptr, n_ids, vocab, steps, stride, padding_idx: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Two kernels in one launch. partial[i] = the sum from cut i to the next, where both lie in one run. offsets[v] =
    the number of sorted ids below v, by bisection: the run of row v is offsets[v] .. offsets[v + 1]."""
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    spans = n_ids // SPAN * BLOCKS
    pid = tl.program_id(0)
    if pid < spans:
        cols = pid % BLOCKS * BLOCK + tl.arange(0, BLOCK)
        first = pid // BLOCKS * SPAN
        id = tl.load(sorted_ptr + first)
        if (id == tl.load(sorted_ptr + first + SPAN - 1)) & (id != padding_idx):
            acc = tl.zeros([BLOCK], partial_ptr.dtype.element_ty)
            acc = _sum_run(acc, dy_ptr, places_ptr, first, first + SPAN, stride, cols, WIDTH, UNROLL, True)
            tl.store(partial_ptr + (pid // BLOCKS).to(tl.int64) * WIDTH + cols, acc, mask=cols < WIDTH)
    else:
        rows = (pid - spans) * ROWS + tl.arange(0, ROWS)
        low = tl.zeros([ROWS], tl.int32)
        high = low + n_ids
        for _ in range(steps):
            middle = (low + high) // 2
            below = tl.load(sorted_ptr + middle, mask=low < high, other=vocab) < rows
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
    """Rows of dw: the run up to its first cut, the partial sums between cuts, and the rest after the last cut.

    ADD: adds to the rows in place, and does not touch rows without an id."""
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


_SPANS = ((16, 32), (19, 64), (31, 256))
"""(bits of the number of ids, ids between cuts): short ends of runs for few ids, few partial sums for many."""
_UNROLL = 8  # rows of a run per load
_ROWS = 4  # rows of the table per program of the backward


def _gather(ids: Tensor, weight: Tensor, scale: float | None) -> Tensor:
    n_ids, width = ids.numel(), operator.index(weight.shape[1])
    ids, weight = ids.contiguous(), last_dim_contiguous(weight)
    y = torch.empty((*ids.shape, width), dtype=weight.dtype, device=weight.device)
    if y.numel():
        block = min(1024, next_power_of_2(width))
        rows = 2048 // block
        launch(
            _forward_kernel, (cdiv(n_ids, rows) * cdiv(width, block),), y, ids, weight,
            n_ids, weight.shape[0], weight.stride(0), scale, width, block, rows, num_warps=4,
        )  # fmt: skip
    return y


def _backward(
    dy: Tensor, ids: Tensor, total: Tensor | None, vocab: int, dtype: torch.dtype, padding_idx: int | None,
    scale: float | None,
) -> Tensor:  # fmt: skip
    """The gradient [V, H] of the table, added to `total`, contiguous, if given."""
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
    sorted_ids, places = torch.sort(ids, stable=True)
    launch(
        _runs_kernel, (cdiv(vocab + 1, 128) + n_ids // span * blocks,), offsets, partial, dy, sorted_ids, places,
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
    padding_idx: a row without a gradient; negative: counted from the end. scale: rounded to the weight's dtype before
    the multiplication, whose result is rounded too.
    Returns [..., H] of the weight's dtype. The gradient of the weight is dense, summed in fp32 (or fp64) and rounded
    once.
    Raises InputError for dtypes, shapes or devices that do not fit and, on the CPU, for an id outside [0, V). On a GPU
    such an id gives NaN, and no gradient; create_graph=True raises InputError.
    """
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        kind = ids.dtype if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise InputError(f"embedding: ids are {kind}; they must be a tensor of torch.int64 or torch.int32")
    if weight.dim() != 2 or not weight.is_floating_point() or ids.device != weight.device:
        raise InputError(
            f"embedding: weight has {describe(weight)}, ids are on {ids.device}; expected floating point [V, H] there"
        )
    vocab = operator.index(weight.shape[0])
    if padding_idx is not None:
        if not -vocab <= padding_idx < vocab:
            raise InputError(f"embedding: padding_idx={padding_idx}, but the table has {vocab} rows")
        padding_idx %= vocab
    if use_triton(weight) and type(weight) in (Tensor, nn.Parameter):  # a DTensor supports torch's own ops only
        scale = None if scale is None else float(scale)
        if not (weight.requires_grad and torch.is_grad_enabled()):
            return _gather(ids, weight, scale)
        return _Embedding.apply(ids, weight, padding_idx, scale)
    try:
        return embedding_reference(ids, weight, padding_idx=padding_idx, scale=scale)
    except IndexError as error:  # its message names no id
        low, high = ids.aminmax()
        raise InputError(
            f"ids range from {int(low)} to {int(high)}, the table from 0 to {vocab - 1}; "
            "likely the tokenizer of another model, or a label value such as -100"
        ) from error
