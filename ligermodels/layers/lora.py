"""A frozen linear module with a low-rank adapter: LoRA, rsLoRA, DoRA, and QLoRA on 4-bit weights."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.kernels.linear.operand import Adapter
from ligermodels.layers.fp8 import FP8Linear
from ligermodels.layers.quantized import QuantizedLinear


class Factor(nn.Module):
    """x weight^T in the dtype of x; weight: [out, in]. DoRA's magnitudes [out] are stored in one that is not called."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.weight.shape[::-1]))


def scale_of(alpha: float, r: int, rslora: bool) -> float:
    """The factor of an adapter's output: alpha / r, or alpha / sqrt(r) with rslora."""
    return alpha / (math.sqrt(r) if rslora else r)


class Adapted(nn.Module):
    """y = weight x + bias + scale * lora_B(lora_A(dropout(x))), where weight and bias are frozen.

    DoRA has a `lora_magnitude_vector` m [out]: y = bias + m / n * (weight x + scale * lora_B(lora_A(x))), where n [out]
    are the norms of the rows of weight + scale * B A, without gradient. With x' = dropout(x) it is
    y = weight x + bias + (m / n - 1) weight x' + m / n * scale * lora_B(lora_A(x')).

    `Adapted.of(linear, ...)` turns an nn.Linear, FP8Linear or QuantizedLinear into this class, in place: parameters
    keep their names. `plain()` undoes that. adapter_on=False turns the adapter off. Parameters: weight, bias,
    lora_A.weight [r, in], lora_B.weight [out, r] and lora_magnitude_vector.weight [out]: PEFT's names without its
    "default".
    Layers run several such modules as one fused op (linear.py), but dropout and DoRA run module by module.
    Sources: https://arxiv.org/abs/2106.09685, https://arxiv.org/abs/2312.03732 (rsLoRA), https://arxiv.org/abs/2402.09353
    (DoRA), and PEFT 0.21 for DoRA's dropout.
    """

    weight: Any
    r: int
    alpha: float
    rslora: bool
    lora_scale: float
    adapter_on: bool
    lora_A: Factor
    lora_B: Factor
    lora_dropout: nn.Dropout | None
    lora_magnitude_vector: Factor | None

    @staticmethod
    def of(
        linear: Any, *, r: int, alpha: float, dropout: float, rslora: bool, dora: bool, dtype: torch.dtype
    ) -> "Adapted":
        """`linear`, frozen, with an adapter of zeros. dora (dense weights only): magnitudes start at the row norms."""
        options: dict[str, Any] = dict(dtype=dtype, device=linear.weight.device)
        linear.__class__ = _WITH_ADAPTER[type(linear)]
        linear.requires_grad_(False)
        linear.r, linear.alpha, linear.rslora, linear.adapter_on = r, alpha, rslora, True
        linear.lora_scale = scale_of(alpha, r, rslora)
        linear.lora_A = Factor(torch.zeros(r, linear.in_features, **options))
        linear.lora_B = Factor(torch.zeros(linear.out_features, r, **options))
        linear.lora_dropout = nn.Dropout(dropout).train(linear.training) if dropout else None
        linear.lora_magnitude_vector = Factor(linear.row_norms().to(dtype)) if dora else None
        return linear

    def plain(self) -> nn.Module:
        """Drops the adapter, and turns this into the module that it was, in place."""
        for name in ("lora_A", "lora_B", "lora_dropout", "lora_magnitude_vector"):
            delattr(self, name)
        self.__class__ = _WITHOUT_ADAPTER[type(self)]
        return self

    @property
    def unfusable(self) -> str | None:
        """The part of the adapter that the fused ops do not compute, or None."""
        if self.lora_magnitude_vector is not None and self.adapter_on:
            return "DoRA"
        dropped = self.training and self.adapter_on and self.lora_dropout is not None
        return "its adapter's dropout" if dropped else None

    @property
    def adapter(self) -> Adapter | None:
        """The adapter for a fused op; None if it is off."""
        return Adapter(self.lora_A.weight, self.lora_B.weight, self.lora_scale) if self.adapter_on else None

    @torch.no_grad()
    def row_norms(self) -> Tensor:
        """The norms [out] of the rows of weight + scale * B A, in fp32 or fp64."""
        a, b, weight = self.lora_A.weight, self.lora_B.weight, self.weight
        dtype = torch.promote_types(torch.promote_types(weight.dtype, a.dtype), torch.float32)
        whole = torch.addmm(weight.to(dtype), b.to(dtype), a.to(dtype), alpha=self.lora_scale)
        return torch.linalg.vector_norm(whole, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)  # type: ignore[misc]
        if not self.adapter_on:
            return y
        dropped = x if self.lora_dropout is None else self.lora_dropout(x)
        delta = self.lora_scale * self.lora_B(self.lora_A(dropped))
        if self.lora_magnitude_vector is None:
            return y + delta
        scale = self.lora_magnitude_vector.weight / self.row_norms()
        base = F.linear(dropped, self.weight)
        return y + ((scale - 1) * base + scale * delta).to(y.dtype)

    def extra_repr(self) -> str:
        kind = " DoRA" * (self.lora_magnitude_vector is not None) + " rslora" * self.rslora
        return f"{super().extra_repr()}, r={self.r}, alpha={self.alpha}{kind}" + ", off" * (not self.adapter_on)


class LoRALinear(Adapted, nn.Linear):
    """An nn.Linear with an adapter."""


class LoRAFP8Linear(Adapted, FP8Linear):
    """A linear module with products in FP8, and an adapter in 16 bits."""


class LoRAQuantizedLinear(Adapted, QuantizedLinear):
    """A linear module of 4- or 8-bit weights with an adapter: QLoRA, https://arxiv.org/abs/2305.14314."""


_WITH_ADAPTER: Any = {nn.Linear: LoRALinear, FP8Linear: LoRAFP8Linear, QuantizedLinear: LoRAQuantizedLinear}
_WITHOUT_ADAPTER: Any = {adapted: plain for plain, adapted in _WITH_ADAPTER.items()}
