"""Experts of any operands: `moe_experts` for dense ones; the op of this file for frozen experts with LoRA adapters,
quantised weights (QLoRA) or both.

    [gate | up] = x W1[e]^T + s1 (x A1[e]^T) B1[e]^T                  h = act(gate) * up
    y[t] = sum over the experts e of t of weights[t, e] * (h W2[e]^T + s2 (h A2[e]^T) B2[e]^T)

Shapes, as in the suffixes of names: T tokens, K experts of each token, R = T K rows (sorted by expert), E experts, H
hidden size, I inner size, G = 2 I; M and N are any sizes.

What differs from moe.py:
- Each product is a grouped matmul of its own: one for W, one for all A[e], one for all B[e]. W gets no gradient, so no
  tensor of its size is written.
- Quantised weights are saved as they are, and dequantised for each matmul. When few tokens are decoded, only the
  experts that they chose are dequantised, one copy for each of the T K rows.
- The op saves for each of the T K rows: x if A1 is trained, gate_up, h and the expert's output, in all 2 H + 3 I
  numbers; with `recompute` it saves only x of each token.

Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ligermodels.errors import InputError
from ligermodels.kernels._check import describe
from ligermodels.kernels._triton import accumulator, once_differentiable, use_triton
from ligermodels.kernels.experts._grouped_mm import combine, dispatch, grouped_mm, grouped_mm_outer, sort_by_expert
from ligermodels.kernels.experts.moe import check_experts, moe_experts
from ligermodels.kernels.linear.glu import glu
from ligermodels.kernels.linear.linear import linears_reference
from ligermodels.kernels.linear.low_bit import LowBitWeight
from ligermodels.kernels.linear.operand import LinearOperand, autocast_dtype, check, choose


def experts_reference(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: LinearOperand, down: LinearOperand, *, activation: str
) -> Tensor:
    check_experts(experts, gate_up.weight.shape[0])
    y = torch.zeros((), dtype=weights.dtype, device=x.device)
    for expert, layers in enumerate(zip(_each(gate_up, x), _each(down, x), strict=True)):
        here = experts == expert
        rows = torch.where(here.any(-1, keepdim=True), x, 0)  # rows of other experts are zero, and so are their outputs
        first, last = layers
        out = linears_reference(glu(linears_reference(rows, [first]), activation=activation), [last])
        y = y + out * (weights * here).sum(-1, keepdim=True)
    return y.to(x.dtype)


def _each(operand: LinearOperand, x: Tensor) -> list[LinearOperand]:
    """The operand of each expert."""
    weight, _, adapter = operand
    whole = weight.dequantize(x.dtype) if isinstance(weight, LowBitWeight) else weight
    if adapter is None:
        return [LinearOperand(w) for w in whole]
    factors = zip(whole, adapter.a, adapter.b, strict=True)
    return [LinearOperand(w, None, adapter._replace(a=a, b=b)) for w, a, b in factors]


class _Dispatch(torch.autograd.Function):
    """x: [T, H] -> [R, H], as `dispatch`."""

    @staticmethod
    def forward(ctx, x_TH, rows, top_k):
        ctx.save_for_backward(rows)
        ctx.top_k = top_k
        return dispatch(x_TH, rows, top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx_RH):
        (rows,) = ctx.saved_tensors
        return combine(dx_RH.contiguous(), rows, ctx.top_k), None, None


class _Grouped(torch.autograd.Function):
    """x [R, M], contiguous -> [R, N]. weight: [E, N, M], or None where `bits`, a LowBitWeight, replaces it."""

    @staticmethod
    def forward(ctx, x_RM, offsets, weight_ENM, bits):
        ctx.bits = bits
        ctx.save_for_backward(offsets, weight_ENM, x_RM if ctx.needs_input_grad[2] else None)
        weight_ENM = weight_ENM if bits is None else bits.dequantize(x_RM.dtype)
        return grouped_mm(x_RM, weight_ENM.transpose(1, 2), offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_RN):
        (offsets, weight_ENM, x_RM), bits, dx_RM, dy_RN = ctx.saved_tensors, ctx.bits, None, dy_RN.contiguous()
        dweight_ENM = None if x_RM is None else grouped_mm_outer(dy_RN, x_RM, offsets)
        if ctx.needs_input_grad[0]:
            dx_RM = grouped_mm(dy_RN, weight_ENM if bits is None else bits.dequantize(dy_RN.dtype), offsets)
        return dx_RM, None, dweight_ENM, None


class _Combine(torch.autograd.Function):
    """y: [R, H]; weights: [T, K] -> [T, H], as `combine`."""

    @staticmethod
    def forward(ctx, y_RH, weights_TK, slots, rows):
        ctx.save_for_backward(y_RH, weights_TK, slots, rows)
        return combine(y_RH, rows, weights_TK.shape[1], weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_TH):
        y_RH, weights_TK, slots, rows = ctx.saved_tensors
        dtype, slots = accumulator(y_RH.dtype), slots.long()
        d_RH = dispatch(d_TH, rows, weights_TK.shape[1]).to(dtype)
        d_weights_TK = torch.empty_like(weights_TK)
        d_weights_TK.view(-1)[slots] = (d_RH * y_RH.to(dtype)).sum(1).to(weights_TK.dtype)
        dy_RH = (d_RH * weights_TK.view(-1)[slots, None].to(dtype)).to(y_RH.dtype)
        return dy_RH, d_weights_TK, None, None


def _linear(x_RM: Tensor, operand: LinearOperand, offsets: Tensor) -> Tensor:
    """The operand's layers of rows x [R, M]: [R, N]."""
    weight, _, adapter = operand
    bits = weight if isinstance(weight, LowBitWeight) else None
    y_RN = _Grouped.apply(x_RM, offsets, None if bits else weight, bits)
    if adapter is None:
        return y_RN
    h = x_RM.to(adapter.dtype or x_RM.dtype)
    for factor in (adapter.a, adapter.b):
        h = _Grouped.apply(h, offsets, factor.to(h.dtype).contiguous(), None)
    return torch.add(y_RN, h, alpha=adapter.scale).to(y_RN.dtype)


def _run(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: LinearOperand, down: LinearOperand, *, activation: str
) -> Tensor:
    slots, rows, offsets = sort_by_expert(experts.contiguous(), gate_up.weight.shape[0])
    x_RH = _Dispatch.apply(x, rows, weights.shape[1])
    h_RI = glu(_linear(x_RH, gate_up, offsets), activation=activation)
    return _Combine.apply(_linear(h_RI, down, offsets), weights.contiguous(), slots, rows)


def _select(operands: tuple[LinearOperand, ...], experts: Tensor) -> tuple[Tensor, tuple[LinearOperand, ...]]:
    """(experts, operands) of the chosen experts alone, which get new numbers; without a gradient.

    A GPU takes one expert for each row, since it does not know which are equal; one outside of [0, E) becomes -1.
    """
    count = operands[0].weight.shape[0]
    if use_triton(experts):
        index = experts.clamp(0, count - 1)
        numbers = torch.arange(experts.numel(), dtype=torch.int32, device=experts.device).view_as(experts)
        index, experts = index.flatten(), torch.where(index == experts, numbers, -1)
        index = index.repeat(2) if len(index) == 1 else index  # the kernels sort by two experts or more
    else:
        check_experts(experts, count)
        index, experts = experts.unique(return_inverse=True)

    def select(operand: LinearOperand) -> LinearOperand:
        weight, _, adapter = operand
        weight = weight.select(index) if isinstance(weight, LowBitWeight) else weight[index]
        if adapter is not None:
            adapter = adapter._replace(a=adapter.a[index], b=adapter.b[index])
        return LinearOperand(weight, None, adapter)

    return experts, tuple(map(select, operands))


def experts_of(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: LinearOperand, down: LinearOperand, *,
    activation: str = "silu", recompute: bool = False,
) -> Tensor:  # fmt: skip
    """`moe_experts` of operands.

    x, weights, experts, activation: as of `moe_experts`. gate_up, down: weights [E, 2I, H] and [E, H, I], dense or a
    LowBitWeight of that shape, without biases; adapters with A [E, r, K] and B [E, N, r], or None. recompute: the
    backward runs the forward again. Gradients of adapters are summed in fp32 and rounded to x's dtype.
    Returns [T, H]. Raises InputError for shapes, dtypes and devices that do not fit.
    """
    how = choose((gate_up, down), x, routed_rows=experts.numel())
    if how == "experts":
        dense = gate_up.weight, down.weight
        return moe_experts(x, weights, experts, *dense, activation=activation, recompute=recompute)
    if weights.shape != experts.shape or weights.shape[:1] != x.shape[:1] or weights.dim() != 2:
        raise InputError(
            f"experts: weights has {describe(weights)}, experts {describe(experts)}; expected both "
            f"[{x.shape[0]}, top_k], as `route` returns them for x."
        )
    count, rows, _ = gate_up.weight.shape
    (gate_up,) = check("experts", "x", x, x.shape[-1], [gate_up], ("gate_up ",), count)
    (down,) = check("experts", "x", x, rows // 2, [down], ("down ",), count)
    if how == "selected_experts":
        experts, (gate_up, down) = _select((gate_up, down), experts)
    x = x.to(autocast_dtype(x) or x.dtype)
    run: Any = functools.partial(_run if use_triton(x) else experts_reference, activation=activation)
    if recompute and torch.is_grad_enabled():
        return checkpoint(run, x, weights, experts, gate_up, down, use_reentrant=False, preserve_rng_state=False)
    return run(x, weights, experts, gate_up, down)
