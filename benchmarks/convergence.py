"""Training from the same weights on the same text, ours beside transformers: do the losses stay together?

The models are the tiny ones of tests/tiny.py. In fp32 the loss curves have to agree. In bf16, where no two programs
round alike, ours may be no further from transformers' fp32 curve than transformers' own bf16 curve is.
tests/test_convergence.py has the bounds.

    python -m benchmarks.convergence --out convergence.json
    python -m benchmarks.convergence --recipes --families llama     # also our AdamW in each form, and recomputation
    python -m benchmarks.convergence --dry --families llama         # 8 steps on the CPU
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.harness import Record, Row
from tests.tiny import (
    BATCH,
    FAMILIES,
    LEARNING_RATE,
    LENGTH,
    losses,
    ours,
    text_batches,
    theirs,
    torch_adamw,
    write_checkpoint,
)

STEPS, SEEDS = 200, 4
LAST = 20
"""The result of training is the mean loss of this many steps at the end."""


def our_adamw(**options: Any) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    from ligermodels.training import AdamW

    return lambda parameters: AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.01, **options)


class Recipe(NamedTuple):
    """A way to train: whose model, in which dtype, by which optimizer, and what the backward recomputes.

    optimizer: None is torch's AdamW on fp32 copies of the weights.
    """

    build: Callable[[Path, torch.dtype, str], nn.Module]
    dtype: torch.dtype
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None
    recompute: str = "none"


_BF16, _FP32 = torch.bfloat16, torch.float32
EXACT = "transformers, fp32"
MODELS: dict[str, Recipe] = {
    EXACT: Recipe(theirs, _FP32, None),
    "ligermodels, fp32": Recipe(ours, _FP32, None),
    "transformers, bf16": Recipe(theirs, _BF16, None),
    "ligermodels, bf16": Recipe(ours, _BF16, None),
}
"""What is compared by default, with an optimizer in fp32. The first is what all others are compared with."""


def recipes() -> dict[str, Recipe]:
    """MODELS, and training as a user would: weights and optimizer in each of their forms."""
    found = dict(MODELS)
    for name, dtype in (("fp32", _FP32), ("bf16", _BF16)):
        found |= {
            f"ligermodels, {name}, torch's AdamW": Recipe(ours, dtype, torch_adamw),
            f"ligermodels, {name}, AdamW": Recipe(ours, dtype, our_adamw()),
            f"ligermodels, {name}, AdamW, step in backward": Recipe(ours, dtype, our_adamw(step_in_backward=True)),
            f"ligermodels, {name}, AdamW, recompute mlp": Recipe(ours, dtype, our_adamw(), "mlp"),
            f"ligermodels, {name}, AdamW, recompute block": Recipe(ours, dtype, our_adamw(), "block"),
        }
    masters = our_adamw(master_weights=True, state_dtype=torch.float32)
    return found | {
        "transformers, bf16, torch's AdamW": Recipe(theirs, _BF16, torch_adamw),
        "ligermodels, bf16, AdamW, nearest": Recipe(ours, _BF16, our_adamw(rounding="nearest")),
        "ligermodels, bf16, AdamW, master weights": Recipe(ours, _BF16, our_adamw(master_weights=True)),
        "ligermodels, bf16, AdamW, master weights, fp32 states": Recipe(ours, _BF16, masters),
    }


def compare(family: str, device: str, steps: int, seeds: int, chosen: Mapping[str, Recipe]) -> list[Row]:
    """The relative distance of each recipe's curve from the exact one: rms over all steps, and the mean at the end."""
    curves: dict[str, list[Tensor]] = {name: [] for name in chosen}
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(family, Path(folder), seed)
            for name, recipe in chosen.items():
                model: Any = recipe.build(Path(folder), recipe.dtype, device)
                if recipe.recompute != "none":
                    model.gradient_checkpointing_enable({"recompute": recipe.recompute})
                curves[name].append(losses(model, text_batches(steps, device, seed), recipe.optimizer))
    rows = []
    for name, found in curves.items():
        distances = [difference(*pair) for pair in zip(found, curves[EXACT], strict=True)]
        ends, exact_ends = (torch.stack([curve[-LAST:].mean() for curve in c]) for c in (found, curves[EXACT]))
        rows.append(
            {
                "family": family,
                "recipe": name,
                "last_loss": ends.mean().item(),
                "difference": rms(distances),
                "difference at the end": ((ends - exact_ends) / exact_ends).mean().item(),
            }
        )
    return rows


def difference(curve: Tensor, other: Tensor) -> Tensor:
    """The relative difference of two curves at each step."""
    return (curve - other).abs() / other.abs()


def rms(distances: Sequence[Tensor]) -> float:
    """The root mean square over all steps and all seeds."""
    return torch.cat(list(distances)).square().mean().sqrt().item()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--families", type=harness.names(*FAMILIES), default="all", help="with commas between them")
    parser.add_argument("--recipes", action="store_true", help="also optimizers and recomputation")
    parser.add_argument("--seeds", type=int, default=SEEDS)


def measure(options: argparse.Namespace, record: Record) -> None:
    steps, seeds = (8, 1) if options.dry else (STEPS, options.seeds)
    record["settings"] = {"steps": steps, "seeds": seeds, "batch": BATCH, "length": LENGTH, "lr": LEARNING_RATE}
    chosen = recipes() if options.recipes else MODELS
    record["rows"] = [row for name in options.families for row in compare(name, options.device, steps, seeds, chosen)]


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.main(__doc__, arguments, add_options, measure)


if __name__ == "__main__":
    sys.exit(main())
