"""Short causal convolution over tokens, one filter per channel, with its activation.

    y[t] = act(bias + sum over j < W of weight[j] x[t - (W - 1) + j])          for each channel

- Packed sequences: a document does not see the tokens before it.
- `state` holds the W - 1 inputs before the first token, so that a sequence can be continued.

Source: torch.nn.functional.conv1d with groups = channels and W - 1 zeros on the left.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._check import check_operand, describe
from ligermodels.kernels._triton import accumulator


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


def causal_conv_step_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *, activation: str | None
) -> Tensor:
    y = causal_conv_reference(x[:, None], weight, bias, activation=activation, state=state)
    state.copy_(torch.cat([state[:, :, 1:], x[:, :, None].to(state.dtype)], 2))
    return y[:, 0]


def _check(where: str, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, dim: int) -> None:
    if x.dim() != dim or not x.is_floating_point():
        raise InputError(
            f"{where}: x has {describe(x)}; expected floating point [{'B, T, C' if dim == 3 else 'B, C'}]."
        )
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
    _check("causal_conv", x, weight, bias, activation, 3)
    rows = x.shape[0]
    if cu_seqlens is not None:
        if cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int32 or cu_seqlens.device != x.device or rows != 1:
            raise InputError(
                f"causal_conv: cu_seqlens has {describe(cu_seqlens)} for {rows} rows; expected torch.int32 "
                f"[documents + 1] on {x.device}, and documents end to end in one row."
            )
        rows = cu_seqlens.shape[0] - 1
    if state is not None:
        check_operand("causal_conv", "state", state, (rows, x.shape[2], weight.shape[2] - 1), "x", x)
    return causal_conv_reference(x, weight, bias, activation=activation, state=state, cu_seqlens=cu_seqlens)


def causal_conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *, activation: str | None
) -> Tensor:
    """`causal_conv` of one token of each row: [B, C] of x's dtype; x [B, C] moves into `state` [B, C, W - 1].

    There is no gradient. Raises InputError for shapes, dtypes or devices that do not fit.
    """
    _check("causal_conv_step", x, weight, bias, activation, 2)
    check_operand("causal_conv_step", "state", state, (*x.shape, weight.shape[2] - 1), "x", x)
    return causal_conv_step_reference(x, weight, bias, state, activation=activation)
