"""Policy gradient losses over sampled completions, as functions of log probabilities.

    r = exp(logp - old_logp)                        A: advantage of the sequence, or of each token
    clipped = -min(r A, clip(r, 1 - low, 1 + high) A)

| kind | loss per token | reduction | source |
|---|---|---|---|
| grpo | clipped | the mean over the tokens of a sequence, then over sequences | arXiv:2402.03300 |
| bnpo | clipped | the mean over the tokens of a forward, then over forwards | TRL |
| dr_grpo | clipped | the sum over tokens / (sequences * maximum completion length) | arXiv:2503.20783 |
| dapo | clipped | the mean over all tokens of the step | arXiv:2503.14476 |
| cispo | -sg(min(r, high)) A logp | as dapo | arXiv:2506.13585 |
| gspo | clipped, r = exp(mean of the sequence's log ratios) | as grpo | arXiv:2507.18071 |

logp, old_logp, ref_logp [B, T] and mask [B, T] (bool) belong to B completions, padded anywhere; advantages are [B] or
[B, T]. Values where the mask is False are ignored. Results have the dtype of logp.
Checked against trl/trainer/grpo_trainer.py of TRL 1.16: its loss_type, and for gspo importance_sampling_level.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels.loss.linear_logprobs import LogprobsOutput, linear_logprobs

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "gspo", "cispo")
SCALES = ("group", "batch", "none")
_EPSILON = 1e-4


class Counts(NamedTuple):
    """The divisors of a step, scalars over all its forwards. tokens: the number of True in the masks."""

    tokens: Tensor
    sequences: Tensor
    forwards: Tensor


def group_advantages(rewards: Tensor, scale: str = "group") -> Tensor:
    """(rewards - mean of the group) / standard deviation, for rewards [P, G] of G completions of each of P prompts.

    scale: the standard deviation of the group, of all rewards ("batch"), or "none". That of a single reward is 0.
    """
    if scale not in SCALES:
        raise InputError(f"scale={scale!r} is not supported; supported: {', '.join(SCALES)}")
    centred = rewards - rewards.mean(1, keepdim=True)
    if scale == "none":
        return centred
    population = rewards if scale == "group" else rewards.reshape(1, -1)
    return centred / ((population.std(1, keepdim=True) if population.shape[1] > 1 else 0.0) + _EPSILON)


def ratios(kind: str, logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """The probability ratios r [B, T]; for gspo [B, 1]."""
    if kind not in LOSSES:
        raise InputError(f"loss={kind!r} is not supported; supported: {', '.join(LOSSES)}")
    log_ratio = torch.where(mask, logp - old_logp, 0)
    if kind == "gspo":
        log_ratio = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return log_ratio.exp()


def token_losses(kind: str, logp: Tensor, ratio: Tensor, advantages: Tensor, *, low: float, high: float) -> Tensor:
    """The losses [B, T]; for gspo [B, 1]. ratio: from `ratios`. low, high: the bounds of the clip; cispo has no low."""
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]
    if kind == "cispo":
        return -ratio.clamp(max=high).detach() * advantages * logp
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def is_clipped(kind: str, ratio: Tensor, advantages: Tensor, *, low: float, high: float) -> Tensor:
    """bool: where the clip stops the gradient (in cispo: bounds its weight)."""
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]
    if kind == "cispo":
        return (ratio > high) & (advantages > 0)
    return ((ratio < 1 - low) & (advantages < 0)) | ((ratio > 1 + high) & (advantages > 0))


def kl_losses(logp: Tensor, ref_logp: Tensor, ratio: Tensor) -> Tensor:
    """The estimator k3 of KL(policy, reference) [B, T], times r, so that its gradient is that of the reverse KL.

    Sources: http://joschu.net/blog/kl-approx.html; the factor: DeepSeek-V3.2, arXiv:2512.02556.
    """
    difference = ref_logp - logp
    return ratio * (difference.exp() - difference - 1)


def reduce_losses(kind: str, losses: Tensor, mask: Tensor, counts: Counts, max_completion_length: int) -> Tensor:
    """The part of one forward in the loss of a step. max_completion_length: for dr_grpo."""
    losses = torch.where(mask, losses, 0)
    if kind in ("grpo", "gspo"):
        return (losses.sum(1) / mask.sum(1).clamp(min=1)).sum() / counts.sequences
    if kind == "bnpo":
        return losses.sum() / mask.sum().clamp(min=1) / counts.forwards
    if kind == "dr_grpo":
        return losses.sum() / (counts.sequences * max_completion_length)
    return losses.sum() / counts.tokens


def head_logprobs(
    x: Tensor, weight: Tensor, labels: Tensor, *, temperature: float, bias: Tensor | None, softcap: float | None,
    workspace_bytes: int | None, num_valid: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Log probabilities and entropies of the labels at a temperature. The arguments are those of a loss_function."""
    output = linear_logprobs(
        x, weight, labels, temperature=temperature, bias=bias, softcap=softcap, workspace_bytes=workspace_bytes,
        num_valid=num_valid, return_entropy=True,
    )  # fmt: skip
    assert isinstance(output, LogprobsOutput) and output.entropy is not None, "the entropy was asked for"
    return output.logprobs, output.entropy
