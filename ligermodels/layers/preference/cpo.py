"""Contrastive preference optimisation and SimPO: no reference; log probabilities of two answers against each other."""

from typing import Unpack

import torch
from torch import Tensor

from ligermodels.layers.preference.base import PairedLoss, check_choice, check_positive, check_smoothing
from ligermodels.layers.preference.dpo import smoothed
from ligermodels.layers.preference.sequences import HeadOptions, upcast

LOSS_TYPES = ("sigmoid", "hinge", "ipo", "simpo")
SMOOTHED = ("sigmoid", "simpo")
PER_TOKEN = ("ipo", "simpo")


def check_options(loss_type: str, beta: float, label_smoothing: float) -> None:
    check_choice("loss_type", loss_type, LOSS_TYPES)
    check_positive(beta=beta)
    check_smoothing(label_smoothing, loss_type, SMOOTHED)


def cpo_loss(
    chosen_logps: Tensor, rejected_logps: Tensor, *, beta: float = 0.1, loss_type: str = "sigmoid",
    label_smoothing: float = 0.0, gamma: float = 0.5,
) -> Tensor:  # fmt: skip
    """Losses [B] of pairs, in fp32, from log probabilities [B], without the NLL of the chosen tokens, which CPO adds.

    With u = chosen - rejected, s = sigmoid and e = label_smoothing, which must be 0 where no e stands:

    sigmoid  -(1 - e) log s(beta u) - e log s(-beta u)    arXiv:2401.08417, equation 3
    hinge    max(0, 1 - beta u)                           arXiv:2309.06657, without a reference
    ipo      (u - 1 / (2 beta))^2                         arXiv:2310.12036, from means per token
    simpo    as sigmoid with beta u - gamma               arXiv:2405.14734, from means per token

    Liger has sigmoid and, as a loss of its own, simpo. For hinge and ipo TRL ignores a label smoothing, with a warning.
    """
    check_options(loss_type, beta, label_smoothing)
    u = upcast(chosen_logps) - upcast(rejected_logps)
    if loss_type == "hinge":
        return torch.relu(1 - beta * u)
    if loss_type == "ipo":
        return (u - 0.5 / beta).square()
    return smoothed(beta * u - gamma if loss_type == "simpo" else beta * u, label_smoothing)


def simpo_loss(
    chosen_logps: Tensor, rejected_logps: Tensor, *, beta: float = 0.1, gamma: float = 0.5, label_smoothing: float = 0.0
) -> Tensor:
    """-log sigmoid(beta (chosen - rejected) - gamma), losses [B] of pairs from means per token [B]: `cpo_loss`."""
    return cpo_loss(
        chosen_logps, rejected_logps, beta=beta, gamma=gamma, loss_type="simpo", label_smoothing=label_smoothing
    )


class LinearCPOLoss(PairedLoss):
    """CPO from hidden states: the mean of `cpo_loss`, plus alpha times the mean NLL of the chosen tokens.

    alpha is TRL's cpo_alpha; 0 or compute_nll_loss=False leaves the NLL out. average_log_prob: log probabilities per
    token instead of per sequence; "ipo" and "simpo" use those anyway. head: see `HeadOptions`.
    """

    def __init__(
        self,
        *,
        beta: float = 0.1,
        loss_type: str = "sigmoid",
        label_smoothing: float = 0.0,
        gamma: float = 0.5,
        average_log_prob: bool = False,
        compute_nll_loss: bool = True,
        alpha: float = 1.0,
        **head: Unpack[HeadOptions],
    ):
        check_options(loss_type, beta, label_smoothing)
        super().__init__(
            beta=beta, compute_nll_loss=compute_nll_loss, alpha=alpha,
            average_log_prob=average_log_prob or loss_type in PER_TOKEN, **head,
        )  # fmt: skip
        self.loss_type, self.label_smoothing, self.gamma = loss_type, label_smoothing, gamma

    def _losses(self, chosen_logps: Tensor, rejected_logps: Tensor, *_: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        losses = cpo_loss(
            chosen_logps, rejected_logps, beta=self.beta, loss_type=self.loss_type,
            label_smoothing=self.label_smoothing, gamma=self.gamma,
        )  # fmt: skip
        return losses, {}


class LinearSimPOLoss(LinearCPOLoss):
    """SimPO from hidden states: CPO with loss_type="simpo". The defaults of beta and gamma are TRL's and Liger's; the
    paper trains with beta from 2 to 10.

    There is no NLL unless compute_nll_loss asks for it, as in the paper; Liger's module adds it by default.
    """

    def __init__(
        self,
        *,
        beta: float = 0.1,
        gamma: float = 0.5,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = False,
        alpha: float = 1.0,
        **head: Unpack[HeadOptions],
    ):
        super().__init__(
            beta=beta, loss_type="simpo", label_smoothing=label_smoothing, gamma=gamma,
            compute_nll_loss=compute_nll_loss, alpha=alpha, **head,
        )  # fmt: skip
