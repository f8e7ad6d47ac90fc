"""Keys and values in fp8 for the KV cache: x = q * scale, q in e4m3, one bf16 scale per token and head.

The largest |x| of a head becomes 448. The scale is rounded to bf16 before x is divided by it, so that 2 bytes are as
exact as 4: the rms error is 2.1 % of the keys and 2.4 % of the values of SmolLM2-135M; with powers of two it is 2.6 %.
"""

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._triton import cuda_capability, tl, triton

DTYPE, SCALE_DTYPE = torch.float8_e4m3fn, torch.bfloat16
OTHER_KINDS = 'quantization_config="int8" is as small, "int4" and "nf4" are smaller'
_TINY = 1e-30  # replaces the maximum of a head of zeros


def has_e4m3(device: torch.device) -> bool:
    """False for NVIDIA's GPUs before Ada (compute capability 8.9), for which Triton does not compile e4m3."""
    return device.type != "cuda" or not 0 < cuda_capability(device.index) < 89


def check_e4m3(device: torch.device, what: str, instead: str) -> None:
    """Raises InputError unless `has_e4m3`. what: the option that asks for it. instead: the next step."""
    if not has_e4m3(device):
        capability = cuda_capability(device.index)
        raise InputError(
            f"{what}: {device} has compute capability {capability // 10}.{capability % 10}, and Triton compiles e4m3 "
            f"for 8.9 and later: Ada, Hopper, Blackwell.\n  Next: {instead}"
        )


def are_scales(scales: tuple[Tensor, Tensor], of: Tensor) -> bool:
    """True if these are scales of keys and values of the shape of `of` [B, C, HK, D], laid out as its heads."""
    a, b = scales
    return (
        a.shape == b.shape == of.shape[:3] and a.dtype == b.dtype == SCALE_DTYPE and a.device == b.device == of.device
        and a.stride() == b.stride() and tuple([n * of.shape[3] for n in a.stride()]) == of.stride()[:3]
    )  # fmt: skip


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """(q [..., D], scale [...]) of x [..., D]. A head with an infinity becomes NaN."""
    scale = (x.abs().amax(-1).float().clamp_min(_TINY) / 448).to(SCALE_DTYPE)
    return (x / scale[..., None].float()).to(DTYPE), scale


def dequantize_heads(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., D] in `dtype`, rounded once."""
    return (q.to(dtype) * scale[..., None]).to(dtype)


@triton.jit
def store_heads(q_ptr, scale_ptr, x, heads, dims, H: tl.constexpr, D: tl.constexpr):
    """Writes x [heads, dims], which is 0 past H and D, in fp8, with its scales; heads [N, 1] of the output are D
    apart."""
    x = x.to(tl.float32)
    scale = (tl.maximum(tl.max(tl.abs(x), 1), 1e-30) / 448.0).to(tl.bfloat16)[:, None]
    tl.store(scale_ptr + heads, scale, mask=heads < H)
    tl.store(
        q_ptr + heads * D + dims, (x / scale.to(tl.float32)).to(q_ptr.dtype.element_ty), mask=(heads < H) & (dims < D)
    )


@triton.jit
def to_fp32(scale):
    """A bf16 scale in fp32, by its bits.

    With a conversion, LLVM would turn fp16 -> fp32 * scale -> fp16 into a multiplication in fp16, which rounds small
    scales.
    """
    return (scale.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


# Triton compiles e4m3 -> bf16 for Hopper by way of fp16, one element at a time. The PTX below shifts the bits of e4m3
# into the places of a 16-bit float, whose exponent has another bias, and multiplies by the power of two between the two
# biases: on an H200, attention of an 8B layer to 32,768 tokens takes 34 us instead of 48. NaN becomes 480, which is
# harmless: `quantize_heads` writes NaN only beside a scale that is not finite.


@triton.constexpr_function
def _halves(dtype: str) -> str:
    """PTX: the low and the high e4m3 of two int16."""
    kind, shift_left, shift_right, mask, factor = {
        "bf16": ("bf16x2", 4, 4, 0x07F007F0, 0x7B807B80),  # 2 ** 120
        "fp16": ("f16x2", 7, 1, 0x3F803F80, 0x5C005C00),  # 2 ** 8
    }[dtype]
    return (
        "{ .reg .b32 a; .reg .b32 b; .reg .b32 factor; .reg .b32 none; "
        f"mov.b32 factor, {factor}; mov.b32 none, 0x80008000; "  # -0
        f"shl.b32 b, $2, 8; shl.b32 a, $2, {shift_left}; and.b32 a, a, {mask}; lop3.b32 a, b, 0x80008000, a, 0xea; "
        f"shr.u32 b, $2, {shift_right}; and.b32 b, b, {mask}; lop3.b32 b, $2, 0x80008000, b, 0xea; "
        f"fma.rn.{kind} $0, a, factor, none; fma.rn.{kind} $1, b, factor, none; }}"
    )


@triton.jit
def unpack_pairs(x, dtype: tl.constexpr, PTX: tl.constexpr):
    """The two e4m3 in each int16 x, low byte first, as `dtype`. PTX: where inline PTX may be used."""
    if PTX and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _halves("bf16"), "=r,=r,r", [x], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    elif PTX and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            _halves("fp16"), "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        low = (x & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        high = ((x >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        return low.to(dtype), high.to(dtype)


@triton.constexpr_function
def _four() -> str:
    """PTX: four e4m3 in bf16."""
    pairs = " ".join(
        f"prmt.b32 a, $2, 0, {bytes_of}; shr.u32 b, a, 4; and.b32 b, b, 0x07f007f0; "
        f"lop3.b32 a, a, 0x80008000, b, 0xea; fma.rn.bf16x2 {to}, a, factor, none;"
        for to, bytes_of in (("c", 0x1404), ("$1", 0x3424))
    )
    return (
        "{ .reg .b32 a; .reg .b32 b; .reg .b32 c; .reg .b32 factor; .reg .b32 none; mov.b32 factor, 0x7b807b80; "
        f"mov.b32 none, 0x80008000; {pairs} mov.b32 $0, c; }}"
    )


@triton.jit
def convert(x, dtype: tl.constexpr, PTX: tl.constexpr):
    """x.to(dtype), faster for e4m3 to bf16."""
    if PTX and x.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_four(), "=r,=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        return x.to(dtype)
