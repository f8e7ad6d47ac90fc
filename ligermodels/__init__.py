"""A native zoo of language models built from fused Triton layers.

    import ligermodels
    model = ligermodels.Llama.from_hub("meta-llama/Llama-3.2-1B", dtype=torch.bfloat16, device="cuda")

`ligermodels.layers` composes architectures of one's own, `ligermodels.kernels` holds the operations below them,
`ligermodels.training` the optimizer and what else a loop needs.
Everything is imported on first use: importing the package loads neither triton nor anything that needs a GPU.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ligermodels import kernels, layers, training
    from ligermodels.arch import (
        ARCHS,
        Gemma,
        Gemma2,
        Gemma2Config,
        GemmaConfig,
        Llama,
        LlamaConfig,
        LlamaVision,
        LlamaVisionConfig,
        Mistral,
        MistralConfig,
        Mixtral,
        MixtralConfig,
        Phi3,
        Phi3Config,
        Qwen2,
        Qwen2Config,
        Qwen2VL,
        Qwen2VLConfig,
        load,
    )
    from ligermodels.integrations.transformers import from_transformers
    from ligermodels.text import Tokenizer
    from ligermodels.vision import Processor

from ligermodels.errors import (
    CheckpointError,
    ConfigError,
    HubError,
    InputError,
    LigermodelsError,
    TokenizerError,
)

__version__ = "0.1.0"

_ARCH = (
    "ARCHS",
    "Gemma",
    "Gemma2",
    "Gemma2Config",
    "GemmaConfig",
    "Llama",
    "LlamaConfig",
    "LlamaVision",
    "LlamaVisionConfig",
    "Mistral",
    "MistralConfig",
    "Mixtral",
    "MixtralConfig",
    "Phi3",
    "Phi3Config",
    "Qwen2",
    "Qwen2Config",
    "Qwen2VL",
    "Qwen2VLConfig",
    "load",
)
_HOMES = {
    "Processor": "ligermodels.vision",
    "Tokenizer": "ligermodels.text",
    "from_transformers": "ligermodels.integrations.transformers",
    **dict.fromkeys(_ARCH, "ligermodels.arch"),
}

__all__ = [
    "ARCHS",
    "CheckpointError",
    "ConfigError",
    "Gemma",
    "Gemma2",
    "Gemma2Config",
    "GemmaConfig",
    "HubError",
    "InputError",
    "LigermodelsError",
    "Llama",
    "LlamaConfig",
    "LlamaVision",
    "LlamaVisionConfig",
    "Mistral",
    "MistralConfig",
    "Mixtral",
    "MixtralConfig",
    "Phi3",
    "Phi3Config",
    "Processor",
    "Qwen2",
    "Qwen2Config",
    "Qwen2VL",
    "Qwen2VLConfig",
    "Tokenizer",
    "TokenizerError",
    "from_transformers",
    "kernels",
    "layers",
    "load",
    "training",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in ("kernels", "layers", "training"):
        return importlib.import_module(f"ligermodels.{name}")
    raise AttributeError(f"module 'ligermodels' has no attribute {name!r}")
