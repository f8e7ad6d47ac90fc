"""Distillation: a model learns the distributions of a teacher over the tokens that the assistant says.

    loss = (1 - hard_weight) JSD_beta(student, teacher) + hard_weight CE(student, labels)

over the tokens of the data (off-policy), or of completions that the student samples (on-policy), both distributions at
`temperature`; see kernels/linear_jsd.py. beta = 1 is the reverse KL, 0 the forward one. Of the teacher there are hidden
states alone, never all logits. No gradient goes through the sampling, as in GKD.

Papers: Hinton et al., https://arxiv.org/abs/1503.02531; Agarwal et al., https://arxiv.org/abs/2306.13649 (GKD).
Checked against: trl/experimental/gkd/gkd_trainer.py of TRL 1.16.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligermodels.arch import arch_of, load
from ligermodels.arch.pretrained import config_values
from ligermodels.checkpoint import hub
from ligermodels.errors import InputError
from ligermodels.layers.losses import LinearJSDLoss
from ligermodels.processes import Processes
from ligermodels.recipes import memory
from ligermodels.recipes.batches import Batches
from ligermodels.recipes.data import Data
from ligermodels.recipes.formats import Conversation, Format, detect, normalise
from ligermodels.recipes.loop import Batch, Loss, Sums
from ligermodels.recipes.masking import Encoder, Example, show
from ligermodels.recipes.options import DistillOptions
from ligermodels.recipes.rollout import (
    TOLD,
    Completion,
    Prompt,
    PromptData,
    PromptEncoder,
    Rollouts,
    cache_size,
    complete,
    forward_of,
    told_rows,
)
from ligermodels.recipes.rows import Rows
from ligermodels.recipes.run import Recipe, run
from ligermodels.text import Tokenizer

__all__ = ["DistillOptions", "train"]

_PROBE = "Where's naïve 3.14159 - 12,345  x\n\n\tdef f(x_1): return 'ÄÖ 汉字 🙂' # WHY?! https://a.b/c"


def train(options: DistillOptions) -> int:
    """Trains a model to predict what its teacher predicts. Returns the exit status."""
    make_feed = _make_feed if options.lmbda else None
    return run(
        options,
        Recipe(open_data=_open_data, sizes=_sizes, make_loss=_make_loss, make_feed=make_feed),  # type: ignore[arg-type]
    )


def distill_loss(
    model: Any, batch: Batch, count: Tensor, *, teacher: Any, beta: float, temperature: float, hard_weight: float
) -> Tensor | tuple[Tensor, Sums]:
    """The batch's part of the loss; in evaluation also divergence and cross entropy, each by itself."""
    sums: Sums = {}
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
        if (rows := len(teacher_weight)) < len(weight):  # what the student has more is padding
            weight, bias = weight[:rows], None if bias is None else bias[:rows]
        room: Any = {} if workspace_bytes is None else {"workspace_bytes": workspace_bytes}
        jsd = LinearJSDLoss(
            beta, temperature=temperature, weight_soft=1 - hard_weight, weight_hard=hard_weight, reduction="sum",
            student_softcap=softcap, teacher_softcap=teacher_softcap, return_soft_hard_loss=not model.training,
            **room,
        )  # fmt: skip
        found: Any = jsd(
            x, weight, y, teacher_weight, labels, student_bias=bias, teacher_bias=teacher_bias, num_valid=num_valid
        )
        if not model.training:
            number = (labels != -100).sum()
            sums.update(divergence=(found.soft_loss, number), cross_entropy=(found.hard_loss, number))
            found = found.loss
        return found / num_items_in_batch

    if unread := sorted((model.extra_inputs & batch.keys()) - teacher.extra_inputs):
        raise InputError(
            f"the examples have images ({', '.join(unread)}), which the teacher does not read; give a teacher that does"
        )
    with torch.no_grad():
        teacher(**batch, num_items_in_batch=count, loss_function=keep)
    loss = model(**batch, num_items_in_batch=count, loss_function=divergence).loss
    return (loss, sums) if sums else loss


def check_same_tokens(student: Tokenizer, teacher: Tokenizer) -> None:
    """Raises InputError where the tokenizers differ in a token or in how they split a text, saying in what."""
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    if ours != theirs:
        different = {index for _, index in ours.items() ^ theirs.items()}
        index = min(different)
        one, other = (
            repr(token) if (token := tokenizer.convert_ids_to_tokens(index)) is not None else "no token"
            for tokenizer in (student, teacher)
        )
        raise InputError(
            f"the teacher has another tokenizer: id {index} is {one} for the model and {other} for the teacher "
            f"({len(different)} ids differ). The two are compared token by token; give a teacher of the same family"
        )
    split = [tokenizer.encode(_PROBE, add_special_tokens=False) for tokenizer in (student, teacher)]
    if split[0] != split[1]:
        at = next((n for n, pair in enumerate(zip(*split, strict=False)) if pair[0] != pair[1]), min(map(len, split)))
        raise InputError(
            f"the teacher's tokenizer has the same tokens, but splits {_PROBE!r} otherwise, from token {at} on; give a "
            "teacher that saw texts split as the model does"
        )


def _sketch(folder: Path) -> Any:
    return arch_of(folder).from_config(config_values(folder, None), device="meta")


def _open_data(options: DistillOptions, tokenizer: Tokenizer, multiple: int = 1) -> Data:
    """The data, once the teacher is found to fit."""
    folder = hub.resolve(options.teacher)
    check_same_tokens(tokenizer, Tokenizer.from_hub(folder))
    config = _sketch(folder).config.get_text_config()
    if config.vocab_size < tokenizer.vocab_size:
        raise InputError(
            f"{options.teacher} has logits for {config.vocab_size} tokens, and the tokenizer has {tokenizer.vocab_size}"
        )
    if options.max_length is not None and options.max_length > config.max_position_embeddings:
        raise InputError(
            f"max_length={options.max_length} is more than the {config.max_position_embeddings} positions that the "
            f"teacher was made for; give --max-length {config.max_position_embeddings}"
        )
    return (OnPolicyData if options.lmbda else Data)(options, tokenizer, multiple)


def _sizes(options: DistillOptions, sizes: memory.Sizes, sketch: Any) -> memory.Sizes:
    """Those of the model, and beside it the teacher and the KV cache of a rollout."""
    teacher = sum(p.numel() for p in _sketch(hub.resolve(options.teacher)).parameters())
    return dataclasses.replace(sizes, beside=teacher + cache_size(options, sketch))


def _make_loss(options: DistillOptions, model: Any, data: Data, processes: Processes, load_frozen: Any) -> Loss:
    """The loss with the teacher, frozen and sharded as the model is; in bf16 on GPUs."""
    gpu = processes.device.type == "cuda"
    where: dict[str, Any] = dict(device=processes.device) if processes.mesh is None else dict(mesh=processes.mesh)
    teacher = load(str(hub.resolve(options.teacher)), dtype=torch.bfloat16 if gpu else torch.float32, **where)
    teacher.requires_grad_(False).eval()
    how: dict[str, Any] = dict(beta=options.beta, temperature=options.temperature, hard_weight=options.hard_weight)
    loss = functools.partial(distill_loss, teacher=teacher, **how)
    if not options.lmbda:
        return loss
    assert isinstance(data, OnPolicyData)
    return OnPolicyLoss(options, data.encoder, processes, loss, teacher.vocab_size)


def _make_feed(feed: Any, model: Any, loss: Any) -> Rollouts:
    return Rollouts(feed, model, loss.options, loss.rollout, loss.batch)


# ---- on-policy ----


@dataclasses.dataclass(frozen=True)
class OnPolicyEncoder(PromptEncoder):
    """Makes Prompts of rows with `prompt`, or of chats: the messages before the last answer.

    format: that of chats. examples: makes the row's own completion; None where no step trains on it.
    """

    format: Format | None = None
    examples: Encoder | None = None

    def __call__(self, row: Mapping[str, Any]) -> Prompt:
        prompt = super().__call__(row if self.format is None else self._asked(row))
        own = None if self.examples is None else self.examples(row)
        if own is not None and not own.trained:
            raise InputError("the row has no completion, on which some steps train; mend it, or give --lmbda 1")
        return dataclasses.replace(prompt, where=getattr(row, "where", ""), own=own)

    def _asked(self, row: Mapping[str, Any]) -> dict[str, Any]:
        assert self.format is not None
        item = normalise(row, self.format)
        if not isinstance(item, Conversation) or item.images:
            raise InputError("the row has no prompt to sample completions of: a text, or messages without images")
        messages = item.messages[:-1] if item.messages[-1]["role"] == "assistant" else item.messages
        return {"prompt": messages, "tools": item.tools}


class OnPolicyData(PromptData):
    """Prompts to train on. What is evaluated on are rows as sft takes them."""

    _options: DistillOptions

    def _encoder_of(self, rows: Rows, tokenizer: Tokenizer) -> Any:
        share, first, examples = self._options.lmbda, rows[0], None
        has_prompt = first.get("prompt") is not None
        if share < 1 or rows is self._eval:
            if has_prompt and first.get("completion") is None:
                what = "the evaluation" if rows is self._eval else f"a step that does not sample (lmbda={share:g})"
                raise InputError(f"{rows.where(0)}: the row has no completion, and {what} is on rows' own completions")
            examples = Data._encoder_of(self, rows, tokenizer)
        if rows is self._eval:
            return examples
        format = None if has_prompt else detect(rows)
        chat = not has_prompt or isinstance(first["prompt"], list)
        return self._that_ends(OnPolicyEncoder(tokenizer, chat, self._options.max_completion_length, format, examples))

    def _batches(self, rows: Rows, **options: Any) -> Batches:
        return (Data if rows is self._eval else PromptData)._batches(self, rows, **options)

    def _show(self, example: Prompt, *, colour: bool) -> str:
        shown = super()._show(example, colour=colour)
        return shown if example.own is None else show(example.own, self.encoder.tokenizer, colour)

    def plan(self, counts: Mapping[str, int] | None) -> dict[str, str]:
        lines = super().plan(counts)
        share = f", in {self._options.lmbda:.0%} of the steps; the others train on the rows' own"
        return lines | {"samples": lines["samples"] + share * (self._options.lmbda < 1)}


@dataclasses.dataclass(frozen=True)
class OnPolicyLoss:
    """The loss, and the batches that it is of. vocab_size: that of the teacher, which knows no other ids."""

    options: DistillOptions
    encoder: PromptEncoder
    processes: Processes
    loss: Loss
    vocab_size: int

    def __call__(self, model: Any, batch: Batch, count: Tensor) -> Tensor | tuple[Tensor, Sums]:
        told = batch.get("told")
        found = self.loss(model, {name: x for name, x in batch.items() if name != "told"}, count)
        if told is None:  # an evaluation
            return found
        assert isinstance(found, Tensor)
        return found, {name: (row[0], row[1]) for name, row in zip(TOLD, told, strict=True)}

    def rollout(self, model: Any, prompts: Sequence[Prompt], number: int) -> Sequence[Completion | Example]:
        """What a step trains on: on-policy ones are spread evenly, the first is one."""
        share = self.options.lmbda
        if math.ceil((number + 1) * share) == math.ceil(number * share):
            return [prompt.own for prompt in prompts if prompt.own is not None]
        return complete(model, prompts, number, self.options, self.encoder, self.processes, self.vocab_size)

    def batch(self, some: Sequence[Completion | Example], seconds: float | None) -> Batch:
        """A forward with what is told of its completions."""
        completions = [one for one in some if isinstance(one, Completion)]
        examples = [one.example if isinstance(one, Completion) else one for one in some]
        told = torch.tensor(told_rows(completions, seconds if completions else None), dtype=torch.float64)
        return forward_of(examples, self.options, self.encoder.stop_ids[0]) | {"told": told}
