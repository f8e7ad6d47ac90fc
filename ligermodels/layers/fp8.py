"""Linear modules with products in FP8, and which of a model's are; kernels/linear/fp8_matmul.py computes them."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.kernels.linear.fp8_matmul import check_device as check_device
from ligermodels.kernels.linear.fp8_weight import (
    RECIPES as RECIPES,
    FP8Recipe as FP8Recipe,
    FP8Weight,
    WeightCache,
    recipe_of as recipe_of,
)
from ligermodels.kernels.linear.linear import linears
from ligermodels.kernels.linear.operand import LinearOperand
from ligermodels.layers.base import Layer
from ligermodels.layers.quantized import QuantizedLinear

_MULTIPLE = 16  # of cuBLAS


class FP8Linear(nn.Linear):
    """An nn.Linear whose products are in FP8, as its recipe `fp8` says; weight and bias stay as they are.

    Up to 64 rows without a gradient, as in decoding, are multiplied in the weight's dtype. Layers run several such
    modules as one fused op (linear.py). `FP8Linear.from_linear(linear, recipe)` turns an nn.Linear into one, in place.
    """

    fp8: FP8Recipe
    cache: WeightCache

    @staticmethod
    def from_linear(linear: Any, recipe: FP8Recipe) -> "FP8Linear":
        linear.__class__ = FP8Linear
        linear.fp8, linear.cache = recipe, WeightCache()
        return linear  # type: ignore[no-any-return]

    def to_linear(self) -> nn.Linear:
        """Turns this into the nn.Linear that it was, in place."""
        del self.fp8, self.cache
        self.__class__ = nn.Linear  # type: ignore[assignment]
        return self

    @property
    def operand(self) -> FP8Weight:
        """The weight for a fused op."""
        return FP8Weight(self._parameters["weight"], self.fp8, self.cache)

    def forward(self, x: Tensor) -> Tensor:
        if type(self.weight) not in (nn.Parameter, Tensor):
            raise InputError(f"fp8: the weight is a {type(self.weight).__name__}; products in FP8 need a plain tensor")
        return linears(x, [LinearOperand(FP8Weight(self.weight, self.fp8, self.cache), self.bias)])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8={self.fp8.name!r}"


def candidates(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, linear module) of those in `root` that may compute in FP8: with sizes that are multiples of 16, without
    what layers leave in 16 bits (`Layer.keep_bf16`): routers and small gates."""
    for path, parent in root.named_modules():
        kept = parent.keep_bf16 if isinstance(parent, Layer) else ()
        experts = parent.stacked if isinstance(parent, Layer) else ()
        for name, module in parent.named_children():
            linear = type(module) in (nn.Linear, FP8Linear) or (
                isinstance(module, QuantizedLinear) and module.kind == "fp8" and name not in experts
            )
            if linear and name not in kept and not (module.in_features % _MULTIPLE or module.out_features % _MULTIPLE):
                yield f"{path}.{name}".removeprefix("."), module


def use_fp8(root: nn.Module, recipe: FP8Recipe | None, *, frozen: bool = False) -> list[str]:
    """Turns the `candidates` in `root` into FP8Linear modules; None turns all back. Returns their names.

    frozen: of quantised modules of kind "fp8" alone, which then multiply in FP8."""
    names = []
    for name, module in [*candidates(root)]:
        if isinstance(module, QuantizedLinear) != frozen:
            continue
        if isinstance(module, QuantizedLinear):
            module.fp8 = recipe
        elif recipe is not None:
            FP8Linear.from_linear(module, recipe)
        elif isinstance(module, FP8Linear):
            module.to_linear()
        names.append(name)
    return names
