"""Medusa heads on a model, which is frozen (Medusa-1) or trained with them (Medusa-2).

    Medusa-1: sum_k decay^k CE_k        Medusa-2: CE + heads_weight sum_k decay^k CE_k,        k = 1, 2, ...

CE_k is the cross entropy of the k-th head, which guesses the token k + 1 ahead, divided by the number of labels that
the model's own head has: a label so early in its row that no head could guess it counts in the divisor alone.

Paper: Cai et al., https://arxiv.org/abs/2401.10774, section 2.2.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

from torch import Tensor

from ligermodels.arch.inputs import Targets
from ligermodels.layers.losses import LinearCrossEntropyLoss
from ligermodels.recipes import memory
from ligermodels.recipes.loop import Batch, Sums
from ligermodels.recipes.options import MedusaOptions
from ligermodels.recipes.run import Recipe, run
from ligermodels.training.medusa import add_medusa, save_medusa

__all__ = ["MedusaOptions", "train"]


def train(options: MedusaOptions) -> int:
    """Trains heads on chats or texts. Returns the exit status."""
    how = dict(decay=options.head_decay, heads_weight=options.heads_weight, train_base=options.train_base)
    loss = functools.partial(medusa_loss, **how)  # type: ignore[arg-type]
    return run(options, Recipe(loss=loss, sizes=_sizes, extend=_extend, save=_save))


def medusa_loss(
    model: Any, batch: Batch, count: Tensor, *, decay: float, heads_weight: float, train_base: bool
) -> Tensor | tuple[Tensor, Sums]:
    """The loss of the formula above; in evaluation also how often each head guesses right."""
    sums: Sums = {}
    ahead = [Targets(batch["labels"], batch.get("cu_seqlens"))]
    for _ in model.medusa:
        ahead.append(Targets(ahead[-1].labels, batch.get("cu_seqlens")))

    def joint(x: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Tensor:
        num_items = options["num_items_in_batch"]
        cross_entropy = LinearCrossEntropyLoss(**{name: options.pop(name) for name in ("softcap", "workspace_bytes")})
        base = cross_entropy(x, weight, labels, **options) if train_base else None
        if base is not None and not model.training:
            sums["cross_entropy"] = base * num_items, (labels != -100).sum()
        found = None
        for k, (head, targets) in enumerate(zip(model.medusa, ahead[1:], strict=True), 1):
            out = head(
                x,
                targets.labels,
                num_items_in_batch=num_items,
                num_valid=targets.count(),
                return_token_accuracy=not model.training,
            )
            if not model.training:
                out, _, accuracy, *_ = out
                number = (targets.labels != -100).sum()
                sums[f"accuracy_{k}"] = accuracy * number, number
            found = decay**k * out if found is None else found + decay**k * out
        assert found is not None
        return found if base is None else base + heads_weight * found

    loss = model(**batch, num_items_in_batch=count, loss_function=joint).loss
    return (loss, sums) if sums else loss


def _sizes(options: MedusaOptions, sizes: memory.Sizes, sketch: Any) -> memory.Sizes:
    """Those of the model with its heads. Of a frozen model, no block saves anything for a backward."""
    hidden = sketch.decoder.config.hidden_size
    heads = options.heads * (sizes.head + options.head_layers * hidden * (hidden + 1))
    states = -(-options.heads * (2 * options.head_layers + 1) * hidden // sizes.blocks)
    return dataclasses.replace(
        sizes,
        parameters=sizes.parameters + heads,
        trained=heads + sizes.trained * options.train_base,
        saved={name: size * options.train_base + states for name, size in sizes.saved.items()},
        heads=options.heads,
    )


def _extend(options: MedusaOptions, model: Any) -> None:
    add_medusa(model, options.heads, options.head_layers, freeze=not options.train_base)


def _save(options: MedusaOptions, model: Any, folder: Path) -> None:
    """The heads; of a model that was trained with them the model, with its heads in the folder `medusa` of it."""
    if not options.train_base:
        save_medusa(model, folder, base=options.model)
        return
    heads = model._modules.pop("medusa")
    try:
        model.save_pretrained(folder)
    finally:
        model.medusa = heads
    save_medusa(model, folder / "medusa", base=str(folder))
