"""The experts of a mixture in MXFP4 for 1 to 64 tokens: the bits of chosen experts alone are read. Without autograd.

The formula, the shapes and the three launches are those of `_decode.py` for more tokens, for any number of them here. A
program multiplies rows of one expert with some of its tokens on tensor cores, the weight as the left operand. Bytes:
4.25 bits for each weight of the chosen experts, where selecting, dequantising and multiplying them moves 0.53 twice, 2
twice, and 4 of sorted rows per weight. x in bf16 alone. Weights are unpacked in registers, exactly, to bf16:

- On NVIDIA GPUs by PTX, for up to 8 tokens of an expert. In one clock the memory of an H200 delivers 33 weights to each
  multiprocessor, which issues 128 operations, at most 64 of them on integers; this takes 3.0, and 1.5, for a weight.
  Words go from memory to the lane that multiplies them. gpt-oss-20b's are read at 1.6 TB/s for a token, 2.2 for eight.
- Elsewhere by `tl.dot_scaled`, for up to 16 or 32 tokens: on an H200 at 0.3 TB/s, since unpacked weights change lanes.
"""

import torch
from torch import Tensor, nn

from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import (
    cdiv,
    has_ptx,
    let_next_start,
    next_power_of_2,
    overlapping,
    overlaps_launches,
    tl,
    triton,
    use_triton,
    wait,
)
from ligermodels.kernels.experts._decode import (
    _MAX_SLOTS,
    MAX_TOKENS,
    Tile,
    _expert_of,
    _group_of,
    _members,
    _place_of,
    _sum_kernel,
    _unit,
)
from ligermodels.kernels.linear._gemv import load
from ligermodels.kernels.linear.mxfp4 import BLOCK, MXFP4Weight
from ligermodels.kernels.linear.operand import LinearOperand

# ---- 32 rows of an expert times up to 8 of its tokens, by mma.sync ----

_OFFSET = tl.constexpr(16)
"""Weights are multiplied by 2^-16, so that with the 2^126 of their bits scales up to 2^17 are in bf16."""
_X_OPERANDS = tl.constexpr(",".join(16 * ["=&r"] + 4 * ["l"]))  # of `_pairs_of_x_ptx`
_PRODUCTS_OPERANDS = tl.constexpr(",".join(8 * ["=&f"] + 8 * ["f"] + 8 * ["l"] + 8 * ["r"] + 16 * ["r"]))


@triton.constexpr_function
def _pairs_of_x_ptx() -> str:
    """PTX: of the 32 bytes at $16 and at $17, columns i and i + 4 of the first 8, i from 0 to 3, then of the others."""
    lines = [".reg .b32 x<4>;"]
    for element in range(2):
        for half in range(2):
            lines.append(f"ld.global.v4.b32 {{x0, x1, x2, x3}}, [${16 + element} + {16 * half}];")
            lines += [
                f"prmt.b32 ${2 * (4 * half + i) + element}, x{i // 2}, x{2 + i // 2}, {('0x5410', '0x7632')[i % 2]};"
                for i in range(4)
            ]
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def _products_ptx() -> str:
    """PTX: $0 to $7 = $8 to $15 + products of a lane's blocks of four rows, $16 to $23, two words of 64 bits each.

    $24, $26, $28 and $30: their scales. $32 on: pairs of x, as `_pairs_of_x_ptx` leaves them. Nibbles i and i + 4 of a
    word become a pair of bf16: their bits are put where bf16 has its sign, the last two bits of its exponent and the
    first of its mantissa. That is w * 2^-126, which is multiplied by 2^126, the scale and 2^-16, without rounding for
    scales from 2^-116 on. Above 2^17 it is infinite.
    """
    lines = [
        ".reg .b32 w; .reg .b32 a<4>; .reg .b32 u<16>; .reg .b32 f<4>; .reg .b32 zero; mov.b32 zero, 0;",
        *(f"mov.f32 ${i}, ${8 + i};" for i in range(8)),
        *(f"mov.b64 {{u{2 * i}, u{2 * i + 1}}}, ${16 + i};" for i in range(8)),
    ]
    for row in range(4):
        f = f"f{row}"
        lines.append(
            f"add.u32 {f}, ${24 + 2 * row}, {126 - _OFFSET.value}; min.u32 {f}, {f}, 255; shl.b32 {f}, {f}, 7; "
            f"prmt.b32 {f}, {f}, {f}, 0x1010;"
        )
    for word in range(4):
        for half in range(2):  # of a word, two pairs of nibbles
            x = [f"${32 + 2 * (4 * (word % 2) + 2 * half + i) + word // 2}" for i in range(2)]
            for first in (0, 2):  # of two rows
                for row in (first, first + 1):
                    u = f"u{4 * row + word}"
                    if half:
                        lines.append(f"shr.u32 {u}, {u}, 8;")
                    for i in range(2):
                        lines.append(
                            f"and.b32 w, {u}, {(0x000F000F, 0x00F000F0)[i]}; mul.lo.u32 w, w, {(0x1040, 0x0104)[i]}; "
                            "and.b32 w, w, 0x81C081C0; "
                            f"fma.rn.bf16x2 a{2 * i + row % 2}, w, f{row}, zero;"
                        )
                sums = ", ".join(f"${i}" for i in range(2 * first, 2 * first + 4))
                lines.append(
                    f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{sums}}}, {{a0, a1, a2, a3}}, "
                    f"{{{x[0]}, {x[1]}}}, {{{sums}}};"
                )
    return "{ " + " ".join(lines) + " }"


@triton.jit
def _pairs_of_x(x_ptr, words):
    """The same columns of 8 tokens, as the lanes of `words` multiply them: 8 pairs of bf16 for each."""
    # `words` give the pairs their layout, to which another would have to be converted.
    return tl.inline_asm_elementwise(
        _pairs_of_x_ptx(), _X_OPERANDS, [x_ptr.to(tl.int64), words], dtype=(tl.int32,) * 8, is_pure=False, pack=2
    )


@triton.jit
def _add_by_mma(sums, words, scales, x):
    """The sums [PARTS * 8, 8] of four times 8 rows with 8 tokens, plus the products of 4 blocks of each row.

    A warp's lanes are 8 times 4. Lane (i, j) has block j of row i of each 8, 16 bytes in the order of memory; the same
    columns of token i; and the sums of row i with tokens 2 j and 2 j + 1. These are the operands of matmuls of 16 rows,
    8 columns and 16 products, two for each 4 bytes: which of its columns come in which is no matter.
    """
    return tl.inline_asm_elementwise(
        _products_ptx(), _PRODUCTS_OPERANDS,
        [sums[0], sums[1], sums[2], sums[3], words[0], words[1], words[2], words[3], scales[0], scales[1], scales[2],
         scales[3], x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]],
        dtype=(tl.float32,) * 4, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _words(rows, w_ptr, at, WORDS: tl.constexpr):
    """Words `at` of each row, 64 bits [PARTS * 8, 8], 0 past its end."""
    inside = at < WORDS
    return (
        load(w_ptr + rows[0] * WORDS + at, inside, False), load(w_ptr + rows[1] * WORDS + at, inside, False),
        load(w_ptr + rows[2] * WORDS + at, inside, False), load(w_ptr + rows[3] * WORDS + at, inside, False),
    )  # fmt: skip


@triton.jit
def _scales(rows, s_ptr, at, BLOCKS: tl.constexpr):
    """Scales of blocks `at` of each row, [PARTS * 8, 8]: each for the two words of its block."""
    at = tl.minimum(at, BLOCKS - 1)
    return (
        _twice(_byte(s_ptr + rows[0] * BLOCKS + at)), _twice(_byte(s_ptr + rows[1] * BLOCKS + at)),
        _twice(_byte(s_ptr + rows[2] * BLOCKS + at)), _twice(_byte(s_ptr + rows[3] * BLOCKS + at)),
    )  # fmt: skip


@triton.jit
def _byte(ptr):
    """Loads bytes as int32. tl.load would choose a layout that must be converted afterwards."""
    return tl.inline_asm_elementwise(
        "ld.global.u8 $0, [$1];", "=r,l", [ptr.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _twice(x):
    """[PARTS * 8, 4] -> [PARTS * 8, 8]."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], (x.shape[0], 4, 2)), (x.shape[0], 8))


@triton.jit
def _products_by_mma(
    w_ptr, s_ptr, x_ptr, expert, a_row, b_row, columns,
    N: tl.constexpr, M: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """`_products` for 16 rows each and 8 tokens. PARTS: groups of 128 columns that run in parallel, one per warp.

    Weights are loaded STAGES steps, 1 or 2, before they are multiplied, and x one.
    """
    WORDS: tl.constexpr = M // 16  # of 64 bits, of a row
    BLOCKS: tl.constexpr = M // GROUP
    STEP: tl.constexpr = 8 * PARTS
    w_ptr = w_ptr.to(tl.pointer_type(tl.int64)) + expert.to(tl.int64) * (N * WORDS)
    s_ptr += expert.to(tl.int64) * (N * BLOCKS)
    x_ptr += _for_each_part(columns, PARTS)
    a, c = tl.split(tl.permute(tl.reshape(a_row, (2, 8)), (1, 0)))
    b, d = tl.split(tl.permute(tl.reshape(b_row, (2, 8)), (1, 0)))
    rows = _for_each_part(a, PARTS), _for_each_part(b, PARTS), _for_each_part(c, PARTS), _for_each_part(d, PARTS)
    part = (tl.arange(0, PARTS * 8) // 8)[:, None]
    at, of_block = part * 8 + tl.arange(0, 8)[None, :], part * 4 + tl.arange(0, 4)[None, :]
    zero = tl.zeros((PARTS * 8, 8), tl.float32)
    sums = zero, zero, zero, zero
    words, scales = _words(rows, w_ptr, at, WORDS), _scales(rows, s_ptr, of_block, BLOCKS)
    if STAGES == 2:
        words_1, scales_1 = _words(rows, w_ptr, at + STEP, WORDS), _scales(rows, s_ptr, of_block + STEP // 2, BLOCKS)
    wait(OVERLAP)
    x = _pairs_of_x(x_ptr + 16 * tl.minimum(at, WORDS - 1), words[0])  # past the end w is 0
    for first in tl.range(STEP, WORDS, STEP, num_stages=1):
        if STAGES == 2:
            words_2 = _words(rows, w_ptr, at + (first + STEP), WORDS)
            scales_2 = _scales(rows, s_ptr, of_block + (first + STEP) // 2, BLOCKS)
        else:
            words_1 = _words(rows, w_ptr, at + first, WORDS)
            scales_1 = _scales(rows, s_ptr, of_block + first // 2, BLOCKS)
        x_1 = _pairs_of_x(x_ptr + 16 * tl.minimum(at + first, WORDS - 1), words_1[0])
        sums = _add_by_mma(sums, words, scales, x)
        words, scales, x = words_1, scales_1, x_1
        if STAGES == 2:
            words_1, scales_1 = words_2, scales_2
    sums = _add_by_mma(sums, words, scales, x)
    # over all parts at once: [PARTS, 8, 8, 2 (first or last 8 rows), 2 (a or b)]
    total = tl.join(tl.join(sums[0], sums[2]), tl.join(sums[1], sums[3]))
    a_sum, b_sum = tl.split(tl.sum(tl.reshape(total, (PARTS, 8, 8, 2, 2)), 0) * 2.0**_OFFSET)
    return _rows_of(a_sum), _rows_of(b_sum)


@triton.jit
def _for_each_part(x, PARTS: tl.constexpr):
    """[8] -> [PARTS * 8, 1]."""
    return tl.reshape(tl.broadcast_to(x[None, :], (PARTS, 8)), (PARTS * 8, 1))


@triton.jit
def _rows_of(x):
    """[8, 8, 2] -> [16, 8]."""
    return tl.reshape(tl.permute(x, (2, 0, 1)), (16, 8))


# ---- The same by tl.dot_scaled ----


@triton.jit
def _products_by_dot(
    w_ptr, s_ptr, x_ptr, expert, a_row, b_row, columns,
    N: tl.constexpr, M: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """`_products`, STEP columns at a time."""
    wait(OVERLAP)
    EVEN: tl.constexpr = M % STEP == 0
    BLOCK: tl.constexpr = a_row.shape[0]
    TOKENS: tl.constexpr = columns.shape[0]
    k, byte, group = tl.arange(0, STEP), tl.arange(0, STEP // 2), tl.arange(0, STEP // GROUP)
    rows = tl.reshape(tl.permute(tl.join(a_row, b_row), (1, 0)), (2 * BLOCK, 1))
    w_ptr += expert.to(tl.int64) * (N * (M // 2)) + (rows * (M // 2) + byte[None, :])
    s_ptr += expert.to(tl.int64) * (N * (M // GROUP)) + (rows * (M // GROUP) + group[None, :])
    x_ptr += columns[None, :] + k[:, None]
    total = tl.zeros((2 * BLOCK, TOKENS), tl.float32)
    for first in range(0, M, STEP):
        w = load(w_ptr + first // 2, (byte < (M - first) // 2)[None, :], EVEN)
        scale = load(s_ptr + first // GROUP, (group < (M - first) // GROUP)[None, :], EVEN)
        x = load(x_ptr + first, (k < M - first)[:, None], EVEN)
        total = tl.dot_scaled(w, scale, "e2m1", x, None, "bf16", total)
    return tl.split(tl.permute(tl.reshape(total, (2, BLOCK, TOKENS)), (1, 2, 0)))


# ---- Kernels ----


@triton.jit
def _products(
    w_ptr, s_ptr, x_ptr, expert, a_row, b_row, columns,
    N: tl.constexpr, M: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rows a and b [BLOCK] of an expert's weight [N, M] times columns [TOKENS] of x: two [BLOCK, TOKENS] in fp32.

    columns: where they begin, from x_ptr. 8 tokens: by PTX, with 16 rows each. OVERLAP: waits for x, see `wait`.
    """
    if columns.shape[0] == 8:
        return _products_by_mma(
            w_ptr, s_ptr, x_ptr, expert, a_row, b_row, columns, N, M, GROUP, STEP // 128, STAGES, OVERLAP
        )
    else:
        return _products_by_dot(w_ptr, s_ptr, x_ptr, expert, a_row, b_row, columns, N, M, GROUP, STEP, OVERLAP)


@triton.jit
def _place(experts_ptr, slot, n_slots, E: tl.constexpr, BLOCK_S: tl.constexpr):
    """`_place_of`. BLOCK_S: 1 for one token, whose slots are multiplied one by one."""
    if BLOCK_S == 1:
        return _expert_of(experts_ptr, slot, True, E)[0], 0, 0
    else:
        return _place_of(experts_ptr, slot, n_slots, E, BLOCK_S)


@triton.jit
def _slots(same, before, slot, BLOCK_S: tl.constexpr, TOKENS: tl.constexpr):
    """`_members`."""
    if BLOCK_S == 1:
        i = tl.arange(0, TOKENS)
        return i * 0 + slot, i == 0
    else:
        return _members(same, before, slot, BLOCK_S, TOKENS)


@triton.jit(do_not_specialize=["n_slots"])
def _up_kernel(
    h_ptr, x_ptr, w_ptr, s_ptr, b_ptr, experts_ptr, n_slots, x_stride,
    E: tl.constexpr, K: tl.constexpr, H: tl.constexpr, INNER: tl.constexpr, NAME: tl.constexpr, OVERLAP: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_S: tl.constexpr, TOKENS: tl.constexpr, BLOCK_I: tl.constexpr,
    STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_I elements of h of the slots of one expert."""
    wait(OVERLAP)
    let_next_start(OVERLAP)
    slot = tl.program_id(0) % n_slots
    expert, same, before = _place(experts_ptr, slot, n_slots, E, BLOCK_S)
    if before % TOKENS == 0:
        slots, exist = _slots(same, before, slot, BLOCK_S, TOKENS)
        at = tl.program_id(0) // n_slots * BLOCK_I + tl.arange(0, BLOCK_I)
        rows, columns = tl.minimum(at, INNER - 1), (slots // K).to(tl.int64) * x_stride
        gate, up = _products(
            w_ptr, s_ptr, x_ptr, expert, rows, rows + INNER, columns, 2 * INNER, H, GROUP, STEP, STAGES, False
        )
        h = _unit(gate, up, b_ptr, expert, at[:, None], INNER, NAME, h_ptr.dtype.element_ty)
        tl.store(h_ptr + slots[None, :] * INNER + at[:, None], h, mask=exist[None, :] & (at < INNER)[:, None])


@triton.jit(do_not_specialize=["n_slots"])
def _down_kernel(
    out_ptr, h_ptr, w_ptr, s_ptr, b_ptr, experts_ptr, n_slots,
    E: tl.constexpr, H: tl.constexpr, INNER: tl.constexpr, OVERLAP: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_S: tl.constexpr, TOKENS: tl.constexpr, BLOCK_H: tl.constexpr,
    STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """2 BLOCK_H elements of the expert's outputs [slots, H], for the slots of one expert."""
    let_next_start(OVERLAP)
    slot = tl.program_id(0) % n_slots
    expert, same, before = _place(experts_ptr, slot, n_slots, E, BLOCK_S)
    if before % TOKENS == 0:
        slots, exist = _slots(same, before, slot, BLOCK_S, TOKENS)
        a = tl.program_id(0) // n_slots * (2 * BLOCK_H) + tl.arange(0, BLOCK_H)
        b = a + BLOCK_H
        a_sum, b_sum = _products(
            w_ptr, s_ptr, h_ptr, expert, tl.minimum(a, H - 1), tl.minimum(b, H - 1), slots * INNER,
            H, INNER, GROUP, STEP, STAGES, OVERLAP,
        )  # fmt: skip
        _store_output(out_ptr, a_sum, b_ptr, expert, slots, exist, a, H)
        _store_output(out_ptr, b_sum, b_ptr, expert, slots, exist, b, H)


@triton.jit
def _store_output(out_ptr, total, b_ptr, expert, slots, exist, at, H: tl.constexpr):
    if b_ptr is not None:
        total += tl.load(b_ptr + expert.to(tl.int64) * H + tl.minimum(at, H - 1))[:, None].to(tl.float32)
    tl.store(out_ptr + slots[None, :] * H + at[:, None], total, mask=exist[None, :] & (at < H)[:, None])


# ---- Launches ----


def _tiles(slots: int, count: int, ptx: bool) -> tuple[Tile, Tile]:
    """Of gate_up_proj and of down_proj. rows: of gate and up each; half of those of down_proj. columns: by PTX 128 of
    each warp. Those of PTX were the fastest of 18 on an H200, by `benchmarks.decode_experts --tiles`."""
    if ptx and slots <= max(8, count // 4):  # hardly any expert has two tokens
        return Tile(8, 16, 256, 2, 2), Tile(8, 16, 512, 4, 2)
    if ptx:
        return Tile(8, 16, 256, 2), Tile(8, 16, 256, 2)
    group = 16 if slots <= 8 * count else 32
    return Tile(group, 16, 256, 4, 3), Tile(group, 16, 512, 4, 3)


def decode_mxfp4_takes(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: LinearOperand, down: LinearOperand
) -> bool:
    """True if `decode_mxfp4` computes these, whose shapes `experts_of` has checked."""
    tokens, top_k = experts.shape
    if torch.compiler.is_compiling() or not use_triton(x) or x.dtype != torch.bfloat16 or x.stride(1) != 1:
        return False
    if not (0 < tokens <= MAX_TOKENS and 0 < top_k * tokens <= _MAX_SLOTS):
        return False
    if gate_up.weight.shape[1] != 2 * down.weight.shape[2] or not (weights.is_contiguous() and experts.is_contiguous()):
        return False
    with_gradients = torch.is_grad_enabled()
    for weight, bias, adapter in (gate_up, down):
        if not isinstance(weight, MXFP4Weight) or adapter is not None:
            return False
        if not all(type(t) in (Tensor, nn.Parameter) and t.is_contiguous() for t in (weight.packed, weight.scale)):
            return False
        if weight.packed.numel() // weight.shape[0] >= 2**31:  # offsets in one expert are int32
            return False
        if bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous()):
            return False
        if with_gradients and bias is not None and bias.requires_grad:
            return False
    return not (with_gradients and (x.requires_grad or weights.requires_grad))


def decode_mxfp4(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: LinearOperand, down: LinearOperand, activation: str
) -> Tensor:
    """`experts_of` of what `decode_mxfp4_takes`: [T, H]. activation: as `activation_name` returns it.

    The projections must be older than the last launch that does not overlap, see `let_next_start`.
    """
    (count, hidden, inner), (tokens, top_k), n_slots = down.weight.shape, experts.shape, experts.numel()
    packed = gate_up.weight.packed, down.weight.packed
    ptx = has_ptx(x) and x.stride(0) % 8 == 0 and all(t.data_ptr() % 16 == 0 for t in (x, *packed))
    overlap, (of_up, of_down) = overlaps_launches(x), _tiles(n_slots, count, ptx)
    block_s = 1 if tokens == 1 else _group_of(n_slots, of_up)[1]
    h, y = x.new_empty(n_slots, inner), x.new_empty(tokens, hidden)
    out = torch.empty((n_slots, hidden), dtype=torch.float32, device=x.device)
    launch(
        _up_kernel, (n_slots * cdiv(inner, of_up.rows),),
        h, x, packed[0], gate_up.weight.scale, gate_up.bias, experts, n_slots, x.stride(0),
        count, top_k, hidden, inner, activation, overlap, BLOCK, block_s, of_up.tokens, of_up.rows,
        of_up.columns, of_up.stages, num_warps=of_up.warps, num_stages=of_up.stages, **overlapping(overlap),
    )  # fmt: skip
    launch(
        _down_kernel, (n_slots * cdiv(hidden, 2 * of_down.rows),),
        out, h, packed[1], down.weight.scale, down.bias, experts, n_slots,
        count, hidden, inner, overlap, BLOCK, block_s, of_down.tokens, of_down.rows, of_down.columns,
        of_down.stages, num_warps=of_down.warps, num_stages=of_down.stages, **overlapping(overlap),
    )  # fmt: skip
    block = min(512, next_power_of_2(hidden))
    launch(
        _sum_kernel, (tokens, cdiv(hidden, block)), y, out, experts, weights,
        count, top_k, hidden, overlap, next_power_of_2(top_k), block, num_warps=4, **overlapping(overlap),
    )  # fmt: skip
    return y
