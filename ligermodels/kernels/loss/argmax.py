"""The likeliest token of each row of logits, and whether there is one.

Programs take the largest of a part of a row each, and a second kernel the largest of the parts. Of equal ones the first
counts, as in torch.max, so that the parts do not matter. torch.max takes 27 us for one row of 128,256 on an H200.

Bytes: the logits once.
"""

import torch
from torch import Tensor

from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import (
    cdiv,
    last_dim_contiguous,
    next_power_of_2,
    overlapping,
    overlaps_launches,
    tl,
    triton,
    use_triton,
    wait_for_previous,
)


def argmax_reference(logits: Tensor) -> Tensor:
    """The specification of `argmax`."""
    best, ids = logits.max(-1)
    return torch.stack([ids, (~(best > float("-inf"))).long()])


@triton.jit
def _parts_kernel(
    best_ptr, id_ptr, x_ptr, x_stride, parts, V, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """The largest of BLOCK numbers of a row, NaN if one is, and its column."""
    wait_for_previous(OVERLAP)
    part, row = tl.program_id(0), tl.program_id(1)
    cols = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row.to(tl.int64) * x_stride + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
    best, at = _first_of_largest(x, cols)
    tl.store(best_ptr + row * parts + part, best)
    tl.store(id_ptr + row * parts + part, at)


@triton.jit
def _rows_kernel(out_ptr, best_ptr, id_ptr, parts, rows, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    wait_for_previous(OVERLAP)
    row, part = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(best_ptr + row * parts + part, mask=part < parts, other=float("-inf"))
    best, at = _first_of_largest(x, tl.load(id_ptr + row * parts + part, mask=part < parts, other=2147483647))
    tl.store(out_ptr + row, at.to(tl.int64))
    tl.store(out_ptr + rows + row, tl.where(best > float("-inf"), 0, 1).to(tl.int64))


@triton.jit
def _first_of_largest(x, cols):
    """The largest x, NaN if one is, and the lowest of the cols that have it."""
    nan = tl.max((x != x).to(tl.int32), 0) > 0
    x = tl.where(x != x, float("inf"), x)
    best = tl.max(x, 0)
    at = tl.min(tl.where(x == best, cols, 2147483647), 0)
    return tl.where(nan, float("nan"), best), at


def argmax(logits: Tensor) -> Tensor:
    """int64 [2, B] of logits [B, V]: the column of each row's largest number, and 1 where that is NaN or -inf, else 0.

    A NaN counts as the largest. Of equal numbers the first is taken, and each column is one of the row.
    """
    if not use_triton(logits) or logits.dtype == torch.float64:
        return argmax_reference(logits)
    logits, (rows, width) = last_dim_contiguous(logits), logits.shape
    block = 1024 if logits.numel() <= 2**20 else 8192  # one row is spread over the whole GPU
    parts, overlap = cdiv(width, block), overlaps_launches(logits)
    best = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(2, rows, dtype=torch.int64, device=logits.device)
    launch(
        _parts_kernel, (parts, rows), best, ids, logits, logits.stride(0), parts, width, block, overlap,
        num_warps=4 if block == 1024 else 8, **overlapping(overlap),
    )  # fmt: skip
    launch(
        _rows_kernel, (rows,), out, best, ids, parts, rows, next_power_of_2(parts), overlap,
        num_warps=4, **overlapping(overlap),
    )  # fmt: skip
    return out
