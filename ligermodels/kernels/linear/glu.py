"""Gated linear unit, alone or as a part of an MLP.

    h = act(gate) * up           for rows [gate | up] of gate_up, or gate and up as two tensors

What differs from a plain fused GLU:
- gate and up may be the halves of the rows that one GEMM wrote, and their gradients go into the halves of the rows that
  one GEMM reads for dX. No half is copied.
- The backward of an MLP (gated_mlp.py) saves gate and up, not h. It computes dh = dy W; then one kernel reads
  (gate_up, dh), writes d_gate_up, and overwrites dh with h for dW = dy^T h. This saves a third of the activations of
  separate ops, for 2 bytes more per element.
- Tiles are 1024 elements of one row, or of several short rows; no row is padded to a power of two.

`GLU` and `GLULinear` also serve activations without a gate (activation.py).

Bytes per element of h at 2-byte dtypes, the minimum: forward 6, backward 10 (12 where h is written).
Math in fp32 (fp64 for fp64), one rounding.

Source: Shazeer 2020, https://arxiv.org/abs/2002.05202; activations as torch.nn.functional's silu and gelu.
"""

import operator
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._check import describe
from ligermodels.kernels._gradients import weight_gradient
from ligermodels.kernels._launch import launch
from ligermodels.kernels._math import (
    Activation,
    activation,
    activation_name,
    head_rows,
    tile,
    tile_at,
    unit,
    unit_reference,
)
from ligermodels.kernels._triton import (
    FEW_ROWS,
    accumulator,
    as_heads,
    as_rows,
    cdiv,
    heads_of,
    once_differentiable,
    overlapping,
    overlaps_launches,
    tl,
    triton,
    use_triton,
    wait_for_previous,
)


def glu_reference(gate_up: Tensor, up: Tensor | None = None, *, activation: Activation = "silu") -> Tensor:
    gate, up = (t.to(accumulator(t.dtype)) for t in (gate_up.chunk(2, dim=-1) if up is None else (gate_up, up)))
    return unit_reference(gate.contiguous(), up, activation).to(gate_up.dtype)


@triton.jit(do_not_specialize=["n_rows"])
def _forward_kernel(
    h_ptr, gate_ptr, up_ptr, n_rows, gate_t, gate_h, up_stride, HEADS: tl.constexpr, UP_AT: tl.constexpr,
    NAME: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    rows, cols, _, mask = tile_at(n_rows, WIDTH, BLOCK, ROWS)
    gate = tl.load(gate_ptr + head_rows(rows, gate_t, gate_h, HEADS) + cols, mask=mask, other=0.0).to(ACC)
    if up_ptr is not None:
        up = tl.load(up_ptr + rows * up_stride + cols + UP_AT, mask=mask, other=0.0).to(ACC)
        h, _, _ = unit(gate, up, NAME, dtype == tl.float32)
    else:
        h, _ = activation(gate, NAME, dtype == tl.float32)
    tl.store(h_ptr + rows * WIDTH + cols, h.to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _backward_kernel(
    d_gate_ptr, d_up_ptr, dh_ptr, gate_ptr, up_ptr, n_rows, dh_stride, gate_t, gate_h, up_stride,
    EMIT: tl.constexpr, HEADS: tl.constexpr, UP_AT: tl.constexpr, NAME: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes the gradients whose pointer is not None; EMIT: overwrites dh with h. A program touches only its own tile.

    Joint rows, whose up halves begin at UP_AT, have one pointer for both halves: torch.compile loses what is written
    through the first of two pointers to the same memory.
    """
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    rows, cols, _, mask = tile_at(n_rows, WIDTH, BLOCK, ROWS)
    gate = tl.load(gate_ptr + head_rows(rows, gate_t, gate_h, HEADS) + cols, mask=mask, other=0.0).to(ACC)
    dh = tl.load(dh_ptr + rows * dh_stride + cols, mask=mask, other=0.0).to(ACC)
    if up_ptr is not None:
        up = tl.load(up_ptr + rows * up_stride + cols + UP_AT, mask=mask, other=0.0).to(ACC)
    # The barrier: threads store other columns than they load, so that one warp could overwrite what another has yet to
    # load. No data dependency prevents it, since h does not depend on the dh it overwrites, nor d_up on up.
    tl.debug_barrier()
    target = rows * (WIDTH + UP_AT) + cols
    if up_ptr is not None:
        h, slope, act = unit(gate, up, NAME, dtype == tl.float32)
        if UP_AT:
            tl.store(d_gate_ptr + target + UP_AT, (dh * act).to(dtype), mask=mask)
        elif d_up_ptr is not None:
            tl.store(d_up_ptr + target, (dh * act).to(dtype), mask=mask)
    else:
        h, slope = activation(gate, NAME, dtype == tl.float32)
    if d_gate_ptr is not None:
        tl.store(d_gate_ptr + target, (dh * slope).to(dtype), mask=mask)
    if EMIT:
        tl.store(dh_ptr + rows * dh_stride + cols, h.to(dh_ptr.dtype.element_ty), mask=mask)


def _inputs(
    x: Tensor, up: Tensor | None, joint: bool
) -> tuple[Tensor, Tensor | None, int, Sequence[int], tuple[int, int]]:
    """(gate, up, number of rows, strides of gate's tokens and heads and of up, heads and offset of up in its row)."""
    if joint:
        x, n_rows, stride = as_rows(x)
        return x, x, n_rows, (stride, 0, stride), (1, operator.index(x.shape[-1]) // 2)
    heads = heads_of(x)
    x, n_rows, *strides = as_heads(x, heads)
    up, _, up_stride = (None, 0, 0) if up is None else as_rows(up)
    return x, up, n_rows, (*strides, up_stride), (heads, 0)


def glu_forward(
    x: Tensor, up: Tensor | None, joint: bool, activation: str, *, dtype: torch.dtype | None = None
) -> Tensor:
    """act(x) * up; joint: x is [gate | up]; act(x) where there is no up."""
    width = operator.index(x.shape[-1]) // (2 if joint else 1)
    h = x.new_empty((*x.shape[:-1], width), dtype=dtype)
    gate, up, n_rows, strides, layout = _inputs(x, up, joint)
    if n_rows:
        block, rows, blocks = tile(width)
        overlap = n_rows <= FEW_ROWS and overlaps_launches(x)
        launch(
            _forward_kernel, (cdiv(n_rows, rows) * blocks,), h, gate, up, n_rows, *strides,
            *layout, activation, width, block, rows, overlap, num_warps=4, **overlapping(overlap),
        )  # fmt: skip
    return h


def glu_backward(
    dh: Tensor, x: Tensor, up: Tensor | None, joint: bool, activation: str, *, need_x: bool = True,
    need_up: bool = False, emit: bool = False, overwrite: bool = False,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """(dx, d_up). emit: overwrites dh [T, F] with h. overwrite: writes dx over x, which is contiguous and not read
    again."""
    width = operator.index(dh.shape[-1])
    dx = x if overwrite else torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else None
    d_up = torch.empty_like(up, memory_format=torch.contiguous_format) if need_up and up is not None else None
    gate, up, n_rows, strides, layout = _inputs(x, up, joint)
    dh, _, dh_stride = as_rows(dh)
    if n_rows:
        block, rows, blocks = tile(width)
        launch(
            _backward_kernel, (cdiv(n_rows, rows) * blocks,), dx, d_up, dh, gate, up,
            n_rows, dh_stride, *strides, emit, *layout, activation,
            width, block, rows, num_warps=4,
        )  # fmt: skip
    return dx, d_up


class GLU(torch.autograd.Function):
    """x: [..., F], or [..., 2F] if joint; up: [..., F] or None -> h [..., F]."""

    @staticmethod
    def forward(ctx, x, up, *options):
        ctx.save_for_backward(x, up)
        ctx.options = options
        return glu_forward(x, up, *options)

    @staticmethod
    @once_differentiable
    def backward(ctx, dh):
        need_x, need_up = ctx.needs_input_grad[:2]
        grads = glu_backward(dh, *ctx.saved_tensors, *ctx.options, need_x=need_x, need_up=need_up)
        return *grads, *[None] * len(ctx.options)


class GLULinear(torch.autograd.Function):
    """x: [..., F], or [..., 2F] if joint; up: [..., F] or None; weight: [N, F]; bias: [N] or None -> [..., N].

    F.linear(act(x) * up) that saves x and up, and recomputes h in the backward; for torch.compile (gated_mlp.py).
    """

    @staticmethod
    def forward(ctx, x, up, weight, bias, joint, activation):
        ctx.save_for_backward(x, up, weight)
        ctx.options = joint, activation
        return F.linear(glu_forward(x, up, joint, activation, dtype=weight.dtype), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, up, weight = ctx.saved_tensors
        need_x, need_up, need_weight, need_bias, *_ = ctx.needs_input_grad
        dy, dx, d_up, d_weight = dy.reshape(-1, dy.shape[-1]), None, None, None
        if need_x or need_up:
            h = dy @ weight  # dh, which the kernel overwrites with h
            dx, d_up = glu_backward(h, x, up, *ctx.options, need_x=need_x, need_up=need_up, emit=need_weight)
        elif need_weight:
            h = glu_forward(x, up, *ctx.options, dtype=weight.dtype).view(-1, weight.shape[1])
        if need_weight:
            d_weight = weight_gradient(weight, dy, h)
        return dx, d_up, d_weight, dy.sum(0) if need_bias else None, None, None


def check_glu(where: str, name: str, x: Tensor, *, joint: bool = False) -> int:
    """Checks x, and returns F, as an int because it is a constexpr of the kernels."""
    width = x.shape[-1] if x.dim() else 0
    if width == 0 or (joint and width % 2) or not x.is_floating_point():
        expected = "[..., 2F], the halves [gate | up] of one projection" if joint else "[..., F], F >= 1"
        raise InputError(f"{where}: {name} has {describe(x)}; expected floating point {expected}.")
    return operator.index(width) // (2 if joint else 1)


def glu(gate_up: Tensor, up: Tensor | None = None, *, activation: Activation = "silu") -> Tensor:
    """act(gate) * up.

    gate_up: [..., 2F], rows [gate | up]; or the gate [..., F] beside an up of its shape and dtype. Any strides; copied
    where the last dim is not contiguous.
    activation: "silu", "gelu_tanh" (the tanh approximation), "gelu" (exact, by erf), "quick_gelu" or "sigmoid"; or
    `ClampedSwiGLU(alpha, limit)`, gpt-oss' (up + 1) * gate * sigmoid(alpha * gate) of a clamped gate and up.
    Returns [..., F] of gate_up's dtype.
    Raises InputError for an odd width, a gate and an up that differ, or an unknown activation.
    """
    activation = activation_name("glu", activation, gated=True)
    check_glu("glu", "gate_up", gate_up, joint=up is None)
    if up is not None and (up.shape != gate_up.shape or up.dtype != gate_up.dtype or up.device != gate_up.device):
        raise InputError(
            f"glu: gate_up has {describe(gate_up)}, up has {describe(up)}; beside an up, gate_up is the gate, of its "
            "shape, dtype and device."
        )
    if not use_triton(gate_up):
        return glu_reference(gate_up, up, activation=activation)
    return GLU.apply(gate_up, up, up is None, activation)
