"""RMSNorm and LayerNorm, with the residual add before them in the same kernel."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.kernels._recompute import detach_handle, handle_of
from ligermodels.kernels.norm.layer_norm import add_layer_norm, layer_norm
from ligermodels.kernels.norm.rms_norm import add_rms_norm, rms_norm
from ligermodels.layers.base import REPLICATED, Draw, FusionContext, FusionPart, Layer, Shard, ones, zeros
from ligermodels.layers.linear import is_plain_call, why_not_fused
from ligermodels.layers.parallel import replicated

_NOT_GIVEN: Any = object()


def _without_stale_handle(norm: nn.Module, y: Tensor) -> Tensor:
    """y, which the next layer recomputes in its backward only if the norm's weight is available then; else it saves y.

    If FSDP or ZeRO-3 shards the norm by itself, its weight is gathered for its own backward, which comes later. They
    replace the class or the weight, or add hooks.
    """
    weight_stays = type(norm.weight) in (nn.Parameter, type(None))
    if not (type(norm) in (RMSNorm, LayerNorm) and weight_stays and is_plain_call(norm)) and handle_of(y) is not None:
        detach_handle(y)
    return y


class _Norm(Layer):
    """What both norms answer."""

    hidden_size: int

    def fusion_parts(self, at: FusionContext) -> Iterable[FusionPart]:
        reason = None if at.gathered else why_not_fused(self, RMSNorm, LayerNorm)
        yield FusionPart("residual add, norm", "one op" + ", its output saved" * bool(reason), True, reason or "")

    def saved_per_token(self, policy: str) -> int:
        return self.hidden_size  # the new residual


class RMSNorm(_Norm):
    """Normalises the residual stream after adding a layer's output to it; arguments in the order of torch.nn.RMSNorm.

    forward(x [..., hidden_size], residual [..., hidden_size] or None) -> (normed, new residual); the new residual is
    x + residual, or x itself where residual is None. forward(x) -> normed, as torch.nn.RMSNorm.

    eps is added inside the root. The factor is offset + weight and starts at 1: Gemma stores weights around 0, with
    offset=1. cast_before_weight: rounds to the input's dtype before the weight is applied, as Llama does; Gemma rounds
    after it. elementwise_affine=False: no weight. tp: the ranks of tensor parallel; each normalises its own tokens or
    heads.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        *,
        offset: float = 0.0,
        cast_before_weight: bool = True,
    ):
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps
        self.offset = offset
        self.cast_before_weight = cast_before_weight
        self.weight = nn.Parameter(torch.empty(hidden_size)) if elementwise_affine else None
        self.reset_parameters()

    def init_weights(self, draw: Draw) -> None:
        draw(self.weight, lambda weight, _: weight.fill_(1.0 - self.offset))

    def shards(self) -> Mapping[str, Shard]:
        return {} if self.weight is None else {"weight": REPLICATED}

    def forward(self, x: Tensor, residual: Tensor | None = _NOT_GIVEN) -> Any:
        weight = replicated(self.weight, self.tp)
        if residual is None or residual is _NOT_GIVEN:
            y = rms_norm(x, weight, eps=self.eps, offset=self.offset, cast_before_weight=self.cast_before_weight)
            y = _without_stale_handle(self, y)
            return y if residual is _NOT_GIVEN else (y, x)
        y, residual = add_rms_norm(
            x, residual, weight, eps=self.eps, offset=self.offset, cast_before_weight=self.cast_before_weight
        )
        return _without_stale_handle(self, y), residual

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, offset={self.offset}, cast_before_weight={self.cast_before_weight}"


class LayerNorm(_Norm):
    """Layer normalisation of the residual stream: forward as in `RMSNorm`, arguments those of torch.nn.LayerNorm."""

    def __init__(self, size: int, eps: float = 1e-5, elementwise_affine: bool = True, bias: bool = True):
        super().__init__()
        self.hidden_size = size
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size)) if elementwise_affine else None
        self.bias = nn.Parameter(torch.empty(size)) if elementwise_affine and bias else None
        self.reset_parameters()

    def init_weights(self, draw: Draw) -> None:
        draw(self.weight, ones)
        draw(self.bias, zeros)

    def forward(self, x: Tensor, residual: Tensor | None = _NOT_GIVEN) -> Any:
        if residual is None or residual is _NOT_GIVEN:
            y = _without_stale_handle(self, layer_norm(x, self.weight, self.bias, eps=self.eps))
            return y if residual is _NOT_GIVEN else (y, x)
        y, residual = add_layer_norm(x, residual, self.weight, self.bias, eps=self.eps)
        return _without_stale_handle(self, y), residual

    def extra_repr(self) -> str:
        affine, bias = self.weight is not None, self.bias is not None
        return f"{self.hidden_size}, eps={self.eps}, elementwise_affine={affine}, bias={bias}"
