"""NF4: frozen weights of 4 bits, in the bytes of bitsandbytes; quantised and dequantised.

    absmax[b] = max |w| over block b of 64 weights in row-major order
    index     = argmin_i |code[i] - w / absmax[b]|, two to a byte, the first in the high bits
    w         = code[index] * absmax[b]

`code` has 16 quantiles of a normal distribution, scaled to [-1, 1]. Double quantisation stores absmax in 8 bits, in
blocks of 256 around its mean, by a code of 256 values with finer steps near zero:

    absmax[b] = nested_code[absmax8[b]] * nested_absmax[b // 256] + offset

A weight may be several parts, one after the other, that were quantised each by itself, as those of stacked experts are
on disk: `NF4Weight.stack`. Each part then starts a new block of 256 and has its own offset.

Bits per weight: 4 + 32 / 64 = 4.5, and 4 + 8 / 64 + 32 / (64 * 256) = 4.127 with double quantisation. One kernel
dequantises weight and absmax: 2.52 bytes per weight in 16 bits, the minimum. Math in fp32, one rounding to the output.

A weight is dequantised before each matmul, which cuBLAS computes, in the forward and again in the backward (see
low_bit.py). At training sizes this is fast: dequantising takes 4 ms of a step of 1 s of an 8B, while a matmul kernel
that dequantises its operand is several times slower than cuBLAS.

Source: T. Dettmers et al., QLoRA, arXiv 2305.14314; https://github.com/bitsandbytes-foundation/bitsandbytes, whose CPU
code the tests compare with, bit for bit. Its CUDA code divides less exactly than fp32, so that an index may differ
where a weight lies between two codes.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.kernels._check import describe
from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import cdiv, tl, triton, use_triton
from ligermodels.kernels.linear.low_bit import LowBitWeight, check_quantizable

CODE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The weights of the 16 indices, relative to absmax."""
NESTED_BLOCK = 256
"""absmax values that share one nested_absmax."""
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_TINY = 2e-38  # replaces an absmax of 0, whose inverse is infinite
_TILE = 4096  # weights per program
_CHUNK = 1 << 24  # weights quantised at a time, a multiple of any block


@dataclass(frozen=True, eq=False, slots=True)
class NF4Weight(LowBitWeight):
    """A weight in 4 bits, from `quantize_nf4`, of any shape; an operand of linear layers where it is [N, K].

    packed: indices, uint8 [ceil(n / 2), 1] for n weights. absmax: fp32 [B] for B blocks; uint8 [B] with double
    quantisation. quant_map: fp32 [16], the code. Only with double quantisation: nested_absmax fp32 [ceil(B / 256)],
    nested_quant_map fp32 [256], nested_offset fp32 [1]; for P stacked parts [P ceil(B / P / 256)], [256] and [P].
    """

    tensor_names = ("packed", "absmax", "quant_map", "nested_absmax", "nested_quant_map", "nested_offset")
    row_names = ("packed", "absmax", "nested_absmax", "nested_offset")

    absmax: Tensor
    quant_map: Tensor
    nested_absmax: Tensor | None = None
    nested_quant_map: Tensor | None = None
    nested_offset: Tensor | None = None

    def _dequantize_into(self, out: Tensor) -> None:
        packed, absmax, n = self.packed, self.absmax, math.prod(self.shape)
        blocks = cdiv(n, self.block)
        plain = type(packed) in (Tensor, nn.Parameter) and packed.dtype == torch.uint8
        if not plain or packed.numel() != cdiv(n, 2) or absmax.numel() != blocks:
            raise InputError(
                f"dequantize: packed is a {type(packed).__name__} of {describe(packed)}, absmax has "
                f"{describe(absmax)}; expected uint8 ({cdiv(n, 2)}, 1) and {blocks} elements for a weight "
                f"{tuple(self.shape)}, whole: a sharded one is gathered first"
            )
        if not use_triton(packed):
            out.copy_(dequantize_nf4_reference(self, out.dtype))
            return
        rows = max(1, _TILE // self.block)
        parts = 1 if self.nested_offset is None else self.nested_offset.numel()
        launch(
            _dequantize_kernel, (cdiv(n, self.block * rows),), out, packed.contiguous(), self.quant_map, absmax,
            self.nested_absmax, self.nested_quant_map, self.nested_offset, n, cdiv(n, 2), 0, blocks // parts,
            NESTED_BLOCK, self.block, rows, parts > 1, num_warps=4,
        )  # fmt: skip


# ---- Quantising ----


def nested_code() -> Tensor:
    """The 256 codes of absmax, fp32, ascending: 0, 1, and in each of seven decades the midpoints of 2^decade parts."""
    decades = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32, device="cpu")
        decades.append(10 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2.0))
    positive = torch.cat(decades)
    ends = torch.tensor([0.0, 1.0], dtype=torch.float32, device="cpu")
    return torch.cat([positive, -positive, ends]).sort().values


def _blocks(values: Tensor, block: int) -> Tensor:
    """The values as rows of `block`, padded with zeros."""
    return F.pad(values, (0, -values.numel() % block)).view(-1, block)


def _indices(blocks: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
    """(index of the nearest code of each element, uint8; absmax [B]) of blocks [B, N] in fp32."""
    absmax = blocks.abs().amax(1)
    scaled = blocks * (1.0 / absmax.clamp(min=_TINY))[:, None]
    return torch.bucketize(scaled, (code[:-1] + code[1:]) / 2, out_int32=True).to(torch.uint8), absmax


def _nest(weight: NF4Weight) -> NF4Weight:
    """The weight with absmax quantised to 8 bits."""
    code, offset = nested_code().to(weight.device), weight.absmax.mean().view(1)
    index, nested = _indices(_blocks(weight.absmax - offset, NESTED_BLOCK), code)
    absmax = index.view(-1)[: weight.absmax.numel()].clone()
    return replace(weight, absmax=absmax, nested_absmax=nested, nested_quant_map=code, nested_offset=offset)


def quantize_nf4(weight: Tensor, *, block: int = 64, double: bool = True) -> NF4Weight:
    """The weight in 4 bits.

    weight: any shape, bf16, fp16 or fp32, without a gradient. block: weights that share an absmax, a power of two from
    32 to 4096. double: double quantisation.
    Synchronises to check that the weight is finite. Raises InputError for other weights and blocks.
    """
    check_quantizable(weight, "nf4")
    if block not in BLOCKS:
        raise InputError(f"quantize_nf4: block={block}; expected one of {', '.join(map(str, BLOCKS))}")
    code = torch.tensor(CODE, dtype=torch.float32, device=weight.device)
    packed, absmax = [], []
    for part in weight.reshape(-1).split(_CHUNK):
        index, largest = _indices(_blocks(part.float(), block), code)
        index = index.view(-1)[: part.numel() + part.numel() % 2]
        packed.append((index[::2] << 4) | index[1::2])
        absmax.append(largest)
    bits = torch.cat(packed)[:, None]
    quantized = NF4Weight("nf4", tuple(weight.shape), weight.dtype, block, bits, torch.cat(absmax), code)
    return _nest(quantized) if double else quantized


# ---- Dequantising ----


def dequantize_nf4_reference(weight: NF4Weight, dtype: torch.dtype | None = None) -> Tensor:
    n, packed, absmax = math.prod(weight.shape), weight.packed.view(-1), weight.absmax
    nested: Any = weight.nested_absmax, weight.nested_quant_map, weight.nested_offset
    if weight.nested_absmax is not None:
        scales, code, offset = nested  # scales and offset have a row for each part
        codes = code[absmax.int()].view(len(offset), -1)
        scales = scales.view(len(offset), -1).repeat_interleave(NESTED_BLOCK, 1)[:, : codes.shape[1]]
        absmax = (codes * scales + offset[:, None]).view(-1)
    values = weight.quant_map[torch.stack((packed >> 4, packed & 15), 1).view(-1)[:n].int()]
    values = (_blocks(values, weight.block) * absmax[:, None]).view(-1)[:n]
    return values.view(weight.shape).to(dtype or weight.dtype)


@triton.jit
def _dequantize_kernel(
    out_ptr, packed_ptr, code_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, offset_ptr, n, n_bytes, zero,
    part_blocks, NESTED_BLOCK: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """PARTS: there are several parts, each of part_blocks blocks."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows * BLOCK < n
    absmax = tl.load(absmax_ptr + rows, mask=inside, other=0)
    if nested_absmax_ptr is not None:
        if PARTS:
            part = rows // part_blocks
            at_nested = part * tl.cdiv(part_blocks, NESTED_BLOCK) + rows % part_blocks // NESTED_BLOCK
            offset = tl.load(offset_ptr + part, mask=inside, other=0.0)
        else:
            at_nested = rows // NESTED_BLOCK
            offset = tl.load(offset_ptr)
        nested = tl.load(nested_absmax_ptr + at_nested, mask=inside, other=0.0)
        scaled = tl.load(nested_code_ptr + absmax.to(tl.int32)) * nested
        # xor with 0, an argument, keeps the compiler from fusing multiplication and addition: the reference rounds
        # twice.
        scaled = (scaled.to(tl.int32, bitcast=True) ^ zero).to(tl.float32, bitcast=True)
        absmax = scaled + offset
    byte = rows[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    packed = tl.load(packed_ptr + byte, mask=byte < n_bytes, other=0).to(tl.int32)
    w = tl.interleave(tl.load(code_ptr + (packed >> 4)), tl.load(code_ptr + (packed & 15))) * absmax[:, None]
    at = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out_ptr + at, w.to(out_ptr.dtype.element_ty), mask=at < n)
