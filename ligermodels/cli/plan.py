"""`ligermodels plan`: the mesh, the memory and the speed of full or LoRA training on any number of GPUs, estimated."""

import argparse
import dataclasses
import math
from typing import Any

from ligermodels.cli.arguments import UsageError, usage_errors
from ligermodels.errors import page

_DESCRIPTION = f"""\
Estimates a training step of MODEL from its config.json, on each number of GPUs: the fastest mesh that fits, the memory
of a GPU, what it receives in collectives, and its tokens per second. Needs no GPU and reads no weights.
Steps were measured on one to four GPUs of one host, all beyond is extrapolated, by the speeds of links that --inside
and --between say. How far off it is: {page("distributed.md")}
"""
_EPILOG = """\
examples:
  ligermodels plan meta-llama/Llama-3.1-8B --gpus 8..1024
  ligermodels plan Qwen/Qwen3-32B --gpus 8,16 --gpu h100 --max-length 32768
  ligermodels plan Qwen/Qwen3-235B-A22B --gpus 16..64 --ep 8
  ligermodels plan meta-llama/Llama-3.1-70B --gpus 1,2 --lora-r 16 --quantize nf4
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command to the parser."""
    plan = commands.add_parser(
        "plan",
        help="estimate mesh, memory and speed of training on any number of GPUs",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    option = plan.add_argument
    option("model", metavar="MODEL", help="folder, GGUF file, or repository on the Hub; no weights are read")
    option("--gpus", required=True, metavar="N", help="numbers of GPUs: 8, or 8,12,16, or 8..1024 for its doublings")
    option("--gpu", choices=("h100", "h200"), default="h200", help="the kind of GPU (h200)")
    option("--max-length", type=int, default=4096, metavar="N", help="tokens of a row (4096)")
    option("--batch-tokens", type=int, metavar="N", help="tokens of a forward (--max-length)")
    option("--precision", choices=("auto", "fp32", "bf16-masters", "bf16"), default="auto", help="as in train (auto)")
    option("--activations", choices=("auto", "none", "mlp", "block"), default="auto", help="as in train (auto)")
    option("--lora-r", type=int, default=0, metavar="N", help="train LoRA adapters of this rank; 0: all weights (0)")
    option("--quantize", choices=("none", "nf4"), default="none", help="frozen weights in 4 bits, with --lora-r")
    for name in ("dp-replicate", "ep", "cp", "tp"):
        option(f"--{name}", type=int, metavar="N", help="only meshes with this size; default: what is fastest")
    option("--memory", type=float, metavar="GiB", help="free memory of a GPU (that of --gpu)")
    option("--tflops", type=float, metavar="X", help="TFLOP/s of matmuls in a real step (that of --gpu)")
    option("--inside", type=float, metavar="GB/s", help="what a GPU sends to others of its node (180)")
    option("--between", type=float, metavar="GB/s", help="what a GPU sends over its network card (40)")
    option("--gpus-per-node", type=int, metavar="N", help="GPUs of a node (8)")
    plan.set_defaults(run=_plan)


def _plan(args: argparse.Namespace) -> int:
    counts = _counts(args.gpus)
    from ligermodels.checkpoint import hub
    from ligermodels.recipes import options_of, scale
    from ligermodels.recipes.memory import Sizes, gib
    from ligermodels.recipes.model import sketch, with_quantization

    hardware = _hardware(args)
    with usage_errors():
        options = options_of("sft")(
            model=args.model, data=("none",), output_dir="none", max_length=args.max_length,
            batch_tokens=args.max_length if args.batch_tokens is None else args.batch_tokens, accumulation=1,
            precision=args.precision, activations=args.activations, lora_r=args.lora_r, quantize=args.quantize,
        )  # fmt: skip
    folder = hub.resolve(args.model, weights=False)
    model, options = sketch(folder), with_quantization(options, folder)
    sizes = Sizes.of(model, options)
    asked = {name: size for name in ("dp_replicate", "ep", "cp", "tp") if (size := getattr(args, name)) is not None}
    print(
        f"{args.model}: {type(model).__name__}, {sizes.parameters:,} parameters, {sizes.trained:,} trained; a forward "
        f"of {options.batch_tokens:,} tokens, rows of {options.max_length:,}"
    )
    rows = [("GPUs", "mesh", "precision", "recomputed", "a GPU", "receives", "compute", "exposed", "tokens/s a GPU")]
    for gpus in counts:
        with usage_errors():
            step = scale.best(model, sizes, options, gpus, hardware, asked)
        need = sum(step.need.values())
        fits = scale.fits(step, hardware)
        rows.append(
            (
                f"{gpus:,}", str(step.mesh), step.options.precision, step.options.activations,
                gib(need) if fits else f"{gib(need)}, which does not fit", f"{sum(step.bytes.values()) / 1e9:,.1f} GB",
                f"{step.compute * 1e3:,.0f} ms", f"{step.exposed * 1e3:,.0f} ms",
                f"{step.tokens_per_second:,.0f}" + " extrapolated" * (gpus > scale.MEASURED),
            )
        )  # fmt: skip
        if len(counts) == 1:
            parts = {**{name: gib(size) for name, size in step.need.items() if size}}
            parts |= {name: f"{size / 1e9:,.2f} GB a step" for name, size in step.bytes.items() if size}
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    if len(counts) == 1:
        print("\n" + "\n".join(f"{name:24} {text}" for name, text in parts.items()))
    if sizes.not_counted:
        print(f"not counted: {', '.join(sizes.not_counted)}")
    return 0


def _counts(text: str) -> list[int]:
    """The numbers of GPUs. Raises UsageError."""
    first, dots, last = text.partition("..")
    try:
        if not dots:
            counts = [int(part) for part in text.split(",")]
        else:
            counts = [int(first)]
            while 0 < counts[-1] * 2 <= int(last):
                counts.append(counts[-1] * 2)
    except ValueError:
        counts = []
    if not counts or min(counts) < 1 or (dots and int(last) < counts[0]):
        raise UsageError(f"--gpus {text}: expected numbers, such as 8, or 8,12,16, or 8..1024")
    return counts


def _hardware(args: argparse.Namespace) -> Any:
    """The hardware of --gpu with what the other options change. Raises UsageError."""
    from ligermodels.recipes import scale

    units = dict(memory=2**30, tflops=1e12, inside=1e9, between=1e9, gpus_per_node=1)
    given = {name: getattr(args, name) for name in units if getattr(args, name) is not None}
    for name, value in given.items():
        if not 0 < value < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} {value:g}: expected a number of more than 0")
    changes = {"flops" if name == "tflops" else name: value * units[name] for name, value in given.items()}
    return dataclasses.replace(scale.HARDWARE[args.gpu], **changes)
