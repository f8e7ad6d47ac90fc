"""Matmul of int8 activations and ternary weights, four of which share a byte, as in BitNet b1.58. Experimental.

    out[m, n] = sum over k of a[m, k] * w[n, k], times scale_a[m] * scale_w[n], plus bias[n]

A quantised weight is uint8 [R, K] with R = ceil(N / 4): bits 2i, 2i + 1 of byte (r, k) hold w[i * R + r, k] + 1. This
is the layout of transformers' BitNet checkpoints.

- A byte is read once and gives four rows of the weight, which are multiplied by the same activations.
- Sums are exact, in int32, so that the split of K among programs changes no bit.
- Scales, bias and the rounding to the output's dtype are applied to the sum in registers.

Bytes read, for few rows: R K of the weight, a quarter of int8's and an eighth of bf16's.

Source: Ma et al. 2024, https://arxiv.org/abs/2402.17764; layout as in integrations/bitnet.py of
https://github.com/huggingface/transformers.
"""

import operator

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels import _triton
from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import cdiv, tl, triton


def pack_int2(w: Tensor) -> Tensor:
    """w: [N, K] of -1, 0 and 1, in any integer or floating dtype -> uint8 [ceil(N / 4), K].

    Raises InputError for another value; the check synchronises.
    """
    if w.dim() != 2:
        raise InputError(f"pack_int2: w has shape {tuple(w.shape)}; expected [N, K], a row per output feature")
    codes = (w + 1).to(torch.uint8)
    if not torch.equal(codes.to(w.dtype) - 1, w) or bool((codes > 2).any()):
        raise InputError("pack_int2: w has values other than -1, 0 and 1; round a trained weight to them first")
    rows, width = -(-w.shape[0] // 4), w.shape[1]
    codes = torch.cat([codes, codes.new_zeros(4 * rows - w.shape[0], width)]).view(4, rows, width)
    return codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6


def unpack_int2(packed: Tensor, out_features: int | None = None) -> Tensor:
    """packed: uint8 [R, K] -> int8 [N, K], where N is out_features, or 4 R where that is None."""
    _check_packed(packed, out_features, "unpack_int2")
    slots = [(packed >> 2 * i & 3).to(torch.int8) - 1 for i in range(4)]
    return torch.cat(slots)[: packed.shape[0] * 4 if out_features is None else out_features]


def int2_matmul_reference(
    a: Tensor, packed: Tensor, *, scale_a: Tensor | None = None, scale_w: Tensor | None = None,
    bias: Tensor | None = None, out_features: int | None = None, out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    # fp64 holds the integer sums exactly, and unlike int64 has a fast matmul
    out = a.double() @ unpack_int2(packed, out_features).double().t()
    if out_dtype == torch.int32:
        return out.to(torch.int32)
    out = out.float() if scale_a is None else out.float() * scale_a.float()[..., None]
    out = out if scale_w is None else out * scale_w.float()
    return (out if bias is None else out + bias.float()).to(out_dtype)


_UNPACK: tl.constexpr = tl.constexpr(
    "{ .reg .b32 t; "
    + "".join(
        f"shr.b32 t, $4, {2 * i}; lop3.b32 t, t, 0x03030303, 0x80808080, 0xEA; "
        f"sub.u32 t, t, 0x01010101; xor.b32 ${i}, t, 0x80808080; "
        for i in range(4)
    )
    + "}"
)
"""Four bytes at a time: (byte >> 2i & 3) - 1, with the top bit set meanwhile so that no byte borrows from the next."""


@triton.jit
def _slots(w, ASM: tl.constexpr):
    """The four weights in each byte, as int8."""
    if ASM:
        return tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,=r,=r,r", [w], dtype=(tl.int8, tl.int8, tl.int8, tl.int8), is_pure=True, pack=4
        )
    else:
        w0, w1, w2, w3 = w & 3, w >> 2 & 3, w >> 4 & 3, w >> 6
        return w0.to(tl.int8) - 1, w1.to(tl.int8) - 1, w2.to(tl.int8) - 1, w3.to(tl.int8) - 1


@triton.jit
def _dot4(codes, a, acc, ASM: tl.constexpr):
    """acc plus the dot product of four codes with four int8, each four in one int32."""
    if ASM:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [codes, a, acc], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        for j in tl.static_range(4):
            acc += (codes >> 8 * j & 3) * (a << 24 - 8 * j >> 24)
        return acc


@triton.jit
def _store(
    out_ptr, acc, m, n, mask, N, scale_a_ptr, scale_w_ptr, bias_ptr, A: tl.constexpr, W: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """acc [n, m], scaled, into out [m, n]. A, B: whether there is one; W: 0 none, 1 a scalar, 2 one per n."""
    if A or W > 0 or B:
        acc = acc.to(tl.float32)
    if A:
        acc *= tl.load(scale_a_ptr + m, mask=mask, other=0.0).to(tl.float32)
    if W == 1:
        acc *= tl.load(scale_w_ptr).to(tl.float32)
    if W == 2:
        acc *= tl.load(scale_w_ptr + n, mask=mask, other=0.0).to(tl.float32)
    if B:
        acc += tl.load(bias_ptr + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + m.to(tl.int64) * N + n, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _vector_kernel(
    out_ptr, a_ptr, w_ptr, scale_a_ptr, scale_w_ptr, bias_ptr, M, N, R, words, a_stride, w_stride,
    A: tl.constexpr, W: tl.constexpr, B: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Few rows of a, without tensor cores. a and w are read as int32, four bytes in one. The codes of w are w + 1: the
    kernel sums a (w + 1) and subtracts the sum of a."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    acc0 = tl.zeros([BLOCK_R, BLOCK_M, BLOCK_K], tl.int32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    total = tl.zeros([1, BLOCK_M, BLOCK_K], tl.int32)
    ones = tl.full([1, BLOCK_M, BLOCK_K], 0x01010101, tl.int32)
    a_rows, w_rows = m.to(tl.int64)[None, :, None] * a_stride, r.to(tl.int64)[:, None, None] * w_stride
    for start in range(0, words, BLOCK_K):
        k = (start + tl.arange(0, BLOCK_K))[None, None, :]
        w = tl.load(w_ptr + w_rows + k, mask=(r < R)[:, None, None] & (k < words), other=0)
        a = tl.load(a_ptr + a_rows + k, mask=(m < M)[None, :, None] & (k < words), other=0)
        total = _dot4(ones, a, total, ASM)
        acc0 = _dot4(w & 0x03030303, a, acc0, ASM)
        acc1 = _dot4(w >> 2 & 0x03030303, a, acc1, ASM)
        acc2 = _dot4(w >> 4 & 0x03030303, a, acc2, ASM)
        acc3 = _dot4(w >> 6 & 0x03030303, a, acc3, ASM)
    m, r, mask = m[None, :], r[:, None], (r < R)[:, None] & (m < M)[None, :]
    for i in tl.static_range(4):
        acc = acc0 if i == 0 else acc1 if i == 1 else acc2 if i == 2 else acc3
        n = i * R + r
        acc = tl.sum(acc - total, 2)
        _store(out_ptr, acc, m, n, mask & (n < N), N, scale_a_ptr, scale_w_ptr, bias_ptr, A, W, B)


@triton.jit(do_not_specialize=["M"])
def _matmul_kernel(
    out_ptr, a_ptr, w_ptr, scale_a_ptr, scale_w_ptr, bias_ptr, M, N, R, K, a_stride, w_stride,
    A: tl.constexpr, W: tl.constexpr, B: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Tiles of BLOCK_R rows of w by BLOCK_M rows of a, on tensor cores. Each sums one of SPLIT parts of K."""
    tiles_m, tiles_r = tl.cdiv(M, BLOCK_M), tl.cdiv(R, BLOCK_R)
    pid = tl.program_id(0) % (tiles_m * tiles_r)
    part = tl.program_id(0) // (tiles_m * tiles_r)
    first = pid // (GROUP * tiles_r) * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    m = (first + pid % (GROUP * tiles_r) % size) * BLOCK_M + tl.arange(0, BLOCK_M)
    r = pid % (GROUP * tiles_r) // size * BLOCK_R + tl.arange(0, BLOCK_R)

    share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT) * BLOCK_K
    a_ptrs = a_ptr + m.to(tl.int64)[None, :] * a_stride
    w_ptrs = w_ptr + r.to(tl.int64)[:, None] * w_stride
    acc0 = tl.zeros([BLOCK_R, BLOCK_M], tl.int32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    for start in range(part * share, tl.minimum(part * share + share, K), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w = tl.load(w_ptrs + k[None, :], mask=(r < R)[:, None] & (k < K)[None, :], other=0)
        a = tl.load(a_ptrs + k[:, None], mask=(m < M)[None, :] & (k < K)[:, None], other=0)
        w0, w1, w2, w3 = _slots(w, ASM)
        acc0 = tl.dot(w0, a, acc0, out_dtype=tl.int32)
        acc1 = tl.dot(w1, a, acc1, out_dtype=tl.int32)
        acc2 = tl.dot(w2, a, acc2, out_dtype=tl.int32)
        acc3 = tl.dot(w3, a, acc3, out_dtype=tl.int32)
    m, r, mask = m[None, :], r[:, None], (r < R)[:, None] & (m < M)[None, :]
    out_ptr += part.to(tl.int64) * M * N
    for i in tl.static_range(4):
        acc = acc0 if i == 0 else acc1 if i == 1 else acc2 if i == 2 else acc3
        n = i * R + r
        _store(out_ptr, acc, m, n, mask & (n < N), N, scale_a_ptr, scale_w_ptr, bias_ptr, A, W, B)


@triton.jit(do_not_specialize=["M"])
def _finish_kernel(
    out_ptr, partial_ptr, scale_a_ptr, scale_w_ptr, bias_ptr, M, N,
    A: tl.constexpr, W: tl.constexpr, B: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums the parts of K, and scales the sum."""
    m = tl.program_id(1) + tl.zeros([BLOCK], tl.int32)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.int32)
    for part in tl.static_range(SPLIT):
        acc += tl.load(partial_ptr + (m.to(tl.int64) + part * M) * N + n, mask=n < N, other=0)
    _store(out_ptr, acc, m, n, n < N, N, scale_a_ptr, scale_w_ptr, bias_ptr, A, W, B)


_VECTOR_ROWS = 2
"""Largest number of rows of a for the vector kernel; with 4 rows the tensor cores are faster."""
_SPLIT_ROWS = 64
"""Largest number of rows of a for which K is split, so that there are two programs for each multiprocessor."""


def _options(scale_a: Tensor | None, scale_w: Tensor | None, bias: Tensor | None) -> tuple[bool, int, bool]:
    return scale_a is not None, 0 if scale_w is None else 1 if scale_w.numel() == 1 else 2, bias is not None


def _in_words(x: Tensor) -> bool:
    """Whether rows can be read four bytes at a time. Under torch.compile x is assumed to begin with a word."""
    if torch.compiler.is_compiling():
        return x.shape[1] % 4 == 0 and x.is_contiguous()
    return x.shape[1] % 4 == 0 and x.stride(0) % 4 == 0 and x.storage_offset() % 4 == 0


def _matmul(
    a: Tensor, packed: Tensor, scale_a: Tensor | None, scale_w: Tensor | None, bias: Tensor | None,
    width: int, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    n_rows, (R, K) = a.shape[0], packed.shape
    a, packed = _triton.last_dim_contiguous(a), _triton.last_dim_contiguous(packed)
    out = torch.empty((n_rows, width), dtype=out_dtype, device=a.device)
    if not out.numel():
        return out
    options, asm = _options(scale_a, scale_w, bias), _triton.has_ptx(a)
    scales = tuple(a if t is None else t.contiguous() for t in (scale_a, scale_w, bias))
    if n_rows <= _VECTOR_ROWS and _in_words(a) and _in_words(packed):
        launch(
            _vector_kernel, (cdiv(R, 2), 1), out, a.view(torch.int32), packed.view(torch.int32), *scales,
            n_rows, width, R, K // 4, a.stride(0) // 4, packed.stride(0) // 4, *options,
            _triton.next_power_of_2(n_rows), 2, 256, asm, num_warps=2,
        )  # fmt: skip
        return out
    block_m, block_r, block_k = max(16, min(64, _triton.next_power_of_2(n_rows))), 64, 128
    tiles = cdiv(n_rows, block_m) * cdiv(R, block_r)
    split = 1
    if n_rows <= _SPLIT_ROWS:
        split = max(1, min(2 * _triton.num_sms(a.device.index) // tiles, cdiv(K, 4 * block_k), 16))
    parts = out if split == 1 else torch.empty((split, n_rows, width), dtype=torch.int32, device=a.device)
    launch(
        _matmul_kernel, (tiles * split,), parts, a, packed, *scales,
        n_rows, width, R, K, a.stride(0), packed.stride(0), *(options if split == 1 else (False, 0, False)),
        split, block_m, block_r, block_k, 8, asm, num_warps=4, num_stages=4,
    )  # fmt: skip
    if split > 1:
        launch(
            _finish_kernel, (cdiv(width, 512), n_rows), out, parts, *scales, n_rows, width, *options, split, 512,
            num_warps=4,
        )  # fmt: skip
    return out


def _check_packed(packed: Tensor, out_features: int | None, where: str) -> int:
    if packed.dim() != 2 or packed.dtype != torch.uint8:
        raise InputError(f"{where}: packed is {packed.dtype} {tuple(packed.shape)}; expected uint8 [R, K] of pack_int2")
    width = 4 * packed.shape[0] if out_features is None else out_features
    if not 4 * packed.shape[0] - 4 < width <= 4 * packed.shape[0]:
        raise InputError(f"{where}: out_features={width}; the {packed.shape[0]} rows of packed hold four each")
    return operator.index(width)


def int2_matmul(
    a: Tensor, packed: Tensor, *, scale_a: Tensor | None = None, scale_w: Tensor | None = None,
    bias: Tensor | None = None, out_features: int | None = None, out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    """a @ unpack_int2(packed, out_features).T * scale_a * scale_w + bias.

    a: int8 [..., K]; packed: uint8 [ceil(N / 4), K]; out_features: N, where it is no multiple of 4.
    scale_a: [...], one per row of a; scale_w: one number, or [N]; bias: [N]. All are applied in fp32, in this order.
    out_dtype: floating, or torch.int32 for the sums themselves, which take no scale and no bias.
    Returns [..., N] of out_dtype, without a gradient.
    Raises InputError for shapes, dtypes or devices that do not fit.
    """
    width = _check_packed(packed, out_features, "int2_matmul")
    if a.dim() == 0 or a.dtype != torch.int8 or a.shape[-1] != packed.shape[1] or a.device != packed.device:
        raise InputError(
            f"int2_matmul: a is {a.dtype} {tuple(a.shape)} on {a.device}; expected int8 [..., {packed.shape[1]}] on "
            f"{packed.device}"
        )
    if not out_dtype.is_floating_point and (out_dtype != torch.int32 or any(_options(scale_a, scale_w, bias))):
        raise InputError(f"int2_matmul: out_dtype={out_dtype}; floating, or torch.int32 without scales and bias")
    rows = a.shape[:-1]
    for name, t, shapes in (
        ("scale_a", scale_a, (rows,)), ("scale_w", scale_w, ((), (1,), (width,))), ("bias", bias, ((width,),)),
    ):  # fmt: skip
        if t is not None and (tuple(t.shape) not in map(tuple, shapes) or t.device != a.device):
            wanted = " or ".join(str(tuple(shape)) for shape in shapes)
            raise InputError(f"int2_matmul: {name} {tuple(t.shape)} on {t.device}; expected {wanted} on {a.device}")
    if not _triton.use_triton(a):
        return int2_matmul_reference(
            a, packed, scale_a=scale_a, scale_w=scale_w, bias=bias, out_features=width, out_dtype=out_dtype
        )
    out = _matmul(
        a.reshape(rows.numel(), a.shape[-1]), packed, None if scale_a is None else scale_a.reshape(-1), scale_w, bias,
        width, out_dtype,
    )  # fmt: skip
    return out.view(*rows, width)
