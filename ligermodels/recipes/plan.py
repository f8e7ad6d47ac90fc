"""The plan of a run, as lines by name. It is printed before the run, and repeated in its report."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ligermodels.recipes import memory
from ligermodels.recipes.report import left_out
from ligermodels.recipes.steps import FEW_STEPS

if TYPE_CHECKING:
    from ligermodels.recipes.trainer import Trainer

_ROWS = {"pairs": "preference pairs", "unpaired": "single labelled answers", "": "prompts"}


def make_plan(
    trainer: "Trainer", sketch: Any, sizes: memory.Sizes, counts: Mapping[str, int] | None
) -> tuple[dict[str, str], list[str]]:
    """The plan, and warnings. counts: of a pass over the data; None if it was not counted."""
    o: Any
    o, p, recipe, data = trainer.options, trainer.processes, trainer.recipe, trainer.data
    steps, tokens, on_gpu = trainer.progress.steps, o.batch_tokens, p.device.type == "cuda"
    setting = memory_setting(trainer)
    need, free = memory.estimate(sizes, setting), memory.available(p.device)
    format, share = data.format[0] if data.format else "", sizes.trained / sizes.parameters
    plan = {
        "model": f"{o.model}: {type(sketch).__name__}, {sizes.parameters:,} parameters",
        "trained": f"{sizes.trained:,} parameters ({share:.2%} of the model)" if share < 1 else "all of them",
        "data": f"{', '.join(o.data)}: {len(data.rows):,} {_ROWS.get(format, f'rows of {format}')}",
        "evaluation": "",
        "tokens": "not counted, since --max-steps is given",
        "steps": f"{_plural(steps, 'step')} of {_plural(o.accumulation, 'forward pass')}, up to {tokens:,} tokens each",
        "learning rate": f"{o.peak_lr:g}, {o.lr_scheduler_type}",
        "precision": f"{o.precision}, activation checkpointing: {o.activations}",
        "memory": str(need),
    }
    if o.lora_r:
        targets = ",".join((*(o.lora_target_modules or ["all projections"]), *o.lora_target_parameters))
        plan["trained"] = f"LoRA of rank {o.lora_r} on {targets}: {plan['trained']}"
    if data.eval_rows is not None:
        plan["evaluation"] = f"{len(data.eval_rows):,} rows" + f" of {o.eval_data}" * bool(o.eval_data)
    if counts is not None:
        plan["tokens"] = f"{counts['tokens']:,} a pass, {counts['trained']:,} of them trained{left_out(counts)}"
    if p.size > 1:
        plan["steps"] += f", on {p.size} processes"
    if free:
        plan["memory"] += f"; {'the GPU has free' if on_gpu else 'the machine has'} {free / memory.GIB:.1f} GiB"
    if o.capture:
        how = "each step is a CUDA graph" if on_gpu else "not without a GPU"
        plan["capture"] = f"{how}; forwards are padded to {tokens:,} tokens"
        if counts is not None:
            padding = 1 - counts["tokens"] / (counts["batches"] * tokens)
            plan["capture"] += f", of which {padding:.1%} are padding"
    plan |= recipe.plan(steps, counts)
    warnings = []
    if free and not memory.fits(sizes, setting, free):
        lora = None
        if not (o.lora_r or sizes.heads):
            lora = memory.adapter_parameters(sketch, dataclasses.replace(o, lora_r=16))
        changes = memory.advice(sizes, setting, free, lora)
        help = ". These would:" if changes else ", and no single change helps"
        warnings += [f"warning: this does not fit by the estimate{help}", *(f"  {change}" for change in changes)]
    if o.max_steps is None and steps < FEW_STEPS:
        warnings.append(f"warning: {_plural(steps, 'step')} teach little: raise --num-train-epochs")
    return {name: text for name, text in plan.items() if text}, warnings


def memory_setting(trainer: "Trainer") -> memory.Setting:
    o, p = trainer.options, trainer.processes
    assert o.batch_tokens is not None and o.accumulation is not None, "`setup` sets both"
    return memory.Setting(
        o.precision, o.activations, tokens=o.batch_tokens, accumulates=o.accumulation > p.batch_ranks,
        gpus=p.size // o.dp_replicate, split=p.ranks_per_batch, tp=o.tp, on_cpu=p.device.type == "cpu",
        quantized=o.quantize != "none", copies=o.frozen_copies, sequences=o.sequences,
    )  # fmt: skip


def choose_memory(trainer: "Trainer", sizes: memory.Sizes) -> None:
    """Sets the options that are "auto" to what fits on all GPUs."""
    free = memory.available(trainer.processes.device)
    if free is not None:
        free = min(trainer.processes.gather(free))
    setting = memory.choose(sizes, memory_setting(trainer), free)
    trainer.options.precision, trainer.options.activations = setting.precision, setting.activations


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{('es' if noun.endswith('s') else 's') * (count != 1)}"
