"""The experts of a mixture for 1 to 64 tokens, as in decoding: the chosen experts alone are read. Without autograd.

    y[t] = sum over j of weights[t, j] * down[e] @ (act(gate) * up), [gate | up] = gate_up[e] @ x[t], e = experts[t, j]

with or without a bias in each projection.

Shapes, as in experts.py: T tokens, K experts of each token, E experts, H hidden size, I inner size. Slot t * K + j is
token t's choice j; h is [slots, I], in x's dtype.

What differs from training's path (experts.py):
- Nothing is sorted or copied: two launches for few tokens, three for more, all of which a CUDA graph captures.
- Few tokens: a program multiplies rows of one expert with one token, in fp32 as in linear/_gemv.py. The down projection
  of a token sums over its experts in the same program.
- More tokens: the programs of an expert's first slot, its 17th, ... multiply its rows with up to 16 tokens, on tensor
  cores, the weight as the left operand; those of its other slots end at once. Each program counts the slots of its
  expert for itself. A third kernel sums the K rows of each token.
- Only h is rounded before the result.
- On Hopper a launch overlaps the end of the kernel before it. The down projection knows the experts before h is there:
  it loads its first weights, or counts its slots, meanwhile.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.kernels._launch import launch
from ligermodels.kernels._math import unit
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
    wait_for_previous,
)
from ligermodels.kernels.linear._gemv import load

MAX_TOKENS = 64
_MAX_SLOTS = 1024
_DTYPES = torch.bfloat16, torch.float16, torch.float32


@triton.jit
def _expert_of(experts_ptr, slots, inside, E: tl.constexpr):
    """(expert of each slot, clamped to [0, E); whether it was in [0, E)).

    Read from the L2 cache, because the down projection reads before it waits: the launch before it has let it start
    after its own wait, so the experts have been written, but the L1 cache may have older ones.
    """
    named = tl.load(experts_ptr + slots, mask=inside, other=0, cache_modifier=".cg")
    experts = tl.minimum(tl.maximum(named, 0), E - 1)
    return experts.to(tl.int32), named == experts


# ---- Few tokens: a program has one slot, or the slots of one token ----


@triton.jit(do_not_specialize=["n_slots"])
def _up_kernel(
    h_ptr, x_ptr, w_ptr, b_ptr, experts_ptr, n_slots, x_stride,
    E: tl.constexpr, K: tl.constexpr, H: tl.constexpr, INNER: tl.constexpr, NAME: tl.constexpr, OVERLAP: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """BLOCK_I elements of h of one slot. Slots of one expert run side by side, so that the L2 cache has the weights."""
    EVEN: tl.constexpr = H % BLOCK_H == 0
    wait(OVERLAP)
    let_next_start(OVERLAP)
    slot = tl.program_id(0) % n_slots
    expert, _ = _expert_of(experts_ptr, slot, True, E)
    at = tl.program_id(0) // n_slots * BLOCK_I + tl.arange(0, BLOCK_I)
    cols = tl.arange(0, BLOCK_H)
    x_ptr += (slot // K).to(tl.int64) * x_stride
    gate_ptr = w_ptr + expert.to(tl.int64) * (2 * INNER * H) + (tl.minimum(at, INNER - 1)[:, None] * H + cols[None, :])
    gate, up = load(gate_ptr, (cols < H)[None, :], EVEN), load(gate_ptr + INNER * H, (cols < H)[None, :], EVEN)
    gates, ups = tl.zeros((BLOCK_I, BLOCK_H), tl.float32), tl.zeros((BLOCK_I, BLOCK_H), tl.float32)
    for k in tl.range(BLOCK_H, H, BLOCK_H, num_stages=1):
        inside = (cols < H - k)[None, :]
        next_gate, next_up = load(gate_ptr + k, inside, EVEN), load(gate_ptr + INNER * H + k, inside, EVEN)
        x = tl.load(x_ptr + k - BLOCK_H + cols).to(tl.float32)[None, :]
        gates += gate.to(tl.float32) * x
        ups += up.to(tl.float32) * x
        gate, up = next_gate, next_up
    last: tl.constexpr = (H - 1) // BLOCK_H * BLOCK_H
    x = load(x_ptr + last + cols, cols < H - last, EVEN).to(tl.float32)[None, :]
    gates += gate.to(tl.float32) * x
    ups += up.to(tl.float32) * x
    h = _unit(tl.sum(gates, 1), tl.sum(ups, 1), b_ptr, expert, at, INNER, NAME, h_ptr.dtype.element_ty)
    tl.store(h_ptr + slot * INNER + at, h, mask=at < INNER)


@triton.jit
def _unit(gate, up, b_ptr, expert, at, INNER: tl.constexpr, NAME: tl.constexpr, dtype: tl.constexpr):
    """h of elements `at` of gate and up, to which the expert's biases are added."""
    if b_ptr is not None:
        b_ptr += expert.to(tl.int64) * (2 * INNER) + tl.minimum(at, INNER - 1)
        gate, up = gate + tl.load(b_ptr).to(tl.float32), up + tl.load(b_ptr + INNER).to(tl.float32)
    h, _, _ = unit(gate, up, NAME, dtype == tl.float32)
    return h.to(dtype)


@triton.jit
def _packed(w, h, PACK: tl.constexpr):
    """w [rows, K, columns] times h [K, columns], in fp32; PACK columns, which a thread loads at once, are summed."""
    products = w.to(tl.float32) * h.to(tl.float32)[None]
    return tl.sum(tl.reshape(products, (w.shape[0], w.shape[1], w.shape[2] // PACK, PACK)), 3)


@triton.jit(do_not_specialize=["n_tokens"])
def _down_kernel(
    y_ptr, h_ptr, w_ptr, b_ptr, experts_ptr, weights_ptr, n_tokens,
    E: tl.constexpr, K: tl.constexpr, H: tl.constexpr, INNER: tl.constexpr, OVERLAP: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """BLOCK_H elements of y of one token, over all of its experts."""
    EVEN: tl.constexpr = INNER % BLOCK_I == 0 and K == BLOCK_K
    PACK: tl.constexpr = 128 // w_ptr.dtype.element_ty.primitive_bitwidth
    let_next_start(OVERLAP)
    token = tl.program_id(0) % n_tokens
    at = tl.program_id(0) // n_tokens * BLOCK_H + tl.arange(0, BLOCK_H)
    j, cols = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_I)[None, :]
    experts, known = _expert_of(experts_ptr, token * K + j, j < K, E)
    w_ptr += (
        experts.to(tl.int64)[None, :, None] * (H * INNER) + tl.minimum(at, H - 1)[:, None, None] * INNER + cols[None]
    )
    h_ptr += (token * K + j)[:, None] * INNER + cols
    inside = (j < K)[:, None]
    w = load(w_ptr, (inside & (cols < INNER))[None], EVEN)
    wait(OVERLAP)
    total = tl.zeros((BLOCK_H, BLOCK_K, BLOCK_I // PACK), tl.float32)
    for k in tl.range(BLOCK_I, INNER, BLOCK_I, num_stages=1):
        next_w = load(w_ptr + k, (inside & (cols < INNER - k))[None], EVEN)
        total += _packed(w, load(h_ptr + k - BLOCK_I, inside, EVEN), PACK)
        w = next_w
    last: tl.constexpr = (INNER - 1) // BLOCK_I * BLOCK_I
    total += _packed(w, load(h_ptr + last, inside & (cols < INNER - last), EVEN), PACK)
    weights = tl.load(weights_ptr + token * K + j, mask=j < K, other=0.0).to(tl.float32)
    weights = tl.where(known | (j >= K), weights, float("nan"))
    out = tl.sum(total, 2)
    if b_ptr is not None:
        b_ptr += experts.to(tl.int64)[None, :] * H + tl.minimum(at, H - 1)[:, None]
        out += tl.load(b_ptr, mask=(j < K)[None, :], other=0.0).to(tl.float32)
    y = tl.sum(out * weights[None, :], 1)
    tl.store(y_ptr + token * H + at, y.to(y_ptr.dtype.element_ty), mask=at < H)


# ---- More tokens: a program has up to TOKENS slots of one expert ----


@triton.jit
def _place_of(experts_ptr, slot, n_slots, E: tl.constexpr, BLOCK_S: tl.constexpr):
    """(expert of the slot; 1 for each slot of this expert, else 0; how many of them come before this slot)."""
    s = tl.arange(0, BLOCK_S)
    expert, _ = _expert_of(experts_ptr, slot, True, E)
    experts, _ = _expert_of(experts_ptr, s, s < n_slots, E)
    same = ((experts == expert) & (s < n_slots)).to(tl.int32)
    return expert, same, tl.sum(tl.where(s < slot, same, 0), 0)


@triton.jit
def _members(same, before, slot, BLOCK_S: tl.constexpr, TOKENS: tl.constexpr):
    """(slots [TOKENS] of one expert from `slot` on; which of them exist: the others repeat `slot`)."""
    s, i = tl.arange(0, BLOCK_S), tl.arange(0, TOKENS)
    place = tl.where(same > 0, tl.cumsum(same, 0) - 1 - before, -1)
    slots = tl.sum(tl.where(place[:, None] == i[None, :], s[:, None], 0), 0)
    exist = i < tl.sum(same, 0) - before
    return tl.where(exist, slots, slot), exist


@triton.jit(do_not_specialize=["n_slots"])
def _up_tiles_kernel(
    h_ptr, x_ptr, w_ptr, b_ptr, experts_ptr, n_slots, x_stride,
    E: tl.constexpr, K: tl.constexpr, H: tl.constexpr, INNER: tl.constexpr, NAME: tl.constexpr, OVERLAP: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_S: tl.constexpr, TOKENS: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """BLOCK_I elements of h of the slots of one expert. One tile has the rows of gate and then those of up."""
    EVEN: tl.constexpr = H % BLOCK_H == 0
    wait(OVERLAP)
    let_next_start(OVERLAP)
    slot = tl.program_id(0) % n_slots
    expert, same, before = _place_of(experts_ptr, slot, n_slots, E, BLOCK_S)
    if before % TOKENS == 0:
        slots, exist = _members(same, before, slot, BLOCK_S, TOKENS)
        start, k = tl.program_id(0) // n_slots * BLOCK_I, tl.arange(0, BLOCK_H)
        row = tl.arange(0, 2 * BLOCK_I)
        rows = row // BLOCK_I * INNER + tl.minimum(start + row % BLOCK_I, INNER - 1)
        of_w = w_ptr + expert.to(tl.int64) * (2 * INNER * H) + (rows[:, None] * H + k[None, :])
        of_x = x_ptr + (slots // K).to(tl.int64)[None, :] * x_stride + k[:, None]
        total = tl.zeros((2 * BLOCK_I, TOKENS), tl.float32)
        for first in range(0, H, BLOCK_H):
            inside = k < H - first
            w, x = load(of_w + first, inside[None, :], EVEN), load(of_x + first, inside[:, None], EVEN)
            total = tl.dot(w, x, total, input_precision=PRECISION)
        gate, up = tl.split(tl.permute(tl.reshape(total, (2, BLOCK_I, TOKENS)), (1, 2, 0)))
        at = start + tl.arange(0, BLOCK_I)[:, None]
        h = _unit(gate, up, b_ptr, expert, at, INNER, NAME, h_ptr.dtype.element_ty)
        tl.store(h_ptr + slots[None, :] * INNER + at, h, mask=exist[None, :] & (at < INNER))


@triton.jit(do_not_specialize=["n_slots"])
def _down_tiles_kernel(
    out_ptr, h_ptr, w_ptr, b_ptr, experts_ptr, n_slots,
    E: tl.constexpr, H: tl.constexpr, INNER: tl.constexpr, OVERLAP: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_S: tl.constexpr, TOKENS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """BLOCK_H elements of the expert's outputs [slots, H], for the slots of one expert."""
    EVEN: tl.constexpr = INNER % BLOCK_I == 0
    let_next_start(OVERLAP)
    slot = tl.program_id(0) % n_slots
    expert, same, before = _place_of(experts_ptr, slot, n_slots, E, BLOCK_S)
    slots, exist = _members(same, before, slot, BLOCK_S, TOKENS)
    wait(OVERLAP)
    if before % TOKENS == 0:
        at, k = tl.program_id(0) // n_slots * BLOCK_H + tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_I)
        of_w = w_ptr + expert.to(tl.int64) * (H * INNER) + (tl.minimum(at, H - 1) * INNER + k[None, :])
        of_h = h_ptr + slots[None, :] * INNER + k[:, None]
        total = tl.zeros((BLOCK_H, TOKENS), tl.float32)
        for first in range(0, INNER, BLOCK_I):
            inside = k < INNER - first
            w, h = load(of_w + first, inside[None, :], EVEN), load(of_h + first, inside[:, None], EVEN)
            total = tl.dot(w, h, total, input_precision=PRECISION)
        if b_ptr is not None:
            total += tl.load(b_ptr + expert.to(tl.int64) * H + tl.minimum(at, H - 1)).to(tl.float32)
        tl.store(out_ptr + slots[None, :] * H + at, total, mask=exist[None, :] & (at < H))


@triton.jit
def _sum_kernel(
    y_ptr, out_ptr, experts_ptr, weights_ptr,
    E: tl.constexpr, K: tl.constexpr, H: tl.constexpr, OVERLAP: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """BLOCK_H elements of y of one token: its K rows of the experts' outputs, weighted."""
    wait_for_previous(OVERLAP)
    token, j = tl.program_id(0), tl.arange(0, BLOCK_K)
    at = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
    inside = (j < K)[:, None] & (at < H)
    _, known = _expert_of(experts_ptr, token * K + j, j < K, E)
    weights = tl.load(weights_ptr + token * K + j, mask=j < K, other=0.0).to(tl.float32)
    weights = tl.where(known | (j >= K), weights, float("nan"))
    out = tl.load(out_ptr + (token * K + j)[:, None] * H + at, mask=inside, other=0.0)
    y = tl.sum(out * weights[:, None], 0, keep_dims=True)
    tl.store(y_ptr + token * H + at, y.to(y_ptr.dtype.element_ty), mask=at < H)


# ---- Launches ----


class Tile(NamedTuple):
    """The part of a projection that a program multiplies; with 1 token in fp32, with 16 or more on tensor cores."""

    tokens: int
    rows: int
    """Of the result; of a gate and an up projection each."""
    columns: int
    """Of a weight, in one step; of each expert, where a token's down projection sums over them."""
    warps: int
    stages: int = 1


def _tiles(tokens: int, top_k: int, count: int, itemsize: int) -> tuple[Tile, Tile]:
    """Of gate_up_proj and of down_proj."""
    if tokens * top_k <= max(8, count // 4):  # hardly any expert has two tokens
        wide = 4096 // next_power_of_2(top_k)
        return Tile(1, 4, 2048 // itemsize, 8), Tile(1, 4, max(16, wide // itemsize), 4)
    group = 16 if tokens * top_k <= 8 * count else 32
    if itemsize == 4:
        return Tile(group, 32, 32, 4, 3), Tile(group, 64, 32, 4, 3)
    return Tile(group, 32, 128, 4, 4 if group == 16 else 3), Tile(group, 64, 128, 4, 4 if group == 16 else 3)


def decode_takes(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up_proj: Tensor, down_proj: Tensor,
    gate_up_proj_bias: Tensor | None = None, down_proj_bias: Tensor | None = None,
) -> bool:  # fmt: skip
    """True if `decode_experts` computes these, whose shapes `moe_experts` has checked."""
    tokens, top_k = experts.shape
    projections = [t for t in (gate_up_proj, down_proj, gate_up_proj_bias, down_proj_bias) if t is not None]
    return (
        not torch.compiler.is_compiling()
        and use_triton(x)
        and 0 < tokens <= MAX_TOKENS
        and 0 < top_k * tokens <= _MAX_SLOTS
        and x.dtype in _DTYPES
        and all(x.dtype == t.dtype for t in projections)
        and x.stride(1) == 1
        and all(t.is_contiguous() for t in (weights, experts, *projections))
        and gate_up_proj[0].numel() < 2**31  # offsets in one expert are int32
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in (x, weights, *projections)))
    )


def decode_experts(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up_proj: Tensor, down_proj: Tensor,
    gate_up_proj_bias: Tensor | None = None, down_proj_bias: Tensor | None = None, *, activation: str,
) -> Tensor:  # fmt: skip
    """`moe_experts` of what `decode_takes`: [T, H]. activation: as `activation_name` returns it.

    The projections must be older than the last launch that does not overlap, see `let_next_start`.
    """
    of_up, of_down = _tiles(x.shape[0], experts.shape[1], down_proj.shape[0], x.itemsize)
    h = _up(x, experts, gate_up_proj, gate_up_proj_bias, activation, of_up)
    return _down(h, weights, experts, down_proj, down_proj_bias, of_down)


def _up(x: Tensor, experts: Tensor, weight: Tensor, bias: Tensor | None, activation: str, tile: Tile) -> Tensor:
    """h: [slots, I]."""
    (count, inner, hidden), n_slots, top_k = weight.shape, experts.numel(), experts.shape[1]
    inner //= 2
    h = x.new_empty(n_slots, inner)
    overlap = overlaps_launches(x)
    launch(
        _up_kernel if tile.tokens == 1 else _up_tiles_kernel, (n_slots * cdiv(inner, tile.rows),),
        h, x, weight, bias, experts, n_slots, x.stride(0), count, top_k, hidden, inner, activation, overlap,
        *_group_of(n_slots, tile), tile.rows, tile.columns,
        num_warps=tile.warps, num_stages=tile.stages, **overlapping(overlap),
    )  # fmt: skip
    return h


def _down(h: Tensor, weights: Tensor, experts: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile) -> Tensor:
    """y: [T, H]."""
    (count, hidden, inner), (tokens, top_k) = weight.shape, experts.shape
    y = h.new_empty(tokens, hidden)
    overlap, block_k = overlaps_launches(h), next_power_of_2(top_k)
    options = dict(num_warps=tile.warps, num_stages=tile.stages, **overlapping(overlap))
    if tile.tokens == 1:
        launch(
            _down_kernel, (tokens * cdiv(hidden, tile.rows),), y, h, weight, bias, experts, weights, tokens,
            count, top_k, hidden, inner, overlap, block_k, tile.rows, tile.columns, **options,
        )  # fmt: skip
        return y
    out = torch.empty((tokens * top_k, hidden), dtype=torch.float32, device=h.device)
    launch(
        _down_tiles_kernel, (tokens * top_k * cdiv(hidden, tile.rows),), out, h, weight, bias, experts, tokens * top_k,
        count, hidden, inner, overlap, *_group_of(tokens * top_k, tile), tile.rows, tile.columns, **options,
    )  # fmt: skip
    block = min(512, next_power_of_2(hidden))
    launch(
        _sum_kernel, (tokens, cdiv(hidden, block)), y, out, experts, weights,
        count, top_k, hidden, overlap, block_k, block, num_warps=4, **overlapping(overlap),
    )  # fmt: skip
    return y


def _group_of(n_slots: int, tile: Tile) -> tuple:
    """PRECISION, BLOCK_S and TOKENS of a kernel that has several slots of an expert."""
    if tile.tokens == 1:
        return ()
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return precision, 64 if n_slots <= 64 else 512 if n_slots <= 512 else _MAX_SLOTS, tile.tokens
