"""A frozen linear module with a low-rank adapter: LoRA, rsLoRA, DoRA, and QLoRA on 4-bit weights."""

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.kernels.operand import Adapter
from ligermodels.layers.nf4 import NF4Linear


class Factor(nn.Module):
    """x weight^T, in the dtype of x; weight: [out, in]."""

    def __init__(self, rows: int, columns: int, **options: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns, **options))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}"


class _Magnitude(nn.Module):
    """The norms that DoRA gives to the rows: weight [out]."""

    def __init__(self, norms: Tensor):
        super().__init__()
        self.weight = nn.Parameter(norms)


class Adapted(nn.Module):
    """y = weight x + bias + scale * lora_B(lora_A(dropout(x))), where weight and bias are frozen.

    scale: alpha / r, or alpha / sqrt(r) with rslora. DoRA has a `lora_magnitude_vector` m [out]:
    y = bias + m / n * (weight x + scale * lora_B(lora_A(x))), where n [out] are the norms of the rows of
    weight + scale * B A, without gradient. With x' = dropout(x) it is
    y = weight x + bias + (m / n - 1) weight x' + m / n * scale * lora_B(lora_A(x')).

    `Adapted.of(linear, ...)` turns an nn.Linear or NF4Linear into this class, in place: parameters keep their names.
    `plain()` undoes that. adapter_on=False turns the adapter off. Parameters: weight, bias, lora_A.weight [r, in],
    lora_B.weight [out, r] and lora_magnitude_vector.weight [out]: PEFT's names without its "default".
    Layers run several modules as one op (linear.py). Dropout, DoRA, and adapters on 4-bit weights under torch.compile
    are computed as written above instead.
    Sources: https://arxiv.org/abs/2106.09685, https://arxiv.org/abs/2312.03732 (rsLoRA), https://arxiv.org/abs/2402.09353
    (DoRA), and PEFT 0.21 for DoRA's dropout.
    """

    base_class: ClassVar[type[nn.Module]]
    in_features: int
    out_features: int
    weight: Any
    lora_A: Factor
    lora_B: Factor
    lora_dropout: nn.Dropout | None
    lora_magnitude_vector: _Magnitude | None
    alpha: float
    rslora: bool
    adapter_on: bool

    @staticmethod
    def of(
        linear: Any, *, r: int, alpha: float, dropout: float, rslora: bool, dora: bool, dtype: torch.dtype
    ) -> "Adapted":
        """`linear`, frozen, with an adapter of zeros. dora, not for 4-bit weights: starts from the weight's norms."""
        options: dict[str, Any] = dict(dtype=dtype, device=linear.weight.device)
        linear.__class__ = LoRANF4Linear if isinstance(linear, NF4Linear) else LoRALinear
        linear.requires_grad_(False)
        linear.alpha, linear.rslora, linear.adapter_on = alpha, rslora, True
        linear.lora_A = Factor(r, linear.in_features, **options)
        linear.lora_B = Factor(linear.out_features, r, **options)
        linear.lora_dropout = nn.Dropout(dropout).train(linear.training) if dropout else None
        linear.lora_magnitude_vector = None
        if dora:
            linear.lora_magnitude_vector = _Magnitude(linear.row_norms().to(dtype))
        return linear

    def plain(self) -> nn.Module:
        """Drops the adapter, and turns this into the module that it was, in place."""
        for name in ("lora_A", "lora_B", "lora_dropout", "lora_magnitude_vector", "alpha", "rslora", "adapter_on"):
            delattr(self, name)
        self.__class__ = self.base_class  # type: ignore[assignment]
        return self

    @property
    def r(self) -> int:
        return self.lora_A.weight.shape[0]

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)

    @property
    def dropout(self) -> float:
        return 0.0 if self.lora_dropout is None else self.lora_dropout.p

    @property
    def unfusable(self) -> str | None:
        """The part of the adapter that the fused ops do not compute, or None."""
        if not self.adapter_on:
            return None
        if self.lora_magnitude_vector is not None:
            return "DoRA"
        return "its adapter's dropout" if self.training and self.dropout else None

    @property
    def adapter(self) -> Adapter | None:
        """The adapter for a fused op; None if it is off."""
        return Adapter(self.lora_A.weight, self.lora_B.weight, self.scale) if self.adapter_on else None

    @torch.no_grad()
    def row_norms(self) -> Tensor:
        """The norms [out] of the rows of weight + scale * B A, in fp32 or fp64."""
        a, b, weight = self.lora_A.weight, self.lora_B.weight, self.weight
        dtype = torch.promote_types(torch.promote_types(weight.dtype, a.dtype), torch.float32)
        return torch.linalg.vector_norm(
            torch.addmm(weight.to(dtype), b.to(dtype), a.to(dtype), alpha=self.scale), dim=1
        )

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)  # type: ignore[misc]
        if not self.adapter_on:
            return y
        dropped = x if self.lora_dropout is None else self.lora_dropout(x)
        delta = self.scale * self.lora_B(self.lora_A(dropped))
        if self.lora_magnitude_vector is None:
            return y + delta
        scale = self.lora_magnitude_vector.weight / self.row_norms()
        base = F.linear(dropped, self.weight)
        return y + ((scale - 1) * base + scale * delta).to(y.dtype)

    def extra_repr(self) -> str:
        parts = [super().extra_repr(), f"r={self.r}, alpha={self.alpha}"]
        parts += ["rslora"] if self.rslora else []
        parts += [] if self.lora_magnitude_vector is None else ["DoRA"]
        return ", ".join(parts + ([] if self.adapter_on else ["off"]))


class LoRALinear(Adapted, nn.Linear):
    """An nn.Linear with an adapter."""

    base_class = nn.Linear


class LoRANF4Linear(Adapted, NF4Linear):
    """A linear module of 4-bit weights with an adapter: QLoRA, https://arxiv.org/abs/2305.14314."""

    base_class = NF4Linear
