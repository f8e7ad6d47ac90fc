"""BitNet b1.58, experimental: linear layers whose weights are -1, 0 and 1 times one number, and whose inputs are int8.

- BitLinear trains: it holds the weight in floating point, rounds it and its input at every call, and passes the
  gradient through the rounding as if there were none (the straight-through estimator).
- PackedBitLinear, which BitLinear.pack() gives, serves: four weights in a byte, int8 matmuls, no floating-point weight.

The norm that BitNet puts before the rounding is not in here: pass its output in.

Source: Ma et al. 2024, https://arxiv.org/abs/2402.17764; rounding, eps and file layout as in integrations/bitnet.py
of https://github.com/huggingface/transformers.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.experimental.bitnet.int2_matmul import int2_matmul, pack_int2
from ligermodels.experimental.bitnet.quantize import quantize_int8

MEAN_EPS = 1e-5
"""Below it the mean |w| of a weight counts as this, as in the reference implementation."""


class _StraightThrough(torch.autograd.Function):
    """rounded(x), with the gradient of x."""

    @staticmethod
    def forward(ctx, x: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
        return rounded(x)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def _int8(x: Tensor) -> Tensor:
    q, scale = quantize_int8(x)
    return (q * scale[..., None]).to(x.dtype)


def _ternary(weight: Tensor) -> tuple[Tensor, Tensor]:
    """-1, 0 and 1 in fp32 (fp64 for fp64), and the number in the weight's dtype, [1], that they are multiplied with."""
    w = weight if weight.dtype == torch.float64 else weight.float()
    factor = 1 / w.abs().mean().clamp(min=MEAN_EPS)
    return (w * factor).round().clamp(-1, 1), (1 / factor).to(weight.dtype).view(1)


def _ternary_times_scale(weight: Tensor) -> Tensor:
    ternary, scale = _ternary(weight)
    return ternary.to(weight.dtype) * scale


class BitLinear(nn.Linear):
    """F.linear of the input rounded to int8, each row by its largest value, and the weight rounded to -1, 0 and 1 times
    its mean absolute value; the bias is not rounded. [..., in_features] -> [..., out_features]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__(in_features, out_features, bias=bias)

    def forward(self, input: Tensor) -> Tensor:
        x = _StraightThrough.apply(input, _int8)
        return F.linear(x, _StraightThrough.apply(self.weight, _ternary_times_scale), self.bias)

    @torch.no_grad()
    def pack(self) -> "PackedBitLinear":
        """The same layer for inference; this one stays as it is."""
        ternary, scale = _ternary(self.weight)
        packed = PackedBitLinear(self.in_features, self.out_features, bias=self.bias is not None)
        packed.weight, packed.weight_scale = pack_int2(ternary), scale
        packed.bias = None if self.bias is None else self.bias.detach().clone()
        return packed.train(self.training)


class PackedBitLinear(nn.Module):
    """BitLinear for inference: [..., in_features] -> [..., out_features] of the input's dtype.

    Buffers: weight uint8 [ceil(out_features / 4), in_features], see kernels/int2_matmul.py; weight_scale [1], which
    multiplies; bias [out_features] or None. Names, shapes and layout are those of packed BitNet checkpoints, so that
    their state dicts load. Where quantization_config says linear_class "autobitlinear", so does weight_scale; where it
    says "bitlinear" (or nothing), the file holds 1 / scale: pass inverse_scale=True.

    Raises InputError for inputs that do not fit, and for one that wants a gradient, since there is none.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, bias: bool = False, *, inverse_scale: bool = False):
        super().__init__()
        self.in_features, self.out_features, self.inverse_scale = in_features, out_features, inverse_scale
        self.register_buffer("weight", torch.full((-(-out_features // 4), in_features), 0b01010101, dtype=torch.uint8))
        self.register_buffer("weight_scale", torch.ones(1))
        self.register_buffer("bias", torch.zeros(out_features) if bias else None)

    def forward(self, input: Tensor) -> Tensor:
        if input.requires_grad and torch.is_grad_enabled():
            raise InputError(
                "PackedBitLinear: the input requires a gradient, and integers have none; run under torch.no_grad(), or "
                "train the BitLinear that this was packed from"
            )
        device_type = input.device.type
        autocast = torch.is_autocast_enabled(device_type) and input.dtype != torch.float64
        q, scale = quantize_int8(input)
        return int2_matmul(
            q, self.weight, scale_a=scale, bias=self.bias, out_features=self.out_features,
            scale_w=self.weight_scale.reciprocal() if self.inverse_scale else self.weight_scale,
            out_dtype=torch.get_autocast_dtype(device_type) if autocast else input.dtype,
        )  # fmt: skip

    def extra_repr(self) -> str:
        inverse = ", inverse_scale=True" if self.inverse_scale else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}{inverse}"
        )
