"""A step of AdamW on one parameter, in place, in one launch that reads weight, gradient and moments once.

    m = m + (1 - beta1) (g - m)        v = beta2 v + (1 - beta2) g^2             g being the gradient times `factor`
    w = (1 - lr weight_decay) w - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

Math in fp32 (fp64 for fp64, by plain PyTorch on every device); weight and moments are rounded as they are written. What
differs from torch's fused AdamW, beside `factor`, is how they are stored:

- bf16 is rounded to nearest, as by torch, or stochastically; with a `remainder` of 2 more bytes, a bf16 weight is an
  exact fp32 number (rounding.py).
- Moments may be in 8 bits (eight_bits.py), which are rounded stochastically, whatever `rounding` is.

Bytes per element, which are the minimum: bf16 weight, gradient and moments 14, with a remainder 18, fp32 28; with
moments in 8 bits 10, 14 and 16, and 1/16 for their exponents.

Source: Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as torch_adamw

from ligermodels.errors import InputError
from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import accumulator, cdiv, tl, triton, use_triton
from ligermodels.kernels.optimizer import eight_bits
from ligermodels.kernels.optimizer.eight_bits import MOMENT, ROOT, load_codes, store_codes
from ligermodels.kernels.optimizer.rounding import (
    UNSHARDED,
    ShardLayout,
    join_master,
    random_bits,
    random_words,
    round_stochastically,
    split_master,
    store_rounded,
)

Exponents = tuple[Tensor, Tensor]
"""Of the blocks of the first and of the second moment, uint8."""
ROUNDINGS = ("stochastic", "nearest")
BLOCK = 1024
"""Elements of a program."""
_CPU_LANES = 16  # of torch's longest vectors; torch rounds the elements that do not fill a vector differently
_CPU_CHUNK = 32768  # the largest number of elements that torch leaves to one thread; in fp32, 128 KiB


def adamw_reference(
    weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, remainder: Tensor | None = None,
    exponents: Exponents | None = None, *,
    step: int | Tensor, lr: float | Tensor, betas: tuple[float, float], eps: float, weight_decay: float,
    factor: Tensor | None = None, rounding: str = "stochastic", seed: int = 0, number: int = 0,
    layout: ShardLayout = UNSHARDED,
) -> None:  # fmt: skip
    acc, (beta1, beta2) = accumulator(weight.dtype), betas
    t, lr = (x.double() if isinstance(x, Tensor) else x for x in (step, lr))
    m, v, g = (*_decoded(exp_avg, exp_avg_sq, exponents, acc), grad.to(acc))
    w = weight.to(acc) if remainder is None else join_master(weight, remainder)
    g = g if factor is None else g * factor.to(acc)
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    root = v.sqrt().div_((1 - beta2**t) ** 0.5).add_(eps)
    w.mul_(1 - lr * weight_decay).sub_((m * (lr / (1 - beta1**t))).div_(root))
    _write((weight, exp_avg, exp_avg_sq), remainder, exponents, (w, m, v), rounding, seed, number, step, layout)


def _adamw_on_cpu(
    weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, remainder: Tensor | None,
    exponents: Exponents | None, *,
    step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
    factor: Tensor | None, rounding: str, seed: int, number: int, layout: ShardLayout,
) -> None:  # fmt: skip
    """`adamw_reference` on contiguous tensors, by torch's fused step.

    Stochastic rounding, the factor, the remainder and codes, which that step lacks, are computed before and after it,
    on fp32 copies of chunks that fit in a core's cache; a chunk runs in one thread.
    """

    def fused(w: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
        torch_adamw(
            [w], [g], [m], [v], [], [torch.tensor(step - 1.0)], fused=True, amsgrad=False, maximize=False,
            beta1=betas[0], beta2=betas[1], lr=lr, weight_decay=weight_decay, eps=eps,
        )  # fmt: skip

    tensors = weight, grad, exp_avg, exp_avg_sq
    acc, dtypes = accumulator(weight.dtype), {x.dtype for x in tensors}
    exactly = (rounding == "nearest" or torch.bfloat16 not in dtypes) and exponents is None
    whole_vectors = weight.numel() % _CPU_LANES == 0
    if len(dtypes) == 1 and exactly and factor is None and remainder is None and whole_vectors:
        fused(*tensors)
        return
    flat = [x.view(-1) for x in tensors]

    @torch.no_grad()  # which another thread does not inherit
    def update(start: int) -> None:
        chunks = [x[start : start + _CPU_CHUNK] for x in flat]
        low = None if remainder is None else remainder.view(-1)[start : start + _CPU_CHUNK]
        first, some = start // eight_bits.BLOCK, _CPU_CHUNK // eight_bits.BLOCK
        blocks: Any = None if exponents is None else tuple(x.view(-1)[first : first + some] for x in exponents)
        w, g = (x.to(acc) for x in chunks[:2])
        m, v = _decoded(chunks[2], chunks[3], blocks, acc)
        w = w if low is None else join_master(chunks[0], low)
        g = g if factor is None else g * factor
        size = w.numel()
        if size % _CPU_LANES:
            w, g, m, v = (nn.functional.pad(x, (0, -size % _CPU_LANES)) for x in (w, g, m, v))
        fused(w, g, m, v)
        if size % _CPU_LANES:
            w, m, v = w[:size], m[:size], v[:size]
        stored = chunks[0], chunks[2], chunks[3]
        _write(stored, low, blocks, (w, m, v), rounding, seed, number, step, layout, start)

    starts = range(0, weight.numel(), _CPU_CHUNK)
    with ThreadPoolExecutor(max_workers=min(torch.get_num_threads(), len(starts))) as pool:
        list(pool.map(update, starts))


def _decoded(
    exp_avg: Tensor, exp_avg_sq: Tensor, exponents: Exponents | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The moments in `dtype`."""
    if exponents is None:
        return exp_avg.to(dtype), exp_avg_sq.to(dtype)
    root = eight_bits.decode(exp_avg_sq, exponents[1], ROOT)
    return eight_bits.decode(exp_avg, exponents[0], MOMENT).to(dtype), root.to(dtype).square_()


def _write(
    tensors: tuple[Tensor, Tensor, Tensor], remainder: Tensor | None, exponents: Exponents | None,
    exact: tuple[Tensor, Tensor, Tensor], rounding: str, seed: int, number: int, step: int | Tensor,
    layout: ShardLayout, start: int = 0,
) -> None:  # fmt: skip
    """Rounds the exact weight and moments into the tensors that hold them."""
    w, m, v = exact
    if remainder is not None:
        w, low = split_master(w)
        remainder.copy_(low)
    pairs = list(zip(tensors, (w, m, v), strict=True))
    streams = []
    if rounding == "stochastic":
        streams += [i for i, (to, x) in enumerate(pairs) if to.dtype == torch.bfloat16 and x.dtype == torch.float32]
    if exponents is not None:
        streams += [1, 2]
    random: dict[int, Tensor] = {}
    if streams:
        bits = random_bits(w, streams, seed=seed, number=number, step=step, layout=layout, start=start)
        random = dict(zip(streams, bits, strict=True))
    if exponents is not None:
        for stream, x, levels in ((1, m, MOMENT), (2, v.sqrt(), ROOT)):
            codes, blocks = eight_bits.encode(x, levels, random.pop(stream))
            pairs[stream] = tensors[stream], codes
            exponents[stream - 1].copy_(blocks)
    for stream, some in random.items():
        pairs[stream] = tensors[stream], round_stochastically(pairs[stream][1], some)
    for stored, x in pairs:
        if stored is not x:  # one of fp32 was changed in place
            stored.copy_(x)


@triton.jit
def update_block(
    w_ptr, g_ptr, m_ptr, v_ptr, r_ptr, m_exponents_ptr, v_exponents_ptr, factor_ptr, step, lr, weight_decay,
    beta2, rest1, rest2, bias1, bias2, eps, size, seed, first, inner, stride, stream, start,
    STEP_ON_DEVICE: tl.constexpr, LR_ON_DEVICE: tl.constexpr, STOCHASTIC: tl.constexpr, CONTIGUOUS: tl.constexpr,
    WHOLE_GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK elements from `start` on. rest = 1 - beta; bias = 1 - beta^step (its root for beta2), or log beta where the
    step is read here."""
    at = tl.arange(0, BLOCK)
    mask = at < size - start
    at = start + at
    w = tl.load(w_ptr + at, mask=mask, other=0.0)
    g = tl.load(g_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if m_exponents_ptr is None:
        m = tl.load(m_ptr + at, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + at, mask=mask, other=0.0).to(tl.float32)
    else:
        m = load_codes(m_ptr, m_exponents_ptr, start, size, 127, BLOCK)  # of MOMENT, and of ROOT
        v = load_codes(v_ptr, v_exponents_ptr, start, size, 255, BLOCK)
        v *= v
    if r_ptr is None:
        w = w.to(tl.float32)
    else:
        high = w.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        low = tl.load(r_ptr + at, mask=mask, other=0).to(tl.int32).to(tl.uint32, bitcast=True)
        w = (high + low).to(tl.float32, bitcast=True)
    if factor_ptr is not None:
        g *= tl.load(factor_ptr).to(tl.float32)
    if LR_ON_DEVICE:
        lr = tl.load(lr).to(tl.float32)
    if STEP_ON_DEVICE:  # in fp64: 1 - beta2^t is small
        t = tl.load(step)
        step = t.to(tl.int32)
        bias1 = (1 - tl.exp(t.to(tl.float64) * bias1)).to(tl.float32)
        bias2 = (1 - tl.exp(t.to(tl.float64) * bias2)).to(tl.float32)
        bias2 = tl.sqrt(bias2)
    m += rest1 * (g - m)
    v = beta2 * v + rest2 * g * g
    root = tl.sqrt(v)
    w = (1 - lr * weight_decay) * w - (lr / bias1) * m / (root * (1 / bias2) + eps)
    if WHOLE_GROUPS:
        word = None
        group = (start // 8) + tl.arange(0, BLOCK // 8)
        if not CONTIGUOUS:
            row = group // (inner // 8)
            group += row * (stride // 8 - inner // 8)
        group += first // 8
    else:
        row = at // inner
        place = first + row * stride + (at - row * inner)
        group, word = place // 8, place % 8
    if r_ptr is None:
        store_rounded(w_ptr, w, at, mask, seed, group, word, step, stream, BLOCK, STOCHASTIC)
    else:
        raw = tl.where(w == w, w.to(tl.uint32, bitcast=True), 0x7FC00000)
        high = (raw + 0x8000) >> 16
        tl.store(w_ptr + at, high.to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=mask)
        tl.store(r_ptr + at, (raw - (high << 16)).to(tl.uint16).to(tl.int16, bitcast=True), mask=mask)
    if m_exponents_ptr is None:
        store_rounded(m_ptr, m, at, mask, seed, group, word, step, stream + 1, BLOCK, STOCHASTIC)
        store_rounded(v_ptr, v, at, mask, seed, group, word, step, stream + 2, BLOCK, STOCHASTIC)
    else:
        bits = random_words(seed, group, word, step, stream + 1, BLOCK)
        store_codes(m_ptr, m_exponents_ptr, m, bits, start, size, 127, BLOCK)
        bits = random_words(seed, group, word, step, stream + 2, BLOCK)
        store_codes(v_ptr, v_exponents_ptr, root, bits, start, size, 255, BLOCK)


@triton.jit(do_not_specialize=["step", "seed", "first", "inner", "stride", "stream"])
def _adamw_kernel(
    w_ptr, g_ptr, m_ptr, v_ptr, r_ptr, m_exponents_ptr, v_exponents_ptr, factor_ptr, step, lr, weight_decay,
    beta2, rest1, rest2, bias1, bias2, eps, size, seed, first, inner, stride, stream,
    STEP_ON_DEVICE: tl.constexpr, LR_ON_DEVICE: tl.constexpr, STOCHASTIC: tl.constexpr, CONTIGUOUS: tl.constexpr,
    WHOLE_GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    update_block(
        w_ptr, g_ptr, m_ptr, v_ptr, r_ptr, m_exponents_ptr, v_exponents_ptr, factor_ptr, step, lr, weight_decay,
        beta2, rest1, rest2, bias1, bias2, eps, size, seed, first, inner, stride, stream, start,
        STEP_ON_DEVICE, LR_ON_DEVICE, STOCHASTIC, CONTIGUOUS, WHOLE_GROUPS, BLOCK,
    )  # fmt: skip


def adamw(
    weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, remainder: Tensor | None = None,
    exponents: Exponents | None = None, *,
    step: int | Tensor, lr: float | Tensor, betas: tuple[float, float], eps: float, weight_decay: float,
    factor: Tensor | None = None, rounding: str = "stochastic", seed: int = 0, number: int = 0,
    layout: ShardLayout = UNSHARDED,
) -> None:  # fmt: skip
    """One step of AdamW: writes weight, exp_avg, exp_avg_sq, remainder and exponents; grad is read only.

    weight, grad, exp_avg, exp_avg_sq: of one shape, each of its own floating dtype; remainder: int16 beside a bf16
    weight, or None. exponents: of moments in 8 bits, whose codes exp_avg and exp_avg_sq then are (`eight_bits.encode`,
    the second of square roots), all uint8; or None. step: which step this is, from 1; a 0-dim fp32 tensor on the
    weight's device may hold it, as one may hold lr. factor: a number on the device, times which the gradient counts, or
    None. rounding: of what is bf16 (weight, unless it has a remainder, and moments), "stochastic" or "nearest"; moments
    in 8 bits are always rounded stochastically. seed (below 2^63), number (of the parameter, below 2^29), step and the
    element's place choose the random bits; layout: the places of this tensor's elements, where it is a shard of a
    larger one.
    Raises InputError for shapes or dtypes that do not fit.
    """
    check(weight, grad, exp_avg, exp_avg_sq, remainder, exponents, rounding, layout)
    if not weight.numel():
        return
    updated = weight, exp_avg, exp_avg_sq, remainder, *(exponents or (None, None))
    contiguous: Any = tuple(x if x is None or x.is_contiguous() else x.contiguous() for x in updated)
    w, m, v, r, *blocks = contiguous
    exponents = None if exponents is None else tuple(blocks)
    options: dict[str, Any] = dict(
        eps=eps, weight_decay=weight_decay, factor=factor, rounding=rounding, seed=seed, number=number, layout=layout
    )
    if weight.is_cpu and not use_triton(weight):
        _adamw_on_cpu(w, grad.contiguous(), m, v, r, exponents, step=int(step), lr=float(lr), betas=betas, **options)
    elif not use_triton(weight) or weight.dtype == torch.float64:
        adamw_reference(w, grad, m, v, r, exponents, step=step, lr=lr, betas=betas, **options)
    else:
        beta1, beta2 = betas
        if isinstance(step, Tensor):
            bias1, bias2 = (math.log(beta) if beta else -math.inf for beta in betas)
        else:
            bias1, bias2 = 1 - beta1**step, math.sqrt(1 - beta2**step)
        size = weight.numel()
        launch(
            _adamw_kernel, (cdiv(size, BLOCK),), w, grad.contiguous(), m, v, r, *blocks, factor, step, lr,
            weight_decay, beta2, 1 - beta1, 1 - beta2, bias1, bias2, eps, size, seed, *layout, number * 4,
            isinstance(step, Tensor), isinstance(lr, Tensor), rounding == "stochastic", *layout.kind, BLOCK,
            num_warps=4,
        )  # fmt: skip
    for x, y in zip(updated, contiguous, strict=True):
        if x is not y:
            x.copy_(y)  # type: ignore[union-attr]


def check(
    weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, remainder: Tensor | None,
    exponents: Exponents | None, rounding: str, layout: ShardLayout,
) -> None:  # fmt: skip
    """Raises InputError for arguments that do not fit."""
    shape = weight.shape
    if not (
        shape == grad.shape == exp_avg.shape == exp_avg_sq.shape
        and weight.is_floating_point()
        and grad.is_floating_point()
        and (remainder is None or (remainder.shape == shape and remainder.dtype == torch.int16))
    ):
        tensors = {"weight": weight, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "remainder": remainder}
        described = ", ".join(f"{name} {x.dtype} {tuple(x.shape)}" for name, x in tensors.items() if x is not None)
        raise InputError(f"adamw: {described}; expected floating dtypes of one shape, the remainder in int16")
    if remainder is not None and weight.dtype != torch.bfloat16:
        raise InputError(f"adamw: a remainder beside a weight of {weight.dtype}; it completes bf16 weights to fp32")
    if rounding not in ROUNDINGS:
        raise InputError(f"adamw: rounding={rounding!r} is unknown; supported: {', '.join(ROUNDINGS)}")
    if not (layout.first >= 0 and 1 <= layout.inner <= layout.stride):
        raise InputError(f"adamw: {layout}; expected first at 0 or more, and inner from 1 to stride")
    _check_exponents(weight, exp_avg, exp_avg_sq, exponents)


def _check_exponents(weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, exponents: Exponents | None) -> None:
    expected = torch.uint8, (*weight.shape[:-1], weight.shape[-1] // eight_bits.BLOCK) if weight.dim() else ()
    if exponents is None:
        fits = exp_avg.is_floating_point() and exp_avg_sq.is_floating_point()
    else:
        fits = exp_avg.dtype == exp_avg_sq.dtype == torch.uint8 and weight.dim() > 0
        fits = fits and weight.shape[-1] % eight_bits.BLOCK == 0
        fits = fits and all((x.dtype, tuple(x.shape)) == expected for x in exponents)
    if not fits:
        described = [f"{x.dtype} {tuple(x.shape)}" for x in (exp_avg, exp_avg_sq, *(exponents or ()))]
        raise InputError(
            f"adamw: moments and exponents are {', '.join(described)}; expected floating dtypes without exponents, or "
            f"uint8 with exponents of each {eight_bits.BLOCK} elements of the last dim, a multiple of that"
        )
