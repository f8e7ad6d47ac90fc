"""One run of a recipe: data, plan, model, loop, and what is written at the end.

DIR/options.yaml       the options, with what was chosen for "auto"
DIR/checkpoints/       the newest states, from which --resume goes on
DIR/metrics.jsonl      a line per step and per evaluation; tensorboard/ beside it
DIR/best/              the model, or the adapters, of the best evaluation
DIR/model/             the tuned model; model.gguf beside it with --export gguf
DIR/report.md          what was run and what came out; loss.png
"""

import contextlib
import dataclasses
import math
import os
import shlex
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ligermodels.arch import arch_of, load
from ligermodels.arch.pretrained import config_values
from ligermodels.checkpoint import hub
from ligermodels.checkpoint.files import write_errors
from ligermodels.errors import InputError, LigermodelsError
from ligermodels.parallel import Checkpoints, parallelize
from ligermodels.processes import Processes
from ligermodels.recipes import export, memory, report
from ligermodels.recipes.batches import BadRowError
from ligermodels.recipes.data import Data
from ligermodels.recipes.loop import (
    FEW_STEPS,
    Count,
    Feed,
    Loop,
    Loss,
    Progress,
    Source,
    forwards_per_step,
    next_token_loss,
    num_labels,
    own_part,
    start_processes,
)
from ligermodels.recipes.options import TextOptions, TrainOptions
from ligermodels.recipes.report import say
from ligermodels.text import Tokenizer
from ligermodels.training import AdamW, accumulate_in_place

MakeLoss = Callable[[Any, Any, Any, Processes, Callable[[], Any]], Loss]


@dataclass(frozen=True)
class Recipe:
    """The parts of a recipe: its data, its loss, and what is special about its model."""

    open_data: Callable[[TrainOptions, Tokenizer, int], Data] = Data
    """Of options, tokenizer, and what the length of a row is a multiple of."""
    loss: Loss = next_token_loss
    count: Count = num_labels
    sizes: Callable[[Any, memory.Sizes, Any], memory.Sizes] = lambda options, sizes, sketch: sizes
    """Of options, what the model needs, and the model on the meta device: what the run needs."""
    extend: Callable[[Any, Any], None] | None = None
    """(options, model): adds what is trained beside or in place of its weights, before it is sharded."""
    save: Callable[[Any, Any, Path], None] | None = None
    """(options, model, folder): writes what was trained, in place of the model. Called by every rank."""
    make_loss: MakeLoss | None = None
    """Of options, model, data, processes, and a function that loads MODEL once more, frozen; in place of `loss`."""
    make_feed: Callable[[Feed, Any, Loss], Source] | None = None
    """Of the feed of the data, the model and the loss: what makes the batches of the steps, in place of the feed."""


def run(options: TrainOptions, recipe: Recipe) -> int:
    """Trains; returns the exit status. Raises the errors of ligermodels, and KeyboardInterrupt once all is saved."""
    report.check_logger(options.report_to)
    joined = dist.is_initialized()
    processes = start_processes(options)
    try:
        with contextlib.ExitStack() as held:
            return _run(options, recipe, processes, held)
    except KeyboardInterrupt as stop:
        stop.__notes__ = getattr(stop, "__notes__", []) if processes.is_main else []
        raise
    finally:
        if processes.mesh is not None and not joined:
            dist.destroy_process_group()


def _run(options: TrainOptions, recipe: Recipe, processes: Processes, held: contextlib.ExitStack) -> int:
    """held: the exit stack that holds the lock of the folder."""
    out = Path(options.output_dir)
    if not options.dry_run:
        processes.from_main(lambda: _check_folder(out, resume=options.resume))
    before = processes.from_main(lambda: _options_before(out, options))
    if options.resume and before is None and processes.is_main:
        say(f"warning: --resume, but {out} holds no run: a new one begins")
    scratch = getattr(options, "scratch", False)
    folder = hub.resolve(options.model, weights=not scratch)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise InputError(
            f"{options.model} holds adapters; give the model that they are for, or one with them merged in"
        )
    tokenizer = Tokenizer.from_hub(folder)
    config = config_values(folder, None)
    sketch = arch_of(folder).from_config(config, device="meta")
    if options.chat_template is not None:
        _set_template(options.chat_template, tokenizer, sketch)
    if options.export != "none":
        processes.from_main(lambda: export.check(options, folder, sketch))
    capture = getattr(options, "capture", False)
    if capture:
        _check_capture(sketch, processes)
    _check_targets(options, sketch)
    options = _with_lengths(options, sketch, processes)
    data = recipe.open_data(options, tokenizer, processes.ranks_per_batch)
    counts = _counted(data, processes) if options.max_steps is None else None
    forwards = None if counts is None else counts["batches"] * (options.num_train_epochs or 1)
    per_step = forwards_per_step(options.accumulation, processes.batch_ranks, forwards)
    sizes = recipe.sizes(options, _sizes(options, sketch), sketch)
    options = _with_memory(dataclasses.replace(options, accumulation=per_step), sizes, processes)
    steps = options.max_steps or max(1, round((forwards or 0) / per_step))
    plan, notes = _plan(options, sketch, sizes, data, steps, counts, processes)
    if processes.is_main:
        text = "\n".join([*(f"{name:14} {value}" for name, value in plan.items()), *notes])
        print(text, file=sys.stdout if options.dry_run else sys.stderr, flush=True)
        for text in data.examples(options.show, colour=sys.stderr.isatty()):
            say(f"\n{text}")
    if options.dry_run:
        return 0
    feed = Feed(data.train, per_step, processes, len(sketch.get_input_embeddings().weight))
    feed.make_next()  # what is wrong with the data is found before anything is written
    evaluation = own_part(data.evaluation(), processes)
    changed = [] if before is None else _check_same(before, options)

    model = _load(options, folder, processes, recipe.extend)
    held.enter_context(_alone(out, options, processes))  # before anything is written
    processes.from_main(lambda: _write_options(out, options, resumed=False))
    loss = recipe.loss
    if recipe.make_loss is not None:
        loss = recipe.make_loss(options, model, data, processes, lambda: _load_frozen(options, folder, processes))
    optimizer = _optimizer(options, model, processes)
    progress = Progress(steps)

    def save(options: TrainOptions, model: Any, target: Path) -> None:
        (recipe.save or _save)(options, model, target)
        processes.from_main(lambda: _save_template(options, tokenizer, target))

    source = feed if recipe.make_feed is None else recipe.make_feed(feed, model, loss)
    others: dict[str, Any] = dict(data=source, progress=progress)
    frozen = all(parameter.requires_grad for parameter in model.parameters())
    with Checkpoints(
        out / "checkpoints", model, optimizer, keep=options.save_total_limit, frozen=frozen, **others
    ) as checkpoints:
        resumed = checkpoints.load()
        if resumed > steps:
            raise InputError(f"{out} has a checkpoint after step {resumed}, and this run is to have {steps} steps")
        processes.from_main(lambda: _write_options(out, options, resumed=True))  # now that the run can go on with them
        if options.resume and processes.is_main:
            if before is not None:
                say(f"resumed after step {resumed}" if resumed else f"{out} has no checkpoint yet: the run begins")
            if changed:
                say(f"changed since the run began: {', '.join(changed)}")
        on_gpu = processes.device.type == "cuda"
        reporter = (
            report.Reporter(options, steps, resumed, progress.evaluated, on_gpu=on_gpu)
            if processes.is_main
            else report.Silent()
        )
        loop = Loop(
            model, optimizer, source, evaluation, options, processes, progress, checkpoints, reporter,
            lambda target: save(options, model, target), loss, recipe.count, capture,
        )  # fmt: skip
        if not resumed:
            torch.manual_seed(options.seed + processes.batch_rank)
        try:
            loop.run()
        except (KeyboardInterrupt, LigermodelsError) as stop:
            if not loop.stopped:
                raise
            again = f"train {options.recipe} --config {shlex.quote(str(out / 'options.yaml'))} --resume"
            start_by = f"torchrun --nproc-per-node {processes.size} -m " * (processes.size > 1)
            again = f"{start_by}ligermodels {again}" + " --skip-bad" * isinstance(stop, BadRowError)
            stop.add_note(f"stopped after step {progress.step} of {steps}, which is saved. To go on:\n  {again}")
            raise
        finally:
            reporter.close()
    saved = _save_last(options, model, out, recipe.save)
    processes.from_main(lambda: _save_template(options, tokenizer, out / "adapter", out / "model"))
    if processes.is_main:
        exported = None if options.export == "none" else export.write(options, folder)
        _finish(options, saved, exported, progress, plan, data.train.report(), reporter)
        _tell_files(options, sketch, saved, exported, processes)
    return 0


# Before


def _check_folder(out: Path, *, resume: bool) -> None:
    """Raises InputError where --output-dir cannot be used, or has another run."""
    if out.exists() and not out.is_dir():
        raise InputError(f"--output-dir {out} is a file; give a folder")
    if out.is_dir() and any(out.iterdir()):
        if not (out / "options.yaml").is_file():
            what = "holds no run to resume" if resume else "is not empty"
            raise InputError(f"--output-dir {out} {what}; give a folder that is new")
        if not resume:
            raise InputError(
                f"--output-dir {out} has a run already; pass --resume to go on with it, or give another folder"
            )
    above = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise InputError(f"--output-dir {out} cannot be written, since {above} cannot; give another folder")


def _check_capture(sketch: Any, processes: Processes) -> None:
    """Raises InputError where steps cannot be CUDA graphs, or padding would change the loss."""
    if processes.mesh is not None:
        raise InputError(
            "capture is for one process, and there are several: leave out --capture, or start without torchrun"
        )
    if hasattr(sketch.config, "vision_config"):
        raise InputError(f"capture: the images of a {type(sketch).__name__} have no fixed shape; leave --capture out")
    if getattr(sketch.config, "output_router_logits", False):
        raise InputError(
            "capture pads forwards, and the balancing loss of the routers would count the padding: leave --capture "
            "out, or set output_router_logits to false in the model's config.json"
        )


_WORK_OF_A_BLOCK = 8e11
"""Operations that an H200 does in the 2 ms which the host takes to launch the forward and backward of a block."""


def _capture_pays(options: TrainOptions, sketch: Any, sizes: memory.Sizes, processes: Processes) -> bool:
    """Whether the host is likely the limit of steps that could be CUDA graphs."""
    if not isinstance(options, TextOptions) or not options.packing:
        return False
    try:
        _check_capture(sketch, processes)
    except InputError:
        return False
    assert options.batch_tokens is not None
    return 6 * sizes.parameters * options.batch_tokens / sizes.blocks < _WORK_OF_A_BLOCK


@contextlib.contextmanager
def _alone(out: Path, options: TrainOptions, processes: Processes) -> Iterator[None]:
    """Makes and holds the folder for this run. Raises InputError, on all ranks, where another is writing there, or has
    written since the options were checked."""
    held: int | None = None

    def hold() -> None:
        nonlocal held
        with write_errors(out):
            out.mkdir(parents=True, exist_ok=True)
        try:
            import fcntl
        except ImportError:  # Windows
            return
        held = os.open(out, os.O_RDONLY)  # the system lets go of it when the process ends, however it ends
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"another process is training in --output-dir {out}; wait until it ends, or end it"
            ) from None
        except OSError:  # a file system without locks
            return
        _check_folder(out, resume=options.resume)
        for left in out.glob(".*.saving-*"):  # models that a killed run had not finished writing
            shutil.rmtree(left, ignore_errors=True)

    try:
        processes.from_main(hold)
        yield
    finally:
        if held is not None:
            os.close(held)


_SAME = (
    "model", "data", "eval_data", "eval_share", "chat_template", "max_length", "packing", "batch_tokens", "prompts",
    "accumulation", "seed", "precision", "lora_r", "lora_alpha", "lora_target_modules", "quantize", "weight_decay",
    "adam_beta1", "adam_beta2", "scratch", "loss_type", "beta", "simpo_gamma", "label_smoothing", "sft_weight",
    "desirable_weight", "undesirable_weight", "reference", "teacher", "temperature", "hard_weight", "heads",
    "head_layers", "head_decay", "heads_weight", "reward_funcs", "reward_weights", "num_generations",
    "max_completion_length", "scale_rewards", "epsilon", "epsilon_high", "num_iterations",
    "mask_truncated_completions", "lmbda", "sampling_temperature", "train_base",
)  # fmt: skip
"""Options that must not change on resume."""


def _options_before(out: Path, options: TrainOptions) -> dict[str, Any] | None:
    """The options of the run that is to be resumed, or None. Raises InputError where it is one of another recipe."""
    file = out / "options.yaml"
    return type(options).load(file) if options.resume and file.is_file() else None


def _check_same(before: Mapping[str, Any], options: TrainOptions) -> list[str]:
    """The options that have changed since the run began. Raises InputError where they must not."""
    changed = []
    for name, old in before.items():
        new = getattr(options, name)
        if old == new or name in ("output_dir", "show", "resume", "dry_run", "report_to"):
            continue
        if name in _SAME:
            file = Path(options.output_dir) / "options.yaml"
            raise InputError(
                f"the run in {options.output_dir} had {name}={old}, and this has {name}={new}; resume with "
                f"--config {file}, or give another folder"
            )
        changed.append(f"{name} {_or_default(old)} -> {_or_default(new)}")
    return changed


def _or_default(value: Any) -> str:
    return "default" if value is None else str(value)


def _write_options(out: Path, options: TrainOptions, *, resumed: bool) -> None:
    """resumed: in place of those that are there."""
    file = out / "options.yaml"
    if resumed or not file.is_file():
        with write_errors(out):
            file.write_text(options.dump(), "utf-8")


def _set_template(given: str, tokenizer: Tokenizer, sketch: Any) -> None:
    """Gives the tokenizer the template of a name in the checkpoint, or of a file. Raises InputError, TokenizerError."""
    if hasattr(sketch.config, "vision_config"):
        raise InputError("chat_template: a model of images needs its own, which places them; leave it out")
    if given in (templates := tokenizer.files.templates):
        tokenizer.chat_template = templates[given]
    elif Path(given).expanduser().is_file():
        tokenizer.read_chat_template(given)
    else:
        names = f", nor has the model a template of this name; it has {', '.join(templates)}" if templates else ""
        raise InputError(f"chat_template={given}: there is no such file{names}")


def _counted(data: Data, processes: Processes) -> Mapping[str, int]:
    """What a pass over the data has. Each rank counts: waiting for one could time out."""
    note = threading.Timer(5.0, say, [f"counting the tokens of {data.summary}, which --max-steps N goes without"])
    if processes.is_main:
        note.start()
    try:
        return data.count()
    finally:
        note.cancel()


def _with_lengths(options: TrainOptions, sketch: Any, processes: Processes) -> TrainOptions:
    """The options with the lengths that None stands for."""
    context = sketch.config.get_text_config().max_position_embeddings
    length = options.max_length or min(4096, context)
    if length > context and processes.is_main:
        say(f"warning: --max-length {length} is more than the {context} positions that the model was made for")
    tokens = options.batch_tokens or length * options.sequences
    return dataclasses.replace(options, max_length=length, batch_tokens=tokens)


def _with_memory(options: TrainOptions, sizes: memory.Sizes, processes: Processes) -> TrainOptions:
    """The options with what fits on this machine for "auto"."""
    free = memory.available(processes.device)
    if free is not None:
        free = min(processes.gather(free))
    setting = memory.choose(sizes, _setting(options, processes), free)
    return dataclasses.replace(options, precision=setting.precision, activations=setting.activations)


def _check_targets(options: TrainOptions, sketch: Any) -> None:
    """Raises InputError for a projection that the model does not have."""
    names = [name.rpartition(".")[2] for name, x in sketch.decoder.layers.named_modules() if isinstance(x, nn.Linear)]
    if wrong := [name for name in options.lora_target_modules if name not in names]:
        has = ", ".join(dict.fromkeys(names))
        raise InputError(f"lora_targets: the model has no {', '.join(wrong)}; it has {has}")


def _sizes(options: TrainOptions, sketch: Any) -> memory.Sizes:
    adapters = (
        memory.adapter_parameters(sketch, options.lora_r, options.lora_target_modules) if options.lora_r else None
    )
    return memory.Sizes.of(sketch, trained=adapters)


def _setting(options: TrainOptions, processes: Processes) -> memory.Setting:
    assert options.batch_tokens is not None and options.accumulation is not None
    return memory.Setting(
        options.precision,
        options.activations,
        tokens=options.batch_tokens,
        accumulates=options.accumulation > processes.batch_ranks,
        gpus=processes.size // options.dp_replicate,
        split=processes.ranks_per_batch,
        tp=options.tp,
        on_cpu=processes.device.type == "cpu",
        quantized=options.quantize != "none",
        copies=options.frozen_copies,
        sequences=options.sequences,
    )


def _plan(
    options: TrainOptions,
    sketch: Any,
    sizes: memory.Sizes,
    data: Data,
    steps: int,
    counts: Mapping[str, int] | None,
    processes: Processes,
) -> tuple[dict[str, str], list[str]]:
    """What is about to happen, by name, and warnings."""
    setting = _setting(options, processes)
    share = sizes.trained / sizes.parameters
    what = f"LoRA of rank {options.lora_r} on {','.join(options.lora_target_modules) or 'all projections'}: " * bool(
        options.lora_r
    )
    need, free = memory.estimate(sizes, setting), memory.available(processes.device)
    on_gpu = processes.device.type == "cuda"
    lines = {
        "model": f"{options.model}: {type(sketch).__name__}, {sizes.parameters:,} parameters",
        "trained": f"{what}{sizes.trained:,} parameters ({share:.2%} of the model)" if share < 1 else "all of them",
        "data": f"{options.data}: {data.summary}",
        "evaluation": data.evaluation_summary,
        "tokens": "not counted, since --max-steps is given"
        if counts is None
        else f"{counts['tokens']:,} a pass, {counts['trained']:,} of them trained{_left_out(counts)}",
        "steps": f"{_number(steps, 'step')} of {_number(options.accumulation, 'forward pass')}, up to "
        f"{options.batch_tokens:,} tokens each" + f", on {processes.size} processes" * (processes.size > 1),
        "learning rate": f"{options.peak_lr:g}, {options.lr_scheduler_type}",
        "precision": f"{options.precision}, activation checkpointing: {options.activations}",
        "saved as": _saved_as(options, sketch, processes),
        "memory": str(need)
        + (f"; {'the GPU has free' if on_gpu else 'the machine has'} {free / memory.GIB:.1f} GiB" if free else ""),
        "export": f"{Path(options.output_dir) / export.FILE}, for llama.cpp" * (options.export == "gguf"),
    }
    if getattr(options, "capture", False):
        how = "each step is a CUDA graph" if on_gpu else "not without a GPU"
        lines["capture"] = f"{how}; forwards are padded to {setting.tokens:,} tokens"
        if counts is not None:
            padding = 1 - counts["tokens"] / (counts["batches"] * setting.tokens)
            lines["capture"] += f", of which {padding:.1%} are padding"
    elif on_gpu and _capture_pays(options, sketch, sizes, processes):
        lines["capture"] = "no; forwards are so small that the host is likely the limit: --capture is faster then"
    for name, text in data.plan(counts).items():
        lines[name] = f"{steps:,}; {text}" if name == "steps" else text
    notes = []
    if free and need.total > memory.MARGIN * free:
        adapters = None if options.lora_r or sizes.heads else memory.adapter_parameters(sketch, 16)
        changes = memory.advice(sizes, setting, free, adapters)
        fits = ". What does:" if changes else ", and no single change helps"
        notes += [f"warning: this does not fit by the estimate{fits}", *(f"  {change}" for change in changes)]
    if options.max_steps is None and steps < FEW_STEPS:
        fewer = "--prompts" if getattr(options, "copies", 0) else "--max-length or --accumulation"
        notes.append(f"warning: so few steps ({steps}) teach little: raise --num-train-epochs, or lower {fewer}")
    return {name: value for name, value in lines.items() if value}, notes


def _number(count: int | None, what: str) -> str:
    return f"{count:,} {what}{('es' if what.endswith('s') else 's') * (count != 1)}"


def _saved_as(options: TrainOptions, sketch: Any, processes: Processes) -> str:
    """The dtype in which a model is saved, where it is not that of MODEL."""
    dtype, base = _dtype(options, processes), sketch.config.get_text_config().torch_dtype
    whole = options.merge or (not options.lora_r and getattr(options, "train_base", True))
    if not whole or getattr(options, "scratch", False) or dtype == base:
        return ""
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    text = f"{names[dtype]}, and the base is {names.get(base, base)}"
    if dtype.itemsize > base.itemsize:
        model = shlex.quote(str(Path(options.output_dir) / "model"))
        text += f": twice its size; `ligermodels convert {model} DST --dtype {names[base]}` halves it"
    return text


def _left_out(counts: Mapping[str, int]) -> str:
    """Examples dropped or truncated."""
    names = {
        "truncated": "rows cut at --max-length",
        "untrained": "rows left out without a token to train",
        "cut_away": "rows left out whose trained tokens lie behind --max-length",
        "bad": "rows skipped that cannot be read",
    }
    return "".join(f"; {counts[name]:,} {text}" for name, text in names.items() if counts[name])


# The model


def _load(
    options: TrainOptions,
    folder: Path,
    processes: Processes,
    extend: Callable[[Any, Any], None] | None = None,
    *,
    trained: bool = True,
) -> Any:
    """The model, ready to train unless it is not `trained`. extend: that of `Recipe`."""
    gpu = processes.device.type == "cuda"
    mixed = torch.bfloat16 if gpu and (options.precision == "fp32" or options.lora_r) else None
    how: dict[str, Any] = dict(dtype=_dtype(options, processes))
    how["activation_checkpointing"] = options.activations
    whole = processes.mesh is None or options.lora_r or extend is not None
    if whole:  # adapters are put into a whole model, which is sharded then
        how["device"] = processes.device
    else:
        how |= dict(mesh=processes.mesh, parallel=dict(param_dtype=mixed))
    if getattr(options, "scratch", False):
        model = arch_of(folder).from_config(config_values(folder, None), seed=options.seed, **how)
        model.source_folder = folder  # for the files of the tokenizer
    else:
        if options.quantize != "none":
            how["quantization_config"] = options.quantize
        model = load(str(folder), progress=processes.is_main and sys.stderr.isatty(), **how)
        model.config._name_or_path = model.name_or_path = options.model
    if options.lora_r:
        from ligermodels.training.lora import add_lora

        targets = list(options.lora_target_modules) or "all-linear"
        add_lora(model, r=options.lora_r, alpha=options.lora_alpha, targets=targets, seed=options.seed)
    if extend is not None:
        extend(options, model)
    if whole and processes.mesh is not None:
        parallelize(model, processes.mesh, param_dtype=mixed)
    if trained and not options.lora_r and gpu and processes.mesh is None and options.accumulation != 1:
        accumulate_in_place(model)
    return model.train()


def _dtype(options: TrainOptions, processes: Processes) -> torch.dtype:
    """Of the weights, in memory and as they are saved."""
    low = options.precision != "fp32" or (processes.device.type == "cuda" and processes.mesh is None)
    return torch.bfloat16 if low else torch.float32


def _load_frozen(options: TrainOptions, folder: Path, processes: Processes) -> Any:
    """The model once more, to compare with. Not for a run that trains adapters: they are switched off."""
    return _load(options, folder, processes, trained=False).requires_grad_(False).eval()


def _optimizer(options: TrainOptions, model: nn.Module, processes: Processes) -> AdamW:
    """AdamW over what is trained; norms and biases are not decayed."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        dict(params=[p for p in trained if p.dim() >= 2], weight_decay=options.weight_decay),
        dict(params=[p for p in trained if p.dim() < 2], weight_decay=0.0),
    ]
    exact = options.precision == "fp32" and processes.device.type == "cuda" and processes.mesh is None
    return AdamW(
        [group for group in groups if group["params"]],
        lr=options.peak_lr,
        betas=(options.adam_beta1, options.adam_beta2),
        master_weights=exact or options.precision == "bf16-masters" or bool(options.lora_r),
        state_dtype=torch.float32 if exact else None,
        max_grad_norm=options.max_grad_norm or math.inf,
        seed=options.seed,
        capturable=getattr(options, "capture", False),
    )


def _save(options: TrainOptions, model: Any, folder: Path) -> None:
    """Writes the model, or its adapters. Called by every rank."""
    if options.lora_r:
        from ligermodels.training.lora import save_adapter

        save_adapter(model, folder)
    else:
        model.save_pretrained(folder)


def _save_template(options: TrainOptions, tokenizer: Tokenizer, *folders: Path) -> None:
    """Puts the tokenizer with the template of --chat-template beside what was tuned: with it, the model is used."""
    for folder in folders:
        if options.chat_template is not None and folder.is_dir():
            tokenizer.save_pretrained(folder)


def _save_last(
    options: TrainOptions, model: Any, out: Path, save: Callable[[Any, Any, Path], None] | None = None
) -> Path:
    """Writes what the run is for; returns its folder. save: that of `Recipe`."""
    if save is not None:
        whole = all(parameter.requires_grad for parameter in model.parameters())
        folder = out / ("model" if whole else options.recipe)
        save(options, model, folder)
        return folder
    if not options.lora_r:
        _save(options, model, out / "model")
        return out / "model"
    _save(options, model, out / "adapter")
    if not options.merge:
        return out / "adapter"
    from ligermodels.training.lora import merge_lora

    merge_lora(model).save_pretrained(out / "model")
    return out / "model"


# After


def _finish(
    options: TrainOptions,
    model: Path,
    exported: Path | None,
    progress: Progress,
    plan: Mapping[str, str],
    counts: Mapping[str, int],
    reporter: report.Reporter,
) -> None:
    """Plot, report and model card. counts: of the rows that were read."""
    out = Path(options.output_dir)
    facts = dict(plan)
    facts["steps taken"] = f"{progress.step:,} of {progress.steps:,}"
    facts["tokens seen"] = f"{progress.tokens:,}, of which {progress.trained:,} were trained{_left_out(counts)}"
    facts["time"] = f"{report.clock(progress.seconds)} in steps"
    facts["speed"] = f"{progress.tokens / max(progress.seconds, 1e-9):,.0f} tokens/s"
    facts["peak memory"] = f"{reporter.gib:.2f} GiB ({reporter.memory})"
    if progress.best_step >= 0:
        facts["best evaluation"] = f"{progress.best:.4f}, after step {progress.best_step}"
    verb = "chat" if options.recipe != "pretrain" else "generate"
    command = f"ligermodels {verb} {shlex.quote(str(model))}" + " --prompt '...'" * (verb == "generate")
    use = f"To use it:\n\n    {command}\n\nor `ligermodels.load({str(model)!r})`; it opens in transformers too."
    if model.name == "adapter":
        use = (
            f"The folder holds adapters of {options.model}, as PEFT writes them. To use them:\n\n    {command}\n\nor"
            f"\n\n    model = ligermodels.load({options.model!r})\n"
            f"    ligermodels.training.load_adapter(model, {str(model)!r})"
        )
    if model.name == "medusa":
        use = (
            f"The folder holds Medusa heads of {options.model}. To use them:\n\n"
            f"    model = ligermodels.load({options.model!r})\n"
            f"    heads = ligermodels.training.load_medusa(model, {str(model)!r})"
        )
    if exported is not None:
        use += f"\n\nllama.cpp runs `{exported}`."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fonts
        plot = report.write_plot(out)
    report.write_report(out, options, facts, use, plot=plot)
    report.write_card(model, options, facts, use)


def _tell_files(options: TrainOptions, sketch: Any, saved: Path, exported: Path | None, processes: Processes) -> None:
    """The last lines; the path of what was trained goes to stdout."""
    say(f"report: {Path(options.output_dir) / 'report.md'}")
    if exported is not None:
        say(f"GGUF: {exported} ({exported.stat().st_size / 1e6:,.1f} MB), for llama.cpp")
    if dtype := _saved_as(options, sketch, processes):
        say(f"saved as {dtype}")
    if sys.stdout.isatty():
        print(f"{saved.name}: ", end="", file=sys.stderr, flush=True)
    else:
        say(f"{saved.name}: {saved}")
    print(saved)
