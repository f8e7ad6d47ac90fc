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

Products are rounded to bf16, as those of bf16 are, from sums in fp32. Each operand in e4m3 has an error of 2.6 %.
Source of the products: torch._scaled_mm, which the CPU has too; of "rowwise" and "tensorwise": torchao's recipes.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._triton import cuda_capability, is_capturing, once_differentiable
from ligermodels.kernels.linear._fp8_quantize import (
    DTYPES,
    MULTIPLE,
    quantize_reference,
    quantize_rows,
    quantize_transposed,
    tensor_scale,
    transposed,
)
from ligermodels.kernels.linear.joint import as_one
from ligermodels.kernels.linear.low_bit import LowBitWeight

Precision = Literal["fp8", "bf16"]


@dataclass(frozen=True)
class FP8Recipe:
    """How linear layers compute in FP8.

    scaling: "rowwise", or "tensorwise": a scale for each row of what is multiplied, or one. forward, dx, dw: "fp8" or
    "bf16", of each product. grad_dtype: of dy, "e4m3" or "e5m2", which has a larger range and an error of 5.2 %; all
    else is e4m3. powers_of_two: scales are rounded up to powers of two. fast_accumulation: of which products tensor
    cores keep partial sums in some 22 bits: "none", "forward" or "all". keep_weights: the FP8 numbers of weights stay
    in memory, 1 byte each, until a weight has another version; else each forward and each backward quantises them. Only
    where nothing changes a weight through `.data`, which makes no version: torch's optimizers and ours do not.
    """

    scaling: Literal["rowwise", "tensorwise"] = "rowwise"
    forward: Precision = "fp8"
    dx: Precision = "fp8"
    dw: Precision = "fp8"
    grad_dtype: Literal["e4m3", "e5m2"] = "e4m3"
    powers_of_two: bool = False
    fast_accumulation: Literal["none", "forward", "all"] = "forward"
    keep_weights: bool = False

    _CHOICES: ClassVar[dict[str, tuple[Any, ...]]] = {
        "scaling": ("rowwise", "tensorwise"),
        "grad_dtype": tuple(DTYPES),
        "fast_accumulation": ("none", "forward", "all"),
        **dict.fromkeys(("forward", "dx", "dw"), ("fp8", "bf16")),
        **dict.fromkeys(("powers_of_two", "keep_weights"), (True, False)),
    }

    def __post_init__(self) -> None:
        for name, choices in self._CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise InputError(f"FP8Recipe: {name}={value!r}; expected one of {', '.join(map(repr, choices))}")
        if "fp8" not in (self.forward, self.dx, self.dw):
            raise InputError("FP8Recipe: forward, dx and dw are all 'bf16'; leave the recipe out")

    @property
    def name(self) -> str:
        """Such as "rowwise, dw in bf16"."""
        plain = [product for product in ("forward", "dx", "dw") if getattr(self, product) == "bf16"]
        return self.scaling + f", {' and '.join(plain)} in bf16" * bool(plain)


RECIPES = {
    "rowwise": FP8Recipe(),
    "tensorwise": FP8Recipe("tensorwise", grad_dtype="e5m2"),
    "rowwise-bf16-dw": FP8Recipe(dw="bf16"),
}


def recipe_of(fp8: "str | FP8Recipe") -> FP8Recipe:
    """The recipe of a name. Raises InputError."""
    if isinstance(fp8, FP8Recipe):
        return fp8
    if not isinstance(fp8, str) or fp8 not in RECIPES:
        raise InputError(f"fp8={fp8!r}; expected {', '.join(map(repr, RECIPES))} or an FP8Recipe")
    return RECIPES[fp8]


# ---- Weights ----


class WeightCache:
    """The FP8 numbers of weights, as long as these are the same tensors, in the same memory, of the same version.

    Every change of a parameter in place raises its version, as optimizers make it; one through `.data` does not, and
    needs `clear`. Nothing is kept where versions say too little: where a process group exists, since FSDP2 refills the
    memory of a weight without a new version, and from the first capture of a CUDA graph on, since a replayed step of an
    optimizer has none. A captured forward quantises the weights inside of its graph.
    """

    __slots__ = ("_captured", "_key", "_numbers", "_weights")

    def __init__(self) -> None:
        self._captured = False
        self.clear()

    def clear(self) -> None:
        self._weights: tuple[Any, ...] = ()
        self._key: Any = None
        self._numbers: tuple[Tensor, Tensor] | None = None

    def get(self, weights: Sequence[Tensor], recipe: FP8Recipe) -> tuple[Tensor, Tensor]:
        """`quantized_weights` of these."""
        if not self._is_open(weights, recipe):
            self.clear()
            return quantized_weights(weights, recipe)
        key = recipe, [(w.data_ptr(), w._version, w.dtype, w.shape) for w in weights]
        if self._numbers is None or key != self._key or not self._are_alive():
            self.clear()  # before there is another
            self._numbers = quantized_weights(weights, recipe)
            self._key, self._weights = key, tuple([weakref.ref(w.untyped_storage()) for w in weights])
        return self._numbers

    def _is_open(self, weights: Sequence[Tensor], recipe: FP8Recipe) -> bool:
        self._captured = self._captured or _is_captured(weights[0])
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        plain = not any(w.is_inference() for w in weights)
        return recipe.keep_weights and plain and not (distributed or self._captured)

    def _are_alive(self) -> bool:
        """True if the memory of the weights has not been freed: else other weights may be in the same place."""
        return all([storage() is not None for storage in self._weights])

    def __deepcopy__(self, memo: Any) -> "WeightCache":
        return WeightCache()

    def __reduce__(self) -> tuple:
        return WeightCache, ()


def _is_captured(weight: Tensor) -> bool:
    return weight.is_cuda and is_capturing()


@dataclass(frozen=True, eq=False, slots=True)
class FP8Weight:
    """A weight [N, K] that is multiplied in FP8; ops take it in place of a tensor.

    source: a tensor, which may be trained, or a frozen `QuantizedWeight` of kind "fp8", whose numbers are used. cache:
    where the numbers of a tensor are kept, if anywhere.
    """

    source: Any
    recipe: FP8Recipe
    cache: WeightCache | None = None

    @property
    def shape(self) -> Any:
        return self.source.shape

    @property
    def device(self) -> torch.device:
        return self.source.device

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def requires_grad(self) -> bool:
        return bool(self.source.requires_grad)


def quantized_weights(weights: Sequence[Tensor], recipe: FP8Recipe) -> tuple[Tensor, Tensor]:
    """(q [sum N_i, K], scale [sum N_i, 1], or 0-dim if tensorwise) of weights [N_i, K], in one matrix."""
    options: Any = dict(powers_of_two=recipe.powers_of_two)
    if (whole := as_one(weights)) is not None:
        weights = [whole]
    with torch.no_grad():
        scale = tensor_scale(list(weights), "e4m3", **options) if recipe.scaling == "tensorwise" else None
        if len(weights) == 1:
            return quantize_rows(weights[0].detach(), scale=scale, **options)
        sizes = [w.shape[0] for w in weights]
        q = torch.empty(sum(sizes), weights[0].shape[1], dtype=torch.float8_e4m3fn, device=weights[0].device)
        scales = torch.empty(sum(sizes), 1, device=q.device) if scale is None else scale
        for i, w in enumerate(weights):
            start = sum(sizes[:i])
            rows = slice(start, start + sizes[i])
            quantize_rows(
                w.detach(), scale=scale, out=(q[rows], scales if scale is not None else scales[rows]), **options
            )
    return q, scales


def frozen_numbers(weights: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """(q [sum N_i, K], scale [sum N_i, 1]) of `QuantizedWeight`s of kind "fp8": views where they are joint."""
    whole = as_one(weights)
    if whole is None:
        return torch.cat([w.packed for w in weights]), torch.cat([w.scale for w in weights])[:, None]
    return whole.packed, whole.scale[:, None]


# ---- Products ----


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
    if device.type in ("cpu", "meta"):
        return
    capability = cuda_capability(device.index) if device.type == "cuda" else 0
    if capability < 89:
        what = f"compute capability {capability // 10}.{capability % 10}" if capability else f"{device} is not NVIDIA's"
        raise InputError(
            f"fp8: this GPU has no matrix products in FP8 that we have run ({what}); they need Ada, Hopper or later. "
            "Leave fp8 out"
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
    return multiply(rows, weight, bias, out, fast=recipe.fast_accumulation != "none")


def input_gradient(
    dy: Tensor, weight: tuple[Tensor, Tensor], out: Tensor | None, recipe: FP8Recipe
) -> Tensor:  # fmt: skip
    """dx [T, K] from dy [T, N]."""
    q, scale = weight
    options: Any = dict(powers_of_two=recipe.powers_of_two)
    if recipe.scaling == "tensorwise":
        rows = quantize_rows(dy, recipe.grad_dtype, scale=tensor_scale([dy], recipe.grad_dtype, **options), **options)
    else:
        rows = quantize_rows(dy, recipe.grad_dtype, factor=scale.view(-1), **options)
        scale = torch.ones(q.shape[1], 1, device=q.device)
    return multiply(rows, (transposed(q), scale), None, out, fast=recipe.fast_accumulation == "all")


def weight_gradients(
    dy: Tensor, x: Tensor, sizes: Sequence[int], needs: Sequence[bool], recipe: FP8Recipe
) -> list[Tensor | None]:  # fmt: skip
    """dW_i [N_i, K] in bf16 where needed, from dy [T, sum N_i] and x [T, K]; views of one buffer if all are needed."""
    options: Any = dict(powers_of_two=recipe.powers_of_two)
    of_dy = of_x = None
    if recipe.scaling == "tensorwise":
        of_dy, of_x = tensor_scale([dy], recipe.grad_dtype, **options), tensor_scale([x], "e4m3", **options)
    (dy, dy_scale) = quantize_transposed(dy, recipe.grad_dtype, scale=of_dy, **options)
    columns = quantize_transposed(x, scale=of_x, **options)
    fast = recipe.fast_accumulation == "all"
    if all(needs):
        return list(multiply((dy, dy_scale), columns, fast=fast).split_with_sizes(list(sizes)))
    scales = [dy_scale] * len(sizes) if dy_scale.dim() == 0 else dy_scale.split_with_sizes(list(sizes))
    each = zip(needs, dy.split_with_sizes(list(sizes)), scales, strict=True)
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
        if ctx.needs_input_grad[0]:
            if recipe.dx == "bf16":
                dx = rows @ weight.to(rows.dtype)
            else:
                numbers = (q, scale) if weight is None else quantized_weights([weight], recipe)
                dx = input_gradient(rows, numbers, None, recipe)
            dx = dx.view_as(x)
        if ctx.needs_input_grad[1]:
            of_x = x.reshape(-1, x.shape[-1])
            if recipe.dw == "bf16":
                dw = rows.t() @ of_x
            else:
                (dw,) = weight_gradients(rows, of_x, [rows.shape[1]], [True], recipe)
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


__all__ = ["RECIPES", "FP8Recipe", "FP8Weight", "WeightCache", "fp8_linear_reference", "quantize_reference"]
