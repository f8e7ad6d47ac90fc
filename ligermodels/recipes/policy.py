"""Policy losses (layers/policy.py) over a batch of completions with advantages; and the evaluation of a policy."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ligermodels.layers import policy
from ligermodels.recipes.base import decoder_inputs, mean_of, next_token_loss, sum_over_ranks
from ligermodels.recipes.examples import Batch, packed_batch
from ligermodels.recipes.rollout import Completion, Prompt, Sampling
from ligermodels.recipes.steps import Metrics


def policy_inputs(batch: Batch, samples: Sequence[Completion]) -> Batch:
    """The tensors that the loss reads beside a packed batch of completions, which are packed in the order of `samples`.

    places [N, C] int64: the index of each completion's tokens in the flat log probabilities of the batch. mask [N, C]
    bool: whether a token counts. advantages [N]. counts: as in layers.policy. Without completions, mask is False
    everywhere.
    """
    starts = batch["cu_seqlens"].tolist()
    shape = max(1, len(samples)), max((len(one.ids) for one in samples), default=1)
    places, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    for n, one in enumerate(samples):
        first = starts[n] + len(one.prompt.ids) - 1  # the log probability of a token is where it is predicted
        places[n, : len(one.ids)] = torch.arange(first, first + len(one.ids))
        mask[n, : len(one.ids)] = one.trains
    advantages = torch.tensor([one.advantage for one in samples] or [0.0])
    counts = torch.stack([mask.sum(), torch.tensor(len(samples)), mask.any().long()]).float()
    return dict(places=places, mask=mask, advantages=advantages, counts=counts)


def policy_loss(model: Any, batch: Batch, count: Tensor, o: Any, ref_logp: Tensor | None) -> tuple[Tensor, Metrics]:
    """The batch's part of the loss. ref_logp [N, C]: from `reference_logprobs`, or None without a beta."""
    metrics, counts = Metrics(), policy.Counts(*count.unbind())
    places, mask, advantages = (batch[name] for name in ("places", "mask", "advantages"))

    def loss(x: Tensor, weight: Tensor, labels: Tensor, *, num_items_in_batch: Any, **head: Any) -> Tensor:
        found = policy.head_logprobs(x, weight, labels, temperature=o.temperature, **head)
        logp, entropy = (values.reshape(-1)[places] for values in found)
        # In the first step of a rollout, the model that sampled is the model that is trained.
        old_logp = batch.setdefault("old_logprobs", logp.detach())
        ratio = policy.ratios(o.loss_type, logp, old_logp, mask)
        losses = policy.token_losses(o.loss_type, logp, ratio, advantages, **o.clip)
        tokens = mask.sum()
        if ref_logp is not None:
            kl = policy.kl_losses(logp, ref_logp, ratio)
            losses = losses + o.beta * kl
            metrics["kl"] = torch.where(mask, kl.detach(), 0).sum(), tokens
        is_clipped = policy.is_clipped(o.loss_type, ratio.detach(), advantages, **o.clip) & mask
        metrics["clipped"] = is_clipped.sum(), tokens
        metrics["entropy"] = torch.where(mask, entropy.detach(), 0).sum(), tokens
        return policy.reduce_losses(o.loss_type, losses, mask, counts, o.max_completion_length)

    total = next_token_loss(model, decoder_inputs(batch) | {"loss_function": loss}, counts.tokens)
    return total, metrics


def reference_logprobs(reference: Any, batch: Batch, temperature: float) -> Tensor:
    """The log probabilities [N, C] of the completions under a model that is not trained."""
    found: list[Tensor] = []

    def keep(x: Tensor, weight: Tensor, labels: Tensor, *, num_items_in_batch: Any, **head: Any) -> Tensor:
        logps, _ = policy.head_logprobs(x, weight, labels, temperature=temperature, **head)
        found.append(logps.reshape(-1)[batch["places"]])
        return logps.new_zeros(())

    reference(**decoder_inputs(batch), loss_function=keep)
    return found[0]


class Greedy(Sampling):
    """The recipe that evaluates GRPO: its loss is minus the mean reward of greedy completions. grpo: gives rewards."""

    def __init__(self, grpo: Any) -> None:
        super().__init__(grpo.options, grpo.tokenizer, grpo.multiple)
        self.grpo = grpo

    @property
    def capacity(self) -> int:
        return int(self.options.rows_at_once)

    def collate(self, examples: Sequence[Prompt]) -> Batch:
        """The prompts, with their ids as labels. A batch of another rank has no labels, and does not count."""
        return packed_batch(examples, self.pad_id) | {"prompts": list(examples)}

    def count(self, batch: Batch) -> Tensor:
        return len(batch["prompts"]) * (batch["labels"] != -100).any().float()

    def loss(self, model: Any, batch: Batch, count: Tensor) -> tuple[Tensor, Metrics]:
        found = self.grpo.roll_out(batch["prompts"], None)
        counted = (batch["labels"] != -100).any().expand(len(found))
        rewards, lengths = torch.tensor([(one.reward, float(len(one.ids))) for one in found]).to(counted.device).T
        metrics: Metrics = {"reward": mean_of(rewards, counted), "completion_length": mean_of(lengths, counted)}
        return sum_over_ranks(model, -torch.where(counted, rewards, 0).sum() / count), metrics
