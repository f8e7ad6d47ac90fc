"""Weights of 8 or 4 bits for inference, and linear layers of up to 64 rows that read them without dequantising.

    int8: w = q * scale[row], q from -127 to 127             fp8: w = q * scale[row], q in e4m3
    int4: w = (n - 8) * scale[row, group], n from 0 to 15, groups of 128 columns; scale may be negative

Bytes per weight: 1, and for int4 0.5 + 2 / 128. Sums are fp32. Which kernel runs depends on the number of rows of x:

- 1 row, int8 and fp8: the kernels of gemv.py.
- 1 row, int4: the kernel of int4_row.py, on tensor cores.
- 2 to 64 rows: `_rows_kernel` and `_int4_rows_kernel`, on tensor cores. The weight is the left operand, so that few
  rows of x fill them. q and n - 8 are exact in x's dtype, and scales multiply the sums. int4 words are unpacked two at
  a time into registers, in the layout that tensor cores need for a group of 128 columns: only words pass through
  shared memory. On an H200 the linear layers of an 8B layer with 8 rows take 72 us in int8, 78 in fp8, and 125
  in bf16 by cuBLAS; on an H100 89 us in int4.
- More rows: the weight is dequantised for cuBLAS (low_bit.py), and so rounded to x's dtype.

Without autograd; linear.py has the gradient of x.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._check import describe
from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import (
    cdiv,
    has_ptx,
    next_power_of_2,
    overlapping,
    overlaps_launches,
    tl,
    triton,
    use_triton,
    wait_for_previous,
)
from ligermodels.kernels.linear._gemv import add_bias, gemv, load
from ligermodels.kernels.linear._int4_row import int4_row
from ligermodels.kernels.linear.fp8 import convert
from ligermodels.kernels.linear.joint import joint
from ligermodels.kernels.linear.low_bit import LowBitWeight, check_quantizable

GROUP = 128
"""Columns of an int4 weight that share a scale."""
WORDS = 16
"""int32 words of a group. Word j has n of columns j, 16 + j, 32 + j, ..., from its lowest bits on."""
_CHUNK = 1 << 24  # weights quantised at a time


FORMATS = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0), "int4": (torch.int32, 8.0)}
"""{kind: (dtype of the packed weights, the value that the largest |w| of a row or group becomes)}."""


@dataclass(frozen=True, eq=False, slots=True)
class QuantizedWeight(LowBitWeight):
    """A weight of one of FORMATS, from `quantize`.

    int8, fp8: packed [N, K], scale fp32 [N]. int4: packed int32 [N, 16 G], scale bf16 [N, G], with G = ceil(K / 128)
    groups; columns past K may have any value.
    """

    max_rows = 64
    tensor_names = row_names = ("packed", "scale")

    scale: Tensor

    @staticmethod
    def joint(weights: Sequence["QuantizedWeight"]) -> "QuantizedWeight | None":
        """The weights as one weight over the same memory; None if their kinds differ or they are not `joint`."""
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
    """(packed, scale) of rows [N, K] in fp32. In int4, the largest |w| of a group becomes -8."""
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


@triton.constexpr_function
def _int4_ptx(dtype: str) -> str:
    """PTX: the eight n - 8 of each of two words, two words at a time.

    The bits of n are put into the mantissas of two 16-bit floats at once.
    """
    kind, base, less, ones = {
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
        f"prmt.b32 low, $8, $9, 0x5410; prmt.b32 high, $8, $9, 0x7632; mov.b32 less, {less}; mov.b32 one, {ones}; "
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
        x = load(x_ptr + g * GROUP, columns < K - g * GROUP, EVEN)
        w = load(w_ptr + g * WORDS, inside[:, None, None], EVEN)
        scale = load(s_ptr + g, inside[:, None], EVEN)
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
        w, x = load(w_ptr + k, of_w < K - k, EVEN), load(x_ptr + k, of_x < K - k, EVEN)
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
    """F.linear(x, weight, bias) [T, N], into `out` if given, for x [T, K]. `kernel_of` has returned "low_bit"."""
    rows, (n, k), int4 = x.shape[0], weight.shape, weight.kind == "int4"
    if rows == 1 and not int4:
        return gemv(x, weight.packed, bias, out, scale=weight.scale)
    y = x.new_empty(rows, n) if out is None else out
    if rows == 1:
        int4_row(y, x, weight, bias)
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
    """act(gate(x)) * up(x) of one row, for weights of one kind. `choose_mlp` has returned "low_bit"."""
    if gate.kind != "int4":
        of_up = dict(up=up.packed, up_bias=up_bias, up_scale=up.scale, activation=activation)
        return gemv(x, gate.packed, gate_bias, scale=gate.scale, **of_up)  # type: ignore[arg-type]
    h = x.new_empty(*x.shape[:-1], gate.shape[0])
    int4_row(h, x, gate, gate_bias, up, up_bias, activation)
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
