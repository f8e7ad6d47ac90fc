"""Group relative policy optimisation and its kin: the model samples completions, and reward functions judge them."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ligermodels.layers import policy
from ligermodels.processes import Processes
from ligermodels.recipes import memory
from ligermodels.recipes.loop import Batch, Sums, next_token_loss
from ligermodels.recipes.options import GRPOOptions
from ligermodels.recipes.preference import over_ranks
from ligermodels.recipes.rewards import Rewards
from ligermodels.recipes.rollout import Completion, PromptData, Rollouts, Sampler, cache_size, policy_batch, told_names
from ligermodels.recipes.run import Recipe, run
from ligermodels.text import Tokenizer

__all__ = ["RECIPE", "GRPOOptions", "PolicyLoss", "train"]


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """The loss over the completions of a step, by the log probabilities of the forward that trains.

    In evaluation: minus the mean reward of greedy completions. reference: the model as it was, or None; without
    adapters, which are switched off for it.
    """

    options: GRPOOptions
    sampler: Sampler
    reference: Any = None

    def __call__(self, model: Any, batch: Batch, count: Tensor) -> tuple[Tensor, Sums]:
        if not model.training:
            return self._evaluated(model, batch, count)
        o, sums, counts = self.options, Sums(), policy.Counts(*count.unbind())
        places, mask, advantages = batch["places"], batch["mask"], batch["advantages"]
        ref_logp = self._reference_logprobs(model, batch) if o.beta else None
        clip: dict[str, float] = dict(low=o.low, high=o.high)

        def loss(x: Tensor, weight: Tensor, labels: Tensor, *, num_items_in_batch: Any, **head: Any) -> Tensor:
            found = policy.head_logprobs(x, weight, labels, temperature=o.temperature, **head)
            logp, entropy = (values.reshape(-1)[places] for values in found)
            # The first step of a rollout: what was sampled from is what is trained.
            old_logp = batch.setdefault("old_logprobs", logp.detach())
            ratio = policy.ratios(o.loss_type, logp, old_logp, mask)
            losses = policy.token_losses(o.loss_type, logp, ratio, advantages, **clip)
            tokens = mask.sum()
            if ref_logp is not None:
                kl = policy.kl_losses(logp, ref_logp, ratio)
                losses = losses + o.beta * kl
                sums["kl"] = torch.where(mask, kl.detach(), 0).sum(), tokens
            is_clipped = policy.is_clipped(o.loss_type, ratio.detach(), advantages, **clip) & mask
            sums["clipped"] = is_clipped.sum(), tokens
            sums["entropy"] = torch.where(mask, entropy.detach(), 0).sum(), tokens
            return policy.reduce_losses(o.loss_type, losses, mask, counts, o.max_completion_length)

        total = next_token_loss(model, _inputs(batch) | {"loss_function": loss}, counts.tokens)
        for name, row in zip(told_names(self.sampler.rewards), batch["told"].unbind(), strict=True):
            sums[name] = row[0], row[1]
        return total, sums

    def _reference_logprobs(self, model: Any, batch: Batch) -> Tensor:
        """[N, C]"""
        found: list[Tensor] = []

        def keep(x: Tensor, weight: Tensor, labels: Tensor, *, num_items_in_batch: Any, **head: Any) -> Tensor:
            logprobs, _ = policy.head_logprobs(x, weight, labels, temperature=self.options.temperature, **head)
            found.append(logprobs.reshape(-1)[batch["places"]])
            return logprobs.new_zeros(())

        with torch.no_grad(), contextlib.nullcontext() if self.reference is not None else _without_adapters(model):
            (self.reference or model)(**_inputs(batch), loss_function=keep)
        return found[0]

    def _evaluated(self, model: Any, batch: Batch, count: Tensor) -> tuple[Tensor, Sums]:
        completions = self.sampler(model, batch["prompts"], None)
        counted = (batch["labels"] != -100).any(1)  # of other ranks' batches once more, nothing counts
        rewards = torch.tensor([one.reward for one in completions], device=counted.device)
        lengths = torch.tensor([float(len(one.ids)) for one in completions], device=counted.device)
        reward, number = torch.where(counted, rewards, 0).sum(), counted.sum()
        sums = {"reward": (reward, number), "completion_length": (torch.where(counted, lengths, 0).sum(), number)}
        return over_ranks(model, -reward / count[1]), sums


def policy_counts(batch: Batch) -> Tensor:
    """The divisors of a step: those of `layers.policy.Counts`; of an evaluation the number of prompts."""
    if "prompts" not in batch:
        return batch["counts"]
    return (batch["labels"] != -100).any(1).sum().expand(3).float()


def _inputs(batch: Batch) -> Batch:
    names = ("input_ids", "labels", "attention_mask", "cu_seqlens", "max_seqlen")
    return {name: batch[name] for name in names if name in batch}


def _without_adapters(model: Any) -> contextlib.AbstractContextManager[Any]:
    from ligermodels.training.lora import adapters_off

    return adapters_off(model)


def _open_data(options: GRPOOptions, tokenizer: Tokenizer, multiple: int = 1) -> PromptData:
    """The prompts, once the rewards have judged an empty completion, so that errors come before anything is written."""
    rewards, data = Rewards.load(options.reward_funcs, options.reward_weights), PromptData(options, tokenizer, multiple)
    if not options.skip_bad:
        empty = Completion(data.first(), [data.encoder.stop_ids[0]], "", truncated=False)
        Sampler(options, data.encoder, rewards, Processes(torch.device("cpu"))).judge([empty])
    return data


def _sizes(options: GRPOOptions, sizes: memory.Sizes, sketch: Any) -> memory.Sizes:
    """Those of the model, and the KV cache of a rollout of all GPUs."""
    return dataclasses.replace(sizes, beside=cache_size(options, sketch))


def _make_loss(
    options: GRPOOptions, model: Any, data: PromptData, processes: Processes, load: Callable[[], Any]
) -> PolicyLoss:
    rewards = Rewards.load(options.reward_funcs, options.reward_weights)
    return PolicyLoss(
        options, Sampler(options, data.encoder, rewards, processes), load() if options.frozen_copies else None
    )


def _make_feed(feed: Any, model: Any, loss: Any) -> Rollouts:
    o, sampler = loss.options, loss.sampler
    pad_id = sampler.encoder.stop_ids[0]
    return Rollouts(
        feed, model, o, sampler, lambda some, seconds: policy_batch(some, o, sampler.rewards, pad_id, seconds)
    )


RECIPE = Recipe(
    open_data=_open_data,  # type: ignore[arg-type]
    count=policy_counts,
    sizes=_sizes,
    make_loss=_make_loss,
    make_feed=_make_feed,
)


def train(options: GRPOOptions) -> int:
    """Trains a model to complete prompts so that reward functions give more. Returns the exit status."""
    return run(options, RECIPE)
