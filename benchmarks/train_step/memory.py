"""The allocator's figures: what was allocated at most, CUDA graphs included."""

import gc

import torch

GIB = 2**30


def clean(device: str) -> None:
    """Gives back the memory of what nobody refers to any more."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def peak_bytes() -> int:
    """The most that was allocated since the peak was reset, in tensors, with CUDA graphs counted whole.

    A graph's kernels use memory that its capture took and gave back, and keeps from all others in a pool of its own.
    `max_memory_allocated` counts there what is a tensor still, which is next to nothing; here the pool counts.
    """
    whole, live = graph_bytes()
    return torch.cuda.max_memory_allocated() + whole - live


def graph_bytes() -> tuple[int, int]:
    """The pools of CUDA graphs: their bytes, and how many of them are allocated now."""
    pools = [segment for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) != (0, 0)]
    return sum(segment["total_size"] for segment in pools), sum(segment["allocated_size"] for segment in pools)
