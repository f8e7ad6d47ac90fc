"""The plan of a run, as lines by name. It is printed before the run, and repeated in its report."""

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ligermodels.errors import InputError
from ligermodels.recipes import memory
from ligermodels.recipes.model import GGUF, check_capture, weight_dtype
from ligermodels.recipes.report import left_out
from ligermodels.recipes.steps import FEW_STEPS

if TYPE_CHECKING:
    from ligermodels.recipes.trainer import Trainer

_FLOPS_OF_A_BLOCK = 8e11
"""What an H200 computes in the 2 ms that the host takes to launch the forward and backward of a block."""


def make_plan(
    trainer: "Trainer", sketch: Any, sizes: memory.Sizes, counts: Mapping[str, int] | None
) -> tuple[dict[str, str], list[str]]:
    """The plan, and warnings. counts: of a pass over the data; None if it was not counted."""
    o: Any
    o, p, recipe, data = trainer.options, trainer.processes, trainer.recipe, trainer.data
    steps, tokens, on_gpu = trainer.progress.steps, o.batch_tokens, p.device.type == "cuda"
    setting = memory_setting(trainer)
    need, free = memory.estimate(sizes, setting), memory.available(p.device)
    share = sizes.trained / sizes.parameters
    plan = {
        "model": f"{o.model}: {type(sketch).__name__}, {sizes.parameters:,} parameters",
        "trained": f"{sizes.trained:,} parameters ({share:.2%} of the model)" if share < 1 else "all of them",
        "data": "",
        "evaluation": "",
        "tokens": "not counted, since --max-steps is given",
        "steps": f"{_plural(steps, 'step')} of {_plural(o.accumulation, 'forward pass')}, up to {tokens:,} tokens each",
        "learning rate": f"{o.peak_lr:g}, {o.lr_scheduler_type}",
        "precision": f"{o.precision}, activation checkpointing: {o.activations}",
        "saved as": saved_as(trainer, sketch),
        "memory": str(need),
        "export": f"{Path(o.output_dir) / GGUF}, for llama.cpp" * (o.export == "gguf"),
        "capture": "",
    }
    if o.lora_r:
        targets = ",".join(o.lora_target_modules) or "all projections"
        targets = ",".join((targets, *o.lora_target_parameters))
        plan["trained"] = f"LoRA of rank {o.lora_r} on {targets}: {plan['trained']}"
    if data.eval_rows is not None:
        plan["evaluation"] = f"{len(data.eval_rows):,} rows" + f" of {o.eval_data}" * bool(o.eval_data)
    if counts is not None:
        plan["tokens"] = f"{counts['tokens']:,} a pass, {counts['trained']:,} of them trained{left_out(counts)}"
    if p.size > 1:
        plan["steps"] += f", on {p.size} processes"
    if free:
        plan["memory"] += f"; {'the GPU has free' if on_gpu else 'the machine has'} {free / memory.GIB:.1f} GiB"
    if recipe.captured:
        how = "each step is a CUDA graph" if on_gpu else "not without a GPU"
        plan["capture"] = f"{how}; forwards are padded to {tokens:,} tokens"
        if counts is not None:
            padding = 1 - counts["tokens"] / (counts["batches"] * tokens)
            plan["capture"] += f", of which {padding:.1%} are padding"
    elif on_gpu and capture_pays(o, sketch, sizes, p):
        plan["capture"] = "no; forwards are so small that the host is likely the limit: --capture is faster then"
    for name, text in recipe.plan(len(data.rows), data.format[0] if data.format else "", counts).items():
        plan[name] = f"{steps:,}; {text}" if name == "steps" else text
    warnings = []
    if free and not memory.fits(sizes, setting, free):
        lora = None
        if not (o.lora_r or sizes.heads):
            lora = memory.adapter_parameters(sketch, dataclasses.replace(o, lora_r=16))
        changes = memory.advice(sizes, setting, free, lora)
        help = ". These would:" if changes else ", and no single change helps"
        warnings += [f"warning: this does not fit by the estimate{help}", *(f"  {change}" for change in changes)]
    if o.max_steps is None and steps < FEW_STEPS:
        text = f"warning: {_plural(steps, 'step')} teach little: raise --num-train-epochs, or lower "
        warnings.append(text + recipe.fewer_examples)
    return {name: text for name, text in plan.items() if text}, warnings


def memory_setting(trainer: "Trainer") -> memory.Setting:
    o: Any
    o, p = trainer.options, trainer.processes
    return memory.Setting(
        o.precision, o.activations, tokens=o.batch_tokens, accumulates=o.accumulation > p.batch_ranks,
        gpus=p.size // o.dp_replicate, split=p.ranks_per_batch, tp=o.tp, on_cpu=p.device.type == "cpu",
        quantized=o.quantize != "none", copies=trainer.recipe.frozen_copies, sequences=o.sequences,
    )  # fmt: skip


def choose_memory(trainer: "Trainer", sizes: memory.Sizes) -> None:
    """Sets the options that are "auto" to what fits on all GPUs."""
    free = memory.available(trainer.processes.device)
    if free is not None:
        free = min(trainer.processes.gather(free))
    setting = memory.choose(sizes, memory_setting(trainer), free)
    trainer.options.precision, trainer.options.activations = setting.precision, setting.activations


def capture_pays(options: Any, sketch: Any, sizes: memory.Sizes, processes: Any) -> bool:
    """Whether steps could be CUDA graphs, and are so small that the host is likely the limit."""
    if "capture" not in vars(options) or not options.packing:
        return False
    try:
        check_capture(sketch, processes)
    except InputError:
        return False
    return bool(6 * sizes.parameters * options.batch_tokens / sizes.blocks < _FLOPS_OF_A_BLOCK)


def saved_as(trainer: "Trainer", sketch: Any) -> str:
    """The dtype in which the model is saved, where that is not the dtype of MODEL; else ""."""
    o, recipe = trainer.options, trainer.recipe
    dtype, base = weight_dtype(o, trainer.processes), sketch.config.get_text_config().torch_dtype
    saves_model = o.merge or (not o.lora_r and recipe.trains_model)
    if not saves_model or recipe.from_scratch or dtype == base:
        return ""
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    text = f"{names[dtype]}, and the base is {names.get(base, base)}"
    if dtype.itemsize > base.itemsize:
        model = shlex.quote(str(Path(o.output_dir) / "model"))
        text += f": twice its size; `ligermodels convert {model} DST --dtype {names[base]}` halves it"
    return text


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{('es' if noun.endswith('s') else 's') * (count != 1)}"
