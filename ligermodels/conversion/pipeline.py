"""One conversion: planned and checked from headers, then written tensor by tensor.

The result grows in a folder beside the destination. It replaces the destination when it is complete and, if that is
asked for, verified. A conversion that fails or is killed leaves the destination as it was.
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


class Target(Protocol):
    """A checkpoint to write, planned from headers."""

    headers: Mapping[str, TensorInfo]

    def files(self) -> dict[str, bytes | Path]:
        """The files to write beside the weights: {name: bytes, or the file to copy}."""

    def write(self, folder: Path) -> None:
        """Writes the weights into `folder`, which is empty, one tensor at a time. Raises OSError."""


def convert(src: str | Path, dst: str | Path | None, options: Options | None = None) -> Report:
    """Converts `src`, a folder or a repository of the Hub, into the folder or GGUF file `dst`; None with `dry_run`.

    Memory holds one tensor of the result and what it is joined or cast from, whatever the shard size.
    The report has the tensors and bytes written and, in `details`, the elements of each dtype and the name in a GGUF
    file. Raises InputError for options that contradict each other, MismatchError if the weights do not fit the model
    or the result differs from the source (`dst` is then as before), CheckpointError or ConfigError for a source that
    cannot be used, HubError (with `errno`) if the Hub, network, disk or file system refuses.
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
    name = dtype_name(options.dtype, KEPT)
    dtype = None if name in KEPT else getattr(torch, name)
    # A GGUF file is cast by its writer: norms and biases stay fp32.
    view = View(source, memory=options.to == "dcp", dtype=None if options.to == "gguf" else dtype)
    target: Target
    if options.to == "dcp":
        from ligermodels.conversion.distributed import DcpTarget  # imports torch.distributed, which takes a while

        target = DcpTarget(view)
    elif options.to == "gguf":
        name = options.name or model_name(src, options.adapter)
        target = GgufTarget(view, Tokenizer.from_folder, dtype=dtype, name=name)
    else:
        size = "5GB" if options.max_shard_size is None else options.max_shard_size
        target = SafetensorsTarget(view, saving.num_bytes(size), like=options.like)
    nbytes = sum(info.nbytes for info in target.headers.values())
    report = Report(str(src), None if dst is None else str(dst), len(target.headers), nbytes)
    report.details = {"architecture": type(view.model).__name__, "to": options.to}
    report.details["dtypes"] = dtype_counts(target.headers)
    if isinstance(target, GgufTarget):
        report.details["name"] = target.name
    if isinstance(target, SafetensorsTarget):
        report.details["files"] = len(target.shards)
    if destination is None:
        return report
    replacing = saving.replacing(destination, nbytes, is_file=options.to == "gguf")
    with saving.write_errors(destination), replacing as staging:
        total = sum(info.nbytes for info in view.headers.values())
        disable = None if options.progress else True
        with tqdm(desc="Converting", total=total, unit="B", unit_scale=True, disable=disable) as bar:
            view.on_read = bar.update
            target.write(staging)
        saving.finish(staging, target.files())
        if options.verify != "none":
            _verify(staging, source, target, dtype, options, report)
    return report


def _verify(
    staging: Path, source: Source, target: Target, dtype: torch.dtype | None, options: Options, report: Report
) -> None:
    """Compares what was written with the source. Raises MismatchError."""
    if isinstance(target, GgufTarget):
        report.details["verified"] = options.verify
        report.mismatches += target.compare(staging, level=options.verify)
    else:
        expected, written = View(source, dtype=dtype), View(open_source(staging))
        compare(expected, written, level=options.verify, report=report, progress=options.progress)
        report.mismatches += [f"{n} tensors are {b}, expected {a}" for (a, b), n in report.casts.items()]
    if not report.ok:
        lines = "\n  ".join(report.mismatches[:5])
        raise MismatchError(f"{report.destination} was not written, for the result differs from the source:\n  {lines}")


class SafetensorsTarget:
    """`source` as model.safetensors, or as shards of at most `max_bytes` and their index.

    like: shard as the source is sharded instead. shards: the tensors of each file.
    Raises InputError for `like` where the source cuts tensors across files.
    """

    def __init__(self, source: Source, max_bytes: int, *, like: bool = False):
        self._source, self.headers = source, source.headers
        if not like:
            self.shards = saving.split_into_shards(source.headers, max_bytes)
            return
        if source.places is None:
            raise InputError(f"--like: {source.source} cuts tensors across files; give --max-shard-size instead")
        files: dict[str, list[str]] = {}
        for name in source.headers:
            files.setdefault(source.places[name], []).append(name)
        self.shards = [saving.align(source.headers, files[file]) for file in sorted(files)]

    def files(self) -> dict[str, bytes | Path]:
        return self._source.files()

    def write(self, folder: Path) -> None:
        tensors = (self._source.read(name) for names in self.shards for name in names)
        saving.write_shards(folder, self.headers, tensors, self.shards)
