"""Distillation: a model learns the distributions of a teacher over the tokens that the assistant says.

    loss = (1 - hard_weight) JSD_beta(student, teacher) + hard_weight CE(student, labels)

over the tokens of the data (off-policy), or of completions that the student samples (on-policy), both distributions at
`temperature`; see kernels/linear_jsd.py. beta = 1 is the reverse KL, 0 the forward one. The teacher gives hidden states
alone, never all logits. No gradient goes through the sampling, as in GKD.

Papers: Hinton et al., https://arxiv.org/abs/1503.02531; Agarwal et al., https://arxiv.org/abs/2306.13649 (GKD).
Checked against: trl/experimental/gkd/gkd_trainer.py of TRL 1.16.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ligermodels.checkpoint import hub
from ligermodels.errors import InputError
from ligermodels.recipes import formats
from ligermodels.recipes.base import Metrics, Recipe
from ligermodels.recipes.memory import Sizes
from ligermodels.recipes.model import sketch
from ligermodels.recipes.options import groups_of, option
from ligermodels.recipes.packing import Batch
from ligermodels.recipes.rollout import Prompt, RolloutOptions, Sampling
from ligermodels.recipes.rows import Rows
from ligermodels.recipes.teacher import check_teacher, distill_loss, load_teacher


@dataclass(kw_only=True)
class DistillOptions(RolloutOptions):
    recipe = "distill"
    group = "loss"
    # fmt: off
    teacher: str = option("", "repository on the Hub, or folder, of the model to learn from")
    beta: float = option(
        1.0, "of the generalised JSD: 0 forward KL, 1 reverse KL, between them a mixture", least=0, most=1)
    temperature: float = option(1.0, "divides the logits of both", above=0)
    hard_weight: float = option(0.0, "weight of the cross entropy of the examples' own tokens", least=0, below=1)
    lmbda: float = option(
        0.0, "fraction of the steps that train on sampled completions. At 1, rows need no completion of their own",
        least=0, most=1)
    sampling_temperature: float = option(1.0, "divides the logits in sampling; 0: greedy", least=0)
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("teacher")
        if self.tp > 1:
            raise InputError("a teacher is not supported under tensor parallelism: leave --tp out, FSDP shards both")
        if self.lmbda and self.hard_weight:
            raise InputError(
                f"hard_weight={self.hard_weight:g} would teach the model its own samples; leave it out, or --lmbda"
            )
        for field in dataclasses.fields(self):
            samples = groups_of(type(self))[field.name] == "rollout" or field.name == "sampling_temperature"
            if samples and not self.lmbda and getattr(self, field.name) != field.default:
                raise InputError(f"{field.name} is given, but nothing is sampled: add --lmbda 1")

    @property
    def num_generations(self) -> int:  # type: ignore[override]
        return int(self.lmbda > 0)


class Distill(Recipe):
    """Off-policy: rows and their labels are those of sft."""

    Options = DistillOptions

    @classmethod
    def of(cls, options: DistillOptions) -> type[Recipe]:
        return OnPolicy if options.lmbda else cls

    def check_rows(self, rows: Rows, *, is_evaluation: bool = False) -> tuple[str, str] | None:
        check_teacher(hub.resolve(self.options.teacher), self.tokenizer, self.options.max_length)
        return Recipe.check_rows(self, rows)

    def memory(self, sizes: Sizes, sketch_of_model: Any) -> Sizes:
        """The sizes of the model, with the teacher."""
        teacher = sum(p.numel() for p in sketch(hub.resolve(self.options.teacher)).parameters())
        return dataclasses.replace(sizes, frozen=teacher)

    def setup(self, trainer: Any) -> None:
        self.teacher = load_teacher(hub.resolve(self.options.teacher), trainer.processes)

    def loss(self, model: Any, batch: Batch, count: Tensor) -> tuple[Tensor, Metrics]:
        o = self.options
        how: Any = dict(beta=o.beta, temperature=o.temperature, hard_weight=o.hard_weight)
        return distill_loss(model, batch, count, teacher=self.teacher, **how)


class OnPolicy(Sampling, Distill):
    """Rows are prompts, or chats, whose last answer is cut off. Evaluations are off-policy, on the rows' own answers.

    A share `lmbda` of the steps trains on samples, and the others on the rows' own answers.
    """

    def check_rows(self, rows: Rows, *, is_evaluation: bool = False) -> tuple[str, str] | None:
        prompt = rows[0].get("prompt")
        if not is_evaluation:
            check_teacher(hub.resolve(self.options.teacher), self.tokenizer, self.options.max_length)
            self.set_chat(prompt is None or isinstance(prompt, list))
        return None if prompt is not None else formats.detect(rows)

    def process(self, row: Mapping[str, Any]) -> Prompt:
        asked, own = row, None
        if row.get("prompt") is None:
            item = formats.read(row)
            if not isinstance(item, formats.Conversation) or item.images:
                raise InputError("the row has no prompt to sample completions of: a text, or messages without images")
            messages = item.messages[:-1] if item.messages[-1]["role"] == "assistant" else item.messages
            asked = {"prompt": messages, "tools": item.tools}
        if row.get("prompt") is None or row.get("completion") is not None:
            own = Distill.process(self, row)
        if self.options.lmbda < 1 and (own is None or not own.trained):
            raise InputError("the row has no completion, on which some steps train; mend it, or give --lmbda 1")
        prompt = super().process(asked)
        return dataclasses.replace(prompt, where=getattr(row, "where", ""), own=own if own and own.trained else None)

    def batch_size(self, evaluates: bool = False) -> tuple[bool, int]:
        return Distill.batch_size(self) if evaluates else super().batch_size()

    def collate(self, examples: Sequence[Prompt]) -> Batch:
        """Of an evaluation: the rows' own answers."""
        if without := [prompt.where for prompt in examples if prompt.own is None]:
            raise InputError(f"{without[0]}: the row has no completion, and the evaluation is on rows' own completions")
        return super().collate([prompt.own for prompt in examples])

    def show(self, example: Prompt) -> str:
        return super().show(example) if example.own is None else Distill.show(self, example.own)

    def plan(self, steps: int, counts: Mapping[str, int] | None) -> dict[str, str]:
        lines, share = super().plan(steps, counts), self.options.lmbda
        lines["samples"] += f", in {share:.0%} of the steps; the others train on the rows' own" * (share < 1)
        return lines

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        self.vocab_size = self.teacher.vocab_size

    def roll_out(self, prompts: Sequence[Prompt], rollout: int | None) -> list[Any]:
        """On-policy steps are spread evenly; the first is one."""
        share, n = self.options.lmbda, rollout or 0
        if math.ceil((n + 1) * share) == math.ceil(n * share):
            return [prompt.own for prompt in prompts if prompt.own is not None]
        return super().roll_out(prompts, rollout)
