"""Prefill and decode: `generate` returns whole rows, `generate_iter` a stream. The arguments are those of transformers.

options.py merges the options of a call; request.py checks it; processors.py goes from logits to the next token;
stopping.py has stop strings and criteria; graph.py the decode step as a CUDA graph; speculation.py who guesses ahead;
loop.py the loop. All but the options are imported on first use, with torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ligermodels.generation.graph import release_graphs
    from ligermodels.generation.loop import GenerateOutput, Streamer, generate, generate_iter
    from ligermodels.generation.processors import LogitsProcessor

__all__ = ["GenerateOutput", "LogitsProcessor", "Streamer", "generate", "generate_iter", "release_graphs"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ligermodels.generation' has no attribute {name!r}")
    home = {"LogitsProcessor": "processors", "release_graphs": "graph"}.get(name, "loop")
    return getattr(importlib.import_module(f"ligermodels.generation.{home}"), name)
