"""fp32 matrices as sums of bf16 ones, whose products run on tensor cores and are as exact as those in fp32.

An fp32 number is a1 + a2 + a3, each in bf16: what the ones before it leave, rounded to 8 bits. With x in bf16

    x b = x b1 + x b2 + x b3            a b = a1 b2 + a1 b3 + a1 b1 + a2 b1 + a3 b1 + a2 b2,

where the products that are left out are 2^-24 of a b. So a product with `split` matrices is one matmul in bf16 that
sums in fp32, over an inner dimension that is six times as long. `split` writes the six parts of a left or of a right
factor in the order above; a product with one such matrix alone has three distinct parts among six, which are summed.
"""

import torch
from torch import Tensor

from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import cdiv, tl, triton

PARTS = 6
_BLOCK = 1024


@triton.jit
def _split_kernel(out_ptr, x_ptr, N, INNER, LEFT: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr):
    """x [N / INNER, INNER], or with SUM [N / INNER, 6, INNER], of which parts 0 to 2 are summed; out as the latter."""
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


def split(x: Tensor, *, left: bool, rows: bool = False, summed: bool = False) -> Tensor:
    """The parts of fp32 x [M, N]: bf16 [M, 6 N], those of an element side by side; with `rows` [6 M, N].

    left: in the order of a left factor. summed: x is a product [M, 6 N] with a right factor, whose parts are summed.
    """
    inner = x.shape[1] if rows else 1
    count = x.numel() // PARTS if summed else x.numel()
    shape = x.shape if summed else (PARTS * x.shape[0], x.shape[1]) if rows else (x.shape[0], PARTS * x.shape[1])
    x, out = x.contiguous(), x.new_empty(shape, dtype=torch.bfloat16)
    launch(_split_kernel, (cdiv(count, _BLOCK),), out, x, count, inner, left, summed, _BLOCK)
    return out


def gradient_of_rows(total: Tensor) -> Tensor:
    """[M, N] from the product [6 M, N] of a left factor's transpose."""
    return total.view(-1, PARTS, total.shape[1])[:, 2:5].sum(1)


def gradient_of_columns(total: Tensor) -> Tensor:
    """[M, N] from the product [M, 6 N] with a left factor."""
    return total.view(total.shape[0], -1, PARTS)[:, :, 2:5].sum(2)
