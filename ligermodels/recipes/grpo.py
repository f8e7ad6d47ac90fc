"""Group relative policy optimisation and its variants: the model samples completions, and reward functions judge them.

The losses are those of layers/policy.py; completions are compared with others of the same prompt.

With router_replay the tokens of a step take the experts that they took in the rollout, in every block: "rollout routing
replay" of https://arxiv.org/abs/2510.11370. The weights of these experts, with gradients, are those of the step's own
router. So the step differentiates the policy that sampled, whatever rounding does to the order of close scores.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.layers import policy
from ligermodels.processes import Processes
from ligermodels.recipes.base import decoder_inputs, next_token_loss, sum_over_ranks
from ligermodels.recipes.data.examples import Batch, packed_batch
from ligermodels.recipes.recipe_options import GRPOOptions
from ligermodels.recipes.report import say
from ligermodels.recipes.rewards import Rewards
from ligermodels.recipes.rollout import Completion, Prompt, Sampling
from ligermodels.recipes.steps import Metrics


class GRPO(Sampling):
    Options = GRPOOptions
    _has_warned = False  # of rewards that are all the same
    _deviation = 0.0  # the standard deviation of all rewards of a rollout

    def __init__(
        self, options: GRPOOptions, tokenizer: Any, processes: Processes | None = None, rewards: Rewards | None = None
    ) -> None:
        super().__init__(options, tokenizer, processes)
        self.rewards = rewards or Rewards.load(
            options.reward_funcs, options.reward_weights, options.objects.get("rewards")
        )
        self.evaluation = Greedy(self)

    @property
    def keeps_experts(self) -> bool:  # type: ignore[override]
        return bool(self.options.router_replay)

    def setup(self, model: Any, folder: Path, processes: Processes) -> None:
        if self.keeps_experts and not getattr(model.decoder.config, "num_experts_per_tok", 0):
            raise InputError(f"router_replay: {type(model).__name__} has no router; leave it out")
        super().setup(model, folder, processes)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "rewards"}

    def roll_out(self, prompts: Sequence[Prompt], rollout: int | None) -> list[Completion]:
        """As in Sampling, with rewards, and with advantages unless rollout is None.

        Raises the errors of rewards on all ranks.
        """
        o, p, completions = self.options, self.processes, super().roll_out(prompts, rollout)
        with p.raise_on_all():
            self.rewards.judge(completions, chat=self.chat)
        if rollout is None:
            return completions
        of_ranks = p.gather([completion.reward for completion in completions])
        rewards = torch.tensor([reward for of_rank in of_ranks for reward in of_rank]).reshape(-1, o.num_generations)
        advantages, self._deviation = policy.group_advantages(rewards, o.scale_rewards).flatten(), float(rewards.std())
        tied = (rewards == rewards[:, :1]).all(1)
        if tied.all() and p.is_main and not self._has_warned:
            self._has_warned = True
            say(
                "warning: the rewards prefer no completion of this step to another of the same prompt, so that it "
                "learns nothing from them; `tied` in metrics.jsonl is the share of such prompts"
            )
        for n, completion in enumerate(completions, p.batch_rank * len(completions)):
            completion.advantage, completion.is_tied = float(advantages[n]), bool(tied[n // o.num_generations])
        return completions

    def batch_of(self, completions: Sequence[Completion]) -> Batch:
        if self.options.mask_truncated_completions:
            completions = [dataclasses.replace(sample, trains=not sample.truncated) for sample in completions]
        batch = super().batch_of(completions)
        if self.keeps_experts and completions:
            batch |= {"experts": packed_experts(batch, completions)}
        return batch | policy_inputs(batch, completions)

    def metrics_of(self, completions: Sequence[Completion]) -> Metrics:
        number = len(completions)
        metrics: Metrics = {
            "reward": (sum(completion.reward for completion in completions), number),
            "reward_std": (self._deviation, 1),
            "tied": (sum(completion.is_tied for completion in completions), number),
            **super().metrics_of(completions),
        }
        for name in self.rewards.functions if len(self.rewards.functions) > 1 else ():
            values = [value for completion in completions if (value := completion.rewards.get(name)) is not None]
            metrics[f"reward_{name}"] = sum(values), len(values)
        return metrics

    def count(self, batch: Batch) -> Tensor:
        """The divisors of a step, as in `layers.policy.Counts`."""
        return batch["counts"]

    def loss(self, model: Any, batch: Batch, count: Tensor) -> tuple[Tensor, Metrics]:
        reference = None
        if self.options.beta:
            with self.reference(model) as before:
                reference = reference_logprobs(before, batch, self.options.temperature)
        return policy_loss(model, batch, count, self.options, reference)


# ---- the policy loss of a batch ----


def policy_inputs(batch: Batch, samples: Sequence[Completion]) -> Batch:
    """The tensors that the loss reads beside a packed batch of completions, which are packed in the order of `samples`.

    places [N, C] int64: the index of each completion's tokens in the flat log probabilities of the batch. mask [N, C]
    bool: whether a token counts. advantages [N]. counts: as in layers.policy. Without completions, mask is False
    everywhere.
    """
    starts = batch["cu_seqlens"].tolist()
    shape = max(1, len(samples)), max((len(sample.ids) for sample in samples), default=1)
    places, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    for n, sample in enumerate(samples):
        first = starts[n] + len(sample.prompt.ids) - 1  # the log probability of a token is where it is predicted
        places[n, : len(sample.ids)] = torch.arange(first, first + len(sample.ids))
        mask[n, : len(sample.ids)] = sample.trains
    advantages = torch.tensor([sample.advantage for sample in samples] or [0.0])
    counts = torch.stack([mask.sum(), torch.tensor(len(samples)), mask.any().long()]).float()
    return dict(places=places, mask=mask, advantages=advantages, counts=counts)


def packed_experts(batch: Batch, samples: Sequence[Completion]) -> Tensor:
    """The experts [layers, T, top_k] that the tokens of a packed batch took in the rollout.

    -1, the router's choice, for the last token of each completion, which no forward of the rollout read, and for
    padding.
    """
    taken: list[Any] = [sample.experts for sample in samples]
    layers, top_k = taken[0].shape[1:]
    experts = torch.full((batch["input_ids"].numel(), layers, top_k), -1, dtype=torch.int16)
    for first, rows in zip(batch["cu_seqlens"].tolist(), taken, strict=False):
        experts[first : first + len(rows)] = rows
    return experts.transpose(0, 1).contiguous()


def policy_loss(
    model: Any, batch: Batch, count: Tensor, options: Any, ref_logp: Tensor | None
) -> tuple[Tensor, Metrics]:
    """The batch's part of the loss. ref_logp [N, C]: from `reference_logprobs`, or None without a beta."""
    metrics, counts = Metrics(), policy.Counts(*count.unbind())
    places, mask, advantages = (batch[name] for name in ("places", "mask", "advantages"))

    def loss(x: Tensor, weight: Tensor, labels: Tensor, *, num_items_in_batch: Any, **head: Any) -> Tensor:
        per_token = policy.head_logprobs(x, weight, labels, temperature=options.temperature, **head)
        logp, entropy = (values.reshape(-1)[places] for values in per_token)
        # In the first step of a rollout, the model that sampled is the model that is trained.
        old_logp = batch.setdefault("old_logprobs", logp.detach())
        ratio = policy.ratios(options.loss_type, logp, old_logp, mask)
        losses = policy.token_losses(options.loss_type, logp, ratio, advantages, **options.clip, **options.weights)
        tokens = mask.sum()
        if ref_logp is not None:
            kl = policy.kl_losses(logp, ref_logp, ratio)
            losses = losses + options.beta * kl
            metrics["kl"] = torch.where(mask, kl.detach(), 0).sum(), tokens
        if options.loss_type not in policy.SOFT:
            is_clipped = policy.is_clipped(options.loss_type, ratio.detach(), advantages, **options.clip) & mask
            metrics["clipped"] = is_clipped.sum(), tokens
        elif options.loss_type == "vespo":
            weights = policy.gamma_weights(ratio, advantages, options.weights["gammas"])
            metrics["vespo_weight"] = torch.where(mask, weights, 0).sum(), tokens
        metrics["entropy"] = torch.where(mask, entropy.detach(), 0).sum(), tokens
        return policy.reduce_losses(options.loss_type, losses, mask, counts, options.max_completion_length)

    total = next_token_loss(model, decoder_inputs(batch) | {"loss_function": loss}, counts.tokens)
    return total, metrics


def reference_logprobs(reference: Any, batch: Batch, temperature: float) -> Tensor:
    """The log probabilities [N, C] of the completions under a model that is not trained."""
    logprobs: list[Tensor] = []

    def keep(x: Tensor, weight: Tensor, labels: Tensor, *, num_items_in_batch: Any, **head: Any) -> Tensor:
        logps, _ = policy.head_logprobs(x, weight, labels, temperature=temperature, **head)
        logprobs.append(logps.reshape(-1)[batch["places"]])
        return logps.new_zeros(())

    inputs = {name: x for name, x in decoder_inputs(batch).items() if name != "experts"}  # it has its own choice
    reference(**inputs, loss_function=keep)
    return logprobs[0]


class Greedy(Sampling):
    """The recipe that evaluates GRPO: its loss is minus the mean reward of greedy completions. grpo: gives rewards."""

    def __init__(self, grpo: Any) -> None:
        super().__init__(grpo.options, grpo.tokenizer, grpo.processes)
        self.grpo = grpo

    @property
    def capacity(self) -> int:
        return int(self.options.rows_at_once)

    def collate(self, examples: Sequence[Prompt]) -> Batch:
        return packed_batch(examples, self.pad_id) | {"prompts": list(examples)}

    def count(self, batch: Batch) -> Tensor:
        return torch.tensor(len(batch["prompts"]))

    def loss(self, model: Any, batch: Batch, count: Tensor) -> tuple[Tensor, Metrics]:
        completions = self.grpo.roll_out(batch["prompts"], None)
        reward = sum(completion.reward for completion in completions)
        length, number = sum(len(completion.ids) for completion in completions), len(completions)
        metrics: Metrics = {"reward": (reward, number), "completion_length": (length, number)}
        return sum_over_ranks(model, -reward / count), metrics
