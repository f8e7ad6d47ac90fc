"""`model.fusion_report()`: which parts of a model run as fused ops, and why the others do not.

Layers decide at each call whether a fused op may replace their modules (layers/linear.py). The report makes the same
decisions once.
"""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ligermodels.kernels._triton import HAS_TRITON, INTERPRET, use_triton
from ligermodels.layers import LMHead
from ligermodels.layers.base import FusionContext, FusionPart, Layer
from ligermodels.layers.head import takes_labels, unwrapped
from ligermodels.layers.linear import why_not_fused


@dataclasses.dataclass(frozen=True)
class FusionRow:
    """How one part of some layers runs.

    modules: the names of the layers. part: the modules or step in them. runs: the ops. fused: False if modules are
    called one by one, or scores or logits are in memory. why: the obstacle to a better op, or "".
    """

    modules: tuple[str, ...]
    part: str
    runs: str
    fused: bool
    why: str


@dataclasses.dataclass(frozen=True)
class FusionReport:
    """The result of `fusion_report`; its str() is a table. kernels: the implementation of the ops on this device."""

    kernels: str
    rows: tuple[FusionRow, ...]

    @property
    def unfused(self) -> tuple[FusionRow, ...]:
        """The rows that are not fused."""
        return tuple(row for row in self.rows if not row.fused)

    def __str__(self) -> str:
        table = [("layers", "part", "runs as", "why not better")]
        table += [(short_names(row.modules), row.part, row.runs, row.why) for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in table]
        return "\n".join([f"ops: {self.kernels}", *(line.rstrip() for line in lines)])


def fusion_report(model: Any) -> FusionReport:
    """Which parts of a CausalLM run as fused ops, as it is wrapped now, and why the others do not.

    It describes eager training on the model's device. For a model on the meta device: on the GPU if there is one, with
    weights laid out as by loading. `print(model.fusion_report())` shows a table; `.rows` is for programs.
    """
    device = model.device
    if device.type == "meta":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names_of: dict[tuple[Any, ...], list[str]] = {}
    gathered = _gathered(model)
    for name, module in model.named_modules():
        if ".original_module" in name:
            continue  # kept by PEFT beside the trained copy
        at = FusionContext(model.dtype, device, name in gathered)
        for row in module.fusion_parts(at) if isinstance(module, Layer) else ():
            names_of.setdefault((re.sub(r"\d+", "#", name), *row), []).append(name)
    if takes_labels(unwrapped(model.lm_head)):
        head = FusionPart("lm_head, loss", "one op", True)
    else:
        reason = why_not_fused(model.lm_head, LMHead)
        head = FusionPart("lm_head, loss", "logits, all in memory", False, reason or "a wrapper around the head")
    names_of["lm_head", *head] = ["lm_head"]
    rows = (FusionRow(tuple(names), *key[1:]) for key, names in names_of.items())
    return FusionReport(_kernels(device), tuple(rows))


def _gathered(model: nn.Module) -> set[str]:
    """Names of the modules whose sharded weights FSDP2 gathers, as plain ones, before they run."""
    return {
        name for root, module in model.named_modules() if hasattr(module, "unshard")
        for name, _ in module.named_modules(prefix=root)
    }  # fmt: skip


def _kernels(device: torch.device) -> str:
    if use_triton(torch.empty(0, device=device)):
        return "Triton, interpreted" if INTERPRET else f"Triton, on {torch.cuda.get_device_name(device)}"
    return "plain PyTorch, " + ("on the CPU" if HAS_TRITON or device.type == "cpu" else "as Triton is not installed")


def short_names(names: Sequence[str]) -> str:
    """One name for several that differ in numbers alone: model.layers.0-15.mlp."""
    shown = re.sub(r"\d+", "#", names[0])
    for column in zip(*(re.findall(r"\d+", name) for name in names), strict=True):
        numbers, ranges = sorted({int(number) for number in column}), []
        for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
            ends = [number for _, number in run]
            ranges.append(str(ends[0]) if len(ends) == 1 else f"{ends[0]}-{ends[-1]}")
        shown = shown.replace("#", ",".join(ranges), 1)
    return shown
