"""A linear head and its cross entropy as one op; only C rows of the logits [T, V] are in memory at a time.

    loss = cross_entropy(x @ weight.T + bias, labels)

The forward runs over chunks of C tokens with ONE workspace [C, V]: cuBLAS writes the logits, the kernel of
cross_entropy overwrites them with their gradient, and cuBLAS multiplies that with weight (dx) and with x (dweight,
summed in fp32 over the chunks, so that the result hardly depends on C). The backward multiplies these gradients by the
upstream gradient in place. There are three GEMMs, as without fusing; the logits move 4 V itemsize bytes per token (6 if
L2 is smaller than a row per multiprocessor), less than a tenth of the GEMMs' time at H = 2048.

Memory beyond the inputs: the workspace (at most workspace_bytes, but 128 rows), dx, and dweight; with fp32
accumulation dweight in fp32, which at the end is rounded into the memory of the workspace, or into its own if that is
too small. Every chunk reads and writes this sum, so chunks have at least 2048 rows by default. A single chunk needs no
sum, and its workspace may have that memory too. If the gradient of weight is added in place
(`ligermodels.training.accumulate_in_place`), the backward adds the fp32 sum itself.

Source: Hsu et al., arXiv:2410.10989, section 3.2 (gradients in forward); Wijmans et al., arXiv:2411.09009.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels._chunks import (
    CHUNK_BYTES,
    Chunks,
    Gradients,
    Opaque,
    Settings,
    check_head,
    release,
    stash,
)
from ligermodels.kernels._gradients import is_marked
from ligermodels.kernels._triton import accumulator, last_dim_contiguous, once_differentiable, use_triton
from ligermodels.kernels.loss._cross_entropy_rows import Options, divisors, empty_rows, launch_rows
from ligermodels.kernels.loss.cross_entropy import (
    CrossEntropyOutput,
    check_inputs,
    check_order,
    cross_entropy_reference,
    on_device,
    reduce_rows,
)
from ligermodels.kernels.loss.linear_logprobs import rows_of_head


def linear_cross_entropy_reference(
    x: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, **options: Any
) -> Tensor | CrossEntropyOutput:
    """`linear_cross_entropy` in plain PyTorch, with all logits in memory; options of `cross_entropy`."""
    return cross_entropy_reference(F.linear(x, weight, bias), labels, **options)


_ROWS = 2048
"""Minimum rows of a chunk by default: adding to dweight then takes a tenth of the time of the chunk's matmuls."""


class _Results(NamedTuple):
    """dx, dweight and dbias are still to be multiplied by the upstream gradient and, unless None, by `factor`."""

    loss: Tensor
    z_loss: Tensor | None
    token_accuracy: Tensor | None
    predicted_tokens: Tensor | None
    entropy: Tensor | None
    dx: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None
    factor: Tensor | None


def _run(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, class_weight: Tensor | None,
    num_items: Tensor | None, options: Options, settings: Settings, needs: tuple[bool, bool, bool],
    unrounded: bool = False,
) -> _Results:  # fmt: skip
    """Loss and gradients of x [T, H] and labels [T]; the reduction is mean or sum. unrounded: dweight may be fp32."""
    undivided, sum_dtype = settings.leaves_divisor(options.reduction, needs), settings.sum_dtype(weight)
    chunks = Chunks(x, weight, bias, labels, options.ignore_index, settings)
    if not undivided:
        chunks.limit(settings.workspace_bytes, settings.whole_bytes(weight, needs[1]))
    if chunks.rows == len(chunks.labels) and weight.dtype == settings.dtype and not undivided:
        sum_dtype = weight.dtype  # one chunk: cuBLAS rounds its fp32 sum itself
    workspace = chunks.workspace()
    scales, weight_sum = divisors(chunks.labels, class_weight, num_items, workspace, options)
    rows = empty_rows(chunks.labels, workspace, options)
    final = sum_dtype if undivided or unrounded else weight.dtype
    gradients = Gradients(chunks, needs, sum_dtype, final)
    for start, z in chunks.logits(workspace):
        launch_rows(z, chunks.labels, options, row_stride=chunks.pitch, padded=True, class_weight=class_weight,
                    weight_sum=weight_sum, scales=scales, rows=rows, out=z if any(needs) else None,
                    first_row=start, undivided=undivided)  # fmt: skip
        gradients.add(chunks, start, z)
        del z
    place = chunks.place
    if rows.predicted is not None:
        rows = rows._replace(predicted=chunks.per_token(rows.predicted, -1))
    del workspace, chunks  # before dweight is rounded, which is a peak
    grads = gradients.take(place, x, None if undivided or bias is None else bias.dtype)
    factor = scales[1] if undivided and scales is not None else None
    return _Results._make((*reduce_rows(rows, scales, options), *grads, factor))


def _like(x, weight, bias, labels, class_weight, num_items, options, settings, needs):
    """Empty tensors like the results of `_run`."""
    dtype, undivided = accumulator(settings.dtype), settings.leaves_divisor(options.reduction, needs)
    dweight_dtype = settings.sum_dtype(weight) if undivided else weight.dtype
    dbias_dtype = dtype if undivided or bias is None else bias.dtype
    return _Results(
        x.new_empty((), dtype=dtype),
        x.new_empty((), dtype=dtype) if options.return_z_loss else None,
        x.new_empty((), dtype=torch.float32) if options.return_token_accuracy else None,
        x.new_empty(x.shape[:1], dtype=torch.int64) if options.return_predicted_tokens else None,
        x.new_empty((), dtype=dtype) if options.return_entropy else None,
        x.new_empty(x.shape) if needs[0] else None,
        weight.new_empty(weight.shape, dtype=dweight_dtype) if needs[1] else None,
        weight.new_empty(weight.shape[:1], dtype=dbias_dtype) if needs[2] else None,
        x.new_empty((), dtype=dtype) if undivided else None,
    )


_run_opaque = Opaque("linear_cross_entropy", _run, _like)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, labels, class_weight, num_items, options, settings, backward_follows):
        needs = tuple(backward_follows and n for n in ctx.needs_input_grad[:3])
        tensors = x, weight, bias, labels, class_weight, num_items
        if torch.compiler.is_compiling():
            out: Any = _run_opaque(*tensors, options, settings, needs)
        else:
            out = _run(*tensors, options, settings, needs, is_marked(weight) and weight.grad is not None)
        stash(ctx, out[5:], weight)
        ctx.mark_non_differentiable(*(t for t in out[1:5] if t is not None))
        return tuple(out[:5])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, *_):
        return *release(ctx, grad_loss, "linear_cross_entropy"), *(None,) * 6


def linear_cross_entropy(
    x: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, class_weight: Tensor | None = None,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None,
    reduction: str = "mean", num_items_in_batch: int | Tensor | None = None, token_scaling: bool = False,
    return_z_loss: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    return_entropy: bool = False, num_valid: int | None = None,
    accum_dtype: torch.dtype | None = torch.float32, workspace_bytes: int | None = None,
) -> Tensor | CrossEntropyOutput:  # fmt: skip
    """cross_entropy(x @ weight.T + bias, labels, ...) for x [..., H], weight [V, H], bias [V] and labels [...].

    Loss, options and extra outputs are those of `cross_entropy`. A gradient that is not needed is not computed; without
    a gradient of weight there is no [V, H] buffer. With reduction="none" each token has its own upstream gradient: the
    forward computes only the loss, and the backward computes the logits again, unless all logits fit into
    workspace_bytes and are saved (see `linear_logprobs`).

    num_valid: the number of labels that are not ignored, or an upper bound, where the host knows it. If it is at most
    about nine tenths of the tokens, ignored tokens are dropped from the GEMMs, without synchronising. Labels on the CPU
    are counted. With more valid labels than num_valid allows, the loss is NaN.

    accum_dtype: the dtype in which dweight is summed over the chunks: torch.float32, or None for that of weight, which
    saves 4 V H bytes and some time, and rounds once per chunk. workspace_bytes: maximum size of the logits workspace,
    which has at least 128 rows; None: 512 MiB, or 2048 rows if these are larger. All tokens are one chunk if their
    logits fit into that and the memory that an fp32 sum of dweight would take. Under torch.autocast, x, weight and bias
    are cast as for F.linear, and the gradients of fp32 weights stay fp32.

    The backward returns the gradients that the forward computed, and so runs only once. On a CPU this is F.linear and
    `cross_entropy_reference`, with all logits in memory. On a GPU create_graph=True raises InputError.
    """
    options = Options(ignore_index, label_smoothing, z_loss, softcap, reduction, token_scaling, return_z_loss,
                      return_token_accuracy, return_predicted_tokens, return_entropy)  # fmt: skip
    check_order(x, weight, labels)
    check_inputs("x", x, labels, weight.shape[0], class_weight, num_items_in_batch, options)
    if workspace_bytes is None:
        workspace_bytes = max(CHUNK_BYTES, _ROWS * weight.shape[0] * weight.element_size())
    dtype = check_head(x, weight, bias, num_valid, accum_dtype, workspace_bytes)
    if not use_triton(x):
        return linear_cross_entropy_reference(
            x, weight, labels, bias=bias, class_weight=class_weight, num_items_in_batch=num_items_in_batch,
            **options._asdict(),
        )  # fmt: skip
    settings = Settings(num_valid, workspace_bytes, dtype, accum_dtype is not None)
    rows = last_dim_contiguous(x.reshape(-1, x.shape[-1]))
    y = labels.reshape(-1).contiguous()
    if reduction == "none":
        per_token = rows_of_head(rows, weight, bias, y, class_weight, options, settings)
        entropy = None if per_token.entropy is None else per_token.entropy.detach()
        out = CrossEntropyOutput(per_token.loss, per_token.z_loss, per_token.correct, per_token.predicted, entropy)
    else:
        out = CrossEntropyOutput._make(
            _LinearCrossEntropy.apply(rows, weight, bias, y, class_weight, on_device(num_items_in_batch, x.device),
                                      options, settings, torch.is_grad_enabled())
        )  # fmt: skip
    return out if options.extras else out.loss
