"""One conversion: planned and checked from headers, then written tensor by tensor.

The result grows in a folder beside the destination and takes its place when it is complete and, if that is asked for,
verified: a conversion that fails or is killed leaves the destination as it was.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

from ligermodels.checkpoint import saving
from ligermodels.conversion.dcp import DcpTarget
from ligermodels.conversion.gguf import GgufTarget
from ligermodels.conversion.huggingface import SafetensorsTarget
from ligermodels.conversion.meta import MetaTarget
from ligermodels.conversion.mistral import MistralTarget
from ligermodels.conversion.source import MismatchError, Source, Target
from ligermodels.conversion.sources import locate, open_source
from ligermodels.conversion.verify import LEVELS, Level, Report, compare
from ligermodels.conversion.view import View
from ligermodels.errors import InputError

DTYPES: dict[str, torch.dtype | None] = {
    "keep": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32
}  # fmt: skip
Layout = Literal["hf", "meta", "mistral", "dcp", "gguf"]
LAYOUTS: tuple[Layout, ...] = ("hf", "meta", "mistral", "dcp", "gguf")


@dataclass(frozen=True)
class Options:
    """The layout to convert a checkpoint to, and how.

    to: "hf", "meta" (Llamas only), "mistral" (Mistral and Mixtral only), "dcp" (under the names that models have in
    memory, ours and transformers') or "gguf" (one file, for llama.cpp).
    dtype: "keep", "bf16", "fp16" or "fp32".
    max_shard_size: as in `save_pretrained`, by default "5GB"; like: divide into files as the source is divided
    instead. For "meta", ranks: how many consolidated.NN.pth; embedding_axis: the dim along which they cut the
    embedding, by default 0 for a rope_theta of 500000 (Llama 3), else 1.
    adapter: the folder of a LoRA adapter to merge. config: the folder of config.json and tokenizer, for a distributed
    checkpoint or a trainer's state dict without them. rope_factor: of Meta's files with `use_scaled_rope` and a size
    without a known one.
    revision: of a repository. allow_pickle: read pickled weights, as plain tensors.
    verify: how far the result is compared with the source before it takes its place; see `verify`.
    overwrite: replace weights and files in the destination.
    dry_run: plan and check from headers, write nothing. progress: bars on stderr, if that is a terminal.
    """

    to: Layout = "hf"
    dtype: str = "keep"
    max_shard_size: int | str | None = None
    like: bool = False
    ranks: int = 1
    embedding_axis: int | None = None
    adapter: str | Path | None = None
    config: str | Path | None = None
    rope_factor: float | None = None
    revision: str | None = None
    allow_pickle: bool = False
    verify: Level = "none"
    overwrite: bool = False
    dry_run: bool = False
    progress: bool = True


def convert(src: str | Path, dst: str | Path | None, options: Options | None = None) -> Report:
    """Converts `src`, a folder or a repository of the Hub, into the folder `dst`, which `dry_run` does without.

    Memory holds one tensor of the result and what it is joined or cast from, whatever the shard size. For "gguf",
    `dst` is a file.
    Raises InputError for options that do not fit together, MismatchError where the weights do not fit the model or
    the result failed its verification (`dst` is as before then), CheckpointError or ConfigError for a source that
    cannot be used, HubError (with `errno`) where Hub, network, disk or file system refuse.
    """
    options = options or Options()
    destination = _check_options(dst, options)
    folder = locate(src, revision=options.revision, allow_pickle=options.allow_pickle)
    config, adapter = (Path(os.path.expanduser(path)) if path else None for path in (options.config, options.adapter))
    source = open_source(
        folder,
        allow_pickle=options.allow_pickle,
        config=config,
        rope_factor=options.rope_factor,
        adapter=adapter,
    )
    # GGUF casts for itself: norms and biases stay fp32.
    dtype = None if options.to == "gguf" else DTYPES[options.dtype]
    view = View(source, memory=options.to == "dcp", dtype=dtype)
    name = Path(os.path.expanduser(src)).resolve().name
    target = _target(view, name, options)
    size = sum(info.nbytes for info in target.headers.values())
    report = Report(str(src), None if dst is None else str(dst), len(target.headers), size)
    report.details = {"architecture": type(view.model).__name__, "to": options.to}
    if isinstance(target, SafetensorsTarget):
        report.details["files"] = len(target.shards)
    if destination is None:
        return report
    replacing = saving.replacing(destination, size, is_file=options.to == "gguf")
    with saving.write_errors(destination), replacing as staging:
        with tqdm(
            desc="Converting",
            total=sum(info.nbytes for info in view.headers.values()),
            unit="B",
            unit_scale=True,
            disable=None if options.progress else True,
        ) as bar:
            view.on_read = bar.update
            target.write(staging)
        saving.finish(staging, target.files())
        if options.verify != "none":
            _verify(staging, source, target, options, report)
    return report


def _check_options(dst: str | Path | None, options: Options) -> Path | None:
    """The folder or, for "gguf", the file to write; None for a dry run. Raises InputError."""
    for name, known in (("to", LAYOUTS), ("dtype", tuple(DTYPES)), ("verify", LEVELS)):
        if getattr(options, name) not in known:
            raise InputError(f"{name}={getattr(options, name)!r} is not known; known: {', '.join(known)}")
    if options.to != "hf" and (options.like or options.max_shard_size is not None):
        raise InputError(f"like and max_shard_size are for the layout hf, not for {options.to}")
    if (options.ranks != 1 or options.embedding_axis is not None) and options.to != "meta":
        raise InputError(f"ranks and embedding_axis are for the layout meta, not for {options.to}")
    if options.embedding_axis not in (None, 0, 1):
        raise InputError(f"embedding_axis={options.embedding_axis}: expected 0, rows, or 1, columns")
    if options.to == "gguf" and options.verify == "logits":
        raise InputError("verify=logits needs a model that runs, and GGUF files run in llama.cpp; give keys or bytes")
    if options.dry_run and dst is None:
        return None
    if not str(dst or ""):
        raise InputError("DST is missing: give the folder to write, or --dry-run to write nothing")
    target = saving.absolute(str(dst))
    with saving.write_errors(target):
        is_folder, is_file = target.is_dir(), target.is_file()
        is_filled = is_file or (is_folder and bool(os.listdir(target)))
    if options.to == "gguf" and is_folder:
        raise InputError(f"{dst} is a folder; GGUF is one file: give its name, such as {Path(str(dst)) / 'model.gguf'}")
    if options.to != "gguf" and is_file:
        raise InputError(f"{dst} is a file; give the name of a folder to write")
    if is_filled and not options.overwrite:
        raise InputError(f"{dst} is there and not empty; overwrite=True (--overwrite) saves over it")
    return None if options.dry_run else target


def _target(view: View, name: str, options: Options) -> Target:
    """What is to be written, planned. name: the model's, for people."""
    if options.to == "meta":
        return MetaTarget(view, ranks=options.ranks, embedding_axis=options.embedding_axis)
    if options.to == "mistral":
        return MistralTarget(view)
    if options.to == "dcp":
        return DcpTarget(view)
    if options.to == "gguf":
        return GgufTarget(view, dtype=DTYPES[options.dtype], name=name)
    size = "5GB" if options.max_shard_size is None else options.max_shard_size
    return SafetensorsTarget(view, saving.num_bytes(size), like=options.like)


def _verify(staging: Path, source: Source, target: Target, options: Options, report: Report) -> None:
    """Compares what was written with the source. Raises MismatchError."""
    if isinstance(target, GgufTarget):
        target.compare(staging, level=options.verify, report=report)
    else:
        expected = View(source, dtype=DTYPES[options.dtype])
        written = View(open_source(staging, allow_pickle=True))  # our own pickles, in the layout meta
        compare(expected, written, level=options.verify, report=report, progress=options.progress)
    if not report.ok:
        lines = "\n  ".join(report.mismatches[:5])
        raise MismatchError(f"{report.destination} was not written, for the result differs from the source:\n  {lines}")
