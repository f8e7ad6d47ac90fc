"""The kernel of cross entropy: rows of logits to losses, metrics and gradients, in one or two reads of each row.

`cross_entropy` runs it over its logits, `linear_cross_entropy` and `linear_logprobs` over their workspace. Formulas and
options are documented there.

Source: Milakov and Gimelshein, arXiv:1805.02867 (online softmax).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import accumulator, cuda_capability, num_sms, tl, triton


class Rows(NamedTuple):
    """Per-token results, None where not requested."""

    loss: Tensor
    z_loss: Tensor | None
    correct: Tensor | None
    predicted: Tensor | None
    entropy: Tensor | None
    logits_mean: Tensor | None = None


class Options(NamedTuple):
    """The scalars of a call, checked by `check_inputs` of cross_entropy."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    reduction: str
    token_scaling: bool
    return_z_loss: bool
    return_token_accuracy: bool
    return_predicted_tokens: bool
    return_entropy: bool = False

    @property
    def extras(self) -> bool:
        """True if more than the loss is requested."""
        return any(self[6:])


@triton.jit
def _tanh(u):
    """(tanh u, 1 - tanh(u)^2), the latter without cancellation."""
    e = tl.exp(-2.0 * tl.abs(u))
    inverse = 1.0 / (1.0 + e)
    far = (1.0 - e) * inverse
    far = tl.where(u < 0, -far, far)
    slope = 4.0 * e * inverse * inverse
    if u.dtype == tl.float64:
        return far, slope
    # 1 - exp() loses the low bits of a small argument; below 0.5 a minimax polynomial is used (2^-31).
    s = u * u
    p = -0.33333328 + s * (0.13332964 + s * (-0.05389919 + s * (0.02129799 - s * 0.00664748)))
    return tl.where(tl.abs(u) < 0.5, u + u * s * p, far), slope


@triton.jit
def tile_columns(start, R: tl.constexpr, AXIS: tl.constexpr):
    """The columns of a tile, which is R strips of 8. AXIS 1: a strip is 8 neighbouring columns, and the tile [R, 8].
    AXIS 0: the columns of a strip are R apart, and the tile is [8, R]."""
    if AXIS == 1:
        columns = start + tl.arange(0, R)[:, None] * 8 + tl.arange(0, 8)[None, :]
    else:
        columns = start + tl.arange(0, 8)[:, None] * R + tl.arange(0, R)[None, :]
    return columns


@triton.jit
def load_capped(row, columns, V, END, SOFTCAP: tl.constexpr, SHARPEN: tl.constexpr, DTYPE: tl.constexpr,
                EVICT: tl.constexpr, PADDED: tl.constexpr):  # fmt: skip
    """(logits at `columns` of a row, capped and times SHARPEN, -inf past the row's end; slope of the cap)."""
    z = tl.load(row + columns, mask=columns < END, other=-float("inf"), eviction_policy=EVICT).to(DTYPE)
    slope = z
    if SOFTCAP is not None:
        t, slope = _tanh(z * (1.0 / SOFTCAP))
        z = SOFTCAP * t
    if SHARPEN != 1.0:
        z *= SHARPEN
    if PADDED or SOFTCAP is not None:
        z = tl.where(columns < V, z, -float("inf"))
    return z, slope


@triton.jit
def _gradient(z, cap_slope, class_weight, columns, V, maximum, log_total, slope, hot, smooth, entropy, entropy_slope,
              SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr, SHARPEN: tl.constexpr):  # fmt: skip
    """d loss / d logits at `columns`. hot: what the label's entry has less than another's; 0.0 for other classes."""
    LOG2E: tl.constexpr = 1.4426950408889634
    g = tl.exp2((z - maximum) * LOG2E)
    if entropy is None:
        g = g * slope - hot
    else:
        # dH/dz_c = -p_c (log p_c + H), and 0 where z_c is -inf
        excess = tl.where(z > -float("inf"), z - maximum, 0.0) + (entropy - log_total)
        g = g * (slope - excess * entropy_slope) - hot
    if SMOOTHING != 0.0:
        if class_weight is not None:
            g -= smooth * tl.load(class_weight + columns, mask=columns < V, other=0.0).to(g.dtype)
        else:
            g -= smooth
    if SOFTCAP is not None:
        g *= cap_slope
    if SHARPEN != 1.0:
        g *= SHARPEN
    return g


@triton.jit
def write_gradient(row, out, class_weight, every_weight, label, is_class, z_label, cap_label, label_weight, maximum,
                   total, entropy, ce_scale, z_scale, entropy_scale, V, classes, END, SMOOTHING: tl.constexpr,
                   Z_LOSS: tl.constexpr, SOFTCAP: tl.constexpr, SHARPEN: tl.constexpr, DTYPE: tl.constexpr,
                   PADDED: tl.constexpr, STAGES: tl.constexpr, R: tl.constexpr, AXIS: tl.constexpr):  # fmt: skip
    """out = d(ce_scale * ce + z_scale * z_part + entropy_scale * entropy)/d(row), the last unless entropy is None.

    classes: the size of the whole vocabulary, of which the row has V logits. every_weight: the sum of all weights.
    `out` may be `row`: a tile is read before it is written. Tiles run from the last to the first, because the pass
    before left the last ones in the cache. The label's entry is p - 1 in fp32, rounded once: subtracting 1 from a p
    stored in bf16 would cancel near 1.
    """
    log_total = tl.log(total)
    hot = ce_scale * (1.0 - SMOOTHING) * label_weight
    smooth = ce_scale * SMOOTHING / classes
    slope = hot + smooth * every_weight + z_scale * (2.0 * Z_LOSS) * (maximum + log_total)
    slope = slope / total
    entropy_slope = None
    if entropy is not None:
        entropy_slope = entropy_scale / total
    at_label = _gradient(z_label, cap_label, class_weight, label, V, maximum, log_total, slope, hot, smooth, entropy,
                         entropy_slope, SMOOTHING, SOFTCAP, SHARPEN)  # fmt: skip
    tl.debug_barrier()  # every thread has read z_y before it is overwritten
    tiles = tl.cdiv(V, R * 8)
    for i in tl.range(0, tiles, num_stages=STAGES):
        columns = tile_columns((tiles - 1 - i) * (R * 8), R, AXIS)
        z, cap_slope = load_capped(row, columns, V, END, SOFTCAP, SHARPEN, DTYPE, "evict_first", PADDED)
        g = _gradient(z, cap_slope, class_weight, columns, V, maximum, log_total, slope, 0.0, smooth, entropy,
                      entropy_slope, SMOOTHING, SOFTCAP, SHARPEN)  # fmt: skip
        tl.store(out + columns, g.to(out.dtype.element_ty), mask=columns < END)
    tl.debug_barrier()  # the label's entry is written last
    tl.store(out + label, at_label.to(out.dtype.element_ty), mask=is_class)


@triton.jit
def _statistics(row, class_weight, z_label, V, END, ARGMAX: tl.constexpr, ENTROPY: tl.constexpr, MEAN: tl.constexpr,
                SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr, SHARPEN: tl.constexpr, DTYPE: tl.constexpr,
                KEEP: tl.constexpr, PADDED: tl.constexpr, STAGES: tl.constexpr, R: tl.constexpr,
                AXIS: tl.constexpr):  # fmt: skip
    """Of a row: maximum, sum of exp(z_c - maximum), sum of w_c (z_y - z_c) with SMOOTHING, and where asked for argmax,
    entropy and mean. Each strip of 8 columns, which belongs to one thread, has its own maximum and sum: threads
    synchronise once, at the end, and rescaling the sums costs one exp per eight columns."""
    LOG2E: tl.constexpr = 1.4426950408889634
    entropy, mean = tl.full([], 0.0, DTYPE), tl.full([], 0.0, DTYPE)
    m = tl.full([R], -float("inf"), DTYPE)
    s = tl.zeros([R], DTYPE)
    below = tl.zeros([R], DTYPE)  # sum of w_c (z_y - z_c), for the smoothing
    best = tl.zeros([R], tl.int32)
    tilt = tl.zeros([R], DTYPE)  # sum of exp(z_c - m) (z_c - m), for the entropy
    sums = tl.zeros([R], DTYPE)
    for start in tl.range(0, V, R * 8, num_stages=STAGES):
        columns = tile_columns(start, R, AXIS)
        z, _ = load_capped(row, columns, V, END, SOFTCAP, SHARPEN, DTYPE, KEEP, PADDED)
        peak = tl.max(z, AXIS)
        if ARGMAX:
            at_peak = tl.where(z == tl.expand_dims(peak, AXIS), columns, V)
            best = tl.where(peak > m, tl.min(at_peak, AXIS), best)
        raised = tl.maximum(m, peak)
        shift = tl.where(raised == -float("inf"), 0.0, raised)
        gap = z - tl.expand_dims(shift, AXIS)
        e = tl.exp2(gap * LOG2E)
        if ENTROPY:
            drop = tl.where(m == -float("inf"), 0.0, m - shift)
            weighed = tl.where(z == -float("inf"), 0.0, e * gap)
            tilt = (tilt + s * drop) * tl.exp2(drop * LOG2E) + tl.sum(weighed, AXIS)
        if MEAN:
            sums += tl.sum(tl.where(columns < V, z, 0.0), AXIS)
        s = s * tl.exp2((m - shift) * LOG2E) + tl.sum(e, AXIS)
        m = raised
        if SMOOTHING != 0.0:
            gap = tl.where(columns < V, z_label - z, 0.0)
            if class_weight is not None:
                gap *= tl.load(class_weight + columns, mask=columns < V, other=0.0).to(DTYPE)
            below += tl.sum(gap, AXIS)
    maximum = tl.max(m, 0)
    floor = tl.where(maximum == -float("inf"), 0.0, maximum)
    total = tl.sum(s * tl.exp2((m - floor) * LOG2E), 0)
    if ENTROPY:
        drop = tl.where(m == -float("inf"), 0.0, m - floor)
        entropy = tl.log(total) - tl.sum((tilt + s * drop) * tl.exp2(drop * LOG2E), 0) / total
    if MEAN:
        mean = tl.sum(sums, 0) / SHARPEN / V
    guess = tl.minimum(tl.min(tl.where(m == maximum, best, V), 0), V - 1).to(tl.int64)
    return maximum, total, tl.sum(below, 0), guess, entropy, mean


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _rows_kernel(logits, out, labels, class_weight, weight_sum, scales, upstream, upstream_entropy, stats, loss,
                 z_losses, correct, predicted, entropies, means, row_stride, out_stride, upstream_stride, first_row,
                 num_rows, V, END, IGNORE: tl.constexpr, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr,
                 SOFTCAP: tl.constexpr, SHARPEN: tl.constexpr, TOKEN_SCALING: tl.constexpr, LOSS: tl.constexpr,
                 GRADIENT: tl.constexpr, UNDIVIDED: tl.constexpr, PADDED: tl.constexpr, STAGES: tl.constexpr,
                 R: tl.constexpr, AXIS: tl.constexpr):  # fmt: skip
    """LOSS: computes loss, z part, argmax, entropy, mean and `stats` (maximum and sum of exponentials of each row).
    GRADIENT: writes the gradient to `out`, which may be `logits`. Without LOSS, it reads `stats` and `entropies`.

    Row r of `logits` and `out` is token first_row + r of all other tensors. Columns are read and written up to END: V,
    or the row stride if the rows are PADDED. Programs stride over the rows.
    """
    DTYPE: tl.constexpr = tl.float64 if logits.dtype.element_ty == tl.float64 else tl.float32
    KEEP: tl.constexpr = "evict_last" if GRADIENT else "evict_first"  # the gradient reads the row again
    ARGMAX: tl.constexpr = predicted is not None or correct is not None
    ENTROPY: tl.constexpr = entropies is not None
    MEAN: tl.constexpr = means is not None
    for r in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        token = tl.cast(first_row + r, tl.int64)
        row = logits + tl.cast(r, tl.int64) * row_stride
        out_row = row
        if GRADIENT:
            out_row = out + tl.cast(r, tl.int64) * out_stride
        label = tl.load(labels + token).to(tl.int64)
        token_loss, z_part = tl.full([], 0.0, DTYPE), tl.full([], 0.0, DTYPE)
        guess = tl.full([], -1, tl.int64)
        entropy, mean = tl.full([], 0.0, DTYPE), tl.full([], 0.0, DTYPE)
        if label != IGNORE:
            # A label outside [0, V) has weight NaN, and so its loss and gradient are NaN.
            is_class = (label >= 0) & (label < V)
            label_weight, every_weight = tl.full([], 1.0, DTYPE), tl.full([], 1.0, DTYPE) * V
            if class_weight is not None:
                label_weight = tl.load(class_weight + label, mask=is_class, other=0.0).to(DTYPE)
                every_weight = tl.load(weight_sum).to(DTYPE)
            label_weight = tl.where(is_class, label_weight, float("nan"))
            z_label, cap_label = load_capped(row, tl.where(is_class, label, V), V, V, SOFTCAP, SHARPEN, DTYPE, "",
                                             False)  # fmt: skip

            if LOSS:
                maximum, total, below, guess, entropy, mean = _statistics(
                    row, class_weight, z_label, V, END, ARGMAX, ENTROPY, MEAN,
                    SMOOTHING, SOFTCAP, SHARPEN, DTYPE, KEEP, PADDED, STAGES, R, AXIS,
                )  # fmt: skip
                if stats is not None:
                    tl.store(stats + 2 * token, maximum)
                    tl.store(stats + 2 * token + 1, total)
            else:
                maximum, total = tl.load(stats + 2 * token), tl.load(stats + 2 * token + 1)
                if upstream_entropy is not None:
                    entropy = tl.load(entropies + token)

            ce_scale, z_scale = tl.full([], 1.0, DTYPE), tl.full([], 1.0, DTYPE)
            if scales is not None:
                ce_scale, z_scale = tl.load(scales), tl.load(scales + 1)
            nll = tl.log(total) - (z_label - maximum)
            factor = tl.exp(-nll) if TOKEN_SCALING else tl.full([], 1.0, DTYPE)
            if LOSS:
                lse = maximum + tl.log(total)
                ce = (1.0 - SMOOTHING) * label_weight * nll
                if SMOOTHING != 0.0:
                    ce += (every_weight * nll + below) * SMOOTHING / V
                z_part = factor * z_scale * Z_LOSS * lse * lse
                token_loss = factor * ce_scale * ce + z_part
            if GRADIENT:
                if UNDIVIDED:
                    ce_scale = ce_scale / tl.where(z_scale == 0, 1.0, z_scale)
                    z_scale = tl.full([], 1.0, DTYPE)
                if upstream is not None:
                    factor *= tl.load(upstream + token * upstream_stride).to(DTYPE)
                tilted, entropy_scale = None, None
                if upstream_entropy is not None:
                    tilted, entropy_scale = entropy, tl.load(upstream_entropy + token).to(DTYPE)
                write_gradient(row, out_row, class_weight, every_weight, label, is_class, z_label, cap_label,
                               label_weight, maximum, total, tilted, factor * ce_scale, factor * z_scale,
                               entropy_scale, V, V, END, SMOOTHING, Z_LOSS, SOFTCAP, SHARPEN, DTYPE, PADDED, STAGES, R,
                               AXIS)  # fmt: skip
        elif GRADIENT:
            for start in range(0, V, R * 8):
                columns = tile_columns(start, R, AXIS)
                tl.store(out_row + columns, tl.zeros_like(columns).to(out.dtype.element_ty), mask=columns < END)
        if LOSS:
            tl.store(loss + token, token_loss)
            if z_losses is not None:
                tl.store(z_losses + token, z_part)
            if correct is not None:
                tl.store(correct + token, tl.where((guess == label) & (label != IGNORE), 1.0, 0.0))
            if predicted is not None:
                tl.store(predicted + token, guess)
            if entropies is not None:
                tl.store(entropies + token, entropy)
            if means is not None:
                tl.store(means + token, mean)


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


def dense(x: Tensor | None) -> Tensor | None:
    """x, contiguous."""
    return None if x is None else x.contiguous()


def divisors(
    labels: Tensor, class_weight: Tensor | None, num_items: Tensor | None, logits: Tensor, options: Options
) -> tuple[Tensor | None, Tensor | None]:
    """(scales [3] of _scales_kernel, or None where nothing is divided; the sum of the class weights, or None)."""
    dtype = accumulator(logits.dtype)
    weight_sum = None if class_weight is None else class_weight.sum(dtype=dtype)
    if options.reduction == "none" or (
        options.reduction == "sum" and not (options.return_token_accuracy or options.return_entropy)
    ):
        return None, weight_sum
    scales = torch.empty(3, dtype=dtype, device=logits.device)
    launch(
        _scales_kernel, (1,),
        labels, dense(class_weight), num_items, scales, labels.numel(), logits.shape[1], options.ignore_index,
        options.reduction == "mean", 4096, num_warps=8,
    )  # fmt: skip
    return scales, weight_sum


def empty_rows(labels: Tensor, logits: Tensor, options: Options) -> Rows:
    """Uninitialised per-token results: loss, z part, 1 where the argmax is the label, argmax, entropy."""
    loss = logits.new_empty(labels.shape, dtype=accumulator(logits.dtype))
    return Rows(
        loss,
        torch.empty_like(loss) if options.return_z_loss else None,
        torch.empty_like(loss, dtype=torch.float32) if options.return_token_accuracy else None,
        torch.empty_like(loss, dtype=torch.int64) if options.return_predicted_tokens else None,
        torch.empty_like(loss) if options.return_entropy else None,
    )


def row_tiling(
    logits: Tensor, row_stride: int, padded: bool, twice: bool, streams: int
) -> tuple[int, int, dict[str, int]]:
    """(programs, END, tiling): a tile is 32 KiB of a row, or 16 KiB for short rows, in strips of 8 columns.

    twice: the kernel reads its rows twice, so that only as many rows are in flight as fit the L2 cache (36 of the 50
    MiB of an H100: one per multiprocessor at 128k classes in bf16). streams: the number of tensors that a row is read
    from; with 2 (class weights) nothing is prefetched, as it would not fit the shared memory of most GPUs. Rows that do
    not start at multiples of 16 elements allow no vector loads, and neighbouring columns then go to neighbouring
    threads.
    """
    num_rows, vocab = logits.shape
    size = logits.element_size()
    padded = padded and vocab % 16 != 0 and row_stride % 16 == 0
    vectorised = (padded or vocab % 16 == 0) and row_stride % 16 == 0
    short = twice and (vocab * size <= 1 << 17 or not vectorised)
    tile = min(1 << max(vocab - 1, 7).bit_length(), (16384 if short else 32768) // size)
    # A thread has 32 bytes of a tile, or 64 where a row is long and read twice.
    share = 2048 if twice and not short else 1024
    num_warps = min(max(tile * size // share, 4), 16 if torch.version.hip or twice else 32)
    multiprocessors = num_sms(logits.device.index)
    resident = 64 // num_warps
    if twice:
        resident = min(resident, max(1, (36 << 20) // (multiprocessors * vocab * size)))
    programs = max(1, min(num_rows, multiprocessors * resident))
    is_ampere = cuda_capability(logits.device.index) >= 80  # 99 KiB of shared memory per block, or more
    stages = 1 if streams > 1 or not vectorised else 4 if twice and not short and is_ampere else 3
    axis = 1 if vectorised else 0
    tiling = {"PADDED": padded, "STAGES": stages, "R": tile // 8, "AXIS": axis, "num_warps": num_warps}
    return programs, row_stride if padded else vocab, tiling


def launch_rows(
    logits: Tensor, labels: Tensor, options: Options, *, row_stride: int, class_weight: Tensor | None,
    weight_sum: Tensor | None, scales: Tensor | None, rows: Rows | None = None,
    stats: Tensor | None = None, out: Tensor | None = None, upstream: Tensor | None = None,
    upstream_entropy: Tensor | None = None, entropy: Tensor | None = None, first_row: int = 0,
    temperature: float = 1.0, undivided: bool = False, padded: bool = False,
) -> None:  # fmt: skip
    """Fills `rows` and `out`, where given, from logits [C, V] of the tokens from first_row on.

    out: [C, V], contiguous or `logits` itself, gets the gradient, times upstream, contiguous [T] or one number;
    undivided: without the factor scales[1]. upstream_entropy [T]: adds the gradient of the entropy, which without
    `rows` is read from `entropy` [T]. row_stride: logits.stride(0), which torch.compile does not know in the backward.
    padded: the memory between rows may be read, and written if out is logits.
    """
    streams = 2 if class_weight is not None and options.label_smoothing else 1
    programs, end, tiling = row_tiling(logits, row_stride, padded, rows is not None and out is not None, streams)
    loss, z_loss, correct, predicted, entropy, means = rows or (None, None, None, None, entropy, None)
    launch(
        _rows_kernel, (programs,),
        logits, out, labels, dense(class_weight), weight_sum,
        scales if options.reduction == "mean" else None, upstream, upstream_entropy, stats, loss, z_loss, correct,
        predicted, entropy, means,
        row_stride, row_stride if out is logits else logits.shape[1],
        0 if upstream is None else upstream.dim(), first_row, *logits.shape, end,
        options.ignore_index, options.label_smoothing, options.z_loss, options.softcap, 1.0 / temperature,
        options.token_scaling, rows is not None, out is not None, undivided, **tiling,
    )  # fmt: skip
