"""The kernel of `jsd` and `linear_jsd`: the divergence of each row of two tensors, and its gradients.

The tensors are log-probabilities, read in one pass for the loss or the gradient; or logits, read in one pass for both
log-sum-exps, one for the loss and one for the gradient, because each pass needs a sum over the row from the one before
(except at beta = 0, where the gradient comes with the loss).

log M = h + log(1 + c (exp(-|x - y|) - 1)), where h is the larger of x and y, and c the share of the smaller in M. So
equal rows have a loss of 0, close rows lose no digits, and nothing underflows. At 2-byte dtypes, arithmetic takes as
much time as memory.

The total variation of two rows of logits takes the same passes, with other terms. So does the cosine distance, whose
first pass sums squares: with e = z / |z| - u / |u| it is L = |e|^2 / 2, which does not cancel as 1 - cos does, and its
gradient is (e - L z / |z|) / |z|.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import num_sms, tl, triton
from ligermodels.kernels.loss._cross_entropy_rows import load_capped
from ligermodels.kernels.loss.kl_div import probability


class JSDOptions(NamedTuple):
    """The scalars of a call; from temperature on they are those of `linear_jsd`."""

    beta: float
    ignore_index: int
    reduction: str
    temperature: float = 1.0
    weight_hard: float = 0.0
    weight_soft: float = 1.0
    student_softcap: float | None = None
    teacher_softcap: float | None = None
    divergence: str = "jsd"


@triton.jit
def _less_one(distance, ratio, EXACT: tl.constexpr):
    """ratio - 1 for ratio = exp(-distance). EXACT: with all its digits where that cancels, by a polynomial (2^-25)."""
    below = ratio - 1.0
    if EXACT:
        p = 1.0 - distance * (0.49999685 - distance * (0.16660432 - distance * (0.04122942 - distance * 0.00705719)))
        below = tl.where(distance < 0.4, -distance * p, below)
    return below


@triton.jit
def _log_mixture(gap, ratio, below, BETA: tl.constexpr, EXACT: tl.constexpr):
    """log M less the larger of x and y: log(1 + c below) with c the share of the smaller in M, below = ratio - 1."""
    if BETA == 0.5 and ratio.dtype == tl.float32:
        p = 0.00982554206 + below * (0.00662426352 + below * 0.00281466339)  # minimax on [-1, 0], 2^-25 with fp32's
        p = 0.0417125768 + below * (-0.0151753177 + below * (0.00842539737 + below * (0.0031802935 + below * p)))
        log_m = below * (0.5 + below * (-0.124998213 + below * p))
    else:
        share = tl.where(gap >= 0, tl.full([], BETA, ratio.dtype), tl.full([], 1.0 - BETA, ratio.dtype))
        v = share * below
        u = 1.0 + v
        if EXACT:
            rest = tl.where(gap >= 0, tl.full([], 1.0 - BETA, ratio.dtype), tl.full([], BETA, ratio.dtype))
            near = ratio > 0.67
            log_m = tl.log(tl.where(near, u, rest + share * ratio)) + tl.where(near, (v - (u - 1.0)) / u, 0.0)
        else:
            log_m = tl.log(u)
    return log_m


@triton.jit
def _terms(x, y, gap, KIND: tl.constexpr, BETA: tl.constexpr, LOGITS: tl.constexpr, EXACT: tl.constexpr):
    """(loss, its derivatives by x and by y, exp x) of log-probabilities, which may be -inf, and gap = x - y, finite.

    LOGITS leaves out of the derivative by x what is a multiple of exp x, in which the gradient of logits has no part.
    """
    s, t = probability(x, EXACT), probability(y, EXACT)
    distance = tl.abs(gap)
    ratio = probability(-distance, EXACT)
    below = _less_one(distance, ratio, EXACT)
    if KIND == "tv":
        loss = 0.5 * tl.abs(tl.where(gap >= 0, s, t) * below)
        side = tl.where(gap > 0, 0.5, tl.where(gap < 0, -0.5, 0.0))
        dx, dy = side * s, -side * t
    elif BETA == 0.0 or BETA == 1.0:
        apart = tl.where(gap >= 0, -s, t) * below  # S - T
        if BETA == 0.0:
            loss = tl.where(t == 0.0, 0.0, t * -tl.where(x == -float("inf"), x, gap))
            dx, dy = -t, loss + t
            if LOGITS:
                # 0 in sum over the row; takes from the loss what is of first order in gap, and the error of that.
                loss += apart
                dx = apart
        else:
            loss = tl.where(s == 0.0, 0.0, s * tl.where(y == -float("inf"), -y, gap))
            dx, dy = loss, -s
            if LOGITS:
                loss -= apart
            else:
                dx += s
    else:
        log_m = _log_mixture(gap, ratio, below, BETA, EXACT)
        dx = (BETA - 1.0) * s * (log_m + tl.maximum(-gap, 0.0))
        dy = -BETA * t * (log_m + tl.maximum(gap, 0.0))
        loss = dx + dy
    return loss, dx, dy, s


@triton.jit
def _bounded(x):
    """x, or -1e30 where it is less, as it is past the end of a row."""
    return tl.maximum(x, -1e30, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _weight(z, SCALE: tl.constexpr):
    """exp(z SCALE), where a result near 1 matters."""
    return tl.exp(z * SCALE) if z.dtype == tl.float64 else tl.exp2(z * (SCALE * 1.4426950408889634))


@triton.jit
def _raise(z, m, s, h, SCALE: tl.constexpr, HARD: tl.constexpr):
    """Takes a tile z [R, 8] into the maxima m, s = sum exp((z - m) SCALE) and, where HARD, h = sum exp(z - m)."""
    raised = tl.maximum(m, tl.max(z, 1))
    shift = tl.where(raised == -float("inf"), 0.0, raised)
    down, z = m - shift, z - shift[:, None]
    if HARD:
        h = h * _weight(down, 1.0) + tl.sum(_weight(z, 1.0), 1)
    return raised, s * _weight(down, SCALE) + tl.sum(_weight(z, SCALE), 1), h


@triton.jit
def _statistics(student, teacher, V, SCALE: tl.constexpr, HARD: tl.constexpr, STUDENT_CAP: tl.constexpr,
                TEACHER_CAP: tl.constexpr, BACKWARDS: tl.constexpr, DTYPE: tl.constexpr, STAGES: tl.constexpr,
                R: tl.constexpr):  # fmt: skip
    """Of two rows of logits: maximum and log sum exp((z - maximum) SCALE), and the student's log sum exp(z - maximum).

    Maximum and log-sum are separate: the rounding of their sum would change each probability by half an ulp of it. Each
    strip of 8 columns, which belongs to one thread, has its own maximum and sum; threads synchronise once, at the end.
    """
    APART: tl.constexpr = HARD and SCALE != 1.0
    m, n = tl.full([R], -float("inf"), DTYPE), tl.full([R], -float("inf"), DTYPE)
    s, t, h = tl.zeros([R], DTYPE), tl.zeros([R], DTYPE), tl.zeros([R], DTYPE)
    tiles = tl.cdiv(V, R * 8)
    for i in tl.range(0, tiles, num_stages=STAGES):
        tile = (tiles - 1 - i) if BACKWARDS else i
        columns = tile * (R * 8) + tl.arange(0, R)[:, None] * 8 + tl.arange(0, 8)[None, :]
        z, _ = load_capped(student, columns, V, V, STUDENT_CAP, 1.0, DTYPE, "evict_last", False)
        u, _ = load_capped(teacher, columns, V, V, TEACHER_CAP, 1.0, DTYPE, "evict_last", False)
        m, s, h = _raise(z, m, s, h, SCALE, APART)
        n, t, _ = _raise(u, n, t, t, SCALE, False)
    s_max, t_max = tl.max(m, 0), tl.max(n, 0)
    s_log = tl.log(tl.sum(s * _weight(m - s_max, SCALE), 0))
    t_log = tl.log(tl.sum(t * _weight(n - t_max, SCALE), 0))
    h_log = s_log
    if APART:
        h_log = tl.log(tl.sum(h * _weight(m - s_max, 1.0), 0))
    return s_max, s_log, t_max, t_log, h_log


@triton.jit
def _norms(student, teacher, V, HARD: tl.constexpr, STUDENT_CAP: tl.constexpr, TEACHER_CAP: tl.constexpr,
           DTYPE: tl.constexpr, STAGES: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """Of two rows of logits: 1 / |z| and 1 / |u|, 0 for rows of zeros; HARD: maximum z, log sum exp(z - maximum)."""
    m = tl.full([R], -float("inf"), DTYPE)
    h, s, t = tl.zeros([R], DTYPE), tl.zeros([R], DTYPE), tl.zeros([R], DTYPE)
    for start in tl.range(0, V, R * 8, num_stages=STAGES):
        columns = start + tl.arange(0, R)[:, None] * 8 + tl.arange(0, 8)[None, :]
        z, _ = load_capped(student, columns, V, V, STUDENT_CAP, 1.0, DTYPE, "evict_last", False)
        u, _ = load_capped(teacher, columns, V, V, TEACHER_CAP, 1.0, DTYPE, "evict_last", False)
        if HARD:
            m, h, _ = _raise(z, m, h, h, 1.0, False)
        z, u = tl.where(columns < V, z, 0.0), tl.where(columns < V, u, 0.0)
        s += tl.sum(z * z, 1)
        t += tl.sum(u * u, 1)
    maximum = tl.max(m, 0)
    h_log = maximum
    if HARD:
        h_log = tl.log(tl.sum(h * _weight(m - maximum, 1.0), 0))
    s, t = tl.sqrt(tl.sum(s, 0)), tl.sqrt(tl.sum(t, 0))
    s = tl.where(s == 0, 0.0, 1.0 / tl.where(s == 0, 1.0, s))
    t = tl.where(t == 0, 0.0, 1.0 / tl.where(t == 0, 1.0, t))
    return s, t, maximum, h_log


@triton.jit
def _sweep(student, teacher, d_student, d_teacher, V, s_max, s_log, t_max, t_log, h_log, mean_slope, soft, hard, label,
           KIND: tl.constexpr, BETA: tl.constexpr, LOGITS: tl.constexpr, SCALE: tl.constexpr, STUDENT_CAP: tl.constexpr,
           TEACHER_CAP: tl.constexpr, HARD: tl.constexpr, SUM: tl.constexpr, WRITE: tl.constexpr,
           BACKWARDS: tl.constexpr, DTYPE: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
           R: tl.constexpr):  # fmt: skip
    """One pass over a row of each. SUM: the sums of the loss and of its derivative by x. WRITE: soft times the
    gradients, and for HARD hard times those of cross entropy. d_student may begin where student begins: a tile is read
    before it is written and, of narrower numbers than student's, written where tiles before it were, so that a pass
    that writes goes forwards. BACKWARDS begins with the tiles that the pass before left in the cache. For "cosine",
    s_log and t_log are the reciprocal norms, and mean_slope is the loss.
    """
    loss, slope = tl.zeros([R], DTYPE), tl.zeros([R], DTYPE)
    tiles = tl.cdiv(V, R * 8)
    apart = (s_max - t_max) * SCALE + (s_log - t_log)
    KEEP: tl.constexpr = "evict_first" if WRITE else "evict_last"
    for i in tl.range(0, tiles, num_stages=STAGES):
        tile = (tiles - 1 - i) if BACKWARDS else i
        columns = tile * (R * 8) + tl.arange(0, R)[:, None] * 8 + tl.arange(0, 8)[None, :]
        z, cap_slope = load_capped(student, columns, V, V, STUDENT_CAP, 1.0, DTYPE, KEEP, False)
        y, _ = load_capped(teacher, columns, V, V, TEACHER_CAP, 1.0, DTYPE, KEEP, False)
        x, gap = z, _bounded(z) - _bounded(y)  # of two rows that are near each other, the difference is exact
        if KIND == "cosine":
            s = tl.where(columns < V, z, 0.0) * s_log
            dx = s - tl.where(columns < V, y, 0.0) * t_log
            value, dy = 0.5 * dx * dx, dx
        else:
            if LOGITS:
                gap = gap * SCALE - apart
                x = (z - s_max) * SCALE - s_log
                y = (y - t_max) * SCALE - t_log
            value, dx, dy, s = _terms(x, y, gap, KIND, BETA, LOGITS, EXACT)
        if SUM:
            loss += tl.sum(value, 1)
            slope += tl.sum(dx, 1)
        if WRITE:
            if d_student is not None:
                if KIND == "cosine":
                    dx = (dx - s * mean_slope) * s_log
                elif LOGITS:
                    dx = (dx - s * mean_slope) * SCALE
                dx *= soft
                if HARD:
                    dx += hard * (_weight((z - s_max) - h_log, 1.0) - tl.where(columns == label, 1.0, 0.0))
                if STUDENT_CAP is not None:
                    dx *= cap_slope
                if LOGITS and d_student.dtype.element_ty != student.dtype.element_ty:
                    tl.debug_barrier()  # other threads may have yet to load what this one overwrites
                tl.store(d_student + columns, dx.to(d_student.dtype.element_ty), mask=columns < V)
            if d_teacher is not None:
                tl.store(d_teacher + columns, (soft * dy).to(d_teacher.dtype.element_ty), mask=columns < V)
    return tl.sum(loss, 0), tl.sum(slope, 0)


@triton.jit
def _zero(row, V, R: tl.constexpr):
    for start in range(0, V, R * 8):
        columns = start + tl.arange(0, R * 8)
        tl.store(row + columns, tl.zeros([R * 8], row.dtype.element_ty), mask=columns < V)


@triton.jit(do_not_specialize=["first_row", "num_rows", "count"])
def _rows_kernel(student, teacher, d_student, d_teacher, labels, valid, upstream, loss, soft_loss, hard_loss,
                 student_stride, teacher_stride, d_stride, upstream_stride, first_row, num_rows, count, V,
                 KIND: tl.constexpr, BETA: tl.constexpr, IGNORE: tl.constexpr, MEAN: tl.constexpr, LOGITS: tl.constexpr,
                 SCALE: tl.constexpr, WEIGHT_HARD: tl.constexpr, WEIGHT_SOFT: tl.constexpr,
                 STUDENT_CAP: tl.constexpr, TEACHER_CAP: tl.constexpr, HARD: tl.constexpr, UNDIVIDED: tl.constexpr,
                 STAGES: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """Rows of log-probabilities or LOGITS to the loss and its parts, and to gradients, each where not None.

    Row r of student, teacher and the gradients is token first_row + r of all other tensors. Programs walk over the
    rows. MEAN divides by the number at `valid`, or without one by count; UNDIVIDED leaves that to who reads the
    gradients.
    """
    DTYPE: tl.constexpr = tl.float64 if (
        student.dtype.element_ty == tl.float64 or teacher.dtype.element_ty == tl.float64) else tl.float32  # fmt: skip
    EXACT: tl.constexpr = student.dtype.element_ty == tl.float32 or teacher.dtype.element_ty == tl.float32
    GRADIENT: tl.constexpr = d_student is not None or d_teacher is not None
    CROSS: tl.constexpr = HARD and WEIGHT_HARD != 0.0
    # The gradient needs no sum over the row.
    AT_ONCE: tl.constexpr = GRADIENT and (not LOGITS or (KIND == "jsd" and BETA == 0.0))
    divisor = tl.full([], 1.0, DTYPE)
    if MEAN:
        divisor = tl.cast(count, DTYPE)
        if valid is not None:
            divisor = tl.load(valid).to(DTYPE)
    scale = tl.where(divisor == 0, 0.0, 1.0 / tl.where(divisor == 0, 1.0, divisor))
    for r in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        token = tl.cast(first_row + r, tl.int64)
        row = tl.cast(r, tl.int64)
        x, y = student + row * student_stride, teacher + row * teacher_stride
        dx, dy = d_student, d_teacher
        if d_student is not None:
            dx = d_student + row * d_stride
        if d_teacher is not None:
            dy = d_teacher + row * d_stride
        label, counts, known = tl.full([], -1, tl.int64), token >= 0, tl.full([], 1.0, DTYPE)
        if labels is not None:
            label = tl.load(labels + token).to(tl.int64)
            counts = label != IGNORE
            known = tl.where((label >= 0) & (label < V), known, float("nan"))  # a label that is not a class gives NaN
        soft, hard = tl.full([], 0.0, DTYPE), tl.full([], 0.0, DTYPE)
        if counts:
            s_max, s_log = tl.full([], 0.0, DTYPE), tl.full([], 0.0, DTYPE)
            t_max, t_log, h_log = s_max, s_log, s_log
            if KIND == "cosine":
                s_log, t_log, s_max, h_log = _norms(x, y, V, HARD, STUDENT_CAP, TEACHER_CAP, DTYPE, STAGES, R)
            elif LOGITS:
                s_max, s_log, t_max, t_log, h_log = _statistics(x, y, V, SCALE, HARD, STUDENT_CAP, TEACHER_CAP,
                                                                AT_ONCE, DTYPE, STAGES, R)  # fmt: skip
            if HARD:
                is_class = (label >= 0) & (label < V)
                z_label, _ = load_capped(x, tl.where(is_class, label, V), V, V, STUDENT_CAP, 1.0, DTYPE, "", False)
                hard = (h_log - (z_label - s_max)) * known
            factor = known
            if GRADIENT:
                if not UNDIVIDED:
                    factor *= scale
                if upstream is not None:
                    factor *= tl.load(upstream + token * upstream_stride).to(DTYPE)
                tl.debug_barrier()  # every thread has read z_label before one writes over it
            slope = tl.full([], 0.0, DTYPE)
            if loss is not None or not AT_ONCE:
                soft, slope = _sweep(
                    x, y, dx, dy, V, s_max, s_log, t_max, t_log, h_log, slope, factor * WEIGHT_SOFT,
                    factor * WEIGHT_HARD, label, KIND, BETA, LOGITS, SCALE, STUDENT_CAP, TEACHER_CAP, CROSS, True,
                    AT_ONCE, LOGITS and not AT_ONCE, DTYPE, EXACT, STAGES, R,
                )  # fmt: skip
                if KIND == "cosine":
                    soft = tl.where((s_log == 0) | (t_log == 0), 1.0, soft)  # the cosine with a row of zeros is 0
                    slope = soft
                soft *= known
            if GRADIENT and (loss is None or not AT_ONCE):
                _sweep(
                    x, y, dx, dy, V, s_max, s_log, t_max, t_log, h_log, slope, factor * WEIGHT_SOFT,
                    factor * WEIGHT_HARD, label, KIND, BETA, LOGITS, SCALE, STUDENT_CAP, TEACHER_CAP, CROSS, False,
                    True, False, DTYPE, EXACT, STAGES, R,
                )  # fmt: skip
        else:
            if d_student is not None:
                _zero(dx, V, R)
            if d_teacher is not None:
                _zero(dy, V, R)
        if loss is not None:
            total = soft * WEIGHT_SOFT
            if CROSS:
                total += hard * WEIGHT_HARD
            tl.store(loss + token, total * scale)
        if soft_loss is not None:
            tl.store(soft_loss + token, soft * scale)
        if hard_loss is not None:
            tl.store(hard_loss + token, hard * scale)


def launch_rows(
    student: Tensor, teacher: Tensor, options: JSDOptions, *, strides: tuple[int, int], logits: bool,
    valid: Tensor | None, count: int, labels: Tensor | None, losses: Sequence[Tensor | None] = (None, None, None),
    d_student: Tensor | None = None, d_teacher: Tensor | None = None, d_stride: int | None = None,
    upstream: Tensor | None = None, first_row: int = 0, undivided: bool = False,
) -> None:  # fmt: skip
    """Writes the losses and gradients that are not None, from student and teacher [C, V], the tokens from first_row on.

    losses: three tensors [T], the loss and its soft and hard part, the parts without their weights; all are divided by
    the divisor of the mean: `valid`, a number on the device, or else count. d_student, d_teacher: [C, V] with rows
    d_stride apart, or contiguous; a row of d_student may begin where that of student does, if its elements are not
    larger. upstream: contiguous [T] or one number, multiplies the gradients. strides: of student and teacher, which
    torch.compile does not know in the backward.
    """
    rows, vocab = student.shape
    programs, tiling = _tiling(student, teacher, logits)
    launch(
        _rows_kernel, (programs,),
        student, teacher, d_student, d_teacher, labels, valid, upstream, *losses, *strides,
        vocab if d_stride is None else d_stride, 0 if upstream is None else upstream.dim(), first_row, rows,
        count, vocab, options.divergence, options.beta, options.ignore_index, options.reduction == "mean", logits,
        1.0 / options.temperature, options.weight_hard, options.weight_soft, options.student_softcap,
        options.teacher_softcap, options.weight_hard != 0 or losses[2] is not None, undivided, **tiling,
    )  # fmt: skip


def _tiling(student: Tensor, teacher: Tensor, logits: bool) -> tuple[int, dict[str, int]]:
    """(programs, tile): a tile is 8 KiB of a row in strips of 8 columns, 16 bytes per thread and row."""
    rows, vocab = student.shape
    size = max(student.element_size(), teacher.element_size())
    tile = min(1 << max(vocab - 1, 7).bit_length(), 8192 // size)
    num_warps = max(tile * size // 512, 1)
    programs = max(1, min(rows, num_sms(student.device.index) * (32 // num_warps)))
    return programs, {"STAGES": 3, "R": tile // 8, "num_warps": num_warps}
