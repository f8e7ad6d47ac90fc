"""The experts of a mixture: MLPs over the tokens that `route` sends them, with any operands.

    y[t] = sum over j of weights[t, j] * down[e] @ h,   h = act(gate) * up,   [gate | up] = gate_up[e] @ x[t],
    e = experts[t, j];   of experts without a gate h = act(up),   up = gate_up[e] @ x[t];   of gpt-oss: `ClampedSwiGLU`

An operand is a dense weight, or one in few bits, with or without a bias, and with or without an adapter: see `Adapter`.

Shapes, as in the suffixes of names: T tokens, K experts of each token, R = T K rows (sorted by expert), E experts, H
hidden size, I inner size, G = 2 I, or I without a gate; M and N are any sizes, r is the rank of an adapter. The layers
`first` and `last` are gate_up and down. A part of the experts has R <= T K rows.

What differs from a loop over experts:
- A counting sort of two small kernels sorts the rows by expert, in token order; each grouped matmul runs over all
  experts, and gathers the tokens' rows as it loads them (`_grouped_mm.py`). Nothing synchronises, and without atomics
  the results have the same bits each time.
- Gathering, not scattering: a kernel sums the K rows of each token in fp32, weighted, and rounds once. It also computes
  dx.
- Saved: x, or the inputs of the norm before it (`_recompute`), the routing, and gate_up unless it is recomputed, with
  the r numbers scale x A^T of each row; not h or the experts' outputs. Weights in few bits are saved as they are, and
  dequantised for each matmul. The gradient of a routing weight is <dy @ down, h> + <dy, bias> of its row: one kernel
  reads (gate_up, dh), writes d_gate_up, and overwrites dh with weight * h for d_down. Biases get sums of rows in fp32.
- Under activation checkpointing, the second run of a block ends before h, the down projection and the sum: `_Experts`
  saves everything, `_Combine` nothing.
- A part of all experts, for expert parallelism: the rows are the choices of its experts, and memory and work are those
  of these rows. Their number is known to the device alone, so the host waits for it, once in each run of the forward:
  the one case in which an op synchronises. Parts of all experts add up to the whole.
- Up to 64 tokens without gradients read the dense weights of the chosen experts alone (`_decode.py`), or their bits in
  MXFP4 (`_decode_mxfp4.py`); of experts in other formats only the chosen ones are dequantised, one copy for each row.

Bytes per token at 2-byte dtypes beside the matmuls: forward K (6 I + 2 H) + 2 H, backward K (12 I + 2 H) + 2 H.

Source: Shazeer et al. 2017, https://arxiv.org/abs/1701.06538. Gathering instead of scattering, and the gradient of the
weights from dh: Guo et al. 2025, https://arxiv.org/abs/2512.14080. Adapters: Hu et al. 2021,
https://arxiv.org/abs/2106.09685.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ligermodels.errors import InputError
from ligermodels.kernels._check import describe
from ligermodels.kernels._launch import launch
from ligermodels.kernels._math import Activation, activation, activation_name, unit
from ligermodels.kernels._recompute import handle_of, may_overwrite, recomputed
from ligermodels.kernels._triton import (
    is_capturing,
    last_dim_contiguous,
    next_power_of_2,
    once_differentiable,
    tl,
    triton,
    use_triton,
)
from ligermodels.kernels.experts._decode import decode_experts, decode_takes
from ligermodels.kernels.experts._decode_mxfp4 import decode_mxfp4, decode_mxfp4_takes
from ligermodels.kernels.experts._grouped_mm import Low, grouped_mm, grouped_mm_outer, tile_rows
from ligermodels.kernels.experts._order import Order, combine, sort_by_expert, sum_by_expert
from ligermodels.kernels.linear.activation import activate_reference
from ligermodels.kernels.linear.glu import glu_forward, glu_reference
from ligermodels.kernels.linear.linear import linears_reference
from ligermodels.kernels.linear.low_bit import LowBitWeight
from ligermodels.kernels.linear.operand import LinearOperand, autocast_dtype, check, choose


def experts_reference(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: LinearOperand, down: LinearOperand, *,
    activation: Activation, first_expert: int = 0, total_experts: int | None = None,
) -> Tensor:  # fmt: skip
    """`experts_of` in plain PyTorch; raises InputError for an expert outside of all experts."""
    _check_experts(experts, gate_up.weight.shape[0] if total_experts is None else total_experts)
    gated = gate_up.weight.shape[1] == 2 * down.weight.shape[2]
    unit = functools.partial(glu_reference if gated else activate_reference, activation=activation)
    y = torch.zeros((), dtype=weights.dtype, device=x.device)
    for expert, (first, last) in enumerate(zip(_each(gate_up, x), _each(down, x), strict=True), first_expert):
        here = experts == expert
        rows = torch.where(here.any(-1, keepdim=True), x, 0)  # tokens of other experts are zero, and get a weight of 0
        out = linears_reference(unit(linears_reference(rows, [first])), [last])
        y = y + out * (weights * here).sum(-1, keepdim=True)
    return y.to(x.dtype)


def moe_experts_reference(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up_proj: Tensor, down_proj: Tensor,
    gate_up_proj_bias: Tensor | None = None, down_proj_bias: Tensor | None = None, *, activation: Activation = "silu",
    first_expert: int = 0, total_experts: int | None = None,
) -> Tensor:  # fmt: skip
    """`moe_experts` in plain PyTorch; raises InputError for an expert outside of all experts."""
    operands = LinearOperand(gate_up_proj, gate_up_proj_bias), LinearOperand(down_proj, down_proj_bias)
    part: Any = dict(first_expert=first_expert, total_experts=total_experts)
    return experts_reference(x, weights, experts, *operands, activation=activation, **part)


def _each(operand: LinearOperand, x: Tensor) -> list[LinearOperand]:
    """The operand of each expert."""
    weight, bias, adapter = operand
    whole = weight.dequantize(x.dtype) if isinstance(weight, LowBitWeight) else weight
    biases = [None] * len(whole) if bias is None else bias
    adapters: list[Any] = [None] * len(whole)
    if adapter is not None:
        adapters = [adapter._replace(a=a, b=b) for a, b in zip(adapter.a, adapter.b, strict=True)]
    return [LinearOperand(*parts) for parts in zip(whole, biases, adapters, strict=True)]


def _check_experts(experts: Tensor, count: int) -> None:
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
    bias_ptr, dy_ptr, dy_stride, offsets_ptr,
    ACC: tl.constexpr, HAS_DH: tl.constexpr, EMIT: tl.constexpr, GATED: tl.constexpr, NAME: tl.constexpr,
    WIDTH: tl.constexpr, TOP_K: tl.constexpr, E: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One row: d_gate_up and the routing weight's gradient from dh = dy @ down; EMIT: overwrites dh with weight * h.

    bias_ptr: [E, HIDDEN] of down, a part of the expert's output: <dy, bias> is added to the weight's gradient.
    """
    dtype: tl.constexpr = gate_up_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    weight = tl.load(weights_ptr + slot).to(ACC)
    dot = tl.zeros([BLOCK], ACC)
    STRIDE: tl.constexpr = 2 * WIDTH if GATED else WIDTH
    for start in range(0, WIDTH, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < WIDTH
        gate = tl.load(gate_up_ptr + row * STRIDE + cols, mask=mask, other=0.0).to(ACC)
        if GATED:
            up = tl.load(gate_up_ptr + row * STRIDE + cols + WIDTH, mask=mask, other=0.0).to(ACC)
            h, slope, act = unit(gate, up, NAME, dtype == tl.float32)
        else:
            h, slope = activation(gate, NAME, dtype == tl.float32)
        if HAS_DH:
            dh = tl.load(dh_ptr + row * WIDTH + cols, mask=mask, other=0.0).to(ACC)
            tl.debug_barrier()  # all loads before the stores that may overwrite them: see glu.py
            dot += dh * h
            dh *= weight
            target = d_gate_up_ptr + row * STRIDE + cols
            if GATED:
                tl.store(target + WIDTH, (dh * act).to(dtype), mask=mask)
            tl.store(target, (dh * slope).to(dtype), mask=mask)
        if EMIT:
            tl.store(dh_ptr + row * WIDTH + cols, (h * weight).to(dtype), mask=mask)
    if HAS_DH:
        if bias_ptr is not None:
            e = tl.arange(0, BLOCK_E)
            expert = tl.sum((tl.load(offsets_ptr + 1 + e, mask=e < E, other=0x7FFFFFFF) <= row).to(tl.int32), 0)
            dy_ptr += (slot // TOP_K).to(tl.int64) * dy_stride
            for start in range(0, HIDDEN, BLOCK):
                cols = start + tl.arange(0, BLOCK)
                bias = tl.load(bias_ptr + expert.to(tl.int64) * HIDDEN + cols, mask=cols < HIDDEN, other=0.0).to(ACC)
                dot += bias * tl.load(dy_ptr + cols, mask=cols < HIDDEN, other=0.0).to(ACC)
        tl.store(d_weights_ptr + slot, tl.sum(dot, 0).to(d_weights_ptr.dtype.element_ty))


def _unit_backward(
    dh_RI: Tensor | None, gate_up_RG: Tensor, inner: int, weights_TK: Tensor, order: Order, activation: str,
    emit: bool, overwrite: bool, dy_TH: Tensor, bias_EH: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(d_gate_up, over gate_up if `overwrite`; d_weights; weight * h, over dh, if `emit`) from dh. bias: of down."""
    (n_rows, width), (n_experts, hidden) = gate_up_RG.shape, (order.offsets.shape[0] - 1, dy_TH.shape[1])
    d_gate_up_RG = d_weights_TK = None
    h_RI = gate_up_RG.new_empty((n_rows, inner)) if dh_RI is None else dh_RI
    if dh_RI is not None:
        d_gate_up_RG = gate_up_RG if overwrite else torch.empty_like(gate_up_RG)
        d_weights_TK = (torch.zeros_like if n_rows < weights_TK.numel() else torch.empty_like)(weights_TK)
    if n_rows:
        launch(
            _backward_kernel, (n_rows,),
            d_gate_up_RG, d_weights_TK, h_RI, gate_up_RG, weights_TK, order.slots,
            bias_EH, dy_TH, dy_TH.stride(0), order.offsets,
            tl.float64 if gate_up_RG.dtype == torch.float64 else tl.float32, dh_RI is not None, emit,
            operator.index(width) == 2 * inner, activation, inner, operator.index(weights_TK.shape[1]),
            operator.index(n_experts), operator.index(hidden),
            min(1024, next_power_of_2(inner)), next_power_of_2(n_experts), num_warps=4,
        )  # fmt: skip
    return d_gate_up_RG, d_weights_TK, h_RI if emit else None


class _Layer(NamedTuple):
    """A layer [N, M] of all experts, as the op takes it apart."""

    weight: Tensor | None  # [E, N, M]; None: `bits`
    bias: Tensor | None  # [E, N]
    a: Tensor | None  # [E, r, M]
    b: Tensor | None  # [E, N, r]
    bits: Any  # a LowBitWeight or None
    scale: float

    @classmethod
    def of(cls, operand: LinearOperand) -> "_Layer":
        weight, bias, adapter = operand
        a, b, scale = (None, None, 1.0) if adapter is None else adapter[:3]
        low_bit = isinstance(weight, LowBitWeight)
        return cls(None if low_bit else weight.contiguous(), bias, a, b, weight if low_bit else None, scale)

    @classmethod
    def of_parts(cls, tensors: Sequence[Any], bits: Any, scale: float) -> "_Layer":
        weight, bias, a, b = tensors
        return cls(weight, bias, a, b, bits, scale)

    @property
    def columns(self) -> int:
        """M, as an int because it is a constexpr of the kernels."""
        return operator.index((self.bits if self.weight is None else self.weight).shape[2])

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.bits.dequantize(dtype) if self.weight is None else self.weight

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A and B in the dtype of the computation, with contiguous rows of r columns of the output."""
        a, b = self.a.to(dtype).contiguous(), self.b.transpose(1, 2).to(dtype).contiguous()  # type: ignore[union-attr]
        return a, b.transpose(1, 2)

    def forward(self, x: Tensor, order: Order, top_k: int = 0) -> tuple[Tensor, Tensor | None]:
        """(y [R, N], scale x A^T [R, r]) of rows x [R, M], or with top_k of tokens [T, M]."""
        low = None
        if self.a is not None:
            a, b = self.factors(x.dtype)
            x_Rr = grouped_mm(x, a.transpose(1, 2), order, top_k=top_k, scale=self.scale)
            low = Low(x_Rr, b.transpose(1, 2))
        bias = None if self.bias is None else self.bias.contiguous()
        y_RN = grouped_mm(x, self.dense(x.dtype).transpose(1, 2), order, top_k=top_k, bias_EN=bias, low=low)
        return y_RN, None if low is None else low.x

    def backward(
        self, d: Tensor, order: Order, top_k: int = 0, *, need_x: bool = True
    ) -> tuple[Tensor | None, Tensor | None]:
        """(dx [R, M] if need_x, scale d B [R, r]) of the gradient d [R, N] of rows, or with top_k [T, N] of tokens."""
        low = None
        if self.a is not None:
            a, b = self.factors(d.dtype)
            low = Low(grouped_mm(d, b, order, top_k=top_k, scale=self.scale), a)
        dx_RM = grouped_mm(d, self.dense(d.dtype), order, top_k=top_k, low=low) if need_x else None
        return dx_RM, None if low is None else low.x


class _Experts(torch.autograd.Function):
    """The forward up to gate_up, and the whole backward. Returns a placeholder of y's shape, and gate_up [R, G], which
    with `recompute` only the backward computes.

    `_Combine` computes y, and passes y's gradient to the placeholder. Activation checkpointing ends the second run of a
    region when its last tensor is saved, and so does not run `_Combine` again.
    """

    @staticmethod
    def forward(ctx, x_TH, weights_TK, *rest):  # rest: the tensors of two layers, the order, and what is no tensor
        *order, activation, recompute, handle, first_bits, first_scale, last_bits, last_scale = rest[8:]
        if not torch.compiler.is_compiling():  # Dynamo cannot trace it, and there unused zeros cost nothing
            ctx.set_materialize_grads(False)  # or the backward would be handed zeros of gate_up's size
        first, gate_up_RG, low_Rr = _Layer.of_parts(rest[:4], first_bits, first_scale), None, None
        if not recompute:
            gate_up_RG, low_Rr = first.forward(x_TH, Order(*order), weights_TK.shape[1])
        recompute_x, recompute_args = (None, (x_TH,)) if handle is None else handle
        if not (torch.compiler.is_compiling() or recompute or ctx.needs_input_grad[2] or ctx.needs_input_grad[4]):
            recompute_args = ()  # x is for gate_up, and the gradients of weight and A alone
        ctx.save_for_backward(weights_TK, *rest[:8], *order, gate_up_RG, low_Rr, *recompute_args)
        ctx.options = activation, recompute_x, (first_bits, first_scale), (last_bits, last_scale)
        if gate_up_RG is not None:
            ctx.mark_non_differentiable(gate_up_RG)
        placeholder_TH = x_TH.new_empty(()).expand(x_TH.shape)
        return placeholder_TH if recompute else (placeholder_TH, gate_up_RG)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_TH, _=None):
        dy_TH = last_dim_contiguous(dy_TH)
        weights_TK, *tensors = ctx.saved_tensors
        gate_up_RG, low_Rr, *recompute_args = tensors[12:]
        order, top_k = Order(*tensors[8:12]), weights_TK.shape[1]
        activation, recompute_x, of_first, of_last = ctx.options
        first, last = _Layer.of_parts(tensors[:4], *of_first), _Layer.of_parts(tensors[4:8], *of_last)
        del tensors
        need_x, need_weights = ctx.needs_input_grad[:2]
        need_first, need_last = ctx.needs_input_grad[2:6], ctx.needs_input_grad[6:10]
        overwrite = not torch.compiler.is_compiling() if gate_up_RG is None else may_overwrite(gate_up_RG)
        if gate_up_RG is None:
            gate_up_RG, low_Rr = first.forward(recomputed(recompute_x, recompute_args), order, top_k)
        need_h = need_x or need_weights or any(need_first)
        dh_RI = d_low_Rr = None
        if need_h or need_last[2]:
            dh_RI, d_low_Rr = last.backward(dy_TH, order, top_k, need_x=need_h)
        emit = need_last[0] or need_last[2] or need_last[3]
        bias_EH = last.bias.contiguous() if need_weights and last.bias is not None else None
        d_gate_up_RG, d_weights_TK, h_RI = _unit_backward(
            dh_RI, gate_up_RG, last.columns, weights_TK, order, activation, emit, overwrite, dy_TH, bias_EH
        )
        del gate_up_RG, dh_RI  # under activation checkpointing, the last reference to gate_up
        d_last = _gradients(last, need_last, order, (dy_TH, top_k), (h_RI, 0), d_low_Rr, None, weights_TK)
        del dy_TH, h_RI, d_low_Rr
        dx_TH: Tensor | None = None
        d_first: list[Tensor | None] = [None] * 4
        if d_gate_up_RG is not None:
            dx_RH, d_low_Rr = first.backward(d_gate_up_RG, order, need_x=need_x)
            dx_TH = None if dx_RH is None else combine(dx_RH, order.rows, top_k)
            del dx_RH
            need_rows = need_first[0] or need_first[2]
            x_TH = recomputed(recompute_x, recompute_args) if need_rows else None
            rows = (d_gate_up_RG, 0), (x_TH, top_k)
            d_first = _gradients(first, need_first, order, *rows, d_low_Rr, low_Rr, None)
        return dx_TH, d_weights_TK if need_weights else None, *d_first, *d_last, *[None] * 11


def _gradients(
    layer: _Layer, need: tuple[bool, ...], order: Order, d: tuple[Tensor, int], x: tuple[Tensor | None, int],
    d_low_Rr: Tensor | None, low_Rr: Tensor | None, weights_TK: Tensor | None,
) -> list[Tensor | None]:  # fmt: skip
    """Those of weight, bias, A and B. d: the gradient of the layer's output, and x its input, each with the top_k of
    its tokens, or 0 for rows; one of the two are rows. weights: by what the rows of d are multiplied for the bias."""
    grads: list[Tensor | None] = [None] * 4
    if need[0]:  # the one that is gathered is the left factor
        dense = layer.weight.dtype  # type: ignore[union-attr]
        if x[1]:
            grads[0] = grouped_mm_outer(x[0], d[0], order, top_k=x[1], transposed=True, dtype=dense)  # type: ignore[arg-type]
        else:
            grads[0] = grouped_mm_outer(d[0], x[0], order, top_k=d[1], dtype=dense)  # type: ignore[arg-type]
    if need[1]:
        grads[1] = sum_by_expert(d[0], order, top_k=d[1], weights_TK=weights_TK, dtype=layer.bias.dtype)  # type: ignore[union-attr]
    if need[2]:
        grads[2] = grouped_mm_outer(x[0], d_low_Rr, order, top_k=x[1], transposed=True, dtype=layer.a.dtype)  # type: ignore[arg-type,union-attr]
    if need[3]:
        if low_Rr is None:
            a = layer.factors(d[0].dtype)[0].transpose(1, 2)
            low_Rr = grouped_mm(x[0], a, order, top_k=x[1], scale=layer.scale)  # type: ignore[arg-type]
        grads[3] = grouped_mm_outer(d[0], low_Rr, order, top_k=d[1], dtype=layer.b.dtype)  # type: ignore[union-attr]
    return grads


class _Combine(torch.autograd.Function):
    """placeholder: [T, H], for the gradient; gate_up: [R, G], or None to compute it from x -> y [T, H].

    Saves nothing: see `_Experts`.
    """

    @staticmethod
    def forward(ctx, placeholder_TH, gate_up_RG, x_TH, weights_TK, *rest):
        *tensors, activation, _, _, first_bits, first_scale, last_bits, last_scale = rest[8:]
        order, top_k = Order(*tensors), weights_TK.shape[1]
        if gate_up_RG is None:
            gate_up_RG, _ = _Layer.of_parts(rest[:4], first_bits, first_scale).forward(x_TH, order, top_k)
        last = _Layer.of_parts(rest[4:8], last_bits, last_scale)
        gated = operator.index(gate_up_RG.shape[1]) == 2 * last.columns
        h_RI = glu_forward(gate_up_RG, None, gated, activation)
        del gate_up_RG
        return combine(last.forward(h_RI, order)[0], order.rows, top_k, weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_TH):
        return dy_TH, *[None] * 22


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
        _check_experts(experts, count)
        index, experts = experts.unique(return_inverse=True)

    def select(operand: LinearOperand) -> LinearOperand:
        weight, bias, adapter = operand
        weight = weight.select(index) if isinstance(weight, LowBitWeight) else weight[index]
        if adapter is not None:
            adapter = adapter._replace(a=adapter.a[index], b=adapter.b[index])
        return LinearOperand(weight, None if bias is None else bias[index], adapter)

    return experts, tuple(map(select, operands))


def _check_part(
    x: Tensor, gate_up: LinearOperand, down: LinearOperand, first_expert: int, total_experts: int | None
) -> bool:
    """True if the operands have a part of all experts alone. Raises InputError for what does not fit, or cannot be."""
    count = down.weight.shape[0]
    if not 0 <= first_expert <= (count if total_experts is None else total_experts) - count:
        raise InputError(
            f"moe_experts: the weights are those of {count} experts from first_expert={first_expert} on, of "
            f"total_experts={total_experts}; expected 0 <= first_expert <= total_experts - {count}, and 0 without "
            "total_experts."
        )
    if total_experts is None or total_experts == count:
        return False
    for name, operand in (("gate_up_proj", gate_up), ("down_proj", down)):
        if not operand.is_dense:
            what = "has an adapter" if operand.adapter is not None else "is in few bits"
            raise InputError(
                f"moe_experts: {name} {what}, which a part of the experts does not take: experts spread over ranks "
                "train dense weights. For LoRA or frozen weights use a mesh without expert parallelism (ep)."
            )
    how = "under torch.compile" if torch.compiler.is_compiling() else None
    if x.is_cuda and how is None and is_capturing():
        how = "while a CUDA graph is captured"
    if how:
        raise InputError(
            f"moe_experts: experts {first_expert} to {first_expert + count - 1} of {total_experts} cannot be computed "
            f"{how}, since the host reads how many rows they have. Run them eagerly, or use a mesh without expert "
            "parallelism (ep)."
        )
    return True


def experts_of(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: LinearOperand, down: LinearOperand, *,
    activation: Activation = "silu", recompute: bool = False,
    first_expert: int = 0, total_experts: int | None = None,
) -> Tensor:  # fmt: skip
    """Each token's weighted sum of the outputs of its experts.

    x: [T, H]; weights: [T, K], floating point; experts: [T, K], integers in [0, E): others make the token's row NaN on
    a GPU, and raise on a CPU. gate_up, down: operands with weights [E, 2I, H], rows [gate | up] of each expert, or
    without a gate [E, I, H]; and [E, H, I]: dense or a LowBitWeight of that shape; biases [E, 2I] and [E, H], or None;
    adapters with A [E, r, M] and B [E, N, r] of a weight [E, N, M], or None, which are computed in x's dtype.
    activation: as in `glu`. recompute: the backward recomputes gate_up, R rows of 2I, with one more matmul.
    total_experts: the operands, which are then dense, have the E experts from first_expert on of this number, and
    `experts` are in [0, total_experts). Those of other experts add nothing and their weights' gradients are 0, so that
    parts add up to the whole. The host then waits once in a forward, for R: this raises InputError while a CUDA graph
    is captured and under torch.compile, which breaks its graph there. None, or E: all experts are here, and nothing
    synchronises.
    Returns [T, H] of x's dtype; under torch.autocast of the autocast dtype, to which x and dense weights are cast.
    Raises InputError for shapes, dtypes or devices that do not fit.
    """
    shape, (count, hidden, inner) = gate_up.weight.shape, down.weight.shape if len(down.weight.shape) == 3 else (0,) * 3
    fits = len(shape) == 3 and shape[0] == count and shape[1] in (inner, 2 * inner) and shape[2] == hidden
    if not (count and fits and x.dim() == 2 and x.shape[1] == hidden):
        raise InputError(
            f"moe_experts: x has {describe(x)}, gate_up_proj {_describe(gate_up.weight)}, down_proj "
            f"{_describe(down.weight)}; expected [T, H], [E, 2I, H] (without a gate [E, I, H]) and [E, H, I]."
        )
    (gate_up,) = check("moe_experts", "x", x, hidden, [gate_up], ("gate_up_proj ",), count)
    (down,) = check("moe_experts", "x", x, inner, [down], ("down_proj ",), count)
    is_part = _check_part(x, gate_up, down, first_expert, total_experts)
    gated = shape[1] == 2 * inner
    activation = activation_name("moe_experts", activation, gated=gated)
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
    if decode_mxfp4_takes(x, weights, experts, gate_up, down):
        return decode_mxfp4(x, weights, experts, gate_up, down, activation)
    if choose((gate_up, down), x, routed_rows=experts.numel()) == "selected_experts":
        experts, (gate_up, down) = _select((gate_up, down), experts)
    x = x.to(autocast_dtype(x) or x.dtype)
    for size in (*down.weight.shape, weights.shape[1]):
        operator.index(size)  # constexprs of the kernels, which Dynamo must take for constants from here on
    if gated and not is_part and gate_up.is_dense and down.is_dense:
        tensors = x, weights, experts, gate_up.weight, down.weight, gate_up.bias, down.bias
        if decode_takes(*tensors):
            return decode_experts(*tensors, activation=activation)
    part: Any = dict(first_expert=first_expert, total_experts=total_experts) if is_part else {}
    if not use_triton(x):
        reference: Any = functools.partial(experts_reference, activation=activation, **part)
        if recompute and torch.is_grad_enabled():
            reference = functools.partial(checkpoint, reference, use_reentrant=False, preserve_rng_state=False)
        return reference(x, weights, experts, gate_up, down)
    weights, (first, last) = weights.contiguous(), (_Layer.of(operand) for operand in (gate_up, down))
    order = sort_by_expert(experts.contiguous(), down.weight.shape[0], tile_rows(x), **part)
    rest = *order, activation, recompute, handle_of(x), *first[4:], *last[4:]
    output = _Experts.apply(x, weights, *first[:4], *last[:4], *rest)
    placeholder_TH, gate_up_RG = (output, None) if recompute else output
    constants = (None if t is None else t.detach() for t in (x, weights, *first[:4], *last[:4]))
    return _Combine.apply(placeholder_TH, gate_up_RG, *constants, *rest)


def _describe(weight: Any) -> str:
    return describe(weight) if isinstance(weight, Tensor) else f"{tuple(weight.shape)} in few bits"


def moe_experts(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up_proj: Tensor, down_proj: Tensor,
    gate_up_proj_bias: Tensor | None = None, down_proj_bias: Tensor | None = None, *, activation: Activation = "silu",
    recompute: bool = False, first_expert: int = 0, total_experts: int | None = None,
) -> Tensor:  # fmt: skip
    """`experts_of` for dense weights: gate_up_proj [E, 2I, H] or [E, I, H], and down_proj [E, H, I]; with biases
    [E, 2I] or [E, I], and [E, H], or None."""
    operands = LinearOperand(gate_up_proj, gate_up_proj_bias), LinearOperand(down_proj, down_proj_bias)
    part: Any = dict(first_expert=first_expert, total_experts=total_experts)
    return experts_of(x, weights, experts, *operands, activation=activation, recompute=recompute, **part)
