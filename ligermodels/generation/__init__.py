"""Prefill and decode: `generate` returns whole rows, `generate_iter` a stream, `generate_many` takes a list of prompts.
The arguments are those of transformers.

api.py has these functions; options.py the options of a call; request.py checks a call; engine.py has the loop and the
engine of one batch, continuous.py that of many prompts; graphs.py the step that runs as a CUDA graph; drafters.py
proposes next tokens; processors.py goes from logits to the next token; stopping.py has stop strings and criteria. All
but the options are imported on first use, with torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ligermodels.generation.api import (
        GenerateOutput,
        generate,
        generate_batch,
        generate_iter,
        generate_many,
        generate_many_iter,
    )

__all__ = ["GenerateOutput", "generate", "generate_batch", "generate_iter", "generate_many", "generate_many_iter"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ligermodels.generation' has no attribute {name!r}")
    return getattr(importlib.import_module("ligermodels.generation.api"), name)
