"""Prefill and decode: `generate` returns whole rows, `generate_iter` a stream. The arguments are those of transformers.

options.py merges the options of a call; request.py checks it; processors.py goes from logits to the next token;
stopping.py has stop strings and criteria; loop.py the loop.
"""

from ligermodels.generation.loop import GenerateOutput, Streamer, generate, generate_iter
from ligermodels.generation.processors import LogitsProcessor

__all__ = ["GenerateOutput", "LogitsProcessor", "Streamer", "generate", "generate_iter"]
