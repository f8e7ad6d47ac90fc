"""A native zoo of language models built from fused Triton layers.

    import ligermodels
    model = ligermodels.Llama.from_hub("meta-llama/Llama-3.2-1B", dtype=torch.bfloat16, device="cuda")

`ligermodels.layers` has the modules for an architecture of your own, `ligermodels.kernels` the operations below them,
`ligermodels.training` the optimizer and other parts of a training loop. `ligermodels.train` tunes a model on examples.
Everything is imported on first use: importing the package does not import torch or triton.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ligermodels import kernels, layers, training
    from ligermodels.arch import *  # noqa: F403  # the architectures, their configs, ARCHS and load
    from ligermodels.integrations.transformers import from_transformers
    from ligermodels.recipes.entry import train
    from ligermodels.text import Tokenizer
    from ligermodels.vision import Processor

from ligermodels.errors import (
    CheckpointError,
    ConfigError,
    HubError,
    InputError,
    LigermodelsError,
    TokenizerError,
    TrainingError,
)

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "HubError",
    "InputError",
    "LigermodelsError",
    "Processor",
    "Tokenizer",
    "TokenizerError",
    "TrainingError",
    "from_transformers",
    "kernels",
    "layers",
    "train",
    "training",
]

_HOMES = {
    "Processor": "ligermodels.vision",
    "Tokenizer": "ligermodels.text",
    "from_transformers": "ligermodels.integrations.transformers",
    "train": "ligermodels.recipes.entry",
}


def __getattr__(name: str) -> Any:
    """Packages, what is in `_HOMES`, and what ligermodels.arch makes public: the architectures, their configs, load."""
    if name in ("kernels", "layers", "training"):
        return importlib.import_module(f"ligermodels.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if not name.startswith("_"):
        arch = importlib.import_module("ligermodels.arch")
        if name in arch.PUBLIC:
            return getattr(arch, name)
    raise AttributeError(f"module 'ligermodels' has no attribute {name!r}")


def __dir__() -> list[str]:
    from ligermodels import arch

    return sorted({*__all__, *arch.PUBLIC})
