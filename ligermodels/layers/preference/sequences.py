"""Log probabilities of whole sequences from hidden states.

    logps[n] = sum over the labelled tokens t of sequence n of log softmax(x[n, t] @ weight.T + bias)[labels[n, t]]

`kernels.linear_logprobs` computes them without the logits in fp32, in chunks of tokens. The losses on top of the [N]
sums are plain PyTorch in fp32 (fp64 for fp64).
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels.linear_logprobs import linear_logprobs


class HeadOptions(TypedDict, total=False):
    """Options of the linear head, which every loss of this package takes; those of `kernels.linear_logprobs`."""

    ignore_index: int
    """The label of prompt and padding, default -100."""
    softcap: float | None
    """Logits become softcap * tanh(logits / softcap), as in Gemma 2."""
    accum_dtype: torch.dtype | None
    """What the gradient of the weight is summed in, default fp32; None is the weight's dtype."""
    workspace_bytes: int | None
    """Memory for logits; None is 512 MiB."""


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


def upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def mean(x: Tensor) -> Tensor:
    """The mean; 0 of an empty tensor."""
    return x.mean() if x.numel() else x.sum()


def totals(like: Tensor, cu_seqlens: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """A function of values [N, S], or of packed ones [1, T] or [T], that sums them over each of the N sequences.

    like: a tensor on the device, and of the dtype of the sums.
    """
    belongs = None
    if cu_seqlens is not None:
        bounds = cu_seqlens.to(like.device, non_blocking=True)[:, None]
        position = torch.arange(like.numel(), device=like.device)
        belongs = (position >= bounds[:-1]) & (position < bounds[1:])

    def total(values: Tensor) -> Tensor:
        # A sum over all tokens for each packed sequence: no atomics, and the host need not know the lengths.
        values = values if belongs is None else torch.where(belongs, values.reshape(-1), 0)
        return values.sum(-1, dtype=like.dtype)

    return total


def sequence_sums(
    x: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, nll_labels: Tensor | None = None,
    cu_seqlens: Tensor | None = None, num_valid: int | None = None, **head: Unpack[HeadOptions],
) -> SequenceSums:  # fmt: skip
    """The sums of every sequence, from one pass over the logits.

    nll_labels and labels must agree where neither is ignored: else InputError on the CPU, NaN on a GPU.
    """
    ignore_index = head.get("ignore_index", -100)
    for name, given in (("labels", labels), ("nll_labels", nll_labels)):
        if given is not None and given.shape != x.shape[:-1]:
            raise InputError(
                f"{name} {list(given.shape)} do not fit x {list(x.shape)}: one label for each position, shifted "
                "already (the label of a position is the token that follows it)"
            )
    if cu_seqlens is None and x.dim() != 3:
        raise InputError(
            f"x {list(x.shape)} must be [sequences, tokens, hidden_size]; packed sequences, [tokens, hidden_size], "
            "need cu_seqlens"
        )
    scored, differ = labels, None
    if nll_labels is not None:
        scored = torch.where(labels == ignore_index, nll_labels, labels)
        differ = (scored != nll_labels) & (nll_labels != ignore_index)
        if labels.device.type == "cpu" and not torch.compiler.is_compiling():
            if differ.any():
                raise InputError(
                    "nll_labels and labels differ at a position where neither is ignored; they are of the same text"
                )
            differ = None
    logps, _, logits = linear_logprobs(
        x, weight, scored, bias=bias, num_valid=num_valid, return_logits_mean=True, **head
    )
    assert logits is not None, "linear_logprobs was asked for them"
    if differ is not None:  # a check would synchronise
        logps = logps.masked_fill(differ.to(x.device, non_blocking=True), math.nan)

    total = totals(logps, cu_seqlens)
    labelled = labels.to(x.device, non_blocking=True) != ignore_index
    lengths = total(labelled)
    if nll_labels is None:  # logps and logits are 0 where labels are ignored
        sums = total(logps)
        return SequenceSums(sums, lengths, total(logits), sums, lengths)
    in_nll = nll_labels.to(x.device, non_blocking=True) != ignore_index
    return SequenceSums(
        total(torch.where(labelled, logps, 0)),
        lengths,
        total(torch.where(labelled, logits, 0)),
        total(torch.where(in_nll, logps, 0)),
        total(in_nll),
    )


def sequence_logps(
    x: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, cu_seqlens: Tensor | None = None,
    average_log_prob: bool = False, num_valid: int | None = None, **head: Unpack[HeadOptions],
) -> Tensor:  # fmt: skip
    """Log probability [N] of each sequence, summed over its tokens, or averaged: for example `ref_logps`.

    x [N, S, H], weight [V, H], bias [V], labels [N, S], shifted already; 0 for a sequence without labels. Packed
    sequences: x [T, H] or [1, T, H], labels alike, and cu_seqlens [N + 1]. num_valid: an upper bound on the number of
    labels that are not ignored; the GEMMs leave out the other rows. head: see `HeadOptions`.
    """
    sequences = sequence_sums(x, weight, labels, bias=bias, cu_seqlens=cu_seqlens, num_valid=num_valid, **head)
    return sequences.averaged(sequences.logps) if average_log_prob else sequences.logps
