"""Detects the layout of a checkpoint from the names of its files, and opens it."""

import os
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ligermodels.checkpoint import mxfp4, reading
from ligermodels.checkpoint.adapters import CONFIG
from ligermodels.checkpoint.files import (
    METADATA,
    PICKLES,
    SAFETENSORS,
    companion_files,
    config_files,
    is_gguf_folder,
    read_errors,
    read_json,
    weight_files,
)
from ligermodels.checkpoint.gguf.folder import files_in
from ligermodels.checkpoint.mxfp4 import MXFP4Weight
from ligermodels.conversion.merging import MergedSource
from ligermodels.conversion.original import PARAMS, MetaSource, MistralSource
from ligermodels.conversion.source import Source, View
from ligermodels.errors import CheckpointError, InputError

Layout = Literal["folder", "gguf", "meta", "mistral", "dcp", "adapter"]
LAYOUTS: dict[Layout, str] = {
    "folder": "Hugging Face",
    "gguf": "GGUF",
    "meta": "Meta's own (consolidated.NN.pth, params.json)",
    "mistral": "Mistral's own (consolidated*.safetensors, params.json)",
    "dcp": "torch distributed checkpoint",
    "adapter": "LoRA adapter, as PEFT saves it",
}


def layout_of(folder: Path) -> Layout:
    """The layout of `folder`; "folder" where no other one fits."""
    with read_errors(folder):
        names = {path.name.removesuffix(".index.json") for path in folder.iterdir()}
    if SAFETENSORS in names or {PICKLES, "config.json"} <= names:
        return "folder"
    if is_gguf_folder(folder):
        return "gguf"
    if METADATA in names:
        return "dcp"
    consolidated = {Path(name).suffix for name in names if name.startswith("consolidated")}
    if consolidated & {".pth", ".safetensors"} and (PARAMS in names or "config.json" not in names):
        return "meta" if ".pth" in consolidated else "mistral"
    return "adapter" if CONFIG in names else "folder"


def takes_config(folder: Path) -> bool:
    """Whether config.json may be in another folder: for a distributed checkpoint, or a state dict alone."""
    layout = layout_of(folder)
    return layout == "dcp" or (layout == "folder" and not (folder / "config.json").exists())


def open_source(
    folder: Path,
    *,
    allow_pickle: bool = False,
    config: str | Path | None = None,
    adapter: str | Path | None = None,
) -> Source:
    """The checkpoint in `folder`, of any layout.

    config: the folder of config.json and tokenizer, if `folder` has none; see `takes_config`.
    adapter: a LoRA adapter to merge. Raises CheckpointError, InputError.
    """
    layout = layout_of(folder)
    config, adapter = (Path(os.path.expanduser(path)) if path else None for path in (config, adapter))
    if layout == "adapter":
        raise CheckpointError(
            f"{folder} holds an adapter, not a whole model.\n"
            "  Next: give its base model as SRC, and this folder with --adapter (adapter=...); or write it alone, to a "
            "DST that ends in .gguf."
        )
    if config is not None and not takes_config(folder):
        raise InputError(f"--config is for weights without one; {folder} has its own configuration")
    source: Source
    if layout == "meta":
        source = MetaSource(folder, allow_pickle=allow_pickle)
    elif layout == "mistral":
        source = MistralSource(folder)
    elif layout == "dcp":
        from ligermodels.conversion.distributed import DcpSource  # imports torch.distributed, which takes a while

        source = DcpSource(folder, config)
    else:
        source = FolderSource(folder, config, allow_pickle=allow_pickle)
    return source if adapter is None else MergedSource(View(source), adapter, allow_pickle=allow_pickle)


def weight_paths(folder: Path) -> list[Path]:
    """The weight files of a checkpoint of any layout."""
    layout = layout_of(folder)
    if layout == "folder":
        safe = any((folder / f"{SAFETENSORS}{end}").is_file() for end in ("", ".index.json"))
        return [folder / name for name in weight_files(folder, SAFETENSORS if safe else PICKLES)[0]]
    if layout == "gguf":
        return files_in(folder)
    pattern = {"dcp": "*.distcp", "adapter": "adapter_model.*"}.get(layout, "consolidated*")
    return sorted(folder.glob(pattern))


class FolderSource(Source):
    """A folder with config.json and safetensors or pickles, or the folder that `gguf.folder` makes of a GGUF file.

    config_folder: has config.json and the tokenizer, if `folder` has a trainer's state dict alone.
    A checkpoint in MXFP4 is read dequantised, in bf16, but by `read_packed`.
    is_pickled: whether the weights are pickles. types: {tensor: its type in a GGUF file}, {} for other files.
    Raises CheckpointError.
    """

    def __init__(self, folder: Path, config_folder: Path | None = None, *, allow_pickle: bool = False):
        self.folder = folder
        self._config_folder = config_folder or folder
        config = read_json(self._config_folder / "config.json")
        self.config = mxfp4.dequantized_config(config)
        self._reader: Any = reading.open_checkpoint(folder, allow_pickle=allow_pickle)
        self.is_pickled = getattr(self._reader, "single", None) == PICKLES
        if mxfp4.is_mxfp4(config):
            self._reader = mxfp4.MXFP4Reader(self._reader)
            self.packed = self._reader.packed
        self.source, self.headers = self._reader.source, self._reader.headers
        self.types: dict[str, str] = getattr(self._reader, "types", {})

    def read(self, name: str) -> Tensor:
        return self._reader.read(name)

    def read_packed(self, name: str) -> MXFP4Weight:
        weight: MXFP4Weight = self._reader.weight(name, torch.device("cpu"))
        return weight

    def files(self) -> dict[str, bytes | Path]:
        files = config_files(self._config_folder, "original/tokenizer.model")
        if isinstance(self._reader, mxfp4.MXFP4Reader):  # `View` writes its config
            del files["config.json"]
        return {
            **companion_files(self._config_folder, self.folder),
            **companion_files(self.folder),
            **files,
        }
