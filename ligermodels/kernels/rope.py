"""Rotary position embedding on the packed output of the q, k, v projection, or on separate q and k.

    (a, b) -> (a * cos - b * sin, b * cos + a * sin)     for a = head[i], b = head[i + R/2], 0 <= i < R/2

What differs from a plain fused rope:
- The angles come as half tables cos, sin [1 or B, S, R/2]; the doubled table is never made. Only the first
  R <= D dims of a head rotate, the others pass through.
- `rope` reads rows [q | k | v] and returns strided views, so nothing is copied apart. Its backward takes the
  three gradients in whatever strides the attention left them, and writes one packed gradient, which is what
  the one GEMM for the projection's dX reads.
- One kernel is all of this: rotation in place, into a new buffer, and (with -sin) the backward.

Nothing but cos and sin is kept for the backward. Math in fp32 (fp64 for fp64), one rounding.
Bytes per rotated element at 2-byte dtypes, which are the minimum: 4 each way; v, and dims past R, cost 4 as
well except in place, where they are not touched.

Source: Su et al. 2021, https://arxiv.org/abs/2104.09864; pairs (i, i + R/2) as `rotate_half` of
https://github.com/huggingface/transformers has them.
"""

import operator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ligermodels.errors import InputError
from ligermodels.kernels._triton import accumulator, device_guard, last_dim_contiguous, tl, triton, use_triton


def rope_qk_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = (t.to(accumulator(q.dtype)).unsqueeze(2) for t in (cos, sin))
    half = cos.shape[-1]

    def rotate(x: Tensor) -> Tensor:
        a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
        return torch.cat([(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest], dim=-1)

    return rotate(q), rotate(k)


def rope_reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, *, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _split(qkv, num_heads, num_kv_heads)
    return *rope_qk_reference(q, k, cos, sin), v


@triton.jit
def _rotate_heads(
    out_ptr, in_ptr, in_stride, cos, sin, H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Rotates the H heads of one token; heads of the output lie D apart. REST copies the dims past 2 * HALF."""
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


@triton.jit(do_not_specialize=["S"])
def _rope_kernel(
    out_ptr, q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, S,
    out_b, out_s, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, cos_b,
    BACKWARD: tl.constexpr, COPY: tl.constexpr, V: tl.constexpr,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One token per program: cos and sin are read once and stay in registers for all its heads.

    Writes q, k (and v, with V) at out_ptr as one packed row. COPY: the output is not the input itself.
    """
    ACC: tl.constexpr = tl.float64 if out_ptr.dtype.element_ty == tl.float64 else tl.float32
    REST: tl.constexpr = COPY and D > 2 * HALF
    s = (tl.program_id(0) % S).to(tl.int64)
    b = (tl.program_id(0) // S).to(tl.int64)
    dims = tl.arange(0, BLOCK_HALF)
    angles = b * cos_b + s * HALF + dims
    cos = tl.load(cos_ptr + angles, mask=dims < HALF, other=0.0).to(ACC)[None, :]
    sin = tl.load(sin_ptr + angles, mask=dims < HALF, other=0.0).to(ACC)[None, :]
    if BACKWARD:
        sin = -sin
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


def _split(packed: Tensor, num_heads: int, num_kv_heads: int, parts: int = 3) -> tuple[Tensor, ...]:
    """Views [B, S, heads, D] of the rows [q | k | v] (with parts=2: [q | k]) of packed [B, S, heads * D]."""
    heads = packed.unflatten(-1, (num_heads + (parts - 1) * num_kv_heads, -1))
    q, k = heads[:, :, :num_heads], heads[:, :, num_heads : num_heads + num_kv_heads]
    return (q, k) if parts == 2 else (q, k, heads[:, :, num_heads + num_kv_heads :])


def _rotate(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor | None, cos: Tensor, sin: Tensor, *, backward: bool, copy: bool
) -> None:
    """Writes the rotated q and k, and v if it is given, into the packed rows of out [B, S, heads * D]."""
    batch, length = q.shape[:2]
    num_heads, head_dim = map(operator.index, q.shape[2:])
    num_kv_heads, half = operator.index(k.shape[2]), operator.index(cos.shape[2])
    if not batch * length:
        return
    q, k, from_v = (last_dim_contiguous(t) for t in (q, k, k if v is None else v))
    block_half, block_rest, block_d = (triton.next_power_of_2(n) for n in (half, max(1, head_dim - 2 * half), head_dim))
    # 16 pairs per thread: their loads in flight make up for the few warps that the registers leave room for.
    block_q, block_k = (min(triton.next_power_of_2(n), max(1, 1024 // block_half)) for n in (num_heads, num_kv_heads))
    with device_guard(out):
        _rope_kernel[(batch * length,)](
            out, q, k, from_v, cos, sin, length,
            out.stride(0), out.stride(1), q.stride(0), q.stride(1), q.stride(2),
            k.stride(0), k.stride(1), k.stride(2), from_v.stride(0), from_v.stride(1), from_v.stride(2),
            0 if cos.shape[0] == 1 else cos.stride(0),
            backward, copy, v is not None, num_heads, num_kv_heads, head_dim, half,
            block_half, block_rest, block_d, block_q, block_k, num_warps=2 if block_q * block_half >= 512 else 1,
        )  # fmt: skip


def _rotate_back(
    grads: tuple[Tensor | None, ...], cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
) -> Tensor | None:
    """The packed gradient [B, S, heads * D] of (dq, dk) or (dq, dk, dv), each of any strides or None."""
    known = next((g for g in grads if g is not None), None)
    if known is None:
        return None
    batch, length, _, dim = known.shape
    counts = (num_heads, num_kv_heads, num_kv_heads)[: len(grads)]
    q, k, *v = (
        known.new_zeros(dim).expand(batch, length, n, dim) if g is None else g
        for g, n in zip(grads, counts, strict=True)
    )
    packed = known.new_empty(batch, length, sum(counts) * dim)
    _rotate(packed, q, k, v[0] if v else None, cos, sin, backward=True, copy=True)
    return packed


# A Function may hand out views of a buffer that it does not return, but not under torch.compile: where such a view
# leaves the graph, its gradient is lost (torch 2.11). There the Functions return the buffer, and it is split behind.


class _Rope(torch.autograd.Function):
    """qkv: [B, S, (HQ + 2 HK) * D] -> q, k, v as views of one packed buffer, or the buffer when compiling."""

    @staticmethod
    def forward(ctx, qkv, cos, sin, num_heads, num_kv_heads, inplace):
        if not torch.compiler.is_compiling():  # Dynamo cannot trace it, and there no gradient is ever None
            ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin)
        ctx.heads = num_heads, num_kv_heads
        out = qkv if inplace else torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
        q, k, v = _split(qkv, num_heads, num_kv_heads)
        _rotate(out, q, k, None if inplace else v, cos, sin, backward=False, copy=not inplace)
        if inplace:
            torch.autograd.graph.increment_version(qkv)
        return out if torch.compiler.is_compiling() else _split(out, num_heads, num_kv_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        grads = grads if len(grads) == 3 else _split(grads[0], *ctx.heads)
        return _rotate_back(grads, *ctx.saved_tensors, *ctx.heads), None, None, None, None, None


class _RopeQK(torch.autograd.Function):
    """q: [B, S, HQ, D], k: [B, S, HK, D] -> both rotated, as views of one packed buffer, or that when compiling."""

    @staticmethod
    def forward(ctx, q, k, cos, sin):
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin)
        ctx.heads = q.shape[2], k.shape[2]
        out = q.new_empty(q.shape[0], q.shape[1], (q.shape[2] + k.shape[2]) * q.shape[3])
        _rotate(out, q, k, None, cos, sin, backward=False, copy=True)
        return out if torch.compiler.is_compiling() else _split(out, q.shape[2], k.shape[2], parts=2)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        (cos, sin), (num_heads, num_kv_heads) = ctx.saved_tensors, ctx.heads
        grads = grads if len(grads) == 2 else _split(grads[0], num_heads, num_kv_heads, parts=2)
        packed = _rotate_back(grads, cos, sin, num_heads, num_kv_heads)
        grads = (None, None) if packed is None else _split(packed, num_heads, num_kv_heads, parts=2)
        return *grads, None, None


def _check_angles(x: Tensor, head_dim: int, cos: Tensor, sin: Tensor, where: str) -> None:
    batch, length = x.shape[:2]
    if cos.shape != sin.shape or cos.dim() != 3 or cos.shape[0] not in (1, batch) or cos.shape[1] != length:
        raise InputError(
            f"{where}: cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must both be [1 or {batch}, {length}, R/2] "
            f"for x of shape {tuple(x.shape)}. Do they come from the position_ids of another batch?"
        )
    if cos.shape[2] == 0 or 2 * cos.shape[2] > head_dim:
        raise InputError(
            f"{where}: cos of width {cos.shape[2]} rotates {2 * cos.shape[2]} dims of a head that has {head_dim}. "
            "The tables are half width: pass cos[..., : R // 2] of a doubled one."
        )
    if cos.requires_grad or sin.requires_grad:
        raise InputError(f"{where}: cos and sin get no gradient here. Compute them under torch.no_grad().")
    if cos.device != x.device or sin.device != x.device:
        raise InputError(f"{where}: cos is on {cos.device}, sin on {sin.device}, x on {x.device}. Move the tables.")


def rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, *, num_heads: int, num_kv_heads: int, inplace: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotates the q and k parts of qkv by position.

    qkv: [B, S, (HQ + 2 HK) * D], rows [q | k | v]; cos, sin: [1 or B, S, R/2], fp32, no gradient. R <= D dims of
    a head rotate, in the pairs (i, i + R/2).
    inplace: the caller is done with qkv, and it may be overwritten. It is overwritten by the Triton kernel, with
    its version counter raised, so that a graph that saved qkv for its backward raises there instead of being wrong.
    Under torch.compile, and on the CPU, new memory is used.
    Returns q [B, S, HQ, D], k and v [B, S, HK, D]: views of one packed buffer (on the CPU: q and k are new tensors,
    v is a view of qkv).
    Raises InputError for shapes or devices that do not fit, and for inplace on a leaf that requires grad or on
    expanded memory.
    """
    num_heads, num_kv_heads = operator.index(num_heads), operator.index(num_kv_heads)
    heads = num_heads + 2 * num_kv_heads
    if qkv.dim() != 3 or min(num_heads, num_kv_heads) < 1 or qkv.shape[2] % heads or not qkv.is_floating_point():
        raise InputError(
            f"rope: qkv has shape {tuple(qkv.shape)} and dtype {qkv.dtype}; expected floating point "
            f"[B, S, heads * D] with {num_heads} + 2 * {num_kv_heads} = {heads} heads."
        )
    head_dim = operator.index(qkv.shape[2]) // heads
    _check_angles(qkv, head_dim, cos, sin, "rope")
    if inplace and not torch.compiler.is_compiling():
        owner = qkv if qkv._base is None else qkv._base
        if torch.is_grad_enabled() and owner.requires_grad and owner.is_leaf:
            raise InputError("rope: inplace=True would overwrite a leaf tensor that requires grad. Pass a clone.")
        if any(n > 1 and stride == 0 for n, stride in zip(qkv.shape, qkv.stride(), strict=True)):
            raise InputError("rope: inplace=True on expanded memory, whose rows overlap. Pass a clone.")
    if not use_triton(qkv):
        return rope_reference(qkv, cos, sin, num_heads=num_heads, num_kv_heads=num_kv_heads)
    inplace = inplace and not torch.compiler.is_compiling() and qkv.stride(2) == 1
    out = _Rope.apply(qkv, cos.contiguous(), sin.contiguous(), num_heads, num_kv_heads, inplace)
    q, k, v = _split(out, num_heads, num_kv_heads) if torch.compiler.is_compiling() else out
    return q, k, v


def rope_qk(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates q [B, S, HQ, D] and k [B, S, HK, D] of any strides, out of place; cos, sin: as in `rope`.

    Returns both in their shapes, as views of one packed buffer (on the CPU: as new tensors).
    Raises InputError for shapes, dtypes or devices that do not fit.
    """
    if q.dim() != 4 or k.dim() != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise InputError(
            f"rope_qk: q has shape {tuple(q.shape)}, k has {tuple(k.shape)}; expected [B, S, heads, D] with B, S "
            "and D the same. Is the head dim before the sequence, as attention kernels like it?"
        )
    if q.dtype != k.dtype or q.device != k.device or not q.is_floating_point():
        raise InputError(
            f"rope_qk: q is {q.dtype} on {q.device}, k is {k.dtype} on {k.device}; expected one floating dtype and "
            "device. Cast one of them."
        )
    _check_angles(q, operator.index(q.shape[3]), cos, sin, "rope_qk")
    if not use_triton(q):
        return rope_qk_reference(q, k, cos, sin)
    out = _RopeQK.apply(q, k, cos.contiguous(), sin.contiguous())
    q, k = _split(out, q.shape[2], k.shape[2], parts=2) if torch.compiler.is_compiling() else out
    return q, k
