"""How long one model takes from its files onto several GPUs: ours beside transformers, as `benchmarks.load` for one.

    torchrun --nproc-per-node 2 -m benchmarks.load_ranks --model llama-3.1-70b --scratch /dev/shm
    torchrun --nproc-per-node 2 -m benchmarks.load_ranks --dry        # a tiny model on the CPU

All ranks load one model, split between them as --mesh says, beside transformers' tp_plan="auto". Their threads write
the checkpoint, whose tensors are cut out of one random block that is repeated; every element that a rank holds is
compared with its place in that block. A load takes as long as it does on the slowest rank, and memory is that of the
rank with the most. There is one process for both loads, and the first one has loaded a tiny model before. The options
are those of `benchmarks.load`, which also prints what --out holds (--render).
"""

import argparse
import concurrent.futures
import datetime
import functools
import gc
import hashlib
import json
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ligermodels
from benchmarks import load
from benchmarks.common import environment, write_json
from benchmarks.train_cases import MODELS, changed
from ligermodels.checkpoint import saving, weights
from ligermodels.parallel import make_mesh

LOADERS = ("ligermodels", "transformers")
VALUES = 2**27 - 1
"""Random values that the tensors of a checkpoint repeat: an odd number, so that neighbouring rows differ."""
ROOM = 8 * 2**30
"""Bytes of host memory of a rank beside the files: CUDA, pinned buffers, tensors while they are written."""
NO_FIGURES = {"label", "wrong"}
MARK = {"format": "pt", "values": "repeated by benchmarks.load"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = load.parser_of(__doc__, LOADERS)
    parser.add_argument("--mesh", default="tp", choices=("tp", "dp_shard"), help="what splits the model")
    options = parser.parse_args(arguments)
    caches, loaders, variants = load.chosen(parser, options, LOADERS)
    if any(variant.endswith(":reserve") for variant in variants):
        parser.error("a variant with :reserve is for one GPU")
    # One that dies must not hold the others for longer than the timeout.
    timeout = datetime.timedelta(seconds=options.timeout)
    dist.init_process_group("gloo" if options.dry else "nccl", timeout=timeout)
    tp = dist.get_world_size() if options.mesh == "tp" else 1
    mesh = make_mesh(tp=tp, device_type="cpu" if options.dry else "cuda")
    root, leads = options.checkpoint, dist.get_rank() == 0
    if root is None:
        root = Path(together(lambda: tempfile.mkdtemp(prefix="load-", dir=options.scratch) if leads else None)[0])
    try:
        record = measure(options, root.absolute(), mesh, caches, loaders, variants)
    finally:
        if options.checkpoint is None and leads:
            shutil.rmtree(root, ignore_errors=True)
    if leads:
        if options.out:
            write_json(options.out, record)
        print(load.render(record), flush=True)
    dist.destroy_process_group()
    return int(any("note" in row and row["loader"] == "ligermodels" for row in record["rows"]))


def measure(
    options: argparse.Namespace, root: Path, mesh: Any, caches: list[str], loaders: list[str], variants: list[str]
) -> dict[str, Any]:
    device, rank, ranks = mesh.device_type, dist.get_rank(), dist.get_world_size()
    config, count = MODELS[options.model].config, VALUES
    tiny = changed(config, MODELS[options.model].tiny)
    if options.dry:
        config, count = tiny, 2**16 - 1
    values = torch.empty(count, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(0))
    for folder, its_config in ((root / "tiny", tiny), (root / "model", config)):
        tensors, others = planned(its_config, folder)
        if not together(folder.exists)[0]:
            size = sum(info.nbytes for info in tensors.headers.values())
            announce(f"writes {folder}: {size / 1e9:.1f} GB")
            together(lambda root=root, size=size: check_room(root, size, 0 if options.dry else ranks))
            part = folder.with_name(f"{folder.name}.part")
            together(functools.partial(write, part, tensors, others, values))
            together(lambda part=part, folder=folder: part.rename(folder) and None if rank == 0 else None)
        together(functools.partial(check_mark, folder))
    files = load._files(str(root / "model"))
    nbytes = sum(path.stat().st_size for path in files)
    record: dict[str, Any] = {
        "environment": environment(device), "model": options.model, "gigabytes": nbytes / 1e9, "ranks": ranks,
        "mesh": options.mesh, "scratch": load._file_system(root), "disk": {}, "rows": [],
    }  # fmt: skip
    if "cold" in caches:
        for threads in (1, 8):
            announce(f"direct reads, {threads} threads")
            speeds = together(lambda n=threads: load.disk_speed(files, n) if rank == 0 else None)
            record["disk"][str(threads)] = speeds[0]
    shapes = {name: info.shape for name, info in tensors.headers.items()}
    expected = values.to(mesh.device_type)
    for cache in caches:
        for loader in loaders:
            for variant in variants if loader == "ligermodels" else [""]:
                row: dict[str, Any] = {"loader": loader, "variant": variant, "cache": cache}
                record["rows"].append(row)
                announce(f"{loader} {variant}, {cache}")
                read = functools.partial(_LOADERS[loader], mesh)
                try:
                    with load._variant(variant, {"loader": loader, "device": device}) as phases:
                        together(functools.partial(load_and_drop, read, str(root / "tiny"), device))
                        for again in (False, True) if cache == "warm" and options.runs > 1 else (False,):
                            prepare = load.warm if cache == "warm" else load.drop
                            together(functools.partial(prepare, files[rank::ranks]))
                            found = together(
                                functools.partial(loaded, read, str(root / "model"), device, phases, shapes, expected)
                            )
                            seconds = max(each["seconds"] for each in found)
                            announce(f"{seconds:.2f} s")
                            if wrong := sorted({name for each in found for name in each["wrong"]}):
                                row.clear()  # no figures, of the first load neither
                                row |= {"loader": loader, "variant": variant, "cache": cache}
                                raise RuntimeError(f"the weights are not those of the files: {', '.join(wrong[:3])}")
                            if again:
                                row["again"] = seconds
                                continue
                            row["label"], row["runs"] = found[0]["label"], [each["seconds"] for each in found]
                            row |= {key: max(each[key] for each in found) for key in found[0] if key not in NO_FIGURES}
                            row["gb_per_s"] = nbytes / 1e9 / seconds
                            if cache == "cold" and (disk := [x for x in record["disk"].values() if x]):
                                row["percent_of_disk"] = 100 * row["gb_per_s"] / max(disk)
                except RuntimeError as error:
                    row["note"] = str(error)[:300]
                    announce(row["note"])
    return record


def load_and_drop(read: load.Loader, folder: str, device: str) -> None:
    read(folder, device)
    gc.collect()


def loaded(
    read: load.Loader, folder: str, device: str, phases: dict[str, float], shapes: Mapping[str, Sequence[int]],
    values: Tensor,
) -> dict[str, Any]:  # fmt: skip
    """What `load.timed` finds on this rank, and the tensors that are not those of the files."""
    phases.clear()
    found, tensors = load.timed(read, folder, device)
    found |= {f"{name}_s": seconds for name, seconds in phases.items()}
    found["wrong"] = differing(tensors, shapes, values)
    del tensors
    gc.collect()
    return found


def together(call: Callable[[], Any]) -> list[Any]:
    """What each rank's call returns; ends when all have ended. Raises RuntimeError on all if one raises."""
    found: Any = None
    error = None
    try:
        found = call()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (found, error))
    for rank, (_, error) in enumerate(everyone):
        if error is not None:
            raise RuntimeError(f"rank {rank}: {error}")
    return [found for found, _ in everyone]


def announce(text: str) -> None:
    if dist.get_rank() == 0:
        load._announce(text)


# The checkpoint


def planned(config: Mapping[str, Any], folder: Path) -> tuple[weights.Exported, dict[str, bytes]]:
    """The tensors of a checkpoint, whose values take no memory, and its other files."""
    model: Any = ligermodels.ARCHS[config["model_type"]].from_config(config, dtype=torch.bfloat16, device="meta")
    empty = {name: torch.zeros((), dtype=torch.bfloat16).expand(p.shape) for name, p in model.named_parameters()}
    tensors, others, _ = model._exported(empty, True, folder)
    return tensors, others


def check_room(root: Path, nbytes: int, ranks: int) -> None:
    """Raises RuntimeError where a checkpoint of `nbytes` finds no room, in memory beside so many ranks."""
    root.mkdir(parents=True, exist_ok=True)
    needs = [("on the file system", nbytes, shutil.disk_usage(root).free)]
    if load._is_in_memory(root):
        needs.append(("of memory", nbytes + ranks * ROOM, memory_left()))
    for where, needed, free in needs:
        if needed > free:
            raise RuntimeError(f"{root} needs {needed / 1e9:.0f} GB {where}, and {free / 1e9:.0f} GB are free")


def memory_left() -> int:
    """Bytes of memory that the system, and the container of this process, still have."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    left = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").is_file() and (limit := (group / "memory.max").read_text().strip()) != "max":
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = int(stat["file"]) - int(stat["shmem"])  # which the kernel lets go of
        left = min(left, int(limit) - int((group / "memory.current").read_text()) + cached)
    return left


def write(folder: Path, tensors: weights.Exported, others: Mapping[str, bytes], values: Tensor) -> None:
    """This rank's share of the shards, by several threads."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    folder.mkdir(parents=True, exist_ok=True)
    shards = saving.split_into_shards(tensors.headers, 5 * 10**9 if len(values) == VALUES else 10**5)
    names = saving._file_names(shards)

    def write_shard(number: int) -> None:
        made = (repeated(name, tensors.headers[name].shape, values) for name in shards[number])
        saving.write_file(folder / names[number], tensors.headers, shards[number], made, MARK)
        saving.sync(folder / names[number])  # only what is on the disk can leave the page cache

    threads = max(1, min(16, len(os.sched_getaffinity(0)) // ranks))
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        list(pool.map(write_shard, range(rank, len(shards), ranks)))
    if rank == 0:
        saving._write_index(folder, tensors.headers, shards)
        for name, content in others.items():
            (folder / name).write_bytes(content)


def check_mark(folder: Path) -> None:
    for path in load._files(str(folder)):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if json.loads(file.read(length)).get("__metadata__") != MARK:
                raise RuntimeError(f"{path} was not written by benchmarks.load under torchrun: choose another folder")


def start(name: str, count: int) -> int:
    """Where in the values a tensor begins."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6]) % count


def repeated(name: str, shape: Sequence[int], values: Tensor) -> Tensor:
    """The tensor: element e, counted row by row, is values[(start + e) % count]."""
    begin, numel = start(name, len(values)), torch.Size(shape).numel()
    first = values[begin : begin + numel]
    times, rest = divmod(numel - len(first), len(values))
    return torch.cat([first, *[values] * times, values[:rest]]).view(*shape)


# What a rank holds


@torch.no_grad()
def differing(tensors: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]], values: Tensor) -> list[str]:
    """The names whose part on this rank is not that of the files, or is not there."""
    wrong = {}
    for name, shape in shapes.items():
        if name not in tensors:
            wrong[name] = torch.ones((), dtype=torch.bool, device=values.device)
            continue
        local, at = part_here(tensors[name].detach(), shape)
        rows, columns = local.reshape(len(local), -1), torch.Size(shape[1:]).numel()
        across = torch.arange(rows.shape[1], device=values.device) + (at[1] if len(at) > 1 else 0)
        wrong[name] = torch.zeros((), dtype=torch.bool, device=values.device)
        step = max(1, 2**26 // max(1, rows.shape[1]))
        for first in range(0, len(rows), step):
            some = rows[first : first + step]
            down = torch.arange(first, first + len(some), device=values.device) + at[0]
            places = (down[:, None] * columns + across + start(name, len(values))).remainder_(len(values))
            wrong[name] |= (values[places] != some).any()
    bad = torch.stack(list(wrong.values())).tolist()
    return [name for name, is_bad in zip(wrong, bad, strict=True) if is_bad]


def part_here(tensor: Any, shape: Sequence[int]) -> tuple[Tensor, list[int]]:
    """(the rows and columns of a tensor of `shape` that this rank holds, where they begin in each dim)."""
    if len(shape) > 2:
        raise RuntimeError(f"a weight of shape {list(shape)}: only matrices and vectors are compared")
    local = tensor
    if hasattr(tensor, "full_tensor"):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        local = tensor.to_local()
        expected, at = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        assert tuple(tensor.shape) == tuple(shape) and tuple(local.shape) == tuple(expected), (
            tensor.shape,
            local.shape,
        )
        return local, list(at)
    return local, [
        0 if here == whole else dist.get_rank() * here for here, whole in zip(local.shape, shape, strict=True)
    ]


def _ours(mesh: Any, folder: str, device: str) -> tuple[str, Mapping[str, Tensor]]:
    model = ligermodels.load(folder, mesh=mesh, progress=False)
    boxes = weights.export(model, type(model).DISK_NAMES).boxes
    if divided := [name for name, (_, index) in boxes.items() if index]:
        raise RuntimeError(f"{divided[0]} is a part of a parameter: only whole ones are compared")
    return "a model", {name: tensor for name, (tensor, _) in boxes.items()}


def _transformers(mesh: Any, folder: str, device: str) -> tuple[str, Mapping[str, Tensor]]:
    from transformers import AutoModelForCausalLM

    if mesh["tp"].size() == 1:
        raise RuntimeError("has no loader onto FSDP; --mesh tp compares the two")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, tp_plan="auto")
    return "a model (tp_plan)", dict(model.named_parameters())


_LOADERS: dict[str, Callable[..., tuple[str, Mapping[str, Tensor]]]] = {
    "ligermodels": _ours, "transformers": _transformers,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
