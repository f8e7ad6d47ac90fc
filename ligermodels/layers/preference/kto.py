"""Kahneman-Tversky optimisation: single answers, each desirable or not, against a reference; no pairs."""

from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.layers.preference.base import LinearLoss, Reference, check_choice, check_positive
from ligermodels.layers.preference.sequences import HeadOptions, mean, upcast

LOSS_TYPES = ("kto", "apo_zero_unpaired")


class KTOOutput(NamedTuple):
    """The loss, and the metrics that trainers log: on the device, without gradient.

    logps and rewards [N]: of each sequence. The others []: means over the desirable (chosen) and the undesirable
    (rejected) sequences, 0 where there is none; reward_margin is the difference of the two mean rewards; logits are
    averaged over the vocabulary and the labelled tokens. kl: the reference point that was used.
    """

    loss: Tensor
    logps: Tensor
    rewards: Tensor
    chosen_logps: Tensor
    rejected_logps: Tensor
    chosen_logits_mean: Tensor
    rejected_logits_mean: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor
    reward_margin: Tensor
    kl: Tensor


def kto_kl(kl_logps: Tensor, ref_kl_logps: Tensor | None = None) -> Tensor:
    """max(0, mean log ratio) of completions [M] of other prompts: an estimate of KL(policy, reference).

    Without gradient, as in the paper. With several processes, average before the max.
    """
    ratio = upcast(kl_logps.detach())
    ratio = ratio if ref_kl_logps is None else ratio - upcast(ref_kl_logps.detach())
    return mean(ratio).clamp(min=0)


def kto_loss(
    logps: Tensor, desirable: Tensor, ref_logps: Tensor | None = None, *, kl: Tensor | None = None, beta: float = 0.1,
    loss_type: str = "kto", desirable_weight: float = 1.0, undesirable_weight: float = 1.0,
) -> Tensor:  # fmt: skip
    """Losses [N] of sequences, in fp32, from log probabilities [N] and desirable [N], which is bool.

    With a the log ratio of policy to reference and s = sigmoid, times the weight of its kind:

    kto                desirable: s(-beta (a - kl)), undesirable: s(beta (a - kl))     arXiv:2402.01306, equation 7
    apo_zero_unpaired  the same with kl = 0                                            arXiv:2408.06266, equation 7

    kl [] or [N] carries no gradient; None is 0. Liger has no weights and takes kl as it comes.
    """
    check_choice("loss_type", loss_type, LOSS_TYPES)
    check_positive(beta=beta)
    a = upcast(logps)
    a = a if ref_logps is None else a - upcast(ref_logps)
    a = a if kl is None or loss_type == "apo_zero_unpaired" else a - upcast(kl.detach())
    losses = torch.sigmoid(beta * torch.where(desirable, -a, a))
    return torch.where(desirable, desirable_weight * losses, undesirable_weight * losses)


class LinearKTOLoss(LinearLoss):
    """KTO from hidden states: the mean of `kto_loss` over sequences.

    desirable_weight and undesirable_weight balance unequal numbers of the two kinds. average_log_prob: log
    probabilities per token instead of per sequence, of policy and reference. head: see `HeadOptions`.
    """

    def __init__(
        self,
        *,
        beta: float = 0.1,
        loss_type: str = "kto",
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        average_log_prob: bool = False,
        **head: Unpack[HeadOptions],
    ):
        check_choice("loss_type", loss_type, LOSS_TYPES)
        check_positive(beta=beta)
        super().__init__(average_log_prob=average_log_prob, **head)
        self.beta, self.loss_type = beta, loss_type
        self.desirable_weight, self.undesirable_weight = desirable_weight, undesirable_weight

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        desirable: Tensor,
        *,
        bias: Tensor | None = None,
        ref_x: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        ref_logps: Tensor | None = None,
        kl: Tensor | None = None,
        kl_x: Tensor | None = None,
        kl_labels: Tensor | None = None,
        ref_kl_x: Tensor | None = None,
        ref_kl_logps: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        num_valid: int | None = None,
    ) -> KTOOutput:
        """x [N, S, H], weight [V, H], bias [V], labels [N, S], shifted already, desirable [N] bool.

        The reference: ref_x [N, S, H'] and ref_weight [V, H'] (ref_bias), or ref_logps [N], sums over tokens as
        `sequence_logps` gives them, or none of these, for log ratios of the policy alone. Packed sequences: x [T, H]
        or [1, T, H], labels alike, and cu_seqlens [N + 1]. num_valid: an upper bound on the number of labels that are
        not ignored; the GEMMs leave out the other rows.

        The reference point: kl, a number from `kto_kl`; or kl_x [M, S', H] and kl_labels [M, S'], completions under
        the prompts of others, whose reference is ref_kl_x [M, S', H'] or ref_kl_logps [M], no backward; or 0.
        """
        self._check_kl(kl, kl_x, kl_labels, ref_kl_x, ref_kl_logps, ref_weight)
        reference = Reference(ref_x, ref_weight, ref_bias, ref_logps)
        sequences, ref = self._sums(x, weight, labels, bias, reference, cu_seqlens=cu_seqlens, num_valid=num_valid)
        logps = sequences.logps
        if desirable.shape != logps.shape or desirable.dtype != torch.bool:
            raise InputError(
                f"desirable is {desirable.dtype} {list(desirable.shape)}; it must be torch.bool {list(logps.shape)}: "
                "for each sequence, whether it is desirable"
            )
        desirable = desirable.to(x.device, non_blocking=True)
        if self.average_log_prob:
            logps, ref = sequences.averaged(logps), sequences.averaged(ref)
        if kl is not None:
            kl = upcast(kl.detach()).to(weight.device, non_blocking=True)
        elif kl_x is not None and kl_labels is not None:
            head = (None, None) if ref_kl_x is None else (ref_weight, ref_bias)
            with torch.no_grad():
                of_kl, ref_kl = self._sums(kl_x, weight, kl_labels, bias, Reference(ref_kl_x, *head, ref_kl_logps))
                ratio = of_kl.logps - ref_kl
                kl = kto_kl(of_kl.averaged(ratio) if self.average_log_prob else ratio)
        losses = kto_loss(
            logps, desirable, ref, kl=kl, beta=self.beta, loss_type=self.loss_type,
            desirable_weight=self.desirable_weight, undesirable_weight=self.undesirable_weight,
        )  # fmt: skip
        loss = mean(losses)
        with torch.no_grad():
            logps = logps.detach()
            rewards, one = self.beta * (logps - ref), torch.ones_like(logps)
            kinds = torch.stack([desirable, ~desirable])[:, None]
            sums = torch.where(kinds, torch.stack([logps, rewards, sequences.logits]), 0).sum(-1)
            counts = torch.where(kinds, torch.stack([one, one, sequences.lengths]), 0).sum(-1)
            chosen, rejected = sums / counts.clamp(min=1)  # [3] each
            return KTOOutput(
                loss,
                logps=logps,
                rewards=rewards,
                chosen_logps=chosen[0],
                rejected_logps=rejected[0],
                chosen_logits_mean=chosen[2],
                rejected_logits_mean=rejected[2],
                chosen_rewards=chosen[1],
                rejected_rewards=rejected[1],
                reward_margin=chosen[1] - rejected[1],
                kl=logps.new_zeros(()) if kl is None else kl,
            )

    def _check_kl(
        self, kl: Tensor | None, kl_x: Tensor | None, kl_labels: Tensor | None, ref_kl_x: Tensor | None,
        ref_kl_logps: Tensor | None, ref_weight: Tensor | None,
    ) -> None:  # fmt: skip
        """Raises InputError for arguments of the reference point that do not go together."""
        has_reference = ref_kl_x is not None or ref_kl_logps is not None
        if (kl_x is None) != (kl_labels is None) or (kl_x is None and has_reference):
            raise InputError("kl_x and kl_labels go together, and ref_kl_x or ref_kl_logps with them")
        if kl is not None and (kl_x is not None or kl.dim() > 1):
            raise InputError(
                f"kl {list(kl.shape)} must be one number, or one of each sequence; it takes the place of kl_x"
            )
        if self.loss_type == "apo_zero_unpaired" and (kl is not None or kl_x is not None):
            raise InputError("loss_type='apo_zero_unpaired' has no reference point: leave kl and kl_x out")
        if ref_kl_x is not None and (ref_weight is None or ref_kl_logps is not None):
            raise InputError("ref_kl_x needs ref_weight, and takes the place of ref_kl_logps")
