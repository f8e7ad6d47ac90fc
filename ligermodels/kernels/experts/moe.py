"""The experts of a mixture: gated MLPs over the tokens that `route` sends them.

    y[t] = sum over j of weights[t, j] * down[e] @ (act(gate) * up),  e = experts[t, j],  [gate | up] = gate_up[e] @ x[t]

Shapes, as in the suffixes of names: T tokens, K experts of each token, R = T K rows (sorted by expert), E experts, H
hidden size, I inner size, G = 2 I. w1 and w2 are gate_up_proj and down_proj.

What differs from a loop over experts:
- A counting sort of two small kernels sorts the rows by expert, in token order; each grouped matmul runs over all
  experts. Nothing synchronises, and without atomics the results have the same bits each time.
- Gathering, not scattering: a kernel sums the K rows of each token in fp32, weighted, and rounds once. It also computes
  dx.
- Saved: x, or the inputs of the norm before it (`_recompute`), the routing, and gate_up unless it is recomputed; not
  the sorted x, h = act(gate) * up, or the experts' outputs. The gradient of a routing weight is <dy @ down, h> of its
  row: one kernel reads (gate_up, dh), writes d_gate_up, and overwrites dh with weight * h for d_down.
- Under activation checkpointing, the second run of a block ends before h, the down projection and the sum: `_Experts`
  saves everything, `_Combine` nothing.

Bytes per token at 2-byte dtypes beside the matmuls: forward K (6 I + 4 H) + 4 H, backward K (12 I + 6 H) + 6 H.

Source: Shazeer et al. 2017, https://arxiv.org/abs/1701.06538. Gathering instead of scattering, and the gradient of the
weights from dh: Guo et al. 2025, https://arxiv.org/abs/2512.14080.
"""

import functools
import operator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ligermodels.errors import InputError
from ligermodels.kernels._check import describe
from ligermodels.kernels._launch import launch
from ligermodels.kernels._math import ACTIVATIONS, activation
from ligermodels.kernels._recompute import handle_of, may_overwrite, recomputed
from ligermodels.kernels._triton import (
    next_power_of_2,
    once_differentiable,
    tl,
    triton,
    use_triton,
)
from ligermodels.kernels.experts._grouped_mm import combine, dispatch, grouped_mm, grouped_mm_outer, sort_by_expert
from ligermodels.kernels.linear.glu import glu_forward, glu_reference
from ligermodels.kernels.linear.operand import LinearOperand, autocast_dtype, check


def moe_experts_reference(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up_proj: Tensor, down_proj: Tensor, *, activation: str = "silu"
) -> Tensor:
    """`moe_experts` in plain PyTorch; raises InputError for an expert outside [0, E)."""
    check_experts(experts, down_proj.shape[0])
    y = torch.zeros((), dtype=weights.dtype, device=x.device)
    out = x
    for expert, (gate_up, down) in enumerate(zip(gate_up_proj.unbind(), down_proj.unbind(), strict=True)):
        here = experts == expert
        rows = torch.where(here.any(-1, keepdim=True), x, 0)  # rows of other experts are zero, and so are their outputs
        out = F.linear(glu_reference(F.linear(rows, gate_up), activation=activation), down)
        y = y + out * (weights * here).sum(-1, keepdim=True)
    return y.to(out.dtype)


def check_experts(experts: Tensor, count: int) -> None:
    """Raises InputError for an expert outside [0, count). For references only: it synchronises."""
    wrong = (experts < 0) | (experts >= count)
    if not torch.compiler.is_compiling() and not wrong.is_meta and bool(wrong.any()):
        raise InputError(
            f"moe_experts: experts contain {experts[wrong][0].item()}; expected integers from 0 to {count - 1}, as "
            "`route` returns them for as many experts."
        )


@triton.jit
def _backward_kernel(
    d_gate_up_ptr, d_weights_ptr, dh_ptr, gate_up_ptr, weights_ptr, slots_ptr,
    ACC: tl.constexpr, HAS_DH: tl.constexpr, EMIT: tl.constexpr,
    NAME: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: d_gate_up and the routing weight's gradient from dh = dy @ down; EMIT: overwrites dh with weight * h."""
    dtype: tl.constexpr = gate_up_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    weight = tl.load(weights_ptr + slot).to(ACC)
    dot = tl.zeros([BLOCK], ACC)
    for start in range(0, WIDTH, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < WIDTH
        gate = tl.load(gate_up_ptr + row * (2 * WIDTH) + cols, mask=mask, other=0.0).to(ACC)
        up = tl.load(gate_up_ptr + row * (2 * WIDTH) + cols + WIDTH, mask=mask, other=0.0).to(ACC)
        act, slope = activation(gate, NAME, dtype == tl.float32)
        if HAS_DH:
            dh = tl.load(dh_ptr + row * WIDTH + cols, mask=mask, other=0.0).to(ACC)
            tl.debug_barrier()  # all loads before the stores that may overwrite them: see glu.py
            dot += dh * (act * up)
            dh *= weight
            target = d_gate_up_ptr + row * (2 * WIDTH) + cols
            tl.store(target, (dh * up * slope).to(dtype), mask=mask)
            tl.store(target + WIDTH, (dh * act).to(dtype), mask=mask)
        if EMIT:
            tl.store(dh_ptr + row * WIDTH + cols, (act * up * weight).to(dtype), mask=mask)
    if HAS_DH:
        tl.store(d_weights_ptr + slot, tl.sum(dot, 0).to(d_weights_ptr.dtype.element_ty))


def _backward(
    dh_RI: Tensor | None, gate_up_RG: Tensor, weights_TK: Tensor, slots: Tensor, activation: str, emit: bool,
    overwrite: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(d_gate_up, over gate_up if `overwrite`; d_weights; weight * h, over dh, if `emit`) from dh."""
    n_rows, width = gate_up_RG.shape[0], operator.index(gate_up_RG.shape[1]) // 2
    d_gate_up_RG = d_weights_TK = None
    h_RI = gate_up_RG.new_empty((n_rows, width)) if dh_RI is None else dh_RI
    if dh_RI is not None:
        d_gate_up_RG = gate_up_RG if overwrite else torch.empty_like(gate_up_RG)
        d_weights_TK = torch.empty_like(weights_TK)
    if n_rows:
        launch(
            _backward_kernel, (n_rows,),
            d_gate_up_RG, d_weights_TK, h_RI, gate_up_RG, weights_TK, slots,
            tl.float64 if gate_up_RG.dtype == torch.float64 else tl.float32, dh_RI is not None, emit,
            activation, width, min(1024, next_power_of_2(width)), num_warps=4,
        )  # fmt: skip
    return d_gate_up_RG, d_weights_TK, h_RI if emit else None


def _gate_up(x_TH: Tensor, w1_EGH: Tensor, rows: Tensor, offsets: Tensor, top_k: int) -> Tensor:
    return grouped_mm(dispatch(x_TH, rows, top_k), w1_EGH.transpose(1, 2), offsets)


class _Experts(torch.autograd.Function):
    """The forward up to gate_up, and the whole backward. Returns a placeholder of y's shape, and gate_up [R, G], which
    with `recompute` only the backward computes.

    `_Combine` computes y, and passes y's gradient to the placeholder. Activation checkpointing ends the second run of a
    region when its last tensor is saved, and so does not run `_Combine` again.
    """

    @staticmethod
    def forward(ctx, x_TH, weights_TK, w1_EGH, w2_EHI, slots, rows, offsets, activation, recompute, handle):
        if not torch.compiler.is_compiling():  # Dynamo cannot trace it, and there unused zeros cost nothing
            ctx.set_materialize_grads(False)  # or the backward would be handed zeros of gate_up's size
        gate_up_RG = None if recompute else _gate_up(x_TH, w1_EGH, rows, offsets, weights_TK.shape[1])
        recompute_x, recompute_args = (None, (x_TH,)) if handle is None else handle
        if not (torch.compiler.is_compiling() or recompute or ctx.needs_input_grad[2]):
            recompute_args = ()  # x is for gate_up and the gradient of its weight alone
        ctx.save_for_backward(weights_TK, w1_EGH, w2_EHI, slots, rows, offsets, gate_up_RG, *recompute_args)
        ctx.options = activation, recompute_x
        if gate_up_RG is not None:
            ctx.mark_non_differentiable(gate_up_RG)
        placeholder_TH = x_TH.new_empty(()).expand(x_TH.shape)
        return placeholder_TH if recompute else (placeholder_TH, gate_up_RG)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_TH, _=None):
        weights_TK, w1_EGH, w2_EHI, slots, rows, offsets, gate_up_RG, *recompute_args = ctx.saved_tensors
        activation, recompute_x = ctx.options
        need_x, need_weights, need_w1, need_w2 = ctx.needs_input_grad[:4]
        top_k = weights_TK.shape[1]
        dx_TH = dw1_EGH = dw2_EHI = None
        overwrite = not torch.compiler.is_compiling() if gate_up_RG is None else may_overwrite(gate_up_RG)
        if gate_up_RG is None:
            gate_up_RG = _gate_up(recomputed(recompute_x, recompute_args), w1_EGH, rows, offsets, top_k)
        dy_RH = dispatch(dy_TH, rows, top_k)
        del dy_TH
        dh_RI = grouped_mm(dy_RH, w2_EHI, offsets) if need_x or need_weights or need_w1 else None
        d_gate_up_RG, d_weights_TK, h_RI = _backward(
            dh_RI, gate_up_RG, weights_TK, slots, activation, need_w2, overwrite
        )
        del gate_up_RG  # under activation checkpointing, the last reference
        if h_RI is not None:
            dw2_EHI = grouped_mm_outer(dy_RH, h_RI, offsets)
        del dy_RH, dh_RI, h_RI
        if need_w1 and d_gate_up_RG is not None:
            x_RH = dispatch(recomputed(recompute_x, recompute_args), rows, top_k)
            dw1_EGH = grouped_mm_outer(d_gate_up_RG, x_RH, offsets)
            del x_RH
        if need_x and d_gate_up_RG is not None:
            dx_TH = combine(grouped_mm(d_gate_up_RG, w1_EGH, offsets), rows, top_k)
        return dx_TH, d_weights_TK if need_weights else None, dw1_EGH, dw2_EHI, *[None] * 6


class _Combine(torch.autograd.Function):
    """placeholder: [T, H], for the gradient; gate_up: [R, G], or None to compute it from x -> y [T, H].

    Saves nothing: see `_Experts`.
    """

    @staticmethod
    def forward(ctx, placeholder_TH, gate_up_RG, x_TH, weights_TK, w1_EGH, w2_EHI, rows, offsets, activation):
        top_k = weights_TK.shape[1]
        if gate_up_RG is None:
            gate_up_RG = _gate_up(x_TH, w1_EGH, rows, offsets, top_k)
        h_RI = glu_forward(gate_up_RG, None, True, activation)
        del gate_up_RG
        return combine(grouped_mm(h_RI, w2_EHI.transpose(1, 2), offsets), rows, top_k, weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_TH):
        return dy_TH, *[None] * 8


def moe_experts(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up_proj: Tensor, down_proj: Tensor, *, activation: str = "silu",
    recompute: bool = False,
) -> Tensor:  # fmt: skip
    """Each token's weighted sum of the outputs of its experts, which are gated MLPs without biases.

    x: [T, H]; weights: [T, K], floating point; experts: [T, K], integers in [0, E): others make the token's row NaN on
    a GPU, and raise on a CPU; gate_up_proj: [E, 2I, H], rows [gate | up] of each expert; down_proj: [E, H, I];
    activation: as in `glu`; recompute: the backward recomputes gate_up, T K rows of 2I, with one more matmul. Returns
    [T, H] of x's dtype; under torch.autocast of the autocast dtype, to which x and the projections are cast. Raises
    InputError for shapes, dtypes or devices that do not fit.
    """
    if activation not in ACTIVATIONS:
        raise InputError(f"moe_experts: activation={activation!r}; supported are {', '.join(map(repr, ACTIVATIONS))}.")
    count, hidden, inner = down_proj.shape if down_proj.dim() == 3 else (0, 0, 0)
    if not count or x.dim() != 2 or x.shape[1] != hidden or gate_up_proj.shape != (count, 2 * inner, hidden):
        raise InputError(
            f"moe_experts: x has {describe(x)}, gate_up_proj {describe(gate_up_proj)}, down_proj "
            f"{describe(down_proj)}; expected [T, H], [E, 2I, H] and [E, H, I]."
        )
    layers = LinearOperand(gate_up_proj), LinearOperand(down_proj)
    ((gate_up_proj, _, _),) = check("moe_experts", "x", x, hidden, layers[:1], ("gate_up_proj ",), count)
    ((down_proj, _, _),) = check("moe_experts", "x", x, inner, layers[1:], ("down_proj ",), count)
    if (
        weights.dim() != 2
        or weights.shape != experts.shape
        or weights.shape[0] != x.shape[0]
        or not weights.is_floating_point()
        or experts.is_floating_point()
        or not x.device == weights.device == experts.device
    ):
        raise InputError(
            f"moe_experts: weights has {describe(weights)}, experts {describe(experts)}; expected both "
            f"[{x.shape[0]}, top_k] on {x.device}, floating point and integers, as `route` returns them for x."
        )
    x = x.to(autocast_dtype(x) or x.dtype)
    for size in (*down_proj.shape, weights.shape[1]):
        operator.index(size)  # constexprs of the kernels, which Dynamo must take for constants from here on
    if not use_triton(x):
        reference = functools.partial(moe_experts_reference, activation=activation)
        if recompute and torch.is_grad_enabled():
            reference = functools.partial(checkpoint, reference, use_reentrant=False, preserve_rng_state=False)
        return reference(x, weights, experts, gate_up_proj, down_proj)
    gate_up_proj, down_proj = gate_up_proj.contiguous(), down_proj.contiguous()
    weights = weights.contiguous()
    order = sort_by_expert(experts.contiguous(), down_proj.shape[0])
    output = _Experts.apply(x, weights, gate_up_proj, down_proj, *order, activation, recompute, handle_of(x))
    placeholder_TH, gate_up_RG = (output, None) if recompute else output
    constants = (t.detach() for t in (x, weights, gate_up_proj, down_proj))
    return _Combine.apply(placeholder_TH, gate_up_RG, *constants, *order[1:], activation)
