"""Medusa heads on a frozen model (Medusa-1).

    loss = sum_k decay^k CE_k,        k = 1, 2, ...

CE_k is the cross entropy of the k-th head, which predicts the token k + 1 ahead, divided by the number of labels of the
model's own head. Labels that come too early in a row for the k-th head count in this divisor alone.

Paper: Cai et al., https://arxiv.org/abs/2401.10774, section 2.2.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

from torch import Tensor

from ligermodels.arch.inputs import Targets
from ligermodels.processes import Processes
from ligermodels.recipes.base import Recipe
from ligermodels.recipes.data.examples import Batch
from ligermodels.recipes.memory import Sizes
from ligermodels.recipes.model import model_of
from ligermodels.recipes.recipe_options import MedusaOptions
from ligermodels.recipes.steps import Metrics
from ligermodels.training.medusa import add_medusa, save_medusa


class Medusa(Recipe):
    Options = MedusaOptions
    result = "medusa"

    def loss(self, model: Any, batch: Batch, count: Tensor) -> tuple[Tensor, Metrics]:
        """The loss of the formula above; in evaluation also how often each head is right."""
        metrics = Metrics()
        ahead = [Targets(batch["labels"], batch.get("cu_seqlens"))]
        for _ in model.medusa:
            ahead.append(Targets(ahead[-1].labels, batch.get("cu_seqlens")))

        def of_heads(x: Tensor, weight: Tensor, labels: Tensor, *, num_items_in_batch: Any, **of: Any) -> Tensor:
            losses = []
            for k, (head, targets) in enumerate(zip(model.medusa, ahead[1:], strict=True), 1):
                out = head(
                    x, targets.labels, num_items_in_batch=num_items_in_batch, num_valid=targets.count(),
                    return_token_accuracy=not model.training,
                )  # fmt: skip
                if not model.training:
                    out, _, accuracy, *_ = out
                    number = (targets.labels != -100).sum()
                    metrics[f"accuracy_{k}"] = accuracy * number, number
                losses.append(self.options.head_decay**k * out)
            return sum(losses)  # type: ignore[return-value]

        return model(**batch, num_items_in_batch=count, loss_function=of_heads).loss, metrics

    def memory(self, sizes: Sizes, sketch: Any) -> Sizes:
        """Those of the model with its heads. The blocks of a frozen model save nothing for a backward."""
        o, hidden = self.options, sketch.decoder.config.hidden_size
        heads = o.heads * (sizes.head + o.head_layers * hidden * (hidden + 1))
        states = -(-o.heads * (2 * o.head_layers + 1) * hidden // sizes.blocks)
        saved = dict.fromkeys(sizes.saved, states)
        parameters = sizes.parameters + heads
        eight_bits = heads if sizes.eight_bits else 0
        return dataclasses.replace(
            sizes, parameters=parameters, trained=heads, eight_bits=eight_bits, saved=saved, heads=o.heads
        )

    def load(self, folder: Path, processes: Processes) -> Any:
        """The model with new heads."""
        o = self.options
        add = functools.partial(add_medusa, heads=o.heads, layers=o.head_layers, freeze=True)
        return model_of(o, folder, processes, add)

    def save(self, model: Any, folder: Path) -> None:
        save_medusa(model, folder, base=self.options.model)
