"""`model.fusion_report()`: which parts of a model run as fused ops, and why the others do not.

Layers decide at each call whether a fused op may replace their modules (layers/linear.py). The report makes the same
decisions once.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ligermodels.kernels._triton import HAS_TRITON, INTERPRET, use_triton
from ligermodels.kernels.attention import engine
from ligermodels.kernels.joint import joint
from ligermodels.kernels.low_bit import LowBitWeight
from ligermodels.kernels.operand import LinearOperand, choose
from ligermodels.layers import (
    MLP,
    Attention,
    CrossAttention,
    Experts,
    GatedDeltaNet,
    GatedMLP,
    LayerNorm,
    LMHead,
    RMSNorm,
)
from ligermodels.layers.head import takes_labels, unwrapped
from ligermodels.layers.linear import obstacle, operands_of


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
    found: dict[tuple[Any, ...], list[str]] = {}
    gathered = _gathered(model)
    for name, module in model.named_modules():
        if ".original_module" in name:
            continue  # kept by PEFT beside the trained copy
        for row in _rows_of(module, model.dtype, device, name in gathered):
            found.setdefault((re.sub(r"\d+", "#", name), *row), []).append(name)
    if takes_labels(unwrapped(model.lm_head)):
        head: Found = ("lm_head, loss", "one op", True, "")
    else:
        reason = obstacle(model.lm_head, LMHead)
        head = ("lm_head, loss", "logits, all in memory", False, reason or "a wrapper around the head")
    found["lm_head", *head] = ["lm_head"]
    rows = (FusionRow(tuple(names), *key[1:]) for key, names in found.items())
    return FusionReport(_kernels(device), tuple(rows))


Found = tuple[str, str, bool, str]
"""part, runs, fused, why."""


def _rows_of(module: nn.Module, dtype: torch.dtype, device: torch.device, gathered: bool) -> Iterator[Found]:
    if isinstance(module, Attention):
        yield _linears(module, module.joint_names, gathered)
        q = torch.empty(1, 1, 1, module.head_dim, dtype=dtype, device=device)
        name, why = engine(q, softcap=module.softcap, window=module.window)
        yield "scores", name, not name.startswith("attention_reference"), why
    elif isinstance(module, GatedDeltaNet):
        yield _linears(module, module.joint_names, gathered)
        kernels = use_triton(torch.empty(0, device=device))
        yield "delta rule", "Triton, chunks of tokens" if kernels else "PyTorch, token by token", kernels, ""
    elif isinstance(module, CrossAttention):
        yield _linears(module, module.joint_names, gathered)
    elif isinstance(module, GatedMLP | MLP):
        yield _linears(module, module.joint_names, gathered, module.output_name)
    elif isinstance(module, Experts):
        operands = [module.operand(name) for name in ("gate_up_proj", "down_proj")]
        runs = {"experts": "one op, grouped matmuls", "grouped": "grouped matmuls"}[_chosen(operands)]
        yield "experts", runs + _parts(operands), True, ""
    elif isinstance(module, RMSNorm | LayerNorm):
        reason = None if gathered else obstacle(module, RMSNorm, LayerNorm)
        yield "residual add, norm", "one op" + ", its output saved" * bool(reason), True, reason or ""


def _linears(layer: nn.Module, inputs: Sequence[str], gathered: bool, output: str | None = None) -> Found:
    """The row of linear modules that share an input, and for an MLP of the output module."""
    names = [*inputs, *([] if output is None else [output])]
    part = " | ".join(names)
    modules: dict[str, Any] = {name: layer.get_submodule(name) for name in names}
    modules = {name: one for name, one in modules.items() if not (gathered and hasattr(one.weight, "full_tensor"))}
    reasons = {name: reason for name, one in modules.items() if (reason := obstacle(one)) is not None}
    if not reasons:
        operands = operands_of(layer.get_submodule(name) for name in names) or []  # none for weights that FSDP gathers
        if "formula" in (_chosen(operands[: len(inputs)]), _chosen(operands[len(inputs) :])):
            return part, "each by itself, by PyTorch", False, "autocast casts their input or weights"
        why = _why_not_joint(layer, inputs, gathered)
        one = "one op" if output else "one matmul"
        each = f" of {' and '.join(inputs)}" if output else ""
        return part, (one if not why else f"one op, a matmul for each{each}") + _parts(operands), True, why
    joint_inputs = output and len(inputs) > 1 and not reasons.keys() & set(inputs)
    runs = f"one op of {' | '.join(inputs)}" if joint_inputs else "each by itself" if len(names) > 1 else "by itself"
    by_text: dict[str, list[str]] = {}
    for name, text in reasons.items():
        by_text.setdefault(text, []).append(name)
    why = "; ".join(f"{', '.join(names)}: {text}" for text, names in by_text.items())
    return part, runs, False, why


def _parts(operands: Sequence[LinearOperand]) -> str:
    """What the operands have: adapters, quantised weights."""
    lora = ", with LoRA" if any(operand.adapter for operand in operands) else ""
    return lora + ", weights dequantised" * any(isinstance(one.weight, LowBitWeight) for one in operands)


def _chosen(operands: Sequence[LinearOperand]) -> Any:
    """The result of `choose` in training."""
    if not operands:
        return None
    weight = operands[0].weight
    dtype = next((one.weight.dtype for one in operands if isinstance(one.weight, torch.Tensor)), None)
    with torch.enable_grad():
        return choose(operands, torch.empty(2, weight.shape[-1], dtype=dtype, device=weight.device).requires_grad_())


def _why_not_joint(layer: Any, names: Sequence[str], gathered: bool) -> str:
    """Why plain modules of one input are not one matmul; "" if they are."""
    modules = [getattr(layer, name) for name in names]
    if len(names) == 1 or all(getattr(m, "kind", "") == "nf4" for m in modules):  # joint once dequantised
        return ""
    if gathered:
        return "FSDP gathers each weight by itself"
    weights = [m.weight for m in modules]
    if any(weight.is_meta for weight in weights) or joint(weights) is not None:  # loading makes them joint
        return ""
    return "their weights are not joint in memory"


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
