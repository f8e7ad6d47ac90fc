"""One conversion: planned and checked from headers, then written tensor by tensor.

The result grows in a folder beside the destination and takes its place when it is complete and, if that is asked for,
verified: a conversion that fails or is killed leaves the destination as it was.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from tqdm import tqdm

from ligermodels.checkpoint import saving
from ligermodels.checkpoint.dtypes import dtype_name
from ligermodels.checkpoint.gguf.writer import GgufTarget, model_name
from ligermodels.checkpoint.weights import TensorInfo
from ligermodels.conversion.comparison import Report, compare, dtype_counts
from ligermodels.conversion.layouts import locate, open_source
from ligermodels.conversion.options import KEPT, Options, check_options
from ligermodels.conversion.source import Source, View
from ligermodels.errors import InputError, MismatchError
from ligermodels.text import Tokenizer


def convert(src: str | Path, dst: str | Path | None, options: Options | None = None) -> Report:
    """Converts `src`, a folder or a repository of the Hub, into the folder `dst`, which `dry_run` does without.

    Memory holds one tensor of the result and what it is joined or cast from, whatever the shard size. For "gguf",
    `dst` is a file. The report holds what was written: tensors, bytes, and in `details` the elements of each dtype and
    the name in a GGUF file.
    Raises InputError for options that do not fit together, MismatchError where the weights do not fit the model or
    the result failed its verification (`dst` is as before then), CheckpointError or ConfigError for a source that
    cannot be used, HubError (with `errno`) where Hub, network, disk or file system refuse.
    """
    destination, options = check_options(dst, options or Options())
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
    dtype = None if options.to == "gguf" else _dtype(options)
    view = View(source, memory=options.to == "dcp", dtype=dtype)
    target = _target(view, options.name or model_name(src, options.adapter), options)
    size = sum(info.nbytes for info in target.headers.values())
    report = Report(str(src), None if dst is None else str(dst), len(target.headers), size)
    report.details = {"architecture": type(view.model).__name__, "to": options.to}
    report.details["dtypes"] = dtype_counts(target.headers)
    if isinstance(target, GgufTarget):
        report.details["name"] = target.name
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


def _dtype(options: Options) -> torch.dtype | None:
    """None where dtypes stay as they are."""
    name = dtype_name(options.dtype, KEPT)
    return None if name in KEPT else getattr(torch, name)


class Target(Protocol):
    """A checkpoint to write, planned from headers."""

    headers: Mapping[str, TensorInfo]

    def files(self) -> dict[str, bytes | Path]:
        """The files to write beside the weights: {name: bytes, or the file to copy}."""

    def write(self, folder: Path) -> None:
        """Writes the weights into `folder`, which is empty, one tensor at a time. Raises OSError."""


def _target(view: View, name: str, options: Options) -> Target:
    """What is to be written, planned. name: the model's, for people."""
    if options.to == "dcp":
        from ligermodels.conversion.distributed import DcpTarget

        return DcpTarget(view)
    if options.to == "gguf":
        return GgufTarget(view, Tokenizer.from_folder, dtype=_dtype(options), name=name)
    size = "5GB" if options.max_shard_size is None else options.max_shard_size
    return SafetensorsTarget(view, saving.num_bytes(size), like=options.like)


def _verify(staging: Path, source: Source, target: Target, options: Options, report: Report) -> None:
    """Compares what was written with the source. Raises MismatchError."""
    if isinstance(target, GgufTarget):
        report.details["verified"] = options.verify
        report.mismatches += target.compare(staging, level=options.verify)
    else:
        expected = View(source, dtype=_dtype(options))
        written = View(open_source(staging))
        compare(expected, written, level=options.verify, report=report, progress=options.progress)
        report.mismatches += [f"{n} tensors are {b}, expected {a}" for (a, b), n in report.casts.items()]
    if not report.ok:
        lines = "\n  ".join(report.mismatches[:5])
        raise MismatchError(f"{report.destination} was not written, for the result differs from the source:\n  {lines}")


class SafetensorsTarget:
    """`source` as model.safetensors, or as shards of at most `max_bytes` and their index.

    like: divides into the files that the source is divided into instead. shards: the tensors of each file.
    Raises InputError for a source that is not divided between tensors.
    """

    def __init__(self, source: Source, max_bytes: int, *, like: bool = False):
        self._source, self.headers = source, source.headers
        self.shards = _like(source) if like else saving.split_into_shards(source.headers, max_bytes)

    def files(self) -> dict[str, bytes | Path]:
        return self._source.files()

    def write(self, folder: Path) -> None:
        tensors = (self._source.read(name) for names in self.shards for name in names)
        saving.write_shards(folder, self.headers, tensors, self.shards)


def _like(source: Source) -> list[list[str]]:
    if source.places is None:
        raise InputError(f"--like: {source.source} is not divided by tensors; give --max-shard-size instead")
    files: dict[str, list[str]] = {}
    for name in source.headers:
        files.setdefault(source.places[name], []).append(name)
    return [saving.align(source.headers, files[file]) for file in sorted(files)]
