"""Weights that are multiplied in FP8: by which recipe, quantised when, and kept how long. fp8_matmul.py multiplies."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._triton import is_capturing
from ligermodels.kernels.linear._fp8_quantize import DTYPES, quantize_rows, tensor_scale
from ligermodels.kernels.linear.joint import as_one

Precision = Literal["fp8", "bf16"]


@dataclass(frozen=True)
class FP8Recipe:
    """How linear layers compute in FP8.

    scaling: "rowwise", or "tensorwise": a scale for each row of what is multiplied, or one. forward, dx, dw: "fp8" or
    "bf16", of each product. grad_dtype: of dy, "e4m3" or "e5m2", which has a larger range and an error of 5.2 %; all
    else is e4m3. powers_of_two: scales are rounded up to powers of two. fast_accumulation: the products, of "forward",
    "dx" and "dw", whose whole sums are kept in the tensor cores' own precision (use_fast_accum of torch._scaled_mm),
    where others are moved to fp32 on the way; dW has the longest sums, and is no faster so. keep_weights: the FP8
    numbers of weights stay in memory, 1 byte each, until a weight has another version; else each forward and each
    backward quantises them. Only where nothing changes a weight through `.data`, which makes no version: torch's
    optimizers and ours do not.
    """

    scaling: Literal["rowwise", "tensorwise"] = "rowwise"
    forward: Precision = "fp8"
    dx: Precision = "fp8"
    dw: Precision = "fp8"
    grad_dtype: Literal["e4m3", "e5m2"] = "e4m3"
    powers_of_two: bool = False
    fast_accumulation: tuple[str, ...] = ("forward", "dx")
    keep_weights: bool = False

    _CHOICES: ClassVar[dict[str, tuple[Any, ...]]] = {
        "scaling": ("rowwise", "tensorwise"),
        "grad_dtype": tuple(DTYPES),
        **dict.fromkeys(("forward", "dx", "dw"), ("fp8", "bf16")),
        **dict.fromkeys(("powers_of_two", "keep_weights"), (True, False)),
    }

    def __post_init__(self) -> None:
        for name, choices in self._CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise InputError(f"FP8Recipe: {name}={value!r}; expected one of {', '.join(map(repr, choices))}")
        fast, products = self.fast_accumulation, ("forward", "dx", "dw")
        if not isinstance(fast, tuple) or not set(fast) <= set(products):
            raise InputError(f"FP8Recipe: fast_accumulation={fast!r}; expected a tuple of {', '.join(products)}")
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
