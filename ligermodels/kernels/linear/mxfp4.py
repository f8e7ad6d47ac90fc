"""MXFP4: frozen weights of 4 bits with a power of two for each 32 of them, in the bytes of the released gpt-oss.

    w = value[n] * 2^(s - 127),   value = 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives,   n from 0 to 15, s to 254

n has the sign in its highest bit, then two bits of an exponent and one of a mantissa (e2m1); two are in a byte, the
first in the low bits. A block is 32 neighbours of a row, so that a row [K] has K / 2 bytes and K / 32 scales s, each of
one byte (e8m0). s = 255 is NaN, as the format says; transformers takes it for 2^128.

Bits per weight: 4 + 8 / 32 = 4.25. A weight has two significant bits, and so is exact in bf16 and fp32, but for 4 and 6
times 2^127, which are infinite. One kernel dequantises: 2.53 bytes per weight in 16 bits, the minimum. As with NF4, a
weight is dequantised before each matmul (low_bit.py).

Quantising: s = floor(log2(max |w| of the block)) - 2 + 127, at least 0; the nearest value, ties to the even n, above 6
the value 6. What was dequantised is brought back exactly, though a block of small values alone gets another s.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3, 5.4.1 and 6.3; convert_moe_packed_tensors in
transformers/integrations/mxfp4.py, with which the tests compare, bit for bit.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.kernels._check import describe
from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import cdiv, tl, triton, use_triton
from ligermodels.kernels.linear.low_bit import LowBitWeight, check_quantizable

BLOCK = 32
"""Weights of a row that share a scale."""
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The weights of the 16 codes, at a scale of 1."""
_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between two values; of every second one, the tie goes up
_BLOCKS = 128  # blocks per program
_CHUNK = 1 << 24  # weights quantised, or dequantised on the CPU, at a time: a multiple of BLOCK


@dataclass(frozen=True, eq=False, slots=True)
class MXFP4Weight(LowBitWeight):
    """A weight [..., K] in 4 bits, from `quantize_mxfp4` or a checkpoint; an operand of linear layers where it is
    [N, K], and of experts where it is [E, N, K].

    packed: uint8 [N, K / 2]. scale: uint8 [N, K / 32]. N is the number of rows of all experts.
    """

    tensor_names = row_names = ("packed", "scale")

    scale: Tensor

    @classmethod
    def of_blocks(cls, blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> "MXFP4Weight":
        """The weight [..., N, K] of the tensors of a checkpoint, over the same memory.

        blocks: uint8 [..., N, K / 32, 16]. scales: uint8 [..., N, K / 32]. dtype: that it stands for. Raises InputError
        for other shapes and dtypes, and for a scale of 255, which is NaN: this synchronises.
        """
        fits = blocks.dim() > 2 and blocks.shape == (*scales.shape, BLOCK // 2)
        if not (fits and blocks.dtype == scales.dtype == torch.uint8):
            raise InputError(
                f"MXFP4Weight: blocks has {describe(blocks)}, scales {describe(scales)}; expected uint8 [..., N, K / "
                f"{BLOCK}, {BLOCK // 2}] and [..., N, K / {BLOCK}]"
            )
        if scales.numel() and not scales.is_meta and int(scales.max()) == 255:
            raise InputError("MXFP4Weight: scales has 255, which is NaN")
        shape = (*scales.shape[:-1], scales.shape[-1] * BLOCK)
        rows = math.prod(shape[:-1])
        return cls("mxfp4", shape, dtype, BLOCK, blocks.reshape(rows, -1), scales.reshape(rows, -1))

    def _dequantize_into(self, out: Tensor) -> None:
        (*lead, columns), (packed, scale) = self.shape, (self.packed, self.scale)
        rows = math.prod(lead)
        plain = all(type(x) in (Tensor, nn.Parameter) and x.dtype == torch.uint8 for x in (packed, scale))
        if not plain or packed.shape != (rows, columns // 2) or scale.shape != (rows, columns // BLOCK):
            raise InputError(
                f"dequantize: packed is a {type(packed).__name__} of {describe(packed)}, scale has {describe(scale)}; "
                f"expected uint8 {(rows, columns // 2)} and {(rows, columns // BLOCK)} for a weight "
                f"{tuple(self.shape)}, whole: a sharded one is gathered first"
            )
        if not use_triton(out) or out.dtype == torch.float64:
            step = max(1, _CHUNK // max(1, columns))
            of_rows = (tensor.split(step) for tensor in (out.view(rows, columns), packed, scale))
            for target, bits, exponents in zip(*of_rows, strict=True):
                target.copy_(_dequantized(bits, exponents, out.dtype))
            return
        blocks = rows * (columns // BLOCK)
        launch(
            _dequantize_kernel, (cdiv(blocks, _BLOCKS),), out, packed.contiguous(), scale.contiguous(), blocks,
            BLOCK, _BLOCKS, num_warps=4,
        )  # fmt: skip


def quantize_mxfp4(weight: Tensor) -> MXFP4Weight:
    """The weight [..., N, K] in 4 bits.

    weight: bf16, fp16 or fp32, without a gradient, K a multiple of 32. Synchronises to check that the weight is finite.
    Raises InputError for other weights.
    """
    if weight.dim() < 2 or weight.shape[-1] % BLOCK:
        raise InputError(
            f"quantize_mxfp4: weight has {describe(weight)}; expected [..., N, K] with K a multiple of {BLOCK}, the "
            "weights that share a scale"
        )
    check_quantizable(weight, "mxfp4")
    shape = tuple(weight.shape)
    rows = weight.reshape(-1, shape[-1])
    parts = [_quantized(part.float()) for part in rows.split(max(1, _CHUNK // shape[-1]))]
    packed, scale = map(torch.cat, zip(*parts, strict=True))
    return MXFP4Weight("mxfp4", shape, weight.dtype, BLOCK, packed, scale)


def _quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(packed, scale) of rows [N, K] in fp32."""
    blocks = rows.unflatten(-1, (-1, BLOCK))
    exponent = blocks.abs().amax(-1).view(torch.int32) >> 23  # floor(log2) + 127; 0 of subnormal numbers
    scale = (exponent - 2).clamp_(min=0)
    bounds = torch.tensor(_BOUNDS, dtype=torch.float32, device=rows.device)
    bounds[1::2] = bounds[1::2].nextafter(bounds.new_zeros(()))  # a number on a bound belongs below it
    scaled = blocks * ((254 - scale) << 23).view(torch.float32)[..., None]  # times 2^(127 - s), by its bits
    n = torch.bucketize(scaled.abs(), bounds, out_int32=True) | (scaled.signbit().int() << 3)
    n = n.to(torch.uint8).flatten(-2)
    return n[:, ::2] | (n[:, 1::2] << 4), scale.to(torch.uint8)


def dequantize_mxfp4_reference(weight: MXFP4Weight, dtype: torch.dtype | None = None) -> Tensor:
    return _dequantized(weight.packed, weight.scale, dtype or weight.dtype).view(weight.shape)


def _dequantized(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, K] of packed [N, K / 2] and scale [N, K / 32]."""
    pairs_of = [(VALUES[byte & 15], VALUES[byte >> 4]) for byte in range(256)]
    of_byte = torch.tensor(pairs_of, dtype=torch.float32, device=packed.device)
    exponent = scale.int()
    # The bits of 2^(s - 127) in fp32, where 2^-127 is subnormal.
    bits = torch.where(exponent == 0, 1 << 22, torch.where(exponent == 255, 0x7FC00000, exponent << 23))
    # Both values of a byte as one int64, which takes a CPU less than half the time of indexing rows.
    pairs = of_byte.view(torch.int64).index_select(0, packed.flatten().int())
    values = pairs.view(torch.float32).view(*scale.shape, BLOCK) * bits.view(torch.float32)[..., None]
    return values.flatten(-2).to(dtype)


@triton.jit
def mxfp4_scale(scale):
    """2^(scale - 127) in fp32 of bytes; 255 is NaN."""
    s = scale.to(tl.int32)
    bits = tl.where(s == 0, 1 << 22, tl.where(s == 255, 0x7FC00000, s << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def mxfp4_values(n):
    """The values of codes, int32, in fp32: their bits at the place of exponent and mantissa, times 2^126."""
    bits = ((n & 7) << 22) | ((n & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _dequantize_kernel(out_ptr, packed_ptr, scale_ptr, n_blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < n_blocks
    at = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    packed = tl.load(packed_ptr + at, mask=inside[:, None], other=0).to(tl.int32)
    scale = mxfp4_scale(tl.load(scale_ptr + block, mask=inside, other=0))
    w = tl.interleave(mxfp4_values(packed), mxfp4_values(packed >> 4)) * scale[:, None]
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out_ptr + at, w.to(out_ptr.dtype.element_ty), mask=inside[:, None])
