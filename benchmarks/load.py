"""How long a model takes from its files to the GPU: ours beside transformers, safetensors and fastsafetensors.

    python -m benchmarks.load --scratch /dev/shm                    # Llama 3.1 8B's shapes from memory
    python -m benchmarks.load --scratch /data --cache warm,cold     # from a disk: from the page cache, and not
    python -m benchmarks.load --scratch /data --sweep               # other threads, buffers and ways to read
    python -m benchmarks.load --dry                                 # a tiny model on the CPU: does everything run?

Writes a checkpoint with random weights in bf16 (shards of 5 GB) into a folder of its own in --scratch, which it removes
at the end, or into --checkpoint, which stays and is taken as it is the next time. Each load has a fresh process, which
has imported everything, started CUDA and loaded a tiny model before. The median of --runs processes counts; `again` is
a second load in the same process, whose pinned memory is there already. Every weight is compared with the files by a
checksum of its bits; a loader that differs gets no figures, and if it is ours, the exit code is 1. Cold: the files are
dropped from the page cache before; `% disk` is the speed in percent of the disk's, which direct reads of 16 MiB
measure, by one thread and by eight: the better one counts.

Of ours, a variant THREADS:BUFFERS:MIB may end in :mmap (copies out of mapped files), :direct (past the page cache) or
:reserve (the GPU's memory is allocated in one block before).
"""

import argparse
import concurrent.futures
import contextlib
import gc
import importlib.util
import json
import math
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import environment, heading, table, write_json
from benchmarks.train_cases import MODELS, changed

ROOT = Path(__file__).parent.parent
LOADERS = ("ligermodels", "transformers", "safetensors", "fastsafetensors")
SWEEP = (
    "4:8:16", "8:12:8", "8:16:16", "8:12:32", "16:24:16", "16:32:8", "8:12:16:mmap", "16:24:16:mmap", "8:12:16:direct",
    "8:12:16:reserve",
)  # fmt: skip
HOWS = ("mmap", "direct", "reserve")
BLOCK = 2**24


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, LOADERS)
    parser.add_argument("--render", metavar="FILE.json", help="print an earlier result instead of measuring")
    parser.add_argument("--worker", metavar="JOB", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.render:
        print(render(json.loads(Path(options.render).read_text())))
        return 0
    if options.worker:
        print(json.dumps(work(json.loads(options.worker))))
        return 0
    caches, loaders, variants = chosen(parser, options, LOADERS)
    with contextlib.ExitStack() as stack:
        root = options.checkpoint
        if root is None:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="load-", dir=options.scratch)))
        root.mkdir(parents=True, exist_ok=True)
        if "cold" in caches and _is_in_memory(root):
            parser.error(f"{root} is in memory: there is no cold load from there")
        record = measure(options, root.absolute(), caches, loaders, variants)
    if options.out:
        write_json(options.out, record)
    print(render(record), flush=True)
    return int(any("note" in row and row["loader"] == "ligermodels" for row in record["rows"]))


def parser_of(description: str | None, loaders: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", choices=sorted(MODELS))
    parser.add_argument("--scratch", help="where the checkpoint is written, e.g. /dev/shm; default the system's")
    parser.add_argument("--checkpoint", type=Path, help="a folder for the checkpoint, in place of one in --scratch")
    parser.add_argument("--cache", default="warm", help="comma-separated: warm, cold")
    parser.add_argument("--loaders", default=",".join(loaders), help="comma-separated")
    parser.add_argument("--ours", default="", help="comma-separated variants of ours beside the default one")
    parser.add_argument("--sweep", action="store_true", help=f"these variants: {', '.join(SWEEP)}")
    parser.add_argument("--runs", type=int, default=3, help="processes for each figure; 1 of several ranks: load once")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a process may take")
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--dry", action="store_true", help="a tiny model on the CPU; the times mean nothing")
    return parser


def chosen(
    parser: argparse.ArgumentParser, options: argparse.Namespace, known: Sequence[str]
) -> tuple[list[str], list[str], list[str]]:
    """Caches, loaders and variants that are asked for."""
    caches, loaders = options.cache.split(","), options.loaders.split(",")
    variants = ["", *filter(None, options.ours.split(",")), *(SWEEP if options.sweep else ())]
    if unknown := sorted({*caches, *loaders} - {"warm", "cold", *known}):
        parser.error(f"unknown: {', '.join(unknown)}")
    for variant in variants:
        try:
            _settings(variant)
        except ValueError as error:
            parser.error(f"{variant}: {error}")
    if not options.dry and not torch.cuda.is_available():
        parser.error("needs a CUDA device; --dry runs a tiny model on the CPU")
    return caches, loaders, variants


def measure(
    options: argparse.Namespace, root: Path, caches: list[str], loaders: list[str], variants: list[str]
) -> dict[str, Any]:
    device = "cpu" if options.dry else "cuda"
    config = MODELS[options.model].config
    tiny = changed(config, MODELS[options.model].tiny)
    folders = {"device": device, "folder": str(root / "model"), "tiny": str(root / "tiny")}
    for folder, values in (("tiny", tiny), ("folder", tiny if options.dry else config)):
        if not Path(folders[folder]).exists():
            _announce(f"writes {folders[folder]}")
            spawn({"do": "write", "config": values, **folders, "folder": folders[folder]}, options.timeout)
    expected = spawn({"do": "sums", **folders}, options.timeout)
    nbytes = sum(path.stat().st_size for path in _files(folders["folder"]))
    record: dict[str, Any] = {
        "environment": environment(device), "model": options.model, "gigabytes": nbytes / 1e9,
        "scratch": _file_system(root), "disk": {}, "rows": [],
    }  # fmt: skip
    if "cold" in caches:
        for threads in (1, 8):
            _announce(f"direct reads, {threads} threads")
            record["disk"][str(threads)] = disk_speed(_files(folders["folder"]), threads)
    for cache in caches:
        for loader in loaders:
            for variant in variants if loader == "ligermodels" else [""]:
                row: dict[str, Any] = {"loader": loader, "variant": variant, "cache": cache}
                record["rows"].append(row)
                job = {"do": "load", "loader": loader, "variant": variant, "cache": cache, **folders}
                _announce(f"{loader} {variant}, {cache}")
                try:
                    found = [spawn(job, options.timeout) for _ in range(options.runs)]
                except RuntimeError as error:
                    row["note"] = str(error)
                    continue
                row["label"] = found[0].pop("label")
                if any(each.pop("sums") != expected["sums"] for each in found):
                    row["note"] = "the weights are not those of the files"
                    continue
                row |= {key: statistics.median(each[key] for each in found) for key in found[0]}
                row["runs"] = [each["seconds"] for each in found]
                row["gb_per_s"] = nbytes / 1e9 / row["seconds"]
                if cache == "cold" and (speeds := [x for x in record["disk"].values() if x]):
                    row["percent_of_disk"] = 100 * row["gb_per_s"] / max(speeds)
    return record


def spawn(job: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """What `work` returns in a process of its own. Raises RuntimeError with the last line of one that fails."""
    command = [sys.executable, "-m", "benchmarks.load", "--worker", json.dumps(job)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT, env=env)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"took over {timeout:.0f} s") from error
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1][:200])
    return json.loads(done.stdout.splitlines()[-1])


def work(job: dict[str, Any]) -> dict[str, Any]:
    if job["do"] == "write":
        write(job["config"], job["device"], job["folder"])
        return {}
    if job["do"] == "sums":
        return {"sums": sums(_safetensors(job["folder"], job["device"])[1])}
    torch.zeros(1, device=job["device"])
    load = _LOADERS[job["loader"]]
    with _variant(job["variant"], job) as phases:
        load(job["tiny"], job["device"])
        gc.collect()
        times = []
        for _ in range(2 if job["cache"] == "warm" else 1):
            (warm if job["cache"] == "warm" else drop)(_files(job["folder"]))
            phases.clear()
            each, tensors = timed(load, job["folder"], job["device"])
            times.append(each["seconds"])
            if len(times) == 1:
                found = {**each, **{f"{name}_s": seconds for name, seconds in phases.items()}, "sums": sums(tensors)}
            del tensors
            gc.collect()
    return {**found, **({"again": times[1]} if len(times) > 1 else {})}


def timed(load: "Loader", folder: str, device: str) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """({label, seconds, memory}, the tensors) of one load."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    host = _host_mib("VmRSS")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    begin = time.perf_counter()
    label, tensors = load(folder, device)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    found: dict[str, Any] = {"label": label, "seconds": seconds, "host_mib": _host_mib("VmHWM") - host}
    if device == "cuda":
        found["gpu_gib"] = torch.cuda.max_memory_reserved() / 2**30
    return found, tensors


def write(config: Mapping[str, Any], device: str, folder: str) -> None:
    import ligermodels

    architecture = ligermodels.ARCHS[config["model_type"]]
    model = architecture.from_config(config, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms, else all alike
                parameter.normal_()
    model.save_pretrained(folder, max_shard_size="5GB")
    for path in _files(folder):  # only what is on the disk can leave the page cache
        with path.open("rb") as file:
            os.fsync(file.fileno())


def sums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """{name: a checksum of the bits, in which their order counts}."""
    found = {}
    for name, tensor in sorted(tensors.items()):
        total = 0
        for k, part in enumerate(tensor.detach().reshape(-1).view(torch.int16).split(2**26)):
            places = torch.arange(1, len(part) + 1, device=part.device).remainder_(65521)
            total += (k + 1) * int((part.long() * places).sum())
        found[name] = total % 2**61
    return found


# Loaders: (folder, device) -> (what it did, {name on disk: tensor})


def _ours(folder: str, device: str) -> tuple[str, Mapping[str, Tensor]]:
    import ligermodels
    from ligermodels.checkpoint import weights

    model = ligermodels.load(folder, device=device, progress=False)
    return "a model", dict(weights.export(model, type(model).DISK_NAMES))


def _transformers(folder: str, device: str) -> tuple[str, Mapping[str, Tensor]]:
    from transformers import AutoModelForCausalLM

    if device == "cpu":
        label, model = "a model", AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    elif importlib.util.find_spec("accelerate"):
        label = "a model (device_map)"
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map=device)
    else:
        label = "a model (.to, no accelerate)"
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
    return label, {name: parameter for name, parameter in model.named_parameters()}


def _safetensors(folder: str, device: str) -> tuple[str, Mapping[str, Tensor]]:
    from safetensors.torch import load_file

    return "tensors", {name: x for path in _files(folder) for name, x in load_file(path, device=device).items()}


def _fastsafetensors(folder: str, device: str) -> tuple[str, Mapping[str, Tensor]]:
    from fastsafetensors import fastsafe_open

    place = "cuda:0" if device == "cuda" else device
    with fastsafe_open([str(path) for path in _files(folder)], device=place, nogds=True) as files:
        names = files.keys()
        return "tensors", {name: files.get_tensor(name) for name in names}  # which hold the memory


Loader = Callable[[str, str], tuple[str, Mapping[str, Tensor]]]
_LOADERS: dict[str, Loader] = {
    "ligermodels": _ours, "transformers": _transformers, "safetensors": _safetensors,
    "fastsafetensors": _fastsafetensors,
}  # fmt: skip


def _settings(variant: str) -> tuple[dict[str, Any], str]:
    """(fields of transfer.Settings, how) of THREADS:BUFFERS:MIB[:HOW]. Raises ValueError."""
    if not variant:
        return {}, ""
    threads, buffers, mebibytes, *how = variant.split(":")
    if len(how) > 1 or any(each not in HOWS for each in how):
        raise ValueError(f"expected THREADS:BUFFERS:MIB, and one of {', '.join(HOWS)}")
    fields = {"threads": int(threads), "buffers": int(buffers), "buffer_bytes": int(mebibytes) * 2**20}
    return {**fields, "direct": how == ["direct"]}, "".join(how)


@contextlib.contextmanager
def _variant(variant: str, job: Mapping[str, Any]) -> Iterator[dict[str, float]]:
    """Ours loads as the variant says. Gives {phase: seconds} of the load; they overlap where they run together."""
    phases: dict[str, float] = {}
    if job["loader"] != "ligermodels":
        yield phases
        return
    from unittest import mock

    import numpy as np

    from ligermodels.arch.pretrained import Pretrained
    from ligermodels.checkpoint import transfer, weights

    fields, how = _settings(variant)
    mapped: dict[Path, Any] = {}
    allocate, run, construct = weights.allocate, transfer.run, Pretrained._on_meta.__func__

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            phases[name] = phases.get(name, 0.0) + time.perf_counter() - begin
            return result

        return wrapper

    def allocating(model: Any, *args: Any, **kwargs: Any) -> None:
        if how == "reserve":
            size = sum(math.ceil(parameter.nbytes / 2**21) * 2**21 for parameter in model.parameters())
            torch.empty(size, dtype=torch.uint8, device=job["device"])  # torch keeps it, and cuts it up
        allocate(model, *args, **kwargs)

    def running(*args: Any) -> Iterator[Any]:
        begin = time.perf_counter()
        yield from run(*args)
        phases["copy"] = phases.get("copy", 0.0) + time.perf_counter() - begin

    def fill_from_map(number: int, block: Any, buffer: Any, settings: Any) -> None:
        if block.file.path not in mapped:
            mapped[block.file.path] = np.memmap(block.file.path, dtype=np.uint8, mode="r")
        np.copyto(buffer.view[: block.nbytes], mapped[block.file.path][block.start : block.end])

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (weights, "allocate", timed("allocate", allocating)),
            (transfer, "run", running),
            (Pretrained, "_on_meta", classmethod(timed("construct", construct))),
            (transfer, "SETTINGS", transfer.Settings(**fields)),
            (transfer, "_fill", fill_from_map if how == "mmap" else transfer._fill),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield phases


# The page cache and the disk


def _files(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("*.safetensors"))


def is_cached(path: Path) -> bool | None:
    """Whether the page cache holds the file, judged from 64 places in it; None where the system does not say."""
    with path.open("rb") as file:
        for k in range(64):
            try:
                os.preadv(file.fileno(), [bytearray(1)], path.stat().st_size * k // 64, os.RWF_NOWAIT)
            except BlockingIOError:
                return False
            except OSError:
                return None
    return True


def warm(files: Sequence[Path]) -> None:
    if files and _is_in_memory(files[0].parent):
        return
    for path in files:
        if not is_cached(path):
            with path.open("rb", buffering=0) as file:
                buffer = bytearray(BLOCK)
                while file.readinto(buffer):
                    pass


def drop(files: Sequence[Path]) -> None:
    """Has the page cache let go of the files. Raises RuntimeError where they stay."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if path.stat().st_size > BLOCK and is_cached(path):
            raise RuntimeError(f"{path.name} stays in memory: there is no cold load from this file system")


def disk_speed(files: Sequence[Path], threads: int, limit: int = 2**33) -> float | None:
    """GB/s of direct reads of 16 MiB, at most `limit` bytes in all; None where the file system has none."""
    blocks = [(path, at) for path in files for at in range(0, path.stat().st_size - BLOCK, BLOCK)][: limit // BLOCK]
    if not blocks:
        return None
    try:
        numbers = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path in files}
    except OSError:
        return None

    def read(share: list[tuple[Path, int]]) -> None:
        with mmap.mmap(-1, BLOCK) as memory:  # begins with a page
            for path, at in share:
                os.preadv(numbers[path], [memory], at)

    drop(files)
    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, [blocks[k::threads] for k in range(threads)]))
    seconds = time.perf_counter() - begin
    for number in numbers.values():
        os.close(number)
    return len(blocks) * BLOCK / 1e9 / seconds


def _file_system(folder: Path) -> str:
    kind = subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True, check=False).stdout
    return f"{kind.strip() or 'unknown'}, {shutil.disk_usage(folder).total / 1e9:.0f} GB"


def _is_in_memory(folder: Path) -> bool:
    return _file_system(folder).startswith("tmpfs")


def _host_mib(field: str) -> float:
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) / 1024


def _announce(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


# The table


def render(record: Mapping[str, Any]) -> str:
    lines = [heading(record["environment"])]
    ranks = f", onto {record['ranks']} ranks ({record['mesh']})" if "ranks" in record else ""
    lines.append(f"{record['model']}, {record['gigabytes']:.2f} GB in safetensors on {record['scratch']}{ranks}")
    for threads, speed in record["disk"].items():
        lines.append(f"disk, direct reads, threads {threads}: {f'{speed:.2f} GB/s' if speed else 'not there'}")
    columns = {
        "seconds": "s", "again": "again s", "gb_per_s": "GB/s", "percent_of_disk": "% disk",
        "construct_s": "construct s", "allocate_s": "allocate s", "copy_s": "copy s", "host_mib": "host MiB",
        "gpu_gib": "GPU GiB", "note": "note",
    }  # fmt: skip
    shown = {key: title for key, title in columns.items() if any(key in row for row in record["rows"])}
    rows = [
        [row["loader"], row["variant"] or row.get("label", ""), row["cache"], *(row.get(key) for key in shown)]
        for row in record["rows"]
    ]
    return "\n".join([*lines, "", table(["loader", "what", "cache", *shown.values()], rows)])


if __name__ == "__main__":
    sys.exit(main())
