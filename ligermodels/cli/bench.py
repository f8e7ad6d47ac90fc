"""`ligermodels bench`: a model's prefill and decode speed on this device, beside what the bytes allow."""

import argparse
import contextlib
import gc
import importlib
import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligermodels.checkpoint.files import write_errors
from ligermodels.cli.arguments import UsageError
from ligermodels.cli.chat import load_model, model_options, take_base
from ligermodels.cli.output import readable_size, say

if TYPE_CHECKING:
    import torch

    from ligermodels.arch import CausalLM

_EPILOG = """\
A line for each batch and prompt length, of random tokens, greedily. The first call of a case, which compiles, does not
count. "prefill" is the prompts' tokens over the time to the first token; "decode" is the tokens after it over their
time, of all rows together. "limit" is what "decode" would be if the device did nothing but read the weights once a
step, and each row's keys and values, as fast as it copies memory.
Exit status: 0 done, 2 wrong options, 3 another error, 130 stopped by Ctrl-C; what was measured before
is printed and saved.
"""
_COLUMNS = {
    "batch": ("batch", "d"),
    "prompt": ("prompt", ",d"),
    "first_token_ms": ("first token ms", ",.1f"),
    "prefill_tokens_per_s": ("prefill tokens/s", ",.0f"),
    "step_ms": ("step ms", ",.2f"),
    "decode_tokens_per_s": ("decode tokens/s", ",.1f"),
    "limit_tokens_per_s": ("limit", ",.0f"),
    "of_limit": ("of limit", ".0%"),
    "peak_gib": ("peak GiB", ".1f"),
}
"""Key of a row -> its title and format."""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    bench = commands.add_parser(
        "bench",
        parents=[model_options()],
        help="measure a model's speed on this device, beside what the bytes allow",
        description="Measures how fast MODEL loads, runs prompts (prefill) and writes text (decode) on this device.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_argument(
        "--batches", type=_counts, default=(1, 8, 32), metavar="N,N", help="rows that run at once (default 1,8,32)"
    )
    bench.add_argument(
        "--prompts", type=_counts, default=(128, 2048), metavar="N,N", help="tokens of each prompt (default 128,2048)"
    )
    bench.add_argument("--new", type=_count, default=128, metavar="N", help="new tokens, 2 or more (default 128)")
    bench.add_argument("--out", metavar="DIR", help="also write bench.json and, with matplotlib, bench.png there")
    bench.set_defaults(run=_bench)


def _count(text: str) -> int:
    if not text.strip().isdecimal() or not (value := int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return value


def _counts(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(map(_count, text.split(","))))


def _bench(args: argparse.Namespace) -> int:
    if args.new < 2:
        raise UsageError("--new 1 leaves no token after the first to measure: give 2 or more")
    out = None if args.out is None else Path(args.out)
    if out is not None:
        with write_errors(out):
            out.mkdir(parents=True, exist_ok=True)
    take_base(args)
    importlib.import_module("ligermodels.arch")  # and torch with it: not a part of loading
    start = time.perf_counter()
    model = load_model(args)
    _synchronize(model.device)
    seconds = time.perf_counter() - start

    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    prompts = [length for length in args.prompts if limit is None or length + args.new <= limit]
    if not prompts:
        raise UsageError(f"MODEL has {limit} positions, and --prompts and --new together go beyond: give fewer")
    if left_out := [f"{length:,}" for length in args.prompts if length not in prompts]:
        say(f"note: no prompts of {', '.join(left_out)}: with --new they go beyond the model's {limit:,} positions")

    rate, size = _copy_rate(model.device), sum(x.nbytes for x in model.parameters())
    record: dict[str, Any] = {
        "model": str(args.model), "adapter": args.adapter and str(args.adapter), **_place(model.device),
        "dtype": str(model.dtype).removeprefix("torch."), "quantize": args.quantize,
        "kv_cache_dtype": args.kv_cache_dtype, "weights_bytes": size, "load_s": seconds, "copy_bytes_per_s": rate,
        "new": args.new, "rows": [],
    }  # fmt: skip
    print(f"{record['device']}, torch {record['torch']}; copies {readable_size(rate)}/s")
    kinds = f"{record['dtype']}, linear layers in {args.quantize}" if args.quantize else record["dtype"]
    kinds += f", KV cache in {args.kv_cache_dtype}" * (args.kv_cache_dtype != "auto")
    print(f"{args.model}: {readable_size(size)} of weights, {kinds}, loaded in {seconds:.2f} s")
    print(f"{args.new} new tokens\n")
    print("  ".join(title for title, _ in _COLUMNS.values()).removesuffix("  peak GiB" * (model.device.type != "cuda")))
    try:
        for length, batch in itertools.product(prompts, args.batches):
            row = {"batch": batch, "prompt": length} | _measured(
                model, batch, length, args.new, rate, args.kv_cache_dtype
            )
            record["rows"].append(row)
            print(_line(row), flush=True)
    finally:
        if out is not None and record["rows"]:
            _write(out, record)
    return 0


def _line(row: Mapping[str, Any]) -> str:
    cells = [
        format(row[key], style).rjust(len(title)) if key in row else " " * len(title)
        for key, (title, style) in _COLUMNS.items()
    ]
    return "  ".join(cells).rstrip() + ("  out of memory" if row.get("out_of_memory") else "")


def _measured(model: "CausalLM", batch: int, length: int, new: int, rate: float, kind: str) -> dict[str, Any]:
    """The figures of a case; `out_of_memory` alone where that happened."""
    import torch

    from ligermodels.generation import release_graphs

    on_cuda = model.device.type == "cuda"
    try:
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(model.device)
        _times(model, batch, length, new, kind, steps=min(new, 3))
        times = _times(model, batch, length, new, kind, steps=new)
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "allocate memory" not in str(error):
            raise
        times = []
    release_graphs(model)  # the next case has the memory
    if not times:
        gc.collect()
        if on_cuda:
            torch.cuda.empty_cache()
        return {"out_of_memory": True}
    step = (times[-1] - times[0]) / (new - 1)
    limit = batch * rate / step_bytes(model, batch, length + new / 2, kind)
    found = {
        "first_token_ms": times[0] * 1e3, "prefill_tokens_per_s": batch * length / times[0], "step_ms": step * 1e3,
        "decode_tokens_per_s": batch / step, "limit_tokens_per_s": limit, "of_limit": batch / step / limit,
    }  # fmt: skip
    return found | ({"peak_gib": torch.cuda.max_memory_allocated(model.device) / 2**30} if on_cuda else {})


def _times(model: "CausalLM", batch: int, length: int, new: int, kind: str, *, steps: int) -> list[float]:
    """Seconds until the host has each of the first `steps` of `new` tokens. kind: the cache's dtype."""
    import torch

    from ligermodels.generation import generate_iter

    config, times = model.generation_config, []
    model.generation_config = type(config)()  # neither penalties nor sampling of the checkpoint's
    try:
        # The last ids of a vocabulary stand for images and the like.
        ids = torch.randint(0, model.config.get_text_config().vocab_size // 2 + 1, (batch, length))
        ids = ids.to(model.device)
        _synchronize(model.device)
        start = time.perf_counter()
        stream: Any = generate_iter(
            model, ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=(),
            kv_cache_dtype=kind,
        )  # fmt: skip
        with contextlib.closing(stream):
            for _ in itertools.islice(stream, steps):
                times.append(time.perf_counter() - start)
    finally:
        model.generation_config = config
    return times


def step_bytes(model: "CausalLM", batch: int, length: float, kv_cache_dtype: str = "auto") -> float:
    """Bytes that a step of decoding has to read for `batch` rows that hold `length` tokens.

    Those are the weights of the text model, less the table's rows that are not looked up, and each row's keys and
    values. Of stacked experts it is the share that is expected where each token chooses at random.
    """
    from ligermodels.layers import MoE
    from ligermodels.layers.cache import LayerCache
    from ligermodels.layers.head import unwrapped

    parts: Any = {id(x): x for part in (model.decoder, model.lm_head) for x in (*part.parameters(), *part.buffers())}
    found = float(sum(x.nbytes for x in parts.values()))
    if not getattr(unwrapped(model.lm_head), "is_tied", False):
        found -= model.decoder.embed_tokens.weight.nbytes
    for module in model.decoder.modules():
        if isinstance(module, MoE):
            unused = (1 - module.top_k / len(module.gate.weight)) ** batch
            found -= unused * sum(x.nbytes for x in (*module.experts.parameters(), *module.experts.buffers()))
    for layer in model.new_cache(1, 1, kv_cache_dtype=kv_cache_dtype):
        if isinstance(layer, LayerCache):
            found += batch * layer.token_bytes * (length if layer.window is None else min(length, layer.window))
    return found


def _copy_rate(device: "torch.device") -> float:
    """Bytes per second that copies within the device's memory read and write together."""
    import torch

    size = 2**30 if device.type == "cuda" else 2**27
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target, best = torch.zeros_like(source), 0.0
    for _ in range(4):
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(4):
            target.copy_(source)
        _synchronize(device)
        best = max(best, 4 * 2 * size / (time.perf_counter() - start))
    return best


def _synchronize(device: "torch.device") -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _place(device: "torch.device") -> dict[str, str]:
    import platform

    import torch

    from ligermodels import __version__

    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{device.type.upper()} ({platform.machine()}, {torch.get_num_threads()} threads)"
    return {"device": name, "torch": torch.__version__, "ligermodels": __version__}


def _write(out: Path, record: Mapping[str, Any]) -> None:
    with write_errors(out):
        (out / "bench.json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")
        files = ["bench.json", *["bench.png"] * _write_plot(out / "bench.png", record)]
    if len(files) == 1 and "matplotlib" not in sys.modules:
        say("note: a plot needs matplotlib: pip install 'ligermodels[train]'")
    say(f"wrote {' and '.join(str(out / name) for name in files)}")


def _write_plot(file: Path, record: Mapping[str, Any]) -> bool:
    """Tokens/s by batch. Returns False where matplotlib is not installed, or nothing fitted into memory."""
    rows: Sequence[Mapping[str, Any]] = [row for row in record["rows"] if "step_ms" in row]
    try:
        import matplotlib
    except ImportError:
        return False
    if not rows:
        return False
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5))
    for length in dict.fromkeys(row["prompt"] for row in rows):
        mine = [row for row in rows if row["prompt"] == length]
        batches, label = [row["batch"] for row in mine], f"prompts of {length:,}"
        axes[0].plot(batches, [row["prefill_tokens_per_s"] for row in mine], "o-", label=label)
        (line,) = axes[1].plot(batches, [row["decode_tokens_per_s"] for row in mine], "o-", label=label)
        limits = [row["limit_tokens_per_s"] for row in mine]
        axes[1].plot(batches, limits, "--", color=line.get_color(), label=f"{label}, limit")
    for one, title in zip(axes, ("prefill", "decode"), strict=True):
        one.set(title=title, xlabel="batch", ylabel="tokens/s", xscale="log", yscale="log")
        one.set_xticks(sorted({row["batch"] for row in rows}), sorted({row["batch"] for row in rows}))
        one.minorticks_off()
        one.grid(alpha=0.3)
        one.legend()
    figure.suptitle(f"{record['model']}, {record['dtype']}, {record['device']}")
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
    return True
