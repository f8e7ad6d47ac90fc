"""A linear head and its cross entropy as one op: the logits [T, V] exist only C rows at a time.

    loss = cross_entropy(x @ weight.T + bias, labels)

Forward walks over chunks of C tokens with ONE workspace [C, V]. cuBLAS writes the logits, the kernel of
cross_entropy turns them into their gradient where they lie, and cuBLAS multiplies that with weight (dx) and into
x (dweight, accumulated in fp32 over the chunks, so that the result hardly depends on C). Gradients are therefore
ready after forward, for an upstream gradient of 1; backward multiplies them by the true one, in place, with a
kernel that reads it from the device and returns at once where it is 1. So there are three GEMMs, as without
fusing, and beside them the logits move 4 V itemsize bytes per token (6 where L2 does not hold a row per
multiprocessor), which is below a tenth of the GEMMs' time at H = 2048.

Memory beyond the inputs: the workspace (at most chunk_bytes, but 128 rows), dx, and dweight; with fp32
accumulation dweight in fp32 instead, and at the end both of them, without the workspace.

Source: Hsu et al., arXiv:2410.10989, section 3.2 (gradients in forward); Wijmans et al., arXiv:2411.09009.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ligermodels.errors import InputError
from ligermodels.kernels._triton import accumulator, device_guard, last_dim_contiguous, num_sms, tl, triton, use_triton
from ligermodels.kernels.cross_entropy import (
    CrossEntropyOutput,
    Options,
    check_inputs,
    cross_entropy_reference,
    divisors,
    empty_rows,
    launch_rows,
    on_device,
    reduce_rows,
)


def linear_cross_entropy_reference(
    x: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, class_weight: Tensor | None = None,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None,
    reduction: str = "mean", num_items_in_batch: int | Tensor | None = None, token_scaling: bool = False,
    return_z_loss: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
) -> Tensor | CrossEntropyOutput:  # fmt: skip
    """What `linear_cross_entropy` computes, in plain PyTorch, which holds all logits."""
    return cross_entropy_reference(
        F.linear(x, weight, bias), labels, class_weight=class_weight, ignore_index=ignore_index,
        label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap, reduction=reduction,
        num_items_in_batch=num_items_in_batch, token_scaling=token_scaling, return_z_loss=return_z_loss,
        return_token_accuracy=return_token_accuracy, return_predicted_tokens=return_predicted_tokens,
    )  # fmt: skip


@triton.jit
def _gather_kernel(x, source, out, row_stride, H, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    at = tl.load(source + r)
    readable = tl.where(at < 0, 0, H)
    for start in range(0, H, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        row = tl.load(x + at * row_stride + columns, mask=columns < readable, other=0.0)
        tl.store(out + r * H + columns, row, mask=columns < H)


@triton.jit
def _scale_kernel(x, factor, size, BLOCK: tl.constexpr):
    f = tl.load(factor)
    if f != 1.0:
        step = tl.cast(tl.num_programs(0), tl.int64) * BLOCK
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, size, step):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(x + at, mask=at < size)
            tl.store(x + at, (value.to(f.dtype) * f).to(value.dtype), mask=at < size)


class _Settings(NamedTuple):
    """How a call runs, as against what it computes (Options)."""

    num_valid: int | None
    chunk_bytes: int
    dtype: torch.dtype  # of the GEMMs
    accumulate_fp32: bool


class _Results(NamedTuple):
    """dx, dweight and dbias lack the upstream gradient and, where it is not None, `factor`."""

    loss: Tensor
    z_loss: Tensor | None
    token_accuracy: Tensor | None
    predicted_tokens: Tensor | None
    dx: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None
    factor: Tensor | None


def chunk_rows(tokens: int, row_bytes: int, chunk_bytes: int) -> int:
    """Tokens per chunk: what chunk_bytes holds, in multiples of 128, evened out so that no chunk is a short tail."""
    most = max(chunk_bytes // row_bytes // 128, 1) * 128
    chunks = max(-(-tokens // most), 1)
    return min(-(-tokens // (chunks * 128)) * 128, tokens)


def _undivided(options: Options, settings: _Settings, needs: tuple[bool, bool, bool]) -> bool:
    """fp16 leaves the divisor of the mean to backward: p / T underflows, and a loss scaler's factor comes too late."""
    return settings.dtype == torch.float16 and options.reduction == "mean" and any(needs)


def _wide(weight: Tensor, settings: _Settings) -> torch.dtype:
    """The dtype of dweight while it is summed; cuBLAS adds to the dtype it multiplies in, or to fp32."""
    wide = settings.accumulate_fp32 or weight.dtype != settings.dtype
    return torch.promote_types(weight.dtype, torch.float32) if wide else weight.dtype


def _accumulate(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total = a.T @ b if first, else total += a.T @ b; total may be wider than a and b."""
    a = a.t()
    if total.dtype != a.dtype and not (a.is_cuda and torch.version.hip is None):
        a, b = a.to(total.dtype), b.to(total.dtype)  # only cuBLAS multiplies narrow numbers into a wide matrix
    if total.dtype == a.dtype:
        torch.mm(a, b, out=total) if first else torch.addmm(total, a, b, out=total)
    elif first:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def _gather(x: Tensor, source: Tensor) -> Tensor:
    """x [N, H] -> rows x[source], and zeros where source is negative: zeros even if x holds NaN."""
    out = torch.empty(source.shape[0], x.shape[1], dtype=x.dtype, device=x.device)
    if out.numel():
        _gather_kernel[(source.shape[0],)](x, source, out, x.stride(0), x.shape[1], BLOCK=1024)
    return out


def _compact(labels: Tensor, limit: int, ignore_index: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """(labels of the valid tokens [limit], the token each came from or -1, the place of each token or -1).

    Were there more than `limit` valid labels, all labels returned are no class, so that the loss becomes NaN.
    """
    valid = labels != ignore_index
    rank = valid.cumsum(0) - 1
    place = torch.where(valid & (rank < limit), rank, -1)
    tokens = torch.arange(labels.shape[0], device=labels.device)
    source = torch.full((limit + 1,), -1, device=labels.device)
    source = source.scatter_(0, torch.where(place < 0, limit, place), tokens)[:limit]
    kept = torch.where(source < 0, ignore_index, labels.gather(0, source.clamp(min=0)))
    return torch.where(rank[-1] >= limit, vocab + (ignore_index == vocab), kept), source, place


def _spread(values: Tensor | None, place: Tensor, fill: int) -> Tensor | None:
    """Per-token results back to the tokens they belong to."""
    return None if values is None else torch.where(place < 0, fill, values.gather(0, place.clamp(min=0)))


def _run(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, class_weight: Tensor | None,
    num_items: Tensor | None, upstream: Tensor | None, options: Options, settings: _Settings,
    needs: tuple[bool, bool, bool],
) -> _Results:  # fmt: skip
    """Loss and gradients of x [T, H] and labels [T]. upstream [T] multiplies the gradients, not the loss."""
    tokens, vocab = x.shape[0], weight.shape[0]
    need_x, need_weight, need_bias = needs
    dtype = settings.dtype
    num_valid = settings.num_valid
    if num_valid is None and labels.device.type == "cpu":
        num_valid = int((labels != options.ignore_index).sum())
    labels = labels.to(x.device, non_blocking=True)
    rows_in, place = x, None
    if num_valid is not None and (limit := max(-(-num_valid // 128), 1) * 128) <= 0.9 * tokens:
        labels, source, place = _compact(labels, limit, options.ignore_index, vocab)
        rows_in = _gather(x, source)
        if upstream is not None:
            upstream = torch.where(source < 0, 0, upstream.gather(0, source.clamp(min=0)))
    rows_in, w = rows_in.to(dtype), weight.to(dtype)
    b = None if bias is None else bias.to(dtype)

    # Rows start on 128 bytes whatever V is, for wide loads and for cuBLAS.
    pitch = -(-vocab // 64) * 64
    rows = chunk_rows(len(labels), pitch * dtype.itemsize, settings.chunk_bytes)
    workspace = torch.empty(rows, pitch, dtype=dtype, device=x.device)[:, :vocab]
    scales, weight_sum = divisors(labels, class_weight, num_items, workspace, options)
    per_row = empty_rows(labels, workspace, options)
    undivided = _undivided(options, settings, needs)
    make = torch.empty if len(labels) else torch.zeros
    dx = torch.empty(rows_in.shape, dtype=dtype, device=x.device) if need_x else None
    dweight = make(weight.shape, dtype=_wide(weight, settings), device=x.device) if need_weight else None
    dbias = torch.zeros(vocab, dtype=accumulator(dtype), device=x.device) if need_bias else None
    for start in range(0, len(labels), max(rows, 1)):
        chunk = rows_in[start : start + rows]
        z = workspace[: chunk.shape[0]]
        torch.mm(chunk, w.t(), out=z) if b is None else torch.addmm(b, chunk, w.t(), out=z)
        launch_rows(z, labels, options, row_stride=pitch, class_weight=class_weight, weight_sum=weight_sum,
                    scales=scales, rows=per_row, out=z if any(needs) else None, upstream=upstream,
                    first_row=start, undivided=undivided)  # fmt: skip
        if dx is not None:
            torch.mm(z, w, out=dx[start : start + rows])
        if dweight is not None:
            _accumulate(dweight, z, chunk, start == 0)
        if dbias is not None:
            dbias += z.sum(0, dtype=dbias.dtype)
        del z, chunk
    del workspace, w, rows_in  # before dweight is copied to its final dtype, which is the peak

    if place is not None:
        dx = None if dx is None else _gather(dx, place)
        per_row = per_row._replace(predicted_tokens=_spread(per_row.predicted_tokens, place, -1))
        if options.reduction == "none":
            spread = [_spread(t, place, 0) for t in per_row[:3]]
            per_row = CrossEntropyOutput._make([*spread, per_row.predicted_tokens])
    if not undivided:
        dweight = None if dweight is None else dweight.to(weight.dtype)
        dbias = None if dbias is None else dbias.to(weight.dtype if bias is None else bias.dtype)
    return _Results(
        *reduce_rows(per_row, scales, options),
        None if dx is None else dx.to(x.dtype),
        dweight,
        dbias,
        scales[1] if undivided and scales is not None else None,
    )


@torch.library.custom_op(
    "ligermodels::linear_cross_entropy", mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor labels, Tensor? class_weight, Tensor? num_items, "
    "Tensor? upstream, int ignore_index, float label_smoothing, float z_loss, float? softcap, str reduction, "
    "bool token_scaling, bool return_z_loss, bool return_token_accuracy, bool return_predicted_tokens, "
    "SymInt? num_valid, int chunk_bytes, ScalarType dtype, bool accumulate_fp32, bool need_x, bool need_weight, "
    "bool need_bias) -> Tensor[]",
)  # fmt: skip
def _run_op(x, weight, bias, labels, class_weight, num_items, upstream, *scalars):
    options, settings, needs = Options(*scalars[:9]), _Settings(*scalars[9:13]), scalars[13:]
    results = _run(x, weight, bias, labels, class_weight, num_items, upstream, options, settings, needs)
    return [t for t in results if t is not None]


@_run_op.register_fake
def _(x, weight, bias, labels, class_weight, num_items, upstream, *scalars):
    options, settings, needs = Options(*scalars[:9]), _Settings(*scalars[9:13]), scalars[13:]
    dtype, undivided = accumulator(settings.dtype), _undivided(options, settings, needs)
    loss = x.new_empty(x.shape[:1] if options.reduction == "none" else (), dtype=dtype)
    every = _Results(
        loss, torch.empty_like(loss), torch.empty_like(loss, dtype=torch.float32),
        x.new_empty(x.shape[:1], dtype=torch.int64), x.new_empty(x.shape),
        weight.new_empty(weight.shape, dtype=_wide(weight, settings) if undivided else weight.dtype),
        weight.new_empty(weight.shape[:1], dtype=dtype if undivided or bias is None else bias.dtype),
        x.new_empty((), dtype=dtype),
    )  # fmt: skip
    return [t for t, present in zip(every, _present(options, settings, needs), strict=True) if present]


def _present(options: Options, settings: _Settings, needs: tuple[bool, bool, bool]) -> tuple[bool, ...]:
    """Which fields of _Results are not None."""
    extras = options.return_z_loss, options.return_token_accuracy, options.return_predicted_tokens
    return True, *extras, *needs, _undivided(options, settings, needs)


def _dispatch(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, class_weight: Tensor | None,
    num_items: Tensor | None, upstream: Tensor | None, options: Options, settings: _Settings,
    needs: tuple[bool, bool, bool],
) -> _Results:  # fmt: skip
    """`_run`, which torch.compile sees as one opaque op.

    Traced, the chunks would be unrolled for one T, workspace and accumulator copied at every chunk, and addmm with
    out_dtype is not traceable at all (pytorch/pytorch#163880).
    """
    if not torch.compiler.is_compiling():
        return _run(x, weight, bias, labels, class_weight, num_items, upstream, options, settings, needs)
    results = iter(_run_op(x, weight, bias, labels, class_weight, num_items, upstream, *options, *settings, *needs))
    return _Results._make(next(results) if p else None for p in _present(options, settings, needs))


def _scale_(x: Tensor, factor: Tensor) -> Tensor:
    blocks = -(-x.numel() // 8192)
    if blocks:
        grid = (min(blocks, 8 * num_sms(x.device.index)),)
        _scale_kernel[grid](x, factor, x.numel(), BLOCK=8192, num_warps=8)
    return x


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, labels, class_weight, num_items, options, settings, backward_follows):
        needs = tuple(backward_follows and n for n in ctx.needs_input_grad[:3])
        ctx.options, ctx.settings, ctx.needs = options, settings, needs
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        with device_guard(x):
            out = _dispatch(x, weight, bias, labels, class_weight, num_items, None, options, settings,
                            (False, False, False) if options.reduction == "none" else needs)  # fmt: skip
        ctx.gradients = None
        if options.reduction == "none":
            ctx.save_for_backward(x, weight, bias, labels, class_weight)
        elif torch.compiler.is_compiling():
            ctx.save_for_backward(*out[4:])
        else:
            # Not through save_for_backward, whose references would make autograd copy dweight into weight.grad.
            ctx.gradients = out[4:]
        ctx.mark_non_differentiable(*(t for t in out[1:4] if t is not None))
        return tuple(out[:4])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, *_):
        if ctx.options.reduction == "none":
            x, weight, bias, labels, class_weight = ctx.saved_tensors
            options = Options._make([*ctx.options[:6], False, False, False])
            with device_guard(x):
                results = _dispatch(x, weight, bias, labels, class_weight, None, grad_loss.contiguous(), options,
                                    ctx.settings, ctx.needs)  # fmt: skip
            gradients = list(results[4:7])
        elif torch.compiler.is_compiling():
            *gradients, factor = ctx.saved_tensors
            factor = grad_loss if factor is None else grad_loss * factor
            gradients = [None if t is None else t * factor for t in gradients]
        else:
            if ctx.gradients is None:
                raise RuntimeError(
                    "linear_cross_entropy holds its gradients from forward on and gives them away in backward, so "
                    "a second backward through the same loss is not possible: compute the loss again."
                )
            *gradients, factor = ctx.gradients
            ctx.gradients = None
            factor = grad_loss if factor is None else grad_loss * factor
            with device_guard(factor):
                gradients = [None if t is None else _scale_(t, factor) for t in gradients]
        dx, dweight, dbias = gradients
        return (
            dx,
            None if dweight is None else dweight.to(ctx.dtypes[0]),
            None if dbias is None else dbias.to(ctx.dtypes[1]),
            *(None,) * 6,
        )


def linear_cross_entropy(
    x: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, class_weight: Tensor | None = None,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None,
    reduction: str = "mean", num_items_in_batch: int | Tensor | None = None, token_scaling: bool = False,
    return_z_loss: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    num_valid: int | None = None, accum_dtype: torch.dtype | None = torch.float32, chunk_bytes: int = 512 * 2**20,
) -> Tensor | CrossEntropyOutput:  # fmt: skip
    """cross_entropy(x @ weight.T + bias, labels, ...) for x [..., H], weight [V, H], bias [V] and labels [...].

    Loss, options and extra outputs are those of `cross_entropy`. Where no gradient is asked for, none is computed;
    without a gradient of weight there is no [V, H] buffer. With reduction="none" the upstream gradient differs
    from token to token, so forward computes the loss only and backward computes the logits a second time.

    num_valid, where the host knows it, is the number of labels that are not ignored, or a bound above it. If it is
    at most about nine tenths of the tokens, ignored tokens are left out of the GEMMs, without waiting for the
    device. Labels on the CPU are counted. If there are more valid labels than num_valid allows for, the loss is NaN.

    accum_dtype is what dweight is accumulated in over the chunks: torch.float32, or None for the dtype of weight,
    which saves 4 V H bytes and some time, and adds a rounding per chunk. chunk_bytes bounds the logits workspace,
    which has 128 rows at least. Under torch.autocast, x, weight and bias are cast as for F.linear, and the
    gradients of fp32 weights stay fp32.

    backward hands out the gradients that forward computed: it runs once. On a CPU this is F.linear and
    `cross_entropy_reference`, with all logits in memory. There is no second derivative.
    """
    options = Options(ignore_index, label_smoothing, z_loss, softcap, reduction, token_scaling, return_z_loss,
                      return_token_accuracy, return_predicted_tokens)  # fmt: skip
    vocab = weight.shape[0]
    check_inputs(x, labels, vocab, class_weight, num_items_in_batch, options)
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type) and torch.float64 not in (dtype, weight.dtype):
        dtype = torch.get_autocast_dtype(x.device.type)
    elif weight.dtype != dtype or (bias is not None and bias.dtype != dtype):
        raise InputError(f"x is {x.dtype} and weight {weight.dtype}: cast one, or use torch.autocast.")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or weight.device != x.device:
        raise InputError(
            f"weight {tuple(weight.shape)} on {weight.device} does not fit x {tuple(x.shape)} on {x.device}; "
            "it is [V, H] for x [..., H]."
        )
    if bias is not None and (bias.shape != (vocab,) or bias.device != x.device):
        raise InputError(f"bias {tuple(bias.shape)} on {bias.device} must be [{vocab}] on {x.device}.")
    if accum_dtype not in (None, torch.float32):
        raise InputError(f"accum_dtype={accum_dtype}; use torch.float32, or None for the dtype of weight.")
    if chunk_bytes <= 0 or (num_valid is not None and num_valid < 0):
        raise InputError(f"chunk_bytes={chunk_bytes} must be positive and num_valid={num_valid} not negative.")
    if not use_triton(x):
        return linear_cross_entropy_reference(
            x, weight, labels, bias=bias, class_weight=class_weight, num_items_in_batch=num_items_in_batch,
            **options._asdict(),
        )  # fmt: skip
    rows = x.reshape(-1, x.shape[-1])
    loss, *others = _LinearCrossEntropy.apply(
        last_dim_contiguous(rows), weight, bias, labels.reshape(-1).contiguous(),
        class_weight, on_device(num_items_in_batch, x.device), options,
        _Settings(num_valid, chunk_bytes, dtype, accum_dtype is not None), torch.is_grad_enabled(),
    )  # fmt: skip
    extras = return_z_loss or return_token_accuracy or return_predicted_tokens
    return CrossEntropyOutput(loss, *others) if extras else loss
