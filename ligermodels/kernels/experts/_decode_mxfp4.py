"""The experts of a mixture in MXFP4 for 1 to 64 tokens: the bits of chosen experts alone are read. Without autograd.

The formula, the shapes and the three launches are those of `_decode.py` for more tokens, for any number of them here. A
program multiplies rows of one expert with up to 16 or 32 of its tokens on tensor cores, the weight as the left operand:
`tl.dot_scaled` unpacks codes and scales in registers, exactly, to bf16. Bytes: 4.25 bits for each weight of the chosen
experts, where selecting, dequantising and multiplying them moves 0.53 twice, 2 twice, and 4 of sorted rows per weight.
x in bf16 alone, since `tl.dot_scaled` computes in bf16.
"""

import torch
from torch import Tensor, nn

from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import (
    cdiv,
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
    _group_of,
    _members,
    _place_of,
    _sum_kernel,
    _unit,
)
from ligermodels.kernels.linear._gemv import load
from ligermodels.kernels.linear.mxfp4 import BLOCK, MXFP4Weight
from ligermodels.kernels.linear.operand import LinearOperand


@triton.jit
def _product(
    total, w_ptr, s_ptr, x_ptr, expert, rows, columns,
    N: tl.constexpr, M: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """total + w x of `rows` of an expert's weight [N, M] and columns of x, whose pointers are x_ptr + columns."""
    EVEN: tl.constexpr = M % STEP == 0
    k, byte, group = tl.arange(0, STEP), tl.arange(0, STEP // 2), tl.arange(0, STEP // GROUP)
    w_ptr += expert.to(tl.int64) * (N * (M // 2)) + (rows[:, None] * (M // 2) + byte[None, :])
    s_ptr += expert.to(tl.int64) * (N * (M // GROUP)) + (rows[:, None] * (M // GROUP) + group[None, :])
    x_ptr += columns[None, :] + k[:, None]
    for first in range(0, M, STEP):
        w = load(w_ptr + first // 2, (byte < (M - first) // 2)[None, :], EVEN)
        scale = load(s_ptr + first // GROUP, (group < (M - first) // GROUP)[None, :], EVEN)
        x = load(x_ptr + first, (k < M - first)[:, None], EVEN)
        total = tl.dot_scaled(w, scale, "e2m1", x, None, "bf16", total)
    return total


@triton.jit(do_not_specialize=["n_slots"])
def _up_kernel(
    h_ptr, x_ptr, w_ptr, s_ptr, b_ptr, experts_ptr, n_slots, x_stride,
    E: tl.constexpr, K: tl.constexpr, H: tl.constexpr, INNER: tl.constexpr, NAME: tl.constexpr, OVERLAP: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_S: tl.constexpr, TOKENS: tl.constexpr, BLOCK_I: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """BLOCK_I elements of h of the slots of one expert. One tile has the rows of gate and then those of up."""
    wait(OVERLAP)
    let_next_start(OVERLAP)
    slot = tl.program_id(0) % n_slots
    expert, same, before = _place_of(experts_ptr, slot, n_slots, E, BLOCK_S)
    if before % TOKENS == 0:
        slots, exist = _members(same, before, slot, BLOCK_S, TOKENS)
        start, row = tl.program_id(0) // n_slots * BLOCK_I, tl.arange(0, 2 * BLOCK_I)
        rows = row // BLOCK_I * INNER + tl.minimum(start + row % BLOCK_I, INNER - 1)
        total = tl.zeros((2 * BLOCK_I, TOKENS), tl.float32)
        columns = (slots // K).to(tl.int64) * x_stride
        total = _product(total, w_ptr, s_ptr, x_ptr, expert, rows, columns, 2 * INNER, H, GROUP, STEP)
        gate, up = tl.split(tl.permute(tl.reshape(total, (2, BLOCK_I, TOKENS)), (1, 2, 0)))
        at = start + tl.arange(0, BLOCK_I)[:, None]
        h = _unit(gate, up, b_ptr, expert, at, INNER, NAME, h_ptr.dtype.element_ty)
        tl.store(h_ptr + slots[None, :] * INNER + at, h, mask=exist[None, :] & (at < INNER))


@triton.jit(do_not_specialize=["n_slots"])
def _down_kernel(
    out_ptr, h_ptr, w_ptr, s_ptr, b_ptr, experts_ptr, n_slots,
    E: tl.constexpr, H: tl.constexpr, INNER: tl.constexpr, OVERLAP: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_S: tl.constexpr, TOKENS: tl.constexpr, BLOCK_H: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """BLOCK_H elements of the expert's outputs [slots, H], for the slots of one expert."""
    let_next_start(OVERLAP)
    slot = tl.program_id(0) % n_slots
    expert, same, before = _place_of(experts_ptr, slot, n_slots, E, BLOCK_S)
    slots, exist = _members(same, before, slot, BLOCK_S, TOKENS)
    wait(OVERLAP)
    if before % TOKENS == 0:
        at = tl.program_id(0) // n_slots * BLOCK_H + tl.arange(0, BLOCK_H)
        rows = tl.minimum(at, H - 1)
        total = tl.zeros((BLOCK_H, TOKENS), tl.float32)
        total = _product(total, w_ptr, s_ptr, h_ptr, expert, rows, slots * INNER, H, INNER, GROUP, STEP)
        if b_ptr is not None:
            total += tl.load(b_ptr + expert.to(tl.int64) * H + rows)[:, None].to(tl.float32)
        tl.store(out_ptr + slots[None, :] * H + at[:, None], total, mask=exist[None, :] & (at < H)[:, None])


def _tiles(slots: int, count: int) -> tuple[Tile, Tile]:
    """Of gate_up_proj and of down_proj. The rows and columns have not been measured."""
    group = 16 if slots <= 8 * count else 32
    return Tile(group, 32, 256, 4, 3), Tile(group, 32, 256, 4, 3)


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
    overlap, (of_up, of_down) = overlaps_launches(x), _tiles(n_slots, count)
    h, y = x.new_empty(n_slots, inner), x.new_empty(tokens, hidden)
    out = torch.empty((n_slots, hidden), dtype=torch.float32, device=x.device)
    launch(
        _up_kernel, (n_slots * cdiv(inner, of_up.rows),),
        h, x, gate_up.weight.packed, gate_up.weight.scale, gate_up.bias, experts, n_slots, x.stride(0),
        count, top_k, hidden, inner, activation, overlap, BLOCK, *_group_of(n_slots, of_up)[1:], of_up.rows,
        of_up.columns, num_warps=of_up.warps, num_stages=of_up.stages, **overlapping(overlap),
    )  # fmt: skip
    launch(
        _down_kernel, (n_slots * cdiv(hidden, of_down.rows),),
        out, h, down.weight.packed, down.weight.scale, down.bias, experts, n_slots,
        count, hidden, inner, overlap, BLOCK, *_group_of(n_slots, of_down)[1:], of_down.rows, of_down.columns,
        num_warps=of_down.warps, num_stages=of_down.stages, **overlapping(overlap),
    )  # fmt: skip
    block = min(512, next_power_of_2(hidden))
    launch(
        _sum_kernel, (tokens, cdiv(hidden, block)), y, out, experts, weights,
        count, top_k, hidden, overlap, next_power_of_2(top_k), block, num_warps=4, **overlapping(overlap),
    )  # fmt: skip
    return y
