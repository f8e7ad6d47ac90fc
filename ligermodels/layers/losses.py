"""Cross entropy and divergences as modules: options at construction, tensors in forward.

Each module calls the function of the same name in `ligermodels.kernels`, which describes the options.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.kernels.loss.cross_entropy import CrossEntropyOutput, cross_entropy
from ligermodels.kernels.loss.jsd import jsd
from ligermodels.kernels.loss.kl_div import kl_div
from ligermodels.kernels.loss.linear_cross_entropy import linear_cross_entropy
from ligermodels.kernels.loss.linear_jsd import LinearJSDOutput, linear_jsd


def num_labels(labels: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """The number of labels [B, S] that a loss counts: not -100, and not the first of a row or of a packed sequence.

    Nothing predicts a first token. cu_seqlens: the bounds of packed sequences.
    """
    counts = labels != -100
    if cu_seqlens is None:
        return counts[:, 1:].sum()
    first = cu_seqlens[:-1].long()
    return counts.flatten().index_fill(0, first[first < counts.numel()], False).sum()


def check_count(num_items_in_batch: Tensor | int) -> None:
    """Raises InputError unless num_items_in_batch is one number, 0 or more. Tensors are read on the CPU only."""
    count: Any = num_items_in_batch
    if torch.compiler.is_compiling():
        return
    if isinstance(count, Tensor):
        if count.numel() != 1 or count.is_complex() or count.device.type == "meta":
            raise InputError(
                f"num_items_in_batch is {count.dtype} {list(count.shape)} on {count.device}; it must be one number"
            )
        if count.device.type != "cpu":
            return
        count = count.item()
    if isinstance(count, bool) or not isinstance(count, int | float) or not 0 <= count < 2**63:
        raise InputError(f"num_items_in_batch={count!r} must be the number of labels in the batch, zero or more")


class _Loss(nn.Module):
    """The function `op` with options. Raises TypeError for an option that `op` does not have."""

    def __init__(self, op: Callable[..., Any], **options: Any):
        super().__init__()
        inspect.signature(op).bind_partial(**options)
        self._op, self._options = op, options

    def _loss(self, *tensors: Tensor, **others: Any) -> Any:
        if others.get("num_items_in_batch") is not None:
            check_count(others["num_items_in_batch"])
        return self._op(*tensors, **others, **self._options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self._options.items())


class CrossEntropyLoss(_Loss):
    """Cross entropy of logits [..., V] against labels [...]; see `ligermodels.kernels.cross_entropy`.

    weight [V], ignore_index, reduction and label_smoothing are those of torch.nn.CrossEntropyLoss, by name and by
    order. Unlike there, classes are the last dim, and the mean over no label at all is 0.
    """

    weight: Tensor | None

    def __init__(
        self, weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean",
        label_smoothing: float = 0.0, **options: Any,
    ):  # fmt: skip
        options |= {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
        super().__init__(cross_entropy, **options)
        self.register_buffer("weight", weight, persistent=False)

    def forward(
        self, logits: Tensor, labels: Tensor, *, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor | CrossEntropyOutput:
        return self._loss(logits, labels, class_weight=self.weight, num_items_in_batch=num_items_in_batch)


class LinearCrossEntropyLoss(_Loss):
    """Cross entropy of x @ weight.T + bias without whole logits; see `ligermodels.kernels.linear_cross_entropy`.

    class_weight [V] is CrossEntropyLoss's weight; here `weight` is the head's.
    """

    class_weight: Tensor | None

    def __init__(
        self, class_weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean",
        label_smoothing: float = 0.0, **options: Any,
    ):  # fmt: skip
        options |= {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
        super().__init__(linear_cross_entropy, **options)
        self.register_buffer("class_weight", class_weight, persistent=False)

    def forward(
        self, x: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None, num_valid: int | None = None,
    ) -> Tensor | CrossEntropyOutput:  # fmt: skip
        """x: [..., hidden_size], weight: [V, hidden_size], labels: [...]."""
        options: Any = dict(bias=bias, num_items_in_batch=num_items_in_batch, num_valid=num_valid)
        return self._loss(x, weight, labels, class_weight=self.class_weight, **options)


class KLDivLoss(_Loss):
    """torch.nn.KLDivLoss, of log-probabilities and probabilities, or of two log-probabilities with log_target.

    See `ligermodels.kernels.kl_div`.
    """

    def __init__(self, reduction: str = "mean", log_target: bool = False):
        super().__init__(kl_div, reduction=reduction, log_target=log_target)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """input, target: of one shape, or broadcast to one."""
        return self._loss(input, target)


class JSDLoss(_Loss):
    """Generalised Jensen-Shannon divergence of two log-probability tensors; see `ligermodels.kernels.jsd`.

    beta: 0.5 is symmetric, 0 the forward KL(target || input), 1 the reverse.
    """

    def __init__(self, beta: float = 0.5, *, ignore_index: int = -100, reduction: str = "mean"):
        super().__init__(jsd, beta=beta, ignore_index=ignore_index, reduction=reduction)

    def forward(self, input: Tensor, target: Tensor, labels: Tensor | None = None) -> Tensor:
        """input, target: [..., V], the student's and the teacher's; labels: [...], shifted already."""
        return self._loss(input, target, labels=labels)


class LinearJSDLoss(_Loss):
    """Distillation of one linear head from another without whole logits; see `ligermodels.kernels.linear_jsd`.

    The loss is weight_soft times the divergence at `temperature` plus weight_hard times the cross entropy at the
    labels. No power of the temperature multiplies either. divergence: "jsd", of `beta`, "tv" or "cosine".
    """

    def __init__(self, beta: float = 0.5, **options: Any):
        super().__init__(linear_jsd, beta=beta, **options)

    def forward(
        self, student_x: Tensor, student_weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor,
        labels: Tensor | None = None, *, student_bias: Tensor | None = None, teacher_bias: Tensor | None = None,
        num_valid: int | None = None,
    ) -> Tensor | LinearJSDOutput:  # fmt: skip
        """student_x: [..., H], student_weight: [V, H], teacher_x: [..., H'], teacher_weight: [V or more, H'],
        labels: [...], shifted already."""
        options: Any = dict(labels=labels, student_bias=student_bias, teacher_bias=teacher_bias, num_valid=num_valid)
        return self._loss(student_x, student_weight, teacher_x, teacher_weight, **options)
