"""An open checkpoint of any layout under Hugging Face's names (`Source`), and checked against its model (`View`)."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligermodels.arch import ARCHS, TEXTS, CausalLM
from ligermodels.checkpoint import weights
from ligermodels.checkpoint.files import json_bytes, lenient_json
from ligermodels.checkpoint.mxfp4 import MXFP4Weight
from ligermodels.checkpoint.weights import TensorInfo
from ligermodels.errors import CheckpointError, ConfigError, MismatchError, config_of


class Source:
    """A `weights.Reader` with a config and files. Each layout is a subclass.

    source: the path, for messages. headers: {tensor: dtype and shape}, known without reading it.
    config: the contents of config.json.
    packed: weights of experts that are in MXFP4 in the file; their headers and `read` have them dequantised.
    of_memory: with the names of the model in memory, rows are in the order of memory, too.
    """

    packed: Collection[str] = ()
    of_memory: bool = False
    source: str
    headers: Mapping[str, TensorInfo]
    config: dict[str, Any]

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU, mapped from the file where that is possible. It must not be written to."""
        raise NotImplementedError

    def read_packed(self, name: str) -> MXFP4Weight:
        """One of `packed` as it is in the file, [E, N, K] with the rows of the file, on the CPU. Raises
        CheckpointError for scales that are NaN."""
        raise NotImplementedError

    def files(self) -> dict[str, bytes | Path]:
        """The other files of the model: {name: bytes, or the file to copy}."""
        raise NotImplementedError


class View(Source):
    """`origin` under the names that Hugging Face has on disk, cast to `dtype` if one is given; to 16 bits without the
    weights of layers with `keep_fp32`, which stay as they are stored.

    text_only: of a model that reads images, its text, where the zoo has a class for that.
    model: what the config asks for, on the meta device. on_read: called with the bytes of each tensor that was read.
    What a save would copy is kept, such as mtp.* (`CausalLM.COPIED_ON_SAVE`). Tied copies and other names that the
    architecture ignores are dropped. Reading a tensor that is joined from several and cast needs memory for both the
    joined and the cast tensor.
    Raises ConfigError, MismatchError if the weights do not fit the model, CheckpointError if a tied head differs.
    """

    def __init__(self, origin: Source, *, dtype: torch.dtype | None = None, text_only: bool = False):
        self.origin, self.source, self.config = origin, origin.source, origin.config
        self.on_read: Callable[[int], object] = lambda nbytes: None
        self.model, names = model_of(origin, text_only=text_only)
        check_fit(origin, self.model, names)
        weights.check_tied(self.model, names, origin)
        self._renamed = weights.Renamed(self.model, origin, names.table, self.model.DISK_NAMES)
        headers = dict(self._renamed.headers)
        self._carried = [name for name in origin.headers if self.model.carries(name)]
        headers |= {name: origin.headers[name] for name in self._carried}
        self.packed = [name for name in origin.packed if name in headers]
        exact = self.model.names_in_fp32(self.model.DISK_NAMES) if dtype in (torch.bfloat16, torch.float16) else ()
        self.headers = {
            name: TensorInfo(info.dtype if dtype is None or name in exact else dtype, info.shape)
            for name, info in headers.items()
        }
        if dtype is not None:
            name = str(dtype).removeprefix("torch.")
            self.config = {**origin.config, "dtype": name, "torch_dtype": name}

    def read(self, name: str) -> Tensor:
        reader = self.origin if name in self._carried else self._renamed
        tensor = reader.read(name).to(self.headers[name].dtype)
        self.on_read(tensor.nbytes)
        return tensor

    def read_packed(self, name: str) -> MXFP4Weight:
        weight = self.origin.read_packed(name)
        self.on_read(self.headers[name].nbytes)
        return weight

    def files(self) -> dict[str, bytes | Path]:
        """The files of the source and a config.json: its own, byte for byte, unless the dtype changes."""
        files, config = self.origin.files(), json_bytes(self.config)
        if self.config is self.origin.config:
            return {"config.json": config, **files}
        return {**files, "config.json": config}

    def generation_config(self) -> dict[str, Any]:
        """The contents of generation_config.json without the version that wrote it; {} if there is none."""
        content = self.files().get("generation_config.json", b"{}")
        text = content if isinstance(content, bytes) else content.read_bytes()
        return {**lenient_json(text.decode()), "transformers_version": None}


def model_of(source: Source, *, text_only: bool = False) -> tuple[CausalLM, weights.Names]:
    """(the model that the config asks for, on the meta device; the source's names). Raises ConfigError."""
    model = model_on_meta(source.config, source.source, text_only=text_only)
    names = model.names_on_disk
    if source.of_memory:
        names = replace(names, also=({}, *names.also))
    return model, names.found(model, source.headers)


def model_on_meta(config: Mapping[str, Any], where: str, *, text_only: bool = False) -> CausalLM:
    """The model that the contents of a config.json ask for; with `text_only`, without images. Raises ConfigError."""
    model_type = config.get("model_type")
    if text_only:
        model_type = TEXTS.get(str(model_type), model_type)
    if not isinstance(model_type, str) or model_type not in ARCHS:
        raise ConfigError(f"{where} has model_type {model_type!r}; supported: {', '.join(ARCHS)}")
    with config_of(where):
        return ARCHS[model_type].from_config(config, device="meta")


def check_fit(source: Source, model: CausalLM, names: weights.Names) -> None:
    """Raises MismatchError where names or shapes of the weights do not fit the model of their config."""
    try:
        weights.check(model, names, source.headers, source.source)
    except CheckpointError as error:
        raise MismatchError(str(error)) from error
