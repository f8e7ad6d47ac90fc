"""One conversion: planned and checked from headers, then written tensor by tensor.

The result grows in a folder beside the destination. It replaces the destination when it is complete and, if that is
asked for, verified. A conversion that fails or is killed leaves the destination as it was.
"""

import shlex
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ligermodels.checkpoint import adapters, hub, saving, weights
from ligermodels.checkpoint.files import read_json, readable_size
from ligermodels.checkpoint.gguf.adapter import AdapterTarget
from ligermodels.checkpoint.gguf.mmproj import PROJECTORS, MmprojTarget
from ligermodels.checkpoint.gguf.modelfile import NAME, modelfile
from ligermodels.checkpoint.gguf.output import BLOCK, GgufOutput
from ligermodels.checkpoint.gguf.writer import GgufTarget, model_name
from ligermodels.conversion.comparison import Report, compare, dtype_counts
from ligermodels.conversion.layouts import layout_of, open_source
from ligermodels.conversion.merging import aliases
from ligermodels.conversion.options import (
    KEPT,
    QUANTISED,
    Options,
    check_adapter_options,
    check_options,
    dtype_of,
    mmproj_of,
)
from ligermodels.conversion.source import Source, View, model_on_meta
from ligermodels.errors import CheckpointError, MismatchError
from ligermodels.text import Tokenizer


def convert(src: str | Path, dst: str | Path | None, options: Options | None = None) -> Report:
    """Converts `src`, a folder or a repository of the Hub, into `dst`; it may be None with `dry_run`.

    dst: a folder in Hugging Face's layout or, if its name ends in .gguf, a GGUF file. A LoRA adapter becomes a GGUF
    file alone; of its base, the configuration is read.

    Memory holds one tensor of the result and what it is joined or cast from, whatever the shard size.
    The report has the tensors and bytes written and, in `details`, the elements of each dtype and the name in a GGUF
    file. Raises InputError for options that contradict each other, MismatchError if the weights do not fit the model
    or the result differs from the source (`dst` is then as before), CheckpointError or ConfigError for a source that
    cannot be used, HubError (with `errno`) if the Hub, network, disk or file system refuses.
    """
    options = options or Options()
    destination, is_gguf = check_options(src, dst, options)
    folder = hub.resolve(src, revision=options.revision, allow_pickle=options.allow_pickle)
    if is_gguf and layout_of(folder) == "adapter":
        return _convert_adapter(src, dst, folder, destination, options)
    reading = dict(allow_pickle=options.allow_pickle, config=options.config, adapter=options.adapter)
    source = open_source(folder, **reading)  # type: ignore[arg-type]
    if is_gguf:
        return _convert_gguf(src, dst, source, destination, options)
    dtype = _cast_of(options)
    view = View(source, dtype=dtype)
    details: dict[str, Any] = {"architecture": type(view.model).__name__, "to": "hf"}
    size = "5GB" if options.max_shard_size is None else options.max_shard_size
    shards = saving.split_into_shards(view.headers, saving.num_bytes(size))
    details["files"] = len(shards)
    report = _report(src, dst, view, details)
    if destination is None:
        return report
    tensors = (view.read(name) for names in shards for name in names)

    def write(staging: Path) -> None:
        saving.write_shards(staging, view.headers, tensors, shards)
        saving.finish(staging, view.files())

    def check(staging: Path) -> None:
        expected, written = View(source, dtype=dtype), View(open_source(staging))
        compare(expected, written, level=options.verify, report=report, progress=options.progress)
        report.mismatches += [f"{n} tensors are {b}, expected {a}" for (a, b), n in report.casts.items()]

    _replace(destination, report, view, write, check, options, is_file=False)
    return report


def _convert_gguf(
    src: str | Path, dst: str | Path | None, source: Source, destination: Path | None, options: Options
) -> Report:
    """The GGUF file of a model's text, and what is asked for beside it."""
    dtype, name = _cast_of(options), dtype_of(options.dtype)
    has_tower = str(source.config.get("model_type")) in PROJECTORS
    with warnings.catch_warnings():
        if has_tower:
            warnings.filterwarnings("ignore", ".*only the text model is read")  # what is said below, or not the case
        view = View(source, text_only=True)  # cast by the writer: norms and biases stay fp32
    label = options.name or model_name(src, options.adapter)
    kind = name.upper() if name in QUANTISED else None
    details: dict[str, Any] = {"architecture": type(view.model).__name__, "to": "gguf"}
    whole = View(source) if options.mmproj else view
    tower = MmprojTarget(whole, dtype=dtype or torch.float16, name=label) if options.mmproj else None
    if has_tower and not options.mmproj:
        warnings.warn(
            f"{source.source}: only the text is written. --mmproj (mmproj=True) also writes the vision tower, with "
            "which llama.cpp reads images.",
            stacklevel=3,
        )
    target = GgufTarget(view, Tokenizer.from_folder, dtype=dtype, quantised=kind, name=label)
    if target.kept:
        details["F16"] = f"{', '.join(target.kept)}: their rows are no multiple of {BLOCK}"
    text = _modelfile(view, Path(str(dst or "model.gguf")).name) if options.modelfile else ""
    report = _write_gguf(target, view, _report(src, dst, target, details), destination, options)
    if tower is not None:
        report.details["mmproj"] = f"{len(tower.headers)} tensors, {readable_size(tower.nbytes)}"
        if destination is not None:
            beside = mmproj_of(destination)
            _write_gguf(tower, whole, _report(src, beside, tower, {}), beside, options)
            report.details["images"] = shlex.join(["llama-server", "-m", str(destination), "--mmproj", str(beside)])
    if destination is not None and options.modelfile:
        with saving.write_errors(destination.parent):
            (destination.parent / NAME).write_text(text, encoding="utf-8")
        report.details["modelfile"] = f"ollama create NAME -f {destination.parent / NAME}"
    return report


def _convert_adapter(
    src: str | Path, dst: str | Path | None, folder: Path, destination: Path | None, options: Options
) -> Report:
    """The GGUF file of a LoRA adapter."""
    check_adapter_options(options)
    base = options.config or adapters.read_options(folder).get("base_model_name_or_path")
    if not base:
        raise CheckpointError(
            f"{folder} does not name its base model.\n  Next: give the folder of its config.json with --config"
        )
    home = hub.resolve(base, weights=False)
    model = model_on_meta(read_json(home / "config.json"), str(base), text_only=True)
    params = dict(weights.named_weights(model))
    shapes = {part.source: part.shape(params[part.param].shape) for part in weights.regions(model, model.DISK_NAMES)}
    label = options.name or model_name(src)
    reading = dict(dtype=_cast_of(options), name=label, allow_pickle=options.allow_pickle)
    target = AdapterTarget(folder, model, shapes, aliases(model), **reading)  # type: ignore[arg-type]
    details = {"architecture": type(model).__name__, "base": str(base), "to": "gguf adapter"}
    return _write_gguf(target, None, _report(src, dst, target, details), destination, options)


def _cast_of(options: Options) -> torch.dtype | None:
    name = dtype_of(options.dtype)
    return None if name in (*KEPT, *QUANTISED) else getattr(torch, name)


def _report(src: str | Path, dst: str | Path | None, of: View | GgufOutput, details: dict[str, Any]) -> Report:
    """The report of what will be written."""
    types = of.types if isinstance(of, GgufOutput) else None
    nbytes = of.nbytes if isinstance(of, GgufOutput) else sum(info.nbytes for info in of.headers.values())
    report = Report(str(src), None if dst is None else str(dst), len(of.headers), nbytes)
    name = {"name": of.name} if isinstance(of, GgufOutput) else {}
    report.details = details | name | {"dtypes": dtype_counts(of.headers, types)}
    return report


def _write_gguf(
    target: GgufOutput, view: View | None, report: Report, destination: Path | None, options: Options
) -> Report:
    """Writes a GGUF file, unless `destination` is None. view: what it is read from, for the progress bar."""
    if destination is None:
        return report

    def check(staging: Path) -> None:
        report.details["verified"] = options.verify
        report.mismatches += target.compare(staging, level=options.verify)

    def write(staging: Path) -> None:
        target.write(staging)
        saving.finish(staging, {})  # a GGUF file has the tokenizer in it

    _replace(destination, report, view, write, check, options, is_file=True)
    return report


def _replace(
    destination: Path,
    report: Report,
    view: View | None,
    write: Callable[[Path], None],
    check: Callable[[Path], None],
    options: Options,
    *,
    is_file: bool,
) -> None:
    """Writes into a folder beside the destination, checks it, and replaces the destination, a GGUF file or a folder.

    Raises MismatchError if the check finds mismatches, HubError if the file system refuses.
    """
    replacing = saving.replacing(destination, report.bytes, is_file=is_file)
    with saving.write_errors(destination), replacing as staging:
        total = sum(info.nbytes for info in view.headers.values()) if view else 0
        disable = None if options.progress and view else True
        with tqdm(desc="Converting", total=total, unit="B", unit_scale=True, disable=disable) as bar:
            if view:
                view.on_read = bar.update
            write(staging)
        if options.verify != "none":
            check(staging)
        if not report.ok:
            lines = "\n  ".join(report.mismatches[:5])
            raise MismatchError(
                f"{report.destination} was not written, for the result differs from the source:\n  {lines}"
            )


def _modelfile(view: View, gguf: str) -> str:
    """The contents of a Modelfile beside the GGUF file."""
    with tempfile.TemporaryDirectory() as folder:
        saving.finish(Path(folder), view.files())
        return modelfile(Tokenizer.from_folder(folder), view.generation_config(), gguf)
