"""The options of a conversion. They are checked before anything is read, and without torch."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ligermodels.checkpoint.dtypes import dtype_name
from ligermodels.checkpoint.files import absolute, write_errors
from ligermodels.errors import InputError

Level = Literal["none", "keys", "bytes"]
LEVELS: tuple[Level, ...] = ("none", "keys", "bytes")
KEPT = ("keep", "auto")
"""Names of a dtype that mean no cast."""


@dataclass(frozen=True)
class Options:
    """Options of `convert`.

    name: of the model, for people, in a GGUF file; by default that of its repository or folder (`writer.model_name`).
    dtype: "keep" or "auto" for no cast, or a name of `dtypes.NAMES`, such as "bf16".
    max_shard_size: as in `save_pretrained`, by default "5GB".
    adapter: the folder of a LoRA adapter to merge.
    config: the folder of config.json and tokenizer, for a distributed checkpoint or a state dict without them.
    revision: of a repository. allow_pickle: read pickled weights, as plain tensors.
    verify: the level at which the result is compared with the source before it replaces the destination; see `verify`.
    overwrite: replace weights and files in the destination.
    dry_run: plan and check from headers, write nothing. progress: show bars on stderr if that is a terminal.
    """

    name: str | None = None
    dtype: str = "keep"
    max_shard_size: int | str | None = None
    adapter: str | Path | None = None
    config: str | Path | None = None
    revision: str | None = None
    allow_pickle: bool = False
    verify: Level = "none"
    overwrite: bool = False
    dry_run: bool = False
    progress: bool = True


def check_options(dst: str | Path | None, options: Options) -> tuple[Path | None, bool]:
    """(the folder or GGUF file to write, None for a dry run; whether it is a GGUF file). Raises InputError."""
    dtype, name = dtype_name(options.dtype, KEPT), str(dst or "")
    if options.verify not in LEVELS:
        raise InputError(f"verify={options.verify!r} is not known; known: {', '.join(LEVELS)}")
    is_gguf = name.endswith(".gguf")
    if is_gguf and dtype == "float64":
        raise InputError("GGUF files hold no weights in float64; give another dtype")
    if is_gguf and options.max_shard_size is not None:
        raise InputError("max_shard_size is for folders, and GGUF is one file; leave it out")
    if options.name is not None and not is_gguf:
        raise InputError("name is for GGUF files, whose names end in .gguf; leave it out")
    if options.dry_run and not name:
        return None, False
    if not name:
        raise InputError("DST is missing: give the folder or .gguf file to write, or --dry-run to write nothing")
    if name.endswith((".safetensors", ".bin")):
        raise InputError(
            f"{dst} has the name of a file of weights, and DST is the folder for them and their config.json"
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
    return None if options.dry_run else target, is_gguf
