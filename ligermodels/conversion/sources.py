"""Opens a checkpoint folder in any of the layouts, which the names of its files tell apart."""

import os
from pathlib import Path
from typing import Literal

from ligermodels.checkpoint import files, hub
from ligermodels.checkpoint.files import METADATA, PICKLES, SAFETENSORS, read_errors, weight_files
from ligermodels.conversion import lora, meta, mistral
from ligermodels.conversion.huggingface import FolderSource
from ligermodels.conversion.source import Source
from ligermodels.conversion.view import View
from ligermodels.errors import CheckpointError, InputError

Kind = Literal["folder", "gguf", "meta", "mistral", "dcp", "adapter"]
KINDS: dict[Kind, str] = {
    "folder": "Hugging Face",
    "gguf": "GGUF",
    "meta": "Meta's own (consolidated.NN.pth, params.json)",
    "mistral": "Mistral's own (consolidated*.safetensors, params.json)",
    "dcp": "torch distributed checkpoint",
    "adapter": "LoRA adapter, as PEFT saves it",
}


def locate(
    src: str | Path, *, revision: str | None = None, local_files_only: bool = False, allow_pickle: bool = False
) -> Path:
    """The local folder of a checkpoint, given as a folder, a GGUF file or a repository of the Hub; see `hub.resolve`.

    Raises HubError, and CheckpointError where `src` is a file.
    """
    if not str(src):
        raise InputError("the name of a checkpoint is empty: give a folder, or a repository of the Hub as owner/name")
    path = Path(os.path.expanduser(src))
    if path.is_file() and path.suffix != ".gguf":
        raise CheckpointError(f"{src} is a file. Give the folder that holds the checkpoint.")
    return hub.resolve(src, revision=revision, local_files_only=local_files_only, allow_pickle=allow_pickle)


def kind_of(folder: Path) -> Kind:
    """The layout of `folder` by the names of its files; "folder" where no other one fits."""
    with read_errors(folder):
        names = {path.name.removesuffix(".index.json") for path in folder.iterdir()}
    if SAFETENSORS in names or {PICKLES, "config.json"} <= names:
        return "folder"
    if files.is_gguf_folder(folder):
        return "gguf"
    if METADATA in names:
        return "dcp"
    consolidated = {Path(name).suffix for name in names if name.startswith("consolidated")}
    if consolidated & {".pth", ".safetensors"} and (meta.PARAMS in names or "config.json" not in names):
        return "meta" if ".pth" in consolidated else "mistral"
    return "adapter" if lora.CONFIG in names else "folder"


def takes_config(folder: Path) -> bool:
    """Whether its config.json may be elsewhere: a distributed checkpoint, or a state dict alone."""
    kind = kind_of(folder)
    return kind == "dcp" or (kind == "folder" and not (folder / "config.json").exists())


def open_source(
    folder: Path,
    *,
    allow_pickle: bool = False,
    config: Path | None = None,
    rope_factor: float | None = None,
    adapter: Path | None = None,
) -> Source:
    """The checkpoint in `folder`, of whichever kind.

    config: the folder of config.json and tokenizer, where this one has none; see `takes_config`. rope_factor: for
    Meta's files, see there. adapter: a LoRA adapter to merge. Raises CheckpointError, InputError.
    """
    kind = kind_of(folder)
    if kind == "adapter":
        raise CheckpointError(
            f"{folder} holds an adapter, not a whole model.\n"
            "  Next: give its base model as SRC, and this folder with --adapter (adapter=...)."
        )
    if config is not None and not takes_config(folder):
        raise InputError(f"--config is for weights without one; {folder} has its own configuration")
    if rope_factor is not None and kind != "meta":
        raise InputError(f"--rope-factor is for Meta's files; {folder} has its own configuration")
    source: Source
    if kind == "meta":
        source = meta.MetaSource(folder, allow_pickle=allow_pickle, rope_factor=rope_factor)
    elif kind == "mistral":
        source = mistral.MistralSource(folder)
    elif kind == "dcp":
        from ligermodels.conversion.distributed import DcpSource

        source = DcpSource(folder, config)
    else:
        source = FolderSource(folder, config, allow_pickle=allow_pickle)
    return source if adapter is None else lora.MergedSource(View(source), adapter, allow_pickle=allow_pickle)


def weight_paths(folder: Path) -> list[Path]:
    """The files that hold the weights of a checkpoint of any kind."""
    kind = kind_of(folder)
    if kind == "folder":
        safe = any((folder / f"{SAFETENSORS}{end}").is_file() for end in ("", ".index.json"))
        single = SAFETENSORS if safe else PICKLES
        return [folder / name for name in weight_files(folder, single)[0]]
    if kind == "gguf":
        return [(folder / files.GGUF).resolve()]
    pattern = {"dcp": "*.distcp", "adapter": "adapter_model.*"}.get(kind, "consolidated*")
    return sorted(folder.glob(pattern))
