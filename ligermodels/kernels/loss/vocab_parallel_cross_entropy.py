"""Cross entropy of a linear head whose rows, one per class, are sharded over a group of processes.

    z    = softcap * tanh((x @ weight.T + bias) / softcap)         lse = log sum_c exp z_c, c over the rows of all ranks
    loss = (1 - label_smoothing) (lse - z_y) + label_smoothing (lse - mean_c z_c) + z_loss lse^2

`linear_cross_entropy` with the vocabulary V sharded over n ranks: a rank has the logits of C tokens and its V/n
classes, which it does not send. Per chunk of C tokens, cuBLAS writes the local logits into ONE workspace; a kernel
reduces each row to its maximum, its sum of exponentials and, if the label is in the shard, the label's logit; ONE
all-gather sends these 12 bytes per token (16 with label smoothing, for which it also has the sum of the logits); a
second kernel merges them, writes the loss and overwrites the logits with their gradient; cuBLAS multiplies it with
weight (dx) and with x (dweight, as in linear_cross_entropy). Every rank merges the same numbers in the same order, so
that all have the same bits of the loss.

Beside the GEMMs the logits move 3 V/n itemsize bytes per token, one read more than in one process, because the gradient
needs the other ranks' sums. The all-gather does not overlap the next chunk's GEMM: with the default workspace there is
about one chunk per 16k tokens at 16k classes a rank, and a second workspace would halve the chunks.

Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3; fusing it with the head: linkedin/Liger-Kernel#1260.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._check import check_labels
from ligermodels.kernels._chunks import CHUNK_BYTES, Chunks, Gradients, Settings, check_head, release, stash
from ligermodels.kernels._gradients import is_marked
from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import (
    accumulator,
    cdiv,
    last_dim_contiguous,
    next_power_of_2,
    once_differentiable,
    tl,
    triton,
    use_triton,
)
from ligermodels.kernels.loss._cross_entropy_rows import (
    Options,
    divisors,
    load_capped,
    row_tiling,
    tile_columns,
    write_gradient,
)
from ligermodels.kernels.loss.cross_entropy import check_inputs, on_device


class _SumOverGroup(torch.autograd.Function):
    """The sum over the ranks. Every rank computes the same loss from it: a summand gets the gradient unchanged."""

    @staticmethod
    def forward(ctx, x, group):
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad, None


def vocab_parallel_cross_entropy_reference(
    x: Tensor, weight: Tensor, labels: Tensor, *, group: dist.ProcessGroup, first_id: int,
    vocab_size: int | None = None, bias: Tensor | None = None, ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float | None = None, reduction: str = "mean",
    num_items_in_batch: int | Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`vocab_parallel_cross_entropy` in plain PyTorch, with the local logits of all tokens in memory."""
    vocab_size = group.size() * len(weight) if vocab_size is None else vocab_size
    y = labels.reshape(-1).long()
    valid = y != ignore_index
    check_labels(y, valid, vocab_size, ignore_index)
    z = F.linear(x, weight, bias).reshape(len(y), len(weight))
    z = z.to(accumulator(z.dtype)).masked_fill(~valid[:, None], 0)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    maximum = z.detach().amax(-1)
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group)
    is_mine = valid & (y >= first_id) & (y < first_id + len(weight))
    z_label = z.gather(1, (y - first_id).where(is_mine, 0)[:, None])[:, 0].where(is_mine, 0)
    parts = (z - maximum[:, None]).exp().sum(-1), z_label, z.sum(-1) if label_smoothing else z_label.new_zeros(len(y))
    total, z_label, z_sum = _SumOverGroup.apply(torch.stack(parts), group)
    log_total = total.log()
    lse = maximum + log_total
    loss = log_total - (z_label - maximum)
    if label_smoothing:
        loss = (1 - label_smoothing) * loss + label_smoothing * (lse - z_sum / vocab_size)
    loss = loss + z_loss * lse.square()
    loss = loss.where(valid, 0).sum()
    if reduction == "sum":
        return loss
    count = torch.as_tensor(valid.sum() if num_items_in_batch is None else num_items_in_batch).to(loss).reshape(())
    return loss / count.where(count != 0, torch.inf)


@triton.jit(do_not_specialize=["first_row", "num_rows", "first_id"])
def _statistics_kernel(logits, labels, stats, row_stride, first_row, num_rows, first_id, V, END, IGNORE: tl.constexpr,
                       SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr, PADDED: tl.constexpr, STAGES: tl.constexpr,
                       R: tl.constexpr, AXIS: tl.constexpr):  # fmt: skip
    """stats [C, 3] of the tokens from first_row on: maximum, sum of exponentials, and the label's logit, NaN where the
    label is none of the ids from first_id on; with SMOOTHING [C, 4], the last the sum of the logits; zeros where the
    label is ignored. See `_rows_kernel` for rows and columns."""
    DTYPE: tl.constexpr = tl.float64 if logits.dtype.element_ty == tl.float64 else tl.float32
    LOG2E: tl.constexpr = 1.4426950408889634
    STATS: tl.constexpr = 3 if SMOOTHING == 0.0 else 4
    for r in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = logits + tl.cast(r, tl.int64) * row_stride
        label = tl.load(labels + tl.cast(first_row + r, tl.int64)).to(tl.int64)
        maximum, total = tl.full([], 0.0, DTYPE), tl.full([], 0.0, DTYPE)
        z_label, z_sum = tl.full([], 0.0, DTYPE), tl.full([], 0.0, DTYPE)
        if label != IGNORE:
            sums = tl.zeros([R], DTYPE)
            m = tl.full([R], -float("inf"), DTYPE)
            s = tl.zeros([R], DTYPE)
            for start in tl.range(0, V, R * 8, num_stages=STAGES):
                columns = tile_columns(start, R, AXIS)
                z, _ = load_capped(row, columns, V, END, SOFTCAP, 1.0, DTYPE, "", PADDED)
                raised = tl.maximum(m, tl.max(z, AXIS))
                shift = tl.where(raised == -float("inf"), 0.0, raised)
                e = tl.exp2((z - tl.expand_dims(shift, AXIS)) * LOG2E)
                s = s * tl.exp2((m - shift) * LOG2E) + tl.sum(e, AXIS)
                m = raised
                if SMOOTHING != 0.0:
                    sums += tl.sum(tl.where(columns < V, z, 0.0), AXIS)
            z_sum = tl.sum(sums, 0)
            maximum = tl.max(m, 0)
            floor = tl.where(maximum == -float("inf"), 0.0, maximum)
            total = tl.sum(s * tl.exp2((m - floor) * LOG2E), 0)
            column = label - first_id
            is_mine = (column >= 0) & (column < V)
            z, _ = load_capped(row, tl.where(is_mine, column, V), V, V, SOFTCAP, 1.0, DTYPE, "", False)
            z_label = tl.where(is_mine, z, float("nan"))
        tl.store(stats + r * STATS, maximum)
        tl.store(stats + r * STATS + 1, total)
        tl.store(stats + r * STATS + 2, z_label)
        if SMOOTHING != 0.0:
            tl.store(stats + r * STATS + 3, z_sum)


@triton.jit(do_not_specialize=["first_row", "num_rows", "first_id"])
def _merge_kernel(logits, labels, stats, scales, loss, row_stride, first_row, num_rows, first_id, V, classes, END,
                  RANKS: tl.constexpr, BLOCK: tl.constexpr, IGNORE: tl.constexpr, SMOOTHING: tl.constexpr,
                  Z_LOSS: tl.constexpr, SOFTCAP: tl.constexpr, GRADIENT: tl.constexpr, UNDIVIDED: tl.constexpr,
                  PADDED: tl.constexpr, STAGES: tl.constexpr, R: tl.constexpr, AXIS: tl.constexpr):  # fmt: skip
    """The `stats` of all ranks, [RANKS, C, 3 or 4], to the loss of each token and, with GRADIENT, `logits` to their
    gradient; with UNDIVIDED it lacks the factor scales[1].
    """
    DTYPE: tl.constexpr = tl.float64 if logits.dtype.element_ty == tl.float64 else tl.float32
    LOG2E: tl.constexpr = 1.4426950408889634
    STATS: tl.constexpr = 3 if SMOOTHING == 0.0 else 4
    for r in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        token = tl.cast(first_row + r, tl.int64)
        row = logits + tl.cast(r, tl.int64) * row_stride
        label = tl.load(labels + token).to(tl.int64)
        token_loss = tl.full([], 0.0, DTYPE)
        if label != IGNORE:
            rank = tl.arange(0, BLOCK)
            at = stats + (tl.cast(rank, tl.int64) * num_rows + r) * STATS
            maxima = tl.load(at, mask=rank < RANKS, other=-float("inf"))
            totals = tl.load(at + 1, mask=rank < RANKS, other=0.0)
            z_labels = tl.load(at + 2, mask=rank < RANKS, other=float("nan"))
            maximum = tl.max(maxima, 0)
            floor = tl.where(maximum == -float("inf"), 0.0, maximum)
            total = tl.sum(totals * tl.exp2((maxima - floor) * LOG2E), 0)
            has_it = z_labels == z_labels
            ce = tl.log(total) - (tl.sum(tl.where(has_it, z_labels, 0.0), 0) - maximum)
            # A label that is in no shard, or in two, has weight NaN, and so its loss and gradient are NaN.
            weight = tl.where(tl.sum(has_it.to(tl.int32), 0) == 1, tl.full([], 1.0, DTYPE), float("nan"))
            scale = tl.full([], 1.0, DTYPE)
            if scales is not None:
                scale = tl.load(scales + 1)
            lse = maximum + tl.log(total)
            if SMOOTHING != 0.0:
                mean = tl.sum(tl.load(at + 3, mask=rank < RANKS, other=0.0), 0) / classes
                ce = (1.0 - SMOOTHING) * ce + SMOOTHING * (lse - mean)
            token_loss = scale * weight * (ce + Z_LOSS * lse * lse)
            if GRADIENT:
                if UNDIVIDED:
                    scale = tl.full([], 1.0, DTYPE)
                column = label - first_id
                is_mine = (column >= 0) & (column < V)
                column = tl.where(is_mine, column, 0)
                z_label, cap_label = load_capped(row, column, V, V, SOFTCAP, 1.0, DTYPE, "", False)
                write_gradient(row, row, None, weight * classes, column, is_mine, z_label, cap_label, weight, maximum,
                               total, None, scale, scale, None, V, classes, END, SMOOTHING, Z_LOSS, SOFTCAP, 1.0,
                               DTYPE, PADDED, STAGES, R, AXIS)  # fmt: skip
        elif GRADIENT:
            for start in range(0, V, R * 8):
                columns = tile_columns(start, R, AXIS)
                tl.store(row + columns, tl.zeros_like(columns).to(logits.dtype.element_ty), mask=columns < END)
        tl.store(loss + token, token_loss)


def _gather(stats: Tensor, group: dist.ProcessGroup) -> Tensor:
    """stats [C, S] of every rank, [n, C, S]."""
    gathered = stats.new_empty(group.size() * len(stats), stats.shape[1])
    # torch 2.13 deprecates the older of the two names, which is the only one of torch 2.11.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    all_gather(gathered, stats, group=group)
    return gathered.view(-1, *stats.shape)


def _run(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, num_items: Tensor | None,
    group: dist.ProcessGroup, first_id: int, classes: int, options: Options, settings: Settings,
    needs: tuple[bool, bool, bool], unrounded: bool,
) -> tuple[Tensor, list[Tensor | None]]:  # fmt: skip
    """(loss, [dx, dweight, dbias, factor]). The backward multiplies the gradients by the upstream one and `factor`.

    classes: the size of the whole vocabulary. Each chunk is a collective, so that all ranks must use the same chunks:
    their length follows from an equal share of the classes, not from the rows of this rank. unrounded: dweight may be
    fp32. fp16 leaves the divisor of a mean to the backward, as `linear_cross_entropy` does.
    """
    undivided = settings.leaves_divisor(options.reduction, needs)
    sum_dtype, whole_bytes = settings.sum_dtype(weight), settings.workspace_bytes
    share, smoothing = cdiv(classes, group.size()), options.label_smoothing
    if needs[1] and not undivided:  # one chunk needs no sum of dweight, and may take its memory
        whole_bytes += share * weight.shape[1] * (sum_dtype.itemsize - weight.itemsize)
    chunks = Chunks(x, weight, bias, labels, options.ignore_index, settings)
    share_bytes = cdiv(share, 64) * 64 * chunks.x.element_size()
    chunks.limit(*(n // share_bytes * chunks.logits_bytes(1) for n in (settings.workspace_bytes, whole_bytes)))
    if chunks.rows == len(chunks.labels) and weight.dtype == settings.dtype and not undivided:
        sum_dtype = weight.dtype  # cuBLAS rounds its fp32 sum itself
    workspace = chunks.workspace()
    scales, _ = divisors(chunks.labels, None, num_items, workspace, options)
    loss = torch.empty(len(chunks.labels), dtype=accumulator(x.dtype), device=x.device)
    gradients = Gradients(chunks, needs, sum_dtype, sum_dtype if undivided or unrounded else weight.dtype)
    for start, z in chunks.logits(workspace):
        programs, end, tiling = row_tiling(z, chunks.pitch, padded=True, twice=False, streams=1)
        where = chunks.pitch, start, len(z), first_id, chunks.vocab
        stats = loss.new_empty(len(z), 4 if smoothing else 3)
        launch(_statistics_kernel, (programs,), z, chunks.labels, stats, *where, end, options.ignore_index, smoothing,
               options.softcap, **tiling)  # fmt: skip
        stats = _gather(stats, group)
        launch(_merge_kernel, (programs,), z, chunks.labels, stats, scales, loss, *where, classes, end, len(stats),
               next_power_of_2(len(stats)), options.ignore_index, smoothing, options.z_loss, options.softcap,
               any(needs), undivided, **tiling)  # fmt: skip
        gradients.add(chunks, start, z)
        del z
    place = chunks.place
    del workspace, chunks  # before dweight is rounded, which is a peak
    grads = gradients.take(place, x, None if undivided or bias is None else bias.dtype)
    return loss.sum(), [*grads, scales[1] if undivided and scales is not None else None]


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, weight, bias, labels, num_items, group, first_id, classes, options, settings, backward_follows
    ):  # fmt: skip
        needs = tuple(backward_follows and n for n in ctx.needs_input_grad[:3])
        unrounded = is_marked(weight) and weight.grad is not None
        loss, gradients = _run(x, weight, bias, labels, num_items, group, first_id, classes, options, settings, needs,
                               unrounded)  # fmt: skip
        stash(ctx, gradients, weight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        return *release(ctx, grad_loss, "vocab_parallel_cross_entropy"), *(None,) * 8


def vocab_parallel_cross_entropy(
    x: Tensor, weight: Tensor, labels: Tensor, *, group: dist.ProcessGroup, first_id: int,
    vocab_size: int | None = None, bias: Tensor | None = None, ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float | None = None, reduction: str = "mean",
    num_items_in_batch: int | Tensor | None = None,
    num_valid: int | None = None, accum_dtype: torch.dtype | None = torch.float32,
    workspace_bytes: int | None = None,
) -> Tensor:  # fmt: skip
    """linear_cross_entropy(x, whole weight, labels, ...) where this rank has the weights of the ids from first_id on.

    x is [..., H] and labels [...], ids of the whole vocabulary; both, and all options, are the same on every rank of
    `group`. weight [V/n, H] and bias [V/n] are this rank's rows. By default rank r has the
    rows r V/n to (r+1) V/n. With vocab_size, the size of the whole vocabulary, shards may have any order and different
    lengths; none is empty.

    The loss is that of the whole vocabulary, a scalar with the same bits on every rank. The gradients of weight and
    bias are complete. **The gradient of x is this rank's part, to be summed over the group by the caller**: in the
    backward of what gathered x (with sequence parallel, a reduce-scatter), or by an all-reduce. This holds where each
    rank runs the backward from its own copy of the loss, with the same upstream gradient.

    reduction ("mean" or "sum"), num_items_in_batch, softcap, z_loss, label_smoothing, ignore_index, num_valid,
    accum_dtype and torch.autocast are as in `linear_cross_entropy`. workspace_bytes bounds a rank's logits workspace,
    which has 128 rows at least; None: 512 MiB. Either all ranks ask for the gradient of x, or none; the same holds for
    weight.

    The backward runs once, sends nothing and raises InputError under create_graph=True, also on a CPU, where this is
    `vocab_parallel_cross_entropy_reference`. A label that is in no shard makes the loss NaN on a GPU, and raises
    InputError on a CPU. torch.compile breaks its graph here; fullgraph=True raises.
    """
    if torch.compiler.is_compiling():  # decorating would import torch._dynamo, which takes a second
        return torch.compiler.disable(vocab_parallel_cross_entropy)(
            x, weight, labels, group=group, first_id=first_id, vocab_size=vocab_size, bias=bias,
            ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap,
            reduction=reduction, num_items_in_batch=num_items_in_batch, num_valid=num_valid, accum_dtype=accum_dtype,
            workspace_bytes=workspace_bytes,
        )  # fmt: skip
    options = Options(ignore_index, label_smoothing, z_loss, softcap, reduction, False, False, False, False)
    check_inputs("x", x, labels, weight.shape[0], None, num_items_in_batch, options)
    workspace_bytes = CHUNK_BYTES if workspace_bytes is None else workspace_bytes
    dtype = check_head(x, weight, bias, num_valid, accum_dtype, workspace_bytes)
    vocab_size = _check_shard(weight, group, first_id, vocab_size)
    if reduction == "none":
        raise InputError("vocab_parallel_cross_entropy: reduction='none'; use 'mean' or 'sum'.")
    if not use_triton(x):
        return vocab_parallel_cross_entropy_reference(
            x, weight, labels, group=group, first_id=first_id, vocab_size=vocab_size, bias=bias,
            ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap,
            reduction=reduction, num_items_in_batch=num_items_in_batch,
        )  # fmt: skip
    return _VocabParallelCrossEntropy.apply(
        last_dim_contiguous(x.reshape(-1, x.shape[-1])), weight, bias, labels.reshape(-1).contiguous(),
        on_device(num_items_in_batch, x.device), group, first_id, vocab_size, options,
        Settings(num_valid, workspace_bytes, dtype, accum_dtype is not None), torch.is_grad_enabled(),
    )  # fmt: skip


def _check_shard(weight: Tensor, group: dist.ProcessGroup, first_id: int, vocab_size: int | None) -> int:
    """The size of the whole vocabulary; raises InputError where this rank's rows cannot be a shard of it."""
    rows, ranks, rank = len(weight), group.size(), group.rank()
    if vocab_size is None:
        size, fits, advice = ranks * rows, first_id == rank * rows, "; if shards differ in length, give vocab_size"
    else:
        size, fits, advice = vocab_size, 0 <= first_id <= vocab_size - rows, ""
    if rows == 0 or not fits:
        raise InputError(
            f"weight {tuple(weight.shape)} from id {first_id} on, of rank {rank} of {ranks}, is no shard of a "
            f"vocabulary of {size}{advice}."
        )
    return size
