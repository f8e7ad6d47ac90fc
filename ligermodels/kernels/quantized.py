"""Weights of 8 or 4 bits for inference, and linear layers of up to 64 rows that read them without dequantising.

    int8: w = q * scale[row], q from -127 to 127             fp8: w = q * scale[row], q in e4m3
    int4: w = (n - 8) * scale[row, group], n from 0 to 15, groups of 128 columns; scale may be negative

Bytes per weight: 1, and for int4 0.5 + 2 / 128. Sums are fp32. Which kernel runs depends on the number of rows of x:

- 1 row, int8 and fp8: the kernels of gemv.py.
- 1 row, int4: `_int4_kernel`, on tensor cores. An H200 reads 36 weights per clock and multiprocessor, which issues 128
  operations in that time; fp32 products take 3.2 to 3.8 operations a weight, these 2.3. A thread loads 16 bytes of two
  rows, and its words are the left operand as they are: which column of the weight an operand's column is, is free.
  Words are shifted and masked two nibbles at a time. The first words are read while the kernel before ends. On an H200
  the linear layers and norms of an 8B layer take 45 us with the best tile for each, with fp32 products 52.
- 2 to 64 rows: `_rows_kernel` and `_int4_rows_kernel`, on tensor cores. The weight is the left operand, so that few
  rows of x fill them. q and n - 8 are exact in x's dtype, and scales multiply the sums. Words of int4 are unpacked two
  at a time, into registers that hold them as tensor cores want a group of 128 columns: nothing but words passes
  through shared memory. On an H200 the linear layers of an 8B layer with 8 rows take 72 us in int8, 78 in fp8, and 125
  in bf16 by cuBLAS; on an H100 89 us in int4.
- More rows: the weight is dequantised into a reused buffer for cuBLAS (low_bit.py), and so rounded to x's dtype.

Without autograd; `frozen_linear` of low_bit.py has the gradient of x.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._check import describe
from ligermodels.kernels._launch import launch
from ligermodels.kernels._math import activation
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
from ligermodels.kernels.fp8 import convert
from ligermodels.kernels.gemv import add_bias, gemv, gemv_glu
from ligermodels.kernels.joint import as_one_layer, joint
from ligermodels.kernels.low_bit import output_for, select_rows
from ligermodels.kernels.operand import Biases, LowBitWeight, grouped_shape

GROUP = 128
"""Columns of an int4 weight that share a scale."""
WORDS = 16
"""int32 words of a group. Word j has n of columns j, 16 + j, 32 + j, ..., from its lowest bits on."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CHUNK = 1 << 24  # weights quantised at a time
_OPERANDS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 40))  # of `_products_ptx`: 8 results and 40 arguments


class Format(NamedTuple):
    """dtypes of the packed weights and of the scales; largest: what the largest |w| of a row or group becomes."""

    packed: torch.dtype
    scale: torch.dtype
    largest: float


FORMATS = {
    "int8": Format(torch.int8, torch.float32, 127.0),
    "fp8": Format(torch.float8_e4m3fn, torch.float32, 448.0),
    "int4": Format(torch.int32, torch.bfloat16, 8.0),
}


@dataclass(frozen=True, eq=False, slots=True)
class QuantizedWeight(LowBitWeight):
    """A weight [N, K] of one of FORMATS.

    int8, fp8: packed [N, K], scale fp32 [N]. int4: packed int32 [N, 16 G], scale bf16 [N, G] of G = ceil(K / 128)
    groups, where columns past K may have any value. dtype: of the weight that was quantised. layers: where the rows are
    those of a group of E layers, E; the shape is then [E, N / E, K].
    """

    max_rows: ClassVar[int] = 64
    kind: str
    packed: Tensor
    scale: Tensor
    columns: int
    dtype: torch.dtype
    layers: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        shape = self.packed.shape[0], self.columns
        return shape if self.layers is None else grouped_shape(shape, self.layers)

    def dequantize(self, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        return dequantize(self, dtype, out)

    def flatten(self) -> tuple[tuple[Tensor | None, ...], tuple[Any, ...]]:
        return (self.packed, self.scale), (self.kind, self.columns, self.dtype, self.layers)

    @classmethod
    def unflatten(cls, tensors: Sequence[Any], options: tuple[Any, ...]) -> Self:
        kind, *rest = options
        return cls(kind, *tensors, *rest)

    def in_groups(self, groups: int) -> Self:
        return replace(self, layers=groups)

    @property
    def is_apart(self) -> bool:
        return True

    def select(self, index: Tensor) -> Self:
        packed, scale = (select_rows(part, self.shape[0], index) for part in (self.packed, self.scale))
        return replace(self, packed=packed, scale=scale, layers=index.numel())

    @classmethod
    def stack(cls, weights: Sequence[Self]) -> Self:
        packed, scale = torch.cat([w.packed for w in weights]), torch.cat([w.scale for w in weights])
        return replace(weights[0], packed=packed, scale=scale)

    def halves(self) -> tuple["QuantizedWeight", "QuantizedWeight"]:
        """The upper and the lower half of the rows."""
        (a, b), (c, d) = self.packed.chunk(2), self.scale.chunk(2)
        rest = self.columns, self.dtype
        return QuantizedWeight(self.kind, a, c, *rest), QuantizedWeight(self.kind, b, d, *rest)


# ---- Quantising and dequantising ----


def quantize(weight: Tensor, kind: str) -> QuantizedWeight:
    """The weight [N, K] (bf16, fp16 or fp32, finite, without a gradient) as int8, fp8 or int4.

    Synchronises to check that the weight is finite. Raises InputError for other weights and kinds.
    """
    if kind not in FORMATS:
        raise InputError(f"quantize: kind={kind!r}; expected one of {', '.join(FORMATS)}")
    if weight.dtype not in _DTYPES or weight.dim() != 2 or not weight.numel():
        raise InputError(f"quantize: weight has {describe(weight)}; expected [N, K] of bf16, fp16 or fp32")
    if weight.requires_grad:
        raise InputError(f"quantize: the weight requires a gradient, but {kind} is frozen; pass weight.detach()")
    if not weight.is_meta and not bool(torch.stack(weight.aminmax()).isfinite().all()):
        raise InputError(f"quantize: the weight has NaN or infinity, which {kind} cannot represent")
    n, k = weight.shape
    groups = cdiv(k, GROUP)
    packed, scale = empty(kind, n, k, weight.device)
    rows = max(1, _CHUNK // k)
    for i in range(0, n, rows):
        part = weight[i : i + rows].float()
        if kind == "int4":
            values = F.pad(part, (0, groups * GROUP - k)).view(-1, groups, GROUP)
            packed[i : i + rows], scale[i : i + rows] = _int4(values)
            continue
        found = part.abs().amax(1) / FORMATS[kind].largest
        values = part / torch.where(found == 0, 1.0, found)[:, None]
        packed[i : i + rows] = (values.round() if kind == "int8" else values).to(packed.dtype)
        scale[i : i + rows] = found
    return QuantizedWeight(kind, packed, scale, k, weight.dtype)


def _int4(values: Tensor) -> tuple[Tensor, Tensor]:
    """Words [N, 16 G] and scales [N, G] of fp32 groups [N, G, 128]; the largest |w| of a group becomes -8."""
    form = FORMATS["int4"]
    scale = (values.gather(-1, values.abs().argmax(-1, keepdim=True)) / -form.largest).to(form.scale).float()
    found = (values / torch.where(scale == 0, 1.0, scale)).round_().clamp_(-8, 7)
    n = (found + 8).to(torch.int32).view(*values.shape[:2], 8, WORDS)
    words = n[:, :, 0].clone()
    for i in range(1, 8):
        words |= n[:, :, i] << (4 * i)
    return words.flatten(1), scale.squeeze(-1).to(form.scale)


def empty(kind: str, rows: int, columns: int, device: Any) -> tuple[Tensor, Tensor]:
    """Uninitialised packed and scale of a weight [rows, columns]."""
    form, groups = FORMATS[kind], cdiv(columns, GROUP)
    sizes = ((rows, groups * WORDS), (rows, groups)) if kind == "int4" else ((rows, columns), (rows,))
    packed = torch.empty(sizes[0], dtype=form.packed, device=device)
    return packed, torch.empty(sizes[1], dtype=form.scale, device=device)


def dequantize_reference(weight: QuantizedWeight, dtype: torch.dtype | None = None) -> Tensor:
    if weight.kind == "int4":
        shifts = torch.arange(0, 32, 4, device=weight.device, dtype=torch.int32)[:, None]
        words = weight.packed.view(len(weight.packed), -1, 1, WORDS)
        values = ((words >> shifts) & 15).float() - 8  # [N, G, 8, 16]
        values = (values * weight.scale.float()[:, :, None, None]).flatten(1)[:, : weight.columns]
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


def dequantize(weight: QuantizedWeight, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
    """The weight [N, K], rounded once to `dtype`; default: out's dtype, or that of the weight that was quantised.

    out: contiguous, of the weight's shape, where the result is written. Raises InputError where it does not fit.
    """
    out = output_for("dequantize", out, dtype, weight.shape, weight.dtype, weight.device)
    if not use_triton(out) or out.dtype == torch.float64:
        return out.copy_(dequantize_reference(weight, out.dtype))
    rows, words = weight.packed.shape
    launch(
        _dequantize_kernel, (rows, cdiv(words, 1024)), out, weight.packed, weight.scale, weight.columns, words,
        weight.kind == "int4", WORDS, 1024, num_warps=4,
    )  # fmt: skip
    return out


# ---- Linear layers ----


@triton.jit
def _int4_kernel(
    y_ptr, x_ptr, w_ptr, s_ptr, b_ptr, up_ptr, up_s_ptr, up_b_ptr, N, K, W,
    PARTS: tl.constexpr, GROUPS: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
    NAME: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """16 elements of y [N]: w x + b, or with `up_ptr` 8 elements of act(w x + b) * (up x + b').

    Tiles a and b have 8 rows each: 16 of w, or 8 of w and 8 of `up`. PARTS: groups of columns that run in parallel, one
    per warp. GROUPS: groups that a warp loads at a time. W: words of a row. EVEN: no masks are needed. PTX: inline PTX
    may be used, and w and `up` are aligned to 16 bytes.
    """
    TENSOR_CORES: tl.constexpr = PTX and x_ptr.dtype.element_ty != tl.float32
    STEP: tl.constexpr = PARTS * GROUPS
    groups = W // WORDS
    i, words, n = tl.arange(0, 8 * PARTS), tl.arange(0, WORDS)[None, :], tl.arange(0, 8)
    part = i // 8
    if up_ptr is not None:
        at = tl.program_id(0) * 8
        a_rows = tl.minimum(at + i % 8, N - 1).to(tl.int64)
        b_rows, b_w_ptr, b_s_ptr = a_rows, up_ptr, up_s_ptr
    else:
        at = tl.program_id(0) * 16
        a_rows = tl.minimum(at + i % 8, N - 1).to(tl.int64)
        b_rows, b_w_ptr, b_s_ptr = tl.minimum(at + 8 + i % 8, N - 1).to(tl.int64), w_ptr, s_ptr
    a_ptrs = w_ptr + (a_rows * W + part * WORDS)[:, None] + words, s_ptr + a_rows * groups + part
    b_ptrs = b_w_ptr + (b_rows * W + part * WORDS)[:, None] + words, b_s_ptr + b_rows * groups + part
    x_ptr += tl.arange(0, PARTS)[:, None] * (8 * WORDS) + words
    # No kernel writes weights, so those of the first step are read while the kernel before this one ends.
    next_a = _groups(a_ptrs, part, 0, groups, PARTS, GROUPS, WORDS, EVEN)
    next_b = _groups(b_ptrs, part, 0, groups, PARTS, GROUPS, WORDS, EVEN)
    wait_for_previous(OVERLAP)
    a, b = tl.zeros((8 * PARTS, WORDS), tl.float32), tl.zeros((8 * PARTS, WORDS), tl.float32)
    last = (groups - 1) // STEP * STEP
    for g in range(0, last, STEP):
        this_a, this_b = next_a, next_b
        next_a = _groups(a_ptrs, part, g + STEP, groups, PARTS, GROUPS, WORDS, EVEN)
        next_b = _groups(b_ptrs, part, g + STEP, groups, PARTS, GROUPS, WORDS, EVEN)
        a, b = _add_step(a, b, this_a, this_b, x_ptr, g, K, PARTS, GROUPS, WORDS, EVEN, TENSOR_CORES)
    a, b = _add_step(a, b, next_a, next_b, x_ptr, last, K, PARTS, GROUPS, WORDS, EVEN, TENSOR_CORES)
    y = add_bias(_sum(a, PARTS, TENSOR_CORES), b_ptr, at + n, N)
    if up_ptr is not None:
        y, _ = activation(y, NAME, y_ptr.dtype.element_ty == tl.float32)
        y *= add_bias(_sum(b, PARTS, TENSOR_CORES), up_b_ptr, at + n, N)
    else:
        y8 = add_bias(_sum(b, PARTS, TENSOR_CORES), b_ptr, at + 8 + n, N)
        tl.store(y_ptr + at + 8 + n, y8.to(y_ptr.dtype.element_ty), mask=at + 8 + n < N)
    tl.store(y_ptr + at + n, y.to(y_ptr.dtype.element_ty), mask=at + n < N)


@triton.jit
def _groups(
    ptrs, part, g, groups, PARTS: tl.constexpr, GROUPS: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Words and scale of each of GROUPS groups of a tile's rows, of which the first is g + part."""
    found = ()
    for i in tl.static_range(GROUPS):
        inside = part < groups - g - i * PARTS
        found += (  # type: ignore[assignment]
            _load(ptrs[0] + (g + i * PARTS) * WORDS, inside[:, None], EVEN),
            _load(ptrs[1] + g + i * PARTS, inside, EVEN),
        )
    return found


@triton.jit
def _add_step(
    a, b, a_groups, b_groups, x_ptr, g, K, PARTS: tl.constexpr, GROUPS: tl.constexpr, WORDS: tl.constexpr,
    EVEN: tl.constexpr, TENSOR_CORES: tl.constexpr,
):  # fmt: skip
    """Adds the products of GROUPS groups and x to the sums a and b."""
    columns = tl.arange(0, PARTS)[:, None] * (8 * WORDS) + tl.arange(0, WORDS)[None, :]
    for i in tl.static_range(GROUPS):
        first = (g + i * PARTS) * (8 * WORDS)
        x = ()
        for j in tl.static_range(8):
            part_of_x = _load(x_ptr + first + j * WORDS, columns < K - first - j * WORDS, EVEN)
            x += (_for_each_row(part_of_x),)  # type: ignore[assignment]
        a_scale, b_scale = a_groups[2 * i + 1].to(tl.float32)[:, None], b_groups[2 * i + 1].to(tl.float32)[:, None]
        a, b = _add_group(a, b, a_groups[2 * i], b_groups[2 * i], a_scale, b_scale, x, TENSOR_CORES)
    return a, b


@triton.jit
def _for_each_row(x):
    """[PARTS, WORDS] -> [8 PARTS, WORDS], each row eight times."""
    x = tl.broadcast_to(x[:, None, :], (x.shape[0], 8, x.shape[1]))
    return tl.reshape(x, (8 * x.shape[0], x.shape[2]))


@triton.jit
def _add_group(a, b, a_words, b_words, a_scale, b_scale, x, TENSOR_CORES: tl.constexpr):
    """Adds a scale times the product of a group and x, word by word. x: the columns of the eight nibbles.

    On tensor cores the first of a thread's four words gets the sum of all words of its row, in each of four threads.
    """
    if TENSOR_CORES:
        return tl.inline_asm_elementwise(
            _products_ptx("bf16" if x[0].dtype == tl.bfloat16 else "f16"), _OPERANDS,
            [a, b, a_words, b_words, a_scale, b_scale, x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]],
            dtype=(tl.float32, tl.float32), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        a_sums, b_sums = tl.zeros_like(a), tl.zeros_like(b)
        for i in tl.static_range(8):
            a_sums += (((a_words >> (4 * i)) & 15) - 8).to(tl.float32) * x[i].to(tl.float32)
            b_sums += (((b_words >> (4 * i)) & 15) - 8).to(tl.float32) * x[i].to(tl.float32)
        return a + a_sums * a_scale, b + b_sums * b_scale


@triton.jit
def _sum(total, PARTS: tl.constexpr, TENSOR_CORES: tl.constexpr):
    """[8 PARTS, WORDS] -> [8]"""
    y = tl.sum(tl.reshape(tl.sum(total, 1), (PARTS, 8)), 0)
    return y * 0.25 if TENSOR_CORES else y


@triton.jit
def _load(ptr, mask, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(ptr)
    else:
        return tl.load(ptr, mask=mask, other=0.0)


@triton.constexpr_function
def _pair_ptx(kind: str, source: str, i: int, to: str) -> str:
    """PTX: n - 8 of nibble i of both halves of a register, as two 16-bit floats whose mantissas get the bits of n.

    Declared elsewhere: `t`, and `one` and `less`, which `_constants_ptx` sets.
    """
    base = 0x43004300 if kind == "bf16" else 0x64006400  # 128 and 1024
    return f"shr.u32 t, {source}, {4 * i}; lop3.b32 t, t, 0x000f000f, {base}, 0xea; fma.rn.{kind}x2 {to}, t, one, less;"


@triton.constexpr_function
def _constants_ptx(kind: str) -> str:
    one, less = (0x3F803F80, 0xC308C308) if kind == "bf16" else (0x3C003C00, 0xE408E408)  # 1, and -136 or -1032
    return f".reg .b32 t; .reg .b32 one; .reg .b32 less; mov.b32 one, {one}; mov.b32 less, {less};"


@triton.constexpr_function
def _int4_ptx(kind: str) -> str:
    """PTX: the eight n - 8 of each of two words, two words at a time."""
    nibbles = " ".join(_pair_ptx(kind, "low" if i < 4 else "high", i % 4, f"${i}") for i in range(8))
    return (
        f"{{ {_constants_ptx(kind)} .reg .b32 low; .reg .b32 high; "
        f"prmt.b32 low, $8, $9, 0x5410; prmt.b32 high, $8, $9, 0x7632; {nibbles} }}"
    )


@triton.constexpr_function
def _products_ptx(kind: str) -> str:
    """PTX of `_add_group` for a thread, which holds four words of row i of a and of row i of b, i = lane / 4.

    An mma multiplies 16 rows by 16 columns, of which a thread holds four columns of rows i and 8 + i. Which columns of
    the weight these four are is free, as long as x has the same: here nibbles j and j + 4 of a word, and j + 1 and
    j + 5. All eight columns of the right operand are x, so that every thread gets the sums of its rows.
    """
    # $0 to $7: the new sums, four of a and four of b. From $8 on the sums before, from $16 words, from $24 scales, from
    # $32 the columns of x, two a register.
    lines = [_constants_ptx(kind), ".reg .b32 w<4>; .reg .b32 x<2>; .reg .f32 y<4>;"]
    lines += [f"mov.f32 y{i}, 0f00000000;" for i in range(4)]
    for word in range(4):
        half = "0x7632" if word % 2 else "0x5410"
        for nibble in (0, 2):
            for i in range(2):
                column = 32 + 2 * (nibble + i) + word // 2
                lines.append(_pair_ptx(kind, f"${16 + word}", nibble + i, f"w{2 * i}"))
                lines.append(_pair_ptx(kind, f"${20 + word}", nibble + i, f"w{2 * i + 1}"))
                lines.append(f"prmt.b32 x{i}, ${column}, ${column + 8}, {half};")
            y = "{y0, y1, y2, y3}"
            lines.append(
                f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {y}, {{w0, w1, w2, w3}}, {{x0, x1}}, {y};"
            )
    lines += ["fma.rn.f32 $0, y0, $24, $8; fma.rn.f32 $4, y2, $28, $12;"]
    lines += [f"mov.b32 ${i}, ${8 + i};" for i in (1, 2, 3, 5, 6, 7)]
    return "{ " + " ".join(lines) + " }"


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
            _int4_ptx("f16"), "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [w], dtype=(tl.float16,) * 8, is_pure=True,
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
    x: Tensor, weights: Sequence[QuantizedWeight], biases: Biases = None, out: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Linear layers of rows x [T, K], side by side: [T, sum N_i], into `out` where given, without autograd.

    One launch where the weights are `joint`. `kernel_of` has returned "bits".
    """
    whole = _as_one(weights, biases)
    if whole is not None:
        return _linear(x, *whole, out)
    sizes = [weight.shape[0] for weight in weights]
    out = x.new_empty(x.shape[0], sum(sizes)) if out is None else out
    biases = biases or [None] * len(sizes)
    for weight, bias, columns in zip(weights, biases, out.split(sizes, 1), strict=True):
        _linear(x, weight, bias, columns)
    return out


def quantized_glu(
    x: Tensor, gate: QuantizedWeight, up: QuantizedWeight, gate_bias: Tensor | None, up_bias: Tensor | None, *,
    activation: str,
) -> Tensor:  # fmt: skip
    """`gemv_glu` for quantised weights of one kind. `choose_mlp` has returned "bits"."""
    if gate.kind != "int4":
        scales = gate.scale, up.scale
        return gemv_glu(x, gate.packed, up.packed, gate_bias, up_bias, activation=activation, scales=scales)
    h = x.new_empty(*x.shape[:-1], gate.shape[0])
    _launch_int4(h, x, gate, gate_bias, up, up_bias, activation)
    return h


def _as_one(
    weights: Sequence[QuantizedWeight], biases: Biases
) -> tuple[QuantizedWeight, Tensor | None] | None:  # fmt: skip
    """`as_one_layer` for quantised weights."""
    first = weights[0]
    if len(weights) == 1:
        return first, biases[0] if biases else None
    if any(weight.kind != first.kind for weight in weights):
        return None
    layer, scale = as_one_layer([w.packed for w in weights], biases), joint([w.scale for w in weights])
    if layer is None or scale is None:
        return None
    return QuantizedWeight(first.kind, layer[0], scale, first.columns, first.dtype), layer[1]


def _linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
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
    parts, groups = _one_row_tile(n, words // WORDS, up is not None)
    overlap, even = overlaps_launches(x), words % (parts * groups * WORDS) == 0 and k == 8 * words
    packed, scale = (None, None) if up is None else (up.packed, up.scale)
    aligned = weight.packed.data_ptr() % 16 == 0 and (packed is None or packed.data_ptr() % 16 == 0)
    registers = {"maxnreg": 64} if parts == 16 and has_ptx(x) else {}  # 64 * 512 threads is half of a multiprocessor's
    launch(
        _int4_kernel, (cdiv(n, 16 if up is None else 8),), y, x.contiguous(), weight.packed, weight.scale, bias,
        packed, scale, up_bias, n, k, words, parts, groups, WORDS, even, aligned and has_ptx(x), activation, overlap,
        num_warps=parts, **registers, **overlapping(overlap),
    )  # fmt: skip


def _one_row_tile(n: int, groups: int, glu: bool) -> tuple[int, int]:
    """(PARTS, GROUPS) of `_int4_kernel`. The fastest measured on an H200 for the linear layers of an 8B.

    With 16 parts two programs run at a time on a multiprocessor, so that 4096 rows run at once.
    """
    parts = 4 if glu else 16 if n <= 4096 else 8
    return min(parts, next_power_of_2(groups)), 1
