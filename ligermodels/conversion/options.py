"""The options of a conversion. They are checked before anything is read, and without torch."""

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ligermodels.checkpoint.dtypes import dtype_name
from ligermodels.checkpoint.files import absolute, is_gguf_name, is_mmproj, write_errors
from ligermodels.checkpoint.gguf.modelfile import MARK, NAME
from ligermodels.errors import InputError

Level = Literal["none", "keys", "bytes"]
LEVELS: tuple[Level, ...] = ("none", "keys", "bytes")
KEPT = ("keep", "auto")
"""Names of a dtype that mean no cast."""
QUANTISED = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
"""Types that the matrices of a GGUF file can be quantised as here."""
_BY_LLAMA_QUANTIZE = re.compile(r"q[2-6]_k(_[sml])?|iq[1-4]_(xxs|xs|s|m|nl)|tq[12]_0|q2_0|mxfp4_moe")


@dataclass(frozen=True)
class Options:
    """Options of `convert`.

    name: of the model, for people, in a GGUF file; by default that of its repository or folder (`writer.model_name`).
    dtype: "keep" or "auto" for no cast, a name of `dtypes.NAMES`, such as "bf16", or of QUANTISED for a GGUF file.
    modelfile: write a Modelfile for Ollama beside a GGUF file.
    mmproj: write the vision tower beside a GGUF file, as `mmproj_of(dst)`: in fp16, or the floats of `dtype`.
    max_shard_size: as in `save_pretrained`, by default "5GB".
    adapter: the folder of a LoRA adapter to merge.
    config: the folder of config.json and tokenizer, for a distributed checkpoint or a state dict without them; of the
        base, for a LoRA adapter that becomes a GGUF file, by default the one that it names.
    revision: of a repository. allow_pickle: read pickled weights, as plain tensors.
    verify: the level at which the result is compared with the source before it replaces the destination; see `verify`.
    overwrite: replace weights and files in the destination.
    dry_run: plan and check from headers, write nothing. progress: show bars on stderr if that is a terminal.
    """

    name: str | None = None
    dtype: str = "keep"
    modelfile: bool = False
    mmproj: bool = False
    max_shard_size: int | str | None = None
    adapter: str | Path | None = None
    config: str | Path | None = None
    revision: str | None = None
    allow_pickle: bool = False
    verify: Level = "none"
    overwrite: bool = False
    dry_run: bool = False
    progress: bool = True


def dtype_of(text: str) -> str:
    """torch's name of a dtype, or a name of KEPT or QUANTISED. Raises InputError for other names."""
    return text.lower() if text.lower() in QUANTISED else dtype_name(text, (*KEPT, *QUANTISED))


def mmproj_of(path: Path) -> Path:
    """The file of the vision tower beside the GGUF file of a text."""
    return path.with_name(f"mmproj-{path.name}")


def check_options(src: str | Path, dst: str | Path | None, options: Options) -> tuple[Path | None, bool]:
    """(the folder or GGUF file to write, None for a dry run; whether it is a GGUF file). Raises InputError."""
    if _BY_LLAMA_QUANTIZE.fullmatch(options.dtype.lower()):
        raise InputError(_llama_quantize(src, dst, options))
    dtype, name = dtype_of(options.dtype), str(dst or "")
    if options.verify not in LEVELS:
        raise InputError(f"verify={options.verify!r} is not known; known: {', '.join(LEVELS)}")
    is_gguf = is_gguf_name(name) or (not name and dtype in QUANTISED)
    if is_gguf and dtype == "float64":
        raise InputError("GGUF files hold no weights in float64; give another dtype")
    if dtype in QUANTISED and not is_gguf:
        raise InputError(f"dtype={dtype!r} is for GGUF files, whose names end in .gguf; {dst} is a folder's name")
    if is_gguf and options.max_shard_size is not None:
        raise InputError("max_shard_size is for folders, and GGUF is one file; leave it out")
    if options.name is not None and not is_gguf:
        raise InputError("name is for GGUF files, whose names end in .gguf; leave it out")
    for option in ("modelfile", "mmproj"):
        if getattr(options, option) and not is_gguf:
            raise InputError(f"{option} is for GGUF files, whose names end in .gguf; leave it out")
    if is_gguf and is_mmproj(name):
        raise InputError(
            f"{dst} has the name of a vision tower's file, and DST is the file of the text.\n"
            "  Next: give another name, and --mmproj (mmproj=True), which writes mmproj-NAME.gguf beside it"
        )
    if options.dry_run and not name:
        return None, is_gguf
    if not name:
        raise InputError("DST is missing: give the folder or .gguf file to write, or --dry-run to write nothing")
    if name.lower().endswith((".safetensors", ".bin", ".ggml", ".pt", ".pth")):
        raise InputError(
            f"{dst} has the name of a file of weights, and DST is the folder for them and their config.json, or a GGUF "
            "file, whose name ends in .gguf"
        )
    target = absolute(name)
    with write_errors(target):
        is_folder, is_file = target.is_dir(), target.is_file()
        is_filled = is_file or (is_folder and bool(os.listdir(target)))
    if is_gguf and is_folder:
        raise InputError(f"{dst} is a folder; GGUF is one file: give its name, such as {Path(name) / 'model.gguf'}")
    if is_file and not is_gguf:
        raise InputError(f"{dst} is a file; give the name of a folder, or of a file that ends in .gguf")
    if is_filled and not options.overwrite:
        raise InputError(f"{dst} already exists and is not empty; overwrite=True (--overwrite) saves over it")
    if options.mmproj and not options.overwrite and os.path.lexists(tower := mmproj_of(target)):
        raise InputError(f"{tower} already exists; overwrite=True (--overwrite) saves over it")
    if options.modelfile:
        _check_modelfile(target.parent / NAME, options.overwrite)
    return None if options.dry_run else target, is_gguf


def check_adapter_options(options: Options) -> None:
    """Raises InputError for options that a GGUF file of a LoRA adapter does not have."""
    if options.dtype.lower() in QUANTISED:
        raise InputError(f"dtype={options.dtype!r} is for models; the factors of an adapter are fp32, bf16 or fp16")
    if options.modelfile:
        raise InputError(
            "modelfile is for models: Ollama takes no adapters any more.\n"
            "  Next: merge it: ligermodels convert BASE out.gguf --adapter DIR --modelfile"
        )
    if options.mmproj:
        raise InputError("mmproj is for models that read images, and SRC is an adapter; leave it out")
    if options.adapter is not None:
        raise InputError("SRC is an adapter, and so is --adapter: give the base as SRC to merge it")


def _check_modelfile(path: Path, overwrite: bool) -> None:
    """Raises InputError where a Modelfile would replace another one."""
    with write_errors(path):
        if not path.exists():
            return
        with path.open("rb") as file:
            is_ours = file.readline().startswith(MARK.encode())
    if not is_ours:
        raise InputError(
            f"{path} is there, and not of this command: move it, or write the GGUF file into another folder"
        )
    if not overwrite:
        raise InputError(f"{path} already exists; overwrite=True (--overwrite) saves over it")


def _llama_quantize(src: str | Path, dst: str | Path | None, options: Options) -> str:
    """The message for a type that llama.cpp's own program writes, with the commands to type."""
    kind, result = options.dtype.lower(), str(dst or "")
    if not is_gguf_name(result):
        result = f"out-{kind}.gguf"
    stem = re.sub(rf"[-._]?{kind}$", "", result[: -len(".gguf")], flags=re.IGNORECASE) or "out"
    half = f"{stem}-f16.gguf"
    first = ["ligermodels", "convert", str(src), half, "--dtype", "f16"]
    for option in ("adapter", "config", "name", "revision"):
        if (value := getattr(options, option)) is not None:
            first += [f"--{option}", str(value)]
    second = ["llama-quantize", half, result, kind.upper()]
    return (
        f"dtype={options.dtype!r} is written by llama.cpp's llama-quantize, from a file in f16; here are "
        f"{', '.join(QUANTISED)}.\n"
        f"  Next: {shlex.join(first)}\n        {shlex.join(second)}"
    )
