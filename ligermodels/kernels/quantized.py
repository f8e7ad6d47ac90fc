"""Weights of 8 or 4 bits for inference, and linear layers of up to 64 rows that read them without dequantising.

    int8: w = q * scale[row], q from -127 to 127             fp8: w = q * scale[row], q in e4m3
    int4: w = (n - 8) * scale[row, group], n from 0 to 15, groups of 128 columns; scale may be negative

Bytes per weight: 1, and for int4 0.5 + 2 / 128. Sums are fp32. Which kernel runs depends on the number of rows of x:

- 1 row, int8 and fp8: the kernels of gemv.py.
- 1 row, int4: `_int4_kernel`, on tensor cores. An H200 reads 35 weights per clock and multiprocessor, which issues 128
  operations in that time, of which 64 of integers. Products in fp32 take 3.2 to 3.8 operations a weight, 1.6 of
  integers; these take 1.8 to 2.1, and 0.9. A lane multiplies its own words by its own part of x, so that a warp loads
  512 bytes of a row in order, and a program loads x once for its 8 or 16 rows. The first words are loaded while the
  kernel before ends. An H200 decodes 512 tokens/s of an 8B (before `_merge`), with products in fp32 458.
- 2 to 64 rows: `_rows_kernel` and `_int4_rows_kernel`, on tensor cores. The weight is the left operand, so that few
  rows of x fill them. q and n - 8 are exact in x's dtype, and scales multiply the sums. Words of int4 are unpacked two
  at a time, into registers that hold them as tensor cores want a group of 128 columns: nothing but words passes
  through shared memory. On an H200 the linear layers of an 8B layer with 8 rows take 72 us in int8, 78 in fp8, and 125
  in bf16 by cuBLAS; on an H100 89 us in int4.
- More rows: the weight is dequantised for cuBLAS (low_bit.py), and so rounded to x's dtype.

Without autograd; linear.py has the gradient of x.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._check import describe
from ligermodels.kernels._launch import launch
from ligermodels.kernels._math import activation
from ligermodels.kernels._triton import (
    cdiv,
    gdc_launch_dependents,
    gdc_wait,
    has_ptx,
    next_power_of_2,
    overlapping,
    overlaps_launches,
    tl,
    triton,
    use_triton,
    wait_for_previous,
)
from ligermodels.kernels.fp8 import convert
from ligermodels.kernels.gemv import add_bias, gemv
from ligermodels.kernels.joint import joint
from ligermodels.kernels.low_bit import LowBitWeight, check_quantizable

GROUP = 128
"""Columns of an int4 weight that share a scale."""
WORDS = 16
"""int32 words of a group. Word j has n of columns j, 16 + j, 32 + j, ..., from its lowest bits on."""
_PRODUCTS_OPERANDS = tl.constexpr("=&f,=&f,f,f,l,l,l,l,f,f,f,f,r,r,f,f" + 16 * ",r")  # of `_products_ptx`
_LESS_OPERANDS = tl.constexpr("=&f,=&f" + 16 * ",r")  # of `_less_ptx`
_CHUNK = 1 << 24  # weights quantised at a time


FORMATS = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0), "int4": (torch.int32, 8.0)}
"""kind: the dtype of the packed weights, and what the largest |w| of a row or group becomes."""


@dataclass(frozen=True, eq=False, slots=True)
class QuantizedWeight(LowBitWeight):
    """A weight of one of FORMATS, from `quantize`.

    int8, fp8: packed [N, K], scale fp32 [N]. int4: packed int32 [N, 16 G], scale bf16 [N, G] of G = ceil(K / 128)
    groups, where columns past K may have any value.
    """

    max_rows = 64
    tensor_names = row_names = ("packed", "scale")

    scale: Tensor

    @staticmethod
    def joint(weights: Sequence["QuantizedWeight"]) -> "QuantizedWeight | None":
        """The weights as one over the same memory; None where they are of several kinds, or not `joint`."""
        kind, (_, columns), dtype, block = weights[0].options
        packed, scale = joint([weight.packed for weight in weights]), joint([weight.scale for weight in weights])
        if packed is None or scale is None or len({weight.kind for weight in weights}) > 1:
            return None
        return QuantizedWeight(kind, (packed.shape[0], columns), dtype, block, packed, scale)

    def _dequantize_into(self, out: Tensor) -> None:
        if not use_triton(out) or out.dtype == torch.float64:
            out.copy_(dequantize_reference(self, out.dtype))
            return
        rows, words = self.packed.shape
        launch(
            _dequantize_kernel, (rows, cdiv(words, 1024)), out, self.packed, self.scale, self.shape[-1], words,
            self.kind == "int4", WORDS, 1024, num_warps=4,
        )  # fmt: skip


# ---- Quantising and dequantising ----


def quantize(weight: Tensor, kind: str) -> QuantizedWeight:
    """The weight [N, K] (bf16, fp16 or fp32, finite, without a gradient) as int8, fp8 or int4.

    Synchronises to check that the weight is finite. Raises InputError for other weights and kinds.
    """
    if kind not in FORMATS or weight.dim() != 2:
        raise InputError(
            f"quantize: kind={kind!r}, weight has {describe(weight)}; expected one of {', '.join(FORMATS)} and [N, K]"
        )
    check_quantizable(weight, kind)
    parts = [_quantized(part.float(), kind) for part in weight.split(max(1, _CHUNK // weight.shape[1]))]
    packed, scale = map(torch.cat, zip(*parts, strict=True))
    return QuantizedWeight(kind, tuple(weight.shape), weight.dtype, 0, packed, scale)


def _quantized(rows: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(packed, scale) of rows [N, K] in fp32. Of int4, the largest |w| of a group becomes -8."""
    dtype, largest = FORMATS[kind]
    if kind != "int4":
        scale = rows.abs().amax(1) / largest
        values = rows / torch.where(scale == 0, 1.0, scale)[:, None]
        return (values.round() if kind == "int8" else values).to(dtype), scale
    groups = F.pad(rows, (0, -rows.shape[1] % GROUP)).view(len(rows), -1, GROUP)
    scale = (groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -largest).bfloat16().float()
    values = (groups / torch.where(scale == 0, 1.0, scale)).round_().clamp_(-8, 7)
    n = (values + 8).to(dtype).view(*groups.shape[:2], 8, WORDS)
    words = n[:, :, 0].clone()
    for i in range(1, 8):
        words |= n[:, :, i] << (4 * i)
    return words.flatten(1), scale.squeeze(-1).bfloat16()


def dequantize_reference(weight: QuantizedWeight, dtype: torch.dtype | None = None) -> Tensor:
    if weight.kind == "int4":
        shifts = torch.arange(0, 32, 4, device=weight.device, dtype=torch.int32)[:, None]
        words = weight.packed.view(len(weight.packed), -1, 1, WORDS)
        values = ((words >> shifts) & 15).float() - 8  # [N, G, 8, 16]
        values = (values * weight.scale.float()[:, :, None, None]).flatten(1)[:, : weight.shape[-1]]
    else:
        values = weight.packed.float() * weight.scale[:, None]
    return values.to(dtype or weight.dtype).view(weight.shape)


@triton.jit
def _dequantize_kernel(
    out_ptr, w_ptr, s_ptr, K, W, GROUPED: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK of the W words (GROUPED: int4) or elements of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(w_ptr + row * W + at, mask=at < W, other=0.0)
    out_ptr += row * K
    if GROUPED:
        scale = tl.load(s_ptr + row * (W // WORDS) + at // WORDS, mask=at < W, other=0.0).to(tl.float32)
        column = (at // WORDS) * (8 * WORDS) + at % WORDS
        for i in tl.static_range(8):
            value = (((w >> (4 * i)) & 15) - 8).to(tl.float32) * scale
            mask = (at < W) & (column + i * WORDS < K)
            tl.store(out_ptr + column + i * WORDS, value.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        value = w.to(tl.float32) * tl.load(s_ptr + row)
        tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=at < W)


# ---- Linear layers ----


@triton.jit
def _int4_kernel(
    y_ptr, x_ptr, w_ptr, s_ptr, b_ptr, up_ptr, up_s_ptr, up_b_ptr, N, K,
    W: tl.constexpr, PAIRS: tl.constexpr, STEPS: tl.constexpr, EARLY: tl.constexpr, LANES: tl.constexpr,
    EVEN: tl.constexpr, FULL: tl.constexpr, TENSOR_CORES: tl.constexpr, NAME: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A block of y [N]: w x + b, or with `up_ptr` act(w x + b) * (up x + b').

    A block is PAIRS rows a and as many rows b: every other row of w, or the rows of w and of `up`. W: words of a row.
    STEPS: tiles of a row, of which each of LANES lanes has four words, as two of 64 bits. EARLY: how many of them are
    loaded while the kernel before this one ends. EVEN: all words of the tiles exist; FULL: all rows of the blocks.
    """
    GLU: tl.constexpr = up_ptr is not None
    if TENSOR_CORES and OVERLAP:
        gdc_launch_dependents()
    else:
        wait_for_previous(OVERLAP)
    w_ptr = w_ptr.to(tl.pointer_type(tl.int64))
    b_w_ptr = up_ptr.to(tl.pointer_type(tl.int64)) if GLU else w_ptr
    b_s_ptr = up_s_ptr if GLU else s_ptr
    block = tl.program_id(0)
    # No kernel writes weights, so that their first loads need not wait for the kernel before this one. x must.
    words, scales = (), ()
    for i in tl.static_range(EARLY):
        words += _words(w_ptr, b_w_ptr, block, i, N, W, PAIRS, LANES, GLU, EVEN, FULL)
        scales += _scales(s_ptr, b_s_ptr, block, i, N, W, PAIRS, LANES, GLU, EVEN, FULL, TENSOR_CORES)
    if TENSOR_CORES and OVERLAP:
        gdc_wait()
    total = tl.zeros((PAIRS, 2 * LANES), tl.float32)
    for i in tl.static_range(STEPS):
        if i >= EARLY:
            words += _words(w_ptr, b_w_ptr, block, i, N, W, PAIRS, LANES, GLU, EVEN, FULL)
            scales += _scales(s_ptr, b_s_ptr, block, i, N, W, PAIRS, LANES, GLU, EVEN, FULL, TENSOR_CORES)
        if TENSOR_CORES:
            x = _load_x(x_ptr, i, K, LANES, EVEN)
            total = _add_by_mma(total, words, scales, i, x, x_ptr.dtype.element_ty, PAIRS, LANES)
        else:
            total = _add_by_fma(total, words, scales, i, x_ptr, K, PAIRS, LANES)
    _store(y_ptr, b_ptr, up_b_ptr, total, block, N, PAIRS, LANES, GLU, NAME, TENSOR_CORES)


@triton.jit
def _rows(block, N, PAIRS: tl.constexpr, GLU: tl.constexpr, FULL: tl.constexpr):
    """The first row of a block, and its rows a and b [PAIRS, 1], counted from there."""
    start = tl.full((), PAIRS if GLU else 2 * PAIRS, tl.int64) * block
    a = tl.arange(0, PAIRS)[:, None] * (1 if GLU else 2)
    b = a + (0 if GLU else 1)
    if not FULL:
        last = (N - 1 - start).to(tl.int32)
        a, b = tl.minimum(a, last), tl.minimum(b, last)
    return start, a, b


@triton.jit
def _words(
    a_ptr, b_ptr, block, step: tl.constexpr, N, W: tl.constexpr, PAIRS: tl.constexpr, LANES: tl.constexpr,
    GLU: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """A step's words of the rows a and b of a block: each int64 [PAIRS, 2 LANES]."""
    start, a_rows, b_rows = _rows(block, N, PAIRS, GLU, FULL)
    at = tl.arange(0, 2 * LANES)[None, :] + step * 2 * LANES
    a_ptr += start * (W // 2) + (a_rows * (W // 2) + at)
    b_ptr += start * (W // 2) + (b_rows * (W // 2) + at)
    inside = at < W // 2
    if not GLU:
        return _load(a_ptr, inside, EVEN), _load(b_ptr, inside, EVEN)
    elif EVEN:
        return tl.load(a_ptr, eviction_policy="evict_first"), tl.load(b_ptr, eviction_policy="evict_first")
    else:
        return tl.load(a_ptr, mask=inside, other=0), tl.load(b_ptr, mask=inside, other=0)


@triton.jit
def _scales(
    a_ptr, b_ptr, block, step: tl.constexpr, N, W: tl.constexpr, PAIRS: tl.constexpr, LANES: tl.constexpr,
    GLU: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """A step's scales of the rows a and b of a block, as bits: each [PAIRS, LANES]."""
    start, a_rows, b_rows = _rows(block, N, PAIRS, GLU, FULL)
    group = tl.arange(0, LANES)[None, :] // 4 + step * (LANES // 4)
    if not EVEN:
        group = tl.minimum(group, W // 16 - 1)
    a = _load_bits(a_ptr + start * (W // 16) + (a_rows * (W // 16) + group), PTX)
    b = _load_bits(b_ptr + start * (W // 16) + (b_rows * (W // 16) + group), PTX)
    return a, b


@triton.jit
def _load_bits(ptr, PTX: tl.constexpr):
    """The bf16 numbers at the pointers, as bits. tl.load would use a layout that has to be converted."""
    if PTX:
        return tl.inline_asm_elementwise(
            "ld.global.u16 $0, [$1];", "=r,l", [ptr.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        return tl.load(ptr).to(tl.uint16, bitcast=True).to(tl.int32)


@triton.jit
def _for_each_long(scale, PAIRS: tl.constexpr, LANES: tl.constexpr):
    """Bits of bf16 [PAIRS, LANES] -> fp32 [PAIRS, 2 LANES], each twice."""
    scale = (scale << 16).to(tl.float32, bitcast=True)
    return tl.reshape(tl.broadcast_to(scale[:, :, None], (PAIRS, LANES, 2)), (PAIRS, 2 * LANES))


@triton.jit
def _load_x(x_ptr, step: tl.constexpr, K, LANES: tl.constexpr, EVEN: tl.constexpr):
    """x of a step in pairs, as `_products_ptx` takes it, after what its products are too large by, negative."""
    words = tl.arange(0, 4 * LANES) + step * 4 * LANES
    columns = words // 16 * 128 + words % 16
    a, b = _pairs_of_x(x_ptr, columns, K, EVEN, LANES)
    c, d = _pairs_of_x(x_ptr, columns + 16, K, EVEN, LANES)
    e, f = _pairs_of_x(x_ptr, columns + 32, K, EVEN, LANES)
    g, h = _pairs_of_x(x_ptr, columns + 48, K, EVEN, LANES)
    less = tl.zeros((2 * LANES,), tl.float32)
    if x_ptr.dtype.element_ty == tl.bfloat16:
        less = tl.inline_asm_elementwise(
            _less_ptx(), _LESS_OPERANDS, [a, b, c, d, e, f, g, h], dtype=tl.float32, is_pure=True, pack=2
        )
    return less, a, b, c, d, e, f, g, h


@triton.jit
def _pairs_of_x(x_ptr, columns, K, EVEN: tl.constexpr, LANES: tl.constexpr):
    """x of the columns [4 LANES] and, in the upper 16 bits, of those 64 further: [2 LANES] of even and of odd words."""
    low, high = _load(x_ptr + columns, columns < K, EVEN), _load(x_ptr + columns + 64, columns + 64 < K, EVEN)
    low, high = low.to(tl.uint16, bitcast=True).to(tl.uint32), high.to(tl.uint16, bitcast=True).to(tl.uint32)
    return tl.split(tl.reshape(low | (high << 16), (2 * LANES, 2)))


@triton.jit
def _store(
    y_ptr, b_ptr, up_b_ptr, total, block, N, PAIRS: tl.constexpr, LANES: tl.constexpr, GLU: tl.constexpr,
    NAME: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Stores a block's elements of y. All lanes have all of them, and each stores one."""
    y = _sum_lanes(total, PAIRS, LANES, PTX)
    lanes = tl.arange(0, LANES)
    if GLU:
        at, inside = block * PAIRS + lanes, lanes < PAIRS
        gate, up = tl.split(y)
        h = add_bias(_element(gate, lanes, PAIRS), b_ptr, at, N)
        h, _ = activation(h, NAME, y_ptr.dtype.element_ty == tl.float32)
        h *= add_bias(_element(up, lanes, PAIRS), up_b_ptr, at, N)
    else:
        at, inside = block * (2 * PAIRS) + lanes, lanes < 2 * PAIRS
        h = add_bias(_element(tl.reshape(y, (2 * PAIRS,)), lanes, 2 * PAIRS), b_ptr, at, N)
    tl.store(y_ptr + at, h.to(y_ptr.dtype.element_ty), mask=inside & (at < N))


@triton.jit
def _add_by_mma(
    total, words, scales, step: tl.constexpr, x, dtype: tl.constexpr, PAIRS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Adds a step's products, by mma.sync: element 0 of a lane's two is its part of the sum of a row a, 1 of b's.

    Four lanes, a quad, have a group's words; a warp has eight quads. The left operand has 16 rows: the groups of a row
    a, one per quad, and those of b. The right one has 8 columns: the parts of x that belong to these groups. What is
    wanted of the product is the diagonal, of which each quad has one number for a and one for b. So a lane's operands
    are its own words and its own part of x, which is the same for all rows.
    """
    lanes = tl.arange(0, LANES)
    quad = lanes // 4 % 8
    # Lane j of a quad has columns 2 j and 2 j + 1. 0 or 1: which of them is on the diagonal; 2: neither.
    diagonal = tl.where(lanes % 4 == quad // 2, quad % 2, 2)[None, :, None]
    diagonal = tl.reshape(tl.broadcast_to(diagonal, (PAIRS, LANES, 2)), (PAIRS, 2 * LANES))
    a_scale, b_scale = scales[2 * step], scales[2 * step + 1]
    return tl.inline_asm_elementwise(
        _products_ptx("bf16" if dtype == tl.bfloat16 else "f16"), _PRODUCTS_OPERANDS,
        [total, words[2 * step], words[2 * step + 1], _for_each_long(a_scale, PAIRS, LANES),
         _for_each_long(b_scale, PAIRS, LANES), diagonal, _every(x[0], PAIRS), _every(x[1], PAIRS), _every(x[2], PAIRS),
         _every(x[3], PAIRS), _every(x[4], PAIRS), _every(x[5], PAIRS), _every(x[6], PAIRS), _every(x[7], PAIRS),
         _every(x[8], PAIRS)],
        dtype=tl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _every(x, PAIRS: tl.constexpr):
    return tl.broadcast_to(x[None, :], (PAIRS, x.shape[0]))


@triton.jit
def _add_by_fma(
    total, words, scales, step: tl.constexpr, x_ptr, K, PAIRS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """`_add_by_mma` in fp32, for x of fp32 and where there is no PTX."""
    longs = tl.arange(0, 2 * LANES) + step * 2 * LANES
    a_sum, b_sum = tl.zeros((PAIRS, 2 * LANES), tl.float32), tl.zeros((PAIRS, 2 * LANES), tl.float32)
    for i in tl.static_range(16):
        column = longs // 8 * 128 + 2 * (longs % 8) + (i // 8) + 16 * (i % 8)
        x = tl.load(x_ptr + column, mask=column < K, other=0.0).to(tl.float32)[None, :]
        a_sum += (((words[2 * step] >> (4 * i)) & 15) - 8).to(tl.float32) * x
        b_sum += (((words[2 * step + 1] >> (4 * i)) & 15) - 8).to(tl.float32) * x
    a_sum *= _for_each_long(scales[2 * step], PAIRS, LANES)
    b_sum *= _for_each_long(scales[2 * step + 1], PAIRS, LANES)
    a_sum, b_sum = tl.reshape(a_sum, (PAIRS, LANES, 2)), tl.reshape(b_sum, (PAIRS, LANES, 2))
    return total + tl.reshape(tl.join(tl.sum(a_sum, 2), tl.sum(b_sum, 2)), (PAIRS, 2 * LANES))


@triton.jit
def _sum_lanes(total, PAIRS: tl.constexpr, LANES: tl.constexpr, PTX: tl.constexpr):
    """The sums [PAIRS, 2] of a and b over the lanes.

    Lanes exchange numbers by a shuffle. Before the first and the second, two sums become one register, of which half
    the lanes have one sum and half the other: a fourth of the registers is left for the other three.
    """
    a, b = tl.split(tl.reshape(total, (PAIRS, LANES, 2)))
    if PTX and PAIRS > 1:
        lanes = tl.arange(0, LANES)[None, :]
        both = _merge(a, b, lanes & 1, 1)
        c, d = tl.split(tl.permute(tl.reshape(both, (PAIRS // 2, 2, LANES)), (0, 2, 1)))
        both = _merge(c, d, lanes >> 1 & 1, 2)
        return tl.reshape(tl.sum(tl.reshape(both, (PAIRS // 2, LANES // 4, 4)), 1), (PAIRS, 2))
    else:
        return tl.join(tl.sum(a, 1), tl.sum(b, 1))


@triton.jit
def _merge(a, b, bit, DISTANCE: tl.constexpr):
    """a in lanes whose `bit` is 0, else b, each plus the same of the lane at the distance."""
    return tl.inline_asm_elementwise(
        _merge_ptx(DISTANCE), "=f,f,f,r", [a, b, tl.broadcast_to(bit, a.shape)], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _element(y, lanes, N: tl.constexpr):
    """y[lane] of y [N] for each lane, or 0 past N."""
    return tl.sum(tl.where(tl.arange(0, N)[:, None] == lanes[None, :], y[:, None], 0.0), 0)


@triton.constexpr_function
def _merge_ptx(distance: int) -> str:
    return (
        "{ .reg .pred odd; .reg .b32 keep; .reg .b32 send; setp.ne.s32 odd, $3, 0; selp.b32 send, $1, $2, odd; "
        f"selp.b32 keep, $2, $1, odd; shfl.sync.bfly.b32 send, send, {distance}, 0x1f, 0xffffffff; "
        "add.f32 $0, keep, send; }"
    )


@triton.constexpr_function
def _products_ptx(dtype: str) -> str:
    """PTX: $0 and $1, a lane's parts of the sums of a and b, are $2 and $3 plus products times the scales $8 and $10.

    $4 and $5 are words of a, $6 and $7 of b, $12 says which column a lane has, $14 and $15 are what sums begin with,
    and the pairs of x follow, as in `_x_operand`. Nibbles i and i + 4 of a word become a pair of floats: n - 8 in fp16
    and, with an instruction less, 128 + n or 16 + n in bf16.
    """
    one, less = ("0x3F803F80", "0xC308C308") if dtype == "bf16" else ("0x3C003C00", "0xE408E408")
    lines = [
        ".reg .b32 t; .reg .b32 one; .reg .b32 less; .reg .b32 u<4>; .reg .b32 v<4>; .reg .b32 w<4>; .reg .f32 y<4>;",
        f".reg .f32 a; .reg .f32 b; .reg .pred odd; .reg .pred none; mov.b32 one, {one}; mov.b32 less, {less};",
        "mov.b64 {u0, u1}, $4; mov.b64 {u2, u3}, $5; mov.b64 {v0, v1}, $6; mov.b64 {v2, v3}, $7;",
        "mov.f32 y0, $14; mov.f32 y1, $15; mov.f32 y2, $14; mov.f32 y3, $15;",
    ]
    for word in range(4):
        for first in (0, 2):
            for i in range(2):
                for source, to in ((f"u{word}", f"w{2 * i}"), (f"v{word}", f"w{2 * i + 1}")):
                    shift, mask, base = 4 * (first + i), "0x000f000f", "0x64006400"
                    if dtype == "bf16" and first + i == 0:
                        base = "0x43004300"
                    elif dtype == "bf16":  # the bits of n are the upper ones of the mantissa
                        shift, mask, base = shift - 3, "0x00780078", "0x41804180"
                    lines.append(f"shr.u32 t, {source}, {shift}; lop3.b32 {to}, t, {mask}, {base}, 0xea;")
                    if dtype != "bf16":
                        lines.append(f"fma.rn.{dtype}x2 {to}, {to}, one, less;")
            x = f"${_x_operand(16, word, first)}, ${_x_operand(16, word, first + 1)}"
            lines.append(_mma_ptx(dtype, "w0, w1, w2, w3", x))
    lines += [
        "setp.eq.s32 odd, $12, 1; setp.eq.s32 none, $12, 2; selp.f32 a, y1, y0, odd; selp.f32 b, y3, y2, odd;",
        "selp.f32 a, 0f00000000, a, none; selp.f32 b, 0f00000000, b, none;",
        "fma.rn.f32 $0, a, $8, $2; fma.rn.f32 $1, b, $10, $3;",
    ]
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def _less_ptx() -> str:
    """PTX: $0 and $1, a lane's columns of -(136 or 24) times x, where bf16 has 128 + n or 16 + n for n - 8."""
    lines = [
        ".reg .b32 e; .reg .b32 f; .reg .f32 y<4>; mov.b32 e, 0xC308C308; mov.b32 f, 0xC1C0C1C0;",
        "mov.f32 y0, 0f00000000; mov.f32 y1, y0; mov.f32 y2, y0; mov.f32 y3, y0;",
    ]
    for word in range(4):
        for first, of in ((0, "e, e, f, f"), (2, "f, f, f, f")):
            lines.append(_mma_ptx("bf16", of, f"${_x_operand(2, word, first)}, ${_x_operand(2, word, first + 1)}"))
    return "{ " + " ".join(lines) + " mov.f32 $0, y0; mov.f32 $1, y1; }"


@triton.constexpr_function
def _mma_ptx(dtype: str, weights: str, x: str) -> str:
    sums = "{y0, y1, y2, y3}"
    return f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {sums}, {{{weights}}}, {{{x}}}, {sums};"


@triton.constexpr_function
def _x_operand(start: int, word: int, nibble: int) -> int:
    """Of pairs of x that begin with operand `start`: even words, two operands, and odd ones, for each of 4 nibbles."""
    return start + 2 * (2 * nibble + word % 2) + word // 2


@triton.jit
def _load(ptr, mask, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(ptr)
    else:
        return tl.load(ptr, mask=mask, other=0.0)


@triton.constexpr_function
def _int4_ptx(dtype: str) -> str:
    """PTX: the eight n - 8 of each of two words, two words at a time.

    The bits of n are put into the mantissas of two 16-bit floats at once.
    """
    kind, base, less, one = {
        "bf16": ("bf16x2", 0x43004300, 0xC308C308, 0x3F803F80),  # 128 + n, -136 and 1
        "fp16": ("f16x2", 0x64006400, 0xE408E408, 0x3C003C00),  # 1024 + n, -1032 and 1
    }[dtype]
    nibbles = " ".join(
        f"shr.u32 t, {'low' if i < 4 else 'high'}, {4 * (i % 4)}; lop3.b32 t, t, 0x000f000f, {base}, 0xea; "
        f"fma.rn.{kind} ${i}, t, one, less;"
        for i in range(8)
    )
    return (
        "{ .reg .b32 low; .reg .b32 high; .reg .b32 t; .reg .b32 less; .reg .b32 one; "
        f"prmt.b32 low, $8, $9, 0x5410; prmt.b32 high, $8, $9, 0x7632; mov.b32 less, {less}; mov.b32 one, {one}; "
        + nibbles + " }"
    )  # fmt: skip


@triton.jit
def _unpacked(w, dtype: tl.constexpr, PTX: tl.constexpr):
    """n - 8 of a group's words [..., WORDS], in the order of its columns: [..., GROUP]."""
    if PTX and dtype == tl.bfloat16:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _int4_ptx("bf16"), "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [w], dtype=(tl.bfloat16,) * 8, is_pure=True,
            pack=2,
        )  # fmt: skip
    elif PTX and dtype == tl.float16:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _int4_ptx("fp16"), "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [w], dtype=(tl.float16,) * 8, is_pure=True,
            pack=2,
        )  # fmt: skip
    else:
        a, b = ((w & 15) - 8).to(dtype), (((w >> 4) & 15) - 8).to(dtype)
        c, d = (((w >> 8) & 15) - 8).to(dtype), (((w >> 12) & 15) - 8).to(dtype)
        e, f = (((w >> 16) & 15) - 8).to(dtype), (((w >> 20) & 15) - 8).to(dtype)
        g, h = (((w >> 24) & 15) - 8).to(dtype), (((w >> 28) & 15) - 8).to(dtype)
    return _cat(_cat(_cat(a, b), _cat(c, d)), _cat(_cat(e, f), _cat(g, h)))


@triton.jit
def _cat(a, b):
    """[P, N, K] twice -> [P, N, 2 K], in registers."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 1, 3, 2)), (a.shape[0], a.shape[1], 2 * a.shape[2]))


@triton.jit
def _int4_rows_kernel(
    y_ptr, x_ptr, w_ptr, s_ptr, b_ptr, M, N, K, W, x_stride, y_stride,
    BM: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, WORDS: tl.constexpr,
    GROUP: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BN columns of y [M, N], M <= BM.

    PARTS: groups of the weight's columns that run in parallel, one per warp. W: words of a row of the weight. EVEN: no
    masks are needed.
    """
    wait_for_previous(OVERLAP)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    groups, parts = W // WORDS, tl.arange(0, PARTS)
    m, n = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.minimum(n, N - 1).to(tl.int64)[None, :]
    w_ptr += (rows * W + parts[:, None] * WORDS)[:, :, None] + tl.arange(0, WORDS)[None, None, :]
    s_ptr += rows * groups + parts[:, None]
    columns = (parts[:, None] * GROUP + tl.arange(0, GROUP)[None, :])[:, :, None]
    x_ptr += tl.minimum(m, M - 1).to(tl.int64)[None, None, :] * x_stride + columns
    total = tl.zeros((PARTS, BN, BM), tl.float32)
    for g in tl.range(0, groups, PARTS, num_stages=STAGES):
        inside = parts < groups - g
        x = _load(x_ptr + g * GROUP, columns < K - g * GROUP, EVEN)
        w = _load(w_ptr + g * WORDS, inside[:, None, None], EVEN)
        scale = _load(s_ptr + g, inside[:, None], EVEN)
        sums = tl.dot(_unpacked(w, dtype, PTX), x, input_precision="ieee")
        total += sums * tl.expand_dims(scale.to(tl.float32), 2)
    y = add_bias(tl.sum(total, 0), b_ptr, n[:, None], N)
    y_ptr += m.to(tl.int64)[None, :] * y_stride + n[:, None]
    tl.store(y_ptr, y.to(y_ptr.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


@triton.jit
def _rows_kernel(
    y_ptr, x_ptr, w_ptr, s_ptr, b_ptr, M, N, K, x_stride, y_stride,
    BM: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, STEP: tl.constexpr,
    EVEN: tl.constexpr, PTX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BN columns of y [M, N], M <= BM, for weights of 8 bits.

    PARTS: how many times STEP columns of the weight run in parallel, one per warp, where N alone does not fill the GPU.
    EVEN: no masks are needed.
    """
    wait_for_previous(OVERLAP)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    m, n = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.minimum(n, N - 1).to(tl.int64)
    parts = tl.arange(0, PARTS)
    of_w, of_x = tl.arange(0, STEP)[None, :], tl.arange(0, STEP)[:, None]
    w_ptr += rows[:, None] * K + of_w
    x_ptr += tl.minimum(m, M - 1).to(tl.int64)[None, :] * x_stride + of_x
    if PARTS > 1:
        of_w, of_x = of_w[None] + parts[:, None, None] * STEP, of_x[None] + parts[:, None, None] * STEP
        w_ptr, x_ptr = w_ptr[None] + parts[:, None, None] * STEP, x_ptr[None] + parts[:, None, None] * STEP
        total = tl.zeros((PARTS, BN, BM), tl.float32)
    else:
        total = tl.zeros((BN, BM), tl.float32)
    for k in tl.range(0, K, STEP * PARTS, num_stages=STAGES):
        w, x = _load(w_ptr + k, of_w < K - k, EVEN), _load(x_ptr + k, of_x < K - k, EVEN)
        total = tl.dot(convert(w, dtype, PTX), x, total, input_precision="ieee")
    if PARTS > 1:
        total = tl.sum(total, 0)
    total *= tl.load(s_ptr + n, mask=n < N, other=0.0)[:, None]
    total = add_bias(total, b_ptr, n[:, None], N)
    y_ptr += m.to(tl.int64)[None, :] * y_stride + n[:, None]
    tl.store(y_ptr, total.to(y_ptr.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


def quantized_linear(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:  # fmt: skip
    """F.linear(x, weight, bias) of rows x [T, K]: [T, N], into `out` where given. `kernel_of` has returned "bits"."""
    rows, (n, k), int4 = x.shape[0], weight.shape, weight.kind == "int4"
    if rows == 1 and not int4:
        return gemv(x, weight.packed, bias, out, scale=weight.scale)
    y = x.new_empty(rows, n) if out is None else out
    if rows == 1:
        _launch_int4(y, x, weight, bias)
        return y
    x = x if x.stride(1) == 1 else x.contiguous()
    bn, parts, warps, stages = (_int4_tile if int4 else _tile)(rows, x.itemsize)
    block = max(8 if x.is_cuda else 16, next_power_of_2(rows))  # the interpreter multiplies 16 rows at least
    overlap, even = overlaps_launches(x), k % (GROUP * parts) == 0
    kernel, words = (_int4_rows_kernel, (weight.packed.shape[1],)) if int4 else (_rows_kernel, ())
    launch(
        kernel, (cdiv(n, bn),), y, x, weight.packed, weight.scale, bias, rows, n, k, *words, x.stride(0), y.stride(0),
        block, bn, parts, stages, *((WORDS,) if int4 else ()), GROUP, even, has_ptx(x), overlap,
        num_warps=warps, **overlapping(overlap),
    )  # fmt: skip
    return y


def quantized_glu(
    x: Tensor, gate: QuantizedWeight, up: QuantizedWeight, gate_bias: Tensor | None, up_bias: Tensor | None, *,
    activation: str,
) -> Tensor:  # fmt: skip
    """`gemv` with `up`, for quantised weights of one kind. `choose_mlp` has returned "bits"."""
    if gate.kind != "int4":
        of_up = dict(up=up.packed, up_bias=up_bias, up_scale=up.scale, activation=activation)
        return gemv(x, gate.packed, gate_bias, scale=gate.scale, **of_up)  # type: ignore[arg-type]
    h = x.new_empty(*x.shape[:-1], gate.shape[0])
    _launch_int4(h, x, gate, gate_bias, up, up_bias, activation)
    return h


def _tile(rows: int, itemsize: int) -> tuple[int, int, int, int]:
    """(columns of y, PARTS, warps, stages) of a program, for several rows and weights of 8 bits.

    The fastest measured on an H200 for an 8B with 8, 16 and 64 rows in bf16, among those that fit the 99 KiB of shared
    memory of other GPUs.
    """
    if itemsize == 4:
        return 64, 1, 4, 2
    return (64, 1, 4, 3) if rows > 32 else (16, 4, 4, 3)


def _int4_tile(rows: int, itemsize: int) -> tuple[int, int, int, int]:
    """`_tile` for int4, on an H100. A warp unpacks the groups of its part alone."""
    if itemsize == 4:
        return 16, 1, 4, 2
    if rows <= 16:
        return 32, 4, 4, 3
    return (16, 4, 4, 3) if rows <= 32 else (16, 2, 2, 3)


def _launch_int4(
    y: Tensor, x: Tensor, weight: QuantizedWeight, bias: Tensor | None, up: QuantizedWeight | None = None,
    up_bias: Tensor | None = None, activation: str = "",
) -> None:  # fmt: skip
    (n, k), words = weight.shape, weight.packed.shape[1]
    tile = _one_row_tile(n, words, up is not None)
    steps, block = cdiv(words, 128 * tile.warps), tile.pairs * (2 if up is None else 1)
    overlap, tensor_cores = overlaps_launches(x), has_ptx(x) and x.dtype != torch.float32
    even, full = words % (128 * tile.warps) == 0 and k == 8 * words, n % block == 0
    packed, scale = (None, None) if up is None else (_aligned(up.packed), up.scale)
    registers = {"maxnreg": tile.registers} if tile.registers and overlap else {}  # torch.compile does not know it
    launch(
        _int4_kernel, (cdiv(n, block),), y, x.contiguous(), _aligned(weight.packed), weight.scale, bias, packed, scale,
        up_bias, n, k, words, tile.pairs, steps, min(tile.early, steps), 32 * tile.warps, even, full, tensor_cores,
        activation, overlap, num_warps=tile.warps, **registers, **overlapping(overlap),
    )  # fmt: skip


def _aligned(packed: Tensor) -> Tensor:
    """Words of which four can be loaded at once."""
    return packed if packed.data_ptr() % 16 == 0 else packed.clone()


class OneRowTile(NamedTuple):
    """Of `_int4_kernel`. registers: the most that a lane may have, 0 for any."""

    pairs: int
    warps: int
    early: int
    registers: int = 0


def _one_row_tile(n: int, words: int, glu: bool) -> OneRowTile:
    """The fastest measured on an H200 in the decoding of an 8B."""
    idle = {warps: -words % (128 * warps) for warps in (8, 4, 2)}
    warps = next((warps for warps in idle if 7 * idle[warps] <= words), 1)
    pairs = 4 if n <= 4096 and warps < 8 and not glu else 8
    return OneRowTile(pairs, warps, 1, registers=128 if pairs == 8 and (glu or words > 128 * warps) else 0)
