"""The same bits in each run on the same GPUs."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Inside, runs of the same code on the same inputs, GPUs and versions compute the same bits.

    Our kernels do so anyway. torch's engines of attention and cuBLAS do with `torch.use_deterministic_algorithms(True)`
    and with a fixed workspace (CUBLAS_WORKSPACE_CONFIG, which is set unless it is): enter before the first matmul of
    the process. An op of torch that cannot raises RuntimeError. New memory is not filled with NaN, which torch's mode
    does by default: no kernel here reads memory that it has not written.

    Source: https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    memory: Any = torch.utils.deterministic
    mode, filled = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        memory.fill_uninitialized_memory = filled
