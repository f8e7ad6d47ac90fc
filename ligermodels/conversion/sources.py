"""What can be converted: a folder in one of several layouts, seen as named tensors, a config and some files."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor

from ligermodels.arch import ARCHS, CausalLM
from ligermodels.checkpoint import hub, reading, weights
from ligermodels.checkpoint.weights import TensorInfo
from ligermodels.conversion import dcp, lora, meta, mistral, native
from ligermodels.conversion.source import Described, MismatchError, Source
from ligermodels.errors import CheckpointError, ConfigError, HubError, InputError


class FolderSource:
    """A folder with config.json and safetensors, or with pickles. What an earlier version packed is seen unpacked.

    config_folder: holds config.json and the tokenizer, where `folder` has a trainer's state dict alone.
    places: {tensor: weight file that holds it}. kind: what is unusual about it, "pickled" or "packed".
    Raises CheckpointError.
    """

    def __init__(self, folder: Path, config_folder: Path | None = None, *, allow_pickle: bool = False):
        self.folder, self.source = folder, str(folder)
        self._small_files = config_folder or folder
        self._config = reading.read_json(self._small_files / "config.json")
        opened = reading.open_checkpoint(folder, allow_pickle=allow_pickle)
        packed = native.is_native(opened.headers)
        self._reader = native.Unpacked(opened, self._config.get("model_type")) if packed else opened
        self.headers: Mapping[str, TensorInfo] = self._reader.headers
        self.places = self._reader.places
        self.kind = "packed" if packed else "pickled" if isinstance(opened, reading.PickleReader) else None

    def read(self, name: str) -> Tensor:
        return self._reader.read(name)

    def config(self) -> dict[str, Any]:
        return self._config

    def files(self) -> dict[str, bytes | Path]:
        names = ("config.json", "generation_config.json", "original/tokenizer.model")
        return {
            **reading.companion_files(self._small_files, self.folder),
            **reading.companion_files(self.folder),
            **{name: self._small_files / name for name in names if (self._small_files / name).is_file()},
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._reader.__exit__(*exc_info)


class View:
    """A source under the names that Hugging Face has on disk, cast to `dtype` if that is given; a source itself.

    memory: under the names of the model in memory instead, which are transformers' as well. Tied copies and names that
    the architecture ignores are left out. A read holds the tensor that it returns and, where that is both joined from
    others and cast, the tensor before the cast.
    arch, model: what the config asks for; the model is on the meta device.
    Raises ConfigError, MismatchError if the weights do not fit the model, CheckpointError if a tied head differs.
    """

    def __init__(self, source: Source, *, memory: bool = False, dtype: torch.dtype | None = None):
        self.origin, self.source, self.dtype = source, source.source, dtype
        self.model, table = model_of(source)
        self.arch = type(self.model)
        check_fit(source, self.model, table)
        with reading.read_errors(source.source):
            weights.check_tied(self.model, table, source, self.model.tied_weights)
        self._relaid = weights.Relaid(self.model, source, table, {} if memory else self.arch.DISK_NAMES)
        self.headers: Mapping[str, TensorInfo] = {
            name: TensorInfo(dtype or info.dtype, info.shape) for name, info in self._relaid.headers.items()
        }

    def read(self, name: str) -> Tensor:
        with reading.read_errors(f"{self.source}: {name}"):  # a fault of the source, whatever is being written
            tensor = self._relaid.read(name)
        return tensor.to(self.dtype or tensor.dtype)

    def config(self) -> dict[str, Any]:
        config = self.origin.config()
        if self.dtype is None:
            return config
        name = str(self.dtype).removeprefix("torch.")
        return {**config, "dtype": name, "torch_dtype": name}

    def files(self) -> dict[str, bytes | Path]:
        """With a config.json: the source's own, to the byte, unless the dtype changes."""
        files = {"config.json": reading.json_bytes(self.config()), **self.origin.files()}
        if self.dtype is not None:
            files["config.json"] = reading.json_bytes(self.config())
        return files

    def places(self) -> dict[str, str] | None:
        """{tensor: the weight file of the source that holds it, or its first part}, where that is known."""
        places = getattr(self.origin, "places", None)
        if places is None:
            return None
        return {name: places[self._relaid.boxes(name)[0].source] for name in self.headers}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.origin.__exit__(*exc_info)


Kind = Literal["folder", "meta", "mistral", "dcp", "adapter"]
KINDS: dict[Kind, str] = {
    "folder": "Hugging Face",
    "meta": "Meta's own (consolidated.NN.pth, params.json)",
    "mistral": "Mistral's own (consolidated*.safetensors, params.json)",
    "dcp": "torch distributed checkpoint",
    "adapter": "LoRA adapter, as PEFT saves it",
}
"""In words."""


def locate(
    src: str | Path, *, revision: str | None = None, local_files_only: bool = False, allow_pickle: bool = False
) -> Path:
    """The folder of a checkpoint that is given as one, or as a repository of the Hub; see `hub.resolve`.

    Raises HubError, and CheckpointError where `src` is a file.
    """
    if not str(src):
        raise InputError("the name of a checkpoint is empty: give a folder, or a repository of the Hub as owner/name")
    path = os.path.expanduser(src)
    if os.path.isfile(path):
        with reading.read_errors(path), open(path, "rb") as file:
            gguf = file.read(4) == b"GGUF"
        raise CheckpointError(
            f"{src} is a GGUF file: llama.cpp reads it.\n  Next: give the checkpoint that it was made from."
            if gguf
            else f"{src} is a file. Give the folder that holds the checkpoint."
        )
    try:
        return hub.resolve(src, revision=revision, local_files_only=local_files_only, allow_pickle=allow_pickle)
    except HubError as error:
        if not os.path.isdir(path):
            error.add_note(f"  If a folder was meant: there is none at {os.path.abspath(path)}.")
        raise


def kind_of(folder: Path) -> Kind:
    """What `folder` holds, told from the names of its files; what is like nothing else counts as "folder"."""
    with reading.read_errors(folder):
        names = {path.name.removesuffix(".index.json") for path in folder.iterdir()}
    if reading.SAFETENSORS in names or {reading.PICKLES, "config.json"} <= names:
        return "folder"
    if dcp.METADATA in names:
        return "dcp"
    consolidated = {Path(name).suffix for name in names if name.startswith("consolidated")}
    if consolidated & {".pth", ".safetensors"} and (meta.PARAMS in names or "config.json" not in names):
        return "meta" if ".pth" in consolidated else "mistral"
    return "adapter" if lora.CONFIG in names else "folder"


def takes_config(folder: Path) -> bool:
    """Whether its config.json may be elsewhere: a distributed checkpoint, or a state dict alone."""
    kind = kind_of(folder)
    return kind == "dcp" or (kind == "folder" and not os.path.lexists(folder / "config.json"))


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
    Meta's files, see there. adapter: a LoRA adapter to merge. Raises CheckpointError, HubError, InputError.
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
        source = dcp.DcpSource(folder, config)
    else:
        source = FolderSource(folder, config, allow_pickle=allow_pickle)
    return source if adapter is None else lora.MergedSource(View(source), adapter, allow_pickle=allow_pickle)


def source_files(folder: Path, *, config: Path | None = None, adapter: Path | None = None) -> list[Path]:
    """The files that decide what a conversion gives, for its receipt."""
    kind = kind_of(folder)
    found = weight_paths(folder)
    if kind == "dcp":
        found.insert(0, folder / dcp.METADATA)
    found.append(folder / meta.PARAMS if kind in ("meta", "mistral") else (config or folder) / "config.json")
    if adapter is not None:
        found += [path for path in sorted(adapter.glob("adapter_*")) if path.is_file()]
    return found


def weight_paths(folder: Path) -> list[Path]:
    """The files that hold the weights of a checkpoint of any kind."""
    kind = kind_of(folder)
    if kind == "folder":
        safe = any((folder / f"{reading.SAFETENSORS}{end}").is_file() for end in ("", ".index.json"))
        single = reading.SAFETENSORS if safe else reading.PICKLES
        return [folder / name for name in reading.weight_files(folder, single)[0]]
    pattern = {"dcp": "*.distcp", "adapter": "adapter_model.*"}.get(kind, "consolidated*")
    return sorted(folder.glob(pattern))


def model_of(source: Described) -> tuple[CausalLM, weights.Table]:
    """(the model that the source's config asks for, on the meta device; the table of the source's layout).

    Raises ConfigError.
    """
    config = source.config()
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHS:
        raise ConfigError(f"{source.source} has model_type {model_type!r}; the zoo holds {', '.join(ARCHS)}")
    arch = ARCHS[model_type]
    model = arch.from_config(config, device="meta")
    return model, weights.layout(model, arch.DISK_NAMES, source.headers, also=arch.ALSO_READ)


def check_fit(source: Described, model: CausalLM, table: weights.Table) -> None:
    """Raises MismatchError where the weights do not fit the model of their config; names and shapes alone count."""
    try:
        weights.check(model, table, source.headers, ignore=model.IGNORE, tied=model.tied_weights, where=source.source)
    except CheckpointError as error:
        raise MismatchError(str(error)) from error
