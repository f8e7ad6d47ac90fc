"""Group relative policy optimisation and its kin: the model samples completions, and reward functions judge them.

The losses are those of layers/policy.py; completions are compared with others of the same prompt.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import InputError, LigermodelsError
from ligermodels.layers import policy
from ligermodels.recipes.base import Metrics, decoder_inputs, next_token_loss, sum_over_ranks
from ligermodels.recipes.masking import IGNORED, Example
from ligermodels.recipes.options import TrainOptions, option, override
from ligermodels.recipes.packing import Batch
from ligermodels.recipes.rewards import Rewards
from ligermodels.recipes.rollout import Completion, Prompt, RolloutOptions, Sampling
from ligermodels.recipes.rows import Rows


@dataclass(kw_only=True)
class GRPOOptions(RolloutOptions):
    recipe = "grpo"
    group = "policy"
    default_rates = (1e-6, 1e-5)
    data: tuple[str, ...] = override(
        TrainOptions, "data", help="the prompts: rows with `prompt`, a text or messages; rewards get the other columns"
    )
    accumulation: int | None = override(TrainOptions, "accumulation", help="the same as --prompts")
    learning_rate: float | None = override(
        TrainOptions, "learning_rate", help="peak learning rate (default 1e-6, with --lora-r 1e-5)"
    )
    # fmt: off
    reward_funcs: tuple[str, ...] = option(
        (), "FILE.py:FUNCTION, or several; reward(prompts, completions, **columns) gives a list of numbers")
    reward_weights: tuple[float, ...] = option((), "weight of each reward in their sum (default 1)")
    scale_rewards: str = option(
        "auto", "what advantages are divided by: the standard deviation of rewards of the same prompt, of all of a "
        "step, or nothing. auto: nothing for dr_grpo, else group", choices=("auto", *policy.SCALES))
    num_generations: int = option(8, "completions of each prompt, which are compared with each other", least=2)
    temperature: float = option(1.0, "divides the logits, in sampling and in the loss", above=0)
    num_iterations: int = option(1, "steps that train on the same completions", least=1)
    mask_truncated_completions: bool = option(
        False, "completions that did not end in --max-completion-length train nothing")
    loss_type: str = option("dapo", "see docs/training.md", choices=policy.LOSSES)
    beta: float = option(
        0.0, "weight of the KL divergence to the model as it was, which is added to the loss", least=0)
    epsilon: float | None = option(None, "ratios below 1 less this are clipped (0.2; gspo 3e-4)", least=0)
    epsilon_high: float | None = option(
        None, "ratios above 1 and this are clipped (--epsilon; without it 0.2, dapo 0.28, gspo 4e-4); of cispo those "
        "above this (5)", least=0)
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("reward_funcs", "FILE.py:FUNCTION")
        if self.reward_weights and len(self.reward_weights) != len(self.reward_funcs):
            raise InputError(
                f"reward_weights: there are {len(self.reward_weights)} for {len(self.reward_funcs)} rewards; give one "
                "each"
            )
        if self.rollout_rows is not None and self.rollout_rows < self.num_generations:
            raise InputError(
                f"rollout_rows={self.rollout_rows} is less than the num_generations={self.num_generations} of a prompt"
            )

    @property
    def compares(self) -> bool:  # type: ignore[override]
        return self.beta > 0

    @property
    def sampling_temperature(self) -> float:  # type: ignore[override]
        return self.temperature

    @property
    def scale(self) -> str:
        """scale_rewards, in place of "auto"."""
        chosen = "none" if self.loss_type == "dr_grpo" else "group"
        return chosen if self.scale_rewards == "auto" else self.scale_rewards

    @property
    def clip(self) -> dict[str, float]:
        """The bounds of ratios, for layers.policy."""
        low = {"gspo": 3e-4}.get(self.loss_type, 0.2) if self.epsilon is None else self.epsilon
        high = {"gspo": 4e-4, "dapo": 0.28, "cispo": 5.0}.get(self.loss_type, 0.2)
        return dict(low=low, high=next(x for x in (self.epsilon_high, self.epsilon, high) if x is not None))


class GRPO(Sampling):
    Options = GRPOOptions
    _has_warned = False
    _deviation = 0.0  # the standard deviation of all rewards of a rollout

    def __init__(self, options: GRPOOptions, tokenizer: Any, multiple: int = 1, rewards: Rewards | None = None) -> None:
        super().__init__(options, tokenizer, multiple)
        self.rewards = rewards or Rewards.load(options.reward_funcs, options.reward_weights)

    def check_rows(self, rows: Rows, *, is_evaluation: bool = False) -> None:
        """The rewards judge an empty completion too, so that their errors come before anything is written."""
        super().check_rows(rows)
        if self.options.skip_bad or is_evaluation:
            return
        try:
            prompt = self.process(rows[0])
        except LigermodelsError as error:
            raise InputError(f"{rows.where(0)}: {error}") from error
        self.judge([Completion(prompt, [self.stop_ids[0]], "", truncated=False)])

    def collate(self, examples: Sequence[Prompt]) -> Batch:
        return self.collate_prompts(examples)

    # ---- rollouts ----

    def judge(self, completions: Sequence[Completion]) -> None:
        """Sets the rewards of completions. Raises InputError."""
        prompts = [one.prompt for one in completions]
        names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
        columns = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
        for taken in ("prompts", "completions", "completion_ids", "completion"):
            columns.pop(taken, None)
        texts: list[Any] = [one.text for one in completions]
        if self.chat:
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        rewards = self.rewards(
            [prompt.prompt for prompt in prompts], texts, [one.ids for one in completions], columns,
            [prompt.where for prompt in prompts],
        )  # fmt: skip
        for one, values in zip(completions, rewards, strict=True):
            one.rewards, one.reward = values, self.rewards.total(values)

    def roll_out(self, prompts: Sequence[Prompt], rollout: int | None) -> list[Completion]:
        """The completions of prompts with rewards and advantages; rollout None: one of each, greedily, with rewards.

        Raises the errors of rewards on all ranks.
        """
        o, p, completions = self.options, self.processes, super().roll_out(prompts, rollout)
        with p.raise_on_all():
            self.judge(completions)
        if rollout is None:
            return completions
        every = [reward for part in p.gather([one.reward for one in completions]) for reward in part]
        rewards = torch.tensor(every).reshape(-1, o.num_generations)
        advantages, tied = policy.group_advantages(rewards, o.scale), (rewards == rewards[:, :1]).all(1)
        if p.is_main and bool(tied.all()) and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "in this step all completions of each prompt have the same reward, so that it teaches nothing, and the "
                "loss is 0. If steps stay so (`tied` in metrics.jsonl): the reward is constant, too hard or too easy, "
                "or the completions are all alike. Next step: look at completions.jsonl; then another reward, other "
                "prompts, a larger --num-generations or a higher --temperature",
                stacklevel=2,
            )
        self._deviation = float(rewards.std())
        first = p.batch_rank * len(completions)
        for n, one in enumerate(completions, first):
            one.advantage = float(advantages.flatten()[n])
            one.is_tied = bool(tied[n // o.num_generations])
        return completions

    def batch_of(self, samples: Sequence[Completion]) -> Batch:
        """A batch of completions after their prompts, packed or padded, with what the loss reads beside it.

        places [N, C] int64: where in the flat log probabilities of the batch those of the completions are, and mask
        [N, C] bool, whether they count. advantages [N]. counts: those of layers.policy. Without completions, all is
        padding.
        """
        dropped = [one.truncated and self.options.mask_truncated_completions for one in samples]
        examples = [one.example for one in samples]
        for n, example in enumerate(examples):
            if dropped[n]:
                examples[n] = Example(example.ids, [IGNORED] * example.size)
        batch = super().batch_of(examples)
        row = batch["input_ids"].shape[1]
        starts = batch["cu_seqlens"].tolist() if self.options.packing else range(0, batch["input_ids"].numel(), row)
        shape = max(1, len(samples)), max((len(one.ids) for one in samples), default=1)
        places, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
        for n, one in enumerate(samples):
            first = starts[n] + len(one.prompt.ids) - 1  # the log probability of a token is where it is predicted
            places[n, : len(one.ids)] = torch.arange(first, first + len(one.ids))
            mask[n, : len(one.ids)] = not dropped[n]
        advantages = torch.tensor([one.advantage for one in samples] or [0.0])
        counts = torch.stack([mask.sum(), torch.tensor(len(samples)), mask.any().long()]).float()
        return batch | dict(places=places, mask=mask, advantages=advantages, counts=counts)

    def metrics_of(self, completions: Sequence[Completion]) -> Metrics:
        number = len(completions)
        metrics: Metrics = {
            "reward": (sum(one.reward for one in completions), number),
            "reward_std": (self._deviation, 1),
            "tied": (sum(one.is_tied for one in completions), number),
            **super().metrics_of(completions),
        }
        for name in self.rewards.functions if len(self.rewards.functions) > 1 else ():
            values = [value for one in completions if (value := one.rewards.get(name)) is not None]
            metrics[f"reward_{name}"] = sum(values), len(values)
        return metrics

    # ---- the loss ----

    def count(self, batch: Batch) -> Tensor:
        """The divisors of a step: those of `layers.policy.Counts`; of an evaluation the number of prompts."""
        if "prompts" not in batch:
            return batch["counts"]
        return (batch["labels"] != -100).any(1).sum().expand(3).float()

    def loss(self, model: Any, batch: Batch, count: Tensor) -> tuple[Tensor, Metrics]:
        """The loss over the completions of a step. In evaluation: minus the mean reward of greedy completions."""
        if not model.training:
            return self._evaluate(model, batch, count)
        o, metrics, counts = self.options, Metrics(), policy.Counts(*count.unbind())
        places, mask, advantages = (batch[name] for name in ("places", "mask", "advantages"))
        ref_logp = self._reference_logps(model, batch) if o.beta else None

        def loss(x: Tensor, weight: Tensor, labels: Tensor, *, num_items_in_batch: Any, **head: Any) -> Tensor:
            found = policy.head_logprobs(x, weight, labels, temperature=o.temperature, **head)
            logp, entropy = (values.reshape(-1)[places] for values in found)
            # The first step of a rollout: what was sampled from is what is trained.
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

    def _reference_logps(self, model: Any, batch: Batch) -> Tensor:
        """[N, C]"""
        found: list[Tensor] = []

        def keep(x: Tensor, weight: Tensor, labels: Tensor, *, num_items_in_batch: Any, **head: Any) -> Tensor:
            logps, _ = policy.head_logprobs(x, weight, labels, temperature=self.options.temperature, **head)
            found.append(logps.reshape(-1)[batch["places"]])
            return logps.new_zeros(())

        with self.reference(model) as reference:
            reference(**decoder_inputs(batch), loss_function=keep)
        return found[0]

    def _evaluate(self, model: Any, batch: Any, count: Tensor) -> tuple[Tensor, Metrics]:
        completions = self.roll_out(batch["prompts"], None)
        counted = (batch["labels"] != -100).any(1)  # in another rank's batch nothing counts
        rewards = torch.tensor([one.reward for one in completions], device=counted.device)
        lengths = torch.tensor([float(len(one.ids)) for one in completions], device=counted.device)
        reward, number = torch.where(counted, rewards, 0).sum(), counted.sum()
        metrics = {"reward": (reward, number), "completion_length": (torch.where(counted, lengths, 0).sum(), number)}
        return sum_over_ranks(model, -reward / count[1]), metrics
