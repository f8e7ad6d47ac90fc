"""Linear layers of one row, as in decoding, with weights in int4 (quantized.py), on tensor cores. Without autograd.

In one clock, the memory of an H200 delivers 35 weights to each multiprocessor, which issues 128 operations, at most 64
of them on integers. fp32 products take 3.2 to 3.8 operations per weight, 1.6 of them on integers; this kernel takes 1.8
to 2.1, and 0.9. Each lane multiplies the words that it loaded by its own part of x, and only the diagonal of a warp's
matmul is used. So a warp can load 512 bytes of a row in order, and a program loads x once for its 8 or 16 rows. The
first words load while the kernel before this one ends. An 8B decodes 521 tokens/s; in fp32 458.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.kernels._launch import launch
from ligermodels.kernels._math import unit
from ligermodels.kernels._triton import (
    cdiv,
    has_ptx,
    let_next_start,
    overlapping,
    overlaps_launches,
    tl,
    triton,
    wait,
)
from ligermodels.kernels.linear._gemv import add_bias, load

_PRODUCTS_OPERANDS = tl.constexpr("=&f,=&f,f,f,l,l,l,l,f,f,f,f,r,r,f,f" + 16 * ",r")  # of `_products_ptx`
_LESS_OPERANDS = tl.constexpr("=&f,=&f" + 16 * ",r")  # of `_less_ptx`


@triton.jit
def _int4_kernel(
    y_ptr, x_ptr, w_ptr, s_ptr, b_ptr, up_ptr, up_s_ptr, up_b_ptr, N, K,
    W: tl.constexpr, PAIRS: tl.constexpr, STEPS: tl.constexpr, EARLY: tl.constexpr, LANES: tl.constexpr,
    EVEN: tl.constexpr, FULL: tl.constexpr, TENSOR_CORES: tl.constexpr, NAME: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A block of y [N]: w x + b, or with `up_ptr` act(w x + b) * (up x + b').

    A block has PAIRS pairs of rows (a, b): neighbours in w, or one row each of w and `up`. W: words of a row.
    STEPS: tiles of a row. In a tile each of LANES lanes has four words, loaded as two of 64 bits. EARLY: tiles that are
    loaded while the kernel before this one ends. EVEN: all words of the tiles exist. FULL: all rows of blocks exist.
    """
    GLU: tl.constexpr = up_ptr is not None
    let_next_start(OVERLAP)
    w_ptr = w_ptr.to(tl.pointer_type(tl.int64))
    b_w_ptr = up_ptr.to(tl.pointer_type(tl.int64)) if GLU else w_ptr
    b_s_ptr = up_s_ptr if GLU else s_ptr
    block = tl.program_id(0)
    words, scales = (), ()
    for i in tl.static_range(EARLY):
        words += _words(w_ptr, b_w_ptr, block, i, N, W, PAIRS, LANES, GLU, EVEN, FULL)
        scales += _scales(s_ptr, b_s_ptr, block, i, N, W, PAIRS, LANES, GLU, EVEN, FULL, TENSOR_CORES)
    wait(OVERLAP)
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
    """The first row of a block, and its rows a and b [PAIRS, 1], counted from the first."""
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
    """The words of one step, for the rows a and b of a block: int64 [PAIRS, 2 LANES] each."""
    start, a_rows, b_rows = _rows(block, N, PAIRS, GLU, FULL)
    at = tl.arange(0, 2 * LANES)[None, :] + step * 2 * LANES
    a_ptr += start * (W // 2) + (a_rows * (W // 2) + at)
    b_ptr += start * (W // 2) + (b_rows * (W // 2) + at)
    inside = at < W // 2
    if not GLU:
        return load(a_ptr, inside, EVEN), load(b_ptr, inside, EVEN)
    elif EVEN:
        return tl.load(a_ptr, eviction_policy="evict_first"), tl.load(b_ptr, eviction_policy="evict_first")
    else:
        return tl.load(a_ptr, mask=inside, other=0), tl.load(b_ptr, mask=inside, other=0)


@triton.jit
def _scales(
    a_ptr, b_ptr, block, step: tl.constexpr, N, W: tl.constexpr, PAIRS: tl.constexpr, LANES: tl.constexpr,
    GLU: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The scales of one step, for the rows a and b of a block, as bits: [PAIRS, LANES] each."""
    start, a_rows, b_rows = _rows(block, N, PAIRS, GLU, FULL)
    group = tl.arange(0, LANES)[None, :] // 4 + step * (LANES // 4)
    if not EVEN:
        group = tl.minimum(group, W // 16 - 1)
    a = _load_bits(a_ptr + start * (W // 16) + (a_rows * (W // 16) + group), PTX)
    b = _load_bits(b_ptr + start * (W // 16) + (b_rows * (W // 16) + group), PTX)
    return a, b


@triton.jit
def _load_bits(ptr, PTX: tl.constexpr):
    """Loads bf16 numbers as bits. tl.load would choose a layout that must be converted afterwards."""
    if PTX:
        return tl.inline_asm_elementwise(
            "ld.global.u16 $0, [$1];", "=r,l", [ptr.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        return tl.load(ptr).to(tl.uint16, bitcast=True).to(tl.int32)


@triton.jit
def _for_each_long(scale, PAIRS: tl.constexpr, LANES: tl.constexpr):
    """fp32 [PAIRS, 2 LANES] from bits of bf16 [PAIRS, LANES]: each number twice, for the two int64 of a lane."""
    scale = (scale << 16).to(tl.float32, bitcast=True)
    return tl.reshape(tl.broadcast_to(scale[:, :, None], (PAIRS, LANES, 2)), (PAIRS, 2 * LANES))


@triton.jit
def _load_x(x_ptr, step: tl.constexpr, K, LANES: tl.constexpr, EVEN: tl.constexpr):
    """(less, eight tensors of pairs of x) of one step, for `_products_ptx`. less: minus the excess of bf16 products."""
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
    """Pairs x[c] | x[c + 64] << 16 for the columns c [4 LANES]: [2 LANES] for even words, [2 LANES] for odd ones."""
    low, high = load(x_ptr + columns, columns < K, EVEN), load(x_ptr + columns + 64, columns + 64 < K, EVEN)
    low, high = low.to(tl.uint16, bitcast=True).to(tl.uint32), high.to(tl.uint16, bitcast=True).to(tl.uint32)
    return tl.split(tl.reshape(low | (high << 16), (2 * LANES, 2)))


@triton.jit
def _store(
    y_ptr, b_ptr, up_b_ptr, total, block, N, PAIRS: tl.constexpr, LANES: tl.constexpr, GLU: tl.constexpr,
    NAME: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Stores the elements of y of a block. Every lane has all of them, and stores one."""
    y = _sum_lanes(total, PAIRS, LANES, PTX)
    lanes = tl.arange(0, LANES)
    if GLU:
        at, inside = block * PAIRS + lanes, lanes < PAIRS
        gate, up = tl.split(y)
        gate = add_bias(_element(gate, lanes, PAIRS), b_ptr, at, N)
        up = add_bias(_element(up, lanes, PAIRS), up_b_ptr, at, N)
        h, _, _ = unit(gate, up, NAME, y_ptr.dtype.element_ty == tl.float32)
    else:
        at, inside = block * (2 * PAIRS) + lanes, lanes < 2 * PAIRS
        h = add_bias(_element(tl.reshape(y, (2 * PAIRS,)), lanes, 2 * PAIRS), b_ptr, at, N)
    tl.store(y_ptr + at, h.to(y_ptr.dtype.element_ty), mask=inside & (at < N))


@triton.jit
def _add_by_mma(
    total, words, scales, step: tl.constexpr, x, dtype: tl.constexpr, PAIRS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Adds the products of one step, by mma.sync. A lane has two elements: its parts of the sums of rows a and b.

    Four lanes (a quad) have the words of a group of 128 columns; a warp has eight quads. The left operand of the matmul
    has 16 rows: for each quad its group of row a, and of row b. The right operand has 8 columns: for each quad the part
    of x of its group. Only the diagonal of the result is used; each quad has one number of it for a and one for b. So a
    lane's operands are its own words and its own part of x, which is the same for all rows.
    """
    lanes = tl.arange(0, LANES)
    quad = lanes // 4 % 8
    # Lane j of a quad has columns 2 j and 2 j + 1. diagonal: 0 or 1, the one that is on the diagonal; 2: neither.
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
    """`_add_by_mma` with fp32 products, for fp32 x and for devices without PTX."""
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

    Lanes exchange numbers by shuffles. The first two shuffles merge two sums into one register, so that half of the
    lanes continue with one sum and half with the other. The other three shuffles then need a fourth of the registers.
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
    """a in lanes whose `bit` is 0, else b; to each is added the same value of the lane at DISTANCE."""
    return tl.inline_asm_elementwise(
        _merge_ptx(DISTANCE), "=f,f,f,r", [a, b, tl.broadcast_to(bit, a.shape)], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _element(y, lanes, N: tl.constexpr):
    """y[lane] for each lane, or 0 in lanes past the end of y [N]."""
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
    """PTX: $0 = $2 + products of a * $8 and $1 = $3 + products of b * $10, a lane's parts of the two sums.

    $4 and $5: words of a; $6 and $7: words of b; $8 and $10: scales; $12: `diagonal`; $14 and $15: start of the
    products (`less`); then the pairs of x, as in `_x_operand`. Nibbles i and i + 4 of a word become a pair of floats:
    n - 8 in fp16; in bf16, with one instruction less, 128 + n or 16 + n.
    """
    ones, less = ("0x3F803F80", "0xC308C308") if dtype == "bf16" else ("0x3C003C00", "0xE408E408")
    lines = [
        ".reg .b32 t; .reg .b32 one; .reg .b32 less; .reg .b32 u<4>; .reg .b32 v<4>; .reg .b32 w<4>; .reg .f32 y<4>;",
        f".reg .f32 a; .reg .f32 b; .reg .pred odd; .reg .pred none; mov.b32 one, {ones}; mov.b32 less, {less};",
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
    """PTX: $0 and $1, the sums of -136 x or -24 x in a lane's columns, since bf16 has 128 + n or 16 + n for n - 8."""
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
    """The number of the PTX operand with the pair of x for a word (0 to 3) and nibble (0 to 3); `start`: the first."""
    return start + 2 * (2 * nibble + word % 2) + word // 2


def int4_row(
    y: Tensor, x: Tensor, weight: Any, bias: Tensor | None, up: Any = None,
    up_bias: Tensor | None = None, activation: str = "",
) -> None:  # fmt: skip
    """y [1, N] = weight x + bias, or activation(weight x + bias) * (up x + up_bias); x [1, K].

    weight, up: `QuantizedWeight` [N, K] of kind "int4". Biases: [N] or None.
    """
    (n, k), words = weight.shape, weight.packed.shape[1]
    tile = _tile(n, words, up is not None)
    steps, block = cdiv(words, 128 * tile.warps), tile.pairs * (2 if up is None else 1)
    tensor_cores = has_ptx(x) and x.dtype != torch.float32
    even, full = words % (128 * tile.warps) == 0 and k == 8 * words, n % block == 0
    packed, up_packed, up_scale = _aligned(weight.packed), None, None
    if up is not None:
        up_packed, up_scale = _aligned(up.packed), up.scale
    # The kernel does not wait for a copy that is made here.
    copied = packed is not weight.packed or (up is not None and up_packed is not up.packed)
    overlap = not copied and overlaps_launches(x)
    registers = {"maxnreg": tile.registers} if tile.registers and overlap else {}  # torch.compile does not support it
    launch(
        _int4_kernel, (cdiv(n, block),), y, x.contiguous(), packed, weight.scale, bias, up_packed, up_scale,
        up_bias, n, k, words, tile.pairs, steps, min(tile.early, steps), 32 * tile.warps, even, full, tensor_cores,
        activation, overlap, num_warps=tile.warps, **registers, **overlapping(overlap),
    )  # fmt: skip


def _aligned(packed: Tensor) -> Tensor:
    """The words, copied unless they are aligned to 16 bytes, so that four can be loaded at once."""
    return packed if packed.data_ptr() % 16 == 0 else packed.clone()


class Tile(NamedTuple):
    """Options of `_int4_kernel`. registers: maximum number that a lane may have; 0: no limit."""

    pairs: int
    warps: int
    early: int
    registers: int = 0


def _tile(n: int, words: int, glu: bool) -> Tile:
    """The fastest tiles on an H200, measured in the decoding of an 8B."""
    idle = {warps: -words % (128 * warps) for warps in (8, 4, 2)}
    warps = next((warps for warps in idle if 7 * idle[warps] <= words), 1)
    pairs = 4 if n <= 4096 and warps < 8 and not glu else 8
    return Tile(pairs, warps, 1, registers=128 if pairs == 8 and (glu or words > 128 * warps) else 0)
