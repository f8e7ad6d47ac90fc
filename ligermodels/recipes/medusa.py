"""Medusa heads on a model, which is frozen (Medusa-1) or trained with them (Medusa-2).

    Medusa-1: sum_k decay^k CE_k        Medusa-2: CE + heads_weight sum_k decay^k CE_k,        k = 1, 2, ...

CE_k is the cross entropy of the k-th head, which predicts the token k + 1 ahead, divided by the number of labels that
the model's own head has: a label so early in its row that no head could predict it counts in the divisor alone.

Paper: Cai et al., https://arxiv.org/abs/2401.10774, section 2.2.
"""

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ligermodels.arch.inputs import Targets
from ligermodels.layers.losses import LinearCrossEntropyLoss
from ligermodels.processes import Processes
from ligermodels.recipes.base import Recipe
from ligermodels.recipes.memory import Sizes
from ligermodels.recipes.model import load_model
from ligermodels.recipes.options import TrainOptions, option
from ligermodels.recipes.packing import Batch
from ligermodels.recipes.steps import Metrics
from ligermodels.training.medusa import add_medusa, save_medusa


@dataclass(kw_only=True)
class MedusaOptions(TrainOptions):
    recipe = "medusa"
    group = "heads"
    default_rates = (1e-3, 1e-3)
    unsupported = {  # noqa: RUF012
        **dict.fromkeys(("cp", "tp"), "heads are trained under FSDP alone"),
        "lora_r": "heads are trained on a frozen model, or with all of it (--train-base)",
    }
    heads: int = option(4, "number of heads; head k predicts the token k + 1 ahead", least=1)
    head_layers: int = option(1, "residual blocks of each head", least=0)
    head_decay: float = option(0.8, "the k-th head's loss is weighted by this to the power k", least=0)
    train_base: bool = option(
        False, "train the model too, by the cross entropy of its own head (Medusa-2), by default at 2e-5"
    )
    heads_weight: float = option(0.2, "with --train-base: weight of the heads' losses beside the model's", least=0)

    @property
    def default_rate(self) -> float:
        return 2e-5 if self.train_base else super().default_rate


class Medusa(Recipe):
    Options = MedusaOptions

    def loss(self, model: Any, batch: Batch, count: Tensor) -> tuple[Tensor, Metrics]:
        """The loss of the formula above; in evaluation also how often each head is right."""
        o, metrics = self.options, Metrics()
        ahead = [Targets(batch["labels"], batch.get("cu_seqlens"))]
        for _ in model.medusa:
            ahead.append(Targets(ahead[-1].labels, batch.get("cu_seqlens")))

        def joint(x: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Tensor:
            num_items = options["num_items_in_batch"]
            own = LinearCrossEntropyLoss(**{name: options.pop(name) for name in ("softcap", "workspace_bytes")})
            base = own(x, weight, labels, **options) if o.train_base else None
            if base is not None and not model.training:
                metrics["cross_entropy"] = base * num_items, (labels != -100).sum()
            losses = []
            for k, (head, targets) in enumerate(zip(model.medusa, ahead[1:], strict=True), 1):
                out = head(
                    x, targets.labels, num_items_in_batch=num_items, num_valid=targets.count(),
                    return_token_accuracy=not model.training,
                )  # fmt: skip
                if not model.training:
                    out, _, accuracy, *_ = out
                    number = (targets.labels != -100).sum()
                    metrics[f"accuracy_{k}"] = accuracy * number, number
                losses.append(o.head_decay**k * out)
            of_heads: Tensor = sum(losses)  # type: ignore[assignment]
            return of_heads if base is None else base + o.heads_weight * of_heads

        return model(**batch, num_items_in_batch=count, loss_function=joint).loss, metrics

    def memory(self, sizes: Sizes, sketch: Any) -> Sizes:
        """Those of the model with its heads. The blocks of a frozen model save nothing for a backward."""
        o, hidden = self.options, sketch.decoder.config.hidden_size
        heads = o.heads * (sizes.head + o.head_layers * hidden * (hidden + 1))
        states = -(-o.heads * (2 * o.head_layers + 1) * hidden // sizes.blocks)
        return dataclasses.replace(
            sizes,
            parameters=sizes.parameters + heads,
            trained=heads + sizes.trained * o.train_base,
            saved={name: size * o.train_base + states for name, size in sizes.saved.items()},
            heads=o.heads,
        )

    def load(self, folder: Path, processes: Processes) -> Any:
        """The model with new heads."""
        o = self.options
        add = functools.partial(add_medusa, heads=o.heads, layers=o.head_layers, freeze=not o.train_base)
        return load_model(o, folder, processes, add)

    @property
    def result(self) -> str:
        return "model" if self.options.train_base else "medusa"

    def save(self, model: Any, folder: Path) -> None:
        """The heads; or the model that was trained with them, with its heads in its folder `medusa`."""
        if not self.options.train_base:
            save_medusa(model, folder, base=self.options.model)
            return
        heads = model._modules.pop("medusa")
        try:
            model.save_pretrained(folder)
        finally:
            model.medusa = heads
        save_medusa(model, folder / "medusa", base=str(folder))
