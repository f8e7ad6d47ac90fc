"""RMSNorm with the residual add before it in the same kernel."""

import torch
from torch import Tensor, nn

from ligermodels.kernels.rms_norm import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """Normalises the residual stream after adding a layer's output to it.

    forward(x [..., hidden_size], residual [..., hidden_size] or None) -> (normed, new residual); the new
    residual is x + residual, and x itself where there is none yet.

    eps is absolute, inside the root. The weight acts as offset + weight and starts so that this is 1: Gemma
    stores its weights around 0, with offset=1. casting: "llama" rounds to the input's dtype before the weight
    is applied, "gemma" after. elementwise_affine=False: no weight.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting: str = "llama",
        elementwise_affine: bool = True,
    ):
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps
        self.offset = offset
        self.casting = casting
        self.weight = nn.Parameter(torch.empty(hidden_size)) if elementwise_affine else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if residual is None:
            y = rms_norm(x, self.weight, eps=self.eps, offset=self.offset, casting=self.casting)
            return y, x
        return add_rms_norm(x, residual, self.weight, eps=self.eps, offset=self.offset, casting=self.casting)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, offset={self.offset}, casting={self.casting!r}"
