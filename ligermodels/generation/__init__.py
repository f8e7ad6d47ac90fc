"""Prefill and decode: `generate` returns whole rows, `generate_iter` a stream, `generate_many` takes a list of prompts.
The arguments are those of transformers.

options.py merges the options of a call; request.py checks it; processors.py goes from logits to the next token;
stopping.py has stop strings and criteria; engine.py the decode step as a CUDA graph; speculation.py guesses of the next
tokens; loop.py the loop of one batch; batching.py continuous batching. All but the options are imported on first use,
with torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ligermodels.generation.batching import generate_many, generate_many_iter
    from ligermodels.generation.loop import GenerateOutput, Streamer, generate, generate_iter
    from ligermodels.generation.processors import LogitsProcessor

__all__ = [
    "GenerateOutput",
    "LogitsProcessor",
    "Streamer",
    "generate",
    "generate_iter",
    "generate_many",
    "generate_many_iter",
]
_HOMES = {
    "LogitsProcessor": "processors",
    "generate_many": "batching",
    "generate_many_iter": "batching",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ligermodels.generation' has no attribute {name!r}")
    home = importlib.import_module(f"ligermodels.generation.{_HOMES.get(name, 'loop')}")
    return getattr(home, name)
