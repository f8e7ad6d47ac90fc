"""Gated linear unit on a packed projection, alone or together with the linear layer that reads it.

    h = act(gate_multiplier * gate) * up * down_multiplier           for rows [gate | up] of gate_up

What differs from a plain fused GLU:
- gate and up are the halves of one row, as one GEMM wrote it, and their gradients go back into one row, which
  one GEMM reads for dX. No half is ever copied out.
- `glu_linear` is down_proj(h) that keeps gate_up alone. Its backward computes dh = dy W, and one kernel reads
  (gate_up, dh), writes d_gate_up, and leaves h where dh was, for dW = dy^T h: a third of the saved activations
  of glu and a linear apart, for 2 bytes more per element.
- No buffer that autograd or the caller can see is overwritten, so a graph may be run twice.
- Tiles are 1024 elements of one row, or of several where rows are short; no row is padded to a power of two.

Bytes per element of h at 2-byte dtypes, which are the minimum: forward 6, backward 10 (12 where h is left).
Math in fp32 (fp64 for fp64), one rounding.

Source: Shazeer 2020, https://arxiv.org/abs/2002.05202; activations as torch.nn.functional's silu and gelu.
"""

import operator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ligermodels.errors import InputError
from ligermodels.kernels._triton import accumulator, device_guard, last_dim_contiguous, tl, triton, use_triton

ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "gelu": F.gelu}


def glu_reference(
    gate_up: Tensor, *, activation: str = "silu", gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> Tensor:
    gate, up = gate_up.to(accumulator(gate_up.dtype)).chunk(2, dim=-1)
    return (ACTIVATIONS[activation](gate * gate_multiplier) * up * down_multiplier).to(gate_up.dtype)


def glu_linear_reference(
    gate_up: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "silu"
) -> Tensor:
    return F.linear(glu_reference(gate_up, activation=activation), weight, bias)


@triton.jit
def _exp(x):
    # The hardware computes 2^(x log2 e), and rounding that exponent costs more the larger x is: take out x's multiple
    # of ln 2 first, in two parts of which the larger is exact.
    x = tl.minimum(tl.maximum(x, -150.0), 150.0)  # beyond, it is 0 or infinity anyhow
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    return tl.exp((x - n * 0.693359375) + n * 2.1219444005469057e-4) * tl.exp2(n)


@triton.jit
def _activation(x, NAME: tl.constexpr, EXACT: tl.constexpr):
    """act(x) and its derivative. EXACT: all bits of the result are kept, so that exp and division must be right."""
    if NAME == "gelu":
        cdf = 0.5 + 0.5 * tl.math.erf(x * 0.7071067811865476)
        return x * cdf, cdf + x * (0.3989422804014327 * tl.exp(-0.5 * x * x))
    else:
        # gelu_tanh(x) = x (1 + tanh u) / 2 = x sigmoid(2 u).
        z, dz = x, 1.0
        if NAME == "gelu_tanh":
            z = 1.5957691216057308 * (x + 0.044715 * x * x * x)
            dz = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        e = _exp(-z) if EXACT else tl.exp(-z)
        sigmoid = tl.div_rn(1.0, 1.0 + e) if EXACT else 1.0 / (1.0 + e)
        rest = 1.0 - sigmoid
        if NAME == "gelu_tanh":
            rest = tl.where(z > 0, e * sigmoid, rest)  # 1 - sigmoid cancels there, and dz makes much of it
        return x * sigmoid, sigmoid + (x * sigmoid) * rest * dz


@triton.jit
def _tile_at(n_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    rows = (tl.program_id(0) // BLOCKS).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)[None, :]
    return rows, cols, (rows < n_rows) & (cols < WIDTH)


@triton.jit(do_not_specialize=["n_rows"])
def _forward_kernel(
    h_ptr, gate_up_ptr, n_rows, stride, gate_multiplier: tl.constexpr, down_multiplier: tl.constexpr,
    NAME: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = gate_up_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    rows, cols, mask = _tile_at(n_rows, WIDTH, BLOCK, ROWS)
    gate = tl.load(gate_up_ptr + rows * stride + cols, mask=mask, other=0.0).to(ACC)
    up = tl.load(gate_up_ptr + rows * stride + cols + WIDTH, mask=mask, other=0.0).to(ACC)
    act, _ = _activation(gate * gate_multiplier, NAME, dtype == tl.float32)
    h = act * up * down_multiplier
    tl.store(h_ptr + rows * WIDTH + cols, h.to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _backward_kernel(
    d_gate_up_ptr, h_ptr, dh_ptr, gate_up_ptr, n_rows, dh_stride, stride,
    gate_multiplier: tl.constexpr, down_multiplier: tl.constexpr, EMIT: tl.constexpr,
    NAME: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """d_gate_up from dh; with EMIT also h, which may lie where dh does: each program touches its own tile only."""
    dtype: tl.constexpr = gate_up_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    rows, cols, mask = _tile_at(n_rows, WIDTH, BLOCK, ROWS)
    gate = tl.load(gate_up_ptr + rows * stride + cols, mask=mask, other=0.0).to(ACC)
    up = tl.load(gate_up_ptr + rows * stride + cols + WIDTH, mask=mask, other=0.0).to(ACC)
    dh = tl.load(dh_ptr + rows * dh_stride + cols, mask=mask, other=0.0).to(ACC) * down_multiplier
    act, slope = _activation(gate * gate_multiplier, NAME, dtype == tl.float32)
    d_gate = dh * up * (slope * gate_multiplier)
    target = d_gate_up_ptr + rows * (2 * WIDTH) + cols
    tl.store(target, d_gate.to(d_gate_up_ptr.dtype.element_ty), mask=mask)
    tl.store(target + WIDTH, (dh * act).to(d_gate_up_ptr.dtype.element_ty), mask=mask)
    if EMIT:
        h = act * up * down_multiplier
        tl.store(h_ptr + rows * dh_stride + cols, h.to(h_ptr.dtype.element_ty), mask=mask)


def _tile(width: int) -> tuple[int, int]:
    """Columns and rows of a tile of 1024: the widest that leaves at most a sixteenth of its lanes idle."""
    block = 1024
    while block > 128 and triton.cdiv(width, block) * block * 16 > width * 17:
        block //= 2
    block = min(block, triton.next_power_of_2(width))
    return block, 1024 // block


def _forward(
    gate_up: Tensor, dtype: torch.dtype, activation: str, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> Tensor:
    n_rows, width = gate_up.shape[0], operator.index(gate_up.shape[1]) // 2
    gate_up = last_dim_contiguous(gate_up)
    h = torch.empty((n_rows, width), dtype=dtype, device=gate_up.device)
    if n_rows:
        block, rows = _tile(width)
        with device_guard(gate_up):
            _forward_kernel[(triton.cdiv(n_rows, rows) * triton.cdiv(width, block),)](
                h, gate_up, n_rows, gate_up.stride(0), gate_multiplier, down_multiplier,
                activation, width, block, rows, num_warps=4,
            )  # fmt: skip
    return h


def _backward(
    dh: Tensor, gate_up: Tensor, activation: str, gate_multiplier: float = 1.0, down_multiplier: float = 1.0,
    *, emit: bool = False,
) -> Tensor:  # fmt: skip
    """d_gate_up; with emit, for a dh [T, F] that the caller owns and gives up, h is left in its place."""
    n_rows, width = dh.shape[0], operator.index(dh.shape[1])
    gate_up, dh = last_dim_contiguous(gate_up), last_dim_contiguous(dh)
    d_gate_up = torch.empty((n_rows, 2 * width), dtype=gate_up.dtype, device=gate_up.device)
    if n_rows:
        block, rows = _tile(width)
        with device_guard(gate_up):
            _backward_kernel[(triton.cdiv(n_rows, rows) * triton.cdiv(width, block),)](
                d_gate_up, dh, dh, gate_up, n_rows, dh.stride(0), gate_up.stride(0),
                gate_multiplier, down_multiplier, emit, activation, width, block, rows, num_warps=4,
            )  # fmt: skip
    return d_gate_up


class _GLU(torch.autograd.Function):
    """gate_up: [..., 2F] -> h [..., F]. Rows are flattened in here, where it makes no node of the graph."""

    @staticmethod
    def forward(ctx, gate_up, activation, gate_multiplier, down_multiplier):
        ctx.save_for_backward(gate_up)
        ctx.options = activation, gate_multiplier, down_multiplier
        h = _forward(_rows(gate_up), gate_up.dtype, *ctx.options)
        return h.view(*gate_up.shape[:-1], h.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, dh):
        (gate_up,) = ctx.saved_tensors
        return _backward(_rows(dh), _rows(gate_up), *ctx.options).view(gate_up.shape), None, None, None


class _GLULinear(torch.autograd.Function):
    """gate_up: [..., 2F], weight: [N, F], bias: [N] or None -> [..., N]. Keeps gate_up, never h."""

    @staticmethod
    def forward(ctx, gate_up, weight, bias, activation):
        ctx.save_for_backward(gate_up, weight)
        ctx.activation = activation
        h = _forward(_rows(gate_up), weight.dtype, activation)
        return F.linear(h, weight, bias).view(*gate_up.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        gate_up, weight = ctx.saved_tensors
        need_gate_up, need_weight, need_bias, _ = ctx.needs_input_grad
        shape, gate_up, dy = gate_up.shape, _rows(gate_up), _rows(dy)
        d_gate_up = h = None
        if need_gate_up:
            h = dy @ weight  # dh, until the kernel leaves h in its place
            d_gate_up = _backward(h, gate_up, ctx.activation, emit=need_weight).view(shape)
        elif need_weight:
            h = _forward(gate_up, weight.dtype, ctx.activation)
        del gate_up  # under activation checkpointing, the last that holds its memory
        return d_gate_up, dy.t() @ h if need_weight else None, dy.sum(0) if need_bias else None, None


def _check(gate_up: Tensor, activation: str, where: str) -> None:
    if activation not in ACTIVATIONS:
        raise InputError(f"{where}: activation={activation!r}; supported are {', '.join(map(repr, ACTIVATIONS))}.")
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2 or gate_up.shape[-1] == 0 or not gate_up.is_floating_point():
        raise InputError(
            f"{where}: gate_up has shape {tuple(gate_up.shape)} and dtype {gate_up.dtype}; expected floating point "
            "[..., 2F], the halves [gate | up] of one projection."
        )
    operator.index(gate_up.shape[-1])  # a constexpr of the kernels, which Dynamo must take for a constant from here on


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def glu(
    gate_up: Tensor, *, activation: str = "silu", gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> Tensor:
    """act(gate_multiplier * gate) * up * down_multiplier.

    gate_up: [..., 2F], gate in the first half of the last dim, up in the second.
    activation: "silu", "gelu_tanh" (the tanh approximation) or "gelu" (exact, by erf).
    Returns [..., F] of gate_up's dtype.
    Raises InputError for an odd width or an unknown activation.
    """
    _check(gate_up, activation, "glu")
    if not use_triton(gate_up):
        return glu_reference(
            gate_up, activation=activation, gate_multiplier=gate_multiplier, down_multiplier=down_multiplier
        )
    return _GLU.apply(gate_up, activation, float(gate_multiplier), float(down_multiplier))


def glu_linear(gate_up: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "silu") -> Tensor:
    """F.linear(glu(gate_up), weight, bias) that keeps gate_up for the backward and makes h anew there.

    gate_up: [..., 2F]; weight: [N, F]; bias: [N] or None; activation: as in `glu`.
    Returns [..., N] of the weight's dtype; under torch.autocast of the autocast dtype, to which weight and bias are
    cast as F.linear would cast them.
    Raises InputError for shapes, dtypes or devices that do not fit.
    """
    _check(gate_up, activation, "glu_linear")
    if weight.dim() != 2 or 2 * weight.shape[1] != gate_up.shape[-1] or weight.device != gate_up.device:
        raise InputError(
            f"glu_linear: weight {tuple(weight.shape)} on {weight.device} does not take the halves of gate_up "
            f"{tuple(gate_up.shape)} on {gate_up.device}; expected [N, {gate_up.shape[-1] // 2}] there. "
            "Are gate_up and down_proj of one intermediate_size?"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.device != weight.device):
        raise InputError(
            f"glu_linear: bias {tuple(bias.shape)} on {bias.device}; expected ({weight.shape[0]},) on {weight.device}."
        )
    device_type = gate_up.device.type
    autocast = torch.is_autocast_enabled(device_type) and gate_up.dtype != torch.float64
    dtypes = {t.dtype for t in (gate_up, weight, bias) if t is not None}
    if not autocast and len(dtypes) > 1:
        raise InputError(
            f"glu_linear: gate_up is {gate_up.dtype}, weight {weight.dtype}, bias "
            f"{None if bias is None else bias.dtype}; outside torch.autocast they must be one dtype."
        )
    if not use_triton(gate_up):
        return glu_linear_reference(gate_up, weight, bias, activation=activation)
    if autocast:
        dtype = torch.get_autocast_dtype(device_type)
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    return _GLULinear.apply(gate_up, weight, bias, activation)
