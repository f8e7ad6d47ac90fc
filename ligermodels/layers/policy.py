"""Losses of policy gradients over sampled completions, as plain functions of log probabilities.

    r = exp(logp - old_logp)                        A: advantage of the sequence, or of each token
    clipped = -min(r A, clip(r, 1 - low, 1 + high) A)

| kind | per token | reduced by | source |
|---|---|---|---|
| grpo | clipped | the mean of each sequence, then over sequences | arXiv:2402.03300 |
| bnpo | clipped | the sum over the tokens of a forward, then the mean over forwards | TRL |
| dr_grpo | clipped | the sum over sequences times the longest length that there may be | arXiv:2503.20783 |
| dapo | clipped | the sum over all tokens of the step | arXiv:2503.14476 |
| cispo | -sg(min(r, high)) A logp | as dapo | arXiv:2506.13585 |
| gspo | clipped, r = exp(mean of the sequence's log ratios) | as grpo | arXiv:2507.18071 |

logp, old_logp, ref_logp [B, T] and mask [B, T] bool are of B completions, padded anywhere; advantages are [B] or
[B, T]. Where the mask is False, values are ignored. All in the dtype of logp.
Checked against: trl/trainer/grpo_trainer.py of TRL 1.16: its loss_type, and for gspo importance_sampling_level.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels.linear_logprobs import LogprobsOutput, linear_logprobs

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "gspo", "cispo")
SCALES = ("group", "batch", "none")
_EPSILON = 1e-4


class Counts(NamedTuple):
    """What a step is divided by: scalars, over all its forwards. tokens: where the mask is True."""

    tokens: Tensor
    sequences: Tensor
    forwards: Tensor


def group_advantages(rewards: Tensor, scale: str = "group") -> Tensor:
    """Rewards [P, G] of G completions of each of P prompts, less the mean of their group, over a standard deviation.

    scale: which, that of the group, or of all rewards ("batch"), or none. Of a single reward it is 0.
    """
    if scale not in SCALES:
        raise InputError(f"scale={scale!r} is not supported; supported: {', '.join(SCALES)}")
    centred = rewards - rewards.mean(1, keepdim=True)
    if scale == "none":
        return centred
    kind = rewards if scale == "group" else rewards.reshape(1, -1)
    return centred / ((kind.std(1, keepdim=True) if kind.shape[1] > 1 else 0.0) + _EPSILON)


def ratios(kind: str, logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """r [B, T], or of gspo [B, 1]."""
    if kind not in LOSSES:
        raise InputError(f"loss={kind!r} is not supported; supported: {', '.join(LOSSES)}")
    log_ratio = torch.where(mask, logp - old_logp, 0)
    if kind == "gspo":
        log_ratio = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return log_ratio.exp()


def token_losses(kind: str, logp: Tensor, ratio: Tensor, advantages: Tensor, *, low: float, high: float) -> Tensor:
    """The losses [B, T]; of gspo [B, 1]. ratio: of `ratios`. low, high: the clip's, see above; cispo reads no low."""
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]
    if kind == "cispo":
        return -ratio.clamp(max=high).detach() * advantages * logp
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def is_clipped(kind: str, ratio: Tensor, advantages: Tensor, *, low: float, high: float) -> Tensor:
    """bool, where the clip takes the gradient away (in cispo: bounds its weight)."""
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]
    if kind == "cispo":
        return (ratio > high) & (advantages > 0)
    return ((ratio < 1 - low) & (advantages < 0)) | ((ratio > 1 + high) & (advantages > 0))


def kl_losses(logp: Tensor, ref_logp: Tensor, ratio: Tensor) -> Tensor:
    """The estimate k3 of KL(policy, reference) [B, T], times r, with which its gradient is that of the reverse KL.

    Sources: http://joschu.net/blog/kl-approx.html; the factor: DeepSeek-V3.2, arXiv:2512.02556.
    """
    difference = ref_logp - logp
    return ratio * (difference.exp() - difference - 1)


def reduce_losses(kind: str, losses: Tensor, mask: Tensor, counts: Counts, longest: int) -> Tensor:
    """This forward's part of the loss of a step. longest: tokens that a completion may have, for dr_grpo."""
    losses = torch.where(mask, losses, 0)
    if kind in ("grpo", "gspo"):
        return (losses.sum(1) / mask.sum(1).clamp(min=1)).sum() / counts.sequences
    if kind == "bnpo":
        return losses.sum() / mask.sum().clamp(min=1) / counts.forwards
    if kind == "dr_grpo":
        return losses.sum() / (counts.sequences * longest)
    return losses.sum() / counts.tokens


def head_logprobs(
    x: Tensor, weight: Tensor, labels: Tensor, *, temperature: float, bias: Tensor | None, softcap: float | None,
    workspace_bytes: int | None, num_valid: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Log probabilities and entropies of the labels at a temperature, from what a head gives its `loss_function`."""
    found = linear_logprobs(
        x, weight, labels, temperature=temperature, bias=bias, softcap=softcap, workspace_bytes=workspace_bytes,
        num_valid=num_valid, return_entropy=True,
    )  # fmt: skip
    assert isinstance(found, LogprobsOutput) and found.entropy is not None, "the entropy was asked for"
    return found.logprobs, found.entropy
