"""Splits fp32 matrices into sums of bf16 matrices, so that matmuls run on tensor cores and stay as exact as in fp32.

An fp32 number is the sum a1 + a2 + a3 of bf16 numbers: each is the remainder so far, rounded to 8 bits. With x in bf16

    x b = x b1 + x b2 + x b3            a b = a1 b2 + a1 b3 + a1 b1 + a2 b1 + a3 b1 + a2 b2,

where the terms that are left out are 2^-24 of a b. A matmul of two `split` matrices is therefore one bf16 matmul with
fp32 sums and an inner dimension that is six times as long. `split` writes the six parts of a left or a right factor in
the order above. If only the right factor is split, parts 0 to 2 of the result are distinct, and their sum is x b.
"""

import torch
from torch import Tensor

from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import cdiv, tl, triton

PARTS = 6
_BLOCK = 1024


@triton.jit
def _split_kernel(out_ptr, x_ptr, N, INNER, LEFT: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr):
    """x [N / INNER, INNER] -> out [N / INNER, 6, INNER]. With SUM, x has the shape of out; parts 0 to 2 are summed."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < N
    at = i // INNER * (6 * INNER) + i % INNER
    if SUM:
        x = tl.load(x_ptr + at, mask=mask) + tl.load(x_ptr + at + INNER, mask=mask)
        x += tl.load(x_ptr + at + 2 * INNER, mask=mask)
    else:
        x = tl.load(x_ptr + i, mask=mask)
    first = x.to(tl.bfloat16)
    x -= first.to(tl.float32)
    second = x.to(tl.bfloat16)
    third = (x - second.to(tl.float32)).to(tl.bfloat16)
    tl.store(out_ptr + at, first if LEFT else second, mask=mask)
    tl.store(out_ptr + at + INNER, first if LEFT else third, mask=mask)
    tl.store(out_ptr + at + 2 * INNER, first, mask=mask)
    tl.store(out_ptr + at + 3 * INNER, second if LEFT else first, mask=mask)
    tl.store(out_ptr + at + 4 * INNER, third if LEFT else first, mask=mask)
    tl.store(out_ptr + at + 5 * INNER, second, mask=mask)


def split(x: Tensor, *, is_left: bool, rows: bool = False, summed: bool = False) -> Tensor:
    """The six parts of fp32 x [M, N] in bf16: [M, 6 N], the parts of an element side by side; with `rows` [6 M, N].

    is_left: in the order of a left factor. summed: x is a product [M, 6 N] with a right factor, and is summed first.
    """
    inner = x.shape[1] if rows else 1
    count = x.numel() // PARTS if summed else x.numel()
    shape = x.shape if summed else (PARTS * x.shape[0], x.shape[1]) if rows else (x.shape[0], PARTS * x.shape[1])
    x, out = x.contiguous(), x.new_empty(shape, dtype=torch.bfloat16)
    launch(_split_kernel, (cdiv(count, _BLOCK),), out, x, count, inner, is_left, summed, _BLOCK)
    return out


def gradient_of_rows(total: Tensor) -> Tensor:
    """[M, N], the gradient of a matrix split by rows, from the product [6 M, N] of a left factor's transpose."""
    return total.view(-1, PARTS, total.shape[1])[:, 2:5].sum(1)


def gradient_of_columns(total: Tensor) -> Tensor:
    """[M, N], the gradient of a matrix split by columns, from the product [M, 6 N] with a left factor."""
    return total.view(total.shape[0], -1, PARTS)[:, :, 2:5].sum(2)
