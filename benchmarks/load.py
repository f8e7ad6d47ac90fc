"""The time to load a model from its files onto a GPU or several, beside transformers and fastsafetensors.

    python -m benchmarks.load --scratch /dev/shm                   # Llama 3.1 8B's shapes, from memory
    python -m benchmarks.load --scratch /data --cache warm,cold    # from a disk: from the page cache, and not
    python -m benchmarks.load --model llama-3.1-70b --gpus 2 --scratch /dev/shm --runs 1
    python -m benchmarks.load --gpus 2 --mesh dp_shard --save --scratch /dev/shm
    python -m benchmarks.load --dry

Each load runs in a fresh process, or under torchrun in one per GPU. The process has imported everything, started CUDA
and loaded a tiny model before. The median of --runs counts; "again s" is a second load in the same process, whose
pinned memory is allocated already. On several GPUs all ranks load one model of ours, split as --mesh says. The time
is that of the slowest rank, the memory that of the rank with the most.

The checkpoint is written to --scratch and removed at the end. Its tensors repeat one block of random values, so that
every element can be compared. A loader that differs gets no figures; if it is ours, the exit status is 1.
--cache cold: the files are dropped from the page cache before each load; "% disk" is the speed in percent of direct
reads of 16 MiB, by one thread or by eight, whichever is faster. --save: our model is also saved from all ranks, and
what was saved is loaded and compared.
"""

import argparse
import concurrent.futures
import contextlib
import hashlib
import importlib.util
import itertools
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ligermodels
from benchmarks import harness
from benchmarks.harness import Record, Row
from benchmarks.train_cases import MODELS, changed
from ligermodels.checkpoint import saving, weights
from ligermodels.parallel import make_mesh

BLOCK = 2**24
VALUES = 2**27 - 1
"""Random values that the tensors of a checkpoint repeat: an odd number, so that neighbouring rows differ."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="llama-3.1-8b", choices=sorted(MODELS))
    parser.add_argument("--scratch", help="folder for the checkpoint, e.g. /dev/shm; default the system's")
    parser.add_argument("--cache", type=harness.names("warm", "cold"), default="warm", help="warm, cold or both")
    parser.add_argument("--loaders", type=harness.names(*LOADERS), default="all", help="names with commas between them")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--mesh", default="tp", choices=("tp", "dp_shard"), help="what splits a model between GPUs")
    parser.add_argument("--save", action="store_true", help="also save the model that ours has loaded")
    parser.add_argument("--runs", type=int, default=3, help="processes for each figure")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a process may take")


def measure(options: argparse.Namespace, record: Record) -> None:
    loaders = options.loaders if options.gpus == 1 else ["ligermodels"]
    config, count = MODELS[options.model].config, VALUES
    tiny = changed(config, MODELS[options.model].tiny)
    if options.dry:
        config, count = tiny, 2**16 - 1
    with tempfile.TemporaryDirectory(prefix="load-", dir=options.scratch) as root:
        if "cold" in options.cache and _is_in_memory(Path(root)):
            raise ValueError(f"{root} is in memory: there is no cold load from there")
        job = {"device": options.device, "gpus": options.gpus, "mesh": options.mesh, "count": count, "config": config}
        for name, its_config in (("tiny", tiny), ("folder", config)):
            job[name] = str(Path(root, name))
            write(Path(root, name), its_config, block_of(count))
        files = _files(job["folder"])
        nbytes = sum(path.stat().st_size for path in files)
        record |= {"model": options.model, "gpus": options.gpus, "GB": nbytes / 1e9}
        record["scratch"] = _file_system(Path(root))
        disk = {n: disk_speed(files, n) for n in ((1, 8) if "cold" in options.cache else ())}
        record["disk, GB/s of direct reads by threads"] = disk
        record["rows"], record["red"] = [], []
        for cache in options.cache:
            for loader in loaders:
                save = options.save and loader == "ligermodels"
                one = {**job, "loader": loader, "cache": cache, "save": save}
                found = [harness.spawn("load", one, options.timeout, ranks=options.gpus) for _ in range(options.runs)]
                row = {"loader": loader, "cache": cache, **row_of(found, nbytes, disk if cache == "cold" else {})}
                record["rows"].append(row)
                harness.announce(row)
                if "note" in row and loader == "ligermodels":
                    record["red"].append(f"{loader}, {cache}: {row['note']}")


def row_of(found: Sequence[Row], nbytes: int, disk: Mapping[int, float | None]) -> Row:
    """The row of several runs: medians, or the note of the first that failed."""
    for run in found:
        if "note" in run:
            return {"note": run["note"]}
    row = {"what": found[0].pop("what")}
    row |= {name: statistics.median(run[name] for run in found) for name in found[0] if name != "what"}
    row |= {"runs": [run["s"] for run in found], "GB/s": nbytes / 1e9 / row["s"]}
    if speeds := [speed for speed in disk.values() if speed]:
        row["% disk"] = 100 * row["GB/s"] / max(speeds)
    return row


def work(job: dict[str, Any]) -> Row:
    """In a process of its own, or in that of each rank: what one load takes. Raises RuntimeError for wrong weights."""
    device, folder, mesh = job["device"], job["folder"], None
    if job["gpus"] > 1:
        mesh = make_mesh(tp=job["gpus"] if job["mesh"] == "tp" else 1, device_type=device)
    torch.zeros(1, device=device)
    load = LOADERS[job["loader"]]
    load(job["tiny"], device, mesh)
    found: Row = {}
    for name in ("s", "again s") if job["cache"] == "warm" else ("s",):
        harness.free(device)
        if not dist.is_initialized() or dist.get_rank() == 0:
            (warm if job["cache"] == "warm" else drop)(_files(folder))
        what, seconds, memory, model = timed(load, folder, device, mesh, job)
        found |= {name: seconds} if found else {"what": what, name: seconds, **memory}
        if job["save"] and name == "s":
            _barrier()
            found["save s"], _ = harness.timed(lambda model=model: model.save_pretrained(f"{folder}-saved"), device)
            del model
            timed(load, f"{folder}-saved", device, mesh, job)
        model = None
    if mesh is None:
        return found
    everyone: list[Row] = [{}] * job["gpus"]
    dist.all_gather_object(everyone, found)
    dist.destroy_process_group()
    return {name: max(each[name] for each in everyone) for name in found}


def timed(load: "Loader", folder: str, device: str, mesh: Any, job: Mapping[str, Any]) -> tuple[str, float, Row, Any]:
    """(what was loaded, seconds, memory, the model if there is one) of one load, whose tensors are compared."""
    harness.reset_peak(device)
    host = _host_mib("VmRSS")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    _barrier()
    seconds, (what, tensors, model) = harness.timed(lambda: load(folder, device, mesh), device)
    memory: Row = {"host MiB": _host_mib("VmHWM") - host}
    if device == "cuda":
        memory["GPU GiB"] = torch.cuda.max_memory_reserved() / harness.GIB
    if wrong := differing(tensors, model_of(job["config"]), block_of(job["count"]).to(device)):
        raise RuntimeError(f"the weights are not those of the files: {', '.join(wrong[:3])}")
    return what, seconds, memory, model


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


# Loaders: (folder, device, mesh or None) -> (what it loads, {name on disk: tensor}, the model)


def _ours(folder: str, device: str, mesh: Any) -> tuple[str, Mapping[str, Tensor], Any]:
    where: dict[str, Any] = {"device": device} if mesh is None else {"mesh": mesh}
    model = ligermodels.load(folder, progress=False, **where)
    boxes = weights.export(model, model.names_on_disk).boxes
    if divided := [name for name, (_, index) in boxes.items() if index]:
        raise RuntimeError(f"{divided[0]} is a part of a parameter: only whole ones are compared")
    return "a model", {name: tensor for name, (tensor, _) in boxes.items()}, model


def _transformers(folder: str, device: str, mesh: Any) -> tuple[str, Mapping[str, Tensor], Any]:
    from transformers import AutoModelForCausalLM

    options = {"device_map": device} if device == "cuda" and importlib.util.find_spec("accelerate") else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
    if not options:
        model.to(device)
    return " ".join(["a model", *options]), dict(model.named_parameters()), model


def _fastsafetensors(folder: str, device: str, mesh: Any) -> tuple[str, Mapping[str, Tensor], Any]:
    from fastsafetensors import fastsafe_open

    place = "cuda:0" if device == "cuda" else device
    with fastsafe_open([str(path) for path in _files(folder)], device=place, nogds=True) as files:
        return "tensors", {name: files.get_tensor(name) for name in files.keys()}, None  # noqa: SIM118


Loader = Callable[[str, str, Any], tuple[str, Mapping[str, Tensor], Any]]
LOADERS: dict[str, Loader] = {
    "ligermodels": _ours, "transformers": _transformers, "fastsafetensors": _fastsafetensors,
}  # fmt: skip


# The checkpoint, and whether a rank has it


def model_of(config: Mapping[str, Any]) -> Any:
    """The model on the meta device."""
    return ligermodels.ARCHS[config["model_type"]].from_config(config, dtype=torch.bfloat16, device="meta")


def block_of(count: int) -> Tensor:
    """The values [count] that every tensor repeats."""
    return torch.empty(count, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(0))


def start(name: str, count: int) -> int:
    """Where in the block a tensor begins."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6]) % count


def repeated(name: str, shape: Sequence[int], values: Tensor) -> Tensor:
    """The tensor: element e, counted row by row, is values[(start + e) % count]."""
    begin, numel = start(name, len(values)), torch.Size(shape).numel()
    first = values[begin : begin + numel]
    times, rest = divmod(numel - len(first), len(values))
    return torch.cat([first, *[values] * times, values[:rest]]).view(*shape)


def write(folder: Path, config: Mapping[str, Any], values: Tensor) -> None:
    """Writes a checkpoint in bf16. Raises ValueError where the file system has no space for it."""
    folder.mkdir(parents=True)
    model = model_of(config)
    headers = {name: weights.TensorInfo(torch.bfloat16, tuple(x.shape)) for name, x in model.named_parameters()}
    needed, there = sum(header.nbytes for header in headers.values()), shutil.disk_usage(folder).free
    if needed > there:
        raise ValueError(f"{folder} needs {needed / 1e9:.0f} GB, and {there / 1e9:.0f} GB are free")
    shards = saving.split_into_shards(headers, 5 * 10**9 if len(values) == VALUES else 10**5)

    def write_some(first: int) -> None:
        tensors = (repeated(name, headers[name].shape, values) for shard in shards[first::8] for name in shard)
        saving.write_shards(folder, headers, tensors, shards, first=first, step=8)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(write_some, range(8)))
    saving.finish(folder, {"config.json": json.dumps({**model.config.to_hf(), "dtype": "bfloat16"}).encode()})


@torch.no_grad()
def differing(tensors: Mapping[str, Any], model: Any, values: Tensor) -> list[str]:
    """The model's tensors that are missing or differ from the files. Sharded ones are gathered, by all ranks."""
    wrong = []
    for name, parameter in model.named_parameters():
        found = tensors.get(name)
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        if found is None or found.shape != parameter.shape:
            wrong.append(name)
            continue
        for at, some in zip(itertools.count(0, 2**26), found.flatten().split(2**26), strict=False):
            elements = torch.arange(at, at + len(some), device=values.device)
            if not torch.equal(values[elements.add_(start(name, len(values))).remainder_(len(values))], some):
                wrong.append(name)
                break
    return wrong


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
    """Reads the files into the page cache."""
    for path in files:
        if not _is_in_memory(path.parent) and not is_cached(path):
            with path.open("rb", buffering=0) as file:
                buffer = bytearray(BLOCK)
                while file.readinto(buffer):
                    pass


def drop(files: Sequence[Path]) -> None:
    """Drops the files from the page cache. Raises RuntimeError where they stay."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if path.stat().st_size > BLOCK and is_cached(path):
            raise RuntimeError(f"{path.name} stays in memory: there is no cold load from this file system")


def disk_speed(files: Sequence[Path], threads: int, limit: int = 2**33) -> float | None:
    """GB/s of direct reads of 16 MiB, of `limit` bytes at most; None where the file system has no direct reads."""
    blocks = [(path, at) for path in files for at in range(0, path.stat().st_size - BLOCK, BLOCK)][: limit // BLOCK]
    if not blocks:
        return None
    try:
        numbers = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path in files}
    except OSError:
        return None

    def read(share: list[tuple[Path, int]]) -> None:
        with mmap.mmap(-1, BLOCK) as memory:  # aligned to a page
            for path, at in share:
                os.preadv(numbers[path], [memory], at)

    drop(files)
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        seconds, _ = harness.timed(lambda: list(pool.map(read, [blocks[k::threads] for k in range(threads)])), "cpu")
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


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.main(__doc__, arguments, add_options, measure, work)


if __name__ == "__main__":
    sys.exit(main())
