"""Policy gradient losses over sampled completions, as functions of log probabilities.

    r = exp(logp - old_logp)                        A: advantage of the sequence, or of each token
    clipped = -min(min(r, delta) A, clip(r, 1 - low, 1 + high) A)

| kind | loss per token | reduction | source |
|---|---|---|---|
| grpo | clipped | the mean over the tokens of a sequence, then over sequences | arXiv:2402.03300 |
| bnpo | clipped | the mean over the tokens of a forward, then over forwards | TRL |
| dr_grpo | clipped | the sum over tokens / (sequences * maximum completion length) | arXiv:2503.20783 |
| dapo | clipped | the mean over all tokens of the step | arXiv:2503.14476 |
| cispo | -sg(min(r, high)) A logp | as dapo | arXiv:2506.13585 |
| gspo | clipped, r = exp(mean of the sequence's log ratios) | as grpo | arXiv:2507.18071 |
| sapo | -(4 / t) sigmoid(t (r - 1)) A, t: by the sign of A | as grpo | arXiv:2511.20347 |
| luspo | as gspo | the sum over the tokens of a sequence, then the mean over sequences | arXiv:2602.05261 |
| vespo | -sg(w^k exp(l (1 - w))) A logp, w: product of its r; k, l: by the sign of A | as dapo | arXiv:2602.10693 |

delta, or None, bounds what a negative A takes from a large r, where the clip alone has no bound: the two-sided clip of
INTELLECT-2, arXiv:2505.07291. It should be more than 1 + high.

logp, old_logp, ref_logp [B, T] and mask [B, T] (bool) belong to B completions, padded anywhere; advantages are [B] or
[B, T]. Values where the mask is False are ignored. Results have the dtype of logp.
Checked against trl/trainer/grpo_trainer.py of TRL 1.16: its loss_type, and for gspo and luspo
importance_sampling_level="sequence".
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels.loss.linear_logprobs import LogprobsOutput, linear_logprobs

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "luspo", "vespo")
SOFT = ("sapo", "vespo")
"""Losses that weigh a token smoothly by its ratio, without a clip."""
OF_SEQUENCES = ("gspo", "luspo")
"""Losses whose ratio is one number per sequence."""
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
    """The probability ratios r [B, T], 1 where the mask is False; for gspo and luspo [B, 1]."""
    if kind not in LOSSES:
        raise InputError(f"loss={kind!r} is not supported; supported: {', '.join(LOSSES)}")
    log_ratio = torch.where(mask, logp - old_logp, 0)
    if kind in OF_SEQUENCES:
        log_ratio = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return log_ratio.exp()


def token_losses(
    kind: str, logp: Tensor, ratio: Tensor, advantages: Tensor, *, low: float, high: float, delta: float | None = None,
    temperatures: tuple[float, float] = (1.0, 1.05),
    gammas: tuple[tuple[float, float], tuple[float, float]] = ((2.0, 3.0), (3.0, 2.0)),
) -> Tensor:  # fmt: skip
    """The losses [B, T]; for gspo and luspo [B, 1]. ratio: from `ratios`.

    low, high, delta: the bounds of the clip; cispo has only high, sapo and vespo have none. temperatures: t of sapo for
    advantages above 0, and for others. gammas: (k, l) of vespo for advantages of 0 or more, and for those below.
    """
    advantages = _per_token(advantages)
    if kind == "cispo":
        return -ratio.clamp(max=high).detach() * advantages * logp
    if kind == "sapo":
        t = _where(advantages > 0, *temperatures, advantages)
        return -torch.sigmoid(t * (ratio - 1)) * (4 / t) * advantages
    if kind == "vespo":
        return -gamma_weights(ratio, advantages, gammas) * advantages * logp
    clipped = ratio.clamp(1 - low, 1 + high) * advantages
    return -torch.minimum(ratio.clamp(max=delta) * advantages if delta else ratio * advantages, clipped)


def gamma_weights(ratio: Tensor, advantages: Tensor, gammas: tuple[tuple[float, float], tuple[float, float]]) -> Tensor:
    """The weights w^k exp(l (1 - w)) of vespo, [B, 1] for advantages [B]; 1 at w = 1. Without gradients.

    Logarithms are bounded as in TRL: those of the ratios [B, T] by 20, that of their product w by log 1e-8 and 20.
    """
    advantages = _per_token(advantages)
    (k_pos, scale_pos), (k_neg, scale_neg) = gammas
    k = _where(advantages >= 0, k_pos, k_neg, advantages)
    scale = _where(advantages >= 0, max(scale_pos, 1e-4), max(scale_neg, 1e-4), advantages)
    log_w = ratio.detach().log().clamp(-20, 20).sum(1, keepdim=True).clamp(math.log(1e-8), 20)
    return (scale + k * log_w - scale * log_w.exp()).exp()


def is_clipped(
    kind: str, ratio: Tensor, advantages: Tensor, *, low: float, high: float, delta: float | None = None
) -> Tensor:
    """bool: where the clip stops the gradient (in cispo: bounds its weight). Not for sapo and vespo.

    TRL's clip_ratio is the same without a delta; it does not count where delta stops a gradient.
    """
    advantages = _per_token(advantages)
    if kind == "cispo":
        return (ratio > high) & (advantages > 0)
    highest, lowest = 1 + high, ratio < 1 - low
    if delta:
        highest, lowest = min(1 + high, delta), lowest | (ratio > max(1 + high, delta))
    return (lowest & (advantages < 0)) | ((ratio > highest) & (advantages > 0))


def _where(condition: Tensor, number: float, otherwise: float, like: Tensor) -> Tensor:
    """torch.where of two numbers, in the dtype of `like`, without a copy from the host."""
    return torch.where(condition, like.new_full((), number), like.new_full((), otherwise))


def _per_token(advantages: Tensor) -> Tensor:
    """Advantages [B] or [B, T] as [B, 1] or [B, T]."""
    return advantages if advantages.dim() == 2 else advantages[:, None]


def kl_losses(logp: Tensor, ref_logp: Tensor, ratio: Tensor) -> Tensor:
    """The estimator k3 of KL(policy, reference) [B, T], times r, so that its gradient is that of the reverse KL.

    Sources: http://joschu.net/blog/kl-approx.html; the factor: DeepSeek-V3.2, arXiv:2512.02556.
    """
    difference = ref_logp - logp
    return ratio * (difference.exp() - difference - 1)


def reduce_losses(kind: str, losses: Tensor, mask: Tensor, counts: Counts, max_completion_length: int) -> Tensor:
    """The part of one forward in the loss of a step. max_completion_length: for dr_grpo."""
    losses = torch.where(mask, losses, 0)
    if kind in ("grpo", "gspo", "sapo"):
        return (losses.sum(1) / mask.sum(1).clamp(min=1)).sum() / counts.sequences
    if kind == "bnpo":
        return losses.sum() / mask.sum().clamp(min=1) / counts.forwards
    if kind == "dr_grpo":
        return losses.sum() / (counts.sequences * max_completion_length)
    if kind == "luspo":
        return losses.sum() / counts.sequences
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
