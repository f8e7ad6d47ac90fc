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
from ligermodels.recipes import formats
from ligermodels.recipes.base import Metrics, Recipe
from ligermodels.recipes.memory import Sizes
from ligermodels.recipes.model import sketch
from ligermodels.recipes.options import groups_of, option
from ligermodels.recipes.packing import Batch
from ligermodels.recipes.rollout import Prompt, RolloutOptions, Sampling
from ligermodels.recipes.rows import Rows
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
    def num_generations(self) -> int:  # type: ignore[override]
        return int(self.lmbda > 0)


class Distill(Recipe):
    """Off-policy: rows and their labels are those of sft."""

    Options = DistillOptions

    @classmethod
    def of(cls, options: DistillOptions) -> type[Recipe]:
        return OnPolicy if options.lmbda else cls

    def check_rows(self, rows: Rows, *, is_evaluation: bool = False) -> tuple[str, str] | None:
        if not is_evaluation:
            self.check_teacher()
        return super().check_rows(rows)

    def check_teacher(self) -> None:
        """Raises InputError if the teacher's tokens or lengths do not fit."""
        o, folder = self.options, hub.resolve(self.options.teacher)
        check_same_tokens(self.tokenizer, Tokenizer.from_hub(folder))
        config, number = sketch(folder).config.get_text_config(), self.tokenizer.vocab_size
        if config.vocab_size < number:
            raise InputError(f"{o.teacher} has logits for {config.vocab_size} tokens, and the tokenizer has {number}")
        if o.max_length > config.max_position_embeddings:
            raise InputError(
                f"max_length={o.max_length} is more than the teacher's {config.max_position_embeddings} positions; "
                f"give --max-length {config.max_position_embeddings}"
            )

    def memory(self, sizes: Sizes, sketch_of_model: Any) -> Sizes:
        """The sizes of the model, with the teacher."""
        teacher = sum(p.numel() for p in sketch(hub.resolve(self.options.teacher)).parameters())
        return dataclasses.replace(sizes, frozen=teacher)

    def setup(self, trainer: Any) -> None:
        """Loads the teacher, frozen and sharded as the model is; in bf16 on GPUs."""
        p = trainer.processes
        where: dict[str, Any] = dict(device=p.device) if p.mesh is None else dict(mesh=p.mesh)
        dtype = torch.bfloat16 if p.device.type == "cuda" else torch.float32
        self.teacher = load(str(hub.resolve(self.options.teacher)), dtype=dtype, **where)
        self.teacher.requires_grad_(False).eval()

    def loss(self, model: Any, batch: Batch, count: Tensor) -> tuple[Tensor, Metrics]:
        o = self.options
        how: Any = dict(beta=o.beta, temperature=o.temperature, hard_weight=o.hard_weight)
        return distill_loss(model, batch, count, teacher=self.teacher, **how)


class OnPolicy(Sampling, Distill):
    """Rows are prompts, or chats, whose last answer is cut off. Evaluations are off-policy, on the rows' own answers.

    A share `lmbda` of the steps trains on samples, and the others on the rows' own answers.
    """

    def check_rows(self, rows: Rows, *, is_evaluation: bool = False) -> tuple[str, str] | None:
        share, first = self.options.lmbda, rows[0]
        has_prompt = first.get("prompt") is not None
        if (share < 1 or is_evaluation) and has_prompt and first.get("completion") is None:
            what = "the evaluation" if is_evaluation else f"a step that does not sample (lmbda={share:g})"
            raise InputError(f"{rows.where(0)}: the row has no completion, and {what} is on rows' own completions")
        if share < 1 or is_evaluation:
            found = Distill.check_rows(self, rows, is_evaluation=is_evaluation)
            if is_evaluation:
                return found
        else:
            self.check_teacher()
        self.set_chat(not has_prompt or isinstance(first["prompt"], list))
        return None if has_prompt else formats.detect(rows)

    def process(self, row: Mapping[str, Any]) -> Prompt:
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
        own = Distill.process(self, row)
        if not own.trained:
            raise InputError("the row has no completion, on which some steps train; mend it, or give --lmbda 1")
        return dataclasses.replace(prompt, own=own)

    def process_evaluation(self, row: Mapping[str, Any]) -> Any:
        return Distill.process(self, row)

    def collate_evaluation(self, examples: Sequence[Any]) -> Batch:
        return Distill.collate(self, examples)

    def batch_size(self, evaluates: bool = False) -> tuple[bool, int]:
        return Distill.batch_size(self) if evaluates else super().batch_size()

    def show(self, example: Prompt, colour: bool) -> str:
        return super().show(example, colour) if example.own is None else Distill.show(self, example.own, colour)

    def plan(self, rows: int, format: str, counts: Mapping[str, int] | None) -> dict[str, str]:
        lines, share = super().plan(rows, format, counts), self.options.lmbda
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
