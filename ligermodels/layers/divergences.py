"""The divergences as modules: options once, at construction."""

from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.kernels.jsd import jsd
from ligermodels.kernels.kl_div import kl_div
from ligermodels.kernels.linear_jsd import LinearJSDOutput, linear_jsd


class _Divergence(nn.Module):
    def __init__(self, **options: Any):
        super().__init__()
        self._options = options

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self._options.items())


class KLDivLoss(_Divergence):
    """torch.nn.KLDivLoss: of log-probabilities and probabilities, or with log_target their logarithms.

    See `ligermodels.kernels.kl_div`.
    """

    def __init__(self, reduction: str = "mean", log_target: bool = False):
        super().__init__(reduction=reduction, log_target=log_target)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """input, target: of one shape, or broadcast to one."""
        return kl_div(input, target, **self._options)


class JSDLoss(_Divergence):
    """Generalised Jensen-Shannon divergence of two log-probability tensors; see `ligermodels.kernels.jsd`.

    beta: 0.5 is symmetric, 0 the forward KL(target || input), 1 the reverse.
    """

    def __init__(self, beta: float = 0.5, *, ignore_index: int = -100, reduction: str = "mean"):
        super().__init__(beta=beta, ignore_index=ignore_index, reduction=reduction)

    def forward(self, input: Tensor, target: Tensor, labels: Tensor | None = None) -> Tensor:
        """input, target: [..., V], the student's and the teacher's; labels: [...], shifted already."""
        return jsd(input, target, labels=labels, **self._options)


class LinearJSDLoss(_Divergence):
    """Distillation of a linear head from another, logits never whole; see `ligermodels.kernels.linear_jsd`.

    weight_soft times the divergence at `temperature` plus weight_hard times the cross entropy at the labels. No power
    of the temperature multiplies either. accum_dtype: what the gradient of the weight is summed in; None is the
    weight's dtype. workspace_bytes: how much memory a chunk of the logits of both may take.
    """

    def __init__(
        self,
        beta: float = 0.5,
        *,
        temperature: float = 1.0,
        ignore_index: int = -100,
        weight_hard: float = 0.0,
        weight_soft: float = 1.0,
        reduction: str = "mean",
        return_soft_hard_loss: bool = False,
        accum_dtype: torch.dtype | None = torch.float32,
        workspace_bytes: int = 512 * 2**20,
    ):
        super().__init__(
            beta=beta,
            temperature=temperature,
            ignore_index=ignore_index,
            weight_hard=weight_hard,
            weight_soft=weight_soft,
            reduction=reduction,
            return_soft_hard_loss=return_soft_hard_loss,
            accum_dtype=accum_dtype,
            workspace_bytes=workspace_bytes,
        )

    def forward(
        self,
        student_x: Tensor,
        student_weight: Tensor,
        teacher_x: Tensor,
        teacher_weight: Tensor,
        labels: Tensor | None = None,
        *,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        num_valid: int | None = None,
    ) -> Tensor | LinearJSDOutput:
        """student_x: [..., H], student_weight: [V, H], teacher_x: [..., H'], teacher_weight: [V or more, H'],
        labels: [...], shifted already."""
        return linear_jsd(
            student_x,
            student_weight,
            teacher_x,
            teacher_weight,
            labels=labels,
            student_bias=student_bias,
            teacher_bias=teacher_bias,
            num_valid=num_valid,
            **self._options,
        )
