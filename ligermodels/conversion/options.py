"""The options of a conversion. They are checked before anything is read, and without torch."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ligermodels.checkpoint.dtypes import dtype_name
from ligermodels.checkpoint.files import absolute, write_errors
from ligermodels.errors import InputError

Level = Literal["none", "keys", "bytes", "logits"]
LEVELS: tuple[Level, ...] = ("none", "keys", "bytes", "logits")
KEPT = ("keep", "auto")
"""Names of a dtype that mean no cast."""
Target = Literal["hf", "dcp", "gguf"]
TARGETS: tuple[Target, ...] = ("hf", "dcp", "gguf")


@dataclass(frozen=True)
class Options:
    """Options of `convert`.

    to: the layout to write: "hf", "dcp" (with the names of the model in memory) or "gguf" (one file for llama.cpp).
        None: "gguf" if the destination ends in .gguf, else "hf".
    name: of the model, for people, in a GGUF file; by default that of its repository or folder (`writer.model_name`).
    dtype: "keep" or "auto" for no cast, or a name of `dtypes.NAMES`, such as "bf16".
    max_shard_size: as in `save_pretrained`, by default "5GB". like: shard as the source is sharded instead.
    adapter: the folder of a LoRA adapter to merge.
    config: the folder of config.json and tokenizer, for a distributed checkpoint or a state dict without them.
    rope_factor: of Meta's `use_scaled_rope`, for a model size that Meta has not published.
    revision: of a repository. allow_pickle: read pickled weights, as plain tensors.
    verify: the level at which the result is compared with the source before it replaces the destination; see `verify`.
    overwrite: replace weights and files in the destination.
    dry_run: plan and check from headers, write nothing. progress: show bars on stderr if that is a terminal.
    """

    to: Target | None = None
    name: str | None = None
    dtype: str = "keep"
    max_shard_size: int | str | None = None
    like: bool = False
    adapter: str | Path | None = None
    config: str | Path | None = None
    rope_factor: float | None = None
    revision: str | None = None
    allow_pickle: bool = False
    verify: Level = "none"
    overwrite: bool = False
    dry_run: bool = False
    progress: bool = True


def check_options(dst: str | Path | None, options: Options) -> tuple[Path | None, Options]:
    """(the folder or GGUF file to write, None for a dry run; the options with `to` filled in). Raises InputError."""
    dtype_name(options.dtype, KEPT)
    is_gguf_name = Path(str(dst or "")).suffix.lower() == ".gguf"
    if options.to is None:
        options = dataclasses.replace(options, to="gguf" if is_gguf_name else "hf")
    for name, known in (("to", TARGETS), ("verify", LEVELS)):
        if getattr(options, name) not in known:
            raise InputError(f"{name}={getattr(options, name)!r} is not known; known: {', '.join(known)}")
    if options.to == "gguf" and dtype_name(options.dtype, KEPT) == "float64":
        raise InputError("GGUF files hold no weights in float64; give another dtype")
    if options.to != "hf" and (options.like or options.max_shard_size is not None):
        raise InputError(f"like and max_shard_size are for the layout hf, not for {options.to}")
    if options.name is not None and options.to != "gguf":
        raise InputError(f"name is for GGUF files, not for the layout {options.to}")
    if options.to == "gguf" and options.verify == "logits":
        raise InputError("verify=logits needs a model that runs, and GGUF files run in llama.cpp; give keys or bytes")
    if options.dry_run and dst is None:
        return None, options
    if not str(dst or ""):
        raise InputError("DST is missing: give the folder to write, or --dry-run to write nothing")
    target = absolute(str(dst))
    with write_errors(target):
        is_folder, is_file = target.is_dir(), target.is_file()
        is_filled = is_file or (is_folder and bool(os.listdir(target)))
    if options.to == "gguf" and is_folder:
        raise InputError(f"{dst} is a folder; GGUF is one file: give its name, such as {Path(str(dst)) / 'model.gguf'}")
    if options.to == "gguf" and not str(dst).endswith(".gguf"):
        raise InputError(f"{dst}: the name of a GGUF file has to end in .gguf, by which ligermodels knows it; add that")
    if options.to != "gguf" and is_gguf_name:
        raise InputError(
            f"{dst} is the name of a GGUF file, and the layout {options.to} is a folder; leave out to={options.to!r} "
            f"(--to {options.to}), or give the name of a folder"
        )
    if options.to != "gguf" and is_file:
        raise InputError(f"{dst} is a file; give the name of a folder to write")
    if is_filled and not options.overwrite:
        raise InputError(f"{dst} is there and not empty; overwrite=True (--overwrite) saves over it")
    return None if options.dry_run else target, options
