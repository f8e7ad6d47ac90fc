"""Rotary position embedding on the joint output of the q, k, v projection, or on separate q and k.

    (a, b) -> (a * cos - b * sin, b * cos + a * sin)     for a = head[i], b = head[i + R/2], 0 <= i < R/2

What differs from a plain fused rope:
- cos and sin are half tables, [1 or B, S, R/2]. Only the first R <= D dims of a head rotate.
- `rope` reads rows [q | k | v] and returns strided views, without copies. Its backward takes the three gradients in any
  strides and writes one joint gradient, which one GEMM reads for the projection's dX.
- One kernel rotates in place, rotates into a new buffer, and (with -sin) computes the backward.
- `rope_to_cache`, for decoding, rotates q in place, and writes k and v into a KV cache, also in fp8, in a column that
  only the device knows.

Saved for the backward: cos and sin. Math in fp32 (fp64 for fp64), one rounding.
Bytes per rotated element at 2-byte dtypes, the minimum: 4 each way. v costs 4 in the joint gradient and nothing in the
forward; dims past R cost 4, and nothing in place.

Sources: Su et al. 2021, https://arxiv.org/abs/2104.09864; pairs (i, i + R/2) as `rotate_half` of
https://github.com/huggingface/transformers has them.
"""

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._check import describe
from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import (
    accumulator,
    apply,
    last_dim_contiguous,
    next_power_of_2,
    once_differentiable,
    overlapping,
    overlaps_launches,
    tl,
    triton,
    use_triton,
    wait_for_previous,
)
from ligermodels.kernels.linear.fp8 import DTYPE, are_scales, quantize_heads, store_heads


def rope_qk_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    dtype, half = accumulator(x.dtype), cos.shape[-1]
    cos, sin = (t.to(dtype).unsqueeze(2) for t in (cos, sin))
    a, b, rest = x.to(dtype).split_with_sizes([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1).to(x.dtype)


def rope_reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, *, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    qk, v = _split(qkv, (num_heads + num_kv_heads, num_kv_heads))
    q, k = _rotated(qk, cos, sin).split_with_sizes([num_heads, num_kv_heads], dim=2)
    return q, k, v


@triton.jit
def _rotate_heads(
    out_ptr, in_ptr, in_stride, cos, sin, H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Rotates the H heads of one token; output heads are D apart. REST: copies the dims past 2 * HALF."""
    dims = tl.arange(0, BLOCK_HALF)[None, :]
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    for start in range(0, H, BLOCK_H):
        heads = start + tl.arange(0, BLOCK_H)[:, None]
        mask = (heads < H) & (dims < HALF)
        source = in_ptr + heads.to(tl.int64) * in_stride
        a = tl.load(source + dims, mask=mask, other=0.0).to(cos.dtype)
        b = tl.load(source + dims + HALF, mask=mask, other=0.0).to(cos.dtype)
        target = out_ptr + heads * D
        tl.store(target + dims, (a * cos - b * sin).to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(target + dims + HALF, (b * cos + a * sin).to(out_ptr.dtype.element_ty), mask=mask)
        if REST:
            mask = (heads < H) & (rest < D)
            tl.store(target + rest, tl.load(source + rest, mask=mask), mask=mask)


@triton.jit
def _rotate_heads_to_fp8(
    out_ptr, scale_ptr, in_ptr, in_stride, cos_ptr, sin_ptr, ACC: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`_rotate_heads` into fp8, a whole head at a time, since it has one scale; rounds to the input's dtype first."""
    dims = tl.arange(0, BLOCK_D)[None, :]
    rotates, first = dims < 2 * HALF, dims < HALF
    other = tl.where(first, dims + HALF, dims - HALF)  # the dim of the same pair
    angle = tl.where(first, dims, other)
    cos = tl.load(cos_ptr + angle, mask=rotates, other=1.0).to(ACC)
    sin = tl.load(sin_ptr + angle, mask=rotates, other=0.0).to(ACC)
    sin = tl.where(first, -sin, sin)
    for start in range(0, H, BLOCK_H):
        heads = start + tl.arange(0, BLOCK_H)[:, None]
        source = in_ptr + heads.to(tl.int64) * in_stride
        x = tl.load(source + dims, mask=(heads < H) & (dims < D), other=0.0).to(ACC)
        y = tl.load(source + other, mask=(heads < H) & rotates, other=0.0).to(ACC)
        x = (x * cos + y * sin).to(in_ptr.dtype.element_ty)
        store_heads(out_ptr, scale_ptr, x, heads, dims, H, D)


@triton.jit(do_not_specialize=["S"])
def _rope_kernel(
    out_ptr, q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, S,
    out_b, out_s, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, table_b,
    BACKWARD: tl.constexpr, JOINT: tl.constexpr, COPY: tl.constexpr, V: tl.constexpr,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One token per program, which reads cos and sin once for all heads.

    Writes q, k (and v, with V) at out_ptr as one joint row. JOINT: the inputs are joint rows too, and all three
    pointers are q's. COPY: the output is not the input.
    """
    ACC: tl.constexpr = tl.float64 if out_ptr.dtype.element_ty == tl.float64 else tl.float32
    REST: tl.constexpr = COPY and D > 2 * HALF
    s = (tl.program_id(0) % S).to(tl.int64)
    b = (tl.program_id(0) // S).to(tl.int64)
    dims = tl.arange(0, BLOCK_HALF)
    angles = b * table_b + s * HALF + dims
    cos = tl.load(cos_ptr + angles, mask=dims < HALF, other=0.0).to(ACC)[None, :]
    sin = tl.load(sin_ptr + angles, mask=dims < HALF, other=0.0).to(ACC)[None, :]
    if BACKWARD:
        sin = -sin
    if JOINT:
        k_ptr += HQ * D
        v_ptr += (HQ + HK) * D
    out_ptr += b * out_b + s * out_s
    _rotate_heads(
        out_ptr, q_ptr + b * q_b + s * q_s, q_h, cos, sin,
        HQ, D, HALF, BLOCK_Q, BLOCK_HALF, BLOCK_REST, REST,
    )  # fmt: skip
    _rotate_heads(
        out_ptr + HQ * D, k_ptr + b * k_b + s * k_s, k_h, cos, sin,
        HK, D, HALF, BLOCK_K, BLOCK_HALF, BLOCK_REST, REST,
    )  # fmt: skip
    if V:
        dims = tl.arange(0, BLOCK_D)[None, :]
        for start in range(0, HK, BLOCK_K):
            heads = start + tl.arange(0, BLOCK_K)[:, None]
            mask = (heads < HK) & (dims < D)
            v = tl.load(v_ptr + b * v_b + s * v_s + heads.to(tl.int64) * v_h + dims, mask=mask)
            tl.store(out_ptr + (HQ + HK + heads) * D + dims, v, mask=mask)


def _split(joint: Tensor, counts: Sequence[int]) -> tuple[Tensor, ...]:
    """Views [B, S, count, D] of joint [B, S, sum(counts) * D], one for each count of heads."""
    heads = sum(counts)
    rows = joint.view(joint.shape[0], joint.shape[1], heads, joint.shape[2] // heads)
    return tuple(rows.split_with_sizes(counts, 2))


def _rotate(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor | None, cos: Tensor, sin: Tensor, counts: Sequence[int], *,
    backward: bool = False, copy: bool = True,
) -> None:  # fmt: skip
    """Writes the rotated q and k, and v if given, into the joint rows of out [B, S, heads * D].

    q, k, v: each [B, S, heads, D], or all the same joint [B, S, (HQ + 2 HK) * D]; of any strides.
    """
    batch, length, *_ = shape = q.shape
    if not batch * length:
        return
    num_heads, num_kv_heads, half = counts[0], counts[1], operator.index(cos.shape[-1])
    q = last_dim_contiguous(q)
    joint = len(shape) == 3
    if joint:
        head_dim, k, from_v = operator.index(shape[2]) // sum(counts), q, q
        strides: tuple[int, ...] = (q.stride(0), q.stride(1), head_dim) * 3
    else:
        head_dim, k = operator.index(shape[3]), last_dim_contiguous(k)
        from_v = k if v is None else last_dim_contiguous(v)
        strides = *q.stride()[:3], *k.stride()[:3], *from_v.stride()[:3]
    block_half, block_rest, block_d = (
        next_power_of_2(half),
        next_power_of_2(max(1, head_dim - 2 * half)),
        next_power_of_2(head_dim),
    )
    max_heads = max(1, 1024 // block_half)
    block_q, block_k = min(next_power_of_2(num_heads), max_heads), min(next_power_of_2(num_kv_heads), max_heads)
    launch(
        _rope_kernel, (batch * length,),
        out, q, k, from_v, cos, sin, length,
        out.stride(0), out.stride(1), *strides, 0 if cos.shape[0] == 1 else cos.stride(0),
        backward, joint, copy, v is not None, num_heads, num_kv_heads, head_dim, half,
        block_half, block_rest, block_d, block_q, block_k,
        num_warps=max(1, min(4, block_q * block_half // 256)),
    )  # fmt: skip


def _rotate_back(
    grads: Sequence[Tensor | None], cos: Tensor, sin: Tensor, counts: Sequence[int]
) -> Tensor | None:  # fmt: skip
    """The joint gradient [B, S, heads * D] of (dq, dk) or (dq, dk, dv), each of any strides or None."""
    known = next((g for g in grads if g is not None), None)
    if known is None:
        return None
    batch, length, _, dim = known.shape
    q, k, *v = (
        known.new_zeros(dim).expand(batch, length, n, dim) if g is None else g
        for g, n in zip(grads, counts, strict=True)
    )
    joint = known.new_empty(batch, length, sum(counts) * dim)
    _rotate(joint, q, k, v[0] if v else None, cos, sin, counts, backward=True)
    return joint


# Under torch.compile a Function must return a buffer, not views of it, whose gradients are lost (torch 2.11).


class _Rope(torch.autograd.Function):
    """q [B, S, HQ, D] and k [B, S, HK, D], rotated: views of one buffer.

    Without k, q is the joint qkv [B, S, (HQ + 2 HK) * D], and a view of its v is the third output. When compiling, the
    output is the buffer itself, with v in it.
    """

    @staticmethod
    def forward(ctx, q, k, cos, sin, counts, inplace):
        compiling, joint = torch.compiler.is_compiling(), k is None
        if not compiling:  # Dynamo cannot trace it, and there no gradient is ever None
            ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin)
        ctx.counts, ctx.joint = counts, joint
        if inplace and not compiling:
            views = _split(q, counts)
            _rotate(q, q, q, None, cos, sin, counts, copy=False)
            torch.autograd.graph.increment_version(q)
            return views
        head_dim = q.shape[2] // sum(counts) if joint else q.shape[3]
        written = counts if compiling else counts[:2]
        out = q.new_empty(*q.shape[:2], sum(written) * head_dim)
        _rotate(out, q, q if joint else k, q if joint and compiling else None, cos, sin, counts)
        if compiling:
            return out
        return *_split(out, written), *(_split(q, counts)[2:] if joint else ())

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        grads = grads if len(grads) > 1 else _split(grads[0], ctx.counts)
        cos, sin = ctx.saved_tensors
        d_rows = _rotate_back(grads, cos, sin, ctx.counts)
        dq, dk = (d_rows, None) if ctx.joint or d_rows is None else _split(d_rows, ctx.counts)
        return dq, dk, *[None] * 4


def check_tables(where: str, x: Tensor, head_dim: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, checked and contiguous."""
    name = "q" if x.dim() == 4 else "qkv"
    batch, length, half = x.shape[0], x.shape[1], operator.index(cos.shape[-1]) if cos.dim() else 0
    tables = cos.dim() == 3 and cos.shape[0] in (1, batch) and cos.shape[1] == length
    if not tables or cos.shape != sin.shape or not cos.is_floating_point() or not sin.is_floating_point():
        raise InputError(
            f"{where}: cos has {describe(cos)}, sin {describe(sin)}; expected floating point [1 or {batch}, {length}, "
            f"R/2] of both for {name} {tuple(x.shape)}. Are they of another batch?"
        )
    if half == 0 or 2 * half > head_dim:
        raise InputError(
            f"{where}: cos of width {half} rotates {2 * half} dims of a head that has {head_dim}. "
            "The tables are half width: pass cos[..., : R // 2] of a doubled one."
        )
    if cos.requires_grad or sin.requires_grad:
        raise InputError(f"{where}: cos and sin get no gradient here. Compute them under torch.no_grad().")
    for table, other in (("cos", cos), ("sin", sin)):
        if other.device != x.device:
            raise InputError(f"{where}: {table} is on {other.device}, {name} on {x.device}. Move one of them.")
    return cos.contiguous(), sin.contiguous()


def rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, *, num_heads: int, num_kv_heads: int, inplace: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotates the q and k parts of qkv by position.

    qkv: [B, S, (HQ + 2 HK) * D], rows [q | k | v]. R <= D dims of a head rotate, in the pairs (i, i + R/2).
    cos, sin: fp32 [1 or B, S, R/2], no gradient.
    inplace: the Triton kernel overwrites qkv and raises its version counter, so that a graph that saved qkv for its
        backward raises an error. Under torch.compile, and on the CPU, new memory is used.
    Returns q [B, S, HQ, D], k and v [B, S, HK, D]: q and k are views of one new buffer, and v of qkv; in place, all are
    views of qkv; under torch.compile, of one new buffer.
    Raises InputError for shapes or devices that do not fit, and for inplace on a leaf that requires grad or on
    expanded memory.
    """
    counts = operator.index(num_heads), operator.index(num_kv_heads), operator.index(num_kv_heads)
    heads = sum(counts)
    if qkv.dim() != 3 or min(counts) < 1 or qkv.shape[2] % heads or not qkv.is_floating_point():
        raise InputError(
            f"rope: qkv has {describe(qkv)}; expected floating point "
            f"[B, S, heads * D] with num_heads + 2 * num_kv_heads = {counts[0]} + 2 * {counts[1]} = {heads} heads."
        )
    angles = check_tables("rope", qkv, operator.index(qkv.shape[2]) // heads, cos, sin)
    compiling = torch.compiler.is_compiling()
    if inplace and not compiling:
        owner = qkv if qkv._base is None else qkv._base
        if torch.is_grad_enabled() and owner.requires_grad and owner.is_leaf:
            raise InputError("rope: inplace=True would overwrite a leaf tensor that requires grad. Pass a clone.")
        if any(n > 1 and stride == 0 for n, stride in zip(qkv.shape, qkv.stride(), strict=True)):
            raise InputError("rope: inplace=True on expanded memory, whose rows overlap. Pass a clone.")
    if not use_triton(qkv):
        return rope_reference(qkv, cos, sin, num_heads=counts[0], num_kv_heads=counts[1])
    out = apply(_Rope, qkv, None, *angles, counts, inplace and qkv.stride(2) == 1)
    q, k, v = _split(out, counts) if compiling else out
    return q, k, v


def rope_qk(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates q [B, S, HQ, D] and k [B, S, HK, D] of any strides, out of place; all else as in `rope`.

    Returns both in their shapes, as views of one joint buffer (on the CPU: as new tensors).
    Raises InputError for shapes, dtypes or devices that do not fit.
    """
    fits = q.dim() == k.dim() == 4 and q.shape[:2] == k.shape[:2] and q.shape[3] == k.shape[3]
    if not fits or q.dtype != k.dtype or q.device != k.device or not q.is_floating_point():
        raise InputError(
            f"rope_qk: q has {describe(q)}, k has {describe(k)}; expected [B, S, heads, D] of the same B, S, D, "
            "floating dtype and device. Is the head dim before the sequence, as attention kernels like it?"
        )
    angles = check_tables("rope_qk", q, operator.index(q.shape[3]), cos, sin)
    if not use_triton(q):
        return rope_qk_reference(q, k, cos, sin)
    counts = operator.index(q.shape[2]), operator.index(k.shape[2])
    out = apply(_Rope, q, k, *angles, counts, False)
    q, k = _split(out, counts) if torch.compiler.is_compiling() else out
    return q, k


@triton.jit(do_not_specialize=["capacity"])
def _cache_kernel(
    q_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, cos_ptr, sin_ptr, ends_ptr, capacity,
    q_b, k_b, k_h, v_b, v_h, keys_b, keys_s, values_b, values_s, scales_b, scales_s, table_b,
    RING: tl.constexpr, FP8: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The new token of a row: program 0 rotates q in place, program 1 rotates k into the cache, program 2 copies v."""
    wait_for_previous(OVERLAP)
    ACC: tl.constexpr = tl.float64 if q_ptr.dtype.element_ty == tl.float64 else tl.float32
    b = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(ends_ptr + b) - 1
    if RING:
        slot = slot % capacity
    slot = slot.to(tl.int64)
    if part < 2:
        dims = tl.arange(0, BLOCK_HALF)
        cos = tl.load(cos_ptr + b * table_b + dims, mask=dims < HALF, other=0.0).to(ACC)[None, :]
        sin = tl.load(sin_ptr + b * table_b + dims, mask=dims < HALF, other=0.0).to(ACC)[None, :]
        if part == 0:
            _rotate_heads(
                q_ptr + b * q_b, q_ptr + b * q_b, D, cos, sin,
                HQ, D, HALF, BLOCK_Q, BLOCK_HALF, BLOCK_REST, False,
            )  # fmt: skip
        elif FP8:
            _rotate_heads_to_fp8(
                keys_ptr + b * keys_b + slot * keys_s, key_scales_ptr + b * scales_b + slot * scales_s,
                k_ptr + b * k_b, k_h, cos_ptr + b * table_b, sin_ptr + b * table_b, ACC, HK, D, HALF, BLOCK_K, BLOCK_D,
            )  # fmt: skip
        else:
            _rotate_heads(
                keys_ptr + b * keys_b + slot * keys_s, k_ptr + b * k_b, k_h, cos, sin,
                HK, D, HALF, BLOCK_K, BLOCK_HALF, BLOCK_REST, D > 2 * HALF,
            )  # fmt: skip
    else:
        cols = tl.arange(0, BLOCK_D)[None, :]
        for start in range(0, HK, BLOCK_K):
            heads = start + tl.arange(0, BLOCK_K)[:, None]
            mask = (heads < HK) & (cols < D)
            source = v_ptr + b * v_b + heads.to(tl.int64) * v_h + cols
            target = values_ptr + b * values_b + slot * values_s
            if FP8:
                v = tl.load(source, mask=mask, other=0.0)
                store_heads(target, value_scales_ptr + b * scales_b + slot * scales_s, v, heads, cols, HK, D)
            else:
                tl.store(target + heads * D + cols, tl.load(source, mask=mask), mask=mask)


def rope_to_cache_reference(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, ends: Tensor, *,
    ring: bool = False, scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    q, k = rope_qk_reference(q, k, cos, sin)
    rows, slots = torch.arange(len(q), device=q.device), (ends - 1).long()
    if ring:
        slots = slots % keys.shape[1]
    new: tuple[Tensor, ...] = k, v
    if scales is not None:
        (k, of_k), (v, of_v) = quantize_heads(k), quantize_heads(v)
        new = k, v, of_k, of_v
    for buffer, x in zip((keys, values, *(scales or ())), new, strict=True):
        if buffer.stride(0) == 0:  # torch does not write to expanded memory
            buffer[:1][torch.zeros_like(rows), slots] = x[:, 0]
        else:
            buffer[rows, slots] = x[:, 0]
    return q


def check_token(
    where: str, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, ends: Tensor,
    scales: tuple[Tensor, Tensor] | None,
) -> None:  # fmt: skip
    """Raises InputError where a new token a row does not fit a cache: see `rope_to_cache`."""
    heads, size = k.shape[2], operator.index(k.shape[3])
    if (
        q.shape[:2] != k.shape[:2] or k.shape != v.shape or q.shape[1] != 1 or q.shape[3] != size
        or keys.shape != values.shape or (keys.shape[0], *keys.shape[2:]) != (k.shape[0], heads, size)
        or not q.dtype == k.dtype == v.dtype or not keys.dtype == values.dtype == (DTYPE if scales else q.dtype)
        or not q.device == keys.device == ends.device or ends.dtype != torch.int32 or ends.shape != k.shape[:1]
        or keys.stride()[2:] != (size, 1) or values.stride()[2:] != (size, 1)
        or (scales is not None and not are_scales(scales, keys))
    ):  # fmt: skip
        raise InputError(
            f"{where}: q has {describe(q)}, k {describe(k)}, v {describe(v)}, keys {describe(keys)}, values "
            f"{describe(values)}, ends {describe(ends)}; expected [B, 1, heads, D] and [B, C, HK, D] of one dtype, or "
            "the latter in float8_e4m3fn and scales bf16 [B, C, HK] laid out as heads, and int32 [B], on one device"
        )


def rope_to_cache(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, ends: Tensor, *,
    ring: bool = False, scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Rotates q and k of one new token per row, writes k and v into a cache, and returns the rotated q. No gradient.

    q [B, 1, HQ, D], k, v [B, 1, HK, D], of any strides; q is overwritten if its heads are contiguous. cos, sin as in
    `rope`. keys, values: [B, C, HK, D] with contiguous heads; row b's token goes into column ends[b] - 1, which
    must be below C, or with `ring` into that column modulo C. Rows may share memory (stride 0), and then have different
    ends. ends: int32 [B]. scales: of keys and values in fp8, bf16 [B, C, HK] each, laid out as the heads; see fp8.py.
    Raises InputError for shapes, dtypes or devices that do not fit.
    """
    heads, size = k.shape[2], operator.index(k.shape[3])
    check_token("rope_to_cache", q, k, v, keys, values, ends, scales)
    cos, sin = check_tables("rope_to_cache", q, size, cos, sin)
    if not use_triton(q):
        return rope_to_cache_reference(q, k, v, cos, sin, keys, values, ends, ring=ring, scales=scales)
    q = q if q.stride()[2:] == (size, 1) else q.contiguous()
    k, v, half = last_dim_contiguous(k), last_dim_contiguous(v), operator.index(cos.shape[-1])
    num_heads, block_half = operator.index(q.shape[2]), next_power_of_2(half)
    max_heads, overlap = max(1, 1024 // block_half), overlaps_launches(q)
    launch(
        _cache_kernel, (len(q), 3),
        q, k, v, keys, values, *(scales or (keys, values)), cos, sin, ends, keys.shape[1],
        q.stride(0), k.stride(0), k.stride(2), v.stride(0), v.stride(2), *keys.stride()[:2], *values.stride()[:2],
        *(scales[0].stride()[:2] if scales else (0, 0)), 0 if cos.shape[0] == 1 else cos.stride(0),
        ring, scales is not None, num_heads, operator.index(heads), size, half,
        block_half, next_power_of_2(max(1, size - 2 * half)), next_power_of_2(size),
        min(next_power_of_2(num_heads), max_heads), min(next_power_of_2(heads), max_heads), overlap,
        num_warps=4, **overlapping(overlap),
    )  # fmt: skip
    return q
