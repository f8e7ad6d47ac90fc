"""What the modules of preference losses share: the options of the head, the reference, the metrics of pairs."""

from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.layers.preference.sequences import HeadOptions, SequenceSums, mean, sequence_sums, upcast


class Reference(NamedTuple):
    """The model that the policy is compared with: x, weight and bias of its head, or its logps [N], or nothing."""

    x: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    logps: Tensor | None = None

    def check(self) -> None:
        """Raises InputError for arguments that do not go together."""
        if (self.x is None) != (self.weight is None) or (self.x is None and self.bias is not None):
            raise InputError(
                "ref_x and ref_weight (and ref_bias) go together: the hidden states and the head of the reference"
            )
        if self.x is not None and self.logps is not None:
            raise InputError("give either ref_logps or ref_x, from which ref_logps would be computed")


class PreferenceOutput(NamedTuple):
    """The loss, and the metrics that trainers log: on the device, without gradient.

    chosen_logps and rejected_logps [B]: log probability of each sequence, summed or averaged as the loss uses it.
    chosen_logits_mean and rejected_logits_mean []: mean logit over the vocabulary and the labelled tokens (as TRL;
    Liger includes prompt and padding). nll_loss []: mean negative log probability of the chosen tokens, part of the
    loss or not. chosen_rewards and rejected_rewards [B]: beta times the log ratio to the reference, or times the log
    probability without one. reward_accuracy []: the share of pairs whose chosen reward is larger. reward_margin []: the
    mean difference. ORPO adds log_odds_ratio (mean log sigmoid of the log odds ratio) and log_odds_chosen (its mean).
    """

    loss: Tensor
    chosen_logps: Tensor
    rejected_logps: Tensor
    chosen_logits_mean: Tensor
    rejected_logits_mean: Tensor
    nll_loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor
    reward_accuracy: Tensor
    reward_margin: Tensor
    log_odds_ratio: Tensor | None = None
    log_odds_chosen: Tensor | None = None


def check_choice(name: str, value: str, supported: tuple[str, ...], hint: str = "") -> None:
    if value not in supported:
        raise InputError(f"{name}={value!r} is not supported; supported: {', '.join(supported)}{hint}")


def check_smoothing(label_smoothing: float, loss_type: str, defined: tuple[str, ...]) -> None:
    """Raises InputError for a label smoothing that the loss does not define."""
    if not 0 <= label_smoothing < 0.5:
        raise InputError(
            f"label_smoothing={label_smoothing} must be in [0, 0.5): it is the share of pairs whose order is wrong"
        )
    if label_smoothing and loss_type not in defined:
        raise InputError(
            f"label_smoothing={label_smoothing} is not defined for loss_type={loss_type!r}; leave it 0, or use one of "
            f"{', '.join(defined)}"
        )


def check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise InputError(f"{name}={value} must be greater than 0")


class LinearLoss(nn.Module):
    """A loss of the log probabilities of sequences under a linear head. head: the options in `HeadOptions`."""

    def __init__(
        self,
        *,
        average_log_prob: bool,
        ignore_index: int = -100,
        softcap: float | None = None,
        accum_dtype: torch.dtype | None = torch.float32,
        workspace_bytes: int | None = None,
    ):
        super().__init__()
        self.average_log_prob = average_log_prob
        self.head: HeadOptions = {
            "ignore_index": ignore_index,
            "softcap": softcap,
            "accum_dtype": accum_dtype,
            "workspace_bytes": workspace_bytes,
        }

    def extra_repr(self) -> str:
        own = {name: value for name, value in vars(self).items() if name[0] != "_" and name not in ("training", "head")}
        return ", ".join(f"{name}={value!r}" for name, value in (own | self.head).items())

    def _sums(
        self, x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, reference: Reference, *,
        nll_labels: Tensor | None = None, cu_seqlens: Tensor | None = None, num_valid: int | None = None,
    ) -> tuple[SequenceSums, Tensor]:  # fmt: skip
        """Sums of the policy, and the log probabilities [N] of the reference, without gradient; 0 without one."""
        reference.check()
        sequences = sequence_sums(
            x, weight, labels, bias=bias, nll_labels=nll_labels, cu_seqlens=cu_seqlens, num_valid=num_valid, **self.head
        )
        if reference.logps is not None:
            if reference.logps.shape != sequences.logps.shape:
                raise InputError(
                    f"ref_logps {list(reference.logps.shape)} must be {list(sequences.logps.shape)}: for each sequence "
                    "of x, in the same order, the sum over its tokens"
                )
            return sequences, upcast(reference.logps.detach()).to(x.device, non_blocking=True)
        if reference.x is None or reference.weight is None:
            return sequences, torch.zeros_like(sequences.logps)
        if reference.x.shape[:-1] != x.shape[:-1]:
            raise InputError(
                f"ref_x {list(reference.x.shape)} must have the shape of x {list(x.shape)}, but for the last dim"
            )
        with torch.no_grad():
            of_reference = sequence_sums(
                reference.x, reference.weight, labels, bias=reference.bias, cu_seqlens=cu_seqlens, num_valid=num_valid,
                **self.head,
            )  # fmt: skip
        return sequences, of_reference.logps


class PairedLoss(LinearLoss):
    """A loss over pairs: the first half of the sequences are the chosen ones, the second half the rejected ones.

    losses_per_token: `_losses` gets means per token. The metrics are means per token only with average_log_prob.
    """

    def __init__(
        self,
        *,
        beta: float,
        compute_nll_loss: bool,
        alpha: float,
        average_log_prob: bool,
        losses_per_token: bool = False,
        **head: Unpack[HeadOptions],
    ):
        super().__init__(average_log_prob=average_log_prob, **head)
        check_positive(beta=beta)
        self.beta, self.compute_nll_loss, self.alpha = beta, compute_nll_loss, alpha
        self._losses_per_token = losses_per_token or average_log_prob

    def _losses(
        self, chosen_logps: Tensor, rejected_logps: Tensor, ref_chosen_logps: Tensor, ref_rejected_logps: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses [B] of pairs without the NLL term, and metrics of their own, without gradient."""
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        *,
        bias: Tensor | None = None,
        nll_labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        num_valid: int | None = None,
    ) -> PreferenceOutput:
        """x [2B, S, H] (the chosen sequences, then the rejected ones), weight [V, H], bias [V], labels [2B, S].

        labels are shifted already. nll_labels: labels of the NLL term, which may include the prompt; the rejected half
        is not used. Packed sequences: x [T, H] or [1, T, H], labels alike, and cu_seqlens [2B + 1]. num_valid: an upper
        bound on the number of labels (of either kind) that are not ignored; the GEMMs leave out the other rows.
        """
        sequences, ref = self._sums(
            x, weight, labels, bias, Reference(), nll_labels=nll_labels, cu_seqlens=cu_seqlens, num_valid=num_valid
        )
        return self._output(sequences, ref)

    def _output(self, sequences: SequenceSums, ref: Tensor) -> PreferenceOutput:
        """Loss and metrics from the sums of all 2B sequences, and the reference's log probabilities [2B]."""
        logps, pairs = sequences.logps, len(sequences.logps) // 2
        if len(logps) % 2:
            raise InputError(f"{len(logps)} sequences are not pairs; give all chosen ones, then all rejected ones")
        averages = sequences.averaged(logps), sequences.averaged(ref)
        if self.average_log_prob:
            logps, ref = averages
        compared, against = averages if self._losses_per_token else (logps, ref)
        losses, metrics = self._losses(*compared.chunk(2), *against.chunk(2))
        loss = mean(losses)
        if self.compute_nll_loss:
            number = sequences.nll_lengths[:pairs].sum().clamp(min=1)
            loss = loss - self.alpha * (sequences.nll_logps[:pairs].sum() / number)
        with torch.no_grad():
            # [2, 2]: nll and logits of chosen and rejected, in few launches.
            sums = torch.stack([sequences.nll_logps, sequences.logits]).view(2, 2, pairs).sum(-1)
            lengths = torch.stack([sequences.nll_lengths, sequences.lengths]).view(2, 2, pairs).sum(-1)
            means = sums / lengths.clamp(min=1)
            chosen, rejected = (self.beta * (logps - ref)).chunk(2)
            margins = chosen - rejected
            return PreferenceOutput(
                loss,
                chosen_logps=logps[:pairs].detach(),
                rejected_logps=logps[pairs:].detach(),
                chosen_logits_mean=means[1, 0],
                rejected_logits_mean=means[1, 1],
                nll_loss=-means[0, 0],
                chosen_rewards=chosen,
                rejected_rewards=rejected,
                reward_accuracy=mean((margins > 0).to(chosen.dtype)),
                reward_margin=mean(margins),
                **metrics,
            )
