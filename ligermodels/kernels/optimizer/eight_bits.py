"""Numbers in 8 bits, in blocks of 64 of the last dim that share an exponent: the moments of AdamW.

    first moment = 2^e (code / 127)^4, with a sign     root of the second = 2^e (code / 255)^4     2^e >= all of a block

The exponent is a byte, biased by 127 as fp32's are; 255 says that the block is not finite, and all of it is NaN. The
fourth root spreads the codes: neighbours are 3 % (first moment) and 1.6 % (root) apart at the block's maximum, 13 and
6 % at 1/256 of it, and the smallest that are not 0 are 4e-9 and 2e-10 of it. A step of AdamW rounds stochastically in
the fourth root: a number errs by less than that distance, and its mean by less than 1 % down to 1/256. To nearest,
second moments would not follow: at beta2 0.999 they change by a thousandth a step, and rounding would undo it. A root
above 0 never becomes 0, after which an update would be divided by eps alone.

What differs from 8-bit AdamW in bitsandbytes, which rounds to nearest, to a table over 7 decades, times the block's
maximum: a maximum moves every step, and with it all numbers of the block are rounded again. A power of two stays, and a
number that does not change keeps its code, without which stochastic rounding would be far too noisy. And second moments
below 2e-7 of the maximum become 0 there. tests/tools/test_optimizers.py compares both with moments in fp32.

Sources: Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization, https://arxiv.org/abs/2110.02861; blocks
with a shared exponent: Open Compute Project, Microscaling Formats (MX) 1.0.
"""

import torch
from torch import Tensor

from ligermodels.kernels._triton import tl, triton

BLOCK = 64
"""Elements of the last dim that share an exponent."""
MOMENT, ROOT = 127, 255
"""The largest codes: of a number with a sign, whose code has it as its upper bit, and of one that is not negative."""
_INFINITY, _NAN = 0x7F800000, 0x7FC00000
_LARGEST = 253  # exponent; that of the inverse has to be a normal number


def exponents_shape(shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the exponents of a tensor, whose last dim is a multiple of BLOCK."""
    return (*shape[:-1], shape[-1] // BLOCK)


def encode(x: Tensor, levels: int, bits: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [..., n BLOCK] -> codes of its shape and exponents [..., n], both uint8.

    levels: MOMENT, or ROOT for numbers that are not negative. bits: 16 random bits per element, int32, for stochastic
    rounding; None rounds to nearest.
    """
    blocks = x.float().contiguous().unflatten(-1, (x.shape[-1] // BLOCK, BLOCK))
    top = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(-1).clamp(max=_INFINITY)  # a NaN's bits are larger
    exponents = (top + 0x7FFFFF) >> 23
    inverse = ((254 - exponents.clamp(1, _LARGEST)) << 23).view(torch.float32)[..., None]
    places = (blocks.abs() * inverse).sqrt_().sqrt_().mul_(levels)
    places += 0.5 if bits is None else bits.view(blocks.shape) * 2.0**-16
    codes = places.int()
    codes = codes | (blocks < 0) * 128 if levels == MOMENT else torch.where(blocks > 0, codes.clamp(min=1), codes)
    exponents = torch.where(exponents > _LARGEST, 255, exponents)
    return codes.to(torch.uint8).view(x.shape), exponents.to(torch.uint8)


def decode(codes: Tensor, exponents: Tensor, levels: int) -> Tensor:
    """What `encode` has encoded, in fp32."""
    code = codes.contiguous().int().unflatten(-1, (codes.shape[-1] // BLOCK, BLOCK))
    fourth = (code & levels) * (1 / levels)
    scale = torch.where(exponents == 255, _NAN, exponents.int().clamp(min=1) << 23).view(torch.float32)
    square = fourth * fourth
    x = square * square * scale[..., None]
    return (torch.where(code > levels, -x, x) if levels == MOMENT else x).view(codes.shape)


@triton.jit
def _spread(x, BLOCK: tl.constexpr):
    """[BLOCK / 64] -> [BLOCK]."""
    return tl.reshape(tl.broadcast_to(x[:, None], [BLOCK // 64, 64]), [BLOCK])


@triton.jit
def load_codes(ptr, exponents_ptr, start, size, LEVELS: tl.constexpr, BLOCK: tl.constexpr):
    """`decode` of BLOCK elements from `start` on, of `size`."""
    at = tl.arange(0, BLOCK)
    code = tl.load(ptr + start + at, mask=at < size - start, other=0).to(tl.int32)
    block = tl.arange(0, BLOCK // 64)
    exponents = tl.load(exponents_ptr + start // 64 + block, mask=block < (size - start) // 64, other=0).to(tl.int32)
    scale = tl.where(exponents == 255, 0x7FC00000, tl.maximum(exponents, 1) << 23).to(tl.float32, bitcast=True)
    fourth = (code & LEVELS).to(tl.float32) * (1 / LEVELS)
    square = fourth * fourth
    x = square * square * _spread(scale, BLOCK)
    return tl.where(code > LEVELS, -x, x) if LEVELS == 127 else x


@triton.jit
def store_codes(ptr, exponents_ptr, x, bits, start, size, LEVELS: tl.constexpr, BLOCK: tl.constexpr):
    """Stores `encode` of BLOCK elements. bits: 16 random ones of each."""
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    top = tl.minimum(tl.max(tl.reshape(magnitude, [BLOCK // 64, 64]), axis=1), 0x7F800000)
    exponents = (top + 0x7FFFFF) >> 23
    inverse = ((254 - tl.minimum(tl.maximum(exponents, 1), 253)) << 23).to(tl.float32, bitcast=True)
    places = tl.sqrt(tl.sqrt(tl.abs(x) * _spread(inverse, BLOCK))) * LEVELS
    code = (places + bits.to(tl.float32) * (1 / 65536)).to(tl.int32)
    code = code | tl.where(x < 0, 128, 0) if LEVELS == 127 else tl.where(x > 0, tl.maximum(code, 1), code)
    at = tl.arange(0, BLOCK)
    tl.store(ptr + start + at, code.to(tl.uint8), mask=at < size - start)
    block = tl.arange(0, BLOCK // 64)
    exponents = tl.where(exponents > 253, 255, exponents)
    tl.store(exponents_ptr + start // 64 + block, exponents.to(tl.uint8), mask=block < (size - start) // 64)
