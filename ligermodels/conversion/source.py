"""What every layout is read as."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from ligermodels.checkpoint import weights
from ligermodels.checkpoint.weights import TensorInfo
from ligermodels.errors import CheckpointError


class MismatchError(CheckpointError):
    """Weights that do not match the model of their config, or a result that is not what was to be written."""


class Described(Protocol):
    """What is known of a checkpoint before a weight is read."""

    @property
    def source(self) -> str:
        """Where it was read from, for messages."""

    @property
    def headers(self) -> Mapping[str, TensorInfo]:
        """Every tensor, under Hugging Face's name."""

    def config(self) -> dict[str, Any]:
        """The contents of a config.json."""


class Source(weights.Reader, Described, Protocol):
    """An open checkpoint of any layout."""

    def files(self) -> dict[str, bytes | Path]:
        """What belongs to the model beside its weights: {name: bytes, or the file to copy}."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...
