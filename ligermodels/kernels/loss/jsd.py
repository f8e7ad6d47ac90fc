"""Generalised Jensen-Shannon divergence of two log-probability tensors, one number per token.

    x = log S, y = log T,  M = beta T + (1 - beta) S
    loss = beta sum_c T (y - log M) + (1 - beta) sum_c S (x - log M)           for 0 < beta < 1
    loss = sum_c T (y - x) at beta = 0, sum_c S (x - y) at beta = 1            (KL of the target; of the input)

At beta = 0 and 1 the formula itself is 0; by convention the loss there is the limit of the formula divided by beta or
1 - beta. Fused: both divergences, the reduction's divisor, which is counted on the device, and in the backward the
upstream gradient. The forward saves only its inputs, which the backward reads once more: 4 and 6 bytes per element at
2-byte dtypes (8 where both have a gradient), the minimum for rows that do not stay on the chip. The kernel is in
_divergence.py; `linear_jsd` runs it over logits.

Source: Agarwal et al., arXiv:2306.13649 (the generalisation, and beta's meaning).
"""

import math

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._check import check_label_tensor, check_labels, describe
from ligermodels.kernels._triton import accumulator, last_dim_contiguous, once_differentiable, use_triton
from ligermodels.kernels.loss._divergence import JSDOptions, launch_rows


def jsd_reference(
    input: Tensor, target: Tensor, *, labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """`jsd` in plain PyTorch; raises InputError for a label outside [0, V)."""
    dtype = accumulator(torch.promote_types(input.dtype, target.dtype))
    x, y = input.to(dtype), target.to(dtype)
    valid = valid_tokens(labels, x, ignore_index)
    x, y = x.masked_fill(~valid[..., None], 0), y.masked_fill(~valid[..., None], 0)
    if beta in (0, 1):
        loss = _kl(y, x) if beta == 0 else _kl(x, y)
    else:
        lowest = torch.finfo(dtype).min  # -inf would be NaN in the gradient of logaddexp
        x, y = x.clamp(min=lowest), y.clamp(min=lowest)
        log_m = torch.logaddexp(x + math.log1p(-beta), y + math.log(beta))
        loss = beta * _kl(y, log_m) + (1 - beta) * _kl(x, log_m)
    return reduce_tokens(loss.where(valid, 0), valid, reduction)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    zero = p.exp() == 0
    return (p.exp() * (p.masked_fill(zero, 0) - q.masked_fill(zero, 0))).sum(-1)


def valid_tokens(labels: Tensor | None, x: Tensor, ignore_index: int) -> Tensor:
    """Which tokens of x [..., V] are valid, [...]."""
    if labels is None:
        return torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
    labels = labels.to(x.device)
    valid = labels != ignore_index
    check_labels(labels, valid, x.shape[-1], ignore_index)
    return valid


def reduce_tokens(loss: Tensor, valid: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return loss
    return loss.sum() / valid.sum().clamp(min=1) if reduction == "mean" else loss.sum()


class _JSD(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, labels, options):
        valid = None if labels is None or options.reduction != "mean" else (labels != options.ignore_index).sum()
        loss = torch.empty(x.shape[0], dtype=accumulator(torch.promote_types(x.dtype, y.dtype)), device=x.device)
        ctx.options, ctx.strides = options, (x.stride(0), y.stride(0))
        launch_rows(x, y, options, strides=ctx.strides, logits=False, valid=valid, count=x.shape[0],
                    labels=labels, losses=(loss, None, None))  # fmt: skip
        ctx.save_for_backward(x, y, labels, valid)
        return loss if options.reduction == "none" else loss.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        x, y, labels, valid = ctx.saved_tensors
        dx, dy = (
            torch.empty(z.shape, dtype=z.dtype, device=z.device) if needed else None
            for z, needed in zip((x, y), ctx.needs_input_grad[:2], strict=True)
        )
        launch_rows(x, y, ctx.options, strides=ctx.strides, logits=False, valid=valid, count=x.shape[0],
                    labels=labels, d_student=dx, d_teacher=dy, upstream=upstream.contiguous())  # fmt: skip
        return dx, dy, None, None


def check_options(
    options: JSDOptions, labels: Tensor | None, tokens: tuple[int, ...], device: torch.device, where: str
) -> None:
    """Raises InputError for scalars out of range and labels that do not fit; reads no values."""
    if options.reduction not in ("mean", "sum", "none"):
        raise InputError(f"{where}: reduction={options.reduction!r}; use 'mean', 'sum' or 'none'.")
    if not 0 <= options.beta <= 1:
        raise InputError(f"{where}: beta={options.beta} lies outside [0, 1]; 0.5 is the symmetric divergence.")
    if labels is not None:
        check_label_tensor(where, labels, tokens, device)


def jsd(
    input: Tensor, target: Tensor, *, labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """The divergence of input (the student's log-probabilities) and target (the teacher's), both [..., V].

    beta: 0.5 is the symmetric Jensen-Shannon divergence, 0 the forward KL(target || input), 1 the reverse
    KL(input || target); between, by the formula at the top of this file. labels [...], shifted already, drop the
    tokens at which they are ignore_index: no loss, no gradient. reduction: "mean" over the tokens that count, 0 where
    none does; "sum"; "none" for one number per token, [...]. The loss is fp32 (fp64 if an input is fp64). Gradients
    go to both inputs where they are required, each entry being taken as a variable of its own.

    A label that is neither a class nor ignore_index makes its row NaN on a GPU, and raises
    InputError on the CPU. So do shapes, dtypes and devices that do not fit. A new beta compiles a kernel. Inputs whose
    rows are not evenly spaced in memory are copied. On a GPU create_graph=True raises InputError.
    """
    options = JSDOptions(float(beta), ignore_index, reduction)
    if input.dim() == 0 or input.shape != target.shape or input.device != target.device or not (
        input.is_floating_point() and target.is_floating_point()
    ):  # fmt: skip
        raise InputError(
            f"jsd: input has {describe(input)} and target {describe(target)}; both are log-probabilities [..., V] of "
            "one shape on one device. Are both shifted, and of one vocabulary?"
        )
    check_options(options, labels, input.shape[:-1], input.device, "jsd")
    if not use_triton(input):
        return jsd_reference(input, target, labels=labels, beta=beta, ignore_index=ignore_index, reduction=reduction)
    rows = [last_dim_contiguous(z.reshape(-1, z.shape[-1])) for z in (input, target)]
    if labels is not None:
        labels = labels.to(input.device, non_blocking=True).reshape(-1).contiguous()
    loss = _JSD.apply(*rows, labels, options)
    return loss.view(input.shape[:-1]) if reduction == "none" else loss
