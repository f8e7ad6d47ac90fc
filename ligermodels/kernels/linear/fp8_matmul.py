"""Products of linear layers in FP8, forward and backward, over weights in 16 or 32 bits or in frozen FP8.

    y  = q(x) q(W)^T          x [T, K] by rows, W [N, K] by rows (both scales of a "tensorwise" recipe: one of all)
    dx = q(dy s) p(W)         s [N]: the scales of W's rows; p(W): the FP8 numbers of W, transposed
    dW = q(dy)^T q(x)         by columns, since this sums over tokens

What differs from other FP8 training:
- W is quantised once, by rows, and serves y and dx. In dx a product sums over W's rows, where their scales would be
  lost; so dy takes the scales before it is quantised, which is exact in W. torchao and Transformer Engine quantise W a
  second time by columns: another rounding, and two passes over 16 bits instead of one over 8.
- W's FP8 numbers may be kept until its version changes (`WeightCache`): 1 byte per weight. Transposing them takes a
  pass of 2 bytes per weight in each backward.
- x is saved as it is in 16 bits, or recomputed from what a norm saved, and transposed in the backward. An FP8 copy of
  x would be beside these and not instead of them: what a norm, attention or the MLP has written is saved anyway.
- Weights of one input that are not joint in memory become one matrix as they are quantised, and one matmul reads it.

Products are rounded to bf16, as those of bf16 are. A Hopper GPU adds their terms with some 14 bits, and what it has
added in fp32. Each operand in e4m3 has an error of 2.6 %.
Source of the products: torch._scaled_mm, which the CPU has too; of "rowwise" and "tensorwise": torchao's recipes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._triton import cuda_capability, once_differentiable
from ligermodels.kernels.linear._fp8_quantize import (
    MULTIPLE,
    quantize_both,
    quantize_rows,
    quantize_transposed,
    tensor_scale,
    transposed,
)
from ligermodels.kernels.linear.fp8 import check_e4m3
from ligermodels.kernels.linear.fp8_weight import FP8Recipe, FP8Weight, frozen_numbers, quantized_weights
from ligermodels.kernels.linear.low_bit import LowBitWeight


def check_fp8(weights: Sequence[Any], dtype: torch.dtype, device: torch.device) -> None:
    """Raises InputError unless these weights [N, K] can be multiplied in FP8 with x of this dtype."""
    if dtype != torch.bfloat16:
        raise InputError(
            f"fp8: x is {dtype}; products in FP8 are rounded to bfloat16. Load the model with dtype=torch.bfloat16, or "
            "run it under torch.autocast(device, torch.bfloat16)"
        )
    if wrong := [tuple(w.shape) for w in weights if w.shape[0] % MULTIPLE or w.shape[1] % MULTIPLE]:
        raise InputError(f"fp8: a weight is {wrong[0]}; cuBLAS takes multiples of {MULTIPLE} alone. Leave it in bf16")
    check_device(device)


def check_device(device: torch.device) -> None:
    """Raises InputError for a GPU without FP8. The CPU has it, slowly."""
    check_e4m3(device, "fp8", "leave it out; adapters also train over a base in 4 bits: nf4")
    if device.type not in ("cpu", "meta") and (device.type != "cuda" or not cuda_capability(device.index)):
        raise InputError(
            f"fp8: this GPU has no matrix products in FP8 that we have run ({device} is not NVIDIA's); they need Ada, "
            "Hopper or later. Leave fp8 out"
        )


def multiply(
    left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], bias: Tensor | None = None, out: Tensor | None = None, *,
    fast: bool = False,
) -> Tensor:  # fmt: skip
    """a b^T + bias [M, N] in bf16, into `out` where given; left: a (q [M, K], scale), right: b (q [N, K], scale).

    bias: [N]. Scales are [M, 1] and [N, 1], or 0-dim.
    """
    (a, of_a), (b, of_b) = left, right
    if not a.numel():
        empty = a.new_empty(a.shape[0], b.shape[0], dtype=torch.bfloat16) if out is None else out
        return empty.zero_() if bias is None else empty.copy_(bias.expand_as(empty))
    options: Any = dict(bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast)
    if out is not None and out.is_contiguous() and out.dtype == torch.bfloat16:
        return torch._scaled_mm(a, b.t(), of_a, of_b.t(), out=out, **options)
    y = torch._scaled_mm(a, b.t(), of_a, of_b.t(), **options)
    return y if out is None else out.copy_(y)


def forward(
    x: Tensor, weight: tuple[Tensor, Tensor], bias: Tensor | None, out: Tensor | None, recipe: FP8Recipe
) -> Tensor:  # fmt: skip
    """y [T, N] of x [T, K]."""
    options: Any = dict(powers_of_two=recipe.powers_of_two)
    scale = tensor_scale([x], "e4m3", **options) if recipe.scaling == "tensorwise" else None
    rows = quantize_rows(x, scale=scale, **options)
    return multiply(rows, weight, bias, out, fast="forward" in recipe.fast_accumulation)


def quantize_gradient(
    dy: Tensor, weight_scale: Tensor | None, recipe: FP8Recipe, *, columns: bool
) -> dict[str, tuple[Tensor, Tensor]]:
    """{"rows": (q, scale) of dy [T, N] for dx, "columns": those for dW}, of which there is what is needed.

    weight_scale: of the weight's numbers, or None where no dx is computed in FP8. columns: whether dW is.
    """
    options: Any = dict(powers_of_two=recipe.powers_of_two)
    factor = None
    if recipe.scaling == "tensorwise":
        options["scale"] = tensor_scale([dy], recipe.grad_dtype, **options)
    elif weight_scale is not None:
        factor = weight_scale.view(-1)
    if weight_scale is None:
        return {"columns": quantize_transposed(dy, recipe.grad_dtype, **options)}
    if not columns:
        return {"rows": quantize_rows(dy, recipe.grad_dtype, factor=factor, **options)}
    of_rows, of_columns = quantize_both(dy, recipe.grad_dtype, factor=factor, **options)
    return {"rows": of_rows, "columns": of_columns}


def input_gradient(
    dy: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], out: Tensor | None, recipe: FP8Recipe,
    q_t: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """dx [T, K] from dy by rows; q_t: the transpose of the weight's numbers, where the caller has it."""
    q, scale = weight
    if recipe.scaling == "rowwise":  # dy has those of the rows of W
        scale = torch.ones(q.shape[1], 1, device=q.device)
    q_t = transposed(q) if q_t is None else q_t
    return multiply(dy, (q_t, scale), None, out, fast="dx" in recipe.fast_accumulation)


def weight_gradients(
    dy: tuple[Tensor, Tensor], x: Tensor, sizes: Sequence[int], needs: Sequence[bool], recipe: FP8Recipe
) -> list[Tensor | None]:  # fmt: skip
    """dW_i [N_i, K] in bf16 where needed, from dy by columns and x [T, K]; views of one buffer if all are needed."""
    options: Any = dict(powers_of_two=recipe.powers_of_two)
    of_x = tensor_scale([x], "e4m3", **options) if recipe.scaling == "tensorwise" else None
    columns, (numbers, dy_scale) = quantize_transposed(x, scale=of_x, **options), dy
    fast = "dw" in recipe.fast_accumulation
    if all(needs):
        return list(multiply(dy, columns, fast=fast).split_with_sizes(list(sizes)))
    scales = [dy_scale] * len(sizes) if dy_scale.dim() == 0 else dy_scale.split_with_sizes(list(sizes))
    each = zip(needs, numbers.split_with_sizes(list(sizes)), scales, strict=True)
    return [multiply((rows, scale), columns, fast=fast) if need else None for need, rows, scale in each]


# ---- Where torch has to see each layer ----


class _FP8Linear(torch.autograd.Function):
    """A layer by itself, which torch.compile traces. weight: a tensor; or q and scale of a frozen one, and None."""

    @staticmethod
    def forward(ctx, x, weight, q, scale, bias, recipe):
        ctx.save_for_backward(x, weight, q, scale)
        ctx.options = recipe, None if bias is None else bias.dtype
        rows = x.reshape(-1, x.shape[-1])
        bias = None if bias is None else bias.to(x.dtype)
        if recipe.forward == "bf16":
            y = torch.nn.functional.linear(rows, weight.to(x.dtype), bias)
        else:
            numbers = (q, scale) if weight is None else quantized_weights([weight], recipe)
            y = forward(rows, numbers, bias, None, recipe)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x, weight, q, scale), (recipe, bias_dtype) = ctx.saved_tensors, ctx.options
        rows, dx, dw, db = dy.reshape(-1, dy.shape[-1]), None, None, None
        need_x, need_weight = ctx.needs_input_grad[:2]
        numbers: Any = None
        in_fp8 = need_x and recipe.dx == "fp8", need_weight and recipe.dw == "fp8"
        if in_fp8[0]:
            numbers = (q, scale) if weight is None else quantized_weights([weight], recipe)
        if True in in_fp8:
            of_dy = quantize_gradient(rows, None if numbers is None else numbers[1], recipe, columns=in_fp8[1])
        if need_x:
            plain = numbers is None
            dx = rows @ weight.to(rows.dtype) if plain else input_gradient(of_dy["rows"], numbers, None, recipe)
            dx = dx.view_as(x)
        if need_weight:
            of_x = x.reshape(-1, x.shape[-1])
            if in_fp8[1]:
                (dw,) = weight_gradients(of_dy["columns"], of_x, [rows.shape[1]], [True], recipe)
            else:
                dw = rows.t() @ of_x
            dw = dw.to(weight.dtype)  # type: ignore[union-attr]
        if ctx.needs_input_grad[4]:
            db = rows.sum(0).to(bias_dtype)
        return dx, dw, None, None, db, None


def fp8_linear_reference(x: Tensor, weight: FP8Weight, bias: Tensor | None = None) -> Tensor:
    """One layer by the same products, without a kept weight; x [..., K] in bf16."""
    check_fp8([weight], x.dtype, x.device)
    source, recipe = weight.source, weight.recipe
    if isinstance(source, LowBitWeight):
        return _FP8Linear.apply(x, None, *frozen_numbers([source]), bias, recipe)
    return _FP8Linear.apply(x, source, None, None, bias, recipe)
