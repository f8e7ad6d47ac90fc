"""Writes safetensors files of adapters and heads, which are trained beside a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from ligermodels.checkpoint import saving
from ligermodels.checkpoint.files import write_errors
from ligermodels.checkpoint.weights import TensorInfo
from ligermodels.processes import Processes


def reshard(model: nn.Module) -> None:
    """Reshards parameters that FSDP2 has gathered for a forward pass, in another dtype."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            cast(Any, module).reshard()


def write(folder: str | Path, parameters: Mapping[str, Tensor], weights: str, files: Mapping[str, bytes]) -> Path:
    """Writes {name: parameter} as the file `weights`, and {name: content} beside it; returns the folder.

    The files are written beside `folder` and renamed when complete; other files in it stay. Every rank that has shards
    calls this, and one writes. Raises HubError where the folder cannot be written.
    """
    target = saving.absolute(folder)
    processes = Processes.of_tensors(parameters.values())
    tensors = {name: whole(parameter).cpu().contiguous() for name, parameter in parameters.items()}
    with processes.raise_on_all():
        if processes.is_main:
            headers = {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
            names, size = saving.align(headers, list(headers)), sum(info.nbytes for info in headers.values())
            with write_errors(target), saving.replacing(target, size) as staging:
                values = (tensors[name] for name in names)
                saving.write_file(staging / weights, headers, names, values, {"format": "pt"})
                saving.finish(staging, files)
    return target


def whole(parameter: Any) -> Tensor:
    """A parameter, gathered if FSDP2 shards it; then all ranks call this."""
    gather = getattr(parameter, "full_tensor", None)
    return (parameter if gather is None else gather()).detach()
