"""The teacher of a distillation: checks that it reads the same tokens, and the divergence from what it predicts."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligermodels.arch import load
from ligermodels.errors import InputError
from ligermodels.layers.losses import LinearJSDLoss
from ligermodels.recipes.base import Metrics
from ligermodels.recipes.model import sketch
from ligermodels.recipes.packing import Batch
from ligermodels.text import Tokenizer

_PROBE = "Where's naïve 3.14159 - 12,345  x\n\n\tdef f(x_1): return 'ÄÖ 汉字 🙂' # WHY?! https://a.b/c"


def check_teacher(folder: Path, tokenizer: Tokenizer, max_length: int) -> None:
    """Raises InputError if the teacher's tokens or lengths do not fit a student with this tokenizer."""
    teacher, config = Tokenizer.from_hub(folder), sketch(folder).config.get_text_config()
    if different := {index for _, index in tokenizer.get_vocab().items() ^ teacher.get_vocab().items()}:
        index = min(different)
        one, other = (repr(either.convert_ids_to_tokens(index)) for either in (tokenizer, teacher))
        raise InputError(
            f"the teacher has another tokenizer: id {index} is {one} for the model and {other} for the teacher "
            f"({len(different)} ids differ). The two are compared token by token; give a teacher of the same family"
        )
    if tokenizer.encode(_PROBE, add_special_tokens=False) != teacher.encode(_PROBE, add_special_tokens=False):
        raise InputError(
            f"the teacher's tokenizer has the same tokens, but splits {_PROBE!r} differently; give a teacher that saw "
            "texts split as the model does"
        )
    if config.vocab_size < tokenizer.vocab_size:
        number = tokenizer.vocab_size
        raise InputError(f"{folder} has logits for {config.vocab_size} tokens, and the tokenizer has {number}")
    if max_length > config.max_position_embeddings:
        raise InputError(
            f"max_length={max_length} is more than the teacher's {config.max_position_embeddings} positions; "
            f"give --max-length {config.max_position_embeddings}"
        )


def load_teacher(folder: Path, processes: Any) -> Any:
    """The teacher, frozen and sharded as the model is; in bf16 on GPUs."""
    where: dict[str, Any] = dict(device=processes.device) if processes.mesh is None else dict(mesh=processes.mesh)
    dtype = torch.bfloat16 if processes.device.type == "cuda" else torch.float32
    return load(str(folder), dtype=dtype, **where).requires_grad_(False).eval()


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
