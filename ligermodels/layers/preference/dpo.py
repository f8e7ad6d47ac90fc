"""Direct preference optimisation: the policy's log probabilities of two answers against those of a reference."""

import math
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.layers.preference.base import (
    PairedLoss,
    PreferenceOutput,
    Reference,
    check_choice,
    check_positive,
    check_smoothing,
)
from ligermodels.layers.preference.sequences import HeadOptions, upcast

LOSS_TYPES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard",
              "aot", "aot_unpaired", "apo_zero", "apo_down", "discopop")  # fmt: skip
SMOOTHED = ("sigmoid", "exo_pair", "robust", "aot", "aot_unpaired")
PER_TOKEN = ("sigmoid_norm", "ipo")


def check_options(loss_type: str, beta: float, label_smoothing: float, discopop_tau: float) -> None:
    hint = "; the aot_pair of old releases of TRL is aot_unpaired" if loss_type == "aot_pair" else ""
    check_choice("loss_type", loss_type, LOSS_TYPES, hint)
    check_positive(beta=beta, discopop_tau=discopop_tau)
    check_smoothing(label_smoothing, loss_type, SMOOTHED)
    if loss_type == "exo_pair":
        check_positive(label_smoothing=label_smoothing)  # its divergence from a certain preference is infinite


def smoothed(logits: Tensor, label_smoothing: float) -> Tensor:
    """-log sigmoid(logits), with the sign of the logits flipped for a share of label_smoothing."""
    loss = -F.logsigmoid(logits)
    return (1 - label_smoothing) * loss - label_smoothing * F.logsigmoid(-logits) if label_smoothing else loss


def dpo_loss(
    chosen_logps: Tensor, rejected_logps: Tensor, ref_chosen_logps: Tensor | None = None,
    ref_rejected_logps: Tensor | None = None, *, beta: float = 0.1, loss_type: str = "sigmoid",
    label_smoothing: float = 0.0, discopop_tau: float = 0.05,
) -> Tensor:  # fmt: skip
    """Losses [B] of pairs, in fp32, from log probabilities [B]; without a reference, its log probabilities count as 0.

    With a and b the log ratios of policy to reference of chosen and rejected, d = beta (a - b), s = sigmoid and
    e = label_smoothing, which is defined (must be 0 elsewhere) where e stands:

    sigmoid       -(1 - e) log s(d) - e log s(-d)       arXiv:2305.18290; TRL 1.16 and Liger ignore e
    sigmoid_norm  -log s(d), a and b per token          arXiv:2411.15124, equation 6
    hinge         max(0, 1 - d)                         arXiv:2309.06657
    ipo           (a - b - 1 / (2 beta))^2, per token   arXiv:2310.12036, equation 17, per token as TRL; Liger has none
    exo_pair      s(d) (log s(d) - log(1 - e)) + s(-d) (log s(-d) - log e), e > 0          arXiv:2402.00856, equation 16
    nca_pair      -log s(beta a) - log s(-beta a) / 2 - log s(-beta b) / 2                 arXiv:2402.05369
    robust        (-(1 - e) log s(d) + e log s(-d)) / (1 - 2 e)                            arXiv:2403.00409
    bco_pair      -log s(beta a) - log s(-beta b)       arXiv:2404.04656, as TRL and Liger without its moving shift
    sppo_hard     (a - 1 / (2 beta))^2 + (b + 1 / (2 beta))^2                              arXiv:2405.00675, P = 1 or 0
    aot           as sigmoid; d = beta (sorted log ratio chosen to rejected of policy - that of reference)
    aot_unpaired  as sigmoid; d = beta (sorted a - sorted b); losses are in the order sorted; arXiv:2406.05882
    apo_zero      s(-beta a) + s(beta b)                arXiv:2408.06266, equation 7, plus 1
    apo_down      s(beta a) + s(-d)                     arXiv:2408.06266, equation 8, plus 1
    discopop      s(-d / tau) (-log s(d)) + s(d / tau) exp(-d), tau = discopop_tau         arXiv:2406.08414, equation 5

    "Per token": give averages over the tokens of a sequence instead of sums. TRL and Liger compute exp(-d) s(d / tau),
    which is inf * 0 for d below -88, and 1 - s(z), which cancels; nothing overflows or cancels here.
    """
    check_options(loss_type, beta, label_smoothing, discopop_tau)
    chosen, rejected = upcast(chosen_logps), upcast(rejected_logps)
    ref_chosen = torch.zeros_like(chosen) if ref_chosen_logps is None else upcast(ref_chosen_logps)
    ref_rejected = torch.zeros_like(rejected) if ref_rejected_logps is None else upcast(ref_rejected_logps)
    a, b = chosen - ref_chosen, rejected - ref_rejected
    e = label_smoothing
    if loss_type == "aot":
        return smoothed(beta * (_sorted(chosen - rejected) - _sorted(ref_chosen - ref_rejected)), e)
    if loss_type == "aot_unpaired":
        return smoothed(beta * (_sorted(a) - _sorted(b)), e)
    if loss_type == "nca_pair":
        return -F.logsigmoid(beta * a) - 0.5 * (F.logsigmoid(-beta * a) + F.logsigmoid(-beta * b))
    if loss_type == "bco_pair":
        return -F.logsigmoid(beta * a) - F.logsigmoid(-beta * b)
    if loss_type == "sppo_hard":
        return (a - 0.5 / beta).square() + (b + 0.5 / beta).square()
    if loss_type == "apo_zero":
        return torch.sigmoid(-beta * a) + torch.sigmoid(beta * b)
    if loss_type == "ipo":
        return (a - b - 0.5 / beta).square()
    d = beta * (a - b)
    if loss_type == "hinge":
        return torch.relu(1 - d)
    if loss_type == "exo_pair":
        p, q = F.logsigmoid(d), F.logsigmoid(-d)
        return torch.sigmoid(d) * (p - math.log1p(-e)) + torch.sigmoid(-d) * (q - math.log(e))
    if loss_type == "robust":
        return (e * F.logsigmoid(-d) - (1 - e) * F.logsigmoid(d)) / (1 - 2 * e)
    if loss_type == "apo_down":
        return torch.sigmoid(beta * a) + torch.sigmoid(-d)
    if loss_type == "discopop":
        t = d / discopop_tau
        return torch.exp(F.logsigmoid(t) - d) - torch.sigmoid(-t) * F.logsigmoid(d)
    return smoothed(d, e)  # sigmoid, sigmoid_norm


def _sorted(x: Tensor) -> Tensor:
    return x.sort(stable=True).values


class LinearDPOLoss(PairedLoss):
    """DPO from hidden states: `dpo_loss` of a linear head's log probabilities.

    average_log_prob: log probabilities per token instead of per sequence, of policy and reference; "ipo" and
    "sigmoid_norm" always use those (the metrics only with average_log_prob). compute_nll_loss: adds alpha times the
    mean negative log probability of the chosen tokens. Raises InputError for a label_smoothing that the loss
    type does not define. head: see `HeadOptions`.
    """

    def __init__(
        self,
        *,
        beta: float = 0.1,
        loss_type: str = "sigmoid",
        label_smoothing: float = 0.0,
        discopop_tau: float = 0.05,
        average_log_prob: bool = False,
        compute_nll_loss: bool = False,
        alpha: float = 1.0,
        **head: Unpack[HeadOptions],
    ):
        check_options(loss_type, beta, label_smoothing, discopop_tau)
        super().__init__(
            beta=beta, compute_nll_loss=compute_nll_loss, alpha=alpha, average_log_prob=average_log_prob,
            losses_per_token=loss_type in PER_TOKEN, **head,
        )  # fmt: skip
        self.loss_type, self.label_smoothing, self.discopop_tau = loss_type, label_smoothing, discopop_tau

    def forward(  # type: ignore[override]  # the others have no reference
        self,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        *,
        bias: Tensor | None = None,
        ref_x: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        ref_logps: Tensor | None = None,
        nll_labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        num_valid: int | None = None,
    ) -> PreferenceOutput:
        """x [2B, S, H] (the chosen sequences, then the rejected ones), weight [V, H], bias [V], labels [2B, S].

        labels are shifted already. The reference: ref_x [2B, S, H'] and ref_weight [V, H'] (ref_bias), or ref_logps
        [2B], sums over tokens as `sequence_logps` gives them, or none of these, for log ratios of the policy alone.
        nll_labels: labels of the NLL term, which may include the prompt; the rejected half is not used. Packed
        sequences: x [T, H] or [1, T, H], labels alike, and cu_seqlens [2B + 1]. num_valid: an upper bound on the number
        of labels (of either kind) that are not ignored; the GEMMs leave out the other rows.
        """
        sequences, ref = self._sums(
            x, weight, labels, bias, Reference(ref_x, ref_weight, ref_bias, ref_logps), nll_labels=nll_labels,
            cu_seqlens=cu_seqlens, num_valid=num_valid,
        )  # fmt: skip
        return self._output(sequences, ref)

    def _losses(self, *logps: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        losses = dpo_loss(
            *logps, beta=self.beta, loss_type=self.loss_type, label_smoothing=self.label_smoothing,
            discopop_tau=self.discopop_tau,
        )  # fmt: skip
        return losses, {}
