"""Log probabilities of whole sequences from hidden states, and what the losses over them share.

    logps[n] = sum over the tokens t of sequence n that count of log softmax(x[n, t] @ weight.T + bias)[labels[n, t]]

`kernels.linear_logprobs` computes them without the logits in fp32, in chunks of tokens. The losses on top of the [N]
sums are plain PyTorch in fp32 (fp64 for fp64).
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.kernels.linear_logprobs import linear_logprobs


class SequenceSums(NamedTuple):
    """Sums [N] over the tokens of N sequences whose label is not ignored; 0 where there is none."""

    logps: Tensor  # with gradient
    lengths: Tensor  # number of tokens
    logits: Tensor  # of the mean logit over the vocabulary
    nll_logps: Tensor  # as logps, over the tokens of the NLL term
    nll_lengths: Tensor

    def averaged(self, logps: Tensor) -> Tensor:
        """Means per token of sums [N]; 0 for an empty sequence."""
        return logps / self.lengths.clamp(min=1)


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


def upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def mean(x: Tensor) -> Tensor:
    """The mean; 0 of an empty tensor."""
    return x.mean() if x.numel() else x.sum()


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


def _check_tokens(x: Tensor, labels: Tensor, nll_labels: Tensor | None, cu_seqlens: Tensor | None) -> None:
    for name, given in (("labels", labels), ("nll_labels", nll_labels)):
        if given is not None and given.shape != x.shape[:-1]:
            raise InputError(
                f"{name} {list(given.shape)} do not fit x {list(x.shape)}: one label for each position, shifted "
                "already (the label of a position is the token that follows it)"
            )
    if cu_seqlens is None:
        if x.dim() != 3:
            raise InputError(
                f"x {list(x.shape)} must be [sequences, tokens, hidden_size]; packed sequences, [tokens, hidden_size], "
                "need cu_seqlens"
            )
    elif cu_seqlens.dim() != 1 or len(cu_seqlens) < 1 or cu_seqlens.is_floating_point():
        raise InputError(
            f"cu_seqlens is {cu_seqlens.dtype} {list(cu_seqlens.shape)}; it must be integers [sequences + 1], the "
            "positions where the sequences start, then the end of the last"
        )


def sequence_sums(
    x: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, nll_labels: Tensor | None = None,
    cu_seqlens: Tensor | None = None, num_valid: int | None = None, ignore_index: int = -100,
    softcap: float | None = None, accum_dtype: torch.dtype | None = torch.float32, workspace_bytes: int | None = None,
) -> SequenceSums:  # fmt: skip
    """The sums of every sequence, from one pass over the logits.

    nll_labels and labels must agree where neither is ignored: else InputError on the CPU, NaN on a GPU.
    """
    _check_tokens(x, labels, nll_labels, cu_seqlens)
    every, differ = labels, None
    if nll_labels is not None:
        every = torch.where(labels == ignore_index, nll_labels, labels)
        differ = (every != nll_labels) & (nll_labels != ignore_index)
        if labels.device.type == "cpu" and not torch.compiler.is_compiling():
            if differ.any():
                raise InputError(
                    "nll_labels and labels differ at a position where neither is ignored; they are of the same text"
                )
            differ = None
    logps, _, logits = linear_logprobs(
        x, weight, every, bias=bias, ignore_index=ignore_index, softcap=softcap, return_logits_mean=True,
        num_valid=num_valid, accum_dtype=accum_dtype, workspace_bytes=workspace_bytes,
    )  # fmt: skip
    assert logits is not None, "linear_logprobs was asked for the mean of the logits"
    if differ is not None:  # a check would synchronise with the device
        logps = logps.masked_fill(differ.to(x.device, non_blocking=True), math.nan)

    belongs = None
    if cu_seqlens is not None:
        bounds = cu_seqlens.to(x.device, non_blocking=True)[:, None]
        position = torch.arange(labels.numel(), device=x.device)
        belongs = (position >= bounds[:-1]) & (position < bounds[1:])

    def total(values: Tensor) -> Tensor:
        # A sum over all tokens for each packed sequence: no atomics, and the host need not know the lengths.
        values = values if belongs is None else torch.where(belongs, values.reshape(-1), 0)
        return values.sum(-1, dtype=logps.dtype)

    counted = labels.to(x.device, non_blocking=True) != ignore_index
    lengths = total(counted)
    if nll_labels is None:  # logps and logits are 0 where labels are ignored
        sums = total(logps)
        return SequenceSums(sums, lengths, total(logits), sums, lengths)
    of_nll = nll_labels.to(x.device, non_blocking=True) != ignore_index
    return SequenceSums(
        total(torch.where(counted, logps, 0)),
        lengths,
        total(torch.where(counted, logits, 0)),
        total(torch.where(of_nll, logps, 0)),
        total(of_nll),
    )


def sequence_logps(
    x: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, cu_seqlens: Tensor | None = None,
    average_log_prob: bool = False, ignore_index: int = -100, softcap: float | None = None,
    num_valid: int | None = None, accum_dtype: torch.dtype | None = torch.float32, workspace_bytes: int | None = None,
) -> Tensor:  # fmt: skip
    """Log probability [N] of each sequence, summed over its tokens, or averaged: for example `ref_logps`.

    x [N, S, H], weight [V, H], bias [V], labels [N, S], shifted already; 0 for a sequence without labels. Packed
    sequences: x [T, H] or [1, T, H], labels alike, and cu_seqlens [N + 1]. num_valid and the options of the head: see
    `LinearLoss`.
    """
    sequences = sequence_sums(
        x, weight, labels, bias=bias, cu_seqlens=cu_seqlens, num_valid=num_valid, ignore_index=ignore_index,
        softcap=softcap, accum_dtype=accum_dtype, workspace_bytes=workspace_bytes,
    )  # fmt: skip
    return sequences.averaged(sequences.logps) if average_log_prob else sequences.logps


class LinearLoss(nn.Module):
    """The options of the head, which are those of `ligermodels.kernels.linear_logprobs`.

    ignore_index: the label of prompt and padding. num_valid, in forward: an upper bound on the number of labels that
    are not ignored, where the host knows one; labels on the CPU are counted. softcap: Gemma 2's. workspace_bytes:
    memory for logits; None is 512 MiB.
    """

    def __init__(
        self,
        *,
        average_log_prob: bool,
        ignore_index: int,
        softcap: float | None,
        accum_dtype: torch.dtype | None,
        workspace_bytes: int | None,
    ):
        super().__init__()
        self.average_log_prob = average_log_prob
        self.head: dict[str, Any] = {
            "ignore_index": ignore_index,
            "softcap": softcap,
            "accum_dtype": accum_dtype,
            "workspace_bytes": workspace_bytes,
        }

    def extra_repr(self) -> str:
        own = {name: value for name, value in vars(self).items() if name[0] != "_" and name not in ("training", "head")}
        return ", ".join(f"{name}={value!r}" for name, value in (own | self.head).items())

    def _reference(
        self, sequences: SequenceSums, x: Tensor, labels: Tensor, ref_x: Tensor | None, ref_weight: Tensor | None,
        ref_bias: Tensor | None, ref_logps: Tensor | None, cu_seqlens: Tensor | None, num_valid: int | None,
    ) -> Tensor:  # fmt: skip
        """The sums [N] of the reference: given, or one GEMM without gradient, or 0."""
        if (ref_x is None) != (ref_weight is None) or (ref_x is None and ref_bias is not None):
            raise InputError(
                "ref_x and ref_weight (and ref_bias) go together: the hidden states and the head of the reference"
            )
        if ref_x is not None and ref_logps is not None:
            raise InputError("give either ref_logps or ref_x, from which ref_logps would be computed")
        if ref_logps is not None:
            if ref_logps.shape != sequences.logps.shape:
                raise InputError(
                    f"ref_logps {list(ref_logps.shape)} must be {list(sequences.logps.shape)}: for each sequence of x, "
                    "in the same order, the sum over its tokens"
                )
            return upcast(ref_logps.detach()).to(x.device, non_blocking=True)
        if ref_x is None or ref_weight is None:
            return torch.zeros_like(sequences.logps)
        if ref_x.shape[:-1] != x.shape[:-1]:
            raise InputError(
                f"ref_x {list(ref_x.shape)} must have the shape of x {list(x.shape)}, but for the last dim"
            )
        with torch.no_grad():
            return sequence_sums(
                ref_x, ref_weight, labels, bias=ref_bias, cu_seqlens=cu_seqlens, num_valid=num_valid, **self.head
            ).logps


class PairedLoss(LinearLoss):
    """A loss over pairs: the first half of the sequences are the chosen ones, the second half the rejected ones."""

    def __init__(self, *, beta: float, compute_nll_loss: bool, alpha: float, **options: Any):
        super().__init__(**options)
        check_positive(beta=beta)
        self.beta, self.compute_nll_loss, self.alpha = beta, compute_nll_loss, alpha

    def _measure(
        self, x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, nll_labels: Tensor | None,
        cu_seqlens: Tensor | None, num_valid: int | None,
    ) -> SequenceSums:  # fmt: skip
        sequences = sequence_sums(
            x, weight, labels, bias=bias, nll_labels=nll_labels, cu_seqlens=cu_seqlens, num_valid=num_valid, **self.head
        )
        if len(sequences.logps) % 2:
            raise InputError(
                f"{len(sequences.logps)} sequences are not pairs; give all chosen ones, then all rejected ones"
            )
        return sequences

    def _output(
        self, losses: Tensor, sequences: SequenceSums, logps: Tensor, rewards: Tensor, **metrics: Tensor
    ) -> PreferenceOutput:
        """losses [B] of the pairs; logps and rewards [2B]; metrics without gradient."""
        loss, pairs = mean(losses), len(losses)
        if self.compute_nll_loss:
            number = sequences.nll_lengths[:pairs].sum().clamp(min=1)
            loss = loss - self.alpha * (sequences.nll_logps[:pairs].sum() / number)
        with torch.no_grad():
            # [2, 2]: nll and logits of chosen and rejected, in few launches.
            sums = torch.stack([sequences.nll_logps, sequences.logits]).view(2, 2, pairs).sum(-1)
            lengths = torch.stack([sequences.nll_lengths, sequences.lengths]).view(2, 2, pairs).sum(-1)
            means = sums / lengths.clamp(min=1)
            chosen, rejected = rewards.detach().chunk(2)
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
                reward_accuracy=mean((margins > 0).to(rewards.dtype)),
                reward_margin=mean(margins),
                **metrics,
            )


class ReferenceFreeLoss(PairedLoss):
    def _losses(self, chosen_logps: Tensor, rejected_logps: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses [B] of pairs without the NLL term, and further metrics."""
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
        sequences = self._measure(x, weight, labels, bias, nll_labels, cu_seqlens, num_valid)
        logps = sequences.averaged(sequences.logps) if self.average_log_prob else sequences.logps
        losses, metrics = self._losses(*logps.chunk(2))
        return self._output(losses, sequences, logps, self.beta * logps.detach(), **metrics)
