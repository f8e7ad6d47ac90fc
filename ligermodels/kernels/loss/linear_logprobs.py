"""Log probabilities of labels under a linear head, per token, without all logits in memory.

    z        = (x @ weight.T + bias, capped) / temperature          log p = z_y - log sum_c exp z_c
    entropy  = - sum_c p_c log p_c                                  logits_mean = mean_c temperature z_c

For preference losses and policy gradients. A log probability is minus the loss of `cross_entropy`, and the same kernel
computes it, over chunks of tokens with one workspace [C, V] as in `linear_cross_entropy`. But each token has its own
upstream gradient, which only the backward knows. So the forward saves two numbers per token, and the backward computes
the logits of each chunk again, overwrites them with their gradient,

    dz_c = g ([c = y] - p_c) - h p_c (log p_c + entropy)            g, h: gradients of log p and of the entropy

and multiplies it with weight (dx) and with x (dweight): one GEMM forward and three backward. If all logits fit into
workspace_bytes and the memory of an fp32 sum of dweight, which is then not needed, they are saved, which saves a GEMM.
Beside the GEMMs the logits move 2 V itemsize bytes per token forward and 4 V backward, the minimum.

`linear_cross_entropy(reduction="none")` is this op with the options of `cross_entropy`.

Source: von Werra et al., TRL (what preference losses need of the head); Milakov and Gimelshein, arXiv:1805.02867.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._check import check_labels
from ligermodels.kernels._chunks import CHUNK_BYTES, Chunks, Gradients, Opaque, Settings, check_head
from ligermodels.kernels._gradients import accumulate_grad, target
from ligermodels.kernels._triton import accumulator, last_dim_contiguous, once_differentiable, use_triton
from ligermodels.kernels.loss._cross_entropy_rows import Options, Rows, divisors, empty_rows, launch_rows
from ligermodels.kernels.loss.cross_entropy import check_inputs, check_order


class LogprobsOutput(NamedTuple):
    """The result of linear_logprobs if more than the log probabilities is requested."""

    logprobs: Tensor
    entropy: Tensor | None
    logits_mean: Tensor | None


def linear_logprobs_reference(
    x: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, ignore_index: int = -100,
    temperature: float = 1.0, softcap: float | None = None, return_entropy: bool = False,
    return_logits_mean: bool = False,
) -> Tensor | LogprobsOutput:  # fmt: skip
    """`linear_logprobs` in plain PyTorch, with all logits in memory."""
    vocab = weight.shape[0]
    valid = labels != ignore_index
    check_labels(labels, valid, vocab, ignore_index)
    logits = F.linear(x, weight, bias)
    logits = logits.to(accumulator(logits.dtype)).masked_fill(~valid[..., None], 0)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = (logits / temperature).log_softmax(-1)
    logprobs = log_p.gather(-1, labels.where(valid, 0).long()[..., None])[..., 0].where(valid, 0)
    if not (return_entropy or return_logits_mean):
        return logprobs
    # p log p and its gradient are 0 at p = 0.
    entropy = (log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0)).sum(-1).neg().where(valid, 0)
    mean = logits.detach().mean(-1).where(valid, 0)
    return LogprobsOutput(logprobs, entropy if return_entropy else None, mean if return_logits_mean else None)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, class_weight: Tensor | None, options: Options,
    settings: Settings, temperature: float, return_mean: bool, backward_follows: bool, saved_bytes: int = 0,
) -> list[Tensor | None]:  # fmt: skip
    """Results per token, as `Rows`; stats of the rows; the logits of all rows where these fit into saved_bytes."""
    chunks = Chunks(x, weight, bias, labels, options.ignore_index, settings)
    chunks.limit(settings.workspace_bytes, saved_bytes)
    workspace = chunks.workspace()
    _, weight_sum = divisors(chunks.labels, class_weight, None, workspace, options)
    rows = empty_rows(chunks.labels, workspace, options)
    if return_mean:
        rows = rows._replace(logits_mean=torch.empty_like(rows.loss))
    stats = rows.loss.new_empty(x.shape[0], 2) if backward_follows else None
    for start, z in chunks.logits(workspace):
        launch_rows(z, chunks.labels, options, row_stride=chunks.pitch, padded=True, class_weight=class_weight,
                    weight_sum=weight_sum, scales=None, rows=rows, stats=stats, first_row=start,
                    temperature=temperature)  # fmt: skip
    logits = workspace if saved_bytes and chunks.rows == len(chunks.labels) else None
    fills = Rows(0, 0, 0, -1, 0, 0)  # type: ignore[arg-type]
    return [*map(chunks.per_token, rows, fills), stats, logits]  # type: ignore[arg-type]


def _backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, class_weight: Tensor | None, stats: Tensor,
    entropy: Tensor | None, upstream: Tensor, upstream_entropy: Tensor | None, logits: Tensor | None, options: Options,
    settings: Settings, temperature: float, needs: tuple[bool, bool, bool],
) -> list[Tensor | None]:  # fmt: skip
    """[dx, dweight, dbias], with dweight not rounded if it is to be added in place; overwrites saved `logits`."""
    chunks = Chunks(x, weight, bias, labels, options.ignore_index, settings)
    chunks.limit(settings.workspace_bytes, settings.whole_bytes(weight, needs[1]))
    _, weight_sum = divisors(chunks.labels, class_weight, None, chunks.x, options)
    per_row = [chunks.per_row(t) for t in (upstream, upstream_entropy, entropy)]
    single = chunks.rows == len(chunks.labels) and weight.dtype == settings.dtype  # cuBLAS rounds its sum itself
    sum_dtype = weight.dtype if single else settings.sum_dtype(weight)
    leaf = target(weight)
    gradients = Gradients(chunks, needs, sum_dtype, weight.dtype if leaf is None or leaf.grad is None else sum_dtype)
    for start, z in chunks.logits(chunks.workspace()) if logits is None else [(0, logits)] * bool(len(logits)):
        launch_rows(z, chunks.labels, options, row_stride=chunks.pitch, padded=True, class_weight=class_weight,
                    weight_sum=weight_sum, scales=None, stats=stats, out=z, upstream=per_row[0],
                    upstream_entropy=per_row[1], entropy=per_row[2], first_row=start,
                    temperature=temperature)  # fmt: skip
        gradients.add(chunks, start, z)
        del z
    return list(gradients.take(chunks.place, x, None if bias is None else bias.dtype))


def _like_forward(
    x, weight, bias, labels, class_weight, options, settings, temperature, return_mean, backward_follows
):  # fmt: skip
    """Empty tensors like the results of `_forward`."""
    like = x.new_empty(0, dtype=settings.dtype)
    rows = empty_rows(labels.new_empty(x.shape[:1], device=x.device), like, options)
    mean = rows.loss.new_empty(x.shape[0]) if return_mean else None
    return *rows[:5], mean, rows.loss.new_empty(x.shape[0], 2) if backward_follows else None, None


def _like_backward(x, weight, bias, *others):
    *_, needs = others
    return [t.new_empty(t.shape) if need else None for t, need in zip((x, weight, bias), needs, strict=True)]


_forward_opaque = Opaque("linear_logprobs", _forward, _like_forward)
_backward_opaque = Opaque("linear_logprobs_backward", _backward, _like_backward)


class _LinearLogprobs(torch.autograd.Function):
    """Returns the fields of `Rows`."""

    @staticmethod
    def forward(
        ctx, x, weight, bias, labels, class_weight, options, settings, temperature, return_mean, backward_follows
    ):
        ctx.needs = tuple(backward_follows and n for n in ctx.needs_input_grad[:3])
        ctx.how, ctx.logits = (options, settings, temperature), None
        follows = any(ctx.needs)
        tensors = x, weight, bias, labels, class_weight
        scalars = options, settings, temperature, return_mean, follows
        if torch.compiler.is_compiling():
            *outputs, stats, _ = _forward_opaque(*tensors, *scalars)
        else:
            ctx.set_materialize_grads(False)
            saved_bytes = settings.whole_bytes(weight, ctx.needs[1]) if follows else 0
            *outputs, stats, ctx.logits = _forward(*tensors, *scalars, saved_bytes)
        rows = Rows._make(outputs)
        ctx.save_for_backward(x, weight, bias, labels, class_weight, stats, rows.entropy)
        metrics = rows.z_loss, rows.correct, rows.predicted, rows.logits_mean
        ctx.mark_non_differentiable(*(t for t in metrics if t is not None))
        return tuple(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, _z, _correct, _predicted, grad_entropy, _mean):
        x, weight, bias, labels, class_weight, stats, entropy = ctx.saved_tensors
        options, settings, temperature = ctx.how
        grad_loss = stats.new_zeros(x.shape[0]) if grad_loss is None else grad_loss.contiguous()
        grad_entropy = None if grad_entropy is None or entropy is None else grad_entropy.contiguous()
        # The first backward writes over the logits that forward saved; a later one computes them again.
        logits, ctx.logits = ctx.logits, None
        gradients = _backward_opaque(x, weight, bias, labels, class_weight, stats, entropy, grad_loss, grad_entropy,
                                     logits, options, settings, temperature, ctx.needs)  # fmt: skip
        del logits
        if not torch.compiler.is_compiling() and gradients[1] is not None:
            gradients[1] = accumulate_grad(weight, gradients[1])
        return *gradients, *(None,) * 7


def rows_of_head(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, class_weight: Tensor | None, options: Options,
    settings: Settings, temperature: float = 1.0, return_mean: bool = False,
) -> Rows:  # fmt: skip
    """Results per token of checked x [T, H] and labels [T], differentiable in the loss and in the entropy."""
    return Rows._make(
        _LinearLogprobs.apply(last_dim_contiguous(x), weight, bias, labels.contiguous(), class_weight, options,
                              settings, temperature, return_mean, torch.is_grad_enabled())
    )  # fmt: skip


def linear_logprobs(
    x: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, ignore_index: int = -100,
    temperature: float = 1.0, softcap: float | None = None, return_entropy: bool = False,
    return_logits_mean: bool = False, num_valid: int | None = None,
    accum_dtype: torch.dtype | None = torch.float32, workspace_bytes: int | None = None,
) -> Tensor | LogprobsOutput:  # fmt: skip
    """Log probabilities [...] of labels [...] under softmax((x @ weight.T + bias) / temperature), fp32.

    x is [..., H], weight [V, H], bias [V]; fp64 in gives fp64. Where the label is ignore_index, all results are 0
    and x gets no gradient. softcap: logits become softcap * tanh(logits / softcap) before the temperature.

    return_entropy: also the entropy [...] of each token's distribution, in nats, with gradient. return_logits_mean:
    the mean [...] of each token's logits over the vocabulary, capped and before the temperature, a metric without
    gradient.

    num_valid, accum_dtype, workspace_bytes (None: 512 MiB) and torch.autocast are as in `linear_cross_entropy`. If the
    logits of all (valid) tokens fit into the workspace and the memory of an fp32 sum of dweight, they are saved, and
    the backward needs neither the sum nor to compute them again (not in torch.compile). There is no tensor of size [V,
    H] if weight needs no gradient, and nothing is saved under torch.no_grad.

    A label that is neither a class nor ignore_index makes its log probability NaN on a GPU, and raises InputError on
    the CPU, where this is `linear_logprobs_reference`. On a GPU create_graph=True raises InputError.
    """
    options = Options(ignore_index, 0.0, 0.0, softcap, "none", False, False, False, False, return_entropy)
    check_order(x, weight, labels)
    check_inputs("x", x, labels, weight.shape[0], None, None, options)
    workspace_bytes = CHUNK_BYTES if workspace_bytes is None else workspace_bytes
    dtype = check_head(x, weight, bias, num_valid, accum_dtype, workspace_bytes)
    if not 0.0 < temperature < float("inf"):
        raise InputError(f"temperature={temperature} must be positive; for greedy choices take the argmax.")
    if not use_triton(x):
        return linear_logprobs_reference(
            x, weight, labels, bias=bias, ignore_index=ignore_index, temperature=temperature, softcap=softcap,
            return_entropy=return_entropy, return_logits_mean=return_logits_mean,
        )  # fmt: skip
    settings = Settings(num_valid, workspace_bytes, dtype, accum_dtype is not None)
    rows = rows_of_head(x.reshape(-1, x.shape[-1]), weight, bias, labels.reshape(-1), None, options, settings,
                        float(temperature), return_logits_mean)  # fmt: skip
    logprobs = -rows.loss.view(labels.shape)
    if not (return_entropy or return_logits_mean):
        return logprobs
    extras = [None if t is None else t.view(labels.shape) for t in (rows.entropy, rows.logits_mean)]
    return LogprobsOutput(logprobs, *extras)
