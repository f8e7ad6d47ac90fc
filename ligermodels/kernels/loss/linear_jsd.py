"""Distillation: divergence of a student's linear head from a teacher's, without all logits in memory.

    z = cap(student_x @ student_weight.T + student_bias)        S = softmax(z / temperature)
    u = cap(teacher_x @ teacher_weight.T + teacher_bias)        T = softmax(u / temperature)
    loss = weight_soft D + weight_hard (log sum_c exp z_c - z_label)

| divergence | D |
|---|---|
| jsd | jsd(log S, log T; beta) |
| tv | the total variation, sum_c abs(S_c - T_c) / 2 |
| cosine | 1 - cos(z, u), at any temperature; 1 where a row is zeros |

averaged over the valid tokens. cap(z) = softcap * tanh(z / softcap), with a softcap for each head, or none. The
temperature does not change the hard loss, and no power of it multiplies the soft loss: for Hinton's form, set
weight_soft = temperature^2.

The forward runs over chunks of C tokens with two workspaces [C, V]. cuBLAS writes both logits, in fp32 for 16-bit
inputs too: the gradient consists of their differences, which rounding would spoil where the student is close to its
teacher. The kernel of `jsd` overwrites the student's logits with their gradient, in the dtype of the inputs, in the
first half of each row, and cuBLAS multiplies it with the weight (dx) and with x (dweight, summed in fp32 over the
chunks). The backward multiplies these gradients by the upstream gradient in place. Four GEMMs, one of them the
teacher's; each logit is read three times (twice at beta = 0), and the student's logits are written once.

Memory beyond the inputs: both workspaces (8 bytes for a token and a class, 16 in fp64; together at most
workspace_bytes, but 128 rows), dx, and dweight; with fp32 accumulation dweight in fp32, rounded into its own memory.

Source: Hinton et al., arXiv:1503.02531; Agarwal et al., arXiv:2306.13649; Hsu et al., arXiv:2410.10989, section 3.2
(gradients in forward).
"""

import contextlib
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._chunks import (
    CHUNK_BYTES,
    Chunks,
    Gradients,
    Opaque,
    Settings,
    check_head,
    gather,
    release,
    stash,
)
from ligermodels.kernels._gradients import accumulate
from ligermodels.kernels._triton import accumulator, last_dim_contiguous, once_differentiable, use_triton
from ligermodels.kernels.loss._divergence import JSDOptions, launch_rows
from ligermodels.kernels.loss.jsd import check_options, jsd_reference, reduce_tokens, valid_tokens

DIVERGENCES = ("jsd", "tv", "cosine")


def _fp32_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear, also under autocast, with an unrounded fp32 result."""
    kind, dtype = x.device.type, x.dtype
    cast = not x.is_meta and torch.is_autocast_enabled(kind)
    if cast and torch.float64 not in (dtype, weight.dtype):
        dtype = torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False) if cast else contextlib.nullcontext():
        x, weight = (t.to(dtype).to(accumulator(dtype)) for t in (x, weight))
        return F.linear(x, weight, None if bias is None else bias.to(dtype).to(x.dtype))


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _total_variation(z: Tensor, u: Tensor) -> Tensor:
    """Half the sum over classes of the differences of two softmaxes."""
    return 0.5 * (z.softmax(-1) - u.softmax(-1)).abs().sum(-1)


def _cosine_distance(z: Tensor, u: Tensor) -> Tensor:
    """1 - cos(z, u) as half the squared distance of the unit vectors; 1 without a gradient where a row is zeros."""
    squares = [t.square().sum(-1, keepdim=True) for t in (z, u)]
    is_zero = (squares[0] == 0) | (squares[1] == 0)
    z, u = (t * square.masked_fill(is_zero, 1).rsqrt() for t, square in zip((z, u), squares, strict=True))
    return (0.5 * (z - u).square().sum(-1)).masked_fill(is_zero[..., 0], 1)


class LinearJSDOutput(NamedTuple):
    """The result of linear_jsd with return_soft_hard_loss; the two parts are not weighted, and have no gradient."""

    loss: Tensor
    soft_loss: Tensor
    hard_loss: Tensor | None


def linear_jsd_reference(
    student_x: Tensor, student_weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor, *,
    labels: Tensor | None = None, student_bias: Tensor | None = None, teacher_bias: Tensor | None = None,
    beta: float = 0.5, temperature: float = 1.0, ignore_index: int = -100, weight_hard: float = 0.0,
    weight_soft: float = 1.0, student_softcap: float | None = None, teacher_softcap: float | None = None,
    divergence: str = "jsd", reduction: str = "mean", return_soft_hard_loss: bool = False,
) -> Tensor | LinearJSDOutput:  # fmt: skip
    """`linear_jsd` in plain PyTorch, with all logits in memory."""
    vocab = student_weight.shape[0]
    with torch.no_grad():
        u = _capped(_fp32_logits(teacher_x, teacher_weight, teacher_bias)[..., :vocab], teacher_softcap)
    z = _capped(_fp32_logits(student_x, student_weight, student_bias), student_softcap)
    z, u = (logits.to(torch.promote_types(z.dtype, u.dtype)) for logits in (z, u))
    valid = valid_tokens(labels, z, ignore_index)
    z, u = (logits.masked_fill(~valid[..., None], 0) for logits in (z, u))
    if divergence == "jsd":
        log_p, log_q = ((t / temperature).log_softmax(-1) for t in (z, u))
        soft = jsd_reference(log_p, log_q, labels=labels, beta=beta, ignore_index=ignore_index, reduction=reduction)
    else:
        far = _total_variation(z / temperature, u / temperature) if divergence == "tv" else _cosine_distance(z, u)
        soft = reduce_tokens(far.where(valid, 0), valid, reduction)
    loss, hard = weight_soft * soft, None
    if labels is not None:
        y = labels.to(z.device).long().where(valid, 0)
        nll = z.logsumexp(-1) - z.gather(-1, y[..., None])[..., 0]
        hard = reduce_tokens(nll.where(valid, 0), valid, reduction)
        loss = loss + weight_hard * hard if weight_hard else loss
    if not return_soft_hard_loss:
        return loss
    return LinearJSDOutput(loss, soft.detach(), None if hard is None else hard.detach())


class _Results(NamedTuple):
    """dx, dweight and dbias are still to be multiplied by the upstream gradient and, unless None, by `factor`."""

    loss: Tensor | None
    soft_loss: Tensor | None
    hard_loss: Tensor | None
    dx: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None
    factor: Tensor | None


def _undivided(options: JSDOptions, settings: Settings, needs: tuple[bool, bool, bool]) -> bool:
    """`leaves_divisor`, except for a reverse KL, whose undivided gradients of logits could overflow."""
    is_reverse_kl = options.divergence == "jsd" and options.beta == 1
    return settings.leaves_divisor(options.reduction, needs) and not is_reverse_kl


def _project(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """The logits of x [C, H] in `out` [C, V], which may be fp32."""
    if bias is not None:
        out.copy_(bias)
    accumulate(out, x.t(), weight.t(), first=bias is None)


def _run(
    x: Tensor, weight: Tensor, bias: Tensor | None, teacher_x: Tensor, teacher_weight: Tensor,
    teacher_bias: Tensor | None, labels: Tensor | None, upstream: Tensor | None, parts: bool,
    teacher_dtype: torch.dtype, options: JSDOptions, settings: Settings, needs: tuple[bool, bool, bool],
) -> _Results:  # fmt: skip
    """Losses and gradients of x [T, H] and labels [T]; with upstream [T], only the gradients, times upstream."""
    marks, ignore_index = labels, options.ignore_index
    if marks is None:
        marks, ignore_index = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device), -1
    logits_dtypes = accumulator(settings.dtype), accumulator(teacher_dtype)
    # Chunks counts logits of its inputs' dtype.
    workspace_bytes = settings.workspace_bytes * settings.dtype.itemsize // sum(d.itemsize for d in logits_dtypes)
    chunks = Chunks(x, weight, bias, marks, ignore_index, settings._replace(workspace_bytes=max(workspace_bytes, 1)))
    if chunks.source is not None:
        teacher_x = gather(teacher_x, chunks.source)
    teacher_x, w = teacher_x.to(teacher_dtype), teacher_weight[: chunks.vocab].to(teacher_dtype)
    b = None if teacher_bias is None else teacher_bias[: chunks.vocab].to(teacher_dtype)
    pitch, vocab = chunks.pitch, chunks.vocab
    workspaces = [torch.empty(chunks.rows, pitch, dtype=d, device=x.device) for d in logits_dtypes]
    # The gradients of the student's logits: each row begins where that of the logits does.
    d_logits = workspaces[0].view(settings.dtype)

    labels, count = (None if labels is None else chunks.labels), len(chunks.labels)
    valid = None if labels is None or options.reduction != "mean" else (labels != ignore_index).sum()
    undivided = _undivided(options, settings, needs)
    dtype = accumulator(torch.promote_types(settings.dtype, teacher_dtype))
    wanted = upstream is None, upstream is None and parts, upstream is None and parts and labels is not None
    losses = [torch.empty(count, dtype=dtype, device=x.device) if w else None for w in wanted]
    sum_dtype = settings.sum_dtype(weight)
    gradients = Gradients(chunks, needs, sum_dtype, sum_dtype if undivided else weight.dtype)
    upstream = chunks.per_row(upstream)
    for start in range(0, len(chunks.labels), max(chunks.rows, 1)):
        student, teacher = (rows[start : start + chunks.rows] for rows in (chunks.x, teacher_x))
        z, u = (space[: len(student), :vocab] for space in workspaces)
        _project(student, chunks.weight, chunks.bias, z)
        _project(teacher, w, b, u)
        dz = d_logits[: len(student), :vocab] if any(needs) else None
        launch_rows(z, u, options, strides=(pitch, pitch), logits=True, valid=valid, count=count, labels=labels,
                    losses=losses, d_student=dz, d_stride=d_logits.shape[1], upstream=upstream, first_row=start,
                    undivided=undivided)  # fmt: skip
        if dz is not None:
            gradients.add(chunks, start, dz)
        del z, u, dz, student, teacher
    place = chunks.place
    if options.reduction == "none":
        loss, soft_loss, hard_loss = (chunks.per_token(each, 0) for each in losses)
    else:
        loss, soft_loss, hard_loss = (None if each is None else each.sum() for each in losses)
    factor = None
    if undivided:
        factor = torch.full((), count, device=x.device) if valid is None else valid
        factor = factor.to(dtype).clamp(min=1).reciprocal()
    del workspaces, d_logits, chunks, teacher_x, w  # before dweight is rounded, a peak
    grads = gradients.take(place, x, None if undivided or bias is None else bias.dtype)
    return _Results._make((loss, soft_loss, hard_loss, *grads, factor))


def _like(
    x, weight, bias, teacher_x, teacher_weight, teacher_bias, labels, upstream, parts, teacher_dtype, options, settings,
    needs,
):  # fmt: skip
    """Empty tensors like the results of `_run`."""
    undivided, forward = _undivided(options, settings, needs), upstream is None
    dtype = accumulator(torch.promote_types(settings.dtype, teacher_dtype))
    loss_shape = x.shape[:1] if options.reduction == "none" else ()
    with_hard = parts and labels is not None
    dweight_dtype = settings.sum_dtype(weight) if undivided else weight.dtype
    dbias_dtype = accumulator(settings.dtype) if undivided or bias is None else bias.dtype
    return _Results(
        x.new_empty(loss_shape, dtype=dtype) if forward else None,
        x.new_empty(loss_shape, dtype=dtype) if forward and parts else None,
        x.new_empty(loss_shape, dtype=dtype) if forward and with_hard else None,
        x.new_empty(x.shape) if needs[0] else None,
        weight.new_empty(weight.shape, dtype=dweight_dtype) if needs[1] else None,
        weight.new_empty(weight.shape[:1], dtype=dbias_dtype) if needs[2] else None,
        x.new_empty((), dtype=dtype) if undivided else None,
    )


_run_opaque = Opaque("linear_jsd", _run, _like)


class _LinearJSD(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, *rest):
        *tensors, parts, teacher_dtype, options, settings, backward_follows = rest
        needs = tuple(backward_follows and n for n in ctx.needs_input_grad[:3])
        ctx.how = teacher_dtype, options, settings
        later = options.reduction == "none"
        out = _run_opaque(x, weight, bias, *tensors, None, parts, *ctx.how, (False,) * 3 if later else needs)
        if later:
            ctx.needs = needs
            ctx.save_for_backward(x, weight, bias, *tensors)
        else:
            stash(ctx, out[3:])
        ctx.mark_non_differentiable(*(t for t in out[1:3] if t is not None))
        return tuple(out[:3])

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, *_):
        if ctx.how[1].reduction == "none":
            gradients = _run_opaque(*ctx.saved_tensors, upstream.contiguous(), False, *ctx.how, ctx.needs)[3:6]
        else:
            gradients = release(ctx, upstream, "linear_jsd")
        return *gradients, *(None,) * 9


def linear_jsd(
    student_x: Tensor, student_weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor, *,
    labels: Tensor | None = None, student_bias: Tensor | None = None, teacher_bias: Tensor | None = None,
    beta: float = 0.5, temperature: float = 1.0, ignore_index: int = -100, weight_hard: float = 0.0,
    weight_soft: float = 1.0, student_softcap: float | None = None, teacher_softcap: float | None = None,
    divergence: str = "jsd", reduction: str = "mean", return_soft_hard_loss: bool = False,
    num_valid: int | None = None, accum_dtype: torch.dtype | None = torch.float32, workspace_bytes: int = CHUNK_BYTES,
) -> Tensor | LinearJSDOutput:  # fmt: skip
    """Divergence of the student's head from the teacher's, by the formula at the top of this file.

    student_x [..., H] and student_weight [V, H], teacher_x [..., H'] and teacher_weight [V', H'], each with a bias or
    none, and labels [...], shifted already. A teacher's vocabulary padded beyond the student's is cut off at V, so
    that its distribution is over the student's tokens; one that is smaller raises InputError. The teacher gets no
    gradient, and its matmul is not recorded. Student and teacher may differ in dtype. student_softcap, teacher_softcap:
    logits become softcap * tanh(logits / softcap) before the temperature, as Gemma 2's do, in the hard loss too.

    divergence: "jsd", "tv" or "cosine". Only the first reads beta, and the last does not depend on temperature. beta,
    labels, ignore_index and reduction are those of `jsd`; weight_hard needs labels. "mean" divides both losses
    by the number of labels that are not ignored, 0 where there is none. return_soft_hard_loss returns
    LinearJSDOutput(loss, soft_loss, hard_loss), the parts reduced but not weighted, without gradients; hard_loss is
    None without labels. The loss is fp32 (fp64 for fp64).

    num_valid, accum_dtype, workspace_bytes and torch.autocast are as in `linear_cross_entropy`; workspace_bytes bounds
    the logits of student and teacher together. backward releases the gradients that forward computed: it runs once.
    With reduction="none" forward computes the loss only, and backward computes the logits a second time.

    A label that is neither a class nor ignore_index makes its row NaN on a GPU, and raises
    InputError on the CPU, where this is F.linear and `jsd_reference` with all logits in memory. Each divergence, beta,
    temperature, pair of weights and of softcaps compiles a kernel. On a GPU create_graph=True raises InputError.
    """
    options = JSDOptions(
        float(beta), ignore_index, reduction, float(temperature), float(weight_hard), float(weight_soft),
        None if student_softcap is None else float(student_softcap),
        None if teacher_softcap is None else float(teacher_softcap), divergence,
    )  # fmt: skip
    tokens, device = student_x.shape[:-1], student_x.device
    if teacher_x.shape[:-1] != tokens or teacher_x.device != device:
        raise InputError(
            f"linear_jsd: teacher_x {tuple(teacher_x.shape)} on {teacher_x.device} must have the tokens of student_x, "
            f"{tuple(tokens)}, on {device}."
        )
    dtypes = []
    for who, head in (("student", (student_x, student_weight, student_bias)),
                      ("teacher", (teacher_x, teacher_weight, teacher_bias))):  # fmt: skip
        if not head[0].is_floating_point():
            raise InputError(f"linear_jsd: {who}_x is {head[0].dtype}; hidden states must be floating point.")
        try:
            dtypes.append(check_head(*head, num_valid, accum_dtype, workspace_bytes))
        except InputError as error:
            raise InputError(f"linear_jsd, {who}_x, {who}_weight and {who}_bias: {error}") from None
    check_options(options, labels, tokens, device, "linear_jsd")
    if divergence not in DIVERGENCES:
        raise InputError(f"linear_jsd: divergence={divergence!r} is not supported; supported: {', '.join(DIVERGENCES)}")
    if not options.temperature > 0:
        raise InputError(f"linear_jsd: temperature={temperature} must be positive; 1 leaves the logits as they are.")
    for name in ("student_softcap", "teacher_softcap"):
        if (softcap := getattr(options, name)) is not None and not softcap > 0:
            raise InputError(f"linear_jsd: {name}={softcap} must be positive; None leaves the logits uncapped.")
    if options.weight_hard and labels is None:
        raise InputError(f"linear_jsd: weight_hard={weight_hard} weighs a loss at labels, and there are no labels.")
    vocab, teacher_vocab = student_weight.shape[0], teacher_weight.shape[0]
    if teacher_vocab < vocab:
        raise InputError(
            f"linear_jsd: teacher_weight has a vocabulary of {teacher_vocab}, smaller than student_weight's of "
            f"{vocab}. If what the student has more is padding, give student_weight[:{teacher_vocab}]."
        )
    if not use_triton(student_x):
        return linear_jsd_reference(
            student_x, student_weight, teacher_x, teacher_weight, labels=labels, student_bias=student_bias,
            teacher_bias=teacher_bias, return_soft_hard_loss=return_soft_hard_loss, **options._asdict(),
        )  # fmt: skip
    x, y = (last_dim_contiguous(t.reshape(-1, t.shape[-1])) for t in (student_x, teacher_x.detach()))
    settings = Settings(num_valid, workspace_bytes, dtypes[0], accum_dtype is not None)
    losses = _LinearJSD.apply(
        x, student_weight, student_bias, y, teacher_weight.detach(),
        None if teacher_bias is None else teacher_bias.detach(),
        None if labels is None else labels.reshape(-1).contiguous(),
        return_soft_hard_loss, dtypes[1], options, settings, torch.is_grad_enabled(),
    )  # fmt: skip
    if reduction == "none":
        losses = [None if t is None else t.view(tokens) for t in losses]
    return LinearJSDOutput._make(losses) if return_soft_hard_loss else losses[0]
