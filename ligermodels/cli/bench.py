"""`ligermodels bench`: a model's prefill and decode speed on this device, beside the limit of memory bandwidth."""

import argparse
import contextlib
import gc
import importlib
import itertools
import json
import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligermodels import __version__
from ligermodels.checkpoint.files import readable_size, write_errors
from ligermodels.cli.arguments import UsageError
from ligermodels.cli.models import load_model, model_options, resolve_adapter
from ligermodels.cli.output import say

if TYPE_CHECKING:
    import torch

    from ligermodels.arch import CausalLM

_EPILOG = """\
Prints a line for each batch size and prompt length. Prompts are random tokens, decoding is greedy, and a first call
of each case, which compiles, is not counted.
prefill: prompt tokens / time to the first token. decode: tokens after the first / their time, summed over the rows.
limit: what decode would be if a step only read the weights once, and each row's keys and values, at the speed of
copies in the device's memory.
Exit status: 0 done, 2 wrong options, 3 another error, 130 stopped by Ctrl-C; the finished lines are printed and saved.
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
"""{key of a row: (title, format)}."""
_DEFAULTS = {"batches": ((1, 8, 32), (1,)), "prompts": ((128, 2048), (128,)), "new": (128, 32)}
"""{option: (on a GPU, on a CPU)}."""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    bench = commands.add_parser(
        "bench",
        parents=[model_options()],
        help="measure a model's speed on this device, beside the limit of its memory bandwidth",
        description="Measures how fast MODEL loads, reads prompts (prefill) and generates (decode) on this device.",
        epilog=_EPILOG,
    )
    bench.add_argument("--batches", type=_counts, metavar="N,N", help="batch sizes (1,8,32; on a CPU 1)")
    bench.add_argument("--prompts", type=_counts, metavar="N,N", help="prompt lengths (128,2048; on a CPU 128)")
    bench.add_argument("--new", type=_count, metavar="N", help="new tokens, 2 or more (128; on a CPU 32)")
    bench.add_argument("--out", metavar="DIR", help="also write the results to DIR/bench.json")
    bench.set_defaults(run=_bench)


def _count(text: str) -> int:
    if not text.strip().isdecimal() or not (value := int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return value


def _counts(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(map(_count, text.split(","))))


def _bench(args: argparse.Namespace) -> int:
    if args.new == 1:
        raise UsageError("--new 1 leaves no token after the first to measure: give 2 or more")
    out = None if args.out is None else Path(os.path.expanduser(args.out))
    if out is not None and out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file; give a folder")
    resolve_adapter(args)
    torch = importlib.import_module("torch")
    importlib.import_module("ligermodels.arch")  # importing it is not a part of loading
    start = time.perf_counter()
    model = load_model(args)
    _synchronize(model.device)
    seconds = time.perf_counter() - start
    for name, values in _DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, values[model.device.type == "cpu"])

    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    prompts = [length for length in args.prompts if limit is None or length + args.new <= limit]
    if not prompts:
        raise UsageError(f"MODEL has {limit} positions, fewer than --prompts and --new together: give fewer")
    if skipped := [f"{length:,}" for length in args.prompts if length not in prompts]:
        say(f"note: skipped prompts of {', '.join(skipped)}: with --new they exceed the model's {limit:,} positions")
    if out is not None:  # not before: an error of the model leaves no empty folder
        with write_errors(out):
            out.mkdir(parents=True, exist_ok=True)

    device = f"{model.device.type.upper()} ({platform.machine()}, {torch.get_num_threads()} threads)"
    if model.device.type == "cuda":
        device = torch.cuda.get_device_name(model.device)
    rate, size = _copy_rate(model.device), sum(x.nbytes for x in model.parameters())
    record: dict[str, Any] = {
        "model": str(args.model), "adapter": args.adapter and str(args.adapter), "device": device,
        "torch": torch.__version__, "ligermodels": __version__, "dtype": str(model.dtype).removeprefix("torch."),
        "quantize": args.quantize, "kv_cache_dtype": args.kv_cache_dtype, "weights_bytes": size, "load_s": seconds,
        "copy_bytes_per_s": rate, "new": args.new, "rows": [],
    }  # fmt: skip
    print(f"{device}, torch {torch.__version__}; copies {readable_size(rate)}/s")
    kinds = f"{record['dtype']}, linear layers in {args.quantize}" if args.quantize else record["dtype"]
    kinds += f", KV cache in {args.kv_cache_dtype}" * (args.kv_cache_dtype != "auto")
    print(f"{args.model}: {readable_size(size)} of weights, {kinds}, loaded in {seconds:.2f} s")
    print(f"{args.new} new tokens\n")
    columns = {key: column for key, column in _COLUMNS.items() if key != "peak_gib" or model.device.type == "cuda"}
    print("  ".join(title for title, _ in columns.values()))
    try:
        for length, batch in itertools.product(prompts, args.batches):
            row = {"batch": batch, "prompt": length}
            row |= _measure(model, batch, length, args.new, rate, args.kv_cache_dtype)
            record["rows"].append(row)
            cells = [format(row[key], form) if key in row else "" for key, (_, form) in columns.items()]
            line = "  ".join(cell.rjust(len(title)) for cell, (title, _) in zip(cells, columns.values(), strict=True))
            print(line.rstrip() + "  out of memory" * row.get("out_of_memory", False), flush=True)
    finally:
        if out is not None and record["rows"]:
            with write_errors(out):
                (out / "bench.json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")
            say(f"wrote {out / 'bench.json'}")
    return 0


def _measure(model: "CausalLM", batch: int, length: int, new: int, rate: float, kv_cache_dtype: str) -> dict[str, Any]:
    """The figures of a case; `out_of_memory` alone where that happened."""
    import torch

    on_cuda = model.device.type == "cuda"
    try:
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(model.device)
        _token_times(model, batch, length, new, kv_cache_dtype, steps=min(new, 3))
        times = _token_times(model, batch, length, new, kv_cache_dtype, steps=new)
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "allocate memory" not in str(error):
            raise
        times = []
    model.release()  # frees the memory for the next case
    if not times:
        gc.collect()
        if on_cuda:
            torch.cuda.empty_cache()
        return {"out_of_memory": True}
    step = (times[-1] - times[0]) / (new - 1)
    limit = batch * rate / step_bytes(model, batch, length + new // 2, kv_cache_dtype)
    figures = {
        "first_token_ms": times[0] * 1e3, "prefill_tokens_per_s": batch * length / times[0], "step_ms": step * 1e3,
        "decode_tokens_per_s": batch / step, "limit_tokens_per_s": limit, "of_limit": batch / step / limit,
    }  # fmt: skip
    return figures | ({"peak_gib": torch.cuda.max_memory_allocated(model.device) / 2**30} if on_cuda else {})


def _token_times(
    model: "CausalLM", batch: int, length: int, new: int, kv_cache_dtype: str, *, steps: int
) -> list[float]:
    """Seconds until the host has each of the first `steps` of `new` tokens."""
    import torch

    from ligermodels.generation import generate_iter

    config, times = model.generation_config, []
    model.generation_config = type(config)()  # without the checkpoint's penalties and sampling
    try:
        # The last ids of a vocabulary stand for images and the like.
        ids = torch.randint(0, model.config.get_text_config().vocab_size // 2 + 1, (batch, length))
        ids = ids.to(model.device)
        _synchronize(model.device)
        start = time.perf_counter()
        stream: Any = generate_iter(
            model, ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=(),
            kv_cache_dtype=kv_cache_dtype,
        )  # fmt: skip
        with contextlib.closing(stream):
            for _ in itertools.islice(stream, steps):
                times.append(time.perf_counter() - start)
    finally:
        model.generation_config = config
    return times


def step_bytes(model: "CausalLM", batch: int, length: int, kv_cache_dtype: str = "auto") -> float:
    """Bytes that a step of decoding must read for `batch` rows of `length` tokens: weights, and each row's keys and
    values."""
    return weights_read(model, batch) + batch * model.new_cache(1, length, kv_cache_dtype=kv_cache_dtype).nbytes


def weights_read(model: "CausalLM", batch: int) -> float:
    """Bytes of the text model's weights that a step of decoding `batch` rows is expected to read.

    A table of embeddings is read where it is looked up, and whole by a tied head. Of E experts, of which each row
    chooses k, those are read that are chosen if all are equally likely, E (1 - (1 - k/E)^batch).
    """
    from ligermodels.layers.base import Layer
    from ligermodels.layers.head import unwrapped

    parts: Any = {id(x): x for part in (model.decoder, model.lm_head) for x in (*part.parameters(), *part.buffers())}
    read_whole = model.decoder.embed_tokens if getattr(unwrapped(model.lm_head), "is_tied", False) else None
    layers = [x for x in model.decoder.modules() if isinstance(x, Layer) and x is not read_whole]
    return float(sum(x.nbytes for x in parts.values())) - sum(layer.unread_bytes(batch) for layer in layers)


def _copy_rate(device: "torch.device") -> float:
    """Bytes per second that copies in the device's memory read and write together; the best of four."""
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
