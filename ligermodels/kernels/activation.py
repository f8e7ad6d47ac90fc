"""Activations that stand alone between two linear layers, or together with the linear layer that reads them.

    quick_gelu(x) = x * sigmoid(1.702 x)      gelu(x) = x * (1 + erf(x / sqrt(2))) / 2      gelu_tanh: by tanh instead

What differs from an activation of torch: `activation_linear` is fc2(act(x)) that keeps x alone. Its backward computes
dh = dy W, and one kernel reads (x, dh), writes dx, and leaves act(x) where dh was, for dW = dy^T act(x): half of the
saved activations of the two apart, for 2 bytes more per element. It is `glu_linear` without a gate, and so are its
kernels and what else is said there.

Bytes per element at 2-byte dtypes, which are the minimum: forward 4, backward 6 (8 where act(x) is left).
Math in fp32 (fp64 for fp64), one rounding.

Source: Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415; gelu as torch.nn.functional has it, quick_gelu
as OpenAI's CLIP.
"""

import operator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ligermodels.errors import InputError
from ligermodels.kernels._triton import accumulator, device_guard, last_dim_contiguous, tl, triton, use_triton
from ligermodels.kernels.glu import _activation, _exp, _rows, _tile, _tile_at

ACTIVATIONS = {
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def activate_reference(x: Tensor, *, activation: str) -> Tensor:
    return ACTIVATIONS[activation](x.to(accumulator(x.dtype))).to(x.dtype)


def activation_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str) -> Tensor:
    return F.linear(activate_reference(x, activation=activation), weight, bias)


@triton.jit
def _act(x, NAME: tl.constexpr, EXACT: tl.constexpr):
    """act(x) and its derivative, as in `glu`."""
    if NAME == "quick_gelu":
        z = 1.702 * x
        e = _exp(-z) if EXACT else tl.exp(-z)
        sigmoid = tl.div_rn(1.0, 1.0 + e) if EXACT else 1.0 / (1.0 + e)
        rest = tl.where(z > 0, e * sigmoid, 1.0 - sigmoid)  # each cancels, or overflows, at the other's end
        return x * sigmoid, sigmoid + z * sigmoid * rest
    else:
        return _activation(x, NAME, EXACT)


@triton.jit(do_not_specialize=["n_rows"])
def _forward_kernel(
    h_ptr, x_ptr, n_rows, stride, NAME: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    rows, cols, mask = _tile_at(n_rows, WIDTH, BLOCK, ROWS)
    x = tl.load(x_ptr + rows * stride + cols, mask=mask, other=0.0).to(ACC)
    h, _ = _act(x, NAME, dtype == tl.float32)
    tl.store(h_ptr + rows * WIDTH + cols, h.to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _backward_kernel(
    dx_ptr, h_ptr, dh_ptr, x_ptr, n_rows, dh_stride, stride, EMIT: tl.constexpr,
    NAME: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dx from dh; with EMIT also h, which may lie where dh does: each program touches its own tile only."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    rows, cols, mask = _tile_at(n_rows, WIDTH, BLOCK, ROWS)
    x = tl.load(x_ptr + rows * stride + cols, mask=mask, other=0.0).to(ACC)
    dh = tl.load(dh_ptr + rows * dh_stride + cols, mask=mask, other=0.0).to(ACC)
    h, slope = _act(x, NAME, dtype == tl.float32)
    tl.store(dx_ptr + rows * WIDTH + cols, (dh * slope).to(dx_ptr.dtype.element_ty), mask=mask)
    if EMIT:
        tl.store(h_ptr + rows * dh_stride + cols, h.to(h_ptr.dtype.element_ty), mask=mask)


def _forward(x: Tensor, dtype: torch.dtype, activation: str) -> Tensor:
    n_rows, width = x.shape[0], operator.index(x.shape[1])
    x = last_dim_contiguous(x)
    h = torch.empty((n_rows, width), dtype=dtype, device=x.device)
    if n_rows:
        block, rows = _tile(width)
        with device_guard(x):
            _forward_kernel[(triton.cdiv(n_rows, rows) * triton.cdiv(width, block),)](
                h, x, n_rows, x.stride(0), activation, width, block, rows, num_warps=4
            )
    return h


def _backward(dh: Tensor, x: Tensor, activation: str, *, emit: bool = False) -> Tensor:
    """dx; with emit, for a dh [T, F] that the caller owns and gives up, act(x) is left in its place."""
    n_rows, width = dh.shape[0], operator.index(dh.shape[1])
    x, dh = last_dim_contiguous(x), last_dim_contiguous(dh)
    dx = torch.empty((n_rows, width), dtype=x.dtype, device=x.device)
    if n_rows:
        block, rows = _tile(width)
        with device_guard(x):
            _backward_kernel[(triton.cdiv(n_rows, rows) * triton.cdiv(width, block),)](
                dx, dh, dh, x, n_rows, dh.stride(0), x.stride(0), emit, activation, width, block, rows, num_warps=4
            )
    return dx


class _Activate(torch.autograd.Function):
    """x: [..., F] -> [..., F]. Rows are flattened in here, where it makes no node of the graph."""

    @staticmethod
    def forward(ctx, x, activation):
        ctx.save_for_backward(x)
        ctx.activation = activation
        return _forward(_rows(x), x.dtype, activation).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dh):
        (x,) = ctx.saved_tensors
        return _backward(_rows(dh), _rows(x), ctx.activation).view(x.shape), None


class _ActivationLinear(torch.autograd.Function):
    """x: [..., F], weight: [N, F], bias: [N] or None -> [..., N]. Keeps x, never act(x)."""

    @staticmethod
    def forward(ctx, x, weight, bias, activation):
        ctx.save_for_backward(x, weight)
        ctx.activation = activation
        h = _forward(_rows(x), weight.dtype, activation)
        return F.linear(h, weight, bias).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        shape, x, dy = x.shape, _rows(x), _rows(dy)
        dx = h = None
        if need_x:
            h = dy @ weight  # dh, until the kernel leaves act(x) in its place
            dx = _backward(h, x, ctx.activation, emit=need_weight).view(shape)
        elif need_weight:
            h = _forward(x, weight.dtype, ctx.activation)
        del x  # under activation checkpointing, the last that holds its memory
        return dx, dy.t() @ h if need_weight else None, dy.sum(0) if need_bias else None, None


def _check(x: Tensor, activation: str, where: str) -> None:
    if activation not in ACTIVATIONS:
        raise InputError(f"{where}: activation={activation!r}; supported are {', '.join(map(repr, ACTIVATIONS))}.")
    if x.dim() == 0 or x.shape[-1] == 0 or not x.is_floating_point():
        raise InputError(
            f"{where}: x has shape {tuple(x.shape)} and dtype {x.dtype}; expected floating point [..., F], F >= 1."
        )
    operator.index(x.shape[-1])  # a constexpr of the kernels, which Dynamo must take for a constant from here on


def activate(x: Tensor, *, activation: str) -> Tensor:
    """act(x), element by element.

    x: [..., F]; activation: "quick_gelu" (x * sigmoid(1.702 x)), "gelu" (exact, by erf) or "gelu_tanh" (the tanh
    approximation).
    Returns [..., F] of x's dtype.
    Raises InputError for an unknown activation, or an x without columns or of integers.
    """
    _check(x, activation, "activate")
    if not use_triton(x):
        return activate_reference(x, activation=activation)
    return _Activate.apply(x, activation)


def activation_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str) -> Tensor:
    """F.linear(activate(x), weight, bias) that keeps x for the backward and makes act(x) anew there.

    x: [..., F]; weight: [N, F]; bias: [N] or None; activation: as in `activate`.
    Returns [..., N] of the weight's dtype; under torch.autocast of the autocast dtype, to which weight and bias are
    cast as F.linear would cast them.
    Raises InputError for shapes, dtypes or devices that do not fit.
    """
    _check(x, activation, "activation_linear")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or weight.device != x.device:
        raise InputError(
            f"activation_linear: weight {tuple(weight.shape)} on {weight.device} does not take x {tuple(x.shape)} on "
            f"{x.device}; expected [N, {x.shape[-1]}] there. Are fc1 and fc2 of one intermediate_size?"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.device != weight.device):
        raise InputError(
            f"activation_linear: bias {tuple(bias.shape)} on {bias.device}; expected ({weight.shape[0]},) on "
            f"{weight.device}."
        )
    device_type = x.device.type
    autocast = torch.is_autocast_enabled(device_type) and x.dtype != torch.float64
    if not autocast and len({t.dtype for t in (x, weight, bias) if t is not None}) > 1:
        raise InputError(
            f"activation_linear: x is {x.dtype}, weight {weight.dtype}, bias {None if bias is None else bias.dtype}; "
            "outside torch.autocast they must be one dtype."
        )
    if not use_triton(x):
        return activation_linear_reference(x, weight, bias, activation=activation)
    if autocast:
        dtype = torch.get_autocast_dtype(device_type)
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    return _ActivationLinear.apply(x, weight, bias, activation)
