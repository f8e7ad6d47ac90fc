"""A step of Gated DeltaNet: from the projections of the next tokens to what its norm reads, in one launch.

    q | k | v = silu(causal_conv(qkv));   g, beta = delta_gates(a, b);   out = gated_delta_rule(q, k, v, g, beta)

Both states are rings, so that a sequence can go back to an earlier token without a copy. Column p of the text, its p-th
token, is in column p modulo the length of the ring:

    conv [B, W - 1 + N, C]        the input of each token; a token reads those of the W - 1 tokens before it
    state [B, N, HV, DK, DV]      the state after each token

So N tokens can follow at once, and the states after the last N tokens are kept. Several programs read the inputs of a
key head, and no program writes where another one reads: W - 1 + N columns hold what N tokens read and write.

Bytes moved: the state is read once, and written once for each token; all else is small.

Source: those of causal_conv.py, delta_gates.py and gated_delta_rule.py, whose references are composed here.
"""

# Triton's compiler has no (*tiles, tile), and mypy no tuple that grows:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

import operator

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._check import check_operand, describe
from ligermodels.kernels._launch import launch
from ligermodels.kernels._math import activation, exp
from ligermodels.kernels._triton import (
    cdiv,
    last_dim_contiguous,
    let_next_start,
    next_power_of_2,
    overlapping,
    overlaps_launches,
    tl,
    triton,
    use_triton,
    wait,
)
from ligermodels.kernels.recurrent.causal_conv import causal_conv_reference
from ligermodels.kernels.recurrent.delta_gates import decays, delta_gates_reference
from ligermodels.kernels.recurrent.gated_delta_rule import EPS, MAX_SIZE, gated_delta_rule_reference

_VALUE_DIMS = 32
"""Value dims of a program, so that one row of few heads occupies a GPU."""


def gated_delta_step_reference(
    qkv: Tensor, weight: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, conv: Tensor, state: Tensor,
    ends: Tensor,
) -> Tensor:  # fmt: skip
    """The specification of `gated_delta_step`, one token after the other."""
    (rows, columns), (states, heads, keys, values) = conv.shape[:2], state.shape[1:]
    row, out = torch.arange(rows, device=qkv.device), []
    for t in range(qkv.shape[1]):
        now = slice(t, t + 1)
        column = ends[:rows].long() - 1 + t
        seen = (column[:, None] + torch.arange(1 - weight.shape[2], 0, device=qkv.device)) % columns
        before = conv[row[:, None], seen].transpose(1, 2)
        x = causal_conv_reference(qkv[:, now], weight, activation="silu", state=before)
        q_and_k, v = x[..., : -heads * values], x[..., -heads * values :].unflatten(2, (heads, values))
        q, k = q_and_k.unflatten(2, (-1, keys)).chunk(2, 2)
        g, beta = delta_gates_reference(a[:, now], b[:, now], A_log, dt_bias)
        y, after = gated_delta_rule_reference(q, k, v, g, beta, state[row, (column - 1) % states])
        conv[row, column % columns], state[row, column % states] = qkv[:, t], after.to(state.dtype)
        out.append(y)
    return torch.cat(out, 1)


@triton.jit
def _load_channels(conv_ptr, weight_ptr, column, columns, channels, exists, W: tl.constexpr, CHANNELS: tl.constexpr):
    """The inputs of the W - 1 tokens before `column`, and the W weights, in fp32."""
    inputs = ()
    weights = ()
    for i in tl.static_range(W):
        weights = weights + (tl.load(weight_ptr + channels * W + i, mask=exists, other=0.0).to(tl.float32),)
        if i < W - 1:
            at = (column + columns - (W - 1) + i) % columns
            inputs = inputs + (tl.load(conv_ptr + at * CHANNELS + channels, mask=exists, other=0.0).to(tl.float32),)
    return inputs, weights


@triton.jit
def _convolve(x, inputs, weights, W: tl.constexpr):
    """(the convolution's output for x as its dtype rounds it, in fp32; the inputs before the next token)"""
    new = x.to(tl.float32)
    y = new * weights[W - 1]
    moved = ()
    for i in tl.static_range(W - 1):
        y += inputs[i] * weights[i]
        if i > 0:
            moved = moved + (inputs[i],)
    if W > 1:
        moved = moved + (new,)
    y, _ = activation(y, "silu", x.dtype == tl.float32)
    return y.to(x.dtype).to(tl.float32), moved


# One variant for all numbers of tokens and states: others might round in another order.
@triton.jit(do_not_specialize=["tokens", "states", "x_b", "x_t", "a_b", "a_t", "b_b", "b_t"])
def _step_kernel(
    o_ptr, conv_ptr, state_ptr, x_ptr, weight_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, ends_ptr,
    tokens, states, x_b, x_t, a_b, a_t, b_b, b_t,
    SCALE: tl.constexpr, EPS: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BK: tl.constexpr, BLOCK_V: tl.constexpr, W: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """`tokens` tokens of one row and value head, for BLOCK_V value dims.

    OVERLAP: what earlier steps have written is loaded while the kernel before this one ends."""
    let_next_start(OVERLAP)
    CHANNELS: tl.constexpr = 2 * HK * DK + HV * DV
    b, i = tl.program_id(0).to(tl.int64) // HV, tl.program_id(0) % HV
    key_dims, value_dims = tl.arange(0, BK), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = key_dims < DK, value_dims < DV
    of_q = i // (HV // HK) * DK + key_dims
    of_k, of_v = HK * DK + of_q, 2 * HK * DK + i * DV + value_dims
    first = tl.load(ends_ptr + b) - 1
    columns = W - 1 + states
    conv_ptr += b * columns * CHANNELS
    state_ptr += (b * states * HV + i) * (DK * DV) + (key_dims[:, None] * DV + value_dims[None, :])
    exists = is_key[:, None] & is_value[None, :]
    state = tl.load(state_ptr + (first + states - 1) % states * (HV * DK * DV), mask=exists, other=0.0)
    q_inputs, q_weights = _load_channels(conv_ptr, weight_ptr, first, columns, of_q, is_key, W, CHANNELS)
    k_inputs, k_weights = _load_channels(conv_ptr, weight_ptr, first, columns, of_k, is_key, W, CHANNELS)
    v_inputs, v_weights = _load_channels(conv_ptr, weight_ptr, first, columns, of_v, is_value, W, CHANNELS)
    A_log, dt_bias = tl.load(A_log_ptr + i).to(tl.float32), tl.load(dt_bias_ptr + i).to(tl.float32)
    writes_keys = key_dims < tl.where(i % (HV // HK) + tl.program_id(1) == 0, DK, 0)  # one program of a key head
    wait(OVERLAP)
    for token in range(tokens):
        x_at = x_ptr + b * x_b + token * x_t
        new_q = tl.load(x_at + of_q, mask=is_key, other=0.0)
        new_k = tl.load(x_at + of_k, mask=is_key, other=0.0)
        new_v = tl.load(x_at + of_v, mask=is_value, other=0.0)
        a = tl.load(a_ptr + b * a_b + token * a_t + i).to(tl.float32)
        beta = tl.div_rn(1.0, 1.0 + exp(-tl.load(b_ptr + b * b_b + token * b_t + i).to(tl.float32)))
        beta = beta.to(b_ptr.dtype.element_ty).to(tl.float32)
        q, q_inputs = _convolve(new_q, q_inputs, q_weights, W)
        k, k_inputs = _convolve(new_k, k_inputs, k_weights, W)
        v, v_inputs = _convolve(new_v, v_inputs, v_weights, W)
        conv_at = conv_ptr + (first + token) % columns * CHANNELS
        tl.store(conv_at + of_q, new_q, mask=writes_keys)
        tl.store(conv_at + of_k, new_k, mask=writes_keys)
        tl.store(conv_at + of_v, new_v, mask=is_value)
        q *= tl.rsqrt(tl.sum(q * q, 0) + EPS) * SCALE
        k *= tl.rsqrt(tl.sum(k * k, 0) + EPS)
        rate, softplus, _ = decays(a, A_log, dt_bias)
        state *= tl.exp(-rate * softplus)
        written = beta * (v - tl.sum(state * k[:, None], 0))
        state += k[:, None] * written[None, :]
        o = tl.sum(state * q[:, None], 0)
        tl.store(o_ptr + ((b * tokens + token) * HV + i) * DV + value_dims, o.to(o_ptr.dtype.element_ty), mask=is_value)
        tl.store(state_ptr + (first + token) % states * (HV * DK * DV), state, mask=exists)


def gated_delta_step(
    qkv: Tensor, weight: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, conv: Tensor, state: Tensor,
    ends: Tensor, *, rings_are_ready: bool = False,
) -> Tensor:  # fmt: skip
    """The next T tokens of each row: out [B, T, HV, DV] of qkv's dtype, to the bit the same in one call or in T.

    qkv: [B, T, C] before the convolution, of HK, HK and HV heads: C = 2 HK DK + HV DV; weight: [C, 1, W], see
    `causal_conv`. a, b: [B, T, HV]; A_log, dt_bias: [HV], see `delta_gates`.
    conv: [B, W - 1 + N, C] of qkv's dtype, state: fp32 [B, N, HV, DK, DV], N >= T: the rings above, which are written.
    ends: int32 [B], the column after the first of these tokens.
    rings_are_ready: since the rings and `ends` were written there has been a launch that does not overlap (_triton.py),
    as between two steps of decoding. The kernel then loads the rings before the kernel launched before it has ended.
    There is no gradient. Raises InputError for shapes, dtypes or devices that do not fit.
    """
    where = "gated_delta_step"
    if qkv.dim() != 3 or state.dim() != 5 or not qkv.is_floating_point():
        raise InputError(
            f"{where}: qkv has {describe(qkv)}, state {describe(state)}; expected floating point [B, T, C] and "
            "[B, N, HV, DK, DV]."
        )
    rows, tokens, channels = map(operator.index, qkv.shape)
    states, heads, keys, values = map(operator.index, state.shape[1:])
    key_heads, rest = divmod(channels - heads * values, 2 * keys)
    if rest or key_heads < 1 or heads % key_heads or not 0 < tokens <= states:
        raise InputError(
            f"{where}: qkv has {describe(qkv)}, state {describe(state)}; expected C = 2 HK DK + HV DV, HV a multiple "
            "of HK, and 1 <= T <= N."
        )
    width = operator.index(weight.shape[-1])
    check_operand(where, "weight", weight, (channels, 1, width), "qkv", qkv)
    for name, x, shape in (
        ("a", a, (rows, tokens, heads)), ("b", b, (rows, tokens, heads)), ("A_log", A_log, (heads,)),
        ("dt_bias", dt_bias, (heads,)), ("conv", conv, (rows, width - 1 + states, channels)),
        ("state", state, (rows, states, heads, keys, values)),
    ):  # fmt: skip
        check_operand(where, name, x, shape, "qkv", qkv)
    for name, x, dtype in (("conv", conv, qkv.dtype), ("state", state, torch.float32)):
        if x.dtype != dtype or not x.is_contiguous():
            raise InputError(
                f"{where}: {name} has {describe(x)} and strides {x.stride()}; expected contiguous {dtype}, since it is "
                "overwritten."
            )
    if ends.shape != (rows,) or ends.dtype != torch.int32 or ends.device != qkv.device:
        raise InputError(f"{where}: ends has {describe(ends)}; expected torch.int32 [{rows}] on {qkv.device}.")
    if not use_triton(qkv) or qkv.dtype == torch.float64 or max(keys, values) > MAX_SIZE or qkv.numel() == 0:
        return gated_delta_step_reference(qkv, weight, a, b, A_log, dt_bias, conv, state, ends)
    qkv, a, b = (last_dim_contiguous(x) for x in (qkv, a, b))
    out = torch.empty(rows, tokens, heads, values, dtype=qkv.dtype, device=qkv.device)
    block, overlap = min(_VALUE_DIMS, next_power_of_2(values)), rings_are_ready and overlaps_launches(qkv)
    launch(
        _step_kernel, (rows * heads, cdiv(values, block)),
        out, conv, state, qkv, weight.contiguous(), a, b, A_log.contiguous(), dt_bias.contiguous(), ends.contiguous(),
        tokens, states, *qkv.stride()[:2], *a.stride()[:2], *b.stride()[:2],
        keys**-0.5, EPS, key_heads, heads, keys, values, next_power_of_2(keys), block, width, overlap,
        num_warps=4, **overlapping(overlap),
    )  # fmt: skip
    return out
