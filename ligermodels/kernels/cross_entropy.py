"""Cross entropy over a vocabulary, with all that a training loss hangs on it, in one pass over the logits.

    z    = softcap * tanh(logits / softcap)                    lse = log sum_c exp z_c
    loss = (1 - e) w_y (lse - z_y) + e/V sum_c w_c (lse - z_c) + z_loss lse^2

Fused: the cap, the loss of every token, z-loss, label smoothing and argmax come out of one online pass; the divisor
of the mean is counted on the device. The logits are never written: forward keeps two numbers per row and backward
reads the logits once more, so both together move 3 V itemsize bytes per token (read, read, write), the minimum
for a row that does not stay on the chip from forward to backward. `linear_cross_entropy` runs the same kernel once,
for loss and gradient, over a workspace of its own.

Source: Milakov and Gimelshein, arXiv:1805.02867 (online softmax); torch.nn.CrossEntropyLoss (the options).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ligermodels.errors import InputError
from ligermodels.kernels._triton import accumulator, device_guard, last_dim_contiguous, num_sms, tl, triton, use_triton


class CrossEntropyOutput(NamedTuple):
    """What cross_entropy and linear_cross_entropy return where more than the loss was asked for."""

    loss: Tensor
    z_loss: Tensor | None
    token_accuracy: Tensor | None
    predicted_tokens: Tensor | None


class Options(NamedTuple):
    """The scalars of a call, checked by `check_inputs`."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    reduction: str
    token_scaling: bool
    return_z_loss: bool
    return_token_accuracy: bool
    return_predicted_tokens: bool


def cross_entropy_reference(
    logits: Tensor, labels: Tensor, *, class_weight: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: str = "mean",
    num_items_in_batch: int | Tensor | None = None, token_scaling: bool = False, return_z_loss: bool = False,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
) -> Tensor | CrossEntropyOutput:  # fmt: skip
    """What `cross_entropy` computes, in plain PyTorch; a label that is no class raises InputError."""
    vocab = logits.shape[-1]
    y = labels.reshape(-1).long()
    valid = y != ignore_index
    wrong = valid & ((y < 0) | (y >= vocab))
    if not torch.compiler.is_compiling() and bool(wrong.any()):
        raise InputError(
            f"labels hold {y[wrong][0].item()}, which is neither a class in [0, {vocab}) nor "
            f"ignore_index={ignore_index}. Do the tokenizer and the head have the same vocabulary?"
        )
    y = y.where(valid, 0)
    z = logits.reshape(-1, vocab).to(accumulator(logits.dtype)).masked_fill(~valid[:, None], 0)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    w = z.new_ones(vocab) if class_weight is None else class_weight.to(z)
    lse = z.logsumexp(-1)
    nll = lse - z.gather(1, y[:, None])[:, 0]
    ce, z_part = w[y] * nll, z_loss * lse.square()
    if label_smoothing:
        smooth = ((lse[:, None] - z) * w).mean(-1)
        ce = (1 - label_smoothing) * ce + label_smoothing * smooth
    if token_scaling:
        p = nll.detach().neg().exp()
        ce, z_part = p * ce, p * z_part
    ce, z_part = ce.where(valid, 0), z_part.where(valid, 0)
    if reduction != "none":
        ce, z_part = ce.sum(), z_part.sum()
    if reduction == "mean":
        divisors = w[y].where(valid, 0).sum(), valid.sum().to(z)
        if num_items_in_batch is not None:
            divisors = (torch.as_tensor(num_items_in_batch).to(z).reshape(()),) * 2
        ce, z_part = (a / b.where(b != 0, torch.inf) for a, b in zip((ce, z_part), divisors, strict=True))
    if not (return_z_loss or return_token_accuracy or return_predicted_tokens):
        return ce + z_part
    predicted = z.argmax(-1).where(valid, -1)
    correct = (predicted == y).float()
    return CrossEntropyOutput(
        ce + z_part,
        z_part.detach() if return_z_loss else None,
        (correct if reduction == "none" else correct.sum() / valid.sum().clamp(min=1))
        if return_token_accuracy
        else None,
        predicted if return_predicted_tokens else None,
    )


@triton.jit
def _tanh(u):
    # 1 - exp() loses the low bits of a small argument; the minimax polynomial (2^-31 below 0.5) has them.
    e = tl.exp(-2.0 * tl.abs(u))
    far = (1.0 - e) / (1.0 + e)
    far = tl.where(u < 0, -far, far)
    if u.dtype == tl.float64:
        return far
    s = u * u
    p = -0.33333328 + s * (0.13332964 + s * (-0.05389919 + s * (0.02129799 - s * 0.00664748)))
    return tl.where(tl.abs(u) < 0.5, u + u * s * p, far)


@triton.jit
def _load_capped(row, columns, V, SOFTCAP: tl.constexpr, DTYPE: tl.constexpr, EVICT: tl.constexpr):
    """Logits at `columns` of a row, capped; -inf past its end."""
    z = tl.load(row + columns, mask=columns < V, other=-float("inf"), eviction_policy=EVICT).to(DTYPE)
    if SOFTCAP is not None:
        z = tl.where(columns < V, SOFTCAP * _tanh(z * (1.0 / SOFTCAP)), -float("inf"))
    return z


@triton.jit
def _write_gradient(row, out, class_weight, every_weight, label, label_weight, maximum, total, ce_scale, z_scale,
                    V, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, SOFTCAP: tl.constexpr, DTYPE: tl.constexpr,
                    STAGES: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """out = d(ce_scale * ce + z_scale * z_part)/d(row); `out` may be `row`: a tile is read before it is written.

    Tiles go from the last to the first, because the pass before this one left the last ones in the cache. The
    label's own entry is p - 1 in fp32, rounded once: subtracting 1 from a stored bf16 p would cancel near 1.
    """
    hot = ce_scale * (1.0 - SMOOTHING) * label_weight
    smooth = ce_scale * SMOOTHING / V
    slope = hot + smooth * every_weight + z_scale * (2.0 * Z_LOSS) * (maximum + tl.log(total))
    slope = slope / total
    tiles = tl.cdiv(V, R * 8)
    for i in tl.range(0, tiles, num_stages=STAGES):
        columns = (tiles - 1 - i) * (R * 8) + tl.arange(0, R)[:, None] * 8 + tl.arange(0, 8)[None, :]
        z = _load_capped(row, columns, V, SOFTCAP, DTYPE, "evict_first")
        g = tl.exp(z - maximum) * slope - tl.where(columns == label, hot, 0.0)
        if SMOOTHING != 0.0:
            if class_weight is not None:
                g -= smooth * tl.load(class_weight + columns, mask=columns < V, other=0.0).to(DTYPE)
            else:
                g -= smooth
        if SOFTCAP is not None:
            t = z * (1.0 / SOFTCAP)
            g *= (1.0 - t) * (1.0 + t)
        tl.store(out + columns, g.to(out.dtype.element_ty), mask=columns < V)


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _rows_kernel(logits, out, labels, class_weight, weight_sum, scales, upstream, stats, loss, z_losses,
                 correct, predicted, row_stride, out_stride, upstream_stride, first_row, num_rows, V,
                 IGNORE: tl.constexpr, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, SOFTCAP: tl.constexpr,
                 TOKEN_SCALING: tl.constexpr, LOSS: tl.constexpr, GRADIENT: tl.constexpr,
                 UNDIVIDED: tl.constexpr, STAGES: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """LOSS: logits to loss, z part, argmax and `stats` (maximum and sum of exponentials of each row).
    GRADIENT: to `out`, which may be `logits`, from the stats that LOSS computes or, without LOSS, from `stats`.

    Row r of `logits` and `out` is token first_row + r of all other tensors. Programs walk over the rows. One
    maximum and one sum are kept per strip of 8 columns, which lie in one thread: threads meet once per row, at
    its end, and rescaling the sums costs one exp in eight.
    """
    DTYPE: tl.constexpr = tl.float64 if logits.dtype.element_ty == tl.float64 else tl.float32
    KEEP: tl.constexpr = "evict_last" if GRADIENT else "evict_first"  # the gradient reads the row again
    for r in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        token = tl.cast(first_row + r, tl.int64)
        row = logits + tl.cast(r, tl.int64) * row_stride
        out_row = out + tl.cast(r, tl.int64) * out_stride
        label = tl.load(labels + token).to(tl.int64)
        token_loss, z_part = tl.full([], 0.0, DTYPE), tl.full([], 0.0, DTYPE)
        guess = tl.full([], -1, tl.int64)
        if label != IGNORE:
            # A label that is no class weighs NaN, and so its loss and gradient are NaN.
            is_class = (label >= 0) & (label < V)
            label_weight, every_weight = tl.full([], 1.0, DTYPE), tl.full([], 1.0, DTYPE) * V
            if class_weight is not None:
                label_weight = tl.load(class_weight + label, mask=is_class, other=0.0).to(DTYPE)
                every_weight = tl.load(weight_sum).to(DTYPE)
            label_weight = tl.where(is_class, label_weight, float("nan"))
            z_label = tl.load(row + label, mask=is_class, other=0.0).to(DTYPE)
            if SOFTCAP is not None:
                z_label = SOFTCAP * _tanh(z_label * (1.0 / SOFTCAP))

            if LOSS:
                m = tl.full([R], -float("inf"), DTYPE)
                s = tl.zeros([R], DTYPE)
                below = tl.zeros([R], DTYPE)  # sum of w_c (z_y - z_c), for the smoothing
                best = tl.zeros([R], tl.int32)
                for start in tl.range(0, V, R * 8, num_stages=STAGES):
                    columns = start + tl.arange(0, R)[:, None] * 8 + tl.arange(0, 8)[None, :]
                    z = _load_capped(row, columns, V, SOFTCAP, DTYPE, KEEP)
                    peak = tl.max(z, 1)
                    if predicted is not None or correct is not None:
                        best = tl.where(peak > m, tl.min(tl.where(z == peak[:, None], columns, V), 1), best)
                    raised = tl.maximum(m, peak)
                    shift = tl.where(raised == -float("inf"), 0.0, raised)
                    s = s * tl.exp(m - shift) + tl.sum(tl.exp(z - shift[:, None]), 1)
                    m = raised
                    if SMOOTHING != 0.0:
                        gap = tl.where(columns < V, z_label - z, 0.0)
                        if class_weight is not None:
                            gap *= tl.load(class_weight + columns, mask=columns < V, other=0.0).to(DTYPE)
                        below += tl.sum(gap, 1)
                maximum = tl.max(m, 0)
                total = tl.sum(s * tl.exp(m - tl.where(maximum == -float("inf"), 0.0, maximum)), 0)
                guess = tl.minimum(tl.min(tl.where(m == maximum, best, V), 0), V - 1).to(tl.int64)
                if stats is not None:
                    tl.store(stats + 2 * token, maximum)
                    tl.store(stats + 2 * token + 1, total)
            else:
                maximum, total = tl.load(stats + 2 * token), tl.load(stats + 2 * token + 1)

            ce_scale, z_scale = tl.full([], 1.0, DTYPE), tl.full([], 1.0, DTYPE)
            if scales is not None:
                ce_scale, z_scale = tl.load(scales), tl.load(scales + 1)
            nll = tl.log(total) - (z_label - maximum)
            factor = tl.exp(-nll) if TOKEN_SCALING else tl.full([], 1.0, DTYPE)
            if LOSS:
                lse = maximum + tl.log(total)
                ce = (1.0 - SMOOTHING) * label_weight * nll
                if SMOOTHING != 0.0:
                    ce += (every_weight * nll + tl.sum(below, 0)) * SMOOTHING / V
                z_part = factor * z_scale * Z_LOSS * lse * lse
                token_loss = factor * ce_scale * ce + z_part
            if GRADIENT:
                if UNDIVIDED:
                    ce_scale = ce_scale / tl.where(z_scale == 0, 1.0, z_scale)
                    z_scale = tl.full([], 1.0, DTYPE)
                if upstream is not None:
                    factor *= tl.load(upstream + token * upstream_stride).to(DTYPE)
                tl.debug_barrier()  # every thread has read z_y before one writes over it
                _write_gradient(row, out_row, class_weight, every_weight, label, label_weight, maximum, total,
                                factor * ce_scale, factor * z_scale, V, SMOOTHING, Z_LOSS, SOFTCAP, DTYPE,
                                STAGES, R)  # fmt: skip
        elif GRADIENT:
            for start in range(0, V, R * 8):
                columns = start + tl.arange(0, R)[:, None] * 8 + tl.arange(0, 8)[None, :]
                tl.store(out_row + columns, tl.zeros([R, 8], out.dtype.element_ty), mask=columns < V)
        if LOSS:
            tl.store(loss + token, token_loss)
            if z_losses is not None:
                tl.store(z_losses + token, z_part)
            if correct is not None:
                tl.store(correct + token, tl.where((guess == label) & (label != IGNORE), 1.0, 0.0))
            if predicted is not None:
                tl.store(predicted + token, guess)


@triton.jit(do_not_specialize=["T"])
def _scales_kernel(labels, class_weight, num_items, scales, T, V, IGNORE: tl.constexpr, MEAN: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    """scales = 1 / (divisor of the ce part, divisor of the z part, number of valid labels), and 0 for 1 / 0."""
    DTYPE: tl.constexpr = scales.dtype.element_ty
    count = tl.zeros([BLOCK], tl.int32)
    weight = tl.zeros([BLOCK], DTYPE)
    for start in range(0, T, BLOCK):
        at = start + tl.arange(0, BLOCK)
        label = tl.load(labels + at, mask=at < T, other=IGNORE).to(tl.int64)
        count += (label != IGNORE).to(tl.int32)
        if class_weight is not None:
            is_class = (label != IGNORE) & (label >= 0) & (label < V)
            weight += tl.load(class_weight + label, mask=is_class, other=0.0).to(DTYPE)
    valid = tl.sum(count, 0).to(DTYPE)
    ce_divisor, z_divisor = tl.full([], 1.0, DTYPE), tl.full([], 1.0, DTYPE)
    if MEAN:
        ce_divisor, z_divisor = valid, valid
        if class_weight is not None:
            ce_divisor = tl.sum(weight, 0)
        if num_items is not None:
            z_divisor = tl.load(num_items).to(DTYPE)
            ce_divisor = z_divisor
    tl.store(scales, tl.where(ce_divisor == 0, 0.0, 1.0 / ce_divisor))
    tl.store(scales + 1, tl.where(z_divisor == 0, 0.0, 1.0 / z_divisor))
    tl.store(scales + 2, tl.where(valid == 0, 0.0, 1.0 / valid))


def divisors(
    labels: Tensor, class_weight: Tensor | None, num_items: Tensor | None, logits: Tensor, options: Options
) -> tuple[Tensor | None, Tensor | None]:
    """What rows need beside their logits: (`scales` [3] as _scales_kernel says, sum of the class weights)."""
    dtype = accumulator(logits.dtype)
    weight_sum = None if class_weight is None else class_weight.sum(dtype=dtype)
    if options.reduction == "none" or (options.reduction == "sum" and not options.return_token_accuracy):
        return None, weight_sum
    scales = torch.empty(3, dtype=dtype, device=logits.device)
    _scales_kernel[(1,)](
        labels, class_weight, num_items, scales, labels.numel(), logits.shape[1], IGNORE=options.ignore_index,
        MEAN=options.reduction == "mean", BLOCK=4096, num_warps=8,
    )  # fmt: skip
    return scales, weight_sum


def empty_rows(labels: Tensor, logits: Tensor, options: Options) -> CrossEntropyOutput:
    """Room for the per-token results: loss, z part, 1 where the argmax is the label, argmax."""
    loss = torch.empty(labels.shape, dtype=accumulator(logits.dtype), device=logits.device)
    return CrossEntropyOutput(
        loss,
        torch.empty_like(loss) if options.return_z_loss else None,
        torch.empty_like(loss, dtype=torch.float32) if options.return_token_accuracy else None,
        torch.empty_like(loss, dtype=torch.int64) if options.return_predicted_tokens else None,
    )


def reduce_rows(rows: CrossEntropyOutput, scales: Tensor | None, options: Options) -> CrossEntropyOutput:
    """Per-token results, which hold the divisors already, to those of the reduction."""
    if options.reduction == "none":
        return rows
    loss, z_loss, correct, predicted = rows
    return CrossEntropyOutput(
        loss.sum(),
        None if z_loss is None else z_loss.sum(),
        None if correct is None or scales is None else (correct.sum() * scales[2]).float(),
        predicted,
    )


def _tiling(logits: Tensor, twice: bool, streams: int) -> tuple[int, dict[str, int]]:
    """(programs, tile): a tile is 32 KiB of a row in strips of 8 columns, 32 bytes per thread.

    A kernel that reads its rows twice keeps as many in flight as L2 holds (36 of the 50 MiB of an H100: one per
    multiprocessor at 128k classes in bf16), so that the second read does not go to memory. Prefetching more than
    one stream (class weights beside logits) would not fit the shared memory of most GPUs.
    """
    num_rows, vocab = logits.shape
    size = logits.element_size()
    tile = min(1 << max(vocab - 1, 7).bit_length(), 32768 // size)
    num_warps = min(max(tile * size // 1024, 4), 16 if torch.version.hip else 32)
    multiprocessors = num_sms(logits.device.index)
    resident = 64 // num_warps
    if twice:
        resident = min(resident, max(1, (36 << 20) // (multiprocessors * vocab * size)))
    programs = max(1, min(num_rows, multiprocessors * resident))
    return programs, {"STAGES": 3 if streams == 1 else 1, "R": tile // 8, "num_warps": num_warps}


def launch_rows(
    logits: Tensor, labels: Tensor, options: Options, *, row_stride: int, class_weight: Tensor | None,
    weight_sum: Tensor | None, scales: Tensor | None, rows: CrossEntropyOutput | None = None,
    stats: Tensor | None = None, out: Tensor | None = None, upstream: Tensor | None = None, first_row: int = 0,
    undivided: bool = False,
) -> None:  # fmt: skip
    """Fills `rows` and `out`, where given, from logits [C, V], which belong to the tokens from first_row on.

    out [C, V], contiguous or `logits` itself, receives the gradient; upstream, contiguous [T] or one
    number, multiplies it; undivided leaves the factor scales[1] out of it. row_stride is logits.stride(0), which
    torch.compile does not know in backward.
    """
    streams = 2 if class_weight is not None and options.label_smoothing else 1
    programs, tiling = _tiling(logits, rows is not None and out is not None, streams)
    loss, z_loss, correct, predicted = rows or (None, None, None, None)
    _rows_kernel[(programs,)](
        logits, logits if out is None else out, labels, class_weight, weight_sum,
        scales if options.reduction == "mean" else None, upstream, stats, loss, z_loss, correct, predicted,
        row_stride, row_stride if out is logits else logits.shape[1],
        0 if upstream is None else upstream.dim(), first_row, *logits.shape,
        IGNORE=options.ignore_index, SMOOTHING=options.label_smoothing, Z_LOSS=options.z_loss,
        SOFTCAP=options.softcap, TOKEN_SCALING=options.token_scaling, LOSS=rows is not None,
        GRADIENT=out is not None, UNDIVIDED=undivided, **tiling,
    )  # fmt: skip


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, class_weight, num_items, options, backward_follows):
        with device_guard(logits):
            scales, weight_sum = divisors(labels, class_weight, num_items, logits, options)
            rows = empty_rows(labels, logits, options)
            # Maximum and sum apart: rounded into one lse, they would cost each probability half an ulp of lse.
            stats = rows.loss.new_empty(labels.numel(), 2) if backward_follows else None
            launch_rows(logits, labels, options, row_stride=logits.stride(0), class_weight=class_weight,
                        weight_sum=weight_sum, scales=scales, rows=rows, stats=stats)  # fmt: skip
            out = reduce_rows(rows, scales, options)
        ctx.save_for_backward(logits, labels, class_weight, weight_sum, scales, stats)
        ctx.options, ctx.row_stride = options, logits.stride(0)
        ctx.mark_non_differentiable(*(t for t in out[1:] if t is not None))
        return tuple(out)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, *_):
        logits, labels, class_weight, weight_sum, scales, stats = ctx.saved_tensors
        grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        with device_guard(logits):
            launch_rows(logits, labels, ctx.options, row_stride=ctx.row_stride, class_weight=class_weight,
                        weight_sum=weight_sum, scales=scales, stats=stats, out=grad,
                        upstream=grad_loss.contiguous())  # fmt: skip
        return grad, None, None, None, None, None


def check_inputs(
    x: Tensor, labels: Tensor, vocab: int, class_weight: Tensor | None, num_items: int | Tensor | None,
    options: Options,
) -> None:  # fmt: skip
    """Raises InputError where shapes, dtypes, devices and scalars do not fit together; reads no tensor."""
    if not x.is_floating_point():
        raise InputError(f"logits or hidden states are {x.dtype}; a loss needs floating point.")
    if labels.shape != x.shape[:-1]:
        raise InputError(
            f"labels {tuple(labels.shape)} need one entry per token, {tuple(x.shape[:-1])}; "
            "if labels are shifted by one, the logits or hidden states lose their last position too."
        )
    if labels.dtype not in (torch.int64, torch.int32):
        raise InputError(f"labels are {labels.dtype}; they are class indices (int64, int32), not probabilities.")
    if class_weight is not None and (class_weight.shape != (vocab,) or class_weight.device != x.device):
        found = f"{tuple(class_weight.shape)} on {class_weight.device}"
        raise InputError(f"class_weight is {found}; it must be [{vocab}] on {x.device}.")
    if options.reduction not in ("mean", "sum", "none"):
        raise InputError(f"reduction={options.reduction!r}; use 'mean', 'sum' or 'none'.")
    if not 0.0 <= options.label_smoothing <= 1.0:
        raise InputError(f"label_smoothing={options.label_smoothing} lies outside [0, 1].")
    if options.softcap is not None and not options.softcap > 0:
        raise InputError(f"softcap={options.softcap} must be positive; None leaves the logits uncapped.")
    if num_items is not None and options.reduction != "mean":
        raise InputError(f"num_items_in_batch divides a mean; reduction={options.reduction!r} has no divisor.")
    if isinstance(num_items, Tensor) and num_items.numel() != 1:
        raise InputError(f"num_items_in_batch has shape {tuple(num_items.shape)}; it is one number.")


def on_device(count: int | Tensor | None, device: torch.device) -> Tensor | None:
    """The divisor as a tensor that a kernel can read, without waiting for the device."""
    if count is None or isinstance(count, Tensor):
        return count if count is None else count.to(device, non_blocking=True)
    return torch.full((), count, dtype=torch.float64, device=device)


def cross_entropy(
    logits: Tensor, labels: Tensor, *, class_weight: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: str = "mean",
    num_items_in_batch: int | Tensor | None = None, token_scaling: bool = False, return_z_loss: bool = False,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
) -> Tensor | CrossEntropyOutput:  # fmt: skip
    """Cross entropy of logits [..., V] and labels [...] of class indices, by the formula at the top of this file.

    T tokens are all leading dims, flattened. The loss is fp32 (fp64 for fp64 logits): a scalar, or [T] with
    reduction="none", 0 where the label is ignore_index. "mean" divides the cross entropy by the sum of the class
    weights of the valid labels (without weights: their number) and the z part by their number;
    num_items_in_batch, an int or a device scalar, replaces both, for gradient accumulation. Where the divisor is
    0, as when every label is ignored, loss and gradient are 0 (torch returns NaN).

    class_weight [V] weighs classes as in torch.nn.CrossEntropyLoss, and leaves the z part alone. token_scaling
    multiplies a token's loss and gradient by the probability of its label, taken as a constant. The other
    outputs have no gradient: z_loss is the reduced z part, which the loss includes; token_accuracy the share of
    valid tokens whose argmax is the label ("none": 0 or 1 per token); predicted_tokens int64 [T] the argmax, -1
    at ignored labels.

    A label that is neither a class nor ignore_index makes the loss NaN on a GPU, which is not waited for, and
    raises InputError on the CPU. Logits whose rows are not evenly spaced in memory, as in logits[:, :-1] of a
    batch, are copied: shift the labels instead. There is no second derivative.
    """
    options = Options(ignore_index, label_smoothing, z_loss, softcap, reduction, token_scaling, return_z_loss,
                      return_token_accuracy, return_predicted_tokens)  # fmt: skip
    check_inputs(logits, labels, logits.shape[-1], class_weight, num_items_in_batch, options)
    if not use_triton(logits):
        return cross_entropy_reference(
            logits, labels, class_weight=class_weight, num_items_in_batch=num_items_in_batch,
            **options._asdict(),
        )  # fmt: skip
    rows = logits.reshape(-1, logits.shape[-1])
    loss, *others = _CrossEntropy.apply(
        last_dim_contiguous(rows),
        labels.to(logits.device, non_blocking=True).reshape(-1).contiguous(),
        class_weight, on_device(num_items_in_batch, logits.device), options,
        torch.is_grad_enabled() and logits.requires_grad,
    )  # fmt: skip
    extras = return_z_loss or return_token_accuracy or return_predicted_tokens
    return CrossEntropyOutput(loss, *others) if extras else loss
