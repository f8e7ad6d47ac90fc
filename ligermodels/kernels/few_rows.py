"""Linear layers of at most four rows, as in decoding: products that read the weights at the memory's speed.

    few_rows_linear:  y = x W^T + b          few_rows_glu:  h = act(x Wg^T + bg) * (x Wu^T + bu), in one launch

A program multiplies a few rows of the weights with all rows of x, element by element in fp32, and sums at the end: with
so few rows tensor cores save nothing, and what decides is how many loads of 16 bytes are in flight. On an H200 one row
takes 55 us for [28672, 4096] in bf16 (4.26 TB/s; cuBLAS 64) and 9.5 us for [4096, 4096] (cuBLAS 13.6).

On Hopper and later the launch overlaps the end of the kernel before it (programmatic dependent launch): a kernel may be
scheduled once all programs of the one before run, and waits for their results before it reads anything. In a decoding
step that is 3 to 9 %.

Bytes: each weight once; x is read by every program from the cache. Without autograd.
"""

# Triton's compiler knows no (*sums, sum), and mypy no tuple that grows:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels._launch import launch
from ligermodels.kernels._math import activation
from ligermodels.kernels._triton import cdiv, overlaps_launches, tl, triton, use_triton, wait_for_previous
from ligermodels.kernels.glu import glu_reference

MOST = 4
"""Rows beyond which cuBLAS is as fast."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def few_rows_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


def few_rows_glu_reference(
    x: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None = None, up_bias: Tensor | None = None, *,
    activation: str,
) -> Tensor:  # fmt: skip
    z = torch.cat([F.linear(x, gate, gate_bias), F.linear(x, up, up_bias)], -1)
    return glu_reference(z, activation=activation)


@triton.jit
def _kernel(
    y_ptr, x_ptr, w_ptr, up_ptr, b_ptr, up_b_ptr, N, K, w_stride, up_stride,
    ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, NAME: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """BN columns of y [ROWS, N] = x [ROWS, K] w^T + b; with up, of act(y) * (x up^T + up_b). EVEN: BK divides K."""
    wait_for_previous(OVERLAP)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    mask = columns < N
    cols = tl.arange(0, BK)
    row = tl.minimum(columns, N - 1).to(tl.int64)[:, None]
    w_ptr += row * w_stride + cols[None, :]
    if up_ptr is not None:
        up_ptr += row * up_stride + cols[None, :]
    sums = ()
    for _ in tl.static_range(ROWS if up_ptr is None else 2 * ROWS):
        sums = sums + (tl.zeros((BN, BK), tl.float32),)
    for k in range(0, K, BK):
        inside = cols + k < K
        w = _load(w_ptr + k, inside[None, :], EVEN)
        up = w if up_ptr is None else _load(up_ptr + k, inside[None, :], EVEN)
        added = ()
        for i in tl.static_range(ROWS):
            x = _load(x_ptr + i * K + k + cols, inside, EVEN)[None, :]
            added = added + (sums[i] + w * x,)
        if up_ptr is not None:
            for i in tl.static_range(ROWS):
                x = _load(x_ptr + i * K + k + cols, inside, EVEN)[None, :]
                added = added + (sums[ROWS + i] + up * x,)
        sums = added
    for i in tl.static_range(ROWS):
        y = _with_bias(tl.sum(sums[i], 1), b_ptr, columns, mask)
        if up_ptr is not None:
            y, _ = activation(y, NAME, y_ptr.dtype.element_ty == tl.float32)
            y = y * _with_bias(tl.sum(sums[ROWS + i], 1), up_b_ptr, columns, mask)
        tl.store(y_ptr + i * N + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load(ptr, mask, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(ptr).to(tl.float32)
    else:
        return tl.load(ptr, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _with_bias(y, b_ptr, columns, mask):
    if b_ptr is not None:
        y += tl.load(b_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    return y


def takes(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """True if the kernels here run the linear layers of `weights` [N, K] on x [..., K] where no gradient is wanted."""
    if x.numel() > MOST * x.shape[-1] or not x.numel() or torch.compiler.is_compiling() or not use_triton(x):
        return False
    if x.dtype not in _DTYPES or torch.is_autocast_enabled(x.device.type):
        return False
    if torch.is_grad_enabled() and (x.requires_grad or any(w.requires_grad for w in weights)):
        return False
    return all(w.dtype == x.dtype and w.device == x.device and w.stride(-1) == 1 for w in weights)


def _run(
    x: Tensor, w: Tensor, up: Tensor | None, b: Tensor | None, up_b: Tensor | None, activation: str,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    (n, k), rows = w.shape, x.numel() // x.shape[-1]
    y = x.new_empty(*x.shape[:-1], n) if out is None else out
    bn, bk, warps = _tile(rows, k, up is not None)
    overlap, up_stride = overlaps_launches(x), 0 if up is None else up.stride(0)
    launch(
        _kernel, (cdiv(n, bn),), y, x.contiguous(), w, up, b, up_b, n, k, w.stride(0), up_stride,
        rows, bn, bk, k % bk == 0, activation, overlap, num_warps=warps, **(dict(launch_pdl=True) if overlap else {}),
    )  # fmt: skip
    return y


def _tile(rows: int, k: int, gated: bool) -> tuple[int, int, int]:
    """Columns of y, elements of K, and warps of a program."""
    bk = next((size for size in (2048, 1024, 512) if k % size == 0), 1024)
    if rows > 1:
        bk = min(bk, 1024)
    return (2 if gated else 4), bk, 4 if rows > 1 else max(1, bk // 512)


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear(x, weight, bias): [..., N] of x [..., K] with at most `MOST` rows, weight [N, K] and bias [N] or None.

    The caller has asked `takes`; it computes no gradients.
    """
    return _run(x, weight, None, bias, None, "")


def few_rows_glu(
    x: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None = None, up_bias: Tensor | None = None, *,
    activation: str,
) -> Tensor:  # fmt: skip
    """act(F.linear(x, gate, gate_bias)) * F.linear(x, up, up_bias): [..., F] of x [..., K] with at most `MOST` rows.

    gate, up: [F, K]; biases: [F] or None. Gate and up are not rounded in between. The caller has asked `takes`.
    """
    return _run(x, gate, up, gate_bias, up_bias, activation)
