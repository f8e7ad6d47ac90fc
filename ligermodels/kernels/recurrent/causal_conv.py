"""Short causal convolution over tokens, one filter per channel, with its activation.

    y[t] = act(bias + sum over j < W of weight[j] x[t - (W - 1) + j])          for each channel

- Packed sequences: a document does not see the tokens before it.
- `state` holds the W - 1 inputs before the first token, so that a sequence can be continued.
- A program walks along the tokens of a span, with the last W inputs in registers: each is loaded once.
- The backward saves x, not the sums, and computes each sum once more; the gradients of the last W are in registers too.
  The weight's gradient is summed in a fixed order, without atomics.

Bytes per element at 2-byte dtypes, the minimum: forward 4, backward 6.

Source: torch.nn.functional.conv1d with groups = channels and W - 1 zeros on the left.
"""

# Triton's compiler has no (*tiles, tile), and mypy no tuple that grows:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

import itertools
import operator

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._check import check_bounds, check_operand, describe
from ligermodels.kernels._gradients import sum_parts_kernel
from ligermodels.kernels._launch import launch
from ligermodels.kernels._math import activation
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
from ligermodels.kernels.recurrent._delta import chunk

_FORWARD_SPAN, _BACKWARD_SPAN = 64, 256
"""Tokens of a program. One of the backward writes a part of the weight's gradient."""
_TOKENS, _CHANNELS, _STAGES = 4, 512, 3
"""Tokens that a program loads at a time, its channels, and the stages of its loads: on an H200 within 2 % of the best.
The forward moves its bytes at 89 % of a copy's speed there, the backward, which computes more, at 78 %."""


def causal_conv_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None,
    state: Tensor | None = None, cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The specification of `causal_conv`: conv1d of each document, in fp32 (fp64 for fp64)."""
    dtype, (rows, _, channels), before = accumulator(x.dtype), x.shape, weight.shape[2] - 1
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        return torch.cat([
            causal_conv_reference(
                x[:, begin:end], weight, bias, activation=activation, state=None if state is None else state[i : i + 1]
            )
            for i, (begin, end) in enumerate(itertools.pairwise(bounds))
        ], 1)  # fmt: skip
    if x.shape[1] == 0:
        return x.clone()
    past = x.new_zeros(rows, channels, before, dtype=dtype) if state is None else state.to(dtype)
    h = torch.cat([past, x.to(dtype).transpose(1, 2)], 2)
    y = F.conv1d(h, weight.to(dtype), None if bias is None else bias.to(dtype), groups=channels).transpose(1, 2)
    return (y if activation is None else F.silu(y)).to(x.dtype)


@triton.jit
def _load(ptr, channels, token, first, end, CHANNELS: tl.constexpr, STRIDE: tl.constexpr = 1):
    """The channels of a token, STRIDE apart, in fp32; zeros of a token before `first`, or from `end` on."""
    mask = channels < tl.where((token >= first) & (token < end), CHANNELS, 0)
    return tl.load(ptr + channels * STRIDE, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(ptr, x, channels, token, first, end, CHANNELS: tl.constexpr):
    mask = channels < tl.where((token >= first) & (token < end), CHANNELS, 0)
    tl.store(ptr + channels, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _parameters(weight_ptr, bias_ptr, channels, W: tl.constexpr, CHANNELS: tl.constexpr):
    """(W weights, that of the current token first; bias or zeros) of the channels."""
    weights = ()
    for back in tl.static_range(W):
        weights = weights + (_load(weight_ptr + (W - 1 - back), channels, 0, 0, 1, CHANNELS, W),)
    if bias_ptr is None:
        return weights, tl.zeros(channels.shape, tl.float32)
    else:
        return weights, _load(bias_ptr, channels, 0, 0, 1, CHANNELS)


@triton.jit
def _inputs_before(
    x_ptr, state_ptr, channels, tokens, x_t, STATE: tl.constexpr, W: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """The W - 1 inputs before that at x_ptr, the latest first, and zeros. tokens: the document's tokens before it."""
    x = ()
    for back in tl.static_range(1, W):
        token = tokens - back
        past = _load(x_ptr - back * x_t, channels, token, 0, tokens, CHANNELS)
        if STATE:
            past += _load(state_ptr + (token + W - 1), channels, token, 1 - W, 0, CHANNELS, W - 1)
        x = x + (past,)
    return x + (tl.zeros(channels.shape, tl.float32),)


@triton.jit
def _pushed(new, old, W: tl.constexpr):
    """W values: the new one, and the old ones but the last."""
    values = (new,)
    for i in tl.static_range(W - 1):
        values = values + (old[i],)
    return values


@triton.jit
def _sum(x, weights, bias, W: tl.constexpr):
    y = bias
    for back in tl.static_range(W):
        y += x[back] * weights[back]
    return y


@triton.jit(do_not_specialize=["T", "N"])
def _forward_kernel(
    y_ptr, x_ptr, weight_ptr, bias_ptr, state_ptr, cu_ptr, T, N, x_b, x_t,
    ACTIVATION: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr, W: tl.constexpr, CHANNELS: tl.constexpr,
    SPAN: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y of SPAN tokens."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    channels = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    b, n, begin, first, end = chunk(tl.program_id(0) // BLOCKS, cu_ptr, T, N, PACKED, SPAN)
    if first >= end:
        return
    x_ptr += b.to(tl.int64) * x_b
    y_ptr += b.to(tl.int64) * T * CHANNELS
    state_ptr += n.to(tl.int64) * (CHANNELS * (W - 1))
    weights, bias = _parameters(weight_ptr, bias_ptr, channels, W, CHANNELS)
    x_at = x_ptr + tl.cast(first, tl.int64) * x_t
    x = _inputs_before(x_at, state_ptr, channels, first - begin, x_t, STATE, W, CHANNELS)
    for start in tl.range(first, tl.minimum(first + SPAN, end), TOKENS, num_stages=STAGES):
        new = ()
        for i in tl.static_range(TOKENS):
            new = new + (_load(x_ptr + tl.cast(start + i, tl.int64) * x_t, channels, start + i, first, end, CHANNELS),)
        for i in tl.static_range(TOKENS):
            x = _pushed(new[i], x, W)
            y = _sum(x, weights, bias, W)
            if ACTIVATION is not None:
                y, _ = activation(y, ACTIVATION, dtype == tl.float32)
            _store(y_ptr + tl.cast(start + i, tl.int64) * CHANNELS, y, channels, start + i, first, end, CHANNELS)


@triton.jit
def _advanced(new, dy, x, d, weights, bias, ACTIVATION: tl.constexpr, EXACT: tl.constexpr, W: tl.constexpr):
    """(x, d, dx): the last W inputs, and gradients of sums, of a token and those before it; dx of the last of these."""
    x = _pushed(new, x, W)
    if ACTIVATION is not None:
        _, slope = activation(_sum(x, weights, bias, W), ACTIVATION, EXACT)
        dy *= slope
    d = _pushed(dy, d, W)
    dx = d[W - 1] * weights[0]
    for ahead in tl.static_range(1, W):
        dx += d[W - 1 - ahead] * weights[ahead]
    return x, d, dx


@triton.jit(do_not_specialize=["T", "N"])
def _backward_kernel(
    dx_ptr, d_weight_ptr, d_bias_ptr, dy_ptr, x_ptr, weight_ptr, bias_ptr, state_ptr, cu_ptr, T, N, x_b, x_t,
    ACTIVATION: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr, W: tl.constexpr, CHANNELS: tl.constexpr,
    SPAN: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx of SPAN tokens, and their part of the gradients of weight and bias. dx of a token is known W - 1 tokens after
    it, so that the program goes as many tokens further."""
    EXACT: tl.constexpr = dx_ptr.dtype.element_ty == tl.float32
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    slot = (tl.program_id(0) // BLOCKS).to(tl.int64)
    channels = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    b, n, begin, first, end = chunk(tl.program_id(0) // BLOCKS, cu_ptr, T, N, PACKED, SPAN)
    first = tl.minimum(first, end)  # of an empty slot, which may begin past the last token
    last = tl.minimum(first + SPAN, end)
    x_ptr += b.to(tl.int64) * x_b
    dx_ptr += b.to(tl.int64) * T * CHANNELS
    dy_ptr += b.to(tl.int64) * T * CHANNELS
    state_ptr += n.to(tl.int64) * (CHANNELS * (W - 1))
    weights, bias = _parameters(weight_ptr, bias_ptr, channels, W, CHANNELS)
    d_bias = tl.zeros([BLOCK], tl.float32)
    d_weights = ()
    d = ()
    for _ in tl.static_range(W):
        d_weights = d_weights + (d_bias,)
        d = d + (d_bias,)
    x_at = x_ptr + tl.cast(first, tl.int64) * x_t
    x = _inputs_before(x_at, state_ptr, channels, first - begin, x_t, STATE, W, CHANNELS)
    for start in tl.range(first, last, TOKENS, num_stages=STAGES):
        new = ()
        dys = ()
        for i in tl.static_range(TOKENS):
            at = tl.cast(start + i, tl.int64)
            new = new + (_load(x_ptr + at * x_t, channels, start + i, first, end, CHANNELS),)
            dys = dys + (_load(dy_ptr + at * CHANNELS, channels, start + i, first, end, CHANNELS),)
        for i in tl.static_range(TOKENS):
            x, d, dx = _advanced(new[i], dys[i], x, d, weights, bias, ACTIVATION, EXACT, W)
            token = start + i - (W - 1)
            _store(dx_ptr + tl.cast(token, tl.int64) * CHANNELS, dx, channels, token, first, end, CHANNELS)
            d_bias += d[0]
            sums = ()
            for back in tl.static_range(W):
                sums = sums + (d_weights[back] + d[0] * x[back],)
            d_weights = sums
    # The loop ended at or past `last`, past it only where that is the end.
    ended = first + tl.cdiv(last - first, TOKENS) * TOKENS
    for i in tl.static_range(W - 1):
        at = tl.cast(ended + i, tl.int64)
        after = _load(x_ptr + at * x_t, channels, ended + i, first, end, CHANNELS)
        dy = _load(dy_ptr + at * CHANNELS, channels, ended + i, first, end, CHANNELS)
        x, d, dx = _advanced(after, dy, x, d, weights, bias, ACTIVATION, EXACT, W)
        token = ended + i - (W - 1)
        _store(dx_ptr + tl.cast(token, tl.int64) * CHANNELS, dx, channels, token, first, end, CHANNELS)
    exists = channels < CHANNELS
    for back in tl.static_range(W):
        at = d_weight_ptr + (slot * CHANNELS + channels) * W + (W - 1 - back)
        tl.store(at, d_weights[back], mask=exists)
    if d_bias_ptr is not None:
        tl.store(d_bias_ptr + slot * CHANNELS + channels, d_bias, mask=exists)


def _slots(x: Tensor, cu_seqlens: Tensor | None, tokens: int) -> tuple[int, int]:
    """(documents, slots of tiles of `tokens` tokens), see _delta.py."""
    rows, length, _ = x.shape
    if cu_seqlens is None:
        return rows, rows * cdiv(length, tokens)
    documents = cu_seqlens.shape[0] - 1
    return documents, length // tokens + documents


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, state: Tensor | None, cu: Tensor | None
) -> Tensor:
    channels, width = operator.index(x.shape[2]), operator.index(weight.shape[2])
    documents, slots = _slots(x, cu, _FORWARD_SPAN)
    block = min(_CHANNELS, next_power_of_2(channels))
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(
        _forward_kernel, (slots * cdiv(channels, block),),
        y, x, weight, bias, x if state is None else state, x if cu is None else cu, x.shape[1], documents,
        *x.stride()[:2], activation, state is not None, cu is not None, width, channels,
        _FORWARD_SPAN, _TOKENS, block, _STAGES, num_warps=4,
    )  # fmt: skip
    return y


def _backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, cu: Tensor | None, activation: str | None,
    dy: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, weight and bias, the last of no elements without a bias."""
    channels, width = operator.index(x.shape[2]), operator.index(weight.shape[2])
    documents, slots = _slots(x, cu, _BACKWARD_SPAN)
    block = min(_CHANNELS, next_power_of_2(channels))
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    parts = torch.empty(slots, channels * width, dtype=torch.float32, device=x.device)
    bias_parts = None if bias is None else parts.new_empty(slots, channels)
    launch(
        _backward_kernel, (slots * cdiv(channels, block),),
        dx, parts, bias_parts, dy.contiguous(), x, weight, bias, x if state is None else state,
        x if cu is None else cu, x.shape[1], documents, *x.stride()[:2],
        activation, state is not None, cu is not None, width, channels,
        _BACKWARD_SPAN, _TOKENS, block, _STAGES, num_warps=4,
    )  # fmt: skip
    d_bias = x.new_empty(0) if bias is None or bias_parts is None else _sum_parts(bias_parts, bias)
    return dx, _sum_parts(parts, weight), d_bias


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        _save(ctx, inputs, None)
        return _forward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _gradients(ctx, dy, _backward)


def _save(ctx, inputs, output):
    x, weight, bias, ctx.activation, state, cu = inputs
    ctx.save_for_backward(x, weight, bias, state, cu)


def _gradients(ctx, dy, backward):
    dx, d_weight, d_bias = backward(*ctx.saved_tensors, ctx.activation, dy)
    return dx, d_weight, d_bias if ctx.needs_input_grad[2] else None, None, None, None


# For torch.compile, ops that it does not look into, for the reason in gated_delta_rule.py.
_compiled_forward = torch.library.custom_op("ligermodels::causal_conv", _forward, mutates_args=())
_compiled_backward = torch.library.custom_op("ligermodels::causal_conv_backward", _backward, mutates_args=())


@_compiled_forward.register_fake
def _(x, weight, bias, activation, state, cu):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@_compiled_backward.register_fake
def _(x, weight, bias, state, cu, activation, dy):
    empty = x.new_empty(0) if bias is None else torch.empty(bias.shape, dtype=bias.dtype, device=x.device)
    return *(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, weight)), empty


_compiled_forward.register_autograd(lambda ctx, dy: _gradients(ctx, dy, _compiled_backward), setup_context=_save)


def _sum_parts(parts: Tensor, like: Tensor) -> Tensor:
    """The rows of `parts`, summed in a fixed order, in shape and dtype of `like`."""
    total, size = torch.empty(like.shape, dtype=like.dtype, device=like.device), operator.index(parts.shape[1])
    launch(sum_parts_kernel, (cdiv(size, 64), 1), total, None, parts, parts.shape[0], size, 64, 32)
    return total


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> None:
    where = "causal_conv"
    if x.dim() != 3 or not x.is_floating_point():
        raise InputError(f"{where}: x has {describe(x)}; expected floating point [B, T, C].")
    if weight.dim() != 3 or weight.shape[2] == 0:
        raise InputError(f"{where}: weight has {describe(weight)}; expected [C, 1, W], W >= 1.")
    check_operand(where, "weight", weight, (x.shape[-1], 1, weight.shape[2]), "x", x)
    if bias is not None:
        check_operand(where, "bias", bias, x.shape[-1:], "x", x)
    if activation not in (None, "silu"):
        raise InputError(f"{where}: activation={activation!r}; supported are None and 'silu'.")


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None,
    state: Tensor | None = None, cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Convolution of each channel with its own filter over the last W tokens: [B, T, C] of x's dtype.

    x: [B, T, C]; weight: [C, 1, W], of which [..., -1] meets the current token; bias: [C] or None.
    activation: None or "silu". state: [B, C, W - 1], the inputs before the first token; None: zeros.
    cu_seqlens: int32 [N + 1] on x's device, from 0 to T, for N packed documents; B is then 1, and state [N, C, W - 1].
    Raises InputError for shapes, dtypes or devices that do not fit.
    """
    _check(x, weight, bias, activation)
    rows = x.shape[0]
    if cu_seqlens is not None:
        check_bounds("causal_conv", cu_seqlens, x)
        rows = cu_seqlens.shape[0] - 1
    if state is not None:
        check_operand("causal_conv", "state", state, (rows, x.shape[2], weight.shape[2] - 1), "weight", weight)
        if state.requires_grad and torch.is_grad_enabled():
            raise InputError("causal_conv: state requires a gradient, which is not computed; detach it.")
    if not use_triton(x) or x.dtype == torch.float64 or x.numel() == 0:
        return causal_conv_reference(x, weight, bias, activation=activation, state=state, cu_seqlens=cu_seqlens)
    bias, state, cu_seqlens = (None if t is None else t.contiguous() for t in (bias, state, cu_seqlens))
    run = _compiled_forward if torch.compiler.is_compiling() else _CausalConv.apply
    return run(last_dim_contiguous(x), weight.contiguous(), bias, activation, state, cu_seqlens)
