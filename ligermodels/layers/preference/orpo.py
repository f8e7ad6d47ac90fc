"""Odds ratio preference optimisation: no reference; the odds of the chosen answer against those of the rejected one."""

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.layers.preference.base import PairedLoss, check_positive
from ligermodels.layers.preference.sequences import HeadOptions, mean, upcast


def log_odds(logps: Tensor) -> Tensor:
    """log(p / (1 - p)) of p = exp(logps), accurate for p near 0 and near 1.

    The log of 1 - p is that of -expm1(logps), which loses nothing where p nears 1; where p nears 0 it is about -p, and
    log1p would give more digits of it, which vanish beside logps.
    Numbers cannot tell p from 1 closer than eps (2^-23 in fp32): from logps = -eps on, up to 0 and what rounding puts
    above it, log(1 - p) stays at log(eps), -15.9 in fp32, without gradient. So value and gradient are finite for
    every logps; -inf alone gives -inf.
    """
    x = upcast(logps)
    return x - torch.log(-torch.expm1(x.clamp(max=-torch.finfo(x.dtype).eps)))


def orpo_loss(chosen_logps: Tensor, rejected_logps: Tensor, *, beta: float = 0.1) -> Tensor:
    """-beta log sigmoid(log_odds(chosen) - log_odds(rejected)), losses [B] of pairs from means per token [B].

    Without the NLL of the chosen tokens, which ORPO adds. arXiv:2403.07691, equations 6 and 7, where beta is lambda.
    Liger computes log1p(-exp(logps)), which is -inf or noise where logps nears 0; TRL -inf at 0; here see `log_odds`.
    """
    check_positive(beta=beta)
    return -beta * F.logsigmoid(log_odds(chosen_logps) - log_odds(rejected_logps))


class LinearORPOLoss(PairedLoss):
    """ORPO from hidden states: alpha times the mean NLL of the chosen tokens, plus the mean of `orpo_loss`.

    Log probabilities are means per token. TRL takes the NLL over prompt and answer: give the prompt in nll_labels.
    A sequence without a label that counts has the log probability 0. head: see `HeadOptions`.
    """

    def __init__(
        self,
        *,
        beta: float = 0.1,
        compute_nll_loss: bool = True,
        alpha: float = 1.0,
        **head: Unpack[HeadOptions],
    ):
        super().__init__(beta=beta, compute_nll_loss=compute_nll_loss, alpha=alpha, average_log_prob=True, **head)

    def _losses(self, chosen_logps: Tensor, rejected_logps: Tensor, *_: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = log_odds(chosen_logps) - log_odds(rejected_logps)
        log_sigmoid = F.logsigmoid(ratio)
        metrics = {"log_odds_ratio": mean(log_sigmoid.detach()), "log_odds_chosen": mean(ratio.detach())}
        return -self.beta * log_sigmoid, metrics  # orpo_loss
