"""The interfaces of the layouts: a `Source` is read, a `Target` is written."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ligermodels.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from ligermodels.checkpoint.weights import TensorInfo


class MismatchError(CheckpointError):
    """Weights that do not fit the model of their config, or a result that differs from its source."""


class Source:
    """An open checkpoint of any layout, under Hugging Face's names: a `weights.Reader` with a config and files.

    source: where it was read from, for messages. headers: every tensor, known without reading it.
    places: {tensor: the weight file that holds it}; None where tensors are cut across files.
    """

    source: str
    headers: Mapping[str, "TensorInfo"]
    places: Mapping[str, str] | None = None

    def read(self, name: str) -> "Tensor":
        """The tensor on the CPU, mapped from the file where that is possible: not to be written to."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """The contents of a config.json."""
        raise NotImplementedError

    def files(self) -> dict[str, bytes | Path]:
        """The other files of the model: {name: bytes, or the file to copy}."""
        raise NotImplementedError


class Target(Protocol):
    """A checkpoint to be written, planned from headers."""

    headers: Mapping[str, "TensorInfo"]

    def files(self) -> dict[str, bytes | Path]:
        """The files to write beside the weights: {name: bytes, or the file to copy}."""

    def write(self, folder: Path) -> None:
        """Writes the weights into `folder`, which is empty, one tensor at a time. Raises OSError."""
