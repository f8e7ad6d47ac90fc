"""Heads of tokens in fp8, as a KV cache may hold them: x = q * scale, q in e4m3, one bf16 scale for each head.

The largest of a head becomes 448. The scale is rounded before it divides: so it costs 2 bytes and errs as little as one
of fp32, by 2.1 % of the keys (rms) and 2.4 % of the values of SmolLM2-135M, where a power of two errs by 2.6 % of both.
"""

import torch
from torch import Tensor

from ligermodels.kernels._triton import tl, triton

DTYPE, SCALE_DTYPE = torch.float8_e4m3fn, torch.bfloat16
_TINY = 1e-30  # in place of the largest of a head of zeros


def are_scales(scales: tuple[Tensor, Tensor], of: Tensor) -> bool:
    """Whether these are scales of keys and of values that have the shape of `of` [B, C, HK, D], in the same strides."""
    a, b = scales
    return (
        a.shape == b.shape == of.shape[:3] and a.dtype == b.dtype == SCALE_DTYPE and a.device == b.device == of.device
        and a.stride() == b.stride() and a.stride(2) == 1
    )  # fmt: skip


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """q [..., D] and scale [...] of x [..., D]. A head with an infinity becomes NaN."""
    scale = (x.abs().amax(-1).float().clamp_min(_TINY) / 448).to(SCALE_DTYPE)
    return (x / scale[..., None].float()).to(DTYPE), scale


def dequantize_heads(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., D] in `dtype`, rounded once."""
    return (q.to(dtype) * scale[..., None]).to(dtype)


@triton.jit
def store_heads(q_ptr, scale_ptr, x, heads, dims, H: tl.constexpr, D: tl.constexpr):
    """Writes x [heads, dims] in fp8, 0 past H and D; heads [N, 1] of the output lie D apart."""
    x = x.to(tl.float32)
    scale = (tl.maximum(tl.max(tl.abs(x), 1), 1e-30) / 448.0).to(tl.bfloat16)[:, None]
    tl.store(scale_ptr + heads, scale, mask=heads < H)
    tl.store(
        q_ptr + heads * D + dims, (x / scale.to(tl.float32)).to(q_ptr.dtype.element_ty), mask=(heads < H) & (dims < D)
    )
