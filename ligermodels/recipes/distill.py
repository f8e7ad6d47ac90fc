"""Distillation: a model learns the distributions of a teacher over the tokens that the assistant says.

    loss = soft_weight D(student, teacher) + hard_weight CE(student, labels)

over the tokens of the data (off-policy), or of completions that the student samples (on-policy). D is the generalised
JSD (beta = 1 is the reverse KL, 0 the forward one), the total variation, or the cosine distance of the logits, both
distributions at `temperature`; see kernels/loss/linear_jsd.py. No gradient goes through the sampling. Papers:
arXiv:1503.02531, arXiv:2306.13649 (GKD), arXiv:2307.15190 (total variation). Checked against TRL 1.16,
trl/experimental/gkd, and the chunked losses of Liger 0.8.5.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligermodels.arch import load
from ligermodels.checkpoint import hub
from ligermodels.errors import InputError
from ligermodels.layers.losses import LinearJSDLoss
from ligermodels.processes import Processes
from ligermodels.recipes.base import Recipe
from ligermodels.recipes.data.examples import Batch
from ligermodels.recipes.memory import Sizes
from ligermodels.recipes.model import check_length, sketch
from ligermodels.recipes.recipe_options import DistillOptions
from ligermodels.recipes.rollout import Sampling
from ligermodels.recipes.steps import Metrics
from ligermodels.text import Tokenizer


class Distill(Recipe):
    """Off-policy: rows and their labels are those of sft."""

    Options = DistillOptions

    def __init__(self, options: Any, tokenizer: Tokenizer, processes: Processes | None = None) -> None:
        super().__init__(options, tokenizer, processes)
        self.teacher_folder = hub.resolve(options.teacher)
        self.teacher_sketch = sketch(self.teacher_folder)
        self._check_tokenizers(Tokenizer.from_hub(self.teacher_folder))
        check_length(options.max_length, self.teacher_sketch, "teacher", self.processes)

    def _check_tokenizers(self, teacher: Tokenizer) -> None:
        """Raises InputError if the teacher's tokens are not the student's."""
        probe = "Where's naïve 3.14159 - 12,345  x\n\n\tdef f(x_1): return 'ÄÖ 汉字 🙂' # WHY?! https://a.b/c"
        ours, theirs = ((x.get_vocab(), x.encode(probe, add_special_tokens=False)) for x in (self.tokenizer, teacher))
        if ours != theirs or self.teacher_sketch.config.get_text_config().vocab_size < self.tokenizer.vocab_size:
            differ = len(dict(ours[0].items() ^ theirs[0].items()))
            raise InputError(
                f"the teacher has another tokenizer ({differ} tokens differ, or how texts are split) or too few "
                "logits; give a --teacher of the same family"
            )

    @classmethod
    def of(cls, options: DistillOptions) -> type[Recipe]:
        return OnPolicy if options.on_policy else cls

    def memory(self, sizes: Sizes, sketch: Any) -> Sizes:
        """The sizes of the model, with the teacher."""
        return dataclasses.replace(sizes, frozen=sum(p.numel() for p in self.teacher_sketch.parameters()))

    def setup(self, model: Any, folder: Path, processes: Processes) -> None:
        """Loads the teacher, frozen and sharded as the model is; in bf16 on GPUs."""
        where: dict[str, Any] = dict(device=processes.device) if processes.mesh is None else dict(mesh=processes.mesh)
        where["dtype"] = torch.bfloat16 if processes.device.type == "cuda" else torch.float32
        self.teacher = load(str(self.teacher_folder), **where).requires_grad_(False).eval()

    def loss(self, model: Any, batch: Batch, count: Tensor) -> tuple[Tensor, Metrics]:
        return distill_loss(model, batch, count, self.teacher, self.options)


class OnPolicy(Sampling):
    """Rows are prompts, or chats without their last answer. Evaluations are off-policy, on the rows' own answers."""

    def __init__(self, options: Any, tokenizer: Tokenizer, processes: Processes | None = None) -> None:
        super().__init__(options, tokenizer, processes)
        self.evaluation = self.off_policy = Distill(options, tokenizer, processes)

    def memory(self, sizes: Sizes, sketch: Any) -> Sizes:
        return super().memory(self.off_policy.memory(sizes, sketch), sketch)

    def setup(self, model: Any, folder: Path, processes: Processes) -> None:
        super().setup(model, folder, processes)
        self.off_policy.setup(model, folder, processes)
        if model.vocab_size > (known := self.off_policy.teacher.vocab_size):
            raise InputError(f"on_policy: the model has {model.vocab_size} ids to sample, and its teacher {known}")

    def loss(self, model: Any, batch: Batch, count: Tensor) -> tuple[Tensor, Metrics]:
        return self.off_policy.loss(model, batch, count)


def distill_loss(model: Any, batch: Batch, count: Tensor, teacher: Any, options: Any) -> tuple[Tensor, Metrics]:
    """The batch's part of the loss; in evaluation also divergence and cross entropy, separately."""
    metrics, head = Metrics(), list[Any]()
    soft_weight, hard_weight = options.weights

    def keep(x: Tensor, weight: Tensor, labels: Tensor, **of: Any) -> Tensor:
        # FSDP keeps the weight of the last group whole until a backward, of which the teacher has none.
        head[:] = x, weight, of["bias"], of["softcap"]
        return x.new_zeros((), dtype=torch.float32)

    def divergence(
        x: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None, softcap: float | None,
        workspace_bytes: int | None, num_items_in_batch: Tensor, num_valid: int | None,
    ) -> Tensor:  # fmt: skip
        y, teacher_weight, teacher_bias, teacher_softcap = head
        if (rows := len(teacher_weight)) < len(weight):  # the further rows of the student are padding
            weight, bias = weight[:rows], None if bias is None else bias[:rows]
        workspace: Any = {"workspace_bytes": workspace_bytes} if workspace_bytes else {}
        jsd = LinearJSDLoss(
            options.beta, divergence=options.loss_type, temperature=options.temperature, weight_soft=soft_weight,
            weight_hard=hard_weight, reduction="sum", student_softcap=softcap, teacher_softcap=teacher_softcap,
            return_soft_hard_loss=not model.training, **workspace,
        )  # fmt: skip
        result: Any = jsd(
            x, weight, y, teacher_weight, labels, student_bias=bias, teacher_bias=teacher_bias, num_valid=num_valid
        )
        if not model.training:
            number = (labels != -100).sum()
            metrics.update(divergence=(result.soft_loss, number), cross_entropy=(result.hard_loss, number))
            result = result.loss
        return result / num_items_in_batch

    with torch.no_grad():
        teacher(**batch, num_items_in_batch=count, loss_function=keep)
    return model(**batch, num_items_in_batch=count, loss_function=divergence).loss, metrics
