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

import torch
from torch import Tensor

from ligermodels.arch import load
from ligermodels.checkpoint import hub
from ligermodels.errors import InputError
from ligermodels.layers.losses import LinearJSDLoss
from ligermodels.recipes import formats, masking
from ligermodels.recipes.base import Metrics, Recipe
from ligermodels.recipes.memory import Sizes
from ligermodels.recipes.model import sketch
from ligermodels.recipes.options import groups_of, option
from ligermodels.recipes.packing import Batch
from ligermodels.recipes.rollout import Prompt, RolloutOptions, Sampling
from ligermodels.recipes.rows import Rows
from ligermodels.recipes.steps import StepBatches
from ligermodels.text import Tokenizer

_PROBE = "Where's naïve 3.14159 - 12,345  x\n\n\tdef f(x_1): return 'ÄÖ 汉字 🙂' # WHY?! https://a.b/c"


@dataclass(kw_only=True)
class DistillOptions(RolloutOptions):
    recipe = "distill"
    group = "loss"
    teacher: str = option("", "repository on the Hub, or folder, of the model to learn from")
    beta: float = option(
        1.0, "of the generalised JSD: 0 forward KL, 1 reverse KL, between them a mixture", least=0, most=1
    )
    temperature: float = option(1.0, "divides the logits of both", above=0)
    hard_weight: float = option(0.0, "weight of the cross entropy of the examples' own tokens", least=0, below=1)
    lmbda: float = option(
        0.0,
        "fraction of the steps that train on sampled completions. At 1, rows need no completion of their own",
        least=0,
        most=1,
    )
    sampling_temperature: float = option(1.0, "divides the logits in sampling; 0: greedy", least=0)

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
    def num_generations(self) -> int:
        return int(self.lmbda > 0)


class Distill(Sampling):
    """Off-policy, rows are those of sft. On-policy, they are prompts, or chats, whose last answer is cut off."""

    Options = DistillOptions

    def __init__(self, options: DistillOptions, *more: Any) -> None:
        super().__init__(options, *more)
        self.samples = options.lmbda > 0
        self.fewer_examples = Sampling.fewer_examples if self.samples else Recipe.fewer_examples

    # ---- data ----

    def check_rows(self, rows: Rows, *, is_evaluation: bool = False) -> tuple[str, str] | None:
        if not is_evaluation:
            self._check_teacher()
        if not self.samples:
            return Recipe.check_rows(self, rows)
        share, first = self.options.lmbda, rows[0]
        has_prompt = first.get("prompt") is not None
        if (share < 1 or is_evaluation) and has_prompt and first.get("completion") is None:
            what = "the evaluation" if is_evaluation else f"a step that does not sample (lmbda={share:g})"
            raise InputError(f"{rows.where(0)}: the row has no completion, and {what} is on rows' own completions")
        if is_evaluation:
            return Recipe.check_rows(self, rows)
        if share < 1:
            Recipe.check_rows(self, rows)
        self.set_chat(not has_prompt or isinstance(first["prompt"], list))
        return None if has_prompt else formats.detect(rows)

    def _check_teacher(self) -> None:
        """Raises InputError if the teacher's tokens or lengths do not fit."""
        o, folder = self.options, hub.resolve(self.options.teacher)
        check_same_tokens(self.tokenizer, Tokenizer.from_hub(folder))
        config, number = sketch(folder).config.get_text_config(), self.tokenizer.vocab_size
        if config.vocab_size < number:
            raise InputError(f"{o.teacher} has logits for {config.vocab_size} tokens, and the tokenizer has {number}")
        if o.max_length > config.max_position_embeddings:
            raise InputError(
                f"max_length={o.max_length} is more than the {config.max_position_embeddings} positions that the "
                f"teacher was made for; give --max-length {config.max_position_embeddings}"
            )

    def process(self, row: Mapping[str, Any]) -> Any:
        if not self.samples:
            return Recipe.process(self, row)
        asked = row
        if row.get("prompt") is None:
            item = formats.read(row)
            if not isinstance(item, formats.Conversation) or item.images:
                raise InputError("the row has no prompt to sample completions of: a text, or messages without images")
            messages = item.messages[:-1] if item.messages[-1]["role"] == "assistant" else item.messages
            asked = {"prompt": messages, "tools": item.tools}
        prompt = dataclasses.replace(super().process(asked), where=getattr(row, "where", ""))
        if self.options.lmbda == 1:
            return prompt
        own = Recipe.process(self, row)
        if not own.trained:
            raise InputError("the row has no completion, on which some steps train; mend it, or give --lmbda 1")
        return dataclasses.replace(prompt, own=own)

    def process_evaluation(self, row: Mapping[str, Any]) -> Any:
        return Recipe.process(self, row)

    def collate(self, examples: Sequence[Any]) -> Batch:
        return super().collate(examples) if self.samples else Recipe.collate(self, examples)

    def collate_evaluation(self, examples: Sequence[Any]) -> Batch:
        return Recipe.collate(self, examples)

    def batch_size(self, evaluates: bool = False) -> tuple[bool, int]:
        return super().batch_size() if self.samples and not evaluates else Recipe.batch_size(self)

    def show(self, example: Any, colour: bool) -> str:
        own = example.own if isinstance(example, Prompt) else example
        return super().show(example, colour) if own is None else masking.show(own, self.tokenizer, colour)

    # ---- the plan ----

    def memory(self, sizes: Sizes, sketch_of_model: Any) -> Sizes:
        """Those of the model, and beside it the teacher and the KV cache of a rollout."""
        teacher = sum(p.numel() for p in sketch(hub.resolve(self.options.teacher)).parameters())
        return super().memory(dataclasses.replace(sizes, beside=teacher), sketch_of_model)

    def plan(self, rows: int, format: str, counts: Mapping[str, int] | None) -> dict[str, str]:
        if not self.samples:
            return Recipe.plan(self, rows, format, counts)
        lines, share = super().plan(rows, format, counts), self.options.lmbda
        lines["samples"] += f", in {share:.0%} of the steps; the others train on the rows' own" * (share < 1)
        return lines

    # ---- training ----

    def setup(self, trainer: Any) -> None:
        """Loads the teacher, frozen and sharded as the model is; in bf16 on GPUs."""
        super().setup(trainer)
        p = trainer.processes
        where: dict[str, Any] = dict(device=p.device) if p.mesh is None else dict(mesh=p.mesh)
        dtype = torch.bfloat16 if p.device.type == "cuda" else torch.float32
        self.teacher = load(str(hub.resolve(self.options.teacher)), dtype=dtype, **where)
        self.teacher.requires_grad_(False).eval()
        self.vocab_size = self.teacher.vocab_size

    def step_batches(self, batches: StepBatches) -> Any:
        return super().step_batches(batches) if self.samples else batches

    def roll_out(self, prompts: Sequence[Prompt], rollout: int | None) -> list[Any]:
        """On-policy steps are spread evenly; the first is one."""
        share, n = self.options.lmbda, rollout or 0
        if math.ceil((n + 1) * share) == math.ceil(n * share):
            return [prompt.own for prompt in prompts if prompt.own is not None]
        return super().roll_out(prompts, rollout)

    def loss(self, model: Any, batch: Batch, count: Tensor) -> tuple[Tensor, Metrics]:
        o = self.options
        how: Any = dict(beta=o.beta, temperature=o.temperature, hard_weight=o.hard_weight)
        return distill_loss(model, batch, count, teacher=self.teacher, **how)


def distill_loss(
    model: Any, batch: Batch, count: Tensor, *, teacher: Any, beta: float, temperature: float, hard_weight: float
) -> tuple[Tensor, Metrics]:
    """The batch's part of the loss; in evaluation also divergence and cross entropy, separately."""
    metrics: Metrics = {}
    head: list[Any] = []

    def keep(
        x: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None, softcap: float | None, **_: Any
    ) -> Tensor:
        # FSDP keeps the weight of the last group whole until a backward, of which the teacher has none.
        head[:] = x, weight, bias, softcap
        return x.new_zeros((), dtype=torch.float32)

    def divergence(
        x: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None, softcap: float | None,
        workspace_bytes: int | None, num_items_in_batch: Tensor, num_valid: int | None,
    ) -> Tensor:  # fmt: skip
        y, teacher_weight, teacher_bias, teacher_softcap = head
        if (rows := len(teacher_weight)) < len(weight):  # the further rows of the student are padding
            weight, bias = weight[:rows], None if bias is None else bias[:rows]
        workspace: Any = {} if workspace_bytes is None else {"workspace_bytes": workspace_bytes}
        jsd = LinearJSDLoss(
            beta, temperature=temperature, weight_soft=1 - hard_weight, weight_hard=hard_weight, reduction="sum",
            student_softcap=softcap, teacher_softcap=teacher_softcap, return_soft_hard_loss=not model.training,
            **workspace,
        )  # fmt: skip
        found: Any = jsd(
            x, weight, y, teacher_weight, labels, student_bias=bias, teacher_bias=teacher_bias, num_valid=num_valid
        )
        if not model.training:
            number = (labels != -100).sum()
            metrics.update(divergence=(found.soft_loss, number), cross_entropy=(found.hard_loss, number))
            found = found.loss
        return found / num_items_in_batch

    if unread := sorted((model.extra_inputs & batch.keys()) - teacher.extra_inputs):
        raise InputError(
            f"the examples have images ({', '.join(unread)}), which the teacher does not read; give a teacher that does"
        )
    with torch.no_grad():
        teacher(**batch, num_items_in_batch=count, loss_function=keep)
    return model(**batch, num_items_in_batch=count, loss_function=divergence).loss, metrics


def check_same_tokens(student: Tokenizer, teacher: Tokenizer) -> None:
    """Raises InputError if the tokenizers differ in a token or in how they split a text."""
    different = {index for _, index in student.get_vocab().items() ^ teacher.get_vocab().items()}
    if different:
        index = min(different)
        tokens = (tokenizer.convert_ids_to_tokens(index) for tokenizer in (student, teacher))
        one, other = ("no token" if token is None else repr(token) for token in tokens)
        raise InputError(
            f"the teacher has another tokenizer: id {index} is {one} for the model and {other} for the teacher "
            f"({len(different)} ids differ). The two are compared token by token; give a teacher of the same family"
        )
    ours, theirs = (tokenizer.encode(_PROBE, add_special_tokens=False) for tokenizer in (student, teacher))
    if ours != theirs:
        at = next((n for n, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), len(ours))
        raise InputError(
            f"the teacher's tokenizer has the same tokens, but splits {_PROBE!r} differently, from token {at} on; give "
            "a teacher that saw texts split as the model does"
        )
