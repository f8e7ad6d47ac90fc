"""One conversion: what is to be written is planned from headers, then goes to disk tensor by tensor.

The result grows in `.<name>.converting` beside the destination and takes its place when it is complete and, if that
is asked for, verified. An interruption leaves that folder, with a receipt of the shards that are done; `resume`
keeps those whose digest is still the receipt's.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
from collections.abc import Container, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors
import torch
from tqdm import tqdm

from ligermodels import __version__
from ligermodels.checkpoint import reading, saving
from ligermodels.checkpoint.weights import TensorInfo
from ligermodels.conversion import dcp, gguf, meta
from ligermodels.conversion.source import MismatchError, Source
from ligermodels.conversion.sources import View, locate, open_source, source_files
from ligermodels.conversion.verify import LEVELS, Level, Report, compare
from ligermodels.errors import CheckpointError, HubError, InputError

DTYPES: dict[str, torch.dtype | None] = {
    "keep": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32
}  # fmt: skip
Layout = Literal["hf", "meta", "dcp", "gguf"]
LAYOUTS: tuple[Layout, ...] = ("hf", "meta", "dcp", "gguf")
RECEIPT = "conversion.json"
GGUF = "model.gguf"
_CODES = {dtype: code for code, dtype in reading.DTYPES.items()}


@dataclass(frozen=True)
class Options:
    """What to make of a checkpoint.

    to: "hf", "meta" (Llamas only), "dcp" (under the names that models have in memory, ours and transformers') or
    "gguf" (one file, for llama.cpp).
    dtype: "keep", "bf16", "fp16" or "fp32".
    max_shard_size: as in `save_pretrained`, by default "5GB"; like: divide into files as the source is divided
    instead. For "meta", ranks: how many consolidated.NN.pth; embedding_axis: the dim along which they cut the
    embedding, by default 0 for a rope_theta of 500000 (Llama 3), else 1.
    adapter: the folder of a LoRA adapter to merge. config: the folder of config.json and tokenizer, for a distributed
    checkpoint or a trainer's state dict without them. rope_factor: of Meta's files with `use_scaled_rope` and a size
    without a known one.
    revision: of a repository. allow_pickle: read pickled weights, as plain tensors.
    verify: how far the result is compared with the source before it takes its place; see `verify`.
    overwrite: replace weights and files in the destination. resume: go on from an interrupted conversion.
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
    resume: bool = False
    dry_run: bool = False
    progress: bool = True


Plan = dict[str, list[str]]
"""{file: the tensors that go into it}."""


def convert(src: str | Path, dst: str | Path | None, options: Options | None = None) -> Report:
    """Converts `src`, a folder or a repository of the Hub, into the folder `dst`, which `dry_run` does without.

    Memory holds one tensor of the result and what it is joined or cast from, whatever the shard size.
    `conversion.json` in `dst` says what was made from what, with SHA-256 digests. For "gguf", `dst` is a file, and
    `<dst>.conversion.json` stands beside it.
    Raises InputError for options that do not fit together, MismatchError where the weights do not fit the model or
    the result failed its verification (`dst` is as before then), CheckpointError or ConfigError for a source that
    cannot be used, HubError (with `errno`) where Hub, network, disk or file system refuse.
    """
    options = options or Options()
    target = _check_options(dst, options)
    folder = locate(src, revision=options.revision, allow_pickle=options.allow_pickle)
    config, adapter = (Path(os.path.expanduser(path)) if path else None for path in (options.config, options.adapter))
    with open_source(
        folder,
        allow_pickle=options.allow_pickle,
        config=config,
        rope_factor=options.rope_factor,
        adapter=adapter,
    ) as source:
        dtype, origin = DTYPES[options.dtype], _origin(src, folder, adapter)
        view = View(source, memory=options.to == "dcp", dtype=None if options.to == "gguf" else dtype)
        file = None
        if options.to == "gguf":
            file = gguf.GgufView(view, dtype=dtype, name=Path(origin.get("folder") or origin["repository"]).name)
        plan = _plan(view, options) if options.to == "hf" else {}
        headers = view.headers if file is None else file.headers
        size = sum(info.nbytes for info in headers.values())
        report = Report(str(src), None if dst is None else str(dst), len(headers), size)
        report.details = {"architecture": view.arch.__name__, "to": options.to}
        if plan:
            report.details["files"] = len(plan)
        if target is None:
            return report
        receipt = {
            "ligermodels": __version__,
            "torch": torch.__version__,
            "safetensors": safetensors.__version__,
            "source": origin,
            "options": {"to": options.to, "dtype": options.dtype}
            | ({"rope_factor": options.rope_factor} if options.rope_factor is not None else {}),
            "plan": _digest_of([plan, {name: str(info) for name, info in view.headers.items()}]),
        }
        with saving.write_errors(target):
            fixed = file is None and saving.check_target(target, overwrite=True)
            home = target if fixed else target.parent
            home.mkdir(parents=True, exist_ok=True)
            with _staging(home / f".{target.name[:100]}.converting") as staging, saving.write_errors(target):
                sources = source_files(folder, config=config, adapter=adapter)
                if file is not None:
                    _fill_gguf(staging, file, receipt, sources, options, report)
                    _move_file(staging, target)
                else:
                    if plan:
                        _fill(staging, view, plan, receipt, sources, options, report)
                    else:
                        _fill_other(staging, view, receipt, sources, options)
                    if options.verify != "none":
                        _verify(staging, source, options, report)
                    saving.install(staging, target, fixed=fixed)
    return report


def _check_options(dst: str | Path | None, options: Options) -> Path | None:
    """The folder or, for "gguf", the file to write; None for a dry run. Raises InputError."""
    for name, known in (("to", LAYOUTS), ("dtype", tuple(DTYPES)), ("verify", LEVELS)):
        if getattr(options, name) not in known:
            raise InputError(f"{name}={getattr(options, name)!r} is not known; known: {', '.join(known)}")
    if options.to == "hf":
        saving.num_bytes(_shard_size(options))
    elif options.like or options.resume or options.max_shard_size is not None:
        raise InputError(f"like, resume and max_shard_size are for the layout hf, not for {options.to}")
    if (options.ranks != 1 or options.embedding_axis is not None) and options.to != "meta":
        raise InputError(f"ranks and embedding_axis are for the layout meta, not for {options.to}")
    if options.embedding_axis not in (None, 0, 1):
        raise InputError(f"embedding_axis={options.embedding_axis}: expected 0, rows, or 1, columns")
    if options.to == "gguf" and options.verify == "logits":
        raise InputError("verify=logits needs a model that runs, and GGUF files run in llama.cpp; give keys or bytes")
    if not (dst is None and options.dry_run) and not str(dst or ""):
        raise InputError("DST is missing: give the folder to write, or --dry-run to write nothing")
    if dst is None:
        return None
    target = saving.absolute(dst)
    with saving.write_errors(target):
        is_folder, is_there = target.is_dir(), target.exists()
        filled = is_folder and any(not path.name.endswith(".converting") for path in target.iterdir())
    if options.to == "gguf" and is_folder:
        raise InputError(f"{dst} is a folder; GGUF is one file: give its name, such as {Path(dst) / 'model.gguf'}")
    if options.to == "gguf" and is_there and not options.overwrite:
        raise InputError(f"{dst} is there; overwrite=True (--overwrite) saves over it")
    if options.to != "gguf" and is_there and not is_folder:
        raise InputError(f"{dst} is a file; give the name of a folder to write")
    if filled and not options.overwrite:
        raise InputError(f"{dst} is not empty; overwrite=True (--overwrite) saves over it")
    return None if options.dry_run else target


def _shard_size(options: Options) -> int | str:
    return "5GB" if options.max_shard_size is None else options.max_shard_size


def _plan(view: View, options: Options) -> Plan:
    if not options.like:
        shards = _by_size(view, saving.num_bytes(_shard_size(options)))
    elif (places := view.places()) is not None:
        files: dict[str, list[str]] = {}
        for name in view.headers:
            files.setdefault(places[name], []).append(name)
        shards = [files[file] for file in sorted(files)]
    else:
        raise InputError(f"--like: {view.source} is not divided by tensors; give --max-shard-size instead")
    if len(shards) == 1:
        return {reading.SAFETENSORS: shards[0]}
    return {f"model-{k:05}-of-{len(shards):05}.safetensors": shard for k, shard in enumerate(shards, 1)}


def _by_size(view: View, limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, info in view.headers.items():
        if shards[-1] and size + info.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += info.nbytes
    return shards


@contextlib.contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """`folder`, made if need be and locked. It stays behind only where a receipt of finished shards is in it."""
    lock = _lock(folder)
    try:
        yield folder
    except BaseException as error:
        done = _shards(folder)
        if done and not isinstance(error, CheckpointError):
            error.add_note(f"  {len(done)} finished shards are kept in {folder}; --resume goes on from them.")
        else:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """A descriptor of the folder that holds its lock, which ends with the process; None on Windows, without one."""
    if os.name == "nt":
        folder.mkdir(exist_ok=True)
        return None
    import fcntl

    while True:
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_ino == folder.stat().st_ino:
                return descriptor
        except BlockingIOError as error:
            os.close(descriptor)
            raise HubError(f"{folder} is in use: another conversion writes there. Wait for it, or end it.") from error
        except FileNotFoundError:
            pass
        os.close(descriptor)  # another process has just finished with a folder of that name


def _fill(
    staging: Path,
    view: View,
    plan: Plan,
    receipt: dict[str, Any],
    sources: list[Path],
    options: Options,
    report: Report,
) -> None:
    """Shards, index, other files and, last, the complete receipt."""
    receipt["state"] = _digest_of([[str(path), *_state_of_source(path)] for path in sources])
    done = _kept(staging, receipt) if options.resume else {}
    _clear(staging, {*done, RECEIPT})
    receipt["shards"] = done
    _write_receipt(staging, receipt)
    report.details["kept"] = len(done)
    left = {file: names for file, names in plan.items() if file not in done}
    size = sum(view.headers[name].nbytes for names in left.values() for name in names)
    saving.check_room(staging, size)
    with (
        ThreadPoolExecutor(1) as read,
        ThreadPoolExecutor(1) as wrote,
        tqdm(
            desc="Converting", total=size, unit="B", unit_scale=True, disable=None if options.progress else True
        ) as bar,
    ):
        # Digests are made beside the writing: of what was read and of what was written, both still in the page cache.
        digests = {path: read.submit(_sha256_of_source, path) for path in sources}
        written: dict[str, Future[str]] = {}
        try:
            for file, names in left.items():
                _write_shard(staging / file, names, view, bar)
                written[file] = wrote.submit(_sha256, staging / file)
                _note(staging, receipt, written, wait=False)
        except BaseException:
            for future in digests.values():
                future.cancel()
            _note(staging, receipt, written, wait=True)
            raise
        _note(staging, receipt, written, wait=True)
        receipt["source"]["files"] = {path.name: digest.result() for path, digest in digests.items()}
    files = view.files()
    if len(plan) > 1:
        weight_map = {name: file for file, names in plan.items() for name in names}
        index = {"metadata": {"total_size": report.bytes}, "weight_map": dict(sorted(weight_map.items()))}
        files[f"{reading.SAFETENSORS}.index.json"] = reading.json_bytes(index)
    _finish(staging, receipt, files)


def _fill_other(staging: Path, view: View, receipt: dict[str, Any], sources: list[Path], options: Options) -> None:
    """The layouts that are written whole, by their own writers."""
    _clear(staging)
    saving.check_room(staging, sum(info.nbytes for info in view.headers.values()))
    files = view.files()
    if options.to == "dcp":
        dcp.write_dcp(view, staging)
    else:
        files = {name: file for name, file in files.items() if name not in ("config.json", "generation_config.json")}
        if "original/tokenizer.model" in files:
            files["tokenizer.model"] = files.pop("original/tokenizer.model")
        config, axis = view.config(), options.embedding_axis
        meta.write_meta(view, config, staging, shards=options.ranks, embedding_axis=axis)
    receipt["source"]["files"] = {path.name: _sha256_of_source(path) for path in sources}
    weights = [path for path in sorted(staging.iterdir()) if path.suffix in (".pth", ".distcp", "")]
    receipt["shards"] = {path.name: _sha256(path) for path in weights if path.is_file()}
    _finish(staging, receipt, files)


def _fill_gguf(
    staging: Path,
    file: gguf.GgufView,
    receipt: dict[str, Any],
    sources: list[Path],
    options: Options,
    report: Report,
) -> None:
    """The file, compared with what it was to be where that is asked for, and its receipt."""
    _clear(staging)
    saving.check_room(staging, report.bytes)
    disable = None if options.progress else True
    written = staging / GGUF
    with tqdm(desc="Converting", total=report.bytes, unit="B", unit_scale=True, disable=disable) as bar:
        file.write(written, bar)
    if options.verify != "none":
        file.compare(written, level=options.verify, report=report)
        _check_report(report)
    words = [path for path in file.view.files().values() if isinstance(path, Path)]  # they are in the file too
    receipt["source"]["files"] = {path.name: _sha256_of_source(path) for path in (*words, *sources)}
    receipt["shards"] = {Path(report.destination or GGUF).name: _sha256(written)}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # used from its sources
        receipt["gguf"] = importlib.metadata.version("gguf")
    _finish(staging, receipt, {})


def _move_file(staging: Path, target: Path) -> None:
    """The file to its place, then the receipt to its own: one that is there belongs to the file beside it."""
    receipt = target.with_name(f"{target.name}.{RECEIPT}")
    receipt.unlink(missing_ok=True)
    os.replace(staging / GGUF, target)
    os.replace(staging / RECEIPT, receipt)
    shutil.rmtree(staging)
    if os.name != "nt":  # which opens no folder
        descriptor = os.open(target.parent, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _clear(staging: Path, but: Container[str] = ()) -> None:
    for path in staging.iterdir():
        if path.name not in but:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _finish(staging: Path, receipt: Mapping[str, Any], files: Mapping[str, bytes | Path]) -> None:
    """`files`, then the receipt without what only a resumption needs, and all of it safe on the disk."""
    kept = {key: value for key, value in receipt.items() if key not in ("plan", "state")}
    saving.finish(staging, {**files, RECEIPT: reading.json_bytes(kept)})


def _kept(staging: Path, receipt: Mapping[str, Any]) -> dict[str, str]:
    """{shard: digest} of an interrupted conversion of the same source with the same result."""
    old = _shards(staging, {key: receipt[key] for key in ("ligermodels", "plan", "state", "options")})
    return {file: sha for file, sha in old.items() if (staging / file).is_file() and _sha256(staging / file) == sha}


def _shards(staging: Path, like: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The finished shards that the receipt lists, if it has the entries of `like`."""
    try:
        receipt = reading.read_json(staging / RECEIPT)
    except (CheckpointError, HubError):
        return {}
    shards = receipt.get("shards")
    return shards if isinstance(shards, dict) and receipt == {**receipt, **(like or {})} else {}


def _note(staging: Path, receipt: dict[str, Any], written: dict[str, Future[str]], *, wait: bool) -> None:
    """Moves the digests that are ready into the receipt."""
    ready = [file for file, digest in written.items() if wait or digest.done()]
    for file in ready:
        receipt["shards"][file] = written.pop(file).result()
    if ready:
        _write_receipt(staging, receipt)


def _write_receipt(staging: Path, receipt: Mapping[str, Any]) -> None:
    new = staging / f"{RECEIPT}.new"
    new.write_bytes(reading.json_bytes(receipt))
    new.replace(staging / RECEIPT)


def _write_shard(path: Path, names: list[str], view: View, bar: Any) -> None:
    """A safetensors file, written from its header on: one tensor is in memory at a time."""
    infos = {name: view.headers[name] for name in sorted(names, key=lambda n: -view.headers[n].dtype.itemsize)}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, info in infos.items():
        start, end = end, end + info.nbytes
        header[name] = {"dtype": _CODES[info.dtype], "shape": list(info.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, info in infos.items():
            tensor = view.read(name)
            found = TensorInfo(tensor.dtype, tuple(tensor.shape))
            assert found == info, f"{name} is {found}, its header said {info}"
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            bar.update(info.nbytes)
        file.flush()
        os.fsync(file.fileno())


def _verify(staging: Path, source: Source, options: Options, report: Report) -> None:
    expected = View(source, dtype=DTYPES[options.dtype])
    with View(open_source(staging, allow_pickle=True)) as written:  # our own pickles, in the layout meta
        compare(expected, written, level=options.verify, report=report, progress=options.progress)
    _check_report(report)


def _check_report(report: Report) -> None:
    """Raises MismatchError."""
    if not report.ok:
        lines = "\n  ".join(report.mismatches[:5])
        raise MismatchError(f"{report.destination} was not written, for the result differs from the source:\n  {lines}")


def _origin(src: str | Path, folder: Path, adapter: Path | None) -> dict[str, Any]:
    """A repository and its commit, or a folder's name without where it lies."""
    given = Path(os.path.expanduser(src)) == folder
    origin = {"folder": folder.resolve().name} if given else {"repository": str(src), "commit": folder.name}
    return origin | ({"adapter": adapter.resolve().name} if adapter else {})


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_of_source(path: Path) -> str:
    with reading.read_errors(path):
        return _sha256(path)


def _state_of_source(path: Path) -> tuple[int, int]:
    with reading.read_errors(path):
        state = path.stat()
    return state.st_size, state.st_mtime_ns


def _digest_of(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
