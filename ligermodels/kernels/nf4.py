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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.kernels._check import describe
from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import cdiv, tl, triton, use_triton
from ligermodels.kernels.low_bit import output_for, select_rows
from ligermodels.kernels.operand import LowBitWeight, grouped_shape

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
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TINY = 2e-38  # replaces an absmax of 0, whose inverse is infinite; Triton 3.6 takes smaller numbers for fp64
_TILE = 4096  # weights per program


class NF4State(NamedTuple):
    """What dequantising needs beside the packed indices.

    absmax: fp32 [B] of B blocks; uint8 [B] with double quantisation. code: fp32 [16].
    shape, dtype: of the weight that was quantised. block: weights per block.
    nested_absmax fp32 [ceil(B / 256)], nested_code fp32 [256], offset fp32 []: with double quantisation, else None.
    Of P parts: nested_absmax [P ceil(B / P / 256)], offset [P].
    """

    absmax: Tensor
    code: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    block: int
    nested_absmax: Tensor | None = None
    nested_code: Tensor | None = None
    offset: Tensor | None = None


def nested_code() -> Tensor:
    """The 256 codes of absmax, fp32, ascending: 0, 1, and in each of seven decades the midpoints of 2^decade parts."""
    positive = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32, device="cpu")
        positive.append(10 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2.0))
    found = torch.cat(positive)
    ends = torch.tensor([0.0, 1.0], dtype=torch.float32, device="cpu")
    return torch.cat([found, -found, ends]).sort().values


def _blocks(values: Tensor, block: int) -> Tensor:
    """The values as rows of `block`, padded with zeros."""
    return F.pad(values, (0, -values.numel() % block)).view(-1, block)


def _indices(blocks: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
    """(index of the nearest code of each element, uint8; absmax [B]) of blocks [B, N] in fp32."""
    absmax = blocks.abs().amax(1)
    scaled = blocks * (1.0 / absmax.clamp(min=_TINY))[:, None]
    return torch.bucketize(scaled, (code[:-1] + code[1:]) / 2, out_int32=True).to(torch.uint8), absmax


def _nest(absmax: Tensor, state: NF4State) -> NF4State:
    """The state with absmax quantised to 8 bits."""
    code, offset = nested_code().to(absmax.device), absmax.mean()
    index, nested = _indices(_blocks(absmax - offset, NESTED_BLOCK), code)
    return state._replace(
        absmax=index.view(-1)[: absmax.numel()].clone(), nested_absmax=nested, nested_code=code, offset=offset
    )


def quantize_nf4_reference(weight: Tensor, *, block: int = 64, double: bool = True) -> tuple[Tensor, NF4State]:
    n, code = weight.numel(), torch.tensor(CODE, dtype=torch.float32, device=weight.device)
    index, absmax = _indices(_blocks(weight.reshape(-1).float(), block), code)
    index = index.view(-1)[: n + n % 2]
    state = NF4State(absmax, code, tuple(weight.shape), weight.dtype, block)
    return ((index[::2] << 4) | index[1::2])[:, None], _nest(absmax, state) if double else state


def absmax_of(state: NF4State) -> Tensor:
    """absmax in fp32 [B], dequantised if need be."""
    if state.nested_absmax is None or state.nested_code is None or state.offset is None:
        return state.absmax
    count, found = state.offset.numel(), []
    parts = zip(state.absmax.view(count, -1), state.nested_absmax.view(count, -1), state.offset.view(-1), strict=True)
    for absmax, nested, offset in parts:
        blocks = _blocks(state.nested_code[absmax.int()], NESTED_BLOCK) * nested[:, None]
        found.append(blocks.view(-1)[: absmax.numel()] + offset)
    return torch.cat(found)


def dequantize_nf4_reference(packed: Tensor, state: NF4State, dtype: torch.dtype | None = None) -> Tensor:
    n, packed = math.prod(state.shape), packed.view(-1)
    values = state.code[torch.stack((packed >> 4, packed & 15), 1).view(-1)[:n].int()]
    values = (_blocks(values, state.block) * absmax_of(state)[:, None]).view(-1)[:n]
    return values.view(state.shape).to(dtype or state.dtype)


@triton.jit
def _quantize_kernel(
    packed_ptr, absmax_ptr, w_ptr, code_ptr, n, n_bytes, TINY: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    w = tl.load(w_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    absmax = tl.max(tl.abs(w), 1)
    tl.store(absmax_ptr + rows, absmax, mask=rows * BLOCK < n)
    scaled = w * tl.div_rn(tl.full([ROWS], 1.0, tl.float32), tl.maximum(absmax, TINY))[:, None]
    index = tl.zeros([ROWS, BLOCK], tl.int32)
    below = tl.load(code_ptr)
    for i in tl.static_range(1, 16):
        above = tl.load(code_ptr + i)
        index += (scaled > (below + above) * 0.5).to(tl.int32)
        below = above
    first, second = tl.split(tl.reshape(index, (ROWS, BLOCK // 2, 2)))
    byte = rows[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    tl.store(packed_ptr + byte, (first * 16 + second).to(tl.uint8), mask=byte < n_bytes)


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


def _grid(n: int, block: int) -> tuple[tuple[int], int]:
    """(grid, blocks per program)."""
    rows = max(1, _TILE // block)
    return (cdiv(n, block * rows),), rows


def quantize_nf4(weight: Tensor, *, block: int = 64, double: bool = True) -> tuple[Tensor, NF4State]:
    """The weight in 4 bits: (packed, state).

    weight: any shape, bf16, fp16 or fp32, without a gradient. block: weights that share an absmax, a power of two from
    32 to 4096. double: double quantisation.
    Returns packed, uint8 [ceil(n / 2), 1] for n weights, and the state that `dequantize_nf4` takes.
    Synchronises to check that the weight is finite. Raises InputError for other weights and blocks.
    """
    if weight.dtype not in _DTYPES or not weight.numel():
        raise InputError(f"quantize_nf4: weight has {describe(weight)}; expected elements of bf16, fp16 or fp32")
    if weight.requires_grad:
        raise InputError(
            "quantize_nf4: the weight requires a gradient, but 4 bits cannot be trained. Freeze it first: "
            "weight.requires_grad_(False), or pass weight.detach()"
        )
    if block not in BLOCKS:
        raise InputError(f"quantize_nf4: block={block}; expected one of {', '.join(map(str, BLOCKS))}")
    if not weight.is_meta and not bool(torch.stack(weight.aminmax()).isfinite().all()):
        raise InputError("quantize_nf4: the weight has NaN or infinity, which 4 bits cannot represent")
    if not use_triton(weight):
        return quantize_nf4_reference(weight, block=block, double=double)
    weight, n = weight.contiguous(), weight.numel()
    code = torch.tensor(CODE, dtype=torch.float32, device=weight.device)
    packed = torch.empty((cdiv(n, 2), 1), dtype=torch.uint8, device=weight.device)
    absmax = torch.empty(cdiv(n, block), dtype=torch.float32, device=weight.device)
    grid, rows = _grid(n, block)
    launch(_quantize_kernel, grid, packed, absmax, weight, code, n, cdiv(n, 2), _TINY, block, rows, num_warps=4)
    state = NF4State(absmax, code, tuple(weight.shape), weight.dtype, block)
    return packed, _nest(absmax, state) if double else state


def dequantize_nf4(
    packed: Tensor, state: NF4State, *, out: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """The weight that `quantize_nf4` packed, without autograd.

    dtype: of the result; default: out's, or that of the weight that was quantised. out: contiguous, of the weight's
    shape, where the result is written. Raises InputError where packed, state and out do not fit together.
    """
    n = math.prod(state.shape)
    if packed.dtype != torch.uint8 or packed.numel() != cdiv(n, 2) or type(packed) not in (Tensor, nn.Parameter):
        raise InputError(
            f"dequantize_nf4: packed is a {type(packed).__name__} of {describe(packed)}; expected uint8 "
            f"({cdiv(n, 2)}, 1) for a weight {tuple(state.shape)}, whole: a sharded one is gathered first"
        )
    if state.absmax.numel() != cdiv(n, state.block) or state.absmax.device != packed.device:
        raise InputError(
            f"dequantize_nf4: absmax has {describe(state.absmax)}; expected {cdiv(n, state.block)} elements on "
            f"{packed.device}"
        )
    out = output_for("dequantize_nf4", out, dtype, tuple(state.shape), state.dtype, packed.device)
    if not use_triton(packed):
        return out.copy_(dequantize_nf4_reference(packed, state, out.dtype))
    grid, rows = _grid(n, state.block)
    parts = 1 if state.offset is None else state.offset.numel()
    launch(
        _dequantize_kernel, grid, out, packed.contiguous(), state.code, state.absmax, state.nested_absmax,
        state.nested_code, state.offset, n, cdiv(n, 2), 0, state.absmax.numel() // parts, NESTED_BLOCK, state.block,
        rows, parts > 1, num_warps=4,
    )  # fmt: skip
    return out


@dataclass(frozen=True, eq=False, slots=True)
class NF4Weight(LowBitWeight):
    """The result of `quantize_nf4` of a weight [N, K], as an operand of linear layers."""

    packed: Tensor
    state: NF4State

    @property
    def shape(self) -> tuple[int, ...]:
        return self.state.shape

    @property
    def device(self) -> torch.device:
        return self.packed.device

    def dequantize(self, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        return dequantize_nf4(self.packed, self.state, dtype=dtype, out=out)

    def flatten(self) -> tuple[tuple[Tensor | None, ...], tuple[Any, ...]]:
        absmax, code, shape, dtype, block, *nested = self.state
        return (self.packed, absmax, code, *nested), (shape, dtype, block)

    @classmethod
    def unflatten(cls, tensors: Sequence[Any], options: tuple[Any, ...]) -> Self:
        packed, absmax, code, *nested = tensors
        return cls(packed, NF4State(absmax, code, *options, *nested))

    def in_groups(self, groups: int) -> Self:
        return type(self)(self.packed, self.state._replace(shape=grouped_shape(self.shape, groups)))

    @property
    def is_apart(self) -> bool:
        groups, state = self.shape[0], self.state
        ends_with_block = math.prod(self.shape[1:]) % state.block == 0
        return ends_with_block and (state.offset is None or state.offset.numel() % groups == 0)

    def select(self, index: Tensor) -> Self:
        groups, state = self.shape[0], self.state
        state = state._replace(shape=(index.numel(), *self.shape[1:]), absmax=select_rows(state.absmax, groups, index))
        if state.nested_absmax is not None and state.offset is not None:
            nested = select_rows(state.nested_absmax, groups, index)
            state = state._replace(nested_absmax=nested, offset=select_rows(state.offset, groups, index))
        return type(self)(select_rows(self.packed, groups, index), state)

    @classmethod
    def stack(cls, weights: Sequence[Self]) -> Self:
        """Raises InputError unless all are of one shape, block size and kind of absmax, and end with a block."""
        first = weights[0].state
        n, double = math.prod(first.shape), first.offset is not None
        known = {(w.state.shape, w.state.block, w.state.offset is not None, w.state.dtype) for w in weights}
        if len(known) > 1 or n % first.block:
            raise InputError(
                f"weights {tuple(first.shape)} with blocks of {first.block} cannot be one stack in 4 bits: expected "
                "weights of one kind, and a number of elements that the block divides"
            )
        shape = len(weights) * first.shape[0], *first.shape[1:]
        state = first._replace(shape=shape, absmax=torch.cat([w.state.absmax for w in weights]))
        if double:
            nested: Any = [(w.state.nested_absmax, w.state.offset.view(1)) for w in weights]  # type: ignore[union-attr]
            nested_absmax, offset = map(torch.cat, zip(*nested, strict=True))
            state = state._replace(nested_absmax=nested_absmax, offset=offset)
        return cls(torch.cat([w.packed for w in weights]), state)

    def split(self, parts: int) -> list[Self]:
        """The parts [N / parts, K] of a `stack` of as many."""
        state, nothing = self.state, [None] * parts
        shape = state.shape[0] // parts, *state.shape[1:]
        nested = nothing if state.nested_absmax is None else state.nested_absmax.chunk(parts)
        offsets = nothing if state.offset is None else state.offset.view(-1).unbind()
        each = zip(self.packed.chunk(parts), state.absmax.chunk(parts), nested, offsets, strict=True)
        return [
            type(self)(packed, state._replace(absmax=absmax, shape=shape, nested_absmax=one, offset=offset))
            for packed, absmax, one, offset in each
        ]
