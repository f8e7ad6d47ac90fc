"""Cross entropy with z-loss, label smoothing, softcap and metrics, in one pass over the logits.

    z    = softcap * tanh(logits / softcap)                    lse = log sum_c exp z_c
    loss = (1 - e) w_y (lse - z_y) + e/V sum_c w_c (lse - z_c) + z_loss lse^2

Fused: one online pass computes the cap, the loss of every token, z-loss, label smoothing, argmax and entropy; the
divisor of the mean is counted on the device. The logits are not written.

With a mean or a sum, the forward writes d logits for an upstream gradient of 1 while the row is in L2: 2 V itemsize
bytes per token (read, write), the minimum. The backward multiplies by the upstream gradient in place, 2 V itemsize
bytes more unless it is 1: pass num_items_in_batch rather than dividing the loss. With reduction="none", in fp16 and in
torch.compile, the forward saves two numbers per row, and the backward reads the logits again: 3 V itemsize bytes.
`linear_cross_entropy` runs the same kernel over its workspace.

Source: Milakov and Gimelshein, arXiv:1805.02867 (online softmax); torch.nn.CrossEntropyLoss (the options).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._check import check_label_tensor, check_labels, describe
from ligermodels.kernels._gradients import scale_
from ligermodels.kernels._triton import accumulator, last_dim_contiguous, once_differentiable, use_triton
from ligermodels.kernels.loss._cross_entropy_rows import Options, Rows, divisors, empty_rows, launch_rows


class CrossEntropyOutput(NamedTuple):
    """The result of cross_entropy and linear_cross_entropy if more than the loss is requested."""

    loss: Tensor
    z_loss: Tensor | None
    token_accuracy: Tensor | None
    predicted_tokens: Tensor | None
    entropy: Tensor | None = None


def cross_entropy_reference(
    logits: Tensor, labels: Tensor, *, class_weight: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: str = "mean",
    num_items_in_batch: int | Tensor | None = None, token_scaling: bool = False, return_z_loss: bool = False,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False, return_entropy: bool = False,
) -> Tensor | CrossEntropyOutput:  # fmt: skip
    """`cross_entropy` in plain PyTorch; raises InputError for a label outside [0, V)."""
    vocab = logits.shape[-1]
    y = labels.reshape(-1).long()
    valid = y != ignore_index
    check_labels(y, valid, vocab, ignore_index)
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
    if not (return_z_loss or return_token_accuracy or return_predicted_tokens or return_entropy):
        return ce + z_part
    predicted = z.argmax(-1).where(valid, -1)
    correct = (predicted == y).float()
    log_p = z.detach() - lse.detach()[:, None]
    entropy = torch.xlogy(log_p.exp(), log_p.exp()).sum(-1).neg().where(valid, 0)
    return CrossEntropyOutput(
        ce + z_part,
        z_part.detach() if return_z_loss else None,
        (correct if reduction == "none" else correct.sum() / valid.sum().clamp(min=1))
        if return_token_accuracy
        else None,
        predicted if return_predicted_tokens else None,
        (entropy if reduction == "none" else entropy.sum() / valid.sum().clamp(min=1)) if return_entropy else None,
    )


def reduce_rows(rows: Rows, scales: Tensor | None, options: Options) -> CrossEntropyOutput:
    """Reduces per-token results, which are divided already."""
    loss, z_loss, correct, predicted, entropy, _ = rows
    if options.reduction == "none":
        return CrossEntropyOutput(loss, z_loss, correct, predicted, entropy)
    return CrossEntropyOutput(
        loss.sum(),
        None if z_loss is None else z_loss.sum(),
        None if correct is None or scales is None else (correct.sum() * scales[2]).float(),
        predicted,
        None if entropy is None or scales is None else entropy.sum() * scales[2],
    )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, class_weight, num_items, options, backward_follows):
        # One upstream gradient for all tokens: the gradient is written while the row is in L2. Not in fp16, where p / T
        # would underflow without a loss scaler's factor, nor in torch.compile, which would copy the scaled gradient.
        at_once = options.reduction != "none" and logits.dtype != torch.float16 and not torch.compiler.is_compiling()
        scales, weight_sum = divisors(labels, class_weight, num_items, logits, options)
        rows = empty_rows(labels, logits, options)
        # Maximum and sum, not lse: its rounding would change each probability by half an ulp of lse.
        stats = rows.loss.new_empty(labels.numel(), 2) if backward_follows else None
        ctx.gradient = logits.new_empty(logits.shape) if at_once and backward_follows else None
        launch_rows(logits, labels, options, row_stride=logits.stride(0), class_weight=class_weight,
                    weight_sum=weight_sum, scales=scales, rows=rows, stats=stats, out=ctx.gradient)  # fmt: skip
        out = reduce_rows(rows, scales, options)
        ctx.save_for_backward(logits, labels, class_weight, weight_sum, scales, stats)
        ctx.options, ctx.row_stride = options, logits.stride(0)
        ctx.mark_non_differentiable(*(t for t in out[1:] if t is not None))
        return tuple(out)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, *_):
        if ctx.gradient is not None:
            grad, ctx.gradient = ctx.gradient, None  # freed; a second backward computes it again
            return scale_(grad, grad_loss), *(None,) * 5
        logits, labels, class_weight, weight_sum, scales, stats = ctx.saved_tensors
        grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        launch_rows(logits, labels, ctx.options, row_stride=ctx.row_stride, class_weight=class_weight,
                    weight_sum=weight_sum, scales=scales, stats=stats, out=grad,
                    upstream=grad_loss.contiguous())  # fmt: skip
        return grad, *(None,) * 5


def check_inputs(
    name: str, x: Tensor, labels: Tensor, vocab: int, class_weight: Tensor | None, num_items: int | Tensor | None,
    options: Options,
) -> None:  # fmt: skip
    """Raises InputError where shapes, dtypes, devices or scalars do not fit x, called `name`; reads no values."""
    if not x.is_floating_point():
        raise InputError(f"{name}: {x.dtype}; a loss needs floating point.")
    check_label_tensor(name, labels, x.shape[:-1], x.device)
    if class_weight is not None and not (
        class_weight.shape == (vocab,) and class_weight.device == x.device and class_weight.is_floating_point()
    ):
        raise InputError(
            f"class_weight has {describe(class_weight)}; beside {name} {tuple(x.shape)} it must be floating point "
            f"[{vocab}] on {x.device}."
        )
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


def check_order(x: Tensor, weight: Tensor, labels: Tensor) -> None:
    """Raises InputError where x and the head's weight stand in the order of Liger's modules."""
    if labels.shape != x.shape[:-1] and labels.shape == weight.shape[:-1]:
        raise InputError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)} are in Liger's order, (weight, x, labels): labels "
            f"{tuple(labels.shape)} have an entry for each row of what is given as weight. Here x comes first."
        )


def on_device(count: int | Tensor | None, device: torch.device) -> Tensor | None:
    """The divisor as a tensor on the device, without synchronising."""
    if count is None or isinstance(count, Tensor):
        return count if count is None else count.to(device, non_blocking=True)
    return torch.full((), count, dtype=torch.float64, device=device)


def cross_entropy(
    logits: Tensor, labels: Tensor, *, class_weight: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: str = "mean",
    num_items_in_batch: int | Tensor | None = None, token_scaling: bool = False, return_z_loss: bool = False,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False, return_entropy: bool = False,
) -> Tensor | CrossEntropyOutput:  # fmt: skip
    """Cross entropy of logits [..., V] and labels [...] of class indices, by the formula at the top of this file.

    T tokens: all leading dims, flattened. The loss is fp32 (fp64 for fp64 logits): a scalar, or [T] with
    reduction="none", 0 where the label is ignore_index. "mean" divides the cross entropy by the sum of the class
    weights of the valid labels (without weights: their number) and the z part by their number; num_items_in_batch, an
    int or a device scalar, replaces both, for gradient accumulation. With a divisor of 0, for example if every label is
    ignored, loss and gradient are 0 (torch returns NaN).

    class_weight [V]: as in torch.nn.CrossEntropyLoss; does not change the z part. token_scaling: multiplies a token's
    loss and gradient by the probability of its label, taken as a constant. The other outputs have no gradient: z_loss,
    the reduced z part, which the loss includes; token_accuracy, the share of valid tokens whose argmax is the label
    ("none": 0 or 1 per token); predicted_tokens, int64 [T], the argmax, -1 at ignored labels; entropy of softmax(z) in
    nats, the mean over valid tokens ("none": per token).

    The logits are saved and, with a mean or a sum, their gradient, which the backward would allocate anyway. A second
    backward through the same loss computes the gradient again; create_graph=True raises InputError on a GPU.

    A label that is neither a class nor ignore_index makes the loss NaN on a GPU, and raises InputError on the CPU.
    Logits whose rows are not evenly spaced in memory, as in logits[:, :-1] of a batch, are copied: shift the labels
    instead.
    """
    options = Options(ignore_index, label_smoothing, z_loss, softcap, reduction, token_scaling, return_z_loss,
                      return_token_accuracy, return_predicted_tokens, return_entropy)  # fmt: skip
    check_inputs("logits", logits, labels, logits.shape[-1], class_weight, num_items_in_batch, options)
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
    return CrossEntropyOutput(loss, *others) if options.extras else loss
