"""One conversion: planned and checked from headers, then written tensor by tensor.

The result grows in a folder beside the destination. It replaces the destination when it is complete and, if that is
asked for, verified. A conversion that fails or is killed leaves the destination as it was.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ligermodels.checkpoint import hub, saving
from ligermodels.checkpoint.gguf.output import BLOCK
from ligermodels.checkpoint.gguf.writer import GgufTarget, model_name
from ligermodels.conversion.comparison import Report, compare, dtype_counts
from ligermodels.conversion.layouts import open_source
from ligermodels.conversion.options import KEPT, QUANTISED, Options, check_options, dtype_of
from ligermodels.conversion.source import View
from ligermodels.errors import MismatchError
from ligermodels.text import Tokenizer


def convert(src: str | Path, dst: str | Path | None, options: Options | None = None) -> Report:
    """Converts `src`, a folder or a repository of the Hub, into `dst`; it may be None with `dry_run`.

    dst: a folder in Hugging Face's layout or, if its name ends in .gguf, a GGUF file.

    Memory holds one tensor of the result and what it is joined or cast from, whatever the shard size.
    The report has the tensors and bytes written and, in `details`, the elements of each dtype and the name in a GGUF
    file. Raises InputError for options that contradict each other, MismatchError if the weights do not fit the model
    or the result differs from the source (`dst` is then as before), CheckpointError or ConfigError for a source that
    cannot be used, HubError (with `errno`) if the Hub, network, disk or file system refuses.
    """
    options = options or Options()
    destination, is_gguf = check_options(src, dst, options)
    folder = hub.resolve(src, revision=options.revision, allow_pickle=options.allow_pickle)
    reading = dict(allow_pickle=options.allow_pickle, config=options.config, adapter=options.adapter)
    source = open_source(folder, **reading)  # type: ignore[arg-type]
    name = dtype_of(options.dtype)
    dtype = None if name in (*KEPT, *QUANTISED) else getattr(torch, name)
    # A GGUF file has no images, and is cast by its writer: norms and biases stay fp32.
    view = View(source, dtype=None if is_gguf else dtype, text_only=is_gguf)
    target, headers = None, view.headers
    details: dict[str, Any] = {"architecture": type(view.model).__name__, "to": "gguf" if is_gguf else "hf"}
    write: Callable[[Path], object]
    if is_gguf:
        label = options.name or model_name(src, options.adapter)
        kind = name.upper() if name in QUANTISED else None
        target = GgufTarget(view, Tokenizer.from_folder, dtype=dtype, quantised=kind, name=label)
        headers, write, details["name"] = target.headers, target.write, target.name
        if target.kept:
            details["F16"] = f"{', '.join(target.kept)}: their rows are no multiple of {BLOCK}"
    else:
        size = "5GB" if options.max_shard_size is None else options.max_shard_size
        shards = saving.split_into_shards(view.headers, saving.num_bytes(size))
        tensors = (view.read(name) for names in shards for name in names)
        write, details["files"] = lambda folder: saving.write_shards(folder, headers, tensors, shards), len(shards)
    nbytes = sum(info.nbytes for info in headers.values()) if target is None else target.nbytes
    report = Report(str(src), None if dst is None else str(dst), len(headers), nbytes)
    report.details = details | {"dtypes": dtype_counts(headers, target and target.types)}
    if destination is None:
        return report
    replacing = saving.replacing(destination, nbytes, is_file=target is not None)
    with saving.write_errors(destination), replacing as staging:
        total = sum(info.nbytes for info in view.headers.values())
        disable = None if options.progress else True
        with tqdm(desc="Converting", total=total, unit="B", unit_scale=True, disable=disable) as bar:
            view.on_read = bar.update
            write(staging)
        saving.finish(staging, view.files() if target is None else {})  # a GGUF file has the tokenizer in it
        if target is not None and options.verify != "none":
            report.details["verified"] = options.verify
            report.mismatches += target.compare(staging, level=options.verify)
        elif options.verify != "none":
            expected, written = View(source, dtype=dtype), View(open_source(staging))
            compare(expected, written, level=options.verify, report=report, progress=options.progress)
            report.mismatches += [f"{n} tensors are {b}, expected {a}" for (a, b), n in report.casts.items()]
        if not report.ok:
            lines = "\n  ".join(report.mismatches[:5])
            raise MismatchError(f"{dst} was not written, for the result differs from the source:\n  {lines}")
    return report
